//! Tokenizer and chat template of a synthetic model: a byte is a token.

use super::Synthetic;
use crate::error::ModelError;
use crate::template::{ChatTemplate, TemplateTokens};
use crate::tokenizer::{SyntheticVocabulary, Tokenizer};

/// ChatML, the least that tells messages apart.
const TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

impl Synthetic {
    pub(crate) fn tokenizer(&self) -> Result<Tokenizer, ModelError> {
        SyntheticVocabulary { vocab_size: self.vocab }.build().map_err(|fault| fault.at(self.path().as_ref()))
    }

    pub(crate) fn chat_template(&self) -> Result<ChatTemplate, ModelError> {
        let controls = SyntheticVocabulary::CONTROLS.map(str::to_owned).to_vec();
        let eos = Some(SyntheticVocabulary::EOS.to_owned());
        let tokens = TemplateTokens { controls, bos: None, eos };
        ChatTemplate::compile(TEMPLATE, tokens, "chat template")
            .map_err(|fault| fault.at(self.path().as_ref()))
    }
}
