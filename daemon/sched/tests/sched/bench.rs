//! An engine loop around a scheduler and a toy worker, which proves after every step what must always hold.

use std::collections::{BTreeMap, VecDeque};

use pagedd_core::{
    Blocks, FinishReason, Penalties, RequestId, SamplingParams, SequenceId, StepCost, TenantId, TokenId,
    Tokens,
};
use pagedd_kv::{BlockKey, Domain, DomainOwner, Ledger, LedgerHeader, PrefixHasher};
use pagedd_sched::{
    AdmitError, Applied, Finished, Input, NewRequest, PolicyKind, Restored, RestoredChoice, Row, Scheduler,
    SchedulerConfig, ShareSpec, StepOutput, StepPlan,
};

use crate::worker::{Worker, mix, reference};

pub fn config(capacity: u32, block_size: u32) -> SchedulerConfig {
    SchedulerConfig {
        block_size: Tokens(block_size),
        capacity: Blocks(capacity),
        max_num_seqs: 8,
        max_num_batched_tokens: Tokens(64),
        max_model_len: Tokens(256),
        max_queued_requests: 100,
        policy: PolicyKind::Fcfs,
        cache_key: [7; 32],
        weight_digest: [9; 16],
        prefix_cache: true,
        prompt_lookup: false,
        max_drafts: 16,
        cost: StepCost::UNKNOWN,
        itl_target_us: None,
    }
}

/// A cost that is a straight line everywhere, in microseconds: of a step, a token, a row, and a pair of rows and of parts of prompts.
pub fn straight(step: f32, token: f32, row: f32, [row_pair_us, part_pair_us]: [f32; 2]) -> StepCost {
    StepCost {
        body_us: StepCost::SIZES.map(|n| step + token * n as f32),
        head_us: StepCost::SIZES.map(|n| row * n as f32),
        row_pair_us,
        part_pair_us,
    }
}

pub fn id(number: u64) -> RequestId {
    RequestId(u128::from(number).to_be_bytes())
}

pub fn share(floor: u32, ceiling: u32) -> ShareSpec {
    ShareSpec { floor: Blocks(floor), ceiling: Blocks(ceiling) }
}

/// A greedy request with a prompt of its own: the tokens depend on `number`.
pub fn request(number: u64, tenant: u32, prompt: u32, max_tokens: u32) -> NewRequest {
    let tokens = (0..prompt).map(|i| TokenId((number as u32 * 31 + i * 7) % 1000)).collect();
    NewRequest {
        id: id(number),
        tenant: TenantId(tenant),
        prompt: tokens,
        n: 1,
        max_tokens: Tokens(max_tokens),
        stop_ids: Vec::new(),
        sampling: SamplingParams {
            seed: number,
            penalties: Penalties { presence: f32::from(number % 4 == 3), ..Penalties::NONE },
            ..SamplingParams::GREEDY
        },
    }
}

pub struct Bench {
    pub scheduler: Scheduler,
    pub worker: Worker,
    /// Plans that may be in flight.
    pub depth: usize,
    pub flying: VecDeque<(StepPlan, StepOutput)>,
    pub requests: BTreeMap<RequestId, NewRequest>,
    /// In the order of their admission.
    admitted: Vec<RequestId>,
    /// Every record, oldest first.
    pub journal: Vec<Applied>,
    /// Prompt tokens that a request found in the cache when it started.
    started: BTreeMap<RequestId, Tokens>,
    pub restarts: u32,
    /// Of the worker's arena.
    pub ledger: Option<Ledger<Vec<u8>>>,
    pub adopted: u32,
    /// Prompt tokens of each sequence: they are numbered from 1, in the order of admission.
    prompts: BTreeMap<SequenceId, usize>,
    pub tokens: BTreeMap<(RequestId, u32), Vec<TokenId>>,
    pub finished: Vec<Finished>,
    /// Requests whose rows were made to fail.
    pub broken: Vec<RequestId>,
    pub steps: u64,
}

impl Bench {
    pub fn new(config: SchedulerConfig, depth: usize) -> Self {
        let worker = Worker::new(config.capacity.0, config.block_size.0);
        Self {
            scheduler: Scheduler::new(config),
            worker,
            depth,
            flying: VecDeque::new(),
            requests: BTreeMap::new(),
            admitted: Vec::new(),
            journal: Vec::new(),
            started: BTreeMap::new(),
            restarts: 0,
            ledger: None,
            adopted: 0,
            prompts: BTreeMap::new(),
            tokens: BTreeMap::new(),
            finished: Vec::new(),
            broken: Vec::new(),
            steps: 0,
        }
    }

    pub fn tenant(mut self, tenant: u32, floor: u32, ceiling: u32) -> Self {
        self.scheduler.set_share(TenantId(tenant), share(floor, ceiling)).unwrap();
        self
    }

    /// With a ledger of the arena.
    pub fn keep_ledger(&mut self) {
        let header = self.ledger_header();
        let memory = vec![0xee; header.ledger_bytes()];
        self.ledger = Some(Ledger::format(memory, &header, 7).unwrap());
        self.scheduler.watch_blocks();
    }

    fn ledger_header(&self) -> LedgerHeader {
        let config = self.scheduler.config();
        LedgerHeader {
            block_size: config.block_size,
            blocks: config.capacity,
            block_bytes: 8 * u64::from(config.block_size.0),
            model: config.weight_digest,
            key_id: [1; 16],
            weight_epoch: 0,
        }
    }

    /// Writes what happened, or of it the first `most` changes.
    pub fn write_ledger(&mut self, most: usize) {
        if let Some(ledger) = &mut self.ledger {
            let changes = self.scheduler.take_ledger_changes();
            changes.iter().take(most).for_each(|change| ledger.write(change));
        }
    }

    pub fn admit(&mut self, request: NewRequest) -> Result<(), AdmitError> {
        self.scheduler.admit(request.clone())?;
        for choice in 0..request.n {
            self.tokens.insert((request.id, choice), Vec::new());
            self.prompts.insert(SequenceId(self.prompts.len() as u64 + 1), request.prompt.len());
        }
        self.admitted.push(request.id);
        self.requests.insert(request.id, request);
        Ok(())
    }

    /// Plans if there is room, then applies the oldest if there is no more room or nothing to plan. `false`: idle.
    pub fn step(&mut self) -> bool {
        self.steps += 1;
        let planned = self.flying.len() < self.depth && self.plan().is_some();
        let apply = !self.flying.is_empty() && (!planned || self.flying.len() == self.depth);
        if apply {
            self.apply();
        }
        assert!(
            planned || apply || self.scheduler.is_idle(),
            "stalled with work to do: {:?}",
            self.scheduler.waits()
        );
        planned || apply
    }

    /// So many steps.
    pub fn run(&mut self, steps: u32) {
        for _ in 0..steps {
            self.step();
        }
    }

    /// Plans and runs one step.
    pub fn plan(&mut self) -> Option<&StepPlan> {
        let plan = self.scheduler.schedule(self.steps)?;
        self.check_budget(&plan);
        self.check();
        self.write_ledger(usize::MAX);
        let output = self.worker.run(&plan);
        self.flying.push_back((plan, output));
        self.flying.back().map(|(plan, _)| plan)
    }

    fn check_budget(&self, plan: &StepPlan) {
        let config = self.scheduler.config();
        assert!(plan.input_tokens() <= config.max_num_batched_tokens, "{} tokens", plan.input_tokens());
        assert!(plan.rows.len() <= config.max_num_seqs as usize, "{} rows", plan.rows.len());
        let mut seqs: Vec<_> = plan.rows.iter().map(|row| row.seq).collect();
        seqs.sort_unstable();
        seqs.dedup();
        assert_eq!(seqs.len(), plan.rows.len(), "one row per sequence");
        let drafts: u32 = plan.rows.iter().map(|row| row.drafts).sum();
        assert!(drafts <= config.max_drafts, "{drafts} guesses");
        for row in plan.rows.iter().filter(|row| row.drafts > 0) {
            assert_eq!(*row.samples, [row.seq], "a row with guesses draws for its own sequence only");
            assert!(row.inputs.iter().all(|input| matches!(input, Input::Known(_))), "{row:?}");
            assert!((row.drafts as usize) < row.inputs.len(), "{row:?}");
        }
        self.check_time(plan);
    }

    /// Beside a sequence that decodes, prompts keep to the target, but for the block that they may always have (and what is
    /// left of the blocks around it).
    fn check_time(&self, plan: &StepPlan) {
        let SchedulerConfig { cost, itl_target_us: Some(target_us), block_size, .. } =
            self.scheduler.config()
        else {
            return;
        };
        // One that comes back from preemption is computed anew, however little of it is not in the cache.
        let runs = |row: &Row| plan.begin.iter().all(|begin| begin.seq != row.seq);
        let past_prompt = |row: &Row| row.start.0 as usize >= self.prompts[&row.seq];
        let decodes = |row: &&Row| {
            row.inputs.len() as u32 - row.drafts == 1
                && !row.samples.is_empty()
                && past_prompt(row)
                && runs(row)
        };
        let decoding = plan.rows.iter().filter(decodes).count();
        let drafts: u32 = plan.rows.iter().map(|row| row.drafts).sum();
        let prompts = plan.input_tokens().0 - decoding as u32 - drafts;
        let us = plan.predicted_us(cost);
        assert!(
            decoding == 0 || us <= *target_us as f32 || prompts < 3 * block_size.0,
            "{us} us, {target_us} are wanted: {plan:?}"
        );
    }

    /// Applies the oldest plan in flight.
    pub fn apply(&mut self) -> Applied {
        let (plan, output) = self.flying.pop_front().expect("a plan in flight");
        for (later, _) in &mut self.flying {
            later.resolve(&output);
        }
        let applied = self.scheduler.apply(plan, output);
        self.write_ledger(usize::MAX);
        self.take(applied.clone());
        self.check();
        applied
    }

    fn take(&mut self, record: Applied) {
        for token in &record.tokens {
            let key = (token.request, token.choice);
            assert!(
                !self.finished.iter().rev().any(|f| (f.request, f.choice) == key),
                "a token after the end"
            );
        }
        self.keep(&record);
        for end in &record.finished {
            self.check_end(end);
        }
        self.finished.extend(record.finished.iter().cloned());
        self.journal.push(record);
    }

    fn keep(&mut self, record: &Applied) {
        for started in &record.started {
            let twice = self.started.insert(started.request, started.cached_tokens);
            assert_eq!(twice, None, "{started:?} twice");
        }
        for token in &record.tokens {
            self.tokens.get_mut(&(token.request, token.choice)).expect("a known choice").push(token.token);
        }
    }

    /// A new process, from admissions and from all records but the last `lost`. Where there is no ledger, its arena holds
    /// anything. Gives the choices that go on, in the order of their sequences.
    pub fn restart(&mut self, lost: usize) -> Vec<(RequestId, u32)> {
        let shares = self.scheduler.stats().tenants;
        self.flying.clear();
        self.scheduler = Scheduler::new(self.scheduler.config().clone());
        self.worker.respawn(Vec::new());
        self.worker.broken.clear();
        if self.ledger.is_none() {
            self.worker.arena.iter_mut().zip(1..).for_each(|(slot, i)| *slot = i);
        }
        for t in shares {
            self.scheduler.set_share(t.tenant, ShareSpec { floor: t.floor, ceiling: t.ceiling }).unwrap();
        }
        self.restarts += 1;
        self.journal.truncate(self.journal.len() - lost.min(self.journal.len()));
        self.started.clear();
        self.tokens.values_mut().for_each(Vec::clear);
        let journal = std::mem::take(&mut self.journal);
        for record in &journal {
            self.keep(record);
        }
        self.finished = journal.iter().flat_map(|record| record.finished.iter().cloned()).collect();
        self.journal = journal;
        self.prompts.clear();
        self.adopt();
        self.restore()
    }

    /// Every record tells the truth, and is taken over where there is room.
    fn adopt(&mut self) {
        let Some(ledger) = self.ledger.take() else { return };
        let ledger = Ledger::open(ledger.into_memory(), &self.ledger_header()).unwrap();
        let truth = self.truth();
        let size = self.scheduler.config().block_size.0 as usize;
        for (block, record) in ledger.records() {
            let slots = &self.worker.arena[block.0 as usize * size..][..size];
            let expected = truth.get(&(record.owner, record.key));
            assert_eq!(expected.map(Vec::as_slice), Some(slots), "{block} is not what its record says");
        }
        self.scheduler.watch_blocks();
        self.adopted += self.scheduler.adopt(ledger.records());
        self.check();
        self.ledger = Some(ledger);
    }

    /// What a block of each key holds.
    fn truth(&self) -> BTreeMap<(DomainOwner, BlockKey), Vec<u64>> {
        let config = self.scheduler.config();
        let hasher = PrefixHasher::new(config.cache_key);
        let mut truth = BTreeMap::new();
        for request in self.requests.values() {
            let owner = DomainOwner::Tenant(request.tenant);
            let root = hasher.root(&Domain { owner, weights: config.weight_digest, adapter: 0, dtype: 0 });
            for choice in 0..request.n {
                let (output, _) = reference(request, choice, config.max_model_len.0);
                let tokens: Vec<_> = request.prompt.iter().copied().chain(output).collect();
                let (mut key, mut slot) = (root, 0);
                for block in tokens.chunks_exact(config.block_size.0 as usize) {
                    key = hasher.block(key, block);
                    let slots = block.iter().map(|token| {
                        slot = mix(slot, u64::from(token.0) + 1);
                        slot
                    });
                    truth.insert((owner, key), slots.collect());
                }
            }
        }
        truth
    }

    fn restore(&mut self) -> Vec<(RequestId, u32)> {
        let mut restored = Vec::new();
        for id in self.admitted.clone() {
            let request = self.requests[&id].clone();
            let choices = (0..request.n).map(|choice| RestoredChoice {
                emitted: self.tokens[&(id, choice)].clone(),
                finished: self.ends(id).iter().find(|end| end.choice == choice).map(|end| end.reason),
            });
            let choices: Vec<_> = choices.collect();
            for (choice, _) in (0..).zip(&choices).filter(|(_, known)| known.finished.is_none()) {
                self.prompts.insert(SequenceId(self.prompts.len() as u64 + 1), request.prompt.len());
                restored.push((id, choice));
            }
            if choices.iter().any(|choice| choice.finished.is_none()) {
                let cached_tokens = self.started.get(&id).copied();
                let mut known = Restored { request, choices, cached_tokens };
                let finished = match self.scheduler.restore(&known) {
                    Ok(finished) => finished,
                    // It was removed, and of that the record was lost.
                    Err(AdmitError::UnknownTenant(_)) => known.finish(FinishReason::Cancelled),
                    Err(error) => panic!("{error}"),
                };
                self.note(finished);
                self.check();
            }
        }
        restored
    }

    /// The only plan in flight killed its worker.
    pub fn accuse(&mut self, plan: StepPlan) {
        let finished = self.scheduler.accuse(plan);
        self.broken.extend(finished.iter().map(|end| end.request));
        self.note(finished);
        self.check();
        self.worker.respawn(self.scheduler.snapshot());
    }

    pub fn cancel(&mut self, request: RequestId) {
        let finished = self.scheduler.cancel(request);
        self.note(finished);
        self.check();
    }

    /// Takes ends outside a step.
    pub fn note(&mut self, finished: Vec<Finished>) {
        if !finished.is_empty() {
            self.take(Applied { finished, ..Applied::default() });
        }
    }

    /// Compares an output with what the request gives when it is alone.
    fn check_end(&self, end: &Finished) {
        let request = &self.requests[&end.request];
        let got = &self.tokens[&(end.request, end.choice)];
        let (expected, reason) = reference(request, end.choice, self.scheduler.config().max_model_len.0);
        match end.reason {
            FinishReason::Cancelled => assert_eq!(got[..], expected[..got.len()], "{end:?}"),
            FinishReason::Failed => assert!(self.broken.contains(&end.request), "{end:?}"),
            FinishReason::Stop | FinishReason::Length => {
                assert_eq!((got, end.reason), (&expected, reason), "{end:?}");
            }
            FinishReason::ModelChanged | FinishReason::ModelGone => panic!("no scheduler says so: {end:?}"),
        }
        let twice = self.finished.iter().any(|f| (f.request, f.choice) == (end.request, end.choice));
        assert!(!twice, "{end:?} twice");
        if let Some(ended) = end.ended {
            let prompt = Tokens(request.prompt.len() as u32);
            assert!(ended.cached_tokens <= ended.prompt_tokens && ended.cached_tokens < prompt, "{ended:?}");
            assert!(ended.prompt_tokens <= prompt, "{ended:?} of {prompt}");
            if ended.output_tokens > Tokens::ZERO {
                assert_eq!(ended.prompt_tokens, prompt, "{end:?}");
            }
            if let Some(cached) = self.started.get(&end.request) {
                assert_eq!(ended.cached_tokens, *cached, "{end:?}");
            }
            let all = (0..request.n).map(|choice| self.tokens[&(end.request, choice)].len()).sum::<usize>();
            assert_eq!(ended.output_tokens.0 as usize, all, "{end:?}");
        }
    }

    pub fn check(&self) {
        self.scheduler.check().unwrap_or_else(|violation| panic!("step {}: {violation}", self.steps));
    }

    /// I9: the plans in flight, run again on what they left, leave the same.
    pub fn replay(&mut self, respawn: bool) {
        let arena = self.worker.arena.clone();
        let drawn_before: Vec<_> = self.flying.iter().map(|(_, output)| output.clone()).collect();
        for _ in 0..2 {
            let snapshot = self.scheduler.snapshot();
            if respawn {
                self.worker.respawn(snapshot);
            }
            for (i, (plan, _)) in self.flying.iter().enumerate() {
                for _ in 0..2 {
                    let again = self.worker.run(plan);
                    assert_eq!(again, drawn_before[i], "plan {} gave something else", plan.id);
                }
            }
            for (i, (plan, _)) in self.flying.iter().enumerate() {
                assert_eq!(self.worker.run(plan), drawn_before[i], "plan {} gave something else", plan.id);
            }
            let differing = arena.iter().zip(&self.worker.arena).filter(|(a, b)| a != b).count();
            assert_eq!(differing, 0, "slots that differ after running {} plans again", self.flying.len());
        }
    }

    /// Steps until nothing is left to do.
    pub fn finish(&mut self) {
        let mut left = 200_000;
        while self.step() {
            left -= 1;
            assert!(left > 0, "no end: {:?}", self.scheduler.stats());
        }
        assert!(self.scheduler.is_idle());
        self.everything_is_back();
    }

    pub fn everything_is_back(&self) {
        let stats = self.scheduler.stats();
        assert_eq!(stats.pool.held, Blocks::ZERO, "{stats:?}");
        assert_eq!(stats.pool.free + stats.pool.cached, stats.pool.capacity, "{stats:?}");
        for tenant in &stats.tenants {
            assert_eq!((tenant.running, tenant.waiting, tenant.queued_requests), (0, 0, 0), "{tenant:?}");
        }
    }

    pub fn ends(&self, request: RequestId) -> Vec<&Finished> {
        self.finished.iter().filter(|f| f.request == request).collect()
    }
}
