//! One query vector at a time with AVX2.
#![allow(unsafe_code)]

use std::arch::x86_64::{
    __m256, _mm_cvtss_f32, _mm_max_ps, _mm_max_ss, _mm_movehdup_ps, _mm_movehl_ps, _mm256_add_ps,
    _mm256_castps256_ps128, _mm256_cvtph_ps, _mm256_extractf128_ps, _mm256_fmadd_ps, _mm256_hadd_ps,
    _mm256_max_ps, _mm256_permute2f128_ps, _mm256_set1_ps, _mm256_setzero_ps,
};

use super::{CHUNK, LANES, Steps};
use crate::cpu::vector::{load_f32x8, load_i128, store_f32x8};

/// AVX2, FMA and F16C, as found by [`Isa::usable`](crate::Isa::usable).
pub(in crate::cpu::attention) struct Avx2;

impl Steps for Avx2 {
    #[inline(always)]
    fn dots(q: &[f32], keys: &[f32]) -> [f32; CHUNK] {
        // SAFETY: `attention` uses this type only where `Isa::usable` found AVX2, FMA and F16C.
        unsafe { dots(q, keys) }
    }

    #[inline(always)]
    fn max(scores: &[f32; CHUNK]) -> f32 {
        // SAFETY: `attention` uses this type only where `Isa::usable` found AVX2, FMA and F16C.
        unsafe { max(scores) }
    }

    #[inline(always)]
    fn weights(scores: &mut [f32; CHUNK], top: f32, sums: &mut [f32; LANES]) {
        // SAFETY: `attention` uses this type only where `Isa::usable` found AVX2, FMA and F16C.
        unsafe { weights(scores, top, sums) }
    }

    #[inline(always)]
    fn shrink(values: &mut [f32], factor: f32) {
        // SAFETY: `attention` uses this type only where `Isa::usable` found AVX2, FMA and F16C.
        unsafe { shrink(values, factor) }
    }

    #[inline(always)]
    fn add_weighted(acc: &mut [f32], weights: &[f32], values: &[f32]) {
        // SAFETY: `attention` uses this type only where `Isa::usable` found AVX2, FMA and F16C.
        unsafe { add_weighted(acc, weights, values) }
    }

    #[inline(always)]
    fn widen(halves: &[u8], out: &mut [f32]) {
        // SAFETY: `attention` uses this type only where `Isa::usable` found AVX2, FMA and F16C.
        unsafe { widen(halves, out) }
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dots(q: &[f32], keys: &[f32]) -> [f32; CHUNK] {
    let (q, keys) = (q.as_chunks::<8>().0, keys.as_chunks::<8>().0);
    // The usual head dimensions are compiled with their own loops.
    match q.len() {
        8 => dots_of::<8>(q, keys),
        10 => dots_of::<10>(q, keys),
        12 => dots_of::<12>(q, keys),
        16 => dots_of::<16>(q, keys),
        32 => dots_of::<32>(q, keys),
        vectors => {
            let mut out = [0.0; CHUNK];
            for (half, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                let mut acc = [_mm256_setzero_ps(); 8];
                for (t, acc) in acc.iter_mut().enumerate() {
                    for (q, key) in q.iter().zip(&keys[(half * 8 + t) * vectors..][..vectors]) {
                        *acc = _mm256_fmadd_ps(load_f32x8(q), load_f32x8(key), *acc);
                    }
                }
                store_f32x8(sums(&acc), out);
            }
            out
        }
    }
}

/// Dot products where a key is `N` vectors.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dots_of<const N: usize>(q: &[[f32; 8]], keys: &[[f32; 8]]) -> [f32; CHUNK] {
    let q = &q.as_chunks::<N>().0[0];
    let halves = keys.as_chunks::<N>().0.as_chunks::<8>().0;
    let mut out = [0.0; CHUNK];
    for (out, keys) in out.as_chunks_mut::<8>().0.iter_mut().zip(halves) {
        let mut acc = [_mm256_setzero_ps(); 8];
        for i in 0..N {
            let q = load_f32x8(&q[i]);
            for t in 0..8 {
                acc[t] = _mm256_fmadd_ps(q, load_f32x8(&keys[t][i]), acc[t]);
            }
        }
        store_f32x8(sums(&acc), out);
    }
    out
}

/// The sum of each vector: neighbours within each half of it, then the halves, the tree that plain Rust adds in too.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn sums(acc: &[__m256; 8]) -> __m256 {
    let first = quads(acc[0], acc[1], acc[2], acc[3]);
    let last = quads(acc[4], acc[5], acc[6], acc[7]);
    let low = _mm256_permute2f128_ps::<0x20>(first, last);
    let high = _mm256_permute2f128_ps::<0x31>(first, last);
    _mm256_add_ps(low, high)
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn quads(a: __m256, b: __m256, c: __m256, d: __m256) -> __m256 {
    _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn max(scores: &[f32; CHUNK]) -> f32 {
    let [first, rest @ ..] = scores.as_chunks::<8>().0 else { return f32::NEG_INFINITY };
    let mut x = load_f32x8(first);
    for scores in rest {
        x = _mm256_max_ps(x, load_f32x8(scores));
    }
    let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    let x = _mm_max_ss(x, _mm_movehdup_ps(x));
    _mm_cvtss_f32(x)
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn weights(scores: &mut [f32; CHUNK], max: f32, sums: &mut [f32; LANES]) {
    super::weights(scores, max, sums);
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn shrink(values: &mut [f32], factor: f32) {
    for value in values {
        *value *= factor;
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add_weighted(acc: &mut [f32], weights: &[f32], values: &[f32]) {
    let (acc, values) = (acc.as_chunks_mut::<8>().0, values.as_chunks::<8>().0);
    match acc.len() {
        8 => add_of::<8>(acc, weights, values),
        10 => add_of::<10>(acc, weights, values),
        12 => add_of::<12>(acc, weights, values),
        16 => add_of::<16>(acc, weights, values),
        32 => add_of::<32>(acc, weights, values),
        vectors => {
            for (i, acc) in acc.iter_mut().enumerate() {
                let mut sum = load_f32x8(acc);
                for (weight, value) in weights.iter().zip(values.chunks_exact(vectors)) {
                    sum = _mm256_fmadd_ps(_mm256_set1_ps(*weight), load_f32x8(&value[i]), sum);
                }
                store_f32x8(sum, acc);
            }
        }
    }
}

/// Weighted values where a value is `N` vectors, 8 (and for the rest 2) of which stay in registers over all weights.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add_of<const N: usize>(acc: &mut [[f32; 8]], weights: &[f32], values: &[[f32; 8]]) {
    let values = values.as_chunks::<N>().0;
    let (body, tail) = acc.as_chunks_mut::<8>();
    let eights = body.len();
    for (index, acc) in body.iter_mut().enumerate() {
        columns(acc, weights, values.iter().map(|value| &value.as_chunks::<8>().0[index]));
    }
    for (index, acc) in tail.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        columns(acc, weights, values.iter().map(|value| &value.as_chunks::<2>().0[eights * 4 + index]));
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn columns<'a, const N: usize>(
    acc: &mut [[f32; 8]; N],
    weights: &[f32],
    values: impl Iterator<Item = &'a [[f32; 8]; N]>,
) {
    let mut sums = [_mm256_setzero_ps(); N];
    for i in 0..N {
        sums[i] = load_f32x8(&acc[i]);
    }
    for (weight, value) in weights.iter().zip(values) {
        let weight = _mm256_set1_ps(*weight);
        for i in 0..N {
            sums[i] = _mm256_fmadd_ps(weight, load_f32x8(&value[i]), sums[i]);
        }
    }
    for i in 0..N {
        store_f32x8(sums[i], &mut acc[i]);
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn widen(halves: &[u8], out: &mut [f32]) {
    for (out, halves) in out.as_chunks_mut::<8>().0.iter_mut().zip(halves.as_chunks::<16>().0) {
        store_f32x8(_mm256_cvtph_ps(load_i128(halves)), out);
    }
}
