//! journal.db: what was taken and what was computed.
//!
//! **Owns** the connection, and which requests of the file are live. **Never** waits but for the disk and for a lock.
//!
//! A batch of records is one transaction. An admission is a row of `requests` and one of `bodies`; the entries of a batch
//! are one row of `steps` per tenant. A [fold](JournalDb::fold) moves them from there to `logs`, by request, so that what is
//! deleted with a request is all that there was of it.

use crate::saved::{StepEntry, seal};
use crate::schema::{self, JOURNAL_DB, Kind};
use crate::usage::{self, Meter, Names, Outcome, Unbilled, computed};
use crate::{Admission, Bound, DbError, Entry};
use fail::fail_point;
use pagedd_core::{RequestId, TenantId};
use rusqlite::config::DbConfig;
use rusqlite::{Connection, Params, Row, params};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::mem;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Pages in the write-ahead log from which on a commit also moves them to the file: 4 MiB. Most of them are later states of the same
/// few pages, so that a longer log is less work; its index is in memory.
const CHECKPOINT_PAGES: u32 = 1024;

/// Memory for pages of the file, in KiB. What is read again is at its end.
const CACHE_KIB: i64 = 256;

/// What an entry of a log takes, about.
pub(crate) const ENTRY_BYTES: i64 = 6;

/// How long another connection may hold the file. Only a stranger's could: tokens wait for it.
const BUSY_TIMEOUT: Duration = Duration::from_millis(250);

/// When a commit is on disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fsync {
    /// This long after it at most: [`JournalDb::sync`] is called as often. Only the loss of power can lose it before.
    Interval(Duration),
    /// When it is made.
    Every,
    /// When the kernel likes.
    Never,
}

/// What is written.
#[derive(Clone, PartialEq, Debug)]
pub enum Record {
    /// A request was taken.
    Admission(Arc<Admission>),
    /// Something was computed.
    Step(Step),
}

/// What a step gave: each entry goes to the end of its request's log. What is said of a request that is not kept, or has ended, is
/// left out.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Step {
    /// Requests of which this was the first step, with the prompt tokens that each found in the prefix cache.
    pub started: Vec<(RequestId, u32)>,
    /// In order.
    pub entries: Vec<(RequestId, Entry)>,
    /// Of requests that end here, the prompt tokens that were computed or found in the cache. Without a word of it, all of a request that
    /// has started.
    pub prompts: Vec<(RequestId, u32)>,
}

/// The open journal. One value owns the one connection there is; every change is one transaction.
#[derive(Debug)]
pub struct JournalDb {
    pub(crate) db: Connection,
    pub(crate) path: PathBuf,
    fsync: Fsync,
    /// Requests that have not ended.
    pub(crate) live: HashMap<RequestId, Live>,
    /// Names of their models.
    pub(crate) names: Names,
    /// What ended while nothing could be written.
    pub(crate) unbilled: Unbilled,
    /// Bills are to have numbers above this one, which the file does not say yet.
    pub(crate) bills_after: Option<i64>,
    next_request: i64,
    next_step: i64,
    /// Rows in `steps`.
    pub(crate) unfolded: u64,
    /// There are commits that were not synced.
    unsynced: bool,
    /// The write-ahead log may hold what was deleted.
    pub(crate) unclean: bool,
    /// The file's live requests are not known to whoever makes snapshots.
    pub(crate) unread: bool,
    /// What a first [`bind`](JournalDb::bind) finds.
    pub(crate) unbound: Bound,
    /// Tenants that control.db does not know: who makes snapshots does not, either.
    pub(crate) strangers: BTreeSet<TenantId>,
}

/// What a commit waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Commit {
    /// The disk.
    Synced,
    /// Nothing; after a loss of power, the commits before some moment are there.
    Ordered,
    /// Nothing; after a loss of power, the file may be damaged.
    Unordered,
}

/// A request that has not ended.
#[derive(Clone, Debug)]
pub(crate) struct Live {
    /// Its row.
    pub seq: i64,
    pub tenant: TenantId,
    /// Entries of its log, for its size: too many after a batch that was not committed.
    pub entries: u32,
    /// What it has used.
    pub meter: Meter,
}

impl JournalDb {
    /// Opens `journal.db` in `state_dir`, which must be there; makes, checks and migrates it as needed. No other connection
    /// reads or writes the file until this one is dropped.
    ///
    /// # Errors
    /// Each names the file.
    pub fn open(state_dir: &Path, fsync: Fsync) -> Result<Self, DbError> {
        Self::open_as(state_dir, fsync, JOURNAL_DB)
    }

    pub(crate) fn open_as(state_dir: &Path, fsync: Fsync, kind: Kind) -> Result<Self, DbError> {
        let path = state_dir.join("journal.db");
        let (db, made) = schema::open_or_make(&path, kind)?;
        let journal = Self::over(db, path, fsync)?;
        Ok(Self { unbound: if made { Bound::Made } else { Bound::Adopted }, ..journal })
    }

    /// An empty one in memory, for the one in `state_dir` as long as that cannot be had.
    pub(crate) fn stand_in(state_dir: &Path, fsync: Fsync) -> Result<Self, DbError> {
        let path = state_dir.join("journal.db");
        Self::over(schema::in_memory(&path, JOURNAL_DB)?, path, fsync)
    }

    fn over(db: Connection, path: PathBuf, fsync: Fsync) -> Result<Self, DbError> {
        let sql = |error| DbError::sql(&path, error);
        db.busy_timeout(BUSY_TIMEOUT).map_err(sql)?;
        db.set_prepared_statement_cache_capacity(64);
        // Without it a statement over a table with a partial index is planned anew with each binding.
        db.set_db_config(DbConfig::SQLITE_DBCONFIG_ENABLE_QPSG, true).map_err(sql)?;
        // Deleted prompts and tokens do not rest in free pages.
        db.pragma_update_and_check(None, "secure_delete", true, |_| Ok(())).map_err(sql)?;
        db.pragma_update_and_check(None, "wal_autocheckpoint", CHECKPOINT_PAGES, |_| Ok(())).map_err(sql)?;
        db.pragma_update(None, "cache_size", -CACHE_KIB).map_err(sql)?;
        let mut journal = Self::of(db, path, fsync);
        journal.synchronous(journal.usual())?;
        journal.load()?;
        Ok(journal)
    }

    /// A [saved](Self::save) journal, for reading only.
    pub(crate) fn over_saved(db: Connection, path: PathBuf) -> Self {
        Self::of(db, path, Fsync::Never)
    }

    fn of(db: Connection, path: PathBuf, fsync: Fsync) -> Self {
        Self {
            db,
            path,
            fsync,
            live: HashMap::new(),
            names: Names::default(),
            unbilled: Unbilled::new(),
            bills_after: None,
            next_request: 1,
            next_step: 1,
            unfolded: 0,
            unsynced: true,
            unclean: true,
            unread: false,
            unbound: Bound::Made,
            strangers: BTreeSet::new(),
        }
    }

    /// Writes all that is committed to a new file, on disk when it returns. Nothing is committed meanwhile.
    ///
    /// # Errors
    /// Each names the new file, which may be there in part.
    pub fn save(&self, to: &Path) -> Result<(), DbError> {
        schema::save(&self.db, to)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// When a commit is on disk.
    pub const fn fsync(&self) -> Fsync {
        self.fsync
    }

    /// Rows that a [fold](Self::fold) would move.
    pub const fn unfolded(&self) -> u64 {
        self.unfolded
    }

    /// Writes records in order, all or none. Visible to every reader of this value at once, on disk as [`Fsync`] says.
    /// `now_unix` is kept as the time at which the requests ended that end here.
    ///
    /// # Errors
    /// [`DbError::DiskFull`], [`DbError::Locked`] and those of a broken disk. Nothing has changed; where only the sync failed,
    /// the next start may find the batch, whole.
    pub fn append(&mut self, batch: &[Record], now_unix: u64) -> Result<(), DbError> {
        self.append_at(self.usual(), batch, now_unix)
    }

    /// [`append`](Self::append), with a commit that waits for this.
    pub(crate) fn append_at(&mut self, at: Commit, batch: &[Record], now_unix: u64) -> Result<(), DbError> {
        if batch.is_empty() {
            return Ok(());
        }
        let mut batched = Batch::new(self);
        let (mut live, mut names) = (mem::take(&mut self.live), mem::take(&mut self.names));
        let done = self.transact(at, |change| {
            for record in batch {
                match record {
                    Record::Admission(admission) => batched.admit(change, admission, &mut names)?,
                    Record::Step(step) => {
                        for (request, cached_tokens) in &step.started {
                            batched.start(&mut live, *request, *cached_tokens);
                        }
                        for (request, entry) in &step.entries {
                            batched.entry(&mut live, *request, *entry, (step, now_unix));
                        }
                    }
                }
            }
            batched.write(change, now_unix)?;
            fail_point!("journal-append", |_| Err(DbError::DiskFull { path: change.path().to_path_buf() }));
            Ok(())
        });
        if done.is_err() {
            batched.give_back(&mut live);
        }
        (self.live, self.names) = (live, names);
        done?;
        self.committed(at);
        let Batch { next_request, admitted, ended, rows, .. } = batched;
        self.next_request = next_request;
        self.next_step += 1;
        self.unfolded += rows.len() as u64;
        self.live.extend(admitted);
        for request in ended.keys() {
            self.live.remove(request);
        }
        Ok(())
    }

    /// Makes durable what was committed and is not yet: an fsync, by a commit that waits for it. Does nothing where there is
    /// nothing to do, or with [`Fsync::Never`].
    ///
    /// # Errors
    /// As for [`append`](Self::append): what was committed before is committed still.
    pub fn sync(&mut self) -> Result<(), DbError> {
        if !self.unsynced || self.fsync == Fsync::Never {
            return Ok(());
        }
        self.touch()
    }

    /// Writes something, and waits until it and all before it is on disk: shows whether there is room again, too.
    pub(crate) fn touch(&mut self) -> Result<(), DbError> {
        self.transact(Commit::Synced, |change| {
            change.execute("UPDATE meta SET value = value + 1 WHERE key = 'syncs'", [])?;
            fail_point!("journal-sync", |_| Err(DbError::DiskFull { path: change.path().to_path_buf() }));
            Ok(())
        })?;
        self.committed(Commit::Synced);
        Ok(())
    }

    /// Whether there are commits that a loss of power would undo.
    pub const fn unsynced(&self) -> bool {
        self.unsynced
    }

    /// Requests that have not ended.
    pub fn live(&self) -> usize {
        self.live.len()
    }

    /// How commits are made unless more is asked for.
    pub(crate) const fn usual(&self) -> Commit {
        match self.fsync {
            Fsync::Interval(_) => Commit::Ordered,
            Fsync::Every => Commit::Synced,
            Fsync::Never => Commit::Unordered,
        }
    }

    fn synchronous(&self, at: Commit) -> Result<(), DbError> {
        let mode = match at {
            Commit::Synced => "full",
            Commit::Ordered => "normal",
            Commit::Unordered => "off",
        };
        self.db.pragma_update(None, "synchronous", mode).map_err(|error| DbError::sql(&self.path, error))
    }

    /// Reads from the file what this value knows of it.
    pub(crate) fn load(&mut self) -> Result<(), DbError> {
        let sql = |error| DbError::sql(&self.path, error);
        let next = |query: &str| self.db.query_row(query, [], |row| row.get::<_, i64>(0)).map_err(sql);
        let next_request = next("SELECT coalesce(max(seq), 0) + 1 FROM requests")?;
        let next_step = next(
            "SELECT 1 + max(
                 (SELECT coalesce(max(step), 0) FROM steps),
                 (SELECT coalesce(max(max(first_step), max(coalesce(last_step, 0))), 0) FROM requests))",
        )?;
        let unfolded = next("SELECT count(*) FROM steps")?;
        let live = usage::live(&self.db, &self.path, &mut self.names)?;
        (self.next_request, self.next_step, self.unfolded) = (next_request, next_step, unfolded as u64);
        self.live = live;
        Ok(())
    }

    /// One transaction, dropped without a trace where `act` fails.
    pub(crate) fn transact<T>(
        &self,
        at: Commit,
        act: impl FnOnce(&Change<'_>) -> Result<T, DbError>,
    ) -> Result<T, DbError> {
        let other = at != self.usual();
        if other {
            self.synchronous(at)?;
        }
        let done = self.transact_now(act);
        if other {
            self.synchronous(self.usual())?;
        }
        done
    }

    fn transact_now<T>(&self, act: impl FnOnce(&Change<'_>) -> Result<T, DbError>) -> Result<T, DbError> {
        let change = Change { db: &self.db, path: &self.path, bills_after: self.bills_after };
        change.execute("BEGIN IMMEDIATE", [])?;
        let done = act(&change).and_then(|done| change.execute("COMMIT", []).map(|_| done));
        // SQLite has rolled back by itself after some failures.
        if done.is_err() && !self.db.is_autocommit() {
            change.execute("ROLLBACK", [])?;
        }
        done
    }

    /// The number of the last record of steps.
    pub(crate) const fn last_step(&self) -> i64 {
        self.next_step - 1
    }

    /// What is live in the file is not known to whoever makes snapshots: it stays for the next start.
    pub(crate) fn keep_live(&mut self) {
        self.unread = !self.live.is_empty();
        if self.unread {
            tracing::warn!(
                requests = self.live.len(),
                "requests of an earlier daemon wait for the next start"
            );
        }
    }

    /// Bills for those of these requests that are live: they go without an end of their own.
    pub(crate) fn bills_of_live(
        &self,
        requests: impl Iterator<Item = RequestId>,
        outcome: Outcome,
        now_unix: u64,
    ) -> Unbilled {
        let mut bills = Unbilled::new();
        for live in requests.filter_map(|request| self.live.get(&request)) {
            usage::add(&mut bills, now_unix, live.meter.bill_as(outcome, live.tenant));
        }
        bills
    }

    /// A request is not kept any more.
    pub(crate) fn forget(&mut self, request: RequestId) {
        self.live.remove(&request);
    }

    /// There was a commit.
    pub(crate) fn committed(&mut self, at: Commit) {
        self.unsynced = at != Commit::Synced;
    }
}

/// What a batch comes to, beside what is written at once: taken over once it is committed.
struct Batch {
    /// The number of its record of steps.
    step: i64,
    next_request: i64,
    admitted: HashMap<RequestId, Live>,
    /// Request rows that start in it, with the prompt tokens that were cached.
    started: Vec<(i64, u32)>,
    /// Requests that end in it, with their rows and the bytes of their logs.
    ended: HashMap<RequestId, (i64, i64)>,
    /// Entries by tenant, and the request row of the last.
    rows: BTreeMap<TenantId, (Vec<StepEntry>, i64)>,
    bills: Unbilled,
}

impl Batch {
    fn new(journal: &JournalDb) -> Self {
        Self {
            step: journal.next_step,
            next_request: journal.next_request,
            admitted: HashMap::new(),
            started: Vec::new(),
            ended: HashMap::new(),
            rows: BTreeMap::new(),
            bills: Unbilled::new(),
        }
    }

    fn admit(
        &mut self,
        change: &Change<'_>,
        admission: &Admission,
        names: &mut Names,
    ) -> Result<(), DbError> {
        change.insert_request(self.next_request, admission, self.step)?;
        let meter = Meter::of(&admission.saved, names.get(&admission.saved.model));
        let live = Live { seq: self.next_request, tenant: admission.tenant, entries: 0, meter };
        self.admitted.insert(admission.request, live);
        self.next_request += 1;
        Ok(())
    }

    fn start(&mut self, live: &mut HashMap<RequestId, Live>, request: RequestId, cached_tokens: u32) {
        if let Some(Live { seq, meter, .. }) =
            live.get_mut(&request).or_else(|| self.admitted.get_mut(&request))
        {
            meter.start(cached_tokens);
            self.started.push((*seq, cached_tokens));
        }
    }

    /// An entry of a step that is committed at this time.
    fn entry(
        &mut self,
        live: &mut HashMap<RequestId, Live>,
        request: RequestId,
        entry: Entry,
        (step, now_unix): (&Step, u64),
    ) {
        let found = live.get_mut(&request).or_else(|| self.admitted.get_mut(&request));
        let Some(Live { seq, tenant, entries: count, meter }) = found else { return };
        if !self.ended.is_empty() && self.ended.contains_key(&request) {
            return;
        }
        *count += 1;
        meter.take(entry);
        let (entries, last) = self.rows.entry(*tenant).or_default();
        entries.push(StepEntry { behind: *seq - *last, entry });
        *last = *seq;
        if matches!(entry, Entry::End { .. }) {
            self.ended.insert(request, (*seq, i64::from(*count) * ENTRY_BYTES));
            usage::add(&mut self.bills, now_unix, meter.bill(*tenant, computed(step, request)));
        }
    }

    /// Nothing of it was committed.
    fn give_back(&self, live: &mut HashMap<RequestId, Live>) {
        let by_row: HashMap<i64, RequestId> =
            live.iter().map(|(request, live)| (live.seq, *request)).collect();
        for (entries, _) in self.rows.values() {
            let mut seq = 0;
            for StepEntry { behind, entry } in entries {
                seq += behind;
                if let Some(live) = by_row.get(&seq).and_then(|request| live.get_mut(request)) {
                    live.meter.give_back(*entry);
                }
            }
        }
    }

    fn write(&self, change: &Change<'_>, now_unix: u64) -> Result<(), DbError> {
        for (seq, cached_tokens) in &self.started {
            change.execute(
                "UPDATE requests SET cached_tokens = ?2 WHERE seq = ?1",
                params![seq, cached_tokens],
            )?;
        }
        for (seq, bytes) in self.ended.values() {
            change.execute(
                "UPDATE requests SET finished_unix = ?2, last_step = ?3, bytes = bytes + ?4 WHERE seq = ?1",
                params![seq, now_unix as i64, self.step, bytes],
            )?;
        }
        for (tenant, (entries, _)) in &self.rows {
            change.execute(
                "INSERT INTO steps (step, tenant, entries) VALUES (?1, ?2, ?3)",
                params![self.step, tenant.0, change.seal(entries)?],
            )?;
        }
        usage::write(change, &self.bills)
    }
}

/// A transaction under way. Its statements are prepared once, `BEGIN` and `COMMIT`, too.
pub(crate) struct Change<'a> {
    db: &'a Connection,
    path: &'a Path,
    /// The number that the next bill follows at least.
    pub(crate) bills_after: Option<i64>,
}

impl Deref for Change<'_> {
    type Target = Connection;
    fn deref(&self) -> &Connection {
        self.db
    }
}

impl Change<'_> {
    /// The file.
    pub(crate) fn path(&self) -> &Path {
        self.path
    }

    /// Runs a statement; says how many rows it changed.
    pub(crate) fn execute(&self, statement: &str, parameters: impl Params) -> Result<usize, DbError> {
        let done = self.db.prepare_cached(statement).and_then(|mut s| s.execute(parameters));
        done.map_err(|error| DbError::sql(self.path, error))
    }

    /// Every row of a query.
    pub(crate) fn rows<T>(
        &self,
        query: &str,
        parameters: impl Params,
        read: impl FnMut(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Vec<T>, DbError> {
        rows(self.db, self.path, query, parameters, read)
    }

    /// Encodes a value for a column.
    pub(crate) fn seal<T: Serialize + ?Sized>(&self, value: &T) -> Result<Vec<u8>, DbError> {
        seal(value).map_err(|source| DbError::Encode { path: self.path.to_path_buf(), source })
    }

    /// Stores a request as row `seq`; the first record of steps that can name it is `step`.
    pub(crate) fn insert_request(&self, seq: i64, admission: &Admission, step: i64) -> Result<(), DbError> {
        let body = self.seal(&admission.saved)?;
        self.execute(
            "INSERT INTO requests
                 (seq, id, tenant, idempotency_key, idempotency_body, bytes, first_step, model_digest, key, model, prompt_tokens)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)",
            params![
                seq,
                admission.request.0,
                admission.tenant.0,
                admission.idempotency.map(|i| i.key),
                admission.idempotency.map(|i| i.body),
                body.len() as i64,
                step,
                admission.model_digest,
                admission.saved.key.unwrap_or(0),
                admission.saved.model,
                admission.saved.prompt.len() as i64,
            ],
        )?;
        self.execute("INSERT INTO bodies (request, body) VALUES (?1, ?2)", params![seq, body])?;
        Ok(())
    }
}

/// Every row of a query.
pub(crate) fn rows<T>(
    db: &Connection,
    path: &Path,
    query: &str,
    parameters: impl Params,
    read: impl FnMut(&Row<'_>) -> rusqlite::Result<T>,
) -> Result<Vec<T>, DbError> {
    let mut statement = db.prepare_cached(query).map_err(|error| DbError::sql(path, error))?;
    let rows = statement.query_map(parameters, read).and_then(Iterator::collect);
    rows.map_err(|error| DbError::sql(path, error))
}
