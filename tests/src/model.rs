//! The model that tests run, and what reference engines said about it.
//!
//! **Owns** where it lies. **Never** fetches it: `make model` does.

use std::fs;
use std::path::PathBuf;

use serde_json::Value;

use crate::tidy::root;

/// SmolLM2-135M-Instruct, `Q4_1`.
///
/// # Panics
/// It was not fetched.
pub fn smollm2() -> PathBuf {
    let path = root().join(".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(path.is_file(), "{} is not there: run `make model`", path.display());
    path
}

/// A prompt with its greedy continuation by an engine that computes in float32.
#[derive(Clone, Debug)]
pub struct Reference {
    /// Its name in the file.
    pub id: String,
    /// Text with the chat template applied, or the raw prompt.
    pub templated: String,
    /// For chats, the messages.
    pub messages: Option<Value>,
    /// How many tokens the prompt has.
    pub prompt_tokens: u64,
    /// How many tokens follow, an end token included.
    pub output_tokens: u64,
    /// Their text, without an end token.
    pub text: String,
    /// The end token was sampled.
    pub stopped: bool,
}

/// All prompts of `fixtures/reference/greedy.json`.
pub fn references() -> Vec<Reference> {
    let path = root().join("tests/fixtures/reference/greedy.json");
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let file: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let prompts = file["prompts"].as_array().expect("prompts");
    prompts
        .iter()
        .map(|p| {
            let ids = p["hf_fp32"]["out_ids"].as_array().expect("out_ids");
            Reference {
                id: p["id"].as_str().expect("id").to_owned(),
                templated: p["templated"].as_str().expect("templated").to_owned(),
                messages: p.get("messages").filter(|m| m.is_array()).cloned(),
                prompt_tokens: p["n_prompt"].as_u64().expect("n_prompt"),
                output_tokens: ids.len() as u64,
                text: p["hf_fp32"]["text"].as_str().expect("text").to_owned(),
                stopped: ids.last().and_then(Value::as_u64) == Some(2),
            }
        })
        .collect()
}

/// One prompt of the references, by its name.
pub fn reference(id: &str) -> Reference {
    references().into_iter().find(|r| r.id == id).unwrap_or_else(|| panic!("no reference {id}"))
}
