//! Checkpoints by hand: what goes on elsewhere or after a step back, and what is refused without touching anything.

use std::fs::{self, OpenOptions};
use std::net::TcpListener;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pagedd_model::testing::{TinyModel, write_gguf};
use pagedd_tests::daemon::{Daemon, Site, Tenant, free_ports, model_yaml};
use pagedd_tests::http::{Event, Events, whole_text};
use pagedd_tests::process::kill_descendant;
use pagedd_tests::wait;
use serde_json::{Value, json};

/// Tokens in a block.
const BLOCK: f64 = 16.0;
/// Tokens of a prompt, most of them in full blocks.
const PROMPT: u32 = 200;
/// Output tokens of a request: it runs for a while.
const OUTPUT: u32 = 3000;

/// A generated model of two layers, whose weights follow from `seed`.
fn yaml(folder: &Path, seed: u64, options: &str) -> String {
    let path = folder.join(format!("tiny-{seed}.gguf"));
    write_gguf(&path, seed, &TinyModel { context: 16_384, ..TinyModel::default() }).expect("write the model");
    let options = format!("kv_memory: 24576 tokens\n    max_model_len: 16384\n    threads: 1\n    {options}");
    model_yaml("tiny", &path, &options)
}

/// Request `which`, resumable. No two have a first block in common.
#[track_caller]
fn open(tenant: &Tenant, which: u32) -> Events {
    let prompt: Vec<u32> = (0..PROMPT).map(|i| 100 + (which * 13 + i * 7) % 150).collect();
    let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0.7, "seed": which, "ignore_eos": true, "stream": true});
    tenant.http.stream("/v1/completions", &[("pagedd-resumable", "1")], &body).events()
}

/// The id of a request that has said something.
#[track_caller]
fn begun(tenant: &Tenant, which: u32) -> String {
    let mut events = open(tenant, which);
    for _ in 0..20 {
        events.next().expect("it has begun");
    }
    events.header("pagedd-request-id").expect("pagedd-request-id").to_owned()
}

/// All that a request has said, read from its beginning.
#[track_caller]
fn attached(tenant: &Tenant, id: &str) -> String {
    let mut events = None;
    wait::until("the request can be attached to", Duration::from_mins(1), || {
        let again =
            tenant.http.open("GET", &format!("/v1/requests/{id}/stream"), &[("last-event-id", "0")], b"");
        let found = again.status == 200;
        events = found.then(|| again.events());
        found
    });
    let events: Vec<Event> = events.expect("attached").collect();
    assert_eq!(events.last().map(|event| event.data.as_str()), Some("[DONE]"), "{:?}", events.last());
    events.iter().map(Event::text).collect()
}

/// A sample of the tenant's metrics: the sum over its labels.
fn metric(tenant: &Tenant, name: &str) -> f64 {
    let text = tenant.http.get("/metrics").text();
    let samples =
        text.lines().filter(|l| l.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '{'])));
    samples.filter_map(|l| l.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

#[track_caller]
fn ready(tenant: &Tenant) {
    wait::until("the tenant is ready", Duration::from_mins(1), || tenant.http.get("/readyz").status == 200);
}

#[track_caller]
fn save(daemon: &Daemon, name: &str, kv: bool) -> PathBuf {
    let mut arguments = vec!["checkpoint", "save", name];
    arguments.extend(kv.then_some("--kv"));
    let saved = daemon.ask(&arguments);
    PathBuf::from(saved["path"].as_str().unwrap_or_else(|| panic!("no path: {saved}")))
}

/// Copies a checkpoint to where it does not end with its daemon's place.
fn carry_off(from: &Path, to: &Path) {
    fs::create_dir(to).expect("a folder");
    for entry in fs::read_dir(from).expect("the checkpoint") {
        let entry = entry.expect("a file");
        fs::copy(entry.path(), to.join(entry.file_name())).expect("copy a file");
    }
}

#[test]
fn requests_that_were_live_in_a_checkpoint_go_on_in_an_empty_place_and_say_what_they_would_have_said() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = yaml(folder.path(), 41, "");
    for kv in [false, true] {
        let daemon = Site::new(&config).start();
        let tenants = ["acme", "globex"].map(|name| daemon.add_tenant_of("tiny", name, "20%", "100%"));
        let requests = || (1..).zip([&tenants[0], &tenants[1], &tenants[0], &tenants[1]]);
        let undisturbed: Vec<String> =
            requests().map(|(which, tenant)| whole_text(open(tenant, which))).collect();
        let ids: Vec<String> = requests().map(|(which, tenant)| begun(tenant, which)).collect();
        let path = save(&daemon, "one", kv);

        let listed = daemon.ask(&["checkpoint", "list"]);
        assert_eq!(listed["checkpoints"][0]["state"]["is"], "complete", "{listed}");
        let shown = daemon.ask(&["checkpoint", "inspect", "one"]);
        let live: Vec<&Value> =
            shown["tenants"].as_array().expect("tenants").iter().map(|tenant| &tenant["live"]).collect();
        assert_eq!(live, [2, 2], "they were to be live: {shown}");
        daemon.ask(&["checkpoint", "verify", "one"]);
        let carried = folder.path().join(format!("carried-{kv}"));
        carry_off(&path, &carried);
        drop(daemon);

        let path = carried.to_str().expect("UTF-8");
        let mut daemon = Site::new(&config).with_arguments(&["--reload-checkpoint", path]).start();
        tenants.iter().for_each(ready);
        for (i, (_, tenant)) in requests().enumerate() {
            assert_eq!(attached(tenant, &ids[i]), undisturbed[i], "request {i}, kv {kv}");
        }
        let recomputed: Vec<f64> =
            tenants.iter().map(|tenant| metric(tenant, "pagedd_recomputed_tokens_total")).collect();
        println!("kv {kv}: recomputed {recomputed:?}");
        let few = |recomputed: &f64| *recomputed <= 2.0 * BLOCK;
        assert!(recomputed.iter().all(|recomputed| few(recomputed) == kv), "{recomputed:?}, kv {kv}");
        daemon.wait_idle();
        assert_eq!(daemon.model()["blocks_held"], 0);

        // The flag was for that start, and not for the one after a death.
        daemon.add_tenant_of("tiny", "later", "0%", "100%");
        let pid = daemon.status()["pid"].clone();
        kill_descendant(daemon.root(), pid.as_u64().expect("pid") as u32);
        wait_for_another(&mut daemon, &pid);
        assert_eq!(daemon.tenant_info("later")["name"], "later");
        daemon.stop();
    }
}

/// Waits until a daemon other than `pid` serves.
#[track_caller]
fn wait_for_another(daemon: &mut Daemon, pid: &Value) {
    wait::until("the next daemon answers", Duration::from_mins(1), || {
        let status = daemon.ctl(&["status"]);
        status.code == Some(0) && serde_json::from_str::<Value>(&status.text).is_ok_and(|s| s["pid"] != *pid)
    });
    daemon.wait_ready();
}

#[test]
fn a_running_daemon_steps_back_to_a_checkpoint_and_keeps_what_it_had() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut daemon = Site::new(&yaml(folder.path(), 41, "")).start();
    let acme = daemon.add_tenant_of("tiny", "acme", "0%", "100%");
    let undisturbed = whole_text(open(&acme, 1));
    let id = begun(&acme, 1);
    save(&daemon, "one", true);
    let later = daemon.add_tenant_of("tiny", "later", "0%", "100%");
    let (root, pid) = (daemon.root(), daemon.status()["pid"].clone());
    whole_text(open(&later, 2));

    daemon.ask(&["checkpoint", "restore", "one"]);
    wait_for_another(&mut daemon, &pid);
    assert_eq!(daemon.root(), root);
    ready(&acme);
    assert_eq!(attached(&acme, &id), undisturbed);
    let tenants = daemon.ask(&["tenant", "list"]);
    assert_eq!(tenants["tenants"].as_array().map(Vec::len), Some(1), "{tenants}");
    let kept: Vec<_> = fs::read_dir(daemon.site().state())
        .expect("the state directory")
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with("before-"))
        .collect();
    assert_eq!(kept.len(), 1, "{kept:?}");
    // The number of the tenant that is gone is given anew, and nothing of it is found under it.
    let newer = daemon.add_tenant_of("tiny", "newer", "0%", "100%");
    whole_text(open(&newer, 2));
    assert!(
        metric(&newer, "pagedd_prefix_cache_hits_total") < BLOCK,
        "{}",
        newer.http.get("/metrics").text()
    );
    assert!(!daemon.site().state().join("restore").exists());
    daemon.stop();
}

/// A daemon's refusal of the flag, in a place where there is a tenant.
#[track_caller]
fn refused(site: Site, path: &Path, words: &[&str]) -> Site {
    let site = site.with_arguments(&["--reload-checkpoint", path.to_str().expect("UTF-8")]);
    let ended = site.run_to_end_within(Duration::from_mins(1));
    ended.refused(words);
    assert_eq!(ended.code, Some(73), "{}", ended.text);
    site.with_arguments(&[])
}

#[test]
fn a_checkpoint_of_something_else_or_damaged_is_refused_by_name_and_nothing_is_touched() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = yaml(folder.path(), 41, "");
    let daemon = Site::new(&config).start();
    let acme = daemon.add_tenant_of("tiny", "acme", "0%", "100%");
    whole_text(open(&acme, 1));
    let path = save(&daemon, "one", true);
    let again = daemon.ctl(&["checkpoint", "save", "one"]);
    again.refused(&["there is a checkpoint `one` already"]);
    daemon.ctl(&["checkpoint", "save", "../one"]).refused(&["is no name of a checkpoint"]);
    let mut site = daemon.stop();

    for (other, words) in [
        (yaml(folder.path(), 41, "block_size: 32"), "model tiny: block_size 32 here, 16 there"),
        (yaml(folder.path(), 41, "dtype: f32"), "model tiny: dtype f32 here, auto there"),
        (yaml(folder.path(), 41, "kv_dtype: f32"), "model tiny: kv_dtype f32 here, f16 there"),
        (yaml(folder.path(), 42, ""), "model tiny: digest "),
        (config.replace("  tiny:", "  small:"), "model tiny is not configured here"),
    ] {
        site.configure(&other);
        site = refused(site, &path, &[words]);
    }
    site.configure(&config);
    let none = folder.path().join("none");
    site = refused(site, &none, &["there is no checkpoint at "]);
    site = refused(site, folder.path(), &["is no checkpoint of pagedd's: it has no manifest.json"]);
    let future = folder.path().join("future");
    carry_off(&path, &future);
    fs::write(future.join("manifest.json"), r#"{"manifest":{"format":9}}"#).expect("write");
    site = refused(site, &future, &["format 1 here, 9 there"]);
    for file in ["kv-tiny", "ledger-tiny", "journal.db", "control.db"] {
        let torn = folder.path().join(format!("torn-{file}"));
        carry_off(&path, &torn);
        let opened = OpenOptions::new().write(true).open(torn.join(file)).expect("the file");
        opened.write_all_at(b"torn", 100).expect("write");
        site = refused(site, &torn, &[&format!("{file}: its SHA-256 is wrong")]);
    }

    // A running daemon refuses it too, and runs on with what it had.
    let daemon = site.start();
    let pid = daemon.status()["pid"].clone();
    let torn = folder.path().join("torn-kv-tiny");
    daemon.ctl(&["checkpoint", "restore", torn.to_str().expect("UTF-8")]).refused(&["kv-tiny: its SHA-256"]);
    daemon.ctl(&["checkpoint", "verify", "two"]).refused(&["there is no checkpoint at "]);
    assert_eq!(daemon.status()["pid"], pid);
    ready(&acme);
    whole_text(open(&acme, 1));
    daemon.ask(&["checkpoint", "verify", "one"]);
    daemon.stop();
}

/// Moves a tenant to another port, once whoever left that has closed it.
#[track_caller]
fn move_to(daemon: &Daemon, name: &str, port: u16) {
    wait::until("the port is free", Duration::from_secs(20), || {
        daemon.ctl(&["tenant", "set", name, "--port", &port.to_string()]).code == Some(0)
    });
}

/// Steps back to a checkpoint, and waits for the next daemon of the same keeper.
#[track_caller]
fn step_back(daemon: &mut Daemon) {
    let (root, pid) = (daemon.root(), daemon.status()["pid"].clone());
    daemon.ask(&["checkpoint", "restore", "one"]);
    wait_for_another(daemon, &pid);
    assert_eq!(daemon.root(), root, "{}", daemon.site().log_text());
}

#[test]
fn whoever_has_the_ports_of_a_checkpoints_tenants_now_they_are_those_tenants_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut daemon = Site::new(&yaml(folder.path(), 41, "")).start();
    let [acme, globex] = ["acme", "globex"].map(|name| daemon.add_tenant_of("tiny", name, "0%", "100%"));
    save(&daemon, "one", false);
    let [other] = free_ports();
    for round in 0..3 {
        if round == 0 {
            // Swapped.
            move_to(&daemon, "acme", other);
            move_to(&daemon, "globex", acme.port);
            move_to(&daemon, "acme", globex.port);
        } else {
            // Another tenant's.
            daemon.ask(&["tenant", "remove", "globex", "--force"]);
            daemon.ask(&["tenant", "add", "initech", "--model", "tiny", "--port", &globex.port.to_string()]);
        }
        step_back(&mut daemon);
        for tenant in [&acme, &globex] {
            ready(tenant);
            assert_eq!(daemon.tenant_info(&tenant.name)["port"], tenant.port, "round {round}");
            whole_text(open(tenant, 1));
        }
    }
    // They are kept under the right names: the next daemon finds them, too.
    let pid = daemon.status()["pid"].clone();
    kill_descendant(daemon.root(), pid.as_u64().expect("pid") as u32);
    wait_for_another(&mut daemon, &pid);
    [&acme, &globex].into_iter().for_each(ready);
    assert!(TcpListener::bind(("127.0.0.1", other)).is_ok(), "port {other} is kept for nobody");
    daemon.stop();
}

#[test]
fn a_checkpoint_one_of_whose_ports_a_stranger_has_is_refused_with_tenant_and_port_and_nothing_is_touched() {
    let folder = tempfile::tempdir().expect("a folder");
    let daemon = Site::new(&yaml(folder.path(), 41, "")).start();
    let acme = daemon.add_tenant_of("tiny", "acme", "0%", "100%");
    let path = save(&daemon, "one", false);
    let [other] = free_ports();
    move_to(&daemon, "acme", other);
    let mut stranger = None;
    wait::until("the port is free", Duration::from_secs(10), || {
        stranger = TcpListener::bind(("127.0.0.1", acme.port)).ok();
        stranger.is_some()
    });
    let words = ["checkpoint ", "tenant `acme`", &format!("port {} of 127.0.0.1 is in use", acme.port)];
    let pid = daemon.status()["pid"].clone();
    daemon.ctl(&["checkpoint", "restore", "one"]).refused(&words);
    assert_eq!((&daemon.status()["pid"], &daemon.tenant_info("acme")["port"]), (&pid, &json!(other)));
    let site = refused(daemon.stop(), &path, &words);
    let daemon = site.start();
    assert_eq!(daemon.tenant_info("acme")["port"], other);
    daemon.stop();
    drop(stranger);
}
