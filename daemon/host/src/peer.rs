//! Who is at the other end of a unix socket, as the kernel saw it connect.

use std::io;
use std::os::fd::AsFd;

use nix::sys::socket::{getsockopt, sockopt};

/// The peer's process, user and group at the time it connected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Credentials {
    /// For logs only: it may have come to mean another process. 0 where the peer is outside this pid namespace.
    pub pid: u32,
    /// Effective user id.
    pub uid: u32,
    /// Effective group id.
    pub gid: u32,
}

/// Credentials of the peer of a connected unix stream socket, of std or of tokio.
pub fn credentials(socket: &impl AsFd) -> io::Result<Credentials> {
    let peer = getsockopt(socket, sockopt::PeerCredentials)?;
    Ok(Credentials { pid: u32::try_from(peer.pid()).unwrap_or(0), uid: peer.uid(), gid: peer.gid() })
}

/// Effective user id of this process.
#[must_use]
pub fn own_uid() -> u32 {
    nix::unistd::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_peer_of_an_own_socket_pair_is_this_process() {
        let (a, _b) = UnixStream::pair().unwrap();
        let peer = credentials(&a).unwrap();
        assert_eq!(peer.pid, std::process::id());
        assert_eq!(peer.uid, nix::unistd::geteuid().as_raw());
        assert_eq!(peer.gid, nix::unistd::getegid().as_raw());
    }
}
