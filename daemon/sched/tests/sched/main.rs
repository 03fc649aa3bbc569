//! The scheduler against a toy worker whose KV slots remember which tokens they were computed from.

mod bench;
mod bugs;
mod cost;
mod random;
mod rules;
mod scenario;
mod worker;
