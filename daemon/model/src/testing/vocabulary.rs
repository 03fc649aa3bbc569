//! A byte-level vocabulary with a few merges, three control tokens and a ChatML template.

use tokenizers::pre_tokenizers::byte_level::ByteLevel;

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
