//! What an account may hold of a pool: a floor like cgroup's `memory.min`, a ceiling like `memory.max`.
//!
//! **Owns** the numbers of one account. **Never** knows which blocks they are.

use std::collections::BTreeMap;

use pagedd_core::{BlockId, Blocks};

/// An account of one pool: a tenant, or a group of tenants that share blocks.
///
/// Having one tells you that the pool opened the account. It does not tell you that the account is still open. Ids are used
/// again after an account is closed and its last block is back.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct AccountId(pub(crate) u32);

impl AccountId {
    /// A small number, for tables with one entry per account.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Bounds of one account.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Share {
    /// Blocks that others cannot keep from the account. The floors of a pool sum to its capacity at most.
    pub floor: Blocks,
    /// Blocks that the account cannot exceed, cached ones included. More than the pool has is the pool.
    pub ceiling: Blocks,
}

/// A share that cannot be given. Nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ShareError {
    /// The floors would not fit the pool.
    #[error("floors would sum to {sum} blocks and the pool has {capacity}: lower a floor first")]
    FloorsExceedPool {
        /// Of all floors, with the new one.
        sum: u64,
        /// Of the pool.
        capacity: Blocks,
    },
    /// The floor is above the ceiling of the same account.
    #[error("floor {floor} is above ceiling {ceiling}: raise the ceiling or lower the floor")]
    FloorAboveCeiling {
        /// As asked.
        floor: Blocks,
        /// As asked.
        ceiling: Blocks,
    },
}

/// What an account has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Usage {
    /// Its bounds.
    pub share: Share,
    /// Blocks under at least one lease.
    pub held: Blocks,
    /// Blocks that only the prefix index keeps.
    pub cached: Blocks,
}

impl Usage {
    /// Held and cached: what floor and ceiling are measured against.
    #[must_use]
    pub fn used(&self) -> Blocks {
        self.held + self.cached
    }

    /// How many blocks the account has beyond its floor.
    #[must_use]
    pub fn over_floor(&self) -> Blocks {
        self.used().saturating_sub(self.share.floor)
    }

    /// How many blocks the account lacks of its floor.
    #[must_use]
    pub fn under_floor(&self) -> Blocks {
        self.share.floor.saturating_sub(self.used())
    }
}

/// The pool's record of one account.
#[derive(Debug)]
pub(crate) struct Account {
    pub share: Share,
    pub held: u32,
    /// Unreferenced cached blocks by the tick of their release: the first is the least recently used.
    pub cached: BTreeMap<u64, BlockId>,
    /// Closed: whatever returns is freed, and with the last block the record goes.
    pub closing: bool,
}

impl Account {
    pub fn new(share: Share) -> Self {
        Self { share, held: 0, cached: BTreeMap::new(), closing: false }
    }

    pub fn usage(&self) -> Usage {
        Usage { share: self.share, held: Blocks(self.held), cached: Blocks(self.cached.len() as u32) }
    }
}
