//! Forking a confined copy of a single-threaded process: how a template makes a gateway.
//!
//! **Owns** the way from a copy of everything to a process that holds only what it was given. **Never** forks a process that
//! has threads: the copy would find their locks held for ever.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use nix::unistd::ForkResult;
use rustix::fs::{Mode, OFlags};
use rustix::io::{DupFlags, Errno, retry_on_intr};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{WaitOptions, wait};

use crate::confine::{At, Failed, Identity, Sandbox, Step, hide, limit_threads, move_to_cgroup, shed};
use crate::jail::Jail;
use crate::process::{Child, exit_now, open_procs, outcome};

/// What the child becomes.
#[derive(Debug)]
pub struct Confinement<'a> {
    /// Name of the process in `ps` and `top`; the kernel keeps the first 15 bytes.
    pub name: &'a str,
    /// A cgroup v2 directory that the child is in before it does anything of its own.
    pub cgroup: Option<BorrowedFd<'a>>,
    /// `None` keeps user, groups and capabilities. Otherwise no capability is left.
    pub identity: Option<Identity>,
    /// What it may not do.
    pub sandbox: Sandbox,
    /// What locks it in last, for what it does after that.
    pub jail: Option<&'a Jail>,
}

/// Most threads of a process that has a user of its own: it needs four.
const THREADS: u64 = 64;

/// Which of the two processes this is.
#[derive(Debug)]
pub enum Forked {
    /// The one that called.
    Parent(Child),
    /// The copy, confined.
    Child,
}

/// Why there is no child. The calling process is as before.
#[derive(thiserror::Error, Debug)]
pub enum ForkError {
    /// The caller's mistake.
    #[error("cannot fork a process of {threads} threads")]
    Threads {
        /// How many.
        threads: usize,
    },
    /// The caller's mistake.
    #[error("process name {name:?} contains a NUL byte")]
    Name {
        /// As given.
        name: String,
    },
    /// The host refused a step.
    #[error("cannot fork {name}: {step}: {source}")]
    Step {
        /// Name of the child.
        name: String,
        /// Which.
        step: Step,
        /// From the kernel.
        source: io::Error,
    },
}

/// Forks. Returns in the parent once the child is confined, and in the child.
///
/// The child keeps stdin, stdout, stderr and `keep`, at their numbers. Every other fd that was open becomes /dev/null in it, so
/// that values of the parent's that still name it can be used and dropped without reaching anything, or anyone else's fd.
/// Signal dispositions, signal mask and environment stay as they are. So do the hash seeds of std's collections on this thread,
/// which all copies share: a child that hashes what a tenant sends does so on threads started after the fork, whose seeds are
/// their own.
///
/// Where there is a jail, the child is in it when this returns; the jail's steps allocate a little, which a process of one thread may.
/// The child is confined before it comes into its cgroup, and waits until it is there: what a limit of that cgroup holds up is never waited for
/// here.
///
/// # Errors
/// There is no child.
pub fn fork_confined(confinement: &Confinement<'_>, keep: &[BorrowedFd<'_>]) -> Result<Forked, ForkError> {
    let name = confinement.name;
    let step = |failed: Failed| ForkError::Step {
        name: name.to_owned(),
        step: failed.step,
        source: failed.into_io(),
    };
    let title = CString::new(name).map_err(|_| ForkError::Name { name: name.to_owned() })?;
    let threads = fs::read_dir("/proc/self/task")
        .map_err(|source| ForkError::Step { name: name.to_owned(), step: Step::Fork, source })?
        .count();
    if threads != 1 {
        return Err(ForkError::Threads { threads });
    }
    let procs = confinement.cgroup.map(open_procs).transpose().at(Step::Cgroup).map_err(step)?;
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).at(Step::Pipe).map_err(step)?;
    let (gate, opener) = pipe_with(PipeFlags::CLOEXEC).at(Step::Pipe).map_err(step)?;

    match fork_alone() {
        Err(errno) => Err(step(Failed { step: Step::Fork, errno: errno as i32 })),
        Ok(ForkResult::Parent { child }) => {
            drop((writer, gate));
            let child = outcome(child, &reader).map_err(step)?;
            if let Some(procs) = procs
                && let Err(failed) = move_to_cgroup(&procs, child.pid())
            {
                // It waits at the gate, which does not open.
                drop(opener);
                let _ = child.wait(Duration::MAX);
                return Err(step(failed));
            }
            // One that was killed meanwhile is its owner's to find.
            let _ = rustix::io::write(&opener, &[1]);
            Ok(Forked::Parent(child))
        }
        Ok(ForkResult::Child) => {
            drop((reader, opener));
            let kept = [writer.as_raw_fd(), gate.as_raw_fd()];
            if let Err(failed) = confine(confinement, &title, &kept, keep) {
                let _ = rustix::io::write(&writer, &failed.encode());
                exit_now(127);
            }
            drop(writer);
            if !matches!(retry_on_intr(|| rustix::io::read(&gate, &mut [0; 1])), Ok(1)) {
                exit_now(127);
            }
            Ok(Forked::Child)
        }
    }
}

#[allow(unsafe_code)]
fn fork_alone() -> nix::Result<ForkResult> {
    // SAFETY: the process has one thread (counted by the only caller, and only this thread could start another), so the child
    // finds no lock held by a thread that it lacks, and may go on as any program.
    unsafe { nix::unistd::fork() }
}

fn confine(
    confinement: &Confinement<'_>,
    title: &CString,
    pipes: &[RawFd],
    keep: &[BorrowedFd<'_>],
) -> Result<(), Failed> {
    let mut kept: Vec<RawFd> = keep.iter().map(AsRawFd::as_raw_fd).collect();
    kept.extend([0, 1, 2]);
    kept.extend(pipes);
    blank_other_fds(&kept)?;
    rustix::thread::set_name(title).at(Step::Name)?;
    if confinement.identity.is_some() {
        limit_threads(THREADS)?;
    }
    shed(confinement.identity, confinement.sandbox)?;
    if confinement.identity.is_some() {
        // The change of user did it already, unless the host was told otherwise.
        hide()?;
    }
    if let Some(jail) = confinement.jail {
        jail.enter()?;
    }
    Ok(())
}

/// Lets every open fd outside `kept` name /dev/null.
fn blank_other_fds(kept: &[RawFd]) -> Result<(), Failed> {
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).at(Step::Fds)?;
    let unlisted = |e: io::Error| Failed { step: Step::Fds, errno: e.raw_os_error().unwrap_or(libc::EIO) };
    let mut numbers = Vec::new();
    for entry in fs::read_dir("/proc/self/fd").map_err(unlisted)? {
        let name = entry.map_err(unlisted)?.file_name();
        numbers.extend(name.to_str().and_then(|name| name.parse::<RawFd>().ok()));
    }
    for number in numbers {
        // The directory's own fd was in the listing and is closed by now.
        if number != null.as_raw_fd() && !kept.contains(&number) && is_open(number) {
            blank(&null, number)?;
        }
    }
    Ok(())
}

#[allow(unsafe_code)]
fn is_open(number: RawFd) -> bool {
    // SAFETY: F_GETFD touches no memory, and on a number that is not open it only fails.
    unsafe { libc::fcntl(number, libc::F_GETFD) >= 0 }
}

#[allow(unsafe_code)]
fn blank(null: &OwnedFd, number: RawFd) -> Result<(), Failed> {
    // SAFETY: the number is open and stays open, so its owner in this process, whoever that is, goes on owning an open fd; it
    // is never dropped through this value.
    let slot = unsafe { OwnedFd::from_raw_fd(number) };
    let mut slot = std::mem::ManuallyDrop::new(slot);
    rustix::io::dup3(null.as_fd(), &mut slot, DupFlags::CLOEXEC).at(Step::Fds)
}

/// Reaps the children of this process that have ended, and returns how many they were.
///
/// For a template process, whose children are watched by the daemon through their pidfds. [`Child::wait`] finds no status after it.
pub fn reap() -> usize {
    let mut reaped = 0;
    loop {
        match wait(WaitOptions::NOHANG) {
            Ok(Some(_)) => reaped += 1,
            Err(Errno::INTR) => {}
            Ok(None) | Err(_) => return reaped,
        }
    }
}
