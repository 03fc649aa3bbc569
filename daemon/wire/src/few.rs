//! [`Few`] as a frame has it: as any list. Its library's own way would link serde to crates that are to know nothing of it.

use std::fmt;
use std::marker::PhantomData;

use pagedd_core::Few;
use serde::de::{Deserialize, Deserializer, SeqAccess, Visitor};
use serde::ser::{Serialize, Serializer};

pub fn serialize<S: Serializer, T: Serialize>(few: &Few<T>, serializer: S) -> Result<S::Ok, S::Error> {
    (**few).serialize(serializer)
}

pub fn deserialize<'de, D: Deserializer<'de>, T: Deserialize<'de>>(from: D) -> Result<Few<T>, D::Error> {
    from.deserialize_seq(Elements(PhantomData))
}

struct Elements<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for Elements<T> {
    type Value = Few<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Few<T>, A::Error> {
        let mut all = Few::new();
        while let Some(next) = elements.next_element()? {
            all.push(next);
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FrameBuffer, encode};

    #[derive(PartialEq, Debug, serde::Serialize, serde::Deserialize)]
    struct Of(#[serde(with = "super")] Few<u64>);

    #[test]
    fn it_travels_as_the_list_that_it_is() {
        for count in 0..4_u64 {
            let all: Vec<u64> = (7..7 + count).collect();
            let few = Of(all.iter().copied().collect());
            let bytes = encode(&few).unwrap();
            assert_eq!(bytes, encode(&all).unwrap());
            let mut buffer = FrameBuffer::new();
            buffer.push(&bytes);
            let got: Of = buffer.next_frame().unwrap().unwrap();
            assert_eq!(got, few);
            assert_eq!(got.0.spilled(), count > 1);
        }
    }
}
