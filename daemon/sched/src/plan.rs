//! One iteration as plain data.
//!
//! **Owns** nothing: block ids here are names, the leases stay with the scheduler until the plan is applied or reverted.
//! The types mirror those of the worker protocol field by field.

use pagedd_core::{BlockId, Few, PlanId, SamplingParams, SequenceId, StepCost, TokenId, Tokens};

use crate::budget::Load;

/// One iteration. A worker does `begin`, `copies`, `rows`, sampling, `end`, in this order.
#[derive(Clone, PartialEq, Debug)]
pub struct StepPlan {
    /// Consecutive, from 1.
    pub id: PlanId,
    /// Sequences that enter with an empty table, for the first time or after preemption.
    pub begin: Vec<Begin>,
    /// Block copies, before any row computes.
    pub copies: Vec<BlockCopy>,
    /// What is computed: at most one row per sequence, at least one row in all.
    pub rows: Vec<Row>,
    /// Sequences that no later plan names.
    pub end: Vec<SequenceId>,
}

impl StepPlan {
    /// Replaces inputs that `output` has drawn by the tokens themselves. To be done to every later plan in flight before
    /// `output` is applied, so that it can be sent again after its predecessor is gone.
    ///
    /// Where a draw is missing, its request fails, and nobody reads what is computed from it: any token stands for it, since a worker
    /// that is sent this plan alone would not know what to make of its name.
    pub fn resolve(&mut self, output: &StepOutput) {
        let mut drawn: Vec<_> = output.sampled.iter().map(|sampled| (sampled.seq, sampled.token)).collect();
        drawn.sort_by_key(|(seq, _)| *seq);
        let first = |seq| {
            let place = drawn.partition_point(|(drawn, _)| *drawn < seq);
            drawn.get(place).filter(|(drawn, _)| *drawn == seq).map(|(_, token)| *token)
        };
        for input in self.rows.iter_mut().flat_map(|row| &mut row.inputs) {
            if let Input::Sampled { plan, seq } = *input
                && plan == output.plan
            {
                *input = Input::Known(first(seq).unwrap_or(TokenId(0)));
            }
        }
    }

    /// Input tokens of all rows.
    #[must_use]
    pub fn input_tokens(&self) -> Tokens {
        Tokens(self.rows.iter().map(|row| row.inputs.len() as u32).sum())
    }

    /// Whether parts of prompts are in it beside sequences that decode.
    pub(crate) fn is_mixed(&self) -> bool {
        let part = |row: &&Row| row.inputs.len() as u32 > 1 + row.drafts;
        let parts = self.rows.iter().filter(part).count();
        (1..self.rows.len()).contains(&parts)
    }

    /// Predicted time of all rows, in microseconds; 0 where `cost` is not known.
    #[must_use]
    pub fn predicted_us(&self, cost: &StepCost) -> f32 {
        let add = |load: Load, row: &Row| {
            let (start, certain) = (row.start.0 as usize, row.inputs.len() - row.drafts as usize);
            let guesses = row.certain().0 as u64 + 1..=(start + row.inputs.len()) as u64;
            let load = load.with(start, certain, u32::from(!row.samples.is_empty()));
            load.with_guesses(row.drafts, guesses.sum())
        };
        self.rows.iter().fold(Load::default(), add).us(cost)
    }
}

/// A sequence enters.
#[derive(Clone, PartialEq, Debug)]
pub struct Begin {
    /// Which.
    pub seq: SequenceId,
    /// Which choice of its request: part of the sampling key.
    pub choice: u32,
    /// How its tokens are drawn.
    pub sampling: SamplingParams,
    /// Tokens of its prompt. What follows is output, also in a sequence that was preempted or restored.
    pub prompt: Tokens,
    /// Where it has penalties, all tokens that are known so far; rows bring the others. Else none.
    pub tokens: Vec<TokenId>,
}

/// Copy the first `tokens` positions of block `from` into block `to`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockCopy {
    /// Read.
    pub from: BlockId,
    /// Written.
    pub to: BlockId,
    /// How many positions.
    pub tokens: Tokens,
}

/// One sequence's part of a plan: positions `[start, start + inputs.len())`.
#[derive(Clone, PartialEq, Debug)]
pub struct Row {
    /// Whose.
    pub seq: SequenceId,
    /// First position computed; everything before it is in KV already.
    pub start: Tokens,
    /// Tokens at the row's positions; never empty.
    pub inputs: Few<Input>,
    /// Change of the block table, made before the row computes.
    pub table: TableUpdate,
    /// Which sequences draw from the logits of the row's last position. None for a chunk that does not end the prompt, all
    /// choices of a request at the end of its prompt, else the row's own sequence.
    pub samples: Few<SequenceId>,
    /// How many of the inputs, the last ones, are guesses of what the row's sequence draws. It draws behind the input before
    /// the first guess, and behind each guess as long as the draw before it was that guess. Such a row draws for its own
    /// sequence only, and all of its inputs are known.
    pub drafts: u32,
}

impl Row {
    /// One past the last position that is computed whatever is drawn.
    #[must_use]
    pub fn certain(&self) -> Tokens {
        self.start + Tokens(self.inputs.len() as u32 - self.drafts)
    }

    /// How many guesses the row's draws came up to, where `drawn` are all of them in order. What was drawn behind a wrong guess
    /// does not count.
    #[must_use]
    pub fn right(&self, drawn: &[Sampled]) -> usize {
        let guesses = &self.inputs[self.inputs.len() - self.drafts as usize..];
        let right =
            guesses.iter().zip(drawn).take_while(|(guess, drawn)| **guess == Input::Known(drawn.token));
        right.count().min(drawn.len().saturating_sub(1))
    }
}

/// An input token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Input {
    /// This token.
    Known(TokenId),
    /// What `seq` draws in plan `plan`, which is not applied yet.
    Sampled {
        /// An earlier plan.
        plan: PlanId,
        /// The sequence that draws.
        seq: SequenceId,
    },
}

/// `table[from..] = blocks`. Absolute, so that it can be made twice.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TableUpdate {
    /// First entry that changes.
    pub from: u32,
    /// New entries; the table ends after them. Empty with `from` = the table's length changes nothing.
    pub blocks: Vec<BlockId>,
}

/// What a plan gave.
#[derive(Clone, PartialEq, Debug)]
pub struct StepOutput {
    /// Which plan.
    pub plan: PlanId,
    /// Drawn tokens, those of one sequence in their order.
    pub sampled: Vec<Sampled>,
    /// Sequences whose row could not be computed, and why; the other rows are complete.
    pub failed: Vec<(SequenceId, String)>,
    /// Time the worker took, in microseconds.
    pub compute_us: u64,
}

/// A drawn token.
#[derive(Clone, PartialEq, Debug)]
pub struct Sampled {
    /// Who drew.
    pub seq: SequenceId,
    /// What.
    pub token: TokenId,
    /// Its natural-log probability, where it was asked for.
    pub logprob: Option<f32>,
    /// The most likely tokens, best first; empty unless asked for.
    pub top: Vec<(TokenId, f32)>,
}
