//! Models that are made up: the shapes of published models with random weights, for measuring and for tests.
//!
//! **Owns** the table of shapes, and what every element of a weight is. **Never** opens a file.
//!
//! Matrices and biases are normal numbers around 0, norms are 1, everything is BF16. With [`FOUR_BITS`] behind the name matrices are blocks of
//! `Q4_1` instead, whose codes are as likely as one another. An element is a function of the model's name, the tensor's name and its index
//! alone, so that rows can be made in any order, by any number of threads, or on a device.

mod four_bits;
mod normal;
mod text;

use std::ops::Range;
use std::path::Path;

use pagedd_core::{TensorType, Tokens};

use crate::check;
use crate::config::{Architecture, ModelConfig};
use crate::error::{Fault, ModelError};
use crate::rope::{Rope, RopePairing, RopeScaling};
use crate::source::Parts;
use crate::tensor::{TensorInfo, TensorRole};

/// What the path of a synthetic model begins with.
const PREFIX: &str = "synthetic:";
/// What stands behind the name where matrices have four bits.
const FOUR_BITS: &str = ":q4_1";
/// Deviation of weights: what published models start their training with.
const DEVIATION: f32 = 0.02;
/// Enters every seed and the digest. Another one for every change of what an element is.
const VERSION: &str = "1";
/// 1 in BF16.
const ONE: [u8; 2] = 0x3f80_u16.to_le_bytes();

/// The shape of a published model, as its `config.json` has it.
struct Shape {
    name: &'static str,
    architecture: Architecture,
    layers: usize,
    hidden: usize,
    feed_forward: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    vocab: usize,
    context: u32,
    rms_eps: f32,
    rope_base: f32,
    tied_embeddings: bool,
}

const SHAPES: [Shape; 5] = [
    // meta-llama/Meta-Llama-3-8B, with the context of Llama 3.1: made-up weights know no longest one.
    Shape {
        name: "llama-3-8b",
        architecture: Architecture::Llama,
        layers: 32,
        hidden: 4096,
        feed_forward: 14_336,
        heads: 32,
        kv_heads: 8,
        head_dim: 128,
        vocab: 128_256,
        context: 131_072,
        rms_eps: 1e-5,
        rope_base: 500_000.0,
        tied_embeddings: false,
    },
    // meta-llama/Llama-2-7b-hf
    Shape {
        name: "llama-2-7b",
        architecture: Architecture::Llama,
        layers: 32,
        hidden: 4096,
        feed_forward: 11_008,
        heads: 32,
        kv_heads: 32,
        head_dim: 128,
        vocab: 32_000,
        context: 4096,
        rms_eps: 1e-5,
        rope_base: 10_000.0,
        tied_embeddings: false,
    },
    // meta-llama/Llama-2-13b-hf
    Shape {
        name: "llama-2-13b",
        architecture: Architecture::Llama,
        layers: 40,
        hidden: 5120,
        feed_forward: 13_824,
        heads: 40,
        kv_heads: 40,
        head_dim: 128,
        vocab: 32_000,
        context: 4096,
        rms_eps: 1e-5,
        rope_base: 10_000.0,
        tied_embeddings: false,
    },
    // Qwen/Qwen2.5-7B
    Shape {
        name: "qwen2.5-7b",
        architecture: Architecture::Qwen2,
        layers: 28,
        hidden: 3584,
        feed_forward: 18_944,
        heads: 28,
        kv_heads: 4,
        head_dim: 128,
        vocab: 152_064,
        context: 131_072,
        rms_eps: 1e-6,
        rope_base: 1_000_000.0,
        tied_embeddings: false,
    },
    // HuggingFaceTB/SmolLM2-135M
    Shape {
        name: "smollm2-135m",
        architecture: Architecture::Llama,
        layers: 30,
        hidden: 576,
        feed_forward: 1536,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        vocab: 49_152,
        context: 8192,
        rms_eps: 1e-5,
        rope_base: 100_000.0,
        tied_embeddings: true,
    },
];

/// What the elements of a synthetic tensor are.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum SyntheticElements {
    /// All 1.
    Ones,
    /// Normal numbers around 0: element `i` (row by row) is a function of `seed` and `i`, the one that the kernel `fill_normal` computes.
    ///
    /// [`ModelSource::read`](crate::ModelSource::read) gives the same bits on every machine. A GPU's logarithm, sine and cosine differ from its in
    /// the last bits of a single, so that there a few elements in a million are rounded to a neighbouring BF16.
    Normal {
        /// Of the tensor.
        seed: u64,
        /// Standard deviation.
        deviation: f32,
    },
    /// Blocks of `Q4_1`: block `i` (row by row) is a function of `seed` and `i`.
    FourBits {
        /// Of the tensor.
        seed: u64,
        /// Standard deviation, about.
        deviation: f32,
    },
}

/// An opened synthetic model.
#[derive(Debug)]
pub(crate) struct Synthetic {
    name: String,
    vocab: usize,
}

impl Synthetic {
    /// The model that a path names; `None` where it names a file.
    pub(crate) fn open(path: &Path) -> Option<Result<(Self, Parts), ModelError>> {
        let name = path.to_str()?.strip_prefix(PREFIX)?;
        Some(Self::named(name).map_err(|fault| fault.at(path)))
    }

    fn named(name: &str) -> Result<(Self, Parts), Fault> {
        let (shape_name, matrix) = match name.strip_suffix(FOUR_BITS) {
            Some(shape) => (shape, TensorType::Q4_1),
            None => (name, TensorType::BF16),
        };
        let shape = SHAPES.iter().find(|shape| shape.name == shape_name).ok_or_else(|| {
            let known: Vec<_> = SHAPES.iter().map(|shape| shape.name).collect();
            let known = known.join(", ");
            Fault::unsupported(
                "model",
                format_args!("not known; {known} are, also with {FOUR_BITS} behind them"),
            )
        })?;
        let config = shape.config();
        let mut offset = 0;
        let tensors = check::roles(&config).map(|role| {
            let [rows, columns] = check::shape_of(&config, role);
            let ty = if role.is_vector() { TensorType::BF16 } else { matrix };
            let bytes = rows as u64 * columns as u64 / ty.block_elements() as u64 * ty.block_bytes() as u64;
            let (name, at) = (role.hf_name(), offset);
            offset += bytes;
            TensorInfo { role, name, ty, rows, columns, bytes, file: 0, offset: at }
        });
        let tensors = tensors.collect();
        let header = hasher(name, "").finalize();
        let model = Self { name: name.to_owned(), vocab: shape.vocab };
        Ok((model, Parts { files: Vec::new(), config, tensors, header }))
    }

    /// `synthetic:NAME`, with [`FOUR_BITS`] where it was opened so.
    pub(crate) fn path(&self) -> String {
        format!("{PREFIX}{}", self.name)
    }

    pub(crate) fn elements(&self, tensor: &TensorInfo) -> SyntheticElements {
        let ones = match tensor.role {
            TensorRole::TokenEmbd | TensorRole::Output => false,
            TensorRole::OutputNorm => true,
            TensorRole::Layer(_, tensor) => tensor.is_vector() && !tensor.is_bias(),
        };
        if ones {
            return SyntheticElements::Ones;
        }
        let mut seed = [0; 8];
        hasher(&self.name, &tensor.name).finalize_xof().fill(&mut seed);
        let (seed, deviation) = (u64::from_le_bytes(seed), DEVIATION);
        if tensor.ty == TensorType::Q4_1 {
            return SyntheticElements::FourBits { seed, deviation };
        }
        SyntheticElements::Normal { seed, deviation }
    }

    /// Fills `dst` with the rows `[rows.start, rows.end)`, whose bytes it has exactly.
    pub(crate) fn fill(&self, tensor: &TensorInfo, rows: Range<usize>, dst: &mut [u8]) {
        match self.elements(tensor) {
            SyntheticElements::Ones => dst.as_chunks_mut().0.fill(ONE),
            SyntheticElements::Normal { seed, deviation } => {
                normal::fill(seed, deviation, rows.start as u64 * tensor.columns as u64, dst);
            }
            SyntheticElements::FourBits { seed, deviation } => {
                let blocks = tensor.columns / tensor.ty.block_elements();
                four_bits::fill(seed, deviation, rows.start as u64 * blocks as u64, dst);
            }
        }
    }
}

impl Shape {
    fn config(&self) -> ModelConfig {
        ModelConfig {
            architecture: self.architecture,
            layers: self.layers,
            hidden: self.hidden,
            feed_forward: self.feed_forward,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            vocab: self.vocab,
            context: Tokens(self.context),
            rms_eps: self.rms_eps,
            rope: Rope { base: self.rope_base, pairing: RopePairing::Halves, scaling: RopeScaling::None },
            tied_embeddings: self.tied_embeddings,
            qkv_bias: self.architecture == Architecture::Qwen2,
        }
    }
}

/// Of a part of a model.
fn hasher(model: &str, part: &str) -> blake3::Hasher {
    let mut hasher = blake3::Hasher::new_derive_key("pagedd synthetic model");
    for text in [VERSION, model, part] {
        hasher.update(text.as_bytes()).update(&[0]);
    }
    hasher
}

#[cfg(test)]
mod tests;
