//! Tenants' keys: made here, kept as digests only.

use crate::DbError;
use sha2::{Digest as _, Sha256};
use std::fmt;

/// What every key begins with, so that scanners for leaked secrets can find it.
const MARK: &str = "pgd_";

/// How many first characters of a key are kept in clear, by which lists show it.
pub const PREFIX_LENGTH: usize = 8;

/// The digits of base64url (RFC 4648, section 5).
const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// SHA-256 of a key's whole text. A key has 256 random bits, so that a digest needs neither salt nor stretching.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// The digest of a key's text.
    #[must_use]
    pub fn of(key: &str) -> Self {
        Self(Sha256::digest(key.as_bytes()).into())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Digest(…)")
    }
}

/// A key that was just made. Having one tells you nothing about whether it is stored. Not `Clone`: it is shown once.
pub struct NewKey {
    text: String,
}

impl NewKey {
    /// Draws a key: `pgd_` and 43 characters of base64url, 256 random bits.
    ///
    /// # Errors
    /// [`DbError::Random`] where the kernel gives none.
    pub fn draw() -> Result<Self, DbError> {
        let mut bits = [0; 32];
        getrandom::fill(&mut bits).map_err(DbError::Random)?;
        Ok(Self::of(&bits))
    }

    fn of(bits: &[u8; 32]) -> Self {
        let mut text = String::with_capacity(MARK.len() + 43);
        text.push_str(MARK);
        for group in bits.chunks(3) {
            let word =
                group.iter().fold(0u32, |word, byte| word << 8 | u32::from(*byte)) << (8 * (3 - group.len()));
            for digit in 0..=group.len() {
                text.push(char::from(DIGITS[(word >> (18 - 6 * digit)) as usize & 63]));
            }
        }
        Self { text }
    }

    /// The key's text: to be shown to the operator, and never to be logged or stored.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.text
    }

    /// Its first [`PREFIX_LENGTH`] characters.
    #[must_use]
    pub fn prefix(&self) -> &str {
        &self.text[..PREFIX_LENGTH]
    }

    /// Its digest.
    #[must_use]
    pub fn digest(&self) -> Digest {
        Digest::of(&self.text)
    }
}

impl fmt::Debug for NewKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NewKey({}…)", self.prefix())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn a_key_is_its_mark_and_base64url_of_its_bits() {
        assert_eq!(NewKey::of(&[0; 32]).reveal(), format!("pgd_{}", "A".repeat(43)));
        assert_eq!(NewKey::of(&[255; 32]).reveal(), format!("pgd_{}8", "_".repeat(42)));
        let mut bits = [0; 32];
        bits[..3].copy_from_slice(b"Man");
        assert_eq!(&NewKey::of(&bits).reveal()[..8], "pgd_TWFu");
    }

    #[test]
    fn keys_differ_and_have_the_documented_shape() {
        let keys: HashSet<String> = (0..100).map(|_| NewKey::draw().unwrap().reveal().to_owned()).collect();
        assert_eq!(keys.len(), 100);
        for key in keys {
            assert_eq!(key.len(), 47, "{key}");
            assert!(key.bytes().skip(4).all(|b| DIGITS.contains(&b)), "{key}");
        }
    }

    #[test]
    fn debug_output_of_a_key_shows_its_prefix_only() {
        let key = NewKey::of(&[7; 32]);
        assert_eq!(
            format!("{key:?} {:?}", key.digest()),
            "NewKey(pgd_Bwc…) Digest(…)".replace("Bwc", &key.prefix()[4..])
        );
    }

    #[test]
    fn a_digest_is_sha256_of_the_whole_text() {
        // The test vector "abc" of FIPS 180-2.
        assert_eq!(Digest::of("abc").0[..4], [0xba, 0x78, 0x16, 0xbf]);
    }
}
