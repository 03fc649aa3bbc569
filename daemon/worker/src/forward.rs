//! The forward pass of a decoder, for a batch of prefill and decode rows.
//!
//! **Owns** the order of operations and the scratch memory. **Never** knows sequences or sampling: it takes a checked batch and
//! gives logits. A row's bits depend on its own inputs only, as the kernels promise.

use std::io;

use pagedd_kernels::{
    ActivationKind, Activations, AttentionShape, Isa, KvError, Matrix, Pairing, Product, RopeAngles,
    ShapeError, SlotMapping, ThreadPool, add, add_bias, attention, matmul_all, rms_norm, rope, silu_mul,
    write_kv,
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

/// Buffers of a step, made once for the largest. Memory that no step has touched yet costs nothing.
#[derive(Debug)]
struct Scratch {
    /// The residual stream: `[tokens][hidden]`.
    x: Vec<f32>,
    normed: Vec<f32>,
    /// What an operator adds to the residual stream.
    delta: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    attended: Vec<f32>,
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
            normed: vec![0.0; tokens * config.hidden],
            delta: vec![0.0; tokens * config.hidden],
            q: vec![0.0; tokens * query],
            k: vec![0.0; tokens * kv],
            v: vec![0.0; tokens * kv],
            attended: vec![0.0; tokens * query],
            gate: vec![0.0; tokens * config.feed_forward],
            up: vec![0.0; tokens * config.feed_forward],
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
            pool: ThreadPool::new(threads, None)?,
            scratch,
            weights,
        })
    }

    /// The weights arena.
    pub fn weights(&self) -> &Arena {
        &self.weights
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
        let normed = slice(&mut s.normed, n * hidden)?;
        let delta = slice(&mut s.delta, n * hidden)?;
        let (q, k, v) = (slice(&mut s.q, n * query)?, slice(&mut s.k, n * kv)?, slice(&mut s.v, n * kv)?);
        let attended = slice(&mut s.attended, n * query)?;
        let (gate, up) = (slice(&mut s.gate, n * ffn)?, slice(&mut s.up, n * ffn)?);
        let activations = &mut s.activations;

        s.angles.set(positions, &frequencies.inverse, frequencies.attention_factor);
        let embedding = places.token_embd.of(data)?;
        for (&token, row) in tokens.iter().zip(x.chunks_exact_mut(hidden)) {
            embedding.row(token as usize, row)?;
        }
        for (index, (layer, vectors)) in places.layers.iter().zip(&*layers).enumerate() {
            rms_norm(pool, x, &vectors.attn_norm, eps, normed)?;
            activations.set(pool, isa, normed, hidden, kind(&layer.qkv))?;
            products(pool, isa, data, activations, &layer.qkv, [&mut *q, &mut *k, &mut *v])?;
            if let Some([q_bias, k_bias, v_bias]) = &vectors.bias {
                add_bias(q, query, q_bias)?;
                add_bias(k, kv, k_bias)?;
                add_bias(v, kv, v_bias)?;
            }
            rope(pool, q, config.head_dim, &s.angles, pairing)?;
            rope(pool, k, config.head_dim, &s.angles, pairing)?;
            write_kv(mapping, index, k, v, arena)?;
            attention(pool, isa, shape, mapping, index, q, arena, attended)?;
            let attn_output = [layer.attn_output];
            activations.set(pool, isa, attended, query, kind(&attn_output))?;
            products(pool, isa, data, activations, &attn_output, [&mut *delta])?;
            add(pool, x, delta)?;

            rms_norm(pool, x, &vectors.ffn_norm, eps, normed)?;
            activations.set(pool, isa, normed, hidden, kind(&layer.gate_up))?;
            products(pool, isa, data, activations, &layer.gate_up, [&mut *gate, &mut *up])?;
            silu_mul(pool, isa, gate, up)?;
            let ffn_down = [layer.ffn_down];
            activations.set(pool, isa, gate, ffn, kind(&ffn_down))?;
            products(pool, isa, data, activations, &ffn_down, [&mut *delta])?;
            add(pool, x, delta)?;
        }

        if wanted.is_empty() {
            return Ok(());
        }
        // Only rows that sample meet the output matrix, as a rule the largest of all.
        let rows = wanted.len();
        let last = slice(&mut s.delta, rows * hidden)?;
        for (&token, row) in wanted.iter().zip(last.chunks_exact_mut(hidden)) {
            row.copy_from_slice(&x[token * hidden..(token + 1) * hidden]);
        }
        let normed = slice(&mut s.normed, rows * hidden)?;
        rms_norm(pool, last, output_norm, eps, normed)?;
        let output = [places.output];
        activations.set(pool, isa, normed, hidden, kind(&output))?;
        let logits = slice(&mut s.logits, rows * config.vocab)?;
        products(pool, isa, data, activations, &output, [logits])?;
        Ok(())
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
