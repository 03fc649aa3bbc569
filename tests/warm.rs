//! The daemon dies, and its KV blocks outlive it: what the next one finds of them, and what it does not believe.

mod tiny;

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use nix::sys::signal::Signal;
use pagedd_tests::asks::{Ask, Outcome};
use pagedd_tests::daemon::{Daemon, Site, Tenant, smollm2_yaml};
use pagedd_tests::exchange::Exchange;
use pagedd_tests::process::{Process, kill_descendant, send};
use pagedd_tests::random::Random;
use pagedd_tests::wait;
use serde_json::{Value, json};

/// Tokens in a block.
const BLOCK: u64 = 16;
/// Tokens of a prompt: 62 full blocks, and half of one.
const PROMPT: u64 = 1000;
/// Of those, tokens in full blocks.
const FULL: u64 = PROMPT / BLOCK * BLOCK;
/// Of the ledger.
const HEADER: usize = 128;
const RECORD: usize = 48;

/// Changes a ledger.
type Lie = fn(&mut [u8]);

/// Prompt `which`, as tokens. No two have a first block in common.
fn body(which: u64, stream: bool) -> Value {
    let ids: Vec<u64> = (0..PROMPT).map(|i| 300 + (which * 31 + i * 7919) % 40000).collect();
    json!({"model": "smollm2", "prompt": ids, "max_tokens": 24, "temperature": 0, "ignore_eos": true, "stream": stream})
}

/// Text of a completion, and how many tokens of its prompt were found in the cache.
#[track_caller]
fn complete(tenant: &Tenant, which: u64) -> (String, u64) {
    let answer = tenant.http.post("/v1/completions", &body(which, false)).ok();
    let text = answer["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("no text: {answer}"));
    let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    (text.to_owned(), cached.unwrap_or_else(|| panic!("no cached_tokens: {answer}")))
}

fn worker(daemon: &Daemon) -> Process {
    let pid = daemon.model()["worker_pid"].as_u64().expect("worker_pid") as u32;
    Process::find(pid).expect("the worker lives")
}

/// SIGKILLs the daemon under its keeper, and waits until the next one serves. The worker of the first is gone then.
#[track_caller]
fn kill_daemon(daemon: &mut Daemon, tenant: &Tenant) {
    let worker = worker(daemon);
    let pid = daemon.status()["pid"].as_u64().expect("pid") as u32;
    let old = kill_descendant(daemon.root(), pid);
    wait::until("another daemon answers", Duration::from_mins(1), || {
        !old.lives() && daemon.ctl(&["status"]).code == Some(0)
    });
    daemon.wait_ready();
    assert_ne!(daemon.status()["pid"], pid);
    assert!(!worker.lives(), "two workers have one arena");
    assert_eq!(daemon.model()["weights_reused"], true);
    wait::until("the tenant is ready again", Duration::from_mins(1), || {
        tenant.http.get("/readyz").status == 200
    });
}

/// The operator's metric of this name.
#[track_caller]
fn metric(daemon: &Daemon, name: &str) -> f64 {
    let answer = daemon.ask(&["metrics"]);
    let text = answer["text"].as_str().unwrap_or_else(|| panic!("no metrics: {answer}"));
    let line = text.lines().find(|line| line.split(['{', ' ']).next() == Some(name));
    let value = line.and_then(|line| line.rsplit(' ').next()?.parse().ok());
    value.unwrap_or_else(|| panic!("no {name}:\n{text}"))
}

#[test]
fn after_a_kill_of_the_daemon_every_full_block_of_a_prompt_is_found_again_and_the_text_is_the_same() {
    let mut daemon = Site::new(&smollm2_yaml()).start();
    let acme = daemon.add_tenant("acme", "0%", "100%");
    let globex = daemon.add_tenant("globex", "0%", "100%");
    let before = [1, 2].map(|which| complete(&acme, which));
    assert_eq!(before.each_ref().map(|(_, cached)| *cached), [0, 0]);

    // The kill comes in the middle of other work.
    let mut events = acme.http.stream("/v1/completions", &[], &body(3, true)).events();
    events.next().expect("a first token");
    kill_daemon(&mut daemon, &acme);
    drop(events);

    assert!(metric(&daemon, "pagedd_adopted_blocks_total") >= (2 * FULL / BLOCK) as f64);
    for (which, (text, _)) in (1..).zip(&before) {
        assert_eq!(complete(&acme, which), (text.clone(), FULL), "prompt {which}");
    }
    let (interrupted, cached) = complete(&acme, 3);
    assert_eq!(cached, FULL, "its first token was there, so its prompt was");
    assert_eq!(complete(&globex, 1), (before[0].0.clone(), 0), "another tenant's blocks were used");
    // Without any of this, in a fresh place.
    let other = Site::new(&smollm2_yaml()).start();
    assert_eq!(complete(&other.add_tenant("acme", "0%", "100%"), 3).0, interrupted);
    other.stop();

    // Once more: what was adopted outlives the second daemon, too.
    kill_daemon(&mut daemon, &acme);
    assert_eq!(complete(&acme, 1), (before[0].0.clone(), FULL));
    daemon.wait_idle();
    assert_eq!(daemon.model()["blocks_held"], 0);
    daemon.stop();
}

#[test]
fn a_worker_that_hangs_when_its_daemon_is_killed_is_ended_before_the_next_one_has_its_arena() {
    let mut daemon = Site::new(&smollm2_yaml()).start();
    let acme = daemon.add_tenant("acme", "0%", "100%");
    let (text, _) = complete(&acme, 1);
    // A stopped process does not see that its daemon is gone.
    send(&worker(&daemon), Signal::SIGSTOP);
    kill_daemon(&mut daemon, &acme);
    assert_eq!(complete(&acme, 1), (text, FULL));
    daemon.stop();
}

#[test]
fn a_ledger_record_that_is_torn_stale_or_foreign_is_never_served_and_the_text_is_the_same() {
    let mut daemon = Site::new(&smollm2_yaml()).start();
    let acme = daemon.add_tenant("acme", "0%", "100%");
    let (text, _) = complete(&acme, 1);
    let lies: [(&str, Lie); 6] = [
        ("every record is torn", |ledger| records(ledger).for_each(|record| record[24..].fill(0))),
        ("every record is of an earlier ledger", |ledger| {
            records(ledger).for_each(|record| sign(record, |record| record[8] ^= 1));
        }),
        ("every record is of the block before", |ledger| {
            ledger[HEADER..].rotate_left(RECORD);
        }),
        ("the header is torn", |ledger| ledger[40..HEADER].fill(0)),
        ("the header is of another model", |ledger| sign_header(ledger, |header| header[32] ^= 1)),
        ("the header is of another arena", |ledger| sign_header(ledger, |header| header[48] ^= 1)),
    ];
    for (lie, tell) in lies {
        assert_eq!(complete(&acme, 1).0, text);
        daemon.wait_idle();
        let file = ledger(&daemon);
        let mut bytes = vec![0; file.metadata().expect("its size").len() as usize];
        file.read_exact_at(&mut bytes, 0).expect("read the ledger");
        let full = records(&mut bytes).filter(|record| record[..4] == *b"full").count() as u64;
        assert!(full >= FULL / BLOCK, "{full} records before: {lie}");
        tell(&mut bytes);
        file.write_all_at(&bytes, 0).expect("write the ledger");
        drop(file);

        kill_daemon(&mut daemon, &acme);
        assert_eq!(complete(&acme, 1), (text.clone(), 0), "{lie}");
    }
    // And an honest one.
    kill_daemon(&mut daemon, &acme);
    assert_eq!(complete(&acme, 1), (text, FULL));
    daemon.stop();
}

/// Requests that run when the daemon is killed.
const TOGETHER: usize = 64;

/// Requests that share nothing: their prompts differ from the first token on.
fn asks() -> Vec<Ask> {
    let mut random = Random::new(64);
    let ask = |number: usize| {
        let mut ask = Ask::plain(tiny::MIX, &mut random, 1, 400);
        let prompt = (0..100).map(|i| 100 + (number + i * (7 + number)) % 150);
        ask.body["prompt"] = json!(std::iter::once(3 + number).chain(prompt).collect::<Vec<_>>());
        ask
    };
    (0..TOGETHER).map(ask).collect()
}

/// Runs all of them at once; `beside` runs once each is well under way.
fn all(tenant: &Tenant, asks: &[Ask], beside: impl FnOnce()) -> Vec<Outcome> {
    let barrier = Barrier::new(asks.len() + 1);
    thread::scope(|scope| {
        let run = |(number, ask)| {
            let barrier = &barrier;
            scope.spawn(move || {
                let mut exchange = Exchange::new(&tenant.http, ask, format!("warm-{number}"));
                while exchange.last() < 40 {
                    exchange.advance().unwrap_or_else(|e| panic!("{e}: {}", exchange.so_far()));
                }
                barrier.wait();
                exchange.finish().cloned().unwrap_or_else(|e| panic!("{e}: {}", exchange.so_far()))
            })
        };
        let running: Vec<_> = asks.iter().enumerate().map(run).collect();
        barrier.wait();
        beside();
        running.into_iter().map(|one| one.join().expect("a request")).collect()
    })
}

#[test]
fn of_64_requests_a_daemon_with_warm_arenas_computes_a_block_each_again_at_most_and_one_without_computes_all()
{
    let folder = tempfile::tempdir().expect("a folder for the model");
    let small = tiny::yaml(folder.path());
    let yaml = small.replace("kv_memory: 24576 tokens", "kv_memory: 40960 tokens");
    assert_ne!(yaml, small);
    let asks = asks();
    let undisturbed = {
        let daemon = Site::new(&yaml).start();
        all(&daemon.add_tenant_of(tiny::MIX.model, "acme", "0%", "100%"), &asks, || ())
    };
    let most = TOGETHER as u64 * BLOCK;
    for warm in [true, false] {
        let mut daemon = Site::new(&yaml).start();
        let acme = daemon.add_tenant_of(tiny::MIX.model, "acme", "0%", "100%");
        let outcomes = all(&acme, &asks, || {
            assert_eq!(daemon.model()["running"], TOGETHER as u64, "all of them run");
            if !warm {
                // The next daemon finds no ledger, and makes both anew.
                ledger(&daemon).write_all_at(&[0; HEADER], 0).expect("write the ledger");
            }
            kill_daemon(&mut daemon, &acme);
        });
        assert!(outcomes == undisturbed, "another text: warm {warm}");
        let (again, adopted) = (
            metric(&daemon, "pagedd_recomputed_tokens_total"),
            metric(&daemon, "pagedd_adopted_blocks_total"),
        );
        println!("arenas kept: {warm}; {adopted} blocks adopted, {again} tokens computed again");
        if warm {
            assert!(again <= most as f64, "{again} tokens of {TOGETHER} requests, a block each is {most}");
            assert!(adopted >= (TOGETHER as u64 * 100 / BLOCK) as f64, "{adopted} blocks");
        } else {
            assert!(adopted < 0.5, "{adopted} blocks");
            // What each had of its prompt and answer when it was killed, at least.
            assert!(again >= (TOGETHER * 140) as f64, "{again} tokens");
        }
        daemon.wait_idle();
        assert_eq!(daemon.model()["blocks_held"], 0);
        daemon.stop();
    }
}

/// The ledger, which the keeper holds.
fn ledger(daemon: &Daemon) -> File {
    let fds = fs::read_dir(format!("/proc/{}/fd", daemon.root())).expect("the keeper's fds");
    let paths = fds.filter_map(|entry| Some(entry.ok()?.path()));
    let is_ledger = |path: &std::path::PathBuf| {
        fs::read_link(path).is_ok_and(|target| target.to_string_lossy().contains("pagedd-ledger"))
    };
    let found: Vec<_> = paths.filter(is_ledger).collect();
    let [path] = &found[..] else { panic!("ledgers of one model: {found:?}") };
    OpenOptions::new().read(true).write(true).open(path).expect("open the ledger")
}

fn records(ledger: &mut [u8]) -> std::slice::ChunksExactMut<'_, u8> {
    ledger[HEADER..].chunks_exact_mut(RECORD)
}

/// Changes a record, and makes its checksum right.
fn sign(record: &mut [u8], change: impl Fn(&mut [u8])) {
    change(record);
    let crc = crc32(&record[8..]);
    record[4..8].copy_from_slice(&crc.to_le_bytes());
}

/// Changes the header, and makes its checksum right.
fn sign_header(ledger: &mut [u8], change: impl Fn(&mut [u8])) {
    change(ledger);
    let crc = crc32(&ledger[..80]);
    ledger[80..84].copy_from_slice(&crc.to_le_bytes());
}

/// CRC-32 of IEEE 802.3.
fn crc32(bytes: &[u8]) -> u32 {
    let shift = |crc: u32| crc >> 1 ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 };
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| shift(crc)))
}
