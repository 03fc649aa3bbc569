//! The worker: a function of (arenas, plans).
//!
//! **Owns** the weights arena, the KV arena and the compute threads of one model. **Never** decides what runs, keeps what a fresh
//! worker could not be told again, or logs a token.
//!
//! A plan's way: [`serve`] reads it, [`batch`] checks it and lays it out, [`forward`] computes the logits, [`sample`] draws.

pub mod arena;
pub mod batch;
pub mod calibrate;
pub mod cpu;
pub mod forms;
pub mod forward;
#[cfg(feature = "cuda")]
pub mod gpu;
pub mod load;
pub mod memory;
pub mod numa;
pub mod plan;
pub mod runner;
pub mod sample;
pub mod selfcheck;
pub mod sequence;
pub mod serve;
pub mod weights;

pub use runner::{Fds, ModelRunner};
