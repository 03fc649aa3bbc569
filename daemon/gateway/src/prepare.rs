//! From a valid request to one the daemon admits: prompt, limits, seed.
//!
//! **Owns** the checks that need the number of tokens. **Never** waits: it computes, on a thread of its own.

use std::time::{SystemTime, UNIX_EPOCH};

use pagedd_wire::gateway::{Idempotency, OnLeave, Request, ToDaemon, Welcome};
use pagedd_wire::{FrameError, Sampling, encode};
use sha2::{Digest as _, Sha256};

use crate::admit::Caller;
use crate::openai::ApiError;
use crate::openai::request::{Bounds, Form, Input, Kind, ValidRequest, parse};
use crate::render::Context;
use crate::text::{ChatError, Text};

/// Output tokens of a completion that names no limit: OpenAI's.
const COMPLETION_TOKENS: u32 = 16;

/// What a request is prepared with.
#[derive(Debug)]
pub struct Preparation<'a> {
    /// Which endpoint.
    pub kind: Kind,
    /// The body.
    pub body: &'a [u8],
    /// What the daemon said.
    pub welcome: &'a Welcome,
    /// Tokenizer and chat template.
    pub text: &'a Text,
    /// Who asks.
    pub caller: Caller,
    /// It runs on when its client leaves.
    pub resumable: bool,
    /// Digest of its `Idempotency-Key`.
    pub idempotency_key: Option<[u8; 32]>,
    /// The number of the question to the daemon.
    pub ticket: u64,
}

/// A request that is ready for the daemon.
#[derive(Clone, PartialEq, Debug)]
pub struct Prepared {
    /// The encoded `Submit`.
    pub frame: Vec<u8>,
    /// How to render its answer.
    pub context: Context,
    /// Fields that have no effect.
    pub warnings: Vec<String>,
}

impl Preparation<'_> {
    /// Does all of it.
    ///
    /// # Errors
    /// 400, 404 or 413, naming the field.
    pub fn run(&self) -> Result<Prepared, ApiError> {
        let bounds = Bounds { model: &self.welcome.model, max_n: self.welcome.max_n };
        let request = parse(self.kind, self.body, bounds)?;
        let prompt = self.prompt(&request)?;
        let max_tokens = self.max_tokens(&request, prompt.len())?;
        let seed = match request.seed {
            Some(seed) => seed,
            None => random()?,
        };
        let resumable = self.resumable || request.background;
        let on_leave = match request.form {
            Form::Background => OnLeave::Background,
            Form::Whole | Form::Stream { .. } if resumable => OnLeave::RunOn,
            Form::Whole | Form::Stream { .. } => OnLeave::Cancel,
        };
        let context = Context {
            kind: self.kind,
            model: self.welcome.model.clone(),
            stop: request.stop,
            ignore_eos: request.ignore_eos,
            form: request.form,
            resumable,
        };
        let unwritable = |_| ApiError::internal("the request cannot be written for the daemon");
        let submit = ToDaemon::Submit {
            ticket: self.ticket,
            request: Box::new(Request {
                prompt,
                sampling: Sampling {
                    temperature: request.temperature,
                    top_p: request.top_p,
                    top_k: request.top_k,
                    seed,
                    logprobs: None,
                    presence_penalty: request.penalties.presence,
                    frequency_penalty: request.penalties.frequency,
                    repetition_penalty: request.penalties.repetition,
                },
                n: request.n,
                max_tokens,
                stop_ids: if request.ignore_eos { Vec::new() } else { self.text.stop_ids() },
                on_leave,
                key: self.caller.key,
                idempotency: self.idempotency_key.map(|key| Idempotency { key, body: self.body_digest() }),
                context: context.encode().map_err(unwritable)?,
            }),
        };
        let frame = encode(&submit).map_err(|error| match error {
            FrameError::TooLong { .. } => ApiError::too_large(self.welcome.max_body),
            FrameError::Malformed { .. } => {
                ApiError::internal("the request cannot be written for the daemon")
            }
        })?;
        Ok(Prepared { frame, context, warnings: request.warnings })
    }

    /// Of the path and the body as it came: two bodies that differ in a blank only count as different, and none that differs in
    /// meaning counts as the same.
    fn body_digest(&self) -> [u8; 32] {
        let digest = Sha256::new().chain_update(self.kind.path()).chain_update([0]).chain_update(self.body);
        digest.finalize().into()
    }

    fn prompt(&self, request: &ValidRequest) -> Result<Vec<u32>, ApiError> {
        let field = self.kind.prompt_field();
        let vocab = self.welcome.vocab_size.min(self.text.vocab_size());
        let prompt = match &request.input {
            Input::Chat(messages) => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs() as i64);
                self.text.chat(messages, now).map_err(|error| {
                    let code = match &error {
                        ChatError::NoTemplate => "no_chat_template",
                        ChatError::Template(_) => "chat_template_error",
                    };
                    ApiError::field(field, code, error.to_string().replace('\n', " "))
                })?
            }
            Input::Text(text) => self.text.prompt(text),
            Input::Tokens(tokens) => tokens.clone(),
        };
        if prompt.is_empty() {
            let message =
                format!("`{field}` is empty, and the model has no token that stands for an empty start");
            return Err(ApiError::value(field, message));
        }
        if let Some(token) = prompt.iter().find(|token| **token >= vocab) {
            let message = format!("`{field}` contains the token {token}; the vocabulary has {vocab} tokens");
            return Err(ApiError::value(field, message));
        }
        Ok(prompt)
    }

    fn max_tokens(&self, request: &ValidRequest, prompt: usize) -> Result<u32, ApiError> {
        let limit = self.welcome.max_model_len;
        let rest = u32::try_from(prompt).ok().and_then(|prompt| limit.checked_sub(prompt)).unwrap_or(0);
        let wanted = match (request.max_tokens, self.kind) {
            (Some(named), _) if named > rest => named,
            (Some(named), _) => return Ok(named),
            (None, _) if rest == 0 => 1,
            (None, Kind::Chat) => return Ok(self.welcome.default_max_tokens.unwrap_or(rest).clamp(1, rest)),
            (None, Kind::Completion) => return Ok(COMPLETION_TOKENS.min(rest)),
        };
        Err(ApiError::context_length(self.kind.prompt_field(), prompt as u64, wanted.into(), limit))
    }
}

fn random() -> Result<u64, ApiError> {
    getrandom::u64().map_err(|_| ApiError::internal("the host gives no random numbers"))
}
