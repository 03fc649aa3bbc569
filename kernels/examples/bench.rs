//! How fast the kernels are on this machine.
//!
//! Prints the read bandwidth, GMAC/s of products per format, rows and threads (with the weights' GB/s), and GB/s of KV of attention.
//! The shapes are those of a 135M-parameter Llama: width 576, feed-forward 1536, vocabulary 49152. Best of several runs.

use std::hint::black_box;
use std::time::Instant;

use pagedd_core::{BlockId, TensorType};
use pagedd_kernels::{
    Activations, AttentionShape, Isa, KvElement, KvLayout, KvRow, Matrix, MatrixLayout, PackedType, Product,
    SlotMapping, ThreadPool, attention, matmul_all, pack, rms_norm, silu_mul,
};

/// What to measure: everything, unless arguments say otherwise.
struct Selection {
    isa: Option<String>,
    part: Option<String>,
    ty: Option<TensorType>,
    rows: Option<usize>,
    threads: Option<usize>,
}

impl Selection {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut selection = Self { isa: None, part: None, ty: None, rows: None, threads: None };
        while let Some(name) = args.next() {
            let value = args.next().ok_or_else(|| format!("{name} needs a value; {USAGE}"))?;
            let number = || value.parse().map_err(|_| format!("{value} is no number; {USAGE}"));
            match name.as_str() {
                "--isa" if Isa::ALL.iter().any(|isa| isa.as_str() == value) => selection.isa = Some(value),
                "--only" if PARTS.contains(&value.as_str()) => selection.part = Some(value),
                "--type" => {
                    let named = |ty: &TensorType| ty.to_string() == value;
                    selection.ty = Some(
                        TYPES
                            .into_iter()
                            .find(named)
                            .ok_or_else(|| format!("{value} is none of {TYPES:?}; {USAGE}"))?,
                    );
                }
                "--rows" => selection.rows = Some(number()?),
                "--threads" => selection.threads = Some(number()?),
                _ => return Err(format!("{name} {value} is unknown; {USAGE}")),
            }
        }
        Ok(selection)
    }

    fn part(&self, part: &str) -> bool {
        self.part.as_deref().is_none_or(|only| only == part)
    }

    fn rows(&self) -> Vec<usize> {
        self.rows.map_or_else(|| vec![1, 2, 4, 8, 16, 32, 128], |rows| vec![rows])
    }

    fn threads(&self, most: usize) -> Vec<usize> {
        self.threads.map_or_else(|| if most > 1 { vec![1, most] } else { vec![1] }, |threads| vec![threads])
    }
}

/// File types that products are measured with.
const TYPES: [TensorType; 5] =
    [TensorType::Q4_1, TensorType::Q8_0, TensorType::Q6_K, TensorType::F16, TensorType::F32];
const PARTS: [&str; 4] = ["products", "head", "attention", "small"];
const USAGE: &str =
    "arguments: [--isa NAME] [--only products|head|attention|small] [--type NAME] [--rows N] [--threads N]";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let selection = Selection::parse(std::env::args().skip(1))?;
    let threads = std::thread::available_parallelism()?.get();
    println!("best instruction set {}, {threads} threads", Isa::detect());
    let chosen = |isa: Isa| selection.isa.as_ref().is_none_or(|name| name == isa.as_str());
    let isas = Isa::ALL.into_iter().filter(|&isa| isa != Isa::Portable && isa.usable() == isa && chosen(isa));
    for isa in isas {
        for threads in selection.threads(threads) {
            let pool = ThreadPool::new(threads, None)?;
            let bandwidth = bandwidth(&pool);
            println!("\n{isa}, {threads} threads, reads {:.1} GB/s: GMAC/s (weights GB/s)", bandwidth / 1e9);
            print!("{:10}", "rows");
            selection.rows().iter().for_each(|rows| print!(" {rows:>16}"));
            println!();
            if selection.part("products") {
                for ty in TYPES.into_iter().filter(|&ty| selection.ty.is_none_or(|only| only == ty)) {
                    products(&pool, isa, ty, &selection.rows(), bandwidth)?;
                }
            }
            if selection.part("head") {
                head(&pool, isa, &selection.rows())?;
            }
            if selection.part("attention") {
                decode(&pool, isa)?;
                prompt(&pool, isa)?;
            }
            if selection.part("small") {
                small(&pool, isa);
            }
        }
    }
    Ok(())
}

/// Seconds of the best of `runs` runs: other load only ever adds.
fn best(runs: usize, mut run: impl FnMut()) -> f64 {
    run();
    (0..runs)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed().as_secs_f64()
        })
        .fold(f64::INFINITY, f64::min)
}

/// Bytes per second that the threads read from memory.
fn bandwidth(pool: &ThreadPool) -> f64 {
    let data = vec![1_u64; 32 << 20];
    let seconds = best(7, || {
        pool.run(&|index, of| {
            let part = data.len() / of;
            let mut lanes = [0_u64; 16];
            for x in data[index * part..(index + 1) * part].as_chunks::<16>().0 {
                lanes.iter_mut().zip(x).for_each(|(lane, x)| *lane ^= x);
            }
            black_box(lanes);
        });
    });
    data.len() as f64 * 8.0 / seconds
}

/// Bytes that are valid blocks of `ty` (any bytes are, once scales are finite).
fn file_bytes(ty: TensorType, elements: usize) -> Vec<u8> {
    let mut bytes = vec![0x31; elements / ty.block_elements() * ty.block_bytes()];
    bytes.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i * 7 % 60) as u8);
    bytes
}

/// Body of the model: 30 layers, more than the caches of most machines hold.
fn products(
    pool: &ThreadPool,
    isa: Isa,
    ty: TensorType,
    counts: &[usize],
    bandwidth: f64,
) -> Result<(), Box<dyn std::error::Error>> {
    // Q6_K rows are whole blocks of 256.
    let (width, ffn) = if ty.block_elements() == 256 { (512, 1536) } else { (576, 1536) };
    let shapes = [(width + 384, width), (width, width), (2 * ffn, width), (width, ffn)];
    let packed = PackedType::for_source(ty, false);
    let mut weights = Vec::new();
    for _ in 0..30 {
        for (rows, columns) in shapes {
            let layout = MatrixLayout::new(packed, rows, columns)?;
            let mut bytes = vec![0; layout.bytes()];
            pack(&layout, ty, &file_bytes(ty, rows * columns), 0, &mut bytes)?;
            weights.push((layout, bytes));
        }
    }
    let all_bytes: usize = weights.iter().map(|(_, bytes)| bytes.len()).sum();
    print!("{:10}", format!("{ty}"));
    let mut one_row = None;
    for &rows in counts {
        let x: Vec<f32> = (0..rows * ffn).map(|i| (i % 97) as f32 / 50.0 - 1.0).collect();
        let mut narrow = Activations::new();
        let mut wide = Activations::new();
        narrow.set(pool, isa, &x[..rows * width], width, packed.activations())?;
        wide.set(pool, isa, &x, ffn, packed.activations())?;
        let mut out = vec![0.0; rows * 2 * ffn];
        let seconds = best(if rows > 8 { 5 } else { 15 }, || {
            for (layout, bytes) in &weights {
                let Ok(weights) = Matrix::new(*layout, bytes) else { return };
                let x = if layout.columns() == width { &narrow } else { &wide };
                let product = Product { weights, out: &mut out, stride: layout.rows() };
                let _ = matmul_all(pool, isa, x, &mut [product]);
            }
        });
        let macs: usize = weights.iter().map(|(layout, _)| layout.rows() * layout.columns() * rows).sum();
        if rows == 1 {
            one_row = Some(macs as f64 / seconds);
        }
        print!(" {:>8.1} ({:>5.1})", macs as f64 / seconds / 1e9, all_bytes as f64 / seconds / 1e9);
    }
    println!();
    if let Some(measured) = one_row {
        // The first matrix alone stays in the second-level caches: what is left is arithmetic.
        let (layout, bytes) = &weights[0];
        let x: Vec<f32> = (0..width).map(|i| (i % 97) as f32 / 50.0 - 1.0).collect();
        let mut activations = Activations::new();
        activations.set(pool, isa, &x, width, packed.activations())?;
        let mut out = vec![0.0; layout.rows()];
        let seconds = best(300, || {
            let Ok(weights) = Matrix::new(*layout, bytes) else { return };
            let product = Product { weights, out: &mut out, stride: layout.rows() };
            let _ = matmul_all(pool, isa, &activations, &mut [product]);
        });
        let arithmetic = (layout.rows() * layout.columns()) as f64 / seconds;
        let macs: usize = weights.iter().map(|(layout, _)| layout.rows() * layout.columns()).sum();
        let memory = bandwidth * macs as f64 / all_bytes as f64;
        println!(
            "{:10} one row: {:.0} % of its bound (memory {:.1}, arithmetic {:.1} GMAC/s)",
            "",
            100.0 * measured / memory.min(arithmetic),
            memory / 1e9,
            arithmetic / 1e9
        );
    }
    Ok(())
}

/// The vocabulary's matrix alone, 30 MB: a large third-level cache holds it, so its GB/s may exceed those of memory.
fn head(pool: &ThreadPool, isa: Isa, counts: &[usize]) -> Result<(), Box<dyn std::error::Error>> {
    let ty = TensorType::Q8_0;
    let layout = MatrixLayout::new(PackedType::for_source(ty, false), 49152, 576)?;
    let mut bytes = vec![0; layout.bytes()];
    pack(&layout, ty, &file_bytes(ty, 49152 * 576), 0, &mut bytes)?;
    print!("{:10}", "head Q8_0");
    for &rows in counts {
        let x: Vec<f32> = (0..rows * 576).map(|i| (i % 97) as f32 / 50.0 - 1.0).collect();
        let mut activations = Activations::new();
        activations.set(pool, isa, &x, 576, layout.ty().activations())?;
        let mut out = vec![0.0; rows * 49152];
        let seconds = best(7, || {
            let Ok(weights) = Matrix::new(layout, &bytes) else { return };
            let product = Product { weights, out: &mut out, stride: 49152 };
            let _ = matmul_all(pool, isa, &activations, &mut [product]);
        });
        print!(
            " {:>8.1} ({:>5.1})",
            (rows * 49152 * 576) as f64 / seconds / 1e9,
            bytes.len() as f64 / seconds / 1e9
        );
    }
    println!();
    Ok(())
}

/// Decode attention: 1 and 32 sequences, 9 heads over 3 KV heads of 64, f16.
fn decode(pool: &ThreadPool, isa: Isa) -> Result<(), Box<dyn std::error::Error>> {
    let layout = KvLayout::new(1, 3, 64, 16, KvElement::F16)?;
    for (sequences, context) in [(1, 1024), (1, 8192), (32, 512), (32, 2048)] {
        let blocks = context / 16;
        let capacity = (sequences * blocks) as u32;
        let arena = vec![0_u8; layout.arena_bytes(capacity)?];
        let tables: Vec<Vec<BlockId>> = (0..sequences)
            .map(|s| {
                (0..blocks)
                    .map(|b| BlockId(((b * 7919 + s * blocks) % (sequences * blocks)) as u32))
                    .collect()
            })
            .collect();
        let rows: Vec<KvRow<'_>> = tables
            .iter()
            .map(|table| KvRow { first_position: context as u32 - 1, tokens: 1, table })
            .collect();
        let mapping = SlotMapping::new(&layout, capacity, &rows)?;
        let q = vec![0.5; sequences * 9 * 64];
        let mut out = vec![0.0; q.len()];
        let shape = AttentionShape { heads: 9, scale: 0.125 };
        let seconds = best(15, || {
            let _ = attention(pool, isa, shape, &mapping, 0, &q, &arena, &mut out);
        });
        let bytes = sequences * context * 2 * 3 * 64 * 2;
        println!(
            "attention, {sequences} x context {context}: {:.1} GB/s of KV, {:.1} us, {:.1} GMAC/s",
            bytes as f64 / seconds / 1e9,
            seconds * 1e6,
            (sequences * context * 2 * 9 * 64) as f64 / seconds / 1e9
        );
    }
    Ok(())
}

/// Attention of one prompt.
fn prompt(pool: &ThreadPool, isa: Isa) -> Result<(), Box<dyn std::error::Error>> {
    let layout = KvLayout::new(1, 3, 64, 16, KvElement::F16)?;
    for tokens in [512_u32, 2048] {
        let table: Vec<BlockId> = (0..tokens / 16).map(BlockId).collect();
        let arena = vec![0_u8; layout.arena_bytes(tokens / 16)?];
        let mapping =
            SlotMapping::new(&layout, tokens / 16, &[KvRow { first_position: 0, tokens, table: &table }])?;
        let q = vec![0.5; tokens as usize * 9 * 64];
        let mut out = vec![0.0; q.len()];
        let shape = AttentionShape { heads: 9, scale: 0.125 };
        let seconds = best(5, || {
            let _ = attention(pool, isa, shape, &mapping, 0, &q, &arena, &mut out);
        });
        let macs = f64::from(tokens) * f64::from(tokens) * 9.0 * 64.0;
        println!(
            "attention, prompt of {tokens}: {:.1} GMAC/s, {:.2} ms",
            macs / seconds / 1e9,
            seconds * 1e3
        );
    }
    Ok(())
}

/// What runs between products, for a prompt of 512 tokens.
fn small(pool: &ThreadPool, isa: Isa) {
    let rows = 512;
    let x: Vec<f32> = (0..rows * 1536).map(|i| (i % 97) as f32 / 50.0 - 1.0).collect();
    let mut out = vec![0.0; rows * 1536];
    let weight = vec![1.0; 576];
    let norm = best(9, || {
        let _ = rms_norm(pool, &x[..rows * 576], &weight, 1e-5, &mut out[..rows * 576]);
    });
    let silu = best(9, || {
        let _ = silu_mul(pool, isa, &mut out, &x);
    });
    let mut activations = Activations::new();
    let quantise = best(9, || {
        let _ = activations.set(pool, isa, &x, 1536, pagedd_kernels::ActivationKind::Int8);
    });
    let empty = best(999, || pool.run(&|_, _| ()));
    println!(
        "512 rows: norm {:.0} us, silu {:.0} us, quantise 1536 {:.0} us; empty task {:.2} us",
        norm * 1e6,
        silu * 1e6,
        quantise * 1e6,
        empty * 1e6
    );
}
