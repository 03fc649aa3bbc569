//! manifest.json: what a checkpoint is of.

use super::{CheckpointError, MANIFEST, Problem};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::fmt::Write;
use std::path::Path;

/// Version of the form that is written now.
pub const FORMAT: u32 = 1;

/// What a checkpoint is of.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`FORMAT`], as of the pagedd that wrote it.
    pub format: u32,
    /// Version of that pagedd.
    pub pagedd: String,
    /// When it was written, in seconds since 1970.
    pub created_unix: u64,
    /// Every model that was served.
    pub models: Vec<SavedModel>,
    /// Every other file of the checkpoint.
    pub files: Vec<SavedFile>,
}

/// A model of a checkpoint.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedModel {
    /// Which.
    pub identity: ModelIdentity,
    /// Committed blocks, each with a record in its ledger.
    pub blocks: u32,
    /// Whether the blocks' bytes were saved, too.
    pub kv: bool,
}

/// What must be equal for requests and KV blocks to mean the same.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelIdentity {
    /// Its name in the configuration.
    pub name: String,
    /// `llama`, for example.
    pub architecture: String,
    /// Number of weights.
    pub parameters: u64,
    /// Arithmetic of the weights' products.
    pub dtype: String,
    /// Elements of KV blocks.
    pub kv_dtype: String,
    /// Tokens in a block.
    pub block_size: u32,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Version of how blocks lie in their arena.
    pub kv_layout: u32,
    /// Instruction set of the kernels, whose last bits differ.
    pub kernels: String,
    /// Digest of all of it and of the weights, in hexadecimal digits.
    pub digest: String,
}

/// A file of a checkpoint.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedFile {
    /// Its name in the checkpoint's directory.
    pub name: String,
    /// Its size.
    pub bytes: u64,
    /// Its SHA-256, in hexadecimal digits, as `sha256sum` prints it.
    pub sha256: String,
}

/// Why a checkpoint is not of the models that are served here.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Difference {
    /// It has a model that this configuration has not.
    #[error("model {model} is not configured here")]
    Model {
        /// Its name.
        model: String,
    },
    /// A model is another one.
    #[error("model {model}: {what} {here} here, {there} there")]
    Field {
        /// Its name.
        model: String,
        /// What differs.
        what: &'static str,
        /// As it is served.
        here: String,
        /// As it was saved.
        there: String,
    },
}

/// The file as it lies there.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Sealed {
    manifest: Manifest,
    sha256: String,
}

impl SavedModel {
    /// Name of the file with its blocks' records.
    #[must_use]
    pub fn ledger_file(&self) -> String {
        format!("ledger-{}", self.identity.name)
    }

    /// Name of the file with its blocks' bytes, block after block.
    #[must_use]
    pub fn kv_file(&self) -> String {
        format!("kv-{}", self.identity.name)
    }
}

impl Manifest {
    /// Compares the models of the checkpoint with those that are served.
    ///
    /// # Errors
    /// The first difference.
    pub fn compare(&self, here: &[ModelIdentity]) -> Result<(), Difference> {
        for there in self.models.iter().map(|model| &model.identity) {
            match here.iter().find(|here| here.name == there.name) {
                Some(here) => there.compare(here)?,
                None => return Err(Difference::Model { model: there.name.clone() }),
            }
        }
        Ok(())
    }

    /// The file's text.
    pub(super) fn encode(&self) -> serde_json::Result<Vec<u8>> {
        let sealed = Sealed { manifest: self.clone(), sha256: digest(self)? };
        let mut text = serde_json::to_vec_pretty(&sealed)?;
        text.push(b'\n');
        Ok(text)
    }

    /// Reads the file's text. `dir` is for errors.
    pub(super) fn decode(dir: &Path, text: &[u8]) -> Result<Self, CheckpointError> {
        let damaged = |what: String| CheckpointError::Damaged {
            path: dir.to_path_buf(),
            problem: Problem { file: MANIFEST.to_owned(), what },
        };
        let value: serde_json::Value =
            serde_json::from_slice(text).map_err(|error| damaged(error.to_string()))?;
        // The version first: what a newer one means by the rest is not known.
        match value["manifest"]["format"].as_u64() {
            None => {
                let problem = format!("its {MANIFEST} names no format");
                return Err(CheckpointError::Foreign { path: dir.to_path_buf(), problem });
            }
            Some(found) if found != u64::from(FORMAT) => {
                return Err(CheckpointError::Version { path: dir.to_path_buf(), found, known: FORMAT });
            }
            Some(_) => {}
        }
        let sealed: Sealed = serde_json::from_value(value).map_err(|error| damaged(error.to_string()))?;
        let sum = digest(&sealed.manifest).map_err(|error| damaged(error.to_string()))?;
        if sum == sealed.sha256 {
            Ok(sealed.manifest)
        } else {
            Err(damaged("its SHA-256 is wrong".to_owned()))
        }
    }
}

impl ModelIdentity {
    fn compare(&self, here: &Self) -> Result<(), Difference> {
        let text = |value: &dyn ToString| value.to_string();
        let fields = [
            ("architecture", text(&here.architecture), text(&self.architecture)),
            ("parameters", text(&here.parameters), text(&self.parameters)),
            ("dtype", text(&here.dtype), text(&self.dtype)),
            ("kv_dtype", text(&here.kv_dtype), text(&self.kv_dtype)),
            ("block_size", text(&here.block_size), text(&self.block_size)),
            ("block_bytes", text(&here.block_bytes), text(&self.block_bytes)),
            ("kv_layout", text(&here.kv_layout), text(&self.kv_layout)),
            ("kernels", text(&here.kernels), text(&self.kernels)),
            ("digest", text(&here.digest), text(&self.digest)),
        ];
        let other = fields.into_iter().find(|(_, here, there)| here != there);
        other.map_or(Ok(()), |(what, here, there)| {
            Err(Difference::Field { model: self.name.clone(), what, here, there })
        })
    }
}

/// SHA-256 of a manifest without its layout.
fn digest(manifest: &Manifest) -> serde_json::Result<String> {
    Ok(hex(&Sha256::digest(serde_json::to_vec(manifest)?)))
}

/// Bytes as hexadecimal digits.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        // Writing to a String does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}
