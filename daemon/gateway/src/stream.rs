//! Delivery of one request's answer: as events, as a whole, as far as it has come, or again.
//!
//! **Owns** the pace of one client. **Never** sends an event before the one with the id before it.
//!
//! # How an answer is found again
//!
//! `GET /v1/requests/{id}/stream` gives the events after the one named by `Last-Event-ID`, those of all choices, whatever form was
//! asked for at first. It waits where the request runs, also for a client that is ahead (after a power cut), and refuses an id
//! beyond the end of a request that has ended.
//!
//! Where this process ends before the answer does, a stream's last event is `detached`, without an id and without `[DONE]` after it, and
//! an answer that was to come whole is 503 with the same key beside its error object:
//!
//! ```text
//! event: detached
//! data: {"id": "cmpl-…", "object": "text_completion", "created": 1700000001, "model": "tiny", "choices": [],
//!        "detached": {"id": "…", "last_event_id": 4, "path": "/v1/requests/…/stream", "message": "…"}}
//! ```
//!
//! The message says why: the server restarts or goes back to a checkpoint, or the tenant has another port, which it names. Where the tenant was
//! removed nothing goes on: the last event, or the answer, is the error `tenant_removed`.
//!
//! `GET /v1/requests/{id}` gives, once the answer is whole, byte for byte what its endpoint gives for a request without `stream`.
//! Until then, and where there will be no whole answer, it gives
//!
//! ```json
//! {"id": "chatcmpl-…", "object": "request", "status": "in_progress", "created": 1700000001, "model": "tiny",
//!  "choices": [{"index": 0, "message": {"role": "assistant", "content": "so f", "refusal": null},
//!               "logprobs": null, "finish_reason": null}],
//!  "prompt_tokens": 9, "completion_tokens": 4, "last_event_id": 4, "error": null}
//! ```
//!
//! - `status` is `queued` (no token yet), `in_progress`, `cancelled` or `failed`; the header `pagedd-request-status` says the same,
//!   and `completed` of a whole answer. The words are those of OpenAI's Responses API.
//! - `choices` are shaped as the endpoint shapes them (`text` instead of `message` for a completion), with the text so far.
//! - `last_event_id`: the stream after it has exactly what `choices` lack.
//! - `error` is an error object where the status is `cancelled` or `failed`, or where the model cannot be served and so the request
//!   does not go on; else `null`.
//!
//! `POST /v1/requests/{id}/cancel` gives the same after the request has ended, which a cancel makes happen within a step; it may be
//! repeated, and changes nothing of a request that has ended.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use pagedd_core::RequestId;
use pagedd_wire::gateway::{Closed, Entry, Parting};
use tokio::time::timeout;

use crate::admit::Caller;
use crate::app::App;
use crate::body::{Body, Made, Sink};
use crate::link::{Gone, Reader};
use crate::log::Attached;
use crate::metrics::Stopwatch;
use crate::openai::ApiError;
use crate::openai::answer::{
    Answer, DONE, Head, KEEP_ALIVE, Status, body_id, broken, push_event, push_parting,
};
use crate::openai::detached::Detached;
use crate::openai::request::Form;
use crate::render::{Broken, Context, Event, Renderer, Step};

/// A request whose answer is on its way.
#[derive(Debug)]
pub struct Delivery {
    app: Arc<App>,
    reader: Reader,
    head: Head,
    form: Form,
    resumable: bool,
    n: u32,
    /// It does not run, since there is no room for it.
    held: bool,
    renderer: Renderer,
    /// `None` where the answer is read again.
    watch: Option<Stopwatch>,
}

/// How far a request has come.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Progress {
    /// In a word.
    pub status: Status,
    /// The body of the answer to who asks.
    pub body: Bytes,
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
        let attached =
            reader.attached().await.map_err(|gone| broken_off(gone, reader.request(), app.link.parting()))?;
        let mut delivery = Self::new(app, reader, context, &attached);
        delivery.watch = Some(Stopwatch::new(start, attached.n));
        Ok(delivery)
    }

    /// Of a request made earlier, by this caller and in this process or in another.
    ///
    /// # Errors
    /// 404 where it is not this caller's.
    pub async fn again(app: &Arc<App>, request: RequestId, caller: Caller) -> Result<Self, ApiError> {
        Self::found(app, app.link.open(request), caller).await
    }

    /// Of a request made earlier that this caller made again, and waits for as for the first.
    ///
    /// # Errors
    /// 404 where it is not this caller's, or not there any more.
    pub async fn repeated(app: &Arc<App>, reader: Reader, caller: Caller) -> Result<Self, ApiError> {
        let mut delivery = Self::found(app, reader, caller).await?;
        delivery.reader.own(delivery.resumable);
        Ok(delivery)
    }

    async fn found(app: &Arc<App>, mut reader: Reader, caller: Caller) -> Result<Self, ApiError> {
        let attached =
            reader.attached().await.map_err(|gone| broken_off(gone, reader.request(), app.link.parting()))?;
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
            form: context.form,
            resumable: context.resumable,
            n: attached.n,
            held: attached.held,
            renderer,
            watch: None,
        }
    }

    /// The form that was asked for at first.
    #[must_use]
    pub fn form(&self) -> Form {
        self.form
    }

    /// The whole answer, once it is there.
    ///
    /// # Errors
    /// It was cancelled, failed, or the process ends before.
    pub async fn whole(mut self) -> Result<Bytes, ApiError> {
        let mut answer = Answer::new(self.n, self.renderer.usage());
        loop {
            let steps = self.advance(u64::MAX).await.map_err(|gone| self.broken_off(gone))?;
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
                Err(Gone::NotFound) if self.reader.is_at_end() => {
                    let last = self.renderer.consumed();
                    let message = format!(
                        "the header `Last-Event-ID` is {after}, and the stream of this request ended with {last}"
                    );
                    return Err(ApiError::value("Last-Event-ID", message));
                }
                Err(gone) => {
                    return Err(stream_broken_off(
                        gone,
                        self.reader.request(),
                        after,
                        self.app.link.parting(),
                    ));
                }
            }
        }
        Ok(self.stream())
    }

    /// Ends the request, and tells how far it came; where it does not end within `wait`, how far it has come.
    ///
    /// # Errors
    /// The process ends before.
    pub async fn cancelled(mut self, wait: Duration) -> Result<Progress, ApiError> {
        self.reader.cancel();
        match timeout(wait, self.reader.ended()).await {
            Ok(Err(gone)) => Err(self.broken_off(gone)),
            Ok(Ok(())) | Err(_) => self.so_far().await,
        }
    }

    /// The whole answer if it is there, else how far it has come.
    ///
    /// # Errors
    /// The process ends before.
    pub async fn so_far(mut self) -> Result<Progress, ApiError> {
        let mut answer = Answer::new(self.n, self.renderer.usage());
        let (mut ended, mut why) = (false, None);
        let known = self.reader.known();
        while self.renderer.consumed() < known {
            let left = known - self.renderer.consumed();
            let steps = self.advance(left).await.map_err(|gone| self.broken_off(gone))?;
            for event in steps.into_iter().filter_map(|step| step.event) {
                match event {
                    Event::Broken { why: first, .. } => why = why.or(Some(first)),
                    Event::Delta { .. } | Event::End(_) => ended |= answer.add(event)?,
                }
            }
        }
        answer.usage = self.renderer.usage();
        let consumed = self.renderer.consumed();
        let status = match (ended, why) {
            (true, None) => Status::Completed,
            (true, Some(Broken::Cancelled)) => Status::Cancelled,
            (true, Some(Broken::Failed | Broken::ModelChanged | Broken::ModelGone)) => Status::Failed,
            (false, _) if consumed == 0 => Status::Queued,
            (false, _) => Status::InProgress,
        };
        let error = if ended { why.map(broken) } else { self.stuck() };
        let body = match status {
            Status::Completed => self.head.answer(&answer),
            Status::Queued | Status::InProgress | Status::Cancelled | Status::Failed => {
                self.head.state(&answer, status, consumed, error.as_ref())
            }
        };
        Ok(Progress { status, body })
    }

    fn broken_off(&self, gone: Gone) -> ApiError {
        broken_off(gone, self.reader.request(), self.app.link.parting())
    }

    /// Why it does not go on for now, where that is known.
    fn stuck(&self) -> Option<ApiError> {
        if self.held {
            return Some(ApiError::held());
        }
        let closed = self.app.link.welcome()?.closed.clone()?;
        matches!(closed, Closed::Failed | Closed::Misfit).then(|| ApiError::closed(&closed))
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
                Ok(Err(Gone::Ending)) => {
                    match Detached::stream(self.reader.request(), last, self.app.link.parting()) {
                        Some(detached) => push_parting(&mut part, &self.head.parting(&detached)),
                        None => push_event(&mut part, None, &ApiError::removed().to_json()),
                    }
                    done = true;
                }
                Ok(Err(Gone::NotFound)) => {
                    push_event(&mut part, None, &ApiError::no_request().to_json());
                    done = true;
                }
            }
            let sent = part.is_empty() || sink.send(part.into()).await.is_ok();
            // Room for all again: the connection has taken the last of it.
            if !sent || (done && sink.reserve_many(sink.max_capacity()).await.is_err()) {
                self.reader.broke_off();
                return;
            }
            if done {
                return;
            }
        }
    }
}

/// Why there is no answer to wait for.
fn broken_off(gone: Gone, request: RequestId, parting: Parting) -> ApiError {
    match gone {
        Gone::NotFound => ApiError::no_request(),
        Gone::Ending => Detached::whole(request, parting).map_or_else(ApiError::removed, ApiError::detached),
    }
}

/// Why the events after `last` do not come here.
fn stream_broken_off(gone: Gone, request: RequestId, last: u64, parting: Parting) -> ApiError {
    match gone {
        Gone::NotFound => ApiError::no_request(),
        Gone::Ending => {
            Detached::stream(request, last, parting).map_or_else(ApiError::removed, ApiError::detached)
        }
    }
}
