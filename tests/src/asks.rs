//! Requests of a mixed load, and what each came to.
//!
//! **Owns** the mix: prompts of all lengths, some with one beginning; greedy and seeded; one choice and four; stop strings;
//! streamed and whole. **Never** leaves anything to chance that a second run would draw anew: a request has one answer.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::random::Random;

/// Beginnings that requests share.
const BEGINNINGS: u64 = 4;

const WORDS: [&str; 24] = [
    "the",
    "lighthouse",
    "keeper",
    "climbed",
    "every",
    "evening",
    "over",
    "a",
    "quiet",
    "sea",
    "and",
    "he",
    "saw",
    "ships",
    "that",
    "hello",
    "in",
    "no",
    "harbour",
    "would",
    "ever",
    "call",
    "their",
    "own",
];

/// What a mix is made for.
#[derive(Clone, Copy, Debug)]
pub struct Mix<'a> {
    /// The model's name.
    pub model: &'a str,
    /// Most words of a prompt.
    pub words: u64,
    /// Most tokens of a choice; half of it is the least.
    pub tokens: u64,
}

/// How an answer is wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// As events.
    Stream,
    /// At once.
    Whole,
}

/// One request.
#[derive(Clone, Debug)]
pub struct Ask {
    /// Its body.
    pub body: Value,
    /// How its answer is wanted.
    pub form: Form,
    /// Choices.
    pub n: u64,
    /// Most tokens of a choice.
    pub tokens: u64,
    /// Some choice ends at a stop string. What the engine computed beyond it, before it heard of it, is nobody's to know.
    pub stops: bool,
}

impl Ask {
    fn new(mix: Mix<'_>, prompt: &str, tokens: u64) -> Self {
        let body = json!({
            "model": mix.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true,
            "stream": true, "stream_options": {"include_usage": true},
        });
        Self { body, form: Form::Stream, n: 1, tokens, stops: false }
    }

    /// A greedy stream of just so many tokens, after a prompt of about so many words.
    pub fn plain(mix: Mix<'_>, random: &mut Random, words: u64, tokens: u64) -> Self {
        Self::new(mix, &prompt(random, words), tokens)
    }

    /// With so many choices, drawn by a seed.
    #[must_use]
    pub fn with_choices(mut self, n: u64, seed: u64) -> Self {
        self.n = n;
        self.body["n"] = json!(n);
        self.body["seed"] = json!(seed);
        self.body["temperature"] = json!(0.9);
        self
    }

    /// The answer comes at once.
    #[must_use]
    pub fn whole(mut self) -> Self {
        self.form = Form::Whole;
        let fields = self.body.as_object_mut().expect("an object");
        fields.remove("stream");
        fields.remove("stream_options");
        self
    }

    /// Nobody waits for the answer: its state is asked for until it is there.
    #[must_use]
    pub fn background(self) -> Self {
        let mut ask = self.whole();
        ask.body["background"] = json!(true);
        ask
    }

    /// The same, ended by what the first choice says after two thirds of its answer.
    #[must_use]
    pub fn stopped(mut self, answer: &Outcome) -> Self {
        let text: Vec<char> = answer.text(0).chars().collect();
        let at = text.len() * 2 / 3;
        let stop: String = text[at..(at + 3).min(text.len())].iter().collect();
        if !stop.is_empty() {
            self.body["stop"] = json!([stop]);
            self.stops = true;
        }
        self
    }
}

fn words(random: &mut Random, count: u64) -> String {
    let words: Vec<&str> = (0..count).map(|_| WORDS[random.below(WORDS.len() as u64) as usize]).collect();
    words.join(" ")
}

fn prompt(random: &mut Random, count: u64) -> String {
    if random.below(2) == 0 {
        return words(random, count.max(1));
    }
    // Every beginning is the same in all requests, and different from the others from the first word on.
    let number = random.below(BEGINNINGS);
    let beginning = words(&mut Random::new(number), (count / 2).max(8));
    format!("Chapter {number}. {beginning} {}", words(random, count / 2 + 1))
}

/// `count` requests, all kinds in turn.
pub fn asks(mix: Mix<'_>, random: &mut Random, count: u64) -> Vec<Ask> {
    let ask = |i: u64, random: &mut Random| {
        // Most prompts are short; every eighth may have the full length.
        let most = if i % 8 == 7 { mix.words } else { mix.words.min(40) };
        let count = 1 + random.below(most);
        let tokens = mix.tokens / 2 + random.below(mix.tokens / 2 + 1);
        let mut ask = Ask::plain(mix, random, count, tokens);
        ask = match i % 4 {
            0 => ask,
            1 => ask.with_choices(1, random.next_u64() >> 1),
            2 => ask.with_choices(4, random.next_u64() >> 1),
            _ => {
                ask.body["ignore_eos"] = json!(false);
                ask
            }
        };
        if i % 5 == 4 { ask.whole() } else { ask }
    };
    (0..count).map(|i| ask(i, random)).collect()
}

/// A part of a choice, as an event carries it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Its event's id, where it follows from the request alone: where there is one choice.
    pub id: Option<u64>,
    /// Its text.
    pub text: String,
}

/// One choice.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Choice {
    /// Its parts; a whole answer is one.
    pub pieces: Vec<Piece>,
    /// Why it ended.
    pub finish: Option<String>,
}

/// What a request came to.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Outcome {
    /// By their numbers.
    pub choices: BTreeMap<u64, Choice>,
    /// Tokens of the prompt and of all choices.
    pub usage: Option<[u64; 2]>,
    /// Id of the last event, where it follows from the request alone.
    pub last: Option<u64>,
}

impl Outcome {
    /// Text of a choice.
    pub fn text(&self, choice: u64) -> String {
        self.choices
            .get(&choice)
            .map(|c| c.pieces.iter().map(|p| p.text.as_str()).collect())
            .unwrap_or_default()
    }

    /// Adds what an event or a whole answer says.
    pub fn add(&mut self, ask: &Ask, id: Option<u64>, said: &Value) {
        for part in said["choices"].as_array().into_iter().flatten() {
            let choice = self.choices.entry(part["index"].as_u64().unwrap_or(u64::MAX)).or_default();
            let text = part["text"].as_str().unwrap_or_default().to_owned();
            choice.pieces.push(Piece { id: id.filter(|_| ask.n == 1), text });
            if let Some(finish) = part["finish_reason"].as_str() {
                choice.finish = Some(finish.to_owned());
            }
        }
        if let Some(usage) = said.get("usage").filter(|usage| usage.is_object()) {
            let number = |name: &str| usage[name].as_u64().unwrap_or(u64::MAX);
            self.usage = Some([number("prompt_tokens"), number("completion_tokens")]);
            self.last = id.filter(|_| !ask.stops);
        }
    }

    /// Whether both are the same answer, one of which may have come at once and the other in parts.
    pub fn says_the_same(&self, other: &Self) -> bool {
        let finishes = |o: &Self| o.choices.values().map(|c| c.finish.clone()).collect::<Vec<_>>();
        self.usage == other.usage
            && finishes(self) == finishes(other)
            && self.choices.keys().eq(other.choices.keys())
            && self.choices.keys().all(|choice| self.text(*choice) == other.text(*choice))
    }
}
