//! One daemon per state directory.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// Name of the file in the state directory.
const FILE: &str = "lock";

/// Why the state directory is not ours.
#[derive(thiserror::Error, Debug)]
pub enum LockError {
    /// Another daemon runs on it.
    #[error(
        "state directory {} is in use by another pagedd{}: stop it, or choose another --state-dir",
        dir.display(),
        pid.map_or_else(String::new, |pid| format!(" (pid {pid})"))
    )]
    Held {
        /// The state directory.
        dir: PathBuf,
        /// Who, where it has written so already.
        pid: Option<u32>,
    },
    /// The file cannot be opened or written.
    #[error("cannot lock state directory {}: {source}", dir.display())]
    Io {
        /// The state directory.
        dir: PathBuf,
        /// From the kernel.
        source: io::Error,
    },
}

/// The lock of a state directory.
///
/// Having one tells you that no other daemon uses the directory. The kernel gives it back when the process dies, however it
/// dies; the file stays.
#[derive(Debug)]
#[must_use = "a dropped lock is free for another daemon"]
pub struct StateLock {
    _file: File,
}

impl StateLock {
    /// Locks an existing directory, without waiting.
    pub fn acquire(dir: &Path) -> Result<Self, LockError> {
        let io = |source| LockError::Io { dir: dir.to_owned(), source };
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(dir.join(FILE))
            .map_err(io)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                let mut text = String::new();
                // A holder that is about to write leaves the file of its predecessor for a moment: the number is a hint.
                let _ = (&file).take(16).read_to_string(&mut text);
                return Err(LockError::Held { dir: dir.to_owned(), pid: text.trim().parse().ok() });
            }
            Err(errno) => return Err(io(errno.into())),
        }
        file.set_len(0).map_err(io)?;
        file.rewind().map_err(io)?;
        writeln!(file, "{}", std::process::id()).map_err(io)?;
        Ok(Self { _file: file })
    }
}
