//! One choice of one request.
//!
//! ```text
//!                begin                          stop, length, cancel, failure
//!   Waiting ───────────────▶ Running ───────────────────────────────▶ Finished ─▶ forgotten
//!      ▲                        │ preempted
//!      │   no plan names it     ▼
//!      └──────────────────── Preempted
//! ```
//! A Waiting sequence has no blocks. Preempted and Finished ones keep theirs until the last plan that names them is applied,
//! since a plan in flight may read them.

use std::collections::VecDeque;

use pagedd_core::{
    BlockId, FinishReason, PlanId, RequestId, SamplingParams, SequenceId, TenantId, TokenId, Tokens,
};
use pagedd_kv::{AccountId, BlockKey, BlockTable, PrefixHasher};

use crate::draft::Drafter;
use crate::policy::Rank;

/// How far a sequence with blocks is. Intervals are of positions, `[0, n)`.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Computed once every plan in flight has run.
    pub computed: Tokens,
    /// Computed by plans that were applied.
    pub applied: Tokens,
    pub table: BlockTable,
    /// Table entries that the worker has once every plan in flight has run.
    pub sent: usize,
    /// Table entries that the worker has from plans that were applied.
    pub sent_applied: usize,
    /// A plan that names it was applied: the worker knows it.
    pub entered: bool,
    /// A plan in flight tries guesses: how far it gets is not known before it is applied.
    pub guesses: bool,
    /// Blocks `[0, committed)` of the table need not be offered to the prefix index any more.
    pub committed: usize,
}

#[derive(Debug)]
pub(crate) enum State {
    /// In its tenant's queue at this rank, or behind the choice that computes the prompt.
    Waiting(Option<Rank>),
    Running(Progress),
    /// To be computed anew, once its blocks are back.
    Preempted(Progress),
    Finished(FinishReason, Progress),
}

#[derive(Debug)]
pub(crate) struct Sequence {
    pub request: RequestId,
    pub tenant: TenantId,
    pub account: AccountId,
    pub choice: u32,
    pub sampling: SamplingParams,
    /// Prompt and applied output. Empty while it waits behind the choice that computes the prompt.
    pub tokens: Vec<TokenId>,
    pub prompt_len: usize,
    /// Plans in flight that draw for it, oldest first: a token each, and more where guesses come true.
    pub pending: VecDeque<PlanId>,
    /// Most tokens it may reach, prompt and output.
    pub limit: usize,
    /// Keys of the full blocks of `tokens`, as far as they were needed.
    pub chain: Vec<BlockKey>,
    /// How many plans in flight name it.
    pub in_flight: u32,
    /// A worker may know it.
    pub begun: bool,
    pub drafter: Drafter,
    pub state: State,
}

impl Sequence {
    /// Tokens known and sure to come.
    pub fn total(&self) -> usize {
        self.tokens.len() + self.pending.len()
    }

    pub fn progress(&self) -> Option<&Progress> {
        match &self.state {
            State::Waiting(_) => None,
            State::Running(p) | State::Preempted(p) | State::Finished(_, p) => Some(p),
        }
    }

    pub fn progress_mut(&mut self) -> Option<&mut Progress> {
        match &mut self.state {
            State::Waiting(_) => None,
            State::Running(p) | State::Preempted(p) | State::Finished(_, p) => Some(p),
        }
    }

    pub fn running(&self) -> Option<&Progress> {
        match &self.state {
            State::Running(p) => Some(p),
            State::Waiting(_) | State::Preempted(_) | State::Finished(..) => None,
        }
    }

    /// Computes the keys of all full blocks of `tokens`.
    pub fn extend_chain(&mut self, hasher: &PrefixHasher, root: BlockKey, size: usize) {
        for block in self.tokens.chunks_exact(size).skip(self.chain.len()) {
            let parent = self.chain.last().copied().unwrap_or(root);
            self.chain.push(hasher.block(parent, block));
        }
    }

    /// Why its last token is its last one, if it is.
    pub fn end(&self, stop_ids: &[TokenId]) -> Option<FinishReason> {
        let drawn = self.tokens.get(self.prompt_len..).and_then(<[_]>::last);
        if drawn.is_some_and(|token| stop_ids.contains(token)) {
            return Some(FinishReason::Stop);
        }
        (self.tokens.len() >= self.limit).then_some(FinishReason::Length)
    }

    pub fn is_finished(&self) -> bool {
        matches!(self.state, State::Finished(..))
    }

    /// Positions `[start, end)` that it could compute now; `None` where it waits for a result, or does not run.
    ///
    /// The last token a sequence may have is never an input.
    pub fn ready(&self) -> Option<(usize, usize)> {
        let progress = self.running()?;
        let (start, end) = (progress.computed.0 as usize, self.total());
        (start < end && end < self.limit && !progress.guesses).then_some((start, end))
    }

    /// The position that it could compute now, where that is the only one and its prompt is done.
    pub fn decodes(&self) -> Option<usize> {
        self.ready()
            .filter(|(start, end)| end - start == 1 && *start >= self.prompt_len)
            .map(|(start, _)| start)
    }
}

/// A sequence as a fresh worker must know it before the plans in flight.
#[derive(Clone, PartialEq, Debug)]
pub struct SequenceSnapshot {
    /// Its id.
    pub seq: SequenceId,
    /// Which choice of its request.
    pub choice: u32,
    /// How its tokens are drawn.
    pub sampling: SamplingParams,
    /// Prompt and applied output.
    pub tokens: Vec<TokenId>,
    /// Tokens of the prompt.
    pub prompt: Tokens,
    /// Its block table.
    pub blocks: Vec<BlockId>,
}
