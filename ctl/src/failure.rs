//! What went wrong, and the exit code that says so.

use pagedd_config::{ConfigError, NameError};
use pagedd_control::{ClientError, Reply};
use std::fmt::Write;
use std::io;
use std::path::PathBuf;

/// It was done.
pub const OK: u8 = 0;
/// The daemon refused, or the configuration has an error.
pub const REFUSED: u8 = 1;
/// What was typed cannot be meant.
pub const USAGE: u8 = 2;
/// The daemon is not reachable.
pub const UNREACHABLE: u8 = 3;
/// Something that should not happen.
pub const INTERNAL: u8 = 4;
/// It goes on, and was not waited for to its end.
pub const UNFINISHED: u8 = 5;

/// The exit codes, for `--help`.
pub const HELP: &str = "\
Exit codes:
  0  done
  1  refused by the daemon, or the configuration has an error, or a model of it does not fit
  2  the command line is wrong
  3  the daemon is not reachable
  4  internal error
  5  a drain has something left

Environment:
  PAGEDD_SOCKET  path of the admin socket, where --socket is not given";

/// Why a command was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// What was typed cannot be meant.
    #[error("{message}")]
    Usage {
        /// One line.
        message: String,
        /// What to type instead.
        hint: Option<String>,
    },
    /// The daemon refused or was not reached.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// A configuration has an error.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Models do not fit where they are to run, or cannot be read.
    #[error("not every model can be served: {problems}")]
    NoRoom {
        /// One line that names each.
        problems: String,
        /// Whether memory is what lacks for one of them.
        memory: bool,
        /// What is printed of all of them.
        text: String,
    },
    /// The program that knows what a model takes does not run.
    #[error("cannot run {}: {source}", program.display())]
    Worker {
        /// Its path.
        program: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The daemon answered something else.
    #[error("pagedd answered `{command}` by something else: {reply}")]
    WrongReply {
        /// What was asked.
        command: &'static str,
        /// The answer's kind.
        reply: String,
    },
    /// A drain is not at its end.
    #[error(
        "not drained in time: {requests} requests and {streams} streams are left; the daemon goes on with them and takes no others"
    )]
    Unfinished {
        /// Requests that have not ended.
        requests: u32,
        /// Those that are read.
        streams: u32,
        /// What is printed of it.
        reply: String,
    },
    /// Somebody had the daemon take requests again.
    #[error("the daemon takes requests again: the drain was taken back")]
    TakenBack,
    /// A reply could not be printed.
    #[error("the reply cannot be printed as JSON: {0}")]
    Json(#[from] serde_json::Error),
}

impl Failure {
    /// A wrong command line.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::Usage { message: message.into(), hint: None }
    }

    /// An answer to another question.
    pub fn wrong_reply(command: &'static str, reply: &Reply) -> Self {
        let kind =
            serde_json::to_value(reply).ok().and_then(|value| value["reply"].as_str().map(str::to_owned));
        Self::WrongReply { command, reply: kind.unwrap_or_default() }
    }

    /// The exit code.
    pub fn code(&self) -> u8 {
        match self {
            Self::Usage { .. } => USAGE,
            Self::Client(ClientError::Refused(_)) | Self::Config(_) | Self::NoRoom { .. } => REFUSED,
            Self::Client(
                ClientError::NotRunning { .. }
                | ClientError::PermissionDenied { .. }
                | ClientError::PathTooLong { .. }
                | ClientError::TimedOut { .. }
                | ClientError::Closed { .. }
                | ClientError::Garbled { .. }
                | ClientError::Io { .. },
            ) => UNREACHABLE,
            Self::Unfinished { .. } | Self::TakenBack => UNFINISHED,
            Self::WrongReply { .. } | Self::Worker { .. } | Self::Json(_) => INTERNAL,
        }
    }

    /// What is printed on standard output all the same.
    pub fn reply(&self) -> &str {
        match self {
            Self::Unfinished { reply: text, .. } | Self::NoRoom { text, .. } => text,
            Self::Usage { .. }
            | Self::Client(_)
            | Self::Config(_)
            | Self::Worker { .. }
            | Self::WrongReply { .. }
            | Self::TakenBack
            | Self::Json(_) => "",
        }
    }

    /// `error: …` and, where something can be done, `hint: …`.
    pub fn text(&self) -> String {
        let hint = match self {
            Self::Usage { hint, .. } => hint.clone(),
            Self::Client(error) => error.remedy(),
            Self::WrongReply { .. } => {
                Some("use the pagedctl that was installed with this pagedd".to_owned())
            }
            Self::Unfinished { .. } => {
                Some("`pagedctl drain` waits on, `pagedctl undrain` takes requests again".to_owned())
            }
            Self::Worker { .. } => {
                Some("pagedd-worker is installed with pagedctl: beside it, or in ../lib/pagedd".to_owned())
            }
            Self::NoRoom { memory: true, .. } => {
                Some("lower kv_memory, take a smaller model, or give it another device".to_owned())
            }
            Self::NoRoom { memory: false, .. } | Self::Config(_) | Self::Json(_) | Self::TakenBack => None,
        };
        let mut text = format!("error: {self}\n");
        if let Some(hint) = hint {
            // Writing to a String does not fail.
            let _ = writeln!(text, "hint: {hint}");
        }
        text
    }
}

impl From<NameError> for Failure {
    fn from(error: NameError) -> Self {
        Self::usage(error.to_string())
    }
}
