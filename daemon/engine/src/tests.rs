//! The loop against a scripted worker: what is told to whom, in which order.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

use pagedd_core::{Blocks, FinishReason, RequestId, SamplingParams, StepCost, TenantId, TokenId, Tokens};
use pagedd_sched::{
    AdmitError, Input, NewRequest, PolicyKind, Restored, RestoredChoice, Sampled, Scheduler, SchedulerConfig,
    SequenceSnapshot, ShareSpec, StepOutput, StepPlan,
};

use crate::{
    Command, Engine, EngineConfig, EngineHandle, EngineStats, Journal, Observer, StepRecord, Submission,
    Worker, WorkerLost, WorkersExhausted, inbox,
};

const TENANT: TenantId = TenantId(1);

/// Everything that happened, in order.
type Events = Rc<RefCell<Vec<String>>>;

/// Answers each sample with the token `position`, and dies when told to.
struct Scripted {
    events: Events,
    /// Those without an answer.
    plans: VecDeque<StepPlan>,
    /// Whether the next submits end in death.
    deaths: VecDeque<bool>,
    /// Recoveries that succeed before there are no more workers.
    recoveries: usize,
}

impl Worker for Scripted {
    fn submit(&mut self, plan: &StepPlan) -> Result<(), WorkerLost> {
        let open = plan.rows.iter().flat_map(|row| &row.inputs);
        let drawn_ahead = open.filter(|input| matches!(input, Input::Sampled { .. })).count();
        let named = if drawn_ahead > 0 { format!(" with {drawn_ahead} to come") } else { String::new() };
        self.events.borrow_mut().push(format!("submit {}{named}", plan.id.0));
        self.plans.push_back(plan.clone());
        Ok(())
    }

    fn collect(&mut self) -> Result<StepOutput, WorkerLost> {
        if self.deaths.pop_front() == Some(true) {
            return Err(WorkerLost { reason: "scripted".to_owned() });
        }
        let plan = self.plans.pop_front().expect("collect follows submit");
        let sampled = plan.rows.iter().flat_map(|row| {
            let position = row.start.0 + row.inputs.len() as u32;
            row.samples.iter().map(move |seq| Sampled {
                seq: *seq,
                token: TokenId(position),
                logprob: None,
                top: Vec::new(),
            })
        });
        Ok(StepOutput { plan: plan.id, sampled: sampled.collect(), failed: Vec::new(), compute_us: 1 })
    }

    fn recover(&mut self, sequences: Vec<SequenceSnapshot>) -> Result<(), WorkersExhausted> {
        let known: Vec<_> = sequences.iter().map(|s| s.tokens.len()).collect();
        self.events.borrow_mut().push(format!("recover {known:?}"));
        self.plans.clear();
        self.recoveries =
            self.recoveries.checked_sub(1).ok_or(WorkersExhausted { reason: "scripted".to_owned() })?;
        Ok(())
    }
}

/// Dies at once; while another worker is looked for in vain, a request comes.
struct LateRequest {
    handle: EngineHandle<&'static str>,
}

impl Worker for LateRequest {
    fn submit(&mut self, _: &StepPlan) -> Result<(), WorkerLost> {
        Err(WorkerLost { reason: "scripted".to_owned() })
    }

    fn collect(&mut self) -> Result<StepOutput, WorkerLost> {
        Err(WorkerLost { reason: "scripted".to_owned() })
    }

    fn recover(&mut self, _: Vec<SequenceSnapshot>) -> Result<(), WorkersExhausted> {
        let submission = Submission { request: request(5, 2), ticket: "late" };
        self.handle.send(Command::Submit(Box::new(submission))).map_err(|(full, _)| full).expect("room");
        Err(WorkersExhausted { reason: "scripted".to_owned() })
    }
}

/// Dies at once, and while another worker is looked for the process begins to end.
#[derive(Default)]
struct Ending {
    ends: bool,
}

impl Worker for Ending {
    fn submit(&mut self, _: &StepPlan) -> Result<(), WorkerLost> {
        Ok(())
    }

    fn collect(&mut self) -> Result<StepOutput, WorkerLost> {
        Err(WorkerLost { reason: "scripted".to_owned() })
    }

    fn recover(&mut self, _: Vec<SequenceSnapshot>) -> Result<(), WorkersExhausted> {
        self.ends = true;
        Err(WorkersExhausted { reason: "scripted".to_owned() })
    }

    fn ends_as(&self) -> Option<FinishReason> {
        (!self.ends).then_some(FinishReason::ModelGone)
    }
}

struct Recorder {
    events: Events,
    handle: EngineHandle<&'static str>,
    /// Choices that must end before the engine is told to stop.
    open: usize,
}

impl Recorder {
    fn say(&self, event: String) {
        self.events.borrow_mut().push(event);
    }
}

impl Journal for Recorder {
    type Ticket = &'static str;

    fn admitted(&mut self, _: RequestId, ticket: &'static str) {
        self.say(format!("admitted {ticket}"));
    }

    fn refused(&mut self, ticket: &'static str, error: AdmitError) {
        self.say(format!("refused {ticket}: {error}"));
        self.ended();
    }

    fn commit(&mut self, record: StepRecord) {
        for token in &record.tokens {
            self.say(format!("token {}", token.token.0));
        }
        for finished in &record.finished {
            self.say(format!("finished {}", finished.reason));
            self.ended();
        }
    }
}

impl Recorder {
    fn ended(&mut self) {
        self.open -= 1;
        if self.open == 0 {
            self.handle.send(Command::Stop).map_err(|(full, _)| full).expect("room for a stop");
        }
    }
}

struct Silent;

impl Observer for Silent {
    fn observe(&mut self, _: EngineStats) {}
}

fn request(prompt: u32, max_tokens: u32) -> NewRequest {
    NewRequest {
        id: RequestId([prompt as u8; 16]),
        tenant: TENANT,
        prompt: (0..prompt).map(TokenId).collect(),
        n: 1,
        max_tokens: Tokens(max_tokens),
        stop_ids: Vec::new(),
        sampling: SamplingParams::GREEDY,
    }
}

fn scheduler() -> Scheduler {
    Scheduler::new(SchedulerConfig {
        block_size: Tokens(16),
        capacity: Blocks(8),
        max_num_seqs: 4,
        max_num_batched_tokens: Tokens(64),
        max_model_len: Tokens(100),
        max_queued_requests: 10,
        policy: PolicyKind::Fcfs,
        cache_key: [0; 32],
        weight_digest: [0; 16],
        prefix_cache: true,
        prompt_lookup: true,
        max_drafts: 8,
        cost: StepCost::UNKNOWN,
        itl_target_us: None,
    })
}

/// Runs `submissions` until all of them ended, with a worker that dies as scripted.
fn run(
    submissions: Vec<Submission<&'static str>>,
    deaths: &[bool],
    recoveries: usize,
) -> (Vec<String>, Result<(), WorkersExhausted>) {
    run_at(1, submissions, deaths, recoveries)
}

/// The same with so many plans in flight.
fn run_at(
    depth: usize,
    submissions: Vec<Submission<&'static str>>,
    deaths: &[bool],
    recoveries: usize,
) -> (Vec<String>, Result<(), WorkersExhausted>) {
    let events = Events::default();
    let (handle, commands) = inbox(64);
    let mut scheduler = scheduler();
    scheduler
        .set_share(TENANT, ShareSpec { floor: Blocks(0), ceiling: Blocks(8) })
        .expect("a share of everything");
    let open = submissions.len();
    for submission in submissions {
        handle.send(Command::Submit(Box::new(submission))).map_err(|(full, _)| full).expect("room");
    }
    let (plans, deaths) = (VecDeque::new(), deaths.iter().copied().collect());
    let worker = Scripted { events: events.clone(), plans, deaths, recoveries };
    let journal = Recorder { events: events.clone(), handle, open };
    let config = EngineConfig { observe_every: Duration::ZERO, depth, ..EngineConfig::default() };
    let result = Engine::new(config, commands, scheduler, worker, journal, Silent, Instant::now()).run();
    (events.take(), result)
}

#[test]
fn a_request_is_admitted_computed_and_committed_in_this_order() {
    let (events, result) = run(vec![Submission { request: request(4, 2), ticket: "a" }], &[], 0);
    assert_eq!(result, Ok(()));
    let expected = ["admitted a", "submit 1", "token 4", "submit 2", "token 5", "finished length"];
    assert_eq!(events, expected);
}

#[test]
fn what_can_never_fit_is_refused_at_once() {
    let (events, _) = run(vec![Submission { request: request(100, 1), ticket: "long" }], &[], 0);
    assert_eq!(events.len(), 1, "{events:?}");
    assert!(events[0].starts_with("refused long: "), "{events:?}");
}

#[test]
fn a_plan_outlives_its_worker_and_the_next_one_knows_every_sequence() {
    let (events, result) =
        run(vec![Submission { request: request(4, 2), ticket: "a" }], &[false, true, false], 1);
    assert_eq!(result, Ok(()));
    let expected = [
        "admitted a",
        "submit 1",
        "token 4",
        "submit 2",
        "recover [5]",
        "submit 2",
        "token 5",
        "finished length",
    ];
    assert_eq!(events, expected);
}

#[test]
fn with_two_plans_in_flight_the_next_is_submitted_before_the_last_is_collected() {
    let (events, result) = run_at(2, vec![Submission { request: request(4, 3), ticket: "a" }], &[], 0);
    assert_eq!(result, Ok(()));
    let expected = [
        "admitted a",
        "submit 1",
        "submit 2 with 1 to come",
        "token 4",
        "submit 3 with 1 to come",
        "token 5",
        "token 6",
        "finished length",
    ];
    assert_eq!(events, expected);
}

#[test]
fn plans_that_a_worker_was_lost_with_go_on_one_by_one_with_what_is_known_by_then() {
    let (events, result) =
        run_at(2, vec![Submission { request: request(4, 5), ticket: "a" }], &[false, true], 1);
    assert_eq!(result, Ok(()));
    let expected = [
        "admitted a",
        "submit 1",
        "submit 2 with 1 to come",
        "token 4",
        "submit 3 with 1 to come",
        // The worker had plans 2 and 3.
        "recover [5]",
        "submit 2",
        "token 5",
        "submit 3",
        "token 6",
        "submit 4",
        "submit 5 with 1 to come",
        "token 7",
        "token 8",
        "finished length",
    ];
    assert_eq!(events, expected);
}

#[test]
fn a_plan_that_kills_every_worker_fails_its_requests_and_no_others() {
    let (events, result) = run(
        vec![
            Submission { request: request(4, 2), ticket: "poison" },
            Submission { request: request(64, 1), ticket: "next" },
        ],
        &[true, true, true],
        // One after each death: none is started for a plan that is given up.
        3,
    );
    assert_eq!(result, Ok(()));
    let failed = events.iter().filter(|event| *event == "finished failed").count();
    let finished = events.iter().filter(|event| *event == "finished length").count();
    assert_eq!(failed + finished, 2, "{events:?}");
    assert!(failed >= 1, "{events:?}");
}

#[test]
fn without_any_worker_every_request_ends_as_failed_and_the_engine_says_why() {
    let (events, result) = run(
        vec![
            Submission { request: request(4, 2), ticket: "a" },
            Submission { request: request(5, 2), ticket: "b" },
        ],
        &[true],
        0,
    );
    assert_eq!(result, Err(WorkersExhausted { reason: "scripted".to_owned() }));
    assert_eq!(events.iter().filter(|event| *event == "finished failed").count(), 2, "{events:?}");
}

#[test]
fn where_the_process_ends_while_a_worker_is_looked_for_no_request_does_and_nothing_is_wrong() {
    let events = Events::default();
    let (handle, commands) = inbox(8);
    let journal = Recorder { events: events.clone(), handle, open: 1 };
    let mut scheduler = scheduler();
    scheduler.set_share(TENANT, ShareSpec { floor: Blocks(0), ceiling: Blocks(8) }).expect("a share");
    scheduler.admit(request(4, 2)).expect("room");
    let config = EngineConfig::default();
    let worker = Ending::default();
    let result = Engine::new(config, commands, scheduler, worker, journal, Silent, Instant::now()).run();
    assert_eq!((result, events.take()), (Ok(()), Vec::new()));
}

#[test]
fn a_request_that_waited_for_a_worker_in_vain_ends_as_failed_too() {
    // The scheduler refuses nothing of this while the worker is being replaced: what is in the inbox then must have an answer.
    let events = Events::default();
    let (handle, commands) = inbox(8);
    let journal = Recorder { events: events.clone(), handle: handle.clone(), open: 2 };
    let mut scheduler = scheduler();
    scheduler.set_share(TENANT, ShareSpec { floor: Blocks(0), ceiling: Blocks(8) }).expect("a share");
    scheduler.admit(request(4, 2)).expect("room");
    let late = LateRequest { handle };
    let config = EngineConfig::default();
    let result = Engine::new(config, commands, scheduler, late, journal, Silent, Instant::now()).run();
    assert_eq!(result, Err(WorkersExhausted { reason: "scripted".to_owned() }));
    assert_eq!(events.take(), ["finished failed", "admitted late", "finished failed"]);
}

/// Tells a new engine `commands` in order, until `open` choices have ended.
fn tell(commands: Vec<Command<&'static str>>, open: usize) -> Vec<String> {
    let events = Events::default();
    let (handle, inbox) = inbox(64);
    for command in commands {
        handle.send(command).map_err(|(full, _)| full).expect("room");
    }
    let (plans, deaths) = (VecDeque::new(), VecDeque::new());
    let worker = Scripted { events: events.clone(), plans, deaths, recoveries: 0 };
    let journal = Recorder { events: events.clone(), handle, open };
    let engine =
        Engine::new(EngineConfig::default(), inbox, scheduler(), worker, journal, Silent, Instant::now());
    engine.run().expect("a worker");
    events.take()
}

/// A request of 4 tokens that is to have `max_tokens` and has `emitted`.
fn restored(max_tokens: u32, emitted: &[u32]) -> Command<&'static str> {
    let emitted = emitted.iter().copied().map(TokenId).collect();
    Command::Restore {
        reply: Box::new(|_| ()),
        restored: Box::new(Restored {
            request: request(4, max_tokens),
            choices: vec![RestoredChoice { emitted, finished: None }],
            cached_tokens: None,
        }),
    }
}

fn share_of(blocks: u32) -> Command<&'static str> {
    let share = ShareSpec { floor: Blocks(0), ceiling: Blocks(blocks) };
    Command::SetTenant {
        tenant: TENANT,
        share,
        prompt_lookup: None,
        reply: Box::new(|set| set.expect("room")),
    }
}

#[test]
fn a_restored_request_waits_for_its_tenants_share_and_then_goes_on() {
    let events = tell(vec![restored(3, &[4]), share_of(8)], 1);
    assert_eq!(events, ["submit 1", "token 5", "submit 2", "token 6", "finished length"]);
}

#[test]
fn of_a_restored_request_that_was_complete_only_the_end_is_told() {
    assert_eq!(tell(vec![share_of(8), restored(3, &[4, 5, 6])], 1), ["finished length"]);
}

#[test]
fn a_restored_request_without_a_share_can_be_cancelled_and_its_choices_finished() {
    let id = request(4, 1).id;
    assert_eq!(tell(vec![restored(3, &[4]), Command::Cancel(id), share_of(8)], 1), ["finished cancelled"]);
    let finish = Command::FinishChoice { request: id, choice: 0, reason: FinishReason::Stop };
    assert_eq!(tell(vec![restored(3, &[4]), finish, share_of(8)], 1), ["finished stop"]);
    let remove = Command::RemoveTenant { tenant: TENANT, reply: Box::new(|()| {}) };
    assert_eq!(tell(vec![restored(3, &[4]), remove, share_of(8)], 1), ["finished cancelled"]);
}

#[test]
fn a_request_that_is_held_never_runs_and_ends_only_where_it_is_told_to() {
    let hold = || {
        let Command::Restore { restored, .. } = restored(3, &[4]) else { unreachable!() };
        Command::Hold(restored)
    };
    let id = request(4, 1).id;
    assert_eq!(tell(vec![hold(), share_of(8), Command::Cancel(id)], 1), ["finished cancelled"]);
    let finish = Command::FinishChoice { request: id, choice: 0, reason: FinishReason::Stop };
    assert_eq!(tell(vec![share_of(8), hold(), finish], 1), ["finished stop"]);
    let remove = Command::RemoveTenant { tenant: TENANT, reply: Box::new(|()| {}) };
    assert_eq!(tell(vec![hold(), share_of(8), remove], 1), ["finished cancelled"]);
}

#[test]
fn a_restored_request_that_cannot_go_on_fails_and_one_that_is_here_already_is_left_alone() {
    let long = Command::Restore {
        reply: Box::new(|_| ()),
        restored: Box::new(Restored {
            request: NewRequest { n: 2, ..request(100, 1) },
            choices: Vec::new(),
            cached_tokens: None,
        }),
    };
    assert_eq!(tell(vec![share_of(8), long], 2), ["finished failed", "finished failed"]);
    let events = tell(vec![share_of(8), restored(2, &[]), restored(2, &[])], 1);
    assert_eq!(events, ["submit 1", "token 4", "submit 2", "token 5", "finished length"]);
}

/// Says when the engine turns and rests, and each time that it rests gives it the next command, or at last tells it to stop.
struct Turns {
    events: Events,
    handle: EngineHandle<&'static str>,
    commands: VecDeque<Command<&'static str>>,
}

impl Observer for Turns {
    fn observe(&mut self, _: EngineStats) {}

    fn turned(&mut self) {
        self.events.borrow_mut().push("turn".to_owned());
    }

    fn rests(&mut self) {
        self.events.borrow_mut().push("rest".to_owned());
        let command = self.commands.pop_front().unwrap_or(Command::Stop);
        self.handle.send(command).map_err(|(full, _)| full).expect("room");
    }
}

#[test]
fn an_engine_without_requests_turns_only_when_a_command_comes() {
    let events = Events::default();
    let (handle, commands) = inbox(64);
    let worker = Scripted {
        events: Events::default(),
        plans: VecDeque::new(),
        deaths: VecDeque::new(),
        recoveries: 0,
    };
    let journal = Recorder { events: Events::default(), handle: handle.clone(), open: usize::MAX };
    let submission = Submission { request: request(5, 2), ticket: "a" };
    let asked = [share_of(8), Command::Submit(Box::new(submission))];
    let observer = Turns { events: events.clone(), handle, commands: asked.into() };
    Engine::new(EngineConfig::default(), commands, scheduler(), worker, journal, observer, Instant::now())
        .run()
        .expect("it is told to stop");
    // A share, a request of two steps, the stop.
    let expected = "turn rest turn turn rest turn turn turn turn rest turn";
    assert_eq!(events.take().join(" "), expected);
}

#[test]
fn a_full_inbox_says_so_and_gives_the_command_back() {
    let (handle, commands) = inbox::<&'static str>(8);
    let sent: Vec<_> = (0..9).map(|_| handle.send(Command::Cancel(RequestId([1; 16]))).is_ok()).collect();
    assert_eq!(sent.iter().filter(|sent| **sent).count(), 8, "the ninth finds the inbox full");
    drop(commands);
    assert!(handle.send(Command::Stop).is_err(), "an inbox without its engine takes nothing");
}
