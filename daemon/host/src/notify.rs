//! Telling the service manager how the daemon does, in the protocol of `sd_notify(3)`.
//!
//! **Owns** the datagrams. **Never** fails for lack of a manager: without `NOTIFY_SOCKET` every call does nothing.

use std::env;
use std::ffi::OsStr;
use std::fmt::Write;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::time::{ClockId, clock_gettime};
use sd_notify::NotifyState;

/// Where the manager listens.
pub(crate) const NOTIFY_SOCKET: &str = "NOTIFY_SOCKET";
/// Within how many microseconds the manager wants to hear from the daemon.
pub(crate) const WATCHDOG_USEC: &str = "WATCHDOG_USEC";
/// The process that this is meant for, where that is said.
pub(crate) const WATCHDOG_PID: &str = "WATCHDOG_PID";

/// The time that has passed since the system began, as every process of it counts it.
pub fn now() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

/// The start is finished.
pub fn ready() -> io::Result<()> {
    send(&[NotifyState::Ready])
}

/// The configuration is being read again; [`ready`] follows. With the clock's time, which newer managers compare with that of their signal.
pub fn reloading() -> io::Result<()> {
    send(&[NotifyState::Reloading, NotifyState::MonotonicUsec(now().as_micros() as i128)])
}

/// The daemon shuts down.
pub fn stopping() -> io::Result<()> {
    send(&[NotifyState::Stopping])
}

/// One line for `systemctl status`. Line breaks become spaces.
pub fn status(line: &str) -> io::Result<()> {
    send(&[NotifyState::Status(&line.replace(['\n', '\r'], " "))])
}

/// The daemon is alive; due within every [`watchdog_interval`].
pub fn watchdog() -> io::Result<()> {
    send(&[NotifyState::Watchdog])
}

/// The start or stop in progress takes up to `by` longer.
pub fn extend_timeout(by: Duration) -> io::Result<()> {
    let usec = u32::try_from(by.as_micros()).unwrap_or(u32::MAX);
    send(&[NotifyState::ExtendTimeoutUsec(usec)])
}

/// How often the manager wants to hear from [`watchdog`]; `None` where it does not care. Send at half of it.
pub fn watchdog_interval() -> Option<Duration> {
    sd_notify::watchdog_enabled().filter(|interval| !interval.is_zero())
}

/// Whether there is a manager to talk to.
pub fn has_manager() -> bool {
    env::var_os(NOTIFY_SOCKET).is_some_and(|address| !address.is_empty())
}

fn send(states: &[NotifyState<'_>]) -> io::Result<()> {
    let mut message = String::new();
    for state in states {
        // Writing to a String cannot fail.
        let _ = writeln!(message, "{state}");
    }
    send_raw(&message, None)
}

/// Sends `message`, with an fd beside it, to the manager that the environment names.
pub(crate) fn send_raw(message: &str, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    match env::var_os(NOTIFY_SOCKET) {
        Some(address) if !address.is_empty() => send_to(&address, message, fd),
        Some(_) | None => Ok(()),
    }
}

/// `address` is a path, or `@` and an abstract name.
pub(crate) fn send_to(address: &OsStr, message: &str, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let address = match address.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(address)?,
    };
    let socket = UnixDatagram::unbound()?;
    socket.connect_addr(&address)?;

    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if let Some(fd) = &fd {
        ancillary.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(fd)));
    }
    loop {
        match sendmsg(&socket, &[IoSlice::new(message.as_bytes())], &mut ancillary, SendFlags::NOSIGNAL) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
}
