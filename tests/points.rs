//! Requests and places at which a process ends, again and again: who pays for it.

use std::path::Path;
use std::thread;
use std::time::Duration;

use pagedd_model::testing::{TinyModel, write_gguf};
use pagedd_tests::daemon::{Daemon, Site, Tenant, model_yaml};
use pagedd_tests::http::{Event, Events, Incoming, whole_text};
use pagedd_tests::process::kill_descendant;
use pagedd_tests::wait;
use serde_json::json;

/// A token that no other prompt has and that no model says in these tests: it ends what it is aimed at.
const DEADLY: u32 = 268;

/// A generated model of two layers, with room for 64 requests at once.
fn yaml(folder: &Path) -> String {
    let path = folder.join("tiny.gguf");
    write_gguf(&path, 41, &TinyModel { context: 1024, ..TinyModel::default() }).expect("write the model");
    model_yaml("tiny", &path, "kv_memory: 16384 tokens\n    max_num_seqs: 64\n    threads: 1")
}

#[track_caller]
fn open(tenant: &Tenant, first: u32, max_tokens: u32) -> Events {
    let prompt: Vec<u32> =
        std::iter::once(first).chain((0..20).map(|i| 100 + (first * 7 + i) % 50)).collect();
    let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true, "stream": true});
    tenant.http.stream("/v1/completions", &[("pagedd-resumable", "1")], &body).events()
}

/// The text of each of 63 requests, run together.
fn together(tenant: &Tenant, beside: impl FnOnce() + Send) -> Vec<String> {
    thread::scope(|scope| {
        let neighbours: Vec<_> =
            (0..63).map(|i| scope.spawn(move || whole_text(open(tenant, 200 + i, 48)))).collect();
        scope.spawn(beside);
        neighbours.into_iter().map(|neighbour| neighbour.join().expect("a request")).collect()
    })
}

#[test]
fn a_request_that_kills_its_worker_each_time_fails_alone_and_its_63_neighbours_say_the_same() {
    let folder = tempfile::tempdir().expect("a folder");
    for depth in [1, 2] {
        one_kills_its_worker(&yaml(folder.path()), depth);
    }
}

/// Where a worker is given so many plans at a time.
#[track_caller]
fn one_kills_its_worker(yaml: &str, depth: usize) {
    let daemon = Site::new(yaml).with_points(format!("plan=return({DEADLY})")).with_depth(depth).start();
    let acme = daemon.add_tenant_of("tiny", "acme", "0%", "100%");
    let undisturbed = together(&acme, || ());
    assert_eq!(daemon.model()["restarts"], 0, "a neighbour says the deadly token");
    let disturbed = together(&acme, || {
        let events: Vec<Event> = open(&acme, DEADLY, 48).collect();
        let end = format!("{:?}", events.last());
        assert!(events.iter().any(|event| event.data.contains("error")), "it did not fail: {end}");
    });
    assert_eq!(disturbed, undisturbed);
    let restarts = daemon.model()["restarts"].as_u64().expect("restarts");
    println!("{restarts} workers died, {depth} plans at a time");
    assert!((1..=9).contains(&restarts), "{restarts} workers died");
    daemon.wait_idle();
    assert_eq!(daemon.model()["blocks_held"], 0);
    daemon.stop();
}

fn kill(daemon: &Daemon) {
    let pid = daemon.status()["pid"].as_u64().expect("pid") as u32;
    kill_descendant(daemon.root(), pid);
}

#[test]
fn a_request_at_whose_readmission_two_daemons_end_is_set_aside_and_the_others_go_on() {
    let folder = tempfile::tempdir().expect("a folder");
    // The sixth daemon ends while it sets the request aside, and the seventh cannot write that.
    let of_start = ["", "", "", "", "", "journal-set-aside=panic", "journal-set-aside=1*return"];
    let site = Site::new(&yaml(folder.path())).with_points(format!("readmit=return({DEADLY})"));
    let mut daemon = site.with_points_by_start(&of_start).start();
    let acme = daemon.add_tenant_of("tiny", "acme", "0%", "100%");
    let undisturbed = whole_text(open(&acme, 200, 900));
    let mut streams = [open(&acme, 200, 900), open(&acme, DEADLY, 900), open(&acme, 200, 900)];
    let ids =
        streams.each_ref().map(|s| s.header("pagedd-request-id").expect("pagedd-request-id").to_owned());
    for stream in &mut streams {
        stream.next().expect("it has begun");
    }
    kill(&daemon);
    drop(streams);
    wait::until("a daemon stays", Duration::from_mins(1), || {
        daemon.site().log_text().contains("its client is not told") && daemon.ctl(&["status"]).code == Some(0)
    });
    kill(&daemon);
    wait::until("another one stays", Duration::from_mins(1), || {
        daemon.site().starts() == 8 && daemon.ctl(&["status"]).code == Some(0)
    });
    daemon.wait_ready();
    let [before, deadly, after] = ids.each_ref().map(|id| {
        let path = format!("/v1/requests/{id}/stream");
        let mut events = None;
        wait::until("the request can be attached to", Duration::from_mins(1), || {
            let again = acme.http.open("GET", &path, &[("last-event-id", "0")], b"");
            let found = again.status == 200;
            events = found.then(|| again.events());
            found
        });
        events.expect("attached").collect::<Vec<Event>>()
    });
    let text = |events: &[Event]| events.iter().map(Event::text).collect::<String>();
    assert_eq!(text(&before), undisturbed);
    assert_eq!(text(&after), undisturbed);
    assert!(deadly.iter().any(|event| event.data.contains("error")), "it did not fail: {:?}", deadly.last());
    daemon.wait_idle();
    assert_eq!(daemon.model()["blocks_held"], 0);
    daemon.stop();
}

#[test]
fn a_daemon_that_ends_between_commit_and_delivery_has_lost_and_doubled_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = yaml(folder.path());
    let undisturbed = {
        let daemon = Site::new(&config).start();
        let acme = daemon.add_tenant_of("tiny", "acme", "0%", "100%");
        whole_text(open(&acme, 200, 200))
    };
    for point in ["before-append", "after-append", "before-delivery", "before-accepted"] {
        // One visit in 50 ends the daemon.
        let mut daemon = Site::new(&config).with_points(format!("{point}=2%panic")).start();
        let acme = daemon.add_tenant_of("tiny", "acme", "0%", "100%");
        let mut id: Option<String> = None;
        let (mut text, mut cursor) = (String::new(), "0".to_owned());
        let mut ended = false;
        wait::until("the request ends", Duration::from_mins(2), || {
            let answer = match &id {
                None => {
                    let prompt: Vec<u32> =
                        std::iter::once(200).chain((0..20).map(|i| 100 + (1400 + i) % 50)).collect();
                    let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 200, "temperature": 0, "ignore_eos": true, "stream": true});
                    let headers = [("content-type", "application/json"), ("pagedd-resumable", "1")];
                    acme.http.send("POST", "/v1/completions", &headers, body.to_string().as_bytes())
                }
                Some(id) => {
                    let path = format!("/v1/requests/{id}/stream");
                    acme.http.send("GET", &path, &[("last-event-id", &cursor)], b"")
                }
            };
            let answer = answer.ok().and_then(Incoming::try_read_head);
            let Some(answer) = answer.filter(|answer| answer.status == 200) else { return false };
            let events = answer.events();
            id = events.header("pagedd-request-id").map(str::to_owned).or(id.take());
            for event in events {
                ended |= event.data == "[DONE]";
                text += &event.text();
                cursor = event.id.unwrap_or(cursor.clone());
            }
            ended
        });
        assert_eq!(text, undisturbed, "{point}");
        daemon.wait_ready();
        daemon.stop();
    }
}
