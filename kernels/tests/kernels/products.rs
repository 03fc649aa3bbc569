//! Matrix products.

use pagedd_core::TensorType;
use pagedd_kernels::{
    ActivationKind, Activations, Isa, Matrix, MatrixLayout, PackedType, Product, Scheme, ShapeError,
    ThreadPool, matmul, matmul_all, pack,
};
use proptest::prelude::*;

use crate::support::{bits, blocks, floats, isas, near, pool};

struct Weights {
    layout: MatrixLayout,
    bytes: Vec<u8>,
}

impl Weights {
    fn new(ty: TensorType, rows: usize, columns: usize, f32_throughout: bool) -> Self {
        let layout = MatrixLayout::new(PackedType::for_source(ty, f32_throughout), rows, columns).unwrap();
        let mut bytes = vec![0; layout.bytes()];
        pack(&layout, ty, &blocks(ty, 21, rows * columns), 0, &mut bytes).unwrap();
        Self { layout, bytes }
    }

    fn matrix(&self) -> Matrix<'_> {
        Matrix::new(self.layout, &self.bytes).unwrap()
    }

    fn product(&self, pool: &ThreadPool, isa: Isa, x: &[f32]) -> Vec<f32> {
        let mut activations = Activations::new();
        activations.set(pool, isa, x, self.layout.columns(), self.layout.ty().activations()).unwrap();
        let mut out = vec![f32::NAN; activations.rows() * self.layout.rows()];
        matmul(pool, isa, &self.matrix(), &activations, &mut out, self.layout.rows()).unwrap();
        out
    }

    /// The twin: unpacked weights, represented activations, double precision. Returns products and sums of magnitudes.
    fn twin(&self, x: &[f32]) -> (Vec<f64>, Vec<f64>) {
        let columns = self.layout.columns();
        let mut x = x.to_vec();
        if self.layout.ty().activations() == ActivationKind::Int8 {
            let mut activations = Activations::new();
            activations.set(&pool(1), Isa::Portable, &x.clone(), columns, ActivationKind::Int8).unwrap();
            activations.represented(&mut x).unwrap();
        }
        let mut weights = vec![0.0; self.layout.rows() * columns];
        for (row, weights) in weights.chunks_mut(columns).enumerate() {
            self.matrix().row(row, weights).unwrap();
        }
        let mut sums = Vec::new();
        let mut magnitudes = Vec::new();
        for x in x.chunks(columns) {
            for weights in weights.chunks(columns) {
                let terms = x.iter().zip(weights).map(|(x, w)| f64::from(*x) * f64::from(*w));
                sums.push(terms.clone().sum());
                magnitudes.push(terms.map(f64::abs).sum());
            }
        }
        (sums, magnitudes)
    }
}

/// Of the sum of magnitudes of an output's products. A chain of up to 768 columns rounds each step to 6e-8; types with minima add two sums
/// of opposite sign that are some ten times the result's magnitudes. The worst seen over thousands of shapes is 2.2e-6.
const TOLERANCE: f64 = 1e-5;

#[test]
fn products_are_those_of_the_double_precision_twin() {
    for ty in TensorType::ALL {
        for f32_throughout in [false, true] {
            let weights = Weights::new(ty, 50, 512, f32_throughout);
            let x = floats(22, 9 * 512);
            let (want, magnitudes) = weights.twin(&x);
            for isa in isas() {
                let got = weights.product(&pool(2), isa, &x);
                let what = format!("{ty} (f32 {f32_throughout}) on {isa}");
                for ((got, want), magnitude) in got.iter().zip(&want).zip(&magnitudes) {
                    near(&what, &[*got], &[*want], *magnitude, TOLERANCE);
                }
            }
        }
    }
}

#[test]
fn every_set_gives_the_bits_of_plain_rust_for_any_number_of_rows() {
    // More units than are unpacked at a time, and a last panel that is not full.
    const COLUMNS: usize = 1280;
    let pools: Vec<_> = (1..=3).map(pool).collect();
    for ty in TensorType::ALL {
        for outputs in [1, 35] {
            let weights = Weights::new(ty, outputs, COLUMNS, false);
            let x = floats(23, 40 * COLUMNS);
            let want = bits(&weights.product(&pools[1], Isa::Portable, &x));
            for isa in isas().into_iter().filter(|&isa| isa != Isa::Portable) {
                for rows in 1..=40 {
                    let got = weights.product(&pools[rows % pools.len()], isa, &x[..rows * COLUMNS]);
                    assert!(
                        bits(&got) == want[..rows * outputs],
                        "{ty} on {isa}, {rows} rows, {outputs} outputs"
                    );
                }
            }
        }
    }
}

#[test]
fn a_rows_bits_do_not_depend_on_its_neighbours_or_on_threads() {
    const COLUMNS: usize = 256;
    let pools: Vec<_> = (1..=4).map(pool).collect();
    for ty in TensorType::ALL {
        let weights = Weights::new(ty, 83, COLUMNS, false);
        let x = floats(24, 40 * COLUMNS);
        for isa in isas() {
            let alone: Vec<u32> =
                x.chunks(COLUMNS).flat_map(|x| bits(&weights.product(&pools[0], isa, x))).collect();
            for batch in 1..=40 {
                let pool = &pools[batch % pools.len()];
                let together: Vec<u32> =
                    x.chunks(batch * COLUMNS).flat_map(|x| bits(&weights.product(pool, isa, x))).collect();
                assert!(alone == together, "{ty} on {isa}, batches of {batch}, {} threads", pool.threads());
            }
        }
    }
}

#[test]
fn extreme_codes_do_not_overflow() {
    // All codes at their largest, all activations at ± the block's reach: the sums that 16-bit arithmetic must hold.
    for ty in [TensorType::Q4_0, TensorType::Q4_1, TensorType::Q8_0, TensorType::Q5_1, TensorType::Q6_K] {
        let (rows, columns) = (16, 256);
        let layout = MatrixLayout::new(PackedType::for_source(ty, false), rows, columns).unwrap();
        for code in [0x00, 0x80, 0xFF] {
            let mut data = vec![code; rows * ty.row_bytes(columns).unwrap()];
            for block in data.chunks_exact_mut(ty.block_bytes()) {
                let at = if ty == TensorType::Q6_K { 208 } else { 0 };
                block[at..at + 2].copy_from_slice(&half::f16::from_f32(0.01).to_le_bytes());
                if matches!(ty, TensorType::Q4_1 | TensorType::Q5_1) {
                    block[2..4].copy_from_slice(&half::f16::from_f32(-0.03).to_le_bytes());
                }
            }
            let mut bytes = vec![0; layout.bytes()];
            pack(&layout, ty, &data, 0, &mut bytes).unwrap();
            let weights = Weights { layout, bytes };
            for pattern in 0..4 {
                let x: Vec<f32> = (0..25 * columns)
                    .map(|k| {
                        let negative = match pattern {
                            0 => k % 32 == 0,
                            1 => k % 32 != 0,
                            2 => k % 2 == 1,
                            _ => false,
                        };
                        if negative { -1.0 } else { 1.0 }
                    })
                    .collect();
                let (want, magnitudes) = weights.twin(&x);
                let plain = weights.product(&pool(1), Isa::Portable, &x);
                for isa in isas() {
                    let got = weights.product(&pool(1), isa, &x);
                    assert_eq!(bits(&got), bits(&plain), "{ty} code {code:#x} pattern {pattern} on {isa}");
                    for ((got, want), magnitude) in got.iter().zip(&want).zip(&magnitudes) {
                        let what = format!("{ty} code {code:#x} pattern {pattern} on {isa}");
                        near(&what, &[*got], &[*want], *magnitude, TOLERANCE);
                    }
                }
            }
        }
    }
}

#[test]
fn several_products_at_once_are_those_one_by_one() {
    let pool = pool(3);
    let columns = 512;
    let weights: Vec<_> = [(TensorType::Q4_1, 40), (TensorType::Q6_K, 7), (TensorType::F16, 100)]
        .map(|(ty, rows)| Weights::new(ty, rows, columns, false))
        .into();
    let x = floats(25, 6 * columns);
    for isa in isas() {
        let mut activations = Activations::new();
        let kind = weights.iter().map(|w| w.layout.ty().activations()).reduce(ActivationKind::and).unwrap();
        assert_eq!(kind, ActivationKind::Both);
        activations.set(&pool, isa, &x, columns, kind).unwrap();
        let mut outs: Vec<_> = weights.iter().map(|_| vec![0.5; 6 * 110]).collect();
        let mut products: Vec<_> = weights
            .iter()
            .zip(&mut outs)
            .map(|(weights, out)| Product { weights: weights.matrix(), out, stride: 110 })
            .collect();
        matmul_all(&pool, isa, &activations, &mut products).unwrap();
        for (weights, out) in weights.iter().zip(&outs) {
            let rows = weights.layout.rows();
            let want = weights.product(&pool, isa, &x);
            for (out, want) in out.chunks(110).zip(want.chunks(rows)) {
                assert_eq!(bits(&out[..rows]), bits(want));
                assert!(out[rows..].iter().all(|&x| x == 0.5), "what lies between rows is left alone");
            }
        }
    }
}

#[test]
fn activations_are_represented_within_half_a_step() {
    for scheme in [Scheme::Asymmetric, Scheme::Symmetric] {
        for isa in isas() {
            let x = floats(26, 64 * 32);
            let mut activations = Activations::with_scheme(scheme);
            activations.set(&pool(2), isa, &x, 64, ActivationKind::Int8).unwrap();
            let mut got = vec![0.0; x.len()];
            activations.represented(&mut got).unwrap();
            for (got, x) in got.chunks(32).zip(x.chunks(32)) {
                let low = x.iter().copied().fold(f32::INFINITY, f32::min);
                let high = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let reach = match scheme {
                    Scheme::Asymmetric => (high - low) / 2.0,
                    Scheme::Symmetric => high.max(-low),
                };
                for (got, x) in got.iter().zip(x) {
                    assert!(
                        (got - x).abs() <= reach / 127.0 * 0.501,
                        "{scheme:?}: {got} for {x}, reach {reach}"
                    );
                }
            }
        }
    }
}

#[test]
fn blocks_of_one_value_are_exact_and_nan_spreads_to_its_own_row_only() {
    let weights = Weights::new(TensorType::Q4_1, 20, 64, false);
    for isa in isas() {
        let mut x = vec![0.37; 3 * 64];
        let mut activations = Activations::new();
        activations.set(&pool(1), isa, &x, 64, ActivationKind::Int8).unwrap();
        let mut got = vec![0.0; x.len()];
        activations.represented(&mut got).unwrap();
        assert_eq!(bits(&got), bits(&x));
        for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            x[64 + 40] = poison;
            let out = weights.product(&pool(2), isa, &x);
            assert!(out[20..40].iter().all(|x| x.is_nan()), "{poison} on {isa}: {:?}", &out[20..40]);
            assert!(out[..20].iter().chain(&out[40..]).all(|x| x.is_finite()), "{poison} on {isa}");
        }
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused_before_anything_is_written() {
    let pool = pool(2);
    let weights = Weights::new(TensorType::Q4_1, 20, 64, false);
    let mut activations = Activations::new();
    let mut out = vec![7.0; 40];
    let isa = Isa::detect();
    activations.set(&pool, isa, &[0.0; 128], 64, ActivationKind::F32).unwrap();
    let wrong = matmul(&pool, isa, &weights.matrix(), &activations, &mut out, 20);
    assert!(matches!(wrong, Err(ShapeError::Activations { .. })), "{wrong:?}");
    activations.set(&pool, isa, &[0.0; 128], 32, ActivationKind::Int8).unwrap();
    let wrong = matmul(&pool, isa, &weights.matrix(), &activations, &mut out, 20);
    assert!(matches!(wrong, Err(ShapeError::Dimension { found: 32, .. })), "{wrong:?}");
    activations.set(&pool, isa, &[0.0; 128], 64, ActivationKind::Int8).unwrap();
    let wrong = matmul(&pool, isa, &weights.matrix(), &activations, &mut out[..39], 20);
    assert!(matches!(wrong, Err(ShapeError::Length { needed: 40, found: 39, .. })), "{wrong:?}");
    let wrong = matmul(&pool, isa, &weights.matrix(), &activations, &mut out, 19);
    assert!(matches!(wrong, Err(ShapeError::Dimension { found: 19, .. })), "{wrong:?}");
    let wrong = matmul(&pool, isa, &weights.matrix(), &activations, &mut out, usize::MAX);
    assert!(wrong.is_err(), "{wrong:?}");
    assert!(out.iter().all(|&x| x == 7.0));

    assert!(activations.set(&pool, isa, &[0.0; 100], 64, ActivationKind::F32).is_err());
    assert!(activations.set(&pool, isa, &[0.0; 40], 40, ActivationKind::Int8).is_err());
    assert!(activations.set(&pool, isa, &[0.0; 40], 0, ActivationKind::F32).is_err());
    assert_eq!(activations.rows(), 0);
    matmul(&pool, isa, &weights.matrix(), &activations, &mut [], 20).unwrap();
}

proptest! {
    #![proptest_config(crate::support::cases(48))]

    #[test]
    fn any_shape_gives_the_twins_products(
        ty in prop::sample::select(&TensorType::ALL[..]),
        f32_throughout: bool,
        rows in 1_usize..70,
        groups in 1_usize..4,
        batch in 1_usize..20,
        threads in 1_usize..4,
    ) {
        let unit = ty.block_elements().max(8);
        let weights = Weights::new(ty, rows, groups * unit, f32_throughout);
        let x = floats(rows as u32, batch * groups * unit);
        let (want, magnitudes) = weights.twin(&x);
        for isa in isas() {
            let got = weights.product(&pool(threads), isa, &x);
            for ((got, want), magnitude) in got.iter().zip(&want).zip(&magnitudes) {
                prop_assert!((f64::from(*got) - want).abs() <= TOLERANCE * magnitude, "{} for {}", got, want);
            }
        }
    }
}
