//! What a restart of the daemon makes of requests that something is wrong with: themselves, their model, their tenant.

use std::path::Path;
use std::time::{Duration, Instant};

use pagedd_model::testing::{TinyModel, write_gguf};
use pagedd_tests::daemon::{DRAIN, Daemon, Site, Tenant, model_yaml};
use pagedd_tests::http::{Event, Events, Incoming};
use pagedd_tests::process::kill_descendant;
use pagedd_tests::wait;
use serde_json::{Value, json};

/// The first token of the prompt that ends daemons.
const DEADLY: u32 = 268;

fn write(folder: &Path, seed: u64) {
    let path = folder.join("tiny.gguf");
    write_gguf(&path, seed, &TinyModel { context: 4096, ..TinyModel::default() }).expect("write the model");
}

/// A generated model of two layers.
fn yaml(folder: &Path) -> String {
    let options = "kv_memory: 32768 tokens\n    max_num_seqs: 16\n    threads: 1";
    model_yaml("tiny", &folder.join("tiny.gguf"), options)
}

fn body(first: u32, prompt: u32, max_tokens: u32) -> Value {
    let ids: Vec<u32> =
        std::iter::once(first).chain((1..prompt).map(|i| 100 + (first * 7 + i * 31) % 150)).collect();
    json!({
        "model": "tiny", "prompt": ids, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true,
        "stream": true, "stream_options": {"include_usage": true}
    })
}

/// The answer to a request, whatever it is, and the request's id.
#[track_caller]
fn ask(tenant: &Tenant, body: &Value) -> (Incoming, String) {
    let answer = tenant.http.stream("/v1/completions", &[("pagedd-resumable", "1")], body);
    let id = answer.header("pagedd-request-id").expect("pagedd-request-id").to_owned();
    (answer, id)
}

/// A request whose stream has begun.
#[track_caller]
fn open(tenant: &Tenant, body: &Value) -> (Events, String) {
    let (answer, id) = ask(tenant, body);
    let mut events = answer.events();
    events.next().expect("it has begun");
    (events, id)
}

fn kill(daemon: &Daemon) {
    let pid = daemon.status()["pid"].as_u64().expect("pid") as u32;
    let old = kill_descendant(daemon.root(), pid);
    wait::until("another daemon answers", Duration::from_mins(1), || {
        !old.lives() && daemon.ctl(&["status"]).code == Some(0)
    });
}

/// The whole stream of a request, from its begin to its end.
fn whole(tenant: &Tenant, id: &str) -> Vec<Event> {
    let path = format!("/v1/requests/{id}/stream");
    let mut events = None;
    wait::until("the request can be attached to", Duration::from_mins(1), || {
        let again = tenant.http.open("GET", &path, &[("last-event-id", "0")], b"");
        let found = again.status == 200;
        events = found.then(|| again.events());
        found
    });
    events.expect("attached").collect()
}

fn text(events: &[Event]) -> String {
    events.iter().map(Event::text).collect()
}

/// The usage at the end of a stream.
#[track_caller]
fn usage(events: &[Event]) -> Value {
    let data = events.iter().rev().find_map(|event| {
        let data: Value = serde_json::from_str(&event.data).ok()?;
        data["usage"].is_object().then(|| data["usage"].clone())
    });
    data.unwrap_or_else(|| panic!("no usage: {:?}", events.last()))
}

#[test]
fn a_request_with_which_daemons_end_in_a_later_step_is_set_aside_and_the_others_go_on() {
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path(), 41);
    let undisturbed = {
        let daemon = Site::new(&yaml(folder.path())).start();
        let acme = daemon.add_tenant_of("tiny", "acme", "0%", "100%");
        let (_, id) = open(&acme, &body(200, 20, 900));
        text(&whole(&acme, &id))
    };
    let mut daemon = Site::new(&yaml(folder.path())).with_points(format!("commit=return({DEADLY})")).start();
    let acme = daemon.add_tenant_of("tiny", "acme", "0%", "100%");
    let (_first, before) = open(&acme, &body(200, 20, 900));
    let (_second, beside) = open(&acme, &body(200, 20, 900));
    // The last, and with no event to wait for: daemons may begin to end before it is answered, with a stream or with 503.
    let (_third, deadly) = ask(&acme, &body(DEADLY, 20, 900));
    wait::until("a daemon stays", Duration::from_mins(2), || {
        daemon.site().log_text().contains("it is set aside") && daemon.ctl(&["status"]).code == Some(0)
    });
    daemon.wait_ready();
    assert_eq!(text(&whole(&acme, &before)), undisturbed);
    assert_eq!(text(&whole(&acme, &beside)), undisturbed);
    let deadly = whole(&acme, &deadly);
    assert!(deadly.iter().any(|event| event.data.contains("error")), "it did not fail: {:?}", deadly.last());
    let metrics = daemon.ask(&["metrics"])["text"].to_string();
    assert!(metrics.contains("pagedd_requests_set_aside_total 1"), "{metrics}");
    daemon.wait_idle();
    assert_eq!(daemon.model()["blocks_held"], 0);
    daemon.stop();
}

#[test]
fn usage_after_a_kill_of_the_daemon_is_what_it_would_have_been() {
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path(), 41);
    let mut daemon = Site::new(&yaml(folder.path())).start();
    let acme = daemon.add_tenant_of("tiny", "acme", "0%", "100%");
    let (_first, cold) = open(&acme, &body(200, 100, 2000));
    let (_second, warm) = open(&acme, &body(200, 100, 2000));
    kill(&daemon);
    daemon.wait_ready();
    let [cold, warm] = [cold, warm].map(|id| usage(&whole(&acme, &id)));
    assert_eq!(cold["prompt_tokens_details"]["cached_tokens"], 0, "its own blocks count: {cold}");
    assert_eq!(warm["prompt_tokens_details"]["cached_tokens"], 96, "{warm}");
    assert_eq!(cold["completion_tokens"], 2000);
    daemon.stop();
}

#[test]
fn a_request_whose_models_file_was_replaced_ends_with_an_error_that_says_so() {
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path(), 41);
    let mut daemon = Site::new(&yaml(folder.path())).start();
    let acme = daemon.add_tenant_of("tiny", "acme", "0%", "100%");
    let (_events, id) = open(&acme, &body(200, 20, 3000));
    write(folder.path(), 42);
    kill(&daemon);
    daemon.wait_ready();
    let events = whole(&acme, &id);
    let error = events.iter().find(|event| event.data.contains("model_changed"));
    assert!(error.is_some(), "no error: {:?}", events.last());
    let state = acme.http.get(&format!("/v1/requests/{id}")).ok();
    assert_eq!((&state["status"], &state["error"]["code"]), (&json!("failed"), &json!("model_changed")));
    // The other model serves.
    let (_events, next) = open(&acme, &body(200, 20, 8));
    assert!(!text(&whole(&acme, &next)).is_empty());
    daemon.stop();
}

/// The error object of a request that ends with its model, and the state of that.
#[track_caller]
fn ended_with_its_model(damage: impl Fn(&Path)) -> (Value, Value) {
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path(), 41);
    let daemon = Site::new(&yaml(folder.path())).start();
    let acme = daemon.add_tenant_of("tiny", "acme", "0%", "100%");
    let (events, id) = open(&acme, &body(200, 20, 3000));
    damage(&folder.path().join("tiny.gguf"));
    let worker = daemon.model()["worker_pid"].as_u64().expect("worker_pid") as u32;
    kill_descendant(daemon.root(), worker);
    let said = events.map(|event| event.data).find(|data| data.contains("error"));
    let said: Value = serde_json::from_str(&said.expect("it ends with an error")).expect("JSON");
    let state = acme.http.get(&format!("/v1/requests/{id}")).ok();
    assert_eq!((&state["status"], &state["error"]), (&json!("failed"), &said["error"]));
    let model = daemon.model()["state"].clone();
    daemon.stop();
    (said["error"].clone(), model)
}

#[test]
fn a_request_that_ends_since_its_models_file_was_replaced_under_it_says_so() {
    let (error, model) = ended_with_its_model(|path| {
        write(path.parent().expect("its folder"), 42);
    });
    assert_eq!(
        (&error["code"], &model["is"]),
        (&json!("model_changed"), &json!("failed")),
        "{error} {model}"
    );
}

#[test]
fn a_request_that_ends_since_no_worker_can_be_had_does_not_say_that_others_go_on() {
    let (error, model) = ended_with_its_model(|path| std::fs::write(path, "no model").expect("write"));
    assert_eq!((&error["code"], &model["is"]), (&json!("model_gone"), &json!("failed")), "{error} {model}");
    assert!(!error["message"].to_string().contains("not affected"), "{error}");
}

#[test]
fn a_request_whose_model_does_not_load_says_so_can_be_cancelled_and_otherwise_waits_for_it() {
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path(), 41);
    let mut daemon = Site::new(&yaml(folder.path())).start();
    let acme = daemon.add_tenant_of("tiny", "acme", "0%", "100%");
    let (_first, cancelled) = open(&acme, &body(200, 20, 3000));
    let (_second, waits) = open(&acme, &body(201, 20, 3000));
    // More than any machine has.
    let too_much = yaml(folder.path()).replace("kv_memory: 32768 tokens", "kv_memory: 900000 GiB");
    daemon.site().configure(&too_much);
    kill(&daemon);
    wait::until("the model has failed", Duration::from_mins(1), || daemon.model()["state"]["is"] == "failed");
    let path = format!("/v1/requests/{cancelled}");
    let mut state = Value::Null;
    wait::until("the request says what is wrong", Duration::from_mins(1), || {
        let answer = acme.http.get(&path);
        let found = answer.status == 200;
        if found {
            state = answer.ok();
        }
        found && state["error"].is_object()
    });
    assert_eq!((&state["status"], &state["error"]["code"]), (&json!("in_progress"), &json!("model_failed")));
    // Why is the operator's to know: paths and sizes are no client's.
    let reason = daemon.model()["state"]["error"].as_str().expect("a reason").to_owned();
    let clients = [
        acme.http.get("/readyz").text(),
        acme.http.get("/health/decode").text(),
        acme.http.post("/v1/completions", &body(202, 20, 8)).error(503).to_string(),
        state.to_string(),
    ];
    for told in clients {
        assert!(told.contains("the model could not be loaded; the operator's log says why"), "{told}");
        assert!(!told.contains(&reason) && !told.contains("GiB") && !told.contains(".gguf"), "{told}");
    }
    let refused = daemon.ctl(&["tenant", "remove", "acme"]);
    assert_ne!(refused.code, Some(0), "two requests were lost");

    let after = acme.http.post(&format!("{path}/cancel"), &json!({})).ok();
    let ended = wait_for_end(&acme, &path, after);
    assert_eq!(ended["status"], "cancelled", "{ended}");

    daemon.site().configure(&yaml(folder.path()));
    kill(&daemon);
    daemon.wait_ready();
    let events = whole(&acme, &waits);
    assert_eq!(events.last().map(|e| e.data.as_str()), Some("[DONE]"), "{:?}", events.last());
    assert_eq!(usage(&events)["completion_tokens"], 3000);
    daemon.stop();
}

fn wait_for_end(tenant: &Tenant, path: &str, mut state: Value) -> Value {
    wait::until("the request ends", Duration::from_secs(10), || {
        let open = state["status"] == "in_progress" || state["status"] == "queued";
        if open {
            state = tenant.http.get(path).ok();
        }
        !open
    });
    state
}

#[test]
fn a_request_whose_models_arithmetic_was_changed_ends_with_an_error_that_says_so() {
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path(), 41);
    for option in ["kv_dtype: f32", "dtype: f32"] {
        let mut daemon = Site::new(&yaml(folder.path())).start();
        let acme = daemon.add_tenant_of("tiny", "acme", "0%", "100%");
        let (_events, id) = open(&acme, &body(200, 20, 3000));
        daemon.site().configure(&format!("{}    {option}\n", yaml(folder.path())));
        kill(&daemon);
        daemon.wait_ready();
        let events = whole(&acme, &id);
        let error = events.iter().find(|event| event.data.contains("model_changed"));
        assert!(error.is_some(), "no error: {:?}", events.last());
        assert!(daemon.site().log_text().contains("dtype or kv_dtype was changed"));
        let (_events, next) = open(&acme, &body(200, 20, 8));
        assert!(!text(&whole(&acme, &next)).is_empty());
        daemon.stop();
    }
}

#[test]
fn a_request_that_is_too_large_for_changed_settings_waits_can_be_cancelled_and_goes_on_with_the_right_ones() {
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path(), 41);
    let settings = yaml(folder.path());
    for (smaller, reason) in [
        (format!("{settings}    max_model_len: 1024\n"), "max_model_len is 1024 now"),
        (settings.replace("32768 tokens", "2048 tokens"), "kv_memory has 128 now"),
    ] {
        let mut daemon = Site::new(&settings).start();
        let acme = daemon.add_tenant_of("tiny", "acme", "0%", "100%");
        let (_first, cancelled) = open(&acme, &body(200, 20, 3000));
        let (_second, waits) = open(&acme, &body(200, 20, 3000));
        daemon.site().configure(&smaller);
        kill(&daemon);
        daemon.wait_ready();
        let said = || daemon.site().log_text().matches(reason).count();
        wait::until("it is said why they wait", Duration::from_mins(1), || said() == 2);
        // What fits goes on meanwhile.
        let (_events, next) = open(&acme, &body(200, 20, 8));
        assert!(!text(&whole(&acme, &next)).is_empty());
        let state = acme.http.get(&format!("/v1/requests/{waits}")).ok();
        let waiting = (&state["status"], &state["error"]["code"]);
        assert_eq!(waiting, (&json!("in_progress"), &json!("waits_for_room")), "{state}");
        assert!(!state.to_string().contains("max_model_len"), "settings are no client's: {state}");
        assert_eq!(daemon.status()["drain"]["too_large"], 2);
        let path = format!("/v1/requests/{cancelled}");
        let after = acme.http.post(&format!("{path}/cancel"), &json!({})).ok();
        assert_eq!(wait_for_end(&acme, &path, after)["status"], "cancelled");

        daemon.site().configure(&settings);
        kill(&daemon);
        daemon.wait_ready();
        let events = whole(&acme, &waits);
        assert_eq!(events.last().map(|e| e.data.as_str()), Some("[DONE]"), "{:?}", events.last());
        assert_eq!(usage(&events)["completion_tokens"], 3000);
        let (_events, whole_at_once) = open(&acme, &body(200, 20, 3000));
        assert_eq!(text(&events), text(&whole(&acme, &whole_at_once)));
        daemon.stop();
    }
}

#[test]
fn a_request_that_is_too_large_for_changed_settings_is_nothing_to_wait_for_at_the_end() {
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path(), 41);
    let settings = yaml(folder.path());
    let mut daemon = Site::new(&settings).start();
    let acme = daemon.add_tenant_of("tiny", "acme", "0%", "100%");
    let (_events, waits) = open(&acme, &body(200, 20, 3000));
    let smaller = settings.replace(DRAIN, "drain_timeout: 25s\n");
    daemon.site().configure(&format!("{smaller}    max_model_len: 1024\n"));
    kill(&daemon);
    daemon.wait_ready();
    let path = format!("/v1/requests/{waits}/stream");
    // Whoever reads it waits for nothing, too.
    let _reader = acme.http.open("GET", &path, &[("last-event-id", "0")], b"");
    wait::until("it is held", Duration::from_mins(1), || daemon.status()["drain"]["requests"] == 0);
    daemon.ask(&["drain", "--timeout", "10s"]);
    let start = Instant::now();
    let site = daemon.stop();
    assert!(start.elapsed() < Duration::from_secs(5), "the end took {:?}", start.elapsed());
    let log = site.log_text();
    assert!(!log.contains("not ended in time"), "{log}");

    site.configure(&settings);
    let mut daemon = site.start();
    daemon.wait_ready();
    assert_eq!(usage(&whole(&acme, &waits))["completion_tokens"], 3000);
    daemon.stop();
}

#[test]
fn a_request_that_is_too_large_for_changed_settings_takes_nothing_of_its_tenants_quotas() {
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path(), 41);
    let settings = yaml(folder.path());
    let mut daemon = Site::new(&settings).start();
    let acme = daemon.add_tenant_of("tiny", "acme", "0%", "100%");
    daemon.ask(&["tenant", "set", "acme", "--max-concurrent", "1", "--tokens-per-minute", "3500"]);
    let (_events, waits) = open(&acme, &body(200, 20, 3000));
    daemon.site().configure(&format!("{settings}    max_model_len: 1024\n"));
    kill(&daemon);
    daemon.wait_ready();
    wait::until("it is held", Duration::from_mins(1), || daemon.status()["drain"]["requests"] == 0);
    let short = acme.http.post("/v1/completions", &body(20, 7, 400));
    assert_eq!(short.status, 200, "{}", short.text());

    daemon.site().configure(&settings);
    kill(&daemon);
    daemon.wait_ready();
    assert_eq!(usage(&whole(&acme, &waits))["completion_tokens"], 3000);
    daemon.stop();
}
