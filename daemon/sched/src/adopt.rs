//! What blocks hold, for a ledger that outlives the process, and back from it.
//!
//! **Owns** whose a record is. **Never** writes one: the engine does, clears before the plan is submitted that may write the
//! block, commits after the plan was applied that filled it.

use pagedd_core::{BlockId, TenantId};
use pagedd_kv::{AccountId, BlockChange, DomainOwner, LedgerChange, LedgerRecord};

use crate::scheduler::Scheduler;

/// [`pagedd_kv::Domain::dtype`] of every block: the digest of the weights covers it.
pub(crate) const DTYPE: u8 = 0;

impl Scheduler {
    /// From now on keeps what [`Scheduler::take_ledger_changes`] gives.
    pub fn watch_blocks(&mut self) {
        self.pool.watch();
    }

    /// What happened to blocks since the last call, in order. To be written to the ledger after each `schedule`, before its plan is
    /// submitted, and after each `apply`.
    pub fn take_ledger_changes(&mut self) -> Vec<LedgerChange> {
        let changes = self.pool.take_changes().into_iter();
        let told = changes.map(|change| match change {
            BlockChange::Cleared(block) => LedgerChange::Clear(block),
            BlockChange::Committed { block, account, key } => match self.owner(account) {
                Some(tenant) => {
                    let (owner, tokens) = (DomainOwner::Tenant(tenant), self.config.block_size);
                    LedgerChange::Commit(block, LedgerRecord { owner, key, dtype: DTYPE, tokens })
                }
                // Its tenant was removed since.
                None => LedgerChange::Clear(block),
            },
        });
        told.collect()
    }

    /// Takes full blocks that an earlier scheduler filled into the prefix cache, each for its tenant. How many: none of those that
    /// this scheduler has given out, whose tenant has no share or has all it may have, or whose contents are in the cache already.
    pub fn adopt(&mut self, records: impl IntoIterator<Item = (BlockId, LedgerRecord)>) -> u32 {
        let mut adopted = 0;
        for (block, record) in records {
            let DomainOwner::Tenant(tenant) = record.owner else { continue };
            let whole = record.tokens == self.config.block_size && record.dtype == DTYPE;
            let Some(account) = self.tenants.get(&tenant).map(|tenant| tenant.account) else { continue };
            if self.config.prefix_cache && whole && self.pool.adopt(account, block, record.key) {
                adopted += 1;
            }
        }
        adopted
    }

    fn owner(&self, account: AccountId) -> Option<TenantId> {
        self.tenants.iter().find(|(_, tenant)| tenant.account == account).map(|(id, _)| *id)
    }
}
