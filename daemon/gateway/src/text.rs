//! The model's text part: tokenizer and chat template, loaded once and shared by every gateway of the model.
//!
//! **Owns** both. **Never** keeps anything of a request.

use std::path::Path;

use pagedd_core::TokenId;
use pagedd_model::{ChatTemplate, Message, ModelError, ModelSource, RenderOptions, TemplateError, Tokenizer};

use crate::openai::request::ChatMessage;

/// Tokenizer and chat template.
#[derive(Debug)]
pub struct Text {
    /// `None` where the model's cannot be loaded: nothing is asked of it then, since the daemon closes such a tenant.
    tokenizer: Option<Tokenizer>,
    template: Option<ChatTemplate>,
}

/// Why messages did not become a prompt.
#[derive(thiserror::Error, Clone, PartialEq, Eq, Debug)]
pub enum ChatError {
    /// The model was not made for chats.
    #[error("this model has no chat template; use /v1/completions")]
    NoTemplate,
    /// The template does not take them.
    #[error(transparent)]
    Template(#[from] TemplateError),
}

impl Text {
    /// Loads both from a GGUF file or a Hugging Face directory.
    ///
    /// # Errors
    /// One line that names the file and the key.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let source = ModelSource::open(path)?;
        Ok(Self::new(source.tokenizer()?, source.chat_template()?))
    }

    /// From parts that are loaded already.
    #[must_use]
    pub fn new(tokenizer: Tokenizer, template: Option<ChatTemplate>) -> Self {
        Self { tokenizer: Some(tokenizer), template }
    }

    /// No text part, for a gateway that only says why it cannot serve.
    #[must_use]
    pub fn none() -> Self {
        Self { tokenizer: None, template: None }
    }

    /// Ids below this are the model's.
    #[must_use]
    pub fn vocab_size(&self) -> u32 {
        self.tokenizer.as_ref().map_or(0, Tokenizer::vocab_size)
    }

    /// The prompt of a text: with BOS where the model wants it. Empty for an empty text where it does not.
    #[must_use]
    pub fn prompt(&self, text: &str) -> Vec<u32> {
        self.tokenizer.as_ref().map_or_else(Vec::new, |tokenizer| ids(&tokenizer.encode_prompt(text)))
    }

    /// The prompt of a chat, with the opening of the assistant's message at its end.
    ///
    /// # Errors
    /// [`ChatError`]: the client's mistake, or the model's.
    pub fn chat(&self, messages: &[ChatMessage], now: i64) -> Result<Vec<u32>, ChatError> {
        let (Some(template), Some(tokenizer)) = (&self.template, &self.tokenizer) else {
            return Err(ChatError::NoTemplate);
        };
        let messages: Vec<Message> = messages
            .iter()
            .map(|message| {
                let mut sent = Message::new(message.role.as_str(), message.content.as_str());
                if let Some(name) = &message.name {
                    sent.extra.insert("name".to_owned(), name.as_str().into());
                }
                sent
            })
            .collect();
        let options =
            RenderOptions { add_generation_prompt: true, now: Some(now), ..RenderOptions::default() };
        Ok(ids(&tokenizer.encode_pieces(&template.render(&messages, &options)?)))
    }

    /// Tokens that end a choice.
    #[must_use]
    pub fn stop_ids(&self) -> Vec<u32> {
        ids(self.stops())
    }

    /// Whether a token ends a choice.
    #[must_use]
    pub fn is_stop(&self, token: u32) -> bool {
        self.stops().contains(&TokenId(token))
    }

    /// The bytes that a token stands for.
    #[must_use]
    pub fn bytes(&self, token: u32) -> &[u8] {
        self.tokenizer.as_ref().map_or(&[], |tokenizer| tokenizer.token_bytes(TokenId(token)))
    }

    fn stops(&self) -> &[TokenId] {
        self.tokenizer.as_ref().map_or(&[], Tokenizer::stop_ids)
    }
}

fn ids(tokens: &[TokenId]) -> Vec<u32> {
    tokens.iter().map(|token| token.0).collect()
}
