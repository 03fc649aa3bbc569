//! User ids for tenants, out of a range that the configuration sets aside.
//!
//! **Owns** which ids are given out. **Never** gives one to a tenant while a process of an earlier one still runs under it.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use crate::Identity;

/// Why there is no id.
#[derive(thiserror::Error, Debug)]
pub enum IdentityError {
    /// Every id is given out, or has a process.
    #[error("all {} user ids from {} to {} are in use: widen `tenant_uids`", u64::from(*range.end()) - u64::from(*range.start()) + 1, range.start(), range.end())]
    Exhausted {
        /// The configured range.
        range: RangeInclusive<u32>,
    },
    /// The range contains an id that is nobody's to give.
    #[error("user ids {} to {} cannot be given to tenants: the range must be in order, above 0 and below 4294967295", range.start(), range.end())]
    Range {
        /// As configured.
        range: RangeInclusive<u32>,
    },
    /// Processes cannot be listed, so no id is known to be free.
    #[error("cannot list processes: {0}")]
    Processes(io::Error),
}

/// Gives out user ids. The group id is the same number.
#[derive(Debug)]
pub struct Identities {
    range: RangeInclusive<u32>,
    given: BTreeSet<u32>,
    /// Where the search begins: an id that was just released rests as long as there are others.
    next: u32,
    proc: PathBuf,
}

impl Identities {
    /// An allocator over `range`.
    pub fn new(range: RangeInclusive<u32>) -> Result<Self, IdentityError> {
        Self::over(range, Path::new("/proc"))
    }

    fn over(range: RangeInclusive<u32>, proc: &Path) -> Result<Self, IdentityError> {
        let (first, last) = (*range.start(), *range.end());
        // 0 is root; the largest number means "unchanged" to setresuid.
        if range.is_empty() || first == 0 || last == u32::MAX {
            return Err(IdentityError::Range { range });
        }
        Ok(Self { range, given: BTreeSet::new(), next: first, proc: proc.to_owned() })
    }

    /// An id that no tenant and no process has.
    pub fn allocate(&mut self) -> Result<Identity, IdentityError> {
        let running = running_uids(&self.proc).map_err(IdentityError::Processes)?;
        let (first, last) = (*self.range.start(), *self.range.end());
        let uid = (self.next..=last)
            .chain(first..self.next)
            .find(|uid| !self.given.contains(uid) && !running.contains(uid))
            .ok_or_else(|| IdentityError::Exhausted { range: self.range.clone() })?;
        self.given.insert(uid);
        self.next = if uid == last { first } else { uid + 1 };
        Ok(Identity { uid, gid: uid })
    }

    /// Takes an id back. It is given out again once its last process is gone.
    pub fn release(&mut self, identity: Identity) {
        self.given.remove(&identity.uid);
    }
}

/// Real, effective, saved and file system user ids of all processes.
fn running_uids(proc: &Path) -> io::Result<BTreeSet<u32>> {
    let mut uids = BTreeSet::new();
    for entry in fs::read_dir(proc)? {
        let entry = entry?;
        if !entry.file_name().as_encoded_bytes().iter().all(u8::is_ascii_digit) {
            continue;
        }
        // A process that ended meanwhile has no ids.
        let Ok(status) = fs::read_to_string(entry.path().join("status")) else { continue };
        if let Some(line) = status.lines().find_map(|line| line.strip_prefix("Uid:")) {
            uids.extend(line.split_ascii_whitespace().filter_map(|uid| uid.parse::<u32>().ok()));
        }
    }
    Ok(uids)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(proc: &Path, pid: u32, uid: u32) {
        let dir = proc.join(pid.to_string());
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("status"), format!("Name:\tx\nUid:\t0\t{uid}\t0\t0\nGid:\t0\t0\t0\t0\n")).unwrap();
    }

    #[test]
    fn an_id_that_a_process_has_is_not_given_out_until_it_is_gone() {
        let proc = tempfile::tempdir().unwrap();
        process(proc.path(), 5, 100);
        let mut ids = Identities::over(100..=101, proc.path()).unwrap();
        let id = ids.allocate().unwrap();
        assert_eq!(id, Identity { uid: 101, gid: 101 });
        assert!(matches!(ids.allocate(), Err(IdentityError::Exhausted { .. })));

        ids.release(id);
        process(proc.path(), 6, 101);
        assert!(matches!(ids.allocate(), Err(IdentityError::Exhausted { .. })));
        fs::remove_dir_all(proc.path().join("6")).unwrap();
        assert_eq!(ids.allocate().unwrap().uid, 101);
    }

    #[test]
    fn a_released_id_rests_while_there_are_others() {
        let proc = tempfile::tempdir().unwrap();
        let mut ids = Identities::over(100..=102, proc.path()).unwrap();
        let mut given = Vec::new();
        for _ in 0..4 {
            let id = ids.allocate().unwrap();
            given.push(id.uid);
            ids.release(id);
        }
        assert_eq!(given, [100, 101, 102, 100]);
    }

    #[test]
    fn a_range_with_root_or_the_reserved_id_is_refused() {
        #[allow(clippy::reversed_empty_ranges)]
        for range in [0..=5, 7..=6, 5..=u32::MAX] {
            assert!(matches!(Identities::new(range), Err(IdentityError::Range { .. })));
        }
    }

    #[test]
    fn processes_of_this_host_can_be_listed() {
        let own = nix::unistd::getuid().as_raw();
        assert!(running_uids(Path::new("/proc")).unwrap().contains(&own));
    }
}
