//! The engine of one model: the thread that turns requests into steps.
//!
//! **Owns** the `Scheduler` (and in it the block pool) as plain values, on one thread (I2), and the order apply → commit →
//! send. **Never** computes, touches a device, opens a file, or decides who runs: that is the worker's and the scheduler's.
//!
//! ```text
//! EngineHandle ─Command→ inbox (bounded) ─→ engine thread: drain inbox
//!                                            schedule → submit ⇉ worker, up to the depth
//!                                            collect the oldest ⇇ worker
//!                                            apply → Journal::commit (durable, then visible)
//! ```
//! With a depth of 2 the worker has plan N + 1 before the output of plan N is collected. An input of N + 1 that N draws is named, not known;
//! what N + 1 computes for a sequence that ended with N is dropped by the scheduler.

mod engine;
mod handle;
mod held;
mod traits;

#[cfg(test)]
mod tests;

pub use engine::{Engine, EngineConfig};
pub use handle::{Command, EngineHandle, Inbox, InboxFull, Placed, Reply, Submission, inbox};
pub use traits::{
    BlockLedger, EngineStats, Journal, Observer, StepRecord, Worker, WorkerLost, WorkersExhausted,
};
