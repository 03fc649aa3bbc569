//! `pagedctl tenant remove`.

use super::name;
use crate::context::Context;
use crate::failure::Failure;
use pagedd_control::{Command, Reply, TenantRemove};

/// Which tenant.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Which tenant
    name: String,
    /// Cancel its running requests; without this a tenant that has some is kept
    #[arg(long)]
    force: bool,
}

/// What is gone.
pub fn run(args: &Args, context: &Context) -> Result<String, Failure> {
    let command = Command::TenantRemove(TenantRemove { name: name(&args.name)?, force: args.force });
    context.ask(command, |reply| match reply {
        Reply::TenantRemoved(gone) if gone.cancelled > 0 => {
            Some(format!("tenant {} is removed; {} requests were cancelled\n", gone.name, gone.cancelled))
        }
        Reply::TenantRemoved(gone) => Some(format!("tenant {} is removed\n", gone.name)),
        _ => None,
    })
}
