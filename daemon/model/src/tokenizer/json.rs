//! Tokenizers from `tokenizer.json`.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use pagedd_core::TokenId;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::Tokenizer;
use super::build::{Blueprint, Entry, Kind, ends_text};
use super::bytes::{Spelling, byte_token};
use crate::error::Fault;

const NORMALIZERS: [&str; 8] = ["Sequence", "NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace", "Lowercase"];
const PRE_TOKENIZERS: [&str; 7] =
    ["Sequence", "ByteLevel", "Digits", "Metaspace", "Split", "Punctuation", "WhitespaceSplit"];

/// What the files beside `tokenizer.json` say.
pub(crate) struct TokenizerJson {
    pub vocab_size: usize,
    pub bos: Option<String>,
    pub eos: Option<String>,
    /// `add_bos_token`; otherwise the post-processor decides.
    pub add_bos: Option<bool>,
    pub eos_ids: BTreeSet<u64>,
}

#[derive(Deserialize)]
struct Json {
    #[serde(default)]
    added_tokens: Vec<Added>,
    normalizer: Option<Value>,
    pre_tokenizer: Option<Value>,
    post_processor: Option<Value>,
    decoder: Option<Value>,
    model: Model,
}

#[derive(Deserialize)]
#[allow(clippy::struct_excessive_bools)] // the file's own flags
struct Added {
    id: u32,
    content: String,
    #[serde(default)]
    special: bool,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
}

#[derive(Deserialize)]
struct Model {
    vocab: HashMap<String, u32>,
    merges: Vec<Merge>,
    dropout: Option<f64>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
}

/// Older files write a merge as one string.
#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair(String, String),
    Text(String),
}

/// How control tokens are written.
pub(crate) fn control_texts(bytes: &[u8]) -> Result<Vec<String>, Fault> {
    #[derive(Deserialize)]
    struct OnlyAdded {
        #[serde(default)]
        added_tokens: Vec<Added>,
    }
    let json: OnlyAdded = serde_json::from_slice(bytes).map_err(|e| Fault::malformed("added_tokens", e))?;
    Ok(json.added_tokens.into_iter().filter(|t| t.special).map(|t| t.content).collect())
}

impl TokenizerJson {
    pub(crate) fn build(self, bytes: &[u8]) -> Result<Tokenizer, Fault> {
        // The kind first: other kinds have other shapes, and deserve a better message.
        #[derive(Deserialize)]
        struct OnlyKind {
            model: KindOfModel,
        }
        #[derive(Deserialize)]
        struct KindOfModel {
            #[serde(rename = "type")]
            kind: Option<String>,
        }
        let malformed = |e| Fault::malformed("tokenizer.json", e);
        let kind: OnlyKind = serde_json::from_slice(bytes).map_err(malformed)?;
        if let Some(other) = kind.model.kind.filter(|kind| kind != "BPE") {
            return Err(Fault::unsupported("model.type", format_args!("{other:?}, only \"BPE\" is served")));
        }
        let json: Json = serde_json::from_slice(bytes).map_err(malformed)?;
        let spelling = spelling(&json)?;
        let byte_count = json.model.vocab.keys().filter_map(|text| byte_token(text)).count();
        match spelling {
            Spelling::SentencePiece if byte_count != 256 => {
                let problem = format!("{byte_count} of 256 byte tokens; without them text would be lost");
                return Err(Fault::unsupported("model.vocab", problem));
            }
            _ => {}
        }
        let normalizer = part(json.normalizer.as_ref(), "normalizer", &NORMALIZERS)?;
        let later = json.pre_tokenizer.clone().map(without_first_prefix);
        let pre_tokenizers = [
            part(json.pre_tokenizer.as_ref(), "pre_tokenizer", &PRE_TOKENIZERS)?,
            part(later.as_ref(), "pre_tokenizer", &PRE_TOKENIZERS)?,
        ];
        let bos = self.bos(&json)?;
        let mut entries = self.entries(&json, spelling)?;
        let mut stop_ids = self.stop_ids(&entries)?;
        for special in bos.iter().chain(&stop_ids) {
            entries[special.0 as usize].kind = Kind::Control;
        }
        let named = entries.iter().enumerate();
        let named = named.filter(|(_, entry)| entry.kind == Kind::Control && ends_text(&entry.text));
        stop_ids.extend(named.map(|(id, _)| TokenId(id as u32)));
        let merges = json.model.merges.into_iter().enumerate().map(|(i, merge)| match merge {
            Merge::Pair(left, right) => Ok((left, right)),
            Merge::Text(text) => match text.split_once(' ') {
                Some((left, right)) => Ok((left.to_owned(), right.to_owned())),
                None => Err(Fault::malformed("model.merges", format_args!("merge {i} is no pair: {text:?}"))),
            },
        });
        Blueprint {
            vocab_size: self.vocab_size,
            entries,
            merges: merges.collect::<Result<_, _>>()?,
            merges_key: "model.merges",
            normalizer,
            pre_tokenizers,
            spelling,
            ignore_merges: json.model.ignore_merges,
            bos,
            stop_ids,
        }
        .build()
    }

    fn entries(&self, json: &Json, spelling: Spelling) -> Result<Vec<Entry>, Fault> {
        let in_range = |text: &str, id: u32| {
            if (id as usize) < self.vocab_size {
                return Ok(id as usize);
            }
            let problem = format!("has id {id}, but the model's vocabulary ends at {}", self.vocab_size);
            Err(Fault::unsupported(format_args!("token {text:?}"), problem))
        };
        let mut texts: BTreeMap<usize, Entry> = BTreeMap::new();
        for (text, &id) in &json.model.vocab {
            let kind = match spelling {
                Spelling::SentencePiece if byte_token(text).is_some() => Kind::Byte,
                _ if json.model.unk_token.as_ref() == Some(text) => Kind::Control,
                _ => Kind::Normal,
            };
            if let Some(other) = texts.insert(in_range(text, id)?, Entry::new(text.clone(), kind)) {
                let problem = format!("id {id} is both {:?} and {text:?}", other.text);
                return Err(Fault::malformed("model.vocab", problem));
            }
        }
        for added in &json.added_tokens {
            let id = in_range(&added.content, added.id)?;
            let elsewhere = json.model.vocab.get(&added.content).is_some_and(|&other| other != added.id);
            let taken = texts.get(&id).is_some_and(|entry| entry.text != added.content);
            if elsewhere || taken {
                let problem = format!("token {:?} contradicts model.vocab about id {id}", added.content);
                return Err(Fault::malformed("added_tokens", problem));
            }
            if added.single_word {
                let problem = format!("single_word of token {:?} is not served", added.content);
                return Err(Fault::unsupported("added_tokens", problem));
            }
            if added.content.is_empty() {
                return Err(Fault::malformed("added_tokens", format_args!("token {id} is empty")));
            }
            let kind = if added.special { Kind::Control } else { Kind::Added };
            let mut entry = Entry::new(added.content.clone(), kind);
            (entry.left_strip, entry.right_strip) = (added.lstrip, added.rstrip);
            texts.insert(id, entry);
        }
        let count = texts.last_key_value().map_or(0, |(id, _)| id + 1);
        Ok((0..count).map(|id| texts.remove(&id).unwrap_or_else(Entry::unused)).collect())
    }

    /// BOS, where every prompt gets one.
    fn bos(&self, json: &Json) -> Result<Option<TokenId>, Fault> {
        let from_template = json.post_processor.as_ref().and_then(first_of_template);
        let text = match self.add_bos {
            Some(false) => return Ok(None),
            Some(true) => self.bos.clone().or(from_template),
            None => from_template,
        };
        let Some(text) = text else { return Ok(None) };
        match id_of(json, &text) {
            Some(id) if (id as usize) < self.vocab_size => Ok(Some(TokenId(id))),
            _ => Err(Fault::malformed("bos_token", format_args!("{text:?} is not in the vocabulary"))),
        }
    }

    fn stop_ids(&self, entries: &[Entry]) -> Result<BTreeSet<TokenId>, Fault> {
        let mut ids = BTreeSet::new();
        for &id in &self.eos_ids {
            if id >= entries.len() as u64 {
                let problem = format!("{id}, but there are {} tokens", entries.len());
                return Err(Fault::malformed("eos_token_id", problem));
            }
            ids.insert(TokenId(id as u32));
        }
        if let Some(eos) = &self.eos {
            match entries.iter().position(|entry| entry.text == *eos) {
                Some(id) => _ = ids.insert(TokenId(id as u32)),
                None => {
                    return Err(Fault::malformed(
                        "eos_token",
                        format_args!("{eos:?} is not in the vocabulary"),
                    ));
                }
            }
        }
        Ok(ids)
    }
}

fn id_of(json: &Json, text: &str) -> Option<u32> {
    let added = json.added_tokens.iter().find(|t| t.content == text).map(|t| t.id);
    added.or_else(|| json.model.vocab.get(text).copied())
}

/// The token that a `TemplateProcessing` puts in front.
fn first_of_template(processor: &Value) -> Option<String> {
    match processor.get("type")?.as_str()? {
        "Sequence" => processor.get("processors")?.as_array()?.iter().find_map(first_of_template),
        "TemplateProcessing" => {
            let first = processor.get("single")?.as_array()?.first()?;
            Some(first.get("SpecialToken")?.get("id")?.as_str()?.to_owned())
        }
        _ => None,
    }
}

fn spelling(json: &Json) -> Result<Spelling, Fault> {
    for (key, value) in [
        ("model.continuing_subword_prefix", &json.model.continuing_subword_prefix),
        ("model.end_of_word_suffix", &json.model.end_of_word_suffix),
    ] {
        if let Some(value) = value.as_ref().filter(|v| !v.is_empty()) {
            return Err(Fault::unsupported(key, format_args!("{value:?} is not served")));
        }
    }
    if json.model.dropout.is_some_and(|p| p != 0.0) {
        return Err(Fault::unsupported("model.dropout", "tokenizers that draw are not served"));
    }
    let decoder = json.decoder.as_ref();
    let decoders: Vec<&Value> = match decoder.and_then(|d| d.get("decoders")).and_then(Value::as_array) {
        Some(steps) => steps.iter().collect(),
        None => decoder.into_iter().collect(),
    };
    let kinds: Vec<&str> = decoders.iter().filter_map(|d| d.get("type")?.as_str()).collect();
    let spelling = if kinds.contains(&"ByteLevel") {
        Spelling::ByteLevel
    } else if kinds.contains(&"ByteFallback") || kinds.contains(&"Metaspace") {
        Spelling::SentencePiece
    } else {
        return Err(Fault::unsupported(
            "decoder",
            format_args!("{kinds:?}; ByteLevel and ByteFallback are served"),
        ));
    };
    if (spelling == Spelling::SentencePiece) != json.model.byte_fallback {
        let problem = format!("{} does not fit decoder {kinds:?}", json.model.byte_fallback);
        return Err(Fault::unsupported("model.byte_fallback", problem));
    }
    Ok(spelling)
}

/// One of the library's parts, if every step in it is of a served kind.
fn part<T: DeserializeOwned>(json: Option<&Value>, key: &str, served: &[&str]) -> Result<Option<T>, Fault> {
    fn check(json: &Value, key: &str, served: &[&str]) -> Result<(), Fault> {
        let kind = json.get("type").and_then(Value::as_str).unwrap_or_default();
        if !served.contains(&kind) {
            let problem = format!("{kind:?} is not served; {} are", served.join(", "));
            return Err(Fault::unsupported(key, problem));
        }
        let steps =
            ["normalizers", "pretokenizers"].into_iter().filter_map(|list| json.get(list)?.as_array());
        steps.flatten().try_for_each(|step| check(step, key, served))
    }
    let Some(json) = json.filter(|json| !json.is_null()) else { return Ok(None) };
    check(json, key, served)?;
    T::deserialize(json).map(Some).map_err(|e| Fault::malformed(key, e))
}

/// The same steps for text that does not stand at the start: a space goes in front of the first word of all only.
fn without_first_prefix(mut json: Value) -> Value {
    match &mut json {
        Value::Object(object) => {
            if object.get("prepend_scheme").and_then(Value::as_str) == Some("first") {
                object.insert("prepend_scheme".into(), "never".into());
            }
            for value in object.values_mut() {
                *value = without_first_prefix(value.take());
            }
        }
        Value::Array(values) => {
            for value in values {
                *value = without_first_prefix(value.take());
            }
        }
        _ => {}
    }
    json
}
