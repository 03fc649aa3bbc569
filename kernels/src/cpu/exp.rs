//! `exp` in single precision, the same bits on every path.

/// Adding it rounds to an integer, found in the low bits of the sum.
pub(crate) const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23
pub(crate) const LN2_HIGH: f32 = 0.693_359_4;
pub(crate) const LN2_LOW: f32 = -2.121_944_4e-4;
/// Below it the result is 0.
pub(crate) const LEAST: f32 = -87.336_54;
/// Factors of `(e^r - 1 - r) / r^2`, highest power first.
pub(crate) const POLYNOMIAL: [f32; 6] =
    [1.984_127e-4, 1.388_888_9e-3, 8.333_334e-3, 4.166_666_7e-2, 0.166_666_67, 0.5];

/// e^x within 2 units in the last place; 0 below about -87.3, infinity above about 88.7, NaN for NaN.
///
/// Only additions, multiplications and bit moves, each rounded once, without fused operations or branches: every instruction set gives
/// the same bits, and loops over it are vectorised. Range reduction by Cody and Waite, polynomial of degree 7 for `[-ln2/2, ln2/2]`.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // A NaN goes through `clamp`, and on through every operation below.
    let clamped = x.clamp(-87.5, 89.0);
    let rounded = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = (rounded.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let whole = rounded - ROUND;
    let r = (clamped - whole * LN2_HIGH) - whole * LN2_LOW;
    let [highest, rest @ ..] = POLYNOMIAL;
    let mut p = highest;
    for factor in rest {
        p = p * r + factor;
    }
    let e = (p * r) * r + r + 1.0;
    // 2^n in two factors, since n reaches 128 and -126.
    let half = n >> 1;
    let scale = |n: i32| f32::from_bits((n.wrapping_add(127) << 23) as u32);
    let y = e * scale(half) * scale(n.wrapping_sub(half));
    if x < LEAST { 0.0 } else { y }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let mut worst = 0.0_f64;
        for i in -87_000..88_700 {
            let x = i as f32 / 1000.0;
            let (got, want) = (f64::from(exp(x)), f64::from(x).exp());
            worst = worst.max(((got - want) / want).abs());
        }
        assert!(worst < 2.0 * f64::from(f32::EPSILON), "worst relative error {worst:e}");
    }

    #[test]
    fn exp_of_special_values_is_right() {
        assert_eq!(exp(0.0).to_bits(), 1.0_f32.to_bits());
        assert_eq!(exp(-0.0).to_bits(), 1.0_f32.to_bits());
        assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0.0_f32.to_bits());
        assert_eq!(exp(-1000.0).to_bits(), 0.0_f32.to_bits());
        assert!(exp(f32::INFINITY).is_infinite());
        assert!(exp(f32::NAN).is_nan());
    }
}
