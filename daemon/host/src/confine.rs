//! What a child process sheds before it runs: privileges, core dumps, signal state.
//!
//! **Owns** the order of the steps. Every function here runs between `fork` and `exec`: it makes system calls and nothing
//! else, and **never** allocates, locks or logs.

use std::fmt;
use std::io;
use std::os::fd::AsFd;

use rustix::process::{Gid, Resource, Rlimit, Uid};
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
    /// Setting the process name.
    Name,
    /// Running the program.
    Exec,
}

impl Step {
    const ALL: [Self; 12] = [
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

/// Sheds what `identity` and `sandbox` say, and core dumps in any case.
///
/// The calls are per thread: the caller is the only thread of its process.
pub(crate) fn shed(identity: Option<Identity>, sandbox: Sandbox) -> Result<(), Failed> {
    rustix::process::setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) })
        .at(Step::CoreLimit)?;
    if let Some(Identity { uid, gid }) = identity {
        let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
        rustix::thread::set_thread_groups(&[]).at(Step::Identity)?;
        rustix::thread::set_thread_res_gid(gid, gid, gid).at(Step::Identity)?;
        rustix::thread::set_thread_res_uid(uid, uid, uid).at(Step::Identity)?;
        // From root the kernel has just done this; from a plain user with ambient capabilities it has not.
        rustix::thread::clear_ambient_capability_set().at(Step::Capabilities)?;
        let none = CapabilitySet::empty();
        rustix::thread::set_capabilities(
            None,
            CapabilitySets { effective: none, permitted: none, inheritable: none },
        )
        .at(Step::Capabilities)?;
    }
    if sandbox.no_new_privs {
        rustix::thread::set_no_new_privs(true).at(Step::NoNewPrivs)?;
    }
    Ok(())
}
