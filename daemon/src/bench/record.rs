//! What an engine did, seen from its own thread: its worker and its journal, with a clock beside each.
//!
//! **Owns** the steps and tokens of one round of requests. **Never** keeps a token, writes anything or wakes anybody before the round's goal
//! is reached: the engine is not to wait for its observer.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use pagedd_core::{FinishReason, RequestId, StepCost};
use pagedd_engine::{EngineStats, Journal, Observer, StepRecord, Worker, WorkerLost, WorkersExhausted};
use pagedd_sched::{AdmitError, SequenceSnapshot, StepOutput, StepPlan};
use pagedd_wire::worker::DeviceStep;

use crate::worker::WorkerProcess;

/// A step that completed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Step {
    /// Its plan was handed over.
    pub submitted: Instant,
    /// Its output was there.
    pub collected: Instant,
    /// Time that the worker reports.
    pub compute_us: u64,
    /// Time that was predicted; 0 where nothing is known of it.
    pub predicted_us: u64,
    /// Sequences in it.
    pub rows: u32,
    /// Every row is one token that is followed by a draw.
    pub decodes: bool,
    /// What a GPU did.
    pub device: Option<DeviceStep>,
}

/// What is waited for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Goal {
    /// So many steps in which all sequences of the round ran, each after another such step; or that one of them has ended.
    Steady(usize),
    /// The request of this place in the round has its first token; or one has ended that is not of those that joined.
    First(usize),
    /// Every request has ended, or one was refused.
    Ended,
}

/// Requests that are sent together, those that join them later, and what became of them.
#[derive(Debug, Default)]
pub struct Round {
    /// Number of its first request.
    base: u64,
    /// Requests that it began with. Those behind joined later.
    began: usize,
    /// When each request's first token was there.
    pub first: Vec<Option<Instant>>,
    /// Steps since the round began.
    pub steps: Vec<Step>,
    /// Of these, the ones that [`Goal::Steady`] counts.
    pub steady: Vec<usize>,
    /// When the newest tokens were there.
    pub last: Option<Instant>,
    /// Tokens drawn.
    pub tokens: u64,
    /// Prompt tokens found in the prefix cache.
    pub cached: u64,
    /// Sequences that began, again after preemption too.
    pub begun: u64,
    /// Requests that have ended.
    pub ended: usize,
    /// Of these, failed.
    pub failed: usize,
    /// Of those that have ended, the ones that the round began with.
    ended_of_began: usize,
    /// Workers that died.
    pub lost: u32,
    /// A request was not taken.
    pub refused: Option<AdmitError>,
    goal: Option<Goal>,
}

impl Round {
    /// Of requests with the numbers `[base, base + requests)`.
    fn new(base: u64, requests: usize) -> Self {
        Self { base, began: requests, first: vec![None; requests], ..Self::default() }
    }

    /// One more request, with the number that follows. Its place.
    pub fn join(&mut self) -> usize {
        self.first.push(None);
        self.first.len() - 1
    }

    /// Whether there is nothing more to wait for.
    pub fn has_reached(&self, goal: Goal) -> bool {
        match goal {
            Goal::Steady(steps) => self.steady.len() >= steps || self.ended > 0 || self.refused.is_some(),
            Goal::First(place) => {
                let there = self.first.get(place).is_none_or(Option::is_some);
                there || self.ended_of_began > 0 || self.refused.is_some()
            }
            Goal::Ended => self.ended >= self.first.len() || self.refused.is_some(),
        }
    }

    /// A step is over.
    pub fn add(&mut self, step: Step) {
        let all = |step: &Step| step.decodes && step.rows as usize == self.began;
        if all(&step) && self.steps.last().is_some_and(all) {
            self.steady.push(self.steps.len());
        }
        self.steps.push(step);
    }

    /// Time between the ends of a step and of the one before it.
    pub fn interval(&self, step: usize) -> Duration {
        self.steps[step].collected - self.steps[step - 1].collected
    }

    /// Steps that were done in one of these spans, each of which has a step before it.
    pub fn between(&self, spans: &[(Instant, Instant)]) -> Vec<usize> {
        let within = |at: Instant| spans.iter().any(|(from, to)| *from < at && at <= *to);
        (1..self.steps.len()).filter(|step| within(self.steps[*step].collected)).collect()
    }

    fn commit(&mut self, record: &StepRecord, now: Instant) {
        self.cached += record.started.iter().map(|started| u64::from(started.cached_tokens.0)).sum::<u64>();
        if !record.tokens.is_empty() {
            self.last = Some(now);
            self.tokens += record.tokens.len() as u64;
        }
        for token in &record.tokens {
            let number = number(token.request).checked_sub(self.base);
            if let Some(first) = number.and_then(|number| self.first.get_mut(number as usize)) {
                first.get_or_insert(now);
            }
        }
        for finished in record.finished.iter().filter(|finished| finished.ended.is_some()) {
            self.ended += 1;
            let place = number(finished.request).checked_sub(self.base);
            self.ended_of_began += usize::from(place.is_some_and(|place| place < self.began as u64));
            self.failed += usize::from(finished.reason == FinishReason::Failed);
        }
    }
}

/// The id of a request.
pub fn id(number: u64) -> RequestId {
    RequestId(u128::from(number).to_be_bytes())
}

fn number(id: RequestId) -> u64 {
    u128::from_be_bytes(id.0) as u64
}

/// A round, shared with the engine's thread.
#[derive(Debug, Default)]
pub struct Record {
    round: Mutex<Round>,
    reached: Condvar,
    /// When the first token of all rounds was there.
    pub first_token: OnceLock<Instant>,
}

impl Record {
    /// The round as it is.
    pub fn round(&self) -> MutexGuard<'_, Round> {
        self.round.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets the last round. None of its requests may be left.
    pub fn begin(&self, base: u64, requests: usize) {
        *self.round() = Round::new(base, requests);
    }

    /// Waits until the goal is reached, but no longer than `limit`. Whether it is.
    pub fn wait(&self, goal: Goal, limit: Duration) -> bool {
        let mut round = self.round();
        round.goal = Some(goal);
        let waited = self.reached.wait_timeout_while(round, limit, |round| !round.has_reached(goal));
        let (mut round, _) = waited.unwrap_or_else(PoisonError::into_inner);
        round.goal = None;
        round.has_reached(goal)
    }

    fn tell(&self, round: &Round) {
        if round.goal.is_some_and(|goal| round.has_reached(goal)) {
            self.reached.notify_all();
        }
    }
}

/// A plan that is out.
struct Submitted {
    at: Instant,
    predicted_us: u64,
    rows: u32,
    decodes: bool,
}

/// A worker with a clock beside it.
pub struct Timed {
    worker: WorkerProcess,
    record: Arc<Record>,
    cost: StepCost,
    out: VecDeque<Submitted>,
}

impl Timed {
    /// Tells `record` of every step, and what it takes by `cost`.
    pub fn new(worker: WorkerProcess, record: Arc<Record>, cost: StepCost) -> Self {
        Self { worker, record, cost, out: VecDeque::new() }
    }
}

impl Worker for Timed {
    fn submit(&mut self, plan: &StepPlan) -> Result<(), WorkerLost> {
        let draws = |row: &pagedd_sched::Row| row.inputs.len() == 1 && row.samples.len() == 1;
        let (rows, decodes) = (plan.rows.len() as u32, plan.rows.iter().all(draws));
        self.record.round().begun += plan.begin.len() as u64;
        let predicted_us = plan.predicted_us(&self.cost) as u64;
        self.out.push_back(Submitted { at: Instant::now(), predicted_us, rows, decodes });
        self.worker.submit(plan)
    }

    fn collect(&mut self) -> Result<StepOutput, WorkerLost> {
        let output = self.worker.collect()?;
        let collected = Instant::now();
        if let Some(Submitted { at, predicted_us, rows, decodes }) = self.out.pop_front() {
            let (compute_us, device) = (output.compute_us, self.worker.device_step());
            self.record.round().add(Step {
                submitted: at,
                collected,
                compute_us,
                predicted_us,
                rows,
                decodes,
                device,
            });
        }
        Ok(output)
    }

    fn recover(&mut self, sequences: Vec<SequenceSnapshot>) -> Result<(), WorkersExhausted> {
        self.out.clear();
        self.record.round().lost += 1;
        self.worker.recover(sequences)
    }
}

/// A journal that counts tokens and keeps none. What is not taken or fails is counted, too.
pub struct Counted(pub Arc<Record>);

impl Journal for Counted {
    type Ticket = ();

    fn admitted(&mut self, _: RequestId, (): ()) {}

    fn refused(&mut self, (): (), error: AdmitError) {
        let mut round = self.0.round();
        round.refused = Some(error);
        self.0.tell(&round);
    }

    fn commit(&mut self, record: StepRecord) {
        if !record.tokens.is_empty() {
            self.0.first_token.get_or_init(Instant::now);
        }
        let mut round = self.0.round();
        round.commit(&record, Instant::now());
        self.0.tell(&round);
    }
}

/// Looks away: what an observer is told, the record has already.
pub struct Unobserved;

impl Observer for Unobserved {
    fn observe(&mut self, _: EngineStats) {}
}
