//! A small scheduler for tests: it makes plans for a set of requests, runs them, and keeps what was drawn.
//!
//! Blocks are taken in a scrambled order and never given back, so that tables are not runs of neighbours.

use std::collections::BTreeMap;

use pagedd_core::{Few, SamplingParams};
use pagedd_model::testing::Random;
use pagedd_wire::worker::{Begin, BlockCopy, Input, Output, Plan, Row, Sampled, SequenceState, TableUpdate};
use pagedd_worker::ModelRunner;

/// A sequence as the driver sees it.
#[derive(Clone, Debug)]
pub struct Seq {
    pub id: u64,
    pub choice: u32,
    pub sampling: SamplingParams,
    /// Prompt, then what was drawn.
    pub tokens: Vec<u32>,
    pub prompt: usize,
    /// Positions in KV.
    pub computed: usize,
    pub table: Vec<u32>,
    /// Entries of it that the worker was told.
    pub sent: usize,
    /// Tokens to draw in all.
    pub want: usize,
    /// Tokens fed after the prompt instead of what is drawn.
    pub forced: Vec<u32>,
    /// Ends here, too.
    pub stop: Option<u32>,
    /// Ids of further choices, which fork off at the end of the prompt.
    pub children: Vec<u64>,
    pub begun: bool,
    /// The plan that drew the last token, if a later one may name it.
    pub drew_in: u64,
    /// Copy to make before the next row.
    pub copy: Option<BlockCopy>,
}

impl Seq {
    /// How it, or a choice that forks off it, enters.
    fn begin(&self, seq: u64, choice: u32) -> Begin {
        let (sampling, prompt) = (self.sampling.into(), self.prompt as u32);
        Begin { seq, choice, sampling, prompt, tokens: self.tokens.clone() }
    }

    pub fn new(id: u64, prompt: &[u32], want: usize) -> Self {
        Self {
            id,
            choice: 0,
            sampling: SamplingParams { logprobs: Some(5), ..SamplingParams::GREEDY },
            tokens: prompt.to_vec(),
            prompt: prompt.len(),
            computed: 0,
            table: Vec::new(),
            sent: 0,
            want,
            forced: Vec::new(),
            stop: None,
            children: Vec::new(),
            begun: false,
            drew_in: 0,
            copy: None,
        }
    }

    fn drawn(&self) -> usize {
        self.tokens.len() - self.prompt
    }

    pub fn done(&self) -> bool {
        self.drawn() >= self.want || (self.drawn() > 0 && self.stop == self.tokens.last().copied())
    }

    /// Preempted: everything has to be computed again.
    pub fn preempt(&mut self) {
        (self.computed, self.begun, self.sent) = (0, false, 0);
        self.table.clear();
    }

    /// Takes over what lies in KV already.
    pub fn with_prefix(mut self, table: &[u32], computed: usize) -> Self {
        (self.table, self.computed) = (table.to_vec(), computed);
        self
    }
}

/// All sequences, and the blocks.
#[derive(Clone, Debug)]
pub struct Driver {
    pub seqs: Vec<Seq>,
    /// Most tokens of a prompt in one row.
    pub chunk: usize,
    /// Most tokens in a plan.
    pub budget: usize,
    /// Decode rows name the draw of the plan before instead of the token.
    pub overlap: bool,
    pub block_size: usize,
    pub next_plan: u64,
    capacity: u32,
    taken: u32,
    /// By sequence: everything drawn.
    pub drawn: BTreeMap<u64, Vec<Sampled>>,
    /// By sequence: what it will draw. Decode rows guess some of it, and some of that wrong.
    pub futures: BTreeMap<u64, Vec<u32>>,
    random: Random,
}

impl Driver {
    pub fn new(runner: &ModelRunner) -> Self {
        let limits = runner.limits();
        Self {
            seqs: Vec::new(),
            chunk: usize::MAX,
            budget: limits.max_num_batched_tokens,
            overlap: false,
            block_size: limits.block_size as usize,
            next_plan: 1,
            capacity: limits.capacity,
            taken: 0,
            drawn: BTreeMap::new(),
            futures: BTreeMap::new(),
            random: Random::new(3),
        }
    }

    /// Guesses behind the last known token of a sequence, `most` at most.
    fn guesses(&mut self, seq: &Seq, most: usize) -> Vec<u32> {
        let most = most.min(seq.want.saturating_sub(seq.drawn() + 1)).min(5);
        let Some(future) = self.futures.get(&seq.id) else { return Vec::new() };
        let depth = (self.random.next_u64() % (most as u64 + 1)) as usize;
        let right: Vec<_> = future.iter().skip(seq.drawn()).take(depth).copied().collect();
        right
            .into_iter()
            .map(|token| if self.random.next_u64().is_multiple_of(4) { token ^ 1 } else { token })
            .collect()
    }

    fn take(&mut self) -> u32 {
        assert!(self.taken < self.capacity, "the test needs more than {} blocks", self.capacity);
        // 7 and a power of two, or an odd number near it, have no common factor.
        let stride = if self.capacity.is_multiple_of(7) { 1 } else { 7 };
        self.taken += 1;
        (u64::from(self.taken - 1) * stride % u64::from(self.capacity)) as u32
    }

    /// The next plan; `None` once every sequence is done.
    pub fn plan(&mut self) -> Option<Plan> {
        let mut plan = Plan { id: self.next_plan, ..Plan::default() };
        let mut budget = self.budget;
        for at in 0..self.seqs.len() {
            let seq = self.seqs[at].clone();
            let count = (seq.tokens.len() - seq.computed).min(self.chunk).min(budget);
            if seq.done() || count == 0 {
                continue;
            }
            budget -= count;
            let end = seq.computed + count;
            let decodes = count == 1 && seq.drawn() > 0 && end == seq.tokens.len();
            let guesses = if decodes { self.guesses(&seq, budget) } else { Vec::new() };
            budget -= guesses.len();
            let from = seq.sent;
            let mut blocks = seq.table[from..].to_vec();
            while (from + blocks.len()) * self.block_size < end + guesses.len() {
                blocks.push(self.take());
            }
            if !seq.begun {
                plan.begin.push(seq.begin(seq.id, seq.choice));
            }
            plan.copies.extend(seq.copy);
            let mut inputs: Few<_> =
                seq.tokens[seq.computed..end].iter().map(|&token| Input::Known(token)).collect();
            let last = seq.drawn().checked_sub(1).filter(|_| end == seq.tokens.len());
            if self.overlap
                && guesses.is_empty()
                && last.is_some()
                && seq.drew_in + 1 == plan.id
                && seq.forced.is_empty()
            {
                inputs[count - 1] = Input::Sampled { plan: seq.drew_in, seq: seq.id };
            }
            inputs.extend(guesses.iter().copied().map(Input::Known));
            let mut samples = Few::new();
            if end == seq.tokens.len() {
                samples.push(seq.id);
                if seq.drawn() == 0 {
                    let children = seq.children.iter().zip(1..);
                    for (&child, choice) in children {
                        plan.begin.push(seq.begin(child, choice));
                        samples.push(child);
                    }
                }
            }
            plan.rows.push(Row {
                seq: seq.id,
                start: seq.computed as u32,
                inputs,
                table: TableUpdate { from: from as u32, blocks: blocks.clone() },
                samples,
                drafts: guesses.len() as u32,
            });
            let seq = &mut self.seqs[at];
            (seq.computed, seq.begun, seq.copy) = (end, true, None);
            seq.table.truncate(from);
            seq.table.extend(blocks);
            seq.sent = seq.table.len();
        }
        (!plan.rows.is_empty()).then_some(plan)
    }

    /// Takes in what a plan gave.
    pub fn apply(&mut self, plan: &Plan, output: &Output) {
        assert_eq!(output.plan, plan.id);
        assert_eq!(output.failed, []);
        self.next_plan = plan.id + 1;
        for row in &plan.rows {
            for &child in row.samples.iter().skip(1) {
                self.fork(row.seq, child);
            }
        }
        for sampled in &output.sampled {
            let seq = self.seqs.iter_mut().find(|seq| seq.id == sampled.seq).unwrap();
            let forced = seq.forced.get(seq.tokens.len() - seq.prompt).copied();
            seq.tokens.push(forced.unwrap_or(sampled.token));
            let guessed = plan.rows.iter().any(|row| row.seq == sampled.seq && row.drafts > 0);
            seq.drew_in = if guessed { 0 } else { plan.id };
            // A further draw of a row stands behind a guess that was right, and is in KV.
            seq.computed = seq.computed.max(seq.tokens.len() - 1);
            self.drawn.entry(sampled.seq).or_default().push(sampled.clone());
        }
    }

    /// The child shares the parent's full blocks; of the last one it will get a copy.
    fn fork(&mut self, parent: u64, child: u64) {
        let parent = self.seqs.iter().find(|seq| seq.id == parent).unwrap().clone();
        let choice = 1 + parent.children.iter().position(|&id| id == child).unwrap() as u32;
        let mut seq = Seq { id: child, choice, children: Vec::new(), ..parent.clone() };
        let filled = parent.prompt % self.block_size;
        if filled > 0 {
            let to = self.take();
            let from = *seq.table.last().unwrap();
            *seq.table.last_mut().unwrap() = to;
            seq.copy = Some(BlockCopy { from, to, tokens: filled as u32 });
        }
        // The worker knows of it, but not its table.
        (seq.begun, seq.sent) = (true, 0);
        self.seqs.push(seq);
    }

    /// What a fresh worker must know.
    pub fn snapshot(&self) -> Vec<SequenceState> {
        let known = self.seqs.iter().filter(|seq| seq.begun && !seq.done());
        known
            .map(|seq| SequenceState {
                seq: seq.id,
                choice: seq.choice,
                sampling: seq.sampling.into(),
                tokens: seq.tokens.clone(),
                prompt: seq.prompt as u32,
                blocks: seq.table.clone(),
            })
            .collect()
    }

    /// Runs everything to its end.
    pub fn finish(&mut self, runner: &mut ModelRunner) {
        while let Some(plan) = self.plan() {
            let output = runner.run(&plan).unwrap();
            self.apply(&plan, &output);
        }
    }

    pub fn seq(&self, id: u64) -> &Seq {
        self.seqs.iter().find(|seq| seq.id == id).unwrap()
    }
}

/// The plan as the daemon sends it again once earlier plans were applied: nothing in it refers to them.
pub fn known(plan: &Plan, driver: &Driver) -> Plan {
    let mut plan = plan.clone();
    for row in &mut plan.rows {
        let tokens = &driver.seq(row.seq).tokens;
        for (position, input) in (row.start as usize..).zip(&mut row.inputs) {
            if let Input::Sampled { .. } = input {
                *input = Input::Known(tokens[position]);
            }
        }
    }
    plan
}

/// A draw as bits: token, its log-probability, the best tokens and theirs.
type Bits = (u32, u32, Vec<(u32, u32)>);

/// Everything that was drawn, as bits.
pub fn bits(drawn: &[Sampled]) -> Vec<Bits> {
    drawn
        .iter()
        .map(|s| {
            let top = s.top.iter().map(|(token, logprob)| (*token, logprob.to_bits())).collect();
            (s.token, s.logprob.map_or(0, f32::to_bits), top)
        })
        .collect()
}

/// One request alone.
pub fn alone(runner: &mut ModelRunner, seq: Seq) -> Vec<Sampled> {
    let id = seq.id;
    let mut driver = Driver::new(runner);
    driver.seqs.push(seq);
    driver.finish(runner);
    driver.drawn.remove(&id).unwrap()
}
