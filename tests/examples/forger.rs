//! A gateway that was taken over, in the place of `pagedd-gateway`: what it says to the daemon is forged.
//!
//! tests/jail.rs starts it. For the tenant `globex` it is a gateway with one long request. For any other it tries, life after life, to get at that
//! request by frames, and writes what came of it beside itself: into `report`, a line for each try.

use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;
use std::{env, thread};

use pagedd_host::{Child, Sandbox, Spawn, inherited, spawn};
use pagedd_wire::gateway::{
    Answer, Entry, Finish, Idempotency, OnLeave, Query, Refusal, Request, RequestId, ToDaemon, ToGateway,
};
use pagedd_wire::template::{FromTemplate, ToTemplate};
use pagedd_wire::{Channel, ChannelError, FrameBuffer, PROTOCOL, Sampling, encode};

/// The victim's, and what the attacker sends too.
const MADE: Idempotency = Idempotency { key: [7; 32], body: [8; 32] };
/// Longer than all tries take.
const LONG: u32 = 10_000;
/// Lives of the attacker.
const LIVES: usize = 5;
const PATIENCE: Duration = Duration::from_secs(30);

fn main() {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => template(),
        ["gateway", "globex"] => victim(Link::new()),
        ["gateway", _] => attacker(),
        _ => panic!("started by pagedd, not by hand"),
    }
}

fn beside(name: &str) -> PathBuf {
    env::current_exe().expect("its own path").with_file_name(name)
}

/// The template: gateways are processes of this same program.
fn template() {
    let socket = UnixStream::from(inherited(3).expect("the daemon's socket"));
    let mut channel = Channel::new(socket).expect("a socket");
    let mut children: Vec<Child> = Vec::new();
    loop {
        match channel.recv() {
            Ok(ToTemplate::Load { .. }) => {
                channel.send(&FromTemplate::Ready { vocab_size: 272 }, &[]).expect("the daemon reads");
            }
            Ok(ToTemplate::Fork { ticket, tenant, .. }) => {
                let _listener = channel.take_fd().expect("a listener");
                let socket: OwnedFd = channel.take_fd().expect("a socket");
                let child = spawn(Spawn {
                    program: env::current_exe().expect("its own path"),
                    args: vec!["gateway".into(), tenant.into()],
                    env: Vec::new(),
                    fds: vec![(socket, 3)],
                    cgroup: None,
                    identity: None,
                    sandbox: Sandbox::default(),
                });
                let child = child.expect("a process");
                channel
                    .send(&FromTemplate::Forked { ticket, pid: child.pid() }, &[child.as_fd()])
                    .expect("it reads");
                children.push(child);
                children.retain(|child| child.wait(Duration::ZERO).is_ok_and(|ended| ended.is_none()));
            }
            Err(ChannelError::Closed) => return,
            Err(error) => panic!("{error}"),
        }
    }
}

/// A gateway's end of the daemon's socket.
struct Link {
    socket: UnixStream,
    buffer: FrameBuffer,
}

impl Link {
    fn new() -> Self {
        let socket = UnixStream::from(inherited(3).expect("the daemon's socket"));
        socket.set_nonblocking(false).expect("a socket");
        socket.set_read_timeout(Some(PATIENCE)).expect("a socket");
        Self { socket, buffer: FrameBuffer::new() }
    }

    fn say(&mut self, frame: &ToDaemon) {
        self.raw(&encode(frame).expect("a frame"));
    }

    /// The daemon may have closed already.
    fn raw(&mut self, bytes: &[u8]) {
        let _ = self.socket.write_all(bytes);
    }

    /// The next frame; `None` at the end of the connection.
    fn hear(&mut self) -> Option<ToGateway> {
        loop {
            if let Some(frame) = self.buffer.next_frame().expect("a frame of the daemon's") {
                return Some(frame);
            }
            let mut bytes = [0; 4096];
            match self.socket.read(&mut bytes) {
                Ok(0) => return None,
                Ok(read) => self.buffer.push(&bytes[..read]),
                Err(e) if e.kind() == ErrorKind::ConnectionReset => return None,
                Err(e) => panic!("the daemon says nothing: {e}"),
            }
        }
    }

    /// Waits until requests are taken.
    fn wait_open(&mut self) {
        loop {
            match self.hear() {
                Some(ToGateway::Welcome(welcome)) if welcome.closed.is_none() => return,
                Some(_) => {}
                None => std::process::exit(0),
            }
        }
    }

    /// What the daemon closes this connection for, it does without saying more than its first words.
    fn is_closed_in_silence(&mut self) -> bool {
        loop {
            match self.hear() {
                None => return true,
                Some(ToGateway::Welcome(_)) => {}
                Some(_) => return false,
            }
        }
    }
}

fn request(max_tokens: u32, key: Option<u32>) -> Request {
    let sampling = Sampling {
        temperature: 0.0,
        top_p: 1.0,
        top_k: None,
        seed: 1,
        logprobs: None,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        repetition_penalty: 1.0,
    };
    Request {
        prompt: (100..120).collect(),
        sampling,
        n: 1,
        max_tokens,
        stop_ids: Vec::new(),
        on_leave: OnLeave::RunOn,
        key,
        idempotency: Some(MADE),
        context: b"a secret".to_vec(),
    }
}

fn victim(mut link: Link) {
    link.say(&ToDaemon::Hello { protocol: PROTOCOL });
    link.wait_open();
    link.say(&ToDaemon::Submit { ticket: 1, request: Box::new(request(LONG, Some(1))) });
    let mut after = 0;
    while let Some(frame) = link.hear() {
        match frame {
            ToGateway::Accepted { request, .. } => {
                link.say(&ToDaemon::Attach { request, from: 0 });
                tell("victim", request);
            }
            ToGateway::Entries(deliveries) => {
                let tried = lives() == LIVES;
                for entry in deliveries.into_iter().flat_map(|delivery| delivery.entries) {
                    match entry {
                        Entry::Token { .. } => after += u32::from(tried),
                        Entry::Finish { reason, .. } => tell("ended", format!("{reason:?}")),
                        Entry::End { .. } => {}
                    }
                }
                if after >= 50 {
                    tell("ended", "it goes on");
                    after = 0;
                }
            }
            ToGateway::Refused { refusal, .. } => panic!("{refusal:?}"),
            _ => {}
        }
    }
}

/// Writes a file that is whole as soon as it is there.
fn tell(name: &str, what: impl AsRef<[u8]>) {
    let new = beside("new");
    fs::write(&new, what).expect("write");
    fs::rename(&new, beside(name)).expect("tell");
}

/// How many tries have been reported.
fn lives() -> usize {
    fs::read_to_string(beside("report")).map_or(0, |text| text.lines().count())
}

fn attacker() {
    let mut link = Link::new();
    let victim: RequestId = loop {
        if let Ok(id) = fs::read(beside("victim")) {
            break id.try_into().expect("16 bytes");
        }
        thread::sleep(Duration::from_millis(10));
    };
    let report = || OpenOptions::new().create(true).append(true).open(beside("report")).expect("the report");
    let life = lives();
    let hello = ToDaemon::Hello { protocol: PROTOCOL };
    let attach = ToDaemon::Attach { request: victim, from: 0 };
    let closing: [(&str, Vec<u8>); LIVES - 1] = [
        ("a frame before the hello", encode(&attach).expect("a frame")),
        ("another protocol", encode(&ToDaemon::Hello { protocol: PROTOCOL + 1 }).expect("a frame")),
        ("a frame of 4 GiB", [encode(&hello).expect("a frame"), u32::MAX.to_le_bytes().to_vec()].concat()),
        ("a frame of no kind", [encode(&hello).expect("a frame"), vec![1, 0, 0, 0, 0xff]].concat()),
    ];
    if let Some((what, bytes)) = closing.get(life) {
        link.raw(bytes);
        let said = if link.is_closed_in_silence() { "closed" } else { "ANSWERED" };
        writeln!(report(), "{what}: {said}").expect("report");
        return;
    }
    if life == closing.len() {
        let lines = by_frames(&mut link, victim);
        writeln!(report(), "{}", lines.join("; ")).expect("report");
    }
    while link.hear().is_some() {}
}

/// Everything that a well-behaved gateway can say, with the id of another tenant's request.
fn by_frames(link: &mut Link, victim: RequestId) -> Vec<String> {
    let mut lines = Vec::new();
    link.say(&ToDaemon::Hello { protocol: PROTOCOL });
    link.wait_open();
    let last = u64::from(u32::MAX);
    for from in [0, 1, last, u64::MAX] {
        link.say(&ToDaemon::Attach { request: victim, from });
    }
    link.say(&ToDaemon::Stop { request: victim, choice: 0 });
    link.say(&ToDaemon::Detach { request: victim, done: true });
    link.say(&ToDaemon::Cancel { request: victim });
    link.say(&ToDaemon::Attach { request: victim, from: 0 });
    link.say(&ToDaemon::Query { ticket: 1, query: Query::Metrics });
    // The number of the other tenant's API key; and the same key of idempotency.
    link.say(&ToDaemon::Submit { ticket: 2, request: Box::new(request(LONG, Some(1))) });
    link.say(&ToDaemon::Submit { ticket: 3, request: Box::new(request(LONG, None)) });
    let (mut not_found, mut metrics, mut refused, mut own) = (0, false, false, None);
    while not_found < 5 || !metrics || !refused || own.is_none() {
        match link.hear() {
            Some(ToGateway::NotFound { request }) if request == victim => not_found += 1,
            Some(ToGateway::Answer { answer: Answer::Metrics(text), .. }) => {
                metrics = true;
                if text.contains("globex") {
                    lines.push("METRICS name the other tenant".to_owned());
                }
            }
            Some(ToGateway::Refused { ticket: 2, refusal: Refusal::Invalid { param, .. } }) => {
                refused = param == "key";
            }
            Some(ToGateway::Accepted { ticket: 3, request, repeated, rates: _ }) => {
                own = Some(request);
                if repeated || request == victim {
                    lines.push("the other's request was ACCEPTED".to_owned());
                }
            }
            Some(ToGateway::Welcome(_)) => {}
            other => {
                lines.push(format!("ANSWERED {other:?}"));
                return lines;
            }
        }
    }
    lines.push(format!("{not_found} not found, the other's key refused"));
    // The same frames with an id of its own do what they say.
    let own = own.expect("accepted");
    link.say(&ToDaemon::Attach { request: own, from: 0 });
    link.say(&ToDaemon::Cancel { request: own });
    loop {
        match link.hear() {
            Some(ToGateway::Entries(deliveries)) => {
                let entries = deliveries.into_iter().flat_map(|delivery| {
                    assert_ne!(delivery.request, victim, "entries of the other tenant's request");
                    delivery.entries
                });
                let mut finish = entries.filter_map(|entry| match entry {
                    Entry::Finish { reason, .. } => Some(reason),
                    Entry::Token { .. } | Entry::End { .. } => None,
                });
                if let Some(reason) = finish.next_back() {
                    let cancelled = reason == Finish::Cancelled;
                    lines.push(format!("its own is cancelled: {cancelled}"));
                    break;
                }
            }
            Some(_) => {}
            None => {
                lines.push("CUT OFF".to_owned());
                break;
            }
        }
    }
    lines.push(format!("the other's runs: {}", !beside("ended").exists()));
    lines
}
