//! From a model file into the weights of a GPU.
//!
//! **Owns** reading, conversion and the way to the device, in parallel and with bounded host memory. **Never** computes with a weight.

use std::ops::Range;

use half::slice::HalfFloatSliceExt as _;
use pagedd_core::TensorType;
use pagedd_kernels::cuda::{
    CudaError, DecoderPlaces, DecoderShape, MatrixPlace, PinnedRing, Place, SharedBuffer, Stream, ViewMut,
    fill_normal,
};
use pagedd_kernels::{FOUR_BIT_TILE, Form, ShapeError, dequantize, four_bit_bytes, pack_four_bit_tile};
use pagedd_model::{LayerTensor, ModelSource, SyntheticElements, TensorInfo, TensorRole};

use super::Element;
use crate::arena::HEADER_BYTES;
use crate::load::{LoadError, spread};
use crate::weights::PlacesError;

/// Bytes on the device that one thread brings there at a time, about; two of them are pinned for each thread.
const CHUNK: usize = 4 << 20;

/// What is read, and what of it lies on the device.
#[derive(Clone, Copy)]
enum Source<'a> {
    /// Rows of a matrix, as elements of 16 bits.
    Matrix(&'a TensorInfo),
    /// A vector, in single precision.
    Vector(&'a TensorInfo),
    /// Tiles of a matrix of four bits.
    Tiles(&'a TensorInfo),
    /// Tiles of two, each of half of the outputs of one and half of the other.
    Interleaved(&'a TensorInfo, &'a TensorInfo),
}

impl<'a> Source<'a> {
    /// Its tensor; the first of two, which are alike.
    fn tensor(self) -> &'a TensorInfo {
        match self {
            Self::Matrix(tensor)
            | Self::Vector(tensor)
            | Self::Tiles(tensor)
            | Self::Interleaved(tensor, _) => tensor,
        }
    }

    /// Rows of the file, and bytes of the device, that belong together: a row, or a tile.
    fn piece(self) -> (usize, usize) {
        let columns = self.tensor().columns;
        let tile = four_bit_bytes(FOUR_BIT_TILE, columns).unwrap_or(0);
        match self {
            Self::Matrix(_) => (1, columns * size_of::<Element>()),
            Self::Vector(_) => (1, columns * size_of::<f32>()),
            Self::Tiles(_) => (FOUR_BIT_TILE, tile),
            Self::Interleaved(..) => (FOUR_BIT_TILE / 2, tile),
        }
    }

    /// Bytes of all of it on the device.
    fn bytes(self) -> usize {
        let (rows, bytes) = self.piece();
        self.tensor().rows / rows * bytes
    }
}

/// What goes where among the weights.
struct Target<'a> {
    source: Source<'a>,
    at: usize,
}

/// Pieces `[first, first + count)` of what is read, and the memory that they go to.
struct Job<'a> {
    source: Source<'a>,
    first: usize,
    count: usize,
    into: ViewMut<'a, u8>,
}

/// Reads every tensor into `memory`, on `threads` threads. `progress` is told per mille and says whether to go on.
///
/// # Errors
/// [`LoadError`]; `memory` then holds a part of the weights.
pub fn fill(
    stream: &Stream,
    source: &ModelSource,
    shape: &DecoderShape,
    places: &DecoderPlaces,
    memory: &mut SharedBuffer,
    threads: usize,
    progress: &mut dyn FnMut(u32) -> bool,
) -> Result<(), LoadError> {
    let targets = targets(source, shape, places)?;
    let jobs = jobs(stream, source, &targets, memory)?;
    let run = |job: Job<'_>, way: &mut Way| job.run(source, way);
    spread(jobs, threads, Job::source_bytes, || Ok(Way::new(stream)?), run, progress)?;
    Ok(stream.synchronize()?)
}

/// A thread's way to the device; it ends when all that went it is there.
struct Way {
    stream: Stream,
    ring: PinnedRing,
    bytes: Vec<u8>,
    floats: Vec<f32>,
    halves: Vec<Element>,
    tiles: Vec<u8>,
}

impl Way {
    fn new(stream: &Stream) -> Result<Self, CudaError> {
        let device = stream.device();
        let (stream, ring) = (device.stream()?, PinnedRing::new(device, 2, CHUNK)?);
        let (bytes, floats, halves, tiles) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        Ok(Self { stream, ring, bytes, floats, halves, tiles })
    }
}

impl Job<'_> {
    /// Rows of each tensor.
    fn rows(&self) -> Range<usize> {
        let (rows, _) = self.source.piece();
        self.first * rows..(self.first + self.count) * rows
    }

    fn source_bytes(&self) -> usize {
        let bytes = self.rows().len() * self.source.tensor().row_bytes();
        match self.source {
            Source::Matrix(_) | Source::Vector(_) | Source::Tiles(_) => bytes,
            Source::Interleaved(_, other) => bytes + self.rows().len() * other.row_bytes(),
        }
    }

    fn run(self, source: &ModelSource, way: &mut Way) -> Result<(), LoadError> {
        let rows = self.rows();
        match self.source {
            Source::Matrix(tensor) => elements(source, tensor, rows, self.into, way),
            Source::Vector(tensor) => {
                let Way { stream, ring, bytes, floats, .. } = way;
                read_floats(source, tensor, rows, bytes, floats)?;
                Ok(ring.upload(stream, floats, self.into.cast().map_err(CudaError::from)?)?)
            }
            Source::Tiles(tensor) => {
                let Way { bytes, .. } = way;
                bytes.resize(rows.len() * tensor.row_bytes(), 0);
                source.read_rows(tensor, rows, bytes)?;
                let row = |tile: usize, output: usize| (tensor, tile * FOUR_BIT_TILE + output, 0);
                tiles(self.count, row, self.into, way)
            }
            Source::Interleaved(tensor, other) => {
                let Way { bytes, .. } = way;
                let first = rows.len() * tensor.row_bytes();
                bytes.resize(first + rows.len() * other.row_bytes(), 0);
                let (of_one, of_other) = bytes.split_at_mut(first);
                source.read_rows(tensor, rows.clone(), of_one)?;
                source.read_rows(other, rows, of_other)?;
                let half = FOUR_BIT_TILE / 2;
                let row = |tile: usize, output: usize| match output.checked_sub(half) {
                    None => (tensor, tile * half + output, 0),
                    Some(output) => (other, tile * half + output, first),
                };
                tiles(self.count, row, self.into, way)
            }
        }
    }
}

/// Brings rows of a matrix to the device as elements.
fn elements(
    source: &ModelSource,
    tensor: &TensorInfo,
    rows: Range<usize>,
    mut into: ViewMut<'_, u8>,
    way: &mut Way,
) -> Result<(), LoadError> {
    let Way { stream, ring, bytes, floats, halves, .. } = way;
    if tensor.ty == TensorType::BF16 && into.len() <= CHUNK {
        // As it is.
        let mut slot = ring.slot()?;
        let read = rows.len() * tensor.row_bytes();
        source.read_rows(tensor, rows, &mut slot[..read])?;
        return Ok(slot.send(stream, &mut into)?);
    }
    read_floats(source, tensor, rows, bytes, floats)?;
    halves.resize(floats.len(), Element::ZERO);
    halves.convert_from_f32_slice(floats);
    Ok(ring.upload(stream, halves, into.cast().map_err(CudaError::from)?)?)
}

fn read_floats(
    source: &ModelSource,
    tensor: &TensorInfo,
    rows: Range<usize>,
    bytes: &mut Vec<u8>,
    floats: &mut Vec<f32>,
) -> Result<(), LoadError> {
    bytes.resize(rows.len() * tensor.row_bytes(), 0);
    floats.resize(rows.len() * tensor.columns, 0.0);
    source.read_rows(tensor, rows, bytes)?;
    Ok(dequantize(tensor.ty, bytes, floats)
        .map_err(|problem| PlacesError::Shape { role: tensor.role, problem })?)
}

/// Brings `count` tiles to the device. `row` says of which tensor an output of a tile is, which of its rows that were read, and where among
/// the bytes these begin.
fn tiles<'a>(
    count: usize,
    row: impl Fn(usize, usize) -> (&'a TensorInfo, usize, usize),
    into: ViewMut<'_, u8>,
    way: &mut Way,
) -> Result<(), LoadError> {
    let Way { stream, ring, bytes, tiles, .. } = way;
    let (first, ..) = row(0, 0);
    tiles.resize(into.len(), 0);
    for (index, tile) in tiles.chunks_exact_mut(into.len() / count.max(1)).enumerate() {
        let rows = std::array::from_fn(|output| {
            let (tensor, row, from) = row(index, output);
            (tensor.ty, &bytes[from + row * tensor.row_bytes()..][..tensor.row_bytes()])
        });
        pack_four_bit_tile(&rows, first.columns, tile)
            .map_err(|problem| PlacesError::Shape { role: first.role, problem })?;
    }
    Ok(ring.upload(stream, tiles, into)?)
}

/// Collects what goes where.
struct Targets<'a> {
    source: &'a ModelSource,
    all: Vec<Target<'a>>,
}

impl<'a> Targets<'a> {
    fn tensor(&self, role: TensorRole) -> Result<&'a TensorInfo, PlacesError> {
        self.source.tensor(role).ok_or(PlacesError::Missing(role))
    }

    /// Sources one behind the other from `at` on, where they fill `bytes` exactly.
    fn fill(&mut self, mut at: usize, bytes: usize, sources: &[Source<'a>]) -> Result<(), PlacesError> {
        let end = at + bytes;
        for (index, &source) in sources.iter().enumerate() {
            self.all.push(Target { source, at });
            at += source.bytes();
            if at > end || (index + 1 == sources.len() && at < end) {
                return Err(PlacesError::Overflow(source.tensor().role));
            }
        }
        Ok(())
    }

    fn vectors(&mut self, roles: &[TensorRole], place: Place) -> Result<(), PlacesError> {
        let sources = roles.iter().map(|&role| Ok(Source::Vector(self.tensor(role)?)));
        let sources = sources.collect::<Result<Vec<_>, PlacesError>>()?;
        self.fill(place.at, place.len * size_of::<f32>(), &sources)
    }

    /// Matrices whose outputs are one behind the other.
    fn matrices(&mut self, roles: &[TensorRole], place: MatrixPlace) -> Result<(), PlacesError> {
        let (of, size): (fn(_) -> Source<'a>, _) = match place.form {
            Form::Half => (Source::Matrix, size_of::<Element>()),
            Form::FourBit => (Source::Tiles, 1),
        };
        let sources = roles.iter().map(|&role| Ok(of(self.tensor(role)?)));
        let sources = sources.collect::<Result<Vec<_>, PlacesError>>()?;
        self.fill(place.at, place.place().len * size, &sources)
    }

    /// Two of which one gates the other.
    fn gated(&mut self, [gate, up]: [TensorRole; 2], place: MatrixPlace) -> Result<(), PlacesError> {
        match place.form {
            Form::Half => self.matrices(&[gate, up], place),
            Form::FourBit => {
                let (first, second) = (self.tensor(gate)?, self.tensor(up)?);
                if first.shape() != second.shape() {
                    return Err(PlacesError::Overflow(up));
                }
                // A tile has half of its outputs of each, so that there are as many as both have.
                self.fill(place.at, place.place().len, &[Source::Interleaved(first, second)])
            }
        }
    }
}

/// Where every tensor of the file goes, in the order of the device's memory.
fn targets<'a>(
    source: &'a ModelSource,
    shape: &DecoderShape,
    places: &DecoderPlaces,
) -> Result<Vec<Target<'a>>, LoadError> {
    use LayerTensor as T;
    let mut targets = Targets { source, all: Vec::new() };
    let embedding = targets.tensor(TensorRole::TokenEmbd)?;
    let bytes = places.embedding.len * size_of::<Element>();
    targets.fill(places.embedding.at, bytes, &[Source::Matrix(embedding)])?;
    for (index, layer) in places.layers.iter().enumerate() {
        let of = |tensor| TensorRole::Layer(index as u32, tensor);
        targets.vectors(&[of(T::AttnNorm)], layer.attn_norm)?;
        targets.matrices(&[of(T::AttnQ), of(T::AttnK), of(T::AttnV)], layer.qkv)?;
        if let Some(bias) = layer.bias {
            targets.vectors(&[of(T::AttnQBias), of(T::AttnKBias), of(T::AttnVBias)], bias)?;
        }
        targets.matrices(&[of(T::AttnOutput)], layer.attn_output)?;
        targets.vectors(&[of(T::FfnNorm)], layer.ffn_norm)?;
        targets.gated([of(T::FfnGate), of(T::FfnUp)], layer.gate_up)?;
        targets.matrices(&[of(T::FfnDown)], layer.ffn_down)?;
    }
    targets.vectors(&[TensorRole::OutputNorm], places.output_norm)?;
    if places.output.at != places.embedding.at {
        let role = if shape.tied { TensorRole::TokenEmbd } else { TensorRole::Output };
        targets.matrices(&[role], places.output)?;
    }
    let mut all = targets.all;
    all.sort_by_key(|target| target.at);
    Ok(all)
}

/// Cuts the memory into what each job writes. What is made up and not read is made on the device at once.
fn jobs<'a>(
    stream: &Stream,
    source: &ModelSource,
    targets: &[Target<'a>],
    memory: &'a mut SharedBuffer,
) -> Result<Vec<Job<'a>>, LoadError> {
    let len = memory.len();
    let mut rest = Some(memory.all_mut().part(HEADER_BYTES..len).map_err(CudaError::from)?);
    let mut at = 0;
    let mut jobs = Vec::new();
    for &Target { source: read, at: place } in targets {
        if let Source::Matrix(tensor) = read
            && let Some(SyntheticElements::Normal { seed, deviation }) = source.synthetic(tensor)
        {
            let piece = take(&mut rest, &mut at, place, read.bytes())?;
            let mut piece = piece.cast().map_err(CudaError::from)?;
            fill_normal::<Element>(stream, seed, deviation, &mut piece)?;
            continue;
        }
        let (rows, bytes) = read.piece();
        let pieces = read.tensor().rows / rows;
        let step = (CHUNK / bytes.max(1)).max(1);
        for first in (0..pieces).step_by(step) {
            let count = step.min(pieces - first);
            let into = take(&mut rest, &mut at, place + first * bytes, count * bytes)?;
            jobs.push(Job { source: read, first, count, into });
        }
    }
    Ok(jobs)
}

/// Cuts `[start, start + bytes)` of the weights out of `rest`, which begins at `at` of them.
fn take<'a>(
    rest: &mut Option<ViewMut<'a, u8>>,
    at: &mut usize,
    start: usize,
    bytes: usize,
) -> Result<ViewMut<'a, u8>, CudaError> {
    let short = ShapeError::Length { what: "weights", needed: start + bytes, found: *at };
    let (_, after) = rest.take().ok_or(short)?.split_at(start - *at)?;
    let (piece, after) = after.split_at(bytes)?;
    (*rest, *at) = (Some(after), start + bytes);
    Ok(piece)
}
