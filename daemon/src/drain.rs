//! The end of admission: by an operator who may take it back, and as the first part of the daemon's own end.
//!
//! **Owns** whether the daemon admits, and the order in which it ends. **Never** cancels anything: what has not ended in time is live in the
//! journal, and the next start goes on with it.
//!
//! ```text
//!              drain                  SIGTERM, SIGINT
//! Admitting ◀─────────▶ Draining ──────────────────────▶ Stopping
//!             undrain
//!
//! Stopping: nothing is admitted → wait for what runs, within `drain_timeout` → nothing is cancelled any more → gateways end every stream
//! by an event that says how to go on, and go → engines stop → the journal is synced → exit 0
//! ```
//!
//! A drain is not kept over a restart of the daemon: the next one admits.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use pagedd_control::{ControlError, Drain, DrainInfo, DrainState, ErrorCode};
use pagedd_engine::Command as EngineCommand;
use pagedd_host::notify;
use pagedd_wire::gateway::Parting;
use tokio::sync::{mpsc, oneshot};
use tracing::{error, info, warn};

use crate::child::Reins;
use crate::daemon::{Daemon, Event};
use crate::gateway::Going;
use crate::hub::{Load, Message};
use crate::model::Model;
use crate::recorder::{Told, unix};

/// Longest wait for each part to end: gateways, engines, the journal.
const END: Duration = Duration::from_secs(10);
/// Longest wait for the hub to say what is under way.
const LOOK: Duration = Duration::from_secs(1);
/// Between two looks at what is left.
const PAUSE: Duration = Duration::from_millis(50);

impl Daemon {
    /// Refuses new requests from here on. Asked again, only the deadline changes.
    pub async fn drain(&mut self, Drain { timeout_ms }: Drain) -> Result<DrainInfo, ControlError> {
        let now = unix();
        let since_unix = match self.drain {
            DrainState::Admitting => now,
            DrainState::Draining { since_unix, .. } => since_unix,
            DrainState::Stopping { .. } => return Err(stopping()),
        };
        let deadline_unix = timeout_ms.map(|ms| now.saturating_add(ms.div_ceil(1000)));
        self.drain = DrainState::Draining { since_unix, deadline_unix };
        self.admit(Going::Draining);
        Ok(self.drain_info().await)
    }

    /// Takes requests again.
    pub async fn undrain(&mut self) -> Result<DrainInfo, ControlError> {
        if let DrainState::Stopping { .. } = self.drain {
            return Err(stopping());
        }
        self.drain = DrainState::Admitting;
        self.admit(Going::Not);
        Ok(self.drain_info().await)
    }

    /// The daemon goes down, and what runs may go on for `timeout`.
    pub fn stopping(&mut self, timeout: Duration) {
        let since_unix = unix();
        self.drain = DrainState::Stopping { since_unix, deadline_unix: since_unix + timeout.as_secs() };
        self.admit(Going::Draining);
    }

    fn admit(&mut self, going: Going) {
        // Tenants that are made from here on, too.
        self.shop.going = going;
        self.tenants.values().for_each(|tenant| tenant.set_going(going));
    }

    /// Whether the daemon admits, and what is under way.
    pub async fn drain_info(&self) -> DrainInfo {
        let (mut running, mut waiting) = (0, 0);
        for model in &self.models {
            let stats = model.stats.borrow();
            running += stats.scheduler.running();
            waiting += stats.scheduler.waiting();
        }
        // A hub that is too busy to say has something to do.
        let busy = Load { requests: (running + waiting).max(1), ..Load::default() };
        let Load { requests, streams, too_large } = load(&self.shop.hub).await.unwrap_or(busy);
        DrainInfo { state: self.drain, requests, running, waiting, streams, too_large }
    }
}

/// What an order is answered that comes too late.
pub fn stopping() -> ControlError {
    ControlError::new(ErrorCode::Busy, "the daemon is going down")
}

/// What is under way; `None` where the hub is too busy to say.
pub async fn load(hub: &mpsc::Sender<Message>) -> Option<Load> {
    let (sender, answer) = oneshot::channel();
    let asked = async {
        hub.send(Message::Load(sender)).await.ok()?;
        answer.await.ok()
    };
    tokio::time::timeout(LOOK, asked).await.ok().flatten()
}

/// Returns once nothing is left. What was put into an engine's inbox at the last moment may not count yet: it was not accepted yet.
async fn emptied(hub: &mpsc::Sender<Message>) {
    while !load(hub).await.is_some_and(|load| load.is_empty()) {
        tokio::time::sleep(PAUSE).await;
    }
}

/// What ends with the daemon.
pub struct Ending<'a> {
    /// The daemon's task.
    pub events: &'a mpsc::Sender<Event>,
    /// Delivery.
    pub hub: &'a mpsc::Sender<Message>,
    /// The journal's thread.
    pub recorder: &'a mpsc::Sender<Told>,
    /// Every model.
    pub models: &'a [Arc<Model>],
    /// Their engines.
    pub threads: Vec<JoinHandle<()>>,
    /// What clients are told.
    pub parting: Parting,
}

impl Ending<'_> {
    /// Drains for up to `timeout`, or until `hurry` returns, then ends gateways, engines and workers, each within a bound.
    pub async fn run(self, timeout: Duration, hurry: impl Future<Output = ()>) {
        if let Err(error) = notify::stopping().and_then(|()| notify::extend_timeout(timeout + LOOK + 8 * END))
        {
            warn!(%error, "the supervisor does not know that this is the end, or how long it takes");
        }
        tell(self.events, Event::Stopping(timeout)).await;
        tokio::select! {
            () = emptied(self.hub) => {}
            () = tokio::time::sleep(timeout) => {}
            () = hurry => info!("not waiting any longer"),
        }
        let left = load(self.hub).await.unwrap_or_default();
        if !left.is_empty() {
            let Load { requests, streams, .. } = left;
            warn!(
                requests,
                streams, "not ended in time: the next start goes on with them, and their streams say so"
            );
        }
        // Before the first gateway goes: its requests are not to count as left by their clients.
        if tokio::time::timeout(END, self.hub.send(Message::Hold)).await.is_err() {
            warn!("delivery takes too long");
        }
        let recorder = self.recorder;
        self.parts().await;
        let (synced, answer) = oneshot::channel();
        tell_recorder(recorder, Told::Sync(synced), answer).await;
    }

    /// Ends gateways, then engines with their workers.
    async fn parts(self) {
        let (sender, done) = oneshot::channel();
        tell(self.events, Event::Shutdown(self.parting, sender)).await;
        if tokio::time::timeout(END, done).await.is_err() {
            warn!("gateways did not end in time");
        }
        for model in self.models {
            drop(model.engine.send(EngineCommand::Stop));
        }
        let templates: Vec<_> = self.models.iter().map(|model| model.template.reins.clone()).collect();
        let workers: Vec<_> = self.models.iter().map(|model| model.reins.clone()).collect();
        let threads = self.threads;
        let mut joined = tokio::task::spawn_blocking(move || {
            for thread in threads {
                if thread.join().is_err() {
                    error!("an engine's thread panicked");
                }
            }
        });
        end_all(templates).await;
        if tokio::time::timeout(END, &mut joined).await.is_err() {
            // What hangs or is stopped does not see that its socket is gone.
            warn!("engines did not end in time; their workers are killed");
            end_all(workers).await;
            if tokio::time::timeout(END, joined).await.is_err() {
                warn!("engines did not end without their workers");
            }
        }
    }
}

/// Ends processes for good; returns once they are gone, within a bound.
async fn end_all(reins: Vec<Arc<Reins>>) {
    // It ends: it panics nowhere.
    drop(tokio::task::spawn_blocking(move || reins.iter().for_each(|reins| reins.end())).await);
}

/// Waits until the journal is on disk, within a bound: what is lost otherwise is a second at most, and that only with the power.
async fn tell_recorder(recorder: &mpsc::Sender<Told>, told: Told, answer: oneshot::Receiver<()>) {
    let synced = async {
        recorder.send(told).await.ok()?;
        answer.await.ok()
    };
    if !matches!(tokio::time::timeout(END, synced).await, Ok(Some(()))) {
        warn!("the journal was not synced in time");
    }
}

/// Tells the daemon's task, unless too many orders wait before it for too long.
async fn tell(events: &mpsc::Sender<Event>, event: Event) {
    if tokio::time::timeout(END, events.send(event)).await.is_err() {
        warn!("admin commands take too long");
    }
}
