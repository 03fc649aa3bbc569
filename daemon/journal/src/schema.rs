//! Opening a database: its settings, its check, its migrations.

use crate::DbError;
use fail::fail_point;
use rusqlite::{Connection, OpenFlags};
use std::fs::{self, File, FileType, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What a database file is.
#[derive(Clone, Copy)]
pub(crate) struct Kind {
    /// Stands in its header, and in no other kind's.
    pub application_id: i32,
    /// Its schema.
    pub migrations: Migrations,
    /// Who else may open it meanwhile.
    pub sharing: Sharing,
    /// Whether the copy from before a migration stays. One with prompts does not: nothing would ever delete them.
    pub keeps_copy: bool,
}

/// control.db: "pgdd".
pub(crate) const CONTROL_DB: Kind =
    Kind { application_id: 0x7067_6464, migrations: CONTROL, sharing: Sharing::Shared, keeps_copy: true };

/// journal.db: "pgdj".
pub(crate) const JOURNAL_DB: Kind =
    Kind { application_id: 0x7067_646a, migrations: JOURNAL, sharing: Sharing::Exclusive, keeps_copy: false };

/// How long another process may hold the database.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// Statements that bring a database from version `n` to `n + 1`, where `n` is the place in the list.
pub(crate) type Migrations = &'static [&'static str];

/// control.db. A released entry never changes; a change of the schema is a further entry.
pub(crate) const CONTROL: Migrations = &["
    CREATE TABLE meta (
        key TEXT NOT NULL PRIMARY KEY,
        value BLOB NOT NULL
    ) STRICT, WITHOUT ROWID;
    -- AUTOINCREMENT: the number of a removed tenant is never used again, so that what still names it names nobody.
    CREATE TABLE tenants (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        name TEXT NOT NULL UNIQUE,
        port INTEGER NOT NULL UNIQUE CHECK (port BETWEEN 1 AND 65535),
        model TEXT NOT NULL,
        kv_floor TEXT NOT NULL,
        kv_ceiling TEXT NOT NULL,
        auth INTEGER NOT NULL CHECK (auth IN (0, 1)),
        suspended INTEGER NOT NULL CHECK (suspended IN (0, 1)),
        created_unix INTEGER NOT NULL
    ) STRICT;
    CREATE TABLE keys (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        tenant INTEGER NOT NULL REFERENCES tenants (id) ON DELETE CASCADE,
        label TEXT,
        prefix TEXT NOT NULL,
        sha256 BLOB NOT NULL UNIQUE CHECK (length(sha256) = 32),
        created_unix INTEGER NOT NULL,
        revoked_unix INTEGER
    ) STRICT;
    CREATE INDEX keys_of_tenant ON keys (tenant);
    INSERT INTO meta (key, value) VALUES ('installation_secret', randomblob(32));
", "
    ALTER TABLE tenants ADD COLUMN prompt_lookup INTEGER CHECK (prompt_lookup IN (0, 1));
", "
    ALTER TABLE tenants ADD COLUMN retention_ms INTEGER CHECK (retention_ms >= 0);
", "
    -- Numbers of removed tenants whose requests the journal may still have.
    CREATE TABLE removed (tenant INTEGER PRIMARY KEY) STRICT;
", "
    -- NULL is without a limit.
    ALTER TABLE tenants ADD COLUMN requests_per_minute INTEGER CHECK (requests_per_minute > 0);
    ALTER TABLE tenants ADD COLUMN tokens_per_minute INTEGER CHECK (tokens_per_minute > 0);
    ALTER TABLE tenants ADD COLUMN max_concurrent INTEGER CHECK (max_concurrent > 0);
    ALTER TABLE tenants ADD COLUMN max_queued_requests INTEGER CHECK (max_queued_requests > 0);
    ALTER TABLE tenants ADD COLUMN max_queued_tokens INTEGER CHECK (max_queued_tokens > 0);
", "
    -- By the hour (seconds since 1970 over 3600) in which requests ended. It names tenants and keys that may be gone; `key` is 0 where
    -- none was needed.
    CREATE TABLE usage (
        tenant INTEGER NOT NULL,
        hour INTEGER NOT NULL,
        key INTEGER NOT NULL,
        model TEXT NOT NULL,
        requests INTEGER NOT NULL,
        aborted INTEGER NOT NULL,
        failed INTEGER NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        cached_tokens INTEGER NOT NULL,
        output_tokens INTEGER NOT NULL,
        PRIMARY KEY (tenant, hour, key, model)
    ) STRICT, WITHOUT ROWID;
    -- Up to which of its bills a journal's are in `usage`.
    CREATE TABLE billed (
        journal BLOB NOT NULL PRIMARY KEY CHECK (length(journal) = 16),
        through INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
    -- Names of all tenants there were, for the bill of those that are gone.
    CREATE TABLE names (tenant INTEGER PRIMARY KEY, name TEXT NOT NULL) STRICT;
    INSERT INTO names (tenant, name) SELECT id, name FROM tenants;
    CREATE TRIGGER names_stay AFTER INSERT ON tenants BEGIN
        INSERT INTO names (tenant, name) VALUES (new.id, new.name);
    END;
", "
    -- Limits of the tenant's cgroup, one a line; NULL is none.
    ALTER TABLE tenants ADD COLUMN limits TEXT;
"];

/// journal.db. `requests` is small and changes, `bodies` is large and does not: SQLite writes a changed row anew, whole.
pub(crate) const JOURNAL: Migrations = &["
    CREATE TABLE meta (
        key TEXT NOT NULL PRIMARY KEY,
        value INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE requests (
        seq INTEGER PRIMARY KEY,
        id BLOB NOT NULL UNIQUE CHECK (length(id) = 16),
        tenant INTEGER NOT NULL,
        idempotency_key BLOB CHECK (length(idempotency_key) = 32),
        idempotency_body BLOB CHECK (length(idempotency_body) = 32),
        finished_unix INTEGER,
        replays INTEGER NOT NULL DEFAULT 0,
        -- Of its body and, once it has ended, its log: about.
        bytes INTEGER NOT NULL,
        -- Its entries stand in steps in [first_step, last_step], and in no others.
        first_step INTEGER NOT NULL,
        last_step INTEGER,
        damaged INTEGER NOT NULL DEFAULT 0 CHECK (damaged IN (0, 1))
    ) STRICT;
    CREATE INDEX requests_by_key ON requests (tenant, idempotency_key) WHERE idempotency_key IS NOT NULL;
    CREATE INDEX finished ON requests (tenant, finished_unix, bytes) WHERE finished_unix IS NOT NULL;
    CREATE TABLE bodies (
        request INTEGER PRIMARY KEY,
        body BLOB NOT NULL
    ) STRICT;
    -- Entries [first, first + count) of a request's log. In the order of folds, so that one fold fills few pages.
    CREATE TABLE logs (
        id INTEGER PRIMARY KEY,
        request INTEGER NOT NULL,
        first INTEGER NOT NULL,
        count INTEGER NOT NULL,
        entries BLOB NOT NULL
    ) STRICT;
    CREATE UNIQUE INDEX logs_by_request ON logs (request, first, count);
    -- What was appended since the last fold: a batch's entries of one tenant's requests, in order.
    CREATE TABLE steps (
        id INTEGER PRIMARY KEY,
        step INTEGER NOT NULL,
        tenant INTEGER NOT NULL,
        entries BLOB NOT NULL
    ) STRICT;
    INSERT INTO meta (key, value) VALUES ('syncs', 0);
", "
    ALTER TABLE requests ADD COLUMN model_digest BLOB CHECK (length(model_digest) = 16);
    -- Prompt tokens that it found in the prefix cache; NULL until it has started.
    ALTER TABLE requests ADD COLUMN cached_tokens INTEGER;
", "
    -- The installation whose tenants and keys are meant by their numbers: one row, and none before the file was used beside a control.db.
    -- And the highest numbers that are known to have been given, also to those of whom nothing is left.
    CREATE TABLE installation (
        id BLOB NOT NULL CHECK (length(id) = 16),
        tenant INTEGER NOT NULL,
        key INTEGER NOT NULL
    ) STRICT;
    -- Tenants that control.db does not know, and since when.
    CREATE TABLE strangers (
        tenant INTEGER PRIMARY KEY,
        since_unix INTEGER NOT NULL
    ) STRICT;
    -- Number of the key that made it, 0 where there was none; NULL where an older pagedd took it: then it stands in the body alone.
    ALTER TABLE requests ADD COLUMN key INTEGER;
    CREATE TRIGGER numbers_stay AFTER DELETE ON requests BEGIN
        UPDATE installation SET tenant = max(tenant, old.tenant), key = max(key, coalesce(old.key, 0))
        WHERE old.tenant > tenant OR coalesce(old.key, 0) > key;
    END;
", "
    -- For its bill, without reading its body. NULL where an older pagedd took it.
    ALTER TABLE requests ADD COLUMN model TEXT;
    ALTER TABLE requests ADD COLUMN prompt_tokens INTEGER;
    -- What requests used that have ended, by transaction and payer (`key` is 0 where there was none), until control.db has it.
    -- AUTOINCREMENT: no number is given twice, so that what was added up once is not added again.
    CREATE TABLE bills (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        at_unix INTEGER NOT NULL,
        tenant INTEGER NOT NULL,
        key INTEGER NOT NULL,
        model TEXT NOT NULL,
        requests INTEGER NOT NULL,
        aborted INTEGER NOT NULL,
        failed INTEGER NOT NULL,
        prompt_tokens INTEGER NOT NULL,
        cached_tokens INTEGER NOT NULL,
        output_tokens INTEGER NOT NULL
    ) STRICT;
    -- Whose numbers those of bills are: one row.
    CREATE TABLE ledger (id BLOB NOT NULL CHECK (length(id) = 16)) STRICT;
    INSERT INTO ledger (id) VALUES (randomblob(16));
"];

/// Who else may open the file meanwhile.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sharing {
    /// Other processes, between transactions.
    Shared,
    /// Nobody: the lock is held as long as the connection is, so that no stranger's lock can come between.
    Exclusive,
}

/// Opens `path` (mode 0600, made where it is missing), checks it and brings it to the newest version.
pub(crate) fn open(path: &Path, kind: Kind) -> Result<Connection, DbError> {
    open_or_make(path, kind).map(|(db, _)| db)
}

/// [`open`], and whether the database was made now.
pub(crate) fn open_or_make(path: &Path, kind: Kind) -> Result<(Connection, bool), DbError> {
    make_private(path)?;
    open_there(path, kind).map_err(|error| match error {
        // What SQLite says of a file with the attribute `i` is an I/O error. Nothing has the file open any more.
        DbError::Sql { .. } if !is_writable(path) => DbError::ReadOnly { path: path.to_path_buf() },
        error => error,
    })
}

fn open_there(path: &Path, kind: Kind) -> Result<(Connection, bool), DbError> {
    let sql = |error| DbError::sql(path, error);
    let mut db = Connection::open(path).map_err(sql)?;
    db.busy_timeout(BUSY_TIMEOUT).map_err(sql)?;
    if kind.sharing == Sharing::Exclusive {
        // Before the first read: the index of the log then is in memory, and there is no third file.
        db.pragma_update_and_check(None, "locking_mode", "exclusive", |_| Ok(())).map_err(sql)?;
    }
    let version = check(&db, path, kind, "quick_check")?;
    db.pragma_update_and_check(None, "journal_mode", "wal", |_| Ok(())).map_err(sql)?;
    db.pragma_update(None, "synchronous", "full").map_err(sql)?;
    db.pragma_update(None, "foreign_keys", true).map_err(sql)?;
    db.pragma_update(None, "trusted_schema", false).map_err(sql)?;
    migrate(&mut db, path, version, kind)?;
    Ok((db, version == 0))
}

/// A database of the newest version that is in memory only. `path` is what errors name.
pub(crate) fn in_memory(path: &Path, kind: Kind) -> Result<Connection, DbError> {
    let mut db = Connection::open_in_memory().map_err(|error| DbError::sql(path, error))?;
    migrate(&mut db, path, 0, kind)?;
    Ok(db)
}

/// Opens a database that nobody writes any more, for reading, and reads all of it: a [saved](save) one.
pub(crate) fn open_saved(path: &Path, kind: Kind) -> Result<Connection, DbError> {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let db = Connection::open_with_flags(path, flags).map_err(|error| DbError::sql(path, error))?;
    let found = check(&db, path, kind, "integrity_check")?;
    // An empty one is nobody's.
    if found == 0 { Err(DbError::Foreign { path: path.to_path_buf() }) } else { Ok(db) }
}

/// Makes the file before SQLite does, so that it never has another mode; SQLite gives its side files the same.
fn make_private(path: &Path) -> Result<(), DbError> {
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
        Ok(_) => Ok(()),
        // By path: opening and closing the file beside SQLite would drop its locks.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let io = |error| DbError::io(path, error);
            let metadata = fs::metadata(path).map_err(io)?;
            if !metadata.is_file() {
                return Err(DbError::NoFile { path: path.to_path_buf(), is: kind_of(metadata.file_type()) });
            }
            if metadata.permissions().mode() & 0o777 == 0o600 {
                return Ok(());
            }
            fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(io)
        }
        Err(error) => Err(DbError::io(path, error)),
    }
}

/// What stands where a file should, in words.
fn kind_of(found: FileType) -> &'static str {
    if found.is_dir() {
        "a directory"
    } else if found.is_fifo() {
        "a FIFO"
    } else if found.is_socket() {
        "a socket"
    } else {
        "a device"
    }
}

fn is_writable(path: &Path) -> bool {
    OpenOptions::new().append(true).open(path).is_ok()
}

/// The version of a database that is whole and pagedd's own, or empty.
fn check(db: &Connection, path: &Path, kind: Kind, how: &str) -> Result<u32, DbError> {
    let sql = |error| DbError::sql(path, error);
    let pragma = |name: &str| db.pragma_query_value(None, name, |row| row.get::<_, i64>(0)).map_err(sql);
    let tables: i64 =
        db.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0)).map_err(sql)?;
    if tables > 0 && pragma("application_id")? != i64::from(kind.application_id) {
        return Err(DbError::Foreign { path: path.to_path_buf() });
    }
    let known = kind.migrations.len() as u32;
    let found = u32::try_from(pragma("user_version")?).unwrap_or(u32::MAX);
    if found > known {
        return Err(DbError::NewerSchema { path: path.to_path_buf(), found, known });
    }
    let verdict: String = db.query_row(&format!("PRAGMA {how}(1)"), [], |row| row.get(0)).map_err(sql)?;
    if verdict != "ok" {
        return Err(DbError::Corrupt { path: path.to_path_buf(), detail: verdict.replace('\n', " ") });
    }
    Ok(found)
}

/// Applies what is missing in one transaction, after a copy of what is there.
fn migrate(db: &mut Connection, path: &Path, version: u32, kind: Kind) -> Result<(), DbError> {
    let sql = |error| DbError::sql(path, error);
    let Kind { application_id, migrations, keeps_copy, .. } = kind;
    let missing = &migrations[version as usize..];
    if missing.is_empty() {
        return Ok(());
    }
    let mut copy = None;
    if version > 0 {
        let backup = back_up(db, path, version)?;
        tracing::info!(
            path = %path.display(), from = version, to = migrations.len(), backup = %backup.display(), "migrating database"
        );
        copy = Some(backup);
    }
    let transaction = db.transaction().map_err(sql)?;
    for statements in missing {
        transaction.execute_batch(statements).map_err(sql)?;
    }
    transaction.pragma_update(None, "application_id", application_id).map_err(sql)?;
    transaction.pragma_update(None, "user_version", migrations.len() as u32).map_err(sql)?;
    fail_point!("journal-migrate");
    transaction.commit().map_err(sql)?;
    match copy.filter(|_| !keeps_copy) {
        Some(copy) => fs::remove_file(&copy).map_err(|error| DbError::io(&copy, error)),
        None => Ok(()),
    }
}

/// Copies the database to `<path>.v<version>`, whole or not at all.
fn back_up(db: &Connection, path: &Path, version: u32) -> Result<PathBuf, DbError> {
    let with = |suffix: String| {
        let mut name = path.as_os_str().to_owned();
        name.push(suffix);
        PathBuf::from(name)
    };
    let (backup, partial) = (with(format!(".v{version}")), with(format!(".v{version}.partial")));
    let io = |error| DbError::io(&partial, error);
    match fs::remove_file(&partial) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(io(error)),
        Ok(()) | Err(_) => {}
    }
    save(db, &partial)?;
    fs::rename(&partial, &backup).map_err(io)?;
    // The copy's name must be on disk before what it replaces is changed.
    if let Some(directory) = path.parent() {
        File::open(directory).and_then(|directory| directory.sync_all()).map_err(io)?;
    }
    Ok(backup)
}

/// Writes all that is committed to a new file at `to` (mode 0600), on disk when it returns.
pub(crate) fn save(db: &Connection, to: &Path) -> Result<(), DbError> {
    let io = |error| DbError::io(to, error);
    // SQLite takes an empty file as its target, and leaves the mode.
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(to).map_err(io)?;
    let target = to.to_str().ok_or_else(|| {
        io(io::Error::new(io::ErrorKind::InvalidInput, "the state directory's path is not UTF-8"))
    })?;
    db.execute("VACUUM INTO ?1", [target]).map_err(|error| DbError::sql(to, error))?;
    file.sync_all().map_err(io)
}
