use super::*;
use crate::testing::{GgufValue, GgufWriter, TinyModel, gguf_writer};
use crate::{Message, ModelError, ModelSource, RenderOptions};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The real model, which `make model` fetches.
fn model() -> ModelSource {
    let path = std::env::var_os("PAGEDD_TEST_MODEL")
        .map_or_else(|| repository().join(".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf"), PathBuf::from);
    assert!(path.exists(), "{} is missing: run `make model`", path.display());
    ModelSource::open(&path).unwrap()
}

fn fixture(name: &str) -> Value {
    let path = repository().join("tests/fixtures/reference").join(name);
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn numbers(ids: &[TokenId]) -> Vec<u32> {
    ids.iter().map(|id| id.0).collect()
}

#[test]
fn every_reference_string_has_its_reference_ids() {
    let tokenizer = model().tokenizer().unwrap();
    let strings = fixture("tokenizer.json");
    let strings = strings.as_array().unwrap();
    assert_eq!(strings.len(), 72);
    for entry in strings {
        let text = entry["text"].as_str().unwrap();
        assert_eq!(numbers(&tokenizer.encode_with_controls(text)), ids(&entry["ids"]), "{text:?}");
    }
}

#[test]
fn every_reference_prompt_has_its_reference_ids() {
    let model = model();
    let (tokenizer, template) = (model.tokenizer().unwrap(), model.chat_template().unwrap().unwrap());
    let greedy = fixture("greedy.json");
    let prompts = greedy["prompts"].as_array().unwrap();
    assert_eq!(prompts.len(), 8);
    for prompt in prompts {
        let wanted = ids(&prompt["prompt_ids"]);
        let got = if prompt["kind"] == "raw" {
            tokenizer.encode_prompt(prompt["prompt"].as_str().unwrap())
        } else {
            let messages: Vec<Message> = prompt["messages"]
                .as_array()
                .unwrap()
                .iter()
                .map(|m| Message::new(m["role"].as_str().unwrap(), m["content"].as_str().unwrap()))
                .collect();
            let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
            let pieces = template.render(&messages, &options).unwrap();
            let text: String = pieces.iter().map(Piece::text).collect();
            assert_eq!(text, prompt["templated"].as_str().unwrap());
            tokenizer.encode_pieces(&pieces)
        };
        assert_eq!(numbers(&got), wanted, "{}", prompt["id"]);
    }
}

/// A tiny GGUF model whose metadata was changed.
fn tiny(change: impl FnOnce(&mut GgufWriter)) -> Result<ModelSource, ModelError> {
    let directory = tempfile::TempDir::new().unwrap();
    let path = directory.path().join("tiny.gguf");
    let mut writer = gguf_writer(1, &TinyModel::default());
    change(&mut writer);
    std::fs::write(&path, writer.bytes()).unwrap();
    ModelSource::open(&path)
}

fn tiny_tokenizer(change: impl FnOnce(&mut GgufWriter)) -> Result<Tokenizer, ModelError> {
    tiny(change).unwrap().tokenizer()
}

/// Entries 267 to 271 of the tiny vocabulary, which stand for nothing, as tokens of type `ty`.
fn with_tokens(writer: &mut GgufWriter, texts: &[&str], ty: i32) {
    for (key, value) in &mut writer.metadata {
        match value {
            GgufValue::Strings(tokens) if key == "tokenizer.ggml.tokens" => {
                tokens.iter_mut().skip(267).zip(texts).for_each(|(token, text)| *token = (*text).to_owned());
            }
            GgufValue::I32s(types) if key == "tokenizer.ggml.token_type" => {
                types.iter_mut().skip(267).zip(texts).for_each(|(old, _)| *old = ty);
            }
            _ => {}
        }
    }
}

fn pieces_of(tokenizer: &Tokenizer, text: &str) -> Vec<String> {
    let ids = tokenizer.encode(text);
    ids.iter().map(|&id| String::from_utf8_lossy(tokenizer.token_bytes(id)).into_owned()).collect()
}

#[test]
fn control_tokens_in_user_text_stay_text() {
    let tokenizer = model().tokenizer().unwrap();
    for id in (0..tokenizer.vocab_size()).map(TokenId) {
        let Some(control) = tokenizer.control_text(id) else { continue };
        let plain = tokenizer.encode(&format!("a {control}{control} b"));
        assert!(!plain.iter().any(|&id| tokenizer.is_control(id)), "{control}: {plain:?}");
        let bytes: Vec<u8> = plain.iter().flat_map(|&id| tokenizer.token_bytes(id)).copied().collect();
        assert_eq!(bytes, format!("a {control}{control} b").as_bytes());
        assert_eq!(tokenizer.encode_with_controls(control), [id]);
        assert!(tokenizer.token_bytes(id).is_empty());
        let pieces = [Piece::User(control.into()), Piece::Trusted(control.into())];
        assert_eq!(tokenizer.encode_pieces(&pieces).iter().filter(|i| **i == id).count(), 1, "{control}");
    }
    assert_eq!(tokenizer.stop_ids(), [TokenId(0), TokenId(2)]);
    assert_eq!((tokenizer.vocab_size(), tokenizer.bos()), (49_152, None));
}

#[test]
fn words_are_split_over_piece_borders_and_controls_only_within_trusted_text() {
    let tokenizer = model().tokenizer().unwrap();
    let split = |parts: &[(&str, bool)]| {
        let pieces: Vec<Piece> = parts
            .iter()
            .map(
                |&(text, trusted)| {
                    if trusted { Piece::Trusted(text.into()) } else { Piece::User(text.into()) }
                },
            )
            .collect();
        tokenizer.encode_pieces(&pieces)
    };
    assert_eq!(split(&[("hel", true), ("lo wor", false), ("ld", true)]), tokenizer.encode("hello world"));
    assert_eq!(split(&[("<|im_", true), ("end|>", true)]), [TokenId(2)]);
    for parts in [[("<|im_", true), ("end|>", false)], [("<|im_", false), ("end|>", true)]] {
        assert_eq!(split(&parts), tokenizer.encode("<|im_end|>"));
    }
}

#[test]
fn token_bytes_of_any_text_are_the_text() {
    let tokenizer = model().tokenizer().unwrap();
    for entry in fixture("tokenizer.json").as_array().unwrap() {
        let text = entry["text"].as_str().unwrap();
        let bytes: Vec<u8> =
            tokenizer.encode(text).iter().flat_map(|&id| tokenizer.token_bytes(id)).copied().collect();
        // This vocabulary lacks a few control characters and the lead bytes of planes that have no characters.
        let lost = |c: &char| c.is_control() && *c != '\n' && *c != '\t' && *c != '\r';
        if !text.chars().any(|c| lost(&c)) {
            assert_eq!(bytes, text.as_bytes(), "{text:?}");
        }
    }
}

#[test]
fn exactly_one_bos_is_written_where_the_model_adds_one() {
    let with_bos = |w: &mut GgufWriter| w.set("tokenizer.ggml.add_bos_token", GgufValue::Bool(true));
    let bos = TokenId(crate::testing::IM_START);
    let tokenizer = tiny_tokenizer(with_bos).unwrap();
    assert_eq!(tokenizer.bos(), Some(bos));
    let count = |ids: &[TokenId]| ids.iter().filter(|id| **id == bos).count();
    for template in ["{{ bos_token }}hello", "hello", "{{ bos_token }}{{ bos_token }}hello"] {
        let source = tiny(|w| {
            with_bos(w);
            w.set("tokenizer.chat_template", template);
        });
        let template = source.unwrap().chat_template().unwrap().unwrap();
        let ids = tokenizer.encode_pieces(&template.render(&[], &RenderOptions::default()).unwrap());
        assert_eq!((ids[0], count(&ids)), (bos, 1), "{ids:?}");
    }
    let ids = tokenizer.encode_prompt("<|im_start|>hello");
    assert_eq!((ids[0], count(&ids)), (bos, 1), "{ids:?}");
    assert_eq!(count(&tokenizer.encode("hello")), 0);
    assert_eq!(tokenizer.encode_prompt(""), [bos]);
    assert_eq!(tiny_tokenizer(|_| {}).unwrap().bos(), None);
    let missing = tiny_tokenizer(|w| {
        with_bos(w);
        w.unset("tokenizer.ggml.bos_token_id");
    });
    assert!(missing.unwrap_err().to_string().contains("bos_token_id"));
}

#[test]
fn each_splitting_rule_cuts_digits_and_words_in_its_way() {
    let pieces = |pre: Option<&str>, text: &str| {
        let tokenizer = tiny_tokenizer(|w| {
            with_tokens(w, &["12", "123", "1234", "ĠĠĠ"], 1);
            for (key, value) in &mut w.metadata {
                if let GgufValue::Strings(merges) = value
                    && key == "tokenizer.ggml.merges"
                {
                    merges.extend(["1 2", "12 3", "123 4", "ĠĠ Ġ"].map(str::to_owned));
                }
            }
            match pre {
                Some(pre) => w.set("tokenizer.ggml.pre", pre),
                None => w.unset("tokenizer.ggml.pre"),
            }
        });
        pieces_of(&tokenizer.unwrap(), text)
    };
    for (pre, digits) in [
        (Some("smollm"), &["1", "2", "3", "4"][..]),
        (Some("qwen2"), &["1", "2", "3", "4"]),
        (Some("llama-bpe"), &["123", "4"]),
        (Some("gpt-2"), &["1234"]),
        (Some("default"), &["123", "4"]),
        (None, &["123", "4"]),
    ] {
        assert_eq!(pieces(pre, "1234"), digits, "{pre:?}");
        assert_eq!(pieces(pre, "hello the"), ["hello", " the"], "{pre:?}");
        assert_eq!(pieces(pre, "    the"), ["   ", " the"], "{pre:?}");
    }
    let unknown = tiny_tokenizer(|w| w.set("tokenizer.ggml.pre", "tekken")).unwrap_err().to_string();
    assert!(unknown.contains("tokenizer.ggml.pre") && unknown.contains("tekken"), "{unknown}");
}

#[test]
fn added_plain_tokens_are_found_in_any_text_and_shown() {
    let tokenizer = tiny_tokenizer(|w| with_tokens(w, &["<tool>", "<tool><tool>"], 4)).unwrap();
    let ids = [TokenId(268), TokenId(267)];
    assert_eq!(tokenizer.encode("<tool><tool><tool>"), ids);
    assert_eq!(tokenizer.token_bytes(ids[1]), b"<tool>");
    assert!(!tokenizer.is_control(ids[1]));
}

#[test]
fn a_sentencepiece_vocabulary_merges_by_score_and_falls_back_to_bytes() {
    let tokens = |writer: &mut GgufWriter| {
        let mut texts: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).into();
        let mut types = vec![2, 3, 3];
        texts.extend((0..=255).map(|b| format!("<0x{b:02X}>")));
        types.extend([6; 256]);
        let pieces = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁he", "▁hello", "lo", "▁▁"];
        texts.extend(pieces.map(str::to_owned));
        types.extend([1; 13]);
        let mut scores = vec![0.0; 259];
        scores.extend([-20., -21., -22., -23., -24., -1., -3., -4., -5., -6., -7., -2., -8.]);
        writer.set("tokenizer.ggml.model", "llama");
        writer.set("tokenizer.ggml.tokens", GgufValue::Strings(texts));
        writer.set("tokenizer.ggml.token_type", GgufValue::I32s(types));
        writer.set("tokenizer.ggml.scores", GgufValue::F32s(scores));
        writer.set("tokenizer.ggml.bos_token_id", GgufValue::U32(1));
        writer.set("tokenizer.ggml.eos_token_id", GgufValue::U32(2));
    };
    let tokenizer = tiny_tokenizer(tokens).unwrap();
    // `he` and `lo` have better scores than `ll`, so that `hello` is `he` + `l` + `lo`, and `▁he` comes last.
    assert_eq!(pieces_of(&tokenizer, "hello"), [" he", "l", "lo"]);
    assert_eq!(pieces_of(&tokenizer, " he"), [" ", " he"]);
    assert_eq!(pieces_of(&tokenizer, "<s>").concat(), " <s>");
    let bytes: Vec<u8> =
        tokenizer.encode("é").iter().flat_map(|&id| tokenizer.token_bytes(id)).copied().collect();
    assert_eq!(bytes, " é".as_bytes());
    assert_eq!(numbers(&tokenizer.encode_prompt("")), [1]);
    assert_eq!(numbers(&tokenizer.encode_with_controls("<s>he</s>")), [1, 268, 2]);
    assert_eq!(tokenizer.stop_ids(), [TokenId(2)]);
    let bare = tiny_tokenizer(|w| {
        tokens(w);
        w.set("tokenizer.ggml.add_space_prefix", GgufValue::Bool(false));
        w.set("tokenizer.ggml.add_bos_token", GgufValue::Bool(false));
    });
    assert_eq!(pieces_of(&bare.unwrap(), "he"), ["he"]);
    let lossy = tiny_tokenizer(|w| {
        tokens(w);
        with_tokens(w, &[], 1);
        if let Some((_, GgufValue::I32s(types))) =
            w.metadata.iter_mut().find(|(k, _)| k.ends_with("token_type"))
        {
            types[100] = 5;
        }
    });
    assert!(lossy.unwrap_err().to_string().contains("255 of 256"));
}

#[test]
fn vocabularies_that_contradict_themselves_are_refused_by_key() {
    let refused = |key: &str, change: &dyn Fn(&mut GgufWriter)| {
        let message = tiny_tokenizer(change).expect_err(key).to_string();
        assert!(message.contains(key) && !message.contains('\n'), "{message} does not name {key}");
    };
    let set = |key: &'static str, value: GgufValue| move |w: &mut GgufWriter| w.set(key, value.clone());
    refused("tokenizer.ggml.model", &set("tokenizer.ggml.model", "t5".into()));
    refused("tokenizer.ggml.merges", &set("tokenizer.ggml.merges", GgufValue::Strings(vec!["zz yy".into()])));
    refused("tokenizer.ggml.merges", &set("tokenizer.ggml.merges", GgufValue::Strings(vec!["zz".into()])));
    refused("tokenizer.ggml.merges", &set("tokenizer.ggml.merges", GgufValue::Strings(vec![String::new()])));
    refused("tokenizer.ggml.merges", &set("tokenizer.ggml.merges", GgufValue::U32(1)));
    refused("tokenizer.ggml.token_type", &set("tokenizer.ggml.token_type", GgufValue::I32s(vec![1])));
    refused("tokenizer.ggml.token_type", &set("tokenizer.ggml.token_type", GgufValue::I32s(vec![9; 272])));
    refused("tokenizer.ggml.eos_token_id", &set("tokenizer.ggml.eos_token_id", GgufValue::U32(272)));
    refused("tokenizer.ggml.bos_token_id", &set("tokenizer.ggml.bos_token_id", GgufValue::U32(u32::MAX)));
    refused("vocabulary", &|w| with_tokens(w, &["a"], 1));
    for key in ["model", "tokens", "token_type", "merges"] {
        let key = format!("tokenizer.ggml.{key}");
        refused(&key, &|w| w.unset(&key));
    }
}

#[test]
fn very_long_words_and_gaps_are_encoded() {
    for pre in ["smollm", "qwen2", "llama-bpe", "default"] {
        let tokenizer = tiny_tokenizer(|w| w.set("tokenizer.ggml.pre", pre)).unwrap();
        for text in [" ".repeat(2 << 20) + "x", "h".repeat(300_000), "\n \n".repeat(100_000)] {
            let ids = tokenizer.encode(&text);
            let bytes: usize = ids.iter().map(|&id| tokenizer.token_bytes(id).len()).sum();
            assert_eq!(bytes, text.len(), "{pre}");
        }
    }
}

#[test]
fn a_text_longer_than_a_portion_has_the_ids_of_its_words() {
    let tokenizer = tiny_tokenizer(|w| w.set("tokenizer.ggml.pre", "llama-bpe")).unwrap();
    let count = 2 * MAX_PORTION / "hello the ".len();
    let word = tokenizer.encode("hello the");
    let spaced = tokenizer.encode(" hello the");
    let ids = tokenizer.encode(&vec!["hello the"; count].join(" "));
    assert_eq!(ids.len(), word.len() + (count - 1) * spaced.len());
    assert!(ids[word.len()..].chunks(spaced.len()).all(|chunk| chunk == spaced));
    let unbroken = tokenizer.encode(&"ü".repeat(MAX_PORTION));
    let bytes: usize = unbroken.iter().map(|&id| tokenizer.token_bytes(id).len()).sum();
    assert_eq!(bytes, 2 * MAX_PORTION);
}
