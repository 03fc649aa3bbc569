//! Tiny models with random weights, written to disk: for tests of this crate and of those that load models.
//!
//! **Owns** the writers. **Never** part of a release: behind the feature `testing`.
//!
//! The same seed gives the same weights in every format (before rounding to the element type), so that a GGUF file and a
//! directory can be compared. Block-quantised tensors are random blocks of a sensible magnitude.

mod gguf;
mod hf;
mod packed;
mod random;
mod vocabulary;

use std::io;
use std::path::Path;

use pagedd_core::{TensorType, Tokens};

use crate::check;
use crate::config::{Architecture, ModelConfig};
use crate::rope::{Rope, RopePairing, RopeScaling};
use crate::tensor::{LayerTensor, TensorRole};

pub use gguf::{GgufTensor, GgufValue, GgufWriter};
pub use hf::{HfTensor, write_tensors};
pub use packed::{PackedAs, PackedFormat, PackedMatrix};
pub use random::Random;
pub use vocabulary::{CHAT_TEMPLATE, IM_END, IM_START, VOCAB};

/// What tiny model to write.
#[derive(Clone, PartialEq, Debug)]
pub struct TinyModel {
    /// The family.
    pub architecture: Architecture,
    /// Number of layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the feed-forward layer.
    pub feed_forward: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Longest sequence.
    pub context: u32,
    /// The output matrix is the embedding.
    pub tied_embeddings: bool,
    /// Scaling of `RoPE`. `Llama3` is for directories only, `Factors` for GGUF only.
    pub scaling: RopeScaling,
    /// Element type of every matrix. Vectors are F32 in GGUF, and of this type in directories.
    pub ty: TensorType,
}

impl Default for TinyModel {
    fn default() -> Self {
        Self {
            architecture: Architecture::Llama,
            layers: 2,
            hidden: 64,
            feed_forward: 96,
            heads: 4,
            kv_heads: 2,
            head_dim: 16,
            context: 512,
            tied_embeddings: true,
            scaling: RopeScaling::None,
            ty: TensorType::F32,
        }
    }
}

impl TinyModel {
    /// The default model with matrices of `ty`: wide enough for blocks of 256 where the type has them.
    #[must_use]
    pub fn of_type(ty: TensorType) -> Self {
        let tiny = Self { ty, ..Self::default() };
        if ty.block_elements() > 32 {
            Self { hidden: 256, feed_forward: 512, head_dim: 64, ..tiny }
        } else {
            tiny
        }
    }

    /// The configuration that a reader of the written model finds.
    #[must_use]
    pub fn config(&self, pairing: RopePairing) -> ModelConfig {
        ModelConfig {
            architecture: self.architecture,
            layers: self.layers,
            hidden: self.hidden,
            feed_forward: self.feed_forward,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            vocab: VOCAB,
            context: Tokens(self.context),
            rms_eps: 1e-5,
            rope: Rope { base: 10_000.0, pairing, scaling: self.scaling.clone() },
            tied_embeddings: self.tied_embeddings,
            qkv_bias: self.architecture == Architecture::Qwen2,
        }
    }

    /// Pairing of the GGUF files of this family.
    fn gguf_pairing(&self) -> RopePairing {
        match self.architecture {
            Architecture::Llama => RopePairing::Interleaved,
            Architecture::Qwen2 => RopePairing::Halves,
        }
    }

    /// Every tensor's role and `[out, in]`.
    fn tensors(&self) -> Vec<(TensorRole, [usize; 2])> {
        let config = self.config(RopePairing::Halves);
        check::roles(&config).map(|role| (role, check::shape_of(&config, role))).collect()
    }

    /// Weights of one tensor with rows in the order of halves.
    fn weights(seed: u64, role: TensorRole, [rows, columns]: [usize; 2]) -> Vec<f32> {
        let mut random = Random::new(seed).branch(&role.to_string());
        let (centre, spread) = match role {
            TensorRole::OutputNorm | TensorRole::Layer(_, LayerTensor::AttnNorm | LayerTensor::FfnNorm) => {
                (1.0, 0.2)
            }
            TensorRole::Layer(_, tensor) if tensor.is_bias() => (0.0, 0.2),
            _ => (0.0, 2.0 / (columns as f32).sqrt()),
        };
        (0..rows * columns).map(|_| centre + spread * random.signed()).collect()
    }
}

/// Writes a GGUF file.
///
/// # Errors
/// The file cannot be written.
pub fn write_gguf(path: &Path, seed: u64, model: &TinyModel) -> io::Result<()> {
    std::fs::write(path, gguf::tiny(seed, model).bytes())
}

/// Writes a GGUF file with a vocabulary of `entries` and `merges`, as large as those of models in use.
///
/// # Errors
/// The file cannot be written.
pub fn write_gguf_with_vocabulary(
    path: &Path,
    seed: u64,
    model: &TinyModel,
    entries: usize,
    merges: usize,
) -> io::Result<()> {
    std::fs::write(path, gguf::with_vocabulary(seed, model, entries, merges).bytes())
}

/// Writes a Llama GGUF file of one element type: short for [`write_gguf`].
///
/// # Errors
/// The file cannot be written.
pub fn write_tiny_llama(path: &Path, seed: u64, model: &TinyModel) -> io::Result<()> {
    write_gguf(path, seed, &TinyModel { architecture: Architecture::Llama, ..model.clone() })
}

/// The writer of a tiny model, for tests that change it before it is written.
#[must_use]
pub fn gguf_writer(seed: u64, model: &TinyModel) -> GgufWriter {
    gguf::tiny(seed, model)
}

/// Writes a Hugging Face directory with `shards` weight files (1: without an index). `model.ty` is F32, F16 or BF16.
///
/// # Errors
/// A file cannot be written, or the element type has no safetensors name.
pub fn write_directory(directory: &Path, seed: u64, model: &TinyModel, shards: usize) -> io::Result<()> {
    hf::write(directory, seed, model, shards)
}

/// Writes a Hugging Face directory whose layers are packed into four bits. `model.ty` is of the other tensors.
///
/// # Errors
/// As [`write_directory`].
pub fn write_packed_directory(
    directory: &Path,
    seed: u64,
    model: &TinyModel,
    packed: &PackedAs,
) -> io::Result<()> {
    packed.write(directory, seed, model)
}

/// Writes a Hugging Face directory with the weights that the numbers of [`write_packed_directory`] stand for, in the type `model.ty`.
///
/// # Errors
/// As [`write_directory`].
pub fn write_unpacked_directory(
    directory: &Path,
    seed: u64,
    model: &TinyModel,
    packed: &PackedAs,
) -> io::Result<()> {
    packed.write_unpacked(directory, seed, model)
}
