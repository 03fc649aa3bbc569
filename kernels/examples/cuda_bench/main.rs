//! Times GPU kernels on the shapes of real models: `cuda_bench gemm`, `few`, `layers`, `sampling` or `attention`.
//!
//! Every number is of replayed graphs, by events of the device; weights rotate past the second-level cache.

mod attention;
mod few;

use std::process::ExitCode;

use half::bf16;
use pagedd_core::{BlockId, Penalties, SamplingParams, TokenId};
use pagedd_kernels::cuda::{
    AddNorm, BlockCopies, Buffer, CudaError, Device, DeviceAngles, DeviceBatch, DeviceKvLayout, Embed, Event,
    Gemm, GemmOutput, GemmShape, Graph, PinnedRing, RopeIntoKv, SampleRow, Sampler, Stream, TokenSource,
    Tokens, add_rms_norm, copy_blocks, embed, fill_normal, rope_into_kv, silu_mul,
};
use pagedd_kernels::sample::{Adjustment, philox4x32_10};
use pagedd_kernels::{DeviceKvElement, KvRow, Pairing};

fn main() -> ExitCode {
    let what = std::env::args().nth(1).unwrap_or_default();
    let run = match what.as_str() {
        "gemm" => gemm,
        "few" => few::few,
        "layers" => layers,
        "sampling" => sampling,
        "attention" => attention::attention,
        _ => {
            eprintln!("cuda_bench gemm | few | layers | sampling | attention");
            return ExitCode::from(2);
        }
    };
    let done = Device::open(0).and_then(|device| {
        println!("{}, {what}", device.info().name);
        run(&device.stream()?)
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cuda_bench: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Microseconds of a replay: the median of `rounds`, after one to warm up.
fn time(stream: &Stream, graph: &Graph<'_>, rounds: usize) -> Result<f64, CudaError> {
    let (start, end) = (Event::new(stream.device())?, Event::new(stream.device())?);
    graph.replay()?;
    let mut times = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        start.record(stream)?;
        graph.replay()?;
        end.record(stream)?;
        times.push(start.micros_until(&end)?);
    }
    times.sort_unstable_by(f64::total_cmp);
    Ok(times[rounds / 2])
}

struct Model {
    name: &'static str,
    hidden: usize,
    qkv: usize,
    query: usize,
    ffn: usize,
    vocabulary: usize,
    layers: usize,
}

const MODELS: [Model; 4] = [
    Model {
        name: "llama-3-8b",
        hidden: 4096,
        qkv: 6144,
        query: 4096,
        ffn: 14_336,
        vocabulary: 128_256,
        layers: 32,
    },
    Model {
        name: "llama-2-7b",
        hidden: 4096,
        qkv: 12_288,
        query: 4096,
        ffn: 11_008,
        vocabulary: 32_000,
        layers: 32,
    },
    Model {
        name: "qwen2.5-7b",
        hidden: 3584,
        qkv: 4608,
        query: 3584,
        ffn: 18_944,
        vocabulary: 152_064,
        layers: 28,
    },
    Model {
        name: "smollm2-135m",
        hidden: 576,
        qkv: 960,
        query: 576,
        ffn: 1536,
        vocabulary: 49_152,
        layers: 30,
    },
];

/// Elements of weights that products rotate through: 1.25 GiB, more than the largest head.
const POOL: usize = 640 << 20;

fn gemm(stream: &Stream) -> Result<(), CudaError> {
    let mut weights = Buffer::<bf16>::zeroed(stream, POOL)?;
    fill_normal(stream, 1, 0.02, &mut weights.all_mut())?;
    let mut x = Buffer::<bf16>::zeroed(stream, 8192 * 18_944)?;
    fill_normal(stream, 2, 1.0, &mut x.all_mut())?;
    let mut out = Buffer::<bf16>::zeroed(stream, 8192 * 37_888)?;
    let mut logits = Buffer::<f32>::zeroed(stream, 1024 * 152_064)?;
    let mut gemm = Gemm::new(stream)?;
    println!("first: the algorithm proposed first; best: the fastest of 8 proposals; µs a product");
    println!(
        "{:<13} {:<8} {:>6} {:>7} {:>6} {:>9} {:>9} {:>5} {:>7} {:>8}",
        "model", "product", "in", "out", "rows", "first", "best", "which", "GB/s", "TFLOP/s"
    );
    for model in MODELS {
        let products = [
            ("qkv", model.hidden, model.qkv),
            ("o", model.query, model.hidden),
            ("gate+up", model.hidden, 2 * model.ffn),
            ("down", model.ffn, model.hidden),
            ("head", model.hidden, model.vocabulary),
        ];
        let mut totals = Vec::new();
        for rows in (0..14).map(|power| 1 << power) {
            let (mut layer, mut head) = ([0.0; 2], [0.0; 2]);
            for (name, inputs, outputs) in products {
                let shape = GemmShape { inputs, outputs };
                if name == "head" {
                    if rows <= 1024 {
                        head = measure(
                            stream,
                            &mut gemm,
                            (model.name, name),
                            shape,
                            rows,
                            (&weights, &x),
                            &mut logits,
                        )?;
                    }
                } else {
                    let took = measure(
                        stream,
                        &mut gemm,
                        (model.name, name),
                        shape,
                        rows,
                        (&weights, &x),
                        &mut out,
                    )?;
                    layer = [layer[0] + took[0], layer[1] + took[1]];
                }
            }
            let total = |i: usize| (layer[i] * model.layers as f64 + head[i]) / 1e3;
            totals.push((rows, total(0), total(1)));
        }
        println!("{}: all products of a step, ms (head up to 1,024 rows): rows first best", model.name);
        for (rows, first, best) in totals {
            println!("  {rows:>5} {first:>9.3} {best:>9.3}");
        }
    }
    Ok(())
}

/// Microseconds of a product: by the algorithm proposed first, and by the fastest.
fn measure<O: GemmOutput>(
    stream: &Stream,
    gemm: &mut Gemm,
    (model, name): (&str, &str),
    shape: GemmShape,
    rows: usize,
    (weights, x): (&Buffer<bf16>, &Buffer<bf16>),
    out: &mut Buffer<O>,
) -> Result<[f64; 2], CudaError> {
    let GemmShape { inputs, outputs } = shape;
    let size = inputs * outputs;
    let copies = (POOL / size).min(512);
    // So many that a replay takes a millisecond or more, and goes through three times the cache.
    let estimate = (2.0 * size as f64 / 4e6).max(2.0 * (size * rows) as f64 / 7e8).max(2.0);
    let launches = ((1500.0 / estimate) as usize).clamp(3, 300).max((200 << 20) / (2 * size)).min(600);
    let mut times = Vec::new();
    for algorithm in gemm.proposals::<bf16, O>(shape, rows, 8)? {
        gemm.keep::<bf16, O>(shape, rows, algorithm)?;
        let x = x.part(0..rows * inputs)?;
        let mut all = |stream: &Stream| {
            for launch in 0..launches {
                let first = launch % copies * size;
                let weights = weights.part(first..first + size)?;
                gemm.multiply(stream, shape, x, weights, &mut out.part_mut(0..rows * outputs)?)?;
            }
            Ok(())
        };
        // An algorithm that this shape does not take is no candidate.
        let took = match Graph::capture(stream, &mut all) {
            Ok(graph) => time(stream, &graph, 3)? / launches as f64,
            Err(_) => f64::INFINITY,
        };
        times.push(took);
    }
    let best = times.iter().copied().fold(f64::INFINITY, f64::min);
    let which = times.iter().position(|&t| t <= best).unwrap_or_default();
    let bytes = 2 * size + 2 * rows * inputs + size_of::<O>() * rows * outputs;
    println!(
        "{model:<13} {name:<8} {inputs:>6} {outputs:>7} {rows:>6} {:>9.2} {best:>9.2} {which:>5} {:>7.0} {:>8.1}",
        times[0],
        bytes as f64 / best / 1e3,
        2.0 * (size * rows) as f64 / best / 1e6
    );
    Ok([times[0], best])
}

/// Times `launches` of something in one graph, and prints a line.
fn line(
    stream: &Stream,
    name: &str,
    rows: usize,
    bytes: usize,
    launches: usize,
    mut each: impl FnMut(&Stream, usize) -> Result<(), CudaError>,
) -> Result<(), CudaError> {
    let all = |stream: &Stream| (0..launches).try_for_each(|launch| each(stream, launch));
    let took = {
        let graph = Graph::capture(stream, all)?;
        time(stream, &graph, 9)? / launches as f64
    };
    println!("{name:<44} {rows:>6} {took:>9.2} {:>7.0}", bytes as f64 / took / 1e3);
    Ok(())
}

fn layers(stream: &Stream) -> Result<(), CudaError> {
    println!("{:<44} {:>6} {:>9} {:>7}", "kernel (bf16)", "rows", "µs", "GB/s");
    for model in &MODELS {
        for rows in [1, 8, 64, 256, 2048, 8192] {
            layer(stream, model, rows)?;
        }
    }
    block_copies(stream)
}

fn layer(stream: &Stream, model: &Model, rows: usize) -> Result<(), CudaError> {
    let (hidden, ffn) = (model.hidden, model.ffn);
    let mut ring = PinnedRing::new(stream.device(), 4, 1 << 20)?;
    // Inputs of several launches, so that large ones come from memory.
    let sets = (256 << 20) / (rows * 2 * ffn * 2);
    let sets = sets.clamp(1, 16);
    let launches = 2 * sets.max(8);
    let mut input = Buffer::<bf16>::zeroed(stream, sets * rows * 2 * ffn)?;
    fill_normal(stream, 3, 1.0, &mut input.all_mut())?;
    let mut out = Buffer::<bf16>::zeroed(stream, rows * 2 * ffn)?;
    let mut residual = Buffer::<f32>::zeroed(stream, rows * hidden)?;
    let weight = Buffer::copy_of(stream, &vec![1.0_f32; hidden])?;
    let of = |set: usize, len: usize| input.part(set % sets * len..(set % sets + 1) * len);
    let named = |kernel: &str| format!("{} {kernel}", model.name);
    line(stream, &named("residual + RMSNorm"), rows, 12 * rows * hidden, launches, |stream, set| {
        let args = AddNorm {
            x: residual.all_mut(),
            delta: Some(of(set, rows * hidden)?),
            weight: weight.all(),
            epsilon: 1e-5,
            rows: None,
            out: out.part_mut(0..rows * hidden)?,
        };
        add_rms_norm(stream, args)
    })?;
    line(stream, &named("SiLU·mul"), rows, 6 * rows * ffn, launches, |stream, set| {
        silu_mul(stream, of(set, 2 * rows * ffn)?, ffn, &mut out.part_mut(0..rows * ffn)?)
    })?;
    let d = if model.hidden == 576 { 64 } else { 128 };
    let heads = model.query / d;
    let kv_heads = (model.qkv / d - heads) / 2;
    let layout = DeviceKvLayout::blocks_outermost(4, kv_heads, d, 16, DeviceKvElement::Half)?;
    // Prefill is one row, decode a row per token.
    let capacity = 8192_u32;
    let tables: Vec<Vec<BlockId>> = (0..rows as u32).map(|row| vec![BlockId(row * 31 % capacity)]).collect();
    let whole: Vec<BlockId> = (0..512).map(|block| BlockId(block * 13 % capacity)).collect();
    let prefill = [KvRow { first_position: 0, tokens: rows as u32, table: &whole }];
    let decode: Vec<KvRow<'_>> =
        tables.iter().map(|table| KvRow { first_position: 5, tokens: 1, table }).collect();
    let mut batch = DeviceBatch::with_capacity(stream, layout, capacity, (rows, rows, rows.max(512)))?;
    batch.set(stream, &mut ring, if rows > 256 { &prefill } else { &decode }, rows)?;
    let frequencies: Vec<f32> = (0..d / 2).map(|i| 1e4_f32.powf(-((2 * i) as f32) / d as f32)).collect();
    let mut angles = DeviceAngles::new(stream, &frequencies, 1.0, rows)?;
    let mut arena = Buffer::<u8>::zeroed(stream, layout.arena_bytes(capacity)?)?;
    line(stream, &named("RoPE angles"), rows, 8 * rows * d / 2, launches, |stream, _| {
        angles.set(stream, &batch)
    })?;
    let mut qkv = Buffer::<bf16>::copy_of(stream, &of(0, rows * model.qkv)?.to_vec(stream)?)?;
    let bytes = 4 * rows * model.qkv;
    line(stream, &named("RoPE + KV write"), rows, bytes, launches, |stream, set| {
        let args = RopeIntoKv {
            qkv: qkv.all_mut(),
            heads,
            bias: None,
            angles: &angles,
            pairing: Pairing::Halves,
            batch: &batch,
            layer: set % 4,
            arena: arena.all_mut(),
        };
        rope_into_kv(stream, args)
    })?;
    let table = of(0, 1000 * hidden).or_else(|_| input.part(0..input.len() / hidden * hidden))?;
    let vocabulary = (table.len() / hidden) as u32;
    let mut tokens = Tokens::with_capacity(stream, rows)?;
    let ids: Vec<TokenSource> = (0..rows as u32).map(|i| TokenSource::Known(i * 7 % vocabulary)).collect();
    tokens.set(stream, &mut ring, &ids)?;
    line(stream, &named("embedding"), rows, 6 * rows * hidden, launches, |stream, _| {
        let out = residual.part_mut(0..rows * hidden)?;
        let args = Embed { table, hidden, tokens: &tokens, drawn: None, out };
        embed(stream, args)
    })
}

fn block_copies(stream: &Stream) -> Result<(), CudaError> {
    let mut ring = PinnedRing::new(stream.device(), 4, 1 << 20)?;
    let (layout, capacity) =
        (DeviceKvLayout::blocks_outermost(32, 8, 128, 16, DeviceKvElement::Half)?, 2048_u32);
    let mut arena = Buffer::<u8>::zeroed(stream, layout.arena_bytes(capacity)?)?;
    for count in [1, 16, 256] {
        let list: Vec<_> =
            (0..count).map(|i| (BlockId(i as u32), BlockId(1024 + 3 * i as u32), 16)).collect();
        let mut copies = BlockCopies::with_capacity(stream, layout, capacity, count)?;
        copies.set(stream, &mut ring, &list)?;
        let bytes = 2 * count * layout.block_stride;
        line(stream, "copies of blocks of 2 MiB", count, bytes, 8, |stream, _| {
            copy_blocks(stream, &copies, &mut arena.all_mut())
        })?;
    }
    Ok(())
}

/// Logits as a model gives them: a bell with a few high ones.
fn logits(rows: usize, vocabulary: usize) -> Vec<f32> {
    let unit = |word: u32| word as f32 / (1_u64 << 32) as f32;
    let value = |index: usize| {
        let words = philox4x32_10([index as u32, 0, 0, 0], [5, 5]);
        let bell = words.iter().map(|&w| unit(w) - 0.5).sum::<f32>() * 5.0;
        if words[0].is_multiple_of(2003) { bell + 14.0 } else { bell }
    };
    (0..rows * vocabulary).map(value).collect()
}

fn sampling(stream: &Stream) -> Result<(), CudaError> {
    println!("{:<44} {:>6} {:>9} {:>7}", "vocabulary 128,256", "rows", "µs", "GB/s");
    let vocabulary = 128_256;
    let mut ring = PinnedRing::new(stream.device(), 8, 1 << 20)?;
    let host = logits(1024, vocabulary);
    let mut logits = Buffer::copy_of(stream, &host)?;
    let by = |i: u32| Adjustment { token: TokenId(i * 117), seen: true, output: i % 3, bias: 0.0 };
    let changes: Vec<Adjustment> = (0..1000).map(by).collect();
    let penalties = Penalties { repetition: 1.1, frequency: 0.1, presence: 0.1 };
    let plain = SamplingParams { temperature: 1.0, seed: 9, ..SamplingParams::GREEDY };
    let full = SamplingParams {
        temperature: 0.8,
        top_p: 0.95,
        top_k: Some(50),
        logprobs: Some(20),
        penalties,
        ..plain
    };
    let ways: [(&str, SamplingParams, bool); 8] = [
        ("greedy", SamplingParams::GREEDY, false),
        ("temperature", plain, false),
        ("top-p 0.95", SamplingParams { top_p: 0.95, ..plain }, false),
        ("top-p 0.95 at temperature 3", SamplingParams { top_p: 0.95, temperature: 3.0, ..plain }, false),
        ("top-k 50, top-p 0.95", SamplingParams { top_k: Some(50), top_p: 0.95, ..plain }, false),
        ("greedy, top-20 logprobs", SamplingParams { logprobs: Some(20), ..SamplingParams::GREEDY }, false),
        ("top-k, top-p, top-20 logprobs", full, false),
        ("penalties, top-k, top-p, top-20 logprobs", full, true),
    ];
    for rows in [1, 8, 64, 256, 1024] {
        for (name, params, adjusted) in ways {
            let list: Vec<SampleRow<'_>> = (0..rows as u32)
                .map(|row| SampleRow {
                    logits_row: row,
                    params,
                    min_p: 0.0,
                    choice: 0,
                    position: row,
                    adjustments: if adjusted { &changes } else { &[] },
                })
                .collect();
            let mut sampler = Sampler::new(stream, vocabulary, rows, 20, rows * 1000)?;
            sampler.set(stream, &mut ring, &list)?;
            let bytes = 4 * rows * vocabulary;
            line(stream, name, rows, bytes, 10, |stream, _| {
                sampler.run(stream, &mut logits.part_mut(0..rows * vocabulary)?)
            })?;
        }
    }
    Ok(())
}
