//! One iteration: running sequences first, then waiting ones, within a budget of tokens and sequences.
//!
//! **Owns** the order. **Never** distinguishes prefill from decode: a sequence has computed some of its tokens and catches up.

use pagedd_core::{BlockId, Blocks, Few, PlanId, RequestId, SequenceId, TenantId, Tokens};
use pagedd_kv::{AccountId, AllocError, BlockLease, BlockTable, CachedPrefix, CopyOnWrite, Place};

use crate::budget::Budget;
use crate::plan::{Begin, BlockCopy, Input, Row, StepPlan, TableUpdate};
use crate::reclaim::{Claims, take};
use crate::scheduler::{Flight, MadeCopy, Scheduler};
use crate::sequence::{Progress, Sequence, State};
use crate::suspect::Group;

/// A tenant's next sequence did not start in the last step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wait {
    /// Whose.
    pub tenant: TenantId,
    /// Of which request.
    pub request: RequestId,
    /// Which choice.
    pub choice: u32,
    /// Why.
    pub reason: WaitReason,
}

/// Why a sequence did not start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WaitReason {
    /// The tenant's own sequences must end first.
    Ceiling {
        /// Blocks it can still have.
        room: Blocks,
        /// Blocks it needs.
        wanted: Blocks,
    },
    /// Blocks of the pool must return first.
    Exhausted {
        /// Blocks it could get.
        free: Blocks,
        /// Blocks it needs.
        wanted: Blocks,
    },
    /// Blocks beyond the tenant's floor are free, and are kept for a sequence that waits longer, or were just taken from one.
    Behind {
        /// Blocks it needs.
        wanted: Blocks,
    },
    /// As many sequences run as may, or the step's tokens or its time are spent.
    Budget,
}

/// A plan in the making.
#[derive(Debug)]
pub(crate) struct Step {
    pub plan: StepPlan,
    flight: Flight,
    pub tokens_left: usize,
    /// Of these, for sequences that decode and are still to come: each gets its token, whoever is older.
    promised: usize,
    pub budget: Budget,
    pub claims: Claims,
    /// Blocks that running sequences still need for tokens they have, by account and in all: nobody else starts on these.
    outstanding: Vec<u32>,
    pub outstanding_total: u32,
    /// Nothing more is lent beyond floors in this step: somebody older waits for it, or it was just taken.
    pub lending_closed: bool,
    /// Seats kept for sequences whose blocks are on the way.
    kept_seats: usize,
    /// Only these run.
    pub alone: Option<Group>,
}

impl Step {
    /// Up to where a sequence may compute that could up to `end`: one of those that run alone no further than it is to.
    fn end(&self, id: SequenceId, end: usize) -> usize {
        let most = self.alone.as_ref().and_then(|alone| alone.get(&id));
        most.map_or(end, |most| end.min(*most))
    }

    /// Tokens that prompts may have.
    fn prompt_tokens_left(&self) -> usize {
        self.tokens_left.saturating_sub(self.promised)
    }
}

/// What became of a running sequence that asked for blocks.
enum Secured {
    Blocks(Vec<BlockLease>),
    /// Blocks are on the way, or the sequence gave its own.
    NotNow,
}

impl Scheduler {
    /// Plans one iteration, or says that nothing can run before the next `apply`, `admit` or `set_share`.
    ///
    /// `now_us` is monotonic time in microseconds, for policies that weigh how long a request waits.
    pub fn schedule(&mut self, now_us: u64) -> Option<StepPlan> {
        self.now_us = now_us;
        self.waits.clear();
        let suspected = self.try_suspects();
        if suspected.is_some() || self.suspects() > 0 { suspected } else { self.plan(None) }
    }

    /// Plans one iteration, of nobody but `only` where that is given.
    pub(crate) fn plan(&mut self, only: Option<&Group>) -> Option<StepPlan> {
        let mut preempted = false;
        // Those that run alone had all they need in a plan with others.
        let claims = if only.is_some() { Claims::default() } else { self.reclaim(&mut preempted) };
        let running = self.running.iter().copied();
        let running: Vec<_> = running.filter(|id| only.is_none_or(|only| only.contains_key(id))).collect();
        let decoding: Vec<usize> =
            running.iter().filter_map(|id| self.sequences.get(id)?.decodes()).collect();
        let mut step = Step {
            plan: StepPlan {
                id: self.next_plan,
                begin: Vec::new(),
                copies: Vec::new(),
                rows: Vec::with_capacity(running.len()),
                end: Vec::new(),
            },
            flight: Flight { id: self.next_plan, copies: Vec::new(), begun: Vec::new(), forked: Vec::new() },
            tokens_left: self.config.max_num_batched_tokens.0 as usize,
            promised: decoding.len(),
            budget: Budget::new(&self.config, self.pace, decoding.into_iter()),
            claims,
            outstanding: Vec::new(),
            outstanding_total: 0,
            lending_closed: preempted,
            kept_seats: 0,
            alone: only.cloned(),
        };
        for id in running {
            self.continue_running(&mut step, id);
        }
        match only {
            Some(only) => self.start_only(&mut step, only),
            None => self.start_waiting(&mut step),
        }
        self.add_drafts(&mut step);
        if step.plan.rows.is_empty() {
            debug_assert!(step.flight.copies.is_empty() && step.flight.begun.is_empty());
            return None;
        }
        step.plan.end = std::mem::take(&mut self.forget);
        self.next_plan = PlanId(self.next_plan.0 + 1);
        self.flights.push_back(step.flight);
        Some(step.plan)
    }

    /// Why tenants' next sequences did not start in the last `schedule`.
    #[must_use]
    pub fn waits(&self) -> &[Wait] {
        &self.waits
    }

    fn continue_running(&mut self, step: &mut Step, id: SequenceId) {
        let Some(sequence) = self.sequences.get(&id) else { return };
        let Some((start, end)) = sequence.ready() else { return };
        let decodes = sequence.decodes().is_some();
        let most = step.end(id, end).max(start);
        let allowed = if decodes {
            step.promised -= 1;
            step.tokens_left
        } else {
            step.prompt_tokens_left().min(step.budget.offer(start, most))
        };
        let n = self.chunk(start, most, allowed);
        if n > 0 {
            match self.secure(step, id, start, n) {
                Secured::Blocks(leases) => {
                    if !decodes {
                        step.budget.add(start, n, start + n == end);
                    }
                    self.add_row(step, id, start, n, leases);
                    if start + n == end {
                        return;
                    }
                }
                Secured::NotNow => {}
            }
        }
        // What it still needs for its tokens after this step.
        if let Some(sequence) = self.sequences.get(&id).filter(|s| s.running().is_some()) {
            let (account, more) = (sequence.account.index(), self.blocks_still_needed(sequence));
            if more > 0 {
                step.outstanding.resize(step.outstanding.len().max(account + 1), 0);
                step.outstanding[account] += more;
                step.outstanding_total += more;
            }
        }
    }

    /// How many of the positions `[start, end)` to compute, `most` at most: a part ends at a block's end where that leaves it half of
    /// its length.
    fn chunk(&self, start: usize, end: usize, most: usize) -> usize {
        let n = (end - start).min(most);
        let size = self.config.block_size.0 as usize;
        let aligned = (start + n) / size * size;
        if start + n < end && aligned >= start + n.div_ceil(2) { aligned - start } else { n }
    }

    /// Gets a running sequence the blocks for positions `[start, start + n)`, at the cost of younger ones, or of itself.
    fn secure(&mut self, step: &mut Step, id: SequenceId, start: usize, n: usize) -> Secured {
        let Some(sequence) = self.sequences.get(&id) else { return Secured::NotNow };
        let Some(progress) = sequence.running() else { return Secured::NotNow };
        let account = sequence.account;
        let copy = progress.table.needs_copy(start / self.config.block_size.0 as usize, &self.pool);
        let wanted =
            self.blocks_for(start + n).0.saturating_sub(progress.table.len() as u32) + u32::from(copy);
        if wanted == 0 {
            return Secured::Blocks(Vec::new());
        }
        let mut place = progress.table.next_place(Blocks(wanted));
        let mut leases = Vec::with_capacity(wanted as usize);
        while (leases.len() as u32) < wanted {
            match take(&mut self.pool, &mut step.claims, account, place) {
                Ok(lease) => {
                    place = Place::After(lease.block());
                    leases.push(lease);
                }
                Err(error) => {
                    let missing = wanted - leases.len() as u32;
                    let entitled = step.claims.of(account) > 0;
                    if !self.make_room(step, id, error, missing, entitled) {
                        self.release_all(leases);
                        return Secured::NotNow;
                    }
                }
            }
        }
        Secured::Blocks(leases)
    }

    /// Preempts for a running sequence; `true` where asking again may help. Only sequences younger than it are taken, none of
    /// which this step has planned yet.
    fn make_room(
        &mut self,
        step: &mut Step,
        id: SequenceId,
        error: AllocError,
        missing: u32,
        entitled: bool,
    ) -> bool {
        let Some(account) = self.sequences.get(&id).map(|s| s.account) else { return false };
        let (coming, victim) = match error {
            AllocError::OverCeiling { .. } => {
                (self.coming(Some(account)), self.youngest_of(account, Some(id)))
            }
            AllocError::Exhausted => {
                let over = |other| {
                    other == account || self.pool.usage(other).is_some_and(|u| u.over_floor() > Blocks::ZERO)
                };
                (self.coming(None), self.youngest(Some(id), over))
            }
        };
        if coming >= missing {
            return false;
        }
        step.lending_closed = true;
        if let Some(victim) = victim {
            self.preempt(victim);
            return true;
        }
        // Nobody younger has anything to give. Within its floor it waits for what was reclaimed; beyond, it is the one to go.
        if coming == 0 && !entitled && Some(id) != self.oldest() {
            self.preempt(id);
        }
        false
    }

    fn release_all(&mut self, leases: Vec<BlockLease>) {
        for lease in leases.into_iter().rev() {
            self.pool.release(lease);
        }
    }

    /// Starts waiting sequences. Only the first of a tenant's queue holds up others, and only of that tenant.
    fn start_waiting(&mut self, step: &mut Step) {
        let oldest = self.oldest();
        let mut open: Vec<TenantId> =
            self.tenants.iter().filter(|(_, t)| !t.queue.is_empty()).map(|(id, _)| *id).collect();
        while let Some((within_floor, id, place)) = self.next_to_start(&open, oldest) {
            let tenant = open[place];
            let refused =
                if self.is_full(step) { Some(WaitReason::Budget) } else { self.start(step, id).err() };
            if let Some(reason) = refused {
                if matches!(reason, WaitReason::Exhausted { .. }) {
                    step.lending_closed = true;
                    step.kept_seats += usize::from(within_floor);
                }
                if let Some(sequence) = self.sequences.get(&id) {
                    self.waits.push(Wait {
                        tenant,
                        request: sequence.request,
                        choice: sequence.choice,
                        reason,
                    });
                }
                open.swap_remove(place);
            } else if self.tenants.get(&tenant).is_none_or(|t| t.queue.is_empty()) {
                open.swap_remove(place);
            }
        }
    }

    /// Starts those that wait of these, whoever else waits.
    fn start_only(&mut self, step: &mut Step, only: &Group) {
        for id in only.keys() {
            let queued = self.sequences.get(id).is_some_and(|s| matches!(s.state, State::Waiting(Some(_))));
            if queued && !self.is_full(step) {
                // What cannot start is tried again.
                let _: Result<(), WaitReason> = self.start(step, *id);
            }
        }
    }

    /// No further sequence can start in this step.
    fn is_full(&self, step: &Step) -> bool {
        let seats = self.config.max_num_seqs as usize;
        self.running.len() + step.kept_seats >= seats || step.prompt_tokens_left() == 0
    }

    /// The next head: the oldest sequence of all, then those of tenants that have less than their floors, then by age.
    fn next_to_start(
        &self,
        open: &[TenantId],
        oldest: Option<SequenceId>,
    ) -> Option<(bool, SequenceId, usize)> {
        let heads = open.iter().enumerate().filter_map(|(place, id)| {
            let tenant = self.tenants.get(id)?;
            let head = tenant.head()?;
            let usage = self.pool.usage(tenant.account)?;
            let need = self.sequences.get(&head).map_or(Blocks::ZERO, |s| self.blocks_for(s.tokens.len()));
            let fits = need <= usage.under_floor() + usage.cached;
            let within = fits && tenant.running < self.seats_of(usage.share.floor);
            Some(((Some(head) != oldest, !within, head), within, place))
        });
        heads.min_by_key(|(key, ..)| *key).map(|((_, _, head), within, place)| (within, head, place))
    }

    /// Starts one waiting sequence with what the prefix cache has of it, if there is room for all its tokens.
    fn start(&mut self, step: &mut Step, id: SequenceId) -> Result<(), WaitReason> {
        let size = self.config.block_size.0 as usize;
        let Some(sequence) = self.sequences.get_mut(&id) else { return Err(WaitReason::Budget) };
        let Some(tenant) = self.tenants.get(&sequence.tenant) else { return Err(WaitReason::Budget) };
        let (account, total) = (sequence.account, sequence.tokens.len());
        let mut found = CachedPrefix::default();
        if self.config.prefix_cache {
            sequence.extend_chain(&self.hasher, tenant.root, size);
            found =
                self.pool.cached_prefix(account, &sequence.chain, &sequence.tokens[..total / size * size]);
        }
        let hit = found.blocks as usize;
        // All of it is there: the last token is computed again, in a copy of its block unless nobody else reads that.
        let whole = hit * size == total;
        let begin = if whole { total - 1 } else { hit * size };
        let copy = whole && found.last_is_held;
        let wanted = self.blocks_for(total).0 - found.blocks + u32::from(copy);
        self.room_for(step, account, wanted, found.unreferenced)?;

        // More of it may be in the cache now.
        let most = step.end(id, total).max(begin + 1);
        let n = self.chunk(begin, most, step.budget.offer(begin, most).min(step.prompt_tokens_left()));
        if n == 0 {
            return Err(WaitReason::Budget);
        }
        let mut progress = Progress { committed: if whole { hit - 1 } else { hit }, ..Progress::default() };
        self.lease_prefix(id, &mut progress.table, hit);
        let now = self.blocks_for(begin + n).0 - found.blocks + u32::from(copy);
        let mut place = progress.table.next_place(Blocks(wanted));
        let mut leases = Vec::with_capacity(now as usize);
        while (leases.len() as u32) < now {
            let Ok(lease) = take(&mut self.pool, &mut step.claims, account, place) else {
                self.release_all(leases);
                progress.table.release(&mut self.pool);
                return Err(WaitReason::Exhausted { free: self.pool.free(), wanted: Blocks(wanted) });
            };
            place = Place::After(lease.block());
            leases.push(lease);
        }
        progress.computed = Tokens(begin as u32);
        progress.applied = Tokens(begin as u32);
        self.enter(step, id, progress, begin);
        step.budget.add(begin, n, begin + n == total);
        self.add_row(step, id, begin, n, leases);
        let later = wanted.saturating_sub(now);
        step.outstanding.resize(step.outstanding.len().max(account.index() + 1), 0);
        step.outstanding[account.index()] += later;
        step.outstanding_total += later;
        Ok(())
    }

    /// Whether an account may start a sequence that needs this many blocks, beside `pinned` cached ones that it would hold.
    fn room_for(&self, step: &Step, account: AccountId, wanted: u32, pinned: u32) -> Result<(), WaitReason> {
        let Some(usage) = self.pool.usage(account) else { return Err(WaitReason::Budget) };
        let outstanding = step.outstanding.get(account.index()).copied().unwrap_or(0);
        let own_cached = usage.cached.0 - pinned;
        let fixed = usage.used().0 - own_cached + outstanding;
        if fixed + wanted > usage.share.ceiling.0 {
            let room = Blocks(usage.share.ceiling.0.saturating_sub(fixed));
            return Err(WaitReason::Ceiling { room, wanted: Blocks(wanted) });
        }
        if fixed + wanted <= usage.share.floor.0 {
            return Ok(());
        }
        let others = self.pool.accounts().filter(|(id, _)| *id != account);
        let evictable: u32 = others.map(|(_, usage)| usage.cached.0.min(usage.over_floor().0)).sum();
        let spoken_for = step.claims.of_others(account) + step.outstanding_total;
        let free = (self.pool.free().0 + evictable + own_cached).saturating_sub(spoken_for);
        if wanted > free {
            return Err(WaitReason::Exhausted { free: Blocks(free), wanted: Blocks(wanted) });
        }
        if step.lending_closed {
            return Err(WaitReason::Behind { wanted: Blocks(wanted) });
        }
        Ok(())
    }

    /// Leases the first `hit` blocks of the sequence's chain from the prefix cache.
    fn lease_prefix(&mut self, id: SequenceId, table: &mut BlockTable, hit: usize) {
        let size = self.config.block_size.0 as usize;
        let Some(sequence) = self.sequences.get(&id) else { return };
        let blocks = sequence.chain.iter().zip(sequence.tokens.chunks_exact(size));
        for (key, tokens) in blocks.take(hit) {
            if let Some(lease) = self.pool.acquire(sequence.account, *key, tokens) {
                table.push_shared(lease);
            }
        }
        debug_assert_eq!(table.len(), hit, "what was found can be leased");
    }

    /// Makes a waiting sequence a running one.
    fn enter(&mut self, step: &mut Step, id: SequenceId, progress: Progress, cached: usize) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        let Some(tenant) = self.tenants.get_mut(&sequence.tenant) else { return };
        if let State::Waiting(Some(rank)) = std::mem::replace(&mut sequence.state, State::Running(progress)) {
            tenant.queue.remove(&(rank, id));
        }
        tenant.running += 1;
        self.running.insert(id);
        // Nothing of it was computed here, and it has output: it was restored. Its last token is no input yet.
        if !sequence.begun && sequence.tokens.len() > sequence.prompt_len {
            tenant.counters.recomputed += (sequence.tokens.len() - 1).saturating_sub(cached) as u64;
        }
        let mut started = false;
        if let Some(request) = self.requests.get_mut(&sequence.request)
            && request.cached_tokens.is_none()
        {
            started = true;
            // A restored one may find tokens of its output too. What it emitted needed the prompt's last token computed.
            let cached = cached.min(sequence.prompt_len - 1);
            request.cached_tokens = Some(Tokens(cached as u32));
            tenant.unstarted -= 1;
            tenant.counters.prefix_queries += sequence.prompt_len as u64;
            tenant.counters.prefix_hits += cached as u64;
        }
        step.flight.begun.push((id, started));
        step.plan.begin.push(begin_of(id, sequence));
    }

    /// Plans positions `[start, start + n)` of a running sequence. `leases` are the blocks that these positions need, of which
    /// the first replaces a shared one where it must.
    fn add_row(&mut self, step: &mut Step, id: SequenceId, start: usize, n: usize, leases: Vec<BlockLease>) {
        let size = self.config.block_size.0 as usize;
        let plan = step.plan.id;
        let Some(sequence) = self.sequences.get_mut(&id) else { return self.release_all(leases) };
        let total = sequence.total();
        let inputs = (start..start + n).map(|position| input(sequence, id, position)).collect();
        let State::Running(progress) = &mut sequence.state else { return self.release_all(leases) };
        let mut leases = leases.into_iter();
        let index = start / size;
        let mut changed_from = progress.sent.min(progress.table.len());
        let written = progress
            .table
            .make_writable(index, &mut self.pool, |_| leases.next().ok_or(AllocError::Exhausted));
        if let Ok(CopyOnWrite::Copied { from, to }) = written {
            let tokens = Tokens((start - index * size) as u32);
            step.plan.copies.push(BlockCopy { from: from.block(), to, tokens });
            step.flight.copies.push(MadeCopy { seq: id, index, from });
            changed_from = changed_from.min(index);
        }
        leases.for_each(|lease| progress.table.push(lease));
        debug_assert!(progress.table.len() >= (start + n).div_ceil(size), "blocks for every position");
        let blocks: Vec<BlockId> = progress.table.blocks_from(changed_from);
        progress.sent = progress.table.len();
        progress.computed = Tokens((start + n) as u32);
        sequence.in_flight += 1;
        step.tokens_left -= n;
        let mut samples = Few::new();
        if start + n == total {
            samples.push(id);
            sequence.pending.push_back(plan);
            // Nobody waits behind a choice that has drawn.
            if total == sequence.prompt_len {
                self.fork_followers(step, id, &mut samples);
            }
        }
        let table = TableUpdate { from: changed_from as u32, blocks };
        step.plan.rows.push(Row { seq: id, start: Tokens(start as u32), inputs, table, samples, drafts: 0 });
    }

    /// At the end of a prompt the request's other choices begin: they draw from the same logits and share all blocks.
    fn fork_followers(&mut self, step: &mut Step, leader: SequenceId, samples: &mut Few<SequenceId>) {
        let Some(request) = self.sequences.get(&leader).map(|s| s.request) else { return };
        let Some(request) = self.requests.get_mut(&request).filter(|r| !r.followers.is_empty()) else {
            return;
        };
        for id in std::mem::take(&mut request.followers) {
            let Some(parent) = self.sequences.get(&leader) else { continue };
            let Some(from) = parent.running() else { continue };
            let progress = Progress {
                computed: from.computed,
                applied: from.computed,
                table: from.table.fork(&mut self.pool),
                committed: from.computed.0 as usize / self.config.block_size.0 as usize,
                ..Progress::default()
            };
            let (tokens, chain) = (parent.tokens.clone(), parent.chain.clone());
            let Some(sequence) = self.sequences.get_mut(&id) else { continue };
            sequence.tokens = tokens;
            sequence.chain = chain;
            sequence.state = State::Running(progress);
            sequence.pending.push_back(step.plan.id);
            sequence.in_flight += 1;
            step.plan.begin.push(begin_of(id, sequence));
            step.flight.forked.push(id);
            samples.push(id);
            if let Some(tenant) = self.tenants.get_mut(&sequence.tenant) {
                tenant.running += 1;
            }
            self.running.insert(id);
            if self.running.len() + step.kept_seats > self.config.max_num_seqs as usize {
                // It has its first token from this plan and goes on when there is a seat.
                self.preempt(id);
            }
        }
    }
}

fn begin_of(id: SequenceId, sequence: &mut Sequence) -> Begin {
    sequence.begun = true;
    let Sequence { choice, sampling, prompt_len, .. } = *sequence;
    let tokens = if sampling.penalties.is_none() { Vec::new() } else { sequence.tokens.clone() };
    Begin { seq: id, choice, sampling, prompt: Tokens(prompt_len as u32), tokens }
}

fn input(sequence: &Sequence, id: SequenceId, position: usize) -> Input {
    match sequence.tokens.get(position) {
        Some(token) => Input::Known(*token),
        None => Input::Sampled { plan: sequence.pending[position - sequence.tokens.len()], seq: id },
    }
}
