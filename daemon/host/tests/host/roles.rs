//! What the children of the tests do, and how they are started.

use std::collections::BTreeMap;
use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus};
use std::time::Duration;

use nix::sys::signal::{SigSet, Signal};
use pagedd_host::fdstore::FdStore;
use pagedd_host::keeper::{self, Patience, Program};
use pagedd_host::lock::{GpuLock, StateLock};
use pagedd_host::{Sandbox, Spawn, notify, spawn};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::MemfdFlags;
use rustix::pipe::{PipeFlags, pipe_with};

/// Longer than anything here takes: a test that waits this long has failed.
pub const LONG: Duration = Duration::from_secs(30);

pub fn me() -> PathBuf {
    env::current_exe().unwrap()
}

/// A program with nothing but its arguments.
pub fn program(path: impl Into<PathBuf>, args: &[&str]) -> Spawn {
    Spawn {
        program: path.into(),
        args: args.iter().map(OsString::from).collect(),
        env: Vec::new(),
        fds: Vec::new(),
        cgroup: None,
        identity: None,
        sandbox: Sandbox::default(),
    }
}

/// This binary, playing a role.
pub fn role(role: &str, args: &[&str]) -> Spawn {
    program(me(), &[&["role", role], args].concat())
}

/// A pipe; the reading end first.
pub fn pipe() -> (File, OwnedFd) {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    (reader.into(), writer)
}

/// Runs a program to its end and returns what it wrote.
pub fn output(mut what: Spawn) -> (String, ExitStatus) {
    let (mut reader, writer) = pipe();
    what.fds.push((writer, 1));
    let child = spawn(what).unwrap();
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    (text, child.wait(LONG).unwrap().expect("ends"))
}

/// A memfd with a text in it.
pub fn memory(text: &str) -> File {
    let file = File::from(rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
    file.write_all_at(text.as_bytes(), 0).unwrap();
    file
}

/// The text of a memfd, or what else the fd is.
pub fn contents(fd: OwnedFd) -> String {
    let file = File::from(fd);
    let mut bytes = vec![0; 64];
    match file.read_at(&mut bytes, 0) {
        Ok(length) => String::from_utf8_lossy(&bytes[..length]).into_owned(),
        Err(_) => "no-file".to_owned(),
    }
}

/// The value of a line `name:  value` of a process's status.
pub fn field<'a>(status: &'a str, name: &str) -> &'a str {
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("no {name} in {status}")).trim()
}

/// Numbers of the fds that this process has open, with what they are.
pub fn open_fds() -> BTreeMap<i32, String> {
    let numbers: Vec<i32> = fs::read_dir("/proc/self/fd")
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap())
        .collect();
    numbers
        .into_iter()
        .filter_map(|number| {
            // The listing's own fd is closed by now.
            let target = fs::read_link(format!("/proc/self/fd/{number}")).ok()?;
            Some((number, target.to_str().unwrap().to_owned()))
        })
        .collect()
}

pub fn play(role: &str, args: &[&str]) -> ExitCode {
    match (role, args) {
        ("fds", []) => {
            for (number, target) in open_fds() {
                println!("{number} {target}");
            }
        }
        ("environment", []) => {
            for (name, value) in env::vars() {
                println!("{name}={value}");
            }
        }
        ("lock", [dir]) => {
            let _lock = StateLock::acquire(Path::new(dir)).unwrap();
            println!("held");
            // Until the other end is closed.
            let _ = io::stdin().read(&mut [0]);
        }
        ("lock-gpu", [dir, ordinal]) => {
            let _lock = GpuLock::acquire_in(&[Path::new(dir)], ordinal.parse().unwrap()).unwrap();
            println!("held");
            let _ = io::stdin().read(&mut [0]);
        }
        ("liar", []) => {
            let store = FdStore::from_env();
            assert!(store.keeps());
            store.store("lie", memory("lie").as_fd()).unwrap();
            notify::ready().unwrap();
        }
        ("keeper", [socket, first_delay_ms, stop_ms, watchdog_ms]) => {
            let ms = |text: &str| Duration::from_millis(text.parse().unwrap());
            let patience = Patience {
                good_run: Duration::from_hours(1),
                first_delay: ms(first_delay_ms),
                longest_delay: ms(first_delay_ms),
                longest_after_ready: ms(first_delay_ms),
                watchdog: ms(watchdog_ms),
                stop: ms(stop_ms),
            };
            let args = ["role", "puppet", socket].map(OsString::from).to_vec();
            return keeper::run_with(Program { path: me(), args, first_args: Vec::new() }, patience);
        }
        ("keeper-of", [path]) => {
            return keeper::run(Program { path: path.into(), args: Vec::new(), first_args: Vec::new() });
        }
        ("puppet", [socket]) => return puppet(socket),
        other => panic!("no role {other:?}"),
    }
    ExitCode::SUCCESS
}

/// A daemon whose strings the test pulls, over a socket.
///
/// It begins with `PID NAME=TEXT…`, the fds it was given. Then each line is a command, and each is answered with a line.
fn puppet(socket: &str) -> ExitCode {
    // systemd gives none.
    let lifeline = keeper::lifeline();
    assert!(keeper::lifeline().is_none(), "it is given out once");
    let store = FdStore::from_env();
    let mut stream = BufReader::new(UnixStream::connect(socket).unwrap());
    let mut given = String::new();
    let mut listener = None;
    for name in store.names() {
        let fd = store.take(&name).unwrap();
        if name == "port" {
            listener = Some(TcpListener::from(fd.try_clone().unwrap()));
        }
        given = format!("{given} {name}={}", contents(fd));
    }
    writeln!(stream.get_mut(), "{}{given}", std::process::id()).unwrap();
    loop {
        let mut fds = vec![PollFd::new(stream.get_ref(), PollFlags::IN)];
        fds.extend(lifeline.as_ref().map(|fd| PollFd::new(fd, PollFlags::IN)));
        poll(&mut fds, None).unwrap();
        if fds.get(1).is_some_and(|fd| !fd.revents().is_empty()) {
            return ExitCode::SUCCESS;
        }
        let mut line = String::new();
        if stream.read_line(&mut line).unwrap() == 0 {
            return ExitCode::SUCCESS;
        }
        let mut answer = "ok".to_owned();
        match line.split_whitespace().collect::<Vec<_>>()[..] {
            ["ready"] => notify::ready().unwrap(),
            ["alive"] => notify::watchdog().unwrap(),
            ["status", word] => notify::status(word).unwrap(),
            ["extend", ms] => notify::extend_timeout(Duration::from_millis(ms.parse().unwrap())).unwrap(),
            ["store", name, text] => store.store(name, memory(text).as_fd()).unwrap(),
            ["remove", name] => store.remove(name).unwrap(),
            ["listen"] => {
                let bound = pagedd_host::net::bind_tcp("127.0.0.1".parse().unwrap(), 0).unwrap();
                store.store("port", bound.as_fd()).unwrap();
                answer = bound.local_addr().unwrap().to_string();
            }
            ["accept"] => {
                let listener = listener.as_ref().unwrap();
                listener.set_nonblocking(false).unwrap();
                listener.accept().unwrap();
            }
            ["garbage"] => garbage(),
            ["let-another-lie"] => {
                let mut liar = role("liar", &[]);
                liar.env = vec![("NOTIFY_SOCKET".into(), env::var_os("NOTIFY_SOCKET").unwrap())];
                assert!(spawn(liar).unwrap().wait(LONG).unwrap().unwrap().success());
            }
            ["store-many", count] => {
                let memory = memory("many");
                for i in 0..count.parse::<u32>().unwrap() {
                    store.store(&format!("port-{i}"), memory.as_fd()).unwrap();
                }
            }
            ["block", "SIGTERM"] => {
                let mut mask = SigSet::empty();
                mask.add(Signal::SIGTERM);
                mask.thread_block().unwrap();
            }
            ["environment", name] => answer = env::var(name).unwrap_or_else(|_| "-".to_owned()),
            ["exit", code] => return ExitCode::from(code.parse::<u8>().unwrap()),
            _ => panic!("no command {line:?}"),
        }
        writeln!(stream.get_mut(), "{answer}").unwrap();
    }
}

/// Messages that no keeper should make anything of.
fn garbage() {
    let socket = UnixDatagram::unbound().unwrap();
    let address = env::var_os("NOTIFY_SOCKET").unwrap();
    let long = format!("READY=1\n{}", "x".repeat(20_000));
    let messages: [&[u8]; 7] = [
        b"",
        b"\0",
        b"=\n=\n",
        b"\xff\xfeREADY=1",
        b"FDSTORE=1\nFDNAME=a:b",
        b"FDSTOREREMOVE=1",
        long.as_bytes(),
    ];
    for message in messages {
        socket.send_to(message, &address).unwrap();
    }
}
