//! From a model file into the weights arena.
//!
//! **Owns** reading and packing, in parallel and with bounded scratch memory. **Never** computes with a weight.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};

use pagedd_kernels::{MatrixLayout, PANEL_ROWS, ShapeError, dequantize, pack};
use pagedd_model::{ModelError, ModelSource, TensorInfo, TensorRole};

use crate::arena::ArenaError;
use crate::memory::KvSizeError;
use crate::weights::{Places, PlacesError};

/// Bytes of a tensor that one thread reads at a time, as far as whole panels allow.
const CHUNK: usize = 1 << 20;

/// The model cannot be loaded.
#[derive(thiserror::Error, Debug)]
pub enum LoadError {
    /// The file is damaged, or describes what is not served.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The file lacks a tensor.
    #[error(transparent)]
    Places(#[from] PlacesError),
    /// A setting that no model can be run with.
    #[error("{key}: {problem}")]
    Setting {
        /// Which.
        key: &'static str,
        /// What is wrong with it.
        problem: String,
    },
    /// Heads or blocks of a shape that no kernel works with.
    #[error("{item}: {problem}")]
    Shape {
        /// What has the shape.
        item: &'static str,
        /// What is wrong with it.
        problem: ShapeError,
    },
    /// There is not enough memory for the weights.
    #[error("weights of {wanted} bytes, {available} bytes of memory are available")]
    NoMemory {
        /// Bytes of the arena.
        wanted: u64,
        /// What there is.
        available: u64,
    },
    /// There is not enough memory for KV, or its size makes no sense.
    #[error(transparent)]
    KvSize(#[from] KvSizeError),
    /// The system gave no memory.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// The GPU cannot be used, or has too little memory.
    #[cfg(feature = "cuda")]
    #[error("GPU: {0}")]
    Gpu(#[from] pagedd_kernels::cuda::CudaError),
    /// An arena of an earlier worker is of no use, and takes the memory of another.
    #[cfg(feature = "cuda")]
    #[error("the {kind} arena of an earlier worker is in the way: {why}")]
    Stale {
        /// Which.
        kind: crate::arena::Kind,
        /// What is wrong with it.
        why: String,
    },
    /// The system gave no threads.
    #[error("compute threads: {0}")]
    Threads(std::io::Error),
    /// The daemon is gone; nobody waits for the model.
    #[error("loading was given up")]
    GivenUp,
}

impl LoadError {
    /// Whether another try could end otherwise.
    pub fn retry(&self) -> bool {
        #[cfg(feature = "cuda")]
        use pagedd_kernels::cuda::CudaError;
        match self {
            #[cfg(feature = "cuda")]
            Self::Stale { .. } => true,
            #[cfg(feature = "cuda")]
            Self::Gpu(error) => matches!(error, CudaError::OutOfMemory { .. } | CudaError::Device { .. }),
            Self::NoMemory { .. }
            | Self::Arena(_)
            | Self::Threads(_)
            | Self::GivenUp
            | Self::KvSize(KvSizeError::TooLarge { .. })
            | Self::Model(ModelError::Io { .. }) => true,
            Self::KvSize(KvSizeError::NoBlock { .. } | KvSizeError::BadPercent { .. })
            | Self::Model(ModelError::Malformed { .. } | ModelError::Unsupported { .. })
            | Self::Places(_)
            | Self::Setting { .. }
            | Self::Shape { .. } => false,
        }
    }
}

/// Rows of one tensor, and the bytes of the arena that they are packed into.
struct Job<'a> {
    tensor: &'a TensorInfo,
    /// `[first, first + rows)` of the tensor.
    first: usize,
    rows: usize,
    target: Target<'a>,
}

enum Target<'a> {
    /// The panels of a matrix that the rows fill.
    Panels { layout: MatrixLayout, bytes: &'a mut [u8] },
    /// float32 values.
    Floats(&'a mut [u8]),
}

/// Reads every tensor and packs it into `arena`, on `threads` threads. `progress` is told per mille and says whether to go on.
///
/// # Errors
/// [`LoadError`]; `arena` then holds a part of the weights.
pub fn fill(
    source: &ModelSource,
    places: &Places,
    arena: &mut [u8],
    threads: usize,
    progress: &mut dyn FnMut(u32) -> bool,
) -> Result<(), LoadError> {
    let jobs = jobs(source, places, arena)?;
    let scratch = || Ok((Vec::new(), Vec::new()));
    let run = |job: Job<'_>, (bytes, floats): &mut (Vec<u8>, Vec<f32>)| job.run(source, bytes, floats);
    spread(jobs, threads, Job::source_bytes, scratch, run, progress)
}

/// Runs `jobs` in their order on `threads` threads, each with a state that it makes for its first job. `progress` is told how much of all jobs'
/// `size` is done, per mille, and says whether to go on.
///
/// # Errors
/// The first of each thread; jobs that had not begun are left out.
pub fn spread<J: Send, S>(
    jobs: Vec<J>,
    threads: usize,
    size: impl Fn(&J) -> usize + Sync,
    state: impl Fn() -> Result<S, LoadError> + Sync,
    run: impl Fn(J, &mut S) -> Result<(), LoadError> + Sync,
    progress: &mut dyn FnMut(u32) -> bool,
) -> Result<(), LoadError> {
    let total: usize = jobs.iter().map(&size).sum();
    let queue = Mutex::new(jobs.into_iter());
    let stop = AtomicBool::new(false);
    let (done, told) = sync_channel(64);
    let work = |done: SyncSender<usize>| {
        let mut own = None;
        while !stop.load(Ordering::Relaxed) {
            // The guard must not live as long as the job runs.
            let job = queue.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(job) = job else { break };
            let bytes = size(&job);
            let state = match &mut own {
                Some(state) => Ok(state),
                none => state().map(|state| none.insert(state)),
            };
            if let Err(error) = state.and_then(|state| run(job, state)) {
                stop.store(true, Ordering::Relaxed);
                return Err(error);
            }
            // The receiver outlives this thread; were it gone, nobody would want to know.
            let _ = done.send(bytes);
        }
        Ok(())
    };
    let mut go_on = progress(0);
    let results = std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = (0..threads)
            .map(|_| {
                let done = done.clone();
                scope.spawn(move || work(done))
            })
            .collect();
        drop(done);
        let mut read = 0;
        for bytes in told {
            read += bytes;
            go_on = go_on && progress((read as u64 * 1000 / total.max(1) as u64) as u32);
            if !go_on {
                stop.store(true, Ordering::Relaxed);
            }
        }
        threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect::<Vec<_>>()
    });
    for result in results {
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    }
    if go_on { Ok(()) } else { Err(LoadError::GivenUp) }
}

impl Job<'_> {
    fn source_bytes(&self) -> usize {
        self.rows * self.tensor.row_bytes()
    }

    fn run(self, source: &ModelSource, bytes: &mut Vec<u8>, floats: &mut Vec<f32>) -> Result<(), LoadError> {
        bytes.resize(self.source_bytes(), 0);
        source.read_rows(self.tensor, self.first..self.first + self.rows, bytes)?;
        let shape = |problem| PlacesError::Shape { role: self.tensor.role, problem };
        match self.target {
            Target::Panels { layout, bytes: into } => {
                pack(&layout, self.tensor.ty, bytes, self.first, into).map_err(shape)?;
            }
            Target::Floats(into) => {
                floats.resize(self.rows * self.tensor.columns, 0.0);
                dequantize(self.tensor.ty, bytes, floats).map_err(shape)?;
                for (to, from) in into.chunks_exact_mut(size_of::<f32>()).zip(&*floats) {
                    to.copy_from_slice(&from.to_le_bytes());
                }
            }
        }
        Ok(())
    }
}

/// A job before the arena is cut: its bytes are `[start, start + len)`.
struct Piece<'a> {
    start: usize,
    len: usize,
    tensor: &'a TensorInfo,
    first: usize,
    rows: usize,
    layout: Option<MatrixLayout>,
}

/// Cuts the arena into the pieces that each job writes, in the order of the arena.
fn jobs<'a>(
    source: &'a ModelSource,
    places: &Places,
    arena: &'a mut [u8],
) -> Result<Vec<Job<'a>>, LoadError> {
    let (mut rest, mut at) = (arena, 0);
    let mut jobs = Vec::new();
    for Piece { start, len, tensor, first, rows, layout } in pieces(source, places)? {
        let (piece, after) = std::mem::take(&mut rest)
            .split_at_mut_checked(start - at + len)
            .ok_or(PlacesError::Overflow(tensor.role))?;
        let bytes = &mut piece[start - at..];
        (rest, at) = (after, start + len);
        let target = match layout {
            Some(layout) => Target::Panels { layout, bytes },
            None => Target::Floats(bytes),
        };
        jobs.push(Job { tensor, first, rows, target });
    }
    Ok(jobs)
}

fn pieces<'a>(source: &'a ModelSource, places: &Places) -> Result<Vec<Piece<'a>>, PlacesError> {
    let mut pieces = Vec::new();
    let tensor = |role: TensorRole| source.tensor(role).ok_or(PlacesError::Missing(role));
    for matrix in places.matrices() {
        let tensor = tensor(matrix.role)?;
        let layout = matrix.layout;
        let step = (CHUNK / tensor.row_bytes().max(1)).max(1).next_multiple_of(PANEL_ROWS);
        for first in (0..tensor.rows).step_by(step) {
            let rows = step.min(tensor.rows - first);
            pieces.push(Piece {
                start: matrix.at + first / PANEL_ROWS * layout.panel_bytes(),
                len: rows.div_ceil(PANEL_ROWS) * layout.panel_bytes(),
                tensor,
                first,
                rows,
                layout: Some(layout),
            });
        }
    }
    for vector in places.vectors() {
        let tensor = tensor(vector.role)?;
        let len = vector.len * size_of::<f32>();
        pieces.push(Piece { start: vector.at, len, tensor, first: 0, rows: 1, layout: None });
    }
    pieces.sort_by_key(|piece| piece.start);
    Ok(pieces)
}
