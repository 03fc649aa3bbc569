//! A writer of Hugging Face directories.

use std::io;
use std::path::Path;

use pagedd_core::TensorType;
use serde_json::{Map, Value, json};

use super::TinyModel;
use super::gguf::plain_bytes;
use super::vocabulary::{CHAT_TEMPLATE, IM_END, IM_START, VOCAB, merges, tokens};
use crate::config::Architecture;
use crate::rope::RopeScaling;
use crate::tensor::TensorRole;

/// A tensor as it will stand in a safetensors file. Nothing keeps these from contradicting each other.
#[derive(Clone, PartialEq, Debug)]
pub struct HfTensor {
    /// Its name.
    pub name: String,
    /// Its element type, as the format calls it.
    pub dtype: &'static str,
    /// Its extents.
    pub shape: Vec<usize>,
    /// Its data.
    pub data: Vec<u8>,
}

pub(super) fn write(directory: &Path, seed: u64, model: &TinyModel, shards: usize) -> io::Result<()> {
    let tensors = model
        .tensors()
        .into_iter()
        .map(|(role, shape)| plain(model, role, shape, &TinyModel::weights(seed, role, shape)));
    write_tensors(directory, model, &Value::Null, tensors, shards)
}

/// Writes a directory with these tensors, whose configuration has `quantization` as `quantization_config` unless it is null.
///
/// # Errors
/// One of the tensors is one, or a file cannot be written.
pub fn write_tensors(
    directory: &Path,
    model: &TinyModel,
    quantization: &Value,
    tensors: impl IntoIterator<Item = io::Result<HfTensor>>,
    shards: usize,
) -> io::Result<()> {
    std::fs::create_dir_all(directory)?;
    let save = |name: &str, value: &Value| std::fs::write(directory.join(name), format!("{value:#}"));
    let mut config = config(model);
    if !quantization.is_null() {
        config["quantization_config"] = quantization.clone();
    }
    save("config.json", &config)?;
    save("tokenizer.json", &tokenizer())?;
    save(
        "tokenizer_config.json",
        &json!({ "chat_template": CHAT_TEMPLATE, "bos_token": "<|im_start|>",
                 "eos_token": { "content": "<|im_end|>" }, "add_bos_token": false }),
    )?;
    save("generation_config.json", &json!({ "bos_token_id": IM_START, "eos_token_id": [IM_END] }))?;
    let tensors = tensors.into_iter().collect::<io::Result<Vec<_>>>()?;
    let per_shard = tensors.len().div_ceil(shards.max(1));
    let mut weight_map = Map::new();
    for (number, tensors) in tensors.chunks(per_shard).enumerate() {
        let file = match shards {
            0 | 1 => "model.safetensors".to_owned(),
            _ => format!("model-{:05}-of-{shards:05}.safetensors", number + 1),
        };
        std::fs::write(directory.join(&file), safetensors(tensors))?;
        weight_map.extend(tensors.iter().map(|tensor| (tensor.name.clone(), file.clone().into())));
    }
    if shards > 1 {
        save("model.safetensors.index.json", &json!({ "metadata": {}, "weight_map": weight_map }))?;
    }
    Ok(())
}

/// A safetensors file.
pub(super) fn safetensors(tensors: &[HfTensor]) -> Vec<u8> {
    let (mut header, mut at) = (Map::new(), 0);
    header.insert("__metadata__".into(), json!({ "format": "pt" }));
    for HfTensor { name, dtype, shape, data } in tensors {
        let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": [at, at + data.len()] });
        at += data.len();
        header.insert(name.clone(), entry);
    }
    let header = Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    for tensor in tensors {
        bytes.extend(&tensor.data);
    }
    bytes
}

/// A tensor in the element type of `model`.
pub(super) fn plain(
    model: &TinyModel,
    role: TensorRole,
    shape: [usize; 2],
    weights: &[f32],
) -> io::Result<HfTensor> {
    let dtype = match model.ty {
        TensorType::F32 => "F32",
        TensorType::F16 => "F16",
        TensorType::BF16 => "BF16",
        other => return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{other} in safetensors"))),
    };
    let shape = if role.is_vector() { vec![shape[1]] } else { shape.to_vec() };
    Ok(HfTensor { name: role.hf_name(), dtype, shape, data: plain_bytes(model.ty, weights) })
}

fn config(model: &TinyModel) -> Value {
    let (kind, class) = match model.architecture {
        Architecture::Llama => ("llama", "LlamaForCausalLM"),
        Architecture::Qwen2 => ("qwen2", "Qwen2ForCausalLM"),
    };
    let scaling = match &model.scaling {
        RopeScaling::None | RopeScaling::Factors(_) => Value::Null,
        RopeScaling::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => json!({
            "rope_type": "llama3", "factor": factor, "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor, "original_max_position_embeddings": original_context }),
        RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, attention_factor, truncate } => {
            json!({
            "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original_context,
            "beta_fast": beta_fast, "beta_slow": beta_slow, "attention_factor": attention_factor,
            "truncate": truncate })
        }
    };
    json!({
        "architectures": [class], "model_type": kind, "hidden_act": "silu", "torch_dtype": "float32",
        "vocab_size": VOCAB, "hidden_size": model.hidden, "intermediate_size": model.feed_forward,
        "num_hidden_layers": model.layers, "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads, "head_dim": model.head_dim,
        "max_position_embeddings": model.context, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "rope_scaling": scaling, "tie_word_embeddings": model.tied_embeddings,
        "bos_token_id": IM_START, "eos_token_id": IM_END })
}

fn tokenizer() -> Value {
    let (mut vocab, mut added) = (Map::new(), Vec::new());
    for (id, (text, ty)) in tokens().into_iter().enumerate() {
        match ty {
            1 => _ = vocab.insert(text, id.into()),
            3 => added.push(json!({ "id": id, "content": text, "special": true, "normalized": false })),
            _ => {}
        }
    }
    json!({
        "version": "1.0", "added_tokens": added, "normalizer": null,
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [
            { "type": "Digits", "individual_digits": true },
            { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true } ] },
        "post_processor": null,
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                   "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                   "ignore_merges": false, "vocab": vocab, "merges": merges() } })
}
