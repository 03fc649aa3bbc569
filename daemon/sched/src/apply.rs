//! What a plan's output means.
//!
//! **Owns** the way back: positions become computed, blocks become findable, tokens become known, sequences end, and blocks
//! that no plan in flight reads any more return. **Never** starts anything.

use pagedd_core::{FinishReason, SequenceId, Tokens};
use pagedd_kv::BlockLease;

use crate::plan::{Row, Sampled, StepOutput, StepPlan};
use crate::request::{Applied, Emitted, Request, Started};
use crate::scheduler::Scheduler;
use crate::sequence::{Sequence, SequenceSnapshot, State};

/// Draws by sequence, those of one in their order.
struct Drawn(Vec<Sampled>);

impl Drawn {
    fn new(mut sampled: Vec<Sampled>) -> Self {
        // Rows come in the order of age as a rule, and with them their draws.
        sampled.sort_by_key(|sampled| sampled.seq);
        Self(sampled)
    }

    fn of(&mut self, id: SequenceId) -> &mut [Sampled] {
        let first = self.0.partition_point(|sampled| sampled.seq < id);
        let count = self.0[first..].iter().take_while(|sampled| sampled.seq == id).count();
        &mut self.0[first..first + count]
    }
}

impl Scheduler {
    /// Takes the output of the oldest plan in flight.
    ///
    /// A token drawn after its choice ended is dropped. A row that failed, or that lacks a token it was to draw, ends its whole
    /// request with [`FinishReason::Failed`], and no other.
    #[allow(clippy::needless_pass_by_value, reason = "what must not be applied twice is given away")]
    pub fn apply(&mut self, plan: StepPlan, output: StepOutput) -> Applied {
        debug_assert_eq!(output.plan, plan.id, "the output of another plan");
        debug_assert_eq!(self.flights.front().map(|f| f.id), Some(plan.id), "plans are applied in order");
        let mut applied = Applied::default();
        // Of use to a target alone.
        if self.config.itl_target_us.is_some() && plan.is_mixed() {
            self.pace.learn(plan.predicted_us(&self.config.cost), output.compute_us);
        }
        if let Some(flight) = self.flights.pop_front() {
            for copy in flight.copies {
                self.pool.release(copy.from);
            }
            let started = flight.begun.iter().filter(|(_, started)| *started);
            applied.started = started.filter_map(|(id, _)| self.started(*id)).collect();
        }
        applied.tokens.reserve(output.sampled.len());
        let mut drawn = Drawn::new(output.sampled);
        for row in &plan.rows {
            if output.failed.iter().any(|(seq, _)| *seq == row.seq) {
                self.fail(row, &mut applied);
                continue;
            }
            let mut right = 0;
            for id in &row.samples {
                let drawn = drawn.of(*id);
                if *id == row.seq {
                    right = self.judge(row, drawn);
                }
                let most = if *id == row.seq { right + 1 } else { 1 };
                let count = drawn.len().min(most);
                self.record_drawn(*id, &mut drawn[..count], &mut applied);
            }
            self.record_computed(row, right);
        }
        for row in &plan.rows {
            self.land(row, true);
        }
        self.suspects.remove(&plan.rows);
        applied
    }

    /// What a sequence found in the cache when it started its request, unless the request has ended.
    fn started(&self, id: SequenceId) -> Option<Started> {
        let request = self.sequences.get(&id)?.request;
        let Request { tenant, cached_tokens, .. } = self.requests.get(&request)?;
        Some(Started { request, tenant: *tenant, cached_tokens: (*cached_tokens)? })
    }

    /// Undoes the newest plan in flight, which never ran and never will.
    pub fn revert(&mut self, plan: StepPlan) {
        debug_assert_eq!(
            self.flights.back().map(|f| f.id),
            Some(plan.id),
            "only the newest plan is reverted"
        );
        let Some(flight) = self.flights.pop_back() else { return };
        for row in plan.rows.iter().rev() {
            for id in &row.samples {
                if let Some(sequence) = self.sequences.get_mut(id)
                    && sequence.pending.back() == Some(&plan.id)
                {
                    sequence.pending.pop_back();
                }
            }
            if let Some(progress) = self.sequences.get_mut(&row.seq).and_then(Sequence::progress_mut) {
                progress.computed = row.start;
                progress.sent = row.table.from as usize;
                progress.guesses = false;
            }
        }
        for copy in flight.copies.into_iter().rev() {
            match self.sequences.get_mut(&copy.seq).and_then(Sequence::progress_mut) {
                Some(progress) => progress.table.undo_copy(copy.index, copy.from, &mut self.pool),
                None => self.pool.release(copy.from),
            }
        }
        let size = self.config.block_size.0 as usize;
        for row in &plan.rows {
            if let Some(progress) = self.sequences.get_mut(&row.seq).and_then(Sequence::progress_mut) {
                // Blocks that the worker had before, for guesses that were wrong, stay.
                let before = (row.start.0 as usize).div_ceil(size).max(row.table.from as usize);
                progress.table.truncate(before, &mut self.pool);
            }
        }
        for id in flight.forked.into_iter().rev() {
            self.return_to_queue(id, true);
        }
        for row in &plan.rows {
            self.land(row, false);
        }
        for (id, started) in flight.begun.into_iter().rev() {
            let request = self.sequences.get(&id).map(|s| s.request);
            if let Some(request) = request.and_then(|id| self.requests.get_mut(&id))
                && started
            {
                request.cached_tokens = None;
                if let Some(tenant) = self.tenants.get_mut(&request.tenant) {
                    tenant.unstarted += 1;
                }
            }
            self.return_to_queue(id, false);
        }
        self.forget.extend(plan.end);
        self.next_plan = plan.id;
    }

    /// A running sequence whose first row never ran waits again.
    fn return_to_queue(&mut self, id: SequenceId, follower: bool) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        match std::mem::replace(&mut sequence.state, State::Waiting(None)) {
            State::Running(progress) | State::Preempted(progress) => progress.table.release(&mut self.pool),
            state @ (State::Waiting(_) | State::Finished(..)) => {
                sequence.state = state;
                return;
            }
        }
        self.leaving.remove(&id);
        if let Some(tenant) = self.tenants.get_mut(&sequence.tenant)
            && self.running.remove(&id)
        {
            tenant.running -= 1;
        }
        if follower {
            sequence.tokens = Vec::new();
            sequence.chain = Vec::new();
            let request = sequence.request;
            if let Some(known) = self.requests.get_mut(&request) {
                known.followers.push_front(id);
                self.hand_over_prompt(request);
            }
        } else {
            self.enqueue(id);
        }
    }

    /// The state that a fresh worker must have before it gets the plans in flight again, oldest first.
    #[must_use]
    pub fn snapshot(&self) -> Vec<SequenceSnapshot> {
        let known = self.sequences.iter().filter_map(|(id, sequence)| {
            let progress = sequence.progress()?;
            // A sequence that only plans in flight begin is theirs to begin.
            progress.entered.then(|| SequenceSnapshot {
                seq: id,
                choice: sequence.choice,
                sampling: sequence.sampling,
                tokens: sequence.tokens.clone(),
                prompt: Tokens(sequence.prompt_len as u32),
                blocks: progress
                    .table
                    .leases()
                    .iter()
                    .take(progress.sent_applied)
                    .map(BlockLease::block)
                    .collect(),
            })
        });
        known.collect()
    }

    fn fail(&mut self, row: &Row, applied: &mut Applied) {
        // The row's table was set before it failed, and later plans in flight build on it.
        if let Some(progress) = self.sequences.get_mut(&row.seq).and_then(Sequence::progress_mut) {
            progress.sent_applied = row.table.from as usize + row.table.blocks.len();
        }
        for id in &row.samples {
            if let Some(sequence) = self.sequences.get_mut(id) {
                sequence.pending.pop_front();
            }
        }
        if let Some(request) = self.sequences.get(&row.seq).map(|s| s.request) {
            applied.finished.extend(self.finish_request(request, FinishReason::Failed));
        }
    }

    /// Positions `[start, certain + right)` are computed: blocks that they fill can be found from now on. What lies behind was
    /// computed from wrong guesses, and is computed again.
    fn record_computed(&mut self, row: &Row, right: usize) {
        let size = self.config.block_size.0 as usize;
        let Some(sequence) = self.sequences.get_mut(&row.seq) else { return };
        let end = row.certain().0 as usize + right;
        let (prompt, request) = (sequence.prompt_len, sequence.request);
        if (row.start.0 as usize) < prompt
            && let Some(request) = self.requests.get_mut(&request)
        {
            request.prompt_computed = request.prompt_computed.max(Tokens(end.min(prompt) as u32));
        }
        // What follows a failed row was computed from nothing.
        let failed = matches!(sequence.state, State::Finished(FinishReason::Failed, _));
        // A token drawn after the end was dropped, so that what was computed from it has no name.
        let known = end.min(sequence.tokens.len());
        let Some(progress) = sequence.progress_mut() else { return };
        progress.applied = Tokens(end as u32);
        if row.drafts > 0 {
            progress.computed = progress.applied;
            progress.guesses = false;
        }
        progress.sent_applied = row.table.from as usize + row.table.blocks.len();
        let (from, to) = (progress.committed, known / size);
        if failed || from >= to || !self.config.prefix_cache {
            return;
        }
        let Some(root) = self.tenants.get(&sequence.tenant).map(|tenant| tenant.root) else { return };
        sequence.extend_chain(&self.hasher, root, size);
        // The keys and the blocks are two fields of one sequence.
        let Sequence { tokens, chain, state, .. } = sequence;
        let (State::Running(progress) | State::Preempted(progress) | State::Finished(_, progress)) = state
        else {
            return;
        };
        for i in from..to {
            self.pool.commit(&progress.table.leases()[i], chain[i], &tokens[i * size..(i + 1) * size]);
        }
        progress.committed = to;
    }

    /// Takes what a sequence drew, in order, up to where it ends.
    fn record_drawn(&mut self, id: SequenceId, drawn: &mut [Sampled], applied: &mut Applied) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        sequence.pending.pop_front();
        if drawn.is_empty() && !sequence.is_finished() {
            let request = sequence.request;
            applied.finished.extend(self.finish_request(request, FinishReason::Failed));
        }
        for drawn in drawn {
            self.emit(id, drawn, applied);
        }
    }

    /// One token more, unless the sequence has ended.
    fn emit(&mut self, id: SequenceId, drawn: &mut Sampled, applied: &mut Applied) {
        let Some(sequence) = self.sequences.get_mut(&id).filter(|s| !s.is_finished()) else { return };
        sequence.tokens.push(drawn.token);
        let (request_id, tenant_id, choice) = (sequence.request, sequence.tenant, sequence.choice);
        if let Some(tenant) = self.tenants.get_mut(&tenant_id) {
            tenant.counters.output_tokens += 1;
        }
        let Some(request) = self.requests.get_mut(&request_id) else { return };
        request.output_tokens += Tokens(1);
        let end = sequence.end(&request.stop_ids);
        applied.tokens.push(Emitted {
            request: request_id,
            tenant: tenant_id,
            choice,
            token: drawn.token,
            logprob: drawn.logprob,
            top: std::mem::take(&mut drawn.top),
        });
        applied.finished.extend(end.and_then(|reason| self.finish(id, reason)));
    }

    /// One plan less names the sequences of a row.
    fn land(&mut self, row: &Row, ran: bool) {
        let others = row.samples.iter().filter(|id| **id != row.seq);
        for id in std::iter::once(&row.seq).chain(others) {
            let Some(sequence) = self.sequences.get_mut(id) else { continue };
            sequence.in_flight -= 1;
            let left = sequence.in_flight;
            if let Some(progress) = sequence.progress_mut() {
                progress.entered |= ran;
            }
            if left == 0 {
                self.settle(*id);
            }
        }
    }
}
