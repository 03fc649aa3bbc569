//! The task that owns tenants and control.db, and carries out admin commands one after the other.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use pagedd_config::{
    Amount, FIRST_TENANT_PORT, MAX_RETENTION, Percent, Span, SpanError, TenantName as CheckedName,
};
use pagedd_control::{
    Command, ControlError, DrainState, Durable, ErrorCode, KeyCreate, KeyCreated, KeyInfo, KeyListed,
    KeyRevoke, MAX_LABEL, MetricsText, ReloadInfo, Removed, Reply, Secret, StatusInfo, Supervisor,
    TenantAdded, TenantChanges, TenantInfo, TenantListed, TenantRemove, TenantSet, TenantShown, TenantSpec,
    Walls,
};
use pagedd_core::{Blocks, FinishReason, ModelId, TenantId};
use pagedd_engine::{Command as EngineCommand, StepRecord};
use pagedd_journal::{
    ControlDb, DbError, Durability, Kept, KeyRow, NewKey, NewTenant, TenantRow, TenantUpdate,
};
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
use crate::tenants::{
    ENGINE_ANSWER, LOWER_A_FLOOR, ShareAmounts, Tenant, TenantShop, Unserved, own_retention,
};
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
    /// Whether limits are enforced by the kernel.
    pub walls: Walls,
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
    /// Tenants whose model is not configured, by name.
    pub unserved: BTreeMap<String, Unserved>,
    /// What tenants are built with.
    pub shop: TenantShop,
    /// Tenants and keys on disk.
    pub db: Db,
    /// The way back to itself.
    pub events: mpsc::WeakSender<Event>,
    /// Whether what was accepted survives the daemon.
    pub durability: watch::Receiver<Durability>,
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
                    let result = self.obey(command).await;
                    if changes {
                        let error = result.as_ref().err().map(|e| e.code.as_str());
                        info!(command = name, error, "admin");
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
                        tenant.close(&self.shop, parting).await;
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
            Command::TenantSet(TenantSet { name, changes }) => Reply::Tenant(self.set(&name, changes).await?),
            Command::TenantRemove(remove) => Reply::TenantRemoved(self.remove(remove).await?),
            Command::TenantList => Reply::Tenants(TenantListed { tenants: self.infos() }),
            Command::TenantShow(name) => Reply::Tenant(self.shown(&name.name)?),
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
            Command::Metrics => {
                let drain = self.drain_info().await;
                let text = self.shop.exporter.all(&self.models, &self.tenants, &self.facts, &drain).await;
                Reply::Metrics(MetricsText { text })
            }
        })
    }

    async fn status(&self) -> StatusInfo {
        let drain = self.drain_info().await;
        StatusInfo {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_s: self.facts.start.elapsed().as_secs(),
            state_dir: self.facts.state_dir.display().to_string(),
            config: self.facts.config.as_ref().map(|path| path.display().to_string()),
            reload: self.reload.clone(),
            walls: self.facts.walls.clone(),
            durable: durable(&self.durability.borrow()),
            supervisor: self.facts.supervisor,
            drain,
            models: self.models.iter().map(|model| status::model(model)).collect(),
            tenants: self.infos(),
        }
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

    fn shown(&self, name: &str) -> Result<TenantShown, ControlError> {
        if let Some(unserved) = self.unserved.get(name) {
            return Ok(TenantShown { tenant: unserved.info(&self.shop) });
        }
        Ok(TenantShown { tenant: self.tenant(name)?.info(&self.shop) })
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

    async fn add(&mut self, spec: TenantSpec) -> Result<TenantAdded, ControlError> {
        let name = spec
            .name
            .parse::<CheckedName>()
            .map_err(|e| ControlError::new(ErrorCode::InvalidName, e.to_string()))?
            .to_string();
        if self.tenants.contains_key(&name) || self.unserved.contains_key(&name) {
            return Err(ControlError::new(ErrorCode::DuplicateName, format!("a tenant `{name}` exists"))
                .remedy("choose another name, or change this one with `pagedctl tenant set`"));
        }
        let model = self.model(spec.model.as_deref())?.clone();
        let share = share_amounts(spec.kv_floor.as_deref(), spec.kv_ceiling.as_deref(), None)?;
        self.check_share(None, &model, share)?;
        let (port, listener) = self.port(spec.port)?;
        let new = NewTenant {
            name: name.clone(),
            port,
            model: model.name.clone(),
            kv_floor: share.floor.to_string(),
            kv_ceiling: share.ceiling.to_string(),
            auth: !spec.no_auth,
            prompt_lookup: spec.prompt_lookup,
            retention_ms: spec.retention.as_deref().map(retention).transpose()?.flatten(),
        };
        let (record, key) = self
            .db
            .with(move |db| {
                let key = if new.auth { Some(NewKey::draw()?) } else { None };
                let (record, row) = db.add_tenant(&new, key.as_ref(), now_unix())?;
                Ok((record, key.zip(row)))
            })
            .await?;
        let keys = key.iter().map(|(_, row)| row.clone()).collect();
        self.shop.keep_listener(record.id, &listener);
        let opened = self.shop.open(record.clone(), keys, share, &model, listener);
        let settled = match &opened {
            Ok(tenant) => tenant.apply(share, record.prompt_lookup).await,
            Err(error) => Err(error.clone()),
        };
        if let Err(error) = settled {
            self.shop.forget_listener(record.id);
            if let Ok(tenant) = opened {
                tenant.close(&self.shop, Parting::Removed).await;
            }
            // The engine may know it already, or learn of it late.
            drop(
                model
                    .engine
                    .send(EngineCommand::RemoveTenant { tenant: record.id, reply: Box::new(|()| {}) }),
            );
            self.db.with(move |db| db.remove_tenant(record.id)).await?;
            return Err(error);
        }
        let tenant = opened?;
        let info = tenant.info(&self.shop);
        self.retain(&tenant.record).await;
        self.tenants.insert(name.clone(), tenant);
        Ok(TenantAdded { tenant: info, key: key.map(|(key, row)| key_created(&key, row, name)) })
    }

    /// The port asked for, or the next free one.
    fn port(&self, asked: Option<u16>) -> Result<(u16, std::os::fd::OwnedFd), ControlError> {
        let records = || {
            let served = self.tenants.values().map(|tenant| &tenant.record);
            served.chain(self.unserved.values().map(|tenant| &tenant.record))
        };
        let taken = |port: u16| records().find(|record| record.port == port);
        if let Some(port) = asked {
            if port == 0 {
                return Err(ControlError::new(ErrorCode::InvalidPort, "port 0 is no port")
                    .remedy("name one, or leave --port away to get the next free one"));
            }
            if let Some(tenant) = taken(port) {
                let message = format!("port {port} belongs to tenant `{}`", tenant.name);
                return Err(ControlError::new(ErrorCode::PortInUse, message).remedy("choose another port"));
            }
            return Ok((port, self.shop.bind(port)?));
        }
        (FIRST_TENANT_PORT..=u16::MAX)
            .filter(|port| taken(*port).is_none())
            .find_map(|port| self.shop.bind(port).ok().map(|listener| (port, listener)))
            .ok_or_else(|| {
                ControlError::new(ErrorCode::InvalidPort, format!("no free port from {FIRST_TENANT_PORT} up"))
            })
    }

    async fn set(&mut self, name: &str, changes: TenantChanges) -> Result<TenantShown, ControlError> {
        let tenant = self.tenant(name)?;
        let changed_retention = changes.retention.as_deref().map(retention).transpose()?;
        let (before, model) = (tenant.share, tenant.model.clone());
        let share = share_amounts(changes.kv_floor.as_deref(), changes.kv_ceiling.as_deref(), Some(before))?;
        self.check_share(Some(name), &model, share)?;
        let listener = match changes.port.filter(|port| *port != tenant.record.port) {
            Some(port) => Some(self.port(Some(port))?),
            None => None,
        };
        let prompt_lookup = changes.prompt_lookup.or(tenant.record.prompt_lookup);
        tenant.apply(share, prompt_lookup).await?;
        let update = TenantUpdate {
            port: listener.as_ref().map(|(port, _)| *port),
            kv_floor: Some(share.floor.to_string()),
            kv_ceiling: Some(share.ceiling.to_string()),
            auth: changes.auth,
            suspended: None,
            prompt_lookup,
            retention_ms: changed_retention,
        };
        let id = tenant.id();
        let written = self.db.with(move |db| db.update_tenant(id, &update)).await;
        let tenant = self.tenants.get_mut(name).ok_or_else(|| unknown_tenant(name))?;
        match written {
            Ok(record) => tenant.record = record,
            Err(error) => {
                tenant.apply(before, tenant.record.prompt_lookup).await?;
                return Err(error);
            }
        }
        tenant.share = share;
        tenant.set_misfit(None);
        tenant.announce();
        if let Some((_, listener)) = listener {
            tenant.move_to(&self.shop, listener)?;
        }
        if changed_retention.is_some() {
            self.retain(&self.tenant(name)?.record).await;
        }
        self.shown(name)
    }

    /// Has journal and hub keep a tenant's requests for as long as they are to.
    async fn retain(&self, record: &TenantRow) {
        drop(self.shop.recorder.send(Told::Retain(record.id, own_retention(record))).await);
    }

    /// What can be said of a share before an engine is asked: a floor above its ceiling, floors of more than everything.
    fn check_share(
        &self,
        of: Option<&str>,
        model: &Arc<Model>,
        share: ShareAmounts,
    ) -> Result<(), ControlError> {
        if let (Amount::Percent(floor), Amount::Percent(ceiling)) = (share.floor, share.ceiling)
            && floor > ceiling
        {
            let message = format!("floor {} is above ceiling {}", share.floor, share.ceiling);
            return Err(ControlError::new(ErrorCode::FloorAboveCeiling, message)
                .remedy("raise the ceiling or lower the floor"));
        }
        if let Some(ready) = model.state.borrow().model() {
            let spec = share.in_blocks(&ready.info);
            let (floor, pool) = (share.floor_blocks(&ready.info), ready.info.blocks);
            // One that was given when the pool was larger, or unknown, does not stand in the way of other changes.
            let kept =
                of.and_then(|name| self.tenants.get(name)).is_some_and(|t| t.share.floor == share.floor);
            if floor > u64::from(pool) && !kept {
                let others = self.others(of, model).map(|tenant| tenant.share.floor_blocks(&ready.info));
                let (name, sum) = (&model.name, floor + others.sum::<u64>());
                let message =
                    format!("the floors of model `{name}` would be {sum} blocks, and its pool has {pool}");
                return Err(ControlError::new(ErrorCode::FloorsExceedPool, message).remedy(LOWER_A_FLOOR));
            }
            if spec.ceiling == Blocks::ZERO {
                let message = format!(
                    "ceiling {} is less than one block of {} bytes",
                    share.ceiling, ready.info.block_bytes
                );
                return Err(ControlError::new(ErrorCode::InvalidAmount, message).remedy("raise it"));
            }
            if spec.floor > spec.ceiling {
                let message = format!(
                    "floor {} ({} blocks) is above ceiling {} ({} blocks)",
                    share.floor, spec.floor, share.ceiling, spec.ceiling
                );
                return Err(ControlError::new(ErrorCode::FloorAboveCeiling, message));
            }
        }
        let hundredths =
            |amount: Amount| if let Amount::Percent(percent) = amount { percent.hundredths() } else { 0 };
        let others = self.others(of, model);
        let sum = hundredths(share.floor) + others.map(|tenant| hundredths(tenant.share.floor)).sum::<u32>();
        if sum > Percent::ALL.hundredths() {
            let sum = f64::from(sum) / 100.0;
            let message = format!("the floors of model `{}` would be {sum}% of its pool", model.name);
            return Err(ControlError::new(ErrorCode::FloorsExceedPool, message).remedy(LOWER_A_FLOOR));
        }
        Ok(())
    }

    /// The tenants of a model, without the one of this name.
    fn others(&self, of: Option<&str>, model: &Model) -> impl Iterator<Item = &Tenant> {
        self.tenants.values().filter(move |t| t.model.id == model.id && of != Some(t.record.name.as_str()))
    }

    async fn remove(&mut self, remove: TenantRemove) -> Result<Removed, ControlError> {
        let TenantRemove { name, force } = remove;
        if let Some(id) = self.unserved.get(&name).map(|unserved| unserved.record.id) {
            let live = self.live(id).await;
            if live > 0 && !force {
                return Err(ControlError::new(
                    ErrorCode::Busy,
                    format!("tenant `{name}` has {live} requests that wait for its model"),
                )
                .remedy("bring the model back and restart, or use --force to lose them"));
            }
            self.db.with(move |db| db.remove_tenant(id)).await?;
            self.unserved.remove(&name);
            self.restored.retain(|kept| kept.admission.tenant != id);
            drop(self.shop.recorder.send(Told::Forget(id)).await);
            return Ok(Removed { id: id.0, name, cancelled: live });
        }
        let tenant = self.tenant(&name)?;
        let (id, info) = (tenant.record.id, tenant.info(&self.shop));
        // Those of an earlier daemon may not have come to the engine yet.
        let live = self.live(id).await.max(info.running + info.waiting);
        if live > 0 && !force {
            return Err(ControlError::new(
                ErrorCode::Busy,
                format!("tenant `{name}` has {live} running or waiting sequences"),
            )
            .remedy("suspend it and wait, or use --force to cancel them"));
        }
        self.db.with(move |db| db.remove_tenant(id)).await?;
        self.restored.retain(|kept| kept.admission.tenant != id);
        let Some(tenant) = self.tenants.remove(&name) else { return Err(unknown_tenant(&name)) };
        let (tenant_id, model) = (tenant.id(), tenant.model.clone());
        self.shop.forget_listener(id);
        tenant.close(&self.shop, Parting::Removed).await;
        let (sender, done) = oneshot::channel();
        let command = EngineCommand::RemoveTenant {
            tenant: tenant_id,
            reply: Box::new(move |()| {
                let _ = sender.send(());
            }),
        };
        if model.engine.send(command).is_err() || tokio::time::timeout(ENGINE_ANSWER, done).await.is_err() {
            warn!(tenant = name, "the engine did not say that a removed tenant's blocks are back");
        }
        drop(self.shop.recorder.send(Told::Forget(tenant_id)).await);
        Ok(Removed { id: id.0, name, cancelled: live })
    }

    /// Requests of a tenant that have not ended.
    async fn live(&self, tenant: TenantId) -> u32 {
        let (sender, live) = oneshot::channel();
        // The hub ends only with the daemon.
        drop(self.shop.hub.send(Message::Live(tenant, sender)).await);
        live.await.unwrap_or_default()
    }

    async fn suspend(&mut self, name: &str, suspended: bool) -> Result<TenantShown, ControlError> {
        let id = self.tenant(name)?.id();
        let update = TenantUpdate { suspended: Some(suspended), ..TenantUpdate::default() };
        let record = self.db.with(move |db| db.update_tenant(id, &update)).await?;
        if let Some(tenant) = self.tenants.get_mut(name) {
            tenant.record = record;
            tenant.announce();
        }
        self.shown(name)
    }

    async fn create_key(&mut self, create: KeyCreate) -> Result<KeyCreated, ControlError> {
        let KeyCreate { tenant: name, label } = create;
        if label
            .as_ref()
            .is_some_and(|label| label.chars().count() > MAX_LABEL || label.chars().any(char::is_control))
        {
            let message = format!("a label is up to {MAX_LABEL} printable characters");
            return Err(ControlError::new(ErrorCode::InvalidLabel, message));
        }
        let id = self.tenant(&name)?.record.id;
        let (key, row) = self
            .db
            .with(move |db| {
                let key = NewKey::draw()?;
                let row = db.add_key(id, label.as_deref(), &key, now_unix())?;
                Ok((key, row))
            })
            .await?;
        if let Some(tenant) = self.tenants.get_mut(&name) {
            tenant.keys.push(row.clone());
            tenant.announce();
        }
        Ok(key_created(&key, row, name))
    }

    async fn revoke_key(&mut self, revoke: KeyRevoke) -> Result<KeyInfo, ControlError> {
        let KeyRevoke { tenant: name, id } = revoke;
        let tenant = self.tenant(&name)?.record.id;
        let unknown = || {
            ControlError::new(ErrorCode::UnknownKey, format!("tenant `{name}` has no key {id}"))
                .remedy(format!("`pagedctl key list {name}` shows its keys"))
        };
        let record = self
            .db
            .with(move |db| db.revoke_key(tenant, id, now_unix()))
            .await
            .map_err(|e| if e.code == ErrorCode::UnknownKey { unknown() } else { e })?;
        let info = key_info(&record);
        if let Some(tenant) = self.tenants.get_mut(&name) {
            if let Some(key) = tenant.keys.iter_mut().find(|key| key.id == id) {
                *key = record;
            }
            tenant.announce();
        }
        Ok(info)
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
        let of_model = |kept: &mut Kept| kept.admission.saved.model == model.name;
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

/// A retention in milliseconds; `None` is as the configuration says.
fn retention(text: &str) -> Result<Option<u64>, ControlError> {
    if text == "default" {
        return Ok(None);
    }
    let refused = |message| ControlError::new(ErrorCode::InvalidRetention, format!("retention: {message}"));
    let span: Span = text.parse().map_err(|e: SpanError| refused(e.to_string()))?;
    if span.0 > MAX_RETENTION {
        return Err(refused(format!("{span} is more than {}", Span(MAX_RETENTION))));
    }
    Ok(Some(span.0.as_millis() as u64))
}

/// Amounts as given, `before` where nothing is given, and everything where there is no before.
fn share_amounts(
    floor: Option<&str>,
    ceiling: Option<&str>,
    before: Option<ShareAmounts>,
) -> Result<ShareAmounts, ControlError> {
    let parse = |what: &str, text: Option<&str>, before: Option<Amount>, default: Amount| match text {
        None => Ok(before.unwrap_or(default)),
        Some(text) => text
            .parse::<Amount>()
            .map_err(|e| ControlError::new(ErrorCode::InvalidAmount, format!("{what}: {e}"))),
    };
    Ok(ShareAmounts {
        floor: parse("kv_floor", floor, before.map(|b| b.floor), Amount::NOTHING)?,
        ceiling: parse("kv_ceiling", ceiling, before.map(|b| b.ceiling), Amount::EVERYTHING)?,
    })
}

fn key_created(key: &NewKey, row: KeyRow, tenant: String) -> KeyCreated {
    KeyCreated {
        id: row.id,
        tenant,
        label: row.label,
        key: Secret::new(key.reveal().to_owned()),
        prefix: row.prefix,
    }
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
