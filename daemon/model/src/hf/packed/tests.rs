use std::path::Path;

use half::bf16;
use pagedd_core::TensorType;
use proptest::prelude::*;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;
use crate::hf::quantization::Quantization;
use crate::hf::safetensors::{self, Checkpoint};
use crate::hf::tensors::Reader;
use crate::testing::{
    HfTensor, PackedAs, PackedFormat, PackedMatrix, Random, TinyModel, write_packed_directory, write_tensors,
    write_unpacked_directory,
};
use crate::{Architecture, LayerTensor, ModelError, ModelSource, TensorRole};

const FORMATS: [PackedFormat; 3] = [PackedFormat::Awq, PackedFormat::Gptq, PackedFormat::GptqV2];
const Q: TensorRole = TensorRole::Layer(0, LayerTensor::AttnQ);

/// Wide enough for groups of 128.
fn model() -> TinyModel {
    TinyModel { layers: 1, hidden: 128, feed_forward: 256, head_dim: 32, ..TinyModel::default() }
}

fn written(packed: &PackedAs, model: &TinyModel) -> TempDir {
    let directory = TempDir::new().unwrap();
    write_packed_directory(directory.path(), 5, model, packed).unwrap();
    directory
}

fn read(source: &ModelSource, role: TensorRole) -> Vec<u8> {
    let tensor = source.tensor(role).unwrap();
    let mut bytes = vec![0; tensor.bytes as usize];
    source.read(tensor, &mut bytes).unwrap();
    bytes
}

/// What blocks of `Q4_1` say: scale, minimum and code of each weight of a row after the other.
fn weights(blocks: &[u8]) -> impl Iterator<Item = (f32, f32, f32)> {
    blocks.as_chunks::<20>().0.iter().flat_map(|block| {
        let half = |at: usize| f16::from_le_bytes([block[at], block[at + 1]]).to_f32();
        let (d, m) = (half(0), half(2));
        (0..32).map(move |i| {
            let code = if i < 16 { block[4 + i] & 15 } else { block[4 + i - 16] >> 4 };
            (d, m, f32::from(code))
        })
    })
}

/// Codes and scales are as they were, and a minimum is the half float nearest to `-zero * scale`.
fn check(matrix: &PackedMatrix, blocks: &[u8]) -> Result<(), String> {
    if blocks.len() * 32 != matrix.codes.len() * 20 {
        return Err(format!("{} bytes for {} weights", blocks.len(), matrix.codes.len()));
    }
    let exact = matrix.weights();
    for (index, (d, m, code)) in weights(blocks).enumerate() {
        let (row, column) = (index / matrix.columns, index % matrix.columns);
        let at = matrix.group_at(row, column);
        let (zero, scale) = (f32::from(matrix.zeros[at]), matrix.scales[at].to_f32());
        let off = (d * code + m - exact[index]).abs();
        // Exact where a zero is a power of two; otherwise half a unit in the last of 11 bits.
        let minimum = (zero * scale).abs();
        let bound = if matrix.zeros[at].is_power_of_two() { 0.0 } else { minimum * 2.0_f32.powi(-11) };
        if code as u8 != matrix.codes[index] || (d - scale).abs() > 0.0 || off > bound {
            return Err(format!(
                "[{row}, {column}]: {d} * {code} + {m}, should be ({} - {zero}) * {scale}; off by {off}",
                matrix.codes[index]
            ));
        }
    }
    Ok(())
}

#[test]
fn every_layer_reads_as_the_numbers_it_was_packed_from() {
    for format in FORMATS {
        for group in [Some(32), Some(64), Some(128), None] {
            for architecture in [Architecture::Llama, Architecture::Qwen2] {
                let model = TinyModel { architecture, tied_embeddings: false, ..model() };
                for lm_head in [false, true] {
                    let packed = PackedAs { lm_head, ..PackedAs::usual(format, group) };
                    let (directory, twin) = (written(&packed, &model), TempDir::new().unwrap());
                    write_unpacked_directory(twin.path(), 5, &model, &packed).unwrap();
                    let source = ModelSource::open(directory.path()).unwrap();
                    let twin = ModelSource::open(twin.path()).unwrap();
                    assert_eq!(source.config(), twin.config());
                    assert_eq!(source.tensors().count(), twin.tensors().count());
                    for tensor in source.tensors() {
                        assert_eq!(tensor.shape(), twin.tensor(tensor.role).unwrap().shape());
                        if packed.packs(tensor.role) {
                            assert_eq!(tensor.ty, TensorType::Q4_1, "{}", tensor.name);
                            let matrix = packed.matrix(5, tensor.role, tensor.shape());
                            let checked = check(&matrix, &read(&source, tensor.role));
                            checked.unwrap_or_else(|why| panic!("{packed:?} {}: {why}", tensor.name));
                        } else {
                            assert_eq!(
                                read(&source, tensor.role),
                                read(&twin, tensor.role),
                                "{}",
                                tensor.name
                            );
                        }
                    }
                }
            }
        }
    }
}

/// One matrix of 64 outputs in groups of 64, as the packers of `AutoAWQ` 0.2.9 and `AutoGPTQ` 0.7.1 wrote it, and as the half floats that it
/// stands for. Its scales have few bits, so that minima are exact.
#[test]
fn what_other_packers_wrote_is_read_as_its_weights() {
    let open = |kind: &str, quantization: Value| {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/packed");
        let Checkpoint { files, tensors, .. } = safetensors::open(&fixtures.join(kind)).unwrap();
        let config = json!({ "quantization_config": quantization });
        let quantization = Quantization::of(config.as_object().unwrap()).unwrap();
        let reader = Reader { files: &files, architecture: Architecture::Llama, quantization };
        let read = reader.read(tensors).unwrap();
        (files, read)
    };
    let (files, plain) = open("plain", Value::Null);
    let mut bytes = vec![0; plain.tensors[0].bytes as usize];
    files[0].read_at(plain.tensors[0].offset, &mut bytes, "weight").unwrap();
    let exact: Vec<_> = bytes.as_chunks().0.iter().map(|half| f16::from_le_bytes(*half).to_f32()).collect();
    assert_eq!(exact.len(), 64 * 128);
    for (kind, sym) in [("awq", Value::Null), ("gptq", json!(false))] {
        let config =
            json!({ "quant_method": kind, "bits": 4, "group_size": 64, "desc_act": false, "sym": sym });
        let (files, read) = open(kind, config);
        let packed = &read.packed[&Q];
        assert_eq!((packed.rows, packed.columns), (64, 128));
        let ours: Vec<_> =
            weights(&rows_of(packed, &files, 0..64)).map(|(d, m, code)| d * code + m).collect();
        assert_eq!(ours, exact, "{kind}");
    }
}

/// A file with a matrix and nothing else, and how it lies there.
fn alone(matrix: &PackedMatrix, format: PackedFormat) -> (TempDir, Vec<SourceFile>, Packed) {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("parts");
    let (mut bytes, mut places) = (vec![7; 13], Vec::new());
    for HfTensor { name, data, .. } in matrix.parts(format, "layer") {
        places.push(Part { name, file: 0, offset: bytes.len() as u64, bytes: data.len() as u64 });
        bytes.extend(data);
    }
    std::fs::write(&path, bytes).unwrap();
    let [qweight, qzeros, scales] = places[..3].to_vec().try_into().unwrap();
    let packing = match format {
        PackedFormat::Awq => Packing::Awq,
        PackedFormat::Gptq => Packing::Gptq,
        PackedFormat::GptqV2 => Packing::GptqV2,
    };
    let PackedMatrix { rows, columns, group, .. } = *matrix;
    let scale_type = ScaleType::F16;
    let packed = Packed { packing, rows, columns, group, scale_type, qweight, qzeros, scales };
    (directory, vec![SourceFile::open(&path).unwrap()], packed)
}

fn rows_of(packed: &Packed, files: &[SourceFile], rows: Range<usize>) -> Vec<u8> {
    let mut bytes = vec![0xaa; rows.len() * packed.row_bytes()];
    packed.read_rows(files, rows, &mut bytes).unwrap();
    bytes
}

#[test]
fn some_rows_are_those_of_the_whole_also_where_lines_are_far_longer_than_them() {
    for format in FORMATS {
        // Lines of codes of 9 and 72 KB, and tiles that end between groups.
        let matrix = PackedAs::usual(format, Some(96)).matrix(2, Q, [18_080, 192]);
        let (_directory, files, packed) = alone(&matrix, format);
        let whole = rows_of(&packed, &files, 0..matrix.rows);
        check(&matrix, &whole).unwrap();
        let row = packed.row_bytes();
        for rows in [0..1, 7..9, 8..16, 3..400, 17_000..18_080, 18_079..18_080] {
            let some = rows_of(&packed, &files, rows.clone());
            assert_eq!(some, whole[rows.start * row..rows.end * row], "{format:?} {rows:?}");
        }
        for rows in [0..0, 18_079..18_081] {
            let mut bytes = vec![0; rows.len() * row];
            packed.read_rows(&files, rows, &mut bytes).unwrap_err();
        }
        packed.read_rows(&files, 0..2, &mut vec![0; row]).unwrap_err();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_matrix_is_read_as_its_numbers(
        seed: u64,
        format in prop::sample::select(FORMATS.to_vec()),
        eights in 1..40_usize,
        (group, groups) in (1..5_usize, 1..9_usize),
        whole: bool,
        symmetric: bool,
        ends in (any::<prop::sample::Index>(), any::<prop::sample::Index>()),
    ) {
        let (rows, columns) = (8 * eights, 32 * group * groups);
        let grouping = (!whole).then_some(32 * group);
        let as_ = PackedAs { symmetric, ..PackedAs::usual(format, grouping) };
        let mut matrix = as_.matrix(seed, Q, [rows, columns]);
        // Any scale that a half float holds with its minimum: also subnormal and negative ones.
        let mut random = Random::new(seed);
        for (scale, zero) in matrix.scales.iter_mut().zip(&matrix.zeros) {
            let any = f16::from_bits(random.next_u64() as u16);
            if f16::from_f32(any.to_f32() * f32::from(*zero)).is_finite() {
                *scale = any;
            }
        }
        let (_directory, files, packed) = alone(&matrix, format);
        let (a, b) = (ends.0.index(rows), ends.1.index(rows));
        let part = a.min(b)..a.max(b) + 1;
        let bytes = rows_of(&packed, &files, part.clone());
        // The same matrix, those rows alone.
        let per_row = columns / matrix.group;
        let alone = PackedMatrix {
            rows: part.len(),
            codes: matrix.codes[part.start * columns..part.end * columns].to_vec(),
            zeros: matrix.zeros[part.start * per_row..part.end * per_row].to_vec(),
            scales: matrix.scales[part.start * per_row..part.end * per_row].to_vec(),
            ..matrix
        };
        let checked = check(&alone, &bytes);
        prop_assert!(checked.is_ok(), "{format:?} {rows} x {columns}, rows {part:?}: {checked:?}");
    }
}

/// A directory whose tensors and `quantization_config` were changed.
fn changed(
    packed: &PackedAs,
    change: impl FnOnce(&mut Vec<HfTensor>, &mut Value),
) -> (TempDir, Result<ModelSource, ModelError>) {
    let directory = TempDir::new().unwrap();
    let (mut tensors, mut config) = (packed.tensors(5, &model()).unwrap(), packed.config());
    change(&mut tensors, &mut config);
    write_tensors(directory.path(), &model(), &config, tensors.into_iter().map(Ok), 1).unwrap();
    let source = ModelSource::open(directory.path());
    (directory, source)
}

fn refusal<T: std::fmt::Debug>(result: Result<T, ModelError>, parts: &[&str]) {
    let message = result.expect_err("it must be refused").to_string();
    for part in parts {
        assert!(message.contains(part) && !message.contains('\n'), "{message:?} does not say {part:?}");
    }
}

fn tensor<'a>(tensors: &'a mut [HfTensor], end: &str) -> &'a mut HfTensor {
    tensors.iter_mut().find(|tensor| tensor.name.ends_with(end)).unwrap()
}

#[test]
fn settings_that_are_not_served_are_refused_by_key() {
    for (format, key, value, says) in [
        (PackedFormat::Awq, "quant_method", json!("bitsandbytes"), "bitsandbytes"),
        (PackedFormat::Awq, "quant_method", json!("fp8"), "fp8"),
        (PackedFormat::Awq, "quant_method", json!("compressed-tensors"), "awq and gptq"),
        (PackedFormat::Awq, "quant_method", Value::Null, "missing"),
        (PackedFormat::Awq, "quant_method", json!(4), "no text"),
        (PackedFormat::Awq, "bits", json!(8), "only 4"),
        (PackedFormat::Gptq, "bits", json!(3), "only 4"),
        (PackedFormat::Gptq, "bits", json!("4"), "no whole number"),
        (PackedFormat::Gptq, "bits", json!(4.5), "no whole number"),
        (PackedFormat::Gptq, "bits", Value::Null, "missing"),
        (PackedFormat::Gptq, "group_size", Value::Null, "missing"),
        (PackedFormat::Awq, "group_size", json!([128]), "no whole number"),
        (PackedFormat::Awq, "group_size", json!(0), "multiples of 32"),
        (PackedFormat::Awq, "group_size", json!(-2), "multiples of 32"),
        (PackedFormat::Awq, "group_size", json!(48), "multiples of 32"),
        (PackedFormat::Awq, "group_size", json!(u64::MAX), "no whole number"),
        (PackedFormat::Awq, "version", json!("gemv"), "gemv"),
        (PackedFormat::Awq, "version", json!("marlin"), "marlin"),
        (PackedFormat::Awq, "version", json!("exllama"), "exllama"),
        (PackedFormat::Awq, "backend", json!("llm-awq"), "llm-awq"),
        (PackedFormat::Awq, "zero_point", json!("yes"), "no boolean"),
        (PackedFormat::Gptq, "checkpoint_format", json!("marlin"), "marlin"),
        (PackedFormat::Gptq, "is_marlin_format", json!(true), "only false"),
        (PackedFormat::Gptq, "format", json!("gptq_v2"), "gptq_v2"),
        (PackedFormat::Gptq, "pack_dtype", json!("int16"), "int16"),
        (PackedFormat::Gptq, "data_type", json!("fp"), "int"),
        (PackedFormat::Gptq, "desc_act", json!("no"), "no boolean"),
        (PackedFormat::Gptq, "sym", json!(1), "no boolean"),
        (PackedFormat::Gptq, "adapter", json!({ "rank": 8 }), "not served"),
        (PackedFormat::Gptq, "rotation", json!("hadamard"), "not served"),
        (PackedFormat::Gptq, "act_bits", json!(8), "not served"),
    ] {
        let key_path = format!("quantization_config.{key}");
        let (_directory, source) =
            changed(&PackedAs::usual(format, Some(32)), |_, config| config[key] = value);
        refusal(source, &["config.json", &key_path, says]);
    }
    for value in [json!(4), json!([]), json!("awq")] {
        let (_directory, source) =
            changed(&PackedAs::usual(PackedFormat::Awq, Some(32)), |_, config| *config = value);
        refusal(source, &["quantization_config"]);
    }
}

#[test]
fn settings_that_change_nothing_are_taken() {
    for (format, changes) in [
        (
            PackedFormat::Awq,
            json!({ "version": "GEMM", "zero_point": false, "backend": "autoawq", "do_fuse": false }),
        ),
        (
            PackedFormat::Awq,
            json!({ "bits": null, "w_bit": 4, "group_size": null, "q_group_size": 32, "version": null }),
        ),
        (
            PackedFormat::Awq,
            json!({ "format": "gemm", "checkpoint_format": "gemm", "desc_act": true, "sym": true }),
        ),
        (
            PackedFormat::Gptq,
            json!({ "checkpoint_format": null, "act_bits": 16, "dynamic": { "-:lm_head": {} } }),
        ),
        (
            PackedFormat::Gptq,
            json!({ "desc_act": true, "adapter": null, "rotation_config": {}, "format": "gptq" }),
        ),
    ] {
        let packed = PackedAs::usual(format, Some(32));
        let (_directory, source) = changed(&packed, |_, config| {
            for (key, value) in changes.as_object().unwrap() {
                config[key] = value.clone();
            }
        });
        let source = source.unwrap_or_else(|error| panic!("{changes}: {error}"));
        let tensor = source.tensor(Q).unwrap();
        check(&packed.matrix(5, Q, tensor.shape()), &read(&source, Q)).unwrap();
    }
}

#[test]
fn parts_that_do_not_fit_are_refused_by_tensor() {
    type Change = fn(&mut Vec<HfTensor>);
    let q = "model.layers.0.self_attn.q_proj";
    let changes: [(PackedFormat, &str, Change, &str); 20] = [
        (PackedFormat::Awq, "qzeros", |t| t.retain(|t| !t.name.ends_with("q_proj.qzeros")), "missing"),
        (PackedFormat::Awq, "scales", |t| t.retain(|t| !t.name.ends_with("q_proj.scales")), "missing"),
        (PackedFormat::Gptq, "qweight", |t| t.retain(|t| !t.name.ends_with("q_proj.qweight")), "missing"),
        (PackedFormat::Awq, "qweight", |t| tensor(t, "q_proj.qweight").dtype = "F32", "F32"),
        (PackedFormat::Awq, "qzeros", |t| tensor(t, "q_proj.qzeros").dtype = "U32", "U32"),
        (PackedFormat::Awq, "scales", |t| tensor(t, "q_proj.scales").dtype = "I16", "I16"),
        (PackedFormat::Gptq, "g_idx", |t| tensor(t, "q_proj.g_idx").dtype = "F32", "F32"),
        (PackedFormat::Awq, "qweight", |t| tensor(t, "q_proj.qweight").shape = vec![2048], "dimensions"),
        (
            PackedFormat::Awq,
            "qzeros",
            |t| tensor(t, "q_proj.qweight").shape = vec![64, 32],
            "256 outputs of 64 inputs in groups of 32",
        ),
        (PackedFormat::Awq, "qweight", |t| tensor(t, "q_proj.qweight").shape = vec![64, 16], "bytes"),
        (
            PackedFormat::Awq,
            "qweight",
            |t| tensor(t, "q_proj.qweight").shape = vec![usize::MAX, 16],
            "multiples",
        ),
        (
            PackedFormat::Awq,
            "qweight",
            |t| tensor(t, "q_proj.qweight").shape = vec![128, usize::MAX],
            "overflows",
        ),
        (
            PackedFormat::Gptq,
            "qweight",
            |t| tensor(t, "q_proj.qweight").shape = vec![usize::MAX, 16],
            "overflows",
        ),
        (PackedFormat::Awq, "qweight", |t| tensor(t, "q_proj.qweight").shape = vec![0, 16], "empty"),
        (PackedFormat::Gptq, "qweight", |t| tensor(t, "q_proj.qweight").shape = vec![2, 1024], "multiples"),
        (
            PackedFormat::Gptq,
            "qzeros",
            |t| tensor(t, "q_proj.qzeros").shape = vec![16, 4],
            "[4, 16] is expected",
        ),
        (
            PackedFormat::Gptq,
            "scales",
            |t| tensor(t, "q_proj.scales").shape = vec![512],
            "[4, 128] is expected",
        ),
        (PackedFormat::Gptq, "g_idx", |t| tensor(t, "q_proj.g_idx").shape = vec![2, 64], "[128] is expected"),
        (
            PackedFormat::Gptq,
            "g_idx",
            |t| tensor(t, "q_proj.g_idx").data[4] = 4,
            "input 1 is in group 4 of 4",
        ),
        (PackedFormat::Gptq, "g_idx", |t| tensor(t, "q_proj.g_idx").data[7] = 0x80, "input 1 is in group -"),
    ];
    for (format, part, change, says) in changes {
        let (_directory, source) = changed(&PackedAs::usual(format, Some(32)), |tensors, _| change(tensors));
        let name = format!("{q}.{part}");
        refusal(source, &[&name, says]);
    }
}

#[test]
fn errors_name_the_file_of_the_part_that_is_wrong() {
    let packed = PackedAs::usual(PackedFormat::Awq, Some(32));
    let split = |part: &str, change: fn(&mut HfTensor)| {
        let directory = TempDir::new().unwrap();
        let mut tensors = packed.tensors(5, &model()).unwrap();
        let at = tensors.iter().position(|tensor| tensor.name.ends_with(part)).unwrap();
        // The last one lies in the second of two files; the codes lie in the first.
        let mut last = tensors.remove(at);
        change(&mut last);
        tensors.push(last);
        let tensors = tensors.into_iter().map(Ok);
        write_tensors(directory.path(), &model(), &packed.config(), tensors, 2).unwrap();
        let source = ModelSource::open(directory.path());
        (directory, source)
    };
    let second = "/model-00002-of-00002.safetensors: model.layers.0.self_attn.q_proj.";
    for part in ["qzeros", "scales"] {
        let (_directory, source) = split(&format!("q_proj.{part}"), |tensor| tensor.dtype = "F32");
        refusal(source, &[&format!("{second}{part}: "), "F32"]);
    }
    let infinite = |tensor: &mut HfTensor| tensor.data[..2].copy_from_slice(&f16::INFINITY.to_le_bytes());
    let (_directory, source) = split("q_proj.scales", infinite);
    let source = source.unwrap();
    let tensor = source.tensor(Q).unwrap();
    refusal(source.read(tensor, &mut vec![0; tensor.bytes as usize]), &[&format!("{second}scales: ")]);
}

#[test]
fn what_is_computed_in_another_order_or_way_is_refused_by_tensor() {
    let gptq = PackedAs::usual(PackedFormat::Gptq, Some(32));
    // Inputs 3 and 40 change places.
    let (_directory, source) = changed(&gptq, |tensors, config| {
        let g_idx = &mut tensor(tensors, "mlp.down_proj.g_idx").data;
        (g_idx[4 * 3], g_idx[4 * 40]) = (1, 0);
        config["desc_act"] = json!(true);
    });
    refusal(source, &["layers.0.mlp.down_proj.g_idx", "act-order", "desc_act false"]);
    let without = PackedAs { extras: false, ..gptq.clone() };
    let (_directory, source) = changed(&without, |_, config| config["desc_act"] = json!(true));
    refusal(source, &["g_idx", "missing", "desc_act"]);
    // In one group, order is of no importance.
    let whole = PackedAs { group: None, ..without };
    let (_directory, source) = changed(&whole, |_, config| config["desc_act"] = json!(true));
    source.unwrap();
    let (_directory, source) = changed(&gptq, |_, config| config["group_size"] = json!(96));
    refusal(source, &["qweight", "groups of 96", "256 inputs"]);
    let (_directory, source) = changed(&gptq, |_, config| *config = Value::Null);
    refusal(source, &[".qweight", "no quantization_config"]);
    // A format that has other numbers of codes in a word.
    let (_directory, source) =
        changed(&gptq, |_, config| *config = PackedAs::usual(PackedFormat::Awq, Some(32)).config());
    refusal(source, &["qzeros", "1024 outputs of 32 inputs"]);
    for (from, to) in [
        ("mlp.up_proj.qweight", "mlp.experts.0.up_proj.qweight"),
        ("mlp.up_proj.qweight", "mlp.gate_up_proj.qweight"),
        ("self_attn.q_proj.qweight", "self_attn.W_pack.qweight"),
        ("self_attn.q_proj.qweight", "input_layernorm.qweight"),
    ] {
        let (_directory, source) = changed(&gptq, |tensors, _| {
            let tensor = tensor(tensors, from);
            tensor.name = tensor.name.replace(from, to);
        });
        refusal(source, &[to.split('.').nth(1).unwrap()]);
    }
    let (_directory, source) = changed(&gptq, |tensors, _| {
        let mut twice = tensor(tensors, "q_proj.scales").clone();
        twice.name = twice.name.replace("scales", "weight");
        twice.shape = vec![128, 4];
        tensors.push(twice);
    });
    refusal(source, &["q_proj", "the same tensor"]);
}

#[test]
fn a_format_that_is_stated_wrongly_shows_where_zeros_are_said_to_be_8() {
    for (written, stated) in [(PackedFormat::Gptq, "gptq_v2"), (PackedFormat::GptqV2, "gptq")] {
        let packed = PackedAs { symmetric: true, ..PackedAs::usual(written, Some(32)) };
        let (_directory, source) = changed(&packed, |_, config| config["checkpoint_format"] = json!(stated));
        let right = packed.config()["checkpoint_format"].as_str().unwrap().to_owned();
        refusal(source, &["qzeros", &format!("set quantization_config.checkpoint_format to {right}")]);
        let (_directory, source) = changed(&packed, |_, config| {
            config["checkpoint_format"] = json!(stated);
            config["sym"] = json!(false);
        });
        source.unwrap();
        changed(&packed, |_, _| {}).1.unwrap();
    }
}

#[test]
fn numbers_that_half_precision_does_not_hold_are_refused_when_they_are_read() {
    let refused = |format, change: &dyn Fn(&mut Vec<HfTensor>), parts: &[&str]| {
        let (_directory, source) = changed(&PackedAs::usual(format, Some(32)), |tensors, _| change(tensors));
        let source = source.unwrap();
        let tensor = source.tensor(Q).unwrap();
        refusal(source.read(tensor, &mut vec![0; tensor.bytes as usize]), parts);
        // Other rows are not touched by it.
        source.read_rows(tensor, 8..16, &mut vec![0; 8 * tensor.row_bytes()]).unwrap();
    };
    // Output 3 in group 1.
    let at = 2 * (128 + 3);
    for format in FORMATS {
        for bits in [f16::INFINITY, f16::NEG_INFINITY, f16::NAN] {
            let change = |tensors: &mut Vec<HfTensor>| {
                tensor(tensors, "q_proj.scales").data[at..at + 2].copy_from_slice(&bits.to_le_bytes());
            };
            refused(format, &change, &["q_proj.scales", "output 3 in group 1"]);
        }
        let change = |tensors: &mut Vec<HfTensor>| {
            tensor(tensors, "q_proj.scales").data[at..at + 2].copy_from_slice(&f16::MAX.to_le_bytes());
            tensor(tensors, "q_proj.qzeros").data.fill(0x22);
        };
        refused(format, &change, &["q_proj.scales", "65504", "too large"]);
    }
    let change = |tensors: &mut Vec<HfTensor>| tensor(tensors, "q_proj.qzeros").data[1] |= 0xf0;
    refused(PackedFormat::Gptq, &change, &["q_proj.qzeros", "output 3 in group 0", "gptq_v2"]);
}

#[test]
fn scales_in_bf16_are_taken_where_half_precision_holds_them() {
    let packed = PackedAs { symmetric: true, ..PackedAs::usual(PackedFormat::GptqV2, Some(64)) };
    let mut matrix = packed.matrix(5, Q, [128, 128]);
    let (_directory, source) = changed(&packed, |tensors, _| {
        let scales = tensor(tensors, "q_proj.scales");
        scales.dtype = "BF16";
        for (group, line) in scales.data.chunks_mut(2 * 128).enumerate() {
            for (row, bytes) in line.as_chunks_mut().0.iter_mut().enumerate() {
                let scale = bf16::from_f32(f16::from_le_bytes(*bytes).to_f32());
                matrix.scales[row * 2 + group] = f16::from_f32(scale.to_f32());
                *bytes = scale.to_le_bytes();
            }
        }
    });
    check(&matrix, &read(&source.unwrap(), Q)).unwrap();
    let (_directory, source) = changed(&packed, |tensors, _| {
        let scales = tensor(tensors, "q_proj.scales");
        scales.dtype = "BF16";
        scales.data[..2].copy_from_slice(&bf16::from_f32(1e6).to_le_bytes());
    });
    let source = source.unwrap();
    let tensor = source.tensor(Q).unwrap();
    refusal(
        source.read(tensor, &mut vec![0; tensor.bytes as usize]),
        &["q_proj.scales", "output 0 in group 0"],
    );
}

#[test]
fn biases_that_a_family_has_not_must_be_zero() {
    for (dtype, zero, other) in [
        ("F16", vec![0x00, 0x80], vec![0x01, 0x00]),
        ("BF16", vec![0x00, 0x80], vec![0x80, 0x3f]),
        ("F32", vec![0, 0, 0, 0x80], vec![1, 0, 0, 0]),
    ] {
        for end in ["self_attn.q_proj.bias", "self_attn.o_proj.bias", "mlp.down_proj.bias"] {
            let with = |element: &[u8]| {
                changed(&PackedAs::usual(PackedFormat::Gptq, Some(32)), |tensors, _| {
                    let bias = tensor(tensors, end);
                    bias.dtype = dtype;
                    bias.data = zero.repeat(128);
                    bias.data[10 * zero.len()..][..element.len()].copy_from_slice(element);
                })
                .1
            };
            let source = with(&zero).unwrap();
            assert!(!source.config().qkv_bias);
            refusal(with(&other), &[end, "a bias"]);
        }
    }
    let (_directory, source) = changed(&PackedAs::usual(PackedFormat::Gptq, Some(32)), |tensors, _| {
        tensor(tensors, "o_proj.bias").shape = vec![64];
    });
    refusal(source, &["o_proj.bias", "bytes"]);
}

#[test]
fn a_digest_tells_checkpoints_apart_by_any_of_their_parts() {
    let packed = PackedAs::usual(PackedFormat::Gptq, Some(32));
    let digest =
        |change: &dyn Fn(&mut Vec<HfTensor>, &mut Value)| changed(&packed, change).1.unwrap().digest();
    let same = digest(&|_, _| {});
    assert_eq!(same, digest(&|_, _| {}));
    for part in ["q_proj.qweight", "q_proj.qzeros", "q_proj.scales"] {
        assert_ne!(same, digest(&|tensors, _| tensor(tensors, part).data[1] ^= 1), "{part}");
    }
    assert_ne!(same, digest(&|_, config| config["checkpoint_format"] = json!("gptq_v2")));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_changed_bytes_make_the_reader_panic(
        format in prop::sample::select(FORMATS.to_vec()),
        (config, cut) in (prop::bool::weighted(0.3), prop::option::weighted(0.3, any::<prop::sample::Index>())),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        header: bool,
    ) {
        let packed = PackedAs::usual(format, Some(32));
        let (directory, _) = changed(&packed, |_, _| {});
        let path = directory.path().join(if config { "config.json" } else { "model.safetensors" });
        let mut bytes = std::fs::read(&path).unwrap();
        let end = if header { bytes.len().min(5000) } else { bytes.len() };
        for (index, value) in changes {
            bytes[index.index(end)] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        std::fs::write(&path, bytes).unwrap();
        if let Ok(source) = ModelSource::open(directory.path()) {
            for tensor in source.tensors() {
                // Damaged scales and zeros are refused here.
                _ = source.read(tensor, &mut vec![0; tensor.bytes as usize]);
            }
        }
    }

    #[test]
    fn no_changed_header_makes_the_reader_panic(
        format in prop::sample::select(FORMATS.to_vec()),
        tensor in any::<prop::sample::Index>(),
        dtype in prop::sample::select(vec!["I32", "F16", "BF16", "F32", "F8_E4M3", "U8"]),
        shape in prop::collection::vec(
            prop_oneof![0..300_usize, Just(usize::MAX), Just(1 << 40), Just(1 << 61)], 0..4),
        bytes in prop::option::of(0..20_000_usize),
        name in prop::option::of("(model\\.layers\\.[0-9]{1,3}\\.(mlp|self_attn)\\.[a-z]_proj|lm_head|model\\.norm)\\.(qweight|qzeros|scales|g_idx|bias|weight)"),
    ) {
        let (_directory, source) = changed(&PackedAs::usual(format, Some(32)), |tensors, _| {
            let index = tensor.index(tensors.len());
            let tensor = &mut tensors[index];
            (tensor.dtype, tensor.shape) = (dtype, shape);
            tensor.data.resize(bytes.unwrap_or(tensor.data.len()), 1);
            tensor.name = name.unwrap_or_else(|| tensor.name.clone());
        });
        if let Ok(source) = source {
            for tensor in source.tensors() {
                _ = source.read(tensor, &mut vec![0; tensor.bytes as usize]);
            }
        }
    }
}
