//! What a step costs: printed, not judged.

use std::time::Duration;

use pagedd_core::{TokenId, Tokens};
use pagedd_sched::{Sampled, Scheduler, StepOutput, StepPlan};

use crate::bench::{config, request, share};

fn output(plan: &StepPlan) -> StepOutput {
    let drawn = plan.rows.iter().flat_map(|row| &row.samples);
    let sampled =
        drawn.map(|seq| Sampled { seq: *seq, token: TokenId(7), logprob: None, top: Vec::new() }).collect();
    StepOutput { plan: plan.id, sampled, failed: Vec::new(), compute_us: 0 }
}

#[test]
fn a_step_with_256_running_sequences_prints_its_cost() {
    // With guesses, every sequence finds one in every step.
    for prompt_lookup in [false, true] {
        measure(prompt_lookup);
    }
}

#[allow(clippy::disallowed_methods, clippy::disallowed_types, reason = "a measurement around the scheduler")]
fn measure(prompt_lookup: bool) {
    use std::time::Instant;
    let mut config = config(20_000, 16);
    config.max_num_seqs = 256;
    config.prompt_lookup = prompt_lookup;
    config.max_num_batched_tokens = Tokens(8192);
    config.max_model_len = Tokens(4096);
    config.max_queued_requests = 10_000;
    let mut scheduler = Scheduler::new(config);
    for tenant in 0..8 {
        scheduler.set_share(pagedd_core::TenantId(tenant), share(2000, 10_000)).unwrap();
    }
    for number in 0..2000 {
        scheduler.admit(request(number, (number % 8) as u32, 300, 400)).unwrap();
    }
    let (mut schedule, mut apply): (Vec<Duration>, Vec<Duration>) = (Vec::new(), Vec::new());
    while schedule.len() < 500 {
        let start = Instant::now();
        let plan = scheduler.schedule(0).unwrap();
        let planned = start.elapsed();
        let rows = plan.rows.len();
        let output = output(&plan);
        let start = Instant::now();
        scheduler.apply(plan, output);
        let applied = start.elapsed();
        if rows == 256 {
            schedule.push(planned);
            apply.push(applied);
        }
    }
    schedule.sort();
    apply.sort();
    println!(
        "256 rows, 2000 requests of 8 tenants, prompt lookup {prompt_lookup}: schedule median {:?}, 99 of 100 under {:?}; apply median {:?}, 99 of 100 under {:?}",
        schedule[250], schedule[495], apply[250], apply[495]
    );
    scheduler.check().unwrap();
}
