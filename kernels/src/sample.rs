//! Drawing tokens from logits.
//!
//! **Owns** the random stream and the order in which candidates are taken. **Never** keeps state: a draw is a function of its arguments.

use std::cmp::Ordering;

use pagedd_core::{SamplingParams, TokenId};

use crate::cpu::exp::exp;

/// Counter word of draws of tokens; other purposes would get other words.
const PURPOSE_TOKEN: u32 = 0;

/// A row of logits that no token can be drawn from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SampleError {
    /// No logits at all.
    #[error("no logits")]
    Empty,
    /// A logit is NaN or infinite: something upstream overflowed.
    #[error("logit of token {token} is not finite")]
    NotFinite {
        /// The first such token.
        token: u32,
    },
    /// A token outside the vocabulary was asked about.
    #[error("token {token} of {vocabulary}")]
    Token {
        /// Which.
        token: u32,
        /// Size of the vocabulary.
        vocabulary: usize,
    },
}

/// Philox4x32-10 (Salmon et al., SC'11): 128 random bits as a function of counter and key.
#[must_use]
pub const fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut a, mut b, mut c, mut d] = counter;
    let [mut key0, mut key1] = key;
    let mut round = 0;
    while round < 10 {
        let (first, second) = (0xD251_1F53 * a as u64, 0xCD9E_8D57 * c as u64);
        (a, b, c, d) =
            ((second >> 32) as u32 ^ b ^ key0, second as u32, (first >> 32) as u32 ^ d ^ key1, first as u32);
        key0 = key0.wrapping_add(0x9E37_79B9);
        key1 = key1.wrapping_add(0xBB67_AE85);
        round += 1;
    }
    [a, b, c, d]
}

/// A uniform number in `[0, 1)` with 53 bits. The seed fills Philox's key; the choice is a word of the counter.
fn uniform(seed: u64, choice: u32, position: u32, purpose: u32) -> f64 {
    let [low, high, ..] = philox4x32_10([position, purpose, choice, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = u64::from(high) << 32 | u64::from(low);
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

/// Draws the token at `position` (of the token drawn, in its sequence) of choice `choice`.
///
/// Greedy takes the most likely token, of equals the smallest id. Else logits are divided by the temperature, cut to the `top_k` most
/// likely, of those to the fewest that hold `top_p` of their mass, and one is drawn in proportion. Equals are ordered by id.
///
/// # Errors
/// The logits are empty or one is not finite.
pub fn draw(
    logits: &[f32],
    params: &SamplingParams,
    choice: u32,
    position: u32,
) -> Result<TokenId, SampleError> {
    let best = best(logits)?;
    if params.is_greedy() || params.top_k == Some(1) {
        return Ok(best);
    }
    let top = logits[best.0 as usize];
    let inverse = 1.0 / params.temperature;
    let weights: Vec<f32> = logits.iter().map(|logit| exp((logit - top) * inverse)).collect();
    let u = uniform(params.seed, choice, position, PURPOSE_TOKEN);
    let top_k = params.top_k.map_or(weights.len(), |k| weights.len().min(k.max(1) as usize));
    if params.top_p >= 1.0 && top_k == weights.len() {
        let ids = 0..weights.len() as u32;
        return Ok(pick(ids.map(|id| (id, weights[id as usize])), u * total(&weights)).unwrap_or(best));
    }
    let kept = nucleus(&weights, logits, top_k, params.top_p);
    let mass: f64 = kept.iter().map(|&id| f64::from(weights[id as usize])).sum();
    Ok(pick(kept.iter().map(|&id| (id, weights[id as usize])), u * mass).unwrap_or(best))
}

/// The first candidate at which the running sum exceeds `target`; else the last that has any weight.
fn pick(candidates: impl Iterator<Item = (u32, f32)>, target: f64) -> Option<TokenId> {
    let mut sum = 0.0;
    let mut last = None;
    for (id, weight) in candidates {
        sum += f64::from(weight);
        if weight > 0.0 {
            last = Some(TokenId(id));
        }
        if sum > target {
            break;
        }
    }
    last
}

/// Ids of the `top_k` most likely, cut to the fewest that hold `top_p` of their mass; best first.
fn nucleus(weights: &[f32], logits: &[f32], top_k: usize, top_p: f32) -> Vec<u32> {
    let order = |a: &u32, b: &u32| by_likelihood(logits, *a, *b);
    let mut ids: Vec<u32> = (0..weights.len() as u32).collect();
    let mut mass = 0.0;
    if top_k < ids.len() {
        ids.select_nth_unstable_by(top_k - 1, order);
        ids.truncate(top_k);
        ids.sort_unstable_by(order);
        mass = ids.iter().map(|&id| f64::from(weights[id as usize])).sum();
    }
    // Without a top-k the whole vocabulary would have to be sorted, where as a rule its first hundred hold the mass.
    let whole = if top_k < weights.len() { mass } else { total(weights) };
    let target = f64::from(top_p) * whole;
    let mut sorted = if top_k < weights.len() { ids.len() } else { 0 };
    let mut sum = 0.0;
    let mut kept = 0;
    while kept < ids.len() {
        if kept == sorted {
            let more = (sorted * 4).max(256).min(ids.len());
            let rest = &mut ids[sorted..];
            if more - sorted < rest.len() {
                rest.select_nth_unstable_by(more - sorted - 1, order);
            }
            rest[..more - sorted].sort_unstable_by(order);
            sorted = more;
        }
        sum += f64::from(weights[ids[kept] as usize]);
        kept += 1;
        if sum >= target {
            break;
        }
    }
    ids.truncate(kept);
    ids
}

/// Most likely first; of equals the smaller id.
fn by_likelihood(logits: &[f32], a: u32, b: u32) -> Ordering {
    // All are finite, so there is an order.
    logits[b as usize].partial_cmp(&logits[a as usize]).unwrap_or(Ordering::Equal).then(a.cmp(&b))
}

/// 8 partial sums in double precision, then in order.
fn total(weights: &[f32]) -> f64 {
    let mut lanes = [0.0_f64; 8];
    let (body, tail) = weights.as_chunks::<8>();
    for part in body {
        for (lane, weight) in lanes.iter_mut().zip(part) {
            *lane += f64::from(*weight);
        }
    }
    for (lane, weight) in lanes.iter_mut().zip(tail) {
        *lane += f64::from(*weight);
    }
    lanes.iter().sum()
}

/// The smallest id of the largest logits, all being finite.
fn best(logits: &[f32]) -> Result<TokenId, SampleError> {
    if logits.is_empty() {
        return Err(SampleError::Empty);
    }
    // x * 0 is 0 but for NaN and infinities; the sum stays 0.
    let mut poison = [0.0_f32; 8];
    let mut high = [f32::NEG_INFINITY; 8];
    let (body, tail) = logits.as_chunks::<8>();
    for part in body {
        for lane in 0..8 {
            poison[lane] += part[lane] * 0.0;
            high[lane] = if part[lane] > high[lane] { part[lane] } else { high[lane] };
        }
    }
    let finite = poison.iter().all(|&lane| lane == 0.0) && tail.iter().all(|logit| logit.is_finite());
    if !finite {
        let token = logits.iter().position(|logit| !logit.is_finite()).unwrap_or_default() as u32;
        return Err(SampleError::NotFinite { token });
    }
    let high = high.iter().chain(tail).copied().fold(f32::NEG_INFINITY, f32::max);
    Ok(TokenId(logits.iter().position(|&logit| logit >= high).unwrap_or_default() as u32))
}

/// Log-probabilities of one row, unmodified by sampling parameters.
#[derive(Clone, PartialEq, Debug)]
pub struct LogProbs {
    /// Of the token asked for.
    pub token: f32,
    /// The most likely tokens, best first; of equals the smaller id.
    pub top: Vec<(TokenId, f32)>,
}

/// Natural-log probability of `token`, and the `count` most likely tokens.
///
/// # Errors
/// The logits are empty, one is not finite, or the token is outside the vocabulary.
pub fn log_softmax_top(logits: &[f32], count: usize, token: TokenId) -> Result<LogProbs, SampleError> {
    let best = best(logits)?;
    let Some(&logit) = logits.get(token.0 as usize) else {
        return Err(SampleError::Token { token: token.0, vocabulary: logits.len() });
    };
    let top = logits[best.0 as usize];
    let weights: Vec<f32> = logits.iter().map(|logit| exp(logit - top)).collect();
    let norm = f64::from(top) + total(&weights).ln();
    let log_probability = |logit: f32| (f64::from(logit) - norm) as f32;
    let count = count.min(logits.len());
    let mut ids: Vec<u32> = if count == 0 { Vec::new() } else { (0..logits.len() as u32).collect() };
    if count > 0 && count < ids.len() {
        ids.select_nth_unstable_by(count - 1, |a, b| by_likelihood(logits, *a, *b));
        ids.truncate(count);
    }
    ids.sort_unstable_by(|a, b| by_likelihood(logits, *a, *b));
    Ok(LogProbs {
        token: log_probability(logit),
        top: ids.iter().map(|&id| (TokenId(id), log_probability(logits[id as usize]))).collect(),
    })
}
