//! Free blocks in buddy orders (Knowlton, CACM 1965), so that runs stay contiguous for transfers.
//!
//! **Owns** which blocks are free and how they join into runs. **Never** knows who holds the others.
//!
//! A free run of order `k` is `[start, start + 2^k)` with `start` a multiple of `2^k`. Two runs of an order that differ in
//! bit `k` only are buddies and are joined at once, so no two free buddies stand beside each other.

use pagedd_core::{BlockId, Blocks};

/// Where a new block should lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Place {
    /// Right behind this block, if that one is free.
    After(BlockId),
    /// At the start of a free run of this many blocks, or of the longest there is.
    Run(Blocks),
}

#[derive(Debug)]
pub(crate) struct BuddyOrders {
    capacity: u32,
    free: u32,
    /// First free run of each order.
    heads: Vec<Option<u32>>,
    /// Per block: the order of the free run that starts here.
    order: Vec<Option<u8>>,
    /// Per start of a free run: its neighbours in the list of its order.
    next: Vec<Option<u32>>,
    previous: Vec<Option<u32>>,
}

impl BuddyOrders {
    /// All of `[0, capacity)` free.
    pub fn new(capacity: Blocks) -> Self {
        let n = capacity.0 as usize;
        let mut orders = Self {
            capacity: capacity.0,
            free: 0,
            heads: vec![None; 33],
            order: vec![None; n],
            next: vec![None; n],
            previous: vec![None; n],
        };
        // From the highest address down, so that the lists start at the lowest.
        let mut runs = Vec::new();
        let mut start = 0;
        while start < capacity.0 {
            let aligned = if start == 0 { 31 } else { start.trailing_zeros() };
            let fits = (capacity.0 - start).ilog2();
            let order = aligned.min(fits) as u8;
            runs.push((start, order));
            start += 1 << order;
        }
        for (start, order) in runs.into_iter().rev() {
            orders.link(start, order);
            orders.free += 1 << order;
        }
        orders
    }

    pub fn free(&self) -> Blocks {
        Blocks(self.free)
    }

    pub fn is_free(&self, block: BlockId) -> bool {
        self.run_of(block.0).is_some()
    }

    /// Takes one block, or says that none is free.
    pub fn take(&mut self, place: Place) -> Option<BlockId> {
        if let Place::After(BlockId(before)) = place
            && let Some(wanted) = before.checked_add(1)
            && wanted < self.capacity
            && self.take_exact(BlockId(wanted))
        {
            return Some(BlockId(wanted));
        }
        let least = match place {
            Place::After(_) => 0,
            Place::Run(blocks) => blocks.0.max(1).checked_next_power_of_two().map_or(31, u32::ilog2) as usize,
        };
        let fitting = (least..self.heads.len()).find(|&k| self.heads[k].is_some());
        let order = fitting.or_else(|| (0..least).rev().find(|&k| self.heads[k].is_some()))?;
        let start = self.heads[order]?;
        self.take_exact(BlockId(start));
        Some(BlockId(start))
    }

    /// Takes this block if it is free.
    pub fn take_exact(&mut self, block: BlockId) -> bool {
        let Some((start, order)) = self.run_of(block.0) else { return false };
        self.unlink(start, order);
        // Halve until the block stands alone; the half without it stays free.
        let mut low = start;
        for k in (0..order).rev() {
            let middle = low + (1 << k);
            if block.0 < middle {
                self.link(middle, k);
            } else {
                self.link(low, k);
                low = middle;
            }
        }
        self.free -= 1;
        true
    }

    /// Gives one block back. The caller proves that it is not free.
    pub fn give(&mut self, block: BlockId) {
        debug_assert!(!self.is_free(block), "{block} is free already");
        let (mut start, mut order) = (block.0, 0_u8);
        loop {
            let buddy = start ^ (1 << order);
            let whole = start.min(buddy);
            let fits = u64::from(whole) + (2 << order) <= u64::from(self.capacity);
            if order >= 31 || !fits || self.order[buddy as usize] != Some(order) {
                break;
            }
            self.unlink(buddy, order);
            start = whole;
            order += 1;
        }
        self.link(start, order);
        self.free += 1;
    }

    /// The free run that contains the block.
    fn run_of(&self, block: u32) -> Option<(u32, u8)> {
        (0..32_u8).find_map(|k| {
            let start = block & !((1_u32 << k) - 1);
            (self.order.get(start as usize).copied().flatten() == Some(k)).then_some((start, k))
        })
    }

    fn link(&mut self, start: u32, order: u8) {
        let head = self.heads[order as usize].replace(start);
        self.order[start as usize] = Some(order);
        self.next[start as usize] = head;
        self.previous[start as usize] = None;
        if let Some(head) = head {
            self.previous[head as usize] = Some(start);
        }
    }

    fn unlink(&mut self, start: u32, order: u8) {
        let (previous, next) = (self.previous[start as usize].take(), self.next[start as usize].take());
        match previous {
            Some(previous) => self.next[previous as usize] = next,
            None => self.heads[order as usize] = next,
        }
        if let Some(next) = next {
            self.previous[next as usize] = previous;
        }
        self.order[start as usize] = None;
    }

    /// How many blocks the runs hold, counted anew; `None` where a run is not aligned, or stands beside its free buddy.
    pub fn recount(&self) -> Option<Blocks> {
        let mut sum = 0;
        for (k, head) in self.heads.iter().enumerate().take(32) {
            let mut at = *head;
            while let Some(start) = at {
                let buddy = start ^ (1 << k);
                let aligned = start.trailing_zeros() as usize >= k || start == 0;
                let joined = self.order.get(buddy as usize).copied().flatten() != Some(k as u8);
                if !aligned || !joined || self.order[start as usize] != Some(k as u8) {
                    return None;
                }
                sum += 1_u32 << k;
                at = self.next[start as usize];
            }
        }
        Some(Blocks(sum))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pool_of_any_size_gives_every_block_once_and_joins_them_again() {
        for capacity in [1, 2, 3, 7, 16, 100, 257] {
            let mut orders = BuddyOrders::new(Blocks(capacity));
            let before = orders.heads.clone();
            let mut taken: Vec<_> = std::iter::from_fn(|| orders.take(Place::Run(Blocks(1)))).collect();
            assert_eq!(orders.free(), Blocks(0));
            // A fixed shuffle: every third block first.
            taken.sort_unstable_by_key(|b| (b.0 % 3, b.0));
            for block in &taken {
                orders.give(*block);
                assert!(orders.recount().is_some(), "capacity {capacity}, after {block}");
            }
            taken.sort_unstable();
            assert_eq!(taken, (0..capacity).map(BlockId).collect::<Vec<_>>());
            assert_eq!(orders.recount(), Some(Blocks(capacity)));
            assert_eq!(
                orders.heads.iter().map(Option::is_some).collect::<Vec<_>>(),
                before.iter().map(Option::is_some).collect::<Vec<_>>(),
                "capacity {capacity}: the runs are as long as at the start"
            );
        }
    }

    #[test]
    fn a_block_behind_another_continues_its_run() {
        let mut orders = BuddyOrders::new(Blocks(64));
        let first = orders.take(Place::Run(Blocks(8))).unwrap();
        let other = orders.take(Place::Run(Blocks(8))).unwrap();
        assert!(other.0 >= first.0 + 8, "{other} leaves room behind {first}");
        for i in 1..8 {
            assert_eq!(orders.take(Place::After(BlockId(first.0 + i - 1))), Some(BlockId(first.0 + i)));
        }
    }

    #[test]
    fn a_taken_neighbour_is_replaced_by_any_free_block() {
        let mut orders = BuddyOrders::new(Blocks(3));
        assert!(orders.take_exact(BlockId(1)));
        assert!(!orders.take_exact(BlockId(1)));
        let others = [orders.take(Place::After(BlockId(0))), orders.take(Place::After(BlockId(2)))];
        assert_eq!(others, [Some(BlockId(0)), Some(BlockId(2))]);
        assert_eq!(orders.take(Place::After(BlockId(2))), None);
    }
}
