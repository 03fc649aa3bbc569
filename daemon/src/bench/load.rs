//! Prompts of random tokens.
//!
//! **Owns** one stream of numbers, so that no two prompts of a run are alike and a second run has the same ones. **Never** asks the system.

use pagedd_core::{Penalties, SamplingParams, TokenId};

/// Draws prompts and seeds (`SplitMix64`, Steele et al., OOPSLA'14).
#[derive(Clone, Debug)]
pub struct Draw(u64);

impl Draw {
    /// The stream of this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// `count` tokens of a vocabulary of `vocabulary`.
    pub fn tokens(&mut self, count: u32, vocabulary: u32) -> Vec<TokenId> {
        let token = |_| TokenId((self.next() % u64::from(vocabulary.max(1))) as u32);
        (0..count).map(token).collect()
    }

    /// Puts values into an order of its own.
    pub fn shuffle<T>(&mut self, values: &mut [T]) {
        for last in (1..values.len()).rev() {
            values.swap(last, (self.next() % (last as u64 + 1)) as usize);
        }
    }

    /// How one request's tokens are drawn.
    pub fn sampling(&mut self, temperature: f32) -> SamplingParams {
        let penalties = Penalties::NONE;
        SamplingParams { temperature, seed: self.next(), penalties, ..SamplingParams::GREEDY }
    }
}
