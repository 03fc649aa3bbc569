//! Scenarios as text: `scenarios/*.txt`, commands above `----` and what they must give below.
//!
//! ```text
//! config   block 16  tokens 64  seqs 8  len 256  depth 1  lookup 0      (each with this default; lookup 1: guesses)
//! cost     step 100  token 10  row 5  pair 0  part 0  target 400   (microseconds, `part`: a pair in a prompt, by default as
//!                                                              `pair`; without this line nothing is known)
//! tenants  a: floor 4 ceiling 8   b: floor 0 ceiling 8   pool 10
//! submit   a1 prompt 64  max 8  n 1  like a0                  (max 1, n 1; `like`: the same tokens as far as they go)
//! step 3 | plan | apply | revert | finish | show | cancel a1 | stop a1.0 | share a floor 2 ceiling 8
//! kill                                                        (the plan in flight kills its workers)
//! restart lost 1                                              (a new scheduler, from all records but the last; lost 0)
//! ```
//! `UPDATE_SCENARIOS=1` writes what was given; the difference is read in review.
#![allow(clippy::disallowed_methods, reason = "the test reads its scenarios; the scheduler does not")]

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use pagedd_core::{FinishReason, SequenceId, TenantId, Tokens};
use pagedd_sched::{Input, NewRequest, StepPlan, WaitReason};

use crate::bench::{Bench, config, id, request, share, straight};

struct Player {
    bench: Option<Bench>,
    config: pagedd_sched::SchedulerConfig,
    depth: usize,
    names: BTreeMap<SequenceId, String>,
    requests: BTreeMap<String, NewRequest>,
    next_sequence: u64,
    reported: usize,
    out: String,
}

/// The number behind a word, or its default.
fn value(words: &[&str], key: &str, default: u32) -> u32 {
    let at = words.iter().position(|word| *word == key);
    at.map_or(default, |at| {
        words[at + 1].parse().unwrap_or_else(|_| panic!("a number behind {key}: {words:?}"))
    })
}

fn tenant_of(name: &str) -> u32 {
    u32::from(name.as_bytes()[0] - b'a')
}

fn number_of(name: &str) -> u64 {
    u64::from(tenant_of(name)) * 1000 + name[1..].parse::<u64>().expect("a number behind the tenant's letter")
}

fn name_of(tenant: TenantId) -> char {
    char::from(b'a' + tenant.0 as u8)
}

impl Player {
    fn play(commands: &str) -> String {
        let mut player = Self {
            bench: None,
            config: config(0, 16),
            depth: 1,
            names: BTreeMap::new(),
            requests: BTreeMap::new(),
            next_sequence: 1,
            reported: 0,
            out: String::new(),
        };
        for line in commands.lines() {
            let text = line.split('#').next().unwrap_or_default();
            let words: Vec<_> = text.split_whitespace().collect();
            if let Some((verb, rest)) = words.split_first() {
                player.command(verb, rest);
            }
        }
        player.out
    }

    fn bench(&mut self) -> &mut Bench {
        self.bench.as_mut().expect("`tenants` comes first")
    }

    fn command(&mut self, verb: &str, words: &[&str]) {
        match verb {
            "config" => {
                self.config.block_size = Tokens(value(words, "block", 16));
                self.config.max_num_batched_tokens = Tokens(value(words, "tokens", 64));
                self.config.max_num_seqs = value(words, "seqs", 8);
                self.config.max_model_len = Tokens(value(words, "len", 256));
                self.config.max_queued_requests = value(words, "queue", 100);
                self.config.prompt_lookup = value(words, "lookup", 0) == 1;
                self.depth = value(words, "depth", 1) as usize;
            }
            "cost" => {
                let us = |key| value(words, key, 0) as f32;
                let part = value(words, "part", value(words, "pair", 0)) as f32;
                self.config.cost = straight(us("step"), us("token"), us("row"), [us("pair"), part]);
                self.config.itl_target_us =
                    words.contains(&"target").then(|| value(words, "target", 0).into());
            }
            "tenants" => {
                let mut config = self.config.clone();
                config.capacity.0 = value(words, "pool", 0);
                let mut bench = Bench::new(config, self.depth);
                for at in words.iter().enumerate().filter(|(_, word)| word.ends_with(':')).map(|(at, _)| at) {
                    let spec = &words[at..(at + 5).min(words.len())];
                    bench = bench.tenant(
                        tenant_of(words[at]),
                        value(spec, "floor", 0),
                        value(spec, "ceiling", 0),
                    );
                }
                self.bench = Some(bench);
            }
            "submit" => self.submit(words),
            "step" => (0..words.first().map_or(1, |n| n.parse().unwrap())).for_each(|_| self.step()),
            "plan" => {
                self.plan();
            }
            "apply" => {
                self.bench().apply();
                self.ends();
            }
            "revert" => {
                let bench = self.bench();
                let (plan, _) = bench.flying.pop_back().expect("a plan in flight");
                bench.scheduler.revert(plan);
                bench.check();
            }
            "kill" => {
                let bench = self.bench();
                let (plan, _) = bench.flying.pop_back().expect("a plan in flight");
                bench.accuse(plan);
                self.ends();
            }
            "restart" => self.restart(value(words, "lost", 0) as usize),
            "finish" => {
                self.bench().finish();
                self.ends();
            }
            "cancel" => {
                self.bench().cancel(id(number_of(words[0])));
                self.ends();
            }
            "stop" => {
                let (name, choice) = words[0].split_once('.').expect("a choice, as a1.0");
                let (request, choice) = (id(number_of(name)), choice.parse().unwrap());
                // The gateway saw a stop string; the toy's reference knows none, so that the end is not compared.
                let ends = self.bench().scheduler.finish_choice(request, choice, FinishReason::Cancelled);
                self.bench().note(ends);
                self.ends();
            }
            "share" => {
                let spec = share(value(words, "floor", 0), value(words, "ceiling", 0));
                let set = self.bench().scheduler.set_share(TenantId(tenant_of(words[0])), spec);
                if let Err(error) = set {
                    writeln!(self.out, "share    {error}").unwrap();
                }
            }
            "show" => self.show(),
            _ => panic!("unknown command {verb}"),
        }
    }

    fn restart(&mut self, lost: usize) {
        let restored = self.bench().restart(lost);
        self.next_sequence = restored.len() as u64 + 1;
        let name = |id| self.requests.iter().find(|(_, r)| r.id == id).expect("a request that was submitted");
        let names = restored.into_iter().map(|(id, choice)| match name(id) {
            (name, NewRequest { n: 1, .. }) => name.clone(),
            (name, _) => format!("{name}.{choice}"),
        });
        self.names = (1..).map(SequenceId).zip(names).collect();
        self.reported = self.reported.saturating_sub(lost);
        self.ends();
    }

    fn submit(&mut self, words: &[&str]) {
        let name = words[0];
        let mut new =
            request(number_of(name), tenant_of(name), value(words, "prompt", 1), value(words, "max", 1));
        new.n = value(words, "n", 1);
        if let Some(at) = words.iter().position(|word| *word == "like") {
            let other = &self.requests[words[at + 1]].prompt;
            new.prompt.iter_mut().zip(other).for_each(|(token, other)| *token = *other);
        }
        match self.bench().admit(new.clone()) {
            Ok(()) => {
                for choice in 0..new.n {
                    let name = if new.n == 1 { name.to_owned() } else { format!("{name}.{choice}") };
                    self.names.insert(SequenceId(self.next_sequence), name);
                    self.next_sequence += 1;
                }
                self.requests.insert(name.to_owned(), new);
            }
            Err(error) => writeln!(self.out, "refused  {name}: {error}").unwrap(),
        }
    }

    fn step(&mut self) {
        let bench = self.bench();
        let planned = bench.flying.len() < bench.depth;
        let planned = planned && self.plan();
        let bench = self.bench();
        if !bench.flying.is_empty() && (!planned || bench.flying.len() == bench.depth) {
            bench.apply();
        }
        self.ends();
    }

    fn plan(&mut self) -> bool {
        let plan = self.bench().plan().cloned();
        let mut line =
            plan.as_ref().map_or_else(|| "plan     nothing".to_owned(), |plan| self.describe(plan));
        let waits = self.bench().scheduler.waits().to_vec();
        for wait in waits {
            let name = self.requests.iter().find(|(_, r)| r.id == wait.request).map(|(name, _)| name.clone());
            let name = name.unwrap_or_default();
            let why = match wait.reason {
                WaitReason::Ceiling { room, wanted } => {
                    format!("ceiling, room for {room} of {wanted} wanted")
                }
                WaitReason::Exhausted { free, wanted } => {
                    format!("exhausted, {free} free of {wanted} wanted")
                }
                WaitReason::Behind { wanted } => format!("behind an older one, {wanted} wanted"),
                WaitReason::Budget => "budget".to_owned(),
            };
            write!(line, "   waits {name}: {why}").unwrap();
        }
        writeln!(self.out, "{}", line.trim_end()).unwrap();
        plan.is_some()
    }

    fn describe(&self, plan: &StepPlan) -> String {
        let mut line = format!("plan {:<3}", plan.id.0);
        for copy in &plan.copies {
            write!(line, " copy {} of {} to {}", copy.tokens, copy.from.0, copy.to.0).unwrap();
        }
        for row in &plan.rows {
            let end = row.start.0 as usize + row.inputs.len();
            let name = &self.names[&row.seq];
            let soft = row.inputs.iter().any(|input| matches!(input, Input::Sampled { .. }));
            let what = if row.drafts > 0 {
                format!("decode {} guess [{},{end})", row.start, row.certain())
            } else if row.inputs.len() > 1 || row.samples.is_empty() {
                format!("prefill [{},{end})", row.start)
            } else {
                format!("decode {}{}", row.start, if soft { "?" } else { "" })
            };
            let drawn =
                if row.samples.len() > 1 { format!(" draws {}", row.samples.len()) } else { String::new() };
            write!(line, " {name} {what}{drawn} ").unwrap();
        }
        line
    }

    fn ends(&mut self) {
        let from = self.reported;
        let mut lines = String::new();
        for end in &self.bench().finished[from..] {
            let tokens = end.ended.map_or(String::new(), |e| {
                format!(" prompt {} cached {} output {}", e.prompt_tokens, e.cached_tokens, e.output_tokens)
            });
            let number = u128::from_be_bytes(end.request.0) % 1000;
            writeln!(lines, "end      {}{number}.{} {}{tokens}", name_of(end.tenant), end.choice, end.reason)
                .unwrap();
        }
        self.reported = self.bench().finished.len();
        self.out.push_str(&lines);
    }

    fn show(&mut self) {
        let stats = self.bench().scheduler.stats();
        let mut line = format!("show     free {} of {}", stats.pool.free, stats.pool.capacity);
        for t in stats.tenants {
            let pending = if t.share_pending { " (share pending)" } else { "" };
            write!(line, "   {}: held {} cached {}", name_of(t.tenant), t.held, t.cached).unwrap();
            write!(line, " running {} waiting {} preempted {}{pending}", t.running, t.waiting, t.preemptions)
                .unwrap();
            if t.draft_tokens > 0 {
                write!(line, " guessed {} right {}", t.draft_tokens, t.draft_tokens_accepted).unwrap();
            }
        }
        writeln!(self.out, "{line}").unwrap();
    }
}

#[test]
fn every_scenario_gives_what_is_written_below_it() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios");
    let mut files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() > 5, "scenarios are missing from {}", folder.display());
    let update = std::env::var("UPDATE_SCENARIOS").is_ok_and(|value| value == "1");
    let mut wrong = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let (commands, expected) = text.split_once("----\n").unwrap_or((&text, ""));
        let given = Player::play(commands);
        if given == expected {
            continue;
        }
        if update {
            std::fs::write(&file, format!("{commands}----\n{given}")).unwrap();
        } else {
            wrong.push(format!("{}\n-- expected\n{expected}-- given\n{given}", file.display()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
