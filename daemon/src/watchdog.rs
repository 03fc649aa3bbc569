//! Proof that the daemon's threads go on, for the service manager's watchdog.
//!
//! **Owns** by when each of them is due to show itself. **Never** tells the manager that the daemon lives while one of them is late: the manager
//! then ends it, and the next one goes on with everything.
//!
//! An engine's thread shows itself at each turn of its loop, and about once a second while it waits for its worker: a step or a load may take as
//! long as it may. Nothing is expected of one that waits for its first request. Other waits that have a bound of their own are announced with it. The telling is done on the runtime's thread, and so
//! proves that one, too.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use pagedd_host::notify;
use tokio::time::MissedTickBehavior;
use tracing::{error, info, warn};

/// Longest pause between two signs of a thread that waits for something without a bound.
pub const TURN: Duration = Duration::from_secs(1);
/// Nobody is late earlier: an engine that waits turns once in [`TURN`].
const LEAST_PATIENCE: Duration = Duration::from_millis(1_500);
/// Where nobody watches.
const NO_PATIENCE: Duration = Duration::from_hours(1);
/// Of a thread that waits for what comes, which may be never.
const NEVER: u64 = u64::MAX;

/// All threads that are to show themselves.
#[derive(Debug)]
pub struct Watchdog {
    start: Instant,
    /// How long the manager waits for a sign; `None` where it does not care.
    interval: Option<Duration>,
    /// How long a thread may take for a turn.
    patience: Duration,
    due: Mutex<Vec<Weak<Due>>>,
}

#[derive(Debug)]
struct Due {
    name: String,
    start: Instant,
    patience: Duration,
    /// Milliseconds since `start`.
    by_ms: AtomicU64,
}

/// One thread's, or task's, way to show itself. It is not expected to any more once the last copy is gone.
#[derive(Clone, Debug)]
pub struct Pulse(Arc<Due>);

impl Pulse {
    /// It goes on.
    pub fn turn(&self) {
        self.due_within(self.0.patience);
    }

    /// Does something that may take up to `limit` without a sign.
    pub fn within<T>(&self, limit: Duration, work: impl FnOnce() -> T) -> T {
        self.busy(limit);
        let done = work();
        self.turn();
        done
    }

    /// No sign comes for up to `limit`.
    pub fn busy(&self, limit: Duration) {
        self.due_within(self.0.patience.saturating_add(limit));
    }

    /// It waits for what comes.
    pub fn idle(&self) {
        self.0.by_ms.store(NEVER, Ordering::Relaxed);
    }

    fn due_within(&self, time: Duration) {
        let by = self.0.start.elapsed().saturating_add(time).as_millis();
        self.0.by_ms.store(u64::try_from(by).unwrap_or(NEVER), Ordering::Relaxed);
    }
}

impl Watchdog {
    /// For the manager that the environment names.
    pub fn from_env() -> Arc<Self> {
        Self::new(notify::watchdog_interval())
    }

    /// Nobody watches.
    pub fn unwatched() -> Arc<Self> {
        Self::new(None)
    }

    fn new(interval: Option<Duration>) -> Arc<Self> {
        // A thread that hangs is late after this at most, and the manager has heard of it no later: it ends the daemon within twice its interval.
        let patience = interval.map_or(NO_PATIENCE, |interval| (interval * 3 / 4).max(LEAST_PATIENCE));
        Arc::new(Self { start: Instant::now(), interval, patience, due: Mutex::default() })
    }

    /// Expects signs of one more thread.
    pub fn pulse(&self, name: impl Into<String>) -> Pulse {
        let by_ms = AtomicU64::new(NEVER);
        let due = Arc::new(Due { name: name.into(), start: self.start, patience: self.patience, by_ms });
        let pulse = Pulse(due);
        pulse.turn();
        // Nothing under the lock panics.
        let mut all = self.due.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(Arc::downgrade(&pulse.0));
        pulse
    }

    /// Names of those that are late.
    pub fn late(&self) -> Vec<String> {
        let now = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(NEVER);
        let mut all = self.due.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|due| due.strong_count() > 0);
        let live = all.iter().filter_map(Weak::upgrade);
        live.filter(|due| due.by_ms.load(Ordering::Relaxed) < now).map(|due| due.name.clone()).collect()
    }

    /// Tells the manager that the daemon lives, as long as nobody is late. Returns where nobody watches.
    pub async fn feed(self: Arc<Self>) {
        let Some(interval) = self.interval else { return };
        let mut tick = tokio::time::interval(interval / 3);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut was_late = false;
        loop {
            tick.tick().await;
            let late = self.late();
            if late.is_empty() {
                if was_late {
                    info!("every thread goes on again");
                }
                was_late = false;
                if let Err(error) = notify::watchdog() {
                    warn!(%error, "the service manager's watchdog is not reached");
                }
            } else if !was_late {
                was_late = true;
                error!(
                    threads = late.join(", "),
                    "it hangs: unless it goes on, the service manager ends the daemon"
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A watchdog in whose time all that is due within `limit` is late.
    fn late_after(watchdog: &Watchdog, limit: Duration) -> Vec<String> {
        let end = Instant::now() + limit;
        while Instant::now() < end {
            std::thread::yield_now();
        }
        watchdog.late()
    }

    #[test]
    fn a_thread_is_late_where_it_neither_turns_nor_has_announced_a_wait() {
        let mut watchdog =
            Arc::into_inner(Watchdog::new(Some(Duration::from_secs(4)))).expect("the only one");
        assert_eq!(watchdog.patience, Duration::from_secs(3));
        watchdog.patience = Duration::from_millis(20);
        let [hangs, waits, idles, ends] =
            ["hangs", "waits", "idles", "ends"].map(|name| watchdog.pulse(name));
        assert!(watchdog.late().is_empty(), "{:?}", watchdog.late());
        waits.busy(Duration::from_hours(1));
        idles.idle();
        drop(ends);
        assert_eq!(late_after(&watchdog, Duration::from_millis(60)), ["hangs"]);
        hangs.turn();
        assert!(watchdog.late().is_empty(), "{:?}", watchdog.late());
        assert_eq!(waits.within(Duration::from_hours(1), || watchdog.late()), Vec::<String>::new());
        idles.turn();
        let late = late_after(&watchdog, Duration::from_millis(60));
        assert_eq!(late, ["hangs", "waits", "idles"], "what was announced is over");
    }

    #[test]
    fn a_hung_thread_is_found_within_the_managers_interval_and_an_idle_one_never() {
        for seconds in [2, 4, 30, 600] {
            let interval = Duration::from_secs(seconds);
            let watchdog = Watchdog::new(Some(interval));
            assert!(
                (TURN + TURN / 4..interval).contains(&watchdog.patience),
                "{seconds}: {:?}",
                watchdog.patience
            );
        }
        assert_eq!(Watchdog::unwatched().patience, NO_PATIENCE);
    }
}
