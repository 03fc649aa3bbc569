//! Many queries: prompts and their chunks.
#![allow(unsafe_code)]

use std::ops::Range;

use super::kernels::{TileKernel, choose, size_index};
use super::{Attention, MAX_COUNT, PagedKv, PlanShape, Queries, check_batch};
use crate::cuda::batch::{BatchRow, DeviceBatch, DeviceKvLayout};
use crate::cuda::buffer::Buffer;
use crate::cuda::error::CudaError;
use crate::cuda::launch::{Grid, Half, Params, launch_early};
use crate::cuda::norm::{blocks, dimension};
use crate::cuda::pinned::PinnedRing;
use crate::cuda::stream::Stream;
use crate::error::ShapeError;

/// Packed rows of the smallest tile.
const LEAST_ROWS: usize = 64;

/// The work list of a step's prompts.
///
/// Having one set tells you: its units are of rows of the batch that it was set for.
#[derive(Debug)]
pub struct PrefillPlan {
    shape: PlanShape,
    units: Buffer<[u32; 8]>,
    /// The same on the host, kept for its memory.
    host: Vec<[u32; 8]>,
    /// Which of the kernels for this size of heads.
    tile: usize,
    /// Of the batch.
    stamp: Option<u64>,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct PrefillArgs {
    kv: PagedKv,
    queries: Queries,
    units: u64,
}
const _: () = assert!(size_of::<PrefillArgs>() == 88);
// SAFETY: the fields of PrefillParams in params.h.
unsafe impl Params for PrefillArgs {}

impl PrefillPlan {
    /// Room for `tokens` tokens in `rows` rows, with `heads` query heads on KV of `layout`.
    ///
    /// # Errors
    /// Shapes that kernels do not work with, not enough memory, or the device failed.
    pub fn new(
        stream: &Stream,
        layout: &DeviceKvLayout,
        heads: usize,
        (tokens, rows): (usize, usize),
    ) -> Result<Self, CudaError> {
        let shape = PlanShape::of(layout, heads)?;
        if tokens > MAX_COUNT / shape.group || rows > MAX_COUNT {
            return Err(dimension("tokens of prompts", "at most 2^30 with all heads of a group", tokens));
        }
        let units = (tokens * shape.group).div_ceil(LEAST_ROWS) + rows;
        let units = Buffer::zeroed(stream, units)?;
        Ok(Self { shape, units, host: Vec::new(), tile: 0, stamp: None })
    }

    /// Lists the work of `rows` of the batch, all layers alike. Queued on `stream`.
    ///
    /// # Errors
    /// The batch does not have the rows, or there is no room for them (the plan is for no batch); or the device failed.
    pub fn set(
        &mut self,
        stream: &Stream,
        ring: &mut PinnedRing,
        batch: &DeviceBatch,
        rows: Range<usize>,
    ) -> Result<(), CudaError> {
        self.set_tile(stream, ring, batch, rows, None)
    }

    /// How many kernels there are to choose from.
    pub(in crate::cuda) fn tiles(&self, stream: &Stream) -> usize {
        kernels(stream, self.shape).len()
    }

    /// As [`set`](Self::set), with a kernel that is not chosen by the size of the batch.
    pub(in crate::cuda) fn set_tile(
        &mut self,
        stream: &Stream,
        ring: &mut PinnedRing,
        batch: &DeviceBatch,
        rows: Range<usize>,
        tile: Option<usize>,
    ) -> Result<(), CudaError> {
        self.stamp = None;
        check_batch(batch, self.shape)?;
        if rows.start > rows.end || rows.end > batch.rows() {
            return Err(ShapeError::Length { what: "batch", needed: rows.end, found: batch.rows() }.into());
        }
        let rows: Vec<BatchRow> = rows.map(|index| batch.row(index)).collect();
        for row in &rows {
            if row.context > MAX_COUNT || row.first_token + row.tokens > batch.tokens() {
                return Err(dimension("context", "at most 2^30", row.context));
            }
        }
        let PlanShape { kv_heads, group, .. } = self.shape;
        let tiles: Vec<u32> = kernels(stream, self.shape).iter().map(|kernel| kernel.rows).collect();
        let blocks = |tile: u32| {
            rows.iter().map(|row| (row.tokens * group).div_ceil(tile as usize)).sum::<usize>() * kv_heads
        };
        let multiprocessors = stream.device().info().multiprocessors as usize;
        let tile = tile.unwrap_or_else(|| choose(&tiles, multiprocessors, blocks)).min(tiles.len() - 1);
        list(&mut self.host, &rows, group, tiles[tile] as usize);
        let to = self.units.part_mut(0..self.host.len())?;
        ring.upload(stream, &self.host, to)?;
        self.tile = tile;
        self.stamp = Some(batch.stamp());
        Ok(())
    }
}

fn kernels(stream: &Stream, shape: PlanShape) -> &[TileKernel] {
    let kernels = &stream.device().kernels().attention.of(shape.element).prefill;
    // A plan's size of heads is one of those that there are kernels for.
    size_index(shape.head_dim).map_or(&[], |index| &kernels[index])
}

/// Cuts rows into tiles of `tile` packed rows, those that see most positions first: the last blocks to run are short.
pub(super) fn list(units: &mut Vec<[u32; 8]>, rows: &[BatchRow], group: usize, tile: usize) {
    let mut sized = Vec::new();
    for row in rows {
        let (packed, past) = (row.tokens * group, row.context - row.tokens);
        for first in (0..packed).step_by(tile) {
            let last = (first + tile).min(packed) - 1;
            let unit =
                [row.table, first as u32, (packed - first) as u32, past as u32, row.first_token as u32];
            sized.push((past + last / group, unit));
        }
    }
    sized.sort_by_key(|&(seen, _)| std::cmp::Reverse(seen));
    units.clear();
    units.extend(sized.into_iter().map(|(_, [table, row, rows, past, query])| {
        [table, row, rows, past, query, /* reserved */ 0, 0, 0]
    }));
}

/// Causal attention of the plan's rows: each token sees its row's positions up to its own.
///
/// # Errors
/// The plan is for another batch, or the shapes do not fit (nothing was launched); or the device failed.
pub fn prefill<T: Half>(
    stream: &Stream,
    plan: &PrefillPlan,
    args: Attention<'_, T>,
) -> Result<(), CudaError> {
    if plan.stamp != Some(args.batch.stamp()) {
        return Err(CudaError::Plan);
    }
    let Some((kv, queries)) = args.params(plan.shape)? else { return Ok(()) };
    if plan.host.is_empty() {
        return Ok(());
    }
    let kernel = kernels(stream, plan.shape).get(plan.tile).ok_or(CudaError::Plan)?;
    let params = PrefillArgs { kv, queries, units: plan.units.all().address() };
    let count = blocks("prefill units", plan.host.len() * plan.shape.kv_heads)?;
    let grid = Grid { blocks: (count, 1), threads: kernel.threads, shared: kernel.shared };
    // SAFETY: a block for each unit and KV head. The units are of rows of this batch, as it is now (the stamp), cut for this kernel's tile; tokens,
    // tables and blocks of those rows are inside queries, outputs, tables and arena, as `params` proved. `out` is borrowed mutably. The kernel waits
    // for the one before it first of all.
    unsafe { launch_early(stream, kernel.functions.get::<T>()?, "prefill attention", grid, params) }
}
