//! Compute kernels, each behind a safe function that checks its sizes: of processors here, of NVIDIA GPUs in `cuda` (feature `cuda`).
//!
//! **Owns** packed weight formats, quantised activations, matrix products, attention over paged KV, the small operators of a
//! transformer, sampling, and the threads that run them. **Never** opens a file, knows a model or a sequence, or decides what runs.
//!
//! Bits: a row's result depends on that row's inputs only. It does not depend on the other rows of a batch, on how a prompt was cut
//! into steps, on the number of threads or on the block size. Matrix products have the same bits on every instruction set; in attention sets
//! may differ from one another in the last bits.

// Bodies that several instruction sets share must be compiled into each caller, not called.
#![allow(clippy::inline_always)]
// Loops over lanes and rows of registers index several arrays at once.
#![allow(clippy::needless_range_loop)]

mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod e4m3;
mod error;
mod four_bit;
pub mod sample;

pub use cpu::activations::{ActivationKind, Activations, Scheme};
pub use cpu::attention::{AttentionShape, attention};
pub use cpu::dequant::dequantize;
pub use cpu::heads::{Heads, Turn, rope_into_kv};
pub use cpu::isa::Isa;
pub use cpu::kv::{KvElement, KvLayout, KvRow, SlotMapping, copy_block, write_kv};
pub use cpu::matmul::{Product, matmul, matmul_all};
pub use cpu::ops::{
    Norm, Pairing, RopeAngles, add, add_bias, add_rms_norm, rms_norm, rope, silu_mul, silu_mul_to,
};
pub use cpu::packed::{Matrix, MatrixLayout, PANEL as PANEL_ROWS, PackedType, pack};
pub use cpu::pool::ThreadPool;
pub use e4m3::{DeviceKvElement, e4m3_of, e4m3_value, quantize_e4m3};
pub use error::{KvError, ShapeError};
pub use four_bit::{
    DecoderForms, FOUR_BIT_TILE, FOUR_BIT_UNIT, Form, LayerForms, four_bit_bytes, is_four_bit,
    pack_four_bit_tile,
};
