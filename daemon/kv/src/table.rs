//! A sequence's blocks in order.
//!
//! **Owns** the leases of one sequence, and which of its blocks it may write. **Never** knows tokens, or how far a block is
//! filled.
//!
//! Blocks `[0, owned_from)` came from somebody else and are read only; blocks `[owned_from, len)` are this table's to append to.
//! Others may read an owned block as far as it was filled when they got it: appending behind that does not disturb them.

use pagedd_core::{BlockId, Blocks};

use crate::buddy::Place;
use crate::lease::BlockLease;
use crate::pool::{AllocError, BlockPool};

/// What making a block writable took.
#[derive(Debug)]
#[must_use = "the lease in it must be kept until the copy is made"]
pub enum CopyOnWrite {
    /// Nothing: the table owned the block, or was its last reader and owns it now.
    InPlace,
    /// The table has `to` now. The contents must be copied from the block of `from`, whose lease is to be kept until then.
    Copied {
        /// The block read before, with the count that the table had on it.
        from: BlockLease,
        /// The table's new block.
        to: BlockId,
    },
}

/// A sequence's blocks in order. Released, not dropped: see [`BlockLease`].
#[derive(Debug, Default)]
pub struct BlockTable {
    leases: Vec<BlockLease>,
    owned_from: usize,
}

impl BlockTable {
    /// No blocks.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// How many blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.leases.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.leases.is_empty()
    }

    /// The leases, in order.
    pub fn leases(&self) -> &[BlockLease] {
        &self.leases
    }

    /// The block ids of entries `[from, len)`.
    #[must_use]
    pub fn blocks_from(&self, from: usize) -> Vec<BlockId> {
        self.leases.iter().skip(from).map(BlockLease::block).collect()
    }

    /// Where the next block should lie: behind the last one, or at the start of a run that holds `expected` blocks.
    #[must_use]
    pub fn next_place(&self, expected: Blocks) -> Place {
        self.leases.last().map_or(Place::Run(expected), |lease| Place::After(lease.block()))
    }

    /// Appends a block of the table's own.
    pub fn push(&mut self, lease: BlockLease) {
        self.leases.push(lease);
    }

    /// Appends a block that is read only here. Only behind other such blocks.
    pub fn push_shared(&mut self, lease: BlockLease) {
        debug_assert_eq!(self.owned_from, self.leases.len(), "a shared block behind an owned one");
        self.leases.push(lease);
        self.owned_from = self.leases.len();
    }

    /// A second table of the same blocks, all read only there.
    #[must_use]
    pub fn fork(&self, pool: &mut BlockPool) -> Self {
        self.share_prefix(self.leases.len(), pool)
    }

    /// A table of the first `n` blocks (or of all, where there are fewer), all read only there.
    #[must_use]
    pub fn share_prefix(&self, n: usize, pool: &mut BlockPool) -> Self {
        let leases: Vec<_> = self.leases.iter().take(n).map(|lease| pool.share(lease)).collect();
        Self { owned_from: leases.len(), leases }
    }

    /// A table of the blocks at these indices, in this order, all read only there; indices past the end are left out.
    #[must_use]
    pub fn share_blocks(&self, indices: &[usize], pool: &mut BlockPool) -> Self {
        let chosen = indices.iter().filter_map(|&i| self.leases.get(i));
        let leases: Vec<_> = chosen.map(|lease| pool.share(lease)).collect();
        Self { owned_from: leases.len(), leases }
    }

    /// Whether writing the block at `index` needs a block more.
    #[must_use]
    pub fn needs_copy(&self, index: usize, pool: &BlockPool) -> bool {
        index < self.owned_from && self.leases.get(index).is_some_and(|lease| pool.count(lease.block()) > 1)
    }

    /// Makes the blocks `[index, len)` writable, of which at most the first is read only.
    ///
    /// A block with no other reader is taken over, and leaves the prefix index; a shared one is replaced by `fresh`, which is
    /// called only then.
    ///
    /// # Errors
    /// What `fresh` says; nothing has changed.
    pub fn make_writable(
        &mut self,
        index: usize,
        pool: &mut BlockPool,
        fresh: impl FnOnce(&mut BlockPool) -> Result<BlockLease, AllocError>,
    ) -> Result<CopyOnWrite, AllocError> {
        if index >= self.owned_from {
            return Ok(CopyOnWrite::InPlace);
        }
        debug_assert_eq!(index + 1, self.owned_from, "only the last shared block is written");
        let outcome = if pool.count(self.leases[index].block()) == 1 {
            pool.uncommit(&self.leases[index]);
            CopyOnWrite::InPlace
        } else {
            let lease = fresh(pool)?;
            let to = lease.block();
            CopyOnWrite::Copied { from: std::mem::replace(&mut self.leases[index], lease), to }
        };
        self.owned_from = index;
        Ok(outcome)
    }

    /// Takes back a [`CopyOnWrite::Copied`] whose copy was never made: the block at `index` is `from` again, read only.
    pub fn undo_copy(&mut self, index: usize, from: BlockLease, pool: &mut BlockPool) {
        pool.release(std::mem::replace(&mut self.leases[index], from));
        self.owned_from = index + 1;
    }

    /// Releases the blocks `[n, len)`, tail first.
    pub fn truncate(&mut self, n: usize, pool: &mut BlockPool) {
        while self.leases.len() > n {
            if let Some(lease) = self.leases.pop() {
                pool.release(lease);
            }
        }
        self.owned_from = self.owned_from.min(n);
    }

    /// Releases all blocks, tail first, so that of a cached chain the head is evicted last.
    pub fn release(mut self, pool: &mut BlockPool) {
        self.truncate(0, pool);
    }
}
