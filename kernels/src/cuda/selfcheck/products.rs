//! Dense products.

use super::{Bench, Extent, Found, halves, worst};
use crate::cuda::{Algorithms, AlgorithmsError, CudaError, Gemm, GemmOutput, GemmShape, Half, Tuning};

pub(super) fn check<T: Half + GemmOutput>(bench: &mut Bench, extent: Extent) -> Result<(), CudaError> {
    let mut gemm = Gemm::new(&bench.stream)?;
    if extent == Extent::Minimal {
        return product::<T>(bench, &mut gemm, GemmShape { inputs: 576, outputs: 64 }, 3);
    }
    for (inputs, outputs) in [(576, 960), (1536, 576), (4096, 256), (3584, 512)] {
        for rows in [1, 2, 3, 17, 64, 130] {
            product::<T>(bench, &mut gemm, GemmShape { inputs, outputs }, rows)?;
        }
    }
    for rows in [1, 64] {
        tuned::<T>(bench, &mut gemm, GemmShape { inputs: 4096, outputs: 512 }, rows)?;
    }
    Ok(())
}

/// A tuned product is right, and has the same bits where its algorithm was stored and restored.
fn tuned<T: Half + GemmOutput>(
    bench: &mut Bench,
    gemm: &mut Gemm,
    shape: GemmShape,
    rows: usize,
) -> Result<(), CudaError> {
    let GemmShape { inputs, outputs } = shape;
    let x = bench.copy(&halves::<T>(21, rows * inputs))?;
    let weights = [22, 23].map(|seed| bench.copy(&halves::<T>(seed, outputs * inputs)));
    let [first, second] = weights;
    let weights = [first?, second?];
    let views = weights.each_ref().map(|matrix| matrix.all());
    let mut out = bench.poisoned::<T>(rows * outputs)?;
    let with = Tuning { x: x.all(), weights: &views, out: out.all_mut(), most: 8 };
    let found = gemm.tune(&bench.stream, shape, with)?;
    product::<T>(bench, gemm, shape, rows)?;

    let mut restored = Gemm::new(&bench.stream)?;
    let taken =
        Algorithms::from_bytes(&gemm.algorithms().to_bytes()).and_then(|list| restored.restore(&list));
    let missing = match taken {
        Ok(count) => gemm.algorithms().len() - count,
        Err(AlgorithmsError::Cuda(error)) => return Err(error),
        Err(_) => 1,
    };
    let case = format!("{} {rows}x{inputs}x{outputs}, proposal {}", T::NAME, found.place);
    bench.report(
        "gemm restored",
        case.clone(),
        Found::Different { count: missing, of: gemm.algorithms().len() },
    );
    let mut bits = Vec::new();
    for gemm in [gemm, &mut restored] {
        out.all_mut().fill_bytes(&bench.stream, 0xff)?;
        gemm.multiply(&bench.stream, shape, x.all(), views[0], &mut out.all_mut())?;
        bits.push(out.all().to_vec(&bench.stream)?.into_iter().map(T::to_bits).collect::<Vec<u16>>());
    }
    let count = bits[0].iter().zip(&bits[1]).filter(|(one, other)| one != other).count();
    bench.report("gemm restored", format!("{case}, bits"), Found::Different { count, of: bits[0].len() });
    Ok(())
}

fn product<T: Half + GemmOutput>(
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
