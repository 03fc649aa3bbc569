//! `pagedctl checkpoint list`.

use crate::context::Context;
use crate::failure::Failure;
use crate::show::{UNKNOWN, bytes, time};
use crate::table::{Align::Left, Align::Right, Table};
use pagedd_control::{CheckpointCommand, CheckpointListing, CheckpointState, Command, Reply};

/// Every checkpoint, one a line, those too that cannot be used.
pub fn run(context: &Context) -> Result<String, Failure> {
    context.ask_patiently(Command::Checkpoint(CheckpointCommand::List), |reply| match reply {
        Reply::Checkpoints(listed) if listed.checkpoints.is_empty() => {
            Some("no checkpoints; make one with `pagedctl checkpoint save`\n".to_owned())
        }
        Reply::Checkpoints(listed) => Some(table(&listed.checkpoints).render()),
        _ => None,
    })
}

fn table(checkpoints: &[CheckpointListing]) -> Table<7> {
    let mut table = Table::new([
        ("CHECKPOINT", Left),
        ("CREATED", Left),
        ("PAGEDD", Left),
        ("SIZE", Right),
        ("BLOCKS", Right),
        ("KV", Left),
        ("STATE", Left),
    ]);
    for CheckpointListing { name, state } in checkpoints {
        let unknown = || UNKNOWN.to_owned();
        table.row(match state {
            CheckpointState::Complete(info) => [
                name.clone(),
                time(info.created_unix),
                info.pagedd.clone(),
                bytes(info.bytes),
                info.blocks().to_string(),
                if info.has_kv() { "yes" } else { "no" }.to_owned(),
                "complete".to_owned(),
            ],
            CheckpointState::Damaged { error } => {
                let state = format!("damaged: {error}");
                [name.clone(), unknown(), unknown(), unknown(), unknown(), unknown(), state]
            }
        });
    }
    table
}
