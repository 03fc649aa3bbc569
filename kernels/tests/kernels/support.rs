//! Test data, always the same.

use pagedd_core::TensorType;
use pagedd_kernels::sample::philox4x32_10;
use pagedd_kernels::{Isa, ThreadPool};
use proptest::test_runner::{Config, RngSeed};

/// So many cases of a property, the same in every run.
pub(crate) fn cases(cases: u32) -> Config {
    Config { cases, rng_seed: RngSeed::Fixed(1), failure_persistence: None, ..Config::default() }
}

/// Instruction sets that this processor has.
pub(crate) fn isas() -> Vec<Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.usable() == *isa).collect()
}

pub(crate) fn pool(threads: usize) -> ThreadPool {
    ThreadPool::new(threads, None).unwrap()
}

fn word(seed: u32, index: usize) -> u32 {
    philox4x32_10([index as u32 / 4, 0, 0, 0], [seed, 1])[index % 4]
}

pub(crate) fn bytes(seed: u32, count: usize) -> Vec<u8> {
    (0..count).map(|index| (word(seed, index) >> 13) as u8).collect()
}

/// Values around 0 with a few large ones, as activations have them.
pub(crate) fn floats(seed: u32, count: usize) -> Vec<f32> {
    (0..count)
        .map(|index| {
            let word = word(seed, index);
            let x = (word >> 8) as f32 / (1 << 23) as f32 - 1.0;
            if word.is_multiple_of(61) { x * 12.0 } else { x }
        })
        .collect()
}

/// Blocks of `ty` with every bit used and scales of the size that models have.
pub(crate) fn blocks(ty: TensorType, seed: u32, elements: usize) -> Vec<u8> {
    let mut data = bytes(seed, ty.row_bytes(elements).unwrap());
    let halves: &[usize] = match ty {
        TensorType::F32 => return floats(seed, elements).iter().flat_map(|x| x.to_le_bytes()).collect(),
        TensorType::F16 => {
            let halves = floats(seed, elements).into_iter().map(half::f16::from_f32);
            return halves.flat_map(half::f16::to_le_bytes).collect();
        }
        TensorType::BF16 => {
            let halves = floats(seed, elements).into_iter().map(half::bf16::from_f32);
            return halves.flat_map(half::bf16::to_le_bytes).collect();
        }
        TensorType::Q4_0 | TensorType::Q5_0 | TensorType::Q8_0 => &[0],
        TensorType::Q4_1 | TensorType::Q5_1 | TensorType::Q4_K | TensorType::Q5_K => &[0, 2],
        TensorType::Q6_K => &[208],
    };
    for (index, block) in data.chunks_exact_mut(ty.block_bytes()).enumerate() {
        for (which, &at) in halves.iter().enumerate() {
            let x = floats(seed ^ 0x5555, 2 * index + which + 1)[2 * index + which] * 0.02;
            block[at..at + 2].copy_from_slice(&half::f16::from_f32(x).to_le_bytes());
        }
    }
    data
}

pub(crate) fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Every element of `got` is within `tolerance * scale` of `want`; prints the worst.
#[track_caller]
pub(crate) fn near(what: &str, got: &[f32], want: &[f64], scale: f64, tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (index, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*got) - want).abs();
        assert!(
            error <= tolerance * scale,
            "{what}[{index}]: {got} for {want}, error {error:e} of {scale:e}"
        );
    }
}
