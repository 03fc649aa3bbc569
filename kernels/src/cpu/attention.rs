//! Attention over paged KV, read in place.
//!
//! **Owns** the order in which a query meets its positions, and the split of that work over threads. **Never** writes KV.
//!
//! The order is fixed by position alone: chunks of [`CHUNK`] positions with an online softmax (Milakov and Gimelshein, 2018), and every
//! [`SPLIT`] positions the result so far is set aside and merged in order (Dao et al., `FlashDecoding`, 2023). Whether the splits of a
//! query ran on one thread or on several, in a prompt's step or alone, with or without other rows' queries, its bits are the same: a
//! query that leaves a shared segment amid a split takes the state of that split along.

use std::cell::RefCell;
use std::ops::Range;

use super::disjoint::Disjoint;
use super::exp::exp;
use super::isa::{Isa, Vectors};
use super::kv::{KvLayout, Part, SHARED_UNIT, Segment, Sharing, SlotMapping};
use super::pool::ThreadPool;
use crate::error::{KvError, ShapeError, length};

mod lanes;
mod scratch;

use lanes::Lanes;
use scratch::{Partial, Scratch};

/// Positions that meet a query at once. Shared segments end between chunks.
const CHUNK: usize = SHARED_UNIT;
/// Positions of a chunk that surely lie in one block.
const PIECE: usize = 16;
/// So many positions early the processor hears what will be read: it does not know where the next block is.
const AHEAD: usize = 2 * CHUNK;
/// Sums of weights of a query vector.
const LANES: usize = 16;
/// Positions after which the softmax starts anew, to be merged.
const SPLIT: usize = 256;
/// Elements of the query vectors (queries x heads of a group) that share one reading of KV: with their sums they stay near the core.
const TILE: usize = 96 * 64;
/// What reading a chunk costs, in query vectors that meet it.
const READING: usize = 6;

/// What attention needs to know beside the KV layout.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AttentionShape {
    /// Query heads: a multiple of the KV heads.
    pub heads: usize,
    /// Factor on the scores, as a rule `1 / sqrt(head_dim)`.
    pub scale: f32,
}

/// Causal attention of a batch: each token sees its sequence's positions up to its own, which are all in the arena.
///
/// `q` and `out` are `[tokens][heads][head_dim]`.
///
/// # Errors
/// The shapes do not fit; nothing has been written.
#[allow(clippy::too_many_arguments)] // operands of a kernel; a struct would only rename them
pub fn attention(
    pool: &ThreadPool,
    isa: Isa,
    shape: AttentionShape,
    mapping: &SlotMapping,
    layer: usize,
    q: &[f32],
    arena: &[u8],
    out: &mut [f32],
) -> Result<(), KvError> {
    mapping.check(layer, arena.len())?;
    let layout = mapping.layout();
    if shape.heads == 0 || !shape.heads.is_multiple_of(layout.kv_heads()) {
        return Err(KvError::Shape(ShapeError::Dimension {
            what: "number of heads",
            needed: "a multiple of the KV heads",
            found: shape.heads,
        }));
    }
    let elements = mapping.tokens() * shape.heads * layout.head_dim();
    length("queries", elements, q.len())?;
    length("attention output", elements, out.len())?;
    let job = Job {
        shape,
        mapping,
        layer,
        group: shape.heads / layout.kv_heads(),
        layout: *layout,
        q,
        arena,
        out: Disjoint::new(out),
    };
    match isa.usable().vectors() {
        Vectors::Portable => job.run::<lanes::Portable>(pool),
        #[cfg(target_arch = "x86_64")]
        Vectors::Avx2 => job.run::<lanes::Avx2>(pool),
        #[cfg(target_arch = "x86_64")]
        Vectors::Avx512 => job.run::<lanes::Avx512>(pool),
        #[cfg(not(target_arch = "x86_64"))]
        Vectors::Avx2 | Vectors::Avx512 => job.run::<lanes::Portable>(pool),
    }
    Ok(())
}

struct Job<'a> {
    shape: AttentionShape,
    mapping: &'a SlotMapping,
    layer: usize,
    /// Query heads per KV head.
    group: usize,
    layout: KvLayout,
    q: &'a [f32],
    arena: &'a [u8],
    out: Disjoint<'a, f32>,
}

/// Queries `[first, first + count)` of a segment with one KV head.
#[derive(Clone, Copy)]
struct Tile<'a> {
    segment: &'a Segment,
    head: usize,
    first: usize,
    count: usize,
}

impl Tile<'_> {
    /// Positions that any of the queries sees.
    fn positions(&self) -> Range<usize> {
        let Segment { sharing, row, from, to, .. } = self.segment;
        match sharing {
            Sharing::Shared => *from..*to,
            Sharing::Own => *from..row.first_position + self.first + self.count,
        }
    }

    /// The first query sees all positions up to this one.
    fn first_position(&self) -> usize {
        match self.segment.sharing {
            Sharing::Shared => self.segment.to,
            Sharing::Own => self.segment.row.first_position + self.first,
        }
    }

    fn splits(&self) -> Range<usize> {
        let positions = self.positions();
        positions.start / SPLIT..positions.end.div_ceil(SPLIT)
    }

    /// The tile's positions in a split.
    fn within(&self, split: usize) -> Range<usize> {
        let positions = self.positions();
        positions.start.max(split * SPLIT)..positions.end.min((split + 1) * SPLIT)
    }

    /// Nothing of the split is left after the tile.
    fn completes(&self, split: usize) -> bool {
        self.segment.sharing == Sharing::Own || self.positions().end >= (split + 1) * SPLIT
    }

    /// Indices of the queries in the mapping's order.
    fn queries(&self) -> Range<usize> {
        let first = self.segment.first_query + self.first;
        first..first + self.count
    }
}

/// What the query vectors of a tile see of a chunk.
struct Sight {
    queries: usize,
    group: usize,
    /// The first query sees all positions up to this one, the next one more.
    first: usize,
    /// First position of the chunk.
    chunk: usize,
}

impl Sight {
    fn vectors(&self) -> usize {
        self.queries * self.group
    }

    /// Vectors that see none of the chunk: those of the first queries.
    fn blind(&self) -> usize {
        self.chunk.saturating_sub(self.first).min(self.queries) * self.group
    }

    /// Vectors that see the same number of positions, above 0.
    fn runs(&self) -> impl Iterator<Item = (Range<usize>, usize)> {
        let Self { queries, group, first, chunk } = *self;
        let blind = chunk.saturating_sub(first).min(queries);
        let full = (chunk + CHUNK - 1).saturating_sub(first).clamp(blind, queries);
        let some =
            (blind..full).map(move |query| (query * group..(query + 1) * group, first + query + 1 - chunk));
        let all = (full < queries).then_some((full * group..queries * group, CHUNK));
        some.chain(all)
    }
}

/// A task of a thread.
struct Item<'a> {
    tile: Tile<'a>,
    /// One split of the tile, and what came of it; without it, the whole tile.
    split: Option<(usize, Partial)>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Job<'_> {
    fn run<L: Lanes>(&self, pool: &ThreadPool) {
        let segments = self.mapping.segments();
        let mut states =
            vec![0.0; segments.sharing * self.shape.heads * Scratch::state_len(self.stride::<L>())];
        for level in &segments.levels {
            self.level::<L>(pool, level, &Disjoint::new(&mut states));
        }
    }

    /// Elements of a weighted sum of values.
    fn stride<L: Lanes>(&self) -> usize {
        self.layout.head_dim().next_multiple_of(L::WIDTH)
    }

    fn level<L: Lanes>(&self, pool: &ThreadPool, level: &[Segment], states: &Disjoint<'_, f32>) {
        let mut items = self.items(level, pool.threads());
        pool.for_parts(&mut items, 1, &|_, items| {
            SCRATCH.with_borrow_mut(|scratch| {
                for Item { tile, split } in items {
                    match split {
                        None => self.tile::<L>(tile, scratch, states),
                        Some((split, partial)) => self.apart::<L>(tile, *split, scratch, partial, states),
                    }
                }
            });
        });
        SCRATCH.with_borrow_mut(|scratch| {
            for item in &mut items {
                let Some((split, partial)) = &mut item.split else { continue };
                self.gather::<L>(&item.tile, *split, partial, scratch, states);
            }
        });
    }

    /// Cuts a level into tasks, the splits of a tile in order. Only the time depends on the cut.
    fn items<'a>(&self, level: &'a [Segment], threads: usize) -> Vec<Item<'a>> {
        let tiles = self.tiles(level, threads);
        let work = |tile: &Tile<'_>| tile.positions().len() * (tile.count * self.group + READING);
        let all: usize = tiles.iter().map(work).sum();
        let mut items = Vec::with_capacity(tiles.len());
        for tile in tiles {
            // A thread that takes a large task last keeps the others waiting.
            if threads > 1 && tile.splits().len() > 1 && work(&tile) * 4 * threads > all {
                let splits = tile.splits().map(|split| Some((split, Partial::default())));
                items.extend(splits.map(|split| Item { tile, split }));
            } else {
                items.push(Item { tile, split: None });
            }
        }
        items
    }

    /// Large tiles read KV seldom; but every thread gets some.
    fn tiles<'a>(&self, level: &'a [Segment], threads: usize) -> Vec<Tile<'a>> {
        let heads = self.layout.kv_heads();
        let most = level.iter().map(|segment| segment.queries).max().unwrap_or(1);
        let mut size = (TILE / self.layout.head_dim() / self.group).clamp(1, most);
        let tasks = |size: usize| -> usize {
            let tasks = |s: &Segment| s.queries.div_ceil(size) * heads * (s.to - s.from).div_ceil(SPLIT);
            level.iter().map(tasks).sum()
        };
        while size > 1 && tasks(size) < 4 * threads {
            size = size.div_ceil(2);
        }
        let mut tiles = Vec::new();
        for segment in level {
            // Later queries see more: the long tiles come first, so that threads end together.
            for first in (0..segment.queries).step_by(size).rev() {
                let count = size.min(segment.queries - first);
                tiles.extend((0..heads).map(|head| Tile { segment, head, first, count }));
            }
        }
        tiles
    }

    /// All splits of a tile, in order.
    fn tile<L: Lanes>(&self, tile: &Tile<'_>, scratch: &mut Scratch, states: &Disjoint<'_, f32>) {
        self.queries::<L>(tile, scratch);
        self.resume::<L>(tile, scratch, states);
        for split in tile.splits() {
            if split > tile.splits().start {
                scratch.split.reset(tile.count * self.group, self.stride::<L>());
            }
            self.split::<L>(tile, split, scratch);
            if tile.completes(split) {
                scratch.total.merge(&scratch.split);
            }
        }
        self.finish::<L>(tile, scratch, states);
    }

    /// One split of a tile, for itself.
    fn apart<L: Lanes>(
        &self,
        tile: &Tile<'_>,
        split: usize,
        scratch: &mut Scratch,
        partial: &mut Partial,
        states: &Disjoint<'_, f32>,
    ) {
        self.queries::<L>(tile, scratch);
        if split == tile.splits().start {
            self.resume::<L>(tile, scratch, states);
        } else {
            scratch.split.reset(tile.count * self.group, self.stride::<L>());
        }
        self.split::<L>(tile, split, scratch);
        std::mem::swap(partial, &mut scratch.split);
    }

    /// Takes the splits that ran apart, in order.
    fn gather<L: Lanes>(
        &self,
        tile: &Tile<'_>,
        split: usize,
        partial: &mut Partial,
        scratch: &mut Scratch,
        states: &Disjoint<'_, f32>,
    ) {
        if split == tile.splits().start {
            self.resume::<L>(tile, scratch, states);
        }
        if tile.completes(split) {
            scratch.total.merge(partial);
        } else {
            std::mem::swap(partial, &mut scratch.split);
        }
        if split + 1 == tile.splits().end {
            self.finish::<L>(tile, scratch, states);
        }
    }

    /// The positions of a tile in one split.
    fn split<L: Lanes>(&self, tile: &Tile<'_>, split: usize, scratch: &mut Scratch) {
        let Range { start, end } = tile.within(split);
        let (element, d) = (self.layout.element(), self.layout.head_dim());
        let stride = self.stride::<L>();
        let buffers = &mut scratch.buffers;
        let seen = tile.positions().end;
        for chunk in (start..end).step_by(CHUNK) {
            for (index, piece) in (chunk..chunk + CHUNK).step_by(PIECE).enumerate() {
                // Positions of a piece that nobody sees are read along: no score or value of theirs is used.
                if piece < seen {
                    let keys = &mut buffers.keys[index * PIECE * d..][..PIECE * d];
                    L::keys(element, self.piece(tile, Part::Key, piece), d, keys);
                    let values = &mut buffers.values[index * PIECE * stride..][..PIECE * stride];
                    L::values(element, self.piece(tile, Part::Value, piece), d, values);
                }
                if piece + AHEAD < seen {
                    L::expect(self.piece(tile, Part::Key, piece + AHEAD));
                    L::expect(self.piece(tile, Part::Value, piece + AHEAD));
                }
            }
            let first = tile.first_position();
            let sight = Sight { queries: tile.count, group: self.group, first, chunk };
            L::meet(&sight, d, buffers, &mut scratch.split);
        }
    }

    /// Keys or values of the [`PIECE`] positions from `position` on.
    fn piece(&self, tile: &Tile<'_>, part: Part, position: usize) -> &[u8] {
        let (block, token) = self.mapping.slot(&tile.segment.row, position);
        let at = self.layout.offset(block, self.layer, part, tile.head, token);
        &self.arena[at..][..PIECE * self.layout.head_dim() * self.layout.element().bytes()]
    }

    /// Puts the tile's query vectors in place.
    fn queries<L: Lanes>(&self, tile: &Tile<'_>, scratch: &mut Scratch) {
        let d = self.layout.head_dim();
        scratch.buffers.reserve::<L>(tile.count * self.group, d);
        for (index, query) in tile.queries().enumerate() {
            let at = self.offset(tile, query);
            for (head, x) in self.q[at..at + self.group * d].chunks_exact(d).enumerate() {
                L::query(&mut scratch.buffers.q, index * self.group + head, x, self.shape.scale);
            }
        }
    }

    /// The state that the tile's query vectors were left in by the level before; an empty one at position 0.
    #[allow(unsafe_code)]
    fn resume<L: Lanes>(&self, tile: &Tile<'_>, scratch: &mut Scratch, states: &Disjoint<'_, f32>) {
        let stride = self.stride::<L>();
        scratch.total.reset(tile.count * self.group, stride);
        scratch.split.reset(tile.count * self.group, stride);
        if tile.segment.from == 0 {
            return;
        }
        let running = !tile.segment.from.is_multiple_of(SPLIT);
        for (index, query) in tile.queries().enumerate() {
            let range = self.states(tile, query, Scratch::state_len(stride));
            // SAFETY: in a level, a (query, head) pair belongs to one tile; of its splits that run apart only the first takes
            // the state up, and `gather` runs after all of them.
            let states = unsafe { states.part(range) };
            for (head, state) in states.chunks_exact(Scratch::state_len(stride)).enumerate() {
                scratch.load(index * self.group + head, state, running);
            }
        }
    }

    /// Writes the tile's attention, or leaves its state to the next level.
    #[allow(unsafe_code)]
    fn finish<L: Lanes>(&self, tile: &Tile<'_>, scratch: &Scratch, states: &Disjoint<'_, f32>) {
        let (d, len) = (self.layout.head_dim(), Scratch::state_len(self.stride::<L>()));
        for (index, query) in tile.queries().enumerate() {
            let vectors = index * self.group..;
            match tile.segment.sharing {
                Sharing::Own => {
                    let at = self.offset(tile, query);
                    // SAFETY: (token, head) pairs belong to one tile each, and a tile is finished once, by one thread.
                    let out = unsafe { self.out.part(at..at + self.group * d) };
                    vectors.zip(out.chunks_exact_mut(d)).for_each(|(v, out)| scratch.total.finish(v, out));
                }
                Sharing::Shared => {
                    // SAFETY: as above; the next level reads it after this one has ended.
                    let states = unsafe { states.part(self.states(tile, query, len)) };
                    vectors.zip(states.chunks_exact_mut(len)).for_each(|(v, state)| scratch.store(v, state));
                }
            }
        }
    }

    /// Where the query vectors of a query and the tile's head begin in `q` and `out`.
    fn offset(&self, tile: &Tile<'_>, query: usize) -> usize {
        let token = self.mapping.segments().tokens[query];
        (token * self.shape.heads + tile.head * self.group) * self.layout.head_dim()
    }

    /// Where the states of a query and the tile's head lie.
    fn states(&self, tile: &Tile<'_>, query: usize, len: usize) -> Range<usize> {
        let first = query * self.shape.heads + tile.head * self.group;
        first * len..(first + self.group) * len
    }
}

#[cfg(test)]
mod tests;
