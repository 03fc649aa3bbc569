//! What a tenant may ask for: refused with the time after which it is admitted, and counted whatever dies.

mod tiny;

use std::thread;
use std::time::{Duration, Instant};

use pagedd_tests::daemon::{Daemon, Site, Tenant};
use pagedd_tests::http::{Incoming, Response};
use pagedd_tests::process::kill_descendant;
use pagedd_tests::wait;
use serde_json::{Value, json};

fn start(folder: &tempfile::TempDir) -> (Daemon, Tenant, Tenant) {
    let daemon = Site::new(&tiny::yaml(folder.path())).start();
    let acme = daemon.add_tenant_of("tiny", "acme", "0%", "100%");
    let globex = daemon.add_tenant_of("tiny", "globex", "0%", "100%");
    (daemon, acme, globex)
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

fn body(max_tokens: u32) -> Value {
    json!({"model": "tiny", "prompt": "the quiet sea", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true})
}

fn ask(tenant: &Tenant, max_tokens: u32) -> Response {
    tenant.http.post("/v1/completions", &body(max_tokens))
}

#[track_caller]
fn number(response: &Response, header: &str) -> u64 {
    let value = response.header(header).unwrap_or_else(|| panic!("no {header}: {}", response.text()));
    value.parse().unwrap_or_else(|_| panic!("{header}: {value}"))
}

/// The refusal is for this quota; milliseconds after which the request would be admitted.
#[track_caller]
fn over(response: &Response, quota: &str) -> u64 {
    let error = response.error(429);
    assert_eq!(error["code"], "rate_limit_exceeded", "{error}");
    assert!(error["message"].as_str().is_some_and(|message| message.contains(quota)), "{error}");
    let (seconds, ms) = (number(response, "retry-after"), number(response, "retry-after-ms"));
    assert_eq!(seconds, ms.div_ceil(1000).max(1));
    ms
}

#[test]
fn requests_beyond_a_minutes_quota_are_admitted_when_it_is_told_also_after_the_daemons_death() {
    let folder = folder();
    let (mut daemon, acme, globex) = start(&folder);
    daemon.ask(&["tenant", "set", "acme", "--requests-per-minute", "3"]);
    let key = [("content-type", "application/json"), ("idempotency-key", "once")];
    let text = body(2).to_string();
    let first = acme.http.open("POST", "/v1/completions", &key, text.as_bytes()).into_response();
    assert_eq!((first.status, number(&first, "x-ratelimit-remaining-requests")), (200, 2));
    for left in [1, 0] {
        let answer = ask(&acme, 2);
        let (limit, remaining) = (
            number(&answer, "x-ratelimit-limit-requests"),
            number(&answer, "x-ratelimit-remaining-requests"),
        );
        assert_eq!((answer.status, limit, remaining), (200, 3, left));
        assert!(answer.header("x-ratelimit-reset-requests").is_some());
    }
    let told = over(&ask(&acme, 2), "requests_per_minute");
    assert!((40_000..=60_500).contains(&told), "{told} ms");
    let again = acme.http.open("POST", "/v1/completions", &key, text.as_bytes()).into_response();
    assert_eq!(
        (again.status, again.header("pagedd-idempotent-replay")),
        (200, Some("true")),
        "{}",
        again.text()
    );
    assert_eq!(ask(&globex, 2).status, 200, "another tenant's quota is its own");

    let pid = daemon.status()["pid"].as_u64().expect("pid") as u32;
    kill_descendant(daemon.root(), pid);
    daemon.wait_ready();
    wait::until("the tenant is ready again", Duration::from_mins(1), || {
        acme.http.get("/readyz").status == 200
    });
    // What was before is known to the second.
    let asked = Instant::now();
    let told = Duration::from_millis(over(&ask(&acme, 2), "requests_per_minute"));
    let usage = &daemon.tenant_info("acme")["quotas"]["requests_per_minute"];
    assert_eq!((&usage["limit"], &usage["used"]), (&json!(3), &json!(3)), "{usage}");
    let admitted =
        wait::within(Duration::from_secs(70), || (ask(&acme, 2).status == 200).then(|| asked.elapsed()));
    let admitted = admitted.expect("it is admitted in the end");
    let off = admitted.abs_diff(told);
    assert!(off < Duration::from_millis(1500), "told {told:?}, admitted after {admitted:?}");
    daemon.stop();
}

#[test]
fn only_so_many_requests_are_taken_at_once_and_a_changed_quota_holds_at_once() {
    let folder = folder();
    let (daemon, acme, _) = start(&folder);
    daemon.ask(&["tenant", "set", "acme", "--max-concurrent", "2"]);
    let mut stream = body(4000);
    stream["stream"] = json!(true);
    let open = |_| acme.http.stream("/v1/completions", &[], &stream);
    let answers: Vec<Incoming> = thread::scope(|scope| {
        let asks: Vec<_> = (0..8).map(|i| scope.spawn(move || open(i))).collect();
        asks.into_iter().map(|ask| ask.join().expect("an answer")).collect()
    });
    let (taken, refused): (Vec<_>, Vec<_>) = answers.into_iter().partition(|answer| answer.status == 200);
    assert_eq!((taken.len(), refused.len()), (2, 6));
    for answer in refused {
        over(&answer.into_response(), "max_concurrent");
    }
    let info = &daemon.tenant_info("acme")["quotas"]["max_concurrent"];
    assert_eq!(info, &json!({"limit": 2, "used": 2, "refused": 6}));
    daemon.ask(&["tenant", "set", "acme", "--max-concurrent", "none"]);
    assert_eq!(ask(&acme, 2).status, 200);
    daemon.ask(&["tenant", "set", "acme", "--max-concurrent", "1"]);
    over(&ask(&acme, 2), "max_concurrent");
    drop(taken);
    daemon.wait_idle();
    assert_eq!(ask(&acme, 2).status, 200);
    let metrics = daemon.ask(&["metrics"])["text"].as_str().unwrap_or_default().to_owned();
    let sample = r#"pagedd_quota_refusals_total{tenant="acme",model="tiny",quota="max_concurrent"} 7"#;
    assert!(metrics.contains(sample), "{metrics}");
    daemon.stop();
}

#[test]
fn tokens_are_taken_for_all_that_a_request_can_come_to_and_given_back_at_its_end() {
    let folder = folder();
    let (daemon, acme, _) = start(&folder);
    let prompt = ask(&acme, 1).ok()["usage"]["prompt_tokens"].as_u64().expect("prompt tokens");
    // The first request counts, too.
    let limit = 2 * prompt + 1 + 100;
    daemon.ask(&["tenant", "set", "acme", "--tokens-per-minute", &limit.to_string()]);
    let never = ask(&acme, 400);
    let error = never.error(400);
    assert_eq!(error["code"], "exceeds_quota", "{error}");
    for number in [limit, prompt + 400] {
        assert!(error["message"].as_str().is_some_and(|m| m.contains(&number.to_string())), "{error}");
    }
    over(&ask(&acme, 101), "tokens_per_minute");
    let answer = ask(&acme, 60);
    let numbers =
        [number(&answer, "x-ratelimit-limit-tokens"), number(&answer, "x-ratelimit-remaining-tokens")];
    assert_eq!((answer.status, numbers), (200, [limit, 40]), "its prompt and its 60 tokens are taken");
    wait::until("it has ended", Duration::from_secs(10), || {
        daemon.tenant_info("acme")["quotas"]["max_concurrent"]["used"] == 0
    });
    let used = &daemon.tenant_info("acme")["quotas"]["tokens_per_minute"]["used"];
    assert_eq!(used, &json!(2 * prompt + 61));
    // One that ends early gives back what it did not use.
    let mut stream = body(40 - prompt as u32);
    stream["stream"] = json!(true);
    let mut events = acme.http.stream("/v1/completions", &[], &stream).events();
    events.next().expect("it has begun");
    events.leave();
    daemon.wait_idle();
    let told = over(&ask(&acme, 90), "tokens_per_minute");
    assert!(told > 30_000, "{told} ms");
    daemon.stop();
}

#[test]
fn a_full_queue_is_told_by_the_requests_and_by_the_tokens_that_wait() {
    let folder = folder();
    let yaml = tiny::yaml(folder.path()).replace("max_num_seqs: 72", "max_num_seqs: 1");
    let daemon = Site::new(&yaml).start();
    let acme = daemon.add_tenant_of("tiny", "acme", "0%", "100%");
    let prompt = ask(&acme, 1).ok()["usage"]["prompt_tokens"].as_u64().expect("prompt tokens");
    daemon.ask(&["tenant", "set", "acme", "--max-queued-requests", "2"]);
    let mut stream = body(8000);
    stream["background"] = json!(true);
    let background = || acme.http.post("/v1/completions", &stream);
    assert_eq!(background().status, 202);
    wait::until("it runs", Duration::from_secs(30), || {
        daemon.tenant_info("acme")["quotas"]["max_queued_requests"]["used"] == 0
    });
    assert_eq!((background().status, background().status), (202, 202));
    over(&background(), "max_queued_requests");
    daemon.ask(&["tenant", "set", "acme", "--max-queued-requests", "none", "--max-queued-tokens", "1"]);
    assert_eq!(background().error(400)["code"], "exceeds_quota");
    daemon.ask(&["tenant", "set", "acme", "--max-queued-tokens", &(3 * prompt - 1).to_string()]);
    over(&background(), "max_queued_tokens");
    daemon.ask(&["tenant", "remove", "acme", "--force"]);
    daemon.stop();
}
