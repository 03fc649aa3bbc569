//! What needs no GPU.

use pagedd_core::{Penalties, SamplingParams};
use pagedd_wire::worker::Begin;

use super::*;

fn draw(logits: usize) -> Pending {
    let params = SamplingParams { penalties: Penalties::NONE, ..SamplingParams::GREEDY };
    Pending { of: Request { seq: 1, choice: 0, position: 9, params }, row: 1, logits, nameable: true }
}

fn adjusted(count: u32) -> Vec<Adjustment> {
    (0..count).map(|token| Adjustment { token: TokenId(token), seen: true, output: 0, bias: 0.0 }).collect()
}

#[test]
fn draws_are_made_together_unless_they_adjust_one_row_of_logits() {
    let (plain, one) = (adjusted(0), adjusted(1));
    let same = [draw(0), draw(0), draw(0), draw(1)];
    let none = [plain.clone(), plain.clone(), plain.clone(), plain.clone()];
    assert_eq!(lot(&same, &none, 8), 4);
    assert_eq!(lot(&same, &none, 3), 3);
    assert_eq!(lot(&same, &[one.clone(), one.clone(), one.clone(), one.clone()], 8), 1);
    assert_eq!(lot(&same, &[one.clone(), plain.clone(), plain.clone(), plain.clone()], 8), 1);
    assert_eq!(lot(&same, &[plain.clone(), one.clone(), plain.clone(), plain], 8), 1);
    assert_eq!(lot(&[draw(0), draw(1)], &[one.clone(), one], 8), 2);
}

#[test]
fn a_draw_with_more_adjustments_than_fit_with_others_is_made_alone() {
    let half = adjusted(ADJUSTMENTS as u32 / 2 + 1);
    assert_eq!(lot(&[draw(0), draw(1)], &[half.clone(), half], 8), 1);
}

#[test]
fn every_token_of_the_past_is_adjusted_once_and_counted_in_the_output() {
    let found = adjustments(Past { prompt: &[7, 3, 7], output: &[3, 9, 9] });
    let found: Vec<_> = found.iter().map(|by| (by.token.0, by.seen, by.output)).collect();
    assert_eq!(found, [(3, true, 1), (7, true, 0), (9, true, 2)]);
}

#[test]
fn rows_of_one_token_come_first_on_the_device_and_logits_are_found_again() {
    let row = |seq, tokens: std::ops::Range<usize>| BatchRow {
        seq,
        start: 0,
        tokens,
        samples: [seq].into(),
        drafts: 0,
    };
    let batch = Batch {
        tokens: vec![10, 11, 12, 13, 14],
        positions: vec![0, 1, 2, 0, 0],
        rows: vec![row(1, 0..3), row(2, 3..4), row(3, 4..5)],
        ..Batch::default()
    };
    let mut layout = Layout::default();
    layout.set(&[], &batch, &[2, 3, 4], None);
    assert_eq!(layout.pieces.iter().map(|piece| piece.row).collect::<Vec<_>>(), [1, 2, 0]);
    assert_eq!(layout.decoded, 2);
    assert_eq!(layout.tokens, [13, 14, 10, 11, 12].map(TokenSource::Known));
    assert_eq!(layout.wanted, [0, 1, 4]);
    assert_eq!(layout.logits, [2, 0, 1]);
}

#[test]
fn small_parts_of_prompts_behind_a_long_past_are_decoded_token_by_token_as_far_as_there_is_room() {
    let most = PART_ROWS;
    let row = |seq, start, tokens| BatchRow { seq, start, tokens, samples: vec![].into(), drafts: 0 };
    let batch = |parts: &[(u32, usize)]| {
        let mut rows = vec![row(0, 7, 0..1)];
        for (seq, &(start, tokens)) in (1..).zip(parts) {
            let first = rows.last().map_or(0, |row: &BatchRow| row.tokens.end);
            rows.push(row(seq, start, first..first + tokens));
        }
        Batch { tokens: vec![5; rows.last().map_or(0, |row| row.tokens.end)], rows, ..Batch::default() }
    };
    let far = (PAST_OF_EACH * most) as u32;
    for (parts, expected) in [
        (vec![(PART_PAST as u32, 3)], vec![1, 1, 1]),
        (vec![(PART_PAST as u32 - 1, 3)], vec![3]),
        (vec![(far, most)], vec![1; most]),
        (vec![(far - 1, most)], vec![most]),
        (vec![(2 * far, most + 1)], vec![most + 1]),
        // The second has no room beside the first; the third has.
        (vec![(far, most - 1), (far, 2), (far, 1)], [vec![1; most], vec![2]].concat()),
    ] {
        let mut layout = Layout::default();
        let batch = batch(&parts);
        layout.set(&[], &batch, &[], None);
        let found: Vec<usize> = layout.pieces[1..].iter().map(|piece| piece.tokens).collect();
        assert_eq!(found, expected, "{parts:?}");
        assert_eq!(layout.decoded, 1 + expected.iter().filter(|tokens| **tokens == 1).count());
        assert!(layout.decoded <= batch.rows.len() + most);
        assert_eq!(layout.tokens.len(), batch.tokens.len());
        // With bits of its own, a prompt is a prompt.
        let mut sequences = Sequences::default();
        for seq in 0..=parts.len() as u64 {
            let (sampling, prompt) = (SamplingParams::GREEDY.into(), u32::from(seq > 0) * 100_000);
            sequences.begin(&Begin { seq, choice: 0, sampling, prompt, tokens: vec![] });
        }
        layout.set(&[], &batch, &[], Some(&sequences));
        assert_eq!((layout.decoded, layout.pieces.len()), (1, batch.rows.len()), "{parts:?}");
    }
}

#[test]
fn where_bits_must_not_depend_on_chunks_prompts_are_prefilled_and_what_follows_is_decoded_token_by_token() {
    let mut sequences = Sequences::default();
    for (seq, prompt) in [(1, 2), (2, 9), (3, 1)] {
        let sampling = SamplingParams::GREEDY.into();
        sequences.begin(&Begin { seq, choice: 0, sampling, prompt, tokens: vec![] });
    }
    let row = |seq, start, tokens| BatchRow { seq, start, tokens, samples: [seq].into(), drafts: 0 };
    let batch = Batch {
        tokens: (10..16).collect(),
        // Of the first, the last token of the prompt and two behind it; of the second, one in the prompt; of the third, two behind it.
        rows: vec![row(1, 1, 0..3), row(2, 4, 3..4), row(3, 5, 4..6)],
        ..Batch::default()
    };
    let mut layout = Layout::default();
    layout.set(&[], &batch, &[2, 3, 5], Some(&sequences));
    let piece = |row, before, tokens| Piece { row, before, tokens };
    assert_eq!(
        layout.pieces,
        [piece(0, 1, 1), piece(0, 2, 1), piece(2, 0, 1), piece(2, 1, 1), piece(0, 0, 1), piece(1, 0, 1)]
    );
    assert_eq!(layout.decoded, 4);
    assert_eq!(layout.tokens, [11, 12, 14, 15, 10, 13].map(TokenSource::Known));
    assert_eq!((&layout.wanted[..], &layout.logits[..]), (&[1, 3, 5][..], &[0, 2, 1][..]));
}

#[test]
fn a_deterministic_step_whose_partial_results_would_take_the_gpus_memory_is_refused_with_what_would_fit() {
    let llama = shape(ModelSource::open(Path::new("synthetic:llama-3-8b")).unwrap().config());
    let limits = |tokens: usize, context, exact| DecoderLimits {
        rows: tokens.max(256),
        tokens,
        wanted: 256,
        draws: 256,
        ranks: RANKS,
        adjustments: ADJUSTMENTS,
        context,
        blocks: 0,
        exact,
    };
    let refused = |limits: &DecoderLimits| {
        let error = check_exact(&llama, limits).unwrap_err();
        assert!(!error.retry(), "another worker does no better");
        error.to_string()
    };
    let error = refused(&limits(8192, 131_072, true));
    assert!(error.starts_with("max_num_batched_tokens: 8192: "), "{error}");
    assert!(error.ends_with("lower it to 960, or max_model_len to 16128"), "{error}");
    // What it names is taken.
    check_exact(&llama, &limits(960, 131_072, true)).unwrap();
    check_exact(&llama, &limits(8192, 16_128, true)).unwrap();
    // There is room for 1,008 rows, and a step of them is padded to 1,024.
    assert!(refused(&limits(1008, 131_072, true)).contains("lower it to 960, or max_model_len to 129024"));
    let seats = DecoderLimits { rows: 1200, ..limits(300, 131_072, true) };
    assert!(refused(&seats).starts_with("max_num_seqs: 1200: "), "{}", refused(&seats));
    check_exact(&llama, &limits(8192, 131_072, false)).unwrap();
}

#[test]
fn what_a_model_takes_beside_its_arenas_follows_from_the_tokens_of_a_step_and_from_determinism() {
    let source = ModelSource::open(Path::new("synthetic:llama-3-8b")).unwrap();
    let steps = Steps { seqs: 64, tokens: 512, context: 8192, deterministic: false };
    let of = |steps: Steps| overhead_bytes(source.config(), &forms(&source), &steps);
    let least = of(steps).unwrap();
    assert!(least > RESERVE);
    // Activations of a token: four hidden sizes, queries, keys and values, queries again, three feed-forward sizes.
    let token = 2 * (4 * 4096 + 6144 + 4096 + 3 * 14_336);
    assert_eq!(of(Steps { tokens: 8192, ..steps }).unwrap() - least, (8192 - 512) * token);
    let exact = Steps { tokens: 2048, deterministic: true, ..steps };
    let more = of(exact).unwrap() - of(Steps { deterministic: false, ..exact }).unwrap();
    assert!((500 << 20..8 << 30).contains(&more), "partial results of every row: {more}");
    let refused = of(Steps { tokens: 65_536, ..exact }).unwrap_err();
    assert!(refused.to_string().starts_with("max_num_batched_tokens: 65536: "), "{refused}");
}

#[test]
fn places_take_the_bytes_that_are_planned_and_weights_in_another_form_are_others() {
    for name in ["llama-2-7b", "llama-2-7b:q4_1", "smollm2-135m", "smollm2-135m:q4_1", "qwen2.5-7b:q4_1"] {
        let source = ModelSource::open(Path::new(&format!("synthetic:{name}"))).unwrap();
        let (shape, forms) = (shape(source.config()), forms(&source));
        let places = DecoderPlaces::new(&shape, &forms).unwrap();
        assert_eq!(places.bytes as u64, crate::forms::weight_bytes(&source, &forms), "{name}");
        let plain = DecoderForms::halves(shape.layers);
        let as_elements = DecoderPlaces::new(&shape, &plain).unwrap();
        let same = weights_identity(&source, &places) == weights_identity(&source, &as_elements);
        assert_eq!(same, forms == plain, "{name}");
    }
}

#[test]
fn a_step_is_whole_without_what_is_told_of_it() {
    let failed = || CudaError::Device { doing: "timing", code: "CUDA_ERROR_NOT_READY".to_owned() };
    let recorded = Recordings { graphs: 3, took: std::time::Duration::from_micros(7), bytes: 5 };
    let mut told = DeviceStep { beside_bytes: 9, ..DeviceStep::default() };
    tell(&mut told, Ok(Some(16.6)), Recordings::default(), || unreachable!("nothing new is recorded"));
    assert_eq!(told, DeviceStep { idle_us: Some(17), beside_bytes: 9, ..DeviceStep::default() });
    tell(&mut told, Err(failed()), recorded, || Err(failed()));
    let DeviceStep { idle_us, graphs, graphs_us, graphs_bytes, beside_bytes } = told;
    assert_eq!((idle_us, graphs, graphs_us, graphs_bytes, beside_bytes), (None, 3, 7, 5, 9));
}
