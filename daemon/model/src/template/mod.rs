//! Chat templates: messages to the text a model was trained on, and which of it came from the client.
//!
//! **Owns** the rendering and the trace. **Never** reads a clock, loads another template, or runs without a bound.

mod functions;
mod taint;

use std::fmt;
use std::io;

use minijinja::{Environment, ErrorKind, Value};
use serde_json::{Map, Value as Json};

use crate::error::Fault;
use crate::tokenizer::Piece;
use functions::Refusal;
use taint::Taint;

/// Longest template, in bytes.
pub(crate) const MAX_TEMPLATE: u64 = 1 << 20;
/// Longest rendered prompt, in bytes: beyond what a context holds, and a bound for a template that repeats itself.
const MAX_OUTPUT: usize = 32 << 20;
/// Steps of the template's interpreter: about a second.
const FUEL: u64 = 20_000_000;
const NAME: &str = "chat";

/// One message of a chat.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Message {
    /// `system`, `user`, `assistant`, `tool`, or what else the template knows.
    pub role: String,
    /// The text.
    pub content: String,
    /// Further fields that the template may read, such as `name` and `tool_calls`.
    pub extra: Map<String, Json>,
}

impl Message {
    /// A message with a role and a text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into(), extra: Map::new() }
    }
}

/// What a rendering depends on beside its messages.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct RenderOptions {
    /// End with the opening of an assistant's message.
    pub add_generation_prompt: bool,
    /// Tool descriptions, as in the request.
    pub tools: Option<Json>,
    /// Further variables that the template may read, such as `enable_thinking`.
    pub extra: Map<String, Json>,
    /// Unix seconds for templates that print the date (UTC). Without it, such a template fails.
    pub now: Option<i64>,
}

/// Why a chat was not rendered.
#[derive(thiserror::Error, Clone, PartialEq, Eq, Debug)]
pub enum TemplateError {
    /// The template refuses these messages, in its own words: the client's mistake.
    #[error("the model's chat template refuses the messages: {message}")]
    Refused {
        /// What the template says.
        message: String,
    },
    /// The template cannot be followed: it uses what is not there, or does not fit these messages.
    #[error("the model's chat template failed: {message}")]
    Failed {
        /// What went wrong, with the template's line.
        message: String,
    },
    /// The template ran too long, or wrote too much.
    #[error("the model's chat template went over its limit of {limit}")]
    OverLimit {
        /// Which limit.
        limit: &'static str,
    },
}

/// What a template must know of the vocabulary.
pub(crate) struct TemplateTokens {
    /// How control tokens are written.
    pub controls: Vec<String>,
    pub bos: Option<String>,
    pub eos: Option<String>,
}

/// A compiled chat template.
pub struct ChatTemplate {
    environment: Environment<'static>,
    tokens: TemplateTokens,
    taint: Taint,
}

impl ChatTemplate {
    pub(crate) fn compile(text: &str, tokens: TemplateTokens, key: &str) -> Result<Self, Fault> {
        if text.len() as u64 > MAX_TEMPLATE {
            return Err(Fault::unsupported(key, format_args!("a template of {} bytes", text.len())));
        }
        let taint = Taint::new(&tokens.controls, text);
        let compiled = functions::environment().and_then(|mut environment| {
            environment.set_fuel(Some(FUEL));
            environment.add_template_owned(NAME, functions::without_generation_blocks(text))?;
            Ok(environment)
        });
        let environment = compiled
            .map_err(|e| Fault::unsupported(key, format_args!("the template does not parse: {e}")))?;
        Ok(Self { environment, tokens, taint })
    }

    /// Renders a chat into pieces, each trusted or from the client.
    ///
    /// The pieces together are exactly what a plain rendering gives. How they are told apart: where anything the client sent
    /// has a character that control tokens need, the template is rendered a second time with those characters replaced by
    /// stand-ins (private-use characters that occur nowhere else), and what stands in comes out as `User`. Where a template
    /// looks into the content, so that the second rendering differs from the first, stand-ins are put only where parts of
    /// control tokens occur; where that fails too, every occurrence of a control token of which a part was sent by the client
    /// comes out as `User`, the template's own included: the model sees a poorer prompt, and no client writes structure.
    ///
    /// # Errors
    /// [`TemplateError`]; messages of any shape do no harm.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<Vec<Piece>, TemplateError> {
        let plain = self.render_plain(messages, options)?;
        let sent = Sent { messages, options };
        Ok(self.taint.trace(&plain, &sent, |sent| self.render_plain(&sent.messages, &sent.options).ok()))
    }

    /// The text alone.
    fn render_plain(&self, messages: &[Message], options: &RenderOptions) -> Result<String, TemplateError> {
        let template = self.environment.get_template(NAME).map_err(|e| failed(&e))?;
        let mut output = Bounded(Vec::new());
        let done = template.render_captured_to(self.context(messages, options), &mut output);
        if output.0.len() > MAX_OUTPUT {
            return Err(TemplateError::OverLimit { limit: "32 MiB of text" });
        }
        done.map_err(|e| failed(&e))?;
        String::from_utf8(output.0)
            .map_err(|_| TemplateError::Failed { message: "its output is no UTF-8".into() })
    }

    fn context(&self, messages: &[Message], options: &RenderOptions) -> Value {
        let mut context = options.extra.clone();
        let messages: Vec<Json> = messages
            .iter()
            .map(|message| {
                let mut object = message.extra.clone();
                object.insert("role".into(), message.role.clone().into());
                object.insert("content".into(), message.content.clone().into());
                Json::Object(object)
            })
            .collect();
        context.insert("messages".into(), messages.into());
        context.insert("add_generation_prompt".into(), options.add_generation_prompt.into());
        context.insert("bos_token".into(), self.tokens.bos.clone().unwrap_or_default().into());
        context.insert("eos_token".into(), self.tokens.eos.clone().unwrap_or_default().into());
        if let Some(tools) = &options.tools {
            context.insert("tools".into(), tools.clone());
        }
        if let Some(now) = options.now {
            context.insert(functions::NOW.into(), now.into());
        }
        minijinja::value::Serde(context).into()
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChatTemplate").finish_non_exhaustive()
    }
}

/// Everything that a client sent.
struct Sent<'a> {
    messages: &'a [Message],
    options: &'a RenderOptions,
}

/// Everything that a client sent, with stand-ins.
struct StoodIn {
    messages: Vec<Message>,
    options: RenderOptions,
}

impl Sent<'_> {
    /// Every string in it.
    fn strings<'s>(&'s self, visit: &mut dyn FnMut(&'s str)) {
        fn walk<'j>(json: &'j Json, visit: &mut dyn FnMut(&'j str)) {
            match json {
                Json::String(text) => visit(text),
                Json::Array(values) => values.iter().for_each(|value| walk(value, visit)),
                Json::Object(object) => object.iter().for_each(|(key, value)| {
                    visit(key);
                    walk(value, visit);
                }),
                Json::Null | Json::Bool(_) | Json::Number(_) => {}
            }
        }
        for message in self.messages {
            visit(&message.role);
            visit(&message.content);
            for (key, value) in &message.extra {
                visit(key);
                walk(value, visit);
            }
        }
        for (key, value) in &self.options.extra {
            visit(key);
            walk(value, visit);
        }
        if let Some(tools) = &self.options.tools {
            walk(tools, visit);
        }
    }

    /// The same with every string replaced.
    fn map(&self, replace: &dyn Fn(&str) -> String) -> StoodIn {
        fn walk(json: &Json, replace: &dyn Fn(&str) -> String) -> Json {
            match json {
                Json::String(text) => Json::String(replace(text)),
                Json::Array(values) => values.iter().map(|value| walk(value, replace)).collect(),
                Json::Object(object) => Json::Object(walk_object(object, replace)),
                Json::Null | Json::Bool(_) | Json::Number(_) => json.clone(),
            }
        }
        fn walk_object(object: &Map<String, Json>, replace: &dyn Fn(&str) -> String) -> Map<String, Json> {
            object.iter().map(|(key, value)| (replace(key), walk(value, replace))).collect()
        }
        let message = |m: &Message| Message {
            role: replace(&m.role),
            content: replace(&m.content),
            extra: m.extra.iter().map(|(key, value)| (key.clone(), walk(value, replace))).collect(),
        };
        StoodIn {
            messages: self.messages.iter().map(message).collect(),
            options: RenderOptions {
                add_generation_prompt: self.options.add_generation_prompt,
                tools: self.options.tools.as_ref().map(|tools| walk(tools, replace)),
                extra: self
                    .options
                    .extra
                    .iter()
                    .map(|(key, value)| (key.clone(), walk(value, replace)))
                    .collect(),
                now: self.options.now,
            },
        }
    }
}

/// Collects output up to a limit, and a little beyond so that the limit shows.
struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() > MAX_OUTPUT {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let taken = bytes.len().min(MAX_OUTPUT + 1 - self.0.len().min(MAX_OUTPUT));
        self.0.extend_from_slice(&bytes[..taken]);
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn failed(error: &minijinja::Error) -> TemplateError {
    let mut cause: Option<&dyn std::error::Error> = Some(error);
    while let Some(inner) = cause {
        if let Some(Refusal(message)) = inner.downcast_ref() {
            return TemplateError::Refused { message: message.clone() };
        }
        if let Some(inner) = inner.downcast_ref::<minijinja::Error>()
            && inner.kind() == ErrorKind::OutOfFuel
        {
            return TemplateError::OverLimit { limit: "steps" };
        }
        cause = inner.source();
    }
    TemplateError::Failed { message: error.to_string() }
}

#[cfg(test)]
mod tests;
