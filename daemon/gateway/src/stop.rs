//! Stop strings in a text that arrives piece by piece.
//!
//! **Owns** the text of one choice that may be the beginning of a stop string. **Never** gives out a byte of a stop string, and
//! never holds back a byte that cannot be part of one.
//!
//! The cut does not depend on where the pieces end: it is at the stop string that is complete first, and of those that are
//! complete at the same character, at the longest. Each string is searched as in Knuth, Morris and Pratt (1977): constant work
//! per byte, whatever the text.

/// The longest stop string, in bytes.
pub const MAX_STOP: usize = 1024;

/// The stop strings of a request. Empty ones are left out.
#[derive(Default, Debug)]
pub struct StopStrings {
    patterns: Vec<Pattern>,
}

#[derive(Debug)]
struct Pattern {
    bytes: Box<[u8]>,
    /// `border[i]`: length of the longest proper prefix of `bytes[..=i]` that is also its suffix.
    border: Box<[usize]>,
}

impl Pattern {
    fn new(bytes: &[u8]) -> Self {
        let mut border = vec![0; bytes.len()];
        let mut matched = 0;
        for i in 1..bytes.len() {
            while matched > 0 && bytes[i] != bytes[matched] {
                matched = border[matched - 1];
            }
            matched += usize::from(bytes[i] == bytes[matched]);
            border[i] = matched;
        }
        Self { bytes: bytes.into(), border: border.into() }
    }

    /// How much of the pattern the text ends with, once `byte` is added to a text that ended with `matched` of it.
    fn advance(&self, mut matched: usize, byte: u8) -> usize {
        if matched == self.bytes.len() {
            matched = self.border[matched - 1];
        }
        while matched > 0 && self.bytes[matched] != byte {
            matched = self.border[matched - 1];
        }
        matched + usize::from(self.bytes[matched] == byte)
    }
}

impl StopStrings {
    /// Prepares the search.
    #[must_use]
    pub fn new(strings: &[String]) -> Self {
        let patterns = strings.iter().filter(|s| !s.is_empty()).map(|s| Pattern::new(s.as_bytes())).collect();
        Self { patterns }
    }
}

/// The search in the text of one choice.
#[derive(Debug)]
pub struct StopScan {
    /// How much of each pattern the text ends with.
    matched: Vec<usize>,
    /// Text that is held back: the longest of those ends.
    held: String,
}

impl StopScan {
    /// A search that has seen no text.
    #[must_use]
    pub fn new(stops: &StopStrings) -> Self {
        Self { matched: vec![0; stops.patterns.len()], held: String::new() }
    }

    /// Takes more text, appends to `out` what can be shown, and returns whether a stop string is complete: the choice ends
    /// there, and no text of it may be pushed again.
    #[must_use]
    pub fn push(&mut self, stops: &StopStrings, text: &str, out: &mut String) -> bool {
        if stops.patterns.is_empty() {
            out.push_str(text);
            return false;
        }
        let before = self.held.len();
        self.held.push_str(text);
        for (i, byte) in text.bytes().enumerate() {
            let mut longest = None;
            for (pattern, matched) in stops.patterns.iter().zip(&mut self.matched) {
                *matched = pattern.advance(*matched, byte);
                if *matched == pattern.bytes.len() {
                    longest = longest.max(Some(*matched));
                }
            }
            if let Some(length) = longest {
                out.push_str(&self.held[..before + i + 1 - length]);
                self.held.clear();
                return true;
            }
        }
        let keep = self.matched.iter().max().copied().unwrap_or(0);
        let shown = self.held.len() - keep;
        out.push_str(&self.held[..shown]);
        self.held.drain(..shown);
        false
    }

    /// No text follows: what was held back is no stop string.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, bool) {
        let stops = StopStrings::new(&stops.iter().map(ToString::to_string).collect::<Vec<_>>());
        let mut scan = StopScan::new(&stops);
        let mut shown = Vec::new();
        for piece in pieces {
            let mut out = String::new();
            let stopped = scan.push(&stops, piece, &mut out);
            shown.push(out);
            if stopped {
                return (shown, true);
            }
        }
        let mut out = String::new();
        scan.finish(&mut out);
        shown.push(out);
        (shown, false)
    }

    /// The same said plainly: cut the whole text at the stop string that ends first, the longest of those.
    fn plain(stops: &[String], text: &str) -> (String, bool) {
        let ends = text.char_indices().map(|(i, c)| i + c.len_utf8());
        for end in ends {
            let found = stops.iter().filter(|s| !s.is_empty() && text[..end].ends_with(s.as_str()));
            if let Some(stop) = found.max_by_key(|s| s.len()) {
                return (text[..end - stop.len()].to_owned(), true);
            }
        }
        (text.to_owned(), false)
    }

    #[test]
    fn bug_6_a_stop_string_over_three_tokens_does_not_leak_its_beginning() {
        let (shown, stopped) = run(&["\n\nUser:"], &["Yes.", "\n\n", "User", ":", " more"]);
        assert!(stopped);
        assert_eq!(shown, ["Yes.", "", "", ""]);
    }

    #[test]
    fn bug_6_text_before_a_stop_string_in_one_token_is_complete() {
        assert_eq!(run(&["END"], &["abcENDdef"]), (vec!["abc".to_owned()], true));
    }

    #[test]
    fn bug_6_held_text_that_is_no_stop_string_is_shown_later() {
        let (shown, stopped) = run(&["\n\nUser:"], &["a\n\n", "Us", "ing"]);
        assert!(!stopped);
        assert_eq!(shown, ["a", "", "\n\nUsing", ""]);
    }

    #[test]
    fn bug_6_held_text_at_the_end_is_not_lost() {
        assert_eq!(run(&["stop"], &["a sto"]).0.concat(), "a sto");
    }

    #[test]
    fn a_stop_string_that_overlaps_itself_is_found() {
        assert_eq!(run(&["aab"], &["aa", "ab"]).0.concat(), "a");
    }

    proptest! {
        #[test]
        fn bug_6_the_cut_is_where_a_plain_search_finds_it_however_the_text_is_cut(
            text in "[ab你🤣]{0,30}",
            stops in prop::collection::vec("[ab你🤣]{0,4}", 0..4),
            cuts in prop::collection::vec(1_usize..5, 1..31),
        ) {
            let mut pieces = Vec::new();
            let chars: Vec<char> = text.chars().collect();
            let mut rest = chars.as_slice();
            for cut in cuts.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (piece, left) = rest.split_at((*cut).min(rest.len()));
                pieces.push(piece.iter().collect::<String>());
                rest = left;
            }
            let stop_refs: Vec<&str> = stops.iter().map(String::as_str).collect();
            let piece_refs: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let (shown, stopped) = run(&stop_refs, &piece_refs);
            prop_assert_eq!((shown.concat(), stopped), plain(&stops, &text));
        }
    }
}
