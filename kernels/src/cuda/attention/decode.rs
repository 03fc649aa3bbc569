//! Few queries against a long past.
#![allow(unsafe_code)]

use std::ops::Range;

use super::kernels::{DecodeKernel, size_index};
use super::shared::{SharedLists, SharedWork, Sharing};
use super::{Attention, LOG2_SPLIT, MAX_COUNT, PagedKv, PlanShape, Queries, SPLIT, UNIT_ROWS, check_batch};
use crate::cuda::batch::{DeviceBatch, DeviceKvLayout};
use crate::cuda::buffer::Buffer;
use crate::cuda::error::CudaError;
use crate::cuda::launch::{Grid, Half, Params, launch, launch_early};
use crate::cuda::norm::dimension;
use crate::cuda::pinned::PinnedRing;
use crate::cuda::stream::Stream;
use crate::error::{ShapeError, product};

/// Threads of the kernels that plan and combine.
const PLAN_THREADS: u32 = 1024;
const COMBINE_THREADS: u32 = 256;
/// Most lanes of a plan, as in `lanes.cuh`.
const MOST_LANES: usize = 512;
/// Blocks of the combining kernel that are worth having.
const COMBINE_BLOCKS: usize = 2048;

/// Most that a decode plan has room for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DecodeLimits {
    /// Rows of the batch, padding included.
    pub rows: usize,
    /// Queries of a row: 1, and as many guesses as are tried.
    pub queries: usize,
    /// Where contexts are cut.
    pub cut: DecodeCut,
}

/// Where contexts are cut into what is read at a time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DecodeCut {
    /// At fixed positions: the bits of a row depend on its own tokens alone.
    Fixed {
        /// Room for units: the sum over rows of [`DecodeLimits::units_of`].
        units: usize,
    },
    /// So that every part of the GPU has as much to read. Rows that share blocks read them together. A row has one query, and its bits depend on
    /// the whole batch.
    Even {
        /// Room for partial results of shared blocks, in rows and pieces.
        slots: usize,
    },
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
    tiles: Buffer<[u32; 4]>,
    /// `[slots][kv heads][unit rows][head_dim]`.
    partial_out: Buffer<f32>,
    /// `[slots][kv heads][unit rows]`: maximum and sum of weights.
    partial_sums: Buffer<[f32; 2]>,
    /// Where contexts are cut evenly: what rows share, and of which rows of which batch that was found.
    shared: Option<SharedWork>,
    shared_of: Option<(u64, Range<usize>)>,
    /// Parts of the GPU that read for one KV head, and units of each.
    lanes: usize,
    lane_counts: Buffer<u32>,
    /// Room for partial results.
    slots: usize,
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
    lane_counts: u64,
    tiles: u64,
    sequences: u32,
    max_units: u32,
    tiles_per_sequence: u32,
    log2_split: u32,
    group: u32,
    lanes: u32,
    max_slots: u32,
    unused: u32,
    shared: SharedLists,
}
const _: () = assert!(size_of::<PlanArgs>() == 112);
// SAFETY: the fields of DecodePlanParams in params.h; the last are its `reserved` and four pointers.
unsafe impl Params for PlanArgs {}

#[repr(C)]
#[derive(Clone, Copy)]
struct DecodeArgs {
    kv: PagedKv,
    queries: Queries,
    units: u64,
    lane_counts: u64,
    tiles: u64,
    members: u64,
    partial_out: u64,
    partial_sums: u64,
    max_units: u32,
    rows_per_unit: u32,
}
const _: () = assert!(size_of::<DecodeArgs>() == 136);
// SAFETY: the fields of DecodeParams in params.h.
unsafe impl Params for DecodeArgs {}

impl DecodePlan {
    /// Room for `limits`, for `heads` query heads on KV of `layout`. The largest part is `kv_heads * min(16, queries * group)` rows of
    /// `4 * (head_dim + 2)` bytes for each partial result.
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
        let DecodeLimits { rows, queries, cut } = limits;
        if queries == 0 || queries > 1 << 12 {
            return Err(dimension("queries of a decode row", "in [1, 4096]", queries));
        }
        let kernels = stream.device().kernels().attention.of(shape.element);
        let (decode, of_groups) = size_index(shape.head_dim)
            .and_then(|index| Some((kernels.decode.get(index)?, kernels.shared.get(index)?)))
            .ok_or(CudaError::Plan)?;
        let at_once = (decode.resident * stream.device().info().multiprocessors) as usize;
        let lanes = (at_once / shape.kv_heads).clamp(1, MOST_LANES);
        let (lanes, units, slots, shared) = match cut {
            DecodeCut::Fixed { units } => (lanes.min(units.max(1)), units, units, None),
            DecodeCut::Even { .. } if queries > 1 => {
                return Err(dimension("queries of a row whose context is cut evenly", "1", queries));
            }
            DecodeCut::Even { slots } => {
                let shared = SharedWork::new(stream, layout, shape, (at_once, of_groups), (rows, slots))?;
                let units = product("decode units", &[lanes, rows + 1])? + shared.most_units();
                (lanes, units, rows + lanes + slots, Some(shared))
            }
        };
        let tiles = product("decode tiles", &[rows, (queries * shape.group).div_ceil(UNIT_ROWS)])?;
        let sums =
            product("partial results", &[slots, shape.kv_heads, (queries * shape.group).min(UNIT_ROWS)])?;
        for (what, count) in [("decode tiles", tiles), ("decode units", units), ("partial results", slots)] {
            if product(what, &[count, shape.kv_heads])? > MAX_COUNT {
                return Err(dimension(what, "at most 2^30 with all KV heads", count));
            }
        }
        Ok(Self {
            shape,
            limits,
            units: Buffer::zeroed(stream, units)?,
            tiles: Buffer::zeroed(stream, tiles)?,
            partial_out: Buffer::zeroed(stream, product("partial results", &[sums, shape.head_dim])?)?,
            partial_sums: Buffer::zeroed(stream, sums)?,
            shared,
            shared_of: None,
            lanes,
            lane_counts: Buffer::zeroed(stream, lanes)?,
            slots,
            rows: 0,
            stamp: None,
        })
    }

    /// Finds what `rows` of the batch share, so that [`set`](Self::set) with the same rows has it read once: nothing where cuts are fixed. Queued on
    /// `stream`. What was recorded of `set` and [`decode()`] serves every batch of as many rows for which the answer is the same.
    ///
    /// # Errors
    /// The rows do not fit the limits or the batch, or the device failed: nothing is shared.
    pub fn share(
        &mut self,
        stream: &Stream,
        ring: &mut PinnedRing,
        batch: &DeviceBatch,
        rows: Range<usize>,
    ) -> Result<Sharing, CudaError> {
        self.shared_of = None;
        self.check(batch, rows.clone())?;
        let Some(shared) = &mut self.shared else { return Ok(Sharing::None) };
        shared.set(stream, ring, batch, rows.clone())?;
        self.shared_of = Some((batch.stamp(), rows));
        Ok(shared.sharing())
    }

    /// Lists the work of `rows` of the batch, all layers alike. Rows past the batch's last are padding: a captured step keeps its number of rows.
    ///
    /// # Errors
    /// The rows do not fit the limits or the batch (nothing was launched; the plan is for no batch), or the device failed.
    pub fn set(&mut self, stream: &Stream, batch: &DeviceBatch, rows: Range<usize>) -> Result<(), CudaError> {
        self.stamp = None;
        self.check(batch, rows.clone())?;
        self.rows = rows.len();
        if self.shared_of != Some((batch.stamp(), rows.clone())) {
            self.shared_of = None;
        }
        if self.rows > 0 {
            self.launch(stream, batch, rows.start)?;
        }
        self.stamp = Some(batch.stamp());
        Ok(())
    }

    /// Has large groups read by the kernel for them also where decode is faster.
    pub(in crate::cuda) fn prefer_tiles(&mut self) {
        if let Some(shared) = &mut self.shared {
            shared.prefer_tiles();
        }
    }

    /// What rows share, if anything.
    fn shared(&self) -> Option<&SharedWork> {
        self.shared.as_ref().filter(|_| self.shared_of.is_some())
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
        match self.limits.cut {
            DecodeCut::Fixed { units: most } if units > most => {
                Err(dimension("decode units", "at most those of the plan's limits", units))
            }
            // There is room for every row and for every cut.
            DecodeCut::Fixed { .. } | DecodeCut::Even { .. } => Ok(()),
        }
    }

    fn launch(&mut self, stream: &Stream, batch: &DeviceBatch, first: usize) -> Result<(), CudaError> {
        let [table_rows, starts, contexts] = batch.row_addresses(first);
        let shared = self.shared.as_mut().filter(|_| self.shared_of.is_some());
        let shared = shared.map_or([0; 4], SharedWork::lists);
        let params = PlanArgs {
            starts,
            contexts,
            table_rows,
            units: self.units.all_mut().address(),
            lane_counts: self.lane_counts.all_mut().address(),
            tiles: self.tiles.all_mut().address(),
            sequences: self.rows as u32,
            max_units: self.units.all().len() as u32,
            tiles_per_sequence: self.tiles_per_row() as u32,
            log2_split: LOG2_SPLIT,
            group: self.shape.group as u32,
            lanes: self.lanes as u32,
            max_slots: self.slots as u32,
            unused: 0,
            shared,
        };
        let grid = Grid { blocks: (1, 1), threads: PLAN_THREADS, shared: 0 };
        let kernels = &stream.device().kernels().attention;
        let kernel = match self.limits.cut {
            DecodeCut::Fixed { .. } => &kernels.plan,
            DecodeCut::Even { .. } => &kernels.plan_lanes,
        };
        // SAFETY: the batch's room has `rows` rows from `first` on, with a start more; the kernel writes at most `max_units` units,
        // `lanes` counts and `rows * tiles_per_sequence` tiles, which the buffers have, and traps where lengths ask for more. Lists of
        // groups are of the same rows of this batch (`shared_of`), as long as they say, with room for their members.
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
    if plan.rows == 0 || plan.units.all().is_empty() {
        return Ok(());
    }
    let params = DecodeArgs {
        kv,
        queries,
        units: plan.units.all().address(),
        lane_counts: plan.lane_counts.all().address(),
        tiles: plan.tiles.all().address(),
        members: plan.shared().map_or(0, SharedWork::members),
        partial_out: plan.partial_out.all_mut().address(),
        partial_sums: plan.partial_sums.all_mut().address(),
        max_units: plan.units.all().len() as u32,
        rows_per_unit: plan.rows_per_unit() as u32,
    };
    let attention = &stream.device().kernels().attention;
    let kernels = attention.of(plan.shape.element);
    let (kernel, of_groups, combining) = size_index(plan.shape.head_dim)
        .and_then(|index| {
            Some((kernels.decode.get(index)?, kernels.shared.get(index)?, attention.combine.get(index)?))
        })
        .ok_or(CudaError::Plan)?;
    let (decoding, combining) = (kernel.functions.get::<T>()?, combining.get::<T>()?);
    if let Some(shared) = plan.shared() {
        let partial = [params.partial_out, params.partial_sums];
        // SAFETY: the groups are of rows of this batch, as it is now (`shared_of`, and the stamp of the plan that was made of them); they
        // read blocks of their rows' tables before the rows' own queries. The rest is as below.
        unsafe { shared.launch::<T>(stream, of_groups, (kv, queries), partial, plan.rows_per_unit()) }?;
    }
    let (grid, combine) = grids(kernel, plan);
    // SAFETY: the plan's units are of rows of this batch, as it is now (the stamp), whose tokens, tables and blocks `params` proved to be inside
    // queries, outputs, tables and arena. Partial results go to at most `slots` slots, each with all KV heads and `rows_per_unit`
    // rows, which the buffers have. `out` and the plan are borrowed mutably.
    unsafe { launch(stream, decoding, "decode attention", grid, params) }?;
    // SAFETY: as above, for a block of each tile and KV head. Before it waits for decode it reads tiles only, which were there when decode began:
    // decode was launched to start after all before it.
    unsafe { launch_early(stream, combining, "combining attention", combine, params) }
}

/// Of decode, a block for each lane and KV head; of combining, one for each tile and KV head, and where they are few, for rows of a tile.
fn grids(kernel: &DecodeKernel, plan: &DecodePlan) -> (Grid, Grid) {
    let blocks = (plan.lanes * plan.shape.kv_heads) as u32;
    let tiles = plan.rows * plan.tiles_per_row() * plan.shape.kv_heads;
    let along_rows = (COMBINE_BLOCKS / tiles).clamp(1, plan.rows_per_unit());
    (
        Grid { blocks: (blocks, 1), threads: kernel.threads, shared: kernel.shared },
        Grid { blocks: (tiles as u32, along_rows as u32), threads: COMBINE_THREADS, shared: 0 },
    )
}
