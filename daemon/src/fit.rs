//! Whether a request of an earlier daemon can go on with a model as it is now.
//!
//! **Owns** what its tokens depend on beside the request, and what it needs of the model. **Never** lets it end as if it were complete.

use std::fmt;

use pagedd_config::Model as Settings;
use pagedd_core::{Blocks, Tokens};
use pagedd_journal::checkpoint::hex;
use pagedd_journal::{Digest, SavedRequest};
use pagedd_sched::blocks_at_full_length;
use pagedd_wire::worker::ModelInfo;

/// Digest of what decides a model's tokens: its file and its arithmetic.
pub fn model_digest(config: &Settings, info: &ModelInfo) -> [u8; 16] {
    let text = format!("{} dtype {} kv_dtype {}", hex(&info.file_digest), config.dtype, config.kv_dtype);
    let Digest(sha256) = Digest::of(&text);
    let mut digest = [0; 16];
    digest.copy_from_slice(&sha256[..16]);
    digest
}

/// Whether tokens that were computed before are another model's. An older pagedd kept the digest of the file alone, or none.
pub fn is_of_another_model(before: Option<[u8; 16]>, config: &Settings, info: &ModelInfo) -> bool {
    before.is_some_and(|before| before != model_digest(config, info) && before != info.file_digest)
}

/// Why a request does not fit a model. It did when it was accepted: a setting is smaller since.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Misfit {
    /// It may become longer than a sequence.
    Length {
        /// Prompt and `max_tokens`.
        tokens: u64,
        /// What a sequence may have.
        max_model_len: u32,
    },
    /// It may need more than there is.
    Pool {
        /// Blocks at full length.
        blocks: Blocks,
        /// Of the whole pool.
        pool: u32,
    },
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length { tokens, max_model_len } => {
                write!(f, "it may have {tokens} tokens, and max_model_len is {max_model_len} now")
            }
            Self::Pool { blocks, pool } => {
                write!(f, "it may need {} blocks, and kv_memory has {pool} now", blocks.0)
            }
        }
    }
}

/// Why a request does not fit, if it does not.
pub fn misfit(saved: &SavedRequest, info: &ModelInfo) -> Option<Misfit> {
    let tokens = saved.prompt.len() as u64 + u64::from(saved.max_tokens);
    if tokens > u64::from(info.max_model_len) {
        return Some(Misfit::Length { tokens, max_model_len: info.max_model_len });
    }
    let (prompt, most) = (Tokens(saved.prompt.len() as u32), Tokens(saved.max_tokens));
    let blocks = blocks_at_full_length(prompt, most, saved.n, Tokens(info.block_size));
    (blocks > Blocks(info.blocks)).then_some(Misfit::Pool { blocks, pool: info.blocks })
}

#[cfg(test)]
mod tests;
