//! What the tensors of a checkpoint are for, and which of them are one matrix in four bits.
//!
//! **Owns** names, types and shapes. **Never** keeps tensor data: of packed layers it looks at the order of groups, at one line of zeros, and
//! at biases that must be none.

use std::collections::BTreeMap;

use pagedd_core::TensorType;

use super::packed::{BLOCK, BLOCK_BYTES, CODES, Packed, Part, ScaleType, common_zero};
use super::quantization::{Grouping, KEY, Packing, Quantization};
use super::safetensors::Raw;
use crate::config::Architecture;
use crate::error::{Fault, ModelError};
use crate::file::SourceFile;
use crate::tensor::{TensorInfo, TensorRole};

/// Every tensor of a checkpoint.
#[derive(Default)]
pub(super) struct Tensors {
    pub tensors: Vec<TensorInfo>,
    /// Those of them that are packed.
    pub packed: BTreeMap<TensorRole, Packed>,
}

/// Reads a checkpoint's list of tensors.
pub(super) struct Reader<'a> {
    pub files: &'a [SourceFile],
    pub architecture: Architecture,
    pub quantization: Option<Quantization>,
}

/// How names of the tensors of a packed layer end.
const PARTS: [&str; 4] = ["qweight", "qzeros", "scales", "g_idx"];

/// The tensors of one packed layer, in the order of [`PARTS`].
type Layer = [Option<Raw>; PARTS.len()];

impl Reader<'_> {
    pub(super) fn read(&self, raw: Vec<Raw>) -> Result<Tensors, ModelError> {
        let mut out = Tensors::default();
        let mut layers: BTreeMap<String, Layer> = BTreeMap::new();
        for tensor in raw {
            let at = self.at(tensor.file);
            if self.quantization.is_some() {
                if let Some((stem, end)) = tensor.name.rsplit_once('.')
                    && let Some(part) = PARTS.iter().position(|name| *name == end)
                {
                    let place = &mut layers.entry(stem.to_owned()).or_default()[part];
                    *place = Some(tensor);
                    continue;
                }
                if self.is_spare_bias(&tensor.name) {
                    self.check_zero(&tensor).map_err(at)?;
                    continue;
                }
            }
            out.tensors.extend(plain(tensor).map_err(at)?);
        }
        if let Some(quantization) = &self.quantization {
            for (stem, layer) in layers {
                let (tensor, packed) = self.layer(quantization, &stem, layer)?;
                out.packed.insert(tensor.role, packed);
                out.tensors.push(tensor);
            }
        }
        Ok(out)
    }

    /// Whether this is a bias of a layer that has none in this family. Some tools give every packed layer one, of zeros.
    fn is_spare_bias(&self, name: &str) -> bool {
        let of_matrix = name
            .strip_suffix(".bias")
            .and_then(|stem| TensorRole::from_hf_name(&format!("{stem}.weight")))
            .is_some_and(|role| !role.is_vector());
        of_matrix && (self.architecture == Architecture::Llama || TensorRole::from_hf_name(name).is_none())
    }

    fn check_zero(&self, bias: &Raw) -> Result<(), Fault> {
        let size = match bias.dtype.as_str() {
            "F16" | "BF16" => 2,
            "F32" => 4,
            other => return Err(wrong_dtype(&bias.name, other, "F32, F16 and BF16 are")),
        };
        check_bytes(bias, size)?;
        self.pieces(bias, |piece| {
            for element in piece.chunks_exact(size as usize) {
                if let Some((sign, rest)) = element.split_last()
                    && (sign & 0x7f != 0 || rest.iter().any(|&byte| byte != 0))
                {
                    return Err(Fault::unsupported(&bias.name, "a bias, where the model's family has none"));
                }
            }
            Ok(())
        })
    }

    /// Shows `see` all of a tensor, piece by piece.
    fn pieces(&self, tensor: &Raw, mut see: impl FnMut(&[u8]) -> Result<(), Fault>) -> Result<(), Fault> {
        let mut buffer = vec![0; tensor.bytes.min(64 << 10) as usize];
        let mut done = 0;
        while done < tensor.bytes {
            let piece = (tensor.bytes - done).min(buffer.len() as u64);
            let bytes = &mut buffer[..piece as usize];
            self.files[tensor.file].read_at(tensor.offset + done, bytes, &tensor.name)?;
            see(bytes)?;
            done += piece;
        }
        Ok(())
    }

    /// Names the file of a fault.
    fn at(&self, file: usize) -> impl Fn(Fault) -> ModelError {
        move |fault| fault.at(&self.files[file].path)
    }

    /// Puts a packed matrix together. Its parts may lie in several files: an error names that of the part that is wrong, or of one that is
    /// there.
    fn layer(
        &self,
        quantization: &Quantization,
        stem: &str,
        layer: Layer,
    ) -> Result<(TensorInfo, Packed), ModelError> {
        let (any, name) =
            layer.iter().flatten().next().map_or((0, stem), |part| (part.file, part.name.as_str()));
        let role = match TensorRole::from_hf_name(&format!("{stem}.weight")) {
            Some(role) if !role.is_vector() && role != TensorRole::TokenEmbd => role,
            _ => return Err(self.at(any)(unknown(name))),
        };
        let missing = |name, problem| self.at(any)(Fault::malformed(format_args!("{stem}.{name}"), problem));
        let there = |part: Option<Raw>, name| part.ok_or_else(|| missing(name, "the tensor is missing"));
        let [qweight, qzeros, scales, g_idx] = layer;
        let (qweight, qzeros) = (there(qweight, "qweight")?, there(qzeros, "qzeros")?);
        let scales = there(scales, "scales")?;
        let shape = Shape::of(quantization, &qweight).map_err(self.at(qweight.file))?;
        for part in [&qweight, &qzeros] {
            integers(part).map_err(self.at(part.file))?;
        }
        let scale_type = scale_type(&scales).map_err(self.at(scales.file))?;
        for (part, expected) in [(&qzeros, shape.rows / CODES), (&scales, shape.rows)] {
            shape.check(part, [shape.groups(), expected]).map_err(self.at(part.file))?;
        }
        match &g_idx {
            Some(g_idx) => self.check_order(g_idx, &shape).map_err(self.at(g_idx.file))?,
            None if quantization.act_order && shape.groups() > 1 => {
                return Err(missing(
                    "g_idx",
                    "the tensor is missing, and quantization_config.desc_act is true",
                ));
            }
            None => {}
        }
        let Shape { rows, columns, group } = shape;
        let bytes = (columns / BLOCK * BLOCK_BYTES).checked_mul(rows);
        let bytes = bytes.ok_or_else(|| Fault::malformed(&qweight.name, "its size overflows"));
        let bytes = bytes.map_err(self.at(qweight.file))? as u64;
        let (name, file, offset) = (qweight.name.clone(), qweight.file, qweight.offset);
        let info = TensorInfo { role, name, ty: TensorType::Q4_1, rows, columns, bytes, file, offset };
        let packing = quantization.packing;
        let [qweight, qzeros, scales] = [qweight, qzeros, scales].map(part);
        if quantization.symmetric {
            self.check_format(packing, &qzeros, rows)?;
        }
        Ok((info, Packed { packing, rows, columns, group, scale_type, qweight, qzeros, scales }))
    }

    /// Inputs must be in groups by their place.
    fn check_order(&self, g_idx: &Raw, shape: &Shape) -> Result<(), Fault> {
        integers(g_idx)?;
        if g_idx.shape != [shape.columns as u64] {
            let problem = format!("shape {:?}, {:?} is expected", g_idx.shape, [shape.columns]);
            return Err(Fault::malformed(&g_idx.name, problem));
        }
        let mut input = 0;
        self.pieces(g_idx, |piece| {
            for group in piece.as_chunks().0 {
                let group = i32::from_le_bytes(*group);
                if usize::try_from(group).ok().is_none_or(|group| group >= shape.groups()) {
                    let problem = format!("input {input} is in group {group} of {}", shape.groups());
                    return Err(Fault::malformed(&g_idx.name, problem));
                }
                if group as usize != input / shape.group {
                    let problem = format!(
                        "input {input} is in group {group} and not {}: groups by importance (act-order) are not served; \
                         a checkpoint made with desc_act false is",
                        input / shape.group
                    );
                    return Err(Fault::unsupported(&g_idx.name, problem));
                }
                input += 1;
            }
            Ok(())
        })
    }

    /// Some tools state one format and write the other, which moves every weight by a step. Where all zeros are said to be 8, that shows.
    fn check_format(&self, packing: Packing, qzeros: &Part, rows: usize) -> Result<(), ModelError> {
        let stored = common_zero(self.files, qzeros, rows / CODES * size_of::<u32>())?;
        let (stated, other) = match (packing, stored) {
            (Packing::Gptq, Some(8)) => ("gptq", "gptq_v2"),
            (Packing::GptqV2, Some(7)) => ("gptq_v2", "gptq"),
            (Packing::Awq | Packing::Gptq | Packing::GptqV2, _) => return Ok(()),
        };
        let problem = format!(
            "its zeros are those of checkpoint_format {other}, but {KEY} says sym and checkpoint_format {stated}: \
             set {KEY}.checkpoint_format to {other}"
        );
        Err(self.at(qzeros.file)(Fault::unsupported(&qzeros.name, problem)))
    }
}

/// Of a packed matrix.
struct Shape {
    rows: usize,
    columns: usize,
    /// Inputs of a group: a part of `columns`, and a multiple of 32.
    group: usize,
}

impl Shape {
    fn of(quantization: &Quantization, qweight: &Raw) -> Result<Self, Fault> {
        let name = &qweight.name;
        let &[lines, words] = qweight.shape.as_slice() else {
            let problem = format!("shape {:?}, 2 dimensions are expected", qweight.shape);
            return Err(Fault::malformed(name, problem));
        };
        let codes = CODES as u64;
        let (rows, columns) = match quantization.packing {
            Packing::Awq => (words.checked_mul(codes), Some(lines)),
            Packing::Gptq | Packing::GptqV2 => (Some(words), lines.checked_mul(codes)),
        };
        let size = |n: Option<u64>| n.and_then(|n| usize::try_from(n).ok());
        let (Some(rows), Some(columns)) = (size(rows), size(columns)) else {
            return Err(Fault::malformed(name, "its size overflows"));
        };
        if rows == 0 || columns == 0 {
            return Err(Fault::malformed(name, format_args!("shape {:?} is empty", qweight.shape)));
        }
        if !rows.is_multiple_of(CODES) || !columns.is_multiple_of(BLOCK) {
            let problem = format!(
                "{rows} outputs of {columns} inputs; multiples of {CODES} outputs and of {BLOCK} inputs are served"
            );
            return Err(Fault::unsupported(name, problem));
        }
        let group = match quantization.grouping {
            Grouping::Whole => columns,
            Grouping::Of(size) if columns.is_multiple_of(size) => size,
            Grouping::Of(size) => {
                let problem =
                    format!("groups of {size} ({KEY}.group_size) do not divide its {columns} inputs");
                return Err(Fault::unsupported(name, problem));
            }
        };
        Ok(Self { rows, columns, group })
    }

    fn groups(&self) -> usize {
        self.columns / self.group
    }

    fn check(&self, part: &Raw, expected: [usize; 2]) -> Result<(), Fault> {
        if part.shape != expected.map(|n| n as u64) {
            let problem = format!(
                "shape {:?}, {expected:?} is expected with {} outputs of {} inputs in groups of {} ({KEY})",
                part.shape, self.rows, self.columns, self.group
            );
            // The settings may be wrong as well as the file.
            return Err(Fault::unsupported(&part.name, problem));
        }
        Ok(())
    }
}

fn part(raw: Raw) -> Part {
    let Raw { name, file, offset, bytes, .. } = raw;
    Part { name, file, offset, bytes }
}

fn scale_type(scales: &Raw) -> Result<ScaleType, Fault> {
    let found = match scales.dtype.as_str() {
        "F16" => ScaleType::F16,
        "BF16" => ScaleType::BF16,
        other => return Err(wrong_dtype(&scales.name, other, "scales in F16 and BF16 are")),
    };
    check_bytes(scales, 2)?;
    Ok(found)
}

fn integers(part: &Raw) -> Result<(), Fault> {
    if part.dtype != "I32" {
        return Err(wrong_dtype(&part.name, &part.dtype, "I32 is"));
    }
    check_bytes(part, 4)
}

/// Shape against bytes.
fn check_bytes(tensor: &Raw, element: u64) -> Result<(), Fault> {
    let elements = tensor.shape.iter().try_fold(element, |product, &n| product.checked_mul(n));
    if elements != Some(tensor.bytes) || tensor.bytes == 0 {
        let Raw { name, dtype, shape, bytes, .. } = tensor;
        return Err(Fault::malformed(
            name,
            format_args!("shape {shape:?} of {dtype} does not take {bytes} bytes"),
        ));
    }
    Ok(())
}

fn wrong_dtype(name: &str, dtype: &str, served: &str) -> Fault {
    Fault::unsupported(name, format_args!("dtype {dtype} is not served; {served}"))
}

fn unknown(name: &str) -> Fault {
    let experts = name.contains("experts") || name.contains("block_sparse_moe");
    let packed = name.rsplit_once('.').is_some_and(|(_, end)| PARTS.contains(&end));
    let problem = match (experts, packed) {
        (true, _) => "mixtures of experts are not served",
        (false, true) if TensorRole::from_hf_name(name).is_none() => {
            "a part of a quantised matrix that is unknown, or that config.json has no quantization_config for"
        }
        _ => "an unknown tensor",
    };
    Fault::unsupported(name, problem)
}

/// A tensor that is read as it is; `None` where it is not read.
fn plain(raw: Raw) -> Result<Option<TensorInfo>, Fault> {
    // A constant that old exporters saved: it follows from the configuration.
    if raw.name.ends_with(".self_attn.rotary_emb.inv_freq") {
        return Ok(None);
    }
    let role = TensorRole::from_hf_name(&raw.name).ok_or_else(|| unknown(&raw.name))?;
    let ty = match raw.dtype.as_str() {
        "F32" => TensorType::F32,
        "F16" => TensorType::F16,
        "BF16" => TensorType::BF16,
        other => return Err(wrong_dtype(&raw.name, other, "F32, F16 and BF16 are")),
    };
    let (rows, columns) = match (role.is_vector(), raw.shape.as_slice()) {
        (true, &[columns]) => (1, columns),
        (false, &[rows, columns]) => (rows, columns),
        (vector, shape) => {
            let wanted = if vector { 1 } else { 2 };
            let problem = format!("shape {shape:?}, {wanted} dimensions are expected");
            return Err(Fault::malformed(&raw.name, problem));
        }
    };
    check_bytes(&raw, ty.block_bytes() as u64)?;
    let (Ok(rows), Ok(columns)) = (usize::try_from(rows), usize::try_from(columns)) else {
        return Err(Fault::malformed(&raw.name, "its size overflows"));
    };
    let Raw { name, file, offset, bytes, .. } = raw;
    Ok(Some(TensorInfo { role, name, ty, rows, columns, bytes, file, offset }))
}
