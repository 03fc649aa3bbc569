use std::io::Read;
use std::path::Path;

use pagedd_host::lock::{LockError, StateLock};
use pagedd_host::{Child, spawn};

use super::roles::{LONG, pipe, role};

/// Another process that holds the lock of `dir` until its stdin, which comes back too, is closed.
fn holder(dir: &Path) -> (Child, std::os::fd::OwnedFd) {
    let (mut said, stdout) = pipe();
    let (stdin, open) = pipe();
    let mut what = role("lock", &[dir.to_str().unwrap()]);
    what.fds = vec![(stdin.into(), 0), (stdout, 1)];
    let child = spawn(what).unwrap();
    let mut line = [0; 5];
    said.read_exact(&mut line).unwrap();
    assert_eq!(line, *b"held\n");
    (child, open)
}

pub fn a_second_daemon_on_a_state_directory_is_told_who_holds_it() {
    let dir = tempfile::tempdir().unwrap();
    let (child, _open) = holder(dir.path());
    let error = StateLock::acquire(dir.path()).unwrap_err();
    assert!(matches!(error, LockError::Held { pid: Some(pid), .. } if pid == child.pid()), "{error}");
    assert!(error.to_string().contains(dir.path().to_str().unwrap()), "{error}");
    child.kill().unwrap();
    child.wait(LONG).unwrap().unwrap();
}

pub fn a_lock_ends_with_its_process() {
    let dir = tempfile::tempdir().unwrap();
    let (child, _open) = holder(dir.path());
    child.kill().unwrap();
    child.wait(LONG).unwrap().unwrap();
    let lock = StateLock::acquire(dir.path()).unwrap();
    let text = std::fs::read_to_string(dir.path().join("lock")).unwrap();
    assert_eq!(text, format!("{}\n", std::process::id()));
    drop(lock);
    assert!(StateLock::acquire(dir.path()).is_ok());
}

pub fn a_lock_that_a_dead_holders_child_still_has_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let (child, _open) = holder(dir.path());
    child.kill().unwrap();
    child.wait(LONG).unwrap().unwrap();
    // This process has the lock as a child between fork and exec has it: it wrote no number of its own.
    let lock = StateLock::acquire(dir.path()).unwrap();
    std::fs::write(dir.path().join("lock"), format!("{}\n", child.pid())).unwrap();
    let exec = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(50));
        drop(lock);
    });
    assert!(StateLock::acquire(dir.path()).is_ok());
    exec.join().unwrap();
}

pub fn a_state_directory_that_does_not_exist_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing");
    let error = StateLock::acquire(&missing).unwrap_err();
    assert!(matches!(error, LockError::Io { .. }), "{error}");
    assert!(error.to_string().contains(missing.to_str().unwrap()), "{error}");
}
