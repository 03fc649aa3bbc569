//! A plan, checked against what is known, as one flat batch.
//!
//! **Owns** every check of a plan. **Never** touches an arena: a plan that is wrong is refused before anything was written.

use std::ops::Range;

use pagedd_core::{BlockId, Few, NumberMap, SamplingParams};
use pagedd_wire::worker::{BlockCopy, Input, MOST_DRAFTS, Plan, Row, SequenceState};

use crate::sequence::{Draw, Draws, Sequence, Sequences};

/// A plan contradicts itself, the arenas, or what earlier plans said. The daemon is broken: there is no going on.
#[derive(thiserror::Error, Clone, PartialEq, Eq, Debug)]
pub enum PlanError {
    /// More rows than agreed.
    #[error("{rows} rows, at most {most} were agreed")]
    Rows {
        /// Of the plan.
        rows: usize,
        /// `max_num_seqs`.
        most: usize,
    },
    /// More input tokens than agreed.
    #[error("{tokens} input tokens, at most {most} were agreed")]
    Inputs {
        /// Of the plan.
        tokens: usize,
        /// `max_num_batched_tokens`.
        most: usize,
    },
    /// A sequence that no plan began.
    #[error("sequence {seq} was never begun")]
    UnknownSequence {
        /// The one.
        seq: u64,
    },
    /// A sequence with two rows, or two draws.
    #[error("sequence {seq} has more than one {what}")]
    Twice {
        /// The one.
        seq: u64,
        /// Row, sample or begin.
        what: &'static str,
    },
    /// A block outside the arena.
    #[error("block {block} of {capacity}")]
    Block {
        /// The one.
        block: u32,
        /// Blocks of the arena.
        capacity: u32,
    },
    /// A copy of more positions than a block has, or onto itself.
    #[error("copy of {tokens} positions from block {from} to block {to}")]
    Copy {
        /// How many positions.
        tokens: u32,
        /// Read.
        from: u32,
        /// Written.
        to: u32,
    },
    /// A table update that leaves a hole.
    #[error("table of sequence {seq} has {len} blocks, the update begins at {from}")]
    TableHole {
        /// Whose.
        seq: u64,
        /// Blocks it has.
        len: usize,
        /// Where the update begins.
        from: usize,
    },
    /// A row that computes nothing.
    #[error("row of sequence {seq} without inputs")]
    EmptyRow {
        /// Whose.
        seq: u64,
    },
    /// Positions beyond the table.
    #[error("positions up to {end} of sequence {seq}, its {blocks} blocks end at {limit}")]
    BeyondTable {
        /// Whose.
        seq: u64,
        /// One past the last position.
        end: u64,
        /// Blocks of its table.
        blocks: usize,
        /// Positions they hold.
        limit: u64,
    },
    /// Positions beyond the longest sequence.
    #[error("positions up to {end} of sequence {seq}, the longest sequence has {limit}")]
    BeyondContext {
        /// Whose.
        seq: u64,
        /// One past the last position.
        end: u64,
        /// `max_model_len`.
        limit: u64,
    },
    /// Two positions in one slot.
    #[error("block {block} is written twice at offset {offset}")]
    Overlap {
        /// The block.
        block: u32,
        /// First offset written twice.
        offset: u32,
    },
    /// A token outside the vocabulary.
    #[error("token {token} of sequence {seq}, the vocabulary has {vocab}")]
    Token {
        /// Whose.
        seq: u64,
        /// The token.
        token: u32,
        /// Vocabulary size.
        vocab: u32,
    },
    /// A drawn token that no recent plan drew.
    #[error("input of sequence {seq}: plan {plan} drew nothing for sequence {of}")]
    NothingDrawn {
        /// Whose input.
        seq: u64,
        /// The plan named.
        plan: u64,
        /// The sequence named.
        of: u64,
    },
    /// More guesses than agreed.
    #[error("{drafts} guesses, at most {most} were agreed")]
    Drafts {
        /// Of the plan.
        drafts: usize,
        /// [`MOST_DRAFTS`].
        most: usize,
    },
    /// Guesses that are not what a row may guess.
    #[error("row of sequence {seq}: {drafts} of its {inputs} inputs cannot be guesses")]
    NoGuess {
        /// Whose.
        seq: u64,
        /// As many as the row says.
        drafts: u32,
        /// Inputs of the row.
        inputs: usize,
    },
    /// Of a sequence with penalties, tokens before its row are not known.
    #[error("row of sequence {seq} begins at {start}, its first {known} tokens are known")]
    Past {
        /// Whose.
        seq: u64,
        /// The row's first position.
        start: u32,
        /// Tokens that are known.
        known: usize,
    },
    /// Parameters that no edge lets through.
    #[error("sampling parameters of sequence {seq} out of range")]
    Sampling {
        /// Whose.
        seq: u64,
    },
}

/// What plans are checked against.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Most rows.
    pub max_num_seqs: usize,
    /// Most input tokens.
    pub max_num_batched_tokens: usize,
    /// Longest sequence.
    pub max_model_len: u32,
    /// Tokens of a block.
    pub block_size: u32,
    /// Blocks of the arena.
    pub capacity: u32,
    /// Vocabulary size.
    pub vocab_size: u32,
}

/// One row of a batch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BatchRow {
    /// Whose.
    pub seq: u64,
    /// Position of its first token.
    pub start: u32,
    /// Its part of [`Batch::tokens`].
    pub tokens: Range<usize>,
    /// Who draws from the logits of its last position before the guesses.
    pub samples: Few<u64>,
    /// How many of the tokens, the last ones, are guesses.
    pub drafts: usize,
}

impl BatchRow {
    /// One past its last position before the guesses: where the first token drawn from it will stand.
    pub fn certain(&self) -> u32 {
        self.start + (self.tokens.len() - self.drafts) as u32
    }
}

/// A checked plan: what is computed.
///
/// Having one from [`check`] tells you: every block id is inside the arena, every position inside its sequence's table as the
/// plan leaves it, every token inside the vocabulary, no slot is written twice, and the numbers are within [`Limits`]. An `end`
/// of a sequence that is not known is no error: it says nothing that is not so.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct Batch {
    /// Input tokens, row after row.
    pub tokens: Vec<u32>,
    /// The position of each.
    pub positions: Vec<u32>,
    /// In the order of the plan.
    pub rows: Vec<BatchRow>,
    /// Rows that cannot be computed: an input is a token whose own row failed.
    pub failed: Vec<Row>,
    /// Tokens that are not known yet, 0 in [`Batch::tokens`], in order.
    pub unknown: Vec<Unknown>,
    /// Rows of the plan that change their tables.
    pub changed: Vec<usize>,
}

/// A token that a plan draws which is not done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Unknown {
    /// Index in [`Batch::tokens`].
    pub token: usize,
    /// Which plan draws it.
    pub plan: u64,
    /// For whom.
    pub seq: u64,
    /// Which of the draws of that plan.
    pub draw: u32,
}

/// Checks a plan and lays it out.
///
/// # Errors
/// [`PlanError`]; `sequences` is only read.
pub fn check(plan: &Plan, sequences: &Sequences, limits: &Limits) -> Result<Batch, PlanError> {
    if plan.rows.len() > limits.max_num_seqs {
        return Err(PlanError::Rows { rows: plan.rows.len(), most: limits.max_num_seqs });
    }
    let inputs: usize = plan.rows.iter().map(|row| row.inputs.len()).sum();
    if inputs > limits.max_num_batched_tokens {
        return Err(PlanError::Inputs { tokens: inputs, most: limits.max_num_batched_tokens });
    }
    let drafts: usize = plan.rows.iter().map(|row| row.drafts as usize).sum();
    if drafts > MOST_DRAFTS as usize {
        return Err(PlanError::Drafts { drafts, most: MOST_DRAFTS as usize });
    }
    let mut begun = NumberMap::default();
    for begin in &plan.begin {
        if begun.insert(begin.seq, begin).is_some() {
            return Err(PlanError::Twice { seq: begin.seq, what: "begin" });
        }
        check_sampling(begin.seq, &begin.sampling)?;
        if let Some(&token) = begin.tokens.iter().find(|&&token| token >= limits.vocab_size) {
            return Err(PlanError::Token { seq: begin.seq, token, vocab: limits.vocab_size });
        }
    }
    for copy in &plan.copies {
        check_copy(copy, limits)?;
    }
    once(plan.rows.iter().map(|row| row.seq), "row")?;
    once(plan.rows.iter().flat_map(|row| row.samples.iter().copied()), "sample")?;

    let mut batch = Batch::default();
    batch.tokens.reserve(inputs);
    batch.positions.reserve(inputs);
    batch.rows.reserve(plan.rows.len());
    batch.unknown.reserve(inputs.min(plan.rows.len()));
    let mut written = Vec::with_capacity(plan.rows.len());
    let mut draws = sequences.draws();
    for (index, row) in plan.rows.iter().enumerate() {
        let (base, known) = match (begun.get(&row.seq), sequences.get(row.seq)) {
            (Some(begin), _) => (&[][..], Sequence::from(*begin).known()),
            (None, Some(sequence)) => (sequence.table.as_slice(), sequence.known()),
            (None, None) => return Err(PlanError::UnknownSequence { seq: row.seq }),
        };
        check_positions(row, base, limits, &mut written)?;
        if !row.table.blocks.is_empty() || row.table.from as usize != base.len() {
            batch.changed.push(index);
        }
        check_drafts(row)?;
        check_past(row, known)?;
        // Whose row it is, is known.
        for &seq in row.samples.iter().filter(|seq| **seq != row.seq) {
            if !begun.contains_key(&seq) && sequences.get(seq).is_none() {
                return Err(PlanError::UnknownSequence { seq });
            }
        }
        lay_out(row, plan.id, &mut draws, limits, &mut batch)?;
    }
    check_overlap(written)?;
    Ok(batch)
}

/// Checks what a resync brings.
///
/// # Errors
/// [`PlanError`].
pub fn check_states(states: &[SequenceState], limits: &Limits) -> Result<(), PlanError> {
    once(states.iter().map(|state| state.seq), "state")?;
    for state in states {
        check_sampling(state.seq, &state.sampling)?;
        check_blocks(&state.blocks, limits)?;
    }
    Ok(())
}

/// Whether each stands there once.
fn once(seqs: impl Iterator<Item = u64> + Clone, what: &'static str) -> Result<(), PlanError> {
    // They come in order as a rule.
    if seqs.clone().is_sorted_by(|a, b| a < b) {
        return Ok(());
    }
    let mut seqs: Vec<u64> = seqs.collect();
    seqs.sort_unstable();
    match seqs.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(PlanError::Twice { seq: pair[0], what }),
        None => Ok(()),
    }
}

fn check_sampling(seq: u64, s: &pagedd_wire::Sampling) -> Result<(), PlanError> {
    let sane = s.temperature.is_finite()
        && s.temperature >= 0.0
        && s.top_p > 0.0
        && s.top_p <= 1.0
        && s.top_k != Some(0)
        && SamplingParams::from(*s).penalties.is_valid();
    if sane { Ok(()) } else { Err(PlanError::Sampling { seq }) }
}

fn check_blocks(blocks: &[u32], limits: &Limits) -> Result<(), PlanError> {
    match blocks.iter().find(|&&block| block >= limits.capacity) {
        Some(&block) => Err(PlanError::Block { block, capacity: limits.capacity }),
        None => Ok(()),
    }
}

fn check_copy(copy: &BlockCopy, limits: &Limits) -> Result<(), PlanError> {
    let &BlockCopy { from, to, tokens } = copy;
    check_blocks(&[from, to], limits)?;
    if from == to || tokens > limits.block_size {
        return Err(PlanError::Copy { tokens, from, to });
    }
    Ok(())
}

/// Slots of a block that a row writes. Ordered as (block, first offset, one past the last).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Written(u64);

impl Written {
    /// Offsets are below 2^16, as the tokens of a block.
    fn new(block: u32, first: u32, last: u32) -> Self {
        Self(u64::from(block) << 32 | u64::from(first) << 16 | u64::from(last))
    }

    fn block(self) -> u32 {
        (self.0 >> 32) as u32
    }

    fn first(self) -> u32 {
        (self.0 >> 16) as u32 & 0xffff
    }

    fn last(self) -> u32 {
        self.0 as u32 & 0xffff
    }
}

/// One row's table and positions; the slots it writes are added to `written`.
fn check_positions(
    row: &Row,
    base: &[BlockId],
    limits: &Limits,
    written: &mut Vec<Written>,
) -> Result<(), PlanError> {
    let seq = row.seq;
    let from = row.table.from as usize;
    if from > base.len() {
        return Err(PlanError::TableHole { seq, len: base.len(), from });
    }
    check_blocks(&row.table.blocks, limits)?;
    if row.inputs.is_empty() {
        return Err(PlanError::EmptyRow { seq });
    }
    let (start, end) = (u64::from(row.start), u64::from(row.start) + row.inputs.len() as u64);
    let size = u64::from(limits.block_size);
    let blocks = from + row.table.blocks.len();
    if end > u64::from(limits.max_model_len) {
        return Err(PlanError::BeyondContext { seq, end, limit: limits.max_model_len.into() });
    }
    if end > blocks as u64 * size {
        return Err(PlanError::BeyondTable { seq, end, blocks, limit: blocks as u64 * size });
    }
    // [start, end) in blocks [start / size, end / size], rounded up.
    for index in start / size..end.div_ceil(size) {
        let at = index as usize;
        let block = if at < from { base[at].0 } else { row.table.blocks[at - from] };
        let first = start.saturating_sub(index * size) as u32;
        let last = (end - index * size).min(size) as u32;
        written.push(Written::new(block, first, last));
    }
    Ok(())
}

/// Whether the tokens before a row are known, where penalties need them: `known` of them are.
fn check_past(row: &Row, known: Option<usize>) -> Result<(), PlanError> {
    let Row { seq, start, .. } = *row;
    match known {
        Some(known) if known < start as usize => Err(PlanError::Past { seq, start, known }),
        Some(_) | None => Ok(()),
    }
}

fn check_drafts(row: &Row) -> Result<(), PlanError> {
    let Row { seq, drafts, ref inputs, ref samples, .. } = *row;
    let certain = inputs.len().checked_sub(drafts as usize).filter(|certain| *certain > 0);
    let known = |certain: usize| inputs[certain..].iter().all(|input| matches!(input, Input::Known(_)));
    if drafts == 0 || (**samples == [seq] && certain.is_some_and(known)) {
        return Ok(());
    }
    Err(PlanError::NoGuess { seq, drafts, inputs: inputs.len() })
}

fn check_overlap(mut written: Vec<Written>) -> Result<(), PlanError> {
    written.sort_unstable();
    match written
        .windows(2)
        .find(|pair| pair[0].block() == pair[1].block() && pair[1].first() < pair[0].last())
    {
        Some(pair) => Err(PlanError::Overlap { block: pair[0].block(), offset: pair[1].first() }),
        None => Ok(()),
    }
}

/// Adds a row's tokens to the batch, or the row to the failed ones.
fn lay_out(
    row: &Row,
    plan: u64,
    draws: &mut Draws<'_>,
    limits: &Limits,
    batch: &mut Batch,
) -> Result<(), PlanError> {
    let first = batch.tokens.len();
    let mut computable = true;
    for &input in &row.inputs {
        let token = match input {
            Input::Known(token) => token,
            Input::Sampled { plan: of_plan, seq: of } => {
                let draw = if of_plan < plan { draws.get(of_plan, of) } else { None };
                match draw {
                    Some(Draw::Token(token)) => token,
                    Some(Draw::Pending(draw)) => {
                        let token = batch.tokens.len();
                        batch.unknown.push(Unknown { token, plan: of_plan, seq: of, draw });
                        0
                    }
                    Some(Draw::Failed) => {
                        computable = false;
                        continue;
                    }
                    None => return Err(PlanError::NothingDrawn { seq: row.seq, plan: of_plan, of }),
                }
            }
        };
        if token >= limits.vocab_size {
            return Err(PlanError::Token { seq: row.seq, token, vocab: limits.vocab_size });
        }
        batch.tokens.push(token);
    }
    if computable {
        batch.positions.extend((row.start..).take(row.inputs.len()));
        batch.rows.push(BatchRow {
            seq: row.seq,
            start: row.start,
            tokens: first..batch.tokens.len(),
            samples: Few::from_slice(&row.samples),
            drafts: row.drafts as usize,
        });
    } else {
        batch.tokens.truncate(first);
        batch.unknown.retain(|unknown| unknown.token < first);
        batch.failed.push(row.clone());
    }
    Ok(())
}

/// The sequence-side effect of a plan and its checked batch, before anything is computed.
pub fn apply(plan: &Plan, batch: &Batch, sequences: &mut Sequences) {
    for begin in &plan.begin {
        sequences.begin(begin);
    }
    for row in batch.changed.iter().map(|&row| &plan.rows[row]) {
        sequences.update_table(row.seq, row.table.from as usize, &row.table.blocks);
    }
    if !sequences.remember() {
        return;
    }
    for row in &batch.rows {
        sequences.read(row.seq, row.start as usize, &batch.tokens[row.tokens.clone()]);
    }
}

/// The table of a row, as [`apply`] left it.
pub fn table<'a>(sequences: &'a Sequences, row: &BatchRow) -> &'a [BlockId] {
    sequences.get(row.seq).map_or(&[], |Sequence { table, .. }| table)
}

#[cfg(test)]
mod tests;
