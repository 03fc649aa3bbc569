//! What a kernel refuses.

use pagedd_core::{BlockId, TensorType};

use crate::PackedType;

/// Sizes that do not fit together. Nothing has been written.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ShapeError {
    /// A buffer has another length than the shapes ask for.
    #[error("{what} has {found} elements, {needed} needed")]
    Length {
        /// Which buffer.
        what: &'static str,
        /// Its length as the shapes ask for it.
        needed: usize,
        /// Its length.
        found: usize,
    },
    /// A dimension that the kernel cannot work with.
    #[error("{what} is {found}, but must be {needed}")]
    Dimension {
        /// Which dimension.
        what: &'static str,
        /// What it must be.
        needed: &'static str,
        /// What it is.
        found: usize,
    },
    /// The file type is no source for the packed type.
    #[error("{from} weights cannot be packed as {to:?}")]
    Packing {
        /// Type in the file.
        from: TensorType,
        /// Type in memory.
        to: PackedType,
    },
    /// The activations were not prepared in the form that the weights multiply with.
    #[error("{weights:?} weights meet activations that were not set for them")]
    Activations {
        /// Type of the weights.
        weights: PackedType,
    },
    /// Sizes whose product does not fit the address space.
    #[error("{what} overflows")]
    Overflow {
        /// Which size.
        what: &'static str,
    },
}

/// Block tables and positions that do not describe the KV arena.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum KvError {
    /// A table names a block that the arena does not have.
    #[error("row {row} names {block}, the arena has {capacity} blocks")]
    Block {
        /// Index of the row in its batch.
        row: usize,
        /// What it names.
        block: BlockId,
        /// Blocks of the arena.
        capacity: u32,
    },
    /// A table is too short for the positions of its row.
    #[error("row {row} ends at position {end}, its table covers {covered}")]
    Table {
        /// Index of the row in its batch.
        row: usize,
        /// One past the row's last position.
        end: u64,
        /// Positions that the table covers.
        covered: u64,
    },
    /// A row without tokens.
    #[error("row {row} has no tokens")]
    Empty {
        /// Index of the row in its batch.
        row: usize,
    },
    /// A layer that the layout does not have.
    #[error("layer {layer} of {layers}")]
    Layer {
        /// Which.
        layer: u32,
        /// How many there are.
        layers: u32,
    },
    /// The mapping was made for another layout.
    #[error("the slot mapping was made for another KV layout")]
    Layout,
    /// Buffers or dimensions that do not fit.
    #[error(transparent)]
    Shape(#[from] ShapeError),
}

/// `Ok` where `found` is `needed`.
pub(crate) fn length(what: &'static str, needed: usize, found: usize) -> Result<(), ShapeError> {
    if needed == found { Ok(()) } else { Err(ShapeError::Length { what, needed, found }) }
}

/// A product of sizes.
pub(crate) fn product(what: &'static str, factors: &[usize]) -> Result<usize, ShapeError> {
    factors.iter().try_fold(1_usize, |all, &f| all.checked_mul(f)).ok_or(ShapeError::Overflow { what })
}
