//! Where a sequence said the same before.
//!
//! **Owns** an index over one sequence's tokens, of 8 to 16 bytes a token. **Never** judges whether what followed then follows
//! again.
//!
//! Every pair of neighbouring tokens leads to where it stood last, and from there to where it stood before that: the hash
//! chains of LZ77. So the longest earlier occurrence of the last tokens is found without a scan of the sequence.

use pagedd_core::TokenId;

/// Shortest repetition that is one.
pub(crate) const SHORTEST: usize = 2;
/// Beyond this many tokens a repetition is as good as any longer one.
pub(crate) const LONGEST: usize = 16;
/// Earlier places of the last pair that are compared.
const PLACES: usize = 32;
/// Entries of the smallest table.
const LEAST: usize = 256;

/// An earlier occurrence of a sequence's last tokens.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Repetition {
    /// Where what followed then begins.
    pub next: usize,
    /// How many tokens agree, in `[SHORTEST, LONGEST]`.
    pub len: usize,
}

/// The index. Tokens may only be appended between two look-ups.
#[derive(Debug, Default)]
pub(crate) struct Lookup {
    /// By hash of a pair: one more than the position of its second token where it was seen last, 0 for never.
    last: Vec<u32>,
    /// By position of a second token: the same for the place before.
    before: Vec<u32>,
}

impl Lookup {
    /// The longest repetition of the end of `tokens`, and of these the latest.
    pub fn longest(&mut self, tokens: &[TokenId]) -> Option<Repetition> {
        self.extend(tokens);
        let end = tokens.len().checked_sub(1)?;
        let mut best: Option<Repetition> = None;
        let mut place = self.before[end];
        for _ in 0..PLACES {
            let next = place as usize;
            if next == 0 {
                break;
            }
            let pairs = tokens[..next].iter().rev().zip(tokens.iter().rev()).take(LONGEST);
            let len = pairs.take_while(|(then, now)| then == now).count();
            if len >= best.map_or(SHORTEST, |best| best.len + 1) {
                best = Some(Repetition { next, len });
            }
            if len == LONGEST {
                break;
            }
            place = self.before[next - 1];
        }
        best
    }

    fn extend(&mut self, tokens: &[TokenId]) {
        if tokens.len() > self.last.len() {
            self.last = vec![0; tokens.len().next_power_of_two().max(LEAST)];
            self.before.clear();
        }
        let bits = self.last.len().trailing_zeros();
        for position in self.before.len()..tokens.len() {
            let before = position.checked_sub(1).map_or(0, |first| {
                let hash = hash(tokens[first], tokens[position], bits);
                std::mem::replace(&mut self.last[hash], position as u32 + 1)
            });
            self.before.push(before);
        }
    }
}

/// `bits` bits of a pair's hash (Fibonacci hashing).
fn hash(first: TokenId, second: TokenId, bits: u32) -> usize {
    let pair = u64::from(first.0) << 32 | u64::from(second.0);
    (pair.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - bits)) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(text: &str) -> Vec<TokenId> {
        text.bytes().map(|byte| TokenId(byte.into())).collect()
    }

    fn longest(text: &str) -> Option<(usize, usize)> {
        Lookup::default().longest(&ids(text)).map(|found| (found.next, found.len))
    }

    #[test]
    fn the_longest_repetition_is_found_and_of_equal_ones_the_latest() {
        assert_eq!(longest(""), None);
        assert_eq!(longest("a"), None);
        assert_eq!(longest("abcdb"), None, "one token is no repetition");
        assert_eq!(longest("abcab"), Some((2, 2)));
        assert_eq!(longest("xabc-yab-zxab"), Some((3, 3)), "longer, though further away");
        assert_eq!(longest("-ab1-ab2-ab"), Some((7, 3)));
        assert_eq!(longest("aaaa"), Some((3, 3)), "it may overlap the end");
        let text = "0123456789abcdefghij".repeat(2);
        assert_eq!(longest(&text), Some((20, LONGEST)));
    }

    #[test]
    fn an_index_that_grew_with_the_sequence_finds_what_a_new_one_finds() {
        let mut grown = Lookup::default();
        let mut state = 1_u64;
        let mut tokens = Vec::new();
        for _ in 0..3000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            tokens.push(TokenId((state >> 60) as u32));
            if tokens.len() % 7 == 0 {
                assert_eq!(grown.longest(&tokens), Lookup::default().longest(&tokens), "{}", tokens.len());
            }
        }
    }
}
