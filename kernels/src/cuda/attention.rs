//! Attention over paged KV, read in place.
//!
//! **Owns** which kernel does a row's work, and the proof that it stays inside arena, tables and outputs. **Never** writes KV.
//!
//! Two kernels for two kinds of rows. [`decode()`] is for few queries against a long past, at the speed of memory: contexts are cut at fixed
//! positions, [`SPLIT`] apart, so that one long context keeps the whole GPU busy. [`prefill()`] is for many queries, at the speed of the tensor
//! cores. With either, the bits of a row depend on its own queries, keys and values only; with prefill, not on how a prompt was cut into
//! steps either. The two differ from one another in the last bits.
//!
//! A decode plan that cuts contexts evenly gives that up for speed: every part of the GPU has as much to read, wherever in a row that is, and
//! rows whose tables begin alike read what they share once, together. The same batch still has the same bits, always.
//!
//! What a kernel is to do is listed before the first layer, in a plan, and serves all layers of that batch.

mod decode;
mod groups;
mod kernels;
mod prefill;
mod shared;

pub use decode::{DecodeCut, DecodeLimits, DecodePlan, decode};
pub use prefill::{PrefillPlan, prefill};
pub use shared::Sharing;

pub(super) use kernels::AttentionKernels;

use super::batch::{DeviceBatch, DeviceKvLayout};
use super::buffer::{View, ViewMut};
use super::error::CudaError;
use super::launch::Half;
use super::norm::{PACK, dimension};
use crate::cpu::attention::AttentionShape;
use crate::e4m3::DeviceKvElement;
use crate::error::{KvError, length, product};

/// Positions after which decode sets a result aside, to be merged, where cuts are fixed.
pub(super) const SPLIT: usize = 1 << LOG2_SPLIT;
const LOG2_SPLIT: u32 = 8;
/// Packed rows (queries times the query heads of a KV head) of one unit of decode work.
const UNIT_ROWS: usize = 16;
/// Most query heads of a KV head.
const MAX_GROUP: usize = 16;
/// Most tokens of a context, and most packed rows of a step: kernels count both in 32 bits, with room for a tile more.
const MAX_COUNT: usize = 1 << 30;

/// What attention works on, in one layer.
#[expect(missing_debug_implementations, reason = "names of device memory say nothing")]
pub struct Attention<'a, T: Half> {
    /// `[tokens][width]`: a token's query heads come first in its row, which may be that of queries, keys and values.
    pub q: View<'a, T>,
    /// Query heads, and the factor on the scores.
    pub shape: AttentionShape,
    /// Whose tokens they are. Their keys and values are already in the arena.
    pub batch: &'a DeviceBatch,
    /// The layer read.
    pub layer: usize,
    /// The KV arena, as the batch's layout and capacity say.
    pub arena: View<'a, u8>,
    /// `[tokens][heads][head_dim]`. Only tokens of planned rows are written.
    pub out: ViewMut<'a, T>,
}

/// Query heads, KV heads, and size and elements of heads that a plan is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct PlanShape {
    kv_heads: usize,
    /// Query heads of a KV head.
    group: usize,
    head_dim: usize,
    /// Of keys and values.
    element: DeviceKvElement,
}

impl PlanShape {
    /// # Errors
    /// Shapes that kernels do not work with.
    fn of(layout: &DeviceKvLayout, heads: usize) -> Result<Self, CudaError> {
        layout.check()?;
        let DeviceKvLayout { kv_heads, head_dim, block_size, element, .. } = *layout;
        if kernels::size_index(head_dim).is_none() {
            return Err(dimension("head dimension of attention", "64, 80, 96, 128 or 256", head_dim));
        }
        if !(16..=512).contains(&block_size) {
            return Err(dimension("block size of attention", "a power of two in [16, 512]", block_size));
        }
        if heads == 0 || !heads.is_multiple_of(kv_heads) || heads / kv_heads > MAX_GROUP {
            return Err(dimension("query heads", "1 to 16 times the KV heads", heads));
        }
        Ok(Self { kv_heads, group: heads / kv_heads, head_dim, element })
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct PagedKv {
    layer: u64,
    block_stride: u64,
    tables: u64,
    table_stride: u32,
    log2_block: u32,
    kv_heads: u32,
    group: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Queries {
    q: u64,
    out: u64,
    q_stride: u64,
    out_stride: u64,
    scale_log2: f32,
    unused: u32,
}

impl<T: Half> Attention<'_, T> {
    /// The first two structs of a kernel's parameters; `None` where there are no tokens.
    ///
    /// With them, and units of rows of the batch, a kernel stays inside: the tables and the blocks that they name are as the batch proved, the
    /// layer is one of the layout's, the arena as long as the layout asks, queries and outputs have a row for each token.
    ///
    /// # Errors
    /// The shapes do not fit one another or the plan.
    fn params(self, plan: PlanShape) -> Result<Option<(PagedKv, Queries)>, CudaError> {
        let Self { q, shape, batch, layer, arena, out } = self;
        let layout = batch.layout();
        if PlanShape::of(layout, shape.heads)? != plan {
            return Err(CudaError::Plan);
        }
        if layer >= layout.layers {
            return Err(KvError::Layer { layer: layer as u32, layers: layout.layers as u32 }.into());
        }
        length("KV arena", batch.arena_bytes()?, arena.len())?;
        let tokens = batch.tokens();
        let width = product("heads", &[shape.heads, plan.head_dim])?;
        length("attention output", product("attention output", &[tokens, width])?, out.len())?;
        if tokens == 0 {
            return Ok(None);
        }
        let q_width = q.len() / tokens;
        length("queries", product("queries", &[tokens, q_width])?, q.len())?;
        if q_width < width || !q_width.is_multiple_of(PACK) {
            return Err(dimension("row of queries", "a multiple of 8 that holds the query heads", q_width));
        }
        for (what, address) in [
            ("address of queries", q.address()),
            ("address of the attention output", out.address()),
            ("address of the KV arena", arena.address()),
        ] {
            if !address.is_multiple_of(16) {
                return Err(dimension(what, "a multiple of 16", address as usize));
            }
        }
        let [.., tables] = batch.addresses();
        let kv = PagedKv {
            layer: arena.address() + (layer * layout.layer_stride) as u64,
            block_stride: layout.block_stride as u64,
            tables,
            // Units name the entry where a row's table begins.
            table_stride: 1,
            log2_block: layout.block_size.trailing_zeros(),
            kv_heads: plan.kv_heads as u32,
            group: plan.group as u32,
        };
        let queries = Queries {
            q: q.address(),
            out: out.address(),
            q_stride: q_width as u64,
            out_stride: width as u64,
            scale_log2: shape.scale * std::f32::consts::LOG2_E,
            unused: 0,
        };
        Ok(Some((kv, queries)))
    }
}

/// `Ok` where a plan for `shape` can list rows of the batch: kernels count in 32 bits.
fn check_batch(batch: &DeviceBatch, shape: PlanShape) -> Result<(), CudaError> {
    let PlanShape { kv_heads, group, .. } = shape;
    if PlanShape::of(batch.layout(), kv_heads * group)? != shape {
        return Err(CudaError::Plan);
    }
    let counts = [
        ("blocks", batch.capacity() as usize),
        ("tables", batch.entries()),
        ("tokens", batch.tokens() * group),
    ];
    for (what, count) in counts {
        if count > MAX_COUNT {
            return Err(dimension(what, "at most 2^30", count));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
