use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::process::ExitStatus;
use std::thread;

use nix::unistd::geteuid;
use pagedd_host::attack::{self, Attempt, Targets};
use pagedd_host::jail::Jail;
use pagedd_host::{Confinement, Forked, Identity, Sandbox, fork_confined};

use super::roles::{LONG, pipe};

/// Forks a child into the jail that writes what `say` returns, and returns it to the parent with how the child ended.
fn jailed(keep: &[std::os::fd::BorrowedFd<'_>], say: impl FnOnce() -> String) -> (String, ExitStatus) {
    let jail = Jail::new().unwrap();
    // No other test's: threads are counted by user.
    let uid = 100_000 + std::process::id();
    let confinement = Confinement {
        name: "jailed",
        cgroup: None,
        identity: geteuid().is_root().then_some(Identity { uid, gid: uid }),
        sandbox: Sandbox { no_new_privs: true, ..Sandbox::default() },
        jail: Some(&jail),
    };
    let (mut reader, writer) = pipe();
    let writer = File::from(writer);
    match fork_confined(&confinement, &[keep, &[writer.as_fd()]].concat()).unwrap() {
        Forked::Child => {
            (&writer).write_all(say().as_bytes()).unwrap();
            std::process::exit(0);
        }
        Forked::Parent(child) => {
            drop(writer);
            let mut text = String::new();
            reader.read_to_string(&mut text).unwrap();
            (text, child.wait(LONG).unwrap().unwrap())
        }
    }
}

/// Another process, and what else there is to attack.
struct Victim {
    targets: Targets,
    child: std::process::Child,
    _folder: tempfile::TempDir,
    _listeners: (TcpListener, UnixListener, UnixListener),
}

impl Victim {
    fn new() -> Self {
        use std::os::linux::net::SocketAddrExt;
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        std::fs::write(path("secret"), "secret").unwrap();
        let port = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let socket = UnixListener::bind(path("socket")).unwrap();
        let name = format!("pagedd-victim-{}", std::process::id());
        let named = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        let child = std::process::Command::new("/bin/sleep").arg("600").spawn().unwrap();
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", child.id())).unwrap();
        let address = u64::from_str_radix(maps.split('-').next().unwrap(), 16).unwrap();
        let targets = Targets {
            files: vec![path("secret")],
            sockets: vec![path("socket")],
            names: vec![name],
            ports: vec![port.local_addr().unwrap().port()],
            processes: vec![(child.id(), address)],
        };
        Self { targets, child, _folder: folder, _listeners: (port, socket, named) }
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn lines(attempts: &[Attempt]) -> String {
    attempts.iter().fold(String::new(), |text, attempt| text + &attempt.to_string() + "\n")
}

pub fn outside_of_the_jail_the_attacks_work() {
    let victim = Victim::new();
    let targets = victim.targets.clone();
    let tried = thread::spawn(move || attack::run(&targets)).join().unwrap();
    let worked = tried.iter().filter(|attempt| attempt.errno.is_none()).count();
    println!("{worked} of {} worked:\n{}", tried.len(), lines(&tried));
    // Without root, or in a container, a few are refused; most are not.
    assert!(worked * 2 > tried.len(), "{worked} of {}:\n{}", tried.len(), lines(&tried));
    if geteuid().is_root() {
        for what in
            ["open /proc/", "read memory", "signal", "take an fd", "trace", "connect", "run a program"]
        {
            let all = tried.iter().filter(|attempt| attempt.what.starts_with(what));
            assert!(all.clone().any(|attempt| attempt.errno.is_none()), "{what}:\n{}", lines(&tried));
        }
    }
}

pub fn in_the_jail_every_attack_is_refused() {
    let victim = Victim::new();
    let (said, status) = jailed(&[], || {
        let tried = attack::run(&victim.targets);
        let count = tried.len();
        let others = tried.into_iter().filter(|attempt| !attempt.refused()).collect::<Vec<_>>();
        format!("{count} tried\n{}", lines(&others))
    });
    assert!(status.success(), "{status}");
    assert_eq!(said, "79 tried\n", "those that were not refused follow");
}

pub fn in_the_jail_a_connection_is_served_and_threads_run() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(b"ping").unwrap();
    let (said, status) = jailed(&[listener.as_fd()], || {
        let listener = listener.as_fd();
        let serve = || {
            let listener = TcpListener::from(listener.try_clone_to_owned().unwrap());
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_nodelay(true).unwrap();
            let mut ping = [0; 4];
            stream.read_exact(&mut ping).unwrap();
            let large = vec![7u8; 32 << 20];
            thread::sleep(std::time::Duration::from_millis(1));
            stream.write_all(&ping).unwrap();
            format!("{} {}", String::from_utf8_lossy(&ping), large.len())
        };
        thread::scope(|scope| {
            thread::Builder::new()
                .name("serve".to_owned())
                .spawn_scoped(scope, serve)
                .unwrap()
                .join()
                .unwrap()
        })
    });
    assert!(status.success(), "{status}");
    assert_eq!(said, format!("ping {}", 32 << 20));
    let mut pong = String::new();
    stream.read_to_string(&mut pong).unwrap();
    assert_eq!(pong, "ping");
}

pub fn a_panic_or_an_abort_in_the_jail_ends_the_process() {
    let (_, status) = jailed(&[], || {
        let panicked = std::panic::catch_unwind(|| panic!("in the jail"));
        assert!(panicked.is_err());
        std::process::abort()
    });
    assert!(std::os::unix::process::ExitStatusExt::signal(&status).is_some(), "{status}");
}

pub fn a_call_of_another_architecture_ends_the_process() {
    #[cfg(target_arch = "x86_64")]
    {
        // getpid by the numbers of i386; without the jail it returns.
        #[allow(unsafe_code)]
        fn call() -> u32 {
            let mut number = 20u32;
            // SAFETY: the call takes no argument, touches no memory and returns in eax.
            unsafe { std::arch::asm!("int 0x80", inout("eax") number) };
            number
        }
        let (_, status) = jailed(&[], || call().to_string());
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(libc::SIGSYS), "{status}");
    }
}

pub fn a_fork_of_a_user_of_its_own_has_no_more_than_its_threads() {
    if !geteuid().is_root() {
        return;
    }
    let (said, status) = jailed(&[], || {
        let (hold, held) = std::sync::mpsc::sync_channel::<()>(0);
        let held = std::sync::Arc::new(std::sync::Mutex::new(held));
        let mut threads = Vec::new();
        let error = loop {
            let held = held.clone();
            match thread::Builder::new().stack_size(64 << 10).spawn(move || held.lock().unwrap().recv()) {
                Ok(thread) => threads.push(thread),
                Err(error) => break error,
            }
            assert!(threads.len() < 1000);
        };
        drop(hold);
        let count = threads.len();
        assert!(threads.into_iter().all(|thread| thread.join().unwrap().is_err()));
        format!("{count} {:?}", error.kind())
    });
    assert!(status.success(), "{status}");
    assert_eq!(said, "63 WouldBlock");
}
