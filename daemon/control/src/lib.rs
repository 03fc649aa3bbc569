//! The admin protocol: what `pagedctl` asks the daemon over its unix socket, and what the daemon answers.
//!
//! **Owns** the message types, their JSON form and a blocking [`Client`]. **Never** decides or checks anything about a tenant:
//! amounts and names travel as text and are checked by the side that acts on them.
//!
//! One request is one line of JSON, answered by one line of JSON, in order, over a connection that may carry many:
//!
//! ```text
//! → {"protocol":1,"command":"tenant_show","name":"acme"}
//! ← {"ok":{"reply":"tenant","tenant":{…}}}
//! ← {"err":{"code":"unknown_tenant","message":"no tenant `acme`","remedy":"pagedctl tenant list names them"}}
//! ```
//!
//! The socket's file mode and the peer's credentials are the access control; the protocol carries no secret but a new key.

mod checkpoint;
mod client;
mod command;
mod error;
mod line;
mod quota;
mod reply;
mod usage;
mod wall;

pub use checkpoint::{
    CheckpointAt, CheckpointCommand, CheckpointFile, CheckpointInfo, CheckpointListed, CheckpointListing,
    CheckpointModel, CheckpointRestoring, CheckpointSave, CheckpointShown, CheckpointState, CheckpointTenant,
};
pub use client::{Client, ClientError};
pub use command::{
    Command, Drain, KeyCreate, KeyList, KeyRevoke, Request, TenantChanges, TenantName, TenantRemove,
    TenantSet, TenantSpec,
};
pub use error::{ControlError, ErrorCode};
pub use line::{LineError, MAX_REPLY_LINE, MAX_REQUEST_LINE, decode_request, encode};
pub use quota::{QuotaChanges, QuotaInfo, QuotaLimit, QuotaUse};
pub use reply::{
    DrainInfo, DrainState, Durable, GatewayInfo, GatewayState, KeyCreated, KeyInfo, KeyListed, MetricsText,
    ModelState, ModelStatus, ReloadInfo, ReloadOutcome, Removed, Reply, Response, SandboxPart, SandboxState,
    Secret, ShareInfo, StatusInfo, Supervisor, TenantAdded, TenantInfo, TenantListed, TenantShown,
    TenantState, Walls,
};
pub use usage::{UsageAsk, UsageBy, UsageReport, UsageRow};
pub use wall::{LimitTexts, PressureInfo, StallInfo, UsageInfo, WallInfo};

/// Version of the protocol. A daemon refuses another one by [`ErrorCode::UnsupportedProtocol`], naming both.
pub const PROTOCOL: u32 = 1;

/// Most that a quota can be.
pub const MAX_QUOTA: u64 = 1_000_000_000_000;

/// Most characters of a key's label.
pub const MAX_LABEL: usize = 100;

#[cfg(test)]
mod tests;
