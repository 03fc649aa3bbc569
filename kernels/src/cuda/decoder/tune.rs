//! Which algorithms multiply fastest, with a decoder's own weights.

use super::forward::Work;
use super::{Decoder, Recordings};
use crate::cuda::buffer::View;
use crate::cuda::error::CudaError;
use crate::cuda::gemm::{Algorithms, AlgorithmsError, GemmOutput, GemmShape, Tuning, bucket};
use crate::cuda::launch::Half;
use crate::cuda::stream::Stream;

/// Layers whose weights are multiplied with in turn: enough that none is found in the cache.
const LAYERS: usize = 8;
/// Proposals tried for a product.
const PROPOSALS: usize = 8;

impl<T: Half + GemmOutput> Decoder<T> {
    /// Times the products of this decoder, for every bucket of rows, and keeps the fastest algorithms. Waits;
    /// seconds for a large model. What scratch memory holds is lost.
    ///
    /// # Errors
    /// The device failed.
    pub fn tune(&mut self) -> Result<Algorithms, CudaError> {
        self.forget_steps();
        let most = self.limits.tokens.max(self.limits.rows);
        let mut rows = 1;
        loop {
            // Few rows have kernels of their own.
            if !self.work.takes_few(rows.min(most)) {
                self.work.tune(&self.stream, rows.min(most), self.limits.wanted)?;
            }
            if rows >= most {
                return Ok(self.work.gemm.algorithms());
            }
            rows = bucket(rows + 1);
        }
    }

    /// Other algorithms have kernels that are not loaded: no size is recorded before it has run with them.
    fn forget_steps(&mut self) {
        self.graphs.clear();
        self.met.clear();
        self.recordings = Recordings::default();
    }

    /// Keeps what [`tune`](Self::tune) found earlier: products have the same bits again.
    ///
    /// # Errors
    /// They are for another library or GPU, or are refused. Nothing has been kept.
    pub fn restore(&mut self, algorithms: &Algorithms) -> Result<usize, AlgorithmsError> {
        self.forget_steps();
        self.work.gemm.restore(algorithms)
    }
}

impl<T: Half + GemmOutput> Work<T> {
    /// Tunes all products of `rows` rows; that with the output matrix for `wanted` rows at most.
    fn tune(&mut self, stream: &Stream, rows: usize, wanted: usize) -> Result<(), CudaError> {
        let Self {
            memory,
            shape,
            places,
            gemm,
            normed,
            qkv,
            attended,
            gate_up,
            activated,
            delta,
            logits,
            ..
        } = self;
        let (hidden, ffn, query, width) = (shape.hidden, shape.ffn, shape.query_width(), shape.qkv_width());
        let layers = || places.layers.iter().take(LAYERS);
        let of = |place| super::forward::matrix::<T>(memory, place);
        let most = PROPOSALS;
        let all =
            |places: Vec<_>| places.into_iter().map(of).collect::<Result<Vec<View<'_, T>>, CudaError>>();

        let weights = all(layers().map(|layer| layer.qkv).collect())?;
        let (x, out) = (normed.part(0..rows * hidden)?, qkv.part_mut(0..rows * width)?);
        let qkv = GemmShape { inputs: hidden, outputs: width };
        gemm.tune::<T, T>(stream, qkv, Tuning { x, weights: &weights, out, most })?;

        let weights = all(layers().map(|layer| layer.attn_output).collect())?;
        let (x, out) = (attended.part(0..rows * query)?, delta.part_mut(0..rows * hidden)?);
        let output = GemmShape { inputs: query, outputs: hidden };
        gemm.tune::<T, T>(stream, output, Tuning { x, weights: &weights, out, most })?;

        let weights = all(layers().map(|layer| layer.gate_up).collect())?;
        let (x, out) = (normed.part(0..rows * hidden)?, gate_up.part_mut(0..rows * 2 * ffn)?);
        let both = GemmShape { inputs: hidden, outputs: 2 * ffn };
        gemm.tune::<T, T>(stream, both, Tuning { x, weights: &weights, out, most })?;

        let weights = all(layers().map(|layer| layer.ffn_down).collect())?;
        let (x, out) = (activated.part(0..rows * ffn)?, delta.part_mut(0..rows * hidden)?);
        let down = GemmShape { inputs: ffn, outputs: hidden };
        gemm.tune::<T, T>(stream, down, Tuning { x, weights: &weights, out, most })?;

        if rows > bucket(wanted) {
            return Ok(());
        }
        let rows = rows.min(wanted);
        let (x, out) = (normed.part(0..rows * hidden)?, logits.part_mut(0..rows * shape.vocabulary)?);
        let head = GemmShape { inputs: hidden, outputs: shape.vocabulary };
        gemm.tune::<T, f32>(stream, head, Tuning { x, weights: &[of(places.output)?], out, most })?;
        Ok(())
    }
}
