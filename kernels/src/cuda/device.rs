//! One GPU, found and checked.
#![allow(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUresult};
use cudarc::driver::{CudaContext, DriverError, result};

use super::error::{CudaError, NEEDED_CUDA, during};
use super::launch::Kernels;
use super::stream::Stream;

/// What a GPU is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceInfo {
    /// Its place among the driver's GPUs.
    pub ordinal: usize,
    /// Its name.
    pub name: String,
    /// Compute capability, major and minor.
    pub capability: (i32, i32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of its second-level cache.
    pub cache_bytes: usize,
    /// Bytes of its memory.
    pub memory_bytes: usize,
    /// What the driver supports: 1000 times the major version of CUDA plus 10 times the minor one.
    pub driver: i32,
}

/// A GPU with its kernels loaded.
///
/// Having one tells you: the driver is new enough, the GPU can run the kernels, and all of them are there. It does not tell you that there
/// is memory, or that nobody else uses the GPU. Clones are the same device.
#[derive(Clone)]
pub struct Device {
    context: Arc<CudaContext>,
    kernels: Arc<Kernels>,
    info: Arc<DeviceInfo>,
}

impl Device {
    /// Opens the driver's GPU `ordinal`.
    ///
    /// # Errors
    /// No driver, one too old, no such GPU, one too old; or the device fails.
    pub fn open(ordinal: usize) -> Result<Self, CudaError> {
        let count = gpus()?;
        if ordinal >= count {
            return Err(CudaError::NoGpu { ordinal, count });
        }
        let context = CudaContext::new(ordinal).map_err(|error| match error.0 {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => CudaError::OutOfMemory { wanted: 0, free: 0, total: 0 },
            _ => during("making a context")(error),
        })?;
        // SAFETY: buffers of this crate are none of cudarc's slices: no event of theirs is needed.
        unsafe { context.disable_event_tracking() };
        let info = info(&context, ordinal).map_err(during("asking the GPU what it is"))?;
        if info.capability < (8, 0) {
            return Err(CudaError::Architecture { gpu: info.name, capability: info.capability });
        }
        let kernels = Kernels::load(&context).map_err(|error| match error.0 {
            CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU | CUresult::CUDA_ERROR_INVALID_PTX => {
                CudaError::Architecture { gpu: info.name.clone(), capability: info.capability }
            }
            _ => during("loading kernels")(error),
        })?;
        Ok(Self { context, kernels: Arc::new(kernels), info: Arc::new(info) })
    }

    /// What it is.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// Free and total bytes of its memory.
    ///
    /// # Errors
    /// The device failed.
    pub fn memory(&self) -> Result<(usize, usize), CudaError> {
        self.context.mem_get_info().map_err(during("asking for free memory"))
    }

    /// A new stream.
    ///
    /// # Errors
    /// The device failed.
    pub fn stream(&self) -> Result<Stream, CudaError> {
        let stream = self.context.new_stream().map_err(during("making a stream"))?;
        Ok(Stream::new(self.clone(), stream))
    }

    pub(super) fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    pub(super) fn kernels(&self) -> &Kernels {
        &self.kernels
    }

    /// Makes the context current on this thread.
    pub(super) fn bind(&self) -> Result<(), CudaError> {
        self.context.bind_to_thread().map_err(during("binding the context"))
    }

    /// For `map_err` of an allocation.
    pub(super) fn allocating(&self, wanted: usize) -> impl Fn(DriverError) -> CudaError + '_ {
        move |error| match error.0 {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let (free, total) = self.memory().unwrap_or_default();
                CudaError::OutOfMemory { wanted, free, total }
            }
            _ => during("allocating")(error),
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.info).finish()
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.context, &other.context)
    }
}

/// How many GPUs the driver shows. Asks for the driver before any of its functions: a call without it would panic.
fn gpus() -> Result<usize, CudaError> {
    // SAFETY: only looks for the library and loads it; its initialisers are NVIDIA's own.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    match result::init() {
        Err(DriverError(CUresult::CUDA_ERROR_NO_DEVICE)) => return Ok(0),
        other => other.map_err(during("initialising the driver"))?,
    }
    let found = driver_version();
    if found < NEEDED_CUDA {
        return Err(CudaError::DriverTooOld { found, needed: NEEDED_CUDA });
    }
    let count = result::device::get_count().map_err(during("counting GPUs"))?;
    Ok(usize::try_from(count).unwrap_or(0))
}

/// What the driver supports; 0 where it does not say. Every driver has this function.
pub(super) fn driver_version() -> i32 {
    let mut version = 0;
    // SAFETY: the driver is there (callers hold an error of its, or asked), and writes one integer.
    let answer = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    if answer == CUresult::CUDA_SUCCESS { version } else { 0 }
}

fn info(context: &Arc<CudaContext>, ordinal: usize) -> Result<DeviceInfo, DriverError> {
    let count = |attribute| Ok(usize::try_from(context.attribute(attribute)?).unwrap_or(0));
    Ok(DeviceInfo {
        ordinal,
        name: context.name()?,
        capability: context.compute_capability()?,
        multiprocessors: count(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
        cache_bytes: count(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?,
        memory_bytes: context.total_mem()?,
        driver: driver_version(),
    })
}

#[cfg(test)]
mod tests;
