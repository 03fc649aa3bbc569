//! `pagedctl tenant show`.

use super::name;
use crate::context::Context;
use crate::failure::Failure;
use crate::show;
use pagedd_control::{Command, Reply, TenantName};

/// Which tenant.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Which tenant
    name: String,
}

/// The tenant, one field a line.
pub fn run(args: &Args, context: &Context) -> Result<String, Failure> {
    let command = Command::TenantShow(TenantName { name: name(&args.name)? });
    context.ask(command, |reply| match reply {
        Reply::Tenant(shown) => Some(show::tenant(shown)),
        _ => None,
    })
}
