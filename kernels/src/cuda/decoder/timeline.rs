//! When steps begin and end on the device.
//!
//! **Owns** a pair of events for each of the last steps. **Never** waits: whoever asks has waited for the step.

use crate::cuda::device::Device;
use crate::cuda::error::CudaError;
use crate::cuda::stream::{Event, Stream};

/// Steps that are remembered: two may be on their way when the end of the one before them is asked for.
const KEPT: u64 = 4;

/// A step's first and last kernel.
#[derive(Debug)]
struct Mark {
    step: u64,
    start: Event,
    end: Event,
    started: bool,
    ended: bool,
}

/// The last steps.
#[derive(Debug)]
pub(super) struct Timeline {
    marks: [Mark; KEPT as usize],
    step: u64,
}

impl Timeline {
    pub(super) fn new(device: &Device) -> Result<Self, CudaError> {
        let mark = || {
            let (start, end) = (Event::new(device)?, Event::new(device)?);
            Ok::<_, CudaError>(Mark { step: 0, start, end, started: false, ended: false })
        };
        Ok(Self { marks: [mark()?, mark()?, mark()?, mark()?], step: 0 })
    }

    /// The step that was begun last.
    pub(super) fn step(&self) -> u64 {
        self.step
    }

    /// Another step comes.
    pub(super) fn begin(&mut self) {
        self.step += 1;
        let step = self.step;
        let mark = self.mark();
        (mark.step, mark.started, mark.ended) = (step, false, false);
    }

    fn mark(&mut self) -> &mut Mark {
        &mut self.marks[(self.step % KEPT) as usize]
    }

    /// The step's first kernel is queued next.
    pub(super) fn start(&mut self, stream: &Stream) -> Result<(), CudaError> {
        let mark = self.mark();
        mark.started = true;
        mark.start.record(stream)
    }

    /// The step's last kernel so far has been queued.
    pub(super) fn end(&mut self, stream: &Stream) -> Result<(), CudaError> {
        let mark = self.mark();
        mark.ended = true;
        mark.end.record(stream)
    }

    /// Microseconds between the last kernel of the step before `step` and its own first one; `None` where either had none, or is forgotten.
    pub(super) fn idle_us(&self, step: u64) -> Result<Option<f64>, CudaError> {
        let kept = |step: u64| {
            let mark = &self.marks[(step % KEPT) as usize];
            (mark.step == step).then_some(mark)
        };
        let before = step.checked_sub(1).and_then(kept).filter(|mark| mark.started && mark.ended);
        match (before, kept(step).filter(|mark| mark.started)) {
            (Some(before), Some(this)) => Ok(Some(before.end.micros_until(&this.start)?.max(0.0))),
            _ => Ok(None),
        }
    }
}
