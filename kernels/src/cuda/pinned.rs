//! Memory of the host that the device reads and writes by itself.
//!
//! **Owns** the promise that the host touches such memory only when no copy of it is under way.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use cudarc::driver::result;

use super::buffer::{Plain, View, ViewMut};
use super::device::Device;
use super::error::{CudaError, during};
use super::launch::{Grid, Params, launch};
use super::stream::{Event, Stream};
use crate::error::{ShapeError, length, product};

/// Of this process.
static PINNED: AtomicUsize = AtomicUsize::new(0);

/// Bytes of the host's memory that this process has pinned here.
pub fn pinned_bytes() -> usize {
    PINNED.load(Ordering::Relaxed)
}

/// Pinned bytes, freed when dropped.
struct HostMemory {
    device: Device,
    at: NonNull<u8>,
    bytes: usize,
}

// SAFETY: plain memory of the process; who may touch it when is the business of the owner's `&` and `&mut`.
unsafe impl Send for HostMemory {}
// SAFETY: a shared reference gives reads only.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    fn zeroed(device: &Device, bytes: usize) -> Result<Self, CudaError> {
        let bytes = bytes.max(1);
        device.bind()?;
        // Flags 0: not write-combined, which would make reads by the host slow.
        // SAFETY: the context is current; the memory is freed by `drop` alone.
        let at = unsafe { result::malloc_host(bytes, 0) }.map_err(device.allocating(bytes))?;
        let Some(at) = NonNull::new(at.cast::<u8>()) else {
            return Err(CudaError::OutOfMemory { wanted: bytes, free: 0, total: 0 });
        };
        // SAFETY: `bytes` bytes were just allocated, and nobody else has them.
        unsafe { at.as_ptr().write_bytes(0, bytes) };
        PINNED.fetch_add(bytes, Ordering::Relaxed);
        Ok(Self { device: device.clone(), at, bytes })
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the bytes were allocated and zeroed, and live as long as `self`; owners wait for copies into them before.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.bytes) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` keeps others away; owners wait for copies from them before.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.bytes) }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        PINNED.fetch_sub(self.bytes, Ordering::Relaxed);
        let freed = self.device.context().bind_to_thread().and_then(|()| {
            // SAFETY: `at` came from `malloc_host` and is freed once.
            unsafe { result::free_host(self.at.as_ptr().cast::<c_void>()) }
        });
        self.device.context().record_err(freed);
    }
}

/// The bytes of plain values.
fn as_bytes<T: Plain>(data: &[T]) -> &[u8] {
    // SAFETY: `Plain` types have no padding, so that all bytes are set; the slice covers exactly those of `data`.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast::<u8>(), size_of_val(data)) }
}

/// Uploads of one launch.
const PIECES: usize = 12;
/// Bytes that a thread copies at once: pieces begin at multiples of it.
const PACK: usize = 16;
/// Threads of a block that copies.
const THREADS: u32 = 128;

/// What goes where. Fields as in elementwise.cu.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Piece {
    to: u64,
    first: u32,
    words: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ScatterArgs {
    from: u64,
    pieces: [Piece; PIECES],
}
// SAFETY: the fields of ScatterArgs in elementwise.cu, without padding.
unsafe impl Params for ScatterArgs {}

/// Uploads that wait for one another.
struct Held {
    slot: usize,
    /// Bytes of the slot.
    used: usize,
    pieces: [Piece; PIECES],
    count: usize,
}

/// Slots through which data goes to the device without a wait, as long as one is free.
pub struct PinnedRing {
    slots: Vec<(HostMemory, Event)>,
    next: usize,
    held: Option<Held>,
}

impl PinnedRing {
    /// `slots` (at least 1) of `bytes` each.
    ///
    /// # Errors
    /// Not enough memory, or the device failed.
    pub fn new(device: &Device, slots: usize, bytes: usize) -> Result<Self, CudaError> {
        let slot = |_| Ok((HostMemory::zeroed(device, bytes)?, Event::new(device)?));
        let slots = (0..slots.max(1)).map(slot).collect::<Result<_, CudaError>>()?;
        Ok(Self { slots, next: 0, held: None })
    }

    /// Has uploads wait for [`flush`](Self::flush), which brings them to the device together: each copy of its own takes the device some
    /// microseconds. Those that do not fit a slot go at once, and all where the ring has one slot only.
    ///
    /// # Errors
    /// The device failed.
    ///
    /// # Safety
    /// What is uploaded to lives until then, and nothing else of the device's work is queued on it before.
    pub unsafe fn hold(&mut self) -> Result<(), CudaError> {
        self.held = None;
        if self.slots.len() == 1 {
            return Ok(());
        }
        let slot = self.take()?;
        self.held = Some(Held { slot, used: 0, pieces: [Piece::default(); PIECES], count: 0 });
        Ok(())
    }

    /// Queues what was held.
    ///
    /// # Errors
    /// The device failed.
    pub fn flush(&mut self, stream: &Stream) -> Result<(), CudaError> {
        let Some(Held { slot, pieces, count, .. }) = self.held.take() else { return Ok(()) };
        let packs = pieces[..count].iter().map(|piece| piece.words.div_ceil(4)).max().unwrap_or(0);
        if packs == 0 {
            return Ok(());
        }
        let (memory, event) = &self.slots[slot];
        // The device has memory of this kind at the host's own addresses.
        let params = ScatterArgs { from: memory.at.as_ptr() as u64, pieces };
        let grid = Grid { blocks: (packs.div_ceil(THREADS), count as u32), threads: THREADS, shared: 0 };
        // SAFETY: `upload` put the pieces into the slot, each inside it and as long as its target, which lives by the word of who called
        // `hold`; the slot is touched again, or freed, only after the event recorded below.
        unsafe { launch(stream, &stream.device().kernels().scatter, "copying to the GPU", grid, params) }?;
        event.record(stream)
    }

    /// Forgets what was held.
    pub fn discard(&mut self) {
        self.held = None;
    }

    /// Takes the slot used longest ago; waits until its last copy is done.
    fn take(&mut self) -> Result<usize, CudaError> {
        let mut index = self.next;
        if self.held.as_ref().is_some_and(|held| held.slot == index) {
            index = (index + 1) % self.slots.len();
        }
        self.next = (index + 1) % self.slots.len();
        self.slots[index].1.synchronize()?;
        Ok(index)
    }

    /// Keeps `data` for `flush`, where it fits: whether it did.
    fn keep<T: Plain>(&mut self, data: &[T], to: &ViewMut<'_, T>) -> bool {
        let Some(held) = &mut self.held else { return false };
        let bytes = as_bytes(data);
        let (memory, _) = &mut self.slots[held.slot];
        let end = held.used + bytes.len();
        let even = bytes.len().is_multiple_of(4) && to.address().is_multiple_of(PACK as u64);
        if !even || end > memory.bytes || held.count == PIECES {
            return false;
        }
        memory.bytes_mut()[held.used..end].copy_from_slice(bytes);
        held.pieces[held.count] =
            Piece { to: to.address(), first: (held.used / PACK) as u32, words: (bytes.len() / 4) as u32 };
        held.count += 1;
        held.used = end.next_multiple_of(PACK);
        true
    }

    /// The slot used longest ago; waits until its last copy is done.
    ///
    /// # Errors
    /// The device failed.
    pub fn slot(&mut self) -> Result<RingSlot<'_>, CudaError> {
        let index = self.take()?;
        let (memory, event) = &mut self.slots[index];
        Ok(RingSlot { memory, event })
    }

    /// Queues a copy of `data`, which may change as soon as this returns, or [holds](Self::hold) it. Data longer than a slot goes through
    /// several.
    ///
    /// # Errors
    /// The lengths differ (nothing has been queued), or the device failed.
    pub fn upload<T: Plain>(
        &mut self,
        stream: &Stream,
        data: &[T],
        mut to: ViewMut<'_, T>,
    ) -> Result<(), CudaError> {
        length("data for the device", to.len(), data.len())?;
        if self.keep(data, &to) {
            return Ok(());
        }
        let each = self.slots[0].0.bytes / size_of::<T>().max(1);
        if each == 0 {
            return Err(ShapeError::Length { what: "ring slot", needed: size_of::<T>(), found: 0 }.into());
        }
        let mut first = 0;
        for data in data.chunks(each) {
            let mut slot = self.slot()?;
            let bytes = as_bytes(data);
            slot[..bytes.len()].copy_from_slice(bytes);
            slot.send(stream, &mut to.again().part(first..first + data.len())?)?;
            first += data.len();
        }
        Ok(())
    }
}

impl std::fmt::Debug for PinnedRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PinnedRing").field("slots", &self.slots.len()).finish_non_exhaustive()
    }
}

impl Drop for PinnedRing {
    fn drop(&mut self) {
        for (_, event) in &self.slots {
            // An error is one of the device: its copies are not running any more.
            let _ = event.synchronize();
        }
    }
}

/// A slot of a ring, the host's to fill.
pub struct RingSlot<'a> {
    memory: &'a mut HostMemory,
    event: &'a Event,
}

impl RingSlot<'_> {
    /// Queues a copy of its first bytes, as many as `to` has.
    ///
    /// # Errors
    /// `to` is longer than the slot (nothing has been queued), or the device failed.
    pub fn send<T: Plain>(self, stream: &Stream, to: &mut ViewMut<'_, T>) -> Result<(), CudaError> {
        let bytes = product("ring slot", &[to.len(), size_of::<T>()])?;
        if bytes > self.memory.bytes {
            return Err(
                ShapeError::Length { what: "ring slot", needed: bytes, found: self.memory.bytes }.into()
            );
        }
        stream.device().bind()?;
        let data = &self.memory.bytes()[..bytes];
        // SAFETY: the target has `bytes` bytes; the slot is touched again, or freed, only after the event recorded below.
        unsafe { result::memcpy_htod_async(to.address(), data, stream.inner().cu_stream()) }
            .map_err(during("copying to the GPU"))?;
        self.event.record(stream)
    }
}

impl Deref for RingSlot<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.memory.bytes()
    }
}

impl DerefMut for RingSlot<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.memory.bytes_mut()
    }
}

/// Where results of the device come to, without anyone waiting before they are read.
pub struct Pinned<T: Plain> {
    memory: HostMemory,
    event: Event,
    len: usize,
    of: PhantomData<T>,
}

impl<T: Plain> Pinned<T> {
    /// Room for `len` elements.
    ///
    /// # Errors
    /// Not enough memory, or the device failed.
    pub fn new(device: &Device, len: usize) -> Result<Self, CudaError> {
        let bytes = product("pinned buffer", &[len, size_of::<T>()])?;
        Ok(Self {
            memory: HostMemory::zeroed(device, bytes)?,
            event: Event::to_sleep_on(device)?,
            len,
            of: PhantomData,
        })
    }

    /// Queues a copy of `from` into the first elements.
    ///
    /// # Errors
    /// `from` is longer than this (nothing has been queued), or the device failed.
    pub fn download(&mut self, stream: &Stream, from: View<'_, T>) -> Result<(), CudaError> {
        if from.len() > self.len {
            return Err(
                ShapeError::Length { what: "pinned buffer", needed: from.len(), found: self.len }.into()
            );
        }
        stream.device().bind()?;
        let to = &mut self.memory.bytes_mut()[..from.len() * size_of::<T>()];
        // SAFETY: both have as many bytes; the host reads the target, or frees it, only after the event recorded below.
        unsafe { result::memcpy_dtoh_async(to, from.address(), stream.inner().cu_stream()) }
            .map_err(during("copying to the host"))?;
        self.event.record(stream)
    }

    /// Waits for the last download, and gives all elements.
    ///
    /// # Errors
    /// The device failed.
    pub fn read(&self) -> Result<&[T], CudaError> {
        self.event.synchronize()?;
        let at = self.memory.at.as_ptr().cast::<T>();
        // SAFETY: page-aligned, `len` elements long, every pattern of bits is a `T`, and no copy is under way: the event has passed, and
        // the next download takes `&mut self`.
        Ok(unsafe { std::slice::from_raw_parts(at, self.len) })
    }
}

impl<T: Plain> std::fmt::Debug for Pinned<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pinned").field("len", &self.len).finish_non_exhaustive()
    }
}

impl<T: Plain> Drop for Pinned<T> {
    fn drop(&mut self) {
        // An error is one of the device: its copies are not running any more.
        let _ = self.event.synchronize();
    }
}
