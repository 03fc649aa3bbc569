//! Requests as version 1 wrote them: without penalties.

use pagedd_core::Penalties;
use serde::Deserialize;

use super::{OnLeave, SavedSampling};

#[derive(Deserialize)]
pub(super) struct SavedRequest {
    model: String,
    key: Option<u32>,
    created_unix: u64,
    on_leave: OnLeave,
    prompt: Vec<u32>,
    sampling: Sampling,
    n: u32,
    max_tokens: u32,
    stop_ids: Vec<u32>,
    context: Vec<u8>,
}

#[derive(Deserialize)]
struct Sampling {
    temperature: f32,
    top_p: f32,
    top_k: Option<u32>,
    seed: u64,
    logprobs: Option<u8>,
}

impl From<SavedRequest> for super::SavedRequest {
    fn from(old: SavedRequest) -> Self {
        let SavedRequest { model, key, created_unix, on_leave, prompt, sampling, .. } = old;
        let SavedRequest { n, max_tokens, stop_ids, context, .. } = old;
        let sampling = sampling.into();
        Self { model, key, created_unix, on_leave, prompt, sampling, n, max_tokens, stop_ids, context }
    }
}

impl From<Sampling> for SavedSampling {
    fn from(old: Sampling) -> Self {
        let Sampling { temperature, top_p, top_k, seed, logprobs } = old;
        let Penalties { presence, frequency, repetition } = Penalties::NONE;
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
