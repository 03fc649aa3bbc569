//! What a tile keeps while it runs.

use super::lanes::Lanes;
use super::{CHUNK, LANES, exp};

/// Softmax state of query vectors: running maximum, sum of weights, weighted sum of values.
#[derive(Default)]
pub(super) struct Partial {
    /// Elements of a vector's weighted values.
    stride: usize,
    /// Whole groups of [`LANES`] vectors.
    pub(super) max: Vec<f32>,
    /// By position modulo [`LANES`].
    pub(super) sums: Vec<[f32; LANES]>,
    /// `[vectors][stride]`.
    pub(super) values: Vec<f32>,
}

impl Partial {
    /// Empty state of `vectors` query vectors; memory it has is used again.
    pub(super) fn reset(&mut self, vectors: usize, stride: usize) {
        self.stride = stride;
        self.max.clear();
        self.max.resize(vectors.next_multiple_of(LANES), f32::NEG_INFINITY);
        self.sums.clear();
        self.sums.resize(vectors, [0.0; LANES]);
        self.values.clear();
        self.values.resize(vectors * stride, 0.0);
    }

    /// Takes in the next split. A query that saw nothing of it (its sum is 0) stays as it is.
    pub(super) fn merge(&mut self, next: &Self) {
        for vector in 0..self.sums.len() {
            if sum(&next.sums[vector]) == 0.0 {
                continue;
            }
            let (sums, next_sums) = (&mut self.sums[vector], &next.sums[vector]);
            let range = vector * self.stride..(vector + 1) * self.stride;
            let (values, next_values) = (&mut self.values[range.clone()], &next.values[range]);
            let (max, next_max) = (self.max[vector], next.max[vector]);
            self.max[vector] = max.max(next_max);
            if max == f32::NEG_INFINITY {
                *sums = *next_sums;
                values.copy_from_slice(next_values);
            } else {
                let mine = exp(max - self.max[vector]);
                let theirs = exp(next_max - self.max[vector]);
                weighted_sum(sums, mine, next_sums, theirs);
                weighted_sum(values, mine, next_values, theirs);
            }
        }
    }

    /// The attention of a vector: its first `out.len()` values over the sum of the weights.
    pub(super) fn finish(&self, vector: usize, out: &mut [f32]) {
        let sum = sum(&self.sums[vector]);
        for (out, value) in out.iter_mut().zip(&self.values[vector * self.stride..]) {
            *out = value / sum;
        }
    }
}

impl Partial {
    /// Elements that [`Partial::store`] fills.
    const fn state_len(stride: usize) -> usize {
        1 + LANES + stride
    }

    fn store(&self, vector: usize, state: &mut [f32]) {
        state[0] = self.max[vector];
        state[1..=LANES].copy_from_slice(&self.sums[vector]);
        state[1 + LANES..].copy_from_slice(&self.values[vector * self.stride..][..self.stride]);
    }

    fn load(&mut self, vector: usize, state: &[f32]) {
        self.max[vector] = state[0];
        self.sums[vector].copy_from_slice(&state[1..=LANES]);
        self.values[vector * self.stride..][..self.stride].copy_from_slice(&state[1 + LANES..]);
    }
}

/// `x = x * mine + next * theirs`.
fn weighted_sum(x: &mut [f32], mine: f32, next: &[f32], theirs: f32) {
    for (x, next) in x.iter_mut().zip(next) {
        *x = *x * mine + next * theirs;
    }
}

/// Added as a tree that folds the upper half onto the lower.
fn sum(sums: &[f32; LANES]) -> f32 {
    let mut sums = *sums;
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
        width /= 2;
    }
    sums[0]
}

/// Buffers of a tile, as [`Lanes`] lay them out.
#[derive(Default)]
pub(super) struct Buffers {
    /// The tile's query vectors, scaled.
    pub(super) q: Vec<f32>,
    /// Scores, then weights, of the tile's query vectors for one chunk.
    pub(super) scores: Vec<[f32; CHUNK]>,
    pub(super) keys: Vec<f32>,
    pub(super) values: Vec<f32>,
}

/// A thread's memory, used again by every tile.
#[derive(Default)]
pub(super) struct Scratch {
    pub(super) buffers: Buffers,
    /// All splits before the running one.
    pub(super) total: Partial,
    /// The running split.
    pub(super) split: Partial,
}

impl Buffers {
    /// Makes room for so many query vectors. What is in the buffers stays undefined until written.
    pub(super) fn reserve<L: Lanes>(&mut self, vectors: usize, head_dim: usize) {
        self.q.resize(vectors.next_multiple_of(L::BLOCK) * head_dim, 0.0);
        self.scores.resize(vectors, [0.0; CHUNK]);
        self.keys.resize(CHUNK * head_dim, 0.0);
        self.values.resize(CHUNK * head_dim.next_multiple_of(L::WIDTH), 0.0);
    }
}

impl Scratch {
    /// Elements of a vector's state: of all complete splits, and of the running one.
    pub(super) const fn state_len(stride: usize) -> usize {
        2 * Partial::state_len(stride)
    }

    /// Sets a vector's state aside.
    pub(super) fn store(&self, vector: usize, state: &mut [f32]) {
        let (total, split) = state.split_at_mut(state.len() / 2);
        self.total.store(vector, total);
        self.split.store(vector, split);
    }

    /// Takes up what [`Scratch::store`] set aside; of the split only if it is still running.
    pub(super) fn load(&mut self, vector: usize, state: &[f32], running: bool) {
        let (total, split) = state.split_at(state.len() / 2);
        self.total.load(vector, total);
        if running {
            self.split.load(vector, split);
        }
    }
}
