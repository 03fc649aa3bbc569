//! Blocks of `Q4_1` as a function of seed and index.
//!
//! A block's sixteen bytes of codes are four of the words that [`philox`] gives for the counters `(block, 0)` and `(block, 1)`; a fifth says how large
//! its scale is, between three and five quarters of one that has the deviation asked for. Minima put the middle of the codes at 0.

use half::f16;

use super::normal::{LANES, philox};

/// Bytes of a block.
const BLOCK: usize = 20;
/// Standard deviation of a code that is as likely to be each of 0 to 15.
const DEVIATION: f32 = 4.609_772;
/// Their mean.
const MEAN: f32 = 7.5;

/// Fills `dst` with whole blocks from index `first` on.
pub(super) fn fill(seed: u64, deviation: f32, first: u64, dst: &mut [u8]) {
    let (mut index, mut rest) = (first, dst.as_chunks_mut::<BLOCK>().0);
    while !rest.is_empty() {
        let (group, within) = (index / LANES as u64 * LANES as u64, (index % LANES as u64) as usize);
        let (codes, others) = (philox(seed, group, 0), philox(seed, group, 1));
        let (now, later) = rest.split_at_mut(rest.len().min(LANES - within));
        for (block, lane) in now.iter_mut().zip(within..) {
            let part = (others[0][lane] >> 8) as f32 / (1 << 24) as f32;
            let scale = f16::from_f32(deviation / DEVIATION * (0.75 + 0.5 * part));
            let minimum = f16::from_f32(-MEAN * scale.to_f32());
            block[..2].copy_from_slice(&scale.to_le_bytes());
            block[2..4].copy_from_slice(&minimum.to_le_bytes());
            for (bytes, words) in block[4..].as_chunks_mut::<4>().0.iter_mut().zip(&codes) {
                *bytes = words[lane].to_le_bytes();
            }
        }
        index += now.len() as u64;
        rest = later;
    }
}
