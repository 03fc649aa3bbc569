//! Launches recorded once and replayed together.
#![allow(unsafe_code)]

use std::fmt;
use std::marker::PhantomData;

use cudarc::driver::CudaGraph;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};

use super::error::{CudaError, during};
use super::stream::Stream;

/// What a closure queued, to be replayed.
pub(super) struct Recorded(CudaGraph);

// SAFETY: a graph belongs to no thread; `&` and `&mut` of its owner say who uses it.
unsafe impl Send for Recorded {}

impl Recorded {
    /// Records what `work` queues on `stream`; none of it runs yet. Whatever `work` needs must be allocated before.
    ///
    /// # Errors
    /// `work` failed, or did what cannot be recorded: allocated, waited, or copied pageable memory.
    pub(super) fn capture(
        stream: &Stream,
        work: impl FnOnce(&Stream) -> Result<(), CudaError>,
    ) -> Result<Self, CudaError> {
        let raw = stream.inner();
        raw.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
            .map_err(during("beginning a graph"))?;
        let done = work(stream);
        // Ends the capture also where the work failed: the stream is of use again.
        let graph = raw.end_capture(CUgraphInstantiate_flags(0));
        done?;
        match graph.map_err(during("ending a graph"))? {
            Some(graph) => Ok(Self(graph)),
            None => {
                Err(CudaError::Device { doing: "ending a graph", code: "nothing was recorded".to_owned() })
            }
        }
    }

    /// Queues all of it on the stream that it was recorded on.
    ///
    /// # Safety
    /// All memory of the recorded launches is still theirs, and what was proven of its contents when they were recorded holds now.
    ///
    /// # Errors
    /// The device failed.
    pub(super) unsafe fn replay(&self) -> Result<(), CudaError> {
        self.0.launch().map_err(during("replaying a graph"))
    }
}

impl fmt::Debug for Recorded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorded").finish_non_exhaustive()
    }
}

/// What a closure queued, to be replayed. It borrows the buffers of its launches: none can go or be written by the host before it.
pub struct Graph<'a> {
    recorded: Recorded,
    buffers: PhantomData<&'a mut ()>,
}

impl<'a> Graph<'a> {
    /// Records what `work` queues on `stream`; none of it runs yet. Whatever `work` needs must be allocated before.
    ///
    /// # Errors
    /// `work` failed, or did what cannot be recorded: allocated, waited, or copied pageable memory.
    pub fn capture(
        stream: &Stream,
        work: impl FnOnce(&Stream) -> Result<(), CudaError> + 'a,
    ) -> Result<Self, CudaError> {
        Ok(Self { recorded: Recorded::capture(stream, work)?, buffers: PhantomData })
    }

    /// Queues all of it on the stream that it was recorded on.
    ///
    /// # Errors
    /// The device failed.
    pub fn replay(&self) -> Result<(), CudaError> {
        // SAFETY: the buffers are borrowed mutably as long as this lives.
        unsafe { self.recorded.replay() }
    }
}

impl fmt::Debug for Graph<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph").finish_non_exhaustive()
    }
}
