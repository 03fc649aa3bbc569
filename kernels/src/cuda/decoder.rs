//! The forward pass of a decoder on a device, and its draws.
//!
//! **Owns** the weights, the KV arena and all scratch memory of one model, the order of operations, and steps that were recorded as graphs.
//! **Never** knows sequences: it takes rows with their blocks and gives draws.
//!
//! All of a step is queued on one stream; only [`Decoder::draws`] waits, and a step can be queued while the one before it runs. Whoever makes a step says which
//! rows go through [`decode()`](super::decode()), the others go through [`prefill()`](super::prefill()).
//!
//! A step in which every row has one token and is drawn from is padded to a size of [`bucket`] and, from the second one of that size on,
//! recorded and replayed: queueing some hundred kernels takes the host longer than some models take the device. Steps whose rows share
//! blocks are recorded apart from those whose rows do not.
#![allow(unsafe_code)]

mod few;
mod forward;
mod products;
mod shape;
#[cfg(test)]
mod tests;
mod timeline;
mod tune;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use pagedd_core::BlockId;

pub use shape::{DecoderPlaces, DecoderShape, LayerPlaces, MatrixPlace, Place};

use self::forward::{Head, Work};
use self::timeline::Timeline;
use super::attention::{DecodeCut, DecodeLimits, SPLIT, Sharing};
use super::batch::DeviceKvLayout;
use super::buffer::View;
use super::elementwise::TokenSource;
use super::error::CudaError;
use super::gemm::GemmOutput;
use super::graph::Recorded;
use super::launch::Half;
use super::norm::dimension;
use super::pinned::Pinned;
use super::sample::{Drawn, Ranked, SampleRow};
use super::shared::SharedBuffer;
use super::stream::Stream;
use crate::cpu::kv::KvRow;
use crate::error::length;
use crate::four_bit::DecoderForms;

/// Most that steps may ask of a decoder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DecoderLimits {
    /// Rows.
    pub rows: usize,
    /// Tokens of all rows.
    pub tokens: usize,
    /// Tokens that are drawn from.
    pub wanted: usize,
    /// Draws of one call of [`Decoder::draw`].
    pub draws: usize,
    /// Log-probabilities of a draw, beside that of its token.
    pub ranks: usize,
    /// Adjustments of one call of [`Decoder::draw`].
    pub adjustments: usize,
    /// Longest context.
    pub context: usize,
    /// Blocks of the arena.
    pub blocks: u32,
    /// A row's bits are to depend on its own tokens alone: products take one algorithm for any number of rows, and there is room to decode as
    /// many rows as there may be, however long.
    pub exact: bool,
}

/// Memory of a decoder that outlives its process.
#[derive(Debug)]
pub struct DecoderMemory {
    /// Weights, as [`DecoderPlaces`] say.
    pub weights: SharedBuffer,
    /// How its matrices lie there.
    pub forms: DecoderForms,
    /// The KV arena.
    pub kv: SharedBuffer,
    /// Bytes in both before the data: a multiple of 256.
    pub offset: usize,
}

/// What a step computes.
#[derive(Clone, Copy, Debug)]
pub struct DecoderStep<'a> {
    /// Copies before anything else: from which block, to which, how many tokens. None is both read and written.
    pub copies: &'a [(BlockId, BlockId, usize)],
    /// Rows.
    pub rows: &'a [KvRow<'a>],
    /// How many of them, from the first on, are to go through decode attention: each has a single token.
    pub decoded: usize,
    /// The tokens of all rows, in order.
    pub tokens: &'a [TokenSource],
    /// Which tokens are drawn from, ascending.
    pub wanted: &'a [u32],
}

/// Draws that were queued. Two can be waited for at a time: later ones take the place of the older.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ticket {
    slot: usize,
    number: u64,
    step: u64,
}

/// Steps that are recorded as graphs.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Recordings {
    /// How many.
    pub graphs: u32,
    /// What recording them took, each up to the end of the call that first queued it.
    pub took: Duration,
    /// By how much the device's free memory fell meanwhile. It has that of other processes in it.
    pub bytes: u64,
}

/// Where draws come to.
#[derive(Debug)]
struct Slot {
    number: u64,
    drawn: Pinned<Drawn>,
    logprobs: Pinned<f32>,
    ranked: Pinned<Ranked>,
    count: usize,
    ranks: bool,
}

/// What [`Decoder::draw`] gave.
#[derive(Clone, Copy, Debug)]
pub struct Draws<'a> {
    /// Of each row.
    pub drawn: &'a [Drawn],
    /// The log-probability of each row's token, where any asked for some.
    pub logprobs: &'a [f32],
    /// `[rows][stride]`, likewise.
    pub ranked: &'a [Ranked],
    /// Ranks of a row.
    pub stride: usize,
}

/// What a step is recorded for: rows, and what they share.
type Kind = (usize, Sharing);

/// Memory that partial results of blocks that rows share may take.
const SHARED_BYTES: usize = 128 << 20;
/// Memory that partial results of decode attention may take in an exact decoder, which must have room for all rows that a step may have.
const EXACT_BYTES: usize = 8 << 30;
/// Cuts of a step's contexts, about, on a large GPU.
const MOST_CUTS: usize = 512;
/// Block copies of one launch.
const COPIES: usize = 1024;

/// A decoder on a device.
///
/// Having one tells you: every tensor of its shape lies inside its weights, every block inside its arena, and scratch memory is there for any
/// step within its limits.
#[derive(Debug)]
pub struct Decoder<T: Half> {
    /// Before the memory that they use: what is recorded goes first.
    graphs: HashMap<Kind, Recorded>,
    /// Kinds that ran once.
    met: Vec<Kind>,
    work: Work<T>,
    limits: DecoderLimits,
    stream: Stream,
    slots: [Slot; 2],
    /// Of the next draws.
    number: u64,
    /// Whether there is memory to record steps.
    record: bool,
    recordings: Recordings,
    timeline: Timeline,
}

/// Rows that a step of single tokens is padded to.
#[must_use]
pub fn bucket(rows: usize) -> usize {
    match rows {
        0..=2 => rows,
        3..=8 => rows.next_multiple_of(2),
        9..=32 => rows.next_multiple_of(4),
        33..=128 => rows.next_multiple_of(8),
        129..=256 => rows.next_multiple_of(16),
        _ => rows.next_multiple_of(64),
    }
}

impl<T: Half + GemmOutput> Decoder<T> {
    /// A decoder over filled `memory`.
    ///
    /// # Errors
    /// Shapes that kernels do not work with, memory of another size, not enough memory, or the device failed.
    pub fn new(
        stream: &Stream,
        shape: DecoderShape,
        layout: DeviceKvLayout,
        memory: DecoderMemory,
        limits: DecoderLimits,
    ) -> Result<Self, CudaError> {
        let device = stream.device();
        let slot = || {
            Ok::<_, CudaError>(Slot {
                number: 0,
                drawn: Pinned::new(device, limits.draws)?,
                logprobs: Pinned::new(device, limits.draws)?,
                ranked: Pinned::new(device, limits.draws * limits.ranks)?,
                count: 0,
                ranks: false,
            })
        };
        let padded = padded(&limits);
        Ok(Self {
            graphs: HashMap::new(),
            met: Vec::new(),
            work: Work::new(stream, shape, layout, memory, padded)?,
            limits,
            stream: stream.clone(),
            slots: [slot()?, slot()?],
            number: 1,
            record: true,
            recordings: Recordings::default(),
            timeline: Timeline::new(device)?,
        })
    }

    /// Bytes of scratch memory that a decoder of this shape takes within these limits, about.
    #[must_use]
    pub fn scratch_bytes(shape: &DecoderShape, forms: &DecoderForms, limits: &DecoderLimits) -> usize {
        let limits = &padded(limits);
        let width = 4 * shape.hidden + shape.qkv_width() + shape.query_width() + 3 * shape.ffn;
        let logits = limits.wanted * shape.vocabulary * size_of::<f32>();
        let draws = limits.draws * (64 << 10);
        let elements = limits.tokens * width + shape::widest(shape, forms);
        elements * size_of::<T>() + logits + draws + cut_bytes(shape, limits) + (128 << 20)
    }

    /// Weights and KV arena.
    #[must_use]
    pub fn memory(&self) -> &DecoderMemory {
        &self.work.memory
    }

    /// Queues copies, keys and values of all tokens, and the logits of those wanted.
    ///
    /// # Errors
    /// The step is not within limits or not inside the arena (nothing was queued, or nothing but copies), or the device failed.
    pub fn forward(&mut self, step: &DecoderStep<'_>) -> Result<(), CudaError> {
        self.timeline.begin();
        for copies in step.copies.chunks(COPIES) {
            self.work.copy(&self.stream, copies)?;
        }
        let (rows, tokens) = (step.rows.len(), step.tokens.len());
        for (what, found, most) in [
            ("rows of a step", rows, self.limits.rows),
            ("tokens of a step", tokens, self.limits.tokens),
            ("tokens drawn from", step.wanted.len(), self.limits.wanted),
        ] {
            if found > most {
                return Err(dimension(what, "at most the limit", found));
            }
        }
        length("tokens of a step", step.rows.iter().map(|row| row.tokens as usize).sum(), tokens)?;
        if rows == 0 {
            return Ok(());
        }
        if step.decoded > rows || step.rows[..step.decoded].iter().any(|row| row.tokens != 1) {
            return Err(dimension("decoded rows", "rows of a single token", step.decoded));
        }
        // A row that there is no room for goes through prefill, with other last bits.
        let decoded = self.work.attends(&step.rows[..step.decoded]);
        if decoded == rows && step.wanted.len() == rows {
            self.single(step)
        } else {
            self.mixed(step, decoded)
        }
    }

    /// A step in which every row has one token and is drawn from.
    fn single(&mut self, step: &DecoderStep<'_>) -> Result<(), CudaError> {
        let Self { work, stream, graphs, met, record, recordings, timeline, .. } = self;
        let size = bucket(step.rows.len());
        let sharing = work.together(stream, |work| {
            work.set(stream, step, size)?;
            work.share(stream, size)
        })?;
        let kind = (size, sharing);
        if let Some(graph) = graphs.get(&kind) {
            work.check_decode(size)?;
            timeline.start(stream)?;
            // SAFETY: all that was recorded lies in `work`, whose buffers are neither replaced nor freed before `graphs`. What proves that it
            // stays inside was set for the same number of tokens and rows, within the same limits (`set`, `share`, `check_decode`).
            return unsafe { graph.replay() };
        }
        if *record && met.contains(&kind) {
            let (begun, (free, _)) = (Instant::now(), stream.device().memory()?);
            let recorded = Recorded::capture(stream, |stream| work.run(stream, size, size, Head::All));
            if let Ok(graph) = recorded {
                let graph = graphs.entry(kind).or_insert(graph);
                timeline.start(stream)?;
                // SAFETY: as above; it was set for this step.
                unsafe { graph.replay() }?;
                recordings.graphs += 1;
                recordings.took += begun.elapsed();
                recordings.bytes += free.saturating_sub(stream.device().memory()?.0) as u64;
                return Ok(());
            }
            // Where the device itself is well, it lacks memory for one more: steps run as they come.
            stream.synchronize()?;
            *record = false;
        }
        timeline.start(stream)?;
        work.run(stream, size, size, Head::All)?;
        // Its algorithms are chosen and its kernels loaded: nothing of that can be recorded.
        if *record {
            met.push(kind);
        }
        Ok(())
    }

    fn mixed(&mut self, step: &DecoderStep<'_>, decoded: usize) -> Result<(), CudaError> {
        let Self { work, stream, timeline, .. } = self;
        work.together(stream, |work| {
            work.set(stream, step, step.tokens.len())?;
            work.set_wanted(stream, step)?;
            work.set_prefill(stream, decoded..step.rows.len())?;
            work.share(stream, decoded)
        })?;
        let head = if step.wanted.is_empty() { Head::None } else { Head::Wanted };
        timeline.start(stream)?;
        work.run(stream, step.tokens.len(), decoded, head)
    }

    /// Queues draws from the logits of the last step, whose wanted tokens are the rows of logits. A later step may name them as
    /// [`TokenSource::Drawn`] until others are queued.
    ///
    /// # Errors
    /// A row that is not there or out of limits (nothing was queued), or the device failed.
    pub fn draw(&mut self, rows: &[SampleRow<'_>]) -> Result<Ticket, CudaError> {
        let ticket =
            Ticket { slot: (self.number % 2) as usize, number: self.number, step: self.timeline.step() };
        let slot = &mut self.slots[ticket.slot];
        // Nobody may take old draws for these.
        slot.number = 0;
        (slot.count, slot.ranks) = (rows.len(), rows.iter().any(|row| row.params.logprobs.is_some()));
        let stream = &self.stream;
        self.work.together(stream, |work| work.sampler.set(stream, &mut work.ring, rows))?;
        let Work { sampler, logits, .. } = &mut self.work;
        sampler.run(stream, &mut logits.all_mut())?;
        self.timeline.end(&self.stream)?;
        if slot.ranks {
            slot.logprobs.download(&self.stream, sampler.logprobs().part(0..rows.len())?)?;
            slot.ranked.download(&self.stream, sampler.ranked().part(0..rows.len() * self.limits.ranks)?)?;
        }
        slot.drawn.download(&self.stream, sampler.drawn().part(0..rows.len())?)?;
        slot.number = self.number;
        self.number += 1;
        Ok(ticket)
    }

    /// Waits for draws, and for all that was queued before them.
    ///
    /// # Errors
    /// Others took their place, or the device failed.
    pub fn draws(&self, ticket: Ticket) -> Result<Draws<'_>, CudaError> {
        let slot = &self.slots[ticket.slot];
        if slot.number != ticket.number {
            return Err(CudaError::Plan);
        }
        let (count, stride) = (slot.count, self.limits.ranks);
        let drawn = &slot.drawn.read()?[..count];
        if !slot.ranks {
            return Ok(Draws { drawn, logprobs: &[], ranked: &[], stride });
        }
        let (logprobs, ranked) = (&slot.logprobs.read()?[..count], &slot.ranked.read()?[..count * stride]);
        Ok(Draws { drawn, logprobs, ranked, stride })
    }

    /// Microseconds between the last kernel of the step before that of `ticket` and the first of this one: what is copied to and from the
    /// device lies there, copies of blocks too. `None` of a first step, of one without rows, and of one behind such a step. The draws were waited for,
    /// and none of a step after the next were queued.
    ///
    /// # Errors
    /// The device failed.
    pub fn idle_us(&self, ticket: Ticket) -> Result<Option<f64>, CudaError> {
        self.timeline.idle_us(ticket.step)
    }

    /// Logits of the last step, `[wanted][vocabulary]`.
    pub(super) fn logits(&self) -> View<'_, f32> {
        self.work.logits.all()
    }

    /// Steps that are recorded.
    #[must_use]
    pub fn recordings(&self) -> Recordings {
        self.recordings
    }

    /// Waits until all that is queued is done.
    ///
    /// # Errors
    /// The device failed.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.stream.synchronize()
    }
}

/// What buffers are made for: steps are padded.
fn padded(limits: &DecoderLimits) -> DecoderLimits {
    DecoderLimits {
        rows: bucket(limits.rows),
        tokens: limits.tokens.max(bucket(limits.rows)),
        wanted: limits.wanted.max(bucket(limits.rows.min(limits.wanted))),
        ..*limits
    }
}

/// Bytes of decode attention's partial results of rows of `context` positions.
fn partial_bytes(shape: &DecoderShape, rows: usize, context: usize) -> usize {
    let group = shape.heads / shape.kv_heads.max(1);
    let units = DecodeLimits::units_of(1, group.max(1), context).saturating_mul(rows);
    units.saturating_mul(unit_bytes(shape))
}

/// Most rows of the longest context that an exact decoder is made for, so that its partial results do not take the memory of KV blocks.
#[must_use]
pub fn exact_rows(shape: &DecoderShape, context: usize) -> usize {
    let row = partial_bytes(shape, 1, context).max(1);
    EXACT_BYTES / row
}

/// Longest context of which an exact decoder is made for so many rows.
#[must_use]
pub fn exact_context(shape: &DecoderShape, rows: usize) -> usize {
    let splits = EXACT_BYTES / partial_bytes(shape, rows.max(1), 1).max(1);
    splits.saturating_mul(SPLIT)
}

/// Bytes of partial results of a unit of decode work.
fn unit_bytes(shape: &DecoderShape) -> usize {
    let group = (shape.heads / shape.kv_heads.max(1)).min(16);
    shape.kv_heads * group * (shape.head_dim + 2) * size_of::<f32>()
}

/// Where contexts are cut, and room for their partial results.
fn cut(shape: &DecoderShape, limits: &DecoderLimits) -> DecodeCut {
    let unit = unit_bytes(shape).max(1);
    let all = partial_bytes(shape, limits.rows, limits.context);
    if limits.exact {
        DecodeCut::Fixed { units: (all / unit).max(1) }
    } else {
        DecodeCut::Even { slots: (all.min(SHARED_BYTES) / unit).max(limits.rows) }
    }
}

/// Bytes of those.
fn cut_bytes(shape: &DecoderShape, limits: &DecoderLimits) -> usize {
    let slots = match cut(shape, limits) {
        DecodeCut::Fixed { units } => units,
        // A slot for each row and each cut, too.
        DecodeCut::Even { slots } => slots + limits.rows + MOST_CUTS,
    };
    slots * unit_bytes(shape)
}
