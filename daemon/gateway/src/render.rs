//! From a request's log to what its client sees.
//!
//! **Owns** the text state of every choice. **Never** looks at a clock, a socket or anything but the request's context and its
//! log, entry by entry: whoever renders the same log gets the same events with the same ids.

use std::sync::Arc;

use pagedd_wire::gateway::{Entry, Finish};
use serde::{Deserialize, Serialize};

use crate::detok::Detok;
use crate::openai::request::{Form, Kind};
use crate::stop::{StopScan, StopStrings};
use crate::text::Text;

/// What is kept with a request to render its answer again, in this process or in a later one.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Context {
    /// Which endpoint it came to.
    pub kind: Kind,
    /// The model's name at that time.
    pub model: String,
    /// Stop strings.
    pub stop: Vec<String>,
    /// Stop tokens are tokens like others.
    pub ignore_eos: bool,
    /// How the answer comes.
    pub form: Form,
    /// It runs on when its client leaves.
    pub resumable: bool,
}

/// The context is no [`Context`]: it was written by another version.
#[derive(thiserror::Error, Clone, Copy, PartialEq, Eq, Debug)]
#[error("the request was made by another version of the server")]
pub struct ForeignContext;

impl Context {
    const VERSION: u8 = 1;

    /// As bytes.
    ///
    /// # Errors
    /// Never in practice: every part has an encoding.
    pub fn encode(&self) -> Result<Vec<u8>, postcard::Error> {
        postcard::to_stdvec(&(Self::VERSION, self))
    }

    /// Reads what [`encode`](Self::encode) wrote.
    ///
    /// # Errors
    /// [`ForeignContext`].
    pub fn decode(bytes: &[u8]) -> Result<Self, ForeignContext> {
        match bytes.split_first() {
            Some((&Self::VERSION, rest)) => postcard::from_bytes(rest).map_err(|_| ForeignContext),
            _ => Err(ForeignContext),
        }
    }
}

/// Why a choice ended well.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// A stop token or a stop string.
    Stop,
    /// The limit of tokens.
    Length,
}

impl Reason {
    /// As in `finish_reason`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// Why a choice did not end well.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Broken {
    /// Cancelled.
    Cancelled,
    /// It could not be computed.
    Failed,
    /// The model's file or arithmetic was changed in the middle of it.
    ModelChanged,
    /// The model is not served any more.
    ModelGone,
}

/// Tokens that were used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt: u64,
    /// Of those, found in the prefix cache.
    pub cached: u64,
    /// Tokens generated, over all choices, stop tokens included.
    pub completion: u64,
}

/// Something to show.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// Text of a choice, or its end, or both.
    Delta {
        /// Which.
        choice: u32,
        /// Nothing was shown of this choice before.
        first: bool,
        /// More text.
        text: String,
        /// Set on the choice's last event, once.
        finish: Option<Reason>,
    },
    /// A choice ended without a result.
    Broken {
        /// Which.
        choice: u32,
        /// Why.
        why: Broken,
    },
    /// All choices ended.
    End(Usage),
}

/// What an entry of the log came to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Step {
    /// Entries consumed, this one included: the id of the event.
    pub id: u64,
    /// `None` where there is nothing new to show.
    pub event: Option<Event>,
    /// A stop string was found in this choice: the engine need not go on with it.
    pub stopped: Option<u32>,
}

/// Renders one request.
#[derive(Debug)]
pub struct Renderer {
    text: Arc<Text>,
    ignore_eos: bool,
    stops: StopStrings,
    choices: Vec<Choice>,
    consumed: u64,
    usage: Usage,
}

#[derive(Debug)]
struct Choice {
    detok: Detok,
    scan: StopScan,
    shown: bool,
    ended: bool,
}

impl Renderer {
    /// A renderer that has seen nothing.
    #[must_use]
    pub fn new(text: Arc<Text>, context: &Context, n: u32, prompt_tokens: u32) -> Self {
        let stops = StopStrings::new(&context.stop);
        let choice =
            || Choice { detok: Detok::default(), scan: StopScan::new(&stops), shown: false, ended: false };
        Self {
            text,
            ignore_eos: context.ignore_eos,
            choices: std::iter::repeat_with(choice).take(n as usize).collect(),
            stops,
            consumed: 0,
            usage: Usage { prompt: prompt_tokens.into(), cached: 0, completion: 0 },
        }
    }

    /// Entries consumed so far.
    #[must_use]
    pub fn consumed(&self) -> u64 {
        self.consumed
    }

    /// What was used so far.
    #[must_use]
    pub fn usage(&self) -> Usage {
        self.usage
    }

    /// Consumes the next entry.
    pub fn entry(&mut self, entry: &Entry) -> Step {
        self.consumed += 1;
        let id = self.consumed;
        let none = Step { id, event: None, stopped: None };
        let (number, finish) = match *entry {
            Entry::End { cached_tokens } => {
                self.usage.cached = cached_tokens.into();
                return Step { event: Some(Event::End(self.usage)), ..none };
            }
            Entry::Token { choice, .. } => (choice, None),
            Entry::Finish { choice, reason } => (choice, Some(reason)),
        };
        // After a stop string the engine may have added entries before it heard of it; every reader leaves them out.
        let Some(choice) = self.choices.get_mut(number as usize).filter(|choice| !choice.ended) else {
            return none;
        };
        let mut decoded = String::new();
        if let Entry::Token { token, .. } = *entry {
            self.usage.completion += 1;
            if self.ignore_eos || !self.text.is_stop(token) {
                choice.detok.push(self.text.bytes(token), &mut decoded);
            }
        } else {
            choice.detok.finish(&mut decoded);
        }
        let mut text = String::new();
        let stopped = choice.scan.push(&self.stops, &decoded, &mut text);
        let finish = match finish {
            _ if stopped => Some(Ok(Reason::Stop)),
            None => None,
            Some(Finish::Stop) => Some(Ok(Reason::Stop)),
            Some(Finish::Length) => Some(Ok(Reason::Length)),
            Some(Finish::Cancelled) => Some(Err(Broken::Cancelled)),
            Some(Finish::Failed) => Some(Err(Broken::Failed)),
            Some(Finish::ModelChanged) => Some(Err(Broken::ModelChanged)),
            Some(Finish::ModelGone) => Some(Err(Broken::ModelGone)),
        };
        if finish.is_some() && !stopped {
            choice.scan.finish(&mut text);
        }
        choice.ended = finish.is_some();
        let first = !choice.shown;
        let event = match finish {
            Some(Err(why)) => Some(Event::Broken { choice: number, why }),
            None if text.is_empty() => None,
            None => Some(Event::Delta { choice: number, first, text, finish: None }),
            Some(Ok(reason)) => Some(Event::Delta { choice: number, first, text, finish: Some(reason) }),
        };
        choice.shown |= event.is_some();
        let live = matches!(entry, Entry::Token { .. });
        Step { id, event, stopped: (stopped && live).then_some(number) }
    }
}
