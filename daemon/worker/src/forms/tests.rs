use std::path::Path;

use pagedd_core::TensorType;
use pagedd_model::testing::{TinyModel, write_gguf};

use super::*;

fn forms_of(model: &TinyModel) -> (DecoderForms, u64) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    write_gguf(&path, 7, model).unwrap();
    let source = ModelSource::open(&path).unwrap();
    let forms = forms(&source);
    let bytes = weight_bytes(&source, &forms);
    (forms, bytes)
}

#[test]
fn matrices_keep_four_bits_where_they_are_whole_tiles_and_have_such_a_type() {
    let four = LayerForms {
        qkv: Form::FourBit,
        attn_output: Form::FourBit,
        gate_up: Form::FourBit,
        ffn_down: Form::FourBit,
    };
    for ty in [TensorType::Q4_0, TensorType::Q4_1] {
        let (forms, _) = forms_of(&TinyModel { ty, ..TinyModel::default() });
        // Rows of 96 are no whole units of 64.
        let layer = LayerForms { ffn_down: Form::Half, ..four };
        assert_eq!(forms, DecoderForms { layers: vec![layer; 2], output: Form::FourBit }, "{ty}");
    }
    let whole = TinyModel { hidden: 256, feed_forward: 512, head_dim: 64, ..TinyModel::default() };
    let (forms, bytes) = forms_of(&TinyModel { ty: TensorType::Q4_K, ..whole.clone() });
    assert_eq!(forms, DecoderForms { layers: vec![four; 2], output: Form::FourBit });
    // The output matrix is the embedding, which lies there as elements as well.
    let (embedding, layer) = (272 * 256, 256 * (512 + 256) + 3 * 256 * 512);
    assert_eq!(bytes, 2 * embedding + (embedding + 2 * layer) * 20 / 32 + 4 * 5 * 256);
    for ty in [TensorType::F32, TensorType::Q5_0, TensorType::Q8_0, TensorType::Q6_K] {
        let (forms, bytes) = forms_of(&TinyModel { ty, ..whole.clone() });
        assert_eq!(forms, DecoderForms::halves(2), "{ty}");
        assert_eq!(bytes, 2 * (embedding + 2 * layer) + 4 * 5 * 256, "{ty}");
    }
}

#[test]
fn a_generated_model_in_four_bits_takes_five_eighths_of_a_byte_a_weight_but_for_its_embedding() {
    let source = ModelSource::open(Path::new("synthetic:llama-2-7b:q4_1")).unwrap();
    let forms = forms(&source);
    let (embedding, vectors) = (32_000 * 4096, 65 * 4096);
    let matrices = 6_738_415_616 - embedding - vectors;
    assert_eq!(weight_bytes(&source, &forms), 2 * embedding + matrices * 20 / 32 + 4 * vectors);
}
