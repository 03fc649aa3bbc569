//! Durations: `10m`, `30s`, `500ms`.

use crate::shown;
use crate::size::{decimal, split_number};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A duration in whole milliseconds, written with its unit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Span(pub Duration);

/// The text is no duration.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SpanError {
    /// It does not begin with a number.
    #[error("`{0}` is no duration; write for example 30s, 10m or 500ms")]
    NoNumber(String),
    /// The number has no unit, or one that is unknown.
    #[error("`{0}` needs a unit: ms, s, m, h or d")]
    NoUnit(String),
    /// It is no whole number of milliseconds, or more than 100 years.
    #[error("`{0}` is no whole number of milliseconds below 100 years")]
    OutOfRange(String),
}

const UNITS: [(&str, u64); 5] = [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)];
const LONGEST_MS: u64 = 36_500 * 86_400_000;

impl FromStr for Span {
    type Err = SpanError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        let (number, unit) = split_number(text).ok_or_else(|| SpanError::NoNumber(shown(text)))?;
        let unit = UNITS
            .iter()
            .find(|(name, _)| *name == unit)
            .map(|(_, ms)| *ms)
            .ok_or_else(|| SpanError::NoUnit(shown(text)))?;
        let (numerator, denominator) = decimal(number).ok_or_else(|| SpanError::OutOfRange(shown(text)))?;
        let scaled =
            numerator.checked_mul(u128::from(unit)).filter(|scaled| scaled.is_multiple_of(denominator));
        scaled
            .and_then(|scaled| u64::try_from(scaled / denominator).ok())
            .filter(|ms| *ms < LONGEST_MS)
            .map(|ms| Self(Duration::from_millis(ms)))
            .ok_or_else(|| SpanError::OutOfRange(shown(text)))
    }
}

impl fmt::Display for Span {
    /// In the largest unit that keeps the number whole.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = u64::try_from(self.0.as_millis()).unwrap_or(u64::MAX);
        let (name, unit) = UNITS.iter().find(|(_, unit)| ms.is_multiple_of(*unit)).unwrap_or(&("ms", 1));
        if ms == 0 { f.write_str("0s") } else { write!(f, "{}{name}", ms / unit) }
    }
}
