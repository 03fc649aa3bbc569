//! The protocol loop of the worker process.
//!
//! **Owns** the conversation with the daemon. **Never** computes: that is [`ModelRunner`]'s.

use std::collections::VecDeque;
use std::os::fd::{AsFd as _, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

#[cfg(feature = "failpoints")]
use pagedd_wire::worker::Input;
use pagedd_wire::worker::{Arena, FromWorker, Hello, MOST_IN_FLIGHT, Plan, ToWorker};
use pagedd_wire::{Channel, ChannelError, PROTOCOL};

use crate::batch::PlanError;
use crate::load::LoadError;
use crate::runner::{Fds, ModelRunner, RunError};

/// Why the worker ends other than by being told to.
#[derive(thiserror::Error, Debug)]
pub enum ServeError {
    /// The daemon speaks another version, or does not begin with `Hello`.
    #[error("the daemon does not speak this worker's protocol: {0}")]
    Protocol(String),
    /// The model could not be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A plan that must not be run.
    #[error("plan {plan}: {error}")]
    Plan {
        /// Its id.
        plan: u64,
        /// What is wrong with it.
        error: RunError,
    },
    /// A resync that contradicts the arenas.
    #[error("resync: {0}")]
    Resync(PlanError),
    /// An arena cannot be handed to the daemon.
    #[error(transparent)]
    Arena(RunError),
    /// A bug of this program.
    #[error("internal error while {0}; the log of the worker names the place")]
    Panic(&'static str),
    /// The socket broke.
    #[error(transparent)]
    Channel(#[from] ChannelError),
}

impl ServeError {
    /// Whether a new worker with the same `Hello` could do better.
    fn retry(&self) -> bool {
        match self {
            Self::Load(error) => error.retry(),
            Self::Panic(_) | Self::Channel(_) | Self::Arena(_) => true,
            Self::Plan { error, .. } => error.retry(),
            Self::Protocol(_) | Self::Resync(_) => false,
        }
    }
}

/// Serves one daemon until it closes the socket or says `Shutdown`.
///
/// # Errors
/// [`ServeError`], after the daemon was told by [`FromWorker::Failed`] as far as the socket still allows.
pub fn serve(channel: &mut Channel) -> Result<(), ServeError> {
    serve_by(channel, ModelRunner::load)
}

/// What a model is loaded by; see [`ModelRunner::load`].
pub type Load = fn(&Hello, Fds, &mut dyn FnMut(u32) -> bool) -> Result<ModelRunner, LoadError>;

/// As [`serve`], with a model that is loaded by `load`.
///
/// That it failed is told before anything else, and the model is not let go of: every stream waits for the next worker, and what a failed GPU
/// gives back piece by piece the system takes back when the process ends.
///
/// # Errors
/// As [`serve`].
pub fn serve_by(channel: &mut Channel, load: Load) -> Result<(), ServeError> {
    let mut runner = None;
    let result = converse(channel, load, &mut runner);
    match result {
        Ok(()) | Err(ServeError::Channel(ChannelError::Closed)) => Ok(()),
        Err(error) => {
            let failed = FromWorker::Failed { error: one_line(&error.to_string()), retry: error.retry() };
            if let Err(unsent) = channel.send(&failed, &[]) {
                tracing::warn!(%unsent, "the daemon could not be told of the failure");
            }
            std::mem::forget(runner);
            Err(error)
        }
    }
}

fn one_line(text: &str) -> String {
    text.split('\n').map(str::trim).collect::<Vec<_>>().join("; ")
}

/// The model is put into `runner` as soon as it is there.
fn converse(channel: &mut Channel, load: Load, runner: &mut Option<ModelRunner>) -> Result<(), ServeError> {
    let hello = match channel.recv()? {
        ToWorker::Hello(hello) => hello,
        ToWorker::Shutdown => return Ok(()),
        ToWorker::Resync(_) | ToWorker::Plan(_) | ToWorker::Collect => {
            return Err(ServeError::Protocol("the first frame is no hello".to_owned()));
        }
    };
    let runner = runner.insert(start(channel, &hello, load)?);
    // Plans that have no answer.
    let mut out = VecDeque::new();
    loop {
        match channel.recv()? {
            ToWorker::Plan(plan) => {
                if out.len() == MOST_IN_FLIGHT {
                    let text = format!("plan {} comes while {MOST_IN_FLIGHT} have no answer", plan.id);
                    return Err(ServeError::Protocol(text));
                }
                plan_point(&plan);
                point("worker-plan");
                guarded("running a plan", || runner.submit(&plan))?
                    .map_err(|error| ServeError::Plan { plan: plan.id, error })?;
                out.push_back(plan.id);
            }
            ToWorker::Collect => {
                let Some(plan) = out.pop_front() else {
                    return Err(ServeError::Protocol(
                        "it collects, and every plan has its answer".to_owned(),
                    ));
                };
                let output = guarded("running a plan", || runner.collect())?
                    .map_err(|error| ServeError::Plan { plan, error })?;
                point("worker-output");
                channel.send(&FromWorker::Output(output), &[])?;
            }
            ToWorker::Resync(_) if !out.is_empty() => {
                return Err(ServeError::Protocol("a resync while plans have no answer".to_owned()));
            }
            ToWorker::Resync(states) => {
                point("worker-resync");
                runner.resync(states).map_err(ServeError::Resync)?;
            }
            ToWorker::Shutdown => return Ok(()),
            ToWorker::Hello(_) => return Err(ServeError::Protocol("a second hello".to_owned())),
        }
    }
}

/// Loads the model and reports what was made, up to `Ready`.
fn start(channel: &mut Channel, hello: &Hello, load: Load) -> Result<ModelRunner, ServeError> {
    let begin = Instant::now();
    if hello.protocol != PROTOCOL {
        let text = format!("it has version {}, this worker {PROTOCOL}", hello.protocol);
        return Err(ServeError::Protocol(text));
    }
    let fds = Fds { weights: take_fd(channel, hello.weights_fd)?, kv: take_fd(channel, hello.kv_fd)? };
    point("worker-load");
    let mut told = None;
    let mut gone = None;
    let loaded = guarded("loading the model", || {
        load(hello, fds, &mut |permille| {
            // One frame per per cent: enough for a progress bar, and for the daemon to see that loading goes on.
            if told.is_none_or(|told| permille >= told + 10) {
                told = Some(permille);
                gone = channel.send(&FromWorker::Loading { permille }, &[]).err();
            }
            gone.is_none()
        })
    })?;
    if let Some(error) = gone {
        return Err(error.into());
    }
    let mut runner = loaded?;
    point("worker-mapped");
    for (arena, reused) in
        [(Arena::Weights, runner.info().weights_reused), (Arena::Kv, runner.info().kv_reused)]
    {
        if !reused {
            let memory = runner.arena(arena).map_err(ServeError::Arena)?;
            channel.send(&FromWorker::Arena { arena, bytes: memory.bytes }, &[memory.fd.as_fd()])?;
        }
    }
    point("worker-arenas-sent");
    runner.set_load_time(begin.elapsed());
    let info = runner.info().clone();
    tracing::info!(
        architecture = info.architecture,
        blocks = info.blocks,
        threads = info.threads,
        kernels = info.kernels,
        weights_reused = info.weights_reused,
        kv_reused = info.kv_reused,
        load_us = info.load_us,
        "ready"
    );
    channel.send(&FromWorker::Ready(Box::new(info)), &[])?;
    Ok(runner)
}

fn take_fd(channel: &mut Channel, announced: bool) -> Result<Option<OwnedFd>, ChannelError> {
    if announced { channel.take_fd().map(Some) } else { Ok(None) }
}

/// Runs what must not take the process down silently: a panic becomes a failure that the daemon hears of. The value that
/// panicked is never used again, as the worker ends.
fn guarded<T>(what: &'static str, run: impl FnOnce() -> T) -> Result<T, ServeError> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|_| ServeError::Panic(what))
}

/// In test builds the fail point `name` ends the worker, unless an earlier one has left its mark at the path that it returns.
fn point(name: &str) {
    fail::fail_point!(name, |mark: Option<String>| {
        if mark.is_some_and(|mark| std::fs::File::create_new(mark).is_ok()) {
            std::process::abort();
        }
    });
    // Without fail points it has no use.
    let _ = name;
}

/// In test builds the fail point `plan` ends the worker at a plan that computes the token that it returns.
fn plan_point(plan: &Plan) {
    fail::fail_point!("plan", |token: Option<String>| {
        let token = token.and_then(|token| token.parse().ok()).map(Input::Known);
        let mut inputs = plan.rows.iter().flat_map(|row| &row.inputs);
        if token.is_some_and(|token| inputs.any(|input| *input == token)) {
            std::process::abort();
        }
    });
    // Without fail points it has no use.
    let _ = plan;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_failure_that_another_worker_may_escape() {
        let error = guarded("running a plan", || panic!("on purpose")).unwrap_err();
        assert!(error.retry());
        assert_eq!(
            error.to_string(),
            "internal error while running a plan; the log of the worker names the place"
        );
    }

    #[test]
    fn a_message_of_several_lines_becomes_one() {
        assert_eq!(one_line("first\n  second\nthird"), "first; second; third");
    }
}
