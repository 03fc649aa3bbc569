//! How fast attention over paged KV is on this machine, also for sequences that share a prefix.
//!
//! 9 query heads over 3 KV heads of 64, half precision. Prints microseconds of a layer, GB/s of KV as the tables name it, and GMAC/s.
//! Best of several runs. A first argument picks the instruction set by name, a second one a single case
//! by its number, a third one the threads.

use std::time::Instant;

use pagedd_core::BlockId;
use pagedd_kernels::{AttentionShape, Isa, KvElement, KvLayout, KvRow, SlotMapping, ThreadPool, attention};

const HEADS: usize = 9;
const KV_HEADS: usize = 3;
const HEAD_DIM: usize = 64;
const BLOCK: usize = 16;
/// One after the other, as a step has them: caches hold what they would hold in a step.
const LAYERS: usize = 15;

/// Rows of `tokens` tokens that end at position `context`, of which `shared` lie in blocks that all rows have.
struct Case {
    rows: usize,
    context: usize,
    tokens: usize,
    shared: usize,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let wanted = std::env::args().nth(1);
    let isa = Isa::ALL.into_iter().find(|isa| wanted.as_deref() == Some(isa.as_str()));
    let isa = isa.unwrap_or(Isa::detect()).usable();
    let decode = |rows, context| Case { rows, context, tokens: 1, shared: 0 };
    let prompt = |context| Case { rows: 1, context, tokens: context, shared: 0 };
    let cases = [
        decode(1, 1024),
        decode(1, 8192),
        decode(32, 200),
        decode(32, 512),
        decode(32, 2048),
        decode(32, 1040),
        Case { rows: 32, context: 1040, tokens: 1, shared: 1000 },
        Case { rows: 32, context: 1040, tokens: 40, shared: 0 },
        Case { rows: 32, context: 1040, tokens: 40, shared: 1000 },
        Case { rows: 1, context: 1024, tokens: 64, shared: 0 },
        prompt(512),
        prompt(2048),
    ];
    let number = |n: usize| std::env::args().nth(n).map(|arg| arg.parse::<usize>()).transpose();
    let (only, threads) = (number(2)?, number(3)?);
    let threads =
        threads.map_or(vec![1, std::thread::available_parallelism()?.get()], |threads| vec![threads]);
    for threads in threads {
        let pool = ThreadPool::new(threads, None)?;
        println!("{isa}, {threads} threads");
        for (_, case) in cases.iter().enumerate().filter(|(index, _)| only.is_none_or(|only| only == *index))
        {
            measure(&pool, isa, case)?;
        }
    }
    Ok(())
}

fn measure(pool: &ThreadPool, isa: Isa, case: &Case) -> Result<(), Box<dyn std::error::Error>> {
    let layout = KvLayout::new(LAYERS, KV_HEADS, HEAD_DIM, BLOCK, KvElement::F16)?;
    let (blocks, shared) = (case.context.div_ceil(BLOCK), case.shared / BLOCK);
    let capacity = shared + case.rows * (blocks - shared);
    let mut arena = vec![0_u8; layout.arena_bytes(capacity as u32)?];
    // Halves of different sizes below 2; untouched memory would be one and the same page of zeros.
    arena.iter_mut().enumerate().for_each(|(index, byte)| *byte = (index * 7919 % 60) as u8);
    // A stride without common factors scatters the blocks as a pool in use does.
    let stride = (7919..9919).find(|stride| {
        !capacity.is_multiple_of(*stride) && !stride.is_multiple_of(2) && gcd(*stride, capacity) == 1
    });
    let place = |index: usize| BlockId((index * stride.unwrap_or(1) % capacity) as u32);
    let tables: Vec<Vec<BlockId>> = (0..case.rows)
        .map(|row| {
            let own = shared + row * (blocks - shared);
            (0..shared).chain(own..own + blocks - shared).map(place).collect()
        })
        .collect();
    let rows: Vec<KvRow<'_>> = tables
        .iter()
        .map(|table| KvRow {
            first_position: (case.context - case.tokens) as u32,
            tokens: case.tokens as u32,
            table,
        })
        .collect();
    let mapping = SlotMapping::new(&layout, capacity as u32, &rows)?;
    let q = vec![0.5; case.rows * case.tokens * HEADS * HEAD_DIM];
    let mut out = vec![0.0; q.len()];
    let shape = AttentionShape { heads: HEADS, scale: 0.125 };
    let mut seconds = f64::INFINITY;
    let begin = Instant::now();
    for run in 0.. {
        let start = Instant::now();
        for layer in 0..LAYERS {
            attention(pool, isa, shape, &mapping, layer, &q, &arena, &mut out)?;
        }
        seconds = seconds.min(start.elapsed().as_secs_f64() / LAYERS as f64);
        if run >= 2 && begin.elapsed().as_secs_f64() > 0.3 {
            break;
        }
    }
    let first = case.context - case.tokens;
    let seen: usize = (first + 1..=case.context).sum::<usize>() * case.rows;
    let bytes = case.rows * case.context * 2 * KV_HEADS * HEAD_DIM * 2;
    println!(
        "{:3} x {:4} of {:4}, {:4} shared: {:9.1} us, {:6.1} GB/s, {:5.1} GMAC/s",
        case.rows,
        case.tokens,
        case.context,
        case.shared,
        seconds * 1e6,
        bytes as f64 / seconds / 1e9,
        (seen * 2 * HEADS * HEAD_DIM) as f64 / seconds / 1e9
    );
    Ok(())
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}
