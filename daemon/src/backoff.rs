//! When to try again.

use std::time::{Duration, Instant};

/// Restart policy of one child: the first tries of a minute come at once, later ones wait longer and longer. One that worked is
/// forgiven.
#[derive(Debug)]
pub struct Backoff {
    free: usize,
    longest: Duration,
    /// Starts within the last [`WINDOW`], oldest first.
    starts: Vec<Instant>,
    delay: Duration,
}

const WINDOW: Duration = Duration::from_mins(1);
const FIRST_DELAY: Duration = Duration::from_millis(200);

impl Backoff {
    /// `free` restarts per minute without waiting; beyond that, waits that double up to `longest`.
    pub fn new(free: usize, longest: Duration) -> Self {
        Self { free, longest, starts: Vec::new(), delay: FIRST_DELAY }
    }

    /// The child did what it is there for: its end is not the next start's to wait for.
    pub fn forgive(&mut self) {
        self.starts.clear();
    }

    /// How long to wait before the start that happens next, at `now`.
    pub fn next(&mut self, now: Instant) -> Duration {
        self.starts.retain(|at| now.duration_since(*at) < WINDOW);
        self.starts.push(now);
        if self.starts.len() <= self.free {
            self.delay = FIRST_DELAY;
            return Duration::ZERO;
        }
        let delay = self.delay;
        self.delay = (self.delay * 2).min(self.longest);
        delay
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_restarts_are_free_and_later_ones_wait_longer_up_to_a_bound() {
        let mut backoff = Backoff::new(3, Duration::from_secs(1));
        let start = Instant::now();
        let delays: Vec<_> = (0..7).map(|_| backoff.next(start).as_millis()).collect();
        assert_eq!(delays, [0, 0, 0, 200, 400, 800, 1000]);
        assert_eq!(backoff.next(start + Duration::from_secs(61)), Duration::ZERO, "a quiet minute forgives");
    }

    #[test]
    fn a_child_that_worked_is_followed_at_once_however_many_died_before_it() {
        let mut backoff = Backoff::new(3, Duration::from_secs(1));
        let start = Instant::now();
        for _ in 0..20 {
            assert_eq!(backoff.next(start), Duration::ZERO);
            backoff.forgive();
        }
        let delays: Vec<_> = (0..4).map(|_| backoff.next(start).as_millis()).collect();
        assert_eq!(delays, [0, 0, 0, 200], "one that did not work is counted again");
    }
}
