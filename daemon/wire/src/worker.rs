//! Daemon ⇄ worker.
//!
//! A worker is a function of (arenas, plans). It starts with [`ToWorker::Hello`], answers [`FromWorker::Ready`] (after an
//! [`FromWorker::Arena`] for each arena that it made itself), and then runs each [`ToWorker::Plan`], in order. Everything a worker
//! knows about sequences is soft: [`ToWorker::Resync`] replaces all of it.
//!
//! A plan's [`FromWorker::Output`] comes when [`ToWorker::Collect`] asks for it. So the daemon can send a plan while an earlier one is
//! computed, up to [`MOST_IN_FLIGHT`] without an answer, and neither side ever writes while the other one does: whoever waits, reads.
//!
//! Running a plan twice leaves the same arenas and gives the same output: table updates are absolute, block copies are bounded
//! by filled tokens, and a filled position is only ever written again with the same bits.

use pagedd_core::Few;
use serde::{Deserialize, Serialize};

use crate::Sampling;

/// From the daemon.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum ToWorker {
    /// First frame. Beside it come the fds of the arenas that `hello` names, weights first.
    Hello(Hello),
    /// Forget every sequence; these are the live ones.
    Resync(Vec<SequenceState>),
    /// Run this, after the plans before it. At most [`MOST_IN_FLIGHT`] have no answer.
    Plan(Plan),
    /// Answer the oldest plan that has no answer, once it has run. There is one.
    Collect,
    /// Exit cleanly. (End of file does the same.)
    Shutdown,
}

/// Most plans without an answer.
pub const MOST_IN_FLIGHT: usize = 2;

/// What to load, and on what.
#[allow(clippy::struct_excessive_bools, reason = "settings that have nothing to do with one another")]
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// [`crate::PROTOCOL`].
    pub protocol: u32,
    /// Path of a GGUF file or of a Hugging Face directory.
    pub path: String,
    /// Where to compute.
    pub device: Device,
    /// How weights are kept and multiplied.
    pub dtype: Dtype,
    /// How keys and values are kept.
    pub kv_dtype: KvDtype,
    /// Tokens in a block: a power of two in `[16, 512]`.
    pub block_size: u32,
    /// Size of the KV arena.
    pub kv_memory: KvMemory,
    /// Longest sequence, in tokens; `None` is the model's own context.
    pub max_model_len: Option<u32>,
    /// Most rows (sequences) in a plan.
    pub max_num_seqs: u32,
    /// Most input tokens in a plan.
    pub max_num_batched_tokens: u32,
    /// Compute threads; `None` is what affinity and cgroup quota allow.
    pub threads: Option<u32>,
    /// A row's bits depend on its own inputs alone, whatever runs beside it. On the CPU it is always so.
    pub deterministic: bool,
    /// Measure what steps take before `Ready`. Left out where an earlier worker of this daemon has done it.
    pub measure: bool,
    /// An fd of the weights arena of an earlier worker is beside this frame.
    pub weights_fd: bool,
    /// An fd of the KV arena of an earlier worker is beside this frame.
    pub kv_fd: bool,
    /// What [`FromWorker::Arena`] said of the weights arena whose fd is beside this frame, 0 where none is: memory of a GPU does not tell
    /// its size to whoever has an fd of it.
    pub weights_bytes: u64,
    /// The same of the KV arena.
    pub kv_bytes: u64,
    /// What an earlier worker measured: where it was the same in all that counts, nothing is measured again.
    pub known_cost: Option<KnownCost>,
    /// [`ModelInfo::algorithms`] of an earlier worker: its products have the same bits. Empty where there was none.
    pub algorithms: Vec<u8>,
}

/// What steps took an earlier worker, and all that it depends on.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct KnownCost {
    /// [`ModelInfo::digest`]: the model, its types, and the instruction set.
    pub digest: [u8; 16],
    /// [`ModelInfo::threads`].
    pub threads: u32,
    /// [`ModelInfo::max_model_len`].
    pub max_model_len: u32,
    /// [`Hello::max_num_seqs`].
    pub max_num_seqs: u32,
    /// [`Hello::max_num_batched_tokens`].
    pub max_num_batched_tokens: u32,
    /// What was measured.
    pub cost: StepCost,
}

impl KnownCost {
    /// What a worker that was told `hello` and loaded `info` has measured.
    #[must_use]
    pub fn new(hello: &Hello, info: &ModelInfo) -> Self {
        Self {
            digest: info.digest,
            threads: info.threads,
            max_model_len: info.max_model_len,
            max_num_seqs: hello.max_num_seqs,
            max_num_batched_tokens: hello.max_num_batched_tokens,
            cost: info.cost,
        }
    }

    /// Whether it holds for the worker that was told `hello` and loaded `info`.
    #[must_use]
    pub fn holds_for(&self, hello: &Hello, info: &ModelInfo) -> bool {
        *self == Self { cost: self.cost, ..Self::new(hello, info) }
    }
}

/// Where to compute.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Device {
    /// The host's processors.
    Cpu,
    /// An NVIDIA GPU.
    Cuda {
        /// Its number among those that the process sees.
        ordinal: u32,
    },
}

/// How weights are kept and multiplied.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Dtype {
    /// As near to the file's own types as the kernels allow: on the CPU quantised weights meet int8 activations, on a GPU all is bfloat16.
    Auto,
    /// Dequantised to float32, float32 throughout. Not on a GPU.
    F32,
}

/// How keys and values are kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum KvDtype {
    /// IEEE half precision.
    F16,
    /// Single precision.
    F32,
    /// bfloat16: what a GPU keeps.
    Bf16,
    /// Eight bits (e4m3) with a scale for each token and KV head: what a GPU keeps where it is told to.
    Fp8,
}

/// Size of the KV arena.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub enum KvMemory {
    /// A quarter of what is available, but no more than `max_num_seqs` sequences of full length need.
    Auto,
    /// This many bytes.
    Bytes(u64),
    /// Room for this many tokens.
    Tokens(u64),
    /// This share of available memory, in per cent.
    Percent(f32),
}

/// A sequence as a fresh worker must know it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SequenceState {
    /// Its id.
    pub seq: u64,
    /// Which choice of its request: part of the sampling key.
    pub choice: u32,
    /// How its tokens are drawn.
    pub sampling: Sampling,
    /// All tokens so far, prompt and output.
    pub tokens: Vec<u32>,
    /// How many of them are the prompt.
    pub prompt: u32,
    /// Its block table.
    pub blocks: Vec<u32>,
}

/// One iteration.
///
/// The order is: `begin`, `copies`, `rows`, sampling, `end`.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Plan {
    /// Consecutive, from 1.
    pub id: u64,
    /// Sequences first seen in this plan (or again after preemption), with an empty table. Replaces what has that id.
    pub begin: Vec<Begin>,
    /// Block copies, before any row computes.
    pub copies: Vec<BlockCopy>,
    /// What is computed: at most one row per sequence.
    pub rows: Vec<Row>,
    /// Sequences that no later plan names.
    pub end: Vec<u64>,
}

/// A sequence enters.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Begin {
    /// Its id.
    pub seq: u64,
    /// Which choice of its request.
    pub choice: u32,
    /// How its tokens are drawn.
    pub sampling: Sampling,
    /// Tokens of its prompt.
    pub prompt: u32,
    /// Where it has penalties, all tokens that are known so far, prompt and output; rows bring the others. Else none.
    pub tokens: Vec<u32>,
}

/// Copy the first `tokens` positions of block `from`, all layers, into block `to`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct BlockCopy {
    /// Read.
    pub from: u32,
    /// Written.
    pub to: u32,
    /// How many positions.
    pub tokens: u32,
}

/// One sequence's part of a plan: positions `[start, start + inputs.len())`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Row {
    /// Whose.
    pub seq: u64,
    /// First position computed; everything before it is in KV already.
    pub start: u32,
    /// Tokens at the row's positions; never empty.
    #[serde(with = "crate::few")]
    pub inputs: Few<Input>,
    /// Change of the block table, made before the row computes.
    pub table: TableUpdate,
    /// What to draw from the logits of the row's last position before its guesses: nothing for a chunk that does not end the
    /// prompt, one sequence as a rule, all choices of a request at the end of its prompt. Each names a sequence that was begun.
    #[serde(with = "crate::few")]
    pub samples: Few<u64>,
    /// How many of the inputs, the last ones, are guesses of what `seq` draws; fewer than there are inputs. It draws behind the
    /// input before the first guess, and behind each guess as long as the draw before it was that guess. Such a row's samples are
    /// `seq` alone, its guesses are known tokens, and no later plan names its draws: what lies behind a wrong guess in KV is not
    /// filled.
    pub drafts: u32,
}

/// Most guesses in all rows of a plan.
pub const MOST_DRAFTS: u32 = 64;

/// An input token.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Input {
    /// This token.
    Known(u32),
    /// What `seq` drew in plan `plan`, which is not applied yet.
    Sampled {
        /// An earlier plan.
        plan: u64,
        /// The sequence that drew.
        seq: u64,
    },
}

/// `table[from..] = blocks`. Absolute, so that it can be made twice.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct TableUpdate {
    /// First entry that changes.
    pub from: u32,
    /// New entries; the table ends after them. Empty with `from` = the table's length changes nothing.
    pub blocks: Vec<u32>,
}

/// From the worker.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum FromWorker {
    /// How far loading is, in per mille: shown, and it extends the load deadline.
    Loading {
        /// `[0, 1000]`.
        permille: u32,
    },
    /// An arena that this worker made; its fd is beside the frame. The daemon keeps it for the next worker.
    Arena {
        /// Which.
        arena: Arena,
        /// Its size.
        bytes: u64,
    },
    /// Ready for plans.
    Ready(Box<ModelInfo>),
    /// What the oldest plan without an answer gave; the daemon asked for it.
    Output(Output),
    /// The worker exits; this is why. A model that cannot be loaded ends here, with the tensor or key named.
    Failed {
        /// One line.
        error: String,
        /// Whether another try could end otherwise (out of memory: yes; a broken file: no).
        retry: bool,
    },
}

/// Bytes of an arena's file before its data.
pub const ARENA_HEADER: usize = 4096;

/// Version of how a KV arena's data lie: block after block, `block_bytes` of each. What lies where in a block, the digest says.
pub const KV_LAYOUT: u32 = 1;

/// An arena: memory that outlives its worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Arena {
    /// Packed weights.
    Weights,
    /// KV blocks.
    Kv,
}

/// What was loaded.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ModelInfo {
    /// `general.architecture` or `model_type`.
    pub architecture: String,
    /// Number of weights.
    pub parameters: u64,
    /// Vocabulary size.
    pub vocab_size: u32,
    /// Longest sequence, in tokens: the smaller of the model's context and `max_model_len`.
    pub max_model_len: u32,
    /// Tokens in a block.
    pub block_size: u32,
    /// Blocks in the KV arena.
    pub blocks: u32,
    /// Bytes of a block, all layers.
    pub block_bytes: u64,
    /// Bytes of the weights arena.
    pub weight_bytes: u64,
    /// Bytes of the device that steps compute in, beside weights and KV blocks.
    pub scratch_bytes: u64,
    /// Bytes of the host's memory that are pinned for the device: no cgroup's limit takes them back.
    pub pinned_bytes: u64,
    /// Digest of model, dtype and layout: part of every prefix key.
    pub digest: [u8; 16],
    /// Digest of the model's file, or files, alone.
    pub file_digest: [u8; 16],
    /// Names the KV arena among all that were ever made: drawn at random by the worker that made it, and kept in its header.
    pub kv_id: [u8; 16],
    /// The weights arena was mapped as it was found.
    pub weights_reused: bool,
    /// The KV arena was mapped as it was found.
    pub kv_reused: bool,
    /// Compute threads.
    pub threads: u32,
    /// Kernel set chosen at run time, for example `avx2` or `portable`.
    pub kernels: String,
    /// From `Hello` to `Ready`, in microseconds.
    pub load_us: u64,
    /// What steps take; all zero where it was not measured.
    pub cost: StepCost,
    /// Which algorithms multiply, as the device's library keeps them; empty where there is nothing to choose.
    pub algorithms: Vec<u8>,
}

/// What a step takes, in microseconds; see [`pagedd_core::StepCost`].
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct StepCost {
    /// What every token costs, at [`pagedd_core::StepCost::SIZES`] tokens.
    pub body_us: [f32; pagedd_core::StepCost::SIZES.len()],
    /// What a sampled row costs on top, at as many rows.
    pub head_us: [f32; pagedd_core::StepCost::SIZES.len()],
    /// Attention of rows of a single token, per pair of a query and a position.
    pub row_pair_us: f32,
    /// The same of parts of prompts.
    pub part_pair_us: f32,
}

impl From<pagedd_core::StepCost> for StepCost {
    fn from(cost: pagedd_core::StepCost) -> Self {
        let pagedd_core::StepCost { body_us, head_us, row_pair_us, part_pair_us } = cost;
        Self { body_us, head_us, row_pair_us, part_pair_us }
    }
}

/// What is no time counts as nothing known.
impl From<StepCost> for pagedd_core::StepCost {
    fn from(cost: StepCost) -> Self {
        let StepCost { body_us, head_us, row_pair_us, part_pair_us } = cost;
        let time = |us: &f32| us.is_finite() && *us >= 0.0;
        let known = body_us.iter().chain(&head_us).chain([&row_pair_us, &part_pair_us]).all(time);
        if known { Self { body_us, head_us, row_pair_us, part_pair_us } } else { Self::UNKNOWN }
    }
}

/// What a plan gave.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Output {
    /// Which plan.
    pub plan: u64,
    /// Drawn tokens, in the order of rows and their samples; of a row with guesses one more than were right, in order.
    pub sampled: Vec<Sampled>,
    /// Sequences whose row could not be computed, and why; the others are complete.
    pub failed: Vec<(u64, String)>,
    /// Time the worker took, in microseconds.
    pub compute_us: u64,
    /// What a GPU did.
    pub device: Option<DeviceStep>,
}

/// What a GPU did in a step, and what its worker has recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct DeviceStep {
    /// Time between the last kernel of the step before and the first of this one, in microseconds; copies of draws, inputs and blocks lie there. `None`
    /// where there is none before, or nothing was computed.
    pub idle_us: Option<u64>,
    /// Steps that are recorded as graphs so far.
    pub graphs: u32,
    /// What recording them took, in microseconds.
    pub graphs_us: u64,
    /// By how much free memory fell meanwhile.
    pub graphs_bytes: u64,
    /// Memory of the GPU in use beside both arenas, when something was recorded last, or behind loading: context, libraries, scratch memory,
    /// graphs, and all that other processes have.
    pub beside_bytes: u64,
}

/// A drawn token.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Sampled {
    /// Who drew.
    pub seq: u64,
    /// What.
    pub token: u32,
    /// Its natural-log probability under the unmodified logits; reported where `logprobs` was asked for.
    pub logprob: Option<f32>,
    /// The most likely tokens, best first; empty unless asked for.
    pub top: Vec<(u32, f32)>,
}
