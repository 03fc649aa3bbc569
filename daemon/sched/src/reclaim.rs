//! Who gives a block when none is free.
//!
//! **Owns** the order of taking: free blocks, then unreferenced cached ones of accounts beyond their floors, least recently
//! used first, then the youngest sequences of such accounts. **Never** takes from an account within its floor, and never from
//! the oldest sequence.
//!
//! An account that lacks blocks of its floor and has use for them stakes a *claim*: what others have beyond their floors is
//! taken until the claims are covered, and nobody else is given a claimed block. A claim is made anew for every step and lasts
//! as long as the demand.

use std::collections::BTreeMap;

use pagedd_core::{Blocks, SequenceId, Tokens};
use pagedd_kv::{AccountId, AllocError, BlockLease, BlockPool, Place, Usage};

use crate::scheduler::Scheduler;
use crate::sequence::{Sequence, State};
use crate::tenant::Tenant;

/// Free blocks that are spoken for, by account.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    by_account: Vec<u32>,
    total: u32,
}

impl Claims {
    pub fn of(&self, account: AccountId) -> u32 {
        self.by_account.get(account.index()).copied().unwrap_or(0)
    }

    pub fn is_empty(&self) -> bool {
        self.total == 0
    }

    pub fn of_others(&self, account: AccountId) -> u32 {
        self.total - self.of(account)
    }

    fn stake(&mut self, account: AccountId, blocks: u32) {
        if self.by_account.len() <= account.index() {
            self.by_account.resize(account.index() + 1, 0);
        }
        self.by_account[account.index()] += blocks;
        self.total += blocks;
    }

    fn use_one(&mut self, account: AccountId) {
        if let Some(claim) = self.by_account.get_mut(account.index())
            && *claim > 0
        {
            *claim -= 1;
            self.total -= 1;
        }
    }
}

/// Takes a block for an account, evicting cached ones where it must.
///
/// # Errors
/// No lease has changed; cached blocks may have been evicted.
pub(crate) fn take(
    pool: &mut BlockPool,
    claims: &mut Claims,
    account: AccountId,
    place: Place,
) -> Result<BlockLease, AllocError> {
    loop {
        let reserved = if claims.of(account) > 0 { 0 } else { claims.total };
        if pool.free().0 > reserved {
            match pool.allocate(account, place) {
                Ok(lease) => {
                    claims.use_one(account);
                    return Ok(lease);
                }
                Err(error) => {
                    if pool.evict(account).is_none() {
                        return Err(error);
                    }
                }
            }
            continue;
        }
        if let Some(Usage { share, .. }) = pool.usage(account).filter(|u| u.used() >= u.share.ceiling) {
            if pool.evict(account).is_none() {
                let used = pool.usage(account).map_or(Blocks::ZERO, |usage| usage.used());
                return Err(AllocError::OverCeiling { used, ceiling: share.ceiling });
            }
            continue;
        }
        let beyond = pool.accounts().filter(|(_, usage)| usage.over_floor() > Blocks::ZERO);
        let oldest = beyond.filter_map(|(id, _)| pool.least_recent(id).map(|tick| (tick, id))).min();
        let giver = oldest.map_or(account, |(_, id)| id);
        if pool.evict(giver).is_none() {
            return Err(AllocError::Exhausted);
        }
    }
}

impl Scheduler {
    /// Takes what accounts have beyond their ceilings, and what claims need, before anything of a step is planned.
    pub(crate) fn reclaim(&mut self, preempted: &mut bool) -> Claims {
        self.enforce_ceilings(preempted);
        self.free_seats(preempted);
        let claims = self.stake_claims();
        while claims.total > 0 && self.supply(true) < claims.total {
            let Some(victim) = self.youngest_beyond_floor(None) else { break };
            self.preempt(victim);
            *preempted = true;
        }
        claims
    }

    /// A lowered ceiling: cached blocks go first, then the youngest sequences.
    fn enforce_ceilings(&mut self, preempted: &mut bool) {
        let over: Vec<_> = self
            .pool
            .accounts()
            .filter(|(_, usage)| usage.used() > usage.share.ceiling)
            .map(|(id, usage)| (id, usage.share.ceiling.0))
            .collect();
        for (account, ceiling) in over {
            while self.pool.usage(account).is_some_and(|usage| usage.used().0 > ceiling) {
                if self.pool.evict(account).is_some() {
                    continue;
                }
                let used = self.pool.usage(account).map_or(0, |usage| usage.used().0);
                if used.saturating_sub(self.coming(Some(account))) <= ceiling {
                    break;
                }
                let Some(victim) = self.youngest_of(account, None) else { break };
                self.preempt(victim);
                *preempted = true;
            }
        }
    }

    /// Sequences that may run at a time for a tenant's floor: its part of all seats, and at least one.
    pub(crate) fn seats_of(&self, floor: Blocks) -> u32 {
        if floor == Blocks::ZERO {
            return 0;
        }
        let part = u64::from(self.config.max_num_seqs) * u64::from(floor.0)
            / u64::from(self.config.capacity.0.max(1));
        (part as u32).max(1)
    }

    /// Makes room in the count of running sequences for tenants that have fewer than their floors' part, and whose next
    /// sequence fits their floors.
    fn free_seats(&mut self, preempted: &mut bool) {
        let max = self.config.max_num_seqs as usize;
        if self.running.len() < max {
            return;
        }
        let mut wanted = 0;
        for tenant in self.tenants.values() {
            let Some(usage) = self.pool.usage(tenant.account) else { continue };
            let mut room = usage.under_floor() + usage.cached;
            let seats = self.seats_of(usage.share.floor).saturating_sub(tenant.running);
            for (_, id) in tenant.queue.iter().take(seats as usize) {
                let need = self.sequences.get(id).map_or(Blocks::ZERO, |s| self.blocks_for(s.tokens.len()));
                if need > room {
                    break;
                }
                room -= need;
                wanted += 1;
            }
        }
        let oldest = self.oldest();
        while wanted > 0 && self.running.len() + wanted > max {
            let victim = self.running.iter().rev().find(|id| {
                let tenant = self.sequences.get(id).and_then(|s| self.tenants.get(&s.tenant));
                let floor =
                    tenant.and_then(|t| self.pool.usage(t.account)).map_or(Blocks::ZERO, |u| u.share.floor);
                Some(**id) != oldest && tenant.is_some_and(|t| t.running > self.seats_of(floor))
            });
            let Some(victim) = victim.copied() else { break };
            self.preempt(victim);
            *preempted = true;
        }
    }

    fn stake_claims(&self) -> Claims {
        let mut claims = Claims::default();
        let lacks = |account| self.pool.usage(account).map_or(0, |usage| usage.under_floor().0);
        if self.tenants.values().all(|tenant| lacks(tenant.account) == 0) {
            return claims;
        }
        let mut growth: BTreeMap<AccountId, u32> = BTreeMap::new();
        for sequence in self.running.iter().filter_map(|id| self.sequences.get(id)) {
            *growth.entry(sequence.account).or_default() += self.blocks_still_needed(sequence);
        }
        let free_seats = (self.config.max_num_seqs as usize).saturating_sub(self.running.len());
        for tenant in self.tenants.values() {
            let lacking = lacks(tenant.account);
            if lacking > 0 && (tenant.running > 0 || !tenant.queue.is_empty()) {
                let floor = self.pool.usage(tenant.account).map_or(Blocks::ZERO, |usage| usage.share.floor);
                let seats = self.seats_of(floor).saturating_sub(tenant.running) as usize;
                let growth = growth.get(&tenant.account).copied().unwrap_or(0);
                let demand = growth + self.demand_of_queue(tenant, lacking, seats.max(free_seats));
                claims.stake(tenant.account, lacking.min(demand));
            }
        }
        claims
    }

    /// Blocks that the first `seats` waiting sequences of a tenant need beside what is cached of them, counted up to `enough`.
    fn demand_of_queue(&self, tenant: &Tenant, enough: u32, seats: usize) -> u32 {
        let size = self.config.block_size.0 as usize;
        let mut demand = 0;
        for sequence in tenant.queue.iter().take(seats).filter_map(|(_, id)| self.sequences.get(id)) {
            let full = sequence.chain.len() * size;
            let found =
                self.pool.cached_prefix(tenant.account, &sequence.chain, &sequence.tokens[..full]).blocks;
            demand += self.blocks_for(sequence.tokens.len()).0.saturating_sub(found);
            if demand >= enough {
                break;
            }
        }
        demand
    }

    pub(crate) fn blocks_for(&self, tokens: usize) -> Blocks {
        Tokens(tokens as u32).in_blocks(self.config.block_size)
    }

    /// Blocks that a running sequence lacks for all tokens that it could compute now.
    pub(crate) fn blocks_still_needed(&self, sequence: &Sequence) -> u32 {
        let Some((start, end)) = sequence.ready() else { return 0 };
        let Some(progress) = sequence.running() else { return 0 };
        let copy = progress.table.needs_copy(start / self.config.block_size.0 as usize, &self.pool);
        self.blocks_for(end).0.saturating_sub(progress.table.len() as u32) + u32::from(copy)
    }

    /// Blocks that a claim can be met from: free ones, and what evicting can take from accounts beyond their floors; with
    /// `coming`, also what they give back once the plans in flight are applied.
    pub(crate) fn supply(&self, coming: bool) -> u32 {
        let accounts = self.pool.accounts();
        let evictable = accounts.map(|(id, usage)| {
            let coming = if coming { self.coming(Some(id)) } else { 0 };
            (usage.cached.0 + coming).min(usage.over_floor().0)
        });
        self.pool.free().0 + evictable.sum::<u32>()
    }

    /// Blocks of one account, or of all, that only leaving sequences hold.
    pub(crate) fn coming(&self, account: Option<AccountId>) -> u32 {
        let leaving = self.leaving.iter().filter_map(|id| self.sequences.get(id));
        let leaving = leaving.filter(|s| account.is_none_or(|account| s.account == account));
        let leases = leaving.filter_map(|s| s.progress()).flat_map(|progress| progress.table.leases());
        leases.filter(|lease| self.pool.count(lease.block()) == 1).count() as u32
    }

    /// The youngest running sequence of an account, if it is younger than `than`, and not the oldest of all.
    pub(crate) fn youngest_of(&self, account: AccountId, than: Option<SequenceId>) -> Option<SequenceId> {
        self.youngest(than, |id| id == account)
    }

    /// The youngest running sequence of the accounts beyond their floors.
    pub(crate) fn youngest_beyond_floor(&self, than: Option<SequenceId>) -> Option<SequenceId> {
        self.youngest(than, |id| self.pool.usage(id).is_some_and(|usage| usage.over_floor() > Blocks::ZERO))
    }

    pub(crate) fn youngest(
        &self,
        than: Option<SequenceId>,
        gives: impl Fn(AccountId) -> bool,
    ) -> Option<SequenceId> {
        let oldest = self.oldest();
        let younger = self.running.iter().rev().take_while(|id| than.is_none_or(|than| **id > than));
        let mut giving = younger.filter(|id| Some(**id) != oldest);
        giving.find(|id| self.sequences.get(id).is_some_and(|s| gives(s.account))).copied()
    }

    /// Takes a running sequence's place. It waits again as soon as no plan in flight names it.
    pub(crate) fn preempt(&mut self, id: SequenceId) {
        debug_assert!(Some(id) != self.oldest(), "{id} is the oldest and is preempted");
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        match std::mem::replace(&mut sequence.state, State::Waiting(None)) {
            State::Running(progress) => sequence.state = State::Preempted(progress),
            state @ (State::Waiting(_) | State::Preempted(_) | State::Finished(..)) => {
                sequence.state = state;
                return;
            }
        }
        let in_flight = sequence.in_flight;
        self.running.remove(&id);
        if let Some(tenant) = self.tenants.get_mut(&sequence.tenant) {
            tenant.running -= 1;
            tenant.counters.preemptions += 1;
        }
        if in_flight == 0 {
            self.settle(id);
        } else {
            self.leaving.insert(id);
        }
    }
}
