//! The other operand of a matrix product: rows of activations, as the weights want them.
//!
//! **Owns** the quantisation of activations. **Never** multiplies.
//!
//! `x ≈ scale * q + zero` with `q` in `[-127, 127]` per block of 32 columns. The zero point halves the step where a block has one large
//! value: mean |Δlogprob| per prompt is 0.04-0.06 with it and 0.06-0.11 without.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicUsize, Ordering};

use super::disjoint::Disjoint;
use super::exp::ROUND;
use super::isa::{Isa, Vectors};
use super::ops::SMALL;
use super::packed::GROUP;
use super::pool::ThreadPool;
use crate::error::{ShapeError, length, product};

/// What a product needs of its activations.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ActivationKind {
    /// Single precision.
    F32,
    /// 8 bits per value, scale and zero point per 32.
    Int8,
    /// Both, for activations that meet weights of several types.
    Both,
}

impl ActivationKind {
    /// What satisfies both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        if self == other { self } else { Self::Both }
    }
}

/// How a block of 32 activations becomes 8-bit.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Scheme {
    /// The codes span the block's own minimum and maximum.
    #[default]
    Asymmetric,
    /// The codes span ± the block's largest magnitude.
    Symmetric,
}

/// Parameters of a block of 32 activations.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
#[repr(C)]
pub(crate) struct Block {
    pub(crate) scale: f32,
    pub(crate) zero: f32,
    /// Sum of the 32 represented values.
    pub(crate) sum: f32,
    /// -128 times the sum of the codes of the first 16, of the last 16, and of all: what centres weight codes around 128, exactly.
    pub(crate) centres: [i32; 3],
}

/// Rows from which on matrix tiles pay for weights of some type.
pub(crate) const LEAST_TILED: usize = 4;
/// Rows of a matrix tile.
pub(crate) const TILE: usize = 16;

/// A group of 32 columns of [`TILE`] rows, side by side: what matrix tiles and vectors over rows load from one place.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct TileGroup {
    pub(crate) codes: [[i32; 8]; TILE],
    pub(crate) scales: [f32; TILE],
    pub(crate) zeros: [f32; TILE],
    pub(crate) sums: [f32; TILE],
}

impl TileGroup {
    const EMPTY: Self =
        Self { codes: [[0; 8]; TILE], scales: [0.0; TILE], zeros: [0.0; TILE], sums: [0.0; TILE] };
}

/// Rows of activations. Made once and set again for every product, so that nothing is allocated in the steady state.
#[derive(Debug, Default)]
pub struct Activations {
    scheme: Scheme,
    rows: usize,
    columns: usize,
    floats: Vec<f32>,
    /// `[rows][columns / 32]`, four codes to a word, little-endian.
    codes: Vec<[i32; 8]>,
    blocks: Vec<Block>,
    /// `[rows / TILE, rounded up][columns / 32]`: codes and parameters once more, where matrix tiles may take them. Rows past the last are left
    /// open.
    tiles: Vec<TileGroup>,
    /// A row per thread, between its computation and its codes.
    stage: Vec<f32>,
}

impl Activations {
    /// No rows yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// No rows yet; 8-bit blocks will be made by `scheme`.
    #[must_use]
    pub fn with_scheme(scheme: Scheme) -> Self {
        Self { scheme, ..Self::default() }
    }

    /// Takes `x` (rows of `columns`) in the form `kind`. A block with a value that is not finite becomes NaN, and so does what it is
    /// multiplied into.
    ///
    /// # Errors
    /// `x` is no whole number of rows, or 8-bit columns are no multiple of 32; the activations are then empty.
    pub fn set(
        &mut self,
        pool: &ThreadPool,
        isa: Isa,
        x: &[f32],
        columns: usize,
        kind: ActivationKind,
    ) -> Result<(), ShapeError> {
        let isa = isa.usable();
        self.make(pool, isa, x.len(), columns, kind)?;
        if kind != ActivationKind::Int8 {
            self.floats.copy_from_slice(x);
        }
        if kind != ActivationKind::F32 {
            let (scheme, vectors) = (self.scheme, isa.vectors());
            let input = x.as_chunks::<GROUP>().0;
            let size = if x.len() <= SMALL { input.len() } else { PART };
            let blocks = Disjoint::new(&mut self.blocks);
            pool.for_parts(&mut self.codes, size, &|part, codes| {
                let range = part * size..part * size + codes.len();
                // SAFETY: each part is given to one thread, and the ranges of different parts do not overlap.
                let blocks = unsafe { blocks.part(range.clone()) };
                quantize_blocks(vectors, scheme, &input[range], codes, blocks);
            });
            self.fill_tiles(pool);
        }
        Ok(())
    }

    /// As [`Activations::set`] for `rows` rows of `columns` that `each(row, values)` computes: one pass over each row, and its single-precision
    /// values are kept only where `kind` asks for them.
    ///
    /// # Errors
    /// As [`Activations::set`]; `each` has not been called.
    pub(crate) fn set_rows(
        &mut self,
        pool: &ThreadPool,
        isa: Isa,
        (rows, columns): (usize, usize),
        kind: ActivationKind,
        each: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) -> Result<(), ShapeError> {
        let isa = isa.usable();
        self.make(pool, isa, product("activations", &[rows, columns])?, columns, kind)?;
        let (scheme, vectors) = (self.scheme, isa.vectors());
        let groups = self.codes.len() / rows.max(1);
        let (floats, stage) = (Disjoint::new(&mut self.floats), Disjoint::new(&mut self.stage));
        let (codes, blocks) = (Disjoint::new(&mut self.codes), Disjoint::new(&mut self.blocks));
        let one = |thread: usize, row: usize| {
            let values = match kind {
                // SAFETY: each thread of the pool has a stage of its own, and holds one row at a time.
                ActivationKind::Int8 => unsafe { stage.part(thread * columns..(thread + 1) * columns) },
                // SAFETY: each row is given to one thread, once.
                ActivationKind::F32 | ActivationKind::Both => unsafe {
                    floats.part(row * columns..(row + 1) * columns)
                },
            };
            each(row, values);
            let range = row * groups..(row + 1) * groups;
            // SAFETY: each row is given to one thread, once.
            let codes = unsafe { codes.part(range.clone()) };
            // SAFETY: as above.
            let blocks = unsafe { blocks.part(range) };
            if kind != ActivationKind::F32 {
                quantize_blocks(vectors, scheme, values.as_chunks::<GROUP>().0, codes, blocks);
            }
        };
        if rows * columns <= SMALL {
            (0..rows).for_each(|row| one(0, row));
        } else {
            let next = AtomicUsize::new(0);
            pool.run(&|thread, _| {
                loop {
                    let row = next.fetch_add(1, Ordering::Relaxed);
                    if row >= rows {
                        break;
                    }
                    one(thread, row);
                }
            });
        }
        self.fill_tiles(pool);
        Ok(())
    }

    /// Makes room for `elements` values in rows of `columns`; what they are is left open.
    fn make(
        &mut self,
        pool: &ThreadPool,
        isa: Isa,
        elements: usize,
        columns: usize,
        kind: ActivationKind,
    ) -> Result<(), ShapeError> {
        let wrong =
            |needed| ShapeError::Dimension { what: "number of activation columns", needed, found: columns };
        let checked = if columns == 0 || !elements.is_multiple_of(columns) {
            Err(wrong("a divisor of the number of elements"))
        } else if kind != ActivationKind::F32 && !columns.is_multiple_of(GROUP) {
            Err(wrong("a multiple of 32"))
        } else {
            Ok((elements / columns, columns))
        };
        (self.rows, self.columns) = *checked.as_ref().unwrap_or(&(0, 0));
        let elements = self.rows * self.columns;
        let (floats, blocks) = match kind {
            ActivationKind::F32 => (elements, 0),
            ActivationKind::Int8 => (0, elements / GROUP),
            ActivationKind::Both => (elements, elements / GROUP),
        };
        // Without clearing first: what stays is written over.
        self.floats.resize(floats, 0.0);
        self.codes.resize(blocks, [0; 8]);
        self.blocks.resize(blocks, Block::default());
        let tiled = blocks > 0 && isa == Isa::Amx && self.rows >= LEAST_TILED;
        let tiles = if tiled { self.rows.div_ceil(TILE) * (self.columns / GROUP) } else { 0 };
        self.tiles.resize(tiles, TileGroup::EMPTY);
        self.stage.resize(self.stage.len().max(self.columns * pool.threads()), 0.0);
        checked.map(|_| ())
    }

    /// Brings codes and parameters into the order of tiles, where that was made room for.
    fn fill_tiles(&mut self, pool: &ThreadPool) {
        let groups = self.columns / GROUP;
        let (rows, codes, blocks) = (self.rows, &self.codes, &self.blocks);
        // Parts of a tile's rows, so that two threads share what is a single tile.
        let size = if self.codes.len() * GROUP <= SMALL { self.tiles.len() } else { groups.min(TILE_PART) };
        pool.for_parts(&mut self.tiles, size, &|part, tiles| {
            for (index, tile) in tiles.iter_mut().enumerate() {
                let (row, group) = ((part * size + index) / groups * TILE, (part * size + index) % groups);
                let from = (row..rows.min(row + TILE)).map(|row| row * groups + group);
                for (at, from) in from.enumerate() {
                    let block = &blocks[from];
                    tile.codes[at] = codes[from];
                    tile.scales[at] = block.scale;
                    tile.zeros[at] = block.zero;
                    tile.sums[at] = block.sum;
                }
            }
        });
    }

    /// Rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Whether they are set in the form `kind`.
    #[must_use]
    pub fn is(&self, kind: ActivationKind) -> bool {
        let elements = self.rows * self.columns;
        let (floats, codes) = (self.floats.len() == elements, self.codes.len() * GROUP == elements);
        match kind {
            ActivationKind::F32 => floats,
            ActivationKind::Int8 => codes,
            ActivationKind::Both => floats && codes,
        }
    }

    /// The single-precision values of a row.
    pub(crate) fn floats(&self, row: usize) -> &[f32] {
        &self.floats[row * self.columns..][..self.columns]
    }

    /// The codes of a row.
    pub(crate) fn codes(&self, row: usize) -> &[[i32; 8]] {
        let groups = self.columns / GROUP;
        &self.codes[row * groups..][..groups]
    }

    /// The block parameters of a row.
    pub(crate) fn blocks(&self, row: usize) -> &[Block] {
        let groups = self.columns / GROUP;
        &self.blocks[row * groups..][..groups]
    }

    /// `[rows / TILE, rounded up][columns / 32]`: the 8-bit form in the order of tiles, if they were set so.
    pub(crate) fn tiles(&self) -> Option<&[TileGroup]> {
        (!self.tiles.is_empty()).then_some(&self.tiles)
    }

    /// What the 8-bit form stands for, in single precision.
    ///
    /// # Errors
    /// They are not set in 8-bit form, or `out` has another length.
    pub fn represented(&self, out: &mut [f32]) -> Result<(), ShapeError> {
        length("represented activations", self.codes.len() * GROUP, out.len())?;
        for ((out, codes), block) in
            out.as_chunks_mut::<GROUP>().0.iter_mut().zip(&self.codes).zip(&self.blocks)
        {
            for (out, code) in out.iter_mut().zip(codes.iter().flat_map(|word| word.to_le_bytes())) {
                *out = f32::from(code as i8) * block.scale + block.zero;
            }
        }
        Ok(())
    }
}

/// Blocks that one thread quantises at a time.
const PART: usize = 128;
/// Groups of tiles that one thread fills at a time.
const TILE_PART: usize = 9;

fn quantize_blocks(
    vectors: Vectors,
    scheme: Scheme,
    x: &[[f32; GROUP]],
    codes: &mut [[i32; 8]],
    blocks: &mut [Block],
) {
    match vectors {
        Vectors::Portable => quantize_each(scheme, x, codes, blocks),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the callers made `vectors` with `Isa::usable`, which found AVX2.
        Vectors::Avx2 => unsafe { quantize_avx2(scheme, x, codes, blocks) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the callers made `vectors` with `Isa::usable`, which found AVX-512 F, BW, DQ and VL.
        Vectors::Avx512 => unsafe { avx512::quantize(scheme, x, codes, blocks) },
        #[cfg(not(target_arch = "x86_64"))]
        Vectors::Avx2 | Vectors::Avx512 => quantize_each(scheme, x, codes, blocks),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn quantize_avx2(scheme: Scheme, x: &[[f32; GROUP]], codes: &mut [[i32; 8]], blocks: &mut [Block]) {
    quantize_each(scheme, x, codes, blocks);
}

#[inline(always)]
fn quantize_each(scheme: Scheme, x: &[[f32; GROUP]], codes: &mut [[i32; 8]], blocks: &mut [Block]) {
    for ((codes, block), x) in codes.iter_mut().zip(blocks).zip(x) {
        (*codes, *block) = quantize(scheme, x);
    }
}

impl Block {
    /// Of a block with a value that is not finite.
    const POISONED: Self = Self { scale: f32::NAN, zero: f32::NAN, sum: f32::NAN, centres: [0; 3] };

    /// Sums and all that follows from the sums of the codes' halves.
    #[inline(always)]
    fn new(scale: f32, zero: f32, halves: [i32; 2]) -> Self {
        let all = halves[0] + halves[1];
        let sum = scale * all as f32 + GROUP as f32 * zero;
        Self { scale, zero, sum, centres: [-128 * halves[0], -128 * halves[1], -128 * all] }
    }
}

/// Scale, its inverse and zero point of a block between `low` and `high`.
#[inline(always)]
fn parameters(scheme: Scheme, low: f32, high: f32) -> (f32, f32, f32) {
    let (zero, reach) = match scheme {
        // Adding 0 makes -0 a 0: which of the two a minimum is depends on the order of comparisons.
        Scheme::Asymmetric => (0.5 * low + 0.5 * high + 0.0, 0.5 * high - 0.5 * low),
        Scheme::Symmetric => (0.0, high.max(-low)),
    };
    // A reach so small that its inverse overflows is none.
    if reach > 1e-35 { (reach / 127.0, 127.0 / reach, zero) } else { (0.0, 0.0, zero) }
}

/// One block. Plain operations, each rounded once and in one order: the same bits everywhere.
#[inline(always)]
fn quantize(scheme: Scheme, x: &[f32; GROUP]) -> ([i32; 8], Block) {
    let mut low = [f32::INFINITY; 8];
    let mut high = [f32::NEG_INFINITY; 8];
    // Sums of x * 0: zero, or NaN where something is not finite.
    let mut poison = [0.0_f32; 8];
    for x in x.as_chunks::<8>().0 {
        for lane in 0..8 {
            low[lane] = if x[lane] < low[lane] { x[lane] } else { low[lane] };
            high[lane] = if x[lane] > high[lane] { x[lane] } else { high[lane] };
            poison[lane] += x[lane] * 0.0;
        }
    }
    let low = low.into_iter().fold(f32::INFINITY, f32::min);
    let high = high.into_iter().fold(f32::NEG_INFINITY, f32::max);
    if !poison.iter().all(|&lane| lane == 0.0) {
        return ([0; 8], Block::POISONED);
    }
    let (scale, inverse, zero) = parameters(scheme, low, high);
    let mut codes = [0_i32; GROUP];
    for (code, x) in codes.iter_mut().zip(x) {
        let rounded = (x - zero) * inverse + ROUND;
        *code = (rounded.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32).clamp(-127, 127);
    }
    let halves = [codes[..16].iter().sum::<i32>(), codes[16..].iter().sum::<i32>()];
    let words = std::array::from_fn(|i| {
        i32::from_le_bytes([
            codes[4 * i] as u8,
            codes[4 * i + 1] as u8,
            codes[4 * i + 2] as u8,
            codes[4 * i + 3] as u8,
        ])
    });
    (words, Block::new(scale, zero, halves))
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use std::arch::x86_64::{
        __m128i, __m512, _mm_add_epi64, _mm_cvtsi128_si64, _mm_sad_epu8, _mm_set1_epi8, _mm_setzero_si128,
        _mm_unpackhi_epi64, _mm_xor_si128, _mm256_set_m128i, _mm512_add_ps, _mm512_castps_si512,
        _mm512_cvtepi32_epi8, _mm512_fpclass_ps_mask, _mm512_max_epi32, _mm512_max_ps, _mm512_min_epi32,
        _mm512_min_ps, _mm512_mul_ps, _mm512_reduce_max_ps, _mm512_reduce_min_ps, _mm512_set1_epi32,
        _mm512_set1_ps, _mm512_sub_epi32, _mm512_sub_ps,
    };

    use super::{Block, GROUP, ROUND, Scheme, parameters};
    use crate::cpu::vector::{load_f32x16, store_words};

    /// NaN of both kinds and both infinities.
    const NOT_FINITE: i32 = 0x99;

    /// As [`super::quantize_each`], with the same bits.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) fn quantize(scheme: Scheme, x: &[[f32; GROUP]], codes: &mut [[i32; 8]], blocks: &mut [Block]) {
        for ((codes, block), x) in codes.iter_mut().zip(blocks).zip(x) {
            let [first, last] = [&x.as_chunks::<16>().0[0], &x.as_chunks::<16>().0[1]];
            let (first, last) = (load_f32x16(first), load_f32x16(last));
            let bad =
                _mm512_fpclass_ps_mask::<NOT_FINITE>(first) | _mm512_fpclass_ps_mask::<NOT_FINITE>(last);
            if bad != 0 {
                (*codes, *block) = ([0; 8], Block::POISONED);
                continue;
            }
            let low = _mm512_reduce_min_ps(_mm512_min_ps(first, last));
            let high = _mm512_reduce_max_ps(_mm512_max_ps(first, last));
            let (scale, inverse, zero) = parameters(scheme, low, high);
            let (first, last) = (round(first, inverse, zero), round(last, inverse, zero));
            store_words(_mm256_set_m128i(last, first), codes);
            *block = Block::new(scale, zero, [sum(first), sum(last)]);
        }
    }

    /// Codes of 16 values.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn round(x: __m512, inverse: f32, zero: f32) -> __m128i {
        let scaled = _mm512_mul_ps(_mm512_sub_ps(x, _mm512_set1_ps(zero)), _mm512_set1_ps(inverse));
        let rounded = _mm512_castps_si512(_mm512_add_ps(scaled, _mm512_set1_ps(ROUND)));
        let codes = _mm512_sub_epi32(rounded, _mm512_set1_epi32(ROUND.to_bits() as i32));
        let codes =
            _mm512_min_epi32(_mm512_max_epi32(codes, _mm512_set1_epi32(-127)), _mm512_set1_epi32(127));
        _mm512_cvtepi32_epi8(codes)
    }

    /// Sum of 16 codes: as bytes around 128.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn sum(codes: __m128i) -> i32 {
        let sums = _mm_sad_epu8(_mm_xor_si128(codes, _mm_set1_epi8(i8::MIN)), _mm_setzero_si128());
        _mm_cvtsi128_si64(_mm_add_epi64(sums, _mm_unpackhi_epi64(sums, sums))) as i32 - 16 * 128
    }
}

#[cfg(test)]
mod tests;
