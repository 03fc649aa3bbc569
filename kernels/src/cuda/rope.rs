//! Rotary embedding, and keys and values into their blocks.
#![allow(unsafe_code)]

use super::batch::DeviceBatch;
use super::buffer::{Buffer, View, ViewMut};
use super::error::CudaError;
use super::launch::{Grid, Half, Params, launch, launch_early};
use super::norm::{PACK, blocks, dimension, warps};
use super::stream::Stream;
use crate::cpu::ops::Pairing;
use crate::e4m3::DeviceKvElement;
use crate::error::{KvError, length, product};

/// Tokens whose heads are shared among blocks.
const FEW_TOKENS: usize = 64;
/// Threads of such a block.
const FEW_THREADS: usize = 128;

/// Cosines and sines for the tokens of a batch: computed once per step, used by every layer.
#[derive(Debug)]
pub struct DeviceAngles {
    frequencies: Buffer<f32>,
    magnitude: f32,
    /// `[tokens][pairs]`, cosine and sine.
    turns: Buffer<[f32; 2]>,
    tokens: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct AngleArgs {
    positions: u64,
    frequencies: u64,
    turns: u64,
    tokens: u32,
    pairs: u32,
    magnitude: f32,
    unused: u32,
}
// SAFETY: the fields of AngleArgs in rope.cu; the last is its padding.
unsafe impl Params for AngleArgs {}

impl DeviceAngles {
    /// Room for `tokens` tokens. `frequencies`: radians per position of each turning pair; `magnitude` is a factor on cosines and sines.
    ///
    /// # Errors
    /// Not enough memory, or the device failed.
    pub fn new(
        stream: &Stream,
        frequencies: &[f32],
        magnitude: f32,
        tokens: usize,
    ) -> Result<Self, CudaError> {
        let turns = product("angles", &[tokens, frequencies.len()])?;
        Ok(Self {
            frequencies: Buffer::copy_of(stream, frequencies)?,
            magnitude,
            turns: Buffer::zeroed(stream, turns)?,
            tokens: 0,
        })
    }

    /// Computes them for the positions of a batch.
    ///
    /// # Errors
    /// The batch has more tokens than there is room for (nothing was launched), or the device failed.
    pub fn set(&mut self, stream: &Stream, batch: &DeviceBatch) -> Result<(), CudaError> {
        let (tokens, pairs) = (batch.tokens(), self.frequencies.len());
        let turns = self.turns.part_mut(0..product("angles", &[tokens, pairs])?)?;
        self.tokens = tokens;
        if turns.is_empty() {
            return Ok(());
        }
        let [positions, ..] = batch.addresses();
        let params = AngleArgs {
            positions,
            frequencies: self.frequencies.all().address(),
            turns: turns.address(),
            tokens: tokens as u32,
            pairs: pairs as u32,
            magnitude: self.magnitude,
            unused: 0,
        };
        let grid =
            Grid { blocks: (blocks("angles", turns.len().div_ceil(256))?, 1), threads: 256, shared: 0 };
        // SAFETY: a thread for each of `tokens * pairs` turns, which the part has; positions has `tokens`, frequencies `pairs` elements.
        unsafe { launch(stream, &stream.device().kernels().rope_angles, "RoPE angles", grid, params) }
    }
}

/// What the projections of a layer gave, and where it goes.
#[expect(missing_debug_implementations, reason = "names of device memory say nothing")]
pub struct RopeIntoKv<'a, T: Half> {
    /// `[tokens][(heads + 2 kv_heads) head_dim]`: queries, keys, values. Queries are turned in place.
    pub qkv: ViewMut<'a, T>,
    /// Heads of queries.
    pub heads: usize,
    /// Added to each row of `qkv` first.
    pub bias: Option<View<'a, f32>>,
    /// Of the batch.
    pub angles: &'a DeviceAngles,
    /// Which elements turn together.
    pub pairing: Pairing,
    /// Whose tokens they are.
    pub batch: &'a DeviceBatch,
    /// The layer written.
    pub layer: usize,
    /// The KV arena, as the batch's layout and capacity say.
    pub arena: ViewMut<'a, u8>,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct RopeArgs {
    qkv: u64,
    bias: u64,
    q: u64,
    turns: u64,
    positions: u64,
    token_rows: u64,
    row_tables: u64,
    tables: u64,
    arena: u64,
    block_stride: u64,
    layer_offset: u64,
    qkv_stride: u32,
    q_stride: u32,
    heads: u32,
    kv_heads: u32,
    head_dim: u32,
    block_shift: u32,
    interleaved: u32,
    unused: u32,
}
// SAFETY: the fields of RopeArgs in rope.cu; the last is its padding.
unsafe impl Params for RopeArgs {}

/// Adds the bias, turns queries (in place) and keys, and writes keys and values into one layer of the arena, in one pass. Computed in
/// single precision, rounded once: to `T`, or as [`quantize_e4m3`](crate::quantize_e4m3) does.
///
/// # Errors
/// The shapes do not fit (nothing was launched), or the device failed.
pub fn rope_into_kv<T: Half>(stream: &Stream, args: RopeIntoKv<'_, T>) -> Result<(), CudaError> {
    let RopeIntoKv { qkv, heads, bias, angles, pairing, batch, layer, arena } = args;
    let layout = batch.layout();
    let (tokens, d) = (batch.tokens(), layout.head_dim);
    if layer >= layout.layers {
        return Err(KvError::Layer { layer: layer as u32, layers: layout.layers as u32 }.into());
    }
    length("KV arena", batch.arena_bytes()?, arena.len())?;
    if heads == 0 {
        return Err(dimension("query heads", "positive", heads));
    }
    let all_heads = heads + 2 * layout.kv_heads;
    let width = product("queries, keys and values", &[all_heads, d])?;
    length("queries, keys and values", product("batch", &[tokens, width])?, qkv.len())?;
    if let Some(bias) = bias {
        length("bias", width, bias.len())?;
    }
    length("rotary frequencies", d / 2, angles.frequencies.len())?;
    length("angles", tokens, angles.tokens)?;
    if tokens == 0 {
        return Ok(());
    }
    let [positions, token_rows, row_tables, tables] = batch.addresses();
    let params = RopeArgs {
        qkv: qkv.address(),
        bias: bias.map_or(0, View::address),
        q: qkv.address(),
        turns: angles.turns.all().address(),
        positions,
        token_rows,
        row_tables,
        tables,
        arena: arena.address(),
        block_stride: layout.block_stride as u64,
        layer_offset: (layer * layout.layer_stride) as u64,
        qkv_stride: width as u32,
        q_stride: width as u32,
        heads: heads as u32,
        kv_heads: layout.kv_heads as u32,
        head_dim: d as u32,
        block_shift: layout.block_size.trailing_zeros(),
        interleaved: u32::from(pairing == Pairing::Interleaved),
        unused: 0,
    };
    let units = all_heads * (d / (2 * PACK));
    // A thread of a few tokens' blocks does one thing: they wait for memory, not for each other.
    let shares = if tokens <= FEW_TOKENS { units.div_ceil(FEW_THREADS) } else { 1 };
    let threads = warps(units.div_ceil(shares).min(512));
    let grid = Grid { blocks: (blocks("tokens", tokens)?, shares as u32), threads, shared: 0 };
    let kernels = stream.device().kernels();
    let kernel = match layout.element {
        DeviceKvElement::Half => &kernels.rope_into_kv[T::INDEX],
        DeviceKvElement::E4m3 => &kernels.rope_into_kv_e4m3[T::INDEX],
    };
    // SAFETY: `shares` blocks per token, each within its row of `qkv`, `width` elements, and its row of turns, `d / 2`. Having the batch tells that
    // every token's row, position and block are inside the tables and the capacity; `layer` is one of the layout's, so that all writes are
    // inside the arena, whose length was checked. `qkv` and `arena` are borrowed mutably. The kernel waits for the one before it first of all.
    unsafe { launch_early(stream, kernel, "RoPE and KV write", grid, params) }
}
