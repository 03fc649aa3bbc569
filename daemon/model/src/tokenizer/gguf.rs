//! Tokenizers from GGUF metadata.

use std::collections::{BTreeSet, HashMap};

use pagedd_core::TokenId;
use tokenizers::normalizers::{NormalizerWrapper, Prepend, Replace};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{SplitDelimiterBehavior, normalizers};

use super::Tokenizer;
use super::build::{Blueprint, Entry, Kind, ends_text};
use super::bytes::{Spelling, byte_token};
use crate::error::Fault;
use crate::file::SourceFile;
use crate::gguf::Metadata;

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
const MERGES: &str = "tokenizer.ggml.merges";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const SPACE_PREFIX: &str = "tokenizer.ggml.add_space_prefix";
const BOS: &str = "tokenizer.ggml.bos_token_id";
/// Keys of tokens that end a text.
const STOPS: [&str; 3] =
    ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"];

/// The vocabulary's entries and special ids: what tokenizer and chat template both need.
pub(crate) struct GgufVocabulary {
    entries: Vec<Entry>,
    stop_ids: BTreeSet<TokenId>,
    bos: Option<TokenId>,
    eos: Option<TokenId>,
}

impl GgufVocabulary {
    pub(crate) fn read(metadata: &Metadata, file: &SourceFile) -> Result<Self, Fault> {
        let missing = |key| Fault::malformed(key, "the key is missing");
        let texts = metadata.strings(file, TOKENS)?.ok_or_else(|| missing(TOKENS))?;
        let types = metadata.integers(file, TYPES)?.ok_or_else(|| missing(TYPES))?;
        if types.len() != texts.len() {
            let problem = format!("{} types for {} tokens", types.len(), texts.len());
            return Err(Fault::malformed(TYPES, problem));
        }
        let mut entries = Vec::with_capacity(texts.len());
        for (id, (text, ty)) in texts.into_iter().zip(types).enumerate() {
            let kind = match ty {
                1 => Kind::Normal,
                // The token for unknown text takes part in no merge and stands for no bytes.
                2 | 3 => Kind::Control,
                4 => Kind::Added,
                5 => Kind::Unused,
                6 => Kind::Byte,
                _ => return Err(Fault::malformed(TYPES, format_args!("type {ty} of token {id} is unknown"))),
            };
            entries.push(Entry::new(text, kind));
        }
        let count = entries.len();
        let id = |key: &str| match metadata.unsigned(key)? {
            Some(id) if id >= count as u64 => {
                Err(Fault::malformed(key, format_args!("{id}, but there are {count} tokens")))
            }
            id => Ok(id.map(|id| TokenId(id as u32))),
        };
        let bos = id(BOS)?;
        let eos = id(STOPS[0])?;
        let mut stop_ids = BTreeSet::new();
        for key in STOPS {
            stop_ids.extend(id(key)?);
        }
        // Whatever its type says: text must not be able to end a turn or start a text.
        for special in bos.iter().chain(&stop_ids) {
            entries[special.0 as usize].kind = Kind::Control;
        }
        let named = entries.iter().enumerate();
        let named = named.filter(|(_, entry)| entry.kind == Kind::Control && ends_text(&entry.text));
        stop_ids.extend(named.map(|(id, _)| TokenId(id as u32)));
        Ok(Self { entries, stop_ids, bos, eos })
    }

    /// How control tokens are written.
    pub(crate) fn controls(&self) -> Vec<String> {
        self.entries.iter().filter(|e| e.kind == Kind::Control).map(|e| e.text.clone()).collect()
    }

    /// How BOS and EOS are written: templates print them.
    pub(crate) fn bos_and_eos(&self) -> [Option<String>; 2] {
        [self.bos, self.eos].map(|id| id.map(|id| self.entries[id.0 as usize].text.clone()))
    }

    pub(crate) fn tokenizer(
        self,
        metadata: &Metadata,
        file: &SourceFile,
        vocab_size: usize,
    ) -> Result<Tokenizer, Fault> {
        let model = metadata
            .string(file, MODEL, 256)?
            .ok_or_else(|| Fault::malformed(MODEL, "the key is missing"))?;
        let add_bos = metadata.boolean(ADD_BOS)?;
        let plan = match model.as_str() {
            "gpt2" => {
                let pre = metadata.string(file, PRE, 256)?;
                let Rules { pre_tokenizer, ignore_merges, adds_bos } = rules(pre.as_deref())?;
                let merges = metadata.strings(file, MERGES)?;
                let merges = merges.ok_or_else(|| Fault::malformed(MERGES, "the key is missing"))?;
                let merges = merges.iter().enumerate().map(|(i, text)| split_merge(i, text));
                Plan {
                    merges: merges.collect::<Result<_, _>>()?,
                    normalizer: None,
                    pre_tokenizer: Some(pre_tokenizer),
                    spelling: Spelling::ByteLevel,
                    ignore_merges,
                    add_bos: add_bos.unwrap_or(adds_bos),
                }
            }
            "llama" => {
                let scores = metadata.floats(file, SCORES)?;
                let scores = scores.ok_or_else(|| Fault::malformed(SCORES, "the key is missing"))?;
                let prefix = metadata.boolean(SPACE_PREFIX)?.unwrap_or(true);
                Plan {
                    merges: self.merges_by_score(&scores)?,
                    normalizer: Some(spaces(prefix)?),
                    pre_tokenizer: None,
                    spelling: Spelling::SentencePiece,
                    ignore_merges: false,
                    add_bos: add_bos.unwrap_or(true),
                }
            }
            other => {
                return Err(Fault::unsupported(MODEL, format_args!("{other:?}; gpt2 and llama are served")));
            }
        };
        let bos = match (plan.add_bos, self.bos) {
            (false, _) => None,
            (true, Some(bos)) => Some(bos),
            (true, None) => {
                return Err(Fault::malformed(BOS, "the key is missing, and the model wants a BOS"));
            }
        };
        Blueprint {
            vocab_size,
            entries: self.entries,
            merges: plan.merges,
            merges_key: MERGES,
            normalizer: plan.normalizer,
            pre_tokenizers: [plan.pre_tokenizer.clone(), plan.pre_tokenizer],
            spelling: plan.spelling,
            ignore_merges: plan.ignore_merges,
            bos,
            stop_ids: self.stop_ids,
        }
        .build()
    }

    /// `SentencePiece` merges the neighbours whose union has the best score. As ranked merges: every split of every piece into
    /// two pieces, by score of the whole, then by id.
    fn merges_by_score(&self, scores: &[f32]) -> Result<Vec<(String, String)>, Fault> {
        if scores.len() != self.entries.len() {
            let problem = format!("{} scores for {} tokens", scores.len(), self.entries.len());
            return Err(Fault::malformed(SCORES, problem));
        }
        let bytes: BTreeSet<u8> = self
            .entries
            .iter()
            .filter(|e| e.kind == Kind::Byte)
            .filter_map(|e| byte_token(&e.text))
            .collect();
        if bytes.len() != 256 {
            let problem = format!("{} of 256 byte tokens; without them text would be lost", bytes.len());
            return Err(Fault::unsupported(TOKENS, problem));
        }
        let pieces = || self.entries.iter().enumerate().filter(|(_, e)| e.kind == Kind::Normal);
        let ids: HashMap<&str, usize> = pieces().map(|(id, e)| (e.text.as_str(), id)).collect();
        let mut ranked = Vec::new();
        for (id, entry) in pieces() {
            let text = entry.text.as_str();
            for (middle, _) in text.char_indices().skip(1) {
                let (left, right) = text.split_at(middle);
                if let (Some(&l), Some(&r)) = (ids.get(left), ids.get(right)) {
                    ranked.push((id, l, r));
                }
            }
        }
        ranked.sort_by(|a, b| scores[b.0].total_cmp(&scores[a.0]).then(a.cmp(b)));
        let text = |id: usize| self.entries[id].text.clone();
        Ok(ranked.into_iter().map(|(_, l, r)| (text(l), text(r))).collect())
    }
}

struct Plan {
    merges: Vec<(String, String)>,
    normalizer: Option<NormalizerWrapper>,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    spelling: Spelling,
    ignore_merges: bool,
    add_bos: bool,
}

/// `left right`. Neither side has a space: it is spelt `Ġ`. A space at the very front belongs to the left side.
fn split_merge(index: usize, text: &str) -> Result<(String, String), Fault> {
    let first = text.chars().next().map_or(0, char::len_utf8);
    match text[first..].split_once(' ') {
        Some((left, right)) if !right.is_empty() => {
            Ok((format!("{}{left}", &text[..first]), right.to_owned()))
        }
        _ => Err(Fault::malformed(MERGES, format_args!("merge {index} is no pair: {text:?}"))),
    }
}

/// `SentencePiece` writes spaces as `▁`, and one in front of the text and after each control token.
fn spaces(prefix: bool) -> Result<NormalizerWrapper, Fault> {
    let replace = Replace::new(" ", "▁").map_err(|e| Fault::unsupported(MODEL, e))?;
    Ok(if prefix {
        let steps = vec![Prepend::new("▁".into()).into(), replace.into()];
        normalizers::Sequence::new(steps).into()
    } else {
        replace.into()
    })
}

/// How a byte-level vocabulary splits text into words.
struct Rules {
    pre_tokenizer: PreTokenizerWrapper,
    ignore_merges: bool,
    adds_bos: bool,
}

fn rules(pre: Option<&str>) -> Result<Rules, Fault> {
    const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
    const DEFAULT: [&str; 4] = [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"];
    let bytes = |use_regex| PreTokenizerWrapper::from(ByteLevel::new(false, true, use_regex));
    let plain =
        |steps| Rules { pre_tokenizer: Sequence::new(steps).into(), ignore_merges: false, adds_bos: false };
    match pre {
        Some("smollm") => Ok(plain(vec![Digits::new(true).into(), bytes(true)])),
        Some("qwen2") => Ok(plain(vec![split(QWEN2)?, bytes(false)])),
        Some("llama-bpe" | "llama3" | "llama-v3") => {
            Ok(Rules { ignore_merges: true, adds_bos: true, ..plain(vec![split(LLAMA3)?, bytes(false)]) })
        }
        Some("gpt-2") => Ok(plain(vec![bytes(true)])),
        Some("default") | None => {
            let mut steps = DEFAULT.into_iter().map(split).collect::<Result<Vec<_>, _>>()?;
            steps.push(bytes(false));
            Ok(plain(steps))
        }
        Some(other) => {
            let problem = format!("{other:?}; smollm, qwen2, llama-bpe, gpt-2 and default are served");
            Err(Fault::unsupported(PRE, problem))
        }
    }
}

fn split(pattern: &str) -> Result<PreTokenizerWrapper, Fault> {
    let pattern = SplitPattern::Regex(pattern.to_owned());
    Split::new(pattern, SplitDelimiterBehavior::Isolated, false)
        .map(Into::into)
        .map_err(|e| Fault::unsupported(PRE, e))
}
