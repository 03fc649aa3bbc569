//! The bill: from journal.db, where each request's use is committed with its end, to control.db, where it is added up.
//!
//! **Owns** the order: on disk in the journal, then added in control.db together with up to which bill it is, then deleted in the journal.
//! Whatever ends the daemon in between, the next one goes on with what is not added yet. **Never** holds up the journal's thread: it waits
//! for control.db elsewhere.

use std::sync::Arc;
use std::time::Duration;

use fail::fail_point;
use pagedd_control::{ControlError, ErrorCode, UsageAsk, UsageBy, UsageReport, UsageRow};
use pagedd_core::TenantId;
use pagedd_journal::{Bill, DbError, JournalDb, Kept, LedgerId, RECENT_S, UsageQuery};
use tokio::sync::{Mutex, Notify, mpsc, oneshot};
use tracing::warn;

use crate::daemon::Db;
use crate::quota::Accounts;
use crate::recorder::Told;

/// Between the end of a request and its bill in control.db: one commit for all that end meanwhile.
const EVERY: Duration = Duration::from_secs(10);
/// Between two tries where a database takes nothing.
const RETRY: Duration = Duration::from_mins(1);
/// Bills that are added at once.
pub const AT_ONCE: u32 = 1024;
/// How long a bill stays in the journal at least, in seconds: quotas by the minute need the last one after a restart.
pub const KEPT_S: u64 = 120;
/// Rows of a report: what fits a line of the admin protocol.
const MOST_ROWS: usize = 50_000;

/// Bills of a journal that are not known to be added.
pub struct Billing {
    /// Whose numbers they have.
    pub journal: LedgerId,
    /// In order.
    pub bills: Vec<Bill>,
}

/// Adds bills up.
pub struct Collector {
    /// control.db.
    pub db: Db,
    /// The journal's thread.
    pub recorder: mpsc::Sender<Told>,
    /// Told when there are bills.
    pub billed: Arc<Notify>,
    /// Two at once would read the same bills; only one would add them.
    pub one: Mutex<()>,
}

impl Collector {
    /// Adds up what comes, a little later. An idle daemon has nothing to do here.
    pub async fn run(self: Arc<Self>) {
        loop {
            self.billed.notified().await;
            tokio::time::sleep(EVERY).await;
            while let Err(ControlError { message, .. }) = self.collect().await {
                warn!(reason = message, "what requests used is not added up in control.db yet");
                tokio::time::sleep(RETRY).await;
            }
        }
    }

    /// Adds up what has ended so far.
    ///
    /// # Errors
    /// A database cannot be used now. What is not added stays in the journal.
    pub async fn collect(&self) -> Result<(), ControlError> {
        let _one = self.one.lock().await;
        loop {
            let gone = || ControlError::new(ErrorCode::Internal, "the journal's thread has ended");
            let (answer, billing) = oneshot::channel();
            self.recorder.send(Told::Bills(answer)).await.map_err(|_| gone())?;
            let Billing { journal, bills } = billing
                .await
                .map_err(|_| gone())?
                .map_err(|error| ControlError::new(ErrorCode::Internal, error))?;
            if bills.is_empty() {
                return Ok(());
            }
            fail_point!("before-charge");
            let whole = bills.len() < AT_ONCE as usize;
            let last = bills.last().map_or(0, |bill| bill.number);
            // What is added already is left out there.
            let through = self.db.with(move |db| db.charge(journal, &bills)).await?.max(last);
            fail_point!("after-charge");
            drop(self.recorder.send(Told::Billed(journal, through)).await);
            if whole {
                return Ok(());
            }
        }
    }

    /// What was used, with what has ended up to now.
    ///
    /// # Errors
    /// control.db cannot be read, or there never was such a tenant.
    pub async fn report(&self, ask: UsageAsk) -> Result<UsageReport, ControlError> {
        let behind = self.collect().await.err().map(|error| error.message);
        let UsageAsk { tenant, since_unix, by } = ask;
        let query = UsageQuery { tenant: tenant.clone(), since_unix, by: by_of(by) };
        let (known, rows) = self
            .db
            .with(move |db| {
                let known = query.tenant.as_deref().map_or(Ok(true), |name| db.was_known(name))?;
                Ok((known, db.usage(&query)?))
            })
            .await?;
        if let Some(name) = tenant.filter(|_| !known) {
            return Err(ControlError::new(
                ErrorCode::UnknownTenant,
                format!("there never was a tenant `{name}`"),
            )
            .remedy("`pagedctl usage` shows all that used something, removed ones too"));
        }
        if rows.len() > MOST_ROWS {
            let message = format!("these are {} rows, and {MOST_ROWS} are shown at most", rows.len());
            return Err(ControlError::new(ErrorCode::InvalidRequest, message)
                .remedy("name a tenant, or a later --since, or use --by day"));
        }
        Ok(UsageReport { since_unix, by, behind, rows: rows.into_iter().map(row).collect() })
    }
}

fn by_of(by: UsageBy) -> pagedd_journal::UsageBy {
    match by {
        UsageBy::Tenant => pagedd_journal::UsageBy::Tenant,
        UsageBy::Day => pagedd_journal::UsageBy::Day,
        UsageBy::Hour => pagedd_journal::UsageBy::Hour,
        UsageBy::Key => pagedd_journal::UsageBy::Key,
        UsageBy::Model => pagedd_journal::UsageBy::Model,
    }
}

fn row(row: pagedd_journal::UsageRow) -> UsageRow {
    let pagedd_journal::UsageRow { tenant, name, removed, from_unix, key, model, usage } = row;
    UsageRow {
        id: tenant.0,
        tenant: name,
        removed,
        from_unix,
        key: key.flatten(),
        model,
        requests: usage.requests,
        aborted: usage.aborted,
        failed: usage.failed,
        prompt_tokens: usage.prompt_tokens,
        cached_tokens: usage.cached_tokens,
        output_tokens: usage.output_tokens,
    }
}

/// Has accounts begin with what tenants used within the last minute before this daemon. Of a request that runs still it is not known when its
/// tokens were computed: all of them count as of now.
///
/// # Errors
/// The journal cannot be read.
pub fn recall(accounts: &Accounts, journal: &JournalDb, live: &[Kept], now_unix: u64) -> Result<(), DbError> {
    // Both times are rounded down to seconds: what is taken for younger than it is counts a second too long, and never too short.
    let ago = |unix: u64| now_unix.saturating_sub(unix).saturating_sub(1);
    let bills = journal.bills_since(now_unix.saturating_sub(RECENT_S))?;
    let mut used: Vec<(u64, TenantId, u64, u64)> = bills
        .into_iter()
        .map(|Bill { at_unix, payer, usage, .. }| {
            (ago(at_unix), payer.tenant, usage.requests, usage.prompt_tokens + usage.output_tokens)
        })
        .collect();
    for kept in live {
        let (saved, tenant) = (&kept.admission.saved, kept.admission.tenant);
        if ago(saved.created_unix) < RECENT_S {
            used.push((ago(saved.created_unix), tenant, 1, 0));
        }
        let is_token = |entry: &&pagedd_journal::Entry| matches!(entry, pagedd_journal::Entry::Token { .. });
        let generated = kept.entries.iter().filter(is_token).count() as u64;
        let prompt = if kept.cached_tokens.is_some() { saved.prompt.len() as u64 } else { 0 };
        used.push((0, tenant, 0, prompt + generated));
    }
    used.sort_by_key(|(ago, ..)| std::cmp::Reverse(*ago));
    for (ago, tenant, requests, tokens) in used {
        accounts.of(tenant).recall(ago, requests, tokens);
    }
    Ok(())
}
