//! The disk fills up while requests run, and has room again later.

mod tiny;

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::thread;
use std::time::Duration;

use pagedd_tests::asks::Ask;
use pagedd_tests::daemon::{Daemon, Site};
use pagedd_tests::exchange::Exchange;
use pagedd_tests::process::kill_descendant;
use pagedd_tests::random::Random;
use pagedd_tests::wait;
use serde_json::json;

/// A change of the journal's state is seen by then.
const CHANGE: Duration = Duration::from_secs(30);

fn is_durable(daemon: &Daemon) -> bool {
    let metrics = daemon.ask(&["metrics"]);
    let gauge = metrics["text"]
        .as_str()
        .and_then(|text| text.lines().find_map(|l| l.strip_prefix("pagedd_durable ")));
    gauge.unwrap_or_else(|| panic!("no gauge: {metrics}")).starts_with('1')
}

/// Takes all room that is left on the state directory's file system.
fn fill(daemon: &Daemon) {
    let path = daemon.state().join("ballast");
    let mut file =
        OpenOptions::new().create(true).append(true).open(path).expect("a file in the state directory");
    while file.write_all(&[0; 4096]).is_ok() {}
}

#[test]
fn a_full_disk_stops_nothing_and_what_ran_through_it_survives_the_daemon() {
    let folder = tempfile::tempdir().expect("a folder for the model");
    let daemon = Site::new(&tiny::yaml(folder.path())).with_small_disk("12m").start();
    let acme = daemon.add_tenant_of(tiny::MIX.model, "acme", "10%", "90%");
    let mut random = Random::new(6);
    let mut long = Ask::plain(tiny::MIX, &mut random, 8, 8_000);
    long.body["temperature"] = json!(0.8);
    long.body["seed"] = json!(6);
    let others: Vec<Ask> = (0..8).map(|_| Ask::plain(tiny::MIX, &mut random, 20, 64)).collect();
    let rounds = |name: &str| {
        thread::scope(|scope| {
            for (i, ask) in others.iter().enumerate() {
                let acme = &acme;
                scope.spawn(move || {
                    let mut exchange = Exchange::new(&acme.http, ask, format!("{name}-{i}"));
                    exchange.finish().unwrap_or_else(|e| panic!("{name}: {e}"));
                });
            }
        });
    };
    assert!(is_durable(&daemon));

    let mut exchange = Exchange::new(&acme.http, &long, "long".into());
    assert_eq!(exchange.advance(), Ok(true));
    fill(&daemon);
    wait::until("the gauge says that nothing is durable", CHANGE, || {
        fill(&daemon);
        !is_durable(&daemon)
    });
    // Each of these is accepted and answered although nothing can be written.
    rounds("full");
    assert!(!is_durable(&daemon), "it is durable again without room");
    assert_eq!(exchange.advance(), Ok(true), "the long stream goes on");

    fs::remove_file(daemon.state().join("ballast")).expect("make room");
    wait::until("the gauge says that all is durable again", CHANGE, || is_durable(&daemon));
    assert_eq!(daemon.model()["running"], 1, "the long request was to live through it");
    let pid = daemon.status()["pid"].as_u64().expect("pid") as u32;
    kill_descendant(daemon.root(), pid);
    println!("killed when event {} had come", exchange.last());
    let under = exchange.finish().unwrap_or_else(|e| panic!("{e}")).clone();
    assert!(exchange.broken > 0, "the daemon's death broke no connection");
    let mut undisturbed = Exchange::new(&acme.http, &long, "undisturbed".into());
    assert_eq!(*undisturbed.finish().unwrap_or_else(|e| panic!("{e}")), under);
    rounds("after");
    daemon.wait_idle();
    assert_eq!(daemon.model()["blocks_held"], 0);
    daemon.stop();
}

#[test]
fn a_daemon_that_starts_on_a_full_disk_goes_on_with_what_it_finds_serves_and_is_durable_once_there_is_room() {
    let folder = tempfile::tempdir().expect("a folder for the model");
    let mut daemon = Site::new(&tiny::yaml(folder.path())).with_small_disk("12m").start();
    let acme = daemon.add_tenant_of(tiny::MIX.model, "acme", "10%", "90%");
    let mut random = Random::new(7);
    let mut long = Ask::plain(tiny::MIX, &mut random, 8, 8_000);
    long.body["temperature"] = json!(0.8);
    long.body["seed"] = json!(7);
    let short = Ask::plain(tiny::MIX, &mut random, 20, 64);
    let mut exchange = Exchange::new(&acme.http, &long, "long".into());
    assert_eq!(exchange.advance(), Ok(true));
    wait::until("the gauge says that nothing is durable", CHANGE, || {
        fill(&daemon);
        !is_durable(&daemon)
    });
    let pid = daemon.status()["pid"].as_u64().expect("pid") as u32;
    let old = kill_descendant(daemon.root(), pid);
    wait::until("another daemon answers", CHANGE, || !old.lives() && daemon.ctl(&["status"]).code == Some(0));
    daemon.wait_ready();
    let ask = |name: &str| {
        let mut exchange = Exchange::new(&acme.http, &short, name.to_owned());
        exchange.finish().unwrap_or_else(|e| panic!("{name}: {e}")).clone()
    };
    wait::until("the tenant is served", CHANGE, || acme.http.get("/readyz").status == 200);
    let full = ask("full");
    assert!(!is_durable(&daemon), "it is durable without room");
    fs::remove_file(daemon.state().join("ballast")).expect("make room");
    wait::until("the gauge says that all is durable again", CHANGE, || is_durable(&daemon));
    assert_eq!(ask("room"), full);
    let through = exchange.finish().unwrap_or_else(|e| panic!("{e}")).clone();
    let mut undisturbed = Exchange::new(&acme.http, &long, "undisturbed".into());
    assert_eq!(*undisturbed.finish().unwrap_or_else(|e| panic!("{e}")), through);
    daemon.stop();
}
