//! `pagedctl tenant resume`.

use super::name;
use crate::context::Context;
use crate::failure::Failure;
use pagedd_control::{Command, Reply, TenantName};

/// Which tenant.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Which tenant
    name: String,
}

/// What holds from now on.
pub fn run(args: &Args, context: &Context) -> Result<String, Failure> {
    let command = Command::TenantResume(TenantName { name: name(&args.name)? });
    context.ask(command, |reply| match reply {
        Reply::Tenant(shown) => Some(format!("tenant {} takes requests again\n", shown.tenant.name)),
        _ => None,
    })
}
