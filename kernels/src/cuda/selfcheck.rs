//! Every kernel against its twin on the CPU, on the GPU that is there.
//!
//! **Owns** the cases and what error is allowed. Inputs are random and always the same; outputs are poisoned first, so that an element that a
//! kernel forgot is a NaN or a wrong byte. Twins compute in double precision from the same rounded inputs. **Never** measures time.

mod attention;
mod few;
mod four_bit;
mod layers;
mod products;
mod sampling;
mod shared;
mod small_rows;

use std::fmt;

use half::{bf16, f16};

use super::buffer::{Buffer, Plain};
use super::device::Device;
use super::error::CudaError;
use super::launch::Half;
use super::pinned::PinnedRing;
use super::stream::Stream;
use crate::sample::philox4x32_10;

/// What a check found.
#[derive(Clone, PartialEq, Debug)]
pub struct Row {
    /// Which kernel.
    pub kernel: &'static str,
    /// Elements and shapes.
    pub case: String,
    /// How far it was off.
    pub found: Found,
}

/// How far a kernel was off its twin.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Found {
    /// The largest error, in units of the one allowed for its element.
    Error(f64),
    /// Values that must be equal and are not.
    Different {
        /// How many.
        count: usize,
        /// Of so many.
        of: usize,
    },
}

impl Row {
    /// Whether the kernel may be used.
    #[must_use]
    pub fn passed(&self) -> bool {
        match self.found {
            // A NaN does not pass.
            Found::Error(worst) => worst <= 1.0,
            Found::Different { count, .. } => count == 0,
        }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.passed() { "ok" } else { "FAILED" };
        let found = match self.found {
            Found::Error(worst) => format!("{worst:.3} of the error allowed"),
            Found::Different { count, of } => format!("{count} of {of} differ"),
        };
        write!(f, "{:<14} {:<64} {found:>28}  {verdict}", self.kernel, self.case)
    }
}

/// How much is checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Extent {
    /// Shapes of real models: about half a minute.
    Full,
    /// The smallest shapes that reach every branch of the kernels: for tools that slow a program down a thousand times.
    Minimal,
}

/// Runs all checks.
///
/// # Errors
/// The device failed, which is worse than a wrong result.
pub fn run(device: &Device, extent: Extent) -> Result<Vec<Row>, CudaError> {
    let mut bench =
        Bench { stream: device.stream()?, ring: PinnedRing::new(device, 4, 1 << 20)?, rows: Vec::new() };
    layers::check::<bf16>(&mut bench, extent)?;
    layers::check::<f16>(&mut bench, extent)?;
    sampling::check(&mut bench, extent)?;
    attention::check::<bf16>(&mut bench, extent)?;
    attention::check::<f16>(&mut bench, extent)?;
    products::check::<bf16>(&mut bench, extent)?;
    products::check::<f16>(&mut bench, extent)?;
    small_rows::check::<bf16>(&mut bench, extent)?;
    small_rows::check::<f16>(&mut bench, extent)?;
    four_bit::check::<bf16>(&mut bench, extent)?;
    four_bit::check::<f16>(&mut bench, extent)?;
    few::check::<bf16>(&mut bench, extent)?;
    few::check::<f16>(&mut bench, extent)?;
    shared::check(&mut bench, extent)?;
    bench.stream.synchronize()?;
    Ok(bench.rows)
}

/// What checks work with.
struct Bench {
    stream: Stream,
    ring: PinnedRing,
    rows: Vec<Row>,
}

impl Bench {
    /// A buffer in which every byte is set: NaNs, whatever the element.
    fn poisoned<T: Plain>(&self, len: usize) -> Result<Buffer<T>, CudaError> {
        let mut buffer = Buffer::zeroed(&self.stream, len)?;
        buffer.all_mut().fill_bytes(&self.stream, 0xff)?;
        Ok(buffer)
    }

    fn copy<T: Plain>(&self, data: &[T]) -> Result<Buffer<T>, CudaError> {
        Buffer::copy_of(&self.stream, data)
    }

    fn report(&mut self, kernel: &'static str, case: String, found: Found) {
        self.rows.push(Row { kernel, case, found });
    }
}

/// Random words, a function of seed and index.
fn word(seed: u32, index: usize) -> u32 {
    philox4x32_10([index as u32 / 4, 0, 0, 0], [seed, 2])[index % 4]
}

/// Values around 0, some of them large, as activations are.
fn floats(seed: u32, count: usize) -> Vec<f32> {
    let value = |index| {
        let word = word(seed, index);
        let x = (word >> 8) as f32 / (1 << 23) as f32 - 1.0;
        if word.is_multiple_of(61) { x * 12.0 } else { x }
    };
    (0..count).map(value).collect()
}

/// The same, rounded.
fn halves<T: Half>(seed: u32, count: usize) -> Vec<T> {
    floats(seed, count).into_iter().map(|x| T::from_f64(f64::from(x))).collect()
}

/// The largest error in units of the one allowed: `want` holds value and allowance of each element.
fn worst<T: Copy>(got: &[T], to_f64: impl Fn(T) -> f64, want: impl Iterator<Item = (f64, f64)>) -> f64 {
    let mut worst = 0.0_f64;
    let mut count = 0;
    for (got, (want, allowed)) in got.iter().zip(want) {
        let error = (to_f64(*got) - want).abs() / allowed;
        // `max` would drop a NaN.
        worst = if error > worst || error.is_nan() { error } else { worst };
        if worst.is_nan() {
            return worst;
        }
        count += 1;
    }
    if count == got.len() { worst } else { f64::NAN }
}

/// What one rounding to `T`, of a value computed to `relative` of `scale`, may be off.
fn allowance<T: Half>(want: f64, scale: f64, relative: f64) -> f64 {
    // The last term covers numbers too small for T's full precision.
    T::ROUNDING * 1.001 * want.abs() + relative * scale + 1e-7
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(got: &[f32], want: &[(f64, f64)]) -> bool {
        let found = Found::Error(worst(got, f64::from, want.iter().copied()));
        Row { kernel: "k", case: String::new(), found }.passed()
    }

    #[test]
    fn an_error_over_the_allowance_a_nan_and_a_missing_element_do_not_pass() {
        let want = [(1.0, 0.1), (2.0, 0.1), (-3.0, 0.1)];
        assert!(verdict(&[1.0, 2.05, -3.0], &want));
        assert!(!verdict(&[1.0, 2.2, -3.0], &want));
        assert!(!verdict(&[f32::NAN, 2.0, -3.0], &want));
        assert!(!verdict(&[1.0, 2.0, f32::NAN], &want));
        assert!(!verdict(&[1.0, 2.0, f32::INFINITY], &want));
        assert!(!verdict(&[1.0, 2.0, -3.0], &want[..2]));
        let different =
            |count| Row { kernel: "k", case: String::new(), found: Found::Different { count, of: 9 } };
        assert!(different(0).passed() && !different(1).passed());
    }
}
