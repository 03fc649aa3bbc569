//! `pagedctl key create`.

use crate::context::Context;
use crate::failure::Failure;
use crate::show::or_unknown;
use crate::table::fields;
use crate::tenant::name;
use pagedd_control::{Command, KeyCreate, Reply};

/// The key to be made.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Whose key
    tenant: String,
    /// What you call it; up to 100 characters
    #[arg(long)]
    label: Option<String>,
}

/// The key: the only time that it is shown.
pub fn run(args: &Args, context: &Context) -> Result<String, Failure> {
    let tenant = name(&args.tenant)?;
    if let Some(label) = &args.label
        && (label.is_empty()
            || label.chars().count() > pagedd_control::MAX_LABEL
            || label.chars().any(char::is_control))
    {
        return Err(Failure::usage("--label: a label has 1 to 100 characters and no control characters"));
    }
    let command = Command::KeyCreate(KeyCreate { tenant, label: args.label.clone() });
    context.ask(command, |reply| match reply {
        Reply::KeyCreated(key) => Some(fields(&[
            ("tenant", key.tenant.clone()),
            ("id", key.id.to_string()),
            ("label", or_unknown(key.label.as_ref())),
            ("key", format!("{}  (shown only now)", key.key.reveal())),
        ])),
        _ => None,
    })
}
