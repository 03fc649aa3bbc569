//! One naming of tensors for every file format.

use std::fmt;

use pagedd_core::TensorType;

/// What a tensor is for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum TensorRole {
    /// `[vocab, hidden]`: a row per token.
    TokenEmbd,
    /// `[1, hidden]`: weights of the last RMSNorm.
    OutputNorm,
    /// `[vocab, hidden]`: the output matrix. Absent where embeddings are tied.
    Output,
    /// A tensor of one layer, counted from 0.
    Layer(u32, LayerTensor),
}

/// A tensor of a layer. Shapes are `[out, in]`; vectors have one row.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum LayerTensor {
    /// `[1, hidden]`: RMSNorm before attention.
    AttnNorm,
    /// `[query_dim, hidden]`. Rows of a head are ordered for the model's [`RopePairing`](crate::RopePairing).
    AttnQ,
    /// `[kv_dim, hidden]`. Rows of a head are ordered for the model's [`RopePairing`](crate::RopePairing).
    AttnK,
    /// `[kv_dim, hidden]`.
    AttnV,
    /// `[1, query_dim]`.
    AttnQBias,
    /// `[1, kv_dim]`.
    AttnKBias,
    /// `[1, kv_dim]`.
    AttnVBias,
    /// `[hidden, query_dim]`.
    AttnOutput,
    /// `[1, hidden]`: RMSNorm before the feed-forward layer.
    FfnNorm,
    /// `[feed_forward, hidden]`: goes through `SiLU`.
    FfnGate,
    /// `[feed_forward, hidden]`.
    FfnUp,
    /// `[hidden, feed_forward]`.
    FfnDown,
}

impl LayerTensor {
    /// Every tensor that a layer may have.
    pub const ALL: [Self; 12] = [
        Self::AttnNorm,
        Self::AttnQ,
        Self::AttnK,
        Self::AttnV,
        Self::AttnQBias,
        Self::AttnKBias,
        Self::AttnVBias,
        Self::AttnOutput,
        Self::FfnNorm,
        Self::FfnGate,
        Self::FfnUp,
        Self::FfnDown,
    ];

    /// Whether this is a bias, which some models lack.
    #[must_use]
    pub const fn is_bias(self) -> bool {
        matches!(self, Self::AttnQBias | Self::AttnKBias | Self::AttnVBias)
    }

    /// Whether this is a vector: norms and biases.
    #[must_use]
    pub const fn is_vector(self) -> bool {
        self.is_bias() || matches!(self, Self::AttnNorm | Self::FfnNorm)
    }

    /// The name in GGUF, after `blk.N.`.
    pub(crate) const fn gguf_name(self) -> &'static str {
        match self {
            Self::AttnNorm => "attn_norm.weight",
            Self::AttnQ => "attn_q.weight",
            Self::AttnK => "attn_k.weight",
            Self::AttnV => "attn_v.weight",
            Self::AttnQBias => "attn_q.bias",
            Self::AttnKBias => "attn_k.bias",
            Self::AttnVBias => "attn_v.bias",
            Self::AttnOutput => "attn_output.weight",
            Self::FfnNorm => "ffn_norm.weight",
            Self::FfnGate => "ffn_gate.weight",
            Self::FfnUp => "ffn_up.weight",
            Self::FfnDown => "ffn_down.weight",
        }
    }

    /// The name in Hugging Face checkpoints, after `model.layers.N.`.
    pub(crate) const fn hf_name(self) -> &'static str {
        match self {
            Self::AttnNorm => "input_layernorm.weight",
            Self::AttnQ => "self_attn.q_proj.weight",
            Self::AttnK => "self_attn.k_proj.weight",
            Self::AttnV => "self_attn.v_proj.weight",
            Self::AttnQBias => "self_attn.q_proj.bias",
            Self::AttnKBias => "self_attn.k_proj.bias",
            Self::AttnVBias => "self_attn.v_proj.bias",
            Self::AttnOutput => "self_attn.o_proj.weight",
            Self::FfnNorm => "post_attention_layernorm.weight",
            Self::FfnGate => "mlp.gate_proj.weight",
            Self::FfnUp => "mlp.up_proj.weight",
            Self::FfnDown => "mlp.down_proj.weight",
        }
    }
}

impl TensorRole {
    /// Whether this is a vector: norms and biases.
    #[must_use]
    pub const fn is_vector(self) -> bool {
        match self {
            Self::TokenEmbd | Self::Output => false,
            Self::OutputNorm => true,
            Self::Layer(_, tensor) => tensor.is_vector(),
        }
    }

    /// The name in GGUF, which is also how a role is printed.
    pub(crate) fn gguf_name(self) -> String {
        match self {
            Self::TokenEmbd => "token_embd.weight".into(),
            Self::OutputNorm => "output_norm.weight".into(),
            Self::Output => "output.weight".into(),
            Self::Layer(layer, tensor) => format!("blk.{layer}.{}", tensor.gguf_name()),
        }
    }

    /// The name in Hugging Face checkpoints.
    pub(crate) fn hf_name(self) -> String {
        match self {
            Self::TokenEmbd => "model.embed_tokens.weight".into(),
            Self::OutputNorm => "model.norm.weight".into(),
            Self::Output => "lm_head.weight".into(),
            Self::Layer(layer, tensor) => format!("model.layers.{layer}.{}", tensor.hf_name()),
        }
    }

    pub(crate) fn from_gguf_name(name: &str) -> Option<Self> {
        match name {
            "token_embd.weight" => Some(Self::TokenEmbd),
            "output_norm.weight" => Some(Self::OutputNorm),
            "output.weight" => Some(Self::Output),
            _ => layer_of(name.strip_prefix("blk.")?, LayerTensor::gguf_name),
        }
    }

    pub(crate) fn from_hf_name(name: &str) -> Option<Self> {
        match name {
            "model.embed_tokens.weight" => Some(Self::TokenEmbd),
            "model.norm.weight" => Some(Self::OutputNorm),
            "lm_head.weight" => Some(Self::Output),
            _ => layer_of(name.strip_prefix("model.layers.")?, LayerTensor::hf_name),
        }
    }
}

/// `N.rest`, where `N` is written without leading zeros: a second spelling would be a second tensor of one role.
fn layer_of(text: &str, name: impl Fn(LayerTensor) -> &'static str) -> Option<TensorRole> {
    let (number, rest) = text.split_once('.')?;
    let layer: u32 = number.parse().ok()?;
    if layer.to_string() != number {
        return None;
    }
    let tensor = LayerTensor::ALL.into_iter().find(|&t| name(t) == rest)?;
    Some(TensorRole::Layer(layer, tensor))
}

impl fmt::Display for TensorRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.gguf_name())
    }
}

/// A tensor of a model file.
///
/// Having one from [`ModelSource::tensors`](crate::ModelSource::tensors) tells you: what it is read from lies inside the file as it was
/// when opened and overlaps no other tensor, and its bytes are `rows` times the bytes of a row. It does not tell you that they are finite.
/// A matrix that an AWQ or GPTQ checkpoint has in several tensors is one of type `Q4_1`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorInfo {
    /// What it is for.
    pub role: TensorRole,
    /// Its name in the file; of several tensors, that of the codes.
    pub name: String,
    /// Element type.
    pub ty: TensorType,
    /// Outputs of a matrix; 1 for a vector.
    pub rows: usize,
    /// Inputs of a matrix; elements of a vector. A whole number of the type's blocks.
    pub columns: usize,
    /// Bytes as it is read.
    pub bytes: u64,
    /// Which of the source's files.
    pub(crate) file: usize,
    /// Where in it.
    pub(crate) offset: u64,
}

impl TensorInfo {
    /// `[out, in]`.
    #[must_use]
    pub fn shape(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    /// Bytes of one row.
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        (self.bytes / self.rows as u64) as usize
    }
}
