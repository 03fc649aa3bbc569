//! What an engine asks of the rest: a worker, a journal, an observer.

use pagedd_core::{BlockId, FinishReason, RequestId, TenantId};
use pagedd_kv::{DomainOwner, Ledger};
use pagedd_sched::{
    AdmitError, Applied, LedgerChange, LedgerRecord, SequenceSnapshot, Stats, StepOutput, StepPlan,
};

/// The worker is gone, or did not answer in time: nothing it was sent since the last `collect` can be trusted to have run.
#[derive(thiserror::Error, Clone, PartialEq, Eq, Debug)]
#[error("worker lost: {reason}")]
pub struct WorkerLost {
    /// One line, for the log.
    pub reason: String,
}

/// No worker could be had, and trying again is not worth while.
#[derive(thiserror::Error, Clone, PartialEq, Eq, Debug)]
#[error("no worker: {reason}")]
pub struct WorkersExhausted {
    /// One line, for status and clients.
    pub reason: String,
}

/// Runs plans, in order. A worker has no policy, and all it knows of sequences is soft.
pub trait Worker {
    /// Hands a plan over without waiting for it, nor for those before it. It may go out only with the next [`collect`](Self::collect), which
    /// follows.
    ///
    /// # Errors
    /// The worker is lost; the plan may or may not have run.
    fn submit(&mut self, plan: &StepPlan) -> Result<(), WorkerLost>;

    /// Waits for the output of the oldest plan that was submitted and not collected.
    ///
    /// # Errors
    /// The worker is lost, also when it missed the step's deadline.
    fn collect(&mut self) -> Result<StepOutput, WorkerLost>;

    /// Proves the old worker gone, brings up another on the same arenas, and tells it the live sequences. The caller then
    /// submits every plan that was not applied, in order, all at once or one after the other.
    ///
    /// # Errors
    /// No worker could be had within the bounds of the supervisor.
    fn recover(&mut self, sequences: Vec<SequenceSnapshot>) -> Result<(), WorkersExhausted>;

    /// How requests end once no worker could be had. `None` where they do not: this process ends, and the next goes on with them.
    fn ends_as(&self) -> Option<FinishReason> {
        Some(FinishReason::Failed)
    }
}

/// What a step made: goes to the journal as one record.
pub type StepRecord = Applied;

/// Makes things durable, then visible. Called on the engine thread, so it may not wait for a slow reader.
pub trait Journal {
    /// What came with a submission and goes back with its answer.
    type Ticket;

    /// The scheduler took the request. Its admission is made durable before anyone is told.
    fn admitted(&mut self, request: RequestId, ticket: Self::Ticket);

    /// The scheduler did not take it; nothing is kept.
    fn refused(&mut self, ticket: Self::Ticket, error: AdmitError);

    /// Tokens and finishes of one step, or finishes outside a step. They become visible in this order, after they are durable.
    fn commit(&mut self, record: StepRecord);
}

/// The ledger of the arena, in memory that outlives the process. Errors are its own affair: what it loses is computed again.
pub trait BlockLedger {
    /// Makes changes, in order. What is cleared must be so before this returns: the next plan writes the block.
    fn write(&mut self, changes: &[LedgerChange]);

    /// What is committed for a tenant.
    fn records(&self, tenant: TenantId) -> Vec<(BlockId, LedgerRecord)>;
}

impl<M: AsRef<[u8]> + AsMut<[u8]>> BlockLedger for Ledger<M> {
    fn write(&mut self, changes: &[LedgerChange]) {
        for change in changes {
            Self::write(self, change);
        }
    }

    fn records(&self, tenant: TenantId) -> Vec<(BlockId, LedgerRecord)> {
        let owner = DomainOwner::Tenant(tenant);
        Self::records(self).filter(|(_, record)| record.owner == owner).collect()
    }
}

/// Is told how the engine stands, a few times a second while it works and whenever it goes idle.
pub trait Observer {
    /// The engine's numbers at a step boundary.
    fn observe(&mut self, stats: EngineStats);

    /// The engine's thread begins another turn of its loop: once per step, and about once a second while none of its requests can run. An engine
    /// whose turns end hangs, unless it rests, or waits for its worker or its journal, which know that themselves.
    fn turned(&mut self) {}

    /// There is no request, and no turn before a command comes.
    fn rests(&mut self) {}
}

/// An engine's numbers.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct EngineStats {
    /// The scheduler's.
    pub scheduler: Stats,
    /// Steps completed.
    pub steps: u64,
    /// When the last step completed, in the engine's microseconds; `None` before the first.
    pub last_step_us: Option<u64>,
    /// Compute time of all steps as reported by workers, in microseconds.
    pub compute_us: u64,
    /// What was predicted of it, in microseconds; 0 where the cost of a step is not known.
    pub predicted_us: u64,
    /// By how much predictions were wrong, each step by itself, in microseconds.
    pub misjudged_us: u64,
    /// Time of this thread to hand steps' results to the journal, in nanoseconds: it waits where the journal is behind.
    pub commit_ns: u64,
    /// Input tokens computed.
    pub computed_tokens: u64,
    /// Workers lost.
    pub workers_lost: u64,
    /// Blocks of an earlier process that the prefix cache took over.
    pub adopted_blocks: u64,
}
