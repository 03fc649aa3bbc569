//! The element types of model files, as ggml defines them.

use half::{bf16, f16};
use pagedd_core::TensorType;

use crate::error::{ShapeError, length};

/// 32 weights of a quantised row: `weight = scale * (code - offset) + min`.
pub(crate) struct Group {
    pub(crate) codes: [u8; 32],
    pub(crate) offset: u8,
    /// Of the first and of the last 16 weights.
    pub(crate) scales: [f32; 2],
    pub(crate) min: Option<f32>,
}

impl Group {
    fn weights(&self, dst: &mut [f32; 32]) {
        for (i, (weight, &code)) in dst.iter_mut().zip(&self.codes).enumerate() {
            *weight = self.scales[i / 16] * f32::from(i16::from(code) - i16::from(self.offset));
        }
        if let Some(min) = self.min {
            for weight in dst {
                *weight += min;
            }
        }
    }
}

/// Dequantises whole blocks: `src` holds `dst.len()` elements of type `ty`.
///
/// Exact: the operations and their order are those of ggml's reference code, in single precision.
///
/// # Errors
/// The lengths do not match, or `dst.len()` is no whole number of blocks; nothing has been written.
pub fn dequantize(ty: TensorType, src: &[u8], dst: &mut [f32]) -> Result<(), ShapeError> {
    let needed = ty.row_bytes(dst.len()).ok_or(ShapeError::Dimension {
        what: "number of elements",
        needed: "a multiple of the type's block",
        found: dst.len(),
    })?;
    length("quantised data", needed, src.len())?;
    match ty {
        TensorType::F32 => {
            for (x, bytes) in dst.iter_mut().zip(src.as_chunks::<4>().0) {
                *x = f32::from_le_bytes(*bytes);
            }
        }
        TensorType::F16 => {
            for (x, bytes) in dst.iter_mut().zip(src.as_chunks::<2>().0) {
                *x = f16::from_le_bytes(*bytes).to_f32();
            }
        }
        TensorType::BF16 => {
            for (x, bytes) in dst.iter_mut().zip(src.as_chunks::<2>().0) {
                *x = bf16::from_le_bytes(*bytes).to_f32();
            }
        }
        TensorType::Q4_0
        | TensorType::Q4_1
        | TensorType::Q5_0
        | TensorType::Q5_1
        | TensorType::Q8_0
        | TensorType::Q4_K
        | TensorType::Q5_K
        | TensorType::Q6_K => {
            for (index, weights) in dst.as_chunks_mut::<32>().0.iter_mut().enumerate() {
                group(ty, src, index).weights(weights);
            }
        }
    }
    Ok(())
}

/// Group `index` of the quantised row `src`, whose length was checked.
///
/// # Panics
/// Where `src` ends before that group, or `ty` is not quantised.
pub(crate) fn group(ty: TensorType, src: &[u8], index: usize) -> Group {
    let groups = ty.block_elements() / 32;
    let bytes = ty.block_bytes();
    let block = &src[index / groups * bytes..][..bytes];
    let within = index % groups;
    match ty {
        TensorType::Q4_0 => {
            Group { codes: nibbles(&block[2..18]), offset: 8, scales: [half_at(block, 0); 2], min: None }
        }
        TensorType::Q4_1 => Group {
            codes: nibbles(&block[4..20]),
            offset: 0,
            scales: [half_at(block, 0); 2],
            min: Some(half_at(block, 2)),
        },
        TensorType::Q5_0 => Group {
            codes: fifth_bits(nibbles(&block[6..22]), &block[2..6]),
            offset: 16,
            scales: [half_at(block, 0); 2],
            min: None,
        },
        TensorType::Q5_1 => Group {
            codes: fifth_bits(nibbles(&block[8..24]), &block[4..8]),
            offset: 0,
            scales: [half_at(block, 0); 2],
            min: Some(half_at(block, 2)),
        },
        TensorType::Q8_0 => Group {
            // A signed code, moved by 128 to be unsigned.
            codes: std::array::from_fn(|i| block[2 + i] ^ 0x80),
            offset: 128,
            scales: [half_at(block, 0); 2],
            min: None,
        },
        TensorType::Q4_K => {
            let (scale, min) = k_scale(block, within);
            let quants = &block[16 + within / 2 * 32..][..32];
            let shift = within % 2 * 4;
            Group {
                codes: std::array::from_fn(|i| (quants[i] >> shift) & 15),
                offset: 0,
                scales: [scale; 2],
                min: Some(min),
            }
        }
        TensorType::Q5_K => {
            let (scale, min) = k_scale(block, within);
            let high = &block[16..48];
            let quants = &block[48 + within / 2 * 32..][..32];
            let shift = within % 2 * 4;
            Group {
                codes: std::array::from_fn(|i| (quants[i] >> shift) & 15 | ((high[i] >> within) & 1) << 4),
                offset: 0,
                scales: [scale; 2],
                min: Some(min),
            }
        }
        TensorType::Q6_K => {
            // Each half of the block: 64 bytes of low nibbles, 32 bytes of high bit pairs, 8 scales, for 4 groups.
            let (part, of_part) = (within / 4, within % 4);
            let low = &block[part * 64 + of_part % 2 * 32..][..32];
            let high = &block[128 + part * 32..][..32];
            let scale = |i: usize| f32::from(block[192 + within * 2 + i] as i8);
            let d = half_at(block, 208);
            Group {
                codes: std::array::from_fn(|i| {
                    (low[i] >> (of_part / 2 * 4)) & 15 | ((high[i] >> (of_part * 2)) & 3) << 4
                }),
                offset: 32,
                scales: [d * scale(0), d * scale(1)],
                min: None,
            }
        }
        TensorType::F32 | TensorType::F16 | TensorType::BF16 => unreachable!("{ty} has no groups"),
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Low nibbles are the first 16 codes, high nibbles the last.
fn nibbles(bytes: &[u8]) -> [u8; 32] {
    std::array::from_fn(|i| if i < 16 { bytes[i] & 15 } else { bytes[i - 16] >> 4 })
}

fn fifth_bits(codes: [u8; 32], bits: &[u8]) -> [u8; 32] {
    std::array::from_fn(|i| codes[i] | ((bits[i / 8] >> (i % 8)) & 1) << 4)
}

/// Scale and (negative) minimum of group `j` of a `Q4_K` or `Q5_K` block: 6 bits each, packed in 12 bytes.
fn k_scale(block: &[u8], j: usize) -> (f32, f32) {
    let packed = &block[4..16];
    let (scale, min) = if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        (packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4)
    };
    (half_at(block, 0) * f32::from(scale), -(half_at(block, 2) * f32::from(min)))
}
