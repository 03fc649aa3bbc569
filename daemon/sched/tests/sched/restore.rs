//! Requests of an earlier scheduler: nothing lost, nothing doubled, nothing changed.

use pagedd_core::{Blocks, FinishReason, TenantId, TokenId, Tokens};
use pagedd_sched::{AdmitError, LedgerRecord, NewRequest, Restored, RestoredChoice};

use crate::bench::{Bench, config, id, request, share};
use crate::worker::reference;

/// Two tenants with floors, choices, stop ids, and a pool that is too small for all of it.
fn load(depth: usize) -> Bench {
    let mut config = config(20, 4);
    config.max_num_batched_tokens = Tokens(24);
    config.prompt_lookup = depth == 1;
    let mut bench = Bench::new(config, depth).tenant(0, 3, 20).tenant(1, 3, 20);
    for number in 1..=10 {
        let mut new = request(number, (number % 2) as u32, 3 + 2 * (number % 7) as u32, 4 + number as u32);
        new.n = if number % 3 == 0 { 4 } else { 1 };
        if number % 4 == 0 {
            new.stop_ids = vec![TokenId(2), TokenId(17)];
        }
        bench.admit(new).unwrap();
    }
    bench
}

#[test]
fn a_restart_after_any_step_changes_no_output_and_no_usage() {
    let (mut restarts, mut preempted, mut open) = (0, 0, 0);
    for depth in [1, 2] {
        for lost in [0, 1, 3] {
            for steps in 0..400 {
                let mut bench = load(depth);
                bench.run(steps);
                let over = bench.scheduler.is_idle();
                // Outputs and usage are compared as choices end; also twice in a row.
                open += bench.restart(lost).len();
                bench.run(2);
                bench.restart(0);
                bench.finish();
                assert_eq!(bench.finished.len(), 7 + 3 * 4, "depth {depth}, {steps} steps, {lost} lost");
                preempted += bench.scheduler.stats().tenants.iter().map(|t| t.preemptions).sum::<u64>();
                restarts += 1;
                if over {
                    break;
                }
            }
        }
    }
    println!("{restarts} restarts with {open} open choices, {preempted} preemptions after them");
    assert!(open > 10 * restarts / 3 && preempted > 50, "{open} open choices, {preempted} preemptions");
}

#[test]
fn with_a_ledger_at_most_a_block_of_each_sequence_is_computed_again() {
    let (mut most, mut rows) = (0, 0);
    for steps in 1..40 {
        let mut config = config(600, 4);
        (config.max_num_seqs, config.max_num_batched_tokens) = (40, Tokens(1000));
        let mut bench = Bench::new(config, 1).tenant(0, 0, 600).tenant(1, 100, 600);
        bench.keep_ledger();
        for number in 1..=16 {
            let tenant = (number % 2) as u32;
            bench
                .admit(NewRequest { n: 1 + 3 * tenant, ..request(number, tenant, 20 + number as u32, 30) })
                .unwrap();
        }
        bench.run(steps);
        let open = bench.restart(0).len();
        let Some(plan) = bench.plan() else { break };
        assert_eq!(plan.rows.len(), open, "all run again at once");
        let computed = plan.rows.iter().map(|row| row.inputs.len()).max().unwrap();
        // The last token was drawn and had not been an input.
        assert!(computed <= 4, "step {steps}: {computed} tokens of one sequence");
        (most, rows) = (most.max(computed), rows + plan.rows.len());
        let all: usize = plan.rows.iter().map(|row| row.inputs.len() - 1).sum();
        let again: u64 = bench.scheduler.stats().tenants.iter().map(|t| t.recomputed_tokens).sum();
        assert_eq!(again, all as u64, "step {steps}");
        bench.finish();
    }
    println!("{rows} sequences, {most} tokens of one at most");
    assert!(rows > 500, "{rows} sequences prove nothing");
}

#[test]
fn a_record_of_a_tenant_without_a_share_is_not_adopted_and_gone_once_its_block_is_used() {
    let mut bench = Bench::new(config(8, 4), 1).tenant(0, 0, 8).tenant(1, 0, 8);
    bench.keep_ledger();
    bench.admit(request(1, 0, 30, 2)).unwrap();
    bench.finish();
    let ledger = bench.ledger.take().unwrap();
    let records: Vec<_> = ledger.records().collect();
    assert_eq!(records.len(), 7);
    // The next process knows tenant 1 first, and has it write all blocks.
    let mut next = Bench::new(config(8, 4), 1).tenant(1, 0, 8);
    next.scheduler.watch_blocks();
    next.ledger = Some(ledger);
    assert_eq!(next.scheduler.adopt(records.clone()), 0);
    next.admit(request(2, 1, 30, 2)).unwrap();
    next.finish();
    let left: Vec<_> = next.ledger.as_ref().unwrap().records().collect();
    next.scheduler.set_share(TenantId(0), share(0, 8)).unwrap();
    assert_eq!(
        next.scheduler.adopt(left.iter().copied()),
        0,
        "those left are tenant 1's, and cached: {left:?}"
    );
    assert_eq!(left.len(), 7);
    // Had one been left, its block is not free.
    assert_eq!(next.scheduler.adopt(records.into_iter().take(1)), 0);
    next.check();
}

#[test]
fn what_is_adopted_counts_as_its_tenants_and_keeps_to_the_ceiling() {
    let mut bench = Bench::new(config(16, 4), 1).tenant(0, 0, 16);
    bench.keep_ledger();
    bench.admit(request(1, 0, 40, 2)).unwrap();
    bench.finish();
    let records: Vec<_> = bench.ledger.as_ref().unwrap().records().collect();
    let mut next = Bench::new(config(16, 4), 1).tenant(0, 0, 6);
    let partial =
        records.iter().map(|(block, record)| (*block, LedgerRecord { tokens: Tokens(3), ..*record }));
    assert_eq!(next.scheduler.adopt(partial), 0, "a block that is not full");
    assert_eq!(next.scheduler.adopt(records.iter().copied()), 6);
    assert_eq!(next.scheduler.adopt(records), 0, "once");
    next.check();
    assert_eq!(next.scheduler.stats().tenants[0].cached, Blocks(6));
}

#[test]
fn an_end_that_was_reached_and_not_kept_is_told_at_once() {
    for stop in [false, true] {
        let mut bench = Bench::new(config(32, 4), 1).tenant(0, 0, 32);
        let mut new = NewRequest { n: 2, ..request(1, 0, 6, 9) };
        let (output, _) = reference(&new, 0, 256);
        if stop {
            new.stop_ids = vec![output[4]];
        }
        let (emitted, reason) = reference(&new, 0, 256);
        assert_eq!(reason, if stop { FinishReason::Stop } else { FinishReason::Length });
        let open = RestoredChoice { emitted, finished: None };
        let over = RestoredChoice { emitted: vec![TokenId(1); 3], finished: Some(FinishReason::Cancelled) };
        let used = Tokens(open.emitted.len() as u32 + 3);
        let choices = vec![open, over];
        let finished = bench
            .scheduler
            .restore(&Restored { request: new, choices, cached_tokens: Some(Tokens(4)) })
            .unwrap();
        assert_eq!(finished.len(), 1, "the other choice ended before: {finished:?}");
        assert_eq!((finished[0].choice, finished[0].reason), (0, reason));
        let ended = finished[0].ended.unwrap();
        let usage = (ended.prompt_tokens, ended.cached_tokens, ended.output_tokens);
        assert_eq!(usage, (Tokens(6), Tokens(4), used));
        assert!(bench.scheduler.is_idle());
        bench.everything_is_back();
    }
}

#[test]
fn restored_requests_start_before_new_ones_and_no_queue_is_too_full_for_them() {
    let mut config = config(32, 4);
    (config.max_queued_requests, config.max_num_seqs) = (2, 1);
    let mut bench = Bench::new(config, 1).tenant(0, 0, 32);
    for number in [5, 3] {
        bench.admit(request(number, 0, 6, 4)).unwrap();
    }
    bench.step();
    bench.admit(request(2, 0, 6, 4)).unwrap();
    bench.restart(1);
    assert_eq!(bench.scheduler.stats().tenants[0].queued_requests, 3, "more than may be admitted");
    let refused = bench.admit(request(1, 0, 6, 4)).unwrap_err();
    assert_eq!(refused, AdmitError::QueueFull { waiting: 3 });
    bench.run(8);
    bench.admit(request(1, 0, 6, 4)).unwrap();
    bench.finish();
    let order: Vec<_> = bench.finished.iter().map(|end| end.request).collect();
    assert_eq!(order, [5, 3, 2, 1].map(id));
}

#[test]
fn bounds_that_contradict_a_restored_request_wait_for_it() {
    let mut bench = Bench::new(config(16, 4), 1).tenant(0, 0, 16).tenant(1, 0, 16);
    bench.admit(request(1, 0, 30, 20)).unwrap();
    bench.run(3);
    bench.scheduler.set_share(TenantId(0), share(0, 2)).unwrap();
    bench.scheduler.set_share(TenantId(1), share(14, 16)).unwrap();
    bench.restart(0);
    assert!(bench.scheduler.stats().tenants.iter().all(|t| t.share_pending));
    bench.finish();
    assert_eq!(bench.ends(id(1))[0].reason, FinishReason::Length);
    assert!(bench.scheduler.stats().tenants.iter().all(|t| !t.share_pending));
}

#[test]
fn what_cannot_go_on_is_refused_and_ends_with_its_usage() {
    let mut bench = Bench::new(config(8, 4), 1).tenant(0, 0, 8);
    let emitted = vec![TokenId(1), TokenId(2)];
    let choices = vec![RestoredChoice { emitted, finished: None }];
    let mut restored =
        Restored { request: NewRequest { n: 2, ..request(1, 0, 30, 20) }, choices, cached_tokens: None };
    let refused = bench.scheduler.restore(&restored).unwrap_err();
    assert_eq!(refused, AdmitError::NeverFits { needed: Blocks(7 + 2 * 6), allowed: Blocks(8) });
    assert!(bench.scheduler.is_idle());
    let ends = restored.finish(FinishReason::Failed);
    assert_eq!(ends.iter().map(|end| end.choice).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(ends[0].ended, None);
    assert_eq!(ends[1].ended.unwrap().output_tokens, Tokens(2));
    assert_eq!(restored.finish(FinishReason::Failed), []);
    restored.request.tenant = TenantId(9);
    assert_eq!(bench.scheduler.restore(&restored), Err(AdmitError::UnknownTenant(TenantId(9))));
}

#[test]
fn a_request_is_restored_once() {
    let mut bench = Bench::new(config(8, 4), 1).tenant(0, 0, 8);
    bench.admit(request(1, 0, 4, 3)).unwrap();
    let again = Restored { request: request(1, 0, 4, 3), choices: Vec::new(), cached_tokens: None };
    assert_eq!(bench.scheduler.restore(&again), Err(AdmitError::Duplicate(id(1))));
    bench.finish();
    assert_eq!(bench.finished.len(), 1);
}
