use std::fs::Permissions;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use pagedd_host::lock::{Claim, GpuLock, LockError, StateLock};
use pagedd_host::{Child, Identity, Spawn, spawn};

use super::roles::{LONG, me, output, pipe, program, role};

/// Another process that holds the lock of `dir` until its stdin, which comes back too, is closed.
fn holder(dir: &Path) -> (Child, std::os::fd::OwnedFd) {
    hold(role("lock", &[dir.to_str().unwrap()]))
}

/// The same of the GPU `ordinal`, whose lock file is in `dir`.
fn gpu_holder(dir: &Path, ordinal: u32) -> (Child, std::os::fd::OwnedFd) {
    hold(role("lock-gpu", &[dir.to_str().unwrap(), &ordinal.to_string()]))
}

fn hold(mut what: Spawn) -> (Child, std::os::fd::OwnedFd) {
    let (mut said, stdout) = pipe();
    let (stdin, open) = pipe();
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

pub fn a_holder_that_is_about_to_end_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let (child, _open) = holder(dir.path());
    let ends = std::thread::spawn(move || {
        // The other has found the lock taken by then, or gets it at once.
        std::thread::sleep(std::time::Duration::from_millis(200));
        child.kill().unwrap();
        child.wait(LONG).unwrap().unwrap();
    });
    assert!(StateLock::acquire(dir.path()).is_ok());
    ends.join().unwrap();
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

pub fn a_second_daemon_on_a_gpu_is_told_which_by_what_file_and_who_holds_it() {
    let dir = tempfile::tempdir().unwrap();
    let (child, _open) = gpu_holder(dir.path(), 3);
    let error = GpuLock::acquire_in(&[dir.path()], 3).unwrap_err();
    let file = dir.path().join("pagedd-cuda-3.lock");
    let expected = format!(
        "GPU cuda:3 (lock file {}) is in use by another pagedd (pid {}): stop it, or give the model another device",
        file.display(),
        child.pid()
    );
    assert_eq!(error.to_string(), expected);
    assert!(matches!(error, LockError::Held { claim: Claim::Gpu { ordinal: 3, .. }, .. }));
    assert!(GpuLock::acquire_in(&[dir.path()], 4).is_ok(), "another GPU is another's");
    child.kill().unwrap();
    child.wait(LONG).unwrap().unwrap();
}

pub fn the_lock_of_a_gpu_ends_with_its_process_and_no_child_has_it() {
    let dir = tempfile::tempdir().unwrap();
    let (child, _open) = gpu_holder(dir.path(), 0);
    child.kill().unwrap();
    child.wait(LONG).unwrap().unwrap();
    let lock = GpuLock::acquire_in(&[dir.path()], 0).unwrap();
    let (fds, _) = output(role("fds", &[]));
    assert!(!fds.contains("pagedd-cuda"), "{fds}");
    // A child that outlives it.
    let (child, _open) = holder(dir.path());
    drop(lock);
    assert!(GpuLock::acquire_in(&[dir.path()], 0).is_ok());
    child.kill().unwrap();
    child.wait(LONG).unwrap().unwrap();
}

pub fn the_lock_of_a_gpu_lies_where_it_can_and_never_behind_a_link() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing");
    let lock = GpuLock::acquire_in(&[&missing, dir.path()], 0).unwrap();
    assert!(dir.path().join("pagedd-cuda-0.lock").is_file());
    drop(lock);
    let error = GpuLock::acquire_in(&[&missing], 0).unwrap_err();
    assert!(matches!(error, LockError::Io { .. }), "{error}");
    assert!(error.to_string().contains(missing.to_str().unwrap()), "{error}");
    let victim = dir.path().join("victim");
    std::fs::write(&victim, "whole").unwrap();
    std::os::unix::fs::symlink(&victim, dir.path().join("pagedd-cuda-1.lock")).unwrap();
    assert!(GpuLock::acquire_in(&[dir.path()], 1).is_err());
    assert_eq!(std::fs::read_to_string(victim).unwrap(), "whole");
}

pub fn a_lock_file_of_another_user_is_locked_without_being_written() {
    if !rustix::process::geteuid().is_root() {
        // Only root can start a program as another user.
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let file = dir.path().join("pagedd-cuda-0.lock");
    drop(GpuLock::acquire_in(&[dir.path()], 0).unwrap());
    // The build's own folder may be closed to others.
    let program_file = dir.path().join("program");
    std::fs::copy(me(), &program_file).unwrap();
    let mut other = program(program_file, &["role", "lock-gpu", dir.path().to_str().unwrap(), "0"]);
    other.identity = Some(Identity { uid: 61_234, gid: 61_235 });
    let (child, _open) = hold(other);
    assert!(matches!(GpuLock::acquire_in(&[dir.path()], 0), Err(LockError::Held { .. })));
    assert_eq!(std::fs::read_to_string(file).unwrap(), format!("{}\n", std::process::id()));
    child.kill().unwrap();
    child.wait(LONG).unwrap().unwrap();
}
