//! The bytes of every token, in one allocation.

use pagedd_core::TokenId;

/// Bytes by token id.
#[derive(Debug)]
pub(super) struct ByteTable {
    bytes: Vec<u8>,
    /// Token `i` is `bytes[ends[i - 1]..ends[i]]`.
    ends: Vec<u32>,
}

impl ByteTable {
    /// From the bytes of the tokens 0, 1, … in order.
    pub(super) fn new(tokens: impl Iterator<Item = Vec<u8>>) -> Self {
        let mut table = Self { bytes: Vec::new(), ends: Vec::new() };
        for token in tokens {
            table.bytes.extend_from_slice(&token);
            table.ends.push(table.bytes.len() as u32);
        }
        table.bytes.shrink_to_fit();
        table
    }

    pub(super) fn get(&self, id: TokenId) -> &[u8] {
        let id = id.0 as usize;
        let Some(&end) = self.ends.get(id) else { return &[] };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[start as usize..end as usize]
    }
}

/// How a vocabulary writes bytes as characters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Spelling {
    /// GPT-2's: each byte is one printable character.
    ByteLevel,
    /// `SentencePiece`'s: `▁` is a space, and `<0xNN>` a byte.
    SentencePiece,
}

impl Spelling {
    /// How a byte is written by [`ByteLevel`](Self::ByteLevel).
    pub(super) fn of_byte(byte: u8) -> char {
        let mut others = (0..=u8::MAX).filter(|&b| !printable(b));
        match others.position(|b| b == byte) {
            Some(place) => char::from_u32(0x100 + place as u32).unwrap_or(char::REPLACEMENT_CHARACTER),
            None => char::from(byte),
        }
    }

    pub(super) fn decode(self, text: &str) -> Vec<u8> {
        match self {
            // A character outside the table means that the token is written as itself.
            Self::ByteLevel => text
                .chars()
                .map(byte_of_char)
                .collect::<Option<_>>()
                .unwrap_or_else(|| text.as_bytes().to_vec()),
            Self::SentencePiece => match byte_token(text) {
                Some(byte) => vec![byte],
                None => text.replace('▁', " ").into_bytes(),
            },
        }
    }
}

/// `<0xNN>`, with upper-case digits.
pub(super) fn byte_token(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    let byte = u8::from_str_radix(digits, 16).ok()?;
    (format!("{byte:02X}") == digits).then_some(byte)
}

/// Whether GPT-2's table has a byte stand for itself.
fn printable(byte: u8) -> bool {
    matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff)
}

/// GPT-2's table: bytes that are printable in Latin-1 stand for themselves, the other 68 for `U+0100` and on, in order.
fn byte_of_char(c: char) -> Option<u8> {
    match u32::from(c) {
        n @ 0..=0xff => Some(n as u8).filter(|&b| printable(b)),
        n => (0..=0xff).filter(|&b| !printable(b)).nth((n as usize).checked_sub(0x100)?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;

    #[test]
    fn the_byte_table_is_the_inverse_of_the_byte_level_alphabet() {
        let mut bytes: Vec<u8> =
            ByteLevel::alphabet().into_iter().map(|c| byte_of_char(c).expect("in the table")).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert!((0..=u8::MAX).all(|byte| byte_of_char(Spelling::of_byte(byte)) == Some(byte)));
        assert_eq!(Spelling::ByteLevel.decode("Ġhello"), b" hello");
        assert_eq!(Spelling::ByteLevel.decode("a b"), b"a b", "a space is not in the table");
        assert_eq!(byte_of_char('\u{144}'), None);
    }

    #[test]
    fn sentencepiece_spells_spaces_and_bytes() {
        assert_eq!(Spelling::SentencePiece.decode("▁the▁"), b" the ");
        assert_eq!(Spelling::SentencePiece.decode("<0x0A>"), b"\n");
        assert_eq!(Spelling::SentencePiece.decode("<0x0a>"), b"<0x0a>");
    }

    #[test]
    fn ids_outside_the_table_have_no_bytes() {
        let table = ByteTable::new([b"a".to_vec(), vec![], b"bc".to_vec()].into_iter());
        let all: Vec<&[u8]> = (0..4).map(|id| table.get(TokenId(id))).collect();
        assert_eq!(all, [b"a".as_slice(), b"", b"bc", b""]);
    }
}
