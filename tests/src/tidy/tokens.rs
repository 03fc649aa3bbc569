//! Rust source cut into words: comments and literals are left out, so that a rule about code never trips over prose.
//!
//! **Owns** just enough of the lexical grammar for that. **Never** parses.

/// A word or a mark of the code.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Token {
    /// An identifier, `::`, or one other character.
    pub text: String,
    /// Line, from 1.
    pub line: usize,
}

impl Token {
    /// Whether it is a word.
    pub fn is_word(&self) -> bool {
        self.text.starts_with(|c: char| c.is_alphabetic() || c == '_')
    }
}

/// Cuts `source` into tokens.
pub fn tokens(source: &str) -> Vec<Token> {
    let chars: Vec<char> = source.chars().collect();
    let mut found = Vec::new();
    let (mut at, mut line) = (0, 1);
    while at < chars.len() {
        let end = skip_blank(&chars, at);
        if end > at {
            line += chars[at..end].iter().filter(|c| **c == '\n').count();
            at = end;
            continue;
        }
        let start = at;
        let c = chars[at];
        if c.is_alphabetic() || c == '_' {
            while at < chars.len() && (chars[at].is_alphanumeric() || chars[at] == '_') {
                at += 1;
            }
        } else if c.is_ascii_digit() {
            // `1e5` or `0xff_u8` is one token, and no word.
            while at < chars.len() && (chars[at].is_alphanumeric() || chars[at] == '_') {
                at += 1;
            }
        } else if c == ':' && chars.get(at + 1) == Some(&':') {
            at += 2;
        } else {
            at += 1;
        }
        found.push(Token { text: chars[start..at].iter().collect(), line });
    }
    found
}

/// End of the blank, comment or literal that begins at `at`; `at` itself where none does.
fn skip_blank(chars: &[char], at: usize) -> usize {
    let next = |i: usize| chars.get(at + i).copied();
    match (chars[at], next(1)) {
        (c, _) if c.is_whitespace() => at + 1,
        ('/', Some('/')) => find(chars, at, |c| c == '\n'),
        ('/', Some('*')) => skip_block_comment(chars, at),
        ('"', _) => skip_string(chars, at + 1),
        ('b' | 'c', Some('"')) => skip_string(chars, at + 2),
        ('r', Some('"' | '#')) if starts_raw(chars, at + 1) => skip_raw(chars, at + 1),
        ('b' | 'c', Some('r')) if starts_raw(chars, at + 2) => skip_raw(chars, at + 2),
        ('\'', _) => skip_quote(chars, at),
        _ => at,
    }
}

fn find(chars: &[char], from: usize, matches: impl Fn(char) -> bool) -> usize {
    chars[from..].iter().position(|c| matches(*c)).map_or(chars.len(), |n| from + n)
}

fn skip_block_comment(chars: &[char], start: usize) -> usize {
    let (mut depth, mut at) = (0, start);
    while at < chars.len() {
        match (chars[at], chars.get(at + 1)) {
            ('/', Some('*')) => (depth, at) = (depth + 1, at + 2),
            ('*', Some('/')) => {
                (depth, at) = (depth - 1, at + 2);
                if depth == 0 {
                    return at;
                }
            }
            _ => at += 1,
        }
    }
    at
}

fn skip_string(chars: &[char], from: usize) -> usize {
    let mut at = from;
    while at < chars.len() {
        match chars[at] {
            '\\' => at += 2,
            '"' => return at + 1,
            _ => at += 1,
        }
    }
    chars.len()
}

fn starts_raw(chars: &[char], at: usize) -> bool {
    chars.get(find(chars, at.min(chars.len()), |c| c != '#')) == Some(&'"')
}

fn skip_raw(chars: &[char], at: usize) -> usize {
    let open = find(chars, at, |c| c != '#');
    let hashes = open - at;
    let mut end = open + 1;
    while end < chars.len() {
        if chars[end] == '"' && chars[end + 1..].iter().take(hashes).filter(|c| **c == '#').count() == hashes
        {
            return end + 1 + hashes;
        }
        end += 1;
    }
    end
}

/// A character literal is left out; a lifetime loses only its quote.
fn skip_quote(chars: &[char], at: usize) -> usize {
    match (chars.get(at + 1), chars.get(at + 2)) {
        (Some('\\'), _) => find(chars, at + 3, |c| c == '\'') + 1,
        (Some(_), Some('\'')) => at + 3,
        _ => at + 1,
    }
}

/// The modules of `std` and `core` that the code names, each with its line: `std::time::Instant` and
/// `use std::{time, fs::File}` name `time` and `fs`.
pub fn std_modules(tokens: &[Token]) -> Vec<Token> {
    let mut found = Vec::new();
    for (i, token) in tokens.iter().enumerate() {
        let starts = (token.text == "std" || token.text == "core" || token.text == "alloc")
            && tokens.get(i + 1).is_some_and(|t| t.text == "::")
            && (i == 0 || tokens[i - 1].text != "::" || i < 2 || !tokens[i - 2].is_word());
        if !starts {
            continue;
        }
        match tokens.get(i + 2) {
            Some(t) if t.is_word() => found.push(t.clone()),
            Some(t) if t.text == "{" => group_heads(&tokens[i + 3..], &mut found),
            _ => {}
        }
    }
    found
}

/// The first word of each item of a `use` group whose `{` was just passed.
fn group_heads(tokens: &[Token], found: &mut Vec<Token>) {
    let (mut depth, mut head) = (1, true);
    for token in tokens {
        match token.text.as_str() {
            "{" => depth += 1,
            "}" => depth -= 1,
            "," if depth == 1 => {
                head = true;
                continue;
            }
            _ if head && depth == 1 && token.is_word() => found.push(token.clone()),
            _ => {}
        }
        head = false;
        if depth == 0 {
            return;
        }
    }
}
