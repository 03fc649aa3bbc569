//! The power goes at any moment, the disk is full or broken at any write, and the journal is whole.
//!
//! Everything that SQLite writes and syncs is recorded; then the disk is made what a cut could leave at each moment: what was
//! synced, and of the rest any sectors. The same number of chance gives the same cuts.

#![allow(clippy::unwrap_used)]
// One call registers the recording VFS with SQLite.
#![allow(unsafe_code)]

#[path = "../common/mod.rs"]
mod common;
mod disk;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use common::{END, Model, NOW, admission, admit, finish, id, replay, step, token};
use disk::{Chance, Cut, Disk, Op, What, after_cut};
use pagedd_journal::{
    Durability, Fsync, JournalDb, JournalWriter, Kept, LossReason, Now, Record, Retention, Snapshot,
    SnapshotRequest,
};

const INTERVAL: Fsync = Fsync::Interval(Duration::from_secs(1));
/// What is done before the power goes.
const ACTS: u64 = 60;

/// What should be there after an act.
struct After {
    /// Operations on the disk until then.
    operations: usize,
    requests: Vec<Kept>,
    /// All of it was synced.
    synced: bool,
}

struct History {
    ops: Vec<Op>,
    afters: Vec<After>,
}

/// Does all kinds of things to a journal, and remembers how each should leave it.
fn history(fsync: Fsync) -> History {
    let disk = Disk::get();
    let dir = tempfile::tempdir().unwrap();
    let name = dir.path().to_str().unwrap();
    disk.record(name);
    let mut db = JournalDb::open(dir.path(), fsync).unwrap();
    let mut model = Model::default();
    let mut chance = Chance(1);
    let mut afters = Vec::new();
    let mut after = |model: &Model, synced: bool| {
        let operations = disk.operations(name);
        afters.push(After { operations, requests: model.requests.clone(), synced });
    };
    after(&model, false);
    for n in 0..ACTS {
        let now = NOW + n;
        match n % 15 {
            3 | 11 => {
                db.fold(1 + chance.below(4)).unwrap();
            }
            6 => db.sync().unwrap(),
            8 => {
                let retention = Retention { seconds: 9, per_tenant: BTreeMap::new(), max_bytes: u64::MAX };
                db.expire(now, &retention).unwrap();
                model.expire(now, 9, &retention.per_tenant);
            }
            9 => db.purge().unwrap(),
            12 => {
                let entries = db.set_aside(id(n - 4), now).unwrap();
                model.append(&[step(entries.into_iter().map(|entry| (n - 4, entry)))], now);
            }
            13 if n > 30 => restore(&mut db, &mut model),
            _ => {
                let entry = |i: u64| {
                    if i + 25 == n { [finish(0), END] } else { [token(0, n as u32), token(1, i as u32)] }
                };
                let batch: Vec<Record> = vec![
                    admit(n, n as u32 % 3),
                    step((0..=n).flat_map(|i| entry(i).map(|entry| (i, entry)))),
                ];
                db.append(&batch, now).unwrap();
                model.append(&batch, now);
            }
        }
        after(&model, !db.unsynced());
    }
    drop(db);
    after(&model, true);
    History { ops: disk.recorded(name), afters }
}

fn restore(db: &mut JournalDb, model: &mut Model) {
    let (live, ended): (Vec<_>, Vec<_>) =
        model.requests.drain(..).partition(|kept| kept.finished_unix.is_none());
    let requests = live.iter().map(|kept| SnapshotRequest {
        admission: kept.admission.clone(),
        entries: kept.entries.clone(),
        cached_tokens: kept.cached_tokens,
        finished_unix: None,
    });
    db.restore(&Snapshot { requests: requests.collect() }).unwrap();
    model.requests = ended.into_iter().chain(live).collect();
}

/// Starts after a cut when so many operations were done. Says what is wrong then.
fn start_after(
    history: &History,
    fsync: Fsync,
    done: usize,
    cut: Cut,
    chance: &mut Chance,
) -> Result<(), String> {
    let dir = tempfile::tempdir().unwrap();
    let name = dir.path().to_str().unwrap();
    Disk::get().set(name, after_cut(&history.ops[..done], cut, chance));
    let mut db = JournalDb::open(dir.path(), fsync).map_err(|error| format!("start: {error}"))?;
    let mut found = Vec::new();
    let mut damaged = Vec::new();
    db.replay(|kept| kept.map_or_else(|damage| damaged.push(damage), |kept| found.push(kept)))
        .map_err(|error| format!("replay: {error}"))?;
    if !damaged.is_empty() {
        return Err(format!("damaged: {damaged:?}"));
    }
    // Acts [0, complete) had returned, and one more may have been under way.
    let complete = history.afters.iter().take_while(|after| after.operations <= done).count();
    let synced = history.afters[..complete].iter().rposition(|after| after.synced).unwrap_or(0);
    let may = &history.afters[synced..history.afters.len().min(complete + 1)];
    if !may.iter().any(|after| after.requests == found) {
        let any = history.afters.iter().position(|after| after.requests == found);
        return Err(format!("what is there is {any:?}, between {synced} and {complete} was to be"));
    }
    db.append(&[admit(1_000, 1)], NOW).map_err(|error| format!("append: {error}"))?;
    let last = db.request(id(1_000)).map_err(|error| format!("request: {error}"))?;
    if last.is_none_or(|kept| kept.admission != admission(1_000, 1)) {
        return Err("what is appended then is not there".to_owned());
    }
    drop(db);
    Disk::get().set(name, disk::Files::new());
    Ok(())
}

/// Cuts the power at each operation, or at every `every`th, in each way. Says what went wrong, and how many cuts there were.
fn cut_everywhere(fsync: Fsync, every: usize) -> (Vec<String>, usize) {
    let history = history(fsync);
    let mut chance = Chance(7);
    let mut wrong = Vec::new();
    let mut cuts = 0;
    for done in (0..=history.ops.len()).step_by(every) {
        for cut in [Cut::TornLast, Cut::Scrambled] {
            cuts += 1;
            if let Err(what) = start_after(&history, fsync, done, cut, &mut chance) {
                wrong.push(format!("{cut:?} after {done}: {what}"));
            }
        }
    }
    let count = |of: fn(&What) -> bool| history.ops.iter().filter(|op| of(&op.what)).count();
    println!(
        "{fsync:?}: {} operations, {} of them syncs; {cuts} cuts, {} wrong",
        history.ops.len(),
        count(|what| matches!(what, What::Sync)),
        wrong.len(),
    );
    (wrong, cuts)
}

#[test]
fn after_a_power_cut_the_journal_starts_with_all_that_was_synced() {
    let (wrong, cuts) = cut_everywhere(INTERVAL, 1);
    assert!(cuts > 500, "{cuts}");
    assert!(wrong.is_empty(), "{} of {cuts}: {:#?}", wrong.len(), &wrong[..wrong.len().min(5)]);
}

#[test]
fn with_fsync_every_a_power_cut_loses_nothing_that_was_appended() {
    let (wrong, cuts) = cut_everywhere(Fsync::Every, 3);
    assert!(cuts > 300, "{cuts}");
    assert!(wrong.is_empty(), "{} of {cuts}: {:#?}", wrong.len(), &wrong[..wrong.len().min(5)]);
}

#[test]
fn the_same_cuts_do_harm_where_nothing_is_synced() {
    let (wrong, cuts) = cut_everywhere(Fsync::Never, 5);
    assert!(!wrong.is_empty(), "a disk that loses nothing in {cuts} cuts proves nothing");
}

/// What a hub would send.
fn snapshot(model: &Model) -> Snapshot {
    let request = |kept: &Kept| SnapshotRequest {
        admission: kept.admission.clone(),
        entries: kept.entries.clone(),
        cached_tokens: kept.cached_tokens,
        finished_unix: kept.finished_unix,
    };
    Snapshot { requests: model.requests.iter().map(request).collect() }
}

/// What is kept in a copy of the files as they are, as after a kill.
fn after_kill(of: &str) -> Vec<Kept> {
    let dir = tempfile::tempdir().unwrap();
    let name = dir.path().to_str().unwrap();
    Disk::get().set(name, Disk::get().files(of));
    replay(&JournalDb::open(dir.path(), INTERVAL).unwrap())
}

/// Appends with less and less room, or with syncs that fail, until that is so; then makes it right and goes on.
fn fail_and_recover(
    fsync: Fsync,
    fail: impl Fn(&str),
    repair: impl Fn(&str),
    reason: fn(&LossReason) -> bool,
) {
    let disk = Disk::get();
    let dir = tempfile::tempdir().unwrap();
    let name = dir.path().to_str().unwrap();
    let mut writer = JournalWriter::new(JournalDb::open(dir.path(), fsync).unwrap());
    let mut model = Model::default();
    let start = Instant::now();
    let mut failures = 0;
    for n in 0..400_u64 {
        let now = Now { instant: start + Duration::from_secs(n), unix: NOW + n };
        let mut batch = vec![admit(n, n as u32 % 3), step((0..=n).map(|i| (i, token(0, n as u32))))];
        if n >= 20 {
            batch.push(step([(n - 20, finish(0)), (n - 20, END)]));
        }
        if n % 40 == 20 {
            fail(name);
        }
        if n % 40 == 39 {
            repair(name);
        }
        let before = writer.durability();
        let written = model.clone();
        model.append(&batch, now.unix);
        let after = writer.append(&batch, now);
        if let (Durability::Durable, Durability::Lost { reason: why, .. }) = (before, &after) {
            failures += 1;
            assert!(reason(why), "{why:?}");
            assert_eq!(replay(writer.db()), written.requests, "a batch that failed has changed nothing");
            // Where only the sync failed, a commit may be found by a start; half of one never is.
            let found = after_kill(name);
            assert!(found == written.requests || found == model.requests);
        }
        writer.tick(now);
        if writer.needs_snapshot(now) {
            writer.restore_snapshot(&snapshot(&model), now);
        }
        if writer.durability() == Durability::Durable {
            assert_eq!(replay(writer.db()), model.requests, "after {n}");
            assert_eq!(after_kill(name), model.requests, "after {n}");
        }
        let retention = Retention { seconds: 12, per_tenant: BTreeMap::new(), max_bytes: u64::MAX };
        let gone = writer.expire(&retention, now).requests;
        model.requests.retain(|kept| !gone.contains(&kept.admission.request));
    }
    assert!(failures >= 8, "{failures}");
    disk.set(name, disk::Files::new());
}

#[test]
fn a_disk_that_fills_up_at_any_write_loses_no_more_than_it_says_and_recovers() {
    let disk = Disk::get();
    let chance = RefCell::new(Chance(3));
    for fsync in [INTERVAL, Fsync::Every] {
        let fail = |name: &str| {
            let more = chance.borrow_mut().below(20_000) as usize;
            disk.limit(name, Some(disk.size(name) + more));
        };
        fail_and_recover(fsync, fail, |name| disk.limit(name, None), |why| *why == LossReason::DiskFull);
    }
}

#[test]
fn a_disk_that_does_not_sync_is_found_out_and_recovers() {
    let disk = Disk::get();
    let fail = |name: &str| disk.break_syncs(name, true);
    let repair = |name: &str| disk.break_syncs(name, false);
    fail_and_recover(Fsync::Every, fail, repair, |why| matches!(why, LossReason::Failed(_)));
}
