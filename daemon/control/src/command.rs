//! What can be asked.

use crate::{CheckpointCommand, LimitTexts, QuotaChanges, UsageAsk};
use serde::{Deserialize, Serialize};

/// One line from the client.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Request {
    /// Version the client speaks, [`crate::PROTOCOL`].
    pub protocol: u32,
    /// What is asked.
    #[serde(flatten)]
    pub command: Command,
}

/// Everything that can be asked.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum Command {
    /// Makes a tenant, binds its port and, unless it is open, makes its first key. Answered by [`crate::Reply::TenantAdded`].
    TenantAdd(TenantSpec),
    /// Changes a tenant in place. Answered by [`crate::Reply::Tenant`].
    TenantSet(TenantSet),
    /// Ends a tenant: its requests are cancelled, its keys and its port are gone. Answered by [`crate::Reply::TenantRemoved`].
    TenantRemove(TenantRemove),
    /// Every tenant. Answered by [`crate::Reply::Tenants`].
    TenantList,
    /// One tenant. Answered by [`crate::Reply::Tenant`].
    TenantShow(TenantName),
    /// Refuses new requests; running ones go on. Answered by [`crate::Reply::Tenant`].
    TenantSuspend(TenantName),
    /// Takes requests again. Answered by [`crate::Reply::Tenant`].
    TenantResume(TenantName),
    /// A further key. Answered by [`crate::Reply::KeyCreated`].
    KeyCreate(KeyCreate),
    /// A tenant's keys, without their secrets. Answered by [`crate::Reply::Keys`].
    KeyList(KeyList),
    /// Ends a key at once. Answered by [`crate::Reply::KeyRevoked`].
    KeyRevoke(KeyRevoke),
    /// Refuses new requests of all tenants; what was accepted goes on. Answered at once by [`crate::Reply::Drain`]; how far it has come
    /// stands in the daemon's status.
    Drain(Drain),
    /// Takes requests again. Answered by [`crate::Reply::Drain`].
    Undrain,
    /// The daemon, its models and its tenants. Answered by [`crate::Reply::Status`].
    Status,
    /// Reads the configuration file again. Answered by [`crate::Reply::Reloaded`], or refused by [`crate::ErrorCode::InvalidConfig`] with all as
    /// it was.
    Reload,
    /// Metrics in Prometheus' text format. Answered by [`crate::Reply::Metrics`].
    Metrics,
    /// What tenants have used. Answered by [`crate::Reply::Usage`].
    Usage(UsageAsk),
    /// Writes, shows, checks or takes up a checkpoint; see there for what answers.
    Checkpoint(CheckpointCommand),
}

impl Command {
    /// Every command's name on the wire, for audit lines and metrics' closed label set.
    pub const NAMES: [&'static str; 17] = [
        "tenant_add",
        "tenant_set",
        "tenant_remove",
        "tenant_list",
        "tenant_show",
        "tenant_suspend",
        "tenant_resume",
        "key_create",
        "key_list",
        "key_revoke",
        "drain",
        "undrain",
        "status",
        "reload",
        "metrics",
        "usage",
        "checkpoint",
    ];

    /// The name on the wire.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::TenantAdd(_) => "tenant_add",
            Self::TenantSet(_) => "tenant_set",
            Self::TenantRemove(_) => "tenant_remove",
            Self::TenantList => "tenant_list",
            Self::TenantShow(_) => "tenant_show",
            Self::TenantSuspend(_) => "tenant_suspend",
            Self::TenantResume(_) => "tenant_resume",
            Self::KeyCreate(_) => "key_create",
            Self::KeyList(_) => "key_list",
            Self::KeyRevoke(_) => "key_revoke",
            Self::Drain(_) => "drain",
            Self::Undrain => "undrain",
            Self::Status => "status",
            Self::Reload => "reload",
            Self::Metrics => "metrics",
            Self::Usage(_) => "usage",
            Self::Checkpoint(_) => "checkpoint",
        }
    }

    /// Whether carrying it out changes anything.
    #[must_use]
    pub const fn changes(&self) -> bool {
        match self {
            Self::TenantAdd(_)
            | Self::TenantSet(_)
            | Self::TenantRemove(_)
            | Self::TenantSuspend(_)
            | Self::TenantResume(_)
            | Self::KeyCreate(_)
            | Self::KeyRevoke(_)
            | Self::Drain(_)
            | Self::Undrain
            | Self::Reload => true,
            Self::TenantList
            | Self::TenantShow(_)
            | Self::KeyList(_)
            | Self::Status
            | Self::Metrics
            | Self::Usage(_) => false,
            Self::Checkpoint(command) => command.changes(),
        }
    }

    /// The tenant that it is about, where it is about one.
    #[must_use]
    pub fn tenant(&self) -> Option<&str> {
        match self {
            Self::TenantAdd(TenantSpec { name, .. })
            | Self::TenantSet(TenantSet { name, .. })
            | Self::TenantRemove(TenantRemove { name, .. })
            | Self::TenantShow(TenantName { name })
            | Self::TenantSuspend(TenantName { name })
            | Self::TenantResume(TenantName { name }) => Some(name),
            Self::KeyCreate(KeyCreate { tenant, .. })
            | Self::KeyList(KeyList { tenant })
            | Self::KeyRevoke(KeyRevoke { tenant, .. }) => Some(tenant),
            Self::Usage(UsageAsk { tenant, .. }) => tenant.as_deref(),
            Self::TenantList
            | Self::Drain(_)
            | Self::Undrain
            | Self::Status
            | Self::Reload
            | Self::Metrics
            | Self::Checkpoint(_) => None,
        }
    }
}

/// A tenant to be made.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TenantSpec {
    /// Its name: 1 to 63 characters of `a-z`, `0-9` and `-`, beginning with a letter.
    pub name: String,
    /// Its TCP port; `None` takes the next free one from 8101 up.
    pub port: Option<u16>,
    /// The model it uses; `None` where one only is configured.
    pub model: Option<String>,
    /// Guaranteed share of the model's KV blocks, as an amount (`20%`, `2GiB`, `4096 tokens`); `None` is nothing.
    pub kv_floor: Option<String>,
    /// Most of the model's KV blocks that it can hold, as an amount; `None` is the whole pool.
    pub kv_ceiling: Option<String>,
    /// Whether its port takes requests without a key.
    pub no_auth: bool,
    /// Whether its sequences guess what they say next; `None` is as its model's configuration says.
    pub prompt_lookup: Option<bool>,
    /// How long its requests are kept after their end (`10m`, `0s`); `None` is as the configuration says.
    pub retention: Option<String>,
    /// What it may ask for.
    #[serde(default, skip_serializing_if = "QuotaChanges::is_empty")]
    pub quotas: QuotaChanges,
    /// Limits of its processes.
    #[serde(default)]
    pub limits: Box<LimitTexts>,
}

/// Changes to a tenant.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TenantSet {
    /// Which tenant.
    pub name: String,
    /// What changes.
    pub changes: TenantChanges,
    /// Whether a limit may be below what is in use; without it the daemon answers [`crate::ErrorCode::BelowUse`].
    #[serde(default)]
    pub force: bool,
}

/// What changes about a tenant; `None` leaves it as it is.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct TenantChanges {
    /// Another TCP port. Streams on the old one end with an event that says how to attach again, on the new one.
    pub port: Option<u16>,
    /// Another floor, as an amount (`0%` takes it away).
    pub kv_floor: Option<String>,
    /// Another ceiling, as an amount (`100%` takes it away).
    pub kv_ceiling: Option<String>,
    /// Whether a key is needed from now on.
    pub auth: Option<bool>,
    /// Whether its sequences guess what they say next, from their next step on.
    pub prompt_lookup: Option<bool>,
    /// How long its requests are kept after their end, those too that have ended before (`10m`, `0s`, or `default` for what the
    /// configuration says).
    pub retention: Option<String>,
    /// What it may ask for. What was used before counts.
    #[serde(default, skip_serializing_if = "QuotaChanges::is_empty")]
    pub quotas: QuotaChanges,
    /// Other limits of its processes; `max` and `default` take one away.
    #[serde(default)]
    pub limits: Box<LimitTexts>,
}

impl TenantChanges {
    /// Whether nothing changes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// An end of admission.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Drain {
    /// How long whoever asked will wait for it, in milliseconds; others are shown when that is over. `None` is without a limit.
    pub timeout_ms: Option<u64>,
}

/// The end of a tenant.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TenantRemove {
    /// Which tenant.
    pub name: String,
    /// Whether running requests are cancelled; without it the daemon answers [`crate::ErrorCode::Busy`] while there are any.
    pub force: bool,
}

/// Names a tenant.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TenantName {
    /// Which tenant.
    pub name: String,
}

/// A key to be made.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct KeyCreate {
    /// Whose key.
    pub tenant: String,
    /// What the operator calls it; up to 100 characters.
    pub label: Option<String>,
}

/// Asks for a tenant's keys.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct KeyList {
    /// Whose keys.
    pub tenant: String,
}

/// The end of a key.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct KeyRevoke {
    /// Whose key.
    pub tenant: String,
    /// Which, by its id in `key list`.
    pub id: u32,
}
