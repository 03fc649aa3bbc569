//! What a tenant may ask for within a minute, and at once.

use std::fmt;

/// A kind of quota.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Quota {
    /// Requests admitted within any minute.
    RequestsPerMinute,
    /// Tokens, of prompts and generated, within any minute.
    TokensPerMinute,
    /// Requests that were admitted and have not ended.
    MaxConcurrent,
    /// Requests that were admitted and have not started.
    MaxQueuedRequests,
    /// Prompt tokens of requests that have not started.
    MaxQueuedTokens,
}

impl Quota {
    /// Every kind.
    pub const ALL: [Self; 5] = [
        Self::RequestsPerMinute,
        Self::TokensPerMinute,
        Self::MaxConcurrent,
        Self::MaxQueuedRequests,
        Self::MaxQueuedTokens,
    ];

    /// The name that operators and clients see.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::RequestsPerMinute => "requests_per_minute",
            Self::TokensPerMinute => "tokens_per_minute",
            Self::MaxConcurrent => "max_concurrent",
            Self::MaxQueuedRequests => "max_queued_requests",
            Self::MaxQueuedTokens => "max_queued_tokens",
        }
    }
}

impl fmt::Display for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A tenant's quotas. The default has none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Quotas([Option<u64>; Quota::ALL.len()]);

impl Quotas {
    /// Most of this kind; `None` is without a limit.
    #[must_use]
    pub const fn get(&self, quota: Quota) -> Option<u64> {
        self.0[quota as usize]
    }

    /// Sets a limit, or takes it away.
    pub const fn set(&mut self, quota: Quota, limit: Option<u64>) {
        self.0[quota as usize] = limit;
    }
}
