//! Keys and values of a GPU in eight bits: what an element is, and a row's scale.
//!
//! **Owns** the rounding to e4m3 (OFP8: four bits of exponent with a bias of 7, three of fraction, no infinity) and what bytes a row takes. It is the
//! twin, bit for bit, of what `kernels/cuda/rope.cu` writes. **Never** touches a device.

/// The largest magnitude.
const MOST: f32 = 448.0;
/// The largest magnitude of a row below which all of it counts as zero: the reciprocal of its scale would be none.
const LEAST_ROW: f32 = f32::from_bits((127 - 100) << 23);

/// How an element of keys and values is kept on a GPU.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum DeviceKvElement {
    /// As activations are: 16 bits.
    Half,
    /// E4m3, with a scale in single precision for each token and KV head, of keys and of values.
    E4m3,
}

impl DeviceKvElement {
    /// Bytes of an element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Half => 2,
            Self::E4m3 => 1,
        }
    }

    /// Bytes of a row's scale.
    #[must_use]
    pub const fn scale_bytes(self) -> usize {
        match self {
            Self::Half => 0,
            Self::E4m3 => size_of::<f32>(),
        }
    }

    /// Bytes of a row of `head_dim` elements, its scale included.
    #[must_use]
    pub const fn row_bytes(self, head_dim: usize) -> usize {
        head_dim * self.bytes() + self.scale_bytes()
    }
}

/// The nearest e4m3, ties to even; what is too large becomes the largest.
#[must_use]
pub fn e4m3_of(x: f32) -> u8 {
    let sign = (x.to_bits() >> 24) as u8 & 0x80;
    let magnitude = x.abs();
    if magnitude.is_nan() {
        return 0x7f;
    }
    let least_normal = 1.0 / 64.0;
    let bits = if magnitude >= MOST {
        0x7e
    } else if magnitude < least_normal {
        // Multiples of 2^-9; the eighth is the smallest with an exponent of its own.
        (magnitude * 512.0).round_ties_even() as u32
    } else {
        let bits = magnitude.to_bits();
        let rounded = (bits + 0x7_ffff + (bits >> 20 & 1)) >> 20;
        (rounded - ((127 - 7) << 3)).min(0x7e)
    };
    sign | bits as u8
}

/// The value of an e4m3.
#[must_use]
pub fn e4m3_value(bits: u8) -> f32 {
    let (exponent, fraction) = (u32::from(bits >> 3 & 0xf), u32::from(bits & 7));
    let magnitude = match (exponent, fraction) {
        (15, 7) => f32::NAN,
        (0, _) => fraction as f32 / 512.0,
        _ => f32::from_bits(((exponent + 127 - 7) << 23) | (fraction << 20)),
    };
    if bits & 0x80 == 0 { magnitude } else { -magnitude }
}

/// A row in e4m3, and its scale: elements times the scale are the values. The scale is NaN where a value is not finite, and 0 where all count as zero.
#[must_use]
pub fn quantize_e4m3(row: &[f32]) -> (f32, Vec<u8>) {
    let most = row.iter().map(|x| x.abs().to_bits()).max().unwrap_or(0);
    let largest = f32::from_bits(most);
    let (scale, inverse) = if !largest.is_finite() {
        (f32::NAN, 0.0)
    } else if largest < LEAST_ROW {
        (0.0, 0.0)
    } else {
        (largest / MOST, MOST / largest)
    };
    (scale, row.iter().map(|x| e4m3_of(x * inverse)).collect())
}

#[cfg(test)]
#[allow(clippy::float_cmp, reason = "what is compared is exact")]
mod tests {
    use super::*;

    /// All that are no NaN, by value.
    fn all() -> Vec<(f32, u8)> {
        let mut all: Vec<(f32, u8)> =
            (0..=255).filter(|b| b & 0x7f != 0x7f).map(|bits| (e4m3_value(bits), bits)).collect();
        all.sort_by(|a, b| a.0.total_cmp(&b.0));
        all
    }

    #[test]
    fn every_value_is_its_own_nearest_and_the_ends_are_those_of_the_format() {
        for (value, bits) in all() {
            assert_eq!(e4m3_of(value), bits, "{value}");
        }
        assert_eq!((e4m3_value(0x7e), e4m3_value(0x01), e4m3_value(0x08)), (448.0, 1.0 / 512.0, 1.0 / 64.0));
        assert!(e4m3_value(0x7f).is_nan() && e4m3_value(0xff).is_nan());
        assert_eq!((e4m3_of(f32::NAN), e4m3_of(f32::INFINITY), e4m3_of(-1e9)), (0x7f, 0x7e, 0xfe));
        assert_eq!((e4m3_of(460.0), e4m3_of(479.9)), (0x7e, 0x7e));
    }

    #[test]
    fn what_lies_between_two_values_becomes_the_nearer_and_in_the_middle_the_even_one() {
        for pair in all().windows(2) {
            let [(low, low_bits), (high, high_bits)] = [pair[0], pair[1]];
            if low == high {
                continue;
            }
            let middle = f32::midpoint(low, high);
            let even = if low_bits & 1 == 0 { low } else { high };
            assert_eq!(e4m3_value(e4m3_of(middle)), even, "{low} {high}");
            let step = (high - low) / 1000.0;
            assert_eq!(e4m3_value(e4m3_of(middle - step)), low, "{low} {high}");
            assert_eq!(e4m3_value(e4m3_of(middle + step)), high, "{low} {high} {high_bits}");
        }
    }

    #[test]
    fn a_rows_largest_value_is_the_largest_element_and_others_are_off_by_a_sixteenth_at_most() {
        let row: Vec<f32> = (0..96).map(|i| ((i * 37 % 96) as f32 - 40.0) * 0.013).collect();
        let (scale, elements) = quantize_e4m3(&row);
        let largest = row.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
        assert_eq!(scale, largest / 448.0);
        for (x, &bits) in row.iter().zip(&elements) {
            let found = e4m3_value(bits) * scale;
            assert!((found - x).abs() <= x.abs() / 16.0 + scale / 1024.0, "{x} {found}");
        }
        assert!(elements.iter().any(|bits| bits & 0x7f == 0x7e));
    }

    #[test]
    fn rows_of_zeros_have_no_scale_and_rows_that_are_not_finite_have_nan() {
        assert_eq!(quantize_e4m3(&[0.0, -0.0, 1e-38]), (0.0, vec![0, 0x80, 0]));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(quantize_e4m3(&[1.0, bad, 2.0]).0.is_nan(), "{bad}");
        }
        let (scale, elements) = quantize_e4m3(&[f32::MAX, f32::MAX / 2.0]);
        assert_eq!((scale, elements), (f32::MAX / 448.0, vec![0x7e, 0x76]));
    }

    #[test]
    fn a_row_takes_half_the_bytes_and_its_scale() {
        assert_eq!(DeviceKvElement::Half.row_bytes(128), 256);
        assert_eq!(DeviceKvElement::E4m3.row_bytes(128), 132);
    }
}
