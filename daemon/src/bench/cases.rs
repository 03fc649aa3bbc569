//! What is sent, and which figures come of it.
//!
//! **Owns** the rounds of a row: the warm-up, then what is measured. **Never** measures a step of the warm-up.

use std::time::Instant;

use anyhow::{Context as _, ensure};
use pagedd_config::Model;
use pagedd_core::{TokenId, Tokens};
use pagedd_wire::worker::DeviceStep;

use super::load::Draw;
use super::numbers::{mean, median, percentile};
use super::options::{Latency, RunOptions, SharedPrefix, Strangers, Throughput};
use super::record::{Goal, Round};
use super::report::{Row, Value, kept, shown};
use super::rig::{Asked, Moment, Processor, Rig};

/// A rig and what all of its rows have in common.
pub struct Bench<'a> {
    /// The engine.
    pub rig: Rig,
    /// Its model's settings.
    pub model: &'a Model,
    /// How it is measured.
    pub run: &'a RunOptions,
    /// Draws prompts.
    pub draw: Draw,
}

/// Shortest prompt of a warm-up.
const SHORT: u32 = 16;

impl Bench<'_> {
    /// All requests at once.
    ///
    /// # Errors
    /// An option does not fit the model, or the run failed.
    pub fn throughput(&mut self, case: &Throughput) -> anyhow::Result<Row> {
        let Throughput { requests, choices, input_len, output_len, .. } = *case;
        self.check_length("--input-len and --output-len", input_len.most, output_len.most)?;
        self.warm_up(input_len.most, requests)?;
        let [inputs, outputs] = [input_len, output_len].map(|lengths| {
            let mut each = lengths.spread(requests);
            if lengths.least < lengths.most {
                self.draw.shuffle(&mut each);
            }
            each
        });
        let lengths = inputs.into_iter().zip(outputs);
        let asked = lengths.map(|(input, output)| Asked { choices, ..self.asked(input, output) }).collect();
        let mut row = vec![
            shown("num_requests", "requests", requests),
            kept("choices", choices),
            shown("max_num_seqs", "batch", self.model.max_num_seqs),
            shown("input_len", "in", input_len.to_string()),
            shown("output_len", "out", output_len.to_string()),
        ];
        row.extend(self.all_at_once(asked)?);
        Ok(row)
    }

    /// All requests at once, whose prompts begin alike.
    ///
    /// # Errors
    /// As [`Bench::throughput`].
    pub fn prefix(&mut self, case: &SharedPrefix) -> anyhow::Result<Row> {
        let SharedPrefix { requests, prefix_len, suffix_len, output_len, .. } = *case;
        let options = "--prefix-len, --suffix-len and --output-len";
        self.check_length(options, prefix_len.saturating_add(suffix_len), output_len)?;
        self.warm_up(prefix_len + suffix_len, requests)?;
        let prefix = self.tokens(prefix_len);
        let asked = (0..requests).map(|_| {
            let suffix = self.asked(suffix_len, output_len);
            Asked { prompt: [prefix.as_slice(), &suffix.prompt].concat(), ..suffix }
        });
        let asked = asked.collect();
        let mut row = vec![
            shown("num_requests", "requests", requests),
            shown("max_num_seqs", "batch", self.model.max_num_seqs),
            shown("prefix_len", "prefix", prefix_len),
            shown("suffix_len", "suffix", suffix_len),
            shown("output_len", "out", output_len),
        ];
        row.extend(self.all_at_once(asked)?);
        Ok(row)
    }

    fn all_at_once(&mut self, asked: Vec<Asked>) -> anyhow::Result<Row> {
        let requests = asked.len() as u64;
        let sequences: u64 = asked.iter().map(|asked| u64::from(asked.choices)).sum();
        let prompts: u64 = asked.iter().map(|asked| asked.prompt.len() as u64).sum();
        let before = self.rig.moment();
        let start = self.rig.begin(asked)?;
        self.rig.wait(Goal::Ended)?;
        let after = self.rig.moment();
        let round = self.rig.round();
        let end = round.last.unwrap_or(start);
        let seconds = end.duration_since(start).as_secs_f64();
        // Of the whole card, its idle part included.
        let watts = self.rig.gpu.as_ref().and_then(|gpu| gpu.mean_watts(start, end));
        let joules = watts.map(|watts| watts * seconds / round.tokens as f64);
        let rate = |count: u64| Value::real(Some(count as f64 / seconds), 1);
        let first = round.steps.first().map_or(start, |step| step.submitted);
        let busy = round.steps.last().map_or(start, |step| step.collected).duration_since(first);
        let intervals: Vec<f64> = (1..round.steps.len()).map(|step| ms(round.interval(step))).collect();
        let every: Vec<usize> = (0..round.steps.len()).collect();
        let step_ms = Some(busy.as_secs_f64() * 1e3 / every.len().max(1) as f64);
        let mut row = self.conditions();
        row.extend([
            shown("elapsed_time", "seconds", Value::real(Some(seconds), 2)),
            shown("requests_per_second", "req/s", Value::real(Some(requests as f64 / seconds), 2)),
            shown("output_tokens_per_second", "out tok/s", rate(round.tokens)),
            shown("tokens_per_second", "tok/s", rate(prompts + round.tokens)),
            kept("total_num_tokens", prompts + round.tokens),
            shown("cached_tokens", "cached", round.cached),
            kept("preemptions", round.begun.saturating_sub(sequences)),
            shown("joules_per_output_token", "J/token", Value::real(joules, 3)),
            kept("step_ms_p50", Value::real(median(&intervals), 4)),
            kept("step_ms_p99", Value::real(percentile(&intervals, 0.99), 4)),
            shown("step_ms", "step ms", Value::real(step_ms, 3)),
        ]);
        row.extend(steps(&round, &every, step_ms, before.until(&after)));
        row.extend(self.device(&round, &every));
        row.extend(self.gpu(&before, &after));
        Ok(row)
    }

    /// `batch` sequences that run together.
    ///
    /// # Errors
    /// As [`Bench::throughput`].
    pub fn latency(&mut self, case: &Latency, batch: u32) -> anyhow::Result<Row> {
        let (budget, warmup) = (self.budget(), self.run.warmup);
        let (seats, output) = (self.model.max_num_seqs, case.output_len);
        ensure!(batch <= seats, "--batch: {batch} is more than the model's max_num_seqs, {seats}");
        ensure!(batch <= budget, "--budget: a step of {budget} tokens has no room for --batch {batch}");
        let lengths = case.input_len.spread(batch);
        let sum: u64 = lengths.iter().map(|length| u64::from(*length)).sum();
        // Those that run first go on while the others' prompts are computed.
        let behind = sum.div_ceil(u64::from(budget.saturating_sub(batch).max(1))) as u32;
        let longest = lengths.iter().copied().max().unwrap_or(1);
        self.check_length("--input-len and --output-len", longest, output + behind)?;
        let tokens = (output + 2 * behind + 16).min(self.rig.info.max_model_len - longest);
        let size = Tokens(self.rig.info.block_size);
        let blocks: u64 =
            lengths.iter().map(|length| u64::from(Tokens(length + tokens).in_blocks(size).0)).sum();
        let pool = self.rig.info.blocks;
        ensure!(
            blocks <= u64::from(pool),
            "--batch: {batch} sequences of these lengths need {blocks} KV blocks and the pool has {pool}: give it more with kv_memory"
        );

        self.warm_up(longest, batch)?;
        let asked = lengths.iter().map(|length| self.asked(*length, tokens)).collect();
        let start = self.rig.begin(asked)?;
        self.rig.wait(Goal::Steady(warmup.max(1) as usize))?;
        let before = self.rig.moment();
        self.rig.wait(Goal::Steady(output as usize - 1))?;
        let after = self.rig.moment();
        self.rig.cancel()?;
        self.rig.wait(Goal::Ended)?;

        let round = self.rig.round();
        let end = output as usize - 1;
        ensure!(
            round.steady.len() >= end,
            "--output-len: only {} steps had all {batch} sequences before one of them ended; is itl_target too short?",
            round.steady.len() + 1
        );
        let measured = &round.steady[warmup as usize..end];
        let gaps: Vec<f64> = measured.iter().map(|step| ms(round.interval(*step))).collect();
        let prefilled = round.first.iter().flatten().max().copied().unwrap_or(start);
        let prefill = prefilled.duration_since(start).as_secs_f64();
        let mut row = vec![
            shown("batch", "batch", batch),
            shown("input_len", "context", case.input_len.to_string()),
            kept("input_tokens", sum),
            shown("output_len", "out", output),
        ];
        row.extend(self.conditions());
        row.extend([
            shown("prefill_ms", "prefill ms", Value::real(Some(prefill * 1e3), 1)),
            shown("prefill_tokens_per_second", "prompt tok/s", Value::real(Some(sum as f64 / prefill), 0)),
            shown("ms_per_token_p50", "ms/token", Value::real(median(&gaps), 3)),
            shown("ms_per_token_p99", "p99 ms", Value::real(percentile(&gaps, 0.99), 3)),
            kept("ms_per_token_mean", Value::real(mean(&gaps), 4)),
            shown(
                "output_tokens_per_second",
                "out tok/s",
                Value::real(mean(&gaps).map(|gap| f64::from(batch) * 1e3 / gap), 1),
            ),
        ]);
        row.extend(steps(&round, measured, mean(&gaps), before.until(&after)));
        row.extend(self.device(&round, measured));
        row.extend(self.gpu(&before, &after));
        Ok(row)
    }

    /// `batch` sequences that run together, and beside them a stranger's prompts, one after the other.
    ///
    /// # Errors
    /// As [`Bench::throughput`].
    pub fn foreign(&mut self, case: &Strangers) -> anyhow::Result<Row> {
        let Strangers { batch, input_len, output_len: output, foreign_len, foreign, .. } = *case;
        self.check_strangers(case)?;
        self.warm_up(foreign_len, batch + 1)?;
        // They go on for as long as they can: nobody knows how many steps a prompt beside them takes.
        let longest = self.rig.info.max_model_len - input_len;
        let asked = (0..batch).map(|_| self.asked(input_len, longest)).collect();
        self.rig.begin(asked)?;
        let end = output as usize - 1;
        self.rig.wait(Goal::Steady(end))?;
        let steady = self.rig.round().steady.len();
        ensure!(
            steady >= end,
            "--output-len: only {} steps had all {batch} sequences before one of them ended; is itl_target too short?",
            steady + 1
        );
        let before = self.rig.moment();
        let beside = (0..foreign).map(|_| self.stranger(foreign_len)).collect::<anyhow::Result<Vec<_>>>()?;
        let after = self.rig.moment();
        self.rig.cancel()?;
        self.rig.wait(Goal::Ended)?;

        let round = self.rig.round();
        let quiet = &round.steady[self.run.warmup as usize..end];
        let quiet: Vec<f64> = quiet.iter().map(|step| ms(round.interval(*step))).collect();
        let steps = round.between(&beside);
        let left_out = steps.iter().filter(|step| round.steps[**step].rows < batch).count();
        ensure!(
            left_out == 0,
            "{left_out} steps had not all {batch} sequences: give the pool more with kv_memory"
        );
        let gaps: Vec<f64> = steps.iter().map(|step| ms(round.interval(*step))).collect();
        let took: Vec<f64> = beside.iter().map(|(sent, first)| ms(first.duration_since(*sent))).collect();
        let (calm, disturbed) = (percentile(&quiet, 0.99), percentile(&gaps, 0.99));
        let mut row = vec![
            shown("batch", "batch", batch),
            shown("input_len", "context", input_len),
            shown("foreign_len", "foreign", foreign_len),
            kept("foreign_prompts", foreign),
            kept("output_len", output),
            shown("itl_target_ms", "target ms", Value::real(self.model.itl_target.map(ms), 1)),
        ];
        row.extend(self.conditions());
        row.extend([
            shown("quiet_ms_p50", "quiet p50", Value::real(median(&quiet), 3)),
            shown("quiet_ms_p99", "quiet p99", Value::real(calm, 3)),
            shown("beside_ms_p50", "beside p50", Value::real(median(&gaps), 3)),
            shown("beside_ms_p99", "beside p99", Value::real(disturbed, 3)),
            shown("beside_ms_max", "beside max", Value::real(percentile(&gaps, 1.0), 3)),
            shown("p99_ratio", "p99 ratio", Value::real(disturbed.zip(calm).map(|(b, q)| b / q), 2)),
            shown("foreign_ms", "foreign ms", Value::real(mean(&took), 1)),
            shown(
                "foreign_tokens_per_second",
                "foreign tok/s",
                Value::real(mean(&took).map(|took| f64::from(foreign_len) * 1e3 / took), 0),
            ),
        ]);
        row.extend(self::steps(&round, &steps, mean(&gaps), before.until(&after)));
        row.extend(self.device(&round, &steps));
        row.extend(self.gpu(&before, &after));
        Ok(row)
    }

    /// Names the options where the model has no room for running sequences and a foreign prompt beside them.
    fn check_strangers(&self, case: &Strangers) -> anyhow::Result<()> {
        let Strangers { batch, input_len, output_len, foreign_len, .. } = *case;
        let (budget, seats) = (self.budget(), self.model.max_num_seqs);
        ensure!(
            batch < seats,
            "--batch: {batch} and a foreign sequence are more than the model's max_num_seqs, {seats}"
        );
        ensure!(
            batch < budget,
            "--budget: a step of {budget} tokens has no room for prompts beside --batch {batch}"
        );
        self.check_length("--foreign-len", foreign_len, 1)?;
        self.check_length("--input-len and --output-len", input_len, output_len)?;
        let size = Tokens(self.rig.info.block_size);
        let of = |tokens: u32| u64::from(Tokens(tokens).in_blocks(size).0);
        let blocks = u64::from(batch) * of(input_len + output_len) + of(foreign_len);
        let pool = self.rig.info.blocks;
        ensure!(
            blocks <= u64::from(pool),
            "--batch and --foreign-len: they need {blocks} KV blocks and the pool has {pool}: give it more with kv_memory"
        );
        Ok(())
    }

    /// Sends a stranger's prompt. When it was sent, and when its token was there.
    fn stranger(&mut self, length: u32) -> anyhow::Result<(Instant, Instant)> {
        let asked = self.asked(length, 1);
        let (place, sent) = self.rig.join(asked)?;
        self.rig.wait(Goal::First(place))?;
        let first = self.rig.round().first[place];
        let first = first.context(
            "--output-len: a running sequence reached the model's context before a foreign prompt was done",
        )?;
        Ok((sent, first))
    }

    /// Requests that nobody measures: as many sequences as will run, of which so many have prompts of full length as fill a step.
    fn warm_up(&mut self, input: u32, requests: u32) -> anyhow::Result<()> {
        if self.run.warmup == 0 {
            return Ok(());
        }
        let seats = requests.min(self.model.max_num_seqs).min(self.budget());
        let full = self.budget().div_ceil(input).min(seats);
        let length = |i| if i < full { input } else { SHORT.min(input) };
        let room = self.rig.info.max_model_len - input;
        let asked = (0..seats).map(|i| self.asked(length(i), self.run.warmup.min(room))).collect();
        self.rig.begin(asked)?;
        self.rig.wait(Goal::Ended)
    }

    fn tokens(&mut self, count: u32) -> Vec<TokenId> {
        self.draw.tokens(count, self.rig.info.vocab_size)
    }

    /// A request with a prompt of `input` tokens.
    fn asked(&mut self, input: u32, tokens: u32) -> Asked {
        let prompt = self.tokens(input);
        Asked { prompt, sampling: self.draw.sampling(self.run.temperature), choices: 1, tokens }
    }

    /// Names the options where a sequence would be too long.
    fn check_length(&self, options: &str, input: u32, output: u32) -> anyhow::Result<()> {
        let (sum, most) = (u64::from(input) + u64::from(output), self.rig.info.max_model_len);
        ensure!(sum <= u64::from(most), "{options}: {sum} tokens in all, and the model's context is {most}");
        Ok(())
    }

    fn budget(&self) -> u32 {
        self.model.max_num_batched_tokens.0
    }

    /// What every row states.
    fn conditions(&self) -> Row {
        let drawn = match self.run.temperature {
            0.0 => "greedy".to_owned(),
            temperature => format!("T={temperature}"),
        };
        vec![
            shown("sampling", "sampling", drawn),
            shown("prefix_cache", "cache", if self.model.prefix_cache { "on" } else { "off" }),
            shown("max_num_batched_tokens", "budget", self.budget()),
            shown("warmup_steps", "warm-up", self.run.warmup),
        ]
    }

    /// What a GPU did in these steps, and how long it took to come to the first.
    fn device(&self, round: &Round, measured: &[usize]) -> Row {
        let mut row = device(round, measured);
        let start = self.rig.to_first_token();
        row.push(shown("start_s", "start s", Value::real(start.map(|start| start.as_secs_f64()), 2)));
        row
    }

    fn gpu(&self, before: &Moment, after: &Moment) -> Row {
        let sample = self.rig.gpu.as_ref().and_then(|gpu| gpu.between(before.at, after.at));
        vec![
            shown("gpu_watts", "W", Value::real(sample.map(|sample| sample.watts), 0)),
            shown("gpu_sm_mhz", "SM MHz", Value::real(sample.map(|sample| sample.mhz), 0)),
            kept("gpu_memory_used_share", Value::real(sample.map(|sample| sample.memory_used), 4)),
        ]
    }
}

/// Means of these steps; `step_ms` is from the end of one to the end of the next.
fn steps(round: &Round, measured: &[usize], step_ms: Option<f64>, processor: Processor) -> Row {
    let compute: Vec<f64> = measured.iter().map(|step| round.steps[*step].compute_us as f64).collect();
    let predicted: Vec<f64> = measured.iter().map(|step| round.steps[*step].predicted_us as f64).collect();
    let wrong: Vec<f64> =
        predicted.iter().zip(&compute).map(|(predicted, compute)| (predicted - compute).abs()).collect();
    let outside = mean(&compute).zip(step_ms).map(|(compute, step)| step * 1e3 - compute);
    vec![
        shown("steps", "steps", measured.len() as u64),
        shown("compute_us", "compute us", Value::real(mean(&compute), 0)),
        kept("predicted_us", Value::real(mean(&predicted), 0)),
        kept("misjudged_us", Value::real(mean(&wrong), 0)),
        shown("outside_us", "outside us", Value::real(outside, 0)),
        shown("engine_cpu_us", "engine CPU us", Value::real(processor.engine, 0)),
        shown("worker_cpu_us", "worker CPU us", Value::real(processor.worker, 0)),
        kept("worker_thread_cpu_us", Value::real(processor.worker_thread, 0)),
    ]
}

/// Gaps before these steps, and what the worker has on the GPU after the last of all.
pub fn device(round: &Round, measured: &[usize]) -> Row {
    let idle = |step: &usize| Some(round.steps[*step].device?.idle_us? as f64);
    let gaps: Vec<f64> = measured.iter().filter_map(idle).collect();
    let last = round.steps.iter().rev().find_map(|step| step.device);
    let of = |field: fn(DeviceStep) -> u64| last.map_or(Value::Absent, |last| field(last).into());
    vec![
        shown("gpu_gap_us_p50", "gap50 us", Value::real(median(&gaps), 0)),
        shown("gpu_gap_us_p99", "gap99 us", Value::real(percentile(&gaps, 0.99), 0)),
        kept("graphs", of(|step| step.graphs.into())),
        kept("graphs_ms", Value::real(last.map(|step| step.graphs_us as f64 / 1e3), 1)),
        kept("graphs_bytes", of(|step| step.graphs_bytes)),
        kept("beside_bytes", of(|step| step.beside_bytes)),
    ]
}

fn ms(duration: std::time::Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
