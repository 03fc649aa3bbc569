//! What the worker knows about sequences between plans.
//!
//! **Owns** block tables, sampling parameters and the tokens drawn by recent plans. **Never** decides anything: all of it is soft,
//! and [`Sequences::resync`] replaces it.

use std::collections::VecDeque;

use pagedd_core::{BlockId, NumberMap, SamplingParams};
use pagedd_wire::worker::{Begin, SequenceState};

use crate::sample::Past;

/// Plans whose drawn tokens are kept. The daemon has few in flight; a plan that is applied is no longer asked for.
const RECENT_PLANS: u64 = 16;

/// One sequence.
#[derive(Clone, PartialEq, Debug)]
pub struct Sequence {
    /// Which choice of its request.
    pub choice: u32,
    /// How its tokens are drawn.
    pub sampling: SamplingParams,
    /// Tokens of its prompt.
    pub prompt: u32,
    /// Its blocks, in order.
    pub table: Vec<BlockId>,
    /// Its tokens, where its penalties need them.
    history: Option<History>,
    /// The plan that ended it. It is forgotten when a later plan comes, not before: a plan may run twice.
    ended: Option<u64>,
}

/// A sequence's tokens by position. Each plan says again what stands at its positions, so that one can run twice.
#[derive(Clone, PartialEq, Eq, Debug)]
struct History {
    /// So many are the prompt.
    prompt: usize,
    tokens: Vec<u32>,
}

impl History {
    fn of(sampling: &SamplingParams, prompt: u32, tokens: &[u32]) -> Option<Self> {
        let needed = !sampling.penalties.is_none();
        needed.then(|| Self { prompt: prompt as usize, tokens: tokens.to_vec() })
    }
}

impl From<&Begin> for Sequence {
    fn from(begin: &Begin) -> Self {
        let sampling = begin.sampling.into();
        let history = History::of(&sampling, begin.prompt, &begin.tokens);
        Self { choice: begin.choice, sampling, prompt: begin.prompt, table: Vec::new(), history, ended: None }
    }
}

impl Sequence {
    /// Tokens that are known of it; `None` where nobody needs them.
    pub fn known(&self) -> Option<usize> {
        self.history.as_ref().map(|history| history.tokens.len())
    }
}

/// What became of a draw.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Draw {
    /// This token.
    Token(u32),
    /// The row failed.
    Failed,
    /// Which it is of its plan's, which is not done.
    Pending(u32),
}

/// What a plan drew.
#[derive(Default, Debug)]
struct Drawn {
    plan: u64,
    /// By sequence, ascending: rows come in that order as a rule, so that each is added at the end.
    draws: Vec<(u64, Draw)>,
    /// Behind the one that was changed last: the next one to be, as a rule.
    next: usize,
}

impl Drawn {
    fn set(&mut self, seq: u64, draw: Draw) {
        let Self { draws, next, .. } = self;
        if draws.last().is_none_or(|(last, _)| *last < seq) {
            return draws.push((seq, draw));
        }
        match place(draws, *next, seq) {
            Ok(at) => (draws[at].1, *next) = (draw, at + 1),
            Err(at) => draws.insert(at, (seq, draw)),
        }
    }
}

/// Where `seq` stands in `draws`, as a rule at `next`; or where it would.
fn place(draws: &[(u64, Draw)], next: usize, seq: u64) -> Result<usize, usize> {
    match draws.get(next) {
        Some((there, _)) if *there == seq => Ok(next),
        Some(_) | None => draws.binary_search_by_key(&seq, |(seq, _)| *seq),
    }
}

/// Looks up draws, one after the other as they were made.
#[derive(Debug)]
pub struct Draws<'a> {
    sequences: &'a Sequences,
    plan: u64,
    of_plan: &'a [(u64, Draw)],
    next: usize,
}

impl Draws<'_> {
    /// What `seq` drew in `plan`.
    pub fn get(&mut self, plan: u64, seq: u64) -> Option<Draw> {
        if self.plan != plan {
            let drawn = self.sequences.drawn.iter().rev().find(|drawn| drawn.plan == plan)?;
            (self.plan, self.of_plan, self.next) = (plan, &drawn.draws, 0);
        }
        let at = place(self.of_plan, self.next, seq).ok()?;
        self.next = at + 1;
        Some(self.of_plan[at].1)
    }
}

/// All sequences.
#[derive(Default, Debug)]
pub struct Sequences {
    live: NumberMap<u64, Sequence>,
    /// Of the live ones, those whose tokens are kept.
    remembered: usize,
    /// Plans that ended sequences, and these.
    ended: Vec<(u64, u64)>,
    /// Of recent plans, ascending.
    drawn: VecDeque<Drawn>,
    /// Kept for its memory.
    spare: Vec<(u64, Draw)>,
}

impl Sequences {
    /// Forgets everything; these are the live ones.
    pub fn resync(&mut self, states: Vec<SequenceState>) {
        (self.drawn, self.ended) = (VecDeque::new(), Vec::new());
        self.live = states
            .into_iter()
            .map(|s| {
                let sampling = s.sampling.into();
                let sequence = Sequence {
                    choice: s.choice,
                    sampling,
                    prompt: s.prompt,
                    table: s.blocks.into_iter().map(BlockId).collect(),
                    history: History::of(&sampling, s.prompt, &s.tokens),
                    ended: None,
                };
                (s.seq, sequence)
            })
            .collect();
        self.remembered = self.live.values().filter(|sequence| sequence.history.is_some()).count();
    }

    /// Whether tokens of any sequence are kept.
    pub fn remember(&self) -> bool {
        self.remembered > 0
    }

    /// One sequence.
    pub fn get(&self, seq: u64) -> Option<&Sequence> {
        self.live.get(&seq)
    }

    /// What recent plans drew.
    pub fn draws(&self) -> Draws<'_> {
        // Plans are counted from 1.
        Draws { sequences: self, plan: 0, of_plan: &[], next: 0 }
    }

    /// Forgets what plans before `plan` have ended, and draws too old to be asked for.
    pub fn forget_before(&mut self, plan: u64) {
        let ended = self.ended.extract_if(.., |(by, _)| *by < plan);
        for (by, seq) in ended {
            // It may have begun again.
            if self.live.get(&seq).is_some_and(|sequence| sequence.ended == Some(by)) {
                self.remembered -= usize::from(self.live.remove(&seq).is_some_and(|s| s.history.is_some()));
            }
        }
        let old = plan.saturating_sub(RECENT_PLANS);
        while self.drawn.front().is_some_and(|drawn| drawn.plan < old) {
            self.spare = self.drawn.pop_front().unwrap_or_default().draws;
        }
    }

    /// A sequence enters, replacing what has its id.
    pub fn begin(&mut self, begin: &Begin) {
        let sequence = Sequence::from(begin);
        self.remembered += usize::from(sequence.history.is_some());
        let before = self.live.insert(begin.seq, sequence);
        self.remembered -= usize::from(before.is_some_and(|sequence| sequence.history.is_some()));
    }

    /// `table[from..] = blocks`, `from` being at most the table's length.
    pub fn update_table(&mut self, seq: u64, from: usize, blocks: &[u32]) {
        if let Some(sequence) = self.live.get_mut(&seq) {
            sequence.table.truncate(from);
            sequence.table.extend(blocks.iter().copied().map(BlockId));
        }
    }

    /// `tokens` stand at positions `[start, ..)` of `seq`, and nothing behind them is known any more.
    pub fn read(&mut self, seq: u64, start: usize, tokens: &[u32]) {
        if let Some(history) = self.live.get_mut(&seq).and_then(|sequence| sequence.history.as_mut()) {
            history.tokens.truncate(start);
            history.tokens.extend_from_slice(tokens);
        }
    }

    /// The tokens of `seq` before `position`; none where nobody needs them.
    pub fn past(&self, seq: u64, position: usize) -> Past<'_> {
        let history = self.live.get(&seq).and_then(|sequence| sequence.history.as_ref());
        let Some(History { prompt, tokens }) = history else { return Past::default() };
        let before = &tokens[..position.min(tokens.len())];
        let (prompt, output) = before.split_at((*prompt).min(before.len()));
        Past { prompt, output }
    }

    /// `seq` drew in `plan`.
    pub fn record(&mut self, plan: u64, seq: u64, draw: Draw) {
        // One of the last.
        let at = self.drawn.iter().rposition(|drawn| drawn.plan <= plan);
        if let Some(drawn) = at.and_then(|at| self.drawn.get_mut(at)).filter(|drawn| drawn.plan == plan) {
            return drawn.set(seq, draw);
        }
        let mut draws = std::mem::take(&mut self.spare);
        draws.clear();
        draws.push((seq, draw));
        self.drawn.insert(at.map_or(0, |at| at + 1), Drawn { plan, draws, next: 0 });
    }

    /// No later plan names `seq`.
    pub fn end(&mut self, plan: u64, seq: u64) {
        if let Some(sequence) = self.live.get_mut(&seq) {
            sequence.ended = Some(plan);
            self.ended.push((plan, seq));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(seq: u64) -> Begin {
        Begin { seq, choice: 0, sampling: SamplingParams::GREEDY.into(), prompt: 0, tokens: vec![] }
    }

    #[test]
    fn an_ended_sequence_stays_until_a_later_plan_so_that_its_plan_can_run_again() {
        let mut all = Sequences::default();
        all.begin(&begin(1));
        all.end(7, 1);
        all.forget_before(7);
        assert!(all.get(1).is_some());
        all.forget_before(8);
        assert!(all.get(1).is_none());
    }

    #[test]
    fn a_sequence_that_begins_again_is_not_ended_by_its_former_life() {
        let mut all = Sequences::default();
        all.begin(&begin(1));
        all.end(7, 1);
        all.begin(&begin(1));
        all.forget_before(9);
        assert_eq!(all.get(1).unwrap().table, []);
    }

    #[test]
    fn draws_are_kept_for_recent_plans_only() {
        let mut all = Sequences::default();
        for plan in 1..=100 {
            all.forget_before(plan);
            all.record(plan, 5, Draw::Token(plan as u32));
        }
        assert_eq!(all.draws().get(99, 5), Some(Draw::Token(99)));
        assert_eq!(all.draws().get(99, 6), None);
        assert!(all.drawn.len() as u64 <= RECENT_PLANS + 1);
    }

    #[test]
    fn draws_are_found_in_any_order_and_the_last_word_counts() {
        let mut all = Sequences::default();
        for (plan, seq, token) in [(2, 5, 1), (2, 9, 2), (2, 3, 3), (1, 7, 4), (2, 7, 5), (2, 9, 6)] {
            all.record(plan, seq, Draw::Token(token));
        }
        all.record(2, 3, Draw::Failed);
        let mut draws = all.draws();
        let found = [(2, 3), (2, 5), (1, 7), (2, 9), (2, 7), (1, 9), (3, 7), (2, 7)];
        let found = found.map(|(plan, seq)| draws.get(plan, seq));
        let token = |token| Some(Draw::Token(token));
        let expected = [Some(Draw::Failed), token(1), token(4), token(6), token(5), None, None, token(5)];
        assert_eq!(found, expected);
    }

    #[test]
    fn what_was_generated_is_output_whatever_was_computed_again() {
        let mut sampling = SamplingParams::GREEDY;
        let mut all = Sequences::default();
        all.begin(&Begin { seq: 1, choice: 0, sampling: sampling.into(), prompt: 2, tokens: vec![] });
        all.read(1, 0, &[5, 6]);
        assert_eq!(all.past(1, 2), Past::default(), "without penalties nothing is kept");
        sampling.penalties.frequency = 0.5;
        let begin = Begin { seq: 1, choice: 0, sampling: sampling.into(), prompt: 2, tokens: vec![5, 6, 7] };
        all.begin(&begin);
        for _ in 0..2 {
            // Guesses, of which the first is right.
            all.read(1, 2, &[7, 8, 9]);
            assert_eq!(all.past(1, 3), Past { prompt: &[5, 6], output: &[7] });
            assert_eq!(all.past(1, 5), Past { prompt: &[5, 6], output: &[7, 8, 9] });
            all.read(1, 4, &[3]);
            assert_eq!(all.past(1, 5), Past { prompt: &[5, 6], output: &[7, 8, 3] });
        }
        all.resync(vec![SequenceState {
            seq: 1,
            choice: 0,
            sampling: sampling.into(),
            tokens: vec![5, 6, 7, 8],
            prompt: 2,
            blocks: vec![],
        }]);
        assert_eq!(all.past(1, 4), Past { prompt: &[5, 6], output: &[7, 8] });
    }

    #[test]
    fn a_table_update_can_be_made_twice() {
        let mut all = Sequences::default();
        all.begin(&begin(1));
        all.update_table(1, 0, &[4, 5, 6]);
        for _ in 0..2 {
            all.update_table(1, 2, &[8, 9]);
            assert_eq!(all.get(1).unwrap().table, [4, 5, 8, 9].map(BlockId));
        }
    }
}
