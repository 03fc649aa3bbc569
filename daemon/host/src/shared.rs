//! Memory that outlives the process that wrote it: a memfd of fixed size, mapped.
//!
//! **Owns** the fd and the mapping. **Never** knows what the bytes mean, nor who kept the fd meanwhile.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// The file can neither grow nor shrink, so that no access to a mapping of it can meet its end.
const SIZE_SEALS: SealFlags = SealFlags::GROW.union(SealFlags::SHRINK);

/// A mapped memfd.
///
/// Having one tells you: its size is sealed, and all of it is mapped, readable and writable. It does not tell you that nobody else
/// maps it: an fd is only given to a process that runs once this one has ended.
#[derive(Debug)]
pub struct SharedMemory {
    fd: OwnedFd,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to this value alone and is not bound to a thread.
#[allow(unsafe_code)]
unsafe impl Send for SharedMemory {}

impl SharedMemory {
    /// `bytes` zero bytes. `name` is for `/proc` only.
    ///
    /// # Errors
    /// The system refused, or `bytes` is 0; nothing is left behind.
    pub fn create(name: &str, bytes: usize) -> io::Result<Self> {
        let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, bytes as u64)?;
        fcntl_add_seals(&fd, SIZE_SEALS)?;
        Self::map(fd)
    }

    /// The memory that an earlier process made, as it left it.
    ///
    /// # Errors
    /// The fd is no memfd whose size is sealed, or the system refused.
    pub fn map(fd: OwnedFd) -> io::Result<Self> {
        // Anything that is no memfd has no seals to ask for.
        if !fcntl_get_seals(&fd).is_ok_and(|seals| seals.contains(SIZE_SEALS)) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "its size is not sealed"));
        }
        let len = usize::try_from(fstat(&fd)?.st_size).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a null address lets the kernel choose a free range, so no live mapping is replaced; the file has `len` bytes and
        // keeps them (checked above).
        #[allow(unsafe_code)]
        let base = unsafe { mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, &fd, 0) }?;
        let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { fd, base, len })
    }
}

impl AsRef<[u8]> for SharedMemory {
    #[allow(unsafe_code)]
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `[base, base + len)` is mapped readable until drop, and its size is sealed (`map`), so that every page of it
        // exists; `&self` keeps `as_mut` away, and no other process writes (see the type).
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl AsMut<[u8]> for SharedMemory {
    #[allow(unsafe_code)]
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_ref`; the mapping is writable (`map`), and `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

impl AsFd for SharedMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: the range is this value's own, and no reference into it is left: those handed out borrow it.
        #[allow(unsafe_code)]
        let result = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
        if let Err(error) = result {
            tracing::warn!(%error, "shared memory could not be unmapped");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn what_is_written_is_there_for_whoever_maps_the_fd_next() {
        let mut first = SharedMemory::create("test", 10_000).unwrap();
        assert!(first.as_ref().iter().all(|byte| *byte == 0));
        assert_eq!(first.as_ref().len(), 10_000);
        first.as_mut()[9_999] = 7;
        let kept = first.as_fd().try_clone_to_owned().unwrap();
        drop(first);
        let second = SharedMemory::map(kept).unwrap();
        assert_eq!((second.as_ref().len(), second.as_ref()[9_999]), (10_000, 7));
    }

    #[test]
    fn its_size_can_never_change() {
        let memory = SharedMemory::create("test", 4096).unwrap();
        assert!(ftruncate(&memory, 4095).is_err());
        assert!(ftruncate(&memory, 4097).is_err());
    }

    #[test]
    fn an_fd_that_could_shrink_under_the_mapping_is_refused() {
        let unsealed = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&unsealed, 4096).unwrap();
        assert!(SharedMemory::map(unsealed).is_err());
        for path in ["/dev/null", "/proc/self/exe"] {
            assert!(SharedMemory::map(File::open(path).unwrap().into()).is_err(), "{path}");
        }
    }

    #[test]
    fn memory_of_no_bytes_or_more_than_there_can_be_is_refused() {
        assert!(SharedMemory::create("test", 0).is_err());
        assert!(SharedMemory::create("test", usize::MAX).is_err());
    }
}
