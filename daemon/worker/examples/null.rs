//! A worker that computes nothing, to see what a step costs the processor beside the computing: `make bench-step`.
//!
//! It stands in for `pagedd-worker` beside `pagedd`: frames, checks, tables and draws are a worker's own, for a model with the vocabulary of
//! Llama 3. A step takes 4 ms in which nobody computes, as on a GPU.

use std::collections::VecDeque;
use std::os::fd::AsFd as _;
use std::thread;
use std::time::{Duration, Instant};

use pagedd_core::StepCost;
use pagedd_kernels::KvError;
use pagedd_wire::Channel;
use pagedd_wire::worker::{Arena as Which, BlockCopy, Hello, KvMemory, ModelInfo, Sampled};
use pagedd_worker::arena::{self, Arena, Header, Kind};
use pagedd_worker::batch::{self, Batch, Limits};
use pagedd_worker::load::LoadError;
use pagedd_worker::runner::{ArenaFd, Compute, Loaded, Pendings, RunError};
use pagedd_worker::sequence::Sequences;
use pagedd_worker::serve::serve_by;
use pagedd_worker::{Fds, ModelRunner};

const STEP: Duration = Duration::from_millis(4);
const VOCABULARY: u32 = 128_256;
const CONTEXT: u32 = 8192;

#[derive(Debug)]
struct Null {
    weights: Arena,
    kv: Arena,
    /// Of all rows, one behind the other.
    tables: Vec<u32>,
    /// When each step that is out is done.
    out: VecDeque<Instant>,
    last: Instant,
}

impl Compute for Null {
    fn is_alone(&self, _: &Pendings, _: &Sequences) -> bool {
        false
    }

    fn forget(&mut self) {
        self.out.clear();
    }

    fn submit(
        &mut self,
        _: &[BlockCopy],
        batch: &Batch,
        _: &Pendings,
        sequences: &Sequences,
        _: &Limits,
    ) -> Result<bool, RunError> {
        self.tables.clear();
        for (index, row) in batch.rows.iter().enumerate() {
            let table = batch::table(sequences, row);
            if table.is_empty() {
                return Err(KvError::Empty { row: index }.into());
            }
            self.tables.extend(table.iter().map(|block| block.0));
        }
        self.last = self.last.max(Instant::now()) + STEP;
        self.out.push_back(self.last);
        Ok(false)
    }

    fn collect(&mut self, pending: &Pendings) -> Result<Vec<Result<Sampled, String>>, RunError> {
        let done = self.out.pop_front().ok_or(RunError::NothingOut)?;
        thread::sleep(done.saturating_duration_since(Instant::now()));
        let draws = pending.draws.iter().map(|draw| {
            let token = draw.of.position.wrapping_mul(2_654_435_761) % VOCABULARY;
            Ok(Sampled { seq: draw.of.seq, token, logprob: None, top: Vec::new() })
        });
        Ok(draws.collect())
    }

    fn arena(&self, which: Which) -> Result<ArenaFd, RunError> {
        let arena = match which {
            Which::Weights => &self.weights,
            Which::Kv => &self.kv,
        };
        let fd = arena.as_fd().try_clone_to_owned().map_err(RunError::Fd)?;
        Ok(ArenaFd { fd, bytes: arena.header().data_bytes + arena::HEADER_BYTES as u64 })
    }

    fn data(&self, _: Which) -> &[u8] {
        &[]
    }

    fn set_aside(&mut self, _: u32) -> Result<(), RunError> {
        Ok(())
    }

    fn put_back(&mut self) {}
}

fn load(hello: &Hello, _: Fds, _: &mut dyn FnMut(u32) -> bool) -> Result<ModelRunner, LoadError> {
    let KvMemory::Tokens(tokens) = hello.kv_memory else {
        return Err(LoadError::Setting { key: "kv_memory", problem: "give it in tokens".to_owned() });
    };
    let arena =
        |kind| Arena::create(Header { kind, data_bytes: 4096, identity: [7; 32] }).and_then(Arena::complete);
    let (weights, kv) = (arena(Kind::Weights)?, arena(Kind::Kv)?);
    let info = ModelInfo {
        architecture: "null".to_owned(),
        parameters: 0,
        vocab_size: VOCABULARY,
        max_model_len: CONTEXT,
        block_size: hello.block_size,
        blocks: tokens as u32 / hello.block_size,
        block_bytes: 4096,
        weight_bytes: 4096,
        scratch_bytes: 0,
        pinned_bytes: 0,
        digest: [1; 16],
        file_digest: [2; 16],
        kv_id: kv.id(),
        weights_reused: false,
        kv_reused: false,
        threads: 1,
        kernels: "null".to_owned(),
        load_us: 0,
        cost: StepCost::UNKNOWN.into(),
        algorithms: Vec::new(),
    };
    let model = Null { weights, kv, tables: Vec::new(), out: VecDeque::new(), last: Instant::now() };
    let hello = Hello { measure: false, ..hello.clone() };
    Ok(ModelRunner::new(&hello, Loaded { model: Box::new(model), info }))
}

fn main() -> anyhow::Result<()> {
    let socket = arena::inherited_socket(3)?;
    serve_by(&mut Channel::new(socket)?, load)?;
    Ok(())
}
