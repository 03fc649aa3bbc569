//! One cgroup that the daemon made.
//!
//! **Owns** its directory's fd, and the way from its processes to its end. **Never** removes one that has a process.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use cgroups_rs::cgroup::Cgroup as Handle;
use pagedd_core::{CpuList, LimitName};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::limits::BelowUse;

/// Between two tries to remove a cgroup that the kernel still takes apart.
const PAUSE: Duration = Duration::from_millis(5);

/// A cgroup below the delegated directory.
#[derive(Debug)]
pub struct Cgroup {
    path: PathBuf,
    dir: OwnedFd,
    pub(super) handle: Handle,
}

/// Why a cgroup is not as it was to be.
#[derive(thiserror::Error, Debug)]
pub enum CgroupError {
    /// Another limit helps, or less use.
    #[error("{0}")]
    BelowUse(BelowUse),
    /// Other CPUs help.
    #[error("none of the CPUs {asked} can be used: there are {there}")]
    NoCpu {
        /// As asked for.
        asked: CpuList,
        /// Those that tenants may have.
        there: CpuList,
    },
    /// Another device helps.
    #[error("{device} is no block device: {source}")]
    NoDevice {
        /// As given.
        device: String,
        /// From the kernel.
        source: io::Error,
    },
    /// The kernel took no such value.
    #[error("{name} {value}: {source}")]
    Limit {
        /// Of which limit.
        name: LimitName,
        /// What was written.
        value: String,
        /// From the kernel.
        source: io::Error,
    },
    /// A process cannot be ended.
    #[error("{}: its processes do not end", path.display())]
    Alive {
        /// Of the cgroup.
        path: PathBuf,
    },
    /// The host refused something else.
    #[error("{}: {source}", path.display())]
    Io {
        /// Of the file or directory.
        path: PathBuf,
        /// From the kernel.
        source: io::Error,
    },
}

impl CgroupError {
    pub(super) fn io(path: &Path, source: io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }

    /// An error of the library, whose cause is the kernel's.
    pub(super) fn library(path: &Path, error: cgroups_rs::error::Error) -> Self {
        Self::io(path, cause(error))
    }
}

/// What the kernel said.
pub(super) fn cause(error: cgroups_rs::error::Error) -> io::Error {
    let code = std::error::Error::source(&error)
        .and_then(|source| source.downcast_ref::<io::Error>())
        .and_then(io::Error::raw_os_error);
    code.map_or_else(|| io::Error::other(error), io::Error::from_raw_os_error)
}

impl Cgroup {
    pub(super) fn open(path: PathBuf, handle: Handle) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::open(&path, flags, Mode::empty())?;
        Ok(Self { path, dir, handle })
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its directory's fd once more, for a process that is to join it.
    ///
    /// # Errors
    /// This process has no fd left.
    pub fn fd(&self) -> io::Result<OwnedFd> {
        self.dir.try_clone()
    }

    /// Kills every process in it and below, and waits up to `patience` until none is left.
    ///
    /// # Errors
    /// [`CgroupError::Alive`] where one does not end; its memory may still be written.
    pub fn end(&self, patience: Duration) -> Result<(), CgroupError> {
        if self.wait_empty(Duration::ZERO)? {
            return Ok(());
        }
        self.handle.kill().map_err(|error| CgroupError::library(&self.path.join("cgroup.kill"), error))?;
        if self.wait_empty(patience)? { Ok(()) } else { Err(CgroupError::Alive { path: self.path.clone() }) }
    }

    /// Waits up to `patience` until no process is in it or below; false where one is.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn wait_empty(&self, patience: Duration) -> Result<bool, CgroupError> {
        let deadline = Instant::now() + patience;
        let path = self.path.join("cgroup.events");
        let io = |error| CgroupError::io(&path, error);
        loop {
            // Opened anew: what is read marks the state whose change the kernel then tells of.
            let events = match File::open(&path) {
                // It is removed already.
                Err(error) if error.kind() == io::ErrorKind::NotFound && !self.path.exists() => {
                    return Ok(true);
                }
                opened => opened.map_err(io)?,
            };
            let text = io::read_to_string(&events).map_err(io)?;
            if text.lines().any(|line| line == "populated 0") {
                return Ok(true);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            let left = Timespec::try_from(left).ok();
            match poll(&mut [PollFd::new(&events, PollFlags::PRI)], left.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(io(error.into())),
            }
        }
    }

    /// Ends every process in it and below, and removes it with all below. It is no error where it is gone already.
    ///
    /// # Errors
    /// It is still there.
    pub fn remove(&self, patience: Duration) -> Result<(), CgroupError> {
        self.end(patience)?;
        self.unless_busy(patience, || remove_tree(&self.path))
    }

    /// Removes what is below, as [`Cgroup::remove`] does it. Nobody may be in there any more.
    ///
    /// # Errors
    /// Some of it is still there.
    pub fn clear(&self, patience: Duration) -> Result<(), CgroupError> {
        let remove = || below(&self.path)?.iter().try_for_each(|folder| remove_tree(folder));
        self.unless_busy(patience, remove)
    }

    /// Again, for up to `patience`, where the last process is still being taken apart.
    pub(super) fn unless_busy(
        &self,
        patience: Duration,
        mut remove: impl FnMut() -> io::Result<()>,
    ) -> Result<(), CgroupError> {
        let deadline = Instant::now() + patience;
        loop {
            match remove() {
                Ok(()) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < deadline => {
                    thread::sleep(PAUSE);
                }
                Err(error) => return Err(CgroupError::io(&self.path, error)),
            }
        }
    }
}

impl AsFd for Cgroup {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }
}

fn below(path: &Path) -> io::Result<Vec<PathBuf>> {
    let mut folders = Vec::new();
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            folders.push(entry.path());
        }
    }
    Ok(folders)
}

/// The kernel's own files go with their directory.
fn remove_tree(path: &Path) -> io::Result<()> {
    let removed = below(path).and_then(|folders| {
        folders.iter().try_for_each(|folder| remove_tree(folder))?;
        fs::remove_dir(path)
    });
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}
