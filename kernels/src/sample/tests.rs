use super::*;

/// The definition, word for word: everything weighed, everything sorted.
fn plain(logits: &[f32], params: &SamplingParams, choice: u32, position: u32) -> u32 {
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    let by_rank = |ids: &mut Vec<u32>| {
        ids.sort_by(|&a, &b| by_likelihood(logits, a, b));
    };
    let mut ranked = ids.clone();
    by_rank(&mut ranked);
    if params.is_greedy() || params.top_k == Some(1) {
        return ranked[0];
    }
    let top = logits[ranked[0] as usize];
    let weight = |id: u32| f64::from(exp((logits[id as usize] - top) * (1.0 / params.temperature)));
    let top_k = params.top_k.map_or(ids.len(), |k| ids.len().min(k.max(1) as usize));
    if top_k < ids.len() || params.top_p < 1.0 {
        ranked.truncate(top_k);
        let target = f64::from(params.top_p) * ranked.iter().map(|&id| weight(id)).sum::<f64>();
        let mut sum = 0.0;
        let fewest = ranked.iter().position(|&id| {
            sum += weight(id);
            sum >= target
        });
        ranked.truncate(fewest.map_or(ranked.len(), |last| last + 1));
        ids = ranked;
    }
    let target =
        uniform(params.seed, choice, position, PURPOSE_TOKEN) * ids.iter().map(|&id| weight(id)).sum::<f64>();
    let mut sum = 0.0;
    let drawn = ids.iter().position(|&id| {
        sum += weight(id);
        sum > target
    });
    drawn.map_or(ids[ids.len() - 1], |at| ids[at])
}

/// Logits as models give them: many low ones, a few high, and equals among both.
fn logits(seed: u32, count: usize, spread: f32) -> Vec<f32> {
    let word = |index: usize| philox4x32_10([index as u32, 1, 0, 0], [seed, 3])[0];
    let value = |index: usize| {
        let x = word(index) as f32 / (1_u64 << 32) as f32;
        // Steps of a 64th: some values come twice.
        ((x * x * x * x - 0.5) * spread * 64.0).round() / 64.0
    };
    (0..count).map(value).collect()
}

#[test]
fn draws_are_those_of_the_plain_definition() {
    for (count, spread) in
        [(1, 1.0), (17, 4.0), (300, 8.0), (4096, 10.0), (5003, 0.0), (49_152, 24.0), (20_011, 3.0)]
    {
        let logits = logits(count as u32, count, spread);
        for (index, top_k) in
            [None, Some(1), Some(2), Some(40), Some(700), Some(6000)].into_iter().enumerate()
        {
            for top_p in [1.0, 0.999_999, 0.95, 0.5, 1e-4] {
                for temperature in [0.0, 0.7, 1.0, 3.0] {
                    let params = SamplingParams {
                        temperature,
                        top_p,
                        top_k,
                        seed: 77,
                        logprobs: None,
                        penalties: Penalties::NONE,
                    };
                    let (choice, position) = (index as u32, count as u32);
                    let got = draw(&logits, &params, choice, position).unwrap();
                    assert_eq!(
                        got.0,
                        plain(&logits, &params, choice, position),
                        "{count} logits, {params:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn draws_from_all_reach_every_chunk_and_end_at_a_token_with_weight() {
    let mut logits = vec![0.0; 3 * CHUNK + 5];
    let weigh = Weigh { top: 0.0, inverse: 1.0, least: 0.0 };
    for at in [0, 1, CHUNK - 1, CHUNK, 2 * CHUNK + 7, 3 * CHUNK + 4] {
        let u = (at as f64 + 0.5) / logits.len() as f64;
        assert_eq!(pick_of_all(&logits, weigh, u), Some(TokenId(at as u32)));
    }
    // The mass ends in the second chunk; nothing after it may be drawn, however the sums are rounded.
    logits[CHUNK + 3..].fill(-1000.0);
    assert_eq!(pick_of_all(&logits, weigh, 1.0), Some(TokenId(CHUNK as u32 + 2)));
}

#[test]
fn the_best_few_are_the_first_of_a_full_sort_on_every_set() {
    for count in [1, 15, 16, 255, 257, 4097, 30_000] {
        let logits = logits(9, count, 12.0);
        let mut want: Vec<u32> = (0..count as u32).collect();
        want.sort_by(|&a, &b| by_likelihood(&logits, a, b));
        let survey = Survey::new(&logits).unwrap();
        assert_eq!(survey.best().0, want[0]);
        for most in [1, 2, 20, 256, 1024, count, count + 1] {
            assert_eq!(survey.best_first(most), want[..most.min(count)], "{most} of {count}");
        }
        for isa in Isa::ALL.into_iter().filter(|isa| isa.usable() == *isa) {
            let mut maxima = survey.maxima.clone();
            maxima.fill([0.0; LANES]);
            assert!(super::survey(isa.vectors(), &logits, &mut maxima));
            assert!(maxima == survey.maxima, "{isa}");
            let weigh = Weigh { top: logits[want[0] as usize], inverse: 0.9, least: 1e-4 };
            let masses = [Isa::Portable, isa].map(|isa| mass(isa.vectors(), &logits, weigh).to_bits());
            assert_eq!(masses[0], masses[1], "{isa}");
        }
    }
}

#[test]
fn penalties_count_the_output_and_repetition_the_prompt_too() {
    let before: [f32; 5] = [4.0, -2.0, 3.0, 1.0, 0.5];
    let mut logits = before;
    let penalties = Penalties { presence: 0.5, frequency: 0.25, repetition: 2.0 };
    penalise(&mut logits, &penalties, &[2, 2, 1], &[0, 1, 0, 0, 99]);
    // Token 0 came three times, 1 once and in the prompt, 2 in the prompt, the others never; 99 is no token.
    let expected: [f32; 5] = [4.0 / 2.0 - 3.0 * 0.25 - 0.5, -2.0 * 2.0 - 0.25 - 0.5, 3.0 / 2.0, 1.0, 0.5];
    assert_eq!(logits.map(f32::to_bits), expected.map(f32::to_bits));

    let mut logits = before;
    penalise(&mut logits, &Penalties { presence: -1.0, ..Penalties::NONE }, &[2], &[3, 3]);
    let expected: [f32; 5] = [4.0, -2.0, 3.0, 2.0, 0.5];
    assert_eq!(logits.map(f32::to_bits), expected.map(f32::to_bits), "a negative one makes it more likely");
    let mut logits = before;
    penalise(&mut logits, &Penalties::NONE, &[0, 1], &[2, 3]);
    assert_eq!(logits.map(f32::to_bits), before.map(f32::to_bits));
}

#[test]
fn penalties_depend_on_what_was_said_and_not_on_its_order() {
    let penalties = Penalties { presence: 0.3, frequency: 0.7, repetition: 1.3 };
    let mut output: Vec<u32> = (0..200).map(|i| i * i % 61).collect();
    let penalised = |output: &[u32]| {
        let mut logits: Vec<f32> = (0..64).map(|i| (i as f32 * 0.37).sin() * 9.0).collect();
        penalise(&mut logits, &penalties, &[1, 2, 3], output);
        logits.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    let expected = penalised(&output);
    output.reverse();
    assert_eq!(penalised(&output), expected);
}

#[test]
fn tokens_under_the_least_share_of_the_best_are_never_drawn_and_others_are() {
    let logits = logits(5, 3000, 6.0);
    let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for (top_k, top_p) in [(None, 1.0), (None, 0.97), (Some(900), 1.0)] {
        let params = SamplingParams { temperature: 1.5, top_p, top_k, seed: 3, ..SamplingParams::GREEDY };
        let mut drawn = std::collections::BTreeSet::new();
        for position in 0..500 {
            let token = draw_above(&logits, &params, 0.2, 0, position).unwrap();
            assert!(exp((logits[token.0 as usize] - top) / 1.5) >= 0.19, "{token:?}");
            drawn.insert(token);
        }
        assert!(drawn.len() > 20, "{} different tokens", drawn.len());
    }
}

#[test]
fn biases_come_before_penalties_and_a_token_only_in_the_prompt_is_not_counted() {
    let by = |token, seen, output, bias| Adjustment { token: TokenId(token), seen, output, bias };
    let mut logits = [1.0, -1.0, 4.0, 2.0, 7.0];
    let penalties = Penalties { repetition: 2.0, frequency: 0.5, presence: 0.25 };
    let changes = [by(0, true, 0, 0.0), by(1, true, 2, 0.0), by(2, false, 0, -6.0), by(3, true, 1, -3.0)];
    adjust(&mut logits, penalties, &changes).unwrap();
    assert_eq!(logits.map(f32::to_bits), [0.5, -3.25, -2.0, -2.75, 7.0_f32].map(f32::to_bits));
    let outside = [by(0, false, 0, 1.0), by(5, true, 0, 0.0)];
    assert_eq!(adjust(&mut logits, penalties, &outside), Err(SampleError::Token { token: 5, vocabulary: 5 }));
    assert_eq!(logits[0].to_bits(), 0.5_f32.to_bits());
}
