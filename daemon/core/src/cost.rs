//! What a step takes.

/// Time of a step as a function of what is in it, fitted by the worker on the machine it runs on.
///
/// Microseconds. A batch of `n` tokens costs `body[i]` at `n = SIZES[i]`, linear between the sizes and beyond the last; so does the output
/// matrix for `n` sampled rows; attention costs a constant per pair of a query and a position that it sees.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepCost {
    /// What every token costs: all layers but attention and, of the last layer, what follows it, by tokens of the batch.
    pub body_us: [f32; StepCost::SIZES.len()],
    /// What a sampled row costs on top: the rest of the last layer, output matrix and sampling, by sampled rows.
    pub head_us: [f32; StepCost::SIZES.len()],
    /// Attention, per (query, position) pair, all layers and heads.
    pub pair_us: f32,
}

impl StepCost {
    /// Batch sizes at which a step was measured.
    pub const SIZES: [u32; 8] = [1, 2, 4, 8, 16, 32, 64, 128];

    /// Nothing is known: every step is free.
    pub const UNKNOWN: Self =
        Self { body_us: [0.0; Self::SIZES.len()], head_us: [0.0; Self::SIZES.len()], pair_us: 0.0 };

    /// Whether anything is known.
    #[must_use]
    pub fn is_known(&self) -> bool {
        *self != Self::UNKNOWN
    }

    /// Predicted time of a step of `tokens` input tokens, `rows` sampled rows and `pairs` pairs of a query and a position.
    #[must_use]
    pub fn step_us(&self, tokens: u32, rows: u32, pairs: u64) -> f32 {
        at(&self.body_us, tokens) + at(&self.head_us, rows) + self.pair_us * pairs as f32
    }
}

/// The curve through `(SIZES[i], times[i])` at `n`; nothing costs nothing.
fn at(times: &[f32; StepCost::SIZES.len()], n: u32) -> f32 {
    let sizes = StepCost::SIZES;
    if n <= sizes[0] {
        return if n == 0 { 0.0 } else { times[0] };
    }
    let upper = sizes.iter().position(|&size| size >= n).unwrap_or(sizes.len() - 1);
    let slope = (times[upper] - times[upper - 1]) / (sizes[upper] - sizes[upper - 1]) as f32;
    times[upper] + slope * (n as f32 - sizes[upper] as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_curve_goes_through_its_points_and_on_beyond_the_last() {
        let body_us = StepCost::SIZES.map(|size| 100.0 + 10.0 * size as f32);
        let cost = StepCost { body_us, head_us: StepCost::SIZES.map(|size| size as f32), pair_us: 0.5 };
        for n in [1, 2, 3, 100, 128, 1000] {
            assert!((cost.step_us(n, 0, 0) - (100.0 + 10.0 * n as f32)).abs() < 1e-2, "{n}");
            assert!((cost.step_us(n, n, 0) - (100.0 + 11.0 * n as f32)).abs() < 1e-2, "{n}");
        }
        assert!((cost.step_us(0, 0, 4) - 2.0).abs() < 1e-6);
        assert!(StepCost::UNKNOWN.step_us(77, 5, 9) < 1e-6);
        assert!(!StepCost::UNKNOWN.is_known());
    }
}
