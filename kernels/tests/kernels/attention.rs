//! Attention over paged KV, and KV itself.

use half::f16;
use pagedd_core::BlockId;
use pagedd_kernels::{
    AttentionShape, Isa, KvElement, KvError, KvLayout, KvRow, ShapeError, SlotMapping, ThreadPool, attention,
    copy_block, write_kv,
};

use crate::support::{bits, bytes, floats, isas, near, pool};

/// One sequence with its own queries, keys and values.
struct Case {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    tokens: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Case {
    fn new(seed: u32, heads: usize, kv_heads: usize, head_dim: usize, tokens: usize) -> Self {
        let make = |which, heads: usize| floats(seed * 10 + which, tokens * heads * head_dim);
        Self {
            heads,
            kv_heads,
            head_dim,
            tokens,
            q: make(0, heads),
            k: make(1, kv_heads),
            v: make(2, kv_heads),
        }
    }

    fn shape(&self) -> AttentionShape {
        AttentionShape { heads: self.heads, scale: 1.0 / (self.head_dim as f32).sqrt() }
    }

    /// The twin: softmax over all positions at once, in double precision.
    fn twin(&self, element: KvElement) -> Vec<f64> {
        let stored = |x: f32| match element {
            KvElement::F16 => f64::from(f16::from_f32(x).to_f32()),
            KvElement::F32 => f64::from(x),
        };
        let (d, group) = (self.head_dim, self.heads / self.kv_heads);
        let mut out = Vec::new();
        for token in 0..self.tokens {
            for head in 0..self.heads {
                let q = &self.q[(token * self.heads + head) * d..][..d];
                let at = |position: usize| (position * self.kv_heads + head / group) * d;
                let scores: Vec<f64> = (0..=token)
                    .map(|p| {
                        let k = &self.k[at(p)..][..d];
                        q.iter().zip(k).map(|(q, k)| f64::from(*q) * stored(*k)).sum::<f64>()
                            * f64::from(self.shape().scale)
                    })
                    .collect();
                let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for i in 0..d {
                    let value: f64 =
                        weights.iter().enumerate().map(|(p, w)| w * stored(self.v[at(p) + i])).sum();
                    out.push(value / sum);
                }
            }
        }
        out
    }
}

/// An arena with several sequences whose blocks lie mixed, and garbage (NaN among it) wherever nothing was written.
struct Arena {
    layout: KvLayout,
    bytes: Vec<u8>,
    capacity: u32,
    tables: Vec<Vec<BlockId>>,
}

const LAYERS: usize = 2;

impl Arena {
    fn new(cases: &[Case], block_size: usize, element: KvElement) -> Self {
        let layout =
            KvLayout::new(LAYERS, cases[0].kv_heads, cases[0].head_dim, block_size, element).unwrap();
        let blocks: Vec<usize> = cases.iter().map(|case| case.tokens.div_ceil(block_size)).collect();
        let capacity = blocks.iter().sum::<usize>() as u32 + 3;
        let mut next = (0..capacity).rev().map(BlockId);
        let mut tables = vec![Vec::new(); cases.len()];
        for round in 0..*blocks.iter().max().unwrap() {
            for (table, &blocks) in tables.iter_mut().zip(&blocks) {
                if round < blocks {
                    table.push(next.next().unwrap());
                }
            }
        }
        Self { layout, bytes: vec![0xFF; layout.arena_bytes(capacity).unwrap()], capacity, tables }
    }

    /// Runs steps, each a list of (case, first, tokens); returns each case's outputs.
    fn run(
        &mut self,
        pool: &ThreadPool,
        isa: Isa,
        cases: &[Case],
        steps: &[Vec<(usize, usize, usize)>],
    ) -> Vec<Vec<f32>> {
        let mut outs: Vec<_> = cases.iter().map(|case| vec![f32::NAN; case.q.len()]).collect();
        for step in steps {
            let rows: Vec<_> = step
                .iter()
                .map(|&(case, first, tokens)| KvRow {
                    first_position: first as u32,
                    tokens: tokens as u32,
                    table: &self.tables[case],
                })
                .collect();
            let mapping = SlotMapping::new(&self.layout, self.capacity, &rows).unwrap();
            let gather = |x: fn(&Case) -> &[f32]| -> Vec<f32> {
                step.iter()
                    .flat_map(|&(case, first, tokens)| {
                        let width = x(&cases[case]).len() / cases[case].tokens;
                        x(&cases[case])[first * width..(first + tokens) * width].to_vec()
                    })
                    .collect()
            };
            let (q, k, v) = (gather(|c| &c.q), gather(|c| &c.k), gather(|c| &c.v));
            write_kv(&mapping, 1, &k, &v, &mut self.bytes).unwrap();
            let mut out = vec![f32::NAN; q.len()];
            attention(pool, isa, cases[0].shape(), &mapping, 1, &q, &self.bytes, &mut out).unwrap();
            let mut at = 0;
            for &(case, first, tokens) in step {
                let width = cases[case].heads * cases[case].head_dim;
                let (from, count) = (first * width, tokens * width);
                outs[case][from..from + count].copy_from_slice(&out[at..at + count]);
                at += count;
            }
        }
        outs
    }
}

#[test]
fn attention_is_that_of_the_double_precision_twin() {
    for (heads, kv_heads, head_dim) in
        [(9, 3, 64), (4, 4, 80), (6, 2, 96), (8, 1, 128), (2, 1, 256), (3, 3, 8), (5, 1, 120), (2, 2, 512)]
    {
        let case = Case::new(head_dim as u32, heads, kv_heads, head_dim, 75);
        for element in [KvElement::F16, KvElement::F32] {
            let want = case.twin(element);
            for isa in isas() {
                let cases = std::slice::from_ref(&case);
                let got = Arena::new(cases, 16, element).run(&pool(2), isa, cases, &[vec![(0, 0, 75)]]);
                // Values reach 12; single precision over 75 positions stays within 1e-5 of that.
                near(&format!("{heads}/{kv_heads}x{head_dim} {element:?} {isa}"), &got[0], &want, 12.0, 1e-5);
            }
        }
    }
}

#[test]
fn long_contexts_are_those_of_the_twin_whether_their_splits_run_together_or_apart() {
    let cases = [Case::new(77, 2, 1, 16, 1300)];
    let want = cases[0].twin(KvElement::F32);
    let steps: Vec<_> = [vec![(0, 0, 1299)], vec![(0, 1299, 1)]].into();
    for isa in isas() {
        let mut seen: Option<Vec<u32>> = None;
        for threads in 1..=4 {
            let mut arena = Arena::new(&cases, 32, KvElement::F32);
            let got = arena.run(&pool(threads), isa, &cases, &steps).remove(0);
            near(&format!("{threads} threads on {isa}"), &got, &want, 12.0, 1e-5);
            assert_eq!(*seen.get_or_insert(bits(&got)), bits(&got), "{threads} threads on {isa}");
        }
    }
}

#[test]
fn bits_do_not_depend_on_block_size_steps_neighbours_or_threads() {
    let cases: Vec<_> = [520, 33, 1, 100].iter().zip(1..).map(|(&n, i)| Case::new(i, 6, 2, 24, n)).collect();
    for isa in isas() {
        for element in [KvElement::F16, KvElement::F32] {
            let alone: Vec<_> = (0..cases.len()).map(|case| vec![(case, 0, cases[case].tokens)]).collect();
            let want = Arena::new(&cases, 16, element).run(&pool(1), isa, &cases, &alone);
            for (index, block_size) in [16, 32, 64, 128, 256, 512].into_iter().enumerate() {
                // Prompts in chunks of a size that aligns with nothing, then everything in steps of one token, all sequences together.
                for chunk in [1, 7, 16, 50, 600] {
                    let steps: Vec<Vec<_>> = (0..520_usize.div_ceil(chunk))
                        .map(|step| {
                            (0..cases.len())
                                .filter(|&case| step * chunk < cases[case].tokens)
                                .map(|case| {
                                    (case, step * chunk, chunk.min(cases[case].tokens - step * chunk))
                                })
                                .collect()
                        })
                        .collect();
                    let pool = pool(1 + (index + chunk) % 4);
                    let got = Arena::new(&cases, block_size, element).run(&pool, isa, &cases, &steps);
                    for (case, (got, want)) in got.iter().zip(&want).enumerate() {
                        assert!(
                            bits(got) == bits(want),
                            "sequence {case}, {element:?} on {isa}, blocks of {block_size}, steps of {chunk}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn a_shared_prefix_is_read_where_it_lies() {
    let mut cases = vec![Case::new(5, 4, 2, 16, 40), Case::new(6, 4, 2, 16, 40)];
    let prefix = 32 * 2 * 16;
    let (k, v) = (cases[0].k[..prefix].to_vec(), cases[0].v[..prefix].to_vec());
    cases[1].k[..prefix].copy_from_slice(&k);
    cases[1].v[..prefix].copy_from_slice(&v);
    let isa = Isa::detect();
    let all: Vec<_> = [vec![(0, 0, 40), (1, 0, 40)]].into();
    let want = Arena::new(&cases, 16, KvElement::F16).run(&pool(1), isa, &cases, &all);
    let mut arena = Arena::new(&cases, 16, KvElement::F16);
    let shared = arena.tables[0][..2].to_vec();
    arena.tables[1][..2].copy_from_slice(&shared);
    let got = arena.run(&pool(2), isa, &cases, &[vec![(0, 0, 40)], vec![(1, 32, 8)]]);
    assert_eq!(bits(&got[1][32 * 64..]), bits(&want[1][32 * 64..]));
}

/// Rows of a batch whose tables share leading blocks, also in parts, over an arena full of numbers.
struct Sharing {
    layout: KvLayout,
    arena: Vec<u8>,
    /// (first position, tokens, blocks)
    rows: Vec<(u32, u32, Vec<BlockId>)>,
}

impl Sharing {
    fn new(seed: u32, head_dim: usize, block_size: usize, element: KvElement) -> Self {
        let layout = KvLayout::new(1, 2, head_dim, block_size, element).unwrap();
        let random = bytes(seed, 64);
        let mut random = random.iter().map(|&byte| byte as usize).cycle();
        let mut below = move |bound: usize| random.next().unwrap() * bound / 256;
        let mut next = (0..).map(BlockId);
        let mut rows = Vec::<(u32, u32, Vec<BlockId>)>::new();
        for _ in 0..2 + below(7) {
            let mut table = match rows.len() {
                0 => Vec::new(),
                rows_before => {
                    let (_, _, parent) = &rows[below(rows_before)];
                    parent[..parent.len() - below(parent.len() / 2 + 1)].to_vec()
                }
            };
            let end = table.len() * block_size + 1 + below(700);
            while table.len() * block_size < end {
                table.push(next.next().unwrap());
            }
            let tokens = 1 + if below(2) == 0 { 0 } else { below(end.min(40)) };
            rows.push(((end - tokens) as u32, tokens as u32, table));
        }
        let elements = layout.arena_bytes(next.next().unwrap().0).unwrap() / element.bytes();
        let numbers = floats(seed, 997);
        let number = |index: usize| numbers[index % 997];
        let arena = match element {
            KvElement::F16 => {
                (0..elements).flat_map(|index| f16::from_f32(number(index)).to_le_bytes()).collect()
            }
            KvElement::F32 => (0..elements).flat_map(|index| number(index).to_le_bytes()).collect(),
        };
        Self { layout, arena, rows }
    }

    /// The same with every row's blocks its own.
    fn apart(&self) -> Self {
        let Self { layout, arena, rows } = self;
        let (mut copies, mut blocks) = (Vec::new(), 0..);
        let stride = layout.block_stride();
        let rows = rows.iter().map(|(first, tokens, table)| {
            let table = table.iter().map(|block| {
                copies.extend_from_slice(&arena[block.0 as usize * stride..][..stride]);
                BlockId(blocks.next().unwrap())
            });
            (*first, *tokens, table.collect())
        });
        let rows = rows.collect();
        Self { layout: *layout, arena: copies, rows }
    }

    fn run(&self, pool: &ThreadPool, isa: Isa) -> Vec<f32> {
        let rows: Vec<_> = self
            .rows
            .iter()
            .map(|(first, tokens, table)| KvRow { first_position: *first, tokens: *tokens, table })
            .collect();
        let capacity = (self.arena.len() / self.layout.block_stride()) as u32;
        let mapping = SlotMapping::new(&self.layout, capacity, &rows).unwrap();
        let shape = AttentionShape { heads: 6, scale: 0.3 };
        let q = floats(7, mapping.tokens() * shape.heads * self.layout.head_dim());
        let mut out = vec![f32::NAN; q.len()];
        attention(pool, isa, shape, &mapping, 0, &q, &self.arena, &mut out).unwrap();
        out
    }
}

#[test]
fn bits_do_not_depend_on_which_rows_share_blocks() {
    for seed in 0..24 {
        let (head_dim, block_size) = ([16, 24, 64][seed as usize % 3], [16, 32, 64, 16][seed as usize % 4]);
        let element = if seed % 5 == 0 { KvElement::F32 } else { KvElement::F16 };
        let sharing = Sharing::new(seed, head_dim, block_size, element);
        let apart = sharing.apart();
        for isa in isas() {
            let want = apart.run(&pool(1), isa);
            assert!(want.iter().all(|x| x.is_finite()), "seed {seed} on {isa}");
            for threads in 1..=3 {
                let got = sharing.run(&pool(threads), isa);
                assert!(bits(&got) == bits(&want), "seed {seed} on {isa}, {threads} threads");
            }
        }
    }
}

#[test]
fn a_nan_stays_in_the_sequences_that_see_it() {
    let mut cases = vec![Case::new(5, 2, 1, 16, 40), Case::new(6, 2, 1, 16, 40)];
    cases[0].k[20 * 16] = f32::NAN;
    for isa in isas() {
        let got = Arena::new(&cases, 16, KvElement::F16).run(
            &pool(2),
            isa,
            &cases,
            &[vec![(0, 0, 40), (1, 0, 40)]],
        );
        assert!(got[0][..20 * 32].iter().all(|x| x.is_finite()), "positions before it, {isa}");
        assert!(got[0][20 * 32..].iter().all(|x| x.is_nan()), "positions from it on, {isa}");
        assert!(got[1].iter().all(|x| x.is_finite()), "another sequence, {isa}");
    }
}

#[test]
fn kv_is_written_to_its_slots_only_and_a_copy_takes_the_filled_part() {
    for element in [KvElement::F16, KvElement::F32] {
        let layout = KvLayout::new(2, 2, 8, 16, element).unwrap();
        let size = layout.arena_bytes(3).unwrap();
        let before = bytes(9, size);
        let mut arena = before.clone();
        let table = [BlockId(2), BlockId(0)];
        let rows = [KvRow { first_position: 15, tokens: 2, table: &table }];
        let mapping = SlotMapping::new(&layout, 3, &rows).unwrap();
        let (k, v) = (vec![1.0; 32], vec![-2.0; 32]);
        write_kv(&mapping, 1, &k, &v, &mut arena).unwrap();
        let changed: Vec<usize> = (0..size).filter(|&i| arena[i] != before[i]).collect();
        // Keys and values x heads x head_dim elements at position 15 of block 2 and position 0 of block 0, layer 1.
        let head = 8 * element.bytes();
        let mut slots = Vec::new();
        for (block, token) in [(0, 0), (2, 15)] {
            for part in 0..4 {
                let at = block * layout.block_stride() + layout.layer_stride() + (part * 16 + token) * head;
                slots.extend(at..at + head);
            }
        }
        assert!(changed.iter().all(|at| slots.contains(at)), "{element:?}");
        let again = arena.clone();
        write_kv(&mapping, 1, &k, &v, &mut arena).unwrap();
        assert_eq!(arena, again, "writing twice changes nothing");

        copy_block(&layout, BlockId(2), BlockId(1), 5, &mut arena).unwrap();
        for layer in 0..2 {
            for part in 0..4 {
                let at = |block: usize| {
                    block * layout.block_stride() + layer * layout.layer_stride() + part * 16 * head
                };
                assert_eq!(arena[at(1)..at(1) + 5 * head], again[at(2)..at(2) + 5 * head]);
                assert_eq!(
                    arena[at(1) + 5 * head..at(1) + 16 * head],
                    again[at(1) + 5 * head..at(1) + 16 * head]
                );
            }
        }
        assert!(matches!(
            copy_block(&layout, BlockId(3), BlockId(1), 5, &mut arena),
            Err(KvError::Block { .. })
        ));
        assert!(matches!(
            copy_block(&layout, BlockId(0), BlockId(3), 5, &mut arena),
            Err(KvError::Block { .. })
        ));
        assert!(matches!(
            copy_block(&layout, BlockId(0), BlockId(1), 17, &mut arena),
            Err(KvError::Table { .. })
        ));
    }
}

#[test]
fn tables_and_shapes_that_do_not_fit_are_refused() {
    for (layers, kv_heads, head_dim, block_size) in [
        (0, 1, 8, 16),
        (1, 0, 8, 16),
        (1, 1, 0, 16),
        (1, 1, 12, 16),
        (1, 1, 520, 16),
        (1, 1, 8, 8),
        (1, 1, 8, 24),
    ] {
        let layout = KvLayout::new(layers, kv_heads, head_dim, block_size, KvElement::F16);
        assert!(matches!(layout, Err(ShapeError::Dimension { .. })), "{layout:?}");
    }
    let overflow = KvLayout::new(usize::MAX / 64, 8, 8, 16, KvElement::F16);
    assert!(matches!(overflow, Err(ShapeError::Overflow { .. })), "{overflow:?}");

    let layout = KvLayout::new(1, 1, 8, 16, KvElement::F16).unwrap();
    let table = [BlockId(0), BlockId(1)];
    let row = |first_position, tokens| KvRow { first_position, tokens, table: &table };
    assert!(matches!(SlotMapping::new(&layout, 2, &[row(0, 0)]), Err(KvError::Empty { row: 0 })));
    assert!(matches!(
        SlotMapping::new(&layout, 2, &[row(0, 1), row(30, 3)]),
        Err(KvError::Table { row: 1, end: 33, covered: 32 })
    ));
    assert!(SlotMapping::new(&layout, 2, &[row(u32::MAX, u32::MAX)]).is_err());
    assert!(matches!(
        SlotMapping::new(&layout, 1, &[row(0, 1)]),
        Err(KvError::Block { row: 0, block: BlockId(1), capacity: 1 })
    ));

    let mapping = SlotMapping::new(&layout, 2, &[row(0, 2)]).unwrap();
    let mut arena = vec![3; layout.arena_bytes(2).unwrap()];
    let kv = vec![0.0; 16];
    assert!(matches!(write_kv(&mapping, 1, &kv, &kv, &mut arena), Err(KvError::Layer { .. })));
    assert!(matches!(write_kv(&mapping, 0, &kv[1..], &kv, &mut arena), Err(KvError::Shape(_))));
    assert!(matches!(write_kv(&mapping, 0, &kv, &kv[1..], &mut arena), Err(KvError::Shape(_))));
    let short = arena.len() - 1;
    assert!(matches!(write_kv(&mapping, 0, &kv, &kv, &mut arena[..short]), Err(KvError::Shape(_))));
    assert!(arena.iter().all(|&byte| byte == 3));
    let shape = |heads| AttentionShape { heads, scale: 1.0 };
    let (pool, isa, mut out) = (pool(1), Isa::detect(), vec![7.0; 32]);
    let q = vec![0.0; 32];
    assert!(attention(&pool, isa, shape(0), &mapping, 0, &q, &arena, &mut out).is_err());
    assert!(attention(&pool, isa, shape(2), &mapping, 0, &q[1..], &arena, &mut out).is_err());
    assert!(attention(&pool, isa, shape(2), &mapping, 0, &q, &arena, &mut out[1..]).is_err());
    assert!(attention(&pool, isa, shape(2), &mapping, 0, &q, &arena[1..], &mut out).is_err());
    assert!(attention(&pool, isa, shape(2), &mapping, 1, &q, &arena, &mut out).is_err());
    assert!(out.iter().all(|&x| x == 7.0));
    attention(&pool, isa, shape(2), &mapping, 0, &q, &arena, &mut out).unwrap();
}

#[test]
fn an_empty_batch_is_no_work() {
    let layout = KvLayout::new(1, 1, 8, 16, KvElement::F16).unwrap();
    let mapping = SlotMapping::new(&layout, 1, &[]).unwrap();
    let mut arena = vec![3; layout.arena_bytes(1).unwrap()];
    write_kv(&mapping, 0, &[], &[], &mut arena).unwrap();
    let shape = AttentionShape { heads: 1, scale: 1.0 };
    attention(&pool(2), Isa::detect(), shape, &mapping, 0, &[], &arena, &mut []).unwrap();
}
