//! The scheduler against a toy worker whose KV slots remember which tokens they were computed from.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod bench;
mod bugs;
mod cost;
mod random;
mod restore;
mod rules;
mod scenario;
mod worker;
