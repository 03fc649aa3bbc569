//! Several query vectors at a time with AVX-512.
//!
//! Keys are turned once per chunk, so that a vector holds one dimension of all its positions: scores need no sums across lanes.
#![allow(unsafe_code)]

use std::arch::x86_64::{
    __m512, __m512i, _CMP_GT_OQ, _CMP_NLT_UQ, _MM_HINT_T1, _mm_prefetch, _mm256_castps_si256,
    _mm256_cvtph_ps, _mm512_add_ps, _mm512_castsi128_si512, _mm512_castsi512_ps, _mm512_cmp_ps_mask,
    _mm512_cvtph_ps, _mm512_fmadd_ps, _mm512_inserti32x4, _mm512_mask_cmp_ps_mask, _mm512_maskz_scalef_ps,
    _mm512_max_ps, _mm512_mul_ps, _mm512_permutexvar_epi64, _mm512_reduce_max_ps, _mm512_set1_ps,
    _mm512_setr_epi64, _mm512_setzero_ps, _mm512_sub_ps, _mm512_unpackhi_epi16, _mm512_unpackhi_epi32,
    _mm512_unpackhi_epi64, _mm512_unpacklo_epi16, _mm512_unpacklo_epi32, _mm512_unpacklo_epi64,
    _mm512_zextps256_ps512,
};

use std::ops::Range;

use super::{Lanes, singles};
use crate::cpu::attention::scratch::{Buffers, Partial};
use crate::cpu::attention::{CHUNK, LANES, PIECE, Sight};
use crate::cpu::exp;
use crate::cpu::kv::KvElement;
use crate::cpu::vector::{load_f32x8, load_f32x16, load_i128, load_i256, store_f32x16};

/// Query vectors that meet a chunk together: their scores (two vectors and two sums each) or 4 vectors of their weighted values stay in
/// registers.
const BLOCK: usize = 6;
/// Pieces of a chunk.
const PIECES: usize = CHUNK / PIECE;

/// AVX-512 F, BW, DQ and VL, as found by [`Isa::usable`](crate::Isa::usable).
pub(in crate::cpu::attention) struct Avx512;

impl Lanes for Avx512 {
    const WIDTH: usize = 16;
    const BLOCK: usize = BLOCK;

    /// `[blocks][head_dim][BLOCK]`.
    fn query(q: &mut [f32], vector: usize, x: &[f32], scale: f32) {
        let block = &mut q.as_chunks_mut::<BLOCK>().0[vector / BLOCK * x.len()..][..x.len()];
        for (q, x) in block.iter_mut().zip(x) {
            q[vector % BLOCK] = x * scale;
        }
    }

    /// `[head_dim][PIECE]`.
    fn keys(element: KvElement, bytes: &[u8], head_dim: usize, keys: &mut [f32]) {
        match element {
            // SAFETY: `attention` uses this type only where `Isa::usable` found AVX-512 F, BW, DQ and VL.
            KvElement::F16 => unsafe { turn_halves(head_dim, bytes, keys) },
            // SAFETY: as above.
            KvElement::F32 => unsafe { turn_singles(head_dim, bytes, keys) },
        }
    }

    fn values(element: KvElement, bytes: &[u8], head_dim: usize, values: &mut [f32]) {
        match element {
            // SAFETY: `attention` uses this type only where `Isa::usable` found AVX-512 F, BW, DQ and VL.
            KvElement::F16 => unsafe { widen(head_dim, bytes, values) },
            KvElement::F32 => {
                let rows = values.chunks_exact_mut(head_dim.next_multiple_of(16));
                rows.zip(bytes.chunks_exact(head_dim * 4)).for_each(|(row, bytes)| singles(bytes, row));
            }
        }
    }

    fn meet(sight: &Sight, head_dim: usize, buffers: &mut Buffers, partial: &mut Partial) {
        // SAFETY: `attention` uses this type only where `Isa::usable` found AVX-512 F, BW, DQ and VL.
        unsafe { meet(head_dim, sight, buffers, partial) }
    }

    fn expect(bytes: &[u8]) {
        for line in bytes.as_chunks::<64>().0 {
            // SAFETY: a prefetch reads nothing that the program can see; the address is that of a reference.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn turn_halves(head_dim: usize, bytes: &[u8], keys: &mut [f32]) {
    match head_dim {
        64 => turn_halves_of::<64>(head_dim, bytes, keys),
        128 => turn_halves_of::<128>(head_dim, bytes, keys),
        _ => turn_halves_of::<0>(head_dim, bytes, keys),
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn widen(head_dim: usize, bytes: &[u8], values: &mut [f32]) {
    match head_dim {
        64 => widen_of::<64>(head_dim, bytes, values),
        128 => widen_of::<128>(head_dim, bytes, values),
        _ => widen_of::<0>(head_dim, bytes, values),
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn meet(head_dim: usize, sight: &Sight, buffers: &mut Buffers, partial: &mut Partial) {
    match head_dim {
        64 => meet_of::<64>(head_dim, sight, buffers, partial),
        128 => meet_of::<128>(head_dim, sight, buffers, partial),
        _ => meet_of::<0>(head_dim, sight, buffers, partial),
    }
}

/// The head dimension, for the compiler a constant where `D` is not 0: the usual ones have their own loops.
const fn dimension<const D: usize>(head_dim: usize) -> usize {
    if D == 0 { head_dim } else { D }
}

/// Keys of half precision to `[head_dim][PIECE]`: turned 8 dimensions at a time, and widened afterwards, since widening from memory is
/// half the work of widening from a register.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn turn_halves_of<const D: usize>(head_dim: usize, bytes: &[u8], keys: &mut [f32]) {
    // Of a vector whose quarters hold positions `[0, 4)`, `[4, 8)` ... of two dimensions, to positions `[0, 16)` of each.
    let order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    let head_dim = dimension::<D>(head_dim);
    let row = head_dim / 8;
    let bytes = &bytes.as_chunks::<16>().0[..PIECE * row];
    let keys = &mut keys.as_chunks_mut::<16>().0[..head_dim];
    let turned = &mut keys[head_dim / 2..].as_chunks_mut::<4>().0[..row];
    for (i, turned) in turned.iter_mut().enumerate() {
        let (a, b) = (quarters(bytes, i, row), quarters(bytes, row + i, row));
        let (c, d) = (quarters(bytes, 2 * row + i, row), quarters(bytes, 3 * row + i, row));
        let (ab, cd) = (_mm512_unpacklo_epi16(a, b), _mm512_unpacklo_epi16(c, d));
        let (ab_high, cd_high) = (_mm512_unpackhi_epi16(a, b), _mm512_unpackhi_epi16(c, d));
        let pairs = [
            _mm512_unpacklo_epi32(ab, cd),
            _mm512_unpackhi_epi32(ab, cd),
            _mm512_unpacklo_epi32(ab_high, cd_high),
            _mm512_unpackhi_epi32(ab_high, cd_high),
        ];
        for (pair, turned) in pairs.into_iter().zip(turned) {
            store_f32x16(_mm512_castsi512_ps(_mm512_permutexvar_epi64(order, pair)), turned);
        }
    }
    // From the second half of the memory to all of it: what is written was read before.
    for pair in 0..head_dim / 2 {
        let halves = keys[head_dim / 2 + pair].as_chunks::<8>().0;
        let (first, second) = (load_f32x8(&halves[0]), load_f32x8(&halves[1]));
        store_f32x16(_mm512_cvtph_ps(_mm256_castps_si256(first)), &mut keys[2 * pair]);
        store_f32x16(_mm512_cvtph_ps(_mm256_castps_si256(second)), &mut keys[2 * pair + 1]);
    }
}

/// Keys of single precision to `[head_dim][PIECE]`, 4 dimensions at a time.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn turn_singles(head_dim: usize, bytes: &[u8], keys: &mut [f32]) {
    let row = head_dim / 4;
    let bytes = &bytes.as_chunks::<16>().0[..PIECE * row];
    let keys = &mut keys.as_chunks_mut::<16>().0.as_chunks_mut::<4>().0[..row];
    for (i, keys) in keys.iter_mut().enumerate() {
        let (a, b) = (quarters(bytes, i, row), quarters(bytes, row + i, row));
        let (c, d) = (quarters(bytes, 2 * row + i, row), quarters(bytes, 3 * row + i, row));
        let (ab, cd) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
        let (ab_high, cd_high) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
        store_f32x16(_mm512_castsi512_ps(_mm512_unpacklo_epi64(ab, cd)), &mut keys[0]);
        store_f32x16(_mm512_castsi512_ps(_mm512_unpackhi_epi64(ab, cd)), &mut keys[1]);
        store_f32x16(_mm512_castsi512_ps(_mm512_unpacklo_epi64(ab_high, cd_high)), &mut keys[2]);
        store_f32x16(_mm512_castsi512_ps(_mm512_unpackhi_epi64(ab_high, cd_high)), &mut keys[3]);
    }
}

/// The 16 bytes at `at` of rows 0, 4, 8 and 12, rows being so many times 16 bytes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn quarters(bytes: &[[u8; 16]], at: usize, row: usize) -> __m512i {
    let x = _mm512_castsi128_si512(load_i128(&bytes[at]));
    let x = _mm512_inserti32x4::<1>(x, load_i128(&bytes[at + 4 * row]));
    let x = _mm512_inserti32x4::<2>(x, load_i128(&bytes[at + 8 * row]));
    _mm512_inserti32x4::<3>(x, load_i128(&bytes[at + 12 * row]))
}

/// Values of half precision to rows padded with zeros to whole vectors.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn widen_of<const D: usize>(head_dim: usize, bytes: &[u8], values: &mut [f32]) {
    let head_dim = dimension::<D>(head_dim);
    let rows = values.as_chunks_mut::<16>().0.chunks_exact_mut(head_dim.div_ceil(16));
    for (row, bytes) in rows.zip(bytes.chunks_exact(head_dim * 2)) {
        let (whole, rest) = bytes.as_chunks::<32>();
        for (out, halves) in row.iter_mut().zip(whole) {
            store_f32x16(_mm512_cvtph_ps(load_i256(halves)), out);
        }
        if let (Some(halves), Some(out)) = (rest.first_chunk::<16>(), row.last_mut()) {
            store_f32x16(_mm512_zextps256_ps512(_mm256_cvtph_ps(load_i128(halves))), out);
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn meet_of<const D: usize>(head_dim: usize, sight: &Sight, buffers: &mut Buffers, partial: &mut Partial) {
    let head_dim = dimension::<D>(head_dim);
    let (first, second) = buffers.keys.as_chunks::<PIECE>().0.split_at(head_dim);
    let keys = [&first[..head_dim], &second[..head_dim]];
    let blocks = buffers.q.as_chunks::<BLOCK>().0.chunks_exact(head_dim);
    // A block of which some vectors are blind is computed as a whole; nobody reads their scores.
    for (q, scores) in blocks.zip(buffers.scores.chunks_mut(BLOCK)).skip(sight.blind() / BLOCK) {
        match scores.len() {
            1 => dots::<1>(q, keys, scores),
            2 => dots::<2>(q, keys, scores),
            3 => dots::<3>(q, keys, scores),
            4 => dots::<4>(q, keys, scores),
            5 => dots::<5>(q, keys, scores),
            _ => dots::<6>(q, keys, scores),
        }
    }
    for (vectors, seen) in sight.runs().take_while(|(_, seen)| *seen < CHUNK) {
        for scores in &mut buffers.scores[vectors] {
            scores[seen..].fill(f32::NEG_INFINITY);
        }
    }
    let columns = head_dim.div_ceil(16);
    let blind = sight.blind();
    for group in blind / 16..sight.vectors().div_ceil(16) {
        let vectors = blind.max(group * 16)..sight.vectors().min(group * 16 + 16);
        raise(group, vectors.clone(), &buffers.scores, columns, partial);
        let max = partial.max[vectors.clone()].chunks(4);
        let scores = buffers.scores[vectors.clone()].chunks_mut(4);
        for ((scores, max), sums) in scores.zip(max).zip(partial.sums[vectors].chunks_mut(4)) {
            match scores.len() {
                1 => weigh::<1>(scores, max, sums),
                2 => weigh::<2>(scores, max, sums),
                3 => weigh::<3>(scores, max, sums),
                _ => weigh::<4>(scores, max, sums),
            }
        }
    }
    let sums = partial.values.as_chunks_mut::<16>().0;
    let values = buffers.values.as_chunks::<16>().0;
    for (vectors, seen) in sight.runs() {
        let values = &values[..seen * columns];
        let weights = buffers.scores[vectors.clone()].chunks(BLOCK);
        let sums = &mut sums[vectors.start * columns..vectors.end * columns];
        for (weights, sums) in weights.zip(sums.chunks_mut(BLOCK * columns)) {
            match weights.len() {
                1 => add::<1>(weights, values, columns, sums),
                2 => add::<2>(weights, values, columns, sums),
                3 => add::<3>(weights, values, columns, sums),
                4 => add::<4>(weights, values, columns, sums),
                5 => add::<5>(weights, values, columns, sums),
                _ => add::<6>(weights, values, columns, sums),
            }
        }
    }
}

/// Scores of `R` query vectors: one sum over the even dimensions in order, one over the odd ones, then the two.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn dots<const R: usize>(q: &[[f32; BLOCK]], keys: [&[[f32; PIECE]]; PIECES], scores: &mut [[f32; CHUNK]]) {
    let mut even = [[_mm512_setzero_ps(); PIECES]; R];
    let mut odd = [[_mm512_setzero_ps(); PIECES]; R];
    let q = q.as_chunks::<2>().0;
    let keys = [&keys[0].as_chunks::<2>().0[..q.len()], &keys[1].as_chunks::<2>().0[..q.len()]];
    for i in 0..q.len() {
        let (x, y) = (load_f32x16(&keys[0][i][0]), load_f32x16(&keys[1][i][0]));
        for r in 0..R {
            let q = _mm512_set1_ps(q[i][0][r]);
            even[r][0] = _mm512_fmadd_ps(x, q, even[r][0]);
            even[r][1] = _mm512_fmadd_ps(y, q, even[r][1]);
        }
        let (x, y) = (load_f32x16(&keys[0][i][1]), load_f32x16(&keys[1][i][1]));
        for r in 0..R {
            let q = _mm512_set1_ps(q[i][1][r]);
            odd[r][0] = _mm512_fmadd_ps(x, q, odd[r][0]);
            odd[r][1] = _mm512_fmadd_ps(y, q, odd[r][1]);
        }
    }
    let scores = &mut scores[..R];
    for r in 0..R {
        let pieces = scores[r].as_chunks_mut::<PIECE>().0;
        store_f32x16(_mm512_add_ps(even[r][0], odd[r][0]), &mut pieces[0]);
        store_f32x16(_mm512_add_ps(even[r][1], odd[r][1]), &mut pieces[1]);
    }
}

/// Raises the running maxima of some query vectors of a group of 16 to their scores, and scales what was added up before.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn raise(
    group: usize,
    vectors: Range<usize>,
    scores: &[[f32; CHUNK]],
    columns: usize,
    partial: &mut Partial,
) {
    let mut tops = [f32::NEG_INFINITY; 16];
    for (vector, scores) in vectors.clone().zip(&scores[vectors]) {
        let pieces = scores.as_chunks::<PIECE>().0;
        tops[vector % 16] =
            _mm512_reduce_max_ps(_mm512_max_ps(load_f32x16(&pieces[0]), load_f32x16(&pieces[1])));
    }
    let max = &mut partial.max.as_chunks_mut::<16>().0[group];
    let before = load_f32x16(max);
    let after = _mm512_max_ps(load_f32x16(&tops), before);
    store_f32x16(after, max);
    // At first there is nothing to scale.
    let some = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(before, _mm512_set1_ps(f32::NEG_INFINITY));
    let mut raised = _mm512_mask_cmp_ps_mask::<_CMP_GT_OQ>(some, after, before);
    if raised == 0 {
        return;
    }
    let mut factors = [0.0; 16];
    let [[factor, _]] = exp_of_negative(&[[_mm512_sub_ps(before, after); PIECES]]);
    store_f32x16(factor, &mut factors);
    while raised != 0 {
        let lane = raised.trailing_zeros() as usize;
        raised &= raised - 1;
        let vector = group * 16 + lane;
        let factor = _mm512_set1_ps(factors[lane % 16]);
        let sums = &mut partial.sums[vector];
        store_f32x16(_mm512_mul_ps(load_f32x16(sums), factor), sums);
        for value in &mut partial.values.as_chunks_mut::<16>().0[vector * columns..][..columns] {
            store_f32x16(_mm512_mul_ps(load_f32x16(value), factor), value);
        }
    }
}

/// Scores of `R` query vectors become weights, added to `sums`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn weigh<const R: usize>(scores: &mut [[f32; CHUNK]], max: &[f32], sums: &mut [[f32; LANES]]) {
    let mut x = [[_mm512_setzero_ps(); PIECES]; R];
    let (scores, max, sums) = (&mut scores[..R], &max[..R], &mut sums[..R]);
    for r in 0..R {
        let pieces = scores[r].as_chunks::<PIECE>().0;
        let max = _mm512_set1_ps(max[r]);
        x[r] = [_mm512_sub_ps(load_f32x16(&pieces[0]), max), _mm512_sub_ps(load_f32x16(&pieces[1]), max)];
    }
    let weights = exp_of_negative(&x);
    for r in 0..R {
        let pieces = scores[r].as_chunks_mut::<PIECE>().0;
        store_f32x16(weights[r][0], &mut pieces[0]);
        store_f32x16(weights[r][1], &mut pieces[1]);
        let sum = _mm512_add_ps(_mm512_add_ps(load_f32x16(&sums[r]), weights[r][0]), weights[r][1]);
        store_f32x16(sum, &mut sums[r]);
    }
}

/// [`exp`](exp::exp) of values that are not positive, the same bits: the clamps only matter for results that the mask replaces.
///
/// One operation after the other for all vectors, since each must wait for the one before it.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn exp_of_negative<const R: usize>(x: &[[__m512; PIECES]; R]) -> [[__m512; PIECES]; R] {
    let round = _mm512_set1_ps(exp::ROUND);
    let mut whole = [[_mm512_setzero_ps(); PIECES]; R];
    let mut rest = [[_mm512_setzero_ps(); PIECES]; R];
    let mut p = [[_mm512_set1_ps(exp::POLYNOMIAL[0]); PIECES]; R];
    for r in 0..R {
        for i in 0..PIECES {
            let n = _mm512_mul_ps(x[r][i], _mm512_set1_ps(std::f32::consts::LOG2_E));
            whole[r][i] = _mm512_sub_ps(_mm512_add_ps(n, round), round);
        }
    }
    for r in 0..R {
        for i in 0..PIECES {
            let high = _mm512_mul_ps(whole[r][i], _mm512_set1_ps(exp::LN2_HIGH));
            let low = _mm512_mul_ps(whole[r][i], _mm512_set1_ps(exp::LN2_LOW));
            rest[r][i] = _mm512_sub_ps(_mm512_sub_ps(x[r][i], high), low);
        }
    }
    for k in 1..exp::POLYNOMIAL.len() {
        let factor = _mm512_set1_ps(exp::POLYNOMIAL[k]);
        for r in 0..R {
            for i in 0..PIECES {
                p[r][i] = _mm512_add_ps(_mm512_mul_ps(p[r][i], rest[r][i]), factor);
            }
        }
    }
    for r in 0..R {
        for i in 0..PIECES {
            let squared = _mm512_mul_ps(_mm512_mul_ps(p[r][i], rest[r][i]), rest[r][i]);
            let e = _mm512_add_ps(_mm512_add_ps(squared, rest[r][i]), _mm512_set1_ps(1.0));
            let normal = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x[r][i], _mm512_set1_ps(exp::LEAST));
            p[r][i] = _mm512_maskz_scalef_ps(normal, e, whole[r][i]);
        }
    }
    p
}

/// `sums += weights * values` of `R` query vectors, positions in order.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn add<const R: usize>(
    weights: &[[f32; CHUNK]],
    values: &[[f32; 16]],
    columns: usize,
    sums: &mut [[f32; 16]],
) {
    let mut column = 0;
    while column < columns {
        match columns - column {
            1 => add_of::<R, 1>(weights, values, columns, column, sums),
            2 => add_of::<R, 2>(weights, values, columns, column, sums),
            3 => add_of::<R, 3>(weights, values, columns, column, sums),
            _ => add_of::<R, 4>(weights, values, columns, column, sums),
        }
        column += 4;
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
fn add_of<const R: usize, const C: usize>(
    weights: &[[f32; CHUNK]],
    values: &[[f32; 16]],
    columns: usize,
    column: usize,
    sums: &mut [[f32; 16]],
) {
    let weights = &weights[..R];
    let mut acc = [[_mm512_setzero_ps(); C]; R];
    for r in 0..R {
        let sums = &sums[r * columns + column..][..C];
        for c in 0..C {
            acc[r][c] = load_f32x16(&sums[c]);
        }
    }
    for (t, value) in values.chunks_exact(columns).enumerate().take(CHUNK) {
        let value = &value[column..][..C];
        let mut x = [_mm512_setzero_ps(); C];
        for c in 0..C {
            x[c] = load_f32x16(&value[c]);
        }
        for r in 0..R {
            let weight = _mm512_set1_ps(weights[r][t]);
            for c in 0..C {
                acc[r][c] = _mm512_fmadd_ps(weight, x[c], acc[r][c]);
            }
        }
    }
    for r in 0..R {
        let sums = &mut sums[r * columns + column..][..C];
        for c in 0..C {
            store_f32x16(acc[r][c], &mut sums[c]);
        }
    }
}
