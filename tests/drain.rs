//! The end of admission, and that of the daemon: what runs may end, what does not goes on after the next start.

mod tiny;

use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use pagedd_tests::daemon::{DRAIN, Daemon, Site, Tenant, free_ports};
use pagedd_tests::http::{Client, Event, Events, Incoming, whole_text};
use pagedd_tests::process::{Process, kill_descendant, send};
use pagedd_tests::wait;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Tokens of a request that is not at its end when a test looks at it.
const LONG: u32 = 3_000;
/// Something that takes no longer as a rule than a moment.
const MOMENT: Duration = Duration::from_secs(20);
/// The daemon has ended by then, once it waits for no request any more.
const END: Duration = Duration::from_secs(15);

/// A daemon that waits for running requests for so long when it is told to end, and a tenant of it.
fn start(drain_timeout: &str) -> (TempDir, Daemon, Tenant) {
    let folder = tempfile::tempdir().expect("a folder for the model");
    let yaml = tiny::yaml(folder.path()).replace(DRAIN, &format!("drain_timeout: {drain_timeout}\n"));
    let daemon = Site::new(&yaml).start();
    let acme = daemon.add_tenant_of(tiny::MIX.model, "acme", "0%", "100%");
    (folder, daemon, acme)
}

/// A request of so many tokens.
fn body(first: u32, max_tokens: u32, stream: bool) -> Value {
    let prompt: Vec<u32> = (0..20).map(|i| 100 + (first * 7 + i) % 50).collect();
    json!({"model": tiny::MIX.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.8, "seed": first, "ignore_eos": true, "stream": stream})
}

#[track_caller]
fn open(tenant: &Tenant, first: u32, max_tokens: u32) -> Events {
    tenant.http.stream("/v1/completions", &[], &body(first, max_tokens, true)).events()
}

#[track_caller]
fn text_of(tenant: &Tenant, first: u32, max_tokens: u32) -> String {
    whole_text(open(tenant, first, max_tokens))
}

fn id_of(events: &Events) -> String {
    events.header("pagedd-request-id").expect("pagedd-request-id").to_owned()
}

fn text(events: &[Event]) -> String {
    events.iter().map(Event::text).collect()
}

/// The operator's metric of this name.
#[track_caller]
fn metric(daemon: &Daemon, name: &str) -> f64 {
    let answer = daemon.ask(&["metrics"]);
    let text = answer["text"].as_str().unwrap_or_else(|| panic!("no metrics: {answer}"));
    let line = text.lines().find(|line| line.split(' ').next() == Some(name));
    let value = line.and_then(|line| line.rsplit(' ').next()?.parse().ok());
    value.unwrap_or_else(|| panic!("no {name}:\n{text}"))
}

fn worker(daemon: &Daemon) -> Process {
    let pid = daemon.model()["worker_pid"].as_u64().expect("worker_pid") as u32;
    Process::find(pid).expect("the worker lives")
}

/// A new request is refused, and told when to come again.
#[track_caller]
fn assert_refused(tenant: &Tenant) {
    let refused = tenant.http.post("/v1/completions", &body(1, 4, false));
    assert_eq!(refused.error(503)["code"], "draining");
    let seconds = refused.header("retry-after").and_then(|seconds| seconds.parse::<u32>().ok());
    assert!(seconds.is_some_and(|seconds| seconds > 0), "{seconds:?}");
}

/// Asks until an answer has come: a gateway may be on its way.
#[track_caller]
fn get(tenant: &Tenant, path: &str, headers: &[(&str, &str)]) -> Incoming {
    let found = wait::within(MOMENT, || {
        let answer = tenant.http.send("GET", path, headers, b"").ok().and_then(Incoming::try_read_head);
        answer.filter(|answer| answer.status == 200)
    });
    found.unwrap_or_else(|| panic!("{path} is not there"))
}

/// Where a stream that was broken off goes on: checks its last event, and takes it away.
#[track_caller]
fn parted(read: &mut Vec<Event>, id: &str) -> String {
    let last = read.pop().expect("a last event");
    assert_eq!((last.name.as_deref(), &last.id), (Some("detached"), &None), "{last:?}");
    let said = last.json();
    assert!(said["error"].is_null() && said["choices"] == json!([]), "{said}");
    let detached = &said["detached"];
    let path = format!("/v1/requests/{id}/stream");
    assert_eq!((&detached["id"], &detached["path"]), (&json!(id), &json!(path)), "{said}");
    let cursor = detached["last_event_id"].to_string();
    assert_eq!(Some(&cursor), read.iter().rev().find_map(|event| event.id.as_ref()), "{said}");
    cursor
}

#[test]
fn a_drain_refuses_what_is_new_lets_what_runs_end_whoever_dies_and_is_taken_back() {
    let (_folder, daemon, acme) = start("2s");
    let undisturbed = [1, 2].map(|first| text_of(&acme, first, LONG));
    let stopped = worker(&daemon);
    let mut streams = [1, 2].map(|first| open(&acme, first, LONG));
    let mut read = streams.each_mut().map(|events| vec![events.next().expect("it has begun")]);
    let ids = streams.each_ref().map(id_of);
    // What runs stands still until everything has been looked at.
    send(&stopped, Signal::SIGSTOP);

    let drained = daemon.ctl(&["drain", "--timeout", "0"]);
    assert_eq!(drained.code, Some(5), "{}", drained.text);
    wait::until("the port refuses", MOMENT, || acme.http.get("/health").status == 503);
    assert_refused(&acme);
    let drain = daemon.status()["drain"].clone();
    assert_eq!(
        (&drain["state"]["is"], &drain["requests"], &drain["streams"]),
        (&json!("draining"), &json!(2), &json!(2)),
        "{drain}"
    );
    assert!(drain["state"]["deadline_unix"].is_u64(), "{drain}");
    for (name, value) in
        [("pagedd_draining", 1.0), ("pagedd_requests_live", 2.0), ("pagedd_streams_open", 2.0)]
    {
        assert!((metric(&daemon, name) - value).abs() < 0.5, "{name}");
    }
    assert_eq!(daemon.tenant_info("acme")["state"]["is"], "draining");
    let state = acme.http.get(&format!("/v1/requests/{}", ids[0])).ok();
    assert_eq!(state["status"], "in_progress", "{state}");

    // Parts die meanwhile: it goes on, and goes on draining.
    let pid = daemon.tenant_info("acme")["gateway"]["pid"].as_u64().expect("pid") as u32;
    kill_descendant(daemon.root(), pid);
    kill_descendant(daemon.root(), stopped.pid);
    for ((events, read), id) in streams.into_iter().zip(&mut read).zip(&ids) {
        read.extend(events);
        let cursor = read.iter().rev().find_map(|event| event.id.clone()).expect("events have ids");
        read.extend(get(&acme, &format!("/v1/requests/{id}/stream"), &[("last-event-id", &cursor)]).events());
        assert_eq!(read.last().map(|event| event.data.as_str()), Some("[DONE]"));
    }
    assert_eq!(read.each_ref().map(|read| text(read)), undisturbed);
    let drained = daemon.ask(&["drain"]);
    assert_eq!((&drained["requests"], &drained["streams"]), (&json!(0), &json!(0)), "{drained}");
    assert_refused(&acme);
    let late = daemon.add_unready_tenant(tiny::MIX.model, "late", "0%", "100%");
    wait::until("a tenant that comes later refuses, too", MOMENT, || {
        late.http.post("/v1/completions", &body(1, 4, false)).status == 503
    });
    assert_refused(&late);
    assert!((metric(&daemon, "pagedd_draining") - 1.0).abs() < 0.5);

    daemon.ask(&["undrain"]);
    wait::until("the port takes requests again", MOMENT, || acme.http.get("/health").status == 200);
    assert_eq!(text_of(&acme, 1, LONG), undisturbed[0]);
    assert_eq!(daemon.status()["drain"]["state"]["is"], "admitting");
    assert!(metric(&daemon, "pagedd_draining") < 0.5);
    daemon.stop();
}

#[test]
fn at_sigterm_what_runs_ends_in_its_time_and_nothing_else_begins() {
    let (_folder, daemon, acme) = start("60s");
    let undisturbed = text_of(&acme, 1, LONG);
    let (worker, processes) = (worker(&daemon), daemon.processes());
    let mut events = open(&acme, 1, LONG);
    let mut read = vec![events.next().expect("it has begun")];
    send(&worker, Signal::SIGSTOP);
    daemon.signal(Signal::SIGTERM);
    wait::until("the port refuses", MOMENT, || acme.http.get("/health").status == 503);
    assert_refused(&acme);
    let drain = daemon.status()["drain"].clone();
    assert_eq!((&drain["state"]["is"], &drain["requests"]), (&json!("stopping"), &json!(1)), "{drain}");
    daemon.ctl(&["undrain"]).refused(&["going down"]);
    send(&worker, Signal::SIGCONT);
    let start = Instant::now();
    read.extend(events);
    assert_eq!(read.last().map(|event| event.data.as_str()), Some("[DONE]"), "{:?}", read.last());
    assert_eq!(text(&read), undisturbed);
    daemon.ended(&processes);
    assert!(start.elapsed() < END, "the end took {:?}", start.elapsed());
}

#[test]
fn what_a_sigterm_breaks_off_goes_on_after_the_next_start_and_no_token_is_lost_or_doubled() {
    let (_folder, daemon, acme) = start("100ms");
    let undisturbed = [1, 2, 3].map(|first| text_of(&acme, first, LONG));

    let mut streams = [1, 2].map(|first| open(&acme, first, LONG));
    let ids = streams.each_ref().map(id_of);
    let mut read = streams.each_mut().map(|events| vec![events.next().expect("it has begun")]);
    // One that waits for a whole answer, one that does not read, and one that says nothing.
    let whole = body(3, LONG, false).to_string();
    let headers = [("content-type", "application/json")];
    let waits = acme.http.send("POST", "/v1/completions", &headers, whole.as_bytes()).expect("sent");
    let deaf = open(&acme, 4, LONG);
    let idle = acme.http.send("GET", "/livez", &[], b"").expect("sent");
    wait::until("all run", MOMENT, || daemon.status()["drain"]["requests"] == 4);

    let start = Instant::now();
    let site = daemon.stop();
    let took = start.elapsed();
    assert!(took < END, "the end took {took:?}");
    drop((deaf, idle));
    let cursors: Vec<String> = streams
        .into_iter()
        .zip(&mut read)
        .zip(&ids)
        .map(|((events, read), id)| {
            read.extend(events);
            parted(read, id)
        })
        .collect();
    let told = Incoming::read_head(waits).into_response();
    assert_eq!(told.error(503)["code"], "shutting_down");
    let whole_id = told.header("pagedd-request-id").expect("pagedd-request-id").to_owned();
    let detached = &told.json()["detached"];
    assert_eq!((&detached["id"], &detached["last_event_id"]), (&json!(whole_id), &json!(0)), "{detached}");

    let daemon = site.start();
    for (((read, id), cursor), undisturbed) in read.iter().zip(&ids).zip(&cursors).zip(&undisturbed) {
        let path = format!("/v1/requests/{id}/stream");
        let rest: Vec<Event> = get(&acme, &path, &[("last-event-id", cursor)]).events().collect();
        assert_eq!(rest.last().map(|event| event.data.as_str()), Some("[DONE]"), "{:?}", rest.last());
        assert_eq!(text(read) + &text(&rest), *undisturbed, "attached after {cursor}");
    }
    let mut answer = Value::Null;
    wait::until("the whole answer is there", Duration::from_mins(1), || {
        answer = get(&acme, &format!("/v1/requests/{whole_id}"), &[]).into_response().json();
        answer["object"] != "request"
    });
    assert_eq!(answer["choices"][0]["text"], json!(undisturbed[2]));
    daemon.wait_idle();
    assert_eq!(daemon.model()["blocks_held"], 0);
    daemon.stop();
}

#[test]
fn a_second_signal_ends_the_wait_at_once() {
    let (_folder, daemon, acme) = start("1h");
    let mut events = open(&acme, 1, 16_000);
    let id = id_of(&events);
    let mut read = vec![events.next().expect("it has begun")];
    let reader = thread::spawn(move || events.collect::<Vec<Event>>());
    daemon.signal(Signal::SIGTERM);
    wait::until("it is stopping", MOMENT, || daemon.status()["drain"]["state"]["is"] == "stopping");
    let processes = daemon.processes();
    let start = Instant::now();
    daemon.signal(Signal::SIGINT);
    daemon.ended(&processes);
    assert!(start.elapsed() < END, "the end took {:?}", start.elapsed());
    read.extend(reader.join().expect("the reader"));
    parted(&mut read, &id);
}

/// The last event of a stream, once an order has ended it.
#[track_caller]
fn last_after(daemon: &Daemon, mut events: Events, order: &[&str]) -> Event {
    events.next().expect("it has begun");
    let reader = thread::spawn(move || events.last());
    daemon.ask(order);
    reader.join().expect("the reader").expect("a last event")
}

#[test]
fn whoever_is_broken_off_is_told_by_what() {
    let (_folder, daemon, acme) = start("100ms");
    let [port] = free_ports();
    let moved =
        last_after(&daemon, open(&acme, 1, 16_000), &["tenant", "set", "acme", "--port", &port.to_string()]);
    let said = moved.json()["detached"]["message"].to_string();
    assert!(said.contains(&format!("moved to port {port}; the request goes on")), "{said}");

    let acme = Tenant { port, http: Client::new(port, Some(&acme.key)), ..acme };
    wait::until("the new port is ready", MOMENT, || {
        acme.http
            .send("GET", "/readyz", &[], b"")
            .ok()
            .and_then(Incoming::try_read_head)
            .is_some_and(|a| a.status == 200)
    });
    let removed = last_after(&daemon, open(&acme, 1, 16_000), &["tenant", "remove", "acme", "--force"]);
    assert_eq!(removed.json()["error"]["code"], "tenant_removed", "{removed:?}");

    let globex = daemon.add_tenant_of(tiny::MIX.model, "globex", "0%", "100%");
    daemon.ask(&["checkpoint", "save", "one"]);
    let pid = daemon.status()["pid"].clone();
    let restored = last_after(&daemon, open(&globex, 1, 16_000), &["checkpoint", "restore", "one"]);
    let said = restored.json()["detached"]["message"].to_string();
    assert!(said.contains("goes back to a checkpoint"), "{said}");
    wait::until("the next daemon answers", MOMENT, || {
        let status = daemon.ctl(&["status"]);
        status.code == Some(0) && !status.text.contains(&format!("\"pid\": {pid},"))
    });
    daemon.stop();
}

#[test]
fn requests_that_come_at_once_with_one_idempotency_key_are_one() {
    let (_folder, daemon, acme) = start("2s");
    for round in 0..10 {
        // At first the engine takes none of them for a while: it waits for its worker.
        let holds = (round == 0).then(|| {
            let mut events = open(&acme, 99, LONG);
            events.next().expect("it has begun");
            let worker = worker(&daemon);
            send(&worker, Signal::SIGSTOP);
            (events, worker)
        });
        let asked: Vec<_> = (0..30)
            .map(|_| {
                let acme = acme.clone();
                thread::spawn(move || {
                    let (body, key) = (body(round, 8, false).to_string(), format!("round-{round}"));
                    let headers = [("content-type", "application/json"), ("idempotency-key", key.as_str())];
                    let answer = acme.http.open("POST", "/v1/completions", &headers, body.as_bytes());
                    let id = answer.header("pagedd-request-id").map(str::to_owned);
                    (answer.status, id, answer.into_response().text())
                })
            })
            .collect();
        if let Some((events, worker)) = holds {
            // The port goes on meanwhile.
            for _ in 0..20 {
                assert_eq!(acme.http.get("/health").status, 200);
            }
            assert!(asked.iter().all(|asking| !asking.is_finished()), "the engine was to be busy");
            send(&worker, Signal::SIGCONT);
            events.leave();
        }
        let mut answers = asked.into_iter().map(|asking| asking.join().expect("an answer"));
        let first = answers.next().expect("thirty");
        assert_eq!(first.0, 200, "{}", first.2);
        answers.for_each(|answer| assert_eq!(answer, first));
    }
    daemon.wait_idle();
    daemon.stop();
}

#[test]
fn processes_that_are_stopped_end_with_the_daemon_and_their_requests_go_on_after_the_next_start() {
    let (_folder, daemon, acme) = start("100ms");
    let undisturbed = text_of(&acme, 1, LONG);
    let mut events =
        acme.http.stream("/v1/completions", &[("pagedd-resumable", "1")], &body(1, LONG, true)).events();
    let id = id_of(&events);
    events.next().expect("it has begun");
    let processes = daemon.processes();
    // Worker, gateway and template process; not the daemon, nor its keeper.
    let children: Vec<&Process> = processes.iter().filter(|process| process.name != "pagedd").collect();
    assert!(children.len() >= 3, "{processes:#?}");
    for child in children {
        send(child, Signal::SIGSTOP);
    }
    daemon.signal(Signal::SIGTERM);
    let daemon = daemon.ended(&processes).start();
    let path = format!("/v1/requests/{id}/stream");
    let events: Vec<Event> = get(&acme, &path, &[("last-event-id", "0")]).events().collect();
    assert_eq!(text(&events), undisturbed);
    daemon.stop();
}

#[test]
fn with_a_retention_of_nothing_a_request_is_gone_once_it_was_read_and_stays_where_it_was_not() {
    let (_folder, daemon, acme) = start("2s");
    let globex = daemon.add_tenant_of(tiny::MIX.model, "globex", "0%", "100%");
    let info = daemon.ask(&["tenant", "set", "acme", "--retention", "0s"]);
    assert_eq!(info["tenant"]["retention"], "0s");
    assert_eq!(daemon.tenant_info("globex")["retention"], "10m");
    let run = |tenant: &Tenant, name: &str| {
        let answer = tenant.http.post("/v1/completions", &body(1, 8, false));
        answer.ok();
        (name.to_owned(), format!("/v1/requests/{}", answer.header("pagedd-request-id").expect("an id")))
    };
    let [(_, gone), (_, kept)] = [run(&acme, "acme"), run(&globex, "globex")];
    wait::until("what was read is gone", MOMENT, || acme.http.get(&gone).status == 404);
    assert_eq!(globex.http.get(&kept).status, 200, "another tenant's is there");

    // Its client went away in the middle, and may come back.
    let worker = worker(&daemon);
    let resumable = [("pagedd-resumable", "1")];
    let left = acme.http.stream("/v1/completions", &resumable, &body(2, LONG, true)).events();
    let unread = format!("/v1/requests/{}", id_of(&left));
    send(&worker, Signal::SIGSTOP);
    left.leave();
    wait::until("nobody reads it", MOMENT, || daemon.status()["drain"]["streams"] == 0);
    assert_eq!(daemon.status()["drain"]["requests"], 1, "it has not ended");
    send(&worker, Signal::SIGCONT);
    daemon.wait_idle();
    // By now the journal has looked at what it keeps.
    wait::until("another that was read is gone", MOMENT, || {
        let (_, other) = run(&acme, "acme");
        wait::within(MOMENT, || (acme.http.get(&other).status == 404).then_some(())).is_some()
    });

    let daemon = daemon.stop().start();
    get(&globex, &kept, &[]);
    let answer = get(&acme, &unread, &[]).into_response().ok();
    assert_eq!(answer["object"], "text_completion", "{answer}");
    wait::until("once it is read it is gone, too", MOMENT, || acme.http.get(&unread).status == 404);
    assert_eq!(acme.http.get(&gone).status, 404);
    assert_eq!(daemon.tenant_info("acme")["retention"], "0s", "it is the tenant's over a restart");
    daemon.stop();
}
