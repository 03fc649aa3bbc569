//! What a daemon tells its keeper.
//!
//! **Owns** the socket, in a directory that only this user can enter. **Never** believes a datagram that the kernel does not
//! attribute to the daemon.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, UnixCredentials, recvmsg, setsockopt, sockopt};
use tempfile::TempDir;
use tracing::warn;

use crate::fdstore::is_name;

/// Longest message.
const MAX_MESSAGE: usize = 8 << 10;
/// Most fds that the kernel passes with one message.
const MAX_FDS: usize = 253;

/// One thing that the daemon said.
#[derive(Debug)]
pub(super) enum Told {
    Ready,
    Alive,
    Status(String),
    ExtendTimeout(Duration),
    Store { name: String, fds: Vec<OwnedFd> },
    Remove { name: String },
}

pub(super) struct Inbox {
    socket: UnixDatagram,
    path: PathBuf,
    /// Removed with it.
    _dir: TempDir,
}

impl Inbox {
    pub fn new() -> io::Result<Self> {
        let dir = tempfile::Builder::new().prefix("pagedd-keeper-").tempdir()?;
        let path = dir.path().join("notify");
        let socket = UnixDatagram::bind(&path)?;
        setsockopt(&socket, sockopt::PassCred, &true)?;
        socket.set_nonblocking(true)?;
        Ok(Self { socket, path, _dir: dir })
    }

    pub fn address(&self) -> &Path {
        &self.path
    }

    /// The next message; empty where it is not from process `from`, or makes no sense. `None` where no more are waiting.
    pub fn receive(&self, from: u32) -> io::Result<Option<Vec<Told>>> {
        let mut bytes = [0; MAX_MESSAGE];
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let mut space = nix::cmsg_space!(UnixCredentials, [RawFd; MAX_FDS]);
        let fd = self.socket.as_raw_fd();
        let message = match recvmsg::<()>(fd, &mut parts, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC) {
            Ok(message) => message,
            Err(Errno::EAGAIN) => return Ok(None),
            Err(Errno::EINTR) => return Ok(Some(Vec::new())),
            Err(e) => return Err(e.into()),
        };
        let cut = message.flags.intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC);
        let length = message.bytes;
        let mut fds = Vec::new();
        let mut sender = None;
        for control in message.cmsgs().into_iter().flatten() {
            match control {
                ControlMessageOwned::ScmRights(numbers) => fds.extend(numbers.into_iter().map(received)),
                ControlMessageOwned::ScmCredentials(credentials) => sender = Some(credentials.pid()),
                _ => {}
            }
        }
        if sender.and_then(|pid| u32::try_from(pid).ok()) != Some(from) {
            warn!(?sender, "ignored a message that is not the daemon's");
            return Ok(Some(Vec::new()));
        }
        let text = std::str::from_utf8(&bytes[..length]).ok().filter(|_| !cut);
        Ok(Some(text.map_or_else(
            || {
                warn!(length, "ignored a message that is cut off or not text");
                Vec::new()
            },
            |text| parse(text, fds),
        )))
    }
}

impl AsFd for Inbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[allow(unsafe_code)]
fn received(number: RawFd) -> OwnedFd {
    // SAFETY: the kernel has just put it into this process's table, and the message, its only mention, is used up.
    unsafe { OwnedFd::from_raw_fd(number) }
}

/// Reads the lines `KEY=VALUE` of a message. What is unknown or malformed is left out; its fds are closed.
pub(super) fn parse(message: &str, fds: Vec<OwnedFd>) -> Vec<Told> {
    let value = |key: &str| message.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    let name = value("FDNAME").filter(|name| is_name(name)).map(str::to_owned);
    let mut told = Vec::new();
    if value("READY") == Some("1") {
        told.push(Told::Ready);
    }
    if value("WATCHDOG") == Some("1") {
        told.push(Told::Alive);
    }
    if let Some(line) = value("STATUS") {
        told.push(Told::Status(line.to_owned()));
    }
    if let Some(usec) = value("EXTEND_TIMEOUT_USEC").and_then(|usec| usec.parse::<u32>().ok()) {
        told.push(Told::ExtendTimeout(Duration::from_micros(usec.into())));
    }
    match name {
        Some(name) if value("FDSTORE") == Some("1") => told.push(Told::Store { name, fds }),
        Some(name) if value("FDSTOREREMOVE") == Some("1") => told.push(Told::Remove { name }),
        Some(_) | None => {
            if value("FDSTORE").or(value("FDSTOREREMOVE")).is_some() {
                warn!("ignored a request to store or remove an fd without a proper FDNAME");
            }
        }
    }
    told
}
