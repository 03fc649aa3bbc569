//! Why the daemon did not do what was asked.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! codes {
    ($($(#[$doc:meta])* $variant:ident = $text:literal,)*) => {
        /// The kind of a refusal. Texts are for people and may change; codes are for programs and stay.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
        pub enum ErrorCode { $($(#[$doc])* #[serde(rename = $text)] $variant,)* }

        impl ErrorCode {
            /// Every code.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The code on the wire.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }
    };
}

codes! {
    /// No tenant has this name.
    UnknownTenant = "unknown_tenant",
    /// Another tenant has this name.
    DuplicateName = "duplicate_name",
    /// The name is not 1 to 63 characters of `a-z`, `0-9` and `-`, beginning with a letter.
    InvalidName = "invalid_name",
    /// A tenant or another program has this port.
    PortInUse = "port_in_use",
    /// The port cannot be bound: it is 0, privileged, or none is free.
    InvalidPort = "invalid_port",
    /// The floors of all tenants of the model would exceed its pool.
    FloorsExceedPool = "floors_exceed_pool",
    /// A floor is above its ceiling.
    FloorAboveCeiling = "floor_above_ceiling",
    /// No model of this name is configured, or none was named and there is not exactly one.
    UnknownModel = "unknown_model",
    /// An amount does not read as one.
    InvalidAmount = "invalid_amount",
    /// A retention does not read as a duration, or is too long.
    InvalidRetention = "invalid_retention",
    /// A quota is 0, or larger than can be kept.
    InvalidQuota = "invalid_quota",
    /// A limit does not read as one, or the host has no such CPU or device.
    InvalidLimit = "invalid_limit",
    /// A limit is below what is in use.
    BelowUse = "below_use",
    /// A label is too long or has control characters.
    InvalidLabel = "invalid_label",
    /// The tenant has no key of this id.
    UnknownKey = "unknown_key",
    /// There is no checkpoint of this name or at this path.
    UnknownCheckpoint = "unknown_checkpoint",
    /// What is there is no checkpoint, or not what was written, or a newer pagedd's.
    CheckpointDamaged = "checkpoint_damaged",
    /// The checkpoint is of other models than are served here.
    CheckpointMismatch = "checkpoint_mismatch",
    /// The tenant is suspended.
    Suspended = "suspended",
    /// The tenant has running requests, or the daemon is starting or stopping.
    Busy = "busy",
    /// The configuration file cannot be read, or has an error.
    InvalidConfig = "invalid_config",
    /// It cannot be done with what a model runs on.
    Unsupported = "unsupported",
    /// The state directory's file system is full.
    DiskFull = "disk_full",
    /// The peer is not allowed to do this.
    NotAllowed = "not_allowed",
    /// The line is no request.
    InvalidRequest = "invalid_request",
    /// The client speaks another version of the protocol.
    UnsupportedProtocol = "unsupported_protocol",
    /// The daemon failed; its log says more.
    Internal = "internal",
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A refusal. Nothing has changed.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct ControlError {
    /// The kind of it.
    pub code: ErrorCode,
    /// One line that names what was refused.
    pub message: String,
    /// What to do about it, where something can be done.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub remedy: Option<String>,
}

impl ControlError {
    /// A refusal without a remedy. Line breaks in `message` become spaces.
    #[must_use]
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: one_line(message.into()), remedy: None }
    }

    /// The same refusal with what to do about it.
    #[must_use]
    pub fn remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(one_line(remedy.into()));
        self
    }
}

/// Control characters become spaces, so that a name from outside cannot forge a line on a terminal or in a log.
fn one_line(text: String) -> String {
    if text.chars().any(char::is_control) {
        text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
    } else {
        text
    }
}
