use std::path::Path;

use pagedd_core::{TensorType, TokenId, Tokens};
use proptest::prelude::*;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::testing::{IM_END, TinyModel, write_directory, write_gguf};
use crate::{Architecture, ModelError, ModelSource, RopePairing, RopeScaling, TensorRole};

fn tiny(model: &TinyModel, shards: usize) -> TempDir {
    let directory = TempDir::new().unwrap();
    write_directory(directory.path(), 1, model, shards).unwrap();
    directory
}

/// A default model whose JSON file `name` was changed.
fn changed(name: &str, change: impl FnOnce(&mut Value)) -> Result<ModelSource, ModelError> {
    let directory = tiny(&TinyModel::default(), 1);
    change_json(directory.path(), name, change);
    ModelSource::open(directory.path())
}

fn change_json(directory: &Path, name: &str, change: impl FnOnce(&mut Value)) {
    let path = directory.join(name);
    let mut value: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut value);
    std::fs::write(path, value.to_string()).unwrap();
}

fn refusal<T: std::fmt::Debug>(result: Result<T, ModelError>, item: &str) -> String {
    let message = result.expect_err("it must be refused").to_string();
    assert!(message.contains(item) && !message.contains('\n'), "{message:?} does not name {item}");
    message
}

fn read(source: &ModelSource, role: TensorRole) -> Vec<u8> {
    let tensor = source.tensor(role).unwrap();
    let mut bytes = vec![0; tensor.bytes as usize];
    source.read(tensor, &mut bytes).unwrap();
    bytes
}

#[test]
fn one_file_and_several_give_the_same_model() {
    for ty in [TensorType::F32, TensorType::F16, TensorType::BF16] {
        for architecture in [Architecture::Llama, Architecture::Qwen2] {
            let model = TinyModel { ty, architecture, tied_embeddings: false, ..TinyModel::default() };
            let (one, three) = (tiny(&model, 1), tiny(&model, 3));
            let (one, three) =
                (ModelSource::open(one.path()).unwrap(), ModelSource::open(three.path()).unwrap());
            assert_eq!(one.config(), &model.config(RopePairing::Halves));
            assert_eq!(one.config(), three.config());
            assert_eq!(one.tensors().count(), three.tensors().count());
            for tensor in one.tensors() {
                assert_eq!(read(&one, tensor.role), read(&three, tensor.role), "{}", tensor.name);
            }
        }
    }
}

#[test]
fn a_directory_and_a_gguf_file_of_one_model_agree_up_to_the_order_of_rotated_rows() {
    let model = TinyModel::default();
    let directory = tiny(&model, 1);
    let path = directory.path().join("tiny.gguf");
    write_gguf(&path, 1, &model).unwrap();
    let (hf, gguf) = (ModelSource::open(directory.path()).unwrap(), ModelSource::open(&path).unwrap());
    for tensor in hf.tensors() {
        let (hf_bytes, gguf_bytes) = (read(&hf, tensor.role), read(&gguf, tensor.role));
        let rotated = tensor.name.contains("q_proj") || tensor.name.contains("k_proj");
        assert_eq!(hf_bytes == gguf_bytes, !rotated, "{}", tensor.name);
        if rotated {
            // Row 2i + j of a head in the file is row i + j * head_dim / 2 of the checkpoint.
            for (row, bytes) in gguf_bytes.chunks(tensor.row_bytes()).enumerate() {
                let (head, within) = (row / 16, row % 16);
                let from = (head * 16 + within / 2 + (within % 2) * 8) * tensor.row_bytes();
                assert_eq!(bytes, &hf_bytes[from..from + tensor.row_bytes()], "{} row {row}", tensor.name);
            }
        }
    }
    let (hf, gguf) = (hf.tokenizer().unwrap(), gguf.tokenizer().unwrap());
    for text in ["hello there  123 <|im_end|> ünïcödé 🙂", "", "\u{0}"] {
        assert_eq!(hf.encode(text), gguf.encode(text), "{text:?}");
        assert_eq!(hf.encode_with_controls(text), gguf.encode_with_controls(text), "{text:?}");
    }
    assert_eq!(hf.stop_ids(), gguf.stop_ids());
    assert!(hf.stop_ids().contains(&TokenId(IM_END)));
    for id in (0..hf.vocab_size()).map(TokenId) {
        assert_eq!(hf.token_bytes(id), gguf.token_bytes(id), "{id}");
        assert_eq!(hf.control_text(id), gguf.control_text(id), "{id}");
    }
}

#[test]
fn scalings_of_rope_are_read_under_both_spellings() {
    let yarn = RopeScaling::Yarn {
        factor: 4.0,
        original_context: 256,
        beta_fast: 16.0,
        beta_slow: 2.0,
        attention_factor: 1.25,
        truncate: false,
    };
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 128,
    };
    for (scaling, context) in [(yarn, 1024), (llama3, 512), (RopeScaling::Linear { factor: 2.0 }, 512)] {
        let directory = tiny(&TinyModel { scaling: scaling.clone(), ..TinyModel::default() }, 1);
        let config = ModelSource::open(directory.path()).unwrap().config().clone();
        assert_eq!((config.rope.scaling, config.context), (scaling.clone(), Tokens(context)));
        change_json(directory.path(), "config.json", |c| {
            let mut rope = c["rope_scaling"].take();
            rope["rope_theta"] = json!(50_000.0);
            c["rope_parameters"] = rope;
        });
        let config = ModelSource::open(directory.path()).unwrap().config().clone();
        assert_eq!((config.rope.scaling, config.rope.base), (scaling, 50_000.0));
    }
    for (value, item) in [
        (json!({ "rope_type": "dynamic", "factor": 2.0 }), "rope_type"),
        (json!({ "rope_type": "linear" }), "factor"),
        (json!({ "rope_type": "linear", "factor": 0.5 }), "factor"),
        (json!({ "rope_type": "linear", "factor": -2 }), "factor"),
        (json!({ "rope_type": "linear", "factor": 2, "short_factor": [1.0] }), "short_factor"),
        (
            json!({ "rope_type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 1 }),
            "high_freq",
        ),
        (json!({ "type": "yarn", "factor": 2, "beta_fast": 1, "beta_slow": 32 }), "beta_fast"),
        (json!({ "factor": 2 }), "rope_type"),
        (json!([1]), "rope_scaling"),
    ] {
        refusal(changed("config.json", |c| c["rope_scaling"] = value), item);
    }
}

#[test]
fn mistral_windows_limit_the_context() {
    let context = |window: Value| {
        changed("config.json", |c| {
            (c["model_type"], c["architectures"]) = ("mistral".into(), json!(["MistralForCausalLM"]));
            c["sliding_window"] = window;
        })
        .map(|source| source.config().context)
    };
    assert_eq!(context(json!(64)).unwrap(), Tokens(64));
    assert_eq!(context(json!(4096)).unwrap(), Tokens(512));
    assert_eq!(context(Value::Null).unwrap(), Tokens(512));
    refusal(context(json!(0)), "sliding_window");
    let layers = changed("config.json", |c| {
        c["layer_types"] = json!(["full_attention", "sliding_attention"]);
        c["sliding_window"] = json!(32);
    });
    assert_eq!(layers.unwrap().config().context, Tokens(32));
}

#[test]
fn what_is_not_served_is_refused_by_key() {
    for (key, value) in [
        ("model_type", json!("gemma2")),
        ("model_type", Value::Null),
        ("architectures", json!(["LlamaForSequenceClassification"])),
        ("hidden_act", json!("gelu")),
        ("attention_bias", json!(true)),
        ("mlp_bias", json!(true)),
        ("num_local_experts", json!(8)),
        ("quantization_config", json!({ "bits": 4 })),
        ("attn_logit_softcapping", json!(50.0)),
        ("final_logit_softcapping", json!(30.0)),
        ("partial_rotary_factor", json!(0.5)),
        ("residual_multiplier", json!(0.2)),
        ("layer_types", json!(["linear_attention"])),
        ("hidden_size", json!(-1)),
        ("hidden_size", json!("64")),
        ("num_hidden_layers", json!(1e30)),
        ("num_attention_heads", json!(0)),
        ("rms_norm_eps", json!(0)),
        ("rope_theta", json!("big")),
        ("vocab_size", json!(271)),
        ("max_position_embeddings", json!(0)),
        ("head_dim", json!(15)),
    ] {
        refusal(changed("config.json", |c| c[key] = value), key);
    }
    changed("config.json", |c| c["_attn_implementation_autoset"] = json!(true)).unwrap();
    changed("config.json", |c| c["use_cache"] = json!(true)).unwrap();
}

#[test]
fn tied_embeddings_follow_the_configuration() {
    let directory = tiny(&TinyModel { tied_embeddings: false, ..TinyModel::default() }, 1);
    assert!(ModelSource::open(directory.path()).unwrap().tensor(TensorRole::Output).is_some());
    change_json(directory.path(), "config.json", |c| c["tie_word_embeddings"] = json!(true));
    let source = ModelSource::open(directory.path()).unwrap();
    assert!(source.config().tied_embeddings && source.tensor(TensorRole::Output).is_none());
    refusal(changed("config.json", |c| c["tie_word_embeddings"] = json!(false)), "lm_head.weight");
}

#[test]
fn an_index_must_say_what_the_files_hold() {
    let index = "model.safetensors.index.json";
    let with = |change: &dyn Fn(&mut Value)| {
        let directory = tiny(&TinyModel::default(), 2);
        change_json(directory.path(), index, |i| change(&mut i["weight_map"]));
        ModelSource::open(directory.path()).map(|_| ())
    };
    let name = "model.norm.weight";
    refusal(with(&|map| map[name] = json!("../model.safetensors")), name);
    refusal(with(&|map| map[name] = json!("model-00002-of-00002.safetensors")), name);
    refusal(with(&|map| _ = map.as_object_mut().unwrap().remove(name)), name);
    refusal(with(&|map| map["nothing"] = json!("model-00001-of-00002.safetensors")), "nothing");
    refusal(with(&|map| map["nothing"] = json!("absent.safetensors")), "absent.safetensors");
    refusal(with(&|map| *map = json!({})), "weight_map");
    refusal(with(&|map| *map = json!(3)), "weight_map");
}

/// A default model whose safetensors header was changed as text.
fn with_header(change: impl FnOnce(String) -> String) -> Result<ModelSource, ModelError> {
    let directory = tiny(&TinyModel::default(), 1);
    let path = directory.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header = change(String::from_utf8(bytes[8..8 + length].to_vec()).unwrap());
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.bytes());
    out.extend(&bytes[8 + length..]);
    std::fs::write(&path, out).unwrap();
    ModelSource::open(directory.path())
}

#[test]
fn headers_that_lie_are_refused_by_tensor() {
    let entry = |change: &dyn Fn(&mut Value)| {
        with_header(|header| {
            let mut header: Value = serde_json::from_str(&header).unwrap();
            change(&mut header["model.norm.weight"]);
            header.to_string()
        })
    };
    let name = "model.norm.weight";
    refusal(entry(&|e| e["shape"] = json!([63])), name);
    refusal(entry(&|e| e["shape"] = json!([1, 64])), name);
    refusal(entry(&|e| e["shape"] = json!([u64::MAX])), name);
    refusal(entry(&|e| e["dtype"] = json!("F8_E4M3")), "F8_E4M3");
    refusal(entry(&|e| e["dtype"] = json!("F16")), name);
    refusal(entry(&|e| e["data_offsets"] = json!([256, 0])), name);
    refusal(entry(&|e| e["data_offsets"] = json!([0, u64::MAX])), name);
    refusal(entry(&|e| e["data_offsets"] = json!([u64::MAX - 256, u64::MAX])), name);
    assert!(refusal(entry(&|e| e["data_offsets"] = json!([0, 256])), name).contains("overlaps"));
    refusal(with_header(|h| h.replacen(name, "model.layers.0.mlp.experts.0.w1.weight", 1)), "experts");
    refusal(with_header(|h| h.replacen(name, "model.layers.00.mlp.up_proj.weight", 1)), "unknown");
    let twice = with_header(|h| {
        h.replacen(
            '{',
            &format!("{{\"{name}\":{{\"dtype\":\"F32\",\"shape\":[64],\"data_offsets\":[0,256]}},"),
            1,
        )
    });
    assert!(refusal(twice, name).contains("twice"));
    refusal(with_header(|_| "[]".into()), "header");
    refusal(with_header(|_| "{".into()), "header");
}

#[test]
fn header_lengths_are_not_believed() {
    let directory = tiny(&TinyModel::default(), 1);
    let path = directory.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    for length in [0, 1, 1 << 20, 99_999_999, 1 << 40, u64::MAX] {
        let mut bytes = bytes.clone();
        bytes[..8].copy_from_slice(&u64::to_le_bytes(length));
        std::fs::write(&path, bytes).unwrap();
        refusal(ModelSource::open(directory.path()), "header");
    }
    for cut in [0, 7, 8, 9, 1000, bytes.len() - 1] {
        std::fs::write(&path, &bytes[..cut]).unwrap();
        assert!(ModelSource::open(directory.path()).is_err(), "cut at {cut}");
    }
    std::fs::remove_file(&path).unwrap();
    refusal(ModelSource::open(directory.path()), "model.safetensors");
    std::fs::remove_file(directory.path().join("config.json")).unwrap();
    refusal(ModelSource::open(directory.path()), "config.json");
}

#[test]
fn templates_are_found_where_checkpoints_keep_them() {
    let directory = tiny(&TinyModel::default(), 1);
    let rendered = || {
        let template = ModelSource::open(directory.path()).unwrap().chat_template().unwrap();
        template.map(|t| {
            let pieces =
                t.render(&[crate::Message::new("user", "hi")], &crate::RenderOptions::default()).unwrap();
            pieces.iter().map(crate::Piece::text).collect::<String>()
        })
    };
    assert_eq!(rendered().unwrap(), "<|im_start|>user\nhi<|im_end|>\n");
    let settings = "tokenizer_config.json";
    change_json(directory.path(), settings, |c| {
        c["chat_template"] = json!([{ "name": "tool_use", "template": "tools" }, { "name": "default", "template": "d{{ eos_token }}" }]);
    });
    assert_eq!(rendered().unwrap(), "d<|im_end|>");
    std::fs::write(directory.path().join("chat_template.jinja"), "own{{ bos_token }}").unwrap();
    assert_eq!(rendered().unwrap(), "own<|im_start|>");
    std::fs::remove_file(directory.path().join("chat_template.jinja")).unwrap();
    std::fs::remove_file(directory.path().join(settings)).unwrap();
    assert_eq!(rendered(), None);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_changed_bytes_make_the_readers_panic(
        file in prop::sample::select(vec![
            "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
        ]),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let directory = tiny(&TinyModel::default(), 1);
        let path = directory.path().join(file);
        let mut bytes = std::fs::read(&path).unwrap();
        let end = bytes.len().min(6000);
        for (index, value) in changes {
            bytes[index.index(end)] = value;
        }
        std::fs::write(&path, bytes).unwrap();
        if let Ok(source) = ModelSource::open(directory.path()) {
            for tensor in source.tensors() {
                source.read(tensor, &mut vec![0; tensor.bytes as usize]).unwrap();
            }
            if let Ok(tokenizer) = source.tokenizer() {
                prop_assert!(tokenizer.encode("hello 🙂 <|im_end|>").iter().all(|id| id.0 < tokenizer.vocab_size()));
            }
            _ = source.chat_template();
        }
    }

    #[test]
    fn no_text_makes_the_json_readers_panic(text in "\\PC{0,200}", file in 0..3_usize) {
        let directory = tiny(&TinyModel::default(), 1);
        let name = ["config.json", "tokenizer.json", "tokenizer_config.json"][file];
        std::fs::write(directory.path().join(name), text).unwrap();
        if let Ok(source) = ModelSource::open(directory.path()) {
            _ = source.tokenizer();
            _ = source.chat_template();
        }
    }
}
