//! What `pagedd bench` is told.
//!
//! **Owns** the options, and the configuration of the one model that they name. **Never** reads a model's settings itself: their values go
//! through the configuration's own reader.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::builder::RangedI64ValueParser;
use clap::{Args, Subcommand, ValueEnum, value_parser};
use pagedd_config::{Config, ConfigError, Model, Overrides};
use pagedd_core::{MOST_STEP_TOKENS, Tokens};

/// The command's options.
#[derive(Args, Debug)]
pub struct Options {
    /// What is measured.
    #[command(subcommand)]
    pub case: Case,
}

/// What can be measured.
#[derive(Subcommand, Debug)]
pub enum Case {
    /// Requests and tokens per second, all requests at once
    Throughput(Throughput),
    /// Time per token while so many sequences run, and the time of their prompts
    Latency(Latency),
    /// Requests per second where all prompts begin alike
    Prefix(SharedPrefix),
    /// Time per token of running sequences while another tenant's long prompt is computed, against that of before
    Foreign(Strangers),
}

impl Case {
    /// Its name, as it was typed.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Throughput(_) => "throughput",
            Self::Latency(_) => "latency",
            Self::Prefix(_) => "prefix",
            Self::Foreign(_) => "foreign",
        }
    }

    /// Which model.
    pub fn model(&self) -> &ModelOptions {
        match self {
            Self::Throughput(case) => &case.model,
            Self::Latency(case) => &case.model,
            Self::Prefix(case) => &case.model,
            Self::Foreign(case) => &case.model,
        }
    }

    /// How it is measured.
    pub fn run(&self) -> &RunOptions {
        match self {
            Self::Throughput(case) => &case.run,
            Self::Latency(case) => &case.run,
            Self::Prefix(case) => &case.run,
            Self::Foreign(case) => &case.run,
        }
    }

    /// Sequences of a row at a time, the most of all rows.
    fn most_sequences(&self) -> u32 {
        match self {
            Self::Throughput(case) => case.requests.saturating_mul(case.choices),
            Self::Latency(case) => case.batch.iter().copied().max().unwrap_or(1),
            Self::Prefix(case) => case.requests,
            // Foreign ones come one at a time.
            Self::Foreign(case) => case.batch + 1,
        }
    }

    /// Tokens of a step, the most of all rows, or the default where nobody says.
    fn budget(&self) -> u32 {
        self.run().budget.iter().copied().max().unwrap_or(512)
    }

    /// Sequences that run at a time where nobody says how many may.
    fn seats(&self) -> u32 {
        match self {
            Self::Latency(_) | Self::Foreign(_) => self.most_sequences(),
            Self::Throughput(_) | Self::Prefix(_) => self.most_sequences().min(SEATS),
        }
    }
}

/// Sequences that run at a time, where there are more requests.
const SEATS: u32 = 256;

/// Of `throughput`.
#[derive(Args, Debug)]
pub struct Throughput {
    /// Requests
    #[arg(long, value_name = "N", default_value = "1000", value_parser = count(1_000_000))]
    pub requests: u32,
    /// Answers to each prompt
    #[arg(long, value_name = "N", default_value = "1", value_parser = count(MOST_CHOICES))]
    pub choices: u32,
    /// Tokens of a prompt; `128..2048` spreads them evenly by their logarithm, in an order that is drawn
    #[arg(long, value_name = "N|N..N", default_value = "512")]
    pub input_len: Lengths,
    /// Tokens of an answer, or two numbers as for prompts
    #[arg(long, value_name = "N|N..N", default_value = "128")]
    pub output_len: Lengths,
    /// Which model.
    #[command(flatten)]
    pub model: ModelOptions,
    /// How it is measured.
    #[command(flatten)]
    pub run: RunOptions,
}

/// Of `latency`.
#[derive(Args, Debug)]
pub struct Latency {
    /// Sequences that run together, a row for each of these
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,8,64,256", value_parser = count(MOST_SEATS))]
    pub batch: Vec<u32>,
    /// Tokens of a prompt; `128..16384` spreads them evenly by their logarithm
    #[arg(long, value_name = "N|N..N", default_value = "1024")]
    pub input_len: Lengths,
    /// Steps in which all sequences run, with those of the warm-up
    #[arg(long, value_name = "N", default_value = "128", value_parser = count(MOST_TOKENS))]
    pub output_len: u32,
    /// Which model.
    #[command(flatten)]
    pub model: ModelOptions,
    /// How it is measured.
    #[command(flatten)]
    pub run: RunOptions,
}

/// Of `prefix`.
#[derive(Args, Debug)]
pub struct SharedPrefix {
    /// Requests
    #[arg(long, value_name = "N", default_value = "512", value_parser = count(1_000_000))]
    pub requests: u32,
    /// Tokens that all prompts begin with
    #[arg(long, value_name = "N", default_value = "2048", value_parser = count(MOST_TOKENS))]
    pub prefix_len: u32,
    /// Tokens of a prompt behind these, its own
    #[arg(long, value_name = "N", default_value = "64", value_parser = count(MOST_TOKENS))]
    pub suffix_len: u32,
    /// Tokens of an answer
    #[arg(long, value_name = "N", default_value = "64", value_parser = count(MOST_TOKENS))]
    pub output_len: u32,
    /// Which model.
    #[command(flatten)]
    pub model: ModelOptions,
    /// How it is measured.
    #[command(flatten)]
    pub run: RunOptions,
}

/// Of `foreign`.
#[derive(Args, Debug)]
pub struct Strangers {
    /// Sequences that run together
    #[arg(long, value_name = "N", default_value = "64", value_parser = count(MOST_SEATS - 1))]
    pub batch: u32,
    /// Tokens of their prompts
    #[arg(long, value_name = "N", default_value = "1024", value_parser = count(MOST_TOKENS))]
    pub input_len: u32,
    /// Steps of these alone, with those of the warm-up, before the first foreign prompt comes
    #[arg(long, value_name = "N", default_value = "220", value_parser = count(MOST_TOKENS))]
    pub output_len: u32,
    /// Tokens of a foreign prompt
    #[arg(long, value_name = "N", default_value = "32500", value_parser = count(MOST_TOKENS))]
    pub foreign_len: u32,
    /// Foreign prompts, one after the other
    #[arg(long, value_name = "N", default_value = "3", value_parser = count(1_000))]
    pub foreign: u32,
    /// Which model.
    #[command(flatten)]
    pub model: ModelOptions,
    /// How it is measured.
    #[command(flatten)]
    pub run: RunOptions,
}

/// Most sequences that a configuration lets run.
const MOST_SEATS: u32 = 4_096;
/// Most answers to a prompt.
const MOST_CHOICES: u32 = 128;
/// Longest sequence that a configuration allows.
const MOST_TOKENS: u32 = 16_777_216;

fn count(most: u32) -> RangedI64ValueParser<u32> {
    value_parser!(u32).range(1..=i64::from(most))
}

/// How it is measured.
#[derive(Args, Debug)]
#[command(next_help_heading = "How")]
pub struct RunOptions {
    /// Most tokens of a step, a row for each of these [default: the model's `max_num_batched_tokens`]
    #[arg(long, value_name = "N,...", value_delimiter = ',', value_parser = count(MOST_STEP_TOKENS))]
    pub budget: Vec<u32>,
    /// Whether prompts reuse what is computed of earlier ones [default: as the model is configured, `on` with --path]
    #[arg(long, value_name = "on|off", hide_possible_values = true)]
    pub prefix_cache: Option<Switch>,
    /// How tokens are drawn; 0 is greedy
    #[arg(long, value_name = "T", default_value = "0", allow_negative_numbers = true, value_parser = temperature)]
    pub temperature: f32,
    /// Steps that are not measured
    #[arg(long, value_name = "N", default_value = "20", value_parser = value_parser!(u32).range(0..=10_000))]
    pub warmup: u32,
    /// Draws prompts and tokens
    #[arg(long, value_name = "N", default_value = "1")]
    pub seed: u64,
    /// Most seconds of a row, loading included
    #[arg(long, value_name = "S", default_value = "600", value_parser = value_parser!(u32).range(1..=86_400))]
    pub limit: u32,
    /// Writes the rows into this file, too
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// `on` or `off`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Switch {
    /// It is.
    On,
    /// It is not.
    Off,
}

fn temperature(text: &str) -> Result<f32, &'static str> {
    let wrong = "use a number from 0 to 2";
    let value: f32 = text.parse().map_err(|_| wrong)?;
    if (0.0..=2.0).contains(&value) { Ok(value) } else { Err(wrong) }
}

/// Lengths of prompts or answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lengths {
    /// The shortest, at least 1.
    pub least: u32,
    /// The longest.
    pub most: u32,
}

impl FromStr for Lengths {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = "use a number of tokens, or two with `..` between them, the smaller one first";
        let number = |text: &str| text.parse().ok().filter(|n| (1..=MOST_TOKENS).contains(n)).ok_or(wrong);
        let (least, most) = text.split_once("..").unwrap_or((text, text));
        let lengths = Self { least: number(least)?, most: number(most)? };
        if lengths.least <= lengths.most { Ok(lengths) } else { Err(wrong) }
    }
}

impl fmt::Display for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.least == self.most {
            write!(f, "{}", self.least)
        } else {
            write!(f, "{}..{}", self.least, self.most)
        }
    }
}

impl Lengths {
    /// `count` lengths: the middles of as many equal parts of the range, by the logarithm.
    pub fn spread(self, count: u32) -> Vec<u32> {
        let (least, ratio) = (f64::from(self.least), f64::from(self.most) / f64::from(self.least));
        let middle = |i| (f64::from(i) + 0.5) / f64::from(count);
        (0..count).map(|i| (least * ratio.powf(middle(i))).round() as u32).collect()
    }
}

/// Which model, on what.
#[derive(Args, Debug, Default)]
#[command(next_help_heading = "Model (options beside --config are as the keys of a model's section in it)")]
pub struct ModelOptions {
    /// Configuration file that has the model
    #[arg(long, value_name = "FILE", required_unless_present = "path")]
    pub config: Option<PathBuf>,
    /// Which of its models [default: the only one]
    #[arg(long, value_name = "NAME", requires = "config")]
    pub model: Option<String>,
    /// A GGUF file, a Hugging Face directory or a generated model (`synthetic:SHAPE`, `synthetic:SHAPE:q4_1`), without a configuration file
    #[arg(long, conflicts_with = "config")]
    pub path: Option<String>,
    /// Where it runs
    #[arg(long, conflicts_with = "config")]
    pub device: Option<String>,
    /// Arithmetic of the products with the weights
    #[arg(long, conflicts_with = "config")]
    pub dtype: Option<String>,
    /// Element type of the KV blocks
    #[arg(long, conflicts_with = "config")]
    pub kv_dtype: Option<String>,
    /// How much memory KV blocks get
    #[arg(long, conflicts_with = "config")]
    pub kv_memory: Option<String>,
    /// Tokens of a block
    #[arg(long, conflicts_with = "config")]
    pub block_size: Option<String>,
    /// Most sequences of a step [default: the largest batch, or as many as there are requests, 256 at most]
    #[arg(long, conflicts_with = "config")]
    pub max_num_seqs: Option<String>,
    /// Longest that a step is meant to take in which somebody's answer goes on [default: none]
    #[arg(long, conflicts_with = "config")]
    pub itl_target: Option<String>,
    /// Longest sequence
    #[arg(long, conflicts_with = "config")]
    pub max_model_len: Option<String>,
    /// Whether a row's bits depend on its own inputs alone
    #[arg(long, value_name = "true|false", conflicts_with = "config")]
    pub deterministic: Option<String>,
    /// Threads of the worker
    #[arg(long, conflicts_with = "config")]
    pub threads: Option<String>,
}

/// The model's name where no configuration names it.
const NAME: &str = "bench";

impl Case {
    /// The configuration, with the model that is measured as its only one.
    ///
    /// # Errors
    /// One line that names the option, or the place in the file.
    pub fn config(&self) -> Result<Config, String> {
        let options = self.model();
        let mut config = match &options.config {
            Some(file) => Config::load(file).map_err(|error| error.to_string())?,
            None => Config::parse(None, &options.yaml(self.seats(), self.budget()), &Overrides::default())
                .map_err(|error| by_option(&error))?,
        };
        let model = chosen(&mut config, options.model.as_deref())?;
        if let Some(switch) = self.run().prefix_cache {
            model.prefix_cache = switch == Switch::On;
        }
        // They wait for their first step all at once.
        model.max_queued_requests = model.max_queued_requests.max(self.most_sequences());
        Ok(config)
    }

    /// The settings of each row's model: one for each budget.
    pub fn models(&self, model: &Model) -> Vec<Model> {
        let with = |budget: &u32| Model { max_num_batched_tokens: Tokens(*budget), ..model.clone() };
        match self.run().budget.as_slice() {
            [] => vec![model.clone()],
            budgets => budgets.iter().map(with).collect(),
        }
    }
}

/// Leaves the model of this name, or the only one.
fn chosen<'a>(config: &'a mut Config, name: Option<&str>) -> Result<&'a mut Model, String> {
    let names: Vec<&str> = config.models.iter().map(|model| model.name.as_str()).collect();
    let all = names.join(", ");
    let place = match (name, names.as_slice()) {
        (_, []) => return Err("--config: the file has no model".to_owned()),
        (None, [_]) => 0,
        (None, _) => return Err(format!("--model: is missing; the file has the models {all}")),
        (Some(name), _) => names
            .iter()
            .position(|other| *other == name)
            .ok_or_else(|| format!("--model: the file has no model `{name}`, but {all}"))?,
    };
    config.models = vec![config.models.swap_remove(place)];
    Ok(&mut config.models[0])
}

impl ModelOptions {
    /// What was typed, as a configuration file has it.
    fn yaml(&self, seats: u32, budget: u32) -> String {
        // A step has a token for each sequence at least.
        let given = self.max_num_seqs.as_ref().and_then(|seats| seats.parse().ok());
        let budget = budget.max(given.unwrap_or(seats)).to_string();
        let seats = seats.to_string();
        let keys: [(&str, Option<&str>); 12] = [
            ("path", self.path.as_deref()),
            ("device", self.device.as_deref()),
            ("dtype", self.dtype.as_deref()),
            ("kv_dtype", self.kv_dtype.as_deref()),
            ("kv_memory", self.kv_memory.as_deref()),
            ("block_size", self.block_size.as_deref()),
            ("max_num_seqs", self.max_num_seqs.as_deref().or(Some(&seats))),
            ("max_num_batched_tokens", Some(&budget)),
            ("itl_target", self.itl_target.as_deref().or(Some("none"))),
            ("max_model_len", self.max_model_len.as_deref()),
            ("deterministic", self.deterministic.as_deref()),
            ("threads", self.threads.as_deref()),
        ];
        let given = keys.into_iter().filter_map(|(key, value)| Some((key, value?)));
        let lines = given.map(|(key, value)| format!("    {key}: {}\n", quoted(value)));
        format!("log: {{ level: warn }}\nmodels:\n  {NAME}:\n{}", lines.collect::<String>())
    }
}

/// Any text as a YAML scalar.
fn quoted(text: &str) -> String {
    let escaped = text.chars().map(|c| match c {
        '"' | '\\' => format!("\\{c}"),
        c if c.is_control() => format!("\\u{:04x}", u32::from(c)),
        c => c.to_string(),
    });
    format!("\"{}\"", escaped.collect::<String>())
}

/// An error about a key, as one about the option that it came from.
fn by_option(error: &ConfigError) -> String {
    let ConfigError::At { message, .. } = error else { return error.to_string() };
    let key = message.strip_prefix("models.").and_then(|rest| rest.strip_prefix(NAME)?.strip_prefix('.'));
    match key.and_then(|rest| rest.split_once(": ")) {
        Some((key, wrong)) => format!("--{}: {wrong}", key.replace('_', "-")),
        None => message.clone(),
    }
}
