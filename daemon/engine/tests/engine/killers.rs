//! A request that kills its workers fails alone: its neighbours' outputs are what they are without it.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

use pagedd_core::{SequenceId, TokenId};
use pagedd_engine::{
    Command, Engine, EngineConfig, EngineHandle, EngineStats, Submission, Worker, WorkerLost,
    WorkersExhausted, inbox,
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
/// A request of four choices, and the one of them that kills.
const FOUR: [(u64, u64); 3] = [(1, 0), (20, 3), (64, 1)];

/// How plans reach a worker, and when it runs them.
#[derive(Clone, Copy, Debug)]
struct Loop {
    /// Plans in flight.
    depth: usize,
    /// A plan runs as soon as it is there, also while nobody asked for the output of the one before.
    ahead: bool,
}

const LOOPS: [Loop; 3] =
    [Loop { depth: 1, ahead: false }, Loop { depth: 2, ahead: false }, Loop { depth: 2, ahead: true }];

/// A toy that dies of plans with certain rows, every other time after it wrote all that the plan writes.
struct Mortal {
    toy: toy::Worker,
    ahead: bool,
    /// Plans without an answer, with their outputs where they have run.
    out: VecDeque<(StepPlan, Option<StepOutput>)>,
    dead: bool,
    kills: Box<dyn Fn(&Row) -> bool>,
    deaths: Rc<Cell<u32>>,
    /// Sent when an output is collected for the third time.
    late: Option<(EngineHandle<()>, Command<()>)>,
    collected: u32,
}

impl Mortal {
    fn run(&mut self, plan: &StepPlan) -> Option<StepOutput> {
        if self.dead {
            return None;
        }
        if !plan.rows.iter().any(|row| (self.kills)(row)) {
            return Some(self.toy.run(plan));
        }
        self.dead = true;
        self.deaths.set(self.deaths.get() + 1);
        if self.deaths.get().is_multiple_of(2) {
            self.toy.run(plan);
        }
        None
    }
}

impl Worker for Mortal {
    fn submit(&mut self, plan: &StepPlan) -> Result<(), WorkerLost> {
        let output = if self.ahead { self.run(plan) } else { None };
        self.out.push_back((plan.clone(), output));
        Ok(())
    }

    fn collect(&mut self) -> Result<StepOutput, WorkerLost> {
        let (plan, output) = self.out.pop_front().unwrap();
        let output = if self.ahead { output.filter(|_| !self.dead) } else { self.run(&plan) };
        self.collected += u32::from(output.is_some());
        if let Some((handle, command)) = self.late.take_if(|_| self.collected == 3) {
            handle.send(command).map_err(|(full, _)| full).unwrap();
        }
        output.ok_or_else(|| WorkerLost { reason: "poison".to_owned() })
    }

    fn recover(&mut self, sequences: Vec<SequenceSnapshot>) -> Result<(), WorkersExhausted> {
        (self.out, self.dead) = (VecDeque::new(), false);
        self.toy.respawn(sequences);
        Ok(())
    }
}

/// Runs `requests` in a pool of so many blocks, on workers that die of certain rows, the last request coming late if `late`. The `killers`
/// fail, and nobody else notices. Gives the numbers of deaths and of preemptions.
fn run_late(
    how: Loop,
    blocks: u32,
    requests: &[NewRequest],
    late: bool,
    killers: &[u64],
    kills: impl Fn(&Row) -> bool + 'static,
) -> (u32, u64) {
    let (journaled, deaths) = (Rc::<RefCell<Journaled>>::default(), Rc::new(Cell::new(0)));
    let stats = Rc::new(RefCell::default());
    let (handle, commands) = inbox(REQUESTS as usize + 3);
    let mut submissions: Vec<_> = requests
        .iter()
        .map(|request| Command::Submit(Box::new(Submission { request: request.clone(), ticket: () })))
        .collect();
    let late = if late { submissions.pop().map(|command| (handle.clone(), command)) } else { None };
    for command in [share(0, blocks), share(1, blocks)].into_iter().chain(submissions) {
        handle.send(command).map_err(|(full, _)| full).unwrap();
    }
    let worker = Mortal {
        toy: toy::Worker::new(blocks, BLOCK),
        ahead: how.ahead,
        out: VecDeque::new(),
        dead: false,
        kills: Box::new(kills),
        deaths: Rc::clone(&deaths),
        late,
        collected: 0,
    };
    let open = requests.iter().map(|request| request.n).sum();
    let journal = Recorder { journaled: Rc::clone(&journaled), handle, open, records: u32::MAX };
    let observer = Keeper(Rc::clone(&stats));
    let config = EngineConfig { observe_every: Duration::ZERO, depth: how.depth, ..EngineConfig::default() };
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

/// The same, all requests coming together.
fn run(
    how: Loop,
    blocks: u32,
    requests: &[NewRequest],
    killers: &[u64],
    kills: impl Fn(&Row) -> bool + 'static,
) -> (u32, u64) {
    run_late(how, blocks, requests, false, killers, kills)
}

/// Every loop in every pool.
fn loops() -> impl Iterator<Item = (Loop, u32)> {
    LOOPS.into_iter().flat_map(|how| POOLS.map(|blocks| (how, blocks)))
}

/// Rows of a sequence from its output token of this number on.
fn decodes(seq: u64, token: u32) -> impl Fn(&Row) -> bool {
    move |row| row.seq == SequenceId(seq) && row.certain().0 > PROMPT + token
}

#[test]
fn a_request_that_kills_as_its_prompt_is_computed_fails_alone() {
    for (how, blocks) in loops() {
        for killer in [1, 2, 31, 64] {
            let mut requests = requests();
            requests[killer as usize - 1].prompt[9] = POISON;
            let poisoned = |row: &Row| row.inputs.contains(&Input::Known(POISON));
            let (deaths, preemptions) = run(how, blocks, &requests, &[killer], poisoned);
            println!("{how:?}, {blocks} blocks, killer {killer}: {deaths} deaths, {preemptions} preemptions");
            assert!((2..=BOUND).contains(&deaths), "{deaths} deaths");
            assert!(blocks == POOLS[0] || preemptions > 0, "the pool was too large to prove anything");
        }
    }
}

#[test]
fn a_request_that_kills_as_it_decodes_fails_alone() {
    for (how, blocks) in loops() {
        for killer in [1, 2, 33, 63] {
            let mut requests = requests();
            requests[killer as usize - 1].stop_ids.clear();
            let (deaths, preemptions) = run(how, blocks, &requests, &[killer], decodes(killer, 3));
            println!("{how:?}, {blocks} blocks, killer {killer}: {deaths} deaths, {preemptions} preemptions");
            assert!((2..=BOUND).contains(&deaths), "{deaths} deaths");
        }
    }
}

#[test]
fn one_of_four_choices_that_kills_fails_its_request_alone() {
    for (how, (killer, choice)) in LOOPS.into_iter().flat_map(|how| FOUR.map(|choice| (how, choice))) {
        let mut requests = requests();
        let request = &mut requests[killer as usize - 1];
        (request.n, request.stop_ids) = (4, Vec::new());
        let (deaths, _) = run(how, 1000, &requests, &[killer], decodes(killer + choice, 3));
        println!("{how:?}, choice {choice} of request {killer}: {deaths} deaths");
        assert!((2..=BOUND).contains(&deaths), "{deaths} deaths");
    }
}

#[test]
fn two_requests_that_kill_fail_alone() {
    for (how, blocks) in loops() {
        for killers in [[5, 6], [1, 64], [20, 50]] {
            let mut requests = requests();
            for killer in killers {
                requests[killer as usize - 1].stop_ids.clear();
            }
            let [first, second] = killers.map(|killer| decodes(killer, 3));
            let (deaths, _) = run(how, blocks, &requests, &killers, move |row| first(row) || second(row));
            println!("{how:?}, {blocks} blocks, killers {killers:?}: {deaths} deaths");
            assert!((2..=2 * BOUND).contains(&deaths), "{deaths} deaths");
        }
    }
}

#[test]
fn a_request_alone_in_a_plan_does_not_fail_for_a_killer_in_the_plan_behind_it() {
    for how in LOOPS {
        let mut requests = requests();
        requests.truncate(2);
        requests[0].stop_ids.clear();
        requests[1].prompt[9] = POISON;
        let poisoned = |row: &Row| row.inputs.contains(&Input::Known(POISON));
        // The first decodes alone by then.
        let (deaths, _) = run_late(how, 1000, &requests, true, &[2], poisoned);
        println!("{how:?}: {deaths} deaths");
        assert!((2..=3).contains(&deaths), "{deaths} deaths");
    }
}

#[test]
fn two_deaths_that_are_nobodys_fault_fail_nobody() {
    for how in LOOPS {
        let left = Cell::new(2_u32);
        let kills = move |_: &Row| left.replace(left.get().saturating_sub(1)) > 0;
        let (deaths, _) = run(how, 1000, &requests(), &[], kills);
        assert_eq!(deaths, 2);
    }
}

#[test]
fn where_every_plan_kills_all_fail_after_a_bounded_number_of_deaths() {
    for how in LOOPS {
        let killers: Vec<_> = (1..=REQUESTS).collect();
        let (deaths, _) = run(how, 1000, &requests(), &killers, |_| true);
        println!("{how:?}: {deaths} deaths");
        assert!(deaths <= EngineConfig::default().deaths_in_a_row, "{deaths} deaths");
    }
}
