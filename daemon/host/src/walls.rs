//! Which walls between tenants this host can enforce.
//!
//! **Owns** the finding: a delegated part of a pure cgroup v2 tree, or the reason why there is none. **Never** writes to it.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, AtFlags, CWD, accessat, getxattr};

use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, statfs};

use crate::cgroup::{Own, Tree, own};

/// Controllers without which a tenant cannot be limited.
const NEEDED: [&str; 3] = ["cpu", "memory", "pids"];

/// What can be enforced.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Walls {
    /// CPU, memory and number of processes, per tenant.
    Full(Delegated),
    /// Nothing: tenants are kept apart by processes, users and the KV shares only.
    Reduced(Reason),
}

/// A part of the cgroup tree that is ours to divide.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Delegated {
    /// The cgroup that this process was started in.
    pub dir: PathBuf,
    /// What it may hand to its children, in the kernel's order.
    pub controllers: Vec<String>,
}

/// Why limits are not enforced.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reason {
    /// No cgroup file system is mounted.
    NoCgroups,
    /// The v1 hierarchies are in use, without a unified one.
    V1,
    /// The unified hierarchy is there, but the controllers are on v1.
    Hybrid,
    /// The process may not divide its own cgroup.
    NotWritable {
        /// The cgroup's directory.
        dir: PathBuf,
    },
    /// systemd has not handed the cgroup over, and may take it apart at any time.
    NotDelegated {
        /// The cgroup's directory.
        dir: PathBuf,
    },
    /// Controllers are not available here.
    MissingControllers {
        /// The cgroup's directory.
        dir: PathBuf,
        /// Which.
        missing: Vec<String>,
    },
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoCgroups => {
                f.write_str("no cgroup file system is mounted: mount cgroup2 on /sys/fs/cgroup")
            }
            Self::V1 => f.write_str("this host uses cgroup v1: boot with systemd.unified_cgroup_hierarchy=1"),
            Self::Hybrid => f.write_str(
                "this host's controllers are on cgroup v1: boot with systemd.unified_cgroup_hierarchy=1",
            ),
            Self::NotWritable { dir } => {
                write!(f, "{} is not writable: start pagedd as a service with Delegate=yes", dir.display())
            }
            Self::NotDelegated { dir } => {
                write!(f, "{} is not delegated: start pagedd as a service with Delegate=yes", dir.display())
            }
            Self::MissingControllers { dir, missing } => write!(
                f,
                "{} lacks the controllers {}: enable them in the parent's cgroup.subtree_control",
                dir.display(),
                missing.join(", ")
            ),
        }
    }
}

impl Walls {
    /// `full` or `reduced`, as status shows it.
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Full(_) => "full",
            Self::Reduced(_) => "reduced",
        }
    }
}

/// Looks at this host.
pub fn detect() -> Walls {
    detect_under(Path::new("/"), |dir| {
        statfs(dir).is_ok_and(|fs| fs.filesystem_type() == CGROUP2_SUPER_MAGIC)
    })
}

fn detect_under(root: &Path, is_cgroup2: impl Fn(&Path) -> bool) -> Walls {
    match examine(root, is_cgroup2) {
        Ok(delegated) => Walls::Full(delegated),
        Err(reason) => Walls::Reduced(reason),
    }
}

fn examine(root: &Path, is_cgroup2: impl Fn(&Path) -> bool) -> Result<Delegated, Reason> {
    let top = root.join("sys/fs/cgroup");
    if !is_cgroup2(&top) {
        let v1 = fs::read_to_string(root.join("proc/self/cgroup"))
            .is_ok_and(|text| text.lines().any(|line| !line.starts_with("0::")));
        return Err(match (is_cgroup2(&top.join("unified")), v1) {
            (true, _) => Reason::Hybrid,
            (false, true) => Reason::V1,
            (false, false) => Reason::NoCgroups,
        });
    }
    let own = own(root, Tree::V2).ok_or(Reason::NoCgroups)?;
    let dir = own.dir.clone();
    if ![dir.clone(), dir.join("cgroup.procs"), dir.join("cgroup.subtree_control")]
        .iter()
        .all(|path| is_writable(path))
    {
        return Err(Reason::NotWritable { dir });
    }
    // Root can write anywhere; that is no leave to.
    if root.join("run/systemd/system").is_dir() && !is_delegated(&own) {
        return Err(Reason::NotDelegated { dir });
    }
    let controllers: Vec<String> = fs::read_to_string(dir.join("cgroup.controllers"))
        .unwrap_or_default()
        .split_ascii_whitespace()
        .map(str::to_owned)
        .collect();
    let missing: Vec<String> = NEEDED
        .into_iter()
        .filter(|needed| !controllers.iter().any(|name| name == needed))
        .map(str::to_owned)
        .collect();
    if missing.is_empty() {
        Ok(Delegated { dir, controllers })
    } else {
        Err(Reason::MissingControllers { dir, missing })
    }
}

fn is_writable(path: &Path) -> bool {
    accessat(CWD, path, Access::WRITE_OK, AtFlags::EACCESS).is_ok()
}

/// systemd marks the cgroup of a unit with Delegate=yes; this process may have moved to a leaf below.
fn is_delegated(own: &Own) -> bool {
    own.upwards().any(|dir| {
        ["user.delegate", "trusted.delegate"].into_iter().any(|name| {
            let mut value = [0; 8];
            getxattr(dir, name, &mut value).is_ok_and(|length| value[..length] == *b"1")
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::tests::{FakeRoot, V2_MOUNT};

    fn unified(controllers: &str) -> FakeRoot {
        let root = FakeRoot::new("0::/pagedd\n", V2_MOUNT);
        root.file("sys/fs/cgroup/pagedd/cgroup.procs", "");
        root.file("sys/fs/cgroup/pagedd/cgroup.subtree_control", "");
        root.file("sys/fs/cgroup/pagedd/cgroup.controllers", controllers);
        root
    }

    fn detect_unified(root: &FakeRoot) -> Walls {
        let top = root.path().join("sys/fs/cgroup");
        detect_under(root.path(), |dir| dir == top)
    }

    #[test]
    fn a_writable_unified_tree_without_systemd_is_full() {
        let root = unified("cpuset cpu io memory pids\n");
        let dir = root.path().join("sys/fs/cgroup/pagedd");
        let controllers = ["cpuset", "cpu", "io", "memory", "pids"].map(str::to_owned).to_vec();
        assert_eq!(detect_unified(&root), Walls::Full(Delegated { dir, controllers }));
    }

    #[test]
    fn missing_controllers_are_named() {
        let root = unified("cpuset cpu\n");
        let Walls::Reduced(reason) = detect_unified(&root) else { panic!("full") };
        assert!(reason.to_string().contains("memory, pids"), "{reason}");
    }

    #[test]
    fn under_systemd_an_unmarked_cgroup_is_not_ours_even_as_root() {
        let root = unified("cpu memory pids\n");
        root.file("run/systemd/system/x", "");
        assert!(matches!(detect_unified(&root), Walls::Reduced(Reason::NotDelegated { .. })));
    }

    #[test]
    fn a_missing_control_file_is_not_writable() {
        let root = FakeRoot::new("0::/pagedd\n", V2_MOUNT);
        assert!(matches!(detect_unified(&root), Walls::Reduced(Reason::NotWritable { .. })));
    }

    #[test]
    fn hybrid_v1_and_nothing_are_told_apart() {
        let v1 = "3:cpu:/\n0::/\n";
        let root = FakeRoot::new(v1, "");
        let unified = root.path().join("sys/fs/cgroup/unified");
        assert_eq!(detect_under(root.path(), |dir| dir == unified), Walls::Reduced(Reason::Hybrid));
        assert_eq!(detect_under(root.path(), |_| false), Walls::Reduced(Reason::V1));
        let bare = FakeRoot::new("", "");
        assert_eq!(detect_under(bare.path(), |_| false), Walls::Reduced(Reason::NoCgroups));
    }

    #[test]
    fn this_host_can_be_looked_at() {
        assert!(["full", "reduced"].contains(&detect().as_str()));
    }
}
