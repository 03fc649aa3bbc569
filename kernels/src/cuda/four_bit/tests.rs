//! What needs no device.

use super::plan::{Few, FewPlan, Wide, WidePlan};
use super::*;

const LLAMA: [(usize, usize); 5] =
    [(4096, 12_288), (4096, 4096), (4096, 22_016), (11_008, 4096), (4096, 32_000)];

#[test]
fn few_rows_have_a_plan_where_they_fit_into_shared_memory_and_a_multiprocessor_for_each_block() {
    // Of compute capability 9.0: a multiprocessor's, and what a block takes beside what it asks for.
    let (all, beside) = (228 << 10, 1280);
    let odd = [(64, 16), (576, 49_152), (14_336, 4096), (28_672, 8192), (4096, 128_256)];
    for (inputs, outputs) in LLAMA.into_iter().chain(odd) {
        for rows in 1..=16 {
            let Some(plan) = FewPlan::of(GemmShape { inputs, outputs }, rows, false, 132) else {
                // Too much of the input, or sums of too many tiles beside much of it.
                let (much, sums) = (rows * inputs, outputs > 100_000);
                assert!(much > if sums { 40_000 } else { 65_536 }, "{inputs} {outputs} {rows}");
                continue;
            };
            assert!(plan.shared as usize <= plan::SHARED, "{inputs} {outputs} {rows}: {plan:?}");
            assert!(2 * (plan.shared + beside) > all, "{inputs} {outputs} {rows}: {plan:?}");
            assert!(plan.blocks as usize <= outputs / 16);
        }
    }
    let of = |inputs, rows, normed| {
        FewPlan::of(GemmShape { inputs, outputs: 4096 }, rows, normed, 132).map(|plan| plan.form)
    };
    assert_eq!(of(4096, 2, true), Some(Few::Normed));
    assert_eq!(of(8192, 2, true), Some(Few::Normed));
    assert_eq!(of(4096, 3, true), None);
    assert_eq!(of(16_384, 1, true), None);
    assert_eq!(of(4096, 8, false), Some(Few::Plain));
    assert_eq!(of(11_008, 7, false), Some(Few::Plain));
    assert_eq!(of(11_008, 8, false), Some(Few::Long));
    assert_eq!(of(14_336, 8, false), None);
    assert_eq!(of(4096, 9, false), Some(Few::Of16));
    assert_eq!(of(4096, 16, false), Some(Few::Of16));
    assert_eq!(of(11_008, 9, false), None);
    assert_eq!(of(4096, 17, false), None);
}

/// Hidden size, queries, queries with keys and values, feed-forward size, vocabulary.
const MODELS: [[usize; 5]; 3] = [
    [4096, 4096, 12_288, 11_008, 32_000],
    [4096, 4096, 6144, 14_336, 128_256],
    [576, 576, 960, 1536, 49_152],
];

#[test]
fn one_and_two_rows_are_few_for_every_matrix_of_a_model_and_normed_where_it_comes_behind_a_norm() {
    for [hidden, query, qkv, ffn, vocabulary] in MODELS {
        for (inputs, outputs, normed) in [
            (hidden, qkv, true),
            (query, hidden, false),
            (hidden, 2 * ffn, true),
            (ffn, hidden, false),
            (hidden, vocabulary, true),
            (hidden, vocabulary, false),
        ] {
            for rows in [1, 2] {
                let plan = FewPlan::of(GemmShape { inputs, outputs }, rows, normed, 132);
                assert!(plan.is_some(), "{inputs} {outputs} {rows} normed {normed}");
            }
        }
    }
}

#[test]
fn the_blocks_of_a_cluster_all_have_units_and_all_rows_and_outputs_have_a_block() {
    for (inputs, outputs) in LLAMA.into_iter().chain([(64, 16), (128, 144), (576, 1536)]) {
        for rows in [1, 16, 17, 32, 33, 64, 65, 128, 129, 256, 300] {
            let plan = WidePlan::of(GemmShape { inputs, outputs }, rows, 132);
            assert!(plan.split as usize <= inputs / 64, "{inputs} {outputs} {rows}: {plan:?}");
            assert!(plan.row_blocks as usize * plan.form.rows() >= rows);
            let alone = WidePlan::exact(GemmShape { inputs, outputs }, 1, 132);
            let exact = WidePlan::exact(GemmShape { inputs, outputs }, rows, 132);
            assert_eq!(exact.split, alone.split, "whatever the rows");
            assert_eq!((exact.form, exact.row_blocks), (plan.form, plan.row_blocks));
            let blocks = (plan.blocks() / plan.split / plan.row_blocks) as usize;
            assert!(blocks * plan.form.outputs() >= outputs);
        }
    }
    assert!(Wide::ALL.into_iter().all(|form| form.shared() <= plan::SHARED));
    // As measured: the split that was the fastest, or within a tenth of it.
    let split = |inputs, outputs, rows| WidePlan::of(GemmShape { inputs, outputs }, rows, 132).split;
    assert_eq!(LLAMA.map(|(inputs, outputs)| split(inputs, outputs, 16)), [2, 8, 2, 8, 1]);
    assert_eq!(LLAMA.map(|(inputs, outputs)| split(inputs, outputs, 64)), [2, 4, 1, 4, 2]);
    assert_eq!(LLAMA.map(|(inputs, outputs)| split(inputs, outputs, 256)), [1, 2, 1, 4, 1]);
}
