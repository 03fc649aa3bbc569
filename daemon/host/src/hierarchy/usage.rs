//! What a cgroup uses, and what its limits did.
//!
//! **Owns** the reading. **Never** fails: what the kernel does not say is not known.

use std::fs;

use pagedd_core::Bytes;

use super::cgroup::Cgroup;

/// Time that was lost waiting for something, since the cgroup was made.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Stall {
    /// In microseconds.
    pub total_us: u64,
    /// Percent of the last ten seconds.
    pub avg10: f32,
}

/// What was waited for.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Pressure {
    /// By some of its threads.
    pub some: Stall,
    /// By all of them.
    pub full: Option<Stall>,
}

/// Numbers of a cgroup; `None` where the kernel has no such number here.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Usage {
    /// All memory that is charged to it.
    pub memory: Option<Bytes>,
    /// Of it what the kernel takes back by itself: pages of files.
    pub memory_files: Option<Bytes>,
    /// The most that it ever was.
    pub memory_peak: Option<Bytes>,
    /// Processes that were killed for want of memory.
    pub oom_kills: Option<u64>,
    /// CPU time, in microseconds.
    pub cpu_us: Option<u64>,
    /// Time for which its CPU limit held it up, in microseconds.
    pub throttled_us: Option<u64>,
    /// Processes and threads.
    pub pids: Option<u64>,
    /// How often its limit of them refused one.
    pub pids_refused: Option<u64>,
    /// Waiting for a CPU.
    pub cpu_pressure: Option<Pressure>,
    /// Waiting for memory.
    pub memory_pressure: Option<Pressure>,
    /// Waiting for block devices.
    pub io_pressure: Option<Pressure>,
}

impl Usage {
    /// Memory that cannot be taken back without ending a process.
    pub fn memory_held(&self) -> Option<u64> {
        self.memory.map(|all| all.saturating_sub(self.memory_files.unwrap_or_default()).0)
    }
}

impl Cgroup {
    /// All memory that is charged to it: of what [`Cgroup::usage`] reads, one file.
    pub fn memory(&self) -> Option<Bytes> {
        fs::read_to_string(self.path().join("memory.current")).ok()?.trim().parse().ok().map(Bytes)
    }

    /// What it uses now.
    pub fn usage(&self) -> Usage {
        let text = |file: &str| fs::read_to_string(self.path().join(file)).ok();
        let number = |file: &str| text(file)?.trim().parse().ok();
        let (stat, events) = (text("cpu.stat"), text("memory.events"));
        let memory_stat = text("memory.stat");
        let pages = |name| keyed(memory_stat.as_deref()?, name);
        let files = pages("inactive_file").zip(pages("active_file")).map(|(a, b)| Bytes(a + b));
        let pressure = |file: &str| text(file).as_deref().and_then(pressure);
        Usage {
            memory: self.memory(),
            memory_files: files,
            memory_peak: number("memory.peak").map(Bytes),
            oom_kills: events.as_deref().and_then(|text| keyed(text, "oom_kill")),
            cpu_us: stat.as_deref().and_then(|text| keyed(text, "usage_usec")),
            throttled_us: stat.as_deref().and_then(|text| keyed(text, "throttled_usec")),
            pids: number("pids.current"),
            pids_refused: text("pids.events").as_deref().and_then(|text| keyed(text, "max")),
            cpu_pressure: pressure("cpu.pressure"),
            memory_pressure: pressure("memory.pressure"),
            io_pressure: pressure("io.pressure"),
        }
    }
}

/// The number in a line `name number`.
fn keyed(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

/// `some avg10=0.00 avg60=0.00 avg300=0.00 total=0`, and `full` in the same form.
pub(super) fn pressure(text: &str) -> Option<Pressure> {
    let stall = |kind: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(kind)?.strip_prefix(' '))?;
        let value = |key: &str| line.split(' ').find_map(|word| word.strip_prefix(key));
        Some(Stall { total_us: value("total=")?.parse().ok()?, avg10: value("avg10=")?.parse().ok()? })
    };
    Some(Pressure { some: stall("some")?, full: stall("full") })
}
