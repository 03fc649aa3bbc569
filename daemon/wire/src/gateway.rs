//! Daemon ⇄ gateway.
//!
//! The socket names the tenant (I4): no frame carries a tenant id. `Attach` is the only way tokens reach a gateway, for a
//! request it has just made as for one it finds again after its own death: entries `[from, ..)` of the request's log, in
//! order, each exactly once per attachment. What a gateway sends to its client is a pure function of (context, entries).

use serde::{Deserialize, Serialize};

use crate::Sampling;

/// A request's 128-bit id.
pub type RequestId = [u8; 16];

/// From the gateway.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum ToDaemon {
    /// First frame.
    Hello {
        /// [`crate::PROTOCOL`].
        protocol: u32,
    },
    /// Admit this request. Answered by `Accepted` or `Refused` with the same ticket.
    Submit {
        /// Chosen by the gateway; unique among its open questions.
        ticket: u64,
        /// What is asked for.
        request: Box<Request>,
    },
    /// Send the entries `[from, ..)` of this request's log, and those to come. Answered by `Attached` or `NotFound`.
    Attach {
        /// Which.
        request: RequestId,
        /// First entry wanted.
        from: u64,
    },
    /// Send no more of its entries: nobody reads it here any more. It runs on where it runs.
    Detach {
        /// Which.
        request: RequestId,
        /// It has ended, and whoever wanted it has all of it, or wants it no more: nobody is expected to come back for it.
        done: bool,
    },
    /// The client left: stop within one iteration.
    Cancel {
        /// Which.
        request: RequestId,
    },
    /// A stop string matched: end this choice. Entries of it that come later are ignored by every reader of the log, since
    /// each finds the same match.
    Stop {
        /// Which.
        request: RequestId,
        /// Which choice.
        choice: u32,
    },
    /// Answered by `Answer` with the same ticket.
    Query {
        /// Chosen by the gateway.
        ticket: u64,
        /// What.
        query: Query,
    },
}

/// A question to the daemon.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Query {
    /// Is the engine able to serve, and when did it last complete a step?
    Health,
    /// The tenant's metrics in Prometheus text format.
    Metrics,
}

/// A checked, tokenised request.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Request {
    /// Prompt tokens; never empty.
    pub prompt: Vec<u32>,
    /// How tokens are drawn. Choice `i` draws from the stream `(seed, i)`.
    pub sampling: Sampling,
    /// Choices, at least 1.
    pub n: u32,
    /// Most output tokens per choice, at least 1.
    pub max_tokens: u32,
    /// Tokens that end a choice (they are delivered, and the gateway shows nothing for them); empty with `ignore_eos`.
    pub stop_ids: Vec<u32>,
    /// What happens when the client leaves.
    pub on_leave: OnLeave,
    /// The key that made it; see [`KeyEntry`].
    pub key: Option<u32>,
    /// Under what its client asks for it again (`Idempotency-Key`). `None` makes a new request in any case.
    pub idempotency: Option<Idempotency>,
    /// What the gateway needs to render the answer again: its own encoding, opaque to the daemon.
    pub context: Vec<u8>,
}

/// An `Idempotency-Key`, and what it was sent with. Both are SHA-256 digests: neither a client's key nor its text is kept for it.
///
/// The gateway digests what the client sent, before it drew a seed or a default: a repeated request has the same digests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Idempotency {
    /// Of the caller and its key: two API keys of a tenant never meet in one.
    pub key: [u8; 32],
    /// Of the path and the bytes of the body.
    pub body: [u8; 32],
}

/// What happens when the client leaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum OnLeave {
    /// The gateway cancels; the daemon does where nobody attaches again in time.
    Cancel,
    /// The request runs on and can be attached again (`pagedd-resumable: 1`).
    RunOn,
    /// It was answered at once, and nobody is expected to read along: never cancelled for want of a reader.
    Background,
}

/// From the daemon.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum ToGateway {
    /// First frame, and again whenever any of it changed.
    Welcome(Box<Welcome>),
    /// Admitted; its admission is committed.
    Accepted {
        /// Of the `Submit`.
        ticket: u64,
        /// Its id. The gateway attaches next.
        request: RequestId,
        /// Nothing was admitted: this is the request that the same [`Idempotency`] made before. It may run still, or have ended.
        repeated: bool,
        /// How the tenant's quotas stand, this request included.
        rates: Rates,
    },
    /// Not admitted; nothing was kept.
    Refused {
        /// Of the `Submit`.
        ticket: u64,
        /// Why.
        refusal: Refusal,
    },
    /// The attachment stands; entries follow.
    Attached {
        /// Which.
        request: RequestId,
        /// The key that made it.
        key: Option<u32>,
        /// [`Request::context`].
        context: Vec<u8>,
        /// Prompt tokens.
        prompt_tokens: u32,
        /// Unix seconds of its admission.
        created: u64,
        /// Choices.
        n: u32,
        /// Entries that its log has at this moment; those from the attachment's start on follow at once.
        entries: u64,
        /// It does not run: its model has no room for it as it is set up now.
        held: bool,
    },
    /// No such request of this tenant (any more).
    NotFound {
        /// Which.
        request: RequestId,
    },
    /// New entries, of any number of attached requests.
    Entries(Vec<Delivery>),
    /// Answer to a `Query`.
    Answer {
        /// Of the `Query`.
        ticket: u64,
        /// What.
        answer: Answer,
    },
    /// End open streams with a final event that says how to re-attach, then exit.
    Shutdown,
    /// Why [`Shutdown`](Self::Shutdown) follows. Without it, the server restarts.
    Parting(Parting),
}

/// Why a gateway is told to end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub enum Parting {
    /// The daemon ends, and the next one goes on.
    #[default]
    Restarting,
    /// The tenant has another port.
    Moved {
        /// The new one.
        port: u16,
    },
    /// The next daemon begins with a checkpoint.
    Restored,
    /// The tenant was removed, and its requests with it.
    Removed,
}

/// What a gateway must know to serve.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Welcome {
    /// Name of the tenant.
    pub tenant: String,
    /// Name under which clients ask for the model.
    pub model: String,
    /// Unix seconds since when the model is served (`created` of `/v1/models`).
    pub since: u64,
    /// Longest sequence, prompt and output, in tokens.
    pub max_model_len: u32,
    /// Vocabulary size.
    pub vocab_size: u32,
    /// Most output tokens where a chat request names none; `None` is the rest of the context.
    pub default_max_tokens: Option<u32>,
    /// Most choices per request.
    pub max_n: u32,
    /// Largest request body, in bytes.
    pub max_body: u64,
    /// Most open connections.
    pub max_connections: u32,
    /// How long a request's head may take, in milliseconds.
    pub header_timeout_ms: u32,
    /// How long a connection may stay without a request, in milliseconds.
    pub idle_timeout_ms: u32,
    /// Accepted keys; `None` needs no key.
    pub keys: Option<Vec<KeyEntry>>,
    /// Requests are refused while this is set (tenant suspended, daemon draining, model failed).
    pub closed: Option<Closed>,
}

/// Why a tenant's port answers 503.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Closed {
    /// `pagedctl tenant suspend`.
    Suspended,
    /// An operator drains the daemon, or it goes down: what was accepted goes on.
    Draining,
    /// It has moved to another port, and this process ends.
    Moved {
        /// Which.
        port: u16,
    },
    /// The model is still loading.
    Loading,
    /// The model could not be loaded, or its worker died too often. Why is not told here: it names what is the operator's alone.
    Failed,
    /// The tenant's share does not fit the model's pool any more.
    Misfit,
}

/// A bearer key, by digest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct KeyEntry {
    /// Number of the key, for [`Request::key`].
    pub id: u32,
    /// SHA-256 of the key.
    pub sha256: [u8; 32],
}

/// Why a request was not admitted. One variant per answer that the client gets.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Refusal {
    /// 400: prompt and output do not fit the context.
    ContextLength {
        /// Prompt tokens.
        prompt: u32,
        /// Output tokens asked for.
        max_tokens: u32,
        /// Longest sequence.
        limit: u32,
    },
    /// 400: it can never fit what this tenant may hold.
    NeverFits {
        /// Blocks it needs at full length.
        needed: u32,
        /// Blocks this tenant may hold at most.
        allowed: u32,
        /// Tokens in a block.
        block_size: u32,
    },
    /// 400: a field is out of range in a way only the daemon can see.
    Invalid {
        /// The field.
        param: String,
        /// One line.
        message: String,
    },
    /// 429.
    QueueFull {
        /// Requests of this tenant that wait.
        waiting: u32,
        /// Seconds after which to try again, from the measured drain rate.
        retry_after: u32,
    },
    /// 429: a quota of the tenant's is used up.
    OverQuota {
        /// Its name.
        quota: String,
        /// How much it is.
        limit: u64,
        /// How much of it is taken.
        used: u64,
        /// How much the request asks for.
        asked: u64,
        /// When the request would be admitted, in milliseconds.
        retry_after_ms: u64,
        /// How the tenant's quotas stand.
        rates: Rates,
    },
    /// 400: the request alone is more than a quota of the tenant's.
    BeyondQuota {
        /// Its name.
        quota: String,
        /// How much it is.
        limit: u64,
        /// How much the request asks for.
        asked: u64,
    },
    /// 503.
    Closed(Closed),
    /// 422: the same [`Idempotency::key`] came with another [`Idempotency::body`] before.
    IdempotencyConflict,
    /// 409: the request that the same [`Idempotency::key`] came with first was not admitted in time, nor refused.
    IdempotencyBusy {
        /// Seconds after which to try again.
        retry_after: u32,
    },
    /// 503: whether the same [`Idempotency::key`] came before cannot be read.
    IdempotencyUnknown {
        /// Seconds after which to try again.
        retry_after: u32,
    },
}

/// How a tenant's quotas by the minute stand; `None` is without a limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Rates {
    /// Of requests.
    pub requests: Option<Rate>,
    /// Of tokens.
    pub tokens: Option<Rate>,
}

/// How one quota by the minute stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Rate {
    /// The quota.
    pub limit: u64,
    /// What is left of it.
    pub remaining: u64,
    /// Milliseconds until all of it is there again.
    pub reset_ms: u64,
}

/// New entries of one request: `[from, from + entries.len())` of its log.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Delivery {
    /// Which.
    pub request: RequestId,
    /// Position of the first entry.
    pub from: u64,
    /// The entries.
    pub entries: Vec<Entry>,
}

/// An entry of a request's log.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum Entry {
    /// A token.
    Token {
        /// Of which choice.
        choice: u32,
        /// Which.
        token: u32,
    },
    /// A choice ended.
    Finish {
        /// Which.
        choice: u32,
        /// Why.
        reason: Finish,
    },
    /// Every choice ended. The last entry.
    End {
        /// Prompt tokens that were found in the prefix cache.
        cached_tokens: u32,
    },
}

/// Why a choice ended; see [`pagedd_core::FinishReason`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Finish {
    /// A stop token, or a stop string.
    Stop,
    /// `max_tokens`, or the context's end.
    Length,
    /// Cancelled.
    Cancelled,
    /// The row could not be computed.
    Failed,
    /// The model's file or arithmetic was changed while the request was interrupted.
    ModelChanged,
    /// The model is not served any more.
    ModelGone,
}

impl From<pagedd_core::FinishReason> for Finish {
    fn from(reason: pagedd_core::FinishReason) -> Self {
        match reason {
            pagedd_core::FinishReason::Stop => Self::Stop,
            pagedd_core::FinishReason::Length => Self::Length,
            pagedd_core::FinishReason::Cancelled => Self::Cancelled,
            pagedd_core::FinishReason::Failed => Self::Failed,
            pagedd_core::FinishReason::ModelChanged => Self::ModelChanged,
            pagedd_core::FinishReason::ModelGone => Self::ModelGone,
        }
    }
}

/// Answer to a [`Query`].
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum Answer {
    /// To `Health`.
    Health {
        /// Requests would be admitted, and a worker is there to compute them.
        ready: bool,
        /// Why not, in one line.
        reason: Option<String>,
        /// Milliseconds since the last completed step; `None` before the first.
        last_step_ms: Option<u64>,
        /// Sequences that run.
        running: u32,
        /// Sequences that wait.
        waiting: u32,
    },
    /// To `Metrics`.
    Metrics(String),
}
