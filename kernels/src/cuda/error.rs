//! What the GPU side refuses, and what it reports.

use cudarc::driver::DriverError;
use cudarc::driver::sys::CUresult;

use crate::error::{KvError, ShapeError};

/// Why a GPU does not serve.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CudaError {
    /// The host has no NVIDIA driver: install one, or serve on the CPU.
    #[error("no NVIDIA driver on this host: libcuda.so.1 is missing or a stub")]
    NoDriver,
    /// The driver is older than the one that this program is built for.
    #[error("the NVIDIA driver supports CUDA {}.{}, {}.{} is needed: install driver {} or newer", found / 1000, found % 1000 / 10,
        needed / 1000, needed % 1000 / 10, NEEDED_DRIVER)]
    DriverTooOld {
        /// What the driver supports: 1000 times the major version plus 10 times the minor one.
        found: i32,
        /// What is needed, likewise.
        needed: i32,
    },
    /// A driver, but no such GPU.
    #[error("no GPU {ordinal}: the driver shows {count}")]
    NoGpu {
        /// Which was asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// The GPU cannot run the kernels that were built.
    #[error("{gpu} has compute capability {}.{}, at least 8.0 is needed", capability.0, capability.1)]
    Architecture {
        /// Its name.
        gpu: String,
        /// Major and minor.
        capability: (i32, i32),
    },
    /// A library of CUDA that is loaded at run time is not there.
    #[error("{library} is missing: install the CUDA {}.x runtime libraries", NEEDED_CUDA / 1000)]
    NoLibrary {
        /// Which.
        library: &'static str,
    },
    /// The GPU (or, for pinned memory, the host) has too little memory left.
    #[error("{wanted} bytes do not fit: the GPU has {free} of {total} bytes free")]
    OutOfMemory {
        /// What was asked for.
        wanted: usize,
        /// What is free.
        free: usize,
        /// What there is in all.
        total: usize,
    },
    /// A file descriptor that is no allocation of this GPU's memory, or one of another size than was said. Nothing was mapped.
    #[error("the file descriptor holds no shared memory of {wanted} bytes on this GPU: {problem}")]
    Foreign {
        /// How many bytes it was said to hold.
        wanted: usize,
        /// What it is instead, as far as the driver tells.
        problem: String,
    },
    /// The device failed. Such errors stay: every later call fails too, and only a new process helps.
    #[error("{doing}: {code}")]
    Device {
        /// What was being done.
        doing: &'static str,
        /// The driver's or library's name of the error.
        code: String,
    },
    /// Sizes that do not fit. Nothing was launched.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// Work lists made for what a batch held before, or for another batch. Nothing was launched.
    #[error("attention was planned for another batch")]
    Plan,
    /// A batch that does not fit its KV arena. Nothing was launched.
    #[error(transparent)]
    Kv(#[from] KvError),
}

/// The CUDA version that kernels and bindings are made for.
pub(super) const NEEDED_CUDA: i32 = 13_000;
/// The first driver that supports it.
const NEEDED_DRIVER: u32 = 580;

/// For `map_err`: a driver's error met while `doing`.
pub(super) fn during(doing: &'static str) -> impl Fn(DriverError) -> CudaError {
    move |error| match error.0 {
        CUresult::CUDA_ERROR_STUB_LIBRARY => CudaError::NoDriver,
        CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
        | CUresult::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE
        | CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
            CudaError::DriverTooOld { found: super::device::driver_version(), needed: NEEDED_CUDA }
        }
        code => CudaError::Device { doing, code: format!("{code:?}") },
    }
}
