use super::*;
use crate::schema::{JOURNAL_DB, Kind, Sharing};
use crate::{Admission, Entry, OnLeave, SavedRequest, SnapshotRequest, Step};
use pagedd_core::{RequestId, SamplingParams, TenantId};
use rusqlite::Connection;
use std::collections::BTreeMap;
use tempfile::TempDir;

const SECOND: Duration = Duration::from_secs(1);

/// A writer, and the time as it is told.
struct Bench {
    writer: JournalWriter,
    dir: TempDir,
    start: Instant,
    now: Now,
}

impl Bench {
    fn new(fsync: Fsync) -> Self {
        Self::of(fsync, JOURNAL_DB)
    }

    fn of(fsync: Fsync, kind: Kind) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let start = Instant::now();
        let writer = JournalWriter::new(JournalDb::open_as(dir.path(), fsync, kind).unwrap());
        Self { writer, dir, start, now: Now { instant: start, unix: 1_000 } }
    }

    fn at(&mut self, seconds: u64) -> Now {
        self.now = Now { instant: self.start + SECOND * seconds as u32, unix: 1_000 + seconds };
        self.now
    }

    fn append(&mut self, records: &[Record]) -> Durability {
        self.writer.append(records, self.now)
    }

    fn db(&mut self) -> &Connection {
        &self.writer.db().db
    }

    /// No page more than there are.
    fn fill_the_disk(&mut self) {
        let pages: i64 = self.db().pragma_query_value(None, "page_count", |row| row.get(0)).unwrap();
        self.db().pragma_update_and_check(None, "max_page_count", pages, |_| Ok(())).unwrap();
    }

    fn make_room(&mut self) {
        self.db().pragma_update_and_check(None, "max_page_count", 1_000_000, |_| Ok(())).unwrap();
    }

    fn log(&mut self, n: u8) -> Option<Vec<Entry>> {
        self.writer.db().log(id(n), 0).unwrap()
    }
}

fn id(n: u8) -> RequestId {
    RequestId([n; 16])
}

fn admission(n: u8) -> Admission {
    Admission {
        request: id(n),
        tenant: TenantId(u32::from(n)),
        idempotency: None,
        saved: SavedRequest {
            model: "m".to_owned(),
            key: None,
            created_unix: 1_000,
            on_leave: OnLeave::Cancel,
            prompt: vec![7; 8_000],
            sampling: SamplingParams::GREEDY.into(),
            n: 1,
            max_tokens: 10,
            stop_ids: Vec::new(),
            context: Vec::new(),
        },
    }
}

fn admit(n: u8) -> Record {
    Record::Admission(Box::new(admission(n)))
}

fn token(n: u8, token: u32) -> Record {
    Record::Step(Step { entries: vec![(id(n), Entry::Token { choice: 0, token })] })
}

fn end(n: u8) -> Record {
    Record::Step(Step { entries: vec![(id(n), Entry::End { cached_tokens: 0 })] })
}

fn entries(tokens: &[u32]) -> Vec<Entry> {
    tokens.iter().map(|token| Entry::Token { choice: 0, token: *token }).collect()
}

fn snapshot(requests: &[(u8, &[u32])]) -> Snapshot {
    let request = |(n, tokens): &(u8, &[u32])| SnapshotRequest {
        admission: admission(*n),
        entries: entries(tokens),
        finished_unix: None,
    };
    Snapshot { requests: requests.iter().map(request).collect() }
}

#[test]
fn what_a_full_disk_does_not_take_is_counted_until_a_snapshot_is_written() {
    let mut bench = Bench::new(Fsync::Interval(SECOND));
    assert_eq!(bench.append(&[admit(1), token(1, 1)]), Durability::Durable);
    bench.fill_the_disk();
    bench.at(10);
    let lost = |records| Durability::Lost { since_unix: 1_010, records, reason: LossReason::DiskFull };
    assert_eq!(bench.append(&[token(1, 2), admit(2)]), lost(2));
    assert_eq!(bench.log(1).unwrap(), entries(&[1]), "all of a batch or nothing");
    bench.make_room();
    assert_eq!(bench.append(&[token(1, 3)]), lost(3), "only a snapshot makes it whole again");
    assert_eq!(bench.log(1).unwrap(), entries(&[1]));

    let now = bench.now;
    assert!(!bench.writer.needs_snapshot(now), "not so soon");
    assert_eq!(bench.writer.wakes_at(), Some(now.instant + SECOND));
    let now = bench.at(11);
    assert!(bench.writer.needs_snapshot(now));
    assert!(!bench.writer.needs_snapshot(now), "it was asked for");
    let whole = snapshot(&[(1, &[1, 2, 3]), (2, &[])]);
    assert_eq!(bench.writer.restore_snapshot(&whole, now), Durability::Durable);
    assert_eq!(bench.append(&[token(1, 4), token(2, 1)]), Durability::Durable);
    assert_eq!(bench.log(1).unwrap(), entries(&[1, 2, 3, 4]));
    assert_eq!(bench.log(2).unwrap(), entries(&[1]));
}

#[test]
fn a_snapshot_that_does_not_fit_changes_nothing_and_is_asked_for_later_and_later() {
    let mut bench = Bench::new(Fsync::Every);
    bench.append(&[admit(1), token(1, 1)]);
    bench.fill_the_disk();
    assert!(matches!(bench.append(&[admit(2), token(1, 2)]), Durability::Lost { records: 2, .. }));
    let mut asked = Vec::new();
    for second in 1..=60 {
        let now = bench.at(second);
        if bench.writer.needs_snapshot(now) {
            asked.push(second);
            let done = bench.writer.restore_snapshot(&snapshot(&[(1, &[1, 2]), (2, &[]), (3, &[])]), now);
            let Durability::Lost { since_unix: 1_000, records: 2, reason: LossReason::DiskFull } = done
            else {
                panic!("{done:?}");
            };
        }
    }
    assert_eq!(asked, [1, 3, 7, 15, 30, 45, 60]);
    assert_eq!(bench.log(1).unwrap(), entries(&[1]));
    assert_eq!(bench.log(3), None);
}

#[test]
fn a_stranger_that_locks_the_file_is_named_and_waited_out() {
    // Only a journal that lets others in can be locked at all.
    let mut bench = Bench::of(Fsync::Every, Kind { sharing: Sharing::Shared, ..JOURNAL_DB });
    bench.append(&[admit(1), token(1, 1)]);
    bench.db().busy_timeout(Duration::ZERO).unwrap();
    let stranger = Connection::open(bench.dir.path().join("journal.db")).unwrap();
    stranger.execute_batch("BEGIN IMMEDIATE").unwrap();
    let lost = Durability::Lost { since_unix: 1_000, records: 1, reason: LossReason::Locked };
    assert_eq!(bench.append(&[token(1, 2)]), lost);
    let now = bench.at(1);
    assert!(!bench.writer.needs_snapshot(now), "it is locked still");
    stranger.execute_batch("ROLLBACK").unwrap();
    let now = bench.at(9);
    assert!(bench.writer.needs_snapshot(now));
    assert_eq!(bench.writer.restore_snapshot(&snapshot(&[(1, &[1, 2])]), now), Durability::Durable);
    assert_eq!(bench.log(1).unwrap(), entries(&[1, 2]));
}

#[test]
fn commits_are_synced_one_interval_after_the_first_of_them() {
    let mut bench = Bench::new(Fsync::Interval(SECOND * 3));
    bench.append(&[admit(1)]);
    let first = bench.now.instant;
    bench.at(2);
    bench.append(&[token(1, 1)]);
    assert_eq!(bench.writer.wakes_at(), Some(first + SECOND * 3));
    let now = bench.now;
    bench.writer.tick(now);
    assert!(bench.writer.db().unsynced());
    let now = bench.at(3);
    bench.writer.tick(now);
    assert!(!bench.writer.db().unsynced());
    bench.append(&[token(1, 2)]);
    assert!(bench.writer.db().unsynced());
    assert!(bench.writer.wakes_at().is_some_and(|at| at <= now.instant + SECOND * 3));

    let mut every = Bench::new(Fsync::Every);
    every.append(&[admit(1)]);
    assert!(!every.writer.db().unsynced());
}

#[test]
fn records_of_steps_do_not_pile_up_and_deleted_bytes_do_not_stay() {
    let mut bench = Bench::new(Fsync::Never);
    bench.append(&[admit(1), admit(2), end(2)]);
    for i in 0..2_000 {
        let now = bench.now;
        bench.append(&[token(1, i)]);
        assert_eq!(bench.writer.tick(now), Durability::Durable);
        assert!(bench.writer.db().unfolded() <= FOLD_FROM + 1);
    }
    assert_eq!(bench.log(1).unwrap().len(), 2_000);
    let retention = Retention { seconds: 5, per_tenant: BTreeMap::new(), max_bytes: u64::MAX };
    let now = bench.at(4);
    assert!(bench.writer.expire(&retention, now).requests.is_empty());
    let now = bench.at(5);
    assert_eq!(bench.writer.expire(&retention, now).requests, [id(2)]);
    bench.writer.tick(now);
    let now = bench.at(11);
    bench.writer.tick(now);
    assert!(!bench.writer.db().unclean());
    // What goes before its time leaves as little.
    bench.append(&[end(1)]);
    bench.writer.delete_ended(&[id(1)], now);
    assert_eq!(bench.log(1), None);
    assert!(bench.writer.db().unclean() && bench.writer.wakes_at().is_some());
    let now = bench.at(17);
    bench.writer.tick(now);
    assert!(!bench.writer.db().unclean());
}

#[test]
fn a_disk_that_is_too_full_to_tidy_up_loses_nothing() {
    let mut bench = Bench::new(Fsync::Every);
    bench.append(&[admit(1), admit(2), end(2)]);
    for i in 0..FOLD_FROM as u32 {
        bench.append(&[token(1, i)]);
    }
    bench.fill_the_disk();
    for second in 6..30 {
        let now = bench.at(second);
        assert_eq!(bench.writer.tick(now), Durability::Durable);
    }
    assert_eq!(bench.log(1).unwrap().len(), FOLD_FROM as usize);
}
