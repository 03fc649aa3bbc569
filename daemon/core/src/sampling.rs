//! How a token is drawn from a row of logits.

/// Sampling parameters of one sequence, checked at the edge.
///
/// Sampling is stateless: the draw for position `p` depends on `(seed, choice, p)` and the logits only (Philox, Salmon et
/// al., SC'11), so that a plan can run twice with one result.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SamplingParams {
    /// `0.0` is greedy. Values below 1e-5 are taken as greedy at the edge.
    pub temperature: f32,
    /// Nucleus mass in `(0, 1]`; `1.0` keeps everything.
    pub top_p: f32,
    /// Keep only this many most likely tokens; `None` keeps everything.
    pub top_k: Option<u32>,
    /// Key of the random stream. Drawn at admission where the client sent none.
    pub seed: u64,
    /// How many top log-probabilities to report for each token, besides its own; `None` reports nothing.
    pub logprobs: Option<u8>,
}

impl SamplingParams {
    /// Greedy decoding: the most likely token, and of equals the smallest id.
    pub const GREEDY: Self = Self { temperature: 0.0, top_p: 1.0, top_k: None, seed: 0, logprobs: None };

    /// Whether the most likely token is taken without a draw.
    #[must_use]
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }
}
