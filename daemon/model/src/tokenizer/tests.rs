use super::*;
use crate::{Message, ModelSource, RenderOptions};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The real model, which `make model` fetches.
fn model() -> ModelSource {
    let path = std::env::var_os("PAGEDD_TEST_MODEL").map_or_else(
        || repository().join(".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf"),
        PathBuf::from,
    );
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
        let got = match prompt["kind"].as_str().unwrap() {
            "raw" => tokenizer.encode_prompt(prompt["prompt"].as_str().unwrap()),
            _ => {
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
            }
        };
        assert_eq!(numbers(&got), wanted, "{}", prompt["id"]);
    }
}
