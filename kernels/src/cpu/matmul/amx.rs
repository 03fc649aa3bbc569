//! The product with AMX: a panel (16 output rows) against up to [`TILE`] activation rows at a time.
//!
//! A panel's codes are unpacked once for all rows, [`BLOCK`] units at a time so that they stay in the first-level cache. A group of 32
//! columns is one tile product: its sums go through memory, and while the next tile product runs they are scaled with 512-bit vectors.
//!
//! Tile registers keep sums from one `asm!` to a later one: the compiler has no use for them, since AMX is not among a function's features.

use std::arch::asm;
use std::arch::x86_64::{
    _mm512_add_epi8, _mm512_and_si512, _mm512_cvtepi32_ps, _mm512_cvtph_ps, _mm512_dpbusd_epi32,
    _mm512_fmadd_ps, _mm512_mul_ps, _mm512_set1_epi8, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps,
    _mm512_setzero_si512, _mm512_srli_epi16, _mm512_xor_si512,
};
use std::cell::RefCell;
use std::marker::PhantomData;

use super::Run;
use crate::cpu::activations::{Activations, Block};
use crate::cpu::packed::{GROUP, PANEL, PackedType};
use crate::cpu::vector::{
    load_f32s, load_f32x16, load_i32x16, load_i256, load_i512, store_f32s, store_f32x16, store_i512,
};

/// Activation rows of a tile: all that a tile register has.
const TILE: usize = 16;
/// Units that are unpacked at a time: 24 KiB of the 48 of the first-level cache.
const BLOCK: usize = 32;

/// Whether the products of so many rows with weights of this type are tiles' work.
pub(super) const fn suits(ty: PackedType, rows: usize) -> bool {
    // Measured: below, unpacking costs more than the tile products save. Two products per unit save the least.
    let least = match ty {
        PackedType::F32 | PackedType::F16 | PackedType::BF16 => return false,
        PackedType::Q4G32 => 4,
        PackedType::Q8G32Min => 6,
        PackedType::Q8G32 => 9,
        PackedType::Q8G16 => 16,
    };
    rows >= least
}

/// A unit of a panel, unpacked.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Unit {
    /// Rows of a tile register: 4 columns of the 16 lanes each.
    codes: [[u8; 64]; 8],
    /// The scales; then the minima, or the scales of the last 16 columns.
    scales: [[f32; PANEL]; 2],
    /// Sums of codes; where there are two scales, of the first and the last 16 columns.
    sums: [[f32; PANEL]; 2],
}

/// Sums of a tile product.
#[repr(C, align(64))]
struct Dots([[i32; PANEL]; TILE]);

/// What a thread works with, kept from call to call: clearing it anew would cost as much as a panel.
struct Scratch {
    units: [Unit; BLOCK],
    /// Of one step and the next.
    buffer: [Dots; 2],
}

thread_local! {
    static SCRATCH: RefCell<Box<Scratch>> = RefCell::new(Box::new(Scratch {
        units: [const { Unit { codes: [[0; 64]; 8], scales: [[0.0; PANEL]; 2], sums: [[0.0; PANEL]; 2] } }; BLOCK],
        buffer: [const { Dots([[0; PANEL]; TILE]) }; 2],
    }));
}

/// What the types differ in.
trait Format {
    const UNIT: usize;
    /// Codes have 4 bits.
    const NARROW: bool;
    /// There are minima; otherwise codes are around 128.
    const MIN: bool;
    /// Products of a unit: one per scale.
    const PARTS: usize;
}

macro_rules! formats {
    ($($name:ident: $narrow:literal, $min:literal, $parts:literal;)*) => {$(
        struct $name;
        impl Format for $name {
            const UNIT: usize = PackedType::$name.unit_bytes();
            const NARROW: bool = $narrow;
            const MIN: bool = $min;
            const PARTS: usize = $parts;
        }
    )*};
}

formats! {
    Q4G32: true, true, 1;
    Q8G32: false, false, 1;
    Q8G32Min: false, true, 1;
    Q8G16: false, false, 2;
}

/// Shapes of the tile registers, as `ldtilecfg` wants them: 0 and 1 are sums and 2 activations of [`TILE`] rows, 4 and 5 are sums and 6
/// activations of the rows that are left over, and 3 is codes.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Shapes {
    /// For dot products of `columns` columns, `left` rows being left over.
    fn new(columns: usize, left: usize) -> Self {
        let mut shapes = Self { palette: 1, start: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        let mut set = |register: usize, rows, row_bytes| {
            (shapes.rows[register], shapes.row_bytes[register]) = (rows as u8, row_bytes as u16);
        };
        for (rows, sums, x) in [(TILE, [0, 1], 2), (left.max(1), [4, 5], 6)] {
            for register in sums {
                set(register, rows, 64);
            }
            set(x, rows, columns);
        }
        set(3, columns / 4, 64);
        shapes
    }
}

/// The panels of `run` with all rows of `x`, for quantised weights. The shapes fit.
///
/// # Safety
/// This process may use AMX.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn panels(run: &mut Run<'_>, x: &Activations) {
    SCRATCH.with_borrow_mut(|scratch| match run.weights.layout().ty() {
        PackedType::F32 | PackedType::F16 | PackedType::BF16 => unreachable!("see `suits`"),
        // SAFETY: this function's contract.
        PackedType::Q4G32 => unsafe { panels_of::<Q4G32>(run, x, scratch) },
        // SAFETY: this function's contract.
        PackedType::Q8G32 => unsafe { panels_of::<Q8G32>(run, x, scratch) },
        // SAFETY: this function's contract.
        PackedType::Q8G32Min => unsafe { panels_of::<Q8G32Min>(run, x, scratch) },
        // SAFETY: this function's contract.
        PackedType::Q8G16 => unsafe { panels_of::<Q8G16>(run, x, scratch) },
    });
}

/// # Safety
/// This process may use AMX.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn panels_of<F: Format>(run: &mut Run<'_>, x: &Activations, scratch: &mut Scratch) {
    let Scratch { units, buffer } = scratch;
    let rows = Rows::new(x);
    let shapes = Shapes::new(GROUP / F::PARTS, x.rows() % TILE);
    // SAFETY: the process may use AMX by this function's contract; the shapes are 64 bytes in the layout that the instruction wants.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const shapes, options(nostack, readonly)) };
    for panel in run.panels.clone() {
        let bytes = run.weights.panel(panel);
        for (block, packed) in bytes.chunks(BLOCK * F::UNIT).enumerate() {
            let count = packed.len() / F::UNIT;
            for (unit, packed) in units.iter_mut().zip(packed.chunks_exact(F::UNIT)) {
                unpack::<F>(packed, unit);
            }
            for row in (0..x.rows()).step_by(TILE) {
                let tile = Tile {
                    panel,
                    units: &units[..count],
                    goes_on: block > 0,
                    rows: rows.from(row, block * BLOCK),
                    row,
                };
                // SAFETY: the tile registers were set up above for the number of rows that are left.
                unsafe { tile.compute_rows::<F>(run, buffer, (x.rows() - row).min(TILE)) };
            }
        }
    }
    // SAFETY: as for `ldtilecfg`; nothing in the tile registers is needed any more.
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn unpack<F: Format>(packed: &[u8], unit: &mut Unit) {
    let nibble = _mm512_set1_epi8(15);
    let ones = _mm512_set1_epi8(1);
    let vectors = packed.as_chunks::<64>().0;
    if F::NARROW {
        // Sums of codes stay below 256: 8 words of at most 15.
        let mut sums = _mm512_setzero_si512();
        for word in 0..4 {
            let both = load_i512(&vectors[word]);
            let low = _mm512_and_si512(both, nibble);
            let high = _mm512_and_si512(_mm512_srli_epi16::<4>(both), nibble);
            store_i512(low, &mut unit.codes[2 * word]);
            store_i512(high, &mut unit.codes[2 * word + 1]);
            sums = _mm512_add_epi8(sums, _mm512_add_epi8(low, high));
        }
        let sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), sums, ones);
        store_f32x16(_mm512_cvtepi32_ps(sums), &mut unit.sums[0]);
    } else {
        let words = 8 / F::PARTS;
        for part in 0..F::PARTS {
            // Codes around 128 become signed ones around 0.
            let mut sums = _mm512_set1_epi32(if F::MIN { 0 } else { -128 * 4 * words as i32 });
            for word in part * words..(part + 1) * words {
                let codes = load_i512(&vectors[word]);
                sums = _mm512_dpbusd_epi32(sums, codes, ones);
                let flip = _mm512_set1_epi8(if F::MIN { 0 } else { -128 });
                store_i512(_mm512_xor_si512(codes, flip), &mut unit.codes[word]);
            }
            store_f32x16(_mm512_cvtepi32_ps(sums), &mut unit.sums[part]);
        }
    }
    let tail = packed[if F::NARROW { PANEL * GROUP / 2 } else { PANEL * GROUP }..].as_chunks::<32>().0;
    for (scales, halves) in unit.scales.iter_mut().zip(tail) {
        store_f32x16(_mm512_cvtph_ps(load_i256(halves)), scales);
    }
}

/// Where the codes and parameters of the activations' rows are.
#[derive(Clone, Copy)]
struct Rows<'a> {
    codes: usize,
    /// Bytes from the codes of one row to those of the next.
    code_stride: usize,
    blocks: usize,
    block_stride: usize,
    of: PhantomData<&'a Activations>,
}

impl<'a> Rows<'a> {
    /// Rows follow one another without gaps, which the kernel's addresses rely on.
    fn new(x: &'a Activations) -> Self {
        let groups = x.columns() / GROUP;
        let rows = Self {
            codes: x.codes(0).as_ptr().expose_provenance(),
            code_stride: groups * size_of::<[i32; 8]>(),
            blocks: x.blocks(0).as_ptr().expose_provenance(),
            block_stride: groups * size_of::<Block>(),
            of: PhantomData,
        };
        for row in 1..x.rows() {
            let codes = x.codes(row).as_ptr().expose_provenance();
            let blocks = x.blocks(row).as_ptr().expose_provenance();
            assert_eq!(codes, rows.codes + row * rows.code_stride, "codes of row {row}");
            assert_eq!(blocks, rows.blocks + row * rows.block_stride, "parameters of row {row}");
        }
        rows
    }

    /// From row `row` and unit `unit` on.
    fn from(self, row: usize, unit: usize) -> Self {
        Self {
            codes: self.codes + row * self.code_stride + unit * size_of::<[i32; 8]>(),
            blocks: self.blocks + row * self.block_stride + unit * size_of::<Block>(),
            ..self
        }
    }

    /// The parameters of row `row` and unit `unit`.
    ///
    /// # Safety
    /// There are such a row and such a unit.
    #[inline(always)]
    unsafe fn block(self, row: usize, unit: usize) -> &'a Block {
        // Four addresses reach sixteen rows: a processor adds up to three strides for nothing.
        let fourth = self.blocks + unit * size_of::<Block>() + row / 4 * (4 * self.block_stride);
        let address = fourth + row % 4 * self.block_stride;
        // SAFETY: `new` exposed the slices of all rows and checked where they are; the activations are borrowed.
        unsafe { &*std::ptr::with_exposed_provenance(address) }
    }
}

/// Units of a panel that meet the activation rows from `row` on.
struct Tile<'a> {
    panel: usize,
    units: &'a [Unit],
    /// Whether there were other units before these.
    goes_on: bool,
    /// From `row` and the first of the units on.
    rows: Rows<'a>,
    row: usize,
}

impl Tile<'_> {
    /// # Safety
    /// The tile registers are set up for [`TILE`] and for `rows` rows.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn compute_rows<F: Format>(&self, run: &mut Run<'_>, buffer: &mut [Dots; 2], rows: usize) {
        macro_rules! rows {
            ($($rows:literal)*) => {
                match rows {
                    // SAFETY: this function's contract.
                    $($rows => unsafe { self.compute::<F, $rows>(run, buffer) },)*
                    // SAFETY: this function's contract.
                    _ => unsafe { self.compute::<F, TILE>(run, buffer) },
                }
            };
        }
        rows!(1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
    }

    /// Starts the sums of products of step `step` (a unit, or a part of one), in register `step % 2` of two.
    ///
    /// # Safety
    /// The tile registers are set up for [`TILE`] and for `R` rows, there are so many, and `step` is below the number of units times that of
    /// parts.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn multiply<F: Format, const R: usize>(units: &[Unit], rows: Rows<'_>, step: usize) {
        macro_rules! product {
            ($multiply:literal, $sums:literal, $x:literal) => {
                // SAFETY: the activations' rows are `code_stride` apart and have the columns of this step, and the codes are rows of 64
                // bytes; the registers have these shapes.
                unsafe {
                    asm!(
                        concat!("tilezero ", $sums),
                        concat!("tileloadd ", $x, ", [{x} + {stride}]"),
                        "tileloadd tmm3, [{codes} + {line}]",
                        concat!($multiply, " ", $sums, ", ", $x, ", tmm3"),
                        x = in(reg) rows.codes + step * (GROUP / F::PARTS),
                        stride = in(reg) rows.code_stride,
                        codes = in(reg) units[step / F::PARTS].codes[step % F::PARTS * 4..].as_ptr(),
                        line = in(reg) 64_usize,
                        options(nostack, preserves_flags, readonly),
                    );
                }
            };
        }
        match (F::MIN, R == TILE, step % 2) {
            (true, true, 0) => product!("tdpbsud", "tmm0", "tmm2"),
            (true, true, _) => product!("tdpbsud", "tmm1", "tmm2"),
            (true, false, 0) => product!("tdpbsud", "tmm4", "tmm6"),
            (true, false, _) => product!("tdpbsud", "tmm5", "tmm6"),
            (false, true, 0) => product!("tdpbssd", "tmm0", "tmm2"),
            (false, true, _) => product!("tdpbssd", "tmm1", "tmm2"),
            (false, false, 0) => product!("tdpbssd", "tmm4", "tmm6"),
            (false, false, _) => product!("tdpbssd", "tmm5", "tmm6"),
        }
    }

    /// Stores the sums of step `step`.
    ///
    /// # Safety
    /// [`Tile::multiply`] was called for the step, and since then for one other at most.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn finish<const R: usize>(step: usize, dots: &mut Dots) {
        macro_rules! store {
            ($sums:literal) => {
                // SAFETY: there is room for `TILE` rows of 64 bytes.
                unsafe {
                    asm!(
                        concat!("tilestored [{to} + {line}], ", $sums),
                        to = in(reg) dots.0.as_mut_ptr(),
                        line = in(reg) 64_usize,
                        options(nostack, preserves_flags),
                    );
                }
            };
        }
        match (R == TILE, step % 2) {
            (true, 0) => store!("tmm0"),
            (true, _) => store!("tmm1"),
            (false, 0) => store!("tmm4"),
            (false, _) => store!("tmm5"),
        }
    }

    /// # Safety
    /// The tile registers are set up for [`TILE`] and for `R` rows, and there are so many.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn compute<F: Format, const R: usize>(&self, run: &mut Run<'_>, buffer: &mut [Dots; 2]) {
        /// Sixteen copies of the body, of which the first `R` are compiled: a loop would keep the sums in memory.
        macro_rules! each_row {
            (|$row:ident| $body:block) => {
                each_row!(|$row| $body; 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
            };
            (|$row:ident| $body:block; $($index:literal)*) => {$(
                if $index < R {
                    let $row = $index;
                    $body
                }
            )*};
        }
        let (units, rows) = (self.units, self.rows);
        let mut acc = [_mm512_setzero_ps(); TILE];
        if self.goes_on {
            each_row!(|row| { acc[row] = load_f32s(run.outputs(self.panel, self.row + row)) });
        }
        let steps = units.len() * F::PARTS;
        // SAFETY: `step` 0 is one of `steps`, and the tile registers are set up by this function's contract.
        unsafe { Self::multiply::<F, R>(units, rows, 0) };
        if steps > 1 {
            // SAFETY: as above.
            unsafe { Self::multiply::<F, R>(units, rows, 1) };
        }
        // SAFETY: `step` 0 was started, and one after it.
        unsafe { Self::finish::<R>(0, &mut buffer[0]) };
        for step in 0..steps {
            if step + 2 < steps {
                // SAFETY: as above.
                unsafe { Self::multiply::<F, R>(units, rows, step + 2) };
            }
            if step + 1 < steps {
                // SAFETY: the step was started, and one after it.
                unsafe { Self::finish::<R>(step + 1, &mut buffer[(step + 1) % 2]) };
            }
            let (index, part) = (step / F::PARTS, step % F::PARTS);
            let unit = &units[index];
            let scale = load_f32x16(&unit.scales[part]);
            let second = load_f32x16(&unit.scales[1]);
            let sums = load_f32x16(&unit.sums[part]);
            let dots = &buffer[step % 2].0;
            each_row!(|row| {
                // SAFETY: the row is one of `R`, and `index` one of the units.
                let block = unsafe { rows.block(row, index) };
                let dot = _mm512_cvtepi32_ps(load_i32x16(&dots[row]));
                let inner = _mm512_mul_ps(sums, _mm512_set1_ps(block.zero));
                let inner = _mm512_fmadd_ps(dot, _mm512_set1_ps(block.scale), inner);
                acc[row] = _mm512_fmadd_ps(scale, inner, acc[row]);
                if F::MIN {
                    acc[row] = _mm512_fmadd_ps(second, _mm512_set1_ps(block.sum), acc[row]);
                }
            });
        }
        each_row!(|row| { store_f32s(acc[row], run.outputs(self.panel, self.row + row)) });
    }
}
