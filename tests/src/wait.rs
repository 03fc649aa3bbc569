//! Waiting for a condition, with a deadline.
//!
//! **Owns** the polling interval. **Never** waits for a fixed time.

use std::thread;
use std::time::{Duration, Instant};

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(10);

/// Looks until `look` gives something; `None` after `limit`.
pub fn within<T>(limit: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let end = Instant::now() + limit;
    loop {
        if let Some(found) = look() {
            return Some(found);
        }
        if Instant::now() >= end {
            return None;
        }
        thread::sleep(PAUSE);
    }
}

/// Looks until `look` is true; panics with `what` after `limit`.
#[track_caller]
pub fn until(what: &str, limit: Duration, mut look: impl FnMut() -> bool) {
    assert!(within(limit, || look().then_some(())).is_some(), "{what}: not within {limit:?}");
}
