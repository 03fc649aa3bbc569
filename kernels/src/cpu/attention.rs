//! Attention over paged KV, read in place.
//!
//! **Owns** the order in which a query meets its positions, and the split of that work over threads. **Never** writes KV.
//!
//! The order is fixed by position alone: chunks of [`CHUNK`] positions with an online softmax (Milakov and Gimelshein, 2018), and every
//! [`SPLIT`] positions the result so far is set aside and merged in order (Dao et al., `FlashDecoding`, 2023). Whether the splits of a query ran on
//! one thread or on several, in a prompt's step or alone, its bits are the same.

use super::disjoint::Disjoint;
use super::exp::exp;
use super::isa::{Isa, Vectors};
use super::kv::{KvElement, KvLayout, MappedRow, Part, SlotMapping};
use super::pool::ThreadPool;
use crate::error::{KvError, ShapeError, length};

mod lanes;

use lanes::Lanes;

/// Positions that meet a query at once. Divides every block size.
const CHUNK: usize = 16;
/// Positions after which the softmax starts anew, to be merged.
const SPLIT: usize = 512;
/// Query vectors (queries x heads of a group) that share one reading of KV, at least one query.
const TILE: usize = 24;

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
        head_dim: layout.head_dim(),
        q,
        arena,
        out: Disjoint::new(out),
    };
    match isa.usable().vectors() {
        Vectors::Portable => job.run::<lanes::Portable>(pool),
        #[cfg(target_arch = "x86_64")]
        Vectors::Avx2 | Vectors::Avx512 => job.run::<lanes::Avx2>(pool),
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
    head_dim: usize,
    q: &'a [f32],
    arena: &'a [u8],
    out: Disjoint<'a, f32>,
}

/// Queries `[first, first + count)` of a row with one KV head.
#[derive(Clone, Copy)]
struct Tile {
    row: MappedRow,
    head: usize,
    first: usize,
    count: usize,
}

impl Tile {
    /// One past the last position that any of the queries sees.
    fn end(&self) -> usize {
        self.row.first_position + self.first + self.count
    }

    fn splits(&self) -> usize {
        self.end().div_ceil(SPLIT)
    }
}

/// Softmax state of the query vectors of a tile: running maximum, sum of weights, weighted sum of values.
#[derive(Clone)]
struct Partial {
    max: Vec<f32>,
    sum: Vec<f32>,
    values: Vec<f32>,
}

impl Partial {
    fn new(vectors: usize, head_dim: usize) -> Self {
        Self {
            max: vec![f32::NEG_INFINITY; vectors],
            sum: vec![0.0; vectors],
            values: vec![0.0; vectors * head_dim],
        }
    }

    fn clear(&mut self) {
        self.max.fill(f32::NEG_INFINITY);
        self.sum.fill(0.0);
        self.values.fill(0.0);
    }

    /// Takes in the next split. A query that saw nothing of it (its sum is 0) stays as it is.
    fn merge(&mut self, next: &Self) {
        let head_dim = self.values.len() / self.max.len();
        let values = self.values.chunks_exact_mut(head_dim).zip(next.values.chunks_exact(head_dim));
        let states = self.max.iter_mut().zip(&mut self.sum).zip(next.max.iter().zip(&next.sum));
        for ((values, next_values), ((max, sum), (&next_max, &next_sum))) in values.zip(states) {
            if next_sum == 0.0 {
                continue;
            }
            let top = max.max(next_max);
            let (mine, theirs) = (exp(*max - top), exp(next_max - top));
            for (value, next) in values.iter_mut().zip(next_values) {
                *value = *value * mine + next * theirs;
            }
            *sum = *sum * mine + next_sum * theirs;
            *max = top;
        }
    }
}

impl Job<'_> {
    fn run<L: Lanes>(&self, pool: &ThreadPool) {
        let queries = (TILE / self.group).max(1);
        let mut tiles = Vec::new();
        for row in &self.mapping.rows {
            // Later queries see more: the long tiles come first, so that threads end together.
            for first in (0..row.tokens).step_by(queries).rev() {
                let count = queries.min(row.tokens - first);
                for head in 0..self.mapping.layout().kv_heads() {
                    tiles.push(Tile { row: *row, head, first, count });
                }
            }
        }
        let few = tiles.len() < 4 * pool.threads() && pool.threads() > 1;
        if few && tiles.iter().any(|tile| tile.splits() > 1) {
            self.run_splits::<L>(pool, &tiles);
        } else {
            pool.for_each(tiles.len(), &|index| self.tile::<L>(&tiles[index]));
        }
    }

    /// All splits of a tile, in order.
    fn tile<L: Lanes>(&self, tile: &Tile) {
        let mut scratch = Scratch::new(self, tile);
        let mut next = Partial::new(tile.count * self.group, self.head_dim);
        let mut total = next.clone();
        for split in 0..tile.splits() {
            next.clear();
            self.split::<L>(tile, split, &mut scratch, &mut next);
            total.merge(&next);
        }
        self.finish(tile, &total);
    }

    /// Few tiles with many positions: splits are shared out, and merged in order afterwards.
    fn run_splits<L: Lanes>(&self, pool: &ThreadPool, tiles: &[Tile]) {
        let mut parts: Vec<(usize, usize, Partial)> = tiles
            .iter()
            .enumerate()
            .flat_map(|(index, tile)| (0..tile.splits()).map(move |split| (index, split, tile.count)))
            .map(|(index, split, count)| (index, split, Partial::new(count * self.group, self.head_dim)))
            .collect();
        pool.for_parts(&mut parts, 1, &|_, parts| {
            for (index, split, partial) in parts {
                let tile = &tiles[*index];
                self.split::<L>(tile, *split, &mut Scratch::new(self, tile), partial);
            }
        });
        for of_tile in parts.chunk_by(|a, b| a.0 == b.0) {
            let tile = &tiles[of_tile[0].0];
            let mut total = Partial::new(tile.count * self.group, self.head_dim);
            for (_, _, partial) in of_tile {
                total.merge(partial);
            }
            self.finish(tile, &total);
        }
    }

    /// The positions `[split * SPLIT, (split + 1) * SPLIT)` of a tile.
    fn split<L: Lanes>(&self, tile: &Tile, split: usize, scratch: &mut Scratch, partial: &mut Partial) {
        let d = self.head_dim;
        let first = tile.row.first_position + tile.first;
        for chunk in (split * SPLIT..tile.end().min((split + 1) * SPLIT)).step_by(CHUNK) {
            let loaded = CHUNK.min(tile.end() - chunk);
            self.load::<L>(tile, Part::Key, chunk, loaded, &mut scratch.keys);
            self.load::<L>(tile, Part::Value, chunk, loaded, &mut scratch.values);
            // The query at position p sees [0, p].
            let seen = |vector: usize| (first + vector / self.group + 1).saturating_sub(chunk).min(CHUNK);
            // Vectors that see none of the chunk are those of the tile's first queries.
            let blind = (0..tile.count * self.group).take_while(|&vector| seen(vector) == 0).count();
            // Three passes, so that the processor works on several vectors at once.
            let vectors = || blind..tile.count * self.group;
            for vector in vectors() {
                let scores = &mut scratch.scores[vector];
                *scores = L::dots(&scratch.q[vector * d..][..d], &scratch.keys);
                scores[seen(vector)..].fill(f32::NEG_INFINITY);
            }
            for vector in vectors() {
                let scores = &mut scratch.scores[vector];
                let (max, sum) = (&mut partial.max[vector], &mut partial.sum[vector]);
                let top = L::max(scores);
                if top > *max {
                    let factor = exp(*max - top);
                    *max = top;
                    *sum *= factor;
                    L::shrink(&mut partial.values[vector * d..][..d], factor);
                }
                *sum += L::weights(scores, *max);
            }
            for vector in vectors() {
                let weights = &scratch.scores[vector][..seen(vector)];
                L::add_weighted(&mut partial.values[vector * d..][..d], weights, &scratch.values);
            }
        }
    }

    /// Reads `count` positions of one head from their block, in single precision.
    fn load<L: Lanes>(&self, tile: &Tile, part: Part, position: usize, count: usize, dst: &mut [f32]) {
        let layout: &KvLayout = self.mapping.layout();
        let (block, token) = self.mapping.slot(&tile.row, position);
        let at = layout.offset(block, self.layer, part, tile.head, token);
        let count = count * self.head_dim;
        let bytes = &self.arena[at..at + count * layout.element().bytes()];
        match layout.element() {
            KvElement::F16 => L::widen(bytes, &mut dst[..count]),
            KvElement::F32 => {
                for (x, bytes) in dst.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *x = f32::from_le_bytes(*bytes);
                }
            }
        }
    }

    #[allow(unsafe_code)]
    fn finish(&self, tile: &Tile, total: &Partial) {
        let d = self.head_dim;
        for (vector, (values, sum)) in total.values.chunks_exact(d).zip(&total.sum).enumerate() {
            let at = self.offset(tile, vector);
            // SAFETY: (token, head) pairs belong to one tile each, and a tile is finished once, by one thread.
            let out = unsafe { self.out.part(at..at + d) };
            for (out, value) in out.iter_mut().zip(values) {
                *out = value / sum;
            }
        }
    }

    /// Where query vector `vector` of a tile lies in `q` and `out`.
    fn offset(&self, tile: &Tile, vector: usize) -> usize {
        let token = tile.row.first_token + tile.first + vector / self.group;
        let head = tile.head * self.group + vector % self.group;
        (token * self.shape.heads + head) * self.head_dim
    }
}

/// Buffers of a tile.
struct Scratch {
    /// The tile's query vectors, scaled.
    q: Vec<f32>,
    /// Scores, then weights, of the tile's query vectors for one chunk.
    scores: Vec<[f32; CHUNK]>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Scratch {
    fn new(job: &Job<'_>, tile: &Tile) -> Self {
        let d = job.head_dim;
        let vectors = tile.count * job.group;
        let q = (0..vectors)
            .flat_map(|vector| &job.q[job.offset(tile, vector)..][..d])
            .map(|x| x * job.shape.scale)
            .collect();
        Self {
            q,
            scores: vec![[0.0; CHUNK]; vectors],
            keys: vec![0.0; CHUNK * d],
            values: vec![0.0; CHUNK * d],
        }
    }
}
