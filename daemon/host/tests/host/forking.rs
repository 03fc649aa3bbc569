use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::process::ExitStatusExt;
use std::thread;

use nix::unistd::geteuid;
use pagedd_host::{Child, Confinement, ForkError, Forked, Identity, Sandbox, Step, fork_confined, reap};

use super::roles::{LONG, field, memory, open_fds, pipe};

fn plain(name: &str) -> Confinement<'_> {
    Confinement { name, cgroup: None, identity: None, sandbox: Sandbox::default(), jail: None }
}

/// Forks a child that writes what `say` returns, and returns it to the parent.
fn fork_and_hear(
    confinement: &Confinement<'_>,
    keep: &[BorrowedFd<'_>],
    say: impl FnOnce() -> String,
) -> String {
    let (mut reader, writer) = pipe();
    let writer = File::from(writer);
    match fork_confined(confinement, &[keep, &[writer.as_fd()]].concat()).unwrap() {
        Forked::Child => {
            (&writer).write_all(say().as_bytes()).unwrap();
            std::process::exit(0);
        }
        Forked::Parent(child) => {
            drop(writer);
            let mut text = String::new();
            reader.read_to_string(&mut text).unwrap();
            assert!(child.wait(LONG).unwrap().unwrap().success());
            text
        }
    }
}

pub fn a_fork_keeps_what_it_is_told_to_and_nothing_else() {
    let (kept, secret) = (memory("kept"), memory("secret"));
    let (kept_number, secret_number) = (kept.as_raw_fd(), secret.as_raw_fd());
    let text = fork_and_hear(&plain("x"), &[kept.as_fd()], move || {
        // Dropping the parent's value closes the stand-in, not somebody else's fd.
        let open = open_fds();
        drop(secret);
        let lines: Vec<String> = open.iter().map(|(number, target)| format!("{number} {target}")).collect();
        lines.join("\n")
    });
    for line in text.lines() {
        let (number, target) = line.split_once(' ').unwrap();
        match number.parse::<i32>().unwrap() {
            0..=2 => {}
            number if number == kept_number => assert!(target.contains("memfd:test"), "{line}"),
            _ => assert!(target == "/dev/null" || target.starts_with("pipe:"), "{text}"),
        }
    }
    let pipes =
        text.lines().filter(|line| !line.starts_with(['0', '1', '2']) && line.contains("pipe:")).count();
    assert!(pipes <= 1, "the end that the test gave it, at most:\n{text}");
    assert!(text.contains(&format!("{secret_number} /dev/null")), "{text}");
}

pub fn a_fork_has_its_name_its_user_and_no_way_back() {
    let root = geteuid().is_root();
    let confinement = Confinement {
        identity: root.then_some(Identity { uid: 61_234, gid: 61_235 }),
        sandbox: Sandbox { no_new_privs: true, ..Sandbox::default() },
        ..plain("pagedd-gw:a-tenant-with-a-long-name")
    };
    let status = fork_and_hear(&confinement, &[], || fs::read_to_string("/proc/self/status").unwrap());
    assert_eq!(field(&status, "Name"), "pagedd-gw:a-ten");
    assert_eq!(field(&status, "NoNewPrivs"), "1");
    if root {
        assert_eq!(field(&status, "Uid"), "61234\t61234\t61234\t61234");
        assert_eq!(field(&status, "Groups"), "");
        assert_eq!(field(&status, "CapPrm"), "0000000000000000");
        assert_eq!(field(&status, "CapEff"), "0000000000000000");
    }
}

pub fn a_fork_that_cannot_be_confined_does_not_exist() {
    let dir = tempfile::tempdir().unwrap();
    let open = File::open(dir.path()).unwrap();
    let confinement = Confinement { cgroup: Some(open.as_fd()), ..plain("gw") };
    let error = fork_confined(&confinement, &[]).unwrap_err();
    assert!(matches!(error, ForkError::Step { step: Step::Cgroup, .. }), "{error}");

    // The file takes no writes: now it is the child that fails.
    std::os::unix::fs::symlink("/dev/full", dir.path().join("cgroup.procs")).unwrap();
    let error = fork_confined(&confinement, &[]).unwrap_err();
    assert!(error.to_string().starts_with("cannot fork gw: join the cgroup: "), "{error}");
    assert!(matches!(fork_confined(&plain("a\0"), &[]), Err(ForkError::Name { .. })));
    assert_eq!(nix::sys::wait::wait(), Err(nix::errno::Errno::ECHILD), "nothing is left to reap");
}

pub fn a_process_with_threads_is_not_forked() {
    let (mut reader, writer) = pipe();
    let other = thread::spawn(move || reader.read(&mut [0]).unwrap());
    let error = fork_confined(&plain("x"), &[]).unwrap_err();
    assert!(matches!(error, ForkError::Threads { threads: 2 }), "{error}");
    drop(writer);
    other.join().unwrap();
}

pub fn ended_forks_are_reaped() {
    let fork = || -> Child {
        match fork_confined(&plain("x"), &[]).unwrap() {
            Forked::Child => std::process::exit(0),
            Forked::Parent(child) => child,
        }
    };
    let children = [fork(), fork()];
    for child in &children {
        let pidfd = pagedd_host::Pidfd::from(child.as_fd().try_clone_to_owned().unwrap());
        assert!(pidfd.wait_gone(LONG).unwrap());
    }
    assert_eq!(reap(), 2);
    assert_eq!(reap(), 0);
    assert!(children[0].wait(LONG).is_err(), "its status was given away");
    let kept = fork();
    assert_eq!(kept.wait(LONG).unwrap().unwrap().signal(), None);
}
