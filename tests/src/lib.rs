//! What the tests of the whole share: a daemon under test, a small HTTP client, processes, and the tidy rules.
//!
//! **Owns** the temporary directories and processes of a test, and ends them with it. **Never** kills a process that it did
//! not start, links the code under test, or waits for anything without a deadline.
//!
//! A failed step panics with what was expected, what came, and the daemon's log: this is a library for tests only.

pub mod asks;
pub mod campaign;
pub mod daemon;
pub mod exchange;
pub mod gaps;
pub mod http;
pub mod kills;
pub mod model;
pub mod process;
pub mod random;
pub mod tidy;
pub mod wait;
