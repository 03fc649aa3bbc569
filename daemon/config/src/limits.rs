//! Limits of a tenant's cgroup as they are typed, shown and saved.
//!
//! **Owns** the texts. **Never** asks the host whether it can keep a limit.

use crate::size::{decimal, split_number};
use crate::{Size, SizeError, shown};
use pagedd_core::{BlockDevice, Bytes, CgroupLimits, CpuList, CpuTime, IoLimit, Limit, LimitName, Weight};
use std::fmt::Write;

/// What takes a limit away, in one word or the other.
const WITHOUT: [&str; 2] = ["max", "default"];

/// Below this no gateway comes up: it would be killed and started for ever.
const LEAST_MEMORY: Bytes = Bytes(4 << 20);

/// Below this no gateway comes up: its threads are counted, too.
const LEAST_PIDS: u32 = 4;

/// The text is no limit of this name.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LimitError {
    /// No CPU time.
    #[error("`{0}` is no CPU time; write for example 50% or 2.5 (CPUs), from 1% up, or max")]
    CpuTime(String),
    /// No weight.
    #[error("`{0}` is no weight; write a number from 1 to 10000, or default, which is 100")]
    Weight(String),
    /// No CPUs.
    #[error("`{text}` is {error}, or default")]
    Cpus {
        /// As given.
        text: String,
        /// Why.
        error: pagedd_core::NoCpuList,
    },
    /// No size.
    #[error("{0}, or max")]
    Size(SizeError),
    /// A size with which no gateway runs.
    #[error("{} is less than {}, without which no gateway runs", Size(*.0), Size(LEAST_MEMORY))]
    Memory(Bytes),
    /// No number of processes.
    #[error("`{0}` is no number of processes and threads; write one from {LEAST_PIDS} up, or max")]
    Pids(String),
    /// No limit of I/O.
    #[error(
        "`{text}`: {why}; write for example `/dev/sda rbps=10MiB wiops=100` or `8:0 wbps=5MiB`, several divided by `;`, or max"
    )]
    Io {
        /// As given.
        text: String,
        /// What is wrong with it.
        why: &'static str,
    },
}

/// Changes one limit; `max` and `default` take it away.
///
/// # Errors
/// Nothing has changed.
pub fn set_limit(limits: &mut CgroupLimits, name: LimitName, text: &str) -> Result<(), LimitError> {
    let text = text.trim();
    let given = (!WITHOUT.contains(&text)).then_some(text);
    match name {
        LimitName::CpuMax => limits.cpu_max = most(given.map(cpu_time).transpose()?),
        LimitName::CpuWeight => limits.cpu_weight = given.map(weight).transpose()?,
        LimitName::Cpus => limits.cpus = given.map(cpus).transpose()?,
        LimitName::MemoryMax => limits.memory_max = most(given.map(memory).transpose()?),
        LimitName::MemoryHigh => limits.memory_high = most(given.map(memory).transpose()?),
        LimitName::PidsMax => limits.pids_max = most(given.map(pids).transpose()?),
        LimitName::IoMax => limits.io_max = given.map_or_else(|| Ok(Vec::new()), io)?,
        LimitName::IoWeight => limits.io_weight = given.map(weight).transpose()?,
    }
    Ok(())
}

/// One limit as [`set_limit`] reads it; `None` where nothing is limited.
#[must_use]
pub fn limit_text(limits: &CgroupLimits, name: LimitName) -> Option<String> {
    let size = |bytes: Bytes| Size(bytes).to_string();
    match name {
        LimitName::CpuMax => limits.cpu_max.at().map(percent),
        LimitName::CpuWeight => limits.cpu_weight.map(|weight| weight.to_string()),
        LimitName::Cpus => limits.cpus.as_ref().map(ToString::to_string),
        LimitName::MemoryMax => limits.memory_max.at().map(size),
        LimitName::MemoryHigh => limits.memory_high.at().map(size),
        LimitName::PidsMax => limits.pids_max.at().map(|pids| pids.to_string()),
        LimitName::IoMax if limits.io_max.is_empty() => None,
        LimitName::IoMax => Some(limits.io_max.iter().map(device).collect::<Vec<_>>().join("; ")),
        LimitName::IoWeight => limits.io_weight.map(|weight| weight.to_string()),
    }
}

/// A line of what [`save_limits`] wrote cannot be read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SavedLimitsError {
    /// It names no limit.
    #[error("`{0}` is no limit")]
    Unknown(String),
    /// Its value is none.
    #[error("{name}: {error}")]
    Value {
        /// Of which.
        name: LimitName,
        /// Why.
        error: LimitError,
    },
}

/// All limits, one a line, for the database; `None` where nothing is limited.
#[must_use]
pub fn save_limits(limits: &CgroupLimits) -> Option<String> {
    let mut text = String::new();
    for name in LimitName::ALL {
        if let Some(value) = limit_text(limits, name) {
            // Writing to a String does not fail.
            let _ = writeln!(text, "{name} {value}");
        }
    }
    (!text.is_empty()).then_some(text)
}

/// Reads what [`save_limits`] wrote.
///
/// # Errors
/// The first line that cannot be read.
pub fn load_limits(text: Option<&str>) -> Result<CgroupLimits, SavedLimitsError> {
    let mut limits = CgroupLimits::default();
    for line in text.unwrap_or_default().lines() {
        let (name, value) = line.split_once(' ').unwrap_or((line, ""));
        let name = LimitName::from_file(name).ok_or_else(|| SavedLimitsError::Unknown(shown(name)))?;
        set_limit(&mut limits, name, value).map_err(|error| SavedLimitsError::Value { name, error })?;
    }
    Ok(limits)
}

fn most<T>(given: Option<T>) -> Limit<T> {
    given.map_or(Limit::Max, Limit::At)
}

/// `50%` of a CPU, or `2.5` CPUs.
fn cpu_time(text: &str) -> Result<CpuTime, LimitError> {
    let read = || {
        let (number, unit) = split_number(text)?;
        let scale = match unit {
            "%" => 100,
            "" => 10_000,
            _ => return None,
        };
        let (numerator, denominator) = decimal(number)?;
        let hundredths = numerator.checked_mul(scale)?;
        let whole = hundredths.is_multiple_of(denominator).then_some(hundredths / denominator)?;
        CpuTime::from_hundredths(u32::try_from(whole).ok()?)
    };
    read().ok_or_else(|| LimitError::CpuTime(shown(text)))
}

fn percent(time: CpuTime) -> String {
    let (whole, rest) = (time.hundredths() / 100, time.hundredths() % 100);
    match rest {
        0 => format!("{whole}%"),
        rest if rest % 10 == 0 => format!("{whole}.{}%", rest / 10),
        rest => format!("{whole}.{rest:02}%"),
    }
}

/// A whole number in digits.
fn whole<T: std::str::FromStr>(text: &str) -> Option<T> {
    text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()))
}

fn weight(text: &str) -> Result<Weight, LimitError> {
    whole(text).and_then(Weight::new).ok_or_else(|| LimitError::Weight(shown(text)))
}

fn cpus(text: &str) -> Result<CpuList, LimitError> {
    let wrong = |error| LimitError::Cpus { text: shown(text), error };
    let cpus: CpuList = text.parse().map_err(wrong)?;
    if cpus.is_empty() { Err(wrong(pagedd_core::NoCpuList)) } else { Ok(cpus) }
}

fn memory(text: &str) -> Result<Bytes, LimitError> {
    let Size(bytes) = text.parse().map_err(LimitError::Size)?;
    if bytes < LEAST_MEMORY { Err(LimitError::Memory(bytes)) } else { Ok(bytes) }
}

fn pids(text: &str) -> Result<u32, LimitError> {
    // The kernel's own bound on process numbers.
    whole(text)
        .filter(|pids| (LEAST_PIDS..=4 << 20).contains(pids))
        .ok_or_else(|| LimitError::Pids(shown(text)))
}

const IO_KEYS: [&str; 4] = ["rbps", "wbps", "riops", "wiops"];

fn io(text: &str) -> Result<Vec<IoLimit>, LimitError> {
    let wrong = |why| LimitError::Io { text: shown(text), why };
    let mut limits: Vec<IoLimit> = Vec::new();
    for part in text.split(';') {
        let mut words = part.split_ascii_whitespace();
        let device = words.next().and_then(block_device).ok_or_else(|| wrong("it names no device"))?;
        let (mut bytes, mut operations) = ([Limit::Max; 2], [Limit::Max; 2]);
        for word in words {
            let (key, value) = word.split_once('=').ok_or_else(|| wrong("a part is no KEY=VALUE"))?;
            let place = IO_KEYS.iter().position(|known| *known == key);
            let place = place.ok_or_else(|| wrong("a key is none of rbps, wbps, riops and wiops"))?;
            let given = (value != "max").then_some(value);
            let positive = |number: &u64| *number > 0;
            if place < 2 {
                let size = |text: &str| text.parse().ok().map(|Size(bytes)| bytes).filter(|b| positive(&b.0));
                let size =
                    given.map(|text| size(text).ok_or_else(|| wrong("a rate is no size, such as 10MiB")));
                bytes[place] = most(size.transpose()?);
            } else {
                let number = given.map(|text| {
                    whole(text).filter(positive).ok_or_else(|| wrong("a rate of operations is no number"))
                });
                operations[place - 2] = most(number.transpose()?);
            }
        }
        let ([read_bytes, write_bytes], [reads, writes]) = (bytes, operations);
        let limit = IoLimit { device, read_bytes, write_bytes, reads, writes };
        if limit == unlimited(&limit.device) {
            return Err(wrong("a device is named and nothing is limited"));
        }
        if limits.iter().any(|other| other.device == limit.device) {
            return Err(wrong("a device is named twice"));
        }
        limits.push(limit);
    }
    Ok(limits)
}

fn unlimited(device: &BlockDevice) -> IoLimit {
    IoLimit {
        device: device.clone(),
        read_bytes: Limit::Max,
        write_bytes: Limit::Max,
        reads: Limit::Max,
        writes: Limit::Max,
    }
}

fn block_device(text: &str) -> Option<BlockDevice> {
    if text.starts_with('/') {
        return Some(BlockDevice::Path(text.to_owned()));
    }
    let (major, minor) = text.split_once(':')?;
    Some(BlockDevice::Number { major: whole(major)?, minor: whole(minor)? })
}

fn device(limit: &IoLimit) -> String {
    let mut text = limit.device.to_string();
    let bytes = |limit: Limit<Bytes>| limit.at().map(|bytes| Size(bytes).to_string());
    let number = |limit: Limit<u64>| limit.at().map(|number| number.to_string());
    let rates =
        [bytes(limit.read_bytes), bytes(limit.write_bytes), number(limit.reads), number(limit.writes)];
    for (key, rate) in IO_KEYS.iter().zip(rates) {
        if let Some(rate) = rate {
            // Writing to a String does not fail.
            let _ = write!(text, " {key}={rate}");
        }
    }
    text
}

#[cfg(test)]
mod tests;
