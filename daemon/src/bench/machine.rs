//! What the machine did meanwhile: processor time of threads, power and clock of the GPU.
//!
//! **Owns** the child that watches the GPU, and ends it. **Never** sets anything. What cannot be read is not there.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use super::numbers::{mean, median};

/// Processor time of threads so far, in nanoseconds, by their numbers.
pub type Times = BTreeMap<u32, u64>;

/// The calling thread, as a folder below /proc.
pub fn this_thread() -> Option<PathBuf> {
    Some(Path::new("/proc").join(fs::read_link("/proc/thread-self").ok()?))
}

/// Of one thread.
pub fn thread_time(folder: &Path) -> Option<u64> {
    let text = fs::read_to_string(folder.join("schedstat")).ok()?;
    text.split_ascii_whitespace().next()?.parse().ok()
}

/// Of each thread of a process.
pub fn process_times(pid: u32) -> Option<Times> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    let time = |task: fs::DirEntry| {
        // One that has just ended took next to nothing.
        Some((task.file_name().to_str()?.parse().ok()?, thread_time(&task.path())?))
    };
    let times: Times = tasks.flatten().filter_map(time).collect();
    (!times.is_empty()).then_some(times)
}

/// What those of `after` took since `before`.
pub fn taken(before: &Times, after: &Times) -> u64 {
    after.iter().map(|(thread, time)| time.saturating_sub(before.get(thread).copied().unwrap_or(0))).sum()
}

/// What a GPU did at a moment.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sample {
    /// Of the whole card.
    pub watts: f64,
    /// Clock of its multiprocessors.
    pub mhz: f64,
    /// Share of its memory that is in use, by whomever.
    pub memory_used: f64,
}

/// What `nvidia-smi` is asked for.
const QUERY: &str = "--query-gpu=power.draw,clocks.sm,memory.used,memory.total";

/// A line of `nvidia-smi QUERY --format=csv,noheader,nounits`.
pub fn sample(line: &str) -> Option<Sample> {
    let numbers = line.split(',').map(|number| number.trim().parse().ok());
    let numbers: Vec<f64> = numbers.collect::<Option<_>>()?;
    let [watts, mhz, used, total] = numbers[..] else { return None };
    Some(Sample { watts, mhz, memory_used: used / total })
}

/// Most samples that are kept: of hours.
const MOST_SAMPLES: usize = 1 << 17;

/// Watches a GPU by `nvidia-smi`, until it is dropped.
pub struct GpuWatch {
    child: Child,
    samples: Arc<Mutex<Vec<(Instant, Sample)>>>,
    reader: Option<JoinHandle<()>>,
}

impl GpuWatch {
    /// `None` where the program is not there.
    pub fn start(ordinal: u32) -> Option<Self> {
        let arguments = [QUERY, "--format=csv,noheader,nounits", "-lms", "200"];
        let mut command = Command::new("nvidia-smi");
        command.args(arguments).args(["-i", &ordinal.to_string()]);
        let output = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = output.spawn().ok()?;
        let samples = Arc::default();
        let reader = child.stdout.take().map(|lines| {
            let samples = Arc::clone(&samples);
            thread::spawn(move || read(lines, &samples))
        });
        Some(Self { child, samples, reader })
    }

    /// Medians of the time between the two.
    pub fn between(&self, from: Instant, to: Instant) -> Option<Sample> {
        let of = |field: fn(&Sample) -> f64| median(&self.all(from, to, field));
        Some(Sample {
            watts: of(|sample| sample.watts)?,
            mhz: of(|sample| sample.mhz)?,
            memory_used: of(|sample| sample.memory_used)?,
        })
    }

    /// Mean power of the time between the two.
    pub fn mean_watts(&self, from: Instant, to: Instant) -> Option<f64> {
        mean(&self.all(from, to, |sample| sample.watts))
    }

    fn all(&self, from: Instant, to: Instant, field: fn(&Sample) -> f64) -> Vec<f64> {
        let samples = self.samples.lock().unwrap_or_else(PoisonError::into_inner);
        let within = samples.iter().filter(|(at, _)| (from..=to).contains(at));
        within.map(|(_, sample)| field(sample)).collect()
    }
}

fn read(lines: ChildStdout, samples: &Mutex<Vec<(Instant, Sample)>>) {
    for sample in BufReader::new(lines).lines().map_while(Result::ok).filter_map(|line| sample(&line)) {
        let mut samples = samples.lock().unwrap_or_else(PoisonError::into_inner);
        if samples.len() < MOST_SAMPLES {
            samples.push((Instant::now(), sample));
        }
    }
}

impl Drop for GpuWatch {
    fn drop(&mut self) {
        // One that has ended needs no end, and its pipe ends with it.
        drop(self.child.kill());
        drop(self.child.wait());
        if let Some(reader) = self.reader.take() {
            drop(reader.join());
        }
    }
}
