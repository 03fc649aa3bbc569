//! Why a configuration does not hold.

use crate::DEFAULT_FILE;
use std::io;
use std::path::{Path, PathBuf};

/// Why a configuration does not hold. Every one prints as one line.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{}: cannot read the configuration: {source}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is too large to be a configuration.
    #[error("{}: a configuration of more than {limit} bytes is refused", file.display())]
    TooLarge {
        /// The file.
        file: PathBuf,
        /// How many bytes are read at most.
        limit: u64,
    },
    /// Something in the file is wrong.
    #[error("{}:{line}:{column}: {message}", file.display())]
    At {
        /// The file.
        file: PathBuf,
        /// Line, from 1.
        line: usize,
        /// Column in characters, from 1.
        column: usize,
        /// The key's path and what is wrong with it.
        message: String,
    },
    /// Settings from the command line do not hold.
    #[error("{message}")]
    Override {
        /// What is wrong.
        message: String,
    },
    /// Something needs a model, and none is configured.
    #[error("{}", no_model(file.as_deref()))]
    NoModel {
        /// The file; `None` where the defaults are in use.
        file: Option<PathBuf>,
    },
}

fn no_model(file: Option<&Path>) -> String {
    match file {
        Some(file) => format!(
            "{}: no model is configured; add one: `models: {{ smollm2: {{ path: /path/to/model.gguf }} }}`",
            file.display()
        ),
        None => {
            format!("there is no configuration: write {DEFAULT_FILE}, or name a file with --config")
        }
    }
}
