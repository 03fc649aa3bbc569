//! What idle tenants cost: `make bench-tenants`.
//!
//! One daemon, one tiny model with a vocabulary of 128,256 tokens, and 500 tenants (`--tenants N`) that nobody asks anything. Printed: the private
//! memory of their gateways, how often gateways, daemon, template and worker wake up in ten seconds, and how long `pagedctl tenant add` took.
//! It ends with an error where a bar is missed.

use std::collections::BTreeMap;
use std::fs;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use pagedd_model::testing::{TinyModel, write_gguf_with_vocabulary};
use pagedd_tests::daemon::{Daemon, Site, Tenant, model_yaml};
use pagedd_tests::process::Process;
use pagedd_tests::wait;
use serde_json::json;

const MODEL: &str = "tiny";
/// As many as Llama 3 has.
const ENTRIES: usize = 128_256;
const MERGES: usize = 280_147;
/// How long wake-ups are counted.
const WATCHED: Duration = Duration::from_secs(10);
/// All gateways run by then.
const LIMIT: Duration = Duration::from_mins(2);

const PRIVATE_BAR_KIB: u64 = 12 << 10;
const ADD_BAR: Duration = Duration::from_millis(300);
/// Of all processes together, in a second: what is done once in some minutes may fall into the ten seconds.
const WAKES_BAR: f64 = 0.5;
/// A daemon and all gateways have ended by then.
const END_BAR: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let count: usize = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => 500,
        ["--tenants", count] => count.parse().expect("--tenants is a number"),
        _ => panic!("the only option is --tenants N"),
    };
    let folder = tempfile::tempdir().expect("a folder for the model");
    let path = folder.path().join("tiny.gguf");
    let tiny = TinyModel { layers: 1, context: 512, ..TinyModel::default() };
    write_gguf_with_vocabulary(&path, 41, &tiny, ENTRIES, MERGES).expect("write the model");
    let daemon = Site::new(&model_yaml(MODEL, &path, "kv_memory: 65536 tokens\n    threads: 1")).start();

    let mut added = Vec::new();
    let mut tenants = Vec::new();
    for number in 0..count {
        let begun = Instant::now();
        tenants.push(daemon.add_unready_tenant(MODEL, &format!("tenant-{number}"), "0%", "100%"));
        added.push(begun.elapsed());
    }
    wait::until("every gateway runs", LIMIT, || gateways(&daemon).len() == count);
    let [first, middle, last] = [0, count / 2, count - 1].map(|at| &tenants[at]);
    for tenant in [first, middle, last] {
        wait::until("the port is ready", LIMIT, || tenant.http.get("/readyz").status == 200);
    }
    // What a start leaves behind (a worker thread, an idle connection) is gone by then.
    thread::sleep(Duration::from_secs(15));
    let private: Vec<u64> =
        gateways(&daemon).iter().map(|gateway| rollup(gateway, "Private_Dirty")).collect();
    let wakes = wakes_per_second(&daemon);
    chat(last);
    let used = gateways(&daemon)
        .iter()
        .find(|gateway| gateway.name == format!("gw:{}", last.name))
        .map(|gateway| rollup(gateway, "Private_Dirty"));

    println!("{count} idle tenants, a vocabulary of {ENTRIES} with {MERGES} merges");
    let most = spread(
        "private memory of a gateway",
        private.iter().map(|kib| *kib as f64 / 1024.0).collect(),
        "MiB",
    );
    println!("  {:<34} {:.1} MiB", "that of one that answered a chat", used.unwrap_or(0) as f64 / 1024.0);
    spread("pagedctl tenant add", added.iter().map(|time| time.as_secs_f64() * 1e3).collect(), "ms");
    let end = &added[added.len() - added.len().min(10)..];
    let slowest = end.iter().max().copied().unwrap_or_default();
    println!("  {:<34} {:.0} ms at most", "the last ten", slowest.as_secs_f64() * 1e3);
    for (what, rate) in &wakes {
        println!("  {:<34} {rate:.1} a second", format!("wake-ups, {what}"));
    }
    for process in daemon.processes().iter().filter(|process| !process.name.starts_with("gw:")) {
        println!(
            "  {:<34} {:.1} MiB private",
            process.name,
            rollup(process, "Private_Dirty") as f64 / 1024.0
        );
    }
    let begun = Instant::now();
    daemon.stop();
    let end = begun.elapsed();
    println!("  {:<34} {:.1} s", "end of the daemon", end.as_secs_f64());
    let bars = [
        ("private memory of a gateway is above 12 MiB", most * 1024.0 > PRIVATE_BAR_KIB as f64),
        ("a tenant is added in more than 300 ms", slowest > ADD_BAR),
        ("the end takes more than 10 s", end > END_BAR),
        ("gateways wake up", wakes["gateways"] > 0.0),
        ("processes wake up", wakes.values().sum::<f64>() > WAKES_BAR),
    ];
    let missed: Vec<&str> = bars.iter().filter(|(_, missed)| *missed).map(|(what, _)| *what).collect();
    for what in &missed {
        println!("missed: {what}");
    }
    if missed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn gateways(daemon: &Daemon) -> Vec<Process> {
    daemon.processes().into_iter().filter(|process| process.name.starts_with("gw:")).collect()
}

/// A line of a process's `smaps_rollup`, in KiB.
fn rollup(process: &Process, name: &str) -> u64 {
    let path = format!("/proc/{}/smaps_rollup", process.pid);
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse().ok())
        .unwrap_or_else(|| panic!("{text}"))
}

/// Context switches of all threads of a process.
fn switches(pid: u32) -> u64 {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
    let of = |thread: fs::DirEntry| -> u64 {
        // A thread that has ended meanwhile has no more.
        let status = fs::read_to_string(thread.path().join("status")).unwrap_or_default();
        let lines = status.lines().filter(|line| line.contains("ctxt_switches"));
        lines.filter_map(|line| line.rsplit_once(char::is_whitespace)?.1.parse::<u64>().ok()).sum()
    };
    threads.filter_map(Result::ok).map(of).sum()
}

/// Context switches per second of gateways, together, and of each other kind of process.
fn wakes_per_second(daemon: &Daemon) -> BTreeMap<String, f64> {
    let processes = daemon.processes();
    let daemon_pid = daemon.status()["pid"].as_u64().expect("pid") as u32;
    let kind = |process: &Process| match process {
        Process { name, .. } if name.starts_with("gw:") => "gateways".to_owned(),
        Process { pid, .. } if *pid == daemon_pid => "daemon".to_owned(),
        Process { pid, .. } if *pid == daemon.root() => "keeper".to_owned(),
        Process { name, .. } => name.clone(),
    };
    // The question above has been answered and forgotten.
    thread::sleep(Duration::from_secs(2));
    let count = || processes.iter().map(|process| switches(process.pid)).collect::<Vec<_>>();
    let (begun, before) = (Instant::now(), count());
    thread::sleep(WATCHED);
    let (after, seconds) = (count(), begun.elapsed().as_secs_f64());
    let mut rates = BTreeMap::new();
    for (process, (before, after)) in processes.iter().zip(before.into_iter().zip(after)) {
        *rates.entry(kind(process)).or_default() += (after - before) as f64 / seconds;
    }
    rates
}

fn chat(tenant: &Tenant) {
    let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 8});
    let answer = tenant.http.post("/v1/chat/completions", &body);
    assert_eq!(answer.status, 200, "{}", answer.text());
}

/// Prints least, median and most, and returns the most.
fn spread(what: &str, mut values: Vec<f64>, unit: &str) -> f64 {
    values.sort_by(f64::total_cmp);
    let [least, median, most] = [0, values.len() / 2, values.len() - 1].map(|at| values[at]);
    println!("  {what:<34} {median:.1} {unit} (from {least:.1} to {most:.1})");
    most
}
