//! A request that kills its workers fails alone: its neighbours' outputs are what they are without it.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::{Duration, Instant};

use pagedd_core::{
    Blocks, FinishReason, RequestId, SamplingParams, SequenceId, StepCost, TenantId, TokenId, Tokens,
};
use pagedd_engine::{
    Command, Engine, EngineConfig, EngineHandle, EngineStats, Journal, Observer, StepRecord, Submission,
    Worker, WorkerLost, WorkersExhausted, inbox,
};
use pagedd_sched::{
    AdmitError, Input, NewRequest, PolicyKind, Row, Scheduler, SchedulerConfig, SequenceSnapshot, ShareSpec,
    StepOutput, StepPlan,
};

#[allow(dead_code, reason = "the scheduler's tests use more of it")]
#[path = "../../sched/tests/sched/worker.rs"]
mod toy;

const REQUESTS: u64 = 64;
const PROMPT: u32 = 12;
const MAX_MODEL_LEN: u32 = 64;
/// In the prompts of requests that kill as these are computed.
const POISON: TokenId = TokenId(7777);
/// A pool that has room for all, and one that has not.
const POOLS: [u32; 2] = [1000, 150];
/// Two deaths of the first plan, and one for each halving.
const BOUND: u32 = 2 + REQUESTS.ilog2();

/// A toy that dies of plans with certain rows, every other time after it wrote all that the plan writes.
struct Mortal {
    toy: toy::Worker,
    plan: Option<StepPlan>,
    kills: Box<dyn Fn(&Row) -> bool>,
    deaths: Rc<Cell<u32>>,
}

impl Worker for Mortal {
    fn submit(&mut self, plan: &StepPlan) -> Result<(), WorkerLost> {
        self.plan = Some(plan.clone());
        Ok(())
    }

    fn collect(&mut self) -> Result<StepOutput, WorkerLost> {
        let plan = self.plan.take().unwrap();
        if !plan.rows.iter().any(|row| (self.kills)(row)) {
            return Ok(self.toy.run(&plan));
        }
        self.deaths.set(self.deaths.get() + 1);
        if self.deaths.get().is_multiple_of(2) {
            self.toy.run(&plan);
        }
        Err(WorkerLost { reason: "poison".to_owned() })
    }

    fn recover(&mut self, sequences: Vec<SequenceSnapshot>) -> Result<(), WorkersExhausted> {
        self.toy.respawn(sequences);
        Ok(())
    }
}

type Outputs = BTreeMap<(RequestId, u32), (Vec<TokenId>, Option<FinishReason>)>;

struct Recorder {
    outputs: Rc<RefCell<Outputs>>,
    handle: EngineHandle<()>,
    open: u32,
}

impl Journal for Recorder {
    type Ticket = ();

    fn admitted(&mut self, _: RequestId, (): ()) {}

    fn refused(&mut self, (): (), error: AdmitError) {
        panic!("{error}");
    }

    fn commit(&mut self, record: StepRecord) {
        let mut outputs = self.outputs.borrow_mut();
        for token in record.tokens {
            let (tokens, end) = outputs.entry((token.request, token.choice)).or_default();
            assert_eq!(*end, None, "a token after the end");
            tokens.push(token.token);
        }
        for finished in record.finished {
            let (_, end) = outputs.entry((finished.request, finished.choice)).or_default();
            assert_eq!(end.replace(finished.reason), None, "two ends");
            self.open -= 1;
        }
        if self.open == 0 {
            self.handle.send(Command::Stop).map_err(|(full, _)| full).unwrap();
        }
    }
}

/// Keeps the last numbers.
struct Keeper(Rc<RefCell<EngineStats>>);

impl Observer for Keeper {
    fn observe(&mut self, stats: EngineStats) {
        self.0.replace(stats);
    }
}

fn id(number: u64) -> RequestId {
    RequestId(u128::from(number).to_be_bytes())
}

/// A request's number is that of its first sequence, where all before it have one choice.
fn requests() -> Vec<NewRequest> {
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

fn scheduler(blocks: u32) -> Scheduler {
    let mut scheduler = Scheduler::new(SchedulerConfig {
        block_size: Tokens(4),
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
    });
    for tenant in 0..2 {
        let share = ShareSpec { floor: Blocks(blocks / 4), ceiling: Blocks(blocks) };
        scheduler.set_share(TenantId(tenant), share).unwrap();
    }
    scheduler
}

/// Runs `requests` in a pool of so many blocks, on workers that die of certain rows. The `killers` fail, and nobody else notices.
/// Gives the numbers of deaths and of preemptions.
fn run(
    blocks: u32,
    requests: &[NewRequest],
    killers: &[u64],
    kills: impl Fn(&Row) -> bool + 'static,
) -> (u32, u64) {
    let (outputs, deaths) = (Rc::new(RefCell::default()), Rc::new(Cell::new(0)));
    let stats = Rc::new(RefCell::default());
    let (handle, commands) = inbox(REQUESTS as usize + 1);
    for request in requests {
        let submission = Submission { request: request.clone(), ticket: () };
        handle.send(Command::Submit(Box::new(submission))).map_err(|(full, _)| full).unwrap();
    }
    let toy = toy::Worker::new(blocks, 4);
    let worker = Mortal { toy, plan: None, kills: Box::new(kills), deaths: Rc::clone(&deaths) };
    let open = requests.iter().map(|request| request.n).sum();
    let journal = Recorder { outputs: Rc::clone(&outputs), handle, open };
    let observer = Keeper(Rc::clone(&stats));
    let config = EngineConfig { observe_every: Duration::ZERO, ..EngineConfig::default() };
    let engine = Engine::new(config, commands, scheduler(blocks), worker, journal, observer, Instant::now());
    engine.run().unwrap();
    let killers: Vec<_> = killers.iter().map(|number| id(*number)).collect();
    for request in requests {
        for choice in 0..request.n {
            let (tokens, end) = &outputs.borrow()[&(request.id, choice)];
            let (expected, reason) = toy::reference(request, choice, MAX_MODEL_LEN);
            if killers.contains(&request.id) {
                assert_eq!(*end, Some(FinishReason::Failed), "{}", request.id);
                assert_eq!(tokens[..], expected[..tokens.len()], "what it emitted before is right");
            } else {
                assert_eq!((tokens, *end), (&expected, Some(reason)), "{} choice {choice}", request.id);
            }
        }
    }
    let stats: EngineStats = stats.take();
    let preemptions = stats.scheduler.tenants.iter().map(|tenant| tenant.preemptions).sum();
    (deaths.get(), preemptions)
}

/// Rows of a sequence from its output token of this number on.
fn decodes(seq: u64, token: u32) -> impl Fn(&Row) -> bool {
    move |row| row.seq == SequenceId(seq) && row.certain().0 > PROMPT + token
}

#[test]
fn a_request_that_kills_as_its_prompt_is_computed_fails_alone() {
    for blocks in POOLS {
        for killer in [1, 2, 31, 64] {
            let mut requests = requests();
            requests[killer as usize - 1].prompt[9] = POISON;
            let poisoned = |row: &Row| row.inputs.contains(&Input::Known(POISON));
            let (deaths, preemptions) = run(blocks, &requests, &[killer], poisoned);
            println!("{blocks} blocks, killer {killer}: {deaths} deaths, {preemptions} preemptions");
            assert!((2..=BOUND).contains(&deaths), "{deaths} deaths");
            assert!(blocks == POOLS[0] || preemptions > 0, "the pool was too large to prove anything");
        }
    }
}

#[test]
fn a_request_that_kills_as_it_decodes_fails_alone() {
    for blocks in POOLS {
        for killer in [1, 2, 33, 63] {
            let mut requests = requests();
            requests[killer as usize - 1].stop_ids.clear();
            let (deaths, preemptions) = run(blocks, &requests, &[killer], decodes(killer, 3));
            println!("{blocks} blocks, killer {killer}: {deaths} deaths, {preemptions} preemptions");
            assert!((2..=BOUND).contains(&deaths), "{deaths} deaths");
        }
    }
}

#[test]
fn one_of_four_choices_that_kills_fails_its_request_alone() {
    for (killer, choice) in [(1, 0), (20, 3), (64, 1)] {
        let mut requests = requests();
        let request = &mut requests[killer as usize - 1];
        (request.n, request.stop_ids) = (4, Vec::new());
        let (deaths, _) = run(1000, &requests, &[killer], decodes(killer + choice, 3));
        println!("choice {choice} of request {killer}: {deaths} deaths");
        assert!((2..=BOUND).contains(&deaths), "{deaths} deaths");
    }
}

#[test]
fn two_requests_that_kill_fail_alone() {
    for blocks in POOLS {
        for killers in [[5, 6], [1, 64], [20, 50]] {
            let mut requests = requests();
            for killer in killers {
                requests[killer as usize - 1].stop_ids.clear();
            }
            let [first, second] = killers.map(|killer| decodes(killer, 3));
            let (deaths, _) = run(blocks, &requests, &killers, move |row| first(row) || second(row));
            println!("{blocks} blocks, killers {killers:?}: {deaths} deaths");
            assert!((2..=2 * BOUND).contains(&deaths), "{deaths} deaths");
        }
    }
}

#[test]
fn two_deaths_that_are_nobodys_fault_fail_nobody() {
    let left = Cell::new(2_u32);
    let (deaths, _) = run(1000, &requests(), &[], move |_| left.replace(left.get().saturating_sub(1)) > 0);
    assert_eq!(deaths, 2);
}

#[test]
fn where_every_plan_kills_all_fail_after_a_bounded_number_of_deaths() {
    let killers: Vec<_> = (1..=REQUESTS).collect();
    let (deaths, _) = run(1000, &requests(), &killers, |_| true);
    println!("{deaths} deaths");
    assert!(deaths <= EngineConfig::default().deaths_in_a_row, "{deaths} deaths");
}
