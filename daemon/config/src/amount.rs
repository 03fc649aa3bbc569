//! Amounts of KV memory: `20%`, `2GiB`, `4096 tokens`.

use crate::size::{decimal, split_number};
use crate::{Size, SizeError, shown};
use pagedd_core::{Blocks, Bytes, Tokens};
use std::fmt;
use std::str::FromStr;

/// A share of a pool, in hundredths of a percent, in [0, 10000].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Percent(u32);

impl Percent {
    /// Everything.
    pub const ALL: Self = Self(10_000);

    /// `hundredths` of a percent; `None` above 100 %.
    #[must_use]
    pub const fn from_hundredths(hundredths: u32) -> Option<Self> {
        if hundredths <= 10_000 { Some(Self(hundredths)) } else { None }
    }

    /// In hundredths of a percent.
    #[must_use]
    pub const fn hundredths(self) -> u32 {
        self.0
    }

    /// This share of `whole`, rounded down, so that shares of up to 100 % never add up to more than the whole.
    #[must_use]
    pub fn of(self, whole: u64) -> u64 {
        u64::try_from(u128::from(whole) * u128::from(self.0) / 10_000).unwrap_or(whole)
    }
}

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, rest) = (self.0 / 100, self.0 % 100);
        match rest {
            0 => write!(f, "{whole}%"),
            rest if rest % 10 == 0 => write!(f, "{whole}.{}%", rest / 10),
            rest => write!(f, "{whole}.{rest:02}%"),
        }
    }
}

/// How much KV memory: of a pool, or as such.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Amount {
    /// A share of the whole.
    Percent(Percent),
    /// Bytes.
    Bytes(Bytes),
    /// The KV entries of this many tokens.
    Tokens(Tokens),
}

/// The text is no amount.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AmountError {
    /// It does not begin with a number.
    #[error("`{0}` is no amount; write for example 20%, 2GiB or `4096 tokens`")]
    NoNumber(String),
    /// The number has no unit, or one that is unknown.
    #[error("`{0}` needs a unit: %, tokens, B, KiB, MiB, GiB, TiB, KB, MB, GB or TB")]
    NoUnit(String),
    /// A percentage above 100, or with more than two decimals.
    #[error("`{0}` is not between 0% and 100% with at most two decimals")]
    PercentOutOfRange(String),
    /// No whole number of tokens below 2^32.
    #[error("`{0}` is no whole number of tokens below 2^32")]
    TokensOutOfRange(String),
    /// No whole number of bytes below 2^63.
    #[error("`{0}` is no whole number of bytes below 2^63")]
    BytesOutOfRange(String),
}

impl Amount {
    /// Nothing of a pool.
    pub const NOTHING: Self = Self::Percent(Percent(0));

    /// All of a pool.
    pub const EVERYTHING: Self = Self::Percent(Percent::ALL);

    /// In blocks of `block_bytes` bytes and `block_size` tokens, where a percentage is of `pool`.
    ///
    /// Percentages and bytes are rounded down, so that floors of 100 % in all fit the pool; tokens are rounded up, so that
    /// they fit the blocks. The result may exceed the pool.
    #[must_use]
    pub fn in_blocks(self, pool: Blocks, block_bytes: Bytes, block_size: Tokens) -> Blocks {
        match self {
            Self::Percent(percent) => Blocks(u32::try_from(percent.of(u64::from(pool.0))).unwrap_or(pool.0)),
            Self::Bytes(bytes) => {
                let blocks = bytes.0.checked_div(block_bytes.0).unwrap_or(0);
                Blocks(u32::try_from(blocks).unwrap_or(u32::MAX))
            }
            Self::Tokens(tokens) => Blocks(tokens.0.div_ceil(block_size.0.max(1))),
        }
    }

    /// In bytes of KV memory of `bytes_per_token`, where a percentage is of `available`. Saturates.
    #[must_use]
    pub fn in_bytes(self, available: Bytes, bytes_per_token: Bytes) -> Bytes {
        match self {
            Self::Percent(percent) => Bytes(percent.of(available.0)),
            Self::Bytes(bytes) => bytes,
            Self::Tokens(tokens) => Bytes(u64::from(tokens.0).saturating_mul(bytes_per_token.0)),
        }
    }
}

impl FromStr for Amount {
    type Err = AmountError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        let (number, unit) = split_number(text).ok_or_else(|| AmountError::NoNumber(shown(text)))?;
        match unit {
            "" => Err(AmountError::NoUnit(shown(text))),
            "%" => decimal(number)
                .and_then(|(numerator, denominator)| {
                    let hundredths = numerator.checked_mul(100)?;
                    hundredths.is_multiple_of(denominator).then_some(hundredths / denominator)
                })
                .and_then(|hundredths| u32::try_from(hundredths).ok())
                .and_then(Percent::from_hundredths)
                .map(Self::Percent)
                .ok_or_else(|| AmountError::PercentOutOfRange(shown(text))),
            "token" | "tokens" => number
                .parse()
                .map(|tokens| Self::Tokens(Tokens(tokens)))
                .map_err(|_| AmountError::TokensOutOfRange(shown(text))),
            _ => match text.parse() {
                Ok(Size(bytes)) => Ok(Self::Bytes(bytes)),
                Err(SizeError::NoNumber(text)) => Err(AmountError::NoNumber(text)),
                Err(SizeError::NoUnit(text)) => Err(AmountError::NoUnit(text)),
                Err(SizeError::OutOfRange(text)) => Err(AmountError::BytesOutOfRange(text)),
            },
        }
    }
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Percent(percent) => percent.fmt(f),
            Self::Bytes(bytes) => Size(*bytes).fmt(f),
            Self::Tokens(Tokens(1)) => f.write_str("1 token"),
            Self::Tokens(tokens) => write!(f, "{tokens} tokens"),
        }
    }
}
