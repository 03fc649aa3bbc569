//! A client that sees every byte.

use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};

use serde_json::Value;

use super::PATIENCE;

pub struct Response {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Response {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {:?}", self.body))
    }

    /// Status, `param` and `code` of an error object.
    pub fn error(&self) -> (u16, String, String) {
        let json = self.json();
        let text = |key: &str| json["error"][key].as_str().unwrap_or_default().to_owned();
        assert!(json["error"]["message"].is_string(), "{json}");
        (self.status, text("param"), text("code"))
    }
}

/// The path under which the request of an answer is found again.
pub fn path_of(response: &Response) -> String {
    format!("/v1/requests/{}", response.header("pagedd-request-id").unwrap())
}

/// What an answer says of its request: the header in a word, and the body.
pub fn state(response: &Response) -> (&str, Value) {
    (response.header("pagedd-request-status").unwrap(), response.json())
}

/// A connection whose head has been read.
pub struct Open {
    pub reader: BufReader<TcpStream>,
    pub status: u16,
    pub headers: Vec<(String, String)>,
}

pub fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

pub fn request(method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> String {
    let mut text = format!("{method} {path} HTTP/1.1\r\nHost: x\r\n");
    for (name, value) in headers {
        write!(text, "{name}: {value}\r\n").unwrap();
    }
    if method == "POST" {
        write!(text, "Content-Type: application/json\r\nContent-Length: {}\r\n", body.len()).unwrap();
    }
    text + "\r\n" + body
}

/// Sends a request and reads the answer's head.
pub fn open(address: SocketAddr, request: &str) -> Open {
    let mut stream = connect(address);
    stream.write_all(request.as_bytes()).unwrap();
    read_head(stream)
}

pub fn read_head(stream: TcpStream) -> Open {
    let mut reader = BufReader::new(stream);
    let (status, headers) = head(&mut reader);
    Open { reader, status, headers }
}

fn head(reader: &mut BufReader<TcpStream>) -> (u16, Vec<(String, String)>) {
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let status = line.split(' ').nth(1).unwrap_or_else(|| panic!("no status: {line:?}")).parse().unwrap();
    let mut headers = Vec::new();
    loop {
        line.clear();
        reader.read_line(&mut line).unwrap();
        let Some((name, value)) = line.trim_end().split_once(": ") else { return (status, headers) };
        headers.push((name.to_ascii_lowercase(), value.to_owned()));
    }
}

impl Open {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    /// The next chunk of a chunked body; `None` at its end.
    pub fn chunk(&mut self) -> Option<String> {
        let mut line = String::new();
        if self.reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        let length = usize::from_str_radix(line.trim_end(), 16).unwrap_or_else(|_| panic!("{line:?}"));
        let mut bytes = vec![0; length + 2];
        self.reader.read_exact(&mut bytes).ok()?;
        bytes.truncate(length);
        (length > 0).then(|| String::from_utf8(bytes).unwrap())
    }

    /// The whole body.
    pub fn finish(mut self) -> Response {
        let mut body = String::new();
        if let Some(length) = self.header("content-length") {
            let mut bytes = vec![0; length.parse().unwrap()];
            self.reader.read_exact(&mut bytes).unwrap();
            body = String::from_utf8(bytes).unwrap();
        } else {
            while let Some(chunk) = self.chunk() {
                body.push_str(&chunk);
            }
        }
        Response { status: self.status, headers: self.headers, body }
    }

    /// Reads until the events read so far contain `needle`; returns them.
    pub fn read_until(&mut self, needle: &str) -> String {
        let mut text = String::new();
        while !text.contains(needle) {
            text.push_str(
                &self.chunk().unwrap_or_else(|| panic!("the stream ended before {needle:?}: {text}")),
            );
        }
        text
    }
}

pub fn get(address: SocketAddr, path: &str) -> Response {
    get_with(address, path, &[])
}

pub fn get_with(address: SocketAddr, path: &str, headers: &[(&str, &str)]) -> Response {
    open(address, &request("GET", path, headers, "")).finish()
}

pub fn post(address: SocketAddr, path: &str, body: &str) -> Response {
    post_with(address, path, &[], body)
}

pub fn post_with(address: SocketAddr, path: &str, headers: &[(&str, &str)], body: &str) -> Response {
    open(address, &request("POST", path, headers, body)).finish()
}

/// An event of a stream.
#[derive(Clone, PartialEq, Debug)]
pub struct Event {
    pub id: Option<u64>,
    pub name: Option<String>,
    /// `None`: `[DONE]`.
    pub data: Option<Value>,
}

/// The events of a stream's text, without comments.
pub fn events(text: &str) -> Vec<Event> {
    assert!(text.is_empty() || text.ends_with("\n\n"), "cut: {text:?}");
    text.split_terminator("\n\n")
        .filter(|event| !event.starts_with(':'))
        .map(|event| {
            let (mut id, mut name, mut data) = (None, None, None);
            for line in event.lines() {
                if let Some(value) = line.strip_prefix("id: ") {
                    id = Some(value.parse().unwrap());
                } else if let Some(value) = line.strip_prefix("event: ") {
                    name = Some(value.to_owned());
                } else if let Some(value) = line.strip_prefix("data: ") {
                    data = (value != "[DONE]").then(|| serde_json::from_str(value).unwrap());
                } else {
                    panic!("a line that is neither id, name nor data: {line:?}");
                }
            }
            Event { id, name, data }
        })
        .collect()
}

/// The text of one choice over all events of a stream.
pub fn text_of(events: &[Event], choice: u64) -> String {
    let mut text = String::new();
    for data in events.iter().filter_map(|event| event.data.as_ref()) {
        for part in data["choices"].as_array().into_iter().flatten().filter(|part| part["index"] == choice) {
            let content = part["delta"]["content"].as_str().or(part["text"].as_str());
            text.push_str(content.unwrap_or_default());
        }
    }
    text
}
