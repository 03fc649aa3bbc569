//! What one tenant has used of its quotas.
//!
//! **Owns** the rules. **Never** reads a clock, locks or waits: time comes in as a number.
//!
//! A request takes all that it can come to, its prompt and `max_tokens` for each choice, from `tokens_per_minute` when it is admitted. What
//! it has computed of that is in the window of the minute in which it was; the rest is reserved until it ends, and given back then. So no
//! minute ever has more tokens than the quota, however many requests come at once, and nobody is stopped in the middle of an answer.
//!
//! ```text
//! admit ─▶ Charge: queued ─ start ─▶ running ─ spend, token by token ─▶ end
//!             └──────────── refund (it was not taken after all)
//! ```

use pagedd_core::{Quota, Quotas};

use super::pace::Pace;
use super::window::{MINUTE_US, Window};

/// Where nothing was measured yet.
const UNMEASURED_US: u64 = 1_000_000;

/// What a request can come to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cost {
    /// Tokens of its prompt.
    pub prompt: u64,
    /// Most tokens that it can generate, all choices.
    pub output: u64,
}

/// What an admitted request has taken.
///
/// Having one tells you: the account counts this request as concurrent, and what it says here as reserved. Not `Clone`: it is given back
/// once.
#[must_use = "what is not given back is taken for ever"]
#[derive(Debug)]
pub struct Charge {
    /// In which slot of the window of requests it is.
    slot: u64,
    prompt: u64,
    /// Tokens that it may still generate.
    output: u64,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Queued,
    Started,
}

/// Why a request is not admitted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Excess {
    /// It alone is more than the quota.
    Never {
        /// Which quota.
        quota: Quota,
        /// How much that is.
        limit: u64,
        /// How much the request asks for.
        asked: u64,
    },
    /// Others have taken too much of it.
    Later {
        /// Which quota; the one that is waited for longest.
        quota: Quota,
        /// How much that is.
        limit: u64,
        /// How much is taken.
        used: u64,
        /// How much the request asks for.
        asked: u64,
        /// When it would be admitted, if nobody else asks: known to the slot where the window is full, estimated where requests must end.
        wait_us: u64,
    },
}

/// How one quota by the minute stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rate {
    /// The quota.
    pub limit: u64,
    /// What is left of it.
    pub remaining: u64,
    /// Time until all of it is there again.
    pub reset_us: u64,
}

/// How quotas by the minute stand; `None` is without a limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rates {
    /// Of requests.
    pub requests: Option<Rate>,
    /// Of tokens.
    pub tokens: Option<Rate>,
}

/// One tenant's account.
#[derive(Default, Debug)]
pub struct Account {
    limits: Quotas,
    requests: Window,
    tokens: Window,
    /// Tokens that admitted requests may still come to.
    reserved: u64,
    concurrent: u64,
    queued: u64,
    queued_tokens: u64,
    starts: Pace,
    started_tokens: Pace,
    ends: Pace,
    refused: [u64; Quota::ALL.len()],
}

impl Account {
    /// Other limits hold from now on. What was used counts against them.
    pub fn set(&mut self, limits: Quotas) {
        self.limits = limits;
    }

    /// Admits a request, or says why not; then nothing has changed but the count of refusals.
    pub fn admit(&mut self, now_us: u64, cost: Cost) -> Result<Charge, Excess> {
        if let Some(excess) = self.excess(now_us, cost) {
            let (Excess::Never { quota, .. } | Excess::Later { quota, .. }) = excess;
            self.refused[quota as usize] += 1;
            return Err(excess);
        }
        let slot = self.requests.add(now_us, 1);
        Ok(self.open(now_us, slot, cost))
    }

    /// Counts a live request of an earlier daemon, with what it may still come to.
    pub fn resume(&mut self, now_us: u64, cost: Cost, started: bool) -> Charge {
        // What it counts for as a request of the last minute was recalled.
        let mut charge = self.open(now_us, u64::MAX, cost);
        if started {
            self.reserved -= charge.prompt;
            self.dequeue(&mut charge);
            self.leave_queue();
        }
        charge
    }

    /// Counts what was used before this daemon, in the order of time.
    pub fn recall(&mut self, then_us: u64, requests: u64, tokens: u64) {
        self.requests.add(then_us, requests);
        self.tokens.add(then_us, tokens);
    }

    fn open(&mut self, now_us: u64, slot: u64, Cost { prompt, output }: Cost) -> Charge {
        self.reserved += prompt + output;
        self.concurrent += 1;
        self.queued += 1;
        self.queued_tokens += prompt;
        self.ends.arrive(now_us);
        self.starts.arrive(now_us);
        self.started_tokens.arrive(now_us);
        Charge { slot, prompt, output, stage: Stage::Queued }
    }

    fn excess(&mut self, now_us: u64, cost: Cost) -> Option<Excess> {
        let mut excess = None;
        for quota in Quota::ALL {
            let Some(limit) = self.limits.get(quota) else { continue };
            let asked = match quota {
                Quota::RequestsPerMinute | Quota::MaxConcurrent | Quota::MaxQueuedRequests => 1,
                Quota::TokensPerMinute => cost.prompt + cost.output,
                Quota::MaxQueuedTokens => cost.prompt,
            };
            if asked > limit {
                return Some(Excess::Never { quota, limit, asked });
            }
            let used = self.used(now_us, quota);
            let over = (used + asked).saturating_sub(limit);
            if over == 0 {
                continue;
            }
            let wait_us = self.wait(now_us, quota, over, limit - asked).max(1);
            if !matches!(excess, Some(Excess::Later { wait_us: longest, .. }) if longest >= wait_us) {
                excess = Some(Excess::Later { quota, limit, used, asked, wait_us });
            }
        }
        excess
    }

    /// How much of a quota is taken.
    pub fn used(&mut self, now_us: u64, quota: Quota) -> u64 {
        match quota {
            Quota::RequestsPerMinute => self.requests.sum(now_us),
            Quota::TokensPerMinute => self.tokens.sum(now_us) + self.reserved,
            Quota::MaxConcurrent => self.concurrent,
            Quota::MaxQueuedRequests => self.queued,
            Quota::MaxQueuedTokens => self.queued_tokens,
        }
    }

    /// Time until so much of a quota is free again, where at most `left` of it may be taken then.
    fn wait(&mut self, now_us: u64, quota: Quota, over: u64, left: u64) -> u64 {
        match quota {
            Quota::RequestsPerMinute => self.requests.wait(now_us, over),
            Quota::TokensPerMinute => {
                // What is reserved now is in the window or free by the time that what is there has left.
                let there = self.tokens.sum(now_us);
                if over <= there {
                    self.tokens.wait(now_us, over)
                } else {
                    // A request must end first: what it gives back may be enough, but for what the window keeps whoever ends.
                    let ends = self.ends.wait(now_us, 1).unwrap_or(UNMEASURED_US);
                    let kept = there.saturating_sub(left);
                    if kept == 0 { ends } else { ends.max(self.tokens.wait(now_us, kept)) }
                }
            }
            Quota::MaxConcurrent => self.ends.wait(now_us, over).unwrap_or(UNMEASURED_US),
            Quota::MaxQueuedRequests => self.starts.wait(now_us, over).unwrap_or(UNMEASURED_US),
            Quota::MaxQueuedTokens => self.started_tokens.wait(now_us, over).unwrap_or(UNMEASURED_US),
        }
    }

    /// Time until one of those that wait will have started.
    pub fn queue_wait(&self, now_us: u64) -> u64 {
        self.starts.wait(now_us, 1).unwrap_or(UNMEASURED_US)
    }

    /// It runs: its prompt is used.
    pub fn start(&mut self, now_us: u64, charge: &mut Charge) {
        if charge.stage == Stage::Started {
            return;
        }
        self.reserved -= charge.prompt;
        self.tokens.add(now_us, charge.prompt);
        self.dequeue(charge);
        let more = self.queued > 0;
        self.starts.depart(now_us, 1, more);
        self.started_tokens.depart(now_us, charge.prompt, more);
    }

    /// It has generated so many tokens.
    pub fn spend(&mut self, now_us: u64, charge: &mut Charge, tokens: u64) {
        // More than was asked for comes from nowhere; it is used nevertheless.
        let reserved = tokens.min(charge.output);
        charge.output -= reserved;
        self.reserved -= reserved;
        self.tokens.add(now_us, tokens);
    }

    /// It has ended.
    pub fn end(&mut self, now_us: u64, charge: Charge) {
        self.close(charge);
        self.ends.depart(now_us, 1, self.concurrent > 0);
    }

    /// It was not taken: it counts for nothing.
    pub fn refund(&mut self, charge: Charge) {
        self.requests.take_back(charge.slot, 1);
        self.close(charge);
        self.ends.leave(self.concurrent > 0);
    }

    fn close(&mut self, mut charge: Charge) {
        self.reserved -= charge.output;
        self.concurrent -= 1;
        if charge.stage == Stage::Queued {
            self.reserved -= charge.prompt;
            self.dequeue(&mut charge);
            self.leave_queue();
        }
    }

    fn dequeue(&mut self, charge: &mut Charge) {
        charge.stage = Stage::Started;
        self.queued -= 1;
        self.queued_tokens -= charge.prompt;
    }

    fn leave_queue(&mut self) {
        let more = self.queued > 0;
        self.starts.leave(more);
        self.started_tokens.leave(more);
    }

    /// How quotas by the minute stand.
    pub fn rates(&mut self, now_us: u64) -> Rates {
        let (requests, tokens) = (self.requests.sum(now_us), self.tokens.sum(now_us) + self.reserved);
        let rate = |quota, used, reset_us| {
            let limit = self.limits.get(quota)?;
            Some(Rate { limit, remaining: limit.saturating_sub(used), reset_us })
        };
        // What is reserved leaves a minute after it is used, at the earliest.
        let least = if self.reserved > 0 { MINUTE_US } else { 0 };
        Rates {
            requests: rate(Quota::RequestsPerMinute, requests, self.requests.empties_in(now_us)),
            tokens: rate(Quota::TokensPerMinute, tokens, self.tokens.empties_in(now_us).max(least)),
        }
    }

    /// A quota, how much of it is taken, and how many requests were refused for it.
    pub fn standing(&mut self, now_us: u64, quota: Quota) -> (Option<u64>, u64, u64) {
        (self.limits.get(quota), self.used(now_us, quota), self.refused[quota as usize])
    }
}
