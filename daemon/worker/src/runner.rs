//! A loaded model that runs plans.
//!
//! **Owns** what is known of sequences, and the order begin, copies, rows, sampling, end, the same on every device. **Never** talks to the
//! daemon: [`crate::serve`] does, and tests run plans in-process.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use pagedd_core::{MOST_STEP_TOKENS, StepCost};
use pagedd_kernels::KvError;
use pagedd_model::ModelSource;
use pagedd_wire::worker::{
    Arena as WhichArena, BlockCopy, Device, DeviceStep, Hello, Input, MOST_IN_FLIGHT, ModelInfo, Output,
    Plan, Row, Sampled, SequenceState,
};

use crate::arena::ArenaError;
use crate::batch::{self, Batch, Limits, PlanError};
use crate::calibrate::{self, Machine};
use crate::cpu;
#[cfg(feature = "cuda")]
use crate::gpu;
use crate::load::LoadError;
use crate::memory::KvRequest;
use crate::sample::Request;
use crate::sequence::{Draw, Sequences};

/// Most rows of a plan that scratch memory is made for.
const MOST_ROWS: u32 = 4096;

/// Fds of arenas of an earlier worker.
#[derive(Debug, Default)]
pub struct Fds {
    /// Weights.
    pub weights: Option<OwnedFd>,
    /// KV blocks.
    pub kv: Option<OwnedFd>,
}

/// A plan was not run, or not to its end: the worker cannot go on.
#[derive(thiserror::Error, Debug)]
pub enum RunError {
    /// The plan must not be run; nothing has been written.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A kernel refused shapes that had been checked: a bug of this program.
    #[error("kernel: {0}")]
    Kernel(#[from] KvError),
    /// The GPU failed, which only another process can leave behind.
    #[cfg(feature = "cuda")]
    #[error("GPU: {0}")]
    Gpu(#[from] pagedd_kernels::cuda::CudaError),
    /// Steps cannot be measured on the arena that there is.
    #[cfg(feature = "cuda")]
    #[error("the KV arena holds blocks of an earlier worker, or is too small")]
    ArenaInUse,
    /// Every plan that was submitted is collected.
    #[error("no plan is out")]
    NothingOut,
    /// More plans than can be on their way.
    #[error("{MOST_IN_FLIGHT} plans are out already")]
    TooManyOut,
    /// No memory for an arena.
    #[error(transparent)]
    Arena(#[from] ArenaError),
    /// No fd of an arena could be had.
    #[error("fd of an arena: {0}")]
    Fd(io::Error),
}

impl RunError {
    /// Whether another worker could do better with the same plan.
    pub fn retry(&self) -> bool {
        match self {
            #[cfg(feature = "cuda")]
            Self::Gpu(_) | Self::ArenaInUse => true,
            Self::Arena(_) | Self::Fd(_) => true,
            Self::Plan(_) | Self::Kernel(_) | Self::NothingOut | Self::TooManyOut => false,
        }
    }
}

/// An arena as the daemon keeps it.
#[derive(Debug)]
pub struct ArenaFd {
    /// To be mapped by the next worker.
    pub fd: OwnedFd,
    /// Its size.
    pub bytes: u64,
}

/// A model's arenas on a device, and what computes there.
pub trait Compute: fmt::Debug + Send {
    /// Whether these draws must be made while no other step is on its way: such a step is done when it is submitted.
    fn is_alone(&self, pending: &Pendings, sequences: &Sequences) -> bool;

    /// Forgets steps that were submitted and not collected.
    fn forget(&mut self);

    /// Copies blocks, computes the rows, and makes the draws of `pending`, or has all that begun: whether it is done.
    ///
    /// What is not done is to be collected before the next but one is submitted. Only where the one before is not done has the batch unknown
    /// tokens.
    ///
    /// # Errors
    /// The device failed, or shapes that had been checked do not fit.
    fn submit(
        &mut self,
        copies: &[BlockCopy],
        batch: &Batch,
        pending: &Pendings,
        sequences: &Sequences,
        limits: &Limits,
    ) -> Result<bool, RunError>;

    /// Waits for the oldest step that was submitted, and gives what `pending` of it drew.
    ///
    /// # Errors
    /// The device failed.
    fn collect(&mut self, pending: &Pendings) -> Result<Vec<Result<Sampled, String>>, RunError>;

    /// What a GPU did in the step that was collected last.
    fn device_step(&self) -> Option<DeviceStep> {
        None
    }

    /// An fd of an arena.
    ///
    /// # Errors
    /// The system gave none.
    fn arena(&self, which: WhichArena) -> Result<ArenaFd, RunError>;

    /// An arena's data; none where they are a GPU's.
    fn data(&self, which: WhichArena) -> &[u8];

    /// Puts a KV arena of `blocks` blocks in place on which steps are measured.
    ///
    /// # Errors
    /// There is no memory for it, or none may be touched.
    fn set_aside(&mut self, blocks: u32) -> Result<(), RunError>;

    /// Puts the real one back.
    fn put_back(&mut self);
}

/// What a device made of `Hello`.
#[derive(Debug)]
pub struct Loaded {
    /// The model.
    pub model: Box<dyn Compute>,
    /// What is told of it.
    pub info: ModelInfo,
}

/// A loaded model.
#[derive(Debug)]
pub struct ModelRunner {
    model: Box<dyn Compute>,
    sequences: Sequences,
    limits: Limits,
    info: ModelInfo,
    /// Plans that were submitted and not collected, oldest first.
    flights: VecDeque<Flight>,
    /// When the last plan was done.
    done: Option<Instant>,
}

/// A plan on its way.
#[derive(Debug)]
struct Flight {
    plan: u64,
    batch: Batch,
    pending: Pendings,
    submitted: Instant,
    /// Once it is done.
    output: Option<Output>,
}

impl ModelRunner {
    /// Loads what `hello` names. `progress` is told per mille, and says whether to go on.
    ///
    /// Arenas of an earlier worker are used as they are where they hold exactly this model; otherwise new ones are made, which
    /// [`ModelRunner::info`] tells.
    ///
    /// # Errors
    /// [`LoadError`], with the tensor, key or setting named.
    pub fn load(hello: &Hello, fds: Fds, progress: &mut dyn FnMut(u32) -> bool) -> Result<Self, LoadError> {
        check_settings(hello)?;
        let loaded = match hello.device {
            Device::Cpu => cpu::load(hello, fds, progress)?,
            #[cfg(feature = "cuda")]
            Device::Cuda { ordinal } => gpu::load(hello, ordinal, fds, progress)?,
            #[cfg(not(feature = "cuda"))]
            Device::Cuda { ordinal } => {
                let problem = format!(
                    "cuda:{ordinal}: this pagedd-worker was built without GPU support; build it with `make build-gpu`"
                );
                return Err(LoadError::Setting { key: "device", problem });
            }
        };
        Ok(Self::new(hello, loaded))
    }

    /// Of a model that was loaded as `hello` says. What its steps take is measured where `hello` asks for it.
    pub fn new(hello: &Hello, loaded: Loaded) -> Self {
        let Loaded { model, info } = loaded;
        let limits = limits(hello, &info);
        let (room, longest) =
            (u64::from(info.blocks) * u64::from(info.block_size), u64::from(info.max_model_len));
        if room < longest {
            tracing::warn!(
                room,
                longest,
                "KV arena has less room than the longest sequence needs, in tokens"
            );
        }
        let sequences = Sequences::default();
        let mut runner = Self { model, sequences, limits, info, flights: VecDeque::new(), done: None };
        match hello.known_cost {
            Some(known) if known.holds_for(hello, &runner.info) => runner.info.cost = known.cost,
            Some(_) | None if hello.measure => runner.measure(hello.device),
            Some(_) | None => {}
        }
        runner
    }

    /// Measures what steps take, on a KV arena that is there only meanwhile, or on a GPU's own before anything lies in it. Nothing depends on
    /// it: where it fails, steps are planned as if time did not count.
    fn measure(&mut self, device: Device) {
        let start = Instant::now();
        let machine = match device {
            Device::Cpu => Machine::Processor,
            Device::Cuda { .. } => Machine::Gpu,
        };
        let capacity = calibrate::blocks(machine, &self.limits);
        if let Err(error) = self.model.set_aside(capacity) {
            return tracing::warn!(%error, "steps could not be measured");
        }
        let limits = self.limits;
        self.limits.capacity = capacity;
        let cost =
            calibrate::measure(machine, &limits, |plan| self.run(plan).map(|output| output.compute_us));
        self.model.put_back();
        // Where it failed, something may be on its way.
        self.model.forget();
        self.flights.clear();
        (self.limits, self.sequences) = (limits, Sequences::default());
        match cost {
            Ok(cost) => {
                let StepCost { body_us, head_us, row_pair_us, part_pair_us } = cost;
                let took_us = start.elapsed().as_micros() as u64;
                tracing::info!(took_us, ?body_us, ?head_us, row_pair_us, part_pair_us, "steps measured");
                self.info.cost = cost.into();
            }
            Err(error) => tracing::warn!(%error, "steps could not be measured"),
        }
    }

    /// What was loaded.
    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    /// The limits that plans are checked against.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// An fd of one of the arenas.
    ///
    /// # Errors
    /// [`RunError`]: the system gave none.
    pub fn arena(&self, which: WhichArena) -> Result<ArenaFd, RunError> {
        self.model.arena(which)
    }

    /// An arena's data; none where they are a GPU's.
    pub fn data(&self, which: WhichArena) -> &[u8] {
        self.model.data(which)
    }

    /// Says how long loading took, for [`ModelRunner::info`].
    pub fn set_load_time(&mut self, took: Duration) {
        self.info.load_us = took.as_micros() as u64;
    }

    /// Forgets every sequence; these are the live ones. Every plan is collected before.
    ///
    /// # Errors
    /// [`PlanError`]; nothing has changed.
    pub fn resync(&mut self, states: Vec<SequenceState>) -> Result<(), PlanError> {
        batch::check_states(&states, &self.limits)?;
        self.sequences.resync(states);
        Ok(())
    }

    /// Runs a plan, and those submitted before it.
    ///
    /// # Errors
    /// [`RunError`]; on [`RunError::Plan`] nothing has been written.
    pub fn run(&mut self, plan: &Plan) -> Result<Output, RunError> {
        self.submit(plan)?;
        loop {
            let output = self.collect()?;
            if self.flights.is_empty() {
                return Ok(output);
            }
        }
    }

    /// Has a plan begun, behind those submitted before it: one at the most that is not collected.
    ///
    /// # Errors
    /// [`RunError`]; on [`RunError::Plan`] nothing has been written.
    pub fn submit(&mut self, plan: &Plan) -> Result<(), RunError> {
        let submitted = Instant::now();
        if self.flights.len() == MOST_IN_FLIGHT {
            return Err(RunError::TooManyOut);
        }
        self.sequences.forget_before(plan.id);
        if self.needs_tokens(plan) {
            self.finish()?;
        }
        let batch = batch::check(plan, &self.sequences, &self.limits)?;
        batch::apply(plan, &batch, &mut self.sequences);
        let pending = Pendings::new(&batch, &self.sequences);
        if self.model.is_alone(&pending, &self.sequences) {
            self.finish_all()?;
        }
        let done = self.model.submit(&plan.copies, &batch, &pending, &self.sequences, &self.limits)?;
        for row in &batch.failed {
            for &seq in who(row) {
                self.sequences.record(plan.id, seq, Draw::Failed);
            }
        }
        for (draw, pending) in (0..).zip(&pending.draws).filter(|(_, pending)| pending.nameable) {
            self.sequences.record(plan.id, pending.of.seq, Draw::Pending(draw));
        }
        for &seq in &plan.end {
            self.sequences.end(plan.id, seq);
        }
        self.flights.push_back(Flight { plan: plan.id, batch, pending, submitted, output: None });
        if done { self.finish_all() } else { Ok(()) }
    }

    /// Waits for every plan.
    fn finish_all(&mut self) -> Result<(), RunError> {
        while self.flights.iter().any(|flight| flight.output.is_none()) {
            self.finish()?;
        }
        Ok(())
    }

    /// Waits for the oldest plan that was submitted and not collected.
    ///
    /// # Errors
    /// [`RunError`]: also where there is none.
    pub fn collect(&mut self) -> Result<Output, RunError> {
        if self.flights.front().is_some_and(|flight| flight.output.is_none()) {
            self.finish()?;
        }
        self.flights.pop_front().and_then(|flight| flight.output).ok_or(RunError::NothingOut)
    }

    /// Whether tokens that are not known yet come before what `plan` draws with penalties.
    fn needs_tokens(&self, plan: &Plan) -> bool {
        let mut draws = self.sequences.draws();
        let mut unknown = |input: &Input| match *input {
            Input::Known(_) => false,
            Input::Sampled { plan, seq } => matches!(draws.get(plan, seq), Some(Draw::Pending(_))),
        };
        self.sequences.remember()
            && plan.rows.iter().any(|row| {
                self.sequences.get(row.seq).is_some_and(|sequence| sequence.known().is_some())
                    && row.inputs.iter().any(&mut unknown)
            })
    }

    /// Waits for the oldest plan that is not done.
    fn finish(&mut self) -> Result<(), RunError> {
        let Some(index) = self.flights.iter().position(|flight| flight.output.is_none()) else {
            return Ok(());
        };
        let drawn = self.model.collect(&self.flights[index].pending)?;
        let Flight { plan, batch, submitted, .. } = &mut self.flights[index];
        let (plan, batch, submitted) = (*plan, std::mem::take(batch), *submitted);
        let mut output = Output { plan, ..Output::default() };
        let lost = "an input token of it could not be computed";
        for row in &batch.failed {
            output.failed.extend(who(row).iter().map(|&seq| (seq, lost.to_owned())));
        }
        let mut drawn = drawn.into_iter();
        output.sampled.reserve(drawn.len());
        let mut draws = self.sequences.draws();
        let failed =
            batch.unknown.iter().filter(|input| draws.get(input.plan, input.seq) == Some(Draw::Failed));
        // In the order of tokens, as the rows are.
        let failed: Vec<usize> = failed.map(|input| input.token).collect();
        let mut failed = failed.into_iter().peekable();
        for row in &batch.rows {
            let guesses = &batch.tokens[row.tokens.end - row.drafts..row.tokens.end];
            let mut computed = true;
            while failed.next_if(|token| *token < row.tokens.end).is_some() {
                computed = false;
            }
            for &seq in &row.samples {
                let mut own = drawn.by_ref().take(1 + row.drafts);
                if computed {
                    self.take(plan, seq, guesses, &mut own, &mut output);
                }
                // What lies behind a wrong guess is nobody's.
                own.for_each(drop);
                if !computed {
                    self.sequences.record(plan, seq, Draw::Failed);
                    output.failed.push((seq, lost.to_owned()));
                }
            }
            if !computed && row.samples.is_empty() {
                output.failed.push((row.seq, lost.to_owned()));
            }
        }
        let now = Instant::now();
        let begun = self.done.map_or(submitted, |done| done.max(submitted));
        output.compute_us = now.duration_since(begun).as_micros() as u64;
        output.device = self.model.device_step();
        self.done = Some(now);
        self.flights[index].output = Some(output);
        Ok(())
    }

    /// Takes a sequence's draws in order, up to the first that differs from the guess at its place. Only what a row without guesses draws
    /// is recorded: no later plan names the others.
    fn take(
        &mut self,
        plan: u64,
        seq: u64,
        guesses: &[u32],
        drawn: &mut dyn Iterator<Item = Result<Sampled, String>>,
        output: &mut Output,
    ) {
        let nameable = guesses.is_empty();
        let mut guesses = guesses.iter();
        for (number, drawn) in drawn.enumerate() {
            let draw = match drawn {
                Ok(sampled) => {
                    let token = sampled.token;
                    output.sampled.push(sampled);
                    Draw::Token(token)
                }
                // The next plan computes this position again, and fails where a row without guesses would.
                Err(_) if number > 0 => return,
                Err(error) => {
                    output.failed.push((seq, error));
                    Draw::Failed
                }
            };
            if nameable {
                self.sequences.record(plan, seq, draw);
            }
            if guesses.next().copied().map(Draw::Token) != Some(draw) {
                return;
            }
        }
    }
}

/// Who draws from a row, or computes it without.
fn who(row: &Row) -> &[u64] {
    if row.samples.is_empty() { std::slice::from_ref(&row.seq) } else { &row.samples }
}

/// A draw that waits for its logits.
#[derive(Clone, Copy, Debug)]
pub struct Pending {
    /// What is drawn.
    pub of: Request,
    /// Whose tokens came before: those of the sequence that computed the row, which are its own up to there.
    pub row: u64,
    /// Row of the logits: place in what is wanted.
    pub logits: usize,
    /// A later plan may name it: its row guesses nothing.
    pub nameable: bool,
}

/// What a batch draws.
#[derive(Default, Debug)]
pub struct Pendings {
    /// Which of its tokens are drawn from: indices, ascending.
    pub wanted: Vec<usize>,
    /// In the order of rows, their samples and their guesses.
    pub draws: Vec<Pending>,
}

impl Pendings {
    /// Of a batch that was applied.
    pub fn new(batch: &Batch, sequences: &Sequences) -> Self {
        let (mut wanted, mut draws) =
            (Vec::with_capacity(batch.rows.len()), Vec::with_capacity(batch.rows.len()));
        for row in batch.rows.iter().filter(|row| !row.samples.is_empty()) {
            for &seq in &row.samples {
                if let Some(sequence) = sequences.get(seq) {
                    let (choice, params) = (sequence.choice, sequence.sampling);
                    draws.extend((0..=row.drafts).map(|guess| {
                        let position = row.certain() + guess as u32;
                        Pending {
                            of: Request { seq, choice, position, params },
                            row: row.seq,
                            logits: wanted.len() + guess,
                            nameable: row.drafts == 0,
                        }
                    }));
                }
            }
            wanted.extend(row.tokens.end - 1 - row.drafts..row.tokens.end);
        }
        Self { wanted, draws }
    }
}

/// What is told of a model on every device; the rest is the device's to fill in.
pub fn info(source: &ModelSource, request: &KvRequest) -> ModelInfo {
    let config = source.config();
    ModelInfo {
        architecture: config.architecture.to_string(),
        parameters: 0,
        vocab_size: config.vocab as u32,
        max_model_len: request.max_model_len,
        block_size: request.block_size,
        blocks: 0,
        block_bytes: request.block_bytes,
        weight_bytes: 0,
        scratch_bytes: 0,
        pinned_bytes: 0,
        digest: [0; 16],
        file_digest: source.digest(),
        kv_id: [0; 16],
        weights_reused: false,
        kv_reused: false,
        threads: 0,
        kernels: String::new(),
        load_us: 0,
        cost: StepCost::UNKNOWN.into(),
        algorithms: Vec::new(),
    }
}

/// What plans are checked against.
pub fn limits(hello: &Hello, info: &ModelInfo) -> Limits {
    Limits {
        max_num_seqs: hello.max_num_seqs as usize,
        max_num_batched_tokens: hello.max_num_batched_tokens as usize,
        max_model_len: info.max_model_len,
        block_size: hello.block_size,
        capacity: info.blocks,
        vocab_size: info.vocab_size,
    }
}

fn check_settings(hello: &Hello) -> Result<(), LoadError> {
    let wrong = |key, problem: String| Err(LoadError::Setting { key, problem });
    if !hello.block_size.is_power_of_two() || !(16..=512).contains(&hello.block_size) {
        return wrong("block_size", format!("{}: it must be a power of two in [16, 512]", hello.block_size));
    }
    if hello.max_num_seqs == 0 || hello.max_num_seqs > MOST_ROWS {
        return wrong("max_num_seqs", format!("{}: it must lie in [1, {MOST_ROWS}]", hello.max_num_seqs));
    }
    if hello.max_num_batched_tokens == 0 || hello.max_num_batched_tokens > MOST_STEP_TOKENS {
        let found = hello.max_num_batched_tokens;
        return wrong("max_num_batched_tokens", format!("{found}: it must lie in [1, {MOST_STEP_TOKENS}]"));
    }
    if hello.max_model_len == Some(0) {
        return wrong("max_model_len", "0: it must be positive".to_owned());
    }
    Ok(())
}
