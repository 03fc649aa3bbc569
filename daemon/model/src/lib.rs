//! Models in files: GGUF and Hugging Face directories, as configuration, tensors, tokenizer and chat template. Also models that are in no
//! file: published shapes with random weights.
//!
//! **Owns** what a model file means: its header, its dimensions, one naming of tensors, its vocabulary, its template.
//! **Never** computes with weights, maps a file into memory, touches a device, or trusts a size that a header states.

mod check;
mod config;
mod error;
mod file;
mod gguf;
mod hf;
mod rope;
mod source;
mod synthetic;
mod template;
mod tensor;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod tokenizer;

pub use config::{Architecture, ModelConfig};
pub use error::ModelError;
pub use rope::{Rope, RopeFrequencies, RopePairing, RopeScaling};
pub use source::ModelSource;
pub use synthetic::SyntheticElements;
pub use template::{ChatTemplate, Message, RenderOptions, TemplateError};
pub use tensor::{LayerTensor, TensorInfo, TensorRole};
pub use tokenizer::{Piece, Tokenizer};
