//! What a model is, apart from its weights.

use std::fmt;

use pagedd_core::Tokens;

use crate::rope::{Rope, RopeFrequencies};

/// Families of decoders that are served. They differ in tensors only, never in the order of operations.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Architecture {
    /// Llama 2 and 3, `SmolLM` and Mistral.
    Llama,
    /// Qwen2 and Qwen2.5: with biases of Q, K and V.
    Qwen2,
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
        })
    }
}

/// Dimensions and constants of a decoder: pre-norm (RMSNorm), grouped-query attention with `RoPE`, SwiGLU.
///
/// Having one from [`ModelSource::config`](crate::ModelSource::config) tells you: every tensor it implies is in the file
/// with exactly this shape; `heads` is a multiple of `kv_heads`; no dimension is zero; `head_dim` is even.
#[derive(Clone, PartialEq, Debug)]
pub struct ModelConfig {
    /// The family.
    pub architecture: Architecture,
    /// Number of layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward layer.
    pub feed_forward: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a head. Scores are scaled by `1 / sqrt(head_dim)`.
    pub head_dim: usize,
    /// Rows of the token embedding.
    pub vocab: usize,
    /// Longest sequence. Where the model attends through a sliding window, the window: up to it, full attention is the same.
    pub context: Tokens,
    /// Added to the mean square in RMSNorm.
    pub rms_eps: f32,
    /// Rotary position embedding.
    pub rope: Rope,
    /// The output matrix is the token embedding: there is no [`TensorRole::Output`](crate::TensorRole::Output).
    pub tied_embeddings: bool,
    /// Q, K and V have biases.
    pub qkv_bias: bool,
}

impl ModelConfig {
    /// Rows of the query projection: `heads * head_dim`.
    #[must_use]
    pub fn query_dim(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Rows of the key projection and of the value projection: `kv_heads * head_dim`.
    #[must_use]
    pub fn kv_dim(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Angles per position, one for each of the `head_dim / 2` pairs, and the factor on cosine and sine.
    #[must_use]
    pub fn rope_frequencies(&self) -> RopeFrequencies {
        self.rope.frequencies(self.head_dim)
    }
}
