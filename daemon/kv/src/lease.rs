//! One count on one block, as a value.

use std::sync::atomic::{AtomicU64, Ordering};

use pagedd_core::BlockId;

use crate::share::AccountId;

static DROPPED: AtomicU64 = AtomicU64::new(0);

/// How many leases of this process were dropped instead of released. Anything but 0 is a bug: their blocks stay held for the
/// life of their pool.
#[must_use]
pub fn dropped_leases() -> u64 {
    DROPPED.load(Ordering::Relaxed)
}

/// One block held by one owner.
///
/// Having a `BlockLease` tells you: the block is not free, and exactly one count stands for this value. It does not tell you
/// that the block is full, or that nobody shares it. Not `Clone`: a copy would be freed twice.
///
/// It goes back with [`crate::BlockPool::release`]. One that is dropped takes its block out of use, since nobody can say any
/// more who reads it; debug builds panic.
#[must_use = "a dropped lease is a leaked block"]
#[derive(Debug)]
pub struct BlockLease {
    block: BlockId,
    account: AccountId,
}

impl BlockLease {
    pub(crate) fn new(block: BlockId, account: AccountId) -> Self {
        Self { block, account }
    }

    /// The block.
    #[must_use]
    pub fn block(&self) -> BlockId {
        self.block
    }

    /// Whose share it counts against.
    #[must_use]
    pub fn account(&self) -> AccountId {
        self.account
    }

    /// Ends the value without the alarm; the pool has taken the count.
    pub(crate) fn defuse(self) -> (BlockId, AccountId) {
        let parts = (self.block, self.account);
        std::mem::forget(self);
        parts
    }
}

impl Drop for BlockLease {
    fn drop(&mut self) {
        DROPPED.fetch_add(1, Ordering::Relaxed);
        debug_assert!(std::thread::panicking(), "the lease of {} was dropped, not released", self.block);
    }
}
