//! `pagedctl checkpoint`, one file per subcommand.

pub mod inspect;
pub mod list;
pub mod restore;
pub mod save;
pub mod verify;

use crate::failure::Failure;
use crate::show::{bytes, time};
use pagedd_control::{CheckpointAt, CheckpointInfo};

/// Which checkpoint: what has a `/` in it is a path, as the shell's directory makes it.
fn at(which: &str) -> Result<CheckpointAt, Failure> {
    if !which.contains('/') {
        return Ok(CheckpointAt { which: which.to_owned() });
    }
    let path = std::path::absolute(which)
        .map_err(|error| Failure::usage(format!("{which}: {error}; name the whole path")))?;
    let path = path.to_str().ok_or_else(|| Failure::usage(format!("{which}: the path is not UTF-8")))?;
    Ok(CheckpointAt { which: path.to_owned() })
}

/// A checkpoint, one field a line.
fn fields(info: &CheckpointInfo) -> Vec<(&'static str, String)> {
    let kv = if info.has_kv() { "saved" } else { "not saved; they are computed again" };
    vec![
        ("checkpoint", info.name.clone()),
        ("path", info.path.clone()),
        ("created", time(info.created_unix)),
        ("pagedd", info.pagedd.clone()),
        ("size", bytes(info.bytes)),
        ("kv blocks", format!("{}, {kv}", info.blocks())),
    ]
}
