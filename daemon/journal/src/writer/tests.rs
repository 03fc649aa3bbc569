use super::*;
use crate::schema::{JOURNAL_DB, Kind, Sharing};
use crate::{Admission, Entry, OnLeave, SavedRequest, SnapshotRequest, Step};
use pagedd_core::{RequestId, SamplingParams, TenantId};
use rusqlite::Connection;
use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;
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
        model_digest: Some([5; 16]),
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
    Record::Admission(Arc::new(admission(n)))
}

fn token(n: u8, token: u32) -> Record {
    Record::Step(Step { entries: vec![(id(n), Entry::Token { choice: 0, token })], ..Step::default() })
}

fn end(n: u8) -> Record {
    Record::Step(Step { entries: vec![(id(n), Entry::End { cached_tokens: 0 })], ..Step::default() })
}

fn entries(tokens: &[u32]) -> Vec<Entry> {
    tokens.iter().map(|token| Entry::Token { choice: 0, token: *token }).collect()
}

fn snapshot(requests: &[(u8, &[u32])]) -> Snapshot {
    let request = |(n, tokens): &(u8, &[u32])| SnapshotRequest {
        admission: admission(*n),
        entries: entries(tokens),
        cached_tokens: None,
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
fn bug_41_a_held_read_transaction_holds_up_no_append_and_the_log_is_emptied_once_it_ends() {
    let mut bench = Bench::of(Fsync::Never, Kind { sharing: Sharing::Shared, ..JOURNAL_DB });
    bench.append(&[admit(1), admit(2), end(2)]);
    let reader = Connection::open(bench.dir.path().join("journal.db")).unwrap();
    reader.execute_batch("BEGIN").unwrap();
    let seen = || reader.query_row("SELECT count(*) FROM requests", [], |row| row.get::<_, i64>(0)).unwrap();
    assert_eq!(seen(), 2);
    for i in 0..1_000 {
        assert_eq!(bench.append(&[token(1, i)]), Durability::Durable);
        let now = bench.now;
        assert_eq!(bench.writer.tick(now), Durability::Durable);
    }
    let retention = Retention { seconds: 5, per_tenant: BTreeMap::new(), max_bytes: u64::MAX };
    let now = bench.at(5);
    assert_eq!(bench.writer.expire(&retention, now).requests, [id(2)]);
    let log = bench.dir.path().join("journal.db-wal");
    let length = || fs::metadata(&log).unwrap().len();
    for second in [11, 20, 30] {
        let now = bench.at(second);
        assert_eq!(bench.writer.tick(now), Durability::Durable);
        assert!(bench.writer.db().unclean() && length() > 0, "what the reader sees stays in the log");
    }
    assert_eq!(seen(), 2);
    reader.execute_batch("ROLLBACK").unwrap();
    let now = bench.at(40);
    bench.writer.tick(now);
    assert!(!bench.writer.db().unclean());
    assert_eq!(length(), 0);
    assert_eq!(bench.log(1).unwrap().len(), 1_000);
}

#[test]
fn bug_41_a_daemons_own_journal_lets_no_stranger_read_so_that_its_log_stays_short() {
    let mut bench = Bench::new(Fsync::Never);
    bench.append(&[admit(1)]);
    let path = bench.dir.path().join("journal.db");
    let stranger = Connection::open(&path).unwrap();
    stranger.busy_timeout(Duration::ZERO).unwrap();
    assert!(stranger.query_row("SELECT count(*) FROM requests", [], |row| row.get::<_, i64>(0)).is_err());
    let log = bench.dir.path().join("journal.db-wal");
    let mut longest = 0;
    for i in 0..4_000 {
        bench.append(&[token(1, i)]);
        let now = bench.now;
        bench.writer.tick(now);
        longest = longest.max(fs::metadata(&log).unwrap().len());
    }
    println!("the write-ahead log has at most {longest} bytes");
    // 4 MiB at which a commit moves it to the file, and what one transaction adds.
    assert!(longest < 6 << 20, "{longest} bytes");
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

#[test]
fn a_file_that_cannot_be_opened_is_taken_up_once_it_can_and_what_is_live_in_it_stays() {
    for existing in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let (path, away) = (dir.path().join("journal.db"), dir.path().join("away"));
        if existing {
            let mut db = JournalDb::open(dir.path(), Fsync::Every).unwrap();
            db.append(&[admit(1), token(1, 10)], 1).unwrap();
            drop(db);
            fs::rename(&path, &away).unwrap();
        }
        // Even root cannot open a directory as a database.
        fs::create_dir(&path).unwrap();
        let start = Instant::now();
        let at = |seconds| Now { instant: start + Duration::from_secs(seconds), unix: seconds };
        let mut writer = JournalWriter::open(dir.path(), Fsync::Every, at(0)).unwrap();
        let lost = |records| matches!(records, Durability::Lost { records: 2, .. });
        assert!(matches!(writer.durability(), Durability::Lost { records: 0, .. }));
        assert!(lost(writer.append(&[admit(2), token(2, 20)], at(1))));
        assert!(!writer.needs_snapshot(at(2)), "it cannot be opened yet");
        fs::remove_dir(&path).unwrap();
        if existing {
            fs::rename(&away, &path).unwrap();
        }
        assert!(writer.needs_snapshot(at(60)));
        assert_eq!(writer.restore_snapshot(&snapshot(&[(2, &[20])]), at(60)), Durability::Durable);
        assert_eq!(writer.append(&[token(2, 21)], at(61)), Durability::Durable);
        drop(writer);
        let db = JournalDb::open(dir.path(), Fsync::Every).unwrap();
        assert_eq!(db.log(id(2), 0).unwrap().unwrap(), entries(&[20, 21]));
        let earlier = db.log(id(1), 0).unwrap();
        assert_eq!(earlier, existing.then(|| entries(&[10])), "an earlier daemon's");
        assert_eq!(db.live(), 1 + usize::from(existing));
    }
}

#[test]
fn a_file_that_is_damaged_or_of_something_else_is_never_gone_on_without() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(
        dir.path().join("journal.db"),
        b"no database, but a text of some length that stands in its place",
    )
    .unwrap();
    let now = Now { instant: Instant::now(), unix: 0 };
    let error = JournalWriter::open(dir.path(), Fsync::Every, now).unwrap_err();
    assert!(
        matches!(error, DbError::Corrupt { .. }) && error.to_string().contains("move it away"),
        "{error}"
    );
}

#[test]
fn a_snapshot_is_written_to_the_file_and_not_to_what_stands_in_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let now = Now { instant: Instant::now(), unix: 1_000 };
    let mut writer = JournalWriter::new(JournalDb::stand_in(dir.path(), Fsync::Every).unwrap());
    writer.absent = Some(dir.path().to_owned());
    writer.lose(&DbError::DiskFull { path: dir.path().to_owned() }, 1, now);
    assert_eq!(writer.restore_snapshot(&snapshot(&[(1, &[1, 2])]), now), Durability::Durable);
    drop(writer);
    let db = JournalDb::open(dir.path(), Fsync::Every).unwrap();
    assert_eq!(db.log(id(1), 0).unwrap().unwrap(), entries(&[1, 2]));
}
