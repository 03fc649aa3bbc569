//! `pagedd bench`: how fast the engine is by itself.
//!
//! **Owns** the run of a benchmark: one worker process and one engine's thread, the daemon's own, with a journal that only counts. **Never**
//! opens a port or a database, and leaves no process behind.

mod cases;
mod load;
mod machine;
mod numbers;
mod options;
mod record;
mod report;
mod rig;

use std::fs;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use pagedd_config::{Config, Model};
use pagedd_core::said;
use pagedd_host::fdstore::FdStore;

use crate::start::{lock_gpus, start_log, surroundings};
use crate::walls::Walls;
use crate::watchdog::Watchdog;
use cases::Bench;
use load::Draw;
pub use options::Options;
use options::{Case, RunOptions};
use report::{Row, Value, figures, headings, kept};
use rig::Rig;

/// Exit code of a run that failed.
const FAILED: u8 = 1;
/// Exit code of wrong options, as of those that the parser refuses.
const USAGE: u8 = 2;

/// Runs a benchmark and prints its table.
pub fn main(options: &Options) -> ExitCode {
    let case = &options.case;
    let fail = |code: u8, error: &dyn std::fmt::Display| {
        eprintln!("pagedd bench: error: {error}");
        ExitCode::from(code)
    };
    let config = match checked(case) {
        Ok(config) => config,
        Err(error) => return fail(USAGE, &error),
    };
    let gpus = match lock_gpus(&config) {
        Ok(gpus) => gpus,
        Err(failure) => return fail(failure.exit, &failure.message),
    };
    pagedd_host::memory::use_one_heap();
    drop(start_log(&config));
    // Without the engine's thread nothing would ever come.
    std::panic::set_hook(Box::new(|panic| {
        eprintln!("pagedd bench: {panic}");
        std::process::abort();
    }));
    let result = run(case, &config);
    drop(gpus);
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(FAILED, &said(error.as_ref())),
    }
}

/// What can be known to be wrong before anything is loaded.
fn checked(case: &Case) -> Result<Config, String> {
    let measured = match case {
        Case::Latency(latency) => Some((latency.output_len, latency.run.warmup)),
        Case::Foreign(foreign) => Some((foreign.output_len, foreign.run.warmup)),
        Case::Throughput(_) | Case::Prefix(_) => None,
    };
    if let Some((output, warmup)) = measured.filter(|(output, warmup)| *output < warmup + 2) {
        return Err(format!("--output-len: {output} steps leave none to measure behind --warmup {warmup}"));
    }
    case.config()
}

fn run(case: &Case, config: &Config) -> anyhow::Result<()> {
    let store = Arc::new(FdStore::without_manager());
    let around = surroundings(config, store, Watchdog::unwatched(), Arc::new(Walls::none()))?;
    let mut paper = Paper::new(case);
    for model in config.models.iter().flat_map(|model| case.models(model)) {
        let limit = Duration::from_secs(case.run().limit.into());
        let rig = Rig::start(&model, &around, Instant::now() + limit)?;
        let about = about(&model, &rig);
        let draw = Draw::new(case.run().seed);
        let mut bench = Bench { rig, model: &model, run: case.run(), draw };
        match case {
            Case::Throughput(throughput) => paper.add(&about, bench.throughput(throughput)?)?,
            Case::Prefix(prefix) => paper.add(&about, bench.prefix(prefix)?)?,
            Case::Foreign(foreign) => paper.add(&about, bench.foreign(foreign)?)?,
            Case::Latency(latency) => {
                for batch in &latency.batch {
                    bench.rig.extend(limit);
                    paper.add(&about, bench.latency(latency, *batch)?)?;
                }
            }
        }
    }
    Ok(())
}

/// What all rows are of.
fn about(model: &Model, rig: &Rig) -> Row {
    let info = &rig.info;
    vec![
        kept("path", model.path.display().to_string()),
        kept("device", model.device.to_string()),
        kept("dtype", model.dtype.to_string()),
        kept("kv_dtype", model.kv_dtype.to_string()),
        kept("architecture", info.architecture.clone()),
        kept("parameters", info.parameters),
        kept("kernels", info.kernels.clone()),
        kept("threads", info.threads),
        kept("weight_bytes", info.weight_bytes),
        kept("block_size", info.block_size),
        kept("blocks", info.blocks),
        kept("max_model_len", info.max_model_len),
        kept("max_num_seqs", model.max_num_seqs),
        kept("body_us", listed(&info.cost.body_us)),
        kept("head_us", listed(&info.cost.head_us)),
        kept("row_pair_us", Value::real(Some(info.cost.row_pair_us.into()), 6)),
        kept("part_pair_us", Value::real(Some(info.cost.part_pair_us.into()), 6)),
        kept("load_ms", Value::real(Some(info.load_us as f64 / 1e3), 0)),
    ]
}

/// What the worker measured of its steps, by their sizes.
fn listed(us: &[f32]) -> String {
    us.iter().map(|us| format!("{us:.0}")).collect::<Vec<_>>().join(" ")
}

/// The rows so far. Each is on paper before the next begins.
struct Paper<'a> {
    case: &'a str,
    run: &'a RunOptions,
    rows: Vec<Row>,
}

impl<'a> Paper<'a> {
    fn new(case: &'a Case) -> Self {
        Self { case: case.name(), run: case.run(), rows: Vec::new() }
    }

    fn add(&mut self, about: &Row, row: Row) -> anyhow::Result<()> {
        if self.rows.is_empty() {
            println!("{}", headings(&row));
        }
        println!("{}", figures(&row));
        self.rows.push(row);
        if let Some(file) = &self.run.json {
            let text = report::json(self.case, about, &self.rows);
            fs::write(file, text).with_context(|| format!("--json: {}", file.display()))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
