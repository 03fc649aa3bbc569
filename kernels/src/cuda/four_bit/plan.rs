//! How a four-bit product goes through a GPU: a function of its shape, its rows and the number of multiprocessors.

use crate::cuda::gemm::GemmShape;
use crate::cuda::small_rows::MOST_NORMED_INPUTS;
use crate::four_bit::{FOUR_BIT_TILE, FOUR_BIT_UNIT};

/// Shared memory that a block may have.
pub(super) const SHARED: usize = 226 << 10;
/// More than half of a multiprocessor's: a block that has as much has it for itself, as every block of few rows does.
const SHARED_ALONE: usize = 115_968;
/// Most rows that are few, and of those that are normalised where they are multiplied.
const MOST_FEW: usize = 16;
const MOST_NORMED: usize = 2;
/// Most rows that are multiplied by these kernels: more are the library's, with the weights as elements.
pub(super) const MOST_WIDE: usize = 512;
/// Rows for which the inner dimension is shared where it has to be shared in the same way for all: those of a step of many conversations.
const ROWS_OF_SPLIT: usize = 32;
/// Bytes behind a row in shared memory.
const PAD: usize = 64;
/// Warps of a block of few rows.
const WARPS: usize = 16;
/// Bytes of a unit of a tile.
const UNIT_BYTES: usize = 640;

/// Forms of few rows, as in `four_bit_sm90.cu`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Few {
    /// At most 8 rows.
    Plain,
    /// The same, of rows so long that blocks read less ahead.
    Long,
    /// Normalised first.
    Normed,
    /// At most 16 rows.
    Of16,
}

impl Few {
    pub(super) const ALL: [Self; 4] = [Self::Plain, Self::Long, Self::Normed, Self::Of16];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Plain => "few",
            Self::Long => "few_long",
            Self::Normed => "few_normed",
            Self::Of16 => "few16",
        }
    }

    /// Units that a warp reads ahead.
    fn stages(self) -> usize {
        match self {
            Self::Plain | Self::Normed | Self::Of16 => 4,
            Self::Long => 2,
        }
    }

    /// Rows, in eights.
    fn columns(self) -> usize {
        match self {
            Self::Plain | Self::Long | Self::Normed => 1,
            Self::Of16 => 2,
        }
    }

    /// Bytes of shared memory: the ring, rows, the sums of their groups, the sums of the warps, as in `gemm/four_bit_few.cuh`.
    fn shared(self, rows: usize, units: usize, tiles: usize) -> usize {
        WARPS * self.stages() * UNIT_BYTES
            + rows * (units * FOUR_BIT_UNIT * 2 + PAD)
            + (units * 64 + (tiles + WARPS) * 512) * self.columns()
    }
}

/// How few rows are multiplied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct FewPlan {
    pub(super) form: Few,
    pub(super) blocks: u32,
    pub(super) shared: u32,
}

impl FewPlan {
    /// That of a product of whole tiles; `None` where it is not for these kernels: for one, because the rows do not fit into shared memory.
    pub(super) fn of(shape: GemmShape, rows: usize, normed: bool, multiprocessors: u32) -> Option<Self> {
        let GemmShape { inputs, outputs } = shape;
        if !(1..=MOST_FEW).contains(&rows) || normed && (rows > MOST_NORMED || inputs > MOST_NORMED_INPUTS) {
            return None;
        }
        let (tiles, units) = (outputs / FOUR_BIT_TILE, inputs / FOUR_BIT_UNIT);
        let blocks = tiles.min(multiprocessors as usize);
        let forms: &[Few] = match rows {
            _ if normed => &[Few::Normed],
            0..=8 => &[Few::Plain, Few::Long],
            _ => &[Few::Of16],
        };
        let shared = |form: Few| form.shared(rows, units, tiles.div_ceil(blocks));
        let form = forms.iter().copied().find(|&form| shared(form) <= SHARED)?;
        Some(Self { form, blocks: blocks as u32, shared: shared(form).max(SHARED_ALONE) as u32 })
    }
}

/// Forms of more rows: by how many of them a block takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Wide {
    Of16,
    Of32,
    Of64,
    Of128,
}

impl Wide {
    pub(super) const ALL: [Self; 4] = [Self::Of16, Self::Of32, Self::Of64, Self::Of128];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Of16 => "wide16",
            Self::Of32 => "wide32",
            Self::Of64 => "wide64",
            Self::Of128 => "wide128",
        }
    }

    pub(super) fn rows(self) -> usize {
        match self {
            Self::Of16 => 16,
            Self::Of32 => 32,
            Self::Of64 => 64,
            Self::Of128 => 128,
        }
    }

    /// Warpgroups of a block that multiply, 64 outputs each.
    fn groups(self) -> usize {
        match self {
            Self::Of16 | Self::Of32 => 2,
            Self::Of64 | Self::Of128 => 3,
        }
    }

    /// Outputs of a block.
    pub(super) fn outputs(self) -> usize {
        self.groups() * 64
    }

    /// Threads of a block: four warps copy.
    pub(super) fn threads(self) -> usize {
        (self.groups() + 1) * 128
    }

    /// Blocks of a multiprocessor.
    fn together(self) -> usize {
        match self {
            Self::Of16 | Self::Of32 => 2,
            Self::Of64 | Self::Of128 => 1,
        }
    }

    pub(super) fn shared(self) -> usize {
        match self {
            Self::Of16 => 58_368,
            Self::Of32 => 56_320,
            Self::Of64 => 164_864,
            Self::Of128 => 197_632,
        }
    }
}

/// How more rows are multiplied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct WidePlan {
    pub(super) form: Wide,
    /// Blocks that share the inner dimension: those of a cluster.
    pub(super) split: u32,
    pub(super) row_blocks: u32,
    output_blocks: u32,
}

impl WidePlan {
    pub(super) fn of(shape: GemmShape, rows: usize, multiprocessors: u32) -> Self {
        let form = match rows {
            0..=16 => Wide::Of16,
            17..=32 => Wide::Of32,
            33..=64 => Wide::Of64,
            _ => Wide::Of128,
        };
        let (row_blocks, output_blocks) =
            (rows.div_ceil(form.rows()), shape.outputs.div_ceil(form.outputs()));
        let units = shape.inputs / FOUR_BIT_UNIT;
        let room = multiprocessors as usize * form.together();
        // What a block takes beside its units, in units: its start and the sums at its end, which more blocks bring about more of. A last wave that is
        // not full takes less than a whole one, for blocks leave memory and matrix units to each other.
        let cost = |split: usize| {
            let blocks = row_blocks * output_blocks * split;
            let twice_waves = room * blocks.div_ceil(room) + blocks.max(room);
            twice_waves * (units.div_ceil(split) + 6 + split)
        };
        let split = [1, 2, 4, 8].into_iter().filter(|&split| split <= units).min_by_key(|&split| cost(split));
        Self {
            form,
            split: split.unwrap_or(1) as u32,
            row_blocks: row_blocks as u32,
            output_blocks: output_blocks as u32,
        }
    }

    /// That in which a row's bits do not depend on how many others there are: all forms add the inner dimension in the same order, part by part.
    pub(super) fn exact(shape: GemmShape, rows: usize, multiprocessors: u32) -> Self {
        let split = Self::of(shape, ROWS_OF_SPLIT, multiprocessors).split;
        Self { split, ..Self::of(shape, rows, multiprocessors) }
    }

    pub(super) fn blocks(&self) -> u32 {
        self.row_blocks * self.output_blocks * self.split
    }
}
