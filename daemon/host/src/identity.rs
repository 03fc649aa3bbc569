//! User ids for tenants, out of a range that the configuration sets aside.
//!
//! **Owns** which ids are given out. **Never** gives one to a tenant while a process of an earlier one still runs under it.

use std::collections::BTreeSet;
use std::io;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use rustix::process::Uid;

use crate::Identity;

/// Why there is no id.
#[derive(thiserror::Error, Debug)]
pub enum IdentityError {
    /// Every id is given out.
    #[error("all {} user ids from {} to {} are in use: widen `tenant_uids`", u64::from(*range.end()) - u64::from(*range.start()) + 1, range.start(), range.end())]
    Exhausted {
        /// The configured range.
        range: RangeInclusive<u32>,
    },
    /// Every id is given out, or has processes of somebody who had it before.
    #[error("all user ids from {} to {} that are not given out have processes still", range.start(), range.end())]
    Occupied {
        /// The configured range.
        range: RangeInclusive<u32>,
    },
    /// The range contains an id that is nobody's to give.
    #[error("user ids {} to {} cannot be given to tenants: the range must be in order, above 0 and below 4294967295", range.start(), range.end())]
    Range {
        /// As configured.
        range: RangeInclusive<u32>,
    },
    /// The kernel does not tell whether an id has processes, so that none is known to be free.
    #[error("processes of a user cannot be looked for: {0}")]
    Processes(io::Error),
}

/// Whether a process has this user id.
type HasProcess = fn(u32) -> io::Result<bool>;

/// Gives out user ids. The group id is the same number.
#[derive(Debug)]
pub struct Identities {
    range: RangeInclusive<u32>,
    given: BTreeSet<u32>,
    /// Where the search begins: an id that was just released rests as long as there are others.
    next: u32,
    has_process: HasProcess,
}

impl Identities {
    /// An allocator over `range`.
    pub fn new(range: RangeInclusive<u32>) -> Result<Self, IdentityError> {
        Self::over(range, has_process)
    }

    fn over(range: RangeInclusive<u32>, has_process: HasProcess) -> Result<Self, IdentityError> {
        let (first, last) = (*range.start(), *range.end());
        // 0 is root; the largest number means "unchanged" to setresuid.
        if range.is_empty() || first == 0 || last == u32::MAX {
            return Err(IdentityError::Range { range });
        }
        Ok(Self { range, given: BTreeSet::new(), next: first, has_process })
    }

    /// An id that no tenant and no process has.
    fn allocate(&mut self) -> Result<Identity, IdentityError> {
        let (first, last) = (*self.range.start(), *self.range.end());
        for uid in (self.next..=last).chain(first..self.next) {
            if self.given.contains(&uid) || (self.has_process)(uid).map_err(IdentityError::Processes)? {
                continue;
            }
            self.given.insert(uid);
            self.next = if uid == last { first } else { uid + 1 };
            return Ok(Identity { uid, gid: uid });
        }
        let range = self.range.clone();
        let given = self.given.len() as u64 > u64::from(last - first);
        Err(if given { IdentityError::Exhausted { range } } else { IdentityError::Occupied { range } })
    }

    /// Takes an id back. It is given out again once its last process is gone.
    fn release(&mut self, identity: Identity) {
        self.given.remove(&identity.uid);
    }
}

/// All ids, for those who lend them.
#[derive(Clone, Debug)]
pub struct Lender(Arc<Mutex<Identities>>);

/// A user that one tenant has, with all that may still start as it: taken back with the last of them.
#[derive(Debug)]
pub struct Lent {
    identity: Identity,
    lender: Lender,
}

impl Lender {
    /// Lends out of these.
    #[must_use]
    pub fn new(identities: Identities) -> Self {
        Self(Arc::new(Mutex::new(identities)))
    }

    /// An id that no tenant and no process has.
    ///
    /// # Errors
    /// [`IdentityError`]
    pub fn lend(&self) -> Result<Arc<Lent>, IdentityError> {
        let identity = self.identities().allocate()?;
        Ok(Arc::new(Lent { identity, lender: self.clone() }))
    }

    fn identities(&self) -> MutexGuard<'_, Identities> {
        // Nothing under the lock panics.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lent {
    /// Which.
    #[must_use]
    pub const fn identity(&self) -> Identity {
        self.identity
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.lender.identities().release(self.identity);
    }
}

/// Asks for the priority of a user's processes: the kernel knows at once that there is none, whatever else runs. A process of a tenant has one id
/// as its real, effective and saved one, and no way to another.
fn has_process(uid: u32) -> io::Result<bool> {
    match rustix::process::getpriority_user(Uid::from_raw(uid)) {
        Ok(_) => Ok(true),
        Err(Errno::SRCH) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_that_a_process_has_is_not_given_out_until_it_is_gone() {
        let mut ids = Identities::over(100..=101, |uid| Ok(uid == 100)).unwrap();
        let id = ids.allocate().unwrap();
        assert_eq!(id, Identity { uid: 101, gid: 101 });
        assert!(matches!(ids.allocate(), Err(IdentityError::Occupied { .. })));

        ids.release(id);
        ids.has_process = |_| Ok(true);
        assert!(matches!(ids.allocate(), Err(IdentityError::Occupied { .. })));
        ids.has_process = |uid| Ok(uid == 100);
        assert_eq!(ids.allocate().unwrap().uid, 101);
    }

    #[test]
    fn a_lent_id_is_back_with_the_last_who_has_it() {
        let lender = Lender::new(Identities::over(100..=100, |_| Ok(false)).unwrap());
        let lent = lender.lend().unwrap();
        let queued = lent.clone();
        drop(lent);
        assert!(matches!(lender.lend(), Err(IdentityError::Exhausted { .. })));
        drop(queued);
        assert_eq!(lender.lend().unwrap().identity().uid, 100);
    }

    #[test]
    fn no_id_is_free_where_the_kernel_does_not_tell() {
        let mut ids = Identities::over(100..=101, |_| Err(Errno::PERM.into())).unwrap();
        assert!(matches!(ids.allocate(), Err(IdentityError::Processes(_))));
    }

    #[test]
    fn a_released_id_rests_while_there_are_others() {
        let mut ids = Identities::over(100..=102, |_| Ok(false)).unwrap();
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
    fn the_user_of_this_process_has_one_and_an_id_that_nobody_has_has_none() {
        assert!(has_process(nix::unistd::getuid().as_raw()).unwrap());
        assert!(!has_process(3_999_999_999).unwrap());
    }
}
