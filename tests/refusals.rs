//! What a daemon refuses at its start, and what it says then.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::unistd::geteuid;
use pagedd_tests::daemon::{Ended, Site, binary, free_ports, model_yaml, smollm2_yaml};
use pagedd_tests::model::smollm2;
use pagedd_tests::process::kill_descendant;
use pagedd_tests::wait;

/// The configuration is refused with these words, and nothing is made.
#[track_caller]
fn refused(yaml: &str, words: &[&str]) -> Ended {
    let site = Site::new(yaml);
    let ended = site.run_to_end();
    let config = site.config().display().to_string();
    ended.refused(&[config.as_str()]).refused(words);
    assert!(!site.state().join("control.db").exists(), "a refused start made control.db");
    ended
}

#[test]
fn bad_yaml_is_refused_with_file_line_and_column() {
    let ended = refused("models:\n  smollm2: {path: a\n", &[]);
    let place = |line: &str| line.split(':').filter(|part| part.trim().parse::<u32>().is_ok()).count() >= 2;
    assert!(ended.text.lines().any(place), "no line and column:\n{}", ended.text);
}

#[test]
fn bug_37_an_unknown_key_is_refused_with_the_nearest_valid_name() {
    let yaml = smollm2_yaml().replace("max_num_seqs", "max_num_seq");
    refused(&yaml, &["max_num_seq", "max_num_seqs", ":5:"]);
    refused("modells: {}\n", &["modells", "models", ":1:"]);
}

#[test]
fn values_out_of_range_are_refused_with_the_key() {
    let with = |options: &str| model_yaml("smollm2", &smollm2(), options);
    refused(&with("block_size: 17"), &["block_size", "17"]);
    refused(&with("kv_memory: plenty"), &["kv_memory", "plenty"]);
    refused(&with("dtype: f33"), &["dtype", "f33", "f32"]);
    refused(&with("max_num_seqs: 0"), &["max_num_seqs", "0"]);
    refused("models:\n  smollm2:\n    device: cpu\n", &["path"]);
}

/// No process of a test's session is alone in its cgroup, so that no host gives it one to divide.
#[test]
fn bug_40_cgroups_that_are_required_and_not_given_refuse_the_start_with_the_reason() {
    let ended = Site::new(&format!("cgroups: required\n{}", smollm2_yaml())).run_to_end();
    ended.refused(&["cgroups: required, but ", "or set `cgroups: auto`"]);
    assert_eq!(ended.code, Some(78), "{}", ended.text);
    let daemon = Site::new(&smollm2_yaml()).start();
    let walls = daemon.status()["walls"].clone();
    assert_eq!(walls["is"], "reduced", "{walls}");
    let set = ["tenant", "add", "acme", "--cpu-max", "50%", "--port", &free_ports::<1>()[0].to_string()];
    let added = daemon.ctl(&set);
    assert!(added.code == Some(0) && added.text.contains("NOT ENFORCED"), "{added:?}");
    let wall = daemon.ask(&["tenant", "show", "acme"])["wall"].clone();
    let said = format!("walls are reduced: {}", walls["reason"].as_str().unwrap_or("?"));
    assert_eq!(
        (&wall["limits"]["cpu_max"], &wall["not_enforced"][0]),
        (&"50%".into(), &said.into()),
        "{wall}"
    );
    let metrics = daemon.ask(&["metrics"])["text"].as_str().unwrap_or_default().to_owned();
    assert!(metrics.contains("\npagedd_walls 0.0\n"), "{metrics}");
    let log = daemon.stop().log_text();
    assert_eq!(log.lines().filter(|line| line.contains("walls: REDUCED")).count(), 1, "said once: {log}");
}

#[test]
fn a_configuration_that_is_not_there_is_named() {
    let site = Site::new("");
    fs::remove_file(site.config()).expect("remove it");
    let config = site.config().display().to_string();
    site.run_to_end().refused(&[config.as_str()]);
}

#[test]
fn an_admin_socket_that_cannot_be_made_is_named_with_its_key() {
    let yaml = format!("admin_socket: /nowhere/x.sock\n{}", smollm2_yaml());
    Site::new(&yaml).run_to_end().refused(&["admin_socket /nowhere/x.sock: "]);
}

#[test]
fn an_admin_socket_on_which_another_daemon_answers_is_named_and_stays_its_own() {
    let first = Site::new(&smollm2_yaml()).start();
    let path = first.site().socket();
    let yaml = format!("admin_socket: {}\n{}", path.display(), smollm2_yaml());
    let words = format!("admin_socket {}: another pagedd answers on it", path.display());
    Site::new(&yaml).run_to_end().refused(&[&words]);
    first.status();
    first.stop();
}

#[test]
fn a_state_directory_that_cannot_be_made_is_named() {
    let site = Site::new(&smollm2_yaml());
    File::create(site.state()).expect("a file in its place");
    let state = site.state().display().to_string();
    site.run_to_end().refused(&[state.as_str()]);
}

/// The state directory lies on a file system of 64 KiB that is full: in a mount namespace of its own.
#[test]
fn a_full_disk_is_refused_with_the_state_directory() {
    let site = Site::new(&smollm2_yaml());
    fs::create_dir(site.state()).expect("the state directory");
    let state = site.state().display().to_string();
    let config = site.config().display().to_string();
    let script = "mount -t tmpfs -o size=64k none \"$1\" && { head -c 1M /dev/zero > \"$1/filler\" 2>/dev/null; \
        exec timeout 60 \"$2\" --config \"$3\" --state-dir \"$1\"; }";
    let mut command = Command::new("unshare");
    command.arg("--mount");
    if !geteuid().is_root() {
        command.args(["--user", "--map-root-user"]);
    }
    command.args(["sh", "-c", script, "sh", &state]).arg(binary("pagedd")).arg(&config);
    let output = command.output().expect("run unshare");
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(
        !text.contains("unshare:") && !text.contains("mount:"),
        "this test mounts a small tmpfs in a namespace: {text}"
    );
    let ended = Ended { code: output.status.code(), text };
    ended.refused(&[state.as_str()]);
    assert_ne!(ended.code, Some(124), "it ran on: {}", ended.text);
}

#[test]
fn bug_36_a_port_in_use_is_said_before_the_model_loads_and_not_retried() {
    let daemon = Site::new(&smollm2_yaml()).start();
    let acme = daemon.add_tenant("acme", "0%", "100%");
    let port = acme.port.to_string();
    let site = daemon.stop();
    let squatter = TcpListener::bind(("127.0.0.1", acme.port)).expect("the port is free");
    // A model that takes for ever to load would hide it.
    let start = Instant::now();
    let ended = site.run_to_end();
    ended.refused(&[port.as_str(), "acme"]);
    assert!(start.elapsed() < Duration::from_secs(3), "it took {:?}", start.elapsed());
    drop(squatter);
    site.start().stop();
}

/// A daemon whose only model is `path`: its state says why that does not load, and it still ends cleanly.
#[track_caller]
fn fails_to_load(path: &Path, words: &[&str]) {
    let daemon = Site::new(&model_yaml("broken", path, "kv_memory: 4096 tokens")).spawn();
    let [port] = free_ports();
    let state = wait::within(Duration::from_mins(1), || {
        let status = daemon.ctl(&["status"]);
        let state = (status.code == Some(0)).then(|| daemon.model()["state"].clone())?;
        (state["is"] == "failed").then_some(state)
    });
    let state = state.unwrap_or_else(|| panic!("the model does not fail:\n{}", daemon.site().log_text()));
    let error = state["error"].as_str().unwrap_or_default();
    for word in words {
        assert!(error.contains(word), "`{word}` is not in: {error}");
    }
    assert_eq!(error.lines().count(), 1, "{error}");
    let added = daemon.ctl(&["tenant", "add", "acme", "--port", &port.to_string()]);
    assert!(!added.text.contains("panicked"), "{}", added.text);
    let log = daemon.stop().log_text();
    assert!(!log.contains("panicked at"), "{log}");
}

/// A copy of the model's first `bytes`, with `patch` at its place.
fn damaged(site: &Site, bytes: u64, patch: Option<(u64, &[u8])>) -> std::path::PathBuf {
    let path = site.file("damaged.gguf");
    let mut source = File::open(smollm2()).expect("the model").take(bytes);
    let mut target = File::create(&path).expect("a copy");
    std::io::copy(&mut source, &mut target).expect("copy the model");
    if let Some((at, new)) = patch {
        target.seek(SeekFrom::Start(at)).expect("seek");
        target.write_all(new).expect("patch");
    }
    path
}

#[test]
fn a_truncated_model_fails_with_a_tensor_named_and_the_daemon_stays() {
    let site = Site::new("");
    fails_to_load(&damaged(&site, 60_000_000, None), &["damaged.gguf", "blk.", "60000000"]);
}

#[test]
fn a_model_that_lies_about_its_sizes_fails_and_the_daemon_stays() {
    let site = Site::new("");
    // Bytes [8, 16) are the number of tensors, [16, 24) that of metadata entries.
    fails_to_load(&damaged(&site, 10_000_000, Some((8, &u64::MAX.to_le_bytes()))), &["damaged.gguf"]);
    fails_to_load(&damaged(&site, 10_000_000, Some((16, &(u64::MAX / 2).to_le_bytes()))), &["damaged.gguf"]);
}

#[test]
fn a_file_that_is_no_model_fails_with_its_path_and_the_daemon_stays() {
    let site = Site::new("");
    let text = site.file("notes.gguf");
    fs::write(&text, "no model at all").expect("write it");
    fails_to_load(&text, &["notes.gguf"]);
}

#[test]
fn a_model_that_is_not_there_is_refused_with_its_path() {
    let path = Path::new("/nowhere/absent.gguf");
    refused(&model_yaml("smollm2", path, "kv_memory: 4096 tokens"), &["/nowhere/absent.gguf", ":4:"]);
}

/// A daemon that is not root cannot choose users, and none of this is said there.
#[test]
fn tenants_for_which_there_is_no_user_id_are_not_served_and_the_others_are() {
    if !geteuid().is_root() {
        return;
    }
    let uids = |last: u32| format!("tenant_uids: 61900-{last}\n{}", smollm2_yaml());
    let mut daemon = Site::new(&uids(61_901)).start();
    let tenants = ["acme", "globex"].map(|name| daemon.add_tenant(name, "0%", "100%"));
    daemon.site().configure(&uids(61_900));
    let reload = daemon.ctl(&["reload"]);
    assert!(
        reload.code == Some(1) && reload.text.contains("1 user ids are too few for 2 tenants"),
        "{reload:?}"
    );
    let required = uids(61_901).replace("tenant_uids", "cgroups: required\ntenant_uids");
    daemon.site().configure(&required);
    let reload = daemon.ctl(&["reload"]);
    assert!(
        reload.code == Some(1) && reload.text.contains("no daemon would start with `required`"),
        "{reload:?}"
    );

    daemon.site().configure(&uids(61_900));
    let pid = daemon.status()["pid"].as_u64().expect("pid") as u32;
    kill_descendant(daemon.root(), pid);
    daemon.wait_ready();
    let served = wait::within(Duration::from_mins(1), || {
        tenants.iter().find(|one| one.http.get("/readyz").status == 200)
    });
    assert!(served.is_some(), "{}", daemon.site().log_text());
    let states = ["acme", "globex"].map(|name| daemon.tenant_info(name)["state"]["is"].clone());
    assert!(states.contains(&"failed".into()) && states.contains(&"ready".into()), "{states:?}");
    let log = daemon.stop().log_text();
    assert!(log.contains("all 1 user ids from 61900 to 61900 are in use"), "{log}");
}
