//! Products with one matrix of a decoder, whatever its form.
//!
//! **Owns** the library's products, room for one matrix of four bits as elements, and which way such a matrix goes: as it is through kernels of
//! its own, or widened and through the library. **Never** keeps a widened matrix: the next one takes its place.

use super::DecoderMemory;
use super::forward::{matrix, tiles};
use super::shape::MatrixPlace;
use crate::cuda::buffer::{Buffer, View, ViewMut};
use crate::cuda::elementwise::silu_mul;
use crate::cuda::error::CudaError;
use crate::cuda::four_bit::{Split, takes_wide, wide, widen};
use crate::cuda::gemm::{Gemm, GemmOutput, Tuning};
use crate::cuda::launch::Half;
use crate::cuda::small_rows::Ending;
use crate::cuda::stream::Stream;
use crate::four_bit::Form;

/// Proposals tried for a product of the library.
const PROPOSALS: usize = 8;

/// Products of a decoder.
#[derive(Debug)]
pub(super) struct Products<T: Half> {
    pub(super) gemm: Gemm,
    /// The largest matrix of four bits, as elements; empty where there is none.
    widened: Buffer<T>,
    /// How the inner dimension of a matrix of four bits is shared.
    split: Split,
}

/// Where gated outputs lie.
pub(super) struct Gated<'a, T: Half> {
    /// `[rows][outputs]`: before one half gates the other, where that is not done at once.
    pub(super) both: ViewMut<'a, T>,
    /// `[rows][outputs / 2]`.
    pub(super) out: ViewMut<'a, T>,
}

/// Whether a matrix's halves are interleaved in its tiles.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Order {
    Plain,
    Interleaved,
}

impl<T: Half + GemmOutput> Products<T> {
    /// `exact`: a row's bits are not to depend on how many rows there are.
    pub(super) fn new(stream: &Stream, widest: usize, exact: bool) -> Result<Self, CudaError> {
        let mut gemm = Gemm::new(stream)?;
        if exact {
            gemm.use_one_for_all_rows();
        }
        let split = if exact { Split::OneForAllRows } else { Split::Fastest };
        Ok(Self { gemm, widened: Buffer::zeroed(stream, widest)?, split })
    }

    /// Whether a product of so many rows with a matrix of this form is the library's.
    fn is_librarys(&self, stream: &Stream, form: Form, rows: usize) -> bool {
        form == Form::Half || !takes_wide(stream.device(), rows, self.split)
    }

    /// `out = x · weightsᵀ`, rounded.
    pub(super) fn store(
        &mut self,
        stream: &Stream,
        memory: &DecoderMemory,
        place: MatrixPlace,
        x: View<'_, T>,
        mut out: ViewMut<'_, T>,
    ) -> Result<(), CudaError> {
        if self.is_librarys(stream, place.form, x.len() / place.shape.inputs) {
            return self.library(stream, memory, (place, Order::Plain), x, &mut out);
        }
        wide(stream, x, tiles(memory, place, Order::Plain)?, &Ending::Store(out), self.split)
    }

    /// The same in single precision.
    pub(super) fn single(
        &mut self,
        stream: &Stream,
        memory: &DecoderMemory,
        place: MatrixPlace,
        x: View<'_, T>,
        mut out: ViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        if self.is_librarys(stream, place.form, x.len() / place.shape.inputs) {
            return self.library(stream, memory, (place, Order::Plain), x, &mut out);
        }
        wide::<T>(stream, x, tiles(memory, place, Order::Plain)?, &Ending::Single(out), self.split)
    }

    /// The first half of the outputs, activated, times the second.
    pub(super) fn gated(
        &mut self,
        stream: &Stream,
        memory: &DecoderMemory,
        place: MatrixPlace,
        x: View<'_, T>,
        gated: Gated<'_, T>,
    ) -> Result<(), CudaError> {
        let Gated { mut both, mut out } = gated;
        if self.is_librarys(stream, place.form, x.len() / place.shape.inputs) {
            self.library(stream, memory, (place, Order::Interleaved), x, &mut both)?;
            return silu_mul(stream, both.read(), place.shape.outputs / 2, &mut out);
        }
        wide(stream, x, tiles(memory, place, Order::Interleaved)?, &Ending::Silu(out), self.split)
    }

    fn library<O: GemmOutput>(
        &mut self,
        stream: &Stream,
        memory: &DecoderMemory,
        (place, order): (MatrixPlace, Order),
        x: View<'_, T>,
        out: &mut ViewMut<'_, O>,
    ) -> Result<(), CudaError> {
        let Self { gemm, widened, .. } = self;
        let weights = match place.form {
            Form::Half => matrix(memory, place)?,
            Form::FourBit => {
                let elements = 0..place.shape.outputs * place.shape.inputs;
                widen(stream, tiles(memory, place, order)?, &mut widened.part_mut(elements.clone())?)?;
                widened.part(elements)?
            }
        };
        gemm.multiply(stream, place.shape, x, weights, out)
    }

    /// Times the library's products of `x` with matrices like the first of `places`, and keeps the fastest algorithm; nothing where such products
    /// are not the library's. A widened matrix is timed as it is found: whatever it holds, products take as long.
    pub(super) fn tune<O: GemmOutput>(
        &mut self,
        stream: &Stream,
        memory: &DecoderMemory,
        places: &[MatrixPlace],
        x: View<'_, T>,
        out: ViewMut<'_, O>,
    ) -> Result<(), CudaError> {
        let Some(first) =
            places.iter().find(|place| self.is_librarys(stream, place.form, x.len() / place.shape.inputs))
        else {
            return Ok(());
        };
        let Self { gemm, widened, .. } = self;
        let weights = match first.form {
            Form::Half => {
                let halves = places.iter().filter(|place| place.form == Form::Half);
                halves.map(|&place| matrix(memory, place)).collect::<Result<Vec<_>, CudaError>>()?
            }
            Form::FourBit => vec![widened.part(0..first.shape.outputs * first.shape.inputs)?],
        };
        gemm.tune::<T, O>(stream, first.shape, Tuning { x, weights: &weights, out, most: PROPOSALS })?;
        Ok(())
    }
}
