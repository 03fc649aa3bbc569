//! What a process that was taken over would try: real system calls at the files, processes and sockets of others.
//!
//! **Owns** the list. **Never** part of a release: behind the feature `attacks`. It harms nothing where it succeeds: what it opens it closes,
//! signals have the number 0, and what could be changed is set to what it was.

use std::ffi::CString;
use std::fmt;
use std::fs::File;
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::Path;
use std::process::Command;
use std::{fs, io};

use libc::c_long;

/// At what it is tried.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Targets {
    /// Files that hold others' secrets.
    pub files: Vec<String>,
    /// Unix sockets of others.
    pub sockets: Vec<String>,
    /// Abstract unix sockets of others.
    pub names: Vec<String>,
    /// TCP ports of others on the loopback device.
    pub ports: Vec<u16>,
    /// Processes of others, each with an address that can be read in it.
    pub processes: Vec<(u32, u64)>,
}

/// What came of one try.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Attempt {
    /// What was tried, at what.
    pub what: String,
    /// The kernel's error number, or `None` where it let it happen.
    pub errno: Option<i32>,
}

impl Attempt {
    /// Whether the kernel refused it for lack of a right. Any other error is that of a caller who had the right.
    #[must_use]
    pub fn refused(&self) -> bool {
        matches!(self.errno, Some(libc::EPERM | libc::EACCES))
    }
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.errno {
            None => write!(f, "{}: done", self.what),
            Some(errno) => write!(f, "{}: {}", self.what, io::Error::from_raw_os_error(errno)),
        }
    }
}

/// Tries everything, on the calling thread.
#[must_use]
pub fn run(targets: &Targets) -> Vec<Attempt> {
    let mut tried = Vec::new();
    files(targets, &mut tried);
    sockets(targets, &mut tried);
    for &(pid, address) in &targets.processes {
        process(pid, address, &mut tried);
    }
    programs(&mut tried);
    memory(&mut tried);
    privileges(&mut tried);
    tried
}

fn note(tried: &mut Vec<Attempt>, what: impl Into<String>, result: io::Result<()>) {
    // An error without a number is one that a library made up before it asked the kernel.
    let errno = result.err().map(|error| error.raw_os_error().unwrap_or(0));
    tried.push(Attempt { what: what.into(), errno });
}

/// An argument of a system call.
enum Argument<'a> {
    Number(c_long),
    /// Memory that the kernel reads.
    In(&'a [u8]),
    /// Memory that the kernel writes to.
    Out(&'a mut [u8]),
    Null,
}

use Argument::{In, Null, Number, Out};

#[allow(unsafe_code)]
fn call<const N: usize>(number: c_long, arguments: [Argument<'_>; N]) -> io::Result<c_long> {
    let mut raw = [0; 6];
    for (slot, argument) in raw.iter_mut().zip(arguments) {
        *slot = match argument {
            Number(number) => number,
            In(memory) => memory.as_ptr() as c_long,
            Out(memory) => memory.as_mut_ptr() as c_long,
            Null => 0,
        };
    }
    let [a, b, c, d, e, f] = raw;
    // SAFETY: every pointer is to memory that is borrowed over the call, and callers give calls the length of what they name, or a structure of
    // the size that the call reads or writes; no call here changes a mapping that anything else uses.
    let result = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// A call that makes an fd, which is closed.
fn opened<const N: usize>(number: c_long, arguments: [Argument<'_>; N]) -> io::Result<()> {
    call(number, arguments).map(|fd| drop(own(fd)))
}

#[allow(unsafe_code)]
fn own(fd: c_long) -> OwnedFd {
    // SAFETY: the kernel has just made this fd for the caller, and nobody else has its number.
    unsafe { OwnedFd::from_raw_fd(fd as RawFd) }
}

fn files(targets: &Targets, tried: &mut Vec<Attempt>) {
    let of_process = targets.processes.iter().flat_map(|(pid, _)| {
        ["mem", "environ", "maps", "fd", "root", "cwd", "cmdline", "stack"]
            .map(|file| format!("/proc/{pid}/{file}"))
    });
    let own = [
        "/proc/self/mem",
        "/proc/self/exe",
        "/proc/self/fd",
        "/proc/self/maps",
        "/etc/passwd",
        "/",
        "/dev/null",
    ];
    for path in targets.files.iter().cloned().chain(of_process).chain(own.map(str::to_owned)) {
        note(tried, format!("open {path}"), File::open(&path).map(drop));
    }
    for path in &targets.files {
        note(tried, format!("stat {path}"), fs::metadata(path).map(drop));
    }
    note(tried, "list /", fs::read_dir("/").map(drop));
    note(tried, "make a file in /tmp", tempfile::tempfile_in("/tmp").map(drop));
    let shared = Path::new("/dev/shm").join(format!("pagedd-attack-{}", std::process::id()));
    note(tried, "make shared memory by name", File::create(&shared).and_then(|_| fs::remove_file(&shared)));
    let root = c"/";
    let path = root.to_bytes_with_nul();
    let mut handle = [0u8; 136];
    handle[0] = 128;
    let mut mount = [0u8; 8];
    let arguments = [Number(libc::AT_FDCWD.into()), In(path), Out(&mut handle), Out(&mut mount), Number(0)];
    note(tried, "a handle of /", call(libc::SYS_name_to_handle_at, arguments).map(drop));
    note(tried, "watch files", opened(libc::SYS_inotify_init1, [Number(0)]));
    note(tried, "watch all files", opened(libc::SYS_fanotify_init, [Number(0), Number(0)]));
    note(tried, "change the root", call(libc::SYS_chroot, [In(path)]).map(drop));
    note(tried, "change the folder", call(libc::SYS_chdir, [In(path)]).map(drop));
    let nowhere = c"/nowhere/pagedd";
    let nowhere = nowhere.to_bytes_with_nul();
    let arguments = [In(nowhere), In(nowhere), Null, Number(libc::MS_BIND as c_long), Null];
    note(tried, "mount", call(libc::SYS_mount, arguments).map(drop));
}

fn sockets(targets: &Targets, tried: &mut Vec<Attempt>) {
    for path in &targets.sockets {
        note(tried, format!("connect {path}"), UnixStream::connect(path).map(drop));
    }
    for name in &targets.names {
        use std::os::linux::net::SocketAddrExt;
        let connected = SocketAddr::from_abstract_name(name).and_then(|name| UnixStream::connect_addr(&name));
        note(tried, format!("connect abstract {name}"), connected.map(drop));
    }
    for &port in &targets.ports {
        let address = SocketAddrV4::new(Ipv4Addr::LOCALHOST, port);
        note(tried, format!("connect port {port}"), TcpStream::connect(address).map(drop));
    }
    note(tried, "listen on a port", TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map(drop));
    for (name, family, kind) in [
        ("tcp", libc::AF_INET, libc::SOCK_STREAM),
        ("udp", libc::AF_INET6, libc::SOCK_DGRAM),
        ("unix", libc::AF_UNIX, libc::SOCK_DGRAM),
        ("netlink", libc::AF_NETLINK, libc::SOCK_RAW),
        ("packet", libc::AF_PACKET, libc::SOCK_RAW),
    ] {
        let arguments = [Number(family.into()), Number(kind.into()), Number(0)];
        note(tried, format!("a {name} socket"), opened(libc::SYS_socket, arguments));
    }
    // Nothing goes out: the fd is none.
    let mut message = [0u8; size_of::<libc::msghdr>()];
    let arguments = [Number(-1), In(&message), Number(0)];
    note(tried, "send a message with fds", call(libc::SYS_sendmsg, arguments).map(drop));
    let arguments = [Number(-1), Out(&mut message), Number(0)];
    note(tried, "receive a message with fds", call(libc::SYS_recvmsg, arguments).map(drop));
    let address = [0u8; 16];
    let arguments = [Number(-1), In(&address), Number(1), Number(0), In(&address), Number(16)];
    note(tried, "send to an address", call(libc::SYS_sendto, arguments).map(drop));
}

fn process(pid: u32, address: u64, tried: &mut Vec<Attempt>) {
    let id = || Number(c_long::from(pid));
    let mut byte = [0u8; 1];
    let local = [(byte.as_mut_ptr() as u64).to_ne_bytes(), 1u64.to_ne_bytes()].concat();
    let remote = [address.to_ne_bytes(), 1u64.to_ne_bytes()].concat();
    let vectors = || [id(), In(&local), Number(1), In(&remote), Number(1), Number(0)];
    let mut tell =
        |what: &str, result: io::Result<c_long>| note(tried, format!("{what} of {pid}"), result.map(drop));
    tell("read memory", call(libc::SYS_process_vm_readv, vectors()));
    tell("signal", call(libc::SYS_kill, [id(), Number(0)]));
    tell("signal the thread", call(libc::SYS_tgkill, [id(), id(), Number(0)]));
    tell("signal any thread", call(libc::SYS_tkill, [id(), Number(0)]));
    let pidfd = call(libc::SYS_pidfd_open, [id(), Number(0)]);
    let fd = pidfd.as_ref().map_or(-1, |fd| *fd);
    tell("a pidfd", pidfd);
    tell("signal by pidfd", call(libc::SYS_pidfd_send_signal, [Number(fd), Number(0), Null, Number(0)]));
    let stolen = call(libc::SYS_pidfd_getfd, [Number(fd), Number(2), Number(0)]).map(|fd| {
        drop(own(fd));
        0
    });
    tell("take an fd", stolen);
    let arguments = [Number(fd), In(&remote), Number(1), Number(libc::MADV_COLD.into()), Number(0)];
    tell("advise memory", call(libc::SYS_process_madvise, arguments));
    if fd >= 0 {
        drop(own(fd));
    }
    let mut mask = [0u8; 128];
    let affinity = call(libc::SYS_sched_getaffinity, [id(), Number(128), Out(&mut mask)]);
    let length = affinity.as_ref().map_or(128, |length| *length);
    tell("set the processors", call(libc::SYS_sched_setaffinity, [id(), Number(length), In(&mask)]));
    let mut limit = [0u8; 16];
    tell(
        "read a limit",
        call(libc::SYS_prlimit64, [id(), Number(libc::RLIMIT_NOFILE.into()), Null, Out(&mut limit)]),
    );
    tell(
        "set a limit",
        call(libc::SYS_prlimit64, [id(), Number(libc::RLIMIT_NOFILE.into()), In(&limit), Null]),
    );
    let nice = call(libc::SYS_getpriority, [Number(0), id()]).unwrap_or(20);
    tell("set the priority", call(libc::SYS_setpriority, [Number(0), id(), Number(20 - nice)]));
    let own = c_long::from(std::process::id());
    tell("compare fds", call(libc::SYS_kcmp, [id(), Number(own), Number(0), Number(2), Number(2)]));
    // The kernel lets go of it when this thread ends.
    tell("trace", call(libc::SYS_ptrace, [Number(libc::PTRACE_SEIZE.into()), id(), Null, Null]));
}

fn programs(tried: &mut Vec<Attempt>) {
    note(tried, "run a program", Command::new("/bin/true").status().map(drop));
    let missing = c"/nowhere/pagedd";
    let missing = missing.to_bytes_with_nul();
    let none = [0u8; 8];
    note(tried, "become a program", call(libc::SYS_execve, [In(missing), In(&none), In(&none)]).map(drop));
    let arguments = [Number(libc::AT_FDCWD.into()), In(missing), In(&none), In(&none), Number(0)];
    note(tried, "become a program by a folder", call(libc::SYS_execveat, arguments).map(drop));
    // No process comes of these: the flags contradict one another.
    let flags = c_long::from(libc::CLONE_NEWNS | libc::CLONE_FS);
    note(
        tried,
        "clone with namespaces",
        call(libc::SYS_clone, [Number(flags), Null, Null, Null, Null]).map(drop),
    );
    note(tried, "leave a namespace", call(libc::SYS_unshare, [Number(libc::CLONE_NEWUTS.into())]).map(drop));
    note(tried, "join a namespace", call(libc::SYS_setns, [Number(-1), Number(0)]).map(drop));
    // An entry into the kernel by the numbers of the other ABI of this processor.
    #[cfg(target_arch = "x86_64")]
    note(tried, "a call of x32", call(0x4000_0000 | libc::SYS_getpid, []).map(drop));
}

fn memory(tried: &mut Vec<Attempt>) {
    let name = c"attack";
    let name = name.to_bytes_with_nul();
    note(tried, "memory as a file", opened(libc::SYS_memfd_create, [In(name), Number(0)]));
    let page = 4096;
    let code = c_long::from(libc::PROT_READ | libc::PROT_EXEC);
    let flags = c_long::from(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    let mapped =
        call(libc::SYS_mmap, [Null, Number(page), Number(code), Number(flags), Number(-1), Number(0)]);
    if let Ok(base) = mapped {
        let _ = call(libc::SYS_munmap, [Number(base), Number(page)]);
    }
    note(tried, "memory for code", mapped.map(drop));
    // Of a size that is none: nothing is made.
    let key = Number(libc::IPC_PRIVATE.into());
    note(tried, "shared memory of System V", call(libc::SYS_shmget, [key, Number(0), Number(0)]).map(drop));
    let queue = c"pagedd-attack";
    let queue = queue.to_bytes_with_nul();
    let arguments = [In(queue), Number(libc::O_RDONLY.into()), Number(0), Null];
    note(tried, "a message queue", opened(libc::SYS_mq_open, arguments));
    note(tried, "faults in user space", opened(libc::SYS_userfaultfd, [Number(libc::O_CLOEXEC.into())]));
    let mut ring = [0u8; 120];
    note(tried, "a ring of io_uring", opened(libc::SYS_io_uring_setup, [Number(1), Out(&mut ring)]));
    let zeros = [0u8; 128];
    let bpf = [Number(0), In(&zeros), Number(128)];
    note(tried, "a map of bpf", call(libc::SYS_bpf, bpf).map(drop));
    let mut event = [0u8; 128];
    event[4] = 128;
    let perf = [In(&event), Number(0), Number(-1), Number(-1), Number(0)];
    note(tried, "count events", opened(libc::SYS_perf_event_open, perf));
    let keyring = c_long::from(libc::KEY_SPEC_PROCESS_KEYRING);
    note(tried, "a keyring", call(libc::SYS_keyctl, [Number(0), Number(keyring), Number(1)]).map(drop));
}

fn privileges(tried: &mut Vec<Attempt>) {
    let (uid, gid) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
    for (what, number, id) in [
        ("set the user", libc::SYS_setuid, uid),
        ("set the group", libc::SYS_setgid, gid),
        ("set the user of files", libc::SYS_setfsuid, uid),
    ] {
        note(tried, what, call(number, [Number(id.into())]).map(drop));
    }
    let mut header = [0u8; 8];
    header[..4].copy_from_slice(&0x2008_0522u32.to_ne_bytes());
    let mut sets = [0u8; 24];
    let had = call(libc::SYS_capget, [Out(&mut header), Out(&mut sets)]);
    note(tried, "read capabilities", had.map(drop));
    note(tried, "set capabilities", call(libc::SYS_capset, [In(&header), In(&sets)]).map(drop));
    let prctl = |option: libc::c_int, value| call(libc::SYS_prctl, [Number(option.into()), Number(value)]);
    note(tried, "let others look in", prctl(libc::PR_SET_DUMPABLE, 1).map(drop));
    note(tried, "keep capabilities", prctl(libc::PR_SET_KEEPCAPS, 0).map(drop));
    let none = CString::default();
    let arguments = [Number(libc::SECCOMP_GET_ACTION_AVAIL.into()), Number(0), In(none.as_bytes_with_nul())];
    note(tried, "another filter", call(libc::SYS_seccomp, arguments).map(drop));
    let owner = c_long::from(std::process::id());
    let arguments = [Number(2), Number(libc::F_SETOWN.into()), Number(owner)];
    note(tried, "have a signal sent", call(libc::SYS_fcntl, arguments).map(drop));
    let stderr = c_long::from(io::stderr().as_raw_fd());
    let mut size = [0u8; 8];
    let arguments = [Number(stderr), Number(libc::TIOCGWINSZ as c_long), Out(&mut size)];
    note(tried, "ask a terminal", call(libc::SYS_ioctl, arguments).map(drop));
    note(
        tried,
        "restart the machine",
        call(libc::SYS_reboot, [Number(0), Number(0), Number(0), Null]).map(drop),
    );
}
