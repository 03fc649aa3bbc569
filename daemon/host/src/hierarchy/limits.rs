//! Putting a cgroup's limits into force.
//!
//! **Owns** what is written where. **Never** leaves one of two limits unsaid: each one that is not given is taken away, and one that the host
//! refuses keeps no other from its file.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use cgroups_rs::MaxValue;
use cgroups_rs::cpu::CpuController;
use cgroups_rs::cpuset::CpuSetController;
use cgroups_rs::memory::{MemController, SetMemory};
use cgroups_rs::pid::PidController;
use pagedd_core::{BlockDevice, Bytes, CgroupLimits, CpuList, CpuTime, IoLimit, Limit, LimitName, Weight};

use super::cgroup::{Cgroup, CgroupError, cause};
use super::write_once;

/// A limit that the host has no means to enforce.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Unenforced(pub LimitName);

impl fmt::Display for Unenforced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let controller = self.0.file().split('.').next().unwrap_or_default();
        write!(f, "{}: this host's {controller} controller is missing, or has no such file", self.0)
    }
}

/// Holds memory to what is in RAM; beside [`LimitName::MemoryMax`], which it is part of.
const SWAP: &str = "memory.swap.max";

/// What has become of limits.
#[derive(Debug, Default)]
pub struct Applied {
    /// Those that were given and are not in force.
    pub unenforced: Vec<Unenforced>,
    /// Those that could not be put into force, or taken away, and are as they were.
    pub failed: Vec<(LimitName, CgroupError)>,
    /// CPUs that were asked for and are offline, or not the daemon's.
    pub left_out: CpuList,
    /// So many CPUs there are, and `cpu.max` gives more: it holds nothing up.
    pub cpus_below_max: Option<usize>,
}

/// A limit is below what is in use: the kernel would kill, stall or refuse the gateway at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BelowUse {
    /// Which limit.
    pub name: LimitName,
    /// What it is to be.
    pub limit: u64,
    /// What is in use, without what the kernel takes back by itself.
    pub used: u64,
}

impl fmt::Display for BelowUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, limit, used } = self;
        write!(f, "{name} {limit} is below present use, {used}")
    }
}

impl Cgroup {
    /// Whether `after` asks for less than is in use, where `before` did not.
    ///
    /// # Errors
    /// [`CgroupError::BelowUse`], of the first such limit.
    pub fn check_use(&self, before: &CgroupLimits, after: &CgroupLimits) -> Result<(), CgroupError> {
        let bytes = |limit: Limit<Bytes>| limit.at().map(|bytes| bytes.0);
        let pids = |limit: Limit<u32>| limit.at().map(u64::from);
        let usage = self.usage();
        let wanted = [
            (LimitName::MemoryMax, bytes(before.memory_max), bytes(after.memory_max), usage.memory_held()),
            (LimitName::MemoryHigh, bytes(before.memory_high), bytes(after.memory_high), usage.memory_held()),
            (LimitName::PidsMax, pids(before.pids_max), pids(after.pids_max), usage.pids),
        ];
        for (name, before, after, used) in wanted {
            if let (Some(limit), Some(used)) = (after, used)
                && limit < used
                && before.is_none_or(|before| limit < before)
            {
                return Err(CgroupError::BelowUse(BelowUse { name, limit, used }));
            }
        }
        Ok(())
    }

    /// Whether the host has what `after` names, as far as that is not in `before`.
    ///
    /// # Errors
    /// [`CgroupError::NoCpu`] or [`CgroupError::NoDevice`], or what is there cannot be read.
    pub fn check(&self, before: &CgroupLimits, after: &CgroupLimits) -> Result<(), CgroupError> {
        if after.cpus != before.cpus {
            self.usable(after.cpus.as_ref())?;
        }
        let new = after.io_max.iter().filter(|limit| !before.io_max.contains(limit));
        if self.has(LimitName::IoMax) { new.map(io_line).try_for_each(|line| line.map(drop)) } else { Ok(()) }
    }

    /// Puts `limits` into force, and takes away what is not in there: each that can be, whatever becomes of the others. Processes are in it
    /// already, or come later.
    pub fn limit(&self, limits: &CgroupLimits) -> Applied {
        let mut applied = Applied::default();
        for name in LimitName::ALL {
            let put = if !self.has(name) {
                applied.unenforced.extend(limits.has(name).then_some(Unenforced(name)));
                continue;
            } else if name == LimitName::Cpus {
                self.usable(limits.cpus.as_ref()).and_then(|cpus| {
                    if let (Some(asked), Some(usable)) = (&limits.cpus, &cpus) {
                        applied.left_out = asked.without(usable);
                    }
                    self.put(name, limits, cpus.as_ref())
                })
            } else {
                self.put(name, limits, None)
            };
            applied.failed.extend(put.err().map(|error| (name, error)));
        }
        applied.cpus_below_max = self.cpus_below(limits.cpu_max);
        applied
    }

    /// How many CPUs there are, where that is known and `most` is more than all their time.
    fn cpus_below(&self, most: Limit<CpuTime>) -> Option<usize> {
        let time = most.at()?;
        let cpus = self.effective_cpus().ok()?.count();
        let all = CpuTime::PERIOD_US * cpus as u64;
        (time.quota_us() > all).then_some(cpus)
    }

    /// Those of the CPUs that tenants may have; `None` is all of them, and what a host without cpusets gives.
    fn usable(&self, asked: Option<&CpuList>) -> Result<Option<CpuList>, CgroupError> {
        let Some(asked) = asked.filter(|_| self.has(LimitName::Cpus)) else { return Ok(None) };
        let there = self.effective_cpus()?;
        match asked.and(&there) {
            usable if usable.is_empty() => Err(CgroupError::NoCpu { asked: asked.clone(), there }),
            usable => Ok(Some(usable)),
        }
    }

    /// Gives it this much of the CPUs beside others, where there is a controller for it.
    pub(super) fn weigh(&self, weight: Weight) -> Result<(), CgroupError> {
        let limits = CgroupLimits { cpu_weight: Some(weight), ..CgroupLimits::default() };
        if self.has(LimitName::CpuWeight) { self.put(LimitName::CpuWeight, &limits, None) } else { Ok(()) }
    }

    /// Whether the kernel has a file for it here. `io.weight` may be missing where `io.max` is there.
    fn has(&self, name: LimitName) -> bool {
        self.path().join(name.file()).exists()
    }

    /// CPUs that tenants may have: those of the parent that are online.
    fn effective_cpus(&self) -> Result<CpuList, CgroupError> {
        let path = self.path().parent().unwrap_or(self.path()).join("cpuset.cpus.effective");
        let text = fs::read_to_string(&path).map_err(|error| CgroupError::io(&path, error))?;
        text.parse().map_err(|error| CgroupError::io(&path, io::Error::other(error)))
    }

    fn put(&self, name: LimitName, limits: &CgroupLimits, cpus: Option<&CpuList>) -> Result<(), CgroupError> {
        let handle = &self.handle;
        let missing = || CgroupError::io(&self.path().join(name.file()), io::ErrorKind::NotFound.into());
        let weight = |weight: Option<Weight>| weight.unwrap_or(Weight::DEFAULT);
        let bytes = |limit: Limit<Bytes>| most(limit.at().map(|bytes| bytes.0));
        let (value, written) = match name {
            LimitName::CpuMax => {
                let cpu: &CpuController = handle.controller_of().ok_or_else(missing)?;
                // The library reads a quota that is not above 0 as none.
                let quota = limits.cpu_max.at().map_or(0, |time| time.quota_us() as i64);
                let period = CpuTime::PERIOD_US;
                (quota.to_string(), cpu.set_cfs_quota_and_period(Some(quota), Some(period)).map_err(cause))
            }
            LimitName::CpuWeight => {
                let cpu: &CpuController = handle.controller_of().ok_or_else(missing)?;
                let weight = weight(limits.cpu_weight);
                (weight.to_string(), cpu.set_shares(weight.get().into()).map_err(cause))
            }
            LimitName::Cpus => {
                let set: &CpuSetController = handle.controller_of().ok_or_else(missing)?;
                // An empty text would be no write at all.
                let value = cpus.map_or_else(|| "\n".to_owned(), ToString::to_string);
                match set.set_cpus(&value).map_err(cause) {
                    // A cgroup with processes has some once it had some: all that there can ever be is no limit.
                    Err(error) if cpus.is_none() && error.raw_os_error() == Some(libc::ENOSPC) => {
                        let path = Path::new("/sys/devices/system/cpu/possible");
                        let all = fs::read_to_string(path).map_err(|error| CgroupError::io(path, error))?;
                        let written = set.set_cpus(all.trim_end()).map_err(cause);
                        (all, written)
                    }
                    written => (value, written),
                }
            }
            LimitName::MemoryMax | LimitName::MemoryHigh => {
                let memory: &MemController = handle.controller_of().ok_or_else(missing)?;
                let (max, high) = if name == LimitName::MemoryMax {
                    (Some(bytes(limits.memory_max)), None)
                } else {
                    (None, Some(bytes(limits.memory_high)))
                };
                let value = max.or(high).map(|value| value.to_string()).unwrap_or_default();
                (value, memory.set_mem(SetMemory { low: None, high, min: None, max }).map_err(cause))
            }
            LimitName::PidsMax => {
                let pids: &PidController = handle.controller_of().ok_or_else(missing)?;
                let value = most(limits.pids_max.at().map(u64::from));
                (value.to_string(), pids.set_pid_max(value).map_err(cause))
            }
            LimitName::IoMax => return self.put_io(&limits.io_max),
            LimitName::IoWeight => {
                // The library knows BFQ's file only.
                let value = format!("default {}", weight(limits.io_weight));
                let written = write_once(&self.path().join(name.file()), &value);
                (value, written)
            }
        };
        written.map_err(|source| CgroupError::Limit { name, value, source })?;
        if name == LimitName::MemoryMax { self.put_swap(limits.memory_max) } else { Ok(()) }
    }

    /// What is over the limit would go to swap otherwise, as much as the host has. A kernel without swap accounting has no file for it.
    fn put_swap(&self, memory: Limit<Bytes>) -> Result<(), CgroupError> {
        let path = self.path().join(SWAP);
        if !path.exists() {
            return Ok(());
        }
        let value = if memory == Limit::Max { "max" } else { "0" };
        write_once(&path, value).map_err(|error| CgroupError::io(&path, error))
    }

    /// The library cannot take a limit of a device away. The first error, once every device was tried.
    fn put_io(&self, limits: &[IoLimit]) -> Result<(), CgroupError> {
        let path = self.path().join(LimitName::IoMax.file());
        let write = |value: String| {
            write_once(&path, &value).map_err(|source| CgroupError::Limit {
                name: LimitName::IoMax,
                value,
                source,
            })
        };
        let lines: Vec<_> = limits.iter().map(io_line).collect();
        let before = fs::read_to_string(&path).map_err(|error| CgroupError::io(&path, error))?;
        let limited = |device: &str| lines.iter().flatten().any(|(limited, _)| limited == device);
        let gone = before.lines().filter_map(|line| line.split(' ').next());
        let gone = gone.filter(|device| !device.is_empty() && !limited(device));
        let taken_away = gone.map(|device| write(format!("{device} rbps=max wbps=max riops=max wiops=max")));
        let mut errors: Vec<_> = taken_away.filter_map(Result::err).collect();
        for line in lines {
            errors.extend(line.and_then(|(device, rates)| write(format!("{device} {rates}"))).err());
        }
        errors.into_iter().next().map_or(Ok(()), Err)
    }
}

/// The library's form; sizes are below 2^63 where they are read.
fn most(limit: Option<u64>) -> MaxValue {
    limit.map_or(MaxValue::Max, |most| MaxValue::Value(i64::try_from(most).unwrap_or(i64::MAX)))
}

/// The device's numbers, and what is written behind them.
fn io_line(limit: &IoLimit) -> Result<(String, String), CgroupError> {
    let device = match &limit.device {
        BlockDevice::Number { .. } => limit.device.to_string(),
        BlockDevice::Path(path) => numbers(Path::new(path))
            .map_err(|source| CgroupError::NoDevice { device: path.clone(), source })?,
    };
    let IoLimit { read_bytes, write_bytes, reads, writes, .. } = limit;
    Ok((device, format!("rbps={read_bytes} wbps={write_bytes} riops={reads} wiops={writes}")))
}

/// Numbers of the whole disk: limits of a partition are none.
fn numbers(path: &Path) -> io::Result<String> {
    let found = fs::metadata(path)?;
    if !found.file_type().is_block_device() {
        return Err(io::Error::other("it is something else"));
    }
    let (major, minor) = (rustix::fs::major(found.rdev()), rustix::fs::minor(found.rdev()));
    let sys = Path::new("/sys/dev/block").join(format!("{major}:{minor}"));
    if sys.join("partition").exists() {
        return Ok(fs::read_to_string(sys.canonicalize()?.join("../dev"))?.trim_end().to_owned());
    }
    Ok(format!("{major}:{minor}"))
}
