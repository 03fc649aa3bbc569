//! Dense products.

use super::{Bench, Extent, Found, halves, worst};
use crate::cuda::{CudaError, Gemm, GemmShape, Half};

pub(super) fn check<T: Half + crate::cuda::GemmOutput>(
    bench: &mut Bench,
    extent: Extent,
) -> Result<(), CudaError> {
    let mut gemm = Gemm::new(&bench.stream)?;
    if extent == Extent::Minimal {
        return product::<T>(bench, &mut gemm, GemmShape { inputs: 576, outputs: 64 }, 3);
    }
    for (inputs, outputs) in [(576, 960), (1536, 576), (4096, 256), (3584, 512)] {
        for rows in [1, 2, 3, 17, 64, 130] {
            product::<T>(bench, &mut gemm, GemmShape { inputs, outputs }, rows)?;
        }
    }
    Ok(())
}

fn product<T: Half + crate::cuda::GemmOutput>(
    bench: &mut Bench,
    gemm: &mut Gemm,
    shape: GemmShape,
    rows: usize,
) -> Result<(), CudaError> {
    let GemmShape { inputs, outputs } = shape;
    let (x, weights) = (halves::<T>(11, rows * inputs), halves::<T>(12, outputs * inputs));
    let (x_on_device, w_on_device) = (bench.copy(&x)?, bench.copy(&weights)?);
    let mut rounded = bench.poisoned::<T>(rows * outputs)?;
    let mut single = bench.poisoned::<f32>(rows * outputs)?;
    gemm.multiply(&bench.stream, shape, x_on_device.all(), w_on_device.all(), &mut rounded.all_mut())?;
    gemm.multiply(&bench.stream, shape, x_on_device.all(), w_on_device.all(), &mut single.all_mut())?;

    let [x, weights] = [x, weights].map(|data| data.into_iter().map(T::to_f64).collect::<Vec<f64>>());
    // Sums and sums of magnitudes: single precision adds up with an error of the latter.
    let want: Vec<(f64, f64)> = (0..rows * outputs)
        .map(|i| {
            let (row, column) = (i / outputs, i % outputs);
            let pairs = x[row * inputs..][..inputs].iter().zip(&weights[column * inputs..][..inputs]);
            pairs.fold((0.0, 0.0), |(sum, scale), (x, w)| (sum + x * w, scale + (x * w).abs()))
        })
        .collect();
    let adding = 4e-6;
    let case = |output: &str| format!("{} {rows}x{inputs}x{outputs} to {output}", T::NAME);
    let got = rounded.all().to_vec(&bench.stream)?;
    let allowed = want.iter().map(|&(w, s)| (w, super::allowance::<T>(w, s, adding)));
    let error = worst(&got, T::to_f64, allowed);
    bench.report("gemm", case(T::NAME), Found::Error(error));
    let got = single.all().to_vec(&bench.stream)?;
    let error = worst(&got, f64::from, want.iter().map(|&(w, s)| (w, adding * s + 1e-7)));
    bench.report("gemm", case("f32"), Found::Error(error));
    Ok(())
}
