//! Connections: those that leave, linger, are too many or too large, and the end of the process.

mod common;

use std::io::{Read as _, Write as _};
use std::time::{Duration, Instant};

use common::client::{
    connect, events, get, get_with, open, path_of, post, post_with, read_head, request, state,
};
use common::{Options, Script, Server, Visible, closed, key, log_of, tokens_of, welcome};
use pagedd_gateway::app::Settings;
use pagedd_model::testing::Random;
use pagedd_wire::gateway::{Closed, Entry, Finish, OnLeave, Rates, ToDaemon, ToGateway, Welcome};
use serde_json::json;

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn server(options: Options, answer: &'static str) -> Server {
    let text = options.text.clone();
    Server::start(options, move |_| Script::Log(log_of(&text, answer)))
}

fn completion(fields: &str) -> String {
    format!(r#"{{"model":"tiny","prompt":"hello"{fields}}}"#)
}

#[test]
fn a_client_that_leaves_a_stream_cancels_its_request() {
    let server = server(Options::default(), "abc");
    server.daemon.show(Visible::First(1));
    let mut stream = open(server.address, &request("POST", TEXT, &[], &completion(r#","stream":true"#)));
    stream.read_until("\"text\":\"a\"");
    drop(stream);
    server.daemon.wait_cancel();
}

#[test]
fn a_client_that_leaves_before_the_first_token_of_a_whole_answer_cancels_its_request() {
    let server = server(Options::default(), "abc");
    server.daemon.show(Visible::First(0));
    let mut stream = connect(server.address);
    stream.write_all(request("POST", TEXT, &[], &completion("")).as_bytes()).unwrap();
    server.daemon.wait_request();
    drop(stream);
    server.daemon.wait_cancel();
}

#[test]
fn a_client_that_leaves_before_its_request_is_accepted_cancels_it_once_it_is() {
    let server = Server::start(Options::default(), |_| Script::Silence);
    let mut stream = connect(server.address);
    stream.write_all(request("POST", TEXT, &[], &completion("")).as_bytes()).unwrap();
    let ticket = server.daemon.wait("a submission", |received| {
        received.iter().find_map(|frame| match frame {
            ToDaemon::Submit { ticket, .. } => Some(*ticket),
            _ => None,
        })
    });
    drop(stream);
    server.daemon.send(&ToGateway::Accepted {
        ticket,
        request: [9; 16],
        repeated: false,
        rates: Rates::default(),
    });
    assert_eq!(server.daemon.wait_cancel(), [9; 16]);
}

#[test]
fn a_resumable_request_runs_on_when_its_client_leaves() {
    let server = server(Options::default(), "abc");
    server.daemon.show(Visible::First(1));
    let body = completion(r#","stream":true"#);
    let mut stream = open(server.address, &request("POST", TEXT, &[("pagedd-resumable", "1")], &body));
    stream.read_until("\"text\":\"a\"");
    assert_eq!(server.daemon.wait_request().on_leave, OnLeave::RunOn);
    drop(stream);
    server.daemon.wait("a detach", |received| {
        received.iter().any(|frame| matches!(frame, ToDaemon::Detach { .. })).then_some(())
    });
    assert!(!server.daemon.received().iter().any(|frame| matches!(frame, ToDaemon::Cancel { .. })));
}

#[test]
fn bug_32_two_hundred_clients_that_leave_at_random_harm_nobody() {
    let server = server(Options::default(), "a rather long answer, which few will read to its end");
    let mut random = Random::new(7);
    let clients: Vec<_> = (0..200)
        .map(|_| {
            let (address, bytes, streams) =
                (server.address, (random.signed().abs() * 3000.0) as usize, random.signed() > 0.0);
            std::thread::spawn(move || {
                let fields = if streams { r#","stream":true,"n":2"# } else { "" };
                let mut stream = connect(address);
                let text = request("POST", TEXT, &[], &completion(fields));
                // Some leave inside their own request.
                let sent = if bytes % 7 == 0 { bytes % text.len() } else { text.len() };
                stream.write_all(&text.as_bytes()[..sent]).unwrap();
                if sent == text.len() {
                    let mut part = vec![0; bytes + 1];
                    let _ = stream.read(&mut part);
                }
            })
        })
        .collect();
    for client in clients {
        client.join().unwrap();
    }
    assert_eq!(post(server.address, TEXT, &completion("")).status, 200);
}

#[test]
fn bug_34_a_head_that_comes_byte_by_byte_is_cut_off() {
    let welcome = Welcome { header_timeout_ms: 150, ..welcome() };
    let server = server(Options { welcome, ..Options::default() }, "a");
    let mut slow: Vec<_> = (0..20).map(|_| connect(server.address)).collect();
    for stream in &mut slow {
        stream.write_all(b"GET /livez HTT").unwrap();
    }
    // One that keeps sending, and one that sends nothing at all.
    let mut dripping = connect(server.address);
    let silent = connect(server.address);
    let dripped = std::thread::spawn(move || {
        dripping.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        let start = Instant::now();
        loop {
            let gone = dripping.write_all(b"x").is_err() || matches!(dripping.read(&mut [0; 64]), Ok(0));
            if gone {
                return start.elapsed();
            }
            assert!(start.elapsed() < common::PATIENCE, "still open");
        }
    });
    for mut stream in slow.into_iter().chain([silent]) {
        assert_eq!(stream.read(&mut [0; 64]).unwrap_or(0), 0);
    }
    assert!(dripped.join().unwrap() < Duration::from_secs(5));
    assert_eq!(get(server.address, "/livez").status, 200);
}

#[test]
fn bug_33_a_connection_is_reused_after_a_pause_longer_than_a_head_may_take() {
    let welcome = Welcome { header_timeout_ms: 50, ..welcome() };
    assert!(common::welcome().idle_timeout_ms >= 75_000);
    let server = server(Options { welcome, ..Options::default() }, "a");
    let stream = connect(server.address);
    for _ in 0..3 {
        (&stream).write_all(request("GET", "/livez", &[], "").as_bytes()).unwrap();
        let answer = read_head(stream.try_clone().unwrap()).finish();
        assert_eq!((answer.status, answer.body.as_str()), (200, "ok\n"));
        // Silence for longer than the header limit: the read ends by its own timeout, not by the server's end of file.
        stream.set_read_timeout(Some(Duration::from_millis(150))).unwrap();
        let pause = (&stream).read(&mut [0; 1]).unwrap_err();
        assert_eq!(pause.kind(), std::io::ErrorKind::WouldBlock);
        stream.set_read_timeout(Some(common::PATIENCE)).unwrap();
    }
}

#[test]
fn an_idle_connection_is_closed_at_its_limit() {
    let welcome = Welcome { idle_timeout_ms: 100, ..welcome() };
    let server = server(Options { welcome, ..Options::default() }, "a");
    let mut stream = connect(server.address);
    stream.write_all(request("GET", "/livez", &[], "").as_bytes()).unwrap();
    assert_eq!(read_head(stream.try_clone().unwrap()).finish().status, 200);
    assert_eq!(stream.read(&mut [0; 1]).unwrap_or(0), 0);
}

#[test]
fn connections_beyond_the_cap_are_told_so_and_may_ask_for_health() {
    let welcome = Welcome { max_connections: 4, ..welcome() };
    let options = Options {
        welcome,
        settings: Settings { spare_connections: 16, ..Settings::default() },
        ..Options::default()
    };
    let server = server(options, "a");
    let held: Vec<_> = (0..4)
        .map(|_| {
            loop {
                // The server may not have seen the end of an earlier connection yet.
                let mut stream = connect(server.address);
                stream.write_all(request("GET", "/v1/models", &[], "").as_bytes()).unwrap();
                if read_head(stream.try_clone().unwrap()).finish().status == 200 {
                    break stream;
                }
            }
        })
        .collect();
    server.wait_status("/v1/models", 503, 503);
    let response = get(server.address, "/v1/models");
    assert_eq!(response.error(), (503, String::new(), "too_many_connections".to_owned()));
    assert_eq!(response.header("connection"), Some("close"));
    server.wait_status("/livez", 200, 200);
    drop(held);
    server.wait_status("/v1/models", 200, 200);
}

#[test]
fn bug_27_a_body_over_the_cap_is_refused_and_one_that_is_large_does_not_freeze_health() {
    let welcome = Welcome { max_body: 8 << 20, max_model_len: 512, ..welcome() };
    let server = server(Options { welcome, ..Options::default() }, "a");
    let address = server.address;
    let large = "word ".repeat(6 << 20);
    let too_large = std::thread::spawn(move || {
        post(address, TEXT, &format!(r#"{{"model":"tiny","prompt":"{large}"}}"#)).error()
    });
    let tokenised = std::thread::spawn(move || {
        let text = "word ".repeat(1 << 17);
        post(address, TEXT, &format!(r#"{{"model":"tiny","prompt":"{text}"}}"#)).error()
    });
    let mut worst = Duration::ZERO;
    let mut asked = 0;
    while !too_large.is_finished() || !tokenised.is_finished() {
        let start = Instant::now();
        assert_eq!(get(address, "/livez").status, 200);
        worst = worst.max(start.elapsed());
        asked += 1;
    }
    assert_eq!(too_large.join().unwrap(), (413, String::new(), "body_too_large".to_owned()));
    assert_eq!(tokenised.join().unwrap(), (400, "prompt".to_owned(), "context_length_exceeded".to_owned()));
    assert!(worst < Duration::from_secs(2), "the worst of {asked} answers took {worst:?}");
}

#[test]
fn a_chunked_body_over_the_cap_is_refused_too() {
    let server =
        server(Options { welcome: Welcome { max_body: 100, ..welcome() }, ..Options::default() }, "a");
    let mut stream = connect(server.address);
    let head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(format!("c8\r\n{}\r\n0\r\n\r\n", "x".repeat(200)).as_bytes()).unwrap();
    assert_eq!(read_head(stream).finish().error().0, 413);
}

#[test]
fn keys_are_needed_where_there_are_some_and_new_ones_count_at_once() {
    let welcome = Welcome { keys: Some(vec![key(1, "one"), key(2, "two")]), ..welcome() };
    let server = server(Options { welcome: welcome.clone(), ..Options::default() }, "abc");
    for path in ["/v1/models", "/v1/models/tiny", "/metrics", "/v1/requests/00000000000000000000000000000000"]
    {
        let response = get(server.address, path);
        assert_eq!(
            (response.error().0, response.header("www-authenticate")),
            (401, Some("Bearer")),
            "{path}"
        );
    }
    for path in ["/livez", "/readyz", "/health", "/health/decode"] {
        assert_eq!(get(server.address, path).status, 200, "{path}");
    }
    assert_eq!(post(server.address, TEXT, &completion("")).error().2, "invalid_api_key");
    let made = post_with(server.address, TEXT, &[("Authorization", "Bearer two")], &completion(""));
    assert_eq!((made.status, server.daemon.wait_request().key), (200, Some(2)));
    let path = format!("/v1/requests/{}", made.header("pagedd-request-id").unwrap());
    let own = get_with(server.address, &path, &[("Authorization", "Bearer two")]);
    assert_eq!((own.status, own.body), (200, made.body));
    let foreign = get_with(server.address, &path, &[("Authorization", "Bearer one")]);
    assert_eq!(foreign.error(), (404, String::new(), "request_not_found".to_owned()));
    let foreign = get_with(server.address, &format!("{path}/stream"), &[("Authorization", "Bearer one")]);
    assert_eq!(foreign.error().0, 404);
    let revoked = Welcome { keys: Some(vec![key(1, "one")]), ..welcome };
    server.daemon.send(&ToGateway::Welcome(Box::new(revoked)));
    while get_with(server.address, "/v1/models", &[("Authorization", "Bearer two")]).status != 401 {}
    assert_eq!(get_with(server.address, "/v1/models", &[("Authorization", "Bearer one")]).status, 200);
}

#[test]
fn a_stranger_that_asks_for_a_running_request_does_not_end_it() {
    let welcome = Welcome { keys: Some(vec![key(1, "one"), key(2, "two")]), ..welcome() };
    let server = server(Options { welcome, ..Options::default() }, "abc");
    server.daemon.show(Visible::First(1));
    let body = completion(r#","stream":true"#);
    let mut stream = open(server.address, &request("POST", TEXT, &[("Authorization", "Bearer one")], &body));
    stream.read_until("\"text\":\"a\"");
    let path = format!("/v1/requests/{}/stream", stream.header("pagedd-request-id").unwrap());
    assert_eq!(get_with(server.address, &path, &[("Authorization", "Bearer two")]).error().0, 404);
    server.daemon.show(Visible::All);
    assert!(stream.finish().body.ends_with("data: [DONE]\n\n"));
    assert!(!server.daemon.received().iter().any(|frame| matches!(frame, ToDaemon::Cancel { .. })));
}

#[test]
fn a_stream_is_attached_again_by_its_last_event_id() {
    let options = Options::default();
    let text = options.text.clone();
    let server = Server::start(options, move |request| {
        let mut entries = Vec::new();
        for (a, b) in tokens_of(&text, 0, "a🤣bc你好").into_iter().zip(tokens_of(&text, 1, "zyxwvutsrq"))
        {
            entries.extend([a, b]);
        }
        for choice in 0..request.n {
            entries.push(Entry::Finish { choice, reason: Finish::Length });
        }
        entries.push(Entry::End { cached_tokens: 0 });
        Script::Log(entries)
    });
    let fields = r#","n":2,"stop":["wv"],"stream":true,"stream_options":{"include_usage":true}"#;
    let whole = post(server.address, TEXT, &completion(fields));
    let path = format!("/v1/requests/{}/stream", whole.header("pagedd-request-id").unwrap());
    let all = events(&whole.body);
    let ids: Vec<u64> = all.iter().filter_map(|event| event.id).collect();
    assert!(ids.is_sorted_by(|a, b| a < b), "{ids:?}");
    let end = *ids.last().unwrap();
    for after in 0..=end {
        let again = get_with(server.address, &path, &[("Last-Event-ID", &after.to_string())]);
        assert_eq!(again.status, 200);
        let expected: Vec<_> =
            all.iter().filter(|event| event.id.is_none_or(|id| id > after)).cloned().collect();
        assert_eq!(events(&again.body), expected, "after {after}");
    }
    assert_eq!(get(server.address, &path).body, whole.body);
    for wrong in ["x", "-1"] {
        assert_eq!(get_with(server.address, &path, &[("Last-Event-ID", wrong)]).error().0, 400);
    }
    let beyond = get_with(server.address, &path, &[("Last-Event-ID", &(end + 1).to_string())]);
    assert_eq!(beyond.error(), (400, "Last-Event-ID".to_owned(), "invalid_value".to_owned()));
    let unknown = get(server.address, "/v1/requests/00000000000000000000000000000000/stream");
    assert_eq!(unknown.error().0, 404);
}

#[test]
fn a_request_that_runs_has_a_status_and_a_stream_that_waits() {
    let server = server(Options::default(), "abc");
    server.daemon.show(Visible::First(2));
    let body = completion(r#","stream":true"#);
    let mut first = open(server.address, &request("POST", TEXT, &[("pagedd-resumable", "1")], &body));
    first.read_until("\"text\":\"b\"");
    let path = format!("/v1/requests/{}", first.header("pagedd-request-id").unwrap());
    drop(first);
    let status = get(server.address, &path).json();
    assert_eq!((&status["status"], &status["last_event_id"]), (&"in_progress".into(), &2.into()));
    assert_eq!(status["completion_tokens"], 2);
    let waiting = {
        let (address, path) = (server.address, format!("{path}/stream"));
        std::thread::spawn(move || get_with(address, &path, &[("Last-Event-ID", "3")]))
    };
    let mut two =
        open(server.address, &request("GET", &format!("{path}/stream"), &[("Last-Event-ID", "1")], ""));
    let start = two.read_until("\"text\":\"b\"");
    assert_eq!(events(&start)[0].id, Some(2));
    server.daemon.show(Visible::All);
    let rest = events(&two.finish().body);
    assert_eq!(rest.iter().map(|event| event.id).collect::<Vec<_>>(), [Some(3), Some(4), None]);
    let late = events(&waiting.join().unwrap().body);
    assert_eq!(late.iter().map(|event| event.id).collect::<Vec<_>>(), [Some(4), None]);
    let answer = get(server.address, &path).json();
    assert_eq!(answer["choices"][0]["text"], "abc");
}

#[test]
fn another_gateway_gives_the_same_events_after_the_first_one_died() {
    let first = server(Options::default(), "abc");
    let fields = r#","stream":true,"stop":["c"]"#;
    let whole = post(first.address, TEXT, &completion(fields));
    let path = format!("/v1/requests/{}/stream", whole.header("pagedd-request-id").unwrap());
    let daemon = first.daemon.clone();
    daemon.die();
    first.join();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let second = Server::on(listener, daemon, Options::default());
    assert_eq!(get(second.address, &path).body, whole.body);
}

#[test]
fn a_stream_shows_life_while_it_waits() {
    let settings = Settings { keep_alive: Duration::from_millis(20), ..Settings::default() };
    let server = server(Options { settings, ..Options::default() }, "abc");
    server.daemon.show(Visible::First(0));
    let mut stream = open(server.address, &request("POST", TEXT, &[], &completion(r#","stream":true"#)));
    assert_eq!(stream.chunk().unwrap(), ": keep-alive\n\n");
    server.daemon.show(Visible::All);
    stream.read_until("[DONE]");
}

#[test]
fn bug_35_open_streams_say_how_to_go_on_and_do_not_hold_up_the_end() {
    let server = server(Options::default(), "abc");
    server.daemon.show(Visible::First(2));
    let body = completion(r#","stream":true"#);
    let mut stream = open(server.address, &request("POST", CHAT.replace("chat/", "").as_str(), &[], &body));
    stream.read_until("\"text\":\"b\"");
    let idle = connect(server.address);
    let mut whole = connect(server.address);
    whole.write_all(request("POST", TEXT, &[], &completion("")).as_bytes()).unwrap();
    server.daemon.wait("both requests", |received| {
        (received.iter().filter(|frame| matches!(frame, ToDaemon::Attach { .. })).count() == 2).then_some(())
    });
    let daemon = server.daemon.clone();
    daemon.send(&ToGateway::Shutdown);
    let id = stream.header("pagedd-request-id").unwrap().to_owned();
    let last = stream.finish().body;
    assert!(
        last.contains(&format!("GET /v1/requests/{id}/stream and the header Last-Event-ID: 2")),
        "{last}"
    );
    assert!(!last.contains("[DONE]") && !last.contains("error"), "{last}");
    let event = events(&last).pop().unwrap();
    assert_eq!((event.id, event.name.as_deref()), (None, Some("detached")));
    let data = event.data.unwrap();
    assert_eq!((&data["object"], &data["choices"]), (&"text_completion".into(), &json!([])));
    assert_eq!(where_to(&data, &id), 2);
    let whole = read_head(whole).finish();
    assert_eq!((whole.error().0, whole.error().2.as_str()), (503, "shutting_down"));
    assert_eq!(whole.header("retry-after"), Some("1"));
    let id = whole.header("pagedd-request-id").unwrap();
    assert!(whole.body.contains(&format!("GET /v1/requests/{id}")), "{}", whole.body);
    assert_eq!(where_to(&whole.json(), id), 0);
    drop(idle);
    let took = server.join();
    assert!(took < Duration::from_secs(2), "{took:?}");
    // What was accepted goes on: nobody cancelled it.
    assert!(!daemon.received().iter().any(|frame| matches!(frame, ToDaemon::Cancel { .. })));
}

/// What a parting word says of a request: the last event that was sent.
fn where_to(data: &serde_json::Value, id: &str) -> u64 {
    let detached = &data["detached"];
    let path = format!("/v1/requests/{id}/stream");
    assert_eq!((&detached["id"], &detached["path"]), (&id.into(), &path.into()), "{data}");
    detached["last_event_id"].as_u64().expect("an event id")
}

#[test]
fn a_chat_stream_with_usage_ends_at_the_shutdown_with_a_chunk_that_has_neither_choices_nor_usage() {
    let server = server(Options::default(), "abc");
    server.daemon.show(Visible::First(0));
    let body = r#"{"model":"tiny","messages":[{"role":"user","content":"hi"}],"stream":true,"stream_options":{"include_usage":true}}"#;
    let stream = open(server.address, &request("POST", CHAT, &[], body));
    let id = stream.header("pagedd-request-id").unwrap().to_owned();
    server.daemon.send(&ToGateway::Shutdown);
    let all = events(&stream.finish().body);
    assert_eq!(all.len(), 1, "{all:?}");
    let data = all[0].data.as_ref().unwrap();
    assert_eq!(
        (&data["id"], &data["object"]),
        (&json!(format!("chatcmpl-{id}")), &"chat.completion.chunk".into())
    );
    assert_eq!((&data["choices"], &data["usage"]), (&json!([]), &json!(null)));
    assert_eq!(where_to(data, &id), 0);
}

#[test]
fn a_client_that_does_not_read_does_not_hold_up_the_end() {
    // More than the buffers of a socket take.
    let text = common::text();
    let long = tokens_of(&text, 0, &"a long answer ".repeat(1 << 12));
    let server = Server::start(Options { text, ..Options::default() }, move |_| {
        let mut entries: Vec<Entry> = (0..64).flat_map(|_| long.clone()).collect();
        entries.push(Entry::Finish { choice: 0, reason: Finish::Length });
        entries.push(Entry::End { cached_tokens: 0 });
        Script::Log(entries)
    });
    let stream = open(server.address, &request("POST", TEXT, &[], &completion(r#","stream":true"#)));
    server.daemon.send(&ToGateway::Shutdown);
    let took = server.join();
    assert!(took < Duration::from_secs(5), "{took:?}");
    drop(stream);
}

#[test]
fn the_end_of_the_daemon_ends_the_gateway() {
    let server = server(Options::default(), "abc");
    let _idle = connect(server.address);
    server.daemon.die();
    assert!(server.join() < Duration::from_secs(2));
}

#[test]
fn a_client_that_connected_before_the_end_and_asks_after_it_is_answered_and_not_reset() {
    let server = server(Options::default(), "abc");
    let mut idle = connect(server.address);
    idle.write_all(request("GET", "/livez", &[], "").as_bytes()).unwrap();
    let mut answer = [0; 12];
    idle.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"HTTP/1.1 200");
    let mut fresh = connect(server.address);
    let until = Instant::now() + Duration::from_secs(10);
    while !get(server.address, "/metrics").body.contains("gateway_connections{tenant=\"acme\"} 3\n") {
        assert!(Instant::now() < until, "{}", get(server.address, "/metrics").body);
    }
    server.daemon.send(&ToGateway::Shutdown);
    // Its end shows that the gateway has begun to end.
    idle.read_to_end(&mut Vec::new()).unwrap();
    fresh.write_all(request("POST", TEXT, &[], &completion("")).as_bytes()).unwrap();
    let refused = read_head(fresh).finish();
    assert_eq!(refused.error(), (503, String::new(), "shutting_down".to_owned()));
    assert_eq!(refused.header("retry-after"), Some("1"));
    assert!(server.join() < Duration::from_secs(2));
}

#[test]
fn a_drain_refuses_new_requests_and_finishes_open_ones_until_it_is_taken_back() {
    let server = server(Options::default(), "abc");
    server.daemon.show(Visible::First(1));
    let mut stream = open(server.address, &request("POST", TEXT, &[], &completion(r#","stream":true"#)));
    stream.read_until("\"text\":\"a\"");
    let key = [("Idempotency-Key", "one")];
    let made = post_with(server.address, TEXT, &key, &completion(r#","background":true"#));
    server.daemon.send(&ToGateway::Welcome(Box::new(closed(Closed::Draining))));
    server.wait_status("/health", 503, 503);
    let refused = post(server.address, TEXT, &completion(""));
    assert_eq!(refused.error(), (503, String::new(), "draining".to_owned()));
    assert_eq!(refused.header("retry-after"), Some("5"));
    let again = post_with(server.address, TEXT, &key, &completion(r#","background":true"#));
    assert_eq!(again.header("pagedd-idempotent-replay"), Some("true"), "what was made before is found again");
    for path in ["/livez", "/metrics", "/v1/models", &path_of(&made)] {
        assert_eq!(get(server.address, path).status, 200, "{path}");
    }
    let cancelled = post(server.address, &format!("{}/cancel", path_of(&made)), "");
    assert_eq!(state(&cancelled).0, "cancelled");
    server.daemon.show(Visible::All);
    assert!(stream.finish().body.ends_with("data: [DONE]\n\n"));
    // It takes requests again as soon as it is told so.
    server.daemon.send(&ToGateway::Welcome(Box::new(welcome())));
    server.wait_status("/health", 200, 200);
    assert_eq!(post(server.address, TEXT, &completion("")).status, 200);
}

#[test]
fn health_tells_what_the_daemon_says_and_when_it_says_nothing() {
    let settings = Settings { health_timeout: Duration::from_millis(50), ..Settings::default() };
    let server = server(Options { settings, ..Options::default() }, "a");
    let health = get(server.address, "/health/decode").json();
    let expected =
        serde_json::json!({"ready": true, "reason": null, "last_step_ms": 7, "running": 2, "waiting": 1});
    assert_eq!(health, expected);
    assert_eq!(get(server.address, "/readyz").status, 200);
    let metrics = get(server.address, "/metrics");
    assert_eq!(metrics.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    assert!(metrics.body.starts_with("pagedd_blocks_used 5\n"), "{}", metrics.body);
    assert!(metrics.body.contains(r#"pagedd_gateway_connections{tenant="acme"} "#), "{}", metrics.body);
    server.daemon.mute();
    for path in ["/readyz", "/health", "/health/decode", "/metrics"] {
        assert_eq!(get(server.address, path).error(), (503, String::new(), "no_answer".to_owned()), "{path}");
    }
    assert_eq!(get(server.address, "/livez").status, 200);
}

#[test]
fn a_body_that_is_no_json_type_is_refused_with_the_remedy() {
    let server = server(Options::default(), "a");
    let body = completion("");
    let text = format!(
        "POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let response = open(server.address, &text).finish();
    assert_eq!(response.error(), (415, String::new(), "unsupported_media_type".to_owned()));
}
