//! A model on the host's processors.
//!
//! **Owns** its arenas, how they are made or taken over, and the way from a batch to logits and draws. **Never** checks a plan: it takes
//! batches that were.

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

use pagedd_core::BlockId;
use pagedd_kernels::{Isa, KvElement, KvLayout, KvRow, SlotMapping, copy_block};
use pagedd_model::ModelSource;
use pagedd_wire::worker::{
    Arena as WhichArena, BlockCopy, Dtype, Hello, KvDtype, MOST_DRAFTS, ModelInfo, Sampled,
};

use crate::arena::{self, Arena, ArenaError, Header, Kind};
use crate::batch::{self, Batch, Limits};
use crate::forward::Decoder;
use crate::load::{self, LoadError};
use crate::memory::{self, KvRequest};
use crate::numa;
use crate::runner::{ArenaFd, Compute, Fds, Loaded, Pending, Pendings, RunError, info, limits};
use crate::sample::sample;
use crate::sequence::Sequences;
use crate::weights::Places;

/// Raised when packed weights or keys and values change their meaning under an unchanged layout.
const CONTENT_VERSION: u32 = 2;

/// A loaded model.
#[derive(Debug)]
pub struct CpuModel {
    decoder: Decoder,
    kv: Arena,
    /// The real one, while steps are measured on another.
    aside: Option<Arena>,
    layout: KvLayout,
    /// By the last step.
    drawn: Vec<Result<Sampled, String>>,
}

/// Loads what `hello` names; see [`ModelRunner::load`](crate::ModelRunner::load).
///
/// # Errors
/// [`LoadError`], with the tensor, key or setting named.
pub fn load(hello: &Hello, fds: Fds, progress: &mut dyn FnMut(u32) -> bool) -> Result<Loaded, LoadError> {
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
        KvDtype::Bf16 | KvDtype::Fp8 => {
            let problem = "bf16 or fp8: the CPU keeps f16 or f32".to_owned();
            return Err(LoadError::Setting { key: "kv_dtype", problem });
        }
    };
    let layout =
        KvLayout::new(config.layers, config.kv_heads, config.head_dim, hello.block_size as usize, element)
            .map_err(|problem| LoadError::Shape { item: "key-value cache", problem })?;

    let identity = weights_identity(&source, &places);
    let (weights, weights_reused) = weights(&source, &places, identity, fds.weights, threads, progress)?;
    let kv_identity = kv_identity(&identity, &layout, isa);
    let request = KvRequest::new(hello, config.context.0, layout.block_stride() as u64);
    let (kv, kv_reused) = kv(&request, kv_identity, fds.kv)?;
    let info = ModelInfo {
        parameters: places.parameters,
        blocks: (kv.header().data_bytes / request.block_bytes) as u32,
        weight_bytes: places.bytes as u64,
        digest: kv_identity[..16].try_into().unwrap_or_default(),
        kv_id: kv.id(),
        weights_reused,
        kv_reused,
        threads: threads as u32,
        kernels: isa.as_str().to_owned(),
        ..info(&source, &request)
    };
    let limits = limits(hello, &info);
    // A batch has at least a token per row, and one per guess.
    let tokens = limits.max_num_batched_tokens;
    let draws = (limits.max_num_seqs + MOST_DRAFTS as usize).min(tokens);
    let decoder =
        Decoder::new(config, places, weights, isa, threads, tokens, draws).map_err(LoadError::Threads)?;
    let info = ModelInfo { scratch_bytes: decoder.scratch_bytes() as u64, ..info };
    Ok(Loaded { model: Box::new(CpuModel { decoder, kv, aside: None, layout, drawn: Vec::new() }), info })
}

impl Compute for CpuModel {
    /// Every step is done when it is submitted.
    fn is_alone(&self, _: &Pendings, _: &Sequences) -> bool {
        false
    }

    fn forget(&mut self) {
        self.drawn.clear();
    }

    fn submit(
        &mut self,
        copies: &[BlockCopy],
        batch: &Batch,
        pending: &Pendings,
        sequences: &Sequences,
        limits: &Limits,
    ) -> Result<bool, RunError> {
        for copy in copies {
            let (from, to) = (BlockId(copy.from), BlockId(copy.to));
            copy_block(&self.layout, from, to, copy.tokens as usize, self.kv.data_mut())?;
        }
        self.drawn.clear();
        if batch.rows.is_empty() {
            return Ok(true);
        }
        let rows: Vec<KvRow<'_>> = batch
            .rows
            .iter()
            .map(|row| KvRow {
                first_position: row.start,
                tokens: row.tokens.len() as u32,
                table: batch::table(sequences, row),
            })
            .collect();
        let mapping = SlotMapping::new(&self.layout, limits.capacity, &rows)?;
        let (tokens, positions) = (&batch.tokens, &batch.positions);
        self.decoder.forward(tokens, positions, &mapping, &pending.wanted, self.kv.data_mut())?;
        self.drawn = self.draw(&pending.draws, sequences);
        Ok(true)
    }

    fn collect(&mut self, _: &Pendings) -> Result<Vec<Result<Sampled, String>>, RunError> {
        Ok(std::mem::take(&mut self.drawn))
    }

    fn arena(&self, which: WhichArena) -> Result<ArenaFd, RunError> {
        let arena = self.of(which);
        let fd = arena.as_fd().try_clone_to_owned().map_err(RunError::Fd)?;
        Ok(ArenaFd { fd, bytes: arena.header().data_bytes + arena::HEADER_BYTES as u64 })
    }

    fn data(&self, which: WhichArena) -> &[u8] {
        self.of(which).data()
    }

    /// Every byte of the real arena may be needed.
    fn set_aside(&mut self, blocks: u32) -> Result<(), RunError> {
        let data_bytes = u64::from(blocks) * self.layout.block_stride() as u64;
        let private = Arena::create(Header { kind: Kind::Kv, data_bytes, identity: [0; 32] })?;
        self.aside = Some(std::mem::replace(&mut self.kv, private));
        Ok(())
    }

    fn put_back(&mut self) {
        if let Some(kv) = self.aside.take() {
            self.kv = kv;
        }
    }
}

impl CpuModel {
    fn of(&self, which: WhichArena) -> &Arena {
        match which {
            WhichArena::Weights => self.decoder.weights(),
            WhichArena::Kv => &self.kv,
        }
    }

    /// Draws everything, spread over the threads.
    fn draw(&self, pending: &[Pending], sequences: &Sequences) -> Vec<Result<Sampled, String>> {
        let rows = pending.last().map_or(0, |last| last.logits + 1);
        let logits: Vec<&[f32]> = self.decoder.logits(rows).collect();
        let mut drawn: Vec<Option<Result<Sampled, String>>> = vec![None; pending.len()];
        self.decoder.pool().for_parts(&mut drawn, 1, &|index, drawn| {
            let Pending { of, row, logits: place, .. } = &pending[index];
            let past = sequences.past(*row, of.position as usize);
            drawn[0] = Some(sample(logits[*place], of, past));
        });
        drawn.into_iter().flatten().collect()
    }
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
