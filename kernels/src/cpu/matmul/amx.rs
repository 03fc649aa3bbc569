//! The product with AMX: a panel (16 output rows) against up to [`TILE`] activation rows at a time.
//!
//! A panel's codes are unpacked once for all rows, as many units at a time as stay in the first-level cache. A group of 32 columns is one
//! tile product. Its sums go through memory, and 512-bit vectors scale them.
//!
//! Tile products and vectors take turns, [`STEPS`] products long: measured, a tile instruction stops one of the two units for 512-bit
//! multiplications and conversions for some 50 ns, so that products that run beside the vectors cost more than they hide.
//!
//! Tile registers keep shapes and sums from one `asm!` to a later one. That relies on nothing else executing a tile instruction between
//! `ldtilecfg` and `tilerelease`: the compiler makes none, since AMX is not among any function's features, nothing foreign is called, and
//! the kernel keeps the registers of each thread over switches and signals.

use std::arch::asm;
use std::arch::x86_64::{
    _MM_HINT_T0, _mm_prefetch, _mm512_add_epi8, _mm512_and_si512, _mm512_cvtepi32_ps, _mm512_cvtph_ps,
    _mm512_dpbusd_epi32, _mm512_fmadd_ps, _mm512_mul_ps, _mm512_set1_epi8, _mm512_set1_epi32, _mm512_set1_ps,
    _mm512_setzero_ps, _mm512_setzero_si512, _mm512_srli_epi16, _mm512_xor_si512,
};
use std::cell::RefCell;

use super::Run;
use crate::cpu::activations::{Activations, LEAST_TILED, TILE, TileGroup};
use crate::cpu::packed::{GROUP, PANEL, PackedType};
use crate::cpu::vector::{
    load_f32s, load_f32x16, load_i32x16, load_i256, load_i512, store_f32s, store_f32x16, store_i512,
};

/// Tile products in a row: their sums take 16 KiB of the 48 of the first-level cache, the units 12 and the activations 11.
const STEPS: usize = 16;

/// Whether products with weights of this type are tiles' work.
pub(super) fn suits(ty: PackedType, x: &Activations) -> bool {
    // Measured: below, unpacking costs more than the tile products save. Two products per unit save the least.
    let least = match ty {
        PackedType::F32 | PackedType::F16 | PackedType::BF16 => return false,
        PackedType::Q4G32 => LEAST_TILED,
        PackedType::Q8G32Min => 6,
        PackedType::Q8G32 => 9,
        PackedType::Q8G16 => 16,
    };
    x.rows() >= least && x.tiles().is_some()
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
    units: [Unit; STEPS],
    dots: [Dots; STEPS],
}

thread_local! {
    static SCRATCH: RefCell<Box<Scratch>> = RefCell::new(Box::new(Scratch {
        units: [const { Unit { codes: [[0; 64]; 8], scales: [[0.0; PANEL]; 2], sums: [[0.0; PANEL]; 2] } }; STEPS],
        dots: [const { Dots([[0; PANEL]; TILE]) }; STEPS],
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
    let Some(tiles) = x.tiles() else { unreachable!("see `suits`") };
    let x = (tiles, x.rows());
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
unsafe fn panels_of<F: Format>(run: &mut Run<'_>, (x, rows): (&[TileGroup], usize), scratch: &mut Scratch) {
    let Scratch { units, dots } = scratch;
    let shapes = Shapes::new(GROUP / F::PARTS, rows % TILE);
    // SAFETY: the process may use AMX by this function's contract; the shapes are 64 bytes in the layout that the instruction wants.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const shapes, options(nostack, readonly)) };
    let _release = Release;
    let groups = x.len() / rows.div_ceil(TILE);
    // Blocks are as long as one another: a short one would take turns in haste.
    let size = groups.div_ceil(groups.div_ceil(STEPS / F::PARTS));
    for panel in run.panels.clone() {
        let bytes = run.weights.panel(panel);
        for (block, packed) in bytes.chunks(size * F::UNIT).enumerate() {
            let count = packed.len() / F::UNIT;
            for (index, x) in x.chunks_exact(groups).enumerate() {
                let row = index * TILE;
                let x = &x[block * size..][..count];
                let products = TileProducts { x, full: rows - row >= TILE };
                let mut step = 0;
                if row == 0 {
                    for (index, packed) in packed.chunks_exact(F::UNIT).enumerate() {
                        prefetch(packed, size * F::UNIT);
                        unpack::<F>(packed, &mut units[index]);
                        // One unit later, when what was unpacked has come to the cache.
                        while step < index * F::PARTS {
                            // SAFETY: the tile registers were set up above.
                            unsafe { products.step::<F>(&units[..count], step, dots) };
                            step += 1;
                        }
                    }
                }
                while step <= count * F::PARTS {
                    // SAFETY: as above.
                    unsafe { products.step::<F>(&units[..count], step, dots) };
                    step += 1;
                }
                let tile = Tile { panel, units: &units[..count], goes_on: block > 0, x, row };
                tile.scale_rows::<F>(run, dots, (rows - row).min(TILE));
            }
        }
    }
}

/// Gives the tile registers back when it is dropped, also by a panic: while they are in use, the kernel saves 8 KiB at every switch of threads.
struct Release;

impl Drop for Release {
    fn drop(&mut self) {
        // SAFETY: made right after `ldtilecfg`; nothing in the tile registers is needed any more.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// Brings what lies `ahead` bytes beyond `unit` into the cache: memory is then read also while vectors scale, not in bursts between.
#[inline]
fn prefetch(unit: &[u8], ahead: usize) {
    for line in (0..unit.len()).step_by(64) {
        // Past the weights' end it does nothing.
        let at = unit.as_ptr().wrapping_add(ahead + line);
        // SAFETY: every CPU with AMX has SSE.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
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

/// The tile products of up to [`TILE`] activation rows with units of a panel.
struct TileProducts<'a> {
    /// The groups that the units meet.
    x: &'a [TileGroup],
    /// Whether there are [`TILE`] rows; otherwise these are those that are left over.
    full: bool,
}

impl TileProducts<'_> {
    /// Starts the products of step `step` and stores the sums of the step before. The step after the last only stores.
    ///
    /// # Safety
    /// The tile registers are set up, also for the number of rows that are left over. The step before is the one that was started last.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn step<F: Format>(&self, units: &[Unit], step: usize, dots: &mut [Dots; STEPS]) {
        if let (Some(unit), Some(x)) = (units.get(step / F::PARTS), self.x.get(step / F::PARTS)) {
            // SAFETY: this function's contract.
            unsafe { self.multiply::<F>(unit, x, step) };
        }
        if step > 0 {
            // SAFETY: this function's contract.
            unsafe { self.finish(step - 1, &mut dots[step - 1]) };
        }
    }

    /// Starts the sums of products of step `step` (a unit, or a part of one, of which these are), in register `step % 2` of two.
    ///
    /// # Safety
    /// The tile registers are set up, also for the number of rows that are left over.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn multiply<F: Format>(&self, unit: &Unit, x: &TileGroup, step: usize) {
        let part = step % F::PARTS;
        macro_rules! product {
            ($multiply:literal, $sums:literal, $x:literal) => {
                // SAFETY: the activations' rows are `row` apart and have the columns of this part, and the codes are rows of 64 bytes; the
                // registers have these shapes.
                unsafe {
                    asm!(
                        concat!("tilezero ", $sums),
                        concat!("tileloadd ", $x, ", [{x} + {row}]"),
                        "tileloadd tmm3, [{codes} + {line}]",
                        concat!($multiply, " ", $sums, ", ", $x, ", tmm3"),
                        x = in(reg) x.codes.as_ptr().cast::<u8>().wrapping_add(part * (GROUP / F::PARTS)),
                        row = in(reg) size_of::<[i32; 8]>(),
                        codes = in(reg) unit.codes[part * 4..].as_ptr(),
                        line = in(reg) 64_usize,
                        options(nostack, preserves_flags, readonly),
                    );
                }
            };
        }
        match (F::MIN, self.full, step % 2) {
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
    /// [`TileProducts::multiply`] was called for the step, and since then for one other at most.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn finish(&self, step: usize, dots: &mut Dots) {
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
        match (self.full, step % 2) {
            (true, 0) => store!("tmm0"),
            (true, _) => store!("tmm1"),
            (false, 0) => store!("tmm4"),
            (false, _) => store!("tmm5"),
        }
    }
}

/// Units of a panel that met the activation rows from `row` on.
struct Tile<'a> {
    panel: usize,
    units: &'a [Unit],
    /// Whether there were other units before these.
    goes_on: bool,
    /// Of the rows from `row` on, the groups that the units meet.
    x: &'a [TileGroup],
    row: usize,
}

impl Tile<'_> {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn scale_rows<F: Format>(&self, run: &mut Run<'_>, dots: &[Dots; STEPS], rows: usize) {
        macro_rules! rows {
            ($($rows:literal)*) => {
                match rows {
                    $($rows => self.scale::<F, $rows>(run, dots),)*
                    _ => self.scale::<F, TILE>(run, dots),
                }
            };
        }
        rows!(1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
    }

    /// Adds to the outputs of `R` rows what the sums of their products give.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn scale<F: Format, const R: usize>(&self, run: &mut Run<'_>, dots: &[Dots; STEPS]) {
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
        let mut acc = [_mm512_setzero_ps(); TILE];
        if self.goes_on {
            each_row!(|row| { acc[row] = load_f32s(run.outputs(self.panel, self.row + row)) });
        }
        let mut dots = dots.iter();
        for (unit, x) in self.units.iter().zip(self.x) {
            for part in 0..F::PARTS {
                let Some(Dots(dots)) = dots.next() else { break };
                let scale = load_f32x16(&unit.scales[part]);
                let second = load_f32x16(&unit.scales[1]);
                let sums = load_f32x16(&unit.sums[part]);
                each_row!(|row| {
                    let dot = _mm512_cvtepi32_ps(load_i32x16(&dots[row]));
                    let inner = _mm512_mul_ps(sums, _mm512_set1_ps(x.zeros[row]));
                    let inner = _mm512_fmadd_ps(dot, _mm512_set1_ps(x.scales[row]), inner);
                    acc[row] = _mm512_fmadd_ps(scale, inner, acc[row]);
                    if F::MIN {
                        acc[row] = _mm512_fmadd_ps(second, _mm512_set1_ps(x.sums[row]), acc[row]);
                    }
                });
            }
        }
        each_row!(|row| { store_f32s(acc[row], run.outputs(self.panel, self.row + row)) });
    }
}
