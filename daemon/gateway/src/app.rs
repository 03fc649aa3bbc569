//! The routes of a tenant's port.
//!
//! **Owns** what each path answers. **Never** computes on the thread that serves connections: parsing, templates and
//! tokenisation run on another, so that health stays reachable.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::header::{
    ALLOW, CACHE_CONTROL, CONNECTION, CONTENT_TYPE, EXPECT, HeaderName, HeaderValue, LOCATION, RETRY_AFTER,
    WWW_AUTHENTICATE,
};
use hyper::{HeaderMap, Method, Request, Response, StatusCode};
use pagedd_core::RequestId;
use pagedd_wire::gateway::{Answer, Closed, Query, Welcome};
use serde::Serialize;
use tokio::time::timeout;

use crate::admit::{Bodies, BodyRoom, Caller, authorize};
use crate::body::{Body, caught, collect, drain};
use crate::headers::{
    OUR_REQUEST_ID, REPLAY, REQUEST_ID, REQUEST_STATUS, RETRY_AFTER_MS, WARNING, idempotency_key, is_json,
    last_event_id, own_id, rate_headers, resumable,
};
use crate::link::{Link, Phase, Taken};
use crate::metrics::{Metrics, joined};
use crate::openai::ApiError;
use crate::openai::error::{Beside, json};
use crate::openai::request::{Form, Kind};
use crate::point::point;
use crate::prepare::{Preparation, Prepared};
use crate::stream::{Delivery, Progress};
use crate::text::Text;

/// Times and counts that tests shorten.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Settings {
    /// From a body's start to its end.
    pub body_timeout: Duration,
    /// Between two signs of life on a stream.
    pub keep_alive: Duration,
    /// For an answer of the daemon to a question about health.
    pub health_timeout: Duration,
    /// For the end of a request that its client cancels.
    pub cancel_wait: Duration,
    /// From the end of service to the end of the process.
    pub ending: Duration,
    /// Connections beyond the tenant's most that are still told so, and may still ask for health.
    pub spare_connections: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            body_timeout: Duration::from_mins(2),
            keep_alive: Duration::from_secs(10),
            health_timeout: Duration::from_secs(1),
            cancel_wait: Duration::from_secs(2),
            ending: Duration::from_millis(1200),
            spare_connections: 32,
        }
    }
}

/// Everything a request needs.
#[derive(Debug)]
pub struct App {
    /// The way to the daemon.
    pub link: Arc<Link>,
    /// Tokenizer and chat template.
    pub text: Arc<Text>,
    /// This gateway's series.
    pub metrics: Arc<Metrics>,
    /// Memory of bodies.
    pub bodies: Arc<Bodies>,
    /// Times and counts.
    pub settings: Settings,
}

/// Whether a connection is one of those the tenant may have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Standing {
    /// It is.
    Within,
    /// It is one too many: it is told so.
    Beyond,
}

/// A path that exists.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Route {
    Live,
    Ready,
    Decode,
    Metrics,
    Models,
    Model(String),
    Generate(Kind),
    Request(RequestId),
    Stream(RequestId),
    Cancel(RequestId),
}

/// What is known of a request before its body is read.
struct Admitted {
    welcome: Arc<Welcome>,
    caller: Caller,
    resumable: bool,
    idempotency_key: Option<[u8; 32]>,
    room: BodyRoom,
}

impl Route {
    fn of(path: &str) -> Result<Self, ApiError> {
        let id = |text: &str| {
            let text = text.strip_prefix("chatcmpl-").or_else(|| text.strip_prefix("cmpl-")).unwrap_or(text);
            text.parse().map_err(|_| ApiError::no_request())
        };
        let segments: Vec<&str> = path.trim_start_matches('/').split('/').collect();
        Ok(match segments.as_slice() {
            ["livez"] => Self::Live,
            ["readyz" | "health"] => Self::Ready,
            ["health", "decode"] => Self::Decode,
            ["metrics"] => Self::Metrics,
            ["v1", "models"] => Self::Models,
            // A model's name may contain slashes.
            ["v1", "models", model @ ..] => Self::Model(model.join("/")),
            ["v1", "completions"] => Self::Generate(Kind::Completion),
            ["v1", "chat", "completions"] => Self::Generate(Kind::Chat),
            ["v1", "requests", request] => Self::Request(id(request)?),
            ["v1", "requests", request, "stream"] => Self::Stream(id(request)?),
            ["v1", "requests", request, "cancel"] => Self::Cancel(id(request)?),
            _ => return Err(ApiError::no_route()),
        })
    }

    fn label(&self) -> &'static str {
        match self {
            Self::Live | Self::Ready | Self::Decode => "health",
            Self::Metrics => "metrics",
            Self::Models | Self::Model(_) => "models",
            Self::Generate(Kind::Chat) => "chat_completions",
            Self::Generate(Kind::Completion) => "completions",
            Self::Request(_) | Self::Stream(_) | Self::Cancel(_) => "requests",
        }
    }

    fn is_health(&self) -> bool {
        matches!(self, Self::Live | Self::Ready | Self::Decode)
    }
}

impl App {
    /// Answers a request. Whatever happens, there is an answer.
    pub async fn handle(self: Arc<Self>, request: Request<Incoming>, standing: Standing) -> Response<Body> {
        let start = Instant::now();
        #[cfg(feature = "failpoints")]
        if request.uri().path() == crate::attacks::PATH {
            return crate::attacks::answer(request).await;
        }
        let echo = own_id(request.headers());
        let route = Route::of(request.uri().path());
        let label = route.as_ref().map_or("other", Route::label);
        let answer = match route {
            Ok(route) => match caught(self.answer(route, request, standing, start)).await {
                Ok(answer) => answer,
                Err(panicked) => Err(panicked),
            },
            Err(error) => Err(error),
        };
        let mut response = answer.unwrap_or_else(|error| refuse(&error));
        if let Some(id) = echo {
            response.headers_mut().insert(REQUEST_ID, id);
        }
        if standing == Standing::Beyond || self.link.phase() == Phase::Ending {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        self.metrics.answered(label, response.status().as_u16());
        response
    }

    async fn answer(
        self: &Arc<Self>,
        route: Route,
        request: Request<Incoming>,
        standing: Standing,
        start: Instant,
    ) -> Result<Response<Body>, ApiError> {
        if standing == Standing::Beyond && !route.is_health() {
            return Err(ApiError::unavailable(
                "too_many_connections",
                "too many connections are open on this port",
                1,
            ));
        }
        let (allowed, is_allowed) = match route {
            Route::Generate(_) | Route::Cancel(_) => ("POST", request.method() == Method::POST),
            _ => ("GET", [Method::GET, Method::HEAD].contains(request.method())),
        };
        if !is_allowed {
            return Err(ApiError::method(allowed));
        }
        match route {
            Route::Live => Ok(text("ok\n")),
            Route::Ready => self.ready().await,
            Route::Decode => self.decode().await,
            Route::Metrics => {
                self.admit(request.headers())?;
                self.series().await
            }
            Route::Models => {
                let (welcome, _) = self.admit(request.headers())?;
                let data = [WireModel::of(&welcome)];
                Ok(json_answer(StatusCode::OK, json(&List { object: "list", data: &data })))
            }
            Route::Model(asked) => {
                let (welcome, _) = self.admit(request.headers())?;
                if asked != welcome.model {
                    return Err(ApiError::no_model(&asked, &welcome.model));
                }
                Ok(json_answer(StatusCode::OK, json(&WireModel::of(&welcome))))
            }
            Route::Generate(kind) => self.generate(kind, request, start).await,
            Route::Request(id) => {
                let (_, caller) = self.admit(request.headers())?;
                let delivery = Delivery::again(self, id, caller).await?;
                Ok(with_id(progress(delivery.so_far().await?), id))
            }
            Route::Cancel(id) => {
                let (_, caller) = self.admit(request.headers())?;
                let delivery = Delivery::again(self, id, caller).await?;
                Ok(with_id(progress(delivery.cancelled(self.settings.cancel_wait).await?), id))
            }
            Route::Stream(id) => {
                let (_, caller) = self.admit(request.headers())?;
                let after = last_event_id(request.headers())?;
                let delivery = Delivery::again(self, id, caller).await?;
                let body = delivery.stream_after(after).await?;
                Ok(with_id(event_stream(body), id))
            }
        }
    }

    /// The daemon's word on this tenant, and who asks.
    fn admit(&self, headers: &HeaderMap) -> Result<(Arc<Welcome>, Caller), ApiError> {
        let welcome = self.link.welcome().ok_or_else(ApiError::starting)?;
        let caller = authorize(&welcome, headers)?;
        Ok((welcome, caller))
    }

    async fn generate(
        self: &Arc<Self>,
        kind: Kind,
        request: Request<Incoming>,
        start: Instant,
    ) -> Result<Response<Body>, ApiError> {
        let (head, body) = request.into_parts();
        let Admitted { welcome, caller, resumable, idempotency_key, room } =
            match self.may_generate(&head.headers, &body) {
                Ok(admitted) => admitted,
                Err(error) => {
                    // Who waits for "100 Continue" has sent nothing yet, and asking for the rest would make it send.
                    if !head.headers.contains_key(EXPECT) {
                        drain(body).await;
                    }
                    return Err(error);
                }
            };
        let bytes = collect(body, welcome.max_body, self.settings.body_timeout).await?;
        let ticket = self.link.ticket();
        let text = Arc::clone(&self.text);
        let prepared = off_thread(move || {
            let _room = room;
            let preparation = Preparation {
                kind,
                body: &bytes,
                welcome: &welcome,
                text: &text,
                caller,
                resumable,
                idempotency_key,
                ticket,
            };
            preparation.run()
        });
        let Prepared { frame, context, warnings } = prepared.await?;
        let answer = self.link.submit(ticket, frame).map_err(|_| ApiError::busy())?;
        let mut phases = self.link.phases();
        let answered = tokio::select! {
            // An answer that has come counts: the client must learn the id of what was accepted.
            biased;
            answered = answer => answered.map_err(|_| ApiError::shutting_down(self.link.parting()))?,
            _ = phases.wait_for(|phase| *phase == Phase::Ending) => {
                return Err(ApiError::shutting_down(self.link.parting()));
            }
        };
        let Taken { mut reader, repeated, rates } =
            answered.map_err(|refusal| ApiError::refused(refusal, kind.prompt_field()))?;
        let id = reader.request();
        let delivery = if repeated {
            Delivery::repeated(self, reader, caller).await
        } else {
            reader.own(context.resumable);
            Delivery::first(self, reader, &context, start).await
        };
        let answered = match delivery {
            Ok(delivery) => answer_of(delivery, id).await,
            Err(error) => Err(error),
        };
        let mut response = with_id(answered.unwrap_or_else(|error| refuse(&error)), id);
        if repeated {
            response.headers_mut().insert(REPLAY, HeaderValue::from_static("true"));
        }
        rate_headers(response.headers_mut(), rates);
        for warning in warnings {
            if let Ok(warning) = HeaderValue::from_str(&warning) {
                response.headers_mut().append(WARNING, warning);
            }
        }
        Ok(response)
    }

    /// What can be said before the body is read.
    fn may_generate(&self, headers: &HeaderMap, body: &Incoming) -> Result<Admitted, ApiError> {
        let (welcome, caller) = self.admit(headers)?;
        if self.link.phase() == Phase::Ending {
            return Err(ApiError::shutting_down(self.link.parting()));
        }
        let idempotency_key = idempotency_key(headers, caller)?;
        // What was made before is found again also by who asks for it once more: the daemon knows.
        let may_be_known = welcome.closed == Some(Closed::Draining) && idempotency_key.is_some();
        if let Some(closed) = welcome.closed.as_ref().filter(|_| !may_be_known) {
            return Err(ApiError::closed(closed));
        }
        if headers.get(CONTENT_TYPE).is_some_and(|kind| !is_json(kind)) {
            return Err(ApiError::media_type());
        }
        let resumable = resumable(headers)?;
        let size = hyper::body::Body::size_hint(body);
        if size.lower() > welcome.max_body {
            return Err(ApiError::too_large(welcome.max_body));
        }
        let room = self.bodies.room(size.exact().unwrap_or(welcome.max_body), welcome.max_body)?;
        Ok(Admitted { welcome, caller, resumable, idempotency_key, room })
    }

    async fn health(&self) -> Result<Health, ApiError> {
        match self.ask(Query::Health).await? {
            Answer::Health { ready, reason, last_step_ms, running, waiting } => {
                Ok(Health { ready, reason, last_step_ms, running, waiting })
            }
            Answer::Metrics(_) => Err(ApiError::internal("the daemon answered another question")),
        }
    }

    async fn ready(&self) -> Result<Response<Body>, ApiError> {
        let Health { ready, reason, .. } = self.health().await?;
        // What the daemon told of the tenant counts at once.
        let open = self.link.welcome().is_some_and(|welcome| welcome.closed.is_none());
        let ready = ready && open && self.link.phase() == Phase::Serving;
        let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        Ok(json_answer(status, json(&Ready { ready, reason })))
    }

    async fn decode(&self) -> Result<Response<Body>, ApiError> {
        let health = self.health().await?;
        let status = if health.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        Ok(json_answer(status, json(&health)))
    }

    async fn series(&self) -> Result<Response<Body>, ApiError> {
        match self.ask(Query::Metrics).await? {
            Answer::Metrics(daemon) => {
                let mut response = text(joined(&daemon, &self.metrics.text()));
                let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
                response.headers_mut().insert(CONTENT_TYPE, kind);
                Ok(response)
            }
            Answer::Health { .. } => Err(ApiError::internal("the daemon answered another question")),
        }
    }

    async fn ask(&self, query: Query) -> Result<Answer, ApiError> {
        let silent = || ApiError::unavailable("no_answer", "the daemon does not answer", 1);
        let answer = self.link.query(query).map_err(|_| ApiError::busy())?;
        match timeout(self.settings.health_timeout, answer).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(_)) | Err(_) => Err(silent()),
        }
    }
}

/// What the client of a request that was taken gets, in the form that it asked for.
async fn answer_of(delivery: Delivery, id: RequestId) -> Result<Response<Body>, ApiError> {
    match delivery.form() {
        Form::Stream { .. } => Ok(event_stream(delivery.stream())),
        Form::Whole => Ok(json_answer(StatusCode::OK, delivery.whole().await?)),
        Form::Background => {
            point("gateway-background");
            let so_far = delivery.so_far().await?;
            let ended = so_far.status.is_final();
            let mut response = progress(so_far);
            if !ended {
                *response.status_mut() = StatusCode::ACCEPTED;
            }
            if let Ok(location) = HeaderValue::from_str(&format!("/v1/requests/{id}")) {
                response.headers_mut().insert(LOCATION, location);
            }
            Ok(response)
        }
    }
}

/// Runs on another thread; what is still queued there is not run once nobody waits for it.
async fn off_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    struct Abort<T>(tokio::task::JoinHandle<T>);
    impl<T> Drop for Abort<T> {
        fn drop(&mut self) {
            self.0.abort();
        }
    }
    let mut task = Abort(tokio::task::spawn_blocking(work));
    match (&mut task.0).await {
        Ok(result) => result,
        Err(_) => Err(ApiError::internal("the request met a fault of the server")),
    }
}

#[derive(Serialize)]
struct Health {
    ready: bool,
    reason: Option<String>,
    last_step_ms: Option<u64>,
    running: u32,
    waiting: u32,
}

#[derive(Serialize)]
struct Ready {
    ready: bool,
    reason: Option<String>,
}

#[derive(Serialize)]
struct List<'a, T> {
    object: &'static str,
    data: &'a [T],
}

#[derive(Serialize)]
struct WireModel<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    max_model_len: u32,
}

impl<'a> WireModel<'a> {
    fn of(welcome: &'a Welcome) -> Self {
        Self {
            id: &welcome.model,
            object: "model",
            created: welcome.since,
            owned_by: "pagedd",
            max_model_len: welcome.max_model_len,
        }
    }
}

fn response(status: StatusCode, kind: &'static str, body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

fn text(body: impl Into<Bytes>) -> Response<Body> {
    response(StatusCode::OK, "text/plain; charset=utf-8", Body::whole(body))
}

fn json_answer(status: StatusCode, body: Bytes) -> Response<Body> {
    response(status, "application/json", Body::whole(body))
}

/// How far a request has come. It may come further: nobody is to keep it.
fn progress(Progress { status, body }: Progress) -> Response<Body> {
    let mut response = json_answer(StatusCode::OK, body);
    response.headers_mut().insert(REQUEST_STATUS, HeaderValue::from_static(status.as_str()));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

fn event_stream(body: Body) -> Response<Body> {
    let mut response = response(StatusCode::OK, "text/event-stream; charset=utf-8", body);
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies that collect answers would hold tokens back.
    response
        .headers_mut()
        .insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response
}

fn with_id(mut response: Response<Body>, id: RequestId) -> Response<Body> {
    if let Ok(id) = HeaderValue::from_str(&id.to_string()) {
        response.headers_mut().insert(OUR_REQUEST_ID, id);
    }
    response
}

/// The answer that says why there is none.
fn refuse(error: &ApiError) -> Response<Body> {
    let status = StatusCode::from_u16(error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = json_answer(status, error.to_json());
    let headers = response.headers_mut();
    if let Some(seconds) = error.retry_after {
        headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    if let Some(Beside::Over(over)) = error.beside.as_deref() {
        headers.insert(RETRY_AFTER_MS, HeaderValue::from(over.retry_after_ms));
        rate_headers(headers, over.rates);
    }
    if let Some(allow) = error.allow {
        headers.insert(ALLOW, HeaderValue::from_static(allow));
    }
    if status == StatusCode::UNAUTHORIZED {
        headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_find_their_routes() {
        let id = RequestId([0x12; 16]);
        for (path, route) in [
            ("/livez", Route::Live),
            ("/health", Route::Ready),
            ("/health/decode", Route::Decode),
            ("/v1/models/org/name", Route::Model("org/name".to_owned())),
            ("/v1/chat/completions", Route::Generate(Kind::Chat)),
            ("/v1/requests/12121212121212121212121212121212", Route::Request(id)),
            ("/v1/requests/chatcmpl-12121212121212121212121212121212/stream", Route::Stream(id)),
            ("/v1/requests/cmpl-12121212121212121212121212121212/cancel", Route::Cancel(id)),
        ] {
            assert_eq!(Route::of(path), Ok(route), "{path}");
        }
        for path in ["/", "/v1", "/v1/completions/", "/v1/requests/12", "/livez/x"] {
            assert_eq!(Route::of(path).unwrap_err().status, 404, "{path}");
        }
    }
}
