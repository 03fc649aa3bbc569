//! What the journal keeps, and what it does not.

#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use common::{END, Model, NOW, admission, admit, finish, id, replay, start, step, token};
use pagedd_core::{RequestId, TenantId};
use pagedd_journal::{
    DbError, Entry, Finish, Fsync, JournalDb, Record, Retention, SavedError, Snapshot, SnapshotRequest,
};
use proptest::prelude::*;
use rusqlite::Connection;
use tempfile::TempDir;

const FSYNC: Fsync = Fsync::Interval(Duration::from_secs(1));

fn dir() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn open(dir: &Path) -> JournalDb {
    JournalDb::open(dir, FSYNC).unwrap()
}

fn raw(dir: &Path) -> Connection {
    Connection::open(dir.join("journal.db")).unwrap()
}

const fn keep(seconds: u64) -> Retention {
    Retention { seconds, per_tenant: BTreeMap::new(), max_bytes: u64::MAX }
}

/// One request that has ended and one that is live.
fn two() -> (TempDir, JournalDb) {
    let dir = dir();
    let mut db = open(dir.path());
    db.append(&[admit(1, 1), admit(2, 2), step([(1, token(0, 10)), (2, token(0, 20))])], NOW).unwrap();
    db.append(&[step([(1, token(1, 11)), (1, finish(0)), (1, finish(1)), (1, END)])], NOW + 1).unwrap();
    db.append(&[step([(2, token(1, 21)), (2, finish(1))])], NOW + 2).unwrap();
    (dir, db)
}

#[test]
fn what_was_appended_is_there_after_a_start() {
    let (dir, db) = two();
    let before = replay(&db);
    drop(db);
    let db = open(dir.path());
    assert_eq!(replay(&db), before);
    assert_eq!(before.len(), 2);
    assert_eq!(before[0].admission, admission(1, 1), "the whole request is kept");
    assert_eq!(before[0].entries, [token(0, 10), token(1, 11), finish(0), finish(1), END]);
    assert_eq!((before[0].finished_unix, before[1].finished_unix), (Some(NOW + 1), None));
    assert_eq!(before[1].entries, [token(0, 20), token(1, 21), finish(1)]);
    assert_eq!(db.live(), 1);
    let mut live = Vec::new();
    db.replay_live(|kept| live.push(kept.unwrap())).unwrap();
    assert_eq!(live, before[1..]);
}

#[test]
fn a_new_journal_is_private_and_no_other_connection_comes_between() {
    let (dir, db) = two();
    for file in fs::read_dir(dir.path()).unwrap().map(Result::unwrap) {
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{:?}", file.path());
    }
    assert!(!dir.path().join("journal.db-shm").exists());
    let other = raw(dir.path());
    other.busy_timeout(Duration::ZERO).unwrap();
    other.execute("DELETE FROM requests", []).unwrap_err();
    let error = JournalDb::open(dir.path(), FSYNC).unwrap_err();
    assert!(matches!(error, DbError::Locked { .. }), "{error}");
    drop(db);
}

#[test]
fn entries_of_what_is_not_kept_or_has_ended_are_left_out() {
    let (_dir, mut db) = two();
    let before = replay(&db);
    db.append(&[step([(1, token(0, 99)), (9, token(0, 99))])], NOW + 3).unwrap();
    db.append(&[step([(2, finish(0)), (2, END), (2, token(0, 99))])], NOW + 4).unwrap();
    let after = replay(&db);
    assert_eq!(after[0], before[0]);
    assert_eq!(after[1].entries, [token(0, 20), token(1, 21), finish(1), finish(0), END]);
}

#[test]
fn one_request_is_found_by_its_id_and_its_log_from_a_cursor() {
    let (_dir, mut db) = two();
    for _ in 0..2 {
        assert_eq!(db.request(id(2)).unwrap().unwrap().admission, admission(2, 2));
        assert_eq!(db.log(id(2), 1).unwrap().unwrap(), [token(1, 21), finish(1)]);
        assert_eq!(db.log(id(2), 3).unwrap().unwrap(), []);
        assert_eq!(db.log(id(2), u64::MAX).unwrap().unwrap(), []);
        assert_eq!(db.log(id(9), 0).unwrap(), None);
        assert_eq!(db.request(id(9)).unwrap(), None);
        db.fold(2).unwrap();
    }
}

#[test]
fn an_idempotency_key_finds_its_tenants_request_as_long_as_that_is_kept() {
    let dir = dir();
    let mut db = open(dir.path());
    db.append(&[admit(3, 1)], NOW).unwrap();
    let find = |db: &JournalDb, tenant| db.by_idempotency_key(TenantId(tenant), &[3; 32]).unwrap();
    assert_eq!(find(&db, 1), Some((id(3), [7; 32])));
    assert_eq!(find(&db, 2), None);
    assert_eq!(db.by_idempotency_key(TenantId(1), &[4; 32]).unwrap(), None);
    drop(db);
    let mut db = open(dir.path());
    assert_eq!(find(&db, 1), Some((id(3), [7; 32])));
    db.append(&[step([(3, END)])], NOW).unwrap();
    assert_eq!(find(&db, 1), Some((id(3), [7; 32])));
    assert_eq!(db.expire(NOW + 60, &keep(60)).unwrap().requests, [id(3)]);
    assert_eq!(find(&db, 1), None);
}

#[test]
fn a_replay_is_counted_and_a_request_that_is_set_aside_fails() {
    let (dir, mut db) = two();
    assert_eq!(db.count_replay(&[id(1), id(2), id(9)]).unwrap(), [id(2)], "what is live");
    db.count_replay(&[id(2)]).unwrap();
    assert!(!db.unsynced());
    drop(db);
    let mut db = open(dir.path());
    assert_eq!(db.request(id(2)).unwrap().unwrap().replays, 2);
    let failed = [Entry::Finish { choice: 0, reason: Finish::Failed }, Entry::End { cached_tokens: 0 }];
    assert_eq!(db.set_aside(id(2), NOW + 9).unwrap(), failed);
    assert_eq!(db.set_aside(id(2), NOW + 9).unwrap(), [], "once");
    assert_eq!(db.set_aside(id(9), NOW + 9).unwrap(), []);
    drop(db);
    let kept = open(dir.path()).request(id(2)).unwrap().unwrap();
    assert_eq!(kept.entries[3..], failed);
    assert_eq!(kept.finished_unix, Some(NOW + 9));
}

#[test]
fn retention_of_nothing_deletes_at_the_end_and_only_for_whom_it_is_meant() {
    let (_dir, mut db) = two();
    db.append(&[step([(2, END)])], NOW + 1).unwrap();
    let mut retention = keep(600);
    retention.per_tenant.insert(TenantId(2), 0);
    assert_eq!(db.expire(NOW + 1, &retention).unwrap().requests, [id(2)]);
    assert_eq!(replay(&db).len(), 1);
    assert_eq!(db.expire(NOW + 600, &retention).unwrap().requests, []);
    assert_eq!(db.expire(NOW + 601, &retention).unwrap().requests, [id(1)]);
    assert_eq!(replay(&db), []);
}

#[test]
fn what_is_named_goes_before_its_time_unless_it_is_live() {
    let (dir, mut db) = two();
    db.delete_ended(&[id(1), id(2), id(9)]).unwrap();
    assert!(db.unclean());
    db.purge().unwrap();
    let left = replay(&db);
    assert_eq!(left.iter().map(|kept| kept.admission.request).collect::<Vec<_>>(), [id(2)]);
    assert_eq!(left[0].entries, [token(0, 20), token(1, 21), finish(1)]);
    db.delete_ended(&[id(1)]).unwrap();
    assert!(!db.unclean(), "there was nothing to delete");
    drop(db);
    assert_eq!(replay(&open(dir.path())), left);
}

#[test]
fn what_is_too_much_goes_oldest_first_from_the_tenant_that_has_most() {
    let dir = dir();
    let mut db = open(dir.path());
    for n in 0..40 {
        let tenant = if n < 35 { 1 } else { 2 };
        db.append(&[admit(300 * n, tenant), step([(300 * n, END)])], NOW + n).unwrap();
    }
    db.fold(u64::MAX).unwrap();
    let size = |dir: &Path| -> i64 {
        raw(dir).query_row("SELECT sum(bytes) FROM requests", [], |r| r.get(0)).unwrap()
    };
    drop(db);
    let all = size(dir.path());
    let mut db = open(dir.path());
    let retention = Retention { max_bytes: all as u64 / 2, ..keep(u64::MAX >> 1) };
    let gone = db.expire(NOW + 100, &retention).unwrap();
    assert_eq!(gone.requests, (0..gone.requests.len() as u64).map(|n| id(300 * n)).collect::<Vec<_>>());
    assert!((18..=22).contains(&gone.requests.len()), "{}", gone.requests.len());
    assert!(!gone.more);
    drop(db);
    assert!(size(dir.path()) <= all / 2);
}

#[test]
fn many_that_are_past_their_time_go_a_bounded_number_at_once() {
    let dir = dir();
    let mut db = open(dir.path());
    for n in 0..300 {
        db.append(&[admit(n, 1), step([(n, END)])], NOW).unwrap();
    }
    let first = db.expire(NOW, &keep(0)).unwrap();
    assert!(first.more && first.requests.len() < 300);
    let second = db.expire(NOW, &keep(0)).unwrap();
    assert!(!second.more);
    assert_eq!(first.requests.len() + second.requests.len(), 300);
}

/// Bytes of a request that stand in a file as they are: its context, its prompt, and tokens of its log.
fn canaries(n: u32) -> [Vec<u8>; 2] {
    let context = format!("canary-{n}-").repeat(3).into_bytes();
    // A run of tokens as it is stored: tag, choice, three bytes of token; in a record of steps a distance stands before each.
    let mut tokens = Vec::new();
    for i in 0..4_u32 {
        let token = 0x1_0000 + n * 64 + i;
        tokens.extend([0, 1, token as u8 | 0x80, (token >> 7) as u8 | 0x80, (token >> 14) as u8]);
    }
    [context, tokens]
}

fn canary(n: u32, tenant: u32) -> Vec<Record> {
    let mut admission = admission(u64::from(n), tenant);
    admission.saved.context = canaries(n)[0].repeat(1 + n as usize % 90);
    vec![Record::Admission(Arc::new(admission))]
}

fn canary_tokens(n: u32) -> impl Iterator<Item = (u64, Entry)> {
    (0..4).map(move |i| (u64::from(n), token(1, 0x1_0000 + n * 64 + i)))
}

/// How often any of the tenants' canaries stands in any file of the journal.
fn seen(dir: &Path, of: impl Fn(u32) -> bool + Copy, all: u32) -> usize {
    let files = fs::read_dir(dir).unwrap().map(|f| fs::read(f.unwrap().path()).unwrap());
    let files: Vec<Vec<u8>> = files.collect();
    let context = |n: u32| canaries(n)[0].clone();
    let token = |n: u32| {
        let token = 0x1_0000 + n * 64;
        vec![0, 1, token as u8 | 0x80, (token >> 7) as u8 | 0x80, (token >> 14) as u8]
    };
    let mut found = 0;
    for n in (0..all).filter(|n| of(*n)) {
        for what in [context(n), token(n)] {
            found += files.iter().filter(|file| file.windows(what.len()).any(|w| w == what)).count();
        }
    }
    found
}

#[test]
fn of_a_deleted_tenant_no_byte_stays_in_any_file() {
    let dir = dir();
    let mut db = open(dir.path());
    let is_second = |n: u32| n % 2 == 1;
    let all = 60;
    for n in 0..all {
        let mut batch = canary(n, 1 + n % 2);
        batch.push(step(canary_tokens(n)));
        db.append(&batch, NOW).unwrap();
        // Part is in logs, part is not, and pages were split and merged.
        if n % 7 == 0 {
            db.fold(3).unwrap();
        }
        if n % 10 == 9 {
            db.delete_request(id(u64::from(n) - 9), NOW).unwrap();
        }
    }
    assert!(seen(dir.path(), is_second, all) > 0, "the canaries can be found");
    let gone = db.delete_tenant(TenantId(2), NOW).unwrap();
    assert_eq!(gone.len(), 30);
    assert_eq!(seen(dir.path(), is_second, all), 0);
    assert!(seen(dir.path(), |n| !is_second(n), all) > 0, "the other tenant's are there");
    assert_eq!(replay(&db).len(), 24);
    assert!(replay(&db).iter().all(|kept| kept.entries.len() == 4));
}

#[test]
fn of_expired_requests_no_byte_stays_after_a_purge() {
    let dir = dir();
    let mut db = open(dir.path());
    for n in 0..60 {
        let mut batch = canary(n, 1);
        batch.push(step(canary_tokens(n).chain([(u64::from(n), END)])));
        db.append(&batch, NOW + u64::from(n)).unwrap();
        if n % 9 == 0 {
            db.fold(5).unwrap();
        }
    }
    for n in 0..60 {
        assert_eq!(db.expire(NOW + n, &keep(0)).unwrap().requests, [id(n)]);
        db.purge().unwrap();
        assert_eq!(seen(dir.path(), |i| u64::from(i) <= n, 60), 0, "after {n}");
    }
}

#[test]
fn a_journal_of_another_kind_or_time_is_refused_and_left_alone() {
    let dir = dir();
    let path = dir.path().join("journal.db");
    Connection::open(&path).unwrap().execute_batch("CREATE TABLE foreign_rows (x INTEGER)").unwrap();
    let before = fs::read(&path).unwrap();
    assert!(matches!(JournalDb::open(dir.path(), FSYNC).unwrap_err(), DbError::Foreign { .. }));
    assert_eq!(fs::read(&path).unwrap(), before);

    fs::remove_file(&path).unwrap();
    drop(pagedd_journal::ControlDb::open(dir.path()).unwrap());
    fs::rename(dir.path().join("control.db"), &path).unwrap();
    assert!(matches!(JournalDb::open(dir.path(), FSYNC).unwrap_err(), DbError::Foreign { .. }));

    fs::remove_file(&path).unwrap();
    drop(open(dir.path()));
    raw(dir.path()).pragma_update(None, "user_version", 9).unwrap();
    let error = JournalDb::open(dir.path(), FSYNC).unwrap_err();
    assert!(matches!(error, DbError::NewerSchema { found: 9, .. }), "{error}");

    fs::write(&path, b"no database, but a text of some length that stands where one should be").unwrap();
    let error = JournalDb::open(dir.path(), FSYNC).unwrap_err();
    assert!(matches!(error, DbError::Corrupt { .. }), "{error}");
    assert!(error.to_string().contains("move it away"), "{error}");
}

#[test]
fn a_damaged_page_is_found_at_the_start() {
    let (dir, mut db) = two();
    db.purge().unwrap();
    drop(db);
    let path = dir.path().join("journal.db");
    let mut bytes = fs::read(&path).unwrap();
    for page in bytes.chunks_mut(4096).skip(1) {
        page[..8].fill(0xFF);
    }
    fs::write(&path, bytes).unwrap();
    let error = JournalDb::open(dir.path(), FSYNC).unwrap_err();
    assert!(matches!(error, DbError::Corrupt { .. }), "{error}");
}

/// What a replay finds damaged.
fn damage(db: &JournalDb) -> Vec<(RequestId, SavedError)> {
    let mut found = Vec::new();
    db.replay(|kept| {
        if let Err(damage) = kept {
            found.push((damage.request, damage.error));
        }
    })
    .unwrap();
    found
}

#[test]
fn one_damaged_request_is_named_and_the_others_are_there() {
    for folded in [false, true] {
        for (statement, hurt, error) in [
            ("UPDATE bodies SET body = zeroblob(40) WHERE request = 2", vec![2], SavedError::Checksum),
            ("DELETE FROM bodies WHERE request = 3", vec![3], SavedError::Checksum),
            ("UPDATE steps SET entries = zeroblob(30) WHERE tenant = 1", vec![1, 3], SavedError::Step),
            ("UPDATE logs SET entries = x'00' WHERE request = 2", vec![2], SavedError::Checksum),
            (
                "UPDATE logs SET first = 7 WHERE request = 3",
                vec![3],
                SavedError::Hole { expected: 0, found: 7 },
            ),
        ] {
            let dir = dir();
            let mut db = open(dir.path());
            db.append(&[admit(1, 1), admit(2, 2), admit(3, 1)], NOW).unwrap();
            db.append(&[step([(1, token(0, 1)), (2, token(0, 2)), (3, token(0, 3))])], NOW).unwrap();
            if statement.contains("logs") {
                db.fold(u64::MAX).unwrap();
            }
            drop(db);
            raw(dir.path()).execute_batch(statement).unwrap();
            let mut db = open(dir.path());
            db.append(&[admit(4, 1), step([(4, token(0, 4))])], NOW).unwrap();
            if folded {
                db.fold(u64::MAX).unwrap();
            }
            let expected: Vec<_> = hurt.iter().map(|n| (id(*n), error.clone())).collect();
            assert_eq!(damage(&db), expected, "{statement}, folded: {folded}");
            let said = db.request(id(hurt[0])).unwrap_err();
            assert!(matches!(said, DbError::Damaged { .. }), "{said}");
            for (request, _) in expected {
                assert!(db.delete_request(request, NOW).unwrap());
            }
            assert_eq!(replay(&db).len(), 4 - hurt.len());
        }
    }
}

#[test]
fn a_damaged_live_request_that_is_given_up_is_not_live_any_more_and_goes_when_its_time_is_over() {
    let dir = dir();
    let mut db = open(dir.path());
    db.append(&[admit(3, 1), admit(4, 1), step([(3, token(0, 1)), (4, token(0, 2))])], NOW).unwrap();
    drop(db);
    raw(dir.path()).execute_batch("UPDATE bodies SET body = zeroblob(40) WHERE request = 1").unwrap();
    let mut db = open(dir.path());
    assert_eq!(damage(&db), [(id(3), SavedError::Checksum)]);
    db.give_up(id(3), NOW + 1).unwrap();
    db.give_up(id(3), NOW + 50).unwrap();
    db.give_up(id(9), NOW + 1).unwrap();
    assert_eq!(db.live(), 1);
    assert_eq!(db.by_idempotency_key(TenantId(1), &[3; 32]).unwrap(), None, "its key makes a new one");
    db.append(&[step([(3, token(0, 9)), (4, token(0, 3))])], NOW + 2).unwrap();
    drop(db);
    let mut db = open(dir.path());
    let mut live = Vec::new();
    db.replay_live(|kept| live.push(kept.unwrap())).unwrap();
    assert_eq!(live.len(), 1);
    assert_eq!(live[0].entries, [token(0, 2), token(0, 3)]);
    assert_eq!(db.expire(NOW + 60, &keep(60)).unwrap().requests, []);
    assert_eq!(db.expire(NOW + 61, &keep(60)).unwrap().requests, [id(3)]);
}

#[test]
fn what_a_request_found_in_the_cache_is_kept_from_its_first_step_on() {
    let dir = dir();
    let mut db = open(dir.path());
    db.append(&[admit(1, 1), admit(2, 1), start(1, 48), start(9, 7)], NOW).unwrap();
    db.append(&[start(2, 0), step([(1, token(0, 1))])], NOW).unwrap();
    drop(db);
    let kept = replay(&open(dir.path()));
    assert_eq!([&kept[0], &kept[1]].map(|kept| kept.cached_tokens), [Some(48), Some(0)]);
}

#[test]
fn a_copy_of_the_files_at_any_moment_is_a_journal_of_that_moment() {
    let (dir, copy) = (dir(), dir());
    let mut db = open(dir.path());
    let mut model = Model::default();
    for n in 0..60_u64 {
        let mut batch = vec![admit(n, n as u32 % 3)];
        batch.push(step((0..=n).map(|i| (i, if i + 20 == n { END } else { token(0, n as u32) }))));
        db.append(&batch, NOW + n).unwrap();
        model.append(&batch, NOW + n);
        match n % 5 {
            0 => drop(db.fold(4).unwrap()),
            1 => db.sync().unwrap(),
            2 if n > 30 => {
                db.expire(NOW + n, &keep(10)).unwrap();
                model.expire(NOW + n, 10, &BTreeMap::new());
            }
            3 => db.purge().unwrap(),
            _ => {}
        }
        for file in ["journal.db", "journal.db-wal"] {
            fs::copy(dir.path().join(file), copy.path().join(file)).unwrap();
        }
        let copied = open(copy.path());
        assert_eq!(replay(&copied), model.requests, "after batch {n}");
    }
}

#[test]
fn a_snapshot_takes_the_place_of_what_was_live_and_leaves_what_had_ended() {
    let (dir, mut db) = two();
    db.append(&[admit(3, 1), step([(3, token(0, 30))])], NOW).unwrap();
    db.count_replay(&[id(2)]).unwrap();
    let ended = db.request(id(1)).unwrap().unwrap();
    let request = |n, tenant, entries: &[Entry], finished_unix| SnapshotRequest {
        admission: admission(n, tenant),
        entries: entries.to_vec(),
        cached_tokens: Some(n as u32),
        finished_unix,
    };
    let whole = [token(0, 20), token(1, 21), finish(1), token(0, 22)];
    let snapshot = Snapshot {
        requests: vec![
            request(4, 1, &[token(0, 40), END], Some(NOW + 5)),
            request(2, 2, &whole, None),
            request(5, 2, &[], None),
        ],
    };
    db.restore(&snapshot).unwrap();
    assert!(!db.unsynced());
    for again in [false, true] {
        if again {
            drop(db);
            db = open(dir.path());
        }
        let kept = replay(&db);
        assert_eq!(kept[0], ended);
        let rest: Vec<_> =
            kept[1..].iter().map(|k| (k.admission.request, k.finished_unix, k.replays)).collect();
        assert_eq!(rest, [(id(4), Some(NOW + 5), 0), (id(2), None, 1), (id(5), None, 0)]);
        assert_eq!(kept[2].entries, whole);
        assert_eq!(kept[2].cached_tokens, Some(2));
        assert_eq!(db.live(), 2);
    }
    db.append(&[step([(2, token(0, 23)), (3, token(0, 31)), (5, token(0, 50))])], NOW).unwrap();
    assert_eq!(db.log(id(2), 3).unwrap().unwrap(), [token(0, 22), token(0, 23)]);
    assert_eq!(db.log(id(5), 0).unwrap().unwrap(), [token(0, 50)]);
    assert_eq!(db.request(id(3)).unwrap(), None, "it ended meanwhile");
}

#[derive(Clone, Debug)]
enum Act {
    Append(Vec<Piece>),
    Fold(u64),
    Sync,
    Expire(u64),
    Purge,
    DeleteTenant(u32),
    Delete(u64),
    SetAside(u64),
    Count(u64),
    Restore,
    Reopen,
}

#[derive(Clone, Debug)]
enum Piece {
    Admit(u32),
    Start(u64, u32),
    Tokens(Vec<(u64, u32)>),
    End(u64),
}

fn piece() -> impl Strategy<Value = Piece> {
    prop_oneof![
        2 => (1..4_u32).prop_map(Piece::Admit),
        4 => prop::collection::vec((0..24_u64, any::<u32>()), 0..12).prop_map(Piece::Tokens),
        1 => (0..24_u64, any::<u32>()).prop_map(|(n, cached)| Piece::Start(n, cached)),
        1 => (0..24_u64).prop_map(Piece::End),
    ]
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        8 => prop::collection::vec(piece(), 0..5).prop_map(Act::Append),
        3 => (1..4_u64).prop_map(Act::Fold),
        1 => Just(Act::Sync),
        2 => (0..30_u64).prop_map(Act::Expire),
        1 => Just(Act::Purge),
        1 => (1..4_u32).prop_map(Act::DeleteTenant),
        1 => (0..24_u64).prop_map(Act::Delete),
        1 => (0..24_u64).prop_map(Act::SetAside),
        1 => (0..24_u64).prop_map(Act::Count),
        1 => Just(Act::Restore),
        1 => Just(Act::Reopen),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn replay_is_what_was_done_whatever_is_done(acts in prop::collection::vec(act(), 1..40)) {
        let dir = dir();
        let mut db = open(dir.path());
        let mut model = Model::default();
        let mut admitted = 0;
        for (now, act) in (NOW..).zip(acts) {
            match act {
                Act::Append(pieces) => {
                    let batch: Vec<Record> = pieces.into_iter().map(|piece| match piece {
                        Piece::Admit(tenant) => {
                            admitted += 1;
                            admit(admitted - 1, tenant)
                        }
                        Piece::Start(n, cached_tokens) => start(n, cached_tokens),
                        Piece::Tokens(tokens) => step(tokens.into_iter().map(|(n, t)| (n, token(t % 2, t)))),
                        Piece::End(n) => step([(n, finish(0)), (n, END)]),
                    }).collect();
                    db.append(&batch, now).unwrap();
                    model.append(&batch, now);
                }
                Act::Fold(most) => {
                    let left = db.unfolded();
                    let folded = db.fold(most).unwrap();
                    prop_assert_eq!((folded.moved, folded.left), (left.min(most), left - left.min(most)));
                }
                Act::Sync => {
                    db.sync().unwrap();
                    prop_assert!(!db.unsynced());
                }
                Act::Expire(seconds) => {
                    let mut retention = keep(seconds);
                    retention.per_tenant.insert(TenantId(2), 0);
                    db.expire(now, &retention).unwrap();
                    model.expire(now, seconds, &retention.per_tenant);
                }
                Act::Purge => db.purge().unwrap(),
                Act::DeleteTenant(tenant) => {
                    db.delete_tenant(TenantId(tenant), now).unwrap();
                    model.requests.retain(|kept| kept.admission.tenant != TenantId(tenant));
                }
                Act::Delete(n) => {
                    let there = model.requests.iter().any(|kept| kept.admission.request == id(n));
                    prop_assert_eq!(db.delete_request(id(n), now).unwrap(), there);
                    model.requests.retain(|kept| kept.admission.request != id(n));
                }
                Act::SetAside(n) => {
                    let entries = db.set_aside(id(n), now).unwrap();
                    model.append(&[step(entries.into_iter().map(|entry| (n, entry)))], now);
                }
                Act::Count(n) => {
                    db.count_replay(&[id(n)]).unwrap();
                    let kept = model.requests.iter_mut().find(|kept| kept.admission.request == id(n));
                    if let Some(kept) = kept.filter(|kept| kept.finished_unix.is_none()) {
                        kept.replays += 1;
                    }
                }
                Act::Restore => {
                    let (live, ended): (Vec<_>, Vec<_>) =
                        model.requests.into_iter().partition(|kept| kept.finished_unix.is_none());
                    let requests = live.iter().map(|kept| SnapshotRequest {
                        admission: kept.admission.clone(),
                        entries: kept.entries.clone(),
                        cached_tokens: kept.cached_tokens,
                        finished_unix: None,
                    });
                    db.restore(&Snapshot { requests: requests.collect() }).unwrap();
                    model.requests = ended.into_iter().chain(live).collect();
                }
                Act::Reopen => {
                    drop(db);
                    db = open(dir.path());
                }
            }
            prop_assert_eq!(replay(&db), model.requests.clone());
        }
        let live = model.requests.iter().filter(|kept| kept.finished_unix.is_none()).count();
        prop_assert_eq!(db.live(), live);
    }
}
