//! `pagedctl checkpoint save`.

use super::fields;
use crate::context::Context;
use crate::failure::Failure;
use crate::show::time;
use pagedd_control::{CheckpointCommand, CheckpointSave, Command, Reply};
use std::time::{SystemTime, UNIX_EPOCH};

/// The checkpoint to be written.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Its name, of A-Z, a-z, 0-9, `.`, `_` and `-` [default: the time]
    name: Option<String>,
    /// Save the bytes of KV blocks too, so that nothing of them is computed again
    #[arg(long)]
    kv: bool,
}

/// What was written, and how it is taken up.
pub fn run(args: &Args, context: &Context) -> Result<String, Failure> {
    let name = args.name.clone().unwrap_or_else(now);
    let command = Command::Checkpoint(CheckpointCommand::Save(CheckpointSave { name, kv: args.kv }));
    context.ask_patiently(command, |reply| match reply {
        Reply::CheckpointSaved(info) => {
            let fields = crate::table::fields(&fields(info));
            Some(format!("{fields}\ntake it up with `pagedctl checkpoint restore {}`\n", info.name))
        }
        _ => None,
    })
}

/// The time as a name: `20261130-021500`.
fn now() -> String {
    let unix = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64);
    let digits: String = time(unix).chars().filter(char::is_ascii_digit).collect();
    let (day, second) = digits.split_at(digits.len().saturating_sub(6));
    format!("{day}-{second}")
}
