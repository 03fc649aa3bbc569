//! Requests of an earlier scheduler, given back by what was kept of them.
//!
//! **Owns** where they go on. **Never** computes for them otherwise than for others: what a choice has emitted is input as its
//! prompt is, found in the prefix cache or computed, and its next token is drawn at its next position. A draw depends on seed,
//! choice and position only, so that the outcome is the same as without the restart.

use pagedd_core::{Blocks, FinishReason, TenantId, TokenId, Tokens};
use pagedd_kv::Share;

use crate::request::{AdmitError, Ended, Finished, NewRequest};
use crate::scheduler::{Entering, Scheduler};

/// An unfinished request as it was kept.
#[derive(Clone, PartialEq, Debug)]
pub struct Restored {
    /// As it was admitted.
    pub request: NewRequest,
    /// By number. A choice of which nothing was kept may be missing at the end.
    pub choices: Vec<RestoredChoice>,
    /// From [`crate::Started`]. `None` where it had not started: what is found in the cache from now on counts.
    pub cached_tokens: Option<Tokens>,
}

/// One choice as it was kept.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RestoredChoice {
    /// Every token, in order. They are not emitted again.
    pub emitted: Vec<TokenId>,
    /// Why it ended, where that was kept.
    pub finished: Option<FinishReason>,
}

impl Restored {
    /// Ends one choice of a request that no scheduler has; `None` where it has ended already, or was never asked for.
    #[must_use = "this end is reported nowhere else"]
    pub fn finish_choice(&mut self, choice: u32, reason: FinishReason) -> Option<Finished> {
        self.choices.resize_with(self.request.n as usize, RestoredChoice::default);
        let chosen = self.choices.get_mut(choice as usize).filter(|chosen| chosen.finished.is_none())?;
        chosen.finished = Some(reason);
        let ended = self.choices.iter().all(|choice| choice.finished.is_some()).then(|| self.used());
        Some(Finished { request: self.request.id, tenant: self.request.tenant, choice, reason, ended })
    }

    /// Ends every open choice of a request that no scheduler has.
    #[must_use = "these ends are reported nowhere else"]
    pub fn finish(&mut self, reason: FinishReason) -> Vec<Finished> {
        (0..self.request.n).filter_map(|choice| self.finish_choice(choice, reason)).collect()
    }

    /// What it has used. Where it has started and emitted nothing, how far it had come was not kept: all of the prompt counts.
    fn used(&self) -> Ended {
        let (output_tokens, prompt) = (self.output_tokens(), Tokens(self.request.prompt.len() as u32));
        let begun = self.cached_tokens.is_some() || output_tokens > Tokens::ZERO;
        let prompt_tokens = if begun { prompt } else { Tokens::ZERO };
        Ended { prompt_tokens, cached_tokens: self.cached_tokens.unwrap_or_default(), output_tokens }
    }

    /// Of all choices.
    fn output_tokens(&self) -> Tokens {
        Tokens(self.choices.iter().map(|choice| choice.emitted.len() as u32).sum())
    }
}

/// Blocks that a request needs at full length; `max_tokens` is what it may have. All choices share the prompt's full blocks. The last token
/// of a sequence is never an input and needs no room.
#[must_use]
pub fn blocks_at_full_length(prompt: Tokens, max_tokens: Tokens, n: u32, block_size: Tokens) -> Blocks {
    let positions = (prompt.0 + max_tokens.0).saturating_sub(1);
    let (all, shared) = (Tokens(positions).in_blocks(block_size).0, prompt.0 / block_size.0.max(1));
    Blocks(shared.saturating_add((all - shared.min(all)).saturating_mul(n)))
}

impl Scheduler {
    /// Takes a request that an earlier scheduler had admitted. Those are restored in the order of their admission, before any
    /// new one is admitted, and none is refused because many wait.
    ///
    /// Returned are the ends that were reached and not kept: choices whose last token was their last.
    ///
    /// # Errors
    /// As for [`Scheduler::admit`], but never `QueueFull`, and `NeverFits` only where the whole pool is too small: bounds that
    /// contradict a restored request wait for it, as they do for every admitted one. Nothing has changed.
    pub fn restore(&mut self, restored: &Restored) -> Result<Vec<Finished>, AdmitError> {
        let new = &restored.request;
        let needed = self.needed(new)?;
        let capacity = self.config.capacity;
        if needed > capacity {
            return Err(AdmitError::NeverFits { needed, allowed: capacity });
        }
        let misfit = needed > self.allowed(new.tenant);
        if misfit {
            self.loosen(new.tenant, needed);
        }
        let known = |choice: u32| restored.choices.get(choice as usize).cloned().unwrap_or_default();
        // Where no choice has a token yet, they fork from the one that computes the prompt. Otherwise each goes on by itself, and
        // they share the prompt's blocks through the prefix cache.
        let fork = (0..new.n).all(|choice| known(choice) == RestoredChoice::default());
        let open = (0..new.n).filter_map(|choice| {
            let RestoredChoice { emitted, finished } = known(choice);
            let follows = fork && choice > 0;
            finished.is_none().then_some(Entering { choice, emitted, follows })
        });
        let ids = self.insert(new.clone(), needed, open.collect(), restored.cached_tokens);
        if let Some(request) = self.requests.get_mut(&new.id) {
            request.output_tokens = restored.output_tokens();
            // How far an earlier scheduler had come was not kept.
            request.prompt_computed = restored.used().prompt_tokens;
        }
        if misfit {
            self.put_shares_in_force();
        }
        let mut finished = Vec::new();
        for id in ids {
            let end = self.sequences.get(&id).and_then(|sequence| sequence.end(&new.stop_ids));
            finished.extend(end.and_then(|reason| self.finish(id, reason)));
        }
        Ok(finished)
    }

    /// Opens the bounds in force, so that a request of this many blocks fits.
    fn loosen(&mut self, tenant: TenantId, needed: Blocks) {
        for (id, known) in &self.tenants {
            let Some(usage) = self.pool.usage(known.account) else { continue };
            let ceiling = usage.share.ceiling;
            let ceiling = if *id == tenant { ceiling.max(needed) } else { ceiling };
            let set = self.pool.set_share(known.account, Share { floor: Blocks::ZERO, ceiling });
            debug_assert_eq!(set, Ok(()), "no floor is always admissible");
        }
    }
}
