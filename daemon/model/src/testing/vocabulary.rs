//! A byte-level vocabulary with a few merges, three control tokens and a ChatML template.

use std::collections::HashSet;

use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use super::random::Random;

/// Entries of the vocabulary: 256 bytes, 8 merged, 3 control tokens, 5 that stand for nothing.
pub const VOCAB: usize = 272;
/// Start of a message, and BOS where a model is told to have one.
pub const IM_START: u32 = 265;
/// End of a message: the stop token.
pub const IM_END: u32 = 266;

/// ChatML.
pub const CHAT_TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

const CONTROLS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
const MERGES: [(&str, &str); 8] =
    [("h", "e"), ("Ġ", "t"), ("Ġt", "he"), ("i", "n"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "Ġ")];

/// An entry: its text and its GGUF type.
pub(super) fn tokens() -> Vec<(String, i32)> {
    let mut alphabet: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let bytes = alphabet.into_iter().map(|c| (c.to_string(), 1));
    let merged = MERGES.iter().map(|(left, right)| (format!("{left}{right}"), 1));
    let controls = CONTROLS.iter().map(|text| ((*text).to_owned(), 3));
    let mut tokens: Vec<_> = bytes.chain(merged).chain(controls).collect();
    tokens.extend((tokens.len()..VOCAB).map(|id| (format!("[unused {id}]"), 5)));
    tokens
}

pub(super) fn merges() -> Vec<String> {
    MERGES.iter().map(|(left, right)| format!("{left} {right}")).collect()
}

/// Entries and merges of a vocabulary as large as those of models in use: all bytes, then pieces of two entries before, of up to 12 characters. A
/// piece may come of several merges, as theirs do. The control tokens are the last three entries.
pub(super) fn large(seed: u64, entries: usize, merges: usize) -> (Vec<(String, i32)>, Vec<String>) {
    const LONGEST: usize = 12;
    let mut random = Random::new(seed).branch("vocabulary");
    let mut alphabet: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let mut texts: Vec<String> = alphabet.iter().map(char::to_string).collect();
    let mut lines = Vec::with_capacity(merges);
    let mut known: HashSet<String> = texts.iter().cloned().collect();
    while texts.len() < entries - CONTROLS.len() {
        let mut piece = || texts[(random.next_u64() % texts.len() as u64) as usize].clone();
        let (left, right) = (piece(), piece());
        let text = format!("{left}{right}");
        if text.chars().count() <= LONGEST && known.insert(text.clone()) {
            lines.push(format!("{left} {right}"));
            texts.push(text);
        }
    }
    // The other ways to the same pieces.
    let others = texts
        .iter()
        .flat_map(|text| text.char_indices().skip(1).map(move |(at, _)| (&text[..at], &text[at..])));
    let first: HashSet<String> = lines.iter().cloned().collect();
    let others = others
        .filter(|(left, right)| known.contains(*left) && known.contains(*right))
        .map(|(left, right)| format!("{left} {right}"))
        .filter(|line| !first.contains(line));
    let room = merges.saturating_sub(lines.len());
    let others: Vec<String> = others.take(room).collect();
    lines.extend(others);
    let normal = texts.into_iter().map(|text| (text, 1));
    let controls = CONTROLS.iter().map(|text| ((*text).to_owned(), 3));
    (normal.chain(controls).collect(), lines)
}
