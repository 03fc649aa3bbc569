//! The product with AMX: a panel (16 output rows) against up to [`TILE`] activation rows at a time.
//!
//! A panel's codes are unpacked once for all rows, [`BLOCK`] units at a time so that they stay in the first-level cache. A group of 32
//! columns is one tile product: its sums go through memory, and while the next tile product runs they are scaled with 512-bit vectors.

use std::arch::asm;
use std::arch::x86_64::{
    _mm512_add_epi8, _mm512_and_si512, _mm512_cvtepi32_ps, _mm512_cvtph_ps, _mm512_dpbusd_epi32,
    _mm512_fmadd_ps, _mm512_mul_ps, _mm512_set1_epi8, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps,
    _mm512_setzero_si512, _mm512_srli_epi16, _mm512_xor_si512,
};

use std::marker::PhantomData;

use super::Run;
use crate::cpu::activations::{Activations, Block};
use crate::cpu::packed::{GROUP, PANEL, PackedType};
use crate::cpu::vector::{load_f32x16, load_i32x16, load_i256, load_i512, store_f32x16, store_i512};

/// Activation rows of a tile: all that a tile register has.
const TILE: usize = 16;
/// Units that are unpacked at a time: 24 KiB of the 48 of the first-level cache.
const BLOCK: usize = 32;

/// Rows of activations from which tiles are faster than vectors.
pub(super) const ROWS: usize = 3;

/// Whether the products of so many rows with weights of this type are tiles' work.
pub(super) const fn suits(ty: PackedType, rows: usize) -> bool {
    match ty {
        PackedType::F32 | PackedType::F16 | PackedType::BF16 => false,
        PackedType::Q4G32 | PackedType::Q8G32 | PackedType::Q8G32Min | PackedType::Q8G16 => rows >= ROWS,
    }
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

/// Shapes of the tile registers, as `ldtilecfg` wants them: 0 to 2 are sums, activations and codes of [`TILE`] rows, 3 to 5 those of the
/// rows that are left over.
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
        for (at, rows) in [(0, TILE), (3, left.max(1))] {
            shapes.row_bytes[at] = 64;
            shapes.rows[at] = rows as u8;
            shapes.row_bytes[at + 1] = columns as u16;
            shapes.rows[at + 1] = rows as u8;
            shapes.row_bytes[at + 2] = 64;
            shapes.rows[at + 2] = (columns / 4) as u8;
        }
        shapes
    }
}

/// The panels of `run` with all rows of `x`, for quantised weights. The shapes fit.
///
/// # Safety
/// This process may use AMX.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn panels(run: &mut Run<'_>, x: &Activations) {
    match run.weights.layout().ty() {
        PackedType::F32 | PackedType::F16 | PackedType::BF16 => unreachable!("see `suits`"),
        // SAFETY: this function's contract.
        PackedType::Q4G32 => unsafe { panels_of::<Q4G32>(run, x) },
        // SAFETY: this function's contract.
        PackedType::Q8G32 => unsafe { panels_of::<Q8G32>(run, x) },
        // SAFETY: this function's contract.
        PackedType::Q8G32Min => unsafe { panels_of::<Q8G32Min>(run, x) },
        // SAFETY: this function's contract.
        PackedType::Q8G16 => unsafe { panels_of::<Q8G16>(run, x) },
    }
}

/// # Safety
/// This process may use AMX.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn panels_of<F: Format>(run: &mut Run<'_>, x: &Activations) {
    let shapes = Shapes::new(GROUP / F::PARTS, x.rows() % TILE);
    // SAFETY: the process may use AMX by this function's contract; the shapes are 64 bytes in the layout that the instruction wants.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const shapes, options(nostack, readonly)) };
    let mut units = [Unit { codes: [[0; 64]; 8], scales: [[0.0; PANEL]; 2], sums: [[0.0; PANEL]; 2] }; BLOCK];
    for panel in run.panels.clone() {
        let bytes = run.weights.panel(panel);
        for (block, packed) in bytes.chunks(BLOCK * F::UNIT).enumerate() {
            let count = packed.len() / F::UNIT;
            for (unit, packed) in units.iter_mut().zip(packed.chunks_exact(F::UNIT)) {
                unpack::<F>(packed, unit);
            }
            let mut tile = Tile { panel, units: &units[..count], first_unit: block * BLOCK, x, row: 0 };
            while tile.row < x.rows() {
                // SAFETY: the tile registers were set up above for the number of rows that are left.
                unsafe { tile.compute_rows::<F>(run, (x.rows() - tile.row).min(TILE)) };
                tile.row += TILE;
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

/// Units of a panel that meet the activation rows from `row` on.
struct Tile<'a> {
    panel: usize,
    units: &'a [Unit],
    /// Units of the panel before these.
    first_unit: usize,
    x: &'a Activations,
    row: usize,
}

impl Tile<'_> {
    /// # Safety
    /// The tile registers are set up for [`TILE`] and for `rows` rows.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn compute_rows<F: Format>(&self, run: &mut Run<'_>, rows: usize) {
        macro_rules! rows {
            ($($rows:literal)*) => {
                match rows {
                    // SAFETY: this function's contract.
                    $($rows => unsafe { self.compute::<F, $rows>(run) },)*
                    // SAFETY: this function's contract.
                    _ => unsafe { self.compute::<F, TILE>(run) },
                }
            };
        }
        rows!(1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
    }

    /// The codes of a row of the tile that meet the units.
    fn codes(&self, row: usize) -> &[[i32; 8]] {
        &self.x.codes(self.row + row)[self.first_unit..][..self.units.len()]
    }

    /// The parameters of a row of the tile.
    fn blocks(&self, row: usize) -> &[Block] {
        &self.x.blocks(self.row + row)[self.first_unit..][..self.units.len()]
    }

    /// The sums of products of step `step` (a unit, or a part of one).
    ///
    /// # Safety
    /// The tile registers are set up for [`TILE`] and for `R` rows; `step` is below the number of units times that of parts, and `codes`
    /// are those of the units.
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn dot<F: Format, const R: usize>(
        &self,
        codes: &Strided<[i32; 8], R>,
        step: usize,
        dots: &mut Dots,
    ) {
        let part = step % F::PARTS;
        let a = codes.base + step * (GROUP / F::PARTS);
        let b = self.units[step / F::PARTS].codes[part * 4..].as_ptr();
        macro_rules! product {
            ($multiply:literal, $sums:literal, $x:literal, $codes:literal) => {
                // SAFETY: the activations' rows are `stride` apart and have the columns of this step, the codes are rows of 64 bytes, and
                // there is room for `TILE` rows of sums; the registers have these shapes, and no others are touched.
                unsafe {
                    asm!(
                        concat!("tilezero ", $sums),
                        concat!("tileloadd ", $x, ", [{a} + {stride}]"),
                        concat!("tileloadd ", $codes, ", [{b} + {line}]"),
                        concat!($multiply, " ", $sums, ", ", $x, ", ", $codes),
                        concat!("tilestored [{c} + {line}], ", $sums),
                        a = in(reg) a,
                        stride = in(reg) codes.stride,
                        b = in(reg) b,
                        line = in(reg) 64_usize,
                        c = in(reg) dots.0.as_mut_ptr(),
                        out("tmm0") _,
out("tmm1") _,
out("tmm2") _,
out("tmm3") _,
out("tmm4") _,
out("tmm5") _,
                        options(nostack, preserves_flags),
                    );
                }
            };
        }
        match (F::MIN, R == TILE) {
            (true, true) => product!("tdpbsud", "tmm0", "tmm1", "tmm2"),
            (true, false) => product!("tdpbsud", "tmm3", "tmm4", "tmm5"),
            (false, true) => product!("tdpbssd", "tmm0", "tmm1", "tmm2"),
            (false, false) => product!("tdpbssd", "tmm3", "tmm4", "tmm5"),
        }
    }

    /// # Safety
    /// The tile registers are set up for [`TILE`] and for `R` rows, and there are so many.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn compute<F: Format, const R: usize>(&self, run: &mut Run<'_>) {
        let (codes, blocks) = (
            Strided::<[i32; 8], R>::new(|row| self.codes(row)),
            Strided::<Block, R>::new(|row| self.blocks(row)),
        );
        let mut acc = [_mm512_setzero_ps(); R];
        if self.first_unit > 0 {
            for (row, acc) in acc.iter_mut().enumerate() {
                *acc = load_f32x16(&run.kept(self.panel, self.row + row));
            }
        }
        let mut dots = [const { Dots([[0; PANEL]; TILE]) }; 2];
        let steps = self.units.len() * F::PARTS;
        // SAFETY: `step` 0 is one of `steps`, and the tile registers are set up by this function's contract.
        unsafe { self.dot::<F, R>(&codes, 0, &mut dots[0]) };
        for step in 0..steps {
            if step + 1 < steps {
                // SAFETY: as above.
                unsafe { self.dot::<F, R>(&codes, step + 1, &mut dots[(step + 1) % 2]) };
            }
            let (index, part) = (step / F::PARTS, step % F::PARTS);
            let unit = &self.units[index];
            let scale = load_f32x16(&unit.scales[part]);
            let second = load_f32x16(&unit.scales[1]);
            let sums = load_f32x16(&unit.sums[part]);
            for row in 0..R {
                // SAFETY: `index` is below the number of units, which the rows have.
                let block = unsafe { blocks.get(row, index) };
                let dot = _mm512_cvtepi32_ps(load_i32x16(&dots[step % 2].0[row]));
                let inner = _mm512_mul_ps(sums, _mm512_set1_ps(block.zero));
                let inner = _mm512_fmadd_ps(dot, _mm512_set1_ps(block.scale), inner);
                acc[row] = _mm512_fmadd_ps(scale, inner, acc[row]);
                if F::MIN {
                    acc[row] = _mm512_fmadd_ps(second, _mm512_set1_ps(block.sum), acc[row]);
                }
            }
        }
        let mut out = [0.0; PANEL];
        for (row, acc) in acc.iter().enumerate() {
            store_f32x16(*acc, &mut out);
            run.keep(self.panel, self.row + row, &out);
        }
    }
}

/// `R` slices of one length, at equal distances.
struct Strided<T, const R: usize> {
    base: usize,
    /// Bytes.
    stride: usize,
    of: PhantomData<T>,
}

impl<T, const R: usize> Strided<T, R> {
    fn new<'a>(row: impl Fn(usize) -> &'a [T]) -> Self
    where
        T: 'a,
    {
        let base = row(0).as_ptr().expose_provenance();
        let stride = if R > 1 { row(1).as_ptr().addr() - base } else { 0 };
        for index in 1..R {
            let address = row(index).as_ptr().expose_provenance();
            assert_eq!(address, base + index * stride, "rows of activations are contiguous");
        }
        Self { base, stride, of: PhantomData }
    }

    /// # Safety
    /// `row` is below `R` and `index` below the slices' length; the slices are still borrowed.
    #[inline(always)]
    unsafe fn get(&self, row: usize, index: usize) -> &T {
        let address = self.base + row * self.stride + index * size_of::<T>();
        // SAFETY: the address is that of an element, by this function's contract and `new`, which exposed its slice.
        unsafe { &*std::ptr::with_exposed_provenance(address) }
    }
}
