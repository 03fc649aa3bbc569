//! Products of few rows, in the order in which a step has them.

use half::bf16;
use pagedd_kernels::cuda::small_rows::{Ending, MOST_ROWS, Source, small_rows, takes, takes_normed};
use pagedd_kernels::cuda::{Buffer, CudaError, GemmShape, Graph, Stream, View, fill_normal};

use super::{MODELS, Model, POOL, time};

/// What products read and write beside weights.
struct Rows {
    x: Buffer<f32>,
    norm: Buffer<f32>,
    normed: Buffer<bf16>,
    wide: Buffer<bf16>,
    logits: Buffer<f32>,
}

/// Milliseconds of all products of a step, each beginning while the one before it runs, and what they read of weights in a second.
pub fn few(stream: &Stream) -> Result<(), CudaError> {
    let mut weights = Buffer::<bf16>::zeroed(stream, POOL)?;
    fill_normal(stream, 1, 0.02, &mut weights.all_mut())?;
    println!("{:<13} {:>5} {:>9} {:>7}", "model", "rows", "ms", "GB/s");
    for model in MODELS {
        for rows in [1, 2, 4, 8, MOST_ROWS] {
            if !takes(stream.device(), model.hidden, rows) {
                println!("{:<13} {rows:>5}    not on this GPU", model.name);
                continue;
            }
            let took = step(stream, &model, rows, &weights)?;
            let elements = model.layers * layer(&model) + model.hidden * model.vocabulary;
            println!(
                "{:<13} {rows:>5} {:>9.3} {:>7.0}",
                model.name,
                took / 1e3,
                2.0 * elements as f64 / took / 1e3
            );
        }
    }
    Ok(())
}

/// Elements of a layer's matrices.
fn layer(model: &Model) -> usize {
    let Model { hidden, qkv, query, ffn, .. } = *model;
    hidden * (qkv + query + 3 * ffn)
}

/// Microseconds of a step's products.
fn step(stream: &Stream, model: &Model, rows: usize, weights: &Buffer<bf16>) -> Result<f64, CudaError> {
    let Model { hidden, qkv, query, ffn, vocabulary, layers, .. } = *model;
    let mut of = Rows {
        x: Buffer::zeroed(stream, rows * hidden)?,
        norm: Buffer::copy_of(stream, &vec![1.0_f32; hidden])?,
        normed: Buffer::zeroed(stream, rows * hidden.max(query))?,
        wide: Buffer::zeroed(stream, rows * qkv.max(ffn))?,
        logits: Buffer::zeroed(stream, rows * vocabulary)?,
    };
    fill_normal(stream, 2, 1.0, &mut of.normed.all_mut())?;
    let mut first = 0;
    let mut next = |shape: GemmShape| -> Result<View<'_, bf16>, CudaError> {
        let size = shape.inputs * shape.outputs;
        if first + size > weights.len() {
            first = 0;
        }
        first += size;
        Ok(weights.part(first - size..first)?)
    };
    let fuses = takes_normed(stream.device(), hidden, rows);
    let graph = Graph::capture(stream, |stream| {
        let Rows { x, norm, normed, wide, logits } = &mut of;
        let from_residual = |x: &Buffer<f32>,
                             normed: &Buffer<bf16>,
                             shape: GemmShape,
                             weights: View<'_, bf16>,
                             ending: Ending<'_, bf16>|
         -> Result<(), CudaError> {
            let source = if fuses {
                Source::Normed { x: x.all(), weight: norm.all(), epsilon: 1e-5 }
            } else {
                Source::Rows(normed.part(0..rows * hidden)?)
            };
            small_rows(stream, shape, &source, weights, &ending)
        };
        for _ in 0..layers {
            let shape = GemmShape { inputs: hidden, outputs: qkv };
            let ending = Ending::Store(wide.part_mut(0..rows * qkv)?);
            from_residual(x, normed, shape, next(shape)?, ending)?;
            let shape = GemmShape { inputs: query, outputs: hidden };
            let source = Source::Rows(normed.part(0..rows * query)?);
            small_rows(stream, shape, &source, next(shape)?, &Ending::Add(x.all_mut()))?;
            let shape = GemmShape { inputs: hidden, outputs: 2 * ffn };
            let ending = Ending::Silu(wide.part_mut(0..rows * ffn)?);
            from_residual(x, normed, shape, next(shape)?, ending)?;
            let shape = GemmShape { inputs: ffn, outputs: hidden };
            let source = Source::Rows(wide.part(0..rows * ffn)?);
            small_rows(stream, shape, &source, next(shape)?, &Ending::Add(x.all_mut()))?;
        }
        let shape = GemmShape { inputs: hidden, outputs: vocabulary };
        from_residual(x, normed, shape, next(shape)?, Ending::Single(logits.all_mut()))
    })?;
    time(stream, &graph, 21)
}
