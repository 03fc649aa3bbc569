//! A child process that ends with the value that stands for it.
//!
//! **Owns** the process. **Never** leaves it behind, hung or as a zombie: a [`Child`] that is dropped as it is does both.

use std::io;
use std::ops::Deref;
use std::os::fd::AsFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pagedd_host::{Child, Pidfd};
use tracing::warn;

/// How long a killed process may take to be gone.
const DEATH: Duration = Duration::from_secs(2);

/// A child that is killed and reaped when this is dropped.
pub struct OwnChild(Child);

impl From<Child> for OwnChild {
    fn from(child: Child) -> Self {
        Self(child)
    }
}

impl Deref for OwnChild {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl Drop for OwnChild {
    fn drop(&mut self) {
        match self.0.kill().and_then(|()| self.0.wait(DEATH)) {
            Ok(Some(_)) => {}
            Ok(None) => warn!(pid = self.0.pid(), "a killed process does not end"),
            Err(error) => warn!(pid = self.0.pid(), %error, "the end of a process cannot be watched"),
        }
    }
}

/// Ends a child whose owner waits for it, and those that would follow it.
#[derive(Debug, Default)]
pub struct Reins(Mutex<Held>);

#[derive(Debug, Default)]
struct Held {
    ended: bool,
    child: Option<Pidfd>,
}

impl Reins {
    /// The child is the one that is ended from now on.
    ///
    /// # Errors
    /// It comes too late: there is to be none any more.
    pub fn hold(&self, child: &Child) -> io::Result<()> {
        let mut held = self.held();
        if held.ended {
            return Err(io::Error::other("the daemon ends"));
        }
        held.child = Some(Pidfd::from(child.as_fd().try_clone_to_owned()?));
        Ok(())
    }

    /// Whether there is to be no child any more.
    pub fn ended(&self) -> bool {
        self.held().ended
    }

    /// Kills the child, also one that is stopped, and waits until it is gone. None follows it.
    pub fn end(&self) {
        let mut held = self.held();
        held.ended = true;
        let Some(child) = held.child.take() else { return };
        match child.kill().and_then(|()| child.wait_gone(DEATH)) {
            Ok(true) => {}
            Ok(false) => warn!("a killed process does not end"),
            Err(error) => warn!(%error, "the end of a process cannot be watched"),
        }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        // Nothing under the lock panics.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use pagedd_host::{Sandbox, Spawn};

    use super::*;

    fn start(program: &str, args: &[&str]) -> OwnChild {
        let spawn = Spawn {
            program: program.into(),
            args: args.iter().map(Into::into).collect(),
            env: Vec::new(),
            fds: Vec::new(),
            cgroup: None,
            identity: None,
            sandbox: Sandbox { no_new_privs: true, ..Sandbox::default() },
        };
        OwnChild::from(pagedd_host::spawn(spawn).expect("a program of every host"))
    }

    #[test]
    fn a_child_that_is_let_go_leaves_no_process_and_no_zombie() {
        let hangs = start("/bin/sleep", &["600"]);
        let ended = start("/bin/true", &[]);
        while !ended.has_exited() {
            std::thread::yield_now();
        }
        for child in [hangs, ended] {
            let entry = format!("/proc/{}", child.pid());
            assert!(Path::new(&entry).exists(), "{entry} is there, running or as a zombie");
            drop(child);
            assert!(!Path::new(&entry).exists(), "{entry}");
        }
    }

    #[test]
    fn reins_end_a_child_that_is_stopped_and_none_follows_it() {
        let reins = Reins::default();
        let child = start("/bin/sh", &["-c", "kill -STOP $$; sleep 600"]);
        reins.hold(&child).expect("held");
        let state = format!("/proc/{}/stat", child.pid());
        while !std::fs::read_to_string(&state).expect("it is there").contains(") T ") {
            std::thread::yield_now();
        }
        reins.end();
        assert!(child.has_exited() && reins.ended());
        assert!(reins.hold(&start("/bin/true", &[])).is_err());
    }
}
