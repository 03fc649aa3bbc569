//! Order on the device.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaEvent, CudaStream};

use super::device::Device;
use super::error::{CudaError, during};

/// A queue of work: what is put into it runs in order.
#[derive(Clone)]
pub struct Stream {
    device: Device,
    stream: Arc<CudaStream>,
}

impl Stream {
    pub(super) fn new(device: Device, stream: Arc<CudaStream>) -> Self {
        Self { device, stream }
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Waits until all work in it is done.
    ///
    /// # Errors
    /// The device failed, now or at earlier work.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.stream.synchronize().map_err(during("waiting for the GPU"))
    }

    /// Marks the place after all work that is in it now.
    ///
    /// # Errors
    /// The device failed.
    pub fn record(&self) -> Result<Event, CudaError> {
        let event = Event::new(&self.device)?;
        event.record(self)?;
        Ok(event)
    }

    /// Work put in from now on starts after `event`.
    ///
    /// # Errors
    /// The device failed.
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        self.stream.wait(&event.0).map_err(during("ordering streams"))
    }

    pub(super) fn inner(&self) -> &Arc<CudaStream> {
        &self.stream
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("device", self.device.info()).finish_non_exhaustive()
    }
}

/// A place in a stream.
#[derive(Debug)]
pub struct Event(CudaEvent);

impl Event {
    /// An event that is nowhere yet, and counts as passed.
    ///
    /// # Errors
    /// The device failed.
    pub fn new(device: &Device) -> Result<Self, CudaError> {
        Self::with(device, CUevent_flags::CU_EVENT_DEFAULT)
    }

    /// One whose waiters sleep: a wait costs no CPU, and ends some ten microseconds later.
    ///
    /// # Errors
    /// The device failed.
    pub fn to_sleep_on(device: &Device) -> Result<Self, CudaError> {
        Self::with(device, CUevent_flags::CU_EVENT_BLOCKING_SYNC)
    }

    fn with(device: &Device, flags: CUevent_flags) -> Result<Self, CudaError> {
        let event = device.context().new_event(Some(flags));
        Ok(Self(event.map_err(during("making an event"))?))
    }

    /// Moves it to the place after all work that is in `stream` now.
    ///
    /// # Errors
    /// The device failed.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        self.0.record(stream.inner()).map_err(during("recording an event"))
    }

    /// Waits until the device has passed it.
    ///
    /// # Errors
    /// The device failed.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.0.synchronize().map_err(during("waiting for an event"))
    }

    /// Microseconds from this event to `end`; waits for both.
    ///
    /// # Errors
    /// The device failed, or one of them was never recorded.
    pub fn micros_until(&self, end: &Self) -> Result<f64, CudaError> {
        let ms = self.0.elapsed_ms(&end.0).map_err(during("timing"))?;
        Ok(f64::from(ms) * 1e3)
    }
}
