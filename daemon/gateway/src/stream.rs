//! Delivery of one request's answer: as events, as a whole, or again.
//!
//! **Owns** the pace of one client. **Never** sends an event before the one with the id before it.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use pagedd_core::RequestId;
use pagedd_wire::gateway::Entry;
use serde::Serialize;
use tokio::time::timeout;

use crate::admit::Caller;
use crate::app::App;
use crate::body::{Body, Made, Sink};
use crate::link::{Gone, Reader};
use crate::log::Attached;
use crate::metrics::Stopwatch;
use crate::openai::ApiError;
use crate::openai::answer::{Answer, DONE, Head, KEEP_ALIVE, body_id, push_event};
use crate::openai::error::json;
use crate::openai::request::Form;
use crate::render::{Context, Event, Renderer, Step};

/// A request whose answer is on its way.
#[derive(Debug)]
pub struct Delivery {
    app: Arc<App>,
    reader: Reader,
    head: Head,
    resumable: bool,
    n: u32,
    renderer: Renderer,
    /// `None` where the answer is read again.
    watch: Option<Stopwatch>,
}

impl Delivery {
    /// Of a request that was just accepted, whose head came at `start`.
    ///
    /// # Errors
    /// The connection to the daemon ended.
    pub async fn first(
        app: &Arc<App>,
        mut reader: Reader,
        context: &Context,
        start: Instant,
    ) -> Result<Self, ApiError> {
        let attached = reader.attached().await.map_err(|gone| broken_off(gone, reader.request()))?;
        let mut delivery = Self::new(app, reader, context, &attached);
        delivery.watch = Some(Stopwatch::new(start, attached.n));
        Ok(delivery)
    }

    /// Of a request made earlier, by this caller and in this process or in another.
    ///
    /// # Errors
    /// 404 where it is not this caller's.
    pub async fn again(app: &Arc<App>, request: RequestId, caller: Caller) -> Result<Self, ApiError> {
        let mut reader = app.link.open(request);
        let attached = reader.attached().await.map_err(|gone| broken_off(gone, request))?;
        if caller.key != attached.key {
            return Err(ApiError::no_request());
        }
        let context = Context::decode(&attached.context)
            .map_err(|_| ApiError::internal("the request was made by another version of the server"))?;
        Ok(Self::new(app, reader, &context, &attached))
    }

    fn new(app: &Arc<App>, reader: Reader, context: &Context, attached: &Attached) -> Self {
        let head = Head {
            id: body_id(context.kind, reader.request()),
            kind: context.kind,
            created: attached.created,
            model: context.model.clone(),
            include_usage: matches!(context.form, Form::Stream { include_usage: true }),
        };
        let renderer = Renderer::new(Arc::clone(&app.text), context, attached.n, attached.prompt_tokens);
        Self {
            app: Arc::clone(app),
            reader,
            head,
            resumable: context.resumable,
            n: attached.n,
            renderer,
            watch: None,
        }
    }

    /// The whole answer, once it is there.
    ///
    /// # Errors
    /// It was cancelled, failed, or the process ends before.
    pub async fn whole(mut self) -> Result<Bytes, ApiError> {
        let mut answer = Answer::new(self.n, self.renderer.usage());
        loop {
            let steps =
                self.advance(u64::MAX).await.map_err(|gone| broken_off(gone, self.reader.request()))?;
            for event in steps.into_iter().filter_map(|step| step.event) {
                if answer.add(event)? {
                    return Ok(self.head.answer(&answer));
                }
            }
        }
    }

    /// The answer as a stream.
    #[must_use]
    pub fn stream(self) -> Body {
        Body::Made(Made::by(|sink| self.send(sink)))
    }

    /// The answer as a stream, without the events up to `after`. Waits until the log has come that far.
    ///
    /// # Errors
    /// 400 where it ended before.
    pub async fn stream_after(mut self, after: u64) -> Result<Body, ApiError> {
        self.reader.own(self.resumable);
        while self.renderer.consumed() < after {
            match self.advance(after - self.renderer.consumed()).await {
                Ok(_) => {}
                Err(Gone::NotFound) if self.renderer.consumed() > 0 => {
                    let last = self.renderer.consumed();
                    let message = format!(
                        "the header `Last-Event-ID` is {after}, and the stream of this request ended with {last}"
                    );
                    return Err(ApiError::value("Last-Event-ID", message));
                }
                Err(gone) => return Err(broken_off(gone, self.reader.request())),
            }
        }
        Ok(self.stream())
    }

    /// The whole answer if it is there, else how far it has come.
    ///
    /// # Errors
    /// It was cancelled, failed, or the process ends before.
    pub async fn so_far(mut self) -> Result<Bytes, ApiError> {
        let mut answer = Answer::new(self.n, self.renderer.usage());
        let known = self.reader.known();
        while self.renderer.consumed() < known {
            let left = known - self.renderer.consumed();
            let steps = self.advance(left).await.map_err(|gone| broken_off(gone, self.reader.request()))?;
            for event in steps.into_iter().filter_map(|step| step.event) {
                if answer.add(event)? {
                    return Ok(self.head.answer(&answer));
                }
            }
        }
        let usage = self.renderer.usage();
        Ok(json(&Status {
            id: &self.head.id,
            object: "request",
            status: if usage.completion == 0 { "waiting" } else { "running" },
            created: self.head.created,
            model: &self.head.model,
            n: self.n,
            prompt_tokens: usage.prompt,
            completion_tokens: usage.completion,
            last_event_id: self.renderer.consumed(),
        }))
    }

    /// Reads at most `limit` entries and renders them. Nothing is lost where this is not waited for.
    async fn advance(&mut self, limit: u64) -> Result<Vec<Step>, Gone> {
        let entries = self.reader.next(limit).await?;
        Ok(entries
            .iter()
            .map(|entry| {
                if let Some(watch) = &mut self.watch {
                    match entry {
                        Entry::Token { choice, .. } => watch.token(&self.app.metrics, *choice),
                        Entry::Finish { .. } => {}
                        Entry::End { .. } => watch.end(&self.app.metrics),
                    }
                }
                let step = self.renderer.entry(entry);
                if let Some(choice) = step.stopped {
                    self.reader.stop(choice);
                }
                step
            })
            .collect())
    }

    /// Puts the events into `sink`, to the last, from where the renderer stands.
    async fn send(mut self, sink: Sink) {
        let keep_alive = self.app.settings.keep_alive;
        // The last event with an id: what a client would send back.
        let mut last = self.renderer.consumed();
        // A log that was read to its end before leaves nothing but the end of the stream.
        if self.reader.is_at_end() {
            drop(sink.send(Bytes::from_static(DONE)).await);
            return;
        }
        loop {
            let mut part = Vec::new();
            let mut done = false;
            match timeout(keep_alive, self.advance(u64::MAX)).await {
                Err(_) => part.extend_from_slice(KEEP_ALIVE),
                Ok(Ok(steps)) => {
                    for Step { id, event, .. } in steps {
                        let Some(event) = event else { continue };
                        if let Some(data) = self.head.event(&event) {
                            push_event(&mut part, Some(id), &data);
                            last = id;
                        }
                        if matches!(event, Event::End(_)) {
                            part.extend_from_slice(DONE);
                            done = true;
                        }
                    }
                }
                Ok(Err(gone)) => {
                    let request = self.reader.request();
                    let error = match gone {
                        Gone::NotFound => ApiError::no_request(),
                        Gone::Ending => ApiError::shutting_down(Some(format!(
                            "go on with GET /v1/requests/{request}/stream and the header Last-Event-ID: {last}"
                        ))),
                    };
                    push_event(&mut part, None, &error.to_json());
                    done = true;
                }
            }
            if !part.is_empty() && sink.send(part.into()).await.is_err() || done {
                return;
            }
        }
    }
}

/// Why there is no answer to wait for.
fn broken_off(gone: Gone, request: RequestId) -> ApiError {
    match gone {
        Gone::NotFound => ApiError::no_request(),
        Gone::Ending => ApiError::shutting_down(Some(format!("ask again with GET /v1/requests/{request}"))),
    }
}

#[derive(Serialize)]
#[allow(clippy::struct_field_names)] // the key's name in the answer
struct Status<'a> {
    id: &'a str,
    object: &'static str,
    status: &'static str,
    created: u64,
    model: &'a str,
    n: u32,
    prompt_tokens: u64,
    completion_tokens: u64,
    last_event_id: u64,
}
