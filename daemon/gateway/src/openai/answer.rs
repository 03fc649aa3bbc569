//! Answers and events, as OpenAI shapes them.
//!
//! **Owns** the JSON. **Never** decides what is in it.

use std::fmt::Write as _;

use bytes::Bytes;
use pagedd_core::RequestId;
use serde::Serialize;

use super::detached::Detached;
use super::error::{self, ApiError, json};
use super::request::Kind;
use crate::render::{Broken, Event, Reason, Usage};

/// What every answer and event of a request repeats.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Head {
    /// `chatcmpl-…` or `cmpl-…`
    pub id: String,
    /// Which endpoint.
    pub kind: Kind,
    /// Unix seconds of its admission.
    pub created: u64,
    /// The model.
    pub model: String,
    /// Events carry a `usage`, which is `null` until the last.
    pub include_usage: bool,
}

/// The id of a request in bodies.
#[must_use]
pub fn body_id(kind: Kind, request: RequestId) -> String {
    match kind {
        Kind::Chat => format!("chatcmpl-{request}"),
        Kind::Completion => format!("cmpl-{request}"),
    }
}

#[derive(Serialize)]
struct WireUsage {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
    prompt_tokens_details: PromptDetails,
}

#[derive(Serialize)]
struct PromptDetails {
    cached_tokens: u64,
}

/// The value of the key `usage`.
#[derive(Serialize)]
#[serde(untagged)]
enum UsageField {
    /// `null`
    Pending,
    Total(WireUsage),
}

impl From<Usage> for WireUsage {
    fn from(usage: Usage) -> Self {
        Self {
            prompt_tokens: usage.prompt,
            completion_tokens: usage.completion,
            total_tokens: usage.prompt + usage.completion,
            prompt_tokens_details: PromptDetails { cached_tokens: usage.cached },
        }
    }
}

#[derive(Serialize)]
struct Envelope<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [C],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<UsageField>,
}

/// The last event of a stream that goes on elsewhere: a chunk without choices, for clients that know nothing of it.
#[derive(Serialize)]
struct Parting<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: [(); 0],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<UsageField>,
    detached: &'a Detached,
}

#[derive(Serialize)]
struct ChunkChoice<'a> {
    index: u32,
    delta: Delta<'a>,
    logprobs: Option<()>,
    finish_reason: Option<&'static str>,
}

#[derive(Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

#[derive(Serialize)]
struct TextChoice<'a> {
    index: u32,
    text: &'a str,
    logprobs: Option<()>,
    finish_reason: Option<&'static str>,
}

#[derive(Serialize)]
struct MessageChoice<'a> {
    index: u32,
    message: Message<'a>,
    logprobs: Option<()>,
    finish_reason: Option<&'static str>,
}

/// A choice of a whole answer.
#[derive(Serialize)]
#[serde(untagged)]
enum WholeChoice<'a> {
    Message(MessageChoice<'a>),
    Text(TextChoice<'a>),
}

/// A request that has no whole answer.
#[derive(Serialize)]
struct State<'a> {
    id: &'a str,
    object: &'static str,
    status: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [WholeChoice<'a>],
    prompt_tokens: u64,
    completion_tokens: u64,
    last_event_id: u64,
    error: Option<error::Object<'a>>,
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    content: &'a str,
    refusal: Option<()>,
}

impl Head {
    fn envelope<C: Serialize>(
        &self,
        object: &'static str,
        choices: &[C],
        usage: Option<UsageField>,
    ) -> Bytes {
        json(&Envelope { id: &self.id, object, created: self.created, model: &self.model, choices, usage })
    }

    fn chunk_object(&self) -> &'static str {
        match self.kind {
            Kind::Chat => "chat.completion.chunk",
            Kind::Completion => "text_completion",
        }
    }

    /// The data of an event; `None` where the stream says nothing for it.
    #[must_use]
    pub fn event(&self, event: &Event) -> Option<Bytes> {
        let usage = self.include_usage.then_some(UsageField::Pending);
        match event {
            Event::Delta { choice, first, text, finish } => {
                let finish_reason = finish.map(Reason::as_str);
                Some(match self.kind {
                    Kind::Chat => {
                        let delta = Delta {
                            role: first.then_some("assistant"),
                            content: (*first || !text.is_empty()).then_some(text),
                        };
                        let choice = ChunkChoice { index: *choice, delta, logprobs: None, finish_reason };
                        self.envelope(self.chunk_object(), &[choice], usage)
                    }
                    Kind::Completion => {
                        let choice = TextChoice { index: *choice, text, logprobs: None, finish_reason };
                        self.envelope(self.chunk_object(), &[choice], usage)
                    }
                })
            }
            Event::Broken { why, .. } => Some(broken(*why).to_json()),
            Event::End(total) => {
                let none: &[TextChoice<'_>] = &[];
                self.include_usage.then(|| {
                    self.envelope(self.chunk_object(), none, Some(UsageField::Total((*total).into())))
                })
            }
        }
    }

    /// The data of the event that says where the stream goes on.
    #[must_use]
    pub fn parting(&self, detached: &Detached) -> Bytes {
        json(&Parting {
            id: &self.id,
            object: self.chunk_object(),
            created: self.created,
            model: &self.model,
            choices: [],
            usage: self.include_usage.then_some(UsageField::Pending),
            detached,
        })
    }

    /// A whole answer.
    #[must_use]
    pub fn answer(&self, answer: &Answer) -> Bytes {
        let usage = Some(UsageField::Total(answer.usage.into()));
        let object = match self.kind {
            Kind::Chat => "chat.completion",
            Kind::Completion => "text_completion",
        };
        self.envelope(object, &self.choices(answer), usage)
    }

    /// What there is of an answer that is not, or will never be, whole: `error` says why. `last_event_id` is that of the stream's
    /// last event in it.
    #[must_use]
    pub fn state(
        &self,
        answer: &Answer,
        status: Status,
        last_event_id: u64,
        error: Option<&ApiError>,
    ) -> Bytes {
        json(&State {
            id: &self.id,
            object: "request",
            status: status.as_str(),
            created: self.created,
            model: &self.model,
            choices: &self.choices(answer),
            prompt_tokens: answer.usage.prompt,
            completion_tokens: answer.usage.completion,
            last_event_id,
            error: error.map(ApiError::object),
        })
    }

    fn choices<'a>(&self, answer: &'a Answer) -> Vec<WholeChoice<'a>> {
        (0..)
            .zip(&answer.choices)
            .map(|(index, Choice { text, finish })| {
                let finish_reason = finish.map(Reason::as_str);
                match self.kind {
                    Kind::Chat => WholeChoice::Message(MessageChoice {
                        index,
                        message: Message { role: "assistant", content: text, refusal: None },
                        logprobs: None,
                        finish_reason,
                    }),
                    Kind::Completion => {
                        WholeChoice::Text(TextChoice { index, text, logprobs: None, finish_reason })
                    }
                }
            })
            .collect()
    }
}

/// What has become of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Status {
    /// It has no token yet.
    Queued,
    /// It has some, and more may come.
    InProgress,
    /// Its answer is whole.
    Completed,
    /// It ended before, by a cancel.
    Cancelled,
    /// It ended before, since a choice could not be computed.
    Failed,
}

impl Status {
    /// As in `status` and in the header `pagedd-request-status`; the words are those of OpenAI's Responses API.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::InProgress => "in_progress",
            Self::Completed => "completed",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
        }
    }

    /// Nothing will change any more.
    #[must_use]
    pub const fn is_final(self) -> bool {
        match self {
            Self::Queued | Self::InProgress => false,
            Self::Completed | Self::Cancelled | Self::Failed => true,
        }
    }
}

/// Why a choice has no result.
#[must_use]
pub fn broken(why: Broken) -> ApiError {
    match why {
        Broken::Cancelled => ApiError::cancelled(),
        Broken::Failed => ApiError::generation_failed(),
        Broken::ModelChanged => ApiError::model_changed(),
        Broken::ModelGone => ApiError::model_gone(),
    }
}

/// A whole answer, as its events add up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Answer {
    /// One per choice.
    pub choices: Vec<Choice>,
    /// The total.
    pub usage: Usage,
}

/// The text of a choice.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Choice {
    /// All of it so far.
    pub text: String,
    /// Set once it ended.
    pub finish: Option<Reason>,
}

impl Answer {
    /// An answer without text.
    #[must_use]
    pub fn new(n: u32, usage: Usage) -> Self {
        Self { choices: vec![Choice::default(); n as usize], usage }
    }

    /// Adds an event; true once all choices ended.
    ///
    /// # Errors
    /// A choice ended without a result: so does the answer.
    pub fn add(&mut self, event: Event) -> Result<bool, ApiError> {
        match event {
            Event::Delta { choice, text, finish, .. } => {
                if let Some(choice) = self.choices.get_mut(choice as usize) {
                    choice.text.push_str(&text);
                    choice.finish = choice.finish.or(finish);
                }
                Ok(false)
            }
            Event::Broken { why, .. } => Err(broken(why)),
            Event::End(usage) => {
                self.usage = usage;
                Ok(true)
            }
        }
    }
}

/// Appends one server-sent event.
pub fn push_event(out: &mut Vec<u8>, id: Option<u64>, data: &[u8]) {
    let mut head = String::new();
    if let Some(id) = id {
        // Writing to a string does not fail.
        let _ = writeln!(head, "id: {id}");
    }
    out.extend_from_slice(head.as_bytes());
    out.extend_from_slice(b"data: ");
    out.extend_from_slice(data);
    out.extend_from_slice(b"\n\n");
}

/// Appends the event that says where the stream goes on. It has a name, so that it is neither text nor an error, and no id: none of the
/// answer is in it.
pub fn push_parting(out: &mut Vec<u8>, data: &[u8]) {
    out.extend_from_slice(b"event: detached\n");
    push_event(out, None, data);
}

/// The last event of a complete stream.
pub const DONE: &[u8] = b"data: [DONE]\n\n";
/// A comment, which keeps the connection open while there is nothing to say.
pub const KEEP_ALIVE: &[u8] = b": keep-alive\n\n";

#[cfg(test)]
mod tests {
    use super::*;

    fn head(kind: Kind, include_usage: bool) -> Head {
        Head { id: body_id(kind, RequestId([7; 16])), kind, created: 5, model: "m".to_owned(), include_usage }
    }

    const USAGE: Usage = Usage { prompt: 9, cached: 4, completion: 2 };

    #[test]
    fn a_chat_chunk_is_shaped_as_openais() {
        let event = Event::Delta { choice: 1, first: true, text: "hi".to_owned(), finish: None };
        let expected = r#"{"id":"chatcmpl-07070707070707070707070707070707","object":"chat.completion.chunk","created":5,"model":"m","choices":[{"index":1,"delta":{"role":"assistant","content":"hi"},"logprobs":null,"finish_reason":null}]}"#;
        assert_eq!(head(Kind::Chat, false).event(&event).unwrap(), expected);
    }

    #[test]
    fn bug_11_usage_is_null_until_the_last_chunk_which_has_no_choices() {
        let event = Event::Delta { choice: 0, first: false, text: String::new(), finish: Some(Reason::Stop) };
        let expected = r#"{"id":"cmpl-07070707070707070707070707070707","object":"text_completion","created":5,"model":"m","choices":[{"index":0,"text":"","logprobs":null,"finish_reason":"stop"}],"usage":null}"#;
        assert_eq!(head(Kind::Completion, true).event(&event).unwrap(), expected);
        let expected = r#"{"id":"chatcmpl-07070707070707070707070707070707","object":"chat.completion.chunk","created":5,"model":"m","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,"total_tokens":11,"prompt_tokens_details":{"cached_tokens":4}}}"#;
        assert_eq!(head(Kind::Chat, true).event(&Event::End(USAGE)).unwrap(), expected);
        assert_eq!(head(Kind::Chat, false).event(&Event::End(USAGE)), None);
    }

    #[test]
    fn a_whole_chat_answer_is_shaped_as_openais() {
        let mut answer = Answer::new(1, USAGE);
        for (text, finish) in [("a", None), ("b", Some(Reason::Length))] {
            let event = Event::Delta { choice: 0, first: false, text: text.to_owned(), finish };
            assert_eq!(answer.add(event), Ok(false));
        }
        assert_eq!(answer.add(Event::End(USAGE)), Ok(true));
        let expected = r#"{"id":"chatcmpl-07070707070707070707070707070707","object":"chat.completion","created":5,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"ab","refusal":null},"logprobs":null,"finish_reason":"length"}],"usage":{"prompt_tokens":9,"completion_tokens":2,"total_tokens":11,"prompt_tokens_details":{"cached_tokens":4}}}"#;
        assert_eq!(head(Kind::Chat, true).answer(&answer), expected);
    }

    #[test]
    fn a_state_has_the_choices_of_its_endpoint_and_how_far_it_came() {
        let mut answer = Answer::new(1, USAGE);
        let event = Event::Delta { choice: 0, first: true, text: "a".to_owned(), finish: None };
        assert_eq!(answer.add(event), Ok(false));
        let expected = r#"{"id":"cmpl-07070707070707070707070707070707","object":"request","status":"in_progress","created":5,"model":"m","choices":[{"index":0,"text":"a","logprobs":null,"finish_reason":null}],"prompt_tokens":9,"completion_tokens":2,"last_event_id":2,"error":null}"#;
        assert_eq!(head(Kind::Completion, true).state(&answer, Status::InProgress, 2, None), expected);
        let state =
            head(Kind::Chat, true).state(&answer, Status::Failed, 3, Some(&ApiError::generation_failed()));
        let state: serde_json::Value = serde_json::from_slice(&state).unwrap();
        assert_eq!(state["choices"][0]["message"]["content"], "a");
        assert_eq!(
            (&state["status"], &state["error"]["code"]),
            (&"failed".into(), &"generation_failed".into())
        );
    }
}
