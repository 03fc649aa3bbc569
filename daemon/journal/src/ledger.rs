//! control.db's side of the bill: what every tenant has used, by the hour.
//!
//! **Owns** that each bill of a journal is added once: up to which one is changed in the transaction that adds it. **Never** forgets a
//! tenant that was removed: the bill comes afterwards.

use crate::usage::{read_key, read_usage, written};
use crate::{Bill, ControlDb, DbError, LedgerId, Payer, Usage};
use fail::fail_point;
use pagedd_core::TenantId;
use rusqlite::params;
use std::collections::BTreeMap;

/// Seconds that are one in the table.
const HOUR: i64 = 3_600;

/// By what usage is told apart, beside the tenant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum UsageBy {
    /// One row for each tenant.
    Tenant,
    /// Rows of a day (UTC).
    Day,
    /// Rows of an hour.
    Hour,
    /// Rows of a key.
    Key,
    /// Rows of a model.
    Model,
}

/// What is asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UsageQuery {
    /// Of the tenants of this name, the present one and removed ones; `None` is of all.
    pub tenant: Option<String>,
    /// From the hour of this moment on, in seconds since 1970.
    pub since_unix: u64,
    /// By what.
    pub by: UsageBy,
}

/// What was used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UsageRow {
    /// Whose.
    pub tenant: TenantId,
    /// Its name; `None` where this database never knew it.
    pub name: Option<String>,
    /// Whether the tenant is gone.
    pub removed: bool,
    /// When the row's time begins, in seconds since 1970: where it is asked by day or hour.
    pub from_unix: Option<u64>,
    /// With which key, where it is asked by key; `Some(None)` where none was needed.
    pub key: Option<Option<u32>>,
    /// Of which model, where it is asked by model.
    pub model: Option<String>,
    /// How much.
    pub usage: Usage,
}

impl ControlDb {
    /// Up to which of its bills a journal's were [added](Self::charge); 0 before the first.
    ///
    /// # Errors
    /// Where the file cannot be read.
    pub fn billed(&self, journal: LedgerId) -> Result<i64, DbError> {
        let query = "SELECT through FROM billed WHERE journal = ?1";
        Ok(self.rows(query, [journal.0], |row| row.get(0))?.pop().unwrap_or(0))
    }

    /// Adds a journal's bills up, but for those that were added before; on disk when it returns. Says up to which they are.
    ///
    /// # Errors
    /// [`DbError::DiskFull`] and those of a broken disk. Nothing has changed.
    pub fn charge(&mut self, journal: LedgerId, bills: &[Bill]) -> Result<i64, DbError> {
        let before = self.billed(journal)?;
        let mut sums: BTreeMap<(Payer, i64), Usage> = BTreeMap::new();
        let mut through = before;
        for bill in bills.iter().filter(|bill| bill.number > before) {
            *sums.entry((bill.payer.clone(), bill.at_unix as i64 / HOUR)).or_default() += bill.usage;
            through = through.max(bill.number);
        }
        if through == before {
            return Ok(through);
        }
        self.change(|change| {
            for ((payer, hour), usage) in &sums {
                change.run(
                    "INSERT INTO usage
                         (hour, tenant, key, model, requests, aborted, failed, prompt_tokens, cached_tokens, output_tokens)
                     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)
                     ON CONFLICT (tenant, hour, key, model) DO UPDATE SET
                         requests = requests + excluded.requests, aborted = aborted + excluded.aborted,
                         failed = failed + excluded.failed, prompt_tokens = prompt_tokens + excluded.prompt_tokens,
                         cached_tokens = cached_tokens + excluded.cached_tokens,
                         output_tokens = output_tokens + excluded.output_tokens",
                    written(*hour, payer, usage),
                )?;
            }
            change.run(
                "INSERT INTO billed (journal, through) VALUES (?1, ?2)
                 ON CONFLICT (journal) DO UPDATE SET through = excluded.through",
                params![journal.0, through],
            )?;
            fail_point!("control-charge");
            Ok(())
        })?;
        Ok(through)
    }

    /// What was used, by tenant and then by time, key or model.
    ///
    /// # Errors
    /// Where the file cannot be read.
    pub fn usage(&self, query: &UsageQuery) -> Result<Vec<UsageRow>, DbError> {
        let UsageQuery { tenant, since_unix, by } = query;
        let what = match by {
            UsageBy::Tenant => "NULL, NULL, NULL",
            UsageBy::Day => "hour / 24 * 24 * 3600, NULL, NULL",
            UsageBy::Hour => "hour * 3600, NULL, NULL",
            UsageBy::Key => "NULL, key, NULL",
            UsageBy::Model => "NULL, NULL, usage.model",
        };
        let text = format!(
            "SELECT usage.tenant, names.name, tenants.id IS NULL, {what},
                 sum(requests), sum(aborted), sum(failed), sum(prompt_tokens), sum(cached_tokens), sum(output_tokens)
             FROM usage LEFT JOIN names ON names.tenant = usage.tenant LEFT JOIN tenants ON tenants.id = usage.tenant
             WHERE hour >= ?1 AND (?2 IS NULL OR names.name = ?2)
             GROUP BY 1, 4, 5, 6 ORDER BY names.name, 1, 4, 5, 6"
        );
        self.rows(&text, params![*since_unix as i64 / HOUR, tenant], |row| {
            Ok(UsageRow {
                tenant: TenantId(row.get(0)?),
                name: row.get(1)?,
                removed: row.get(2)?,
                from_unix: row.get::<_, Option<i64>>(3)?.map(|unix| unix as u64),
                key: row.get::<_, Option<u32>>(4)?.map(read_key),
                model: row.get(5)?,
                usage: read_usage(row, 6)?,
            })
        })
    }

    /// Whether a tenant of this name is there, or was.
    ///
    /// # Errors
    /// Where the file cannot be read.
    pub fn was_known(&self, name: &str) -> Result<bool, DbError> {
        let query = "SELECT EXISTS (SELECT 1 FROM names WHERE name = ?1)";
        Ok(self.rows(query, [name], |row| row.get(0))?.pop().unwrap_or(false))
    }
}

#[cfg(test)]
mod tests;
