//! Which request kills workers.
//!
//! **Owns** the sequences under suspicion, in groups of which one is tried at a time. **Never** decides that a plan killed
//! anybody: that is the engine's.
//!
//! A plan is undone as if it had never been made, so that any part of its rows can be tried alone. A row that is tried goes no
//! further than it did: so the parts need, one after another, the blocks that the whole had, and these are there. As long as there are groups, plans hold rows of the last one and of
//! nobody else. A sequence whose plan was applied is cleared, and waits until the others are; a group that kills again is
//! halved; the last request of a group fails. With `r` requests in a plan, one that kills is found after `log2(r) + 1` more
//! deaths.

use std::collections::BTreeMap;

use pagedd_core::{FinishReason, RequestId, SequenceId};

use crate::plan::{Row, StepPlan};
use crate::request::Finished;
use crate::scheduler::Scheduler;

/// Sequences that run without others, and up to which position.
pub(crate) type Group = BTreeMap<SequenceId, usize>;

/// The group that is tried next is the last. None is empty.
#[derive(Debug, Default)]
pub(crate) struct Suspects(Vec<Group>);

impl Suspects {
    /// These are not under suspicion any more, or not in the group they were in.
    pub fn remove(&mut self, rows: &[Row]) {
        for group in &mut self.0 {
            group.retain(|id, _| rows.iter().all(|row| row.seq != *id));
        }
        self.0.retain(|group| !group.is_empty());
    }

    fn push(&mut self, group: Group) {
        if !group.is_empty() {
            self.0.push(group);
        }
    }
}

impl Scheduler {
    /// The newest plan in flight killed its worker: undoes it, and has its rows tried in halves from now on. Where they are of
    /// one request, that one fails.
    ///
    /// For a plan of a group under suspicion one death is enough to say so; for others ask another worker first.
    #[must_use = "these ends are reported nowhere else"]
    pub fn accuse(&mut self, plan: StepPlan) -> Vec<Finished> {
        // By age, so that the choices of a request stand together.
        let accused: Group = plan.rows.iter().map(|row| (row.seq, row.certain().0 as usize)).collect();
        self.suspects.remove(&plan.rows);
        self.revert(plan);
        let requests = self.requests_of(accused.keys());
        if requests.len() < 2 {
            return requests
                .into_iter()
                .flat_map(|id| self.finish_request(id, FinishReason::Failed))
                .collect();
        }
        let (first, _) = requests.split_at(requests.len() / 2);
        let of_first = |(id, _): &(SequenceId, usize)| {
            self.sequences.get(id).is_some_and(|sequence| first.contains(&sequence.request))
        };
        let (first, second) = accused.into_iter().partition(of_first);
        self.suspects.push(second);
        self.suspects.push(first);
        Vec::new()
    }

    /// How many sequences are under suspicion. While there are any, nobody else runs.
    #[must_use]
    pub fn suspects(&self) -> usize {
        self.suspects.0.iter().map(Group::len).sum()
    }

    /// Fails every request under suspicion: there was no telling them apart.
    #[must_use = "these ends are reported nowhere else"]
    pub fn fail_suspects(&mut self) -> Vec<Finished> {
        let groups = std::mem::take(&mut self.suspects).0;
        let requests = self.requests_of(groups.iter().flat_map(Group::keys));
        requests.into_iter().flat_map(|id| self.finish_request(id, FinishReason::Failed)).collect()
    }

    /// Plans for the group that is tried next. `None` where nobody is under suspicion, or all that can be tried is in flight.
    pub(crate) fn try_suspects(&mut self) -> Option<StepPlan> {
        while let Some(mut group) = self.suspects.0.pop() {
            group.retain(|id, _| self.sequences.get(id).is_some_and(|sequence| !sequence.is_finished()));
            let plan = self.plan(Some(&group));
            // Where none of it can run by itself, because a share changed since, it goes back among the others untried.
            if plan.is_some() || !self.flights.is_empty() {
                self.suspects.push(group);
                return plan;
            }
        }
        None
    }

    /// Their unfinished requests, each once.
    fn requests_of<'a>(&self, ids: impl Iterator<Item = &'a SequenceId>) -> Vec<RequestId> {
        let open = ids.filter_map(|id| self.sequences.get(id)).filter(|sequence| !sequence.is_finished());
        let mut requests: Vec<RequestId> = Vec::new();
        for sequence in open {
            if requests.last() != Some(&sequence.request) {
                requests.push(sequence.request);
            }
        }
        requests
    }
}
