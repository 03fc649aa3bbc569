//! A loaded model that runs plans.
//!
//! **Owns** both arenas, what is known of sequences, and the order begin, copies, rows, sampling, end. **Never** talks to the
//! daemon: [`crate::serve`] does, and tests run plans in-process.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use pagedd_core::{BlockId, StepCost};
use pagedd_kernels::{Isa, KvElement, KvError, KvLayout, KvRow, SlotMapping, copy_block};
use pagedd_model::ModelSource;
use pagedd_wire::worker::{
    Device, Dtype, Hello, KvDtype, MOST_DRAFTS, ModelInfo, Output, Plan, Sampled, SequenceState,
};

use crate::arena::{self, Arena, ArenaError, Header, Kind};
use crate::batch::{self, Batch, Limits, PlanError};
use crate::calibrate;
use crate::forward::Decoder;
use crate::load::{self, LoadError};
use crate::memory::{self, KvRequest};
use crate::numa;
use crate::sample::{Request, sample};
use crate::sequence::{Draw, Sequences};
use crate::weights::Places;

/// Raised when packed weights or keys and values change their meaning under an unchanged layout.
const CONTENT_VERSION: u32 = 2;
/// Most rows and most input tokens of a plan that scratch memory is made for.
const MOST_ROWS: u32 = 4096;
const MOST_TOKENS: u32 = 65_536;

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
}

/// A loaded model.
#[derive(Debug)]
pub struct ModelRunner {
    decoder: Decoder,
    kv: Arena,
    layout: KvLayout,
    sequences: Sequences,
    limits: Limits,
    info: ModelInfo,
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
        let isa = Isa::detect();
        let threads = match hello.threads {
            Some(threads) => threads.clamp(1, 1024) as usize,
            None => std::thread::available_parallelism().map_or(1, usize::from),
        };
        let source = ModelSource::open(Path::new(&hello.path))?;
        let config = source.config().clone();
        let places = Places::new(&source, hello.dtype == Dtype::F32)?;
        let element = match hello.kv_dtype {
            KvDtype::F16 => KvElement::F16,
            KvDtype::F32 => KvElement::F32,
            KvDtype::Bf16 => {
                let problem = "bf16: the CPU keeps f16 or f32".to_owned();
                return Err(LoadError::Setting { key: "kv_dtype", problem });
            }
        };
        let layout = KvLayout::new(
            config.layers,
            config.kv_heads,
            config.head_dim,
            hello.block_size as usize,
            element,
        )
        .map_err(|problem| LoadError::Shape { item: "key-value cache", problem })?;
        let max_model_len = hello.max_model_len.map_or(config.context.0, |limit| limit.min(config.context.0));

        let identity = weights_identity(&source, &places);
        let (weights, weights_reused) = weights(&source, &places, identity, fds.weights, threads, progress)?;
        let kv_identity = kv_identity(&identity, &layout, isa);
        let request = KvRequest {
            memory: hello.kv_memory,
            block_size: hello.block_size,
            block_bytes: layout.block_stride() as u64,
            max_num_seqs: hello.max_num_seqs,
            max_model_len,
        };
        let (kv, kv_reused) = kv(&request, kv_identity, fds.kv)?;
        let blocks = (kv.header().data_bytes / request.block_bytes) as u32;

        let (room, longest) = (u64::from(blocks) * u64::from(hello.block_size), u64::from(max_model_len));
        if room < longest {
            tracing::warn!(
                room,
                longest,
                "KV arena has less room than the longest sequence needs, in tokens"
            );
        }

        let info = ModelInfo {
            architecture: config.architecture.to_string(),
            parameters: places.parameters,
            vocab_size: config.vocab as u32,
            max_model_len,
            block_size: hello.block_size,
            blocks,
            block_bytes: request.block_bytes,
            weight_bytes: places.bytes as u64,
            digest: kv_identity[..16].try_into().unwrap_or_default(),
            file_digest: source.digest(),
            kv_id: kv.id(),
            weights_reused,
            kv_reused,
            threads: threads as u32,
            kernels: isa.as_str().to_owned(),
            load_us: 0,
            cost: StepCost::UNKNOWN.into(),
        };
        let limits = Limits {
            max_num_seqs: hello.max_num_seqs as usize,
            max_num_batched_tokens: hello.max_num_batched_tokens as usize,
            max_model_len,
            block_size: hello.block_size,
            capacity: blocks,
            vocab_size: info.vocab_size,
        };
        // A batch has at least a token per row, and one per guess.
        let tokens = limits.max_num_batched_tokens;
        let draws = (limits.max_num_seqs + MOST_DRAFTS as usize).min(tokens);
        let decoder =
            Decoder::new(config, places, weights, isa, threads, tokens, draws).map_err(LoadError::Threads)?;
        let mut runner = Self { decoder, kv, layout, sequences: Sequences::default(), limits, info };
        match hello.known_cost {
            Some(known) if known.holds_for(hello, &runner.info) => runner.info.cost = known.cost,
            Some(_) | None if hello.measure => runner.measure(),
            Some(_) | None => {}
        }
        Ok(runner)
    }

    /// Measures what steps take, on a KV arena that is there only meanwhile: of the real one every byte may be needed. Nothing depends on
    /// it: where it fails, steps are planned as if time did not count.
    fn measure(&mut self) {
        let start = Instant::now();
        let capacity = calibrate::blocks(&self.limits);
        let data_bytes = u64::from(capacity) * self.info.block_bytes;
        let private = match Arena::create(Header { kind: Kind::Kv, data_bytes, identity: [0; 32] }) {
            Ok(private) => private,
            Err(error) => return tracing::warn!(%error, "steps could not be measured"),
        };
        let (kv, limits) = (std::mem::replace(&mut self.kv, private), self.limits);
        self.limits.capacity = capacity;
        let cost = calibrate::measure(&limits, |plan| self.run(plan).map(|output| output.compute_us));
        (self.kv, self.limits, self.sequences) = (kv, limits, Sequences::default());
        match cost {
            Ok(cost) => {
                let StepCost { body_us, head_us, pair_us } = cost;
                let took_us = start.elapsed().as_micros() as u64;
                tracing::info!(took_us, ?body_us, ?head_us, pair_us, "steps measured");
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

    /// One of the arenas.
    pub fn arena(&self, which: pagedd_wire::worker::Arena) -> &Arena {
        match which {
            pagedd_wire::worker::Arena::Weights => self.decoder.weights(),
            pagedd_wire::worker::Arena::Kv => &self.kv,
        }
    }

    /// Says how long loading took, for [`ModelRunner::info`].
    pub fn set_load_time(&mut self, took: Duration) {
        self.info.load_us = took.as_micros() as u64;
    }

    /// Forgets every sequence; these are the live ones.
    ///
    /// # Errors
    /// [`PlanError`]; nothing has changed.
    pub fn resync(&mut self, states: Vec<SequenceState>) -> Result<(), PlanError> {
        batch::check_states(&states, &self.limits)?;
        self.sequences.resync(states);
        Ok(())
    }

    /// Runs a plan.
    ///
    /// # Errors
    /// [`RunError`]; on [`RunError::Plan`] nothing has been written.
    pub fn run(&mut self, plan: &Plan) -> Result<Output, RunError> {
        let start = Instant::now();
        self.sequences.forget_before(plan.id);
        let batch = batch::check(plan, &self.sequences, &self.limits)?;
        batch::apply(plan, &batch, &mut self.sequences);
        for copy in &plan.copies {
            let (from, to) = (BlockId(copy.from), BlockId(copy.to));
            copy_block(&self.layout, from, to, copy.tokens as usize, self.kv.data_mut())?;
        }
        let pending = self.compute(&batch)?;
        let mut output = Output { plan: plan.id, ..Output::default() };
        for row in &batch.failed {
            let who = if row.samples.is_empty() { std::slice::from_ref(&row.seq) } else { &row.samples };
            for &seq in who {
                self.sequences.record(plan.id, seq, Draw::Failed);
                output.failed.push((seq, "an input token of it could not be computed".to_owned()));
            }
        }
        let mut drawn = self.draw(&pending).into_iter();
        for row in &batch.rows {
            let guesses = &batch.tokens[row.tokens.end - row.drafts..row.tokens.end];
            for &seq in &row.samples {
                let drawn: Vec<_> = drawn.by_ref().take(1 + row.drafts).collect();
                self.take(plan.id, seq, guesses, drawn, &mut output);
            }
        }
        for &seq in &plan.end {
            self.sequences.end(plan.id, seq);
        }
        output.compute_us = start.elapsed().as_micros() as u64;
        Ok(output)
    }

    /// Takes a sequence's draws in order, up to the first that differs from the guess at its place. Only what a row without guesses draws
    /// is recorded: no later plan names the others.
    fn take(
        &mut self,
        plan: u64,
        seq: u64,
        guesses: &[u32],
        drawn: Vec<Result<Sampled, String>>,
        output: &mut Output,
    ) {
        let nameable = guesses.is_empty();
        let mut guesses = guesses.iter();
        for (number, drawn) in drawn.into_iter().enumerate() {
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

    /// Runs the rows; gives what is to be drawn, in the order of rows, their samples and their guesses.
    fn compute(&mut self, batch: &Batch) -> Result<Vec<Pending>, RunError> {
        if batch.rows.is_empty() {
            return Ok(Vec::new());
        }
        let rows: Vec<KvRow<'_>> = batch
            .rows
            .iter()
            .map(|row| KvRow {
                first_position: row.start,
                tokens: row.tokens.len() as u32,
                table: batch::table(&self.sequences, row),
            })
            .collect();
        let mapping = SlotMapping::new(&self.layout, self.limits.capacity, &rows)?;
        let mut wanted = Vec::new();
        let mut pending = Vec::new();
        for row in batch.rows.iter().filter(|row| !row.samples.is_empty()) {
            for &seq in &row.samples {
                if let Some(sequence) = self.sequences.get(seq) {
                    let (choice, params) = (sequence.choice, sequence.sampling);
                    pending.extend((0..=row.drafts).map(|guess| {
                        let position = row.certain() + guess as u32;
                        Pending {
                            of: Request { seq, choice, position, params },
                            row: row.seq,
                            logits: wanted.len() + guess,
                        }
                    }));
                }
            }
            wanted.extend(row.tokens.end - 1 - row.drafts..row.tokens.end);
        }
        self.decoder.forward(&batch.tokens, &batch.positions, &mapping, &wanted, self.kv.data_mut())?;
        Ok(pending)
    }

    /// Draws everything, spread over the threads.
    fn draw(&self, pending: &[Pending]) -> Vec<Result<Sampled, String>> {
        let rows = pending.last().map_or(0, |last| last.logits + 1);
        let logits: Vec<&[f32]> = self.decoder.logits(rows).collect();
        let mut drawn: Vec<Option<Result<Sampled, String>>> = vec![None; pending.len()];
        self.decoder.pool().for_parts(&mut drawn, 1, &|index, drawn| {
            let Pending { of, row, logits: place } = &pending[index];
            let past = self.sequences.past(*row, of.position as usize);
            drawn[0] = Some(sample(logits[*place], of, past));
        });
        drawn.into_iter().flatten().collect()
    }
}

/// A draw that waits for its logits.
#[derive(Clone, Copy, Debug)]
struct Pending {
    of: Request,
    /// Whose tokens came before: those of the sequence that computed the row, which are its own up to there.
    row: u64,
    /// Row of the logits.
    logits: usize,
}

fn check_settings(hello: &Hello) -> Result<(), LoadError> {
    let wrong = |key, problem: String| Err(LoadError::Setting { key, problem });
    if let Device::Cuda { ordinal } = hello.device {
        return wrong("device", format!("cuda:{ordinal}: this pagedd-worker has no GPU support"));
    }
    if !hello.block_size.is_power_of_two() || !(16..=512).contains(&hello.block_size) {
        return wrong("block_size", format!("{}: it must be a power of two in [16, 512]", hello.block_size));
    }
    if hello.max_num_seqs == 0 || hello.max_num_seqs > MOST_ROWS {
        return wrong("max_num_seqs", format!("{}: it must lie in [1, {MOST_ROWS}]", hello.max_num_seqs));
    }
    if hello.max_num_batched_tokens == 0 || hello.max_num_batched_tokens > MOST_TOKENS {
        let found = hello.max_num_batched_tokens;
        return wrong("max_num_batched_tokens", format!("{found}: it must lie in [1, {MOST_TOKENS}]"));
    }
    if hello.max_model_len == Some(0) {
        return wrong("max_model_len", "0: it must be positive".to_owned());
    }
    Ok(())
}

fn weights(
    source: &ModelSource,
    places: &Places,
    identity: [u8; 32],
    fd: Option<OwnedFd>,
    threads: usize,
    progress: &mut dyn FnMut(u32) -> bool,
) -> Result<(Arena, bool), LoadError> {
    let header = Header { kind: Kind::Weights, data_bytes: places.bytes as u64, identity };
    if let Some(fd) = fd {
        match Arena::reuse(fd, &header) {
            Ok(arena) => return Ok((arena, true)),
            Err(why) => {
                tracing::warn!(%why, "weights arena of an earlier worker is not used, a new one is made");
            }
        }
    }
    let wanted = header.data_bytes;
    if let Some(available) = memory::available().filter(|&available| available < wanted) {
        return Err(LoadError::NoMemory { wanted, available });
    }
    let nodes = numa::nodes();
    let mut arena = create(header, &nodes)?;
    if let Err(why) = arena.enlarge(threads, nodes.len()) {
        tracing::info!(%why, "weights lie in small pages, which are read more slowly");
    }
    load::fill(source, places, arena.data_mut(), threads, progress)?;
    Ok((arena.complete()?, false))
}

/// A new arena that takes memory from each of `nodes` in turn: the threads run beside all of them.
fn create(header: Header, nodes: &[u32]) -> Result<Arena, ArenaError> {
    let arena = Arena::create(header)?;
    if let Err(why) = arena.spread(nodes) {
        tracing::warn!(%why, kind = %header.kind, ?nodes, "arena is not spread over memory nodes");
    }
    Ok(arena)
}

fn kv(request: &KvRequest, identity: [u8; 32], fd: Option<OwnedFd>) -> Result<(Arena, bool), LoadError> {
    if let Some(fd) = fd {
        match reuse_kv(request, identity, fd) {
            Ok(arena) => return Ok((arena, true)),
            Err(why) => tracing::warn!(%why, "KV arena of an earlier worker is not used, a new one is made"),
        }
    }
    let available = memory::available().unwrap_or(u64::MAX);
    let blocks = request.blocks(available)?;
    let data_bytes = u64::from(blocks) * request.block_bytes;
    let arena = create(Header { kind: Kind::Kv, data_bytes, identity }, &numa::nodes())?;
    Ok((arena.complete()?, false))
}

/// An arena of an earlier worker, whose number of blocks may follow from memory that was available then.
fn reuse_kv(request: &KvRequest, identity: [u8; 32], fd: OwnedFd) -> Result<Arena, arena::Stale> {
    use std::os::fd::AsFd as _;
    let data_bytes = arena::claimed_bytes(fd.as_fd())?;
    let arena = Arena::reuse(fd, &Header { kind: Kind::Kv, data_bytes, identity })?;
    let blocks = u32::try_from(data_bytes / request.block_bytes).unwrap_or(0);
    if u64::from(blocks) * request.block_bytes != data_bytes || !request.accepts(blocks) {
        let expected = u64::from(request.useful_blocks()) * request.block_bytes;
        return Err(arena::Stale::OtherSize { found: data_bytes, expected });
    }
    Ok(arena)
}

/// Everything that the bytes of the weights arena depend on.
fn weights_identity(source: &ModelSource, places: &Places) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("pagedd weights arena");
    hasher.update(env!("CARGO_PKG_VERSION").as_bytes());
    hasher.update(&CONTENT_VERSION.to_le_bytes());
    hasher.update(&source.digest());
    for matrix in places.matrices() {
        hasher.update(format!("{matrix:?}").as_bytes());
    }
    for vector in places.vectors() {
        hasher.update(format!("{vector:?}").as_bytes());
    }
    hasher.finalize().into()
}

/// Everything that the bytes of a KV block depend on, beside its tokens.
fn kv_identity(weights: &[u8; 32], layout: &KvLayout, isa: Isa) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("pagedd KV arena");
    hasher.update(weights);
    hasher.update(format!("{layout:?}").as_bytes());
    // Instruction sets differ in the last bits.
    hasher.update(isa.as_str().as_bytes());
    hasher.finalize().into()
}
