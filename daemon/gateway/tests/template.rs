//! The real program: load, fork, serve, die, be forked anew.

#![allow(clippy::unwrap_used)] // what fails in a helper fails a test

mod common;

use std::io::Write as _;
use std::net::TcpListener;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use common::client::{connect, get, post, read_head, request};
use common::{Daemon, PATIENCE, Script, log_of, model, welcome};
use pagedd_host::{Child, Pidfd, Sandbox, Spawn};
use pagedd_wire::gateway::{Closed, Welcome};
use pagedd_wire::template::{FromTemplate, ToTemplate};
use pagedd_wire::{Channel, PROTOCOL};

const BODY: &str = r#"{"model":"tiny","prompt":"hello"}"#;

fn start() -> (Child, Channel) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let child = pagedd_host::spawn(Spawn {
        program: env!("CARGO_BIN_EXE_pagedd-gateway").into(),
        args: Vec::new(),
        env: vec![("PAGEDD_LOG".into(), "warn".into())],
        fds: vec![(OwnedFd::from(theirs), 3)],
        cgroup: None,
        identity: None,
        sandbox: Sandbox { no_new_privs: true, ..Sandbox::default() },
    })
    .unwrap();
    (child, Channel::new(ours).unwrap())
}

fn load(channel: &mut Channel, path: &Path) -> FromTemplate {
    let path = path.to_str().unwrap().to_owned();
    channel.send(&ToTemplate::Load { protocol: PROTOCOL, path }, &[]).unwrap();
    channel.recv_timeout(PATIENCE).unwrap()
}

/// What a process's fd names.
fn links_of(pid: u32, fd: i32) -> String {
    std::fs::read_link(format!("/proc/{pid}/fd/{fd}")).unwrap().to_string_lossy().into_owned()
}

/// What all fds of a process name.
fn links(pid: u32) -> Vec<String> {
    std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok())
        .map(|target| target.to_string_lossy().into_owned())
        .collect()
}

/// A forked gateway: its process, and what its end of the daemon's socket is called.
fn fork(channel: &mut Channel, ticket: u64, listener: &TcpListener, daemon: &Daemon) -> (u32, Pidfd, String) {
    fork_with(channel, ticket, listener, daemon, &welcome())
}

/// As [`fork`], with another first word of the daemon's.
fn fork_with(
    channel: &mut Channel,
    ticket: u64,
    listener: &TcpListener,
    daemon: &Daemon,
    welcome: &Welcome,
) -> (u32, Pidfd, String) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let name = links_of(std::process::id(), theirs.as_raw_fd());
    let message = ToTemplate::Fork { ticket, tenant: "acme".to_owned(), identity: None, cgroup: false };
    channel.send(&message, &[listener.as_fd(), theirs.as_fd()]).unwrap();
    drop(theirs);
    daemon.connect(ours, welcome);
    match channel.recv_timeout(PATIENCE).unwrap() {
        FromTemplate::Forked { ticket: answered, pid } => {
            assert_eq!(answered, ticket);
            (pid, Pidfd::from(channel.take_fd().unwrap()), name)
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_killed_gateway_is_forked_anew_and_its_port_never_refuses() {
    let (_directory, path) = model(|_| {});
    let text = common::load(&path);
    let (template, mut channel) = start();
    assert_eq!(load(&mut channel, &path), FromTemplate::Ready { vocab_size: 272 });
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let daemon = Daemon::new(move |_| Script::Log(log_of(&text, "hi 🤣")));
    let (_, gateway, _) = fork(&mut channel, 1, &listener, &daemon);
    while get(address, "/v1/models").status != 200 {}
    let whole = post(address, "/v1/completions", BODY);
    assert_eq!(whole.json()["choices"][0]["text"], "hi 🤣");

    gateway.kill().unwrap();
    assert!(gateway.wait_gone(PATIENCE).unwrap());
    // Nobody accepts now: the connection waits.
    let mut waiting = connect(address);
    waiting.write_all(request("POST", "/v1/completions", &[], BODY).as_bytes()).unwrap();
    let path = format!("/v1/requests/{}", whole.header("pagedd-request-id").unwrap());

    let other = Daemon::new(|_| Script::Silence);
    let other_listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (_, _other_gateway, other_socket) = fork(&mut channel, 2, &other_listener, &other);
    let (pid, gateway, theirs) = fork(&mut channel, 3, &listener, &daemon);
    let status = read_head(waiting).finish().status;
    // Served at once, or told to come again since the daemon had not spoken yet.
    assert!(status == 200 || status == 503, "{status}");
    while get(address, "/v1/models").status != 200 {}
    assert_eq!(get(address, &path).body, whole.body);

    // It holds nothing of the template's, and nothing of another gateway's.
    let held = links(pid);
    assert!(held.contains(&theirs), "its own socket {theirs} is not among {held:?}");
    for foreign in [links_of(template.pid(), 3), other_socket] {
        assert!(!held.contains(&foreign), "{foreign} is among {held:?}");
    }

    // Each ends with its own connection, the template first.
    drop(channel);
    assert!(template.wait(PATIENCE).unwrap().unwrap().success());
    assert!(!gateway.wait_gone(Duration::ZERO).unwrap());
    assert_eq!(get(address, "/livez").status, 200);
    daemon.die();
    other.die();
    assert!(gateway.wait_gone(PATIENCE).unwrap());
}

#[test]
fn an_idle_gateway_has_little_memory_of_its_own() {
    let (_directory, path) = model(|_| {});
    let text = common::load(&path);
    let (_template, mut channel) = start();
    load(&mut channel, &path);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let daemon = Daemon::new(move |_| Script::Log(log_of(&text, "hi")));
    let (pid, _gateway, _) = fork(&mut channel, 1, &listener, &daemon);
    while get(address, "/v1/models").status != 200 {}
    for _ in 0..20 {
        assert_eq!(post(address, "/v1/completions", BODY).status, 200);
    }
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    let private: u64 = rollup
        .lines()
        .filter(|line| line.starts_with("Private_"))
        .filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok())
        .sum();
    assert!(private <= 12 << 10, "{private} KiB are private");
}

#[test]
fn a_model_that_cannot_be_loaded_is_told_in_one_line_and_its_ports_answer_all_the_same() {
    let (_directory, path) = model(|writer| writer.set("tokenizer.ggml.model", "unknown"));
    let (template, mut channel) = start();
    let FromTemplate::Failed { error } = load(&mut channel, &path) else { panic!("it was loaded") };
    assert!(error.contains("tiny.gguf") && !error.contains('\n'), "{error}");

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let daemon = Daemon::new(|_| Script::Silence);
    let closed = Welcome { closed: Some(Closed::Failed), ..welcome() };
    let (_, _gateway, _) = fork_with(&mut channel, 1, &listener, &daemon, &closed);
    assert_eq!(get(address, "/livez").status, 200);
    while get(address, "/v1/models").status != 200 {}
    for path in ["/v1/completions", "/v1/chat/completions"] {
        let answer = post(address, path, BODY);
        assert_eq!(answer.status, 503, "{path}");
        let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
        assert_eq!(message, "the model could not be loaded; the operator's log says why", "{path}");
    }
    drop(channel);
    assert!(template.wait(PATIENCE).unwrap().unwrap().success());
}
