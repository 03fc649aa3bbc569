//! A JSON object, field by field.
//!
//! **Owns** where in the body a value stands, so that every complaint names its field and its byte. **Never** builds a tree of
//! a body: a field's text is read straight into the type that it must have.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, de};
use serde_json::Value;
use serde_json::value::RawValue;

use super::error::{ApiError, shortened};

/// Most fields of one object.
const MAX_FIELDS: usize = 1000;

/// The fields of one object that were not taken yet.
pub(super) struct Object<'a> {
    /// The whole body, to count bytes from.
    body: &'a str,
    /// What leads to this object: empty, or `messages[0].` and the like.
    path: String,
    fields: BTreeMap<String, &'a RawValue>,
}

/// A field that has no meaning here.
pub(super) enum Treatment {
    /// 400 unless it is `null` or has one of these values, which change nothing.
    Refused(&'static [&'static str]),
    /// Taken with a warning.
    NoEffect,
}

/// Names of fields that have no meaning here, and what becomes of them.
pub(super) type Table = &'static [(&'static str, Treatment)];

impl<'a> Object<'a> {
    /// Cuts a body into its fields.
    pub fn of_body(body: &'a [u8]) -> Result<Self, ApiError> {
        let text = std::str::from_utf8(body)
            .map_err(|e| ApiError::body(format!("the body is not UTF-8 at byte {}", e.valid_up_to())))?;
        if text.trim_ascii().is_empty() {
            return Err(ApiError::body("the body is empty; it must be a JSON object"));
        }
        let RawObject(fields) = serde_json::from_str(text).map_err(|e| {
            let (message, at) = located(&e, text);
            ApiError::body(format!("the body is not a JSON object: {message} at byte {at}"))
        })?;
        Ok(Self { body: text, path: String::new(), fields })
    }

    /// Cuts a value that stands in this object's body, at `path`, into its fields.
    pub fn nested(&self, path: &str, raw: &'a RawValue) -> Result<Self, ApiError> {
        let RawObject(fields) = self.read(path, raw)?;
        Ok(Self { body: self.body, path: format!("{path}."), fields })
    }

    /// The name of a field, with what leads to it.
    pub fn name(&self, field: &str) -> String {
        format!("{}{field}", self.path)
    }

    /// Takes a field; `None` where it is not there, or `null`.
    pub fn take<T: Deserialize<'a>>(&mut self, field: &str) -> Result<Option<T>, ApiError> {
        match self.take_raw(field) {
            Some(raw) => self.read(&self.name(field), raw).map(Some),
            None => Ok(None),
        }
    }

    /// Takes a field as it is written; `None` where it is not there, or `null`.
    pub fn take_raw(&mut self, field: &str) -> Option<&'a RawValue> {
        self.fields.remove(field).filter(|raw| raw.get() != "null")
    }

    /// Takes a field that must be there.
    pub fn need<T: Deserialize<'a>>(&mut self, field: &str) -> Result<T, ApiError> {
        self.take(field)?.ok_or_else(|| self.missing(field))
    }

    /// 400: a field that must be there is not.
    pub fn missing(&self, field: &str) -> ApiError {
        let name = self.name(field);
        let message = format!("`{name}` is required");
        ApiError::field(name, "missing_required_parameter", message)
    }

    /// Reads a value that stands in this object's body, at `path`.
    pub fn read<T: Deserialize<'a>>(&self, path: &str, raw: &'a RawValue) -> Result<T, ApiError> {
        serde_json::from_str(raw.get()).map_err(|e| {
            let (message, at) = located(&e, raw.get());
            let start = raw.get().as_ptr() as usize - self.body.as_ptr() as usize;
            ApiError::value(
                path,
                format!("`{path}`: {} at byte {} of the body", shortened(&message), start + at),
            )
        })
    }

    /// Every field has been taken, but for those of the tables. `honoured` are the names that were asked for. Adds a warning
    /// for each field that was given and has no effect.
    pub fn finish(
        self,
        honoured: &[&str],
        tables: &[Table],
        warnings: &mut Vec<String>,
    ) -> Result<(), ApiError> {
        for (field, raw) in &self.fields {
            let name = self.name(field);
            let known = tables.iter().copied().flatten().find(|(known, _)| known == field);
            match known {
                None => {
                    let names = honoured.iter().copied();
                    let names = names.chain(tables.iter().copied().flatten().map(|(known, _)| *known));
                    let hint = nearest(field, names)
                        .map_or(String::new(), |near| format!("; did you mean `{near}`?"));
                    let message = format!("`{}` is not a field of this request{hint}", shortened(&name));
                    return Err(ApiError::field(shortened(&name), "unknown_parameter", message));
                }
                Some((_, Treatment::NoEffect)) => {
                    if raw.get() != "null" {
                        warnings.push(format!("`{name}` has no effect on this server"));
                    }
                }
                Some((_, Treatment::Refused(neutral))) => {
                    if !is_neutral(raw.get(), neutral) {
                        let default = neutral
                            .first()
                            .map_or(String::new(), |value| format!(", or send its default {value}"));
                        let message =
                            format!("`{name}` is not supported by this server; leave it out{default}");
                        return Err(ApiError::field(name, "unsupported_parameter", message));
                    }
                }
            }
        }
        Ok(())
    }
}

/// Whether a value is `null` or one of those that change nothing. Numbers are compared as numbers: `0` is `0.0`.
fn is_neutral(given: &str, neutral: &[&str]) -> bool {
    const LONGEST: usize = 64;
    if given == "null" {
        return true;
    }
    if given.len() > LONGEST {
        return false;
    }
    let Ok(given) = serde_json::from_str::<Value>(given) else { return false };
    neutral.iter().filter_map(|value| serde_json::from_str::<Value>(value).ok()).any(|value| {
        match (given.as_f64(), value.as_f64()) {
            (Some(a), Some(b)) => a.to_bits() == b.to_bits() || (a == 0.0 && b == 0.0),
            _ => given == value,
        }
    })
}

/// The valid name that a wrong one was probably meant to be.
fn nearest<'n>(wrong: &str, names: impl Iterator<Item = &'n str>) -> Option<&'n str> {
    if wrong.len() > 64 {
        return None;
    }
    names
        .map(|name| (strsim::damerau_levenshtein(&wrong.to_lowercase(), name), name))
        .min()
        .filter(|(distance, name)| *distance <= 1 + name.len() / 4)
        .map(|(_, name)| name)
}

/// The message of an error without its position, and its position in bytes from the start of `text`.
fn located(error: &serde_json::Error, text: &str) -> (String, usize) {
    let whole = error.to_string();
    let message = match whole.rfind(" at line ") {
        Some(end) if error.line() > 0 => whole[..end].to_owned(),
        _ => whole,
    };
    let line_start = match error.line() {
        0 | 1 => 0,
        line => text.bytes().enumerate().filter(|(_, b)| *b == b'\n').nth(line - 2).map_or(0, |(i, _)| i + 1),
    };
    // The column is that of the byte in question, from 1; at the end of the text it is that of the last byte.
    let before = if error.is_eof() { error.column() } else { error.column().saturating_sub(1) };
    (message, (line_start + before).min(text.len()))
}

/// The fields of an object, none of them twice.
struct RawObject<'a>(BTreeMap<String, &'a RawValue>);

impl<'de: 'a, 'a> Deserialize<'de> for RawObject<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields<'a>(PhantomData<&'a ()>);
        impl<'de: 'a, 'a> Visitor<'de> for Fields<'a> {
            type Value = RawObject<'a>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut fields = BTreeMap::new();
                while let Some((name, value)) = map.next_entry::<String, &'a RawValue>()? {
                    if fields.len() == MAX_FIELDS {
                        return Err(A::Error::custom("more fields than any request has"));
                    }
                    if let Some(_first) = fields.insert(name.clone(), value) {
                        return Err(A::Error::custom(format!(
                            "the field {:?} is given twice",
                            shortened(&name)
                        )));
                    }
                }
                Ok(RawObject(fields))
            }
        }
        deserializer.deserialize_map(Fields(PhantomData))
    }
}

/// A list of at most `N` values: a short body must not become a large list.
#[derive(Debug)]
pub(super) struct AtMost<T, const N: usize>(pub Vec<T>);

impl<'de, T: Deserialize<'de>, const N: usize> Deserialize<'de> for AtMost<T, N> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List<T, const N: usize>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>, const N: usize> Visitor<'de> for List<T, N> {
            type Value = AtMost<T, N>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of at most {N}")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
                let mut values = Vec::new();
                while let Some(value) = list.next_element()? {
                    if values.len() == N {
                        return Err(A::Error::custom(format!("a list of more than {N}")));
                    }
                    values.push(value);
                }
                Ok(AtMost(values))
            }
        }
        deserializer.deserialize_seq(List(PhantomData))
    }
}

/// The first value of a list, and how many there are.
pub(super) struct First<T> {
    pub first: Option<T>,
    pub count: usize,
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for First<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for List<T> {
            type Value = First<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
                let first = list.next_element()?;
                let mut count = usize::from(first.is_some());
                while list.next_element::<IgnoredAny>()?.is_some() {
                    count += 1;
                }
                Ok(First { first, count })
            }
        }
        deserializer.deserialize_seq(List(PhantomData))
    }
}

/// One string, or a list of at most `N`.
#[derive(Debug)]
pub(super) struct Strings<const N: usize>(pub Vec<String>);

impl<'de, const N: usize> Deserialize<'de> for Strings<N> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneOrMore<const N: usize>;
        impl<'de, const N: usize> Visitor<'de> for OneOrMore<N> {
            type Value = Strings<N>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a string or a list of at most {N} strings")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Strings(vec![text.to_owned()]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Self::Value, A::Error> {
                let seed = PhantomData::<AtMost<String, N>>;
                let AtMost(strings) = seed.deserialize(de::value::SeqAccessDeserializer::new(list))?;
                Ok(Strings(strings))
            }
        }
        deserializer.deserialize_any(OneOrMore)
    }
}
