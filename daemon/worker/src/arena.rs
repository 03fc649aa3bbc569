//! Arenas: memory that outlives the worker that made it.
//!
//! **Owns** the memfd and its mapping, and the header that says what lies in it. **Never** knows what the bytes mean. The only
//! file of this crate with unsafe code: the inherited socket is taken over here for that reason.
//!
//! An arena is a memfd: one header page, then data. Its size is sealed before anything else is done with it, so that no
//! access to the mapping can meet the end of the file. The header is written through the fd, its `complete` word last; an
//! arena whose maker died before that is not reused.
//!
//! The weights lie in large pages where the system grants them: reading them through small ones, the processor spends a quarter of the
//! time of a decode step on finding pages. A large page takes memory as a whole, so KV blocks, of which few may be in use, have small ones.

use std::fmt;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Bytes before the data: one page, so that the data are page-aligned.
pub const HEADER_BYTES: usize = pagedd_wire::worker::ARENA_HEADER;

/// Bytes of a large page. Where an address of a mapping and the place in the file differ by a multiple of it, a large page of the file is
/// one of the mapping.
const LARGE_PAGE: usize = 2 << 20;

/// Bytes of a small page.
const SMALL_PAGE: usize = 4096;

/// Bytes that one thread asks large pages for at a time.
const EXTENT: usize = 16 * LARGE_PAGE;

const MAGIC: [u8; 8] = *b"pagedd\0A";
const VERSION: u32 = 2;
const COMPLETE: u32 = 0x600D_600D;
/// Where the `complete` word stands in the header.
const COMPLETE_AT: u64 = 64;
/// Where the arena's own name stands in the header.
const ID_AT: u64 = 80;
const SIZE_SEALS: SealFlags = SealFlags::GROW.union(SealFlags::SHRINK);

/// What an arena is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Packed weights: written once, then read only.
    Weights,
    /// KV blocks: read and written for ever.
    Kv,
}

impl Kind {
    const fn code(self) -> u32 {
        match self {
            Self::Weights => 1,
            Self::Kv => 2,
        }
    }

    const fn memfd_name(self) -> &'static str {
        match self {
            Self::Weights => "pagedd-weights",
            Self::Kv => "pagedd-kv",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Weights => "weights",
            Self::Kv => "KV",
        })
    }
}

/// No arena could be made.
#[derive(thiserror::Error, Debug)]
#[error("{kind} arena of {bytes} bytes: {source}")]
pub struct ArenaError {
    /// Which arena.
    pub kind: Kind,
    /// Its size.
    pub bytes: usize,
    /// What the system said.
    pub source: io::Error,
}

/// Why an arena of an earlier worker is not used again. The remedy is always a new one.
#[derive(thiserror::Error, Debug)]
pub enum Stale {
    /// The fd is no sealed memfd: its size could change under a mapping.
    #[error("its size is not sealed")]
    NotSealed,
    /// No arena of this program's, or of another version of it.
    #[error("its header is of another program or version")]
    Foreign,
    /// Its maker died before it was complete.
    #[error("it was never completed")]
    Incomplete,
    /// Another model, dtype, layout or geometry.
    #[error("it holds another model, dtype or layout")]
    OtherContent,
    /// The header and the file disagree, or the size is not what this content needs.
    #[error("it has {found} bytes, {expected} expected")]
    OtherSize {
        /// Bytes of the file.
        found: u64,
        /// Bytes that the header or the content asks for.
        expected: u64,
    },
    /// It could not be read or mapped.
    #[error("it cannot be mapped: {0}")]
    Io(#[from] io::Error),
}

/// What the header page says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// What the arena is for.
    pub kind: Kind,
    /// Bytes of data after the header page.
    pub data_bytes: u64,
    /// Digest of everything that the meaning of the data depends on: model, dtype, layout, geometry.
    pub identity: [u8; 32],
}

/// Bytes of a header page that say something.
pub const PAGE: usize = ID_AT as usize + 16;

/// The first bytes of an arena that is complete and named `id`.
#[cfg(feature = "cuda")]
pub fn complete_page(header: &Header, id: [u8; 16]) -> [u8; PAGE] {
    let mut page = [0; PAGE];
    page[..COMPLETE_AT as usize].copy_from_slice(&header.encode());
    page[COMPLETE_AT as usize..][..4].copy_from_slice(&COMPLETE.to_le_bytes());
    page[ID_AT as usize..].copy_from_slice(&id);
    page
}

/// The name of an arena whose first bytes are `page`, if it is complete and what `expected` says.
///
/// # Errors
/// [`Stale`]: what is wrong with it.
pub fn check_page(page: &[u8; PAGE], expected: &Header) -> Result<[u8; 16], Stale> {
    let (header, rest) = page.split_at(COMPLETE_AT as usize);
    let wanted = expected.encode();
    if header[..16] != wanted[..16] {
        return Err(Stale::Foreign);
    }
    if rest[..4] != COMPLETE.to_le_bytes() {
        return Err(Stale::Incomplete);
    }
    if header[32..] != wanted[32..] {
        return Err(Stale::OtherContent);
    }
    if header != wanted {
        let all = |data: u64| data.saturating_add(HEADER_BYTES as u64);
        let (found, expected) = (all(claimed(page)), all(expected.data_bytes));
        return Err(Stale::OtherSize { found, expected });
    }
    Ok(page[ID_AT as usize..].try_into().unwrap_or_default())
}

/// Data bytes that a header page claims.
pub fn claimed(page: &[u8; PAGE]) -> u64 {
    u64::from_le_bytes(page[16..24].try_into().unwrap_or_default())
}

/// A name that no arena had before.
///
/// # Errors
/// The system gave no random bytes.
pub fn new_id() -> io::Result<[u8; 16]> {
    let mut id = [0; 16];
    getrandom::fill(&mut id).map_err(|e| io::Error::other(e.to_string()))?;
    Ok(id)
}

impl Header {
    fn encode(&self) -> [u8; COMPLETE_AT as usize] {
        let mut page = [0; COMPLETE_AT as usize];
        page[..8].copy_from_slice(&MAGIC);
        page[8..12].copy_from_slice(&VERSION.to_le_bytes());
        page[12..16].copy_from_slice(&self.kind.code().to_le_bytes());
        page[16..24].copy_from_slice(&self.data_bytes.to_le_bytes());
        page[32..64].copy_from_slice(&self.identity);
        page
    }
}

/// A mapped arena.
///
/// Having one tells you: its size is sealed, all of it is mapped, and this value is the only mapping in this process. It does
/// not tell you that no other process maps it: the daemon hands an arena to a worker only after the last one is gone.
#[derive(Debug)]
pub struct Arena {
    fd: OwnedFd,
    mapping: Mapping,
    header: Header,
    id: [u8; 16],
    writable: bool,
}

// SAFETY: the mapping belongs to this value alone and is not bound to a thread.
#[allow(unsafe_code)]
unsafe impl Send for Arena {}
// SAFETY: through `&Arena` the mapping is only read.
#[allow(unsafe_code)]
unsafe impl Sync for Arena {}

/// A range of addresses that is this value's own, and a file mapped into it.
#[derive(Debug)]
struct Mapping {
    room: NonNull<u8>,
    room_len: usize,
    /// Where the file begins: a multiple of [`LARGE_PAGE`] in the room.
    base: NonNull<u8>,
    /// Bytes of the file.
    len: usize,
}

impl Arena {
    /// Makes an arena for `header.data_bytes` bytes, all zero and not yet backed by memory; a page takes memory once written.
    ///
    /// # Errors
    /// The system refused; nothing is left behind.
    pub fn create(header: Header) -> Result<Self, ArenaError> {
        let wrap =
            |source: io::Error| ArenaError { kind: header.kind, bytes: header.data_bytes as usize, source };
        let len = usize::try_from(header.data_bytes)
            .ok()
            .and_then(|data| data.checked_add(HEADER_BYTES))
            .ok_or_else(|| wrap(io::ErrorKind::OutOfMemory.into()))?;
        let id = new_id().map_err(wrap)?;
        let make = || -> rustix::io::Result<OwnedFd> {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let fd = rustix::fs::memfd_create(header.kind.memfd_name(), flags)?;
            rustix::fs::ftruncate(&fd, len as u64)?;
            rustix::fs::fcntl_add_seals(&fd, SIZE_SEALS)?;
            write_at(&fd, &header.encode(), 0)?;
            write_at(&fd, &id, ID_AT)?;
            Ok(fd)
        };
        let fd = make().map_err(|e| wrap(e.into()))?;
        let mapping = Mapping::new(&fd, len, true).map_err(|e| wrap(e.into()))?;
        Ok(Self { fd, mapping, header, id, writable: true })
    }

    /// Takes memory for the arena from each of `nodes` in turn, now and whoever writes to it. What has memory already stays where it is, so this
    /// comes before the first write. A single node, or none, asks for nothing.
    ///
    /// # Errors
    /// The system refused; the arena is as it was.
    pub fn spread(&self, nodes: &[u32]) -> io::Result<()> {
        const BITS: usize = libc::c_ulong::BITS as usize;
        if nodes.len() < 2 {
            return Ok(());
        }
        let mut mask: Vec<libc::c_ulong> = Vec::new();
        for &node in nodes {
            let node = node as usize;
            mask.resize(mask.len().max(node / BITS + 1), 0);
            mask[node / BITS] |= 1 << (node % BITS);
        }
        // The system takes one bit less than it is told.
        let bits = mask.len() * BITS + 1;
        let Mapping { base, len, .. } = self.mapping;
        // SAFETY: `[base, base + len)` is mapped, and its bytes stay what they are; `mask` has as many bits as are read of it.
        #[allow(unsafe_code)]
        let result = unsafe {
            libc::syscall(libc::SYS_mbind, base.as_ptr(), len, libc::MPOL_INTERLEAVE, mask.as_ptr(), bits, 0)
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Puts large pages under the arena as far as they are whole, on `threads` threads, so that all of it takes memory from here on. They are
    /// the file's own: every later mapping has them too. No byte changes; to be called before anything is written, as that would be copied.
    ///
    /// Of `nodes` memory nodes that the arena was spread over, each gives large pages in turn.
    ///
    /// The system's setting for shared memory need not ask for large pages, but it may forbid them.
    ///
    /// # Errors
    /// The system refused, or is older than Linux 6.1; what it gave until then stays. The arena is as good as before, only slower.
    pub fn enlarge(&self, threads: usize, nodes: usize) -> io::Result<()> {
        let next = AtomicUsize::new(0);
        let work = || {
            loop {
                let first = next.fetch_add(EXTENT, Ordering::Relaxed);
                if first >= self.mapping.len {
                    return Ok(());
                }
                self.enlarge_part(first..self.mapping.len.min(first + EXTENT), nodes)?;
            }
        };
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
            let own = work();
            let others = others.into_iter().map(std::thread::ScopedJoinHandle::join);
            others
                .map(|end| end.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
                .fold(own, Result::and)
        })
    }

    /// Large pages for `part` of the file, which begins where a large page does.
    fn enlarge_part(&self, part: Range<usize>, nodes: usize) -> io::Result<()> {
        let whole = part.len() / LARGE_PAGE;
        if whole == 0 {
            return Ok(());
        }
        // A large page takes the place of a small one that has memory, on the same node.
        let first = part.start / LARGE_PAGE;
        for large in first..first + whole {
            let at = small_page(large, nodes) * SMALL_PAGE;
            rustix::fs::fallocate(&self.fd, FallocateFlags::KEEP_SIZE, at as u64, 1)?;
        }
        let (from, len) = (self.mapping.base.as_ptr().wrapping_add(part.start), whole * LARGE_PAGE);
        // SAFETY: the part lies in `[base, base + len)`, which is mapped, and its bytes stay what they are.
        #[allow(unsafe_code)]
        let result = unsafe { libc::madvise(from.cast(), len, libc::MADV_COLLAPSE) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Marks the arena as complete: from here on another worker may use it as it is.
    ///
    /// Weights become read-only: the mapping is replaced, and no later one can be writable.
    ///
    /// # Errors
    /// The system refused; the arena may be unusable.
    pub fn complete(mut self) -> Result<Self, ArenaError> {
        let wrap = |e: rustix::io::Errno| ArenaError {
            kind: self.header.kind,
            bytes: self.mapping.len - HEADER_BYTES,
            source: e.into(),
        };
        write_at(&self.fd, &COMPLETE.to_le_bytes(), COMPLETE_AT).map_err(wrap)?;
        match self.header.kind {
            Kind::Kv => {}
            Kind::Weights => {
                rustix::fs::fcntl_add_seals(&self.fd, SealFlags::FUTURE_WRITE).map_err(wrap)?;
                self.mapping = Mapping::new(&self.fd, self.mapping.len, false).map_err(wrap)?;
                self.writable = false;
            }
        }
        Ok(self)
    }

    /// Maps an arena of an earlier worker, if it is complete and exactly what `expected` says.
    ///
    /// # Errors
    /// [`Stale`]: what is wrong with it.
    pub fn reuse(fd: OwnedFd, expected: &Header) -> Result<Self, Stale> {
        let (len, id) = check(fd.as_fd(), expected)?;
        let writable = expected.kind == Kind::Kv;
        let mapping = Mapping::new(&fd, len, writable).map_err(io::Error::from)?;
        Ok(Self { fd, mapping, header: *expected, id, writable })
    }

    /// What the header page says.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Names this arena among all that were ever made: drawn when it was, and read back by whoever maps it again.
    pub fn id(&self) -> [u8; 16] {
        self.id
    }

    /// The data.
    pub fn data(&self) -> &[u8] {
        let Mapping { base, len, .. } = self.mapping;
        // SAFETY: `[base, base + len)` is mapped readable until drop; its size is sealed (`create`, `check`), so that every
        // page of it exists; `&self` keeps `data_mut` away, and no other process writes (see the type).
        #[allow(unsafe_code)]
        let all = unsafe { std::slice::from_raw_parts(base.as_ptr(), len) };
        &all[HEADER_BYTES..]
    }

    /// The data, to be written. Empty where the arena is read-only.
    pub fn data_mut(&mut self) -> &mut [u8] {
        if !self.writable {
            return &mut [];
        }
        let Mapping { base, len, .. } = self.mapping;
        // SAFETY: as in `data`; the mapping is writable (checked above), and `&mut self` makes this the only reference.
        #[allow(unsafe_code)]
        let all = unsafe { std::slice::from_raw_parts_mut(base.as_ptr(), len) };
        &mut all[HEADER_BYTES..]
    }
}

impl AsFd for Arena {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Data bytes that the header of a passed fd claims, for content whose size its maker chose. Nothing but the header's own
/// agreement with the file is checked: [`Arena::reuse`] does the rest.
///
/// # Errors
/// [`Stale`]: it is no arena.
pub fn claimed_bytes(fd: BorrowedFd<'_>) -> Result<u64, Stale> {
    let mut page = [0; PAGE];
    if read_at(fd, &mut page, 0)? != page.len() || page[..8] != MAGIC {
        return Err(Stale::Foreign);
    }
    Ok(claimed(&page))
}

/// The mapped size and the name of an arena that is what `expected` says.
fn check(fd: BorrowedFd<'_>, expected: &Header) -> Result<(usize, [u8; 16]), Stale> {
    // Anything that is no memfd has no seals to ask for.
    match rustix::fs::fcntl_get_seals(fd) {
        Ok(seals) if seals.contains(SIZE_SEALS) => {}
        Ok(_) | Err(_) => return Err(Stale::NotSealed),
    }
    let found = u64::try_from(rustix::fs::fstat(fd).map_err(io::Error::from)?.st_size).unwrap_or(0);
    let mut page = [0; PAGE];
    if read_at(fd, &mut page, 0)? != page.len() {
        return Err(Stale::Foreign);
    }
    let id = check_page(&page, expected)?;
    let size = expected.data_bytes.saturating_add(HEADER_BYTES as u64);
    if found != size {
        return Err(Stale::OtherSize { found, expected: size });
    }
    let len = usize::try_from(size).map_err(|_| Stale::OtherSize { found, expected: size })?;
    Ok((len, id))
}

/// The first small page of a large one whose number leaves the same remainder as that of the large one. The system takes nodes in turn by
/// the number of a page, so a large page's first small one is of the same node every time where there are two.
fn small_page(large: usize, nodes: usize) -> usize {
    let first = large * (LARGE_PAGE / SMALL_PAGE);
    let nodes = nodes.clamp(1, LARGE_PAGE / SMALL_PAGE);
    first + (large % nodes + nodes - first % nodes) % nodes
}

impl Mapping {
    /// Maps the whole of `fd`, a memfd of `len` bytes whose size is sealed.
    fn new(fd: &OwnedFd, len: usize, writable: bool) -> rustix::io::Result<Self> {
        // Somewhere in so many bytes a large page begins that leaves room for the file.
        let room_len = len.checked_add(LARGE_PAGE).ok_or(rustix::io::Errno::NOMEM)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a null address lets the kernel choose a free range, so no live mapping is replaced.
        #[allow(unsafe_code)]
        let room =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), room_len, ProtFlags::empty(), flags) }?;
        let room = NonNull::new(room.cast::<u8>()).ok_or(rustix::io::Errno::NOMEM)?;
        let offset = room.as_ptr().align_offset(LARGE_PAGE);
        // SAFETY: the offset is below `LARGE_PAGE`, so that it and `len` bytes more lie in the room.
        #[allow(unsafe_code)]
        let base = unsafe { room.add(offset) };
        // From here on an early return gives the room back.
        let mapping = Self { room, room_len, base, len };
        let prot = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: what is replaced, `[base, base + len)`, is a part of the room, which nothing else uses; `fd` is a memfd of `len` bytes
        // whose size is sealed (`create`, `check`).
        #[allow(unsafe_code)]
        unsafe { rustix::mm::mmap(base.as_ptr().cast(), len, prot, flags, fd, 0) }?;
        // Large pages where the system's setting for shared memory leaves them to this advice.
        // SAFETY: the range is the one just mapped, and the advice changes no byte of it.
        #[allow(unsafe_code)]
        let _ = unsafe { rustix::mm::madvise(base.as_ptr().cast(), len, Advice::LinuxHugepage) };
        Ok(mapping)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the room is this value's own, and no reference into it is left: those of an arena borrow it.
        #[allow(unsafe_code)]
        let result = unsafe { rustix::mm::munmap(self.room.as_ptr().cast(), self.room_len) };
        if let Err(error) = result {
            tracing::warn!(%error, "arena could not be unmapped");
        }
    }
}

/// Takes over the socket that this process was started with on descriptor `number`.
///
/// Call it once, before anything else opens a file.
///
/// # Errors
/// There is no descriptor of that number, or it is no stream socket of the Unix domain.
pub fn inherited_socket(number: RawFd) -> io::Result<UnixStream> {
    std::fs::symlink_metadata(format!("/proc/self/fd/{number}"))?;
    // SAFETY: the descriptor is open (the line above), and nobody else in this process owns it: it was inherited, and the
    // caller asks once and first.
    #[allow(unsafe_code)]
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    let stream = rustix::net::sockopt::socket_type(&fd)? == rustix::net::SocketType::STREAM
        && rustix::net::sockopt::socket_domain(&fd)? == rustix::net::AddressFamily::UNIX;
    if !stream {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no stream socket"));
    }
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)?;
    Ok(UnixStream::from(fd))
}

fn write_at(fd: &OwnedFd, mut bytes: &[u8], mut at: u64) -> rustix::io::Result<()> {
    while !bytes.is_empty() {
        let n = rustix::io::pwrite(fd, bytes, at)?;
        bytes = &bytes[n..];
        at += n as u64;
    }
    Ok(())
}

fn read_at(fd: BorrowedFd<'_>, bytes: &mut [u8], at: u64) -> Result<usize, Stale> {
    let mut got = 0;
    while got < bytes.len() {
        match rustix::io::pread(fd, &mut bytes[got..], at + got as u64).map_err(io::Error::from)? {
            0 => break,
            n => got += n,
        }
    }
    Ok(got)
}

#[cfg(test)]
mod tests;
