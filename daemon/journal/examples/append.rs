//! What the journal costs: `cargo run --release -p pagedd-journal --example append [seconds] [directory]`.
//!
//! 256 rows a step and 200 steps a second, as an engine with a null worker would make them: each step appends a token of each of
//! the 256 requests that run. `steady`: none begins or ends. `turnover`: each step ends one and admits another with a prompt of
//! 256 tokens, which are kept for 2 s. Folds, syncs, checkpoints and, with turnover, expiry are in the figures.

use std::collections::BTreeMap;
use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::time::TimeValLike;
use nix::time::{ClockId, clock_gettime};
use pagedd_core::{RequestId, SamplingParams, TenantId};
use pagedd_journal::{
    Admission, Durability, Entry, Finish, Fsync, JournalDb, JournalWriter, Now, OnLeave, Record, Retention,
    SavedRequest, Step,
};

const ROWS: u64 = 256;
const STEPS_PER_SECOND: u32 = 200;
const TENANTS: u32 = 2;
const KEEP_SECONDS: u64 = 2;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let seconds: u32 = arguments.next().map_or(Ok(10), |text| text.parse())?;
    let made = tempfile::tempdir()?;
    let dir = arguments.next().map_or_else(|| made.path().to_path_buf(), PathBuf::from);
    println!("{ROWS} rows a step, {STEPS_PER_SECOND} steps/s, {seconds} s, {TENANTS} tenants");
    for turnover in [false, true] {
        for (name, fsync) in [
            ("never", Fsync::Never),
            ("interval", Fsync::Interval(Duration::from_secs(1))),
            ("every", Fsync::Every),
        ] {
            let load = if turnover { "turnover" } else { "steady" };
            let at = dir.join(format!("{load}-{name}"));
            fs::create_dir_all(&at)?;
            let mut run = Run::new(JournalWriter::new(JournalDb::open(&at, fsync)?), turnover);
            let written = written()?;
            run.go(seconds * STEPS_PER_SECOND)?;
            run.print(load, name, self::written()? - written);
            drop(run);
            reopen(&at, fsync)?;
        }
    }
    Ok(())
}

/// What a start takes.
fn reopen(at: &Path, fsync: Fsync) -> Result<(), Box<dyn std::error::Error>> {
    let start = Instant::now();
    let db = JournalDb::open(at, fsync)?;
    let opened = start.elapsed();
    let start = Instant::now();
    let (mut requests, mut entries) = (0, 0);
    db.replay(|kept| {
        requests += 1;
        entries += kept.map_or(0, |kept| kept.entries.len());
    })?;
    println!(
        "          start: open {} ms, replay of {requests} requests and {entries} entries {} ms, file {} KiB",
        opened.as_millis(),
        start.elapsed().as_millis(),
        fs::metadata(db.path())?.len() >> 10,
    );
    Ok(())
}

struct Run {
    writer: JournalWriter,
    turnover: bool,
    running: VecDeque<u64>,
    next: u64,
    steps: u32,
    append_us: i64,
    tick_us: i64,
    expire_us: i64,
    /// Time of each step's append and of what follows it, in microseconds, sorted at the end.
    waits_us: Vec<u128>,
}

impl Run {
    fn new(writer: JournalWriter, turnover: bool) -> Self {
        Self {
            writer,
            turnover,
            running: VecDeque::new(),
            next: 0,
            steps: 0,
            append_us: 0,
            tick_us: 0,
            expire_us: 0,
            waits_us: Vec::new(),
        }
    }

    fn go(&mut self, steps: u32) -> Result<(), Box<dyn std::error::Error>> {
        let start = Instant::now();
        let retention =
            Retention { seconds: KEEP_SECONDS, per_tenant: BTreeMap::new(), max_bytes: 256 << 20 };
        for step in 0..steps {
            let due = start + Duration::from_secs(1) / STEPS_PER_SECOND * step;
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            let batch = self.batch(step);
            let now = Now { instant: Instant::now(), unix: u64::from(step / STEPS_PER_SECOND) };
            let cpu = [cpu_us()?, 0, 0, 0];
            let appended = self.writer.append(&batch, now);
            let cpu = [cpu[0], cpu_us()?, 0, 0];
            let ticked = self.writer.tick(now);
            let cpu = [cpu[0], cpu[1], cpu_us()?, 0];
            if step % STEPS_PER_SECOND == 0 {
                while self.writer.expire(&retention, now).more {}
            }
            let cpu = [cpu[0], cpu[1], cpu[2], cpu_us()?];
            self.waits_us.push(now.instant.elapsed().as_micros());
            assert_eq!((appended, ticked), (Durability::Durable, Durability::Durable));
            if step == 0 {
                // The admission of all at once is not what is measured.
                continue;
            }
            self.append_us += cpu[1] - cpu[0];
            self.tick_us += cpu[2] - cpu[1];
            self.expire_us += cpu[3] - cpu[2];
            self.steps += 1;
        }
        Ok(())
    }

    fn batch(&mut self, step: u32) -> Vec<Record> {
        let mut batch = Vec::new();
        let mut entries = Vec::new();
        if self.turnover
            && self.running.len() as u64 == ROWS
            && let Some(ended) = self.running.pop_front()
        {
            entries.push((id(ended), Entry::Finish { choice: 0, reason: Finish::Length }));
            entries.push((id(ended), Entry::End { cached_tokens: 0 }));
        }
        while (self.running.len() as u64) < ROWS {
            batch.push(Record::Admission(Arc::new(admission(self.next))));
            self.running.push_back(self.next);
            self.next += 1;
        }
        let token = |i: u64| (i as u32).wrapping_mul(2_654_435_761).wrapping_add(step) % 49_152;
        entries.extend(self.running.iter().map(|&i| (id(i), Entry::Token { choice: 0, token: token(i) })));
        batch.push(Record::Step(Step { entries, ..Step::default() }));
        batch
    }

    fn print(&mut self, load: &str, fsync: &str, written: u64) {
        let per_step = |us: i64| us as f64 / f64::from(self.steps);
        let all = self.append_us + self.tick_us + self.expire_us;
        self.waits_us.sort_unstable();
        let at = |share: usize| self.waits_us[(self.waits_us.len() - 1) * share / 100];
        println!(
            "{load:8}  fsync {fsync:8}  CPU per step {:6.1} µs (append {:.1}, tick {:.1}, expire {:.1})   wall p50 {} p99 {} max {} µs   \
             written per step {} bytes",
            per_step(all),
            per_step(self.append_us),
            per_step(self.tick_us),
            per_step(self.expire_us),
            at(50),
            at(99),
            at(100),
            written / u64::from(self.steps),
        );
    }
}

fn id(n: u64) -> RequestId {
    RequestId(u128::from(n).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835).to_be_bytes())
}

fn admission(n: u64) -> Admission {
    Admission {
        request: id(n),
        tenant: TenantId(n as u32 % TENANTS),
        idempotency: None,
        model_digest: Some([5; 16]),
        saved: SavedRequest {
            model: "null".to_owned(),
            key: Some(1),
            created_unix: 0,
            on_leave: OnLeave::Cancel,
            prompt: (0..256).map(|i| (i * 7919 + n as u32) % 49_152).collect(),
            sampling: SamplingParams::GREEDY.into(),
            n: 1,
            max_tokens: 256,
            stop_ids: vec![2],
            context: vec![0; 64],
        },
    }
}

/// CPU time of this thread, in microseconds. Not getrusage's, which is sampled.
fn cpu_us() -> nix::Result<i64> {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(|time| time.num_microseconds())
}

/// Bytes that this process has written, whether to the disk or to its cache.
fn written() -> Result<u64, Box<dyn std::error::Error>> {
    let io = fs::read_to_string("/proc/self/io")?;
    let line = io.lines().find_map(|line| line.strip_prefix("wchar: ")).ok_or("no wchar")?;
    Ok(line.parse()?)
}
