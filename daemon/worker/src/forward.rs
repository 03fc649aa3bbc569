//! The forward pass of a decoder, for a batch of prefill and decode rows.
//!
//! **Owns** the order of operations and the scratch memory. **Never** knows sequences or sampling: it takes a checked batch and
//! gives logits. A row's bits depend on its own inputs only, as the kernels promise.

use std::io;
use std::ops::Range;
use std::sync::OnceLock;

use pagedd_kernels::{
    ActivationKind, Activations, AttentionShape, Heads, Isa, KvError, Matrix, Norm, Pairing, Product,
    RopeAngles, ShapeError, SlotMapping, ThreadPool, Turn, add_rms_norm, attention, matmul_all, rope_into_kv,
    silu_mul_to,
};
use pagedd_model::{ModelConfig, RopeFrequencies, RopePairing};

use crate::arena::Arena;
use crate::weights::{MatrixPlace, Places};

/// A decoder with its weights, threads and scratch memory.
#[derive(Debug)]
pub struct Decoder {
    config: ModelConfig,
    places: Places,
    weights: Arena,
    layers: Vec<LayerVectors>,
    output_norm: Vec<f32>,
    frequencies: RopeFrequencies,
    isa: Isa,
    pool: ThreadPool,
    scratch: Scratch,
}

/// Norm weights and biases of one layer.
#[derive(Debug)]
struct LayerVectors {
    attn_norm: Vec<f32>,
    ffn_norm: Vec<f32>,
    bias: Option<[Vec<f32>; 3]>,
}

/// Tokens that go from product to product together: what one makes is still in the second-level caches when the next takes it.
const BLOCK: usize = 128;

/// Buffers of a step, made once for the largest. Memory that no step has touched yet costs nothing.
#[derive(Debug)]
struct Scratch {
    /// The residual stream: `[tokens][hidden]`.
    x: Vec<f32>,
    /// The residual stream of the rows that sample.
    last: Vec<f32>,
    /// What an operator adds to the residual stream.
    delta: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    attended: Vec<f32>,
    /// Of a block of tokens, as is `up`.
    gate: Vec<f32>,
    up: Vec<f32>,
    /// `[sampling rows][vocab]`.
    logits: Vec<f32>,
    activations: Activations,
    angles: RopeAngles,
}

impl Decoder {
    /// A decoder over filled weights, for at most `tokens` tokens and `rows` rows in a batch.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub fn new(
        config: ModelConfig,
        places: Places,
        weights: Arena,
        isa: Isa,
        threads: usize,
        tokens: usize,
        rows: usize,
    ) -> io::Result<Self> {
        let data = weights.data();
        let layers = places
            .layers
            .iter()
            .map(|layer| LayerVectors {
                attn_norm: layer.attn_norm.of(data),
                ffn_norm: layer.ffn_norm.of(data),
                bias: layer.qkv_bias.map(|bias| bias.map(|b| b.of(data))),
            })
            .collect();
        let output_norm = places.output_norm.of(data);
        let (query, kv) = (config.query_dim(), config.kv_dim());
        let scratch = Scratch {
            x: vec![0.0; tokens * config.hidden],
            last: vec![0.0; rows * config.hidden],
            delta: vec![0.0; tokens * config.hidden],
            q: vec![0.0; tokens * query],
            k: vec![0.0; tokens * kv],
            v: vec![0.0; tokens * kv],
            attended: vec![0.0; tokens * query],
            gate: vec![0.0; tokens.min(BLOCK) * config.feed_forward],
            up: vec![0.0; tokens.min(BLOCK) * config.feed_forward],
            logits: vec![0.0; rows * config.vocab],
            activations: Activations::new(),
            angles: RopeAngles::new(),
        };
        Ok(Self {
            frequencies: config.rope_frequencies(),
            config,
            places,
            layers,
            output_norm,
            isa,
            // Not pinned: on a quiet machine it gains nothing, and beside a busy neighbour the kernel could not move a thread.
            pool: ThreadPool::new(threads, None)?,
            scratch,
            weights,
        })
    }

    /// The weights arena.
    pub fn weights(&self) -> &Arena {
        &self.weights
    }

    /// Bytes of the memory that steps compute in.
    pub fn scratch_bytes(&self) -> usize {
        let Scratch { x, last, delta, q, k, v, attended, gate, up, logits, .. } = &self.scratch;
        [x, last, delta, q, k, v, attended, gate, up, logits]
            .iter()
            .map(|part| size_of_val(part.as_slice()))
            .sum()
    }

    /// The compute threads.
    pub fn pool(&self) -> &ThreadPool {
        &self.pool
    }

    /// Logits of the last forward pass, one row of `vocab` per token that was asked for.
    pub fn logits(&self, rows: usize) -> impl Iterator<Item = &[f32]> {
        self.scratch.logits.chunks_exact(self.config.vocab).take(rows)
    }

    /// Computes keys and values of all `tokens` into the arena, and the logits of the tokens at `wanted` (indices into `tokens`).
    ///
    /// # Errors
    /// Shapes that do not fit: a bug of the caller. Keys and values may have been written in part.
    pub fn forward(
        &mut self,
        tokens: &[u32],
        positions: &[u32],
        mapping: &SlotMapping,
        wanted: &[usize],
        arena: &mut [u8],
    ) -> Result<(), KvError> {
        let Self { config, places, weights, layers, output_norm, frequencies, isa, pool, scratch: s } = self;
        let (isa, pool, data) = (*isa, &*pool, weights.data());
        let (n, hidden, eps) = (tokens.len(), config.hidden, config.rms_eps);
        let (query, kv, ffn) = (config.query_dim(), config.kv_dim(), config.feed_forward);
        let shape = AttentionShape { heads: config.heads, scale: 1.0 / (config.head_dim as f32).sqrt() };
        let pairing = match config.rope.pairing {
            RopePairing::Interleaved => Pairing::Interleaved,
            RopePairing::Halves => Pairing::Halves,
        };
        let x = slice(&mut s.x, n * hidden)?;
        let delta = slice(&mut s.delta, n * hidden)?;
        let (q, k, v) = (slice(&mut s.q, n * query)?, slice(&mut s.k, n * kv)?, slice(&mut s.v, n * kv)?);
        let attended = slice(&mut s.attended, n * query)?;
        let activations = &mut s.activations;

        s.angles.set(pool, positions, &frequencies.inverse, frequencies.attention_factor);
        embed(pool, &places.token_embd.of(data)?, tokens, x)?;
        // The last layer's keys and values are those of all tokens; what comes after them is asked for the wanted ones only.
        let final_layer = places.layers.len().saturating_sub(1);
        let mut last = Some(slice(&mut s.last, wanted.len() * hidden)?);
        let (mut x, mut delta) = (x, delta);
        for (index, (layer, vectors)) in places.layers.iter().zip(&*layers).enumerate() {
            let norm = |weight| Norm { weight, epsilon: eps };
            let of_qkv = kind(&layer.qkv);
            for rows in blocks(n) {
                let [q, k, v] = [(&mut *q, query), (&mut *k, kv), (&mut *v, kv)]
                    .map(|(to, width)| part(to, &rows, width));
                let summand = (index > 0).then(|| &delta[rows.start * hidden..rows.end * hidden]);
                let x = part(x, &rows, hidden);
                add_rms_norm(pool, isa, x, summand, norm(&vectors.attn_norm), of_qkv, activations)?;
                products(pool, isa, data, activations, &layer.qkv, [q, k, v])?;
            }
            let bias = vectors.bias.as_ref().map(|bias| bias.each_ref().map(Vec::as_slice));
            let heads = Heads { q: &mut *q, k, v, bias };
            rope_into_kv(pool, isa, heads, Turn { angles: &s.angles, pairing }, mapping, index, arena)?;
            if index == final_layer && wanted.is_empty() {
                return Ok(());
            }
            attention(pool, isa, shape, mapping, index, q, arena, attended)?;
            let mut attended = &*attended;
            if index == final_layer
                && let Some(last) = last.take()
            {
                gather(x, wanted, hidden, last);
                let rows = slice(q, wanted.len() * query)?;
                gather(attended, wanted, query, rows);
                (x, attended) = (last, rows);
                delta = slice(delta, wanted.len() * hidden)?;
            }
            let (attn_output, ffn_down) = ([layer.attn_output], [layer.ffn_down]);
            for rows in blocks(x.len() / hidden) {
                let attended = &attended[rows.start * query..rows.end * query];
                let (x, delta) = (part(x, &rows, hidden), part(delta, &rows, hidden));
                activations.set(pool, isa, attended, query, kind(&attn_output))?;
                products(pool, isa, data, activations, &attn_output, [&mut *delta])?;

                let of_ffn = kind(&layer.gate_up);
                add_rms_norm(pool, isa, x, Some(delta), norm(&vectors.ffn_norm), of_ffn, activations)?;
                let (gate, up) = (slice(&mut s.gate, rows.len() * ffn)?, slice(&mut s.up, rows.len() * ffn)?);
                products(pool, isa, data, activations, &layer.gate_up, [&mut *gate, &mut *up])?;
                silu_mul_to(pool, isa, gate, up, ffn, kind(&ffn_down), activations)?;
                products(pool, isa, data, activations, &ffn_down, [delta])?;
            }
        }

        // Only rows that sample meet the output matrix, as a rule the largest of all.
        let output = [places.output];
        let norm = Norm { weight: output_norm, epsilon: eps };
        add_rms_norm(pool, isa, x, Some(delta), norm, kind(&output), activations)?;
        let logits = slice(&mut s.logits, wanted.len() * config.vocab)?;
        products(pool, isa, data, activations, &output, [logits])?;
        Ok(())
    }
}

/// `[0, rows)` in blocks that go from product to product together.
fn blocks(rows: usize) -> impl Iterator<Item = Range<usize>> {
    (0..rows).step_by(BLOCK).map(move |first| first..rows.min(first + BLOCK))
}

/// `rows` of a buffer of rows of `width`.
fn part<'a>(buffer: &'a mut [f32], rows: &Range<usize>, width: usize) -> &'a mut [f32] {
    &mut buffer[rows.start * width..rows.end * width]
}

/// The embedding of each token, `[tokens][hidden]`.
fn embed(pool: &ThreadPool, embedding: &Matrix<'_>, tokens: &[u32], x: &mut [f32]) -> Result<(), ShapeError> {
    // A thread takes at least this many rows, so that a decode step needs no other thread.
    const ROWS: usize = 8;
    let hidden = embedding.layout().columns();
    let failed = OnceLock::new();
    pool.for_parts(x, ROWS * hidden, &|part, x| {
        for (row, &token) in x.chunks_exact_mut(hidden).zip(&tokens[part * ROWS..]) {
            if let Err(error) = embedding.row(token as usize, row) {
                // The first of several says enough.
                let _ = failed.set(error);
            }
        }
    });
    failed.into_inner().map_or(Ok(()), Err)
}

/// Rows `wanted` of `from` (rows of `columns`), in their order.
fn gather(from: &[f32], wanted: &[usize], columns: usize, to: &mut [f32]) {
    for (&row, to) in wanted.iter().zip(to.chunks_exact_mut(columns)) {
        to.copy_from_slice(&from[row * columns..(row + 1) * columns]);
    }
}

/// What the activations must be to meet all of `places`.
fn kind(places: &[MatrixPlace]) -> ActivationKind {
    let kinds = places.iter().map(|place| place.layout.ty().activations());
    kinds.reduce(ActivationKind::and).unwrap_or(ActivationKind::F32)
}

/// Products of the same activations with several matrices, each into rows of its own.
fn products<const N: usize>(
    pool: &ThreadPool,
    isa: Isa,
    data: &[u8],
    x: &Activations,
    places: &[MatrixPlace; N],
    outs: [&mut [f32]; N],
) -> Result<(), ShapeError> {
    let matrices: Vec<Matrix<'_>> = places.iter().map(|place| place.of(data)).collect::<Result<_, _>>()?;
    let mut products: Vec<_> = matrices
        .into_iter()
        .zip(outs)
        .map(|(weights, out)| Product { weights, out, stride: weights.layout().rows() })
        .collect();
    matmul_all(pool, isa, x, &mut products)
}

fn slice(buffer: &mut [f32], len: usize) -> Result<&mut [f32], ShapeError> {
    let found = buffer.len();
    buffer.get_mut(..len).ok_or(ShapeError::Length { what: "scratch memory", needed: len, found })
}
