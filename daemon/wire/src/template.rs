//! Daemon ⇄ template process of a model.
//!
//! The template loads tokenizer and chat template once, and forks a gateway per tenant. It is single-threaded.

use serde::{Deserialize, Serialize};

/// From the daemon.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum ToTemplate {
    /// First frame: load this model's tokenizer and chat template.
    Load {
        /// [`crate::PROTOCOL`].
        protocol: u32,
        /// Path of a GGUF file or of a Hugging Face directory.
        path: String,
    },
    /// Fork a gateway. Beside the frame come: its listening TCP socket, its end of the daemon's socket pair, and, where
    /// `cgroup` is set, the directory of its cgroup.
    Fork {
        /// Chosen by the daemon.
        ticket: u64,
        /// The tenant's name, for the process title and logs.
        tenant: String,
        /// Run as this user and group; `None` keeps the template's own.
        identity: Option<(u32, u32)>,
        /// A cgroup directory fd is the third fd.
        cgroup: bool,
    },
}

/// From the template.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum FromTemplate {
    /// Tokenizer and chat template are loaded.
    Ready {
        /// Vocabulary size of the tokenizer.
        vocab_size: u32,
    },
    /// They could not be; the process exits.
    Failed {
        /// One line, naming the file and the key.
        error: String,
    },
    /// A gateway runs; its pidfd is beside the frame.
    Forked {
        /// Of the `Fork`.
        ticket: u64,
        /// Its process id, for logs and status only.
        pid: u32,
    },
    /// A gateway could not be forked; the template goes on.
    ForkFailed {
        /// Of the `Fork`.
        ticket: u64,
        /// One line.
        error: String,
    },
}
