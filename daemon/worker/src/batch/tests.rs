use std::collections::HashSet;

use pagedd_core::SamplingParams;
use pagedd_wire::worker::{Begin, TableUpdate};
use proptest::prelude::*;

use super::*;

const LIMITS: Limits = Limits {
    max_num_seqs: 3,
    max_num_batched_tokens: 40,
    max_model_len: 100,
    block_size: 16,
    capacity: 8,
    vocab_size: 50,
};

fn begin(seq: u64) -> Begin {
    Begin { seq, choice: 0, sampling: SamplingParams::GREEDY.into(), prompt: 0, tokens: vec![] }
}

fn row(seq: u64, start: u32, inputs: usize, from: u32, blocks: &[u32]) -> Row {
    let table = TableUpdate { from, blocks: blocks.to_vec() };
    Row { seq, start, inputs: vec![Input::Known(1); inputs].into(), table, samples: Few::new(), drafts: 0 }
}

/// Sequence 1 with blocks 4 and 5.
fn known() -> Sequences {
    let mut all = Sequences::default();
    all.begin(&begin(1));
    all.update_table(1, 0, &[4, 5]);
    all
}

fn error(plan: &Plan) -> String {
    check(plan, &known(), &LIMITS).unwrap_err().to_string()
}

fn rows(rows: Vec<Row>) -> Plan {
    Plan { id: 2, begin: vec![begin(2), begin(3)], rows, ..Plan::default() }
}

/// A row of sequence 1 that guesses.
fn guess(inputs: usize, drafts: u32, samples: &[u64]) -> Row {
    Row { drafts, samples: samples.iter().copied().collect(), ..row(1, 20, inputs, 2, &[]) }
}

#[test]
fn a_token_is_drawn_before_the_guesses_and_behind_each() {
    let batch = check(&rows(vec![guess(3, 2, &[1])]), &known(), &LIMITS).unwrap();
    assert_eq!(batch.positions, [20, 21, 22]);
    assert_eq!((batch.rows[0].certain(), batch.rows[0].drafts), (21, 2));
}

#[test]
fn a_mixed_plan_becomes_flat_tokens_and_positions() {
    let mut sampled = row(2, 0, 18, 0, &[6, 7]);
    sampled.samples = vec![2, 3].into();
    let plan = rows(vec![row(1, 31, 1, 2, &[]), sampled]);
    let batch = check(&plan, &known(), &LIMITS).unwrap();
    assert_eq!(batch.tokens, [1; 19]);
    assert_eq!(batch.positions, [vec![31], (0..18).collect()].concat());
    assert_eq!(batch.rows[1].tokens, 1..19);
    assert_eq!(batch.rows[1].certain(), 18);
    assert_eq!(*batch.rows[1].samples, [2, 3]);
}

#[test]
fn every_way_to_be_wrong_is_named() {
    let mut soft = guess(3, 2, &[1]);
    soft.inputs[2] = Input::Sampled { plan: 1, seq: 1 };
    let cases = [
        (rows(vec![row(1, 0, 1, 2, &[]); 4]), "4 rows, at most 3 were agreed"),
        (rows(vec![row(2, 0, 41, 0, &[0, 1, 2])]), "41 input tokens, at most 40 were agreed"),
        (rows(vec![row(9, 0, 1, 0, &[0])]), "sequence 9 was never begun"),
        (rows(vec![guess(1, 1, &[1])]), "row of sequence 1: 1 of its 1 inputs cannot be guesses"),
        (rows(vec![guess(3, 4, &[1])]), "row of sequence 1: 4 of its 3 inputs cannot be guesses"),
        (rows(vec![guess(3, 2, &[1, 2])]), "row of sequence 1: 2 of its 3 inputs cannot be guesses"),
        (rows(vec![guess(3, 2, &[2])]), "row of sequence 1: 2 of its 3 inputs cannot be guesses"),
        (rows(vec![soft]), "row of sequence 1: 2 of its 3 inputs cannot be guesses"),
        (rows(vec![guess(3, 65, &[1])]), "65 guesses, at most 64 were agreed"),
        (rows(vec![row(1, 0, 1, 2, &[]), row(1, 1, 1, 2, &[])]), "sequence 1 has more than one row"),
        (rows(vec![row(2, 0, 1, 0, &[8])]), "block 8 of 8"),
        (rows(vec![row(2, 0, 1, 1, &[3])]), "table of sequence 2 has 0 blocks, the update begins at 1"),
        (rows(vec![row(1, 0, 0, 2, &[])]), "row of sequence 1 without inputs"),
        (rows(vec![row(1, 32, 1, 2, &[])]), "positions up to 33 of sequence 1, its 2 blocks end at 32"),
        (
            rows(vec![row(1, 96, 5, 2, &[0, 1, 2, 3, 6])]),
            "positions up to 101 of sequence 1, the longest sequence has 100",
        ),
        (
            rows(vec![row(1, u32::MAX, 1, 2, &[])]),
            "positions up to 4294967296 of sequence 1, the longest sequence has 100",
        ),
        (rows(vec![row(1, 16, 8, 2, &[]), row(2, 0, 5, 0, &[5])]), "block 5 is written twice at offset 0"),
        (rows(vec![row(2, 0, 32, 0, &[3, 3])]), "block 3 is written twice at offset 0"),
    ];
    for (plan, text) in cases {
        assert_eq!(error(&plan), text);
    }

    let copy = |from, to, tokens| Plan { copies: vec![BlockCopy { from, to, tokens }], ..Plan::default() };
    assert_eq!(error(&copy(8, 1, 1)), "block 8 of 8");
    assert_eq!(error(&copy(1, 1, 1)), "copy of 1 positions from block 1 to block 1");
    assert_eq!(error(&copy(1, 2, 17)), "copy of 17 positions from block 1 to block 2");

    let mut r = row(2, 0, 1, 0, &[0]);
    r.inputs = vec![Input::Known(50)].into();
    assert_eq!(error(&rows(vec![r.clone()])), "token 50 of sequence 2, the vocabulary has 50");
    r.inputs = vec![Input::Sampled { plan: 1, seq: 2 }].into();
    assert_eq!(error(&rows(vec![r.clone()])), "input of sequence 2: plan 1 drew nothing for sequence 2");
    r.inputs = vec![Input::Known(0)].into();
    r.samples = vec![2, 7].into();
    assert_eq!(error(&rows(vec![r.clone()])), "sequence 7 was never begun");
    r.samples = vec![2, 2].into();
    assert_eq!(error(&rows(vec![r])), "sequence 2 has more than one sample");

    let mut bad = begin(2);
    bad.sampling.top_p = f32::NAN;
    let plan = Plan { begin: vec![bad], ..Plan::default() };
    assert_eq!(error(&plan), "sampling parameters of sequence 2 out of range");
    let plan = Plan { begin: vec![begin(2), begin(2)], ..Plan::default() };
    assert_eq!(error(&plan), "sequence 2 has more than one begin");
}

#[test]
fn two_rows_may_share_blocks_that_neither_writes_and_halves_of_one_that_both_write() {
    let plan = rows(vec![row(1, 8, 8, 2, &[]), row(2, 0, 8, 0, &[4])]);
    check(&plan, &known(), &LIMITS).unwrap();
    let plan = rows(vec![row(2, 16, 1, 0, &[4, 6]), row(3, 16, 1, 0, &[4, 7])]);
    check(&plan, &known(), &LIMITS).unwrap();
}

#[test]
fn an_input_drawn_by_an_earlier_plan_is_resolved_and_one_that_failed_fails_its_row_only() {
    let mut all = known();
    all.record(1, 1, Draw::Token(33));
    all.record(1, 7, Draw::Failed);
    let mut good = row(1, 3, 1, 2, &[]);
    good.inputs = vec![Input::Sampled { plan: 1, seq: 1 }].into();
    let mut bad = row(2, 0, 1, 0, &[0]);
    bad.inputs = vec![Input::Known(2), Input::Sampled { plan: 1, seq: 7 }].into();
    let batch = check(&rows(vec![bad.clone(), good]), &all, &LIMITS).unwrap();
    assert_eq!(batch.tokens, [33]);
    assert_eq!(batch.rows.len(), 1);
    assert_eq!(batch.rows[0].tokens, 0..1);
    assert_eq!(batch.failed, [bad]);
}

#[test]
fn begun_again_means_an_empty_table() {
    let plan = Plan { id: 2, begin: vec![begin(1)], rows: vec![row(1, 0, 1, 2, &[])], ..Plan::default() };
    assert_eq!(error(&plan), "table of sequence 1 has 0 blocks, the update begins at 2");
}

#[test]
fn a_resync_is_checked_too() {
    let state = |seq, blocks: &[u32]| SequenceState {
        seq,
        choice: 0,
        sampling: SamplingParams::GREEDY.into(),
        tokens: vec![1],
        prompt: 1,
        blocks: blocks.to_vec(),
    };
    check_states(&[state(1, &[0, 7])], &LIMITS).unwrap();
    assert!(check_states(&[state(1, &[8])], &LIMITS).is_err());
    assert!(check_states(&[state(1, &[]), state(1, &[])], &LIMITS).is_err());
}

proptest! {
    #[test]
    fn what_passes_the_check_writes_each_slot_once_and_inside_the_arena(
        starts in prop::collection::vec((0_u32..120, 0_usize..20, 0_u32..5, prop::collection::vec(0_u32..10, 0..8)), 0..5),
    ) {
        let all = known();
        let plan = rows(
            starts.iter().zip([1, 2, 3, 1, 2]).map(|((start, inputs, from, blocks), seq)| row(seq, *start, *inputs, *from, blocks)).collect(),
        );
        if let Ok(batch) = check(&plan, &all, &LIMITS) {
            let mut all = all;
            apply(&plan, &batch, &mut all);
            let mut slots = HashSet::new();
            for row in &batch.rows {
                for position in (row.start..).take(row.tokens.len()) {
                    let block = table(&all, row)[(position / 16) as usize].0;
                    prop_assert!(block < 8);
                    prop_assert!(slots.insert((block, position % 16)));
                }
            }
        }
    }
}
