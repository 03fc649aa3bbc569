//! `pagedctl metrics`.

use crate::context::Context;
use crate::failure::Failure;
use pagedd_control::{Command, Reply};

/// Prometheus' text format.
pub fn run(context: &Context) -> Result<String, Failure> {
    context.ask(Command::Metrics, |reply| match reply {
        Reply::Metrics(metrics) => Some(metrics.text.clone()),
        _ => None,
    })
}
