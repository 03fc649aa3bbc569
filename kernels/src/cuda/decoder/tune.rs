//! Which algorithms multiply fastest, with a decoder's own weights.

use super::forward::Work;
use super::shape::{LayerPlaces, MatrixPlace};
use super::{Decoder, Recordings};
use crate::cuda::error::CudaError;
use crate::cuda::gemm::{Algorithms, AlgorithmsError, GemmOutput, bucket};
use crate::cuda::launch::Half;
use crate::cuda::stream::Stream;

/// Layers whose weights are multiplied with in turn: enough that none is found in the cache.
const LAYERS: usize = 8;

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
                return Ok(self.work.products.gemm.algorithms());
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
        self.work.products.gemm.restore(algorithms)
    }
}

impl<T: Half + GemmOutput> Work<T> {
    /// Tunes all products of `rows` rows; that with the output matrix for `wanted` rows at most.
    fn tune(&mut self, stream: &Stream, rows: usize, wanted: usize) -> Result<(), CudaError> {
        let Self {
            memory,
            shape,
            places,
            products,
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
        let layers = |of: fn(&LayerPlaces) -> MatrixPlace| -> Vec<MatrixPlace> {
            places.layers.iter().take(LAYERS).map(of).collect()
        };

        let (x, out) = (normed.part(0..rows * hidden)?, qkv.part_mut(0..rows * width)?);
        products.tune(stream, memory, &layers(|layer| layer.qkv), x, out)?;
        let (x, out) = (attended.part(0..rows * query)?, delta.part_mut(0..rows * hidden)?);
        products.tune(stream, memory, &layers(|layer| layer.attn_output), x, out)?;
        let (x, out) = (normed.part(0..rows * hidden)?, gate_up.part_mut(0..rows * 2 * ffn)?);
        products.tune(stream, memory, &layers(|layer| layer.gate_up), x, out)?;
        let (x, out) = (activated.part(0..rows * ffn)?, delta.part_mut(0..rows * hidden)?);
        products.tune(stream, memory, &layers(|layer| layer.ffn_down), x, out)?;

        if rows > bucket(wanted) {
            return Ok(());
        }
        let rows = rows.min(wanted);
        let (x, out) = (normed.part(0..rows * hidden)?, logits.part_mut(0..rows * shape.vocabulary)?);
        products.tune(stream, memory, &[places.output], x, out)
    }
}
