//! From a model file into the weights of a GPU.
//!
//! **Owns** reading, conversion and the way to the device, in parallel and with bounded host memory. **Never** computes with a weight.

use half::slice::HalfFloatSliceExt as _;
use pagedd_core::TensorType;
use pagedd_kernels::cuda::{
    CudaError, DecoderPlaces, DecoderShape, PinnedRing, Place, SharedBuffer, Stream, ViewMut, fill_normal,
};
use pagedd_kernels::{ShapeError, dequantize};
use pagedd_model::{LayerTensor, ModelSource, SyntheticElements, TensorInfo, TensorRole};

use super::Element;
use crate::arena::HEADER_BYTES;
use crate::load::{LoadError, spread};
use crate::weights::PlacesError;

/// Bytes on the device that one thread brings there at a time, about; two of them are pinned for each thread.
const CHUNK: usize = 4 << 20;

/// A tensor and where it goes.
struct Target<'a> {
    tensor: &'a TensorInfo,
    place: Place,
    /// Single precision, and not 16 bits.
    vector: bool,
}

impl Target<'_> {
    fn element(&self) -> usize {
        if self.vector { size_of::<f32>() } else { size_of::<Element>() }
    }
}

/// Rows of a tensor, and the memory that they go to.
struct Job<'a> {
    tensor: &'a TensorInfo,
    first: usize,
    rows: usize,
    vector: bool,
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
}

impl Way {
    fn new(stream: &Stream) -> Result<Self, CudaError> {
        let device = stream.device();
        let (stream, ring) = (device.stream()?, PinnedRing::new(device, 2, CHUNK)?);
        Ok(Self { stream, ring, bytes: Vec::new(), floats: Vec::new(), halves: Vec::new() })
    }
}

impl Job<'_> {
    fn source_bytes(&self) -> usize {
        self.rows * self.tensor.row_bytes()
    }

    fn run(self, source: &ModelSource, way: &mut Way) -> Result<(), LoadError> {
        let Self { tensor, first, rows, vector, mut into } = self;
        let read = rows * tensor.row_bytes();
        let range = first..first + rows;
        if tensor.ty == TensorType::BF16 && !vector && into.len() <= CHUNK {
            // As it is.
            let mut slot = way.ring.slot()?;
            source.read_rows(tensor, range, &mut slot[..read])?;
            return Ok(slot.send(&way.stream, &mut into)?);
        }
        let Way { stream, ring, bytes, floats, halves } = way;
        bytes.resize(read, 0);
        source.read_rows(tensor, range, bytes)?;
        floats.resize(rows * tensor.columns, 0.0);
        dequantize(tensor.ty, bytes, floats)
            .map_err(|problem| PlacesError::Shape { role: tensor.role, problem })?;
        if vector {
            return Ok(ring.upload(stream, floats, into.cast().map_err(CudaError::from)?)?);
        }
        halves.resize(floats.len(), Element::ZERO);
        halves.convert_from_f32_slice(floats);
        Ok(ring.upload(stream, halves, into.cast().map_err(CudaError::from)?)?)
    }
}

/// Where every tensor of the file goes.
fn targets<'a>(
    source: &'a ModelSource,
    shape: &DecoderShape,
    places: &DecoderPlaces,
) -> Result<Vec<Target<'a>>, LoadError> {
    use LayerTensor as T;
    let mut targets = Vec::new();
    let mut add = |role, place: Place, vector| {
        let tensor = source.tensor(role).ok_or(PlacesError::Missing(role))?;
        if tensor.rows * tensor.columns != place.len {
            return Err(PlacesError::Overflow(role));
        }
        targets.push(Target { tensor, place, vector });
        Ok(())
    };
    let (hidden, ffn) = (shape.hidden, shape.ffn);
    let (query, kv) = (shape.query_width(), shape.kv_heads * shape.head_dim);
    add(TensorRole::TokenEmbd, places.embedding, false)?;
    for (index, layer) in places.layers.iter().enumerate() {
        let of = |tensor| TensorRole::Layer(index as u32, tensor);
        let rows = |place: Place, first: usize, rows: usize| {
            place.part(first * hidden, rows * hidden, size_of::<Element>())
        };
        add(of(T::AttnNorm), layer.attn_norm, true)?;
        add(of(T::AttnQ), rows(layer.qkv, 0, query), false)?;
        add(of(T::AttnK), rows(layer.qkv, query, kv), false)?;
        add(of(T::AttnV), rows(layer.qkv, query + kv, kv), false)?;
        if let Some(bias) = layer.bias {
            let part = |first, len| bias.part(first, len, size_of::<f32>());
            add(of(T::AttnQBias), part(0, query), true)?;
            add(of(T::AttnKBias), part(query, kv), true)?;
            add(of(T::AttnVBias), part(query + kv, kv), true)?;
        }
        add(of(T::AttnOutput), layer.attn_output, false)?;
        add(of(T::FfnNorm), layer.ffn_norm, true)?;
        add(of(T::FfnGate), rows(layer.gate_up, 0, ffn), false)?;
        add(of(T::FfnUp), rows(layer.gate_up, ffn, ffn), false)?;
        add(of(T::FfnDown), layer.ffn_down, false)?;
    }
    add(TensorRole::OutputNorm, places.output_norm, true)?;
    if !shape.tied {
        add(TensorRole::Output, places.output, false)?;
    }
    targets.sort_by_key(|target| target.place.at);
    Ok(targets)
}

/// Cuts the memory into what each job writes. What is made up and not read is made on the device at once.
fn jobs<'a>(
    stream: &Stream,
    source: &ModelSource,
    targets: &'a [Target<'a>],
    memory: &'a mut SharedBuffer,
) -> Result<Vec<Job<'a>>, LoadError> {
    let len = memory.len();
    let mut rest = Some(memory.all_mut().part(HEADER_BYTES..len).map_err(CudaError::from)?);
    let mut at = 0;
    let mut jobs = Vec::new();
    for target in targets {
        let Target { tensor, place, vector } = *target;
        if let (false, Some(SyntheticElements::Normal { seed, deviation })) =
            (vector, source.synthetic(tensor))
        {
            let piece = take(&mut rest, &mut at, place.at, place.len * target.element())?;
            let mut piece = piece.cast().map_err(CudaError::from)?;
            fill_normal::<Element>(stream, seed, deviation, &mut piece)?;
            continue;
        }
        let row = tensor.columns * target.element();
        let step = (CHUNK / row.max(1)).max(1);
        for first in (0..tensor.rows).step_by(step) {
            let rows = step.min(tensor.rows - first);
            let into = take(&mut rest, &mut at, place.at + first * row, rows * row)?;
            jobs.push(Job { tensor, first, rows, vector, into });
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
