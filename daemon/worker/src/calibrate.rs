//! What steps take on this machine: which plans are measured, and the curve through what they took.
//!
//! **Owns** the order of measurements and the time spent on them. **Never** sees an arena: the runner puts a private one in place
//! and runs the plans.

use std::time::{Duration, Instant};

use pagedd_core::{SamplingParams, StepCost};
use pagedd_wire::worker::{Begin, Input, Plan, Row, TableUpdate};

use crate::batch::Limits;

const SIZES: [u32; StepCost::SIZES.len()] = StepCost::SIZES;

/// Measuring goes on for so long: plans again and again, of which the median counts, the lower one of two.
const USUAL: Duration = Duration::from_millis(250);
/// A larger model may take this many times what a single token takes, so that most sizes are measured once,
const TOKENS: u32 = 40;
/// but no longer than this: what is left then is extrapolated.
const LONGEST: Duration = Duration::from_millis(900);
/// Most times that a plan is measured.
const PASSES: usize = 5;
/// Most rows whose logits are computed: logits are the largest scratch memory of all, and would stay.
const MOST_ROWS: u32 = 32;
/// The size of the plan that shows what attention takes, and the tokens before each of its rows.
const NEAR: usize = 2;
const FAR_ROWS: u32 = SIZES[NEAR];
const FAR: u32 = 1024;
/// Positions of the private arena: more than caches near a core hold of any model worth measuring, little beside its weights.
const POSITIONS: u32 = 256;

/// A plan to measure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Probe {
    /// `SIZES[i]` tokens that nothing is drawn from.
    Body(usize),
    /// As many that are all drawn from.
    Drawn(usize),
    /// A few rows after many tokens, all drawn from: only then does the last layer attend.
    Far,
}

/// What comes first matters most. The very first plan meets memory that was never touched, and is measured again at once.
const ORDER: [Probe; 15] = [
    Probe::Body(0),
    Probe::Body(0),
    Probe::Drawn(0),
    Probe::Body(4),
    Probe::Body(2),
    Probe::Drawn(NEAR),
    Probe::Far,
    Probe::Drawn(4),
    Probe::Body(6),
    Probe::Body(3),
    Probe::Body(5),
    Probe::Body(1),
    Probe::Drawn(5),
    Probe::Body(7),
    Probe::Drawn(3),
];

/// What each plan takes, in microseconds; infinite where it was not measured.
#[derive(Clone, Copy, Debug)]
struct Times {
    body: [f32; SIZES.len()],
    drawn: [f32; SIZES.len()],
    far: f32,
}

impl Times {
    const NONE: Self =
        Self { body: [f32::INFINITY; SIZES.len()], drawn: [f32::INFINITY; SIZES.len()], far: f32::INFINITY };

    fn of(&mut self, probe: Probe) -> &mut f32 {
        match probe {
            Probe::Body(i) => &mut self.body[i],
            Probe::Drawn(i) => &mut self.drawn[i],
            Probe::Far => &mut self.far,
        }
    }

    /// What a plan will take: what it took, or by the largest one below it at the most.
    fn expected(&self, probe: Probe) -> Duration {
        let (known, i, more) = match probe {
            Probe::Body(i) => (self.body[i], i, 1.0),
            Probe::Drawn(i) => (self.drawn[i], i, 1.5),
            Probe::Far => (self.far, NEAR, 2.0),
        };
        let below = (0..=i).rev().find(|&j| self.body[j].is_finite());
        let by_size = below.map_or(0.0, |j| self.body[j] * (SIZES[i] / SIZES[j]) as f32 * more);
        let us = if known.is_finite() { known } else { by_size };
        Duration::from_micros(us as u64)
    }
}

/// Blocks of the arena that [`measure`]'s plans run on.
pub fn blocks(limits: &Limits) -> u32 {
    POSITIONS.div_ceil(per_block(limits))
}

/// Positions that plans use of a block: a sequence may be shorter than a block.
fn per_block(limits: &Limits) -> u32 {
    limits.block_size.min(limits.max_model_len).max(1)
}

/// Measures what steps take. `run` runs a plan on an arena of [`blocks`] blocks and gives its microseconds.
///
/// # Errors
/// What `run` gives.
pub fn measure<E>(limits: &Limits, mut run: impl FnMut(&Plan) -> Result<u64, E>) -> Result<StepCost, E> {
    let start = Instant::now();
    let (mut times, mut samples) = (Times::NONE, Vec::new());
    let mut id = 0;
    for pass in 0..PASSES {
        for probe in ORDER {
            let Some((begin, rows)) = plan(probe, limits) else { continue };
            // All sizes once in the first pass, as far as the model is not too slow for that.
            let tokens = times.expected(Probe::Body(0)) * TOKENS;
            let most = if pass == 0 { tokens.clamp(USUAL, LONGEST) } else { USUAL };
            if start.elapsed() + times.expected(probe) > most {
                continue;
            }
            id += 1;
            let us = run(&Plan { id, begin, rows, ..Plan::default() })? as f32;
            samples.push((probe, us));
            let mut same: Vec<f32> =
                samples.iter().filter(|(of, _)| *of == probe).map(|(_, us)| *us).collect();
            same.sort_by(f32::total_cmp);
            *times.of(probe) = same[(same.len() - 1) / 2];
        }
    }
    Ok(fit(&times, limits))
}

/// Most tokens that are rows of their own; more are a part of a prompt.
fn most_rows(limits: &Limits) -> u32 {
    limits.max_num_seqs.min(MOST_ROWS as usize) as u32
}

/// Sequences and rows of a plan; `None` where the limits do not allow it.
fn plan(probe: Probe, limits: &Limits) -> Option<(Vec<Begin>, Vec<Row>)> {
    let most_rows = most_rows(limits);
    let most_tokens = limits.max_num_batched_tokens as u32;
    let rows: Vec<Row> = match probe {
        Probe::Body(i) | Probe::Drawn(i) if SIZES[i] <= most_rows.min(most_tokens) => {
            let draws = matches!(probe, Probe::Drawn(_));
            (0..SIZES[i]).map(|seq| row(limits, seq, 0, 1, draws)).collect()
        }
        // Too many for rows of their own: a part of a prompt.
        Probe::Body(i) if SIZES[i] <= most_tokens.min(limits.max_model_len) => {
            vec![row(limits, 0, 0, SIZES[i], false)]
        }
        Probe::Body(_) | Probe::Drawn(_) => return None,
        Probe::Far => {
            let context = far_context(limits)?;
            (0..FAR_ROWS).map(|seq| row(limits, seq, context, 1, true)).collect()
        }
    };
    let begin = rows.iter().map(|row| Begin {
        seq: row.seq,
        choice: 0,
        sampling: SamplingParams::GREEDY.into(),
        // Several tokens are of a prompt, a single one comes behind it.
        prompt: if row.inputs.len() > 1 { row.start + row.inputs.len() as u32 } else { 0 },
        tokens: vec![],
    });
    Some((begin.collect(), rows))
}

/// Tokens before those of [`Probe::Far`], whole blocks; `None` where sequences are too short or too few to tell.
fn far_context(limits: &Limits) -> Option<u32> {
    let most = FAR.min(limits.max_model_len.saturating_sub(limits.block_size));
    let context = most / limits.block_size * limits.block_size;
    let room = limits.max_num_seqs.min(limits.max_num_batched_tokens) >= FAR_ROWS as usize;
    (room && context >= FAR / 8).then_some(context)
}

/// Tokens `[start, start + count)` of a sequence. Its last block has its place for `seq` among all sequences of the plan; those
/// before it are read only, and come again and again.
fn row(limits: &Limits, seq: u32, start: u32, count: u32, draws: bool) -> Row {
    let per = per_block(limits);
    let (mine, first) = if count == 1 { (seq / per, seq % per) } else { (0, 0) };
    let before = start / limits.block_size;
    // One token stands at the place in its block that no other sequence has.
    let start = start + first;
    let last = if count == 1 { 1 } else { count.div_ceil(limits.block_size) };
    let all = blocks(limits);
    let context = (0..before).map(|i| (seq * before + i) % all);
    let token = |position: u32| (seq * 7919 + position * 104_729) % limits.vocab_size;
    Row {
        seq: seq.into(),
        start,
        inputs: (start..start + count).map(|position| Input::Known(token(position))).collect(),
        table: TableUpdate { from: 0, blocks: context.chain((0..last).map(|i| mine + i)).collect() },
        drafts: 0,
        samples: draws.then(|| seq.into()).into_iter().collect(),
    }
}

/// The curves through what was measured.
fn fit(times: &Times, limits: &Limits) -> StepCost {
    let near = times.drawn[NEAR];
    let pair_us = match far_context(limits) {
        Some(context) if times.far.is_finite() && near.is_finite() => {
            (times.far - near).max(0.0) / (FAR_ROWS * context) as f32
        }
        Some(_) | None => 0.0,
    };
    // Where one of both was not measured, or noise made the larger plan the faster one, nothing is known of a row.
    let head = std::array::from_fn(|i| {
        let us = times.drawn[i] - times.body[i];
        if us.is_finite() && us > 0.0 { us } else { f32::INFINITY }
    });
    // The pairs of a part of a prompt; those of single tokens near a sequence's start are few.
    let body = std::array::from_fn(|i| {
        let n = SIZES[i];
        let pairs = if n > most_rows(limits) { n * (n + 1) / 2 } else { 0 };
        (times.body[i] - pair_us * pairs as f32).max(0.0)
    });
    StepCost { body_us: curve(body), head_us: curve(head), pair_us }
}

/// A rising curve through those of `us` that are finite.
///
/// Noise only ever adds, so that a size takes no longer than any larger one did. Between two measured sizes it is a straight line;
/// beyond the last, a token takes its share of that one: more than it will, as part of the time is the same for every size.
fn curve(mut us: [f32; SIZES.len()]) -> [f32; SIZES.len()] {
    let measured: Vec<usize> = (0..us.len()).filter(|&i| us[i].is_finite()).collect();
    let (Some(&first), Some(&last)) = (measured.first(), measured.last()) else { return [0.0; SIZES.len()] };
    let mut least = f32::INFINITY;
    for &i in measured.iter().rev() {
        least = least.min(us[i]);
        us[i] = least;
    }
    let size = |i: usize| SIZES[i] as f32;
    let smallest = us[first];
    us[..first].fill(smallest);
    for pair in measured.windows(2) {
        let (from, to) = (pair[0], pair[1]);
        let slope = (us[to] - us[from]) / (size(to) - size(from));
        for i in from + 1..to {
            us[i] = us[from] + slope * (size(i) - size(from));
        }
    }
    for i in last + 1..us.len() {
        us[i] = us[last] / size(last) * size(i);
    }
    // The last line goes on for ever: were it flat by accident, more tokens would be free.
    let (end, before) = (us.len() - 1, us.len() - 2);
    let mean = (us[before] - us[0]) / (size(before) - size(0));
    us[end] = us[end].max(us[before] + mean / 2.0 * (size(end) - size(before)));
    us
}

#[cfg(test)]
mod tests {
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

    /// Microseconds of a plan on a machine without noise.
    fn ideal(plan: &Plan) -> u64 {
        let tokens: u64 = plan.rows.iter().map(|row| row.inputs.len() as u64).sum();
        let draws = plan.rows.iter().filter(|row| !row.samples.is_empty()).count() as u64;
        let pairs = |row: &Row| (1..=row.inputs.len() as u64).map(|n| u64::from(row.start) + n).sum::<u64>();
        1000 + 400 * tokens + 100 * draws + 2 * plan.rows.iter().map(pairs).sum::<u64>()
    }

    #[test]
    fn the_cost_of_an_ideal_machine_is_found() {
        let mut id = 0;
        let cost = measure(&LIMITS, |plan| {
            id += 1;
            assert_eq!(plan.id, id, "plans are consecutive");
            Ok::<_, ()>(ideal(plan))
        })
        .unwrap();
        for (tokens, rows, pairs) in [(1, 1, 100), (3, 3, 3), (32, 32, 32_000), (512, 1, 131_328)] {
            let (found, expected) = (
                cost.step_us(tokens, rows, pairs),
                (1000 + 400 * tokens + 100 * rows) as f32 + 2.0 * pairs as f32,
            );
            assert!(
                (found / expected - 1.0).abs() < 0.05,
                "{tokens} {rows} {pairs}: {found}, {expected} expected"
            );
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
        let head = fit(&times, &LIMITS).head_us;
        assert_eq!(head.map(|us| us as u32), [10, 20, 40, 80, 160, 320, 640, 1280]);
    }

    #[test]
    fn every_plan_is_one_that_the_worker_accepts_whatever_the_limits() {
        for max_num_seqs in [1, 3, 64] {
            for max_num_batched_tokens in [1, 20, 512] {
                for max_model_len in [1, 9, 40, 700, 8192] {
                    for block_size in [16, 64, 512] {
                        let mut limits = Limits {
                            max_num_seqs,
                            max_num_batched_tokens,
                            max_model_len,
                            block_size,
                            ..LIMITS
                        };
                        limits.capacity = blocks(&limits);
                        let probed: Vec<_> = ORDER.iter().filter_map(|probe| plan(*probe, &limits)).collect();
                        assert!(!probed.is_empty());
                        for (begin, rows) in probed {
                            let plan = Plan { id: 1, begin, rows, ..Plan::default() };
                            let checked = crate::batch::check(&plan, &Sequences::default(), &limits);
                            assert!(checked.is_ok(), "{:?} for {limits:?}: {plan:?}", checked.err());
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_slow_model_is_measured_in_part_and_extrapolated_to_the_safe_side() {
        let mut us = [f32::INFINITY; SIZES.len()];
        us[0] = 100.0;
        assert_eq!(curve(us).map(|us| us as u32), [100, 200, 400, 800, 1600, 3200, 6400, 12_800]);
        us[4] = 400.0;
        assert_eq!(curve(us).map(|us| us as u32), [100, 120, 160, 240, 400, 800, 1600, 3200]);
    }

    #[test]
    fn noise_makes_no_curve_that_falls_or_ends_flat() {
        let us = curve([300.0, 100.0, 120.0, 500.0, 200.0, 300.0, 900.0, 800.0]);
        assert!(us.windows(2).all(|pair| pair[0] <= pair[1]), "{us:?}");
        assert!(us[7] > us[6], "{us:?}");
        let nothing = curve([f32::INFINITY; SIZES.len()]);
        assert!(nothing.iter().all(|us| us.abs() < f32::EPSILON));
    }
}
