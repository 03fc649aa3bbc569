//! What a step queues, in order.

use std::ops::Range;

use pagedd_core::BlockId;

use super::few;
use super::products::{Gated, Order, Products};
use super::shape::{DecoderPlaces, DecoderShape, LayerPlaces, MatrixPlace, Place, widest};
use super::{COPIES, DecoderLimits, DecoderMemory, DecoderStep, cut};
use crate::cpu::attention::AttentionShape;
use crate::cpu::kv::KvRow;
use crate::cuda::attention::{
    Attention, DecodeCut, DecodeLimits, DecodePlan, PrefillPlan, Sharing, decode, prefill,
};
use crate::cuda::batch::{DeviceBatch, DeviceKvLayout, Indices};
use crate::cuda::buffer::{Buffer, Plain, View};
use crate::cuda::elementwise::{BlockCopies, Embed, TokenSource, Tokens, copy_blocks, embed};
use crate::cuda::error::CudaError;
use crate::cuda::four_bit::FourBitMatrix;
use crate::cuda::gemm::GemmOutput;
use crate::cuda::launch::Half;
use crate::cuda::norm::{AddNorm, add_rms_norm};
use crate::cuda::pinned::PinnedRing;
use crate::cuda::rope::{DeviceAngles, RopeIntoKv, rope_into_kv};
use crate::cuda::sample::Sampler;
use crate::cuda::shared::SharedBuffer;
use crate::cuda::stream::Stream;
use crate::error::{ShapeError, length, product};

/// Slots of the ring that a step's inputs go through: more than one step fills.
const RING_SLOTS: usize = 48;
const RING_BYTES: usize = 256 << 10;

/// Which logits a step asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Head {
    /// Those of all tokens.
    All,
    /// Those of the tokens that were set as wanted.
    Wanted,
    /// None.
    None,
}

/// Where what the last operator gave is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Residual {
    /// In the residual stream.
    Added,
    /// Beside it, still to be added.
    Beside,
}

/// Weights, arena, and buffers of a step, made once for the largest.
#[derive(Debug)]
pub(super) struct Work<T: Half> {
    pub(super) memory: DecoderMemory,
    pub(super) shape: DecoderShape,
    pub(super) places: DecoderPlaces,
    cut: DecodeCut,
    arena_bytes: usize,
    tokens: Tokens,
    batch: DeviceBatch,
    pub(super) wanted: Indices,
    angles: DeviceAngles,
    decode: DecodePlan,
    prefill: PrefillPlan,
    copies: BlockCopies,
    pub(super) products: Products<T>,
    /// Layers can multiply few rows with kernels of their own.
    pub(super) few_rows: bool,
    pub(super) sampler: Sampler,
    pub(super) ring: PinnedRing,
    /// The residual stream: `[tokens][hidden]`.
    pub(super) x: Buffer<f32>,
    /// What an operator adds to it.
    pub(super) delta: Buffer<T>,
    pub(super) normed: Buffer<T>,
    pub(super) qkv: Buffer<T>,
    pub(super) attended: Buffer<T>,
    pub(super) gate_up: Buffer<T>,
    pub(super) activated: Buffer<T>,
    /// `[wanted][vocabulary]`.
    pub(super) logits: Buffer<f32>,
    /// Host memory for the padded tokens of a step.
    sources: Vec<TokenSource>,
}

impl<T: Half + GemmOutput> Work<T> {
    pub(super) fn new(
        stream: &Stream,
        shape: DecoderShape,
        layout: DeviceKvLayout,
        memory: DecoderMemory,
        limits: DecoderLimits,
    ) -> Result<Self, CudaError> {
        let places = DecoderPlaces::new(&shape, &memory.forms)?;
        let DecoderLimits { rows, tokens, wanted, draws, ranks, adjustments, context, blocks, exact } =
            limits;
        if (layout.layers, layout.kv_heads, layout.head_dim) != (shape.layers, shape.kv_heads, shape.head_dim)
        {
            return Err(CudaError::Plan);
        }
        let arena_bytes = layout.arena_bytes(blocks)?;
        for (what, needed, buffer) in
            [("weights", places.bytes, &memory.weights), ("KV arena", arena_bytes, &memory.kv)]
        {
            let needed = needed.checked_add(memory.offset).ok_or(ShapeError::Overflow { what })?;
            if buffer.len() < needed {
                return Err(ShapeError::Length { what, needed, found: buffer.len() }.into());
            }
        }
        let cut = cut(&shape, &limits);
        let room = |width: usize| Buffer::zeroed(stream, product("scratch memory", &[tokens, width])?);
        let products = Products::new(stream, widest(&shape, &memory.forms), exact)?;
        let tables = product("block tables", &[rows, context.div_ceil(layout.block_size)])?;
        Ok(Self {
            cut,
            arena_bytes,
            tokens: Tokens::with_capacity(stream, tokens)?,
            batch: DeviceBatch::with_capacity(stream, layout, blocks, (tokens, rows, tables))?,
            wanted: Indices::with_capacity(stream, wanted)?,
            angles: DeviceAngles::new(stream, &shape.frequencies, shape.magnitude, tokens)?,
            decode: DecodePlan::new(stream, &layout, shape.heads, DecodeLimits { rows, queries: 1, cut })?,
            prefill: PrefillPlan::new(stream, &layout, shape.heads, (tokens, rows))?,
            copies: BlockCopies::with_capacity(stream, layout, blocks, COPIES)?,
            products,
            few_rows: !exact && few::takes(stream, &places),
            sampler: Sampler::new(stream, shape.vocabulary, draws, ranks, adjustments)?,
            ring: PinnedRing::new(stream.device(), RING_SLOTS, RING_BYTES)?,
            x: Buffer::zeroed(stream, product("scratch memory", &[tokens, shape.hidden])?)?,
            delta: room(shape.hidden)?,
            normed: room(shape.hidden)?,
            qkv: room(shape.qkv_width())?,
            attended: room(shape.query_width())?,
            gate_up: room(2 * shape.ffn)?,
            activated: room(shape.ffn)?,
            logits: Buffer::zeroed(stream, product("logits", &[wanted, shape.vocabulary])?)?,
            sources: Vec::with_capacity(tokens),
            memory,
            shape,
            places,
        })
    }

    /// Copies blocks, at most [`COPIES`].
    pub(super) fn copy(
        &mut self,
        stream: &Stream,
        copies: &[(BlockId, BlockId, usize)],
    ) -> Result<(), CudaError> {
        self.copies.set(stream, &mut self.ring, copies)?;
        let range = self.memory.offset..self.memory.offset + self.arena_bytes;
        copy_blocks(stream, &self.copies, &mut self.memory.kv.all_mut().part(range)?)
    }

    /// How many of `rows`, of a token each, decode has room for, from the first on.
    pub(super) fn attends(&self, rows: &[KvRow<'_>]) -> usize {
        let group = self.shape.heads / self.shape.kv_heads;
        let mut left = match self.cut {
            DecodeCut::Fixed { units } => units,
            DecodeCut::Even { .. } => return rows.len(),
        };
        rows.iter()
            .take_while(|row| {
                let units = DecodeLimits::units_of(1, group, row.first_position as usize + 1);
                let fits = units <= left;
                left = left.saturating_sub(units);
                fits
            })
            .count()
    }

    /// Has what `set` uploads go to the device together.
    pub(super) fn together<R>(
        &mut self,
        stream: &Stream,
        set: impl FnOnce(&mut Self) -> Result<R, CudaError>,
    ) -> Result<R, CudaError> {
        // SAFETY: buffers of `self` are set, which are neither freed nor replaced as long as it lives; kernels are queued behind.
        unsafe { self.ring.hold() }?;
        let done = set(self).inspect_err(|_| self.ring.discard())?;
        self.ring.flush(stream)?;
        Ok(done)
    }

    /// Brings rows and tokens to the device, with padding up to `tokens` tokens.
    pub(super) fn set(
        &mut self,
        stream: &Stream,
        step: &DecoderStep<'_>,
        tokens: usize,
    ) -> Result<(), CudaError> {
        self.sources.clear();
        self.sources.extend_from_slice(step.tokens);
        self.sources.resize(tokens, TokenSource::Known(0));
        self.batch.set(stream, &mut self.ring, step.rows, tokens)?;
        self.tokens.set(stream, &mut self.ring, &self.sources)
    }

    pub(super) fn set_wanted(&mut self, stream: &Stream, step: &DecoderStep<'_>) -> Result<(), CudaError> {
        self.wanted.set(stream, &mut self.ring, step.wanted, step.tokens.len())
    }

    pub(super) fn set_prefill(&mut self, stream: &Stream, rows: Range<usize>) -> Result<(), CudaError> {
        self.prefill.set(stream, &mut self.ring, &self.batch, rows)
    }

    /// Finds what the first `rows` rows of the batch, which are decoded, share.
    pub(super) fn share(&mut self, stream: &Stream, rows: usize) -> Result<Sharing, CudaError> {
        self.decode.share(stream, &mut self.ring, &self.batch, 0..rows)
    }

    /// `Ok` where the first `rows` rows of the batch can be decoded.
    pub(super) fn check_decode(&self, rows: usize) -> Result<(), CudaError> {
        self.decode.check(&self.batch, 0..rows)
    }

    /// Queues the forward pass of the batch that was set: `tokens` tokens, of which the first `decoded` rows are decoded and the other rows
    /// are those of the prefill plan.
    pub(super) fn run(
        &mut self,
        stream: &Stream,
        tokens: usize,
        decoded: usize,
        head: Head,
    ) -> Result<(), CudaError> {
        self.angles.set(stream, &self.batch)?;
        if decoded > 0 {
            self.decode.set(stream, &self.batch, 0..decoded)?;
        }
        let hidden = self.shape.hidden;
        embed(
            stream,
            Embed {
                table: view::<T>(&self.memory.weights, self.memory.offset, self.places.embedding)?,
                hidden,
                tokens: &self.tokens,
                drawn: Some(self.sampler.drawn()),
                out: self.x.part_mut(0..tokens * hidden)?,
            },
        )?;
        let few = self.takes_few(tokens);
        for index in 0..self.shape.layers {
            let places = self.places.layers[index];
            if few {
                self.few_project_qkv(stream, tokens, places)?;
                self.attend(stream, tokens, decoded, index, places)?;
                self.few_behind_attention(stream, tokens, places)?;
            } else {
                self.project_qkv(stream, tokens, index, places)?;
                self.attend(stream, tokens, decoded, index, places)?;
                self.project_output(stream, tokens, places)?;
                self.feed_forward(stream, tokens, places)?;
            }
        }
        self.head(stream, tokens, head, if few { Residual::Added } else { Residual::Beside })
    }

    /// From the residual stream to queries, keys and values.
    fn project_qkv(
        &mut self,
        stream: &Stream,
        tokens: usize,
        index: usize,
        places: LayerPlaces,
    ) -> Result<(), CudaError> {
        self.norm(stream, tokens, places.attn_norm, index > 0)?;
        let Self { memory, shape, products, normed, qkv, .. } = self;
        let x = normed.part(0..tokens * shape.hidden)?;
        let out = qkv.part_mut(0..tokens * shape.qkv_width())?;
        products.store(stream, memory, places.qkv, x, out)
    }

    /// Attention of a layer, from queries, keys and values to what the heads give.
    fn attend(
        &mut self,
        stream: &Stream,
        tokens: usize,
        decoded: usize,
        index: usize,
        places: LayerPlaces,
    ) -> Result<(), CudaError> {
        let Self { memory, shape, batch, qkv, attended, .. } = self;
        let (width, query) = (shape.qkv_width(), shape.query_width());
        let arena = memory.offset..memory.offset + self.arena_bytes;
        // Bias and arena are of two buffers.
        let DecoderMemory { weights, kv, offset, .. } = memory;
        rope_into_kv(
            stream,
            RopeIntoKv {
                qkv: qkv.part_mut(0..tokens * width)?,
                heads: shape.heads,
                bias: places.bias.map(|bias| view(weights, *offset, bias)).transpose()?,
                angles: &self.angles,
                pairing: shape.pairing,
                batch,
                layer: index,
                arena: kv.all_mut().part(arena.clone())?,
            },
        )?;
        let q = qkv.part(0..tokens * width)?;
        let shape = AttentionShape { heads: shape.heads, scale: 1.0 / (shape.head_dim as f32).sqrt() };
        let arena = kv.all().part(arena)?;
        if decoded > 0 {
            let out = attended.part_mut(0..tokens * query)?;
            decode(stream, &mut self.decode, Attention { q, shape, batch, layer: index, arena, out })?;
        }
        if decoded < batch.rows() {
            let out = attended.part_mut(0..tokens * query)?;
            prefill(stream, &self.prefill, Attention { q, shape, batch, layer: index, arena, out })?;
        }
        Ok(())
    }

    /// From what the heads give to what is added to the residual stream.
    fn project_output(
        &mut self,
        stream: &Stream,
        tokens: usize,
        places: LayerPlaces,
    ) -> Result<(), CudaError> {
        let Self { memory, shape, products, attended, delta, .. } = self;
        let x = attended.part(0..tokens * shape.query_width())?;
        let out = delta.part_mut(0..tokens * shape.hidden)?;
        products.store(stream, memory, places.attn_output, x, out)
    }

    fn feed_forward(&mut self, stream: &Stream, tokens: usize, places: LayerPlaces) -> Result<(), CudaError> {
        self.norm(stream, tokens, places.ffn_norm, true)?;
        let Self { memory, shape, products, normed, gate_up, activated, delta, .. } = self;
        let (hidden, ffn) = (shape.hidden, shape.ffn);
        let x = normed.part(0..tokens * hidden)?;
        let both = gate_up.part_mut(0..tokens * 2 * ffn)?;
        let out = activated.part_mut(0..tokens * ffn)?;
        products.gated(stream, memory, places.gate_up, x, Gated { both, out })?;
        let x = activated.part(0..tokens * ffn)?;
        products.store(stream, memory, places.ffn_down, x, delta.part_mut(0..tokens * hidden)?)
    }

    /// Adds what the last operator gave to the residual stream, and norms it.
    fn norm(&mut self, stream: &Stream, tokens: usize, weight: Place, adds: bool) -> Result<(), CudaError> {
        let range = 0..tokens * self.shape.hidden;
        add_rms_norm(
            stream,
            AddNorm {
                x: self.x.part_mut(range.clone())?,
                delta: if adds { Some(self.delta.part(range.clone())?) } else { None },
                weight: view(&self.memory.weights, self.memory.offset, weight)?,
                epsilon: self.shape.epsilon,
                rows: None,
                out: self.normed.part_mut(range)?,
            },
        )
    }

    /// Logits.
    fn head(
        &mut self,
        stream: &Stream,
        tokens: usize,
        head: Head,
        residual: Residual,
    ) -> Result<(), CudaError> {
        let (rows, count) = match head {
            Head::None => return Ok(()),
            Head::All => (None, tokens),
            Head::Wanted => (Some(&self.wanted), self.wanted.len()),
        };
        if residual == Residual::Added && head == Head::All {
            return self.few_head(stream, tokens);
        }
        let (hidden, vocabulary) = (self.shape.hidden, self.shape.vocabulary);
        let delta = self.delta.part(0..tokens * hidden)?;
        add_rms_norm(
            stream,
            AddNorm {
                x: self.x.part_mut(0..tokens * hidden)?,
                delta: (residual == Residual::Beside).then_some(delta),
                weight: view(&self.memory.weights, self.memory.offset, self.places.output_norm)?,
                epsilon: self.shape.epsilon,
                rows,
                out: self.normed.part_mut(0..count * hidden)?,
            },
        )?;
        if self.takes_few(count) {
            return self.few_logits(stream, count);
        }
        let Self { memory, places, products, normed, logits, .. } = self;
        let x = normed.part(0..count * hidden)?;
        products.single(stream, memory, places.output, x, logits.part_mut(0..count * vocabulary)?)
    }
}

/// A tensor among the weights.
pub(super) fn view<E: Plain>(
    weights: &SharedBuffer,
    offset: usize,
    place: Place,
) -> Result<View<'_, E>, CudaError> {
    let first = offset + place.at;
    let bytes = product("weights", &[place.len, size_of::<E>()])?;
    let view = weights.all().part(first..first + bytes)?.cast::<E>()?;
    length("weights", place.len, view.len())?;
    Ok(view)
}

/// A matrix of elements.
pub(super) fn matrix<T: Half>(memory: &DecoderMemory, place: MatrixPlace) -> Result<View<'_, T>, CudaError> {
    view(&memory.weights, memory.offset, place.place())
}

/// A matrix of four bits.
pub(super) fn tiles(
    memory: &DecoderMemory,
    place: MatrixPlace,
    order: Order,
) -> Result<FourBitMatrix<'_>, CudaError> {
    let bytes = view(&memory.weights, memory.offset, place.place())?;
    Ok(FourBitMatrix::new(place.shape, bytes, order == Order::Interleaved)?)
}
