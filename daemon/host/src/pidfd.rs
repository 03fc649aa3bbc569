//! A process, named by a file descriptor: the kernel never gives it to another one.
//!
//! **Owns** the fd. **Never** reaps: that is the parent's.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// A process that need not be a child of this one, such as a gateway that a template process forked.
///
/// Having one tells you which process is meant, for ever. It does not tell you that the process still lives.
#[derive(Debug)]
pub struct Pidfd {
    fd: OwnedFd,
}

impl Pidfd {
    /// Of a process that this one has not reaped yet, so that `pid` cannot have come to mean another.
    pub(crate) fn of_child(pid: Pid) -> io::Result<Self> {
        Ok(Self { fd: pidfd_open(pid, PidfdFlags::empty())? })
    }

    /// Of whatever process has this number now.
    pub(crate) fn open(pid: Pid) -> io::Result<Self> {
        Self::of_child(pid)
    }

    /// Whether the process has ended, reaped or not.
    pub fn has_exited(&self) -> bool {
        matches!(self.wait_gone(Duration::ZERO), Ok(true))
    }

    /// Waits until the process has ended; false where it lives on after `timeout`.
    pub fn wait_gone(&self, timeout: Duration) -> io::Result<bool> {
        readable(self.fd.as_fd(), timeout)
    }

    /// SIGKILL. That the process is already gone is no error.
    pub fn kill(&self) -> io::Result<()> {
        self.signal(Signal::KILL)
    }

    /// SIGTERM. That the process is already gone is no error.
    pub fn terminate(&self) -> io::Result<()> {
        self.signal(Signal::TERM)
    }

    pub(crate) fn signal(&self, signal: Signal) -> io::Result<()> {
        match pidfd_send_signal(&self.fd, signal) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(e) => Err(e.into()),
        }
    }
}

/// Waits until `fd` is readable or has hung up; false after `timeout`.
pub(crate) fn readable(fd: BorrowedFd<'_>, timeout: Duration) -> io::Result<bool> {
    let deadline = Instant::now().checked_add(timeout);
    loop {
        let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
        // A wait too long for the kernel's type is one without an end.
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], left.as_ref()) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

impl From<OwnedFd> for Pidfd {
    /// An fd that came over a socket. Where it is no pidfd, [`Pidfd::kill`] fails.
    fn from(fd: OwnedFd) -> Self {
        Self { fd }
    }
}

impl From<Pidfd> for OwnedFd {
    fn from(pidfd: Pidfd) -> Self {
        pidfd.fd
    }
}

impl AsFd for Pidfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
