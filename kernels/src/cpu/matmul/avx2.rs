//! The product with AVX2, FMA and F16C: half a panel (8 output rows) against up to [`TILE`] activation rows at a time.
//!
//! With AVX-VNNI ([`vnni`]) one instruction adds four products of bytes to a sum of 32 bits. Without ([`plain`]) sums have 16 bits at first.
//! 4-bit codes: `maddubs` gives sums of two products of at most 15 · 127; 16 of them (a group of 32 columns has 8 words of 4, two
//! products per 16-bit lane each) stay at 30,480, so a whole group adds up in 16 bits. 8-bit codes are split into two nibbles, each
//! treated so: the same number of instructions as widening to 16 bits, and no saturation.

use std::arch::x86_64::{
    __m128i, __m256, __m256i, _mm256_add_epi8, _mm256_add_epi16, _mm256_add_epi32, _mm256_and_si256,
    _mm256_castsi256_ps, _mm256_cvtepi32_ps, _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_dpbusd_avx_epi32,
    _mm256_fmadd_ps, _mm256_madd_epi16, _mm256_maddubs_epi16, _mm256_mul_ps, _mm256_set1_epi8,
    _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_ps, _mm256_setzero_ps, _mm256_setzero_si256,
    _mm256_slli_epi32, _mm256_srli_epi16,
};

use super::Run;
use crate::cpu::activations::{Activations, Block};
use crate::cpu::packed::{GROUP, PANEL, PackedType};
use crate::cpu::vector::{load_i128, load_i256, store_f32x8};

/// Activation rows of the largest tile.
const TILE: usize = 8;

/// Output rows of half a panel.
const HALF: usize = PANEL / 2;

/// The same number of units of each of `R` rows.
#[inline(always)]
fn rows<'a, T, const R: usize>(units: usize, row: impl Fn(usize) -> &'a [T]) -> [&'a [T]; R] {
    std::array::from_fn(|index| &row(index)[..units])
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn keep<const R: usize>(acc: &[__m256; R], half: usize, out: &mut [[f32; PANEL]; TILE]) {
    for (acc, out) in acc.iter().zip(out) {
        store_f32x8(*acc, &mut out.as_chunks_mut::<HALF>().0[half]);
    }
}

/// Expands to a product of unquantised weights: `$unit` bytes per column, widened to two vectors by `$widen`.
macro_rules! floats {
    ($name:ident, $unit:literal, |$bytes:ident| $widen:expr) => {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn $name<const R: usize>(
            bytes: &[u8],
            x: &Activations,
            first: usize,
            out: &mut [[f32; PANEL]; TILE],
        ) {
            let columns = bytes.as_chunks::<$unit>().0;
            let x: [&[f32]; R] = rows(columns.len(), |index| x.floats(first + index));
            let mut low = [_mm256_setzero_ps(); R];
            let mut high = [_mm256_setzero_ps(); R];
            for (k, $bytes) in columns.iter().enumerate() {
                let weights: [__m256; 2] = $widen;
                for row in 0..R {
                    let x = _mm256_set1_ps(x[row][k]);
                    low[row] = _mm256_fmadd_ps(weights[0], x, low[row]);
                    high[row] = _mm256_fmadd_ps(weights[1], x, high[row]);
                }
            }
            keep(&low, 0, out);
            keep(&high, 1, out);
        }
    };
}

floats!(f32s, 64, |bytes| {
    let halves = bytes.as_chunks::<32>().0;
    [_mm256_castsi256_ps(load_i256(&halves[0])), _mm256_castsi256_ps(load_i256(&halves[1]))]
});
floats!(f16s, 32, |bytes| {
    let halves = bytes.as_chunks::<16>().0;
    [_mm256_cvtph_ps(load_i128(&halves[0])), _mm256_cvtph_ps(load_i128(&halves[1]))]
});
floats!(bf16s, 32, |bytes| {
    let halves = bytes.as_chunks::<16>().0;
    [bf16_to_ps(load_i128(&halves[0])), bf16_to_ps(load_i128(&halves[1]))]
});

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn bf16_to_ps(halves: __m128i) -> __m256 {
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)))
}

/// 8 half-precision scales.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn scales(bytes: &[u8], index: usize) -> __m256 {
    _mm256_cvtph_ps(load_i128(&bytes.as_chunks::<16>().0[index]))
}

/// `acc + scale * (block.scale * dot + block.zero * sum_of_codes)`, the order that every set keeps.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn accumulate(acc: __m256, dot: __m256i, codes: __m256, scale: __m256, block: &Block) -> __m256 {
    let inner = _mm256_mul_ps(codes, _mm256_set1_ps(block.zero));
    let inner = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), _mm256_set1_ps(block.scale), inner);
    _mm256_fmadd_ps(scale, inner, acc)
}

/// Expands to a module with all products, for instructions of the set `$features`.
///
/// `$add` adds products of unsigned and signed bytes to sums, `$widen` makes those sums of 32 bits. `$whole` says whether sums hold products of
/// whole 8-bit codes, and `$rows` how many rows of those a tile has.
macro_rules! set {
    (
        $name:ident, $features:literal, whole: $whole:literal, rows: $rows:literal,
        |$sum:ident, $codes:ident, $x:ident| $add:expr, |$narrow:ident| $widen:expr
    ) => {
        pub(super) mod $name {
            use super::*;

            const WHOLE: bool = $whole;

            /// Activation rows of a tile: as many as the 16 registers hold sums for.
            const fn tile_rows(ty: PackedType) -> usize {
                match ty {
                    PackedType::F32 | PackedType::F16 | PackedType::BF16 => 5,
                    PackedType::Q4G32 => TILE,
                    PackedType::Q8G32 | PackedType::Q8G32Min | PackedType::Q8G16 => $rows,
                }
            }

            #[inline]
            #[target_feature(enable = $features)]
            fn add_products($sum: __m256i, $codes: __m256i, $x: __m256i) -> __m256i {
                $add
            }

            #[inline]
            #[target_feature(enable = $features)]
            fn widen($narrow: __m256i) -> __m256i {
                $widen
            }

            /// The panels of `run` with all rows of `x`. The shapes fit.
            #[target_feature(enable = $features)]
            pub(in crate::cpu::matmul) fn panels(run: &mut Run<'_>, x: &Activations) {
                let ty = run.weights.layout().ty();
                for index in run.panels.clone() {
                    let bytes = run.weights.panel(index);
                    let mut out = [[0.0; PANEL]; TILE];
                    let mut row = 0;
                    while row < x.rows() {
                        let rows = (x.rows() - row).min(tile_rows(ty));
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

            #[target_feature(enable = $features)]
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
                    PackedType::Q8G32 => {
                        q8::<R, { PackedType::Q8G32.unit_bytes() }, false, false>(bytes, x, first, out)
                    }
                    PackedType::Q8G32Min => {
                        q8::<R, { PackedType::Q8G32Min.unit_bytes() }, true, false>(bytes, x, first, out);
                    }
                    PackedType::Q8G16 => {
                        q8::<R, { PackedType::Q8G16.unit_bytes() }, false, true>(bytes, x, first, out)
                    }
                }
            }

            #[target_feature(enable = $features)]
            fn q4<const R: usize>(
                bytes: &[u8],
                x: &Activations,
                first: usize,
                out: &mut [[f32; PANEL]; TILE],
            ) {
                const UNIT: usize = PackedType::Q4G32.unit_bytes();
                let units = bytes.as_chunks::<UNIT>().0;
                let codes: [&[[i32; 8]]; R] = rows(units.len(), |index| x.codes(first + index));
                let blocks: [&[Block]; R] = rows(units.len(), |index| x.blocks(first + index));
                let nibble = _mm256_set1_epi8(15);
                let ones8 = _mm256_set1_epi8(1);
                let ones16 = _mm256_set1_epi16(1);
                for half in 0..2 {
                    let mut acc = [_mm256_setzero_ps(); R];
                    for (index, unit) in units.iter().enumerate() {
                        let vectors = unit.as_chunks::<32>().0;
                        let mut dots = [_mm256_setzero_si256(); R];
                        // Sums of codes stay below 256: 8 words of at most 15.
                        let mut sums = _mm256_setzero_si256();
                        for word in 0..4 {
                            let both = load_i256(&vectors[2 * word + half]);
                            let low = _mm256_and_si256(both, nibble);
                            let high = _mm256_and_si256(_mm256_srli_epi16::<4>(both), nibble);
                            sums = _mm256_add_epi8(sums, _mm256_add_epi8(low, high));
                            for row in 0..R {
                                let x = &codes[row][index];
                                dots[row] = add_products(dots[row], low, _mm256_set1_epi32(x[2 * word]));
                                dots[row] = add_products(dots[row], high, _mm256_set1_epi32(x[2 * word + 1]));
                            }
                        }
                        let sums = _mm256_madd_epi16(_mm256_maddubs_epi16(sums, ones8), ones16);
                        let sums = _mm256_cvtepi32_ps(sums);
                        let tail = &unit[PANEL * GROUP / 2..];
                        let (scale, min) = (scales(tail, half), scales(tail, 2 + half));
                        for row in 0..R {
                            let block = &blocks[row][index];
                            let dot = widen(dots[row]);
                            let sum = accumulate(acc[row], dot, sums, scale, block);
                            acc[row] = _mm256_fmadd_ps(min, _mm256_set1_ps(block.sum), sum);
                        }
                    }
                    keep(&acc, half, out);
                }
            }

            /// 8-bit codes: with minima or around 128, with one scale per 32 columns or (`SPLIT`) two.
            #[target_feature(enable = $features)]
            fn q8<const R: usize, const UNIT: usize, const MIN: bool, const SPLIT: bool>(
                bytes: &[u8],
                x: &Activations,
                first: usize,
                out: &mut [[f32; PANEL]; TILE],
            ) {
                let units = bytes.as_chunks::<UNIT>().0;
                let codes: [&[[i32; 8]]; R] = rows(units.len(), |index| x.codes(first + index));
                let blocks: [&[Block]; R] = rows(units.len(), |index| x.blocks(first + index));
                let nibble = _mm256_set1_epi8(15);
                let ones8 = _mm256_set1_epi8(1);
                let sixteens = _mm256_set1_epi16(16);
                let parts = if SPLIT { 2 } else { 1 };
                let words = 8 / parts;
                for half in 0..2 {
                    let mut acc = [_mm256_setzero_ps(); R];
                    for (index, unit) in units.iter().enumerate() {
                        let vectors = unit.as_chunks::<32>().0;
                        let tail = &unit[PANEL * GROUP..];
                        for part in 0..parts {
                            // Of whole codes, or of their low and high nibbles.
                            let mut lows = [_mm256_setzero_si256(); R];
                            let mut highs = [_mm256_setzero_si256(); R];
                            let mut sums = _mm256_setzero_si256();
                            for word in part * words..(part + 1) * words {
                                let both = load_i256(&vectors[2 * word + half]);
                                let low = _mm256_and_si256(both, nibble);
                                let high = _mm256_and_si256(_mm256_srli_epi16::<4>(both), nibble);
                                sums = add_products(sums, both, ones8);
                                for row in 0..R {
                                    let x = _mm256_set1_epi32(codes[row][index][word]);
                                    if WHOLE {
                                        lows[row] = add_products(lows[row], both, x);
                                    } else {
                                        lows[row] = add_products(lows[row], low, x);
                                        highs[row] = add_products(highs[row], high, x);
                                    }
                                }
                            }
                            let sums = widen(sums);
                            let scale = scales(tail, 2 * part + half);
                            // Codes around 128 are centred in integers: in single precision small codes would drown in their offset.
                            let offset = _mm256_set1_epi32(if MIN { 0 } else { -128 * 4 * words as i32 });
                            let sums = _mm256_cvtepi32_ps(_mm256_add_epi32(sums, offset));
                            for row in 0..R {
                                let block = &blocks[row][index];
                                let mut dot = widen(lows[row]);
                                if !WHOLE {
                                    dot = _mm256_add_epi32(dot, _mm256_madd_epi16(highs[row], sixteens));
                                }
                                acc[row] = if MIN {
                                    let sum = accumulate(acc[row], dot, sums, scale, block);
                                    _mm256_fmadd_ps(scales(tail, 2 + half), _mm256_set1_ps(block.sum), sum)
                                } else {
                                    let centre = block.centres[if SPLIT { part } else { 2 }];
                                    let dot = _mm256_add_epi32(dot, _mm256_set1_epi32(centre));
                                    accumulate(acc[row], dot, sums, scale, block)
                                };
                            }
                        }
                    }
                    keep(&acc, half, out);
                }
            }
        }
    };
}

set! {
    plain, "avx2,fma,f16c", whole: false, rows: 4,
    |sum, codes, x| _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, x)),
    |sum| _mm256_madd_epi16(sum, _mm256_set1_epi16(1))
}

set! {
    vnni, "avx2,fma,f16c,avxvnni", whole: true, rows: 6,
    |sum, codes, x| _mm256_dpbusd_avx_epi32(sum, codes, x),
    |sum| sum
}
