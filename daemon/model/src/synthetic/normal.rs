//! Normal numbers as a function of seed and index.
//!
//! Philox 4x32-10 (Salmon et al. 2011) gives four words for the counter `(p, h)`; Box and Muller (1958) make the elements `8 p + 4 h` and on
//! of them. The logarithm, sine and cosine are those of Cephes, in sums, products and roots of single precision alone: the same bits on
//! every machine, and loops that compilers turn into vectors.

use std::f32::consts::TAU;

/// Elements of a pack: two counters.
const PACK: usize = 8;
/// Packs that are made together.
pub(super) const LANES: usize = 16;
/// Elements that are made together.
const BLOCK: usize = PACK * LANES;

/// Fills `dst` with the elements from index `first` on, as BF16.
pub(super) fn fill(seed: u64, deviation: f32, first: u64, dst: &mut [u8]) {
    let (mut index, mut rest) = (first, dst.as_chunks_mut::<2>().0);
    while !rest.is_empty() {
        let (block, within) = (index / BLOCK as u64, (index % BLOCK as u64) as usize);
        let values = block_of(seed, deviation, block * LANES as u64);
        let (now, later) = rest.split_at_mut(rest.len().min(BLOCK - within));
        for (to, value) in now.iter_mut().zip(&values[within..]) {
            *to = bf16(*value).to_le_bytes();
        }
        index += now.len() as u64;
        rest = later;
    }
}

/// The elements of the packs `[first, first + LANES)`.
fn block_of(seed: u64, deviation: f32, first: u64) -> [f32; BLOCK] {
    let mut out = [0.0; BLOCK];
    for half in 0..2 {
        let words = philox(seed, first, half as u32);
        for pair in 0..2 {
            let radii = words[2 * pair].map(|word| deviation * (-2.0 * ln(uniform(word))).sqrt());
            let turns = words[2 * pair + 1].map(|word| cos_sin(word >> 8));
            for lane in 0..LANES {
                let at = PACK * lane + 4 * half + 2 * pair;
                out[at] = radii[lane] * turns[lane].0;
                out[at + 1] = radii[lane] * turns[lane].1;
            }
        }
    }
    out
}

/// Four words for each of the counters `(first + lane, half)`.
pub(super) fn philox(seed: u64, first: u64, half: u32) -> [[u32; LANES]; 4] {
    let pack: [u64; LANES] = std::array::from_fn(|lane| first + lane as u64);
    let mut words = [pack.map(|p| p as u32), pack.map(|p| (p >> 32) as u32), [half; LANES], [0; LANES]];
    let (mut key0, mut key1) = (seed as u32, (seed >> 32) as u32);
    for _ in 0..10 {
        let [a, b, c, d] = &mut words;
        for (((a, b), c), d) in a.iter_mut().zip(b).zip(c).zip(d) {
            let (one, two) = (0xD251_1F53 * u64::from(*a), 0xCD9E_8D57 * u64::from(*c));
            (*a, *b, *c, *d) =
                ((two >> 32) as u32 ^ *b ^ key0, two as u32, (one >> 32) as u32 ^ *d ^ key1, one as u32);
        }
        key0 = key0.wrapping_add(0x9E37_79B9);
        key1 = key1.wrapping_add(0xBB67_AE85);
    }
    words
}

/// A number in `(0, 1]` from the upper 24 bits.
fn uniform(word: u32) -> f32 {
    ((word >> 8) as f32 + 0.5) * (1.0 / (1 << 24) as f32)
}

/// The natural logarithm of a positive, normal number.
#[allow(clippy::excessive_precision, clippy::unreadable_literal, reason = "as published")]
fn ln(x: f32) -> f32 {
    /// The bits of the root of one half.
    const ROOT_HALF: u32 = 0x3f35_04f3;
    // x = (1 + z) 2^e, with 1 + z between the roots of one half and of 2.
    let from_root = x.to_bits().wrapping_sub(ROOT_HALF);
    let e = (from_root.cast_signed() >> 23) as f32;
    let z = f32::from_bits((from_root & 0x007f_ffff) + ROOT_HALF) - 1.0;
    let square = z * z;
    let mut series = 7.0376836292e-2 * z - 1.1514610310e-1;
    series = series * z + 1.1676998740e-1;
    series = series * z - 1.2420140846e-1;
    series = series * z + 1.4249322787e-1;
    series = series * z - 1.6668057665e-1;
    series = series * z + 2.0000714765e-1;
    series = series * z - 2.4999993993e-1;
    series = series * z + 3.3333331174e-1;
    // The logarithm of 2 in two parts, of which the first has few bits: its product is exact.
    series * z * square - 2.12194440e-4 * e - 0.5 * square + z + 0.693359375 * e
}

/// Cosine and sine of `turn / 2^24` of a circle.
#[allow(clippy::excessive_precision, clippy::unreadable_literal, reason = "as published")]
fn cos_sin(turn: u32) -> (f32, f32) {
    // The nearest quarter, and what is left of it: at most an eighth.
    let quarter = (turn + (1 << 21)) >> 22;
    let left = turn.cast_signed() - (quarter << 22).cast_signed();
    let x = left as f32 * (TAU / (1 << 24) as f32);
    let square = x * x;
    let mut sin = -1.9515295891e-4 * square + 8.3321608736e-3;
    sin = sin * square - 1.6666654611e-1;
    let sin = sin * square * x + x;
    let mut cos = 2.443315711809948e-5 * square - 1.388731625493765e-3;
    cos = cos * square + 4.166664568298827e-2;
    let cos = cos * square * square - 0.5 * square + 1.0;
    let (first, second) = if quarter & 1 == 0 { (cos, sin) } else { (sin, cos) };
    let signed = |x: f32, negative: u32| f32::from_bits(x.to_bits() ^ (negative & 2) << 30);
    (signed(first, quarter + 1), signed(second, quarter))
}

/// The bits of the nearest BF16, to even where two are. Not for NaN.
fn bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

#[cfg(test)]
mod tests;
