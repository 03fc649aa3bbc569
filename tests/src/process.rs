//! Processes of a daemon under test, as `/proc` shows them.
//!
//! **Owns** the rule that only descendants of a process that the test started are killed. **Never** trusts a bare pid: it is
//! compared with its start time.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A process, told apart from a later one with the same pid by its start time.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Process {
    /// Its id.
    pub pid: u32,
    /// Its parent's.
    pub parent: u32,
    /// Clock ticks from boot to its start.
    pub started: u64,
    /// Its name, as the kernel keeps it.
    pub name: String,
}

impl Process {
    /// The process of this id, unless there is none or it is a zombie.
    pub fn find(pid: u32) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let (name, rest) = stat.split_once('(')?.1.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        if matches!(*fields.first()?, "Z" | "X") {
            return None;
        }
        Some(Self {
            pid,
            parent: fields.get(1)?.parse().ok()?,
            started: fields.get(19)?.parse().ok()?,
            name: name.to_owned(),
        })
    }

    /// Whether it is there still.
    pub fn lives(&self) -> bool {
        Self::find(self.pid).is_some_and(|p| p.started == self.started)
    }

    /// Its memory.
    ///
    /// # Panics
    /// It is gone.
    pub fn memory(&self) -> Memory {
        let text = fs::read_to_string(format!("/proc/{}/status", self.pid))
            .unwrap_or_else(|e| panic!("{self:?}: {e}"));
        let field = |name: &str| {
            let line = text.lines().find_map(|l| l.strip_prefix(name)).unwrap_or("0");
            line.trim_start_matches(':').trim().trim_end_matches(" kB").trim().parse().unwrap_or(0)
        };
        Memory {
            resident_kib: field("VmRSS"),
            anonymous_kib: field("RssAnon"),
            shared_kib: field("RssShmem"),
            swapped_kib: field("VmSwap"),
        }
    }

    /// Whether a readable part of its memory, besides files that it maps, holds `needle`.
    ///
    /// # Panics
    /// Its memory cannot be read.
    pub fn holds(&self, needle: &[u8]) -> bool {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.pid))
            .unwrap_or_else(|e| panic!("{self:?}: {e}"));
        let memory =
            File::open(format!("/proc/{}/mem", self.pid)).unwrap_or_else(|e| panic!("{self:?}: {e}"));
        let mut regions = 0;
        let found = maps.lines().filter_map(region).any(|(start, end)| {
            let mut bytes = vec![0; (end - start) as usize];
            let read = memory.read_at(&mut bytes, start).unwrap_or(0);
            regions += usize::from(read > 0);
            bytes[..read].windows(needle.len()).any(|w| w == needle)
        });
        assert!(regions > 0, "no region of {self:?} could be read");
        found
    }
}

/// `[start, end)` of a readable region of `/proc/PID/maps`, but for the kernel's own.
fn region(line: &str) -> Option<(u64, u64)> {
    let mut fields = line.split_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let readable = fields.next()?.starts_with('r');
    let kernel = fields.nth(3).is_some_and(|name| name.starts_with("[v"));
    let number = |text| u64::from_str_radix(text, 16).ok();
    (readable && !kernel).then_some((number(start)?, number(end)?))
}

/// Memory of a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Memory {
    /// All that is resident, mapped files too.
    pub resident_kib: u64,
    /// Anonymous.
    pub anonymous_kib: u64,
    /// Shared memory.
    pub shared_kib: u64,
    /// What of it is in swap.
    pub swapped_kib: u64,
}

impl Memory {
    /// What grows when something leaks.
    pub fn own_kib(&self) -> u64 {
        self.anonymous_kib + self.shared_kib + self.swapped_kib
    }
}

/// `root` and everything below it, parents first.
pub fn family(root: u32) -> Vec<Process> {
    let all: Vec<Process> = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter_map(Process::find)
        .collect();
    let mut found: Vec<Process> = all.iter().filter(|p| p.pid == root).cloned().collect();
    let mut at = 0;
    while at < found.len() {
        let parent = found[at].pid;
        found.extend(all.iter().filter(|p| p.parent == parent && p.pid != root).cloned());
        at += 1;
    }
    found
}

/// Kills `pid`, if it is a descendant of `root`.
///
/// # Panics
/// It is not: whatever it is, the test did not start it.
#[track_caller]
pub fn kill_descendant(root: u32, pid: u32) -> Process {
    let family = family(root);
    let process = family.iter().skip(1).find(|p| p.pid == pid);
    let process = process.unwrap_or_else(|| panic!("{pid} is no descendant of {root}: {family:#?}")).clone();
    send(&process, Signal::SIGKILL);
    process
}

/// Sends a signal to a process that is still the one it was.
pub fn send(process: &Process, signal: Signal) {
    if process.lives() {
        // It may end between the two lines; then the signal goes nowhere.
        let _ = kill(Pid::from_raw(process.pid as i32), signal);
    }
}
