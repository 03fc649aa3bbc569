//! `SplitMix64`: small, seeded, the same everywhere.

/// A stream of pseudo-random numbers.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The stream of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A stream of its own for a name.
    #[must_use]
    pub fn branch(&self, name: &str) -> Self {
        let mut branch = self.clone();
        for byte in name.bytes() {
            branch.0 = branch.next_u64() ^ u64::from(byte);
        }
        branch
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `[-1, 1)`.
    pub fn signed(&mut self) -> f32 {
        ((self.next_u64() >> 40) as f32) / (1_u32 << 23) as f32 - 1.0
    }

    /// Random bytes.
    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next_u64() as u8).collect()
    }
}
