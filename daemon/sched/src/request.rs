//! What enters a scheduler, what leaves it, and what is refused.

use std::collections::VecDeque;

use pagedd_core::{Blocks, FinishReason, RequestId, SamplingParams, SequenceId, TenantId, TokenId, Tokens};

/// A request, valid as such: the gateway checked its fields, the engine drew what was missing.
#[derive(Clone, PartialEq, Debug)]
pub struct NewRequest {
    /// Its id.
    pub id: RequestId,
    /// Whose: from the socket it arrived on.
    pub tenant: TenantId,
    /// Token ids, at least one.
    pub prompt: Vec<TokenId>,
    /// How many choices, at least one.
    pub n: u32,
    /// Most output tokens of each choice, at least one. Never more than the context leaves room for.
    pub max_tokens: Tokens,
    /// Tokens that end a choice; such a token is still emitted.
    pub stop_ids: Vec<TokenId>,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
}

/// A request is not taken. Nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AdmitError {
    /// The tenant has no share here.
    #[error("{0} has no share of this model")]
    UnknownTenant(TenantId),
    /// The prompt leaves no room for a token.
    #[error("the prompt has {prompt} tokens and the model's context is {max_model_len}: shorten it by {}", prompt.0 + 1 - max_model_len.0)]
    ContextLength {
        /// Tokens in the prompt.
        prompt: Tokens,
        /// Longest sequence.
        max_model_len: Tokens,
    },
    /// It would not fit if nothing else ran.
    #[error("the request needs {needed} KV blocks at full length and the tenant can have {allowed}")]
    NeverFits {
        /// At full length, all choices.
        needed: Blocks,
        /// The smaller of the ceiling and what other tenants' floors leave.
        allowed: Blocks,
    },
    /// Too many of the tenant's requests wait already: try later.
    #[error("{waiting} requests of this tenant are waiting, as many as may")]
    QueueFull {
        /// How many.
        waiting: u32,
    },
    /// A request of this id is unfinished.
    #[error("request {0} is here already")]
    Duplicate(RequestId),
    /// There is nothing to compute, because this number is 0.
    #[error("{field} must be at least 1")]
    Nothing {
        /// `prompt` (its length), `n` or `max_tokens`.
        field: &'static str,
    },
}

/// What applying an output gave, to be journaled and then sent.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Applied {
    /// Requests of which this was the first step.
    pub started: Vec<Started>,
    /// New tokens, each choice's in order.
    pub tokens: Vec<Emitted>,
    /// Choices that ended. A choice's tokens stand before its end.
    pub finished: Vec<Finished>,
}

/// A request started. Where it is restored later, this was its start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Started {
    /// Which.
    pub request: RequestId,
    /// Of whom.
    pub tenant: TenantId,
    /// Prompt tokens that it found in the prefix cache.
    pub cached_tokens: Tokens,
}

/// A token of one choice.
#[derive(Clone, PartialEq, Debug)]
pub struct Emitted {
    /// Of which request.
    pub request: RequestId,
    /// Of whom.
    pub tenant: TenantId,
    /// Of which choice.
    pub choice: u32,
    /// The token.
    pub token: TokenId,
    /// Its natural-log probability, where it was asked for.
    pub logprob: Option<f32>,
    /// The most likely tokens, best first; empty unless asked for.
    pub top: Vec<(TokenId, f32)>,
}

/// A choice ended. There is exactly one for each choice of each admitted request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finished {
    /// Of which request.
    pub request: RequestId,
    /// Of whom.
    pub tenant: TenantId,
    /// Which.
    pub choice: u32,
    /// Why.
    pub reason: FinishReason,
    /// On the last choice of a request: the request has ended, and this is what it used.
    pub ended: Option<Ended>,
}

/// What a request used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ended {
    /// Tokens of the prompt that were computed or found in the prefix cache: all of them, unless it ended before.
    pub prompt_tokens: Tokens,
    /// Of these, found in the prefix cache when the request started; never the whole prompt.
    pub cached_tokens: Tokens,
    /// Emitted tokens of all choices.
    pub output_tokens: Tokens,
}

/// An unfinished request.
#[derive(Debug)]
pub(crate) struct Request {
    pub tenant: TenantId,
    pub prompt: Vec<TokenId>,
    pub stop_ids: Vec<TokenId>,
    /// Blocks at full length, all choices.
    pub needed: Blocks,
    /// Choices that have not ended.
    pub open: Vec<SequenceId>,
    /// Choices that wait for the prompt's end, in order. They fork from the choice that computes it.
    pub followers: VecDeque<SequenceId>,
    /// Prompt tokens found in the prefix cache when it first started.
    pub cached_tokens: Option<Tokens>,
    /// Prompt tokens that were computed, or found there; all of them once something was emitted.
    pub prompt_computed: Tokens,
    pub output_tokens: Tokens,
}

impl Request {
    /// What it has used.
    pub fn used(&self) -> Ended {
        let prompt = Tokens(self.prompt.len() as u32);
        let cached = self.cached_tokens.unwrap_or_default();
        let begun = if self.output_tokens > Tokens::ZERO { prompt } else { self.prompt_computed };
        Ended { prompt_tokens: begun.max(cached), cached_tokens: cached, output_tokens: self.output_tokens }
    }
}
