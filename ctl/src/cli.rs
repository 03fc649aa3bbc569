//! The command line: what can be typed.

use crate::context::{Context, Environment, Outcome};
use crate::failure::{self, Failure};
use crate::{
    checkpoint, completions, config_check, drain, key, metrics, plan, reload, status, tenant, usage,
};
use clap::{Parser, Subcommand};
use std::ffi::OsString;
use std::path::PathBuf;

/// Manages pagedd: tenants, their keys, and what the daemon is doing.
#[derive(Debug, Parser)]
#[command(name = "pagedctl", version, after_help = failure::HELP, propagate_version = true)]
pub struct Cli {
    /// Path of the daemon's admin socket [default: /run/pagedd/admin.sock, else /var/lib/pagedd/admin.sock]
    #[arg(long, global = true, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// Print the daemon's reply as JSON
    #[arg(long, global = true)]
    json: bool,

    #[command(subcommand)]
    command: Top,
}

#[derive(Debug, Subcommand)]
enum Top {
    /// Make, change and list tenants
    #[command(subcommand)]
    Tenant(Box<Tenant>),
    /// Make, list and revoke a tenant's keys
    #[command(subcommand)]
    Key(Key),
    /// Refuse new requests of all tenants, and wait until nothing is left; the daemon stays up
    Drain(drain::Args),
    /// Take requests again
    Undrain,
    /// Have the daemon read its configuration file again, as SIGHUP does; says what takes effect, and when
    Reload,
    /// Show the daemon, its models and its tenants
    Status,
    /// Print metrics in Prometheus' text format
    Metrics,
    /// Show what tenants have used: requests and tokens, for their bill
    Usage(usage::Args),
    /// Save, show and take up checkpoints of everything: tenants, keys, requests, KV blocks
    #[command(subcommand)]
    Checkpoint(Checkpoint),
    /// Check a configuration file
    #[command(subcommand)]
    Config(Config),
    /// Say what a configuration's models take of their devices, without starting anything
    Plan(plan::Args),
    /// Print shell completions
    Completions(completions::Args),
}

#[derive(Debug, Subcommand)]
enum Tenant {
    /// Make a tenant with its own port, and its first key
    Add(tenant::add::Args),
    /// Change a tenant
    Set(tenant::set::Args),
    /// List tenants
    List,
    /// Show a tenant
    Show(tenant::show::Args),
    /// Refuse a tenant's new requests; running ones go on
    Suspend(tenant::suspend::Args),
    /// Take a suspended tenant's requests again
    Resume(tenant::resume::Args),
    /// End a tenant: its keys and its port are gone
    Remove(tenant::remove::Args),
}

#[derive(Debug, Subcommand)]
enum Key {
    /// Make a further key; it is shown once
    Create(key::create::Args),
    /// List a tenant's keys, without their secrets
    List(key::list::Args),
    /// Revoke a key: new requests with it are refused at once, streams that are open go on to their end
    Revoke(key::revoke::Args),
}

#[derive(Debug, Subcommand)]
enum Checkpoint {
    /// Write a checkpoint while everything goes on
    Save(checkpoint::save::Args),
    /// List the checkpoints of the state directory
    List,
    /// Show what is in a checkpoint
    Inspect(checkpoint::inspect::Args),
    /// Read all of a checkpoint and say what is wrong with it
    Verify(checkpoint::verify::Args),
    /// Put a checkpoint in the place of the present state, which is kept aside; the daemon starts anew
    Restore(checkpoint::restore::Args),
}

#[derive(Debug, Subcommand)]
enum Config {
    /// Check a configuration file without starting anything
    Check(config_check::Args),
}

/// Parses `args` (the program's name first) and carries it out.
pub fn run(args: impl IntoIterator<Item = OsString>, environment: &Environment) -> Outcome {
    let cli = match Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(error) => {
            let text = error.render().to_string();
            return if error.use_stderr() {
                Outcome { code: failure::USAGE, stdout: String::new(), stderr: text }
            } else {
                Outcome { code: failure::OK, stdout: text, stderr: String::new() }
            };
        }
    };
    match dispatch(cli, environment) {
        Ok(stdout) => Outcome { code: failure::OK, stdout, stderr: String::new() },
        Err(failure) => {
            Outcome { code: failure.code(), stdout: failure.reply().to_owned(), stderr: failure.text() }
        }
    }
}

fn dispatch(cli: Cli, environment: &Environment) -> Result<String, Failure> {
    let context =
        Context { socket: environment.socket(cli.socket), json: cli.json, progress: environment.progress };
    match cli.command {
        Top::Tenant(tenant) => match *tenant {
            Tenant::Add(args) => tenant::add::run(&args, &context),
            Tenant::Set(args) => tenant::set::run(&args, &context),
            Tenant::List => tenant::list::run(&context),
            Tenant::Show(args) => tenant::show::run(&args, &context),
            Tenant::Suspend(args) => tenant::suspend::run(&args, &context),
            Tenant::Resume(args) => tenant::resume::run(&args, &context),
            Tenant::Remove(args) => tenant::remove::run(&args, &context),
        },
        Top::Key(Key::Create(args)) => key::create::run(&args, &context),
        Top::Key(Key::List(args)) => key::list::run(&args, &context),
        Top::Key(Key::Revoke(args)) => key::revoke::run(&args, &context),
        Top::Drain(args) => drain::run(&args, &context),
        Top::Undrain => drain::undo(&context),
        Top::Reload => reload::run(&context),
        Top::Status => status::run(&context),
        Top::Metrics => metrics::run(&context),
        Top::Usage(args) => usage::run(&args, &context),
        Top::Checkpoint(Checkpoint::Save(args)) => checkpoint::save::run(&args, &context),
        Top::Checkpoint(Checkpoint::List) => checkpoint::list::run(&context),
        Top::Checkpoint(Checkpoint::Inspect(args)) => checkpoint::inspect::run(&args, &context),
        Top::Checkpoint(Checkpoint::Verify(args)) => checkpoint::verify::run(&args, &context),
        Top::Checkpoint(Checkpoint::Restore(args)) => checkpoint::restore::run(&args, &context),
        Top::Config(Config::Check(args)) => config_check::run(&args, &context, environment),
        Top::Plan(args) => plan::run(&args, &context, environment),
        Top::Completions(args) => Ok(completions::run(&args)),
    }
}
