//! Memory: nothing leaks, the daemon is small, and no tenant's text is in it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use pagedd_tests::daemon::{Daemon, Site, Tenant, model_yaml, smollm2_yaml};
use pagedd_tests::model::smollm2;
use pagedd_tests::process::Memory;
use pagedd_tests::random::Random;
use pagedd_tests::wait;
use serde_json::json;

/// Largest resident size of the daemon.
const DAEMON_LIMIT_KIB: u64 = 40 << 10;

/// Sends `count` short requests, of which about a third is cancelled at random places, `together` at a time over both
/// tenants.
fn requests(tenants: &[Tenant; 2], count: u32, together: u64, seed: u64) {
    let next = AtomicU32::new(0);
    thread::scope(|scope| {
        for worker in 0..together {
            let next = &next;
            scope.spawn(move || {
                let mut random = Random::new(seed * 1000 + worker);
                while next.fetch_add(1, Ordering::Relaxed) < count {
                    one(&tenants[random.below(2) as usize], &mut random);
                }
            });
        }
    });
}

fn one(tenant: &Tenant, random: &mut Random) {
    // One full block of ten kinds, which is found in the cache as a rule, and a few tokens more.
    let kind = 300 + random.below(10) * 997;
    let ids: Vec<u64> = (0..16).map(|i| kind + i).chain((0..=random.below(4)).map(|i| 700 + i)).collect();
    let body = json!({"model": "smollm2", "prompt": ids, "max_tokens": 1 + random.below(3), "n": 1 + random.below(2), "stream": true});
    let incoming = tenant.http.stream("/v1/completions", &[], &body);
    let mut events = incoming.events();
    if random.below(3) == 0 {
        for _ in 0..random.below(3) {
            events.next();
        }
        events.leave();
    } else {
        assert_eq!(events.last().map(|e| e.data), Some("[DONE]".to_owned()));
    }
}

fn memories(daemon: &Daemon) -> BTreeMap<(u32, String), Memory> {
    daemon.processes().iter().map(|p| ((p.pid, p.name.clone()), p.memory())).collect()
}

/// What each process has once nothing goes on any more: what was kept for a moment after the last request is gone, and the journal is tidied up,
/// which it does within 5 s. What leaks stays.
fn settled(daemon: &Daemon) -> BTreeMap<(u32, String), Memory> {
    const QUIET: Duration = Duration::from_secs(6);
    let own = |memories: &BTreeMap<(u32, String), Memory>| -> Vec<u64> {
        memories.values().map(Memory::own_kib).collect()
    };
    let (mut last, mut since) = (memories(daemon), Instant::now());
    wait::until("memory settles", Duration::from_secs(30), || {
        let now = memories(daemon);
        if own(&now) != own(&last) {
            since = Instant::now();
        }
        last = now;
        since.elapsed() >= QUIET
    });
    last
}

/// Whether each process has what it had, to 2 %.
fn are_equal(early: &BTreeMap<(u32, String), Memory>, late: &BTreeMap<(u32, String), Memory>) -> bool {
    let equal = |a: u64, b: u64| a.abs_diff(b) * 50 <= a;
    early.len() == late.len()
        && early.iter().all(|(process, before)| {
            late.get(process).is_some_and(|after| equal(before.own_kib(), after.own_kib()))
        })
}

/// Requests in all: two thousand, or what `PAGEDD_REQUESTS` says, for a long look.
fn count() -> u32 {
    std::env::var("PAGEDD_REQUESTS").map_or(2000, |count| count.parse().expect("a number of requests"))
}

#[test]
fn bug_42_two_thousand_requests_with_random_cancels_leave_memory_and_blocks_as_they_were() {
    // A pool that 500 requests touch as a whole, and nothing kept of a request that has ended.
    let pool = "kv_memory: 1024 tokens\n    max_model_len: 256\n    max_num_seqs: 40";
    let yaml = format!("retention: 0s\nreattach_grace: 0s\n{}", model_yaml("smollm2", &smollm2(), pool));
    let daemon = Site::new(&yaml).start();
    let tenants = [daemon.add_tenant("acme", "20%", "60%"), daemon.add_tenant("globex", "20%", "60%")];
    // The busiest part comes first: tables and queues reach their size in it.
    requests(&tenants, 500, 32, 1);
    daemon.wait_idle();
    let early = settled(&daemon);
    requests(&tenants, count() - 500, 16, 2);
    daemon.wait_idle();
    let late = settled(&daemon);

    let model = daemon.model();
    let number = |name: &str| model[name].as_u64().unwrap_or_else(|| panic!("{name}: {model}"));
    assert_eq!(number("blocks_held"), 0, "{model}");
    assert_eq!(number("blocks_free") + number("blocks_cached"), number("blocks_total"), "{model}");
    let cached: u64 = tenants
        .iter()
        .map(|t| daemon.tenant_info(&t.name)["share"]["cached_blocks"].as_u64().expect("cached_blocks"))
        .sum();
    assert_eq!(cached, number("blocks_cached"), "{model}");

    for (process, before) in &early {
        let after = late.get(process).map(Memory::own_kib);
        println!(
            "{process:?}: RssAnon + RssShmem + VmSwap {} KiB after 500 requests, {after:?} KiB after {}",
            before.own_kib(),
            count()
        );
    }
    assert!(are_equal(&early, &late), "memory differs by more than 2 %: {early:#?}, then {late:#?}");
    daemon.stop();
}

#[test]
fn the_daemon_stays_under_40_mb_and_never_holds_a_tenants_text() {
    let daemon = Site::new(&smollm2_yaml()).start();
    let acme = daemon.add_tenant("acme", "0%", "100%");
    // Put together here, so that no command line or file of the test holds it.
    let canary = ["zq", "canary", "7f3a", "wren"].join("-");
    let prompt = format!("My password is {canary} and I will repeat it: {canary}");
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| acme.complete(&prompt, 24));
        }
    });
    let message =
        json!({"model": "smollm2", "max_tokens": 16, "messages": [{"role": "user", "content": prompt}]});
    acme.http.post("/v1/chat/completions", &message).ok();

    let pid = daemon.status()["pid"].as_u64().expect("pid") as u32;
    let gateway = daemon.tenant_info("acme")["gateway"]["pid"].as_u64().expect("pid") as u32;
    let processes = daemon.processes();
    let find = |pid: u32| {
        processes.iter().find(|p| p.pid == pid).unwrap_or_else(|| panic!("no {pid} in {processes:#?}"))
    };
    assert!(find(pid).holds(b"pagedd"), "the search finds nothing at all");
    assert!(find(gateway).holds(b"pagedd"), "the search finds nothing at all");
    assert!(!find(pid).holds(canary.as_bytes()), "the daemon holds a tenant's text");
    let memory = find(pid).memory();
    println!("daemon: {memory:?}");
    assert!(memory.resident_kib < DAEMON_LIMIT_KIB, "the daemon has {memory:?}");
    let log = daemon.stop().log_text();
    assert!(!log.contains(&canary), "the log holds a tenant's text");
}
