//! What the worker knows about sequences between plans.
//!
//! **Owns** block tables, sampling parameters and the tokens drawn by recent plans. **Never** decides anything: all of it is soft,
//! and [`Sequences::resync`] replaces it.

use std::collections::{BTreeMap, HashMap};

use pagedd_core::{BlockId, SamplingParams};
use pagedd_wire::worker::{Begin, SequenceState};

/// Plans whose drawn tokens are kept. The daemon has few in flight; a plan that is applied is no longer asked for.
const RECENT_PLANS: u64 = 16;

/// One sequence.
#[derive(Clone, PartialEq, Debug)]
pub struct Sequence {
    /// Which choice of its request.
    pub choice: u32,
    /// How its tokens are drawn.
    pub sampling: SamplingParams,
    /// Its blocks, in order.
    pub table: Vec<BlockId>,
    /// The plan that ended it. It is forgotten when a later plan comes, not before: a plan may run twice.
    ended: Option<u64>,
}

impl From<&Begin> for Sequence {
    fn from(begin: &Begin) -> Self {
        Self { choice: begin.choice, sampling: begin.sampling.into(), table: Vec::new(), ended: None }
    }
}

/// What became of a draw.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Draw {
    /// This token.
    Token(u32),
    /// The row failed.
    Failed,
}

/// All sequences.
#[derive(Default, Debug)]
pub struct Sequences {
    live: HashMap<u64, Sequence>,
    /// By plan, then by sequence.
    drawn: BTreeMap<u64, HashMap<u64, Draw>>,
}

impl Sequences {
    /// Forgets everything; these are the live ones.
    pub fn resync(&mut self, states: Vec<SequenceState>) {
        self.drawn.clear();
        self.live = states
            .into_iter()
            .map(|s| {
                let sequence = Sequence {
                    choice: s.choice,
                    sampling: s.sampling.into(),
                    table: s.blocks.into_iter().map(BlockId).collect(),
                    ended: None,
                };
                (s.seq, sequence)
            })
            .collect();
    }

    /// One sequence.
    pub fn get(&self, seq: u64) -> Option<&Sequence> {
        self.live.get(&seq)
    }

    /// What `seq` drew in `plan`.
    pub fn drawn(&self, plan: u64, seq: u64) -> Option<Draw> {
        self.drawn.get(&plan)?.get(&seq).copied()
    }

    /// Forgets what plans before `plan` have ended, and draws too old to be asked for.
    pub fn forget_before(&mut self, plan: u64) {
        self.live.retain(|_, s| s.ended.is_none_or(|ended| ended >= plan));
        self.drawn = self.drawn.split_off(&plan.saturating_sub(RECENT_PLANS));
    }

    /// A sequence enters, replacing what has its id.
    pub fn begin(&mut self, begin: &Begin) {
        self.live.insert(begin.seq, begin.into());
    }

    /// `table[from..] = blocks`, `from` being at most the table's length.
    pub fn update_table(&mut self, seq: u64, from: usize, blocks: &[u32]) {
        if let Some(sequence) = self.live.get_mut(&seq) {
            sequence.table.truncate(from);
            sequence.table.extend(blocks.iter().copied().map(BlockId));
        }
    }

    /// `seq` drew in `plan`.
    pub fn record(&mut self, plan: u64, seq: u64, draw: Draw) {
        self.drawn.entry(plan).or_default().insert(seq, draw);
    }

    /// No later plan names `seq`.
    pub fn end(&mut self, plan: u64, seq: u64) {
        if let Some(sequence) = self.live.get_mut(&seq) {
            sequence.ended = Some(plan);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(seq: u64) -> Begin {
        Begin { seq, choice: 0, sampling: SamplingParams::GREEDY.into() }
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
        assert_eq!(all.drawn(99, 5), Some(Draw::Token(99)));
        assert_eq!(all.drawn(99, 6), None);
        assert!(all.drawn.len() as u64 <= RECENT_PLANS + 1);
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
