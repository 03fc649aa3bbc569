//! Drawing tokens from logits.
//!
//! **Owns** the random stream and the order in which candidates are taken. **Never** keeps state: a draw is a function of its arguments.

#![allow(unsafe_code)]

use std::cmp::Ordering;

use pagedd_core::{Penalties, SamplingParams, TokenId};

use crate::cpu::exp::exp;
use crate::cpu::isa::Isa;
use crate::cpu::versions::versions;

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

/// A token whose logit is changed before a draw.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Adjustment {
    /// Which.
    pub token: TokenId,
    /// Whether it is in prompt or output.
    pub seen: bool,
    /// How often it is in the output.
    pub output: u32,
    /// Added first.
    pub bias: f32,
}

/// Applies biases, then penalties, to the tokens of `adjustments`.
///
/// # Errors
/// A token is outside the vocabulary; nothing has been changed.
pub fn adjust(
    logits: &mut [f32],
    penalties: Penalties,
    adjustments: &[Adjustment],
) -> Result<(), SampleError> {
    let vocabulary = logits.len();
    if let Some(by) = adjustments.iter().find(|by| by.token.0 as usize >= vocabulary) {
        return Err(SampleError::Token { token: by.token.0, vocabulary });
    }
    for by in adjustments {
        let logit = &mut logits[by.token.0 as usize];
        *logit = penalised(*logit + by.bias, &penalties, by.seen, by.output);
    }
    Ok(())
}

/// The logit of a token that is in prompt or output where it was `seen`, and so often in the `output`. Repetition comes first, then frequency
/// and presence, as everywhere.
fn penalised(logit: f32, penalties: &Penalties, seen: bool, output: u32) -> f32 {
    let Penalties { repetition, frequency, presence } = *penalties;
    let mut logit = logit;
    if seen {
        logit = if logit > 0.0 { logit / repetition } else { logit * repetition };
    }
    logit -= frequency * output as f32;
    if output > 0 { logit - presence } else { logit }
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
    draw_above(logits, params, 0.0, choice, position)
}

/// [`draw`] among the tokens whose probability, at the temperature, is at least `min_p` of the best one's. They are left out before `top_k`
/// and `top_p` cut.
///
/// # Errors
/// The logits are empty or one is not finite.
pub fn draw_above(
    logits: &[f32],
    params: &SamplingParams,
    min_p: f32,
    choice: u32,
    position: u32,
) -> Result<TokenId, SampleError> {
    let survey = Survey::new(logits)?;
    let best = survey.best();
    if params.is_greedy() || params.top_k == Some(1) {
        return Ok(best);
    }
    let weigh = Weigh { top: logits[best.0 as usize], inverse: 1.0 / params.temperature, least: min_p };
    let u = uniform(params.seed, choice, position, PURPOSE_TOKEN);
    let top_k = params.top_k.map_or(logits.len(), |k| logits.len().min(k.max(1) as usize));
    if params.top_p >= 1.0 && top_k == logits.len() {
        return Ok(pick_of_all(logits, weigh, u).unwrap_or(best));
    }
    let kept = nucleus(&survey, weigh, top_k, params.top_p);
    let weights = kept.iter().map(|&id| (id, weigh.of(logits[id as usize])));
    let mass: f64 = weights.clone().map(|(_, weight)| f64::from(weight)).sum();
    Ok(pick(weights, 0.0, u * mass).0.unwrap_or(best))
}

/// Makes tokens that were there before less likely, in place. A token outside the vocabulary is left out.
///
/// A function of the tokens: how often it is called, and what with before, changes nothing.
pub fn penalise(logits: &mut [f32], penalties: &Penalties, prompt: &[u32], output: &[u32]) {
    const DONE: u32 = 1 << 31;
    let mut counts = vec![0_u32; logits.len()];
    for &token in output {
        if let Some(count) = counts.get_mut(token as usize) {
            *count += 1;
        }
    }
    for &token in output.iter().chain(prompt) {
        let Some(count) = counts.get_mut(token as usize).filter(|count| **count & DONE == 0) else {
            continue;
        };
        let logit = &mut logits[token as usize];
        *logit = penalised(*logit, penalties, true, *count);
        *count |= DONE;
    }
}

/// From a logit to its share of the probability, the best token's being 1.
#[derive(Clone, Copy)]
struct Weigh {
    top: f32,
    /// Of the temperature.
    inverse: f32,
    /// A smaller weight is none.
    least: f32,
}

impl Weigh {
    #[inline(always)]
    fn of(self, logit: f32) -> f32 {
        let weight = exp((logit - self.top) * self.inverse);
        if weight < self.least { 0.0 } else { weight }
    }
}

/// Logits whose weights are added up before they meet the running sum of a draw from all.
const CHUNK: usize = 512;

/// A draw from the whole vocabulary: the running sum goes by chunks of [`CHUNK`], and token by token in the one where it ends.
fn pick_of_all(logits: &[f32], weigh: Weigh, u: f64) -> Option<TokenId> {
    let vectors = Isa::detect().vectors();
    let masses: Vec<f64> = logits.chunks(CHUNK).map(|chunk| mass(vectors, chunk, weigh)).collect();
    let target = u * masses.iter().sum::<f64>();
    let mut sum = 0.0;
    for (index, mass) in masses.iter().enumerate() {
        if sum + mass > target {
            let first = index * CHUNK;
            let chunk = logits[first..].iter().take(CHUNK).enumerate();
            let weights = chunk.map(|(id, &logit)| ((first + id) as u32, weigh.of(logit)));
            if let (token, end) = pick(weights, sum, target)
                && end > target
            {
                return token;
            }
        }
        sum += mass;
    }
    // Rounding left the target above every sum.
    logits.iter().rposition(|&logit| weigh.of(logit) > 0.0).map(|id| TokenId(id as u32))
}

/// The first candidate at which the running sum, `sum` before them, exceeds `target`; else the last that has any weight. And the sum there.
fn pick(candidates: impl Iterator<Item = (u32, f32)>, mut sum: f64, target: f64) -> (Option<TokenId>, f64) {
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
    (last, sum)
}

/// Ids of the `top_k` most likely, cut to the fewest that hold `top_p` of their mass; best first.
fn nucleus(survey: &Survey<'_>, weigh: Weigh, top_k: usize, top_p: f32) -> Vec<u32> {
    let weight = |id: u32| f64::from(weigh.of(survey.logits[id as usize]));
    let all = top_k == survey.logits.len();
    // As a rule the first hundred hold the mass, whatever the size of the vocabulary.
    let mut ids = survey.best_first(if all { 256 } else { top_k });
    let whole = if all {
        mass(Isa::detect().vectors(), survey.logits, weigh)
    } else {
        ids.truncate(top_k);
        ids.iter().map(|&id| weight(id)).sum()
    };
    let target = f64::from(top_p) * whole;
    let (mut sum, mut kept) = (0.0, 0);
    while kept < top_k && (kept == 0 || sum < target) {
        if kept == ids.len() {
            ids = survey.best_first(4 * kept);
        }
        sum += weight(ids[kept]);
        kept += 1;
    }
    ids.truncate(kept);
    ids
}

/// Most likely first; of equals the smaller id.
fn by_likelihood(logits: &[f32], a: u32, b: u32) -> Ordering {
    // All are finite, so there is an order.
    logits[b as usize].partial_cmp(&logits[a as usize]).unwrap_or(Ordering::Equal).then(a.cmp(&b))
}

versions!(
    /// Sum of the weights: 8 partial sums in double precision, then in order.
    mass = mass_any(logits: &[f32], weigh: Weigh) -> f64
);

#[inline(always)]
fn mass_any(logits: &[f32], weigh: Weigh) -> f64 {
    let mut lanes = [0.0_f64; 8];
    let (body, tail) = logits.as_chunks::<8>();
    for part in body {
        for lane in 0..8 {
            lanes[lane] += f64::from(weigh.of(part[lane]));
        }
    }
    for (lane, &logit) in lanes.iter_mut().zip(tail) {
        *lane += f64::from(weigh.of(logit));
    }
    let mut sum = 0.0;
    for lane in lanes {
        sum += lane;
    }
    sum
}

/// Values side by side of which each belongs to another group.
const LANES: usize = 16;
/// Values of a tile: [`LANES`] groups of 16, the values of a group lying [`LANES`] apart.
const TILE: usize = 16 * LANES;

/// Logits, all finite, and the largest of each group: the few best are found without looking at the rest again.
struct Survey<'a> {
    logits: &'a [f32],
    /// By tile.
    maxima: Vec<[f32; LANES]>,
}

impl<'a> Survey<'a> {
    fn new(logits: &'a [f32]) -> Result<Self, SampleError> {
        if logits.is_empty() {
            return Err(SampleError::Empty);
        }
        let mut maxima = vec![[f32::NEG_INFINITY; LANES]; logits.len().div_ceil(TILE)];
        if !survey(Isa::detect().vectors(), logits, &mut maxima) {
            let token = logits.iter().position(|logit| !logit.is_finite()).unwrap_or_default() as u32;
            return Err(SampleError::NotFinite { token });
        }
        Ok(Self { logits, maxima })
    }

    /// The smallest id of the largest logits.
    fn best(&self) -> TokenId {
        let (mut high, mut tile) = (f32::NEG_INFINITY, 0);
        for (index, maxima) in self.maxima.iter().enumerate() {
            let top = maxima.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            if top > high {
                (high, tile) = (top, index);
            }
        }
        let first = tile * TILE;
        let place = self.logits[first..].iter().position(|&logit| logit >= high);
        TokenId((first + place.unwrap_or_default()) as u32)
    }

    /// At least the `count` most likely tokens (all, if there are no more), best first.
    fn best_first(&self, count: usize) -> Vec<u32> {
        let order = |a: &u32, b: &u32| by_likelihood(self.logits, *a, *b);
        let mut ids: Vec<u32> = match self.at_least(count) {
            Some(low) => self.above(low),
            None => (0..self.logits.len() as u32).collect(),
        };
        if 0 < count && count < ids.len() {
            ids.select_nth_unstable_by(count - 1, order);
            ids.truncate(count);
        }
        ids.sort_unstable_by(order);
        ids
    }

    /// A value that at least `count` logits reach: the largest of as many groups do. `None` where so many groups reach it that
    /// the groups are of no help.
    fn at_least(&self, count: usize) -> Option<f32> {
        let maxima = self.maxima.as_flattened();
        if count == 0 || count > maxima.len() / 4 {
            return None;
        }
        let mut maxima = maxima.to_vec();
        let (_, low, _) = maxima.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a));
        Some(*low)
    }

    /// Every token whose logit is `low` or more.
    fn above(&self, low: f32) -> Vec<u32> {
        let mut ids = Vec::new();
        for (index, (maxima, tile)) in self.maxima.iter().zip(self.logits.chunks(TILE)).enumerate() {
            for (lane, _) in maxima.iter().enumerate().filter(|&(_, &most)| most >= low) {
                for (row, _) in
                    tile.iter().skip(lane).step_by(LANES).enumerate().filter(|&(_, &logit)| logit >= low)
                {
                    ids.push((index * TILE + row * LANES + lane) as u32);
                }
            }
        }
        ids
    }
}

versions!(
    /// The largest of each group into `maxima`; whether all logits are finite.
    survey = survey_any(logits: &[f32], maxima: &mut [[f32; LANES]]) -> bool
);

#[inline(always)]
fn survey_any(logits: &[f32], maxima: &mut [[f32; LANES]]) -> bool {
    // Sums of x * 0: zero, or NaN where something is not finite.
    let mut poison = [0.0_f32; LANES];
    for (tile, maxima) in logits.chunks(TILE).zip(maxima) {
        let mut high = [f32::NEG_INFINITY; LANES];
        let (body, tail) = tile.as_chunks::<LANES>();
        for part in body {
            for lane in 0..LANES {
                poison[lane] += part[lane] * 0.0;
                high[lane] = if part[lane] > high[lane] { part[lane] } else { high[lane] };
            }
        }
        for (lane, &logit) in tail.iter().enumerate() {
            poison[lane] += logit * 0.0;
            high[lane] = if logit > high[lane] { logit } else { high[lane] };
        }
        *maxima = high;
    }
    let mut all = 0.0;
    for lane in poison {
        all += lane;
    }
    all == 0.0
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
    let survey = Survey::new(logits)?;
    let Some(&logit) = logits.get(token.0 as usize) else {
        return Err(SampleError::Token { token: token.0, vocabulary: logits.len() });
    };
    let top = logits[survey.best().0 as usize];
    let whole = mass(Isa::detect().vectors(), logits, Weigh { top, inverse: 1.0, least: 0.0 });
    let norm = f64::from(top) + whole.ln();
    let log_probability = |logit: f32| (f64::from(logit) - norm) as f32;
    let mut ids = if count == 0 { Vec::new() } else { survey.best_first(count) };
    ids.truncate(count);
    Ok(LogProbs {
        token: log_probability(logit),
        top: ids.iter().map(|&id| (TokenId(id), log_probability(logits[id as usize]))).collect(),
    })
}

#[cfg(test)]
mod tests;
