//! Weights in memory: panels of interleaved output rows.
//!
//! **Owns** the layout of packed matrices. **Never** multiplies.
//!
//! A panel is [`PANEL`] output rows; where the last panel has fewer, the rest are zeros. Within a panel the columns run in order, so a
//! product reads a panel's bytes once, front to back:
//!
//! | type | unit | bytes of a unit |
//! |---|---|---|
//! | `F32`, `F16`, `BF16` | 1 column | 16 elements, one per row |
//! | `Q4G32` | 32 columns | 4 vectors of 64 bytes, 16 f16 scales, 16 f16 minima |
//! | `Q8G32` | 32 columns | 8 vectors of 64 bytes, 16 f16 scales |
//! | `Q8G32Min` | 32 columns | 8 vectors of 64 bytes, 16 f16 scales, 16 f16 minima |
//! | `Q8G16` | 32 columns | 8 vectors of 64 bytes, 2 x 16 f16 scales (columns `[0, 16)`, `[16, 32)`) |
//!
//! A vector is 16 lanes of 4 bytes, one lane per row. Vector `i` of an 8-bit type holds columns `[4i, 4i + 4)`; vector `i` of
//! `Q4G32` holds columns `[8i, 8i + 4)` in its low and `[8i + 4, 8i + 8)` in its high nibbles. A weight is `scale * code + min`,
//! or `scale * (code - 128)` in the types without minima.

use half::{bf16, f16};
use pagedd_core::TensorType;

use super::activations::ActivationKind;
use super::dequant::{dequantize, group};
use crate::error::{ShapeError, length, product};

/// Output rows in a panel.
pub const PANEL: usize = 16;
/// Columns that share a unit of a quantised panel.
pub(crate) const GROUP: usize = 32;
/// Panels start at multiples of a cache line.
const ALIGN: usize = 64;

/// How a matrix is kept in memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PackedType {
    /// Single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// Upper half of a single.
    BF16,
    /// 4-bit codes, scale and minimum per 32 columns.
    Q4G32,
    /// 8-bit codes around 128, scale per 32 columns.
    Q8G32,
    /// 8-bit codes, scale and minimum per 32 columns.
    Q8G32Min,
    /// 8-bit codes around 128, scale per 16 columns.
    Q8G16,
}

impl PackedType {
    /// Every type.
    pub const ALL: [Self; 7] =
        [Self::F32, Self::F16, Self::BF16, Self::Q4G32, Self::Q8G32, Self::Q8G32Min, Self::Q8G16];

    /// The type that keeps tensors of file type `ty`; with `f32_throughout` everything becomes single precision.
    #[must_use]
    pub const fn for_source(ty: TensorType, f32_throughout: bool) -> Self {
        if f32_throughout {
            return Self::F32;
        }
        match ty {
            TensorType::F32 => Self::F32,
            TensorType::F16 => Self::F16,
            TensorType::BF16 => Self::BF16,
            TensorType::Q4_0 | TensorType::Q4_1 | TensorType::Q4_K => Self::Q4G32,
            TensorType::Q5_0 | TensorType::Q8_0 => Self::Q8G32,
            TensorType::Q5_1 | TensorType::Q5_K => Self::Q8G32Min,
            TensorType::Q6_K => Self::Q8G16,
        }
    }

    /// What activations must be to meet weights of this type.
    #[must_use]
    pub const fn activations(self) -> ActivationKind {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => ActivationKind::F32,
            Self::Q4G32 | Self::Q8G32 | Self::Q8G32Min | Self::Q8G16 => ActivationKind::Int8,
        }
    }

    /// Whether a column count is possible: quantised types want whole groups of 32.
    #[must_use]
    pub const fn allows_columns(self, columns: usize) -> bool {
        columns.is_multiple_of(self.unit_columns())
    }

    /// Columns of a unit.
    pub(crate) const fn unit_columns(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::BF16 => 1,
            Self::Q4G32 | Self::Q8G32 | Self::Q8G32Min | Self::Q8G16 => GROUP,
        }
    }

    /// Bytes of a unit.
    pub(crate) const fn unit_bytes(self) -> usize {
        match self {
            Self::F32 => 4 * PANEL,
            Self::F16 | Self::BF16 => 2 * PANEL,
            Self::Q4G32 => PANEL * GROUP / 2 + 4 * PANEL,
            Self::Q8G32 => PANEL * GROUP + 2 * PANEL,
            Self::Q8G32Min | Self::Q8G16 => PANEL * GROUP + 4 * PANEL,
        }
    }
}

/// Type and shape of a packed matrix.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct MatrixLayout {
    ty: PackedType,
    rows: usize,
    columns: usize,
}

impl MatrixLayout {
    /// The layout of a matrix of `rows` outputs and `columns` inputs.
    ///
    /// # Errors
    /// A dimension is zero, the columns are no whole number of groups, or the size overflows.
    pub fn new(ty: PackedType, rows: usize, columns: usize) -> Result<Self, ShapeError> {
        if rows == 0 {
            return Err(ShapeError::Dimension { what: "number of rows", needed: "positive", found: rows });
        }
        if columns == 0 || !ty.allows_columns(columns) {
            return Err(ShapeError::Dimension {
                what: "number of columns",
                needed: if ty.unit_columns() == 1 { "positive" } else { "a positive multiple of 32" },
                found: columns,
            });
        }
        let unit_rows =
            rows.checked_next_multiple_of(PANEL).ok_or(ShapeError::Overflow { what: "matrix" })?;
        // More than any panel needs, and it bounds every product below.
        product("matrix", &[unit_rows, columns, 8])?;
        Ok(Self { ty, rows, columns })
    }

    /// How weights are kept.
    #[must_use]
    pub const fn ty(&self) -> PackedType {
        self.ty
    }

    /// Outputs.
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    #[must_use]
    pub const fn columns(&self) -> usize {
        self.columns
    }

    /// Panels.
    #[must_use]
    pub const fn panels(&self) -> usize {
        self.rows.div_ceil(PANEL)
    }

    /// Bytes of a panel: a multiple of 64.
    #[must_use]
    pub const fn panel_bytes(&self) -> usize {
        (self.units() * self.ty.unit_bytes()).next_multiple_of(ALIGN)
    }

    /// Bytes of the matrix: a multiple of 64.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.panels() * self.panel_bytes()
    }

    /// Units of a panel.
    pub(crate) const fn units(&self) -> usize {
        self.columns / self.ty.unit_columns()
    }
}

/// A packed matrix.
///
/// Having one tells you that the bytes have the length of the layout. It does not tell you what they hold.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a> {
    layout: MatrixLayout,
    bytes: &'a [u8],
}

impl<'a> Matrix<'a> {
    /// `bytes` as a matrix.
    ///
    /// # Errors
    /// The length is not [`MatrixLayout::bytes`].
    pub fn new(layout: MatrixLayout, bytes: &'a [u8]) -> Result<Self, ShapeError> {
        length("packed matrix", layout.bytes(), bytes.len())?;
        Ok(Self { layout, bytes })
    }

    /// Type and shape.
    #[must_use]
    pub const fn layout(&self) -> &MatrixLayout {
        &self.layout
    }

    /// The units of panel `index`, without the padding behind them.
    pub(crate) fn panel(&self, index: usize) -> &'a [u8] {
        let bytes = self.layout.panel_bytes();
        &self.bytes[index * bytes..][..self.layout.units() * self.layout.ty.unit_bytes()]
    }

    /// Row `row` in single precision: an embedding, where the matrix is a table of them.
    ///
    /// # Errors
    /// The row does not exist, or `out` is not as long as a row; nothing has been written.
    pub fn row(&self, row: usize, out: &mut [f32]) -> Result<(), ShapeError> {
        if row >= self.layout.rows {
            return Err(ShapeError::Dimension { what: "row", needed: "inside the matrix", found: row });
        }
        length("row", self.layout.columns, out.len())?;
        let (panel, lane) = (self.panel(row / PANEL), row % PANEL);
        let units = panel.chunks_exact(self.layout.ty.unit_bytes());
        match self.layout.ty {
            PackedType::F32 => {
                for (x, unit) in out.iter_mut().zip(units) {
                    *x = f32::from_le_bytes(unit.as_chunks::<4>().0[lane]);
                }
            }
            PackedType::F16 => out.iter_mut().zip(units).for_each(|(x, unit)| *x = half_lane(unit, lane)),
            PackedType::BF16 => {
                for (x, unit) in out.iter_mut().zip(units) {
                    *x = bf16::from_le_bytes(unit.as_chunks::<2>().0[lane]).to_f32();
                }
            }
            PackedType::Q4G32 | PackedType::Q8G32 | PackedType::Q8G32Min | PackedType::Q8G16 => {
                for (weights, unit) in out.as_chunks_mut::<GROUP>().0.iter_mut().zip(units) {
                    unpack_lane(self.layout.ty, unit, lane, weights);
                }
            }
        }
        Ok(())
    }
}

/// Where column `k` of row `lane` lies in a quantised unit, and how far to shift it.
const fn place(ty: PackedType, lane: usize, k: usize) -> (usize, u32) {
    match ty {
        PackedType::Q4G32 => (k / 8 * 64 + lane * 4 + k % 4, if k % 8 < 4 { 0 } else { 4 }),
        _ => (k / 4 * 64 + lane * 4 + k % 4, 0),
    }
}

fn half_lane(halves: &[u8], lane: usize) -> f32 {
    f16::from_le_bytes(halves.as_chunks::<2>().0[lane]).to_f32()
}

fn unpack_lane(ty: PackedType, unit: &[u8], lane: usize, weights: &mut [f32; GROUP]) {
    let codes = if ty == PackedType::Q4G32 { PANEL * GROUP / 2 } else { PANEL * GROUP };
    let mask = if ty == PackedType::Q4G32 { 15 } else { 255 };
    let scales = &unit[codes..];
    let first = half_lane(scales, lane);
    let last = if ty == PackedType::Q8G16 { half_lane(scales, PANEL + lane) } else { first };
    let (offset, min) = match ty {
        PackedType::Q4G32 | PackedType::Q8G32Min => (0, half_lane(scales, PANEL + lane)),
        _ => (128, 0.0),
    };
    for (k, weight) in weights.iter_mut().enumerate() {
        let (at, shift) = place(ty, lane, k);
        let code = i16::from(unit[at] >> shift & mask) - offset;
        *weight = f32::from(code) * if k < GROUP / 2 { first } else { last } + min;
    }
}

/// Packs consecutive rows from a model file into panels.
///
/// `src` holds whole rows of file type `from`, the first being row `first_row` (a multiple of [`PANEL`]) of the matrix; `dst` is exactly
/// the panels that these rows fill. All ranges but the one with the last row hold a multiple of [`PANEL`] rows, so that a big matrix is
/// packed in parallel and with bounded memory. The f16 scales of `Q4_K`, `Q5_K` and `Q6_K` groups are products rounded once; all else is exact.
///
/// # Errors
/// The types or lengths do not fit; nothing has been written.
pub fn pack(
    layout: &MatrixLayout,
    from: TensorType,
    src: &[u8],
    first_row: usize,
    dst: &mut [u8],
) -> Result<(), ShapeError> {
    let to = layout.ty;
    if to != PackedType::F32 && to != PackedType::for_source(from, false) {
        return Err(ShapeError::Packing { from, to });
    }
    let row_bytes = from.row_bytes(layout.columns).ok_or(ShapeError::Dimension {
        what: "number of columns",
        needed: "a multiple of the type's block",
        found: layout.columns,
    })?;
    let rows = src.len() / row_bytes;
    length("rows to pack", rows * row_bytes, src.len())?;
    let ends = rows <= layout.rows && first_row <= layout.rows - rows;
    if !ends || !first_row.is_multiple_of(PANEL) {
        return Err(ShapeError::Dimension {
            what: "first row",
            needed: "a multiple of 16 inside the matrix",
            found: first_row,
        });
    }
    if !rows.is_multiple_of(PANEL) && first_row + rows != layout.rows {
        return Err(ShapeError::Dimension {
            what: "number of rows to pack",
            needed: "a multiple of 16, or up to the last row",
            found: rows,
        });
    }
    length("packed panels", rows.div_ceil(PANEL) * layout.panel_bytes(), dst.len())?;
    let panels = dst.chunks_exact_mut(layout.panel_bytes());
    for (rows, panel) in src.chunks(PANEL * row_bytes).zip(panels) {
        panel.fill(0);
        for (lane, row) in rows.chunks_exact(row_bytes).enumerate() {
            pack_row(layout, from, row, lane, panel);
        }
    }
    Ok(())
}

fn pack_row(layout: &MatrixLayout, from: TensorType, row: &[u8], lane: usize, panel: &mut [u8]) {
    let units = panel.chunks_exact_mut(layout.ty.unit_bytes());
    match layout.ty {
        PackedType::F32 => {
            // By pieces of a multiple of every type's block, so that the buffer stays small.
            let piece = 256.min(layout.columns);
            let piece_bytes = from.row_bytes(piece).unwrap_or(row.len());
            let mut weights = [0.0; 256];
            let mut units = units;
            for bytes in row.chunks(piece_bytes) {
                let count = bytes.len() / from.block_bytes() * from.block_elements();
                let weights = &mut weights[..count];
                if dequantize(from, bytes, weights).is_err() {
                    unreachable!("pieces are whole blocks");
                }
                for (weight, unit) in weights.iter().zip(&mut units) {
                    unit.as_chunks_mut::<4>().0[lane] = weight.to_le_bytes();
                }
            }
        }
        PackedType::F16 | PackedType::BF16 => {
            for (bytes, unit) in row.as_chunks::<2>().0.iter().zip(units) {
                unit.as_chunks_mut::<2>().0[lane] = *bytes;
            }
        }
        PackedType::Q4G32 | PackedType::Q8G32 | PackedType::Q8G32Min | PackedType::Q8G16 => {
            for (index, unit) in units.take(layout.units()).enumerate() {
                pack_group(layout.ty, from, row, index, lane, unit);
            }
        }
    }
}

fn pack_group(to: PackedType, from: TensorType, row: &[u8], index: usize, lane: usize, unit: &mut [u8]) {
    let group = group(from, row, index);
    // Types without minima keep codes around 128. The 4-bit type always has minima: those of `Q4_0` are exact, a power of two times the scale.
    let (shift, min) = match to {
        PackedType::Q8G32 | PackedType::Q8G16 => (128 - group.offset, None),
        _ => (0, Some(group.min.unwrap_or(-f32::from(group.offset) * group.scales[0]))),
    };
    for (k, code) in group.codes.iter().enumerate() {
        let (at, bits) = place(to, lane, k);
        unit[at] |= (code + shift) << bits;
    }
    let codes = if to == PackedType::Q4G32 { PANEL * GROUP / 2 } else { PANEL * GROUP };
    let halves = unit[codes..].as_chunks_mut::<2>().0;
    halves[lane] = f16::from_f32(group.scales[0]).to_le_bytes();
    if to == PackedType::Q8G16 {
        halves[PANEL + lane] = f16::from_f32(group.scales[1]).to_le_bytes();
    }
    if let Some(min) = min {
        halves[PANEL + lane] = f16::from_f32(min).to_le_bytes();
    }
}
