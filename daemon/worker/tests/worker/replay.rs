//! Plans run again, and workers that take over from others.

use std::collections::BTreeMap;
use std::path::Path;

use pagedd_core::{Penalties, SamplingParams, StepCost, TensorType};
use pagedd_model::testing::{Random, TinyModel};
use pagedd_wire::worker::{
    Arena, Begin, BlockCopy, Dtype, Hello, Input, KnownCost, KvMemory, Output, Plan, Row, Sampled,
    SequenceState, TableUpdate,
};
use pagedd_worker::runner::RunError;
use pagedd_worker::{Fds, ModelRunner};

use crate::driver::{Driver, Seq, known};
use crate::models::{dup, hello, load, tiny, tokens};

/// A plan, what it gave, and what a fresh worker must know before it.
pub struct Step {
    pub before: Vec<SequenceState>,
    pub plan: Plan,
    /// The plan as sent again once earlier ones were applied.
    pub known: Plan,
    pub output: Output,
}

/// A busy history with forks, draws, guesses, chunks, preemptions and ends, run once.
///
/// What is guessed is what a runner of the same model draws in a history without guesses.
fn history(runner: &mut ModelRunner, path: &Path, seed: u64) -> Vec<Step> {
    let (_, drawn) = history_with(&mut load(&small(path)), seed, BTreeMap::new());
    let futures = drawn.iter().map(|(seq, drawn)| (*seq, drawn.iter().map(|s| s.token).collect())).collect();
    let (steps, with_guesses) = history_with(runner, seed, futures);
    assert_eq!(drawn, with_guesses, "guesses changed what was drawn");
    let rows = || steps.iter().flat_map(|step| step.plan.rows.iter().map(move |row| (row, &step.output)));
    let tried: usize = rows().map(|(row, _)| row.drafts as usize).sum();
    let draws = |(row, output): (&Row, &Output)| {
        (row.drafts > 0).then(|| output.sampled.iter().filter(|s| s.seq == row.seq).count() - 1)
    };
    let right: usize = rows().filter_map(draws).sum();
    assert!(right > 10 && tried > right + 10, "{right} of {tried} guesses right");
    steps
}

pub fn history_with(
    runner: &mut ModelRunner,
    seed: u64,
    futures: BTreeMap<u64, Vec<u32>>,
) -> (Vec<Step>, BTreeMap<u64, Vec<Sampled>>) {
    let mut random = Random::new(seed);
    let mut below = move |n: u64| random.next_u64() % n;
    let mut driver = Driver::new(runner);
    (driver.chunk, driver.budget, driver.overlap) = (20, 64, true);
    driver.futures = futures;
    let vocab = runner.info().vocab_size;
    let mut steps = Vec::new();
    let mut next = 1;
    loop {
        if next < 12 && steps.len() % 2 == 0 {
            let mut seq =
                Seq::new(next * 10, &tokens(next, 1 + below(70) as usize, vocab), 2 + below(12) as usize);
            if next % 2 == 0 {
                let temperature = 0.7;
                seq.sampling =
                    SamplingParams { temperature, top_p: 0.9, seed: next, ..SamplingParams::GREEDY };
                if next % 4 == 0 {
                    seq.sampling.penalties = Penalties { presence: 0.5, frequency: 0.5, repetition: 1.3 };
                }
                seq.children = (1..=below(3)).map(|child| seq.id + child).collect();
            }
            driver.seqs.push(seq);
            next += 1;
        }
        if steps.len() % 5 == 4 {
            let at = below(driver.seqs.len() as u64) as usize;
            // A child that waits for its copy has nothing in KV to lose.
            if !driver.seqs[at].done() && driver.seqs[at].copy.is_none() {
                driver.seqs[at].preempt();
            }
        }
        let before = driver.snapshot();
        let state = driver.clone();
        let Some(mut plan) = driver.plan() else { break };
        // What is done after the plan before needs no more to be known.
        plan.end = driver.seqs.iter().filter(|seq| seq.begun && seq.done()).map(|seq| seq.id).collect();
        let output = runner.run(&plan).unwrap();
        driver.apply(&plan, &output);
        steps.push(Step { before, known: known(&plan, &state), plan, output });
    }
    assert!(steps.iter().any(|step| !step.plan.copies.is_empty()), "no copy in the history");
    let overlapped = |step: &Step| step.plan != step.known;
    assert!(steps.iter().any(overlapped), "no overlap in the history");
    (steps, driver.drawn)
}

pub fn without_time(output: &Output) -> Output {
    Output { compute_us: 0, device: None, ..output.clone() }
}

fn assert_equal_arenas(a: &ModelRunner, b: &ModelRunner, what: &str) {
    for arena in [Arena::Weights, Arena::Kv] {
        // Not `assert_eq`: the difference would be megabytes of text.
        assert!(a.data(arena) == b.data(arena), "{what}: {arena:?} arenas differ");
    }
}

fn small(path: &Path) -> Hello {
    Hello { kv_memory: KvMemory::Tokens(8192), ..hello(path, Dtype::Auto) }
}

#[test]
fn every_plan_run_twice_leaves_equal_arenas_and_outputs() {
    let (_dir, path) = tiny(&TinyModel::of_type(TensorType::Q4_1));
    for seed in 1..=4 {
        let (mut once, mut twice) = (load(&small(&path)), load(&small(&path)));
        for step in history(&mut once, &path, seed) {
            for _ in 0..2 {
                let output = twice.run(&step.plan).unwrap();
                assert_eq!(without_time(&output), without_time(&step.output));
            }
        }
        assert_equal_arenas(&once, &twice, "every plan twice");
    }
}

#[test]
fn plans_n_and_n_plus_1_run_again_after_a_resync_leave_equal_arenas_and_outputs() {
    let (_dir, path) = tiny(&TinyModel::of_type(TensorType::Q8_0));
    for seed in 1..=4 {
        let (mut once, mut again) = (load(&small(&path)), load(&small(&path)));
        let steps = history(&mut once, &path, seed);
        for pair in steps.windows(2) {
            let [first, second] = pair else { unreachable!() };
            // N, N+1, and after the resync N, N+1.
            let rounds: [(&Plan, bool); 2] = [(&first.plan, false), (&first.known, true)];
            for (plan, resync) in rounds {
                if resync {
                    again.resync(first.before.clone()).unwrap();
                }
                assert_eq!(without_time(&again.run(plan).unwrap()), without_time(&first.output));
                assert_eq!(without_time(&again.run(&second.plan).unwrap()), without_time(&second.output));
            }
            // The next pair begins with what is now the past: state as before N+1, tokens known.
            again.resync(first.before.clone()).unwrap();
            again.run(&first.known).unwrap();
        }
        again.run(&steps.last().unwrap().plan).unwrap();
        assert_equal_arenas(&once, &again, "pairs of plans again");
    }
}

#[test]
fn measuring_steps_leaves_a_kv_arena_that_was_taken_over_as_it_was() {
    let (_dir, path) = tiny(&TinyModel::of_type(TensorType::Q4_1));
    let (mut whole, mut first) = (load(&small(&path)), load(&small(&path)));
    let steps = history(&mut whole, &path, 5);
    let (last, before) = steps.split_last().unwrap();
    for step in before {
        first.run(&step.plan).unwrap();
    }
    let fds = Fds { weights: Some(dup(&first, Arena::Weights)), kv: Some(dup(&first, Arena::Kv)) };
    drop(first);
    let mut second = ModelRunner::load(&Hello { measure: true, ..small(&path) }, fds, &mut |_| true).unwrap();
    assert!(second.info().kv_reused);
    assert!(StepCost::from(second.info().cost).is_known());
    second.resync(last.before.clone()).unwrap();
    assert_eq!(without_time(&second.run(&last.known).unwrap()), without_time(&last.output));
    assert_equal_arenas(&whole, &second, "measured in between");
}

#[test]
fn what_an_earlier_worker_measured_is_not_measured_again_unless_something_differs() {
    let (_dir, path) = tiny(&TinyModel::of_type(TensorType::Q4_1));
    let hello = Hello { measure: true, ..small(&path) };
    let cost = StepCost { body_us: [7.0; StepCost::SIZES.len()], ..StepCost::UNKNOWN };
    let known = KnownCost { cost: cost.into(), ..KnownCost::new(&hello, load(&small(&path)).info()) };
    let with = |known| {
        let hello = Hello { known_cost: Some(known), ..hello.clone() };
        ModelRunner::load(&hello, Fds::default(), &mut |_| true).unwrap().info().cost
    };
    assert_eq!(with(known), known.cost);
    let others = [
        KnownCost { digest: [0; 16], ..known },
        KnownCost { threads: known.threads + 1, ..known },
        KnownCost { max_num_seqs: known.max_num_seqs + 1, ..known },
    ];
    for other in others {
        let measured = with(other);
        assert!(measured != known.cost && StepCost::from(measured).is_known(), "{other:?}: {measured:?}");
    }
}

#[test]
fn a_runner_that_takes_over_both_arenas_goes_on_as_if_nothing_had_happened() {
    let (_dir, path) = tiny(&TinyModel::of_type(TensorType::Q4_K));
    let mut whole = load(&small(&path));
    let steps = history(&mut whole, &path, 9);
    for cut in [1, steps.len() / 2, steps.len() - 1] {
        let mut first = load(&small(&path));
        assert!(!first.info().weights_reused && !first.info().kv_reused);
        // The plan at the cut runs, and its output is lost with the worker.
        for step in &steps[..=cut] {
            first.run(&step.plan).unwrap();
        }
        let fds = Fds { weights: Some(dup(&first, Arena::Weights)), kv: Some(dup(&first, Arena::Kv)) };
        let info = first.info().clone();
        drop(first);
        let mut second = ModelRunner::load(&small(&path), fds, &mut |_| true).unwrap();
        assert!(second.info().weights_reused && second.info().kv_reused);
        assert_eq!((second.info().digest, second.info().blocks), (info.digest, info.blocks));
        second.resync(steps[cut].before.clone()).unwrap();
        assert_eq!(without_time(&second.run(&steps[cut].known).unwrap()), without_time(&steps[cut].output));
        for step in &steps[cut + 1..] {
            assert_eq!(without_time(&second.run(&step.plan).unwrap()), without_time(&step.output));
        }
        assert_equal_arenas(&whole, &second, "taken over");
    }
}

#[test]
fn arenas_of_another_model_dtype_or_geometry_are_not_used() {
    let (_a, one) = tiny(&TinyModel::of_type(TensorType::Q4_1));
    let (_b, other) = tiny(&TinyModel::of_type(TensorType::Q4_0));
    let runner = load(&small(&one));
    let take_over = |hello: &Hello| {
        let fds = Fds { weights: Some(dup(&runner, Arena::Weights)), kv: Some(dup(&runner, Arena::Kv)) };
        let info = ModelRunner::load(hello, fds, &mut |_| true).unwrap().info().clone();
        (info.weights_reused, info.kv_reused)
    };
    assert_eq!(take_over(&small(&one)), (true, true));
    assert_eq!(take_over(&small(&other)), (false, false));
    assert_eq!(take_over(&Hello { dtype: Dtype::F32, ..small(&one) }), (false, false));
    assert_eq!(take_over(&Hello { block_size: 32, ..small(&one) }), (true, false));
    let kv_memory = KvMemory::Tokens(4096);
    assert_eq!(take_over(&Hello { kv_memory, ..small(&one) }), (true, false));
    // Swapped: each is an arena, and neither what it should be.
    let fds = Fds { weights: Some(dup(&runner, Arena::Kv)), kv: Some(dup(&runner, Arena::Weights)) };
    let info = ModelRunner::load(&small(&one), fds, &mut |_| true).unwrap().info().clone();
    assert!(!info.weights_reused && !info.kv_reused);
}

#[test]
fn a_bad_plan_writes_nothing_and_changes_nothing() {
    let (_dir, path) = tiny(&TinyModel::default());
    let mut runner = load(&small(&path));
    let mut driver = Driver::new(&runner);
    driver.seqs.push(Seq::new(1, &tokens(1, 30, 272), 5));
    let plan = driver.plan().unwrap();
    let expected = runner.run(&plan).unwrap();
    let before = runner.data(Arena::Kv).to_vec();
    let row = |block: u32| Row {
        seq: 1,
        start: 0,
        inputs: vec![Input::Known(5); 3].into(),
        table: TableUpdate { from: 0, blocks: vec![block] },
        samples: [1].into(),
        drafts: 0,
    };
    let copies = vec![BlockCopy { from: 0, to: 3, tokens: 16 }];
    let begin =
        vec![Begin { seq: 7, choice: 0, sampling: SamplingParams::GREEDY.into(), prompt: 0, tokens: vec![] }];
    let bad = Plan { id: 2, begin, copies, rows: vec![row(0), row(1 << 30)], end: vec![1] };
    assert!(matches!(runner.run(&bad), Err(RunError::Plan(_))));
    assert!(runner.data(Arena::Kv) == before);
    assert_eq!(without_time(&runner.run(&plan).unwrap()), without_time(&expected));
}

#[test]
fn a_row_whose_numbers_break_fails_alone_and_so_does_what_builds_on_its_draw() {
    breaks_alone(&TinyModel { tied_embeddings: false, ..TinyModel::default() }, small);
}

/// The embedding of one token of `model` is not a number; whoever reads it is lost, nobody else is.
pub fn breaks_alone(model: &TinyModel, hello: impl Fn(&Path) -> Hello) {
    let mut writer = pagedd_model::testing::gguf_writer(7, model);
    let embedding = writer.tensor("token_embd.weight").unwrap();
    let row_bytes = model.hidden * size_of::<f32>();
    embedding.data[100 * row_bytes..101 * row_bytes].fill(0xff);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("nan.gguf");
    std::fs::write(&path, writer.bytes()).unwrap();
    let mut runner = load(&hello(&path));

    let row = |seq, tokens: &[u32], block| Row {
        seq,
        start: 0,
        inputs: tokens.iter().copied().map(Input::Known).collect(),
        table: TableUpdate { from: 0, blocks: vec![block] },
        samples: [seq].into(),
        drafts: 0,
    };
    let begin =
        |seq| Begin { seq, choice: 0, sampling: SamplingParams::GREEDY.into(), prompt: 0, tokens: vec![] };
    let alone = Plan { id: 1, begin: vec![begin(1)], rows: vec![row(1, &[1, 2, 3], 0)], ..Plan::default() };
    let expected = runner.run(&alone).unwrap().sampled;

    let both = Plan {
        id: 2,
        begin: vec![begin(1), begin(2)],
        rows: vec![row(2, &[1, 100, 3], 1), row(1, &[1, 2, 3], 0)],
        ..Plan::default()
    };
    let output = runner.run(&both).unwrap();
    assert_eq!(output.sampled, expected);
    assert_eq!(output.failed.len(), 1);
    let (seq, why) = &output.failed[0];
    assert_eq!(*seq, 2);
    assert!(why.starts_with("the model gave no valid logits"), "{why}");

    let next = |seq| Row {
        seq,
        start: 3,
        inputs: [Input::Sampled { plan: 2, seq }].into(),
        table: TableUpdate { from: 1, blocks: vec![] },
        samples: [seq].into(),
        drafts: 0,
    };
    let then = Plan { id: 3, rows: vec![next(2), next(1)], ..Plan::default() };
    let expected = runner.run(&then).unwrap();
    assert_eq!(expected.sampled.iter().map(|s| s.seq).collect::<Vec<_>>(), [1]);
    assert_eq!(expected.failed, [(2, "an input token of it could not be computed".to_owned())]);

    // The same where nobody knows yet that the draw failed when it is built upon.
    let mut runner = load(&hello(&path));
    runner.submit(&both).unwrap();
    runner.submit(&then).unwrap();
    let found = [runner.collect().unwrap(), runner.collect().unwrap()].map(|o| without_time(&o));
    assert_eq!(found, [without_time(&output), without_time(&expected)]);
}
