//! Orders about tenants and their keys.

use std::sync::Arc;
use std::time::Instant;

use pagedd_config::{
    Amount, FIRST_TENANT_PORT, MAX_RETENTION, Percent, Span, SpanError, TenantName as CheckedName,
};
use pagedd_control::{
    ControlError, DrainState, ErrorCode, KeyCreate, KeyCreated, KeyInfo, KeyRevoke, MAX_LABEL, MAX_QUOTA,
    QuotaChanges, QuotaLimit, Removed, Secret, TenantAdded, TenantRemove, TenantSet, TenantShown, TenantSpec,
};
use pagedd_core::{Blocks, CgroupLimits, Quota, Quotas, TenantId};
use pagedd_engine::Command as EngineCommand;
use pagedd_journal::{KeyRow, NewKey, NewTenant, TenantRow, TenantUpdate};
use pagedd_wire::gateway::Parting;
use tokio::sync::oneshot;
use tracing::{error, warn};

use super::{Daemon, key_info, now_unix, unknown_tenant};
use crate::hub::Message;
use crate::model::Model;
use crate::recorder::Told;
use crate::tenants::{ENGINE_ANSWER, LOWER_A_FLOOR, Place, ShareAmounts, Tenant, Unserved, own_retention};
use crate::walls;

impl Daemon {
    pub(super) async fn add(&mut self, spec: TenantSpec) -> Result<TenantAdded, ControlError> {
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
        let limits = walls::changed(&CgroupLimits::default(), &spec.limits)?;
        let retention_ms = spec.retention.as_deref().map(retention).transpose()?.flatten();
        let quotas = quotas(Quotas::default(), spec.quotas)?;
        let (port, listener) = self.port(spec.port)?;
        let user = self.shop.user(Instant::now()).await;
        let user = user.map_err(|error| ControlError::new(ErrorCode::Internal, error.to_string()))?;
        // Last of what can be refused: it is made in the kernel.
        let wall = self.shop.walls.tenant(&name, limits).await?;
        let new = NewTenant {
            name: name.clone(),
            port,
            model: model.name.clone(),
            kv_floor: share.floor.to_string(),
            kv_ceiling: share.ceiling.to_string(),
            auth: !spec.no_auth,
            prompt_lookup: spec.prompt_lookup,
            retention_ms,
            quotas,
            limits: walls::saved(wall.limits()),
        };
        let added = self
            .db
            .with(move |db| {
                let key = if new.auth { Some(NewKey::draw()?) } else { None };
                let (record, row) = db.add_tenant(&new, key.as_ref(), now_unix())?;
                Ok((record, key.zip(row)))
            })
            .await;
        let (record, key) = match added {
            Ok(added) => added,
            Err(error) => {
                wall.remove().await;
                return Err(error);
            }
        };
        let keys = key.iter().map(|(_, row)| row.clone()).collect();
        self.shop.keep_listener(record.id, &listener);
        let place = Place { listener, user, wall };
        let tenant = self.shop.open(record.clone(), keys, share, &model, place);
        if let Err(error) = tenant.apply(share, record.prompt_lookup).await {
            self.shop.forget_listener(record.id);
            self.shop.accounts.forget(record.id);
            tenant.close(Parting::Removed).await;
            // The engine may know it already, or learn of it late.
            drop(
                model
                    .engine
                    .send(EngineCommand::RemoveTenant { tenant: record.id, reply: Box::new(|()| {}) }),
            );
            if let Err(left) = self.db.with(move |db| db.remove_tenant(record.id)).await {
                error!(tenant = name, error = %left, "a tenant that was not added is in control.db: it is there at the next start");
            }
            return Err(error);
        }
        let info = tenant.info(&self.shop);
        self.retain(&tenant.record).await;
        self.tenants.insert(name.clone(), tenant);
        let walls = self.tenant(&name)?.wall.unmet().map(|reason| format!("NOT ENFORCED: {reason}"));
        let notes = walls.chain(self.drain_note()).collect();
        Ok(TenantAdded { tenant: info, key: key.map(|(key, row)| key_created(&key, row, name)), notes })
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

    pub(super) async fn set(&mut self, set: TenantSet) -> Result<TenantShown, ControlError> {
        let TenantSet { name, changes, force } = set;
        let name = name.as_str();
        let tenant = self.tenant(name)?;
        let limits_before = tenant.wall.limits().clone();
        let limits = walls::changed(&limits_before, &changes.limits)?;
        let changed_retention = changes.retention.as_deref().map(retention).transpose()?;
        let changed_quotas = quotas(tenant.record.quotas, changes.quotas)?;
        let (before, model) = (tenant.share, tenant.model.clone());
        let share = share_amounts(changes.kv_floor.as_deref(), changes.kv_ceiling.as_deref(), Some(before))?;
        self.check_share(Some(name), &model, share)?;
        let listener = match changes.port.filter(|port| *port != tenant.record.port) {
            Some(port) => Some(self.port(Some(port))?),
            None => None,
        };
        let prompt_lookup = changes.prompt_lookup.or(tenant.record.prompt_lookup);
        self.confine(name, limits.clone(), force).await?;
        if let Err(error) = self.tenant(name)?.apply(share, prompt_lookup).await {
            self.confine_again(name, limits_before).await;
            return Err(error);
        }
        let update = TenantUpdate {
            port: listener.as_ref().map(|(port, _)| *port),
            kv_floor: Some(share.floor.to_string()),
            kv_ceiling: Some(share.ceiling.to_string()),
            auth: changes.auth,
            suspended: None,
            prompt_lookup,
            retention_ms: changed_retention,
            quotas: Some(changed_quotas),
            limits: (limits != limits_before).then(|| walls::saved(&limits)),
        };
        let id = self.tenant(name)?.id();
        let written = self.db.with(move |db| db.update_tenant(id, &update)).await;
        let tenant = self.tenants.get_mut(name).ok_or_else(|| unknown_tenant(name))?;
        match written {
            Ok(record) => tenant.record = record,
            Err(error) => {
                if let Err(kept) = tenant.apply(before, tenant.record.prompt_lookup).await {
                    error!(tenant = name, error = %kept, "what was refused is in force until the next start: its share");
                }
                self.confine_again(name, limits_before).await;
                return Err(error);
            }
        }
        tenant.share = share;
        tenant.set_misfit(None);
        tenant.announce();
        if let Some((_, listener)) = listener {
            tenant.move_to(&self.shop, listener);
        }
        if changed_retention.is_some() {
            self.retain(&self.tenant(name)?.record).await;
        }
        let tenant = self.tenant(name)?;
        self.shop.accounts.of(tenant.id()).set(changed_quotas);
        let keyless = tenant.record.auth && tenant.keys.iter().all(|key| key.revoked_unix.is_some());
        let note = keyless.then(|| {
            format!("nobody has a key: every request is refused with 401 until `pagedctl key create {name}` makes one")
        });
        Ok(TenantShown { notes: note.into_iter().collect(), ..self.shown(name).await? })
    }

    /// What the operator of a new tenant should know of a daemon that admits nothing.
    fn drain_note(&self) -> Option<String> {
        match self.drain {
            DrainState::Admitting => None,
            DrainState::Draining { .. } => {
                Some("the daemon is being drained: no request is taken before `pagedctl undrain`".to_owned())
            }
            DrainState::Stopping { .. } => {
                Some("the daemon goes down: requests are taken after its next start".to_owned())
            }
        }
    }

    /// Puts a tenant's limits into force.
    async fn confine(&mut self, name: &str, limits: CgroupLimits, force: bool) -> Result<(), ControlError> {
        let walls = self.shop.walls.clone();
        let tenant = self.tenants.get_mut(name).ok_or_else(|| unknown_tenant(name))?;
        tenant.wall.change(&walls, limits, force).await
    }

    /// Puts limits back into force that were before those of an order that is refused.
    async fn confine_again(&mut self, name: &str, before: CgroupLimits) {
        if let Err(error) = self.confine(name, before, true).await {
            error!(tenant = name, %error, "what was refused is in force until the next start: its limits");
        }
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

    pub(super) async fn remove(&mut self, remove: TenantRemove) -> Result<Removed, ControlError> {
        let TenantRemove { name, force } = remove;
        if let Some(Unserved { record, lacks, .. }) = self.unserved.get(&name) {
            let (id, remedy) = (record.id, lacks.remedy());
            let live = self.live(id).await;
            if live > 0 && !force {
                return Err(ControlError::new(
                    ErrorCode::Busy,
                    format!("tenant `{name}` is not served, and has {live} requests that wait for it"),
                )
                .remedy(format!("{remedy}, or use --force to lose them")));
            }
            self.db.with(move |db| db.remove_tenant(id)).await?;
            self.unserved.remove(&name);
            self.restored.retain(|kept| kept.admission.tenant != id);
            self.shop.walls.forget(&name).await;
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
        tenant.close(Parting::Removed).await;
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

    pub(super) async fn suspend(&mut self, name: &str, suspended: bool) -> Result<TenantShown, ControlError> {
        let id = self.tenant(name)?.id();
        let update = TenantUpdate { suspended: Some(suspended), ..TenantUpdate::default() };
        let record = self.db.with(move |db| db.update_tenant(id, &update)).await?;
        if let Some(tenant) = self.tenants.get_mut(name) {
            tenant.record = record;
            tenant.announce();
        }
        self.shown(name).await
    }

    pub(super) async fn create_key(&mut self, create: KeyCreate) -> Result<KeyCreated, ControlError> {
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

    pub(super) async fn revoke_key(&mut self, revoke: KeyRevoke) -> Result<KeyInfo, ControlError> {
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

/// Quotas as they are after a change.
fn quotas(mut quotas: Quotas, changes: QuotaChanges) -> Result<Quotas, ControlError> {
    let QuotaChanges {
        requests_per_minute,
        tokens_per_minute,
        max_concurrent,
        max_queued_requests,
        max_queued_tokens,
    } = changes;
    for (quota, change) in [
        (Quota::RequestsPerMinute, requests_per_minute),
        (Quota::TokensPerMinute, tokens_per_minute),
        (Quota::MaxConcurrent, max_concurrent),
        (Quota::MaxQueuedRequests, max_queued_requests),
        (Quota::MaxQueuedTokens, max_queued_tokens),
    ] {
        match change {
            None => {}
            Some(QuotaLimit::None) => quotas.set(quota, None),
            Some(QuotaLimit::At(limit)) if (1..=MAX_QUOTA).contains(&limit) => quotas.set(quota, Some(limit)),
            Some(QuotaLimit::At(limit)) => {
                let message = format!("{quota} is {limit}, it must be from 1 to {MAX_QUOTA}");
                return Err(ControlError::new(ErrorCode::InvalidQuota, message)
                    .remedy("to take no requests at all, use `pagedctl tenant suspend`"));
            }
        }
    }
    Ok(quotas)
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
