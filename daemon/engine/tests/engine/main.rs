//! The engine against the scheduler's toy worker, whose outputs show every mistake.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod bench;
mod killers;
mod overlap;
mod restart;
#[allow(dead_code, reason = "the scheduler's tests use more of it")]
#[path = "../../../sched/tests/sched/worker.rs"]
mod toy;
