//! What requests used: metered as it is committed, billed with their end.
//!
//! **Owns** the way of a bill: it is written in the transaction that ends its request, and stays until control.db has it. **Never** bills
//! twice: a bill has a number that is not given again, and the journal a name, so that whoever adds bills up knows which it has.
//!
//! ```text
//! entries ─▶ Meter ─ End ─▶ bills (with the end, one transaction) ─▶ control.db: usage, and up to which bill ─▶ deleted here
//! ```
//!
//! A bill that control.db has stays for a short while: a start learns from it what tenants have used in the last minute.

use crate::journal::{Change, Live, rows};
use crate::saved::{Entry, Finish, StepEntry, unseal};
use crate::{Admission, DbError, JournalDb, Record, SavedRequest, Step};
use fail::fail_point;
use pagedd_core::{RequestId, TenantId};
use rusqlite::types::Value;
use rusqlite::{Connection, Params, Row, params};
use std::collections::{BTreeMap, HashMap};
use std::ops::AddAssign;
use std::path::Path;
use std::sync::Arc;

/// Seconds that are one when bills cannot be written: so many bills are kept in memory then, at most one for each hour and payer.
const HOUR: u64 = 3_600;
/// So many sums of what could not be written are kept by the second; of more, those that no quota by the minute needs any more are by the hour.
const MOST_UNBILLED: usize = 4_096;
/// How old a bill may be, in seconds, that a quota by the minute needs: the minute, and what rounding may hide.
pub const RECENT_S: u64 = 62;

/// Names a journal: numbers of bills are its own.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct LedgerId(pub [u8; 16]);

/// Who pays, and for what.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Payer {
    /// Whose requests.
    pub tenant: TenantId,
    /// The key that made them, by number; `None` where none was needed, or an older pagedd took them.
    pub key: Option<u32>,
    /// The model that they asked, by name.
    pub model: Arc<str>,
}

/// What requests used that have ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Usage {
    /// Requests.
    pub requests: u64,
    /// Of those, cancelled before their end: by their clients, or with their tenant.
    pub aborted: u64,
    /// Of those, ended by a fault.
    pub failed: u64,
    /// Tokens of prompts, as far as they were computed or found in the cache.
    pub prompt_tokens: u64,
    /// Of those, found in the cache.
    pub cached_tokens: u64,
    /// Tokens generated.
    pub output_tokens: u64,
}

impl AddAssign for Usage {
    fn add_assign(&mut self, other: Self) {
        self.requests += other.requests;
        self.aborted += other.aborted;
        self.failed += other.failed;
        self.prompt_tokens += other.prompt_tokens;
        self.cached_tokens += other.cached_tokens;
        self.output_tokens += other.output_tokens;
    }
}

/// What one payer's requests used that ended in one transaction.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bill {
    /// Its number, higher than those of all earlier ones.
    pub number: i64,
    /// When they ended, in seconds since 1970.
    pub at_unix: u64,
    /// Who pays.
    pub payer: Payer,
    /// For what.
    pub usage: Usage,
}

/// Usage by when and by whom.
pub(crate) type Unbilled = BTreeMap<(u64, Payer), Usage>;

/// How a request ends, the worst of its choices.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub(crate) enum Outcome {
    #[default]
    Complete,
    Aborted,
    Failed,
}

/// What a live request has used so far.
#[derive(Clone, Debug)]
pub(crate) struct Meter {
    key: Option<u32>,
    model: Arc<str>,
    prompt: u32,
    /// Prompt tokens that were cached; `None` where it has not started.
    cached: Option<u32>,
    output: u32,
    outcome: Outcome,
}

impl Meter {
    pub fn of(saved: &SavedRequest, model: Arc<str>) -> Self {
        let (prompt, outcome) = (saved.prompt.len() as u32, Outcome::Complete);
        Self { key: saved.key, model, prompt, cached: None, output: 0, outcome }
    }

    pub fn start(&mut self, cached_tokens: u32) {
        self.cached = Some(cached_tokens);
    }

    pub fn take(&mut self, entry: Entry) {
        match entry {
            Entry::Token { .. } => self.output += 1,
            Entry::Finish { reason, .. } => {
                let outcome = match reason {
                    Finish::Stop | Finish::Length => Outcome::Complete,
                    Finish::Cancelled => Outcome::Aborted,
                    Finish::Failed | Finish::ModelChanged | Finish::ModelGone => Outcome::Failed,
                };
                self.outcome = self.outcome.max(outcome);
            }
            Entry::End { .. } => {}
        }
    }

    /// An entry was not committed after all. How the request ends is said again if it is.
    pub fn give_back(&mut self, entry: Entry) {
        if matches!(entry, Entry::Token { .. }) {
            self.output = self.output.saturating_sub(1);
        }
    }

    /// What it comes to. `computed` is how much of the prompt was, where that is known; without it, all once the request has started.
    fn usage(&self, computed: Option<u32>) -> Usage {
        let begun = self.output > 0 || (computed.is_none() && self.cached.is_some());
        let prompt = if begun { self.prompt } else { computed.unwrap_or(0).min(self.prompt) };
        Usage {
            requests: 1,
            aborted: u64::from(self.outcome == Outcome::Aborted),
            failed: u64::from(self.outcome == Outcome::Failed),
            prompt_tokens: prompt.into(),
            cached_tokens: self.cached.unwrap_or(0).min(prompt).into(),
            output_tokens: self.output.into(),
        }
    }

    /// Who pays how much.
    pub fn bill(&self, tenant: TenantId, computed: Option<u32>) -> (Payer, Usage) {
        (Payer { tenant, key: self.key, model: self.model.clone() }, self.usage(computed))
    }

    /// The same for one that goes without an end of its own.
    pub fn bill_as(&self, outcome: Outcome, tenant: TenantId) -> (Payer, Usage) {
        Self { outcome: self.outcome.max(outcome), ..self.clone() }.bill(tenant, None)
    }
}

/// Names of models: one allocation for each, whatever number of requests asks it.
#[derive(Debug, Default)]
pub(crate) struct Names(Vec<Arc<str>>);

impl Names {
    pub fn get(&mut self, name: &str) -> Arc<str> {
        if let Some(known) = self.0.iter().find(|known| known.as_ref() == name) {
            return known.clone();
        }
        let name: Arc<str> = name.into();
        self.0.push(name.clone());
        name
    }
}

/// How much of a prompt was computed, by request that ends in this step.
pub(crate) fn computed(step: &Step, request: RequestId) -> Option<u32> {
    step.prompts.iter().find(|(ended, _)| *ended == request).map(|(_, tokens)| *tokens)
}

/// Writes bills; part of a transaction under way.
pub(crate) fn write(change: &Change<'_>, bills: &Unbilled) -> Result<(), DbError> {
    if !bills.is_empty()
        && let Some(through) = change.bills_after
    {
        number_after(change, through)?;
    }
    for ((at_unix, payer), usage) in bills {
        change.execute(
            "INSERT INTO bills
                 (at_unix, tenant, key, model, requests, aborted, failed, prompt_tokens, cached_tokens, output_tokens)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
            written(*at_unix as i64, payer, usage),
        )?;
    }
    if !bills.is_empty() {
        fail_point!("journal-bill", |_| Err(DbError::DiskFull { path: change.path().to_path_buf() }));
    }
    Ok(())
}

/// Gives bills numbers above this one from here on; part of a transaction under way.
fn number_after(change: &Change<'_>, through: i64) -> Result<(), DbError> {
    let query = "SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'bills'";
    let given = change.rows(query, [], |row| row.get::<_, i64>(0))?;
    if given.first().is_some_and(|given| *given >= through) {
        return Ok(());
    }
    change.execute("DELETE FROM sqlite_sequence WHERE name = 'bills'", [])?;
    change.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('bills', ?1)", [through])?;
    Ok(())
}

/// A row of who pays how much for which time: that, the payer's three columns, and the six sums.
pub(crate) fn written(time: i64, payer: &Payer, usage: &Usage) -> [Value; 10] {
    let Payer { tenant, key, model } = payer;
    let Usage { requests, aborted, failed, prompt_tokens, cached_tokens, output_tokens } = *usage;
    let sums = [requests, aborted, failed, prompt_tokens, cached_tokens, output_tokens];
    let [requests, aborted, failed, prompt, cached, output] = sums.map(|sum| Value::Integer(sum as i64));
    let (tenant, key) = (i64::from(tenant.0).into(), i64::from(key.unwrap_or(0)).into());
    [time.into(), tenant, key, model.to_string().into(), requests, aborted, failed, prompt, cached, output]
}

/// Sums of a row's last six columns, from `first` on.
pub(crate) fn read_usage(row: &Row<'_>, first: usize) -> rusqlite::Result<Usage> {
    let sum = |at: usize| row.get::<_, i64>(first + at).map(|n| n as u64);
    Ok(Usage {
        requests: sum(0)?,
        aborted: sum(1)?,
        failed: sum(2)?,
        prompt_tokens: sum(3)?,
        cached_tokens: sum(4)?,
        output_tokens: sum(5)?,
    })
}

/// A key's number as it is stored.
pub(crate) fn read_key(key: u32) -> Option<u32> {
    (key > 0).then_some(key)
}

/// The same sums, by the hour where they are from before this time.
fn by_hour(unbilled: Unbilled, recent_unix: u64) -> Unbilled {
    let mut sums = Unbilled::new();
    for ((at, payer), usage) in unbilled {
        add(&mut sums, if at < recent_unix { at - at % HOUR } else { at }, (payer, usage));
    }
    sums
}

/// Adds a bill that is not written yet.
pub(crate) fn add(unbilled: &mut Unbilled, at_unix: u64, (payer, usage): (Payer, Usage)) {
    *unbilled.entry((at_unix, payer)).or_default() += usage;
}

impl JournalDb {
    /// Names this journal among all whose bills a control.db has.
    ///
    /// # Errors
    /// Where the file cannot be read.
    pub fn ledger(&self) -> Result<LedgerId, DbError> {
        let ids = rows(&self.db, &self.path, "SELECT id FROM ledger", [], |row| row.get(0).map(LedgerId))?;
        ids.first().copied().ok_or_else(|| DbError::Corrupt {
            path: self.path.clone(),
            detail: "no id of a ledger".to_owned(),
        })
    }

    /// Bills after this number, at most so many, in order.
    ///
    /// # Errors
    /// Where the file cannot be read.
    pub fn bills(&self, after: i64, most: u32) -> Result<Vec<Bill>, DbError> {
        self.bills_where("id > ?1 ORDER BY id LIMIT ?2", params![after, most])
    }

    /// Bills that were made at this time or later, in order.
    ///
    /// # Errors
    /// Where the file cannot be read.
    pub fn bills_since(&self, unix: u64) -> Result<Vec<Bill>, DbError> {
        self.bills_where("at_unix >= ?1 ORDER BY id", [unix as i64])
    }

    fn bills_where(&self, which: &str, parameters: impl Params) -> Result<Vec<Bill>, DbError> {
        let query = format!(
            "SELECT id, at_unix, tenant, key, model,
                 requests, aborted, failed, prompt_tokens, cached_tokens, output_tokens
             FROM bills WHERE {which}"
        );
        rows(&self.db, &self.path, &query, parameters, |row| {
            Ok(Bill {
                number: row.get(0)?,
                at_unix: row.get::<_, i64>(1)? as u64,
                payer: Payer {
                    tenant: TenantId(row.get(2)?),
                    key: read_key(row.get(3)?),
                    model: row.get::<_, String>(4)?.into(),
                },
                usage: read_usage(row, 5)?,
            })
        })
    }

    /// Deletes bills up to this number that were made before this time: control.db has them.
    ///
    /// # Errors
    /// As for [`append`](Self::append). Nothing has changed.
    pub fn forget_bills(&mut self, through: i64, before_unix: u64) -> Result<(), DbError> {
        let at = self.usual();
        self.transact(at, |change| {
            let delete = "DELETE FROM bills WHERE id <= ?1 AND at_unix < ?2";
            change.execute(delete, params![through, before_unix as i64])?;
            fail_point!("journal-forget-bills", |_| Err(DbError::DiskFull {
                path: change.path().to_path_buf()
            }));
            Ok(())
        })?;
        self.committed(at);
        Ok(())
    }

    /// Gives bills numbers above this one from here on, also where that cannot be written now: a control.db has them up to it, of a later
    /// state of this journal.
    ///
    /// # Errors
    /// As for [`append`](Self::append). Nothing has changed.
    pub fn raise_bills(&mut self, through: i64) -> Result<(), DbError> {
        self.bills_after = Some(through);
        let at = self.usual();
        self.transact(at, |change| {
            fail_point!("journal-raise-bills", |_| Err(DbError::DiskFull {
                path: change.path().to_path_buf()
            }));
            number_after(change, through)
        })?;
        self.bills_after = None;
        self.committed(at);
        Ok(())
    }

    /// Goes on metering where nothing can be written: bills wait until it can.
    pub(crate) fn meter(&mut self, batch: &[Record], now_unix: u64) {
        if self.unbilled.len() > MOST_UNBILLED {
            self.unbilled = by_hour(std::mem::take(&mut self.unbilled), now_unix.saturating_sub(RECENT_S));
        }
        for record in batch {
            match record {
                Record::Admission(admission) => {
                    let Admission { request, tenant, saved, .. } = admission.as_ref();
                    let meter = Meter::of(saved, self.names.get(&saved.model));
                    self.live.insert(*request, Live { seq: 0, tenant: *tenant, entries: 0, meter });
                }
                Record::Step(step) => {
                    for (request, cached_tokens) in &step.started {
                        if let Some(live) = self.live.get_mut(request) {
                            live.meter.start(*cached_tokens);
                        }
                    }
                    for (request, entry) in &step.entries {
                        let Some(live) = self.live.get_mut(request) else { continue };
                        live.meter.take(*entry);
                        if matches!(entry, Entry::End { .. }) {
                            let bill = live.meter.bill(live.tenant, computed(step, *request));
                            add(&mut self.unbilled, now_unix, bill);
                            self.live.remove(request);
                        }
                    }
                }
            }
        }
    }

    /// Takes over what a journal has metered that stood in for this one.
    pub(crate) fn take_meters(&mut self, stand_in: Self) {
        for ((at, payer), usage) in stand_in.unbilled {
            add(&mut self.unbilled, at, (payer, usage));
        }
        self.live.extend(stand_in.live);
    }
}

/// A live request's row, as far as a meter needs it.
struct MeterRow {
    seq: i64,
    request: RequestId,
    tenant: TenantId,
    key: Option<u32>,
    model: Option<String>,
    prompt: Option<u32>,
    cached: Option<u32>,
}

/// Every live request of a file, metered up to what is in it.
pub(crate) fn live(
    db: &Connection,
    path: &Path,
    names: &mut Names,
) -> Result<HashMap<RequestId, Live>, DbError> {
    let query = "SELECT seq, id, tenant, key, model, prompt_tokens, cached_tokens FROM requests
                 WHERE finished_unix IS NULL";
    let found = rows(db, path, query, [], |row| {
        Ok(MeterRow {
            seq: row.get(0)?,
            request: RequestId(row.get(1)?),
            tenant: TenantId(row.get(2)?),
            key: row.get(3)?,
            model: row.get(4)?,
            prompt: row.get(5)?,
            cached: row.get(6)?,
        })
    })?;
    let mut by_row: HashMap<i64, (RequestId, Live)> = HashMap::with_capacity(found.len());
    for row in found {
        let MeterRow { seq, request, tenant, key, model, prompt, cached } = row;
        let (key, model, prompt) = match (model, prompt) {
            (Some(model), Some(prompt)) => (key.and_then(read_key), names.get(&model), prompt),
            // An older pagedd took it: all of that stands in the body alone.
            _ => of_body(db, path, seq, names)?,
        };
        let meter = Meter { key, model, prompt, cached, output: 0, outcome: Outcome::Complete };
        by_row.insert(seq, (request, Live { seq, tenant, entries: 0, meter }));
    }
    if by_row.is_empty() {
        return Ok(HashMap::new());
    }
    let mut take = |seq: i64, entry: Entry| {
        if let Some((_, live)) = by_row.get_mut(&seq) {
            live.entries += 1;
            live.meter.take(entry);
        }
    };
    let logs = "SELECT request, entries FROM logs WHERE request IN (SELECT seq FROM requests WHERE finished_unix IS NULL)";
    let parts = rows(db, path, logs, [], |row| {
        Ok((row.get::<_, i64>(0)?, unseal::<Vec<Entry>>(row.get_ref(1)?.as_blob()?)))
    })?;
    // What cannot be read is not known: its request is set aside for that.
    for (seq, entries) in parts {
        entries.unwrap_or_default().into_iter().for_each(|entry| take(seq, entry));
    }
    let steps = "SELECT entries FROM steps ORDER BY id";
    let parts = rows(db, path, steps, [], |row| Ok(unseal::<Vec<StepEntry>>(row.get_ref(0)?.as_blob()?)))?;
    for entries in parts {
        let mut seq = 0_i64;
        for StepEntry { behind, entry } in entries.unwrap_or_default() {
            seq = seq.wrapping_add(behind);
            take(seq, entry);
        }
    }
    Ok(by_row.into_values().collect())
}

fn of_body(
    db: &Connection,
    path: &Path,
    seq: i64,
    names: &mut Names,
) -> Result<(Option<u32>, Arc<str>, u32), DbError> {
    let query = "SELECT body FROM bodies WHERE request = ?1";
    let bodies = rows(db, path, query, [seq], |row| Ok(unseal::<SavedRequest>(row.get_ref(0)?.as_blob()?)))?;
    let Some(Ok(saved)) = bodies.into_iter().next() else { return Ok((None, names.get(""), 0)) };
    Ok((saved.key, names.get(&saved.model), saved.prompt.len() as u32))
}

#[cfg(test)]
mod tests;
