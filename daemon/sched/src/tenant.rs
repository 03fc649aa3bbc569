//! One tenant's queue and counters.
//!
//! **Owns** which of its sequences wait, in what order. **Never** holds a block.

use std::collections::BTreeSet;

use pagedd_core::SequenceId;
use pagedd_kv::{AccountId, BlockKey};

use crate::config::ShareSpec;
use crate::policy::Rank;

/// A tenant of this engine.
#[derive(Debug)]
pub(crate) struct Tenant {
    pub account: AccountId,
    /// The share as it was last set. The account follows as soon as every admitted request fits it.
    pub target: ShareSpec,
    /// What the keys of its prefixes start from.
    pub root: BlockKey,
    /// Sequences that wait, without blocks.
    pub queue: BTreeSet<(Rank, SequenceId)>,
    /// How many of its sequences run.
    pub running: u32,
    /// How many of its requests have not started.
    pub unstarted: u32,
    /// Whether its sequences guess what they say next; `None` is as the engine says.
    pub prompt_lookup: Option<bool>,
    pub counters: Counters,
}

/// Monotonic.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Counters {
    pub preemptions: u64,
    pub prefix_queries: u64,
    pub prefix_hits: u64,
    pub recomputed: u64,
    pub aborted: u64,
    pub prompt_tokens: u64,
    pub output_tokens: u64,
    pub drafts: u64,
    pub drafts_accepted: u64,
}

impl Tenant {
    pub fn new(account: AccountId, target: ShareSpec, root: BlockKey) -> Self {
        let (queue, counters) = (BTreeSet::new(), Counters::default());
        Self { account, target, root, queue, running: 0, unstarted: 0, prompt_lookup: None, counters }
    }

    /// The sequence that starts next.
    pub fn head(&self) -> Option<SequenceId> {
        self.queue.first().map(|(_, id)| *id)
    }
}
