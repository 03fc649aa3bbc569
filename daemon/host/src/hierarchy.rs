//! The part of the cgroup v2 tree that this daemon was given, and the cgroups that it makes there.
//!
//! **Owns** every write to a cgroup's file, of a [`Hierarchy`] that is rooted at the delegated directory. **Never** writes above that
//! directory, and never enables a controller that is not listed there.
//!
//! ```text
//! <delegated>/            no process
//!   daemon/               the daemon and its keeper
//!   templates/            processes that fork gateways
//!   workers/<model>-<rank>/<start>/
//!   tenants/<name>/       the tenant's gateway
//! ```

mod cgroup;
mod limits;
mod sweep;
mod usage;

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use cgroups_rs::blkio::BlkIoController;
use cgroups_rs::cgroup::Cgroup as Handle;
use cgroups_rs::cpu::CpuController;
use cgroups_rs::cpuset::CpuSetController;
use cgroups_rs::memory::MemController;
use cgroups_rs::pid::PidController;
use cgroups_rs::{Hierarchy as Tree, Subsystem};
use pagedd_core::Weight;
use rustix::fs::Access;

use crate::cgroup::{Own, Tree as Which, own, v1_controllers};

pub use cgroup::{Cgroup, CgroupError};
pub use limits::{Applied, BelowUse, Unenforced};
pub use sweep::Left;
pub use usage::{Pressure, Stall, Usage};

/// How long a process that was killed may take to be gone.
const DEATH: Duration = Duration::from_secs(10);

/// Controllers that limits are made of.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Controller {
    /// Time and weight.
    Cpu,
    /// Which CPUs.
    Cpuset,
    /// Block devices.
    Io,
    /// Memory.
    Memory,
    /// Numbers of processes.
    Pids,
}

impl Controller {
    /// Every one.
    pub const ALL: [Self; 5] = [Self::Cpu, Self::Cpuset, Self::Io, Self::Memory, Self::Pids];

    /// The kernel's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cpuset => "cpuset",
            Self::Io => "io",
            Self::Memory => "memory",
            Self::Pids => "pids",
        }
    }
}

/// Why no cgroup can be made.
#[derive(thiserror::Error, Debug)]
pub enum NoHierarchy {
    /// The operator must boot the host otherwise.
    #[error("this host has no cgroup v2; boot it with systemd.unified_cgroup_hierarchy=1")]
    NoV2,
    /// The operator must boot the host otherwise.
    #[error(
        "a hybrid host: cgroup v1 has the controllers {}; boot it with systemd.unified_cgroup_hierarchy=1",
        controllers.join(", ")
    )]
    Hybrid {
        /// Those that v2 would need.
        controllers: Vec<String>,
    },
    /// The operator must start the daemon otherwise.
    #[error("cgroup {} is not pagedd's to divide: {why}; start pagedd as a service with Delegate=yes", dir.display())]
    NotDelegated {
        /// This process's cgroup.
        dir: PathBuf,
        /// What speaks against it.
        why: NotDelegated,
    },
    /// The operator must start the daemon otherwise, or end these.
    #[error("cgroup {} has other processes in it: {}", dir.display(), pids.join(", "))]
    NotAlone {
        /// This process's cgroup.
        dir: PathBuf,
        /// Number and name of each.
        pids: Vec<String>,
    },
    /// The host refused a step; another try may end otherwise.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
}

/// What speaks against a delegation.
#[derive(thiserror::Error, Clone, Copy, PartialEq, Eq, Debug)]
pub enum NotDelegated {
    /// A plain user, or a read-only mount.
    #[error("it cannot be written")]
    ReadOnly,
    /// It can be written by chance only.
    #[error("another user owns it")]
    Foreign,
    /// It could be written, and systemd would not know.
    #[error("systemd manages it")]
    Systemd,
    /// All processes of the host are below it.
    #[error("it is the root of the whole tree")]
    Root,
}

fn io_at(path: &Path) -> impl Fn(io::Error) -> CgroupError {
    move |source| CgroupError::io(path, source)
}

/// What is asked of the host, so that a made-up tree can answer.
struct Host<'a> {
    root: &'a Path,
    euid: u32,
    parent: Option<u32>,
    is_cgroup2: fn(&Path) -> bool,
    is_marked: fn(&Path) -> bool,
}

/// The delegated part of the tree.
///
/// Having one tells you: this process is in its leaf `daemon/`, no process is in the delegated directory itself, and the controllers
/// that it was given are enabled for `workers/` and `tenants/`.
#[derive(Clone, Debug)]
pub struct Hierarchy {
    root: PathBuf,
    controllers: Vec<Controller>,
    claims: Arc<sweep::Claims>,
}

impl Hierarchy {
    /// Takes the delegated directory that this process was started in, or in whose `daemon/` it is already, and moves into `daemon/`
    /// itself.
    ///
    /// # Errors
    /// Nothing above the directory was written; below it this process may have moved.
    pub fn take() -> Result<Self, NoHierarchy> {
        Self::take_on(&Host {
            root: Path::new("/"),
            euid: rustix::process::geteuid().as_raw(),
            parent: rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get().unsigned_abs()),
            is_cgroup2,
            is_marked,
        })
    }

    fn take_on(host: &Host<'_>) -> Result<Self, NoHierarchy> {
        let found = own(host.root, Which::V2).ok_or(NoHierarchy::NoV2)?;
        if !(host.is_cgroup2)(&found.dir) {
            return Err(NoHierarchy::NoV2);
        }
        let controllers = v1_controllers(host.root, &["cpu", "cpuset", "memory", "pids", "blkio"]);
        if !controllers.is_empty() {
            return Err(NoHierarchy::Hybrid { controllers });
        }
        let root = top(&found);
        check_delegated(host, &root)?;
        let keeper = keeper(host);
        alone(host, &root, keeper.as_deref())?;
        let daemon = root.join("daemon");
        make(&daemon)?;
        move_into(&daemon, "0")?;
        // It goes along, where it is not there already.
        if let Some(keeper) =
            keeper.as_deref().filter(|keeper| procs(&root).is_ok_and(|p| p.contains(*keeper)))
        {
            move_into(&daemon, keeper)?;
        }
        alone(host, &root, None)?;

        let listed = listed(&root)?;
        let controllers: Vec<_> =
            Controller::ALL.into_iter().filter(|c| listed.iter().any(|name| name == c.name())).collect();
        enable(&root, &controllers)?;
        for group in ["workers", "tenants", "templates"] {
            make(&root.join(group))?;
        }
        for group in ["workers", "tenants"] {
            enable(&root.join(group), &controllers)?;
        }
        let hierarchy = Self { root, controllers, claims: Arc::default() };
        for group in ["workers", "daemon"] {
            hierarchy.open(Path::new(group))?.weigh(Weight::MOST)?;
        }
        Ok(hierarchy)
    }

    /// On a plain directory, which is made a tree of empty cgroups. Nothing is enforced there.
    ///
    /// # Errors
    /// It cannot be written.
    #[cfg(feature = "made-up")]
    pub fn made_up(root: &Path) -> io::Result<Self> {
        ["workers", "tenants", "templates"]
            .iter()
            .try_for_each(|group| fs::create_dir_all(root.join(group)))?;
        Ok(Self { root: root.to_owned(), controllers: Controller::ALL.to_vec(), claims: Arc::default() })
    }

    /// The delegated directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Controllers that this host does not give to it: limits of theirs cannot be enforced.
    pub fn missing(&self) -> Vec<Controller> {
        Controller::ALL.into_iter().filter(|controller| !self.controllers.contains(controller)).collect()
    }

    /// The cgroup of a tenant's gateway, which is made where it is missing. Limits of an earlier daemon may be in force there.
    ///
    /// It is of this daemon from now on, and no [`Hierarchy::sweep`] ends what is in it. Blocks while one of its name is being removed.
    ///
    /// # Errors
    /// The host refuses it.
    pub fn tenant(&self, name: &str) -> Result<Cgroup, CgroupError> {
        self.claimed(&tenant_path(name))
    }

    /// Removes a tenant's cgroup, where an earlier daemon left one, with whoever is in it.
    ///
    /// # Errors
    /// It is still there.
    pub fn remove_tenant(&self, name: &str) -> Result<(), CgroupError> {
        let below = tenant_path(name);
        if !self.root.join(&below).exists() {
            return Ok(());
        }
        self.open(&below)?.remove(DEATH)
    }

    /// The cgroup of processes that fork gateways.
    ///
    /// # Errors
    /// The host refuses it.
    pub fn templates(&self) -> Result<Cgroup, CgroupError> {
        self.make(Path::new("templates"))
    }

    /// What all workers of a model's rank share, one after the other: what they use is counted here. It is of this daemon as a tenant's is.
    ///
    /// # Errors
    /// The host refuses it.
    pub fn workers(&self, model: &str, rank: u32) -> Result<Cgroup, CgroupError> {
        self.claimed(&Path::new("workers").join(format!("{model}-{rank}")))
    }

    /// A leaf of `workers` for one process: it can be ended while the next one starts.
    ///
    /// # Errors
    /// The host refuses it.
    pub fn worker(&self, workers: &Cgroup, start: u32) -> Result<Cgroup, CgroupError> {
        // Of this daemon: one of an earlier daemon may not be gone yet.
        let leaf = format!("{}-{start}", std::process::id());
        let below = workers.path().strip_prefix(&self.root).unwrap_or(workers.path());
        self.make(&below.join(leaf))
    }

    fn claimed(&self, below: &Path) -> Result<Cgroup, CgroupError> {
        self.claims.claim(below);
        self.make(below)
    }

    fn make(&self, below: &Path) -> Result<Cgroup, CgroupError> {
        make(&self.root.join(below))?;
        self.open(below)
    }

    fn open(&self, below: &Path) -> Result<Cgroup, CgroupError> {
        let path = self.root.join(below);
        let handle = Handle::load(Box::new(self.clone()), below);
        Cgroup::open(path.clone(), handle).map_err(io_at(&path))
    }
}

fn tenant_path(name: &str) -> PathBuf {
    Path::new("tenants").join(name)
}

/// What the library asks. Its own root is the whole host's tree, and what it makes there it enables everywhere.
impl Tree for Hierarchy {
    fn subsystems(&self) -> Vec<Subsystem> {
        let root = || self.root.clone();
        let subsystem = |controller: &Controller| match controller {
            Controller::Cpu => Subsystem::Cpu(CpuController::new(root(), true)),
            Controller::Cpuset => Subsystem::CpuSet(CpuSetController::new(root(), true)),
            Controller::Io => Subsystem::BlkIo(BlkIoController::new(root(), true)),
            Controller::Memory => Subsystem::Mem(MemController::new(root(), true)),
            Controller::Pids => Subsystem::Pid(PidController::new(root(), true)),
        };
        self.controllers.iter().map(subsystem).collect()
    }

    fn root(&self) -> PathBuf {
        self.root.clone()
    }

    fn root_control_group(&self) -> Handle {
        Handle::load(Box::new(self.clone()), "")
    }

    fn parent_control_group(&self, path: &str) -> Handle {
        Handle::load(Box::new(self.clone()), Path::new(path).parent().unwrap_or(Path::new("")))
    }

    fn v2(&self) -> bool {
        true
    }
}

/// The delegated directory: where this process is, or above that where an earlier daemon of the same keeper has divided it.
fn top(own: &Own) -> PathBuf {
    let above = own.dir.parent().filter(|_| own.dir.file_name().is_some_and(|name| name == "daemon"));
    let divided =
        |dir: &&Path| ["workers", "tenants", "templates"].iter().all(|group| dir.join(group).is_dir());
    above.filter(divided).unwrap_or(&own.dir).to_owned()
}

fn check_delegated(host: &Host<'_>, dir: &Path) -> Result<(), NoHierarchy> {
    let refused = |why| Err(NoHierarchy::NotDelegated { dir: dir.to_owned(), why });
    for file in ["", "cgroup.procs", "cgroup.subtree_control"] {
        if rustix::fs::access(dir.join(file), Access::WRITE_OK).is_err() {
            return refused(NotDelegated::ReadOnly);
        }
    }
    if (host.is_marked)(dir) {
        return Ok(());
    }
    // Whoever owns it: all that is below a user's own manager is that user's.
    if host.root.join("run/systemd/system").is_dir() {
        return refused(NotDelegated::Systemd);
    }
    if host.euid != 0 {
        let owner = rustix::fs::stat(dir).map_err(|e| io_at(dir)(e.into()))?.st_uid;
        return if owner == host.euid { Ok(()) } else { refused(NotDelegated::Foreign) };
    }
    // The root of a cgroup namespace has it.
    if !dir.join("cgroup.type").exists() {
        return refused(NotDelegated::Root);
    }
    Ok(())
}

/// Whether systemd has marked it as delegated.
fn is_marked(dir: &Path) -> bool {
    ["user.delegate", "trusted.delegate"].iter().any(|name| {
        let mut value = [0; 2];
        rustix::fs::getxattr(dir, *name, &mut value).is_ok_and(|length| &value[..length] == b"1")
    })
}

fn is_cgroup2(dir: &Path) -> bool {
    /// From the kernel's magic.h.
    const CGROUP2_SUPER_MAGIC: u64 = 0x6367_7270;
    rustix::fs::statfs(dir).is_ok_and(|found| found.f_type as u64 == CGROUP2_SUPER_MAGIC)
}

/// The process that holds this one's fds: its parent, where that runs the same program.
fn keeper(host: &Host<'_>) -> Option<String> {
    let program = |pid: &str| fs::read_link(host.root.join("proc").join(pid).join("exe")).ok();
    let parent = host.parent?.to_string();
    program(&parent).filter(|parent| Some(parent) == program("self").as_ref()).map(|_| parent)
}

fn procs(dir: &Path) -> Result<BTreeSet<String>, CgroupError> {
    let path = dir.join("cgroup.procs");
    let text = fs::read_to_string(&path).map_err(io_at(&path))?;
    Ok(text.split_ascii_whitespace().map(ToOwned::to_owned).collect())
}

/// Makes sure that no process is in `dir` but this one and its keeper.
///
/// One that is left there would let `cpu`, `cpuset` and `pids` be enabled and `memory` never.
fn alone(host: &Host<'_>, dir: &Path, keeper: Option<&str>) -> Result<(), NoHierarchy> {
    let (own, found) = (std::process::id().to_string(), procs(dir)?);
    let others = found.iter().filter(|pid| **pid != own && Some(pid.as_str()) != keeper);
    let name = |pid: &String| {
        let name = fs::read_to_string(host.root.join("proc").join(pid).join("comm")).unwrap_or_default();
        format!("{pid} ({})", name.trim_end())
    };
    let pids: Vec<_> = others.take(8).map(name).collect();
    if pids.is_empty() { Ok(()) } else { Err(NoHierarchy::NotAlone { dir: dir.to_owned(), pids }) }
}

fn listed(dir: &Path) -> Result<Vec<String>, CgroupError> {
    let path = dir.join("cgroup.controllers");
    let text = fs::read_to_string(&path).map_err(io_at(&path))?;
    Ok(text.split_ascii_whitespace().map(ToOwned::to_owned).collect())
}

/// Each by itself: one that the kernel does not know would take the others with it.
fn enable(dir: &Path, controllers: &[Controller]) -> Result<(), CgroupError> {
    let path = dir.join("cgroup.subtree_control");
    controllers
        .iter()
        .try_for_each(|controller| write_once(&path, &format!("+{}", controller.name())))
        .map_err(io_at(&path))
}

fn make(dir: &Path) -> Result<(), CgroupError> {
    match fs::create_dir(dir) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(io_at(dir)(error)),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// `pid` is "0" for the caller.
fn move_into(dir: &Path, pid: &str) -> Result<(), CgroupError> {
    let path = dir.join("cgroup.procs");
    write_once(&path, pid).map_err(io_at(&path))
}

/// One write(2): that is what the kernel answers.
fn write_once(path: &Path, text: &str) -> io::Result<()> {
    let file = fs::OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
    match rustix::io::write(&file, text.as_bytes())? {
        written if written == text.len() => Ok(()),
        _ => Err(io::Error::new(io::ErrorKind::WriteZero, "the kernel took a part only")),
    }
}

#[cfg(test)]
mod tests;
