//! `pagedctl checkpoint restore`.

use super::at;
use crate::context::Context;
use crate::failure::Failure;
use pagedd_control::{CheckpointCommand, Command, Reply};

/// Which checkpoint.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Its name, or its path if there is a `/` in it
    checkpoint: String,
}

/// What happens now.
pub fn run(args: &Args, context: &Context) -> Result<String, Failure> {
    let command = Command::Checkpoint(CheckpointCommand::Restore(at(&args.checkpoint)?));
    context.ask_patiently(command, |reply| match reply {
        Reply::CheckpointRestoring(restoring) => Some(format!(
            "pagedd starts anew from checkpoint {}\nthe present databases are kept in {}/before-<time>; the log names it\n",
            restoring.checkpoint.name, restoring.state_dir
        )),
        _ => None,
    })
}
