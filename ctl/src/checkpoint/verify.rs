//! `pagedctl checkpoint verify`.

use super::at;
use crate::context::Context;
use crate::failure::Failure;
use crate::show::bytes;
use pagedd_control::{CheckpointCommand, Command, Reply};

/// Which checkpoint.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Its name, or its path if there is a `/` in it
    checkpoint: String,
}

/// That nothing is wrong with it; what is wrong comes as a refusal.
pub fn run(args: &Args, context: &Context) -> Result<String, Failure> {
    let command = Command::Checkpoint(CheckpointCommand::Verify(at(&args.checkpoint)?));
    context.ask_patiently(command, |reply| match reply {
        Reply::CheckpointWhole(info) => {
            Some(format!("checkpoint {} is whole: {} were read\n", info.name, bytes(info.bytes)))
        }
        _ => None,
    })
}
