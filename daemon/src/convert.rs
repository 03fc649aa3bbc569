//! Scheduler types ⇄ wire types and saved types. They are kept apart so that neither a frame nor a saved record is ever a live value.

use pagedd_core::{BlockId, PlanId, SequenceId, TokenId, Tokens};
use pagedd_engine::StepRecord;
use pagedd_journal as saved;
use pagedd_sched::{Input, NewRequest, Restored, RestoredChoice, SequenceSnapshot, StepOutput, StepPlan};
use pagedd_wire::plan::{PlanParts, RowParts, RowWriter};
use pagedd_wire::worker as wire;
use pagedd_wire::{Channel, ChannelError, gateway};

use crate::quota::{Cost, Excess, Rate, Rates};

/// Holds a plan on its way to a worker.
pub fn hold_plan(plan: &StepPlan, channel: &mut Channel) -> Result<(), ChannelError> {
    let begin: Vec<_> = plan.begin.iter().map(begin).collect();
    let copy =
        |c: &pagedd_sched::BlockCopy| wire::BlockCopy { from: c.from.0, to: c.to.0, tokens: c.tokens.0 };
    let copies: Vec<_> = plan.copies.iter().map(copy).collect();
    let end: Vec<_> = plan.end.iter().map(|seq| seq.0).collect();
    let parts = PlanParts { id: plan.id.0, begin: &begin, copies: &copies, rows: &plan.rows, end: &end };
    channel.hold_plan(&parts, row)
}

fn begin(begin: &pagedd_sched::Begin) -> wire::Begin {
    wire::Begin {
        seq: begin.seq.0,
        choice: begin.choice,
        sampling: begin.sampling.into(),
        prompt: begin.prompt.0,
        tokens: begin.tokens.iter().map(|token| token.0).collect(),
    }
}

fn row(row: &pagedd_sched::Row, to: &mut RowWriter<'_>) {
    let input = |input: &Input| match *input {
        Input::Known(token) => wire::Input::Known(token.0),
        Input::Sampled { plan, seq } => wire::Input::Sampled { plan: plan.0, seq: seq.0 },
    };
    to.write(RowParts {
        seq: row.seq.0,
        start: row.start.0,
        inputs: row.inputs.iter().map(input),
        from: row.table.from,
        blocks: row.table.blocks.iter().map(|block| block.0),
        samples: row.samples.iter().map(|seq| seq.0),
        drafts: row.drafts,
    });
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
        prompt: snapshot.prompt.0,
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

/// What the journal keeps of a step: all tokens, then the choices that ended, each before its request's end.
pub fn step(step: &StepRecord) -> saved::Step {
    let started = step.started.iter().map(|started| (started.request, started.cached_tokens.0));
    let tokens =
        step.tokens.iter().map(|t| (t.request, saved::Entry::Token { choice: t.choice, token: t.token.0 }));
    let finished = step.finished.iter().flat_map(|finished| {
        let finish = saved::Entry::Finish { choice: finished.choice, reason: finished.reason.into() };
        let end = finished.ended.map(|ended| saved::Entry::End { cached_tokens: ended.cached_tokens.0 });
        std::iter::once(finish).chain(end).map(|entry| (finished.request, entry))
    });
    let prompts = step.finished.iter().filter_map(|f| Some((f.request, f.ended?.prompt_tokens.0)));
    saved::Step {
        started: started.collect(),
        entries: tokens.chain(finished).collect(),
        prompts: prompts.collect(),
    }
}

/// A saved entry as its frame has it.
pub fn entry(entry: saved::Entry) -> gateway::Entry {
    match entry {
        saved::Entry::Token { choice, token } => gateway::Entry::Token { choice, token },
        saved::Entry::Finish { choice, reason } => {
            gateway::Entry::Finish { choice, reason: pagedd_core::FinishReason::from(reason).into() }
        }
        saved::Entry::End { cached_tokens } => gateway::Entry::End { cached_tokens },
    }
}

/// An entry of a log as it is saved.
pub fn saved_entry(entry: &gateway::Entry) -> saved::Entry {
    match *entry {
        gateway::Entry::Token { choice, token } => saved::Entry::Token { choice, token },
        gateway::Entry::Finish { choice, reason } => saved::Entry::Finish {
            choice,
            reason: match reason {
                gateway::Finish::Stop => saved::Finish::Stop,
                gateway::Finish::Length => saved::Finish::Length,
                gateway::Finish::Cancelled => saved::Finish::Cancelled,
                gateway::Finish::Failed => saved::Finish::Failed,
                gateway::Finish::ModelChanged => saved::Finish::ModelChanged,
                gateway::Finish::ModelGone => saved::Finish::ModelGone,
            },
        },
        gateway::Entry::End { cached_tokens } => saved::Entry::End { cached_tokens },
    }
}

/// What happens when the client leaves, as it is saved.
pub fn on_leave(on_leave: gateway::OnLeave) -> saved::OnLeave {
    match on_leave {
        gateway::OnLeave::Cancel => saved::OnLeave::Cancel,
        gateway::OnLeave::RunOn => saved::OnLeave::RunOn,
        gateway::OnLeave::Background => saved::OnLeave::Background,
    }
}

/// A request as a scheduler takes it.
pub fn new_request(admission: &saved::Admission) -> NewRequest {
    let saved::Admission { request, tenant, saved, .. } = admission;
    let tokens = |ids: &[u32]| ids.iter().copied().map(TokenId).collect();
    NewRequest {
        id: *request,
        tenant: *tenant,
        prompt: tokens(&saved.prompt),
        n: saved.n,
        max_tokens: Tokens(saved.max_tokens),
        stop_ids: tokens(&saved.stop_ids),
        sampling: saved.sampling.into(),
    }
}

/// A kept request as a scheduler goes on with it.
pub fn restored(kept: &saved::Kept) -> Restored {
    let mut choices = vec![RestoredChoice::default(); kept.admission.saved.n as usize];
    for entry in &kept.entries {
        match *entry {
            saved::Entry::Token { choice, token } => {
                if let Some(choice) = choices.get_mut(choice as usize) {
                    choice.emitted.push(TokenId(token));
                }
            }
            saved::Entry::Finish { choice, reason } => {
                if let Some(choice) = choices.get_mut(choice as usize) {
                    choice.finished = Some(reason.into());
                }
            }
            saved::Entry::End { .. } => {}
        }
    }
    Restored { request: new_request(&kept.admission), choices, cached_tokens: kept.cached_tokens.map(Tokens) }
}

/// What a request can come to with a model whose sequences have at most `longest` tokens, where so many are generated already.
pub fn cost(saved: &saved::SavedRequest, longest: u32, generated: u64) -> Cost {
    let prompt = saved.prompt.len() as u64;
    let most = u64::from(saved.max_tokens).min(u64::from(longest).saturating_sub(prompt));
    Cost { prompt, output: (u64::from(saved.n) * most).saturating_sub(generated) }
}

/// How quotas stand, as a gateway is told.
pub fn rates(rates: Rates) -> gateway::Rates {
    let rate = |Rate { limit, remaining, reset_us }| gateway::Rate {
        limit,
        remaining,
        reset_ms: u64::div_ceil(reset_us, 1000),
    };
    gateway::Rates { requests: rates.requests.map(rate), tokens: rates.tokens.map(rate) }
}

/// Whole seconds, one at least.
pub fn retry_after(wait_us: u64) -> u32 {
    u32::try_from(wait_us.div_ceil(1_000_000)).unwrap_or(u32::MAX).max(1)
}

/// Why a request is not within its tenant's quotas, as a gateway is told.
pub fn excess(excess: Excess, rates_now: Rates) -> gateway::Refusal {
    match excess {
        Excess::Never { quota, limit, asked } => {
            gateway::Refusal::BeyondQuota { quota: quota.to_string(), limit, asked }
        }
        Excess::Later { quota, limit, used, asked, wait_us } => gateway::Refusal::OverQuota {
            quota: quota.to_string(),
            limit,
            used,
            asked,
            retry_after_ms: wait_us.div_ceil(1000),
            rates: rates(rates_now),
        },
    }
}
