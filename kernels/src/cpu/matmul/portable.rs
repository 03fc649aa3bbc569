//! The product in plain Rust.

use half::{bf16, f16};

use super::Run;
use crate::cpu::activations::{Activations, Block};
use crate::cpu::packed::{GROUP, PANEL, PackedType};

/// The panels of `run` with all rows of `x`. The shapes fit.
pub(super) fn panels(run: &mut Run<'_>, x: &Activations) {
    let ty = run.weights.layout().ty();
    for index in run.panels.clone() {
        let bytes = run.weights.panel(index);
        let units = bytes.chunks_exact(ty.unit_bytes());
        for row in 0..x.rows() {
            let units = units.clone();
            let mut acc = [0.0; PANEL];
            match ty {
                PackedType::F32 | PackedType::F16 | PackedType::BF16 => {
                    for (&x, unit) in x.floats(row).iter().zip(units) {
                        let weights = column(ty, unit);
                        for (acc, weight) in acc.iter_mut().zip(weights) {
                            *acc = rounded_once(weight, x, *acc);
                        }
                    }
                }
                PackedType::Q4G32 | PackedType::Q8G32 | PackedType::Q8G32Min | PackedType::Q8G16 => {
                    for ((codes, block), unit) in x.codes(row).iter().zip(x.blocks(row)).zip(units) {
                        group(ty, unit, codes, block, &mut acc);
                    }
                }
            }
            run.keep(index, row, &acc);
        }
    }
}

/// Whether the processor is sure to have a fused multiply-add.
const HAS_FUSED: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

/// `a * b + c`, rounded once where the processor does that as fast as twice.
#[inline(always)]
pub(in crate::cpu) fn fused(a: f32, b: f32, c: f32) -> f32 {
    if HAS_FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// `a * b + c`, rounded once: the bits of the sets that have this as an instruction.
#[inline(always)]
fn rounded_once(a: f32, b: f32, c: f32) -> f32 {
    if HAS_FUSED { a.mul_add(b, c) } else { emulated(a, b, c) }
}

/// In double precision the product is exact. The sum is rounded to odd, after which rounding to single precision is as if it were the first
/// (Boldo and Melquiond, 2008).
#[inline(always)]
fn emulated(a: f32, b: f32, c: f32) -> f32 {
    let (product, c) = (f64::from(a) * f64::from(b), f64::from(c));
    let sum = product + c;
    // What the sum lost, exactly (Knuth's two-sum).
    let part = sum - product;
    let rest = (product - (sum - part)) + (c - part);
    let bits = sum.to_bits();
    if rest == 0.0 || !rest.is_finite() || bits & 1 == 1 {
        return sum as f32;
    }
    let away = (rest > 0.0) == (sum > 0.0);
    f64::from_bits(if away { bits + 1 } else { bits - 1 }) as f32
}

fn column(ty: PackedType, unit: &[u8]) -> [f32; PANEL] {
    match ty {
        PackedType::F32 => {
            let elements = unit.as_chunks::<4>().0;
            std::array::from_fn(|lane| f32::from_le_bytes(elements[lane]))
        }
        PackedType::F16 => halves(unit),
        _ => {
            let elements = unit.as_chunks::<2>().0;
            std::array::from_fn(|lane| bf16::from_le_bytes(elements[lane]).to_f32())
        }
    }
}

fn halves(bytes: &[u8]) -> [f32; PANEL] {
    let elements = bytes.as_chunks::<2>().0;
    std::array::from_fn(|lane| f16::from_le_bytes(elements[lane]).to_f32())
}

fn group(ty: PackedType, unit: &[u8], x: &[i32; 8], block: &Block, acc: &mut [f32; PANEL]) {
    let scales = &unit[if ty == PackedType::Q4G32 { PANEL * GROUP / 2 } else { PANEL * GROUP }..];
    let first = halves(scales);
    match ty {
        PackedType::Q8G16 => {
            for (half, scales) in [first, halves(&scales[2 * PANEL..])].iter().enumerate() {
                let (dots, sums) = integers(ty, unit, x, 4 * half..4 * half + 4);
                centred(&dots, &sums, 16, scales, block, half, acc);
            }
        }
        PackedType::Q8G32 => {
            let (dots, sums) = integers(ty, unit, x, 0..8);
            centred(&dots, &sums, 32, &first, block, 2, acc);
        }
        _ => {
            let (dots, sums) = integers(ty, unit, x, 0..8);
            let minima = halves(&scales[2 * PANEL..]);
            accumulate(&dots, &sums, &first, block, acc);
            for (acc, min) in acc.iter_mut().zip(minima) {
                *acc = rounded_once(min, block.sum, *acc);
            }
        }
    }
}

/// As [`accumulate`], for `count` codes around 128, which are centred in integers: in single precision small codes would drown in their offset.
fn centred(
    dots: &[i32; PANEL],
    sums: &[i32; PANEL],
    count: i32,
    scales: &[f32; PANEL],
    block: &Block,
    part: usize,
    acc: &mut [f32; PANEL],
) {
    let dots = dots.map(|dot| dot + block.centres[part]);
    let sums = sums.map(|sum| sum - 128 * count);
    accumulate(&dots, &sums, scales, block, acc);
}

/// `Σ code·a.code` and `Σ code` per lane, over words `words` of 4 columns.
fn integers(
    ty: PackedType,
    unit: &[u8],
    x: &[i32; 8],
    words: std::ops::Range<usize>,
) -> ([i32; PANEL], [i32; PANEL]) {
    let (mut dots, mut sums) = ([0; PANEL], [0; PANEL]);
    for word in words {
        let x = x[word].to_le_bytes().map(|byte| i32::from(byte as i8));
        let (at, shift, mask) =
            if ty == PackedType::Q4G32 { (word / 2 * 64, word % 2 * 4, 15) } else { (word * 64, 0, 255) };
        let lanes = unit[at..at + 64].as_chunks::<4>().0;
        for ((dot, sum), lane) in dots.iter_mut().zip(&mut sums).zip(lanes) {
            for (x, byte) in x.iter().zip(lane) {
                let code = i32::from(byte >> shift & mask);
                *dot += x * code;
                *sum += code;
            }
        }
    }
    (dots, sums)
}

fn accumulate(
    dots: &[i32; PANEL],
    sums: &[i32; PANEL],
    scales: &[f32; PANEL],
    block: &Block,
    acc: &mut [f32; PANEL],
) {
    for lane in 0..PANEL {
        let inner = rounded_once(dots[lane] as f32, block.scale, sums[lane] as f32 * block.zero);
        acc[lane] = rounded_once(scales[lane], inner, acc[lane]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_emulated_step_has_the_bits_of_the_fused_one() {
        let edges = [
            0.0,
            -0.0,
            1.0,
            -1.0,
            0.1,
            3.0,
            1.5e-45,
            1.2e-38,
            1e-30,
            3.4e38,
            -3.4e38,
            16_777_217.0,
            1e-7,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::NAN,
            1.0 + f32::EPSILON,
            1.0 - f32::EPSILON,
        ];
        let mut state = 1_u32;
        let mut random = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f32::from_bits(state)
        };
        let wild: Vec<f32> = (0..60).map(|_| random()).collect();
        // Sums in which the product and the addend nearly cancel, or differ by so much that one decides the other's rounding.
        let near: Vec<f32> = (0..60).map(|_| 1.0 + random().to_bits() as f32 / 4e9).collect();
        for values in [&edges[..], &wild, &near] {
            for &a in values {
                for &b in values {
                    for c in values.iter().flat_map(|&c| [c, -a * b, c * 6e-8, c * 1e8]) {
                        let (want, got) = (a.mul_add(b, c), emulated(a, b, c));
                        assert!(
                            want.to_bits() == got.to_bits() || want.is_nan() && got.is_nan(),
                            "{a:e} * {b:e} + {c:e}: {got:e} for {want:e}"
                        );
                    }
                }
            }
        }
    }
}
