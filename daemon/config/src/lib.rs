//! `pagedd.yaml`, and the texts that it shares with `pagedctl`: names, sizes, durations and amounts.
//!
//! **Owns** every setting's key, default and range. **Never** opens a model file, makes a directory or reads the environment:
//! it reads one configuration file and asks whether a model's path, or a program of the installation, is there.
//!
//! `RawConfig` is what was written, every key optional; [`Config`] is what holds, checked once. An error names
//! `FILE:LINE:COLUMN`, the key's path and, for a key or word that is unknown, the nearest valid one.

mod amount;
mod config;
mod error;
mod installed;
mod leaf;
mod limits;
mod locate;
mod name;
mod raw;
mod size;
mod span;

pub use amount::{Amount, AmountError, Percent};
pub use config::{
    Config, FOUR_BITS, Gateway, KvMemory, Log, MAX_RETENTION, Model, Overrides, SHAPES, SYNTHETIC, UidRange,
};
pub use error::ConfigError;
pub use installed::{program_folder, program_folders};
pub use leaf::{Cgroups, ComputeDtype, Device, Fsync, KvDtype, LogFormat, LogLevel, Policy};
pub use limits::{LimitError, SavedLimitsError, limit_text, load_limits, save_limits, set_limit};
pub use name::{ModelName, NameError, TenantName};
/// What [`set_limit`] changes.
pub use pagedd_core::CgroupLimits;
pub use size::{Size, SizeError};
pub use span::{Span, SpanError};

/// The configuration file that is read where none is named.
pub const DEFAULT_FILE: &str = "/etc/pagedd/pagedd.yaml";

/// The state directory where none is configured.
pub const DEFAULT_STATE_DIR: &str = "/var/lib/pagedd";

/// First port that a tenant without a wish of its own gets.
pub const FIRST_TENANT_PORT: u16 = 8101;

/// The nearest of `known` to a misspelt `word`, where one is near.
#[must_use]
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if word.len() > 64 {
        return None;
    }
    let word = word.to_lowercase();
    known
        .into_iter()
        .map(|candidate| (strsim::osa_distance(&word, &candidate.to_lowercase()), candidate))
        // A third of the letters may be wrong; what is further off is another word.
        .filter(|(distance, candidate)| {
            *distance <= 1 + candidate.chars().count().min(word.chars().count()) / 3
        })
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// Text from outside as it may stand in a one-line message: cut, and without control characters.
pub(crate) fn shown(text: &str) -> String {
    let mut out: String =
        text.chars().take(40).map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
    if text.chars().nth(40).is_some() {
        out.push('…');
    }
    out
}

#[cfg(test)]
mod tests;
