use super::*;
use crate::schema::{JOURNAL, JOURNAL_DB, Kind, open};
use crate::*;
use pagedd_core::{Quotas, SamplingParams};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const NOW: u64 = 1_790_000_000;

fn dir() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn journal(dir: &Path) -> JournalDb {
    JournalDb::open(dir, Fsync::Never).unwrap()
}

fn id(n: u8) -> RequestId {
    RequestId([n; 16])
}

fn saved(key: Option<u32>) -> SavedRequest {
    SavedRequest {
        model: "m".to_owned(),
        key,
        created_unix: NOW,
        on_leave: OnLeave::RunOn,
        prompt: vec![1],
        sampling: SamplingParams::GREEDY.into(),
        n: 1,
        max_tokens: 9,
        stop_ids: Vec::new(),
        context: Vec::new(),
    }
}

fn admit(n: u8, tenant: u32, key: Option<u32>) -> Record {
    Record::Admission(Arc::new(Admission {
        request: id(n),
        tenant: TenantId(tenant),
        idempotency: None,
        model_digest: None,
        saved: saved(key),
    }))
}

fn end(n: u8) -> Record {
    Record::Step(Step { entries: vec![(id(n), Entry::End { cached_tokens: 0 })], ..Step::default() })
}

fn named(name: &str, port: u16) -> NewTenant {
    NewTenant {
        name: name.to_owned(),
        port,
        model: "m".to_owned(),
        kv_floor: "0%".to_owned(),
        kv_ceiling: "100%".to_owned(),
        auth: true,
        prompt_lookup: None,
        retention_ms: None,
        quotas: Quotas::default(),
        limits: None,
    }
}

fn keep(seconds: u64) -> Retention {
    Retention { seconds, per_tenant: [].into(), max_bytes: u64::MAX }
}

#[test]
fn a_journal_is_of_one_installation_and_the_error_names_both_files() {
    let (one, other) = (dir(), dir());
    let control = ControlDb::open(one.path()).unwrap();
    let backup = dir();
    control.save(&backup.path().join("control.db")).unwrap();
    assert_eq!(journal(one.path()).bind(control.installation(), Numbers::default()).unwrap(), Bound::Made);
    assert_eq!(journal(one.path()).bind(control.installation(), Numbers::default()).unwrap(), Bound::Already);
    let restored = ControlDb::open(backup.path()).unwrap();
    assert_eq!(
        journal(one.path()).bind(restored.installation(), Numbers::default()).unwrap(),
        Bound::Already,
        "a backup"
    );
    let stranger = ControlDb::open(other.path()).unwrap().installation();
    let error = journal(one.path()).bind(stranger, Numbers::default()).unwrap_err();
    assert!(matches!(error, DbError::OtherInstallation { .. }), "{error:?}");
    for words in ["control.db", "journal.db", "put the control.db back", "move journal.db away"] {
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn a_journal_of_an_older_version_is_adopted_and_the_keys_of_its_requests_are_known() {
    let dir = dir();
    let old = open(&dir.path().join("journal.db"), Kind { migrations: &JOURNAL[..2], ..JOURNAL_DB }).unwrap();
    old.execute(
        "INSERT INTO requests (seq, id, tenant, bytes, first_step) VALUES (1, zeroblob(16), 4, 9, 1)",
        [],
    )
    .unwrap();
    let body = saved::seal(&saved(Some(6))).unwrap();
    old.execute("INSERT INTO bodies (request, body) VALUES (1, ?1)", [body]).unwrap();
    drop(old);
    let mut db = journal(dir.path());
    let new = db.bind(Installation([8; 16]), Numbers::default()).unwrap_err();
    assert!(
        matches!(new, DbError::OtherInstallation { .. }),
        "a control.db that never had a tenant: {new:?}"
    );
    assert_eq!(db.bind(Installation([7; 16]), Numbers { tenant: 1, key: 0 }).unwrap(), Bound::Adopted);
    assert_eq!(db.numbers().unwrap(), Numbers { tenant: 4, key: 6 });
    db.append(&[admit(1, 2, Some(9)), admit(2, 3, None)], NOW).unwrap();
    assert_eq!(db.numbers().unwrap(), Numbers { tenant: 4, key: 9 });
}

#[test]
fn numbers_that_the_journal_names_are_not_given_again() {
    let dir = dir();
    let mut control = ControlDb::open(dir.path()).unwrap();
    assert_eq!(control.numbers().unwrap(), Numbers::default());
    assert!(control.raise(Numbers { tenant: 4, key: 9 }).unwrap());
    drop(control);
    let mut control = ControlDb::open(dir.path()).unwrap();
    let first = NewKey::draw().unwrap();
    let (tenant, key) = control.add_tenant(&named("acme", 8101), Some(&first), 1).unwrap();
    assert_eq!((tenant.id, key.unwrap().id), (TenantId(5), 10));
    assert!(!control.raise(Numbers { tenant: 5, key: 10 }).unwrap(), "they are given");
    assert!(control.raise(Numbers { tenant: 2, key: 20 }).unwrap());
    assert_eq!(control.numbers().unwrap(), Numbers { tenant: 5, key: 20 });
    assert_eq!(control.add_tenant(&named("zebra", 8102), None, 1).unwrap().0.id, TenantId(6));
    assert_eq!(control.add_key(TenantId(5), None, &NewKey::draw().unwrap(), 1).unwrap().id, 21);
}

#[test]
fn numbers_stay_known_when_nothing_is_left_of_whom_they_named() {
    let dir = dir();
    let known = |highest: [u32; 2]| {
        let [tenant, key] = highest;
        assert_eq!(journal(dir.path()).numbers().unwrap(), Numbers { tenant, key });
    };
    let mut db = journal(dir.path());
    db.bind(Installation([1; 16]), Numbers { tenant: 3, key: 7 }).unwrap();
    db.append(&[admit(1, 4, Some(9)), end(1), admit(2, 5, None), admit(3, 6, Some(8))], NOW).unwrap();
    assert_eq!(db.expire(NOW + 10, &keep(10)).unwrap().requests, [id(1)]);
    db.delete_tenant(TenantId(6), NOW).unwrap();
    db.restore(&Snapshot { requests: Vec::new() }).unwrap();
    assert_eq!(db.tenant_of(id(2)).unwrap(), None);
    drop(db);
    known([6, 9]);
    journal(dir.path()).bind(Installation([1; 16]), Numbers { tenant: 2, key: 11 }).unwrap();
    known([6, 11]);
}

#[test]
fn what_is_live_of_a_tenant_that_is_known_again_stays_also_where_that_could_not_be_written() {
    let dir = dir();
    let mut db = journal(dir.path());
    db.append(&[admit(1, 8, None), admit(2, 9, None)], NOW).unwrap();
    db.know_tenants(&[], NOW).unwrap();
    db.db.execute_batch("PRAGMA query_only = 1").unwrap();
    db.know_tenants(&[TenantId(9)], NOW + 5).unwrap_err();
    db.db.execute_batch("PRAGMA query_only = 0").unwrap();
    assert_eq!(db.expire(NOW + 10, &keep(10)).unwrap().requests, [id(1)]);
}

#[test]
fn a_removed_tenant_is_remembered_until_it_is_forgotten() {
    let dir = dir();
    let mut control = ControlDb::open(dir.path()).unwrap();
    for (name, port) in [("acme", 8101), ("zebra", 8102)] {
        control.add_tenant(&named(name, port), None, 1).unwrap();
    }
    assert_eq!(control.removed().unwrap(), []);
    control.remove_tenant(TenantId(2)).unwrap();
    control.remove_tenant(TenantId(2)).unwrap_err();
    drop(control);
    let mut control = ControlDb::open(dir.path()).unwrap();
    assert_eq!(control.removed().unwrap(), [TenantId(2)]);
    control.forget_removed(&[TenantId(2)]).unwrap();
    assert_eq!(control.removed().unwrap(), []);
}

#[test]
fn what_is_live_of_a_tenant_that_is_not_known_goes_when_its_time_is_over_and_not_before() {
    let dir = dir();
    let mut db = journal(dir.path());
    db.append(&[admit(1, 1, None), admit(2, 9, None), admit(3, 9, None), end(3)], NOW).unwrap();
    let strangers = db.know_tenants(&[TenantId(1)], NOW).unwrap();
    assert_eq!(strangers, Strangers { tenants: 1, live: 1, ended: 1 });
    drop(db);
    let mut db = journal(dir.path());
    db.know_tenants(&[TenantId(1)], NOW + 8).unwrap();
    assert!(db.keeps_ended().unwrap());
    assert_eq!(db.expire(NOW + 9, &keep(10)).unwrap().requests, []);
    assert_eq!(db.expire(NOW + 10, &keep(10)).unwrap().requests, [id(3), id(2)], "since the first start");
    assert_eq!((db.keeps_ended().unwrap(), db.live()), (false, 1));
    assert_eq!(db.know_tenants(&[TenantId(1)], NOW + 11).unwrap(), Strangers::default());
}

#[test]
fn a_tenant_that_is_known_again_has_what_is_live() {
    let dir = dir();
    let mut db = journal(dir.path());
    db.append(&[admit(2, 9, None)], NOW).unwrap();
    db.know_tenants(&[], NOW).unwrap();
    assert_eq!(db.know_tenants(&[TenantId(9)], NOW + 5).unwrap(), Strangers::default());
    assert_eq!(db.expire(NOW + 100, &keep(10)).unwrap().requests, []);
    db.know_tenants(&[], NOW + 100).unwrap();
    assert_eq!(db.expire(NOW + 109, &keep(10)).unwrap().requests, [], "its time begins anew");
}

#[test]
fn a_snapshot_leaves_what_is_live_of_tenants_that_are_not_known() {
    let dir = dir();
    let mut db = journal(dir.path());
    db.append(&[admit(1, 1, None), admit(2, 9, None)], NOW).unwrap();
    db.know_tenants(&[TenantId(1)], NOW).unwrap();
    db.restore(&Snapshot { requests: Vec::new() }).unwrap();
    assert_eq!(db.tenant_of(id(1)).unwrap(), None);
    assert_eq!(db.tenant_of(id(2)).unwrap(), Some(TenantId(9)));
}

#[test]
fn a_file_that_comes_late_is_not_taken_up_where_it_is_anothers_or_names_numbers_that_were_given() {
    let installation = Installation([1; 16]);
    for (owner, given, tenant, taken) in [
        (Installation([2; 16]), Numbers { tenant: 9, key: 9 }, 9, false),
        (installation, Numbers { tenant: 8, key: 9 }, 9, false),
        (installation, Numbers { tenant: 9, key: 0 }, 9, true),
    ] {
        let dir = dir();
        let (path, away) = (dir.path().join("journal.db"), dir.path().join("away"));
        let mut db = journal(dir.path());
        db.bind(installation, Numbers::default()).unwrap();
        db.append(&[admit(1, tenant, None)], NOW).unwrap();
        drop(db);
        fs::rename(&path, &away).unwrap();
        fs::create_dir(&path).unwrap();
        let start = Instant::now();
        let at = |seconds| Now { instant: start + Duration::from_secs(seconds), unix: seconds };
        let mut writer = JournalWriter::open(dir.path(), Fsync::Never, at(0)).unwrap();
        assert!(!writer.is_present());
        assert_eq!(writer.bind(owner, given).unwrap(), None);
        fs::remove_dir(&path).unwrap();
        fs::rename(&away, &path).unwrap();
        assert_eq!(writer.needs_snapshot(at(60)), taken);
        let Durability::Lost { reason, .. } = writer.durability() else { panic!("no snapshot was written") };
        let said = reason.to_string();
        assert_eq!(
            said.contains("two installations") || said.contains("start pagedd again"),
            !taken,
            "{said}"
        );
    }
}

#[test]
fn what_is_no_file_is_named_with_what_it_is() {
    let dir = dir();
    let path = dir.path().join("control.db");
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    let error = ControlDb::open(dir.path()).unwrap_err().to_string();
    assert_eq!(error, format!("{} is a FIFO, and no file; move it away", path.display()));
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    let error = ControlDb::open(dir.path()).unwrap_err().to_string();
    assert_eq!(error, format!("{} is a directory, and no file; move it away", path.display()));
}
