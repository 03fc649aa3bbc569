//! Tokenizer and chat template of a GGUF file.

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::file::SourceFile;
use crate::gguf::Gguf;
use crate::template::{ChatTemplate, MAX_TEMPLATE, TemplateTokens};
use crate::tokenizer::{GgufVocabulary, Tokenizer};

const TEMPLATE: &str = "tokenizer.chat_template";

impl Gguf {
    pub(crate) fn tokenizer(&self, file: &SourceFile, config: &ModelConfig) -> Result<Tokenizer, ModelError> {
        GgufVocabulary::read(&self.metadata, file)
            .and_then(|vocabulary| vocabulary.tokenizer(&self.metadata, file, config.vocab))
            .map_err(|fault| fault.at(&file.path))
    }

    pub(crate) fn chat_template(&self, file: &SourceFile) -> Result<Option<ChatTemplate>, ModelError> {
        let read = || {
            let Some(text) = self.metadata.string(file, TEMPLATE, MAX_TEMPLATE)? else { return Ok(None) };
            let vocabulary = GgufVocabulary::read(&self.metadata, file)?;
            let [bos, eos] = vocabulary.bos_and_eos();
            let tokens = TemplateTokens { controls: vocabulary.controls(), bos, eos };
            ChatTemplate::compile(&text, tokens, TEMPLATE).map(Some)
        };
        read().map_err(|fault| fault.at(&file.path))
    }
}
