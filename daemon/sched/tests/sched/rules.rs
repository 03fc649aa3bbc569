//! Promises that a scenario would not show.

use pagedd_core::{Blocks, FinishReason, StepCost, TenantId, Tokens};
use pagedd_sched::{AdmitError, Input, NewRequest, StepOutput, Tuning};

use crate::bench::{Bench, config, id, request, share, straight};

#[test]
fn a_failed_row_ends_its_request_only() {
    for depth in [1, 2] {
        let mut bench = Bench::new(config(32, 4), depth).tenant(0, 0, 32);
        let mut forked = request(1, 0, 10, 8);
        forked.n = 2;
        bench.admit(forked).unwrap();
        bench.admit(request(2, 0, 10, 8)).unwrap();
        bench.run(3);
        while bench.flying.len() > 1 {
            bench.apply();
        }
        if bench.flying.is_empty() {
            bench.plan();
        }
        let (plan, output) = bench.flying.pop_front().unwrap();
        let broken = plan.rows[0].seq;
        let sampled = output.sampled.into_iter().filter(|s| s.seq != broken).collect();
        let failed = vec![(broken, "NaN logits".to_owned())];
        bench.broken.push(id(1));
        let output = StepOutput { plan: plan.id, sampled, failed, compute_us: 1 };
        bench.flying.push_front((plan, output));
        bench.apply();
        let reasons: Vec<_> = bench.ends(id(1)).iter().map(|f| f.reason).collect();
        assert_eq!(reasons, [FinishReason::Failed; 2], "both choices of the request, depth {depth}");
        bench.finish();
        assert_eq!(bench.ends(id(2))[0].reason, FinishReason::Length);
    }
}

#[test]
fn an_output_that_lacks_a_token_fails_that_request() {
    let mut bench = Bench::new(config(32, 4), 1).tenant(0, 0, 32);
    bench.admit(request(1, 0, 10, 8)).unwrap();
    bench.plan();
    bench.broken.push(id(1));
    bench.flying[0].1.sampled.clear();
    bench.apply();
    assert_eq!(bench.ends(id(1))[0].reason, FinishReason::Failed);
    bench.finish();
}

#[test]
fn a_plan_behind_a_draw_that_is_missing_can_be_sent_to_a_worker_that_knows_no_draws() {
    let mut bench = Bench::new(config(32, 4), 2).tenant(0, 0, 32);
    bench.admit(request(1, 0, 10, 8)).unwrap();
    bench.admit(request(2, 0, 10, 8)).unwrap();
    bench.plan();
    bench.plan();
    let lost = bench.flying[0].0.rows[0].seq;
    bench.flying[0].1.sampled.retain(|sampled| sampled.seq != lost);
    bench.broken.push(id(1));
    bench.apply();
    assert_eq!(bench.ends(id(1))[0].reason, FinishReason::Failed);
    bench.worker.respawn(bench.scheduler.snapshot());
    let (plan, _) = bench.flying.pop_front().unwrap();
    assert!(plan.rows.iter().any(|row| row.seq == lost), "the plan behind has the same rows");
    let again = bench.worker.run(&plan);
    bench.flying.push_front((plan, again));
    bench.finish();
    assert_eq!(bench.ends(id(2))[0].reason, FinishReason::Length);
}

#[test]
fn while_a_sequence_tries_guesses_the_others_go_ahead_without_it() {
    let mut config = config(32, 4);
    config.prompt_lookup = true;
    // Whatever can be guessed is tried.
    config.cost = StepCost { body_us: [1.0; StepCost::SIZES.len()], ..StepCost::UNKNOWN };
    let mut bench = Bench::new(config, 2).tenant(0, 0, 16).tenant(1, 0, 16);
    bench.scheduler.set_prompt_lookup(TenantId(1), Some(false));
    bench.admit(request(1, 0, 10, 40)).unwrap();
    bench.admit(request(2, 1, 10, 40)).unwrap();
    let mut guessed = 0;
    while bench.ends(id(1)).is_empty() {
        bench.plan();
        let guessing: Vec<_> =
            bench.flying[0].0.rows.iter().filter(|row| row.drafts > 0).map(|row| row.seq).collect();
        if let [guessing] = guessing[..] {
            guessed += 1;
            let ahead = bench.plan().expect("the other one goes on").clone();
            assert!(ahead.rows.iter().all(|row| row.seq != guessing), "{ahead:?}");
            assert!(matches!(ahead.rows[0].inputs[..], [Input::Sampled { .. }]), "{ahead:?}");
            bench.apply();
        }
        bench.apply();
    }
    assert!(guessed > 2, "{guessed} plans with guesses");
    bench.finish();
}

#[test]
fn on_a_machine_that_is_slower_than_was_measured_parts_of_prompts_get_smaller_until_steps_keep_to_the_target()
{
    const TARGET: u64 = 1000;
    let mut config = config(600, 4);
    config.max_num_batched_tokens = Tokens(512);
    config.max_model_len = Tokens(1024);
    config.cost = straight(100.0, 10.0, 1.0, [0.5, 0.1]);
    config.itl_target_us = Some(TARGET);
    for (slower, last) in [(1.0, 980.0..1001.0), (1.25, 960.0..1001.0)] {
        let mut bench = Bench::new(config.clone(), 1).tenant(0, 0, 600).tenant(1, 0, 600);
        bench.admit(request(1, 0, 10, 400)).unwrap();
        bench.step();
        let mut took = Vec::new();
        for number in 2..6 {
            bench.admit(request(number, 1, 700, 1)).unwrap();
            while bench.ends(id(number)).is_empty() {
                let cost = config.cost;
                let us = bench.plan().map(|plan| plan.predicted_us(&cost) * slower).unwrap();
                took.push(us);
                bench.flying[0].1.compute_us = us.ceil() as u64;
                bench.apply();
            }
        }
        let late = &took[took.len() / 2..];
        let longest = late.iter().copied().fold(0.0, f32::max);
        assert!(last.contains(&longest), "{slower}: {took:?}");
    }
}

#[test]
fn plans_run_in_any_number_of_repetitions_leave_the_same_arena() {
    for depth in [1, 2, 3] {
        let mut bench = Bench::new(config(12, 4), depth).tenant(0, 0, 12).tenant(1, 4, 12);
        for number in 0..30 {
            let mut new = request(number, (number % 2) as u32, 1 + (number % 9) as u32, 6);
            new.n = 1 + (number % 3) as u32;
            bench.admit(new).unwrap();
        }
        let mut steps = 0;
        while bench.step() {
            bench.replay(steps % 2 == 0);
            steps += 1;
        }
        bench.everything_is_back();
    }
}

#[test]
fn a_floor_is_back_within_two_step_boundaries() {
    for depth in [1, 2] {
        let mut bench = Bench::new(config(32, 4), depth).tenant(0, 8, 32).tenant(1, 0, 32);
        for number in 0..8 {
            bench.admit(request(number, 1, 20, 200 / 8)).unwrap();
        }
        bench.run(12);
        bench.admit(request(100, 0, 28, 4)).unwrap();
        let mut boundaries = 0;
        while bench.scheduler.stats().tenants[0].running == 0 {
            boundaries += 1;
            assert!(boundaries <= 2, "depth {depth}: {:?}", bench.scheduler.stats());
            bench.step();
        }
        bench.finish();
    }
}

#[test]
fn a_backlog_of_one_tenant_does_not_hold_up_anothers_floor() {
    let mut config = config(32, 4);
    config.max_num_seqs = 4;
    let mut bench = Bench::new(config, 1).tenant(0, 8, 32).tenant(1, 0, 32);
    for number in 0..100 {
        bench.admit(request(number, 1, 10, 10)).unwrap();
    }
    bench.run(3);
    for number in 200..210 {
        bench.admit(request(number, 0, 10, 4)).unwrap();
        let mut steps = 0;
        while bench.ends(id(number)).is_empty() {
            steps += 1;
            assert!(
                steps <= 6,
                "request {number} of the tenant with a floor took {steps} steps for 4 tokens"
            );
            bench.step();
        }
    }
    bench.finish();
}

#[test]
fn a_lowered_ceiling_is_enforced_by_cached_blocks_and_young_sequences_but_starves_nobody() {
    let mut bench = Bench::new(config(16, 4), 1).tenant(0, 0, 16);
    for number in 0..4 {
        bench.admit(request(number, 0, 8, 8)).unwrap();
    }
    bench.run(4);
    bench.scheduler.set_share(TenantId(0), share(0, 4)).unwrap();
    bench.step();
    let tenant = bench.scheduler.stats().tenants[0];
    assert!(tenant.held + tenant.cached <= Blocks(4) && !tenant.share_pending, "{tenant:?}");
    bench.finish();
    assert_eq!(bench.finished.len(), 4);
}

#[test]
fn bounds_that_contradict_admitted_requests_wait_for_them() {
    for (floor, ceiling) in [(0, 2), (0, 0)] {
        let mut bench = Bench::new(config(16, 4), 2).tenant(0, 0, 16).tenant(1, 0, 16);
        bench.admit(request(1, 0, 30, 20)).unwrap();
        bench.step();
        bench.scheduler.set_share(TenantId(0), share(floor, ceiling)).unwrap();
        bench.scheduler.set_share(TenantId(1), share(14, 16)).unwrap();
        assert!(bench.scheduler.stats().tenants.iter().all(|t| t.share_pending));
        let refused = bench.admit(request(2, 0, 10, 4)).unwrap_err();
        assert_eq!(refused, AdmitError::NeverFits { needed: Blocks(4), allowed: Blocks(ceiling) });
        for number in 10..20 {
            bench.admit(request(number, 1, 30, 20)).unwrap();
        }
        bench.finish();
        assert_eq!(bench.ends(id(1))[0].reason, FinishReason::Length, "what was admitted is served");
        assert!(bench.scheduler.stats().tenants.iter().all(|t| !t.share_pending));
        bench.check();
    }
}

#[test]
fn the_next_turn_of_a_chat_finds_the_answer_of_the_last_one() {
    let mut bench = Bench::new(config(32, 4), 1).tenant(0, 0, 32);
    bench.admit(request(1, 0, 10, 9)).unwrap();
    bench.finish();
    let mut next = NewRequest { id: id(2), ..request(1, 0, 10, 4) };
    next.prompt.extend(&bench.tokens[&(id(1), 0)]);
    next.prompt.extend(&request(3, 0, 5, 1).prompt);
    bench.admit(next).unwrap();
    bench.finish();
    let ended = bench.ends(id(2))[0].ended.unwrap();
    // 18 positions of the first turn were computed: 4 full blocks of 4.
    assert_eq!(ended.cached_tokens.0, 16);
}

#[test]
fn without_the_cache_nothing_is_found_and_nothing_stays() {
    let mut config = config(32, 4);
    config.prefix_cache = false;
    let mut bench = Bench::new(config, 1).tenant(0, 0, 32);
    for number in 0..3 {
        let mut same = request(number, 0, 16, 4);
        same.prompt = request(0, 0, 16, 4).prompt;
        bench.admit(same).unwrap();
        bench.finish();
    }
    let stats = bench.scheduler.stats();
    assert_eq!((stats.pool.free, stats.tenants[0].prefix_hit_tokens), (Blocks(32), 0));
}

#[test]
fn a_removed_tenants_requests_end_and_its_blocks_are_free_for_others() {
    let mut bench = Bench::new(config(8, 4), 2).tenant(0, 4, 8).tenant(1, 0, 8);
    bench.admit(request(1, 0, 12, 8)).unwrap();
    bench.admit(request(2, 0, 4, 8)).unwrap();
    bench.step();
    let ends = bench.scheduler.remove_tenant(TenantId(0));
    assert_eq!(ends.len(), 2);
    bench.note(ends);
    bench.check();
    bench.admit(request(3, 1, 20, 10)).unwrap();
    bench.finish();
    let stats = bench.scheduler.stats();
    assert_eq!(stats.tenants.len(), 1);
    assert_eq!(stats.pool.free + stats.pool.cached, Blocks(8));
}

#[test]
fn a_queue_that_is_tuned_takes_more_or_less_from_then_on_and_keeps_what_it_has() {
    let mut config = config(32, 4);
    (config.max_queued_requests, config.max_num_seqs) = (1, 1);
    let mut bench = Bench::new(config, 1).tenant(0, 0, 32);
    let tuning =
        |max_queued_requests| Tuning { max_queued_requests, itl_target_us: Some(7), prompt_lookup: false };
    bench.admit(request(1, 0, 6, 4)).unwrap();
    bench.step();
    bench.admit(request(2, 0, 6, 4)).unwrap();
    let full = |waiting| Err(AdmitError::QueueFull { waiting });
    assert_eq!(bench.admit(request(3, 0, 6, 4)), full(1));
    bench.scheduler.tune(tuning(2));
    assert_eq!(bench.admit(request(3, 0, 6, 4)), Ok(()));
    bench.scheduler.tune(tuning(1));
    assert_eq!(bench.admit(request(4, 0, 6, 4)), full(2));
    bench.finish();
    let order: Vec<_> = bench.finished.iter().map(|end| end.request).collect();
    assert_eq!(order, [1, 2, 3].map(id));
    let config = bench.scheduler.config();
    assert_eq!((config.itl_target_us, config.prompt_lookup), (Some(7), false));
}
