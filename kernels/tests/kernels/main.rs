//! Every kernel against a plain twin in double precision, and its bits against itself under other batches, steps, threads and
//! block sizes.

mod attention;
mod dequantize;
mod operators;
mod packing;
mod products;
mod sampling;
mod support;
