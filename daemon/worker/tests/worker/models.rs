//! Models for tests, and how they are loaded.

use std::collections::HashMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use pagedd_model::testing::{TinyModel, write_gguf};
use pagedd_wire::PROTOCOL;
use pagedd_wire::worker::{Arena, Device, Dtype, Hello, KvDtype, KvMemory};
use pagedd_worker::{Fds, ModelRunner};
use tempfile::TempDir;

/// The real model.
pub fn real() -> PathBuf {
    let path = std::env::var_os("PAGEDD_TEST_MODEL")
        .map_or_else(|| repository().join(".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf"), PathBuf::from);
    assert!(
        path.exists(),
        "{} is missing: run `make model`, or name the file in PAGEDD_TEST_MODEL",
        path.display()
    );
    path
}

pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A tiny model on disk.
pub fn tiny(model: &TinyModel) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    write_gguf(&path, 7, model).unwrap();
    (dir, path)
}

pub fn hello(path: &Path, dtype: Dtype) -> Hello {
    Hello {
        protocol: PROTOCOL,
        path: path.to_str().unwrap().to_owned(),
        device: Device::Cpu,
        dtype,
        kv_dtype: match dtype {
            Dtype::Auto => KvDtype::F16,
            Dtype::F32 => KvDtype::F32,
        },
        block_size: 16,
        kv_memory: KvMemory::Tokens(16_384),
        max_model_len: None,
        max_num_seqs: 64,
        max_num_batched_tokens: 512,
        threads: Some(2),
        deterministic: false,
        measure: false,
        weights_fd: false,
        kv_fd: false,
        weights_bytes: 0,
        kv_bytes: 0,
        known_cost: None,
    }
}

pub fn load(hello: &Hello) -> ModelRunner {
    ModelRunner::load(hello, Fds::default(), &mut |_| true).unwrap()
}

/// The real model; its weights are packed once for all tests.
pub fn load_real(dtype: Dtype, change: impl FnOnce(&mut Hello)) -> ModelRunner {
    static WEIGHTS: Mutex<Option<HashMap<bool, OwnedFd>>> = Mutex::new(None);
    let mut hello = hello(&real(), dtype);
    change(&mut hello);
    let mut weights = WEIGHTS.lock().unwrap_or_else(PoisonError::into_inner);
    let weights = weights.get_or_insert_default();
    let kept = weights.get(&(dtype == Dtype::F32)).map(|fd| fd.try_clone().unwrap());
    let reused = kept.is_some();
    let runner = ModelRunner::load(&hello, Fds { weights: kept, kv: None }, &mut |_| true).unwrap();
    assert_eq!(runner.info().weights_reused, reused);
    weights.insert(dtype == Dtype::F32, dup(&runner, Arena::Weights));
    runner
}

pub fn dup(runner: &ModelRunner, arena: Arena) -> OwnedFd {
    runner.arena(arena).as_fd().try_clone_to_owned().unwrap()
}

/// `count` tokens that look like nothing, the same for the same seed.
pub fn tokens(seed: u64, count: usize, vocab: u32) -> Vec<u32> {
    let mut random = pagedd_model::testing::Random::new(seed);
    (0..count).map(|_| (random.next_u64() % u64::from(vocab)) as u32).collect()
}
