//! Where in the file something stands, and whether its keys are known and stand once.
//!
//! The YAML reader gives a place with an error that is raised while it stands at an event. Both walks here use that: they go
//! to the place in question and raise an error there.

use crate::leaf::MESSAGE;
use crate::raw::{Shape, shape};
use crate::{nearest, shown};
use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::collections::HashSet;
use std::fmt;

/// A place in the file, from 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Place {
    pub line: usize,
    pub column: usize,
}

/// What the reader says, taken apart: where, and one line of what.
pub(crate) fn describe(error: &serde_yaml::Error) -> (Place, String) {
    let place = error
        .location()
        .map_or(Place { line: 1, column: 1 }, |at| Place { line: at.line(), column: at.column() });
    let text = error.to_string();
    let said_twice = format!(" at line {} column {}", place.line, place.column);
    (place, text.replace(&said_twice, "").replace(MESSAGE, "").replace(['\n', '\r'], " "))
}

/// Refuses a key that is unknown or stands twice.
pub(crate) fn check_keys(text: &str) -> Result<(), serde_yaml::Error> {
    Keys(shape()).deserialize(serde_yaml::Deserializer::from_str(text))
}

struct Keys(Shape);

impl<'de> DeserializeSeed<'de> for Keys {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        match self.0 {
            Shape::Leaf => deserializer.deserialize_ignored_any(IgnoredAny).map(|_| ()),
            Shape::Keys(..) | Shape::Names(_) => deserializer.deserialize_any(self),
        }
    }
}

/// What is no mapping is left to the typed reading, which says what it should have been.
impl<'de> Visitor<'de> for Keys {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("keys with values")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut seen = HashSet::new();
        while let Some(key) = map.next_key_seed(Key { shape: self.0, seen: &mut seen })? {
            let below = match self.0 {
                Shape::Leaf => Shape::Leaf,
                Shape::Keys(_, below) => below(&key),
                Shape::Names(below) => below(),
            };
            map.next_value_seed(Keys(below))?;
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_none<E>(self) -> Result<(), E> {
        Ok(())
    }
}

struct Key<'a> {
    shape: Shape,
    seen: &'a mut HashSet<String>,
}

impl<'de> DeserializeSeed<'de> for Key<'_> {
    type Value = String;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<String, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Key<'_> {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<String, E> {
        if let Shape::Keys(known, _) = self.shape
            && !known.contains(&key)
        {
            let hint = nearest(key, known.iter().copied()).map_or_else(
                || format!("known are {}", known.join(", ")),
                |near| format!("did you mean `{near}`?"),
            );
            return Err(E::custom(format_args!("{MESSAGE}unknown key `{}`; {hint}", shown(key))));
        }
        if self.seen.insert(key.to_owned()) {
            Ok(key.to_owned())
        } else {
            Err(E::custom(format_args!("{MESSAGE}key `{}` stands twice", shown(key))))
        }
    }
}

/// Where the value of the key at `path` stands; where the key is missing, the deepest one that is there.
pub(crate) fn place_of(text: &str, path: &[&str]) -> Place {
    for depth in (1..=path.len()).rev() {
        // The walk to a missing key ends without an error.
        if let Err(error) = (Seek { path: &path[..depth], key: depth < path.len() })
            .deserialize(serde_yaml::Deserializer::from_str(text))
        {
            return describe(&error).0;
        }
    }
    Place { line: 1, column: 1 }
}

/// Raises an error at the last key of `path`, or at its value.
#[derive(Clone, Copy)]
struct Seek<'a> {
    path: &'a [&'a str],
    key: bool,
}

impl<'de> DeserializeSeed<'de> for Seek<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        if self.path.is_empty() {
            // Of whatever type the value is: this fails where it begins.
            deserializer.deserialize_str(Here)
        } else {
            deserializer.deserialize_map(self)
        }
    }
}

impl<'de> Visitor<'de> for Seek<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("keys with values")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(found) = map.next_key_seed(SeekKey(self))? {
            if found {
                map.next_value_seed(Self { path: &self.path[1..], ..self })?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(())
    }
}

struct SeekKey<'a>(Seek<'a>);

impl<'de> DeserializeSeed<'de> for SeekKey<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<bool, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for SeekKey<'_> {
    type Value = bool;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: Error>(self, key: &str) -> Result<bool, E> {
        let found = self.0.path.first().is_some_and(|wanted| *wanted == key);
        if found && self.0.key && self.0.path.len() == 1 { Err(E::custom("here")) } else { Ok(found) }
    }
}

struct Here;

impl Visitor<'_> for Here {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("something else")
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<(), E> {
        Err(E::custom("here"))
    }
}
