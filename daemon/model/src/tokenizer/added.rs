//! Tokens that are found in text as they are written, before words are split: control tokens, and added plain ones.

use std::collections::BTreeMap;
use std::ops::Range;

use pagedd_core::TokenId;

use super::Piece;

/// A token that is found as it is written.
#[derive(Clone, Debug)]
pub(super) struct AddedToken {
    pub id: TokenId,
    pub text: String,
    /// Found in trusted text only.
    pub control: bool,
    /// Takes the white space before it along.
    pub left_strip: bool,
    /// Takes the white space after it along.
    pub right_strip: bool,
}

/// The added tokens of a vocabulary.
#[derive(Debug)]
pub(super) struct AddedTokens {
    /// By first byte; longest first.
    by_byte: BTreeMap<u8, Vec<AddedToken>>,
    controls: BTreeMap<TokenId, String>,
}

/// A whole text, and which stretches of it are trusted.
pub(super) struct Texts {
    pub text: String,
    /// Ascending, not touching.
    trusted: Vec<Range<usize>>,
}

/// An added token in a text, `[start, end)` in bytes.
pub(super) struct Match {
    pub start: usize,
    pub end: usize,
    pub id: TokenId,
}

impl Texts {
    pub(super) fn trusted(text: &str) -> Self {
        Self { text: text.to_owned(), trusted: std::iter::once(0..text.len()).collect() }
    }

    pub(super) fn untrusted(text: &str) -> Self {
        Self { text: text.to_owned(), trusted: Vec::new() }
    }

    pub(super) fn from_pieces(pieces: &[Piece]) -> Self {
        let mut text = String::new();
        let mut trusted: Vec<Range<usize>> = Vec::new();
        for piece in pieces {
            let start = text.len();
            text.push_str(piece.text());
            if matches!(piece, Piece::Trusted(_)) {
                match trusted.last_mut() {
                    Some(last) if last.end == start => last.end = text.len(),
                    _ => trusted.push(start..text.len()),
                }
            }
        }
        Self { text, trusted }
    }
}

impl AddedTokens {
    pub(super) fn new(tokens: Vec<AddedToken>) -> Self {
        let mut by_byte: BTreeMap<u8, Vec<AddedToken>> = BTreeMap::new();
        let mut controls = BTreeMap::new();
        for token in tokens {
            if token.control {
                controls.insert(token.id, token.text.clone());
            }
            if let Some(&first) = token.text.as_bytes().first() {
                by_byte.entry(first).or_default().push(token);
            }
        }
        for tokens in by_byte.values_mut() {
            tokens.sort_by_key(|t| std::cmp::Reverse(t.text.len()));
        }
        Self { by_byte, controls }
    }

    pub(super) fn control_text(&self, id: TokenId) -> Option<&str> {
        self.controls.get(&id).map(String::as_str)
    }

    /// Leftmost matches, of those at one place the longest.
    pub(super) fn matches(&self, texts: &Texts) -> Vec<Match> {
        let text = texts.text.as_str();
        let mut found = Vec::new();
        let mut trusted = texts.trusted.iter().peekable();
        let (mut at, mut free) = (0, 0);
        while let Some(&byte) = text.as_bytes().get(at) {
            while trusted.next_if(|range| range.end <= at).is_some() {}
            let limit = trusted.peek().filter(|range| range.start <= at).map_or(at, |range| range.end);
            let candidates = self.by_byte.get(&byte).map_or(&[][..], Vec::as_slice);
            let hit = candidates.iter().find(|token| {
                let fits = !token.control || at + token.text.len() <= limit;
                fits && text.as_bytes()[at..].starts_with(token.text.as_bytes())
            });
            let Some(token) = hit else {
                at += 1;
                continue;
            };
            let (mut start, mut end) = (at, at + token.text.len());
            if token.left_strip {
                start = free + text[free..start].trim_end().len();
            }
            if token.right_strip {
                end = text.len() - text[end..].trim_start().len();
            }
            found.push(Match { start, end, id: token.id });
            (at, free) = (end, end);
        }
        found
    }
}
