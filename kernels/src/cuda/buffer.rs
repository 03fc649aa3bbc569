//! Memory of the device, typed and sized.
#![allow(unsafe_code)]

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use cudarc::driver::result;
use cudarc::driver::sys::CUdeviceptr;
use half::{bf16, f16};

use super::device::Device;
use super::error::{CudaError, during};
use super::stream::Stream;
use crate::error::{ShapeError, length, product};

/// What a buffer may hold.
///
/// # Safety
/// Every pattern of bits is a value, and the type has no padding and no pointer.
pub unsafe trait Plain: Copy + Send + Sync + 'static {}

// SAFETY: integers and floating-point numbers: every pattern of bits is a value.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for u64 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}
// SAFETY: as above.
unsafe impl Plain for bf16 {}
// SAFETY: as above.
unsafe impl Plain for f16 {}
// SAFETY: an array of such values has neither padding nor pointers.
unsafe impl<T: Plain, const N: usize> Plain for [T; N] {}

/// Memory of a device, at a multiple of 256 bytes. Freed when dropped, which waits for the device.
pub struct Buffer<T: Plain> {
    device: Device,
    at: CUdeviceptr,
    len: usize,
    of: PhantomData<T>,
}

impl<T: Plain> Buffer<T> {
    /// `len` elements of zero bits, set in order with the work of `stream`: other streams come after it by an [`Event`](super::Event).
    ///
    /// # Errors
    /// Not enough memory, or the device failed.
    pub fn zeroed(stream: &Stream, len: usize) -> Result<Self, CudaError> {
        let device = stream.device();
        // An empty buffer has an address too.
        let bytes = product("device buffer", &[len.max(1), size_of::<T>()])?;
        device.bind()?;
        // SAFETY: the context is current; the memory is freed by `drop` alone.
        let at = unsafe { result::malloc_sync(bytes) }.map_err(device.allocating(bytes))?;
        let buffer = Self { device: device.clone(), at, len, of: PhantomData };
        // SAFETY: the bytes are those just allocated, and live until `drop`, which waits.
        unsafe { result::memset_d8_async(at, 0, bytes, stream.inner().cu_stream()) }
            .map_err(during("clearing memory"))?;
        Ok(buffer)
    }

    /// A copy of `data`; waits for it. For preparation and tests: the steady state goes through a [`PinnedRing`](super::PinnedRing).
    ///
    /// # Errors
    /// Not enough memory, or the device failed.
    pub fn copy_of(stream: &Stream, data: &[T]) -> Result<Self, CudaError> {
        let mut buffer = Self::zeroed(stream, data.len())?;
        buffer.all_mut().copy_from(stream, data)?;
        Ok(buffer)
    }

    /// Elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All of it.
    #[must_use]
    pub fn all(&self) -> View<'_, T> {
        View { at: self.at, len: self.len, of: PhantomData }
    }

    /// All of it, to write.
    #[must_use]
    pub fn all_mut(&mut self) -> ViewMut<'_, T> {
        ViewMut { at: self.at, len: self.len, of: PhantomData }
    }

    /// A part of it.
    ///
    /// # Errors
    /// The range is not inside.
    pub fn part(&self, range: Range<usize>) -> Result<View<'_, T>, ShapeError> {
        self.all().part(range)
    }

    /// A part of it, to write.
    ///
    /// # Errors
    /// The range is not inside.
    pub fn part_mut(&mut self, range: Range<usize>) -> Result<ViewMut<'_, T>, ShapeError> {
        let part = self.all().part(range)?;
        Ok(ViewMut { at: part.at, len: part.len, of: PhantomData })
    }
}

impl<T: Plain> Drop for Buffer<T> {
    fn drop(&mut self) {
        // An error here is one of the device, and shows at the next call that can return it.
        let freed = self.device.context().bind_to_thread().and_then(|()| {
            // SAFETY: `at` came from `malloc_sync`, is freed once, and freeing waits for work that may use it.
            unsafe { result::free_sync(self.at) }
        });
        self.device.context().record_err(freed);
    }
}

impl<T: Plain> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer").field("len", &self.len).finish_non_exhaustive()
    }
}

/// Elements of a buffer.
#[derive(Clone, Copy)]
pub struct View<'a, T: Plain> {
    at: CUdeviceptr,
    len: usize,
    of: PhantomData<&'a [T]>,
}

impl<'a> View<'a, u8> {
    /// The same bytes as elements.
    ///
    /// # Errors
    /// They do not begin at a multiple of 16 bytes, or are no whole number of elements.
    pub fn cast<T: Plain>(self) -> Result<View<'a, T>, ShapeError> {
        let len = elements::<T>(self.at, self.len)?;
        Ok(View { at: self.at, len, of: PhantomData })
    }
}

impl<T: Plain> View<'_, T> {
    /// Elements that are no [`Buffer`]'s.
    ///
    /// # Safety
    /// `len` elements lie at `at`, and stay there as long as the view and all work queued with it.
    pub(super) unsafe fn new(at: CUdeviceptr, len: usize) -> Self {
        Self { at, len, of: PhantomData }
    }

    /// Elements.
    #[must_use]
    pub fn len(self) -> usize {
        self.len
    }

    /// Whether it has no elements.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.len == 0
    }

    /// A part of it.
    ///
    /// # Errors
    /// The range is not inside.
    pub fn part(self, range: Range<usize>) -> Result<Self, ShapeError> {
        if range.start > range.end || range.end > self.len {
            return Err(ShapeError::Length {
                what: "device buffer",
                needed: range.end.max(range.start),
                found: self.len,
            });
        }
        let at = self.at + (range.start * size_of::<T>()) as u64;
        Ok(Self { at, len: range.end - range.start, of: PhantomData })
    }

    /// Copies it to the host and waits. For tests and tools: pageable memory is slow.
    ///
    /// # Errors
    /// The device failed.
    pub fn to_vec(self, stream: &Stream) -> Result<Vec<T>, CudaError> {
        let mut out = Vec::<T>::with_capacity(self.len);
        stream.device().bind()?;
        {
            // SAFETY: `Plain` types have no invalid value, and all bytes are written below before anyone reads one: on an error the vector
            // is dropped, which reads none.
            unsafe { out.set_len(self.len) };
        }
        // SAFETY: source and target have `len` elements; the borrow of the buffer and the wait below keep both alive.
        unsafe { result::memcpy_dtoh_async(&mut out, self.at, stream.inner().cu_stream()) }
            .map_err(during("copying to the host"))?;
        stream.synchronize()?;
        Ok(out)
    }

    pub(super) fn address(self) -> CUdeviceptr {
        self.at
    }
}

/// Elements of a buffer that a launch may write.
pub struct ViewMut<'a, T: Plain> {
    at: CUdeviceptr,
    len: usize,
    of: PhantomData<&'a mut [T]>,
}

impl<'a> ViewMut<'a, u8> {
    /// The same bytes as elements.
    ///
    /// # Errors
    /// They do not begin at a multiple of 16 bytes, or are no whole number of elements.
    pub fn cast<T: Plain>(self) -> Result<ViewMut<'a, T>, ShapeError> {
        let len = elements::<T>(self.at, self.len)?;
        Ok(ViewMut { at: self.at, len, of: PhantomData })
    }
}

impl<'a, T: Plain> ViewMut<'a, T> {
    /// Elements that are no [`Buffer`]'s, to write.
    ///
    /// # Safety
    /// As of [`View::new`], and nothing else of this process uses the elements as long as the view lives.
    pub(super) unsafe fn new(at: CUdeviceptr, len: usize) -> Self {
        Self { at, len, of: PhantomData }
    }

    /// Elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The same, to read.
    #[must_use]
    pub fn read(&self) -> View<'_, T> {
        View { at: self.at, len: self.len, of: PhantomData }
    }

    /// The same, for a shorter time.
    #[must_use]
    pub fn again(&mut self) -> ViewMut<'_, T> {
        ViewMut { at: self.at, len: self.len, of: PhantomData }
    }

    /// A part of it.
    ///
    /// # Errors
    /// The range is not inside.
    pub fn part(self, range: Range<usize>) -> Result<Self, ShapeError> {
        let part = View::<'a, T> { at: self.at, len: self.len, of: PhantomData }.part(range)?;
        Ok(Self { at: part.at, len: part.len, of: PhantomData })
    }

    /// The elements `[0, at)` and `[at, len)`.
    ///
    /// # Errors
    /// There are fewer than `at`.
    pub fn split_at(self, at: usize) -> Result<(Self, Self), ShapeError> {
        let whole = View::<'a, T> { at: self.at, len: self.len, of: PhantomData };
        let (left, right) = (whole.part(0..at)?, whole.part(at..self.len)?);
        let part = |part: View<'a, T>| Self { at: part.at, len: part.len, of: PhantomData };
        Ok((part(left), part(right)))
    }

    /// Copies `data` into it and waits. For preparation and tests.
    ///
    /// # Errors
    /// The lengths differ, or the device failed.
    pub fn copy_from(&mut self, stream: &Stream, data: &[T]) -> Result<(), CudaError> {
        length("data for the device", self.len, data.len())?;
        stream.device().bind()?;
        // SAFETY: both have `len` elements; the wait below keeps `data` in place until it is read.
        unsafe { result::memcpy_htod_async(self.at, data, stream.inner().cu_stream()) }
            .map_err(during("copying to the GPU"))?;
        stream.synchronize()
    }

    /// Sets every byte.
    ///
    /// # Errors
    /// The device failed.
    pub fn fill_bytes(&mut self, stream: &Stream, byte: u8) -> Result<(), CudaError> {
        stream.device().bind()?;
        // SAFETY: the bytes are those of the borrowed buffer, whose drop waits; `Plain` takes any pattern of bits.
        unsafe {
            result::memset_d8_async(self.at, byte, self.len * size_of::<T>(), stream.inner().cu_stream())
        }
        .map_err(during("setting memory"))
    }

    pub(super) fn address(&self) -> CUdeviceptr {
        self.at
    }
}

/// How many elements `len` bytes at `at` are.
fn elements<T: Plain>(at: CUdeviceptr, len: usize) -> Result<usize, ShapeError> {
    if !at.is_multiple_of(16) {
        let (what, needed) = ("address of elements", "a multiple of 16");
        return Err(ShapeError::Dimension { what, needed, found: at as usize });
    }
    // Elements of no bytes fit no number of bytes.
    let count = len.checked_div(size_of::<T>()).unwrap_or(0);
    length("bytes of elements", count * size_of::<T>(), len)?;
    Ok(count)
}

#[cfg(test)]
mod tests;
