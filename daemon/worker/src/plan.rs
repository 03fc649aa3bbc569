//! `pagedd-worker plan`: what a model takes of its device, summed up before anything is loaded.
//!
//! **Owns** the sum, and its form as JSON for `pagedctl plan`. **Never** makes an arena or reads a weight.
//!
//! It is the arithmetic by which a worker sizes its arenas. On the CPU what is printed is what comes; on a GPU it allows for what a worker
//! leaves to steps and to the driver beside them.

use std::path::PathBuf;
use std::process::ExitCode;

use pagedd_kernels::{DecoderForms, DeviceKvElement, KvElement, KvLayout};
use pagedd_model::{ModelConfig, ModelSource};
use pagedd_wire::worker::{Device, Dtype, KvDtype, KvMemory};
use serde_json::{Value, json};

use crate::forms;
use crate::load::LoadError;
use crate::memory::{self, KvRequest, KvSizeError};
use crate::weights::Places;

/// What is planned.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// A GGUF file or a Hugging Face directory
    #[arg(long, value_name = "PATH")]
    model: PathBuf,
    /// cpu, or a GPU: cuda:N
    #[arg(long, default_value = "cpu", value_parser = device)]
    device: Device,
    /// Arithmetic of the products with the weights
    #[arg(long, default_value = "auto", value_name = "auto|f32", value_parser = dtype)]
    dtype: Dtype,
    /// Element type of the KV blocks
    #[arg(long, default_value = "f16", value_name = "f16|f32|bf16|fp8", value_parser = kv_dtype)]
    kv_dtype: KvDtype,
    /// Memory of the KV blocks: auto, or for example 1000000B, 5000tokens or 12.5%
    #[arg(long, default_value = "auto", value_parser = kv_memory)]
    kv_memory: KvMemory,
    /// Tokens of a KV block
    #[arg(long, default_value_t = 16)]
    block_size: u32,
    /// Most sequences of one step
    #[arg(long, default_value_t = 64)]
    max_num_seqs: u32,
    /// Most tokens of one step
    #[arg(long, default_value_t = 512)]
    max_num_batched_tokens: u32,
    /// Longest sequence, in tokens [default: the model's context]
    #[arg(long)]
    max_model_len: Option<u32>,
    /// A row's bits depend on its own tokens alone
    #[arg(long)]
    deterministic: bool,
    /// Bytes that other models take of the device before this one
    #[arg(long, default_value_t = 0, value_name = "BYTES")]
    taken: u64,
}

fn device(text: &str) -> Result<Device, String> {
    let ordinal = || text.strip_prefix("cuda:")?.parse().ok();
    match text {
        "cpu" => Ok(Device::Cpu),
        _ => ordinal().map(|ordinal| Device::Cuda { ordinal }).ok_or_else(|| "use cpu or cuda:N".to_owned()),
    }
}

fn dtype(text: &str) -> Result<Dtype, String> {
    match text {
        "auto" => Ok(Dtype::Auto),
        "f32" => Ok(Dtype::F32),
        _ => Err("use auto or f32".to_owned()),
    }
}

fn kv_dtype(text: &str) -> Result<KvDtype, String> {
    match text {
        "f16" => Ok(KvDtype::F16),
        "f32" => Ok(KvDtype::F32),
        "bf16" => Ok(KvDtype::Bf16),
        "fp8" => Ok(KvDtype::Fp8),
        _ => Err("use f16, f32, bf16 or fp8".to_owned()),
    }
}

fn kv_memory(text: &str) -> Result<KvMemory, String> {
    let bytes = || text.strip_suffix('B')?.parse().ok().map(KvMemory::Bytes);
    let tokens = || text.strip_suffix("tokens")?.parse().ok().map(KvMemory::Tokens);
    let percent = || text.strip_suffix('%')?.parse().ok().map(KvMemory::Percent);
    match text {
        "auto" => Ok(KvMemory::Auto),
        _ => bytes()
            .or_else(tokens)
            .or_else(percent)
            .ok_or_else(|| "use auto, or for example 1000000B, 5000tokens or 12.5%".to_owned()),
    }
}

/// Why there is no number of KV blocks.
#[derive(thiserror::Error, PartialEq, Debug)]
pub enum NoBlocks {
    /// It follows from what is free, which is not known.
    #[error("kv_memory is a share of what is free, and that is not known")]
    FreeUnknown,
    /// What comes before the KV blocks does not fit.
    #[error("weights and scratch memory take {wanted} bytes, {free} bytes are free")]
    NoMemory {
        /// Both.
        wanted: u64,
        /// What the device has, without what other models take.
        free: u64,
    },
    /// The setting does not fit.
    #[error(transparent)]
    Size(#[from] KvSizeError),
}

/// What a model takes of its device.
#[derive(PartialEq, Debug)]
pub struct Sum {
    /// `general.architecture` or `model_type`.
    pub architecture: String,
    /// Number of weights.
    pub parameters: u64,
    /// Longest sequence, in tokens.
    pub max_model_len: u32,
    /// Bytes of the weights arena.
    pub weight_bytes: u64,
    /// Bytes beside weights and KV blocks.
    pub overhead_bytes: u64,
    /// Bytes of keys and values of a token, all layers.
    pub token_bytes: u64,
    /// Bytes of a block, all layers.
    pub block_bytes: u64,
    /// Tokens of a block.
    pub block_size: u32,
    /// Bytes that the device has free, other models' share taken away; or one line that says why it is not known.
    pub free: Result<u64, String>,
    /// Blocks of the KV arena.
    pub blocks: Result<u32, NoBlocks>,
}

impl Sum {
    /// Sums up a model, where its device has `free` bytes.
    ///
    /// # Errors
    /// The model cannot be read, or has a shape that is not served.
    pub fn new(options: &Options, free: Result<u64, String>) -> Result<Self, LoadError> {
        let source = ModelSource::open(&options.model)?;
        let config = source.config();
        let kv = KvBytes::new(config, options.block_size, options.kv_dtype)?;
        let context = config.context.0;
        let request = KvRequest {
            memory: options.kv_memory,
            block_size: options.block_size,
            block_bytes: kv.block,
            max_num_seqs: options.max_num_seqs,
            max_model_len: options.max_model_len.map_or(context, |limit| limit.min(context)),
            auto_percent: KvRequest::auto_percent_of(options.device),
        };
        let (weight_bytes, overhead_bytes) = match options.device {
            Device::Cpu => (Places::new(&source, options.dtype == Dtype::F32)?.bytes as u64, 0),
            Device::Cuda { .. } => {
                let forms = forms::forms(&source);
                let overhead = gpu_overhead(config, &forms, options, request.max_model_len)?;
                (forms::weight_bytes(&source, &forms), overhead)
            }
        };
        let free = free.map(|free| free.saturating_sub(options.taken));
        Ok(Self {
            architecture: config.architecture.to_string(),
            parameters: source.tensors().map(|tensor| tensor.rows as u64 * tensor.columns as u64).sum(),
            max_model_len: request.max_model_len,
            weight_bytes,
            overhead_bytes,
            token_bytes: kv.token,
            block_bytes: request.block_bytes,
            block_size: options.block_size,
            blocks: blocks(&request, weight_bytes + overhead_bytes, free.as_ref().ok().copied()),
            free,
        })
    }

    /// As an object of JSON: sizes in bytes, `null` for what is not known.
    pub fn json(&self) -> Value {
        let kv = |blocks: &u32| {
            json!({
                "blocks": blocks,
                "tokens": u64::from(*blocks) * u64::from(self.block_size),
                "bytes": u64::from(*blocks) * self.block_bytes,
            })
        };
        let problem = match &self.blocks {
            Ok(_) | Err(NoBlocks::FreeUnknown) => None,
            Err(error @ (NoBlocks::NoMemory { .. } | NoBlocks::Size(_))) => Some(error.to_string()),
        };
        json!({
            "architecture": self.architecture,
            "parameters": self.parameters,
            "max_model_len": self.max_model_len,
            "weight_bytes": self.weight_bytes,
            "overhead_bytes": self.overhead_bytes,
            "token_bytes": self.token_bytes,
            "block_bytes": self.block_bytes,
            "block_size": self.block_size,
            "free_bytes": self.free.as_ref().ok(),
            "free_unknown": self.free.as_ref().err(),
            "kv": self.blocks.as_ref().ok().map(kv),
            "problem": problem,
        })
    }
}

/// Blocks of the arena of `request`, where `before` bytes are taken first of `free`.
fn blocks(request: &KvRequest, before: u64, free: Option<u64>) -> Result<u32, NoBlocks> {
    match (request.memory, free) {
        (KvMemory::Auto | KvMemory::Percent(_), None) => Err(NoBlocks::FreeUnknown),
        (KvMemory::Bytes(_) | KvMemory::Tokens(_), None) => Ok(request.blocks(u64::MAX)?),
        (_, Some(free)) => match free.checked_sub(before) {
            Some(available) => Ok(request.blocks(available)?),
            None => Err(NoBlocks::NoMemory { wanted: before, free }),
        },
    }
}

/// What a worker takes of a GPU beside weights and KV blocks: by its own arithmetic.
#[cfg(feature = "cuda")]
fn gpu_overhead(
    config: &ModelConfig,
    forms: &DecoderForms,
    options: &Options,
    context: u32,
) -> Result<u64, LoadError> {
    let (seqs, tokens) = (options.max_num_seqs, options.max_num_batched_tokens);
    let steps = crate::gpu::Steps { seqs, tokens, context, deterministic: options.deterministic };
    crate::gpu::overhead_bytes(config, forms, &steps)
}

/// Where no GPU can be used, about what large steps take.
#[cfg(not(feature = "cuda"))]
#[allow(clippy::unnecessary_wraps, reason = "with GPU support it can fail")]
fn gpu_overhead(_: &ModelConfig, _: &DecoderForms, _: &Options, _: u32) -> Result<u64, LoadError> {
    Ok(3 << 30)
}

/// Bytes of keys and values, all layers.
struct KvBytes {
    token: u64,
    block: u64,
}

impl KvBytes {
    /// A GPU's blocks have the same sizes as the host's with elements of as many bytes; in fp8, each token's row of a head has its scale beside it.
    fn new(config: &ModelConfig, block_size: u32, kv_dtype: KvDtype) -> Result<Self, LoadError> {
        let d = config.head_dim;
        let (element, row) = match kv_dtype {
            KvDtype::F16 => (KvElement::F16, d * KvElement::F16.bytes()),
            KvDtype::F32 => (KvElement::F32, d * KvElement::F32.bytes()),
            KvDtype::Bf16 => (KvElement::F16, DeviceKvElement::Half.row_bytes(d)),
            KvDtype::Fp8 => (KvElement::F16, DeviceKvElement::E4m3.row_bytes(d)),
        };
        // What the host refuses no GPU takes.
        KvLayout::new(config.layers, config.kv_heads, d, block_size as usize, element)
            .map_err(|problem| LoadError::Shape { item: "key-value cache", problem })?;
        let token = (config.layers * 2 * config.kv_heads * row) as u64;
        Ok(Self { token, block: token * u64::from(block_size) })
    }
}

/// Bytes that a worker on `device` could take now.
fn free(device: Device) -> Result<u64, String> {
    match device {
        Device::Cpu => memory::available().ok_or_else(|| "the system does not say".to_owned()),
        Device::Cuda { ordinal } => gpu_free(ordinal),
    }
}

/// What this process's own context takes is not free; a worker has one, too.
#[cfg(feature = "cuda")]
fn gpu_free(ordinal: u32) -> Result<u64, String> {
    let line = |error: pagedd_kernels::cuda::CudaError| error.to_string();
    let device = pagedd_kernels::cuda::Device::open(ordinal as usize).map_err(line)?;
    device.memory().map(|(free, _)| free as u64).map_err(line)
}

#[cfg(not(feature = "cuda"))]
fn gpu_free(_: u32) -> Result<u64, String> {
    Err("this pagedd-worker was built without GPU support; build it with `make build-gpu`".to_owned())
}

/// Prints the sum.
pub fn run(options: &Options) -> ExitCode {
    match Sum::new(options, free(options.device)) {
        Ok(sum) => {
            println!("{}", sum.json());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{}", error.to_string().replace('\n', "; "));
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests;
