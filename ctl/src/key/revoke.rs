//! `pagedctl key revoke`.

use crate::context::Context;
use crate::failure::Failure;
use crate::tenant::name;
use pagedd_control::{Command, KeyRevoke, Reply};

/// Which key.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Whose key
    tenant: String,
    /// Which key, by its id in `pagedctl key list`
    #[arg(value_parser = id)]
    id: u32,
}

fn id(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| "a key's id is a number, as `pagedctl key list TENANT` shows it".to_owned())
}

/// What holds from now on.
pub fn run(args: &Args, context: &Context) -> Result<String, Failure> {
    let tenant = name(&args.tenant)?;
    let command = Command::KeyRevoke(KeyRevoke { tenant: tenant.clone(), id: args.id });
    context.ask(command, |reply| match reply {
        Reply::KeyRevoked(key) => {
            Some(format!("key {} ({}…) of tenant {tenant} is revoked\n", key.id, key.prefix))
        }
        _ => None,
    })
}
