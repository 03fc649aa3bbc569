//! Guesses of what sequences say next, tried in the same step as what they are asked to compute anyway: prompt lookup.
//!
//! **Owns** what is guessed, how often guesses of a sequence came true, and how many a step tries. **Never** changes what is
//! drawn: a guess is computed behind the last token, the worker draws at each position what it would have drawn without, and
//! the first draw that is no guess ends the row. Nor does a guess cost anyone else a block or a place in the step.

use pagedd_core::{StepCost, TokenId};

use crate::budget::Load;
use crate::lookup::{LONGEST, Lookup, Repetition, SHORTEST};
use crate::plan::{Input, Row, Sampled};
use crate::reclaim::take;
use crate::scheduler::Scheduler;
use crate::sequence::{Sequence, State};
use crate::step::Step;

/// Most guesses in a row. With the last token they are 16: beyond, a step gets no cheaper by the token.
const DEEPEST: usize = 15;
/// By length of a repetition: what a guess is worth before any was tried.
const PRIORS: [(usize, f32); 5] = [(SHORTEST, 0.2), (3, 0.3), (4, 0.5), (8, 0.7), (LONGEST, 0.8)];
/// As how many tries the first chance counts.
const PRIOR_TRIES: f32 = 3.0;
/// What remains of a try's weight at the next one.
const DECAY: f32 = 0.9;
/// No guess is sure.
const SUREST: f32 = 0.97;
/// Of what guesses are expected to give, so much is believed: a step that gains nothing is a step that loses.
const BELIEVED: f32 = 0.8;
/// Where nothing is known of a step's time: a token more costs 0.15 of a step of one.
const ASSUMED: StepCost = StepCost { body_us: assumed(), ..StepCost::UNKNOWN };

const fn assumed() -> [f32; StepCost::SIZES.len()] {
    let mut us = [0.0; StepCost::SIZES.len()];
    let mut i = 0;
    while i < us.len() {
        us[i] = 0.85 + 0.15 * StepCost::SIZES[i] as f32;
        i += 1;
    }
    us
}

/// Guesses of one kind that came true, and all of them, weighed by age.
#[derive(Clone, Copy, Debug)]
struct Score {
    hits: f32,
    tries: f32,
}

/// What a sequence's past says of its future.
#[derive(Debug)]
pub(crate) struct Drafter {
    lookup: Lookup,
    /// By length of the repetition, as in [`PRIORS`].
    scores: [Score; PRIORS.len()],
    /// Kind and first token of the last guess: right or wrong, it teaches, whether it was tried or not.
    guessed: Option<(usize, TokenId)>,
}

impl Default for Drafter {
    fn default() -> Self {
        let scores = PRIORS.map(|(_, chance)| Score { hits: chance * PRIOR_TRIES, tries: PRIOR_TRIES });
        Self { lookup: Lookup::default(), scores, guessed: None }
    }
}

impl Drafter {
    /// What may follow `tokens`, and the chance of each token that follows a right one.
    fn guess(&mut self, tokens: &[TokenId], most: usize) -> Option<(f32, Vec<TokenId>)> {
        let found = self.lookup.longest(tokens)?;
        let kind = PRIORS.iter().rposition(|(len, _)| found.len >= *len)?;
        let guess = follow(tokens, found, most);
        self.guessed = guess.first().map(|first| (kind, *first));
        let Score { hits, tries } = self.scores[kind];
        Some(((hits / tries).min(SUREST), guess))
    }

    /// Of `tried` guesses `right` were right, and `drawn` is the token behind the last known one.
    pub fn learn(&mut self, tried: usize, right: usize, drawn: TokenId) {
        let Some((kind, first)) = self.guessed.take() else { return };
        let hits = if tried == 0 { usize::from(first == drawn) } else { right };
        let missed = hits < tried.max(1);
        let score = &mut self.scores[kind];
        score.hits = score.hits * DECAY + hits as f32;
        score.tries = score.tries * DECAY + hits as f32 + f32::from(u8::from(missed));
    }
}

/// The tokens that followed the repetition, which goes on into what it predicts.
fn follow(tokens: &[TokenId], found: Repetition, most: usize) -> Vec<TokenId> {
    let mut guess: Vec<TokenId> = Vec::with_capacity(most);
    for at in found.next..found.next + most {
        let token = tokens.get(at).or_else(|| guess.get(at - tokens.len())).copied();
        guess.extend(token);
    }
    guess
}

/// A row that can guess.
#[derive(Debug)]
struct Candidate {
    /// Index of the row.
    row: usize,
    /// Positions that each guess sees.
    sees: usize,
    /// Chance of each guess behind a right one.
    chance: f32,
    guess: Vec<TokenId>,
}

/// How many guesses of each candidate to try, `most` in all: as many as make the most tokens of a microsecond, and fit into `left_us`.
///
/// A guess gives a token by the chance that all guesses up to it are right. The likeliest are tried first, and the step's time
/// is compared with that of its `decoding` rows alone: prompt tokens beside them, in `all`, are computed at their own price.
fn depths(
    cost: &StepCost,
    all: Load,
    decoding: Load,
    left_us: Option<f32>,
    candidates: &[Candidate],
    most: usize,
) -> Vec<usize> {
    let mut likely: Vec<(f32, usize)> = Vec::new();
    for (at, candidate) in candidates.iter().enumerate() {
        let chances = std::iter::successors(Some(candidate.chance), |chance| Some(chance * candidate.chance));
        likely.extend(chances.take(candidate.guess.len()).map(|chance| (chance, at)));
    }
    likely.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    likely.truncate(most);
    let cost = if cost.is_known() { cost } else { &ASSUMED };
    let (before, alone, rows) = (all.us(cost), decoding.us(cost), decoding.rows() as f32);
    let (mut gain, mut seen) = (0.0, 0);
    let (mut best, mut chosen) = (rows / alone, 0);
    for (number, (chance, at)) in (1..).zip(&likely) {
        gain += chance * BELIEVED;
        seen += candidates[*at].sees as u64;
        let more = all.with_guesses(number, seen).us(cost) - before;
        if left_us.is_some_and(|left_us| more > left_us) {
            break;
        }
        let rate = (rows + gain) / (alone + more);
        if rate > best {
            (best, chosen) = (rate, number as usize);
        }
    }
    let mut depths = vec![0; candidates.len()];
    for (_, at) in &likely[..chosen] {
        depths[*at] += 1;
    }
    depths
}

impl Scheduler {
    /// Lets decoding rows of a planned step try guesses, with what the step has left of tokens and of blocks.
    pub(crate) fn add_drafts(&mut self, step: &mut Step) {
        let most = step.tokens_left.min(self.config.max_drafts as usize);
        if most == 0 {
            return;
        }
        let (mut all, mut decoding) = (Load::default(), Load::default());
        let mut candidates = Vec::new();
        for (at, row) in step.plan.rows.iter().enumerate() {
            let start = row.start.0 as usize;
            let draws = u32::from(!row.samples.is_empty());
            all = all.with(start, row.inputs.len(), draws);
            if row.inputs.len() == 1 && draws == 1 {
                decoding = decoding.with(start, 1, 1);
            }
            if let Some((chance, guess)) = self.guess(row) {
                candidates.push(Candidate { row: at, sees: row.start.0 as usize + 1, chance, guess });
            }
        }
        let depths = depths(&self.config.cost, all, decoding, step.budget.left_us(), &candidates, most);
        for (Candidate { row, mut guess, .. }, depth) in candidates.into_iter().zip(depths) {
            guess.truncate(depth);
            self.extend_row(step, row, &guess);
        }
    }

    /// What may follow the row's sequence, if it decodes from tokens that are all known.
    fn guess(&mut self, row: &Row) -> Option<(f32, Vec<TokenId>)> {
        let sequence = self.sequences.get_mut(&row.seq)?;
        let decodes = row.inputs.len() == 1
            && *row.samples == [row.seq]
            && sequence.running().is_some()
            && sequence.in_flight == 1
            && row.start.0 as usize + 1 == sequence.tokens.len()
            && sequence.tokens.len() > sequence.prompt_len;
        let allowed = self
            .tenants
            .get(&sequence.tenant)
            .is_some_and(|tenant| tenant.prompt_lookup.unwrap_or(self.config.prompt_lookup));
        // The last token that a sequence may have is never an input.
        let most = (sequence.limit - sequence.tokens.len()).saturating_sub(1).min(DEEPEST);
        if !decodes || !allowed || most == 0 {
            return None;
        }
        let Sequence { drafter, tokens, .. } = sequence;
        drafter.guess(tokens, most)
    }

    /// Puts guesses behind a row's last token, as many as blocks can be had for without asking anyone.
    fn extend_row(&mut self, step: &mut Step, row: usize, guess: &[TokenId]) {
        let size = self.config.block_size.0 as usize;
        let row = &mut step.plan.rows[row];
        let first = row.start.0 as usize + row.inputs.len();
        let wanted = (first + guess.len()).div_ceil(size);
        let Some(sequence) = self.sequences.get_mut(&row.seq) else { return };
        let account = sequence.account;
        let State::Running(progress) = &mut sequence.state else { return };
        // Nobody waits for a block that a guess takes.
        let spare = !step.lending_closed
            && step.outstanding_total == 0
            && step.claims.is_empty()
            && step.alone.is_none();
        while spare && progress.table.len() < wanted {
            let place = progress.table.next_place(pagedd_core::Blocks(1));
            let Ok(lease) = take(&mut self.pool, &mut step.claims, account, place) else { break };
            row.table.blocks.push(lease.block());
            progress.table.push(lease);
        }
        progress.sent = progress.table.len();
        let tried = guess.len().min(progress.table.len() * size - first);
        row.inputs.extend(guess[..tried].iter().copied().map(Input::Known));
        row.drafts = tried as u32;
        progress.guesses = tried > 0;
        step.tokens_left -= tried;
    }

    /// Takes a row's draws: how many of its guesses were right, and what that says of the next ones.
    pub(crate) fn judge(&mut self, row: &Row, drawn: &[Sampled]) -> usize {
        let right = row.right(drawn);
        if let (Some(sequence), Some(first)) = (self.sequences.get_mut(&row.seq), drawn.first()) {
            let tried = row.drafts as usize;
            sequence.drafter.learn(tried, right, first.token);
            if let Some(tenant) = self.tenants.get_mut(&sequence.tenant) {
                tenant.counters.drafts += tried as u64;
                tenant.counters.drafts_accepted += right as u64;
            }
        }
        right
    }
}

#[cfg(test)]
mod tests;
