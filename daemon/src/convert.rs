//! Scheduler types ⇄ wire types. The two are kept apart so that a frame is never a live value.

use pagedd_core::{BlockId, PlanId, SequenceId, TokenId};
use pagedd_sched::{Input, SequenceSnapshot, StepOutput, StepPlan};
use pagedd_wire::worker as wire;

/// A plan as its frame.
pub fn plan(plan: &StepPlan) -> wire::Plan {
    wire::Plan {
        id: plan.id.0,
        begin: plan
            .begin
            .iter()
            .map(|b| wire::Begin { seq: b.seq.0, choice: b.choice, sampling: b.sampling.into() })
            .collect(),
        copies: plan
            .copies
            .iter()
            .map(|c| wire::BlockCopy { from: c.from.0, to: c.to.0, tokens: c.tokens.0 })
            .collect(),
        rows: plan.rows.iter().map(row).collect(),
        end: plan.end.iter().map(|seq| seq.0).collect(),
    }
}

fn row(row: &pagedd_sched::Row) -> wire::Row {
    wire::Row {
        seq: row.seq.0,
        start: row.start.0,
        inputs: row
            .inputs
            .iter()
            .map(|input| match *input {
                Input::Known(token) => wire::Input::Known(token.0),
                Input::Sampled { plan, seq } => wire::Input::Sampled { plan: plan.0, seq: seq.0 },
            })
            .collect(),
        table: wire::TableUpdate { from: row.table.from, blocks: blocks(&row.table.blocks) },
        samples: row.samples.iter().map(|seq| seq.0).collect(),
        drafts: row.drafts,
    }
}

fn blocks(ids: &[BlockId]) -> Vec<u32> {
    ids.iter().map(|block| block.0).collect()
}

/// A live sequence as a fresh worker must know it.
pub fn sequence(snapshot: &SequenceSnapshot) -> wire::SequenceState {
    wire::SequenceState {
        seq: snapshot.seq.0,
        choice: snapshot.choice,
        sampling: snapshot.sampling.into(),
        tokens: snapshot.tokens.iter().map(|token| token.0).collect(),
        blocks: blocks(&snapshot.blocks),
    }
}

/// A worker's output, of the plan that was out. A draw that the plan did not ask for is the scheduler's to leave out.
pub fn output(output: wire::Output) -> StepOutput {
    StepOutput {
        plan: PlanId(output.plan),
        sampled: output
            .sampled
            .into_iter()
            .map(|s| pagedd_sched::Sampled {
                seq: SequenceId(s.seq),
                token: TokenId(s.token),
                logprob: s.logprob,
                top: s.top.into_iter().map(|(token, logprob)| (TokenId(token), logprob)).collect(),
            })
            .collect(),
        failed: output.failed.into_iter().map(|(seq, reason)| (SequenceId(seq), reason)).collect(),
        compute_us: output.compute_us,
    }
}
