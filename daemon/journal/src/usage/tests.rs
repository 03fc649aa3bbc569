use super::*;
use crate::writer::{Durability, JournalWriter, Now};
use crate::{Fsync, OnLeave, Retention, SnapshotRequest};
use pagedd_core::SamplingParams;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const TIME: u64 = 1_790_000_000;

fn id(n: u8) -> RequestId {
    RequestId([n; 16])
}

/// Request `n` of tenant `n / 10`, with `n` prompt tokens and two choices.
fn admission(n: u8) -> Admission {
    Admission {
        request: id(n),
        tenant: TenantId(u32::from(n / 10)),
        idempotency: None,
        model_digest: None,
        saved: SavedRequest {
            model: "m".to_owned(),
            key: (n % 2 == 1).then_some(7),
            created_unix: TIME,
            on_leave: OnLeave::RunOn,
            prompt: vec![1; usize::from(n)],
            sampling: SamplingParams::GREEDY.into(),
            n: 2,
            max_tokens: 10,
            stop_ids: Vec::new(),
            context: Vec::new(),
        },
    }
}

fn admit(n: u8) -> Record {
    Record::Admission(Arc::new(admission(n)))
}

fn start(n: u8, cached: u32) -> Record {
    Record::Step(Step { started: vec![(id(n), cached)], ..Step::default() })
}

fn tokens(n: u8, count: usize) -> Record {
    let entries = vec![(id(n), Entry::Token { choice: 0, token: 1 }); count];
    Record::Step(Step { entries, ..Step::default() })
}

/// Both choices end so, and the request with them.
fn end(n: u8, reasons: [Finish; 2], computed: Option<u32>) -> Record {
    let finish = |choice: usize| Entry::Finish { choice: choice as u32, reason: reasons[choice] };
    let entries = vec![(id(n), finish(0)), (id(n), finish(1)), (id(n), Entry::End { cached_tokens: 0 })];
    let prompts = computed.map(|tokens| (id(n), tokens)).into_iter().collect();
    Record::Step(Step { entries, prompts, ..Step::default() })
}

const STOPPED: [Finish; 2] = [Finish::Stop, Finish::Length];

fn open(dir: &TempDir) -> JournalDb {
    JournalDb::open(dir.path(), Fsync::Every).unwrap()
}

fn usage(requests: [u64; 3], tokens: [u64; 3]) -> Usage {
    Usage {
        requests: requests[0],
        aborted: requests[1],
        failed: requests[2],
        prompt_tokens: tokens[0],
        cached_tokens: tokens[1],
        output_tokens: tokens[2],
    }
}

/// What is billed, by tenant and key.
fn billed(db: &JournalDb) -> BTreeMap<(u32, Option<u32>), Usage> {
    let mut sums = BTreeMap::new();
    for Bill { payer, usage, .. } in db.bills(0, 1000).unwrap() {
        assert_eq!(payer.model.as_ref(), "m");
        *sums.entry((payer.tenant.0, payer.key)).or_insert_with(Usage::default) += usage;
    }
    sums
}

#[test]
fn a_request_is_billed_with_its_end_whatever_lies_in_between() {
    let dir = tempfile::tempdir().unwrap();
    let mut db = open(&dir);
    db.append(&[admit(11), admit(12), start(11, 4), tokens(11, 3)], TIME).unwrap();
    db.fold(1).unwrap();
    db.append(&[tokens(11, 2), start(12, 0), tokens(12, 1)], TIME).unwrap();
    assert_eq!(billed(&db), BTreeMap::new(), "nothing has ended");
    drop(db);
    let mut db = open(&dir);
    db.append(&[tokens(11, 1), end(11, STOPPED, Some(11)), tokens(11, 9)], TIME + 1).unwrap();
    db.append(&[end(12, STOPPED, Some(12)), end(12, STOPPED, Some(12))], TIME + 2).unwrap();
    let expected = BTreeMap::from([
        ((1, Some(7)), usage([1, 0, 0], [11, 4, 6])),
        ((1, None), usage([1, 0, 0], [12, 0, 1])),
    ]);
    assert_eq!(billed(&db), expected);
    let numbers: Vec<_> = db.bills(0, 1000).unwrap().iter().map(|bill| (bill.number, bill.at_unix)).collect();
    assert_eq!(numbers, [(1, TIME + 1), (2, TIME + 2)]);
}

#[test]
fn what_ends_early_pays_for_what_was_computed() {
    let dir = tempfile::tempdir().unwrap();
    let mut db = open(&dir);
    let cancelled = [Finish::Cancelled; 2];
    // Before its first step; in the middle of its prompt; with some output; one choice only; failed.
    db.append(&[admit(20), end(20, cancelled, Some(0))], TIME).unwrap();
    db.append(&[admit(30), start(30, 8), end(30, cancelled, Some(16))], TIME).unwrap();
    db.append(&[admit(40), start(40, 0), tokens(40, 2), end(40, cancelled, Some(40))], TIME).unwrap();
    let one = [Finish::Stop, Finish::Cancelled];
    db.append(&[admit(50), start(50, 0), tokens(50, 1), end(50, one, Some(50))], TIME).unwrap();
    let failed = [Finish::Cancelled, Finish::Failed];
    db.append(&[admit(60), start(60, 0), tokens(60, 1), end(60, failed, Some(60))], TIME).unwrap();
    let expected = [
        ((2, None), usage([1, 1, 0], [0, 0, 0])),
        ((3, None), usage([1, 1, 0], [16, 8, 0])),
        ((4, None), usage([1, 1, 0], [40, 0, 2])),
        ((5, None), usage([1, 1, 0], [50, 0, 1])),
        ((6, None), usage([1, 0, 1], [60, 0, 1])),
    ];
    assert_eq!(billed(&db), expected.into());
}

#[test]
fn what_goes_without_an_end_is_billed_as_well() {
    let dir = tempfile::tempdir().unwrap();
    let mut db = open(&dir);
    for n in [20, 30, 40, 50] {
        db.append(&[admit(n), start(n, 0), tokens(n, 3)], TIME).unwrap();
    }
    drop(db);
    let mut db = open(&dir);
    db.delete_tenant(TenantId(2), TIME).unwrap();
    assert!(db.delete_request(id(30), TIME).unwrap());
    db.set_aside(id(40), TIME).unwrap();
    db.give_up(id(50), TIME).unwrap();
    let expected = [
        ((2, None), usage([1, 1, 0], [20, 0, 3])),
        ((3, None), usage([1, 1, 0], [30, 0, 3])),
        ((4, None), usage([1, 0, 1], [40, 0, 3])),
        ((5, None), usage([1, 0, 1], [50, 0, 3])),
    ];
    assert_eq!(billed(&db), expected.into());
    let retention = Retention { seconds: 0, per_tenant: BTreeMap::new(), max_bytes: u64::MAX };
    db.expire(TIME + 1, &retention).unwrap();
    assert_eq!(billed(&db), expected.into(), "a bill stays where its request goes");
}

#[test]
fn a_batch_that_is_not_committed_is_not_metered() {
    let dir = tempfile::tempdir().unwrap();
    let mut db = open(&dir);
    db.append(&[admit(11), start(11, 0), tokens(11, 2)], TIME).unwrap();
    let pages: i64 = db.db.pragma_query_value(None, "page_count", |row| row.get(0)).unwrap();
    db.db.pragma_update_and_check(None, "max_page_count", pages, |_| Ok(())).unwrap();
    let big = (0..200).map(|_| tokens(11, 500));
    let lost: Vec<Record> = big.chain([admit(21), end(11, STOPPED, None)]).collect();
    db.append(&lost, TIME).unwrap_err();
    db.db.pragma_update_and_check(None, "max_page_count", 1_000_000, |_| Ok(())).unwrap();
    db.append(&[tokens(11, 1), end(11, STOPPED, None)], TIME).unwrap();
    assert_eq!(billed(&db), [((1, Some(7)), usage([1, 0, 0], [11, 0, 3]))].into());
}

#[test]
fn what_ends_while_nothing_can_be_written_is_billed_with_the_snapshot() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = JournalWriter::new(open(&dir));
    let now = |seconds| Now { instant: Instant::now() + Duration::from_secs(seconds), unix: TIME + seconds };
    writer.append(&[admit(10), admit(20), start(10, 2), tokens(10, 2)], now(0));
    let pages: i64 = writer.db().db.pragma_query_value(None, "page_count", |row| row.get(0)).unwrap();
    writer.db().db.pragma_update_and_check(None, "max_page_count", pages, |_| Ok(())).unwrap();
    let big: Vec<Record> = (0..200).map(|_| tokens(20, 500)).collect();
    let lost = writer.append(&big, now(0));
    assert!(matches!(lost, Durability::Lost { .. }), "{lost:?}");
    writer.append(&[tokens(10, 1), end(10, STOPPED, Some(10)), admit(30), start(30, 0)], now(1));
    writer.append(&[tokens(30, 4), end(30, STOPPED, Some(30)), admit(40), tokens(40, 1)], now(2));
    writer.db().db.pragma_update_and_check(None, "max_page_count", 1_000_000, |_| Ok(())).unwrap();
    // The one of tenant 3 has ended, and is not kept any more.
    let kept = |n: u8, count: usize, finished_unix| SnapshotRequest {
        admission: admission(n),
        entries: vec![Entry::Token { choice: 0, token: 1 }; count],
        cached_tokens: Some(0),
        finished_unix,
    };
    let requests = vec![kept(10, 3, Some(TIME)), kept(20, 7, None), kept(40, 1, None)];
    assert!(writer.needs_snapshot(now(60)));
    let restored = writer.restore_snapshot(&crate::Snapshot { requests }, now(60));
    assert_eq!(restored, Durability::Durable);
    writer.append(&[tokens(20, 1), end(20, STOPPED, None), tokens(40, 1), end(40, STOPPED, None)], now(61));
    let expected = [
        ((1, None), usage([1, 0, 0], [10, 2, 3])),
        ((2, None), usage([1, 0, 0], [20, 0, 8])),
        ((3, None), usage([1, 0, 0], [30, 0, 4])),
        ((4, None), usage([1, 0, 0], [40, 0, 2])),
    ];
    assert_eq!(billed(writer.db()), expected.into());
    let at: Vec<u64> = writer.db().bills(0, 9).unwrap().iter().map(|bill| bill.at_unix).collect();
    assert_eq!(at, [TIME + 1, TIME + 2, TIME + 61, TIME + 61], "quotas by the minute need to know when");
}

#[test]
fn many_sums_that_wait_are_kept_by_the_hour_but_for_those_of_the_last_minute() {
    let now = 1_000_000 * HOUR + 1_800;
    let payer = || Payer { tenant: TenantId(1), key: None, model: "m".into() };
    let mut waiting = Unbilled::new();
    for at in [now - 1_700, now - 100, now - 99, now - 3, now] {
        add(&mut waiting, at, (payer(), usage([1, 0, 0], [1, 0, 1])));
    }
    let sums = by_hour(waiting, now - RECENT_S);
    let found: Vec<(u64, u64)> = sums.iter().map(|((at, _), usage)| (*at, usage.requests)).collect();
    assert_eq!(found, [(now - 1_800, 3), (now - 3, 1), (now, 1)]);
}

#[test]
fn a_bills_number_is_never_given_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut db = open(&dir);
    let ledger = db.ledger().unwrap();
    db.append(&[admit(11), end(11, STOPPED, None)], TIME).unwrap();
    db.append(&[admit(21), end(21, STOPPED, None)], TIME + 200).unwrap();
    db.forget_bills(2, TIME + 100).unwrap();
    let left = |db: &JournalDb| -> Vec<i64> { db.bills(0, 9).unwrap().iter().map(|b| b.number).collect() };
    assert_eq!(left(&db), [2], "one of late stays");
    db.forget_bills(1, u64::MAX >> 1).unwrap();
    assert_eq!(left(&db), [2], "nobody has it yet");
    db.forget_bills(2, u64::MAX >> 1).unwrap();
    drop(db);
    let mut db = open(&dir);
    assert_eq!(db.ledger().unwrap(), ledger);
    db.append(&[admit(31), end(31, STOPPED, None)], TIME).unwrap();
    assert_eq!(left(&db), [3]);
    db.raise_bills(2).unwrap();
    db.raise_bills(90).unwrap();
    db.append(&[admit(41), end(41, STOPPED, None)], TIME).unwrap();
    assert_eq!(left(&db), [3, 91]);
    let writable = |db: &JournalDb, is: bool| db.db.pragma_update(None, "query_only", !is).unwrap();
    writable(&db, false);
    db.raise_bills(200).unwrap_err();
    writable(&db, true);
    db.append(&[admit(51), end(51, STOPPED, None)], TIME + 200).unwrap();
    assert_eq!(left(&db), [3, 91, 201], "what could not be written then is with the next bill");
    assert_eq!(db.bills_since(TIME).unwrap().len(), 3);
    assert_eq!(db.bills_since(TIME + 1).unwrap().len(), 1);
}
