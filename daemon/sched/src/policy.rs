//! The order in which a tenant's waiting sequences start.
//!
//! **Owns** the comparison. **Never** sees another tenant: between tenants the step decides. A rank is fixed when a sequence
//! starts to wait, so that queues stay sorted.

use pagedd_core::SequenceId;

use crate::config::PolicyKind;

/// A place in a tenant's queue: smaller starts earlier. Sequences of one rank start by age.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Rank(pub u64);

impl PolicyKind {
    /// The rank of a sequence that starts to wait at `now_us`. A preempted one is ranked again.
    pub(crate) fn rank(self, id: SequenceId, _now_us: u64) -> Rank {
        match self {
            // Ids are given in the order of admission.
            Self::Fcfs => Rank(id.0),
        }
    }
}
