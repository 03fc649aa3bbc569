//! How long a daemon waits before it starts, where those before it died early.
//!
//! systemd starts the next one at once, and goes on with that for ever: it is told to, since where it gives up it closes all that it keeps for the
//! daemon. **Owns** the note that daemons leave to those after them, beside their other fds. **Never** holds up one that follows a good run, or
//! an orderly end.

use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

use pagedd_host::fdstore::FdStore;
use pagedd_host::notify;
use pagedd_host::shared::SharedMemory;
use tracing::{info, warn};

/// What the manager holds the note under.
const NOTE: &str = "starts";
/// A daemon that ran this long has earned an immediate restart.
const GOOD_RUN: Duration = Duration::from_secs(10);
/// Before the second restart in a row; each further one waits twice as long.
const FIRST: Duration = Duration::from_millis(100);
/// Longest wait.
const LONGEST: Duration = Duration::from_secs(10);

/// What a daemon tells the next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Note {
    /// When it began, as the system's monotonic clock has it.
    started: Duration,
    /// How long the next waits if that was not long ago.
    wait: Duration,
}

impl Note {
    const BYTES: usize = 16;

    fn read(bytes: &[u8]) -> Option<Self> {
        let (started, wait) = bytes.split_at_checked(8)?;
        let ms = |bytes: &[u8]| Some(Duration::from_millis(u64::from_le_bytes(bytes.try_into().ok()?)));
        Some(Self { started: ms(started)?, wait: ms(wait)? })
    }

    fn write(self, bytes: &mut [u8]) {
        let ms = |time: Duration| (time.as_millis() as u64).to_le_bytes();
        for (to, from) in bytes.iter_mut().zip(ms(self.started).into_iter().chain(ms(self.wait))) {
            *to = from;
        }
    }
}

/// How long to wait now, and what to tell the next.
fn next(before: Option<Note>, now: Duration) -> (Duration, Note) {
    let early = before.filter(|before| now.saturating_sub(before.started) < GOOD_RUN);
    let wait = early.map_or(Duration::ZERO, |before| before.wait);
    (wait, Note { started: now + wait, wait: (wait * 2).clamp(FIRST, LONGEST) })
}

/// Waits as long as it should after what ended before.
pub fn take(store: &FdStore) {
    let before = store.take(NOTE).and_then(|fd| SharedMemory::map(fd).ok());
    let (wait, note) = next(before.and_then(|memory| Note::read(memory.as_ref())), notify::now());
    let stored = SharedMemory::create("pagedd-starts", Note::BYTES).map_err(|e| e.to_string()).and_then(
        |mut memory| {
            note.write(memory.as_mut());
            store.store(NOTE, memory.as_fd()).map_err(|e| e.to_string())
        },
    );
    if let Err(error) = stored {
        warn!(error, "the next daemon will not know when this one began");
    }
    if wait > Duration::ZERO {
        info!(?wait, "daemons end soon after their start");
        // It is only shown.
        drop(notify::status(&format!("waiting {wait:?} after daemons that ended soon after their start")));
        thread::sleep(wait);
    }
}

/// The daemon ends as it was told to: the next need not wait.
pub fn forget(store: &FdStore) {
    if let Err(error) = store.remove(NOTE) {
        warn!(%error, "the next daemon may wait before it starts");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_follows_daemons_that_died_early_waits_longer_each_time_up_to_a_bound() {
        let mut now = Duration::from_hours(1);
        let mut note = None;
        let mut start = |ran: Duration| {
            now += ran;
            let (wait, next) = next(note, now);
            note = Some(next);
            now += wait;
            wait.as_millis()
        };
        let early = Duration::from_secs(9);
        let waits: Vec<u128> = (0..10).map(|_| start(early)).collect();
        assert_eq!(waits, [0, 100, 200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]);
        assert_eq!([start(GOOD_RUN), start(early)], [0, 100], "a good run is forgiven its end");
    }

    #[test]
    fn a_note_reads_back_and_one_that_is_none_says_nothing() {
        let note = Note { started: Duration::from_millis(7), wait: Duration::from_millis(1 << 40) };
        let mut bytes = [0; Note::BYTES];
        note.write(&mut bytes);
        assert_eq!(Note::read(&bytes), Some(note));
        assert_eq!((Note::read(&bytes[1..]), Note::read(&[])), (None, None));
    }
}
