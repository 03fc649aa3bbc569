//! The bill: each request once, whatever dies while it is written.

mod tiny;

use std::thread;
use std::time::{Duration, Instant};

use pagedd_tests::asks::{self, Mix};
use pagedd_tests::daemon::{Daemon, Site};
use pagedd_tests::exchange::Exchange;
use pagedd_tests::random::Random;
use pagedd_tests::wait;
use serde_json::{Value, json};

/// A daemon and its points are met by then.
const LIMIT: Duration = Duration::from_mins(2);

const MIX: Mix<'static> = Mix { model: "tiny", words: 60, tokens: 40 };

/// Points between a request's end and its bill in control.db: the first five daemons end there.
const POINTS: [&str; 6] = [
    "journal-bill=2*off->panic",
    "before-charge=panic",
    "control-charge=panic",
    "after-charge=panic",
    "journal-forget-bills=panic",
    "",
];

fn rows(daemon: &Daemon, arguments: &[&str]) -> Vec<Value> {
    let report = daemon.ask(&[&["usage"], arguments].concat());
    assert_eq!(report["behind"], Value::Null, "{report}");
    report["rows"].as_array().cloned().unwrap_or_default()
}

/// Sums over rows.
fn sums<const N: usize>(rows: &[Value], fields: [&str; N]) -> [u64; N] {
    fields.map(|field| rows.iter().map(|row| row[field].as_u64().expect("a number")).sum())
}

/// A sample of the operator's metrics: the sum over a tenant's labels.
fn metric(daemon: &Daemon, name: &str, tenant: &str) -> u64 {
    let text = daemon.ask(&["metrics"])["text"].as_str().unwrap_or_default().to_owned();
    let label = format!("tenant=\"{tenant}\"");
    let samples = text.lines().filter(|l| l.starts_with(&format!("{name}{{")) && l.contains(&label));
    samples.filter_map(|l| l.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>() as u64
}

#[test]
fn every_request_is_billed_once_wherever_daemons_end_meanwhile() {
    let folder = tempfile::tempdir().expect("a folder");
    let daemon = Site::new(&tiny::yaml(folder.path())).with_points_by_start(&POINTS).start();
    let acme = daemon.add_tenant_of("tiny", "acme", "0%", "100%");
    let globex = daemon.add_tenant_of("tiny", "globex", "0%", "100%");
    // What is not kept is billed nevertheless.
    daemon.ask(&["tenant", "set", "globex", "--retention", "0s"]);
    let asks = asks::asks(MIX, &mut Random::new(11), 24);
    let start = Instant::now();
    let used: Vec<[u64; 2]> = thread::scope(|scope| {
        let ask = |(i, ask)| {
            let tenant = if i % 2 == 0 { &acme } else { &globex };
            scope.spawn(move || {
                let mut exchange = Exchange::new(&tenant.http, ask, format!("bill-{i}"));
                let outcome = exchange.finish().unwrap_or_else(|error| panic!("request {i}: {error}"));
                outcome.usage.expect("its usage")
            })
        };
        let asked: Vec<_> = asks.iter().enumerate().map(ask).collect();
        // Each report adds up what has ended, so that points are met without waiting for it.
        while daemon.site().starts() < POINTS.len() {
            assert!(start.elapsed() < LIMIT, "points are not met: {} starts", daemon.site().starts());
            daemon.ctl(&["usage"]);
        }
        asked.into_iter().map(|asked| asked.join().expect("an answer")).collect()
    });
    wait::until("the last daemon answers", LIMIT, || daemon.ctl(&["usage"]).code == Some(0));
    daemon.wait_idle();
    for (name, of) in [("acme", 0), ("globex", 1)] {
        let mine = || used.iter().skip(of).step_by(2);
        let expected = [12, 0, 0, mine().map(|[prompt, _]| prompt).sum(), mine().map(|[_, out]| out).sum()];
        let billed = rows(&daemon, &[name]);
        let fields = ["requests", "aborted", "failed", "prompt_tokens", "output_tokens"];
        assert_eq!(sums(&billed, fields), expected, "{name}: {billed:?}");
        assert_eq!(sums(&rows(&daemon, &[name, "--by", "hour"]), fields), expected, "{name} by the hour");
        assert_eq!(sums(&rows(&daemon, &[name, "--by", "key"]), fields), expected, "{name} by key");
    }
    daemon.stop();
}

#[test]
fn bill_metrics_and_answers_agree_and_what_is_aborted_pays_for_what_was_computed() {
    let folder = tempfile::tempdir().expect("a folder");
    let daemon = Site::new(&tiny::yaml(folder.path())).start();
    let acme = daemon.add_tenant_of("tiny", "acme", "0%", "100%");
    let created = daemon.ask(&["key", "create", "acme"]);
    let second = acme.http.with_key(created["key"].as_str());
    let body = json!({"model": "tiny", "prompt": "the lighthouse keeper climbed every evening over a quiet sea and he saw ships that in no harbour would ever call their own", "max_tokens": 30, "temperature": 0, "ignore_eos": true});
    let mut answered = [0_u64; 3];
    for http in [&acme.http, &acme.http, &second] {
        let usage = http.post("/v1/completions", &body).ok()["usage"].clone();
        let cached = &usage["prompt_tokens_details"]["cached_tokens"];
        let numbers = [&usage["prompt_tokens"], cached, &usage["completion_tokens"]];
        answered.iter_mut().zip(numbers).for_each(|(sum, n)| *sum += n.as_u64().expect("a number"));
    }
    assert!(answered[1] > 0, "the second of them finds the prompt of the first");
    let fields = ["prompt_tokens", "cached_tokens", "output_tokens"];
    wait::until("the last has ended", LIMIT, || sums(&rows(&daemon, &["acme"]), ["requests"]) == [3]);
    assert_eq!(sums(&rows(&daemon, &["acme"]), fields), answered);
    let by_key = rows(&daemon, &["acme", "--by", "key"]);
    let ids: Vec<_> = by_key.iter().map(|row| (row["key"].clone(), row["requests"].clone())).collect();
    assert_eq!((ids.len(), &ids[0].1, &ids[1]), (2, &json!(2), &(created["id"].clone(), json!(1))));

    let mut stream = body.clone();
    (stream["stream"], stream["max_tokens"]) = (json!(true), json!(8000));
    let mut events = acme.http.stream("/v1/completions", &[], &stream).events();
    events.next().expect("it has begun");
    events.leave();
    daemon.wait_idle();
    wait::until("the aborted one is billed", LIMIT, || sums(&rows(&daemon, &["acme"]), ["aborted"]) == [1]);
    let billed =
        sums(&rows(&daemon, &["acme"]), ["requests", "prompt_tokens", "cached_tokens", "output_tokens"]);
    let counted = [
        metric(&daemon, "pagedd_requests_admitted_total", "acme"),
        metric(&daemon, "pagedd_prompt_tokens_total", "acme"),
        metric(&daemon, "pagedd_prompt_tokens_cached_total", "acme"),
        metric(&daemon, "pagedd_output_tokens_total", "acme"),
    ];
    assert_eq!(billed, counted, "bill and metrics");
    assert!(billed[3] > answered[2] && billed[3] < answered[2] + 8000, "{billed:?} after {answered:?}");

    daemon.ask(&["tenant", "remove", "acme"]);
    let again = daemon.add_tenant_of("tiny", "acme", "0%", "100%");
    again.http.post("/v1/completions", &body).ok();
    wait::until("the new one's is billed", LIMIT, || sums(&rows(&daemon, &[]), ["requests"]) == [5]);
    let all = rows(&daemon, &["acme"]);
    let removed: Vec<_> = all.iter().map(|row| (row["removed"].clone(), row["requests"].clone())).collect();
    assert_eq!(removed, [(json!(true), json!(4)), (json!(false), json!(1))], "{all:?}");
    assert_ne!(daemon.ctl(&["usage", "nobody"]).code, Some(0));
    assert_eq!(rows(&daemon, &["--since", "2999-01-01"]), [] as [Value; 0]);
    daemon.stop();
}
