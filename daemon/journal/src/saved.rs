//! What journal.db holds, as plain data, and how it is encoded.
//!
//! **Owns** the encoding. **Never** shares a type with the running daemon: saved types change with a version number, live
//! ones at will.
//!
//! A blob is `[version][postcard][checksum]`: the version stands in each, so that one is read without knowing when it was
//! written; the checksum is the first 8 bytes of BLAKE3 over what stands before it, since SQLite has none for a page that
//! has left its write-ahead log. Variants are only ever added at the end: their numbers are what is stored.

use crate::SavedError;
use pagedd_core::{FinishReason, Penalties, RequestId, SamplingParams, TenantId};
use serde::{Deserialize, Serialize};

mod v1;

/// What encodings are written in now.
pub(crate) const VERSION: u8 = 2;

const CHECKSUM: usize = 8;

/// A request that was taken, and whose.
#[derive(Clone, PartialEq, Debug)]
pub struct Admission {
    /// Its id.
    pub request: RequestId,
    /// Whose.
    pub tenant: TenantId,
    /// Under what the client will ask for the same request again.
    pub idempotency: Option<Idempotency>,
    /// Digest of the model's file, which its tokens are of. `None` where it is not known: an older pagedd took the request.
    pub model_digest: Option<[u8; 16]>,
    /// The whole valid request.
    pub saved: SavedRequest,
}

/// An `Idempotency-Key`, and what it was sent with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Idempotency {
    /// Digest of the key.
    pub key: [u8; 32],
    /// Digest of the request's body.
    pub body: [u8; 32],
}

/// A whole valid request: with it alone, the same tokens are computed again.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SavedRequest {
    /// The model's name.
    pub model: String,
    /// The key that made it, by number.
    pub key: Option<u32>,
    /// When it was admitted, in seconds since 1970.
    pub created_unix: u64,
    /// What happens when the client leaves.
    pub on_leave: OnLeave,
    /// Prompt tokens.
    pub prompt: Vec<u32>,
    /// How tokens are drawn; the seed is drawn already.
    pub sampling: SavedSampling,
    /// Choices.
    pub n: u32,
    /// Most output tokens per choice.
    pub max_tokens: u32,
    /// Tokens that end a choice.
    pub stop_ids: Vec<u32>,
    /// The gateway's own encoding of what it needs to render the answer again.
    pub context: Vec<u8>,
}

/// What happens when the client leaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum OnLeave {
    /// It is cancelled, once nobody has come back in time.
    Cancel,
    /// It runs on and can be attached again.
    RunOn,
    /// It was answered at once, and nobody is expected to read along.
    Background,
}

/// [`SamplingParams`] as they are saved.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct SavedSampling {
    /// `0.0` is greedy.
    pub temperature: f32,
    /// Nucleus mass in `(0, 1]`.
    pub top_p: f32,
    /// Keep only this many most likely tokens.
    pub top_k: Option<u32>,
    /// Key of the random stream.
    pub seed: u64,
    /// How many top log-probabilities to report.
    pub logprobs: Option<u8>,
    /// See [`Penalties`].
    pub presence_penalty: f32,
    /// See [`Penalties`].
    pub frequency_penalty: f32,
    /// See [`Penalties`].
    pub repetition_penalty: f32,
}

impl From<SamplingParams> for SavedSampling {
    fn from(p: SamplingParams) -> Self {
        let SamplingParams { temperature, top_p, top_k, seed, logprobs, penalties } = p;
        let Penalties { presence, frequency, repetition } = penalties;
        Self {
            temperature,
            top_p,
            top_k,
            seed,
            logprobs,
            presence_penalty: presence,
            frequency_penalty: frequency,
            repetition_penalty: repetition,
        }
    }
}

impl From<SavedSampling> for SamplingParams {
    fn from(p: SavedSampling) -> Self {
        let SavedSampling { temperature, top_p, top_k, seed, logprobs, .. } = p;
        let penalties = Penalties {
            presence: p.presence_penalty,
            frequency: p.frequency_penalty,
            repetition: p.repetition_penalty,
        };
        Self { temperature, top_p, top_k, seed, logprobs, penalties }
    }
}

/// An entry of a request's log. One with log-probabilities will be a further variant.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Entry {
    /// A token.
    Token {
        /// Of which choice.
        choice: u32,
        /// Which.
        token: u32,
    },
    /// A choice ended.
    Finish {
        /// Which.
        choice: u32,
        /// Why.
        reason: Finish,
    },
    /// Every choice ended. The last entry.
    End {
        /// Prompt tokens that were found in the prefix cache.
        cached_tokens: u32,
    },
}

/// Why a choice ended; see [`FinishReason`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Finish {
    /// A stop token, or a stop string.
    Stop,
    /// `max_tokens`, or the context's end.
    Length,
    /// Cancelled.
    Cancelled,
    /// The row could not be computed.
    Failed,
    /// The model's file or arithmetic was changed while the request was interrupted.
    ModelChanged,
    /// The model is not served any more.
    ModelGone,
}

impl From<FinishReason> for Finish {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Stop => Self::Stop,
            FinishReason::Length => Self::Length,
            FinishReason::Cancelled => Self::Cancelled,
            FinishReason::Failed => Self::Failed,
            FinishReason::ModelChanged => Self::ModelChanged,
            FinishReason::ModelGone => Self::ModelGone,
        }
    }
}

impl From<Finish> for FinishReason {
    fn from(reason: Finish) -> Self {
        match reason {
            Finish::Stop => Self::Stop,
            Finish::Length => Self::Length,
            Finish::Cancelled => Self::Cancelled,
            Finish::Failed => Self::Failed,
            Finish::ModelChanged => Self::ModelChanged,
            Finish::ModelGone => Self::ModelGone,
        }
    }
}

/// An entry in a record of steps: `behind` is its request's row, counted from the one before it (the first from 0), because
/// neighbours are near each other and a small number takes one byte.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct StepEntry {
    pub behind: i64,
    pub entry: Entry,
}

/// Encodes a value.
pub(crate) fn seal<T: Serialize + ?Sized>(value: &T) -> Result<Vec<u8>, postcard::Error> {
    let mut bytes = postcard::to_extend(value, vec![VERSION])?;
    let checksum = blake3::hash(&bytes);
    bytes.extend_from_slice(&checksum.as_bytes()[..CHECKSUM]);
    Ok(bytes)
}

/// What was sealed, in whichever version.
pub(crate) trait Saved: Sized {
    /// Decodes what an encoding of this version, from 1 to [`VERSION`], holds.
    fn decode(version: u8, payload: &[u8]) -> Result<Self, postcard::Error>;
}

impl Saved for SavedRequest {
    fn decode(version: u8, payload: &[u8]) -> Result<Self, postcard::Error> {
        match version {
            1 => postcard::from_bytes::<v1::SavedRequest>(payload).map(Self::from),
            _ => postcard::from_bytes(payload),
        }
    }
}

/// The same in all versions.
impl Saved for Vec<Entry> {
    fn decode(_: u8, payload: &[u8]) -> Result<Self, postcard::Error> {
        postcard::from_bytes(payload)
    }
}

/// The same in all versions.
impl Saved for Vec<StepEntry> {
    fn decode(_: u8, payload: &[u8]) -> Result<Self, postcard::Error> {
        postcard::from_bytes(payload)
    }
}

/// Decodes what [`seal`] made, now or in an earlier version.
pub(crate) fn unseal<T: Saved>(bytes: &[u8]) -> Result<T, SavedError> {
    let Some((sealed, checksum)) = bytes.split_last_chunk::<CHECKSUM>() else {
        return Err(SavedError::Checksum);
    };
    if blake3::hash(sealed).as_bytes()[..CHECKSUM] != checksum[..] {
        return Err(SavedError::Checksum);
    }
    let (&version, payload) = sealed.split_first().ok_or(SavedError::Checksum)?;
    if !(1..=VERSION).contains(&version) {
        return Err(SavedError::Version { found: version, known: VERSION });
    }
    T::decode(version, payload).map_err(SavedError::Decode)
}

#[cfg(test)]
mod tests;
