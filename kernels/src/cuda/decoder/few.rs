//! Layers of a step of few rows: products that norm, activate and add in the same launch.
//!
//! **Owns** which of a step's launches are one. **Never** serves an exact decoder: how such products add up depends on how many rows there are.

use super::DecoderMemory;
use super::forward::{Work, matrix, tiles, view};
use super::products::Order;
use super::shape::{DecoderPlaces, DecoderShape, LayerPlaces, MatrixPlace, Place};
use crate::cuda::buffer::Buffer;
use crate::cuda::error::CudaError;
use crate::cuda::four_bit::{self, Split, takes_wide, wide};
use crate::cuda::gemm::GemmOutput;
use crate::cuda::launch::Half;
use crate::cuda::norm::{AddNorm, add_rms_norm};
use crate::cuda::small_rows::{self, Ending, MOST_ROWS, Source, small_rows};
use crate::cuda::stream::Stream;
use crate::four_bit::Form;

/// Whether all products of such a decoder are taken, where rows are few.
pub(super) fn takes(stream: &Stream, places: &DecoderPlaces) -> bool {
    let device = stream.device();
    let of_layer = |layer: &LayerPlaces| [layer.qkv, layer.attn_output, layer.gate_up, layer.ffn_down];
    places.layers.iter().flat_map(of_layer).chain([places.output]).all(|place| match place.form {
        Form::Half => small_rows::takes(device, place.shape.inputs, MOST_ROWS),
        // As many as are few, or as many as are not.
        Form::FourBit => takes_wide(device, MOST_ROWS, Split::Fastest),
    })
}

/// Whether so many rows are normalised where they are multiplied with this matrix.
fn takes_normed(stream: &Stream, place: MatrixPlace, rows: usize) -> bool {
    let (device, shape) = (stream.device(), place.shape);
    match place.form {
        Form::Half => small_rows::takes_normed(device, shape.inputs, rows),
        Form::FourBit => four_bit::takes_few(device, shape, rows, true),
    }
}

/// A product of few rows with a matrix of either form.
fn multiply<T: Half>(
    stream: &Stream,
    memory: &DecoderMemory,
    source: &Source<'_, T>,
    place: MatrixPlace,
    ending: &Ending<'_, T>,
) -> Result<(), CudaError> {
    match place.form {
        Form::Half => small_rows(stream, place.shape, source, matrix(memory, place)?, ending),
        Form::FourBit => {
            let order = if matches!(ending, Ending::Silu(_)) { Order::Interleaved } else { Order::Plain };
            let weights = tiles(memory, place, order)?;
            match source {
                Source::Rows(x) if !takes_rows(stream, place, x.len() / place.shape.inputs) => {
                    wide(stream, *x, weights, ending, Split::Fastest)
                }
                _ => four_bit::few(stream, source, weights, ending),
            }
        }
    }
}

/// Whether so many rows, as they are, are few for a matrix of four bits.
fn takes_rows(stream: &Stream, place: MatrixPlace, rows: usize) -> bool {
    four_bit::takes_few(stream.device(), place.shape, rows, false)
}

impl<T: Half + GemmOutput> Work<T> {
    /// Whether products of so many rows are taken.
    pub(super) fn takes_few(&self, rows: usize) -> bool {
        self.few_rows && (1..=MOST_ROWS).contains(&rows)
    }

    /// From the residual stream to queries, keys and values.
    pub(super) fn few_project_qkv(
        &mut self,
        stream: &Stream,
        tokens: usize,
        places: LayerPlaces,
    ) -> Result<(), CudaError> {
        let Self { memory, shape, x, normed, qkv, .. } = self;
        let (memory, shape) = (&*memory, &*shape);
        let width = shape.qkv_width();
        let source = norm(stream, (memory, shape), tokens, (places.attn_norm, places.qkv), (x, normed))?;
        let ending = Ending::Store(qkv.part_mut(0..tokens * width)?);
        multiply(stream, memory, &source, places.qkv, &ending)
    }

    /// From what the heads give to the residual stream behind the layer.
    pub(super) fn few_behind_attention(
        &mut self,
        stream: &Stream,
        tokens: usize,
        places: LayerPlaces,
    ) -> Result<(), CudaError> {
        let Self { memory, shape, x, normed, attended, activated, .. } = self;
        let (memory, shape) = (&*memory, &*shape);
        let (hidden, query, ffn) = (shape.hidden, shape.query_width(), shape.ffn);
        let source = Source::Rows(attended.part(0..tokens * query)?);
        let ending = Ending::Add(x.part_mut(0..tokens * hidden)?);
        multiply(stream, memory, &source, places.attn_output, &ending)?;

        let source =
            norm(stream, (memory, shape), tokens, (places.ffn_norm, places.gate_up), (&mut *x, normed))?;
        let ending = Ending::Silu(activated.part_mut(0..tokens * ffn)?);
        multiply(stream, memory, &source, places.gate_up, &ending)?;

        let source = Source::Rows(activated.part(0..tokens * ffn)?);
        let ending = Ending::Add(x.part_mut(0..tokens * hidden)?);
        multiply(stream, memory, &source, places.ffn_down, &ending)
    }

    /// Logits of all tokens.
    pub(super) fn few_head(&mut self, stream: &Stream, tokens: usize) -> Result<(), CudaError> {
        let Self { memory, shape, places, x, normed, logits, .. } = self;
        let (memory, shape) = (&*memory, &*shape);
        let source = norm(stream, (memory, shape), tokens, (places.output_norm, places.output), (x, normed))?;
        let ending = Ending::Single(logits.part_mut(0..tokens * shape.vocabulary)?);
        multiply(stream, memory, &source, places.output, &ending)
    }

    /// Logits of the first `count` normalised rows.
    pub(super) fn few_logits(&mut self, stream: &Stream, count: usize) -> Result<(), CudaError> {
        let Self { memory, shape, places, normed, logits, .. } = self;
        let source = Source::Rows(normed.part(0..count * shape.hidden)?);
        let ending = Ending::Single(logits.part_mut(0..count * shape.vocabulary)?);
        multiply(stream, memory, &source, places.output, &ending)
    }
}

/// The residual stream, to be normalised in the product with `behind` where it can be, else normalised now.
fn norm<'a, T: Half>(
    stream: &Stream,
    (memory, shape): (&'a DecoderMemory, &DecoderShape),
    tokens: usize,
    (weight, behind): (Place, MatrixPlace),
    (x, normed): (&'a mut Buffer<f32>, &'a mut Buffer<T>),
) -> Result<Source<'a, T>, CudaError> {
    let range = 0..tokens * shape.hidden;
    let weight = view(&memory.weights, memory.offset, weight)?;
    let epsilon = shape.epsilon;
    if takes_normed(stream, behind, tokens) {
        return Ok(Source::Normed { x: x.part(range)?, weight, epsilon });
    }
    let (x, out) = (x.part_mut(range.clone())?, normed.part_mut(range.clone())?);
    add_rms_norm(stream, AddNorm { x, delta: None, weight, epsilon, rows: None, out })?;
    Ok(Source::Rows(normed.part(range)?))
}
