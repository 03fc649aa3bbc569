//! Starting a program, and knowing of its end.
//!
//! **Owns** what crosses `exec`: exactly the fds, the environment and the rights that the caller names. **Never** leaves a
//! child half set up: an error of any step comes back to the caller, and the process is gone.

use std::convert::Infallible;
use std::ffi::{CString, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::ptr;
use std::sync::OnceLock;
use std::time::Duration;

use nix::sys::signal::{SigSet, SigmaskHow};
use nix::unistd::ForkResult;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Resource, Signal, WaitId, WaitIdOptions, WaitStatus, waitid};

use crate::confine::{At, FAILED_BYTES, Failed, Identity, Sandbox, Step, join_cgroup, shed};
use crate::pidfd::Pidfd;

/// A program to start. Nothing crosses that is not named here, except stdout and stderr.
///
/// The child finds /dev/null as stdin and this process's stdout and stderr, where `fds` does not place others there. It
/// leads a session of its own, so that a terminal's Ctrl-C reaches the keeper alone, and dumps no core.
#[derive(Debug)]
pub struct Spawn {
    /// Absolute path; there is no search.
    pub program: PathBuf,
    /// Without the program's own name.
    pub args: Vec<OsString>,
    /// The whole environment.
    pub env: Vec<(OsString, OsString)>,
    /// Each with its number in the child.
    pub fds: Vec<(OwnedFd, RawFd)>,
    /// A cgroup v2 directory, opened for reading or as `O_PATH`, that the child joins before it runs.
    pub cgroup: Option<OwnedFd>,
    /// `None` keeps this process's user, groups and capabilities. Otherwise no capability is left.
    pub identity: Option<Identity>,
    /// What it may not do.
    pub sandbox: Sandbox,
}

/// Why a program was not started. No process is left behind.
#[derive(thiserror::Error, Debug)]
pub enum SpawnError {
    /// The caller's mistake.
    #[error("cannot start {}: {what} contains a NUL byte", program.display())]
    Nul {
        /// Path of the program.
        program: PathBuf,
        /// What contains it.
        what: &'static str,
    },
    /// The caller's mistake.
    #[error("cannot start {}: fd number {number} is negative or named twice", program.display())]
    FdNumber {
        /// Path of the program.
        program: PathBuf,
        /// The number in the child.
        number: RawFd,
    },
    /// The file is missing, or not a program.
    #[error("cannot run {}: {source}", program.display())]
    Exec {
        /// Path of the program.
        program: PathBuf,
        /// From the kernel.
        source: io::Error,
    },
    /// The host refused a step before.
    #[error("cannot start {}: {step}: {source}", program.display())]
    Step {
        /// Path of the program.
        program: PathBuf,
        /// Which.
        step: Step,
        /// From the kernel.
        source: io::Error,
    },
}

/// A child of this process.
///
/// Having one tells you that nobody else reaps it. Dropping it neither kills nor reaps: children end on EOF of their socket.
#[derive(Debug)]
pub struct Child {
    pid: Pid,
    pidfd: Pidfd,
    status: OnceLock<ExitStatus>,
}

impl Child {
    pub(crate) fn new(pid: Pid) -> io::Result<Self> {
        Ok(Self { pid, pidfd: Pidfd::of_child(pid)?, status: OnceLock::new() })
    }

    /// For logs and status; compare pidfds instead.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Waits up to `timeout` for the end; `None` where the child lives on. The child is reaped, and its status kept for
    /// later calls.
    pub fn wait(&self, timeout: Duration) -> io::Result<Option<ExitStatus>> {
        if let Some(status) = self.status.get() {
            return Ok(Some(*status));
        }
        if !self.pidfd.wait_gone(timeout)? {
            return Ok(None);
        }
        loop {
            match waitid(WaitId::PidFd(self.pidfd.as_fd()), WaitIdOptions::EXITED | WaitIdOptions::NOHANG) {
                Ok(Some(status)) => {
                    // As wait(2) packs it: the code in the second byte, or the signal in the first.
                    let raw = match (status.exit_status(), status.terminating_signal()) {
                        (Some(code), _) => (code & 0xff) << 8,
                        (None, signal) => signal.unwrap_or(0) | if status.dumped() { 0x80 } else { 0 },
                    };
                    return Ok(Some(*self.status.get_or_init(|| ExitStatus::from_raw(raw))));
                }
                Ok(None) => return Ok(None),
                Err(Errno::INTR) => {}
                // Another thread was in here at the same time.
                Err(Errno::CHILD) if self.status.get().is_some() => return Ok(self.status.get().copied()),
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Whether it has ended, reaped or not.
    pub fn has_exited(&self) -> bool {
        self.status.get().is_some() || self.pidfd.has_exited()
    }

    /// SIGKILL. That it is already gone is no error.
    pub fn kill(&self) -> io::Result<()> {
        self.pidfd.kill()
    }

    /// SIGTERM. That it is already gone is no error.
    pub fn terminate(&self) -> io::Result<()> {
        self.pidfd.terminate()
    }

    /// Keeps the status of a process that was reaped in passing, if it is this one.
    pub(crate) fn note(&self, pid: Pid, status: WaitStatus) {
        if pid == self.pid {
            self.status.get_or_init(|| ExitStatus::from_raw(status.as_raw()));
        }
    }

    pub(crate) fn signal(&self, signal: Signal) -> io::Result<()> {
        self.pidfd.signal(signal)
    }
}

impl AsFd for Child {
    /// The pidfd: readable once the child has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

/// Starts a program. Any thread may call it.
///
/// # Errors
/// Nothing was started.
pub fn spawn(spawn: Spawn) -> Result<Child, SpawnError> {
    start(spawn, None)
}

/// As [`spawn`], with one more environment variable that holds the child's own process id.
pub(crate) fn spawn_with_pid_in(spawn: Spawn, variable: &str) -> Result<Child, SpawnError> {
    start(spawn, Some(variable))
}

fn start(spawn: Spawn, pid_variable: Option<&str>) -> Result<Child, SpawnError> {
    let program = spawn.program.clone();
    let mut prepared = Prepared::new(spawn, pid_variable)?;
    fork_into(&mut prepared).map_err(|failed| {
        let source = failed.into_io();
        match failed.step {
            Step::Exec => SpawnError::Exec { program, source },
            step => SpawnError::Step { program, step, source },
        }
    })
}

/// Room for the decimal digits of a process id and the terminating NUL.
const PID_ROOM: usize = 11;

/// All that the child needs, allocated before the fork: after it, the allocator's locks may be held by threads that the
/// child does not have.
struct Prepared {
    program: CString,
    args: Vec<CString>,
    env: Vec<CString>,
    /// `NAME=` and [`PID_ROOM`] zero bytes, to be filled in by the child.
    pid_env: Option<(Vec<u8>, usize)>,
    /// Filled in by the child; their capacity is there.
    argv: Vec<*const libc::c_char>,
    envp: Vec<*const libc::c_char>,
    /// In the order of their numbers in the child.
    fds: Vec<(OwnedFd, RawFd)>,
    /// The same fds, moved above all numbers of the child.
    moved: Vec<OwnedFd>,
    null: OwnedFd,
    procs: Option<OwnedFd>,
    identity: Option<Identity>,
    sandbox: Sandbox,
}

impl Prepared {
    fn new(spawn: Spawn, pid_variable: Option<&str>) -> Result<Self, SpawnError> {
        let path = spawn.program;
        let nul = |what| SpawnError::Nul { program: path.clone(), what };
        let step = |step| {
            let program = path.clone();
            move |e: Errno| SpawnError::Step { program, step, source: e.into() }
        };

        let program = CString::new(path.as_os_str().as_bytes()).map_err(|_| nul("its path"))?;
        let mut args = vec![program.clone()];
        for arg in spawn.args {
            args.push(CString::new(arg.into_vec()).map_err(|_| nul("an argument"))?);
        }
        let mut env = Vec::with_capacity(spawn.env.len());
        for (name, value) in spawn.env {
            let mut entry = name.into_vec();
            entry.push(b'=');
            entry.extend_from_slice(value.as_bytes());
            env.push(CString::new(entry).map_err(|_| nul("an environment variable"))?);
        }
        let pid_env = pid_variable.map(|name| {
            let mut entry = format!("{name}=").into_bytes();
            let digits = entry.len();
            entry.resize(digits + PID_ROOM, 0);
            (entry, digits)
        });

        let mut fds = spawn.fds;
        fds.sort_by_key(|(_, number)| *number);
        for (index, (_, number)) in fds.iter().enumerate() {
            if *number < 0 || index > 0 && fds[index - 1].1 == *number {
                return Err(SpawnError::FdNumber { program: path, number: *number });
            }
        }
        let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(step(Step::Fds))?;
        let procs = spawn.cgroup.map(open_procs).transpose().map_err(step(Step::Cgroup))?;
        Ok(Self {
            argv: Vec::with_capacity(args.len() + 1),
            envp: Vec::with_capacity(env.len() + 2),
            moved: Vec::with_capacity(fds.len()),
            program,
            args,
            env,
            pid_env,
            fds,
            null,
            procs,
            identity: spawn.identity,
            sandbox: spawn.sandbox,
        })
    }
}

/// Opens the file through which a process joins the cgroup `dir`.
pub(crate) fn open_procs(dir: impl AsFd) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat(dir, "cgroup.procs", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())
}

fn fork_into(prepared: &mut Prepared) -> Result<Child, Failed> {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).at(Step::Pipe)?;
    // No handler of this process may run in the child, whose memory it would find in any state.
    let mut before = SigSet::empty();
    set_mask(&SigSet::all(), Some(&mut before));
    let forked = fork();
    if let Ok(ForkResult::Child) = forked {
        exec_or_report(prepared, &writer);
    }
    set_mask(&before, None);
    let Ok(ForkResult::Parent { child }) = forked else {
        return Err(Failed { step: Step::Fork, errno: forked.err().map_or(0, |e| e as i32) });
    };
    drop(writer);
    outcome(child, &reader)
}

/// The child's word on its set-up: a process that runs, or the step that failed.
pub(crate) fn outcome(child: nix::unistd::Pid, reader: &OwnedFd) -> Result<Child, Failed> {
    let pid = Pid::from_raw(child.as_raw()).ok_or(Failed { step: Step::Fork, errno: libc::EINVAL })?;
    let child = Child::new(pid)
        .map_err(|e| Failed { step: Step::Pidfd, errno: e.raw_os_error().unwrap_or(libc::EIO) });
    let mut report = [0; FAILED_BYTES];
    let read = loop {
        match rustix::io::read(reader, &mut report) {
            Err(Errno::INTR) => {}
            other => break other,
        }
    };
    match (child, read) {
        (Ok(child), Ok(0)) => Ok(child),
        (child, read) => {
            let failed = match (&child, read) {
                (Err(failed), _) => *failed,
                (_, Ok(FAILED_BYTES)) => {
                    Failed::decode(report).unwrap_or(Failed { step: Step::Fork, errno: libc::EIO })
                }
                (_, Ok(_)) => Failed { step: Step::Fork, errno: libc::EIO },
                (_, Err(errno)) => Failed::new(Step::Pipe, errno),
            };
            // It has reported and exits, or cannot be watched and must not live on unwatched.
            let _ = rustix::process::kill_process(pid, Signal::KILL);
            let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
            Err(failed)
        }
    }
}

pub(crate) fn set_mask(mask: &SigSet, before: Option<&mut SigSet>) {
    // Fails only for a wrong `how`.
    let _ = nix::sys::signal::pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(mask), before);
}

#[allow(unsafe_code)]
fn fork() -> nix::Result<ForkResult> {
    // SAFETY: the child of a process with other threads may only make async-signal-safe calls until `exec`. The only caller
    // enters `exec_or_report`, which makes system calls on memory prepared before, and does not return.
    unsafe { nix::unistd::fork() }
}

/// Ends the calling process at once: no destructor and no exit handler of the parent's runs in a child.
#[allow(unsafe_code)]
pub(crate) fn exit_now(code: i32) -> ! {
    // SAFETY: `_exit` has no precondition.
    unsafe { libc::_exit(code) }
}

fn exec_or_report(prepared: &mut Prepared, report: &OwnedFd) -> ! {
    let above = prepared.fds.last().map_or(2, |(_, number)| (*number).max(2)) + 1;
    // Out of the way of the numbers that are about to be taken.
    let report = rustix::io::fcntl_dupfd_cloexec(report, above);
    let Err(failed) = exec(prepared, above);
    if let Ok(report) = report {
        let _ = rustix::io::write(&report, &failed.encode());
    }
    exit_now(127)
}

fn exec(prepared: &mut Prepared, above: RawFd) -> Result<Infallible, Failed> {
    if let Some(procs) = &prepared.procs {
        join_cgroup(procs)?;
    }
    place_fds(prepared, above)?;
    rustix::process::setsid().at(Step::Session)?;
    shed(prepared.identity, prepared.sandbox)?;
    default_signals();
    Err(Failed { step: Step::Exec, errno: execute(prepared) })
}

fn place_fds(prepared: &mut Prepared, above: RawFd) -> Result<(), Failed> {
    for (fd, _) in &prepared.fds {
        prepared.moved.push(rustix::io::fcntl_dupfd_cloexec(fd, above).at(Step::Fds)?);
    }
    if prepared.fds.first().is_none_or(|(_, number)| *number != 0) {
        let null = rustix::io::fcntl_dupfd_cloexec(&prepared.null, above).at(Step::Fds)?;
        place(&null, 0)?;
    }
    for (fd, (_, number)) in prepared.moved.iter().zip(&prepared.fds) {
        place(fd, *number)?;
    }
    let mut next = 3;
    for (_, number) in prepared.fds.iter().filter(|(_, number)| *number >= 3) {
        close_on_exec(next, *number);
        next = *number + 1;
    }
    close_on_exec(next, RawFd::MAX);
    Ok(())
}

/// Makes `number` another name of `fd`, kept open over `exec`.
#[allow(unsafe_code)]
fn place(fd: &OwnedFd, number: RawFd) -> Result<(), Failed> {
    // SAFETY: what `number` stood for is closed under its owner; that owner is the parent's value in a process that does not
    // return from `exec_or_report`, so nothing uses it again.
    let slot = unsafe { OwnedFd::from_raw_fd(number) };
    let mut slot = std::mem::ManuallyDrop::new(slot);
    rustix::io::dup2(fd, &mut slot).at(Step::Fds)
}

/// Marks the fds of `[from, to)` to be closed by `exec`. All that this program opens is marked already; this is for what a
/// library may have opened without.
#[allow(unsafe_code)]
fn close_on_exec(from: RawFd, to: RawFd) {
    if from >= to {
        return;
    }
    let (first, last) = (from.unsigned_abs(), (to - 1).unsigned_abs());
    // SAFETY: with this flag the call closes nothing and touches no memory.
    let done = unsafe { libc::syscall(libc::SYS_close_range, first, last, libc::CLOSE_RANGE_CLOEXEC) };
    if done != 0 {
        // A kernel before 5.11. No fd lies above the limit, unless the limit was lowered under it.
        let limit = rustix::process::getrlimit(Resource::Nofile).current.unwrap_or(1 << 20).min(1 << 20);
        for number in from..to.min(limit as RawFd) {
            // SAFETY: F_SETFD on a number that is not open fails with EBADF and does nothing.
            unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) };
        }
    }
}

/// Every signal at its default and none blocked, as a fresh program expects.
#[allow(unsafe_code)]
fn default_signals() {
    // By the kernel's own call, since the C library hides the signals that it uses itself: zeros are SIG_DFL, no flags, an
    // empty mask.
    let default = [0u64; 4];
    for signal in 1..=64 {
        // SAFETY: the kernel reads at most these 32 bytes, and is given no place to write to. SIG_DFL installs no code. Signals
        // that cannot be changed fail and stay.
        unsafe {
            libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), ptr::null::<u64>(), 8usize)
        };
    }
    set_mask(&SigSet::empty(), None);
}

/// Returns only on failure, with the error number.
#[allow(unsafe_code)]
fn execute(prepared: &mut Prepared) -> i32 {
    let Prepared { program, args, env, pid_env, argv, envp, .. } = prepared;
    argv.extend(args.iter().map(|arg| arg.as_ptr()));
    argv.push(ptr::null());
    envp.extend(env.iter().map(|entry| entry.as_ptr()));
    if let Some((entry, digits)) = pid_env {
        write_decimal(rustix::process::getpid().as_raw_nonzero().get().unsigned_abs(), &mut entry[*digits..]);
        envp.push(entry.as_ptr().cast());
    }
    envp.push(ptr::null());
    // SAFETY: `program` and all entries of `argv` and `envp` are NUL-terminated strings that live in `prepared`, and both
    // arrays end with a null pointer.
    unsafe { libc::execve(program.as_ptr(), argv.as_ptr(), envp.as_ptr()) };
    nix::errno::Errno::last_raw()
}

/// Writes `value` in decimal at the start of `room`.
fn write_decimal(mut value: u32, room: &mut [u8]) {
    let mut length = value.checked_ilog10().unwrap_or(0) as usize + 1;
    while length > 0 {
        length -= 1;
        room[length] = b'0' + (value % 10) as u8;
        value /= 10;
    }
}
