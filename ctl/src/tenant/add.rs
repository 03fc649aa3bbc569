//! `pagedctl tenant add`.

use super::{Limits, Switch, amount, name, port, quotas, retention};
use crate::context::Context;
use crate::failure::Failure;
use crate::show;
use crate::table::fields;
use pagedd_config::ModelName;
use pagedd_control::{Command, Reply, TenantAdded, TenantSpec};

/// The tenant to be made.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Its name: 1 to 63 characters of a-z, 0-9 and -, beginning with a letter
    name: String,
    /// Its TCP port [default: the next free one from 8101 up]
    #[arg(long)]
    port: Option<String>,
    /// The model it uses [default: the only one that is configured]
    #[arg(long)]
    model: Option<String>,
    /// KV memory that is guaranteed to it, for example 20%, 2GiB or "4096 tokens" [default: 0%]
    #[arg(long, value_name = "AMOUNT")]
    kv_floor: Option<String>,
    /// KV memory that it can hold at most [default: 100%]
    #[arg(long, value_name = "AMOUNT")]
    kv_ceiling: Option<String>,
    /// Take requests without a key
    #[arg(long)]
    no_auth: bool,
    /// Whether its sequences guess what they say next, several tokens in one step [default: as the model's configuration says]
    #[arg(long)]
    prompt_lookup: Option<Switch>,
    /// How long its requests are kept after their end, for example 10m, or 0s [default: as the configuration says]
    #[arg(long, value_name = "SPAN")]
    retention: Option<String>,
    #[command(flatten)]
    quotas: quotas::QuotaArgs,
    #[command(flatten)]
    limits: Limits,
}

/// The tenant, its key and a line to try it with.
pub fn run(args: &Args, context: &Context) -> Result<String, Failure> {
    let model = args.model.as_deref().map(str::parse::<ModelName>).transpose()?;
    let spec = TenantSpec {
        name: name(&args.name)?,
        port: port(args.port.as_deref())?,
        model: model.map(|model| model.to_string()),
        kv_floor: amount("--kv-floor", args.kv_floor.as_deref())?,
        kv_ceiling: amount("--kv-ceiling", args.kv_ceiling.as_deref())?,
        no_auth: args.no_auth,
        prompt_lookup: args.prompt_lookup.map(bool::from),
        retention: retention(args.retention.as_deref())?,
        quotas: args.quotas.changes()?,
        limits: args.limits.texts()?.into(),
    };
    context.ask(Command::TenantAdd(spec), |reply| match reply {
        Reply::TenantAdded(added) => Some(render(added)),
        _ => None,
    })
}

fn render(TenantAdded { tenant, key, notes }: &TenantAdded) -> String {
    let secret = key.as_ref().map(|key| key.key.reveal());
    let mut rows = vec![
        ("tenant", tenant.name.clone()),
        ("url", tenant.url.clone()),
        ("port", tenant.port.to_string()),
        ("model", tenant.model.clone()),
        ("kv floor", show::floor(&tenant.share)),
        ("kv ceiling", show::ceiling(&tenant.share)),
    ];
    rows.extend(show::quotas(&tenant.quotas));
    rows.push(match secret {
        Some(secret) => ("key", format!("{secret}  (shown only now)")),
        None => ("key", "none needed: anyone who reaches the port may use it".to_owned()),
    });
    let authorization =
        secret.map_or_else(String::new, |secret| format!(" -H 'Authorization: Bearer {secret}'"));
    format!(
        "{}{}\nTry it:\ncurl -N {}/v1/chat/completions{authorization} -H 'Content-Type: application/json' -d \
         '{{\"model\":\"{}\",\"stream\":true,\"temperature\":0,\"max_tokens\":200,\"messages\":[{{\"role\":\"user\",\"content\":\"Hello\"}}]}}'\n",
        fields(&rows),
        show::notes(notes),
        tenant.url,
        tenant.model,
    )
}
