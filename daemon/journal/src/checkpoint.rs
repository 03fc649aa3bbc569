//! Checkpoints: what a daemon would leave behind, written down while it runs.
//!
//! **Owns** the form of a checkpoint, and how it becomes the state of the next daemon. **Never** knows what a KV block holds, and never
//! copies a database beside SQLite: databases write themselves.
//!
//! ```text
//! <state>/checkpoints/<name>/       written as `.saving`, synced, renamed last
//!   manifest.json                   what it is of, and of every other file its size and SHA-256
//!   control.db  journal.db          by `VACUUM INTO`
//!   ledger-<model>  kv-<model>      committed blocks, and their bytes where those were saved
//! <state>/.restoring/               a checkpoint's databases that are to be put in place: all of them, or the directory is not there
//! ```

mod draft;
mod manifest;
mod place;
mod read;

use crate::DbError;
use std::io;
use std::path::{Path, PathBuf};

pub use draft::Draft;
pub use manifest::{Difference, FORMAT, Manifest, ModelIdentity, SavedFile, SavedModel, hex};
pub use place::finish_restore;
pub use read::{Checkpoint, Contents, Problem, SavedPort, SavedTenant, list};

/// Folder of the checkpoints in the state directory.
pub const CHECKPOINTS: &str = "checkpoints";

const MANIFEST: &str = "manifest.json";
const CONTROL: &str = "control.db";
const JOURNAL: &str = "journal.db";

/// Longest name of a checkpoint.
const MAX_NAME: usize = 100;

/// Why a checkpoint cannot be written or used. The state directory's databases are as they were.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The name could leave its folder, or hide in it.
    #[error(
        "`{}` is no name of a checkpoint: 1 to {MAX_NAME} of A-Z, a-z, 0-9, `.`, `_` and `-`, beginning with a letter or a digit",
        shown(name)
    )]
    Name {
        /// As given.
        name: String,
    },
    /// Another checkpoint has the name.
    #[error("there is a checkpoint `{name}` already")]
    Exists {
        /// The name.
        name: String,
    },
    /// There is none.
    #[error("there is no checkpoint at {}", path.display())]
    Missing {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// The directory is of something else.
    #[error("{} is no checkpoint of pagedd's: {problem}", path.display())]
    Foreign {
        /// The directory.
        path: PathBuf,
        /// What shows it.
        problem: String,
    },
    /// A newer pagedd wrote it.
    #[error("checkpoint {}: format {known} here, {found} there; use the pagedd that wrote it", path.display())]
    Version {
        /// The directory.
        path: PathBuf,
        /// What it has.
        found: u64,
        /// What this version knows.
        known: u32,
    },
    /// A file is not what was written.
    #[error("checkpoint {}: {problem}", path.display())]
    Damaged {
        /// The directory.
        path: PathBuf,
        /// Which file, and what is wrong with it.
        problem: Problem,
    },
    /// The file system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A database refused.
    #[error(transparent)]
    Db(#[from] DbError),
}

impl CheckpointError {
    fn io(path: &Path) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_path_buf();
        move |source| Self::Io { path, source }
    }
}

/// The checkpoint of this name in a state directory, whether it is there or not.
///
/// # Errors
/// [`CheckpointError::Name`].
pub fn named(state_dir: &Path, name: &str) -> Result<PathBuf, CheckpointError> {
    if is_plain(name) && name.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        Ok(state_dir.join(CHECKPOINTS).join(name))
    } else {
        Err(CheckpointError::Name { name: name.to_owned() })
    }
}

/// Whether a name has only letters that mean nothing to a path.
fn is_plain(name: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    (1..=MAX_NAME).contains(&name.len()) && name.chars().all(allowed) && !name.starts_with('.')
}

/// The beginning of a text, without what could drive a terminal.
fn shown(text: &str) -> String {
    text.chars().take(40).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}
