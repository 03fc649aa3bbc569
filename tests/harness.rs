//! The harness itself: what it says about a server, and about processes, is true.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use pagedd_tests::daemon::free_ports;
use pagedd_tests::http::{Client, Event};
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
    let below =
        wait::within(Duration::from_secs(10), || family(child.id()).get(1).cloned()).expect("a grandchild");
    assert_eq!((below.parent, below.name.as_str()), (child.id(), "cat"));
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
