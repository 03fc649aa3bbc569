//! What an engine tells its scheduler at the start.

use pagedd_core::{Blocks, StepCost, Tokens};

/// In which order a tenant's requests start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PolicyKind {
    /// As they came.
    Fcfs,
}

/// Fixed for the life of a scheduler, but for what [`Tuning`] has.
#[derive(Clone, Debug)]
pub struct SchedulerConfig {
    /// Tokens in a block.
    pub block_size: Tokens,
    /// Blocks in the arena.
    pub capacity: Blocks,
    /// Most sequences that run at a time, hence most rows in a plan.
    pub max_num_seqs: u32,
    /// Most input tokens in a plan.
    pub max_num_batched_tokens: Tokens,
    /// Longest sequence, prompt and output.
    pub max_model_len: Tokens,
    /// Most requests of one tenant that have not started.
    pub max_queued_requests: u32,
    /// Order within a tenant.
    pub policy: PolicyKind,
    /// Secret of the prefix hash, drawn at random by the caller.
    pub cache_key: [u8; 32],
    /// Digest of weights, dtypes and layout: part of every prefix key.
    pub weight_digest: [u8; 16],
    /// Whether computed prefixes are found again.
    pub prefix_cache: bool,
    /// Whether sequences of tenants that say nothing guess what they say next.
    pub prompt_lookup: bool,
    /// Most guesses in a plan.
    pub max_drafts: u32,
    /// What a step takes, as far as that is known.
    pub cost: StepCost,
    /// How long a step may take, as predicted, in which a sequence decodes: prompts beside it are computed in parts that keep to
    /// this, of one block at least. `None` is as long as its tokens take.
    pub itl_target_us: Option<u64>,
}

/// What of a scheduler's configuration may change while it runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tuning {
    /// Most requests of one tenant that have not started. Those that wait already stay.
    pub max_queued_requests: u32,
    /// How long a step may take in which a sequence decodes.
    pub itl_target_us: Option<u64>,
    /// Whether sequences of tenants that say nothing guess what they say next.
    pub prompt_lookup: bool,
}

/// A tenant's bounds in this pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShareSpec {
    /// Guaranteed blocks; the floors of all tenants sum to the capacity at most.
    pub floor: Blocks,
    /// Most blocks, cached ones included.
    pub ceiling: Blocks,
}
