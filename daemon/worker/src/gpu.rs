//! A model on an NVIDIA GPU.
//!
//! **Owns** what of a model goes where on the device, and the way from a batch to draws there. **Never** checks a plan, and never repairs a
//! device that failed: the process ends, and another maps the arenas.

mod ahead;
mod arena;
mod load;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Instant;

use half::bf16;
use pagedd_core::{BlockId, TokenId};
use pagedd_kernels::cuda::{
    Algorithms, CudaError, Decoder, DecoderLimits, DecoderMemory, DecoderPlaces, DecoderShape, DecoderStep,
    Device, DeviceInfo, DeviceKvLayout, Drawn, Ranked, Recordings, SampleRow, SharedBuffer, Stream, Ticket,
    TokenSource, bucket, exact_context, exact_rows, pinned_bytes, products_version,
};
use pagedd_kernels::sample::Adjustment;
use pagedd_kernels::{DecoderForms, DeviceKvElement, KvRow, Pairing};
use pagedd_model::{ModelConfig, ModelSource, RopePairing};
use pagedd_wire::worker::{
    Arena as WhichArena, BlockCopy, DeviceStep, Dtype, Hello, KvDtype, MOST_DRAFTS, ModelInfo, Sampled,
};

pub use self::ahead::open_ahead;
use crate::arena::{HEADER_BYTES, Header, Kind};
use crate::batch::{self, Batch, BatchRow, Limits};
use crate::forms::forms;
use crate::load::LoadError;
use crate::memory::KvRequest;
use crate::runner::{ArenaFd, Compute, Fds, Loaded, Pending, Pendings, RunError, info};
use crate::sample::{Past, Request};
use crate::sequence::Sequences;

/// Elements of weights and activations, and of keys and values where nothing else is asked for.
type Element = bf16;

/// Raised when weights or keys and values change their meaning under an unchanged layout.
const CONTENT_VERSION: u32 = 1;
/// Log-probabilities that a draw may report beside its token's.
const RANKS: usize = 20;
/// Adjusted tokens of all draws that are made together.
const ADJUSTMENTS: usize = 1 << 20;
/// Most tokens of prompts in a step that are attended for as rows of their own. The kernel for prompts has a block walk through all that its
/// tokens see: behind a long past, a few hundred tokens leave most of the GPU without one. Rows that see the same past read it together, cut
/// into as many pieces as keep the GPU busy, at the price of merging them.
const PART_ROWS: usize = 320;
/// Positions that lie before such a part at least.
const PART_PAST: usize = 2048;
/// The same for each of its tokens.
const PAST_OF_EACH: usize = 24;
/// Memory that is left to the driver, its libraries and recorded steps.
const RESERVE: u64 = 1 << 30;

/// A loaded model.
#[derive(Debug)]
pub struct GpuModel {
    decoder: Decoder<Element>,
    stream: Stream,
    /// What is told of the step that was collected last.
    told: DeviceStep,
    draws: usize,
    /// A row's bits depend on its own tokens alone.
    deterministic: bool,
    kv_reused: bool,
    blocks: u32,
    layout: Layout,
    /// Steps that are not collected, oldest first.
    out: VecDeque<Out>,
}

/// A step on its way.
#[derive(Debug)]
enum Out {
    Drawing(Ticket),
    Drawn(Vec<Result<Sampled, String>>),
}

/// A batch as the device takes it, kept for its memory.
#[derive(Default, Debug)]
struct Layout {
    /// What is computed, in the order of the device.
    pieces: Vec<Piece>,
    /// Those behind the decoded ones, while they are found.
    parts: Vec<Piece>,
    /// So many of them, the first ones, are decoded.
    decoded: usize,
    tokens: Vec<TokenSource>,
    /// Of each token of the batch, its place on the device.
    places: Vec<u32>,
    wanted: Vec<u32>,
    /// Of each token of the batch that is wanted, its row of logits.
    logits: Vec<u32>,
    copies: Vec<(BlockId, BlockId, usize)>,
}

/// Tokens of a row of a batch that are a row on the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Piece {
    /// Index in [`Batch::rows`].
    row: usize,
    /// Tokens of the row before it.
    before: usize,
    tokens: usize,
}

/// Loads what `hello` names onto GPU `ordinal`; see [`ModelRunner::load`](crate::ModelRunner::load).
///
/// # Errors
/// [`LoadError`], with the tensor, key or setting named.
pub fn load(
    hello: &Hello,
    ordinal: u32,
    fds: Fds,
    progress: &mut dyn FnMut(u32) -> bool,
) -> Result<Loaded, LoadError> {
    let element = check_types(hello)?;
    let source = ModelSource::open(Path::new(&hello.path))?;
    let config = source.config().clone();
    let shape = shape(&config);
    let forms = forms(&source);
    let places = DecoderPlaces::new(&shape, &forms)?;
    let layout = DeviceKvLayout::blocks_outermost(
        config.layers,
        config.kv_heads,
        config.head_dim,
        hello.block_size as usize,
        element,
    )
    .map_err(CudaError::from)?;
    let request = KvRequest::new(hello, config.context.0, layout.block_stride as u64);
    let most = decoder_limits(&Steps::of(hello, &request));
    check_exact(&shape, &most)?;
    let begun = Instant::now();
    let us = || begun.elapsed().as_micros() as u64;
    let device = ahead::open(ordinal)?;
    let stream = device.stream()?;
    let opened_us = us();
    let threads = hello.threads.map_or_else(
        || std::thread::available_parallelism().map_or(1, usize::from),
        |threads| threads.clamp(1, 64) as usize,
    );

    let identity = weights_identity(&source, &places);
    let header = Header { kind: Kind::Weights, data_bytes: places.bytes as u64, identity };
    let found = fds.weights.map(|fd| arena::reuse(&stream, &fd, hello.weights_bytes, |_| Ok(header)));
    let (weights, weights_reused) = match taken(found, Kind::Weights)? {
        Some((memory, _)) => (memory, true),
        None => (new_weights(&stream, &source, &shape, &places, &header, threads, progress)?, false),
    };

    let kv_identity = kv_identity(&identity, &layout, &device, products_version()?, hello.deterministic);
    let scratch = Decoder::<Element>::scratch_bytes(&shape, &forms, &most) as u64;
    let (kv, kv_id, blocks, kv_reused) = kv(&stream, &request, kv_identity, scratch, fds.kv, hello.kv_bytes)?;
    let info = ModelInfo {
        parameters: source.tensors().map(|tensor| tensor.rows as u64 * tensor.columns as u64).sum(),
        blocks,
        weight_bytes: places.bytes as u64,
        scratch_bytes: scratch,
        digest: kv_identity[..16].try_into().unwrap_or_default(),
        kv_id,
        weights_reused,
        kv_reused,
        threads: threads as u32,
        kernels: format!("sm_{}{}", device.info().capability.0, device.info().capability.1),
        ..info(&source, &request)
    };
    let arenas_us = us();
    let memory = DecoderMemory { weights, forms, kv, offset: HEADER_BYTES };
    let most = DecoderLimits { blocks, ..most };
    let draws = most.draws;
    let mut decoder = Decoder::new(&stream, shape, layout, memory, most)?;
    let decoder_us = us();
    let algorithms = algorithms(&mut decoder, hello)?;
    decoder.synchronize()?;
    let deterministic = hello.deterministic;
    let told = DeviceStep { beside_bytes: beside(&stream, decoder.memory())?, ..DeviceStep::default() };
    tracing::info!(beside_bytes = told.beside_bytes, "memory of the GPU in use beside weights and KV blocks");
    tracing::info!(opened_us, arenas_us, decoder_us, ready_us = us(), "since the hello");
    let model = GpuModel {
        decoder,
        stream,
        told,
        draws,
        deterministic,
        kv_reused,
        blocks,
        layout: Layout::default(),
        out: VecDeque::new(),
    };
    let pinned_bytes = pinned_bytes() as u64;
    Ok(Loaded { model: Box::new(model), info: ModelInfo { algorithms, pinned_bytes, ..info } })
}

/// Which algorithms multiply: those of an earlier worker, or those that are found to be fastest now, where there is time for it. Where a row's
/// bits are to be its own, there is one for each product, and nothing to choose.
fn algorithms(decoder: &mut Decoder<Element>, hello: &Hello) -> Result<Vec<u8>, CudaError> {
    if hello.deterministic {
        return Ok(Vec::new());
    }
    if !hello.algorithms.is_empty() {
        let found = Algorithms::from_bytes(&hello.algorithms).and_then(|found| decoder.restore(&found));
        match found {
            Ok(_) => return Ok(hello.algorithms.clone()),
            Err(why) => tracing::warn!(%why, "algorithms of an earlier worker are not used"),
        }
    }
    if !hello.measure {
        return Ok(Vec::new());
    }
    let start = Instant::now();
    let found = decoder.tune()?;
    tracing::info!(took_us = start.elapsed().as_micros() as u64, products = found.len(), "products tuned");
    Ok(found.to_bytes())
}

/// How keys and values are kept, where all types are a GPU's.
fn check_types(hello: &Hello) -> Result<DeviceKvElement, LoadError> {
    let wrong = |key, problem: &str| Err(LoadError::Setting { key, problem: problem.to_owned() });
    match hello.dtype {
        Dtype::Auto => {}
        Dtype::F32 => return wrong("dtype", "f32: a GPU computes in bf16"),
    }
    match hello.kv_dtype {
        KvDtype::Bf16 => Ok(DeviceKvElement::Half),
        KvDtype::Fp8 => Ok(DeviceKvElement::E4m3),
        KvDtype::F16 | KvDtype::F32 => wrong("kv_dtype", "f16 or f32: a GPU keeps bf16 or fp8"),
    }
}

fn shape(config: &ModelConfig) -> DecoderShape {
    let frequencies = config.rope_frequencies();
    DecoderShape {
        layers: config.layers,
        hidden: config.hidden,
        ffn: config.feed_forward,
        heads: config.heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        vocabulary: config.vocab,
        tied: config.tied_embeddings,
        bias: config.qkv_bias,
        epsilon: config.rms_eps,
        frequencies: frequencies.inverse,
        magnitude: frequencies.attention_factor,
        pairing: match config.rope.pairing {
            RopePairing::Interleaved => Pairing::Interleaved,
            RopePairing::Halves => Pairing::Halves,
        },
    }
}

/// What scratch memory follows from, beside the model's shape.
#[derive(Clone, Copy, Debug)]
pub struct Steps {
    /// Most sequences of a step.
    pub seqs: u32,
    /// Most tokens of a step.
    pub tokens: u32,
    /// Longest sequence, in tokens.
    pub context: u32,
    /// A row's bits depend on its own tokens alone.
    pub deterministic: bool,
}

impl Steps {
    fn of(hello: &Hello, request: &KvRequest) -> Self {
        Self {
            seqs: hello.max_num_seqs,
            tokens: hello.max_num_batched_tokens,
            context: request.max_model_len,
            deterministic: hello.deterministic,
        }
    }
}

/// Bytes that a model takes of its GPU beside weights and KV blocks, about: scratch memory, and what is left to the driver.
///
/// # Errors
/// [`LoadError`]: no worker would take it on.
pub fn overhead_bytes(config: &ModelConfig, forms: &DecoderForms, steps: &Steps) -> Result<u64, LoadError> {
    let (shape, most) = (shape(config), decoder_limits(steps));
    check_exact(&shape, &most)?;
    Ok(Decoder::<Element>::scratch_bytes(&shape, forms, &most) as u64 + RESERVE)
}

/// What steps may ask for, but for the number of blocks.
fn decoder_limits(steps: &Steps) -> DecoderLimits {
    let (seqs, tokens) = (steps.seqs as usize, steps.tokens as usize);
    let most = seqs + MOST_DRAFTS as usize;
    DecoderLimits {
        // Where every token behind a prompt is decoded, a long answer that is computed again is as many rows.
        rows: if steps.deterministic { tokens.max(seqs) } else { tokens.min(seqs + PART_ROWS).max(seqs) },
        tokens,
        wanted: most.min(tokens),
        draws: most,
        ranks: RANKS,
        adjustments: ADJUSTMENTS,
        context: steps.context as usize,
        blocks: 0,
        exact: steps.deterministic,
    }
}

/// Whether a step's partial results have room, where every row must have some: also those that it is padded with.
fn check_exact(shape: &DecoderShape, limits: &DecoderLimits) -> Result<(), LoadError> {
    let DecoderLimits { rows, tokens, context, exact, .. } = *limits;
    let room = exact_rows(shape, context);
    if !exact || bucket(rows) <= room {
        return Ok(());
    }
    let most = (1..=room).rev().find(|&rows| bucket(rows) <= room).unwrap_or(0);
    let key = if tokens > most { "max_num_batched_tokens" } else { "max_num_seqs" };
    let longest = exact_context(shape, bucket(rows));
    let problem = format!(
        "{rows}: with deterministic: true the partial results of that many tokens with contexts of {context} take too much memory: lower it to \
         {most}, or max_model_len to {longest}"
    );
    Err(LoadError::Setting { key, problem })
}

/// Memory of the GPU in use beside the arenas.
fn beside(stream: &Stream, memory: &DecoderMemory) -> Result<u64, CudaError> {
    let (free, total) = stream.device().memory()?;
    Ok(total.saturating_sub(free + memory.weights.len() + memory.kv.len()) as u64)
}

/// In test builds the fail point `gpu-fault` breaks the device once there is a file at the path that it returns; the file goes.
#[cfg(feature = "failpoints")]
fn fault_point(stream: &Stream) -> Result<(), CudaError> {
    fail::fail_point!("gpu-fault", |mark: Option<String>| {
        if mark.is_some_and(|mark| std::fs::remove_file(mark).is_ok()) {
            tracing::warn!("fail point gpu-fault");
            return pagedd_kernels::cuda::read_nowhere(stream);
        }
        Ok(())
    });
    Ok(())
}

/// An arena of an earlier worker, or nothing where there is none.
///
/// # Errors
/// It is of no use. The daemon lets go of it, and only then is there memory for another: it is the next worker's to make.
fn taken(
    found: Option<Result<(SharedBuffer, [u8; 16]), String>>,
    kind: Kind,
) -> Result<Option<(SharedBuffer, [u8; 16])>, LoadError> {
    found.transpose().map_err(|why| LoadError::Stale { kind, why })
}

fn new_weights(
    stream: &Stream,
    source: &ModelSource,
    shape: &DecoderShape,
    places: &DecoderPlaces,
    header: &Header,
    threads: usize,
    progress: &mut dyn FnMut(u32) -> bool,
) -> Result<SharedBuffer, LoadError> {
    let mut memory = arena::create(stream.device(), header)?;
    load::fill(stream, source, shape, places, &mut memory, threads, progress)?;
    arena::complete(stream, &mut memory, header)?;
    Ok(memory)
}

/// The KV arena, its name, its blocks, and whether it is an earlier worker's.
fn kv(
    stream: &Stream,
    request: &KvRequest,
    identity: [u8; 32],
    scratch: u64,
    fd: Option<OwnedFd>,
    fd_bytes: u64,
) -> Result<(SharedBuffer, [u8; 16], u32, bool), LoadError> {
    let header = |data_bytes| Header { kind: Kind::Kv, data_bytes, identity };
    let blocks_of = |data_bytes: u64| u32::try_from(data_bytes / request.block_bytes).unwrap_or(0);
    let mut blocks = 0;
    // Its size may follow from memory that was free then.
    let found = fd.map(|fd| {
        arena::reuse(stream, &fd, fd_bytes, |data_bytes| {
            blocks = blocks_of(data_bytes);
            let whole = u64::from(blocks) * request.block_bytes == data_bytes;
            if whole && request.accepts(blocks) {
                Ok(header(data_bytes))
            } else {
                Err(format!("it has {data_bytes} bytes, another size is asked for"))
            }
        })
    });
    if let Some((memory, id)) = taken(found, Kind::Kv)? {
        return Ok((memory, id, blocks, true));
    }
    let (free, _) = stream.device().memory()?;
    if free as u64 <= scratch + RESERVE {
        let problem = format!(
            "steps need {scratch} bytes of scratch memory and {RESERVE} are left to the driver, the GPU has {free} bytes free behind the weights: \
             lower it, or max_model_len"
        );
        return Err(LoadError::Setting { key: "max_num_batched_tokens", problem });
    }
    let available = (free as u64).saturating_sub(scratch + RESERVE);
    let blocks = request.blocks(available)?;
    let header = header(u64::from(blocks) * request.block_bytes);
    let mut memory = arena::create(stream.device(), &header)?;
    let id = arena::complete(stream, &mut memory, &header)?;
    Ok((memory, id, blocks, false))
}

/// Everything that the bytes of the weights arena depend on: places say which matrices have four bits.
fn weights_identity(source: &ModelSource, places: &DecoderPlaces) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("pagedd weights arena of a GPU");
    hasher.update(env!("CARGO_PKG_VERSION").as_bytes());
    hasher.update(&CONTENT_VERSION.to_le_bytes());
    hasher.update(&source.digest());
    hasher.update(format!("{places:?}").as_bytes());
    hasher.finalize().into()
}

/// Everything that the bytes of a KV block depend on, beside its tokens.
fn kv_identity(
    weights: &[u8; 32],
    layout: &DeviceKvLayout,
    device: &Device,
    library: u64,
    deterministic: bool,
) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("pagedd KV arena of a GPU");
    hasher.update(weights);
    hasher.update(format!("{layout:?}").as_bytes());
    // Kernels and products differ in the last bits by GPU and library.
    let DeviceInfo { name, capability, multiprocessors, .. } = device.info();
    hasher.update(format!("{name} {capability:?} {multiprocessors} {library} {deterministic}").as_bytes());
    hasher.finalize().into()
}

impl Compute for GpuModel {
    /// Draws of several lots overwrite what an earlier step has yet to bring, and only those of the last stay on the device.
    fn is_alone(&self, pending: &Pendings, sequences: &Sequences) -> bool {
        let adjusts = pending.draws.iter().any(|draw| !draw.of.params.penalties.is_none());
        let many = pending.draws.len() > self.draws;
        many || (adjusts
            && lot(&pending.draws, &all_adjustments(pending, sequences), self.draws) < pending.draws.len())
    }

    fn forget(&mut self) {
        self.out.clear();
    }

    fn submit(
        &mut self,
        copies: &[BlockCopy],
        batch: &Batch,
        pending: &Pendings,
        sequences: &Sequences,
        _: &Limits,
    ) -> Result<bool, RunError> {
        self.layout.set(copies, batch, &pending.wanted, self.deterministic.then_some(sequences));
        let Layout { pieces, decoded, tokens, wanted, copies, logits, .. } = &self.layout;
        let rows: Vec<KvRow<'_>> = pieces
            .iter()
            .map(|&Piece { row, before, tokens }| {
                let row = &batch.rows[row];
                let table = batch::table(sequences, row);
                KvRow { first_position: row.start + before as u32, tokens: tokens as u32, table }
            })
            .collect();
        self.decoder.forward(&DecoderStep { copies, rows: &rows, decoded: *decoded, tokens, wanted })?;
        #[cfg(feature = "failpoints")]
        fault_point(&self.stream)?;
        let adjustments = all_adjustments(pending, sequences);
        let mut first = 0;
        // Draws that cannot be made together, because they adjust one row of logits differently or are too many, are made one lot after the other.
        loop {
            let count = lot(&pending.draws[first..], &adjustments[first..], self.draws);
            let lot = first..first + count;
            let rows: Vec<SampleRow<'_>> = pending.draws[lot.clone()]
                .iter()
                .zip(&adjustments[lot.clone()])
                .map(|(draw, adjustments)| sample_row(draw, logits[draw.logits], adjustments))
                .collect();
            let ticket = self.decoder.draw(&rows)?;
            if lot.end == pending.draws.len() && first == 0 {
                self.out.push_back(Out::Drawing(ticket));
                return Ok(false);
            }
            // Only the draws of a single lot can stay on the device.
            let drawn = self.sampled(&pending.draws[lot.clone()], ticket)?;
            match self.out.back_mut() {
                Some(Out::Drawn(before)) if first > 0 => before.extend(drawn),
                Some(_) | None => self.out.push_back(Out::Drawn(drawn)),
            }
            if lot.end == pending.draws.len() {
                return Ok(true);
            }
            first = lot.end;
        }
    }

    fn collect(&mut self, pending: &Pendings) -> Result<Vec<Result<Sampled, String>>, RunError> {
        match self.out.pop_front() {
            Some(Out::Drawing(ticket)) => {
                let sampled = self.sampled(&pending.draws, ticket)?;
                self.tell(self.decoder.idle_us(ticket));
                Ok(sampled)
            }
            Some(Out::Drawn(drawn)) => {
                self.tell(Ok(None));
                Ok(drawn)
            }
            None => Err(RunError::NothingOut),
        }
    }

    fn device_step(&self) -> Option<DeviceStep> {
        Some(self.told)
    }

    fn arena(&self, which: WhichArena) -> Result<ArenaFd, RunError> {
        let memory = match which {
            WhichArena::Weights => &self.decoder.memory().weights,
            WhichArena::Kv => &self.decoder.memory().kv,
        };
        Ok(ArenaFd { fd: memory.export()?, bytes: memory.len() as u64 })
    }

    fn data(&self, _: WhichArena) -> &[u8] {
        &[]
    }

    /// A GPU has no memory for another: the real one serves as long as nothing is in it.
    fn set_aside(&mut self, blocks: u32) -> Result<(), RunError> {
        if self.kv_reused || blocks > self.blocks { Err(RunError::ArenaInUse) } else { Ok(()) }
    }

    fn put_back(&mut self) {}
}

impl Layout {
    /// With `sequences` a row's bits are to depend on its own tokens alone: what is of a prompt is attended for by one kernel, what comes
    /// after by the other, however it comes. Without, a row of one token is decoded, and so are the tokens of a small part behind a long past.
    fn set(&mut self, copies: &[BlockCopy], batch: &Batch, wanted: &[usize], sequences: Option<&Sequences>) {
        self.copies.clear();
        self.copies.extend(copies.iter().map(|c| (BlockId(c.from), BlockId(c.to), c.tokens as usize)));
        let mut room = PART_ROWS;
        let mut prompt_tokens = |row: &BatchRow| match sequences {
            Some(sequences) => {
                let prompt = sequences.get(row.seq).map_or(0, |sequence| sequence.prompt);
                (prompt.saturating_sub(row.start) as usize).min(row.tokens.len())
            }
            None if row.tokens.len() == 1 => 0,
            None if row.tokens.len() <= room && is_decoded(row) => {
                room -= row.tokens.len();
                0
            }
            None => row.tokens.len(),
        };
        self.pieces.clear();
        self.parts.clear();
        for (index, row) in batch.rows.iter().enumerate() {
            let one = |before| Piece { row: index, before, tokens: 1 };
            let tokens = prompt_tokens(row);
            self.pieces.extend((tokens..row.tokens.len()).map(one));
            self.parts.extend((tokens > 0).then_some(Piece { row: index, before: 0, tokens }));
        }
        self.decoded = self.pieces.len();
        self.pieces.append(&mut self.parts);
        self.tokens.clear();
        self.places.clear();
        self.places.resize(batch.tokens.len(), 0);
        for &Piece { row, before, tokens } in &self.pieces {
            let first = batch.rows[row].tokens.start + before;
            for token in first..first + tokens {
                self.places[token] = self.tokens.len() as u32;
                self.tokens.push(TokenSource::Known(batch.tokens[token]));
            }
        }
        for unknown in &batch.unknown {
            self.tokens[self.places[unknown.token] as usize] = TokenSource::Drawn(unknown.draw);
        }
        self.wanted.clear();
        self.wanted.extend(wanted.iter().map(|&token| self.places[token]));
        self.wanted.sort_unstable();
        self.logits.clear();
        let row = |&token: &usize| self.wanted.partition_point(|&place| place < self.places[token]) as u32;
        self.logits.extend(wanted.iter().map(row));
    }
}

/// Whether a part of a prompt is faster as rows of its own.
fn is_decoded(part: &BatchRow) -> bool {
    part.start as usize >= PART_PAST.max(PAST_OF_EACH * part.tokens.len())
}

impl GpuModel {
    /// Keeps what is told of the step that was collected.
    fn tell(&mut self, idle_us: Result<Option<f64>, CudaError>) {
        let beside = || beside(&self.stream, self.decoder.memory());
        tell(&mut self.told, idle_us, self.decoder.recordings(), beside);
    }

    /// Waits for draws.
    fn sampled(
        &self,
        pending: &[Pending],
        ticket: Ticket,
    ) -> Result<Vec<Result<Sampled, String>>, CudaError> {
        let draws = self.decoder.draws(ticket)?;
        let each = pending.iter().zip(draws.drawn).enumerate();
        Ok(each
            .map(|(index, (draw, drawn))| {
                let ranked = draws.ranked.get(index * draws.stride..).unwrap_or_default();
                sampled(draw, *drawn, draws.logprobs.get(index).copied(), ranked)
            })
            .collect())
    }
}

/// Keeps what is told of a step. The step is whole without it: what cannot be told is left out, and a device that failed shows at the next one.
fn tell(
    told: &mut DeviceStep,
    idle_us: Result<Option<f64>, CudaError>,
    recorded: Recordings,
    beside: impl FnOnce() -> Result<u64, CudaError>,
) {
    let untold = |error: &CudaError| tracing::debug!(%error, "not told of a step");
    let idle_us = idle_us.inspect_err(untold).unwrap_or_default();
    told.idle_us = idle_us.map(|us| us.round() as u64);
    if recorded.graphs == told.graphs {
        return;
    }
    told.graphs = recorded.graphs;
    told.graphs_us = recorded.took.as_micros() as u64;
    told.graphs_bytes = recorded.bytes;
    if let Ok(bytes) = beside().inspect_err(untold) {
        told.beside_bytes = bytes;
    }
    let DeviceStep { graphs, graphs_us, graphs_bytes, beside_bytes, .. } = *told;
    tracing::info!(graphs, graphs_us, graphs_bytes, beside_bytes, "steps recorded");
}

/// A draw as the device takes it.
fn sample_row<'a>(draw: &Pending, logits_row: u32, adjustments: &'a [Adjustment]) -> SampleRow<'a> {
    let mut params = draw.of.params;
    // No edge lets more through.
    params.logprobs = params.logprobs.map(|count| count.min(RANKS as u8));
    let Request { choice, position, .. } = draw.of;
    SampleRow { logits_row, params, min_p: 0.0, choice, position, adjustments }
}

/// How many of the first draws can be made together: at most `most`, and of those that name one row of logits a single one where it is adjusted.
fn lot(pending: &[Pending], adjustments: &[Vec<Adjustment>], most: usize) -> usize {
    let mut total = 0;
    for (index, (draw, own)) in pending.iter().zip(adjustments).enumerate() {
        total += own.len();
        // Draws of one row of logits stand side by side.
        let shared = index > 0 && pending[index - 1].logits == draw.logits;
        let adjusted = !own.is_empty() || (index > 0 && !adjustments[index - 1].is_empty());
        if index == most || (index > 0 && total > ADJUSTMENTS) || (shared && adjusted) {
            return index;
        }
    }
    pending.len()
}

/// Of each draw.
fn all_adjustments(pending: &Pendings, sequences: &Sequences) -> Vec<Vec<Adjustment>> {
    let of = |draw: &Pending| {
        if draw.of.params.penalties.is_none() {
            Vec::new()
        } else {
            adjustments(sequences.past(draw.row, draw.of.position as usize))
        }
    };
    pending.draws.iter().map(of).collect()
}

/// Every token of the past once, ascending.
fn adjustments(past: Past<'_>) -> Vec<Adjustment> {
    let mut tokens: Vec<(u32, u32)> = past.prompt.iter().map(|&token| (token, 0)).collect();
    tokens.extend(past.output.iter().map(|&token| (token, 1)));
    tokens.sort_unstable();
    let groups = tokens.chunk_by(|a, b| a.0 == b.0);
    groups
        .map(|group| Adjustment {
            token: TokenId(group[0].0),
            seen: true,
            output: group.iter().map(|(_, output)| output).sum(),
            bias: 0.0,
        })
        .collect()
}

/// What is reported of a draw.
fn sampled(draw: &Pending, drawn: Drawn, logprob: Option<f32>, ranked: &[Ranked]) -> Result<Sampled, String> {
    let token = drawn.token().map_err(|error| crate::sample::invalid(&error))?;
    let mut sampled = Sampled { seq: draw.of.seq, token: token.0, logprob: None, top: Vec::new() };
    if let Some(count) = draw.of.params.logprobs {
        sampled.logprob = logprob;
        let top = ranked.iter().take(count.into());
        sampled.top = top.map(|ranked| (ranked.token, ranked.logprob)).collect();
    }
    Ok(sampled)
}

#[cfg(test)]
mod tests;
