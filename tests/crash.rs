//! Parts die in the middle of work, or clients do: what goes on, and what comes back.

use std::net::TcpStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use pagedd_tests::daemon::{Daemon, Site, Tenant, smollm2_yaml};
use pagedd_tests::http::{Event, Events, whole_text};
use pagedd_tests::process::kill_descendant;
use pagedd_tests::random::Random;
use pagedd_tests::wait;
use serde_json::{Value, json};

const PROMPT: &str = "The lighthouse keeper climbed the stairs, and when he looked out over the sea he saw";

fn body(prompt: &str, max_tokens: u32) -> Value {
    json!({"model": "smollm2", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true, "stream": true})
}

#[track_caller]
fn open(tenant: &Tenant, prompt: &str, max_tokens: u32) -> Events {
    tenant.http.stream("/v1/completions", &[("pagedd-resumable", "1")], &body(prompt, max_tokens)).events()
}

/// Reads on until `count` events with text have come.
fn read_some(events: &mut Events, count: usize) -> Vec<Event> {
    let mut read = Vec::new();
    while read.iter().filter(|e: &&Event| !e.text().is_empty()).count() < count {
        read.push(events.next().expect("the stream goes on"));
    }
    read
}

fn text(events: &[Event]) -> String {
    events.iter().map(Event::text).collect()
}

fn worker_pid(daemon: &Daemon) -> u32 {
    daemon.model()["worker_pid"].as_u64().expect("worker_pid") as u32
}

/// A sample of the tenant's metrics: the sum over its labels.
fn metric(tenant: &Tenant, name: &str) -> f64 {
    let text = tenant.http.get("/metrics").text();
    let samples =
        text.lines().filter(|l| l.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '{'])));
    samples.filter_map(|l| l.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

#[test]
fn a_killed_worker_is_replaced_mid_stream_with_its_weights_kept_and_the_same_text() {
    let mut daemon = Site::new(&smollm2_yaml()).start();
    let acme = daemon.add_tenant("acme", "0%", "100%");
    let undisturbed = whole_text(open(&acme, PROMPT, 96));

    for round in 1..=2 {
        let mut events = open(&acme, PROMPT, 96);
        let mut read = read_some(&mut events, 10);
        let old = kill_descendant(daemon.root(), worker_pid(&daemon));
        read.extend(events);
        assert_eq!(read.last().map(|e| e.data.as_str()), Some("[DONE]"), "{read:#?}");
        assert_eq!(text(&read), undisturbed, "round {round}");
        daemon.wait_ready();
        let model = daemon.model();
        assert_ne!(model["worker_pid"], old.pid, "{model}");
        assert_eq!((&model["weights_reused"], &model["restarts"]), (&json!(true), &json!(round)), "{model}");
    }
    daemon.wait_idle();
    assert_eq!(daemon.model()["blocks_held"], 0);
    daemon.stop();
}

#[test]
fn a_killed_gateway_never_closes_the_port_and_its_stream_is_attached_again_by_cursor() {
    let daemon = Site::new(&smollm2_yaml()).start();
    let acme = daemon.add_tenant("acme", "0%", "100%");
    let globex = daemon.add_tenant("globex", "0%", "100%");
    let undisturbed = whole_text(open(&acme, PROMPT, 96));
    let bystander = whole_text(open(&globex, PROMPT, 64));

    let mut events = open(&acme, PROMPT, 96);
    let mut others = open(&globex, PROMPT, 64);
    let id = events.header("pagedd-request-id").expect("pagedd-request-id").to_owned();
    let mut read = read_some(&mut events, 10);
    let other = read_some(&mut others, 1);
    let pid = daemon.tenant_info("acme")["gateway"]["pid"].as_u64().expect("pid") as u32;
    let old = kill_descendant(daemon.root(), pid);
    wait::until("the gateway is gone", Duration::from_secs(5), || {
        TcpStream::connect(("127.0.0.1", acme.port)).expect("the port is never refused");
        !old.lives()
    });
    // What still lay in the socket has been received, too.
    read.extend(events);
    let cursor = read.iter().rev().find_map(|e| e.id.clone()).expect("events have ids");

    let path = format!("/v1/requests/{id}/stream");
    let again = acme.http.open("GET", &path, &[("last-event-id", &cursor)], b"").events();
    let rest: Vec<Event> = again.collect();
    assert_eq!(rest.last().map(|e| e.data.as_str()), Some("[DONE]"), "{rest:#?}");
    assert_eq!(text(&read) + &text(&rest), undisturbed, "attached after {cursor}");
    assert_eq!(
        text(&other) + &others.map(|e| e.text()).collect::<String>(),
        bystander,
        "another tenant saw it"
    );

    assert_eq!(globex.http.get(&path).status, 404, "another tenant's request is found");
    let info = daemon.tenant_info("acme");
    assert_eq!(info["gateway"]["restarts"], 1, "{info}");
    daemon.stop();
}

#[test]
fn a_killed_daemon_comes_back_with_its_tenants_and_its_ports_were_never_refused() {
    let mut daemon = Site::new(&smollm2_yaml()).start();
    let acme = daemon.add_tenant("acme", "20%", "50%");
    let before = acme.complete(PROMPT, 16);
    let pid = daemon.status()["pid"].as_u64().expect("pid") as u32;
    let old = kill_descendant(daemon.root(), pid);
    wait::until("another daemon answers", Duration::from_mins(1), || {
        TcpStream::connect(("127.0.0.1", acme.port)).expect("the port is never refused");
        !old.lives() && daemon.ctl(&["status"]).code == Some(0)
    });
    daemon.wait_ready();
    assert_ne!(daemon.status()["pid"], pid);
    wait::until("the tenant is ready again", Duration::from_mins(1), || {
        acme.http.get("/readyz").status == 200
    });
    assert_eq!(acme.complete(PROMPT, 16), before);
    daemon.stop();
}

/// Attaches to a request after an event, again and again until its gateway is back, and reads on to the end.
fn attach(tenant: &Tenant, id: &str, cursor: &str) -> Vec<Event> {
    let path = format!("/v1/requests/{id}/stream");
    let mut events = None;
    wait::until("the request can be attached to", Duration::from_mins(1), || {
        let again = tenant.http.open("GET", &path, &[("last-event-id", cursor)], b"");
        let found = again.status == 200;
        events = found.then(|| again.events());
        found
    });
    events.expect("attached").collect()
}

#[test]
fn a_killed_daemons_requests_go_on_with_the_same_text_and_finished_ones_are_still_there() {
    let mut daemon = Site::new(&smollm2_yaml()).start();
    let acme = daemon.add_tenant("acme", "20%", "100%");
    let undisturbed = whole_text(open(&acme, PROMPT, 96));

    let finished = open(&acme, PROMPT, 8);
    let finished_id = finished.header("pagedd-request-id").expect("pagedd-request-id").to_owned();
    let finished_text = whole_text(finished);
    let mut streams: Vec<Events> = (0..4).map(|_| open(&acme, PROMPT, 96)).collect();
    let ids: Vec<String> = streams
        .iter()
        .map(|events| events.header("pagedd-request-id").expect("pagedd-request-id").to_owned())
        .collect();
    let mut read: Vec<Vec<Event>> = streams.iter_mut().map(|events| read_some(events, 5)).collect();
    for _ in 0..2 {
        let pid = daemon.status()["pid"].as_u64().expect("pid") as u32;
        let old = kill_descendant(daemon.root(), pid);
        wait::until("another daemon answers", Duration::from_mins(1), || {
            !old.lives() && daemon.ctl(&["status"]).code == Some(0)
        });
        daemon.wait_ready();
    }
    assert_eq!(daemon.status()["durable"]["is"], "yes");
    for ((id, read), events) in ids.iter().zip(&mut read).zip(streams) {
        // What still lay in the socket has been received, too.
        read.extend(events);
        let cursor = read.iter().rev().find_map(|e| e.id.clone()).expect("events have ids");
        let rest = attach(&acme, id, &cursor);
        assert_eq!(rest.last().map(|e| e.data.as_str()), Some("[DONE]"), "{rest:#?}");
        assert_eq!(text(read) + &text(&rest), undisturbed, "attached after {cursor}");
    }
    let again = attach(&acme, &finished_id, "0");
    assert_eq!(text(&again), finished_text);
    daemon.wait_idle();
    assert_eq!(daemon.model()["blocks_held"], 0);
    daemon.stop();
}

#[test]
fn bug_35_an_open_stream_does_not_hold_up_the_end_of_the_daemon() {
    let daemon = Site::new(&smollm2_yaml()).start();
    let acme = daemon.add_tenant("acme", "0%", "100%");
    let mut events = open(&acme, PROMPT, 1500);
    let read = read_some(&mut events, 3);
    assert!(!read.is_empty());
    let start = Instant::now();
    let reader = thread::spawn(move || events.collect::<Vec<Event>>());
    daemon.stop();
    let took = start.elapsed();
    let rest = reader.join().expect("the reader");
    assert!(took < Duration::from_secs(15), "the end took {took:?}");
    let last = format!("{:?}", rest.iter().rev().take(3).collect::<Vec<_>>());
    assert!(last.contains("detached") || last.contains("[DONE]"), "no final event: {last}");
}

#[test]
fn bug_1_a_client_that_leaves_during_prefill_frees_its_blocks_and_counts_as_aborted() {
    let daemon = Site::new(&smollm2_yaml()).start();
    let acme = daemon.add_tenant("acme", "0%", "100%");
    let aborted = || metric(&acme, "pagedd_aborted_total");
    let before = aborted();
    // 1,800 tokens: several chunks of prefill.
    let ids: Vec<u32> = (0..1800).map(|i| 300 + (i * 7919) % 40000).collect();
    let long =
        json!({"model": "smollm2", "prompt": ids, "max_tokens": 100, "temperature": 0, "stream": true});
    let events = acme.http.stream("/v1/completions", &[], &long).events();
    wait::until("it runs", Duration::from_secs(10), || daemon.model()["running"] == 1);
    events.leave();
    wait::until("it stops", Duration::from_secs(10), || {
        let model = daemon.model();
        model["running"] == 0 && model["waiting"] == 0 && model["blocks_held"] == 0
    });
    let after = aborted();
    assert!((after - before - 1.0).abs() < 0.5, "aborted: {before}, then {after}");
}

#[test]
fn bug_3_cancelled_neighbours_never_change_a_greedy_text() {
    let daemon = Site::new(&smollm2_yaml()).start();
    let acme = daemon.add_tenant("acme", "0%", "100%");
    let prompts: Vec<String> =
        (0..8).map(|i| format!("Chapter {i}. In the year {} the ship", 1800 + i)).collect();
    let alone: Vec<String> = prompts.iter().map(|p| whole_text(open(&acme, p, 24))).collect();
    for round in 0..4 {
        let together: Vec<String> = thread::scope(|scope| {
            let stay: Vec<_> =
                prompts.iter().map(|p| scope.spawn(|| whole_text(open(&acme, p, 24)))).collect();
            for i in 0..8u32 {
                let acme = &acme;
                scope.spawn(move || {
                    let prompt =
                        format!("A letter of the {i}th of May, round {round}, to whom it may concern:");
                    let mut events = acme.http.stream("/v1/completions", &[], &body(&prompt, 64)).events();
                    read_some(&mut events, 1 + i as usize);
                    events.leave();
                });
            }
            stay.into_iter().map(|t| t.join().expect("a request")).collect()
        });
        assert_eq!(together, alone, "round {round}");
    }
    daemon.wait_idle();
    assert_eq!(daemon.model()["blocks_held"], 0);
}

/// Two hundred clients, twenty at a time, each gone after this many events.
fn clients_that_leave(acme: &Tenant, mut after: impl FnMut() -> u64) {
    for _ in 0..10 {
        let leave_after: Vec<u64> = (0..20).map(|_| after()).collect();
        thread::scope(|scope| {
            for (i, after) in leave_after.into_iter().enumerate() {
                scope.spawn(move || {
                    let incoming =
                        acme.http.stream("/v1/completions", &[], &body(&format!("Client {i} says"), 32));
                    if incoming.status != 200 {
                        assert_eq!(incoming.status, 429);
                        return;
                    }
                    let mut events = incoming.events();
                    for _ in 0..after {
                        events.next();
                    }
                    events.leave();
                });
            }
        });
    }
}

#[test]
fn bug_32_two_hundred_clients_that_leave_at_random_cause_no_panic() {
    let daemon = Site::new(&smollm2_yaml()).start();
    let acme = daemon.add_tenant("acme", "0%", "100%");
    let mut random = Random::new(32);
    clients_that_leave(&acme, || random.below(4));
    daemon.wait_idle();
    assert_eq!(daemon.model()["blocks_held"], 0);
    acme.complete("Hello", 2);
    let restarts = &daemon.tenant_info("acme")["gateway"]["restarts"];
    assert_eq!(*restarts, 0);
    let log = daemon.stop().log_text();
    assert!(!log.contains("panicked at"), "{log}");
}

#[test]
fn bug_43_after_a_mass_cancel_gauges_are_0_and_counters_never_fell() {
    let daemon = Site::new(&smollm2_yaml()).start();
    let acme = daemon.add_tenant("acme", "0%", "100%");
    let counters = || -> Vec<(String, f64)> {
        let text = acme.http.get("/metrics").text();
        let samples = text
            .lines()
            .filter(|l| !l.starts_with('#'))
            .filter_map(|l| l.rsplit_once(' '))
            .filter(|(name, _)| name.split('{').next().is_some_and(|n| n.ends_with("_total")));
        samples.map(|(name, value)| (name.to_owned(), value.parse().unwrap_or(f64::NAN))).collect()
    };
    let before = counters();
    clients_that_leave(&acme, || 1);
    daemon.wait_idle();
    let after = counters();
    for (name, value) in before {
        let now = after.iter().find(|(n, _)| *n == name).map(|(_, v)| *v);
        assert!(now.is_some_and(|now| now >= value), "{name}: {value}, then {now:?}");
    }
    let metrics = acme.http.get("/metrics").text();
    for gauge in ["scheduler_running_requests", "vllm:num_requests_running", "vllm:num_requests_waiting"] {
        let line = metrics
            .lines()
            .find(|l| l.starts_with(gauge))
            .unwrap_or_else(|| panic!("no {gauge}:\n{metrics}"));
        assert_eq!(line.rsplit(' ').next().and_then(|v| v.parse::<f64>().ok()), Some(0.0), "{line}");
    }
    let negative = metrics
        .lines()
        .find(|l| !l.starts_with('#') && l.rsplit(' ').next().is_some_and(|v| v.starts_with('-')));
    assert_eq!(negative, None);
}

#[test]
fn a_worker_that_is_killed_while_it_idles_is_replaced_for_the_next_request() {
    let daemon = Site::new(&smollm2_yaml()).start();
    let acme = daemon.add_tenant("acme", "0%", "100%");
    let before = acme.complete(PROMPT, 8);
    daemon.wait_idle();
    let old = kill_descendant(daemon.root(), worker_pid(&daemon));
    wait::until("it is gone", Duration::from_secs(5), || !old.lives());
    assert_eq!(acme.complete(PROMPT, 8), before);
    assert_eq!(daemon.model()["restarts"], 1);
}

#[test]
fn a_worker_that_dies_at_every_start_is_given_up_and_port_and_status_say_so() {
    let daemon = Site::new(&smollm2_yaml()).with_own_programs().start();
    let acme = daemon.add_tenant("acme", "0%", "100%");
    let mut events = open(&acme, PROMPT, 1500);
    read_some(&mut events, 1);
    // From now on every new worker ends at once.
    daemon.site().replace_program("pagedd-worker", Path::new("/bin/false"));
    kill_descendant(daemon.root(), worker_pid(&daemon));
    wait::until("the model is given up", Duration::from_mins(1), || {
        daemon.model()["state"]["is"] == "failed"
    });
    let answer = acme.http.get("/readyz");
    assert_eq!(answer.status, 503, "{}", answer.text());
    acme.http
        .post("/v1/completions", &json!({"model": "smollm2", "prompt": "Hi", "max_tokens": 1}))
        .error(503);
    let last: Vec<Event> = events.collect();
    assert!(
        last.iter().rev().take(2).any(|e| e.data.contains("error")),
        "the open stream ended without an error: {last:?}"
    );
    daemon.stop();
}
