//! What earlier daemons left in the tree, and its end.
//!
//! **Owns** which cgroups this daemon uses, so that none of them is taken for an old one. **Never** ends a process that this daemon
//! started: those that were there before it are known one by one.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::Pid;
use tracing::warn;

use super::{CgroupError, DEATH, Hierarchy};
use crate::pidfd::Pidfd;

/// Who has which cgroup, by its path below the delegated directory.
#[derive(Default, Debug)]
pub(super) struct Claims {
    held: Mutex<Held>,
    changed: Condvar,
}

#[derive(Default, Debug)]
struct Held {
    /// Of this daemon, for good: what it is done with it removes itself.
    used: BTreeSet<PathBuf>,
    /// Being removed.
    going: BTreeSet<PathBuf>,
}

impl Claims {
    /// It is this daemon's from now on. Waits where it is being removed, which has a bound.
    pub(super) fn claim(&self, path: &Path) {
        let mut held = self.held();
        held.used.insert(path.to_owned());
        let going = |held: &mut Held| held.going.contains(path);
        drop(self.changed.wait_while(held, going).unwrap_or_else(PoisonError::into_inner));
    }

    fn used(&self, path: &Path) -> bool {
        self.held().used.contains(path)
    }

    /// Does `work` unless the daemon uses it; who wants to use it waits meanwhile.
    fn unless_used<T>(&self, path: &Path, work: impl FnOnce() -> T) -> Option<T> {
        {
            let mut held = self.held();
            if held.used.contains(path) || !held.going.insert(path.to_owned()) {
                return None;
            }
        }
        let done = work();
        self.held().going.remove(path);
        self.changed.notify_all();
        Some(done)
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        // Nothing under the lock panics.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Processes of an earlier daemon.
#[derive(Default, Debug)]
pub struct Left(Vec<Pidfd>);

impl Left {
    /// Gives them until `deadline` to end by themselves, then kills those that did not.
    fn end(&self, deadline: Instant) {
        let hangs = |process: &&Pidfd| {
            let left = deadline.saturating_duration_since(Instant::now());
            !matches!(process.wait_gone(left), Ok(true))
        };
        for process in self.0.iter().filter(hangs) {
            warn!("a process of an earlier daemon does not end; it is killed");
            if let Err(error) = process.kill() {
                warn!(%error, "a process of an earlier daemon stays");
            }
        }
    }
}

impl Hierarchy {
    /// The gateways and template processes that are there: those of earlier daemons, as long as this one has started none.
    pub fn left(&self) -> Left {
        let cgroups = self.below("tenants").into_iter().chain([PathBuf::from("templates")]);
        Left(cgroups.flat_map(|below| processes(&self.root.join(below))).collect())
    }

    /// Ends what earlier daemons left: the processes `left`, wherever they are, and all cgroups of tenants and workers that this daemon does not
    /// use. They are given `patience`, all together, to end by themselves: a gateway whose daemon died still tells its clients. Blocks for as long.
    pub fn sweep(&self, left: &Left, patience: Duration) {
        let deadline = Instant::now() + patience;
        let old = ["tenants", "workers"].map(|group| self.below(group)).concat();
        left.end(deadline);
        for name in old.iter().filter(|name| !self.claims.used(name)) {
            self.await_empty(name, deadline);
            // It may have come into use meanwhile.
            self.claims.unless_used(name, || self.remove(name));
        }
    }

    /// Ends whoever is in cgroups of tenants and workers, and removes them all. Nothing is started meanwhile.
    pub fn clear(&self) {
        ["tenants", "workers"]
            .map(|group| self.below(group))
            .concat()
            .iter()
            .for_each(|name| self.remove(name));
    }

    fn await_empty(&self, name: &Path, deadline: Instant) {
        let left = deadline.saturating_duration_since(Instant::now());
        // What cannot be waited for cannot be removed either, and that is said.
        drop(self.open(name).and_then(|cgroup| cgroup.wait_empty(left)));
    }

    fn remove(&self, name: &Path) {
        let gone = self.open(name).and_then(|cgroup| {
            if !cgroup.wait_empty(Duration::ZERO)? {
                warn!(cgroup = %name.display(), "processes that are left are killed");
            }
            cgroup.remove(DEATH)
        });
        match gone {
            Ok(()) => {}
            // Whoever it was of has removed it.
            Err(CgroupError::Io { .. }) if !self.root.join(name).exists() => {}
            Err(error) => warn!(cgroup = %name.display(), %error, "an old cgroup stays"),
        }
    }

    /// The cgroups in a group, by their paths below the delegated directory.
    fn below(&self, group: &str) -> Vec<PathBuf> {
        match fs::read_dir(self.root.join(group)) {
            Ok(entries) => {
                let folders = entries.filter_map(|entry| entry.ok().filter(|e| e.path().is_dir()));
                folders.map(|entry| Path::new(group).join(entry.file_name())).collect()
            }
            Err(error) => {
                warn!(group, %error, "old cgroups cannot be listed");
                Vec::new()
            }
        }
    }
}

/// The processes in a cgroup. One that ends meanwhile is left out, and so is whatever gets its number.
fn processes(dir: &Path) -> Vec<Pidfd> {
    let listed = || super::procs(dir).unwrap_or_default();
    let open = |pid: String| Some((Pidfd::open(Pid::from_raw(pid.parse().ok()?)?).ok()?, pid));
    let opened: Vec<_> = listed().into_iter().filter_map(open).collect();
    let still = listed();
    opened.into_iter().filter(|(_, pid)| still.contains(pid)).map(|(process, _)| process).collect()
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::sync_channel;
    use std::thread;

    use super::*;

    #[test]
    fn a_cgroup_that_is_used_is_not_removed_and_one_that_is_being_removed_is_waited_for() {
        let claims = Claims::default();
        let (a, b) = (Path::new("tenants/a"), Path::new("tenants/b"));
        claims.claim(a);
        assert_eq!(
            claims.unless_used(a, || panic!("removed")),
            None::<()>,
            "it came into use before the sweep"
        );
        let removed = AtomicBool::new(false);
        let (began, begun) = sync_channel(1);
        let (go, gone) = sync_channel(1);
        thread::scope(|scope| {
            let (claims, removed) = (&claims, &removed);
            let removal = move || {
                began.send(()).unwrap();
                gone.recv().unwrap();
                removed.store(true, Ordering::SeqCst);
            };
            let sweep = scope.spawn(move || claims.unless_used(b, removal));
            begun.recv().unwrap();
            claims.claim(Path::new("tenants/c"));
            let user = scope.spawn(move || {
                claims.claim(b);
                removed.load(Ordering::SeqCst)
            });
            go.send(()).unwrap();
            assert!(user.join().unwrap(), "it was made anew before the old one was gone");
            assert_eq!(sweep.join().unwrap(), Some(()));
        });
        assert_eq!(claims.unless_used(b, || panic!("removed")), None::<()>);
    }

    #[test]
    fn processes_that_were_there_before_end_also_in_a_cgroup_that_is_used_and_later_ones_stay() {
        let root = super::super::tests::service("cpu memory");
        let hierarchy = Hierarchy::take_on(&super::super::tests::host(&root)).unwrap();
        let start = || Command::new("sleep").arg("600").stdin(Stdio::null()).spawn().unwrap();
        let (mut old, mut template, mut new) = (start(), start(), start());
        let put = |cgroup: &str, pids: &[u32]| {
            let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
            fs::create_dir_all(hierarchy.root().join(cgroup)).unwrap();
            fs::write(hierarchy.root().join(cgroup).join("cgroup.procs"), pids.join("\n") + "\n").unwrap();
        };
        put("tenants/a", &[old.id()]);
        put("templates", &[template.id()]);
        let left = hierarchy.left();
        hierarchy.tenant("a").unwrap();
        put("tenants/a", &[old.id(), new.id()]);
        hierarchy.sweep(&left, Duration::ZERO);
        for process in [&mut old, &mut template] {
            assert!(!process.wait().unwrap().success());
        }
        assert_eq!(new.try_wait().unwrap(), None, "this daemon's own");
        assert!(hierarchy.root().join("tenants/a").is_dir());
        new.kill().unwrap();
        new.wait().unwrap();
    }
}
