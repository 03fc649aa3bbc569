//! Penalties: what was generated counts as generated, whatever was computed again, and by whom.

mod tiny;

use std::thread;
use std::time::Duration;

use pagedd_tests::asks::{Ask, Outcome};
use pagedd_tests::daemon::{Daemon, Site, Tenant};
use pagedd_tests::exchange::Exchange;
use pagedd_tests::process::kill_descendant;
use pagedd_tests::random::Random;
use pagedd_tests::wait;
use serde_json::json;

/// Requests with penalties of all kinds; greedy and drawn, one choice and three.
fn asks(tokens: u64) -> Vec<Ask> {
    let mut random = Random::new(18);
    let mut ask = |presence: f64, frequency: f64, repetition: f64| {
        let mut ask = Ask::plain(tiny::MIX, &mut random, 12, tokens);
        ask.body["presence_penalty"] = json!(presence);
        ask.body["frequency_penalty"] = json!(frequency);
        ask.body["repetition_penalty"] = json!(repetition);
        ask
    };
    vec![
        ask(1.5, 0.0, 1.0),
        ask(0.0, 0.6, 1.0),
        ask(0.0, 0.0, 1.3),
        ask(0.8, 0.4, 1.1),
        ask(-1.0, 0.2, 0.9).with_choices(1, 5),
        ask(1.5, 0.3, 1.2).with_choices(3, 6),
    ]
}

fn finish(exchange: &mut Exchange<'_>) -> Outcome {
    let finished = exchange.finish().cloned();
    finished.unwrap_or_else(|error| panic!("{error}: {}", exchange.so_far()))
}

fn one_by_one(tenant: &Tenant, asks: &[Ask], name: &str) -> Vec<Outcome> {
    let run = |(i, ask)| finish(&mut Exchange::new(&tenant.http, ask, format!("{name}-{i}")));
    asks.iter().enumerate().map(run).collect()
}

fn together(tenant: &Tenant, asks: &[Ask], name: &str) -> Vec<Outcome> {
    thread::scope(|scope| {
        let run = |(i, ask)| {
            scope.spawn(move || finish(&mut Exchange::new(&tenant.http, ask, format!("{name}-{i}"))))
        };
        let running: Vec<_> = asks.iter().enumerate().map(run).collect();
        running.into_iter().map(|one| one.join().expect("a request")).collect()
    })
}

#[track_caller]
fn assert_same(found: &[Outcome], expected: &[Outcome], when: &str) {
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(found.says_the_same(expected), "request {i} {when}: {found:#?}, alone {expected:#?}");
    }
}

fn preemptions(daemon: &Daemon) -> u64 {
    let answer = daemon.ask(&["metrics"]);
    let text = answer["text"].as_str().expect("metrics");
    let lines = text.lines().filter(|line| line.starts_with("pagedd_preemptions_total"));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>() as u64
}

#[test]
fn bug_18_after_preemption_penalties_take_what_was_generated_for_output_and_the_text_is_the_same() {
    let folder = tempfile::tempdir().expect("a folder for the model");
    for prefix_cache in [false, true] {
        let small = format!(
            "kv_memory: 480 tokens\n    prefix_cache: {prefix_cache}\n    prompt_lookup: false\n    max_model_len: 400"
        );
        let yaml =
            tiny::yaml(folder.path()).replace("kv_memory: 24576 tokens\n    max_model_len: 16384", &small);
        assert!(yaml.contains("480 tokens"), "{yaml}");
        let daemon = Site::new(&yaml).start();
        let acme = daemon.add_tenant_of(tiny::MIX.model, "acme", "0%", "100%");
        let asks = asks(80);
        let alone = one_by_one(&acme, &asks, "alone");
        assert_eq!(preemptions(&daemon), 0, "alone each has room");
        // On a busy machine they may come one after the other.
        let mut rounds = 0;
        while preemptions(&daemon) == 0 {
            assert!(rounds < 50, "nothing was preempted");
            let found = together(&acme, &asks, &format!("together-{rounds}"));
            assert_same(&found, &alone, "in a pool that is too small");
            rounds += 1;
        }
        println!("prefix cache {prefix_cache}: {} preemptions in {rounds} rounds", preemptions(&daemon));
        // They do something, and it is not what a prompt of the same tokens would do.
        let mut plain = asks[0].clone();
        plain.body["presence_penalty"] = json!(0);
        let unpunished = one_by_one(&acme, &[plain], "plain");
        assert!(!unpunished[0].says_the_same(&alone[0]), "a penalty changes nothing");
        daemon.wait_idle();
        assert_eq!(daemon.model()["blocks_held"], 0);
        daemon.stop();
    }
}

#[test]
fn bug_18_after_a_kill_of_worker_and_daemon_penalties_take_what_was_generated_for_output() {
    let folder = tempfile::tempdir().expect("a folder for the model");
    let mut daemon = Site::new(&tiny::yaml(folder.path())).start();
    let acme = daemon.add_tenant_of(tiny::MIX.model, "acme", "0%", "100%");
    // Long enough that all of them run when the kill comes.
    let asks = asks(3000);
    let alone = one_by_one(&acme, &asks, "alone");
    for part in ["worker", "daemon"] {
        let mut exchanges: Vec<_> = asks
            .iter()
            .enumerate()
            .map(|(i, ask)| Exchange::new(&acme.http, ask, format!("{part}-{i}")))
            .collect();
        for exchange in &mut exchanges {
            exchange.send().expect("it is sent");
        }
        for exchange in &mut exchanges {
            for _ in 0..20 {
                assert_eq!(exchange.advance(), Ok(true), "{}", exchange.so_far());
            }
        }
        // What is shown is of some moments ago.
        wait::until("they are seen to run", Duration::from_secs(1), || {
            daemon.model()["running"].as_u64() > Some(0)
        });
        let pid = match part {
            "worker" => daemon.model()["worker_pid"].clone(),
            _ => daemon.status()["pid"].clone(),
        };
        let old = kill_descendant(daemon.root(), pid.as_u64().expect("pid") as u32);
        let outcomes: Vec<_> = exchanges.iter_mut().map(finish).collect();
        assert_same(&outcomes, &alone, &format!("after a kill of the {part}"));
        wait::until("it is replaced", Duration::from_mins(1), || {
            !old.lives() && daemon.ctl(&["status"]).code == Some(0)
        });
        daemon.wait_ready();
    }
    daemon.wait_idle();
    assert_eq!(daemon.model()["blocks_held"], 0);
    daemon.stop();
}
