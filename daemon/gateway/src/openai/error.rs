//! OpenAI error objects.

use std::borrow::Cow;

use bytes::Bytes;
use pagedd_wire::gateway::{Closed, Parting, Rates, Refusal};
use serde::Serialize;

use super::detached::Detached;

/// An answer that is no success: the status, and the error object of its body.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ApiError {
    /// HTTP status.
    pub status: u16,
    /// What is wrong and what to do, in one line.
    pub message: String,
    /// OpenAI's class of error.
    pub kind: &'static str,
    /// The field of the body that it is about.
    pub param: Option<String>,
    /// For programs.
    pub code: Option<&'static str>,
    /// Seconds after which trying again makes sense.
    pub retry_after: Option<u32>,
    /// Methods that the path takes, for 405.
    pub allow: Option<&'static str>,
    /// What few answers say beside.
    pub beside: Option<Box<Beside>>,
}

/// What few answers say beside.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Beside {
    /// Where the answer will be, for a request that goes on.
    Detached(Detached),
    /// When it would be admitted, to the millisecond.
    Over(Over),
}

/// A quota is used up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Over {
    /// When the request would be admitted, in milliseconds.
    pub retry_after_ms: u64,
    /// How the tenant's quotas stand.
    pub rates: Rates,
}

/// The error object as it travels.
#[derive(Serialize)]
struct Wire<'a> {
    error: Object<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    detached: Option<&'a Detached>,
}

/// OpenAI's four keys of an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct Object<'a> {
    message: &'a str,
    r#type: &'a str,
    param: Option<&'a str>,
    code: Option<&'a str>,
}

const INVALID: &str = "invalid_request_error";
const SERVER: &str = "server_error";

impl ApiError {
    fn new(status: u16, kind: &'static str, code: &'static str, message: impl Into<String>) -> Self {
        let message = message.into();
        let (param, code) = (None, Some(code));
        Self { status, message, kind, param, code, retry_after: None, allow: None, beside: None }
    }

    /// 400 about one field.
    pub fn field(param: impl Into<String>, code: &'static str, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..Self::new(400, INVALID, code, message) }
    }

    /// 400: a field's value is out of range or of the wrong kind.
    pub fn value(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::field(param, "invalid_value", message)
    }

    /// 400 about the body as a whole.
    pub fn body(message: impl Into<String>) -> Self {
        Self::new(400, INVALID, "invalid_json", message)
    }

    /// 400: prompt and output are longer than the context.
    pub fn context_length(param: &'static str, prompt: u64, output: u64, limit: u32) -> Self {
        let message = format!(
            "the prompt has {prompt} tokens and {output} are to be generated, {} together; the model's context is {limit} \
             tokens: shorten the prompt or lower max_tokens",
            prompt.saturating_add(output)
        );
        Self::field(param, "context_length_exceeded", message)
    }

    /// 401.
    pub fn unauthorized(message: &'static str) -> Self {
        Self::new(401, INVALID, "invalid_api_key", message)
    }

    /// 404: there is nothing at this path.
    pub fn no_route() -> Self {
        Self::new(404, INVALID, "not_found", "there is nothing at this path; GET /v1/models lists the model")
    }

    /// 404: another model than the one served here.
    pub fn no_model(asked: &str, served: &str) -> Self {
        let asked: String = asked.chars().take(100).collect();
        let message = format!("the model {asked:?} does not exist on this port; it serves {served:?}");
        Self { param: Some("model".to_owned()), ..Self::new(404, INVALID, "model_not_found", message) }
    }

    /// 404: no such request, or not this key's.
    pub fn no_request() -> Self {
        let message = "there is no such request, it was made with another key, or its retention has ended";
        Self::new(404, INVALID, "request_not_found", message)
    }

    /// 405.
    pub fn method(allow: &'static str) -> Self {
        let message = format!("this path takes {allow} only");
        Self { allow: Some(allow), ..Self::new(405, INVALID, "method_not_allowed", message) }
    }

    /// 408: the body did not arrive.
    pub fn body_timeout() -> Self {
        Self::new(408, INVALID, "body_timeout", "the request's body did not arrive in time")
    }

    /// 413.
    pub fn too_large(limit: u64) -> Self {
        let message = format!("the body is larger than {limit} bytes, the most this server takes");
        Self::new(413, INVALID, "body_too_large", message)
    }

    /// 415.
    pub fn media_type() -> Self {
        let message = "the body must be JSON, sent with the header `Content-Type: application/json`";
        Self::new(415, INVALID, "unsupported_media_type", message)
    }

    /// 422: the key came with another request before.
    pub fn idempotency_conflict() -> Self {
        let message = "the header `Idempotency-Key` was sent with another body or to another path before: a key stands for one \
                       request; send a new key with a new request";
        Self {
            param: Some("Idempotency-Key".to_owned()),
            ..Self::new(422, INVALID, "idempotency_key_reused", message)
        }
    }

    /// 409: the first request with the key is neither accepted nor refused yet.
    pub fn idempotency_busy(retry_after: u32) -> Self {
        let message = format!(
            "the request that this `Idempotency-Key` came with first is neither accepted nor refused yet; send it again in {retry_after} s"
        );
        Self {
            param: Some("Idempotency-Key".to_owned()),
            retry_after: Some(retry_after),
            ..Self::new(409, INVALID, "idempotency_key_in_use", message)
        }
    }

    /// 500.
    pub fn internal(message: &'static str) -> Self {
        Self::new(500, SERVER, "internal_error", message)
    }

    /// 500: a choice could not be computed.
    pub fn generation_failed() -> Self {
        Self::new(
            500,
            SERVER,
            "generation_failed",
            "the answer could not be computed; other requests are not affected",
        )
    }

    /// 500: tokens of two models make no answer.
    pub fn model_changed() -> Self {
        let message = "the model's file or its arithmetic (dtype, kv_dtype) was changed before the answer was complete, and the rest of it \
                       would be another model's: send the request again";
        Self::new(500, SERVER, "model_changed", message)
    }

    /// 503: the model that was asked is not there after a restart, or no worker can be had for it any more.
    pub fn model_gone() -> Self {
        let message = "the model of this request is not served any more, and the answer cannot be completed: ask the operator of the \
                       server, then send the request again";
        Self::new(503, SERVER, "model_gone", message)
    }

    /// 503: a choice was cancelled by the operator, or since nobody read it.
    pub fn cancelled() -> Self {
        Self::new(503, SERVER, "cancelled", "the request was cancelled before it was complete")
    }

    /// 503 with a time to try again.
    pub fn unavailable(code: &'static str, message: impl Into<String>, retry_after: u32) -> Self {
        Self { retry_after: Some(retry_after), ..Self::new(503, SERVER, code, message) }
    }

    /// 503: a queue of this gateway is full.
    pub fn busy() -> Self {
        Self::unavailable("overloaded", "too many requests are in flight on this port; try again later", 1)
    }

    /// 503: the connection to the daemon does not stand yet, or no longer.
    pub fn starting() -> Self {
        Self::unavailable("starting", "the server is starting; try again shortly", 1)
    }

    /// 503: this process ends, and the request was not accepted.
    pub fn shutting_down(parting: Parting) -> Self {
        let message = match parting {
            Parting::Restarting => "the server is restarting; try again shortly".to_owned(),
            Parting::Moved { port } => format!("this tenant has moved to port {port}; try again there"),
            Parting::Restored => "the server goes back to a checkpoint; try again shortly".to_owned(),
            Parting::Removed => return Self::removed(),
        };
        Self::unavailable("shutting_down", message, 1)
    }

    /// 503: the tenant is gone, and with it whatever it had asked.
    pub fn removed() -> Self {
        let message = "the tenant of this port was removed, and its requests have ended with it";
        Self::new(503, SERVER, "tenant_removed", message)
    }

    /// 503: this process ends, and the request goes on.
    pub fn detached(detached: Detached) -> Self {
        let message = detached.message().to_owned();
        let beside = Some(Box::new(Beside::Detached(detached)));
        Self { beside, ..Self::unavailable("shutting_down", message, 1) }
    }

    /// 503: an accepted request waits for another start.
    pub fn held() -> Self {
        let message = "the request waits: as the server is set up now it has no room for a request of this size; it goes on once its operator \
                       has made room, or can be cancelled";
        Self::new(503, SERVER, "waits_for_room", message)
    }

    /// 429: a quota of the tenant's is used up.
    fn over_quota(quota: &str, message: String, over: Over) -> Self {
        let kind = if quota.contains("tokens") { "tokens" } else { "requests" };
        let retry_after = u32::try_from(over.retry_after_ms.div_ceil(1000)).unwrap_or(u32::MAX).max(1);
        Self {
            retry_after: Some(retry_after),
            beside: Some(Box::new(Beside::Over(over))),
            ..Self::new(429, kind, "rate_limit_exceeded", message)
        }
    }

    /// 503: the tenant takes no requests.
    pub fn closed(closed: &Closed) -> Self {
        match closed {
            Closed::Suspended => {
                Self::unavailable("suspended", "this tenant is suspended; ask the operator of the server", 60)
            }
            Closed::Draining => {
                let message =
                    "the server is being drained and takes no new requests; try again, or elsewhere";
                Self::unavailable("draining", message, 5)
            }
            Closed::Moved { port } => Self::shutting_down(Parting::Moved { port: *port }),
            Closed::Loading => Self::unavailable("loading", "the model is loading; try again shortly", 2),
            Closed::Failed => Self::unavailable(
                "model_failed",
                "the model could not be loaded; the operator's log says why",
                30,
            ),
            Closed::Misfit => Self::unavailable(
                "tenant_failed",
                "this tenant cannot be served as it is set up; the operator's log says why",
                30,
            ),
        }
    }

    /// The answer to a refusal of the daemon.
    pub fn refused(refusal: Refusal, prompt_param: &'static str) -> Self {
        match refusal {
            Refusal::ContextLength { prompt, max_tokens, limit } => {
                Self::context_length(prompt_param, prompt.into(), max_tokens.into(), limit)
            }
            Refusal::NeverFits { needed, allowed, block_size } => {
                let message = format!(
                    "the request needs {needed} KV blocks of {block_size} tokens at full length and this tenant may hold \
                     {allowed}: shorten the prompt or lower max_tokens"
                );
                Self::field(prompt_param, "never_fits", message)
            }
            Refusal::Invalid { param, message } => Self::value(param, message),
            Refusal::QueueFull { waiting, retry_after } => Self {
                retry_after: Some(retry_after.max(1)),
                ..Self::new(
                    429,
                    "rate_limit_error",
                    "queue_full",
                    match waiting {
                        0 => format!("too many requests come at once; try again in {} s", retry_after.max(1)),
                        waiting => format!(
                            "{waiting} requests of this tenant wait already; try again in {} s",
                            retry_after.max(1)
                        ),
                    },
                )
            },
            Refusal::OverQuota { quota, limit, used, asked, retry_after_ms, rates } => {
                let seconds = retry_after_ms.div_ceil(1000).max(1);
                let message = format!(
                    "the quota {quota} of this tenant is {limit}, {used} are taken and the request asks for {asked}; try again in {seconds} s"
                );
                Self::over_quota(&quota, message, Over { retry_after_ms, rates })
            }
            Refusal::BeyondQuota { quota, limit, asked } => {
                let message = format!(
                    "the request asks for {asked} and the quota {quota} of this tenant is {limit}, so that it can never be taken: shorten \
                     the prompt, or lower max_tokens or n"
                );
                Self::field(prompt_param, "exceeds_quota", message)
            }
            Refusal::Closed(closed) => Self::closed(&closed),
            Refusal::IdempotencyConflict => Self::idempotency_conflict(),
            Refusal::IdempotencyBusy { retry_after } => Self::idempotency_busy(retry_after.max(1)),
            Refusal::IdempotencyUnknown { retry_after } => {
                let message = "the server cannot read whether this `Idempotency-Key` came before, and takes no request without knowing; \
                               send it again with the same key";
                Self::unavailable("idempotency_key_unknown", message, retry_after.max(1))
            }
        }
    }

    /// The error object, as a body.
    #[must_use]
    pub fn to_json(&self) -> Bytes {
        let detached = match self.beside.as_deref() {
            Some(Beside::Detached(detached)) => Some(detached),
            Some(Beside::Over(_)) | None => None,
        };
        json(&Wire { error: self.object(), detached })
    }

    /// The error object, as a part of another.
    #[must_use]
    pub fn object(&self) -> Object<'_> {
        Object { message: &self.message, r#type: self.kind, param: self.param.as_deref(), code: self.code }
    }
}

/// As JSON. The types given to it have string keys and no maps that fail.
pub(crate) fn json<T: Serialize>(value: &T) -> Bytes {
    serde_json::to_vec(value).map_or_else(
        |_| Bytes::from_static(br#"{"error":{"message":"the answer cannot be written as JSON","type":"server_error","param":null,"code":"internal_error"}}"#),
        Bytes::from,
    )
}

/// At most 200 characters of a text that goes into a message.
pub(crate) fn shortened(text: &str) -> Cow<'_, str> {
    match text.char_indices().nth(200) {
        Some((end, _)) => Cow::Owned(format!("{}…", &text[..end])),
        None => Cow::Borrowed(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_object_has_the_four_keys_that_openai_names() {
        let error = ApiError::value("n", "n is 0");
        let expected = r#"{"error":{"message":"n is 0","type":"invalid_request_error","param":"n","code":"invalid_value"}}"#;
        assert_eq!(error.to_json(), expected);
    }

    #[test]
    fn refusals_of_the_daemon_have_the_status_that_tells_whether_to_try_again() {
        let status = |refusal| {
            let error = ApiError::refused(refusal, "messages");
            (error.status, error.retry_after, error.code)
        };
        assert_eq!(
            status(Refusal::NeverFits { needed: 9, allowed: 8, block_size: 16 }),
            (400, None, Some("never_fits"))
        );
        assert_eq!(
            status(Refusal::ContextLength { prompt: 9, max_tokens: 8, limit: 16 }),
            (400, None, Some("context_length_exceeded"))
        );
        assert_eq!(
            status(Refusal::QueueFull { waiting: 9, retry_after: 0 }),
            (429, Some(1), Some("queue_full"))
        );
        assert_eq!(status(Refusal::Closed(Closed::Loading)), (503, Some(2), Some("loading")));
        assert_eq!(
            status(Refusal::Invalid { param: "n".to_owned(), message: "no".to_owned() }),
            (400, None, Some("invalid_value"))
        );
        assert_eq!(status(Refusal::IdempotencyConflict), (422, None, Some("idempotency_key_reused")));
        let busy = Refusal::IdempotencyBusy { retry_after: 2 };
        assert_eq!(status(busy), (409, Some(2), Some("idempotency_key_in_use")));
    }
}
