//! Requests of an earlier daemon whose model is not there.
//!
//! **Owns** how they end: at once where they are to be cancelled, otherwise once the model was gone for as long as finished requests are
//! kept, whatever their tenant wants of finished ones. Until then an operator can bring it back, and the next daemon goes on with them. **Never** ends one that an engine has.

use std::time::Instant;

use pagedd_core::{FinishReason, ModelId, RequestId, Tokens};
use pagedd_engine::StepRecord;
use pagedd_sched::{Ended, Finished};
use pagedd_wire::gateway::Entry;

use super::{Hub, Log, Place};
use crate::recorder::Told;

impl Hub {
    /// No engine will ever take requests of this model.
    pub(super) fn model_failed(&mut self, model: ModelId) {
        self.unserved.entry(model).or_insert_with(Instant::now);
    }

    /// Ends what is not to wait any longer. The ends come back once they are committed.
    pub(super) fn end_unserved(&mut self, now: Instant) {
        if self.unserved.is_empty() {
            return;
        }
        for (request, log) in &mut self.logs {
            let Some(since) = self.unserved.get(&log.model) else { continue };
            if !matches!(log.place, Place::Awaited(_)) || log.ended.is_some() || log.cancelled {
                continue;
            }
            let reason = if log.cancel_waits {
                FinishReason::Cancelled
            } else if now.duration_since(*since)
                >= self.retentions.unread(log.admission.tenant).max(self.limits.retention)
            {
                FinishReason::ModelGone
            } else {
                continue;
            };
            let record = StepRecord { finished: ends(*request, log, reason), ..StepRecord::default() };
            // A full inbox is tried again at the next look.
            log.cancelled = self.recorder.try_send(Told::Step(record)).is_ok();
        }
    }
}

/// The ends of all open choices.
fn ends(request: RequestId, log: &Log, reason: FinishReason) -> Vec<Finished> {
    let finished = |choice: u32| {
        log.entries.iter().any(|e| matches!(e, Entry::Finish { choice: c, .. } if *c == choice))
    };
    let open: Vec<u32> = (0..log.admission.saved.n).filter(|choice| !finished(*choice)).collect();
    let tokens = log.entries.iter().filter(|entry| matches!(entry, Entry::Token { .. })).count() as u32;
    let begun = tokens > 0 || log.cached_tokens.is_some();
    let ended = Ended {
        prompt_tokens: Tokens(if begun { log.prompt_tokens } else { 0 }),
        cached_tokens: Tokens(log.cached_tokens.unwrap_or_default()),
        output_tokens: Tokens(tokens),
    };
    let last = open.last().copied();
    let end = |choice| Finished {
        request,
        tenant: log.admission.tenant,
        choice,
        reason,
        ended: (Some(choice) == last).then_some(ended),
    };
    open.into_iter().map(end).collect()
}
