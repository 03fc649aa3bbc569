//! `config.json` as the statement of a decoder.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use crate::check::Stated;
use crate::config::Architecture;
use crate::error::Fault;
use crate::rope::{RopePairing, RopeScaling, check_yarn, yarn_attention_factor};

/// Keys that are read here, or that do not change what a decoder computes although their names look so.
const KNOWN_KEYS: [&str; 30] = [
    "attention_bias",
    "attention_dropout",
    "attn_pdrop",
    "attn_implementation",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "mlp_bias",
    "model_type",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "partial_rotary_factor",
    "pretraining_tp",
    "rms_norm_eps",
    "rope_interleaved",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "use_sliding_window",
    "vocab_size",
    "max_sequence_length",
    "quantization",
    // Read on its own.
    super::quantization::KEY,
];

/// Parts of names of keys that change arithmetic. A key that has one, is not known and is not off, is refused.
const ARITHMETIC: [&str; 18] = [
    "softcap",
    "expert",
    "moe",
    "multiplier",
    "scale",
    "scaling",
    "alibi",
    "window",
    "norm",
    "rotary",
    "rope",
    "attention",
    "attn",
    "quant",
    "bias",
    "head",
    "layer_type",
    "_act",
];

/// A configuration whose keys are all understood.
pub(super) struct Config<'a> {
    object: &'a Map<String, Value>,
    architecture: Architecture,
    mistral: bool,
}

impl<'a> Config<'a> {
    pub(super) fn new(object: &'a Map<String, Value>) -> Result<Self, Fault> {
        let (architecture, mistral, class) = match object.get("model_type").and_then(Value::as_str) {
            Some("llama") => (Architecture::Llama, false, "LlamaForCausalLM"),
            Some("mistral") => (Architecture::Llama, true, "MistralForCausalLM"),
            Some("qwen2") => (Architecture::Qwen2, false, "Qwen2ForCausalLM"),
            Some(other) => {
                let problem = format!("{other:?}; llama, mistral and qwen2 are served");
                return Err(Fault::unsupported("model_type", problem));
            }
            None => return Err(Fault::malformed("model_type", "the key is missing")),
        };
        if let Some(classes) = object.get("architectures").filter(|v| !v.is_null())
            && classes.as_array().is_none_or(|classes| classes.iter().any(|c| c.as_str() != Some(class)))
        {
            return Err(Fault::unsupported("architectures", format_args!("{classes}; {class} is served")));
        }
        for (key, value) in object {
            let off = matches!(value, Value::Null | Value::Bool(false));
            let known = KNOWN_KEYS.contains(&key.as_str()) || key.starts_with('_');
            if !known && !off && ARITHMETIC.iter().any(|part| key.contains(part)) {
                let problem = "an unknown key, which may change what the model computes";
                return Err(Fault::unsupported(key, problem));
            }
        }
        Ok(Self { object, architecture, mistral })
    }

    pub(super) fn ties_embeddings(&self) -> bool {
        self.object.get("tie_word_embeddings") == Some(&Value::Bool(true))
    }

    pub(super) fn vocab_size(&self) -> Result<(String, u64), Fault> {
        self.required("vocab_size")
    }

    pub(super) fn stated(&self) -> Result<Stated, Fault> {
        for (key, served) in [
            ("hidden_act", Value::from("silu")),
            ("attention_bias", Value::Bool(false)),
            ("mlp_bias", Value::Bool(false)),
            ("rope_interleaved", Value::Bool(false)),
            ("quantization", Value::Null),
        ] {
            if let Some(value) = self.object.get(key).filter(|v| !v.is_null() && **v != served) {
                return Err(Fault::unsupported(key, format_args!("{value}, only {served} is served")));
            }
        }
        if let Some(tied) = self.object.get("tie_word_embeddings").filter(|v| !v.is_boolean() && !v.is_null())
        {
            return Err(Fault::malformed("tie_word_embeddings", format_args!("{tied} is no boolean")));
        }
        if let Some(part) = number(self.object, "partial_rotary_factor")?.filter(|f| (f - 1.0).abs() > 1e-9) {
            return Err(Fault::unsupported(
                "partial_rotary_factor",
                format_args!("{part}, only 1 is served"),
            ));
        }
        let heads = self.required("num_attention_heads")?;
        let hidden = self.required("hidden_size")?;
        let head_dim = match self.count("head_dim")? {
            Some(stated) => stated,
            None if heads.1 == 0 || !hidden.1.is_multiple_of(heads.1) => {
                let problem = format!("{} heads do not divide {} elements", heads.1, hidden.1);
                return Err(Fault::malformed(heads.0, problem));
            }
            None => (hidden.0.clone(), hidden.1 / heads.1),
        };
        let trained = self.required("max_position_embeddings")?;
        let (base, scaling) = self.rope(trained.1)?;
        let context = match &scaling {
            // The configuration states the context before extension.
            RopeScaling::Yarn { factor, original_context, .. } => {
                let extended = (f64::from(*original_context) * f64::from(*factor)) as u64;
                (trained.0, trained.1.max(extended))
            }
            _ => trained,
        };
        let eps = number(self.object, "rms_norm_eps")?;
        Ok(Stated {
            architecture: self.architecture,
            layers: self.required("num_hidden_layers")?,
            feed_forward: self.required("intermediate_size")?,
            kv_heads: self.count("num_key_value_heads")?.unwrap_or_else(|| heads.clone()),
            context,
            window: self.window()?,
            rms_eps: (
                "rms_norm_eps".into(),
                eps.ok_or_else(|| Fault::malformed("rms_norm_eps", "the key is missing"))? as f32,
            ),
            rope_base: ("rope_theta".into(), base),
            pairing: RopePairing::Halves,
            scaling,
            head_dim,
            heads,
            hidden,
        })
    }

    /// The window of sliding attention, if any layer uses one.
    fn window(&self) -> Result<Option<(String, u64)>, Fault> {
        let key = "sliding_window";
        let sliding_layers = match self.object.get("layer_types") {
            None | Some(Value::Null) => None,
            Some(Value::Array(types)) => {
                let kind = |t: &Value| match t.as_str() {
                    Some("full_attention") => Ok(false),
                    Some("sliding_attention") => Ok(true),
                    _ => Err(Fault::unsupported("layer_types", format_args!("{t} is not served"))),
                };
                Some(types.iter().map(kind).collect::<Result<Vec<_>, _>>()?.contains(&true))
            }
            Some(other) => return Err(Fault::malformed("layer_types", format_args!("{other} is no list"))),
        };
        let used = sliding_layers.unwrap_or(match self.architecture {
            Architecture::Qwen2 => self.object.get("use_sliding_window") == Some(&Value::Bool(true)),
            Architecture::Llama => self.mistral,
        });
        if !used {
            return Ok(None);
        }
        match self.object.get(key) {
            // The family's default.
            None => Ok(Some((key.into(), 4096))),
            Some(_) => self.count(key),
        }
    }

    fn rope(&self, trained: u64) -> Result<(f32, RopeScaling), Fault> {
        let nested = |key| match self.object.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Object(object)) => Ok(Some(object)),
            Some(other) => Err(Fault::malformed(key, format_args!("{other} is no object"))),
        };
        let (key, rope) = match nested("rope_parameters")? {
            Some(object) => ("rope_parameters", Some(object)),
            None => ("rope_scaling", nested("rope_scaling")?),
        };
        let own_base = rope.map_or(Ok(None), |rope| number(rope, "rope_theta"))?;
        let base = own_base.or(number(self.object, "rope_theta")?).unwrap_or(10_000.0) as f32;
        let Some(rope) = rope else { return Ok((base, RopeScaling::None)) };
        let kind = match rope.get("rope_type").or_else(|| rope.get("type")) {
            Some(Value::String(kind)) => kind.as_str(),
            _ => return Err(Fault::malformed(key, "rope_type is missing")),
        };
        let fields = Fields { key, rope };
        let known: &[&str] = match kind {
            "default" => &[],
            "linear" => &["factor"],
            "llama3" => {
                &["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
            }
            "yarn" => &[
                "factor",
                "original_max_position_embeddings",
                "beta_fast",
                "beta_slow",
                "attention_factor",
                "truncate",
            ],
            other => {
                let problem = format!("{other:?}; default, linear, llama3 and yarn are served");
                return Err(Fault::unsupported(format_args!("{key}.rope_type"), problem));
            }
        };
        let always = ["rope_type", "type", "rope_theta"];
        if let Some((name, _)) = rope
            .iter()
            .find(|(n, v)| !v.is_null() && !always.contains(&n.as_str()) && !known.contains(&n.as_str()))
        {
            return Err(Fault::unsupported(
                format_args!("{key}.{name}"),
                format_args!("unknown with {kind}"),
            ));
        }
        let scaling = match kind {
            "linear" => RopeScaling::Linear { factor: fields.factor()? },
            "llama3" => {
                let low = fields.positive("low_freq_factor")?;
                let high = fields.positive("high_freq_factor")?;
                if high <= low {
                    let problem = format!("{high} is not above low_freq_factor {low}");
                    return Err(Fault::malformed(format_args!("{key}.high_freq_factor"), problem));
                }
                RopeScaling::Llama3 {
                    factor: fields.factor()?,
                    low_freq_factor: low,
                    high_freq_factor: high,
                    original_context: fields
                        .original()?
                        .ok_or_else(|| fields.missing("original_max_position_embeddings"))?,
                }
            }
            "yarn" => {
                let factor = fields.factor()?;
                let own = number(rope, "attention_factor")?.map(|f| f as f32);
                let yarn = RopeScaling::Yarn {
                    factor,
                    original_context: fields.original()?.unwrap_or(trained.min(u64::from(u32::MAX)) as u32),
                    beta_fast: number(rope, "beta_fast")?.unwrap_or(32.0) as f32,
                    beta_slow: number(rope, "beta_slow")?.unwrap_or(1.0) as f32,
                    attention_factor: own.unwrap_or_else(|| yarn_attention_factor(factor)),
                    truncate: rope.get("truncate") != Some(&Value::Bool(false)),
                };
                check_yarn(&yarn, key)?;
                yarn
            }
            _ => RopeScaling::None,
        };
        Ok((base, scaling))
    }

    fn count(&self, key: &str) -> Result<Option<(String, u64)>, Fault> {
        match self.object.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_u64() {
                Some(n) => Ok(Some((key.to_owned(), n))),
                None => Err(Fault::malformed(key, format_args!("{value} is no whole number"))),
            },
        }
    }

    fn required(&self, key: &str) -> Result<(String, u64), Fault> {
        self.count(key)?.ok_or_else(|| Fault::malformed(key, "the key is missing"))
    }
}

/// The numbers of one `rope_scaling`.
struct Fields<'a> {
    key: &'a str,
    rope: &'a Map<String, Value>,
}

impl Fields<'_> {
    fn missing(&self, name: &str) -> Fault {
        Fault::malformed(format_args!("{}.{name}", self.key), "the key is missing")
    }

    fn positive(&self, name: &str) -> Result<f32, Fault> {
        match number(self.rope, name)?.ok_or_else(|| self.missing(name))? {
            f if f > 0.0 => Ok(f as f32),
            f => {
                Err(Fault::malformed(format_args!("{}.{name}", self.key), format_args!("{f} is not above 0")))
            }
        }
    }

    fn factor(&self) -> Result<f32, Fault> {
        match self.positive("factor")? {
            f if f >= 1.0 => Ok(f),
            f => Err(Fault::unsupported(format_args!("{}.factor", self.key), format_args!("{f} is under 1"))),
        }
    }

    fn original(&self) -> Result<Option<u32>, Fault> {
        let name = "original_max_position_embeddings";
        match self.rope.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => match value.as_u64().and_then(|n| u32::try_from(n).ok()).filter(|&n| n > 0) {
                Some(n) => Ok(Some(n)),
                None => Err(Fault::malformed(
                    format_args!("{}.{name}", self.key),
                    format_args!("{value} is no number of tokens"),
                )),
            },
        }
    }
}

fn number(object: &Map<String, Value>, key: &str) -> Result<Option<f64>, Fault> {
    match object.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_f64() {
            Some(f) if f.is_finite() => Ok(Some(f)),
            _ => Err(Fault::malformed(key, format_args!("{value} is no number"))),
        },
    }
}

/// One token id, a list of them, or none.
pub(super) fn token_ids(object: &Map<String, Value>, key: &str) -> Result<BTreeSet<u64>, Fault> {
    let wrong = |value: &Value| Fault::malformed(key, format_args!("{value} is no token id"));
    match object.get(key) {
        None | Some(Value::Null) => Ok(BTreeSet::new()),
        Some(Value::Array(ids)) => ids.iter().map(|id| id.as_u64().ok_or_else(|| wrong(id))).collect(),
        Some(id) => id.as_u64().map(|id| BTreeSet::from([id])).ok_or_else(|| wrong(id)),
    }
}
