//! Decode and prefill attention against double precision, and the promise that neighbours change no bits where it is given.

use std::cell::{Cell, OnceCell};
use std::ops::Range;

use half::bf16;
use pagedd_core::BlockId;

use super::{Bench, Extent, Found, halves, word};
use crate::cpu::attention::AttentionShape;
use crate::cpu::kv::KvRow;
use crate::cuda::{
    Attention, Buffer, CudaError, DecodeCut, DecodeLimits, DecodePlan, DeviceBatch, DeviceKvLayout, Graph,
    Half, PrefillPlan, Sharing, decode, prefill,
};
use crate::e4m3::{DeviceKvElement, e4m3_value, quantize_e4m3};

/// Layers of an arena, and the one attended to. The others hold NaNs.
const LAYERS: usize = 3;
const LAYER: usize = 1;
/// Bits of an element that no kernel wrote: a NaN. Each byte of a slot that holds no token is half of it, and an e4m3's NaN.
const UNTOUCHED: u16 = 0xffff;
/// A position whose keys and values are zeros.
const ZEROS: usize = 5;
/// Tokens and rows of padding.
const PADDING: (usize, usize) = (3, 2);

/// Positions that a row's last query sees, and its queries.
type Sequence = (usize, usize);

/// Sequences of one query: positions it sees, which earlier one it begins like, and for how many blocks.
type Beginning = (usize, usize, usize);

#[derive(Clone, Copy)]
struct Shape {
    kv_heads: usize,
    group: usize,
    head_dim: usize,
    block_size: usize,
    by_layer: bool,
    element: DeviceKvElement,
}

/// With keys and values as they are multiplied, and as e4m3 where there are kernels for it.
pub(super) fn check<T: Half>(bench: &mut Bench, extent: Extent) -> Result<(), CudaError> {
    check_element::<T>(bench, extent, DeviceKvElement::Half)?;
    if T::NAME == bf16::NAME { check_element::<T>(bench, extent, DeviceKvElement::E4m3) } else { Ok(()) }
}

fn check_element<T: Half>(
    bench: &mut Bench,
    extent: Extent,
    element: DeviceKvElement,
) -> Result<(), CudaError> {
    // The first row of a decode batch is a prompt's, which decode must leave alone.
    let singles: &[Sequence] = &[
        (9, 9),
        (1, 1),
        (15, 1),
        (16, 1),
        (17, 1),
        (129, 1),
        (255, 1),
        (256, 1),
        (257, 1),
        (700, 1),
        (2300, 1),
    ];
    let guesses: &[Sequence] = &[(9, 9), (2, 2), (5, 5), (131, 4), (259, 6), (513, 3), (400, 1)];
    let prompts: &[Sequence] = &[(1, 1), (17, 17), (64, 64), (300, 300), (333, 70), (129, 1)];
    let chunks: &[Sequence] = &[(65, 65), (700, 33), (1025, 2)];
    for head_dim in [64, 80, 96, 128, 256] {
        let shape = |kv_heads, group, block_size, by_layer| Shape {
            kv_heads,
            group,
            head_dim,
            block_size,
            by_layer,
            element,
        };
        if extent == Extent::Minimal {
            let problem =
                Problem::<T>::new(bench, shape(1, 3, 16, false), &[(9, 9), (280, 1), (19, 6), (64, 1)])?;
            problem.decodes(bench, extent)?;
            let problem = Problem::<T>::new(bench, shape(1, 3, 16, false), &[(70, 70), (330, 5)])?;
            problem.prefills(bench, extent)?;
            let beginnings = [(9, 0, 0), (150, 0, 0), (170, 1, 8), (160, 1, 8), (100, 0, 0)];
            Problem::<T>::sharing(bench, shape(1, 3, 16, false), &beginnings)?.shares(bench, false)?;
            let large: Vec<Beginning> = (0..24).map(|i| (150 + i, 0, if i > 0 { 8 } else { 0 })).collect();
            Problem::<T>::sharing(bench, shape(1, 3, 16, false), &large)?.shares(bench, true)?;
            continue;
        }
        for shape in
            [shape(2, 4, 16, false), shape(1, 16, 512, true), shape(3, 3, 64, false), shape(2, 7, 32, true)]
        {
            for sequences in [singles, guesses] {
                Problem::<T>::new(bench, shape, sequences)?.decodes(bench, extent)?;
            }
            for sequences in [prompts, chunks] {
                Problem::<T>::new(bench, shape, sequences)?.prefills(bench, extent)?;
            }
        }
        Problem::<T>::new(bench, shape(4, 1, 128, false), singles)?.decodes(bench, extent)?;
        for shape in [
            shape(2, 4, 16, false),
            shape(1, 16, 512, true),
            shape(3, 3, 64, false),
            shape(2, 7, 32, true),
            shape(2, 1, 128, false),
        ] {
            let blocks = |tokens: usize| tokens.div_ceil(shape.block_size);
            let size = shape.block_size;
            // A prompt's row, which is not decode's; pairs; a row by itself; a tree of several; one whose last block is full.
            let some: Vec<Beginning> = vec![
                (9, 0, 0),
                (3 * blocks(200) * size + 1, 0, 0),
                (3 * blocks(200) * size + 5, 1, 2 * blocks(200)),
                (400, 0, 0),
                (blocks(130) * size + 70, 1, blocks(130)),
                (4 * blocks(200) * size, 2, 3 * blocks(200)),
                (2 * blocks(300) * size + 16, 0, 0),
                (2 * blocks(300) * size, 6, 2 * blocks(300) - 1),
                (1, 0, 0),
            ];
            // More packed rows than tiles of the kernel for large groups have, behind what all have in common.
            let many = |i: usize| match i {
                0 => (blocks(130) * size + 3, 0, 0),
                1..8 => (blocks(130) * size + 10 * i, 0, blocks(130)),
                8 => (blocks(130) * size + blocks(300) * size + 1, 0, blocks(130)),
                _ => ((blocks(130) + blocks(300)) * size + i, 8, blocks(130) + blocks(300)),
            };
            let many: Vec<Beginning> = (0..72).map(many).collect();
            Problem::<T>::sharing(bench, shape, &some)?.shares(bench, false)?;
            Problem::<T>::sharing(bench, shape, &many)?.shares(bench, true)?;
        }
        // Guesses are not for such plans; contexts that are cut anywhere are.
        let uneven: Vec<Sequence> =
            [(9, 9), (3000, 1), (1, 1), (64, 1), (65, 1), (1500, 1)].into_iter().collect();
        Problem::<T>::new(bench, shape(2, 4, 16, false), &uneven)?.shares_nothing(bench)?;
        // Many short ones beside long ones, which are cut between short ones, too.
        let short = (0..150).map(|i| (1 + i % 130, 1));
        let beside: Vec<Sequence> = [(9, 9), (3000, 1)].into_iter().chain(short).chain([(1500, 1)]).collect();
        Problem::<T>::new(bench, shape(2, 4, 16, false), &beside)?.shares_nothing(bench)?;
        Problem::<T>::new(bench, shape(4, 1, 128, false), singles)?.shares_nothing(bench)?;
    }
    Ok(())
}

/// Random keys, values and queries, in blocks of random order.
struct Problem<T: Half> {
    shape: Shape,
    layout: DeviceKvLayout,
    capacity: u32,
    sequences: Vec<Sequence>,
    tables: Vec<Vec<BlockId>>,
    arena: Vec<u8>,
    on_device: Buffer<u8>,
    /// Per sequence, `[queries][heads][head_dim]`.
    queries: Vec<Vec<T>>,
    /// What the last plan that cuts evenly found.
    found: Cell<Sharing>,
    /// Of keys and values as they are, and rounded to `T`.
    answers: [OnceCell<Vec<Vec<f64>>>; 2],
}

/// Queries of a sequence: the row of a batch.
#[derive(Clone)]
struct Part {
    sequence: usize,
    queries: Range<usize>,
}

/// Which keys and values a kernel rounds to `T` before it multiplies them, where they are e4m3.
#[derive(Clone, Copy, PartialEq)]
enum Rounded {
    None,
    /// Those of the tokens that some groups have in common.
    Some,
    All,
}

#[derive(Clone, Copy, PartialEq)]
enum Kernel {
    Decode,
    /// As decode, captured and replayed.
    Replay,
    /// As both, by a plan that cuts evenly.
    Even,
    EvenReplay,
    /// As the first, with the kernel for large groups also where it has little to do.
    Tiles,
    /// One of those for this size of heads; `None`: as the size of the batch asks.
    Prefill(Option<usize>),
}

impl<T: Half> Problem<T> {
    fn new(bench: &Bench, shape: Shape, sequences: &[Sequence]) -> Result<Self, CudaError> {
        let apart = vec![(0, 0); sequences.len()];
        Self::beginning(bench, shape, sequences, &apart)
    }

    /// The first is a prompt's, as long as it says.
    fn sharing(bench: &Bench, shape: Shape, rows: &[Beginning]) -> Result<Self, CudaError> {
        let sequences: Vec<Sequence> = rows
            .iter()
            .enumerate()
            .map(|(i, &(context, ..))| (context, if i > 0 { 1 } else { context.min(9) }))
            .collect();
        let beginnings: Vec<(usize, usize)> = rows.iter().map(|&(_, like, blocks)| (like, blocks)).collect();
        Self::beginning(bench, shape, &sequences, &beginnings)
    }

    /// Each sequence begins with so many blocks of an earlier one.
    fn beginning(
        bench: &Bench,
        shape: Shape,
        sequences: &[Sequence],
        beginnings: &[(usize, usize)],
    ) -> Result<Self, CudaError> {
        let Shape { kv_heads, group, head_dim: d, block_size, by_layer, element } = shape;
        let blocks: Vec<usize> = sequences.iter().map(|&(context, _)| context.div_ceil(block_size)).collect();
        // One block is nobody's, and at the end of every table.
        let capacity = blocks.iter().sum::<usize>() as u32 + 1;
        let mut order: Vec<u32> = (0..capacity).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, word(300, i) as usize % (i + 1));
        }
        let nobody = order[capacity as usize - 1];
        let mut free = order.iter().map(|&block| BlockId(block));
        let table = |&count: &usize| free.by_ref().take(count).chain([BlockId(nobody)]).collect();
        let mut tables: Vec<Vec<BlockId>> = blocks.iter().map(table).collect();
        for (index, &(like, blocks)) in beginnings.iter().enumerate() {
            let (before, own) = tables.split_at_mut(index);
            if let (Some(from), Some(to)) = (before.get(like), own.first_mut()) {
                to[..blocks].copy_from_slice(&from[..blocks]);
            }
        }
        let layout = if by_layer {
            DeviceKvLayout::layers_outermost(LAYERS, kv_heads, d, block_size, element, capacity)?
        } else {
            DeviceKvLayout::blocks_outermost(LAYERS, kv_heads, d, block_size, element)?
        };
        let mut arena = vec![UNTOUCHED as u8; layout.arena_bytes(capacity)?];
        let zeros = vec![T::from_f64(0.0); d];
        for (index, &(context, _)) in sequences.iter().enumerate() {
            // What it begins with is there.
            let first = if index > 0 { beginnings[index].1 * block_size } else { 0 };
            let own = context - first;
            let kv = halves::<T>(310 + index as u32, 2 * kv_heads * own * d);
            for (row, data) in kv.chunks_exact(d).enumerate() {
                let (head, position) = (row / own, first + row % own);
                let block = tables[index][position / block_size].0;
                let place = (block, head / kv_heads, head % kv_heads, position % block_size);
                write(&mut arena, &layout, place, if position == ZEROS { &zeros } else { data });
            }
        }
        let queries = |(index, &(_, count)): (usize, &Sequence)| {
            halves(330 + index as u32, count * kv_heads * group * d)
        };
        Ok(Self {
            shape,
            layout,
            capacity,
            sequences: sequences.to_vec(),
            tables,
            on_device: bench.copy(&arena)?,
            arena,
            queries: sequences.iter().enumerate().map(queries).collect(),
            found: Cell::default(),
            answers: Default::default(),
        })
    }

    fn heads(&self) -> usize {
        self.shape.kv_heads * self.shape.group
    }

    /// Elements of a token's queries.
    fn width(&self) -> usize {
        self.heads() * self.shape.head_dim
    }

    fn whole(&self, sequence: usize) -> Part {
        Part { sequence, queries: 0..self.sequences[sequence].1 }
    }

    fn all(&self) -> Vec<Part> {
        (0..self.sequences.len()).map(|sequence| self.whole(sequence)).collect()
    }

    /// Runs a batch of `parts`, of which the first `skipped` are not the kernel's, and gives the bits of all outputs, padding included.
    fn run(
        &self,
        bench: &mut Bench,
        kernel: Kernel,
        parts: &[Part],
        skipped: usize,
    ) -> Result<Vec<u16>, CudaError> {
        let row = |part: &Part| {
            let (context, count) = self.sequences[part.sequence];
            let first_position = (context - count + part.queries.start) as u32;
            let table = &self.tables[part.sequence][..];
            KvRow { first_position, tokens: part.queries.len() as u32, table }
        };
        let rows: Vec<KvRow<'_>> = parts.iter().map(row).collect();
        let tokens = rows.iter().map(|row| row.tokens as usize).sum::<usize>() + PADDING.0;
        let entries = rows.iter().map(|row| row.table.len()).sum();
        let room = (tokens, rows.len() + PADDING.1, entries);
        let mut batch = DeviceBatch::with_capacity(&bench.stream, self.layout, self.capacity, room)?;
        batch.set(&bench.stream, &mut bench.ring, &rows, tokens)?;

        // Queries lie in rows with keys and values, as projections give them.
        let gap = 2 * self.shape.kv_heads * self.shape.head_dim;
        let mut q = vec![T::of_bits(UNTOUCHED); tokens * (self.width() + gap)];
        let of_parts = parts.iter().flat_map(|part| {
            let Range { start, end } = part.queries;
            self.queries[part.sequence][start * self.width()..end * self.width()].chunks_exact(self.width())
        });
        for (to, from) in q.chunks_exact_mut(self.width() + gap).zip(of_parts) {
            to[..self.width()].copy_from_slice(from);
        }
        let q = bench.copy(&q)?;
        let mut out = bench.poisoned::<T>(tokens * self.width())?;
        let (stream, heads) = (&bench.stream, self.heads());
        let args = Attention {
            q: q.all(),
            shape: AttentionShape { heads, scale: (self.shape.head_dim as f32).sqrt().recip() },
            batch: &batch,
            layer: LAYER,
            arena: self.on_device.all(),
            out: out.all_mut(),
        };
        match kernel {
            Kernel::Prefill(tile) => {
                let mut plan = PrefillPlan::new(stream, &self.layout, heads, (tokens, rows.len()))?;
                plan.set_tile(stream, &mut bench.ring, &batch, skipped..rows.len(), tile)?;
                prefill(stream, &plan, args)?;
            }
            Kernel::Decode | Kernel::Replay | Kernel::Even | Kernel::EvenReplay | Kernel::Tiles => {
                let planned = skipped..rows.len() + PADDING.1;
                let mut limits = self.limits(&parts[skipped..]);
                let even = !matches!(kernel, Kernel::Decode | Kernel::Replay);
                if even {
                    limits.cut = DecodeCut::Even { slots: 16 * parts.len() };
                }
                let mut plan = DecodePlan::new(stream, &self.layout, heads, limits)?;
                if kernel == Kernel::Tiles {
                    plan.prefer_tiles();
                }
                if even {
                    self.found.set(plan.share(stream, &mut bench.ring, &batch, planned.clone())?);
                }
                let queue = |stream: &_| {
                    plan.set(stream, &batch, planned)?;
                    decode(stream, &mut plan, args)
                };
                if matches!(kernel, Kernel::Replay | Kernel::EvenReplay) {
                    let graph = Graph::capture(stream, queue)?;
                    graph.replay()?;
                    stream.synchronize()?;
                } else {
                    queue(stream)?;
                }
            }
        }
        let out = out.all().to_vec(stream)?;
        Ok(out.into_iter().map(T::to_bits).collect())
    }

    /// Exactly as much as these rows need.
    fn limits(&self, parts: &[Part]) -> DecodeLimits {
        let units = |part: &Part| {
            let (context, count) = self.sequences[part.sequence];
            let seen = context - count + part.queries.end;
            DecodeLimits::units_of(part.queries.len(), self.shape.group, seen)
        };
        DecodeLimits {
            rows: parts.len() + PADDING.1,
            queries: parts.iter().map(|part| part.queries.len()).max().unwrap_or(1),
            cut: DecodeCut::Fixed { units: parts.iter().map(units).sum() },
        }
    }

    /// Rows that begin alike, read together; by the kernel for large groups too, if there are any.
    fn shares(&self, bench: &mut Bench, large: bool) -> Result<(), CudaError> {
        self.evenly(bench)?;
        let count = usize::from(self.found.get() == Sharing::None);
        bench.report("decode", self.name(", found to share"), Found::Different { count, of: 1 });
        if large {
            let out = self.run(bench, Kernel::Tiles, &self.all(), 1)?;
            self.judge(bench, "decode", self.name(", in tiles"), &out, 1, Rounded::Some);
            let count = usize::from(!matches!(self.found.get(), Sharing::Some { tiles: 1.. }));
            bench.report("decode", self.name(", found to fill tiles"), Found::Different { count, of: 1 });
        }
        Ok(())
    }

    fn shares_nothing(&self, bench: &mut Bench) -> Result<(), CudaError> {
        self.evenly(bench)?;
        let count = usize::from(self.found.get() != Sharing::None);
        bench.report("decode", self.name(", found to share nothing"), Found::Different { count, of: 1 });
        Ok(())
    }

    fn evenly(&self, bench: &mut Bench) -> Result<(), CudaError> {
        let out = self.run(bench, Kernel::Even, &self.all(), 1)?;
        let rounded = match self.found.get() {
            Sharing::Some { tiles: 1.. } => Rounded::Some,
            Sharing::Some { tiles: 0 } | Sharing::None => Rounded::None,
        };
        self.judge(bench, "decode", self.name(", together"), &out, 1, rounded);
        let replayed = self.run(bench, Kernel::EvenReplay, &self.all(), 1)?;
        let count = usize::from(replayed != out);
        bench.report("decode", self.name(", together, replayed"), Found::Different { count, of: 1 });
        Ok(())
    }

    fn decodes(&self, bench: &mut Bench, extent: Extent) -> Result<(), CudaError> {
        let out = self.run(bench, Kernel::Decode, &self.all(), 1)?;
        self.judge(bench, "decode", self.name(""), &out, 1, Rounded::None);
        let replayed = self.run(bench, Kernel::Replay, &self.all(), 1)?;
        let count = usize::from(replayed != out);
        bench.report("decode", self.name(", replayed"), Found::Different { count, of: 1 });
        if extent == Extent::Full {
            self.alone(bench, Kernel::Decode, "decode", self.name(", alone"), &out, 1)?;
        }
        Ok(())
    }

    fn prefills(&self, bench: &mut Bench, extent: Extent) -> Result<(), CudaError> {
        let out = self.run(bench, Kernel::Prefill(None), &self.all(), 0)?;
        self.judge(bench, "prefill", self.name(""), &out, 0, Rounded::All);
        if extent == Extent::Full {
            self.alone(bench, Kernel::Prefill(None), "prefill", self.name(", alone and cut"), &out, 0)?;
        }
        let plan = PrefillPlan::new(&bench.stream, &self.layout, self.heads(), (0, 0))?;
        let (mut different, tiles) = (0, plan.tiles(&bench.stream));
        for tile in 0..tiles {
            different += usize::from(self.run(bench, Kernel::Prefill(Some(tile)), &self.all(), 0)? != out);
        }
        bench.report("prefill", self.name(", every tile"), Found::Different { count: different, of: tiles });
        Ok(())
    }

    fn name(&self, what: &str) -> String {
        let Shape { kv_heads, group, head_dim, block_size, element, .. } = self.shape;
        let stored = match element {
            DeviceKvElement::Half => "",
            DeviceKvElement::E4m3 => " on e4m3",
        };
        let (longest, queries) =
            self.sequences.iter().fold((0, 0), |(c, q), &(context, count)| (c.max(context), q.max(count)));
        format!(
            "{}{stored} {kv_heads}x{group} of {head_dim}, blocks of {block_size}, {queries} on {longest}{what}",
            T::NAME
        )
    }

    /// The largest error of a head of a token, and how many other elements were written.
    fn judge(
        &self,
        bench: &mut Bench,
        kernel: &'static str,
        name: String,
        out: &[u16],
        skipped: usize,
        rounded: Rounded,
    ) {
        let d = self.shape.head_dim;
        // Of the norm of a token's head. Weights and outputs are rounded: 2e-3 of the norm in bf16; twice that where one weight dominates. Where keys and
        // values of some tokens are rounded first, up to twice what it makes if those of all are.
        let allowed = 2.0 * T::ROUNDING;
        let (mut worst, mut stray) = (0.0_f64, 0);
        let mut tokens = out.chunks_exact(self.width());
        for (sequence, &(_, count)) in self.sequences.iter().enumerate() {
            let got = tokens.by_ref().take(count);
            if sequence < skipped {
                stray += got.flatten().filter(|&&bits| bits != UNTOUCHED).count();
                continue;
            }
            let got: Vec<f64> = got.flatten().map(|&bits| T::of_bits(bits).to_f64()).collect();
            let want = &self.answers(rounded == Rounded::All)[sequence];
            let other = &self.answers(rounded != Rounded::None)[sequence];
            let heads = want.chunks_exact(d).zip(other.chunks_exact(d));
            for (got, (want, other)) in got.chunks_exact(d).zip(heads) {
                let far =
                    |from: &[f64]| from.iter().zip(want).map(|(x, w)| (x - w) * (x - w)).sum::<f64>().sqrt();
                let norm = want.iter().map(|w| w * w).sum::<f64>().sqrt();
                worst = super::layers::larger(worst, far(got) / (allowed * norm + 2.0 * far(other)));
            }
        }
        stray += tokens.flatten().filter(|&&bits| bits != UNTOUCHED).count();
        bench.report(kernel, name.clone(), Found::Error(worst));
        bench.report(kernel, name + ", rest", Found::Different { count: stray, of: out.len() });
    }

    /// Of each sequence, with keys and values that are e4m3 rounded to `T` or as they are.
    fn answers(&self, rounded: bool) -> &[Vec<f64>] {
        let rounded = rounded && self.shape.element == DeviceKvElement::E4m3;
        self.answers[usize::from(rounded)].get_or_init(|| {
            (0..self.sequences.len()).map(|sequence| self.reference(sequence, rounded)).collect()
        })
    }

    /// `[queries][heads][head_dim]` of a sequence in double precision.
    fn reference(&self, sequence: usize, rounded: bool) -> Vec<f64> {
        let as_multiplied = |x: f64| if rounded { T::from_f64(f64::from(x as f32)).to_f64() } else { x };
        let Shape { kv_heads, group, head_dim: d, block_size, .. } = self.shape;
        let (context, count) = self.sequences[sequence];
        let q: Vec<f64> = self.queries[sequence].iter().map(|x| x.to_f64()).collect();
        let mut out = vec![0.0; count * self.width()];
        for kv_head in 0..kv_heads {
            let [keys, values] = [0, 1].map(|part| -> Vec<f64> {
                let row = |position: usize| {
                    let block = self.tables[sequence][position / block_size].0;
                    read::<T>(&self.arena, &self.layout, (block, part, kv_head, position % block_size))
                        .into_iter()
                        .map(as_multiplied)
                };
                (0..context).flat_map(row).collect()
            });
            for (query, head) in
                (0..count).flat_map(|query| (0..group).map(move |h| (query, kv_head * group + h)))
            {
                let at = query * self.width() + head * d;
                let seen = context - count + query + 1;
                let dot = |key: &[f64]| q[at..at + d].iter().zip(key).map(|(a, b)| a * b).sum::<f64>();
                let scores: Vec<f64> =
                    keys.chunks_exact(d).take(seen).map(|key| dot(key) / (d as f64).sqrt()).collect();
                let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
                let total: f64 = weights.iter().sum();
                for (weight, value) in weights.iter().zip(values.chunks_exact(d)) {
                    for (sum, x) in out[at..at + d].iter_mut().zip(value) {
                        *sum += weight / total * x;
                    }
                }
            }
        }
        out
    }

    /// How many sequences have other bits without their neighbours; with prefill, also when their queries come in two steps.
    fn alone(
        &self,
        bench: &mut Bench,
        kernel: Kernel,
        label: &'static str,
        name: String,
        out: &[u16],
        skipped: usize,
    ) -> Result<(), CudaError> {
        let (mut first, mut different, mut of) = (0, 0, 0);
        for (sequence, &(_, count)) in self.sequences.iter().enumerate() {
            let batch = &out[first * self.width()..][..count * self.width()];
            first += count;
            if sequence < skipped {
                continue;
            }
            let cut = count / 3 + 1;
            let steps = [0..count, 0..cut, cut..count];
            let steps = if kernel == Kernel::Decode || count == 1 { &steps[..1] } else { &steps };
            for queries in steps {
                let part = Part { sequence, queries: queries.clone() };
                let got = self.run(bench, kernel, &[part], 0)?;
                let want = &batch[queries.start * self.width()..queries.end * self.width()];
                different += usize::from(got[..want.len()] != *want);
                of += 1;
            }
        }
        bench.report(label, name, Found::Different { count: different, of });
        Ok(())
    }
}

/// Block, key or value, head, token.
type Slot = (u32, usize, usize, usize);

/// Keeps a head's row as the arena's elements.
fn write<T: Half>(arena: &mut [u8], layout: &DeviceKvLayout, (block, part, head, token): Slot, row: &[T]) {
    let at = layout.offset(block, LAYER, part, head, token);
    match layout.element {
        DeviceKvElement::Half => {
            let bytes: Vec<u8> = row.iter().flat_map(|x| x.to_bits().to_le_bytes()).collect();
            arena[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        DeviceKvElement::E4m3 => {
            let row: Vec<f32> = row.iter().map(|x| x.to_f64() as f32).collect();
            let (scale, bytes) = quantize_e4m3(&row);
            arena[at..at + bytes.len()].copy_from_slice(&bytes);
            let at = layout.scale_offset(block, LAYER, part, head, token);
            arena[at..at + 4].copy_from_slice(&scale.to_le_bytes());
        }
    }
}

/// The values of a head's row.
fn read<T: Half>(arena: &[u8], layout: &DeviceKvLayout, (block, part, head, token): Slot) -> Vec<f64> {
    let at = layout.offset(block, LAYER, part, head, token);
    let bytes = &arena[at..at + layout.head_dim * layout.element.bytes()];
    match layout.element {
        DeviceKvElement::Half => {
            let (elements, _) = bytes.as_chunks::<2>();
            elements.iter().map(|&bits| T::of_bits(u16::from_le_bytes(bits)).to_f64()).collect()
        }
        DeviceKvElement::E4m3 => {
            let at = layout.scale_offset(block, LAYER, part, head, token);
            let scale = arena[at..].first_chunk().map_or(f32::NAN, |&bytes| f32::from_le_bytes(bytes));
            bytes.iter().map(|&bits| f64::from(e4m3_value(bits)) * f64::from(scale)).collect()
        }
    }
}
