//! Hugging Face directories: `config.json`, safetensors, `tokenizer.json` and what stands beside them.

mod config;
mod packed;
mod quantization;
mod safetensors;
mod tensors;
mod text;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::check;
use crate::config::Architecture;
use crate::error::{Fault, ModelError};
use crate::file::{SourceFile, read_small};
use crate::source::{Parts, Span};
use crate::tensor::{TensorInfo, TensorRole};

const CONFIG: &str = "config.json";
const MAX_JSON: u64 = 4 << 20;

/// An opened directory's paths, the special ids of its configuration, and how its matrices are packed.
#[derive(Debug)]
pub(crate) struct HfDirectory {
    path: PathBuf,
    /// `eos_token_id` of `config.json`.
    eos_ids: BTreeSet<u64>,
    /// Matrices that are not in the files as they are read.
    packed: BTreeMap<TensorRole, packed::Packed>,
}

impl HfDirectory {
    pub(crate) fn open(path: &Path) -> Result<(Self, Parts), ModelError> {
        let config_path = path.join(CONFIG);
        let bytes = read_small(&config_path, MAX_JSON)?.ok_or_else(|| {
            Fault::unsupported(
                "model",
                "a directory without config.json; name a GGUF file or a checkpoint directory",
            )
            .at(path)
        })?;
        let at_config = |fault: Fault| fault.at(&config_path);
        let object = parse_object(&bytes).map_err(at_config)?;
        let reader = config::Config::new(&object).map_err(at_config)?;
        let stated = reader.stated().map_err(at_config)?;
        let eos_ids = config::token_ids(&object, "eos_token_id").map_err(at_config)?;
        let quantization = quantization::Quantization::of(&object).map_err(at_config)?;

        let safetensors::Checkpoint { files, tensors, mut hasher } = safetensors::open(path)?;
        let architecture = stated.architecture;
        let tensors::Tensors { mut tensors, packed } =
            tensors::Reader { files: &files, architecture, quantization }.read(tensors)?;
        if reader.ties_embeddings() {
            // The matrix is the embedding, whatever a copy of it in the file says.
            tensors.retain(|t| t.role != TensorRole::Output);
        }
        if stated.architecture == Architecture::Llama
            && let Some(bias) =
                tensors.iter().find(|t| matches!(t.role, TensorRole::Layer(_, l) if l.is_bias()))
        {
            let problem = "a bias, but config.json has no attention_bias";
            return Err(Fault::malformed(&bias.name, problem).at(&files[bias.file].path));
        }
        let config = check::configure(stated, &tensors).map_err(|fault| fault.at(path))?;
        if config.tied_embeddings && !reader.ties_embeddings() {
            let problem = "the tensor is missing, and tie_word_embeddings is not set";
            return Err(Fault::malformed(TensorRole::Output.hf_name(), problem).at(path));
        }
        let (key, vocab) = reader.vocab_size().map_err(at_config)?;
        if vocab != config.vocab as u64 {
            let problem = format!("{vocab}, but model.embed_tokens.weight has {} rows", config.vocab);
            return Err(Fault::malformed(key, problem).at(&config_path));
        }
        hasher.update(&bytes);
        let header = hasher.finalize();
        Ok((Self { path: path.to_owned(), eos_ids, packed }, Parts { files, config, tensors, header }))
    }

    /// Fills `dst` with the rows `[rows.start, rows.end)` of a tensor that is packed; `None` where the file has it as it is.
    pub(crate) fn read_packed(
        &self,
        tensor: &TensorInfo,
        files: &[SourceFile],
        rows: Range<usize>,
        dst: &mut [u8],
    ) -> Option<Result<(), ModelError>> {
        Some(self.packed.get(&tensor.role)?.read_rows(files, rows, dst))
    }

    /// Every stretch of the files that a tensor is read from.
    pub(crate) fn spans<'a>(&'a self, tensor: &'a TensorInfo) -> Vec<Span<'a>> {
        match self.packed.get(&tensor.role) {
            None => vec![Span::of(tensor)],
            Some(packed) => packed
                .parts()
                .map(|part| Span {
                    name: &part.name,
                    file: part.file,
                    offset: part.offset,
                    bytes: part.bytes,
                })
                .into(),
        }
    }
}

/// Parses a JSON object.
fn parse_object(bytes: &[u8]) -> Result<Map<String, Value>, Fault> {
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(Fault::malformed("JSON", "is no object")),
        Err(e) => Err(Fault::malformed("JSON", e)),
    }
}

/// A JSON file beside the configuration; empty where there is none.
fn optional_object(path: &Path) -> Result<Map<String, Value>, ModelError> {
    match read_small(path, MAX_JSON)? {
        Some(bytes) => parse_object(&bytes).map_err(|fault| fault.at(path)),
        None => Ok(Map::new()),
    }
}

#[cfg(test)]
mod tests;
