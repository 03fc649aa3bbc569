//! What an operator does with `pagedctl`, while requests go on.

use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::Duration;

use pagedd_tests::daemon::{Daemon, Site, binary, free_ports, smollm2_yaml};
use pagedd_tests::http::whole_text;
use pagedd_tests::wait;
use serde_json::{Value, json};

fn names(daemon: &Daemon) -> Vec<String> {
    let list = daemon.ask(&["tenant", "list"]);
    let tenants = list.get("tenants").unwrap_or(&list).as_array().cloned().unwrap_or_default();
    tenants.iter().filter_map(|t| t["name"].as_str().map(str::to_owned)).collect()
}

#[test]
fn tenants_are_changed_suspended_resumed_and_removed_while_they_serve() {
    let daemon = Site::new(&smollm2_yaml()).start();
    let acme = daemon.add_tenant("acme", "20%", "50%");
    let globex = daemon.add_tenant("globex", "10%", "100%");
    assert_eq!(names(&daemon), ["acme", "globex"]);

    daemon.ask(&["tenant", "set", "acme", "--kv-floor", "30%", "--kv-ceiling", "40%"]);
    let share = daemon.tenant_info("acme")["share"].clone();
    let total = daemon.model()["blocks_total"].as_u64().expect("blocks_total");
    let near = |blocks: &Value, percent: u64| {
        blocks.as_u64().is_some_and(|b| b.abs_diff(total * percent / 100) <= 1)
    };
    assert!(near(&share["floor_blocks"], 30) && near(&share["ceiling_blocks"], 40), "{share} of {total}");

    daemon.ask(&["tenant", "suspend", "acme"]);
    wait::until("a suspended tenant answers 503", Duration::from_secs(10), || {
        acme.http.get("/readyz").status == 503
    });
    let body = json!({"model": "smollm2", "prompt": "Hello", "max_tokens": 2});
    acme.http.post("/v1/completions", &body).error(503);
    assert_eq!(globex.http.post("/v1/completions", &body).status, 200, "another tenant goes on");
    daemon.ask(&["tenant", "resume", "acme"]);
    wait::until("a resumed tenant is ready", Duration::from_secs(10), || {
        acme.http.get("/readyz").status == 200
    });
    acme.http.post("/v1/completions", &body).ok();

    daemon.ask(&["tenant", "remove", "acme"]);
    assert_eq!(names(&daemon), ["globex"]);
    wait::until("a removed tenant's port is free", Duration::from_secs(10), || {
        TcpListener::bind(("127.0.0.1", acme.port)).is_ok()
    });
    globex.http.post("/v1/completions", &body).ok();
    let share = daemon.add_tenant("acme", "0%", "100%");
    assert_ne!(share.key, acme.key);
    daemon.stop();
}

#[test]
fn keys_are_shown_once_listed_by_prefix_and_end_when_they_are_revoked() {
    let daemon = Site::new(&smollm2_yaml()).start();
    let acme = daemon.add_tenant("acme", "0%", "100%");
    let created = daemon.ask(&["key", "create", "acme"]);
    let (id, key) = (created["id"].as_u64().expect("id"), created["key"].as_str().expect("key").to_owned());
    let second = acme.http.with_key(Some(&key));
    wait::until("the new key opens the port", Duration::from_secs(10), || {
        second.get("/v1/models").status == 200
    });
    let listed = daemon.ctl(&["key", "list", "acme"]).text;
    assert!(!listed.contains(&key) && !listed.contains(&acme.key), "{listed}");
    daemon.ask(&["key", "revoke", "acme", &id.to_string()]);
    wait::until("the revoked key opens nothing", Duration::from_secs(10), || {
        second.get("/v1/models").status == 401
    });
    assert_eq!(acme.http.get("/v1/models").status, 200);
    let site = daemon.stop();
    let log = site.log_text();
    assert!(!log.contains(&key) && !log.contains(&acme.key), "a key is in the log:\n{log}");
    for entry in std::fs::read_dir(site.state()).expect("the state directory") {
        let path = entry.expect("an entry").path();
        let bytes = std::fs::read(&path).unwrap_or_default();
        assert!(!bytes.windows(key.len()).any(|w| w == key.as_bytes()), "a key is in {}", path.display());
    }
}

#[test]
fn a_revoked_key_opens_nothing_and_the_stream_that_it_opened_goes_on() {
    let daemon = Site::new(&smollm2_yaml()).start();
    let acme = daemon.add_tenant("acme", "0%", "100%");
    let created = daemon.ask(&["key", "create", "acme"]);
    let (id, key) = (created["id"].to_string(), created["key"].as_str().expect("its key").to_owned());
    let http = acme.http.with_key(Some(&key));
    let body =
        json!({"model": "smollm2", "prompt": "Hello", "max_tokens": 200, "ignore_eos": true, "stream": true});
    let mut events = http.stream("/v1/completions", &[], &body).events();
    let path = format!("/v1/requests/{}", events.header("pagedd-request-id").expect("its id"));
    events.next().expect("it has begun");
    daemon.ask(&["key", "revoke", "acme", &id]);
    wait::until("the key is refused", Duration::from_secs(10), || http.get(&path).status == 401);
    http.post("/v1/completions", &body).error(401);
    whole_text(events);
    daemon.stop();
}

#[test]
fn an_order_that_leaves_nobody_who_may_ask_says_so_and_the_log_names_the_tenant() {
    let daemon = Site::new(&smollm2_yaml()).start();
    let [port] = free_ports();
    let open = daemon.ask(&["tenant", "add", "acme", "--no-auth", "--port", &port.to_string()]);
    assert_eq!(open["notes"], Value::Null, "{open}");
    let note = |answer: &Value| answer["notes"][0].as_str().unwrap_or_default().to_owned();
    let keyless = daemon.ask(&["tenant", "set", "acme", "--auth", "on"]);
    assert!(note(&keyless).contains("pagedctl key create acme"), "{keyless}");
    daemon.ask(&["key", "create", "acme"]);
    let keyed = daemon.ask(&["tenant", "set", "acme", "--auth", "on"]);
    assert_eq!(keyed["notes"], Value::Null, "{keyed}");
    daemon.ask(&["drain"]);
    let [port] = free_ports();
    let late = daemon.ask(&["tenant", "add", "globex", "--port", &port.to_string()]);
    assert!(note(&late).contains("pagedctl undrain"), "{late}");
    daemon.ctl(&["tenant", "suspend", "nobody"]);
    let log = daemon.stop().log_text();
    for words in [
        r#"admin command="tenant_add" tenant="acme""#,
        r#"admin command="key_create" tenant="acme""#,
        r#"admin command="tenant_suspend" tenant="nobody" error="unknown_tenant""#,
    ] {
        assert!(log.contains(words), "`{words}` is not in:\n{log}");
    }
}

#[test]
fn a_restart_keeps_tenants_keys_shares_and_ports() {
    let daemon = Site::new(&smollm2_yaml()).start();
    let acme = daemon.add_tenant("acme", "20%", "50%");
    let globex = daemon.add_tenant("globex", "10%", "100%");
    daemon.ask(&["tenant", "suspend", "globex"]);
    let text = acme.complete("The capital of France is", 8);
    let before = daemon.tenant_info("acme")["share"].clone();

    let daemon = daemon.stop().start();
    assert_eq!(names(&daemon), ["acme", "globex"]);
    wait::until("the tenant is ready again", Duration::from_secs(30), || {
        acme.http.get("/readyz").status == 200
    });
    assert_eq!(acme.complete("The capital of France is", 8), text);
    let after = daemon.tenant_info("acme")["share"].clone();
    for field in ["floor", "ceiling", "floor_blocks", "ceiling_blocks"] {
        assert_eq!(after[field], before[field], "{field}");
    }
    assert_eq!(daemon.tenant_info("globex")["state"]["is"], "suspended");
    daemon.ask(&["tenant", "resume", "globex"]);
    wait::until("the other is, too", Duration::from_secs(30), || globex.http.get("/readyz").status == 200);
    globex.complete("Hello", 2);
}

#[test]
fn a_second_daemon_on_the_same_state_directory_is_refused() {
    let daemon = Site::new(&smollm2_yaml()).start();
    let acme = daemon.add_tenant("acme", "0%", "100%");
    let state = daemon.site().state().display().to_string();
    let first = daemon.site().run_to_end();
    first.refused(&[&state]);
    assert_eq!(daemon.site().run_to_end().code, first.code);
    acme.complete("Hello", 2);
    daemon.stop();
}

#[test]
fn bad_orders_are_refused_with_the_name_and_change_nothing() {
    let daemon = Site::new(&smollm2_yaml()).start();
    daemon.add_tenant("acme", "60%", "80%");
    let before = daemon.ask(&["tenant", "list"]);
    let [free] = free_ports();
    let free = free.to_string();
    let taken = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let taken = taken.local_addr().expect("its address").port().to_string();
    let long = "a".repeat(300);
    let cases: [(&[&str], &str); 17] = [
        (&["tenant", "show", "nobody"], "nobody"),
        (&["tenant", "remove", "nobody"], "nobody"),
        (&["tenant", "suspend", "nobody"], "nobody"),
        (&["key", "create", "nobody"], "nobody"),
        (&["key", "revoke", "acme", "999"], "999"),
        (&["tenant", "add", "acme", "--port", &free], "acme"),
        (&["tenant", "add", "a/b", "--port", &free], "a/b"),
        (&["tenant", "add", &long, "--port", &free], "63"),
        (&["tenant", "add", "", "--port", &free], "name"),
        (&["tenant", "add", "two", "--port", &free, "--kv-floor", "60%"], "floor"),
        (&["tenant", "add", "two", "--port", &free, "--kv-floor", "120%"], "120%"),
        (&["tenant", "add", "two", "--port", &free, "--kv-floor", "30%", "--kv-ceiling", "20%"], "floor"),
        (&["tenant", "add", "two", "--port", &free, "--kv-floor", "lots"], "lots"),
        (
            &["tenant", "add", "two", "--port", &free, "--kv-floor", "900GiB"],
            "be 2622054 blocks, and its pool has 1024",
        ),
        (&["tenant", "set", "acme", "--kv-floor", "900GiB", "--kv-ceiling", "100%"], "be 2621440 blocks"),
        (&["tenant", "add", "two", "--port", &free, "--model", "gpt"], "gpt"),
        (&["tenant", "add", "two", "--port", &taken], &taken),
    ];
    for (arguments, word) in cases {
        let ended = daemon.ctl(arguments);
        ended.refused(&[word]);
        assert!(ended.text.trim_end().lines().count() <= 6, "{arguments:?}: {}", ended.text);
    }
    let stable = |list: &Value| {
        let tenants = list.get("tenants").unwrap_or(list).as_array().cloned().unwrap_or_default();
        tenants
            .iter()
            .map(|t| (t["id"].clone(), t["name"].clone(), t["port"].clone(), t["share"]["floor"].clone()))
            .collect::<Vec<_>>()
    };
    assert_eq!(stable(&daemon.ask(&["tenant", "list"])), stable(&before));
    assert!(
        TcpStream::connect(("127.0.0.1", free.parse::<u16>().expect("a port"))).is_err(),
        "a port was left bound"
    );
}

#[test]
fn a_context_longer_than_the_models_own_is_logged_with_the_key_and_walls_promise_nothing() {
    let yaml = smollm2_yaml().replace("max_model_len: 2048", "max_model_len: 100000");
    let daemon = Site::new(&format!("cgroups: off\n{yaml}")).start();
    assert_eq!(daemon.model()["max_model_len"], 8192);
    assert_eq!(
        daemon.status()["walls"],
        json!({"is": "reduced", "reason": "`cgroups: off` in the configuration"})
    );
    let log = daemon.stop().log_text();
    let line = log.lines().find(|line| line.contains("max_model_len is above the model's own context"));
    let line = line.unwrap_or_else(|| panic!("nothing is logged: {log}"));
    assert!(line.contains("WARN") && line.contains("100000") && line.contains("8192"), "{line}");
}

#[test]
fn pagedctl_without_a_daemon_says_so() {
    let site = Site::new(&smollm2_yaml());
    let socket = site.file("none.sock").display().to_string();
    let ended = Command::new(binary("pagedctl"))
        .args(["--socket", &socket, "status"])
        .output()
        .expect("run pagedctl");
    let text = String::from_utf8_lossy(&ended.stderr);
    assert!(!ended.status.success() && text.contains("not running") && text.contains(&socket), "{text}");
}
