//! What a step takes.

/// Time of a step as a function of what is in it, fitted by the worker on the machine it runs on.
///
/// Microseconds. A batch of `n` tokens costs `body[i]` at `n = SIZES[i]`, linear between the sizes and beyond the last; so does the output
/// matrix for `n` sampled rows. Attention costs a constant per pair of a query and a position that it sees: one where a row has a single
/// token, which a GPU's memory sets, and another where it is a part of a prompt, which its arithmetic sets.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepCost {
    /// What every token costs: all layers but attention and, of the last layer, what follows it, by tokens of the batch.
    pub body_us: [f32; StepCost::SIZES.len()],
    /// What a sampled row costs on top: the rest of the last layer, output matrix and sampling, by sampled rows.
    pub head_us: [f32; StepCost::SIZES.len()],
    /// Attention of rows of a single token, per (query, position) pair, all layers and heads.
    pub row_pair_us: f32,
    /// The same of parts of prompts.
    pub part_pair_us: f32,
}

/// Pairs of a query and a position that it sees, its own included.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Pairs {
    /// Of rows of a single token.
    pub rows: u64,
    /// Of parts of prompts.
    pub parts: u64,
}

impl StepCost {
    /// Batch sizes that a step's time is given at.
    pub const SIZES: [u32; 14] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192];

    /// Nothing is known: every step is free.
    pub const UNKNOWN: Self = Self {
        body_us: [0.0; Self::SIZES.len()],
        head_us: [0.0; Self::SIZES.len()],
        row_pair_us: 0.0,
        part_pair_us: 0.0,
    };

    /// Whether anything is known.
    #[must_use]
    pub fn is_known(&self) -> bool {
        *self != Self::UNKNOWN
    }

    /// Predicted time of a step of `tokens` input tokens, `rows` sampled rows and these pairs.
    #[must_use]
    pub fn step_us(&self, tokens: u32, rows: u32, pairs: Pairs) -> f32 {
        let attention = self.row_pair_us * pairs.rows as f32 + self.part_pair_us * pairs.parts as f32;
        at(&self.body_us, tokens) + at(&self.head_us, rows) + attention
    }
}

impl Pairs {
    /// Of positions `[start, start + n)`, which are a part of a prompt.
    #[must_use]
    pub fn of_part(start: u64, n: u64) -> Self {
        Self { rows: 0, parts: n * start + n * (n + 1) / 2 }
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
        let head_us = StepCost::SIZES.map(|size| size as f32);
        let cost = StepCost { body_us, head_us, row_pair_us: 0.5, part_pair_us: 0.125 };
        for n in [1, 2, 3, 100, 128, 1000, 8192, 20_000] {
            let (body, both) = (100.0 + 10.0 * n as f32, 100.0 + 11.0 * n as f32);
            assert!((cost.step_us(n, 0, Pairs::default()) / body - 1.0).abs() < 1e-5, "{n}");
            assert!((cost.step_us(n, n, Pairs::default()) / both - 1.0).abs() < 1e-5, "{n}");
        }
        assert!((cost.step_us(0, 0, Pairs { rows: 4, parts: 8 }) - 3.0).abs() < 1e-6);
        assert!(StepCost::UNKNOWN.step_us(77, 5, Pairs { rows: 9, parts: 9 }) < 1e-6);
        assert!(!StepCost::UNKNOWN.is_known());
    }

    #[test]
    fn each_token_of_a_part_sees_what_lies_before_it_and_itself() {
        let seen = |start, n| (start + 1..=start + n).sum::<u64>();
        for (start, n) in [(0, 1), (0, 8192), (16, 0), (32_000, 256)] {
            assert_eq!(Pairs::of_part(start, n), Pairs { rows: 0, parts: seen(start, n) });
        }
    }
}
