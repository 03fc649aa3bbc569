//! The other operand of a matrix product: rows of activations, as the weights want them.
//!
//! **Owns** the quantisation of activations. **Never** multiplies.
//!
//! `x ≈ scale * q + zero` with `q` in `[-127, 127]` per block of 32 columns. The zero point halves the step where a block has one large
//! value: mean |Δlogprob| per prompt is 0.04-0.06 with it and 0.06-0.11 without.
#![allow(unsafe_code)]

use super::disjoint::Disjoint;
use super::isa::{Isa, Vectors};
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
        (self.rows, self.columns) = (0, 0);
        self.floats.clear();
        self.codes.clear();
        self.blocks.clear();
        if columns == 0 || !x.len().is_multiple_of(columns) {
            return Err(ShapeError::Dimension {
                what: "number of activation columns",
                needed: "a divisor of the number of elements",
                found: columns,
            });
        }
        if kind != ActivationKind::F32 && !columns.is_multiple_of(GROUP) {
            return Err(ShapeError::Dimension {
                what: "number of activation columns",
                needed: "a multiple of 32",
                found: columns,
            });
        }
        (self.rows, self.columns) = (x.len() / columns, columns);
        if kind != ActivationKind::Int8 {
            self.floats.extend_from_slice(x);
        }
        if kind != ActivationKind::F32 {
            let scheme = self.scheme;
            let input = x.as_chunks::<GROUP>().0;
            self.codes.resize(input.len(), [0; 8]);
            self.blocks.resize(input.len(), Block::default());
            let isa = isa.usable();
            let blocks = Disjoint::new(&mut self.blocks);
            pool.for_parts(&mut self.codes, PART, &|part, codes| {
                let range = part * PART..part * PART + codes.len();
                // SAFETY: each part is given to one thread, and the ranges of different parts do not overlap.
                let blocks = unsafe { blocks.part(range.clone()) };
                quantize_blocks(isa, scheme, &input[range], codes, blocks);
            });
        }
        Ok(())
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

    /// Bytes that `rows` rows of `columns` take at most.
    ///
    /// # Errors
    /// The size overflows.
    pub fn bytes(rows: usize, columns: usize) -> Result<usize, ShapeError> {
        product("activations", &[rows, columns, 6])
    }
}

/// Blocks that one thread quantises at a time.
const PART: usize = 128;

fn quantize_blocks(
    isa: Isa,
    scheme: Scheme,
    x: &[[f32; GROUP]],
    codes: &mut [[i32; 8]],
    blocks: &mut [Block],
) {
    match isa.vectors() {
        Vectors::Portable => quantize_each(scheme, x, codes, blocks),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `set` made `isa` with `Isa::usable`, which found AVX2.
        Vectors::Avx2 | Vectors::Avx512 => unsafe { quantize_avx2(scheme, x, codes, blocks) },
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

/// One block. Plain operations, each rounded once and in one order: the same bits everywhere.
#[inline(always)]
fn quantize(scheme: Scheme, x: &[f32; GROUP]) -> ([i32; 8], Block) {
    /// Adding it rounds to an integer, found in the low bits of the sum.
    const ROUND: f32 = 12_582_912.0;
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
        return ([0; 8], Block { scale: f32::NAN, zero: f32::NAN, sum: f32::NAN, centres: [0; 3] });
    }
    let (zero, reach) = match scheme {
        Scheme::Asymmetric => (0.5 * low + 0.5 * high, 0.5 * high - 0.5 * low),
        Scheme::Symmetric => (0.0, high.max(-low)),
    };
    // A reach so small that its inverse overflows is none.
    let (scale, inverse) = if reach > 1e-35 { (reach / 127.0, 127.0 / reach) } else { (0.0, 0.0) };
    let mut codes = [0_i32; GROUP];
    for (code, x) in codes.iter_mut().zip(x) {
        let rounded = (x - zero) * inverse + ROUND;
        *code = (rounded.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32).clamp(-127, 127);
    }
    let halves = [codes[..16].iter().sum::<i32>(), codes[16..].iter().sum::<i32>()];
    let all = halves[0] + halves[1];
    let sum = scale * all as f32 + GROUP as f32 * zero;
    let centres = [halves[0], halves[1], all].map(|sum| -128 * sum);
    let words = std::array::from_fn(|i| {
        i32::from_le_bytes([
            codes[4 * i] as u8,
            codes[4 * i + 1] as u8,
            codes[4 * i + 2] as u8,
            codes[4 * i + 3] as u8,
        ])
    });
    (words, Block { scale, zero, sum, centres })
}
