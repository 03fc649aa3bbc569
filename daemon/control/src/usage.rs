//! What tenants have used, for their bill.

use serde::{Deserialize, Serialize};

/// Asks for it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct UsageAsk {
    /// Of the tenants of this name, removed ones too; `None` is of all.
    pub tenant: Option<String>,
    /// From the hour of this moment on, in seconds since 1970.
    pub since_unix: u64,
    /// What a row is, beside a tenant's.
    pub by: UsageBy,
}

/// What a row is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UsageBy {
    /// All of a tenant.
    Tenant,
    /// A day, in UTC.
    Day,
    /// An hour.
    Hour,
    /// A key.
    Key,
    /// A model.
    Model,
}

/// What was used by requests that have ended.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct UsageReport {
    /// Since when.
    pub since_unix: u64,
    /// What a row is of.
    pub by: UsageBy,
    /// Why requests of the last while may be missing; they are added as soon as it is mended.
    pub behind: Option<String>,
    /// By tenant, then by time, key or model.
    pub rows: Vec<UsageRow>,
}

/// What was used.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct UsageRow {
    /// Number of the tenant.
    pub id: u32,
    /// Its name; `None` where it is not known any more.
    pub tenant: Option<String>,
    /// Whether the tenant was removed.
    pub removed: bool,
    /// When the day or hour begins, in seconds since 1970.
    pub from_unix: Option<u64>,
    /// Number of the key; `None` where none was needed, or where rows are of something else.
    pub key: Option<u32>,
    /// The model.
    pub model: Option<String>,
    /// Requests that have ended.
    pub requests: u64,
    /// Of those, cancelled before their end.
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
