//! How long the logs of requests that have ended stay, and what is under way.
//!
//! **Owns** the time at which a finished log goes. **Never** lets go of one that is being sent.

use std::time::{Duration, Instant};

use pagedd_core::TenantId;

use super::{Hub, LEAST_KEPT, Limits, Place, Reader};

/// Requests that the journal may be told of at once. Beyond them it keeps them for its own time.
const MOST_SPENT: usize = 1 << 16;

/// What is under way.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Load {
    /// Requests that were accepted and have not ended. Those that nothing becomes of here do not count: their
    /// model is not there, or has no room for them as it is now.
    pub requests: u32,
    /// Requests that are read, and have not ended or not been sent to their end.
    pub streams: u32,
    /// Requests that their models have no room for as they are now.
    pub too_large: u32,
}

impl Load {
    /// Whether there is nothing to wait for. What has no room here becomes nothing by waiting.
    pub const fn is_empty(&self) -> bool {
        self.requests == 0 && self.streams == 0
    }
}

impl Hub {
    /// How long a tenant's requests are kept after their end; `None` is as long as others'.
    pub fn retain(&mut self, tenant: TenantId, own: Option<Duration>) {
        self.retentions.set(tenant, own);
    }

    /// What the configuration says has changed.
    pub(super) fn configure(&mut self, limits: Limits) {
        self.retentions.configure(limits.retention, limits.reattach_grace);
        self.limits = Limits { reattach_grace: self.retentions.grace(), ..limits };
    }

    /// The daemon ends: from here on a request without a reader is none that was left.
    pub(super) fn hold(&mut self) {
        self.limits.reattach_grace = Duration::MAX;
        self.retentions.hold();
    }

    /// What is under way.
    pub(super) fn load(&self) -> Load {
        let mut load = Load::default();
        for log in self.logs.values() {
            let held = matches!(log.place, Place::Held);
            let goes_on = !held && !self.unserved.contains_key(&log.model);
            load.too_large += u32::from(held && log.ended.is_none());
            let live = log.ended.is_none() && goes_on;
            let read = match log.reader {
                Reader::Attached { sent, .. } => live || (log.ended.is_some() && sent < log.entries.len()),
                Reader::None { .. } => false,
            };
            load.requests += u32::from(live);
            load.streams += u32::from(read);
        }
        load
    }

    /// Drops a tenant's finished logs that are kept no longer.
    pub(super) fn expire_finished(&mut self, tenant: TenantId, now: Instant) {
        // Whoever asked for it must have had the time to attach.
        let settled = self.retentions.of(tenant).max(LEAST_KEPT);
        let unread = self.retentions.unread(tenant).max(LEAST_KEPT);
        let mut at = 0;
        while let Some(&(ended, request, _)) = self.finished.get(&tenant).and_then(|logs| logs.order.get(at))
        {
            let age = now.duration_since(ended);
            if age < settled {
                return;
            }
            let is_settled = self.logs.get(&request).is_none_or(|log| log.settled || log.cancelled);
            if self.is_read(request) || !(is_settled || age >= unread) {
                at += 1;
                continue;
            }
            if age < unread && self.spent.len() < MOST_SPENT {
                self.spent.push(request);
            }
            self.drop_finished(tenant, at);
        }
    }

    /// Drops a tenant's finished log, the `at`th since the oldest.
    pub(super) fn drop_finished(&mut self, tenant: TenantId, at: usize) {
        let Some(logs) = self.finished.get_mut(&tenant) else { return };
        if let Some((_, request, bytes)) = logs.order.remove(at) {
            self.logs.remove(&request);
            logs.bytes -= bytes;
            self.finished_bytes -= bytes;
        }
        if logs.order.is_empty() {
            self.finished.remove(&tenant);
        }
    }
}
