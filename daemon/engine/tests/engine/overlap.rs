//! With one plan in flight or two, whatever workers do: outputs are what each request gives alone, and nothing comes twice.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, VecDeque};
use std::rc::Rc;
use std::time::{Duration, Instant};

use pagedd_core::{FinishReason, Penalties, RequestId};
use pagedd_engine::{
    Command, Engine, EngineConfig, EngineHandle, Submission, Worker, WorkerLost, WorkersExhausted, inbox,
};
use pagedd_sched::{Input, NewRequest, SequenceSnapshot, StepOutput, StepPlan};

use crate::bench::{BLOCK, Journaled, Keeper, Recorder, requests, scheduler, share};
use crate::toy;

/// Ends of choices of a request that fails: some may have come to theirs before.
const ENDS: [FinishReason; 3] = [FinishReason::Failed, FinishReason::Stop, FinishReason::Length];

/// A stream of numbers from one seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = toy::mix(self.0, 1);
        self.0 % n
    }

    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// What happened to a worker.
#[derive(Default)]
struct Seen {
    /// Deaths by the number of plans without an answer.
    deaths: [Cell<u32>; 3],
    /// Inputs that were named before they were known.
    named: Cell<u32>,
}

/// A toy that runs plans at any time between their submission and their collection, and dies wherever it can.
struct Fickle {
    toy: toy::Worker,
    depth: usize,
    dice: Dice,
    /// Plans without an answer, with their outputs where they have run.
    out: VecDeque<(StepPlan, Option<StepOutput>)>,
    /// Deaths that may come before the next output is collected, and how many may come in a row.
    deaths_left: u32,
    deaths_in_a_row: u32,
    /// One of so many rows that draw gives nothing.
    breaks: Option<u64>,
    /// Sequences of rows that were made to give nothing.
    broken: Rc<RefCell<BTreeSet<u64>>>,
    /// Sent now and then, before an output is given.
    commands: Vec<Command<()>>,
    handle: EngineHandle<()>,
    seen: Rc<Seen>,
}

impl Fickle {
    /// Runs the oldest plan that has not run.
    fn run_one(&mut self) {
        let Some((plan, output)) = self.out.iter_mut().find(|(_, output)| output.is_none()) else { return };
        let ran = self.toy.run(plan);
        *output = Some(ran);
    }

    fn perhaps_die(&mut self) -> Result<(), WorkerLost> {
        if self.deaths_left == 0 || !self.dice.one_in(6) {
            return Ok(());
        }
        self.deaths_left -= 1;
        let deaths = &self.seen.deaths[self.out.len()];
        deaths.set(deaths.get() + 1);
        Err(WorkerLost { reason: "fickle".to_owned() })
    }

    /// Has a row give nothing.
    fn perhaps_break(&mut self, plan: &StepPlan, output: &mut StepOutput) {
        let Some(one_in) = self.breaks else { return };
        for row in plan.rows.iter().filter(|row| row.samples.len() == 1) {
            if self.dice.one_in(one_in) {
                output.sampled.retain(|sampled| sampled.seq != row.seq);
                output.failed.push((row.seq, "NaN".to_owned()));
                self.broken.borrow_mut().insert(row.seq.0);
            }
        }
    }
}

impl Worker for Fickle {
    fn submit(&mut self, plan: &StepPlan) -> Result<(), WorkerLost> {
        self.perhaps_die()?;
        let inputs = plan.rows.iter().flat_map(|row| &row.inputs);
        let named = inputs.filter(|input| matches!(input, Input::Sampled { .. })).count() as u32;
        self.seen.named.set(self.seen.named.get() + named);
        self.out.push_back((plan.clone(), None));
        assert!(self.out.len() <= self.depth, "{} plans in flight", self.out.len());
        if self.dice.one_in(2) {
            self.run_one();
        }
        self.perhaps_die()
    }

    fn collect(&mut self) -> Result<StepOutput, WorkerLost> {
        self.perhaps_die()?;
        while self.out[0].1.is_none() || self.dice.one_in(3) {
            self.run_one();
        }
        self.perhaps_die()?;
        if self.dice.one_in(3)
            && let Some(command) = self.commands.pop()
        {
            self.handle.send(command).map_err(|(full, _)| full).unwrap();
        }
        self.deaths_left = self.deaths_in_a_row;
        let (plan, output) = self.out.pop_front().unwrap();
        let mut output = output.unwrap();
        self.perhaps_break(&plan, &mut output);
        Ok(output)
    }

    fn recover(&mut self, sequences: Vec<SequenceSnapshot>) -> Result<(), WorkersExhausted> {
        self.out.clear();
        self.toy.respawn(sequences);
        Ok(())
    }
}

/// A world of its own.
struct Case {
    depth: usize,
    seed: u64,
    deaths_in_a_row: u32,
    plan_deaths: u32,
    breaks: Option<u64>,
    commands: Vec<Command<()>>,
}

impl Case {
    fn new(depth: usize, seed: u64) -> Self {
        let (plan_deaths, commands) = (EngineConfig::default().plan_deaths, Vec::new());
        Self { depth, seed, deaths_in_a_row: 0, plan_deaths, breaks: None, commands }
    }

    /// Runs the requests until each choice has ended; gives what they gave, and the sequences that were broken.
    fn run(self, requests: &[NewRequest], seen: &Rc<Seen>) -> (Journaled, BTreeSet<u64>) {
        let mut dice = Dice(self.seed);
        // One that has room for all, and one that gives blocks out again and again.
        let blocks = if dice.one_in(2) { 1000 } else { 110 };
        let journaled = Rc::<RefCell<Journaled>>::default();
        let broken = Rc::<RefCell<BTreeSet<u64>>>::default();
        let (handle, commands) = inbox(1000);
        for command in [share(0, blocks), share(1, blocks)] {
            handle.send(command).map_err(|(full, _)| full).unwrap();
        }
        for request in requests {
            let submission = Submission { request: request.clone(), ticket: () };
            handle.send(Command::Submit(Box::new(submission))).map_err(|(full, _)| full).unwrap();
        }
        let worker = Fickle {
            toy: toy::Worker::new(blocks, BLOCK),
            depth: self.depth,
            dice,
            out: VecDeque::new(),
            deaths_left: self.deaths_in_a_row,
            deaths_in_a_row: self.deaths_in_a_row,
            breaks: self.breaks,
            broken: Rc::clone(&broken),
            commands: self.commands,
            handle: handle.clone(),
            seen: Rc::clone(seen),
        };
        let open = requests.iter().map(|request| request.n).sum();
        let journal = Recorder { journaled: Rc::clone(&journaled), handle, open, records: u32::MAX };
        let config = EngineConfig {
            observe_every: Duration::ZERO,
            depth: self.depth,
            plan_deaths: self.plan_deaths,
            deaths_in_a_row: u32::MAX,
        };
        let (scheduler, keeper) = (scheduler(blocks), Keeper(Rc::default()));
        Engine::new(config, commands, scheduler, worker, journal, keeper, Instant::now()).run().unwrap();
        (journaled.take(), broken.take())
    }
}

/// Some with penalties, with two choices, with one token; a seed each.
fn mixed() -> Vec<NewRequest> {
    let mut requests = requests();
    requests.truncate(40);
    for request in requests.iter_mut().step_by(4) {
        request.sampling.penalties = Penalties { presence: 1.0, ..Penalties::NONE };
    }
    requests.iter_mut().step_by(5).for_each(|request| request.n = 2);
    requests.iter_mut().step_by(7).for_each(|request| request.max_tokens.0 = 1);
    requests
}

fn deaths(seen: &Seen) -> [u32; 3] {
    seen.deaths.each_ref().map(Cell::get)
}

#[test]
fn wherever_workers_die_every_request_gives_what_it_gives_alone() {
    for depth in [1, 2] {
        let seen = Rc::<Seen>::default();
        for seed in 0..60 {
            let case = Case { deaths_in_a_row: 2, plan_deaths: 4, ..Case::new(depth, seed) };
            let requests = mixed();
            let (journaled, _) = case.run(&requests, &seen);
            for request in &requests {
                journaled.check(request);
            }
        }
        let (deaths, named) = (deaths(&seen), seen.named.get());
        println!("depth {depth}: {deaths:?} deaths with 0, 1 and 2 plans, {named} inputs named ahead");
        assert!(deaths[..=depth].iter().all(|deaths| *deaths > 50), "{deaths:?}");
        assert_eq!(named > 0, depth > 1, "{named} inputs named ahead");
    }
}

#[test]
fn where_plans_are_accused_too_what_does_not_fail_is_right_and_every_choice_ends_once() {
    for depth in [1, 2] {
        let (seen, mut failed) = (Rc::<Seen>::default(), 0);
        for seed in 0..60 {
            let requests = mixed();
            let case = Case { deaths_in_a_row: 4, ..Case::new(depth, seed) };
            let (journaled, _) = case.run(&requests, &seen);
            for request in &requests {
                let ends = (0..request.n).map(|choice| journaled.outputs[&(request.id, choice)].1);
                if ends.into_iter().any(|end| end == Some(FinishReason::Failed)) {
                    failed += 1;
                    journaled.check_up_to(request, &ENDS);
                } else {
                    journaled.check(request);
                }
            }
        }
        println!("depth {depth}: {:?} deaths, {failed} requests failed", deaths(&seen));
        assert!(failed > 0, "nobody was accused in the end");
    }
}

#[test]
fn what_runs_ahead_for_a_choice_that_was_ended_from_outside_is_not_emitted() {
    for (depth, seed) in [1, 2].into_iter().flat_map(|depth| (0..40).map(move |seed| (depth, seed))) {
        let requests = mixed();
        let touched: Vec<RequestId> = requests.iter().skip(3).step_by(6).map(|request| request.id).collect();
        let commands = touched.iter().zip(0..).map(|(request, number)| match number % 3 {
            0 => Command::Cancel(*request),
            1 => Command::FinishChoice { request: *request, choice: 0, reason: FinishReason::Stop },
            _ => Command::FinishChoice { request: *request, choice: 1, reason: FinishReason::Stop },
        });
        let commands = commands.collect();
        let case = Case { deaths_in_a_row: 1, plan_deaths: 4, commands, ..Case::new(depth, seed) };
        let (journaled, _) = case.run(&requests, &Rc::default());
        for request in &requests {
            if touched.contains(&request.id) {
                let reasons = [FinishReason::Cancelled, FinishReason::Stop, FinishReason::Length];
                journaled.check_up_to(request, &reasons);
            } else {
                journaled.check(request);
            }
        }
    }
}

#[test]
fn a_row_that_fails_fails_its_request_alone_also_where_a_worker_dies_with_the_row_behind_it() {
    let mut failed = 0;
    for (depth, seed) in [1, 2].into_iter().flat_map(|depth| (0..60).map(move |seed| (depth, seed))) {
        // A request's number is that of its sequence.
        let mut requests = requests();
        requests.truncate(40);
        let case = Case { deaths_in_a_row: 2, plan_deaths: 4, breaks: Some(80), ..Case::new(depth, seed) };
        let (journaled, broken) = case.run(&requests, &Rc::default());
        failed += broken.len();
        for (request, number) in requests.iter().zip(1..) {
            if broken.contains(&number) {
                journaled.check_up_to(request, &ENDS);
            } else {
                journaled.check(request);
            }
        }
    }
    println!("{failed} of {} requests failed", 120 * 40);
    assert!((100..2000).contains(&failed), "{failed} requests failed");
}
