//! Configuration → what a worker is told.

use std::ffi::OsString;

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
            Device::Cuda { ordinal } => wire::Device::Cuda { ordinal },
        },
        dtype: match config.dtype {
            ComputeDtype::Auto => wire::Dtype::Auto,
            ComputeDtype::F32 => wire::Dtype::F32,
        },
        kv_dtype: match config.kv_dtype {
            KvDtype::F16 => wire::KvDtype::F16,
            KvDtype::F32 => wire::KvDtype::F32,
            KvDtype::Bf16 => wire::KvDtype::Bf16,
            KvDtype::Fp8 => wire::KvDtype::Fp8,
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
        deterministic: config.deterministic,
        measure: true,
        weights_fd: false,
        kv_fd: false,
        weights_bytes: 0,
        kv_bytes: 0,
        known_cost: None,
        algorithms: Vec::new(),
    }
}

/// What a worker on `device` finds in its environment beside what every child does.
///
/// GPUs are counted as the bus has them: so they are in `nvidia-smi`, and so every process of every daemon counts them. Where CUDA's libraries
/// are may be known to the environment alone.
pub fn device_env(device: Device) -> Vec<(OsString, OsString)> {
    const LIBRARIES: &str = "LD_LIBRARY_PATH";
    match device {
        Device::Cpu => Vec::new(),
        Device::Cuda { .. } => {
            let libraries = std::env::var_os(LIBRARIES).map(|path| (LIBRARIES.into(), path));
            std::iter::once(("CUDA_DEVICE_ORDER".into(), "PCI_BUS_ID".into())).chain(libraries).collect()
        }
    }
}
