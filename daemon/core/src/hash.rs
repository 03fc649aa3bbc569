//! Maps by numbers that this program gave out itself.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map by numbers. Whoever could choose them could make it slow: only for numbers that no client chooses.
pub type NumberMap<K, V> = HashMap<K, V, BuildHasherDefault<NumberHasher>>;

/// Spreads a number over 64 bits by one multiplication, where std's own hash takes some 20 ns.
#[derive(Clone, Copy, Default, Debug)]
pub struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(byte.into());
        }
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(number.into());
    }

    fn write_u64(&mut self, number: u64) {
        // A map takes a place from the low bits and a tag from the high ones: both halves of the product go into both.
        let product = u128::from(self.0.rotate_left(5) ^ number) * 0x9e37_79b9_7f4a_7c15;
        self.0 = (product ^ product >> 64) as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_a_row_get_places_of_their_own() {
        let hash = |number: u64| {
            let mut hasher = NumberHasher::default();
            hasher.write_u64(number);
            hasher.finish()
        };
        for step in [1, 8, 1 << 20, 1 << 40] {
            let mut places: Vec<u64> = (0..256).map(|n| hash(n * step) % 512).collect();
            places.sort_unstable();
            places.dedup();
            assert!(places.len() > 160, "{step}: {}", places.len());
        }
    }
}
