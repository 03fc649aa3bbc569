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
    /// What makes tokens that were there before less likely.
    pub penalties: Penalties,
}

/// What makes tokens that were there before less likely, or more.
///
/// They follow from a sequence's tokens and the length of its prompt alone, whatever was computed how often and by whom: what was generated is
/// output, also where it is computed again as an input.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Penalties {
    /// Taken off the logit of a token that is in the output; in [`Penalties::ADDED`].
    pub presence: f32,
    /// Taken off it for each time that it is there; in [`Penalties::ADDED`].
    pub frequency: f32,
    /// The logit of a token in prompt or output is divided by it where it is positive, and multiplied where it is not; in
    /// [`Penalties::FACTOR`]. Comes before the others (Keskar et al., CTRL, 2019).
    pub repetition: f32,
}

impl Penalties {
    /// Every token is as likely as the model says.
    pub const NONE: Self = Self { presence: 0.0, frequency: 0.0, repetition: 1.0 };
    /// Presence and frequency penalties that are taken.
    pub const ADDED: std::ops::RangeInclusive<f32> = -2.0..=2.0;
    /// Repetition penalties that are taken: a smaller one could make a logit infinite.
    pub const FACTOR: std::ops::RangeInclusive<f32> = 0.01..=2.0;

    /// Whether they change nothing.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::NONE
    }

    /// Whether each is in its range.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        Self::ADDED.contains(&self.presence)
            && Self::ADDED.contains(&self.frequency)
            && Self::FACTOR.contains(&self.repetition)
    }
}

impl SamplingParams {
    /// Greedy decoding: the most likely token, and of equals the smallest id.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_p: 1.0,
        top_k: None,
        seed: 0,
        logprobs: None,
        penalties: Penalties::NONE,
    };

    /// Whether the most likely token is taken without a draw.
    #[must_use]
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0
    }
}
