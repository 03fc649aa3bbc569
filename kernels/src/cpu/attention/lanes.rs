//! The inner loops of attention, per instruction set.
#![allow(unsafe_code)]

use half::f16;
use half::slice::HalfFloatSliceExt as _;

use super::CHUNK;
use crate::cpu::exp::exp;
use crate::cpu::matmul::fused;

/// A set of inner loops. A type other than [`Portable`] may only be used where its instruction set was found.
pub(super) trait Lanes {
    /// Dot products of `q` with [`CHUNK`] keys: 8 partial sums over the dimensions, then a tree of neighbours.
    fn dots(q: &[f32], keys: &[f32]) -> [f32; CHUNK];
    /// The largest score.
    fn max(scores: &[f32; CHUNK]) -> f32;
    /// `exp(score - max)`.
    fn weights(scores: &[f32; CHUNK], max: f32) -> [f32; CHUNK];
    /// `acc += Σ weights[t] * values[t]`, `t` in order.
    fn add_weighted(acc: &mut [f32], weights: &[f32], values: &[f32]);
}

pub(super) struct Portable;

impl Lanes for Portable {
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

    fn weights(scores: &[f32; CHUNK], max: f32) -> [f32; CHUNK] {
        scores.map(|score| exp(score - max))
    }

    fn add_weighted(acc: &mut [f32], weights: &[f32], values: &[f32]) {
        for (weight, value) in weights.iter().zip(values.chunks_exact(acc.len())) {
            for (acc, value) in acc.iter_mut().zip(value) {
                *acc = fused(*weight, *value, *acc);
            }
        }
    }
}

pub(super) use Portable as Avx2;

/// Half precision to single, exactly.
pub(super) fn widen(bytes: &[u8], dst: &mut [f32]) {
    for (dst, bytes) in dst.as_chunks_mut::<8>().0.iter_mut().zip(bytes.as_chunks::<16>().0) {
        let bytes = bytes.as_chunks::<2>().0;
        let halves: [f16; 8] = std::array::from_fn(|i| f16::from_le_bytes(bytes[i]));
        halves.convert_to_f32_slice(dst);
    }
}
