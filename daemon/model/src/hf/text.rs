//! Tokenizer and chat template of a Hugging Face directory.

use std::path::PathBuf;

use serde_json::{Map, Value};

use super::config::token_ids;
use super::{HfDirectory, optional_object};
use crate::config::ModelConfig;
use crate::error::{Fault, ModelError};
use crate::file::read_small;
use crate::template::{ChatTemplate, MAX_TEMPLATE, TemplateTokens};
use crate::tokenizer::{Tokenizer, TokenizerJson, control_texts};

const TOKENIZER: &str = "tokenizer.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const GENERATION_CONFIG: &str = "generation_config.json";
const TEMPLATE: &str = "chat_template.jinja";
const MAX_TOKENIZER: u64 = 128 << 20;

impl HfDirectory {
    fn tokenizer_bytes(&self) -> Result<(PathBuf, Vec<u8>), ModelError> {
        let path = self.path.join(TOKENIZER);
        if let Some(bytes) = read_small(&path, MAX_TOKENIZER)? {
            return Ok((path, bytes));
        }
        let problem = "the file is missing; vocabularies in other files are not read";
        Err(Fault::unsupported(TOKENIZER, problem).at(&self.path))
    }

    pub(crate) fn tokenizer(&self, config: &ModelConfig) -> Result<Tokenizer, ModelError> {
        let settings = optional_object(&self.path.join(TOKENIZER_CONFIG))?;
        let generation_path = self.path.join(GENERATION_CONFIG);
        let generation = optional_object(&generation_path)?;
        let mut eos_ids =
            token_ids(&generation, "eos_token_id").map_err(|fault| fault.at(&generation_path))?;
        eos_ids.extend(&self.eos_ids);
        let (path, bytes) = self.tokenizer_bytes()?;
        let json = TokenizerJson {
            vocab_size: config.vocab,
            bos: special(&settings, "bos_token"),
            eos: special(&settings, "eos_token"),
            add_bos: settings.get("add_bos_token").and_then(Value::as_bool),
            eos_ids,
        };
        json.build(&bytes).map_err(|fault| fault.at(&path))
    }

    pub(crate) fn chat_template(&self) -> Result<Option<ChatTemplate>, ModelError> {
        let settings_path = self.path.join(TOKENIZER_CONFIG);
        let settings = optional_object(&settings_path)?;
        let own_path = self.path.join(TEMPLATE);
        let (path, text) = match read_small(&own_path, MAX_TEMPLATE)? {
            Some(bytes) => {
                let text = String::from_utf8(bytes);
                (&own_path, text.map_err(|_| Fault::malformed(TEMPLATE, "is no UTF-8").at(&own_path))?)
            }
            None => match in_settings(&settings).map_err(|fault| fault.at(&settings_path))? {
                Some(text) => (&settings_path, text),
                None => return Ok(None),
            },
        };
        let (tokenizer_path, bytes) = self.tokenizer_bytes()?;
        let controls = control_texts(&bytes).map_err(|fault| fault.at(&tokenizer_path))?;
        drop(bytes);
        let tokens = TemplateTokens {
            controls,
            bos: special(&settings, "bos_token"),
            eos: special(&settings, "eos_token"),
        };
        ChatTemplate::compile(&text, tokens, "chat_template").map(Some).map_err(|fault| fault.at(path))
    }
}

/// A template, or several by name, of which `default` is meant.
fn in_settings(settings: &Map<String, Value>) -> Result<Option<String>, Fault> {
    let key = "chat_template";
    let text = match settings.get(key) {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) => text,
        Some(Value::Array(named)) => {
            let default = named.iter().find(|t| t.get("name").and_then(Value::as_str) == Some("default"));
            match default.and_then(|t| t.get("template")).and_then(Value::as_str) {
                Some(text) => text,
                None => return Err(Fault::malformed(key, "a list without a template named \"default\"")),
            }
        }
        Some(_) => return Err(Fault::malformed(key, "neither a template nor a list of them")),
    };
    Ok(Some(text.to_owned()))
}

/// A special token: its text, or an object with its `content`.
fn special(settings: &Map<String, Value>, key: &str) -> Option<String> {
    let value = settings.get(key)?;
    value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned)
}
