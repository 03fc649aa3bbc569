//! Daemons that end, one after another, on one journal: what the next one makes of it.

use std::fs;
use std::path::Path;

use pagedd_core::{SamplingParams, TokenId};
use pagedd_engine::{Inbox, inbox};
use pagedd_journal::{Fsync, OnLeave, SavedRequest};
use pagedd_sched::Emitted;
use tempfile::TempDir;

use super::*;

const TENANT: TenantId = TenantId(1);
const KEY: Idempotency = Idempotency { key: [1; 32], body: [2; 32] };

fn id(n: u8) -> RequestId {
    RequestId([n; 16])
}

fn admission(n: u8, tenant: TenantId) -> Admission {
    let saved = SavedRequest {
        model: "m".to_owned(),
        key: None,
        created_unix: 1,
        on_leave: OnLeave::RunOn,
        prompt: vec![1, 2, 3],
        sampling: SamplingParams::GREEDY.into(),
        n: 1,
        max_tokens: 1000,
        stop_ids: Vec::new(),
        context: format!("context of request {n}").into_bytes(),
    };
    Admission { request: id(n), tenant, idempotency: None, model_digest: None, saved }
}

fn open(dir: &Path) -> JournalDb {
    JournalDb::open(dir, Fsync::Never).unwrap()
}

/// A journal with these live requests.
fn journal(requests: impl IntoIterator<Item = u8>) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let records: Vec<Record> =
        requests.into_iter().map(|n| Record::Admission(Arc::new(admission(n, TENANT)))).collect();
    open(dir.path()).append(&records, 1).unwrap();
    dir
}

fn found(dir: &Path) -> Found {
    live(&mut open(dir), &[TENANT]).unwrap()
}

/// Live requests, with their counters.
fn counted(dir: &Path) -> Vec<(RequestId, u32)> {
    found(dir).live.iter().map(|kept| (kept.admission.request, kept.replays)).collect()
}

fn recorder(dir: &Path) -> (Recorder, mpsc::Receiver<Message>) {
    let retention = Retentions::new(Duration::from_mins(10), Duration::ZERO);
    let (hub, mut told) = mpsc::channel(1024);
    let (others, messages) = mpsc::channel(1024);
    // The hub has nothing that may be deleted, and passes on all else.
    thread::spawn(move || {
        while let Some(message) = told.blocking_recv() {
            if !matches!(message, Message::Spent(_)) {
                drop(others.blocking_send(message));
            }
        }
    });
    (start(JournalWriter::new(open(dir)), retention, hub).unwrap(), messages)
}

fn step(request: RequestId) -> Told {
    let token =
        Emitted { request, tenant: TENANT, choice: 0, token: TokenId(7), logprob: None, top: Vec::new() };
    Told::Step(StepRecord { tokens: vec![token], ..StepRecord::default() })
}

async fn next(engine: &Inbox<Box<Ticket>>) -> RequestId {
    loop {
        if let Some(Command::Restore { restored, reply }) = engine.try_iter().next() {
            reply(Placed::Taken);
            return restored.request.id;
        }
        // The inbox of an engine is no future.
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(future)
}

/// A daemon that admits again what it finds, and ends as soon as its engine has this one; otherwise it goes on until each has got a
/// token. What its engine took, in order.
fn life(dir: &Path, deadly: Option<RequestId>) -> Vec<RequestId> {
    run(async {
        let restored = found(dir).live;
        let (recorder, _messages) = recorder(dir);
        let (handle, engine) = inbox(64);
        let all = restored.len();
        let readmission = tokio::spawn(readmit(restored, handle, recorder.inbox.clone()));
        let mut taken = Vec::new();
        let mut stepped = 0;
        while taken.len() < all {
            taken.push(next(&engine).await);
            // Those that come together run together.
            while let Ok(more) = tokio::time::timeout(Duration::from_millis(30), next(&engine)).await {
                taken.push(more);
            }
            if deadly.is_some_and(|deadly| taken.contains(&deadly)) {
                readmission.abort();
                return taken;
            }
            for request in &taken[stepped..] {
                recorder.inbox.send(step(*request)).await.unwrap_or_else(|_| panic!("the recorder ended"));
            }
            stepped = taken.len();
        }
        readmission.await.unwrap();
        let (synced, answer) = oneshot::channel();
        drop(recorder.inbox.send(Told::Sync(synced)).await);
        answer.await.unwrap();
        taken
    })
}

#[test]
fn a_request_with_which_daemons_end_is_found_among_others_that_run_with_it_and_they_all_go_on() {
    let dir = journal(1..=5);
    let deadly = Some(id(3));
    // All run together: any of them may have done it.
    assert_eq!(life(dir.path(), deadly), [1, 2, 3, 4, 5].map(id));
    assert_eq!(counted(dir.path()), [1, 2, 3, 4, 5].map(|n| (id(n), 1)));
    // Then one, and two more once it was harmless; those that waited for their turn are as they were.
    assert_eq!(life(dir.path(), deadly), [1, 2, 3].map(id));
    assert_eq!(counted(dir.path()), [(id(1), 0), (id(2), 2), (id(3), 2), (id(4), 1), (id(5), 1)]);
    // Each of the two alone, and before those that less speaks against.
    assert_eq!(life(dir.path(), deadly), [2, 3].map(id));
    assert_eq!(counted(dir.path()), [(id(1), 0), (id(2), 0), (id(3), 3), (id(4), 1), (id(5), 1)]);
    assert_eq!(life(dir.path(), deadly), [3].map(id), "somebody else may have ended the daemon");
    let last = found(dir.path());
    assert_eq!(last.set_aside, 1);
    let left: Vec<RequestId> = last.live.iter().map(|kept| kept.admission.request).collect();
    assert_eq!(left, [1, 2, 4, 5].map(id));
    let aside = open(dir.path()).request(id(3)).unwrap().unwrap();
    assert!(aside.entries.contains(&Entry::Finish { choice: 0, reason: Finish::Failed }), "{aside:?}");
    assert_eq!(life(dir.path(), None), [4, 5, 1, 2].map(id));
    assert_eq!(counted(dir.path()), [1, 2, 4, 5].map(|n| (id(n), 0)));
}

#[test]
fn a_request_whose_life_brought_it_on_starts_anew_however_often_daemons_are_killed() {
    let dir = journal([1]);
    for _ in 0..5 {
        assert_eq!(life(dir.path(), None), [id(1)]);
        assert_eq!(counted(dir.path()), [(id(1), 0)]);
    }
}

#[test]
fn daemons_that_end_in_good_order_are_nobodys_fault() {
    let dir = journal([1, 2]);
    for _ in 0..4 {
        run(async {
            let restored = found(dir.path()).live;
            assert_eq!(restored.len(), 2, "none is set aside");
            let (recorder, _messages) = recorder(dir.path());
            let (handle, engine) = inbox(64);
            tokio::spawn(readmit(restored, handle, recorder.inbox.clone()));
            assert_eq!([next(&engine).await, next(&engine).await], [id(1), id(2)]);
            let (synced, answer) = oneshot::channel();
            recorder.inbox.send(Told::Sync(synced)).await.unwrap_or_else(|_| panic!("the recorder ended"));
            answer.await.unwrap();
        });
        assert_eq!(counted(dir.path()), [(id(1), 0), (id(2), 0)]);
    }
}

#[test]
fn what_waits_for_its_tenants_share_is_not_counted() {
    let dir = journal([1, 2]);
    run(async {
        let restored = found(dir.path()).live;
        let (recorder, mut messages) = recorder(dir.path());
        let (handle, engine) = inbox(64);
        tokio::spawn(readmit(restored, handle, recorder.inbox.clone()));
        let mut answered = 0;
        while answered < 2 {
            for command in engine.try_iter() {
                let Command::Restore { reply, .. } = command else { panic!("another command") };
                reply(Placed::Waits);
                answered += 1;
            }
            tokio::task::yield_now().await;
        }
        for _ in 0..2 {
            let told = messages.recv().await;
            assert!(matches!(told, Some(Message::Readmitted(_))));
        }
    });
    assert_eq!(counted(dir.path()), [(id(1), 0), (id(2), 0)]);
}

#[test]
fn what_is_too_large_is_held_without_being_counted_unless_its_tenant_was_removed() {
    let dir = journal([1]);
    open(dir.path()).append(&[Record::Admission(Arc::new(admission(2, TenantId(9))))], 1).unwrap();
    run(async {
        let restored = live(&mut open(dir.path()), &[TENANT, TenantId(9)]).unwrap().live;
        let misfit = Misfit::Length { tokens: 2, max_model_len: 1 };
        let misfits: Vec<_> = restored.into_iter().map(|kept| (kept, misfit)).collect();
        assert_eq!(misfits.len(), 2);
        let (recorder, mut messages) = recorder(dir.path());
        let (handle, engine) = inbox(64);
        recorder.inbox.send(Told::Forget(TenantId(9))).await.unwrap_or_else(|_| panic!("the recorder ended"));
        hold(misfits, &handle, &recorder.inbox).await;
        let held: Vec<RequestId> = engine
            .try_iter()
            .map(|command| match command {
                Command::Hold(restored) => restored.request.id,
                _ => panic!("another command"),
            })
            .collect();
        assert_eq!(held, [id(1)]);
        assert!(matches!(messages.recv().await, Some(Message::Forget(_))));
        assert!(matches!(messages.recv().await, Some(Message::Held(request)) if request == id(1)));
    });
    assert_eq!(counted(dir.path()), [(id(1), 0)]);
}

#[test]
fn a_claim_is_as_long_as_somebody_holds_it() {
    let dir = journal([]);
    run(async {
        let (recorder, _messages) = recorder(dir.path());
        let claim = async || {
            let (answer, claim) = oneshot::channel();
            let told = Told::Claim { tenant: TENANT, idempotency: KEY, answer };
            recorder.inbox.send(told).await.unwrap_or_else(|_| panic!("the recorder ended"));
            claim.await.unwrap()
        };
        let Claim::New(hold) = claim().await else { panic!("nobody has it") };
        assert!(matches!(claim().await, Claim::Busy));
        // The gateway's connection was cut before the request was in the engine's inbox.
        drop(hold);
        assert!(matches!(claim().await, Claim::New(_)));
        assert!(matches!(claim().await, Claim::New(_)), "an answer that nobody took is no claim");
    });
}

#[test]
fn a_damaged_request_is_set_aside_once_and_goes_when_its_time_is_over() {
    let dir = journal([1, 2]);
    open(dir.path()).purge().unwrap();
    let path = dir.path().join("journal.db");
    let mut bytes = fs::read(&path).unwrap();
    let needle = b"context of request 1";
    let at = bytes.windows(needle.len()).position(|w| w == needle).expect("it is in the file");
    bytes[at] ^= 1;
    fs::write(&path, bytes).unwrap();

    let first = found(dir.path());
    assert_eq!((first.set_aside, first.live.len()), (1, 1));
    let second = found(dir.path());
    assert_eq!((second.set_aside, second.live.len()), (0, 1), "it is tried again");
    let retention = Retentions::new(Duration::ZERO, Duration::ZERO).of_journal();
    let mut db = open(dir.path());
    assert_eq!(db.expire(unix() + 1, &retention).unwrap().requests, [id(1)]);
    assert_eq!(db.tenant_of(id(1)).unwrap(), None);
}

#[test]
fn requests_of_a_tenant_that_is_not_known_neither_go_on_nor_away() {
    let dir = journal([1]);
    open(dir.path()).append(&[Record::Admission(Arc::new(admission(2, TenantId(9))))], 1).unwrap();
    assert_eq!(found(dir.path()).live.len(), 1);
    assert!(open(dir.path()).request(id(2)).unwrap().is_some());
}
