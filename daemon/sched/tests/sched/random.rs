//! Random tenants, requests, cancels, failures, shares, reverts, worker deaths; everything must end, and end right.

use std::collections::BTreeMap;

use pagedd_core::{FinishReason, StepCost, TenantId, TokenId, Tokens};
use pagedd_sched::{AdmitError, Stats};
use proptest::prelude::*;

use crate::bench::{Bench, config, id, request, share, straight};
use crate::worker::mix;

/// A stream of numbers from one seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = mix(self.0, 1);
        self.0 % n
    }
    fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// Counters only rise.
fn monotonic(before: &Stats, after: &Stats) {
    let counters = |stats: &Stats| -> BTreeMap<TenantId, [u64; 8]> {
        let of = stats.tenants.iter();
        of.map(|t| {
            (
                t.tenant,
                [
                    t.preemptions,
                    t.prefix_query_tokens,
                    t.prefix_hit_tokens,
                    t.recomputed_tokens,
                    t.aborted,
                    t.output_tokens,
                    t.draft_tokens,
                    t.draft_tokens_accepted,
                ],
            )
        })
        .collect()
    };
    let (before, after) = (counters(before), counters(after));
    for (tenant, now) in after {
        if let Some(then) = before.get(&tenant) {
            assert!(then.iter().zip(now).all(|(then, now)| *then <= now), "{tenant}: {then:?} then {now:?}");
        }
    }
}

struct World {
    bench: Bench,
    dice: Dice,
    next: u64,
    tenants: u64,
    remove_tenants: bool,
    preemptions: u64,
    /// Guesses.
    tried: u64,
    right: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut dice = Dice(seed);
        let block_size = [2, 2, 4, 4, 8, 16][dice.below(6) as usize];
        let capacity = 4 + dice.below(28) as u32;
        let mut config = config(capacity, block_size);
        config.max_num_seqs = 1 + dice.below(8) as u32;
        config.max_num_batched_tokens = Tokens(1 + dice.below(40) as u32);
        config.max_model_len = Tokens(8 + dice.below(100) as u32);
        config.max_queued_requests = 1 + dice.below(8) as u32;
        config.prefix_cache = !dice.one_in(4);
        config.prompt_lookup = !dice.one_in(4);
        config.max_drafts = dice.below(20) as u32;
        if dice.one_in(3) {
            // Tokens cost nothing: whatever can be guessed is tried.
            config.cost = StepCost { body_us: [1.0; StepCost::SIZES.len()], ..StepCost::UNKNOWN };
        } else if dice.one_in(2) {
            let mut cost = || dice.below(20) as f32;
            config.cost = straight(cost(), 1.0 + cost(), cost(), [cost() / 8.0, cost() / 64.0]);
            config.itl_target_us = Some(dice.below(600));
        }
        // Only a plain loop has a sequence's last token to guess from.
        let depth = [1, 1, 1, 2, 3][dice.below(5) as usize];
        let tenants = 1 + dice.below(4);
        let mut world = Self {
            bench: Bench::new(config, depth),
            dice,
            next: 1,
            tenants,
            remove_tenants: false,
            preemptions: 0,
            tried: 0,
            right: 0,
        };
        if world.dice.one_in(2) {
            world.bench.keep_ledger();
        }
        for tenant in 0..tenants {
            world.set_share(tenant as u32);
        }
        world
    }

    fn set_share(&mut self, tenant: u32) {
        let capacity = u64::from(self.bench.scheduler.config().capacity.0);
        let floor = if self.dice.one_in(3) { 0 } else { self.dice.below(capacity / 2 + 1) as u32 };
        let ceiling = floor + self.dice.below(capacity + 1) as u32;
        // Refused where the floors would not fit; that changes nothing.
        let _ = self.bench.scheduler.set_share(TenantId(tenant), share(floor, ceiling));
        self.bench.check();
    }

    fn submit(&mut self) {
        let (number, tenant) = (self.next, self.dice.below(self.tenants) as u32);
        self.next += 1;
        let most = u64::from(self.bench.scheduler.config().max_model_len.0);
        let mut new =
            request(number, tenant, 1 + self.dice.below(most) as u32, 1 + self.dice.below(24) as u32);
        if self.dice.one_in(2) {
            // A conversation of which others have the start.
            let shared = self.dice.below(3) as u32;
            for (i, token) in new.prompt.iter_mut().enumerate() {
                *token = TokenId(shared * 100 + i as u32 % 50);
            }
        }
        if self.dice.one_in(3) {
            new.n = 1 + self.dice.below(4) as u32;
        }
        if self.dice.one_in(2) {
            new.stop_ids = vec![TokenId(self.dice.below(50) as u32), TokenId(self.dice.below(50) as u32)];
        }
        match self.bench.admit(new) {
            Ok(()) | Err(AdmitError::QueueFull { .. } | AdmitError::UnknownTenant(_)) => {}
            Err(AdmitError::NeverFits { needed, allowed }) => assert!(needed > allowed),
            Err(AdmitError::ContextLength { prompt, max_model_len }) => assert!(prompt >= max_model_len),
            Err(error @ (AdmitError::Duplicate(_) | AdmitError::Nothing { .. })) => panic!("{error}"),
        }
    }

    fn event(&mut self) {
        match self.dice.below(40) {
            0..8 => self.submit(),
            8 => {
                let number = 1 + self.dice.below(self.next);
                self.bench.cancel(id(number));
            }
            9 => {
                let request = id(self.next.saturating_sub(1 + self.dice.below(6)));
                let choice = self.dice.below(3) as u32;
                let finished = self.bench.scheduler.finish_choice(request, choice, FinishReason::Cancelled);
                self.bench.note(finished);
                self.bench.check();
            }
            10 => {
                let tenant = self.dice.below(self.tenants) as u32;
                self.set_share(tenant);
            }
            11 => self.bench.replay(true),
            12 => self.bench.replay(false),
            13 => self.revert(),
            18 if self.dice.one_in(6) => self.die(),
            14 if self.dice.one_in(4) => self.break_one(),
            16 => {
                let tenant = self.dice.below(self.tenants) as u32;
                let on = [None, Some(true), Some(false)][self.dice.below(3) as usize];
                self.bench.scheduler.set_prompt_lookup(TenantId(tenant), on);
            }
            17 if self.dice.one_in(8) => self.crash(),
            15 if self.remove_tenants && self.dice.one_in(4) => {
                let tenant = self.dice.below(self.tenants) as u32;
                let finished = self.bench.scheduler.remove_tenant(TenantId(tenant));
                self.bench.note(finished);
                self.bench.check();
                self.set_share(tenant);
            }
            _ => {
                self.bench.step();
            }
        }
    }

    /// Adds up what a scheduler counted.
    fn count(&mut self) {
        for tenant in self.bench.scheduler.stats().tenants {
            self.preemptions += tenant.preemptions;
            self.tried += tenant.draft_tokens;
            self.right += tenant.draft_tokens_accepted;
        }
    }

    /// Plans a step that never runs.
    fn revert(&mut self) {
        if self.bench.flying.len() < self.bench.depth
            && let Some(plan) = self.bench.scheduler.schedule(self.bench.steps)
        {
            let number = plan.id;
            self.bench.check();
            self.bench.scheduler.revert(plan);
            self.bench.check();
            if let Some(next) = self.bench.plan() {
                assert_eq!(next.id, number, "plan ids are consecutive");
            }
            if self.bench.flying.len() == self.bench.depth {
                self.bench.apply();
            }
        }
    }

    /// The process ends between any two writes, and another begins.
    fn crash(&mut self) {
        self.count();
        let some = self.dice.below(6) as usize;
        match self.dice.below(4) {
            0 => {}
            1 => {
                // A plan that was never sent, with some of its blocks cleared.
                if self.bench.flying.len() < self.bench.depth {
                    let _ = self.bench.scheduler.schedule(self.bench.steps);
                    self.bench.write_ledger(some);
                }
            }
            2 => {
                // One that ran, whole or in part, and gave nothing.
                if self.bench.flying.len() < self.bench.depth {
                    self.bench.plan();
                }
            }
            _ => {
                // One that was applied, with some of its blocks committed and nothing journaled.
                if self.bench.flying.is_empty() {
                    self.bench.plan();
                }
                if let Some((plan, output)) = self.bench.flying.pop_front() {
                    let _ = self.bench.scheduler.apply(plan, output);
                    self.bench.write_ledger(some);
                }
            }
        }
        let lost = self.dice.below(4) as usize;
        self.bench.restart(lost);
    }

    /// A plan kills its worker after it has run.
    fn die(&mut self) {
        if self.bench.flying.is_empty() {
            self.bench.plan();
        }
        while self.bench.flying.len() > 1
            && let Some((plan, _)) = self.bench.flying.pop_back()
        {
            self.bench.scheduler.revert(plan);
            self.bench.check();
        }
        if let Some((plan, _)) = self.bench.flying.pop_back() {
            self.bench.accuse(plan);
        }
    }

    /// From now on a sequence's rows fail.
    fn break_one(&mut self) {
        let running = self.bench.scheduler.snapshot();
        if running.is_empty() || !self.bench.flying.is_empty() {
            return;
        }
        let victim = running[self.dice.below(running.len() as u64) as usize].seq;
        self.bench.worker.broken.push(victim);
        self.bench.broken = self.bench.requests.keys().copied().collect();
    }
}

fn run(seed: u64, steps: u64, remove_tenants: bool) -> World {
    let mut world = World::new(seed);
    world.remove_tenants = remove_tenants;
    let mut before = world.bench.scheduler.stats();
    for _ in 0..steps {
        let restarts = world.bench.restarts;
        world.event();
        let after = world.bench.scheduler.stats();
        if !remove_tenants && restarts == world.bench.restarts {
            monotonic(&before, &after);
        }
        before = after;
    }
    world.bench.finish();
    world.count();
    for (id, request) in &world.bench.requests {
        assert_eq!(
            world.bench.ends(*id).len(),
            request.n as usize,
            "seed {seed}: every choice of {id} ends once"
        );
    }
    world
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn whatever_happens_every_request_ends_and_gives_what_it_gives_alone(seed in any::<u64>()) {
        run(seed, 300, false);
    }

    #[test]
    fn tenants_can_be_removed_and_come_back_at_any_moment(seed in any::<u64>()) {
        run(seed, 200, true);
    }
}

#[test]
fn choices_behind_a_leader_whose_row_fails_end_with_it_while_a_plan_names_their_draws() {
    run(42_181_306_176_073_314, 300, false);
}

#[test]
fn bug_16_a_long_run_of_random_steps_never_stalls() {
    #[allow(clippy::disallowed_methods, reason = "the test's length, not the scheduler's input")]
    let steps: u64 =
        std::env::var("PAGEDD_RANDOM_STEPS").ok().and_then(|n| n.parse().ok()).unwrap_or(100_000);
    let (mut done, mut preemptions, mut ended, mut seed) = (0, 0, 0, 1);
    let (mut tried, mut right, mut restarts) = (0_u64, 0_u64, 0);
    let mut adopted = 0;
    while done < steps {
        let part = 1000.min(steps - done);
        let world = run(seed, part, false);
        preemptions += world.preemptions;
        tried += world.tried;
        right += world.right;
        ended += world.bench.finished.len();
        restarts += world.bench.restarts;
        adopted += world.bench.adopted;
        done += part;
        seed += 1;
    }
    println!(
        "{done} random steps in {seed} worlds: {ended} choices ended, {preemptions} preemptions, {restarts} restarts with {adopted} blocks, {right} of {tried} guesses right"
    );
    assert!(
        preemptions > done / 1000,
        "only {preemptions} preemptions: the pools were too large to prove anything"
    );
    assert!(adopted > restarts, "{adopted} blocks adopted in {restarts} restarts");
    assert!(
        right > done / 100 && tried > right + right / 10,
        "{right} of {tried} guesses right: nothing proved"
    );
}
