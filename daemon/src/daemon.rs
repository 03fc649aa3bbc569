//! The task that owns tenants and control.db, and carries out admin commands one after the other.

mod orders;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use pagedd_control::{
    Command, ControlError, DrainState, Durable, ErrorCode, KeyInfo, KeyListed, MetricsText, ReloadInfo,
    Reply, SandboxState, StatusInfo, Supervisor, TenantInfo, TenantListed, TenantShown,
};
use pagedd_core::{FinishReason, ModelId};
use pagedd_engine::StepRecord;
use pagedd_journal::{ControlDb, DbError, Durability, Kept, KeyRow};
use pagedd_wire::gateway::Parting;
use tokio::sync::{mpsc, oneshot, watch};
use tracing::{error, info, warn};

use crate::admin::Order;
use crate::checkpoint::Checkpoints;
use crate::convert;
use crate::fit::{Misfit, is_of_another_model, misfit};
use crate::hub::Message;
use crate::model::Model;
use crate::reconfigure::Configuration;
use crate::recorder::{self, Told};
use crate::status;
use crate::supervision::Standing;
use crate::tenants::{Tenant, TenantShop, Unserved};
use crate::usage::Collector;
use crate::walls;
use crate::watchdog::Pulse;
use crate::worker::ModelState;

/// An event that takes longer hangs: each of its parts has a bound of seconds.
const LONGEST_EVENT: Duration = Duration::from_mins(5);
/// New requests wait no longer for those of an earlier daemon. Only one that a daemon ended with can take so long.
const LONGEST_CLOSED: Duration = Duration::from_secs(20);
/// Between two tries to tell an engine of a tenant's share.
const APPLY_RETRY: Duration = Duration::from_secs(1);

/// Facts about the daemon itself, for status.
pub struct Facts {
    /// Its state directory.
    pub state_dir: PathBuf,
    /// Its configuration file.
    pub config: Option<PathBuf>,
    /// What holds the gateways.
    pub sandbox: SandboxState,
    /// Who restarts it.
    pub supervisor: Supervisor,
    /// When it started.
    pub start: Instant,
}

/// The daemon's state.
pub struct Daemon {
    /// Facts for status.
    pub facts: Facts,
    /// Every configured model, indexed by [`ModelId`].
    pub models: Vec<Arc<Model>>,
    /// Tenants by name.
    pub tenants: BTreeMap<String, Tenant>,
    /// Tenants that cannot be served, by name.
    pub unserved: BTreeMap<String, Unserved>,
    /// What tenants are built with.
    pub shop: TenantShop,
    /// Tenants and keys on disk.
    pub db: Db,
    /// The way back to itself.
    pub events: mpsc::WeakSender<Event>,
    /// Whether what was accepted survives the daemon.
    pub durability: watch::Receiver<Durability>,
    /// What tenants have used.
    pub usage: Arc<Collector>,
    /// What is asked about checkpoints.
    pub checkpoints: Arc<Checkpoints>,
    /// Live requests of an earlier daemon, in the order of their admission, until their models are ready.
    pub restored: Vec<Kept>,
    /// Models whose requests of an earlier daemon are on their way to the engine, or there.
    pub readmitted: BTreeSet<ModelId>,
    /// Whether it admits requests.
    pub drain: DrainState,
    /// The configuration in force.
    pub configuration: Arc<Configuration>,
    /// What became of the last order to read it again.
    pub reload: Option<ReloadInfo>,
    /// Told how the daemon stands.
    pub standing: watch::Sender<Standing>,
    /// Shows that this task goes on.
    pub pulse: Pulse,
}

/// What the daemon's task is told.
#[expect(clippy::large_enum_variant, reason = "few are on their way at a time, and most are orders")]
pub enum Event {
    /// An admin command.
    Order(Order),
    /// A model's pool has a size for the first time, or its engine was too busy when it had.
    ModelReady(ModelId),
    /// Its requests of an earlier daemon are in its engine.
    Readmitted(ModelId),
    /// The configuration is to be read again.
    Reload,
    /// The daemon goes down: nothing more is admitted, and what runs may go on for so long.
    Stopping(Duration),
    /// Every gateway ends and says why; the sender learns when all have.
    Shutdown(Parting, oneshot::Sender<()>),
}

/// control.db, used off the runtime's thread: a commit waits for the disk, and tokens must not.
#[derive(Clone)]
pub struct Db(Arc<Mutex<ControlDb>>);

impl Db {
    /// Takes over an open database.
    pub fn new(db: ControlDb) -> Self {
        Self(Arc::new(Mutex::new(db)))
    }

    /// Does some work with it.
    ///
    /// # Errors
    /// As the work says; nothing has changed.
    pub async fn with<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut ControlDb) -> Result<T, DbError> + Send + 'static,
    ) -> Result<T, ControlError> {
        let db = self.0.clone();
        // Every operation is one transaction, so a panic in one leaves no half of it.
        let result =
            tokio::task::spawn_blocking(move || work(&mut db.lock().unwrap_or_else(PoisonError::into_inner)));
        result
            .await
            .map_err(|e| ControlError::new(ErrorCode::Internal, format!("control.db: {e}")))?
            .map_err(|e| db_error(&e))
    }
}

/// As `pagedctl` shows it.
pub fn db_error(error: &DbError) -> ControlError {
    let code = match error {
        DbError::DuplicateName { .. } => ErrorCode::DuplicateName,
        DbError::DuplicatePort { .. } => ErrorCode::PortInUse,
        DbError::UnknownTenant { .. } => ErrorCode::UnknownTenant,
        DbError::UnknownKey { .. } => ErrorCode::UnknownKey,
        DbError::DiskFull { .. } => ErrorCode::DiskFull,
        _ => ErrorCode::Internal,
    };
    ControlError::new(code, error.to_string())
}

impl Daemon {
    /// Obeys until every sender is gone.
    pub async fn run(mut self, mut events: mpsc::Receiver<Event>) {
        loop {
            self.show();
            self.pulse.idle();
            let Some(event) = events.recv().await else { return };
            self.pulse.busy(LONGEST_EVENT);
            match event {
                Event::Order(Order { command: Command::Checkpoint(command), answer }) => {
                    tokio::spawn(self.checkpoints.clone().obey(command, answer));
                }
                Event::Order(Order { command, answer }) => {
                    let (name, changes) = (command.name(), command.changes());
                    let tenant = command.tenant().map(str::to_owned);
                    let result = self.obey(command).await;
                    if changes {
                        let error = result.as_ref().err().map(|e| e.code.as_str());
                        info!(command = name, tenant, error, "admin");
                    }
                    // A client that hung up does not want its answer.
                    drop(answer.send(result.into()));
                }
                Event::ModelReady(model) => self.model_ready(model).await,
                Event::Readmitted(model) => {
                    self.of_model(model).for_each(|tenant| tenant.set_readmitting(false));
                }
                // The log and the manager hear what came of it.
                Event::Reload => drop(self.reload().await),
                Event::Stopping(timeout) => self.stopping(timeout),
                Event::Shutdown(parting, done) => {
                    let tenants = std::mem::take(&mut self.tenants);
                    for tenant in tenants.values() {
                        tenant.part(parting);
                    }
                    for tenant in tenants.into_values() {
                        tenant.close(parting).await;
                    }
                    let _ = done.send(());
                }
            }
        }
    }

    /// Has the service manager shown how the daemon stands.
    fn show(&self) {
        let now = Standing { tenants: self.tenants.len(), drain: self.drain, reload: self.reload.clone() };
        self.standing.send_if_modified(|standing| {
            let changed = *standing != now;
            *standing = now;
            changed
        });
    }

    async fn obey(&mut self, command: Command) -> Result<Reply, ControlError> {
        Ok(match command {
            Command::TenantAdd(spec) => Reply::TenantAdded(self.add(spec).await?),
            Command::TenantSet(set) => Reply::Tenant(self.set(set).await?),
            Command::TenantRemove(remove) => Reply::TenantRemoved(self.remove(remove).await?),
            Command::TenantList => Reply::Tenants(TenantListed { tenants: self.infos() }),
            Command::TenantShow(name) => Reply::Tenant(self.shown(&name.name).await?),
            Command::TenantSuspend(name) => Reply::Tenant(self.suspend(&name.name, true).await?),
            Command::TenantResume(name) => Reply::Tenant(self.suspend(&name.name, false).await?),
            Command::KeyCreate(create) => Reply::KeyCreated(self.create_key(create).await?),
            Command::KeyList(list) => {
                let tenant = self.tenant(&list.tenant)?;
                Reply::Keys(KeyListed {
                    tenant: list.tenant,
                    keys: tenant.keys.iter().map(key_info).collect(),
                })
            }
            Command::KeyRevoke(revoke) => Reply::KeyRevoked(self.revoke_key(revoke).await?),
            Command::Drain(drain) => Reply::Drain(self.drain(drain).await?),
            Command::Undrain => Reply::Drain(self.undrain().await?),
            Command::Status => Reply::Status(self.status().await),
            Command::Reload => Reply::Reloaded(self.reload().await?),
            Command::Checkpoint(_) => unreachable!("see `run`"),
            Command::Usage(ask) => Reply::Usage(self.usage.report(ask).await?),
            Command::Metrics => {
                let drain = self.drain_info().await;
                let walls = self.walls();
                let text = self
                    .shop
                    .exporter
                    .all(&self.models, &self.tenants, &self.facts, &walls, &drain, self.reload.as_ref())
                    .await;
                Reply::Metrics(MetricsText { text })
            }
        })
    }

    async fn status(&self) -> StatusInfo {
        let (drain, models) = (self.drain_info().await, status::models(&self.models).await);
        StatusInfo {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_s: self.facts.start.elapsed().as_secs(),
            state_dir: self.facts.state_dir.display().to_string(),
            config: self.facts.config.as_ref().map(|path| path.display().to_string()),
            reload: self.reload.clone(),
            walls: self.walls(),
            sandbox: self.facts.sandbox.clone(),
            durable: durable(&self.durability.borrow()),
            supervisor: self.facts.supervisor,
            drain,
            models,
            tenants: self.infos(),
        }
    }

    /// What of the walls stands, those of every tenant with them.
    fn walls(&self) -> pagedd_control::Walls {
        self.shop.walls.shown(self.tenants.iter().map(|(name, tenant)| (name.as_str(), &tenant.wall)))
    }

    /// Every tenant, by name.
    fn infos(&self) -> Vec<TenantInfo> {
        let mut infos: Vec<_> = self.tenants.values().map(|tenant| tenant.info(&self.shop)).collect();
        infos.extend(self.unserved.values().map(|tenant| tenant.info(&self.shop)));
        infos.sort_by(|a, b| a.name.cmp(&b.name));
        infos
    }

    fn tenant(&self, name: &str) -> Result<&Tenant, ControlError> {
        self.tenants.get(name).ok_or_else(|| match self.unserved.get(name) {
            Some(unserved) => unserved.error(),
            None => unknown_tenant(name),
        })
    }

    async fn shown(&self, name: &str) -> Result<TenantShown, ControlError> {
        if let Some(unserved) = self.unserved.get(name) {
            let wall = walls::unserved(unserved.record.limits.as_deref()).into();
            return Ok(TenantShown { tenant: unserved.info(&self.shop), wall, notes: Vec::new() });
        }
        let tenant = self.tenant(name)?;
        Ok(TenantShown {
            tenant: tenant.info(&self.shop),
            wall: tenant.wall.info(tenant.device_bytes()).await.into(),
            notes: Vec::new(),
        })
    }

    fn model(&self, name: Option<&str>) -> Result<&Arc<Model>, ControlError> {
        let configured = || match self.models.iter().map(|m| m.name.as_str()).collect::<Vec<_>>().join(", ") {
            names if names.is_empty() => {
                "add one under `models:` in the configuration and restart".to_owned()
            }
            names => format!("configured models: {names}"),
        };
        match (name, self.models.as_slice()) {
            (None, [only]) => Ok(only),
            (None, _) => Err(ControlError::new(
                ErrorCode::UnknownModel,
                "no model was named, and there is not exactly one",
            )
            .remedy(format!("name it with --model; {}", configured()))),
            (Some(name), models) => models.iter().find(|model| model.name == name).ok_or_else(|| {
                ControlError::new(ErrorCode::UnknownModel, format!("no model `{name}`")).remedy(configured())
            }),
        }
    }

    fn of_model(&self, model: ModelId) -> impl Iterator<Item = &Tenant> {
        self.tenants.values().filter(move |tenant| tenant.model.id == model)
    }

    /// The pool has a size: floors and ceilings become blocks. A tenant whose floor no longer fits is not served, and says so; one whose
    /// engine was too busy is tried again.
    ///
    /// Then the model's requests of an earlier daemon go on.
    async fn model_ready(&mut self, model: ModelId) {
        let mut again = false;
        for tenant in self.of_model(model) {
            let misfit = tenant.apply(tenant.share, tenant.record.prompt_lookup).await.err();
            if let Some(ControlError { message, code, .. }) = &misfit {
                warn!(tenant = tenant.record.name, reason = message, "tenant is not served");
                again |= *code == ErrorCode::Busy;
            }
            tenant.set_misfit(misfit.map(|error| error.message));
        }
        if again {
            let events = self.events.clone();
            tokio::spawn(async move {
                tokio::time::sleep(APPLY_RETRY).await;
                tell(&events, Event::ModelReady(model)).await;
            });
        }
        let Some(model) = self.models.get(usize::from(model.0)) else { return };
        // Those of a tenant that is not served wait for it, as they do for a model.
        let waits = |tenant| self.unserved.values().any(|unserved| unserved.record.id == tenant);
        let of_model =
            |kept: &mut Kept| kept.admission.saved.model == model.name && !waits(kept.admission.tenant);
        let restored: Vec<Kept> = self.restored.extract_if(.., of_model).collect();
        // Also where a tenant was removed with the last of them: others of the model wait for it.
        if self.readmitted.insert(model.id) {
            tokio::spawn(readmit(restored, model.clone(), self.shop.recorder.clone(), self.events.clone()));
        }
    }
}

/// Goes on with a model's requests of an earlier daemon, and lets new ones in behind them.
async fn readmit(
    mut restored: Vec<Kept>,
    model: Arc<Model>,
    recorder: mpsc::Sender<Told>,
    events: mpsc::WeakSender<Event>,
) {
    let info = model.state.borrow().model().map(|ready| ready.info.clone());
    if let Some(info) = info {
        let changed =
            |kept: &mut Kept| is_of_another_model(kept.admission.model_digest, &model.config, &info);
        for kept in restored.extract_if(.., changed) {
            let request = kept.admission.request;
            error!(
                %request,
                model = model.name,
                "the model's file, dtype or kv_dtype was changed in the middle of a request; it fails"
            );
            let finished = convert::restored(&kept).finish(FinishReason::ModelChanged);
            drop(recorder.send(Told::Step(StepRecord { finished, ..StepRecord::default() })).await);
        }
        let (mut misfits, mut others) = (Vec::<(Kept, Misfit)>::new(), Vec::new());
        for kept in restored {
            match misfit(&kept.admission.saved, &info) {
                Some(misfit) => misfits.push((kept, misfit)),
                None => others.push(kept),
            }
        }
        restored = others;
        recorder::hold(misfits, &model.engine, &recorder).await;
    }
    let mut readmitted = pin!(recorder::readmit(restored, model.engine.clone(), recorder));
    let late = tokio::time::timeout(LONGEST_CLOSED, &mut readmitted).await.is_err();
    tell(&events, Event::Readmitted(model.id)).await;
    if late {
        readmitted.await;
    }
}

/// Tells the daemon's task, as long as there is one.
async fn tell(events: &mpsc::WeakSender<Event>, event: Event) {
    if let Some(events) = events.upgrade() {
        drop(events.send(event).await);
    }
}

/// As `pagedctl` shows it.
fn durable(durability: &Durability) -> Durable {
    match durability {
        Durability::Durable => Durable::Yes,
        Durability::Lost { since_unix, records, reason } => {
            Durable::No { reason: reason.to_string(), since_unix: *since_unix, records: *records }
        }
    }
}

/// Tells the daemon's task when a model's pool first has a size, or the hub that it never will.
pub async fn watch_model(model: Arc<Model>, events: mpsc::Sender<Event>, hub: mpsc::Sender<Message>) {
    let mut state = model.state.clone();
    let settled = state
        .wait_for(|state| matches!(state, ModelState::Ready(_) | ModelState::Failed { .. }))
        .await
        .map(|state| matches!(*state, ModelState::Ready(_)));
    match settled {
        Ok(true) => drop(events.send(Event::ModelReady(model.id)).await),
        Ok(false) | Err(_) => drop(hub.send(Message::ModelFailed(model.id)).await),
    }
}

fn unknown_tenant(name: &str) -> ControlError {
    ControlError::new(ErrorCode::UnknownTenant, format!("no tenant `{name}`"))
        .remedy("`pagedctl tenant list` names them")
}

/// Seconds since 1970.
fn now_unix() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64)
}

fn key_info(key: &KeyRow) -> KeyInfo {
    KeyInfo {
        id: key.id,
        label: key.label.clone(),
        prefix: key.prefix.clone(),
        created_unix: key.created_unix,
        revoked_unix: key.revoked_unix,
    }
}
