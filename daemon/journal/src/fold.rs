//! From records of steps to the logs of requests.
//!
//! **Owns** the reading of `steps`. **Never** loses the order of a tenant's entries: its oldest records go first.

use crate::journal::{Change, Commit, rows};
use crate::saved::{Entry, StepEntry, unseal};
use crate::{DbError, JournalDb, SavedError};
use fail::fail_point;
use pagedd_core::TenantId;
use rusqlite::{Connection, params};
use std::collections::HashMap;
use std::path::Path;

/// What a fold did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Folded {
    /// Records that it moved.
    pub moved: u64,
    /// Records that are left.
    pub left: u64,
}

/// Which records.
#[derive(Clone, Copy)]
pub(crate) enum Which {
    Oldest(u64),
    All,
    Of(TenantId),
}

impl Which {
    const fn tenant(self) -> Option<u32> {
        match self {
            Self::Of(tenant) => Some(tenant.0),
            Self::Oldest(_) | Self::All => None,
        }
    }
}

/// A record of steps.
pub(crate) struct StepRow {
    id: i64,
    pub step: i64,
    pub tenant: TenantId,
    /// By request row, in order.
    pub entries: Result<Vec<(i64, Entry)>, SavedError>,
}

/// Reads records, oldest first.
pub(crate) fn read(db: &Connection, path: &Path, which: Which) -> Result<Vec<StepRow>, DbError> {
    let most = match which {
        Which::Oldest(most) => i64::try_from(most).unwrap_or(i64::MAX),
        Which::All | Which::Of(_) => -1,
    };
    rows(
        db,
        path,
        "SELECT id, step, tenant, entries FROM steps WHERE ?1 IS NULL OR tenant = ?1 ORDER BY id LIMIT ?2",
        params![which.tenant(), most],
        |row| {
            let entries = unseal::<Vec<StepEntry>>(row.get_ref(3)?.as_blob()?).map(|entries| {
                let mut seq = 0_i64;
                let absolute = |StepEntry { behind, entry }| {
                    seq = seq.wrapping_add(behind);
                    (seq, entry)
                };
                entries.into_iter().map(absolute).collect()
            });
            Ok(StepRow { id: row.get(0)?, step: row.get(1)?, tenant: TenantId(row.get(2)?), entries })
        },
    )
}

/// Moves records to the logs of their requests; entries of requests that are not kept any more go. Says how many records.
pub(crate) fn fold(change: &Change<'_>, which: Which) -> Result<u64, DbError> {
    let records = read(change, change.path(), which)?;
    let mut logs: HashMap<i64, Vec<Entry>> = HashMap::new();
    for record in &records {
        match &record.entries {
            Ok(entries) => {
                for (request, entry) in entries {
                    logs.entry(*request).or_default().push(*entry);
                }
            }
            Err(error) => {
                let hurt = change.execute(
                    "UPDATE requests SET damaged = 1 WHERE tenant = ?1 AND first_step <= ?2
                     AND (last_step IS NULL OR last_step >= ?2)",
                    params![record.tenant.0, record.step],
                )?;
                tracing::error!(tenant = %record.tenant, %error, requests = hurt, "a record of steps is damaged");
            }
        }
    }
    let mut logs: Vec<_> = logs.into_iter().collect();
    logs.sort_unstable_by_key(|(request, _)| *request);
    for (request, entries) in logs {
        append_log(change, request, &entries)?;
    }
    if let (Some(first), Some(last)) = (records.first(), records.last()) {
        change.execute(
            "DELETE FROM steps WHERE id BETWEEN ?1 AND ?2 AND (?3 IS NULL OR tenant = ?3)",
            params![first.id, last.id, which.tenant()],
        )?;
    }
    Ok(records.len() as u64)
}

/// Puts entries to the end of a request's log, where the request is kept.
pub(crate) fn append_log(change: &Change<'_>, request: i64, entries: &[Entry]) -> Result<(), DbError> {
    // An empty part would take the place of the next.
    if entries.is_empty() {
        return Ok(());
    }
    change.execute(
        "INSERT INTO logs (request, first, count, entries)
         SELECT ?1, coalesce((SELECT first + count FROM logs WHERE request = ?1 ORDER BY first DESC LIMIT 1), 0), ?2, ?3
         WHERE EXISTS (SELECT 1 FROM requests WHERE seq = ?1)",
        params![request, entries.len() as i64, change.seal(entries)?],
    )?;
    Ok(())
}

impl JournalDb {
    /// Moves up to `most` records of steps, the oldest, to the logs of their requests. Without it deletion would not reach
    /// tokens, and a start would read all that was ever appended.
    ///
    /// # Errors
    /// As for [`append`](Self::append). Nothing has changed.
    pub fn fold(&mut self, most: u64) -> Result<Folded, DbError> {
        if self.unfolded() == 0 {
            return Ok(Folded::default());
        }
        let at = self.usual();
        let moved = self.transact(at, |change| {
            let moved = fold(change, Which::Oldest(most))?;
            fail_point!("journal-fold", |_| Err(DbError::DiskFull { path: change.path().to_path_buf() }));
            Ok(moved)
        })?;
        self.folded(at, moved);
        Ok(Folded { moved, left: self.unfolded() })
    }

    /// Records were moved, and that is committed.
    pub(crate) fn folded(&mut self, at: Commit, moved: u64) {
        self.committed(at);
        self.unfolded -= moved;
    }
}
