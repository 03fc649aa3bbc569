//! The attention kernels, and how each is launched.

use std::sync::Arc;

use cudarc::driver::sys::CUfunction_attribute as Attribute;
use cudarc::driver::{CudaContext, CudaFunction, CudaModule, DriverError};
use half::{bf16, f16};

use crate::cuda::error::CudaError;
use crate::cuda::launch::{Half, fatbin};
use crate::cuda::norm::dimension;
use crate::e4m3::DeviceKvElement;

/// Sizes of heads that there are kernels for.
const SIZES: [usize; 5] = [64, 80, 96, 128, 256];

/// Place of a size of heads.
pub(super) fn size_index(head_dim: usize) -> Option<usize> {
    SIZES.iter().position(|&size| size == head_dim)
}

/// Shared memory of a block that needs no leave.
const FREE_SHARED: u32 = 48 << 10;

/// Packed rows, threads and bytes of shared memory of a block.
type Tile = (u32, u32, u32);

/// How the kernels for one kind of elements are launched, by size of heads.
struct Launches {
    /// In the kernels' names, before the type that is multiplied.
    prefix: &'static str,
    /// Types that are multiplied, by [`Half::INDEX`].
    types: &'static [&'static str],
    /// Threads and bytes of shared memory of decode.
    decode: [(u32, u32); 5],
    /// Of prefill and of the kernel for large groups, which have the same tiles.
    prefill: [Tile; 5],
    /// Of prefill on compute capability 9.0, most rows first; none for sizes that the others serve there too.
    prefill_sm90: [&'static [Tile]; 5],
    /// The same of the kernel for large groups.
    shared_sm90: [Option<Tile>; 5],
}

/// As in `attention_{decode,prefill,prefill_sm90,shared,shared_sm90}.cu`.
const HALF: Launches = Launches {
    prefix: "",
    types: &[bf16::NAME, f16::NAME],
    decode: [(128, 67_216), (128, 69_264), (128, 54_928), (128, 67_216), (64, 66_960)],
    prefill: [
        (128, 128, 40_960),
        (128, 128, 56_320),
        (128, 128, 66_560),
        (128, 128, 81_920),
        (64, 128, 81_920),
    ],
    prefill_sm90: [
        &[(128, 384, 81_984)],
        &[],
        &[],
        &[(192, 512, 147_552), (128, 384, 163_968), (64, 256, 114_784)],
        &[(128, 384, 196_672)],
    ],
    shared_sm90: [Some((128, 384, 81_984)), None, None, Some((128, 384, 163_968)), Some((128, 384, 196_672))],
};

/// As in the same files with `_e4m3`.
const E4M3: Launches = Launches {
    prefix: "e4m3_",
    types: &[bf16::NAME],
    decode: [(128, 66_192), (128, 66_192), (128, 61_072), (128, 69_264), (64, 67_984)],
    prefill: [
        (128, 128, 43_008),
        (128, 128, 57_856),
        (128, 128, 68_608),
        (128, 128, 59_392),
        (64, 128, 86_016),
    ],
    prefill_sm90: [
        &[(128, 384, 122_944)],
        &[],
        &[],
        &[(192, 512, 188_512), (128, 384, 204_928), (64, 256, 112_704)],
        &[(128, 384, 172_096)],
    ],
    shared_sm90: [
        Some((128, 384, 122_944)),
        None,
        None,
        Some((128, 384, 204_928)),
        Some((128, 384, 172_096)),
    ],
};

/// A kernel by the type that is multiplied.
pub(super) struct Typed(Vec<CudaFunction>);

impl Typed {
    /// # Errors
    /// There is none for `T`.
    pub(super) fn get<T: Half>(&self) -> Result<&CudaFunction, CudaError> {
        let refused = || dimension("bytes of elements of keys and values beside queries in f16", "2", 1);
        self.0.get(T::INDEX).ok_or_else(refused)
    }
}

/// All attention kernels. Lists are by [`size_index`].
pub(in crate::cuda) struct AttentionKernels {
    pub(super) plan: CudaFunction,
    pub(super) plan_lanes: CudaFunction,
    pub(super) combine: Vec<Typed>,
    half: ElementKernels,
    e4m3: ElementKernels,
}

/// Those for one kind of elements of keys and values.
pub(super) struct ElementKernels {
    pub(super) decode: Vec<DecodeKernel>,
    /// Tiles with most rows first.
    pub(super) prefill: Vec<Vec<TileKernel>>,
    /// For what large groups share.
    pub(super) shared: Vec<TileKernel>,
}

pub(super) struct DecodeKernel {
    pub(super) functions: Typed,
    pub(super) threads: u32,
    pub(super) shared: u32,
    /// Blocks that a multiprocessor holds.
    pub(super) resident: u32,
}

pub(super) struct TileKernel {
    pub(super) functions: Typed,
    /// Packed rows of a tile.
    pub(super) rows: u32,
    pub(super) threads: u32,
    pub(super) shared: u32,
    /// Blocks that a multiprocessor holds.
    pub(super) resident: u32,
}

/// What the kernels of one kind of elements are in.
struct Modules {
    decode: Arc<CudaModule>,
    prefill: Arc<CudaModule>,
    shared: Arc<CudaModule>,
    /// Of prefill and for large groups.
    sm90: Option<[Arc<CudaModule>; 2]>,
}

impl AttentionKernels {
    /// Loads all that the GPU can run.
    ///
    /// # Errors
    /// The GPU cannot run them, or the device failed.
    pub(in crate::cuda) fn load(context: &Arc<CudaContext>) -> Result<Self, DriverError> {
        let hopper = context.compute_capability()? == (9, 0);
        let half = Modules {
            decode: context.load_module(fatbin!("attention_decode"))?,
            prefill: context.load_module(fatbin!("attention_prefill"))?,
            shared: context.load_module(fatbin!("attention_shared"))?,
            sm90: if hopper {
                let prefill = context.load_module(fatbin!("attention_prefill_sm90"))?;
                Some([prefill, context.load_module(fatbin!("attention_shared_sm90"))?])
            } else {
                None
            },
        };
        let e4m3 = Modules {
            decode: context.load_module(fatbin!("attention_decode_e4m3"))?,
            prefill: context.load_module(fatbin!("attention_prefill_e4m3"))?,
            shared: context.load_module(fatbin!("attention_shared_e4m3"))?,
            sm90: if hopper {
                let prefill = context.load_module(fatbin!("attention_prefill_e4m3_sm90"))?;
                Some([prefill, context.load_module(fatbin!("attention_shared_e4m3_sm90"))?])
            } else {
                None
            },
        };
        let combine = |size: &usize| {
            typed(&half.decode, HALF.types, 0, |of| format!("pagedd_attention_combine_{of}_d{size}"))
        };
        Ok(Self {
            plan: half.decode.load_function("pagedd_attention_decode_plan")?,
            plan_lanes: half.decode.load_function("pagedd_attention_decode_plan_lanes")?,
            combine: SIZES.iter().map(combine).collect::<Result<_, DriverError>>()?,
            half: ElementKernels::load(&half, &HALF)?,
            e4m3: ElementKernels::load(&e4m3, &E4M3)?,
        })
    }

    /// Those for keys and values that are kept as `element`.
    pub(super) fn of(&self, element: DeviceKvElement) -> &ElementKernels {
        match element {
            DeviceKvElement::Half => &self.half,
            DeviceKvElement::E4m3 => &self.e4m3,
        }
    }
}

impl ElementKernels {
    fn load(modules: &Modules, how: &Launches) -> Result<Self, DriverError> {
        let Launches { prefix, types, .. } = *how;
        let decode = |(index, size): (usize, &usize)| {
            let (threads, shared) = how.decode[index];
            let name = |of: &str| format!("pagedd_attention_decode_{prefix}{of}_d{size}");
            let functions = typed(&modules.decode, types, shared, name)?;
            let resident = resident(&functions, threads, shared)?;
            Ok(DecodeKernel { functions, threads, shared, resident })
        };
        let prefill = |(index, size): (usize, &usize)| match &modules.sm90 {
            Some([module, _]) if !how.prefill_sm90[index].is_empty() => {
                let name =
                    |of: &str, rows| format!("pagedd_attention_prefill_{prefix}sm90_{of}_d{size}_r{rows}");
                let tile = |&tile: &Tile| TileKernel::load(module, types, tile, |of| name(of, tile.0));
                how.prefill_sm90[index].iter().map(tile).collect()
            }
            Some(_) | None => {
                let name = |of: &str| format!("pagedd_attention_prefill_{prefix}{of}_d{size}");
                Ok(vec![TileKernel::load(&modules.prefill, types, how.prefill[index], name)?])
            }
        };
        let shared = |(index, size): (usize, &usize)| match (&modules.sm90, how.shared_sm90[index]) {
            (Some([_, module]), Some(tile)) => TileKernel::load(module, types, tile, |of| {
                format!("pagedd_attention_shared_{prefix}sm90_{of}_d{size}")
            }),
            (Some(_) | None, _) => TileKernel::load(&modules.shared, types, how.prefill[index], |of| {
                format!("pagedd_attention_shared_{prefix}{of}_d{size}")
            }),
        };
        let sizes = || SIZES.iter().enumerate();
        Ok(Self {
            decode: sizes().map(decode).collect::<Result<_, DriverError>>()?,
            prefill: sizes().map(prefill).collect::<Result<_, DriverError>>()?,
            shared: sizes().map(shared).collect::<Result<_, DriverError>>()?,
        })
    }
}

impl TileKernel {
    fn load(
        module: &Arc<CudaModule>,
        types: &[&str],
        (rows, threads, shared): Tile,
        name: impl Fn(&str) -> String,
    ) -> Result<Self, DriverError> {
        let functions = typed(module, types, shared, name)?;
        let resident = resident(&functions, threads, shared)?;
        Ok(Self { functions, rows, threads, shared, resident })
    }
}

/// A kernel for all its types, with leave to use `shared` bytes.
fn typed(
    module: &Arc<CudaModule>,
    types: &[&str],
    shared: u32,
    name: impl Fn(&str) -> String,
) -> Result<Typed, DriverError> {
    let load = |of: &&str| {
        let function = module.load_function(&name(of))?;
        if shared > FREE_SHARED {
            let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            function.set_attribute(attribute, shared as i32)?;
        }
        Ok(function)
    };
    Ok(Typed(types.iter().map(load).collect::<Result<_, DriverError>>()?))
}

/// Blocks that a multiprocessor holds, at least one.
fn resident(functions: &Typed, threads: u32, shared: u32) -> Result<u32, DriverError> {
    let of = |function: &CudaFunction| {
        function.occupancy_max_active_blocks_per_multiprocessor(threads, shared as usize, None)
    };
    Ok(functions.0.first().map_or(Ok(1), of)?.max(1))
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
