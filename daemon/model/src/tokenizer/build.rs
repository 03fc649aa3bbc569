//! From what a file says to a [`Tokenizer`].

use std::collections::BTreeSet;

use pagedd_core::TokenId;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;

use super::Tokenizer;
use super::added::{AddedToken, AddedTokens};
use super::bytes::{ByteTable, Spelling};
use crate::error::Fault;

/// Words that a tokenizer remembers, each with its tokens. Each gateway fills its own after its fork.
const CACHED_WORDS: usize = 2048;

/// What an entry of the vocabulary is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// Comes out of merges.
    Normal,
    /// Structure: never from text, never shown.
    Control,
    /// Found as written, shown as written.
    Added,
    /// A raw byte of a `SentencePiece` vocabulary.
    Byte,
    /// Stands for nothing.
    Unused,
}

/// One entry of the vocabulary.
#[derive(Debug)]
pub(super) struct Entry {
    pub text: String,
    pub kind: Kind,
    pub left_strip: bool,
    pub right_strip: bool,
}

impl Entry {
    pub(super) fn new(text: String, kind: Kind) -> Self {
        Self { text, kind, left_strip: false, right_strip: false }
    }

    pub(super) fn unused() -> Self {
        Self::new(String::new(), Kind::Unused)
    }
}

/// Everything that makes a tokenizer.
pub(super) struct Blueprint {
    /// The model's vocabulary size, at least `entries.len()`.
    pub vocab_size: usize,
    /// By token id.
    pub entries: Vec<Entry>,
    pub merges: Vec<(String, String)>,
    /// What names the merges in the file.
    pub merges_key: &'static str,
    pub normalizer: Option<NormalizerWrapper>,
    pub pre_tokenizers: [Option<PreTokenizerWrapper>; 2],
    pub spelling: Spelling,
    /// A word that is in the vocabulary is that token, whatever the merges would make of it.
    pub ignore_merges: bool,
    pub bos: Option<TokenId>,
    pub stop_ids: BTreeSet<TokenId>,
}

impl Blueprint {
    pub(super) fn build(self) -> Result<Tokenizer, Fault> {
        let mut vocab = Vocab::default();
        let mut added = Vec::new();
        for (id, entry) in self.entries.iter().enumerate() {
            let id = id as u32;
            match entry.kind {
                Kind::Normal | Kind::Byte | Kind::Added => {
                    if entry.text.is_empty() {
                        continue;
                    }
                    if let Some(other) = vocab.insert(entry.text.clone(), id) {
                        let problem = format!("{:?} is both token {other} and token {id}", entry.text);
                        return Err(Fault::malformed("vocabulary", problem));
                    }
                }
                Kind::Control | Kind::Unused => {}
            }
            if matches!(entry.kind, Kind::Control | Kind::Added) {
                added.push(AddedToken {
                    id: TokenId(id),
                    text: entry.text.clone(),
                    control: entry.kind == Kind::Control,
                    left_strip: entry.left_strip,
                    right_strip: entry.right_strip,
                });
            }
        }
        let bytes = ByteTable::new(self.entries.into_iter().map(|entry| match entry.kind {
            Kind::Normal | Kind::Byte => self.spelling.decode(&entry.text),
            Kind::Added => entry.text.into_bytes(),
            Kind::Control | Kind::Unused => Vec::new(),
        }));
        let model = BPE::builder()
            .vocab_and_merges(vocab, self.merges)
            .byte_fallback(self.spelling == Spelling::SentencePiece)
            .ignore_merges(self.ignore_merges)
            .cache_capacity(CACHED_WORDS)
            .build()
            .map_err(|e| Fault::malformed(self.merges_key, e))?;
        Ok(Tokenizer {
            normalizer: self.normalizer,
            pre_tokenizers: self.pre_tokenizers,
            model,
            added: AddedTokens::new(added),
            bytes,
            splits_by_pattern: self.spelling == Spelling::ByteLevel,
            vocab_size: self.vocab_size as u32,
            bos: self.bos,
            stop_ids: self.stop_ids.into_iter().collect(),
        })
    }
}

/// Control tokens that end a turn or a text in some family, whatever else the file states.
pub(super) fn ends_text(control: &str) -> bool {
    matches!(
        control,
        "<|endoftext|>" | "<|end_of_text|>" | "<|im_end|>" | "<|eot_id|>" | "<|eom_id|>" | "</s>"
    )
}
