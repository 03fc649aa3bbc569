//! Residual addition and RMSNorm.
#![allow(unsafe_code)]

use super::batch::Indices;
use super::buffer::{View, ViewMut};
use super::error::CudaError;
use super::launch::{Grid, Half, Params, launch_early};
use super::stream::Stream;
use crate::error::{ShapeError, length, product};

/// Elements that a thread moves at once.
pub(super) const PACK: usize = 8;
/// Packs that a thread of the kernel keeps.
const PACKS: usize = 4;

/// What an addition with RMSNorm works on. Rows are `weight.len()` elements.
#[expect(missing_debug_implementations, reason = "names of device memory say nothing")]
pub struct AddNorm<'a, T: Half> {
    /// The residual stream, in single precision: what many layers add is rounded in none of them. With `delta` and without `rows` it becomes
    /// `x + delta`.
    pub x: ViewMut<'a, f32>,
    /// What is added first, of as many elements.
    pub delta: Option<View<'a, T>>,
    /// A factor per column.
    pub weight: View<'a, f32>,
    /// Added to the mean of the squares.
    pub epsilon: f32,
    /// Which rows of `x` the output is of; `None`: all. With it `x` stays as it is.
    pub rows: Option<&'a Indices>,
    /// `[rows][columns]`.
    pub out: ViewMut<'a, T>,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct NormArgs {
    x: u64,
    delta: u64,
    weight: u64,
    rows: u64,
    out: u64,
    hidden: u32,
    epsilon: f32,
}
// SAFETY: the fields of NormArgs in norm.cu.
unsafe impl Params for NormArgs {}

/// `x' = x + delta`; `out = x' / sqrt(mean(x'²) + epsilon) * weight`, of single-precision values, rounded once.
///
/// # Errors
/// The shapes do not fit (nothing was launched), or the device failed.
pub fn add_rms_norm<T: Half>(stream: &Stream, args: AddNorm<'_, T>) -> Result<(), CudaError> {
    let AddNorm { x, delta, weight, epsilon, rows, out } = args;
    let hidden = weight.len();
    let all = whole_rows("norm input", hidden, x.len())?;
    if hidden > PACK * PACKS * 1024 {
        return Err(dimension("norm weight", "at most 32,768 elements", hidden));
    }
    if let Some(delta) = delta {
        length("summand", x.len(), delta.len())?;
    }
    if let Some(rows) = rows {
        rows.check(all)?;
    }
    let count = rows.map_or(all, Indices::len);
    length("norm output", product("norm output", &[count, hidden])?, out.len())?;
    if count == 0 {
        return Ok(());
    }
    let packs = hidden / PACK;
    // Wide enough for the registers, and two packs a thread where there are many.
    let threads = packs.div_ceil(if packs > 256 { 2 } else { 1 }).max(packs.div_ceil(PACKS));
    let params = NormArgs {
        x: x.address(),
        delta: delta.map_or(0, View::address),
        weight: weight.address(),
        rows: rows.map_or(0, Indices::address),
        out: out.address(),
        hidden: hidden as u32,
        epsilon,
    };
    let grid = Grid { blocks: (blocks("rows", count)?, 1), threads: warps(threads), shared: 0 };
    let kernel = &stream.device().kernels().add_rms_norm[T::INDEX];
    // SAFETY: `count` blocks each read row `rows[i] < all` of `x` and `delta` and write row `i` of `out`, all `hidden` long, a whole number of
    // packs, which 4 packs for each of the threads cover. `x`, where written, and `out` are borrowed mutably. The kernel waits for the one before it
    // first of all.
    unsafe { launch_early(stream, kernel, "RMSNorm", grid, params) }
}

/// Threads of a block in whole warps, 1,024 at most.
pub(super) fn warps(threads: usize) -> u32 {
    threads.clamp(1, 1024).next_multiple_of(32) as u32
}

/// A number of thread blocks that a grid can have.
pub(super) fn blocks(what: &'static str, count: usize) -> Result<u32, CudaError> {
    i32::try_from(count).map(i32::cast_unsigned).map_err(|_| ShapeError::Overflow { what }.into())
}

/// A wrong dimension.
pub(super) fn dimension(what: &'static str, needed: &'static str, found: usize) -> CudaError {
    ShapeError::Dimension { what, needed, found }.into()
}

/// How many rows of `columns`, a multiple of 8, there are.
pub(super) fn whole_rows(what: &'static str, columns: usize, len: usize) -> Result<usize, CudaError> {
    if columns == 0 || !columns.is_multiple_of(PACK) {
        return Err(dimension(what, "in rows of a positive multiple of 8", columns));
    }
    if !len.is_multiple_of(columns) {
        return Err(dimension(what, "a whole number of rows", len));
    }
    Ok(len / columns)
}
