//! The vocabulary of synthetic models.
//!
//! Ids 0 to 255 are the bytes: any text is as many tokens as it has bytes. Then the control tokens. All others no text becomes, and each
//! shows as a word of its number, so that whatever a model with random weights says can be read.

use pagedd_core::TokenId;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use super::Tokenizer;
use super::build::{Blueprint, Entry, Kind, ends_text};
use super::bytes::Spelling;
use crate::error::Fault;

/// What a tokenizer of a synthetic model is built from.
pub(crate) struct SyntheticVocabulary {
    pub vocab_size: usize,
}

impl SyntheticVocabulary {
    /// Ids 256 and on.
    pub(crate) const CONTROLS: [&'static str; 3] = ["<|endoftext|>", "<|im_start|>", Self::EOS];
    pub(crate) const EOS: &'static str = "<|im_end|>";

    pub(crate) fn build(self) -> Result<Tokenizer, Fault> {
        let bytes = (0..=u8::MAX).map(|byte| Entry::new(Spelling::of_byte(byte).to_string(), Kind::Normal));
        let controls = Self::CONTROLS.iter().map(|text| Entry::new((*text).to_owned(), Kind::Control));
        let mut entries: Vec<Entry> = bytes.chain(controls).collect();
        let space = Spelling::of_byte(b' ');
        entries.extend(
            (entries.len()..self.vocab_size).map(|id| Entry::new(format!("{space}w{id}"), Kind::Normal)),
        );
        let named = entries.iter().enumerate().filter(|(_, e)| e.kind == Kind::Control && ends_text(&e.text));
        let stop_ids = named.map(|(id, _)| TokenId(id as u32)).collect();
        // Words keep the merge model's memory of them small; no rule looks into them.
        let words = PreTokenizerWrapper::from(ByteLevel::new(false, true, true));
        Blueprint {
            vocab_size: self.vocab_size,
            entries,
            merges: Vec::new(),
            merges_key: "merges",
            normalizer: None,
            pre_tokenizers: [Some(words.clone()), Some(words)],
            spelling: Spelling::ByteLevel,
            ignore_merges: false,
            bos: None,
            stop_ids,
        }
        .build()
    }
}
