//! Which token goes where: positions and block tables on the device, proved on the host.
//!
//! **Owns** the check that no launch of a batch leaves its arena. **Never** decides who holds a block.

use std::sync::atomic::{AtomicU64, Ordering};

use super::buffer::Buffer;
use super::error::CudaError;
use super::norm::{PACK, dimension};
use super::pinned::PinnedRing;
use super::stream::Stream;
use crate::cpu::kv::KvRow;
use crate::e4m3::DeviceKvElement;
use crate::error::{KvError, ShapeError, product};

/// Shape of a KV arena on a device. A layer of a block begins at `block * block_stride + layer * layer_stride`; both strides are free. Its elements are
/// `[key or value][kv head][token][head_dim]`, and where they have scales those follow them all, `[key or value][kv head][token]`: the tokens of a head
/// are one run of bytes, and every 16 tokens of it begin at a multiple of 16 bytes, their elements and their scales.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct DeviceKvLayout {
    /// Layers.
    pub layers: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements of a head: a multiple of 16.
    pub head_dim: usize,
    /// Tokens of a block: a power of two.
    pub block_size: usize,
    /// How an element is kept.
    pub element: DeviceKvElement,
    /// Bytes from one block to the next.
    pub block_stride: usize,
    /// Bytes from one layer to the next.
    pub layer_stride: usize,
}

impl DeviceKvLayout {
    /// A block's layers side by side, then the next block: a block moves as one run of bytes.
    ///
    /// # Errors
    /// The size overflows.
    pub fn blocks_outermost(
        layers: usize,
        kv_heads: usize,
        head_dim: usize,
        block_size: usize,
        element: DeviceKvElement,
    ) -> Result<Self, ShapeError> {
        let layer_stride = layer_bytes(kv_heads, head_dim, block_size, element)?;
        let block_stride = product("KV block", &[layers, layer_stride])?;
        Ok(Self { layers, kv_heads, head_dim, block_size, element, block_stride, layer_stride })
    }

    /// All blocks of a layer side by side, then the next layer.
    ///
    /// # Errors
    /// The size overflows.
    pub fn layers_outermost(
        layers: usize,
        kv_heads: usize,
        head_dim: usize,
        block_size: usize,
        element: DeviceKvElement,
        blocks: u32,
    ) -> Result<Self, ShapeError> {
        let block_stride = layer_bytes(kv_heads, head_dim, block_size, element)?;
        let layer_stride = product("KV layer", &[blocks as usize, block_stride])?;
        Ok(Self { layers, kv_heads, head_dim, block_size, element, block_stride, layer_stride })
    }

    /// Bytes from the arena's start to the end of what `blocks` blocks reach.
    ///
    /// # Errors
    /// The size overflows.
    pub fn arena_bytes(&self, blocks: u32) -> Result<usize, ShapeError> {
        if blocks == 0 || self.layers == 0 {
            return Ok(0);
        }
        let overflow = ShapeError::Overflow { what: "KV arena" };
        let last_block = product("KV arena", &[blocks as usize - 1, self.block_stride])?;
        let last_layer = product("KV arena", &[self.layers - 1, self.layer_stride])?;
        let one = layer_bytes(self.kv_heads, self.head_dim, self.block_size, self.element)?;
        let end = last_block.checked_add(last_layer).and_then(|start| start.checked_add(one));
        end.ok_or(overflow)
    }

    /// The kernels work with these dimensions.
    pub(super) fn check(&self) -> Result<(), CudaError> {
        if self.layers == 0 || self.kv_heads == 0 {
            return Err(dimension("layers and kv heads", "positive", 0));
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(2 * PACK) || self.head_dim > 512 {
            return Err(dimension("head dimension", "a multiple of 16 in [16, 512]", self.head_dim));
        }
        if !self.block_size.is_power_of_two() || self.block_size > 1 << 16 {
            return Err(dimension("block size", "a power of two", self.block_size));
        }
        for stride in [self.block_stride, self.layer_stride] {
            if !stride.is_multiple_of(16) {
                return Err(dimension("KV stride", "a multiple of 16", stride));
            }
        }
        let one = layer_bytes(self.kv_heads, self.head_dim, self.block_size, self.element)?;
        if self.block_stride < one || (self.layers > 1 && self.layer_stride < one) {
            return Err(dimension("KV stride", "at least a layer of a block", self.block_stride));
        }
        Ok(())
    }

    /// Offset of (block, layer, key or value, head, token), in bytes.
    pub(super) fn offset(&self, block: u32, layer: usize, part: usize, head: usize, token: usize) -> usize {
        let row = (part * self.kv_heads + head) * self.block_size + token;
        let layer = block as usize * self.block_stride + layer * self.layer_stride;
        layer + row * self.head_dim * self.element.bytes()
    }

    /// Offset of the scale of (block, layer, key or value, head, token), in bytes.
    pub(super) fn scale_offset(
        &self,
        block: u32,
        layer: usize,
        part: usize,
        head: usize,
        token: usize,
    ) -> usize {
        let row = (part * self.kv_heads + head) * self.block_size + token;
        self.offset(block, layer, 0, 0, 0) + self.scales() + row * self.element.scale_bytes()
    }

    /// Bytes from a layer to the scales of its rows, which are in the order of the elements.
    pub(super) fn scales(&self) -> usize {
        2 * self.kv_heads * self.block_size * self.head_dim * self.element.bytes()
    }
}

fn layer_bytes(
    kv_heads: usize,
    head_dim: usize,
    block_size: usize,
    element: DeviceKvElement,
) -> Result<usize, ShapeError> {
    let elements = product("KV layer", &[2, kv_heads, block_size, head_dim, element.bytes()])?;
    let scales = product("KV layer", &[2, kv_heads, block_size, element.scale_bytes()])?;
    elements.checked_add(scales).ok_or(ShapeError::Overflow { what: "KV layer" })
}

/// Row numbers on the device.
///
/// Having one tells you: each is below the bound that it was set with.
#[derive(Debug)]
pub struct Indices {
    buffer: Buffer<u32>,
    len: usize,
    bound: usize,
}

impl Indices {
    /// Room for `capacity` of them; none yet.
    ///
    /// # Errors
    /// Not enough memory, or the device failed.
    pub fn with_capacity(stream: &Stream, capacity: usize) -> Result<Self, CudaError> {
        Ok(Self { buffer: Buffer::zeroed(stream, capacity)?, len: 0, bound: 0 })
    }

    /// Replaces them by `rows`, each below `bound`. Queued on `stream`.
    ///
    /// # Errors
    /// One is not below, or there is no room (they are as they were), or the device failed.
    pub fn set(
        &mut self,
        stream: &Stream,
        ring: &mut PinnedRing,
        rows: &[u32],
        bound: usize,
    ) -> Result<(), CudaError> {
        if let Some(&row) = rows.iter().find(|&&row| row as usize >= bound) {
            return Err(dimension("row", "below the number of rows", row as usize));
        }
        let to = self.buffer.part_mut(0..rows.len())?;
        ring.upload(stream, rows, to)?;
        (self.len, self.bound) = (rows.len(), bound);
        Ok(())
    }

    /// How many.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// `Ok` where each is below `rows`.
    pub(super) fn check(&self, rows: usize) -> Result<(), CudaError> {
        if self.bound <= rows {
            Ok(())
        } else {
            Err(dimension("rows that indices were set for", "at most those that there are", self.bound))
        }
    }

    pub(super) fn address(&self) -> u64 {
        self.buffer.all().address()
    }
}

/// Row of a token that is in none: padding, whose keys and values are written nowhere.
const NO_ROW: u32 = u32::MAX;

/// A batch on the device whose every position lies inside an arena.
///
/// Having one tells you what a [`SlotMapping`](crate::SlotMapping) tells you: every block id is below the capacity that it was set with, and
/// every position up to each row's last is covered by the row's table.
#[derive(Debug)]
pub struct DeviceBatch {
    layout: DeviceKvLayout,
    capacity: u32,
    tokens: usize,
    /// Per token.
    positions: Buffer<u32>,
    token_rows: Buffer<u32>,
    /// Most rows.
    room: usize,
    /// Per row, `room` each: where its table begins in `tables`; its first token, and one more for the end; its context. Rows that the batch
    /// does not have are padding: no tokens, no context.
    rows: Buffer<u32>,
    tables: Buffer<u32>,
    host: HostBatch,
    /// Of what is in it: no other batch has it, nor this one at another time.
    stamp: u64,
}

/// The same on the host, kept for its memory.
#[derive(Default, Debug)]
struct HostBatch {
    positions: Vec<u32>,
    token_rows: Vec<u32>,
    row_tables: Vec<u32>,
    /// First tokens, and the end of the last.
    starts: Vec<u32>,
    /// Positions up to each row's last token.
    contexts: Vec<u32>,
    tables: Vec<u32>,
    /// What `rows` of the device's is filled with.
    rows: Vec<u32>,
}

/// A row of a batch: which tokens are its, and how much of the past they see.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct BatchRow {
    /// In `tables`.
    pub(super) table: u32,
    /// In the batch.
    pub(super) first_token: usize,
    pub(super) tokens: usize,
    /// Positions up to that of the last token.
    pub(super) context: usize,
}

/// A number that was never given before.
fn stamp() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl DeviceBatch {
    /// Room for batches of at most `tokens` tokens in `rows` rows, with tables of `entries` blocks in all, of an arena of `layout` with
    /// `capacity` blocks.
    ///
    /// # Errors
    /// Dimensions that kernels do not work with, not enough memory, or the device failed.
    pub fn with_capacity(
        stream: &Stream,
        layout: DeviceKvLayout,
        capacity: u32,
        (tokens, rows, entries): (usize, usize, usize),
    ) -> Result<Self, CudaError> {
        layout.check()?;
        layout.arena_bytes(capacity)?;
        Ok(Self {
            layout,
            capacity,
            tokens: 0,
            positions: Buffer::zeroed(stream, tokens)?,
            token_rows: Buffer::zeroed(stream, tokens)?,
            room: rows,
            rows: Buffer::zeroed(stream, rows_len(rows)?)?,
            tables: Buffer::zeroed(stream, entries)?,
            host: HostBatch::default(),
            stamp: stamp(),
        })
    }

    /// Replaces the batch by `rows`, followed by padding up to `tokens` tokens. Queued on `stream`.
    ///
    /// # Errors
    /// Which row is wrong, and how, or no room (the batch is as it was); or the device failed.
    pub fn set(
        &mut self,
        stream: &Stream,
        ring: &mut PinnedRing,
        rows: &[KvRow<'_>],
        tokens: usize,
    ) -> Result<(), CudaError> {
        if rows.len() > self.room {
            return Err(dimension("rows of a batch", "at most those that there is room for", rows.len()));
        }
        let entries = rows.iter().map(|row| row.table.len()).sum();
        let parts = [
            self.positions.part_mut(0..tokens)?,
            self.token_rows.part_mut(0..tokens)?,
            self.rows.all_mut(),
            self.tables.part_mut(0..entries)?,
        ];
        self.host.lay_out(&self.layout, self.capacity, rows, tokens)?;
        self.host.pad_rows(self.room);
        self.stamp = stamp();
        self.tokens = 0;
        let HostBatch { positions, token_rows, tables, rows, .. } = &self.host;
        for (from, to) in [positions, token_rows, rows, tables].into_iter().zip(parts) {
            ring.upload(stream, from, to)?;
        }
        self.tokens = tokens;
        Ok(())
    }

    /// Tokens, padding included.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The layout that it is for.
    #[must_use]
    pub fn layout(&self) -> &DeviceKvLayout {
        &self.layout
    }

    /// Bytes that an arena must have.
    ///
    /// # Errors
    /// The size overflows.
    pub fn arena_bytes(&self) -> Result<usize, ShapeError> {
        self.layout.arena_bytes(self.capacity)
    }

    /// Addresses of positions, rows of tokens, tables of rows, and tables.
    pub(super) fn addresses(&self) -> [u64; 4] {
        [&self.positions, &self.token_rows, &self.rows, &self.tables].map(|b| b.all().address())
    }

    /// Rows, without padding.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.host.contexts.len()
    }

    /// Most rows, padding included.
    #[must_use]
    pub fn room(&self) -> usize {
        self.room
    }

    /// Blocks that its arena has.
    pub(super) fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Entries of all tables.
    pub(super) fn entries(&self) -> usize {
        self.host.tables.len()
    }

    /// Addresses of the rows from `first` on: where their tables begin, their first tokens (and one more for the end), their contexts. Padding
    /// up to `room` follows the last.
    pub(super) fn row_addresses(&self, first: usize) -> [u64; 3] {
        let at = self.rows.all().address();
        [0, self.room, 2 * self.room + 1].map(|part| at + ((part + first) * size_of::<u32>()) as u64)
    }

    /// A row; one of padding past the last.
    pub(super) fn row(&self, index: usize) -> BatchRow {
        self.host.row(index)
    }

    /// The blocks of a row; of one of padding, none.
    pub(super) fn table(&self, index: usize) -> &[u32] {
        self.host.table(index)
    }

    /// What is in it, by a number.
    pub(super) fn stamp(&self) -> u64 {
        self.stamp
    }
}

/// Words of all rows.
fn rows_len(rows: usize) -> Result<usize, ShapeError> {
    let words = product("rows of a batch", &[rows, 3])?;
    words.checked_add(1).ok_or(ShapeError::Overflow { what: "rows of a batch" })
}

impl HostBatch {
    fn lay_out(
        &mut self,
        layout: &DeviceKvLayout,
        capacity: u32,
        rows: &[KvRow<'_>],
        tokens: usize,
    ) -> Result<(), CudaError> {
        let mut count = 0_usize;
        for (index, row) in rows.iter().enumerate() {
            if row.tokens == 0 {
                return Err(KvError::Empty { row: index }.into());
            }
            let end = u64::from(row.first_position) + u64::from(row.tokens);
            let covered = row.table.len() as u64 * layout.block_size as u64;
            // Positions are 32 bits wide, however long the table.
            if end > covered.min(u64::from(u32::MAX)) {
                return Err(KvError::Table { row: index, end, covered }.into());
            }
            if let Some(&block) = row.table.iter().find(|block| block.0 >= capacity) {
                return Err(KvError::Block { row: index, block, capacity }.into());
            }
            count += row.tokens as usize;
        }
        if count > tokens {
            return Err(dimension("tokens of a batch", "at least those of its rows", tokens));
        }
        let Self { positions, token_rows, row_tables, starts, contexts, tables, .. } = self;
        for part in [&mut *positions, &mut *token_rows, &mut *row_tables, starts, contexts, &mut *tables] {
            part.clear();
        }
        for (index, row) in rows.iter().enumerate() {
            let end = row.first_position + row.tokens;
            row_tables.push(tables.len() as u32);
            tables.extend(row.table.iter().map(|block| block.0));
            starts.push(positions.len() as u32);
            contexts.push(end);
            positions.extend(row.first_position..end);
            token_rows.resize(positions.len(), index as u32);
        }
        starts.push(positions.len() as u32);
        positions.resize(tokens, 0);
        token_rows.resize(tokens, NO_ROW);
        Ok(())
    }

    /// Fills `rows`, with padding up to `room`.
    fn pad_rows(&mut self, room: usize) {
        let Self { row_tables, starts, contexts, rows, .. } = self;
        rows.clear();
        rows.extend_from_slice(row_tables);
        rows.resize(room, 0);
        rows.extend_from_slice(starts);
        rows.resize(2 * room + 1, starts.last().copied().unwrap_or(0));
        rows.extend_from_slice(contexts);
        rows.resize(3 * room + 1, 0);
    }

    fn row(&self, index: usize) -> BatchRow {
        let end = self.starts.last().map_or(0, |&end| end as usize);
        let Some(&context) = self.contexts.get(index) else {
            return BatchRow { table: 0, first_token: end, tokens: 0, context: 0 };
        };
        let (first, next) = (self.starts[index] as usize, self.starts[index + 1] as usize);
        let table = self.row_tables[index];
        BatchRow { table, first_token: first, tokens: next - first, context: context as usize }
    }

    fn table(&self, index: usize) -> &[u32] {
        let Some(&first) = self.row_tables.get(index) else { return &[] };
        let end = self.row_tables.get(index + 1).map_or(self.tables.len(), |&end| end as usize);
        &self.tables[first as usize..end]
    }
}

#[cfg(test)]
mod tests;
