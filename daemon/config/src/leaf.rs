//! Scalars of the file: each reads from its text and says by itself what is wrong with it.

use crate::{Amount, ModelName, Size, Span, TenantName, nearest, shown};
use serde::de::{self, Deserialize, Deserializer, Visitor};
use std::fmt;
use std::marker::PhantomData;
use std::net::IpAddr;
use std::path::PathBuf;
use std::str::FromStr;

/// Marks where a message of this crate begins behind the path that the YAML reader puts before it.
pub(crate) const MESSAGE: char = '\u{1}';

/// Reads a scalar through `FromStr`. YAML's own typing is passed by: `block_size: 16` and `"16"` are one.
pub(crate) fn scalar<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: FromStr<Err: fmt::Display>,
    D: Deserializer<'de>,
{
    struct Text<T>(PhantomData<T>);
    impl<T: FromStr<Err: fmt::Display>> Visitor<'_> for Text<T> {
        type Value = T;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a single value")
        }

        fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
            text.parse().map_err(|error| E::custom(format_args!("{MESSAGE}{error}")))
        }
    }
    deserializer.deserialize_str(Text(PhantomData))
}

macro_rules! scalars {
    ($($type:ty),* $(,)?) => {
        $(impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                scalar(deserializer)
            }
        })*
    };
}
scalars!(
    Amount,
    Size,
    Span,
    TenantName,
    ModelName,
    Device,
    ComputeDtype,
    KvDtype,
    LogLevel,
    LogFormat,
    Fsync,
    Cgroups,
    Policy,
    PathText,
    Address,
    Flag,
    BlockSize,
    UidText,
);

macro_rules! words {
    ($(#[$doc:meta])* $type:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum $type { $($(#[$variant_doc])* $variant,)* }

        impl $type {
            /// The word in the file.
            #[must_use]
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word,)* }
            }
        }

        impl FromStr for $type {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                match text {
                    $($word => Ok(Self::$variant),)*
                    other => Err(unknown_word(other, &[$($word),*])),
                }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }
    };
}

pub(crate) fn unknown_word(word: &str, known: &[&str]) -> String {
    if let [one] = known {
        return format!("`{}` is not known; the only value is `{one}`", shown(word));
    }
    let hint = nearest(word, known.iter().copied())
        .map_or_else(String::new, |near| format!("; did you mean `{near}`?"));
    format!("`{}` is none of {}{hint}", shown(word), known.join(", "))
}

/// Where a model runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Device {
    /// On the host's processors.
    Cpu,
    /// On an NVIDIA GPU.
    Cuda {
        /// Its number among the host's, from 0 to 63.
        ordinal: u32,
    },
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "cpu" {
            return Ok(Self::Cpu);
        }
        let ordinal = text.strip_prefix("cuda:").and_then(|number| number.parse::<Ranged<0, 63>>().ok());
        ordinal.map(|ordinal| Self::Cuda { ordinal: ordinal.0 }).ok_or_else(|| {
            format!("`{}` is neither cpu nor a GPU by its number, cuda:0 to cuda:63", shown(text))
        })
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda { ordinal } => write!(f, "cuda:{ordinal}"),
        }
    }
}

words!(
    /// Arithmetic of the products with the weights.
    ComputeDtype {
        /// What is fastest for the weights' types.
        Auto = "auto",
        /// Single precision throughout, also where the weights are quantised.
        F32 = "f32",
    }
);
words!(
    /// Element type of the KV blocks.
    KvDtype {
        /// Half precision.
        F16 = "f16",
        /// Single precision.
        F32 = "f32",
        /// bfloat16, on a GPU.
        Bf16 = "bf16",
        /// Eight bits (e4m3) with a scale for each token and KV head, on a GPU.
        Fp8 = "fp8",
    }
);
words!(
    /// Least severe event that is logged.
    LogLevel {
        /// What needs an operator.
        Error = "error",
        /// What an operator may want to know.
        Warn = "warn",
        /// What happened to processes, models and tenants.
        Info = "info",
        /// Requests as well.
        Debug = "debug",
        /// Steps as well.
        Trace = "trace",
    }
);
words!(
    /// Form of a log line.
    LogFormat {
        /// For people.
        Text = "text",
        /// One JSON object for each event.
        Json = "json",
    }
);
words!(
    /// When the journal is on disk.
    Fsync {
        /// A second after a step at most: only the loss of power can lose it before.
        Interval = "interval",
        /// Before a step's tokens are seen.
        Every = "every",
        /// When the kernel likes.
        Never = "never",
    }
);
words!(
    /// Whether tenants' limits are the kernel's to enforce.
    Cgroups {
        /// Where it can; status says where it cannot.
        Auto = "auto",
        /// No start where it cannot.
        Required = "required",
        /// No cgroup is looked at, made or changed.
        Off = "off",
    }
);
words!(
    /// Order of a tenant's waiting requests.
    Policy {
        /// First come, first served.
        Fcfs = "fcfs",
    }
);

/// A whole number in [MIN, MAX].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ranged<const MIN: u32, const MAX: u32>(pub u32);

impl<const MIN: u32, const MAX: u32> FromStr for Ranged<MIN, MAX> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number: Option<u32> = text
            .parse()
            .ok()
            .filter(|n| (MIN..=MAX).contains(n) && text.starts_with(|c: char| c.is_ascii_digit()));
        number.map(Self).ok_or_else(|| format!("`{}` is no whole number from {MIN} to {MAX}", shown(text)))
    }
}

impl<'de, const MIN: u32, const MAX: u32> Deserialize<'de> for Ranged<MIN, MAX> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        scalar(deserializer)
    }
}

/// A value, or the word `auto`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Auto<T> {
    /// `auto`.
    Auto,
    /// The value.
    Given(T),
}

impl<T> Auto<T> {
    /// The value, if one was given.
    pub fn given(self) -> Option<T> {
        match self {
            Self::Auto => None,
            Self::Given(value) => Some(value),
        }
    }
}

impl<T: FromStr<Err: fmt::Display>> FromStr for Auto<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            other => other.parse().map(Self::Given).map_err(|error: T::Err| format!("{error}, or `auto`")),
        }
    }
}

impl<'de, T: FromStr<Err: fmt::Display>> Deserialize<'de> for Auto<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        scalar(deserializer)
    }
}

/// A value, or the word `none`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Maybe<T> {
    /// `none`.
    None,
    /// The value.
    Given(T),
}

impl<T> Maybe<T> {
    /// The value, if one was given.
    pub fn given(self) -> Option<T> {
        match self {
            Self::None => None,
            Self::Given(value) => Some(value),
        }
    }
}

impl<T: FromStr<Err: fmt::Display>> FromStr for Maybe<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "none" => Ok(Self::None),
            other => other.parse().map(Self::Given).map_err(|error: T::Err| format!("{error}, or `none`")),
        }
    }
}

impl<'de, T: FromStr<Err: fmt::Display>> Deserialize<'de> for Maybe<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        scalar(deserializer)
    }
}

/// A path that is not empty.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PathText(pub PathBuf);

impl FromStr for PathText {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.is_empty() {
            return Err("the path is empty");
        }
        if text.contains('\0') {
            return Err("a path has no NUL character");
        }
        Ok(Self(PathBuf::from(text)))
    }
}

/// An IP address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Address(pub IpAddr);

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self).map_err(|_| {
            format!("`{}` is no IP address; write for example 127.0.0.1, 0.0.0.0 or \"::\"; ports are the tenants'", shown(text))
        })
    }
}

/// `true` or `false`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Flag(pub bool);

impl FromStr for Flag {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self).map_err(|_| format!("`{}` is neither true nor false", shown(text)))
    }
}

/// Tokens of a KV block: a power of two in [16, 512].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockSize(pub u32);

impl FromStr for BlockSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "16" => Ok(Self(16)),
            "32" => Ok(Self(32)),
            "64" => Ok(Self(64)),
            "128" => Ok(Self(128)),
            "256" => Ok(Self(256)),
            "512" => Ok(Self(512)),
            other => Err(format!("`{}` is none of 16, 32, 64, 128, 256, 512", shown(other))),
        }
    }
}

/// A range of user ids, `61000-61999`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UidText {
    /// First of them.
    pub first: u32,
    /// Last of them.
    pub last: u32,
}

impl FromStr for UidText {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let read = |text: &str| text.trim().parse().ok().filter(|uid| (1..u32::MAX).contains(uid));
        text.split_once('-')
            .and_then(|(first, last)| Some(Self { first: read(first)?, last: read(last)? }))
            .filter(|range| range.first <= range.last)
            .ok_or_else(|| {
                format!(
                    "`{}` is no range of user ids; write for example 61000-61999 (0 is root's)",
                    shown(text)
                )
            })
    }
}
