//! A real worker and a real engine, without anything before or behind them.
//!
//! **Owns** the engine's thread, and through it the worker: both end with it. **Never** decides what is sent.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail, ensure};
use pagedd_config::Model;
use pagedd_core::{Blocks, SamplingParams, TenantId, TokenId, Tokens};
use pagedd_engine::{Command, Engine, EngineHandle, Inbox, Submission, inbox};
use pagedd_sched::{NewRequest, ShareSpec};
use pagedd_wire::worker::ModelInfo;
use tokio::sync::watch;
use tracing::error;

use super::machine::{self, GpuWatch, Times};
use super::record::{Counted, Goal, Record, Round, Timed, Unobserved, id};
use crate::blocks::Seed;
use crate::model::{self, INBOX, Loaded, Surroundings};
use crate::worker::{ModelState, WorkerProcess};

/// Whose requests they are.
const TENANT: TenantId = TenantId(1);
/// Who sends what comes between.
const STRANGER: TenantId = TenantId(2);
/// Keys the prefix hash; there is nobody to keep it from.
const CACHE_KEY: [u8; 32] = [7; 32];
/// An engine has gone idle by then, and looked through its blocks.
const SETTLED: Duration = Duration::from_millis(50);

/// An engine that runs.
pub struct Rig {
    /// What the worker loaded.
    pub info: ModelInfo,
    /// Watches the GPU, where it runs on one.
    pub gpu: Option<GpuWatch>,
    engine: EngineHandle<()>,
    record: Arc<Record>,
    thread: Option<JoinHandle<()>>,
    /// The engine's thread, below /proc.
    task: Option<PathBuf>,
    worker: u32,
    /// Number of the next request.
    next: u64,
    /// Numbers of the last round's.
    sent: std::ops::Range<u64>,
    end: Instant,
    /// When its worker was started.
    began: Instant,
}

/// Processor time so far, of the engine's thread and the worker's threads, and the steps so far.
pub struct Moment {
    /// When.
    pub at: Instant,
    steps: usize,
    engine: Option<u64>,
    worker: Option<Times>,
    /// The worker's process, which its first thread has the number of.
    pid: u32,
}

/// Processor time of a step, in microseconds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Processor {
    /// Of the engine's thread.
    pub engine: Option<f64>,
    /// Of all threads of the worker: its own, and on a GPU that of the driver which waits for events.
    pub worker: Option<f64>,
    /// Of the worker's own thread, which runs plans.
    pub worker_thread: Option<f64>,
}

/// A request.
pub struct Asked {
    /// Its prompt.
    pub prompt: Vec<TokenId>,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Answers to it.
    pub choices: u32,
    /// Tokens of each answer.
    pub tokens: u32,
}

/// What the engine's thread says once its worker is up.
type Up = (ModelInfo, Option<PathBuf>);

impl Rig {
    /// Starts a worker and an engine; all that is done with them ends at `end`.
    ///
    /// # Errors
    /// The model cannot be loaded, or not in time.
    pub fn start(model: &Model, around: &Surroundings, end: Instant) -> anyhow::Result<Self> {
        let gpu = ordinal(&model.device.to_string()).and_then(GpuWatch::start);
        let (state_sender, state) = watch::channel(ModelState::Loading { permille: 0 });
        let worker = model::worker(model, around, state_sender)?;
        let (engine, commands) = inbox(INBOX);
        let record = Arc::new(Record::default());
        let (up, waiting) = sync_channel(1);
        let (settings, its_record) = (model.clone(), record.clone());
        let began = Instant::now();
        let thread = thread::Builder::new()
            .name("engine".to_owned())
            .spawn(move || run(worker, &settings, commands, its_record, &up))
            .context("the engine's thread")?;
        let (info, task) = match waiting.recv_timeout(left(end)) {
            Ok(up) => up.map_err(|reason| anyhow!(reason))?,
            Err(RecvTimeoutError::Timeout) => bail!("--limit: the model is not loaded in time"),
            Err(RecvTimeoutError::Disconnected) => bail!("the engine's thread ended"),
        };
        let pid = match &*state.borrow() {
            ModelState::Ready(ready) => ready.pid,
            ModelState::Loading { .. } | ModelState::Restarting { .. } | ModelState::Failed { .. } => {
                bail!("the worker died as soon as it was ready")
            }
        };
        let thread = Some(thread);
        let (worker, next, sent) = (pid, 1, 0..0);
        let rig = Self { info, gpu, engine, record, thread, task, worker, next, sent, end, began };
        rig.share(TENANT)?;
        rig.share(STRANGER)?;
        Ok(rig)
    }

    /// Gives a tenant the whole pool. Its sequences guess nothing: a step is one token of each.
    fn share(&self, tenant: TenantId) -> anyhow::Result<()> {
        let (answer, set) = sync_channel(1);
        self.send(Command::SetTenant {
            tenant,
            share: ShareSpec { floor: Blocks::ZERO, ceiling: Blocks(self.info.blocks) },
            prompt_lookup: Some(false),
            reply: Box::new(move |result| {
                // Whoever asked has given up.
                let _ = answer.send(result);
            }),
        })?;
        set.recv_timeout(left(self.end)).context("the engine does not answer")?.context("the pool")
    }

    /// Waits for room in the inbox.
    fn send(&self, command: Command<()>) -> anyhow::Result<()> {
        let mut waiting = command;
        while let Err((full, command)) = self.engine.send(waiting) {
            self.check(full)?;
            thread::sleep(Duration::from_millis(1));
            waiting = command;
        }
        Ok(())
    }

    /// Whether the engine lives and there is time left.
    fn check(&self, error: impl std::error::Error + Send + Sync + 'static) -> anyhow::Result<()> {
        ensure!(Instant::now() < self.end, "--limit: the row took longer");
        let ended = self.thread.as_ref().is_none_or(JoinHandle::is_finished);
        if ended { Err(error.into()) } else { Ok(()) }
    }

    /// Gives it this much time from now.
    pub fn extend(&mut self, limit: Duration) {
        self.end = Instant::now() + limit;
    }

    /// Sends requests, all at once, and returns when the first was sent.
    ///
    /// # Errors
    /// The engine has ended.
    pub fn begin(&mut self, asked: Vec<Asked>) -> anyhow::Result<Instant> {
        thread::sleep(SETTLED);
        self.sent = self.next..self.next + asked.len() as u64;
        self.next = self.sent.end;
        self.record.begin(self.sent.start, asked.len());
        let commands: Vec<_> =
            self.sent.clone().zip(asked).map(|(number, asked)| submit(number, TENANT, asked)).collect();
        let start = Instant::now();
        commands.into_iter().try_for_each(|command| self.send(command))?;
        Ok(start)
    }

    /// Sends a stranger's request while the round goes on. Its place in the round, and when it was sent.
    ///
    /// # Errors
    /// The engine has ended.
    pub fn join(&mut self, asked: Asked) -> anyhow::Result<(usize, Instant)> {
        let command = submit(self.next, STRANGER, asked);
        self.next += 1;
        self.sent.end = self.next;
        let place = self.record.round().join();
        let sent = Instant::now();
        self.send(command)?;
        Ok((place, sent))
    }

    /// Ends the requests of the round that have not.
    ///
    /// # Errors
    /// The engine has ended.
    pub fn cancel(&self) -> anyhow::Result<()> {
        self.sent.clone().try_for_each(|number| self.send(Command::Cancel(id(number))))
    }

    /// Waits for the goal.
    ///
    /// # Errors
    /// It is not reached in time; or a request was refused or failed, or a worker died on the way.
    pub fn wait(&self, goal: Goal) -> anyhow::Result<()> {
        let reached = self.record.wait(goal, left(self.end));
        let round = self.record.round();
        let Round { failed, lost, ended, .. } = *round;
        if let Some(error) = round.refused {
            return Err(anyhow!(error).context("a request was refused"));
        }
        ensure!(lost == 0, "the worker died {lost} time(s); the log above says why");
        ensure!(failed == 0, "{failed} request(s) failed; the log above says why");
        ensure!(reached, "--limit: the row took longer; {ended} of {} requests had ended", round.first.len());
        Ok(())
    }

    /// What the round came to.
    pub fn round(&self) -> std::sync::MutexGuard<'_, Round> {
        self.record.round()
    }

    /// From the start of the worker to the first token of all.
    pub fn to_first_token(&self) -> Option<Duration> {
        self.record.first_token.get().map(|first| first.duration_since(self.began))
    }

    /// Processor time and steps so far.
    pub fn moment(&self) -> Moment {
        let engine = self.task.as_deref().and_then(machine::thread_time);
        let worker = machine::process_times(self.worker);
        let steps = self.record.round().steps.len();
        Moment { at: Instant::now(), steps, engine, worker, pid: self.worker }
    }
}

impl Moment {
    /// Time of a step between this and a later one of the same round.
    pub fn until(&self, later: &Self) -> Processor {
        let steps = later.steps.saturating_sub(self.steps).max(1) as f64;
        let us = |nanoseconds: u64| nanoseconds as f64 / 1e3 / steps;
        let engine = later.engine.zip(self.engine).map(|(after, before)| after.saturating_sub(before));
        let worker = self.worker.as_ref().zip(later.worker.as_ref());
        Processor {
            engine: engine.map(us),
            worker: worker.map(|(before, after)| us(machine::taken(before, after))),
            worker_thread: worker.and_then(|(before, after)| {
                Some(us(after.get(&self.pid)?.saturating_sub(*before.get(&self.pid)?)))
            }),
        }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let stopped = (0..1_000).any(|_| {
            let sent = self.engine.send(Command::Stop).is_ok();
            if !sent {
                thread::sleep(Duration::from_millis(1));
            }
            sent
        });
        // Where it does not listen it ends with this process, and its worker with its socket.
        if let Some(thread) = self.thread.take().filter(|_| stopped) {
            drop(thread.join());
        }
    }
}

fn submit(number: u64, tenant: TenantId, asked: Asked) -> Command<()> {
    let Asked { prompt, sampling, choices, tokens } = asked;
    let (max_tokens, stop_ids) = (Tokens(tokens), Vec::new());
    let request = NewRequest { id: id(number), tenant, prompt, n: choices, max_tokens, stop_ids, sampling };
    Command::Submit(Box::new(Submission { request, ticket: () }))
}

fn left(end: Instant) -> Duration {
    end.saturating_duration_since(Instant::now())
}

/// Number of the GPU that a device names.
fn ordinal(device: &str) -> Option<u32> {
    device.strip_prefix("cuda:")?.parse().ok()
}

/// The engine's thread, as a daemon's.
fn run(
    mut worker: WorkerProcess,
    model: &Model,
    commands: Inbox<()>,
    record: Arc<Record>,
    up: &SyncSender<Result<Up, String>>,
) {
    let info = match worker.start() {
        Ok(info) => info,
        Err(exhausted) => return drop(up.send(Err(exhausted.reason))),
    };
    let Loaded { scheduler, ledger } = model::load(&mut worker, model, &info, CACHE_KEY, &Seed::Fresh(None));
    let cost = info.cost.into();
    drop(up.send(Ok((info, machine::this_thread()))));
    let config = model::engine_config(&worker);
    let (worker, journal) = (Timed::new(worker, record.clone(), cost), Counted(record));
    let mut engine = Engine::new(config, commands, scheduler, worker, journal, Unobserved, Instant::now());
    if let Some((ledger, _)) = ledger {
        engine = engine.with_ledger(Box::new(ledger));
    }
    if let Err(exhausted) = engine.run() {
        error!(error = exhausted.reason, "the engine ended without a worker");
    }
}
