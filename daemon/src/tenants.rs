//! The tenants that exist, and everything that one of them is made of while the daemon runs.
//!
//! **Owns** the tenants' ports and the tasks that keep their gateways running. What can refuse a change is asked first, control.db says that it
//! is made, and what was asked before is taken back where a later part refuses.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pagedd_config::{Amount, Span};
use pagedd_control::{
    ControlError, ErrorCode, GatewayInfo, GatewayState as ShownGateway, QuotaInfo, QuotaUse, ShareInfo,
    TenantInfo, TenantState,
};
use pagedd_core::{Blocks, Bytes, Quota, TenantId, Tokens};
use pagedd_engine::Command;
use pagedd_host::fdstore::FdStore;
use pagedd_host::identity::{IdentityError, Lender, Lent};
use pagedd_host::net::{BindError, bind_tcp};
use pagedd_journal::{KeyRow, TenantRow};
use pagedd_sched::{ShareError, ShareSpec};
use pagedd_wire::gateway::{KeyEntry, Parting};
use pagedd_wire::worker::ModelInfo;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tracing::warn;

use crate::gateway::{GatewayLimits, GatewayState, GatewayTask, Going, TenantFacts};
use crate::hub::{Message, Ticket};
use crate::metrics::Exporter;
use crate::model::Model;
use crate::ports;
use crate::quota::Accounts;
use crate::recorder::Told;
use crate::walls::{TenantWall, Walls};
use crate::worker::ModelState;

/// How long an engine may take to answer an admin command: nobody else is obeyed meanwhile.
pub const ENGINE_ANSWER: Duration = Duration::from_secs(10);

/// Between two looks for a free user id.
const USER_RETRY: Duration = Duration::from_millis(50);

/// What helps where floors do not fit the pool.
pub const LOWER_A_FLOOR: &str = "lower this floor or another tenant's; `pagedctl tenant list` shows them";

/// A tenant that runs.
pub struct Tenant {
    /// As control.db has it.
    pub record: TenantRow,
    /// Its keys, revoked ones too.
    pub keys: Vec<KeyRow>,
    /// What it serves.
    pub model: Arc<Model>,
    /// Its floor and ceiling, as amounts.
    pub share: ShareAmounts,
    /// Its limits, and the cgroup that keeps them.
    pub wall: TenantWall,
    /// The user of its gateways, where the daemon may choose.
    user: Option<Arc<Lent>>,
    listener: Arc<OwnedFd>,
    facts: watch::Sender<TenantFacts>,
    gateway: watch::Receiver<(GatewayState, u32)>,
    task: JoinHandle<()>,
}

/// A tenant that is known and cannot run. Its port is not bound.
pub struct Unserved {
    /// As control.db has it.
    pub record: TenantRow,
    /// Keys that are not revoked.
    pub keys: u32,
    /// What it lacks.
    pub lacks: Lack,
}

/// What a tenant cannot run without.
#[derive(Debug)]
pub enum Lack {
    /// Its model is not configured.
    Model,
    /// It has no cgroup, and the configuration requires one.
    Wall(ControlError),
    /// There is no user id for its gateways.
    User(IdentityError),
}

impl Lack {
    /// In words, of this tenant.
    pub fn reason(&self, record: &TenantRow) -> String {
        match self {
            Self::Model => format!("its model `{}` is not configured", record.model),
            Self::Wall(error) => error.message.clone(),
            Self::User(error) => error.to_string(),
        }
    }

    /// What an operator does to have the tenant back.
    pub const fn remedy(&self) -> &'static str {
        match self {
            Self::Model => "add the model to the configuration and restart",
            Self::Wall(_) => "mend what it says, or set `cgroups: auto`, and restart",
            Self::User(_) => "widen `tenant_uids` and restart",
        }
    }
}

impl Unserved {
    /// Why an order cannot be carried out, and what helps.
    pub fn error(&self) -> ControlError {
        let name = &self.record.name;
        let message = format!("tenant `{name}` is not served: {}", self.lacks.reason(&self.record));
        let code = match &self.lacks {
            Lack::Model => ErrorCode::UnknownModel,
            Lack::Wall(error) => error.code,
            Lack::User(_) => ErrorCode::Internal,
        };
        ControlError::new(code, message).remedy(format!(
            "{}, or remove the tenant with `pagedctl tenant remove {name}`",
            self.lacks.remedy()
        ))
    }

    /// As `pagedctl` shows it.
    pub fn info(&self, shop: &TenantShop) -> TenantInfo {
        let TenantRow {
            id, name, port, model, kv_floor, kv_ceiling, auth, created_unix, prompt_lookup, ..
        } = &self.record;
        let error = self.lacks.reason(&self.record);
        TenantInfo {
            id: id.0,
            name: name.clone(),
            state: TenantState::Failed { error: error.clone() },
            port: *port,
            url: format!("http://{}", SocketAddr::new(shop.address, *port)),
            model: model.clone(),
            auth: *auth,
            keys: self.keys,
            share: ShareInfo {
                floor: kv_floor.clone(),
                ceiling: kv_ceiling.clone(),
                floor_blocks: None,
                ceiling_blocks: None,
                held_blocks: 0,
                cached_blocks: 0,
            },
            prompt_lookup: prompt_lookup.unwrap_or(true),
            retention: shop.retention(&self.record).to_string(),
            quotas: shop.quotas(&self.record),
            running: 0,
            waiting: 0,
            gateway: GatewayInfo { state: ShownGateway::Failed { error }, pid: None, restarts: 0 },
            created_unix: *created_unix,
        }
    }
}

/// A floor and a ceiling as amounts.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct ShareAmounts {
    /// Guaranteed.
    pub floor: Amount,
    /// At most.
    pub ceiling: Amount,
}

impl ShareAmounts {
    /// In blocks of a model's pool.
    pub fn in_blocks(self, info: &ModelInfo) -> ShareSpec {
        let blocks = |amount: Amount| {
            amount
                .in_blocks(Blocks(info.blocks), Bytes(info.block_bytes), Tokens(info.block_size))
                .min(Blocks(info.blocks))
        };
        ShareSpec { floor: blocks(self.floor), ceiling: blocks(self.ceiling) }
    }

    /// Blocks of the floor, also where the pool has fewer.
    pub fn floor_blocks(self, info: &ModelInfo) -> u64 {
        let floor =
            self.floor.in_blocks(Blocks(info.blocks), Bytes(info.block_bytes), Tokens(info.block_size));
        u64::from(floor.0)
    }
}

/// Where a tenant's gateways run, and nobody else's.
pub struct Place {
    /// Bound to its port.
    pub listener: OwnedFd,
    /// Its uid and gid, where the daemon may choose.
    pub user: Option<Arc<Lent>>,
    /// Its limits, and the cgroup that keeps them.
    pub wall: TenantWall,
}

/// What every tenant is built with.
pub struct TenantShop {
    /// Address of every port.
    pub address: IpAddr,
    /// Holds the ports over a restart of the daemon.
    pub store: Arc<FdStore>,
    /// Delivery.
    pub hub: mpsc::Sender<Message>,
    /// The journal's thread.
    pub recorder: mpsc::Sender<Told>,
    /// Metrics.
    pub exporter: Exporter,
    /// What tenants have used of their quotas.
    pub accounts: Accounts,
    /// Limits of every gateway.
    pub limits: GatewayLimits,
    /// How a gateway that is started now stands: a drain holds for those that come later, too.
    pub going: Going,
    /// How long requests are kept after their end, of tenants that have no time of their own.
    pub retention: Duration,
    /// Gives every gateway a user of its own; `None` where the daemon may not choose.
    pub users: Option<Lender>,
    /// Where gateways' cgroups are.
    pub walls: Arc<Walls>,
}

impl TenantShop {
    /// Binds a port.
    pub fn bind(&self, port: u16) -> Result<OwnedFd, ControlError> {
        bind_tcp(self.address, port).map(OwnedFd::from).map_err(|e| {
            let code = match e {
                BindError::PortInUse { .. } => ErrorCode::PortInUse,
                BindError::Privileged { .. } | BindError::NoSuchAddress { .. } | BindError::Io { .. } => {
                    ErrorCode::InvalidPort
                }
            };
            ControlError::new(code, e.to_string())
        })
    }

    /// Has the port kept over a restart of the daemon.
    pub fn keep_listener(&self, tenant: TenantId, listener: &OwnedFd) {
        ports::keep(&self.store, tenant, listener);
    }

    /// Lets the store forget a port.
    pub fn forget_listener(&self, tenant: TenantId) {
        ports::forget(&self.store, tenant);
    }

    /// How long a tenant's requests are kept after their end.
    fn retention(&self, record: &TenantRow) -> Span {
        Span(own_retention(record).unwrap_or(self.retention))
    }

    /// How a tenant's quotas stand.
    fn quotas(&self, record: &TenantRow) -> QuotaInfo {
        let account = self.accounts.of(record.id);
        let standing = |quota: Quota| {
            let (_, used, refused) = account.standing(quota);
            QuotaUse { limit: record.quotas.get(quota), used, refused }
        };
        QuotaInfo {
            requests_per_minute: standing(Quota::RequestsPerMinute),
            tokens_per_minute: standing(Quota::TokensPerMinute),
            max_concurrent: standing(Quota::MaxConcurrent),
            max_queued_requests: standing(Quota::MaxQueuedRequests),
            max_queued_tokens: standing(Quota::MaxQueuedTokens),
        }
    }

    /// A user for a tenant's gateways. Until then those are waited for that have ids of an earlier daemon still.
    ///
    /// # Errors
    /// There is none.
    pub async fn user(&self, until: Instant) -> Result<Option<Arc<Lent>>, IdentityError> {
        loop {
            match self.users.as_ref().map(Lender::lend).transpose() {
                Err(IdentityError::Occupied { .. }) if Instant::now() < until => {
                    tokio::time::sleep(USER_RETRY).await;
                }
                lent => return lent,
            }
        }
    }

    /// Starts a tenant on its port, inside its wall.
    pub fn open(
        &self,
        record: TenantRow,
        keys: Vec<KeyRow>,
        share: ShareAmounts,
        model: &Arc<Model>,
        place: Place,
    ) -> Tenant {
        let Place { listener, user, wall } = place;
        let listener = Arc::new(listener);
        let facts = watch::Sender::new(TenantFacts {
            keys: key_entries(&record, &keys),
            suspended: record.suspended,
            going: self.going,
            parting: Parting::Restarting,
            misfit: None,
            readmitting: false,
            limits: self.limits,
        });
        let state = watch::Sender::new((GatewayState::Starting, 0));
        let gateway = state.subscribe();
        let account = self.accounts.of(record.id);
        account.set(record.quotas);
        let task = GatewayTask {
            account,
            tenant: record.id,
            name: record.name.clone(),
            user: user.clone(),
            cgroup: wall.cgroup(),
            listener: listener.clone(),
            model: model.clone(),
            facts: facts.subscribe(),
            state,
            hub: self.hub.clone(),
            recorder: self.recorder.clone(),
            exporter: self.exporter.clone(),
            broken: None,
        };
        let task = tokio::spawn(task.run());
        let model = model.clone();
        Tenant { record, keys, model, share, wall, user, listener, facts, gateway, task }
    }
}

/// How long a tenant's requests are kept after their end, where it has a time of its own.
pub fn own_retention(record: &TenantRow) -> Option<Duration> {
    record.retention_ms.map(Duration::from_millis)
}

fn key_entries(record: &TenantRow, keys: &[KeyRow]) -> Option<Vec<KeyEntry>> {
    let live = keys.iter().filter(|key| key.revoked_unix.is_none());
    record.auth.then(|| live.map(|key| KeyEntry { id: key.id, sha256: key.digest.0 }).collect())
}

impl Tenant {
    /// Its id.
    pub fn id(&self) -> TenantId {
        self.record.id
    }

    /// Has the gateway told what changed.
    pub fn announce(&self) {
        self.facts.send_if_modified(|facts| {
            let now = TenantFacts {
                keys: key_entries(&self.record, &self.keys),
                suspended: self.record.suspended,
                ..facts.clone()
            };
            let changed = *facts != now;
            *facts = now;
            changed
        });
    }

    /// Why it cannot be served, or that it can.
    pub fn set_misfit(&self, misfit: Option<String>) {
        self.facts.send_if_modified(|facts| {
            let changed = facts.misfit != misfit;
            facts.misfit = misfit;
            changed
        });
    }

    /// Requests of an earlier daemon enter, and new ones after them.
    pub fn set_readmitting(&self, readmitting: bool) {
        self.facts.send_modify(|facts| facts.readmitting = readmitting);
    }

    /// Its gateway has other limits from now on.
    pub fn set_limits(&self, limits: GatewayLimits) {
        self.facts.send_modify(|facts| facts.limits = limits);
    }

    /// Its gateway ends, and says why.
    pub fn part(&self, parting: Parting) {
        self.facts.send_modify(|facts| (facts.going, facts.parting) = (Going::Down, parting));
    }

    /// How far the daemon's end has come.
    pub fn set_going(&self, going: Going) {
        self.facts.send_modify(|facts| facts.going = going);
    }

    /// Moves to another port. Streams on the old one end with an event that says how to attach again, on the new one.
    pub fn move_to(&mut self, shop: &TenantShop, listener: OwnedFd) {
        let (model, user) = (self.model.clone(), self.user.clone());
        let TenantFacts { misfit, readmitting, .. } = self.facts.borrow().clone();
        let place = Place { listener, user, wall: self.wall.clone() };
        let moved = shop.open(self.record.clone(), self.keys.clone(), self.share, &model, place);
        moved.set_misfit(misfit);
        moved.set_readmitting(readmitting);
        let old = std::mem::replace(self, moved);
        old.part(Parting::Moved { port: self.record.port });
        shop.forget_listener(self.record.id);
        shop.keep_listener(self.record.id, &self.listener);
    }

    /// Ends the gateway, which says why, and gives the port back.
    pub async fn close(self, parting: Parting) {
        self.part(parting);
        if let Err(error) = self.task.await {
            warn!(tenant = self.record.name, %error, "gateway task");
        }
        self.wall.remove().await;
    }

    /// Puts share and switches into force, once the model's pool has a size.
    pub async fn apply(&self, share: ShareAmounts, prompt_lookup: Option<bool>) -> Result<(), ControlError> {
        let Some(info) = self.model.state.borrow().model().map(|model| model.info.clone()) else {
            return Ok(());
        };
        let (command, answer) = self.set_command(share.in_blocks(&info), prompt_lookup);
        self.model.engine.send(command).map_err(|_| self.busy())?;
        let Ok(answered) = tokio::time::timeout(ENGINE_ANSWER, answer).await else {
            // The engine will still get to it: what is in force then is to be what the caller goes on with.
            let (back, _) = self.set_command(self.share.in_blocks(&info), self.record.prompt_lookup);
            drop(self.model.engine.send(back));
            return Err(self.busy());
        };
        answered.map_err(|_| self.busy())?.map_err(|e| {
            ControlError::new(ErrorCode::FloorsExceedPool, format!("tenant `{}`: {e}", self.record.name))
                .remedy(LOWER_A_FLOOR)
        })
    }

    fn busy(&self) -> ControlError {
        let message = format!("the engine of model `{}` does not answer", self.model.name);
        ControlError::new(ErrorCode::Busy, message)
            .remedy("try again; `pagedctl status` shows the model's state")
    }

    fn set_command(
        &self,
        share: ShareSpec,
        prompt_lookup: Option<bool>,
    ) -> (Command<Box<Ticket>>, oneshot::Receiver<Result<(), ShareError>>) {
        let (sender, answer) = oneshot::channel();
        let reply = Box::new(move |result| {
            let _ = sender.send(result);
        });
        (Command::SetTenant { tenant: self.id(), share, prompt_lookup, reply }, answer)
    }

    /// Bytes of its model's device that its blocks take.
    pub fn device_bytes(&self) -> u64 {
        let stats = self.model.stats.borrow();
        let blocks = stats.scheduler.tenant(self.id()).map_or(0, |numbers| numbers.held.0 + numbers.cached.0);
        let state = self.model.state.borrow();
        state.model().map_or(0, |model| u64::from(blocks) * model.info.block_bytes)
    }

    /// As `pagedctl` shows it.
    pub fn info(&self, shop: &TenantShop) -> TenantInfo {
        let (gateway, starts) = self.gateway.borrow().clone();
        let facts = self.facts.borrow();
        let stats = self.model.stats.borrow();
        let numbers = stats.scheduler.tenant(self.id());
        let model_state = self.model.state.borrow();
        let spec = model_state.model().map(|model| self.share.in_blocks(&model.info));
        let state = if let Some(error) = &facts.misfit {
            TenantState::Failed { error: error.clone() }
        } else if facts.suspended {
            TenantState::Suspended
        } else if facts.going > Going::Not {
            TenantState::Draining
        } else {
            match (&*model_state, &gateway) {
                (ModelState::Failed { error }, _) | (_, GatewayState::Failed(error)) => {
                    TenantState::Failed { error: error.clone() }
                }
                (ModelState::Ready(_) | ModelState::Restarting { .. }, GatewayState::Running { .. }) => {
                    TenantState::Ready
                }
                (ModelState::Loading { .. }, _) | (_, GatewayState::Starting | GatewayState::Restarting) => {
                    TenantState::Starting
                }
            }
        };
        let restarts = starts.saturating_sub(1);
        let (shown, pid) = match gateway {
            GatewayState::Starting => (ShownGateway::Starting, None),
            GatewayState::Running { pid } => (ShownGateway::Running, Some(pid)),
            GatewayState::Restarting => (ShownGateway::Restarting { attempt: starts.max(1) }, None),
            GatewayState::Failed(error) => (ShownGateway::Failed { error }, None),
        };
        TenantInfo {
            id: self.record.id.0,
            name: self.record.name.clone(),
            state,
            port: self.record.port,
            url: format!("http://{}", SocketAddr::new(shop.address, self.record.port)),
            model: self.model.name.clone(),
            auth: self.record.auth,
            keys: self.keys.iter().filter(|key| key.revoked_unix.is_none()).count() as u32,
            share: ShareInfo {
                floor: self.share.floor.to_string(),
                ceiling: self.share.ceiling.to_string(),
                floor_blocks: spec.map(|spec| spec.floor.0),
                ceiling_blocks: spec.map(|spec| spec.ceiling.0),
                held_blocks: numbers.map_or(0, |n| n.held.0),
                cached_blocks: numbers.map_or(0, |n| n.cached.0),
            },
            prompt_lookup: self.record.prompt_lookup.unwrap_or(self.model.live.borrow().tuning.prompt_lookup),
            retention: shop.retention(&self.record).to_string(),
            quotas: shop.quotas(&self.record),
            running: numbers.map_or(0, |n| n.running),
            waiting: numbers.map_or(0, |n| n.waiting),
            gateway: GatewayInfo { state: shown, pid, restarts },
            created_unix: self.record.created_unix,
        }
    }
}
