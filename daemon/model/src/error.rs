//! Why a model cannot be read.

use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};

/// Why a model cannot be read. Nothing was loaded.
#[derive(thiserror::Error, Debug)]
pub enum ModelError {
    /// The file cannot be opened or read.
    #[error("{}: {source}", path.display())]
    Io {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file contradicts itself, or ends too early.
    #[error("{}: {item}: {problem}; the file is damaged: fetch it again", path.display())]
    Malformed {
        /// Which file.
        path: PathBuf,
        /// The tensor, key or part.
        item: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The file may be sound, but describes a model that is not served.
    #[error("{}: {item}: {problem}", path.display())]
    Unsupported {
        /// Which file.
        path: PathBuf,
        /// The tensor, key or part.
        item: String,
        /// What is wanted of it, and what is served instead.
        problem: String,
    },
}

/// A [`ModelError`] before the file's name is known.
#[derive(Debug)]
pub(crate) enum Fault {
    Io(io::Error),
    Malformed { item: String, problem: String },
    Unsupported { item: String, problem: String },
}

impl Fault {
    pub(crate) fn malformed(item: impl Display, problem: impl Display) -> Self {
        Self::Malformed { item: one_line(&item), problem: one_line(&problem) }
    }

    pub(crate) fn unsupported(item: impl Display, problem: impl Display) -> Self {
        Self::Unsupported { item: one_line(&item), problem: one_line(&problem) }
    }

    pub(crate) fn at(self, path: &Path) -> ModelError {
        let path = path.to_owned();
        match self {
            Self::Io(source) => ModelError::Io { path, source },
            Self::Malformed { item, problem } => ModelError::Malformed { path, item, problem },
            Self::Unsupported { item, problem } => ModelError::Unsupported { path, item, problem },
        }
    }
}

impl From<io::Error> for Fault {
    fn from(source: io::Error) -> Self {
        Self::Io(source)
    }
}

/// Names come from the file: control characters are escaped and length is bounded, so that a message stays one line.
fn one_line(text: &impl Display) -> String {
    const LIMIT: usize = 300;
    let mut out = String::new();
    for c in text.to_string().chars() {
        if out.len() > LIMIT {
            out.push('…');
            break;
        }
        if c.is_control() { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}
