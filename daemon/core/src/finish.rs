//! Why a sequence ended.

use std::fmt;

/// Why a sequence ended.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FinishReason {
    /// A stop token was sampled, or the gateway found a stop string.
    Stop,
    /// `max_tokens` or the context's end was reached.
    Length,
    /// The client left, an operator cancelled, or nobody re-attached in time.
    Cancelled,
    /// The row could not be computed (for example NaN logits); other rows of the batch went on.
    Failed,
    /// The model's file or arithmetic was changed before the request was complete: what it has is of another model.
    ModelChanged,
    /// The model is not served any more: it is not configured after a restart, or no worker can be had for it.
    ModelGone,
}

impl FinishReason {
    /// Every reason, for metrics' closed label set.
    pub const ALL: [Self; 6] =
        [Self::Stop, Self::Length, Self::Cancelled, Self::Failed, Self::ModelChanged, Self::ModelGone];

    /// The word used in metrics, logs and (for the first two) the OpenAI API.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
            Self::ModelChanged => "model_changed",
            Self::ModelGone => "model_gone",
        }
    }
}

impl fmt::Display for FinishReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
