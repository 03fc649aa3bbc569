//! What a start, and a client that comes back, read of the journal.
//!
//! **Owns** how a kept request is put together. **Never** lets one that is damaged stand in the way of the others.

use crate::fold::{self, Which};
use crate::journal::{Commit, Record, Step, rows};
use crate::saved::{Idempotency, unseal};
use crate::usage::{self, Outcome};
use crate::{Admission, DbError, Entry, Finish, JournalDb, SavedError};
use fail::fail_point;
use pagedd_core::{RequestId, TenantId};
use rusqlite::{OptionalExtension, Row, params};
use std::collections::HashMap;

/// A request as it is kept.
#[derive(Clone, PartialEq, Debug)]
pub struct Kept {
    /// What was asked.
    pub admission: Admission,
    /// Its log, from entry 0 on.
    pub entries: Vec<Entry>,
    /// When it ended, in seconds since 1970; `None` while it is live.
    pub finished_unix: Option<u64>,
    /// How often it was [replayed](JournalDb::count_replay).
    pub replays: u32,
    /// Prompt tokens that it found in the prefix cache; `None` where it has not started.
    pub cached_tokens: Option<u32>,
}

/// A request that cannot be had any more. It stays in the file until its time is over; a live one has none before it is
/// [given up](JournalDb::give_up).
#[derive(Clone, PartialEq, Debug)]
pub struct Damage {
    /// Which.
    pub request: RequestId,
    /// Whose.
    pub tenant: TenantId,
    /// Whether it had ended.
    pub finished: bool,
    /// What is wrong.
    pub error: SavedError,
}

/// What [`JournalDb::replay`] found: a request, or what is left of one.
pub type Replayed = Result<Kept, Damage>;

/// A row of `requests`.
struct RequestRow {
    seq: i64,
    request: RequestId,
    tenant: TenantId,
    idempotency: Option<Idempotency>,
    finished_unix: Option<i64>,
    replays: u32,
    first_step: i64,
    last_step: Option<i64>,
    damaged: bool,
    model_digest: Option<[u8; 16]>,
    cached_tokens: Option<u32>,
}

const REQUEST: &str = "seq, id, tenant, idempotency_key, idempotency_body, finished_unix, replays, first_step, last_step, damaged, \
                       model_digest, cached_tokens";

fn request_row(row: &Row<'_>) -> rusqlite::Result<RequestRow> {
    let key: Option<[u8; 32]> = row.get("idempotency_key")?;
    let body: Option<[u8; 32]> = row.get("idempotency_body")?;
    Ok(RequestRow {
        seq: row.get("seq")?,
        request: RequestId(row.get("id")?),
        tenant: TenantId(row.get("tenant")?),
        idempotency: key.zip(body).map(|(key, body)| Idempotency { key, body }),
        finished_unix: row.get("finished_unix")?,
        replays: row.get("replays")?,
        first_step: row.get("first_step")?,
        last_step: row.get("last_step")?,
        damaged: row.get("damaged")?,
        model_digest: row.get("model_digest")?,
        cached_tokens: row.get("cached_tokens")?,
    })
}

/// Entries that are not in logs yet.
#[derive(Default)]
struct Unfolded {
    /// By request row.
    entries: HashMap<i64, Vec<Entry>>,
    /// Records that cannot be read.
    damaged: Vec<(TenantId, i64)>,
}

impl Unfolded {
    fn hurts(&self, row: &RequestRow) -> bool {
        let within = |step: i64| step >= row.first_step && row.last_step.is_none_or(|last| step <= last);
        self.damaged.iter().any(|&(tenant, step)| tenant == row.tenant && within(step))
    }
}

impl JournalDb {
    /// Shows every kept request to `visit`, in the order of admission, live ones and those that have ended.
    ///
    /// # Errors
    /// Where the file cannot be read at all. `visit` has seen some requests then.
    pub fn replay(&self, visit: impl FnMut(Replayed)) -> Result<(), DbError> {
        self.replay_where("TRUE", visit)
    }

    /// [`replay`](Self::replay) of those only that are live: what a start admits again. The others can be [asked
    /// for](Self::request) one by one.
    ///
    /// # Errors
    /// As for [`replay`](Self::replay).
    pub fn replay_live(&self, visit: impl FnMut(Replayed)) -> Result<(), DbError> {
        self.replay_where("finished_unix IS NULL", visit)
    }

    fn replay_where(&self, which: &str, mut visit: impl FnMut(Replayed)) -> Result<(), DbError> {
        let sql = |error| DbError::sql(&self.path, error);
        let unfolded = self.unfolded_entries(Which::All)?;
        let query = format!("SELECT {REQUEST} FROM requests WHERE {which} ORDER BY seq");
        let mut statement = self.db.prepare(&query).map_err(sql)?;
        let mut rows = statement.query([]).map_err(sql)?;
        while let Some(row) = rows.next().map_err(sql)? {
            let row = request_row(row).map_err(sql)?;
            let (request, tenant) = (row.request, row.tenant);
            let finished = row.finished_unix.is_some();
            let kept = self.put_together(&row, &unfolded)?;
            visit(kept.map_err(|error| Damage { request, tenant, finished, error }));
        }
        Ok(())
    }

    /// One request, and its log. Whether whoever asks may know of it is for the caller to find out from its tenant and key.
    ///
    /// # Errors
    /// [`DbError::Damaged`].
    pub fn request(&self, request: RequestId) -> Result<Option<Kept>, DbError> {
        let Some(row) = self.row(request)? else { return Ok(None) };
        let unfolded = self.unfolded_entries(Which::Of(row.tenant))?;
        let kept = self.put_together(&row, &unfolded)?;
        kept.map(Some).map_err(|source| DbError::Damaged { path: self.path.clone(), request, source })
    }

    /// Whose a request is, if it is kept.
    ///
    /// # Errors
    /// Where the file cannot be read.
    pub fn tenant_of(&self, request: RequestId) -> Result<Option<TenantId>, DbError> {
        Ok(self.row(request)?.map(|row| row.tenant))
    }

    /// Entries `[from, ..)` of one request's log; `None` where it is not kept, and none where the log ends before `from`.
    ///
    /// # Errors
    /// [`DbError::Damaged`].
    pub fn log(&self, request: RequestId, from: u64) -> Result<Option<Vec<Entry>>, DbError> {
        let Some(row) = self.row(request)? else { return Ok(None) };
        let unfolded = self.unfolded_entries(Which::Of(row.tenant))?;
        let entries = self.entries(&row, &unfolded)?.map_err(|source| DbError::Damaged {
            path: self.path.clone(),
            request,
            source,
        })?;
        let from = usize::try_from(from).unwrap_or(usize::MAX).min(entries.len());
        Ok(Some(entries[from..].to_vec()))
    }

    /// The request that a tenant made with an `Idempotency-Key`, by the key's digest, and the digest of the body it was made
    /// with. Of several, the last.
    pub fn by_idempotency_key(
        &self,
        tenant: TenantId,
        key: &[u8; 32],
    ) -> Result<Option<(RequestId, [u8; 32])>, DbError> {
        let mut found = rows(
            &self.db,
            &self.path,
            "SELECT id, idempotency_body FROM requests WHERE tenant = ?1 AND idempotency_key = ?2
             ORDER BY seq DESC LIMIT 1",
            params![tenant.0, key],
            |row| Ok((RequestId(row.get(0)?), row.get(1)?)),
        )?;
        Ok(found.pop())
    }

    /// Counts that these requests are about to be admitted again, on disk before it returns: the next start knows that they were
    /// when this one ended. Returns those that are live; others are left out.
    ///
    /// # Errors
    /// As for [`append`](Self::append). Nothing was counted.
    pub fn count_replay(&mut self, requests: &[RequestId]) -> Result<Vec<RequestId>, DbError> {
        let counted = self.transact(Commit::Synced, |change| {
            let mut counted = Vec::with_capacity(requests.len());
            for request in requests {
                let counts =
                    "UPDATE requests SET replays = replays + 1 WHERE id = ?1 AND finished_unix IS NULL";
                if change.execute(counts, [request.0])? > 0 {
                    counted.push(*request);
                }
            }
            fail_point!("journal-count-replay", |_| Err(DbError::DiskFull {
                path: change.path().to_path_buf()
            }));
            Ok(counted)
        })?;
        self.committed(Commit::Synced);
        Ok(counted)
    }

    /// Forgets how often these requests were replayed: it went well.
    ///
    /// # Errors
    /// As for [`append`](Self::append). Nothing has changed.
    pub fn clear_replays(&mut self, requests: &[RequestId]) -> Result<(), DbError> {
        let at = self.usual();
        self.transact(at, |change| {
            for request in requests {
                change.execute("UPDATE requests SET replays = 0 WHERE id = ?1", [request.0])?;
            }
            fail_point!("journal-clear-replays", |_| Err(DbError::DiskFull {
                path: change.path().to_path_buf()
            }));
            Ok(())
        })?;
        self.committed(at);
        Ok(())
    }

    /// Ends a live request without computing it: choices that have not finished fail. Returns the entries that this puts to the
    /// end of its log, on disk; none where it is not kept or has ended.
    ///
    /// # Errors
    /// As for [`append`](Self::append), and [`DbError::Damaged`], for a request that can only be [given up](Self::give_up).
    pub fn set_aside(&mut self, request: RequestId, now_unix: u64) -> Result<Vec<Entry>, DbError> {
        let Some(kept) = self.request(request)? else { return Ok(Vec::new()) };
        if kept.finished_unix.is_some() {
            return Ok(Vec::new());
        }
        let ended = |choice: u32| {
            let ends = |entry: &Entry| matches!(entry, Entry::Finish { choice: c, .. } if *c == choice);
            kept.entries.iter().any(ends)
        };
        let open = (0..kept.admission.saved.n).filter(|choice| !ended(*choice));
        let mut entries: Vec<Entry> =
            open.map(|choice| Entry::Finish { choice, reason: Finish::Failed }).collect();
        entries.push(Entry::End { cached_tokens: 0 });
        let entries_of = entries.iter().map(|entry| (request, *entry)).collect();
        let step = Step { entries: entries_of, ..Step::default() };
        fail_point!("journal-set-aside", |_| Err(DbError::DiskFull { path: self.path.clone() }));
        self.append_at(Commit::Synced, &[Record::Step(step)], now_unix)?;
        Ok(entries)
    }

    /// Lets a live request that is [damaged](Damage) end now: no start tries it again, it goes when its time is over, and its
    /// `Idempotency-Key` makes a new one.
    ///
    /// # Errors
    /// As for [`append`](Self::append). Nothing has changed.
    pub fn give_up(&mut self, request: RequestId, now_unix: u64) -> Result<(), DbError> {
        let (at, last_step) = (self.usual(), self.last_step());
        let bills = self.bills_of_live(std::iter::once(request), Outcome::Failed, now_unix);
        self.transact(at, |change| {
            usage::write(change, &bills)?;
            change.execute(
                "UPDATE requests SET finished_unix = ?2, last_step = ?3, idempotency_key = NULL, idempotency_body = NULL
                 WHERE id = ?1 AND finished_unix IS NULL",
                params![request.0, now_unix as i64, last_step],
            )
        })?;
        self.committed(at);
        self.forget(request);
        Ok(())
    }

    fn row(&self, request: RequestId) -> Result<Option<RequestRow>, DbError> {
        let query = format!("SELECT {REQUEST} FROM requests WHERE id = ?1");
        Ok(rows(&self.db, &self.path, &query, [request.0], request_row)?.pop())
    }

    fn unfolded_entries(&self, which: Which) -> Result<Unfolded, DbError> {
        let mut unfolded = Unfolded::default();
        for record in fold::read(&self.db, &self.path, which)? {
            match record.entries {
                Ok(entries) => {
                    for (request, entry) in entries {
                        unfolded.entries.entry(request).or_default().push(entry);
                    }
                }
                Err(_) => unfolded.damaged.push((record.tenant, record.step)),
            }
        }
        Ok(unfolded)
    }

    fn put_together(
        &self,
        row: &RequestRow,
        unfolded: &Unfolded,
    ) -> Result<Result<Kept, SavedError>, DbError> {
        let sql = |error| DbError::sql(&self.path, error);
        let mut body = self.db.prepare_cached("SELECT body FROM bodies WHERE request = ?1").map_err(sql)?;
        let saved = body
            .query_row([row.seq], |body| Ok(unseal(body.get_ref(0)?.as_blob()?)))
            .optional()
            .map_err(sql)?
            .unwrap_or(Err(SavedError::Checksum));
        let entries = self.entries(row, unfolded)?;
        let &RequestRow {
            request,
            tenant,
            idempotency,
            finished_unix,
            replays,
            model_digest,
            cached_tokens,
            ..
        } = row;
        Ok(saved.and_then(|saved| {
            Ok(Kept {
                admission: Admission { request, tenant, idempotency, model_digest, saved },
                entries: entries?,
                finished_unix: finished_unix.map(|at| at as u64),
                replays,
                cached_tokens,
            })
        }))
    }

    /// The whole log of a request.
    fn entries(
        &self,
        row: &RequestRow,
        unfolded: &Unfolded,
    ) -> Result<Result<Vec<Entry>, SavedError>, DbError> {
        if row.damaged || unfolded.hurts(row) {
            return Ok(Err(SavedError::Step));
        }
        let parts = rows(
            &self.db,
            &self.path,
            "SELECT first, entries FROM logs WHERE request = ?1 ORDER BY first",
            [row.seq],
            |part| Ok((part.get::<_, i64>(0)?, unseal::<Vec<Entry>>(part.get_ref(1)?.as_blob()?))),
        )?;
        let mut entries = Vec::new();
        for (first, part) in parts {
            let (expected, found) = (entries.len() as u64, first as u64);
            match part {
                Ok(_) if found != expected => return Ok(Err(SavedError::Hole { expected, found })),
                Ok(part) => entries.extend(part),
                Err(error) => return Ok(Err(error)),
            }
        }
        entries.extend(unfolded.entries.get(&row.seq).into_iter().flatten());
        Ok(Ok(entries))
    }
}
