//! Sampling on the device: penalties and bias, draws, log-probabilities.
//!
//! The definition is that of [`sample`](crate::sample): weights have the same bits, and the random stream is the same. Masses are sums in
//! units of 2⁻⁴⁴ in place of double precision, so that a draw is another than the CPU's where the random number falls within about 2⁻³⁶ of a
//! boundary; it is always the same on the device.
#![allow(unsafe_code)]

use pagedd_core::{Penalties, SamplingParams, TokenId};

use super::buffer::{Buffer, Plain, View, ViewMut};
use super::error::CudaError;
use super::launch::{Grid, Params, launch};
use super::norm::dimension;
use super::pinned::PinnedRing;
use super::stream::Stream;
use crate::error::{length, product};
use crate::sample::{Adjustment, SampleError};

/// How one row of logits is drawn from.
#[derive(Clone, Copy, Debug)]
pub struct SampleRow<'a> {
    /// Which row of the logits. One that is adjusted is named once.
    pub logits_row: u32,
    /// Temperature, `top_k`, `top_p`, seed, how many log-probabilities to report, and the penalties for tokens in `adjustments`.
    pub params: SamplingParams,
    /// Tokens of less than this share of the best one's probability are left out; 0 leaves out none.
    pub min_p: f32,
    /// Which choice of its request.
    pub choice: u32,
    /// Where the token will stand.
    pub position: u32,
    /// Tokens with penalties or a bias, each once.
    pub adjustments: &'a [Adjustment],
}

/// What a draw gave.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Drawn {
    token: u32,
    bad: u32,
}

impl Drawn {
    /// A draw as the device leaves it: `u32::MAX` for one that failed.
    pub(super) const fn of(token: u32) -> Self {
        Self { token, bad: u32::MAX }
    }

    /// The token.
    ///
    /// # Errors
    /// A logit of the row is not finite; other rows are as they would be without it.
    pub fn token(self) -> Result<TokenId, SampleError> {
        if self.token == u32::MAX {
            Err(SampleError::NotFinite { token: self.bad })
        } else {
            Ok(TokenId(self.token))
        }
    }
}

/// One of a row's most likely tokens, with its natural-log probability, unmodified by sampling parameters.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Ranked {
    /// Which.
    pub token: u32,
    /// Its log-probability.
    pub logprob: f32,
}

// SAFETY: an integer and a number: every pattern of bits is a value.
unsafe impl Plain for Ranked {}

/// As `Row` of sample.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct RowWords {
    inverse: f32,
    top_p: f32,
    min_p: f32,
    top_k: u32,
    seed: [u32; 2],
    choice: u32,
    position: u32,
    logits_row: u32,
    ranks: u32,
}
// SAFETY: words: every pattern of bits is a value, and there is no padding.
unsafe impl Plain for RowWords {}

impl RowWords {
    /// Takes the best, or draws from all: a row of `draw_whole`, which `draw` passes over. As `whole` of sample.cu.
    fn whole(&self, vocabulary: usize) -> bool {
        let all = self.top_p >= 1.0 && (self.top_k == 0 || self.top_k as usize >= vocabulary);
        self.inverse == 0.0 || all
    }
}

/// As `Adjustment` of sample.cu.
#[repr(C)]
#[derive(Clone, Copy)]
struct AdjustmentWords {
    token: u32,
    seen: u32,
    output: f32,
    bias: f32,
    original: f32,
}
// SAFETY: as above.
unsafe impl Plain for AdjustmentWords {}

/// Bytes of `Sums` of sample.cu.
const SUMS: usize = 2048 * 12 + 512 * 8 + 16;
/// Bytes of `Best` of sample.cu.
const BEST: usize = 16;
/// Groups of 128 logits of the largest vocabulary.
const MOST_GROUPS: usize = 2048;
/// Thread blocks of a row.
const MOST_PARTS: usize = 32;
/// Thread blocks that a multiprocessor has at once: of `draw_whole`, and of the other kernels.
const WHOLE_BLOCKS: usize = 6;
const BLOCKS: usize = 2;
/// Threads of a block of `draw_whole`.
const WHOLE_THREADS: u32 = 256;
/// Logits that are always in one part.
const PART: usize = 4096;
/// Marks a row that is not ranked.
const NO_RANKS: u32 = u32::MAX;

/// Draws for the rows of a step, and memory for the largest step.
#[derive(Debug)]
pub struct Sampler {
    vocabulary: usize,
    most_ranks: usize,
    rows: Buffer<RowWords>,
    logits_rows: Buffer<u32>,
    penalties: Buffer<[f32; 4]>,
    ends: Buffer<u32>,
    adjustments: Buffer<AdjustmentWords>,
    best: Buffer<[u8; BEST]>,
    maxima: Buffer<[u32; MOST_GROUPS]>,
    sums: Buffer<[u8; SUMS]>,
    drawn: Buffer<Drawn>,
    logprobs: Buffer<f32>,
    ranked: Buffer<Ranked>,
    step: Step,
    host: Host,
}

/// What the rows of the step ask for.
#[derive(Clone, Copy, Default, Debug)]
struct Step {
    rows: usize,
    /// How many of them `draw_whole` draws; `draw` draws the others.
    wholes: usize,
    /// One past the largest row of logits that is named.
    logits_rows: usize,
    adjusts: bool,
    ranks: bool,
}

/// The rows on the host, kept for its memory.
#[derive(Default)]
struct Host {
    rows: Vec<RowWords>,
    logits_rows: Vec<u32>,
    penalties: Vec<[f32; 4]>,
    ends: Vec<u32>,
    adjustments: Vec<AdjustmentWords>,
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Host").field("rows", &self.rows.len()).finish_non_exhaustive()
    }
}

impl Sampler {
    /// Largest vocabulary that the kernels work with.
    pub const MAX_VOCABULARY: usize = 512 * 512;

    /// For logits of `vocabulary` tokens, at most `rows` rows in a step, `ranks` log-probabilities a row beside the drawn token's, and
    /// `adjustments` adjustments in all.
    ///
    /// # Errors
    /// A vocabulary that kernels do not work with, not enough memory, or the device failed.
    pub fn new(
        stream: &Stream,
        vocabulary: usize,
        rows: usize,
        ranks: usize,
        adjustments: usize,
    ) -> Result<Self, CudaError> {
        if vocabulary == 0 || !vocabulary.is_multiple_of(4) || vocabulary > Self::MAX_VOCABULARY {
            return Err(dimension("vocabulary", "a multiple of 4 in [4, 262144]", vocabulary));
        }
        Ok(Self {
            vocabulary,
            most_ranks: ranks,
            rows: Buffer::zeroed(stream, rows)?,
            logits_rows: Buffer::zeroed(stream, rows)?,
            penalties: Buffer::zeroed(stream, rows)?,
            ends: Buffer::zeroed(stream, rows)?,
            adjustments: Buffer::zeroed(stream, adjustments)?,
            best: Buffer::zeroed(stream, product("parts of rows", &[rows, MOST_PARTS])?)?,
            maxima: Buffer::zeroed(stream, rows)?,
            sums: Buffer::zeroed(stream, product("sums of rows", &[2, rows])?)?,
            drawn: Buffer::zeroed(stream, rows)?,
            logprobs: Buffer::zeroed(stream, rows)?,
            ranked: Buffer::zeroed(stream, product("ranks of rows", &[rows, ranks])?)?,
            step: Step::default(),
            host: Host::default(),
        })
    }

    /// Replaces the rows of the step. Queued on `stream`.
    ///
    /// # Errors
    /// A row names a token outside the vocabulary or asks for too many ranks, or no room (the rows are as they were); or the device failed.
    pub fn set(
        &mut self,
        stream: &Stream,
        ring: &mut PinnedRing,
        rows: &[SampleRow<'_>],
    ) -> Result<(), CudaError> {
        self.host.lay_out(rows, self.vocabulary, self.most_ranks)?;
        let Host { rows, logits_rows, penalties, ends, adjustments } = &self.host;
        let count = 0..rows.len();
        let words = self.rows.part_mut(count.clone())?;
        let changed = self.adjustments.part_mut(0..adjustments.len())?;
        self.step.rows = 0;
        ring.upload(stream, rows, words)?;
        if !adjustments.is_empty() {
            ring.upload(stream, logits_rows, self.logits_rows.part_mut(count.clone())?)?;
            ring.upload(stream, penalties, self.penalties.part_mut(count.clone())?)?;
            ring.upload(stream, ends, self.ends.part_mut(count)?)?;
            ring.upload(stream, adjustments, changed)?;
        }
        self.step = Step {
            rows: rows.len(),
            wholes: rows.iter().filter(|row| row.whole(self.vocabulary)).count(),
            logits_rows: logits_rows.iter().max().map_or(0, |&row| row as usize + 1),
            adjusts: !adjustments.is_empty(),
            ranks: rows.iter().any(|row| row.ranks != NO_RANKS),
        };
        Ok(())
    }

    /// Draws a token for each row of the step, and ranks those that ask for it. `logits` is `[rows][vocabulary]`; penalties and bias change
    /// it meanwhile.
    ///
    /// # Errors
    /// The shapes do not fit (nothing was launched), or the device failed.
    pub fn run(&mut self, stream: &Stream, logits: &mut ViewMut<'_, f32>) -> Result<(), CudaError> {
        let rows = self.step.rows;
        if !logits.len().is_multiple_of(self.vocabulary)
            || logits.len() / self.vocabulary < self.step.logits_rows
        {
            let needed = product("logits", &[self.step.logits_rows, self.vocabulary])?;
            length("logits", needed, logits.len())?;
        }
        if rows == 0 {
            return Ok(());
        }
        let kernels = stream.device().kernels();
        let multiprocessors = stream.device().info().multiprocessors as usize;
        let parts = Parts::new(self.vocabulary, rows, BLOCKS * multiprocessors);
        let mut select = self.select(logits, parts);
        let per_row = Grid { blocks: (rows as u32, 1), threads: 128, shared: 0 };
        let per_part = Grid { blocks: (parts.count as u32, rows as u32), threads: 1024, shared: 0 };
        let adjust = self.adjust(logits);
        if self.step.adjusts {
            // SAFETY: a block per row; having set the rows tells that a row's adjustments lie between its end and the one before, and name
            // tokens of the vocabulary; the rows of logits are inside, as checked above, and borrowed mutably.
            unsafe { launch(stream, &kernels.adjust_logits, "penalties", per_row, adjust) }?;
        }
        // SAFETY: a block per part and row; parts cover the vocabulary, a row of logits is inside, and buffers hold `rows` rows of
        // `MOST_PARTS` parts and two sums.
        unsafe { launch(stream, &kernels.survey, "survey", per_part, select) }?;
        if self.step.wholes > 0 {
            let parts = Parts::new(self.vocabulary, rows, WHOLE_BLOCKS * multiprocessors);
            let grid = Grid { blocks: (parts.count as u32, rows as u32), threads: WHOLE_THREADS, shared: 0 };
            let whole = SelectArgs { part: parts.size as u32, ..select };
            // SAFETY: as above, and each row's draw is written by one block.
            unsafe { launch(stream, &kernels.draw_whole, "draw", grid, whole) }?;
        }
        if self.step.wholes < rows {
            // SAFETY: as above; these are other rows.
            unsafe { launch(stream, &kernels.draw, "draw", per_part, select) }?;
        }
        if self.step.adjusts {
            // SAFETY: as for the adjustment.
            unsafe { launch(stream, &kernels.restore_logits, "restoring logits", per_row, adjust) }?;
        }
        if self.step.ranks {
            select.sums = select.more_sums;
            if self.step.adjusts {
                (select.more_sums, select.ranked_only) = (0, 1);
                // SAFETY: as for the first survey.
                unsafe { launch(stream, &kernels.survey, "survey", per_part, select) }?;
            }
            // SAFETY: as for the draw; a row's ranks are at most `most_ranks`, the row length of `ranked`.
            unsafe { launch(stream, &kernels.log_softmax_top, "log-softmax", per_part, select) }?;
        }
        Ok(())
    }

    /// What each row of the step drew.
    #[must_use]
    pub fn drawn(&self) -> View<'_, Drawn> {
        self.drawn.all()
    }

    /// The log-probability of each row's token; NaN where the row failed, of no meaning where none was asked for.
    #[must_use]
    pub fn logprobs(&self) -> View<'_, f32> {
        self.logprobs.all()
    }

    /// `[rows][ranks]`: each row's most likely tokens, best first, as many as it asked for.
    #[must_use]
    pub fn ranked(&self) -> View<'_, Ranked> {
        self.ranked.all()
    }

    fn select(&self, logits: &ViewMut<'_, f32>, parts: Parts) -> SelectArgs {
        let sums = self.sums.all().address();
        SelectArgs {
            logits: logits.address(),
            rows: self.rows.all().address(),
            best: self.best.all().address(),
            maxima: self.maxima.all().address(),
            sums,
            more_sums: if self.step.ranks { sums + (self.rows.len() * SUMS) as u64 } else { 0 },
            drawn: self.drawn.all().address(),
            logprobs: self.logprobs.all().address(),
            ranked: self.ranked.all().address(),
            ranks: self.most_ranks as u32,
            stride: self.vocabulary as u32,
            vocabulary: self.vocabulary as u32,
            part: parts.size as u32,
            ranked_only: 0,
            parts: parts.count as u32,
        }
    }

    fn adjust(&self, logits: &ViewMut<'_, f32>) -> AdjustArgs {
        AdjustArgs {
            logits: logits.address(),
            adjustments: self.adjustments.all().address(),
            ends: self.ends.all().address(),
            penalties: self.penalties.all().address(),
            rows: self.logits_rows.all().address(),
            stride: self.vocabulary as u32,
            unused: 0,
        }
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct SelectArgs {
    logits: u64,
    rows: u64,
    best: u64,
    maxima: u64,
    sums: u64,
    more_sums: u64,
    drawn: u64,
    logprobs: u64,
    ranked: u64,
    ranks: u32,
    stride: u32,
    vocabulary: u32,
    part: u32,
    ranked_only: u32,
    parts: u32,
}
// SAFETY: the fields of SelectArgs in sample.cu, without padding.
unsafe impl Params for SelectArgs {}

#[repr(C)]
#[derive(Clone, Copy)]
struct AdjustArgs {
    logits: u64,
    adjustments: u64,
    ends: u64,
    penalties: u64,
    rows: u64,
    stride: u32,
    unused: u32,
}
// SAFETY: the fields of AdjustArgs in sample.cu; the last is its padding.
unsafe impl Params for AdjustArgs {}

/// How a row is cut among thread blocks. No result depends on it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Parts {
    size: usize,
    count: usize,
}

impl Parts {
    /// Few rows are cut so that there are about as many blocks as run at once.
    fn new(vocabulary: usize, rows: usize, blocks: usize) -> Self {
        let wanted = (blocks / rows.max(1)).clamp(1, MOST_PARTS);
        let size = vocabulary.div_ceil(wanted).next_multiple_of(PART);
        Self { size, count: vocabulary.div_ceil(size) }
    }
}

impl Host {
    fn lay_out(
        &mut self,
        rows: &[SampleRow<'_>],
        vocabulary: usize,
        most_ranks: usize,
    ) -> Result<(), CudaError> {
        let Self { rows: words, logits_rows, penalties, ends, adjustments } = self;
        words.clear();
        logits_rows.clear();
        penalties.clear();
        ends.clear();
        adjustments.clear();
        if rows.len() > usize::from(u16::MAX) {
            return Err(dimension("rows of a step", "at most 65,535", rows.len()));
        }
        for row in rows {
            if let Some(by) = row.adjustments.iter().find(|by| by.token.0 as usize >= vocabulary) {
                return Err(dimension("adjusted token", "in the vocabulary", by.token.0 as usize));
            }
            let ranks = row.params.logprobs.map(usize::from);
            if let Some(ranks) = ranks.filter(|&ranks| ranks > most_ranks) {
                return Err(dimension("log-probabilities", "at most those there is room for", ranks));
            }
            let greedy = row.params.is_greedy() || row.params.top_k == Some(1);
            words.push(RowWords {
                inverse: if greedy { 0.0 } else { 1.0 / row.params.temperature },
                top_p: row.params.top_p,
                min_p: row.min_p,
                top_k: row.params.top_k.map_or(0, |k| k.max(1)),
                seed: [row.params.seed as u32, (row.params.seed >> 32) as u32],
                choice: row.choice,
                position: row.position,
                logits_row: row.logits_row,
                ranks: ranks.map_or(NO_RANKS, |ranks| ranks as u32),
            });
            logits_rows.push(row.logits_row);
            let Penalties { repetition, frequency, presence } = row.params.penalties;
            penalties.push([repetition, frequency, presence, 0.0]);
            adjustments.extend(row.adjustments.iter().map(|by| AdjustmentWords {
                token: by.token.0,
                seen: u32::from(by.seen),
                output: by.output as f32,
                bias: by.bias,
                original: 0.0,
            }));
            ends.push(adjustments.len() as u32);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_every_vocabulary_and_few_rows_are_cut_into_many() {
        for vocabulary in [4, 512, 4096, 4100, 32_000, 49_152, 128_256, 152_064, Sampler::MAX_VOCABULARY] {
            for rows in [1, 2, 8, 64, 132, 256, 1024] {
                let parts = Parts::new(vocabulary, rows, 264);
                assert!(
                    parts.count <= MOST_PARTS && parts.size.is_multiple_of(512),
                    "{vocabulary} {rows} {parts:?}"
                );
                assert!(
                    (parts.count - 1) * parts.size < vocabulary && vocabulary <= parts.count * parts.size
                );
            }
        }
        assert_eq!(Parts::new(128_256, 1, 264).count, 32);
        assert_eq!(Parts::new(128_256, 256, 264).count, 1);
    }
}
