//! The generated model of tests that kill: two layers, written as a GGUF file.

use std::path::Path;

use pagedd_model::testing::{TinyModel, write_gguf};
use pagedd_tests::asks::Mix;
use pagedd_tests::daemon::model_yaml;

/// Requests that it is asked.
pub const MIX: Mix<'static> = Mix { model: "tiny", words: 320, tokens: 240 };

/// Writes the model into `folder`, and returns a configuration that serves it with room for fewer requests than come.
pub fn yaml(folder: &Path) -> String {
    let path = folder.join("tiny.gguf");
    write_gguf(&path, 41, &TinyModel { context: 16_384, ..TinyModel::default() }).expect("write the model");
    let options = "kv_memory: 24576 tokens\n    max_model_len: 16384\n    max_num_seqs: 72\n    threads: 1";
    model_yaml(MIX.model, &path, options)
}
