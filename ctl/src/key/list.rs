//! `pagedctl key list`.

use crate::context::Context;
use crate::failure::Failure;
use crate::show::{or_unknown, time};
use crate::table::{Align::Left, Align::Right, Table};
use crate::tenant::name;
use pagedd_control::{Command, KeyList, KeyListed, Reply};

/// Whose keys.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Whose keys
    tenant: String,
}

/// The keys, one a line.
pub fn run(args: &Args, context: &Context) -> Result<String, Failure> {
    let command = Command::KeyList(KeyList { tenant: name(&args.tenant)? });
    context.ask(command, |reply| match reply {
        Reply::Keys(listed) => Some(render(listed)),
        _ => None,
    })
}

fn render(listed: &KeyListed) -> String {
    if listed.keys.is_empty() {
        return format!("tenant {0} has no keys; make one with `pagedctl key create {0}`\n", listed.tenant);
    }
    let mut table =
        Table::new([("ID", Right), ("PREFIX", Left), ("LABEL", Left), ("CREATED", Left), ("REVOKED", Left)]);
    for key in &listed.keys {
        table.row([
            key.id.to_string(),
            format!("{}…", key.prefix),
            or_unknown(key.label.as_ref()),
            time(key.created_unix),
            or_unknown(key.revoked_unix.map(time)),
        ]);
    }
    table.render()
}
