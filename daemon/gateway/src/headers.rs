//! What a request's headers ask for, and the names of ours.
//!
//! **Owns** their syntax. **Never** guesses: a header that changes what is done has a value that is understood, or the request is
//! refused with the header's name.

use hyper::HeaderMap;
use hyper::header::{HeaderName, HeaderValue};
use pagedd_wire::gateway::Rates;
use sha2::{Digest as _, Sha256};

use crate::admit::Caller;
use crate::openai::ApiError;

/// A client's own id of a request, echoed.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Our id of a request.
pub const OUR_REQUEST_ID: HeaderName = HeaderName::from_static("pagedd-request-id");
/// [`Status`](crate::openai::answer::Status) of a request that is asked for.
pub const REQUEST_STATUS: HeaderName = HeaderName::from_static("pagedd-request-status");
/// `true`: the answer is that of an earlier request with the same `Idempotency-Key`.
pub const REPLAY: HeaderName = HeaderName::from_static("pagedd-idempotent-replay");
/// `Retry-After` in milliseconds, as OpenAI's clients read it.
pub const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");
/// A field that has no effect.
pub const WARNING: HeaderName = HeaderName::from_static("pagedd-warning");

const RESUMABLE: &str = "pagedd-resumable";
const LAST_EVENT_ID: &str = "Last-Event-ID";
const IDEMPOTENCY_KEY: &str = "Idempotency-Key";

/// Longest `Idempotency-Key`, in bytes: Stripe's.
const LONGEST_KEY: usize = 255;

/// Says how quotas by the minute stand, under the names that OpenAI's API has for it. A quota that is not set is not named.
pub fn rate_headers(headers: &mut HeaderMap, rates: Rates) {
    let names = [
        (
            rates.requests,
            "x-ratelimit-limit-requests",
            "x-ratelimit-remaining-requests",
            "x-ratelimit-reset-requests",
        ),
        (
            rates.tokens,
            "x-ratelimit-limit-tokens",
            "x-ratelimit-remaining-tokens",
            "x-ratelimit-reset-tokens",
        ),
    ];
    for (rate, limit, remaining, reset) in names {
        let Some(rate) = rate else { continue };
        headers.insert(HeaderName::from_static(limit), HeaderValue::from(rate.limit));
        headers.insert(HeaderName::from_static(remaining), HeaderValue::from(rate.remaining));
        if let Ok(value) = HeaderValue::from_str(&span(rate.reset_ms)) {
            headers.insert(HeaderName::from_static(reset), value);
        }
    }
}

/// A time as OpenAI writes it: `350ms`, `7.5s`, `1m0s`.
fn span(ms: u64) -> String {
    match ms {
        0..1_000 => format!("{ms}ms"),
        1_000..60_000 if ms.is_multiple_of(1_000) => format!("{}s", ms / 1_000),
        1_000..60_000 => format!("{}.{:03}s", ms / 1_000, ms % 1_000),
        // Whole seconds, and never too few.
        _ => format!("{}m{}s", ms.div_ceil(1_000) / 60, ms.div_ceil(1_000) % 60),
    }
}

/// A client's own id, to be echoed, where it is short and printable.
#[must_use]
pub fn own_id(headers: &HeaderMap) -> Option<HeaderValue> {
    let is_sane = |id: &&HeaderValue| {
        let bytes = id.as_bytes();
        (1..=128).contains(&bytes.len()) && bytes.iter().all(u8::is_ascii_graphic)
    };
    headers.get(REQUEST_ID).filter(is_sane).cloned()
}

/// Whether a `Content-Type` is one of JSON.
#[must_use]
pub fn is_json(kind: &HeaderValue) -> bool {
    let Ok(kind) = kind.to_str() else { return false };
    let kind = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    kind == "application/json" || (kind.starts_with("application/") && kind.ends_with("+json"))
}

/// The event that a client saw last; 0 where it names none.
///
/// # Errors
/// 400: it is no number.
pub fn last_event_id(headers: &HeaderMap) -> Result<u64, ApiError> {
    // Browsers send an empty one before the first event.
    let Some(id) = single(headers, LAST_EVENT_ID)?.filter(|id| !id.is_empty()) else { return Ok(0) };
    let id = std::str::from_utf8(id).ok().filter(|id| id.bytes().all(|b| b.is_ascii_digit()));
    id.and_then(|id| id.parse().ok()).ok_or_else(|| {
        ApiError::value(
            LAST_EVENT_ID,
            "the header `Last-Event-ID` must be an id of this request's stream, a number",
        )
    })
}

/// Whether a request runs on when its client leaves.
///
/// # Errors
/// 400: neither 1 nor 0.
pub fn resumable(headers: &HeaderMap) -> Result<bool, ApiError> {
    match single(headers, RESUMABLE)? {
        None | Some(b"0") => Ok(false),
        Some(b"1") => Ok(true),
        Some(_) => Err(ApiError::value(RESUMABLE, "the header `pagedd-resumable` must be 1 or 0")),
    }
}

/// SHA-256 of the caller's number and its `Idempotency-Key`, taken byte for byte. With the number in it, the holder of one API
/// key neither gets the answer nor learns of the existence of another's request.
///
/// # Errors
/// 400: it is not from 1 to 255 visible ASCII characters.
pub fn idempotency_key(headers: &HeaderMap, caller: Caller) -> Result<Option<[u8; 32]>, ApiError> {
    let Some(key) = single(headers, IDEMPOTENCY_KEY)? else { return Ok(None) };
    let wrong = if key.is_empty() {
        Some("is empty".to_owned())
    } else if key.len() > LONGEST_KEY {
        Some(format!("is too long: it has {} bytes", key.len()))
    } else {
        key.iter().position(|byte| !byte.is_ascii_graphic()).map(|at| match key[at] {
            b' ' | b'\t' => format!("has a blank at byte {at}"),
            _ => format!("has a byte that is no visible ASCII character, at {at}"),
        })
    };
    if let Some(wrong) = wrong {
        let message = format!(
            "the header `Idempotency-Key` {wrong}; it must be 1 to {LONGEST_KEY} visible ASCII characters, without blanks"
        );
        return Err(ApiError::value(IDEMPOTENCY_KEY, message));
    }
    let mut digest = Sha256::new();
    match caller.key {
        None => digest.update([0]),
        Some(number) => digest.update([[1].as_slice(), &number.to_le_bytes()].concat()),
    }
    Ok(Some(digest.chain_update(key).finalize().into()))
}

/// The one value of a header; `None` where it is not there.
fn single<'h>(headers: &'h HeaderMap, name: &'static str) -> Result<Option<&'h [u8]>, ApiError> {
    let mut values = headers.get_all(name).iter();
    let first = values.next();
    if values.next().is_some() {
        return Err(ApiError::value(name, format!("the header `{name}` is given more than once")));
    }
    Ok(first.map(HeaderValue::as_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: &'static str, values: &[&str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        headers
    }

    fn refusal<T: std::fmt::Debug>(result: Result<T, ApiError>) -> (u16, Option<String>) {
        let error = result.unwrap_err();
        (error.status, error.param)
    }

    #[test]
    fn content_types_of_json_are_told_from_others() {
        for (kind, json) in [
            ("application/json", true),
            ("Application/JSON; charset=utf-8", true),
            ("application/problem+json", true),
            ("text/plain", false),
            ("application/x-www-form-urlencoded", false),
        ] {
            assert_eq!(is_json(&HeaderValue::from_static(kind)), json, "{kind}");
        }
    }

    #[test]
    fn a_last_event_id_is_a_number_and_nothing_else() {
        assert_eq!(last_event_id(&HeaderMap::new()), Ok(0));
        for (value, id) in [("", 0), ("0", 0), ("18446744073709551615", u64::MAX)] {
            assert_eq!(last_event_id(&with("last-event-id", &[value])), Ok(id));
        }
        for wrong in
            [&["x"][..], &["-1"], &["+1"], &["1.0"], &["1 2"], &["18446744073709551616"], &["1", "1"]]
        {
            let refused = refusal(last_event_id(&with("last-event-id", wrong)));
            assert_eq!(refused, (400, Some(LAST_EVENT_ID.to_owned())), "{wrong:?}");
        }
    }

    #[test]
    fn resumable_is_1_or_0_and_not_whatever() {
        assert_eq!(resumable(&HeaderMap::new()), Ok(false));
        assert_eq!(resumable(&with(RESUMABLE, &["1"])), Ok(true));
        assert_eq!(resumable(&with(RESUMABLE, &["0"])), Ok(false));
        for wrong in [&["true"][..], &[""], &["1", "0"]] {
            let refused = refusal(resumable(&with(RESUMABLE, wrong)));
            assert_eq!(refused, (400, Some(RESUMABLE.to_owned())), "{wrong:?}");
        }
    }

    #[test]
    fn an_idempotency_key_is_that_of_its_caller() {
        let digest = |key: &str, number| {
            idempotency_key(&with("idempotency-key", &[key]), Caller { key: number }).unwrap().unwrap()
        };
        let callers = [None, Some(0), Some(1)];
        let digests: std::collections::BTreeSet<[u8; 32]> =
            callers.iter().flat_map(|number| [digest("a", *number), digest("b", *number)]).collect();
        assert_eq!(digests.len(), 6);
        assert_eq!(digest("a", Some(1)), digest("a", Some(1)));
        assert_eq!(idempotency_key(&HeaderMap::new(), Caller { key: None }), Ok(None));
    }

    #[test]
    fn what_is_wrong_with_an_idempotency_key_is_said_first() {
        let message = |key: &str| {
            let error = idempotency_key(&with("idempotency-key", &[key]), Caller { key: None }).unwrap_err();
            error.message
        };
        for (key, begins) in [
            ("", "the header `Idempotency-Key` is empty; "),
            ("a b", "the header `Idempotency-Key` has a blank at byte 1; "),
            ("clé", "the header `Idempotency-Key` has a byte that is no visible ASCII character, at 2; "),
        ] {
            assert!(message(key).starts_with(begins), "{key:?}: {}", message(key));
        }
        let long = message(&"k".repeat(300));
        assert!(long.starts_with("the header `Idempotency-Key` is too long: it has 300 bytes; "), "{long}");
    }

    #[test]
    fn times_are_written_as_openai_writes_them() {
        let written = [0, 350, 1_000, 7_500, 59_999, 60_000, 60_074, 119_001].map(span);
        assert_eq!(written, ["0ms", "350ms", "1s", "7.500s", "59.999s", "1m0s", "1m1s", "2m0s"]);
    }

    #[test]
    fn an_idempotency_key_that_is_none_is_refused_with_the_headers_name() {
        let anyone = Caller { key: None };
        let longest = "k".repeat(LONGEST_KEY);
        assert!(idempotency_key(&with("idempotency-key", &[&longest]), anyone).is_ok());
        let too_long = "k".repeat(LONGEST_KEY + 1);
        for wrong in [&[""][..], &["a b"], &["\t"], &["é"], &[too_long.as_str()], &["a", "a"]] {
            let refused = refusal(idempotency_key(&with("idempotency-key", wrong), anyone));
            assert_eq!(refused, (400, Some(IDEMPOTENCY_KEY.to_owned())), "{wrong:?}");
        }
    }
}
