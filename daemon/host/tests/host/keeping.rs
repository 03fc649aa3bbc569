use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::ExitStatus;
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pagedd_host::{Child, exit, spawn};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tempfile::TempDir;

use super::roles::{LONG, role};

const NO_DELAY: &str = "1";
const AN_HOUR: &str = "3600000";

/// A keeper whose daemons are puppets.
struct Keeper {
    process: Child,
    listener: UnixListener,
    _dir: TempDir,
}

impl Keeper {
    fn start(first_delay_ms: &str, stop_ms: &str, env: &[(&str, &str)]) -> Self {
        Self::start_with([first_delay_ms, stop_ms, AN_HOUR], env)
    }

    /// With these milliseconds: to the second restart, to stop, and to be silent.
    fn start_with([first_delay_ms, stop_ms, watchdog_ms]: [&str; 3], env: &[(&str, &str)]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("strings");
        let listener = UnixListener::bind(&socket).unwrap();
        let mut what = role("keeper", &[socket.to_str().unwrap(), first_delay_ms, stop_ms, watchdog_ms]);
        what.env = env.iter().map(|(name, value)| (name.into(), value.into())).collect();
        // A killed keeper leaves its own directory behind.
        what.env.push(("TMPDIR".into(), dir.path().into()));
        Self { process: spawn(what).unwrap(), listener, _dir: dir }
    }

    fn patient() -> Self {
        Self::start(NO_DELAY, AN_HOUR, &[])
    }

    /// The next daemon, once it has started.
    fn puppet(&self) -> Puppet {
        let mut fds = [
            PollFd::from_borrowed_fd(self.listener.as_fd(), PollFlags::IN),
            PollFd::new(&self.process, PollFlags::IN),
        ];
        poll(&mut fds, Some(&Timespec::try_from(LONG).unwrap())).unwrap();
        assert!(!fds[0].revents().is_empty(), "keeper: {:?}", self.process.wait(Duration::ZERO));
        let (stream, _) = self.listener.accept().unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        stream.read_line(&mut line).unwrap();
        let (pid, fds) = line.trim().split_once(' ').unwrap_or((line.trim(), ""));
        Puppet { pid: Pid::from_raw(pid.parse().unwrap()), fds: fds.to_owned(), stream }
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.process.pid() as i32), signal).unwrap();
    }

    fn end(&self) -> ExitStatus {
        self.process.wait(LONG).unwrap().expect("the keeper ends")
    }

    /// Its exit code.
    fn code(&self) -> i32 {
        self.end().code().expect("an exit code")
    }
}

impl Drop for Keeper {
    /// Its daemon follows, by the lifeline.
    fn drop(&mut self) {
        let _ = self.process.kill();
    }
}

struct Puppet {
    pid: Pid,
    /// `NAME=TEXT …`
    fds: String,
    stream: BufReader<UnixStream>,
}

impl Puppet {
    fn say(&mut self, command: &str) {
        writeln!(self.stream.get_mut(), "{command}").unwrap();
    }

    fn ask(&mut self, command: &str) -> String {
        self.say(command);
        let mut line = String::new();
        self.stream.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    #[track_caller]
    fn order(&mut self, command: &str) {
        assert_eq!(self.ask(command), "ok", "{command}");
    }

    /// It is alive, since it holds the other end of the socket, so the number is its own.
    fn signal(&self, signal: Signal) {
        kill(self.pid, signal).unwrap();
    }

    /// Waits until it has closed its end.
    fn gone(mut self) {
        assert_eq!(self.stream.read_line(&mut String::new()).unwrap(), 0);
    }
}

pub fn a_stored_fd_comes_back_by_name_after_a_kill() {
    let keeper = Keeper::patient();
    let mut first = keeper.puppet();
    assert_eq!(first.fds, "");
    first.order("store weights seventeen");
    first.order("store kv four");
    first.signal(Signal::SIGKILL);
    // Nothing is stored again, and it still comes back.
    for _ in 0..2 {
        let next = keeper.puppet();
        assert_eq!(next.fds, "kv=four weights=seventeen");
        next.signal(Signal::SIGKILL);
    }
}

pub fn a_port_is_never_refused_while_the_daemon_is_dead() {
    let keeper = Keeper::patient();
    let mut first = keeper.puppet();
    let address = first.ask("listen");
    first.signal(Signal::SIGKILL);
    first.gone();
    let _client = TcpStream::connect(address).expect("the port stays open");
    keeper.puppet().order("accept");
}

pub fn a_name_holds_one_fd_until_it_is_removed() {
    let keeper = Keeper::patient();
    let mut puppet = keeper.puppet();
    puppet.order("store a old");
    puppet.order("store a new");
    puppet.order("store b gone");
    puppet.order("remove b");
    puppet.order("remove never-stored");
    puppet.signal(Signal::SIGKILL);

    let mut puppet = keeper.puppet();
    assert_eq!(puppet.fds, "a=new");
    // A name that an earlier daemon stored is replaced too.
    puppet.order("store a newest");
    puppet.signal(Signal::SIGKILL);
    assert_eq!(keeper.puppet().fds, "a=newest");
}

pub fn messages_of_other_processes_and_garbage_are_ignored() {
    let keeper = Keeper::patient();
    let mut puppet = keeper.puppet();
    puppet.order("store mine text");
    puppet.order("garbage");
    puppet.order("let-another-lie");
    puppet.order("status fine");
    puppet.signal(Signal::SIGKILL);
    let mut puppet = keeper.puppet();
    assert_eq!(puppet.fds, "mine=text");
    // Neither the liar's READY nor one in garbage counted: this would be repeated otherwise.
    puppet.say("exit 3");
    assert_eq!(keeper.code(), 3);
}

pub fn a_clean_exit_ends_the_keeper() {
    let keeper = Keeper::patient();
    let mut puppet = keeper.puppet();
    puppet.order("ready");
    puppet.say("exit 0");
    assert_eq!(keeper.code(), 0);
}

pub fn a_first_start_that_fails_is_not_repeated() {
    let keeper = Keeper::patient();
    keeper.puppet().say("exit 1");
    assert_eq!(keeper.code(), 1);
}

pub fn a_final_exit_code_is_passed_on_and_others_are_restarted() {
    for code in exit::FINAL {
        let keeper = Keeper::patient();
        let mut puppet = keeper.puppet();
        puppet.order("ready");
        puppet.say("exit 1");
        keeper.puppet().say(&format!("exit {code}"));
        assert_eq!(keeper.code(), i32::from(code));
    }
}

pub fn a_missing_program_is_not_tried_again() {
    let keeper = spawn(role("keeper-of", &["/nonexistent/pagedd"])).unwrap();
    let status = keeper.wait(LONG).unwrap().expect("it ends");
    assert_eq!(status.code(), Some(i32::from(exit::OS)));
}

pub fn a_signal_to_stop_is_passed_on() {
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        let keeper = Keeper::patient();
        let puppet = keeper.puppet();
        keeper.signal(signal);
        puppet.gone();
        assert_eq!(keeper.code(), 0, "the daemon had no handler for {signal}, and the keeper wanted it gone");
    }
}

pub fn a_hangup_is_passed_on() {
    let keeper = Keeper::patient();
    let mut puppet = keeper.puppet();
    puppet.order("ready");
    keeper.signal(Signal::SIGHUP);
    puppet.gone();
    // The puppet dies of it, which nobody asked for.
    keeper.puppet().order("ready");
}

pub fn a_hangup_before_the_daemon_is_ready_waits_until_it_is() {
    let keeper = Keeper::patient();
    let mut puppet = keeper.puppet();
    keeper.signal(Signal::SIGHUP);
    for word in ["one", "two"] {
        puppet.order(&format!("status {word}"));
    }
    // It may be gone before it has read the keeper's answer.
    puppet.ask("ready");
    puppet.gone();
    keeper.puppet().order("ready");
}

pub fn a_daemon_that_is_ready_and_falls_silent_is_killed_and_followed() {
    let keeper = Keeper::start_with([NO_DELAY, AN_HOUR, "300"], &[]);
    let mut puppet = keeper.puppet();
    assert_eq!(puppet.ask("environment WATCHDOG_USEC"), "300000");
    puppet.order("ready");
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(900) {
        puppet.order("alive");
    }
    let silent = Instant::now();
    puppet.gone();
    let (silence, mut next) = (silent.elapsed(), keeper.puppet());
    assert!((Duration::from_millis(200)..LONG).contains(&silence), "{silence:?}");
    next.order("ready");
    next.say("exit 0");
    assert_eq!(keeper.code(), 0);
}

pub fn a_daemon_may_be_silent_as_long_as_it_is_not_ready() {
    let keeper = Keeper::start_with([NO_DELAY, AN_HOUR, "1"], &[]);
    let mut puppet = keeper.puppet();
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(200) {
        puppet.order("status waits");
    }
    puppet.say("exit 7");
    assert_eq!(keeper.code(), 7);
}

pub fn a_store_of_a_thousand_fds_survives_restarts() {
    let keeper = Keeper::patient();
    let mut puppet = keeper.puppet();
    puppet.order("store-many 1000");
    for _ in 0..3 {
        puppet.signal(Signal::SIGKILL);
        puppet = keeper.puppet();
        let names: BTreeSet<&str> = puppet.fds.split(' ').collect();
        assert_eq!(names.len(), 1000, "{}", puppet.fds);
        assert!((0..1000).all(|i| names.contains(format!("port-{i}=many").as_str())), "{}", puppet.fds);
    }
}

pub fn a_daemon_that_does_not_stop_is_killed() {
    let keeper = Keeper::start(NO_DELAY, "1", &[]);
    let mut puppet = keeper.puppet();
    puppet.order("block SIGTERM");
    keeper.signal(Signal::SIGTERM);
    puppet.gone();
    assert_eq!(keeper.code(), 128 + libc::SIGKILL);
}

pub fn a_keeper_that_waits_to_restart_can_be_stopped() {
    let keeper = Keeper::start(AN_HOUR, AN_HOUR, &[]);
    keeper.puppet().signal(Signal::SIGKILL);
    // The first restart is immediate, the second is an hour off.
    let puppet = keeper.puppet();
    puppet.signal(Signal::SIGKILL);
    let pid = puppet.pid;
    puppet.gone();
    while kill(pid, None) != Err(Errno::ESRCH) {
        thread::yield_now();
    }
    keeper.signal(Signal::SIGTERM);
    assert_eq!(keeper.code(), 0);
}

pub fn a_daemon_sees_the_end_of_its_keeper() {
    let keeper = Keeper::patient();
    let mut puppet = keeper.puppet();
    puppet.order("ready");
    keeper.signal(Signal::SIGKILL);
    puppet.gone();
}

pub fn the_environment_passes_except_what_was_meant_for_the_keeper() {
    let env = [
        ("PAGEDD_TEST", "passes"),
        ("WATCHDOG_USEC", "5"),
        ("WATCHDOG_PID", "1"),
        ("LISTEN_FDS", "9"),
        ("LISTEN_PID", "1"),
        ("LISTEN_FDNAMES", "x"),
    ];
    let keeper = Keeper::start(NO_DELAY, AN_HOUR, &env);
    let mut puppet = keeper.puppet();
    assert_eq!(puppet.ask("environment PAGEDD_TEST"), "passes");
    assert_eq!(puppet.ask("environment WATCHDOG_USEC"), "3600000000", "the keeper's own");
    assert_eq!(puppet.ask("environment WATCHDOG_PID"), "-");
    assert_eq!(puppet.ask("environment LISTEN_FDS"), "0");
    assert_eq!(puppet.ask("environment LISTEN_PID"), puppet.pid.to_string());
}
