//! `pagedd-gateway`: the template process of a model, from which every gateway is forked.
//!
//! Started by the daemon with one end of a socket pair as fd 3.

use std::os::unix::net::UnixStream;
use std::process::ExitCode;

use clap::Parser;
use pagedd_gateway::template::{self, Outcome};
use tracing::error;
use tracing_subscriber::EnvFilter;

/// The fd that the daemon placed its socket at.
const SOCKET: i32 = 3;

/// Serves tenants' HTTP ports. Started by pagedd, with a socket as fd 3; not by hand.
#[derive(Parser, Debug)]
#[command(name = "pagedd-gateway", version)]
struct Args {
    /// What is logged, as `level` or `module=level,…`
    #[arg(long, env = "PAGEDD_LOG", default_value = "info")]
    log: String,
    /// How it is logged
    #[arg(long, env = "PAGEDD_LOG_FORMAT", value_enum, default_value_t = Format::Text)]
    log_format: Format,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Format {
    Text,
    Json,
}

fn main() -> ExitCode {
    // Before anything else opens a file.
    let socket = pagedd_host::inherited(SOCKET).map(UnixStream::from);
    let Args { log, log_format } = Args::parse();
    let filter = match EnvFilter::try_new(&log) {
        Ok(filter) => filter,
        Err(error) => {
            eprintln!("pagedd-gateway: --log {log}: {error}");
            return ExitCode::from(2);
        }
    };
    // A log that cannot be written is no reason to end: the library would say so on the same stderr, and panic.
    let logger = tracing_subscriber::fmt()
        .log_internal_errors(false)
        .with_env_filter(filter)
        .with_writer(pagedd_log::Stderr::of_process());
    match log_format {
        Format::Text => logger.with_ansi(false).init(),
        Format::Json => logger.json().init(),
    }
    let Ok(socket) = socket else {
        eprintln!("pagedd-gateway: fd {SOCKET} is no socket: this program is started by pagedd, not by hand");
        return ExitCode::from(2);
    };
    #[cfg(feature = "failpoints")]
    let _points = fail::FailScenario::setup();
    match template::run(socket) {
        Ok(Outcome::Template | Outcome::Gateway) => ExitCode::SUCCESS,
        Err(error) => {
            error!(%error, "template process ends");
            ExitCode::FAILURE
        }
    }
}
