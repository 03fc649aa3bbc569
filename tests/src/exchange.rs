//! One request of a client that does not give up: it asks again until it is accepted, and attaches again until it is answered.
//!
//! **Owns** what a client knows of a request: its id, and the id of the last event that came. **Never** forgives: an event
//! that is missing, came twice, or says that something was lost is an error.

use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::asks::{Ask, Form, Outcome};
use crate::http::{Client, Events, Incoming, Response, is_quiet};

/// A request that has not come further for so long is lost.
const PATIENCE: Duration = Duration::from_secs(90);
/// Between two tries, at first and at most.
const PAUSES: [Duration; 2] = [Duration::from_millis(5), Duration::from_millis(200)];
/// Refusals that pass.
const PASSING: [&str; 7] =
    ["starting", "shutting_down", "draining", "loading", "overloaded", "no_answer", "queue_full"];

/// A request under way.
#[derive(Debug)]
pub struct Exchange<'a> {
    http: &'a Client,
    ask: &'a Ask,
    /// How the answer is wanted, this time.
    form: Form,
    /// Names the request before it has an id.
    key: String,
    id: Option<String>,
    /// Id of the last event that came; 0 before the first.
    last: u64,
    outcome: Outcome,
    done: bool,
    /// Sent, and not yet answered.
    sent: Option<TcpStream>,
    events: Option<Events>,
    /// Connections that broke after the request was accepted.
    pub broken: u32,
    moved: Instant,
    pause: Duration,
}

impl<'a> Exchange<'a> {
    /// A request that was not sent yet. `key` is different for every request.
    pub fn new(http: &'a Client, ask: &'a Ask, key: String) -> Self {
        Self {
            http,
            ask,
            form: ask.form,
            key,
            id: None,
            last: 0,
            outcome: Outcome::default(),
            done: false,
            sent: None,
            events: None,
            broken: 0,
            moved: Instant::now(),
            pause: PAUSES[0],
        }
    }

    /// The same request read once more, from the first event on.
    #[must_use]
    pub fn again(&self, form: Form) -> Self {
        Self { id: self.id.clone(), form, ..Self::new(self.http, self.ask, self.key.clone()) }
    }

    /// The id that the server gave it.
    pub fn id(&self) -> Option<&str> {
        self.id.as_deref()
    }

    /// Id of the last event that came; 0 before the first.
    pub fn last(&self) -> u64 {
        self.last
    }

    /// Whether nothing has come that was not looked at.
    pub fn is_quiet(&self) -> bool {
        self.sent.as_ref().is_none_or(is_quiet) && self.events.as_ref().is_none_or(Events::is_quiet)
    }

    /// Sends the request, if it is not on its way, and waits for nothing.
    ///
    /// # Errors
    /// It could not be sent for too long.
    pub fn send(&mut self) -> Result<(), String> {
        while self.sent.is_none() && self.events.is_none() {
            let sent = match &self.id {
                None => {
                    let headers = [
                        ("content-type", "application/json"),
                        ("pagedd-resumable", "1"),
                        ("idempotency-key", self.key.as_str()),
                    ];
                    self.http.send("POST", "/v1/completions", &headers, self.ask.body.to_string().as_bytes())
                }
                Some(id) => {
                    let last = self.last.to_string();
                    let path = match self.form {
                        Form::Stream => format!("/v1/requests/{id}/stream"),
                        Form::Whole => format!("/v1/requests/{id}"),
                    };
                    self.http.send("GET", &path, &[("last-event-id", &last)], b"")
                }
            };
            match sent {
                Ok(stream) => self.sent = Some(stream),
                Err(error) => self.wait(&error.to_string())?,
            }
        }
        Ok(())
    }

    /// Has the request accepted: returns once its events, or its whole answer, come.
    ///
    /// # Errors
    /// It was refused, or lost.
    pub fn open(&mut self) -> Result<(), String> {
        while self.events.is_none() && !self.done {
            self.send()?;
            let Some(stream) = self.sent.take() else { continue };
            let Some(answer) = Incoming::try_read_head(stream) else {
                self.wait("the connection ended before the head")?;
                continue;
            };
            if let Some(id) = answer.header("pagedd-request-id") {
                let before = self.id.get_or_insert_with(|| id.to_owned());
                if before != id {
                    return Err(format!("the request {before} became {id}"));
                }
            }
            if answer.status == 200 && self.form == Form::Stream {
                self.events = Some(answer.events());
            } else {
                self.take(&answer.into_response())?;
            }
        }
        Ok(())
    }

    /// A whole answer, or a refusal.
    fn take(&mut self, answer: &Response) -> Result<(), String> {
        if !answer.is_whole {
            self.broken += 1;
            return self.wait("the connection ended inside of the body");
        }
        let said = answer.json();
        // 202: it runs in the background.
        if ![200, 202].contains(&answer.status) {
            let code = said["error"]["code"].as_str().unwrap_or_default();
            if PASSING.contains(&code) {
                return self.wait(code);
            }
            return Err(format!("refused with {}: {said}", answer.status));
        }
        // How far a request has come that is not complete.
        if said["object"] == "request" {
            return self.wait("the answer is not complete");
        }
        self.outcome.add(self.ask, None, &said);
        self.done = true;
        Ok(())
    }

    /// Goes on to the next event; false once the answer is complete.
    ///
    /// # Errors
    /// Something was lost, came twice, or failed.
    pub fn advance(&mut self) -> Result<bool, String> {
        while !self.done {
            self.open()?;
            let Some(events) = &mut self.events else { continue };
            let Some(event) = events.next() else {
                self.events = None;
                self.broken += 1;
                self.wait("the stream broke off")?;
                continue;
            };
            (self.moved, self.pause) = (Instant::now(), PAUSES[0]);
            if event.data == "[DONE]" {
                if self.outcome.usage.is_none() {
                    return Err("the stream ended without its last event".into());
                }
                self.done = true;
                break;
            }
            let said: Value = serde_json::from_str(&event.data).map_err(|e| format!("{e}: {event:?}"))?;
            if event.name.as_deref() == Some("detached") {
                if said["detached"]["last_event_id"] != self.last {
                    return Err(format!("after the event {} came {event:?}", self.last));
                }
                self.events = None;
                self.broken += 1;
                continue;
            }
            let id = event.id.as_deref().and_then(|id| id.parse::<u64>().ok());
            match id {
                Some(id) if id > self.last => self.last = id,
                _ => return Err(format!("after the event {} came {event:?}", self.last)),
            }
            self.outcome.add(self.ask, id, &said);
            return Ok(true);
        }
        Ok(false)
    }

    /// Reads to the end.
    ///
    /// # Errors
    /// Something was lost, came twice, or failed.
    pub fn finish(&mut self) -> Result<&Outcome, String> {
        while self.advance()? {}
        Ok(&self.outcome)
    }

    /// The id that the server gave it, how far it has come, and what came.
    pub fn so_far(&self) -> String {
        format!("request {:?}, event {}, {} breaks: {:#?}", self.id, self.last, self.broken, self.outcome)
    }

    /// Before another try.
    fn wait(&mut self, why: &str) -> Result<(), String> {
        if self.moved.elapsed() > PATIENCE {
            return Err(format!("no progress for {PATIENCE:?} after event {}: {why}", self.last));
        }
        thread::sleep(self.pause);
        self.pause = (self.pause * 2).min(PAUSES[1]);
        Ok(())
    }
}
