//! How fast a model runs on this machine, without daemon and gateway.
//!
//! `throughput MODEL [--dtype f32] [--threads N] [--sequences N,...]` prints tokens per second of a prompt of 512 tokens and of 1, 4, 8, 16 and 32
//! sequences that decode after 128 tokens each, beside what was predicted. Medians; run it on a quiet machine. Beside each stands how
//! many tokens a second of processor time gave, which a quota or a busy neighbour leaves comparable, and at the end the memory that is
//! neither weights nor KV. A step of one sequence stands beside its bound: reading all weights once, by as many threads, in turns with it.

use std::fs;
use std::hint::black_box;
use std::time::Instant;

use anyhow::Context as _;
use clap::{Parser, ValueEnum};
use pagedd_core::{Pairs, SamplingParams, StepCost};
use pagedd_kernels::ThreadPool;
use pagedd_wire::PROTOCOL;
use pagedd_wire::worker::{
    Arena, Begin, Device, Dtype, Hello, Input, KvDtype, KvMemory, Plan, Row, TableUpdate,
};
use pagedd_worker::{Fds, ModelRunner};

const BLOCK: u32 = 16;
const CONTEXT: u32 = 128;
const STEPS: u32 = 32;

#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    Auto,
    F32,
}

#[derive(Parser)]
struct Args {
    /// A GGUF file or a Hugging Face directory.
    model: String,
    /// How weights are kept and multiplied.
    #[arg(long, value_enum, default_value = "auto")]
    dtype: Kind,
    /// Compute threads; as a rule all that are allowed.
    #[arg(long)]
    threads: Option<u32>,
    /// Numbers of sequences that decode together.
    #[arg(long, value_delimiter = ',', default_value = "1,4,8,16,32")]
    sequences: Vec<u64>,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let (dtype, kv_dtype) = match args.dtype {
        Kind::Auto => (Dtype::Auto, KvDtype::F16),
        Kind::F32 => (Dtype::F32, KvDtype::F32),
    };
    let hello = Hello {
        protocol: PROTOCOL,
        path: args.model,
        device: Device::Cpu,
        dtype,
        kv_dtype,
        block_size: BLOCK,
        kv_memory: KvMemory::Tokens(16_384),
        max_model_len: None,
        max_num_seqs: 64,
        max_num_batched_tokens: 512,
        threads: args.threads,
        deterministic: false,
        measure: true,
        weights_fd: false,
        kv_fd: false,
        weights_bytes: 0,
        kv_bytes: 0,
        known_cost: None,
        algorithms: Vec::new(),
    };
    let start = Instant::now();
    let mut runner = ModelRunner::load(&hello, Fds::default(), &mut |_| true)?;
    let info = runner.info().clone();
    println!(
        "{} of {:.0} M parameters, {} kernels, {} threads, weights {:.1} MB, loaded in {:.0} ms",
        info.architecture,
        info.parameters as f64 / 1e6,
        info.kernels,
        info.threads,
        info.weight_bytes as f64 / 1e6,
        start.elapsed().as_secs_f64() * 1e3
    );
    let mut plans = 0;
    let mut run = |runner: &mut ModelRunner, begin: Vec<Begin>, rows: Vec<Row>| {
        plans += 1;
        let start = Instant::now();
        runner.run(&Plan { id: plans, begin, rows, ..Plan::default() }).map(|_| start.elapsed().as_secs_f64())
    };

    let mut prompts = Vec::new();
    let cpu = cpu_seconds()?;
    for _ in 0..5 {
        prompts.push(run(&mut runner, vec![begin(1)], vec![row(1, 0, 512, info.vocab_size)])?);
    }
    let cost = StepCost::from(info.cost);
    let predicted_ms = |tokens, rows, pairs| f64::from(cost.step_us(tokens, rows, pairs)) / 1e3;
    let seconds = median(&mut prompts)?;
    println!(
        "prompt of 512 tokens: {:8.1} tokens/s, {:.2} ms, {:.2} ms predicted, {:.1} per CPU second",
        512.0 / seconds,
        seconds * 1e3,
        predicted_ms(512, 1, Pairs::of_part(0, 512)),
        5.0 * 512.0 / (cpu_seconds()? - cpu)
    );
    for sequences in args.sequences {
        for seq in 0..sequences {
            run(&mut runner, vec![begin(seq)], vec![row(seq, 0, CONTEXT, info.vocab_size)])?;
        }
        let mut steps = Vec::new();
        let cpu = cpu_seconds()?;
        for step in 0..STEPS {
            let rows = (0..sequences).map(|seq| row(seq, CONTEXT + step, 1, info.vocab_size)).collect();
            steps.push(run(&mut runner, Vec::new(), rows)?);
        }
        let seconds = median(&mut steps)?;
        println!(
            "{sequences:3} sequences:       {:10.1} tokens/s, {:.2} ms a step, {:.2} ms predicted, {:.1} per CPU second",
            sequences as f64 / seconds,
            seconds * 1e3,
            predicted_ms(
                sequences as u32,
                sequences as u32,
                Pairs { rows: sequences * u64::from(CONTEXT + STEPS / 2), parts: 0 }
            ),
            (sequences * u64::from(STEPS)) as f64 / (cpu_seconds()? - cpu)
        );
    }
    println!("memory beside weights and KV: {:.1} MB", own_memory()? / 1e6);

    let pool = ThreadPool::new(info.threads as usize, None)?;
    run(&mut runner, vec![begin(0)], vec![row(0, 0, CONTEXT, info.vocab_size)])?;
    let (mut steps, mut reads) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        steps.push(run(&mut runner, Vec::new(), vec![row(0, CONTEXT + step, 1, info.vocab_size)])?);
        reads.push(read(&pool, runner.data(Arena::Weights)));
    }
    let (step, read) = (median(&mut steps)?, median(&mut reads)?);
    println!(
        "bound of one sequence: weights are read once in {:.2} ms ({:.1} GB/s), a step takes {:.2} ms: {:.0} % of its bound",
        read * 1e3,
        info.weight_bytes as f64 / read / 1e9,
        step * 1e3,
        100.0 * read / step
    );
    Ok(())
}

/// Seconds in which the threads read `bytes` once.
fn read(pool: &ThreadPool, bytes: &[u8]) -> f64 {
    let start = Instant::now();
    let words = bytes.as_chunks::<64>().0;
    pool.run(&|index, of| {
        let part = words.len().div_ceil(of);
        let mut lanes = [0_u8; 64];
        for word in words.iter().skip(index * part).take(part) {
            lanes.iter_mut().zip(word).for_each(|(lane, byte)| *lane ^= byte);
        }
        black_box(lanes);
    });
    start.elapsed().as_secs_f64()
}

/// Processor time of all threads of this process.
fn cpu_seconds() -> anyhow::Result<f64> {
    let mut nanoseconds = 0.0;
    for task in fs::read_dir("/proc/self/task")? {
        let stat = fs::read_to_string(task?.path().join("schedstat"))?;
        nanoseconds += stat.split(' ').next().context("no time")?.parse::<f64>()?;
    }
    Ok(nanoseconds / 1e9)
}

/// Resident bytes that are not shared memory, which is what the arenas are.
fn own_memory() -> anyhow::Result<f64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let kilobytes = |key: &str| -> anyhow::Result<f64> {
        let line = status.lines().find_map(|line| line.strip_prefix(key)).context("no such memory")?;
        Ok(line.trim_end_matches("kB").trim().parse()?)
    };
    Ok((kilobytes("RssAnon:")? + kilobytes("RssFile:")?) * 1024.0)
}

fn median(seconds: &mut [f64]) -> anyhow::Result<f64> {
    seconds.sort_by(f64::total_cmp);
    seconds.get(seconds.len() / 2).copied().context("no measurement")
}

fn begin(seq: u64) -> Begin {
    Begin { seq, choice: 0, sampling: SamplingParams::GREEDY.into(), prompt: 0, tokens: vec![] }
}

/// Tokens `[start, start + count)` of a sequence that owns 32 blocks of its own.
fn row(seq: u64, start: u32, count: u32, vocab: u32) -> Row {
    let token = |position: u32| (seq as u32 * 7919 + position * 104_729) % vocab;
    let blocks =
        if start == 0 { (0..512 / BLOCK).map(|i| seq as u32 * 32 + i).collect() } else { Vec::new() };
    let from = if start == 0 { 0 } else { 512 / BLOCK };
    Row {
        seq,
        start,
        inputs: (start..start + count).map(|position| Input::Known(token(position))).collect(),
        table: TableUpdate { from, blocks },
        samples: [seq].into(),
        drafts: 0,
    }
}
