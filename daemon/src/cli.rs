//! The command line of `pagedd`: what can be typed. Also read by `examples/pagedd_pages.rs`, which makes the manual.

use std::path::PathBuf;

use clap::{Parser, Subcommand};
use pagedd_config::ComputeDtype;

use crate::bench;

const AFTER_HELP: &str = "\
Exit codes:
  0   ended by SIGTERM or SIGINT
  1   failed while running; the log says why, and a supervisor may start it again
  2   wrong usage
  69  a tenant's port or a model's GPU is in use
  71  the host refused something: a socket, a process
  73  the state directory, control.db or journal.db cannot be used, or another pagedd uses it; or a checkpoint is refused
  78  the configuration is wrong, or requires cgroups that the host does not give; nothing was started";

/// Serves large language models to many tenants, each on its own port.
#[derive(Parser, Debug)]
#[command(name = "pagedd", version, about, after_help = AFTER_HELP, args_conflicts_with_subcommands = true)]
pub struct Cli {
    /// Something else than to serve.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Configuration file [default: /etc/pagedd/pagedd.yaml if it exists]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Where databases, sockets and locks are; overrides the configuration
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Arithmetic of every model; overrides the configuration. `f32` computes in float32 throughout
    #[arg(long, value_name = "auto|f32", value_parser = dtype)]
    pub dtype: Option<ComputeDtype>,
    /// Start from the checkpoint in this directory, in the place of the present state, which is kept aside
    #[arg(long, value_name = "PATH")]
    pub reload_checkpoint: Option<PathBuf>,
}

/// What else the program can do.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Measures the engine of a model by itself: no port, no database
    Bench(bench::Options),
}

fn dtype(text: &str) -> Result<ComputeDtype, String> {
    match text {
        "auto" => Ok(ComputeDtype::Auto),
        "f32" => Ok(ComputeDtype::F32),
        _ => Err("use `auto` or `f32`".to_owned()),
    }
}
