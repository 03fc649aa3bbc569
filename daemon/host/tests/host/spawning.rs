use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::thread;
use std::time::Duration;

use nix::sys::signal::{SigSet, SigmaskHow, pthread_sigmask};
use nix::unistd::geteuid;
use pagedd_host::{Capabilities, Identity, Sandbox, SpawnError, Step, spawn};

use super::roles::{LONG, field, memory, output, pipe, program, role};

fn numbers(listing: &str) -> Vec<i32> {
    listing.lines().map(|line| line.split(' ').next().unwrap().parse().unwrap()).collect()
}

pub fn a_child_finds_exactly_the_fds_it_was_given() {
    let open_over_exec = rustix::io::dup(memory("leaks")).unwrap();
    assert!(open_over_exec.as_raw_fd() > 2);
    let mut what = role("fds", &[]);
    what.fds = vec![(memory("a").into(), 9), (memory("b").into(), 3)];
    let (listing, status) = output(what);
    assert!(status.success(), "{status}");
    assert_eq!(numbers(&listing), [0, 1, 2, 3, 9], "{listing}");
    assert!(listing.starts_with("0 /dev/null\n1 pipe:"), "{listing}");
}

pub fn fds_whose_numbers_are_swapped_arrive_swapped() {
    let (a, b) = (OwnedFd::from(memory("first")), OwnedFd::from(memory("second")));
    let (at, bt) = (a.as_raw_fd(), b.as_raw_fd());
    let mut what = program("/bin/sh", &["-c", &format!("cat /proc/self/fd/{at} /proc/self/fd/{bt}")]);
    what.env = vec![("PATH".into(), "/usr/bin:/bin".into())];
    what.fds = vec![(a, bt), (b, at)];
    let (text, _) = output(what);
    assert_eq!(text, "secondfirst");
}

pub fn children_started_at_once_by_many_threads_get_no_fd_of_one_another() {
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..4 {
                    let mut what = role("fds", &[]);
                    what.fds.push((memory("own").into(), 3));
                    let (listing, _) = output(what);
                    assert_eq!(numbers(&listing), [0, 1, 2, 3], "{listing}");
                }
            });
        }
    });
}

pub fn a_child_has_exactly_the_environment_it_was_given() {
    assert!(std::env::vars().count() > 0, "there is something to leak");
    assert_eq!(output(role("environment", &[])).0, "");
    let mut what = role("environment", &[]);
    what.env = vec![("A".into(), "1".into()), ("B".into(), "x=y z".into())];
    assert_eq!(output(what).0, "A=1\nB=x=y z\n");
}

pub fn a_child_starts_with_default_signals_in_a_session_of_its_own() {
    // The Rust runtime ignores SIGPIPE already.
    pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), None).unwrap();
    let own = fs::read_to_string("/proc/self/status").unwrap();
    assert_ne!(field(&own, "SigBlk"), "0000000000000000");
    assert_ne!(field(&own, "SigIgn"), "0000000000000000");

    let (status, _) = output(program("/bin/cat", &["/proc/self/status"]));
    assert_eq!(field(&status, "SigBlk"), "0000000000000000");
    assert_eq!(field(&status, "SigIgn"), "0000000000000000");
    let (stat, _) = output(program("/bin/cat", &["/proc/self/stat"]));
    let words: Vec<&str> = stat.split(' ').collect();
    // Process, state, parent, process group, session.
    assert_eq!((words[0], words[0]), (words[4], words[5]), "{stat}");

    let after = fs::read_to_string("/proc/self/status").unwrap();
    assert_eq!(field(&own, "SigBlk"), field(&after, "SigBlk"), "the parent's mask is as it was");
}

pub fn a_child_dumps_no_core_and_gains_no_privileges() {
    let mut what = program("/bin/cat", &["/proc/self/limits", "/proc/self/status"]);
    what.sandbox.no_new_privs = true;
    let (text, _) = output(what);
    let core = text.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    assert_eq!(core.split_whitespace().collect::<Vec<_>>()[4..6], ["0", "0"], "{core}");
    assert_eq!(field(&text, "NoNewPrivs"), "1");
}

pub fn a_program_that_cannot_run_is_named_and_leaves_no_process() {
    let dir = tempfile::tempdir().unwrap();
    let plain = dir.path().join("plain");
    fs::write(&plain, "text").unwrap();
    for (path, errno) in [
        ("/nonexistent/pagedd-worker", libc::ENOENT),
        (plain.to_str().unwrap(), libc::EACCES),
        ("/", libc::EACCES),
    ] {
        let error = spawn(program(path, &[])).unwrap_err();
        let SpawnError::Exec { source, .. } = &error else { panic!("{error}") };
        assert_eq!(source.raw_os_error(), Some(errno), "{error}");
        assert!(error.to_string().starts_with(&format!("cannot run {path}: ")), "{error}");
    }
    assert_eq!(nix::sys::wait::wait(), Err(nix::errno::Errno::ECHILD), "nothing is left to reap");
}

pub fn mistakes_of_the_caller_are_named() {
    let mut twice = program("/bin/true", &[]);
    twice.fds = vec![(memory("a").into(), 5), (memory("b").into(), 5)];
    assert!(matches!(spawn(twice), Err(SpawnError::FdNumber { number: 5, .. })));
    let mut negative = program("/bin/true", &[]);
    negative.fds = vec![(memory("a").into(), -1)];
    assert!(matches!(spawn(negative), Err(SpawnError::FdNumber { number: -1, .. })));
    assert!(matches!(
        spawn(program("/bin/true", &["a\0b"])),
        Err(SpawnError::Nul { what: "an argument", .. })
    ));
    assert!(matches!(spawn(program("/bin\0", &[])), Err(SpawnError::Nul { what: "its path", .. })));
}

pub fn a_child_that_lives_is_waited_for_in_vain_and_then_killed() {
    let (_reader, writer) = pipe();
    let (stdin, _open) = pipe();
    let mut what = program("/bin/cat", &[]);
    what.fds = vec![(stdin.into(), 0), (writer, 1)];
    let child = spawn(what).unwrap();
    assert!(!child.has_exited());
    assert_eq!(child.wait(Duration::from_millis(1)).unwrap(), None);
    child.kill().unwrap();
    let status = child.wait(LONG).unwrap().unwrap();
    assert_eq!(status.signal(), Some(libc::SIGKILL));
    assert!(child.has_exited());
    child.kill().unwrap();
    child.terminate().unwrap();
}

pub fn an_exit_code_is_kept_after_the_child_is_reaped() {
    let child = spawn(program("/bin/sh", &["-c", "exit 7"])).unwrap();
    for _ in 0..2 {
        assert_eq!(child.wait(Duration::MAX).unwrap().unwrap().code(), Some(7));
    }
    assert_eq!(nix::sys::wait::wait(), Err(nix::errno::Errno::ECHILD));
}

pub fn a_child_has_the_user_it_was_given_and_no_capabilities() {
    let mut what = program("/bin/cat", &["/proc/self/status"]);
    what.identity = Some(Identity { uid: 61_234, gid: 61_235 });
    if !geteuid().is_root() {
        let error = spawn(what).unwrap_err();
        assert!(matches!(error, SpawnError::Step { step: Step::Identity, .. }), "{error}");
        return;
    }
    let (status, _) = output(what);
    assert_eq!(field(&status, "Uid"), "61234\t61234\t61234\t61234");
    assert_eq!(field(&status, "Gid"), "61235\t61235\t61235\t61235");
    assert_eq!(field(&status, "Groups"), "");
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert_eq!(field(&status, set), "0000000000000000", "{set}");
    }
}

pub fn a_child_joins_its_cgroup_or_does_not_start() {
    // A directory that only looks like one shows what is written to it.
    let dir = tempfile::tempdir().unwrap();
    let open = || Some(fs::File::open(dir.path()).unwrap().into());
    let mut what = program("/bin/true", &[]);
    what.cgroup = open();
    let error = spawn(what).unwrap_err();
    assert!(matches!(error, SpawnError::Step { step: Step::Cgroup, .. }), "{error}");

    fs::write(dir.path().join("cgroup.procs"), "").unwrap();
    let mut what = program("/bin/true", &[]);
    what.cgroup = open();
    assert!(spawn(what).unwrap().wait(LONG).unwrap().unwrap().success());
    assert_eq!(fs::read_to_string(dir.path().join("cgroup.procs")).unwrap(), "0");
}

pub fn a_child_has_no_capability_or_those_to_change_its_user_and_keeps_them_over_exec() {
    let of = |capabilities| {
        let mut cat = program("/bin/cat", &["/proc/self/status"]);
        cat.sandbox = Sandbox { no_new_privs: true, capabilities };
        let (status, ended) = output(cat);
        assert!(ended.success(), "{ended}");
        ["CapPrm", "CapEff", "CapAmb"].map(|name| u64::from_str_radix(field(&status, name), 16).unwrap())
    };
    assert_eq!(of(Capabilities::None), [0; 3]);
    let had =
        u64::from_str_radix(field(&fs::read_to_string("/proc/self/status").unwrap(), "CapPrm"), 16).unwrap();
    // CAP_SETGID and CAP_SETUID, where this process has them.
    let users = had & 0b1100_0000;
    let [permitted, effective, _] = of(Capabilities::Users);
    assert_eq!((permitted, effective), (users, users));
}
