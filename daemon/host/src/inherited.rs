//! Fds that a process was started with, by their numbers.
//!
//! **Owns** the guarantee that each is taken once. **Never** takes a standard stream.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, PoisonError};

static TAKEN: Mutex<BTreeSet<RawFd>> = Mutex::new(BTreeSet::new());

/// Takes over the fd `number`, which whoever started this process placed there (see [`Spawn::fds`](crate::Spawn::fds)), and
/// closes it on the next `exec`.
///
/// To be called before this process opens files of its own, since one of them could have the number.
///
/// # Errors
/// Nothing is open there, or it was taken before.
#[allow(unsafe_code)]
pub fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    let taken =
        || io::Error::new(io::ErrorKind::InvalidInput, format!("fd {number} is not there to be taken"));
    if number <= 2 || !TAKEN.lock().unwrap_or_else(PoisonError::into_inner).insert(number) {
        return Err(taken());
    }
    // SAFETY: F_SETFD touches no memory, and fails on a number that is not open.
    if unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } != 0 {
        return Err(taken());
    }
    // SAFETY: it is open, and nobody else owns it: the process was started with it, and `TAKEN` gives each number out once.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_fd_that_is_not_open_or_standard_is_not_taken() {
        assert!(inherited(1).is_err());
        assert!(inherited(-1).is_err());
        assert!(inherited(1_000_000).is_err());
    }
}
