//! The scheduler's state, and how requests enter it.
//!
//! **Owns** every sequence, queue and, through the pool, every block of one engine. **Never** decides here what runs next: that
//! is `step`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use pagedd_core::{Blocks, FinishReason, PlanId, RequestId, SequenceId, TenantId, TokenId, Tokens};
use pagedd_kv::{BlockLease, BlockPool, PrefixHasher};

use crate::budget::Pace;
use crate::config::{SchedulerConfig, Tuning};
use crate::draft::Drafter;
use crate::request::{AdmitError, Ended, Finished, NewRequest, Request};
use crate::restore::blocks_at_full_length;
use crate::sequence::{Progress, Sequence, State};
use crate::step::Wait;
use crate::suspect::Suspects;
use crate::table::SequenceTable;
use crate::tenant::Tenant;

/// Which rows run in the next step. See the crate's page for the order of calls.
#[derive(Debug)]
pub struct Scheduler {
    pub(crate) config: SchedulerConfig,
    pub(crate) pool: BlockPool,
    pub(crate) hasher: PrefixHasher,
    pub(crate) tenants: BTreeMap<TenantId, Tenant>,
    pub(crate) requests: BTreeMap<RequestId, Request>,
    /// In the order of age.
    pub(crate) sequences: SequenceTable,
    pub(crate) running: BTreeSet<SequenceId>,
    /// Preempted or finished, and named by a plan in flight.
    pub(crate) leaving: BTreeSet<SequenceId>,
    /// Plans not yet applied, oldest first.
    pub(crate) flights: VecDeque<Flight>,
    /// Sequences that the next plan ends.
    pub(crate) forget: Vec<SequenceId>,
    /// Requests that would not fit the shares as last set; while there are any, some shares are not in force.
    pub(crate) misfits: BTreeSet<RequestId>,
    pub(crate) suspects: Suspects,
    pub(crate) waits: Vec<Wait>,
    pub(crate) now_us: u64,
    pub(crate) pace: Pace,
    next_sequence: u64,
    pub(crate) next_plan: PlanId,
}

/// What must be kept until a plan is applied.
#[derive(Debug)]
pub(crate) struct Flight {
    pub id: PlanId,
    /// Copies that the plan makes: it reads `from`.
    pub copies: Vec<MadeCopy>,
    /// Sequences that the plan begins from a queue; `true` where that started their request.
    pub begun: Vec<(SequenceId, bool)>,
    /// Sequences that fork in this plan from the choice that computed the prompt, in order.
    pub forked: Vec<SequenceId>,
}

#[derive(Debug)]
pub(crate) struct MadeCopy {
    pub seq: SequenceId,
    pub index: usize,
    pub from: BlockLease,
}

/// A choice that enters.
#[derive(Debug)]
pub(crate) struct Entering {
    pub choice: u32,
    /// Tokens behind the prompt that it has already.
    pub emitted: Vec<TokenId>,
    /// It has none and waits behind the choice that computes the prompt.
    pub follows: bool,
}

impl Scheduler {
    /// A scheduler with no tenants. A `block_size` below 2 is taken as 2, a limit of 0 as 1, and no more sequences run than a step has
    /// tokens, so that each of them gets its own in every step.
    #[must_use]
    pub fn new(mut config: SchedulerConfig) -> Self {
        config.block_size.0 = config.block_size.0.max(2);
        config.max_num_batched_tokens.0 = config.max_num_batched_tokens.0.max(1);
        config.max_num_seqs = config.max_num_seqs.clamp(1, config.max_num_batched_tokens.0);
        Self {
            pool: BlockPool::new(config.capacity),
            hasher: PrefixHasher::new(config.cache_key),
            config,
            tenants: BTreeMap::new(),
            requests: BTreeMap::new(),
            sequences: SequenceTable::default(),
            running: BTreeSet::new(),
            leaving: BTreeSet::new(),
            flights: VecDeque::new(),
            forget: Vec::new(),
            misfits: BTreeSet::new(),
            suspects: Suspects::default(),
            waits: Vec::new(),
            now_us: 0,
            pace: Pace::default(),
            next_sequence: 1,
            next_plan: PlanId(1),
        }
    }

    /// Changes what may change, from the next plan on.
    pub fn tune(&mut self, tuning: Tuning) {
        let Tuning { max_queued_requests, itl_target_us, prompt_lookup } = tuning;
        self.config.max_queued_requests = max_queued_requests;
        self.config.itl_target_us = itl_target_us;
        self.config.prompt_lookup = prompt_lookup;
    }

    /// What it was made with, and tuned to.
    #[must_use]
    pub fn config(&self) -> &SchedulerConfig {
        &self.config
    }

    /// Takes a request into its tenant's queue.
    ///
    /// # Errors
    /// Nothing has changed.
    pub fn admit(&mut self, new: NewRequest) -> Result<(), AdmitError> {
        let needed = self.needed(&new)?;
        let allowed = self.allowed(new.tenant);
        if needed > allowed {
            return Err(AdmitError::NeverFits { needed, allowed });
        }
        let waiting = self.tenants.get(&new.tenant).map_or(0, |tenant| tenant.unstarted);
        if waiting >= self.config.max_queued_requests {
            return Err(AdmitError::QueueFull { waiting });
        }
        let choices = (0..new.n).map(|choice| Entering { choice, emitted: Vec::new(), follows: choice > 0 });
        self.insert(new, needed, choices.collect(), None);
        Ok(())
    }

    /// Blocks that the request needs at full length, if it is one that can run.
    pub(crate) fn needed(&self, new: &NewRequest) -> Result<Blocks, AdmitError> {
        if !self.tenants.contains_key(&new.tenant) {
            return Err(AdmitError::UnknownTenant(new.tenant));
        }
        let nothing =
            [("prompt", new.prompt.len()), ("n", new.n as usize), ("max_tokens", new.max_tokens.0 as usize)];
        if let Some((field, _)) = nothing.into_iter().find(|(_, number)| *number == 0) {
            return Err(AdmitError::Nothing { field });
        }
        if self.requests.contains_key(&new.id) {
            return Err(AdmitError::Duplicate(new.id));
        }
        let max_model_len = self.config.max_model_len;
        let prompt = u32::try_from(new.prompt.len()).unwrap_or(u32::MAX);
        if prompt >= max_model_len.0 {
            return Err(AdmitError::ContextLength { prompt: Tokens(prompt), max_model_len });
        }
        let most = new.max_tokens.min(Tokens(max_model_len.0 - prompt));
        Ok(blocks_at_full_length(Tokens(prompt), most, new.n, self.config.block_size))
    }

    /// Makes a known tenant's request and its open choices, of which there is nothing to do if there are none. Those that do not
    /// follow another wait in the queue.
    pub(crate) fn insert(
        &mut self,
        new: NewRequest,
        needed: Blocks,
        choices: Vec<Entering>,
        cached_tokens: Option<Tokens>,
    ) -> Vec<SequenceId> {
        let Some(tenant) = self.tenants.get_mut(&new.tenant).filter(|_| !choices.is_empty()) else {
            return Vec::new();
        };
        tenant.unstarted += u32::from(cached_tokens.is_none());
        let account = tenant.account;
        let prompt_len = new.prompt.len();
        let room = self.config.max_model_len.0 - prompt_len as u32;
        let limit = prompt_len + new.max_tokens.0.min(room) as usize;
        let (mut open, mut queued, mut followers) = (Vec::new(), Vec::new(), VecDeque::new());
        for Entering { choice, emitted, follows } in choices {
            let id = SequenceId(self.next_sequence);
            self.next_sequence += 1;
            open.push(id);
            let mut tokens = Vec::new();
            if follows {
                followers.push_back(id);
            } else {
                tokens.clone_from(&new.prompt);
                tokens.extend(emitted);
                queued.push(id);
            }
            let sequence = Sequence {
                request: new.id,
                tenant: new.tenant,
                account,
                choice,
                sampling: new.sampling,
                tokens,
                prompt_len,
                pending: VecDeque::new(),
                limit,
                chain: Vec::new(),
                in_flight: 0,
                begun: false,
                drafter: Drafter::default(),
                state: State::Waiting(None),
            };
            self.sequences.insert(id, sequence);
        }
        let request = Request {
            tenant: new.tenant,
            prompt: new.prompt,
            stop_ids: new.stop_ids,
            needed,
            open: open.clone(),
            followers,
            cached_tokens,
            prompt_computed: Tokens::ZERO,
            output_tokens: Tokens::ZERO,
        };
        self.requests.insert(new.id, request);
        for id in queued {
            self.enqueue(id);
        }
        open
    }

    /// Cancels a request: every choice that has not ended ends now. Blocks that a plan in flight may read return when it is
    /// applied. Empty where the request is not known, so that cancelling twice is harmless.
    #[must_use = "these ends are reported nowhere else"]
    pub fn cancel(&mut self, request: RequestId) -> Vec<Finished> {
        if let Some(known) = self.requests.get(&request)
            && let Some(tenant) = self.tenants.get_mut(&known.tenant)
        {
            tenant.counters.aborted += 1;
        }
        self.finish_request(request, FinishReason::Cancelled)
    }

    /// Ends one choice for a reason that only the gateway sees, such as a stop string. Tokens drawn for it by plans in flight
    /// are discarded. Empty where the choice is not known or has ended.
    #[must_use = "this end is reported nowhere else"]
    pub fn finish_choice(&mut self, request: RequestId, choice: u32, reason: FinishReason) -> Vec<Finished> {
        let open = self.requests.get(&request).map(|r| r.open.as_slice()).unwrap_or_default();
        let chosen = open.iter().find(|id| self.sequences.get(id).is_some_and(|s| s.choice == choice));
        chosen.copied().and_then(|id| self.finish(id, reason)).into_iter().collect()
    }

    /// Ends everything as failed: no worker will ever run it.
    #[must_use = "these ends are reported nowhere else"]
    pub fn fail_all(&mut self) -> Vec<Finished> {
        let requests: Vec<_> = self.requests.keys().copied().collect();
        requests.into_iter().flat_map(|request| self.finish_request(request, FinishReason::Failed)).collect()
    }

    /// Ends every open choice of a request, in order.
    pub(crate) fn finish_request(&mut self, request: RequestId, reason: FinishReason) -> Vec<Finished> {
        let Some(known) = self.requests.get_mut(&request) else { return Vec::new() };
        // So that none of them is made to take over the prompt.
        known.followers.clear();
        let open = known.open.clone();
        open.into_iter().filter_map(|id| self.finish(id, reason)).collect()
    }

    /// Ends one choice.
    pub(crate) fn finish(&mut self, id: SequenceId, reason: FinishReason) -> Option<Finished> {
        let sequence = self.sequences.get_mut(&id).filter(|s| !s.is_finished())?;
        let (request, tenant, choice) = (sequence.request, sequence.tenant, sequence.choice);
        let state = std::mem::replace(&mut sequence.state, State::Waiting(None));
        let (progress, rank) = match state {
            State::Waiting(rank) => (Progress::default(), rank),
            State::Running(p) | State::Preempted(p) | State::Finished(_, p) => (p, None),
        };
        sequence.state = State::Finished(reason, progress);
        if let Some(tenant) = self.tenants.get_mut(&tenant) {
            if self.running.remove(&id) {
                tenant.running -= 1;
            }
            if let Some(rank) = rank {
                tenant.queue.remove(&(rank, id));
            }
        }
        if sequence.in_flight > 0 {
            self.leaving.insert(id);
        } else {
            self.settle(id);
        }
        let ended = self.close_choice(request, id);
        Some(Finished { request, tenant, choice, reason, ended })
    }

    /// Takes a choice out of its request; the last one ends it.
    fn close_choice(&mut self, id: RequestId, seq: SequenceId) -> Option<Ended> {
        let request = self.requests.get_mut(&id)?;
        request.open.retain(|open| *open != seq);
        request.followers.retain(|follower| *follower != seq);
        if !request.open.is_empty() {
            self.hand_over_prompt(id);
            return None;
        }
        let request = self.requests.remove(&id)?;
        if request.cached_tokens.is_none()
            && let Some(tenant) = self.tenants.get_mut(&request.tenant)
        {
            tenant.unstarted -= 1;
        }
        if self.misfits.remove(&id) {
            self.put_shares_in_force();
        }
        Some(request.used())
    }

    /// Where the choice that was to compute the prompt is gone before it did, the next one does.
    pub(crate) fn hand_over_prompt(&mut self, id: RequestId) {
        let Some(request) = self.requests.get_mut(&id) else { return };
        if request.followers.len() < request.open.len() {
            return;
        }
        let Some(next) = request.followers.pop_front() else { return };
        if let Some(sequence) = self.sequences.get_mut(&next) {
            sequence.tokens.clone_from(&request.prompt);
        }
        self.enqueue(next);
    }

    /// A sequence that no plan in flight names and that does not run gives its blocks back.
    pub(crate) fn settle(&mut self, id: SequenceId) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        debug_assert_eq!(sequence.in_flight, 0, "{id} is named by a plan in flight");
        self.leaving.remove(&id);
        match std::mem::replace(&mut sequence.state, State::Waiting(None)) {
            State::Preempted(progress) => {
                progress.table.release(&mut self.pool);
                self.enqueue(id);
            }
            State::Finished(_, progress) => {
                progress.table.release(&mut self.pool);
                if sequence.begun {
                    self.forget.push(id);
                }
                self.sequences.remove(&id);
            }
            state @ (State::Waiting(_) | State::Running(_)) => sequence.state = state,
        }
    }

    /// Puts a waiting sequence into its tenant's queue.
    pub(crate) fn enqueue(&mut self, id: SequenceId) {
        let rank = self.config.policy.rank(id, self.now_us);
        if let Some(sequence) = self.sequences.get_mut(&id)
            && let Some(tenant) = self.tenants.get_mut(&sequence.tenant)
        {
            debug_assert!(matches!(sequence.state, State::Waiting(None)), "{id} is queued already, or runs");
            if self.config.prefix_cache {
                sequence.extend_chain(&self.hasher, tenant.root, self.config.block_size.0 as usize);
            }
            sequence.state = State::Waiting(Some(rank));
            tenant.queue.insert((rank, id));
        }
    }

    /// The sequence that no step may take a block from: the oldest that has not ended.
    pub(crate) fn oldest(&self) -> Option<SequenceId> {
        self.sequences.iter().find(|(_, sequence)| !sequence.is_finished()).map(|(id, _)| id)
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        for copy in self.flights.drain(..).flat_map(|flight| flight.copies) {
            self.pool.release(copy.from);
        }
        for sequence in self.sequences.take() {
            match sequence.state {
                State::Waiting(_) => {}
                State::Running(p) | State::Preempted(p) | State::Finished(_, p) => {
                    p.table.release(&mut self.pool);
                }
            }
        }
    }
}
