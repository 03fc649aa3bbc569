//! A small service manager for one daemon, where there is no systemd: it holds the daemon's fds over restarts.
//!
//! **Owns** the daemon process and its stored fds, and speaks systemd's side of `NOTIFY_SOCKET` and `LISTEN_FDS`. **Never**
//! starts a thread, opens a file of the daemon's, or reads anything but what its own child sends.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use nix::sys::signal::{SigHandler, SigSet, Signal as NixSignal, signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Resource, Rlimit, Signal, WaitOptions, getrlimit, setrlimit};
use tracing::{debug, error, info, warn};

use crate::confine::Sandbox;
use crate::exit;
use crate::fdstore::{FIRST_FD, LISTEN_FDNAMES, LISTEN_FDS, LISTEN_PID};
use crate::inherited;
use crate::memory::NO_THREAD_CACHES;
use crate::notify::{NOTIFY_SOCKET, WATCHDOG_PID, WATCHDOG_USEC};
use crate::process::{Child, Spawn, SpawnError, spawn_with_pid_in};

mod inbox;
#[cfg(test)]
mod tests;

use inbox::{Inbox, Told};

/// Names the fd on which the daemon sees the keeper's end.
const KEEPER_FD: &str = "PAGEDD_KEEPER_FD";
/// Fds kept at most.
const MAX_FDS: usize = 4096;
/// A keeper that wakes up so much later than it wanted has stood still itself, and the daemon with it.
const OVERSLEPT: Duration = Duration::from_secs(1);

/// What to keep running.
#[derive(Clone, Debug)]
pub struct Program {
    /// Absolute path.
    pub path: PathBuf,
    /// Without the program's own name.
    pub args: Vec<OsString>,
    /// Further ones, until a daemon was ready: for what is to be done once.
    pub first_args: Vec<OsString>,
}

/// How patient a keeper is.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// A daemon that ran this long has earned an immediate restart.
    pub good_run: Duration,
    /// Wait before the second restart in a row; the first is immediate, and each later wait doubles.
    pub first_delay: Duration,
    /// Longest wait after a daemon that never was ready.
    pub longest_delay: Duration,
    /// Longest wait after one that was: what kills it again and again is not its start, and between its ends it serves.
    pub longest_after_ready: Duration,
    /// A daemon that was ready and then says nothing for this long hangs, and is killed.
    pub watchdog: Duration,
    /// How long a daemon may take to stop, unless it asks for more, before it is killed.
    pub stop: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            // Weights and ports are kept, so that a start costs little: what dies every few seconds still serves between.
            good_run: Duration::from_secs(2),
            first_delay: Duration::from_millis(100),
            longest_delay: Duration::from_secs(10),
            longest_after_ready: Duration::from_secs(1),
            watchdog: Duration::from_secs(30),
            stop: Duration::from_secs(90),
        }
    }
}

/// Runs a daemon until it ends for good, and returns its exit code.
///
/// It ends for good with 0; with a code of [`exit::FINAL`]; with any code before it was ever ready, since a start that failed
/// would fail again; and in whatever way after SIGTERM or SIGINT came, which are passed on, as is SIGHUP once the daemon is ready. Any
/// other end is followed by a restart with the fds that it had stored.
///
/// Call it in a process without other threads: it blocks those signals and reads them itself.
pub fn run(program: Program) -> ExitCode {
    run_with(program, Patience::default())
}

/// As [`run`], with other bounds.
pub fn run_with(program: Program, patience: Patience) -> ExitCode {
    let ended =
        Keeper::new(program, patience).map_err(KeeperError::from).and_then(|mut keeper| keeper.keep());
    ended
        .unwrap_or_else(|error| {
            error!(%error, "the keeper gives up");
            exit::OS
        })
        .into()
}

/// An fd that reaches EOF when the keeper is gone, upon which the daemon must exit: nobody would restart it, and a new keeper's
/// daemon would find its ports and its state directory taken. `None` without a keeper, and on a second call.
pub fn lifeline() -> Option<OwnedFd> {
    let ours = env::var(LISTEN_PID).ok()?.parse() == Ok(std::process::id());
    let number: RawFd = env::var(KEEPER_FD).ok()?.parse().ok()?;
    if ours { inherited(number).ok() } else { None }
}

#[derive(thiserror::Error, Debug)]
enum KeeperError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Spawn(#[from] SpawnError),
}

impl From<Errno> for KeeperError {
    fn from(errno: Errno) -> Self {
        Self::Io(errno.into())
    }
}

struct Keeper {
    program: Program,
    patience: Patience,
    backoff: Backoff,
    signals: SignalFd,
    inbox: Inbox,
    /// Oldest first.
    held: Vec<(String, OwnedFd)>,
    /// The daemon holds the other end.
    lifeline: Option<OwnedFd>,
    /// Some daemon of this keeper's was ready once.
    was_ready: bool,
    /// The last one started was.
    is_ready: bool,
    /// A hangup came before it was.
    hangup: bool,
    /// When the daemon is killed unless it says before that it lives.
    silent_by: Option<Instant>,
    /// Told to stop; the daemon is killed then.
    stop_by: Option<Instant>,
}

impl Keeper {
    fn new(program: Program, patience: Patience) -> io::Result<Self> {
        let mut mask = SigSet::empty();
        for signal in [NixSignal::SIGTERM, NixSignal::SIGINT, NixSignal::SIGHUP, NixSignal::SIGCHLD] {
            mask.add(signal);
        }
        mask.thread_block()?;
        default_sigchld()?;
        let signals = SignalFd::with_flags(&mask, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        // Room for the daemon's fds, here and in the daemon, which inherits the limit.
        let limit = getrlimit(Resource::Nofile);
        let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
        Ok(Self {
            program,
            patience,
            backoff: Backoff::new(patience),
            signals,
            inbox: Inbox::new()?,
            held: Vec::new(),
            lifeline: None,
            was_ready: false,
            is_ready: false,
            hangup: false,
            silent_by: None,
            stop_by: None,
        })
    }

    fn keep(&mut self) -> Result<u8, KeeperError> {
        loop {
            let started = Instant::now();
            (self.is_ready, self.hangup, self.silent_by) = (false, false, None);
            match self.start() {
                Ok(child) => {
                    info!(pid = child.pid(), fds = self.held.len(), "daemon started");
                    let status = self.watch(&child)?;
                    if let Some(code) = self.verdict(status) {
                        return Ok(code);
                    }
                    warn!(pid = child.pid(), %status, "daemon died");
                }
                Err(error) if self.was_ready => warn!(%error, "daemon could not be restarted"),
                Err(error) => return Err(error),
            }
            let delay = self.backoff.next(started.elapsed(), self.is_ready);
            if self.rest(delay)? {
                return Ok(0);
            }
        }
    }

    fn start(&mut self) -> Result<Child, KeeperError> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC)?;
        let mut fds = Vec::with_capacity(self.held.len() + 1);
        for ((_, fd), number) in self.held.iter().zip(FIRST_FD..) {
            fds.push((fd.try_clone()?, number));
        }
        let lifeline = FIRST_FD + self.held.len() as RawFd;
        fds.push((reader, lifeline));

        let names: Vec<&str> = self.held.iter().map(|(name, _)| name.as_str()).collect();
        let ours: [(&str, OsString); 5] = [
            (LISTEN_FDS, names.len().to_string().into()),
            (LISTEN_FDNAMES, names.join(":").into()),
            (NOTIFY_SOCKET, self.inbox.address().into()),
            (WATCHDOG_USEC, self.patience.watchdog.as_micros().to_string().into()),
            (KEEPER_FD, lifeline.to_string().into()),
        ];
        // Variables of a manager above this one are not the daemon's.
        let others = [LISTEN_PID, WATCHDOG_PID];
        let is_ours = |name: &OsStr| {
            others.iter().any(|other| name == *other) || ours.iter().any(|(own, _)| name == *own)
        };
        let mut variables: Vec<_> = env::vars_os().filter(|(name, _)| !is_ours(name)).collect();
        let (tunables, small) = NO_THREAD_CACHES;
        if env::var_os(tunables).is_none() {
            variables.push((tunables.into(), small.into()));
        }
        variables.extend(ours.into_iter().map(|(name, value)| (name.into(), value)));

        let mut args = self.program.args.clone();
        if !self.was_ready {
            args.extend(self.program.first_args.iter().cloned());
        }
        let spawn = Spawn {
            program: self.program.path.clone(),
            args,
            env: variables,
            fds,
            cgroup: None,
            identity: None,
            sandbox: Sandbox::default(),
        };
        let child = spawn_with_pid_in(spawn, LISTEN_PID)?;
        self.lifeline = Some(writer);
        Ok(child)
    }

    /// Serves the daemon until it has ended.
    fn watch(&mut self, child: &Child) -> Result<ExitStatus, KeeperError> {
        loop {
            let until = self.stop_by.or(self.silent_by);
            self.wait(Some(child), until)?;
            let overslept = until.is_some_and(|until| until.elapsed() > OVERSLEPT);
            let mut some_ended = false;
            while let Some(signal) = self.next_signal()? {
                match signal {
                    Signal::CHILD => some_ended = true,
                    // Before it is ready it may have no handler, and die of it.
                    Signal::HUP if self.is_ready => child.signal(signal)?,
                    Signal::HUP => self.hangup = true,
                    _ => {
                        info!("stopping");
                        self.stop_by.get_or_insert(Instant::now() + self.patience.stop);
                        child.signal(signal)?;
                    }
                }
            }
            // After the signals: one that comes from here on finds the daemon dead, and no stop to blame for it.
            if some_ended {
                reap_all(child);
            }
            // First the end, then the messages: what an ended daemon has sent is all there.
            let ended = child.wait(Duration::ZERO)?;
            while let Some(told) = self.inbox.receive(child.pid())? {
                for told in told {
                    self.hear(told);
                }
            }
            if let Some(status) = ended {
                return Ok(status);
            }
            if self.is_ready && std::mem::take(&mut self.hangup) {
                child.signal(Signal::HUP)?;
            }
            if self.stop_by.is_none() && self.silent_by.is_some_and(|by| by <= Instant::now()) {
                if overslept {
                    self.hear(Told::Alive);
                } else {
                    error!(pid = child.pid(), silence = ?self.patience.watchdog, "daemon hangs and is killed");
                    child.kill()?;
                    self.silent_by = None;
                }
            }
            if self.stop_by.is_some_and(|by| by <= Instant::now()) {
                warn!(pid = child.pid(), "daemon does not stop and is killed");
                child.kill()?;
                self.stop_by = Some(Instant::now() + self.patience.stop);
            }
        }
    }

    fn hear(&mut self, told: Told) {
        match told {
            Told::Ready => {
                (self.was_ready, self.is_ready) = (true, true);
                self.hear(Told::Alive);
            }
            Told::Alive => {
                if self.is_ready {
                    self.silent_by = Instant::now().checked_add(self.patience.watchdog);
                }
            }
            // The daemon's own log says it, too.
            Told::Status(line) => debug!(status = line, "daemon"),
            Told::ExtendTimeout(by) => {
                // Only ever later, and only where a stop is in progress.
                let by = Instant::now() + by;
                self.stop_by = self.stop_by.map(|stop_by| stop_by.max(by));
            }
            Told::Store { name, fds } => {
                for fd in fds {
                    if self.held.len() < MAX_FDS {
                        self.held.push((name.clone(), fd));
                    } else {
                        warn!(name, "{MAX_FDS} fds are stored; this one is not");
                    }
                }
            }
            Told::Remove { name } => self.held.retain(|(held, _)| *held != name),
        }
    }

    /// The keeper's own exit code, where the daemon has ended for good.
    fn verdict(&self, status: ExitStatus) -> Option<u8> {
        let stopping = self.stop_by.is_some();
        if let Some(code) = status.code() {
            let code = code as u8;
            let last = code == 0 || stopping || !self.was_ready || exit::FINAL.contains(&code);
            return last.then_some(code);
        }
        let signal = status.signal().unwrap_or(0);
        match signal {
            // It had no handler yet, or no longer.
            libc::SIGTERM | libc::SIGINT if stopping => Some(0),
            _ if stopping => Some(128 + signal as u8),
            _ => None,
        }
    }

    /// Waits before a restart; true where a signal says not to.
    fn rest(&self, delay: Duration) -> Result<bool, KeeperError> {
        let until = Instant::now() + delay;
        loop {
            while let Some(signal) = self.next_signal()? {
                if signal != Signal::CHILD && signal != Signal::HUP {
                    return Ok(true);
                }
            }
            if until <= Instant::now() {
                return Ok(false);
            }
            self.wait(None, Some(until))?;
        }
    }

    /// Blocks until there is something to look at, or until `until`. Without a child messages are nobody's, and left.
    fn wait(&self, child: Option<&Child>, until: Option<Instant>) -> Result<(), Errno> {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let mut fds = vec![PollFd::new(&self.signals, PollFlags::IN)];
        if let Some(child) = child {
            fds.push(PollFd::new(child, PollFlags::IN));
            fds.push(PollFd::new(&self.inbox, PollFlags::IN));
        }
        match poll(&mut fds, left.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno),
        }
    }

    fn next_signal(&self) -> io::Result<Option<Signal>> {
        let info = self.signals.read_signal()?;
        Ok(info.and_then(|info| Signal::from_named_raw(info.ssi_signo as i32)))
    }
}

/// A parent may have left SIGCHLD ignored, and the kernel then reaps children itself and loses their status.
#[allow(unsafe_code)]
fn default_sigchld() -> io::Result<()> {
    // SAFETY: SIG_DFL installs no code, and this process has installed no handler that anything would miss.
    unsafe { signal(NixSignal::SIGCHLD, SigHandler::SigDfl) }.map(drop).map_err(io::Error::from)
}

/// Reaps every child that has ended: as the first process of a container, the keeper inherits the daemon's orphans.
fn reap_all(daemon: &Child) {
    while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
        // The daemon's number cannot have come to mean another process: this is where it is given back.
        daemon.note(pid, status);
    }
}

/// When to start again.
struct Backoff {
    patience: Patience,
    delay: Duration,
}

impl Backoff {
    fn new(patience: Patience) -> Self {
        Self { patience, delay: Duration::ZERO }
    }

    /// How long to wait, after a run of `ran` in which the daemon was `ready` or not.
    fn next(&mut self, ran: Duration, ready: bool) -> Duration {
        let Patience { good_run, first_delay, longest_delay, longest_after_ready, .. } = self.patience;
        if ran >= good_run {
            self.delay = Duration::ZERO;
        }
        let delay = self.delay;
        self.delay = (delay * 2).max(first_delay).min(longest_delay);
        if ready { delay.min(longest_after_ready) } else { delay }
    }
}
