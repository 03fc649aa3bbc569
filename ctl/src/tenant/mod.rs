//! `pagedctl tenant`, one file per subcommand.

pub mod add;
pub mod list;
pub mod remove;
pub mod resume;
pub mod set;
pub mod show;
pub mod suspend;

use crate::failure::Failure;
use clap::ValueEnum;
use pagedd_config::{Amount, TenantName};

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

/// A port that can be bound.
fn port(text: Option<&str>) -> Result<Option<u16>, Failure> {
    let read = |text: &str| {
        let port = text.parse().ok().filter(|port| *port > 0);
        let shown: String = text.chars().filter(|c| !c.is_control()).take(40).collect();
        port.ok_or_else(|| Failure::usage(format!("--port: `{shown}` is no port from 1 to 65535")))
    };
    text.map(read).transpose()
}
