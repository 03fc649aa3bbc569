//! Messages as lines.

use crate::{Command, ControlError, ErrorCode, PROTOCOL, Request};
use serde::{Deserialize, Serialize};
use std::io::{BufRead, Read};

/// Longest request line that a daemon reads, with its line break.
pub const MAX_REQUEST_LINE: usize = 64 << 10;

/// Longest reply line that a client reads, with its line break: metrics of a thousand tenants fit.
pub const MAX_REPLY_LINE: usize = 64 << 20;

/// Why a line could not be read.
#[derive(Debug, thiserror::Error)]
pub enum LineError {
    /// The other side closed the connection inside a line.
    #[error("the connection ended inside a message")]
    Cut,
    /// The line is longer than the reader takes.
    #[error("a message is longer than {limit} bytes")]
    TooLong {
        /// What the reader takes.
        limit: usize,
    },
    /// Reading failed.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// A message as one line with its line break. JSON escapes every line break inside.
///
/// # Errors
/// Never for the types of this crate.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, serde_json::Error> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    Ok(line)
}

/// Reads a request line (with or without its line break) as the daemon does: the version first, so that a newer client's
/// unknown command is answered by the versions and not by a parser's message.
///
/// # Errors
/// The refusal to be sent: [`ErrorCode::UnsupportedProtocol`] or [`ErrorCode::InvalidRequest`].
pub fn decode_request(line: &[u8]) -> Result<Command, ControlError> {
    #[derive(Deserialize)]
    struct Version {
        protocol: u32,
    }
    let invalid = |error: serde_json::Error| {
        ControlError::new(ErrorCode::InvalidRequest, format!("not a request: {error}"))
    };
    let Version { protocol } = serde_json::from_slice(line).map_err(invalid)?;
    if protocol != PROTOCOL {
        let message =
            format!("the client speaks version {protocol} of the admin protocol, the daemon {PROTOCOL}");
        return Err(ControlError::new(ErrorCode::UnsupportedProtocol, message)
            .remedy("use the pagedctl that was installed with this pagedd"));
    }
    serde_json::from_slice::<Request>(line).map(|request| request.command).map_err(invalid)
}

/// Reads one line of at most `limit` bytes, without its line break; `None` at a clean end.
pub(crate) fn read_line(from: &mut impl BufRead, limit: usize) -> Result<Option<Vec<u8>>, LineError> {
    let mut line = Vec::new();
    from.take(limit as u64).read_until(b'\n', &mut line)?;
    match line.last() {
        None => Ok(None),
        Some(b'\n') => {
            line.pop();
            Ok(Some(line))
        }
        Some(_) if line.len() >= limit => Err(LineError::TooLong { limit }),
        Some(_) => Err(LineError::Cut),
    }
}
