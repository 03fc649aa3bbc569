//! A GPU that is opened before anyone says what to load onto it.
//!
//! **Owns** threads that open it and load its library meanwhile: a third of a second, in which the worker before this one still ends. **Never**
//! touches an arena.

use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use pagedd_kernels::cuda::{CudaError, Device, products_version};

/// What is opened.
struct Opening {
    ordinal: u32,
    device: JoinHandle<Result<Device, CudaError>>,
}

static OPENING: Mutex<Option<Opening>> = Mutex::new(None);

/// Begins to open GPU `ordinal`. That it fails is said by `open`.
pub fn open_ahead(ordinal: u32) {
    let device = thread::Builder::new().name("gpu".to_owned()).spawn(move || Device::open(ordinal as usize));
    // Where there is no thread, both are done when they are needed.
    drop(thread::Builder::new().name("products".to_owned()).spawn(products_version));
    let opening = device.ok().map(|device| Opening { ordinal, device });
    *OPENING.lock().unwrap_or_else(PoisonError::into_inner) = opening;
}

/// GPU `ordinal`, opened ahead or now. What failed ahead is tried again: the worker before this one was still there.
///
/// # Errors
/// As [`Device::open`].
pub fn open(ordinal: u32) -> Result<Device, CudaError> {
    let ahead = OPENING.lock().unwrap_or_else(PoisonError::into_inner).take();
    let opened = ahead.filter(|ahead| ahead.ordinal == ordinal).and_then(|ahead| ahead.device.join().ok());
    match opened {
        Some(Ok(device)) => Ok(device),
        Some(Err(_)) | None => Device::open(ordinal as usize),
    }
}
