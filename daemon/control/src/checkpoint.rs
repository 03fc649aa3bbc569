//! Checkpoints: what can be asked about them, and what is answered.

use serde::{Deserialize, Serialize};

/// What is to be done about checkpoints.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "action", rename_all = "snake_case")]
pub enum CheckpointCommand {
    /// Writes one while everything goes on. Answered by [`crate::Reply::CheckpointSaved`].
    Save(CheckpointSave),
    /// Every checkpoint of the state directory. Answered by [`crate::Reply::Checkpoints`].
    List,
    /// What is in one. Answered by [`crate::Reply::Checkpoint`].
    Inspect(CheckpointAt),
    /// Reads all of one. Answered by [`crate::Reply::CheckpointWhole`], or by [`crate::ErrorCode::CheckpointDamaged`].
    Verify(CheckpointAt),
    /// Puts one in the place of the present state, and starts anew. Answered by [`crate::Reply::CheckpointRestoring`].
    Restore(CheckpointAt),
}

impl CheckpointCommand {
    /// Whether carrying it out changes anything durable.
    #[must_use]
    pub const fn changes(&self) -> bool {
        match self {
            Self::Save(_) | Self::Restore(_) => true,
            Self::List | Self::Inspect(_) | Self::Verify(_) => false,
        }
    }
}

/// A checkpoint to be written.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CheckpointSave {
    /// Its name: 1 to 100 of `A-Z`, `a-z`, `0-9`, `.`, `_` and `-`, beginning with a letter or a digit.
    pub name: String,
    /// Whether the bytes of committed KV blocks are saved, too.
    pub kv: bool,
}

/// Names a checkpoint.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CheckpointAt {
    /// A name in the state directory, or an absolute path.
    pub which: String,
}

/// A checkpoint.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CheckpointInfo {
    /// The name of its directory.
    pub name: String,
    /// Its directory.
    pub path: String,
    /// When it was written, in seconds since 1970.
    pub created_unix: i64,
    /// Version of the pagedd that wrote it.
    pub pagedd: String,
    /// Bytes of all its files.
    pub bytes: u64,
    /// Every model that was served.
    pub models: Vec<CheckpointModel>,
}

impl CheckpointInfo {
    /// Whether bytes of KV blocks were saved.
    #[must_use]
    pub fn has_kv(&self) -> bool {
        self.models.iter().any(|model| model.kv)
    }

    /// Committed blocks of all models.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.models.iter().map(|model| u64::from(model.blocks)).sum()
    }
}

/// A model of a checkpoint.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CheckpointModel {
    /// Its name.
    pub name: String,
    /// Architecture that its file names.
    pub architecture: String,
    /// Arithmetic of the weights' products.
    pub dtype: String,
    /// Element type of the KV blocks.
    pub kv_dtype: String,
    /// Instruction set of the kernels.
    pub kernels: String,
    /// Digest of weights, types and layout.
    pub digest: String,
    /// Tokens per block.
    pub block_size: u32,
    /// Bytes per block.
    pub block_bytes: u64,
    /// Committed blocks.
    pub blocks: u32,
    /// Whether the blocks' bytes were saved.
    pub kv: bool,
}

/// Every checkpoint of the state directory.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CheckpointListed {
    /// By name.
    pub checkpoints: Vec<CheckpointListing>,
}

/// A checkpoint in a list.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CheckpointListing {
    /// The name of its directory.
    pub name: String,
    /// Whether it can be used, as far as that is seen without reading all of it.
    pub state: CheckpointState,
}

/// Whether a checkpoint can be used.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum CheckpointState {
    /// Every file is there and has its size.
    Complete(CheckpointInfo),
    /// It cannot.
    Damaged {
        /// Why.
        error: String,
    },
}

/// What is in a checkpoint.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CheckpointShown {
    /// The checkpoint.
    pub checkpoint: CheckpointInfo,
    /// Its files.
    pub files: Vec<CheckpointFile>,
    /// Its tenants, by name.
    pub tenants: Vec<CheckpointTenant>,
    /// Requests that cannot be read any more.
    pub damaged_requests: u32,
}

/// A file of a checkpoint.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CheckpointFile {
    /// Its name.
    pub name: String,
    /// Its size.
    pub bytes: u64,
}

/// A tenant of a checkpoint.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CheckpointTenant {
    /// Its number.
    pub id: u32,
    /// Its name.
    pub name: String,
    /// The model it uses.
    pub model: String,
    /// Keys that open its port.
    pub keys: u32,
    /// Requests that go on.
    pub live: u32,
    /// Prompt tokens of those.
    pub prompt_tokens: u64,
    /// Tokens that those had emitted.
    pub output_tokens: u64,
    /// Requests that had ended and were kept.
    pub ended: u32,
}

/// The daemon ends, and the next one starts from a checkpoint.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct CheckpointRestoring {
    /// The checkpoint.
    pub checkpoint: CheckpointInfo,
    /// The present databases will be in this directory's `before-<time>`.
    pub state_dir: String,
}
