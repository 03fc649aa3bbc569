//! From the projections of a layer to attention: queries turned in place, keys turned and values as they are into KV.
//!
//! **Owns** the pass over the heads of a batch. **Never** computes an angle or the address of an element of KV.
#![allow(unsafe_code)]

use std::ops::Range;

use super::disjoint::Disjoint;
use super::isa::{Isa, Vectors};
use super::kv::{KvLayout, MappedRow, Part, SlotMapping, store};
use super::ops::{Pairing, RopeAngles, SMALL, turn};
use super::pool::ThreadPool;
use crate::error::{KvError, ShapeError, length};

/// What the projections of a layer gave for a batch.
#[derive(Debug)]
pub struct Heads<'a> {
    /// `[tokens][heads][head_dim]`.
    pub q: &'a mut [f32],
    /// `[tokens][kv_heads][head_dim]`.
    pub k: &'a [f32],
    /// `[tokens][kv_heads][head_dim]`.
    pub v: &'a [f32],
    /// Added to each row of `q`, `k` and `v` first.
    pub bias: Option<[&'a [f32]; 3]>,
}

/// How heads are turned.
#[derive(Clone, Copy, Debug)]
pub struct Turn<'a> {
    /// A row per token of the batch.
    pub angles: &'a RopeAngles,
    /// Which elements turn together.
    pub pairing: Pairing,
}

/// Adds the biases, turns queries (in place) and keys, and writes keys and values into one layer of the arena, in one pass. The bits are
/// those of [`add_bias`](crate::add_bias), [`rope`](crate::rope) and [`write_kv`](crate::write_kv).
///
/// # Errors
/// The shapes do not fit; nothing has been written.
pub fn rope_into_kv(
    pool: &ThreadPool,
    isa: Isa,
    heads: Heads<'_>,
    by: Turn<'_>,
    mapping: &SlotMapping,
    layer: usize,
    arena: &mut [u8],
) -> Result<(), KvError> {
    let Heads { q, k, v, bias } = heads;
    mapping.check(layer, arena.len())?;
    let layout = mapping.layout();
    let (d, tokens) = (layout.head_dim(), mapping.tokens());
    let width = layout.kv_heads() * d;
    length("keys", tokens * width, k.len())?;
    length("values", tokens * width, v.len())?;
    if by.angles.rows() != tokens {
        return Err(ShapeError::Length { what: "angles", needed: tokens, found: by.angles.rows() }.into());
    }
    if tokens == 0 {
        return Ok(length("queries", 0, q.len())?);
    }
    let of_q = q.len() / tokens;
    length("queries", tokens * of_q, q.len())?;
    if of_q == 0 || !of_q.is_multiple_of(d) || d < 2 * by.angles.pairs() {
        return Err(ShapeError::Dimension {
            what: "head dimension",
            needed: "a divisor of the queries, at least twice the number of rotary frequencies",
            found: d,
        }
        .into());
    }
    if let Some([q_bias, k_bias, v_bias]) = bias {
        length("query bias", of_q, q_bias.len())?;
        length("key bias", width, k_bias.len())?;
        length("value bias", width, v_bias.len())?;
    }
    let [q_bias, k_bias, v_bias] = bias.map_or([None; 3], |bias| bias.map(Some));
    let elements = q.len() + 2 * k.len();
    let pass = Pass {
        by,
        mapping,
        layer,
        vectors: isa.usable().vectors(),
        of_q,
        q: Disjoint::new(q),
        q_bias,
        arena: Disjoint::new(arena),
    };
    let kv_jobs = 2 * layout.kv_heads();
    let jobs = kv_jobs + tokens.div_ceil(Pass::TOKENS);
    let job = |index: usize| {
        if index >= kv_jobs {
            let first = (index - kv_jobs) * Pass::TOKENS;
            pass.queries(first..tokens.min(first + Pass::TOKENS));
        } else if index.is_multiple_of(2) {
            pass.head(Part::Key, index / 2, k, k_bias);
        } else {
            pass.head(Part::Value, index / 2, v, v_bias);
        }
    };
    if elements <= SMALL {
        (0..jobs).for_each(job);
    } else {
        pool.for_each(jobs, &job);
    }
    Ok(())
}

struct Pass<'a> {
    by: Turn<'a>,
    mapping: &'a SlotMapping,
    layer: usize,
    vectors: Vectors,
    /// Elements of a row of `q`.
    of_q: usize,
    q: Disjoint<'a, f32>,
    q_bias: Option<&'a [f32]>,
    arena: Disjoint<'a, u8>,
}

impl Pass<'_> {
    /// Tokens whose queries one thread turns at a time.
    const TOKENS: usize = 16;

    fn queries(&self, tokens: Range<usize>) {
        for token in tokens {
            // SAFETY: each token's queries are in one job, which one thread runs.
            let q = unsafe { self.q.part(token * self.of_q..(token + 1) * self.of_q) };
            if let Some(bias) = self.q_bias {
                q.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
            }
            for head in q.chunks_exact_mut(self.mapping.layout().head_dim()) {
                turn(self.vectors, head, self.by.angles.row(token), self.by.pairing);
            }
        }
    }

    /// One head's keys or values of the whole batch. Jobs are cut by head, since two rows may name the same slot, but two heads never do.
    fn head(&self, part: Part, head: usize, x: &[f32], bias: Option<&[f32]>) {
        let layout = self.mapping.layout();
        let (d, width) = (layout.head_dim(), layout.kv_heads() * layout.head_dim());
        let mut buffer = [0.0; KvLayout::MAX_HEAD_DIM];
        for row in &self.mapping.rows {
            let MappedRow { first_position, tokens, first_token, .. } = *row;
            for index in 0..tokens {
                let (block, slot) = self.mapping.slot(row, first_position + index);
                let token = first_token + index;
                let values = &mut buffer[..d];
                values.copy_from_slice(&x[token * width + head * d..][..d]);
                if let Some(bias) = bias {
                    values.iter_mut().zip(&bias[head * d..]).for_each(|(x, bias)| *x += bias);
                }
                match part {
                    Part::Key => turn(self.vectors, values, self.by.angles.row(token), self.by.pairing),
                    Part::Value => {}
                }
                let at = layout.offset(block, self.layer, part, head, slot);
                // SAFETY: a job has one part and head, whose elements no other job writes, and drops each slice before the next.
                let to = unsafe { self.arena.part(at..at + d * layout.element().bytes()) };
                store(self.vectors, layout.element(), values, to);
            }
        }
    }
}
