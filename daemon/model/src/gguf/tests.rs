use std::path::PathBuf;

use pagedd_core::{TensorType, Tokens};
use proptest::prelude::*;
use tempfile::TempDir;

use crate::testing::{GgufTensor, GgufValue, GgufWriter, TinyModel, gguf_writer};
use crate::{Architecture, ModelError, ModelSource, RopePairing, RopeScaling, TensorRole};

fn save(bytes: &[u8]) -> (TempDir, PathBuf) {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    (directory, path)
}

fn open_bytes(bytes: &[u8]) -> Result<ModelSource, ModelError> {
    let (_directory, path) = save(bytes);
    ModelSource::open(&path)
}

fn open(writer: &GgufWriter) -> Result<ModelSource, ModelError> {
    open_bytes(&writer.bytes())
}

fn tiny() -> GgufWriter {
    gguf_writer(1, &TinyModel::default())
}

/// The message, checked to be one line that names `item`.
fn refusal(result: Result<ModelSource, ModelError>, item: &str) -> String {
    let message = result.expect_err("it must be refused").to_string();
    assert!(message.contains(item) && !message.contains('\n'), "{message:?} does not name {item}");
    message
}

#[test]
fn a_written_model_reads_back_in_every_type_and_architecture() {
    for ty in TensorType::ALL {
        for architecture in [Architecture::Llama, Architecture::Qwen2] {
            let model =
                TinyModel { architecture, tied_embeddings: ty != TensorType::F16, ..TinyModel::of_type(ty) };
            let writer = gguf_writer(7, &model);
            let source = open(&writer).unwrap();
            let pairing = match architecture {
                Architecture::Llama => RopePairing::Interleaved,
                Architecture::Qwen2 => RopePairing::Halves,
            };
            assert_eq!(source.config(), &model.config(pairing), "{ty} {architecture}");
            assert_eq!(source.tensors().count(), writer.tensors.len());
            for tensor in source.tensors() {
                let written = writer.tensors.iter().find(|t| t.name == tensor.name).unwrap();
                let mut bytes = vec![0; tensor.bytes as usize];
                source.read(tensor, &mut bytes).unwrap();
                assert_eq!(bytes, written.data, "{}", tensor.name);
                let last = tensor.rows - 1;
                let mut row = vec![0; tensor.row_bytes()];
                source.read_rows(tensor, last..tensor.rows, &mut row).unwrap();
                assert_eq!(row, written.data[last * tensor.row_bytes()..], "{}", tensor.name);
                assert!(source.read_rows(tensor, last..tensor.rows + 1, &mut row).is_err());
                assert!(source.read(tensor, &mut bytes[1..]).is_err());
            }
        }
    }
}

#[test]
fn the_digest_changes_with_metadata_names_and_data_and_not_with_the_path() {
    let digest = |writer: &GgufWriter| open(writer).unwrap().digest();
    let base = digest(&tiny());
    assert_eq!(base, digest(&tiny()));
    assert_ne!(base, digest(&gguf_writer(2, &TinyModel::default())));
    let mut other = tiny();
    other.set("general.name", "another");
    assert_ne!(base, digest(&other));
    let mut other = tiny();
    *other.tensor("blk.1.ffn_up.weight").unwrap().data.last_mut().unwrap() ^= 1;
    assert_ne!(base, digest(&other));
}

#[test]
fn an_architecture_that_is_not_served_is_named() {
    for name in ["gemma2", "phi3", "", "qwen2moe"] {
        let mut writer = tiny();
        writer.set("general.architecture", name);
        let message = refusal(open(&writer), "general.architecture");
        assert!(message.contains("llama and qwen2 are served"), "{message}");
    }
    let mut writer = tiny();
    writer.set("general.type", "adapter");
    refusal(open(&writer), "general.type");
}

#[test]
fn mixtures_of_experts_are_refused_by_key_and_by_tensor() {
    let mut writer = tiny();
    writer.set("llama.expert_count", GgufValue::U32(8));
    refusal(open(&writer), "llama.expert_count");
    let mut writer = tiny();
    let mut extra = writer.tensors[3].clone();
    extra.name = "blk.0.ffn_gate_inp.weight".into();
    writer.tensors.push(extra);
    let message = refusal(open(&writer), "blk.0.ffn_gate_inp.weight");
    assert!(message.contains("experts"), "{message}");
}

#[test]
fn options_that_change_the_arithmetic_are_refused_by_name() {
    for (key, value) in [
        ("attention.value_length", GgufValue::U32(32)),
        ("attention.scale", GgufValue::F32(0.5)),
        ("attention.causal", GgufValue::Bool(false)),
        ("attention.logit_softcapping", GgufValue::F32(30.0)),
        ("logit_scale", GgufValue::F32(0.1)),
        ("rope.dimension_count", GgufValue::U32(8)),
        ("rope.scaling.type", GgufValue::from("longrope")),
        ("rope.scaling.attn_factor", GgufValue::F32(2.0)),
        ("tensor_data_layout", GgufValue::from("something")),
        ("use_parallel_residual", GgufValue::Bool(true)),
    ] {
        let key = format!("llama.{key}");
        let mut writer = tiny();
        writer.set(&key, value);
        refusal(open(&writer), &key);
    }
}

#[test]
fn a_window_smaller_than_the_context_limits_the_context_to_it() {
    let mut writer = tiny();
    writer.set("llama.attention.sliding_window", GgufValue::U32(100));
    assert_eq!(open(&writer).unwrap().config().context, Tokens(100));
    writer.set("llama.attention.sliding_window", GgufValue::U32(100_000));
    assert_eq!(open(&writer).unwrap().config().context, Tokens(512));
}

#[test]
fn scalings_of_rope_are_read() {
    let yarn = RopeScaling::Yarn {
        factor: 4.0,
        original_context: 128,
        beta_fast: 30.0,
        beta_slow: 2.0,
        attention_factor: 0.1 * 4.0_f32.ln() + 1.0,
        truncate: true,
    };
    for scaling in [
        RopeScaling::Linear { factor: 2.0 },
        yarn,
        RopeScaling::Factors(vec![1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0]),
    ] {
        let model = TinyModel { scaling: scaling.clone(), ..TinyModel::default() };
        assert_eq!(open(&gguf_writer(1, &model)).unwrap().config().rope.scaling, scaling);
    }
    let model = TinyModel { scaling: RopeScaling::Factors(vec![1.0; 7]), ..TinyModel::default() };
    refusal(open(&gguf_writer(1, &model)), "rope_freqs.weight");
    let model = TinyModel { scaling: RopeScaling::Factors(vec![f32::NAN; 8]), ..TinyModel::default() };
    refusal(open(&gguf_writer(1, &model)), "rope_freqs.weight");
}

#[test]
fn missing_keys_and_tensors_are_named() {
    for key in [
        "general.architecture",
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
    ] {
        let mut writer = tiny();
        writer.unset(key);
        refusal(open(&writer), key);
    }
    let names: Vec<String> = tiny().tensors.iter().map(|t| t.name.clone()).collect();
    for name in names {
        let mut writer = tiny();
        writer.tensors.retain(|t| t.name != name);
        refusal(open(&writer), &name);
    }
}

#[test]
fn wrong_shapes_types_and_names_of_tensors_are_named() {
    let change = |name: &str, change: &dyn Fn(&mut GgufTensor)| {
        let mut writer = tiny();
        change(writer.tensor(name).unwrap());
        open(&writer)
    };
    let name = "blk.1.attn_k.weight";
    refusal(change(name, &|t| t.extents = vec![32, 64]), name);
    refusal(change(name, &|t| t.extents = vec![64 * 32]), name);
    refusal(change(name, &|t| t.extents = vec![64, 0]), name);
    refusal(change(name, &|t| t.extents = vec![64, 32, 1, 1, 1]), name);
    refusal(change(name, &|t| t.extents = vec![u64::MAX, 2]), name);
    refusal(change(name, &|t| t.extents = vec![1 << 40, 1 << 40]), name);
    refusal(change(name, &|t| t.extents = vec![1 << 62, 1]), name);
    assert!(refusal(change(name, &|t| t.ty = 20), name).contains("IQ4_NL"));
    assert!(refusal(change(name, &|t| t.ty = 999), name).contains("999"));
    refusal(change(name, &|t| t.name = "blk.01.attn_k.weight".into()), "blk.01.attn_k.weight");
    refusal(change(name, &|t| t.name = "blk.2.attn_k.weight".into()), "blk.");
    refusal(change(name, &|t| t.name = "blk.0.attn_k.weight".into()), "blk.0.attn_k.weight");
    refusal(
        change("blk.0.attn_norm.weight", &|t| (t.ty, t.extents) = (8, vec![64])),
        "blk.0.attn_norm.weight",
    );
    refusal(change("token_embd.weight", &|t| t.extents = vec![64, 271]), "tokenizer.ggml.tokens");
}

#[test]
fn dimensions_that_contradict_each_other_are_refused() {
    for (key, value) in [
        ("block_count", 0),
        ("block_count", 3),
        ("block_count", u32::MAX),
        ("embedding_length", 0),
        ("embedding_length", u32::MAX),
        ("attention.head_count", 0),
        ("attention.head_count_kv", 3),
        ("attention.head_count_kv", 0),
        ("context_length", 0),
        ("context_length", u32::MAX),
        ("vocab_size", 271),
    ] {
        let mut writer = tiny();
        writer.set(&format!("llama.{key}"), GgufValue::U32(value));
        assert!(open(&writer).is_err(), "{key} {value}");
    }
    let mut writer = tiny();
    writer.set("llama.attention.head_count", GgufValue::I32s(vec![4, 4]));
    refusal(open(&writer), "llama.attention.head_count");
}

#[test]
fn keys_that_occur_twice_and_odd_alignments_are_refused() {
    let mut writer = tiny();
    writer.metadata.push(("llama.block_count".into(), GgufValue::U32(2)));
    refusal(open(&writer), "llama.block_count");
    for alignment in [0, 3, 1 << 30] {
        let mut writer = tiny();
        writer.set("general.alignment", GgufValue::U32(alignment));
        refusal(open(&writer), "general.alignment");
    }
    let mut writer = tiny();
    writer.set("split.count", GgufValue::U32(2));
    refusal(open(&writer), "split.count");
}

#[test]
fn other_files_and_versions_are_refused() {
    let mut bytes = tiny().bytes();
    bytes[4] = 1;
    refusal(open_bytes(&bytes), "version");
    bytes[4..8].copy_from_slice(&3_u32.to_be_bytes());
    assert!(refusal(open_bytes(&bytes), "version").contains("big-endian"));
    refusal(open_bytes(b"hello, world, this is a text"), "GGUF");
    refusal(open_bytes(b""), "magic");
    bytes[4..8].copy_from_slice(&2_u32.to_le_bytes());
    open_bytes(&bytes).unwrap();
    refusal(ModelSource::open("/dev/null".as_ref()), "/dev/null");
    refusal(ModelSource::open("/nonexistent/model.gguf".as_ref()), "/nonexistent/model.gguf");
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let writer = tiny();
    let (bytes, header) = (writer.bytes(), writer.header().len());
    let (_directory, path) = save(&bytes);
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    let cuts = (0..header).rev().step_by(7).chain((header..bytes.len()).rev().step_by(4099));
    let mut cuts: Vec<usize> = cuts.collect();
    cuts.sort_unstable();
    for cut in cuts.into_iter().rev() {
        file.set_len(cut as u64).unwrap();
        assert!(ModelSource::open(&path).is_err(), "cut at {cut} of {}", bytes.len());
    }
}

#[test]
fn a_file_that_shrinks_after_it_was_opened_is_noticed() {
    let (_directory, path) = save(&tiny().bytes());
    let source = ModelSource::open(&path).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(20_000).unwrap();
    let last = source.tensors().last().unwrap();
    let mut bytes = vec![0; last.bytes as usize];
    let message = source.read(last, &mut bytes).unwrap_err().to_string();
    assert!(message.contains(&last.name) && message.contains("shorter"), "{message}");
}

#[test]
fn tensors_that_overlap_are_refused() {
    // The second tensor's offset is the last eight bytes of its description.
    let writer = tiny();
    let mut bytes = writer.bytes();
    let name = writer.tensors[1].name.as_bytes();
    let at = bytes.windows(name.len()).position(|w| w == name).unwrap() + name.len();
    let offset = at + 4 + 8 * writer.tensors[1].extents.len() + 4;
    bytes[offset..offset + 8].copy_from_slice(&0_u64.to_le_bytes());
    assert!(refusal(open_bytes(&bytes), "overlaps").contains(&writer.tensors[0].name));
    bytes[offset..offset + 8].copy_from_slice(&1_u64.to_le_bytes());
    refusal(open_bytes(&bytes), "aligned");
    bytes[offset..offset + 8].copy_from_slice(&(u64::MAX - 31).to_le_bytes());
    refusal(open_bytes(&bytes), &writer.tensors[1].name);
}

/// Whatever the bytes: no panic, and where a model opens, every tensor can be read.
fn is_harmless(bytes: &[u8]) {
    if let Ok(source) = open_bytes(bytes) {
        let total: u64 = source.tensors().map(|t| t.bytes).sum();
        assert!(total <= bytes.len() as u64, "{total} bytes of tensors in a file of {}", bytes.len());
        for tensor in source.tensors() {
            let mut data = vec![0; tensor.bytes as usize];
            source.read(tensor, &mut data).unwrap();
        }
        assert!(source.tensor(TensorRole::TokenEmbd).is_some());
        if let Ok(tokenizer) = source.tokenizer() {
            let ids = tokenizer.encode("hello <|im_end|> 12");
            assert!(ids.iter().all(|id| id.0 < tokenizer.vocab_size()));
        }
        _ = source.chat_template();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_bytes_make_the_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), magic: bool) {
        let mut bytes = bytes;
        if magic {
            bytes.splice(0..0, *b"GGUF\x03\0\0\0");
        }
        is_harmless(&bytes);
    }

    #[test]
    fn no_changed_bytes_of_a_header_make_the_reader_panic_or_read_past_the_file(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
    ) {
        let writer = tiny();
        let (mut bytes, header) = (writer.bytes(), writer.header().len());
        for (index, value) in changes {
            bytes[index.index(header)] = value;
        }
        is_harmless(&bytes);
    }

    #[test]
    fn no_number_in_a_header_is_believed(
        at in any::<prop::sample::Index>(),
        number in prop_oneof![
            Just(u64::MAX), Just(u64::MAX / 2), Just(1 << 63), Just(1 << 40), Just(1 << 32), Just(0), any::<u64>(),
        ],
    ) {
        let writer = tiny();
        let (mut bytes, header) = (writer.bytes(), writer.header().len());
        let at = at.index(header - 8);
        bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
        is_harmless(&bytes);
    }
}
