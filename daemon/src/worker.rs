//! A worker process: started, spoken to, fenced, replaced.
//!
//! **Owns** the child, the channel to it, and its [`Arenas`], which outlive it. **Never** maps an arena or opens a model file: both
//! are the worker's.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use fail::fail_point;
use pagedd_core::{FinishReason, Pairs, PlanId, StepCost};
use pagedd_engine::{Worker, WorkerLost, WorkersExhausted};
use pagedd_host::fdstore::FdStore;
use pagedd_host::shared::SharedMemory;
use pagedd_host::{Capabilities, Sandbox, Spawn, SpawnError};
use pagedd_kv::Ledger;
use pagedd_sched::{SequenceSnapshot, StepOutput, StepPlan};
use pagedd_wire::worker::{
    Arena, Device, DeviceStep, FromWorker, Hello, KnownCost, ModelInfo, Plan, SequenceState, ToWorker,
};
use pagedd_wire::{Channel, ChannelError};
use tokio::sync::watch;
use tracing::{info, warn};

use crate::arenas::{Arenas, Kept};
use crate::backoff::Backoff;
use crate::blocks::{Seed, Shelf};
use crate::child::{OwnChild, Reins};
use crate::convert;
use crate::walls::{WorkerCgroup, WorkerLeaf};
use crate::watchdog::{Pulse, TURN};

/// The fd that a child finds its socket on.
pub const CHILD_SOCKET: i32 = 3;

/// All that a child finds in its environment: what it logs, and how.
pub type Environment = Vec<(OsString, OsString)>;

/// Longest silence of a worker while it loads. Progress frames extend it.
const LOAD_SILENCE: Duration = Duration::from_mins(2);
/// Shortest step deadline.
///
/// A quota of half a processor makes a step four times slower than it was measured, a busy neighbour twice as slow again, and
/// predictions are a quarter off at times: [`STEP_SLACK`] is just enough for these, so that short steps get more. A worker killed
/// by mistake costs more than a hung one that is found late: the next one runs the same plan on the same slow machine, and once two
/// were lost with it its requests are under suspicion, run by parts, and may fail.
const STEP_DEADLINE: Duration = Duration::from_secs(30);
/// Longest step deadline beyond what is predicted: a worker that stood still for a while and went on is no reason to wait for
/// the next one for hours.
const LONGEST_STEP_DEADLINE: Duration = Duration::from_mins(5);
/// A step may take this many times what was predicted for it, or what the slowest took so far.
const STEP_SLACK: u32 = 10;
/// A worker has this long to answer, however long ago its plan was due: it answers when it is asked, and this thread may have had to wait
/// for others before it asked.
const ANSWER: Duration = Duration::from_secs(10);
/// How long a killed process may take to be gone.
const DEATH: Duration = Duration::from_secs(10);
/// How long a worker's program may take to be read from a busy disk.
const EXEC: Duration = Duration::from_mins(1);
/// Workers in a row that do not come up. Those that die with a plan are the engine's to count.
const TRIES: u32 = 6;
/// How long the next start waits after the first of them, and at most; it doubles from try to try.
const PAUSE: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));

/// How a model stands, as shown by `pagedctl status`.
#[derive(Clone, Debug)]
pub enum ModelState {
    /// A first worker loads.
    Loading {
        /// `[0, 1000]`.
        permille: u32,
    },
    /// A worker takes plans.
    Ready(Arc<ReadyModel>),
    /// The worker died and another comes up.
    Restarting {
        /// Counted from 1 since the last completed step.
        attempt: u32,
        /// What was known of the model.
        last: Option<Arc<ReadyModel>>,
    },
    /// Given up.
    Failed {
        /// One line.
        error: String,
    },
}

impl ModelState {
    /// What is known of the model, as long as it is not given up.
    pub fn model(&self) -> Option<&Arc<ReadyModel>> {
        match self {
            Self::Ready(model) => Some(model),
            Self::Restarting { last, .. } => last.as_ref(),
            Self::Loading { .. } | Self::Failed { .. } => None,
        }
    }
}

/// A loaded model and its worker.
#[derive(Debug)]
pub struct ReadyModel {
    /// From the worker.
    pub info: ModelInfo,
    /// The worker's process id, for status only.
    pub pid: u32,
    /// Workers before this one.
    pub restarts: u32,
}

/// What to start.
pub struct WorkerSpec {
    /// Name of the model.
    pub model: String,
    /// Path of `pagedd-worker`.
    pub program: PathBuf,
    /// First frame; its fd flags are set for each start, and only the first worker measures.
    pub hello: Hello,
    /// The child's environment.
    pub env: Environment,
    /// The cgroup of the model's workers, where they have one.
    pub cell: Option<Arc<WorkerCgroup>>,
}

struct Running {
    child: OwnChild,
    channel: Channel,
    /// After the child: it goes once nobody is in it.
    leaf: Option<WorkerLeaf>,
}

#[derive(Clone, Copy)]
struct Submitted {
    plan: PlanId,
    at: Instant,
    predicted: Duration,
}

/// A model's worker.
pub struct WorkerProcess {
    spec: WorkerSpec,
    arenas: Arenas,
    running: Option<Running>,
    /// For who ends it with the daemon.
    reins: Arc<Reins>,
    /// No worker can be had since the model's file is another one.
    changed: bool,
    state: watch::Sender<ModelState>,
    backoff: Backoff,
    /// Starts since the last completed step.
    attempts: u32,
    /// Starts in a row that came to nothing.
    failed_launches: u32,
    starts: u32,
    info: Option<ModelInfo>,
    /// Plans without an answer, oldest first.
    submitted: VecDeque<Submitted>,
    /// When the last answer came.
    answered: Instant,
    /// Longest step that completed.
    slowest_step: Duration,
    /// Of the last answer.
    device_step: Option<DeviceStep>,
    /// Shows that this thread goes on while it waits for the worker.
    pulse: Pulse,
}

/// Why a start came to nothing.
enum StartError {
    /// Another try may end otherwise.
    Retry(String),
    /// It will not.
    Final(String),
}

impl From<ChannelError> for StartError {
    fn from(e: ChannelError) -> Self {
        Self::Retry(e.to_string())
    }
}

impl WorkerProcess {
    /// A worker that has not started. Arenas of an earlier daemon are taken from `store`.
    pub fn new(
        spec: WorkerSpec,
        store: Arc<FdStore>,
        state: watch::Sender<ModelState>,
        pulse: Pulse,
    ) -> Self {
        let arenas = Arenas::new(store, &spec.model, spec.hello.device);
        Self {
            spec,
            arenas,
            running: None,
            reins: Arc::default(),
            changed: false,
            state,
            backoff: Backoff::new(TRIES as usize, Duration::from_secs(5)),
            attempts: 0,
            failed_launches: 0,
            starts: 0,
            info: None,
            submitted: VecDeque::new(),
            answered: Instant::now(),
            slowest_step: Duration::ZERO,
            device_step: None,
            pulse,
        }
    }

    /// By which the thread shows itself that waits for this worker.
    pub fn pulse(&self) -> Pulse {
        self.pulse.clone()
    }

    /// With these another thread ends it.
    pub fn reins(&self) -> Arc<Reins> {
        self.reins.clone()
    }

    /// The cgroup of the model's workers.
    pub fn cell(&self) -> Option<Arc<WorkerCgroup>> {
        self.spec.cell.clone()
    }

    /// Where it computes.
    pub fn device(&self) -> Device {
        self.spec.hello.device
    }

    /// What a GPU did in the step that was collected last.
    pub fn device_step(&self) -> Option<DeviceStep> {
        self.device_step
    }

    /// Brings up the first worker, once the last one of an earlier daemon is gone.
    pub fn start(&mut self) -> Result<ModelInfo, WorkersExhausted> {
        self.pulse.busy(2 * DEATH);
        self.arenas.settle();
        if let Some(Err(error)) = self.spec.cell.as_ref().map(|cell| cell.settle()) {
            warn!(model = self.spec.model, %error, "a worker of an earlier daemon may still write: its KV arena is not used again");
            self.arenas.forget_kv();
        }
        let info = self.bring_up()?;
        self.failed_launches = 0;
        Ok(info)
    }

    /// As [`Arenas::ledger`], after [`WorkerProcess::start`], with what the arena is to begin with; and what copies are made from.
    pub fn ledger(
        &mut self,
        info: &ModelInfo,
        cache_key: [u8; 32],
        seed: &Seed,
    ) -> io::Result<(Ledger<SharedMemory>, Shelf)> {
        if let Seed::Fresh(_) = seed {
            self.arenas.forget_ledger();
        }
        let mut ledger = self.arenas.ledger(info, cache_key)?;
        let shelf = self.arenas.shelf(&ledger, info, cache_key)?;
        if let Seed::Fresh(Some(saved)) = seed {
            match shelf.fill(saved, &mut ledger) {
                Ok(blocks) => info!(model = self.spec.model, blocks, "blocks of a checkpoint"),
                // Those that are not there are computed again.
                Err(error) => {
                    warn!(model = self.spec.model, %error, "not every block of the checkpoint is there");
                }
            }
        }
        Ok((ledger, shelf))
    }

    /// Starts workers until one is ready, or it is not worth while.
    fn bring_up(&mut self) -> Result<ModelInfo, WorkersExhausted> {
        loop {
            self.attempts += 1;
            if self.starts > 0 {
                let last = self.state.borrow().model().cloned();
                self.state.send_replace(ModelState::Restarting { attempt: self.attempts, last });
                // One that was ready is followed at once; what keeps one from starting may pass.
                let pause = self.backoff.next(Instant::now()).max(pause_after(self.failed_launches));
                self.pulse.within(pause, || thread::sleep(pause));
            }
            let error = match self.launch() {
                Ok(info) => return Ok(info),
                Err(StartError::Retry(error)) if !self.reins.ended() => error,
                Err(StartError::Final(error) | StartError::Retry(error)) => {
                    return Err(self.exhausted(error));
                }
            };
            warn!(model = self.spec.model, attempt = self.attempts, error, "worker did not start");
            self.launch_failed(&error)?;
        }
    }

    fn launch_failed(&mut self, error: &str) -> Result<(), WorkersExhausted> {
        self.failed_launches += 1;
        if self.failed_launches < TRIES {
            return Ok(());
        }
        Err(self.exhausted(format!("{error} ({TRIES} tries)")))
    }

    fn exhausted(&mut self, reason: String) -> WorkersExhausted {
        // The last one may hang, or be a zombie.
        self.running = None;
        // At the end of the daemon the model is as good as it was.
        if !self.reins.ended() {
            self.state.send_replace(ModelState::Failed { error: reason.clone() });
        }
        WorkersExhausted { reason }
    }

    /// One start, up to `Ready`. The new worker is started while the old one ends: it opens its GPU meanwhile, but is given no arena.
    fn launch(&mut self) -> Result<ModelInfo, StartError> {
        if let Some(Running { child, .. }) = &self.running {
            // It has the time of the start to be gone in.
            child.kill().map_err(|e| StartError::Final(format!("kill worker {}: {e}", child.pid())))?;
        }
        self.pulse.busy(EXEC + DEATH);
        let next = self.spawn()?;
        let pid = next.child.pid();
        self.fence().map_err(StartError::Final)?;
        self.pulse.busy(STEP_DEADLINE);
        let spec = &self.spec;
        let running = self.running.insert(next);
        fail_point!("worker-spawned", |_| Err(StartError::Retry("fail point worker-spawned".to_owned())));
        self.arenas.lend(running.child.as_fd()).map_err(|e| StartError::Retry(e.to_string()))?;
        let (weights, kv) = (self.arenas.weights(), self.arenas.kv());
        let bytes = |arena: Option<&Kept>| arena.map_or(0, |kept| kept.bytes);
        let hello = Hello {
            measure: spec.hello.measure && self.info.is_none(),
            weights_fd: weights.is_some(),
            kv_fd: kv.is_some(),
            weights_bytes: bytes(weights),
            kv_bytes: bytes(kv),
            known_cost: self.arenas.known_cost(),
            algorithms: self.arenas.algorithms().to_vec(),
            ..spec.hello.clone()
        };
        let fds: Vec<BorrowedFd<'_>> =
            [weights, kv].into_iter().flatten().map(|kept| kept.fd.as_fd()).collect();
        fail_point!("worker-hello", |_| Err(StartError::Retry("fail point worker-hello".to_owned())));
        running.channel.send(&ToWorker::Hello(hello), &fds)?;
        loop {
            match receive(&mut running.channel, LOAD_SILENCE, &self.pulse)? {
                FromWorker::Loading { permille } => {
                    self.state.send_if_modified(|state| match state {
                        ModelState::Loading { permille: shown } => {
                            *shown = permille;
                            true
                        }
                        ModelState::Ready(_) | ModelState::Restarting { .. } | ModelState::Failed { .. } => {
                            false
                        }
                    });
                }
                FromWorker::Arena { arena, bytes } => {
                    let fd = running.channel.take_fd()?;
                    info!(model = spec.model, ?arena, bytes, "new arena");
                    // Sequences of this daemon have their tokens in the KV arena that there is.
                    if arena == Arena::Weights || self.info.is_none() {
                        self.arenas.keep(arena, Kept { fd, bytes });
                    }
                }
                FromWorker::Ready(info) => {
                    fail_point!("worker-ready", |_| Err(StartError::Retry(
                        "fail point worker-ready".to_owned()
                    )));
                    let mut info = *info;
                    if let Some(before) = &self.info {
                        if (before.digest, before.blocks, before.block_bytes)
                            != (info.digest, info.blocks, info.block_bytes)
                        {
                            self.changed = true;
                            return Err(StartError::Final(
                                "the model's file changed under a running model".to_owned(),
                            ));
                        }
                        if !info.kv_reused {
                            return Err(StartError::Retry("it did not take over the KV arena".to_owned()));
                        }
                        info.cost = before.cost;
                    } else {
                        self.arenas.keep_cost(KnownCost::new(&spec.hello, &info));
                        self.arenas.keep_algorithms(&info.algorithms);
                    }
                    let cost = StepCost::from(info.cost);
                    info!(
                        model = spec.model,
                        pid,
                        load_us = info.load_us,
                        weights_reused = info.weights_reused,
                        kv_reused = info.kv_reused,
                        token_us = cost.step_us(1, 1, Pairs::default()),
                        tokens_128_us = cost.step_us(128, 1, Pairs::of_part(0, 128)),
                        row_pair_us = cost.row_pair_us,
                        part_pair_us = cost.part_pair_us,
                        "worker ready"
                    );
                    let restarts = self.starts - 1;
                    self.state.send_replace(ModelState::Ready(Arc::new(ReadyModel {
                        info: info.clone(),
                        pid,
                        restarts,
                    })));
                    self.info = Some(info.clone());
                    return Ok(info);
                }
                FromWorker::Failed { error, retry } => {
                    if self.info.is_none() {
                        // Arenas of an earlier daemon may be in its way, where another size or model is wanted now.
                        self.arenas.forget_kv();
                        // A GPU has no room for two.
                        if let Device::Cuda { .. } = spec.hello.device {
                            self.arenas.forget_weights();
                        }
                    }
                    return Err(if retry { StartError::Retry(error) } else { StartError::Final(error) });
                }
                FromWorker::Output(_) => {
                    return Err(StartError::Retry("an output before any plan".to_owned()));
                }
            }
        }
    }

    /// A process that waits for its `Hello`.
    fn spawn(&mut self) -> Result<Running, StartError> {
        fail_point!("worker-spawn", |_| Err(StartError::Retry("fail point worker-spawn".to_owned())));
        let spec = &self.spec;
        let (ours, theirs) =
            UnixStream::pair().map_err(|e| StartError::Retry(format!("socket pair: {e}")))?;
        let args = match spec.hello.device {
            Device::Cpu => Vec::new(),
            Device::Cuda { ordinal } => vec!["--gpu".into(), ordinal.to_string().into()],
        };
        let refused = |what: &str, e: &dyn std::fmt::Display| StartError::Retry(format!("{what}: {e}"));
        let leaf =
            spec.cell.as_ref().map(|cell| cell.next()).transpose().map_err(|e| refused("cgroup", &e))?;
        let cgroup = leaf.as_ref().map(WorkerLeaf::fd).transpose().map_err(|e| refused("cgroup", &e))?;
        let child = pagedd_host::spawn(Spawn {
            program: spec.program.clone(),
            args,
            env: spec.env.clone(),
            fds: vec![(OwnedFd::from(theirs), CHILD_SOCKET)],
            cgroup,
            identity: None,
            sandbox: Sandbox { no_new_privs: true, capabilities: Capabilities::None },
        })
        .map_err(|e| match e {
            SpawnError::Nul { .. } | SpawnError::FdNumber { .. } | SpawnError::Exec { .. } => {
                StartError::Final(e.to_string())
            }
            SpawnError::Step { .. } => StartError::Retry(e.to_string()),
        })?;
        self.starts += 1;
        let child = OwnChild::from(child);
        self.reins.hold(&child).map_err(|e| {
            let refused = if self.reins.ended() { StartError::Final } else { StartError::Retry };
            refused(e.to_string())
        })?;
        // A worker that hangs need not read either.
        ours.set_write_timeout(Some(STEP_DEADLINE)).map_err(|e| StartError::Retry(format!("socket: {e}")))?;
        let channel = Channel::new(ours).map_err(|e| StartError::Retry(format!("socket: {e}")))?;
        Ok(Running { child, channel, leaf })
    }

    /// Ends the old worker and proves it gone, so that no two processes ever write one arena.
    fn fence(&mut self) -> Result<(), String> {
        let Some(Running { child, channel, leaf }) = self.running.take() else { return Ok(()) };
        drop(channel);
        child.kill().map_err(|e| format!("kill worker {}: {e}", child.pid()))?;
        // Whatever it may have started goes with it.
        if let Some(Err(error)) = leaf.as_ref().map(WorkerLeaf::end) {
            return Err(format!("worker {}: {error}; its device is unsafe to use", child.pid()));
        }
        match child.wait(DEATH) {
            Ok(Some(status)) => {
                info!(model = self.spec.model, pid = child.pid(), ?status, "worker ended");
                Ok(())
            }
            Ok(None) => Err(format!("worker {} does not die; its device is unsafe to use", child.pid())),
            Err(e) => Err(format!("wait for worker {}: {e}", child.pid())),
        }
    }

    /// Sends, also to a worker that has ended: what it said last is still to be read.
    fn tell(&mut self, message: &ToWorker) -> Result<(), WorkerLost> {
        self.pulse.busy(STEP_DEADLINE);
        unless_closed(self.channel()?.send(message, &[]))
    }

    fn channel(&mut self) -> Result<&mut Channel, WorkerLost> {
        self.running
            .as_mut()
            .map(|running| &mut running.channel)
            .ok_or_else(|| WorkerLost { reason: "no worker runs".to_owned() })
    }
}

impl Worker for WorkerProcess {
    fn submit(&mut self, plan: &StepPlan) -> Result<(), WorkerLost> {
        let us = self.info.as_ref().map_or(0.0, |info| plan.predicted_us(&info.cost.into()));
        let predicted = Duration::from_micros(us as u64);
        self.submitted.push_back(Submitted { plan: plan.id, at: Instant::now(), predicted });
        fail_point!("before-plan", |_| Err(WorkerLost { reason: "fail point before-plan".to_owned() }));
        // It goes out with what is asked next: the output of the oldest plan. Only the first of two does not wait for the second to be made.
        let first = self.submitted.len() == 1 && self.device() != Device::Cpu;
        if first {
            self.pulse.busy(STEP_DEADLINE);
        }
        let channel = self.channel()?;
        let held = convert::hold_plan(plan, channel);
        unless_closed(held.and_then(|()| if first { channel.flush() } else { Ok(()) }))
    }

    fn collect(&mut self) -> Result<StepOutput, WorkerLost> {
        let Some(Submitted { plan, at, predicted }) = self.submitted.pop_front() else {
            return Err(WorkerLost { reason: "no plan is out".to_owned() });
        };
        fail_point!("before-output", |_| Err(WorkerLost { reason: "fail point before-output".to_owned() }));
        self.tell(&ToWorker::Collect)?;
        // A worker runs plans one after the other.
        let since = at.max(self.answered);
        let left = deadline(predicted, self.slowest_step).saturating_sub(since.elapsed());
        let pulse = self.pulse.clone();
        match receive(self.channel()?, left.max(ANSWER), &pulse).map_err(|e| lost(&e))? {
            FromWorker::Output(output) if output.plan == plan.0 => {
                self.attempts = 0;
                self.backoff.forgive();
                self.answered = Instant::now();
                self.slowest_step = self.slowest_step.max(self.answered - since);
                self.device_step = output.device;
                Ok(convert::output(output))
            }
            FromWorker::Output(output) => {
                Err(WorkerLost { reason: format!("it answered {plan} with plan {}", output.plan) })
            }
            FromWorker::Failed { error, .. } => Err(WorkerLost { reason: error }),
            FromWorker::Loading { .. } | FromWorker::Arena { .. } | FromWorker::Ready(_) => {
                Err(WorkerLost { reason: "it answered a plan with a load message".to_owned() })
            }
        }
    }

    fn recover(&mut self, sequences: Vec<SequenceSnapshot>) -> Result<(), WorkersExhausted> {
        fail_point!("before-recovery");
        self.submitted.clear();
        let states: Vec<_> = sequences.iter().map(convert::sequence).collect();
        loop {
            self.bring_up()?;
            fail_point!("before-resync");
            let pulse = self.pulse.clone();
            pulse.busy(3 * STEP_DEADLINE);
            let told = self.channel().and_then(|channel| resync(channel, states.clone(), &pulse));
            let Err(lost) = told else {
                fail_point!("after-resync");
                self.failed_launches = 0;
                return Ok(());
            };
            warn!(model = self.spec.model, reason = lost.reason, "worker lost before it knew its sequences");
            self.launch_failed(&lost.reason)?;
        }
    }

    fn ends_as(&self) -> Option<FinishReason> {
        let reason = if self.changed { FinishReason::ModelChanged } else { FinishReason::ModelGone };
        (!self.reins.ended()).then_some(reason)
    }
}

/// How long a step may take where the slowest took `slowest`. `predicted` is zero where nothing is known.
fn deadline(predicted: Duration, slowest: Duration) -> Duration {
    (slowest * STEP_SLACK).clamp(STEP_DEADLINE, LONGEST_STEP_DEADLINE).max(predicted * STEP_SLACK)
}

/// How long to wait before the next start, where so many in a row did not come up.
fn pause_after(failed: u32) -> Duration {
    failed
        .checked_sub(1)
        .map_or(Duration::ZERO, |doublings| (PAUSE.0 * 2_u32.saturating_pow(doublings)).min(PAUSE.1))
}

/// Waits for what a worker says, at most `limit`, and shows meanwhile that this thread goes on: it is the worker's time that passes.
fn receive(channel: &mut Channel, limit: Duration, pulse: &Pulse) -> Result<FromWorker, ChannelError> {
    let start = Instant::now();
    loop {
        pulse.turn();
        let left = limit.saturating_sub(start.elapsed());
        match channel.recv_timeout(left.min(TURN)) {
            Err(ChannelError::TimedOut(_)) if left > TURN => {}
            Err(ChannelError::TimedOut(_)) => return Err(ChannelError::TimedOut(limit)),
            received => return received,
        }
    }
}

/// Tells a worker its sequences, and waits until it has taken them in: one that ends before is no victim of the next plan.
fn resync(channel: &mut Channel, states: Vec<SequenceState>, pulse: &Pulse) -> Result<(), WorkerLost> {
    // The answer to a plan of nothing shows it.
    let asked = [ToWorker::Resync(states), ToWorker::Plan(Plan::default()), ToWorker::Collect];
    asked.iter().try_for_each(|frame| channel.send(frame, &[])).map_err(|e| lost(&e))?;
    match receive(channel, STEP_DEADLINE, pulse).map_err(|e| lost(&e))? {
        FromWorker::Output(output) if output.plan == Plan::default().id => Ok(()),
        FromWorker::Failed { error, .. } => Err(WorkerLost { reason: error }),
        FromWorker::Output(_)
        | FromWorker::Loading { .. }
        | FromWorker::Arena { .. }
        | FromWorker::Ready(_) => {
            Err(WorkerLost { reason: "it answered a resync with something else".to_owned() })
        }
    }
}

/// What was sent, also to a worker that has ended.
fn unless_closed(sent: Result<(), ChannelError>) -> Result<(), WorkerLost> {
    match sent {
        Ok(()) | Err(ChannelError::Closed) => Ok(()),
        Err(error) => Err(lost(&error)),
    }
}

fn lost(error: &ChannelError) -> WorkerLost {
    WorkerLost { reason: error.to_string() }
}

#[cfg(test)]
mod tests;
