use pagedd_model::testing::{PackedAs, PackedFormat, TinyModel, write_gguf, write_packed_directory};
use pagedd_wire::PROTOCOL;
use pagedd_wire::worker::Hello;
use tempfile::TempDir;

use super::*;
use crate::{Fds, ModelRunner};

/// Of [`TinyModel`]: two layers, two KV heads of 16 elements.
const TOKEN_ELEMENTS: u64 = 2 * 2 * 2 * 16;

fn tiny(model: &TinyModel) -> (TempDir, Options) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    write_gguf(&path, 7, model).unwrap();
    let options = Options {
        model: path,
        device: Device::Cpu,
        dtype: Dtype::Auto,
        kv_dtype: KvDtype::F16,
        kv_memory: KvMemory::Tokens(1000),
        block_size: 32,
        max_num_seqs: 4,
        max_num_batched_tokens: 16,
        max_model_len: None,
        deterministic: false,
        taken: 0,
    };
    (dir, options)
}

#[test]
fn what_is_planned_on_the_cpu_is_what_a_worker_makes() {
    for (dtype, kv_dtype) in [(Dtype::Auto, KvDtype::F16), (Dtype::F32, KvDtype::F32)] {
        let (_dir, options) = tiny(&TinyModel::default());
        let options = Options { dtype, kv_dtype, ..options };
        let hello = Hello {
            protocol: PROTOCOL,
            path: options.model.to_str().unwrap().to_owned(),
            device: Device::Cpu,
            dtype,
            kv_dtype,
            block_size: options.block_size,
            kv_memory: options.kv_memory,
            max_model_len: None,
            max_num_seqs: options.max_num_seqs,
            max_num_batched_tokens: options.max_num_batched_tokens,
            threads: Some(1),
            deterministic: false,
            measure: false,
            weights_fd: false,
            kv_fd: false,
            weights_bytes: 0,
            kv_bytes: 0,
            known_cost: None,
            algorithms: Vec::new(),
        };
        let runner = ModelRunner::load(&hello, Fds::default(), &mut |_| true).unwrap();
        let (sum, info) = (Sum::new(&options, Ok(1 << 30)).unwrap(), runner.info());
        assert_eq!((sum.weight_bytes, sum.overhead_bytes), (info.weight_bytes, 0));
        assert_eq!((sum.block_bytes, sum.blocks), (info.block_bytes, Ok(info.blocks)));
        assert_eq!((sum.parameters, sum.max_model_len), (info.parameters, info.max_model_len));
    }
}

#[test]
fn a_checkpoint_in_four_bits_takes_five_eighths_of_a_byte_an_element_on_the_cpu_and_on_a_gpu() {
    let model = TinyModel { hidden: 128, feed_forward: 256, head_dim: 32, ..TinyModel::default() };
    for format in [PackedFormat::Awq, PackedFormat::Gptq] {
        let (dir, options) = tiny(&model);
        write_packed_directory(dir.path(), 7, &model, &PackedAs::usual(format, Some(128))).unwrap();
        let options = Options { model: dir.path().to_owned(), ..options };
        // The embedding and five vectors are in single precision; Q, K, V, output and three of the feed-forward layer in four bits.
        let (embedding, vectors) = (272 * 128, 5 * 128);
        let packed = 2 * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 256);
        let sum = Sum::new(&options, Ok(1 << 30)).unwrap();
        assert_eq!(sum.parameters, embedding + vectors + packed);
        assert_eq!(sum.weight_bytes, 4 * (embedding + vectors) + packed * 20 / 32, "{format:?}");
        let cuda = Options { device: Device::Cuda { ordinal: 0 }, kv_dtype: KvDtype::Bf16, ..options };
        let sum = Sum::new(&cuda, Ok(1 << 40)).unwrap();
        // The embedding, which is the output as well, in bfloat16.
        assert_eq!(sum.weight_bytes, 2 * embedding + packed * 20 / 32 + 4 * vectors, "{format:?}");
    }
}

#[test]
fn on_a_gpu_matrices_have_two_bytes_an_element_and_vectors_four() {
    for tied_embeddings in [true, false] {
        let (_dir, options) = tiny(&TinyModel { tied_embeddings, ..TinyModel::default() });
        let cuda = Options { device: Device::Cuda { ordinal: 0 }, kv_dtype: KvDtype::Bf16, ..options };
        let sum = Sum::new(&cuda, Ok(1 << 40)).unwrap();
        // Five vectors of 64 elements; every matrix has rows or columns of 64 and so no rest.
        let vectors = 5 * 64;
        assert_eq!(sum.weight_bytes, 2 * (sum.parameters - vectors) + 4 * vectors, "tied {tied_embeddings}");
        assert_eq!((sum.token_bytes, sum.block_bytes), (2 * TOKEN_ELEMENTS, 32 * 2 * TOKEN_ELEMENTS));
        assert_eq!(sum.blocks, Ok(32));
        assert!(sum.overhead_bytes >= 1 << 30, "steps and the driver have memory, too");
    }
}

#[test]
fn in_fp8_a_token_has_a_byte_an_element_and_a_scale_for_each_row_of_a_head() {
    let (_dir, options) = tiny(&TinyModel::default());
    let cuda = Options { device: Device::Cuda { ordinal: 0 }, kv_dtype: KvDtype::Fp8, ..options };
    let sum = Sum::new(&cuda, Ok(1 << 40)).unwrap();
    let token = TOKEN_ELEMENTS + 4 * TOKEN_ELEMENTS / 16;
    assert_eq!((sum.token_bytes, sum.block_bytes, sum.blocks), (token, 32 * token, Ok(32)));
}

#[test]
fn a_share_of_what_is_free_is_of_what_weights_scratch_and_other_models_leave() {
    let (_dir, options) = tiny(&TinyModel::default());
    let cuda = Options {
        device: Device::Cuda { ordinal: 0 },
        kv_dtype: KvDtype::Bf16,
        kv_memory: KvMemory::Percent(50.0),
        ..options
    };
    let sum = Sum::new(&cuda, Ok(1 << 40)).unwrap();
    let before = sum.weight_bytes + sum.overhead_bytes;
    let block = 32 * 2 * TOKEN_ELEMENTS;
    assert_eq!(Sum::new(&cuda, Ok(before + 10 * block)).unwrap().blocks, Ok(5));
    let third = Options { taken: 4 * block, ..cuda.clone() };
    let sum = Sum::new(&third, Ok(before + 10 * block)).unwrap();
    assert_eq!((sum.free, sum.blocks), (Ok(before + 6 * block), Ok(3)));
    let error = NoBlocks::NoMemory { wanted: before, free: before - 1 };
    let sum = Sum::new(&cuda, Ok(before - 1)).unwrap();
    assert_eq!((sum.json()["problem"].as_str(), sum.blocks), (Some(&*error.to_string()), Err(error)));
}

#[test]
fn where_nothing_is_known_of_the_device_the_sum_is_there_all_the_same() {
    let (_dir, options) = tiny(&TinyModel::default());
    let unknown = || Err("no NVIDIA driver".to_owned());
    let cuda = Options { device: Device::Cuda { ordinal: 0 }, kv_dtype: KvDtype::Bf16, ..options };
    let json = Sum::new(&cuda, unknown()).unwrap().json();
    assert_eq!(json["kv"], json!({"blocks": 32, "tokens": 1024, "bytes": 32 * 32 * 2 * TOKEN_ELEMENTS}));
    assert_eq!((&json["free_bytes"], &json["free_unknown"]), (&json!(null), &json!("no NVIDIA driver")));
    assert_eq!(json["problem"], json!(null));
    let share = Options { kv_memory: KvMemory::Auto, ..cuda };
    let json = Sum::new(&share, unknown()).unwrap().json();
    assert_eq!((&json["kv"], &json["problem"]), (&json!(null), &json!(null)));
    assert!(json["weight_bytes"].as_u64().is_some_and(|bytes| bytes > 0));
}

#[test]
fn what_pagedctl_writes_is_read() {
    let amounts = ["auto", "4096B", "5000tokens", "12.5%"].map(|text| kv_memory(text).unwrap());
    let expected = [KvMemory::Auto, KvMemory::Bytes(4096), KvMemory::Tokens(5000), KvMemory::Percent(12.5)];
    assert_eq!(amounts, expected);
    assert_eq!(["cpu", "cuda:7"].map(device), [Ok(Device::Cpu), Ok(Device::Cuda { ordinal: 7 })]);
    let types =
        [("f16", KvDtype::F16), ("f32", KvDtype::F32), ("bf16", KvDtype::Bf16), ("fp8", KvDtype::Fp8)];
    assert!(types.iter().all(|&(text, expected)| kv_dtype(text) == Ok(expected)));
    assert!(["", "auto", "e4m3", "fp8_e4m3"].iter().all(|text| kv_dtype(text).is_err()));
    assert!(["", "B", "12", "-1B", "tokens", "x%"].iter().all(|text| kv_memory(text).is_err()));
    assert!(["gpu", "cuda", "cuda:", "cuda:x"].iter().all(|text| device(text).is_err()));
}
