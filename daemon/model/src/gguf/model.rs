//! Metadata and tensors as a configuration.

use std::path::Path;

use crate::check::{self, Stated};
use crate::config::Architecture;
use crate::error::{Fault, ModelError};
use crate::file::SourceFile;
use crate::gguf::Gguf;
use crate::gguf::header::{self, Metadata, RawTensor};
use crate::rope::{RopePairing, RopeScaling, yarn_attention_factor};
use crate::source::Parts;
use crate::tensor::{TensorInfo, TensorRole};

const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Keys after `llama.` or `qwen2.` that are read below, or checked to be without effect. Any other key could change what
/// the model computes, so it is refused.
const KNOWN_KEYS: [&str; 26] = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.causal",
    "attention.scale",
    "expert_count",
    "expert_used_count",
    "use_parallel_residual",
    "tensor_data_layout",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "rope.scaling.yarn_log_multiplier",
];
const YARN_KEYS: [&str; 4] = [
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
];

impl Gguf {
    pub(crate) fn open(path: &Path) -> Result<(Self, Parts), ModelError> {
        let file = SourceFile::open(path)?;
        Self::read(file).map_err(|fault| fault.at(path))
    }

    fn read(file: SourceFile) -> Result<(Self, Parts), Fault> {
        let header = header::read(&file)?;
        let metadata = header.metadata;
        if let Some(parts) = metadata.unsigned("split.count")?.filter(|&n| n > 1) {
            let problem = format!("one of {parts} parts; merge them into one file first");
            return Err(Fault::unsupported("split.count", problem));
        }
        let keys = Keys { architecture: architecture(&metadata, &file)?, metadata: &metadata, file: &file };
        keys.refuse_unknown()?;
        let stated = keys.stated(&header.tensors)?;
        let tensors = header
            .tensors
            .into_iter()
            .filter(|t| t.name != ROPE_FACTORS)
            .map(describe)
            .collect::<Result<Vec<_>, _>>()?;
        let config = check::configure(stated, &tensors)?;
        let stated_vocab = keys.number("vocab_size")?;
        if let Some((key, vocab)) = stated_vocab.filter(|(_, vocab)| *vocab != config.vocab as u64) {
            let problem = format!("{vocab}, but token_embd.weight has {} rows", config.vocab);
            return Err(Fault::malformed(key, problem));
        }
        if let Some(tokens) =
            metadata.array_len("tokenizer.ggml.tokens")?.filter(|&n| n > config.vocab as u64)
        {
            let problem = format!("{tokens} tokens, but token_embd.weight has {} rows", config.vocab);
            return Err(Fault::malformed("tokenizer.ggml.tokens", problem));
        }
        let hash = hash_prefix(&file, header.bytes)?;
        Ok((Self { metadata }, Parts { files: vec![file], config, tensors, header: hash }))
    }
}

fn hash_prefix(file: &SourceFile, bytes: u64) -> Result<blake3::Hash, Fault> {
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 64 << 10];
    let mut offset = 0;
    while offset < bytes {
        let piece = (bytes - offset).min(buffer.len() as u64);
        file.read_at(offset, &mut buffer[..piece as usize], "header")?;
        hasher.update(&buffer[..piece as usize]);
        offset += piece;
    }
    Ok(hasher.finalize())
}

fn architecture(metadata: &Metadata, file: &SourceFile) -> Result<Architecture, Fault> {
    let key = "general.architecture";
    let kind = metadata.string(file, "general.type", 256)?;
    if let Some(kind) = kind.filter(|kind| kind != "model") {
        return Err(Fault::unsupported("general.type", format_args!("{kind:?} where \"model\" is expected")));
    }
    match metadata.string(file, key, 256)?.as_deref() {
        Some("llama") => Ok(Architecture::Llama),
        Some("qwen2") => Ok(Architecture::Qwen2),
        Some(other) => Err(Fault::unsupported(key, format_args!("{other:?}; llama and qwen2 are served"))),
        None => Err(Fault::malformed(key, "the key is missing")),
    }
}

fn describe(tensor: RawTensor) -> Result<TensorInfo, Fault> {
    let name = &tensor.name;
    let Some(role) = TensorRole::from_gguf_name(name) else {
        let experts = name.contains("_exps") || name.contains("_shexp") || name.contains("ffn_gate_inp");
        let problem = if experts { "mixtures of experts are not served" } else { "an unknown tensor" };
        return Err(Fault::unsupported(name, problem));
    };
    let wanted = if role.is_vector() { 1 } else { 2 };
    if tensor.dimensions != wanted {
        let problem = format!("{} dimensions, {wanted} are expected", tensor.dimensions);
        return Err(Fault::malformed(name, problem));
    }
    let (Ok(rows), Ok(columns)) = (usize::try_from(tensor.rows), usize::try_from(tensor.columns)) else {
        return Err(Fault::malformed(name, "its size overflows"));
    };
    Ok(TensorInfo {
        role,
        rows,
        columns,
        ty: tensor.ty,
        bytes: tensor.bytes,
        file: 0,
        offset: tensor.offset,
        name: tensor.name,
    })
}

/// The keys of one architecture.
struct Keys<'a> {
    architecture: Architecture,
    metadata: &'a Metadata,
    file: &'a SourceFile,
}

impl Keys<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    fn refuse_unknown(&self) -> Result<(), Fault> {
        let prefix = self.key("");
        for key in self.metadata.keys() {
            if let Some(name) = key.strip_prefix(&prefix)
                && !KNOWN_KEYS.contains(&name)
                && !YARN_KEYS.contains(&name)
            {
                return Err(Fault::unsupported(
                    key,
                    "an unknown key, which may change what the model computes",
                ));
            }
        }
        Ok(())
    }

    fn number(&self, name: &str) -> Result<Option<(String, u64)>, Fault> {
        let key = self.key(name);
        Ok(self.metadata.unsigned(&key)?.map(|value| (key, value)))
    }

    fn required(&self, name: &str) -> Result<(String, u64), Fault> {
        self.number(name)?.ok_or_else(|| Fault::malformed(self.key(name), "the key is missing"))
    }

    fn float(&self, name: &str) -> Result<Option<f32>, Fault> {
        self.metadata.float(&self.key(name))
    }

    /// Refuses a value other than the one that means "not used".
    fn only<T: Copy + PartialEq + std::fmt::Display>(
        &self,
        name: &str,
        value: Option<T>,
        served: T,
    ) -> Result<(), Fault> {
        match value.filter(|value| *value != served) {
            Some(value) => {
                Err(Fault::unsupported(self.key(name), format_args!("{value}, only {served} is served")))
            }
            None => Ok(()),
        }
    }

    fn stated(&self, tensors: &[RawTensor]) -> Result<Stated, Fault> {
        self.only("expert_count", self.number("expert_count")?.map(|n| n.1), 0)?;
        self.only("expert_used_count", self.number("expert_used_count")?.map(|n| n.1), 0)?;
        self.only("attention.causal", self.metadata.boolean(&self.key("attention.causal"))?, true)?;
        self.only(
            "use_parallel_residual",
            self.metadata.boolean(&self.key("use_parallel_residual"))?,
            false,
        )?;
        let layout = self.metadata.string(self.file, &self.key("tensor_data_layout"), 256)?;
        self.only("tensor_data_layout", layout.as_deref(), "Meta AI original pth")?;
        let heads = self.required("attention.head_count")?;
        let hidden = self.required("embedding_length")?;
        let head_dim = match self.number("attention.key_length")? {
            Some(stated) => stated,
            None if heads.1 == 0 || !hidden.1.is_multiple_of(heads.1) => {
                let problem = format!("{} heads do not divide {} elements", heads.1, hidden.1);
                return Err(Fault::malformed(heads.0, problem));
            }
            None => (hidden.0.clone(), hidden.1 / heads.1),
        };
        self.only("attention.value_length", self.number("attention.value_length")?.map(|n| n.1), head_dim.1)?;
        self.only("rope.dimension_count", self.number("rope.dimension_count")?.map(|n| n.1), head_dim.1)?;
        let natural = 1.0 / (head_dim.1 as f32).sqrt();
        if let Some(scale) = self.float("attention.scale")?.filter(|s| (s / natural - 1.0).abs() > 1e-5) {
            let problem = format!("{scale}, only 1 / sqrt(head size) = {natural} is served");
            return Err(Fault::unsupported(self.key("attention.scale"), problem));
        }
        let eps_key = self.key("attention.layer_norm_rms_epsilon");
        let eps =
            self.metadata.float(&eps_key)?.ok_or_else(|| Fault::malformed(&eps_key, "the key is missing"))?;
        Ok(Stated {
            architecture: self.architecture,
            layers: self.required("block_count")?,
            feed_forward: self.required("feed_forward_length")?,
            kv_heads: self.number("attention.head_count_kv")?.unwrap_or_else(|| heads.clone()),
            context: self.required("context_length")?,
            window: self.number("attention.sliding_window")?,
            rms_eps: (eps_key, eps),
            rope_base: (self.key("rope.freq_base"), self.float("rope.freq_base")?.unwrap_or(10_000.0)),
            pairing: match self.architecture {
                Architecture::Llama => RopePairing::Interleaved,
                Architecture::Qwen2 => RopePairing::Halves,
            },
            scaling: self.scaling(tensors)?,
            head_dim,
            heads,
            hidden,
        })
    }

    fn scaling(&self, tensors: &[RawTensor]) -> Result<RopeScaling, Fault> {
        let type_key = self.key("rope.scaling.type");
        let kind = self.metadata.string(self.file, &type_key, 256)?;
        let factor_key = self.key("rope.scaling.factor");
        let factor = match self.metadata.float(&factor_key)? {
            // Files of before the key had a name of its own.
            None => self.float("rope.scale_linear")?,
            some => some,
        };
        // Writers put 0 for "none".
        let factor = factor.filter(|&f| f != 0.0);
        if let Some(factor) = factor.filter(|&f| f < 1.0) {
            return Err(Fault::unsupported(factor_key, format_args!("{factor}, at least 1 is expected")));
        }
        let attention = self.float("rope.scaling.attn_factor")?.unwrap_or(1.0);
        let wrong_place = |name: &str| {
            Fault::unsupported(self.key(name), format_args!("not served with rope.scaling.type {kind:?}"))
        };
        let scaling = match (kind.as_deref(), factor) {
            (Some("none"), _) | (None, None) => RopeScaling::None,
            (Some("linear") | None, Some(factor)) => RopeScaling::Linear { factor },
            (Some("yarn"), Some(factor)) => {
                self.only("rope.scaling.yarn_ext_factor", self.float("rope.scaling.yarn_ext_factor")?, 1.0)?;
                self.only(
                    "rope.scaling.yarn_log_multiplier",
                    self.float("rope.scaling.yarn_log_multiplier")?,
                    0.0,
                )?;
                let own = self.float("rope.scaling.yarn_attn_factor")?.unwrap_or(1.0);
                let (key, original) = self.required("rope.scaling.original_context_length")?;
                let yarn = RopeScaling::Yarn {
                    factor,
                    original_context: u32::try_from(original)
                        .ok()
                        .filter(|&n| n > 0)
                        .ok_or_else(|| Fault::malformed(key, format_args!("{original} is out of range")))?,
                    beta_fast: self.float("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                    beta_slow: self.float("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                    attention_factor: attention * own * yarn_attention_factor(factor),
                    truncate: true,
                };
                crate::rope::check_yarn(&yarn, &type_key)?;
                yarn
            }
            (Some("linear" | "yarn"), None) => {
                return Err(Fault::malformed(factor_key, "the key is missing"));
            }
            (Some(other), _) => {
                let problem = format!("{other:?}; none, linear and yarn are served");
                return Err(Fault::unsupported(type_key, problem));
            }
        };
        if !matches!(scaling, RopeScaling::Yarn { .. }) {
            if attention.to_bits() != 1.0_f32.to_bits() {
                return Err(wrong_place("rope.scaling.attn_factor"));
            }
            if let Some(name) = YARN_KEYS.into_iter().find(|name| self.metadata.has(&self.key(name))) {
                return Err(wrong_place(name));
            }
        }
        let Some(factors) = tensors.iter().find(|t| t.name == ROPE_FACTORS) else { return Ok(scaling) };
        if scaling != RopeScaling::None {
            return Err(Fault::unsupported(ROPE_FACTORS, "not served together with rope.scaling.type"));
        }
        self.factors(factors).map(RopeScaling::Factors)
    }

    fn factors(&self, tensor: &RawTensor) -> Result<Vec<f32>, Fault> {
        const MAX_PAIRS: u64 = 1 << 12;
        if tensor.ty != pagedd_core::TensorType::F32 || tensor.rows != 1 || tensor.columns > MAX_PAIRS {
            return Err(Fault::unsupported(
                ROPE_FACTORS,
                "not a vector of F32 with an element for each pair",
            ));
        }
        let bytes = self.file.bytes_at(tensor.offset, tensor.bytes, ROPE_FACTORS)?;
        let factors: Vec<f32> = bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
        match factors.iter().find(|f| !f.is_finite() || **f <= 0.0) {
            Some(factor) => {
                Err(Fault::malformed(ROPE_FACTORS, format_args!("{factor} is no positive number")))
            }
            None => Ok(factors),
        }
    }
}
