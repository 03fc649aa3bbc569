//! Products of few rows, at the speed at which their weights can be read.
//!
//! **Owns** which products are such, what else they do in the same launch (the norm before, the activation or the addition behind), and the
//! kernels for them. **Never** measures: a shape and its rows say how they are multiplied, so that a worker that takes over has the same bits.
//!
//! The kernels are for GPUs of compute capability 9.0; elsewhere nothing is taken. They start while the kernel before them still runs and read
//! weights ahead, as much as shared memory holds. A row's bits do not depend on other rows of the same form, but the form depends on how many
//! there are, and more than [`MOST_ROWS`] are the library's: where bits must not depend on that, nothing is multiplied here.
#![allow(unsafe_code)]

use std::sync::Arc;

use cudarc::driver::sys::CUfunction_attribute as Attribute;
use cudarc::driver::{CudaContext, CudaFunction, DriverError};
use half::{bf16, f16};

use super::buffer::{View, ViewMut};
use super::device::Device;
use super::error::CudaError;
use super::gemm::GemmShape;
use super::launch::{Grid, Half, Params, fatbin, launch_early};
use super::norm::dimension;
use super::stream::Stream;
use crate::error::{length, product};

/// Most rows that are few.
pub const MOST_ROWS: usize = 16;
/// Most rows that are normalised where they are multiplied: every block does it for itself.
const MOST_NORMED: usize = 2;
/// Longest row that is, in elements.
pub(super) const MOST_NORMED_INPUTS: usize = 8192;
/// Most rows that stay in shared memory however short they are: more of short ones are there sooner in pieces.
const MOST_KEPT_SHORT: usize = 4;
/// Shortest row that is not short, in elements.
const LEAST_LONG_INPUTS: usize = 2048;

/// Elements of a row that a warp takes at once.
const UNIT: usize = 64;
const THREADS: u32 = 256;
/// Shared memory that a block may have.
const SHARED: usize = 226 << 10;
/// Bytes behind a row in shared memory.
const PAD: usize = 64;

/// How a product goes through a multiprocessor, as in `small_rows_sm90.cu`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Form {
    Kept,
    Kept16,
    Normed,
    Streamed,
    Streamed16,
}

impl Form {
    const ALL: [Self; 5] = [Self::Kept, Self::Kept16, Self::Normed, Self::Streamed, Self::Streamed16];

    fn name(self) -> &'static str {
        match self {
            Self::Kept => "kept",
            Self::Kept16 => "kept16",
            Self::Normed => "normed",
            Self::Streamed => "streamed",
            Self::Streamed16 => "streamed16",
        }
    }

    /// Bytes of shared memory beside a kept input.
    fn shared(self) -> usize {
        match self {
            Self::Kept | Self::Normed => 139_264,
            Self::Kept16 => 81_920,
            Self::Streamed => 221_184,
            Self::Streamed16 => 229_376,
        }
    }

    /// Bytes of shared memory with an input of so many rows.
    fn shared_with(self, inputs: usize, rows: usize) -> usize {
        match self {
            Self::Streamed | Self::Streamed16 => self.shared(),
            Self::Kept | Self::Kept16 | Self::Normed => self.shared() + rows * (2 * inputs + PAD),
        }
    }

    /// Fragments of outputs that a block takes at once.
    fn tiles(self) -> usize {
        match self {
            Self::Streamed | Self::Streamed16 => 2,
            Self::Kept | Self::Kept16 | Self::Normed => 1,
        }
    }

    /// That of a product: the input stays in shared memory where it fits and pays.
    fn of(inputs: usize, rows: usize, normed: bool) -> Option<Self> {
        if inputs == 0 || !inputs.is_multiple_of(UNIT) {
            return None;
        }
        let (kept, streamed) = match rows {
            1..=8 => (Self::Kept, Self::Streamed),
            9..=MOST_ROWS => (Self::Kept16, Self::Streamed16),
            _ => return None,
        };
        if normed {
            return (rows <= MOST_NORMED && inputs <= MOST_NORMED_INPUTS).then_some(Self::Normed);
        }
        let keep = rows <= MOST_KEPT_SHORT || inputs >= LEAST_LONG_INPUTS;
        Some(if keep && kept.shared_with(inputs, rows) <= SHARED { kept } else { streamed })
    }
}

/// The kernels, by form, then by ending, for both types.
pub(super) struct SmallRowsKernels(Vec<[[CudaFunction; 2]; 4]>);

/// Names of endings, by the first of [`Ending::parts`].
pub(super) const ENDINGS: [&str; 4] = ["store", "single", "add", "silu"];

impl SmallRowsKernels {
    /// Loads them; `None` on a GPU that they are not for.
    ///
    /// # Errors
    /// The device failed.
    pub(super) fn load(context: &Arc<CudaContext>) -> Result<Option<Self>, DriverError> {
        if context.compute_capability()? != (9, 0) {
            return Ok(None);
        }
        let module = context.load_module(fatbin!("small_rows_sm90"))?;
        let load = |form: Form, ending: &str, element: &str| -> Result<CudaFunction, DriverError> {
            let function =
                module.load_function(&format!("pagedd_small_rows_{}_{ending}_{element}", form.name()))?;
            most_shared(&function, SHARED)?;
            Ok(function)
        };
        let endings = |form| -> Result<_, DriverError> {
            let pair = |ending: &str| -> Result<_, DriverError> {
                Ok([load(form, ending, bf16::NAME)?, load(form, ending, f16::NAME)?])
            };
            let [store, single, add, silu] = ENDINGS;
            Ok([pair(store)?, pair(single)?, pair(add)?, pair(silu)?])
        };
        Ok(Some(Self(Form::ALL.into_iter().map(endings).collect::<Result<_, DriverError>>()?)))
    }
}

/// Lets blocks of a kernel have so much shared memory.
pub(super) fn most_shared(function: &CudaFunction, bytes: usize) -> Result<(), DriverError> {
    function.set_attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes as i32)
}

/// What is multiplied.
#[expect(missing_debug_implementations, reason = "names of device memory say nothing")]
pub enum Source<'a, T: Half> {
    /// `[rows][inputs]`.
    Rows(View<'a, T>),
    /// Rows of the residual stream, normalised first as [`add_rms_norm`](super::add_rms_norm) does.
    Normed {
        /// `[rows][inputs]`.
        x: View<'a, f32>,
        /// A factor per column.
        weight: View<'a, f32>,
        /// Added to the mean of the squares.
        epsilon: f32,
    },
}

/// What becomes of the product.
#[expect(missing_debug_implementations, reason = "names of device memory say nothing")]
pub enum Ending<'a, T: Half> {
    /// It is rounded: `[rows][outputs]`.
    Store(ViewMut<'a, T>),
    /// It stays in single precision: `[rows][outputs]`.
    Single(ViewMut<'a, f32>),
    /// It is added, in single precision: `[rows][outputs]`.
    Add(ViewMut<'a, f32>),
    /// The first half of the outputs is the gate of the second: `[rows][outputs / 2]`, rounded.
    Silu(ViewMut<'a, T>),
}

impl<T: Half> Ending<'_, T> {
    /// Place of its kernels, length and address of what is written, outputs for each element of it.
    pub(super) fn parts(&self) -> (usize, usize, u64, usize) {
        match self {
            Self::Store(out) => (0, out.len(), out.address(), 1),
            Self::Single(out) => (1, out.len(), out.address(), 1),
            Self::Add(out) => (2, out.len(), out.address(), 1),
            Self::Silu(out) => (3, out.len(), out.address(), 2),
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct SmallRowsArgs {
    x: u64,
    norm: u64,
    weights: u64,
    out: u64,
    inputs: u32,
    outputs: u32,
    rows: u32,
    tiles: u32,
    epsilon: f32,
    unused: u32,
}
// SAFETY: the fields of SmallRowsParams in gemm/small_rows.cuh; the last is its padding.
unsafe impl Params for SmallRowsArgs {}

/// Whether products of this many inputs and rows are for these kernels.
#[must_use]
pub fn takes(device: &Device, inputs: usize, rows: usize) -> bool {
    device.kernels().small_rows.is_some() && Form::of(inputs, rows, false).is_some()
}

/// Whether such rows can be normalised where they are multiplied.
#[must_use]
pub fn takes_normed(device: &Device, inputs: usize, rows: usize) -> bool {
    device.kernels().small_rows.is_some() && Form::of(inputs, rows, true).is_some()
}

/// Queues `source[rows][inputs] · weights[outputs][inputs]ᵀ`, added up in single precision, with its ending.
///
/// # Errors
/// The shapes do not fit, or are not taken (nothing was launched); or the device failed.
pub fn small_rows<T: Half>(
    stream: &Stream,
    shape: GemmShape,
    source: &Source<'_, T>,
    weights: View<'_, T>,
    ending: &Ending<'_, T>,
) -> Result<(), CudaError> {
    let GemmShape { inputs, outputs } = shape;
    let (x, elements, norm, epsilon) = match source {
        Source::Rows(x) => (x.address(), x.len(), None, 0.0),
        Source::Normed { x, weight, epsilon } => (x.address(), x.len(), Some(weight), *epsilon),
    };
    let rows = elements.checked_div(inputs).unwrap_or(0);
    let form = Form::of(inputs, rows, norm.is_some())
        .ok_or_else(|| dimension("few rows to multiply", "at most 16 of a multiple of 64", elements))?;
    length("product input", product("product input", &[rows, inputs])?, elements)?;
    length("weights", product("weights", &[outputs, inputs])?, weights.len())?;
    if let Some(norm) = norm {
        length("norm weight", inputs, norm.len())?;
    }
    let (index, written, out, folded) = ending.parts();
    if outputs == 0 || !outputs.is_multiple_of(8 * folded) {
        return Err(dimension(
            "outputs of few rows",
            "packs of 8, in each half where one gates the other",
            outputs,
        ));
    }
    length("product output", product("product output", &[rows, outputs / folded])?, written)?;
    let norm = norm.map_or(0, |norm| norm.address());
    for address in [x, weights.address(), out, norm] {
        if !address.is_multiple_of(16) {
            return Err(dimension("operand", "at a multiple of 16 bytes", address as usize));
        }
    }
    let device = stream.device();
    let Some(kernels) = &device.kernels().small_rows else {
        return Err(CudaError::Plan);
    };
    let tiles = outputs.div_ceil(16 * form.tiles()) as u32;
    let grid = Grid {
        blocks: (tiles.min(device.info().multiprocessors), 1),
        threads: THREADS,
        shared: form.shared_with(inputs, rows) as u32,
    };
    let params = SmallRowsArgs {
        x,
        norm,
        weights: weights.address(),
        out,
        inputs: inputs as u32,
        outputs: outputs as u32,
        rows: rows as u32,
        tiles,
        epsilon,
        unused: 0,
    };
    let function = &kernels.0[form as usize][index][T::INDEX];
    // SAFETY: lengths of the input, the weights, the norm's and the output's were compared with rows, inputs and outputs above; the kernel
    // reads rows of the matrix below `outputs` and writes elements of rows below `rows`. What is written is borrowed mutably. It waits for
    // the kernel before it, ahead of which it reads weights and factors only, which no kernel writes.
    unsafe { launch_early(stream, function, "product of few rows", grid, params) }
}

#[cfg(test)]
mod tests;
