//! What is answered.

use crate::{
    CheckpointInfo, CheckpointListed, CheckpointRestoring, CheckpointShown, ControlError, QuotaInfo,
    UsageReport,
};
use serde::{Deserialize, Serialize};
use std::fmt;

/// One line from the daemon.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[expect(clippy::large_enum_variant, reason = "one lives at a time, between a line and its handling")]
pub enum Response {
    /// It was done.
    Ok(Reply),
    /// It was not, and nothing has changed.
    Err(ControlError),
}

impl From<Result<Reply, ControlError>> for Response {
    fn from(result: Result<Reply, ControlError>) -> Self {
        match result {
            Ok(reply) => Self::Ok(reply),
            Err(error) => Self::Err(error),
        }
    }
}

impl From<Response> for Result<Reply, ControlError> {
    fn from(response: Response) -> Self {
        match response {
            Response::Ok(reply) => Ok(reply),
            Response::Err(error) => Err(error),
        }
    }
}

/// Everything that can be answered.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// To `tenant_add`.
    TenantAdded(TenantAdded),
    /// To `tenant_show`, `tenant_set`, `tenant_suspend` and `tenant_resume`: the tenant as it is now.
    Tenant(TenantShown),
    /// To `tenant_list`, by name.
    Tenants(TenantListed),
    /// To `tenant_remove`.
    TenantRemoved(Removed),
    /// To `key_create`.
    KeyCreated(KeyCreated),
    /// To `key_list`, oldest first.
    Keys(KeyListed),
    /// To `key_revoke`: the key as it is now.
    KeyRevoked(KeyInfo),
    /// To `drain` and `undrain`: how it stands now.
    Drain(DrainInfo),
    /// To `status`.
    Status(StatusInfo),
    /// To `metrics`.
    Metrics(MetricsText),
    /// To `usage`.
    Usage(UsageReport),
    /// To `checkpoint` to be saved.
    CheckpointSaved(CheckpointInfo),
    /// To `checkpoint` to be listed.
    Checkpoints(CheckpointListed),
    /// To `checkpoint` to be inspected.
    Checkpoint(CheckpointShown),
    /// To `checkpoint` to be verified: nothing is wrong with it.
    CheckpointWhole(CheckpointInfo),
    /// To `checkpoint` to be restored.
    CheckpointRestoring(CheckpointRestoring),
}

/// A tenant that was made.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TenantAdded {
    /// The tenant.
    pub tenant: TenantInfo,
    /// Its first key; `None` for an open port.
    pub key: Option<KeyCreated>,
    /// What the operator should know of it beside.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// One tenant.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TenantShown {
    /// The tenant.
    pub tenant: TenantInfo,
    /// What the operator should know beside, of what was just done.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// Tenants.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TenantListed {
    /// The tenants.
    pub tenants: Vec<TenantInfo>,
}

/// A tenant that is gone.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Removed {
    /// Its number, never used again.
    pub id: u32,
    /// The name it had.
    pub name: String,
    /// How many requests were cancelled.
    pub cancelled: u32,
}

/// A tenant as it is now.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TenantInfo {
    /// Its number.
    pub id: u32,
    /// Its name.
    pub name: String,
    /// Whether it serves.
    pub state: TenantState,
    /// Its TCP port.
    pub port: u16,
    /// Where it is reached, without a path.
    pub url: String,
    /// The model it uses.
    pub model: String,
    /// Whether a key is needed.
    pub auth: bool,
    /// Keys that are not revoked.
    pub keys: u32,
    /// Its share of the model's KV blocks.
    pub share: ShareInfo,
    /// Whether its sequences guess what they say next.
    pub prompt_lookup: bool,
    /// How long its requests are kept after their end.
    pub retention: String,
    /// What it may ask for, and how much of it is taken.
    #[serde(default)]
    pub quotas: QuotaInfo,
    /// Sequences in the running batch.
    pub running: u32,
    /// Requests that wait.
    pub waiting: u32,
    /// The process behind the port.
    pub gateway: GatewayInfo,
    /// When it was made, in seconds since 1970.
    pub created_unix: i64,
}

/// A tenant's share of a model's KV blocks.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ShareInfo {
    /// Floor as it was given.
    pub floor: String,
    /// Ceiling as it was given.
    pub ceiling: String,
    /// Floor in blocks; `None` until the model's pool has a size.
    pub floor_blocks: Option<u32>,
    /// Ceiling in blocks; `None` until the model's pool has a size.
    pub ceiling_blocks: Option<u32>,
    /// Blocks that its sequences hold.
    pub held_blocks: u32,
    /// Blocks of its that are cached and unreferenced.
    pub cached_blocks: u32,
}

/// Whether a tenant serves.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum TenantState {
    /// Its port is bound; model or gateway is not ready yet.
    Starting,
    /// It takes requests.
    Ready,
    /// An operator suspended it.
    Suspended,
    /// It takes no requests, since the whole daemon takes none.
    Draining,
    /// It cannot serve.
    Failed {
        /// Why.
        error: String,
    },
}

/// The process behind a tenant's port.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct GatewayInfo {
    /// Whether it runs.
    pub state: GatewayState,
    /// Its process id, while it has one.
    pub pid: Option<u32>,
    /// How often it was started again.
    pub restarts: u32,
}

/// Whether a gateway runs.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum GatewayState {
    /// It is being started.
    Starting,
    /// It takes connections.
    Running,
    /// It died and is started again after a pause.
    Restarting {
        /// How many times in a row it has died, from 1.
        attempt: u32,
    },
    /// It is not started again.
    Failed {
        /// Why.
        error: String,
    },
}

/// A secret that only [`Secret::reveal`] and the wire show.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    /// Hides `text` from logs and debug output.
    #[must_use]
    pub const fn new(text: String) -> Self {
        Self(text)
    }

    /// The text itself.
    #[must_use]
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// A key that was made: the only time that it is shown.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct KeyCreated {
    /// Its number.
    pub id: u32,
    /// Whose it is.
    pub tenant: String,
    /// What the operator calls it.
    pub label: Option<String>,
    /// The key itself.
    pub key: Secret,
    /// Its first characters, by which lists show it.
    pub prefix: String,
}

/// A key without its secret.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct KeyInfo {
    /// Its number.
    pub id: u32,
    /// What the operator calls it.
    pub label: Option<String>,
    /// Its first characters.
    pub prefix: String,
    /// When it was made, in seconds since 1970.
    pub created_unix: i64,
    /// When it was revoked, in seconds since 1970.
    pub revoked_unix: Option<i64>,
}

/// A tenant's keys.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct KeyListed {
    /// Whose keys.
    pub tenant: String,
    /// The keys, revoked ones too.
    pub keys: Vec<KeyInfo>,
}

/// Metrics.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct MetricsText {
    /// Prometheus' text format.
    pub text: String,
}

/// The daemon as it is now.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct StatusInfo {
    /// Version of the daemon.
    pub version: String,
    /// Its process id.
    pub pid: u32,
    /// Seconds since it started.
    pub uptime_s: u64,
    /// Its state directory.
    pub state_dir: String,
    /// Its configuration file; `None` where it runs on defaults.
    pub config: Option<String>,
    /// Whether limits between tenants are enforced by the kernel.
    pub walls: Walls,
    /// Whether accepted requests survive the daemon.
    pub durable: Durable,
    /// Who starts it again and keeps its fds.
    pub supervisor: Supervisor,
    /// Whether it admits requests, and what is under way.
    pub drain: DrainInfo,
    /// Every configured model.
    pub models: Vec<ModelStatus>,
    /// Every tenant, by name.
    pub tenants: Vec<TenantInfo>,
}

/// Whether the daemon admits requests, and what is under way.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct DrainInfo {
    /// Whether it admits requests.
    pub state: DrainState,
    /// Requests that were accepted and have not ended, but for those that only another start can go on with: their model is not there, or
    /// has no room for them as it is now.
    pub requests: u32,
    /// Sequences in the running batches.
    pub running: u32,
    /// Sequences that wait.
    pub waiting: u32,
    /// Requests that a client reads at this moment, to their ends.
    pub streams: u32,
    /// Requests of an earlier daemon that wait for a start with a larger `max_model_len` or `kv_memory`; the log names each.
    #[serde(default)]
    pub too_large: u32,
}

impl DrainInfo {
    /// Whether nothing is left: every accepted request that can go on here has ended, and was sent to who reads it.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.requests == 0 && self.streams == 0
    }
}

/// Whether the daemon admits requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum DrainState {
    /// It does.
    Admitting,
    /// An operator has it refuse new ones; it stays.
    Draining {
        /// Since when, in seconds since 1970.
        since_unix: u64,
        /// Until when the operator waits, in seconds since 1970; `None` is without a limit.
        deadline_unix: Option<u64>,
    },
    /// It goes down. What has not ended by the deadline goes on after the next start.
    Stopping {
        /// Since when, in seconds since 1970.
        since_unix: u64,
        /// Until when running requests may end, in seconds since 1970.
        deadline_unix: u64,
    },
}

/// Whether accepted requests survive the daemon.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Durable {
    /// They do.
    Yes,
    /// The journal cannot be written: what is computed meanwhile is lost if the daemon dies.
    No {
        /// Why.
        reason: String,
        /// Since when, in seconds since 1970.
        since_unix: u64,
        /// Records that were not written since.
        records: u64,
    },
}

/// Whether limits between tenants are enforced by the kernel.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum Walls {
    /// Every limit.
    Full,
    /// Not all of them.
    Reduced {
        /// Why.
        reason: String,
    },
}

/// Who starts the daemon again and keeps its fds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Supervisor {
    /// systemd.
    Systemd,
    /// pagedd's own keeper.
    Keeper,
    /// Nobody.
    None,
}

impl Supervisor {
    /// The word on the wire.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Systemd => "systemd",
            Self::Keeper => "keeper",
            Self::None => "none",
        }
    }
}

/// A model as it is now. What a worker tells is `None` until it has told it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ModelStatus {
    /// Its name in the configuration.
    pub name: String,
    /// Its file or directory.
    pub path: String,
    /// Whether it serves.
    pub state: ModelState,
    /// Architecture that the file names.
    pub architecture: Option<String>,
    /// Number of parameters.
    pub parameters: Option<u64>,
    /// Where it runs, for example `cpu` or `cuda:0`.
    pub device: String,
    /// Arithmetic of the weights' products, for example `q8` or `f32`.
    pub dtype: Option<String>,
    /// Element type of the KV blocks.
    pub kv_dtype: Option<String>,
    /// Instruction set of the kernels in use.
    pub kernels: Option<String>,
    /// Threads of the worker.
    pub threads: Option<u32>,
    /// Bytes of the weights' arena.
    pub weight_bytes: Option<u64>,
    /// Bytes of the KV arena.
    pub kv_bytes: Option<u64>,
    /// Tokens per block.
    pub block_size: u32,
    /// Longest sequence, in tokens.
    pub max_model_len: Option<u32>,
    /// Blocks of the pool.
    pub blocks_total: Option<u32>,
    /// Blocks that nobody holds and that cache nothing.
    pub blocks_free: u32,
    /// Blocks that are cached and unreferenced.
    pub blocks_cached: u32,
    /// Blocks that sequences hold.
    pub blocks_held: u32,
    /// Sequences in the running batch.
    pub running: u32,
    /// Requests that wait.
    pub waiting: u32,
    /// Steps since the daemon started.
    pub steps: u64,
    /// Milliseconds since the last step ended; `None` before the first.
    pub last_step_age_ms: Option<u64>,
    /// Process id of the worker, while it has one.
    pub worker_pid: Option<u32>,
    /// How often the worker was started again.
    pub restarts: u32,
    /// Whether the worker in place took the weights over from the last one; `None` before it is ready.
    pub weights_reused: Option<bool>,
}

/// Whether a model serves.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "snake_case")]
pub enum ModelState {
    /// Its weights are being read.
    Loading {
        /// How far, in [0, 1000].
        permille: u16,
    },
    /// It takes plans.
    Ready,
    /// Its worker died and is started again after a pause.
    Restarting {
        /// How many times in a row it has died, from 1.
        attempt: u32,
    },
    /// Its worker is not started again.
    Failed {
        /// Why.
        error: String,
    },
}
