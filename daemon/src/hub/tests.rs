//! Delivery, without an engine: records go in, frames come out.

use std::time::Duration;

use pagedd_core::{SamplingParams, TokenId, Tokens};
use pagedd_engine::{Inbox, inbox};
use pagedd_journal::LossReason;
use pagedd_sched::{Emitted, Ended, Finished};
use pagedd_wire::gateway::{Finish, Rates};

use super::*;
use crate::quota::Cost;

mod keeping;
mod quotas;

const TENANT: TenantId = TenantId(1);
const STRANGER: TenantId = TenantId(2);
const REQUEST: RequestId = RequestId([7; 16]);

struct Bench {
    hub: Hub,
    engine: Inbox<Box<Ticket>>,
    lookups: mpsc::Receiver<Lookup>,
    durability: watch::Sender<Durability>,
    told: mpsc::Receiver<Told>,
}

fn bench() -> Bench {
    let (handle, engine) = inbox(16);
    let limits = Limits { retention: Duration::from_mins(10), reattach_grace: Duration::from_mins(1) };
    let (asked, lookups) = mpsc::channel(4);
    let (inbox, told) = mpsc::channel(16);
    let durability = watch::Sender::new(Durability::Durable);
    let recorder =
        Recorder { inbox, lookups: asked, durability: durability.subscribe(), billed: Arc::default() };
    let hub = Hub::new(limits, vec![handle], &recorder, Accounts::default());
    Bench { hub, engine, lookups, durability, told }
}

/// A request of 3 prompt tokens.
fn admission(tenant: TenantId, request: RequestId) -> Admission {
    let saved = SavedRequest {
        model: "m".to_owned(),
        key: Some(9),
        created_unix: 1,
        on_leave: OnLeave::Cancel,
        prompt: vec![1, 2, 3],
        sampling: SamplingParams::GREEDY.into(),
        n: 1,
        max_tokens: 10,
        stop_ids: Vec::new(),
        context: vec![1, 2],
    };
    Admission { request, tenant, idempotency: None, model_digest: None, saved }
}

/// That of [`TENANT`], admitted.
fn admitted(connection: u64) -> Message {
    admitted_as(connection, admission(TENANT, REQUEST))
}

fn admitted_as(connection: u64, admission: Admission) -> Message {
    let (connection, admission) = (ConnectionId(connection), Arc::new(admission));
    let grant = Accounts::default().of(admission.tenant).admit(Cost { prompt: 3, output: 10 }).unwrap();
    Message::Admitted { admission, model: ModelId(0), connection, number: 5, spending: grant.accepted() }
}

fn resumable(request: RequestId) -> Admission {
    let mut admission = admission(TENANT, request);
    admission.saved.on_leave = OnLeave::RunOn;
    admission
}

impl Bench {
    fn up(&mut self, tenant: TenantId, connection: u64, room: usize) -> mpsc::Receiver<ToGateway> {
        let (outbox, frames) = mpsc::channel(room);
        let (held, _) = oneshot::channel();
        self.hub.handle(Message::Up { tenant, connection: ConnectionId(connection), outbox, held });
        frames
    }

    /// Answers every lookup: the journal has these.
    fn journal(&mut self, kept: &[Kept]) {
        while let Ok(lookup) = self.lookups.try_recv() {
            let found = kept.iter().find(|kept| kept.admission.request == lookup.request);
            self.hub.handle(Message::Found(lookup, found.cloned().map(Box::new)));
            self.hub.flush();
        }
    }

    fn tokens(&mut self, tokens: impl IntoIterator<Item = u32>) {
        let tokens = tokens
            .into_iter()
            .map(|token| Emitted {
                request: REQUEST,
                tenant: TENANT,
                choice: 0,
                token: TokenId(token),
                logprob: None,
                top: Vec::new(),
            })
            .collect();
        self.hub.handle(Message::Step(StepRecord { tokens, ..StepRecord::default() }));
        self.hub.flush();
    }

    fn finish(&mut self) {
        let ended = Ended { prompt_tokens: Tokens(3), cached_tokens: Tokens(2), output_tokens: Tokens(4) };
        let finished = Finished {
            request: REQUEST,
            tenant: TENANT,
            choice: 0,
            reason: FinishReason::Length,
            ended: Some(ended),
        };
        self.hub.handle(Message::Step(StepRecord { finished: vec![finished], ..StepRecord::default() }));
        self.hub.flush();
    }

    /// Commands that reached the engine, as words.
    fn commands(&mut self) -> Vec<String> {
        self.engine
            .try_iter()
            .map(|command| match command {
                Command::Cancel(request) => format!("cancel {request}"),
                Command::FinishChoice { choice, .. } => format!("finish {choice}"),
                _ => "other".to_owned(),
            })
            .collect()
    }
}

/// Every entry in the frames that came, checked to be gapless from `from`.
fn entries(frames: &mut mpsc::Receiver<ToGateway>, mut from: u64) -> Vec<Entry> {
    let mut all = Vec::new();
    while let Ok(frame) = frames.try_recv() {
        if let ToGateway::Entries(deliveries) = frame {
            for delivery in deliveries {
                assert_eq!(delivery.from, from, "a delivery starts where the last one ended");
                from += delivery.entries.len() as u64;
                all.extend(delivery.entries);
            }
        }
    }
    all
}

fn token(token: u32) -> Entry {
    Entry::Token { choice: 0, token }
}

#[test]
fn tokens_reach_a_gateway_only_after_it_attached_and_from_its_cursor_on() {
    let mut bench = bench();
    let mut frames = bench.up(TENANT, 1, 100);
    bench.hub.handle(admitted(1));
    bench.tokens([10, 11, 12]);
    assert_eq!(
        frames.try_recv(),
        Ok(ToGateway::Accepted { ticket: 5, request: REQUEST.0, repeated: false, rates: Rates::default() })
    );
    assert!(frames.try_recv().is_err(), "nothing before it attaches");
    bench.hub.handle(Message::Attach(ConnectionId(1), REQUEST, 1));
    bench.hub.flush();
    let attached = frames.try_recv().unwrap();
    assert!(matches!(attached, ToGateway::Attached { key: Some(9), prompt_tokens: 3, .. }), "{attached:?}");
    bench.tokens([13]);
    bench.finish();
    let expected = [
        token(11),
        token(12),
        token(13),
        Entry::Finish { choice: 0, reason: Finish::Length },
        Entry::End { cached_tokens: 2 },
    ];
    assert_eq!(entries(&mut frames, 1), expected);
}

#[test]
fn a_full_outbox_loses_nothing_and_holds_up_nobody() {
    let mut bench = bench();
    let mut frames = bench.up(TENANT, 1, 2);
    bench.hub.handle(admitted(1));
    bench.hub.handle(Message::Attach(ConnectionId(1), REQUEST, 0));
    for token in 0..1000 {
        bench.tokens([token]);
    }
    let mut got = Vec::new();
    while got.len() < 1000 {
        let from = got.len() as u64;
        let more = entries(&mut frames, from);
        bench.hub.flush();
        got.extend(more);
    }
    assert_eq!(got, (0..1000).map(token).collect::<Vec<_>>());
}

#[test]
fn a_gateway_that_died_reads_on_from_any_cursor_on_its_next_connection() {
    let mut bench = bench();
    let mut first = bench.up(TENANT, 1, 100);
    bench.hub.handle(admitted(1));
    bench.hub.handle(Message::Attach(ConnectionId(1), REQUEST, 0));
    bench.tokens([1, 2]);
    assert_eq!(entries(&mut first, 0), [token(1), token(2)]);
    bench.hub.handle(Message::Down(ConnectionId(1)));
    bench.tokens([3]);
    let mut second = bench.up(TENANT, 2, 100);
    bench.hub.handle(Message::Attach(ConnectionId(2), REQUEST, 0));
    bench.hub.flush();
    assert_eq!(entries(&mut second, 0), [token(1), token(2), token(3)]);
    assert!(bench.commands().is_empty(), "the death of a gateway cancels nothing");
}

#[test]
fn a_tenant_can_neither_read_nor_cancel_anothers_request() {
    let mut bench = bench();
    let _own = bench.up(TENANT, 1, 100);
    let mut foreign = bench.up(STRANGER, 2, 100);
    bench.hub.handle(admitted(1));
    bench.hub.handle(Message::Attach(ConnectionId(2), REQUEST, 0));
    let kept = Kept {
        admission: admission(TENANT, REQUEST),
        entries: Vec::new(),
        finished_unix: None,
        replays: 0,
        cached_tokens: None,
    };
    bench.journal(&[kept]);
    assert_eq!(foreign.try_recv(), Ok(ToGateway::NotFound { request: REQUEST.0 }));
    bench.hub.handle(Message::Cancel(ConnectionId(2), REQUEST));
    bench.hub.handle(Message::Stop(ConnectionId(2), REQUEST, 0));
    assert!(bench.commands().is_empty());
    bench.hub.handle(Message::Cancel(ConnectionId(1), REQUEST));
    assert_eq!(bench.commands(), [format!("cancel {REQUEST}")]);
}

#[test]
fn a_cancel_that_finds_the_inbox_full_is_sent_again_and_a_stop_takes_nobodys_reader() {
    let mut bench = bench();
    let mut frames = bench.up(TENANT, 1, 100);
    bench.hub.handle(admitted_as(1, resumable(REQUEST)));
    bench.hub.handle(Message::Attach(ConnectionId(1), REQUEST, 0));
    let fill = |bench: &mut Bench| {
        for _ in 0..16 {
            bench.hub.handle(Message::Stop(ConnectionId(1), REQUEST, 0));
        }
    };
    fill(&mut bench);
    bench.hub.handle(Message::Stop(ConnectionId(1), REQUEST, 1));
    bench.tokens([1]);
    assert_eq!(entries(&mut frames, 0), [token(1)]);
    bench.commands();
    bench.hub.expire(Instant::now());
    assert!(bench.commands().is_empty(), "a stop that was lost cancels nothing");

    fill(&mut bench);
    bench.hub.handle(Message::Cancel(ConnectionId(1), REQUEST));
    assert!(!bench.commands().contains(&format!("cancel {REQUEST}")), "there was no room");
    bench.hub.expire(Instant::now());
    assert_eq!(bench.commands(), [format!("cancel {REQUEST}")]);
    bench.hub.expire(Instant::now());
    assert!(bench.commands().is_empty(), "once is enough");
}

#[test]
fn a_gateway_that_does_not_read_keeps_room_for_answers_and_is_cut_off_without() {
    let mut bench = bench();
    let (outbox, mut frames) = mpsc::channel(8);
    let (held, mut cut) = oneshot::channel();
    bench.hub.handle(Message::Up { tenant: TENANT, connection: ConnectionId(1), outbox, held });
    bench.hub.handle(admitted(1));
    bench.hub.handle(Message::Attach(ConnectionId(1), REQUEST, 0));
    for token in 0..100 {
        bench.tokens([token]);
    }
    assert_eq!(frames.len(), 4, "half of the outbox is left to answers");
    for i in 0..5_u8 {
        assert_eq!(cut.try_recv(), Err(oneshot::error::TryRecvError::Empty), "{i} answers");
        bench.hub.handle(Message::Attach(ConnectionId(1), RequestId([i; 16]), 0));
        bench.journal(&[]);
    }
    assert_eq!(cut.try_recv(), Err(oneshot::error::TryRecvError::Closed));
    assert!(frames.try_recv().is_ok());
}

#[test]
fn a_request_that_nobody_reads_is_cancelled_after_the_grace_unless_it_may_run_on() {
    let mut bench = bench();
    let frames = bench.up(TENANT, 1, 100);
    bench.hub.handle(admitted(1));
    bench.hub.handle(admitted_as(1, resumable(RequestId([8; 16]))));
    bench.hub.handle(Message::Attach(ConnectionId(1), REQUEST, 0));
    bench.hub.expire(Instant::now() + Duration::from_hours(1));
    assert!(bench.commands().is_empty(), "an attached request is read");
    drop(frames);
    bench.hub.handle(Message::Down(ConnectionId(1)));
    bench.hub.expire(Instant::now() + Duration::from_secs(59));
    assert!(bench.commands().is_empty(), "the grace is not over");
    bench.hub.expire(Instant::now() + Duration::from_secs(61));
    assert_eq!(bench.commands(), [format!("cancel {REQUEST}")]);
}

#[test]
fn a_finished_request_can_be_read_until_its_retention_is_over() {
    let mut bench = bench();
    let mut frames = bench.up(TENANT, 1, 100);
    bench.hub.handle(admitted(1));
    bench.tokens([1]);
    bench.finish();
    bench.hub.expire(Instant::now() + Duration::from_secs(599));
    bench.hub.handle(Message::Attach(ConnectionId(1), REQUEST, 0));
    bench.hub.flush();
    assert_eq!(entries(&mut frames, 0).len(), 3);
    bench.hub.expire(Instant::now() + Duration::from_secs(601));
    bench.hub.handle(Message::Attach(ConnectionId(1), REQUEST, 0));
    bench.journal(&[]);
    assert_eq!(frames.try_recv(), Ok(ToGateway::NotFound { request: REQUEST.0 }));
    assert_eq!(bench.hub.finished_bytes, 0);
}

#[test]
fn what_is_not_in_memory_is_read_from_the_journal_one_request_of_a_gateway_at_a_time() {
    let mut bench = bench();
    let mut frames = bench.up(TENANT, 1, 100);
    let end = pagedd_journal::Entry::End { cached_tokens: 0 };
    let text = pagedd_journal::Entry::Token { choice: 0, token: 7 };
    let kept: Vec<Kept> = (0..3)
        .map(|i| Kept {
            admission: admission(TENANT, RequestId([i; 16])),
            entries: vec![text, end],
            finished_unix: Some(unix()),
            replays: 0,
            cached_tokens: None,
        })
        .collect();
    for i in 0..4 {
        bench.hub.handle(Message::Attach(ConnectionId(1), RequestId([i; 16]), 1));
    }
    assert_eq!(bench.lookups.len(), 1);
    bench.journal(&kept);
    let mut got = Vec::new();
    while let Ok(frame) = frames.try_recv() {
        match frame {
            ToGateway::Attached { entries: 2, prompt_tokens: 3, .. } => got.push("attached"),
            ToGateway::Entries(deliveries) => {
                let read: Vec<_> = deliveries.into_iter().flat_map(|d| d.entries).collect();
                assert_eq!(read, [Entry::End { cached_tokens: 0 }]);
                got.push("entries");
            }
            ToGateway::NotFound { .. } => got.push("not found"),
            frame => panic!("{frame:?}"),
        }
    }
    got.sort_unstable();
    assert_eq!(got, ["attached", "attached", "attached", "entries", "entries", "entries", "not found"]);
}

#[test]
fn a_restored_request_is_read_on_and_is_cancelled_if_nobody_comes_back_for_it() {
    let mut bench = bench();
    let entries_before = vec![pagedd_journal::Entry::Token { choice: 0, token: 1 }];
    let kept = Kept {
        admission: admission(TENANT, REQUEST),
        entries: entries_before,
        finished_unix: None,
        replays: 0,
        cached_tokens: None,
    };
    bench.hub.restore(Some(ModelId(0)), kept);
    let mut frames = bench.up(TENANT, 1, 100);
    bench.tokens([2]);
    bench.hub.handle(Message::Attach(ConnectionId(1), REQUEST, 0));
    bench.hub.flush();
    assert_eq!(entries(&mut frames, 0), [token(1), token(2)]);
    bench.hub.handle(Message::Stop(ConnectionId(1), REQUEST, 0));
    assert!(bench.commands().is_empty(), "its engine does not have it yet");
    bench.hub.handle(Message::Readmitted(REQUEST));
    assert_eq!(bench.commands(), ["finish 0"]);
    bench.hub.handle(Message::Down(ConnectionId(1)));
    bench.hub.expire(Instant::now() + Duration::from_secs(61));
    assert_eq!(bench.commands(), [format!("cancel {REQUEST}")]);
}

#[test]
fn a_restored_request_that_is_cancelled_before_its_engine_has_it_is_cancelled_as_soon_as_it_does() {
    let mut bench = bench();
    let kept = Kept {
        admission: admission(TENANT, REQUEST),
        entries: Vec::new(),
        finished_unix: None,
        replays: 0,
        cached_tokens: None,
    };
    bench.hub.restore(Some(ModelId(0)), kept);
    let _frames = bench.up(TENANT, 1, 100);
    bench.hub.handle(Message::Attach(ConnectionId(1), REQUEST, 0));
    bench.hub.handle(Message::Cancel(ConnectionId(1), REQUEST));
    bench.hub.expire(Instant::now());
    assert!(bench.commands().is_empty(), "its engine does not have it yet");
    bench.hub.handle(Message::Readmitted(REQUEST));
    assert_eq!(bench.commands(), [format!("cancel {REQUEST}")]);
}

#[test]
fn a_snapshot_has_all_that_is_live_and_what_ended_while_nothing_could_be_written() {
    let mut bench = bench();
    let snapshot = |bench: &mut Bench| {
        let (answer, mut snapshot) = oneshot::channel();
        bench.hub.handle(Message::Snapshot(answer));
        snapshot.try_recv().unwrap().requests
    };
    bench.hub.handle(admitted(1));
    bench.tokens([1]);
    bench.finish();
    assert_eq!(snapshot(&mut bench), [], "it ended, and is in the journal");
    let lost = LossReason::DiskFull;
    bench.durability.send_replace(Durability::Lost { since_unix: 0, records: 1, reason: lost });
    let (live, ended) = (RequestId([1; 16]), RequestId([2; 16]));
    bench.hub.handle(admitted_as(1, admission(TENANT, live)));
    heavy(&mut bench, TENANT, ended);
    let all = snapshot(&mut bench);
    let ids: Vec<_> = all.iter().map(|r| (r.admission.request, r.finished_unix.is_some())).collect();
    assert_eq!(ids, [(live, false), (ended, true)]);
    assert_eq!(all[0].admission.saved.prompt, [1, 2, 3]);
    assert_eq!(all[1].entries.len(), 2);
}

/// A request of `tenant` that ended at once, with a long context.
fn heavy(bench: &mut Bench, tenant: TenantId, request: RequestId) {
    let mut admission = admission(tenant, request);
    admission.saved.context = vec![0; 100 << 10];
    bench.hub.handle(admitted_as(1, admission));
    let ended = Ended { prompt_tokens: Tokens(3), cached_tokens: Tokens(0), output_tokens: Tokens(0) };
    let finished = Finished { request, tenant, choice: 0, reason: FinishReason::Stop, ended: Some(ended) };
    bench.hub.handle(Message::Step(StepRecord { finished: vec![finished], ..StepRecord::default() }));
}

#[test]
fn logs_of_finished_requests_take_bounded_memory() {
    let mut bench = bench();
    let _frames = bench.up(TENANT, 1, 100);
    for i in 0..200_u8 {
        heavy(&mut bench, TENANT, RequestId([i; 16]));
    }
    bench.hub.expire(Instant::now());
    assert!(bench.hub.finished_bytes <= FINISHED_BYTES, "{} bytes", bench.hub.finished_bytes);
    assert!(!bench.hub.logs.contains_key(&RequestId([0; 16])), "the oldest went first");
    assert!(bench.hub.logs.contains_key(&RequestId([199; 16])), "the youngest stays");
}

#[test]
fn a_tenant_that_fills_the_memory_of_finished_logs_drops_its_own_and_not_those_of_others() {
    let mut bench = bench();
    let others = RequestId([200; 16]);
    heavy(&mut bench, STRANGER, others);
    for i in 0..200_u8 {
        heavy(&mut bench, TENANT, RequestId([i; 16]));
    }
    bench.hub.expire(Instant::now());
    assert!(bench.hub.finished_bytes <= FINISHED_BYTES, "{} bytes", bench.hub.finished_bytes);
    assert!(bench.hub.logs.contains_key(&others), "the oldest of all, but not of the tenant that has most");
    bench.hub.handle(Message::Forget(TENANT));
    bench.hub.handle(Message::Forget(STRANGER));
    assert_eq!((bench.hub.finished_bytes, bench.hub.logs.len()), (0, 0));
}

/// What the recorder was told to write: how choices end.
fn told(bench: &mut Bench) -> Vec<FinishReason> {
    let mut reasons = Vec::new();
    while let Ok(Told::Step(record)) = bench.told.try_recv() {
        reasons.extend(record.finished.iter().map(|finished| finished.reason));
        bench.hub.handle(Message::Step(record));
    }
    reasons
}

fn kept(request: RequestId) -> Kept {
    let entries = vec![pagedd_journal::Entry::Token { choice: 0, token: 5 }];
    Kept { admission: resumable(request), entries, finished_unix: None, replays: 0, cached_tokens: Some(2) }
}

#[test]
fn a_request_whose_model_is_not_there_can_be_cancelled_and_ends_once_that_lasts() {
    let (failed, other) = (RequestId([1; 16]), RequestId([2; 16]));
    for model in [None, Some(ModelId(0))] {
        let mut bench = bench();
        let mut frames = bench.up(TENANT, 1, 100);
        bench.hub.restore(model, kept(failed));
        bench.hub.restore(model, kept(other));
        if let Some(model) = model {
            bench.hub.expire(Instant::now() + Duration::from_hours(1));
            assert_eq!(told(&mut bench), [], "it may still load");
            bench.hub.handle(Message::ModelFailed(model));
        }
        bench.hub.handle(Message::Attach(ConnectionId(1), failed, 0));
        bench.hub.handle(Message::Cancel(ConnectionId(1), failed));
        bench.hub.expire(Instant::now());
        assert_eq!(told(&mut bench), [FinishReason::Cancelled]);
        bench.hub.flush();
        let expected = [
            token(5),
            Entry::Finish { choice: 0, reason: Finish::Cancelled },
            Entry::End { cached_tokens: 2 },
        ];
        assert_eq!(entries(&mut frames, 0), expected);
        let (answer, mut live) = oneshot::channel();
        bench.hub.handle(Message::Live(TENANT, answer));
        assert_eq!(live.try_recv(), Ok(1), "the other waits");

        bench.hub.expire(Instant::now() + Duration::from_mins(9));
        assert_eq!(told(&mut bench), []);
        bench.hub.expire(Instant::now() + Duration::from_mins(11));
        assert_eq!(told(&mut bench), [FinishReason::ModelGone]);
        bench.hub.expire(Instant::now() + Duration::from_mins(12));
        assert_eq!(told(&mut bench), [], "once");
        assert!(bench.commands().is_empty(), "there is no engine to tell");
    }
}
