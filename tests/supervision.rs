//! The daemon and who supervises it: watchdog, status line, the configuration read again.

mod tiny;

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pagedd_tests::daemon::{Daemon, Site, binary};
use pagedd_tests::http::{Client, Incoming};
use pagedd_tests::process::{Process, family, send};
use pagedd_tests::wait;
use serde_json::{Value, json};
use tempfile::TempDir;

/// How often the manager of these tests wants to hear from the daemon.
const WATCHDOG: Duration = Duration::from_secs(2);
/// Something that takes no longer as a rule than a moment.
const MOMENT: Duration = Duration::from_secs(30);

/// A service manager that hears a daemon and does nothing about it.
struct Manager {
    child: Child,
    site: Site,
    heard: Arc<Mutex<Vec<(Instant, String)>>>,
    _folder: TempDir,
}

impl Manager {
    /// Starts a daemon of the generated model with these fail points.
    fn start(points: Option<&str>) -> Self {
        let folder = tempfile::tempdir().expect("a folder for the model");
        let site = Site::new(&tiny::yaml(folder.path()));
        let site = match points {
            Some(points) => site.with_points(points.to_owned()),
            None => site,
        };
        let address = site.file("notify");
        let socket = UnixDatagram::bind(&address).expect("a socket");
        let log = fs::File::create(site.file("log")).expect("the log");
        let child = site
            .command()
            .env("NOTIFY_SOCKET", &address)
            .env("WATCHDOG_USEC", WATCHDOG.as_micros().to_string())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("start pagedd");
        let heard = Arc::<Mutex<Vec<_>>>::default();
        let ear = heard.clone();
        thread::spawn(move || {
            let mut bytes = [0; 8192];
            // Until the test's process ends: the daemon may speak up to then.
            while let Ok(length) = socket.recv(&mut bytes) {
                let text = String::from_utf8_lossy(&bytes[..length]).into_owned();
                ear.lock().unwrap_or_else(PoisonError::into_inner).push((Instant::now(), text));
            }
        });
        Self { child, site, heard, _folder: folder }
    }

    fn heard(&self) -> Vec<(Instant, String)> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// When the daemon last said this.
    fn last(&self, line: &str) -> Option<Instant> {
        let said = |text: &String| text.lines().any(|found| found == line);
        self.heard().iter().rev().find(|(_, text)| said(text)).map(|(at, _)| *at)
    }

    #[track_caller]
    fn wait_for(&self, line: &str) {
        let found = wait::within(MOMENT, || self.last(line));
        assert!(found.is_some(), "{line:?} was not said: {:#?}\n{}", self.heard(), self.site.log_text());
    }

    fn ask(&self, arguments: &[&str]) -> Value {
        let output = Command::new(binary("pagedctl"))
            .arg("--json")
            .arg("--socket")
            .arg(self.site.socket())
            .args(arguments)
            .output()
            .expect("run pagedctl");
        assert!(output.status.success(), "{output:?}\n{}", self.site.log_text());
        serde_json::from_slice(&output.stdout).expect("an answer in JSON")
    }

    /// A request of so many tokens on a new tenant's port, sent from a thread of its own; what came of it.
    fn request(&self, max_tokens: u32) -> thread::JoinHandle<Result<u16, String>> {
        let tenant = self.ask(&["tenant", "add", "acme", "--no-auth"]);
        let port = tenant["tenant"]["port"].as_u64().expect("a port") as u16;
        let body = json!({"model": tiny::MIX.model, "prompt": [101, 102, 103], "max_tokens": max_tokens, "ignore_eos": true});
        let client = Client::new(port, None);
        thread::spawn(move || {
            let sent = client.send("POST", "/v1/completions", &[], body.to_string().as_bytes());
            sent.map(|stream| Incoming::read_head(stream).status).map_err(|error| error.to_string())
        })
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        for process in family(self.child.id()).iter().rev() {
            send(process, Signal::SIGKILL);
        }
        let _ = self.child.wait();
        if thread::panicking() {
            eprintln!("{}", self.site.log_text());
        }
    }
}

#[test]
fn the_manager_hears_how_far_the_daemon_is_and_that_it_goes_on_until_it_ends() {
    let mut manager = Manager::start(None);
    manager.wait_for("READY=1");
    manager.wait_for("STATUS=1 model ready, no tenants");
    manager.ask(&["tenant", "add", "acme"]);
    manager.wait_for("STATUS=serving 1 tenant on 1 model");
    manager.ask(&["drain", "--timeout", "1"]);
    manager.wait_for("STATUS=taking no new requests: 0 requests left; serving 1 tenant on 1 model");
    let fed = manager.last("WATCHDOG=1").expect("it was fed");
    wait::until("it is fed again", 2 * WATCHDOG, || manager.last("WATCHDOG=1") > Some(fed));
    kill(Pid::from_raw(manager.child.id() as i32), Signal::SIGTERM).expect("SIGTERM");
    manager.wait_for("STOPPING=1");
    assert_eq!(manager.child.wait().expect("its end").code(), Some(0));
    let longer = manager.heard().iter().any(|(_, text)| text.contains("EXTEND_TIMEOUT_USEC="));
    assert!(longer, "{:#?}", manager.heard());
}

#[test]
fn a_hung_engine_is_not_hidden_from_the_watchdog() {
    let manager = Manager::start(Some("engine-turn=100*off->sleep(600000)"));
    manager.wait_for("STATUS=1 model ready, no tenants");
    let _unanswered = manager.request(400);
    // Three of what a daemon that goes on says in this time would have come.
    let silent = wait::within(MOMENT, || {
        let fed = manager.last("WATCHDOG=1")?;
        (fed.elapsed() > WATCHDOG).then_some(())
    });
    assert!(silent.is_some(), "the watchdog is fed although an engine hangs: {:#?}", manager.heard());
    let log = manager.site.log_text();
    assert!(log.contains("it hangs") && log.contains("engine-tiny"), "{log}");
}

#[test]
fn a_worker_that_takes_its_time_is_no_reason_for_a_restart() {
    let manager = Manager::start(None);
    manager.wait_for("STATUS=1 model ready, no tenants");
    let answer = manager.request(64);
    let worker = manager.ask(&["status"])["models"][0]["worker_pid"].as_u64().expect("a worker") as u32;
    let worker = Process::find(worker).expect("it lives");
    send(&worker, Signal::SIGSTOP);
    let stopped = Instant::now();
    // Fed all the time: no pause is as long as the manager's patience.
    wait::until("the watch is over", MOMENT, || stopped.elapsed() > 3 * WATCHDOG);
    let fed: Vec<Instant> =
        manager.heard().iter().filter(|(_, text)| text.contains("WATCHDOG=1")).map(|(at, _)| *at).collect();
    let longest = fed.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or_default();
    assert!(longest < WATCHDOG && manager.last("WATCHDOG=1") > Some(stopped), "{longest:?}, {fed:?}");
    send(&worker, Signal::SIGCONT);
    assert_eq!(answer.join().expect("its thread"), Ok(200));
}

/// The configuration of the generated model with this in the place of its drain timeout.
fn yaml(folder: &Path, top: &str, model: &str) -> String {
    let text = tiny::yaml(folder);
    let (_, models) = text.split_once("models:").expect("models");
    format!("{top}models:{}\n{model}", models.trim_end())
}

#[test]
fn a_configuration_that_is_read_again_takes_effect_and_a_bad_one_changes_nothing() {
    let folder = tempfile::tempdir().expect("a folder for the model");
    let daemon = Site::new(&yaml(folder.path(), "drain_timeout: 2s\n", "")).start();
    let acme = daemon.add_tenant_of(tiny::MIX.model, "acme", "0%", "100%");
    let outcome = |daemon: &Daemon| daemon.status()["reload"]["outcome"].clone();
    assert_eq!(daemon.status()["reload"], Value::Null);
    let long = json!({"model": tiny::MIX.model, "prompt": "x".repeat(3_000), "max_tokens": 1});
    assert_ne!(acme.http.post("/v1/completions", &long).status, 413);

    let top = "drain_timeout: 2s\nlog:\n  level: debug\nretention: 3m\ngateway:\n  max_body: 1KiB\nlisten: 127.0.0.2\n";
    daemon.site().configure(&yaml(
        folder.path(),
        top,
        "    max_queued_requests: 7\n    default_max_tokens: 5\n",
    ));
    let reloaded = daemon.ask(&["reload"]);
    let live = [
        "log.level",
        "gateway.max_body",
        "retention",
        "models.tiny.max_queued_requests",
        "models.tiny.default_max_tokens",
    ];
    let later = ["listen", "log.level of workers and gateways"];
    assert_eq!(reloaded["outcome"], json!({"is": "applied", "now": live, "later": later}), "{reloaded}");
    assert_eq!(outcome(&daemon), reloaded["outcome"]);
    assert_eq!(daemon.status()["tenants"][0]["retention"], "3m");
    wait::until("a body is too large now", MOMENT, || acme.http.post("/v1/completions", &long).status == 413);
    let short = json!({"model": tiny::MIX.model, "prompt": [101, 102], "max_tokens": 4, "ignore_eos": true});
    assert_eq!(acme.http.post("/v1/completions", &short).ok()["usage"]["completion_tokens"], 4, "it serves");

    daemon.site().configure("retentoin: 1m\n");
    let refused = daemon.ctl(&["reload"]);
    let place = format!("{}:1:1: ", daemon.site().config().display());
    assert!(
        refused.code == Some(1) && refused.text.contains(&place) && refused.text.contains("retention"),
        "{refused:?}"
    );
    // By signal, through the keeper: nobody waits for the answer.
    let before = daemon.status()["reload"]["at_unix"].clone();
    kill(Pid::from_raw(daemon.root() as i32), Signal::SIGHUP).expect("SIGHUP");
    let shown = wait::within(MOMENT, || Some(outcome(&daemon)).filter(|outcome| outcome["is"] == "refused"));
    assert!(
        shown.is_some_and(|shown| shown["error"].to_string().contains("retentoin")),
        "{before}: {}",
        daemon.status()
    );
    assert_eq!(daemon.status()["tenants"][0]["retention"], "3m", "what was in force is");
    let in_order = || daemon.ask(&["metrics"])["text"].to_string().contains("reload_successful 1.0");
    assert!(!in_order(), "metrics say that it was refused");
    let pid = daemon.status()["pid"].clone();

    daemon.site().configure(&yaml(folder.path(), "drain_timeout: 2s\n", ""));
    kill(Pid::from_raw(daemon.root() as i32), Signal::SIGHUP).expect("SIGHUP");
    wait::until("it is in force", MOMENT, || daemon.status()["tenants"][0]["retention"] == "10m");
    assert_eq!(daemon.status()["pid"], pid, "nothing was restarted");
    assert!(in_order(), "metrics say that it was taken");
    let log = daemon.site().log_text();
    assert!(log.contains("takes effect at the next restart"), "{log}");
}
