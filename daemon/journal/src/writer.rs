//! Writing while a daemon runs, disk full or not.
//!
//! **Owns** whether what was computed is durable, and when the journal is synced, folded and purged. **Never** reads a clock:
//! callers say what time it is; never keeps a record that it could not write: after one, only a snapshot can make the file
//! true again.
//!
//! ```text
//!            append fails                      snapshot written
//! Durable ───────────────────▶ Lost ─────────────────────────────▶ Durable
//!                              │  ▲
//!                              └──┘ append: counted; snapshot refused by the disk: later again
//! ```
//!
//! Where the file cannot be opened for want of room, or of the right to write it, a writer begins as `Lost`, over a database in memory
//! that stands in for the file until it can be.

use crate::{Bound, DbError, Expired, Fsync, Installation, JournalDb, Numbers, Record, Retention, Snapshot};
use pagedd_core::RequestId;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long after a failure the disk is tried again, at first and at most.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(15));
/// Records of steps from which on some are folded.
const FOLD_FROM: u64 = 512;
/// Records of steps that one fold moves at most: tokens wait for it. A request in few of them costs as much as one in all.
const FOLD_AT_ONCE: u64 = 256;
/// How long deleted bytes may stand in the write-ahead log.
const PURGE_AFTER: Duration = Duration::from_secs(5);

/// The time, as the caller has it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Now {
    /// For spans.
    pub instant: Instant,
    /// In seconds since 1970, for what is stored.
    pub unix: u64,
}

/// Whether what was computed survives the daemon.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Durability {
    /// It does.
    Durable,
    /// It does not: go on without.
    Lost {
        /// Since when, in seconds since 1970.
        since_unix: u64,
        /// Records that were not written since.
        records: u64,
        /// Why, as of the last try.
        reason: LossReason,
    },
}

/// Why records are lost.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LossReason {
    /// Room must be made.
    #[error("no space left on the file system of journal.db")]
    DiskFull,
    /// Another process holds the file.
    #[error("journal.db is locked by another process")]
    Locked,
    /// Something else, in one line.
    #[error("{0}")]
    Failed(String),
}

impl From<&DbError> for LossReason {
    fn from(error: &DbError) -> Self {
        match error {
            DbError::DiskFull { .. } => Self::DiskFull,
            DbError::Locked { .. } => Self::Locked,
            other => Self::Failed(other.to_string()),
        }
    }
}

/// What a writer's thread calls.
#[derive(Debug)]
pub struct JournalWriter {
    db: JournalDb,
    /// `db` stands in for the one in this directory.
    absent: Option<PathBuf>,
    /// To what the file is to be bound that `db` stands in for, and the highest numbers that were given before.
    owner: Option<(Installation, Numbers)>,
    state: State,
    /// The oldest commit that is not synced.
    unsynced_since: Option<Instant>,
    /// The oldest deletion whose bytes may stand in the write-ahead log.
    unclean_since: Option<Instant>,
    /// Tidying up failed: not again before.
    tidy_from: Option<Instant>,
}

#[derive(Debug)]
enum State {
    Durable,
    Lost { since_unix: u64, records: u64, reason: LossReason, retry: Instant, wait: Duration },
}

impl JournalWriter {
    /// A writer over an open journal.
    pub fn new(db: JournalDb) -> Self {
        Self {
            db,
            absent: None,
            owner: None,
            state: State::Durable,
            unsynced_since: None,
            unclean_since: None,
            tidy_from: None,
        }
    }

    /// A writer over the journal in `state_dir`. A full disk, or a file that cannot be written, keeps nobody from serving: then nothing is
    /// durable before that is mended, and what the file holds waits for the next start.
    ///
    /// # Errors
    /// Every other one of [`JournalDb::open`]: to go on without the file would lose what is in it.
    pub fn open(state_dir: &Path, fsync: Fsync, now: Now) -> Result<Self, DbError> {
        let error = match JournalDb::open(state_dir, fsync) {
            Ok(db) => return Ok(Self::new(db)),
            Err(error @ (DbError::DiskFull { .. } | DbError::ReadOnly { .. } | DbError::NoFile { .. })) => {
                error
            }
            Err(error) => return Err(error),
        };
        let mut writer = Self::new(JournalDb::stand_in(state_dir, fsync)?);
        writer.absent = Some(state_dir.to_owned());
        writer.lose(&error, 0, now);
        Ok(writer)
    }

    /// [Binds](JournalDb::bind) the journal to an installation whose highest numbers are these; `None` where that cannot be written now.
    /// A file that cannot be opened yet is bound once it can.
    ///
    /// # Errors
    /// [`DbError::OtherInstallation`], or the file cannot be read.
    pub fn bind(&mut self, installation: Installation, given: Numbers) -> Result<Option<Bound>, DbError> {
        if self.absent.is_some() {
            self.owner = Some((installation, given));
            return Ok(None);
        }
        match self.db.bind(installation, given) {
            Ok(bound) => Ok(Some(bound)),
            // The next start tries again, and the next append finds out how the disk is.
            Err(DbError::DiskFull { .. } | DbError::ReadOnly { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether the file is open.
    pub fn is_present(&self) -> bool {
        self.absent.is_none()
    }

    /// The journal, for reading, replay counters, setting aside and deletion.
    pub fn db(&mut self) -> &mut JournalDb {
        &mut self.db
    }

    /// Whether what was computed survives the daemon.
    pub fn durability(&self) -> Durability {
        match &self.state {
            State::Durable => Durability::Durable,
            State::Lost { since_unix, records, reason, .. } => {
                Durability::Lost { since_unix: *since_unix, records: *records, reason: reason.clone() }
            }
        }
    }

    /// Writes records, or counts them where they cannot be written. When it returns, they may become visible.
    pub fn append(&mut self, batch: &[Record], now: Now) -> Durability {
        match &mut self.state {
            State::Lost { records, .. } => {
                *records += batch.len() as u64;
                self.db.meter(batch, now.unix);
            }
            State::Durable => match self.db.append(batch, now.unix) {
                Ok(()) => {
                    self.unsynced_since.get_or_insert(now.instant);
                }
                Err(error) => {
                    self.db.meter(batch, now.unix);
                    self.lose(&error, batch.len() as u64, now);
                }
            },
        }
        self.durability()
    }

    /// Whether a snapshot is wanted now: records were lost, it is time to try again, and the disk takes writes.
    pub fn needs_snapshot(&mut self, now: Now) -> bool {
        let State::Lost { retry, .. } = &self.state else { return false };
        if now.instant < *retry {
            return false;
        }
        // Room may be in the write-ahead log itself; where it is not, that is no error of the snapshot's.
        drop(self.db.truncate_log());
        match self.find_file().and_then(|()| self.db.touch()) {
            Ok(()) => {
                // The caller was told; it is told again if nothing comes of it.
                if let State::Lost { retry, wait, .. } = &mut self.state {
                    *retry = now.instant + *wait;
                }
                true
            }
            Err(error) => {
                self.lose(&error, 0, now);
                false
            }
        }
    }

    /// Opens the file that `db` stands in for, if it does.
    fn find_file(&mut self) -> Result<(), DbError> {
        if let Some(state_dir) = &self.absent {
            let mut db = JournalDb::open(state_dir, self.db.fsync())?;
            if let Some((installation, given)) = self.owner {
                let kept = db.numbers()?;
                // Meanwhile they may have been given to others.
                if kept.tenant > given.tenant || kept.key > given.key {
                    return Err(DbError::Ahead { path: db.path().to_path_buf() });
                }
                db.bind(installation, given)?;
            }
            let stand_in = std::mem::replace(&mut self.db, db);
            self.db.keep_live();
            self.db.take_meters(stand_in);
            self.absent = None;
        }
        Ok(())
    }

    /// Writes a snapshot that holds everything that was passed to [`append`](Self::append) so far. What is appended from here
    /// on is durable where it says so.
    pub fn restore_snapshot(&mut self, snapshot: &Snapshot, now: Now) -> Durability {
        match self.find_file().and_then(|()| self.db.restore(snapshot)) {
            Ok(()) => {
                self.state = State::Durable;
                self.unsynced_since = None;
                self.unclean_since.get_or_insert(now.instant);
            }
            Err(error) => self.lose(&error, 0, now),
        }
        self.durability()
    }

    /// Deletes what is kept no longer. Nothing where records are lost: the disk is left alone until a snapshot is written.
    pub fn expire(&mut self, retention: &Retention, now: Now) -> Expired {
        if matches!(self.state, State::Lost { .. }) {
            return Expired::default();
        }
        match self.db.expire(now.unix, retention) {
            Ok(expired) => {
                if !expired.requests.is_empty() {
                    self.unsynced_since.get_or_insert(now.instant);
                    self.unclean_since.get_or_insert(now.instant);
                }
                expired
            }
            Err(error) => {
                // Nothing that was computed is lost by it: the next append finds out how the disk is.
                tracing::warn!(%error, "requests past their retention could not be deleted");
                Expired::default()
            }
        }
    }

    /// Deletes those of these requests that have ended, before their time is over. Nothing where records are lost, as for
    /// [`expire`](Self::expire).
    pub fn delete_ended(&mut self, requests: &[RequestId], now: Now) {
        if requests.is_empty() || matches!(self.state, State::Lost { .. }) {
            return;
        }
        match self.db.delete_ended(requests) {
            Ok(()) => {
                self.unsynced_since.get_or_insert(now.instant);
                self.unclean_since.get_or_insert(now.instant);
            }
            Err(error) => tracing::warn!(%error, "requests that nobody needs any more could not be deleted"),
        }
    }

    /// When [`tick`](Self::tick) has something to do, if ever.
    pub fn wakes_at(&self) -> Option<Instant> {
        if let State::Lost { retry, .. } = &self.state {
            return Some(*retry);
        }
        let sync = match self.db.fsync() {
            Fsync::Interval(interval) => self.unsynced_since.map(|since| since + interval),
            Fsync::Every | Fsync::Never => None,
        };
        let purge = self.unclean_since.map(|since| self.tidy_from.unwrap_or(since + PURGE_AFTER));
        sync.into_iter().chain(purge).min()
    }

    /// Syncs where the interval is over, folds a little where that has become much, purges where something was deleted. To be
    /// called between batches, and at [`wakes_at`](Self::wakes_at).
    pub fn tick(&mut self, now: Now) -> Durability {
        if matches!(self.state, State::Durable) {
            if let Err(error) = self.sync(now) {
                self.lose(&error, 0, now);
            } else if self.tidy_from.is_none_or(|from| now.instant >= from) {
                self.tidy_from = None;
                // Nothing is lost where that fails: the next append finds out how the disk is.
                if let Err(error) = self.tidy(now) {
                    tracing::warn!(%error, "the journal could not be tidied up");
                    self.tidy_from = Some(now.instant + PURGE_AFTER);
                }
            }
        }
        self.durability()
    }

    fn sync(&mut self, now: Now) -> Result<(), DbError> {
        if let Fsync::Interval(interval) = self.db.fsync()
            && self.unsynced_since.is_some_and(|since| now.instant.duration_since(since) >= interval)
        {
            self.db.sync()?;
            self.unsynced_since = None;
        }
        Ok(())
    }

    fn tidy(&mut self, now: Now) -> Result<(), DbError> {
        if self.db.unfolded() >= FOLD_FROM {
            self.db.fold(FOLD_AT_ONCE)?;
            self.unsynced_since.get_or_insert(now.instant);
        }
        if self.db.unclean() {
            let since = *self.unclean_since.get_or_insert(now.instant);
            if now.instant.duration_since(since) >= PURGE_AFTER {
                self.db.purge()?;
                self.unclean_since = None;
            }
        }
        Ok(())
    }

    /// A write failed, and with it so many records.
    fn lose(&mut self, error: &DbError, lost: u64, now: Now) {
        let reason = LossReason::from(error);
        let (since_unix, records, wait) = match &self.state {
            State::Durable => {
                tracing::error!(%error, "the journal cannot be written; going on without");
                (now.unix, lost, RETRY.0)
            }
            State::Lost { since_unix, records, wait, .. } => {
                (*since_unix, *records + lost, (*wait * 2).min(RETRY.1))
            }
        };
        self.state = State::Lost { since_unix, records, reason, retry: now.instant + wait, wait };
    }
}

#[cfg(test)]
mod tests;
