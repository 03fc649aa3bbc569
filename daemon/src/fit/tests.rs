use std::path::Path;

use pagedd_config::{Config, Overrides};
use pagedd_core::{SamplingParams, StepCost};
use pagedd_journal::OnLeave;

use super::*;

fn settings(options: &str) -> Settings {
    let file = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
    let path = file.path().display();
    let text = format!("models:\n  m:\n    path: {path}\n    device: cpu\n{options}");
    let config = Config::parse(Some(Path::new("/p.yaml")), &text, &Overrides::default()).unwrap();
    config.models.into_iter().next().unwrap()
}

fn info() -> ModelInfo {
    ModelInfo {
        architecture: "llama".to_owned(),
        parameters: 1,
        vocab_size: 2,
        max_model_len: 1000,
        block_size: 16,
        blocks: 100,
        block_bytes: 4096,
        weight_bytes: 1,
        scratch_bytes: 0,
        pinned_bytes: 0,
        digest: [5; 16],
        file_digest: [6; 16],
        kv_id: [4; 16],
        weights_reused: false,
        kv_reused: true,
        threads: 1,
        kernels: "generic".to_owned(),
        load_us: 0,
        cost: StepCost::UNKNOWN.into(),
        algorithms: Vec::new(),
    }
}

fn saved(prompt: u32, max_tokens: u32, n: u32) -> SavedRequest {
    SavedRequest {
        model: "m".to_owned(),
        key: None,
        created_unix: 1,
        on_leave: OnLeave::RunOn,
        prompt: (0..prompt).collect(),
        sampling: SamplingParams::GREEDY.into(),
        n,
        max_tokens,
        stop_ids: Vec::new(),
        context: Vec::new(),
    }
}

#[test]
fn tokens_are_of_a_file_and_its_arithmetic_and_what_an_older_pagedd_kept_is_of_the_file() {
    let (usual, info) = (settings(""), info());
    let before = Some(model_digest(&usual, &info));
    assert!(!is_of_another_model(before, &usual, &info));
    assert!(!is_of_another_model(before, &settings("    max_model_len: 10\n"), &info));
    for other in ["    dtype: f32\n", "    kv_dtype: f32\n"] {
        assert!(is_of_another_model(before, &settings(other), &info), "{other}");
    }
    let replaced = ModelInfo { file_digest: [7; 16], ..info.clone() };
    assert!(is_of_another_model(before, &usual, &replaced));
    assert!(!is_of_another_model(Some([6; 16]), &usual, &info), "an older pagedd's");
    assert!(is_of_another_model(Some([6; 16]), &usual, &replaced));
    assert!(!is_of_another_model(None, &usual, &info));
}

#[test]
fn a_request_fits_to_the_last_token_and_block() {
    let info = info();
    assert_eq!(misfit(&saved(100, 900, 1), &info), None);
    let long = Misfit::Length { tokens: 1001, max_model_len: 1000 };
    assert_eq!(misfit(&saved(100, 901, 1), &info), Some(long));
    assert_eq!(misfit(&saved(1001, 1, 1), &info).map(|_| ()), Some(()));
    // 2 blocks are of the prompt, and 49 of each choice.
    assert_eq!(misfit(&saved(32, 785, 2), &info), None);
    let large = Misfit::Pool { blocks: Blocks(102), pool: 100 };
    assert_eq!(misfit(&saved(32, 786, 2), &info), Some(large));
    assert_eq!(large.to_string(), "it may need 102 blocks, and kv_memory has 100 now");
}
