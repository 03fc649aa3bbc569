//! `pagedctl status`.

use crate::context::Context;
use crate::failure::Failure;
use crate::reload::note;
use crate::show::{admission, age, bytes, model_state, or_unknown, uptime};
use crate::table::{Align::Left, Align::Right, Table, fields};
use crate::tenant::list;
use pagedd_control::{Command, Durable, ModelStatus, Reply, SandboxState, StatusInfo, Walls};

/// The daemon, its models and its tenants.
pub fn run(context: &Context) -> Result<String, Failure> {
    context.ask(Command::Status, |reply| match reply {
        Reply::Status(status) => Some(render(status)),
        _ => None,
    })
}

fn render(status: &StatusInfo) -> String {
    let mut about = vec![
        ("pagedd", format!("{}, pid {}, up {}", status.version, status.pid, uptime(status.uptime_s))),
        (
            "config",
            status.config.clone().unwrap_or_else(|| "defaults".to_owned()) + &note(status.reload.as_ref()),
        ),
        ("state", status.state_dir.clone()),
        ("supervisor", status.supervisor.as_str().to_owned()),
        ("admission", admission(&status.drain)),
        (
            "durable",
            match &status.durable {
                Durable::Yes => "yes".to_owned(),
                Durable::No { reason, records, .. } => format!("no: {reason}; {records} records not written"),
            },
        ),
        (
            "walls",
            match &status.walls {
                Walls::Full => "full".to_owned(),
                Walls::Reduced { reason } => format!("reduced: {reason}"),
            },
        ),
        (
            "sandbox",
            match &status.sandbox {
                SandboxState::Full => "full".to_owned(),
                SandboxState::Reduced { missing } => {
                    let missing: Vec<&str> = missing.iter().map(|part| part.as_str()).collect();
                    format!("reduced: gateways are without {}", missing.join(", "))
                }
            },
        ),
    ];
    if status.drain.too_large > 0 {
        let waits = format!(
            "{} requests of an earlier start need a larger max_model_len or kv_memory; the log names each",
            status.drain.too_large
        );
        about.push(("too large", waits));
    }
    let daemon = fields(&about);
    let models = if status.models.is_empty() { "no models\n".to_owned() } else { models(&status.models) };
    let tenants = if status.tenants.is_empty() {
        "no tenants\n".to_owned()
    } else {
        list::table(&status.tenants).render()
    };
    format!("{daemon}\n{models}\n{tenants}")
}

fn models(models: &[ModelStatus]) -> String {
    let mut what = Table::new([
        ("MODEL", Left),
        ("STATE", Left),
        ("ARCHITECTURE", Left),
        ("DEVICE", Left),
        ("DTYPE", Left),
        ("KV", Left),
        ("KERNELS", Left),
        ("THREADS", Right),
        ("WEIGHTS", Right),
        ("CONTEXT", Right),
        ("WORKER", Right),
        ("RESTARTS", Right),
    ]);
    let mut load = Table::new([
        ("MODEL", Left),
        ("BLOCKS", Right),
        ("FREE", Right),
        ("CACHED", Right),
        ("HELD", Right),
        ("BLOCK SIZE", Right),
        ("RUNNING", Right),
        ("WAITING", Right),
        ("STEPS", Right),
        ("LAST STEP", Right),
    ]);
    let mut memory = Table::new([
        ("MODEL", Left),
        ("WEIGHTS", Right),
        ("KV", Right),
        ("SCRATCH", Right),
        ("PINNED", Right),
        ("CGROUP", Right),
    ]);
    for model in models {
        let size = |size: Option<u64>| or_unknown(size.map(bytes));
        memory.row([
            model.name.clone(),
            size(model.weight_bytes),
            size(model.kv_bytes),
            size(model.scratch_bytes),
            size(model.pinned_bytes),
            size(model.memory_bytes),
        ]);
        what.row([
            model.name.clone(),
            model_state(&model.state),
            or_unknown(model.architecture.as_ref()),
            model.device.clone(),
            or_unknown(model.dtype.as_ref()),
            or_unknown(model.kv_dtype.as_ref()),
            or_unknown(model.kernels.as_ref()),
            or_unknown(model.threads),
            or_unknown(model.weight_bytes.map(bytes)),
            or_unknown(model.max_model_len),
            or_unknown(model.worker_pid),
            model.restarts.to_string(),
        ]);
        load.row([
            model.name.clone(),
            or_unknown(model.blocks_total),
            model.blocks_free.to_string(),
            model.blocks_cached.to_string(),
            model.blocks_held.to_string(),
            model.block_size.to_string(),
            model.running.to_string(),
            model.waiting.to_string(),
            model.steps.to_string(),
            model.last_step_age_ms.map_or_else(|| "never".to_owned(), |ms| format!("{} ago", age(ms))),
        ]);
    }
    format!("{}\n{}\n{}", what.render(), load.render(), memory.render())
}
