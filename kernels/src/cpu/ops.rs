//! The small operators of a transformer, row by row.
//!
//! **Owns** norms, rotary embedding and element-wise functions. **Never** reduces in an order that depends on anything but the row's length.
//! Only operations that are rounded once each, in one order: the same bits on every instruction set.
#![allow(unsafe_code)]

use super::activations::{ActivationKind, Activations};
use super::disjoint::Disjoint;
use super::exp::exp;
use super::isa::Isa;
use super::pool::ThreadPool;
use super::versions::versions;
use crate::error::{ShapeError, length};

/// Elements up to which work stays on the calling thread: a meeting of the threads would take longer.
pub(crate) const SMALL: usize = 8 * 1024;

fn columns(what: &'static str, columns: usize, len: usize) -> Result<(), ShapeError> {
    if columns == 0 || !len.is_multiple_of(columns) {
        return Err(ShapeError::Dimension {
            what,
            needed: "a divisor of the number of elements",
            found: columns,
        });
    }
    Ok(())
}

/// Runs `each(first row, rows)` over whole rows of `data`.
fn by_rows(pool: &ThreadPool, data: &mut [f32], columns: usize, each: &(dyn Fn(usize, &mut [f32]) + Sync)) {
    let rows = (SMALL / columns).max(1);
    if data.len() <= SMALL {
        each(0, data);
    } else {
        pool.for_parts(data, rows * columns, &|part, data| each(part * rows, data));
    }
}

/// `RMSNorm` of each row of `x`: `out = x / sqrt(mean(x²) + epsilon) * weight`. Rows are as long as `weight`.
///
/// # Errors
/// The lengths do not fit; nothing has been written.
pub fn rms_norm(
    pool: &ThreadPool,
    x: &[f32],
    weight: &[f32],
    epsilon: f32,
    out: &mut [f32],
) -> Result<(), ShapeError> {
    let n = weight.len();
    columns("norm weight", n, x.len())?;
    length("norm output", x.len(), out.len())?;
    by_rows(pool, out, n, &|first, out| {
        let x = &x[first * n..][..out.len()];
        for (x, out) in x.chunks_exact(n).zip(out.chunks_exact_mut(n)) {
            norm_row(x, Norm { weight, epsilon }, out);
        }
    });
    Ok(())
}

/// What an RMSNorm needs beside its rows.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Norm<'a> {
    /// A factor per column.
    pub weight: &'a [f32],
    /// Added to the mean of the squares.
    pub epsilon: f32,
}

/// `x += delta` where there is one, then [`rms_norm`] of each row of `x` as activations of the form `kind`, in one pass. The bits are those of
/// [`add`], [`rms_norm`] and [`Activations::set`].
///
/// # Errors
/// The lengths do not fit; `x` is as it was.
pub fn add_rms_norm(
    pool: &ThreadPool,
    isa: Isa,
    x: &mut [f32],
    delta: Option<&[f32]>,
    norm: Norm<'_>,
    kind: ActivationKind,
    out: &mut Activations,
) -> Result<(), ShapeError> {
    let n = norm.weight.len();
    columns("norm weight", n, x.len())?;
    if let Some(delta) = delta {
        length("summand", x.len(), delta.len())?;
    }
    let (rows, vectors) = (x.len() / n, isa.usable().vectors());
    let x = Disjoint::new(x);
    out.set_rows(pool, isa, (rows, n), kind, &|row, out| {
        let range = row * n..(row + 1) * n;
        // SAFETY: `set_rows` gives each row to one thread, once.
        let x = unsafe { x.part(range.clone()) };
        add_norm_row(vectors, x, delta.map(|delta| &delta[range]), norm, out);
    })
}

versions!(add_norm_row = add_norm_any(x: &mut [f32], delta: Option<&[f32]>, norm: Norm<'_>, out: &mut [f32]));

#[inline(always)]
fn add_norm_any(x: &mut [f32], delta: Option<&[f32]>, norm: Norm<'_>, out: &mut [f32]) {
    if let Some(delta) = delta {
        add_each(x, delta);
    }
    norm_row(x, norm, out);
}

#[inline(always)]
fn add_each(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

#[inline(always)]
fn norm_row(x: &[f32], norm: Norm<'_>, out: &mut [f32]) {
    let scale = 1.0 / (sum_of_squares(x) / x.len() as f32 + norm.epsilon).sqrt();
    for ((out, x), weight) in out.iter_mut().zip(x).zip(norm.weight) {
        *out = x * scale * weight;
    }
}

/// 16 partial sums, lane by lane, then a tree: the error grows with n / 16.
#[inline(always)]
fn sum_of_squares(x: &[f32]) -> f32 {
    let (body, tail) = x.as_chunks::<16>();
    let mut lanes = [0.0_f32; 16];
    for x in body {
        for (lane, x) in lanes.iter_mut().zip(x) {
            *lane += x * x;
        }
    }
    for (lane, x) in lanes.iter_mut().zip(tail) {
        *lane += x * x;
    }
    let mut width = 8;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Which elements of a head turn together.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Pairing {
    /// `(2i, 2i + 1)`: GGUF files of Llama models.
    Interleaved,
    /// `(i, i + pairs)`: Hugging Face checkpoints, and GGUF files of Qwen models.
    Halves,
}

/// Cosines and sines for the rows of a batch: computed once per step, used by every layer. Set again for every batch.
#[derive(Debug, Default)]
pub struct RopeAngles {
    pairs: usize,
    rows: usize,
    /// `[rows][pairs]`, cosine and sine.
    turns: Vec<[f32; 2]>,
}

impl RopeAngles {
    /// No rows yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Angles `position * frequencies[i]` for each position; cosines and sines are multiplied by `magnitude` (1 but for some long-context
    /// scalings). `frequencies` has one entry per turning pair.
    pub fn set(&mut self, pool: &ThreadPool, positions: &[u32], frequencies: &[f32], magnitude: f32) {
        self.pairs = frequencies.len();
        self.rows = positions.len();
        self.turns.resize(self.rows * self.pairs, [0.0; 2]);
        if self.pairs == 0 {
            return;
        }
        // A sine takes as long as a good many other operations.
        let rows = (SMALL / 64 / self.pairs).max(1);
        pool.for_parts(&mut self.turns, rows * self.pairs, &|part, turns| {
            for (turns, &position) in turns.chunks_exact_mut(frequencies.len()).zip(&positions[part * rows..])
            {
                for (turn, &frequency) in turns.iter_mut().zip(frequencies) {
                    // The angle in single precision as in the models' own code, its sine and cosine as exact as single precision can hold.
                    let (sin, cos) = f64::from(position as f32 * frequency).sin_cos();
                    *turn = [cos as f32 * magnitude, sin as f32 * magnitude];
                }
            }
        });
    }

    /// Cosine and sine per pair, for a row.
    pub(crate) fn row(&self, row: usize) -> &[[f32; 2]] {
        &self.turns[row * self.pairs..][..self.pairs]
    }

    /// Turning pairs of a head.
    pub(crate) fn pairs(&self) -> usize {
        self.pairs
    }

    /// Rows.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }
}

/// Turns the first `2 * pairs` elements of every head of `x` (`[rows of angles][heads][head_dim]`, in place).
///
/// # Errors
/// The shapes do not fit; nothing has been written.
pub fn rope(
    pool: &ThreadPool,
    x: &mut [f32],
    head_dim: usize,
    angles: &RopeAngles,
    pairing: Pairing,
) -> Result<(), ShapeError> {
    let pairs = angles.pairs;
    if head_dim < 2 * pairs {
        return Err(ShapeError::Dimension {
            what: "head dimension",
            needed: "at least twice the number of rotary frequencies",
            found: head_dim,
        });
    }
    if angles.rows == 0 || pairs == 0 {
        return if angles.rows == 0 { length("rotary input", 0, x.len()) } else { Ok(()) };
    }
    let row = x.len() / angles.rows;
    length("rotary input", angles.rows * row, x.len())?;
    columns("head dimension", head_dim, row)?;
    if row == 0 {
        return Ok(());
    }
    by_rows(pool, x, row, &|first, x| {
        for (index, x) in x.chunks_exact_mut(row).enumerate() {
            for head in x.chunks_exact_mut(head_dim) {
                turn_any(head, angles.row(first + index), pairing);
            }
        }
    });
    Ok(())
}

versions!(
    /// Turns the first `2 * turns.len()` elements of a head.
    pub(crate) turn = turn_any(head: &mut [f32], turns: &[[f32; 2]], pairing: Pairing)
);

#[inline(always)]
fn turn_any(head: &mut [f32], turns: &[[f32; 2]], pairing: Pairing) {
    match pairing {
        Pairing::Interleaved => {
            for (pair, [cos, sin]) in head.as_chunks_mut::<2>().0.iter_mut().zip(turns) {
                let [a, b] = *pair;
                *pair = [a * cos - b * sin, a * sin + b * cos];
            }
        }
        Pairing::Halves => {
            let (low, high) = head.split_at_mut(turns.len());
            for ((low, high), [cos, sin]) in low.iter_mut().zip(high).zip(turns) {
                (*low, *high) = (*low * cos - *high * sin, *low * sin + *high * cos);
            }
        }
    }
}

/// `gate = silu(gate) * up`, element by element.
///
/// # Errors
/// The lengths differ; nothing has been written.
pub fn silu_mul(pool: &ThreadPool, isa: Isa, gate: &mut [f32], up: &[f32]) -> Result<(), ShapeError> {
    length("up projection", gate.len(), up.len())?;
    let vectors = isa.usable().vectors();
    by_rows(pool, gate, 1, &|first, gate| silu_mul_part(vectors, gate, &up[first..][..gate.len()]));
    Ok(())
}

versions!(silu_mul_part = silu_mul_each(gate: &mut [f32], up: &[f32]));

#[inline(always)]
fn silu_mul_each(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = silu(*gate) * up;
    }
}

#[inline(always)]
fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// [`silu_mul`] of rows of `columns` as activations of the form `kind`, in one pass. The bits are those of [`silu_mul`] and
/// [`Activations::set`].
///
/// # Errors
/// The lengths do not fit; the activations may then be empty.
pub fn silu_mul_to(
    pool: &ThreadPool,
    isa: Isa,
    gate: &[f32],
    up: &[f32],
    columns: usize,
    kind: ActivationKind,
    out: &mut Activations,
) -> Result<(), ShapeError> {
    self::columns("number of activation columns", columns, gate.len())?;
    length("up projection", gate.len(), up.len())?;
    let vectors = isa.usable().vectors();
    out.set_rows(pool, isa, (gate.len() / columns, columns), kind, &|row, out| {
        let range = row * columns..(row + 1) * columns;
        silu_mul_row(vectors, &gate[range.clone()], &up[range], out);
    })
}

versions!(silu_mul_row = silu_mul_into(gate: &[f32], up: &[f32], out: &mut [f32]));

#[inline(always)]
fn silu_mul_into(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
        *out = silu(*gate) * up;
    }
}

/// `x += y`, element by element.
///
/// # Errors
/// The lengths differ; nothing has been written.
pub fn add(pool: &ThreadPool, x: &mut [f32], y: &[f32]) -> Result<(), ShapeError> {
    length("summand", x.len(), y.len())?;
    by_rows(pool, x, 1, &|first, x| add_each(x, &y[first..]));
    Ok(())
}

/// Adds `bias` to each row of `x` (`[rows][stride]`, of which the first `bias.len()` of each row change).
///
/// # Errors
/// The shapes do not fit; nothing has been written.
pub fn add_bias(x: &mut [f32], stride: usize, bias: &[f32]) -> Result<(), ShapeError> {
    columns("stride", stride, x.len())?;
    if bias.len() > stride {
        return Err(ShapeError::Length { what: "bias", needed: stride, found: bias.len() });
    }
    for row in x.chunks_exact_mut(stride) {
        for (x, bias) in row.iter_mut().zip(bias) {
            *x += bias;
        }
    }
    Ok(())
}
