//! The inner loops of attention, per instruction set.

use half::f16;

use super::scratch::{Buffers, Partial};
use super::{CHUNK, LANES, Sight};
use crate::cpu::exp::exp;
use crate::cpu::kv::KvElement;
use crate::cpu::matmul::fused;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::Avx512;

/// How a tile meets a chunk. A type other than [`Portable`] may only be used where its instruction set was found.
///
/// What a query vector computes from a chunk, and in which order, depends on nothing but the two: not on the tile's other vectors.
pub(super) trait Lanes {
    /// Values of a position, and weighted sums of them, are padded to a multiple of so many elements.
    const WIDTH: usize;
    /// Query vectors are laid out in blocks of so many; [`Buffers::q`] holds whole blocks.
    const BLOCK: usize;
    /// Puts query vector `vector`, times `scale`, into its place.
    fn query(q: &mut [f32], vector: usize, x: &[f32], scale: f32);
    /// Takes the keys of a piece of a chunk.
    fn keys(element: KvElement, bytes: &[u8], head_dim: usize, keys: &mut [f32]);
    /// Takes the values of a piece, one position after the other, each padded.
    fn values(element: KvElement, bytes: &[u8], head_dim: usize, values: &mut [f32]);
    /// Scores, weights and weighted values of all query vectors of a tile that see anything of the chunk.
    fn meet(sight: &Sight, head_dim: usize, buffers: &mut Buffers, partial: &mut Partial);
    /// Tells the processor that `bytes` will be read soon.
    fn expect(bytes: &[u8]);
}

/// Loops over one query vector. Keys, values and queries lie as rows of `head_dim` elements.
trait Steps {
    /// Dot products of `q` with [`CHUNK`] keys: 8 partial sums over the dimensions, then a tree of neighbours.
    fn dots(q: &[f32], keys: &[f32]) -> [f32; CHUNK];
    /// The largest score.
    fn max(scores: &[f32; CHUNK]) -> f32;
    /// Scores become `exp(score - max)`, added to `sums` lane by lane.
    fn weights(scores: &mut [f32; CHUNK], max: f32, sums: &mut [f32; LANES]);
    /// `values *= factor`.
    fn shrink(values: &mut [f32], factor: f32);
    /// `acc += Σ weights[t] * values[t]`, `t` in order.
    fn add_weighted(acc: &mut [f32], weights: &[f32], values: &[f32]);
    /// Half precision to single, exactly; whole vectors of 8.
    fn widen(halves: &[u8], out: &mut [f32]);
}

impl<S: Steps> Lanes for S {
    const WIDTH: usize = 8;
    const BLOCK: usize = 1;

    fn query(q: &mut [f32], vector: usize, x: &[f32], scale: f32) {
        for (q, x) in q[vector * x.len()..].iter_mut().zip(x) {
            *q = x * scale;
        }
    }

    fn keys(element: KvElement, bytes: &[u8], _: usize, keys: &mut [f32]) {
        match element {
            KvElement::F16 => S::widen(bytes, keys),
            KvElement::F32 => singles(bytes, keys),
        }
    }

    fn values(element: KvElement, bytes: &[u8], head_dim: usize, values: &mut [f32]) {
        Self::keys(element, bytes, head_dim, values);
    }

    fn meet(sight: &Sight, d: usize, buffers: &mut Buffers, partial: &mut Partial) {
        // Three passes, so that the processor works on several vectors at once.
        for (vectors, seen) in sight.runs() {
            for vector in vectors {
                let scores = &mut buffers.scores[vector];
                *scores = S::dots(&buffers.q[vector * d..][..d], &buffers.keys);
                scores[seen..].fill(f32::NEG_INFINITY);
            }
        }
        for (vectors, _) in sight.runs() {
            for vector in vectors {
                let (scores, sums) = (&mut buffers.scores[vector], &mut partial.sums[vector]);
                let (top, max) = (S::max(scores), &mut partial.max[vector]);
                if top > *max {
                    let factor = exp(*max - top);
                    *max = top;
                    S::shrink(sums, factor);
                    S::shrink(&mut partial.values[vector * d..][..d], factor);
                }
                S::weights(scores, *max, sums);
            }
        }
        for (vectors, seen) in sight.runs() {
            for vector in vectors {
                let weights = &buffers.scores[vector][..seen];
                S::add_weighted(&mut partial.values[vector * d..][..d], weights, &buffers.values);
            }
        }
    }

    fn expect(_: &[u8]) {}
}

fn singles(bytes: &[u8], out: &mut [f32]) {
    for (x, bytes) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *x = f32::from_le_bytes(*bytes);
    }
}

#[inline(always)]
fn weights(scores: &mut [f32; CHUNK], max: f32, sums: &mut [f32; LANES]) {
    for score in &mut *scores {
        *score = exp(*score - max);
    }
    for scores in scores.as_chunks::<LANES>().0 {
        sums.iter_mut().zip(scores).for_each(|(sum, score)| *sum += score);
    }
}

pub(super) struct Portable;

impl Steps for Portable {
    fn dots(q: &[f32], keys: &[f32]) -> [f32; CHUNK] {
        let (q, d) = (q.as_chunks::<8>().0, q.len());
        std::array::from_fn(|t| {
            let mut acc = [0.0_f32; 8];
            for (q, k) in q.iter().zip(keys[t * d..][..d].as_chunks::<8>().0) {
                for lane in 0..8 {
                    acc[lane] = fused(q[lane], k[lane], acc[lane]);
                }
            }
            let [a, b, c, d, e, f, g, h] = acc;
            ((a + b) + (c + d)) + ((e + f) + (g + h))
        })
    }

    fn max(scores: &[f32; CHUNK]) -> f32 {
        scores.iter().copied().fold(f32::NEG_INFINITY, f32::max)
    }

    fn weights(scores: &mut [f32; CHUNK], max: f32, sums: &mut [f32; LANES]) {
        weights(scores, max, sums);
    }

    fn shrink(values: &mut [f32], factor: f32) {
        for value in values {
            *value *= factor;
        }
    }

    fn add_weighted(acc: &mut [f32], weights: &[f32], values: &[f32]) {
        for (weight, value) in weights.iter().zip(values.chunks_exact(acc.len())) {
            for (acc, value) in acc.iter_mut().zip(value) {
                *acc = fused(*weight, *value, *acc);
            }
        }
    }

    fn widen(halves: &[u8], out: &mut [f32]) {
        for (out, half) in out.iter_mut().zip(halves.as_chunks::<2>().0) {
            *out = f16::from_le_bytes(*half).to_f32_const();
        }
    }
}
