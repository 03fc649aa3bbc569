//! A daemon under test: its directory, its process, its admin command.
//!
//! **Owns** a temporary directory and the processes started in it. Dropping it ends them, and prints the end of the log where
//! the test failed. **Never** builds anything: the binaries lie beside the test's own, as `make build-dev` put them there.

use std::fs::{self, File, OpenOptions, Permissions};
use std::net::TcpListener;
use std::ops::Range;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;
use std::time::Duration;

use nix::sys::signal::Signal;
use nix::unistd::geteuid;
use serde_json::Value;
use tempfile::TempDir;

use crate::http::Client;
use crate::model;
use crate::process::{Process, family, send};
use crate::wait;

/// A model is loaded by then, on a busy machine too.
const START: Duration = Duration::from_mins(2);

/// Lines of a log that are shown where a test failed.
const LOG_TAIL: usize = 400;

/// A daemon has stopped by then.
const STOP: Duration = Duration::from_secs(30);

/// A binary of the project, from the folder that the test's own binary lies in.
///
/// # Panics
/// It was not built.
pub fn binary(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the test's own path");
    let folder = test.parent().and_then(Path::parent).expect("target/<profile>/deps/<test>");
    let path = folder.join(name);
    assert!(path.is_file(), "{} is not there: run `make build-dev`", path.display());
    path
}

/// Ports that tests take, below those that the kernel gives to whoever asks for any.
const PORTS: Range<u16> = 12_000..32_000;
/// Ports of a test that runs beside others: as many as one of them uses up, and more.
const SLOT_PORTS: u16 = 2_000;

/// `N` TCP ports of the loopback device that nobody has, and that no test which runs at the same time takes.
///
/// # Panics
/// A test has used up its ports.
pub fn free_ports<const N: usize>() -> [u16; N] {
    static TAKEN: AtomicU16 = AtomicU16::new(0);
    // nextest numbers those of a group that run at one time.
    let slot = std::env::var("NEXTEST_TEST_GROUP_SLOT").ok().and_then(|slot| slot.parse::<u16>().ok());
    let slots = (PORTS.end - PORTS.start) / SLOT_PORTS;
    let first = PORTS.start + slot.unwrap_or(0) % slots * SLOT_PORTS;
    // Tests of one slot follow one another, and each begins elsewhere: a port may be busy for a while after its owner's end.
    let start = (std::process::id() % u32::from(SLOT_PORTS)) as u16;
    let next = || {
        let taken = TAKEN.fetch_add(1, Ordering::Relaxed);
        assert!(taken < SLOT_PORTS, "a test used up its ports");
        first + (start + taken) % SLOT_PORTS
    };
    let free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    std::array::from_fn(|_| std::iter::repeat_with(next).find(free).expect("ports do not end"))
}

/// The usual configuration: SmolLM2 as `smollm2`, with small limits so that tests reach them.
pub fn smollm2_yaml() -> String {
    model_yaml(
        "smollm2",
        &model::smollm2(),
        "kv_memory: 16384 tokens\n    max_num_seqs: 40\n    max_model_len: 2048",
    )
}

/// The same model computed in float32 throughout.
pub fn smollm2_f32_yaml() -> String {
    let options = "dtype: f32\n    kv_dtype: f32\n    kv_memory: 16384 tokens\n    max_num_seqs: 40\n    max_model_len: 2048";
    model_yaml("smollm2", &model::smollm2(), options)
}

/// A configuration with one model; `options` are further lines of it, indented by four blanks after the first.
///
/// Its daemon waits for what runs no longer than [`DRAIN`] when it is told to end: tests that are about it replace that line.
pub fn model_yaml(name: &str, path: &Path, options: &str) -> String {
    format!("{DRAIN}models:\n  {name}:\n    path: {}\n    {options}\n", path.display())
}

/// The line of a configuration that says how long running requests may go on at the end.
pub const DRAIN: &str = "drain_timeout: 2s\n";

/// A place for a daemon: configuration and state directory. No process.
#[derive(Debug)]
pub struct Site {
    folder: TempDir,
    /// The programs' folder, where it is this place's own.
    programs: Option<PathBuf>,
    /// Size of the state directory's file system, where it has one of its own.
    disk: Option<&'static str>,
    /// Points at which the daemon or a process of its own ends.
    points: Option<String>,
    /// There is a file that says which points are on in which daemon.
    by_start: bool,
    /// Plans that workers have at a time, where it does not follow from their devices.
    depth: Option<usize>,
    /// Further arguments of the daemon's command line.
    arguments: Vec<String>,
    /// What the daemon has in the place of a log.
    sink: Option<PathBuf>,
    /// The user that the daemon runs as, and its capabilities, where it is not this process's.
    user: Option<(u32, &'static str)>,
}

impl Site {
    /// A fresh place with this configuration.
    pub fn new(yaml: &str) -> Self {
        let folder = tempfile::Builder::new().prefix("pagedd-").tempdir().expect("a temporary directory");
        let (points, arguments) = (None, Vec::new());
        let site = Self {
            folder,
            programs: None,
            disk: None,
            points,
            by_start: false,
            depth: None,
            arguments,
            sink: None,
            user: None,
        };
        site.configure(yaml);
        site
    }

    /// Runs copies of the programs, which the test may then replace.
    #[must_use]
    pub fn with_own_programs(mut self) -> Self {
        let folder = self.folder.path().join("bin");
        fs::create_dir(&folder).expect("a folder for programs");
        for name in ["pagedd", "pagedd-worker", "pagedd-gateway"] {
            fs::copy(binary(name), folder.join(name)).expect("copy a program");
        }
        self.programs = Some(folder);
        self
    }

    /// Has the daemon or its children end at fail points, as `fail` writes them. Programs must be built with them: `make build-dev`.
    #[must_use]
    pub fn with_points(mut self, points: String) -> Self {
        self.points = Some(points);
        self
    }

    /// Has line `n` of fail points on in the `n`th daemon that starts here, and no other daemon.
    #[must_use]
    pub fn with_points_by_start(mut self, lines: &[&str]) -> Self {
        fs::write(self.file("points"), lines.join("\n")).expect("write the fail points");
        self.by_start = true;
        self
    }

    /// Has workers be given so many plans at a time, whatever their devices. Programs must be built with fail points.
    #[must_use]
    pub fn with_depth(mut self, depth: usize) -> Self {
        self.depth = Some(depth);
        self
    }

    /// Runs the daemon as this user, with these capabilities (names without `cap_`, with commas) and no more. Only root can start it so.
    #[must_use]
    pub fn with_user(mut self, user: u32, capabilities: &'static str) -> Self {
        for path in [self.folder.path().to_owned(), self.config(), self.file("bin")] {
            if path.exists() {
                chown(&path, Some(user), Some(user)).expect("give it away");
            }
        }
        self.user = Some((user, capabilities));
        self
    }

    /// Has the daemon write its log there; there is none to read then.
    #[must_use]
    pub fn with_log_to(mut self, path: &Path) -> Self {
        self.sink = Some(path.to_path_buf());
        self
    }

    /// Daemons that have started here, where fail points go by that.
    pub fn starts(&self) -> usize {
        fs::read(self.file("points.starts")).map_or(0, |starts| starts.len())
    }

    /// The path of a mark that a child leaves, whatever its user, when it ends at a fail point.
    pub fn mark(&self, name: &str) -> PathBuf {
        let marks = self.file("marks");
        if !marks.exists() {
            fs::create_dir(&marks).expect("a folder for marks");
            fs::set_permissions(&marks, Permissions::from_mode(0o777)).expect("everybody may write in it");
            fs::set_permissions(self.folder.path(), Permissions::from_mode(0o711)).expect("and go there");
        }
        marks.join(name)
    }

    /// Starts the daemon with these arguments, too.
    #[must_use]
    pub fn with_arguments(mut self, arguments: &[&str]) -> Self {
        self.arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        self
    }

    /// Has the state directory on a file system of this size, which the daemon's processes alone see. The admin socket lies
    /// elsewhere.
    #[must_use]
    pub fn with_small_disk(mut self, size: &'static str) -> Self {
        self.disk = Some(size);
        fs::create_dir(self.state()).expect("the state directory");
        let config = fs::read_to_string(self.config()).expect("the configuration");
        self.configure(&format!("admin_socket: {}\n{config}", self.socket().display()));
        self
    }

    /// Puts another program in the place of one of this place's own; what runs already goes on.
    ///
    /// # Panics
    /// The place has no programs of its own.
    pub fn replace_program(&self, name: &str, by: &Path) {
        let folder = self.programs.as_ref().expect("programs of its own");
        let new = folder.join("new");
        fs::copy(by, &new).expect("copy the other program");
        fs::rename(&new, folder.join(name)).expect("put it in place");
    }

    /// Replaces the configuration.
    pub fn configure(&self, yaml: &str) {
        fs::write(self.config(), yaml).expect("write the configuration");
    }

    /// The configuration file.
    pub fn config(&self) -> PathBuf {
        self.folder.path().join("pagedd.yaml")
    }

    /// The state directory.
    pub fn state(&self) -> PathBuf {
        self.folder.path().join("state")
    }

    /// The admin socket.
    pub fn socket(&self) -> PathBuf {
        if self.disk.is_some() { self.file("admin.sock") } else { self.state().join("admin.sock") }
    }

    /// A file beside the configuration.
    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    /// What every daemon in this place has logged.
    pub fn log_text(&self) -> String {
        fs::read_to_string(self.log()).unwrap_or_default()
    }

    /// The daemon's command line in this place, with no input and this environment alone.
    pub fn command(&self) -> Command {
        let program = self.programs.as_ref().map_or_else(|| binary("pagedd"), |folder| folder.join("pagedd"));
        let mut command = match (self.disk, self.user) {
            (None, None) => Command::new(program),
            (None, Some((user, capabilities))) => {
                let names = capabilities.split(',').filter(|name| !name.is_empty());
                let plus = names.fold(String::new(), |list, name| list + ",+" + name);
                let mut command = Command::new("setpriv");
                command.args([
                    format!("--reuid={user}"),
                    format!("--regid={user}"),
                    "--clear-groups".to_owned(),
                ]);
                for set in ["inh", "ambient"] {
                    command.arg(format!("--{set}-caps=-all{plus}"));
                }
                command.arg(format!("--bounding-set=-all{plus}")).arg(program);
                command
            }
            (Some(size), _) => {
                let mut command = Command::new("unshare");
                command.arg("--mount");
                if !geteuid().is_root() {
                    // Its own user, with the right to mount.
                    command.args(["--user", "--map-current-user", "--keep-caps"]);
                }
                let script = "mount -t tmpfs -o size=\"$1\" none \"$2\" && shift 2 && exec \"$@\"";
                command.args(["sh", "-c", script, "sh", size]).arg(self.state()).arg(program);
                command
            }
        };
        command.arg("--config").arg(self.config()).arg("--state-dir").arg(self.state());
        command.args(&self.arguments);
        command.env_clear().env("PATH", "/usr/bin:/bin").env("RUST_BACKTRACE", "1").stdin(Stdio::null());
        let depth = self.depth.map(|depth| format!("engine-depth=return({depth})"));
        let points: Vec<String> = self.points.iter().cloned().chain(depth).collect();
        if !points.is_empty() {
            command.env("FAILPOINTS", points.join(";"));
        }
        if self.by_start {
            command.env("FAILPOINTS_BY_START", self.file("points"));
        }
        command
    }

    /// Runs a daemon that ends by itself.
    ///
    /// # Panics
    /// It has not within ten seconds.
    #[track_caller]
    pub fn run_to_end(&self) -> Ended {
        self.run_to_end_within(Duration::from_secs(10))
    }

    /// Runs a daemon that ends by itself within `limit`.
    #[track_caller]
    pub fn run_to_end_within(&self, limit: Duration) -> Ended {
        let child =
            self.command().stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("start pagedd");
        let family_root = child.id();
        let waiter = thread::spawn(move || child.wait_with_output());
        if wait::within(limit, || waiter.is_finished().then_some(())).is_none() {
            end_family(&family(family_root));
            let output = waiter.join().expect("the waiting thread").expect("pagedd's output");
            panic!("pagedd runs on after {limit:?}:\n{}", text(&output));
        }
        let output = waiter.join().expect("the waiting thread").expect("pagedd's output");
        Ended { code: output.status.code(), text: text(&output) }
    }

    /// Starts a daemon; returns at once.
    #[track_caller]
    pub fn spawn(self) -> Daemon {
        let path = self.sink.clone().unwrap_or_else(|| self.log());
        let log = OpenOptions::new().create(true).append(true).open(path).expect("the log");
        let errors: File = log.try_clone().expect("the log");
        let child = self.command().stdout(log).stderr(errors).spawn().expect("start pagedd");
        Daemon { site: Some(self), child }
    }

    /// Starts a daemon, and waits until every model is ready.
    #[track_caller]
    pub fn start(self) -> Daemon {
        let mut daemon = self.spawn();
        daemon.wait_ready();
        daemon
    }
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// A program that ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// Its exit code; `None` where a signal ended it.
    pub code: Option<i32>,
    /// All that it printed.
    pub text: String,
}

impl Ended {
    /// Panics unless it failed, without a panic, saying each of `words`.
    #[track_caller]
    pub fn refused(&self, words: &[&str]) -> &Self {
        assert!(self.code.is_some_and(|c| c != 0 && c != 101), "exit code {:?}:\n{}", self.code, self.text);
        assert!(!self.text.contains("panicked at"), "{}", self.text);
        for word in words {
            assert!(self.text.contains(word), "`{word}` is not in:\n{}", self.text);
        }
        self
    }
}

/// A running daemon.
#[derive(Debug)]
pub struct Daemon {
    // `None` only once `stop` or `kill` took it.
    site: Option<Site>,
    child: Child,
}

/// A tenant's port, and the way in.
#[derive(Clone, Debug)]
pub struct Tenant {
    /// Its name.
    pub name: String,
    /// Its port.
    pub port: u16,
    /// Its first key.
    pub key: String,
    /// The port, asked with that key.
    pub http: Client,
}

impl Tenant {
    /// Text of a greedy completion.
    #[track_caller]
    pub fn complete(&self, prompt: &str, max_tokens: u32) -> String {
        let body = serde_json::json!({"model": "smollm2", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0});
        let answer = self.http.post("/v1/completions", &body).ok();
        answer["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("no text: {answer}")).to_owned()
    }
}

impl Daemon {
    /// Where it runs.
    pub fn site(&self) -> &Site {
        self.site.as_ref().expect("a running daemon has a place")
    }

    /// The process that the test started: the keeper, or the daemon itself.
    pub fn root(&self) -> u32 {
        self.child.id()
    }

    /// It and all its processes, parents first.
    pub fn processes(&self) -> Vec<Process> {
        family(self.root())
    }

    /// Waits until every model is ready.
    #[track_caller]
    pub fn wait_ready(&mut self) {
        let ready = wait::within(START, || {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Some(Err(status));
            }
            // One answer: by the next question the daemon may be gone.
            let answer = Some(self.ctl(&["status"])).filter(|answer| answer.code == Some(0))?;
            let status: Value = serde_json::from_str(&answer.text).ok()?;
            let models = status["models"].as_array().cloned().unwrap_or_default();
            models.iter().all(|m| m["state"]["is"] == "ready").then_some(Ok(()))
        });
        match ready {
            Some(Ok(())) => {}
            Some(Err(status)) => panic!("pagedd ended: {status}\n{}", self.site().log_text()),
            None => panic!("pagedd is not ready within {START:?}\n{}", self.site().log_text()),
        }
    }

    /// The state directory as its processes see it.
    pub fn state(&self) -> PathBuf {
        let state = self.site().state();
        Path::new("/proc")
            .join(self.root().to_string())
            .join("root")
            .join(state.strip_prefix("/").unwrap_or(&state))
    }

    /// Runs `pagedctl` with `--json` against this daemon.
    pub fn ctl(&self, arguments: &[&str]) -> Ended {
        let mut command = Command::new(binary("pagedctl"));
        command.arg("--socket").arg(self.site().socket()).arg("--json").args(arguments);
        let output = command.stdin(Stdio::null()).output().expect("run pagedctl");
        Ended { code: output.status.code(), text: text(&output) }
    }

    /// What `pagedctl` answers, as JSON.
    ///
    /// # Panics
    /// It failed.
    #[track_caller]
    pub fn ask(&self, arguments: &[&str]) -> Value {
        let ended = self.ctl(arguments);
        assert_eq!(ended.code, Some(0), "pagedctl {arguments:?}: {}", ended.text);
        serde_json::from_str(&ended.text)
            .unwrap_or_else(|e| panic!("pagedctl {arguments:?}: no JSON ({e}): {}", ended.text))
    }

    /// `pagedctl status`.
    #[track_caller]
    pub fn status(&self) -> Value {
        self.ask(&["status"])
    }

    /// The first model's status.
    #[track_caller]
    pub fn model(&self) -> Value {
        self.status()["models"][0].clone()
    }

    /// A tenant's status.
    #[track_caller]
    pub fn tenant_info(&self, name: &str) -> Value {
        let answer = self.ask(&["tenant", "show", name]);
        answer.get("tenant").cloned().unwrap_or(answer)
    }

    /// Adds a tenant on a free port, with these shares of the pool.
    #[track_caller]
    pub fn add_tenant(&self, name: &str, floor: &str, ceiling: &str) -> Tenant {
        self.add_tenant_of("smollm2", name, floor, ceiling)
    }

    /// Adds a tenant of one model.
    #[track_caller]
    pub fn add_tenant_of(&self, model: &str, name: &str, floor: &str, ceiling: &str) -> Tenant {
        let tenant = self.add_unready_tenant(model, name, floor, ceiling);
        wait::until("the tenant's port is ready", START, || tenant.http.get("/readyz").status == 200);
        tenant
    }

    /// The same, and does not wait until its port is ready.
    #[track_caller]
    pub fn add_unready_tenant(&self, model: &str, name: &str, floor: &str, ceiling: &str) -> Tenant {
        let [port] = free_ports();
        let port_text = port.to_string();
        let arguments = [
            "tenant",
            "add",
            name,
            "--port",
            &port_text,
            "--model",
            model,
            "--kv-floor",
            floor,
            "--kv-ceiling",
            ceiling,
        ];
        let answer = self.ask(&arguments);
        let key = answer["key"]["key"].as_str().unwrap_or_else(|| panic!("no key: {answer}")).to_owned();
        Tenant { name: name.to_owned(), port, http: Client::new(port, Some(&key)), key }
    }

    /// Waits until no request runs or waits.
    #[track_caller]
    pub fn wait_idle(&self) {
        wait::until("no request runs or waits", Duration::from_mins(1), || {
            let model = self.model();
            model["running"] == 0 && model["waiting"] == 0
        });
    }

    /// Asks it to end (SIGTERM) and waits; the place is kept.
    ///
    /// # Panics
    /// It does not end, or with another code than 0, or leaves a process behind.
    #[track_caller]
    pub fn stop(self) -> Site {
        let processes = self.processes();
        self.signal(Signal::SIGTERM);
        self.ended(&processes)
    }

    /// Sends a signal to the process that the test started.
    pub fn signal(&self, signal: Signal) {
        if let Some(process) = Process::find(self.root()) {
            send(&process, signal);
        }
    }

    /// Waits for the end of a daemon that was told to end; the place is kept. `processes` are those it had before.
    ///
    /// # Panics
    /// It does not end, or with another code than 0, or leaves a process behind.
    #[track_caller]
    pub fn ended(mut self, processes: &[Process]) -> Site {
        let status = wait::within(STOP, || self.child.try_wait().expect("wait for pagedd"));
        let status =
            status.unwrap_or_else(|| panic!("pagedd runs on for {STOP:?}\n{}", self.site().log_text()));
        assert_eq!(status.code(), Some(0), "{status}\n{}", self.site().log_text());
        wait::until("every process ends with the daemon", STOP, || !processes.iter().any(Process::lives));
        self.site.take().expect("a running daemon has a place")
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let processes = self.processes();
        if let Some(root) = processes.first() {
            send(root, Signal::SIGTERM);
            let _ = wait::within(STOP, || self.child.try_wait().ok().flatten());
        }
        end_family(&processes);
        let _ = self.child.wait();
        if let Some(site) = self.site.as_ref().filter(|_| thread::panicking()) {
            println!("--- end of pagedd's log ---\n{}---", tail(&site.log_text()));
        }
    }
}

/// The last lines of a text.
fn tail(text: &str) -> &str {
    let start = text.rmatch_indices('\n').nth(LOG_TAIL).map_or(0, |(at, _)| at + 1);
    &text[start..]
}

/// Kills what is left of processes that were the daemon's.
fn end_family(processes: &[Process]) {
    for process in processes {
        send(process, Signal::SIGKILL);
    }
}
