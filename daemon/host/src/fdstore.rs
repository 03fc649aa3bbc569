//! File descriptors that outlive the daemon: the service manager, systemd or the keeper, holds them by name and hands them
//! to the next one.
//!
//! **Owns** the fds that came from the manager until they are taken. **Never** decides what is worth keeping.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::ffi::OsString;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use fail::fail_point;

use crate::inherited;
use crate::notify;

pub(crate) const LISTEN_PID: &str = "LISTEN_PID";
pub(crate) const LISTEN_FDS: &str = "LISTEN_FDS";
pub(crate) const LISTEN_FDNAMES: &str = "LISTEN_FDNAMES";
/// Number of the first fd that a manager passes.
pub(crate) const FIRST_FD: RawFd = 3;
/// Longest name, as systemd has it.
const MAX_NAME: usize = 255;
/// Most fds that are stored: the unit's `FileDescriptorStoreMax`, less what others of it may need. A manager that is full says so to nobody.
const MOST_FDS: usize = 4_000;
/// Most bytes of all names together. The next daemon gets them as one variable, and the kernel starts no program that has one of 128 KiB.
const MOST_NAME_BYTES: usize = 120 << 10;
/// What the protocol calls an fd without a name.
const UNNAMED: &str = "unknown";

/// Why an fd is not kept.
#[derive(thiserror::Error, Debug)]
pub enum StoreError {
    /// The caller's mistake.
    #[error(
        "{name:?} is no name for a stored fd: it takes 1 to {MAX_NAME} printable ASCII characters without ':'"
    )]
    Name {
        /// As given.
        name: String,
    },
    /// The store is full; what it holds is as it was.
    #[error(
        "the fd store has no room for {name}: it holds {fds} of {MOST_FDS} fds, with {bytes} of {MOST_NAME_BYTES} bytes of names"
    )]
    Full {
        /// Name of the fd.
        name: String,
        /// How many it holds.
        fds: usize,
        /// Bytes of their names.
        bytes: usize,
    },
    /// The manager does not listen.
    #[error("cannot reach the service manager about fd {name}: {source}")]
    Manager {
        /// Name of the fd.
        name: String,
        /// From the kernel.
        source: io::Error,
    },
}

#[derive(Debug, Default)]
struct State {
    /// Came from the manager and not taken yet.
    waiting: BTreeMap<String, Vec<OwnedFd>>,
    /// What the manager holds, as far as is known.
    held: BTreeSet<String>,
}

/// The daemon's side of the fd store.
#[derive(Debug, Default)]
pub struct FdStore {
    /// `NOTIFY_SOCKET`; without it nothing is kept.
    manager: Option<OsString>,
    state: Mutex<State>,
}

impl FdStore {
    /// Takes over the fds that the environment announces. A second call in one process finds none.
    ///
    /// Call it before anything else opens or closes fds by number.
    pub fn from_env() -> Self {
        let manager = env::var_os(notify::NOTIFY_SOCKET).filter(|address| !address.is_empty());
        let mut state = State::default();
        for (name, fd) in passed_fds() {
            state.held.insert(name.clone());
            state.waiting.entry(name).or_default().push(fd);
        }
        Self { manager, state: Mutex::new(state) }
    }

    /// A store that keeps nothing, for a daemon that nobody would restart.
    pub fn without_manager() -> Self {
        Self::default()
    }

    /// Whether what is stored outlives the daemon.
    pub fn keeps(&self) -> bool {
        self.manager.is_some()
    }

    /// The fd that an earlier daemon stored under `name`; the newest where there are several. The manager goes on holding it.
    pub fn take(&self, name: &str) -> Option<OwnedFd> {
        self.state().waiting.remove(name)?.pop()
    }

    /// A copy of the fd that [`take`](Self::take) would give.
    pub fn peek(&self, name: &str) -> Option<OwnedFd> {
        self.state().waiting.get(name)?.last()?.try_clone().ok()
    }

    /// The socket that the manager listens on for the daemon under `name`, and goes on listening on: it is no fd that was stored.
    pub fn take_socket(&self, name: &str) -> Option<OwnedFd> {
        let mut state = self.state();
        state.held.remove(name);
        state.waiting.remove(name)?.pop()
    }

    /// Names of fds that nobody has taken yet.
    pub fn names(&self) -> Vec<String> {
        self.state().waiting.keys().cloned().collect()
    }

    /// Gives the manager a copy of `fd`. An fd that it holds under the same name goes.
    ///
    /// # Errors
    /// Where there is room for it, the manager may not hold it, and no longer holds an earlier one of that name.
    pub fn store(&self, name: &str, fd: BorrowedFd<'_>) -> Result<(), StoreError> {
        check_name(name)?;
        let mut state = self.state();
        if state.held.contains(name) {
            self.send_remove(name)?;
            state.held.remove(name);
        } else if self.keeps() && !has_room(&state.held, name) {
            let bytes = name_bytes(&state.held);
            return Err(StoreError::Full { name: name.to_owned(), fds: state.held.len(), bytes });
        }
        fail_point!("fdstore-put", |_| Err(StoreError::Manager {
            name: name.to_owned(),
            source: io::ErrorKind::Other.into()
        }));
        self.send(name, &format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0\n"), Some(fd))?;
        state.held.insert(name.to_owned());
        Ok(())
    }

    /// Lets the manager close what it holds under `name`, and forgets one that was not taken. No such fd is no error.
    pub fn remove(&self, name: &str) -> Result<(), StoreError> {
        check_name(name)?;
        let mut state = self.state();
        state.waiting.remove(name);
        fail_point!("fdstore-remove", |_| Err(StoreError::Manager {
            name: name.to_owned(),
            source: io::ErrorKind::Other.into()
        }));
        self.send_remove(name)?;
        state.held.remove(name);
        Ok(())
    }

    fn send_remove(&self, name: &str) -> Result<(), StoreError> {
        self.send(name, &format!("FDSTOREREMOVE=1\nFDNAME={name}\n"), None)
    }

    fn send(&self, name: &str, message: &str, fd: Option<BorrowedFd<'_>>) -> Result<(), StoreError> {
        let Some(manager) = &self.manager else { return Ok(()) };
        notify::send_to(manager, message, fd)
            .map_err(|source| StoreError::Manager { name: name.to_owned(), source })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every change of the maps is complete before anything could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn name_bytes(names: &BTreeSet<String>) -> usize {
    names.iter().map(|name| name.len() + 1).sum()
}

/// Whether one more fits what the next daemon can be given.
fn has_room(held: &BTreeSet<String>, name: &str) -> bool {
    held.len() < MOST_FDS && name_bytes(held) + name.len() < MOST_NAME_BYTES
}

/// Whether `name` can name a stored fd.
pub(crate) fn is_name(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len())
        && name.bytes().all(|byte| (byte.is_ascii_graphic() || byte == b' ') && byte != b':')
}

fn check_name(name: &str) -> Result<(), StoreError> {
    if is_name(name) { Ok(()) } else { Err(StoreError::Name { name: name.to_owned() }) }
}

fn passed_fds() -> Vec<(String, OwnedFd)> {
    let variable = |name| env::var(name).ok();
    passed_names(
        variable(LISTEN_PID).as_deref(),
        variable(LISTEN_FDS).as_deref(),
        variable(LISTEN_FDNAMES).as_deref(),
        std::process::id(),
    )
    .into_iter()
    .zip(FIRST_FD..)
    .filter_map(|(name, number)| match inherited(number) {
        Ok(fd) => Some((name, fd)),
        Err(error) => {
            tracing::warn!(name, %error, "an fd that the service manager announced is missing");
            None
        }
    })
    .collect()
}

/// A name for each fd that is announced to the process `own`.
fn passed_names(pid: Option<&str>, count: Option<&str>, names: Option<&str>, own: u32) -> Vec<String> {
    // An environment that was meant for another process, such as an ancestor that did not clean up, announces nothing here.
    if pid.and_then(|pid| pid.parse().ok()) != Some(own) {
        return Vec::new();
    }
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX);
    let count = count.and_then(|count| count.parse::<u32>().ok()).unwrap_or(0);
    if count == 0 || u64::from(count) > limit {
        return Vec::new();
    }
    let names: Vec<&str> = names.map_or_else(Vec::new, |names| names.split(':').collect());
    let matches = names.len() == count as usize;
    (0..count as usize).map(|i| if matches { names[i] } else { UNNAMED }.to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fds_are_taken_only_by_the_process_that_they_are_meant_for() {
        assert_eq!(passed_names(Some("7"), Some("2"), Some("a:b"), 7), ["a", "b"]);
        assert!(passed_names(Some("8"), Some("2"), Some("a:b"), 7).is_empty());
        assert!(passed_names(None, Some("2"), Some("a:b"), 7).is_empty());
    }

    #[test]
    fn a_wrong_list_of_names_leaves_the_fds_unnamed() {
        assert_eq!(passed_names(Some("7"), Some("2"), Some("a"), 7), [UNNAMED, UNNAMED]);
        assert_eq!(passed_names(Some("7"), Some("1"), None, 7), [UNNAMED]);
    }

    #[test]
    fn a_count_that_cannot_be_true_announces_nothing() {
        for count in ["", "-1", "x", "0", "4294967295", "99999999999"] {
            assert!(passed_names(Some("7"), Some(count), None, 7).is_empty(), "{count}");
        }
    }

    #[test]
    fn names_that_would_break_the_protocol_are_refused() {
        let store = FdStore::without_manager();
        let fd = std::fs::File::open("/dev/null").unwrap();
        for name in ["", "a:b", "a\nFDNAME=b", "\u{e9}", &"x".repeat(256)] {
            let stored = store.store(name, std::os::fd::AsFd::as_fd(&fd));
            assert!(matches!(stored, Err(StoreError::Name { .. })), "{name:?}");
        }
        assert!(store.store("tenant-acme", std::os::fd::AsFd::as_fd(&fd)).is_ok());
    }

    #[test]
    fn a_store_takes_no_more_than_the_next_daemon_can_be_told_of() {
        let short: BTreeSet<String> = (0..MOST_FDS).map(|i| format!("port-{i}")).collect();
        assert!(name_bytes(&short) < MOST_NAME_BYTES, "{} bytes", name_bytes(&short));
        assert!(!has_room(&short, "port-new"), "{} fds", short.len());
        let mut long = BTreeSet::new();
        while has_room(&long, &format!("{:0>255}", long.len())) {
            long.insert(format!("{:0>255}", long.len()));
        }
        // What the kernel takes as one variable of a program, its name and its end included.
        let variable = format!("{LISTEN_FDNAMES}={}", Vec::from_iter(long.clone()).join(":"));
        assert!(
            long.len() > 400 && variable.len() < 128 << 10,
            "{} names, {} bytes",
            long.len(),
            variable.len()
        );
        let started = std::process::Command::new("/bin/true").env(LISTEN_FDNAMES, &variable).status();
        assert!(started.is_ok_and(|status| status.success()));
    }
}
