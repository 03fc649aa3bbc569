//! Frames between the daemon and its processes: what is said, and how it is cut into bytes.
//!
//! **Owns** the message types and the framing. **Never** decides anything: every message is plain data, checked by the side
//! that acts on it. These types are not the live types of scheduler or gateway: each side converts at its edge.
//!
//! - [`worker`]: daemon ⇄ `pagedd-worker`, over a blocking [`Channel`] that also carries arena fds.
//! - [`gateway`]: daemon ⇄ `pagedd-gateway`, over a non-blocking stream ([`FrameBuffer`], [`encode`]).
//! - [`template`]: daemon ⇄ a model's template process, over a blocking [`Channel`] that also carries sockets.

mod channel;
mod few;
mod frame;
pub mod gateway;
pub mod plan;
pub mod template;
pub mod worker;

pub use channel::{Channel, ChannelError};
pub use frame::{FrameBuffer, FrameError, MAX_FRAME, encode};

/// Version of every protocol in this crate. The two sides are installed together; a mismatch is refused at `Hello`.
pub const PROTOCOL: u32 = 11;

/// Sampling parameters as they travel; see [`pagedd_core::SamplingParams`].
#[derive(Clone, Copy, PartialEq, Debug, serde::Serialize, serde::Deserialize)]
pub struct Sampling {
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
    /// See [`pagedd_core::Penalties`].
    pub presence_penalty: f32,
    /// See [`pagedd_core::Penalties`].
    pub frequency_penalty: f32,
    /// See [`pagedd_core::Penalties`].
    pub repetition_penalty: f32,
}

impl From<pagedd_core::SamplingParams> for Sampling {
    fn from(p: pagedd_core::SamplingParams) -> Self {
        let pagedd_core::SamplingParams { temperature, top_p, top_k, seed, logprobs, penalties } = p;
        let pagedd_core::Penalties { presence, frequency, repetition } = penalties;
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

impl From<Sampling> for pagedd_core::SamplingParams {
    fn from(p: Sampling) -> Self {
        let Sampling { temperature, top_p, top_k, seed, logprobs, .. } = p;
        let penalties = pagedd_core::Penalties {
            presence: p.presence_penalty,
            frequency: p.frequency_penalty,
            repetition: p.repetition_penalty,
        };
        Self { temperature, top_p, top_k, seed, logprobs, penalties }
    }
}
