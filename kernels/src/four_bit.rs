//! Weights of four bits on a GPU: one order for every format, made for the lanes that multiply with them.
//!
//! **Owns** that order (`kernels/cuda/gemm/four_bit.cuh` says it in full), the way into it from the blocks of a file, and which matrices of a
//! decoder are in it. **Never** touches a device.

use half::f16;
use pagedd_core::TensorType;

use crate::cpu::dequant::{Group, group};
use crate::error::{ShapeError, length};

/// Outputs of a tile.
pub const FOUR_BIT_TILE: usize = 16;
/// Inputs of a unit: two groups with a scale and a minimum each.
pub const FOUR_BIT_UNIT: usize = 64;
/// Bytes of a unit of a tile, and where its scales begin.
const BYTES_OF_UNIT: usize = 640;
const SCALES: usize = 512;
/// Inputs of a group.
const GROUP: usize = 32;

/// How a matrix of a decoder lies on a GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// Elements of 16 bits, row by row.
    Half,
    /// Tiles of four-bit weights.
    FourBit,
}

/// Those of the matrices of a layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayerForms {
    /// Queries, keys and values.
    pub qkv: Form,
    /// Back to the residual stream after attention.
    pub attn_output: Form,
    /// Gate and up.
    pub gate_up: Form,
    /// Back to the residual stream.
    pub ffn_down: Form,
}

/// Those of all matrices of a decoder but the embedding, whose rows are looked up: it has 16 bits.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DecoderForms {
    /// By layer.
    pub layers: Vec<LayerForms>,
    /// The output matrix. Where it is the embedding and has four bits, it lies there twice.
    pub output: Form,
}

impl DecoderForms {
    /// All of 16 bits.
    #[must_use]
    pub fn halves(layers: usize) -> Self {
        let half = Form::Half;
        let layer = LayerForms { qkv: half, attn_output: half, gate_up: half, ffn_down: half };
        Self { layers: vec![layer; layers], output: half }
    }
}

/// Whether weights of this type are four-bit numbers in groups of 32, each with a scale.
#[must_use]
pub fn is_four_bit(ty: TensorType) -> bool {
    matches!(ty, TensorType::Q4_0 | TensorType::Q4_1 | TensorType::Q4_K)
}

/// Bytes of a matrix `[outputs][inputs]`; `None` where it is not in whole tiles of whole units.
#[must_use]
pub fn four_bit_bytes(outputs: usize, inputs: usize) -> Option<usize> {
    let whole = outputs.is_multiple_of(FOUR_BIT_TILE) && inputs.is_multiple_of(FOUR_BIT_UNIT);
    let units = (outputs / FOUR_BIT_TILE).checked_mul(inputs / FOUR_BIT_UNIT).filter(|_| whole)?;
    units.checked_mul(BYTES_OF_UNIT)
}

/// Puts 16 rows of a file, `inputs` weights each, into `tile`: its first eight outputs, then its last eight.
///
/// # Errors
/// Rows of other types or lengths, `tile` of another length; or a scale that half precision does not hold.
pub fn pack_four_bit_tile(
    rows: &[(TensorType, &[u8]); FOUR_BIT_TILE],
    inputs: usize,
    tile: &mut [u8],
) -> Result<(), ShapeError> {
    let bytes = four_bit_bytes(FOUR_BIT_TILE, inputs).ok_or(ShapeError::Dimension {
        what: "row of four-bit weights",
        needed: "a multiple of 64",
        found: inputs,
    })?;
    length("tile of four-bit weights", bytes, tile.len())?;
    for &(ty, row) in rows {
        let whole = ty.row_bytes(inputs).filter(|_| is_four_bit(ty)).ok_or(ShapeError::Dimension {
            what: "row of four-bit weights",
            needed: "of such a type and whole blocks",
            found: inputs,
        })?;
        length("row of four-bit weights", whole, row.len())?;
    }
    for (unit, bytes) in tile.chunks_exact_mut(BYTES_OF_UNIT).enumerate() {
        for (output, &(ty, row)) in rows.iter().enumerate() {
            for side in 0..FOUR_BIT_UNIT / GROUP {
                let group = group(ty, row, unit * (FOUR_BIT_UNIT / GROUP) + side);
                let (half, g) = (output / 8, output % 8);
                let word = half * 2 + side;
                for t in 0..4 {
                    let at = (g * 4 + t) * 16 + word * 4;
                    bytes[at..at + 4].copy_from_slice(&numbers(&group.codes, t).to_le_bytes());
                }
                let at = SCALES + g * 16 + word * 4;
                bytes[at..at + 4].copy_from_slice(&scale_and_minimum(&group)?);
            }
        }
    }
    Ok(())
}

/// The eight numbers of lane `t` of four: two fragments' pairs, low halves first.
fn numbers(codes: &[u8; GROUP], t: usize) -> u32 {
    (0..4).fold(0, |word, i| {
        let first = i / 2 * 16 + i % 2 * 8 + 2 * t;
        word | u32::from(codes[first]) << (4 * i) | u32::from(codes[first + 1]) << (16 + 4 * i)
    })
}

fn scale_and_minimum(group: &Group) -> Result<[u8; 4], ShapeError> {
    let scale = group.scales[0];
    let minimum = group.min.unwrap_or(0.0) - f32::from(group.offset) * scale;
    let [scale, minimum] = [scale, minimum].map(f16::from_f32);
    if !scale.is_finite() || !minimum.is_finite() {
        return Err(ShapeError::Overflow { what: "a scale of four-bit weights in half precision" });
    }
    let ([a, b], [c, d]) = (scale.to_le_bytes(), minimum.to_le_bytes());
    Ok([a, b, c, d])
}

#[cfg(test)]
mod tests;
