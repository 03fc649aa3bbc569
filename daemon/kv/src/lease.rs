//! One count on one block, as a value.

use pagedd_core::BlockId;

use crate::share::AccountId;

/// One block held by one owner.
///
/// Having a `BlockLease` tells you: the block is not free, and exactly one count stands for this value. It does not tell you
/// that the block is full, or that nobody shares it. Not `Clone`: a copy would be freed twice.
///
/// It goes back with [`crate::BlockPool::release`]. One that is dropped takes its block out of use, since nobody can say any
/// more who reads it; [`crate::BlockPool::check_leases`] finds it.
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

    /// Ends the value; the pool has taken the count.
    pub(crate) fn into_parts(self) -> (BlockId, AccountId) {
        (self.block, self.account)
    }
}
