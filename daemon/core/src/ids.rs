//! Ids as newtypes. Clients' own ids are echoed to them and never used as keys.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty), $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}

id!(
    /// A tenant, as numbered by control.db. It comes from the socket a frame arrives on, and from nowhere else (I4).
    TenantId(u32), "tenant-"
);
id!(
    /// A model that the daemon serves: its position in the configuration.
    ModelId(u16), "model-"
);
id!(
    /// One choice of one request, as the scheduler sees it. Unique for the life of an engine.
    SequenceId(u64), "seq-"
);
id!(
    /// A physical block of one KV arena, in `[0, capacity)`.
    BlockId(u32), "block-"
);
id!(
    /// A step plan. Consecutive, from 1, for the life of an engine.
    PlanId(u64), "plan-"
);
id!(
    /// An entry of the model's vocabulary.
    TokenId(u32), "token-"
);

/// A request: 128 random bits, drawn by the daemon at admission.
///
/// Knowing one does not give access to it: only the key that made the request may read it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct RequestId(pub [u8; 16]);

/// The order of the bytes, in one comparison: maps by request are asked for every token.
impl Ord for RequestId {
    fn cmp(&self, other: &Self) -> Ordering {
        u128::from_be_bytes(self.0).cmp(&u128::from_be_bytes(other.0))
    }
}

impl PartialOrd for RequestId {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RequestId({self})")
    }
}

/// The text is not 32 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ParseRequestIdError;

impl fmt::Display for ParseRequestIdError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a request id is 32 hexadecimal digits")
    }
}

impl std::error::Error for ParseRequestIdError {}

impl FromStr for RequestId {
    type Err = ParseRequestIdError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.len() != 32 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(ParseRequestIdError);
        }
        u128::from_str_radix(text, 16).map(|n| Self(n.to_be_bytes())).map_err(|_| ParseRequestIdError)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_id_reads_back_what_it_printed() {
        let id = RequestId(*b"0123456789abcdef");
        assert_eq!(id.to_string().parse(), Ok(id));
    }

    #[test]
    fn a_request_id_of_another_shape_is_refused() {
        for text in ["", "00", "+0000000000000000000000000000000", "zz000000000000000000000000000000"] {
            assert_eq!(text.parse::<RequestId>(), Err(ParseRequestIdError), "{text:?}");
        }
    }
}
