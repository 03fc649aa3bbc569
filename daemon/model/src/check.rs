//! Dimensions and tensors against each other: the last gate before a model counts as opened.

use std::collections::BTreeMap;

use pagedd_core::{TensorType, Tokens};

use crate::config::{Architecture, ModelConfig};
use crate::error::Fault;
use crate::rope::{Rope, RopePairing, RopeScaling};
use crate::tensor::{LayerTensor, TensorInfo, TensorRole};

const MAX_HEAD_DIM: u64 = 1024;
const MAX_CONTEXT: u64 = 1 << 24;
/// Bounds every product of two dimensions well inside `u64`.
const MAX_DIMENSION: u64 = 1 << 28;

/// What a header states, before it is believed. Each number carries its key.
pub(crate) struct Stated {
    pub architecture: Architecture,
    pub layers: (String, u64),
    pub hidden: (String, u64),
    pub feed_forward: (String, u64),
    pub heads: (String, u64),
    pub kv_heads: (String, u64),
    pub head_dim: (String, u64),
    pub context: (String, u64),
    /// Window of sliding attention, where there is one.
    pub window: Option<(String, u64)>,
    pub rms_eps: (String, f32),
    pub rope_base: (String, f32),
    pub pairing: RopePairing,
    pub scaling: RopeScaling,
}

/// Checks `stated` against the tensors. `rows` of the token embedding is the vocabulary size.
pub(crate) fn configure(stated: Stated, tensors: &[TensorInfo]) -> Result<ModelConfig, Fault> {
    let mut by_role = BTreeMap::new();
    for tensor in tensors {
        if let Some(other) = by_role.insert(tensor.role, tensor) {
            return Err(Fault::malformed(&tensor.name, format_args!("the same tensor as {}", other.name)));
        }
    }
    let dimension = |(key, value): &(String, u64)| match value {
        0 => Err(Fault::malformed(key, "is zero")),
        &n if n > MAX_DIMENSION => Err(Fault::malformed(key, format_args!("{n} is out of range"))),
        &n => Ok(n as usize),
    };
    let layers = dimension(&stated.layers)?;
    // Checked first: what follows loops over layers.
    if layers > tensors.len() {
        let problem = format!("{layers} layers, but the file has {} tensors", tensors.len());
        return Err(Fault::malformed(&stated.layers.0, problem));
    }
    let (heads, kv_heads) = (dimension(&stated.heads)?, dimension(&stated.kv_heads)?);
    if !heads.is_multiple_of(kv_heads) {
        let problem = format!("{heads} query heads are no multiple of {kv_heads} key-value heads");
        return Err(Fault::unsupported(&stated.kv_heads.0, problem));
    }
    let head_dim = dimension(&stated.head_dim)?;
    if !head_dim.is_multiple_of(2) || stated.head_dim.1 > MAX_HEAD_DIM {
        let problem = format!("heads of {head_dim} elements; even numbers up to {MAX_HEAD_DIM} are served");
        return Err(Fault::unsupported(&stated.head_dim.0, problem));
    }
    let context = match &stated.window {
        Some((key, 0)) => return Err(Fault::malformed(key, "is zero")),
        Some((_, window)) => stated.context.1.min(*window),
        None => stated.context.1,
    };
    if context == 0 || context > MAX_CONTEXT {
        return Err(Fault::malformed(&stated.context.0, format_args!("{context} is out of range")));
    }
    let positive = |(key, value): &(String, f32)| {
        if value.is_finite() && *value > 0.0 {
            Ok(*value)
        } else {
            Err(Fault::malformed(key, format_args!("{value} is no positive number")))
        }
    };
    let rms_eps = positive(&stated.rms_eps)?;
    let base = positive(&stated.rope_base)?;
    if base <= 1.0 {
        return Err(Fault::malformed(&stated.rope_base.0, format_args!("{base} is not above 1")));
    }
    if let RopeScaling::Factors(factors) = &stated.scaling
        && factors.len() != head_dim / 2
    {
        let problem = format!("{} factors, {} are expected", factors.len(), head_dim / 2);
        return Err(Fault::malformed("rope_freqs.weight", problem));
    }
    let embedding =
        by_role.get(&TensorRole::TokenEmbd).ok_or_else(|| missing(tensors, TensorRole::TokenEmbd))?;
    let config = ModelConfig {
        architecture: stated.architecture,
        layers,
        hidden: dimension(&stated.hidden)?,
        feed_forward: dimension(&stated.feed_forward)?,
        heads,
        kv_heads,
        head_dim,
        vocab: dimension(&(embedding.name.clone(), embedding.rows as u64))?,
        context: Tokens(context as u32),
        rms_eps,
        rope: Rope { base, pairing: stated.pairing, scaling: stated.scaling },
        tied_embeddings: !by_role.contains_key(&TensorRole::Output),
        qkv_bias: tensors.iter().any(|t| matches!(t.role, TensorRole::Layer(_, tensor) if tensor.is_bias())),
    };
    if config.architecture == Architecture::Qwen2 && !config.qkv_bias {
        return Err(missing(tensors, TensorRole::Layer(0, LayerTensor::AttnQBias)));
    }
    let mut wanted = 0;
    for role in roles(&config) {
        wanted += 1;
        let tensor = by_role.get(&role).ok_or_else(|| missing(tensors, role))?;
        check_tensor(tensor, shape_of(&config, role))?;
    }
    if wanted != tensors.len() {
        // Only a layer beyond the last can be left over: every other role was asked for.
        let extra =
            tensors.iter().find(|t| matches!(t.role, TensorRole::Layer(n, _) if n as usize >= layers));
        let name = extra.map_or("tensors", |t| t.name.as_str());
        return Err(Fault::malformed(name, format_args!("the model states {layers} layers")));
    }
    Ok(config)
}

/// Every role that a model of this configuration has.
pub(crate) fn roles(config: &ModelConfig) -> impl Iterator<Item = TensorRole> {
    let biases = config.qkv_bias;
    let output = (!config.tied_embeddings).then_some(TensorRole::Output);
    let layers = (0..config.layers as u32).flat_map(move |layer| {
        let tensors = LayerTensor::ALL.into_iter().filter(move |t| biases || !t.is_bias());
        tensors.map(move |t| TensorRole::Layer(layer, t))
    });
    [TensorRole::TokenEmbd, TensorRole::OutputNorm].into_iter().chain(output).chain(layers)
}

/// `[out, in]` of a role.
pub(crate) fn shape_of(config: &ModelConfig, role: TensorRole) -> [usize; 2] {
    let (hidden, query, kv) = (config.hidden, config.query_dim(), config.kv_dim());
    match role {
        TensorRole::TokenEmbd | TensorRole::Output => [config.vocab, hidden],
        TensorRole::OutputNorm => [1, hidden],
        TensorRole::Layer(_, tensor) => match tensor {
            LayerTensor::AttnNorm | LayerTensor::FfnNorm => [1, hidden],
            LayerTensor::AttnQ => [query, hidden],
            LayerTensor::AttnK | LayerTensor::AttnV => [kv, hidden],
            LayerTensor::AttnQBias => [1, query],
            LayerTensor::AttnKBias | LayerTensor::AttnVBias => [1, kv],
            LayerTensor::AttnOutput => [hidden, query],
            LayerTensor::FfnGate | LayerTensor::FfnUp => [config.feed_forward, hidden],
            LayerTensor::FfnDown => [hidden, config.feed_forward],
        },
    }
}

fn check_tensor(tensor: &TensorInfo, expected: [usize; 2]) -> Result<(), Fault> {
    if tensor.shape() != expected {
        let problem = format!("shape {:?}, the model's dimensions give {expected:?}", tensor.shape());
        return Err(Fault::malformed(&tensor.name, problem));
    }
    let plain = matches!(tensor.ty, TensorType::F32 | TensorType::F16 | TensorType::BF16);
    if tensor.role.is_vector() && !plain {
        let problem = format!("a vector of type {}; F32, F16 and BF16 are served", tensor.ty);
        return Err(Fault::unsupported(&tensor.name, problem));
    }
    Ok(())
}

/// A missing tensor, named as the file would name it.
fn missing(tensors: &[TensorInfo], role: TensorRole) -> Fault {
    let hf = tensors.iter().any(|t| t.name == t.role.hf_name());
    let name = if hf { role.hf_name() } else { role.gguf_name() };
    Fault::malformed(name, "the tensor is missing")
}
