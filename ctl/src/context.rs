//! What a command runs in, and what comes out of it.

use crate::failure::Failure;
use pagedd_control::{Client, Command, Reply};
use std::ffi::OsString;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long a checkpoint of much memory on a slow disk may take.
const PATIENCE: Duration = Duration::from_hours(1);

/// What is taken from the process and the host, so that tests can give something else.
#[derive(Clone, Debug)]
pub struct Environment {
    /// `PAGEDD_SOCKET`.
    pub socket: Option<OsString>,
    /// Where the admin socket may be, best first; the last is taken where none is there.
    pub candidates: Vec<PathBuf>,
    /// The configuration file that is checked where none is named.
    pub config: PathBuf,
    /// `pagedd-worker` of this program's installation.
    pub worker: PathBuf,
    /// Shows a line of a command that takes its time.
    pub progress: fn(&str),
}

impl Environment {
    /// This process'.
    pub fn of_process() -> Self {
        Self {
            socket: std::env::var_os("PAGEDD_SOCKET").filter(|path| !path.is_empty()),
            candidates: vec![
                PathBuf::from("/run/pagedd/admin.sock"),
                PathBuf::from("/var/lib/pagedd/admin.sock"),
            ],
            config: PathBuf::from(pagedd_config::DEFAULT_FILE),
            worker: worker_of(&std::env::current_exe().unwrap_or_default()),
            // Whoever does not want to see it has closed it.
            progress: |line| drop(io::stderr().write_all(line.as_bytes())),
        }
    }

    /// The admin socket: `given`, the environment's, or the first that is there.
    pub fn socket(&self, given: Option<PathBuf>) -> PathBuf {
        given.or_else(|| self.socket.clone().map(PathBuf::from)).unwrap_or_else(|| {
            let found = self.candidates.iter().find(|path| path.exists()).or(self.candidates.last());
            found.cloned().unwrap_or_default()
        })
    }
}

/// `pagedd-worker` of the installation that the program `own` is of; where there is none, the path at which it is missed.
fn worker_of(own: &Path) -> PathBuf {
    const WORKER: &str = "pagedd-worker";
    pagedd_config::program_folder(own, &[WORKER])
        .map_or_else(|_| own.with_file_name(WORKER), |folder| folder.join(WORKER))
}

/// What is printed, and how the process ends.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// Exit code.
    pub code: u8,
    /// For standard output.
    pub stdout: String,
    /// For standard error.
    pub stderr: String,
}

/// How one command reaches the daemon and answers.
#[derive(Clone, Debug)]
pub struct Context {
    /// The admin socket.
    pub socket: PathBuf,
    /// Whether the reply is printed as JSON.
    pub json: bool,
    /// Shows a line before the command is done.
    pub progress: fn(&str),
}

impl Context {
    /// Shows a line, with its line break, before the command is done.
    pub fn tell(&self, line: &str) {
        (self.progress)(line);
    }

    /// As [`Context::ask`], where the daemon reads or writes much before it answers.
    pub fn ask_patiently(
        &self,
        command: Command,
        show: impl FnOnce(&Reply) -> Option<String>,
    ) -> Result<String, Failure> {
        self.ask_within(PATIENCE, command, show)
    }

    /// Asks the daemon; the text to print is the reply as JSON, or what `show` makes of it (`None`: not an answer to this).
    pub fn ask(
        &self,
        command: Command,
        show: impl FnOnce(&Reply) -> Option<String>,
    ) -> Result<String, Failure> {
        self.ask_within(Client::TIMEOUT, command, show)
    }

    fn ask_within(
        &self,
        timeout: Duration,
        command: Command,
        show: impl FnOnce(&Reply) -> Option<String>,
    ) -> Result<String, Failure> {
        let asked = command.name();
        let mut client = Client::connect(&self.socket)?;
        client.set_timeout(timeout)?;
        let reply = client.call(command)?;
        let text = show(&reply).ok_or_else(|| Failure::wrong_reply(asked, &reply))?;
        if !self.json {
            return Ok(text);
        }
        let mut json = serde_json::to_string_pretty(&reply)?;
        json.push('\n');
        Ok(json)
    }
}
