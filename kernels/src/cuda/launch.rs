//! The kernels, and the one place that launches them.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::{
    CudaContext, CudaFunction, DeviceRepr, DriverError, LaunchConfig, PushKernelArg as _, sys,
};
use half::{bf16, f16};

use super::attention::AttentionKernels;
use super::buffer::Plain;
use super::error::{CudaError, during};
use super::four_bit::FourBitKernels;
use super::small_rows::SmallRowsKernels;
use super::stream::Stream;

/// Elements of activations, weights and KV: 16 bits.
pub trait Half: Plain + PartialEq + sealed::Sealed {
    /// Its name in the names of kernels, and in reports.
    const NAME: &'static str;
    /// The width of the significand, for tolerances: a rounding is off by at most this much of the value.
    const ROUNDING: f64;
    /// Which of a pair of kernels.
    #[doc(hidden)]
    const INDEX: usize;
    /// cuBLAS's name of the type.
    #[doc(hidden)]
    const CUDA_TYPE: cudarc::cublaslt::sys::cudaDataType;
    /// Nearest value.
    fn from_f64(x: f64) -> Self;
    /// The value.
    fn to_f64(self) -> f64;
    /// The value of these bits.
    fn of_bits(bits: u16) -> Self;
    /// Its bits.
    fn to_bits(self) -> u16;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for half::bf16 {}
    impl Sealed for half::f16 {}
}

impl Half for bf16 {
    const NAME: &'static str = "bf16";
    const ROUNDING: f64 = 1.0 / 256.0;
    const INDEX: usize = 0;
    const CUDA_TYPE: cudarc::cublaslt::sys::cudaDataType = cudarc::cublaslt::sys::cudaDataType::CUDA_R_16BF;
    fn from_f64(x: f64) -> Self {
        Self::from_f64(x)
    }
    fn to_f64(self) -> f64 {
        self.into()
    }
    fn of_bits(bits: u16) -> Self {
        Self::from_bits(bits)
    }
    fn to_bits(self) -> u16 {
        self.to_bits()
    }
}

impl Half for f16 {
    const NAME: &'static str = "f16";
    const ROUNDING: f64 = 1.0 / 2048.0;
    const INDEX: usize = 1;
    const CUDA_TYPE: cudarc::cublaslt::sys::cudaDataType = cudarc::cublaslt::sys::cudaDataType::CUDA_R_16F;
    fn from_f64(x: f64) -> Self {
        Self::from_f64(x)
    }
    fn to_f64(self) -> f64 {
        self.into()
    }
    fn of_bits(bits: u16) -> Self {
        Self::from_bits(bits)
    }
    fn to_bits(self) -> u16 {
        self.to_bits()
    }
}

/// All kernels. Those for activations are pairs, by [`Half::INDEX`].
pub(super) struct Kernels {
    pub(super) add_rms_norm: [CudaFunction; 2],
    pub(super) rope_angles: CudaFunction,
    pub(super) rope_into_kv: [CudaFunction; 2],
    pub(super) rope_into_kv_e4m3: [CudaFunction; 2],
    pub(super) silu_mul: [CudaFunction; 2],
    pub(super) embed: [CudaFunction; 2],
    pub(super) copy_blocks: CudaFunction,
    pub(super) scatter: CudaFunction,
    pub(super) fill_normal: [CudaFunction; 2],
    pub(super) adjust_logits: CudaFunction,
    pub(super) restore_logits: CudaFunction,
    pub(super) survey: CudaFunction,
    pub(super) draw_whole: CudaFunction,
    pub(super) draw: CudaFunction,
    pub(super) log_softmax_top: CudaFunction,
    pub(super) attention: AttentionKernels,
    pub(super) small_rows: Option<SmallRowsKernels>,
    pub(super) four_bit: FourBitKernels,
}

/// The compiled form of `kernels/cuda/$name.cu`.
macro_rules! fatbin {
    ($name:literal) => {
        cudarc::nvrtc::Ptx::from_binary(
            include_bytes!(concat!(env!("OUT_DIR"), "/", $name, ".fatbin")).to_vec(),
        )
    };
}
pub(super) use fatbin;

impl Kernels {
    /// Loads all of them.
    ///
    /// # Errors
    /// The GPU cannot run them, or the device failed.
    pub(super) fn load(context: &Arc<CudaContext>) -> Result<Self, DriverError> {
        let norm = context.load_module(fatbin!("norm"))?;
        let rope = context.load_module(fatbin!("rope"))?;
        let elementwise = context.load_module(fatbin!("elementwise"))?;
        let sample = context.load_module(fatbin!("sample"))?;
        Ok(Self {
            add_rms_norm: [norm.load_function("add_rms_norm_bf16")?, norm.load_function("add_rms_norm_f16")?],
            rope_angles: rope.load_function("rope_angles")?,
            rope_into_kv: [rope.load_function("rope_into_kv_bf16")?, rope.load_function("rope_into_kv_f16")?],
            rope_into_kv_e4m3: [
                rope.load_function("rope_into_kv_e4m3_bf16")?,
                rope.load_function("rope_into_kv_e4m3_f16")?,
            ],
            silu_mul: [
                elementwise.load_function("silu_mul_bf16")?,
                elementwise.load_function("silu_mul_f16")?,
            ],
            embed: [elementwise.load_function("embed_bf16")?, elementwise.load_function("embed_f16")?],
            copy_blocks: elementwise.load_function("copy_blocks")?,
            scatter: elementwise.load_function("scatter")?,
            fill_normal: [
                elementwise.load_function("fill_normal_bf16")?,
                elementwise.load_function("fill_normal_f16")?,
            ],
            adjust_logits: sample.load_function("adjust_logits")?,
            restore_logits: sample.load_function("restore_logits")?,
            survey: sample.load_function("survey")?,
            draw_whole: sample.load_function("draw_whole")?,
            draw: sample.load_function("draw")?,
            log_softmax_top: sample.load_function("log_softmax_top")?,
            attention: AttentionKernels::load(context)?,
            small_rows: SmallRowsKernels::load(context)?,
            four_bit: FourBitKernels::load(context)?,
        })
    }
}

/// The parameters of a kernel.
///
/// # Safety
/// The type is `repr(C)`, without padding that matters, and has the fields of the struct that its kernel takes, in the same order.
pub(super) unsafe trait Params: Copy {}

/// How many threads run a kernel.
#[derive(Clone, Copy)]
pub(super) struct Grid {
    pub(super) blocks: (u32, u32),
    pub(super) threads: u32,
    /// Bytes of dynamic shared memory of a block.
    pub(super) shared: u32,
}

/// A wrapper by which a struct goes to the device as it is.
#[repr(transparent)]
struct ByValue<P>(P);

// SAFETY: `Params` says that the bytes of the struct are what the kernel takes.
unsafe impl<P: Params> DeviceRepr for ByValue<P> {}

/// Queues a kernel.
///
/// # Safety
/// `params` are those of `kernel`, and every access that the kernel makes with them on this grid is inside memory that lives until the
/// stream has run it. Nothing else writes that memory meanwhile, other than on the same stream.
pub(super) unsafe fn launch<P: Params>(
    stream: &Stream,
    kernel: &CudaFunction,
    doing: &'static str,
    grid: Grid,
    params: P,
) -> Result<(), CudaError> {
    let config = LaunchConfig {
        grid_dim: (grid.blocks.0, grid.blocks.1, 1),
        block_dim: (grid.threads, 1, 1),
        shared_mem_bytes: grid.shared,
    };
    let params = ByValue(params);
    let mut builder = stream.inner().launch_builder(kernel);
    builder.arg(&params);
    // SAFETY: by this function's contract.
    unsafe { builder.launch(config) }.map_err(during(doing))?;
    Ok(())
}

/// Queues a kernel whose blocks may start while the one before it in the stream still ends, on GPUs of compute capability 9.0: only its machine
/// code is compiled with the wait that this needs.
///
/// # Safety
/// As of [`launch`]. On such GPUs the kernel waits for the one before it, and before that reads only what still earlier ones wrote.
pub(super) unsafe fn launch_early<P: Params>(
    stream: &Stream,
    kernel: &CudaFunction,
    doing: &'static str,
    grid: Grid,
    params: P,
) -> Result<(), CudaError> {
    // SAFETY: this function's contract.
    unsafe { launch_with(stream, kernel, doing, grid, Launch { early: true, cluster: 1 }, params) }
}

/// How a kernel's blocks start.
#[derive(Clone, Copy)]
pub(super) struct Launch {
    /// As with [`launch_early`].
    pub(super) early: bool,
    /// Blocks that run together, each of which can read the others' shared memory: a divisor of the grid, 8 at most.
    pub(super) cluster: u32,
}

/// Queues a kernel whose blocks start as `how` says.
///
/// # Safety
/// As of [`launch_early`] where `how.early`, else as of [`launch`]; clusters only on GPUs of compute capability 9.0 and up.
pub(super) unsafe fn launch_with<P: Params>(
    stream: &Stream,
    kernel: &CudaFunction,
    doing: &'static str,
    grid: Grid,
    how: Launch,
    params: P,
) -> Result<(), CudaError> {
    use sys::CUlaunchAttributeID as Id;
    use sys::CUlaunchAttributeValue as Value;
    stream.device().bind()?;
    let cluster = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: how.cluster, y: 1, z: 1 };
    let early = Value { programmaticStreamSerializationAllowed: 1 };
    let attribute = |id, value| sys::CUlaunchAttribute { id, pad: [0; 4], value };
    let early = attribute(Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, early);
    let cluster = attribute(Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, Value { clusterDim: cluster });
    // The first `count` are asked for.
    let (mut attributes, mut count) = ([early, cluster], 2);
    if how.cluster <= 1 {
        count -= 1;
    }
    if !how.early || stream.device().info().capability != (9, 0) {
        attributes.swap(0, 1);
        count -= 1;
    }
    let config = sys::CUlaunchConfig {
        gridDimX: grid.blocks.0,
        gridDimY: grid.blocks.1,
        gridDimZ: 1,
        blockDimX: grid.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: grid.shared,
        hStream: stream.inner().cu_stream(),
        attrs: attributes.as_mut_ptr(),
        numAttrs: count,
    };
    let mut params = params;
    let mut pointers = [(&raw mut params).cast::<c_void>()];
    let (function, none) = (kernel.cu_function(), ptr::null_mut());
    // SAFETY: the driver copies configuration, attributes and parameters, of the kernel's one struct, before it returns; the function's module
    // lives as long as the kernel that is borrowed. The rest is this function's contract.
    let queued = unsafe { sys::cuLaunchKernelEx(&raw const config, function, pointers.as_mut_ptr(), none) };
    queued.result().map_err(during(doing))
}
