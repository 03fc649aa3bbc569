//! What pagedd needs of a Linux host: processes, file descriptors, cgroups, the service manager.
//!
//! **Owns** the system calls. **Never** knows of models, tenants or requests, and keeps no policy beyond the keeper's.

#[cfg(feature = "attacks")]
pub mod attack;
mod cgroup;
mod confine;
pub mod exit;
pub mod fdstore;
mod fork;
pub mod hierarchy;
pub mod identity;
mod inherited;
pub mod jail;
pub mod keeper;
pub mod lock;
pub mod memory;
pub mod net;
pub mod notify;
pub mod peer;
mod pidfd;
mod process;
pub mod shared;
pub mod threads;

pub use confine::{Capabilities, Identity, Sandbox, Step, lacks_for_users};
pub use fork::{Confinement, ForkError, Forked, fork_confined, reap};
pub use inherited::inherited;
pub use pidfd::Pidfd;
pub use process::{Child, Spawn, SpawnError, spawn};
