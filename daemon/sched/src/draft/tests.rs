use super::*;

fn ids(text: &str) -> Vec<TokenId> {
    text.bytes().map(|byte| TokenId(byte.into())).collect()
}

fn candidate(chance: f32, most: usize) -> Candidate {
    Candidate { row: 0, sees: 100, chance, guess: vec![TokenId(0); most] }
}

/// `rows` decoding rows and nothing else.
fn decoding(rows: u32) -> Load {
    (0..rows).fold(Load::default(), |load, _| load.with(99, 1, 1))
}

/// Depths where nothing but `rows` is in the step, and time is not limited.
fn tried(cost: &StepCost, rows: Load, candidates: &[Candidate], most: usize) -> Vec<usize> {
    depths(cost, rows, rows, None, candidates, most)
}

#[test]
fn a_guess_is_what_followed_and_goes_on_into_itself() {
    let guess = |text: &str, most| Drafter::default().guess(&ids(text), most).map(|(_, guess)| guess);
    assert_eq!(guess("the cat, the ", 3), Some(ids("cat")));
    assert_eq!(guess("abab", 5), Some(ids("ababa")));
    assert_eq!(guess("abc", 5), None);
}

#[test]
fn a_surer_guess_is_tried_further_and_a_poor_one_not_at_all() {
    let alone = |chance| tried(&StepCost::UNKNOWN, decoding(1), &[candidate(chance, DEEPEST)], 64)[0];
    assert_eq!(alone(0.1), 0);
    assert!((1..4).contains(&alone(0.5)), "{}", alone(0.5));
    assert!(alone(0.9) > alone(0.6), "{} and {}", alone(0.9), alone(0.6));
    assert_eq!(tried(&StepCost::UNKNOWN, decoding(1), &[candidate(0.9, 4)], 2), [2]);
    assert_eq!(tried(&StepCost::UNKNOWN, decoding(0), &[], 64), [0; 0]);
}

#[test]
fn where_every_token_costs_the_same_nothing_is_tried_and_where_more_cost_nothing_all() {
    let same = StepCost { body_us: StepCost::SIZES.map(|n| n as f32), ..StepCost::UNKNOWN };
    let flat = StepCost { body_us: StepCost::SIZES.map(|_| 5.0), ..StepCost::UNKNOWN };
    let two = [candidate(0.95, 8), candidate(0.6, 8)];
    assert_eq!(tried(&same, decoding(2), &two, 64), [0, 0]);
    assert_eq!(tried(&flat, decoding(2), &two, 64), [8, 8]);
    // The second guess of the one is likelier than the first of the other.
    assert_eq!(tried(&flat, decoding(2), &two, 3), [3, 0]);
}

#[test]
fn prompt_tokens_beside_them_do_not_make_guesses_worth_more() {
    let body_us = StepCost::SIZES.map(|n| n as f32);
    let cost = StepCost { body_us, ..StepCost::UNKNOWN };
    let all = decoding(1).with(0, 100, 1);
    assert_eq!(depths(&cost, all, decoding(1), None, &[candidate(0.95, 8)], 64), [0]);
}

#[test]
fn what_came_true_is_believed_and_what_did_not_is_not() {
    let tokens = ids("abcabcab");
    let chance = |drafter: &mut Drafter| drafter.guess(&tokens, 1).map_or(0.0, |(chance, _)| chance);
    let mut drafter = Drafter::default();
    let first = chance(&mut drafter);
    // Tried or not, it teaches the same.
    for tried in [0, 1] {
        for _ in 0..20 {
            chance(&mut drafter);
            drafter.learn(tried, tried, TokenId(u32::from(b'c')));
        }
        assert!(chance(&mut drafter) > first + 0.2, "{} after {first}", chance(&mut drafter));
        for _ in 0..20 {
            chance(&mut drafter);
            drafter.learn(tried, 0, TokenId(u32::from(b'x')));
        }
        assert!(chance(&mut drafter) < 0.2, "{} after {first}", chance(&mut drafter));
    }
}

#[test]
fn guesses_keep_to_what_a_step_may_still_take() {
    let cost = StepCost { body_us: StepCost::SIZES.map(|n| 100.0 + n as f32), ..StepCost::UNKNOWN };
    let depth = |left| depths(&cost, decoding(1), decoding(1), Some(left), &[candidate(0.95, 8)], 64)[0];
    assert_eq!([-5.0, 0.5, 3.5, 100.0].map(depth), [0, 0, 3, 8]);
}
