//! Few queries against a long past.
#![allow(unsafe_code)]

use std::ops::Range;

use super::kernels::{DecodeKernel, size_index};
use super::{Attention, LOG2_SPLIT, MAX_COUNT, PagedKv, PlanShape, Queries, SPLIT, UNIT_ROWS, check_batch};
use crate::cuda::batch::{DeviceBatch, DeviceKvLayout};
use crate::cuda::buffer::Buffer;
use crate::cuda::error::CudaError;
use crate::cuda::launch::{Grid, Half, Params, launch, launch_early};
use crate::cuda::norm::dimension;
use crate::cuda::stream::Stream;
use crate::error::{ShapeError, product};

/// Threads of the kernels that plan and combine.
const PLAN_THREADS: u32 = 1024;
const COMBINE_THREADS: u32 = 256;
/// Blocks of the combining kernel that are worth having.
const COMBINE_BLOCKS: usize = 2048;

/// Most that a decode plan has room for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DecodeLimits {
    /// Rows of the batch, padding included.
    pub rows: usize,
    /// Queries of a row: 1, and as many guesses as are tried.
    pub queries: usize,
    /// Sum over rows of [`DecodeLimits::units_of`].
    pub units: usize,
}

impl DecodeLimits {
    /// Units of work of a row: `queries` tokens, of `group` query heads for each KV head, that see `context` positions.
    #[must_use]
    pub fn units_of(queries: usize, group: usize, context: usize) -> usize {
        (queries * group).div_ceil(UNIT_ROWS) * context.div_ceil(SPLIT)
    }
}

/// The work lists of a decode step, and room for its partial results.
///
/// Having one set tells you: its rows are those of the batch that it was set for, and their units fit its room. The lists are made on the device,
/// from lengths that are there; a kernel that would leave the room ends with an error of the device instead.
#[derive(Debug)]
pub struct DecodePlan {
    shape: PlanShape,
    limits: DecodeLimits,
    units: Buffer<[u32; 8]>,
    unit_count: Buffer<u32>,
    tiles: Buffer<[u32; 4]>,
    /// `[units][kv heads][unit rows][head_dim]`.
    partial_out: Buffer<f32>,
    /// `[units][kv heads][unit rows]`: maximum and sum of weights.
    partial_sums: Buffer<[f32; 2]>,
    /// Rows that the lists are of.
    rows: usize,
    /// Of the batch.
    stamp: Option<u64>,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct PlanArgs {
    starts: u64,
    contexts: u64,
    table_rows: u64,
    units: u64,
    unit_count: u64,
    tiles: u64,
    sequences: u32,
    max_units: u32,
    tiles_per_sequence: u32,
    log2_split: u32,
    group: u32,
    unused: u32,
}
const _: () = assert!(size_of::<PlanArgs>() == 72);
// SAFETY: the fields of DecodePlanParams in params.h; the last is its `reserved`.
unsafe impl Params for PlanArgs {}

#[repr(C)]
#[derive(Clone, Copy)]
struct DecodeArgs {
    kv: PagedKv,
    queries: Queries,
    units: u64,
    unit_count: u64,
    tiles: u64,
    partial_out: u64,
    partial_sums: u64,
    max_units: u32,
    rows_per_unit: u32,
    log2_split: u32,
    unused: u32,
}
const _: () = assert!(size_of::<DecodeArgs>() == 136);
// SAFETY: the fields of DecodeParams in params.h; the last is its `reserved`.
unsafe impl Params for DecodeArgs {}

impl DecodePlan {
    /// Room for `limits`, for `heads` query heads on KV of `layout`. The largest part is `units * kv_heads * min(16, queries * group)` rows of
    /// `4 * (head_dim + 2)` bytes.
    ///
    /// # Errors
    /// Shapes or limits that kernels do not work with, not enough memory, or the device failed.
    pub fn new(
        stream: &Stream,
        layout: &DeviceKvLayout,
        heads: usize,
        limits: DecodeLimits,
    ) -> Result<Self, CudaError> {
        let shape = PlanShape::of(layout, heads)?;
        let DecodeLimits { rows, queries, units } = limits;
        if queries == 0 || queries > 1 << 12 {
            return Err(dimension("queries of a decode row", "in [1, 4096]", queries));
        }
        let tiles = product("decode tiles", &[rows, (queries * shape.group).div_ceil(UNIT_ROWS)])?;
        let sums = product("decode units", &[units, shape.kv_heads, (queries * shape.group).min(UNIT_ROWS)])?;
        for (what, count) in [("decode tiles", tiles), ("decode units", units)] {
            if product(what, &[count, shape.kv_heads])? > MAX_COUNT {
                return Err(dimension(what, "at most 2^30 with all KV heads", count));
            }
        }
        Ok(Self {
            shape,
            limits,
            units: Buffer::zeroed(stream, units)?,
            unit_count: Buffer::zeroed(stream, 1)?,
            tiles: Buffer::zeroed(stream, tiles)?,
            partial_out: Buffer::zeroed(stream, product("decode units", &[sums, shape.head_dim])?)?,
            partial_sums: Buffer::zeroed(stream, sums)?,
            rows: 0,
            stamp: None,
        })
    }

    /// Lists the work of `rows` of the batch, all layers alike. Rows past the batch's last are padding: a captured step keeps its number of rows.
    ///
    /// # Errors
    /// The rows do not fit the limits or the batch (nothing was launched; the plan is for no batch), or the device failed.
    pub fn set(&mut self, stream: &Stream, batch: &DeviceBatch, rows: Range<usize>) -> Result<(), CudaError> {
        self.stamp = None;
        self.check(batch, rows.clone())?;
        self.rows = rows.len();
        if self.rows > 0 {
            self.launch(stream, batch, rows.start)?;
        }
        self.stamp = Some(batch.stamp());
        Ok(())
    }

    /// `Ok` where the work of `rows` of the batch can be listed.
    ///
    /// # Errors
    /// The rows do not fit the limits or the batch.
    pub(in crate::cuda) fn check(&self, batch: &DeviceBatch, rows: Range<usize>) -> Result<(), CudaError> {
        check_batch(batch, self.shape)?;
        if rows.start > rows.end || rows.end > batch.room() {
            return Err(ShapeError::Length { what: "batch", needed: rows.end, found: batch.room() }.into());
        }
        if rows.len() > self.limits.rows {
            return Err(dimension("decode rows", "at most those of the plan's limits", rows.len()));
        }
        let mut units = 0_usize;
        for row in rows.map(|index| batch.row(index)) {
            if row.tokens > self.limits.queries {
                return Err(dimension(
                    "queries of a decode row",
                    "at most those of the plan's limits",
                    row.tokens,
                ));
            }
            if row.context > MAX_COUNT || row.first_token + row.tokens > batch.tokens() {
                return Err(dimension("context", "at most 2^30", row.context));
            }
            units = units.saturating_add(DecodeLimits::units_of(row.tokens, self.shape.group, row.context));
        }
        if units > self.limits.units {
            return Err(dimension("decode units", "at most those of the plan's limits", units));
        }
        Ok(())
    }

    fn launch(&mut self, stream: &Stream, batch: &DeviceBatch, first: usize) -> Result<(), CudaError> {
        let [table_rows, starts, contexts] = batch.row_addresses(first);
        let params = PlanArgs {
            starts,
            contexts,
            table_rows,
            units: self.units.all_mut().address(),
            unit_count: self.unit_count.all_mut().address(),
            tiles: self.tiles.all_mut().address(),
            sequences: self.rows as u32,
            max_units: self.limits.units as u32,
            tiles_per_sequence: self.tiles_per_row() as u32,
            log2_split: LOG2_SPLIT,
            group: self.shape.group as u32,
            unused: 0,
        };
        let grid = Grid { blocks: (1, 1), threads: PLAN_THREADS, shared: 0 };
        let kernel = &stream.device().kernels().attention.plan;
        // SAFETY: the batch's room has `rows` rows from `first` on, with a start more; the kernel writes at most `max_units` units and
        // `rows * tiles_per_sequence` tiles, which the buffers have, and traps where lengths ask for more.
        unsafe { launch(stream, kernel, "attention plan", grid, params) }
    }

    fn tiles_per_row(&self) -> usize {
        (self.limits.queries * self.shape.group).div_ceil(UNIT_ROWS)
    }

    fn rows_per_unit(&self) -> usize {
        (self.limits.queries * self.shape.group).min(UNIT_ROWS)
    }
}

/// Causal attention of the plan's rows: each token sees its row's positions up to its own.
///
/// # Errors
/// The plan is for another batch, or the shapes do not fit (nothing was launched); or the device failed.
pub fn decode<T: Half>(
    stream: &Stream,
    plan: &mut DecodePlan,
    args: Attention<'_, T>,
) -> Result<(), CudaError> {
    if plan.stamp != Some(args.batch.stamp()) {
        return Err(CudaError::Plan);
    }
    let Some((kv, queries)) = args.params(plan.shape)? else { return Ok(()) };
    if plan.rows == 0 || plan.limits.units == 0 {
        return Ok(());
    }
    let params = DecodeArgs {
        kv,
        queries,
        units: plan.units.all().address(),
        unit_count: plan.unit_count.all().address(),
        tiles: plan.tiles.all().address(),
        partial_out: plan.partial_out.all_mut().address(),
        partial_sums: plan.partial_sums.all_mut().address(),
        max_units: plan.limits.units as u32,
        rows_per_unit: plan.rows_per_unit() as u32,
        log2_split: LOG2_SPLIT,
        unused: 0,
    };
    let kernels = &stream.device().kernels().attention.decode;
    let kernel = size_index(plan.shape.head_dim).and_then(|index| kernels.get(index));
    let kernel = kernel.ok_or(CudaError::Plan)?;
    let (grid, combine) = grids(kernel, plan, stream.device().info().multiprocessors);
    // SAFETY: the plan's units are of rows of this batch, as it is now (the stamp), whose tokens, tables and blocks `params` proved to be inside
    // queries, outputs, tables and arena. Partial results go to the slots of at most `max_units` units, each with all KV heads and
    // `rows_per_unit` rows, which the buffers have. `out` and the plan are borrowed mutably.
    unsafe { launch(stream, &kernel.decode[T::INDEX], "decode attention", grid, params) }?;
    // SAFETY: as above, for a block of each tile and KV head. Before it waits for decode it reads tiles only, which were there when decode began:
    // decode was launched to start after all before it.
    unsafe { launch_early(stream, &kernel.combine[T::INDEX], "combining attention", combine, params) }
}

/// Of decode, as many blocks as the GPU holds, if there can be work for them; of combining, a block for each tile and KV head, and where they
/// are few, for rows of a tile.
fn grids(kernel: &DecodeKernel, plan: &DecodePlan, multiprocessors: u32) -> (Grid, Grid) {
    let most = plan.limits.units * plan.shape.kv_heads;
    let blocks = (kernel.resident * multiprocessors).min(most as u32);
    let tiles = plan.rows * plan.tiles_per_row() * plan.shape.kv_heads;
    let along_rows = (COMBINE_BLOCKS / tiles).clamp(1, plan.rows_per_unit());
    (
        Grid { blocks: (blocks, 1), threads: kernel.threads, shared: kernel.shared },
        Grid { blocks: (tiles as u32, along_rows as u32), threads: COMBINE_THREADS, shared: 0 },
    )
}
