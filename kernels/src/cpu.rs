//! Kernels for the host's processors.

pub(crate) mod activations;
pub(crate) mod attention;
pub(crate) mod dequant;
pub(crate) mod disjoint;
pub(crate) mod exp;
pub(crate) mod heads;
pub(crate) mod isa;
pub(crate) mod kv;
pub(crate) mod matmul;
pub(crate) mod ops;
pub(crate) mod packed;
pub(crate) mod pool;
#[cfg(target_arch = "x86_64")]
pub(crate) mod vector;
pub(crate) mod versions;
