//! Sizes in bytes: `4MiB`, `2 GB`, `512B`.

use crate::shown;
use pagedd_core::Bytes;
use std::fmt;
use std::str::FromStr;

/// A size in bytes, written with its unit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Size(pub Bytes);

/// The text is no size.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SizeError {
    /// It does not begin with a number.
    #[error("`{0}` is no size; write for example 2GiB, 512MiB or 4MB")]
    NoNumber(String),
    /// The number has no unit, or one that is unknown.
    #[error("`{0}` needs a unit: B, KiB, MiB, GiB, TiB, KB, MB, GB or TB")]
    NoUnit(String),
    /// It is no whole number of bytes below 2^63.
    #[error("`{0}` is no whole number of bytes below 2^63")]
    OutOfRange(String),
}

const UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("TB", 1_000_000_000_000),
    ("GiB", 1 << 30),
    ("GB", 1_000_000_000),
    ("MiB", 1 << 20),
    ("MB", 1_000_000),
    ("KiB", 1 << 10),
    ("KB", 1_000),
    ("B", 1),
];

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        let (number, unit) = split_number(text).ok_or_else(|| SizeError::NoNumber(shown(text)))?;
        let unit = UNITS
            .iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(unit))
            .map(|(_, bytes)| *bytes)
            .ok_or_else(|| SizeError::NoUnit(shown(text)))?;
        let (numerator, denominator) = decimal(number).ok_or_else(|| SizeError::OutOfRange(shown(text)))?;
        let scaled =
            numerator.checked_mul(u128::from(unit)).filter(|scaled| scaled.is_multiple_of(denominator));
        scaled
            .and_then(|scaled| u64::try_from(scaled / denominator).ok())
            .filter(|bytes| *bytes < 1 << 63)
            .map(|bytes| Self(Bytes(bytes)))
            .ok_or_else(|| SizeError::OutOfRange(shown(text)))
    }
}

impl fmt::Display for Size {
    /// In the unit that makes the number smallest and keeps it whole.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0.0;
        let (name, unit) = UNITS.iter().find(|(_, unit)| bytes.is_multiple_of(*unit)).unwrap_or(&("B", 1));
        if bytes == 0 { f.write_str("0B") } else { write!(f, "{}{name}", bytes / unit) }
    }
}

/// Splits `12.5 GiB` into `12.5` and `GiB`; `None` where no digit comes first.
pub(crate) fn split_number(text: &str) -> Option<(&str, &str)> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    number.starts_with(|c: char| c.is_ascii_digit()).then(|| (number, unit.trim_start()))
}

/// `12.5` as 125 and 10; `None` where it is no decimal number of at most 18 digits.
pub(crate) fn decimal(number: &str) -> Option<(u128, u128)> {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    if number.len() > 19 || number.ends_with('.') || fraction.contains('.') {
        return None;
    }
    let digits = format!("{whole}{fraction}").parse().ok()?;
    Some((digits, 10u128.checked_pow(u32::try_from(fraction.len()).ok()?)?))
}
