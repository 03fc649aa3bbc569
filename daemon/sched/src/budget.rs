//! How much of a step prompts may have beside sequences that decode.
//!
//! **Owns** the prediction of what a step in the making takes, and by how much such steps took another time of late. **Never** leaves a
//! decoding sequence out, and never holds prompts up for good: at least a block's tokens of them go into every step that has room for them.

use pagedd_core::{Pairs, StepCost};

use crate::config::SchedulerConfig;

/// What a step's time depends on.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Load {
    tokens: u32,
    /// Rows that meet the output matrix.
    rows: u32,
    /// What attention sees.
    pairs: Pairs,
}

impl Load {
    /// With positions `[start, start + n)` of one more sequence, `draws` of which meet the output matrix.
    pub fn with(self, start: usize, n: usize, draws: u32) -> Self {
        if n == 1 {
            return self.with_rows(1, start as u64 + 1, draws);
        }
        let parts = self.pairs.parts + Pairs::of_part(start as u64, n as u64).parts;
        Self { tokens: self.tokens + n as u32, rows: self.rows + draws, pairs: Pairs { parts, ..self.pairs } }
    }

    /// With `count` guesses, which see `seen` positions together and are all drawn at.
    pub fn with_guesses(self, count: u32, seen: u64) -> Self {
        self.with_rows(count, seen, count)
    }

    fn with_rows(self, count: u32, seen: u64, draws: u32) -> Self {
        let pairs = Pairs { rows: self.pairs.rows + seen, ..self.pairs };
        Self { tokens: self.tokens + count, rows: self.rows + draws, pairs }
    }

    /// Rows that are drawn from.
    pub fn rows(&self) -> u32 {
        self.rows
    }

    /// Predicted time.
    pub fn us(&self, cost: &StepCost) -> f32 {
        cost.step_us(self.tokens, self.rows, self.pairs)
    }
}

/// How long steps with prompts take of late, for what is predicted of them: power limits, neighbours and what sequences share move it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace(f32);

impl Default for Pace {
    fn default() -> Self {
        Self(1.0)
    }
}

impl Pace {
    /// Beyond these it is not believed: one prompt's end says little of the next one's begin.
    const BOUNDS: (f32, f32) = (0.8, 1.5);
    /// Weight of the newest step.
    const NEWEST: f32 = 0.125;

    /// A step took `took_us`, for which `predicted_us` were predicted. Where either is 0, nothing is known.
    pub fn learn(&mut self, predicted_us: f32, took_us: u64) {
        if predicted_us > 0.0 && took_us > 0 {
            let (least, most) = Self::BOUNDS;
            let ratio = (took_us as f32 / predicted_us).clamp(least, most);
            self.0 += (ratio - self.0) * Self::NEWEST;
        }
    }
}

/// What prompts may still have of a step.
#[derive(Debug)]
pub(crate) struct Budget {
    cost: StepCost,
    /// Longest that the step may be predicted to take; `None` where nobody decodes, or where time is not known or not limited.
    target_us: Option<f32>,
    /// The step so far, with all sequences that decode, also those that are still to come.
    load: Load,
    block_size: usize,
    /// Prompt tokens of the step so far.
    prompts: usize,
    /// Somebody's part did not fit: those behind it do not overtake.
    closed: bool,
}

impl Budget {
    /// For a step in which sequences decode at the positions `decoding`.
    pub fn new(config: &SchedulerConfig, pace: Pace, decoding: impl Iterator<Item = usize>) -> Self {
        let load = decoding.fold(Load::default(), |load, position| load.with(position, 1, 1));
        let limited = load.tokens > 0 && config.cost.is_known();
        Self {
            cost: config.cost,
            target_us: config.itl_target_us.filter(|_| limited).map(|us| us as f32 / pace.0),
            load,
            block_size: config.block_size.0 as usize,
            prompts: 0,
            closed: false,
        }
    }

    /// How many of the positions `[start, end)` of a prompt the step may compute: none, all, or up to a block's end at least. Where it is
    /// none, prompts behind it get none either.
    pub fn offer(&mut self, start: usize, end: usize) -> usize {
        let all = end - start;
        let Some(target_us) = self.target_us else { return all };
        let size = self.block_size;
        let mut fit = 0;
        if !self.closed {
            let fits = |n: usize| self.load.with(start, n, u32::from(n == all)).us(&self.cost) <= target_us;
            // More tokens never take less time, but where a second one makes a part of a row: `fit` of them fit, `over` do not.
            let mut over = all + 1;
            while fit + 1 < over {
                let middle = usize::midpoint(fit, over);
                if fits(middle) { fit = middle } else { over = middle }
            }
            if fit < all && (start + fit) / size == start / size {
                fit = 0;
            }
        }
        if self.prompts < size {
            // Up to a block's end, over at least as many tokens as a block has.
            fit = fit.max((start + size).next_multiple_of(size) - start);
        }
        self.closed |= fit == 0;
        fit.min(all)
    }

    /// What the step may still take, in microseconds; `None` where that is not limited.
    pub fn left_us(&self) -> Option<f32> {
        self.target_us.map(|target| target - self.load.us(&self.cost))
    }

    /// The step computes positions `[start, start + n)` of a prompt, up to its last where it `draws`.
    pub fn add(&mut self, start: usize, n: usize, draws: bool) {
        self.load = self.load.with(start, n, u32::from(draws));
        self.prompts += n;
    }
}

#[cfg(test)]
mod tests {
    use super::Pace;

    #[test]
    fn the_pace_follows_what_steps_take_and_neither_one_step_nor_a_wild_guess_moves_it_far() {
        let mut pace = Pace::default();
        pace.learn(1000.0, 60_000);
        assert!(pace.0 < 1.07, "one slow step: {pace:?}");
        for (predicted_us, took_us, expected) in
            [(1000.0, 1200, 1.2), (1000.0, 100, 0.8), (1000.0, 9000, 1.5)]
        {
            (0..60).for_each(|_| pace.learn(predicted_us, took_us));
            assert!((pace.0 - expected).abs() < 1e-3, "{took_us}: {pace:?}");
        }
        let before = pace.0;
        pace.learn(0.0, 5);
        pace.learn(5.0, 0);
        assert!((pace.0 - before).abs() < 1e-6, "where nothing is known nothing is learnt: {pace:?}");
    }
}
