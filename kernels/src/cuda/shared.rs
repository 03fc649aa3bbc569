//! Memory of the device that other processes can hold and map.
//!
//! **Owns** one allocation of the driver's virtual memory API for each buffer: its physical memory, its addresses in this process, its form
//! as a file descriptor. **Never** clears memory, and never believes a size that comes with a descriptor.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::fmt;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};

use cudarc::driver::DriverError;
use cudarc::driver::sys::{self, CUdeviceptr, CUresult};
use rustix::io::FdFlags;

use super::buffer::{View, ViewMut};
use super::device::Device;
use super::error::{CudaError, during};
use crate::error::ShapeError;

/// How allocations leave the process.
const FD: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Memory of a device that outlives this process as long as someone holds a descriptor of it, at a multiple of 2 MiB.
///
/// Not cleared: what it holds at first may be another's. Whoever has a descriptor may write it at any time; a value read from it is to be
/// checked like one from a file.
pub struct SharedBuffer {
    // Dropped in this order: no address may be given back while memory lies at it.
    mapped: Mapped,
    _range: Range,
    allocation: Allocation,
    /// A descriptor of imported memory: the driver exports for its maker alone.
    imported: Option<OwnedFd>,
    len: usize,
}

impl SharedBuffer {
    /// New memory for `bytes` bytes, rounded up to what the driver gives at least (2 MiB on most GPUs).
    ///
    /// # Errors
    /// Not enough memory, or the device failed, or its driver cannot share memory by descriptors.
    pub fn create(device: &Device, bytes: usize) -> Result<Self, CudaError> {
        let size = rounded(bytes, granularity(device)?)?;
        let allocation = Allocation::create(device, size)?;
        let range = Range::reserve(device, size)?;
        let mapped = Mapped::new(&allocation, &range, size)
            .and_then(Mapped::accessible)
            .map_err(during("mapping shared memory"))?;
        Ok(Self { mapped, _range: range, allocation, imported: None, len: bytes })
    }

    /// Memory that [`create`](Self::create) made for `bytes` bytes, here or in another process, by a descriptor of it. The descriptor may be
    /// closed after.
    ///
    /// # Errors
    /// [`CudaError::Foreign`]: it is no such memory, not of this device, or of another (rounded) size; nothing stays mapped. Not enough
    /// addresses, too many open files, or the device failed.
    pub fn import(device: &Device, fd: BorrowedFd<'_>, bytes: usize) -> Result<Self, CudaError> {
        let foreign = |problem: String| CudaError::Foreign { wanted: bytes, problem };
        let granule = granularity(device)?;
        let size = rounded(bytes, granule)?;
        let allocation = Allocation::import(device, fd).map_err(|error| match error.0 {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => device.allocating(size)(error),
            code if refuses(code) => foreign(format!("the driver does not take it ({code:?})")),
            // What the driver says of a file of another kind, but of a failure of its own, too.
            CUresult::CUDA_ERROR_UNKNOWN if device.context().synchronize().is_ok() => {
                foreign("the driver does not know it".to_owned())
            }
            _ => during("importing shared memory")(error),
        })?;
        let imported = fd.try_clone_to_owned().map_err(|error| failed("importing shared memory", &error))?;
        let found = allocation.properties().map_err(during("importing shared memory"))?.location;
        if found != location(device) {
            return Err(foreign(format!("it is memory elsewhere ({:?}, number {})", found.type_, found.id)));
        }
        // Nobody says how large an allocation is; but no mapping may be longer.
        let longer = size.checked_add(granule).ok_or(ShapeError::Overflow { what: "shared memory" })?;
        let range = Range::reserve(device, longer)?;
        match Mapped::new(&allocation, &range, longer) {
            Ok(_) => return Err(foreign(format!("it is larger than {size} bytes"))),
            Err(error) if refuses(error.0) => {}
            Err(error) => return Err(during("mapping shared memory")(error)),
        }
        let mapped = match Mapped::new(&allocation, &range, size) {
            Ok(mapped) => mapped.accessible().map_err(during("mapping shared memory"))?,
            Err(error) if refuses(error.0) => {
                return Err(foreign(format!("it has another size ({size} bytes do not map)")));
            }
            Err(error) => return Err(during("mapping shared memory")(error)),
        };
        Ok(Self { mapped, _range: range, allocation, imported: Some(imported), len: bytes })
    }

    /// A descriptor of it, closed in programs that this one starts. The memory stays as long as one is open somewhere, or it is mapped.
    ///
    /// # Errors
    /// The device failed, or the process has too many open files.
    pub fn export(&self) -> Result<OwnedFd, CudaError> {
        if let Some(imported) = &self.imported {
            return imported.try_clone().map_err(|error| failed("exporting shared memory", &error));
        }
        self.allocation.device.bind()?;
        let mut fd: RawFd = -1;
        // SAFETY: the allocation is alive, was made to be exported as a descriptor, and one integer is written.
        let exported =
            unsafe { sys::cuMemExportToShareableHandle((&raw mut fd).cast(), self.allocation.handle, FD, 0) };
        exported.result().map_err(during("exporting shared memory"))?;
        // SAFETY: the driver opened the descriptor for the caller, and says so by its success.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        rustix::io::fcntl_setfd(&fd, FdFlags::CLOEXEC)
            .map_err(|error| failed("exporting shared memory", &error.into()))?;
        Ok(fd)
    }

    /// Bytes, as they were asked for.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no bytes were asked for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All of it.
    #[must_use]
    pub fn all(&self) -> View<'_, u8> {
        // SAFETY: `len` bytes are mapped at `at` until `drop`, which waits for the device.
        unsafe { View::new(self.mapped.at, self.len) }
    }

    /// All of it, to write.
    #[must_use]
    pub fn all_mut(&mut self) -> ViewMut<'_, u8> {
        // SAFETY: as above, and `&mut self` keeps this process's other users away. Those of other processes can make contents wrong, as
        // launches of two streams can, and nothing else.
        unsafe { ViewMut::new(self.mapped.at, self.len) }
    }
}

impl fmt::Debug for SharedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedBuffer").field("len", &self.len).finish_non_exhaustive()
    }
}

/// Physical memory.
struct Allocation {
    device: Device,
    handle: sys::CUmemGenericAllocationHandle,
}

impl Allocation {
    fn create(device: &Device, size: usize) -> Result<Self, CudaError> {
        device.bind()?;
        let (properties, mut handle) = (properties(device), 0);
        // SAFETY: the properties are a struct of the driver's own form; one handle is written.
        let created = unsafe { sys::cuMemCreate(&raw mut handle, size, &raw const properties, 0) };
        created.result().map_err(device.allocating(size))?;
        Ok(Self { device: device.clone(), handle })
    }

    fn import(device: &Device, fd: BorrowedFd<'_>) -> Result<Self, DriverError> {
        device.context().bind_to_thread()?;
        let mut handle = 0;
        // The driver takes the number in place of a pointer.
        let number = std::ptr::without_provenance_mut::<c_void>(fd.as_raw_fd() as usize);
        // SAFETY: the descriptor is open while it is borrowed; the driver checks what it is, and writes one handle.
        let imported = unsafe { sys::cuMemImportFromShareableHandle(&raw mut handle, number, FD) };
        imported.result()?;
        Ok(Self { device: device.clone(), handle })
    }

    fn properties(&self) -> Result<sys::CUmemAllocationProp, DriverError> {
        let mut found = properties(&self.device);
        // SAFETY: the handle is alive; one struct is written.
        let answer = unsafe { sys::cuMemGetAllocationPropertiesFromHandle(&raw mut found, self.handle) };
        answer.result().map(|()| found)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let released = self.device.context().bind_to_thread().and_then(|()| {
            // SAFETY: the handle came from the driver and is released once. What is still mapped would stay.
            unsafe { sys::cuMemRelease(self.handle) }.result()
        });
        self.device.context().record_err(released);
    }
}

/// Addresses, of which no other allocation gets one.
struct Range {
    device: Device,
    at: CUdeviceptr,
    size: usize,
}

impl Range {
    fn reserve(device: &Device, size: usize) -> Result<Self, CudaError> {
        device.bind()?;
        let mut at = 0;
        // SAFETY: no address is asked for; one is written.
        let reserved = unsafe { sys::cuMemAddressReserve(&raw mut at, size, 0, 0, 0) };
        reserved.result().map_err(device.allocating(size))?;
        Ok(Self { device: device.clone(), at, size })
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        let freed = self.device.context().bind_to_thread().and_then(|()| {
            // SAFETY: reserved with these numbers, freed once, and nothing is mapped in it any more.
            unsafe { sys::cuMemAddressFree(self.at, self.size) }.result()
        });
        self.device.context().record_err(freed);
    }
}

/// An allocation at the start of a range. Its owner drops it before both.
struct Mapped {
    device: Device,
    at: CUdeviceptr,
    size: usize,
}

impl Mapped {
    /// Maps `size` bytes, which nobody can access yet.
    fn new(allocation: &Allocation, range: &Range, size: usize) -> Result<Self, DriverError> {
        let device = allocation.device.clone();
        device.context().bind_to_thread()?;
        // SAFETY: nothing else is mapped in the range, which has `size` bytes or more; the driver checks that the allocation has them.
        unsafe { sys::cuMemMap(range.at, size, 0, allocation.handle, 0) }.result()?;
        Ok(Self { device, at: range.at, size })
    }

    /// Lets the device read and write it.
    fn accessible(self) -> Result<Self, DriverError> {
        let access = sys::CUmemAccessDesc {
            location: location(&self.device),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the bytes are those just mapped; one description is read.
        unsafe { sys::cuMemSetAccess(self.at, self.size, &raw const access, 1) }.result()?;
        Ok(self)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // Work of any stream may use it. Where the wait fails, the device does, and runs nothing any more.
        let waited = self.device.context().synchronize();
        self.device.context().record_err(waited);
        // SAFETY: mapped with these numbers, unmapped once, and no work uses it.
        let unmapped = unsafe { sys::cuMemUnmap(self.at, self.size) }.result();
        self.device.context().record_err(unmapped);
    }
}

/// Plain memory of the device that can be exported.
fn properties(device: &Device) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: FD,
        location: location(device),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

fn location(device: &Device) -> sys::CUmemLocation {
    let type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    sys::CUmemLocation { type_, id: device.context().cu_device() }
}

/// What sizes of allocations are multiples of.
fn granularity(device: &Device) -> Result<usize, CudaError> {
    device.bind()?;
    let (properties, mut granule) = (properties(device), 0);
    let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: the properties are a struct of the driver's own form; one number is written.
    let answer =
        unsafe { sys::cuMemGetAllocationGranularity(&raw mut granule, &raw const properties, least) };
    answer.result().map_err(during("asking for shared memory"))?;
    Ok(granule.max(1))
}

/// `bytes` up to the next multiple of `granule`; one granule at least.
fn rounded(bytes: usize, granule: usize) -> Result<usize, ShapeError> {
    bytes.max(1).checked_next_multiple_of(granule).ok_or(ShapeError::Overflow { what: "shared memory" })
}

/// For the system's errors: it says no more than the driver would.
fn failed(doing: &'static str, error: &std::io::Error) -> CudaError {
    CudaError::Device { doing, code: error.to_string() }
}

/// Whether the driver says by `code` that a descriptor or size is not what was said of it: the device works.
fn refuses(code: CUresult) -> bool {
    matches!(
        code,
        CUresult::CUDA_ERROR_INVALID_VALUE
            | CUresult::CUDA_ERROR_INVALID_HANDLE
            | CUresult::CUDA_ERROR_INVALID_DEVICE
            | CUresult::CUDA_ERROR_OPERATING_SYSTEM
            | CUresult::CUDA_ERROR_NOT_PERMITTED
            | CUresult::CUDA_ERROR_NOT_SUPPORTED
    )
}

#[cfg(test)]
mod tests;
