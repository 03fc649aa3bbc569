//! From the command line to a running daemon, and what ends it.
//!
//! The order of a start: configuration → keeper (without systemd) → locks → cgroups → control.db, journal.db → tenants' walls → ports → models →
//! admin socket. What can fail for a reason the operator must mend comes first, and nothing is loaded before every port is bound. Only where the
//! databases are to be a checkpoint's, models come before them ([`crate::reload`]).

use std::collections::{BTreeMap, BTreeSet};
use std::io::IsTerminal;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{fmt, fs};

use anyhow::Context;
use clap::Parser;
use pagedd_config::{
    ComputeDtype, Config, ConfigError, Device, Fsync, KvDtype, LogFormat, LogLevel, Overrides, program_folder,
};
use pagedd_control::{DrainState, Supervisor};
use pagedd_core::{TenantId, said};
use pagedd_host::fdstore::FdStore;
use pagedd_host::identity::{Identities, Lender, Lent};
use pagedd_host::lock::{GpuLock, LockError, StateLock};
use pagedd_host::notify;
use pagedd_host::{exit, keeper};
use pagedd_journal::checkpoint::finish_restore;
use pagedd_journal::{ControlDb, DbError, JournalWriter, TenantRow};
use pagedd_log::Stderr;
use pagedd_wire::gateway::Parting;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{Notify, mpsc, watch};
use tracing::{error, info, warn};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::reload::Handle;

use crate::admin::AdminSocket;
use crate::bench;
use crate::checkpoint::Checkpoints;
use crate::cli::{Cli, Command};
use crate::daemon::{Daemon, Db, Facts, watch_model};
use crate::databases;
use crate::drain::Ending;
use crate::gateway::{GatewayLimits, Going};
use crate::hub::{self, Hub};
use crate::metrics::Exporter;
use crate::model::{Go, Model, Started, Surroundings};
use crate::ports;
use crate::quota::Accounts;
use crate::reconfigure::{self, Configuration, SetLevel};
use crate::recorder;
use crate::reload::{self, Reloaded};
use crate::respite;
use crate::retention::Retentions;
use crate::sandbox;
use crate::supervision::{self, Standing};
use crate::tenants::{Lack, Place, ShareAmounts, Tenant, TenantShop, Unserved, own_retention};
use crate::usage::{self, Collector};
use crate::walls::{NoWalls, TenantWall, Walls};
use crate::watchdog::Watchdog;

/// What `fsync: interval` means: the loss of power costs at most so much.
const SYNC_EVERY: Duration = Duration::from_secs(1);

/// A failed start.
pub struct Failure {
    /// As documented in `--help`.
    pub exit: u8,
    /// One line.
    pub message: String,
}

/// Exit code of a failure that a restart may mend.
const FAILED: u8 = 1;
/// Gateways of an earlier daemon, which have their user ids still, have ended by then.
const USERS_ENDED: Duration = Duration::from_secs(15);

impl Failure {
    fn new(exit: u8, message: impl fmt::Display) -> Self {
        Self { exit, message: format!("{message}") }
    }
}

impl From<anyhow::Error> for Failure {
    fn from(error: anyhow::Error) -> Self {
        Self::new(FAILED, said(error.as_ref()))
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Self {
        Self::new(exit::CONFIG, error)
    }
}

/// The program.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    if let Some(Command::Bench(options)) = &cli.command {
        return bench::main(options);
    }
    let config = match load(&cli) {
        Ok(config) => config,
        Err(error) => return fail(&error.into()),
    };
    if !notify::has_manager() {
        // Without systemd a keeper holds the fds and starts the daemon again; it is this same program.
        drop(start_log(&config));
        return match std::env::current_exe() {
            Ok(path) => {
                let (args, first_args) = reload::split(std::env::args_os().skip(1));
                keeper::run(keeper::Program { path, args, first_args })
            }
            Err(e) => fail(&Failure::new(exit::OS, format!("the program's own path is unknown: {e}"))),
        };
    }
    match run(config, cli) {
        Ok(End::Done) => ExitCode::SUCCESS,
        Ok(End::Again) => ExitCode::from(FAILED),
        Err(failure) => fail(&failure),
    }
}

fn fail(failure: &Failure) -> ExitCode {
    Stderr::of_process().say_error(&format!("pagedd: error: {}", failure.message));
    ExitCode::from(failure.exit)
}

/// What the file and the command line say.
fn load(cli: &Cli) -> Result<Config, ConfigError> {
    let default = Path::new(pagedd_config::DEFAULT_FILE);
    let file = cli.config.as_deref().or_else(|| default.exists().then_some(default));
    let mut config = Config::load_with(file, &Overrides { state_dir: cli.state_dir.clone() })?;
    config.require_models()?;
    if let Some(dtype) = cli.dtype {
        for model in &mut config.models {
            if dtype == ComputeDtype::F32 && model.device != Device::Cpu {
                let message =
                    format!("--dtype f32: model `{}` is on {}, which has no f32", model.name, model.device);
                return Err(ConfigError::Override { message });
            }
            model.dtype = dtype;
            if dtype == ComputeDtype::F32 {
                model.kv_dtype = KvDtype::F32;
            }
        }
    }
    Ok(config)
}

/// How a daemon that ran has ended.
enum End {
    /// For good.
    Done,
    /// So that the next one begins with a checkpoint.
    Again,
}

fn run(config: Config, cli: Cli) -> Result<End, Failure> {
    pagedd_host::memory::use_one_heap();
    let set_level = start_log(&config);
    #[cfg(feature = "failpoints")]
    let _points = crate::points::set_up();
    // A daemon that has lost one of its threads would serve some and hang others; the next one goes on with everything.
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string);
        error!(place, "panic: the daemon ends");
        std::process::abort();
    }));
    let start = Instant::now();
    let store = Arc::new(FdStore::from_env());
    make_state_dir(&config.state_dir)?;
    let lock = StateLock::acquire(&config.state_dir).map_err(|e| Failure::new(exit::STATE_DIR, e))?;
    let gpus = lock_gpus(&config)?;
    let state = |error: &dyn fmt::Display| Failure::new(exit::STATE_DIR, error);
    if let Some(before) = finish_restore(&config.state_dir).map_err(|e| state(&e))? {
        warn!(before = %before.display(), "a checkpoint is in place; what was there before is kept");
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(16)
        .thread_name("pagedd-io")
        .build()
        .context("runtime")?;
    // Before there is another process or thread: whatever is started from here on is in its place from the start.
    let walls = Walls::build(config.cgroups).map_err(|error| match error {
        NoWalls::Never(_) => Failure::new(exit::CONFIG, error),
        NoWalls::Now(_) => Failure::new(FAILED, error),
    })?;
    let walls = Arc::new(walls);
    let around = surroundings(&config, store.clone(), Watchdog::from_env(), walls.clone())?;
    let lifeline = keeper::lifeline();
    // The keeper waits by itself.
    if lifeline.is_none() {
        respite::take(&store);
    }
    let reloaded = match reload::wanted(&config.state_dir, cli.reload_checkpoint.as_deref())
        .map_err(|e| state(&e))?
    {
        Some(wanted) => runtime.block_on(reload::reload(&config, &around, &wanted)).map_err(|e| state(&e))?,
        None => Reloaded::default(),
    };
    let fsync = match config.fsync {
        Fsync::Interval => pagedd_journal::Fsync::Interval(SYNC_EVERY),
        Fsync::Every => pagedd_journal::Fsync::Every,
        Fsync::Never => pagedd_journal::Fsync::Never,
    };
    let (db, journal) = databases::open(&config.state_dir, fsync).map_err(|e| state_failure(&e))?;
    let read = Box::new(move || load(&cli).map_err(|error| error.to_string()));
    let configuration = Arc::new(Configuration::new(config.clone(), read, set_level));
    let begun = Begun { around, reloaded, lifeline, start, configuration };
    let result = runtime.block_on(serve(config, db, journal, begun));
    // Engines that did not end in time are not waited for: their workers end with our sockets.
    runtime.shutdown_background();
    walls.clear();
    drop((lock, gpus));
    result
}

/// Makes sure that no other daemon has a model on a GPU that one of ours is on: they would not find the memory that they were promised.
pub fn lock_gpus(config: &Config) -> Result<Vec<GpuLock>, Failure> {
    let gpu = |model: &pagedd_config::Model| match model.device {
        Device::Cpu => None,
        Device::Cuda { ordinal } => Some(ordinal),
    };
    let gpus: BTreeSet<u32> = config.models.iter().filter_map(gpu).collect();
    let failure = |error: LockError| match error {
        LockError::Held { .. } => Failure::new(exit::IN_USE, error),
        LockError::Io { .. } => Failure::new(exit::OS, error),
    };
    gpus.into_iter().map(GpuLock::acquire).collect::<Result<_, _>>().map_err(failure)
}

fn state_failure(error: &DbError) -> Failure {
    Failure::new(exit::STATE_DIR, error)
}

fn filter(level: LogLevel) -> EnvFilter {
    EnvFilter::try_new(level.to_string()).unwrap_or_else(|_| EnvFilter::new("info"))
}

/// Logs to stderr, as configured; what is returned changes the level.
pub fn start_log(config: &Config) -> SetLevel {
    fn setter<S: 'static>(handle: Handle<EnvFilter, S>) -> SetLevel {
        Box::new(move |level| handle.reload(filter(level)).map_err(|error| error.to_string()))
    }
    // A log that cannot be written is no reason to end: the library would say so on the same stderr, and panic.
    let builder = tracing_subscriber::fmt()
        .log_internal_errors(false)
        .with_env_filter(filter(config.log.level))
        .with_writer(Stderr::of_process());
    match config.log.format {
        LogFormat::Text => {
            let builder = builder.with_target(false).with_ansi(std::io::stderr().is_terminal());
            let builder = builder.with_filter_reloading();
            let set_level = setter(builder.reload_handle());
            builder.init();
            set_level
        }
        LogFormat::Json => {
            let builder = builder.json().with_filter_reloading();
            let set_level = setter(builder.reload_handle());
            builder.init();
            set_level
        }
    }
}

fn make_state_dir(dir: &Path) -> Result<(), Failure> {
    let failed = |e: std::io::Error| {
        Failure::new(
            exit::STATE_DIR,
            format!("state directory {}: {e}; name another with --state-dir", dir.display()),
        )
    };
    fs::create_dir_all(dir).map_err(failed)?;
    // Keys' digests and sockets are in it.
    fs::set_permissions(dir, fs::Permissions::from_mode(0o750)).map_err(failed)
}

/// Directory of the programs that belong to this one.
fn programs() -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("the program's own path")?;
    program_folder(&own, &["pagedd-worker", "pagedd-gateway"]).map_err(|folders| {
        let folders: Vec<String> = folders.iter().map(|folder| folder.display().to_string()).collect();
        anyhow::anyhow!("pagedd-worker and pagedd-gateway are missing: looked in {}", folders.join(", "))
    })
}

/// What models are started with.
///
/// # Errors
/// A program is not installed.
pub fn surroundings(
    config: &Config,
    store: Arc<FdStore>,
    watchdog: Arc<Watchdog>,
    walls: Arc<Walls>,
) -> anyhow::Result<Surroundings> {
    Ok(Surroundings {
        programs: programs()?,
        store,
        watchdog,
        walls,
        env: vec![
            ("PAGEDD_LOG".into(), config.log.level.as_str().into()),
            ("PAGEDD_LOG_FORMAT".into(), config.log.format.as_str().into()),
            #[cfg(feature = "failpoints")]
            ("FAILPOINTS".into(), std::env::var_os("FAILPOINTS").unwrap_or_default()),
        ],
    })
}

/// A start as far as it has come before the databases were opened.
struct Begun {
    around: Surroundings,
    reloaded: Reloaded,
    /// Ends with the keeper.
    lifeline: Option<OwnedFd>,
    start: Instant,
    configuration: Arc<Configuration>,
}

async fn serve(
    config: Config,
    db: ControlDb,
    mut journal: JournalWriter,
    begun: Begun,
) -> Result<End, Failure> {
    let Begun { around, mut reloaded, lifeline, start, configuration } = begun;
    let (store, walls) = (around.store.clone(), around.walls.clone());
    let terminate = signal(SignalKind::terminate()).context("SIGTERM")?;
    let interrupt = signal(SignalKind::interrupt()).context("SIGINT")?;
    let hangup = signal(SignalKind::hangup()).context("SIGHUP")?;
    let kept = lifeline.is_some();
    let (hub_sender, hub_inbox) = mpsc::channel(hub::INBOX);
    let records = db.tenants().map_err(|e| state_failure(&e))?;
    let known: Vec<TenantId> = records.iter().map(|tenant| tenant.id).collect();
    walls.sweep();
    let own_retentions: Vec<(TenantId, Duration)> =
        records.iter().filter_map(|tenant| Some((tenant.id, own_retention(tenant)?))).collect();
    let recorder::Found { live: restored, set_aside } =
        recorder::live(journal.db(), &known).map_err(|e| state_failure(&e))?;
    let mut retention = Retentions::new(config.retention, config.reattach_grace);
    for (tenant, own) in &own_retentions {
        retention.set(*tenant, Some(*own));
    }
    let accounts = Accounts::default();
    usage::recall(&accounts, journal.db(), &restored, recorder::unix()).map_err(|e| state_failure(&e))?;
    let recorder = recorder::start(journal, retention, hub_sender.clone()).context("the journal's thread")?;
    let exporter =
        Exporter::new(hub_sender.clone(), recorder.durability.clone(), set_aside, accounts.clone());
    let held = sandbox::find().map_err(|e| Failure::new(exit::OS, e))?;
    let users = held
        .gives_users()
        .then(|| Identities::new(config.tenant_uids.first..=config.tenant_uids.last).map(Lender::new))
        .transpose()
        .map_err(|e| Failure::new(exit::CONFIG, e))?;
    let shop = TenantShop {
        address: config.listen,
        store: store.clone(),
        hub: hub_sender.clone(),
        recorder: recorder.inbox.clone(),
        exporter,
        accounts: accounts.clone(),
        limits: GatewayLimits::from(config.gateway),
        going: Going::Not,
        retention: config.retention,
        users,
        walls,
    };
    // Every port is bound before anything is loaded: a port that is taken must not cost minutes to find out.
    let (records, without_model): (Vec<_>, Vec<_>) = records
        .into_iter()
        .partition(|record| config.models.iter().any(|model| model.name.as_str() == record.model));
    let mut lacking: Vec<_> = without_model.into_iter().map(|record| (record, Lack::Model)).collect();
    let (records, mut confines) = confines(&shop, records, &mut lacking).await;
    let mut ports = ports::listeners(&store, config.listen, &records)
        .map_err(|error| Failure::new(exit::IN_USE, error))?;
    let socket = AdminSocket::open(&store, &config.admin_socket).map_err(|e| {
        Failure::new(exit::STATE_DIR, format!("admin_socket {}: {e}", config.admin_socket.display()))
    })?;
    let mut started = std::mem::take(&mut reloaded.models);
    if started.is_empty() {
        started = reload::start_models(&config, &around)?;
    }
    let mut models: Vec<Arc<Model>> = Vec::new();
    let mut threads = Vec::new();
    let cache_key = *db.installation_secret();
    for Started { model, thread, go } in started {
        let seed = reloaded.seed(&model.name, cache_key);
        // An engine whose model cannot be loaded has ended.
        drop(go.send(Go { cache_key, recorder: recorder.inbox.clone(), seed }));
        models.push(model);
        threads.push(thread);
    }
    let limits = hub::Limits { retention: config.retention, reattach_grace: config.reattach_grace };
    let engines = models.iter().map(|model| model.engine.clone()).collect();
    let mut hub = Hub::new(limits, engines, &recorder, accounts);
    for (tenant, own) in &own_retentions {
        hub.retain(*tenant, Some(*own));
    }
    for kept in &restored {
        let served = |_: &&Arc<Model>| lacking.iter().all(|(record, _)| record.id != kept.admission.tenant);
        let model = models.iter().find(|model| model.name == kept.admission.saved.model).filter(served);
        hub.restore(model.map(|model| model.id), kept.clone());
    }
    tokio::spawn(hub.run(hub_inbox));

    let mut tenants = BTreeMap::new();
    for record in records {
        let Some(model) = models.iter().find(|model| model.name == record.model) else { continue };
        let (Some(listener), Some((user, wall))) = (ports.remove(&record.id), confines.remove(&record.id))
        else {
            continue;
        };
        let tenant = open(&db, &shop, model, record, Place { listener, user, wall })?;
        tenant.set_readmitting(restored.iter().any(|kept| kept.admission.saved.model == model.name));
        tenants.insert(tenant.record.name.clone(), tenant);
    }
    let unserved = unserved(&db, lacking)?;
    release_unclaimed(&store);

    let facts = Facts {
        state_dir: config.state_dir.clone(),
        config: config.file.clone(),
        sandbox: held.state(),
        supervisor: if kept { Supervisor::Keeper } else { Supervisor::Systemd },
        start,
    };
    let (events, inbox) = mpsc::channel(64);
    for model in &models {
        tokio::spawn(watch_model(model.clone(), events.clone(), shop.hub.clone()));
    }
    let (db, restart) = (Db::new(db), Arc::new(Notify::new()));
    let checkpoints = Arc::new(Checkpoints {
        state_dir: config.state_dir.clone(),
        address: config.listen,
        models: models.clone(),
        db: db.clone(),
        recorder: recorder.inbox.clone(),
        one: tokio::sync::Mutex::new(()),
        restart: restart.clone(),
    });
    let usage = Arc::new(Collector {
        db: db.clone(),
        recorder: recorder.inbox.clone(),
        billed: recorder.billed.clone(),
        one: tokio::sync::Mutex::new(()),
    });
    tokio::spawn(usage.clone().run());
    let daemon = Daemon {
        facts,
        usage,
        models: models.clone(),
        tenants,
        unserved,
        shop,
        db,
        events: events.downgrade(),
        checkpoints,
        durability: recorder.durability.clone(),
        restored,
        readmitted: BTreeSet::new(),
        drain: DrainState::Admitting,
        configuration: configuration.clone(),
        reload: None,
        standing: watch::Sender::new(Standing { tenants: 0, drain: DrainState::Admitting, reload: None }),
        pulse: around.watchdog.pulse("daemon"),
    };
    tokio::spawn(around.watchdog.clone().feed());
    tokio::spawn(supervision::report(models.clone(), daemon.standing.subscribe(), hub_sender.clone()));
    tokio::spawn(reconfigure::on_hangup(hangup, events.clone()));
    tokio::spawn(daemon.run(inbox));
    let admin_path = socket.path().to_owned();
    let admin = tokio::spawn(socket.run(events.clone()));
    // Ports answer, and say what they wait for: models load from here on, however long that takes.
    notify::ready().context("telling the supervisor")?;
    info!(version = env!("CARGO_PKG_VERSION"), admin = %admin_path.display(), models = models.len(), "pagedd runs");

    let mut ends = Ends { terminate, interrupt, lifeline: Box::pin(keeper_gone(lifeline)), restart };
    let (end, timeout) = ends.next(&configuration).await;
    let parting = if let End::Again = end { Parting::Restored } else { Parting::Restarting };
    let (hub, recorder) = (&hub_sender, &recorder.inbox);
    let ending = Ending { events: &events, hub, recorder, models: &models, threads, parting };
    ending.run(timeout, ends.hurry(timeout)).await;
    respite::forget(&store);
    admin.abort();
    info!("pagedd ended");
    Ok(end)
}

/// What makes the daemon end.
struct Ends {
    terminate: Signal,
    interrupt: Signal,
    lifeline: Pin<Box<dyn Future<Output = ()>>>,
    restart: Arc<Notify>,
}

impl Ends {
    /// The first of them, and how long running requests may go on.
    async fn next(&mut self, configuration: &Configuration) -> (End, Duration) {
        tokio::select! {
            _ = self.terminate.recv() => {
                info!("SIGTERM: draining");
                (End::Done, configuration.drain_timeout())
            }
            _ = self.interrupt.recv() => {
                info!("SIGINT: draining");
                (End::Done, configuration.drain_timeout())
            }
            () = &mut self.lifeline => {
                // Whoever starts the next keeper must not find ports and state directory taken.
                warn!("the keeper is gone: the end");
                (End::Done, Duration::ZERO)
            }
            // What runs goes on with the databases that are kept aside, or not at all.
            () = self.restart.notified() => {
                info!("ending, so that the next daemon begins with a checkpoint");
                (End::Again, Duration::ZERO)
            }
        }
    }

    /// The next one, while running requests go on for `timeout`.
    async fn hurry(mut self, timeout: Duration) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
            () = self.lifeline, if timeout > Duration::ZERO => {}
        }
    }
}

/// Starts a tenant on its port, as control.db has it.
fn open(
    db: &ControlDb,
    shop: &TenantShop,
    model: &Arc<Model>,
    record: TenantRow,
    place: Place,
) -> Result<Tenant, Failure> {
    let failed =
        |exit, error: &dyn fmt::Display| Failure::new(exit, format!("tenant `{}`: {error}", record.name));
    let amount = |text: &str| text.parse().map_err(|e| failed(exit::STATE_DIR, &e));
    let share = ShareAmounts { floor: amount(&record.kv_floor)?, ceiling: amount(&record.kv_ceiling)? };
    let keys = db.keys(record.id).map_err(|e| state_failure(&e))?;
    Ok(shop.open(record, keys, share, model, place))
}

/// Tenants that lack something, by name.
fn unserved(db: &ControlDb, lacking: Vec<(TenantRow, Lack)>) -> Result<BTreeMap<String, Unserved>, Failure> {
    let mut unserved = BTreeMap::new();
    for (record, lacks) in lacking {
        let name = record.name.clone();
        warn!(tenant = name, reason = lacks.reason(&record), "tenant is not served");
        let keys = db.keys(record.id).map_err(|e| state_failure(&e))?;
        let keys = keys.iter().filter(|key| key.revoked_unix.is_none()).count() as u32;
        unserved.insert(name, Unserved { record, keys, lacks });
    }
    Ok(unserved)
}

/// A tenant's user and wall.
type Confines = (Option<Arc<Lent>>, TenantWall);

/// Finds users and builds walls for tenants that are to be served, before their ports are bound; leaves out those that cannot have theirs.
async fn confines(
    shop: &TenantShop,
    records: Vec<TenantRow>,
    lacking: &mut Vec<(TenantRow, Lack)>,
) -> (Vec<TenantRow>, BTreeMap<TenantId, Confines>) {
    let (mut served, mut found) = (Vec::new(), BTreeMap::new());
    let until = Instant::now() + USERS_ENDED;
    for record in records {
        let of_record = async {
            let user = shop.user(until).await.map_err(Lack::User)?;
            let wall = shop.walls.restored(&record.name, record.limits.as_deref()).await;
            wall.map(|wall| (user, wall)).map_err(Lack::Wall)
        };
        match of_record.await {
            Ok(confines) => {
                found.insert(record.id, confines);
                served.push(record);
            }
            Err(lack) => lacking.push((record, lack)),
        }
    }
    (served, found)
}

/// Lets go of what an earlier daemon stored and this one has no use for, such as weights of models that are gone.
fn release_unclaimed(store: &FdStore) {
    for name in store.names() {
        match store.remove(&name) {
            Ok(()) => info!(name, "an fd of an earlier daemon is not needed any more"),
            Err(error) => warn!(name, %error, "an fd of an earlier daemon stays open"),
        }
    }
}

/// Returns once the keeper has ended, and never without a keeper.
async fn keeper_gone(lifeline: Option<OwnedFd>) {
    if let Some(Ok(mut pipe)) = lifeline.map(pipe::Receiver::from_owned_fd) {
        // The keeper writes nothing: any return is its end.
        drop(pipe.read_u8().await);
    } else {
        std::future::pending::<()>().await;
    }
}
