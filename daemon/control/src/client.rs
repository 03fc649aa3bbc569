//! The blocking client that `pagedctl` and tests use.

use crate::line::{LineError, MAX_REPLY_LINE, encode, read_line};
use crate::{Command, ControlError, PROTOCOL, Reply, Request, Response};
use std::io::{self, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Why a call brought no reply.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// There is no socket, or nobody listens on it.
    #[error("pagedd is not running: no admin socket at {}", path.display())]
    NotRunning {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// The socket is there and this user may not use it.
    #[error("permission denied on the admin socket {}", path.display())]
    PermissionDenied {
        /// The socket.
        path: PathBuf,
    },
    /// The socket's path is longer than the kernel takes.
    #[error("the admin socket's path is too long for a unix socket (107 bytes at most): {}", path.display())]
    PathTooLong {
        /// The path.
        path: PathBuf,
    },
    /// The daemon did not answer in time.
    #[error("pagedd did not answer within {} s on {}", after.as_secs(), path.display())]
    TimedOut {
        /// The socket.
        path: PathBuf,
        /// How long it was waited.
        after: Duration,
    },
    /// The daemon went away before it answered.
    #[error("pagedd closed the connection on {} before it answered", path.display())]
    Closed {
        /// The socket.
        path: PathBuf,
    },
    /// The answer is no answer of this protocol.
    #[error("what answers on {} is not pagedd, or another version of it: {reason}", path.display())]
    Garbled {
        /// The socket.
        path: PathBuf,
        /// What is wrong with the answer.
        reason: String,
    },
    /// The connection failed.
    #[error("{}: {source}", path.display())]
    Io {
        /// The socket.
        path: PathBuf,
        /// What failed.
        source: io::Error,
    },
    /// The daemon refused; nothing has changed.
    #[error(transparent)]
    Refused(#[from] ControlError),
}

impl ClientError {
    /// What to do about it, where something can be done.
    #[must_use]
    pub fn remedy(&self) -> Option<String> {
        match self {
            Self::NotRunning { .. } => {
                Some("start it: as a service with `systemctl start pagedd`, else with `pagedd --config FILE`; or name its socket with --socket PATH".to_owned())
            }
            Self::PermissionDenied { path } => {
                Some(format!("run as root, or as a member of the group of {}", path.display()))
            }
            Self::PathTooLong { .. } => Some("set a shorter `admin_socket` in pagedd.yaml".to_owned()),
            Self::TimedOut { .. } => Some("see the daemon's log".to_owned()),
            Self::Closed { .. } => Some("ask again; if it stays so, see the daemon's log".to_owned()),
            Self::Garbled { .. } => Some("use the pagedctl that was installed with this pagedd".to_owned()),
            Self::Io { .. } => None,
            Self::Refused(error) => error.remedy.clone(),
        }
    }
}

/// A connection to the daemon's admin socket.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<UnixStream>,
    path: PathBuf,
    timeout: Duration,
}

impl Client {
    /// How long a call waits for its answer: longer than a gateway takes to come up on a busy host.
    pub const TIMEOUT: Duration = Duration::from_mins(1);

    /// Connects to the socket at `path`.
    ///
    /// # Errors
    /// [`ClientError::NotRunning`] where nobody listens, [`ClientError::PermissionDenied`], [`ClientError::PathTooLong`].
    pub fn connect(path: &Path) -> Result<Self, ClientError> {
        let path = path.to_path_buf();
        match UnixStream::connect(&path) {
            Ok(stream) => {
                let client = Self { stream: BufReader::new(stream), path, timeout: Self::TIMEOUT };
                client.apply_timeout()?;
                Ok(client)
            }
            Err(error) => Err(match error.kind() {
                // A socket file without a listener is what a killed daemon leaves behind.
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused | io::ErrorKind::NotADirectory => {
                    ClientError::NotRunning { path }
                }
                io::ErrorKind::PermissionDenied => ClientError::PermissionDenied { path },
                io::ErrorKind::InvalidInput => ClientError::PathTooLong { path },
                _ => ClientError::Io { path, source: error },
            }),
        }
    }

    /// Waits up to `timeout` for each answer instead of [`Client::TIMEOUT`].
    pub fn set_timeout(&mut self, timeout: Duration) -> Result<(), ClientError> {
        self.timeout = timeout;
        self.apply_timeout()
    }

    fn apply_timeout(&self) -> Result<(), ClientError> {
        let stream = self.stream.get_ref();
        stream
            .set_read_timeout(Some(self.timeout))
            .and_then(|()| stream.set_write_timeout(Some(self.timeout)))
            .map_err(|source| ClientError::Io { path: self.path.clone(), source })
    }

    /// Asks and waits for the answer. After an error other than [`ClientError::Refused`] the connection is of no more use.
    ///
    /// # Errors
    /// [`ClientError::Refused`] is the daemon's answer; every other says that there was none.
    pub fn call(&mut self, command: Command) -> Result<Reply, ClientError> {
        let request = encode(&Request { protocol: PROTOCOL, command })
            .map_err(|error| ClientError::Garbled { path: self.path.clone(), reason: error.to_string() })?;
        self.stream.get_mut().write_all(&request).map_err(|error| self.failed(error))?;
        let line = match read_line(&mut self.stream, MAX_REPLY_LINE) {
            Ok(Some(line)) => line,
            Ok(None) | Err(LineError::Cut) => return Err(ClientError::Closed { path: self.path.clone() }),
            Err(LineError::Io(error)) => return Err(self.failed(error)),
            Err(error @ LineError::TooLong { .. }) => {
                return Err(ClientError::Garbled { path: self.path.clone(), reason: error.to_string() });
            }
        };
        let response: Response = serde_json::from_slice(&line)
            .map_err(|error| ClientError::Garbled { path: self.path.clone(), reason: error.to_string() })?;
        Result::from(response).map_err(ClientError::Refused)
    }

    fn failed(&self, error: io::Error) -> ClientError {
        let path = self.path.clone();
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                ClientError::TimedOut { path, after: self.timeout }
            }
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof => {
                ClientError::Closed { path }
            }
            _ => ClientError::Io { path, source: error },
        }
    }
}
