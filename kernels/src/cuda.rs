//! Kernels for NVIDIA GPUs, launched through safe functions.
//!
//! **Owns** the device, its memory as typed buffers, the kernels of `kernels/cuda/*.cu`, and what must be checked on the host before one
//! is launched. **Never** waits where a caller did not ask for it, allocates behind a launch, or decides what runs.
//!
//! A launch is asynchronous: it returns when it is queued. Launches on one [`Stream`] run in order; between streams, [`Event`]s order them.
//! Errors of the device show at a later call, and stay.

mod attention;
mod batch;
mod buffer;
mod decoder;
mod device;
mod elementwise;
mod error;
pub mod four_bit;
mod gemm;
mod graph;
mod launch;
mod norm;
mod pinned;
mod rope;
mod sample;
pub mod selfcheck;
mod shared;
pub mod small_rows;
mod stream;

pub use attention::{Attention, DecodeCut, DecodeLimits, DecodePlan, PrefillPlan, Sharing, decode, prefill};
pub use batch::{DeviceBatch, DeviceKvLayout, Indices};
pub use buffer::{Buffer, Plain, View, ViewMut};
pub use decoder::{
    Decoder, DecoderLimits, DecoderMemory, DecoderPlaces, DecoderShape, DecoderStep, Draws, LayerPlaces,
    MatrixPlace, Place, Recordings, Ticket, bucket, exact_context, exact_rows,
};
pub use device::{Device, DeviceInfo};
#[cfg(feature = "failpoints")]
pub use elementwise::read_nowhere;
pub use elementwise::{BlockCopies, Embed, TokenSource, Tokens, copy_blocks, embed, fill_normal, silu_mul};
pub use error::CudaError;
pub use gemm::{
    Algorithm, Algorithms, AlgorithmsError, Gemm, GemmOutput, GemmShape, Tuned, Tuning, products_version,
};
pub use graph::Graph;
pub use launch::Half;
pub use norm::{AddNorm, add_rms_norm};
pub use pinned::{Pinned, PinnedRing, pinned_bytes};
pub use rope::{DeviceAngles, RopeIntoKv, rope_into_kv};
pub use sample::{Drawn, Ranked, SampleRow, Sampler};
pub use shared::SharedBuffer;
pub use stream::{Event, Stream};
