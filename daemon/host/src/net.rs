//! Listening sockets.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, ipproto, listen, socket_with,
    sockopt,
};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 1024;

/// Why a port is not ours.
#[derive(thiserror::Error, Debug)]
pub enum BindError {
    /// Another process, or another tenant, has it.
    #[error(
        "port {port} of {addr} is in use: choose another port, or stop what uses it (`ss -ltnp 'sport = :{port}'`)"
    )]
    PortInUse {
        /// Address asked for.
        addr: IpAddr,
        /// Port asked for.
        port: u16,
    },
    /// A port below 1024, and no right to it.
    #[error("port {port} needs CAP_NET_BIND_SERVICE: choose one above 1023, or start with that capability")]
    Privileged {
        /// Port asked for.
        port: u16,
    },
    /// This host does not have it.
    #[error("this host has no address {addr}: set `listen` to one that it has")]
    NoSuchAddress {
        /// Address asked for.
        addr: IpAddr,
    },
    /// Anything else.
    #[error("cannot listen on port {port} of {addr}: {source}")]
    Io {
        /// Address asked for.
        addr: IpAddr,
        /// Port asked for.
        port: u16,
        /// From the kernel.
        source: io::Error,
    },
}

/// Binds and listens, nonblocking. A port that an ended process used a moment ago is free (`SO_REUSEADDR`).
pub fn bind_tcp(addr: IpAddr, port: u16) -> Result<TcpListener, BindError> {
    listener(SocketAddr::new(addr, port)).map_err(|errno| match errno {
        Errno::ADDRINUSE => BindError::PortInUse { addr, port },
        Errno::ACCESS => BindError::Privileged { port },
        Errno::ADDRNOTAVAIL => BindError::NoSuchAddress { addr },
        errno => BindError::Io { addr, port, source: errno.into() },
    })
}

fn listener(address: SocketAddr) -> rustix::io::Result<TcpListener> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &address)?;
    listen(&socket, BACKLOG)?;
    Ok(socket.into())
}

/// Whether somebody listens on a unix socket's file, busy or not.
///
/// # Errors
/// It is not there, or may not be asked.
pub fn is_answered(path: &Path) -> io::Result<bool> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match connect(&socket, &SocketAddrUnix::new(path)?) {
        // Too many wait there already.
        Ok(()) | Err(Errno::AGAIN) => Ok(true),
        Err(Errno::CONNREFUSED) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, TcpStream};

    const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    #[test]
    fn a_bound_port_accepts_and_does_not_block() {
        let listener = bind_tcp(LOCAL, 0).unwrap();
        assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert!(TcpStream::connect(listener.local_addr().unwrap()).is_ok());
    }

    #[test]
    fn a_port_in_use_is_named() {
        let first = bind_tcp(LOCAL, 0).unwrap();
        let taken = first.local_addr().unwrap().port();
        let error = bind_tcp(LOCAL, taken).unwrap_err();
        assert!(matches!(error, BindError::PortInUse { port, .. } if port == taken), "{error}");
        assert!(error.to_string().contains(&taken.to_string()));
    }

    #[test]
    fn a_port_is_free_again_while_its_last_connection_is_in_time_wait() {
        let listener = bind_tcp(LOCAL, 0).unwrap();
        let address = listener.local_addr().unwrap();
        let client = TcpStream::connect(address).unwrap();
        // The side that closes first waits: here the listener's.
        drop(loop {
            match listener.accept() {
                Ok((accepted, _)) => break accepted,
                Err(e) => assert_eq!(e.kind(), io::ErrorKind::WouldBlock),
            }
        });
        drop((client, listener));
        assert!(bind_tcp(LOCAL, address.port()).is_ok());
    }

    #[test]
    fn an_address_of_another_host_is_named() {
        let foreign = IpAddr::from([192, 0, 2, 1]);
        assert!(matches!(bind_tcp(foreign, 0), Err(BindError::NoSuchAddress { addr }) if addr == foreign));
    }

    #[test]
    fn a_unix_socket_is_answered_as_long_as_somebody_listens() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        assert_eq!(is_answered(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert!(is_answered(&path).unwrap());
        drop(listener);
        assert!(!is_answered(&path).unwrap());
    }
}
