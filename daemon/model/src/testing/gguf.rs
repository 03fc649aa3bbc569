//! A writer of GGUF files, sound or not.

use half::{bf16, f16};
use pagedd_core::TensorType;

use super::TinyModel;
use super::random::Random;
use super::vocabulary::{CHAT_TEMPLATE, IM_END, IM_START, large, merges, tokens};
use crate::rope::{RopePairing, RopeScaling};
use crate::tensor::{LayerTensor, TensorRole};

/// A metadata value.
#[derive(Clone, PartialEq, Debug)]
pub enum GgufValue {
    /// `uint32`.
    U32(u32),
    /// `float32`.
    F32(f32),
    /// `bool`.
    Bool(bool),
    /// `string`.
    String(String),
    /// Array of `string`.
    Strings(Vec<String>),
    /// Array of `int32`.
    I32s(Vec<i32>),
    /// Array of `float32`.
    F32s(Vec<f32>),
}

impl From<&str> for GgufValue {
    fn from(text: &str) -> Self {
        Self::String(text.to_owned())
    }
}

/// A tensor as it will stand in the file. Nothing keeps these from contradicting each other.
#[derive(Clone, PartialEq, Debug)]
pub struct GgufTensor {
    /// Its name.
    pub name: String,
    /// Extents, the innermost (columns) first.
    pub extents: Vec<u64>,
    /// ggml's type code.
    pub ty: u32,
    /// Its data; only what is here is written.
    pub data: Vec<u8>,
}

/// A GGUF file in the making: version 3, alignment 32.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct GgufWriter {
    /// Metadata in file order. Keys may repeat.
    pub metadata: Vec<(String, GgufValue)>,
    /// Tensors in file order. Names may repeat.
    pub tensors: Vec<GgufTensor>,
}

const ALIGNMENT: usize = 32;

impl GgufWriter {
    /// Sets a key, in its place where it is there already.
    pub fn set(&mut self, key: &str, value: impl Into<GgufValue>) {
        let value = value.into();
        match self.metadata.iter_mut().find(|(k, _)| k == key) {
            Some((_, old)) => *old = value,
            None => self.metadata.push((key.to_owned(), value)),
        }
    }

    /// Removes a key.
    pub fn unset(&mut self, key: &str) {
        self.metadata.retain(|(k, _)| k != key);
    }

    /// The tensor of a name.
    pub fn tensor(&mut self, name: &str) -> Option<&mut GgufTensor> {
        self.tensors.iter_mut().find(|t| t.name == name)
    }

    /// The file.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.header();
        out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        for tensor in &self.tensors {
            out.extend_from_slice(&tensor.data);
            out.resize(out.len().next_multiple_of(ALIGNMENT), 0);
        }
        out
    }

    /// What stands before the padding that precedes the data.
    #[must_use]
    pub fn header(&self) -> Vec<u8> {
        let mut out = b"GGUF\x03\0\0\0".to_vec();
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            put_string(&mut out, key);
            put_value(&mut out, value);
        }
        let mut offset = 0;
        for tensor in &self.tensors {
            put_string(&mut out, &tensor.name);
            out.extend((tensor.extents.len() as u32).to_le_bytes());
            for extent in &tensor.extents {
                out.extend(extent.to_le_bytes());
            }
            out.extend(tensor.ty.to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset += tensor.data.len().next_multiple_of(ALIGNMENT);
        }
        out
    }
}

fn put_string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

fn put_value(out: &mut Vec<u8>, value: &GgufValue) {
    let put_array = |out: &mut Vec<u8>, element: u32, count: usize| {
        out.extend(9_u32.to_le_bytes());
        out.extend(element.to_le_bytes());
        out.extend((count as u64).to_le_bytes());
    };
    match value {
        GgufValue::U32(n) => {
            out.extend(4_u32.to_le_bytes());
            out.extend(n.to_le_bytes());
        }
        GgufValue::F32(f) => {
            out.extend(6_u32.to_le_bytes());
            out.extend(f.to_le_bytes());
        }
        GgufValue::Bool(b) => {
            out.extend(7_u32.to_le_bytes());
            out.push((*b).into());
        }
        GgufValue::String(text) => {
            out.extend(8_u32.to_le_bytes());
            put_string(out, text);
        }
        GgufValue::Strings(texts) => {
            put_array(out, 8, texts.len());
            for text in texts {
                put_string(out, text);
            }
        }
        GgufValue::I32s(numbers) => {
            put_array(out, 5, numbers.len());
            for number in numbers {
                out.extend(number.to_le_bytes());
            }
        }
        GgufValue::F32s(numbers) => {
            put_array(out, 6, numbers.len());
            for number in numbers {
                out.extend(number.to_le_bytes());
            }
        }
    }
}

pub(super) fn tiny(seed: u64, model: &TinyModel) -> GgufWriter {
    let mut writer = GgufWriter::default();
    let architecture = model.architecture.to_string();
    writer.set("general.architecture", architecture.as_str());
    let key = |name: &str| format!("{architecture}.{name}");
    for (name, number) in [
        ("block_count", model.layers),
        ("context_length", model.context as usize),
        ("embedding_length", model.hidden),
        ("feed_forward_length", model.feed_forward),
        ("attention.head_count", model.heads),
        ("attention.head_count_kv", model.kv_heads),
        ("attention.key_length", model.head_dim),
        ("attention.value_length", model.head_dim),
    ] {
        writer.set(&key(name), GgufValue::U32(number as u32));
    }
    writer.set(&key("attention.layer_norm_rms_epsilon"), GgufValue::F32(1e-5));
    writer.set(&key("rope.freq_base"), GgufValue::F32(10_000.0));
    match &model.scaling {
        RopeScaling::Linear { factor } => {
            writer.set(&key("rope.scaling.type"), "linear");
            writer.set(&key("rope.scaling.factor"), GgufValue::F32(*factor));
        }
        RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, .. } => {
            writer.set(&key("rope.scaling.type"), "yarn");
            writer.set(&key("rope.scaling.factor"), GgufValue::F32(*factor));
            writer.set(&key("rope.scaling.original_context_length"), GgufValue::U32(*original_context));
            writer.set(&key("rope.scaling.yarn_beta_fast"), GgufValue::F32(*beta_fast));
            writer.set(&key("rope.scaling.yarn_beta_slow"), GgufValue::F32(*beta_slow));
        }
        RopeScaling::Factors(factors) => writer.tensors.push(GgufTensor {
            name: "rope_freqs.weight".into(),
            extents: vec![factors.len() as u64],
            ty: 0,
            data: factors.iter().flat_map(|f| f.to_le_bytes()).collect(),
        }),
        RopeScaling::None | RopeScaling::Llama3 { .. } => {}
    }
    let (texts, types) = tokens().into_iter().unzip();
    writer.set("tokenizer.ggml.model", "gpt2");
    writer.set("tokenizer.ggml.pre", "smollm");
    writer.set("tokenizer.ggml.tokens", GgufValue::Strings(texts));
    writer.set("tokenizer.ggml.token_type", GgufValue::I32s(types));
    writer.set("tokenizer.ggml.merges", GgufValue::Strings(merges()));
    writer.set("tokenizer.ggml.bos_token_id", GgufValue::U32(IM_START));
    writer.set("tokenizer.ggml.eos_token_id", GgufValue::U32(IM_END));
    writer.set("tokenizer.chat_template", CHAT_TEMPLATE);
    for (role, shape) in model.tensors() {
        writer.tensors.push(tensor(seed, model, role, shape));
    }
    writer
}

/// [`tiny`], with so many entries and merges.
pub(super) fn with_vocabulary(seed: u64, model: &TinyModel, entries: usize, merges: usize) -> GgufWriter {
    let mut writer = tiny(seed, model);
    let (tokens, merges) = large(seed, entries, merges);
    let (texts, types) = tokens.into_iter().unzip();
    writer.set("tokenizer.ggml.tokens", GgufValue::Strings(texts));
    writer.set("tokenizer.ggml.token_type", GgufValue::I32s(types));
    writer.set("tokenizer.ggml.merges", GgufValue::Strings(merges));
    writer.set("tokenizer.ggml.bos_token_id", GgufValue::U32(entries as u32 - 2));
    writer.set("tokenizer.ggml.eos_token_id", GgufValue::U32(entries as u32 - 1));
    for role in [TensorRole::TokenEmbd, TensorRole::Output] {
        if let Some(matrix) = writer.tensor(&role.to_string()) {
            *matrix = tensor(seed, model, role, [entries, model.hidden]);
        }
    }
    writer
}

fn tensor(seed: u64, model: &TinyModel, role: TensorRole, shape: [usize; 2]) -> GgufTensor {
    let ty = if role.is_vector() { TensorType::F32 } else { model.ty };
    let [rows, columns] = shape;
    let data = if ty.block_elements() == 1 {
        let mut weights = TinyModel::weights(seed, role, shape);
        let rotated = matches!(
            role,
            TensorRole::Layer(
                _,
                LayerTensor::AttnQ | LayerTensor::AttnK | LayerTensor::AttnQBias | LayerTensor::AttnKBias
            )
        );
        if rotated && model.gguf_pairing() == RopePairing::Interleaved {
            weights = interleave(&weights, columns, model.head_dim);
        }
        plain_bytes(ty, &weights)
    } else {
        let mut random = Random::new(seed).branch(&role.to_string());
        let blocks = rows * columns / ty.block_elements();
        (0..blocks).flat_map(|_| block(ty, 1.0 / (columns as f32).sqrt(), &mut random)).collect()
    };
    let extents = if role.is_vector() { vec![columns as u64] } else { vec![columns as u64, rows as u64] };
    GgufTensor { name: role.to_string(), extents, ty: code(ty), data }
}

/// Rows `i` and `i + head_dim / 2` of each head become rows `2i` and `2i + 1`.
fn interleave(weights: &[f32], columns: usize, head_dim: usize) -> Vec<f32> {
    let rows = weights.len() / columns;
    (0..rows)
        .flat_map(|row| {
            let (head, within) = (row / head_dim, row % head_dim);
            let from = head * head_dim + (within % 2) * (head_dim / 2) + within / 2;
            weights[from * columns..(from + 1) * columns].iter().copied()
        })
        .collect()
}

pub(super) fn plain_bytes(ty: TensorType, weights: &[f32]) -> Vec<u8> {
    match ty {
        TensorType::F16 => weights.iter().flat_map(|&w| f16::from_f32(w).to_le_bytes()).collect(),
        TensorType::BF16 => weights.iter().flat_map(|&w| bf16::from_f32(w).to_le_bytes()).collect(),
        _ => weights.iter().flat_map(|w| w.to_le_bytes()).collect(),
    }
}

/// A random block whose values spread over about `[-2 spread, 2 spread]`.
fn block(ty: TensorType, spread: f32, random: &mut Random) -> Vec<u8> {
    let mut bytes = random.bytes(ty.block_bytes());
    let jitter = 0.75 + 0.25 * random.signed();
    // Where the scales stand, what the largest quant is, and where the minimum stands, if there is one.
    let (scale_at, largest, minimum_at) = match ty {
        TensorType::F32 | TensorType::F16 | TensorType::BF16 => return bytes,
        TensorType::Q4_0 => (0, 8.0, None),
        TensorType::Q4_1 => (0, 7.5, Some(2)),
        TensorType::Q5_0 => (0, 16.0, None),
        TensorType::Q5_1 => (0, 15.5, Some(2)),
        TensorType::Q8_0 => (0, 128.0, None),
        // Times 6-bit (or, for Q6_K, 8-bit) scales.
        TensorType::Q4_K => (0, 15.0 * 32.0, Some(2)),
        TensorType::Q5_K => (0, 31.0 * 32.0, Some(2)),
        TensorType::Q6_K => (208, 32.0 * 128.0, None),
    };
    let scale = 2.0 * spread * jitter / largest;
    bytes[scale_at..scale_at + 2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    if let Some(at) = minimum_at {
        let minimum = match ty {
            TensorType::Q4_K | TensorType::Q5_K => spread * jitter / 32.0,
            _ => -2.0 * spread * jitter,
        };
        bytes[at..at + 2].copy_from_slice(&f16::from_f32(minimum).to_le_bytes());
    }
    bytes
}

/// ggml's code of a type.
fn code(ty: TensorType) -> u32 {
    match ty {
        TensorType::F32 => 0,
        TensorType::F16 => 1,
        TensorType::Q4_0 => 2,
        TensorType::Q4_1 => 3,
        TensorType::Q5_0 => 6,
        TensorType::Q5_1 => 7,
        TensorType::Q8_0 => 8,
        TensorType::Q4_K => 12,
        TensorType::Q5_K => 13,
        TensorType::Q6_K => 14,
        TensorType::BF16 => 30,
    }
}
