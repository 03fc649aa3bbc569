//! A matrix in four bits, read as rows of `Q4_1` blocks.
//!
//! **Owns** the order of codes in a checkpoint, and its translation. **Never** holds more than a tile: beside what it fills it takes
//! about [`TILE`] bytes, whatever the size of the matrix.
//!
//! Checkpoints are made for products by columns: a line of `qweight` has some inputs of *every* output. A row of ours is one output with all
//! its inputs, so rows are read out of all lines, in tiles.
//!
//! A weight is `(code - zero) * scale`; a block of `Q4_1` has `code * d + m`. So `d` is the scale and `m` is `-zero * scale`, rounded to
//! the nearest half float: off by at most `2^-11 * zero * scale`, which is less than a 136th of a step between codes, and by nothing where
//! zero is a power of two (8, where quantisation is symmetric). A scale in BF16 is a half float's, too, unless it is below `2^-14`,
//! where it is rounded to a multiple of `2^-24`.

use std::ops::Range;

use half::{bf16, f16};

use super::quantization::Packing;
use crate::error::{Fault, ModelError};
use crate::file::SourceFile;

/// Inputs of a block of `Q4_1`, and its bytes: scale, minimum, 32 codes.
pub(super) const BLOCK: usize = 32;
pub(super) const BLOCK_BYTES: usize = 20;
/// Codes of a word of 32 bits.
pub(super) const CODES: usize = 8;
const WORD: usize = size_of::<u32>();
const HALF: usize = size_of::<f16>();
/// Output of each code of a word in AWQ, the lowest bits first.
const AWQ_ORDER: [usize; CODES] = [0, 2, 4, 6, 1, 3, 5, 7];
/// Bytes of `qweight` that are held at a time, about.
const TILE: usize = 512 << 10;
/// What lies between two parts is read with them up to this size: that is faster than another call.
const GAP: usize = 4 << 10;

/// Part of a packed matrix: where it lies in the files.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Part {
    pub name: String,
    pub file: usize,
    pub offset: u64,
    pub bytes: u64,
}

/// What scales are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ScaleType {
    F16,
    BF16,
}

/// A packed matrix.
///
/// Having one from [`Reader`](super::tensors::Reader) tells you: its parts lie inside their files and have just the bytes of `rows`, `columns` and
/// `group`; `columns` is a multiple of `group`, that one of [`BLOCK`], `rows` one of [`CODES`]; inputs are in groups by their place.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Packed {
    pub packing: Packing,
    pub rows: usize,
    pub columns: usize,
    /// Inputs that share scale and zero.
    pub group: usize,
    pub scale_type: ScaleType,
    pub qweight: Part,
    pub qzeros: Part,
    pub scales: Part,
}

impl Packed {
    /// Bytes of a row of `Q4_1`.
    pub(super) fn row_bytes(&self) -> usize {
        self.columns / BLOCK * BLOCK_BYTES
    }

    /// Where it is read from, in the order of names.
    pub(super) fn parts(&self) -> [&Part; 3] {
        [&self.qweight, &self.qzeros, &self.scales]
    }

    /// Fills `dst` with the rows `[rows.start, rows.end)` as blocks of `Q4_1`. An error names the file of the part that is wrong.
    pub(super) fn read_rows(
        &self,
        files: &[SourceFile],
        rows: Range<usize>,
        dst: &mut [u8],
    ) -> Result<(), ModelError> {
        if rows.is_empty() || rows.end > self.rows || dst.len() != rows.len() * self.row_bytes() {
            let problem = format!("rows {rows:?} of {} do not fill {} bytes", self.rows, dst.len());
            return Err(Fault::unsupported(&self.qweight.name, problem).at(&files[self.qweight.file].path));
        }
        let words = rows.start / CODES * WORD..rows.end.div_ceil(CODES) * WORD;
        let line = self.rows / CODES * WORD;
        let mut zeros = Window::new(files, &self.qzeros, line, words.clone());
        let mut scales =
            Window::new(files, &self.scales, self.rows * HALF, rows.start * HALF..rows.end * HALF);
        let (mut codes, lines) = match self.packing {
            Packing::Awq => (Window::new(files, &self.qweight, line, words), BLOCK),
            Packing::Gptq | Packing::GptqV2 => {
                let within = rows.start * WORD..rows.end * WORD;
                (Window::new(files, &self.qweight, self.rows * WORD, within), BLOCK / CODES)
            }
        };
        let blocks = self.columns / BLOCK;
        let step = (TILE / (codes.stride * lines)).clamp(1, blocks);
        let mut factors = Vec::new();
        for first in (0..blocks).step_by(step) {
            let tile = first..blocks.min(first + step);
            let group_of = |block: usize| block * BLOCK / self.group;
            let groups = group_of(tile.start)..group_of(tile.end - 1) + 1;
            codes.load(tile.start * lines..tile.end * lines)?;
            zeros.load(groups.clone())?;
            scales.load(groups.clone())?;
            factors.clear();
            for group in groups.clone() {
                self.factors(&zeros, &scales, group, &rows, &mut factors)?;
            }
            for block in tile {
                let of_group = (group_of(block) - groups.start) * rows.len();
                let mut put = |row: usize, codes: [u8; BLOCK / 2]| {
                    let block = &mut dst[row * self.row_bytes() + block * BLOCK_BYTES..][..BLOCK_BYTES];
                    block[..4].copy_from_slice(&factors[of_group + row]);
                    block[4..].copy_from_slice(&codes);
                };
                match self.packing {
                    Packing::Awq => awq_block(&codes, block * lines, &rows, put),
                    Packing::Gptq | Packing::GptqV2 => {
                        let lines = std::array::from_fn(|i| codes.line(block * lines + i));
                        for (row, codes) in gptq_block(lines).enumerate() {
                            put(row, codes);
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Appends scale and minimum of each of `rows` in one group, as they stand in a block.
    fn factors(
        &self,
        zeros: &Window<'_>,
        scales: &Window<'_>,
        group: usize,
        rows: &Range<usize>,
        factors: &mut Vec<[u8; 4]>,
    ) -> Result<(), ModelError> {
        let words = zeros.line(group).as_chunks().0;
        for (row, scale) in rows.clone().zip(scales.line(group).as_chunks().0) {
            let scale = match self.scale_type {
                ScaleType::F16 => f16::from_le_bytes(*scale),
                ScaleType::BF16 => f16::from_f32(bf16::from_le_bytes(*scale).to_f32()),
            };
            let place = |what: &str| format!("{what} of output {row} in group {group}");
            if !scale.is_finite() {
                let problem = format!("{} is {scale} in half precision", place("the scale"));
                return Err(scales.unsupported(problem));
            }
            let stored = code(u32::from_le_bytes(words[row / CODES - rows.start / CODES]), self.code_at(row));
            let zero = match self.packing {
                Packing::Awq | Packing::GptqV2 => stored,
                Packing::Gptq if stored == 15 => {
                    let problem = format!(
                        "{} is stored as 15, which is 16 to some writers of GPTQ and 0 to others; one in the format gptq_v2 is served",
                        place("the zero")
                    );
                    return Err(zeros.unsupported(problem));
                }
                Packing::Gptq => stored + 1,
            };
            // Exact in single precision; rounded once.
            let minimum = f16::from_f32(-(f32::from(zero) * scale.to_f32()));
            if !minimum.is_finite() {
                let problem = format!(
                    "{}, {scale}, times its zero {zero} is too large for half precision",
                    place("the scale")
                );
                return Err(scales.unsupported(problem));
            }
            let ([d0, d1], [m0, m1]) = (scale.to_le_bytes(), minimum.to_le_bytes());
            factors.push([d0, d1, m0, m1]);
        }
        Ok(())
    }

    /// Which code of its word belongs to output `row`, in `qzeros`.
    fn code_at(&self, row: usize) -> usize {
        /// Inverse of [`AWQ_ORDER`].
        const AWQ_PLACE: [usize; CODES] = {
            let mut place = [0; CODES];
            let mut code = 0;
            while code < CODES {
                place[AWQ_ORDER[code]] = code;
                code += 1;
            }
            place
        };
        match self.packing {
            Packing::Awq => AWQ_PLACE[row % CODES],
            Packing::Gptq | Packing::GptqV2 => row % CODES,
        }
    }
}

/// The zero that every output has in the first group of a matrix, as it is stored, where all have one.
pub(super) fn common_zero(
    files: &[SourceFile],
    qzeros: &Part,
    line: usize,
) -> Result<Option<u8>, ModelError> {
    let mut window = Window::new(files, qzeros, line, 0..line);
    window.load(0..1)?;
    let first = window.bytes.first().map_or(0, |byte| byte & 15);
    Ok(window.bytes.iter().all(|&byte| byte == first * 0x11).then_some(first))
}

/// Code `index` of a word.
fn code(word: u32, index: usize) -> u8 {
    (word >> (4 * index)) as u8 & 15
}

/// Gives `put` the codes of each of `rows`, counted from the first, of the block whose lines begin at `first`. As `Q4_1` has them: byte `j` holds
/// inputs `j` (low bits) and `j + 16`.
fn awq_block(
    codes: &Window<'_>,
    first: usize,
    rows: &Range<usize>,
    mut put: impl FnMut(usize, [u8; BLOCK / 2]),
) {
    let lines: [&[[u8; WORD]]; BLOCK] = std::array::from_fn(|i| codes.line(first + i).as_chunks().0);
    let before = rows.start / CODES;
    for (at, _) in lines[0].iter().enumerate() {
        let words: [u32; BLOCK] = std::array::from_fn(|i| u32::from_le_bytes(lines[i][at]));
        let (low, high) = words.split_at(BLOCK / 2);
        for (index, output) in AWQ_ORDER.into_iter().enumerate() {
            let row = (before + at) * CODES + output;
            if rows.contains(&row) {
                put(
                    row - rows.start,
                    std::array::from_fn(|j| code(low[j], index) | code(high[j], index) << 4),
                );
            }
        }
    }
}

/// The same of GPTQ, whose block has four lines.
fn gptq_block(lines: [&[u8]; BLOCK / CODES]) -> impl Iterator<Item = [u8; BLOCK / 2]> {
    let [a, b, c, d] =
        lines.map(|line| line.as_chunks().0.iter().map(|word| spread(u32::from_le_bytes(*word))));
    a.zip(b).zip(c.zip(d)).map(|((a, b), (c, d))| {
        let mut codes = [0; BLOCK / 2];
        codes[..CODES].copy_from_slice(&(a | c << 4).to_le_bytes());
        codes[CODES..].copy_from_slice(&(b | d << 4).to_le_bytes());
        codes
    })
}

/// The codes of a word in a byte each.
fn spread(word: u32) -> u64 {
    let mut codes = u64::from(word);
    for (shift, mask) in [(16, 0x0000_ffff_0000_ffff), (8, 0x00ff_00ff_00ff_00ff), (4, 0x0f0f_0f0f_0f0f_0f0f)]
    {
        codes = (codes | codes << shift) & mask;
    }
    codes
}

/// A part as lines of equal length, of each of which the bytes `within` are read.
struct Window<'a> {
    file: &'a SourceFile,
    part: &'a Part,
    line: usize,
    within: Range<usize>,
    /// From one line to the next in `bytes`.
    stride: usize,
    /// The line that `bytes` begins with.
    first: usize,
    bytes: Vec<u8>,
}

impl<'a> Window<'a> {
    fn new(files: &'a [SourceFile], part: &'a Part, line: usize, within: Range<usize>) -> Self {
        let stride = if line - within.len() <= GAP { line } else { within.len() };
        Self { file: &files[part.file], part, line, within, stride, first: 0, bytes: Vec::new() }
    }

    /// Reads the lines `lines`, which are not none.
    fn load(&mut self, lines: Range<usize>) -> Result<(), ModelError> {
        let Self { file, part, line, within, .. } = self;
        let at = |index: usize| part.offset + (index * *line + within.start) as u64;
        self.first = lines.start;
        self.bytes.resize((lines.len() - 1) * self.stride + within.len(), 0);
        let read = |line: usize, into: &mut [u8]| {
            file.read_at(at(line), into, &part.name).map_err(|fault| fault.at(&file.path))
        };
        if self.stride == *line {
            return read(lines.start, &mut self.bytes);
        }
        lines.zip(self.bytes.chunks_exact_mut(self.stride)).try_for_each(|(line, into)| read(line, into))
    }

    /// What it says is not served.
    fn unsupported(&self, problem: String) -> ModelError {
        Fault::unsupported(&self.part.name, problem).at(&self.file.path)
    }

    /// What was read of line `index`.
    fn line(&self, index: usize) -> &[u8] {
        &self.bytes[(index - self.first) * self.stride..][..self.within.len()]
    }
}

#[cfg(test)]
mod tests;
