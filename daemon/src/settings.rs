//! Configuration → what a worker is told.

use pagedd_config::{Amount, ComputeDtype, Device, KvDtype, KvMemory, Model};
use pagedd_wire::PROTOCOL;
use pagedd_wire::worker as wire;

/// First frame to a model's worker.
pub fn hello(config: &Model) -> wire::Hello {
    wire::Hello {
        protocol: PROTOCOL,
        path: config.path.display().to_string(),
        device: match config.device {
            Device::Cpu => wire::Device::Cpu,
        },
        dtype: match config.dtype {
            ComputeDtype::Auto => wire::Dtype::Auto,
            ComputeDtype::F32 => wire::Dtype::F32,
        },
        kv_dtype: match config.kv_dtype {
            KvDtype::F16 => wire::KvDtype::F16,
            KvDtype::F32 => wire::KvDtype::F32,
        },
        block_size: config.block_size.0,
        kv_memory: match config.kv_memory {
            KvMemory::Auto => wire::KvMemory::Auto,
            KvMemory::Given(Amount::Percent(percent)) => {
                wire::KvMemory::Percent((f64::from(percent.hundredths()) / 100.0) as f32)
            }
            KvMemory::Given(Amount::Bytes(bytes)) => wire::KvMemory::Bytes(bytes.0),
            KvMemory::Given(Amount::Tokens(tokens)) => wire::KvMemory::Tokens(u64::from(tokens.0)),
        },
        max_model_len: config.max_model_len.map(|tokens| tokens.0),
        max_num_seqs: config.max_num_seqs,
        max_num_batched_tokens: config.max_num_batched_tokens.0,
        threads: config
            .threads
            .map(Into::into)
            .or_else(|| u32::try_from(pagedd_host::threads::allowed()).ok()),
        deterministic: false,
        measure: true,
        weights_fd: false,
        kv_fd: false,
        weights_bytes: 0,
        kv_bytes: 0,
        known_cost: None,
    }
}
