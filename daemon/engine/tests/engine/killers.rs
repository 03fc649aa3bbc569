//! A request that kills its workers fails alone: its neighbours' outputs are what they are without it.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use pagedd_core::{SequenceId, TokenId};
use pagedd_engine::{
    Command, Engine, EngineConfig, EngineStats, Submission, Worker, WorkerLost, WorkersExhausted, inbox,
};
use pagedd_sched::{Input, NewRequest, Row, SequenceSnapshot, StepOutput, StepPlan};

use crate::bench::{BLOCK, Journaled, Keeper, PROMPT, REQUESTS, Recorder, id, requests, scheduler, share};
use crate::toy;

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

/// Runs `requests` in a pool of so many blocks, on workers that die of certain rows. The `killers` fail, and nobody else notices.
/// Gives the numbers of deaths and of preemptions.
fn run(
    blocks: u32,
    requests: &[NewRequest],
    killers: &[u64],
    kills: impl Fn(&Row) -> bool + 'static,
) -> (u32, u64) {
    let (journaled, deaths) = (Rc::<RefCell<Journaled>>::default(), Rc::new(Cell::new(0)));
    let stats = Rc::new(RefCell::default());
    let (handle, commands) = inbox(REQUESTS as usize + 3);
    let submissions = requests
        .iter()
        .map(|request| Command::Submit(Box::new(Submission { request: request.clone(), ticket: () })));
    for command in [share(0, blocks), share(1, blocks)].into_iter().chain(submissions) {
        handle.send(command).map_err(|(full, _)| full).unwrap();
    }
    let toy = toy::Worker::new(blocks, BLOCK);
    let worker = Mortal { toy, plan: None, kills: Box::new(kills), deaths: Rc::clone(&deaths) };
    let open = requests.iter().map(|request| request.n).sum();
    let journal = Recorder { journaled: Rc::clone(&journaled), handle, open, records: u32::MAX };
    let observer = Keeper(Rc::clone(&stats));
    let config = EngineConfig { observe_every: Duration::ZERO, ..EngineConfig::default() };
    let engine = Engine::new(config, commands, scheduler(blocks), worker, journal, observer, Instant::now());
    engine.run().unwrap();
    let killers: Vec<_> = killers.iter().map(|number| id(*number)).collect();
    let journaled = journaled.borrow();
    for request in requests {
        if killers.contains(&request.id) {
            journaled.check_failed(request);
        } else {
            journaled.check(request);
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
