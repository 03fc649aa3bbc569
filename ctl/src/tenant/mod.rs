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
use pagedd_config::{Amount, MAX_RETENTION, Span, SpanError, TenantName};

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

/// A port that can be bound.
fn port(text: Option<&str>) -> Result<Option<u16>, Failure> {
    let read = |text: &str| {
        let port = text.parse().ok().filter(|port| *port > 0);
        let shown: String = text.chars().filter(|c| !c.is_control()).take(40).collect();
        port.ok_or_else(|| Failure::usage(format!("--port: `{shown}` is no port from 1 to 65535")))
    };
    text.map(read).transpose()
}
