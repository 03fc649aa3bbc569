//! Keys and values in blocks.
//!
//! **Owns** the address of every element of a KV arena, and the proof that a batch stays inside it. **Never** allocates a block or
//! decides who holds it.

use half::f16;
use half::slice::HalfFloatSliceExt as _;
use pagedd_core::BlockId;

use super::isa::Vectors;
#[cfg(target_arch = "x86_64")]
use super::vector::{load_f32x8, store_i128};
use crate::error::{KvError, ShapeError, length, product};

mod segments;

pub(crate) use segments::{SHARED_UNIT, Segment, Segments, Sharing};

/// How an element of the KV arena is kept.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum KvElement {
    /// IEEE half precision.
    F16,
    /// Single precision.
    F32,
}

impl KvElement {
    /// Bytes of an element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F16 => 2,
            Self::F32 => 4,
        }
    }
}

/// Shape of a KV arena: blocks outermost, then layers; within a layer `[key or value][kv head][token][head_dim]`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct KvLayout {
    layers: usize,
    kv_heads: usize,
    head_dim: usize,
    block_size: usize,
    element: KvElement,
    layer_stride: usize,
    block_stride: usize,
}

impl KvLayout {
    /// Longest head that the kernels work with.
    pub const MAX_HEAD_DIM: usize = 512;

    /// A layout with layers and blocks packed closely, blocks at multiples of 64 bytes.
    ///
    /// # Errors
    /// A dimension is zero, `head_dim` is no multiple of 8 or above 512, `block_size` is no power of two or below 16, or the size overflows.
    pub fn new(
        layers: usize,
        kv_heads: usize,
        head_dim: usize,
        block_size: usize,
        element: KvElement,
    ) -> Result<Self, ShapeError> {
        let wrong = |what, needed, found| Err(ShapeError::Dimension { what, needed, found });
        if layers == 0 {
            return wrong("number of layers", "positive", layers);
        }
        if kv_heads == 0 {
            return wrong("number of kv heads", "positive", kv_heads);
        }
        if head_dim == 0 || !head_dim.is_multiple_of(8) || head_dim > Self::MAX_HEAD_DIM {
            return wrong("head dimension", "a multiple of 8 in [8, 512]", head_dim);
        }
        if block_size < 16 || !block_size.is_power_of_two() {
            return wrong("block size", "a power of two of at least 16", block_size);
        }
        let layer_stride = product("KV layer", &[2, kv_heads, block_size, head_dim, element.bytes()])?;
        let block_stride = product("KV block", &[layers, layer_stride])?
            .checked_next_multiple_of(64)
            .ok_or(ShapeError::Overflow { what: "KV block" })?;
        Ok(Self { layers, kv_heads, head_dim, block_size, element, layer_stride, block_stride })
    }

    /// Layers.
    #[must_use]
    pub const fn layers(&self) -> usize {
        self.layers
    }

    /// KV heads.
    #[must_use]
    pub const fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Elements of a head.
    #[must_use]
    pub const fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Tokens of a block.
    #[must_use]
    pub const fn block_size(&self) -> usize {
        self.block_size
    }

    /// How an element is kept.
    #[must_use]
    pub const fn element(&self) -> KvElement {
        self.element
    }

    /// Bytes from one block to the next.
    #[must_use]
    pub const fn block_stride(&self) -> usize {
        self.block_stride
    }

    /// Bytes from one layer of a block to the next.
    #[must_use]
    pub const fn layer_stride(&self) -> usize {
        self.layer_stride
    }

    /// Bytes of an arena of `blocks` blocks.
    ///
    /// # Errors
    /// The size overflows.
    pub fn arena_bytes(&self, blocks: u32) -> Result<usize, ShapeError> {
        product("KV arena", &[blocks as usize, self.block_stride])
    }

    /// Offset of the first element of (block, layer, key or value, head, token).
    pub(crate) const fn offset(
        &self,
        block: u32,
        layer: usize,
        part: Part,
        head: usize,
        token: usize,
    ) -> usize {
        let row = ((part as usize * self.kv_heads + head) * self.block_size + token) * self.head_dim;
        block as usize * self.block_stride + layer * self.layer_stride + row * self.element.bytes()
    }
}

/// Keys come before values.
#[derive(Clone, Copy)]
pub(crate) enum Part {
    Key = 0,
    Value = 1,
}

/// One sequence's part of a batch: positions `[first_position, first_position + tokens)`, and where the sequence's KV lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KvRow<'a> {
    /// Position of the first token; everything before it is in KV already.
    pub first_position: u32,
    /// Number of tokens, at least 1.
    pub tokens: u32,
    /// The sequence's blocks in order, covering at least all positions up to the row's last.
    pub table: &'a [BlockId],
}

/// A batch whose every position lies inside the arena.
///
/// Having one tells you: every block id it holds is below the capacity it was made for, and every position up to each row's last is
/// covered by the row's table. It does not tell you that the blocks belong to the row's sequence, or that rows share none.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SlotMapping {
    layout: KvLayout,
    capacity: u32,
    tokens: usize,
    pub(crate) rows: Vec<MappedRow>,
    table: Vec<u32>,
    segments: Segments,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MappedRow {
    pub(crate) first_position: usize,
    pub(crate) tokens: usize,
    /// Index of the first token in the batch.
    pub(crate) first_token: usize,
    /// First entry in the flat table.
    table: usize,
}

impl SlotMapping {
    /// Checks a batch against an arena of `capacity` blocks. The batch's tokens are those of the rows, in order.
    ///
    /// # Errors
    /// Which row is wrong, and how.
    pub fn new(layout: &KvLayout, capacity: u32, rows: &[KvRow<'_>]) -> Result<Self, KvError> {
        layout.arena_bytes(capacity)?;
        let mut mapping = Self {
            layout: *layout,
            capacity,
            tokens: 0,
            rows: Vec::with_capacity(rows.len()),
            table: Vec::with_capacity(rows.iter().map(|row| row.table.len()).sum()),
            segments: Segments::default(),
        };
        for (index, row) in rows.iter().enumerate() {
            if row.tokens == 0 {
                return Err(KvError::Empty { row: index });
            }
            let end = u64::from(row.first_position) + u64::from(row.tokens);
            let covered = row.table.len() as u64 * layout.block_size as u64;
            if end > covered {
                return Err(KvError::Table { row: index, end, covered });
            }
            if let Some(&block) = row.table.iter().find(|block| block.0 >= capacity) {
                return Err(KvError::Block { row: index, block, capacity });
            }
            mapping.rows.push(MappedRow {
                first_position: row.first_position as usize,
                tokens: row.tokens as usize,
                first_token: mapping.tokens,
                table: mapping.table.len(),
            });
            mapping.tokens += row.tokens as usize;
            mapping.table.extend(row.table.iter().map(|block| block.0));
        }
        mapping.segments = Segments::new(&mapping.rows, &mapping.table, layout.block_size);
        Ok(mapping)
    }

    /// Tokens of the batch.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The layout it was made for.
    #[must_use]
    pub const fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// What the batch reads, in the order in which it is read.
    pub(crate) const fn segments(&self) -> &Segments {
        &self.segments
    }

    /// Block of a position of a row, and the token's place in it.
    pub(crate) fn slot(&self, row: &MappedRow, position: usize) -> (u32, usize) {
        (self.table[row.table + position / self.layout.block_size], position % self.layout.block_size)
    }

    /// The layer exists and the arena has the mapping's capacity.
    pub(crate) fn check(&self, layer: usize, arena: usize) -> Result<(), KvError> {
        if layer >= self.layout.layers {
            return Err(KvError::Layer { layer: layer as u32, layers: self.layout.layers as u32 });
        }
        Ok(length("KV arena", self.layout.arena_bytes(self.capacity)?, arena)?)
    }
}

/// Writes keys and values (`[tokens][kv_heads][head_dim]`) of a batch into one layer of the arena.
///
/// # Errors
/// The shapes do not fit; nothing has been written.
pub fn write_kv(
    mapping: &SlotMapping,
    layer: usize,
    keys: &[f32],
    values: &[f32],
    arena: &mut [u8],
) -> Result<(), KvError> {
    mapping.check(layer, arena.len())?;
    let layout = &mapping.layout;
    let width = layout.kv_heads * layout.head_dim;
    length("keys", mapping.tokens * width, keys.len())?;
    length("values", mapping.tokens * width, values.len())?;
    for row in &mapping.rows {
        for index in 0..row.tokens {
            let (block, token) = mapping.slot(row, row.first_position + index);
            let from = (row.first_token + index) * width;
            for (part, x) in [(Part::Key, keys), (Part::Value, values)] {
                for (head, x) in x[from..from + width].chunks_exact(layout.head_dim).enumerate() {
                    let at = layout.offset(block, layer, part, head, token);
                    store(
                        Vectors::Portable,
                        layout.element,
                        x,
                        &mut arena[at..at + x.len() * layout.element.bytes()],
                    );
                }
            }
        }
    }
    Ok(())
}

/// Writes a head as elements of the arena. `vectors` are those of a usable set; a conversion rounds the same way on all of them.
#[allow(unsafe_code)]
pub(crate) fn store(vectors: Vectors, element: KvElement, x: &[f32], dst: &mut [u8]) {
    match (element, vectors) {
        #[cfg(target_arch = "x86_64")]
        (KvElement::F16, Vectors::Avx2 | Vectors::Avx512) => {
            // SAFETY: `vectors` are those of a usable set: this processor has AVX2 and F16C.
            unsafe { store_halves(x, dst) }
        }
        (KvElement::F16, _) => {
            let mut halves = [f16::ZERO; KvLayout::MAX_HEAD_DIM];
            let halves = &mut halves[..x.len()];
            halves.convert_from_f32_slice(x);
            for (half, dst) in halves.iter().zip(dst.as_chunks_mut::<2>().0) {
                *dst = half.to_le_bytes();
            }
        }
        (KvElement::F32, _) => {
            for (x, dst) in x.iter().zip(dst.as_chunks_mut::<4>().0) {
                *dst = x.to_le_bytes();
            }
        }
    }
}

/// A head is a multiple of 8 long.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,f16c")]
fn store_halves(x: &[f32], dst: &mut [u8]) {
    use std::arch::x86_64::{_MM_FROUND_TO_NEAREST_INT, _mm256_cvtps_ph};

    for (x, dst) in x.as_chunks::<8>().0.iter().zip(dst.as_chunks_mut::<16>().0) {
        store_i128(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(load_f32x8(x)), dst);
    }
}

/// Copies the first `tokens` positions of block `from` into block `to`, all layers.
///
/// # Errors
/// The arena has no such blocks, or a block has fewer tokens; nothing has been written.
pub fn copy_block(
    layout: &KvLayout,
    from: BlockId,
    to: BlockId,
    tokens: usize,
    arena: &mut [u8],
) -> Result<(), KvError> {
    let capacity = u32::try_from(arena.len() / layout.block_stride).unwrap_or(u32::MAX);
    for block in [from, to] {
        if block.0 >= capacity {
            return Err(KvError::Block { row: 0, block, capacity });
        }
    }
    if tokens > layout.block_size {
        return Err(KvError::Table { row: 0, end: tokens as u64, covered: layout.block_size as u64 });
    }
    let bytes = tokens * layout.head_dim * layout.element.bytes();
    for layer in 0..layout.layers {
        for part in [Part::Key, Part::Value] {
            for head in 0..layout.kv_heads {
                let source = layout.offset(from.0, layer, part, head, 0);
                let target = layout.offset(to.0, layer, part, head, 0);
                arena.copy_within(source..source + bytes, target);
            }
        }
    }
    Ok(())
}
