//! A worker whose arithmetic shows every mistake of a plan.
//!
//! The slot of position `p` holds a hash of the tokens `[0, p]`, computed from the slot of `p - 1` as it lies in the arena. A
//! drawn token is one of a few that come round, and where a hash of all slots `[0, p]` says so, that hash. So a sequence's
//! output is a function of its prompt, choice and seed, soon differs from [`reference`] where one position was read from a
//! wrong, stale or overwritten block, and can often be guessed from what it was before.

use std::collections::BTreeMap;

use pagedd_core::{BlockId, FinishReason, PlanId, SamplingParams, SequenceId, TokenId};
use pagedd_sched::{Begin, Input, NewRequest, Sampled, SequenceSnapshot, StepOutput, StepPlan};

pub const VOCABULARY: u64 = 50;

pub fn mix(a: u64, b: u64) -> u64 {
    let mut x = a ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Where there are penalties, a draw also depends on the tokens before it, and on how many of them are the prompt.
fn punished(digest: u64, sampling: &SamplingParams, prompt: usize, before: &[TokenId]) -> u64 {
    if sampling.penalties.is_none() {
        return digest;
    }
    before.iter().fold(mix(digest, prompt as u64), |digest, token| mix(digest, u64::from(token.0)))
}

/// What stands at `position`, behind slots of this digest.
fn draw(digest: u64, position: usize, choice: u32, sampling: &SamplingParams) -> TokenId {
    let hash = mix(mix(digest, u64::from(choice)), sampling.seed);
    let comes_round = !(hash / VOCABULARY).is_multiple_of(4);
    TokenId(if comes_round { position as u32 % 5 } else { (hash % VOCABULARY) as u32 })
}

/// What a choice of a request gives when it is alone.
pub fn reference(request: &NewRequest, choice: u32, max_model_len: u32) -> (Vec<TokenId>, FinishReason) {
    let (mut slot, mut digest) = (0, 0);
    for token in &request.prompt {
        slot = mix(slot, u64::from(token.0) + 1);
        digest = mix(digest, slot);
    }
    let most = request.max_tokens.0.min(max_model_len - request.prompt.len() as u32) as usize;
    let mut output = Vec::new();
    loop {
        let before: Vec<TokenId> = request.prompt.iter().chain(&output).copied().collect();
        let punished = punished(digest, &request.sampling, request.prompt.len(), &before);
        let token = draw(punished, before.len(), choice, &request.sampling);
        output.push(token);
        if request.stop_ids.contains(&token) {
            return (output, FinishReason::Stop);
        }
        if output.len() == most {
            return (output, FinishReason::Length);
        }
        slot = mix(slot, u64::from(token.0) + 1);
        digest = mix(digest, slot);
    }
}

#[derive(Clone, PartialEq, Debug)]
struct Known {
    choice: u32,
    sampling: SamplingParams,
    table: Vec<BlockId>,
    prompt: usize,
    /// By position, where there are penalties.
    tokens: Vec<TokenId>,
}

#[derive(Clone)]
pub struct Worker {
    block_size: usize,
    pub arena: Vec<u64>,
    sequences: BTreeMap<SequenceId, Known>,
    drawn: BTreeMap<(PlanId, SequenceId), TokenId>,
    /// Rows of these sequences fail.
    pub broken: Vec<SequenceId>,
}

impl Worker {
    pub fn new(capacity: u32, block_size: u32) -> Self {
        let arena = vec![0; (capacity * block_size) as usize];
        let (sequences, drawn, broken) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        Self { block_size: block_size as usize, arena, sequences, drawn, broken }
    }

    /// A new process on the arena of this one.
    pub fn respawn(&mut self, snapshot: Vec<SequenceSnapshot>) {
        self.drawn.clear();
        let known = snapshot.into_iter();
        self.sequences = known
            .map(|s| {
                let SequenceSnapshot { seq, choice, sampling, tokens, prompt, blocks } = s;
                (seq, Known { choice, sampling, table: blocks, prompt: prompt.0 as usize, tokens })
            })
            .collect();
    }

    fn slot(&self, table: &[BlockId], position: usize) -> usize {
        table[position / self.block_size].0 as usize * self.block_size + position % self.block_size
    }

    pub fn run(&mut self, plan: &StepPlan) -> StepOutput {
        assert!(!plan.rows.is_empty(), "an empty plan");
        for begin in &plan.begin {
            let Begin { seq, choice, sampling, prompt, ref tokens } = *begin;
            let (prompt, tokens) = (prompt.0 as usize, tokens.clone());
            self.sequences.insert(seq, Known { choice, sampling, table: Vec::new(), prompt, tokens });
        }
        for copy in &plan.copies {
            let (from, to) = (copy.from.0 as usize * self.block_size, copy.to.0 as usize * self.block_size);
            assert!(copy.from != copy.to && copy.tokens.0 > 0, "{copy:?} copies nothing");
            self.arena.copy_within(from..from + copy.tokens.0 as usize, to);
        }
        let mut sampled = Vec::new();
        let mut failed = Vec::new();
        for row in &plan.rows {
            assert!(!row.inputs.is_empty(), "an empty row");
            let known =
                self.sequences.get_mut(&row.seq).unwrap_or_else(|| panic!("{} was not begun", row.seq));
            assert!(row.table.from as usize <= known.table.len(), "a hole in the table of {}", row.seq);
            known.table.truncate(row.table.from as usize);
            known.table.extend(&row.table.blocks);
            let table = known.table.clone();
            let start = row.start.0 as usize;
            if self.broken.contains(&row.seq) {
                failed.push((row.seq, "NaN".to_owned()));
                // A plan behind may name these draws. Nobody reads what it makes of them, and when it is sent again they are this token.
                self.drawn.extend(row.samples.iter().map(|seq| ((plan.id, *seq), TokenId(0))));
                continue;
            }
            let mut read = Vec::new();
            for (i, input) in row.inputs.iter().enumerate() {
                let token = match input {
                    Input::Known(token) => *token,
                    Input::Sampled { plan, seq } => *self
                        .drawn
                        .get(&(*plan, *seq))
                        .unwrap_or_else(|| panic!("{seq} drew nothing in {plan}")),
                };
                read.push(token);
                let position = start + i;
                let before = if position == 0 { 0 } else { self.arena[self.slot(&table, position - 1)] };
                let slot = self.slot(&table, position);
                self.arena[slot] = mix(before, u64::from(token.0) + 1);
            }
            let Some(known) = self.sequences.get_mut(&row.seq) else { continue };
            let punished_by = known.sampling.penalties;
            assert!(punished_by.is_none() || start <= known.tokens.len(), "unknown tokens of {}", row.seq);
            known.tokens.truncate(start);
            known.tokens.extend(read);
            let past = known.tokens.clone();
            let certain = row.certain().0 as usize;
            for seq in &row.samples {
                let known = &self.sequences[seq];
                for end in certain..=certain + row.drafts as usize {
                    let digest = (0..end).fold(0, |digest, p| mix(digest, self.arena[self.slot(&table, p)]));
                    let before = if punished_by.is_none() { &[][..] } else { &past[..end] };
                    let digest = punished(digest, &known.sampling, known.prompt, before);
                    let token = draw(digest, end, known.choice, &known.sampling);
                    sampled.push(Sampled { seq: *seq, token, logprob: None, top: Vec::new() });
                    if row.inputs.get(end - start) != Some(&Input::Known(token)) {
                        break;
                    }
                }
                if row.drafts == 0 {
                    let drawn = sampled.last().map(|sampled: &Sampled| sampled.token).unwrap();
                    self.drawn.insert((plan.id, *seq), drawn);
                }
            }
        }
        for seq in &plan.end {
            self.sequences.remove(seq);
        }
        while let Some((first, _)) = self.drawn.first_key_value()
            && first.0.0 + 8 < plan.id.0
        {
            self.drawn.pop_first();
        }
        StepOutput { plan: plan.id, sampled, failed, compute_us: 0 }
    }

    pub fn known(&self) -> usize {
        self.sequences.len()
    }
}
