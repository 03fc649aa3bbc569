//! `pagedctl checkpoint inspect`.

use super::{at, fields};
use crate::context::Context;
use crate::failure::Failure;
use crate::show::bytes;
use crate::table::{Align::Left, Align::Right, Table};
use pagedd_control::{CheckpointCommand, CheckpointShown, Command, Reply};

/// Which checkpoint.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Its name, or its path if there is a `/` in it
    checkpoint: String,
}

/// What is in it.
pub fn run(args: &Args, context: &Context) -> Result<String, Failure> {
    let command = Command::Checkpoint(CheckpointCommand::Inspect(at(&args.checkpoint)?));
    context.ask_patiently(command, |reply| match reply {
        Reply::Checkpoint(shown) => Some(render(shown)),
        _ => None,
    })
}

fn render(shown: &CheckpointShown) -> String {
    let mut about = fields(&shown.checkpoint);
    if shown.damaged_requests > 0 {
        about.push(("damaged", format!("{} requests cannot be read", shown.damaged_requests)));
    }
    let parts = [crate::table::fields(&about), models(shown), tenants(shown), files(shown)];
    parts.join("\n")
}

fn models(shown: &CheckpointShown) -> String {
    let mut table = Table::new([
        ("MODEL", Left),
        ("ARCHITECTURE", Left),
        ("DTYPE", Left),
        ("KV DTYPE", Left),
        ("KERNELS", Left),
        ("BLOCK", Right),
        ("BLOCKS", Right),
        ("DIGEST", Left),
    ]);
    for model in &shown.checkpoint.models {
        table.row([
            model.name.clone(),
            model.architecture.clone(),
            model.dtype.clone(),
            model.kv_dtype.clone(),
            model.kernels.clone(),
            format!("{} tokens, {}", model.block_size, bytes(model.block_bytes)),
            model.blocks.to_string(),
            model.digest.clone(),
        ]);
    }
    table.render()
}

fn tenants(shown: &CheckpointShown) -> String {
    let mut table = Table::new([
        ("TENANT", Left),
        ("MODEL", Left),
        ("KEYS", Right),
        ("LIVE", Right),
        ("PROMPT TOKENS", Right),
        ("OUTPUT TOKENS", Right),
        ("ENDED", Right),
    ]);
    for tenant in &shown.tenants {
        table.row([
            tenant.name.clone(),
            tenant.model.clone(),
            tenant.keys.to_string(),
            tenant.live.to_string(),
            tenant.prompt_tokens.to_string(),
            tenant.output_tokens.to_string(),
            tenant.ended.to_string(),
        ]);
    }
    table.render()
}

fn files(shown: &CheckpointShown) -> String {
    let mut table = Table::new([("FILE", Left), ("SIZE", Right)]);
    for file in &shown.files {
        table.row([file.name.clone(), bytes(file.bytes)]);
    }
    table.render()
}
