//! `pagedctl`: the command line of pagedd.
//!
//! **Owns** what an operator types and reads. **Never** opens the daemon's files: everything but `config check` and `plan`, which need no
//! daemon, goes through the admin socket, and what is refused there is printed as it came.

mod checkpoint;
mod cli;
mod completions;
mod config_check;
mod context;
mod drain;
mod failure;
mod key;
mod metrics;
mod plan;
mod reload;
mod show;
mod status;
mod table;
mod tenant;
mod usage;

use context::{Environment, Outcome};
use std::io::{self, Write};
use std::process::ExitCode;

/// The program.
pub fn main() -> ExitCode {
    let environment = Environment::of_process();
    let outcome = cli::run(std::env::args_os(), &environment);
    match print(&outcome) {
        // A reader that has seen enough (`pagedctl … | head -1`) is no failure.
        Ok(()) => ExitCode::from(outcome.code),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::from(outcome.code),
        Err(_) => ExitCode::from(failure::INTERNAL),
    }
}

/// What can be typed, for manual pages and completions.
pub fn command() -> clap::Command {
    <cli::Cli as clap::CommandFactory>::command()
}

fn print(outcome: &Outcome) -> io::Result<()> {
    io::stderr().write_all(outcome.stderr.as_bytes())?;
    let mut stdout = io::stdout();
    stdout.write_all(outcome.stdout.as_bytes())?;
    stdout.flush()
}

#[cfg(test)]
mod tests;
