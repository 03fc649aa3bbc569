//! What the rows of a step share, on the device.
//!
//! **Owns** the lists of groups that decode's plan takes, and the launch of the kernel for large ones. **Never** looks for groups itself.
#![allow(unsafe_code)]

use std::ops::Range;

use super::groups::{Cut, Groups, Shareable};
use super::kernels::TileKernel;
use super::{PagedKv, PlanShape, Queries};
use crate::cuda::batch::{DeviceBatch, DeviceKvLayout};
use crate::cuda::buffer::Buffer;
use crate::cuda::error::CudaError;
use crate::cuda::launch::{Grid, Half, Params, launch};
use crate::cuda::pinned::PinnedRing;
use crate::cuda::stream::Stream;
use crate::error::product;

/// Words before the parts of rows: how many units, members and tiles, and one of padding.
const HEAD: usize = 4;
/// Tokens for each block of the kernel for large groups below which decode is faster.
const LEAST_FOR_TILES: usize = 200;
/// Most room for tiles and for units.
const TILES: usize = 256;
const UNITS: usize = 8192;
/// Members of all groups, for each row: those of groups that lie in one another count once for each.
const MEMBERSHIPS: usize = 4;

/// What a step's rows share, as far as it decides what is launched: what was recorded for one serves all that are equal to it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub enum Sharing {
    /// Each row reads its blocks for itself.
    #[default]
    None,
    /// Some blocks are read once for several rows, with room for so many tiles of large groups.
    Some {
        /// A power of two, or none.
        tiles: usize,
    },
}

/// Groups of a step, and room for them.
#[derive(Debug)]
pub(super) struct SharedWork {
    groups: Groups,
    cut: Cut,
    /// Rows that there is room for.
    rows: usize,
    /// [`HEAD`], two words for each row, units of eight words, members.
    words: Buffer<u32>,
    host: Vec<u32>,
    tiles: Buffer<[u32; 8]>,
    members: Buffer<[u32; 2]>,
    /// Room for slots of all rows.
    slots: usize,
    sharing: Sharing,
}

/// Addresses of the lists in the order of `DecodePlanParams`: counts, parts, units, members.
pub(super) type SharedLists = [u64; 4];

#[repr(C)]
#[derive(Clone, Copy)]
struct SharedArgs {
    kv: PagedKv,
    queries: Queries,
    tiles: u64,
    tile_count: u64,
    members: u64,
    partial_out: u64,
    partial_sums: u64,
    rows_per_unit: u32,
    unused: u32,
}
const _: () = assert!(size_of::<SharedArgs>() == 128);
// SAFETY: the fields of SharedParams in params.h; the last is its `reserved`.
unsafe impl Params for SharedArgs {}

impl SharedWork {
    /// Room for `rows` rows and `slots` slots. Of decode, so many blocks run at a time.
    ///
    /// # Errors
    /// Not enough memory, or the device failed.
    pub(super) fn new(
        stream: &Stream,
        layout: &DeviceKvLayout,
        shape: PlanShape,
        (units_at_once, shared): (usize, &TileKernel),
        (rows, slots): (usize, usize),
    ) -> Result<Self, CudaError> {
        // Units begin at a multiple of 16 bytes.
        let rows = rows.next_multiple_of(2);
        let multiprocessors = stream.device().info().multiprocessors as usize;
        let cut = Cut {
            kv_heads: shape.kv_heads,
            group: shape.group,
            block_size: layout.block_size,
            tile_rows: shared.rows as usize,
            tiles_at_once: shared.resident as usize * multiprocessors,
            units_at_once,
            least_for_tiles: LEAST_FOR_TILES,
            units: slots.min(UNITS),
            tiles: slots.min(TILES),
            members: MEMBERSHIPS * rows,
        };
        let words = HEAD + 2 * rows + 8 * cut.units + cut.members;
        Ok(Self {
            groups: Groups::default(),
            rows,
            words: Buffer::zeroed(stream, words)?,
            host: Vec::with_capacity(words),
            tiles: Buffer::zeroed(stream, cut.tiles)?,
            members: Buffer::zeroed(stream, cut.members)?,
            cut,
            slots,
            sharing: Sharing::None,
        })
    }

    pub(super) fn sharing(&self) -> Sharing {
        self.sharing
    }

    /// Has the kernel for large groups taken wherever there is one.
    pub(super) fn prefer_tiles(&mut self) {
        self.cut.least_for_tiles = 0;
    }

    /// Units that there is room for.
    pub(super) fn most_units(&self) -> usize {
        self.cut.units
    }

    /// Finds what `rows` of the batch share: nothing where their partial results have no room.
    ///
    /// # Errors
    /// The device failed (nothing is shared).
    pub(super) fn set(
        &mut self,
        stream: &Stream,
        ring: &mut PinnedRing,
        batch: &DeviceBatch,
        rows: Range<usize>,
    ) -> Result<(), CudaError> {
        self.sharing = Sharing::None;
        let count = rows.len();
        let shareable: Vec<Shareable<'_>> = rows.map(|index| shareable(batch, index)).collect();
        self.groups.set(&shareable, &self.cut);
        let groups = &self.groups;
        if groups.is_empty() || groups.slots > self.slots || count > self.rows {
            return Ok(());
        }
        let host = &mut self.host;
        host.clear();
        host.extend([groups.units.len() as u32, groups.members.len() as u32, groups.tiles.len() as u32, 0]);
        host.extend_from_slice(groups.parts.as_flattened());
        host.resize(HEAD + 2 * self.rows, 0);
        host.extend_from_slice(groups.units.as_flattened());
        host.extend_from_slice(&groups.members);
        ring.upload(stream, host, self.words.part_mut(0..host.len())?)?;
        let tiles = &groups.tiles;
        if !tiles.is_empty() {
            ring.upload(stream, tiles, self.tiles.part_mut(0..tiles.len())?)?;
        }
        let tiles = if tiles.is_empty() { 0 } else { tiles.len().next_power_of_two() };
        self.sharing = Sharing::Some { tiles };
        Ok(())
    }

    /// The lists, for a plan; those of nothing where nothing is shared.
    pub(super) fn lists(&mut self) -> SharedLists {
        let Sharing::Some { .. } = self.sharing else { return [0; 4] };
        let words = self.words.all().address();
        let at = |index: usize| words + (index * size_of::<u32>()) as u64;
        [at(0), at(HEAD), at(HEAD + 2 * self.rows), self.members.all_mut().address()]
    }

    /// Address of the members, as the plan wrote them.
    pub(super) fn members(&self) -> u64 {
        self.members.all().address()
    }

    /// Queues the work of large groups.
    ///
    /// # Safety
    /// The lists are of rows of the batch that `kv` and `queries` were proved for; a plan was made of them, and partial results go to its room.
    ///
    /// # Errors
    /// The device failed.
    pub(super) unsafe fn launch<T: Half>(
        &self,
        stream: &Stream,
        kernel: &TileKernel,
        (kv, queries): (PagedKv, Queries),
        partial: [u64; 2],
        rows_per_unit: usize,
    ) -> Result<(), CudaError> {
        let Sharing::Some { tiles: tiles @ 1.. } = self.sharing else { return Ok(()) };
        let counts = self.words.all().address();
        let [partial_out, partial_sums] = partial;
        let params = SharedArgs {
            kv,
            queries,
            tiles: self.tiles.all().address(),
            tile_count: counts + 2 * size_of::<u32>() as u64,
            members: self.members(),
            partial_out,
            partial_sums,
            rows_per_unit: rows_per_unit as u32,
            unused: 0,
        };
        let blocks = (product("tiles of groups", &[tiles, self.cut.kv_heads])? as u32, 1);
        let grid = Grid { blocks, threads: kernel.threads, shared: kernel.shared };
        // SAFETY: by this function's contract; blocks past the last tile end at once.
        unsafe { launch(stream, kernel.functions.get::<T>()?, "attention to shared blocks", grid, params) }
    }
}

/// What a row may share: all but the block in which its query is, and what follows. A row of several queries, or of none, shares nothing.
fn shareable(batch: &DeviceBatch, index: usize) -> Shareable<'_> {
    let row = batch.row(index);
    let blocks = if row.tokens == 1 { (row.context - 1) / batch.layout().block_size } else { 0 };
    Shareable { blocks: batch.table(index).get(..blocks).unwrap_or_default(), table: row.table }
}
