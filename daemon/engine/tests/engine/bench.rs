//! What all of these tests need around an engine.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use pagedd_core::{Blocks, FinishReason, RequestId, SamplingParams, StepCost, TenantId, TokenId, Tokens};
use pagedd_engine::{Command, EngineHandle, EngineStats, Journal, Observer, StepRecord};
use pagedd_sched::{AdmitError, NewRequest, PolicyKind, Scheduler, SchedulerConfig, ShareSpec, Started};

use crate::toy;

pub const REQUESTS: u64 = 64;
pub const PROMPT: u32 = 12;
pub const BLOCK: u32 = 4;
const MAX_MODEL_LEN: u32 = 64;

#[derive(Clone, Default, Debug)]
pub struct Journaled {
    /// Tokens of each choice, and why it ended.
    pub outputs: BTreeMap<(RequestId, u32), (Vec<TokenId>, Option<FinishReason>)>,
    pub started: Vec<Started>,
}

impl Journaled {
    /// Proves that a request gave what it gives alone.
    pub fn check(&self, request: &NewRequest) {
        for choice in 0..request.n {
            let (tokens, end) = &self.outputs[&(request.id, choice)];
            let (expected, reason) = toy::reference(request, choice, MAX_MODEL_LEN);
            assert_eq!((tokens, *end), (&expected, Some(reason)), "{} choice {choice}", request.id);
        }
    }

    /// Proves that a request failed, and that what it gave before is right.
    pub fn check_failed(&self, request: &NewRequest) {
        self.check_up_to(request, &[FinishReason::Failed]);
    }

    /// Proves that a request ended for one of these reasons, and that what it gave before is right.
    pub fn check_up_to(&self, request: &NewRequest, reasons: &[FinishReason]) {
        for choice in 0..request.n {
            let (tokens, end) = &self.outputs[&(request.id, choice)];
            assert!(end.is_some_and(|end| reasons.contains(&end)), "{} choice {choice}: {end:?}", request.id);
            assert_eq!(tokens[..], toy::reference(request, choice, MAX_MODEL_LEN).0[..tokens.len()]);
        }
    }
}

/// Keeps everything, and stops the engine.
pub struct Recorder {
    pub journaled: Rc<RefCell<Journaled>>,
    pub handle: EngineHandle<()>,
    /// Choices that are to end before the engine stops.
    pub open: u32,
    /// Records before it stops anyway.
    pub records: u32,
}

impl Journal for Recorder {
    type Ticket = ();

    fn admitted(&mut self, _: RequestId, (): ()) {}

    fn refused(&mut self, (): (), error: AdmitError) {
        panic!("{error}");
    }

    fn commit(&mut self, record: StepRecord) {
        let mut journaled = self.journaled.borrow_mut();
        journaled.started.extend(record.started);
        for token in record.tokens {
            let (tokens, end) = journaled.outputs.entry((token.request, token.choice)).or_default();
            assert_eq!(*end, None, "a token after the end");
            tokens.push(token.token);
        }
        for finished in record.finished {
            let (_, end) = journaled.outputs.entry((finished.request, finished.choice)).or_default();
            assert_eq!(end.replace(finished.reason), None, "two ends");
            self.open -= 1;
        }
        self.records -= 1;
        if self.open == 0 || self.records == 0 {
            self.handle.send(Command::Stop).map_err(|(full, _)| full).unwrap();
        }
    }
}

/// Keeps the last numbers.
pub struct Keeper(pub Rc<RefCell<EngineStats>>);

impl Observer for Keeper {
    fn observe(&mut self, stats: EngineStats) {
        self.0.replace(stats);
    }
}

pub fn id(number: u64) -> RequestId {
    RequestId(u128::from(number).to_be_bytes())
}

/// A request's number is that of its first sequence, where all before it have one choice.
pub fn requests() -> Vec<NewRequest> {
    let request = |number: u64| NewRequest {
        id: id(number),
        tenant: TenantId((number % 2) as u32),
        prompt: (0..PROMPT).map(|i| TokenId(number as u32 * 31 + i * 7)).collect(),
        n: 1,
        max_tokens: Tokens(10),
        stop_ids: vec![TokenId(number as u32 % 50)],
        sampling: SamplingParams { seed: number, ..SamplingParams::GREEDY },
    };
    (1..=REQUESTS).map(request).collect()
}

/// A scheduler without tenants.
pub fn scheduler(blocks: u32) -> Scheduler {
    Scheduler::new(SchedulerConfig {
        block_size: Tokens(BLOCK),
        capacity: Blocks(blocks),
        max_num_seqs: 80,
        max_num_batched_tokens: Tokens(1024),
        max_model_len: Tokens(MAX_MODEL_LEN),
        max_queued_requests: 100,
        policy: PolicyKind::Fcfs,
        cache_key: [0; 32],
        weight_digest: [0; 16],
        prefix_cache: true,
        prompt_lookup: true,
        max_drafts: 16,
        cost: StepCost::UNKNOWN,
        itl_target_us: None,
    })
}

/// Gives one of the two tenants a quarter of the blocks at least.
pub fn share(tenant: u32, blocks: u32) -> Command<()> {
    let share = ShareSpec { floor: Blocks(blocks / 4), ceiling: Blocks(blocks) };
    let reply = Box::new(|set: Result<(), _>| set.unwrap());
    Command::SetTenant { tenant: TenantId(tenant), share, prompt_lookup: None, reply }
}
