use crate::schema::{CONTROL, CONTROL_DB, JOURNAL, JOURNAL_DB, Kind, Migrations, open};
use crate::*;
use pagedd_core::{Quotas, TenantId};
use proptest::prelude::*;
use rusqlite::{Connection, OpenFlags};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use tempfile::TempDir;

const V1: &str = include_str!("../tests/fixtures/control-v1.sql");

const NOW: i64 = 1_790_000_000;

fn dir() -> TempDir {
    tempfile::tempdir().unwrap()
}

fn acme(port: u16) -> NewTenant {
    named("acme", port)
}

fn named(name: &str, port: u16) -> NewTenant {
    NewTenant {
        name: name.to_owned(),
        port,
        model: "smollm2".to_owned(),
        kv_floor: "20%".to_owned(),
        kv_ceiling: "50%".to_owned(),
        auth: true,
        prompt_lookup: None,
        retention_ms: None,
        quotas: Quotas::default(),
        limits: None,
    }
}

/// A state directory as version 1 left it.
fn v1() -> TempDir {
    let dir = dir();
    Connection::open(dir.path().join("control.db")).unwrap().execute_batch(V1).unwrap();
    dir
}

fn of(migrations: Migrations) -> Kind {
    Kind { migrations, ..CONTROL_DB }
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

fn pragma(db: &Connection, name: &str) -> i64 {
    db.pragma_query_value(None, name, |row| row.get(0)).unwrap()
}

fn schema_of(db: &Connection) -> Vec<String> {
    let mut query = db.prepare("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY name").unwrap();
    let words = |sql: String| sql.split_whitespace().collect::<Vec<_>>().join(" ");
    query.query_map([], |row| row.get(0).map(words)).unwrap().map(Result::unwrap).collect()
}

#[test]
fn a_new_database_is_private_synchronous_and_of_the_newest_version() {
    let dir = dir();
    let mut db = ControlDb::open(dir.path()).unwrap();
    db.add_tenant(&acme(8101), None, NOW).unwrap();
    for file in ["control.db", "control.db-wal", "control.db-shm"] {
        assert_eq!(mode(&dir.path().join(file)), 0o600, "{file}");
    }
    let raw = db.raw();
    assert_eq!(raw.pragma_query_value(None, "journal_mode", |row| row.get::<_, String>(0)).unwrap(), "wal");
    assert_eq!(pragma(raw, "synchronous"), 2, "FULL");
    assert_eq!(pragma(raw, "foreign_keys"), 1);
    assert_eq!(pragma(raw, "user_version"), CONTROL.len() as i64);
    assert_eq!(db.path(), dir.path().join("control.db"));
}

#[test]
fn a_file_that_others_could_read_is_made_private_when_it_is_opened() {
    let dir = v1();
    let path = dir.path().join("control.db");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    ControlDb::open(dir.path()).unwrap();
    assert_eq!(mode(&path), 0o600);
}

#[test]
fn tenants_keys_and_the_secret_survive_a_restart() {
    let dir = dir();
    let mut db = ControlDb::open(dir.path()).unwrap();
    let key = NewKey::draw().unwrap();
    let (tenant, first) = db.add_tenant(&acme(8101), Some(&key), NOW).unwrap();
    let first = first.unwrap();
    let second = db.add_key(tenant.id, Some("laptop"), &NewKey::draw().unwrap(), NOW + 1).unwrap();
    let revoked = db.revoke_key(tenant.id, second.id, NOW + 2).unwrap();
    let secret = *db.installation_secret();
    drop(db);

    let db = ControlDb::open(dir.path()).unwrap();
    assert_eq!(db.tenants().unwrap(), std::slice::from_ref(&tenant));
    assert_eq!(db.tenant_by_name("acme").unwrap(), Some(tenant.clone()));
    assert_eq!(db.tenant_by_name("zebra").unwrap(), None);
    assert_eq!(db.keys(tenant.id).unwrap(), [first.clone(), revoked.clone()]);
    assert_eq!(db.live_keys(tenant.id).unwrap(), std::slice::from_ref(&first));
    assert_eq!(first.digest, Digest::of(key.reveal()));
    assert_eq!((first.prefix.as_str(), first.label, first.created_unix), (key.prefix(), None, NOW));
    assert_eq!((revoked.label.as_deref(), revoked.revoked_unix), (Some("laptop"), Some(NOW + 2)));
    assert_eq!(*db.installation_secret(), secret);
    assert_ne!(*ControlDb::open(tempfile::tempdir().unwrap().path()).unwrap().installation_secret(), secret);
}

#[test]
fn no_file_holds_a_keys_text() {
    let dir = dir();
    let mut db = ControlDb::open(dir.path()).unwrap();
    let key = NewKey::draw().unwrap();
    db.add_tenant(&acme(8101), Some(&key), NOW).unwrap();
    for entry in fs::read_dir(dir.path()).unwrap() {
        let path = entry.unwrap().path();
        let bytes = fs::read(&path).unwrap();
        let needle = &key.reveal().as_bytes()[PREFIX_LENGTH..];
        assert!(!bytes.windows(needle.len()).any(|window| window == needle), "{}", path.display());
    }
}

#[test]
fn a_name_and_a_port_are_one_tenants() {
    let dir = dir();
    let mut db = ControlDb::open(dir.path()).unwrap();
    db.add_tenant(&acme(8101), None, NOW).unwrap();
    let zebra = db.add_tenant(&named("zebra", 8102), None, NOW).unwrap().0;
    let before = db.tenants().unwrap();
    assert!(
        matches!(db.add_tenant(&acme(8103), None, NOW), Err(DbError::DuplicateName { name }) if name == "acme")
    );
    assert!(matches!(
        db.add_tenant(&named("b", 8102), None, NOW),
        Err(DbError::DuplicatePort { port: 8102 })
    ));
    let port = |port| TenantUpdate { port: Some(port), ..TenantUpdate::default() };
    assert!(matches!(db.update_tenant(zebra.id, &port(8101)), Err(DbError::DuplicatePort { port: 8101 })));
    assert_eq!(db.tenants().unwrap(), before);
    assert_eq!(db.update_tenant(zebra.id, &port(8102)).unwrap(), zebra, "its own port is free for it");
}

#[test]
fn an_update_changes_what_it_names_and_nothing_else() {
    let dir = dir();
    let mut db = ControlDb::open(dir.path()).unwrap();
    let row = db.add_tenant(&acme(8101), None, NOW).unwrap().0;
    assert_eq!(db.update_tenant(row.id, &TenantUpdate::default()).unwrap(), row);
    let suspended =
        db.update_tenant(row.id, &TenantUpdate { suspended: Some(true), ..TenantUpdate::default() }).unwrap();
    assert_eq!(suspended, TenantRow { suspended: true, ..row.clone() });
    let update = TenantUpdate {
        port: Some(9000),
        kv_floor: Some("1GiB".to_owned()),
        kv_ceiling: Some("2GiB".to_owned()),
        auth: Some(false),
        suspended: Some(false),
        prompt_lookup: Some(false),
        retention_ms: Some(Some(0)),
        quotas: None,
        limits: Some(Some("cpu.max 50%\n".to_owned())),
    };
    let changed = db.update_tenant(row.id, &update).unwrap();
    let expected = TenantRow {
        port: 9000,
        kv_floor: "1GiB".to_owned(),
        kv_ceiling: "2GiB".to_owned(),
        auth: false,
        prompt_lookup: Some(false),
        retention_ms: Some(0),
        limits: Some("cpu.max 50%\n".to_owned()),
        ..row
    };
    assert_eq!((&changed, db.tenants().unwrap()), (&expected, vec![expected.clone()]));
    let update = TenantUpdate { retention_ms: Some(None), limits: Some(None), ..TenantUpdate::default() };
    let again = db.update_tenant(changed.id, &update).unwrap();
    assert_eq!(again, TenantRow { retention_ms: None, limits: None, ..changed }, "as the configuration says");
}

#[test]
fn a_removed_tenants_number_and_keys_do_not_come_back() {
    let dir = dir();
    let mut db = ControlDb::open(dir.path()).unwrap();
    let (first, key) = db.add_tenant(&acme(8101), Some(&NewKey::draw().unwrap()), NOW).unwrap();
    assert_eq!(db.remove_tenant(first.id).unwrap(), first);
    assert_eq!(db.keys(first.id).unwrap(), []);
    drop(db);
    let mut db = ControlDb::open(dir.path()).unwrap();
    let (second, second_key) = db.add_tenant(&acme(8101), Some(&NewKey::draw().unwrap()), NOW).unwrap();
    assert_eq!(second.id, TenantId(first.id.0 + 1));
    assert!(second_key.unwrap().id > key.unwrap().id);
}

#[test]
fn what_is_not_there_is_refused_by_its_number() {
    let dir = dir();
    let mut db = ControlDb::open(dir.path()).unwrap();
    let acme = db.add_tenant(&acme(8101), None, NOW).unwrap().0;
    let zebra = db.add_tenant(&named("zebra", 8102), Some(&NewKey::draw().unwrap()), NOW).unwrap();
    let nobody = TenantId(99);
    let key = NewKey::draw().unwrap();
    for error in [
        db.update_tenant(nobody, &TenantUpdate::default()).unwrap_err(),
        db.remove_tenant(nobody).unwrap_err(),
        db.add_key(nobody, None, &key, NOW).unwrap_err(),
    ] {
        assert!(matches!(error, DbError::UnknownTenant { tenant } if tenant == nobody), "{error}");
    }
    let foreign = zebra.1.unwrap().id;
    let error = db.revoke_key(acme.id, foreign, NOW).unwrap_err();
    assert!(
        matches!(error, DbError::UnknownKey { tenant, key } if (tenant, key) == (acme.id, foreign)),
        "{error}"
    );
    assert_eq!(db.live_keys(zebra.0.id).unwrap().len(), 1, "another tenant's key stays");
}

#[test]
fn a_key_that_is_revoked_twice_keeps_its_first_time() {
    let dir = dir();
    let mut db = ControlDb::open(dir.path()).unwrap();
    let (tenant, key) = db.add_tenant(&acme(8101), Some(&NewKey::draw().unwrap()), NOW).unwrap();
    let key = key.unwrap();
    db.revoke_key(tenant.id, key.id, NOW + 5).unwrap();
    assert_eq!(db.revoke_key(tenant.id, key.id, NOW + 9).unwrap().revoked_unix, Some(NOW + 5));
}

#[test]
fn a_tenant_whose_first_key_fails_is_not_there_either() {
    let dir = dir();
    let mut db = ControlDb::open(dir.path()).unwrap();
    let key = NewKey::draw().unwrap();
    db.add_tenant(&acme(8101), Some(&key), NOW).unwrap();
    let error = db.add_tenant(&named("zebra", 8102), Some(&key), NOW).unwrap_err();
    assert!(matches!(error, DbError::Sql { .. }), "a digest is stored once: {error}");
    assert_eq!(db.tenants().unwrap().len(), 1);
}

#[test]
fn a_file_of_version_1_is_read_with_all_that_is_in_it() {
    let dir = v1();
    let mut db = ControlDb::open(dir.path()).unwrap();
    assert_eq!(*db.installation_secret(), [0x5a; 32]);
    let rows = db.tenants().unwrap();
    let summary: Vec<_> =
        rows.iter().map(|row| (row.id.0, row.name.as_str(), row.port, row.auth, row.suspended)).collect();
    assert_eq!(summary, [(1, "acme", 8101, true, false), (3, "zebra", 8103, false, true)]);
    assert_eq!((rows[1].kv_floor.as_str(), rows[1].kv_ceiling.as_str()), ("0%", "4096 tokens"));
    assert!(rows.iter().all(|row| row.prompt_lookup.is_none()), "as the model's configuration says");
    assert!(rows.iter().all(|row| row.retention_ms.is_none()), "as the configuration says");
    assert!(rows.iter().all(|row| row.limits.is_none()), "nothing is limited");
    assert_eq!(db.live_keys(TenantId(1)).unwrap()[0].digest, Digest::of("pgd_AAAA-one"));
    assert_eq!(db.keys(TenantId(1)).unwrap()[1].revoked_unix, Some(1_790_000_009));
    let new = NewTenant { prompt_lookup: Some(true), retention_ms: Some(600_000), ..named("new", 8104) };
    let new = db.add_tenant(&new, None, NOW).unwrap().0;
    assert_eq!((new.id, new.prompt_lookup, new.retention_ms), (TenantId(4), Some(true), Some(600_000)));
    let off = TenantUpdate { prompt_lookup: Some(false), ..TenantUpdate::default() };
    assert_eq!(db.update_tenant(TenantId(1), &off).unwrap().prompt_lookup, Some(false));
}

#[test]
fn a_file_of_version_2_gets_a_retention_per_tenant_and_leaves_a_copy_of_what_was() {
    let dir = dir();
    let path = dir.path().join("control.db");
    let old: Migrations = &CONTROL[..2];
    let db = open(&path, of(old)).unwrap();
    db.execute_batch(
        "INSERT INTO tenants (name, port, model, kv_floor, kv_ceiling, auth, suspended, prompt_lookup, created_unix)
         VALUES ('acme', 8101, 'm', '0%', '100%', 1, 0, 0, 9)",
    )
    .unwrap();
    drop(db);
    let rows = ControlDb::open(dir.path()).unwrap().tenants().unwrap();
    assert_eq!((rows[0].prompt_lookup, rows[0].retention_ms), (Some(false), None));
    let backup = dir.path().join("control.db.v2");
    assert_eq!(mode(&backup), 0o600);
    assert_eq!(pragma(&Connection::open(&backup).unwrap(), "user_version"), 2);
}

#[test]
fn the_released_first_migration_is_what_version_1_wrote() {
    let dir = dir();
    let old = v1();
    let first: Migrations = &CONTROL[..1];
    let fresh = open(&dir.path().join("control.db"), of(first)).unwrap();
    assert_eq!(schema_of(&fresh), schema_of(&Connection::open(old.path().join("control.db")).unwrap()));
}

const NEXT: Migrations =
    &[CONTROL[0], "ALTER TABLE tenants ADD COLUMN note TEXT; UPDATE tenants SET note = name;"];
const BROKEN: Migrations =
    &[CONTROL[0], "ALTER TABLE tenants ADD COLUMN note TEXT; UPDATE absent SET x = 1;"];

#[test]
fn a_migration_keeps_the_rows_and_leaves_a_private_copy_of_what_was() {
    let dir = v1();
    let path = dir.path().join("control.db");
    let backup = dir.path().join("control.db.v1");
    fs::write(dir.path().join("control.db.v1.partial"), "left behind by a crash").unwrap();
    let db = open(&path, of(NEXT)).unwrap();
    assert_eq!(pragma(&db, "user_version"), 2);
    let notes: String = db.query_row("SELECT group_concat(note) FROM tenants", [], |row| row.get(0)).unwrap();
    assert_eq!(notes, "acme,zebra");
    drop(db);
    assert_eq!(mode(&backup), 0o600);
    assert!(!dir.path().join("control.db.v1.partial").exists());
    fs::rename(&backup, &path).unwrap();
    assert_eq!(pragma(&Connection::open(&path).unwrap(), "user_version"), 1);
    let old = ControlDb::open(dir.path()).unwrap();
    assert_eq!(old.tenants().unwrap().len(), 2);
    assert_eq!(pragma(old.raw(), "user_version"), CONTROL.len() as i64);
}

#[test]
fn a_migration_that_fails_changes_nothing() {
    let dir = v1();
    let path = dir.path().join("control.db");
    let error = open(&path, of(BROKEN)).unwrap_err();
    assert!(error.to_string().contains("control.db: no such table: absent"), "{error}");
    let db = Connection::open(&path).unwrap();
    assert_eq!(pragma(&db, "user_version"), 1);
    assert_eq!(schema_of(&db), schema_of(&Connection::open(v1().path().join("control.db")).unwrap()));
    drop(db);
    assert_eq!(ControlDb::open(dir.path()).unwrap().tenants().unwrap().len(), 2);
}

#[test]
fn a_journal_of_version_1_is_read_with_all_that_is_in_it_and_a_copy_is_left() {
    let dir = dir();
    let path = dir.path().join("journal.db");
    let first = open(&path, Kind { migrations: &JOURNAL[..1], ..JOURNAL_DB }).unwrap();
    let saved = SavedRequest {
        model: "smollm2".to_owned(),
        key: None,
        created_unix: 1,
        on_leave: OnLeave::RunOn,
        prompt: vec![1, 2, 3],
        sampling: pagedd_core::SamplingParams::GREEDY.into(),
        n: 1,
        max_tokens: 9,
        stop_ids: Vec::new(),
        context: Vec::new(),
    };
    let body = saved::seal(&saved).unwrap();
    first
        .execute(
            "INSERT INTO requests (seq, id, tenant, bytes, first_step) VALUES (1, zeroblob(16), 1, 9, 1)",
            [],
        )
        .unwrap();
    first.execute("INSERT INTO bodies (request, body) VALUES (1, ?1)", [body]).unwrap();
    drop(first);
    let db = JournalDb::open(dir.path(), Fsync::Every).unwrap();
    let mut live = Vec::new();
    db.replay_live(|kept| live.push(kept.unwrap())).unwrap();
    assert_eq!(live.len(), 1);
    assert_eq!(live[0].admission.saved, saved);
    assert_eq!((live[0].admission.model_digest, live[0].cached_tokens), (None, None));
    assert_eq!(pragma(&db.db, "user_version"), JOURNAL.len() as i64);
    drop(db);
    let copy = dir.path().join("journal.db.v1");
    assert!(!copy.exists(), "prompts would stay in it for ever");
}

#[test]
fn a_newer_schema_is_refused_with_both_versions() {
    let dir = v1();
    let path = dir.path().join("control.db");
    Connection::open(&path).unwrap().pragma_update(None, "user_version", 77).unwrap();
    let error = ControlDb::open(dir.path()).unwrap_err();
    assert!(
        matches!(error, DbError::NewerSchema { found: 77, known, .. } if known == CONTROL.len() as u32),
        "{error}"
    );
    let text = error.to_string();
    assert!(
        text.contains(&format!("has schema version 77, this pagedd knows up to {}", CONTROL.len())),
        "{text}"
    );
    assert_eq!(pragma(&Connection::open(&path).unwrap(), "user_version"), 77, "left as it was");
}

#[test]
fn a_database_of_something_else_is_refused_and_left_alone() {
    let dir = dir();
    let path = dir.path().join("control.db");
    Connection::open(&path).unwrap().execute_batch("CREATE TABLE cats (name TEXT)").unwrap();
    let error = ControlDb::open(dir.path()).unwrap_err();
    assert!(matches!(error, DbError::Foreign { .. }), "{error}");
    assert_eq!(schema_of(&Connection::open(&path).unwrap()), ["CREATE TABLE cats (name TEXT)"]);
}

#[test]
fn a_damaged_file_is_named_whatever_was_damaged() {
    let whole = {
        let dir = v1();
        fs::read(dir.path().join("control.db")).unwrap()
    };
    let page = 4096;
    let text: Vec<u8> = b"this is no database at all, but long enough to be one".repeat(100);
    let mut torn = whole.clone();
    torn[page..].fill(0xff);
    let mut cut = whole.clone();
    cut.truncate(whole.len() / 2);
    for (what, bytes) in [("another format", text), ("overwritten pages", torn), ("cut short", cut)] {
        let dir = dir();
        let path = dir.path().join("control.db");
        fs::write(&path, &bytes).unwrap();
        let error = ControlDb::open(dir.path()).unwrap_err();
        assert!(matches!(error, DbError::Corrupt { .. }), "{what}: {error:?}");
        let line = error.to_string();
        assert!(line.contains(&*path.to_string_lossy()) && line.contains("restore it"), "{what}: {line}");
        assert!(!line.contains('\n'), "{what}: {line}");
        assert_eq!(fs::read(&path).unwrap(), bytes, "{what}: left as it was");
    }
}

#[test]
fn an_empty_file_becomes_a_database() {
    let dir = dir();
    fs::write(dir.path().join("control.db"), "").unwrap();
    assert_eq!(ControlDb::open(dir.path()).unwrap().tenants().unwrap(), []);
}

#[test]
fn a_directory_that_is_missing_or_takes_no_file_is_named() {
    let dir = dir();
    let missing = dir.path().join("missing");
    let error = ControlDb::open(&missing).unwrap_err().to_string();
    assert!(error.starts_with(&format!("{}: No such file", missing.join("control.db").display())), "{error}");
    fs::create_dir(dir.path().join("control.db")).unwrap();
    let error = ControlDb::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("control.db"), "{error}");
    // Nobody makes files in here, root neither.
    let error = ControlDb::open(Path::new("/proc/self")).unwrap_err().to_string();
    assert!(error.contains("/proc/self/control.db"), "{error}");
}

#[test]
fn a_database_that_cannot_be_written_says_so_and_stays() {
    let dir = v1();
    let path = dir.path().join("control.db");
    drop(ControlDb::open(dir.path()).unwrap());
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY;
    let mut db = ControlDb::over(Connection::open_with_flags(&path, flags).unwrap(), path.clone()).unwrap();
    let error = db.add_tenant(&named("new", 8104), None, NOW).unwrap_err();
    assert!(matches!(error, DbError::ReadOnly { .. }), "{error:?}");
    assert!(error.to_string().contains("check the owner and mode of the state directory"), "{error}");
    assert_eq!(db.tenants().unwrap().len(), 2);
}

#[test]
fn a_full_disk_is_named_and_leaves_nothing_half_done() {
    let dir = dir();
    let mut db = ControlDb::open(dir.path()).unwrap();
    db.add_tenant(&acme(8101), None, NOW).unwrap();
    let pages = pragma(db.raw(), "page_count");
    db.raw().pragma_update_and_check(None, "max_page_count", pages, |_| Ok(())).unwrap();
    let big = NewTenant { kv_floor: "x".repeat(100_000), ..named("zebra", 8102) };
    let error = db.add_tenant(&big, Some(&NewKey::draw().unwrap()), NOW).unwrap_err();
    assert!(matches!(error, DbError::DiskFull { .. }), "{error:?}");
    assert_eq!(error.to_string(), format!("no space left on the file system of {}", db.path().display()));
    assert_eq!(db.tenants().unwrap().len(), 1);
    db.raw().pragma_update_and_check(None, "max_page_count", 100_000, |_| Ok(())).unwrap();
    db.add_tenant(&big, None, NOW).unwrap();
}

#[test]
fn a_database_that_another_process_holds_is_named() {
    let dir = v1();
    let mut db = ControlDb::open(dir.path()).unwrap();
    db.raw().busy_timeout(std::time::Duration::ZERO).unwrap();
    let other = Connection::open(dir.path().join("control.db")).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let error = db.add_tenant(&named("new", 8104), None, NOW).unwrap_err();
    assert!(matches!(error, DbError::Locked { .. }), "{error:?}");
    other.execute_batch("ROLLBACK").unwrap();
    db.add_tenant(&named("new", 8104), None, NOW).unwrap();
}

#[test]
fn file_system_errors_keep_their_reaction() {
    let path = Path::new("/s/control.db");
    let os = |code| DbError::io(path, std::io::Error::from_raw_os_error(code));
    assert!(matches!(os(28), DbError::DiskFull { .. }), "ENOSPC");
    assert!(matches!(os(122), DbError::DiskFull { .. }), "EDQUOT");
    assert!(matches!(os(13), DbError::ReadOnly { .. }), "EACCES");
    assert!(matches!(os(30), DbError::ReadOnly { .. }), "EROFS");
    assert!(matches!(os(5), DbError::Io { .. }), "EIO");
}

/// One operator's command over few names and ports, so that they meet.
#[derive(Clone, Debug)]
enum Act {
    Add(u8, u16),
    Move(u8, u16),
    Suspend(u8, bool),
    Remove(u8),
    Reopen,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        (0..4u8, 1..5u16).prop_map(|(name, port)| Act::Add(name, port)),
        (0..4u8, 1..5u16).prop_map(|(name, port)| Act::Move(name, port)),
        (0..4u8, any::<bool>()).prop_map(|(name, suspended)| Act::Suspend(name, suspended)),
        (0..4u8).prop_map(Act::Remove),
        Just(Act::Reopen),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_database_is_a_map_of_names_whatever_is_done(acts in prop::collection::vec(act(), 1..24)) {
        let dir = dir();
        let mut db = ControlDb::open(dir.path()).unwrap();
        let mut model: BTreeMap<String, (TenantId, u16, bool)> = BTreeMap::new();
        let mut newest = 0;
        for act in acts {
            let id = |model: &BTreeMap<String, (TenantId, u16, bool)>, name: u8| {
                model.get(&format!("t{name}")).map_or(TenantId(9_999), |row| row.0)
            };
            let taken = |model: &BTreeMap<String, (TenantId, u16, bool)>, port: u16, by: TenantId| {
                model.values().any(|row| row.1 == port && row.0 != by)
            };
            match act {
                Act::Add(name, port) => {
                    let free = !model.contains_key(&format!("t{name}")) && !taken(&model, port, TenantId(0));
                    let added = db.add_tenant(&named(&format!("t{name}"), port), None, NOW);
                    prop_assert_eq!(added.is_ok(), free);
                    if let Ok((row, _)) = added {
                        prop_assert!(row.id.0 > newest, "numbers only grow");
                        newest = row.id.0;
                        model.insert(row.name, (row.id, port, false));
                    }
                }
                Act::Move(name, port) => {
                    let id = id(&model, name);
                    let update = TenantUpdate { port: Some(port), ..TenantUpdate::default() };
                    let may = id != TenantId(9_999) && !taken(&model, port, id);
                    prop_assert_eq!(db.update_tenant(id, &update).is_ok(), may);
                    if may {
                        model.get_mut(&format!("t{name}")).unwrap().1 = port;
                    }
                }
                Act::Suspend(name, suspended) => {
                    let update = TenantUpdate { suspended: Some(suspended), ..TenantUpdate::default() };
                    let done = db.update_tenant(id(&model, name), &update).is_ok();
                    let row = model.get_mut(&format!("t{name}"));
                    prop_assert_eq!(done, row.is_some());
                    if let Some(row) = row {
                        row.2 = suspended;
                    }
                }
                Act::Remove(name) => {
                    let done = db.remove_tenant(id(&model, name)).is_ok();
                    prop_assert_eq!(done, model.remove(&format!("t{name}")).is_some());
                }
                Act::Reopen => {
                    drop(db);
                    db = ControlDb::open(dir.path()).unwrap();
                }
            }
            let rows = db.tenants().unwrap().into_iter().map(|row| (row.name, (row.id, row.port, row.suspended)));
            prop_assert_eq!(rows.collect::<BTreeMap<_, _>>(), model.clone());
        }
    }
}
