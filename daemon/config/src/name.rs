//! Names of tenants and models.

use crate::shown;
use std::fmt;
use std::str::FromStr;

/// The text is no name.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NameError {
    /// It is empty, or longer than a name may be.
    #[error("{kind} name `{text}` has {length} characters; it may have 1 to {most}")]
    Length {
        /// What is named.
        kind: &'static str,
        /// Its beginning.
        text: String,
        /// How many characters it has.
        length: usize,
        /// How many it may have.
        most: usize,
    },
    /// It begins with a character that a name may not begin with.
    #[error("{kind} name `{text}` must begin with {allowed}")]
    Begin {
        /// What is named.
        kind: &'static str,
        /// Its beginning.
        text: String,
        /// What a name may begin with.
        allowed: &'static str,
    },
    /// It has a character that a name may not have.
    #[error("{kind} name `{text}` has {bad:?}; allowed are {allowed}")]
    Character {
        /// What is named.
        kind: &'static str,
        /// Its beginning.
        text: String,
        /// The first such character.
        bad: char,
        /// Which are allowed.
        allowed: &'static str,
    },
}

macro_rules! name {
    ($(#[$doc:meta])* $type:ident, $kind:literal, $most:literal, $first:expr, $first_text:literal, $rest:expr, $rest_text:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub struct $type(String);

        impl $type {
            /// The name as text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }

            /// Checks `text`.
            fn check(text: &str) -> Result<(), NameError> {
                let (first, rest): (fn(char) -> bool, fn(char) -> bool) = ($first, $rest);
                let length = text.chars().count();
                let Some(begin) = text.chars().next().filter(|_| length <= $most) else {
                    return Err(NameError::Length { kind: $kind, text: shown(text), length, most: $most });
                };
                if let Some(bad) = text.chars().find(|c| !rest(*c)) {
                    return Err(NameError::Character { kind: $kind, text: shown(text), bad, allowed: $rest_text });
                }
                if !first(begin) {
                    return Err(NameError::Begin { kind: $kind, text: shown(text), allowed: $first_text });
                }
                Ok(())
            }
        }

        impl FromStr for $type {
            type Err = NameError;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                Self::check(text).map(|()| Self(text.to_owned()))
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl AsRef<str> for $type {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }
    };
}

name!(
    /// A tenant's name. Having one tells you that it can stand in a path, a cgroup, a URL or a metric's label as it is.
    TenantName, "tenant", 63,
    |c| c.is_ascii_lowercase(), "a letter from a to z",
    |c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-', "a-z, 0-9 and -"
);
name!(
    /// A model's name, as clients send it. Having one tells you that it can stand in a path or a metric's label as it is.
    ModelName, "model", 63,
    |c| c.is_ascii_alphanumeric(), "a letter or a digit",
    |c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'), "a-z, A-Z, 0-9, -, _ and ."
);
