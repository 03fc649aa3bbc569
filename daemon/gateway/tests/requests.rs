//! A request after its first connection: polled, attached again, cancelled, made again under its key.

mod common;

use std::thread;
use std::time::Duration;

use common::client::{
    Response, events, get, get_with, open, path_of, post, post_with, request, state, text_of,
};
use common::{Options, Script, Server, Visible, closed, key, log_of, tokens_of, welcome};
use pagedd_gateway::app::Settings;
use pagedd_wire::gateway::{Closed, Entry, Finish, OnLeave, ToDaemon, ToGateway, Welcome};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";
const NOBODYS: &str = "00000000000000000000000000000000";

fn saying(answer: &'static str) -> Server {
    saying_to(Options::default(), answer)
}

fn saying_to(options: Options, answer: &'static str) -> Server {
    let text = options.text.clone();
    Server::start(options, move |_| Script::Log(log_of(&text, answer)))
}

fn two_keys() -> Options {
    let welcome = Welcome { keys: Some(vec![key(1, "one"), key(2, "two")]), ..welcome() };
    Options { welcome, ..Options::default() }
}

fn completion(fields: &str) -> String {
    format!(r#"{{"model":"tiny","prompt":"hello"{fields}}}"#)
}

fn chat(fields: &str) -> String {
    format!(r#"{{"model":"tiny","messages":[{{"role":"user","content":"hello"}}]{fields}}}"#)
}

fn cancels(server: &Server) -> usize {
    server.daemon.received().iter().filter(|frame| matches!(frame, ToDaemon::Cancel { .. })).count()
}

#[test]
fn a_request_in_the_background_is_answered_at_once_and_polled_to_its_end() {
    let server = saying("abc");
    server.daemon.show(Visible::First(0));
    for (path, body, kind) in
        [(CHAT, chat(r#","background":true"#), "chat"), (TEXT, completion(r#","background":true"#), "text")]
    {
        server.daemon.show(Visible::First(0));
        let first = post(server.address, path, &body);
        assert_eq!(first.status, 202, "{}", first.body);
        let found = path_of(&first);
        assert_eq!(first.header("location"), Some(found.as_str()));
        let (status, object) = state(&first);
        assert_eq!(
            (status, &object["status"], &object["object"]),
            ("queued", &"queued".into(), &"request".into())
        );
        assert!(object["id"].as_str().unwrap().ends_with(first.header("pagedd-request-id").unwrap()));
        assert_eq!(server.daemon.wait_request().on_leave, OnLeave::Background);

        server.daemon.show(Visible::First(2));
        let polled = get(server.address, &found);
        assert_eq!((polled.status, polled.header("cache-control")), (200, Some("no-store")));
        let (status, object) = state(&polled);
        assert_eq!((status, &object["status"]), ("in_progress", &"in_progress".into()));
        let choice = &object["choices"][0];
        let text = if kind == "chat" { &choice["message"]["content"] } else { &choice["text"] };
        assert_eq!((text, &choice["finish_reason"]), (&json!("ab"), &Value::Null));
        assert_eq!((&object["last_event_id"], &object["completion_tokens"]), (&json!(2), &json!(2)));
        assert_eq!(object["error"], Value::Null);

        server.daemon.show(Visible::All);
        let ended = get(server.address, &found);
        let (status, answer) = state(&ended);
        assert_eq!((ended.status, status), (200, "completed"));
        assert_eq!(answer["object"], if kind == "chat" { "chat.completion" } else { "text_completion" });
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
        assert_eq!(answer["usage"]["completion_tokens"], 3);
        // The stream is there too, for who wants it.
        assert_eq!(text_of(&events(&get(server.address, &format!("{found}/stream")).body), 0), "abc");
    }
    assert_eq!(cancels(&server), 0);
}

#[test]
fn a_stream_in_the_background_runs_on_when_its_client_leaves() {
    let server = saying("abc");
    server.daemon.show(Visible::First(1));
    let body = completion(r#","stream":true,"background":true"#);
    let mut stream = open(server.address, &request("POST", TEXT, &[], &body));
    stream.read_until("\"text\":\"a\"");
    assert_eq!(server.daemon.wait_request().on_leave, OnLeave::RunOn);
    let path = format!("/v1/requests/{}/stream", stream.header("pagedd-request-id").unwrap());
    drop(stream);
    server.daemon.wait("a detach", |received| {
        received.iter().any(|frame| matches!(frame, ToDaemon::Detach { .. })).then_some(())
    });
    assert_eq!(cancels(&server), 0);
    server.daemon.show(Visible::All);
    let rest = get_with(server.address, &path, &[("Last-Event-ID", "1")]);
    assert_eq!(text_of(&events(&rest.body), 0), "bc");
}

#[test]
fn the_text_so_far_and_the_stream_after_it_are_the_whole_text() {
    let options = Options::default();
    let text = options.text.clone();
    let server = Server::start(options, move |_| {
        let mut entries = Vec::new();
        for (a, b) in tokens_of(&text, 0, "a🤣STbc你").into_iter().zip(tokens_of(&text, 1, "zyxwvutsrqp"))
        {
            entries.extend([a, b]);
        }
        entries.extend([0, 1].map(|choice| Entry::Finish { choice, reason: Finish::Length }));
        entries.push(Entry::End { cached_tokens: 0 });
        Script::Log(entries)
    });
    let fields = r#","n":2,"stop":["STOP"],"background":true"#;
    let found = path_of(&post(server.address, TEXT, &completion(fields)));
    let whole = get(server.address, &found).json();
    for there in 0..22 {
        server.daemon.show(Visible::First(there));
        let (_, so_far) = state(&get(server.address, &found));
        let last = so_far["last_event_id"].as_u64().unwrap();
        assert_eq!(last, there as u64);
        server.daemon.show(Visible::All);
        let rest =
            get_with(server.address, &format!("{found}/stream"), &[("Last-Event-ID", &last.to_string())]);
        let rest = events(&rest.body);
        for choice in 0..2 {
            let text = so_far["choices"][choice]["text"].as_str().unwrap().to_owned();
            assert_eq!(text + &text_of(&rest, choice as u64), whole["choices"][choice]["text"], "{there}");
        }
    }
}

#[test]
fn a_cancel_ends_a_request_and_may_be_repeated() {
    let server = saying("abc");
    server.daemon.show(Visible::First(2));
    let found = path_of(&post(server.address, TEXT, &completion(r#","background":true"#)));
    let cancel = format!("{found}/cancel");
    assert_eq!(get(server.address, &cancel).header("allow"), Some("POST"));
    let first = post(server.address, &cancel, "");
    let (status, object) = state(&first);
    assert_eq!((first.status, status, &object["status"]), (200, "cancelled", &"cancelled".into()));
    assert_eq!((&object["choices"][0]["text"], &object["last_event_id"]), (&"ab".into(), &4.into()));
    assert_eq!((&object["error"]["code"], &object["completion_tokens"]), (&"cancelled".into(), &2.into()));
    for again in [post(server.address, &cancel, ""), get(server.address, &found)] {
        assert_eq!((again.status, again.body.as_str()), (200, first.body.as_str()));
    }
    assert_eq!(cancels(&server), 1);
}

#[test]
fn a_cancel_that_takes_long_is_answered_with_the_state_so_far() {
    let settings = Settings { cancel_wait: Duration::from_millis(20), ..Settings::default() };
    let server = saying_to(Options { settings, ..Options::default() }, "abc");
    server.daemon.show(Visible::First(2));
    let found = path_of(&post(server.address, TEXT, &completion(r#","background":true"#)));
    server.daemon.mute();
    let cancelled = post(server.address, &format!("{found}/cancel"), "");
    let (status, object) = state(&cancelled);
    assert_eq!((cancelled.status, status, &object["last_event_id"]), (200, "in_progress", &2.into()));
    assert_eq!(cancels(&server), 1);
}

#[test]
fn a_cancel_of_a_request_that_somebody_reads_ends_the_stream() {
    let server = saying("abc");
    server.daemon.show(Visible::First(1));
    let mut stream = open(server.address, &request("POST", TEXT, &[], &completion(r#","stream":true"#)));
    stream.read_until("\"text\":\"a\"");
    let cancel = format!("/v1/requests/{}/cancel", stream.header("pagedd-request-id").unwrap());
    assert_eq!(state(&post(server.address, &cancel, "")).0, "cancelled");
    let rest = stream.finish().body;
    assert!(rest.contains("\"code\":\"cancelled\"") && rest.ends_with("data: [DONE]\n\n"), "{rest}");
    assert_eq!(cancels(&server), 1);
}

#[test]
fn a_cancel_of_a_complete_answer_gives_the_answer() {
    let server = saying("abc");
    let made = post(server.address, CHAT, &chat(""));
    let cancelled = post(server.address, &format!("{}/cancel", path_of(&made)), "");
    assert_eq!((cancelled.status, &cancelled.body), (200, &made.body));
    assert_eq!(cancelled.header("pagedd-request-status"), Some("completed"));
    assert_eq!(cancels(&server), 0);
}

#[test]
fn a_request_that_failed_says_so_when_it_is_asked_for() {
    let options = Options::default();
    let text = options.text.clone();
    let server = Server::start(options, move |_| {
        let mut entries = tokens_of(&text, 0, "ab");
        entries.push(Entry::Finish { choice: 0, reason: Finish::Failed });
        entries.push(Entry::End { cached_tokens: 0 });
        Script::Log(entries)
    });
    let made = post(server.address, CHAT, &chat(""));
    assert_eq!(made.error().2, "generation_failed");
    let polled = get(server.address, &path_of(&made));
    let (status, object) = state(&polled);
    assert_eq!((polled.status, status, &object["status"]), (200, "failed", &"failed".into()));
    assert_eq!(object["error"]["code"], "generation_failed");
    assert_eq!(object["choices"][0]["message"]["content"], "ab");
}

#[test]
fn what_is_not_this_keys_is_not_told_from_what_does_not_exist() {
    let server = saying_to(two_keys(), "abc");
    let one = ("Authorization", "Bearer one");
    let two = ("Authorization", "Bearer two");
    let made = post_with(server.address, TEXT, &[one], &completion(r#","background":true"#));
    let found = path_of(&made);
    let nobodys = format!("/v1/requests/{NOBODYS}");
    let mut answers = Vec::new();
    for base in [found.as_str(), nobodys.as_str(), "/v1/requests/xyz"] {
        for headers in [&[two][..], &[two, ("Last-Event-ID", "1")], &[two, ("Last-Event-ID", "99999")]] {
            answers.push(get_with(server.address, base, headers));
            answers.push(get_with(server.address, &format!("{base}/stream"), headers));
            answers.push(post_with(server.address, &format!("{base}/cancel"), headers, ""));
        }
    }
    for answer in &answers {
        assert_eq!(answer.error(), (404, String::new(), "request_not_found".to_owned()));
        let names =
            |answer: &Response| answer.headers.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        assert_eq!((&answer.body, names(answer)), (&answers[0].body, names(&answers[0])));
    }
    assert_eq!(cancels(&server), 0);
    assert_eq!(get_with(server.address, &found, &[one]).status, 200);
}

#[test]
fn a_client_that_is_ahead_waits_until_the_request_has_come_so_far_or_ended() {
    let server = saying("abc");
    server.daemon.show(Visible::First(1));
    let path =
        format!("{}/stream", path_of(&post(server.address, TEXT, &completion(r#","background":true"#))));
    let ahead = |id: &'static str| {
        let (address, path) = (server.address, path.clone());
        thread::spawn(move || get_with(address, &path, &[("Last-Event-ID", id)]))
    };
    let (near, end, beyond) = (ahead("2"), ahead("5"), ahead("6"));
    server.daemon.wait("an attachment beside that of the first answer", |received| {
        (received.iter().filter(|frame| matches!(frame, ToDaemon::Attach { .. })).count() >= 2).then_some(())
    });
    server.daemon.show(Visible::First(2));
    assert!(!end.is_finished() && !beyond.is_finished());
    server.daemon.show(Visible::All);
    assert_eq!(text_of(&events(&near.join().unwrap().body), 0), "c");
    assert_eq!(end.join().unwrap().body, "data: [DONE]\n\n");
    let refused = beyond.join().unwrap();
    assert_eq!(refused.error(), (400, "Last-Event-ID".to_owned(), "invalid_value".to_owned()));
    // And of a finished one at once.
    let refused = get_with(server.address, &path, &[("Last-Event-ID", "6")]);
    assert_eq!(refused.error(), (400, "Last-Event-ID".to_owned(), "invalid_value".to_owned()));
    assert_eq!(get_with(server.address, &path, &[("Last-Event-ID", "5")]).body, "data: [DONE]\n\n");
}

#[test]
fn what_is_no_event_id_is_refused_with_the_headers_name() {
    let server = saying("abc");
    let path = format!("{}/stream", path_of(&post(server.address, TEXT, &completion(""))));
    for wrong in ["x", "-1", "+1", "1.0", "0x1", "18446744073709551616"] {
        let refused = get_with(server.address, &path, &[("Last-Event-ID", wrong)]);
        assert_eq!(refused.error(), (400, "Last-Event-ID".to_owned(), "invalid_value".to_owned()), "{wrong}");
    }
}

#[test]
fn a_key_that_comes_again_gives_the_same_answer_in_every_form() {
    for (path, body) in [
        (TEXT, completion("")),
        (TEXT, completion(r#","stream":true"#)),
        (CHAT, chat(r#","stream":true,"stream_options":{"include_usage":true}"#)),
        (CHAT, chat(r#","n":1,"prompt_cache_key":"x""#)),
        (CHAT, chat(r#","background":true"#)),
    ] {
        let server = saying("abc");
        let headers = [("Idempotency-Key", "order-17")];
        let first = post_with(server.address, path, &headers, &body);
        assert_eq!(first.header("pagedd-idempotent-replay"), None);
        let again = post_with(server.address, path, &headers, &body);
        assert_eq!(again.header("pagedd-idempotent-replay"), Some("true"));
        assert_eq!((again.status, &again.body), (first.status, &first.body), "{body}");
        for name in ["pagedd-request-id", "content-type", "pagedd-warning", "location"] {
            assert_eq!(again.header(name), first.header(name), "{name}");
        }
        server.daemon.with_logs(|logs| assert_eq!(logs.len(), 1));
        assert_eq!(cancels(&server), 0);
    }
}

#[test]
fn a_key_that_comes_again_while_its_request_runs_waits_with_the_first() {
    let server = saying("abc");
    server.daemon.show(Visible::First(1));
    let asked = request("POST", TEXT, &[("Idempotency-Key", "k")], &completion(r#","stream":true"#));
    let mut first = open(server.address, &asked);
    let start = first.read_until("\"text\":\"a\"");
    let mut again = open(server.address, &asked);
    assert_eq!(again.header("pagedd-idempotent-replay"), Some("true"));
    assert_eq!(again.read_until("\"text\":\"a\""), start);
    // The first client leaves; the second still waits.
    drop(first);
    server.daemon.show(Visible::All);
    assert_eq!(text_of(&events(&(start + &again.finish().body)), 0), "abc");
    assert_eq!(cancels(&server), 0);
}

#[test]
fn a_key_with_another_body_or_path_is_refused_and_another_callers_key_is_another() {
    let server = saying_to(two_keys(), "abc");
    let ask = |bearer, path, body: &str| {
        post_with(server.address, path, &[("Authorization", bearer), ("Idempotency-Key", "k")], body)
    };
    assert_eq!(ask("Bearer one", TEXT, &completion("")).status, 200);
    for (path, body) in [(TEXT, completion(r#","n":2"#)), (TEXT, completion(" ")), (CHAT, chat(""))] {
        let refused = ask("Bearer one", path, &body);
        let expected = (422, "Idempotency-Key".to_owned(), "idempotency_key_reused".to_owned());
        assert_eq!(refused.error(), expected, "{body}");
    }
    let foreign = ask("Bearer two", TEXT, &completion(r#","n":2"#));
    assert_eq!((foreign.status, foreign.header("pagedd-idempotent-replay")), (200, None));
    server.daemon.with_logs(|logs| assert_eq!(logs.len(), 2));
}

#[test]
fn headers_that_are_not_understood_are_refused_with_their_names() {
    let server = saying("abc");
    let long = "k".repeat(256);
    for (name, value) in [
        ("Idempotency-Key", ""),
        ("Idempotency-Key", "a b"),
        ("Idempotency-Key", "\u{fc}"),
        ("Idempotency-Key", long.as_str()),
        ("pagedd-resumable", "yes"),
    ] {
        let refused = post_with(server.address, TEXT, &[(name, value)], &completion(""));
        assert_eq!(refused.error(), (400, name.to_owned(), "invalid_value".to_owned()), "{value}");
    }
    assert!(!server.daemon.received().iter().any(|frame| matches!(frame, ToDaemon::Submit { .. })));
    let request = post(server.address, TEXT, &completion(""));
    assert_eq!((request.status, server.daemon.wait_request().idempotency), (200, None));
}

#[test]
fn another_gateway_finds_a_request_of_the_background_and_its_key_after_the_first_one_died() {
    let first = saying("abc");
    first.daemon.show(Visible::First(2));
    let headers = [("Idempotency-Key", "k")];
    let body = completion(r#","background":true"#);
    let made = post_with(first.address, TEXT, &headers, &body);
    let daemon = first.daemon.clone();
    daemon.die();
    first.join();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let second = Server::on(listener, daemon, Options::default());
    assert_eq!(get(second.address, &path_of(&made)).body, made.body);
    let again = post_with(second.address, TEXT, &headers, &body);
    assert_eq!((again.status, again.body.as_str()), (202, made.body.as_str()));
    assert_eq!(again.header("pagedd-idempotent-replay"), Some("true"));
}

#[test]
fn a_tenant_that_drains_still_answers_for_what_was_accepted() {
    let server = saying("abc");
    server.daemon.show(Visible::First(1));
    let made = post(server.address, TEXT, &completion(r#","background":true"#));
    server.daemon.send(&ToGateway::Welcome(Box::new(closed(Closed::Draining))));
    server.wait_status("/readyz", 503, 503);
    let refused = post(server.address, TEXT, &completion(""));
    assert_eq!((refused.error().2.as_str(), refused.header("retry-after")), ("draining", Some("5")));
    server.daemon.show(Visible::All);
    assert_eq!(state(&get(server.address, &path_of(&made))).0, "completed");
    assert_eq!(text_of(&events(&get(server.address, &format!("{}/stream", path_of(&made))).body), 0), "abc");
}

#[test]
fn a_client_that_waits_ahead_is_told_at_the_shutdown_where_to_go_on() {
    let server = saying("abc");
    server.daemon.show(Visible::First(1));
    let made = post(server.address, TEXT, &completion(r#","background":true"#));
    let path = format!("{}/stream", path_of(&made));
    let (address, asked) = (server.address, path.clone());
    let ahead = thread::spawn(move || get_with(address, &asked, &[("Last-Event-ID", "3")]));
    server.daemon.wait("the second attachment", |received| {
        (received.iter().filter(|frame| matches!(frame, ToDaemon::Attach { .. })).count() == 2).then_some(())
    });
    server.daemon.send(&ToGateway::Shutdown);
    let told = ahead.join().unwrap();
    assert_eq!((told.error().0, told.error().2.as_str()), (503, "shutting_down"));
    assert_eq!(told.header("retry-after"), Some("1"));
    assert!(told.body.contains(&format!("GET {path} and the header Last-Event-ID: 3")), "{}", told.body);
    assert_eq!(cancels(&server), 0);
}
