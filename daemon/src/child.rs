//! A child process that ends with the value that stands for it.
//!
//! **Owns** the process. **Never** leaves it behind, hung or as a zombie: a [`Child`] that is dropped as it is does both.

use std::ops::Deref;
use std::time::Duration;

use pagedd_host::Child;
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
            sandbox: Sandbox { no_new_privs: true },
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
}
