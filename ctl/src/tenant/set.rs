//! `pagedctl tenant set`.

use super::{Limits, Switch, amount, name, port, quotas, retention};
use crate::context::Context;
use crate::failure::Failure;
use crate::show;
use pagedd_control::{Command, Reply, TenantChanges, TenantSet};

/// What changes.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Which tenant
    name: String,
    /// Another TCP port; streams on the old one end and can be attached again on the new one
    #[arg(long)]
    port: Option<String>,
    /// Other KV memory that is guaranteed to it; 0% takes it away
    #[arg(long, value_name = "AMOUNT")]
    kv_floor: Option<String>,
    /// Other KV memory that it can hold at most; 100% takes the limit away
    #[arg(long, value_name = "AMOUNT")]
    kv_ceiling: Option<String>,
    /// Whether requests need a key
    #[arg(long)]
    auth: Option<Switch>,
    /// Whether its sequences guess what they say next, several tokens in one step
    #[arg(long)]
    prompt_lookup: Option<Switch>,
    /// How long its requests are kept after their end, for example 10m, or 0s; `default` is what the configuration says
    #[arg(long, value_name = "SPAN")]
    retention: Option<String>,
    #[command(flatten)]
    quotas: quotas::QuotaArgs,
    #[command(flatten)]
    limits: Limits,
    /// Set limits below what is in use, too: the kernel takes back what it can, and may end the gateway
    #[arg(long)]
    force: bool,
}

/// The tenant as it is then.
pub fn run(args: &Args, context: &Context) -> Result<String, Failure> {
    let changes = TenantChanges {
        port: port(args.port.as_deref())?,
        kv_floor: amount("--kv-floor", args.kv_floor.as_deref())?,
        kv_ceiling: amount("--kv-ceiling", args.kv_ceiling.as_deref())?,
        auth: args.auth.map(bool::from),
        prompt_lookup: args.prompt_lookup.map(bool::from),
        retention: retention(args.retention.as_deref())?,
        quotas: args.quotas.changes()?,
        limits: args.limits.texts()?.into(),
    };
    let name = name(&args.name)?;
    if changes.is_empty() {
        return Err(Failure::Usage {
            message: format!("nothing to change about `{name}`"),
            hint: Some(
                "give --port, --kv-floor, --kv-ceiling, --auth, --prompt-lookup, --retention, a quota or a limit such as --cpu-max"
                    .to_owned(),
            ),
        });
    }
    context.ask(Command::TenantSet(TenantSet { name, changes, force: args.force }), |reply| match reply {
        Reply::Tenant(shown) => Some(format!("{}{}", show::tenant(shown), show::notes(&shown.notes))),
        _ => None,
    })
}
