//! Directories of AWQ and GPTQ: matrices of random codes, zeros and scales, packed by the formats' descriptions.

use std::io;
use std::path::Path;

use half::f16;
use serde_json::{Value, json};

use super::TinyModel;
use super::hf::{HfTensor, plain, write_tensors};
use super::random::Random;
use crate::tensor::TensorRole;

/// A format of packed matrices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PackedFormat {
    /// AWQ, version "gemm".
    Awq,
    /// GPTQ with zeros stored less one.
    Gptq,
    /// GPTQ with zeros as they are.
    GptqV2,
}

/// How a directory's layers are packed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PackedAs {
    /// The format.
    pub format: PackedFormat,
    /// Inputs that share a scale and a zero; `None`: all.
    pub group: Option<usize>,
    /// Every zero is 8.
    pub symmetric: bool,
    /// Each layer states which input is in which group, and has a bias of zeros where its family has none, as tools of GPTQ write them.
    pub extras: bool,
    /// The output matrix is packed, too, where there is one.
    pub lm_head: bool,
}

impl PackedAs {
    /// What a usual checkpoint of a format is.
    #[must_use]
    pub fn usual(format: PackedFormat, group: Option<usize>) -> Self {
        Self { format, group, symmetric: false, extras: format != PackedFormat::Awq, lm_head: false }
    }

    /// `quantization_config`.
    #[must_use]
    pub fn config(&self) -> Value {
        let group = self.group.map_or(json!(-1), |group| json!(group));
        match self.format {
            PackedFormat::Awq => json!({
                "quant_method": "awq", "bits": 4, "group_size": group, "zero_point": true, "version": "gemm",
                "modules_to_not_convert": null }),
            PackedFormat::Gptq | PackedFormat::GptqV2 => json!({
                "quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": false, "sym": self.symmetric,
                "checkpoint_format": if self.format == PackedFormat::Gptq { "gptq" } else { "gptq_v2" },
                "damp_percent": 0.01, "lm_head": self.lm_head, "true_sequential": true, "pack_dtype": "int32",
                "meta": { "quantizer": ["none"] } }),
        }
    }

    /// Whether the matrix of a role is packed.
    #[must_use]
    pub fn packs(&self, role: TensorRole) -> bool {
        match role {
            TensorRole::TokenEmbd | TensorRole::OutputNorm => false,
            TensorRole::Output => self.lm_head,
            TensorRole::Layer(_, tensor) => !tensor.is_vector(),
        }
    }

    /// The matrix of a role, `[out, in]`.
    #[must_use]
    pub fn matrix(&self, seed: u64, role: TensorRole, [rows, columns]: [usize; 2]) -> PackedMatrix {
        let mut random = Random::new(seed).branch(&role.to_string());
        let group = self.group.unwrap_or(columns);
        let codes = random.bytes(rows * columns).iter().map(|byte| byte & 15).collect();
        let count = rows * columns / group;
        let zeros = random.bytes(count).into_iter().map(|byte| match self.format {
            _ if self.symmetric => 8,
            PackedFormat::Awq | PackedFormat::GptqV2 => byte & 15,
            // What can be stored less one, and has one meaning.
            PackedFormat::Gptq => 1 + byte % 15,
        });
        let zeros = zeros.collect();
        let spread = 0.25 / (columns as f32).sqrt();
        let scales = (0..count).map(|_| f16::from_f32(spread * (0.75 + 0.25 * random.signed()))).collect();
        PackedMatrix { rows, columns, group, codes, zeros, scales }
    }

    /// Every tensor of a directory.
    ///
    /// # Errors
    /// The element type of `model` has no safetensors name.
    pub fn tensors(&self, seed: u64, model: &TinyModel) -> io::Result<Vec<HfTensor>> {
        let (all, mut tensors) = (model.tensors(), Vec::new());
        for &(role, shape) in &all {
            if !self.packs(role) {
                tensors.push(plain(model, role, shape, &TinyModel::weights(seed, role, shape))?);
                continue;
            }
            let stem = role.hf_name().replace(".weight", "");
            let mut parts = self.matrix(seed, role, shape).parts(self.format, &stem);
            if !self.extras {
                parts.retain(|part| !part.name.ends_with(".g_idx"));
            }
            tensors.extend(parts);
            let name = format!("{stem}.bias");
            if self.extras && !all.iter().any(|(role, _)| role.hf_name() == name) {
                let data = vec![0; shape[0] * size_of::<f16>()];
                tensors.push(HfTensor { name, dtype: "F16", shape: vec![shape[0]], data });
            }
        }
        Ok(tensors)
    }

    pub(super) fn write(&self, directory: &Path, seed: u64, model: &TinyModel) -> io::Result<()> {
        let tensors = self.tensors(seed, model)?;
        write_tensors(directory, model, &self.config(), tensors.into_iter().map(Ok), 2)
    }

    pub(super) fn write_unpacked(&self, directory: &Path, seed: u64, model: &TinyModel) -> io::Result<()> {
        let tensors = model.tensors().into_iter().map(|(role, shape)| {
            let weights = if self.packs(role) {
                self.matrix(seed, role, shape).weights()
            } else {
                TinyModel::weights(seed, role, shape)
            };
            plain(model, role, shape, &weights)
        });
        write_tensors(directory, model, &Value::Null, tensors, 1)
    }
}

/// A matrix in four bits, before it is packed. A weight is `(code - zero) * scale`.
#[derive(Clone, PartialEq, Debug)]
pub struct PackedMatrix {
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub columns: usize,
    /// Inputs that share a scale and a zero.
    pub group: usize,
    /// `[out, in]`, below 16.
    pub codes: Vec<u8>,
    /// `[out, group]`, at most 16.
    pub zeros: Vec<u8>,
    /// `[out, group]`.
    pub scales: Vec<f16>,
}

impl PackedMatrix {
    /// Where zero and scale of a weight stand.
    #[must_use]
    pub fn group_at(&self, row: usize, column: usize) -> usize {
        row * (self.columns / self.group) + column / self.group
    }

    /// What the numbers stand for, exactly.
    #[must_use]
    pub fn weights(&self) -> Vec<f32> {
        let weight = |(index, code): (usize, &u8)| {
            let at = self.group_at(index / self.columns, index % self.columns);
            (f32::from(*code) - f32::from(self.zeros[at])) * self.scales[at].to_f32()
        };
        self.codes.iter().enumerate().map(weight).collect()
    }

    /// The tensors of a layer of name `stem`.
    #[must_use]
    pub fn parts(&self, format: PackedFormat, stem: &str) -> Vec<HfTensor> {
        let Self { rows, columns, group, .. } = *self;
        let groups = columns / group;
        let stored = |row: usize, group: usize| {
            let zero = self.zeros[row * groups + group];
            if format == PackedFormat::Gptq { zero.wrapping_sub(1) & 15 } else { zero }
        };
        let code = |row: usize, column: usize| self.codes[row * columns + column];
        // Where output `o` of eight stands in a word of AWQ: even ones in the low half.
        let awq = |o: usize| 4 * (o / 2 + 4 * (o % 2));
        let gptq = |o: usize| 4 * o;
        let by_eight_rows =
            |lines: usize, place: &dyn Fn(usize) -> usize, value: &dyn Fn(usize, usize) -> u8| {
                let mut words = vec![0_u32; lines * rows / 8];
                for line in 0..lines {
                    for row in 0..rows {
                        words[line * (rows / 8) + row / 8] |= u32::from(value(row, line)) << place(row % 8);
                    }
                }
                words
            };
        let (lines, qweight, qzeros) = if format == PackedFormat::Awq {
            (columns, by_eight_rows(columns, &awq, &code), by_eight_rows(groups, &awq, &stored))
        } else {
            let mut words = vec![0_u32; columns / 8 * rows];
            for row in 0..rows {
                for column in 0..columns {
                    words[column / 8 * rows + row] |= u32::from(code(row, column)) << (4 * (column % 8));
                }
            }
            (columns / 8, words, by_eight_rows(groups, &gptq, &stored))
        };
        let integers = |name: &str, shape: Vec<usize>, words: Vec<u32>| HfTensor {
            name: format!("{stem}.{name}"),
            dtype: "I32",
            shape,
            data: words.into_iter().flat_map(u32::to_le_bytes).collect(),
        };
        let scales =
            (0..groups).flat_map(|group| (0..rows).map(move |row| self.scales[row * groups + group]));
        let mut parts = vec![
            integers("qweight", vec![lines, qweight.len() / lines], qweight),
            integers("qzeros", vec![groups, rows / 8], qzeros),
            HfTensor {
                name: format!("{stem}.scales"),
                dtype: "F16",
                shape: vec![groups, rows],
                data: scales.flat_map(f16::to_le_bytes).collect(),
            },
        ];
        let groups = (0..columns).map(|column| (column / group) as u32).collect();
        parts.push(integers("g_idx", vec![columns], groups));
        parts
    }
}
