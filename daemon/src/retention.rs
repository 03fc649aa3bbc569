//! How long requests are kept after their end, tenant by tenant.
//!
//! **Owns** the rule, for hub and journal alike. **Never** deletes anything itself.
//!
//! A request whose client has all of it, or does not want it any more, is kept for its tenant's retention. One whose client may still come
//! back for it is kept for `reattach_grace` at least, so that a retention of nothing loses no answer on its way. Who had what is known to
//! the hub, and only of this daemon's time: the journal goes by the longer of the two, and the hub names what may go earlier.

use std::collections::BTreeMap;
use std::time::Duration;

use pagedd_core::TenantId;
use pagedd_journal::Retention;

/// What finished requests may take on disk. Beyond it the oldest of the tenant that has most go before their time.
const JOURNAL_BYTES: u64 = 1 << 30;

/// How long requests are kept after their end.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Retentions {
    /// Those of tenants that have no time of their own.
    usual: Duration,
    own: BTreeMap<TenantId, Duration>,
    /// Those whose clients may come back, at least.
    grace: Duration,
}

impl Retentions {
    /// As the configuration says, for all tenants.
    pub fn new(usual: Duration, grace: Duration) -> Self {
        Self { usual, own: BTreeMap::new(), grace }
    }

    /// Gives a tenant a time of its own, or takes it away.
    pub fn set(&mut self, tenant: TenantId, own: Option<Duration>) {
        match own {
            Some(own) => self.own.insert(tenant, own),
            None => self.own.remove(&tenant),
        };
    }

    /// What the configuration says has changed. A grace that the daemon's end has made endless stays.
    pub fn configure(&mut self, usual: Duration, grace: Duration) {
        self.usual = usual;
        if self.grace != Duration::MAX {
            self.grace = grace;
        }
    }

    /// Of a request that nobody comes back for.
    pub fn of(&self, tenant: TenantId) -> Duration {
        *self.own.get(&tenant).unwrap_or(&self.usual)
    }

    /// Of one whose client may come back.
    pub fn unread(&self, tenant: TenantId) -> Duration {
        self.of(tenant).max(self.grace)
    }

    /// For how long clients may come back, at least.
    pub fn grace(&self) -> Duration {
        self.grace
    }

    /// The daemon ends, and no client can come back before the next start: what any may come back for stays.
    pub fn hold(&mut self) {
        self.grace = Duration::MAX;
    }

    /// The shortest of all.
    pub fn shortest(&self) -> Duration {
        self.own.values().copied().fold(self.usual, Duration::min)
    }

    /// By what the journal goes.
    pub fn of_journal(&self) -> Retention {
        let seconds = |span: Duration| span.max(self.grace).as_secs();
        Retention {
            seconds: seconds(self.usual),
            per_tenant: self.own.iter().map(|(tenant, own)| (*tenant, seconds(*own))).collect(),
            max_bytes: JOURNAL_BYTES,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenants_own_time_goes_before_the_usual_one_and_what_was_not_read_has_its_grace() {
        let (usual, grace, second) =
            (Duration::from_mins(10), Duration::from_mins(1), Duration::from_secs(1));
        let mut retentions = Retentions::new(usual, grace);
        let (brief, long, other) = (TenantId(1), TenantId(2), TenantId(3));
        retentions.set(brief, Some(Duration::ZERO));
        retentions.set(long, Some(usual * 2));
        let of = |retentions: &Retentions| [brief, long, other].map(|tenant| retentions.of(tenant));
        assert_eq!(of(&retentions), [Duration::ZERO, usual * 2, usual]);
        assert_eq!([brief, long, other].map(|t| retentions.unread(t)), [grace, usual * 2, usual]);
        assert_eq!(retentions.shortest(), Duration::ZERO);
        let journal = retentions.of_journal();
        assert_eq!(journal.seconds, 600);
        assert_eq!(journal.per_tenant, BTreeMap::from([(brief, 60), (long, 1200)]));
        retentions.set(brief, None);
        assert_eq!(of(&retentions), [usual, usual * 2, usual]);
        retentions.configure(second, usual);
        assert_eq!(
            (retentions.of(brief), retentions.unread(brief)),
            (second, usual),
            "what is configured anew"
        );
        assert_eq!(retentions.of(long), usual * 2, "its own time goes before");
        retentions.hold();
        retentions.configure(second, second);
        assert_eq!(retentions.grace(), Duration::MAX, "the daemon ends");
        let brief = Retentions::new(second, Duration::ZERO).of_journal();
        assert_eq!(brief.seconds, 1, "without a grace the time is what was given");
    }
}
