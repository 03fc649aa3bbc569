//! A daemon without an engine, a client, and a gateway between them.
// Each test binary uses a part of it; what fails here fails a test.
#![allow(dead_code, clippy::unwrap_used)]

pub mod client;

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use pagedd_gateway::app::Settings;
use pagedd_gateway::serve::Gateway;
use pagedd_gateway::text::Text;
use pagedd_model::testing::{TinyModel, gguf_writer};
use pagedd_wire::gateway::{
    Answer, Closed, Delivery, Entry, Finish, KeyEntry, Query, Rates, Refusal, Request, RequestId, ToDaemon,
    ToGateway, Welcome,
};
use pagedd_wire::{FrameBuffer, PROTOCOL, encode};
use sha2::{Digest as _, Sha256};

/// Longer than anything here takes; reached only by a test that fails.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Writes a tiny model; `change` may set metadata before.
pub fn model(change: impl FnOnce(&mut pagedd_model::testing::GgufWriter)) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("tiny.gguf");
    let mut writer = gguf_writer(1, &TinyModel::default());
    change(&mut writer);
    std::fs::write(&path, writer.bytes()).unwrap();
    (directory, path)
}

pub fn load(path: &Path) -> Arc<Text> {
    Arc::new(Text::open(path).unwrap())
}

pub fn text() -> Arc<Text> {
    let (_directory, path) = model(|_| {});
    load(&path)
}

pub fn welcome() -> Welcome {
    Welcome {
        tenant: "acme".to_owned(),
        model: "tiny".to_owned(),
        since: 1_700_000_000,
        max_model_len: 512,
        vocab_size: 272,
        default_max_tokens: None,
        max_n: 8,
        max_body: 1 << 20,
        max_connections: 256,
        header_timeout_ms: 30_000,
        idle_timeout_ms: 90_000,
        keys: None,
        closed: None,
    }
}

pub fn key(id: u32, key: &str) -> KeyEntry {
    KeyEntry { id, sha256: Sha256::digest(key).into() }
}

/// What becomes of a submission.
pub enum Script {
    /// It is admitted, with this log.
    Log(Vec<Entry>),
    /// It is not.
    Refuse(Refusal),
    /// Nothing is said.
    Silence,
}

/// How much of every log is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Visible {
    All,
    First(usize),
}

pub struct FakeLog {
    pub request: Request,
    pub entries: Vec<Entry>,
    pub cancelled: bool,
}

impl FakeLog {
    /// Entries that are there where every log shows at most `limit`; one that was cancelled shows all it has.
    fn there(&self, limit: Option<usize>) -> usize {
        self.entries.len().min(limit.filter(|_| !self.cancelled).unwrap_or(usize::MAX))
    }

    /// Ends it where it stands, as an engine does.
    fn cancel(&mut self, limit: Option<usize>) {
        self.entries.truncate(self.there(limit));
        self.cancelled = true;
        if matches!(self.entries.last(), Some(Entry::End { .. })) {
            return;
        }
        for choice in 0..self.request.n {
            let ended = |e: &Entry| matches!(e, Entry::Finish { choice: of, .. } if *of == choice);
            if !self.entries.iter().any(ended) {
                self.entries.push(Entry::Finish { choice, reason: Finish::Cancelled });
            }
        }
        self.entries.push(Entry::End { cached_tokens: 0 });
    }
}

#[derive(Default)]
struct State {
    logs: BTreeMap<RequestId, FakeLog>,
    /// Body and request of every idempotency key.
    keys: BTreeMap<[u8; 32], ([u8; 32], RequestId)>,
    /// Sent to the present connection.
    sent: BTreeMap<RequestId, usize>,
    received: Vec<ToDaemon>,
    limit: Option<usize>,
    made: u64,
    socket: Option<UnixStream>,
    ended: bool,
    muted: bool,
}

type Play = dyn Fn(&Request) -> Script + Send + Sync;

/// A daemon that plays a script.
#[derive(Clone)]
pub struct Daemon {
    state: Arc<(Mutex<State>, Condvar)>,
    play: Arc<Play>,
}

impl Daemon {
    pub fn new(play: impl Fn(&Request) -> Script + Send + Sync + 'static) -> Self {
        Self { state: Arc::default(), play: Arc::new(play) }
    }

    /// Speaks to a gateway at the other end; logs of earlier connections stay.
    pub fn connect(&self, socket: UnixStream, welcome: &Welcome) {
        let mut reader = socket.try_clone().unwrap();
        {
            let mut state = self.state.0.lock().unwrap();
            state.socket = Some(socket);
            state.sent.clear();
            state.ended = false;
        }
        self.send(&ToGateway::Welcome(Box::new(welcome.clone())));
        let this = self.clone();
        thread::spawn(move || {
            let mut buffer = FrameBuffer::new();
            let mut scratch = vec![0; 1 << 16];
            loop {
                let read = reader.read(&mut scratch).unwrap_or(0);
                if read == 0 {
                    let mut state = this.state.0.lock().unwrap();
                    state.ended = true;
                    this.state.1.notify_all();
                    return;
                }
                buffer.push(&scratch[..read]);
                while let Some(frame) = buffer.next_frame::<ToDaemon>().unwrap() {
                    this.obey(frame);
                }
            }
        });
    }

    fn write(state: &mut State, frame: &ToGateway) {
        if let Some(socket) = &mut state.socket {
            // A gateway that was killed does not read.
            let _ = socket.write_all(&encode(frame).unwrap());
        }
    }

    pub fn send(&self, frame: &ToGateway) {
        Self::write(&mut self.state.0.lock().unwrap(), frame);
    }

    fn obey(&self, frame: ToDaemon) {
        let mut guard = self.state.0.lock().unwrap();
        let state = &mut *guard;
        match &frame {
            ToDaemon::Hello { protocol } => assert_eq!(*protocol, PROTOCOL),
            ToDaemon::Submit { ticket, request } => {
                if let Some(answer) = self.submit(state, *ticket, request) {
                    Self::write(state, &answer);
                }
            }
            ToDaemon::Attach { request, from } => match state.logs.get(request) {
                Some(log) => {
                    let there = log.there(state.limit);
                    let attached = ToGateway::Attached {
                        request: *request,
                        key: log.request.key,
                        context: log.request.context.clone(),
                        prompt_tokens: log.request.prompt.len() as u32,
                        created: 1_700_000_001,
                        n: log.request.n,
                        entries: there as u64,
                        held: false,
                    };
                    state.sent.insert(*request, *from as usize);
                    Self::write(state, &attached);
                    Self::deliver(state);
                }
                None => Self::write(state, &ToGateway::NotFound { request: *request }),
            },
            ToDaemon::Detach { request, .. } => {
                state.sent.remove(request);
            }
            ToDaemon::Cancel { request } if !state.muted => {
                if let Some(log) = state.logs.get_mut(request) {
                    log.cancel(state.limit);
                }
                Self::deliver(state);
            }
            ToDaemon::Query { ticket, query } if !state.muted => {
                let answer = match query {
                    Query::Health => Answer::Health {
                        ready: true,
                        reason: None,
                        last_step_ms: Some(7),
                        running: 2,
                        waiting: 1,
                    },
                    Query::Metrics => Answer::Metrics("pagedd_blocks_used 5\n# EOF\n".to_owned()),
                };
                Self::write(state, &ToGateway::Answer { ticket: *ticket, answer });
            }
            ToDaemon::Cancel { .. } | ToDaemon::Stop { .. } | ToDaemon::Query { .. } => {}
        }
        state.received.push(frame);
        self.state.1.notify_all();
    }

    fn submit(&self, state: &mut State, ticket: u64, request: &Request) -> Option<ToGateway> {
        let before =
            request.idempotency.and_then(|sent| state.keys.get(&sent.key).map(|known| (sent, *known)));
        if let Some((sent, (body, id))) = before {
            return Some(if sent.body == body {
                ToGateway::Accepted { ticket, request: id, repeated: true, rates: Rates::default() }
            } else {
                ToGateway::Refused { ticket, refusal: Refusal::IdempotencyConflict }
            });
        }
        match (self.play)(request) {
            Script::Log(entries) => {
                state.made += 1;
                let id = (0xabcd_u128 << 64 | u128::from(state.made)).to_be_bytes();
                if let Some(sent) = request.idempotency {
                    state.keys.insert(sent.key, (sent.body, id));
                }
                state.logs.insert(id, FakeLog { request: request.clone(), entries, cancelled: false });
                Some(ToGateway::Accepted { ticket, request: id, repeated: false, rates: Rates::default() })
            }
            Script::Refuse(refusal) => Some(ToGateway::Refused { ticket, refusal }),
            Script::Silence => None,
        }
    }

    fn deliver(state: &mut State) {
        let mut deliveries = Vec::new();
        for (request, sent) in &mut state.sent {
            let log = &state.logs[request];
            let end = log.there(state.limit);
            if *sent < end {
                let entries = log.entries[*sent..end].to_vec();
                deliveries.push(Delivery { request: *request, from: *sent as u64, entries });
                *sent = end;
            }
        }
        if !deliveries.is_empty() {
            Self::write(state, &ToGateway::Entries(deliveries));
        }
    }

    /// Sets how much of every log is there, and sends what is new.
    pub fn show(&self, visible: Visible) {
        let mut state = self.state.0.lock().unwrap();
        state.limit = match visible {
            Visible::All => None,
            Visible::First(entries) => Some(entries),
        };
        Self::deliver(&mut state);
    }

    /// Answers no question and ends nothing from now on.
    pub fn mute(&self) {
        self.state.0.lock().unwrap().muted = true;
    }

    /// Closes the connection, as a daemon that dies does.
    pub fn die(&self) {
        let state = self.state.0.lock().unwrap();
        state.socket.as_ref().unwrap().shutdown(std::net::Shutdown::Both).unwrap();
    }

    /// Waits until `found` finds something in what has been received.
    pub fn wait<T>(&self, what: &str, mut found: impl FnMut(&[ToDaemon]) -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        let mut state = self.state.0.lock().unwrap();
        loop {
            if let Some(found) = found(&state.received) {
                return found;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "{what} did not come; received: {:?}", state.received);
            state = self.state.1.wait_timeout(state, left).unwrap().0;
        }
    }

    pub fn wait_request(&self) -> Request {
        self.wait("a submission", |received| {
            received.iter().rev().find_map(|frame| match frame {
                ToDaemon::Submit { request, .. } => Some((**request).clone()),
                _ => None,
            })
        })
    }

    pub fn wait_cancel(&self) -> RequestId {
        self.wait("a cancel", |received| {
            received.iter().find_map(|frame| match frame {
                ToDaemon::Cancel { request } => Some(*request),
                _ => None,
            })
        })
    }

    pub fn received(&self) -> Vec<ToDaemon> {
        self.state.0.lock().unwrap().received.clone()
    }

    pub fn with_logs<T>(&self, look: impl FnOnce(&BTreeMap<RequestId, FakeLog>) -> T) -> T {
        look(&self.state.0.lock().unwrap().logs)
    }

    pub fn wait_end(&self) {
        let deadline = Instant::now() + PATIENCE;
        let mut state = self.state.0.lock().unwrap();
        while !state.ended {
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "the gateway did not end");
            state = self.state.1.wait_timeout(state, left).unwrap().0;
        }
    }
}

/// A gateway in this process.
pub struct Server {
    pub daemon: Daemon,
    pub address: SocketAddr,
    pub text: Arc<Text>,
    thread: Option<JoinHandle<std::io::Result<()>>>,
}

pub struct Options {
    pub welcome: Welcome,
    pub settings: Settings,
    pub text: Arc<Text>,
}

impl Default for Options {
    fn default() -> Self {
        Self { welcome: welcome(), settings: Settings::default(), text: text() }
    }
}

impl Server {
    pub fn start(options: Options, play: impl Fn(&Request) -> Script + Send + Sync + 'static) -> Self {
        Self::on(TcpListener::bind("127.0.0.1:0").unwrap(), Daemon::new(play), options)
    }

    pub fn on(listener: TcpListener, daemon: Daemon, options: Options) -> Self {
        let address = listener.local_addr().unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let Options { welcome, settings, text } = options;
        let gateway = Gateway {
            tenant: "acme".to_owned(),
            listener,
            socket: theirs,
            text: Arc::clone(&text),
            settings,
        };
        let thread = thread::spawn(move || gateway.run());
        daemon.connect(ours, &welcome);
        let server = Self { daemon, address, text, thread: Some(thread) };
        // The first word of the daemon has been taken in.
        server.wait_status("/v1/models", 200, 401);
        server
    }

    pub fn wait_status(&self, path: &str, a: u16, b: u16) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = client::get(self.address, path).status;
            if status == a || status == b {
                return;
            }
            assert!(Instant::now() < deadline, "{path} answers {status}");
            thread::yield_now();
        }
    }

    /// Waits for the gateway's end.
    pub fn join(mut self) -> Duration {
        let start = Instant::now();
        self.thread.take().unwrap().join().unwrap().unwrap();
        start.elapsed()
    }
}

/// The log of an answer of one choice: each token its own entry.
pub fn log_of(text: &Text, answer: &str) -> Vec<Entry> {
    let mut entries = tokens_of(text, 0, answer);
    entries.push(Entry::Finish { choice: 0, reason: Finish::Stop });
    entries.push(Entry::End { cached_tokens: 3 });
    entries
}

pub fn tokens_of(text: &Text, choice: u32, answer: &str) -> Vec<Entry> {
    text.prompt(answer).into_iter().map(|token| Entry::Token { choice, token }).collect()
}

pub fn closed(closed: Closed) -> Welcome {
    Welcome { closed: Some(closed), ..welcome() }
}

/// A request id as it is written.
pub fn hex(id: RequestId) -> String {
    pagedd_core::RequestId(id).to_string()
}
