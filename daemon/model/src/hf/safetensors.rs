//! Safetensors headers, and the index of a sharded checkpoint.
//!
//! **Owns** where each tensor lies. **Never** reads tensor data or asks what a tensor is for, and never allocates by a stated size beyond
//! the file's own.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::marker::PhantomData;
use std::path::Path;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use crate::error::{Fault, ModelError};
use crate::file::{SourceFile, read_small};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const MAX_INDEX: u64 = 64 << 20;
/// The format's own limit.
const MAX_HEADER: u64 = 100_000_000;
const MAX_SHARDS: usize = 1024;
const PREFIX: u64 = 8;

/// Every tensor of a checkpoint.
pub(super) struct Checkpoint {
    pub files: Vec<SourceFile>,
    pub tensors: Vec<Raw>,
    /// Has seen every header.
    pub hasher: blake3::Hasher,
}

/// A tensor as a header states it: its bytes lie inside its file, and overlap no other's.
pub(super) struct Raw {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<u64>,
    /// Index in [`Checkpoint::files`].
    pub file: usize,
    pub offset: u64,
    pub bytes: u64,
}

#[derive(Deserialize)]
struct Index {
    weight_map: Pairs<String>,
}

#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

pub(super) fn open(directory: &Path) -> Result<Checkpoint, ModelError> {
    let index_path = directory.join(INDEX);
    let mut checkpoint = Checkpoint { files: Vec::new(), tensors: Vec::new(), hasher: blake3::Hasher::new() };
    let Some(bytes) = read_small(&index_path, MAX_INDEX)? else {
        let path = directory.join(SINGLE);
        if !path.exists() {
            let problem = format!("neither {SINGLE} nor {INDEX}; other weight files are not read");
            return Err(Fault::unsupported("model", problem).at(directory));
        }
        checkpoint.add(&path, None)?;
        return Ok(checkpoint);
    };
    let at_index = |fault: Fault| fault.at(&index_path);
    let index: Index =
        serde_json::from_slice(&bytes).map_err(|e| at_index(Fault::malformed("weight_map", e)))?;
    let mut shards: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (tensor, shard) in index.weight_map.0 {
        // A plain name: the index must not lead out of the directory.
        if shard.contains(['/', '\\', '\0']) || !shard.ends_with(".safetensors") {
            return Err(at_index(Fault::malformed(
                tensor,
                format_args!("{shard:?} is no safetensors file beside it"),
            )));
        }
        shards.entry(shard).or_default().insert(tensor);
    }
    if shards.is_empty() || shards.len() > MAX_SHARDS {
        let problem = format!("{} files, 1 to {MAX_SHARDS} are read", shards.len());
        return Err(at_index(Fault::malformed("weight_map", problem)));
    }
    for (shard, tensors) in shards {
        checkpoint.add(&directory.join(shard), Some(tensors))?;
    }
    Ok(checkpoint)
}

impl Checkpoint {
    /// Adds one file, which holds exactly the tensors that `expected` names.
    fn add(&mut self, path: &Path, expected: Option<BTreeSet<String>>) -> Result<(), ModelError> {
        let file = SourceFile::open(path)?;
        self.add_tensors(&file, expected).map_err(|fault| fault.at(path))?;
        self.files.push(file);
        Ok(())
    }

    fn add_tensors(&mut self, file: &SourceFile, expected: Option<BTreeSet<String>>) -> Result<(), Fault> {
        let mut prefix = [0; PREFIX as usize];
        file.read_at(0, &mut prefix, "header length")?;
        let length = u64::from_le_bytes(prefix);
        if length > MAX_HEADER {
            let problem = format!("a header of {length} bytes, at most {MAX_HEADER} are read");
            return Err(Fault::malformed("header length", problem));
        }
        let header = file.bytes_at(PREFIX, length, "header")?;
        self.hasher.update(&header);
        let entries: Pairs<Entry> =
            serde_json::from_slice(&header).map_err(|e| Fault::malformed("header", e))?;
        let mut missing = expected;
        let mut spans = Vec::new();
        let number = self.files.len();
        for (name, entry) in entries.0 {
            if let Some(missing) = &mut missing
                && !missing.remove(&name)
            {
                return Err(Fault::malformed(name, format_args!("is in this file, but not so in {INDEX}")));
            }
            let (offset, bytes) = place(&name, &entry, PREFIX + length, file.len)?;
            spans.push((offset, bytes, name.clone()));
            let Entry { dtype, shape, .. } = entry;
            self.tensors.push(Raw { name, dtype, shape, file: number, offset, bytes });
        }
        if let Some(name) = missing.iter().flatten().next() {
            return Err(Fault::malformed(name, format_args!("{INDEX} says it is here, and it is not")));
        }
        spans.sort();
        for pair in spans.windows(2) {
            if pair[0].0 + pair[0].1 > pair[1].0 {
                return Err(Fault::malformed(&pair[1].2, format_args!("overlaps {}", pair[0].2)));
            }
        }
        Ok(())
    }
}

/// Offset in the file, and bytes. Fits the shape, and lies inside the file.
fn place(name: &str, entry: &Entry, data: u64, len: u64) -> Result<(u64, u64), Fault> {
    let [start, end] = entry.data_offsets;
    let bytes = end.checked_sub(start).ok_or_else(|| {
        Fault::malformed(name, format_args!("data_offsets run backwards, from {start} to {end}"))
    })?;
    if data.checked_add(end).is_none_or(|end| end > len) {
        let problem = format!("its {bytes} bytes go past the end of the file ({len} bytes)");
        return Err(Fault::malformed(name, problem));
    }
    Ok((data + start, bytes))
}

/// A JSON object in file order, in which a name that occurs twice is an error. `__metadata__` is skipped.
struct Pairs<T>(Vec<(String, T)>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Pairs<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(PairsVisitor(PhantomData))
    }
}

struct PairsVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for PairsVisitor<T> {
    type Value = Pairs<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with an entry for each tensor")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut seen = BTreeSet::new();
        let mut pairs = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            if !seen.insert(name.clone()) {
                return Err(A::Error::custom(format_args!("{name:?} occurs twice")));
            }
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
            } else {
                pairs.push((name, map.next_value()?));
            }
        }
        Ok(Pairs(pairs))
    }
}
