//! Drawing tokens.

use std::collections::HashMap;

use pagedd_core::{Penalties, SamplingParams, TokenId};
use pagedd_kernels::sample::{SampleError, draw, log_softmax_top, philox4x32_10};
use proptest::prelude::*;

use crate::support::floats;

const SAMPLED: SamplingParams = SamplingParams { temperature: 1.0, seed: 42, ..SamplingParams::GREEDY };

#[test]
fn philox_gives_the_published_known_answers() {
    // Random123's kat_vectors, philox4x32 with 10 rounds.
    let cases = [
        ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
        ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
        (
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        ),
    ];
    for (counter, key, want) in cases {
        assert_eq!(philox4x32_10(counter, key), want);
    }
}

#[test]
fn greedy_takes_the_smallest_id_of_the_maxima() {
    for (logits, want) in [
        (vec![0.0], 0),
        (vec![1.0, 3.0, 3.0, 2.0], 1),
        (vec![-0.0, 0.0], 0),
        ((0..100).map(|i| if i == 97 || i == 99 { 5.0 } else { 0.0 }).collect(), 97),
        (vec![-f32::MAX; 33], 0),
    ] {
        assert_eq!(draw(&logits, &SamplingParams::GREEDY, 0, 0), Ok(TokenId(want)), "{logits:?}");
        assert_eq!(draw(&logits, &SamplingParams { top_k: Some(1), ..SAMPLED }, 3, 9), Ok(TokenId(want)));
    }
}

#[test]
fn logits_that_are_not_finite_are_an_error() {
    assert_eq!(draw(&[], &SAMPLED, 0, 0), Err(SampleError::Empty));
    for len in [1, 8, 9, 40] {
        for at in 0..len {
            for poison in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut logits = vec![0.0; len];
                logits[at] = poison;
                let error = Err(SampleError::NotFinite { token: at as u32 });
                assert_eq!(draw(&logits, &SamplingParams::GREEDY, 0, 0), error);
                assert_eq!(draw(&logits, &SAMPLED, 0, 0), error);
                assert!(log_softmax_top(&logits, 1, TokenId(0)).is_err());
            }
        }
    }
}

fn frequencies(logits: &[f32], params: SamplingParams, draws: u32) -> HashMap<u32, f64> {
    let mut counts = HashMap::new();
    for position in 0..draws {
        let token = draw(logits, &params, 0, position).unwrap();
        *counts.entry(token.0).or_insert(0.0) += 1.0 / f64::from(draws);
    }
    counts
}

#[test]
fn draws_follow_the_probabilities() {
    let probabilities = [0.5_f32, 0.25, 0.15, 0.1];
    let logits: Vec<f32> = probabilities.iter().map(|p| p.ln() + 3.0).collect();
    let drawn = |params| frequencies(&logits, params, 20_000);
    // 4 standard deviations of 20,000 draws.
    let near = |got: &HashMap<u32, f64>, want: &[f64]| {
        for (id, want) in want.iter().enumerate() {
            let got = got.get(&(id as u32)).copied().unwrap_or(0.0);
            assert!((got - want).abs() < 0.015, "token {id}: {got} for {want}");
        }
    };
    near(&drawn(SAMPLED), &[0.5, 0.25, 0.15, 0.1]);
    near(&drawn(SamplingParams { top_k: Some(2), ..SAMPLED }), &[2.0 / 3.0, 1.0 / 3.0, 0.0, 0.0]);
    near(&drawn(SamplingParams { top_p: 0.6, ..SAMPLED }), &[2.0 / 3.0, 1.0 / 3.0, 0.0, 0.0]);
    near(&drawn(SamplingParams { top_p: 0.5, ..SAMPLED }), &[1.0, 0.0, 0.0, 0.0]);
    // Of the three kept by top-k the first two hold 0.75 / 0.9 of the mass.
    near(
        &drawn(SamplingParams { top_k: Some(3), top_p: 0.83, ..SAMPLED }),
        &[2.0 / 3.0, 1.0 / 3.0, 0.0, 0.0],
    );
    let squares: Vec<f64> = probabilities.iter().map(|p| f64::from(p * p) / 0.345).collect();
    near(&drawn(SamplingParams { temperature: 0.5, ..SAMPLED }), &squares);
}

#[test]
fn a_draw_depends_on_seed_choice_and_position() {
    let logits = vec![0.0; 1000];
    let draw = |seed, choice, position| {
        draw(&logits, &SamplingParams { seed, ..SAMPLED }, choice, position).unwrap()
    };
    assert_eq!(draw(1, 2, 3), draw(1, 2, 3));
    let tokens: std::collections::HashSet<_> = [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (1 << 32, 0, 0)]
        .into_iter()
        .map(|(seed, choice, position)| draw(seed, choice, position))
        .collect();
    assert_eq!(tokens.len(), 5);
}

#[test]
fn log_probabilities_are_those_of_the_twin_best_first_and_ties_by_id() {
    let mut logits: Vec<f32> = floats(41, 5000);
    (logits[7], logits[4000], logits[50]) = (20.0, 20.0, 19.0);
    let norm = logits.iter().map(|x| f64::from(*x).exp()).sum::<f64>().ln();
    let got = log_softmax_top(&logits, 3, TokenId(123)).unwrap();
    assert!((f64::from(got.token) - (f64::from(logits[123]) - norm)).abs() < 1e-5);
    assert_eq!(got.top.iter().map(|(id, _)| id.0).collect::<Vec<_>>(), [7, 4000, 50]);
    for (id, log_probability) in got.top {
        assert!((f64::from(log_probability) - (f64::from(logits[id.0 as usize]) - norm)).abs() < 1e-6);
    }
    assert_eq!(log_softmax_top(&[1.0, 1.0], 5, TokenId(0)).unwrap().top.len(), 2);
    assert!(log_softmax_top(&logits, 0, TokenId(0)).unwrap().top.is_empty());
    assert!(matches!(log_softmax_top(&logits, 0, TokenId(5000)), Err(SampleError::Token { .. })));
}

proptest! {
    #![proptest_config(crate::support::cases(256))]

    #[test]
    fn any_finite_logits_give_a_token_that_the_cuts_keep(
        logits in prop::collection::vec(prop_oneof![-50.0_f32..50.0, Just(0.0), Just(f32::MAX), Just(-f32::MAX)], 1..600),
        temperature in prop_oneof![1e-5_f32..0.1, 0.1_f32..2.0, Just(f32::MAX)],
        top_p in prop_oneof![Just(1.0_f32), 1e-7_f32..1.0],
        top_k in prop::option::of(0_u32..700),
        position: u32,
    ) {
        let params = SamplingParams { temperature, top_p, top_k, seed: 9, logprobs: None, penalties: Penalties::NONE };
        let token = draw(&logits, &params, 0, position).unwrap();
        prop_assert!((token.0 as usize) < logits.len());
        let better = logits.iter().filter(|&&x| x > logits[token.0 as usize]).count();
        if let Some(k) = top_k {
            prop_assert!(better < (k.max(1)) as usize, "{} better ones, top {}", better, k);
        }
        prop_assert_eq!(draw(&logits, &params, 0, position).unwrap(), token);
    }
}
