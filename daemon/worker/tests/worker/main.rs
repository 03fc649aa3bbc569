//! The worker against its promises: reference outputs, batch independence, replay, protocol, element types.

// The helpers beside the tests are test code too, which the lint cannot see.
#![allow(clippy::unwrap_used)]

mod driver;
mod failure;
#[cfg(feature = "cuda")]
mod gpu;
mod independence;
mod models;
mod packed;
mod protocol;
mod reference;
mod replay;
mod selfcheck;
mod speculation;
mod synthetic;
mod types;
