//! Quotas, as they are set and shown.

use serde::{Deserialize, Serialize};

/// A limit that is set.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QuotaLimit {
    /// No limit.
    None,
    /// At most so much, 1 at least.
    At(u64),
}

/// Quotas that are set; `None` leaves one as it is, which for a new tenant is without a limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct QuotaChanges {
    /// Requests admitted within any minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests_per_minute: Option<QuotaLimit>,
    /// Tokens, of prompts and generated, within any minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_minute: Option<QuotaLimit>,
    /// Requests that were admitted and have not ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_concurrent: Option<QuotaLimit>,
    /// Requests that were admitted and have not started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_queued_requests: Option<QuotaLimit>,
    /// Prompt tokens of requests that have not started.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_queued_tokens: Option<QuotaLimit>,
}

impl QuotaChanges {
    /// Whether nothing is set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// How a quota stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct QuotaUse {
    /// How much it is; `None` is without a limit.
    pub limit: Option<u64>,
    /// How much of it is taken now.
    pub used: u64,
    /// Requests that were refused for it since the daemon started.
    pub refused: u64,
}

/// How a tenant's quotas stand.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct QuotaInfo {
    /// Requests admitted within the last minute.
    pub requests_per_minute: QuotaUse,
    /// Tokens of the last minute, and those that admitted requests may still come to.
    pub tokens_per_minute: QuotaUse,
    /// Requests that were admitted and have not ended.
    pub max_concurrent: QuotaUse,
    /// Requests that were admitted and have not started.
    pub max_queued_requests: QuotaUse,
    /// Prompt tokens of requests that have not started.
    pub max_queued_tokens: QuotaUse,
}
