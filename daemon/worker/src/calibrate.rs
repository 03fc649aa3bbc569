//! What steps take on this machine: which plans are measured, and the curve through what they took.
//!
//! **Owns** the order of measurements and the time spent on them. **Never** sees an arena: the runner puts one in place on which nothing
//! lies yet, and runs the plans.

use std::time::{Duration, Instant};

use pagedd_core::{Pairs, SamplingParams, StepCost};
use pagedd_wire::worker::{Begin, Input, Plan, Row, TableUpdate};

use crate::batch::Limits;

const SIZES: [u32; StepCost::SIZES.len()] = StepCost::SIZES;

/// Most times that a plan is measured.
const PASSES: usize = 5;
/// A larger model may take this many times what a single token takes, so that most sizes are measured once.
const TOKENS: u32 = 40;
/// But no longer than this: what is left then is extrapolated.
const LONGEST: Duration = Duration::from_millis(900);
/// Most tokens that are rows of their own; more are a part of a prompt.
const MOST_ROWS: u32 = 32;
/// Positions of the processor's private arena: more than caches near a core hold of any model worth measuring, little beside its weights.
/// A GPU has room for as many, or is not measured: rows that are not far have theirs among these there, too.
const POSITIONS: u32 = 256;
/// The plan that far ones are compared with, on a processor: its size.
const NEAR: usize = 2;
/// The same on a GPU: of rows of a single token, and of a part of a prompt at the most.
const GPU_ROWS: usize = 6;
const GPU_PART: usize = 8;
/// Tokens before each row of a far plan, and before a part of a prompt.
const FAR: u32 = 1024;
const FAR_PART: u32 = 16_384;

/// What steps are measured on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Machine {
    /// The host's processors. A pair of a query and a position takes as long wherever it is.
    Processor,
    /// A GPU. The first plan of a size loads kernels and chooses among them, and a step of decoding rows alone is recorded the second time:
    /// everything runs once before it is measured, and one row of each plan is not drawn from, so that nothing is recorded.
    Gpu,
}

/// A plan to measure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Probe {
    /// `SIZES[i]` tokens that nothing is drawn from.
    Body(usize),
    /// As many that are all drawn from; on a GPU all but one.
    Drawn(usize),
    /// Rows after many tokens. On a processor all are drawn from: only then does the last layer attend.
    Far,
    /// A part of a prompt after many tokens.
    FarPart,
}

/// What comes first matters most. The very first plan meets memory that was never touched, and is measured again at once.
const PROCESSOR: [Probe; 15] = [
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

/// Beyond the largest, each token takes as long as the one before it.
const GPU: [Probe; 14] = [
    Probe::Body(0),
    Probe::Body(GPU_ROWS),
    Probe::Body(9),
    Probe::Body(GPU_PART),
    Probe::Body(10),
    Probe::FarPart,
    Probe::Far,
    Probe::Body(3),
    Probe::Drawn(3),
    Probe::Drawn(GPU_ROWS),
    Probe::Body(7),
    Probe::Body(11),
    Probe::Body(4),
    Probe::Body(5),
];

impl Machine {
    fn order(self) -> &'static [Probe] {
        match self {
            Self::Processor => &PROCESSOR,
            Self::Gpu => &GPU,
        }
    }

    /// Measuring goes on for so long: plans again and again, of which the median counts, the lower one of two.
    fn usual(self) -> Duration {
        Duration::from_millis(match self {
            Self::Processor => 250,
            Self::Gpu => 600,
        })
    }

    /// Sizes that are measured, of tokens and of rows that are drawn from: logits are the largest scratch memory of all, and would stay.
    fn sizes(self) -> (usize, usize) {
        match self {
            Self::Processor => (8, 8),
            Self::Gpu => (12, GPU_ROWS + 1),
        }
    }
}

/// What each plan takes, in microseconds; infinite where it was not measured.
#[derive(Clone, Copy, Debug)]
struct Times {
    body: [f32; SIZES.len()],
    drawn: [f32; SIZES.len()],
    far: f32,
    far_part: f32,
}

impl Times {
    const NONE: Self = Self {
        body: [f32::INFINITY; SIZES.len()],
        drawn: [f32::INFINITY; SIZES.len()],
        far: f32::INFINITY,
        far_part: f32::INFINITY,
    };

    fn of(&mut self, probe: Probe) -> &mut f32 {
        match probe {
            Probe::Body(i) => &mut self.body[i],
            Probe::Drawn(i) => &mut self.drawn[i],
            Probe::Far => &mut self.far,
            Probe::FarPart => &mut self.far_part,
        }
    }

    /// What a plan will take: what it took, or by the largest one below it at the most. What draws and far positions come to by then are
    /// guesses, on the safe side.
    fn expected(&self, probe: Probe) -> Duration {
        let (known, i, more) = match probe {
            Probe::Body(i) => (self.body[i], i, 1.0),
            Probe::Drawn(i) => (self.drawn[i], i, 1.5),
            Probe::Far => (self.far, NEAR, 2.0),
            Probe::FarPart => (self.far_part, GPU_PART, 3.0),
        };
        let below = (0..=i).rev().find(|&j| self.body[j].is_finite());
        let by_size = below.map_or(0.0, |j| self.body[j] * (SIZES[i] / SIZES[j]) as f32 * more);
        let us = if known.is_finite() { known } else { by_size };
        Duration::from_micros(us as u64)
    }
}

/// Blocks of the arena that [`measure`]'s plans run on.
pub fn blocks(machine: Machine, limits: &Limits) -> u32 {
    match machine {
        Machine::Processor => POSITIONS.div_ceil(per_block(limits)),
        // The real one, as much of it as there is.
        Machine::Gpu => limits.capacity,
    }
}

/// Positions that plans use of a block: a sequence may be shorter than a block.
fn per_block(limits: &Limits) -> u32 {
    limits.block_size.min(limits.max_model_len).max(1)
}

/// Measures what steps take. `run` runs a plan on an arena of [`blocks`] blocks and gives its microseconds.
///
/// # Errors
/// What `run` gives.
pub fn measure<E>(
    machine: Machine,
    limits: &Limits,
    run: impl FnMut(&Plan) -> Result<u64, E>,
) -> Result<StepCost, E> {
    let start = Instant::now();
    measure_within(machine, limits, || start.elapsed(), run)
}

/// The same by any clock: `elapsed` says for how long it has gone on.
fn measure_within<E>(
    machine: Machine,
    limits: &Limits,
    elapsed: impl Fn() -> Duration,
    mut run: impl FnMut(&Plan) -> Result<u64, E>,
) -> Result<StepCost, E> {
    let (mut times, mut samples) = (Times::NONE, Vec::new());
    let mut id = 0;
    let mut time = |begin, rows| {
        id += 1;
        run(&Plan { id, begin, rows, ..Plan::default() }).map(|us| us as f32)
    };
    let mut order = machine.order();
    if machine == Machine::Gpu {
        for (done, &probe) in order.iter().enumerate() {
            // What there is no time to run twice is not measured: its first time would count.
            if elapsed() >= machine.usual() {
                order = &order[..done];
                break;
            }
            if let Some((begin, rows)) = plan(machine, probe, limits) {
                time(begin, rows)?;
            }
        }
    }
    for pass in 0..PASSES {
        for &probe in order {
            let Some((begin, rows)) = plan(machine, probe, limits) else { continue };
            // All sizes once in the first pass, as far as the model is not too slow for that.
            let tokens = times.expected(Probe::Body(0)) * TOKENS;
            let most = match machine {
                Machine::Processor if pass == 0 => tokens.clamp(machine.usual(), LONGEST),
                Machine::Gpu if pass == 0 => LONGEST,
                Machine::Processor | Machine::Gpu => machine.usual(),
            };
            if elapsed() + times.expected(probe) > most {
                continue;
            }
            samples.push((probe, time(begin, rows)?));
            let mut same: Vec<f32> =
                samples.iter().filter(|(of, _)| *of == probe).map(|(_, us)| *us).collect();
            same.sort_by(f32::total_cmp);
            *times.of(probe) = same[(same.len() - 1) / 2];
        }
    }
    Ok(fit(machine, &times, limits))
}

fn most_rows(limits: &Limits) -> u32 {
    limits.max_num_seqs.min(MOST_ROWS as usize) as u32
}

/// Sequences and rows of a plan; `None` where the limits do not allow it.
fn plan(machine: Machine, probe: Probe, limits: &Limits) -> Option<(Vec<Begin>, Vec<Row>)> {
    let most_tokens = limits.max_num_batched_tokens as u32;
    if blocks(machine, limits) < blocks(Machine::Processor, limits) {
        return None;
    }
    let most_rows = match (machine, probe) {
        (Machine::Gpu, Probe::Drawn(_)) => limits.max_num_seqs.min(POSITIONS as usize) as u32,
        _ => most_rows(limits),
    };
    let rows: Vec<Row> = match probe {
        Probe::Body(i) | Probe::Drawn(i) if SIZES[i] <= most_rows.min(most_tokens) => {
            let drawn = match (machine, probe) {
                (Machine::Processor, Probe::Drawn(_)) => SIZES[i],
                (Machine::Gpu, Probe::Drawn(_)) => SIZES[i] - 1,
                _ => 0,
            };
            (0..SIZES[i]).map(|seq| row(limits, seq, 0, 1, seq < drawn)).collect()
        }
        // Too many for rows of their own: a part of a prompt.
        Probe::Body(i) if SIZES[i] <= most_tokens.min(limits.max_model_len) => {
            (SIZES[i].div_ceil(limits.block_size) <= blocks(machine, limits))
                .then(|| vec![row(limits, 0, 0, SIZES[i], false)])?
        }
        Probe::Body(_) | Probe::Drawn(_) => return None,
        Probe::Far => {
            let Far { count, context } = far(machine, limits)?;
            let row = |seq| match machine {
                Machine::Processor => row(limits, seq, context, 1, true),
                Machine::Gpu => far_row(limits, seq, context, 1),
            };
            (0..count).map(row).collect()
        }
        Probe::FarPart => {
            let Far { count, context } = far_part(machine, limits)?;
            vec![far_row(limits, 0, context, count)]
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

/// Rows, or tokens of a part, of a far plan, and the tokens before them, which are whole blocks.
#[derive(Clone, Copy, Debug)]
struct Far {
    count: u32,
    context: u32,
}

/// What [`Probe::Far`] has; `None` where sequences are too short or too few to tell.
fn far(machine: Machine, limits: &Limits) -> Option<Far> {
    let most = FAR.min(limits.max_model_len.saturating_sub(limits.block_size));
    let context = most / limits.block_size * limits.block_size;
    let seats = limits.max_num_seqs.min(limits.max_num_batched_tokens) as u32;
    let count = match machine {
        Machine::Processor => SIZES[NEAR],
        Machine::Gpu => {
            let room = blocks(machine, limits) / (context / limits.block_size + 1);
            SIZES[GPU_ROWS].min(seats).min(room)
        }
    };
    (seats >= count && count >= SIZES[NEAR] && context >= FAR / 8).then_some(Far { count, context })
}

/// What [`Probe::FarPart`] has.
fn far_part(machine: Machine, limits: &Limits) -> Option<Far> {
    let count = SIZES[part(limits)?];
    let room = u64::from(blocks(machine, limits)) * u64::from(limits.block_size);
    let most = u64::from(limits.max_model_len).min(room).saturating_sub(count.into()).min(FAR_PART.into());
    let context = most as u32 / limits.block_size * limits.block_size;
    (context >= FAR).then_some(Far { count, context })
}

/// The size of that part: the largest that is one and that there is.
fn part(limits: &Limits) -> Option<usize> {
    let most = limits.max_model_len.min(limits.max_num_batched_tokens as u32);
    (0..=GPU_PART).rev().find(|&i| SIZES[i] <= most && SIZES[i] > most_rows(limits))
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
    let all = blocks(Machine::Processor, limits);
    let context = (0..before).map(|i| (seq * before + i) % all);
    let table = context.chain((0..last).map(|i| mine + i)).collect();
    tokens(limits, seq, start, count, table, draws)
}

/// The same with blocks that no other sequence of the plan has: what several have is read once.
fn far_row(limits: &Limits, seq: u32, start: u32, count: u32) -> Row {
    let each = (start + count).div_ceil(limits.block_size);
    tokens(limits, seq, start, count, (seq * each..(seq + 1) * each).collect(), false)
}

fn tokens(limits: &Limits, seq: u32, start: u32, count: u32, blocks: Vec<u32>, draws: bool) -> Row {
    let token = |position: u32| (seq.wrapping_mul(7919) + position.wrapping_mul(104_729)) % limits.vocab_size;
    Row {
        seq: seq.into(),
        start,
        inputs: (start..start + count).map(|position| Input::Known(token(position))).collect(),
        table: TableUpdate { from: 0, blocks },
        drafts: 0,
        samples: draws.then(|| seq.into()).into_iter().collect(),
    }
}

/// The curves through what was measured.
fn fit(machine: Machine, times: &Times, limits: &Limits) -> StepCost {
    let pair = |far: Option<Far>, us: f32, near: f32| match far {
        Some(Far { count, context }) if us.is_finite() && near.is_finite() => {
            (us - near).max(0.0) / (count as f32 * context as f32)
        }
        Some(_) | None => 0.0,
    };
    let (sizes, drawn) = machine.sizes();
    let far = far(machine, limits);
    let part_pair_us = match machine {
        Machine::Processor => pair(far, times.far, times.drawn[NEAR]),
        Machine::Gpu => {
            let near = part(limits).map_or(f32::INFINITY, |i| times.body[i]);
            pair(far_part(machine, limits), times.far_part, near)
        }
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
        (times.body[i] - part_pair_us * pairs as f32).max(0.0)
    });
    let cost = StepCost { body_us: curve(body, sizes), head_us: curve(head, drawn), ..StepCost::UNKNOWN };
    let row_pair_us = match machine {
        Machine::Processor => part_pair_us,
        Machine::Gpu => {
            let near = far.map_or(0.0, |Far { count, .. }| cost.step_us(count, 0, Pairs::default()));
            pair(far, times.far, near)
        }
    };
    StepCost { row_pair_us, part_pair_us, ..cost }
}

/// A rising curve through those of `us` that are finite.
///
/// Noise only ever adds, so that a size takes no longer than any larger one did. Between two measured sizes it is a straight line;
/// beyond the last, a token takes its share of that one: more than it will, as part of the time is the same for every size. Beyond the first
/// `sizes`, which are those that a machine measures, the last line goes on.
fn curve(mut us: [f32; SIZES.len()], sizes: usize) -> [f32; SIZES.len()] {
    let measured: Vec<usize> = (0..sizes).filter(|&i| us[i].is_finite()).collect();
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
    for i in last + 1..sizes {
        us[i] = us[last] / size(last) * size(i);
    }
    // The last line goes on for ever: were it flat by accident, more tokens would be free.
    let (end, before) = (sizes - 1, sizes - 2);
    let mean = (us[before] - us[0]) / (size(before) - size(0));
    us[end] = us[end].max(us[before] + mean / 2.0 * (size(end) - size(before)));
    let slope = (us[end] - us[before]) / (size(end) - size(before));
    for i in sizes..us.len() {
        us[i] = us[end] + slope * (size(i) - size(end));
    }
    us
}

#[cfg(test)]
mod tests;
