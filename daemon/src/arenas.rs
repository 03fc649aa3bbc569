//! What a model's workers leave behind: the arenas, the ledger of the KV arena, what steps took, and the process that may still write.
//!
//! **Owns** their fds, and what the service manager holds of them over a restart of the daemon. **Never** maps an arena, and never
//! hands a KV arena on before the last process that could write it is proven gone.
//!
//! An arena may be memory of a GPU: then its fd tells nothing of it, neither what it is nor how large. Device and size are a part of the name
//! that the manager holds the fd under, and the worker says which arena it is. A ledger names the arena that it speaks of, so that the two are never
//! paired wrongly, whatever the manager took in and whatever it did not.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use fail::fail_point;
use pagedd_core::{Blocks, StepCost, Tokens};
use pagedd_host::Pidfd;
use pagedd_host::fdstore::{FdStore, StoreError};
use pagedd_host::shared::SharedMemory;
use pagedd_kv::{Ledger, LedgerHeader, PrefixHasher};
use pagedd_wire::worker::{Arena, Device, KnownCost, ModelInfo};
use pagedd_wire::{FrameBuffer, FrameError, encode};
use tracing::{info, warn};

use crate::blocks::Shelf;

/// How long a killed worker of an earlier daemon may take to be gone.
const DEATH: Duration = Duration::from_secs(10);

/// An arena of an earlier worker.
#[derive(Debug)]
pub struct Kept {
    /// What it is reached by. Of a GPU's memory nothing can be asked through it.
    pub fd: OwnedFd,
    /// Its size, as the worker said that made it.
    pub bytes: u64,
}

/// A model's arenas and their ledger.
pub struct Arenas {
    store: Arc<FdStore>,
    model: String,
    device: Device,
    weights: Option<Kept>,
    kv: Option<Kept>,
    /// An earlier daemon's, until it is opened.
    ledger: Option<OwnedFd>,
    /// The last worker of an earlier daemon, until it is proven gone.
    writer: Option<OwnedFd>,
    /// What steps took a worker of an earlier daemon, or of this one.
    cost: Option<KnownCost>,
    /// Which algorithms multiplied there.
    algorithms: Vec<u8>,
}

impl Arenas {
    /// What an earlier daemon left in `store` for this model, which runs on `device`.
    pub fn new(store: Arc<FdStore>, model: &str, device: Device) -> Self {
        let take = |kind| store.take(&name(kind, model));
        let (ledger, writer) = (take(LEDGER), take(WORKER));
        let cost = take(COST).and_then(frame).and_then(|mut frame| frame.next_frame().ok()?);
        let algorithms = take(ALGORITHMS).and_then(frame).and_then(|mut frame| frame.next_frame().ok()?);
        let take = |kind| take_arena(&store, kind, device, model);
        let (weights, kv) = (take(WEIGHTS), take(KV));
        let algorithms = algorithms.unwrap_or_default();
        Self { store, model: model.to_owned(), device, weights, kv, ledger, writer, cost, algorithms }
    }

    /// What is known of the time that steps take.
    pub fn known_cost(&self) -> Option<KnownCost> {
        self.cost
    }

    /// Keeps what a worker has measured: the next daemon comes up sooner by as much as measuring takes.
    pub fn keep_cost(&mut self, cost: KnownCost) {
        if self.cost == Some(cost) || !StepCost::from(cost.cost).is_known() {
            return;
        }
        self.cost = Some(cost);
        if let Err(error) = self.keep_frame(COST, encode(&cost)) {
            warn!(model = self.model, %error, "the next daemon will measure anew what steps take");
        }
    }

    /// Which algorithms multiply; none where a worker has nothing to choose or has not chosen.
    pub fn algorithms(&self) -> &[u8] {
        &self.algorithms
    }

    /// Keeps what a worker has chosen: the bits of products stay the same over workers and daemons.
    pub fn keep_algorithms(&mut self, algorithms: &[u8]) {
        if algorithms.is_empty() || self.algorithms == algorithms {
            return;
        }
        algorithms.clone_into(&mut self.algorithms);
        if let Err(error) = self.keep_frame(ALGORITHMS, encode(&algorithms)) {
            warn!(model = self.model, %error, "the next daemon will choose anew which algorithms multiply");
        }
    }

    fn keep_frame(&self, kind: &str, frame: Result<Vec<u8>, FrameError>) -> io::Result<()> {
        let frame = frame.map_err(io::Error::other)?;
        let mut memory = SharedMemory::create(&format!("pagedd-{kind}"), frame.len())?;
        memory.as_mut().copy_from_slice(&frame);
        self.store.store(&name(kind, &self.model), memory.as_fd()).map_err(io::Error::other)
    }

    /// Ends the last worker of an earlier daemon. Where it is not proven gone, its KV arena is not used again.
    pub fn settle(&mut self) {
        fail_point!("before-worker-is-gone");
        let writer = self.writer.take().map(Pidfd::from);
        let gone = writer.as_ref().map_or_else(|| Err("no worker is known".to_owned()), prove_gone);
        match gone {
            Ok(()) => info!(model = self.model, "the worker of an earlier daemon is gone"),
            Err(reason) if self.kv.is_some() => {
                warn!(
                    model = self.model,
                    reason, "the KV arena of an earlier daemon may be written still: it is not used"
                );
                self.forget_kv();
            }
            Err(_) => {}
        }
    }

    /// `worker` will have the KV arena: whoever comes after this daemon has to prove it gone.
    ///
    /// # Errors
    /// The manager does not know it; it must not have the arena.
    pub fn lend(&self, worker: BorrowedFd<'_>) -> Result<(), StoreError> {
        self.store.store(&name(WORKER, &self.model), worker)
    }

    /// The weights arena, if there is one.
    pub fn weights(&self) -> Option<&Kept> {
        self.weights.as_ref()
    }

    /// The KV arena, if there is one.
    pub fn kv(&self) -> Option<&Kept> {
        self.kv.as_ref()
    }

    /// Takes over a new arena in the place of an earlier one.
    pub fn keep(&mut self, arena: Arena, kept: Kept) {
        let (kind, place) = match arena {
            Arena::Weights => (WEIGHTS, &mut self.weights),
            Arena::Kv => (KV, &mut self.kv),
        };
        let earlier = place.take().map(|earlier| earlier.bytes).filter(|bytes| *bytes != kept.bytes);
        if let Err(error) =
            self.store.store(&arena_name(kind, self.device, kept.bytes, &self.model), kept.fd.as_fd())
        {
            warn!(model = self.model, %error, ?arena, "an arena will not outlive the daemon");
        }
        fail_point!("arena-kept");
        *place = Some(kept);
        if let Some(bytes) = earlier {
            self.forget(&arena_name(kind, self.device, bytes, &self.model));
        }
    }

    /// Lets go of the KV arena and its ledger: the next worker makes another.
    pub fn forget_kv(&mut self) {
        self.ledger = None;
        if let Some(kept) = self.kv.take() {
            self.forget(&arena_name(KV, self.device, kept.bytes, &self.model));
        }
        self.forget(&name(LEDGER, &self.model));
    }

    /// Lets go of the weights: the next worker reads them again.
    pub fn forget_weights(&mut self) {
        if let Some(kept) = self.weights.take() {
            self.forget(&arena_name(WEIGHTS, self.device, kept.bytes, &self.model));
        }
    }

    fn forget(&self, name: &str) {
        if let Err(error) = self.store.remove(name) {
            warn!(model = self.model, %error, "an fd of an earlier daemon stays open");
        }
    }

    /// What an earlier daemon's ledger says does not hold here: [`Arenas::ledger`] makes another.
    pub fn forget_ledger(&mut self) {
        self.ledger = None;
        self.forget(&name(LEDGER, &self.model));
    }

    /// What a copy of the KV blocks is made from.
    ///
    /// # Errors
    /// From the system.
    pub fn shelf(
        &self,
        ledger: &Ledger<SharedMemory>,
        info: &ModelInfo,
        cache_key: [u8; 32],
    ) -> io::Result<Shelf> {
        let kv = self.kv.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let arena = match self.device {
            Device::Cpu => Some(kv.fd.as_fd()),
            Device::Cuda { .. } => None,
        };
        Shelf::new(arena, ledger.memory().as_fd(), header(info, cache_key), cache_key)
    }

    /// The ledger of the KV arena, which a worker has taken or made as `info` says: an earlier daemon's where it speaks of this very
    /// arena, otherwise an empty one. To be asked once.
    ///
    /// # Errors
    /// The system gave no memory for one.
    pub fn ledger(&mut self, info: &ModelInfo, cache_key: [u8; 32]) -> io::Result<Ledger<SharedMemory>> {
        fail_point!("ledger-open", |_| Err(io::ErrorKind::OutOfMemory.into()));
        let expected = header(info, cache_key);
        let found = self.ledger.take().map(|fd| found(fd, &expected));
        if let Some(Ok(ledger)) = found {
            info!(model = self.model, blocks = ledger.records().count(), "blocks of an earlier daemon");
            return Ok(ledger);
        }
        if let Some(Err(reason)) = found {
            info!(model = self.model, reason, "the ledger of an earlier daemon is not used");
            // From here on the arena is written without it.
            self.forget(&name(LEDGER, &self.model));
        }
        let memory = SharedMemory::create("pagedd-ledger", expected.ledger_bytes())?;
        if let Err(error) = self.store.store(&name(LEDGER, &self.model), memory.as_fd()) {
            warn!(model = self.model, %error, "the ledger will not outlive the daemon");
        }
        fail_point!("before-ledger-is-made");
        // The memory held no ledger before: any generation differs.
        Ledger::format(memory, &expected, 1).map_err(|(error, _)| io::Error::other(error))
    }
}

const WEIGHTS: &str = "weights";
const KV: &str = "kv";
const LEDGER: &str = "ledger";
const WORKER: &str = "worker";
const COST: &str = "cost";
const ALGORITHMS: &str = "algorithms";

/// What the manager holds the ledger of a model's KV arena under.
pub fn ledger_name(model: &str) -> String {
    name(LEDGER, model)
}

/// What the manager holds an fd under.
fn name(kind: &str, model: &str) -> String {
    format!("{kind}-{model}")
}

/// What the manager holds an arena of so many bytes under.
fn arena_name(kind: &str, device: Device, bytes: u64, model: &str) -> String {
    match device {
        Device::Cpu => format!("{kind}-cpu-{bytes}-{model}"),
        Device::Cuda { ordinal } => format!("{kind}-cuda{ordinal}-{bytes}-{model}"),
    }
}

/// The arena of a model that an earlier daemon left. Where it died between keeping another and letting go of the first, either will do: the
/// ledger is of one of them. What is not taken here, such as an arena on a device that the model is not on any more, goes with all else that
/// nobody wants.
fn take_arena(store: &FdStore, kind: &str, device: Device, model: &str) -> Option<Kept> {
    let bytes = store.names().iter().find_map(|name| arena_size(name, kind, device, model))?;
    Some(Kept { fd: store.take(&arena_name(kind, device, bytes, model))?, bytes })
}

/// The inverse of [`arena_name`].
fn arena_size(name: &str, kind: &str, device: Device, model: &str) -> Option<u64> {
    let (_, rest) = name.strip_prefix(kind)?.strip_prefix('-')?.split_once('-')?;
    let bytes = rest.split_once('-')?.0.parse().ok()?;
    (arena_name(kind, device, bytes, model) == name).then_some(bytes)
}

/// What the ledger of the KV arena begins with that a worker has as `info` says.
fn header(info: &ModelInfo, cache_key: [u8; 32]) -> LedgerHeader {
    LedgerHeader {
        block_size: Tokens(info.block_size),
        blocks: Blocks(info.blocks),
        block_bytes: info.block_bytes,
        model: info.digest,
        key_id: PrefixHasher::new(cache_key).key_id(info.kv_id),
        weight_epoch: 0,
    }
}

/// Kills a process that need not be a child of this one.
fn prove_gone(process: &Pidfd) -> Result<(), String> {
    process.kill().map_err(|e| format!("its worker cannot be killed: {e}"))?;
    match process.wait_gone(DEATH) {
        Ok(true) => Ok(()),
        Ok(false) => Err("its worker does not die".to_owned()),
        Err(e) => Err(format!("its worker cannot be waited for: {e}")),
    }
}

/// A frame that an earlier daemon kept. Whoever wrote it may have been of another version: what makes no sense is nothing.
fn frame(fd: OwnedFd) -> Option<FrameBuffer> {
    let memory = SharedMemory::map(fd).ok()?;
    let mut frame = FrameBuffer::new();
    frame.push(memory.as_ref());
    Some(frame)
}

/// The ledger in an fd of an earlier daemon's.
fn found(fd: OwnedFd, expected: &LedgerHeader) -> Result<Ledger<SharedMemory>, String> {
    let memory = SharedMemory::map(fd).map_err(|e| e.to_string())?;
    Ledger::open(memory, expected).map_err(|(error, _)| error.to_string())
}

#[cfg(test)]
mod tests;
