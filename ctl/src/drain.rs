//! `pagedctl drain` and `pagedctl undrain`.

use std::thread;
use std::time::{Duration, Instant};

use crate::context::Context;
use crate::failure::Failure;
use crate::show;
use pagedd_config::Span;
use pagedd_control::{Client, Command, Drain, DrainInfo, DrainState, Reply};

/// Between two looks at what is left.
const PAUSE: Duration = Duration::from_millis(200);

/// How long to wait.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Wait so long at most, for example 30s or 5m, or a number of seconds; 0 does not wait [default: no limit]
    #[arg(long, value_name = "SPAN", value_parser = span)]
    timeout: Option<Duration>,
}

fn span(text: &str) -> Result<Duration, String> {
    if let Ok(seconds) = text.parse::<u32>() {
        return Ok(Duration::from_secs(seconds.into()));
    }
    text.parse::<Span>().map(|span| span.0).map_err(|error| error.to_string())
}

/// What is left, once nothing is; meanwhile the context is told of each change.
pub fn run(args: &Args, context: &Context) -> Result<String, Failure> {
    let start = Instant::now();
    let timeout_ms = args.timeout.map(|timeout| u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX));
    let mut client = Client::connect(&context.socket)?;
    let mut info = match client.call(Command::Drain(Drain { timeout_ms }))? {
        Reply::Drain(info) => info,
        reply => return Err(Failure::wrong_reply("drain", &reply)),
    };
    let mut told = None;
    while !info.is_empty() {
        if let DrainState::Admitting = info.state {
            return Err(Failure::TakenBack);
        }
        let left = args.timeout.map(|timeout| timeout.saturating_sub(start.elapsed()));
        if left == Some(Duration::ZERO) {
            let reply = print(&info, context)?;
            return Err(Failure::Unfinished { requests: info.requests, streams: info.streams, reply });
        }
        if told.as_ref() != Some(&info) {
            context.tell(&progress(&info, context)?);
            told = Some(info);
        }
        thread::sleep(left.unwrap_or(PAUSE).min(PAUSE));
        info = match client.call(Command::Status)? {
            Reply::Status(status) => status.drain,
            reply => return Err(Failure::wrong_reply("status", &reply)),
        };
    }
    print(&info, context)
}

/// Takes requests again.
pub fn undo(context: &Context) -> Result<String, Failure> {
    context.ask(Command::Undrain, |reply| match reply {
        Reply::Drain(_) => Some("the daemon takes requests again\n".to_owned()),
        _ => None,
    })
}

fn print(info: &DrainInfo, context: &Context) -> Result<String, Failure> {
    if context.json {
        return Ok(serde_json::to_string_pretty(&Reply::Drain(info.clone()))? + "\n");
    }
    Ok(if info.is_empty() {
        "nothing is left; the daemon stays up and takes no requests until `pagedctl undrain` or its next start\n".to_owned()
    } else {
        format!("{}\n", show::left(info))
    })
}

/// One line.
fn progress(info: &DrainInfo, context: &Context) -> Result<String, Failure> {
    if context.json {
        return Ok(serde_json::to_string(&Reply::Drain(info.clone()))? + "\n");
    }
    Ok(format!("draining: {}\n", show::left(info)))
}
