//! Products of few rows, with each of their endings.

use super::{Bench, Extent, Found, allowance, floats, halves, worst};
use crate::cuda::small_rows::{Ending, Source, small_rows, takes, takes_normed};
use crate::cuda::{CudaError, GemmShape, Half};

/// What single precision is off, relative to the sum of magnitudes.
const ADDING: f64 = 4e-6;
pub(super) const EPSILON: f32 = 1e-5;

pub(super) fn check<T: Half>(bench: &mut Bench, extent: Extent) -> Result<(), CudaError> {
    let (shapes, rows): (&[_], &[_]) = match extent {
        Extent::Minimal => (&[(576, 48), (2048, 16), (14_336, 16)], &[1, 8, 9]),
        Extent::Full => (
            &[(64, 48), (576, 960), (1536, 576), (896, 1008), (4096, 496), (14_336, 256)],
            &[1, 2, 3, 5, 8, 9, 13, 16],
        ),
    };
    for &(inputs, outputs) in shapes {
        for &rows in rows {
            let shape = GemmShape { inputs, outputs };
            let device = bench.stream.device();
            let (taken, normed) = (takes(device, inputs, rows), takes_normed(device, inputs, rows));
            if taken {
                products::<T>(bench, shape, rows, false)?;
            }
            if normed {
                products::<T>(bench, shape, rows, true)?;
            }
        }
    }
    Ok(())
}

fn products<T: Half>(
    bench: &mut Bench,
    shape: GemmShape,
    rows: usize,
    normed: bool,
) -> Result<(), CudaError> {
    let GemmShape { inputs, outputs } = shape;
    let (x, residual) = (halves::<T>(31, rows * inputs), floats(32, rows * inputs));
    // Small ones: a gated product of large ones is more than f16 holds.
    let weights: Vec<T> =
        floats(33, outputs * inputs).into_iter().map(|w| T::from_f64(f64::from(w) / 16.0)).collect();
    let factors: Vec<f32> = floats(34, inputs).iter().map(|w| 1.0 + 0.1 * w).collect();
    let (x_there, residual_there) = (bench.copy(&x)?, bench.copy(&residual)?);
    let (weights_there, factors_there) = (bench.copy(&weights)?, bench.copy(&factors)?);
    let source = if normed {
        Source::Normed { x: residual_there.all(), weight: factors_there.all(), epsilon: EPSILON }
    } else {
        Source::Rows(x_there.all())
    };
    let x: Vec<f64> =
        if normed { norm::<T>(&residual, &factors) } else { x.into_iter().map(T::to_f64).collect() };
    // A normalised element next to the middle between two others is rounded to either.
    let adding = if normed { T::ROUNDING / 8.0 } else { ADDING };
    let weights: Vec<f64> = weights.into_iter().map(T::to_f64).collect();
    let want = sums(&x, &weights, inputs);
    let case = format!("{} {rows}x{inputs}x{outputs} normed {normed}", T::NAME);
    let stream = bench.stream.clone();
    endings::<T>(bench, &Wanted { kernel: "small rows", case, outputs, want: &want, adding }, |ending| {
        small_rows(&stream, shape, &source, weights_there.all(), ending)
    })
}

/// What a product is to give.
pub(super) struct Wanted<'a> {
    pub(super) kernel: &'static str,
    /// Elements and shapes.
    pub(super) case: String,
    pub(super) outputs: usize,
    /// `[rows][outputs]`: as [`sums`] gives them.
    pub(super) want: &'a [(f64, f64)],
    /// What adding up is off, relative to the sum of magnitudes.
    pub(super) adding: f64,
}

/// Sums, and sums of magnitudes, of `x[rows][inputs] · weights[outputs][inputs]ᵀ`.
pub(super) fn sums(x: &[f64], weights: &[f64], inputs: usize) -> Vec<(f64, f64)> {
    let product = |x: &[f64], weights: &[f64]| {
        x.iter().zip(weights).fold((0.0, 0.0), |(sum, scale), (x, w)| (sum + x * w, scale + (x * w).abs()))
    };
    x.chunks(inputs).flat_map(|x| weights.chunks(inputs).map(move |weights| product(x, weights))).collect()
}

/// Multiplies with every ending, and compares.
pub(super) fn endings<T: Half>(
    bench: &mut Bench,
    wanted: &Wanted<'_>,
    multiply: impl Fn(&Ending<'_, T>) -> Result<(), CudaError>,
) -> Result<(), CudaError> {
    let &Wanted { kernel, ref case, outputs, want, adding } = wanted;
    let rows = want.len() / outputs;
    let case = |ending| format!("{case}, {ending}");

    let mut stored = bench.poisoned::<T>(rows * outputs)?;
    multiply(&Ending::Store(stored.all_mut()))?;
    let got = stored.all().to_vec(&bench.stream)?;
    let allowed = want.iter().map(|&(w, s)| (w, allowance::<T>(w, s, adding)));
    bench.report(kernel, case("stored"), Found::Error(worst(&got, T::to_f64, allowed)));

    let mut single = bench.poisoned::<f32>(rows * outputs)?;
    multiply(&Ending::Single(single.all_mut()))?;
    let got = single.all().to_vec(&bench.stream)?;
    let allowed = want.iter().map(|&(w, s)| (w, adding * s + 1e-6));
    bench.report(kernel, case("single"), Found::Error(worst(&got, f64::from, allowed)));

    let before = floats(35, rows * outputs);
    let mut added = bench.copy(&before)?;
    multiply(&Ending::Add(added.all_mut()))?;
    let got = added.all().to_vec(&bench.stream)?;
    let allowed = want.iter().zip(&before).map(|(&(w, s), &b)| {
        let sum = w + f64::from(b);
        (sum, adding * s + 1e-6 * (1.0 + sum.abs()))
    });
    bench.report(kernel, case("added"), Found::Error(worst(&got, f64::from, allowed)));

    let half = outputs / 2;
    let mut gated = bench.poisoned::<T>(rows * half)?;
    multiply(&Ending::Silu(gated.all_mut()))?;
    let got = gated.all().to_vec(&bench.stream)?;
    let allowed = (0..rows * half).map(|i| {
        let (row, output) = (i / half, i % half);
        let ((gate, gate_scale), (up, up_scale)) =
            (want[row * outputs + output], want[row * outputs + half + output]);
        let value = gate / (1.0 + (-gate).exp()) * up;
        let scale = gate_scale * (up.abs() + 1.0) + up_scale * (gate.abs() + 1.0);
        (value, allowance::<T>(value, scale, adding) + 1e-5)
    });
    bench.report(kernel, case("gated"), Found::Error(worst(&got, T::to_f64, allowed)));
    Ok(())
}

/// Rows as the kernel normalises them, rounded.
pub(super) fn norm<T: Half>(x: &[f32], factors: &[f32]) -> Vec<f64> {
    let row = |row: &[f32]| {
        let mean = row.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>() / row.len() as f64;
        let scale = 1.0 / (mean + f64::from(EPSILON)).sqrt();
        let normed = |(v, w): (&f32, &f32)| T::from_f64(f64::from(*v) * scale * f64::from(*w)).to_f64();
        row.iter().zip(factors).map(normed).collect::<Vec<f64>>()
    };
    x.chunks(factors.len()).flat_map(row).collect()
}
