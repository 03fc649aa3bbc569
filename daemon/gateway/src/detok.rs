//! Token bytes to text: UTF-8 put together again.
//!
//! **Owns** the bytes of one choice that are no whole character yet. **Never** replaces bytes that later ones could complete.

/// Reassembles the text of one choice from the raw bytes of its tokens.
///
/// A character may be spread over several tokens. What this gives out, over all calls, is the text that
/// [`String::from_utf8_lossy`] makes of all bytes at once.
#[derive(Default, Debug)]
pub struct Detok {
    /// An unfinished character: at most 3 bytes between calls.
    pending: Vec<u8>,
}

impl Detok {
    /// Appends to `out` what `bytes` complete.
    pub fn push(&mut self, bytes: &[u8], out: &mut String) {
        self.pending.extend_from_slice(bytes);
        let mut start = 0;
        loop {
            match std::str::from_utf8(&self.pending[start..]) {
                Ok(text) => {
                    out.push_str(text);
                    self.pending.clear();
                    return;
                }
                Err(error) => {
                    let valid = start + error.valid_up_to();
                    if let Ok(text) = std::str::from_utf8(&self.pending[start..valid]) {
                        out.push_str(text);
                    }
                    let Some(invalid) = error.error_len() else {
                        self.pending.drain(..valid);
                        return;
                    };
                    out.push(char::REPLACEMENT_CHARACTER);
                    start = valid + invalid;
                }
            }
        }
    }

    /// No byte follows: a character that is still unfinished becomes U+FFFD.
    pub fn finish(&mut self, out: &mut String) {
        if !self.pending.is_empty() {
            out.push(char::REPLACEMENT_CHARACTER);
            self.pending.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pieces(tokens: &[&[u8]]) -> Vec<String> {
        let mut detok = Detok::default();
        let mut out: Vec<String> = tokens
            .iter()
            .map(|bytes| {
                let mut text = String::new();
                detok.push(bytes, &mut text);
                text
            })
            .collect();
        let mut rest = String::new();
        detok.finish(&mut rest);
        out.push(rest);
        out
    }

    #[test]
    fn bug_7_an_emoji_of_four_tokens_appears_whole_with_its_last_byte() {
        let bytes = "🤣".as_bytes();
        let tokens: Vec<&[u8]> = bytes.chunks(1).collect();
        assert_eq!(pieces(&tokens), ["", "", "", "🤣", ""]);
    }

    #[test]
    fn bug_7_chinese_cut_inside_characters_is_complete() {
        let bytes = "你好".as_bytes();
        assert_eq!(pieces(&[&bytes[..2], &bytes[2..4], &bytes[4..]]), ["", "你", "好", ""]);
    }

    #[test]
    fn bug_7_an_unfinished_character_becomes_a_replacement_only_at_the_end() {
        assert_eq!(pieces(&[b"a", &"🤣".as_bytes()[..3]]), ["a", "", "\u{FFFD}"]);
    }

    #[test]
    fn bytes_that_can_be_no_character_are_replaced_at_once() {
        assert_eq!(pieces(&[b"a\xff", b"\xe4b"]), ["a\u{FFFD}", "\u{FFFD}b", ""]);
    }

    proptest! {
        #[test]
        fn the_text_does_not_depend_on_where_tokens_are_cut(
            text in "[a-c你好🤣é]{0,20}",
            noise in prop::collection::vec(any::<u8>(), 0..6),
            cut in 1_usize..5,
        ) {
            let mut bytes = text.into_bytes();
            bytes.extend(noise);
            let tokens: Vec<&[u8]> = bytes.chunks(cut).collect();
            prop_assert_eq!(pieces(&tokens).concat(), String::from_utf8_lossy(&bytes));
        }
    }
}
