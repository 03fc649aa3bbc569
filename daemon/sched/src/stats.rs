//! Numbers for metrics and status, and the proof that the state is sound.

use pagedd_core::{Blocks, SequenceId, TenantId};

use crate::scheduler::Scheduler;
use crate::sequence::State;

/// Everything worth showing.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// Of each tenant, in the order of ids.
    pub tenants: Vec<TenantStats>,
    /// Of the pool.
    pub pool: PoolStats,
    /// Plans not yet applied.
    pub plans_in_flight: u32,
}

/// Of one tenant. Gauges first; the counters only rise, until the tenant is removed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TenantStats {
    /// Whose.
    pub tenant: TenantId,
    /// Sequences that run.
    pub running: u32,
    /// Sequences that wait, new or preempted, those behind their request's prompt included.
    pub waiting: u32,
    /// Requests that have not started: what the queue's cap counts.
    pub queued_requests: u32,
    /// Blocks that sequences hold; a shared one counts once.
    pub held: Blocks,
    /// Unreferenced cached blocks.
    pub cached: Blocks,
    /// As last set.
    pub floor: Blocks,
    /// As last set.
    pub ceiling: Blocks,
    /// The share as last set waits for admitted requests that contradict it.
    pub share_pending: bool,
    /// Sequences whose blocks were taken.
    pub preemptions: u64,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_query_tokens: u64,
    /// Of these, found.
    pub prefix_hit_tokens: u64,
    /// Tokens of sequences that an earlier scheduler had begun, computed again because they were not found.
    pub recomputed_tokens: u64,
    /// Requests that were cancelled.
    pub aborted: u64,
    /// Emitted tokens.
    pub output_tokens: u64,
    /// Guesses tried.
    pub draft_tokens: u64,
    /// Of these, right.
    pub draft_tokens_accepted: u64,
}

impl Stats {
    /// One tenant's numbers.
    #[must_use]
    pub fn tenant(&self, tenant: TenantId) -> Option<&TenantStats> {
        self.tenants.iter().find(|stats| stats.tenant == tenant)
    }

    /// Sequences that run.
    #[must_use]
    pub fn running(&self) -> u32 {
        self.tenants.iter().map(|stats| stats.running).sum()
    }

    /// Sequences that wait.
    #[must_use]
    pub fn waiting(&self) -> u32 {
        self.tenants.iter().map(|stats| stats.waiting).sum()
    }
}

/// Of the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PoolStats {
    /// All blocks.
    pub capacity: Blocks,
    /// Blocks that nobody has.
    pub free: Blocks,
    /// Unreferenced cached blocks of all accounts.
    pub cached: Blocks,
    /// Blocks that sequences hold, of tenants that were removed too.
    pub held: Blocks,
    /// Faults that `kv` survived: blocks out of use for good. Anything but 0 is a bug.
    pub quarantined: u64,
}

/// The scheduler is not what it must be: a bug.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Violation {
    /// Of the pool.
    #[error(transparent)]
    Pool(#[from] pagedd_kv::Violation),
    /// A sequence is not listed as its state says.
    #[error("{0} is not listed as its state says")]
    Listed(SequenceId),
    /// A sequence's numbers contradict one another.
    #[error("{0} contradicts itself")]
    Sequence(SequenceId),
    /// A tenant's counts are not those of its sequences.
    #[error("{0} counts sequences that it does not have, or misses some")]
    Tenant(TenantId),
    /// More sequences run than may.
    #[error("{running} sequences run, {most} may")]
    Seats {
        /// How many run.
        running: u32,
        /// `max_num_seqs`.
        most: u32,
    },
}

impl Scheduler {
    /// The numbers of now. Costs a walk over all sequences.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let tenants = self.tenants.iter().map(|(id, tenant)| {
            let usage = self.pool.usage(tenant.account);
            let of_tenant =
                self.sequences.values().filter(|s| s.tenant == *id && s.account == tenant.account);
            let waiting =
                of_tenant.filter(|s| matches!(s.state, State::Waiting(_) | State::Preempted(_))).count();
            TenantStats {
                tenant: *id,
                running: tenant.running,
                waiting: waiting as u32,
                queued_requests: tenant.unstarted,
                held: usage.map_or(Blocks::ZERO, |u| u.held),
                cached: usage.map_or(Blocks::ZERO, |u| u.cached),
                floor: tenant.target.floor,
                ceiling: tenant.target.ceiling,
                share_pending: usage.is_some_and(|u| {
                    u.share.floor != tenant.target.floor || u.share.ceiling != tenant.target.ceiling
                }),
                preemptions: tenant.counters.preemptions,
                prefix_query_tokens: tenant.counters.prefix_queries,
                prefix_hit_tokens: tenant.counters.prefix_hits,
                recomputed_tokens: tenant.counters.recomputed,
                aborted: tenant.counters.aborted,
                output_tokens: tenant.counters.output_tokens,
                draft_tokens: tenant.counters.drafts,
                draft_tokens_accepted: tenant.counters.drafts_accepted,
            }
        });
        let (mut cached, mut held) = (Blocks::ZERO, Blocks::ZERO);
        for (_, usage) in self.pool.accounts() {
            cached += usage.cached;
            held += usage.held;
        }
        Stats {
            tenants: tenants.collect(),
            pool: PoolStats {
                capacity: self.pool.capacity(),
                free: self.pool.free(),
                cached,
                held,
                quarantined: self.pool.quarantined(),
            },
            plans_in_flight: self.flights.len() as u32,
        }
    }

    /// Whether every request has ended.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty()
    }

    /// Proves I8, that every count on a block is a lease of a sequence or of a plan in flight, and that lists and states agree.
    /// Costs a walk over all blocks and sequences: for tests, and for production on idle.
    ///
    /// # Errors
    /// The first disagreement found.
    pub fn check(&self) -> Result<(), Violation> {
        self.pool.check()?;
        let tables = self.sequences.values().filter_map(|s| s.progress()).flat_map(|p| p.table.leases());
        let copies = self.flights.iter().flat_map(|flight| &flight.copies).map(|copy| &copy.from);
        self.pool.check_leases(tables.chain(copies))?;
        let size = self.config.block_size.0 as usize;
        for (id, sequence) in self.sequences.iter() {
            let request = self.requests.get(&sequence.request).filter(|r| r.open.contains(&id));
            let tenant = self.tenants.get(&sequence.tenant);
            let (runs, leaves) = (self.running.contains(&id), self.leaving.contains(&id));
            let listed = match &sequence.state {
                State::Waiting(Some(rank)) => {
                    tenant.is_some_and(|t| t.queue.contains(&(*rank, id))) && !runs && !leaves
                }
                State::Waiting(None) => {
                    request.is_some_and(|r| r.followers.contains(&id)) && !runs && !leaves
                }
                State::Running(_) => runs && !leaves,
                State::Preempted(_) | State::Finished(..) => leaves && !runs,
            };
            if !listed || request.is_some() == sequence.is_finished() {
                return Err(Violation::Listed(id));
            }
            let in_flight = sequence.in_flight as usize;
            let waits = matches!(sequence.state, State::Waiting(_));
            let sound = sequence.progress().is_none_or(|p| {
                let computed = p.computed.0 as usize;
                p.applied <= p.computed
                    && (computed <= sequence.total() || sequence.is_finished())
                    && p.table.len() >= computed.div_ceil(size)
                    && p.committed <= p.table.len()
                    && p.sent <= p.table.len()
                    && (!p.guesses || in_flight == 1)
            });
            if !sound
                || sequence.total() > sequence.limit
                || in_flight > self.flights.len()
                || (waits && in_flight > 0)
                || (leaves && in_flight == 0)
            {
                return Err(Violation::Sequence(id));
            }
        }
        for (id, tenant) in &self.tenants {
            let sequences = || self.sequences.iter().filter(|(_, s)| s.tenant == *id);
            let running = sequences().filter(|(_, s)| s.running().is_some()).count();
            let queued = sequences().filter(|(_, s)| matches!(s.state, State::Waiting(Some(_)))).count();
            let unstarted =
                self.requests.values().filter(|r| r.tenant == *id && r.cached_tokens.is_none()).count();
            let counts = (tenant.running as usize, tenant.queue.len(), tenant.unstarted as usize);
            if counts != (running, queued, unstarted) {
                return Err(Violation::Tenant(*id));
            }
        }
        let (running, most) = (self.running.len() as u32, self.config.max_num_seqs);
        if running > most {
            return Err(Violation::Seats { running, most });
        }
        Ok(())
    }
}
