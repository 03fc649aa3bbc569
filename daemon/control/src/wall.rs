//! Limits of a tenant's processes as they travel, and what those processes use.

use pagedd_core::LimitName;
use serde::{Deserialize, Serialize};

/// Limits of a tenant's cgroup, as texts; `None` says nothing of one.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct LimitTexts {
    /// CPU time, as `50%` of one CPU or `2.5` CPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_max: Option<String>,
    /// Part of the CPUs beside other tenants.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_weight: Option<String>,
    /// Which CPUs, as `0-3,8`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpus: Option<String>,
    /// Memory, as `256MiB`: beyond it the gateway is ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_max: Option<String>,
    /// Memory: beyond it the gateway is held up while some is taken back.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_high: Option<String>,
    /// Processes and threads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pids_max: Option<String>,
    /// Rates of block devices, as `8:0 rbps=10MiB wiops=100`, several divided by `;`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub io_max: Option<String>,
    /// Part of block devices beside other tenants.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub io_weight: Option<String>,
}

impl LimitTexts {
    /// What is said of one.
    #[must_use]
    pub fn get(&self, name: LimitName) -> Option<&str> {
        let text = match name {
            LimitName::CpuMax => &self.cpu_max,
            LimitName::CpuWeight => &self.cpu_weight,
            LimitName::Cpus => &self.cpus,
            LimitName::MemoryMax => &self.memory_max,
            LimitName::MemoryHigh => &self.memory_high,
            LimitName::PidsMax => &self.pids_max,
            LimitName::IoMax => &self.io_max,
            LimitName::IoWeight => &self.io_weight,
        };
        text.as_deref()
    }

    /// Says something of one.
    pub fn set(&mut self, name: LimitName, text: Option<String>) {
        let place = match name {
            LimitName::CpuMax => &mut self.cpu_max,
            LimitName::CpuWeight => &mut self.cpu_weight,
            LimitName::Cpus => &mut self.cpus,
            LimitName::MemoryMax => &mut self.memory_max,
            LimitName::MemoryHigh => &mut self.memory_high,
            LimitName::PidsMax => &mut self.pids_max,
            LimitName::IoMax => &mut self.io_max,
            LimitName::IoWeight => &mut self.io_weight,
        };
        *place = text;
    }

    /// Those of which something is said.
    pub fn given(&self) -> impl Iterator<Item = (LimitName, &str)> {
        LimitName::ALL.into_iter().filter_map(|name| Some((name, self.get(name)?)))
    }
}

/// A tenant's wall: what its processes may have, and what they have.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct WallInfo {
    /// Its limits; what is not named is not limited.
    pub limits: LimitTexts,
    /// One line for each limit, or for all, that the kernel does not enforce as it was given.
    pub not_enforced: Vec<String>,
    /// What its cgroup counts; `None` where it has none.
    pub usage: Option<UsageInfo>,
    /// Memory of its model's device that its KV blocks take, held and cached ones: no cgroup counts it.
    pub device_bytes: u64,
}

/// What a tenant's cgroup counts; `None` where the kernel does not.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct UsageInfo {
    /// Memory that is charged to it.
    pub memory_bytes: Option<u64>,
    /// The most that it was.
    pub memory_peak_bytes: Option<u64>,
    /// Processes that were killed for want of memory.
    pub oom_kills: Option<u64>,
    /// CPU time, in microseconds.
    pub cpu_us: Option<u64>,
    /// Time for which `cpu_max` held it up, in microseconds.
    pub throttled_us: Option<u64>,
    /// Processes and threads.
    pub pids: Option<u64>,
    /// How often `pids_max` refused one.
    pub pids_refused: Option<u64>,
    /// Time that it lost waiting.
    pub pressure: PressureInfo,
}

/// Time that was lost waiting; `None` where the kernel does not measure it.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PressureInfo {
    /// For a CPU.
    pub cpu: Option<StallInfo>,
    /// For memory.
    pub memory: Option<StallInfo>,
    /// For block devices.
    pub io: Option<StallInfo>,
}

/// How much of the time something was waited for.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct StallInfo {
    /// Percent of the last ten seconds in which some of its threads waited.
    pub some_avg10: f32,
    /// Percent of the last ten seconds in which all of them did.
    pub full_avg10: f32,
    /// Microseconds in which some did.
    pub some_us: u64,
    /// Microseconds in which all did.
    pub full_us: u64,
}
