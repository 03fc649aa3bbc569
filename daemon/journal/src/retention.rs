//! How long what has ended is kept, and how it goes.
//!
//! **Owns** the order in which requests go. **Never** deletes a live one unless it, or its tenant, is named.

use crate::fold::{Which, fold};
use crate::journal::{Change, rows};
use crate::usage::{self, Outcome};
use crate::{DbError, JournalDb};
use fail::fail_point;
use pagedd_core::{RequestId, TenantId};
use rusqlite::params;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Requests that one call of [`JournalDb::expire`] deletes at most: tokens wait for it.
const EXPIRE_AT_ONCE: usize = 256;

/// How long requests are kept after they ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Retention {
    /// Seconds after the end.
    pub seconds: u64,
    /// Seconds for tenants that have a time of their own.
    pub per_tenant: BTreeMap<TenantId, u64>,
    /// Bytes that ended requests may take together. Beyond it the oldest of the tenant that has most go before their time.
    pub max_bytes: u64,
}

/// What [`JournalDb::expire`] did.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Expired {
    /// Requests that are gone.
    pub requests: Vec<RequestId>,
    /// There is more to delete: call again.
    pub more: bool,
}

/// A request that may go.
struct Candidate {
    seq: i64,
    request: RequestId,
    bytes: u64,
}

impl JournalDb {
    /// Whether any request is kept that has ended, or that only waits for its time to be over.
    ///
    /// # Errors
    /// Where the file cannot be read.
    pub fn keeps_ended(&self) -> Result<bool, DbError> {
        let query = "SELECT EXISTS (SELECT 1 FROM requests WHERE finished_unix IS NOT NULL)
                         OR EXISTS (SELECT 1 FROM requests JOIN strangers USING (tenant))";
        Ok(rows(&self.db, &self.path, query, [], |row| row.get(0))?.pop().unwrap_or(false))
    }

    /// Lets go of the pages that are cached.
    ///
    /// # Errors
    /// From SQLite; nothing is lost.
    pub fn release_memory(&self) -> Result<(), DbError> {
        self.db.execute_batch("PRAGMA shrink_memory").map_err(|error| DbError::sql(&self.path, error))
    }

    /// Deletes what ended longer ago than it is kept, and what is too much; a bounded number at once.
    ///
    /// # Errors
    /// As for [`append`](Self::append). Nothing has changed.
    pub fn expire(&mut self, now_unix: u64, retention: &Retention) -> Result<Expired, DbError> {
        let totals = rows(
            &self.db,
            &self.path,
            "SELECT tenant, sum(bytes) FROM requests WHERE finished_unix IS NOT NULL GROUP BY tenant",
            [],
            |row| Ok((TenantId(row.get(0)?), row.get::<_, i64>(1)? as u64)),
        )?;
        let mut totals: BTreeMap<TenantId, u64> = totals.into_iter().collect();
        let mut tenants = BTreeSet::new();
        let mut victims: Vec<(i64, RequestId)> = Vec::new();
        let mut waiting: BTreeMap<TenantId, VecDeque<Candidate>> = BTreeMap::new();
        for (tenant, total) in &mut totals {
            let kept = *retention.per_tenant.get(tenant).unwrap_or(&retention.seconds);
            let room = EXPIRE_AT_ONCE - victims.len();
            let Some(over_at) = now_unix.checked_sub(kept) else { continue };
            for over in self.finished(*tenant, over_at, room)? {
                *total -= over.bytes;
                tenants.insert(*tenant);
                victims.push((over.seq, over.request));
            }
        }
        while victims.len() < EXPIRE_AT_ONCE && totals.values().sum::<u64>() > retention.max_bytes {
            let Some((&most, _)) = totals.iter().max_by_key(|(_, bytes)| **bytes) else { break };
            let oldest = match waiting.entry(most) {
                Entry::Occupied(found) => found.into_mut(),
                Entry::Vacant(place) => {
                    let mut oldest = self.finished(most, u64::MAX >> 1, EXPIRE_AT_ONCE + victims.len())?;
                    oldest.retain(|candidate| victims.iter().all(|(seq, _)| *seq != candidate.seq));
                    place.insert(oldest.into())
                }
            };
            let Some(next) = oldest.pop_front() else { break };
            totals.entry(most).and_modify(|bytes| *bytes -= next.bytes);
            tenants.insert(most);
            victims.push((next.seq, next.request));
        }
        if let Some(over_at) = now_unix.checked_sub(retention.seconds).filter(|_| !self.strangers.is_empty())
        {
            for (tenant, seq, request) in self.live_of_strangers(over_at, EXPIRE_AT_ONCE - victims.len())? {
                tenants.insert(tenant);
                victims.push((seq, request));
            }
        }
        if victims.is_empty() {
            return Ok(Expired::default());
        }
        self.delete(&victims, &tenants, now_unix)?;
        Ok(Expired {
            more: victims.len() == EXPIRE_AT_ONCE,
            requests: victims.into_iter().map(|(_, request)| request).collect(),
        })
    }

    /// Deletes a request, live or not, and every byte of it. Says whether it was there. What a live one has used is billed.
    ///
    /// # Errors
    /// As for [`append`](Self::append). Nothing has changed.
    pub fn delete_request(&mut self, request: RequestId, now_unix: u64) -> Result<bool, DbError> {
        let found = rows(
            &self.db,
            &self.path,
            "SELECT seq, tenant FROM requests WHERE id = ?1",
            [request.0],
            |row| Ok((row.get(0)?, TenantId(row.get(1)?))),
        )?;
        let Some(&(seq, tenant)) = found.first() else { return Ok(false) };
        self.delete(&[(seq, request)], &BTreeSet::from([tenant]), now_unix)?;
        self.purge().map(|()| true)
    }

    /// Deletes those of these requests that have ended, whatever their time. The rest of them, in the write-ahead log, goes with the next
    /// [`purge`](Self::purge).
    ///
    /// # Errors
    /// As for [`append`](Self::append). Nothing has changed.
    pub fn delete_ended(&mut self, requests: &[RequestId]) -> Result<(), DbError> {
        let (mut victims, mut tenants) = (Vec::new(), BTreeSet::new());
        for request in requests {
            let query = "SELECT seq, tenant FROM requests WHERE id = ?1 AND finished_unix IS NOT NULL";
            let read = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, TenantId(row.get(1)?)));
            for (seq, tenant) in rows(&self.db, &self.path, query, [request.0], read)? {
                victims.push((seq, *request));
                tenants.insert(tenant);
            }
        }
        // None of them is live: no bill has this time.
        if victims.is_empty() { Ok(()) } else { self.delete(&victims, &tenants, 0) }
    }

    /// Deletes every request of a tenant, live or not, and every byte of them. Returns which. What live ones have used is billed.
    ///
    /// # Errors
    /// As for [`append`](Self::append). Nothing has changed, unless [`unclean`](Self::unclean) says that only the last bytes are
    /// left to be cleared.
    pub fn delete_tenant(&mut self, tenant: TenantId, now_unix: u64) -> Result<Vec<RequestId>, DbError> {
        let victims = rows(
            &self.db,
            &self.path,
            "SELECT seq, id FROM requests WHERE tenant = ?1 ORDER BY seq",
            [tenant.0],
            |row| Ok((row.get(0)?, RequestId(row.get(1)?))),
        )?;
        self.delete(&victims, &BTreeSet::from([tenant]), now_unix)?;
        self.purge()?;
        Ok(victims.into_iter().map(|(_, request)| request).collect())
    }

    /// Moves the write-ahead log into the file and empties it, where it may hold what was deleted. An fsync of both, so that
    /// [`expire`](Self::expire) leaves it to its caller.
    ///
    /// # Errors
    /// As for [`append`](Self::append). What is in the log is there still.
    pub fn purge(&mut self) -> Result<(), DbError> {
        if !self.unclean {
            return Ok(());
        }
        self.truncate_log()?;
        self.unclean = false;
        Ok(())
    }

    /// Whether bytes of deleted requests may stand in the write-ahead log.
    pub const fn unclean(&self) -> bool {
        self.unclean
    }

    pub(crate) fn truncate_log(&mut self) -> Result<(), DbError> {
        fail_point!("journal-truncate-log", |_| Err(DbError::Locked { path: self.path.clone() }));
        let checkpoint = |mode: &str| {
            let read = |row: &rusqlite::Row<'_>| {
                let (busy, pages, moved): (bool, i64, i64) = (row.get(0)?, row.get(1)?, row.get(2)?);
                Ok(!busy && pages == moved)
            };
            let done = self.db.query_row(&format!("PRAGMA wal_checkpoint({mode})"), [], read);
            done.map_err(|error| DbError::sql(&self.path, error))
        };
        // The first waits for nobody. Where a reader keeps something in the log, the second would, and in vain.
        let drained = checkpoint("PASSIVE")? && checkpoint("TRUNCATE")?;
        if drained { Ok(()) } else { Err(DbError::Locked { path: self.path.clone() }) }
    }

    /// A tenant's requests that ended at `over_at` or before, the oldest first.
    fn finished(&self, tenant: TenantId, over_at: u64, most: usize) -> Result<Vec<Candidate>, DbError> {
        rows(
            &self.db,
            &self.path,
            "SELECT seq, id, bytes FROM requests WHERE tenant = ?1 AND finished_unix <= ?2
             AND finished_unix IS NOT NULL ORDER BY finished_unix, seq LIMIT ?3",
            params![tenant.0, over_at as i64, most as i64],
            |row| {
                Ok(Candidate {
                    seq: row.get(0)?,
                    request: RequestId(row.get(1)?),
                    bytes: row.get::<_, i64>(2)? as u64,
                })
            },
        )
    }

    /// Deletes requests of these tenants, with what of them is not in logs yet.
    fn delete(
        &mut self,
        victims: &[(i64, RequestId)],
        tenants: &BTreeSet<TenantId>,
        now_unix: u64,
    ) -> Result<(), DbError> {
        let at = self.usual();
        let gone = victims.iter().map(|(_, request)| *request);
        let bills = self.bills_of_live(gone, Outcome::Aborted, now_unix);
        let moved = self.transact(at, |change| {
            usage::write(change, &bills)?;
            for (seq, _) in victims {
                delete_row(change, *seq)?;
            }
            let mut moved = 0;
            for tenant in tenants {
                moved += fold(change, Which::Of(*tenant))?;
            }
            fail_point!("journal-delete", |_| Err(DbError::DiskFull { path: change.path().to_path_buf() }));
            Ok(moved)
        })?;
        self.folded(at, moved);
        self.unclean = true;
        for (_, request) in victims {
            self.forget(*request);
        }
        Ok(())
    }
}

/// Deletes a request's rows.
pub(crate) fn delete_row(change: &Change<'_>, seq: i64) -> Result<(), DbError> {
    change.execute("DELETE FROM requests WHERE seq = ?1", [seq])?;
    change.execute("DELETE FROM bodies WHERE request = ?1", [seq])?;
    change.execute("DELETE FROM logs WHERE request = ?1", [seq])?;
    Ok(())
}
