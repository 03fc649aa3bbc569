//! The cgroups of a model's workers.
//!
//! **Owns** one leaf for each worker process. **Never** calls a worker gone that may still run.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use pagedd_host::hierarchy::{Cgroup, CgroupError, Hierarchy};
use tracing::warn;

use super::DEATH;

/// Where a model's workers belong.
pub struct WorkerCgroup {
    hierarchy: Hierarchy,
    all: Cgroup,
    starts: AtomicU32,
}

impl WorkerCgroup {
    /// That of a model.
    pub fn new(hierarchy: Hierarchy, model: &str) -> Result<Self, CgroupError> {
        let all = hierarchy.workers(model, 0)?;
        Ok(Self { hierarchy, all, starts: AtomicU32::new(0) })
    }

    /// A leaf for the next worker.
    pub fn next(&self) -> Result<WorkerLeaf, CgroupError> {
        let start = self.starts.fetch_add(1, Ordering::Relaxed) + 1;
        self.hierarchy.worker(&self.all, start).map(WorkerLeaf)
    }

    /// Proves that no worker of an earlier daemon is left.
    ///
    /// # Errors
    /// One may still run. Cgroups that are left without a process are no error.
    pub fn settle(&self) -> Result<(), CgroupError> {
        self.all.end(DEATH)?;
        if let Err(error) = self.all.clear(DEATH) {
            warn!(%error, "the cgroup of a worker that is gone stays");
        }
        Ok(())
    }

    /// Memory that all of them are charged with. Reads a file.
    pub fn memory(&self) -> Option<u64> {
        self.all.memory().map(|bytes| bytes.0)
    }
}

/// The cgroup of one worker process, which goes with it.
#[derive(Debug)]
pub struct WorkerLeaf(Cgroup);

impl WorkerLeaf {
    /// For the process that is to be in it.
    pub fn fd(&self) -> io::Result<OwnedFd> {
        self.0.fd()
    }

    /// Kills whatever is in it and proves it gone.
    pub fn end(&self) -> Result<(), CgroupError> {
        self.0.end(DEATH)
    }
}

impl Drop for WorkerLeaf {
    fn drop(&mut self) {
        if let Err(error) = self.0.remove(Duration::from_secs(1)) {
            warn!(%error, "a worker's cgroup stays");
        }
    }
}
