//! Restored requests of tenants that have no share yet.
//!
//! **Owns** them until the share comes: they are accepted, and so neither refused nor forgotten. **Never** runs one.

use pagedd_core::{FinishReason, RequestId, TenantId};
use pagedd_sched::{Finished, Restored};

/// In the order of their admission.
#[derive(Debug, Default)]
pub(crate) struct Held(Vec<Restored>);

impl Held {
    pub fn push(&mut self, restored: Restored) {
        self.0.push(restored);
    }

    /// Gives out what waits for this tenant, or for any.
    pub fn take(&mut self, tenant: Option<TenantId>) -> Vec<Restored> {
        let taken = |held: &mut Restored| tenant.is_none_or(|tenant| held.request.tenant == tenant);
        self.0.extract_if(.., taken).collect()
    }

    /// Ends every choice of a request. Nothing where it is not held.
    pub fn cancel(&mut self, request: RequestId) -> Vec<Finished> {
        let cancelled = self.0.extract_if(.., |held| held.request.id == request);
        cancelled.flat_map(|mut held| held.finish(FinishReason::Cancelled)).collect()
    }

    /// Ends one choice; with its last one a request is no longer held.
    pub fn finish_choice(&mut self, request: RequestId, choice: u32, reason: FinishReason) -> Vec<Finished> {
        let held = self.0.iter_mut().filter(|held| held.request.id == request);
        let finished: Vec<_> = held.filter_map(|held| held.finish_choice(choice, reason)).collect();
        if finished.iter().any(|finished| finished.ended.is_some()) {
            self.0.retain(|held| held.request.id != request);
        }
        finished
    }
}
