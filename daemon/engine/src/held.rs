//! Restored requests that cannot enter the scheduler: of tenants that have no share yet, or too large for this engine.
//!
//! **Owns** the former until the share comes, and the latter for as long as the engine lives: they are accepted, and so neither refused nor
//! forgotten. **Never** runs one.

use pagedd_core::{FinishReason, RequestId, TenantId};
use pagedd_sched::{Finished, Restored};

/// In the order of their admission, each with whether it waits for a share.
#[derive(Debug, Default)]
pub(crate) struct Held(Vec<(Restored, bool)>);

impl Held {
    /// Keeps one until its tenant has a share.
    pub fn push(&mut self, restored: Restored) {
        self.0.push((restored, true));
    }

    /// Keeps one that this engine never runs.
    pub fn keep(&mut self, restored: Restored) {
        self.0.push((restored, false));
    }

    /// Gives out what waits for this tenant's share.
    pub fn take_waiting(&mut self, tenant: TenantId) -> Vec<Restored> {
        let taken = self.0.extract_if(.., |(held, waits)| *waits && held.request.tenant == tenant);
        taken.map(|(restored, _)| restored).collect()
    }

    /// Gives out all of this tenant, or of any.
    pub fn take(&mut self, tenant: Option<TenantId>) -> Vec<Restored> {
        let taken =
            self.0.extract_if(.., |(held, _)| tenant.is_none_or(|tenant| held.request.tenant == tenant));
        taken.map(|(restored, _)| restored).collect()
    }

    /// Ends every choice of a request. Nothing where it is not held.
    pub fn cancel(&mut self, request: RequestId) -> Vec<Finished> {
        let cancelled = self.0.extract_if(.., |(held, _)| held.request.id == request);
        cancelled.flat_map(|(mut held, _)| held.finish(FinishReason::Cancelled)).collect()
    }

    /// Ends one choice; with its last one a request is no longer held.
    pub fn finish_choice(&mut self, request: RequestId, choice: u32, reason: FinishReason) -> Vec<Finished> {
        let held = self.0.iter_mut().filter(|(held, _)| held.request.id == request);
        let finished: Vec<_> = held.filter_map(|(held, _)| held.finish_choice(choice, reason)).collect();
        if finished.iter().any(|finished| finished.ended.is_some()) {
            self.0.retain(|(held, _)| held.request.id != request);
        }
        finished
    }
}
