//! Steps of few rows, whose products are kernels of their own, against an exact decoder, whose products are the same however many rows there are.

use std::f64::consts::SQRT_2;

use pagedd_core::BlockId;

use super::{Bench, Extent, Found, four_bit, worst};
use crate::Pairing;
use crate::cpu::kv::KvRow;
use crate::cuda::small_rows::takes;
use crate::cuda::{
    CudaError, Decoder, DecoderLimits, DecoderMemory, DecoderPlaces, DecoderShape, DecoderStep,
    DeviceKvLayout, GemmOutput, Half, LayerPlaces, Place, SharedBuffer, Stream, TokenSource, fill_normal,
};
use crate::e4m3::DeviceKvElement;
use crate::four_bit::{DecoderForms, Form, LayerForms};

/// Tokens of a row: the step of the third is a recorded one.
const STEPS: u32 = 3;
const VOCABULARY: usize = 1024;
const BLOCKS: u32 = 16;
/// A block for each.
const MOST_ROWS: usize = BLOCKS as usize;

pub(super) fn check<T: Half + GemmOutput>(bench: &mut Bench, extent: Extent) -> Result<(), CudaError> {
    let shape = shape();
    if !takes(bench.stream.device(), shape.hidden, 1) {
        return Ok(());
    }
    let rows: &[usize] = if extent == Extent::Full { &[1, 2, 4, 6, 8, 12, 16] } else { &[1, 4] };
    for form in [Form::Half, Form::FourBit] {
        let mut few = decoder::<T>(&bench.stream, &shape, form, false)?;
        let mut exact = decoder::<T>(&bench.stream, &shape, form, true)?;
        let all = logits(&bench.stream, &mut exact, MOST_ROWS)?;
        // Roundings of a few layers, on logits of about 1. The exact products round weights of four bits to elements and those of few rows do not: that
        // is as much again, and independent.
        let roundings = match form {
            Form::Half => 16.0,
            Form::FourBit => 16.0 * SQRT_2,
        };
        for &rows in rows {
            let [got, want] = [&mut few, &mut exact].map(|decoder| logits(&bench.stream, decoder, rows));
            let (got, want) = (got?, want?);
            let allowed = want.iter().map(|&logit| (f64::from(logit), roundings * T::ROUNDING));
            let error = worst(&got, f64::from, allowed);
            let case = format!("{} steps of {rows} rows, {form:?}", T::NAME);
            bench.report("few rows", case, Found::Error(error));
            let count = want.iter().zip(&all).filter(|(one, other)| one.to_bits() != other.to_bits()).count();
            let case = format!("{} {rows} rows among {MOST_ROWS}, exact, {form:?}, bits", T::NAME);
            bench.report("few rows", case, Found::Different { count, of: want.len() });
        }
    }
    Ok(())
}

fn shape() -> DecoderShape {
    DecoderShape {
        layers: 3,
        hidden: 576,
        ffn: 1536,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        vocabulary: VOCABULARY,
        tied: false,
        bias: true,
        epsilon: 1e-5,
        frequencies: (0..32).map(|i| 1.0 / (1.0 + i as f32)).collect(),
        magnitude: 1.0,
        pairing: Pairing::Halves,
    }
}

/// A decoder with random matrices, those of its layers and the output of this form; norms are ones, biases zeros.
fn decoder<T: Half + GemmOutput>(
    stream: &Stream,
    shape: &DecoderShape,
    form: Form,
    exact: bool,
) -> Result<Decoder<T>, CudaError> {
    let layer = LayerForms { qkv: form, attn_output: form, gate_up: form, ffn_down: form };
    let forms = DecoderForms { layers: vec![layer; shape.layers], output: form };
    let places = DecoderPlaces::new(shape, &forms)?;
    let layout = DeviceKvLayout::blocks_outermost(
        shape.layers,
        shape.kv_heads,
        shape.head_dim,
        16,
        DeviceKvElement::Half,
    )?;
    let mut weights = SharedBuffer::create(stream.device(), places.bytes)?;
    let mut kv = SharedBuffer::create(stream.device(), layout.arena_bytes(BLOCKS)?)?;
    fill_normal::<T>(stream, 7, 0.04, &mut weights.all_mut().part(0..places.bytes)?.cast()?)?;
    kv.all_mut().fill_bytes(stream, 0xff)?;
    if form == Form::FourBit {
        let of_layer = |layer: &LayerPlaces| {
            let LayerPlaces { qkv, attn_output, gate_up, ffn_down, .. } = *layer;
            [(qkv, false), (attn_output, false), (gate_up, true), (ffn_down, false)]
        };
        let all = places.layers.iter().flat_map(of_layer).chain([(places.output, false)]);
        for (seed, (matrix, interleaved)) in all.enumerate() {
            let rows = four_bit::rows(seed as u32, 0.04, matrix.shape);
            let tiles = four_bit::tiles(&rows, matrix.shape.inputs, interleaved)?;
            let place = matrix.place();
            weights.all_mut().part(place.at..place.at + place.len)?.copy_from(stream, &tiles)?;
        }
    }
    let mut set = |place: Place, value: f32| -> Result<(), CudaError> {
        let bytes = place.at..place.at + place.len * size_of::<f32>();
        weights.all_mut().part(bytes)?.cast::<f32>()?.copy_from(stream, &vec![value; place.len])
    };
    set(places.output_norm, 1.0)?;
    for layer in &places.layers {
        set(layer.attn_norm, 1.0)?;
        set(layer.ffn_norm, 1.0)?;
        if let Some(bias) = layer.bias {
            set(bias, 0.0)?;
        }
    }
    let limits = DecoderLimits {
        rows: MOST_ROWS,
        tokens: MOST_ROWS,
        wanted: MOST_ROWS,
        draws: MOST_ROWS,
        ranks: 1,
        adjustments: 1,
        context: 16,
        blocks: BLOCKS,
        exact,
    };
    Decoder::new(stream, shape.clone(), layout, DecoderMemory { weights, forms, kv, offset: 0 }, limits)
}

/// Logits of each row's last token.
fn logits<T: Half + GemmOutput>(
    stream: &Stream,
    decoder: &mut Decoder<T>,
    rows: usize,
) -> Result<Vec<f32>, CudaError> {
    let tables: Vec<[BlockId; 1]> = (0..BLOCKS).map(|block| [BlockId(block)]).collect();
    let wanted: Vec<u32> = (0..rows as u32).collect();
    for position in 0..STEPS {
        let all: Vec<KvRow<'_>> =
            tables[..rows].iter().map(|table| KvRow { first_position: position, tokens: 1, table }).collect();
        let tokens: Vec<TokenSource> = wanted
            .iter()
            .map(|row| TokenSource::Known((row * 37 + position * 11) % VOCABULARY as u32))
            .collect();
        let step = DecoderStep { copies: &[], rows: &all, decoded: rows, tokens: &tokens, wanted: &wanted };
        decoder.forward(&step)?;
    }
    decoder.logits().part(0..rows * VOCABULARY)?.to_vec(stream)
}
