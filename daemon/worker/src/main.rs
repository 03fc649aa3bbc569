//! `pagedd-worker`: runs step plans on a device, for the daemon that started it.

use std::process::ExitCode;

use anyhow::Context as _;
use clap::Parser;
use pagedd_wire::Channel;
use pagedd_worker::{arena, plan, selfcheck, serve};
use tracing_subscriber::EnvFilter;

/// The descriptor of the socket that the daemon hands over.
const SOCKET: i32 = 3;

/// Runs step plans of pagedd on a device.
///
/// Started by the pagedd daemon with a socket as descriptor 3; by hand only its commands are of use.
#[derive(Parser)]
#[command(version)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// Number of a GPU that is opened at once, before the daemon says what to load onto it
    #[arg(long, value_name = "N", hide = true)]
    gpu: Option<u32>,
    /// What is logged, as `level` or `module=level,…`
    #[arg(long, env = "PAGEDD_LOG", default_value = "info")]
    log: EnvFilter,
    /// How it is logged
    #[arg(long, env = "PAGEDD_LOG_FORMAT", value_enum, default_value_t = Format::Text)]
    log_format: Format,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum Command {
    /// Check every GPU kernel against the CPU on this machine's own GPU
    ///
    /// Exit code: 0 all right, 1 a kernel is wrong, 3 no GPU can be used.
    Selfcheck(selfcheck::Options),
    /// Sum up what a model takes of its device, before it is loaded, as JSON
    ///
    /// `pagedctl plan` does it for each model of a configuration. Exit code: 0 summed up, 1 the model cannot be read.
    Plan(plan::Options),
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Format {
    Text,
    Json,
}

fn main() -> ExitCode {
    let Args { command, gpu, log, log_format } = Args::parse();
    // A log that cannot be written is no reason to end: the library would say so on the same stderr, and panic.
    let logger = tracing_subscriber::fmt()
        .log_internal_errors(false)
        .with_env_filter(log)
        .with_writer(pagedd_log::Stderr::of_process());
    match log_format {
        Format::Text => logger.with_ansi(false).init(),
        Format::Json => logger.json().init(),
    }
    // The text of a panic may hold values of a request: only its place is logged.
    std::panic::set_hook(Box::new(|panic| {
        let place = panic.location().map(ToString::to_string);
        tracing::error!(place, "panic");
    }));
    match command {
        Some(Command::Selfcheck(options)) => return selfcheck::run(options),
        Some(Command::Plan(options)) => return plan::run(&options),
        None => {}
    }
    #[cfg(feature = "failpoints")]
    let _points = fail::FailScenario::setup();
    #[cfg(feature = "cuda")]
    if let Some(ordinal) = gpu {
        pagedd_worker::gpu::open_ahead(ordinal);
    }
    // Without GPU support nothing opens one.
    let _ = gpu;
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = pagedd_core::said(error.as_ref()), "worker ends");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<()> {
    let socket = arena::inherited_socket(SOCKET)
        .context("no socket on descriptor 3: pagedd-worker is started by the pagedd daemon")?;
    serve::serve(&mut Channel::new(socket)?)?;
    Ok(())
}
