//! `pagedd bench`: the real engine and the real worker, measured from the command line.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use pagedd_model::testing::{TinyModel, write_gguf};
use pagedd_tests::daemon::{Ended, binary};
use serde_json::Value;
use tempfile::TempDir;

/// A generated model, and a folder for results.
struct Place {
    folder: TempDir,
    model: PathBuf,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let model = folder.path().join("tiny.gguf");
        write_gguf(&model, 41, &TinyModel { context: 2048, ..TinyModel::default() })
            .expect("write the model");
        Self { folder, model }
    }

    fn json(&self) -> PathBuf {
        self.folder.path().join("rows.json")
    }

    /// Runs `pagedd bench` on the model with these options.
    fn bench(&self, case: &str, options: &str) -> Ended {
        let settings = "--threads 1 --kv-memory 16384tokens --limit 60";
        let mut command = Command::new(binary("pagedd"));
        command.args(["bench", case, "--path"]).arg(&self.model).args(settings.split(' '));
        command.arg("--json").arg(self.json()).args(options.split(' '));
        // Its worker has the same pipe: this returns when both have ended.
        let output = command.env_clear().env("PATH", "/usr/bin:/bin").stdin(Stdio::null()).output();
        let output = output.expect("run pagedd bench");
        let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        Ended { code: output.status.code(), text: text.concat() }
    }

    /// The rows of a run that must succeed, and what it printed.
    fn rows(&self, case: &str, options: &str) -> (Vec<Value>, String) {
        let ended = self.bench(case, options);
        assert_eq!(ended.code, Some(0), "{}", ended.text);
        let text = fs::read_to_string(self.json()).expect("the JSON file");
        let report: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
        assert_eq!(report["bench"], case);
        assert_eq!(report["model"]["device"], "cpu", "{report}");
        (report["rows"].as_array().expect("rows").clone(), ended.text)
    }
}

#[track_caller]
fn number(row: &Value, name: &str) -> f64 {
    row[name].as_f64().unwrap_or_else(|| panic!("no {name}: {row}"))
}

#[test]
fn a_throughput_run_counts_every_token_and_writes_what_it_prints() {
    let place = Place::new();
    let (rows, text) =
        place.rows("throughput", "--requests 4 --input-len 100 --output-len 12 --warmup 3 --budget 64,512");
    assert_eq!(rows.len(), 2, "a row for each budget: {text}");
    for (row, budget) in rows.iter().zip([64, 512]) {
        assert_eq!(row["num_requests"], 4, "{row}");
        assert_eq!(row["total_num_tokens"], 4 * (100 + 12), "{row}");
        assert_eq!(row["max_num_batched_tokens"], budget, "{row}");
        let stated: Vec<&str> =
            ["sampling", "prefix_cache"].iter().filter_map(|name| row[*name].as_str()).collect();
        assert_eq!(stated, ["greedy", "on"]);
        assert_eq!((&row["warmup_steps"], &row["cached_tokens"]), (&3.into(), &0.into()), "{row}");
        assert!(row["gpu_watts"].is_null() && row["gpu_sm_mhz"].is_null(), "it runs on no GPU: {row}");
        assert!(row["gpu_gap_us_p50"].is_null() && row["graphs"].is_null(), "it runs on no GPU: {row}");
        assert!(number(row, "start_s") > 0.0, "{row}");
        let (seconds, rate) = (number(row, "elapsed_time"), number(row, "output_tokens_per_second"));
        assert!((rate * seconds - 48.0).abs() < 1e-6, "{row}");
        let shown = format!("{:.2}", number(row, "requests_per_second"));
        assert!(text.contains(&shown), "{shown} is not in:\n{text}");
    }
    assert!(
        number(&rows[0], "steps") > number(&rows[1], "steps"),
        "a smaller budget takes more steps: {text}"
    );
}

#[test]
fn a_throughput_run_of_mixed_lengths_sends_all_of_them() {
    let place = Place::new();
    let options = "--requests 5 --input-len 10..100 --output-len 2..32 --warmup 3";
    let (rows, text) = place.rows("throughput", options);
    // Middles of fifths of 10..100 and of 2..32, by the logarithm.
    let (inputs, outputs) = ([13, 20, 32, 50, 79], [3, 5, 8, 14, 24]);
    let sum: u32 = inputs.iter().chain(&outputs).sum();
    assert_eq!(rows[0]["total_num_tokens"], sum, "{text}");
    assert_eq!((&rows[0]["input_len"], &rows[0]["output_len"]), (&"10..100".into(), &"2..32".into()));
    assert!(rows[0]["joules_per_output_token"].is_null(), "it runs on no GPU: {text}");
}

#[test]
fn a_latency_run_has_a_row_for_each_batch_and_leaves_the_warm_up_out() {
    let place = Place::new();
    let (rows, text) = place.rows("latency", "--batch 1,5 --input-len 8..64 --output-len 16 --warmup 4");
    assert_eq!(rows.len(), 2, "{text}");
    for (row, batch) in rows.iter().zip([1, 5]) {
        assert_eq!(
            (&row["batch"], &row["steps"]),
            (&batch.into(), &11.into()),
            "15 gaps, 4 of them left out"
        );
        assert_eq!(row["input_len"], "8..64");
        let (middle, late) = (number(row, "ms_per_token_p50"), number(row, "ms_per_token_p99"));
        assert!(middle > 0.0 && late >= middle && number(row, "prefill_ms") > 0.0, "{row}");
        assert!(number(row, "compute_us") <= number(row, "ms_per_token_mean") * 1e3, "{row}");
    }
}

#[test]
fn a_shared_prefix_is_found_in_the_cache_unless_the_cache_is_off() {
    let place = Place::new();
    let cached = |switch: &str| {
        let options = format!(
            "--requests 6 --max-num-seqs 2 --prefix-len 64 --suffix-len 16 --output-len 4 --warmup 2 --temperature 1 --prefix-cache {switch}"
        );
        let (rows, _) = place.rows("prefix", &options);
        assert_eq!(rows[0]["sampling"], "T=1", "{rows:?}");
        assert_eq!(rows[0]["prefix_cache"], switch, "{rows:?}");
        number(&rows[0], "cached_tokens") as u64
    };
    // The first finds nothing, nor does the second if it starts beside it.
    let found = cached("on");
    assert!(found == 4 * 64 || found == 5 * 64, "{found}");
    assert_eq!(cached("off"), 0);
}

#[test]
fn a_foreign_run_compares_gaps_beside_a_long_prompt_with_those_before_it() {
    let place = Place::new();
    let options =
        "--batch 3 --input-len 32 --output-len 24 --warmup 4 --foreign-len 900 --foreign 2 --budget 256";
    let run = |target: &str| {
        let (rows, text) = place.rows("foreign", &format!("{options} --itl-target {target}"));
        assert_eq!(rows.len(), 1, "{text}");
        rows[0].clone()
    };
    let (whole, cut) = (run("none"), run("1ms"));
    for row in [&whole, &cut] {
        assert_eq!(
            (&row["batch"], &row["foreign_len"], &row["foreign_prompts"]),
            (&3.into(), &900.into(), &2.into())
        );
        let [p50, p99, max] = ["p50", "p99", "max"].map(|part| number(row, &format!("beside_ms_{part}")));
        assert!(p50 > 0.0 && p99 >= p50 && max >= p99, "{row}");
        let ratio = p99 / number(row, "quiet_ms_p99");
        assert!((number(row, "p99_ratio") / ratio - 1.0).abs() < 1e-6, "{row}");
        let rate = 900.0 * 1e3 / number(row, "foreign_ms");
        assert!((number(row, "foreign_tokens_per_second") / rate - 1.0).abs() < 1e-6, "{row}");
    }
    assert_eq!((&whole["itl_target_ms"], &cut["itl_target_ms"]), (&Value::Null, &1.into()));
    // Four steps of 253 tokens at least, and as many as keep to a millisecond.
    assert!(
        number(&whole, "steps") >= 8.0 && number(&cut, "steps") >= number(&whole, "steps"),
        "{whole} {cut}"
    );
}

#[test]
fn bad_options_are_refused_by_name() {
    let place = Place::new();
    for (case, options, words) in [
        ("throughput", "--kv-dtype f12", &["--kv-dtype: ", "f12"][..]),
        ("throughput", "--requests many", &["--requests", "many"]),
        ("latency", "--output-len 8 --warmup 20", &["--output-len: 8", "--warmup 20"]),
        ("latency", "--batch 2 --input-len 4000", &["--input-len and --output-len: ", "2048"]),
        ("latency", "--batch 16 --input-len 1800", &["--batch: 16", "1024"]),
        ("latency", "--batch 3 --max-num-seqs 2 --input-len 8", &["--batch: 3", "max_num_seqs, 2"]),
        ("foreign", "--batch 2 --input-len 8 --foreign-len 4000", &["--foreign-len: ", "2048"]),
        (
            "foreign",
            "--batch 16 --input-len 1200 --foreign-len 900",
            &["--batch and --foreign-len: ", "1024"],
        ),
        ("foreign", "--batch 4 --budget 4 --input-len 8 --foreign-len 900", &["--budget: ", "--batch 4"]),
    ] {
        place.bench(case, options).refused(words);
    }
    let missing =
        Command::new(binary("pagedd")).args(["bench", "latency", "--path", "no/such.gguf"]).output();
    let text = String::from_utf8_lossy(&missing.expect("run it").stderr).into_owned();
    assert!(text.contains("--path: ") && text.contains("no/such.gguf"), "{text}");
}
