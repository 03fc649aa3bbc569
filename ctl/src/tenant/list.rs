//! `pagedctl tenant list`.

use crate::context::Context;
use crate::failure::Failure;
use crate::show::{on_or_off, tenant_state};
use crate::table::{Align::Left, Align::Right, Table};
use pagedd_control::{Command, Reply, TenantInfo};

/// Every tenant, one a line.
pub fn run(context: &Context) -> Result<String, Failure> {
    context.ask(Command::TenantList, |reply| match reply {
        Reply::Tenants(listed) if listed.tenants.is_empty() => {
            Some("no tenants; make one with `pagedctl tenant add NAME`\n".to_owned())
        }
        Reply::Tenants(listed) => Some(table(&listed.tenants).render()),
        _ => None,
    })
}

/// Tenants as a table.
pub fn table(tenants: &[TenantInfo]) -> Table<13> {
    let mut table = Table::new([
        ("TENANT", Left),
        ("STATE", Left),
        ("PORT", Right),
        ("MODEL", Left),
        ("KV FLOOR", Right),
        ("KV CEILING", Right),
        ("HELD", Right),
        ("CACHED", Right),
        ("RUNNING", Right),
        ("WAITING", Right),
        ("KEYS", Right),
        ("LOOKUP", Left),
        ("GATEWAY", Right),
    ]);
    for tenant in tenants {
        table.row([
            tenant.name.clone(),
            tenant_state(&tenant.state),
            tenant.port.to_string(),
            tenant.model.clone(),
            tenant.share.floor.clone(),
            tenant.share.ceiling.clone(),
            tenant.share.held_blocks.to_string(),
            tenant.share.cached_blocks.to_string(),
            tenant.running.to_string(),
            tenant.waiting.to_string(),
            if tenant.auth { tenant.keys.to_string() } else { "open".to_owned() },
            on_or_off(tenant.prompt_lookup),
            crate::show::or_unknown(tenant.gateway.pid),
        ]);
    }
    table
}
