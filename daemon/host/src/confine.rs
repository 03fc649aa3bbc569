//! What a child process sheds before it runs: privileges, core dumps, signal state.
//!
//! **Owns** the order of the steps. Every function here runs between `fork` and `exec`: it makes system calls and nothing
//! else, and **never** allocates, locks or logs.

use std::fmt;
use std::io;
use std::os::fd::AsFd;

use rustix::process::{DumpableBehavior, Gid, Resource, Rlimit, Uid};
use rustix::thread::{CapabilitySet, CapabilitySets};

/// A user and a group to run as. Supplementary groups are always dropped.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Identity {
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
}

/// What a child may not do, beyond what its [`Identity`] takes from it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sandbox {
    /// Neither it nor its descendants ever gain a privilege by running a file.
    pub no_new_privs: bool,
    /// Which of this process's capabilities it has. One with an [`Identity`] has none, whatever this says.
    pub capabilities: Capabilities,
}

/// Which of its parent's capabilities a child has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Capabilities {
    /// All of them, as far as `exec` leaves them.
    #[default]
    Kept,
    /// To change user and group of itself, so that it can fork processes of others, where its parent has that.
    Users,
    /// None.
    None,
}

/// A step of starting a child process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Step {
    /// Making the pipe that the child reports on.
    Pipe,
    /// `fork` itself.
    Fork,
    /// Opening the child's pidfd.
    Pidfd,
    /// Joining the cgroup.
    Cgroup,
    /// Placing and closing file descriptors.
    Fds,
    /// Leaving the parent's session.
    Session,
    /// Forbidding core dumps.
    CoreLimit,
    /// Changing group and user.
    Identity,
    /// Dropping capabilities.
    Capabilities,
    /// Forbidding new privileges.
    NoNewPrivs,
    /// Hiding its memory from processes of the same user.
    Hide,
    /// Refusing files, network and processes.
    Landlock,
    /// Limiting system calls to the list.
    Filter,
    /// Setting the process name.
    Name,
    /// Running the program.
    Exec,
}

impl Step {
    const ALL: [Self; 15] = [
        Self::Pipe,
        Self::Fork,
        Self::Pidfd,
        Self::Cgroup,
        Self::Fds,
        Self::Session,
        Self::CoreLimit,
        Self::Identity,
        Self::Capabilities,
        Self::NoNewPrivs,
        Self::Hide,
        Self::Landlock,
        Self::Filter,
        Self::Name,
        Self::Exec,
    ];
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pipe => "make a pipe",
            Self::Fork => "fork",
            Self::Pidfd => "open the pidfd",
            Self::Cgroup => "join the cgroup",
            Self::Fds => "place file descriptors",
            Self::Session => "start a session",
            Self::CoreLimit => "forbid core dumps",
            Self::Identity => "change user and group",
            Self::Capabilities => "drop capabilities",
            Self::NoNewPrivs => "forbid new privileges",
            Self::Hide => "hide its memory",
            Self::Landlock => "refuse files and network (landlock)",
            Self::Filter => "limit system calls (seccomp)",
            Self::Name => "set the process name",
            Self::Exec => "run it",
        })
    }
}

/// A step that failed, small enough to be sent from the child through a pipe.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Failed {
    pub step: Step,
    pub errno: i32,
}

/// Bytes of a [`Failed`] on the pipe.
pub(crate) const FAILED_BYTES: usize = 5;

impl Failed {
    pub fn new(step: Step, errno: rustix::io::Errno) -> Self {
        Self { step, errno: errno.raw_os_error() }
    }

    pub fn encode(self) -> [u8; FAILED_BYTES] {
        let [a, b, c, d] = self.errno.to_le_bytes();
        [self.step as u8, a, b, c, d]
    }

    pub fn decode([step, errno @ ..]: [u8; FAILED_BYTES]) -> Option<Self> {
        let step = *Step::ALL.iter().find(|s| **s as u8 == step)?;
        Some(Self { step, errno: i32::from_le_bytes(errno) })
    }

    pub fn into_io(self) -> io::Error {
        io::Error::from_raw_os_error(self.errno)
    }
}

/// Adds `step` to an error of rustix.
pub(crate) trait At<T> {
    fn at(self, step: Step) -> Result<T, Failed>;
}

impl<T> At<T> for rustix::io::Result<T> {
    fn at(self, step: Step) -> Result<T, Failed> {
        self.map_err(|errno| Failed::new(step, errno))
    }
}

/// Moves the calling process into the cgroup whose `cgroup.procs` is open as `procs`.
pub(crate) fn join_cgroup(procs: impl AsFd) -> Result<(), Failed> {
    // The kernel reads 0 as "the writer".
    rustix::io::write(procs, b"0").at(Step::Cgroup).map(drop)
}

/// Moves a process of one thread through its new cgroup's `cgroup.procs`.
pub(crate) fn move_to_cgroup(procs: impl AsFd, pid: u32) -> Result<(), Failed> {
    rustix::io::write(procs, pid.to_string().as_bytes()).at(Step::Cgroup).map(drop)
}

/// Sheds what `identity` and `sandbox` say, and core dumps in any case.
///
/// The calls are per thread: the caller is the only thread of its process.
pub(crate) fn shed(identity: Option<Identity>, sandbox: Sandbox) -> Result<(), Failed> {
    rustix::process::setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })
        .at(Step::CoreLimit)?;
    let capabilities = match identity {
        Some(Identity { uid, gid }) => {
            let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
            rustix::thread::set_thread_groups(&[]).at(Step::Identity)?;
            rustix::thread::set_thread_res_gid(gid, gid, gid).at(Step::Identity)?;
            rustix::thread::set_thread_res_uid(uid, uid, uid).at(Step::Identity)?;
            // From root the kernel has just done this; from a plain user with ambient capabilities it has not.
            Capabilities::None
        }
        None => sandbox.capabilities,
    };
    match capabilities {
        Capabilities::Kept => {}
        Capabilities::Users => keep_capabilities(USERS)?,
        Capabilities::None => keep_capabilities(CapabilitySet::empty())?,
    }
    if sandbox.no_new_privs {
        rustix::thread::set_no_new_privs(true).at(Step::NoNewPrivs)?;
    }
    Ok(())
}

/// What [`Capabilities::Users`] is.
const USERS: CapabilitySet = CapabilitySet::SETUID.union(CapabilitySet::SETGID);

/// Drops all capabilities of this process but those of `wanted`, which it also has after `exec`.
fn keep_capabilities(wanted: CapabilitySet) -> Result<(), Failed> {
    let had = rustix::thread::capabilities(None).at(Step::Capabilities)?;
    let kept = had.permitted & wanted;
    rustix::thread::clear_ambient_capability_set().at(Step::Capabilities)?;
    rustix::thread::set_capabilities(
        None,
        CapabilitySets { effective: kept, permitted: kept, inheritable: kept },
    )
    .at(Step::Capabilities)?;
    for one in kept.iter() {
        rustix::thread::configure_capability_in_ambient_set(one, true).at(Step::Capabilities)?;
    }
    Ok(())
}

/// Lets no process of the same user look into this one, nor trace it.
pub(crate) fn hide() -> Result<(), Failed> {
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable).at(Step::Hide)
}

/// Bounds the threads that the user of this process has in all, where that user is its own.
pub(crate) fn limit_threads(most: u64) -> Result<(), Failed> {
    let limit = Rlimit { current: Some(most), maximum: Some(most) };
    rustix::process::setrlimit(Resource::Nproc, limit).at(Step::Identity)
}

/// Names of the capabilities that this process lacks to make processes of other users and to end them: what it takes to give each tenant a user
/// of its own. Empty where it can.
///
/// # Errors
/// The kernel does not tell.
pub fn lacks_for_users() -> io::Result<Vec<&'static str>> {
    let has = rustix::thread::capabilities(None)?.effective;
    let needed = [
        (CapabilitySet::SETUID, "CAP_SETUID"),
        (CapabilitySet::SETGID, "CAP_SETGID"),
        (CapabilitySet::KILL, "CAP_KILL"),
    ];
    Ok(needed.into_iter().filter(|(one, _)| !has.contains(*one)).map(|(_, name)| name).collect())
}
