//! What came within the last minute.
//!
//! **Owns** amounts by when they came, in slots of half a second. **Never** reads a clock, and never lets an amount go before its
//! minute is over: one stays for 60 to 60.5 s. No tenant costs more than the 2 KiB of a minute of slots.
//!
//! A window and not a bucket that fills: from a full bucket a tenant has twice its quota within one minute.

use std::collections::VecDeque;

/// What is over is gone.
pub const MINUTE_US: u64 = 60_000_000;
/// What comes within one slot leaves together.
pub const SLOT_US: u64 = 500_000;
/// Slots that a whole minute has.
const SLOTS: u64 = MINUTE_US / SLOT_US;

/// Amounts of the last minute.
#[derive(Clone, Default, Debug)]
pub struct Window {
    /// Slots with something in them, oldest first.
    slots: VecDeque<(u64, u64)>,
    sum: u64,
}

impl Window {
    /// Lets go of what came before the last minute, and says what is left.
    pub fn sum(&mut self, now_us: u64) -> u64 {
        while let Some(&(slot, amount)) = self.slots.front()
            && now_us >= leaves_at(slot)
        {
            self.sum -= amount;
            self.slots.pop_front();
        }
        self.sum
    }

    /// Adds an amount, and says in which slot it is. Time does not go back: what comes late is in the last slot.
    pub fn add(&mut self, now_us: u64, amount: u64) -> u64 {
        let now = now_us / SLOT_US;
        let slot = match self.slots.back_mut() {
            Some((last, amount_there)) if *last >= now => {
                *amount_there += amount;
                *last
            }
            _ => {
                self.slots.push_back((now, amount));
                now
            }
        };
        self.sum += amount;
        slot
    }

    /// Takes an amount back that was added to this slot, unless its minute is over.
    pub fn take_back(&mut self, slot: u64, amount: u64) {
        if let Ok(at) = self.slots.binary_search_by_key(&slot, |(slot, _)| *slot) {
            let taken = amount.min(self.slots[at].1);
            self.slots[at].1 -= taken;
            self.sum -= taken;
        }
    }

    /// Time until so much of it will have left; all of it where it is less.
    pub fn wait(&self, now_us: u64, amount: u64) -> u64 {
        let mut left = 0;
        for (slot, there) in &self.slots {
            left += there;
            if left >= amount && *there > 0 {
                return leaves_at(*slot).saturating_sub(now_us);
            }
        }
        self.empties_in(now_us)
    }

    /// Time until nothing of it is left.
    pub fn empties_in(&self, now_us: u64) -> u64 {
        let last = self.slots.iter().rev().find(|(_, amount)| *amount > 0);
        last.map_or(0, |(slot, _)| leaves_at(*slot).saturating_sub(now_us))
    }
}

/// When what came in a slot is older than a minute, all of it.
fn leaves_at(slot: u64) -> u64 {
    (slot + SLOTS + 1) * SLOT_US
}
