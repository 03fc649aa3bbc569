//! Activation, embedding, copies of blocks, seeded weights.
#![allow(unsafe_code)]

use pagedd_core::BlockId;

use super::batch::DeviceKvLayout;
use super::buffer::{Buffer, Plain, View, ViewMut};
use super::error::CudaError;
use super::launch::{Grid, Half, Params, launch, launch_early};
use super::norm::{PACK, blocks, dimension, warps, whole_rows};
use super::pinned::PinnedRing;
use super::sample::Drawn;
use super::stream::Stream;
use crate::error::{KvError, length, product};

/// Bytes that a thread copies at once.
const PACK_BYTES: usize = 16;
/// Threads of a pass over elements.
const THREADS: usize = 256;

/// A grid that strides over so many packs: enough blocks to fill the device, no more than there is work for.
fn strided(stream: &Stream, packs: usize) -> Grid {
    let most = stream.device().info().multiprocessors as usize * 16;
    Grid { blocks: (packs.div_ceil(THREADS).clamp(1, most) as u32, 1), threads: THREADS as u32, shared: 0 }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct SiluArgs {
    gate_up: u64,
    out: u64,
    row_packs: u32,
    row_blocks: u32,
}
// SAFETY: the fields of SiluArgs in elementwise.cu.
unsafe impl Params for SiluArgs {}

/// `out = silu(gate) * up`: `gate_up` is `[rows][2 ffn]`, gate before up, `out` `[rows][ffn]`. In single precision, rounded once.
///
/// # Errors
/// The shapes do not fit (nothing was launched), or the device failed.
pub fn silu_mul<T: Half>(
    stream: &Stream,
    gate_up: View<'_, T>,
    ffn: usize,
    out: &mut ViewMut<'_, T>,
) -> Result<(), CudaError> {
    let rows = whole_rows("activation output", ffn, out.len())?;
    length("gate and up", product("gate and up", &[rows, 2, ffn])?, gate_up.len())?;
    if rows == 0 {
        return Ok(());
    }
    let row_packs = ffn / PACK;
    let row_blocks = row_packs.div_ceil(THREADS);
    let params = SiluArgs {
        gate_up: gate_up.address(),
        out: out.address(),
        row_packs: row_packs as u32,
        row_blocks: row_blocks as u32,
    };
    let all = blocks("rows", product("activation output", &[rows, row_blocks])?)?;
    let grid = Grid { blocks: (all, 1), threads: THREADS as u32, shared: 0 };
    let kernel = &stream.device().kernels().silu_mul[T::INDEX];
    // SAFETY: of row `i < rows`, packs below `row_packs` of `out`, and the two packs of each in `gate_up`, which is twice as long. The kernel waits
    // for the one before it first of all.
    unsafe { launch_early(stream, kernel, "SiLU", grid, params) }
}

/// Where a token of a step comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TokenSource {
    /// It is known.
    Known(u32),
    /// It is what draw number so many of an earlier step gave, still on the device.
    Drawn(u32),
}

/// Marks an index among draws, in place of a token.
const FROM_DRAW: u32 = 1 << 31;

/// The tokens of a step, on the device.
///
/// Having one tells you nothing about their range: the kernel gives zeros for a token outside the vocabulary.
#[derive(Debug)]
pub struct Tokens {
    buffer: Buffer<u32>,
    len: usize,
    host: Vec<u32>,
}

impl Tokens {
    /// Room for `capacity` tokens; none yet.
    ///
    /// # Errors
    /// Not enough memory, or the device failed.
    pub fn with_capacity(stream: &Stream, capacity: usize) -> Result<Self, CudaError> {
        Ok(Self { buffer: Buffer::zeroed(stream, capacity)?, len: 0, host: Vec::with_capacity(capacity) })
    }

    /// Replaces them. Queued on `stream`.
    ///
    /// # Errors
    /// A number of 2³¹ or more, or no room (they are as they were); or the device failed.
    pub fn set(
        &mut self,
        stream: &Stream,
        ring: &mut PinnedRing,
        tokens: &[TokenSource],
    ) -> Result<(), CudaError> {
        self.host.clear();
        for token in tokens {
            let (word, mark) = match *token {
                TokenSource::Known(id) => (id, 0),
                TokenSource::Drawn(index) => (index, FROM_DRAW),
            };
            if word >= FROM_DRAW {
                return Err(dimension("token", "below 2^31", word as usize));
            }
            self.host.push(word | mark);
        }
        ring.upload(stream, &self.host, self.buffer.part_mut(0..self.host.len())?)?;
        self.len = self.host.len();
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
}

#[repr(C)]
#[derive(Clone, Copy)]
struct EmbedArgs {
    table: u64,
    tokens: u64,
    drawn: u64,
    out: u64,
    vocabulary: u32,
    drawn_count: u32,
    hidden: u32,
    unused: u32,
}
// SAFETY: the fields of EmbedArgs in elementwise.cu; the last is its padding.
unsafe impl Params for EmbedArgs {}

/// What an embedding gathers.
#[expect(missing_debug_implementations, reason = "names of device memory say nothing")]
pub struct Embed<'a, T: Half> {
    /// `[vocabulary][hidden]`.
    pub table: View<'a, T>,
    /// Elements of a row.
    pub hidden: usize,
    /// Which rows.
    pub tokens: &'a Tokens,
    /// The draws that tokens refer to; empty where none does.
    pub drawn: Option<View<'a, Drawn>>,
    /// `[tokens][hidden]`, in single precision: the residual stream begins with it.
    pub out: ViewMut<'a, f32>,
}

/// Copies the row of each token. A token outside the vocabulary, as a failed draw gives it, gets zeros: its row fails by its logits alone.
///
/// # Errors
/// The shapes do not fit (nothing was launched), or the device failed.
pub fn embed<T: Half>(stream: &Stream, args: Embed<'_, T>) -> Result<(), CudaError> {
    let Embed { table, hidden, tokens, drawn, out } = args;
    let vocabulary = whole_rows("embedding", hidden, table.len())?;
    length("embedded tokens", product("embedded tokens", &[tokens.len, hidden])?, out.len())?;
    if tokens.is_empty() {
        return Ok(());
    }
    let params = EmbedArgs {
        table: table.address(),
        tokens: tokens.buffer.all().address(),
        drawn: drawn.map_or(0, View::address),
        out: out.address(),
        vocabulary: u32::try_from(vocabulary).unwrap_or(u32::MAX),
        drawn_count: drawn.map_or(0, View::len) as u32,
        hidden: hidden as u32,
        unused: 0,
    };
    let grid = Grid {
        blocks: (blocks("tokens", tokens.len)?, 1),
        threads: warps((hidden / PACK).min(512)),
        shared: 0,
    };
    let kernel = &stream.device().kernels().embed[T::INDEX];
    // SAFETY: a block per token reads a row of the table below `vocabulary`, or none, and writes its row of `out`; an index among draws is
    // compared with their number first.
    unsafe { launch(stream, kernel, "embedding", grid, params) }
}

/// Copies between blocks, checked against an arena.
///
/// Having one tells you: both blocks of every copy are below the capacity that it was set with, none is copied more than whole. It does not
/// tell you that no block is both read and written.
#[derive(Debug)]
pub struct BlockCopies {
    layout: DeviceKvLayout,
    capacity: u32,
    buffer: Buffer<[u32; 3]>,
    len: usize,
    host: Vec<[u32; 3]>,
}

impl BlockCopies {
    /// Room for `most` copies in an arena of `layout` with `capacity` blocks; none yet.
    ///
    /// # Errors
    /// Dimensions that kernels do not work with, not enough memory, or the device failed.
    pub fn with_capacity(
        stream: &Stream,
        layout: DeviceKvLayout,
        capacity: u32,
        most: usize,
    ) -> Result<Self, CudaError> {
        layout.check()?;
        Ok(Self {
            layout,
            capacity,
            buffer: Buffer::zeroed(stream, most)?,
            len: 0,
            host: Vec::with_capacity(most),
        })
    }

    /// Replaces them: from which block, to which, how many tokens. Queued on `stream`.
    ///
    /// # Errors
    /// Which is wrong, or no room (they are as they were); or the device failed.
    pub fn set(
        &mut self,
        stream: &Stream,
        ring: &mut PinnedRing,
        copies: &[(BlockId, BlockId, usize)],
    ) -> Result<(), CudaError> {
        let (capacity, covered) = (self.capacity, self.layout.block_size as u64);
        self.host.clear();
        for (row, &(from, to, tokens)) in copies.iter().enumerate() {
            if let Some(block) = [from, to].into_iter().find(|block| block.0 >= capacity) {
                return Err(KvError::Block { row, block, capacity }.into());
            }
            if tokens as u64 > covered {
                return Err(KvError::Table { row, end: tokens as u64, covered }.into());
            }
            self.host.push([from.0, to.0, tokens as u32]);
        }
        ring.upload(stream, &self.host, self.buffer.part_mut(0..self.host.len())?)?;
        self.len = self.host.len();
        Ok(())
    }
}

/// An address in the first page of all.
#[cfg(feature = "failpoints")]
const NOWHERE: u64 = 256;

#[repr(C)]
#[derive(Clone, Copy)]
struct CopyArgs {
    copies: u64,
    arena: u64,
    block_stride: u64,
    layer_stride: u64,
    runs: u32,
    run_packs: u32,
    token_packs: u32,
    scales: u32,
    run_scales: u32,
    unused: u32,
}
// SAFETY: the fields of CopyArgs in elementwise.cu; the last is its padding.
unsafe impl Params for CopyArgs {}

/// Copies the first tokens of blocks into other blocks, all layers.
///
/// # Errors
/// The arena is not that of the copies (nothing was launched), or the device failed.
pub fn copy_blocks(
    stream: &Stream,
    copies: &BlockCopies,
    arena: &mut ViewMut<'_, u8>,
) -> Result<(), CudaError> {
    let layout = &copies.layout;
    length("KV arena", layout.arena_bytes(copies.capacity)?, arena.len())?;
    if copies.len == 0 {
        return Ok(());
    }
    let token_packs = layout.head_dim * layout.element.bytes() / PACK_BYTES;
    let scaled = layout.element.scale_bytes() > 0;
    let runs = 2 * layout.kv_heads;
    let params = CopyArgs {
        copies: copies.buffer.all().address(),
        arena: arena.address(),
        block_stride: layout.block_stride as u64,
        layer_stride: layout.layer_stride as u64,
        runs: runs as u32,
        run_packs: (layout.block_size * token_packs) as u32,
        token_packs: token_packs as u32,
        scales: if scaled { layout.scales() as u32 } else { 0 },
        run_scales: layout.block_size as u32,
        unused: 0,
    };
    if copies.len > usize::from(u16::MAX) {
        return Err(dimension("copies of a launch", "at most 65,535", copies.len));
    }
    let grid =
        Grid { blocks: (blocks("heads", layout.layers * runs)?, copies.len as u32), threads: 128, shared: 0 };
    // SAFETY: having the copies tells that both blocks are inside the arena, whose length was checked, and that no more tokens are copied
    // than a block has; a thread block stays inside one head of one layer.
    unsafe { launch(stream, &stream.device().kernels().copy_blocks, "block copy", grid, params) }
}

/// Has a kernel read where no memory is: for this process the device fails, as by a kernel that is wrong. Tests look at what comes after.
///
/// # Errors
/// The device has failed already; what this does to it shows at a later call.
#[cfg(feature = "failpoints")]
pub fn read_nowhere(stream: &Stream) -> Result<(), CudaError> {
    let params = CopyArgs {
        copies: NOWHERE,
        arena: NOWHERE,
        block_stride: 0,
        layer_stride: 0,
        runs: 1,
        run_packs: 0,
        token_packs: 0,
        scales: 0,
        run_scales: 0,
        unused: 0,
    };
    let grid = Grid { blocks: (1, 1), threads: 1, shared: 0 };
    // SAFETY: the kernel's one thread reads a copy's numbers first, at an address that neither driver nor system ever maps. The device stops
    // it there: nothing is read or written, and the process can run nothing more on the device.
    unsafe { launch(stream, &stream.device().kernels().copy_blocks, "a read of nowhere", grid, params) }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct FillArgs {
    out: u64,
    packs: u64,
    seed: u64,
    deviation: f32,
    unused: u32,
}
// SAFETY: the fields of FillArgs in elementwise.cu; the last is its padding.
unsafe impl Params for FillArgs {}

/// Fills `out`, a multiple of 8 elements, with normal numbers around 0: an element is a function of seed and index.
///
/// # Errors
/// The length does not fit (nothing was launched), or the device failed.
pub fn fill_normal<T: Half>(
    stream: &Stream,
    seed: u64,
    deviation: f32,
    out: &mut ViewMut<'_, T>,
) -> Result<(), CudaError> {
    let packs = whole_rows("filled buffer", PACK, out.len())?;
    if packs == 0 {
        return Ok(());
    }
    let params = FillArgs { out: out.address(), packs: packs as u64, seed, deviation, unused: 0 };
    let kernel = &stream.device().kernels().fill_normal[T::INDEX];
    // SAFETY: pack `i < packs` of `out`, which has so many.
    unsafe { launch(stream, kernel, "filling", strided(stream, packs), params) }
}

// SAFETY: two integers: every pattern of bits is a value.
unsafe impl Plain for Drawn {}
