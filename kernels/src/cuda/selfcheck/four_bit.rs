//! Products with matrices of four-bit weights, and such matrices as elements.

use half::f16;
use pagedd_core::TensorType;

use super::small_rows::{EPSILON, Wanted, endings, norm, sums};
use super::{Bench, Extent, Found, floats, halves, word};
use crate::cpu::dequant::dequantize;
use crate::cuda::buffer::Buffer;
use crate::cuda::four_bit::{FourBitMatrix, Split, few, takes_few, takes_wide, wide, widen};
use crate::cuda::small_rows::{Ending, Source, takes_normed};
use crate::cuda::{CudaError, GemmShape, Half};
use crate::error::ShapeError;
use crate::four_bit::{FOUR_BIT_TILE, four_bit_bytes, pack_four_bit_tile};

/// What single precision is off where numbers are multiplied with an offset on them, relative to the sum of magnitudes.
const ADDING: f64 = 2e-5;
/// Deviation of weights.
const DEVIATION: f32 = 0.04;
/// The most rows of one case: more than one block of them, whatever the form.
const MOST_ROWS: usize = 300;

pub(super) fn check<T: Half>(bench: &mut Bench, extent: Extent) -> Result<(), CudaError> {
    // Blocks with one tile and with several, whole matrices and parts of them in turn.
    let shapes: &[(usize, usize, &[usize])] = match extent {
        Extent::Minimal => &[(64, 48, &[1, 17]), (576, 144, &[2, 65]), (11_008, 16, &[8])],
        Extent::Full => &[
            (64, 48, &[1, 2, 8, 16, 40]),
            (576, 960, &[1, 2, 3, 8, 9, 16, 17, 33, 64, 65, 129, MOST_ROWS]),
            (1536, 2128, &[1, 4, 8, 32, 129]),
            (4096, 496, &[1, 2, 8, 16, 64, 128]),
            (11_008, 2304, &[1, 2, 4, 8]),
        ],
    };
    for &(inputs, outputs, rows) in shapes {
        let matrix = Matrix::new(bench, GemmShape { inputs, outputs })?;
        widened::<T>(bench, &matrix)?;
        for &rows in rows {
            products::<T>(bench, &matrix, rows)?;
        }
    }
    let shapes: &[_] = if extent == Extent::Full { &[(576, 960), (11_008, 256)] } else { &[(576, 144)] };
    for &(inputs, outputs) in shapes {
        let matrix = Matrix::new(bench, GemmShape { inputs, outputs })?;
        alone::<T>(bench, &matrix)?;
    }
    Ok(())
}

/// A matrix in both orders of its tiles, and its weights in single precision.
struct Matrix {
    shape: GemmShape,
    plain: Buffer<u8>,
    interleaved: Buffer<u8>,
    weights: Vec<f32>,
}

impl Matrix {
    fn new(bench: &Bench, shape: GemmShape) -> Result<Self, CudaError> {
        let rows = rows(41, DEVIATION, shape);
        let mut weights = vec![0.0; shape.outputs * shape.inputs];
        for ((ty, row), weights) in rows.iter().zip(weights.chunks_mut(shape.inputs)) {
            dequantize(*ty, row, weights)?;
        }
        let plain = bench.copy(&tiles(&rows, shape.inputs, false)?)?;
        let interleaved = bench.copy(&tiles(&rows, shape.inputs, true)?)?;
        Ok(Self { shape, plain, interleaved, weights })
    }

    fn tiles(&self, interleaved: bool) -> Result<FourBitMatrix<'_>, ShapeError> {
        let tiles = if interleaved { &self.interleaved } else { &self.plain };
        FourBitMatrix::new(self.shape, tiles.all(), interleaved)
    }
}

/// Rows of blocks whose weights lie around 0: of `Q4_0` and of `Q4_1`, in turn.
pub(super) fn rows(seed: u32, deviation: f32, shape: GemmShape) -> Vec<(TensorType, Vec<u8>)> {
    let blocks = shape.inputs / 32;
    let row = |output: usize| {
        let ty = if output.is_multiple_of(2) { TensorType::Q4_0 } else { TensorType::Q4_1 };
        let block = |block: usize| {
            let first = (output * blocks + block) * 5;
            let part = (word(seed, first) >> 8) as f32 / (1 << 24) as f32;
            // Numbers that are as likely as one another deviate by 4.61.
            let scale = f16::from_f32(deviation / 4.61 * (0.75 + 0.5 * part));
            let minimum = f16::from_f32(-7.5 * scale.to_f32());
            let mut bytes = scale.to_le_bytes().to_vec();
            if ty == TensorType::Q4_1 {
                bytes.extend(minimum.to_le_bytes());
            }
            bytes.extend((1..5).flat_map(|i| word(seed, first + i).to_le_bytes()));
            bytes
        };
        (ty, (0..blocks).flat_map(block).collect())
    };
    (0..shape.outputs).map(row).collect()
}

/// Rows as tiles, in either order.
pub(super) fn tiles(
    rows: &[(TensorType, Vec<u8>)],
    inputs: usize,
    interleaved: bool,
) -> Result<Vec<u8>, ShapeError> {
    let outputs = rows.len();
    let mut tiles = vec![0; four_bit_bytes(outputs, inputs).unwrap_or(0)];
    let bytes = four_bit_bytes(FOUR_BIT_TILE, inputs).unwrap_or(0);
    for (index, tile) in tiles.chunks_mut(bytes).enumerate() {
        let of_tile = std::array::from_fn(|output| {
            let (half, g) = (output / 8, output % 8);
            let at = if interleaved {
                index * 8 + g + half * (outputs / 2)
            } else {
                index * FOUR_BIT_TILE + output
            };
            let (ty, row) = &rows[at];
            (*ty, row.as_slice())
        });
        pack_four_bit_tile(&of_tile, inputs, tile)?;
    }
    Ok(tiles)
}

/// Elements are the weights, rounded once.
fn widened<T: Half>(bench: &mut Bench, matrix: &Matrix) -> Result<(), CudaError> {
    let GemmShape { inputs, outputs } = matrix.shape;
    let want: Vec<u16> = matrix.weights.iter().map(|&w| T::from_f64(f64::from(w)).to_bits()).collect();
    for interleaved in [false, true] {
        let mut out = bench.poisoned::<T>(outputs * inputs)?;
        widen(&bench.stream, matrix.tiles(interleaved)?, &mut out.all_mut())?;
        let got = out.all().to_vec(&bench.stream)?;
        let count = got.iter().zip(&want).filter(|&(got, &want)| got.to_bits() != want).count();
        let case = format!("{} {inputs}x{outputs} interleaved {interleaved}, widened", T::NAME);
        bench.report("four bits", case, Found::Different { count, of: want.len() });
    }
    Ok(())
}

fn products<T: Half>(bench: &mut Bench, matrix: &Matrix, rows: usize) -> Result<(), CudaError> {
    let (shape, stream) = (matrix.shape, bench.stream.clone());
    let GemmShape { inputs, outputs } = shape;
    let (x, residual) = (halves::<T>(42, rows * inputs), floats(43, rows * inputs));
    let factors: Vec<f32> = floats(44, inputs).iter().map(|w| 1.0 + 0.1 * w).collect();
    let (x_there, residual_there) = (bench.copy(&x)?, bench.copy(&residual)?);
    let factors_there = bench.copy(&factors)?;
    let weights: Vec<f64> = matrix.weights.iter().map(|&w| f64::from(w)).collect();
    let x: Vec<f64> = x.into_iter().map(T::to_f64).collect();
    let tiles = |ending: &Ending<'_, T>| matrix.tiles(matches!(ending, Ending::Silu(_)));
    let case = |form: &str| format!("{} {rows}x{inputs}x{outputs} {form}", T::NAME);

    let want = sums(&x, &weights, inputs);
    let wanted =
        |form: &str, adding| Wanted { kernel: "four bits", case: case(form), outputs, want: &want, adding };
    if takes_few(stream.device(), shape, rows, false) {
        let source = Source::Rows(x_there.all());
        endings::<T>(bench, &wanted("few", ADDING), |ending| few(&stream, &source, tiles(ending)?, ending))?;
    }
    // There weights are rounded.
    for split in [Split::Fastest, Split::OneForAllRows] {
        if takes_wide(stream.device(), rows, split) {
            endings::<T>(bench, &wanted(&format!("wide {split:?}"), T::ROUNDING / 2.0), |ending| {
                wide(&stream, x_there.all(), tiles(ending)?, ending, split)
            })?;
        }
    }
    if takes_few(stream.device(), shape, rows, true) && takes_normed(stream.device(), inputs, rows) {
        let want = sums(&norm::<T>(&residual, &factors), &weights, inputs);
        // A normalised element next to the middle between two others is rounded to either.
        let adding = T::ROUNDING / 8.0;
        let wanted = Wanted { kernel: "four bits", case: case("few, normed"), outputs, want: &want, adding };
        let source =
            Source::Normed { x: residual_there.all(), weight: factors_there.all(), epsilon: EPSILON };
        endings::<T>(bench, &wanted, |ending| few(&stream, &source, tiles(ending)?, ending))?;
    }
    Ok(())
}

/// Where bits must not depend on how many rows there are, a row's are the same alone and among others, in every form.
fn alone<T: Half>(bench: &mut Bench, matrix: &Matrix) -> Result<(), CudaError> {
    let (stream, split) = (bench.stream.clone(), Split::OneForAllRows);
    let GemmShape { inputs, outputs } = matrix.shape;
    if !takes_wide(stream.device(), MOST_ROWS, split) {
        return Ok(());
    }
    let x = bench.copy(&halves::<T>(45, MOST_ROWS * inputs))?;
    let multiply = |bench: &Bench, rows: std::ops::Range<usize>| -> Result<Vec<u32>, CudaError> {
        let mut out = bench.poisoned::<f32>(rows.len() * outputs)?;
        let x = x.part(rows.start * inputs..rows.end * inputs)?;
        wide::<T>(&stream, x, matrix.tiles(false)?, &Ending::Single(out.all_mut()), split)?;
        Ok(out.all().to_vec(&stream)?.into_iter().map(f32::to_bits).collect())
    };
    let all = multiply(bench, 0..MOST_ROWS)?;
    for rows in [0..1, 0..8, 3..19, 0..32, 7..71, 0..128, 0..256, MOST_ROWS - 1..MOST_ROWS] {
        let want = &all[rows.start * outputs..rows.end * outputs];
        let got = multiply(bench, rows.clone())?;
        let count = got.iter().zip(want).filter(|(got, want)| got != want).count();
        let case = format!("{} {inputs}x{outputs} rows {rows:?} of {MOST_ROWS}, bits", T::NAME);
        bench.report("four bits", case, Found::Different { count, of: want.len() });
    }
    Ok(())
}
