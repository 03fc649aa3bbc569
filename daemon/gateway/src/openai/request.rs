//! From a body to a request that is known to be valid.
//!
//! **Owns** the field tables of both endpoints. **Never** tokenises: what depends on the number of tokens is checked later.

use std::fmt;
use std::ops::RangeInclusive;

use pagedd_core::Penalties;
use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::error::{ApiError, shortened};
use super::fields::{AtMost, First, Object, Strings, Table, Treatment};
use crate::stop::MAX_STOP;

/// Most stop strings. OpenAI takes 4.
pub const MAX_STOPS: usize = 16;
/// Most messages of a chat, and most parts of a message.
const MAX_MESSAGES: usize = 16_384;
/// Below it a temperature is greedy: the draw would be the most likely token in any case, and its logits would overflow.
const GREEDY_BELOW: f64 = 1e-5;

/// Which endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Kind {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completion,
}

impl Kind {
    /// The field that holds what is to be continued.
    #[must_use]
    pub const fn prompt_field(self) -> &'static str {
        match self {
            Self::Chat => "messages",
            Self::Completion => "prompt",
        }
    }

    /// Its path.
    #[must_use]
    pub const fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completion => "/v1/completions",
        }
    }
}

/// How an answer comes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Form {
    /// At once, when it is complete.
    Whole,
    /// As server-sent events.
    Stream {
        /// The last of them is about usage.
        include_usage: bool,
    },
    /// Not with this connection: the client is told the request's id at once, and asks for its state.
    Background,
}

/// A body that asks for something this server does.
///
/// Having one tells you: every field of the body was understood, and every value is in its range. It does not tell you that the
/// prompt fits the context, or that the chat template takes the messages.
#[derive(Clone, PartialEq, Debug)]
pub struct ValidRequest {
    /// Which endpoint.
    pub kind: Kind,
    /// What is to be continued.
    pub input: Input,
    /// `0.0` is greedy.
    pub temperature: f32,
    /// In `(0, 1]`.
    pub top_p: f32,
    /// `None` keeps everything.
    pub top_k: Option<u32>,
    /// Each in its range.
    pub penalties: Penalties,
    /// `None`: to be drawn.
    pub seed: Option<u64>,
    /// At least 1.
    pub n: u32,
    /// At least 1; `None` where the client left it open.
    pub max_tokens: Option<u32>,
    /// None of them empty.
    pub stop: Vec<String>,
    /// Stop tokens do not end a choice.
    pub ignore_eos: bool,
    /// How the answer comes.
    pub form: Form,
    /// It runs on when its client leaves, whatever the form.
    pub background: bool,
    /// Fields that have no effect, for the response header.
    pub warnings: Vec<String>,
}

/// What is to be continued.
#[derive(Clone, PartialEq, Debug)]
pub enum Input {
    /// Never empty.
    Chat(Vec<ChatMessage>),
    /// A text; may be empty.
    Text(String),
    /// Token ids, never empty, not yet checked against the vocabulary.
    Tokens(Vec<u32>),
}

/// A message of a chat.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ChatMessage {
    /// Who speaks.
    pub role: Role,
    /// What is said; text parts are joined.
    pub content: String,
    /// The name field.
    pub name: Option<String>,
}

/// Who speaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions.
    System,
    /// Instructions, by their newer name.
    Developer,
    /// The person.
    User,
    /// The model.
    Assistant,
}

impl Role {
    /// As the chat template sees it.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::Developer => "developer",
            Self::User => "user",
            Self::Assistant => "assistant",
        }
    }
}

/// What a request is checked against.
#[derive(Clone, Copy, Debug)]
pub struct Bounds<'a> {
    /// The model served on this port.
    pub model: &'a str,
    /// Most choices.
    pub max_n: u32,
}

use Treatment::{NoEffect, Refused};

/// Fields of both endpoints that change nothing here, or are refused.
const COMMON: Table = &[
    ("allowed_token_ids", Refused(&[])),
    ("bad_words", Refused(&["[]"])),
    ("cache_salt", Refused(&[])),
    ("echo", Refused(&["false"])),
    ("guided_choice", Refused(&[])),
    ("guided_decoding_backend", Refused(&[])),
    ("guided_grammar", Refused(&[])),
    ("guided_json", Refused(&[])),
    ("guided_regex", Refused(&[])),
    ("guided_whitespace_pattern", Refused(&[])),
    ("include_stop_str_in_output", Refused(&["false"])),
    ("kv_transfer_params", Refused(&[])),
    ("length_penalty", Refused(&["1"])),
    ("logit_bias", Refused(&["{}"])),
    ("logits_processors", Refused(&["[]"])),
    ("logprobs", Refused(&["false"])),
    ("min_p", Refused(&["0"])),
    ("min_tokens", Refused(&["0"])),
    ("priority", Refused(&["0"])),
    ("prompt_logprobs", Refused(&[])),
    ("request_id", Refused(&[])),
    ("response_format", Refused(&[r#"{"type":"text"}"#])),
    ("return_token_ids", Refused(&["false"])),
    ("return_tokens_as_token_ids", Refused(&["false"])),
    ("skip_special_tokens", Refused(&["true"])),
    ("spaces_between_special_tokens", Refused(&["true", "false"])),
    ("stop_token_ids", Refused(&["[]"])),
    ("structured_outputs", Refused(&[])),
    ("truncate_prompt_tokens", Refused(&[])),
    ("typical_p", Refused(&["1"])),
    ("use_beam_search", Refused(&["false"])),
];

const CHAT: Table = &[
    ("add_generation_prompt", Refused(&["true"])),
    ("add_special_tokens", Refused(&["false"])),
    ("audio", Refused(&[])),
    ("chat_template", Refused(&[])),
    ("chat_template_kwargs", Refused(&["{}"])),
    ("continue_final_message", Refused(&["false"])),
    ("documents", Refused(&["[]"])),
    ("function_call", Refused(&[r#""none""#])),
    ("functions", Refused(&["[]"])),
    ("mm_processor_kwargs", Refused(&["{}"])),
    ("modalities", Refused(&[r#"["text"]"#])),
    ("parallel_tool_calls", Refused(&["true"])),
    ("prediction", Refused(&[])),
    ("prompt_cache_key", NoEffect),
    ("prompt_cache_retention", NoEffect),
    ("reasoning_effort", Refused(&[])),
    ("safety_identifier", NoEffect),
    ("service_tier", Refused(&[r#""auto""#, r#""default""#])),
    ("store", Refused(&["false"])),
    ("tool_choice", Refused(&[r#""none""#])),
    ("tools", Refused(&["[]"])),
    ("top_logprobs", Refused(&["0"])),
    ("verbosity", Refused(&[])),
    ("web_search_options", Refused(&[])),
];

const COMPLETION: Table = &[
    ("add_special_tokens", Refused(&["true"])),
    ("best_of", Refused(&["1"])),
    ("prompt_embeds", Refused(&[])),
    ("suffix", Refused(&[r#""""#])),
];

/// Fields of a message that are not its role, content or name.
const MESSAGE: Table = &[
    ("annotations", Refused(&["[]"])),
    ("audio", Refused(&[])),
    ("function_call", Refused(&[])),
    ("reasoning", Refused(&[])),
    ("reasoning_content", Refused(&[])),
    ("refusal", Refused(&[])),
    ("tool_call_id", Refused(&[])),
    ("tool_calls", Refused(&["[]"])),
];

const STREAM_OPTIONS: Table =
    &[("continuous_usage_stats", Refused(&["false"])), ("include_obfuscation", Refused(&["false"]))];

/// Fields that both endpoints honour.
const HONOURED: [&str; 17] = [
    "background",
    "frequency_penalty",
    "ignore_eos",
    "max_tokens",
    "metadata",
    "model",
    "n",
    "presence_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "temperature",
    "top_k",
    "top_p",
    "user",
];

/// Reads a body.
///
/// # Errors
/// 400 or 404, naming the field.
pub fn parse(kind: Kind, body: &[u8], bounds: Bounds<'_>) -> Result<ValidRequest, ApiError> {
    let mut fields = Object::of_body(body)?;
    let model: String = fields.need("model")?;
    if model != bounds.model {
        return Err(ApiError::no_model(&model, bounds.model));
    }
    let input = match kind {
        Kind::Chat => Input::Chat(messages(&mut fields)?),
        Kind::Completion => prompt(&mut fields)?,
    };
    let temperature = temperature(fields.take("temperature")?)?;
    let top_p: f64 = fields.take("top_p")?.unwrap_or(1.0);
    if !(top_p > 0.0 && top_p <= 1.0) {
        return Err(ApiError::value(
            "top_p",
            format!("`top_p` is {top_p}, it must be above 0 and at most 1"),
        ));
    }
    // A mass that a single-precision number cannot tell from 0 keeps one token.
    let top_p = (top_p as f32).max(f32::MIN_POSITIVE);
    let top_k = match fields.take::<i64>("top_k")? {
        None | Some(-1 | 0) => None,
        Some(k) => Some(u32::try_from(k).map_err(|_| {
            ApiError::value(
                "top_k",
                format!("`top_k` is {k}, it must be positive, or -1 or 0 to keep every token"),
            )
        })?),
    };
    let penalties = Penalties {
        presence: penalty(&mut fields, "presence_penalty", 0.0, &Penalties::ADDED)?,
        frequency: penalty(&mut fields, "frequency_penalty", 0.0, &Penalties::ADDED)?,
        repetition: penalty(&mut fields, "repetition_penalty", 1.0, &Penalties::FACTOR)?,
    };
    let seed = fields.take::<i64>("seed")?.map(|seed| seed as u64);
    let n = match fields.take::<i64>("n")? {
        None => 1,
        Some(n) => u32::try_from(n).ok().filter(|n| (1..=bounds.max_n).contains(n)).ok_or_else(|| {
            ApiError::value("n", format!("`n` is {n}, it must be from 1 to {}", bounds.max_n))
        })?,
    };
    let max_tokens = max_tokens(kind, &mut fields)?;
    let stop = stop(fields.take("stop")?)?;
    let ignore_eos = fields.take("ignore_eos")?.unwrap_or(false);
    let stream = fields.take("stream")?.unwrap_or(false);
    let background = fields.take("background")?.unwrap_or(false);
    let mut warnings = Vec::new();
    let include_usage = stream_options(&mut fields, stream, &mut warnings)?;
    // Without an effect at OpenAI too: they name the caller's own users and jobs.
    fields.take::<String>("user")?;
    fields.take::<std::collections::BTreeMap<String, String>>("metadata")?;
    let (own, honoured) = match kind {
        Kind::Chat => (CHAT, ["messages", "max_completion_tokens"].as_slice()),
        Kind::Completion => (COMPLETION, ["prompt"].as_slice()),
    };
    let honoured: Vec<&str> = HONOURED.iter().chain(honoured).copied().collect();
    fields.finish(&honoured, &[COMMON, own], &mut warnings)?;
    let input = ValidRequest {
        kind,
        input,
        temperature,
        top_p,
        top_k,
        penalties,
        seed,
        n,
        max_tokens,
        stop,
        ignore_eos,
        form: match (stream, background) {
            (true, _) => Form::Stream { include_usage },
            (false, true) => Form::Background,
            (false, false) => Form::Whole,
        },
        background,
        warnings,
    };
    Ok(input)
}

fn temperature(given: Option<f64>) -> Result<f32, ApiError> {
    let temperature = given.unwrap_or(1.0);
    if !(0.0..=2.0).contains(&temperature) {
        let message = format!("`temperature` is {temperature}, it must be from 0 to 2");
        return Err(ApiError::value("temperature", message));
    }
    Ok(if temperature < GREEDY_BELOW { 0.0 } else { temperature as f32 })
}

fn penalty(
    fields: &mut Object<'_>,
    field: &'static str,
    default: f32,
    range: &RangeInclusive<f32>,
) -> Result<f32, ApiError> {
    let given = fields.take::<f64>(field)?.map(|given| given as f32);
    let penalty = given.unwrap_or(default);
    if !range.contains(&penalty) {
        let (from, to) = (range.start(), range.end());
        let message = format!("`{field}` is {penalty}, it must be from {from} to {to}");
        return Err(ApiError::value(field, message));
    }
    Ok(penalty)
}

fn max_tokens(kind: Kind, fields: &mut Object<'_>) -> Result<Option<u32>, ApiError> {
    let mut take = |field: &'static str| match fields.take::<i64>(field)? {
        None => Ok(None),
        Some(tokens) if tokens < 1 => {
            Err(ApiError::value(field, format!("`{field}` is {tokens}, it must be at least 1")))
        }
        // What no context holds is refused with the context's own numbers.
        Some(tokens) => Ok(Some(u32::try_from(tokens).unwrap_or(u32::MAX))),
    };
    let old = take("max_tokens")?;
    let new = match kind {
        Kind::Chat => take("max_completion_tokens")?,
        Kind::Completion => None,
    };
    match (old, new) {
        (Some(old), Some(new)) if old != new => Err(ApiError::value(
            "max_completion_tokens",
            format!("`max_completion_tokens` is {new} and `max_tokens` is {old}: give one of them"),
        )),
        (old, new) => Ok(new.or(old)),
    }
}

fn stop(given: Option<Strings<MAX_STOPS>>) -> Result<Vec<String>, ApiError> {
    let Strings(stop) = given.unwrap_or(Strings(Vec::new()));
    for text in &stop {
        if text.is_empty() {
            return Err(ApiError::value(
                "stop",
                "`stop` contains an empty string, which would end every answer",
            ));
        }
        if text.len() > MAX_STOP {
            let message =
                format!("`stop` contains a string of {} bytes, at most {MAX_STOP} are allowed", text.len());
            return Err(ApiError::value("stop", message));
        }
    }
    Ok(stop)
}

/// Whether usage is to be sent at the stream's end.
fn stream_options(
    fields: &mut Object<'_>,
    stream: bool,
    warnings: &mut Vec<String>,
) -> Result<bool, ApiError> {
    let Some(raw) = fields.take_raw("stream_options") else { return Ok(false) };
    if !stream {
        return Err(ApiError::value(
            "stream_options",
            "`stream_options` is only allowed with `stream: true`",
        ));
    }
    let mut options = fields.nested("stream_options", raw)?;
    let include_usage = options.take("include_usage")?.unwrap_or(false);
    options.finish(&["include_usage"], &[STREAM_OPTIONS], warnings)?;
    Ok(include_usage)
}

fn prompt(fields: &mut Object<'_>) -> Result<Input, ApiError> {
    let raw = fields.take_raw("prompt").ok_or_else(|| fields.missing("prompt"))?;
    let inner = raw.get().strip_prefix('[').map(|rest| rest.trim_ascii_start().as_bytes().first().copied());
    let several = |count: usize| {
        if count > 1 {
            let message = format!("`prompt` has {count} prompts; this server takes one per request");
            return Err(ApiError::field("prompt", "unsupported_value", message));
        }
        Ok(())
    };
    let no_tokens =
        || ApiError::value("prompt", "`prompt` is an empty list; it must have at least one token or string");
    match inner {
        None => Ok(Input::Text(fields.read("prompt", raw)?)),
        Some(Some(b'"')) => {
            let First { first, count } = fields.read::<First<String>>("prompt", raw)?;
            several(count)?;
            first.map(Input::Text).ok_or_else(no_tokens)
        }
        Some(Some(b'[')) => {
            let First { first, count } = fields.read::<First<Vec<u32>>>("prompt", raw)?;
            several(count)?;
            first.filter(|tokens| !tokens.is_empty()).map(Input::Tokens).ok_or_else(no_tokens)
        }
        Some(_) => {
            let tokens: Vec<u32> = fields.read("prompt", raw)?;
            if tokens.is_empty() { Err(no_tokens()) } else { Ok(Input::Tokens(tokens)) }
        }
    }
}

fn messages(fields: &mut Object<'_>) -> Result<Vec<ChatMessage>, ApiError> {
    let AtMost(list) = fields.need::<AtMost<&RawValue, MAX_MESSAGES>>("messages")?;
    if list.is_empty() {
        return Err(ApiError::value("messages", "`messages` is empty; a chat needs at least one message"));
    }
    list.into_iter().enumerate().map(|(i, raw)| message(fields, &format!("messages[{i}]"), raw)).collect()
}

fn message<'a>(fields: &Object<'a>, path: &str, raw: &'a RawValue) -> Result<ChatMessage, ApiError> {
    let mut message = fields.nested(path, raw)?;
    let role: String = message.need("role")?;
    let role = match role.as_str() {
        "system" => Role::System,
        "developer" => Role::Developer,
        "user" => Role::User,
        "assistant" => Role::Assistant,
        "tool" | "function" => {
            let text = format!("`{path}.role` is {role:?}; this server does not support tools");
            return Err(ApiError::field(format!("{path}.role"), "unsupported_value", text));
        }
        other => {
            let other = shortened(other);
            let text = format!("`{path}.role` is {other:?}, it must be system, developer, user or assistant");
            return Err(ApiError::value(format!("{path}.role"), text));
        }
    };
    let name = message.take("name")?;
    let raw = message.take_raw("content");
    // What cannot be taken is said of a field that is there before one that is missing because of it.
    let name_of_content = message.name("content");
    message.finish(&["role", "content", "name"], &[MESSAGE], &mut Vec::new())?;
    let Some(raw) = raw else {
        let text = format!("`{name_of_content}` is required");
        return Err(ApiError::field(name_of_content, "missing_required_parameter", text));
    };
    let content = match fields.read(&name_of_content, raw)? {
        Content::Text(text) => text,
        Content::Parts(AtMost(parts)) => {
            let mut text = String::new();
            for (i, raw) in parts.into_iter().enumerate() {
                text.push_str(&part(fields, &format!("{name_of_content}[{i}]"), raw)?);
            }
            text
        }
    };
    Ok(ChatMessage { role, content, name })
}

/// The text of one part of a content.
fn part<'a>(fields: &Object<'a>, path: &str, raw: &'a RawValue) -> Result<String, ApiError> {
    let mut part = fields.nested(path, raw)?;
    let kind: String = part.need("type")?;
    if kind != "text" {
        let text =
            format!("`{path}.type` is {:?}; this server takes parts of type \"text\"", shortened(&kind));
        return Err(ApiError::field(format!("{path}.type"), "unsupported_value", text));
    }
    let text = part.need("text")?;
    part.finish(&["type", "text"], &[], &mut Vec::new())?;
    Ok(text)
}

/// The content of a message.
enum Content<'a> {
    Text(String),
    Parts(AtMost<&'a RawValue, MAX_MESSAGES>),
}

impl<'de: 'a, 'a> Deserialize<'de> for Content<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Content<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of parts")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Self::Value, E> {
                Ok(Content::Text(text.to_owned()))
            }
            fn visit_seq<A: de::SeqAccess<'de>>(self, list: A) -> Result<Self::Value, A::Error> {
                AtMost::deserialize(de::value::SeqAccessDeserializer::new(list)).map(Content::Parts)
            }
        }
        deserializer.deserialize_any(Either)
    }
}

#[cfg(test)]
mod tests;
