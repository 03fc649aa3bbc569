//! The small operators of a transformer, row by row.
//!
//! **Owns** norms, rotary embedding and element-wise functions. **Never** reduces in an order that depends on anything but the row's length.
//! Only operations that are rounded once each, in one order: the same bits on every instruction set.
#![allow(unsafe_code)]

use super::exp::exp;
use super::isa::{Isa, Vectors};
use super::pool::ThreadPool;
use crate::error::{ShapeError, length};

/// Elements below which work stays on the calling thread.
const SMALL: usize = 8 * 1024;

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
            let scale = 1.0 / (sum_of_squares(x) / n as f32 + epsilon).sqrt();
            for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
                *out = x * scale * weight;
            }
        }
    });
    Ok(())
}

/// 16 partial sums, lane by lane, then a tree: the error grows with n / 16.
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
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeAngles {
    /// No rows yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Angles `position * frequencies[i]` for each position; cosines and sines are multiplied by `magnitude` (1 but for some long-context
    /// scalings). `frequencies` has one entry per turning pair.
    pub fn set(&mut self, positions: &[u32], frequencies: &[f32], magnitude: f32) {
        self.pairs = frequencies.len();
        self.rows = positions.len();
        self.cos.clear();
        self.sin.clear();
        for &position in positions {
            for &frequency in frequencies {
                // The angle in single precision as in the models' own code, its sine and cosine as exact as single precision can hold.
                let (sin, cos) = f64::from(position as f32 * frequency).sin_cos();
                self.cos.push(cos as f32 * magnitude);
                self.sin.push(sin as f32 * magnitude);
            }
        }
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
            let at = (first + index) * pairs;
            let (cos, sin) = (&angles.cos[at..at + pairs], &angles.sin[at..at + pairs]);
            for head in x.chunks_exact_mut(head_dim) {
                turn(&mut head[..2 * pairs], cos, sin, pairing);
            }
        }
    });
    Ok(())
}

fn turn(head: &mut [f32], cos: &[f32], sin: &[f32], pairing: Pairing) {
    match pairing {
        Pairing::Interleaved => {
            for ((pair, cos), sin) in head.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
                let [a, b] = *pair;
                *pair = [a * cos - b * sin, a * sin + b * cos];
            }
        }
        Pairing::Halves => {
            let (low, high) = head.split_at_mut(cos.len());
            for (((low, high), cos), sin) in low.iter_mut().zip(high).zip(cos).zip(sin) {
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
    let isa = isa.usable();
    by_rows(pool, gate, 1, &|first, gate| {
        let up = &up[first..][..gate.len()];
        match isa.vectors() {
            Vectors::Portable => silu_mul_each(gate, up),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: `isa` was made with `Isa::usable`, which found AVX2.
            Vectors::Avx2 | Vectors::Avx512 => unsafe { silu_mul_avx2(gate, up) },
            #[cfg(not(target_arch = "x86_64"))]
            Vectors::Avx2 | Vectors::Avx512 => silu_mul_each(gate, up),
        }
    });
    Ok(())
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn silu_mul_avx2(gate: &mut [f32], up: &[f32]) {
    silu_mul_each(gate, up);
}

#[inline(always)]
fn silu_mul_each(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = *gate / (1.0 + exp(-*gate)) * up;
    }
}

/// `x += y`, element by element.
///
/// # Errors
/// The lengths differ; nothing has been written.
pub fn add(pool: &ThreadPool, x: &mut [f32], y: &[f32]) -> Result<(), ShapeError> {
    length("summand", x.len(), y.len())?;
    by_rows(pool, x, 1, &|first, x| {
        for (x, y) in x.iter_mut().zip(&y[first..]) {
            *x += y;
        }
    });
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
