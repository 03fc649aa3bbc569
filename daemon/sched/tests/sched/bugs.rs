//! Faults of servers of this kind, by their row in the project's bug list.

use pagedd_core::{Blocks, FinishReason, TenantId, Tokens};
use pagedd_sched::AdmitError;

use crate::bench::{Bench, config, id, request};

#[test]
fn bug_3_requests_beside_cancelled_ones_give_what_they_give_alone() {
    for depth in [1, 2] {
        for round in 0..20 {
            let mut bench = Bench::new(config(64, 4), depth).tenant(0, 0, 64);
            for number in 0..64 {
                bench.admit(request(number, 0, 10 + (number % 7) as u32, 20)).unwrap();
            }
            for step in 0..64 {
                bench.step();
                let number = (step * 7 + round) % 64;
                if number % 2 == 0 {
                    bench.cancel(id(number));
                }
            }
            bench.finish();
            // The bench compares every output with the request's own; half of them ran to the end.
            let whole = bench.finished.iter().filter(|f| f.reason == FinishReason::Length).count();
            assert!(whole >= 32, "depth {depth} round {round}: {whole} ran to the end");
        }
    }
}

#[test]
fn bug_4_choices_that_end_in_any_order_give_every_block_back_once() {
    for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]] {
        for before in 0..6 {
            for depth in [1, 2] {
                let mut bench = Bench::new(config(32, 4), depth).tenant(0, 0, 32);
                let mut forked = request(1, 0, 10, 20);
                forked.n = 4;
                bench.admit(forked).unwrap();
                bench.run(before);
                for choice in order {
                    let ends = bench.scheduler.finish_choice(id(1), choice, FinishReason::Cancelled);
                    assert_eq!(ends.len(), 1, "choice {choice} after {before} steps");
                    bench.note(ends);
                    bench.check();
                    assert!(
                        bench.scheduler.finish_choice(id(1), choice, FinishReason::Stop).is_empty(),
                        "once"
                    );
                    if depth == 1 {
                        bench.step();
                    }
                }
                bench.finish();
                assert_eq!(bench.scheduler.stats().pool.quarantined, 0);
            }
        }
    }
}

#[test]
fn bug_15_a_prompt_that_can_never_fit_is_refused_with_the_numbers() {
    let mut bench = Bench::new(config(8, 16), 1).tenant(0, 0, 8);
    let refused = bench.admit(request(1, 0, 9 * 16, 1)).unwrap_err();
    assert_eq!(refused, AdmitError::NeverFits { needed: Blocks(9), allowed: Blocks(8) });
    assert_eq!(refused.to_string(), "the request needs 9 KV blocks at full length and the tenant can have 8");
    bench.admit(request(2, 0, 8 * 16, 1)).unwrap();
    bench.finish();
    assert_eq!(bench.ends(id(2)).len(), 1, "one that just fits runs");
}

#[test]
fn bug_16_sequences_that_preempt_one_another_all_end() {
    for depth in [1, 2, 3] {
        let mut bench = Bench::new(config(8, 4), depth).tenant(0, 2, 8).tenant(1, 3, 8).tenant(2, 0, 3);
        for number in 0..60 {
            let tenant = (number % 3) as u32;
            let longest = if tenant == 2 { 4 } else { 8 };
            bench.admit(request(number, tenant, 1 + (number % 7) as u32 % longest, 5)).unwrap();
        }
        bench.finish();
        assert_eq!(bench.finished.len(), 60);
    }
}

#[test]
fn bug_17_a_prompt_that_is_wholly_in_the_cache_computes_its_last_token() {
    let mut bench = Bench::new(config(16, 16), 1).tenant(0, 0, 16);
    let mut second = request(2, 0, 32, 3);
    second.prompt = request(1, 0, 32, 3).prompt;
    bench.admit(request(1, 0, 32, 3)).unwrap();
    bench.finish();
    bench.admit(second).unwrap();
    let plan = bench.plan().unwrap();
    assert_eq!((plan.rows[0].start, plan.rows[0].inputs.len()), (Tokens(31), 1));
    bench.finish();
    let ended = bench.ends(id(2))[0].ended.unwrap();
    assert_eq!(
        (ended.prompt_tokens, ended.cached_tokens, ended.output_tokens),
        (Tokens(32), Tokens(31), Tokens(3))
    );
}

#[test]
fn bug_18_a_preempted_request_gives_what_it_gives_alone() {
    for depth in [1, 2] {
        let mut bench = Bench::new(config(6, 4), depth).tenant(0, 0, 6);
        for number in 0..6 {
            bench.admit(request(number, 0, 6, 16)).unwrap();
        }
        bench.finish();
        let preemptions = bench.scheduler.stats().tenants[0].preemptions;
        assert!(preemptions > 0, "the pool was too large to prove anything");
    }
}

#[test]
fn bug_43_after_everything_is_cancelled_gauges_are_zero_and_counters_stand() {
    for depth in [1, 2] {
        let mut bench = Bench::new(config(32, 4), depth).tenant(0, 4, 32).tenant(1, 0, 32);
        for number in 0..40 {
            bench.admit(request(number, (number % 2) as u32, 12, 20)).unwrap();
        }
        bench.run(5);
        let before = bench.scheduler.stats();
        for number in 0..40 {
            bench.cancel(id(number));
            bench.cancel(id(number));
        }
        bench.finish();
        bench.everything_is_back();
        let after = bench.scheduler.stats();
        for (before, after) in before.tenants.iter().zip(&after.tenants) {
            assert_eq!(after.aborted, 20, "{after:?}");
            assert!(after.output_tokens >= before.output_tokens && after.preemptions >= before.preemptions);
        }
    }
}

#[test]
fn bug_31_a_request_for_no_choices_no_tokens_or_from_no_prompt_is_refused_by_name() {
    let mut bench = Bench::new(config(8, 4), 1).tenant(0, 0, 8);
    let mut broken = [request(1, 0, 4, 4), request(2, 0, 4, 0), request(3, 0, 0, 4)];
    broken[0].n = 0;
    for (request, name) in broken.into_iter().zip(["n", "max_tokens", "prompt"]) {
        assert_eq!(bench.admit(request), Err(AdmitError::Nothing { field: name }));
    }
    let mut many = request(4, 0, 4, 4);
    many.n = u32::MAX;
    assert!(matches!(bench.admit(many), Err(AdmitError::NeverFits { .. })));
    assert_eq!(bench.admit(request(5, 9, 4, 4)), Err(AdmitError::UnknownTenant(TenantId(9))));
    bench.finish();
}

#[test]
fn bug_42_a_scheduler_remembers_nothing_of_what_ended() {
    let mut bench = Bench::new(config(64, 4), 2).tenant(0, 0, 64);
    for number in 0..2000 {
        bench.admit(request(number, 0, 5, 2)).unwrap();
        bench.step();
        bench.finished.clear();
    }
    bench.finish();
    assert!(bench.scheduler.snapshot().is_empty());
    assert!(bench.worker.known() <= 8, "the worker still knows {} sequences", bench.worker.known());
}
