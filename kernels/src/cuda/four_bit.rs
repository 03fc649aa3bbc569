//! Products with matrices of four-bit weights.
//!
//! **Owns** the kernels for them and which of these takes how many rows: few rows as [`small_rows`](super::small_rows) does, norm and endings
//! included, many through the matrix units of compute capability 9.0; and the way back to elements, for products that the library multiplies.
//! **Never** measures: shape and rows say how a product is computed, so that a worker that takes over has the same bits.
#![allow(unsafe_code)]

mod plan;
#[cfg(test)]
mod tests;

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaFunction, DriverError, sys};
use half::{bf16, f16};

use self::plan::{Few, FewPlan, Wide, WidePlan};
use super::buffer::{View, ViewMut};
use super::device::Device;
use super::error::{CudaError, during};
use super::gemm::GemmShape;
use super::launch::{Grid, Half, Launch, Params, fatbin, launch, launch_early, launch_with};
use super::norm::dimension;
use super::small_rows::{ENDINGS, Ending, Source, most_shared};
use super::stream::Stream;
use crate::error::{ShapeError, length, product};
use crate::four_bit::{FOUR_BIT_TILE, FOUR_BIT_UNIT, four_bit_bytes};

/// Threads of a block that takes few rows.
const FEW_THREADS: u32 = 512;
/// Threads of a block that widens, and blocks for each multiprocessor.
const WIDEN_THREADS: u32 = 256;
const WIDEN_BLOCKS: u32 = 16;

/// A matrix `[outputs][inputs]` in tiles.
#[derive(Clone, Copy)]
#[expect(missing_debug_implementations, reason = "names of device memory say nothing")]
pub struct FourBitMatrix<'a> {
    shape: GemmShape,
    tiles: View<'a, u8>,
    interleaved: bool,
}

impl<'a> FourBitMatrix<'a> {
    /// A matrix of whole tiles. `interleaved`: each tile has eight outputs of the first half and eight of the second, a gate and what it gates.
    ///
    /// # Errors
    /// Sides that are not whole tiles of whole units, or bytes of another length or place.
    pub fn new(shape: GemmShape, tiles: View<'a, u8>, interleaved: bool) -> Result<Self, ShapeError> {
        let GemmShape { inputs, outputs } = shape;
        let bytes =
            four_bit_bytes(outputs, inputs).filter(|&bytes| bytes > 0).ok_or(ShapeError::Dimension {
                what: "four-bit matrix",
                needed: "outputs in tiles of 16, inputs in units of 64",
                found: outputs,
            })?;
        length("four-bit matrix", bytes, tiles.len())?;
        if !tiles.address().is_multiple_of(128) {
            let (what, needed) = ("four-bit matrix", "at a multiple of 128 bytes");
            return Err(ShapeError::Dimension { what, needed, found: tiles.address() as usize });
        }
        Ok(Self { shape, tiles, interleaved })
    }

    /// Its sides.
    #[must_use]
    pub fn shape(&self) -> GemmShape {
        self.shape
    }
}

/// The kernels: widening for both types, and where there are some, those that multiply, by form, then by ending, for both types.
pub(super) struct FourBitKernels {
    widen: [CudaFunction; 2],
    products: Option<Products>,
}

struct Products {
    few: Vec<[[CudaFunction; 2]; 4]>,
    wide: Vec<[[CudaFunction; 2]; 4]>,
}

impl FourBitKernels {
    /// Loads them.
    ///
    /// # Errors
    /// The device failed.
    pub(super) fn load(context: &Arc<CudaContext>) -> Result<Self, DriverError> {
        let module = context.load_module(fatbin!("four_bit"))?;
        let widen =
            [module.load_function("widen_four_bit_bf16")?, module.load_function("widen_four_bit_f16")?];
        if context.compute_capability()? != (9, 0) {
            return Ok(Self { widen, products: None });
        }
        let module = context.load_module(fatbin!("four_bit_sm90"))?;
        let load = |form: &str, shared: usize, ending: &str, element: &str| {
            let function = module.load_function(&format!("pagedd_four_bit_{form}_{ending}_{element}"))?;
            most_shared(&function, shared)?;
            Ok::<_, DriverError>(function)
        };
        let endings = |form: &str, shared: usize| -> Result<_, DriverError> {
            let pair = |ending: &str| -> Result<_, DriverError> {
                Ok([load(form, shared, ending, bf16::NAME)?, load(form, shared, ending, f16::NAME)?])
            };
            let [store, single, add, silu] = ENDINGS;
            Ok([pair(store)?, pair(single)?, pair(add)?, pair(silu)?])
        };
        let few = Few::ALL.into_iter().map(|form| endings(form.name(), plan::SHARED));
        let wide = Wide::ALL.into_iter().map(|form| endings(form.name(), form.shared()));
        let (few, wide) = (few.collect::<Result<_, _>>()?, wide.collect::<Result<_, _>>()?);
        Ok(Self { widen, products: Some(Products { few, wide }) })
    }
}

/// Whether products of this many inputs and few rows are for these kernels.
#[must_use]
pub fn takes_few(device: &Device, shape: GemmShape, rows: usize, normed: bool) -> bool {
    device.kernels().four_bit.products.is_some()
        && FewPlan::of(shape, rows, normed, device.info().multiprocessors).is_some()
}

/// How the inner dimension of a product of many rows is shared by blocks, whose sums are added: what a row's bits depend on beside its operands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Split {
    /// As is fastest for so many rows.
    Fastest,
    /// By the matrix's shape alone: a row's bits do not depend on how many others there are.
    OneForAllRows,
}

/// Whether products of this many rows are for these kernels.
#[must_use]
pub fn takes_wide(device: &Device, rows: usize, split: Split) -> bool {
    let most = match split {
        Split::Fastest => plan::MOST_WIDE,
        // However many there are: the library would add in another order.
        Split::OneForAllRows => usize::MAX,
    };
    device.kernels().four_bit.products.is_some() && (1..=most).contains(&rows)
}

#[repr(C)]
#[derive(Clone, Copy)]
struct FewArgs {
    x: u64,
    norm: u64,
    weights: u64,
    out: u64,
    inputs: u32,
    outputs: u32,
    rows: u32,
    epsilon: f32,
}
// SAFETY: the fields of FourBitFewParams in gemm/four_bit_few.cuh, without padding.
unsafe impl Params for FewArgs {}

/// Queues `source[rows][inputs] · weightsᵀ` of few rows, added up in single precision, with its ending: [`Ending::Silu`] of an interleaved
/// matrix, the others of one that is not.
///
/// # Errors
/// The shapes do not fit, or are not taken (nothing was launched); or the device failed.
pub fn few<T: Half>(
    stream: &Stream,
    source: &Source<'_, T>,
    weights: FourBitMatrix<'_>,
    ending: &Ending<'_, T>,
) -> Result<(), CudaError> {
    let GemmShape { inputs, outputs } = weights.shape;
    let (x, elements, norm, epsilon) = match source {
        Source::Rows(x) => (x.address(), x.len(), None, 0.0),
        Source::Normed { x, weight, epsilon } => (x.address(), x.len(), Some(weight), *epsilon),
    };
    let rows = elements / inputs;
    let device = stream.device();
    let plan = FewPlan::of(weights.shape, rows, norm.is_some(), device.info().multiprocessors)
        .ok_or_else(|| dimension("few rows to multiply", "at most 16", elements))?;
    if let Some(norm) = norm {
        length("norm weight", inputs, norm.len())?;
    }
    let norm = norm.map_or(0, |norm| norm.address());
    let (index, out) = check(weights, (x, elements, rows), ending)?;
    if !norm.is_multiple_of(16) {
        return Err(dimension("norm weight", "at a multiple of 16 bytes", norm as usize));
    }
    let Some(products) = &device.kernels().four_bit.products else {
        return Err(CudaError::Plan);
    };
    let grid = Grid { blocks: (plan.blocks, 1), threads: FEW_THREADS, shared: plan.shared };
    let params = FewArgs {
        x,
        norm,
        weights: weights.tiles.address(),
        out,
        inputs: inputs as u32,
        outputs: outputs as u32,
        rows: rows as u32,
        epsilon,
    };
    let function = &products.few[plan.form as usize][index][T::INDEX];
    // SAFETY: lengths of the input, the tiles, the norm's and the output's were compared with rows, inputs and outputs; the kernel reads tiles
    // of the matrix and rows below `rows`, and writes elements of these. What is written is borrowed mutably. It waits for the kernel before it,
    // ahead of which it reads weights and factors only, which no kernel writes.
    unsafe { launch_early(stream, function, "four-bit product of few rows", grid, params) }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct WideArgs {
    x: sys::CUtensorMap,
    weights: u64,
    out: u64,
    inputs: u32,
    outputs: u32,
    rows: u32,
    row_blocks: u32,
}
// SAFETY: the fields of FourBitWideParams in gemm/four_bit_wide.cuh; what is behind the last is padding.
unsafe impl Params for WideArgs {}
/// The kernel's number: the map is aligned to 128 bytes.
const _: () = assert!(size_of::<WideArgs>() == 256);

/// Queues `x[rows][inputs] · weightsᵀ`, added up in single precision, with its ending, as [`few`] does; weights are rounded to elements.
///
/// # Errors
/// The shapes do not fit, or are not taken (nothing was launched); or the device failed.
pub fn wide<T: Half>(
    stream: &Stream,
    x: View<'_, T>,
    weights: FourBitMatrix<'_>,
    ending: &Ending<'_, T>,
    split: Split,
) -> Result<(), CudaError> {
    let GemmShape { inputs, outputs } = weights.shape;
    let rows = x.len() / inputs;
    let device = stream.device();
    let (index, out) = check(weights, (x.address(), x.len(), rows), ending)?;
    let Some(products) =
        device.kernels().four_bit.products.as_ref().filter(|_| takes_wide(device, rows, split))
    else {
        return Err(dimension("rows to multiply", "as many as four-bit products take", rows));
    };
    let plan = match split {
        Split::Fastest => WidePlan::of(weights.shape, rows, device.info().multiprocessors),
        Split::OneForAllRows => WidePlan::exact(weights.shape, rows, device.info().multiprocessors),
    };
    let params = WideArgs {
        x: map(stream, x, inputs, rows, plan.form.rows())?,
        weights: weights.tiles.address(),
        out,
        inputs: inputs as u32,
        outputs: outputs as u32,
        rows: rows as u32,
        row_blocks: plan.row_blocks,
    };
    let (threads, shared) = (plan.form.threads() as u32, plan.form.shared() as u32);
    let grid = Grid { blocks: (plan.blocks(), 1), threads, shared };
    let function = &products.wide[plan.form as usize][index][T::INDEX];
    let how = Launch { early: true, cluster: plan.split };
    // SAFETY: lengths of the input, the tiles and the output were compared with rows, inputs and outputs; the map is of the input's rows, and gives
    // zeros outside; the kernel reads tiles of the matrix and writes elements of rows below `rows`. What is written is borrowed mutably. It waits
    // for the kernel before it, ahead of which it reads weights only, which no kernel writes. Each block of a cluster has some of the units.
    unsafe { launch_with(stream, function, "four-bit product", grid, how, params) }
}

/// Compares the operands of a product; the ending's place and the address of what is written.
fn check<T: Half>(
    weights: FourBitMatrix<'_>,
    (x, elements, rows): (u64, usize, usize),
    ending: &Ending<'_, T>,
) -> Result<(usize, u64), CudaError> {
    let GemmShape { inputs, outputs } = weights.shape;
    length("product input", product("product input", &[rows, inputs])?, elements)?;
    let (index, written, out, folded) = ending.parts();
    if weights.interleaved != (folded == 2) {
        return Err(dimension("four-bit matrix", "interleaved where one half gates the other", outputs));
    }
    length("product output", product("product output", &[rows, outputs / folded])?, written)?;
    for address in [x, out] {
        if !address.is_multiple_of(16) {
            return Err(dimension("operand", "at a multiple of 16 bytes", address as usize));
        }
    }
    Ok((index, out))
}

/// What the copy engine needs to know of an input: boxes of `box_rows` rows and a unit.
fn map<T: Half>(
    stream: &Stream,
    x: View<'_, T>,
    inputs: usize,
    rows: usize,
    box_rows: usize,
) -> Result<sys::CUtensorMap, CudaError> {
    use sys::CUtensorMapDataType as Element;
    stream.device().bind()?;
    let elements = [Element::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, Element::CU_TENSOR_MAP_DATA_TYPE_FLOAT16];
    let (sides, pitch) = ([inputs as u64, rows as u64], [2 * inputs as u64]);
    let (sides_of_box, steps) = ([FOUR_BIT_UNIT as u32, box_rows as u32], [1, 1]);
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    // SAFETY: the driver reads two sides, one pitch, two sides of a box and two steps, and writes the map; it keeps none of the addresses but
    // that of the input, which it does not read.
    let made = unsafe {
        sys::cuTensorMapEncodeTiled(
            &raw mut map,
            elements[T::INDEX],
            2,
            x.address() as *mut c_void,
            sides.as_ptr(),
            pitch.as_ptr(),
            sides_of_box.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    made.result().map_err(during("describing a product's input"))?;
    Ok(map)
}

#[repr(C)]
#[derive(Clone, Copy)]
struct WidenArgs {
    tiles: u64,
    out: u64,
    outputs: u32,
    inputs: u32,
    interleaved: u32,
    unused: u32,
}
// SAFETY: the fields of WidenArgs in four_bit.cu; the last is its padding.
unsafe impl Params for WidenArgs {}

/// Queues a matrix's way to elements: `out[outputs][inputs]`, the first half of an interleaved one first. Each is rounded once.
///
/// # Errors
/// `out` has another length (nothing was launched), or the device failed.
pub fn widen<T: Half>(
    stream: &Stream,
    weights: FourBitMatrix<'_>,
    out: &mut ViewMut<'_, T>,
) -> Result<(), CudaError> {
    let GemmShape { inputs, outputs } = weights.shape;
    length("widened matrix", product("widened matrix", &[outputs, inputs])?, out.len())?;
    if !out.address().is_multiple_of(16) {
        return Err(dimension("operand", "at a multiple of 16 bytes", out.address() as usize));
    }
    let device = stream.device();
    let units = (outputs / FOUR_BIT_TILE * (inputs / FOUR_BIT_UNIT)) as u32;
    let blocks = units.div_ceil(WIDEN_THREADS / 32).min(device.info().multiprocessors * WIDEN_BLOCKS);
    let params = WidenArgs {
        tiles: weights.tiles.address(),
        out: out.address(),
        outputs: outputs as u32,
        inputs: inputs as u32,
        interleaved: u32::from(weights.interleaved),
        unused: 0,
    };
    let function = &device.kernels().four_bit.widen[T::INDEX];
    let grid = Grid { blocks: (blocks, 1), threads: WIDEN_THREADS, shared: 0 };
    // SAFETY: the kernel reads the tiles, whose length was compared with both sides, and writes `outputs * inputs` elements, which `out` has, is
    // borrowed mutably.
    unsafe { launch(stream, function, "widening four-bit weights", grid, params) }
}
