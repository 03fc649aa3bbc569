//! Which matrices of a model keep their four bits on a GPU.
//!
//! **Owns** that choice: matrices that are one product there (queries, keys and values; gate and up) keep them together or not at all.
//! **Never** reads a weight, or touches a device.

use pagedd_kernels::{
    DecoderForms, FOUR_BIT_TILE, FOUR_BIT_UNIT, Form, LayerForms, four_bit_bytes, is_four_bit,
};
use pagedd_model::{LayerTensor, ModelSource, TensorRole};

/// Alignment of a tensor in the weights arena of a GPU, in bytes.
const ALIGN: u64 = 256;

/// The forms of a model's matrices: of four bits where all that are one product are in such a type and whole tiles, of 16 bits otherwise.
#[must_use]
pub fn forms(source: &ModelSource) -> DecoderForms {
    let config = source.config();
    let form = |roles: &[TensorRole], outputs: usize| {
        let fits = |&role: &TensorRole| {
            source.tensor(role).is_some_and(|tensor| {
                is_four_bit(tensor.ty)
                    && tensor.columns.is_multiple_of(FOUR_BIT_UNIT)
                    && tensor.rows.is_multiple_of(outputs)
            })
        };
        if roles.iter().all(fits) { Form::FourBit } else { Form::Half }
    };
    let layer = |index| {
        use LayerTensor as T;
        let of = |tensor| TensorRole::Layer(index, tensor);
        LayerForms {
            qkv: form(&[of(T::AttnQ), of(T::AttnK), of(T::AttnV)], FOUR_BIT_TILE),
            attn_output: form(&[of(T::AttnOutput)], FOUR_BIT_TILE),
            // A tile has as many of each.
            gate_up: form(&[of(T::FfnGate), of(T::FfnUp)], FOUR_BIT_TILE / 2),
            ffn_down: form(&[of(T::FfnDown)], FOUR_BIT_TILE),
        }
    };
    let output = if config.tied_embeddings { TensorRole::TokenEmbd } else { TensorRole::Output };
    DecoderForms {
        layers: (0..config.layers as u32).map(layer).collect(),
        output: form(&[output], FOUR_BIT_TILE),
    }
}

/// Bytes of a model's weights on a GPU: matrices in these forms, the embedding in bfloat16, vectors in float32.
#[must_use]
pub fn weight_bytes(source: &ModelSource, forms: &DecoderForms) -> u64 {
    let config = source.config();
    let (hidden, ffn, query, kv) = (config.hidden, config.feed_forward, config.query_dim(), config.kv_dim());
    let vector = |len: usize| (size_of::<f32>() as u64 * len as u64).next_multiple_of(ALIGN);
    let matrix = |form, outputs: usize, inputs: usize| {
        let bytes = match form {
            Form::Half => size_of::<u16>() as u64 * outputs as u64 * inputs as u64,
            Form::FourBit => four_bit_bytes(outputs, inputs).unwrap_or(0) as u64,
        };
        bytes.next_multiple_of(ALIGN)
    };
    let bias = if config.qkv_bias { vector(query + 2 * kv) } else { 0 };
    let layer = |forms: &LayerForms| {
        2 * vector(hidden)
            + bias
            + matrix(forms.qkv, query + 2 * kv, hidden)
            + matrix(forms.attn_output, hidden, query)
            + matrix(forms.gate_up, 2 * ffn, hidden)
            + matrix(forms.ffn_down, hidden, ffn)
    };
    // Where the embedding is the output matrix as well and that has four bits, it lies there twice.
    let output = if config.tied_embeddings && forms.output == Form::Half {
        0
    } else {
        matrix(forms.output, config.vocab, hidden)
    };
    let layers = forms.layers.iter().map(layer).sum::<u64>();
    matrix(Form::Half, config.vocab, hidden) + vector(hidden) + layers + output
}

#[cfg(test)]
mod tests;
