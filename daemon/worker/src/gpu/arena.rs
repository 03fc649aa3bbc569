//! Arenas on a GPU: as those of the host, with the header page in the device's memory.

use std::os::fd::{AsFd as _, OwnedFd};

use pagedd_kernels::cuda::{CudaError, Device, SharedBuffer, Stream};

use crate::arena::{HEADER_BYTES, Header, PAGE, check_page, claimed, complete_page, new_id};

/// Memory for an arena. Until [`complete`] nobody takes it for one.
///
/// # Errors
/// Not enough memory, or the device failed.
pub fn create(device: &Device, header: &Header) -> Result<SharedBuffer, CudaError> {
    let bytes = usize::try_from(header.data_bytes).ok().and_then(|bytes| bytes.checked_add(HEADER_BYTES));
    let Some(bytes) = bytes else {
        let (free, total) = device.memory()?;
        return Err(CudaError::OutOfMemory { wanted: usize::MAX, free, total });
    };
    let mut memory = SharedBuffer::create(device, bytes)?;
    let stream = device.stream()?;
    // What lies in fresh memory may be an arena of another process.
    memory.all_mut().part(0..HEADER_BYTES)?.fill_bytes(&stream, 0)?;
    stream.synchronize()?;
    Ok(memory)
}

/// Marks the arena as complete, once all that is queued on `stream` is done: another worker may use it from here on. Gives its name.
///
/// # Errors
/// The device failed.
pub fn complete(stream: &Stream, memory: &mut SharedBuffer, header: &Header) -> Result<[u8; 16], CudaError> {
    stream.synchronize()?;
    let id =
        new_id().map_err(|error| CudaError::Device { doing: "naming an arena", code: error.to_string() })?;
    memory.all_mut().part(0..PAGE)?.copy_from(stream, &complete_page(header, id))?;
    Ok(id)
}

/// Maps an arena of an earlier worker of `bytes` bytes, header included, if it is complete and what `expected` says of its claimed size.
///
/// # Errors
/// Why it is not used.
pub fn reuse(
    stream: &Stream,
    fd: &OwnedFd,
    bytes: u64,
    expected: impl FnOnce(u64) -> Result<Header, String>,
) -> Result<(SharedBuffer, [u8; 16]), String> {
    let bytes = usize::try_from(bytes).ok().filter(|&bytes| bytes >= HEADER_BYTES);
    let bytes = bytes.ok_or("it is smaller than its header")?;
    let memory = SharedBuffer::import(stream.device(), fd.as_fd(), bytes).map_err(|e| e.to_string())?;
    let page =
        memory.all().part(0..PAGE).map_err(|e| e.to_string())?.to_vec(stream).map_err(|e| e.to_string())?;
    let page: [u8; PAGE] = page.try_into().map_err(|_| "its header cannot be read")?;
    let expected = expected(claimed(&page))?;
    let id = check_page(&page, &expected).map_err(|e| e.to_string())?;
    if (memory.len() as u64) < expected.data_bytes.saturating_add(HEADER_BYTES as u64) {
        return Err(format!("it has {} bytes, its header claims more", memory.len()));
    }
    Ok((memory, id))
}
