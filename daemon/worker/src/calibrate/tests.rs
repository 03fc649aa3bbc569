use std::cell::Cell;

use super::*;
use crate::sequence::Sequences;

const LIMITS: Limits = Limits {
    max_num_seqs: 64,
    max_num_batched_tokens: 512,
    max_model_len: 2048,
    block_size: 16,
    capacity: POSITIONS / 16,
    vocab_size: 100,
};

/// What a plan has: tokens, draws, and pairs of rows and of parts.
fn contents(plan: &Plan) -> (u32, u32, Pairs) {
    let mut found = (0, 0, Pairs::default());
    for row in &plan.rows {
        let (start, n) = (u64::from(row.start), row.inputs.len() as u64);
        found.0 += n as u32;
        found.1 += u32::from(!row.samples.is_empty());
        if n == 1 {
            found.2.rows += start + 1;
        } else {
            found.2.parts += Pairs::of_part(start, n).parts;
        }
    }
    found
}

/// Microseconds of a plan on a machine without noise.
fn ideal((tokens, draws, pairs): (u32, u32, Pairs)) -> f32 {
    (1000 + 400 * tokens + 100 * draws) as f32 + 2.0 * (pairs.rows + pairs.parts) as f32
}

/// The same of a GPU: weights are read once for few tokens, and keys and values of a row once for each.
fn ideal_gpu((tokens, draws, pairs): (u32, u32, Pairs)) -> f32 {
    let products = 3700.0 + 8.0 * tokens.min(256) as f32 + 22.0 * tokens.saturating_sub(256) as f32;
    products + (250 + 2 * draws) as f32 + 0.03 * pairs.rows as f32 + 0.001 * pairs.parts as f32
}

fn is_about(cost: &StepCost, steps: &[(u32, u32, Pairs)], ideal: impl Fn((u32, u32, Pairs)) -> f32) {
    for &step in steps {
        let (found, expected) = (cost.step_us(step.0, step.1, step.2), ideal(step));
        assert!((found / expected - 1.0).abs() < 0.05, "{step:?}: {found}, {expected} expected of {cost:?}");
    }
}

#[test]
fn the_cost_of_an_ideal_machine_is_found() {
    let mut id = 0;
    let cost = measure(Machine::Processor, &LIMITS, |plan| {
        id += 1;
        assert_eq!(plan.id, id, "plans are consecutive");
        Ok::<_, ()>(ideal(contents(plan)) as u64)
    })
    .unwrap();
    let of_rows = |rows| Pairs { rows, parts: 0 };
    let steps = [
        (1, 1, of_rows(100)),
        (3, 3, of_rows(3)),
        (32, 32, of_rows(32_000)),
        (512, 1, Pairs::of_part(0, 512)),
    ];
    is_about(&cost, &steps, ideal);
}

#[test]
fn of_a_gpu_long_steps_are_found_and_rows_apart_from_parts_of_prompts_however_slow_each_plan_is_at_first() {
    let limits = Limits { max_num_batched_tokens: 8192, max_model_len: 32_768, capacity: 8192, ..LIMITS };
    let (mut met, mut slow) = (Vec::new(), 0);
    let cost = measure(Machine::Gpu, &limits, |plan| {
        let of = contents(plan);
        assert!(of.0 > of.1, "a step in which every token is drawn from is recorded: {of:?}");
        let first = !met.contains(&of);
        met.push(of);
        slow += u32::from(first);
        Ok::<_, ()>(ideal_gpu(of) as u64 + if first { 70_000 } else { 0 })
    })
    .unwrap();
    assert_eq!(slow as usize, GPU.len(), "every plan was new once");
    let decoding = Pairs { rows: 64 * 1100, parts: 0 };
    let beside = |n: u64, past: u64| Pairs { parts: Pairs::of_part(past, n).parts, ..decoding };
    let mut steps =
        vec![(1, 1, Pairs { rows: 500, parts: 0 }), (64, 64, decoding), (8192, 1, Pairs::of_part(0, 8192))];
    for n in [16, 100, 256, 448, 1000] {
        steps.extend([0, 8_000, 32_000].map(|past| (64 + n as u32, 64, beside(n, past))));
    }
    is_about(&cost, &steps, ideal_gpu);
}

#[test]
fn where_first_times_leave_a_gpu_no_time_for_all_plans_none_of_them_counts() {
    let limits = Limits { max_num_batched_tokens: 8192, max_model_len: 32_768, capacity: 8192, ..LIMITS };
    for first_us in [20_000, 70_000, 150_000] {
        let (clock, mut met) = (Cell::new(Duration::ZERO), Vec::new());
        let cost = measure_within(
            Machine::Gpu,
            &limits,
            || clock.get(),
            |plan| {
                let of = contents(plan);
                let us = ideal_gpu(of) as u64 + if met.contains(&of) { 0 } else { first_us };
                met.push(of);
                clock.set(clock.get() + Duration::from_micros(us));
                Ok::<_, ()>(us)
            },
        )
        .unwrap();
        assert!(clock.get() <= LONGEST + Duration::from_micros(first_us), "{first_us}: {:?}", clock.get());
        let decoding = Pairs { rows: 64 * 500, parts: 0 };
        let steps =
            [(1, 1, Pairs::default()), (64, 64, decoding), (256 + 64, 64, decoding), (1024, 1, decoding)];
        for step in steps {
            let (found, expected) = (cost.step_us(step.0, step.1, step.2), ideal_gpu(step));
            assert!(
                (found / expected - 1.0).abs() < 0.25,
                "{first_us} {step:?}: {found}, not {expected} of {cost:?}"
            );
        }
    }
}

#[test]
fn a_gpu_that_has_room_for_short_sequences_only_is_measured_as_far_as_they_go() {
    for (max_model_len, capacity, max_num_batched_tokens) in
        [(512, 8192, 8192), (32_768, 40, 8192), (32_768, 8192, 64)]
    {
        let limits = Limits { max_num_batched_tokens, max_model_len, capacity, ..LIMITS };
        let cost =
            measure(Machine::Gpu, &limits, |plan| Ok::<_, ()>(ideal_gpu(contents(plan)) as u64)).unwrap();
        let near = [(1, 1, Pairs::default()), (64, 40, Pairs::default())];
        is_about(&cost, &near, ideal_gpu);
        let us = cost.body_us;
        assert!(us.windows(2).all(|pair| pair[0] <= pair[1]), "{max_model_len} {capacity}: {us:?}");
    }
}

#[test]
fn rows_cost_something_also_where_the_largest_sizes_were_not_measured_and_noise_hides_one() {
    let mut times = Times::NONE;
    for (i, size) in SIZES.into_iter().enumerate().take(6) {
        times.body[i] = 100.0 + size as f32;
        times.drawn[i] = times.body[i] + 10.0 * size as f32;
    }
    times.drawn[5] = times.body[5] - 1.0;
    let head = fit(Machine::Processor, &times, &LIMITS).head_us;
    assert_eq!(head.map(|us| us as u32), StepCost::SIZES.map(|size| 10 * size));
}

/// Checks that the worker accepts every plan within `limits`. How many there are.
fn accepted(machine: Machine, limits: &Limits) -> usize {
    let plans = machine.order().iter().filter_map(|probe| plan(machine, *probe, limits));
    plans
        .map(|(begin, rows)| {
            let plan = Plan { id: 1, begin, rows, ..Plan::default() };
            let checked = crate::batch::check(&plan, &Sequences::default(), limits);
            assert!(checked.is_ok(), "{:?} for {limits:?}: {plan:?}", checked.err());
        })
        .count()
}

#[test]
fn every_plan_is_one_that_the_worker_accepts_whatever_the_limits() {
    for max_num_seqs in [1, 3, 64] {
        for max_num_batched_tokens in [1, 20, 512] {
            for max_model_len in [1, 9, 40, 700, 8192] {
                for block_size in [16, 64, 512] {
                    let mut limits =
                        Limits { max_num_seqs, max_num_batched_tokens, max_model_len, block_size, ..LIMITS };
                    for capacity in [1, 16, 40, 300, 5000] {
                        limits.capacity = capacity;
                        accepted(Machine::Gpu, &limits);
                    }
                    limits.capacity = 8192;
                    assert!(accepted(Machine::Gpu, &limits) > 0);
                    limits.capacity = blocks(Machine::Processor, &limits);
                    assert!(accepted(Machine::Processor, &limits) > 0);
                }
            }
        }
    }
}

#[test]
fn sequences_that_are_far_on_a_gpu_have_no_block_in_common() {
    let limits = Limits { capacity: 8192, max_model_len: 32_768, max_num_batched_tokens: 8192, ..LIMITS };
    let (_, rows) = plan(Machine::Gpu, Probe::Far, &limits).unwrap();
    let mut blocks: Vec<u32> = rows.iter().flat_map(|row| row.table.blocks.clone()).collect();
    let all = blocks.len();
    blocks.sort_unstable();
    blocks.dedup();
    assert_eq!((rows.len(), blocks.len()), (64, all), "what they have in common would be read once");
}

#[test]
fn a_slow_model_is_measured_in_part_and_extrapolated_to_the_safe_side() {
    let mut us = [f32::INFINITY; SIZES.len()];
    us[0] = 100.0;
    let found = |us| curve(us, 8).map(|us| us as u32);
    assert_eq!(found(us), StepCost::SIZES.map(|size| 100 * size));
    us[4] = 400.0;
    assert_eq!(found(us)[..10], [100, 120, 160, 240, 400, 800, 1600, 3200, 6400, 12_800]);
}

#[test]
fn noise_makes_no_curve_that_falls_or_ends_flat() {
    let mut us = [f32::INFINITY; SIZES.len()];
    us[..8].copy_from_slice(&[300.0, 100.0, 120.0, 500.0, 200.0, 300.0, 900.0, 800.0]);
    let us = curve(us, 8);
    assert!(us.windows(2).all(|pair| pair[0] <= pair[1]), "{us:?}");
    assert!(us[6..].windows(2).all(|pair| pair[0] < pair[1]), "{us:?}");
    let nothing = curve([f32::INFINITY; SIZES.len()], 8);
    assert!(nothing.iter().all(|us| us.abs() < f32::EPSILON));
}

#[test]
fn beyond_the_sizes_that_a_machine_measures_the_last_line_goes_on() {
    let mut us = [f32::INFINITY; SIZES.len()];
    for i in 0..8 {
        us[i] = 1000.0 + SIZES[i] as f32;
    }
    assert_eq!(curve(us, 8).map(|us| us as u32), SIZES.map(|size| 1000 + size));
}
