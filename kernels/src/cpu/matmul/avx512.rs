//! The product with AVX-512 and VNNI: a panel (16 output rows) against up to [`TILE`] activation rows at a time.

use std::arch::x86_64::{
    __m512, __m512i, _mm512_add_epi8, _mm512_and_si512, _mm512_castsi512_ps, _mm512_cvtepi32_ps,
    _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_mul_ps,
    _mm512_set1_epi8, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps, _mm512_setzero_si512,
    _mm512_slli_epi32, _mm512_srli_epi16,
};

use super::Run;
use crate::cpu::activations::{Activations, Block};
use crate::cpu::packed::{GROUP, PANEL, PackedType};
use crate::cpu::vector::{load_i256, load_i512, store_f32x16};

/// Activation rows of a tile.
const TILE: usize = 8;

/// The panels of `run` with all rows of `x`. The shapes fit.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) fn panels(run: &mut Run<'_>, x: &Activations) {
    let ty = run.weights.layout().ty();
    for index in run.panels.clone() {
        let bytes = run.weights.panel(index);
        let mut out = [[0.0; PANEL]; TILE];
        let mut row = 0;
        while row < x.rows() {
            let rows = (x.rows() - row).min(TILE);
            match rows {
                1 => tile::<1>(ty, bytes, x, row, &mut out),
                2 => tile::<2>(ty, bytes, x, row, &mut out),
                3 => tile::<3>(ty, bytes, x, row, &mut out),
                4 => tile::<4>(ty, bytes, x, row, &mut out),
                5 => tile::<5>(ty, bytes, x, row, &mut out),
                6 => tile::<6>(ty, bytes, x, row, &mut out),
                7 => tile::<7>(ty, bytes, x, row, &mut out),
                _ => tile::<8>(ty, bytes, x, row, &mut out),
            }
            for (at, out) in out[..rows].iter().enumerate() {
                run.keep(index, row + at, out);
            }
            row += rows;
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn tile<const R: usize>(
    ty: PackedType,
    bytes: &[u8],
    x: &Activations,
    first: usize,
    out: &mut [[f32; PANEL]; TILE],
) {
    match ty {
        PackedType::F32 => f32s::<R>(bytes, x, first, out),
        PackedType::F16 => f16s::<R>(bytes, x, first, out),
        PackedType::BF16 => bf16s::<R>(bytes, x, first, out),
        PackedType::Q4G32 => q4::<R>(bytes, x, first, out),
        PackedType::Q8G32 => q8::<R, { PackedType::Q8G32.unit_bytes() }, false, false>(bytes, x, first, out),
        PackedType::Q8G32Min => {
            q8::<R, { PackedType::Q8G32Min.unit_bytes() }, true, false>(bytes, x, first, out);
        }
        PackedType::Q8G16 => q8::<R, { PackedType::Q8G16.unit_bytes() }, false, true>(bytes, x, first, out),
    }
}

/// The same number of units of each of `R` rows.
#[inline(always)]
fn rows<'a, T, const R: usize>(units: usize, row: impl Fn(usize) -> &'a [T]) -> [&'a [T]; R] {
    std::array::from_fn(|index| &row(index)[..units])
}

#[inline]
#[target_feature(enable = "avx512f")]
fn keep<const R: usize>(acc: &[__m512; R], out: &mut [[f32; PANEL]; TILE]) {
    for (acc, out) in acc.iter().zip(out) {
        store_f32x16(*acc, out);
    }
}

/// Expands to a product of unquantised weights: `$unit` bytes per column, widened to one vector by `$widen`.
macro_rules! floats {
    ($name:ident, $unit:literal, |$bytes:ident| $widen:expr) => {
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
        fn $name<const R: usize>(
            bytes: &[u8],
            x: &Activations,
            first: usize,
            out: &mut [[f32; PANEL]; TILE],
        ) {
            let columns = bytes.as_chunks::<$unit>().0;
            let x: [&[f32]; R] = rows(columns.len(), |index| x.floats(first + index));
            let mut acc = [_mm512_setzero_ps(); R];
            for (k, $bytes) in columns.iter().enumerate() {
                let weights: __m512 = $widen;
                for row in 0..R {
                    acc[row] = _mm512_fmadd_ps(weights, _mm512_set1_ps(x[row][k]), acc[row]);
                }
            }
            keep(&acc, out);
        }
    };
}

floats!(f32s, 64, |bytes| _mm512_castsi512_ps(load_i512(bytes)));
floats!(f16s, 32, |bytes| _mm512_cvtph_ps(load_i256(bytes)));
floats!(bf16s, 32, |bytes| {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(load_i256(bytes))))
});

/// 16 half-precision scales.
#[inline]
#[target_feature(enable = "avx512f")]
fn scales(bytes: &[u8], index: usize) -> __m512 {
    _mm512_cvtph_ps(load_i256(&bytes.as_chunks::<32>().0[index]))
}

/// `acc + scale * (block.scale * dot + block.zero * sum_of_codes)`, the order that every set keeps.
#[inline]
#[target_feature(enable = "avx512f")]
fn accumulate(acc: __m512, dot: __m512i, codes: __m512, scale: __m512, block: &Block) -> __m512 {
    let inner = _mm512_mul_ps(codes, _mm512_set1_ps(block.zero));
    let inner = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_set1_ps(block.scale), inner);
    _mm512_fmadd_ps(scale, inner, acc)
}

#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn q4<const R: usize>(bytes: &[u8], x: &Activations, first: usize, out: &mut [[f32; PANEL]; TILE]) {
    const UNIT: usize = PackedType::Q4G32.unit_bytes();
    let units = bytes.as_chunks::<UNIT>().0;
    let codes: [&[[i32; 8]]; R] = rows(units.len(), |index| x.codes(first + index));
    let blocks: [&[Block]; R] = rows(units.len(), |index| x.blocks(first + index));
    let nibble = _mm512_set1_epi8(15);
    let ones = _mm512_set1_epi8(1);
    let mut acc = [_mm512_setzero_ps(); R];
    for (index, unit) in units.iter().enumerate() {
        let vectors = unit.as_chunks::<64>().0;
        let mut dots = [_mm512_setzero_si512(); R];
        // Sums of codes stay below 256: 8 words of at most 15.
        let mut sums = _mm512_setzero_si512();
        for word in 0..4 {
            let both = load_i512(&vectors[word]);
            let low = _mm512_and_si512(both, nibble);
            let high = _mm512_and_si512(_mm512_srli_epi16::<4>(both), nibble);
            sums = _mm512_add_epi8(sums, _mm512_add_epi8(low, high));
            for row in 0..R {
                let x = &codes[row][index];
                dots[row] = _mm512_dpbusd_epi32(dots[row], low, _mm512_set1_epi32(x[2 * word]));
                dots[row] = _mm512_dpbusd_epi32(dots[row], high, _mm512_set1_epi32(x[2 * word + 1]));
            }
        }
        let sums = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_setzero_si512(), sums, ones));
        let tail = &unit[PANEL * GROUP / 2..];
        let (scale, min) = (scales(tail, 0), scales(tail, 1));
        for row in 0..R {
            let block = &blocks[row][index];
            let sum = accumulate(acc[row], dots[row], sums, scale, block);
            acc[row] = _mm512_fmadd_ps(min, _mm512_set1_ps(block.sum), sum);
        }
    }
    keep(&acc, out);
}

/// 8-bit codes: with minima or around 128, with one scale per 32 columns or (`SPLIT`) two.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn q8<const R: usize, const UNIT: usize, const MIN: bool, const SPLIT: bool>(
    bytes: &[u8],
    x: &Activations,
    first: usize,
    out: &mut [[f32; PANEL]; TILE],
) {
    let units = bytes.as_chunks::<UNIT>().0;
    let codes: [&[[i32; 8]]; R] = rows(units.len(), |index| x.codes(first + index));
    let blocks: [&[Block]; R] = rows(units.len(), |index| x.blocks(first + index));
    let ones = _mm512_set1_epi8(1);
    let parts = if SPLIT { 2 } else { 1 };
    let words = 8 / parts;
    let mut acc = [_mm512_setzero_ps(); R];
    for (index, unit) in units.iter().enumerate() {
        let vectors = unit.as_chunks::<64>().0;
        let tail = &unit[PANEL * GROUP..];
        for part in 0..parts {
            // Codes around 128 are centred in integers: in single precision small codes would drown in their offset.
            let mut sums = _mm512_set1_epi32(if MIN { 0 } else { -128 * 4 * words as i32 });
            let mut dots = [_mm512_setzero_si512(); R];
            if !MIN {
                for row in 0..R {
                    let centre = blocks[row][index].centres[if SPLIT { part } else { 2 }];
                    dots[row] = _mm512_set1_epi32(centre);
                }
            }
            for word in part * words..(part + 1) * words {
                let weights = load_i512(&vectors[word]);
                sums = _mm512_dpbusd_epi32(sums, weights, ones);
                for row in 0..R {
                    let x = _mm512_set1_epi32(codes[row][index][word]);
                    dots[row] = _mm512_dpbusd_epi32(dots[row], weights, x);
                }
            }
            let sums = _mm512_cvtepi32_ps(sums);
            let scale = scales(tail, part);
            for row in 0..R {
                let block = &blocks[row][index];
                acc[row] = accumulate(acc[row], dots[row], sums, scale, block);
                if MIN {
                    acc[row] = _mm512_fmadd_ps(scales(tail, 1), _mm512_set1_ps(block.sum), acc[row]);
                }
            }
        }
    }
    keep(&acc, out);
}
