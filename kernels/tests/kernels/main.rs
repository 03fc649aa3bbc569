//! Every kernel against a plain twin in double precision, and its bits against itself under other batches, steps, threads and
//! block sizes.

// A test may unwrap, also in its helpers; bits are what is compared; twins index like the formulas they are.
#![allow(clippy::unwrap_used, clippy::float_cmp, clippy::needless_range_loop)]

mod attention;
mod dequantize;
mod operators;
mod packing;
mod products;
mod sampling;
mod support;
