//! Attention over paged KV: decode in bytes of KV a second, prefill in operations a second.

use half::bf16;
use pagedd_core::BlockId;
use pagedd_kernels::cuda::{
    Attention, Buffer, CudaError, DecodeCut, DecodeLimits, DecodePlan, DeviceBatch, DeviceKvLayout, Graph,
    PinnedRing, PrefillPlan, Stream, decode, fill_normal, prefill,
};
use pagedd_kernels::{AttentionShape, DeviceKvElement, KvRow};

use super::time;

/// Name, KV heads, query heads of each, size of heads.
type Heads = (&'static str, usize, usize, usize);
const LLAMA: Heads = ("llama-3-8b", 8, 4, 128);
const SMOL: Heads = ("smollm2-135m", 3, 3, 64);

/// Bytes of KV that layers rotate through, far more than the second-level cache.
const WORKING_SET: usize = 1 << 30;
const BLOCK: usize = 16;

/// Positions that the last query of a row sees, and its queries.
type Sequence = (usize, usize);

/// So many rows, one after the other, begin with so many blocks of the first of them.
type Alike = (usize, usize);
const APART: Alike = (1, 0);

pub fn attention(stream: &Stream) -> Result<(), CudaError> {
    elements(stream, DeviceKvElement::Half)?;
    elements(stream, DeviceKvElement::E4m3)
}

fn elements(stream: &Stream, element: DeviceKvElement) -> Result<(), CudaError> {
    let stored = match element {
        DeviceKvElement::Half => "bf16, blocks of 16",
        DeviceKvElement::E4m3 => "KV in e4m3, blocks of 16",
    };
    println!("{:<13} {stored:<36} {:>9} {:>8} {:>8}", "model", "µs", "GB/s", "TFLOP/s");
    let mixed: Vec<Sequence> = (0..64).map(|i| (128_usize << (i % 8), 1)).collect();
    let mut uneven = vec![(512, 1); 63];
    uneven.push((65_536, 1));
    let decodes: [(Heads, &str, Vec<Sequence>); 12] = [
        (LLAMA, "decode 1 x 1024", vec![(1024, 1); 1]),
        (LLAMA, "decode 8 x 1024", vec![(1024, 1); 8]),
        (LLAMA, "decode 64 x 1024", vec![(1024, 1); 64]),
        (LLAMA, "decode 256 x 1024", vec![(1024, 1); 256]),
        (LLAMA, "decode 1 x 32500", vec![(32_500, 1); 1]),
        (LLAMA, "decode 8 x 32500", vec![(32_500, 1); 8]),
        (LLAMA, "decode 64 x 8192", vec![(8192, 1); 64]),
        (LLAMA, "decode 64 x 128 to 16384", mixed),
        (LLAMA, "decode 1 x 131072", vec![(131_072, 1)]),
        (LLAMA, "decode 63 x 512 and 1 x 65536", uneven),
        (LLAMA, "decode 64 x 1528, as many bytes", vec![(1528, 1); 64]),
        (SMOL, "decode 64 x 1024", vec![(1024, 1); 64]),
    ];
    for (heads, name, sequences) in decodes {
        case(stream, (heads, element), name, &sequences, APART, true)?;
    }
    let shared: [(&str, Vec<Sequence>, Alike); 3] = [
        ("decode 512 x (2048 shared + 96)", vec![(2144, 1); 512], (512, 128)),
        ("decode 64 x 4 x (512 shared + 128)", vec![(640, 1); 256], (4, 32)),
        ("decode 8 x 32 x (512 shared + 128)", vec![(640, 1); 256], (32, 32)),
    ];
    for (name, sequences, alike) in shared {
        case(stream, (LLAMA, element), name, &sequences, alike, true)?;
    }
    let prefills: [(Heads, &str, Vec<Sequence>); 6] = [
        (LLAMA, "prefill 1 x 8192", vec![(8192, 8192)]),
        (LLAMA, "prefill 1 x 2048", vec![(2048, 2048)]),
        (LLAMA, "prefill 16 x 512", vec![(512, 512); 16]),
        (LLAMA, "prefill 512 after 7680", vec![(8192, 512)]),
        (LLAMA, "prefill 64 after 4032", vec![(4096, 64)]),
        (SMOL, "prefill 1 x 8192", vec![(8192, 8192)]),
    ];
    for (heads, name, sequences) in prefills {
        case(stream, (heads, element), name, &sequences, APART, false)?;
    }
    Ok(())
}

fn case(
    stream: &Stream,
    ((model, kv_heads, group, head_dim), element): (Heads, DeviceKvElement),
    name: &str,
    sequences: &[Sequence],
    (alike, shared): Alike,
    decoding: bool,
) -> Result<(), CudaError> {
    let (heads, tokens) = (kv_heads * group, sequences.iter().map(|&(_, count)| count).sum());
    let contexts: usize = sequences.iter().map(|&(context, _)| context).sum();
    // Those of blocks that are read again are not counted.
    let again = (sequences.len() - sequences.len().div_ceil(alike)) * shared * BLOCK;
    let bytes = (contexts - again) * 2 * kv_heads * element.row_bytes(head_dim);
    let layers = WORKING_SET.div_ceil(bytes).clamp(2, 64);
    let blocks: Vec<usize> = sequences.iter().map(|&(context, _)| context.div_ceil(BLOCK)).collect();
    let entries = blocks.iter().sum::<usize>();
    let capacity = entries - again / BLOCK;
    let layout = DeviceKvLayout::blocks_outermost(layers, kv_heads, head_dim, BLOCK, element)?;
    let arena = random_bytes(stream, layout.arena_bytes(capacity as u32)?)?;
    // Blocks lie as they do after a while: all over the arena.
    let stride = [7919, 7907, 7901].into_iter().find(|&prime| !capacity.is_multiple_of(prime)).unwrap_or(1);
    let mut next = (0..capacity).map(|i| BlockId((i * stride % capacity) as u32));
    let mut tables: Vec<Vec<BlockId>> = Vec::new();
    for (index, &count) in blocks.iter().enumerate() {
        let mut table =
            tables.get(index / alike * alike).map_or(Vec::new(), |first| first[..shared].to_vec());
        table.extend(next.by_ref().take(count - table.len()));
        tables.push(table);
    }
    let rows: Vec<KvRow<'_>> = sequences
        .iter()
        .zip(&tables)
        .map(|(&(context, count), table)| KvRow {
            first_position: (context - count) as u32,
            tokens: count as u32,
            table,
        })
        .collect();
    let mut ring = PinnedRing::new(stream.device(), 8, 1 << 20)?;
    let mut batch =
        DeviceBatch::with_capacity(stream, layout, capacity as u32, (tokens, rows.len(), entries))?;
    batch.set(stream, &mut ring, &rows, tokens)?;
    let mut q = Buffer::<bf16>::zeroed(stream, tokens * heads * head_dim)?;
    fill_normal(stream, 4, 1.0, &mut q.all_mut())?;
    let out = Buffer::<bf16>::zeroed(stream, q.len())?;
    let shape = AttentionShape { heads, scale: (head_dim as f32).sqrt().recip() };
    let mut operands = Operands { q, shape, batch, arena, out };
    let took = if decoding {
        let limits =
            DecodeLimits { rows: rows.len(), queries: 1, cut: DecodeCut::Even { slots: 4 * rows.len() } };
        let mut plan = DecodePlan::new(stream, &layout, heads, limits)?;
        plan.share(stream, &mut ring, &operands.batch, 0..rows.len())?;
        plan.set(stream, &operands.batch, 0..rows.len())?;
        let all =
            |stream: &Stream| (0..layers).try_for_each(|layer| decode(stream, &mut plan, operands.of(layer)));
        time(stream, &Graph::capture(stream, all)?, 15)?
    } else {
        let mut plan = PrefillPlan::new(stream, &layout, heads, (tokens, rows.len()))?;
        plan.set(stream, &mut ring, &operands.batch, 0..rows.len())?;
        let all =
            |stream: &Stream| (0..layers).try_for_each(|layer| prefill(stream, &plan, operands.of(layer)));
        time(stream, &Graph::capture(stream, all)?, 15)?
    } / layers as f64;
    let pairs: usize = sequences.iter().map(|&(context, count)| count * (2 * context - count + 1) / 2).sum();
    println!(
        "{model:<13} {name:<36} {took:>9.1} {:>8.0} {:>8.1}",
        bytes as f64 / took / 1e3,
        (4 * pairs * heads * head_dim) as f64 / took / 1e6
    );
    Ok(())
}

/// What all layers share.
struct Operands {
    q: Buffer<bf16>,
    shape: AttentionShape,
    batch: DeviceBatch,
    arena: Buffer<u8>,
    out: Buffer<bf16>,
}

impl Operands {
    fn of(&mut self, layer: usize) -> Attention<'_, bf16> {
        let Self { q, shape, batch, arena, out } = self;
        Attention { q: q.all(), shape: *shape, batch, layer, arena: arena.all(), out: out.all_mut() }
    }
}

/// The bytes of random numbers, the same again and again.
fn random_bytes(stream: &Stream, count: usize) -> Result<Buffer<u8>, CudaError> {
    let mut numbers = Buffer::<bf16>::zeroed(stream, 8 << 20)?;
    fill_normal(stream, 3, 1.0, &mut numbers.all_mut())?;
    let numbers = numbers.all().to_vec(stream)?;
    let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
    let mut arena = Buffer::<u8>::zeroed(stream, count)?;
    for first in (0..count).step_by(bytes.len()) {
        let part = bytes.len().min(count - first);
        arena.part_mut(first..first + part)?.copy_from(stream, &bytes[..part])?;
    }
    Ok(arena)
}
