//! `pagedctl tenant`, one file per subcommand.

pub mod add;
pub mod list;
pub mod quotas;
pub mod remove;
pub mod resume;
pub mod set;
pub mod show;
pub mod suspend;

use crate::failure::Failure;
use clap::ValueEnum;
use pagedd_config::{Amount, CgroupLimits, MAX_RETENTION, Span, SpanError, TenantName, set_limit};
use pagedd_control::LimitTexts;

/// The value of a switch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Switch {
    On,
    Off,
}

impl From<Switch> for bool {
    fn from(switch: Switch) -> Self {
        switch == Switch::On
    }
}

/// A tenant's name, checked before the daemon is asked.
pub fn name(text: &str) -> Result<String, Failure> {
    let name: TenantName = text.parse()?;
    Ok(name.as_str().to_owned())
}

/// An amount in its usual form, checked before the daemon is asked.
fn amount(option: &str, text: Option<&str>) -> Result<Option<String>, Failure> {
    let read =
        |text: &str| text.parse::<Amount>().map_err(|error| Failure::usage(format!("{option}: {error}")));
    Ok(text.map(read).transpose()?.map(|amount| amount.to_string()))
}

/// A retention in its usual form, checked before the daemon is asked.
fn retention(text: Option<&str>) -> Result<Option<String>, Failure> {
    let refused = |error: String| Failure::usage(format!("--retention: {error}"));
    let read = |text: &str| {
        if text == "default" {
            return Ok(text.to_owned());
        }
        let span: Span = text.parse().map_err(|error: SpanError| refused(error.to_string()))?;
        if span.0 > MAX_RETENTION {
            return Err(refused(format!("{span} is more than {}", Span(MAX_RETENTION))));
        }
        Ok(span.to_string())
    };
    text.map(read).transpose()
}

/// Limits of a tenant's processes. `max` or `default` takes one away.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Limits of its gateway's processes (`max` or `default` takes one away)")]
struct Limits {
    /// CPU time: `50%` of one CPU, or `2.5` for two and a half
    #[arg(long, value_name = "TIME")]
    cpu_max: Option<String>,
    /// Part of the CPUs beside other tenants, from 1 to 10000 [default: 100]
    #[arg(long, value_name = "WEIGHT")]
    cpu_weight: Option<String>,
    /// Which CPUs, for example 0-3,8; those that are offline are left out
    #[arg(long, value_name = "CPUS")]
    cpuset: Option<String>,
    /// Memory, for example 256MiB, and then no swap; a gateway that needs more is ended and started again
    #[arg(long, value_name = "SIZE")]
    memory_max: Option<String>,
    /// Memory beyond which the gateway is held up while the kernel takes some back
    #[arg(long, value_name = "SIZE")]
    memory_high: Option<String>,
    /// Processes and threads
    #[arg(long, value_name = "NUMBER")]
    pids_max: Option<String>,
    /// Rates of a block device, for example "/dev/sda rbps=10MiB wiops=100" or "8:0 wbps=5MiB"; once for each device
    #[arg(long, value_name = "RATES")]
    io_max: Vec<String>,
    /// Part of block devices beside other tenants, from 1 to 10000 [default: 100]
    #[arg(long, value_name = "WEIGHT")]
    io_weight: Option<String>,
}

impl Limits {
    /// As the daemon reads them, checked before it is asked.
    fn texts(&self) -> Result<LimitTexts, Failure> {
        let texts = LimitTexts {
            cpu_max: self.cpu_max.clone(),
            cpu_weight: self.cpu_weight.clone(),
            cpus: self.cpuset.clone(),
            memory_max: self.memory_max.clone(),
            memory_high: self.memory_high.clone(),
            pids_max: self.pids_max.clone(),
            io_max: (!self.io_max.is_empty()).then(|| self.io_max.join("; ")),
            io_weight: self.io_weight.clone(),
        };
        let mut checked = CgroupLimits::default();
        for (name, text) in texts.given() {
            let option = match name.file() {
                "cpuset.cpus" => "cpuset".to_owned(),
                file => file.replace('.', "-"),
            };
            set_limit(&mut checked, name, text)
                .map_err(|error| Failure::usage(format!("--{option}: {error}")))?;
        }
        Ok(texts)
    }
}

/// A port that can be bound.
fn port(text: Option<&str>) -> Result<Option<u16>, Failure> {
    let read = |text: &str| {
        let port = text.parse().ok().filter(|port| *port > 0);
        let shown: String = text.chars().filter(|c| !c.is_control()).take(40).collect();
        port.ok_or_else(|| Failure::usage(format!("--port: `{shown}` is no port from 1 to 65535")))
    };
    text.map(read).transpose()
}
