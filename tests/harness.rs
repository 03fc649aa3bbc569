//! The harness itself: what it says about a server, and about processes, is true.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use pagedd_tests::asks::{Ask, Mix, Outcome, asks};
use pagedd_tests::daemon::free_ports;
use pagedd_tests::exchange::Exchange;
use pagedd_tests::http::{Client, Event, Incoming};
use pagedd_tests::kills::{Cell, Hits, Phase, Victim, schedule};
use pagedd_tests::process::{Process, family, kill_descendant};
use pagedd_tests::random::Random;
use pagedd_tests::wait;

/// A client of a server that sends these parts as one answer, each in a packet of its own.
fn canned(parts: Vec<String>) -> Client {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let port = listener.local_addr().expect("its address").port();
    thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("a client");
        stream.set_nodelay(true).expect("no delay");
        let mut head = [0; 4096];
        let read = stream.read(&mut head).expect("a request");
        assert!(head[..read].starts_with(b"GET / HTTP/1.1\r\n"));
        for part in parts {
            stream.write_all(part.as_bytes()).expect("send");
        }
    });
    Client::new(port, Some("key"))
}

#[test]
fn an_answer_is_read_by_length_by_chunks_and_to_the_end() {
    let canned = |parts: &[&str]| canned(parts.iter().map(|p| (*p).to_owned()).collect());
    let by_length = canned(&["HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel", "lo and more"]).get("/");
    assert_eq!((by_length.status, by_length.text().as_str()), (200, "hello"));
    let by_chunks = canned(&[
        "HTTP/1.1 400 Bad\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r",
        "\n2;x=y\r\nl",
        "o\r\n0\r\n\r\n",
    ])
    .get("/");
    assert_eq!((by_chunks.status, by_chunks.text().as_str()), (400, "hello"));
    let to_end = canned(&["HTTP/1.1 200 OK\r\nX-One: two\r\n\r\nhel", "lo"]).get("/");
    assert_eq!((to_end.header("x-one"), to_end.text().as_str()), (Some("two"), "hello"));
}

#[test]
fn events_are_read_one_by_one_also_where_the_connection_breaks() {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    let chunk = |text: &str| format!("{:x}\r\n{text}\r\n", text.len());
    let client = canned(vec![
        head.to_owned(),
        chunk(": alive\n\nid: 7\r\ndata: {\"a\":"),
        chunk(" 1}\n\nevent: error\n"),
        chunk("data: b\ndata:c\n") + &chunk("\n"),
        "ff\r\ndata: cut\r\n".to_owned(),
    ]);
    let events: Vec<Event> = client.open("GET", "/", &[], b"").events().collect();
    let expected = [
        Event { id: Some("7".into()), name: None, data: "{\"a\": 1}".into() },
        Event { id: None, name: Some("error".into()), data: "b\nc".into() },
    ];
    assert_eq!(events, expected);
}

/// A client of a server that gives one of these answers per connection, in turn, each to a request that begins with its first
/// part.
fn scripted(script: Vec<(&'static str, String)>) -> Client {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let port = listener.local_addr().expect("its address").port();
    thread::spawn(move || {
        for (request, answer) in script {
            let (mut stream, _) = listener.accept().expect("a client");
            let mut head = [0; 4096];
            let read = stream.read(&mut head).expect("a request");
            let head = String::from_utf8_lossy(&head[..read]).into_owned();
            assert!(request.split('|').all(|part| head.contains(part)), "{request} is not in {head}");
            stream.write_all(answer.as_bytes()).expect("send");
        }
    });
    Client::new(port, None)
}

const MIX: Mix<'static> = Mix { model: "m", words: 50, tokens: 8 };
const STREAM: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\npagedd-request-id: 7f\r\n\r\n";

fn token(id: u64, text: &str) -> String {
    format!(
        "id: {id}\ndata: {{\"choices\":[{{\"index\":0,\"text\":\"{text}\",\"finish_reason\":null}}]}}\n\n"
    )
}

fn end(id: u64) -> String {
    format!(
        "id: {id}\ndata: {{\"choices\":[],\"usage\":{{\"prompt_tokens\":1,\"completion_tokens\":2}}}}\n\ndata: [DONE]\n\n"
    )
}

fn answer_of(script: Vec<(&'static str, String)>) -> Result<Outcome, String> {
    let client = scripted(script);
    let ask = Ask::plain(MIX, &mut Random::new(1), 3, 8);
    Exchange::new(&client, &ask, "one".into()).finish().cloned()
}

#[test]
fn an_exchange_goes_on_where_its_stream_broke_off() {
    let starting =
        "HTTP/1.1 503 No\r\ncontent-length: 29\r\n\r\n{\"error\":{\"code\":\"starting\"}}".to_owned();
    let shutdown = "event: detached\ndata: {\"choices\":[],\"detached\":{\"last_event_id\":1}}\n\n";
    let got = answer_of(vec![
        ("POST /v1/completions|idempotency-key: one", String::new()),
        ("POST /v1/completions|idempotency-key: one", "HTTP/1.1 200 OK\r\ncontent-".into()),
        ("POST", starting),
        ("POST", STREAM.to_owned() + &token(1, "a")),
        ("GET /v1/requests/7f/stream|last-event-id: 1", STREAM.to_owned() + shutdown),
        ("GET /v1/requests/7f/stream|last-event-id: 1", STREAM.to_owned() + &token(2, "b") + "id: 3\nda"),
        ("GET /v1/requests/7f/stream|last-event-id: 2", STREAM.to_owned() + &end(4)),
    ]);
    let got = got.expect("an answer");
    assert_eq!((got.text(0).as_str(), got.usage, got.last), ("ab", Some([1, 2]), Some(4)));
    let ids: Vec<_> = got.choices[&0].pieces.iter().map(|p| p.id).collect();
    assert_eq!(ids, [Some(1), Some(2)]);
}

#[test]
fn an_exchange_finds_what_is_doubled_lost_or_refused() {
    let doubled =
        vec![("POST", STREAM.to_owned() + &token(1, "a")), ("GET", STREAM.to_owned() + &token(1, "a"))];
    let lost = vec![
        ("POST", STREAM.to_owned() + &token(1, "a")),
        ("GET", "HTTP/1.1 404 No\r\ncontent-length: 30\r\n\r\n{\"error\":{\"code\":\"not_found\"}}".into()),
    ];
    let failed = vec![("POST", STREAM.to_owned() + "data: {\"error\":{\"code\":\"generation_failed\"}}\n\n")];
    let cut = vec![("POST", STREAM.to_owned() + &token(1, "a") + "data: [DONE]\n\n")];
    let other = vec![("POST", STREAM.to_owned() + &token(1, "a")), ("GET", STREAM.replace("7f", "80"))];
    for (script, word) in [
        (doubled, "after the event 1"),
        (lost, "404"),
        (failed, "generation_failed"),
        (cut, "last event"),
        (other, "became 80"),
    ] {
        let error = answer_of(script).expect_err(word);
        assert!(error.contains(word), "{word}: {error}");
    }
}

#[test]
fn a_socket_is_quiet_until_a_byte_comes_and_after_its_end() {
    let client = scripted(vec![("GET", "HTTP/1.1 200 OK\r\n\r\nab".into())]);
    let answer = Incoming::try_read_head(client.send("GET", "/", &[], b"").expect("sent")).expect("a head");
    wait::until("a byte comes", Duration::from_secs(10), || !answer.is_quiet());
    assert_eq!(answer.into_response().text(), "ab");
    let client = scripted(vec![("GET", String::new())]);
    let sent = client.send("GET", "/", &[], b"").expect("sent");
    assert!(pagedd_tests::http::is_quiet(&sent));
    assert!(Incoming::try_read_head(sent).is_none());
}

#[test]
fn a_schedule_holds_every_cell_in_each_round_and_repeats() {
    let draw = |seed, count| schedule(&mut Random::new(seed), &Victim::ALL, count);
    assert_eq!(draw(1, 40), draw(1, 40));
    assert_ne!(draw(1, 40), draw(2, 40));
    let mut hits = Hits::default();
    for cell in draw(3, 30) {
        hits.add(cell);
    }
    for phase in Phase::ALL {
        for victim in Victim::ALL {
            assert_eq!(hits.of(Cell { phase, victim }), 2, "{hits}");
        }
    }
    assert!(hits.to_string().ends_with("together         30"), "{hits}");
}

#[test]
fn a_mix_has_every_kind_and_repeats() {
    let draw = |seed| format!("{:?}", asks(MIX, &mut Random::new(seed), 40));
    assert_eq!(draw(1), draw(1));
    let mix = asks(MIX, &mut Random::new(1), 40);
    for (what, is) in [
        ("four choices", (|a| a.n == 4) as fn(&Ask) -> bool),
        ("greedy", |a| a.body["temperature"] == 0),
        ("seeded", |a| a.body["seed"].is_u64()),
        ("whole", |a| a.body.get("stream").is_none()),
        ("a shared beginning", |a| a.body["prompt"].as_str().is_some_and(|p| p.starts_with("Chapter 1"))),
    ] {
        assert!((2..39).contains(&mix.iter().filter(|a| is(a)).count()), "{what}: {mix:#?}");
    }
    let mut answer = Outcome::default();
    answer.add(&mix[0], Some(1), &serde_json::json!({"choices": [{"index": 0, "text": "abcdefghi"}]}));
    assert_eq!(mix[0].clone().stopped(&answer).body["stop"][0], "ghi");
}

#[test]
fn text_of_an_event_is_that_of_choice_0() {
    let of = |data: &str| Event { data: data.into(), ..Event::default() }.text();
    assert_eq!(of(r#"{"choices":[{"index":1,"text":"no"},{"index":0,"text":"a"}]}"#), "a");
    assert_eq!(of(r#"{"choices":[{"index":0,"delta":{"content":"b"}}]}"#), "b");
    assert_eq!(of(r#"{"choices":[{"index":0,"delta":{}}]}"#), "");
    assert_eq!(of("[DONE]"), "");
}

#[test]
fn only_descendants_are_killed() {
    let mut child =
        Command::new("sh").args(["-c", "cat; true"]).stdin(Stdio::piped()).spawn().expect("a child");
    // Between fork and exec it has the name of its parent.
    let cat = || family(child.id()).get(1).filter(|below| below.name == "cat").cloned();
    let below = wait::within(Duration::from_secs(10), cat).expect("a grandchild");
    assert_eq!(below.parent, child.id());
    let me = std::process::id();
    for (root, pid) in [(child.id(), me), (child.id(), child.id()), (below.pid, child.id()), (child.id(), 1)]
    {
        let refused = std::panic::catch_unwind(|| kill_descendant(root, pid));
        assert!(refused.is_err(), "{pid} was killed as a descendant of {root}");
    }
    kill_descendant(child.id(), below.pid);
    wait::until("it is gone", Duration::from_secs(10), || !below.lives());
    child.wait().expect("the child ends");
}

#[test]
fn memory_is_searched_for_what_is_in_it() {
    let canary = ["harness", "canary"].join("/");
    let me = Process::find(std::process::id()).expect("this process");
    assert!(me.holds(canary.as_bytes()));
    let memory = me.memory();
    assert!(memory.resident_kib >= memory.own_kib() && memory.anonymous_kib > 0, "{memory:?}");
    let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().expect("a child");
    let other =
        wait::within(Duration::from_secs(10), || Process::find(child.id()).filter(|p| p.name == "cat"));
    assert!(!other.expect("cat").holds(canary.as_bytes()));
    drop(child.stdin.take());
    child.wait().expect("the child ends");
}

#[test]
fn free_ports_differ_and_numbers_repeat() {
    let ports = free_ports::<8>();
    assert!((0..8).all(|i| !ports[..i].contains(&ports[i])), "{ports:?}");
    let draw = |seed| {
        let mut random = Random::new(seed);
        [random.next_u64(), random.next_u64(), random.below(10)]
    };
    assert_eq!(draw(1), draw(1));
    assert_ne!(draw(1), draw(2));
}
