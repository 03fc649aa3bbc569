//! The engine of one model: the thread that turns requests into steps.
//!
//! **Owns** the `Scheduler` (and in it the block pool) as plain values, on one thread (I2), and the order apply → commit →
//! send. **Never** computes, touches a device, opens a file, or decides who runs: that is the worker's and the scheduler's.
//!
//! ```text
//! EngineHandle ─Command→ inbox (bounded) ─→ engine thread: drain inbox
//!                                            schedule → submit ⇉ worker
//!                                            collect  ⇇ worker
//!                                            apply → Journal::commit (durable, then visible)
//! ```

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
