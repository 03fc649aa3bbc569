//! The attention kernels, and how each is launched.

use std::sync::Arc;

use cudarc::driver::sys::CUfunction_attribute as Attribute;
use cudarc::driver::{CudaContext, CudaFunction, CudaModule, DriverError};
use half::{bf16, f16};

use crate::cuda::launch::{Half, fatbin};

/// Sizes of heads that there are kernels for.
const SIZES: [usize; 5] = [64, 80, 96, 128, 256];

/// Place of a size of heads.
pub(super) fn size_index(head_dim: usize) -> Option<usize> {
    SIZES.iter().position(|&size| size == head_dim)
}

/// Shared memory of a block that needs no leave.
const FREE_SHARED: u32 = 48 << 10;

/// Threads and bytes of shared memory of decode, as in `attention_decode.cu`.
const DECODE: [(u32, u32); 5] = [(128, 67_216), (128, 69_264), (128, 54_928), (128, 67_216), (64, 66_960)];

/// Packed rows, threads and bytes of shared memory of prefill, as in `attention_prefill.cu`.
const PREFILL: [(u32, u32, u32); 5] =
    [(128, 128, 40_960), (128, 128, 56_320), (128, 128, 66_560), (128, 128, 81_920), (64, 128, 81_920)];

/// The same as in `attention_prefill_sm90.cu`, most rows first; none for sizes that the other file serves there too.
const PREFILL_SM90: [&[(u32, u32, u32)]; 5] = [
    &[(128, 384, 81_984)],
    &[],
    &[],
    &[(192, 512, 147_552), (128, 384, 163_968), (64, 256, 114_784)],
    &[(128, 384, 196_672)],
];

/// As [`PREFILL`], in `attention_shared.cu`, and in `attention_shared_sm90.cu` where that has one.
const SHARED: [(u32, u32, u32); 5] = PREFILL;
const SHARED_SM90: [Option<(u32, u32, u32)>; 5] =
    [Some((128, 384, 81_984)), None, None, Some((128, 384, 163_968)), Some((128, 384, 196_672))];

/// All attention kernels. Pairs are by [`Half::INDEX`], lists by [`size_index`].
pub(in crate::cuda) struct AttentionKernels {
    pub(super) plan: CudaFunction,
    pub(super) plan_lanes: CudaFunction,
    pub(super) decode: Vec<DecodeKernel>,
    /// Tiles with most rows first.
    pub(super) prefill: Vec<Vec<PrefillKernel>>,
    pub(super) shared: Vec<SharedKernel>,
}

pub(super) struct DecodeKernel {
    pub(super) decode: [CudaFunction; 2],
    pub(super) combine: [CudaFunction; 2],
    pub(super) threads: u32,
    pub(super) shared: u32,
    /// Blocks that a multiprocessor holds.
    pub(super) resident: u32,
}

/// For what large groups share.
pub(super) struct SharedKernel {
    pub(super) functions: [CudaFunction; 2],
    /// Packed rows of a tile.
    pub(super) rows: u32,
    pub(super) threads: u32,
    pub(super) shared: u32,
    /// Blocks that a multiprocessor holds.
    pub(super) resident: u32,
}

pub(super) struct PrefillKernel {
    pub(super) functions: [CudaFunction; 2],
    /// Packed rows of a tile.
    pub(super) rows: u32,
    pub(super) threads: u32,
    pub(super) shared: u32,
}

impl AttentionKernels {
    /// Loads all that the GPU can run.
    ///
    /// # Errors
    /// The GPU cannot run them, or the device failed.
    pub(in crate::cuda) fn load(context: &Arc<CudaContext>) -> Result<Self, DriverError> {
        let decode = context.load_module(fatbin!("attention_decode"))?;
        let prefill = context.load_module(fatbin!("attention_prefill"))?;
        let hopper = context.compute_capability()? == (9, 0);
        let sm90 = hopper.then(|| context.load_module(fatbin!("attention_prefill_sm90"))).transpose()?;
        let tiles = |index: usize| match &sm90 {
            Some(module) if !PREFILL_SM90[index].is_empty() => PREFILL_SM90[index]
                .iter()
                .map(|&tile| PrefillKernel::load_sm90(module, index, tile))
                .collect(),
            _ => Ok(vec![PrefillKernel::load(&prefill, index)?]),
        };
        let shared = context.load_module(fatbin!("attention_shared"))?;
        let shared_sm90 =
            hopper.then(|| context.load_module(fatbin!("attention_shared_sm90"))).transpose()?;
        let of_groups = |index: usize| match (&shared_sm90, SHARED_SM90[index]) {
            (Some(module), Some(tile)) => SharedKernel::load(module, "shared_sm90", index, tile),
            (Some(_) | None, _) => SharedKernel::load(&shared, "shared", index, SHARED[index]),
        };
        Ok(Self {
            plan: decode.load_function("pagedd_attention_decode_plan")?,
            plan_lanes: decode.load_function("pagedd_attention_decode_plan_lanes")?,
            decode: (0..SIZES.len())
                .map(|index| DecodeKernel::load(&decode, index))
                .collect::<Result<_, DriverError>>()?,
            prefill: (0..SIZES.len()).map(tiles).collect::<Result<_, DriverError>>()?,
            shared: (0..SIZES.len()).map(of_groups).collect::<Result<_, DriverError>>()?,
        })
    }
}

impl DecodeKernel {
    fn load(module: &Arc<CudaModule>, index: usize) -> Result<Self, DriverError> {
        let ((threads, shared), size) = (DECODE[index], SIZES[index]);
        let decode = pair(module, shared, |name| format!("pagedd_attention_decode_{name}_d{size}"))?;
        let combine = pair(module, 0, |name| format!("pagedd_attention_combine_{name}_d{size}"))?;
        let resident =
            decode[0].occupancy_max_active_blocks_per_multiprocessor(threads, shared as usize, None)?;
        Ok(Self { decode, combine, threads, shared, resident: resident.max(1) })
    }
}

impl SharedKernel {
    fn load(
        module: &Arc<CudaModule>,
        kind: &str,
        index: usize,
        (rows, threads, shared): (u32, u32, u32),
    ) -> Result<Self, DriverError> {
        let size = SIZES[index];
        let functions = pair(module, shared, |name| format!("pagedd_attention_{kind}_{name}_d{size}"))?;
        let resident =
            functions[0].occupancy_max_active_blocks_per_multiprocessor(threads, shared as usize, None)?;
        Ok(Self { functions, rows, threads, shared, resident: resident.max(1) })
    }
}

impl PrefillKernel {
    fn load(module: &Arc<CudaModule>, index: usize) -> Result<Self, DriverError> {
        let ((rows, threads, shared), size) = (PREFILL[index], SIZES[index]);
        let functions = pair(module, shared, |name| format!("pagedd_attention_prefill_{name}_d{size}"))?;
        Ok(Self { functions, rows, threads, shared })
    }

    fn load_sm90(
        module: &Arc<CudaModule>,
        index: usize,
        (rows, threads, shared): (u32, u32, u32),
    ) -> Result<Self, DriverError> {
        let size = SIZES[index];
        let name = |name: &str| format!("pagedd_attention_prefill_sm90_{name}_d{size}_r{rows}");
        Ok(Self { functions: pair(module, shared, name)?, rows, threads, shared })
    }
}

/// A kernel for both types, with leave to use `shared` bytes.
fn pair(
    module: &Arc<CudaModule>,
    shared: u32,
    name: impl Fn(&str) -> String,
) -> Result<[CudaFunction; 2], DriverError> {
    let load = |element: &str| {
        let function = module.load_function(&name(element))?;
        if shared > FREE_SHARED {
            let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            function.set_attribute(attribute, shared as i32)?;
        }
        Ok(function)
    };
    Ok([load(bf16::NAME)?, load(f16::NAME)?])
}

/// Which of several tiles, by rows, most first: that with most rows whose blocks fill the GPU twice; else the next one, down to the smallest
/// where even that one has few. `blocks` counts those of a tile. All give the same bits.
pub(super) fn choose(tiles: &[u32], multiprocessors: usize, blocks: impl Fn(u32) -> usize) -> usize {
    /// Blocks below which the smallest tile is faster.
    const FEW: usize = 64;
    match tiles {
        [most, ..] if tiles.len() == 1 || blocks(*most) >= 2 * multiprocessors => 0,
        [_, next, _, ..] if blocks(*next) < FEW => 2,
        _ => 1,
    }
}
