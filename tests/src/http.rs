//! A small HTTP/1.1 client over blocking sockets: requests, answers, and server-sent events one by one.
//!
//! **Owns** one connection per request. **Never** retries, follows, or hides what came: tests look at bytes.

use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// Longest silence of a server under test.
const SILENCE: Duration = Duration::from_mins(1);

/// Where to ask, and with which key.
#[derive(Clone, Debug)]
pub struct Client {
    address: SocketAddr,
    key: Option<String>,
}

impl Client {
    /// Asks the loopback port `port`.
    pub fn new(port: u16, key: Option<&str>) -> Self {
        Self { address: SocketAddr::from(([127, 0, 0, 1], port)), key: key.map(str::to_owned) }
    }

    /// The same port with another key.
    #[must_use]
    pub fn with_key(&self, key: Option<&str>) -> Self {
        Self { address: self.address, key: key.map(str::to_owned) }
    }

    /// A fresh connection.
    ///
    /// # Panics
    /// It was refused: a port is never refused while its daemon lives.
    #[track_caller]
    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect_timeout(&self.address, SILENCE);
        let stream = stream.unwrap_or_else(|e| panic!("{}: {e}", self.address));
        stream.set_read_timeout(Some(SILENCE)).expect("read timeout");
        stream.set_write_timeout(Some(SILENCE)).expect("write timeout");
        stream
    }

    /// `GET path`.
    #[track_caller]
    pub fn get(&self, path: &str) -> Response {
        self.open("GET", path, &[], b"").into_response()
    }

    /// `POST path` with a JSON body.
    #[track_caller]
    pub fn post(&self, path: &str, body: &Value) -> Response {
        self.open("POST", path, &[("content-type", "application/json")], body.to_string().as_bytes())
            .into_response()
    }

    /// `POST path` with any body.
    #[track_caller]
    pub fn post_bytes(&self, path: &str, body: &[u8]) -> Response {
        self.open("POST", path, &[("content-type", "application/json")], body).into_response()
    }

    /// `POST path` with a JSON body and further headers; the answer is read as it comes.
    #[track_caller]
    pub fn stream(&self, path: &str, headers: &[(&str, &str)], body: &Value) -> Incoming {
        let mut all = vec![("content-type", "application/json")];
        all.extend_from_slice(headers);
        self.open("POST", path, &all, body.to_string().as_bytes())
    }

    /// Any request; returns once the answer's head is read.
    #[track_caller]
    pub fn open(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Incoming {
        let stream = self.send(method, path, headers, body).expect("send the head");
        Incoming::read_head(stream)
    }

    /// Sends any request, and reads nothing of its answer.
    ///
    /// # Errors
    /// The connection broke before the request's head was out.
    #[track_caller]
    pub fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> io::Result<TcpStream> {
        let mut stream = self.connect();
        let mut head = vec![
            format!("{method} {path} HTTP/1.1"),
            format!("host: {}", self.address),
            "connection: close".into(),
        ];
        head.extend(self.key.as_ref().map(|key| format!("authorization: Bearer {key}")));
        head.extend(headers.iter().map(|(name, value)| format!("{name}: {value}")));
        if method != "GET" {
            head.push(format!("content-length: {}", body.len()));
        }
        let head = head.join("\r\n") + "\r\n\r\n";
        stream.write_all(head.as_bytes())?;
        // A server may answer 413 and close before it read all of a body.
        let _ = stream.write_all(body);
        Ok(stream)
    }
}

/// An answer whose head was read.
#[derive(Debug)]
pub struct Incoming {
    /// Status code.
    pub status: u16,
    headers: Vec<(String, String)>,
    reader: BufReader<TcpStream>,
    body: Body,
}

/// How the rest of a body is delimited.
#[derive(Clone, Copy, Debug)]
enum Body {
    Length(usize),
    Chunked { left: usize },
    ToEnd,
    Done,
}

impl Incoming {
    /// Reads status line and headers.
    #[track_caller]
    pub fn read_head(stream: TcpStream) -> Self {
        Self::try_read_head(stream).expect("an answer's head")
    }

    /// Reads status line and headers; `None` where the connection ended before the last of them.
    #[track_caller]
    pub fn try_read_head(stream: TcpStream) -> Option<Self> {
        let mut reader = BufReader::new(stream);
        let line = read_line(&mut reader)?;
        let status = line.split(' ').nth(1).and_then(|s| s.parse().ok());
        let status = status.unwrap_or_else(|| panic!("no status line: {line:?}"));
        let mut headers = Vec::new();
        loop {
            let line = read_line(&mut reader)?;
            if line.is_empty() {
                break;
            }
            let (name, value) = line.split_once(':').unwrap_or_else(|| panic!("no header: {line:?}"));
            headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
        }
        let mut answer = Self { status, headers, reader, body: Body::ToEnd };
        let chunked = answer.header("transfer-encoding").is_some_and(|v| v.contains("chunked"));
        let length = answer.header("content-length").and_then(|v| v.parse().ok());
        answer.body = match (chunked, length) {
            (true, _) => Body::Chunked { left: 0 },
            (false, Some(length)) => Body::Length(length),
            (false, None) => Body::ToEnd,
        };
        Some(answer)
    }

    /// A header's value.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }

    /// Whether no byte lies here that was not taken; also where the connection has ended.
    pub fn is_quiet(&self) -> bool {
        self.reader.buffer().is_empty() && is_quiet(self.reader.get_ref())
    }

    /// The next bytes of the body; `None` at its end, also where the connection broke.
    fn bytes(&mut self) -> Option<Vec<u8>> {
        let want = match &mut self.body {
            Body::Done | Body::Length(0) => return None,
            Body::Length(left) => *left,
            Body::ToEnd => usize::MAX,
            Body::Chunked { left } => {
                if *left == 0 {
                    let size = read_line(&mut self.reader)?;
                    *left = usize::from_str_radix(size.split(';').next()?.trim(), 16).ok()?;
                    if *left == 0 {
                        self.body = Body::Done;
                        return None;
                    }
                }
                *left
            }
        };
        let mut buffer = vec![0; want.min(16 << 10)];
        let read = match self.reader.read(&mut buffer) {
            Ok(0) => return None,
            Ok(read) => read,
            Err(e) if e.kind() == ErrorKind::ConnectionReset => return None,
            Err(e) => panic!("the server was silent for {SILENCE:?}, or: {e}"),
        };
        buffer.truncate(read);
        let mut chunk_ended = false;
        match &mut self.body {
            Body::Length(left) => *left -= read,
            Body::Chunked { left } => {
                *left -= read;
                chunk_ended = *left == 0;
            }
            Body::ToEnd | Body::Done => {}
        }
        if chunk_ended {
            read_line(&mut self.reader)?;
        }
        Some(buffer)
    }

    /// Reads the whole body, or what came of it.
    pub fn into_response(mut self) -> Response {
        let mut body = Vec::new();
        while let Some(bytes) = self.bytes() {
            body.extend(bytes);
        }
        let is_whole = matches!(self.body, Body::Done | Body::Length(0) | Body::ToEnd);
        Response { status: self.status, headers: self.headers, body, is_whole }
    }

    /// The answer as server-sent events.
    ///
    /// # Panics
    /// It is no event stream.
    #[track_caller]
    pub fn events(self) -> Events {
        if self.header("content-type").is_some_and(|t| t.starts_with("text/event-stream")) {
            return Events { incoming: self, buffer: Vec::new() };
        }
        let response = self.into_response();
        panic!("no event stream: {} {}", response.status, response.text());
    }
}

/// One line without its end; `None` where the connection ended before it.
#[track_caller]
fn read_line(reader: &mut BufReader<TcpStream>) -> Option<String> {
    let mut line = Vec::new();
    match reader.read_until(b'\n', &mut line) {
        Ok(_) => {}
        Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
            panic!("the server was silent for {SILENCE:?}");
        }
        Err(_) => return None,
    }
    let text = String::from_utf8_lossy(&line);
    text.ends_with('\n').then(|| text.trim_end_matches(['\r', '\n']).to_owned())
}

/// Whether no byte waits in a socket; also where the connection has ended.
pub fn is_quiet(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).expect("no waiting");
    let waits = matches!(stream.peek(&mut [0]), Ok(1..));
    stream.set_nonblocking(false).expect("waiting");
    !waits
}

/// A whole answer.
#[derive(Clone, Debug)]
pub struct Response {
    /// Status code.
    pub status: u16,
    headers: Vec<(String, String)>,
    /// Body.
    pub body: Vec<u8>,
    /// The connection did not break before the body's end.
    pub is_whole: bool,
}

impl Response {
    /// A header's value.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The body as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|e| panic!("no JSON ({e}): {} {}", self.status, self.text()))
    }

    /// The body, where the status is 200.
    ///
    /// # Panics
    /// It is another.
    #[track_caller]
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text());
        self.json()
    }

    /// The error object, where the status is `status`.
    ///
    /// # Panics
    /// It is another, or the body is no OpenAI error object.
    #[track_caller]
    pub fn error(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.text());
        let error = self.json()["error"].clone();
        assert!(error["message"].as_str().is_some_and(|m| !m.is_empty()), "no error object: {}", self.text());
        error
    }
}

/// One server-sent event.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Event {
    /// `id:`.
    pub id: Option<String>,
    /// `event:`.
    pub name: Option<String>,
    /// `data:`, lines joined.
    pub data: String,
}

impl Event {
    /// The data as JSON.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.data).unwrap_or_else(|e| panic!("no JSON ({e}): {self:?}"))
    }

    /// Text of choice 0 that this event carries, of either kind of completion.
    pub fn text(&self) -> String {
        let Ok(value) = serde_json::from_str::<Value>(&self.data) else { return String::new() };
        let choices = value["choices"].as_array().cloned().unwrap_or_default();
        let of_first = choices.iter().filter(|c| c["index"] == 0);
        of_first.filter_map(|c| c["delta"]["content"].as_str().or(c["text"].as_str())).collect()
    }
}

/// The events of an answer, as they come. Dropping it closes the connection.
#[derive(Debug)]
pub struct Events {
    incoming: Incoming,
    buffer: Vec<u8>,
}

impl Events {
    /// A header's value.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.incoming.header(name)
    }

    /// Whether no byte lies here that was not taken; also where the connection has ended.
    pub fn is_quiet(&self) -> bool {
        self.buffer.is_empty() && self.incoming.is_quiet()
    }

    /// Closes both directions at once, as a client that leaves.
    pub fn leave(self) {
        let _ = self.incoming.reader.get_ref().shutdown(Shutdown::Both);
    }
}

impl Iterator for Events {
    type Item = Event;

    /// The next event; `None` at the end of the answer, also where the connection broke.
    fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|w| w == b"\n\n") {
                let block: Vec<u8> = self.buffer.drain(..end + 2).collect();
                let event = parse_event(&String::from_utf8(block).expect("events are UTF-8"));
                // A block of comments only keeps the connection alive.
                match event {
                    Some(event) => return Some(event),
                    None => continue,
                }
            }
            let bytes = self.incoming.bytes()?;
            self.buffer.extend(bytes.iter().filter(|b| **b != b'\r'));
        }
    }
}

fn parse_event(block: &str) -> Option<Event> {
    let mut event = Event::default();
    let mut data: Vec<&str> = Vec::new();
    for line in block.lines() {
        let (name, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match name {
            "id" => event.id = Some(value.to_owned()),
            "event" => event.name = Some(value.to_owned()),
            "data" => data.push(value),
            _ => {}
        }
    }
    event.data = data.join("\n");
    (!data.is_empty()).then_some(event)
}

/// Text of choice 0 of a whole stream.
///
/// # Panics
/// The stream did not end with `[DONE]`.
#[track_caller]
pub fn whole_text(events: Events) -> String {
    let all: Vec<Event> = events.collect();
    assert_eq!(all.last().map(|e| e.data.as_str()), Some("[DONE]"), "{all:#?}");
    all.iter().map(Event::text).collect()
}
