//! KV blocks as numbers: who holds which block of an arena, for which account, and what may be found again.
//!
//! **Owns** the count of every block, every account's share, and the index of committed prefixes. **Never** touches device
//! memory, a clock, a lock, a thread or a channel (I1); never decides who must give a block back, which is the scheduler's.
//!
//! A block is free, held (by one or more leases of one account), or cached (committed to the prefix index and held by
//! nobody). At every moment free + cached + held = capacity, and cached + held = the sum over accounts (I8); `check`
//! proves it. A block that several sequences of an account share is held once.

mod buddy;
mod lease;
mod ledger;
mod pool;
mod prefix;
mod share;
mod table;

pub use buddy::Place;
pub use lease::BlockLease;
pub use ledger::{Ledger, LedgerChange, LedgerError, LedgerHeader, LedgerRecord};
pub use pool::{AllocError, BlockChange, BlockPool, CachedPrefix, Violation};
pub use prefix::{BlockKey, Domain, DomainOwner, PrefixHasher};
pub use share::{AccountId, Share, ShareError, Usage};
pub use table::{BlockTable, CopyOnWrite};
