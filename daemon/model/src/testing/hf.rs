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

pub(super) fn write(directory: &Path, seed: u64, model: &TinyModel, shards: usize) -> io::Result<()> {
    std::fs::create_dir_all(directory)?;
    let save = |name: &str, value: &Value| std::fs::write(directory.join(name), format!("{value:#}"));
    save("config.json", &config(model))?;
    save("tokenizer.json", &tokenizer())?;
    save(
        "tokenizer_config.json",
        &json!({ "chat_template": CHAT_TEMPLATE, "bos_token": "<|im_start|>",
                 "eos_token": { "content": "<|im_end|>" }, "add_bos_token": false }),
    )?;
    save("generation_config.json", &json!({ "bos_token_id": IM_START, "eos_token_id": [IM_END] }))?;
    let dtype = match model.ty {
        TensorType::F32 => "F32",
        TensorType::F16 => "F16",
        TensorType::BF16 => "BF16",
        other => return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{other} in safetensors"))),
    };
    let tensors = model.tensors();
    let per_shard = tensors.len().div_ceil(shards.max(1));
    let mut weight_map = Map::new();
    for (number, tensors) in tensors.chunks(per_shard).enumerate() {
        let name = match shards {
            0 | 1 => "model.safetensors".to_owned(),
            _ => format!("model-{:05}-of-{shards:05}.safetensors", number + 1),
        };
        let (mut header, mut data) = (Map::new(), Vec::new());
        header.insert("__metadata__".into(), json!({ "format": "pt" }));
        for &(role, shape) in tensors {
            let start = data.len();
            data.extend(plain_bytes(model.ty, &TinyModel::weights(seed, role, shape)));
            let extents = if role.is_vector() { json!([shape[1]]) } else { json!(shape) };
            let entry = json!({ "dtype": dtype, "shape": extents, "data_offsets": [start, data.len()] });
            header.insert(role.hf_name(), entry);
            weight_map.insert(role.hf_name(), name.clone().into());
        }
        let header = Value::Object(header).to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.bytes());
        bytes.extend(data);
        std::fs::write(directory.join(name), bytes)?;
    }
    if shards > 1 {
        save("model.safetensors.index.json", &json!({ "metadata": {}, "weight_map": weight_map }))?;
    }
    Ok(())
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
