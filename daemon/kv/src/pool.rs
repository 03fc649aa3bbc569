//! The block pool: who holds which KV block, and nothing else.
//!
//! **Owns** the count of every block and account, and the index of committed prefixes. **Never** touches device memory, a
//! clock, a lock or a channel, and takes a block from nobody unasked: [`BlockPool::evict`] names the account that gives.
//!
//! ```text
//!             allocate                 release of the last lease
//!   Free ───────────────────▶ Held ─────────────────────────────▶ Free      (not committed)
//!    ▲                         ▲ └───────────────────────────────▶ Cached   (committed)
//!    │          evict          └───────────── acquire ──────────────┘
//!    └──────────────────────────────────────────────────────────────┘
//! ```

use pagedd_core::{BlockId, Blocks, TokenId};

use crate::buddy::{BuddyOrders, Place};
use crate::lease::BlockLease;
use crate::prefix::{BlockKey, PrefixCache};
use crate::share::{Account, AccountId, Share, ShareError, Usage};

/// A block could not be had. Nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AllocError {
    /// Waiting does not help: the account must free or evict blocks of its own.
    #[error("the account has {used} of {ceiling} blocks")]
    OverCeiling {
        /// Held and cached.
        used: Blocks,
        /// Its ceiling.
        ceiling: Blocks,
    },
    /// Evicting, preempting or waiting helps: no block is free.
    #[error("no block of the pool is free")]
    Exhausted,
}

/// The pool is not what it must be: a bug, found by `check`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Violation {
    /// I8, first half.
    #[error("free {free} + cached {cached} + held {held} is not capacity {capacity}")]
    Sum {
        /// Blocks in the buddy orders.
        free: Blocks,
        /// Unreferenced committed blocks.
        cached: Blocks,
        /// Blocks under lease.
        held: Blocks,
        /// All blocks.
        capacity: Blocks,
    },
    /// I8, second half: an account's numbers are not those of its blocks.
    #[error(
        "{account:?} counts held {held} and cached {cached}, its blocks say {found_held} and {found_cached}"
    )]
    Account {
        /// Whose.
        account: AccountId,
        /// As counted.
        held: Blocks,
        /// As counted.
        cached: Blocks,
        /// Of its blocks.
        found_held: Blocks,
        /// Of its blocks.
        found_cached: Blocks,
    },
    /// The free runs are not aligned, not joined, or not those blocks that nobody has.
    #[error("the buddy orders say {orders} free blocks, the blocks say {blocks}")]
    Orders {
        /// As the orders say.
        orders: Blocks,
        /// As the blocks say.
        blocks: Blocks,
    },
    /// A block and the prefix index disagree.
    #[error("{block} and the prefix index disagree")]
    Index {
        /// Which.
        block: BlockId,
    },
    /// A block's count is not the number of its leases.
    #[error("{block} has count {count} and {leases} leases")]
    Count {
        /// Which.
        block: BlockId,
        /// As the pool says.
        count: u32,
        /// As its holders say.
        leases: u32,
    },
    /// More blocks than the ceiling allows.
    #[error("{account:?} has {used} blocks, its ceiling is {ceiling}")]
    Ceiling {
        /// Whose.
        account: AccountId,
        /// Held and cached.
        used: Blocks,
        /// Its ceiling.
        ceiling: Blocks,
    },
}

/// How much of a chain of keys is in the index.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CachedPrefix {
    /// Blocks found, from the chain's head on.
    pub blocks: u32,
    /// How many of them nobody holds: holding them takes them out of what can be evicted.
    pub unreferenced: u32,
    /// Somebody holds the last of them.
    pub last_is_held: bool,
}

/// What happened to the contents of a block, for a ledger of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BlockChange {
    /// It may be written from now on, or is not to be found any more.
    Cleared(BlockId),
    /// It was entered into the index.
    Committed {
        /// Which.
        block: BlockId,
        /// Whose.
        account: AccountId,
        /// Under which key.
        key: BlockKey,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Slot {
    Free,
    Held { account: AccountId, count: u32, key: Option<BlockKey> },
    Cached { account: AccountId, key: BlockKey, tick: u64 },
}

/// All physical blocks of one arena.
#[derive(Debug)]
pub struct BlockPool {
    slots: Vec<Slot>,
    orders: BuddyOrders,
    accounts: Vec<Option<Account>>,
    index: PrefixCache,
    /// Counts releases into the cache: the order of use, without a clock.
    tick: u64,
    quarantined: u64,
    /// In order, since they were last taken; `None` where nobody asks.
    changes: Option<Vec<BlockChange>>,
}

impl BlockPool {
    /// A pool of free blocks `[0, capacity)`.
    #[must_use]
    pub fn new(capacity: Blocks) -> Self {
        Self {
            slots: vec![Slot::Free; capacity.0 as usize],
            orders: BuddyOrders::new(capacity),
            accounts: Vec::new(),
            index: PrefixCache::default(),
            tick: 0,
            quarantined: 0,
            changes: None,
        }
    }

    /// From now on keeps what happens to blocks for [`BlockPool::take_changes`].
    pub fn watch(&mut self) {
        self.changes.get_or_insert_default();
    }

    /// What happened since the last call, in order.
    pub fn take_changes(&mut self) -> Vec<BlockChange> {
        self.changes.as_mut().map(std::mem::take).unwrap_or_default()
    }

    fn changed(&mut self, change: BlockChange) {
        if let Some(changes) = &mut self.changes {
            changes.push(change);
        }
    }

    /// All blocks.
    #[must_use]
    pub fn capacity(&self) -> Blocks {
        Blocks(self.slots.len() as u32)
    }

    /// Blocks that nobody has.
    #[must_use]
    pub fn free(&self) -> Blocks {
        self.orders.free()
    }

    /// Blocks taken out of use because a release did not match a count. Anything but 0 is a bug.
    #[must_use]
    pub fn quarantined(&self) -> u64 {
        self.quarantined
    }

    /// Opens an account.
    ///
    /// # Errors
    /// Nothing has changed.
    pub fn open(&mut self, share: Share) -> Result<AccountId, ShareError> {
        self.admissible(None, share)?;
        let account = Some(Account::new(share));
        let place = self.accounts.iter().position(Option::is_none);
        let place = place.unwrap_or_else(|| {
            self.accounts.push(None);
            self.accounts.len() - 1
        });
        self.accounts[place] = account;
        Ok(AccountId(place as u32))
    }

    /// Changes an account's bounds. What it has beyond a lowered ceiling stays until it is released or evicted.
    ///
    /// # Errors
    /// Nothing has changed.
    pub fn set_share(&mut self, id: AccountId, share: Share) -> Result<(), ShareError> {
        self.admissible(Some(id), share)?;
        if let Some(account) = self.account_mut(id) {
            account.share = share;
        }
        Ok(())
    }

    fn admissible(&self, id: Option<AccountId>, share: Share) -> Result<(), ShareError> {
        if share.floor > share.ceiling {
            return Err(ShareError::FloorAboveCeiling { floor: share.floor, ceiling: share.ceiling });
        }
        let others = self.accounts().filter(|(other, _)| Some(*other) != id);
        let sum =
            others.map(|(_, usage)| u64::from(usage.share.floor.0)).sum::<u64>() + u64::from(share.floor.0);
        if sum > u64::from(self.capacity().0) {
            return Err(ShareError::FloorsExceedPool { sum, capacity: self.capacity() });
        }
        Ok(())
    }

    /// Closes an account: its cached blocks are freed now, its held ones when they are released, and nothing of it is cached
    /// again. Its floor is void at once.
    pub fn close(&mut self, id: AccountId) {
        while self.evict(id).is_some() {}
        if let Some(account) = self.account_mut(id) {
            account.closing = true;
            account.share = Share { floor: Blocks::ZERO, ceiling: Blocks::ZERO };
        }
        self.retire(id);
    }

    /// What an account has; `None` once it is closed and its last block is back.
    #[must_use]
    pub fn usage(&self, id: AccountId) -> Option<Usage> {
        self.accounts.get(id.0 as usize)?.as_ref().map(Account::usage)
    }

    /// Every account, also those that are closing, in the order of ids.
    pub fn accounts(&self) -> impl Iterator<Item = (AccountId, Usage)> {
        let accounts = self.accounts.iter().enumerate();
        accounts.filter_map(|(i, account)| account.as_ref().map(|a| (AccountId(i as u32), a.usage())))
    }

    /// Takes a free block.
    ///
    /// # Errors
    /// `OverCeiling` before `Exhausted`: the first is the account's own affair. Nothing has changed.
    pub fn allocate(&mut self, id: AccountId, place: Place) -> Result<BlockLease, AllocError> {
        let usage = self.usage(id).filter(|_| !self.is_closing(id));
        let ceiling = usage.map_or(Blocks::ZERO, |usage| usage.share.ceiling);
        let used = usage.map_or(Blocks::ZERO, |usage| usage.used());
        if used >= ceiling {
            return Err(AllocError::OverCeiling { used, ceiling });
        }
        let block = self.orders.take(place).ok_or(AllocError::Exhausted)?;
        self.slots[block.0 as usize] = Slot::Held { account: id, count: 1, key: None };
        self.count_held(id, 1);
        self.changed(BlockChange::Cleared(block));
        Ok(BlockLease::new(block, id))
    }

    /// One more lease of the same block.
    pub fn share(&mut self, lease: &BlockLease) -> BlockLease {
        match &mut self.slots[lease.block().0 as usize] {
            Slot::Held { count, .. } => *count += 1,
            Slot::Free | Slot::Cached { .. } => {
                debug_assert!(false, "{} is leased but not held", lease.block());
            }
        }
        BlockLease::new(lease.block(), lease.account())
    }

    /// Gives one count back. The last one frees the block, or leaves it cached if it is committed.
    ///
    /// Release a sequence's blocks tail first: of one chain the block released last is evicted last.
    pub fn release(&mut self, lease: BlockLease) {
        let (block, id) = lease.into_parts();
        let (account, count, key) = match self.slots[block.0 as usize] {
            Slot::Held { account, count, key } if account == id => (account, count, key),
            Slot::Free | Slot::Held { .. } | Slot::Cached { .. } => return self.quarantine(block, id),
        };
        if count > 1 {
            self.slots[block.0 as usize] = Slot::Held { account, count: count - 1, key };
            return;
        }
        let closing = self.is_closing(account);
        self.count_held(account, -1);
        match key {
            Some(key) if !closing => {
                self.tick += 1;
                let tick = self.tick;
                self.slots[block.0 as usize] = Slot::Cached { account, key, tick };
                if let Some(account) = self.account_mut(account) {
                    account.cached.insert(tick, block);
                }
            }
            key => {
                if let Some(key) = key {
                    self.forget(block, key);
                }
                self.slots[block.0 as usize] = Slot::Free;
                self.orders.give(block);
                self.retire(account);
            }
        }
    }

    /// A release that no count stands for. Whoever uses the block now may be reading it together with somebody else: if it is
    /// free, it never is again.
    fn quarantine(&mut self, block: BlockId, id: AccountId) {
        self.quarantined += 1;
        if self.orders.take_exact(block) {
            self.slots[block.0 as usize] = Slot::Held { account: id, count: 1, key: None };
            self.count_held(id, 1);
        }
        debug_assert!(false, "{block} was released more often than it was leased");
    }

    /// Frees the least recently used cached block of an account.
    pub fn evict(&mut self, id: AccountId) -> Option<BlockId> {
        let (_, block) = self.account_mut(id)?.cached.pop_first()?;
        if let Slot::Cached { key, .. } = self.slots[block.0 as usize] {
            self.forget(block, key);
        }
        self.slots[block.0 as usize] = Slot::Free;
        self.orders.give(block);
        Some(block)
    }

    fn forget(&mut self, block: BlockId, key: BlockKey) {
        self.index.remove(key);
        self.changed(BlockChange::Cleared(block));
    }

    /// When the account's least recently used cached block was released: smaller is longer ago, over all accounts.
    #[must_use]
    pub fn least_recent(&self, id: AccountId) -> Option<u64> {
        let account = self.accounts.get(id.0 as usize)?.as_ref()?;
        account.cached.first_key_value().map(|(tick, _)| *tick)
    }

    /// How many leases a block has.
    #[must_use]
    pub fn count(&self, block: BlockId) -> u32 {
        match self.slots.get(block.0 as usize) {
            Some(Slot::Held { count, .. }) => *count,
            Some(Slot::Free | Slot::Cached { .. }) | None => 0,
        }
    }

    /// Enters a full block, whose contents are computed and will not change, under its key. `false`, and no change, where the
    /// block is entered already or the key names another block with the same contents.
    pub fn commit(&mut self, lease: &BlockLease, key: BlockKey, tokens: &[TokenId]) -> bool {
        match &mut self.slots[lease.block().0 as usize] {
            Slot::Held { key: entered @ None, .. } if self.index.insert(key, lease.block(), Some(tokens)) => {
                *entered = Some(key);
                let (block, account) = (lease.block(), lease.account());
                self.changed(BlockChange::Committed { block, account, key });
                true
            }
            Slot::Free | Slot::Held { .. } | Slot::Cached { .. } => false,
        }
    }

    /// Takes a free block that holds what `key` says from earlier, as a cached block of this account. Its tokens are not known, so
    /// that the key alone is compared. `false`, and no change, where the block is not free, the key is in the index already, or
    /// the account has no room.
    pub fn adopt(&mut self, id: AccountId, block: BlockId, key: BlockKey) -> bool {
        let room = self.usage(id).is_some_and(|usage| usage.used() < usage.share.ceiling);
        let known = self.index.block(key).is_some();
        if !room || known || self.is_closing(id) || !self.orders.take_exact(block) {
            return false;
        }
        self.index.insert(key, block, None);
        self.tick += 1;
        let tick = self.tick;
        self.slots[block.0 as usize] = Slot::Cached { account: id, key, tick };
        if let Some(account) = self.account_mut(id) {
            account.cached.insert(tick, block);
        }
        true
    }

    /// Takes a block's entry out of the index, so that its holder may write it again.
    pub fn uncommit(&mut self, lease: &BlockLease) {
        if let Slot::Held { key, .. } = &mut self.slots[lease.block().0 as usize]
            && let Some(key) = key.take()
        {
            self.forget(lease.block(), key);
        }
    }

    /// How much of a chain of full blocks is in the index for this account. `tokens` are all tokens of the chain.
    #[must_use]
    pub fn cached_prefix(&self, id: AccountId, chain: &[BlockKey], tokens: &[TokenId]) -> CachedPrefix {
        let mut found = CachedPrefix::default();
        let size = if chain.is_empty() { 0 } else { tokens.len() / chain.len() };
        for (i, key) in chain.iter().enumerate() {
            let Some(block) = self.index.find(*key, &tokens[i * size..(i + 1) * size]) else { break };
            match self.slots[block.0 as usize] {
                Slot::Held { account, .. } if account == id => found.last_is_held = true,
                Slot::Cached { account, .. } if account == id => {
                    found.unreferenced += 1;
                    found.last_is_held = false;
                }
                Slot::Free | Slot::Held { .. } | Slot::Cached { .. } => break,
            }
            found.blocks += 1;
        }
        found
    }

    /// Leases the block that is entered under this key, if it is this account's and has these tokens.
    pub fn acquire(&mut self, id: AccountId, key: BlockKey, tokens: &[TokenId]) -> Option<BlockLease> {
        let block = self.index.find(key, tokens)?;
        match self.slots[block.0 as usize] {
            Slot::Held { account, count, key } if account == id => {
                self.slots[block.0 as usize] = Slot::Held { account, count: count + 1, key };
            }
            Slot::Cached { account, key, tick } if account == id => {
                self.account_mut(id)?.cached.remove(&tick);
                self.slots[block.0 as usize] = Slot::Held { account, count: 1, key: Some(key) };
                self.count_held(id, 1);
            }
            Slot::Free | Slot::Held { .. } | Slot::Cached { .. } => return None,
        }
        Some(BlockLease::new(block, id))
    }

    /// Proves I8 and the agreement of slots, orders, accounts and index, by counting everything anew.
    ///
    /// # Errors
    /// The first disagreement found.
    pub fn check(&self) -> Result<(), Violation> {
        let mut counted = vec![(0_u32, 0_u32); self.accounts.len()];
        let (mut free, mut keys) = (0_u32, 0_usize);
        for (i, slot) in self.slots.iter().enumerate() {
            let block = BlockId(i as u32);
            let key = match *slot {
                Slot::Free => {
                    free += 1;
                    if !self.orders.is_free(block) {
                        return Err(Violation::Orders { orders: self.free(), blocks: Blocks(free) });
                    }
                    continue;
                }
                Slot::Held { account, key, .. } => {
                    counted[account.0 as usize].0 += 1;
                    key
                }
                Slot::Cached { account, key, tick } => {
                    counted[account.0 as usize].1 += 1;
                    let listed = self.accounts[account.0 as usize].as_ref().and_then(|a| a.cached.get(&tick));
                    if listed != Some(&block) {
                        return Err(Violation::Index { block });
                    }
                    Some(key)
                }
            };
            if let Some(key) = key {
                keys += 1;
                if self.index.block(key) != Some(block) {
                    return Err(Violation::Index { block });
                }
            }
        }
        if self.orders.recount() != Some(Blocks(free)) || self.free() != Blocks(free) {
            return Err(Violation::Orders { orders: self.free(), blocks: Blocks(free) });
        }
        if keys != self.index.len() {
            return Err(Violation::Index { block: BlockId(0) });
        }
        let (mut held, mut cached) = (Blocks::ZERO, Blocks::ZERO);
        for (account, usage) in self.accounts() {
            let (found_held, found_cached) = counted[account.0 as usize];
            if usage.held.0 != found_held || usage.cached.0 != found_cached {
                return Err(Violation::Account {
                    account,
                    held: usage.held,
                    cached: usage.cached,
                    found_held: Blocks(found_held),
                    found_cached: Blocks(found_cached),
                });
            }
            held += usage.held;
            cached += usage.cached;
        }
        if self.free() + cached + held != self.capacity() {
            return Err(Violation::Sum { free: self.free(), cached, held, capacity: self.capacity() });
        }
        Ok(())
    }

    /// Proves that each block's count is the number of leases that its holders can show.
    ///
    /// # Errors
    /// The first block where it is not.
    pub fn check_leases<'a>(&self, leases: impl Iterator<Item = &'a BlockLease>) -> Result<(), Violation> {
        let mut shown = vec![0_u32; self.slots.len()];
        for lease in leases {
            shown[lease.block().0 as usize] += 1;
        }
        for (i, leases) in shown.into_iter().enumerate() {
            let block = BlockId(i as u32);
            let count = self.count(block);
            if count != leases {
                return Err(Violation::Count { block, count, leases });
            }
        }
        Ok(())
    }

    fn account_mut(&mut self, id: AccountId) -> Option<&mut Account> {
        self.accounts.get_mut(id.0 as usize)?.as_mut()
    }

    fn is_closing(&self, id: AccountId) -> bool {
        self.accounts.get(id.0 as usize).and_then(Option::as_ref).is_none_or(|account| account.closing)
    }

    fn count_held(&mut self, id: AccountId, change: i32) {
        if let Some(account) = self.account_mut(id) {
            account.held = account.held.saturating_add_signed(change);
        }
    }

    /// Forgets a closing account whose last block is back.
    fn retire(&mut self, id: AccountId) {
        let place = &mut self.accounts[id.0 as usize];
        if place.as_ref().is_some_and(|account| account.closing && account.held == 0) {
            *place = None;
        }
    }
}

#[cfg(test)]
mod tests;
