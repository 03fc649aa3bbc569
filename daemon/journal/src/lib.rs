//! What survives the daemon: SQLite files in the state directory.
//!
//! **Owns** their schemas, migrations and integrity. **Never** holds a rule about tenants beyond what a constraint can say
//! (a name and a port are one tenant's), and never a key: only its digest. Never reads a clock or starts a thread: callers
//! say what time it is.
//!
//! [`ControlDb`] is control.db: tenants, keys and the installation's secret, small and fully synchronous. [`JournalDb`] is
//! journal.db: requests and their tokens for as long as they are kept, and [`JournalWriter`] is what writes it while a
//! daemon runs, disk full or not. A [`checkpoint`] is both, written down at one moment.

pub mod checkpoint;
mod control;
mod error;
mod fold;
mod installation;
mod journal;
mod key;
mod ledger;
mod replay;
mod retention;
mod saved;
mod schema;
mod snapshot;
mod usage;
mod writer;

pub use control::{ControlDb, KeyRow, NewTenant, TenantRow, TenantUpdate};
pub use error::{DbError, SavedError};
pub use fold::Folded;
pub use installation::{Bound, Installation, Numbers, Strangers};
pub use journal::{Fsync, JournalDb, Record, Step};
pub use key::{Digest, NewKey, PREFIX_LENGTH};
pub use ledger::{UsageBy, UsageQuery, UsageRow};
pub use replay::{Damage, Kept, Replayed};
pub use retention::{Expired, Retention};
pub use saved::{Admission, Entry, Finish, Idempotency, OnLeave, SavedRequest, SavedSampling};
pub use snapshot::{Snapshot, SnapshotRequest};
pub use usage::{Bill, LedgerId, Payer, RECENT_S, Usage};
pub use writer::{Durability, JournalWriter, LossReason, Now};

#[cfg(test)]
mod tests;
