//! The scheduler of one engine: which rows run in the next step, and what their results mean.
//!
//! **Owns** the sequences, queues and block tables of one model, and through its pool every KV block. **Never** reads a clock,
//! locks, spawns, waits, draws at random or does I/O (I1); knows no HTTP, no text and no device.
//!
//! # What the engine does, in order
//!
//! ```text
//! adopt(..), restore(..)                               // what an earlier scheduler left, oldest first, before any admit
//! loop {
//!     admit(..), cancel(..), set_share(..)             // inbox; Finished that these return go out as those of apply do
//!     if let Some(plan) = schedule(now_us) {           // None: nothing can run before the next apply or admission
//!         keep a copy of plan; send it to the worker
//!     }
//!     collect the oldest plan's output                 // plans are applied in the order they were made
//!     for each later plan in flight: later.resolve(&output)   // its Input::Sampled of that plan become Known
//!     let applied = apply(plan, output)                // by value: once
//!     journal applied, then send it to gateways
//! }
//! ```
//! * At most a few plans are in flight (1 in the plain loop, 2 in the overlapped one); nothing here limits their number.
//! * `revert` takes the newest plan in flight, never an older one.
//! * After a worker's death: `snapshot()` into `Resync`, then all unapplied plans, oldest first, as they are kept; or each once the one
//!   before it was applied.
//! * A plan that kills its workers: `accuse(plan)`, later plans in flight being reverted first, then `snapshot()` into `Resync`.
//! * Where there is a ledger of the arena: `watch_blocks()` at the start, `take_ledger_changes()` into it before each plan is sent and
//!   after each `apply`.
//! * `StepPlan::end` may name a sequence that a worker does not know (it was resynchronised since): that is no error.
//!   A sequence may `begin` again while the worker still knows it: the new one replaces the old.
//! * Between two steps `check()` holds.

mod adopt;
mod apply;
mod budget;
mod config;
mod draft;
mod lookup;
mod plan;
mod policy;
mod reclaim;
mod request;
mod restore;
mod scheduler;
mod sequence;
mod shares;
mod stats;
mod step;
mod suspect;
mod table;
mod tenant;

pub use config::{PolicyKind, SchedulerConfig, ShareSpec, Tuning};
pub use pagedd_kv::{LedgerChange, LedgerRecord, ShareError};
pub use plan::{Begin, BlockCopy, Input, Row, Sampled, StepOutput, StepPlan, TableUpdate};
pub use request::{AdmitError, Applied, Emitted, Ended, Finished, NewRequest, Started};
pub use restore::{Restored, RestoredChoice, blocks_at_full_length};
pub use scheduler::Scheduler;
pub use sequence::SequenceSnapshot;
pub use stats::{PoolStats, Stats, TenantStats, Violation};
pub use step::{Wait, WaitReason};
