//! Text to token ids and back, exactly as the model was trained on it.
//!
//! **Owns** the vocabulary and the line between text and control tokens: control tokens are not in the merge model's
//! vocabulary at all, so that text alone can never produce one. **Never** decides which text is trusted, and never turns
//! token bytes into strings.

mod added;
mod build;
mod bytes;
mod gguf;
mod json;
mod synthetic;

use std::fmt;

use pagedd_core::TokenId;
use tokenizers::models::bpe::BPE;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::{
    Model, NormalizedString, Normalizer, OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer,
};

use added::{AddedTokens, Texts};
use bytes::ByteTable;

pub(crate) use gguf::GgufVocabulary;
pub(crate) use json::{TokenizerJson, control_texts};
pub(crate) use synthetic::SyntheticVocabulary;

/// A stretch of a prompt, by where it comes from.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Piece {
    /// The template's own text: control tokens in it are control tokens.
    Trusted(String),
    /// What a client sent: control tokens in it are plain text.
    User(String),
}

impl Piece {
    /// The text, wherever it comes from.
    #[must_use]
    pub fn text(&self) -> &str {
        match self {
            Self::Trusted(text) | Self::User(text) => text,
        }
    }
}

/// A model's tokenizer.
pub struct Tokenizer {
    normalizer: Option<NormalizerWrapper>,
    /// For text at the very start, and for text after an added token. They differ where only the start gets a space.
    pre_tokenizers: [Option<PreTokenizerWrapper>; 2],
    model: BPE,
    added: AddedTokens,
    bytes: ByteTable,
    /// Words are found by regular expressions, whose engine gives up on very long texts.
    splits_by_pattern: bool,
    vocab_size: u32,
    bos: Option<TokenId>,
    stop_ids: Vec<TokenId>,
}

impl Tokenizer {
    /// Ids below this are the model's. A few at the end may stand for nothing: models pad their vocabulary.
    pub fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    /// Ids of a user's text. What looks like a control token stays plain text; no BOS is added.
    pub fn encode(&self, text: &str) -> Vec<TokenId> {
        self.encode_texts(&Texts::untrusted(text))
    }

    /// Ids of trusted text: control tokens in it are parsed as such. No BOS is added.
    pub fn encode_with_controls(&self, text: &str) -> Vec<TokenId> {
        self.encode_texts(&Texts::trusted(text))
    }

    /// Ids of a plain prompt: BOS where the model wants one, then the text as by [`encode`](Self::encode).
    pub fn encode_prompt(&self, text: &str) -> Vec<TokenId> {
        self.with_bos(self.encode(text))
    }

    /// Ids of a rendered chat: control tokens count in trusted pieces only, words are split over the whole text. Exactly one
    /// BOS stands in front where the model wants one, whether or not the template wrote it.
    pub fn encode_pieces(&self, pieces: &[Piece]) -> Vec<TokenId> {
        self.with_bos(self.encode_texts(&Texts::from_pieces(pieces)))
    }

    /// The token that the model wants at the start of every prompt; `None` where it wants none.
    pub fn bos(&self) -> Option<TokenId> {
        self.bos
    }

    /// Tokens that end a text: end of text, end of turn. Sorted.
    pub fn stop_ids(&self) -> &[TokenId] {
        &self.stop_ids
    }

    /// The bytes that a token stands for, which may be part of a character; empty for control tokens and unused ids.
    pub fn token_bytes(&self, id: TokenId) -> &[u8] {
        self.bytes.get(id)
    }

    /// Whether a token is a control token, of which clients see nothing.
    pub fn is_control(&self, id: TokenId) -> bool {
        self.added.control_text(id).is_some()
    }

    /// How a control token is written in templates; `None` for any other token.
    pub fn control_text(&self, id: TokenId) -> Option<&str> {
        self.added.control_text(id)
    }

    fn with_bos(&self, mut ids: Vec<TokenId>) -> Vec<TokenId> {
        if let Some(bos) = self.bos {
            let written = ids.iter().take_while(|&&id| id == bos).count();
            match written {
                0 => ids.insert(0, bos),
                n => drop(ids.drain(1..n)),
            }
        }
        ids
    }

    fn encode_texts(&self, texts: &Texts) -> Vec<TokenId> {
        let mut ids = Vec::new();
        let mut start = 0;
        for found in self.added.matches(texts) {
            self.encode_plain(&texts.text[start..found.start], start == 0, &mut ids);
            ids.push(found.id);
            start = found.end;
        }
        self.encode_plain(&texts.text[start..], start == 0, &mut ids);
        ids
    }

    /// Appends the ids of text without added tokens.
    fn encode_plain(&self, text: &str, at_start: bool, ids: &mut Vec<TokenId>) {
        let mut rest = text;
        while self.splits_by_pattern && rest.len() > MAX_PORTION {
            let (portion, after) = rest.split_at(portion_end(rest));
            self.encode_portion(portion, at_start, ids);
            rest = after;
        }
        if !rest.is_empty() {
            self.encode_portion(rest, at_start, ids);
        }
    }

    fn encode_portion(&self, text: &str, at_start: bool, ids: &mut Vec<TokenId>) {
        let words = self.words(text, at_start);
        debug_assert!(words.is_ok(), "rules were checked when the tokenizer was built: {:?}", words.err());
        let Ok(words) = words else { return };
        for (_, _, tokens) in words.get_splits(OffsetReferential::Normalized, OffsetType::None) {
            ids.extend(tokens.iter().flatten().map(|token| TokenId(token.id)));
        }
    }

    fn words(&self, text: &str, at_start: bool) -> tokenizers::Result<PreTokenizedString> {
        let mut normalized = NormalizedString::from(text);
        if let Some(normalizer) = &self.normalizer {
            normalizer.normalize(&mut normalized)?;
        }
        let mut words = PreTokenizedString::from(normalized);
        if let Some(pre_tokenizer) = &self.pre_tokenizers[usize::from(!at_start)] {
            pre_tokenizer.pre_tokenize(&mut words)?;
        }
        words.tokenize(|word| self.model.tokenize(word.get()))?;
        Ok(words)
    }
}

/// Longest text given to the regular expressions at once, in bytes: they may step back over all of a gap that long, and their
/// engine allows ten million steps back.
const MAX_PORTION: usize = 1 << 20;

/// Where to cut a text longer than [`MAX_PORTION`]: between two words, where no rule joins them; failing that, anywhere.
fn portion_end(text: &str) -> usize {
    let end = text.floor_char_boundary(MAX_PORTION);
    let near = text.floor_char_boundary(end.saturating_sub(1 << 16));
    let letter = |c: Option<char>| c.is_some_and(char::is_alphabetic);
    let mut gaps = text[near..end].rmatch_indices(' ').map(|(at, _)| near + at);
    let between =
        |at: &usize| letter(text[..*at].chars().next_back()) && letter(text[at + 1..].chars().next());
    gaps.find(between).filter(|&at| at > 0).unwrap_or(end)
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size)
            .field("bos", &self.bos)
            .field("stop_ids", &self.stop_ids)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
