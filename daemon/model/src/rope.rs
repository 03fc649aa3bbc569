//! Rotary position embedding (Su et al. 2021) and its scalings: linear (Chen et al. 2023), the bands of Llama 3.1, and
//! `YaRN` (Peng et al. 2023).

use std::f64::consts::PI;

use crate::error::Fault;

/// Which elements of a head turn together.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum RopePairing {
    /// Pair `i` is elements `(2i, 2i + 1)`: GGUF files of architecture llama, whose Q and K rows are permuted for it.
    Interleaved,
    /// Pair `i` is elements `(i, i + head_dim / 2)`: GGUF files of architecture qwen2, and all Hugging Face checkpoints.
    Halves,
}

/// How frequencies are changed for contexts longer than those trained first.
#[derive(Clone, PartialEq, Debug)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Every frequency is divided by `factor`.
    Linear {
        /// At least 1.
        factor: f32,
    },
    /// Llama 3.1: long wavelengths are divided by `factor`, short ones are kept, those between are mixed.
    Llama3 {
        /// At least 1.
        factor: f32,
        /// Wavelengths over `original_context / low_freq_factor` are scaled.
        low_freq_factor: f32,
        /// Wavelengths under `original_context / high_freq_factor` are kept. Over `low_freq_factor`.
        high_freq_factor: f32,
        /// Context of the first training.
        original_context: u32,
    },
    /// `YaRN`: a ramp over dimensions between kept and scaled frequencies, and a factor on cosine and sine.
    Yarn {
        /// At least 1.
        factor: f32,
        /// Context of the first training.
        original_context: u32,
        /// Rotations over the original context above which a frequency is kept.
        beta_fast: f32,
        /// Rotations below which it is scaled fully.
        beta_slow: f32,
        /// Factor on cosine and sine.
        attention_factor: f32,
        /// Whether the ramp's ends are rounded to whole dimensions.
        truncate: bool,
    },
    /// A divisor for each pair, from the file (`rope_freqs.weight`).
    Factors(Vec<f32>),
}

/// Rotary position embedding of a model. All elements of a head take part.
#[derive(Clone, PartialEq, Debug)]
pub struct Rope {
    /// Base of the geometric series of frequencies.
    pub base: f32,
    /// Which elements turn together.
    pub pairing: RopePairing,
    /// Change of the frequencies.
    pub scaling: RopeScaling,
}

/// What a kernel needs: pair `i` at position `p` turns by `p * inverse[i]`; cosine and sine are multiplied by
/// `attention_factor`.
#[derive(Clone, PartialEq, Debug)]
pub struct RopeFrequencies {
    /// Radians per position, `head_dim / 2` of them.
    pub inverse: Vec<f32>,
    /// 1 except for `YaRN`.
    pub attention_factor: f32,
}

impl Rope {
    /// The frequencies for heads of `head_dim` elements.
    #[must_use]
    pub fn frequencies(&self, head_dim: usize) -> RopeFrequencies {
        let pairs = head_dim / 2;
        let base = f64::from(self.base);
        let plain = |i: usize| base.powf(-((2 * i) as f64) / head_dim as f64);
        let mut attention_factor = 1.0;
        let inverse = match &self.scaling {
            RopeScaling::None => (0..pairs).map(plain).collect::<Vec<_>>(),
            RopeScaling::Linear { factor } => (0..pairs).map(|i| plain(i) / f64::from(*factor)).collect(),
            RopeScaling::Factors(divisors) => {
                (0..pairs).map(|i| plain(i) / divisors.get(i).map_or(1.0, |&d| f64::from(d))).collect()
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let (low, high) = (f64::from(*low_freq_factor), f64::from(*high_freq_factor));
                (0..pairs)
                    .map(|i| {
                        let frequency = plain(i);
                        let rotations = f64::from(*original_context) * frequency / (2.0 * PI);
                        let keep = ((rotations - low) / (high - low)).clamp(0.0, 1.0);
                        mix(frequency / f64::from(*factor), frequency, keep)
                    })
                    .collect()
            }
            RopeScaling::Yarn {
                factor,
                original_context,
                beta_fast,
                beta_slow,
                attention_factor: on_both,
                truncate,
            } => {
                attention_factor = *on_both;
                // The dimension whose frequency makes `rotations` turns over the original context.
                let dimension = |rotations: f32| {
                    let turns = f64::from(*original_context) / (f64::from(rotations) * 2.0 * PI);
                    head_dim as f64 * turns.ln() / (2.0 * base.ln())
                };
                let (mut low, mut high) = (dimension(*beta_fast), dimension(*beta_slow));
                if *truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let (low, high) = (low.max(0.0), high.min(head_dim as f64 - 1.0));
                let width = if high > low { high - low } else { 0.001 };
                (0..pairs)
                    .map(|i| {
                        let frequency = plain(i);
                        let keep = 1.0 - ((i as f64 - low) / width).clamp(0.0, 1.0);
                        mix(frequency / f64::from(*factor), frequency, keep)
                    })
                    .collect()
            }
        };
        RopeFrequencies { inverse: inverse.into_iter().map(|f| f as f32).collect(), attention_factor }
    }
}

/// `YaRN`'s factor on cosine and sine where the model states none.
pub(crate) fn yarn_attention_factor(factor: f32) -> f32 {
    if factor <= 1.0 { 1.0 } else { 0.1 * factor.ln() + 1.0 }
}

/// Refuses `YaRN` constants that make no ramp.
pub(crate) fn check_yarn(scaling: &RopeScaling, key: &str) -> Result<(), Fault> {
    if let RopeScaling::Yarn { beta_fast, beta_slow, attention_factor, .. } = scaling {
        let positive =
            [beta_fast, beta_slow, attention_factor].into_iter().all(|f| f.is_finite() && *f > 0.0);
        if !positive || beta_fast < beta_slow {
            let problem = format!(
                "beta_fast {beta_fast}, beta_slow {beta_slow}, attention factor {attention_factor} make no ramp"
            );
            return Err(Fault::malformed(key, problem));
        }
    }
    Ok(())
}

fn mix(scaled: f64, kept: f64, keep: f64) -> f64 {
    scaled * (1.0 - keep) + kept * keep
}

#[cfg(test)]
mod tests;
