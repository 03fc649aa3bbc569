use std::time::{Duration, Instant};

use clap::Parser;
use pagedd_config::{KvMemory, Model};
use pagedd_core::{FinishReason, TenantId, TokenId, Tokens};
use pagedd_engine::StepRecord;
use pagedd_sched::{Emitted, Ended, Finished};
use pagedd_wire::worker::DeviceStep;

use super::cases::device;
use super::load::Draw;
use super::machine::{Sample, process_times, sample, taken, this_thread, thread_time};
use super::numbers::{mean, median, percentile};
use super::options::{Case, Lengths, Options, Switch};
use super::record::{Counted, Goal, Record, Step, id};
use super::report::{Value, figures, headings, json, kept, shown};
use pagedd_engine::Journal;

#[derive(Parser, Debug)]
struct Line {
    #[command(flatten)]
    options: Options,
}

fn parsed(line: &str) -> Result<Case, String> {
    let words = std::iter::once("bench").chain(line.split_whitespace());
    Line::try_parse_from(words).map(|line| line.options.case).map_err(|error| error.to_string())
}

/// The model that a command line comes to.
fn model(line: &str) -> Result<Model, String> {
    parsed(line)?.config().map(|mut config| config.models.remove(0))
}

/// A file that can stand for a model: nobody opens it here.
const FILE: &str = "Cargo.toml";

#[test]
fn a_model_can_be_described_on_the_command_line_as_in_a_configuration() {
    let line = format!(
        "latency --path {FILE} --batch 1,96 --kv-memory 4096tokens --block-size 32 --max-model-len 2048 --threads 3"
    );
    let model = model(&line).expect("it holds");
    assert_eq!(model.path.to_str(), Some(FILE));
    assert!(matches!(model.kv_memory, KvMemory::Given(_)), "{:?}", model.kv_memory);
    assert_eq!((model.block_size, model.max_model_len), (Tokens(32), Some(Tokens(2048))));
    assert_eq!(model.max_num_seqs, 96, "as many as the largest batch has");
    assert_eq!(model.itl_target, None, "a step takes as long as it takes");
    assert!(model.prefix_cache);
}

#[test]
fn as_many_sequences_run_as_there_are_requests_up_to_a_bound() {
    let seats = |line: &str| model(&format!("{line} --path {FILE}")).expect("it holds").max_num_seqs;
    assert_eq!(seats("throughput"), 256);
    assert_eq!(seats("throughput --requests 4"), 4);
    assert_eq!(seats("throughput --requests 4 --choices 4"), 16);
    assert_eq!(seats("prefix --requests 4000 --max-num-seqs 1024"), 1024);
    let budget =
        |line: &str| model(&format!("{line} --path {FILE}")).expect("it holds").max_num_batched_tokens.0;
    assert_eq!(budget("latency --batch 1,600"), 600, "a step has a token for each");
    assert_eq!(budget("latency --batch 1,600 --budget 1024,2048"), 2048);
    assert_eq!(budget("throughput"), 512);
    assert_eq!(seats("foreign --batch 7"), 8, "a foreign prompt runs beside them");
    let model = model(&format!("throughput --requests 5000 --path {FILE}")).expect("it holds");
    assert_eq!(model.max_queued_requests, 5000, "all of them may wait");
}

#[test]
fn what_is_wrong_with_a_models_option_is_said_of_the_option() {
    for (option, word) in [
        ("--kv-memory plenty", "--kv-memory: "),
        ("--block-size 17", "--block-size: "),
        ("--device abacus", "--device: "),
        ("--max-num-seqs 0", "--max-num-seqs: "),
        ("--itl-target soon", "--itl-target: "),
        ("--dtype f33", "--dtype: "),
    ] {
        let error = model(&format!("latency --path {FILE} {option}")).expect_err(option);
        assert!(error.starts_with(word), "{error}");
    }
    let error = model("latency --path no/such/model.gguf").expect_err("there is none");
    assert!(error.starts_with("--path: ") && error.contains("no/such/model.gguf"), "{error}");
}

#[test]
fn a_generated_model_on_a_gpu_needs_no_file() {
    let line = "latency --path synthetic:llama-3-8b --device cuda:1 --deterministic true";
    let model = model(line).expect("it holds");
    assert_eq!((model.device.to_string().as_str(), model.deterministic), ("cuda:1", true));
}

#[test]
fn a_path_is_taken_as_it_stands_whatever_yaml_would_make_of_it() {
    let case = Line::try_parse_from(["bench", "latency", "--path", "a\": {b}\n\\#c"]).expect("any text");
    let error = case.options.case.config().expect_err("there is no such file");
    assert!(error.starts_with("--path: ") && error.contains("a\": {b}"), "{error}");
}

#[test]
fn options_out_of_range_are_refused_by_name() {
    for (line, option) in [
        ("latency --batch 0", "--batch"),
        ("latency --batch 1,x", "--batch"),
        ("latency --input-len 9..3", "--input-len"),
        ("latency --input-len 0", "--input-len"),
        ("throughput --temperature -1", "--temperature"),
        ("throughput --temperature NaN", "--temperature"),
        ("throughput --requests 0", "--requests"),
        ("throughput --choices 0", "--choices"),
        ("prefix --prefix-cache maybe", "--prefix-cache"),
        ("prefix --budget 0", "--budget"),
        ("latency --limit 0", "--limit"),
        ("foreign --foreign 0", "--foreign"),
        ("foreign --batch 4096", "--batch"),
    ] {
        let error = parsed(&format!("{line} --path {FILE}")).expect_err(line);
        assert!(error.contains(option), "{line}: {error}");
    }
    assert!(parsed("latency").expect_err("no model is named").contains("--config"));
    let both = parsed(&format!("latency --config a.yaml --path {FILE}")).expect_err("two models");
    assert!(both.contains("--config") && both.contains("--path"), "{both}");
    let short =
        super::checked(&parsed(&format!("latency --path {FILE} --output-len 21")).expect("it parses"));
    assert!(short.expect_err("nothing is left").starts_with("--output-len: 21"));
    let short =
        super::checked(&parsed(&format!("foreign --path {FILE} --output-len 21")).expect("it parses"));
    assert!(short.expect_err("nothing is left").starts_with("--output-len: 21"));
}

#[test]
fn a_model_of_a_configuration_is_measured_as_it_is_configured_there() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("pagedd.yaml");
    let model_file = folder.path().join("m.gguf");
    std::fs::write(&model_file, "x").expect("a file");
    let yaml = format!(
        "models:\n  a: {{path: {0}, max_num_seqs: 7, itl_target: 50ms}}\n  b: {{path: {0}, prefix_cache: false}}\n",
        model_file.display()
    );
    std::fs::write(&file, yaml).expect("a configuration");
    let line = |rest: &str| format!("throughput --config {} {rest}", file.display());
    let a = model(&line("--model a --prefix-cache off")).expect("it is there");
    assert_eq!((a.max_num_seqs, a.prefix_cache), (7, false));
    assert_eq!(a.itl_target, Some(Duration::from_millis(50)));
    assert!(!model(&line("--model b")).expect("it is there").prefix_cache, "as it is configured");
    assert!(model(&line("--model b --prefix-cache on")).expect("it is there").prefix_cache);
    let unnamed = model(&line("")).expect_err("there are two");
    assert!(unnamed.starts_with("--model: ") && unnamed.contains("a, b"), "{unnamed}");
    let unknown = model(&line("--model c")).expect_err("there is none");
    assert!(unknown.contains("`c`") && unknown.contains("a, b"), "{unknown}");
}

#[test]
fn each_budget_is_a_model_of_its_own() {
    let case = parsed(&format!("throughput --path {FILE} --budget 256,2048 --prefix-cache off")).expect("ok");
    assert_eq!(case.run().prefix_cache, Some(Switch::Off));
    let model = case.config().expect("it holds").models.remove(0);
    let budgets: Vec<u32> = case.models(&model).iter().map(|m| m.max_num_batched_tokens.0).collect();
    assert_eq!(budgets, [256, 2048]);
}

#[test]
fn mixed_lengths_are_spread_evenly_by_their_logarithm() {
    let one: Lengths = "512".parse().expect("a length");
    assert_eq!(one.spread(3), [512; 3]);
    let mixed: Lengths = "128..16384".parse().expect("two lengths");
    assert_eq!(mixed.spread(1), [1448], "the geometric middle");
    let lengths = mixed.spread(64);
    assert!(lengths.is_sorted() && lengths[0] >= 128 && lengths[63] <= 16384, "{lengths:?}");
    let below = lengths.iter().filter(|length| **length < 1448).count();
    assert_eq!(below, 32, "half of them lie below the middle");
}

#[test]
fn an_order_is_drawn_that_has_every_value_once() {
    let values: Vec<u32> = (0..100).collect();
    let mut drawn = values.clone();
    Draw::new(1).shuffle(&mut drawn);
    assert_ne!(drawn, values);
    drawn.sort_unstable();
    assert_eq!(drawn, values);
}

#[test]
fn the_middle_and_the_ends_of_values_are_found_in_any_order() {
    let close = |found: Option<f64>, expected: f64| {
        assert!(found.is_some_and(|found| (found - expected).abs() < 1e-9), "{found:?} {expected}");
    };
    close(median(&[3.0, 1.0, 2.0]), 2.0);
    close(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
    close(mean(&[1.0, 2.0, 6.0]), 3.0);
    let hundred: Vec<f64> = (1..=100).rev().map(f64::from).collect();
    close(percentile(&hundred, 0.99), 99.0);
    close(percentile(&hundred, 1.0), 100.0);
    close(percentile(&hundred, 0.001), 1.0);
    close(percentile(&[5.0], 0.99), 5.0);
    assert_eq!((median(&[]), mean(&[]), percentile(&[], 0.5)), (None, None, None));
}

fn step(at: Instant, ms: u64, rows: u32, decodes: bool) -> Step {
    let (submitted, collected) = (at + Duration::from_millis(ms), at + Duration::from_millis(ms + 1));
    Step { submitted, collected, compute_us: 900, predicted_us: 0, rows, decodes, device: None }
}

#[test]
fn gaps_of_a_gpu_are_of_the_steps_measured_and_what_it_has_recorded_is_of_the_last() {
    let record = Record::default();
    record.begin(1, 1);
    let start = Instant::now();
    for (i, idle_us) in [None, Some(9_000), Some(20), Some(40), Some(30)].into_iter().enumerate() {
        let graphs = i as u32;
        let device = Some(DeviceStep { idle_us, graphs, graphs_us: 1500, graphs_bytes: 7, beside_bytes: 9 });
        record.round().add(Step { device, ..step(start, i as u64 * 10, 1, true) });
    }
    let found = device(&record.round(), &[2, 3, 4]);
    let shown: Vec<_> = found.iter().map(|field| (field.name, field.value.clone())).collect();
    let expected = [
        ("gpu_gap_us_p50", Value::Real(30.0, 0)),
        ("gpu_gap_us_p99", Value::Real(40.0, 0)),
        ("graphs", Value::Count(4)),
        ("graphs_ms", Value::Real(1.5, 1)),
        ("graphs_bytes", Value::Count(7)),
        ("beside_bytes", Value::Count(9)),
    ];
    assert_eq!(shown, expected);
    record.begin(2, 1);
    record.round().add(step(start, 0, 1, true));
    let none = device(&record.round(), &[0]);
    assert!(none.iter().all(|field| field.value == Value::Absent), "a processor has nothing of it: {none:?}");
}

#[test]
fn only_steps_of_all_sequences_behind_such_a_step_are_steady() {
    let record = Record::default();
    record.begin(1, 2);
    let start = Instant::now();
    let shapes = [(1, false), (2, false), (2, true), (2, true), (1, true), (2, true), (2, true), (2, true)];
    for (i, (rows, decodes)) in shapes.into_iter().enumerate() {
        record.round().add(step(start, i as u64 * 10, rows, decodes));
    }
    let round = record.round();
    assert_eq!(round.steady, [3, 6, 7], "each of them follows a step like it");
    assert_eq!(round.interval(6), Duration::from_millis(10));
    assert!(round.has_reached(Goal::Steady(3)) && !round.has_reached(Goal::Steady(4)));
}

#[test]
fn what_joins_a_round_makes_no_step_steady_and_its_end_ends_nothing() {
    let record = std::sync::Arc::new(Record::default());
    record.begin(5, 2);
    let start = Instant::now();
    for i in 0..3 {
        record.round().add(step(start, i * 10, 2, true));
    }
    let place = record.round().join();
    assert_eq!((place, record.round().steady.clone()), (2, vec![1, 2]));
    assert!(!record.round().has_reached(Goal::First(place)));
    record.round().add(step(start, 40, 3, false));
    record.round().add(step(start, 55, 3, true));
    let mut journal = Counted(record.clone());
    let finished = vec![finished(7, FinishReason::Length)];
    journal.commit(StepRecord { tokens: vec![emitted(7)], finished, ..StepRecord::default() });
    let round = record.round();
    assert!(round.has_reached(Goal::First(place)) && round.first[place].is_some());
    assert_eq!(round.steady, [1, 2], "three rows are not the two that it began with");
    let within = |from: u64, to: u64| {
        round.between(&[(start + Duration::from_millis(from), start + Duration::from_millis(to))])
    };
    assert_eq!((within(0, 5), within(22, 56), within(56, 90)), (vec![], vec![3, 4], vec![]));
}

#[test]
fn whoever_waits_for_a_stranger_hears_of_an_answer_that_ends_before_it() {
    let record = std::sync::Arc::new(Record::default());
    record.begin(5, 2);
    let place = record.round().join();
    let finished = vec![finished(6, FinishReason::Length)];
    Counted(record.clone()).commit(StepRecord { finished, ..StepRecord::default() });
    let round = record.round();
    assert!(round.has_reached(Goal::First(place)) && round.first[place].is_none());
}

fn emitted(number: u64) -> Emitted {
    let (request, tenant) = (id(number), TenantId(1));
    Emitted { request, tenant, choice: 0, token: TokenId(5), logprob: None, top: Vec::new() }
}

fn finished(number: u64, reason: FinishReason) -> Finished {
    let (prompt_tokens, output_tokens) = (Tokens(4), Tokens(1));
    let ended = Some(Ended { prompt_tokens, cached_tokens: Tokens(0), output_tokens });
    Finished { request: id(number), tenant: TenantId(1), choice: 0, reason, ended }
}

#[test]
fn tokens_and_ends_are_counted_by_request_and_those_of_another_round_are_not_taken_for_first_ones() {
    let record = std::sync::Arc::new(Record::default());
    record.begin(7, 2);
    let mut journal = Counted(record.clone());
    let tokens = vec![emitted(7), emitted(3)];
    journal.commit(StepRecord { tokens, ..StepRecord::default() });
    let first = record.round().first.clone();
    assert!(first[0].is_some() && first[1].is_none(), "{first:?}");
    assert!(!record.round().has_reached(Goal::Ended));
    let ends = vec![finished(7, FinishReason::Length), finished(8, FinishReason::Failed)];
    journal.commit(StepRecord { tokens: vec![emitted(7)], finished: ends, ..StepRecord::default() });
    let round = record.round();
    assert_eq!((round.tokens, round.ended, round.failed), (3, 2, 1));
    assert_eq!(round.first[0], first[0], "the first token is the first");
    assert!(round.has_reached(Goal::Ended));
}

#[test]
fn whoever_waits_is_woken_by_the_goal_or_gives_up_in_time() {
    let record = std::sync::Arc::new(Record::default());
    record.begin(1, 1);
    assert!(!record.wait(Goal::Ended, Duration::ZERO), "nothing has ended");
    std::thread::scope(|scope| {
        let mut journal = Counted(record.clone());
        scope.spawn(move || {
            let finished = vec![finished(1, FinishReason::Length)];
            journal.commit(StepRecord { finished, ..StepRecord::default() });
        });
        assert!(record.wait(Goal::Ended, Duration::from_mins(1)));
    });
}

#[test]
fn a_row_has_the_same_figures_for_people_and_for_programs() {
    let row = vec![
        shown("batch", "batch", 64u32),
        kept("note", "a \"b\"\n"),
        shown("ms", "ms/token", Value::real(Some(7.512_34), 2)),
        shown("watts", "W", Value::real(None, 0)),
        shown("nan", "x", Value::real(Some(f64::NAN), 0)),
    ];
    assert_eq!(headings(&row), " batch  ms/token       W       x");
    assert_eq!(figures(&row), "    64      7.51       -       -");
    let text = json("latency", &vec![kept("device", "cpu")], &[row.clone(), row]);
    let line = "  {\"batch\": 64, \"note\": \"a \\\"b\\\"\\u000a\", \"ms\": 7.51234, \"watts\": null, \"nan\": null}";
    assert_eq!(text.matches(line).count(), 2, "{text}");
    assert!(text.starts_with("{\"bench\": \"latency\", \"version\": "), "{text}");
}

#[test]
fn lines_of_the_gpu_are_read_and_what_is_no_number_is_left_out() {
    let found = Some(Sample { watts: 312.45, mhz: 1605.0, memory_used: 0.25 });
    assert_eq!(sample("312.45, 1605, 1024, 4096"), found);
    assert_eq!(sample("[N/A], 1605, 1024, 4096"), None);
    assert_eq!(sample("312.45, 1605"), None);
    assert_eq!(sample("power.draw"), None);
}

#[test]
fn processor_time_of_threads_rises_with_their_work() {
    let before = process_times(std::process::id());
    let own = this_thread().and_then(|folder| Some((thread_time(&folder)?, folder)));
    // A kernel that does not count has nothing to show.
    let (Some(before), Some((own, folder))) = (before, own) else { return };
    let until = Instant::now() + Duration::from_millis(30);
    while Instant::now() < until {
        std::hint::spin_loop();
    }
    let after = process_times(std::process::id()).expect("it counted before");
    assert!(thread_time(&folder).is_some_and(|now| now > own), "{}", folder.display());
    assert!(taken(&before, &after) > 0);
}

#[test]
fn every_row_for_gpu_hosts_is_a_command_that_is_taken() {
    let rows = include_str!("../../../scripts/gpu/rows.txt").lines().filter(|line| line.starts_with("run"));
    let commands = rows.filter_map(|line| line.rsplit('|').next()?.trim().strip_prefix("bench "));
    let taken = commands.map(|command| parsed(command).unwrap_or_else(|error| panic!("{command}: {error}")));
    assert!(taken.count() >= 10, "rows of decode, prefill, throughput and prefix");
}
