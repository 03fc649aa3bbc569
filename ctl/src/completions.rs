//! `pagedctl completions`.

use crate::cli::Cli;
use clap::CommandFactory;
use clap_complete::Shell;

/// Which shell.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The shell, for example: `pagedctl completions bash > /etc/bash_completion.d/pagedctl`
    shell: Shell,
}

/// The script.
pub fn run(args: &Args) -> String {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "pagedctl", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}
