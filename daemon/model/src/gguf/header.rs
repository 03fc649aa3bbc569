//! The header: key-value metadata and tensor descriptions.
//!
//! **Owns** the wire format. **Never** allocates by a size that the file states before that many bytes are known to be there.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use pagedd_core::TensorType;

use crate::error::Fault;
use crate::file::SourceFile;

const MAX_NAME: u64 = 255;
const MAX_KEY: u64 = 1 << 16;
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_ALIGNMENT: u64 = 1 << 20;
/// Smallest key-value pair: key length, type, one byte.
const MIN_PAIR: u64 = 8 + 4 + 1;
/// Smallest tensor description: name length, dimension count, one dimension, type, offset.
const MIN_TENSOR: u64 = 8 + 4 + 8 + 4 + 8;

/// A stretch of the file that was read through once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    offset: u64,
    len: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    fn from_code(code: u32) -> Option<Self> {
        use ValueType::{Array, Bool, F32, F64, I8, I16, I32, I64, String, U8, U16, U32, U64};
        [U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64].get(code as usize).copied()
    }

    /// `None` for strings and arrays.
    fn bytes(self) -> Option<u64> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::String | Self::Array => None,
        }
    }
}

#[derive(Debug)]
enum Value {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    String(Span),
    Array { element: ValueType, count: u64, span: Span },
}

impl Value {
    fn kind(&self) -> &'static str {
        match self {
            Self::Unsigned(_) | Self::Signed(_) => "a whole number",
            Self::Float(_) => "a floating-point number",
            Self::Bool(_) => "a boolean",
            Self::String(_) => "a string",
            Self::Array { .. } => "an array",
        }
    }
}

/// A tensor as the header describes it: inside the file, a whole number of blocks per row.
#[derive(Debug)]
pub(crate) struct RawTensor {
    pub name: String,
    pub ty: TensorType,
    /// 1 for a vector.
    pub rows: u64,
    pub columns: u64,
    pub dimensions: u32,
    pub bytes: u64,
    /// From the start of the file.
    pub offset: u64,
}

/// The key-value part.
#[derive(Debug)]
pub(crate) struct Metadata {
    values: BTreeMap<String, Value>,
}

/// A parsed header.
pub(crate) struct Header {
    pub metadata: Metadata,
    pub tensors: Vec<RawTensor>,
    /// Bytes before the tensor data.
    pub bytes: u64,
}

pub(crate) fn read(file: &SourceFile) -> Result<Header, Fault> {
    let mut cursor = Cursor::new(file);
    if cursor.array::<4>("magic")? != *b"GGUF" {
        return Err(Fault::unsupported("model", "neither a GGUF file nor a directory with config.json"));
    }
    match cursor.u32("version")? {
        2 | 3 => {}
        version if matches!(version.swap_bytes(), 1..=3) => {
            return Err(Fault::unsupported("version", "a big-endian GGUF file; convert it to little-endian"));
        }
        version => {
            return Err(Fault::unsupported(
                "version",
                format_args!("GGUF version {version}, 2 and 3 are read"),
            ));
        }
    }
    let tensor_count = cursor.count("tensor count", MIN_TENSOR)?;
    let pair_count = cursor.count("metadata count", MIN_PAIR)?;
    let mut values = BTreeMap::new();
    for _ in 0..pair_count {
        let key = cursor.string("metadata key", MAX_KEY)?;
        let value = cursor.value(&key)?;
        match values.entry(key) {
            Entry::Vacant(slot) => _ = slot.insert(value),
            Entry::Occupied(slot) => return Err(Fault::malformed(slot.key(), "the key occurs twice")),
        }
    }
    let metadata = Metadata { values };
    let alignment = match metadata.unsigned("general.alignment")? {
        None => DEFAULT_ALIGNMENT,
        Some(a) if a.is_power_of_two() && a <= MAX_ALIGNMENT => a,
        Some(a) => return Err(Fault::malformed("general.alignment", format_args!("{a} is no power of two"))),
    };
    let mut tensors = Vec::new();
    for _ in 0..tensor_count {
        tensors.push(cursor.tensor(alignment)?);
    }
    let bytes = cursor.position;
    let data = bytes.checked_next_multiple_of(alignment).unwrap_or(u64::MAX);
    place(&mut tensors, data, file.len)?;
    Ok(Header { metadata, tensors, bytes })
}

/// Turns offsets within the data into offsets within the file; refuses what overlaps or goes past the end.
fn place(tensors: &mut [RawTensor], data: u64, len: u64) -> Result<(), Fault> {
    for tensor in tensors.iter_mut() {
        let end = tensor.offset.checked_add(data).and_then(|start| {
            tensor.offset = start;
            start.checked_add(tensor.bytes)
        });
        if end.is_none_or(|end| end > len) {
            return Err(Fault::malformed(
                &tensor.name,
                format_args!("its {} bytes go past the end of the file ({len} bytes)", tensor.bytes),
            ));
        }
    }
    let mut order: Vec<&RawTensor> = tensors.iter().collect();
    order.sort_by_key(|t| t.offset);
    for pair in order.windows(2) {
        if pair[0].offset + pair[0].bytes > pair[1].offset {
            return Err(Fault::malformed(&pair[1].name, format_args!("overlaps {}", pair[0].name)));
        }
    }
    Ok(())
}

impl Metadata {
    pub(crate) fn keys(&self) -> impl Iterator<Item = &str> {
        self.values.keys().map(String::as_str)
    }

    pub(crate) fn has(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    pub(crate) fn unsigned(&self, key: &str) -> Result<Option<u64>, Fault> {
        match self.values.get(key) {
            None => Ok(None),
            Some(&Value::Unsigned(n)) => Ok(Some(n)),
            Some(&Value::Signed(n)) => {
                u64::try_from(n).map(Some).map_err(|_| Fault::malformed(key, format_args!("{n} is negative")))
            }
            Some(other) => Err(wrong_kind(key, other, "a whole number")),
        }
    }

    pub(crate) fn float(&self, key: &str) -> Result<Option<f32>, Fault> {
        match self.values.get(key) {
            None => Ok(None),
            Some(&Value::Float(f)) if f.is_finite() => Ok(Some(f as f32)),
            Some(Value::Float(f)) => Err(Fault::malformed(key, format_args!("{f} is no finite number"))),
            Some(&Value::Unsigned(n)) => Ok(Some(n as f32)),
            Some(other) => Err(wrong_kind(key, other, "a number")),
        }
    }

    pub(crate) fn boolean(&self, key: &str) -> Result<Option<bool>, Fault> {
        match self.values.get(key) {
            None => Ok(None),
            Some(&Value::Bool(b)) => Ok(Some(b)),
            Some(other) => Err(wrong_kind(key, other, "a boolean")),
        }
    }

    pub(crate) fn string(&self, file: &SourceFile, key: &str, max: u64) -> Result<Option<String>, Fault> {
        match self.values.get(key) {
            None => Ok(None),
            Some(Value::String(span)) if span.len > max => Err(Fault::unsupported(
                key,
                format_args!("a string of {} bytes, at most {max} are read", span.len),
            )),
            Some(Value::String(span)) => {
                let bytes = file.bytes_at(span.offset, span.len, key)?;
                String::from_utf8(bytes).map(Some).map_err(|_| Fault::malformed(key, "is no UTF-8"))
            }
            Some(other) => Err(wrong_kind(key, other, "a string")),
        }
    }

    /// How many elements an array has.
    pub(crate) fn array_len(&self, key: &str) -> Result<Option<u64>, Fault> {
        match self.values.get(key) {
            None => Ok(None),
            Some(&Value::Array { count, .. }) => Ok(Some(count)),
            Some(other) => Err(wrong_kind(key, other, "an array")),
        }
    }

    /// An array of strings. Memory: a small multiple of its bytes in the file.
    pub(crate) fn strings(&self, file: &SourceFile, key: &str) -> Result<Option<Vec<String>>, Fault> {
        let Some((ValueType::String, _, span)) = self.array(key, &[ValueType::String])? else {
            return Ok(None);
        };
        let bytes = file.bytes_at(span.offset, span.len, key)?;
        let mut rest = bytes.as_slice();
        let mut out = Vec::new();
        while let Some((length, after)) = rest.split_first_chunk() {
            let changed = || Fault::malformed(key, "changed while it was read");
            let length = usize::try_from(u64::from_le_bytes(*length)).map_err(|_| changed())?;
            let (text, after) = after.split_at_checked(length).ok_or_else(changed)?;
            let text = std::str::from_utf8(text)
                .map_err(|_| Fault::malformed(key, format_args!("element {} is no UTF-8", out.len())))?;
            out.push(text.to_owned());
            rest = after;
        }
        Ok(Some(out))
    }

    pub(crate) fn floats(&self, file: &SourceFile, key: &str) -> Result<Option<Vec<f32>>, Fault> {
        let Some((_, _, span)) = self.array(key, &[ValueType::F32])? else { return Ok(None) };
        let bytes = file.bytes_at(span.offset, span.len, key)?;
        Ok(Some(bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect()))
    }

    pub(crate) fn integers(&self, file: &SourceFile, key: &str) -> Result<Option<Vec<i32>>, Fault> {
        let Some((_, _, span)) = self.array(key, &[ValueType::I32, ValueType::U32])? else { return Ok(None) };
        let bytes = file.bytes_at(span.offset, span.len, key)?;
        Ok(Some(bytes.as_chunks().0.iter().map(|&b| i32::from_le_bytes(b)).collect()))
    }

    fn array(&self, key: &str, wanted: &[ValueType]) -> Result<Option<(ValueType, u64, Span)>, Fault> {
        match self.values.get(key) {
            None => Ok(None),
            Some(&Value::Array { element, count, span }) if wanted.contains(&element) => {
                Ok(Some((element, count, span)))
            }
            Some(Value::Array { element, .. }) => {
                Err(Fault::malformed(key, format_args!("an array of {element:?}, not of {:?}", wanted[0])))
            }
            Some(other) => Err(wrong_kind(key, other, "an array")),
        }
    }
}

fn wrong_kind(key: &str, value: &Value, wanted: &str) -> Fault {
    Fault::unsupported(key, format_args!("{} where {wanted} is expected", value.kind()))
}

/// Reads forward through a small window.
struct Cursor<'a> {
    file: &'a SourceFile,
    position: u64,
    window: Vec<u8>,
    window_start: u64,
}

impl<'a> Cursor<'a> {
    const WINDOW: u64 = 64 << 10;

    fn new(file: &'a SourceFile) -> Self {
        Self { file, position: 0, window: Vec::new(), window_start: 0 }
    }

    fn left(&self) -> u64 {
        self.file.len.saturating_sub(self.position)
    }

    fn ends_early(&self, item: &str) -> Fault {
        Fault::malformed(item, format_args!("the file ends inside it, at byte {}", self.file.len))
    }

    fn array<const N: usize>(&mut self, item: &str) -> Result<[u8; N], Fault> {
        if self.left() < N as u64 {
            return Err(self.ends_early(item));
        }
        let inside = self.position.checked_sub(self.window_start).map(|o| o as usize);
        if inside.is_none_or(|o| o + N > self.window.len()) {
            self.window.resize(Self::WINDOW.min(self.left()) as usize, 0);
            self.file.read_at(self.position, &mut self.window, item)?;
            self.window_start = self.position;
        }
        let start = (self.position - self.window_start) as usize;
        let mut out = [0; N];
        out.copy_from_slice(&self.window[start..start + N]);
        self.position += N as u64;
        Ok(out)
    }

    fn u32(&mut self, item: &str) -> Result<u32, Fault> {
        self.array(item).map(u32::from_le_bytes)
    }

    fn u64(&mut self, item: &str) -> Result<u64, Fault> {
        self.array(item).map(u64::from_le_bytes)
    }

    /// A count of things that take at least `least` bytes each.
    fn count(&mut self, item: &str, least: u64) -> Result<u64, Fault> {
        let count = self.u64(item)?;
        // Both counts stand before anything they count, so this bound is generous and still in proportion to the file.
        if count > self.left() / least {
            return Err(Fault::malformed(item, format_args!("{count}, more than the file has room for")));
        }
        Ok(count)
    }

    fn skip(&mut self, bytes: u64, item: &str) -> Result<Span, Fault> {
        if bytes > self.left() {
            return Err(self.ends_early(item));
        }
        let span = Span { offset: self.position, len: bytes };
        self.position += bytes;
        Ok(span)
    }

    fn string(&mut self, item: &str, max: u64) -> Result<String, Fault> {
        let length = self.u64(item)?;
        if length > max {
            return Err(Fault::malformed(
                item,
                format_args!("a name of {length} bytes, at most {max} are read"),
            ));
        }
        let span = self.skip(length, item)?;
        let bytes = self.file.bytes_at(span.offset, span.len, item)?;
        String::from_utf8(bytes).map_err(|_| Fault::malformed(item, "is no UTF-8"))
    }

    fn value_type(&mut self, key: &str) -> Result<ValueType, Fault> {
        let code = self.u32(key)?;
        ValueType::from_code(code)
            .ok_or_else(|| Fault::malformed(key, format_args!("unknown value type {code}")))
    }

    fn value(&mut self, key: &str) -> Result<Value, Fault> {
        Ok(match self.value_type(key)? {
            ValueType::U8 => Value::Unsigned(self.array::<1>(key)?[0].into()),
            ValueType::I8 => Value::Signed(i8::from_le_bytes(self.array(key)?).into()),
            ValueType::U16 => Value::Unsigned(u16::from_le_bytes(self.array(key)?).into()),
            ValueType::I16 => Value::Signed(i16::from_le_bytes(self.array(key)?).into()),
            ValueType::U32 => Value::Unsigned(self.u32(key)?.into()),
            ValueType::I32 => Value::Signed(i32::from_le_bytes(self.array(key)?).into()),
            ValueType::U64 => Value::Unsigned(self.u64(key)?),
            ValueType::I64 => Value::Signed(i64::from_le_bytes(self.array(key)?)),
            ValueType::F32 => Value::Float(f32::from_le_bytes(self.array(key)?).into()),
            ValueType::F64 => Value::Float(f64::from_le_bytes(self.array(key)?)),
            ValueType::Bool => match self.array::<1>(key)? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [n] => return Err(Fault::malformed(key, format_args!("{n} is no boolean"))),
            },
            ValueType::String => {
                let length = self.u64(key)?;
                Value::String(self.skip(length, key)?)
            }
            ValueType::Array => {
                let element = self.value_type(key)?;
                let count = self.u64(key)?;
                let start = self.position;
                match (element, element.bytes()) {
                    (_, Some(bytes)) => {
                        let bytes = count.checked_mul(bytes).ok_or_else(|| self.ends_early(key))?;
                        self.skip(bytes, key)?;
                    }
                    (ValueType::String, None) => {
                        for _ in 0..count {
                            let length = self.u64(key)?;
                            self.skip(length, key)?;
                        }
                    }
                    (_, None) => return Err(Fault::unsupported(key, "an array of arrays")),
                }
                Value::Array { element, count, span: Span { offset: start, len: self.position - start } }
            }
        })
    }

    fn tensor(&mut self, alignment: u64) -> Result<RawTensor, Fault> {
        let name = self.string("tensor name", MAX_NAME)?;
        let dimensions = self.u32(&name)?;
        if !(1..=4).contains(&dimensions) {
            return Err(Fault::malformed(&name, format_args!("{dimensions} dimensions")));
        }
        let mut shape = [1_u64; 4];
        for extent in &mut shape[..dimensions as usize] {
            *extent = self.u64(&name)?;
            if *extent == 0 {
                return Err(Fault::malformed(&name, "a dimension is zero"));
            }
        }
        let code = self.u32(&name)?;
        let offset = self.u64(&name)?;
        let ty = tensor_type(code).map_err(|ty| {
            Fault::unsupported(
                &name,
                format_args!("tensor type {ty} is not served; quantise to one of {}", served()),
            )
        })?;
        if !offset.is_multiple_of(alignment) {
            return Err(Fault::malformed(
                &name,
                format_args!("offset {offset} is not aligned to {alignment}"),
            ));
        }
        let columns = shape[0];
        let rows = shape[1..].iter().try_fold(1_u64, |n, &extent| n.checked_mul(extent));
        let Some(row_bytes) = usize::try_from(columns).ok().and_then(|c| ty.row_bytes(c)) else {
            let block = ty.block_elements();
            let problem = format!("rows of {columns} elements are no whole number of {ty} blocks of {block}");
            return Err(Fault::malformed(&name, problem));
        };
        let (Some(rows), Some(bytes)) = (rows, rows.and_then(|rows| rows.checked_mul(row_bytes as u64)))
        else {
            return Err(Fault::malformed(&name, "its size overflows"));
        };
        Ok(RawTensor { name, ty, rows, columns, dimensions, bytes, offset })
    }
}

fn served() -> String {
    TensorType::ALL.map(|ty| ty.to_string()).join(", ")
}

/// ggml's type codes; the error is the name of a type that is not served.
fn tensor_type(code: u32) -> Result<TensorType, String> {
    Ok(match code {
        0 => TensorType::F32,
        1 => TensorType::F16,
        2 => TensorType::Q4_0,
        3 => TensorType::Q4_1,
        6 => TensorType::Q5_0,
        7 => TensorType::Q5_1,
        8 => TensorType::Q8_0,
        12 => TensorType::Q4_K,
        13 => TensorType::Q5_K,
        14 => TensorType::Q6_K,
        30 => TensorType::BF16,
        _ => {
            let known = [
                (9, "Q8_1"),
                (10, "Q2_K"),
                (11, "Q3_K"),
                (15, "Q8_K"),
                (16, "IQ2_XXS"),
                (17, "IQ2_XS"),
                (18, "IQ3_XXS"),
                (19, "IQ1_S"),
                (20, "IQ4_NL"),
                (21, "IQ3_S"),
                (22, "IQ2_S"),
                (23, "IQ4_XS"),
                (24, "I8"),
                (25, "I16"),
                (26, "I32"),
                (27, "I64"),
                (28, "F64"),
                (29, "IQ1_M"),
                (34, "TQ1_0"),
                (35, "TQ2_0"),
                (39, "MXFP4"),
            ];
            let name = known.iter().find(|(known, _)| *known == code);
            return Err(name.map_or_else(|| format!("number {code}"), |(_, name)| (*name).to_owned()));
        }
    })
}
