//! How fast something goes on, measured where it has something to do.
//!
//! **Owns** the last intervals. **Never** counts time in which there was nothing: an idle hour says nothing of a queue's pace.

use std::collections::VecDeque;

/// Departures that are remembered.
const REMEMBERED: usize = 16;

/// Departures from where things wait, or run.
#[derive(Clone, Default, Debug)]
pub struct Pace {
    /// Times between departures while something was there, and what left at their ends.
    recent: VecDeque<(u64, u64)>,
    /// Since when the next departure is waited for.
    since: Option<u64>,
}

impl Pace {
    /// Something is there now.
    pub fn arrive(&mut self, now_us: u64) {
        self.since.get_or_insert(now_us);
    }

    /// So much has left; whether anything is there still.
    pub fn depart(&mut self, now_us: u64, amount: u64, more: bool) {
        if let Some(since) = self.since {
            if self.recent.len() == REMEMBERED {
                self.recent.pop_front();
            }
            self.recent.push_back((now_us.saturating_sub(since), amount));
        }
        self.since = more.then_some(now_us);
    }

    /// Nothing is there any more, and it has not gone its way.
    pub fn leave(&mut self, more: bool) {
        if !more {
            self.since = None;
        }
    }

    /// Time until so much more will have left, as far as that is known.
    pub fn wait(&self, now_us: u64, amount: u64) -> Option<u64> {
        let since = self.since?;
        let waited = now_us.saturating_sub(since);
        let (time, left) = self.recent.iter().fold((0, 0), |(t, a), (time, amount)| (t + time, a + amount));
        if left == 0 {
            // Nothing has left yet: it takes longer than it has taken.
            return (waited > 0).then_some(waited);
        }
        let whole = (time as f64 * amount as f64 / left as f64) as u64;
        // What takes longer than ever takes, as a rule, as long again.
        Some(if waited <= whole { whole - waited } else { waited })
    }
}
