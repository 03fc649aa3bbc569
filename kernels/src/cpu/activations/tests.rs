use super::*;
use crate::cpu::ops::{Norm, add, add_rms_norm, rms_norm, silu_mul, silu_mul_to};

const KINDS: [ActivationKind; 3] = [ActivationKind::F32, ActivationKind::Int8, ActivationKind::Both];

fn values(seed: u32, count: usize) -> Vec<f32> {
    let word = |index: usize| crate::sample::philox4x32_10([index as u32, 0, 0, 0], [seed, 7])[0];
    (0..count).map(|index| word(index) as f32 / (1_u64 << 31) as f32 - 1.0).collect()
}

/// Everything that a product sees, as bits.
type Seen = (usize, usize, Vec<u32>, Vec<[i32; 8]>, Vec<[u32; 6]>);

fn seen(x: &Activations) -> Seen {
    let of_block = |block: &Block| {
        let [a, b, c] = block.centres.map(|x| x as u32);
        [block.scale.to_bits(), block.zero.to_bits(), block.sum.to_bits(), a, b, c]
    };
    let floats = x.floats.iter().map(|x| x.to_bits()).collect();
    (x.rows, x.columns, floats, x.codes.clone(), x.blocks.iter().map(of_block).collect())
}

fn usable() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.usable() == *isa)
}

#[test]
fn every_set_quantises_to_the_same_bits() {
    let mut x = values(1, 20_000);
    x.truncate(x.len() / 32 * 32);
    // Zeros of both signs, subnormal numbers, equal values, large values, and what is no number.
    x[..32].fill(0.0);
    x[3] = -0.0;
    x[32..64].fill(-0.0);
    x[64..96].fill(-2.5);
    x[96..128].iter_mut().for_each(|x| *x *= 1e-40);
    x[128..160].iter_mut().for_each(|x| *x *= f32::MAX);
    for (block, bad) in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN].into_iter().enumerate() {
        x[160 + block * 32 + 7 * block] = bad;
    }
    for scheme in [Scheme::Asymmetric, Scheme::Symmetric] {
        let set = |isa, threads| {
            let mut activations = Activations::with_scheme(scheme);
            let pool = ThreadPool::new(threads, None).unwrap();
            activations.set(&pool, isa, &x, 32, ActivationKind::Both).unwrap();
            seen(&activations)
        };
        let want = set(Isa::Portable, 1);
        for isa in usable() {
            assert!(set(isa, 3) == want, "{isa}, {scheme:?}");
        }
    }
}

#[test]
fn operators_that_make_activations_have_the_bits_of_the_plain_ones() {
    let pools = [ThreadPool::new(1, None).unwrap(), ThreadPool::new(3, None).unwrap()];
    // Small enough for one thread, and not; set again with other shapes.
    for (rows, columns) in [(1, 96), (5, 2048), (40, 576), (2, 64), (0, 64)] {
        let (x, y) = (values(2, rows * columns), values(3, rows * columns));
        let weight = values(4, columns);
        let norm = Norm { weight: &weight, epsilon: 1e-5 };
        for (isa, kind) in usable().flat_map(|isa| KINDS.map(|kind| (isa, kind))) {
            let plain = &pools[0];
            let mut sum = x.clone();
            add(plain, &mut sum, &y).unwrap();
            let (mut normed, mut gate) = (vec![0.0; x.len()], x.clone());
            let mut want = Activations::new();
            for pool in &pools {
                let mut got = Activations::new();
                for (delta, of) in [(None, &x), (Some(&*y), &sum)] {
                    rms_norm(plain, of, &weight, 1e-5, &mut normed).unwrap();
                    want.set(plain, Isa::Portable, &normed, columns, kind).unwrap();
                    let mut residual = x.clone();
                    add_rms_norm(pool, isa, &mut residual, delta, norm, kind, &mut got).unwrap();
                    assert!(residual == *of && seen(&got) == seen(&want), "{isa} {kind:?} {rows}x{columns}");
                }
                gate.copy_from_slice(&x);
                silu_mul(plain, Isa::Portable, &mut gate, &y).unwrap();
                want.set(plain, Isa::Portable, &gate, columns, kind).unwrap();
                silu_mul_to(pool, isa, &x, &y, columns, kind, &mut got).unwrap();
                assert!(seen(&got) == seen(&want), "silu {isa} {kind:?} {rows}x{columns}");
            }
        }
    }
}

#[test]
fn operators_that_make_activations_refuse_what_does_not_fit() {
    let (pool, isa, mut out) = (ThreadPool::new(1, None).unwrap(), Isa::detect(), Activations::new());
    let norm = Norm { weight: &[1.0; 8], epsilon: 1e-5 };
    let mut add_norm = |x: &mut [f32], delta: Option<&[f32]>, norm, kind| {
        let result = add_rms_norm(&pool, isa, x, delta, norm, kind, &mut out);
        assert!(x.iter().all(|x| x.to_bits() == 1.0_f32.to_bits()));
        result
    };
    assert!(add_norm(&mut [1.0; 12], None, norm, ActivationKind::F32).is_err());
    assert!(add_norm(&mut [1.0; 16], Some(&[1.0; 15]), norm, ActivationKind::F32).is_err());
    assert!(add_norm(&mut [1.0; 16], Some(&[1.0; 16]), norm, ActivationKind::Int8).is_err());
    assert!(add_norm(&mut [1.0; 16], None, Norm { weight: &[], ..norm }, ActivationKind::F32).is_err());
    assert!(silu_mul_to(&pool, isa, &[1.0; 64], &[1.0; 63], 32, ActivationKind::Int8, &mut out).is_err());
    assert!(silu_mul_to(&pool, isa, &[1.0; 64], &[1.0; 64], 48, ActivationKind::Int8, &mut out).is_err());
    assert!(silu_mul_to(&pool, isa, &[1.0; 64], &[1.0; 64], 0, ActivationKind::F32, &mut out).is_err());
    assert!(silu_mul_to(&pool, isa, &[1.0; 64], &[1.0; 64], 16, ActivationKind::Int8, &mut out).is_err());
}
