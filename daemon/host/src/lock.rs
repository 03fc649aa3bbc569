//! One daemon per state directory.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// Name of the file in the state directory.
const FILE: &str = "lock";
/// How long a dead holder's child may take to execute its program.
const EXEC: Duration = Duration::from_secs(10);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(5);

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

/// Who has written to the file. A holder that is about to write leaves the number of its predecessor for a moment: it is a hint.
fn holder(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.rewind().ok()?;
    file.take(16).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

impl StateLock {
    /// Locks an existing directory. Nobody is waited for who runs; a holder that is dead may have left a child between fork and exec, which
    /// has all its files for that moment.
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
        let begun = Instant::now();
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(Errno::WOULDBLOCK) => {
                    let pid = holder(&mut file);
                    let dead = pid.is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists());
                    if !dead || begun.elapsed() >= EXEC {
                        return Err(LockError::Held { dir: dir.to_owned(), pid });
                    }
                    thread::sleep(PAUSE);
                }
                Err(errno) => return Err(io(errno.into())),
            }
        }
        file.set_len(0).map_err(io)?;
        file.rewind().map_err(io)?;
        writeln!(file, "{}", std::process::id()).map_err(io)?;
        Ok(Self { _file: file })
    }
}
