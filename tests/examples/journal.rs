//! What the journal costs a running daemon: `make bench-journal`.
//!
//! 256 rows a step, some 200 steps a second, and nobody reads: requests run in the background. For that the worker beside the daemon is the one
//! that computes nothing (daemon/worker/examples/null.rs); with a real one, the generated model makes fewer steps. Printed per step: what the
//! engine's thread takes to hand its results over, and the CPU time of the journal's and the engine's threads.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use pagedd_model::testing::{TinyModel, write_gguf};
use pagedd_tests::daemon::{Daemon, Site, Tenant, model_yaml};
use pagedd_tests::wait;
use serde_json::json;

const MODEL: &str = "tiny";
const REQUESTS: u32 = 64;
const CHOICES: u32 = 4;
const ROWS: u64 = (REQUESTS * CHOICES) as u64;
const SECONDS: u64 = 10;
/// Time for all requests to be admitted and for the first measure.
const LIMIT: Duration = Duration::from_mins(1);

/// What was used since the daemon's start.
#[derive(Clone, Copy)]
struct Reading {
    at: Instant,
    steps: f64,
    commit_us: f64,
    journal_us: f64,
    engine_us: f64,
}

impl Reading {
    fn of(daemon: &Daemon) -> Self {
        let pid = daemon.status()["pid"].as_u64().expect("pid");
        let text = daemon.ask(&["metrics"]);
        let text = text["text"].as_str().expect("text");
        Self {
            at: Instant::now(),
            steps: sample(text, "pagedd_steps_total"),
            commit_us: sample(text, "pagedd_commit_microseconds_total"),
            journal_us: cpu_us(pid, "journal"),
            engine_us: cpu_us(pid, "engine-"),
        }
    }
}

/// A sample of the one model.
fn sample(metrics: &str, name: &str) -> f64 {
    let line = metrics.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{')));
    let value = line.and_then(|line| line.rsplit_once(' ')).and_then(|(_, value)| value.parse().ok());
    value.unwrap_or_else(|| panic!("no {name}:\n{metrics}"))
}

/// CPU time of the thread whose name begins so.
fn cpu_us(pid: u64, name: &str) -> f64 {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("the daemon runs");
    let of = threads
        .map(|thread| thread.expect("a thread").path())
        .find(|thread| fs::read_to_string(thread.join("comm")).is_ok_and(|comm| comm.starts_with(name)));
    let times =
        fs::read_to_string(of.expect("the thread").join("schedstat")).expect("the kernel keeps times");
    times.split(' ').next().and_then(|ns| ns.parse::<f64>().ok()).expect("nanoseconds") / 1e3
}

fn main() {
    let folder = tempfile::tempdir().expect("a folder for the model");
    let path = folder.path().join("tiny.gguf");
    write_gguf(&path, 41, &TinyModel { context: 8192, ..TinyModel::default() }).expect("write the model");
    let options = format!(
        "kv_memory: 1048576 tokens\n    max_model_len: 8192\n    max_num_seqs: {ROWS}\n    threads: 1\n    prompt_lookup: false"
    );
    let daemon = Site::new(&model_yaml(MODEL, &path, &options)).start();
    let tenants = ["acme", "globex"].map(|name| daemon.add_tenant_of(MODEL, name, "40%", "60%"));
    for number in 0..REQUESTS {
        ask(&tenants[number as usize % 2], number);
    }
    wait::until("all rows run", LIMIT, || daemon.model()["running"].as_u64() == Some(ROWS));
    let before = Reading::of(&daemon);
    thread::sleep(Duration::from_secs(SECONDS));
    let after = Reading::of(&daemon);
    assert_eq!(daemon.model()["running"].as_u64(), Some(ROWS), "some ended before the measure did");
    let steps = after.steps - before.steps;
    let per_step = |get: fn(&Reading) -> f64| (get(&after) - get(&before)) / steps;
    println!(
        "{ROWS} rows, {:.0} steps/s: per step {:.1} µs of the engine's thread to hand over its results (bar 20), {:.0} µs CPU of the journal's \
         thread (bar 200), {:.0} µs CPU of the engine's",
        steps / (after.at - before.at).as_secs_f64(),
        per_step(|reading| reading.commit_us),
        per_step(|reading| reading.journal_us),
        per_step(|reading| reading.engine_us),
    );
}

fn ask(tenant: &Tenant, number: u32) {
    let ids: Vec<u32> = (0..16).map(|at| 3 + (number * 31 + at * 7) % 200).collect();
    let body = json!({
        "model": MODEL, "prompt": ids, "max_tokens": 8_000, "n": CHOICES, "temperature": 1, "seed": number, "ignore_eos": true, "background": true,
    });
    let answer = tenant.http.post("/v1/completions", &body);
    assert_eq!(answer.status, 202, "{}", answer.text());
}
