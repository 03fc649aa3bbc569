//! One daemon per state directory, and one per GPU.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::io::Errno;

/// Name of the file in the state directory.
const FILE: &str = "lock";
/// Where the host's locks of devices are.
const DEVICE_LOCKS: &str = "/run/lock";
/// How long a holder may take that is about to end, such as a daemon whose keeper was killed.
const ENDING: Duration = Duration::from_secs(2);
/// How long a dead holder's child may take to execute its program.
const EXEC: Duration = Duration::from_secs(10);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(5);

/// What only one daemon at a time has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Claim {
    /// A state directory.
    StateDir(PathBuf),
    /// One of the host's GPUs.
    Gpu {
        /// Its number.
        ordinal: u32,
        /// The lock file.
        file: PathBuf,
    },
}

impl Claim {
    /// What may be done where another has it.
    const fn remedy(&self) -> &'static str {
        match self {
            Self::StateDir(_) => "choose another --state-dir",
            Self::Gpu { .. } => "give the model another device",
        }
    }
}

impl fmt::Display for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::StateDir(dir) => write!(f, "state directory {}", dir.display()),
            Self::Gpu { ordinal, file } => write!(f, "GPU cuda:{ordinal} (lock file {})", file.display()),
        }
    }
}

/// Why something is not ours.
#[derive(thiserror::Error, Debug)]
pub enum LockError {
    /// Another daemon has it.
    #[error(
        "{claim} is in use by another pagedd{}: stop it, or {}",
        pid.map_or_else(String::new, |pid| format!(" (pid {pid})")),
        claim.remedy()
    )]
    Held {
        /// What.
        claim: Claim,
        /// Who, where it has written so already.
        pid: Option<u32>,
    },
    /// The file cannot be opened or written.
    #[error("cannot lock {claim}: {source}")]
    Io {
        /// What.
        claim: Claim,
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
    /// Locks an existing directory. A holder that runs is waited for shortly: it may be about to end. One that is dead may have left a child
    /// between fork and exec, which has all its files for that moment, and is given longer.
    pub fn acquire(dir: &Path) -> Result<Self, LockError> {
        let claim = Claim::StateDir(dir.to_owned());
        match LockFile::open(&dir.join(FILE), 0o600) {
            Ok(file) => file.lock(claim).map(|file| Self { _file: file }),
            Err(source) => Err(LockError::Io { claim, source }),
        }
    }
}

/// The lock of a GPU.
///
/// Having one tells you that no other daemon that sees the same lock files serves a model on it. It does not tell you that its memory is
/// free: other programs know nothing of the lock.
#[derive(Debug)]
#[must_use = "a dropped lock is free for another daemon"]
pub struct GpuLock {
    _file: File,
}

impl GpuLock {
    /// Locks one of the host's GPUs; see [`StateLock::acquire`].
    pub fn acquire(ordinal: u32) -> Result<Self, LockError> {
        Self::acquire_in(&[Path::new(DEVICE_LOCKS), &std::env::temp_dir()], ordinal)
    }

    /// Locks it by a file in the first of `dirs` that has one, or lets this user make one.
    pub fn acquire_in(dirs: &[&Path], ordinal: u32) -> Result<Self, LockError> {
        let mut refused = None;
        for dir in dirs {
            let file = dir.join(format!("pagedd-cuda-{ordinal}.lock"));
            let opened = LockFile::open(&file, 0o644);
            let claim = Claim::Gpu { ordinal, file };
            match opened {
                Ok(opened) => return opened.lock(claim).map(|file| Self { _file: file }),
                Err(source) => refused = Some(LockError::Io { claim, source }),
            }
        }
        Err(refused.unwrap_or_else(|| LockError::Io {
            claim: Claim::Gpu { ordinal, file: PathBuf::new() },
            source: io::ErrorKind::NotFound.into(),
        }))
    }
}

/// An opened lock file. No child has it beyond its exec.
struct LockFile {
    file: File,
    /// Another user's can be locked, but not written.
    writable: bool,
}

impl LockFile {
    /// Opens the file, or makes it with `mode`. It may lie where everybody may write: a link is not followed, nothing is waited for, and since
    /// the kernel forbids there to open others' files as if they were to be made, it is made only where it is not there.
    fn open(path: &Path, mode: u32) -> io::Result<Self> {
        let open = |options: &mut OpenOptions| {
            options.custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits() as i32).open(path)
        };
        let writable = |file| Self { file, writable: true };
        loop {
            match open(OpenOptions::new().read(true).write(true)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                // Also on a file system that is read-only for this process.
                Err(error)
                    if matches!(
                        error.kind(),
                        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem
                    ) =>
                {
                    let file = open(OpenOptions::new().read(true))?;
                    return Ok(Self { file, writable: false });
                }
                opened => return opened.map(writable),
            }
            match open(OpenOptions::new().read(true).write(true).create_new(true).mode(mode)) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => return made.map(writable),
            }
        }
    }

    /// Takes the lock, and writes this process's number into the file.
    fn lock(mut self, claim: Claim) -> Result<File, LockError> {
        let begun = Instant::now();
        loop {
            match flock(&self.file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => break,
                Err(Errno::WOULDBLOCK) => {
                    let pid = self.holder();
                    let dead = pid.is_some_and(|pid| !Path::new("/proc").join(pid.to_string()).exists());
                    if begun.elapsed() >= if dead { EXEC } else { ENDING } {
                        return Err(LockError::Held { claim, pid });
                    }
                    thread::sleep(PAUSE);
                }
                Err(errno) => return Err(LockError::Io { claim, source: errno.into() }),
            }
        }
        match self.sign() {
            Ok(()) => Ok(self.file),
            Err(source) => Err(LockError::Io { claim, source }),
        }
    }

    fn sign(&mut self) -> io::Result<()> {
        if !self.writable {
            return Ok(());
        }
        self.file.set_len(0)?;
        self.file.rewind()?;
        writeln!(self.file, "{}", std::process::id())
    }

    /// Who has written to the file. A holder that is about to write, or may not, leaves the number of its predecessor: it is a hint.
    fn holder(&mut self) -> Option<u32> {
        let mut text = String::new();
        self.file.rewind().ok()?;
        (&mut self.file).take(16).read_to_string(&mut text).ok()?;
        text.trim().parse().ok()
    }
}
