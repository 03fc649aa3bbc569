//! Delivery, without an engine: records go in, frames come out.

use std::time::Duration;

use pagedd_core::{TokenId, Tokens};
use pagedd_engine::{Inbox, inbox};
use pagedd_sched::{Emitted, Ended, Finished};
use pagedd_wire::gateway::Finish;

use super::*;

const TENANT: TenantId = TenantId(1);
const STRANGER: TenantId = TenantId(2);
const REQUEST: RequestId = RequestId([7; 16]);

struct Bench {
    hub: Hub,
    engine: Inbox<Box<Ticket>>,
}

fn bench() -> Bench {
    let (handle, engine) = inbox(16);
    let limits = Limits { retention: Duration::from_mins(10), reattach_grace: Duration::from_mins(1) };
    Bench { hub: Hub::new(limits, vec![handle]), engine }
}

fn ticket(connection: u64) -> Ticket {
    Ticket {
        connection: ConnectionId(connection),
        tenant: TENANT,
        model: ModelId(0),
        number: 5,
        prompt_tokens: 3,
        block_size: 16,
        n: 1,
        on_leave: OnLeave::Cancel,
        key: Some(9),
        context: vec![1, 2],
    }
}

impl Bench {
    fn up(&mut self, tenant: TenantId, connection: u64, room: usize) -> mpsc::Receiver<ToGateway> {
        let (outbox, frames) = mpsc::channel(room);
        let (held, _) = oneshot::channel();
        self.hub.handle(Message::Up { tenant, connection: ConnectionId(connection), outbox, held });
        frames
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
        self.hub.handle(Message::Step(StepRecord { tokens, finished: Vec::new() }));
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
        self.hub.handle(Message::Step(StepRecord { tokens: Vec::new(), finished: vec![finished] }));
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
    bench.hub.handle(Message::Admitted(REQUEST, Box::new(ticket(1))));
    bench.tokens([10, 11, 12]);
    assert_eq!(frames.try_recv(), Ok(ToGateway::Accepted { ticket: 5, request: REQUEST.0, repeated: false }));
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
    bench.hub.handle(Message::Admitted(REQUEST, Box::new(ticket(1))));
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
    bench.hub.handle(Message::Admitted(REQUEST, Box::new(ticket(1))));
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
    bench.hub.handle(Message::Admitted(REQUEST, Box::new(ticket(1))));
    bench.hub.handle(Message::Attach(ConnectionId(2), REQUEST, 0));
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
    bench.hub.handle(Message::Admitted(REQUEST, Box::new(Ticket { on_leave: OnLeave::RunOn, ..ticket(1) })));
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
    bench.hub.handle(Message::Admitted(REQUEST, Box::new(ticket(1))));
    bench.hub.handle(Message::Attach(ConnectionId(1), REQUEST, 0));
    for token in 0..100 {
        bench.tokens([token]);
    }
    assert_eq!(frames.len(), 4, "half of the outbox is left to answers");
    for i in 0..5_u8 {
        assert_eq!(cut.try_recv(), Err(oneshot::error::TryRecvError::Empty), "{i} answers");
        bench.hub.handle(Message::Attach(ConnectionId(1), RequestId([i; 16]), 0));
    }
    assert_eq!(cut.try_recv(), Err(oneshot::error::TryRecvError::Closed));
    assert!(frames.try_recv().is_ok());
}

#[test]
fn a_request_that_nobody_reads_is_cancelled_after_the_grace_unless_it_may_run_on() {
    let mut bench = bench();
    let frames = bench.up(TENANT, 1, 100);
    bench.hub.handle(Message::Admitted(REQUEST, Box::new(ticket(1))));
    let resumable = RequestId([8; 16]);
    bench
        .hub
        .handle(Message::Admitted(resumable, Box::new(Ticket { on_leave: OnLeave::RunOn, ..ticket(1) })));
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
    bench.hub.handle(Message::Admitted(REQUEST, Box::new(ticket(1))));
    bench.tokens([1]);
    bench.finish();
    bench.hub.expire(Instant::now() + Duration::from_secs(599));
    bench.hub.handle(Message::Attach(ConnectionId(1), REQUEST, 0));
    bench.hub.flush();
    assert_eq!(entries(&mut frames, 0).len(), 3);
    bench.hub.expire(Instant::now() + Duration::from_secs(601));
    bench.hub.handle(Message::Attach(ConnectionId(1), REQUEST, 0));
    assert_eq!(frames.try_recv(), Ok(ToGateway::NotFound { request: REQUEST.0 }));
    assert_eq!(bench.hub.finished_bytes, 0);
}

/// A request of `tenant` that ended at once, with a long context.
fn heavy(bench: &mut Bench, tenant: TenantId, request: RequestId) {
    let ticket = Ticket { tenant, context: vec![0; 100 << 10], ..ticket(1) };
    bench.hub.handle(Message::Admitted(request, Box::new(ticket)));
    let ended = Ended { prompt_tokens: Tokens(3), cached_tokens: Tokens(0), output_tokens: Tokens(0) };
    let finished = Finished { request, tenant, choice: 0, reason: FinishReason::Stop, ended: Some(ended) };
    bench.hub.handle(Message::Step(StepRecord { tokens: Vec::new(), finished: vec![finished] }));
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
