//! The HTTP contract on a real port: what is refused, how, and that the port goes on.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use pagedd_tests::daemon::{Daemon, Site, Tenant, smollm2_yaml};
use pagedd_tests::http::{Incoming, whole_text};
use pagedd_tests::wait;
use serde_json::{Value, json};

fn start() -> (Daemon, Tenant) {
    let yaml = format!(
        "gateway: {{ max_body: 64KiB, max_connections: 24, header_timeout: 1s }}\n{}",
        smollm2_yaml()
    );
    let daemon = Site::new(&yaml).start();
    let acme = daemon.add_tenant("acme", "0%", "50%");
    (daemon, acme)
}

fn completion(fields: &Value) -> Value {
    let mut body = json!({"model": "smollm2", "prompt": "Hello", "max_tokens": 2});
    body.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
    body
}

/// Each body is refused with 400 and names its field; afterwards the port serves as before.
#[track_caller]
fn refused(path: &str, cases: &[(Value, &str)]) {
    let (daemon, acme) = start();
    for (body, field) in cases {
        let answer = acme.http.post(path, body);
        let error = answer.error(400);
        let names = error["param"].as_str().is_some_and(|p| p.split(['[', '.']).next() == Some(field));
        assert!(names, "{body}: the error is not about `{field}`: {error}");
        assert_eq!(error["type"], "invalid_request_error", "{error}");
    }
    acme.complete("Hello", 2);
    let log = daemon.stop().log_text();
    assert!(!log.contains("panicked at"), "{log}");
}

#[test]
fn bug_13_an_empty_prompt_is_refused_with_its_field() {
    let prompts = [json!(""), json!([]), json!([""]), json!([[]])];
    let cases: Vec<_> = prompts.into_iter().map(|p| (completion(&json!({"prompt": p})), "prompt")).collect();
    refused("/v1/completions", &cases);
    refused("/v1/chat/completions", &[(json!({"model": "smollm2", "messages": []}), "messages")]);
}

#[test]
fn bug_22_temperatures_out_of_range_are_refused_and_tiny_ones_are_greedy() {
    let cases: Vec<_> = [json!(-1), json!(1e308), json!("NaN"), json!("warm")]
        .into_iter()
        .map(|t| (completion(&json!({"temperature": t})), "temperature"))
        .collect();
    refused("/v1/completions", &cases);
    let (_daemon, acme) = start();
    let ask = |t: f64| {
        acme.http.post("/v1/completions", &completion(&json!({"temperature": t, "max_tokens": 16}))).ok()["choices"].clone()
    };
    assert_eq!(ask(1e-9), ask(0.0));
    let answer =
        acme.http.post_bytes("/v1/completions", br#"{"model":"smollm2","prompt":"a","temperature":NaN}"#);
    answer.error(400);
}

#[test]
fn bug_28_a_lone_surrogate_is_refused_and_never_an_empty_conversation() {
    let (daemon, acme) = start();
    for text in [r"\ud800", r"\uD83D", r"a\udc00b"] {
        let body = format!(
            r#"{{"model":"smollm2","max_tokens":2,"messages":[{{"role":"user","content":"{text}"}}]}}"#
        );
        acme.http.post_bytes("/v1/chat/completions", body.as_bytes()).error(400);
    }
    let body = r#"{"model":"smollm2","max_tokens":2,"messages":[{"role":"user","content":"\ud83d\ude00"}]}"#;
    acme.http.post_bytes("/v1/chat/completions", body.as_bytes()).ok();
    daemon.stop();
}

#[test]
fn bug_29_token_ids_outside_of_the_vocabulary_are_refused() {
    let prompts = [json!([999_999]), json!([-1]), json!([49_152]), json!([5_000_000_000u64]), json!([1.5])];
    let cases: Vec<_> = prompts.into_iter().map(|p| (completion(&json!({"prompt": p})), "prompt")).collect();
    refused("/v1/completions", &cases);
}

#[test]
fn bug_31_a_number_of_choices_out_of_range_is_refused_streamed_or_not() {
    let mut cases = Vec::new();
    for n in [json!(0), json!(-1), json!(1_000_000), json!("two")] {
        for stream in [false, true] {
            cases.push((completion(&json!({"n": n, "stream": stream})), "n"));
        }
    }
    refused("/v1/completions", &cases);
}

#[test]
fn bug_15_a_prompt_that_can_never_fit_is_refused_at_once_with_the_numbers() {
    let (daemon, acme) = start();
    let start = Instant::now();
    // The context is 2,048 tokens; the tenant may hold 512 blocks of 16.
    let ids: Vec<u32> = (0..2_040).map(|i| 300 + i).collect();
    let answer = acme.http.post("/v1/completions", &completion(&json!({"prompt": ids, "max_tokens": 100})));
    let error = answer.error(400);
    assert!(error.to_string().contains("2048"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());

    let small = daemon.add_tenant("small", "0%", "2%");
    let ids: Vec<u32> = (0..400).map(|i| 300 + i).collect();
    let error = small.http.post("/v1/completions", &completion(&json!({"prompt": ids}))).error(400);
    let numbers: Vec<u32> = error["message"]
        .as_str()
        .unwrap_or("")
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|n| n.parse().ok())
        .collect();
    // 402 tokens are 26 blocks; 2 % of 1,024 blocks are 20.
    assert!(numbers.contains(&26) && numbers.contains(&20), "{error}");
}

#[test]
fn fields_that_are_unknown_or_not_supported_are_never_ignored_silently() {
    let (_daemon, acme) = start();
    for fields in [
        json!({"max_tokenz": 5}),
        json!({"best_of": 4}),
        json!({"suffix": "x"}),
        json!({"logit_bias": {"1": 5}}),
    ] {
        let answer = acme.http.post("/v1/completions", &completion(&fields));
        let name = fields.as_object().and_then(|o| o.keys().next()).expect("a field").clone();
        assert!(
            answer.status == 400 && answer.text().contains(&name),
            "{fields}: {} {}",
            answer.status,
            answer.text()
        );
    }
}

#[test]
fn what_is_no_request_gets_an_error_object_and_its_status() {
    let (_daemon, acme) = start();
    acme.http.post_bytes("/v1/completions", b"{").error(400);
    acme.http.post_bytes("/v1/completions", b"").error(400);
    acme.http.post_bytes("/v1/completions", b"[]").error(400);
    acme.http.post_bytes("/v1/completions", b"\xff\xfe").error(400);
    acme.http.post_bytes("/v1/completions", &vec![b' '; 65 << 10]).error(413);
    acme.http.get("/v1/nothing").error(404);
    acme.http.get("/v1/completions").error(405);
    acme.http.post("/v1/completions", &completion(&json!({"model": "gpt-4"}))).error(404);
    assert_eq!(acme.http.with_key(None).get("/livez").status, 200);
}

#[test]
fn a_clients_request_id_is_echoed_and_never_used_as_a_key() {
    let (_daemon, acme) = start();
    let ask = || {
        let headers = [("x-request-id", "same-for-both")];
        acme.http.stream("/v1/completions", &headers, &completion(&json!({"stream": true, "max_tokens": 24})))
    };
    let (first, second) = (ask(), ask());
    for answer in [&first, &second] {
        assert_eq!(answer.header("x-request-id"), Some("same-for-both"));
    }
    let id = |answer: &Incoming| answer.header("pagedd-request-id").map(str::to_owned);
    assert!(id(&first).is_some_and(|id| id.len() == 32) && id(&first) != id(&second));
    whole_text(first.events());
    whole_text(second.events());
}

#[test]
fn bug_34_a_head_that_comes_byte_by_byte_is_cut_off_and_others_are_served_meanwhile() {
    let (_daemon, acme) = start();
    let mut slow: Vec<_> = (0..16).map(|_| acme.http.connect()).collect();
    for stream in &mut slow {
        stream.write_all(b"POST /v1/comp").expect("a part of a head");
    }
    let start = Instant::now();
    acme.complete("Hello", 2);
    for stream in &mut slow {
        let mut rest = Vec::new();
        // The server ends it: with an answer, or without.
        let _ = stream.read_to_end(&mut rest);
        let text = String::from_utf8_lossy(&rest).into_owned();
        assert!(
            text.is_empty() || text.starts_with("HTTP/1.1 408") || text.starts_with("HTTP/1.1 400"),
            "{text}"
        );
    }
    assert!(start.elapsed() < Duration::from_secs(10), "cut off after {:?}", start.elapsed());
}

#[test]
fn a_connection_over_the_cap_is_told_so_and_health_still_answers() {
    let (_daemon, acme) = start();
    let idle: Vec<_> = (0..24).map(|_| acme.http.connect()).collect();
    let answer = acme.http.get("/v1/models");
    let error = answer.error(503);
    assert!(error["message"].as_str().is_some_and(|m| m.contains("connections")), "{error}");
    assert_eq!(acme.http.get("/livez").status, 200);
    drop(idle);
    wait::until("the port serves again", Duration::from_secs(5), || {
        acme.http.get("/v1/models").status == 200
    });
    acme.complete("Hello", 2);
}
