//! Memory of the host and of processes.
#![allow(unsafe_code)]

use std::fs;
use std::io;
use std::path::Path;

use pagedd_core::Bytes;

use crate::cgroup::{Tree, own};

/// Resident memory of a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rss {
    /// Private memory.
    pub anon: Bytes,
    /// Shared memory: memfds and the like.
    pub shmem: Bytes,
    /// Pages of files.
    pub file: Bytes,
}

/// What can be allocated without swapping: of the host, and within the limits of every cgroup above this process.
pub fn available() -> io::Result<Bytes> {
    available_under(Path::new("/"))
}

fn available_under(root: &Path) -> io::Result<Bytes> {
    let meminfo = fs::read_to_string(root.join("proc/meminfo"))?;
    let host = kilobytes(&meminfo, "MemAvailable")
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "/proc/meminfo has no MemAvailable"))?;
    let v2 = ["memory.max", "memory.current", "inactive_file"];
    let v1 = ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"];
    let mut least = host;
    for (tree, names) in [(Tree::V2, v2), (Tree::V1("memory"), v1)] {
        if let Some(own) = own(root, tree) {
            least = own.upwards().filter_map(|dir| left(dir, names)).fold(least, Bytes::min);
        }
    }
    Ok(least)
}

/// What a cgroup's limit leaves, where it has one. Cached file pages that nobody uses make room by themselves.
fn left(dir: &Path, [limit, usage, reclaimable]: [&str; 3]) -> Option<Bytes> {
    let number = |file: &str| fs::read_to_string(dir.join(file)).ok()?.trim().parse::<u64>().ok();
    let (limit, usage) = (number(limit)?, number(usage)?);
    let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
    let reclaimable = stat.lines().find_map(|line| {
        let (name, value) = line.split_once(' ')?;
        (name == reclaimable).then(|| value.trim().parse::<u64>().ok())?
    });
    Some(Bytes(limit.saturating_sub(usage.saturating_sub(reclaimable.unwrap_or(0)))))
}

/// Resident memory of process `pid`.
pub fn rss(pid: u32) -> io::Result<Rss> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    // A process that has ended and is not reaped has no memory, and no such lines.
    let bytes = |name| kilobytes(&status, name).unwrap_or(Bytes::ZERO);
    Ok(Rss { anon: bytes("RssAnon"), shmem: bytes("RssShmem"), file: bytes("RssFile") })
}

/// A variable for the environment of a process that is to be small, and its value: its threads keep no freed pieces of their own. These would
/// never be given back, each holds its page, and there come to be more of them for as long as new sizes come. Read by glibc alone, at the
/// start of a program.
pub const NO_THREAD_CACHES: (&str, &str) = ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0");

/// Has all threads of this process allocate from one heap. Each thread's own would keep its own free pieces; to be called before there is
/// another thread.
pub fn use_one_heap() {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: it has no precondition; where it is refused nothing has changed.
        unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    }
}

/// Gives back to the system what this process has freed. The allocator keeps it otherwise, and a burst would be paid for as long as the
/// process lives. Takes some milliseconds at most.
pub fn give_back() {
    // Other allocators do as they think best.
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: it has no precondition and takes the allocator's own locks.
        unsafe { libc::malloc_trim(0) };
    }
}

/// The value of a line `name:   123 kB`.
fn kilobytes(text: &str, name: &str) -> Option<Bytes> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let number: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    number.checked_mul(1024).map(Bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::tests::{FakeRoot, V2_MOUNT};

    fn host(cgroup: &str, mounts: &str) -> FakeRoot {
        let root = FakeRoot::new(cgroup, mounts);
        root.file("proc/meminfo", "MemTotal:       16 kB\nMemAvailable:    8 kB\nSwapFree: 0 kB\n");
        root
    }

    #[test]
    fn without_limits_the_host_decides() {
        assert_eq!(available_under(host("", "").path()).unwrap(), Bytes(8192));
    }

    #[test]
    fn the_tightest_cgroup_decides_and_idle_file_pages_count_as_free() {
        let root = host("0::/a/b\n", V2_MOUNT);
        root.file("sys/fs/cgroup/a/b/memory.max", "max\n");
        root.file("sys/fs/cgroup/a/b/memory.current", "100\n");
        root.file("sys/fs/cgroup/a/memory.max", "5000\n");
        root.file("sys/fs/cgroup/a/memory.current", "3000\n");
        assert_eq!(available_under(root.path()).unwrap(), Bytes(2000));
        root.file("sys/fs/cgroup/a/memory.stat", "anon 1\nfile 900\ninactive_file 800\n");
        assert_eq!(available_under(root.path()).unwrap(), Bytes(2800));
    }

    #[test]
    fn a_v1_limit_counts() {
        let root = host("4:memory:/x\n", "3 2 0:1 / /cg/mem rw - cgroup cgroup rw,memory\n");
        root.file("cg/mem/x/memory.limit_in_bytes", "4096\n");
        root.file("cg/mem/x/memory.usage_in_bytes", "4097\n");
        assert_eq!(available_under(root.path()).unwrap(), Bytes::ZERO);
    }

    #[test]
    fn a_process_has_resident_memory_and_a_missing_one_is_an_error() {
        assert!(rss(std::process::id()).unwrap().anon > Bytes::ZERO);
        assert!(rss(0).is_err());
    }

    #[test]
    #[cfg(target_env = "gnu")]
    fn what_was_freed_goes_back_to_the_system() {
        // Pieces below the size from which on the allocator maps memory of its own, held up by one that stays behind them.
        let mut pieces: Vec<Vec<u8>> = (0..4000).map(|_| vec![1; 16 << 10]).collect();
        let stays = pieces.pop();
        let before = rss(std::process::id()).unwrap().anon;
        drop(pieces);
        give_back();
        let after = rss(std::process::id()).unwrap().anon;
        drop(stays);
        assert!(after.0 + (48 << 20) < before.0, "{before} before, {after} after");
    }

    #[test]
    fn this_host_has_memory() {
        assert!(available().unwrap() > Bytes::ZERO);
    }
}
