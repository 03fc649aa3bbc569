//! Taking up again after records were lost.
//!
//! **Owns** how a snapshot and the file become one. **Never** keeps a live request that the snapshot does not have: it ended
//! meanwhile.

use crate::fold::{Which, append_log, fold};
use crate::journal::{Change, Commit, ENTRY_BYTES};
use crate::retention::delete_row;
use crate::usage;
use crate::{Admission, DbError, Entry, JournalDb};
use fail::fail_point;
use pagedd_core::{RequestId, TenantId};
use rusqlite::params;

/// All that is live, and what has ended since records were lost and is kept still.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Snapshot {
    /// In the order of admission.
    pub requests: Vec<SnapshotRequest>,
}

/// A request in a [`Snapshot`].
#[derive(Clone, PartialEq, Debug)]
pub struct SnapshotRequest {
    /// What was asked.
    pub admission: Admission,
    /// Its whole log.
    pub entries: Vec<Entry>,
    /// Prompt tokens that it found in the prefix cache; `None` where it has not started.
    pub cached_tokens: Option<u32>,
    /// When it ended, in seconds since 1970; `None` while it is live.
    pub finished_unix: Option<u64>,
}

impl JournalDb {
    /// Makes the file what the snapshot says, on disk when it returns: its requests with their logs, and of others those that
    /// had ended before. Replay counters stay.
    ///
    /// # Errors
    /// As for [`append`](Self::append). Nothing has changed.
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<(), DbError> {
        let unread = self.unread;
        self.transact(Commit::Synced, |change| {
            // The logs of what had ended are to be whole; the counters of rows start anew from what is left.
            fold(change, Which::All)?;
            let mut replays = Vec::with_capacity(snapshot.requests.len());
            for request in &snapshot.requests {
                replays.push(take(change, request.admission.request)?);
            }
            if !unread {
                let live = "SELECT seq, tenant FROM requests WHERE finished_unix IS NULL";
                let live = change.rows(live, [], |row| Ok((row.get(0)?, TenantId(row.get(1)?))))?;
                for (seq, _) in live.into_iter().filter(|(_, tenant)| !self.strangers.contains(tenant)) {
                    delete_row(change, seq)?;
                }
            }
            let next = change.rows(
                "SELECT coalesce(max(seq), 0) + 1, coalesce(max(coalesce(last_step, first_step)), 0) + 1 FROM requests",
                [],
                |row| Ok((row.get::<_, i64>(0)?, row.get::<_, i64>(1)?)),
            )?;
            let (first, step) = next.first().copied().unwrap_or((1, 1));
            for (seq, (request, replays)) in (first..).zip(snapshot.requests.iter().zip(replays)) {
                change.insert_request(seq, &request.admission, step)?;
                append_log(change, seq, &request.entries)?;
                let finished = request.finished_unix.map(|at| at as i64);
                let bytes = finished.map_or(0, |_| request.entries.len() as i64 * ENTRY_BYTES);
                change.execute(
                    "UPDATE requests SET replays = ?2, finished_unix = ?3, last_step = ?4, bytes = bytes + ?5,
                     cached_tokens = ?6 WHERE seq = ?1",
                    params![seq, replays, finished, finished.map(|_| step), bytes, request.cached_tokens],
                )?;
            }
            usage::write(change, &self.unbilled)?;
            fail_point!("journal-snapshot", |_| Err(DbError::DiskFull { path: change.path().to_path_buf() }));
            Ok(())
        })?;
        self.committed(Commit::Synced);
        self.unbilled.clear();
        self.unclean = true;
        self.load()
    }
}

/// Deletes a request, and says how often it was replayed.
fn take(change: &Change<'_>, request: RequestId) -> Result<u32, DbError> {
    let found = change.rows("SELECT seq, replays FROM requests WHERE id = ?1", [request.0], |row| {
        Ok((row.get::<_, i64>(0)?, row.get(1)?))
    })?;
    let Some(&(seq, replays)) = found.first() else { return Ok(0) };
    delete_row(change, seq)?;
    Ok(replays)
}
