//! A model: its engine's thread, its worker, its template process.
//!
//! **Owns** the thread on which worker start, scheduler and step loop live one after the other. **Never** shares them: what
//! others may know comes through two watched values.

use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use fail::fail_point;
use pagedd_config::{Model as Settings, Policy};
use pagedd_core::{Blocks, ModelId, RequestId, Tokens};
use pagedd_engine::{
    Engine, EngineConfig, EngineHandle, EngineStats, Inbox, Journal, Observer, StepRecord, Worker as _, inbox,
};
use pagedd_host::fdstore::FdStore;
use pagedd_host::hierarchy::CgroupError;
use pagedd_host::shared::SharedMemory;
use pagedd_kv::Ledger;
use pagedd_sched::{AdmitError, PolicyKind, Scheduler, SchedulerConfig, Tuning};
use pagedd_wire::worker::{Device, MOST_DRAFTS, MOST_IN_FLIGHT, ModelInfo};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, watch};
use tracing::{error, info, warn};

use crate::blocks::{Seed, Shelf};
use crate::child::Reins;
use crate::hub::Ticket;
use crate::recorder::Told;
use crate::settings;
use crate::template::{TemplateHandle, TemplateSpec};
use crate::walls::{Walls, WorkerCgroup};
use crate::watchdog::{Pulse, Watchdog};
use crate::worker::{Environment, ModelState, WorkerProcess, WorkerSpec};

/// A journal that takes nothing for so long hangs. A slow disk is no reason to start the daemon anew on it.
const JOURNAL_BEHIND: Duration = Duration::from_mins(10);
/// An arena is filled from disk at so many bytes a second at least.
const SLOWEST_FILL: u64 = 16 << 20;

/// Commands that may wait for an engine: a step's worth of submissions and cancels.
pub const INBOX: usize = 4096;

/// A model as everyone but its engine sees it.
pub struct Model {
    /// Its position in the configuration.
    pub id: ModelId,
    /// Its name.
    pub name: String,
    /// Its file or directory.
    pub path: PathBuf,
    /// Its settings at the daemon's start.
    pub config: Settings,
    /// Those of them that may change meanwhile, as they are now.
    pub live: watch::Sender<Live>,
    /// Unix seconds of the daemon's start.
    pub since: u64,
    /// The way into its engine.
    pub engine: EngineHandle<Box<Ticket>>,
    /// How it stands.
    pub state: watch::Receiver<ModelState>,
    /// Its numbers.
    pub stats: watch::Receiver<EngineStats>,
    /// Forks its gateways.
    pub template: TemplateHandle,
    /// Of its worker.
    pub reins: Arc<Reins>,
    /// The cgroup of its workers, where they have one.
    pub cell: Option<Arc<WorkerCgroup>>,
    /// What a copy of its KV blocks is made from, once its engine runs.
    pub shelf: Arc<OnceLock<Shelf>>,
    /// Zero of its engine's clock.
    start: Instant,
}

/// What of a model's settings takes effect while it runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Live {
    /// Most output tokens where a chat request names none.
    pub default_max_tokens: Option<u32>,
    /// What its engine goes by.
    pub tuning: Tuning,
}

impl Live {
    /// Of these settings.
    pub fn of(config: &Settings) -> Self {
        Self {
            default_max_tokens: config.default_max_tokens.map(|tokens| tokens.0),
            tuning: Tuning {
                max_queued_requests: config.max_queued_requests,
                itl_target_us: config.itl_target.map(|target| target.as_micros() as u64),
                prompt_lookup: config.prompt_lookup,
            },
        }
    }
}

/// A model whose worker loads, and whose engine waits for what the databases say.
pub struct Started {
    /// The model.
    pub model: Arc<Model>,
    /// Its engine's.
    pub thread: thread::JoinHandle<()>,
    /// Takes what the engine needs; it ends where nothing comes.
    pub go: SyncSender<Go>,
}

/// What an engine needs beside its worker.
pub struct Go {
    /// Keys the prefix hash; of this installation.
    pub cache_key: [u8; 32],
    /// Where it makes things durable.
    pub recorder: mpsc::Sender<Told>,
    /// What its KV arena begins with.
    pub seed: Seed,
}

/// What all models share.
pub struct Surroundings {
    /// Directory of `pagedd-worker` and `pagedd-gateway`.
    pub programs: PathBuf,
    /// Arenas of an earlier daemon.
    pub store: Arc<FdStore>,
    /// Environment of children.
    pub env: Environment,
    /// Expects signs of every engine's thread.
    pub watchdog: Arc<Watchdog>,
    /// Their cgroups.
    pub walls: Arc<Walls>,
}

/// Starts a model's thread. It loads at once.
pub fn start(id: ModelId, config: &Settings, around: &Surroundings) -> io::Result<Started> {
    let name = config.name.to_string();
    let (engine, commands) = inbox(INBOX);
    let (state_sender, state) = watch::channel(ModelState::Loading { permille: 0 });
    let (stats_sender, stats) = watch::channel(EngineStats::default());
    let template = TemplateHandle::start(TemplateSpec {
        model: name.clone(),
        program: around.programs.join("pagedd-gateway"),
        path: config.path.display().to_string(),
        env: around.env.clone(),
        walls: around.walls.clone(),
    })?;
    let start = Instant::now();
    let worker = worker(config, around, state_sender).map_err(io::Error::other)?;
    let pulse = worker.pulse();
    let model = Arc::new(Model {
        id,
        name: name.clone(),
        path: config.path.clone(),
        config: config.clone(),
        live: watch::Sender::new(Live::of(config)),
        since: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs(),
        engine,
        state,
        stats,
        template,
        reins: worker.reins(),
        cell: worker.cell(),
        shelf: Arc::default(),
        start,
    });
    let (go, waiting) = sync_channel(1);
    let (config, shelf) = (config.clone(), model.shelf.clone());
    let thread = thread::Builder::new().name(format!("engine-{name}")).spawn(move || {
        let observer = StatsObserver { stats: stats_sender, pulse };
        run(worker, &config, &waiting, &shelf, commands, observer, start);
    })?;
    Ok(Started { model, thread, go })
}

/// A model's worker, which has not started.
///
/// # Errors
/// It has no cgroup, and the configuration requires one.
pub fn worker(
    config: &Settings,
    around: &Surroundings,
    state: watch::Sender<ModelState>,
) -> Result<WorkerProcess, CgroupError> {
    let spec = WorkerSpec {
        model: config.name.to_string(),
        program: around.programs.join("pagedd-worker"),
        hello: settings::hello(config),
        env: around.env.iter().cloned().chain(settings::device_env(config.device)).collect(),
        cell: around.walls.workers(config.name.as_str())?,
    };
    let pulse = around.watchdog.pulse(format!("engine-{}", spec.model));
    Ok(WorkerProcess::new(spec, around.store.clone(), state, pulse))
}

/// What an engine needs of a worker that is up.
pub struct Loaded {
    /// For its pool.
    pub scheduler: Scheduler,
    /// The ledger of its KV arena, and what copies are made from, where there is memory for them.
    pub ledger: Option<(Ledger<SharedMemory>, Shelf)>,
}

/// Prepares an engine for a worker that loaded `info`, on an arena that begins with `seed`.
pub fn load(
    worker: &mut WorkerProcess,
    config: &Settings,
    info: &ModelInfo,
    cache_key: [u8; 32],
    seed: &Seed,
) -> Loaded {
    let scheduler = Scheduler::new(scheduler_config(config, info, cache_key));
    let ledger = worker.ledger(info, cache_key, seed).inspect_err(|error| {
        warn!(model = config.name.as_str(), %error, "what is in the KV arena will not be known after a restart");
    });
    Loaded { scheduler, ledger: ledger.ok() }
}

/// The engine's thread.
fn run(
    mut worker: WorkerProcess,
    config: &Settings,
    go: &Receiver<Go>,
    shelf: &OnceLock<Shelf>,
    commands: Inbox<Box<Ticket>>,
    observer: StatsObserver,
    start: Instant,
) {
    let info = match worker.start() {
        Ok(info) => info,
        Err(exhausted) => {
            if worker.ends_as().is_some() {
                error!(model = config.name.as_str(), error = exhausted.reason, "model cannot be loaded");
            }
            return;
        }
    };
    if let Some(asked) = config.max_model_len.filter(|asked| asked.0 > info.max_model_len) {
        let (model, context) = (config.name.as_str(), info.max_model_len);
        warn!(
            model,
            max_model_len = asked.0,
            context,
            "max_model_len is above the model's own context, which is what holds"
        );
    }
    let pulse = worker.pulse();
    pulse.idle();
    // Where nothing comes, the daemon does not start.
    let Ok(Go { cache_key, recorder, seed }) = go.recv() else { return };
    let engine_config = engine_config(&worker);
    info!(
        model = config.name.as_str(),
        blocks = info.blocks,
        block_size = info.block_size,
        plans = engine_config.depth,
        "engine runs"
    );
    pulse.busy(Duration::from_secs(60 + u64::from(info.blocks) * info.block_bytes / SLOWEST_FILL));
    let Loaded { scheduler, ledger } = load(&mut worker, config, &info, cache_key, &seed);
    drop(seed);
    let journal = RecorderJournal { recorder, pulse };
    let mut engine = Engine::new(engine_config, commands, scheduler, worker, journal, observer, start);
    if let Some((ledger, copies)) = ledger {
        shelf.get_or_init(|| copies);
        engine = engine.with_ledger(Box::new(ledger));
    }
    match engine.run() {
        Ok(()) => info!(model = config.name.as_str(), "engine ended"),
        Err(exhausted) => {
            error!(model = config.name.as_str(), error = exhausted.reason, "engine ended without a worker");
        }
    }
}

/// How an engine goes on with a worker.
pub fn engine_config(worker: &WorkerProcess) -> EngineConfig {
    EngineConfig { depth: depth(worker.device()), ..EngineConfig::default() }
}

/// Plans that a worker has at a time. A GPU is given the next one before it is done, so that it never waits for the host. The CPU would gain
/// nothing, as planning takes the time of the same processors, and whoever comes would wait for one step more.
fn depth(device: Device) -> usize {
    fail_point!("engine-depth", |depth: Option<String>| {
        depth.and_then(|depth| depth.parse().ok()).unwrap_or(MOST_IN_FLIGHT)
    });
    match device {
        Device::Cpu => 1,
        Device::Cuda { .. } => MOST_IN_FLIGHT,
    }
}

fn scheduler_config(config: &Settings, info: &ModelInfo, cache_key: [u8; 32]) -> SchedulerConfig {
    let Tuning { max_queued_requests, itl_target_us, prompt_lookup } = Live::of(config).tuning;
    SchedulerConfig {
        block_size: Tokens(info.block_size),
        capacity: Blocks(info.blocks),
        max_num_seqs: config.max_num_seqs,
        max_num_batched_tokens: config.max_num_batched_tokens,
        max_model_len: Tokens(info.max_model_len),
        max_queued_requests,
        policy: match config.policy {
            Policy::Fcfs => PolicyKind::Fcfs,
        },
        cache_key,
        weight_digest: info.digest,
        prefix_cache: config.prefix_cache,
        cost: info.cost.into(),
        itl_target_us,
        prompt_lookup,
        max_drafts: MOST_DRAFTS,
    }
}

impl Model {
    /// How long ago the last step completed.
    pub fn last_step_age(&self, stats: &EngineStats) -> Option<Duration> {
        stats.last_step_us.map(|at| self.start.elapsed().saturating_sub(Duration::from_micros(at)))
    }
}

/// An engine's way into the journal.
struct RecorderJournal {
    recorder: mpsc::Sender<Told>,
    pulse: Pulse,
}

impl RecorderJournal {
    fn tell(&self, told: Told) {
        match self.recorder.try_send(told) {
            Err(TrySendError::Full(told)) => {
                self.pulse.within(JOURNAL_BEHIND, || drop(self.recorder.blocking_send(told)));
            }
            // The recorder ends only with the daemon.
            Ok(()) | Err(TrySendError::Closed(_)) => {}
        }
    }
}

impl Journal for RecorderJournal {
    type Ticket = Box<Ticket>;

    fn admitted(&mut self, request: RequestId, ticket: Box<Ticket>) {
        self.tell(Told::Admitted(request, ticket));
    }

    fn refused(&mut self, ticket: Box<Ticket>, error: AdmitError) {
        self.tell(Told::Refused(ticket, error));
    }

    fn commit(&mut self, record: StepRecord) {
        self.tell(Told::Step(record));
    }
}

struct StatsObserver {
    stats: watch::Sender<EngineStats>,
    pulse: Pulse,
}

impl Observer for StatsObserver {
    fn observe(&mut self, stats: EngineStats) {
        self.stats.send_replace(stats);
    }

    fn turned(&mut self) {
        self.pulse.turn();
    }

    fn rests(&mut self) {
        self.pulse.idle();
    }
}
