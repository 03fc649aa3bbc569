//! Limits of a cgroup, as the kernel counts them.
//!
//! **Owns** what a limit can be. **Never** reads or writes a cgroup's file; how limits are typed is pagedd-config's.

use std::fmt;
use std::str::FromStr;

use crate::Bytes;

/// At most so much.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Limit<T> {
    /// As much as there is.
    #[default]
    Max,
    /// This much.
    At(T),
}

impl<T> Limit<T> {
    /// The number, where there is one.
    pub fn at(self) -> Option<T> {
        match self {
            Self::Max => None,
            Self::At(most) => Some(most),
        }
    }
}

impl<T: fmt::Display> fmt::Display for Limit<T> {
    /// As the kernel writes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Max => f.write_str("max"),
            Self::At(most) => most.fmt(f),
        }
    }
}

/// Time on CPUs per time that passes, in hundredths of a percent of one CPU.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct CpuTime(u32);

impl CpuTime {
    /// The least that the kernel grants: a millisecond of each [`CpuTime::PERIOD_US`].
    pub const LEAST: Self = Self(100);
    /// The most that can be said: 10,000 CPUs.
    pub const MOST: Self = Self(100_000_000);
    /// What a quota is of, in microseconds.
    pub const PERIOD_US: u64 = 100_000;

    /// `hundredths` of a percent of one CPU, in [[`CpuTime::LEAST`], [`CpuTime::MOST`]].
    #[must_use]
    pub fn from_hundredths(hundredths: u32) -> Option<Self> {
        (Self::LEAST..=Self::MOST).contains(&Self(hundredths)).then_some(Self(hundredths))
    }

    /// In hundredths of a percent of one CPU.
    #[must_use]
    pub const fn hundredths(self) -> u32 {
        self.0
    }

    /// Microseconds in each [`CpuTime::PERIOD_US`].
    #[must_use]
    pub const fn quota_us(self) -> u64 {
        self.0 as u64 * (Self::PERIOD_US / 10_000)
    }
}

/// A part beside the parts of others, in [1, 10000].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Weight(u16);

impl Weight {
    /// What a cgroup has of which nothing else is said.
    pub const DEFAULT: Self = Self(100);
    /// The largest.
    pub const MOST: Self = Self(10_000);

    /// `None` outside of [1, 10000].
    #[must_use]
    pub fn new(weight: u16) -> Option<Self> {
        (1..=Self::MOST.0).contains(&weight).then_some(Self(weight))
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u16 {
        self.0
    }
}

impl fmt::Display for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// CPUs by their numbers, as `0-3,8`: ranges with both ends in them, in order, none next to another.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CpuList(Vec<(u32, u32)>);

/// The text is no list of CPUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoCpuList;

impl fmt::Display for NoCpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no list of CPUs; write for example 0-3,8, each number below {}", CpuList::NUMBERS)
    }
}

impl std::error::Error for NoCpuList {}

impl CpuList {
    /// Numbers of CPUs are below this.
    pub const NUMBERS: u32 = 1 << 16;

    /// Those that are in both.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        let mut both = Vec::new();
        for &(a, b) in &self.0 {
            let meets = other.0.iter().map(|&(c, d)| (a.max(c), b.min(d)));
            both.extend(meets.filter(|(from, to)| from <= to));
        }
        Self::from_ranges(both)
    }

    /// Those that are not in `other`.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        let mut left = Vec::new();
        for &(from, to) in &self.0 {
            let mut next = from;
            for &(c, d) in &other.0 {
                if d < next || c > to {
                    continue;
                }
                if next < c {
                    left.push((next, c - 1));
                }
                next = d + 1;
            }
            if next <= to {
                left.push((next, to));
            }
        }
        Self::from_ranges(left)
    }

    /// How many.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.iter().map(|&(from, to)| (to - from) as usize + 1).sum()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn from_ranges(mut ranges: Vec<(u32, u32)>) -> Self {
        ranges.sort_unstable();
        let mut merged: Vec<(u32, u32)> = Vec::new();
        for (from, to) in ranges {
            match merged.last_mut() {
                Some((_, end)) if from <= *end + 1 => *end = to.max(*end),
                Some(_) | None => merged.push((from, to)),
            }
        }
        Self(merged)
    }
}

impl FromStr for CpuList {
    type Err = NoCpuList;

    /// The kernel's own form; an empty text is no CPU.
    fn from_str(text: &str) -> Result<Self, NoCpuList> {
        let number = |text: &str| {
            let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
            text.parse().ok().filter(|cpu| digits && *cpu < Self::NUMBERS).ok_or(NoCpuList)
        };
        let range = |part: &str| {
            let (from, to) = part.split_once('-').unwrap_or((part, part));
            let (from, to) = (number(from.trim())?, number(to.trim())?);
            if from <= to { Ok((from, to)) } else { Err(NoCpuList) }
        };
        let text = text.trim();
        if text.is_empty() {
            return Ok(Self::default());
        }
        Ok(Self::from_ranges(text.split(',').map(range).collect::<Result<_, _>>()?))
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, (from, to)) in self.0.iter().enumerate() {
            let comma = if place > 0 { "," } else { "" };
            if from == to { write!(f, "{comma}{from}")? } else { write!(f, "{comma}{from}-{to}")? }
        }
        Ok(())
    }
}

/// A block device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum BlockDevice {
    /// By its numbers.
    Number {
        /// Of its driver.
        major: u32,
        /// Among those of its driver.
        minor: u32,
    },
    /// By an absolute path, without blanks; its numbers may be others after each boot.
    Path(String),
}

impl fmt::Display for BlockDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number { major, minor } => write!(f, "{major}:{minor}"),
            Self::Path(path) => f.write_str(path),
        }
    }
}

/// What may pass between a cgroup and a device, per second.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IoLimit {
    /// Which.
    pub device: BlockDevice,
    /// Bytes read.
    pub read_bytes: Limit<Bytes>,
    /// Bytes written.
    pub write_bytes: Limit<Bytes>,
    /// Reads.
    pub reads: Limit<u64>,
    /// Writes.
    pub writes: Limit<u64>,
}

/// All that limits a cgroup.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct CgroupLimits {
    /// `cpu.max`.
    pub cpu_max: Limit<CpuTime>,
    /// `cpu.weight`; `None` is [`Weight::DEFAULT`].
    pub cpu_weight: Option<Weight>,
    /// `cpuset.cpus`: not empty; `None` is all.
    pub cpus: Option<CpuList>,
    /// `memory.max`; where there is one, no memory goes to swap.
    pub memory_max: Limit<Bytes>,
    /// `memory.high`.
    pub memory_high: Limit<Bytes>,
    /// `pids.max`: processes and threads.
    pub pids_max: Limit<u32>,
    /// `io.max`, a device once at most.
    pub io_max: Vec<IoLimit>,
    /// `io.weight`; `None` is [`Weight::DEFAULT`].
    pub io_weight: Option<Weight>,
}

/// Names one of [`CgroupLimits`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum LimitName {
    /// [`CgroupLimits::cpu_max`].
    CpuMax,
    /// [`CgroupLimits::cpu_weight`].
    CpuWeight,
    /// [`CgroupLimits::cpus`].
    Cpus,
    /// [`CgroupLimits::memory_max`].
    MemoryMax,
    /// [`CgroupLimits::memory_high`].
    MemoryHigh,
    /// [`CgroupLimits::pids_max`].
    PidsMax,
    /// [`CgroupLimits::io_max`].
    IoMax,
    /// [`CgroupLimits::io_weight`].
    IoWeight,
}

impl LimitName {
    /// Every one.
    pub const ALL: [Self; 8] = [
        Self::CpuMax,
        Self::CpuWeight,
        Self::Cpus,
        Self::MemoryMax,
        Self::MemoryHigh,
        Self::PidsMax,
        Self::IoMax,
        Self::IoWeight,
    ];

    /// The cgroup's file that holds it.
    #[must_use]
    pub const fn file(self) -> &'static str {
        match self {
            Self::CpuMax => "cpu.max",
            Self::CpuWeight => "cpu.weight",
            Self::Cpus => "cpuset.cpus",
            Self::MemoryMax => "memory.max",
            Self::MemoryHigh => "memory.high",
            Self::PidsMax => "pids.max",
            Self::IoMax => "io.max",
            Self::IoWeight => "io.weight",
        }
    }

    /// The one whose file has this name.
    #[must_use]
    pub fn from_file(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|limit| limit.file() == name)
    }
}

impl fmt::Display for LimitName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.file())
    }
}

impl CgroupLimits {
    /// Whether this one is other than if nothing were said of it.
    #[must_use]
    pub fn has(&self, name: LimitName) -> bool {
        match name {
            LimitName::CpuMax => self.cpu_max != Limit::Max,
            LimitName::CpuWeight => self.cpu_weight.is_some(),
            LimitName::Cpus => self.cpus.is_some(),
            LimitName::MemoryMax => self.memory_max != Limit::Max,
            LimitName::MemoryHigh => self.memory_high != Limit::Max,
            LimitName::PidsMax => self.pids_max != Limit::Max,
            LimitName::IoMax => !self.io_max.is_empty(),
            LimitName::IoWeight => self.io_weight.is_some(),
        }
    }

    /// Those that limit anything.
    pub fn names(&self) -> impl Iterator<Item = LimitName> {
        LimitName::ALL.into_iter().filter(|name| self.has(*name))
    }

    /// Whether nothing is limited.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.names().next().is_none()
    }
}

#[cfg(test)]
mod tests;
