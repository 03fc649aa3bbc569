use crate::cli::{Cli, run};
use crate::context::{Environment, Outcome};
use crate::failure;
use crate::show;
use clap::CommandFactory;
use pagedd_control::*;
use std::cell::RefCell;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use tempfile::TempDir;

mod checkpoint;
mod wall;

pub fn environment(dir: &Path) -> Environment {
    Environment {
        socket: None,
        candidates: vec![dir.join("run.sock"), dir.join("admin.sock")],
        config: dir.join("pagedd.yaml"),
        worker: dir.join("pagedd-worker"),
        progress: |line| PROGRESS.with_borrow_mut(|lines| lines.push(line.to_owned())),
    }
}

thread_local! {
    /// What a command of this thread told before it was done.
    static PROGRESS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

pub fn args(line: &str) -> Vec<OsString> {
    std::iter::once("pagedctl").chain(line.split_whitespace()).map(OsString::from).collect()
}

/// Runs a command line where no daemon is.
pub fn alone(line: &str) -> Outcome {
    let dir = tempfile::tempdir().unwrap();
    run(args(line), &environment(dir.path()))
}

/// Runs a command line against a daemon that gives one answer; what it was asked comes back too.
fn asked(line: &str, answer: Response) -> (Command, Outcome) {
    asked_with(args(line), answer)
}

fn asked_with(args: Vec<OsString>, answer: Response) -> (Command, Outcome) {
    let dir = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(dir.path().join("admin.sock")).unwrap();
    let daemon = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut line = String::new();
        BufReader::new(stream.try_clone().unwrap()).read_line(&mut line).unwrap();
        stream.write_all(&encode(&answer).unwrap()).unwrap();
        decode_request(line.as_bytes()).unwrap()
    });
    let outcome = run(args, &environment(dir.path()));
    // Where nothing was asked, this ends the daemon's wait.
    drop(UnixStream::connect(dir.path().join("admin.sock")));
    (daemon.join().unwrap(), outcome)
}

pub fn done(line: &str, reply: Reply) -> (Command, String) {
    let (command, outcome) = asked(line, Response::Ok(reply));
    assert_eq!((outcome.code, outcome.stderr.as_str()), (failure::OK, ""), "{line}");
    (command, outcome.stdout)
}

pub fn tenant(name: &str, port: u16) -> TenantInfo {
    TenantInfo {
        id: 3,
        name: name.to_owned(),
        state: TenantState::Ready,
        port,
        url: format!("http://127.0.0.1:{port}"),
        model: "smollm2".to_owned(),
        auth: true,
        keys: 1,
        share: ShareInfo {
            floor: "20%".to_owned(),
            ceiling: "50%".to_owned(),
            floor_blocks: Some(200),
            ceiling_blocks: Some(500),
            held_blocks: 7,
            cached_blocks: 9,
        },
        prompt_lookup: true,
        retention: "10m".to_owned(),
        quotas: QuotaInfo::default(),
        running: 1,
        waiting: 2,
        gateway: GatewayInfo { state: GatewayState::Running, pid: Some(4242), restarts: 0 },
        created_unix: 1_790_000_000,
    }
}

fn shown() -> Reply {
    Reply::Tenant(TenantShown { tenant: tenant("acme", 8101), wall: Box::default(), notes: Vec::new() })
}

fn key() -> KeyCreated {
    KeyCreated {
        id: 5,
        tenant: "acme".to_owned(),
        label: None,
        key: Secret::new("pgd_abcdefgh".to_owned()),
        prefix: "pgd_abcd".to_owned(),
    }
}

fn named(name: &str) -> TenantName {
    TenantName { name: name.to_owned() }
}

#[test]
fn tenant_add_shows_the_port_the_key_and_a_line_to_try_it() {
    let line = "tenant add acme --port 8101 --model smollm2 --kv-floor 20% --kv-ceiling 0.5GiB";
    let added = TenantAdded { tenant: tenant("acme", 8101), key: Some(key()), notes: Vec::new() };
    let (command, text) = done(line, Reply::TenantAdded(added));
    let spec = TenantSpec {
        name: "acme".to_owned(),
        port: Some(8101),
        model: Some("smollm2".to_owned()),
        kv_floor: Some("20%".to_owned()),
        kv_ceiling: Some("512MiB".to_owned()),
        no_auth: false,
        prompt_lookup: None,
        retention: None,
        quotas: QuotaChanges::default(),
        limits: Box::default(),
    };
    assert_eq!(command, Command::TenantAdd(spec));
    assert_eq!(
        text,
        "\
tenant      acme
url         http://127.0.0.1:8101
port        8101
model       smollm2
kv floor    20% (200 blocks)
kv ceiling  50% (500 blocks)
key         pgd_abcdefgh  (shown only now)

Try it:
curl -N http://127.0.0.1:8101/v1/chat/completions -H 'Authorization: Bearer pgd_abcdefgh' \
-H 'Content-Type: application/json' \
-d '{\"model\":\"smollm2\",\"stream\":true,\"temperature\":0,\"max_tokens\":200,\"messages\":[{\"role\":\"user\",\"content\":\"Hello\"}]}'
"
    );
}

#[test]
fn tenant_add_without_options_leaves_the_choice_to_the_daemon_and_an_open_port_needs_no_key() {
    let open = TenantInfo { auth: false, keys: 0, ..tenant("acme", 8101) };
    let (command, text) = done(
        "tenant add acme --no-auth --prompt-lookup off --retention 90s",
        Reply::TenantAdded(TenantAdded { tenant: open, key: None, notes: Vec::new() }),
    );
    let spec = TenantSpec {
        name: "acme".to_owned(),
        port: None,
        model: None,
        kv_floor: None,
        kv_ceiling: None,
        no_auth: true,
        prompt_lookup: Some(false),
        retention: Some("90s".to_owned()),
        quotas: QuotaChanges::default(),
        limits: Box::default(),
    };
    assert_eq!(command, Command::TenantAdd(spec));
    assert!(text.contains("key         none needed: anyone who reaches the port may use it\n"), "{text}");
    assert!(text.contains("/v1/chat/completions -H 'Content-Type"), "{text}");
}

#[test]
fn tenant_set_sends_what_changes_and_nothing_else() {
    let (command, text) =
        done("tenant set acme --kv-floor 4096tokens --auth off --prompt-lookup on --retention 0ms", shown());
    let changes = TenantChanges {
        kv_floor: Some("4096 tokens".to_owned()),
        auth: Some(false),
        prompt_lookup: Some(true),
        retention: Some("0s".to_owned()),
        ..TenantChanges::default()
    };
    assert_eq!(command, Command::TenantSet(TenantSet { name: "acme".to_owned(), changes, force: false }));
    assert!(text.starts_with("tenant      acme\n"), "{text}");
    let outcome = alone("tenant set acme");
    assert_eq!(outcome.code, failure::USAGE);
    assert_eq!(
        outcome.stderr,
        "error: nothing to change about `acme`\nhint: give --port, --kv-floor, --kv-ceiling, --auth, --prompt-lookup, --retention, a quota or a limit such as --cpu-max\n"
    );
}

#[test]
fn tenant_list_is_an_aligned_table() {
    let mut zebra = TenantInfo { auth: false, ..tenant("zebra-longer", 10_000) };
    zebra.state = TenantState::Failed { error: "port\u{1b}[2J".to_owned() };
    zebra.gateway.pid = None;
    zebra.prompt_lookup = false;
    let (command, text) =
        done("tenant list", Reply::Tenants(TenantListed { tenants: vec![tenant("acme", 8101), zebra] }));
    assert_eq!(command, Command::TenantList);
    assert_eq!(
        text,
        "\
TENANT        STATE              PORT  MODEL    KV FLOOR  KV CEILING  HELD  CACHED  RUNNING  WAITING  KEYS  LOOKUP  GATEWAY
acme          ready              8101  smollm2       20%         50%     7       9        1        2     1  on         4242
zebra-longer  failed: port\u{fffd}[2J  10000  smollm2       20%         50%     7       9        1        2  open  off           -
"
    );
    let (_, text) = done("tenant list", Reply::Tenants(TenantListed { tenants: vec![] }));
    assert_eq!(text, "no tenants; make one with `pagedctl tenant add NAME`\n");
}

#[test]
fn tenant_show_names_every_field() {
    let (command, text) = done("tenant show acme", shown());
    assert_eq!(command, Command::TenantShow(named("acme")));
    assert_eq!(
        text,
        "\
tenant      acme
id          3
state       ready
url         http://127.0.0.1:8101
port        8101
model       smollm2
kv floor    20% (200 blocks)
kv ceiling  50% (500 blocks)
kv held     7 blocks
kv cached   9 blocks
running     1
waiting     2
keys        1
lookup      on
retention   10m
gateway     running, pid 4242, 0 restarts
created     2026-09-21 14:13:20 UTC
device      0B of KV blocks
limits      none
"
    );
}

#[test]
fn suspend_resume_and_remove_say_what_holds_then() {
    let (command, text) = done("tenant suspend acme", shown());
    assert_eq!(command, Command::TenantSuspend(named("acme")));
    assert_eq!(text, "tenant acme is suspended; running requests go on\n");
    let (command, text) = done("tenant resume acme", shown());
    assert_eq!(
        (command, text.as_str()),
        (Command::TenantResume(named("acme")), "tenant acme takes requests again\n")
    );
    let removed = |cancelled| Reply::TenantRemoved(Removed { id: 3, name: "acme".to_owned(), cancelled });
    let (command, text) = done("tenant remove acme", removed(0));
    assert_eq!(command, Command::TenantRemove(TenantRemove { name: "acme".to_owned(), force: false }));
    assert_eq!(text, "tenant acme is removed\n");
    let (command, text) = done("tenant remove acme --force", removed(2));
    assert_eq!(command, Command::TenantRemove(TenantRemove { name: "acme".to_owned(), force: true }));
    assert_eq!(text, "tenant acme is removed; 2 requests were cancelled\n");
}

#[test]
fn keys_are_made_listed_and_revoked() {
    let (command, text) = done("key create acme --label ci", Reply::KeyCreated(key()));
    let label = Some("ci".to_owned());
    assert_eq!(command, Command::KeyCreate(KeyCreate { tenant: "acme".to_owned(), label }));
    assert_eq!(text, "tenant  acme\nid      5\nlabel   -\nkey     pgd_abcdefgh  (shown only now)\n");

    let info = KeyInfo {
        id: 5,
        label: Some("ci".to_owned()),
        prefix: "pgd_abcd".to_owned(),
        created_unix: 0,
        revoked_unix: None,
    };
    let revoked = KeyInfo { id: 12, label: None, revoked_unix: Some(951_782_400), ..info.clone() };
    let listed = KeyListed { tenant: "acme".to_owned(), keys: vec![info, revoked.clone()] };
    let (command, text) = done("key list acme", Reply::Keys(listed));
    assert_eq!(command, Command::KeyList(KeyList { tenant: "acme".to_owned() }));
    assert_eq!(
        text,
        "\
ID  PREFIX     LABEL  CREATED                  REVOKED
 5  pgd_abcd…  ci     1970-01-01 00:00:00 UTC  -
12  pgd_abcd…  -      1970-01-01 00:00:00 UTC  2000-02-29 00:00:00 UTC
"
    );
    let (_, text) = done("key list acme", Reply::Keys(KeyListed { tenant: "acme".to_owned(), keys: vec![] }));
    assert_eq!(text, "tenant acme has no keys; make one with `pagedctl key create acme`\n");

    let (command, text) = done("key revoke acme 12", Reply::KeyRevoked(revoked));
    assert_eq!(command, Command::KeyRevoke(KeyRevoke { tenant: "acme".to_owned(), id: 12 }));
    assert_eq!(text, "key 12 (pgd_abcd…) of tenant acme is revoked\n");
}

const SINCE: DrainState = DrainState::Draining { since_unix: 1, deadline_unix: None };

fn left(state: DrainState, requests: u32, streams: u32) -> DrainInfo {
    DrainInfo { state, requests, running: 1, waiting: 2, streams, too_large: 0 }
}

/// Runs a command line against a daemon that gives these answers in turn; what it was asked, what was told meanwhile, and how it ended.
fn watched(line: &str, answers: Vec<Reply>) -> (Vec<Command>, Vec<String>, Outcome) {
    let dir = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(dir.path().join("admin.sock")).unwrap();
    let daemon = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
        let mut asked = Vec::new();
        for answer in answers {
            let Some(line) = lines.next() else { break };
            asked.push(decode_request(line.unwrap().as_bytes()).unwrap());
            stream.write_all(&encode(&Response::Ok(answer)).unwrap()).unwrap();
        }
        asked
    });
    let outcome = run(args(line), &environment(dir.path()));
    (daemon.join().unwrap(), PROGRESS.with_borrow_mut(std::mem::take), outcome)
}

fn at(state: DrainState, requests: u32, streams: u32) -> Reply {
    Reply::Status(StatusInfo { drain: left(state, requests, streams), ..status() })
}

#[test]
fn a_drain_is_waited_for_and_each_change_is_shown() {
    let answers = || vec![Reply::Drain(left(SINCE, 3, 1)), at(SINCE, 3, 1), at(SINCE, 0, 1), at(SINCE, 0, 0)];
    let (commands, told, outcome) = watched("drain --timeout 1m", answers());
    assert_eq!(commands[0], Command::Drain(Drain { timeout_ms: Some(60_000) }));
    assert_eq!(commands[1..], [Command::Status, Command::Status, Command::Status]);
    let tail = "sequences running, 2 waiting, 1 streams open\n";
    assert_eq!(
        told,
        [format!("draining: 3 requests left, 1 {tail}"), format!("draining: 0 requests left, 1 {tail}")]
    );
    let text = "nothing is left; the daemon stays up and takes no requests until `pagedctl undrain` or its next start\n";
    assert_eq!(outcome, Outcome { code: failure::OK, stdout: text.to_owned(), stderr: String::new() });

    let (commands, told, outcome) = watched("drain --json", answers());
    assert_eq!(commands[0], Command::Drain(Drain { timeout_ms: None }));
    let told: Vec<Reply> = told.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(told, [Reply::Drain(left(SINCE, 3, 1)), Reply::Drain(left(SINCE, 0, 1))]);
    assert_eq!(serde_json::from_str::<Reply>(&outcome.stdout).unwrap(), Reply::Drain(left(SINCE, 0, 0)));
    assert_eq!((outcome.code, outcome.stderr.as_str()), (failure::OK, ""));
}

#[test]
fn a_drain_that_is_not_at_its_end_in_time_says_what_is_left_and_exits_with_5() {
    let (commands, _, outcome) = watched("drain --timeout 0", vec![Reply::Drain(left(SINCE, 3, 1))]);
    assert_eq!(commands, [Command::Drain(Drain { timeout_ms: Some(0) })]);
    assert_eq!(outcome.code, failure::UNFINISHED);
    assert_eq!(outcome.stdout, "3 requests left, 1 sequences running, 2 waiting, 1 streams open\n");
    assert_eq!(
        outcome.stderr,
        "error: not drained in time: 3 requests and 1 streams are left; the daemon goes on with them and takes no others\n\
         hint: `pagedctl drain` waits on, `pagedctl undrain` takes requests again\n"
    );
    let (_, _, outcome) = watched("drain --json --timeout 0", vec![Reply::Drain(left(SINCE, 3, 1))]);
    assert_eq!(serde_json::from_str::<Reply>(&outcome.stdout).unwrap(), Reply::Drain(left(SINCE, 3, 1)));
    let back = vec![Reply::Drain(left(SINCE, 3, 1)), at(DrainState::Admitting, 3, 1)];
    let (_, _, outcome) = watched("drain", back);
    assert_eq!((outcome.code, outcome.stdout.as_str()), (failure::UNFINISHED, ""));
    assert!(outcome.stderr.contains("taken back"), "{outcome:?}");
}

#[test]
fn a_drain_is_taken_back() {
    let (command, text) = done("undrain", Reply::Drain(left(DrainState::Admitting, 3, 1)));
    assert_eq!((command, text.as_str()), (Command::Undrain, "the daemon takes requests again\n"));
}

fn status() -> StatusInfo {
    StatusInfo {
        version: "0.1.0".to_owned(),
        pid: 77,
        uptime_s: 93_784,
        state_dir: "/var/lib/pagedd".to_owned(),
        config: None,
        reload: None,
        walls: Walls::Reduced { reason: "no cgroup v2".to_owned() },
        sandbox: SandboxState::Reduced { missing: vec![SandboxPart::OwnUser, SandboxPart::LandlockTcp] },
        durable: Durable::No { reason: "no space left".to_owned(), since_unix: 1, records: 3 },
        supervisor: Supervisor::Keeper,
        drain: left(DrainState::Draining { since_unix: 951_782_390, deadline_unix: Some(951_782_400) }, 3, 1),
        models: vec![ModelStatus {
            name: "smollm2".to_owned(),
            path: "/m.gguf".to_owned(),
            state: ModelState::Ready,
            architecture: Some("llama".to_owned()),
            parameters: Some(134_515_008),
            device: "cpu".to_owned(),
            dtype: Some("q8".to_owned()),
            kv_dtype: Some("f16".to_owned()),
            kernels: Some("avx2".to_owned()),
            threads: Some(2),
            weight_bytes: Some(144_811_072),
            kv_bytes: None,
            scratch_bytes: Some(3 << 20),
            pinned_bytes: Some(0),
            memory_bytes: None,
            block_size: 16,
            max_model_len: Some(8_192),
            blocks_total: Some(1_000),
            blocks_free: 984,
            blocks_cached: 9,
            blocks_held: 7,
            running: 1,
            waiting: 2,
            steps: 12_345,
            last_step_age_ms: Some(1_234),
            worker_pid: Some(78),
            restarts: 0,
            weights_reused: Some(false),
        }],
        tenants: vec![tenant("acme", 8101)],
    }
}

#[test]
fn status_shows_the_daemon_the_models_and_the_tenants() {
    let (command, text) = done("status", Reply::Status(status()));
    assert_eq!(command, Command::Status);
    assert_eq!(
        text,
        "\
pagedd      0.1.0, pid 77, up 1d 2h
config      defaults
state       /var/lib/pagedd
supervisor  keeper
admission   draining: 3 requests left, 1 sequences running, 2 waiting, 1 streams open; until 2000-02-29 00:00:00 UTC
durable     no: no space left; 3 records not written
walls       reduced: no cgroup v2
sandbox     reduced: gateways are without a user of its own, landlock for TCP

MODEL    STATE  ARCHITECTURE  DEVICE  DTYPE  KV   KERNELS  THREADS   WEIGHTS  CONTEXT  WORKER  RESTARTS
smollm2  ready  llama         cpu     q8     f16  avx2           2  138.1MiB     8192      78         0

MODEL    BLOCKS  FREE  CACHED  HELD  BLOCK SIZE  RUNNING  WAITING  STEPS  LAST STEP
smollm2    1000   984       9     7          16        1        2  12345   1.2s ago

MODEL     WEIGHTS  KV  SCRATCH  PINNED  CGROUP
smollm2  138.1MiB   -   3.0MiB      0B       -

TENANT  STATE  PORT  MODEL    KV FLOOR  KV CEILING  HELD  CACHED  RUNNING  WAITING  KEYS  LOOKUP  GATEWAY
acme    ready  8101  smollm2       20%         50%     7       9        1        2     1  on         4242
"
    );
    let bare = StatusInfo { models: vec![], tenants: vec![], ..status() };
    let (_, text) = done("status", Reply::Status(bare));
    assert!(text.ends_with("\n\nno models\n\nno tenants\n"), "{text}");
}

#[test]
fn a_reload_says_what_takes_effect_and_when() {
    let settings = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let applied = |now: &[&str], later: &[&str]| {
        let outcome = ReloadOutcome::Applied { now: settings(now), later: settings(later) };
        Reply::Reloaded(ReloadInfo { at_unix: 9, outcome })
    };
    let (command, text) = done("reload", applied(&["log.level", "retention"], &["listen"]));
    assert_eq!(command, Command::Reload);
    assert_eq!(text, "now: log.level, retention\nat the next restart: listen\n");
    let (_, text) = done("reload", applied(&[], &[]));
    assert_eq!(text, "the configuration was read again; nothing has changed\n");
}

#[test]
fn metrics_are_printed_as_they_come() {
    let (command, text) = done("metrics", Reply::Metrics(MetricsText { text: "a 1\nb 2\n".to_owned() }));
    assert_eq!((command, text.as_str()), (Command::Metrics, "a 1\nb 2\n"));
}

#[test]
fn json_is_the_reply_and_reads_back() {
    for line in ["--json status", "status --json"] {
        let (_, text) = done(line, Reply::Status(status()));
        assert_eq!(serde_json::from_str::<Reply>(&text).unwrap(), Reply::Status(status()));
        assert!(text.starts_with("{\n  \"reply\": \"status\",\n") && text.ends_with("}\n"), "{text}");
    }
    let (_, text) = done(
        "tenant add acme --json",
        Reply::TenantAdded(TenantAdded { tenant: tenant("acme", 1), key: Some(key()), notes: Vec::new() }),
    );
    let value: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(value["key"]["key"], "pgd_abcdefgh", "scripts get the key");
}

#[test]
fn a_refusal_is_printed_with_its_remedy_and_exits_with_1() {
    let refusal =
        ControlError::new(ErrorCode::UnknownTenant, "no tenant `acne`").remedy("did you mean `acme`?");
    let (_, outcome) = asked("tenant show acne", Response::Err(refusal));
    let stderr = "error: no tenant `acne`\nhint: did you mean `acme`?\n".to_owned();
    assert_eq!(outcome, Outcome { code: failure::REFUSED, stdout: String::new(), stderr });
}

#[test]
fn a_daemon_that_is_not_there_exits_with_3_and_says_how_to_start_it() {
    let dir = tempfile::tempdir().unwrap();
    let outcome = run(args("status"), &environment(dir.path()));
    assert_eq!(outcome.code, failure::UNREACHABLE);
    let socket = dir.path().join("admin.sock");
    assert_eq!(
        outcome.stderr,
        format!(
            "error: pagedd is not running: no admin socket at {}\nhint: start it: as a service with `systemctl start pagedd`, else with `pagedd --config FILE`; \
             or name its socket with --socket PATH\n",
            socket.display()
        )
    );
}

#[test]
fn an_answer_to_another_question_exits_with_4() {
    let (_, outcome) = asked("status", Response::Ok(shown()));
    assert_eq!(outcome.code, failure::INTERNAL);
    assert!(
        outcome.stderr.starts_with("error: pagedd answered `status` by something else: tenant\nhint: "),
        "{outcome:?}"
    );
}

#[test]
fn names_amounts_and_ports_are_refused_before_the_daemon_is_asked() {
    let long = "x".repeat(300);
    let cases = [
        ("tenant add a/b".to_owned(), "tenant name `a/b` has '/'; allowed are a-z, 0-9 and -"),
        (
            format!("tenant add {long}"),
            "tenant name `xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx…` has 300 characters; it may have 1 to 63",
        ),
        ("tenant show 1a".to_owned(), "tenant name `1a` must begin with a letter from a to z"),
        ("tenant set Acme --auth on".to_owned(), "tenant name `Acme` has 'A'; allowed are a-z, 0-9 and -"),
        ("tenant suspend a_b".to_owned(), "tenant name `a_b` has '_'; allowed are a-z, 0-9 and -"),
        ("tenant resume a.b".to_owned(), "tenant name `a.b` has '.'; allowed are a-z, 0-9 and -"),
        ("tenant remove ../x".to_owned(), "tenant name `../x` has '.'; allowed are a-z, 0-9 and -"),
        ("key create A".to_owned(), "tenant name `A` has 'A'; allowed are a-z, 0-9 and -"),
        ("key list A".to_owned(), "tenant name `A` has 'A'; allowed are a-z, 0-9 and -"),
        ("key revoke A 1".to_owned(), "tenant name `A` has 'A'; allowed are a-z, 0-9 and -"),
        (
            "tenant add a --kv-floor 120%".to_owned(),
            "--kv-floor: `120%` is not between 0% and 100% with at most two decimals",
        ),
        (
            "tenant add a --kv-ceiling 5".to_owned(),
            "--kv-ceiling: `5` needs a unit: %, tokens, B, KiB, MiB, GiB, TiB, KB, MB, GB or TB",
        ),
        ("tenant add a --port 0".to_owned(), "--port: `0` is no port from 1 to 65535"),
        ("tenant add a --port 99999".to_owned(), "--port: `99999` is no port from 1 to 65535"),
        (
            "tenant add a --retention soon".to_owned(),
            "--retention: `soon` is no duration; write for example 30s, 10m or 500ms",
        ),
        ("tenant set a --retention 31d".to_owned(), "--retention: 31d is more than 30d"),
        (
            "tenant set a --max-concurrent many".to_owned(),
            "--max-concurrent: `many` is neither `none` nor a number from 1 to 1000000000000",
        ),
        (
            "tenant add a --model x/y".to_owned(),
            "model name `x/y` has '/'; allowed are a-z, A-Z, 0-9, -, _ and .",
        ),
    ];
    for (line, message) in cases {
        let outcome = alone(&line);
        assert_eq!((outcome.code, outcome.stderr), (failure::USAGE, format!("error: {message}\n")), "{line}");
    }
    let label = format!("key create a --label {}", "x".repeat(101));
    assert_eq!(
        alone(&label).stderr,
        "error: --label: a label has 1 to 100 characters and no control characters\n"
    );
}

#[test]
fn a_wrong_command_line_exits_with_2_and_help_with_0() {
    for line in [
        "",
        "dance",
        "tenant",
        "tenant add",
        "tenant add a b",
        "status --colour",
        "drain --timeout soon",
        "undrain acme",
        "key revoke a b",
        "completions tcsh",
    ] {
        let outcome = alone(line);
        assert_eq!((outcome.code, outcome.stdout.as_str()), (failure::USAGE, ""), "{line}");
        assert!(!outcome.stderr.is_empty(), "{line}");
    }
    let outcome = alone("key revoke acme zz");
    assert!(outcome.stderr.contains("'zz'"), "{outcome:?}");
    assert!(
        outcome.stderr.contains("a key's id is a number, as `pagedctl key list TENANT` shows it"),
        "{outcome:?}"
    );
    assert!(alone("tenant ad x").stderr.contains("a similar subcommand exists: 'add'"));
    for line in ["--help", "tenant --help", "tenant add --help", "--version", "help key"] {
        let outcome = alone(line);
        assert_eq!((outcome.code, outcome.stderr.as_str()), (failure::OK, ""), "{line}");
    }
    let help = alone("--help").stdout;
    for line in failure::HELP.lines() {
        assert!(help.contains(line), "{line:?} is not in\n{help}");
    }
}

#[test]
fn the_command_line_holds_together() {
    Cli::command().debug_assert();
}

#[test]
fn the_socket_is_the_options_then_the_environments_then_the_first_that_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let mut environment = environment(dir.path());
    let option = || Some(dir.path().join("option"));
    assert_eq!(environment.socket(None), dir.path().join("admin.sock"), "the last where none is there");
    std::fs::write(dir.path().join("run.sock"), "").unwrap();
    assert_eq!(environment.socket(None), dir.path().join("run.sock"));
    environment.socket = Some("/environment".into());
    assert_eq!(environment.socket(None), Path::new("/environment"));
    assert_eq!(environment.socket(option()), dir.path().join("option"));
}

/// A configuration file with a model beside it.
pub fn configuration(text: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("m.gguf"), "GGUF").unwrap();
    std::fs::write(dir.path().join("pagedd.yaml"), text).unwrap();
    dir
}

#[test]
fn config_check_tells_what_holds_or_the_place_of_the_first_mistake() {
    let dir = configuration("models:\n  m: { path: m.gguf, kv_memory: 25% }\n");
    let file = dir.path().join("pagedd.yaml").display().to_string();
    let outcome = run(args("config check"), &environment(dir.path()));
    let path = dir.path().join("m.gguf").display().to_string();
    let expected = format!(
        "{file}: valid\nMODEL  DEVICE  DTYPE  KV DTYPE  KV MEMORY  PATH\nm      cpu     auto   f16       25%        {path}\n"
    );
    assert_eq!((outcome.code, outcome.stdout), (failure::OK, expected));
    let outcome = run(args(&format!("config check {file} --json")), &environment(Path::new("/nowhere")));
    let value: serde_json::Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!(
        (&value["valid"], &value["models"][0]["path"]),
        (&serde_json::json!(true), &serde_json::json!(path))
    );

    let dir = configuration("models:\n  m: { path: m.gguf, blok_size: 16 }\n");
    let file = dir.path().join("pagedd.yaml").display().to_string();
    let outcome = run(args("config check"), &environment(dir.path()));
    assert_eq!(outcome.code, failure::REFUSED);
    assert_eq!(
        outcome.stderr,
        format!("error: {file}:2:22: models.m: unknown key `blok_size`; did you mean `block_size`?\n")
    );
}

#[test]
fn config_check_without_a_model_or_a_file_says_so() {
    let dir = configuration("");
    let file = dir.path().join("pagedd.yaml").display().to_string();
    let outcome = run(args("config check"), &environment(dir.path()));
    assert_eq!((outcome.code, outcome.stdout.as_str()), (failure::REFUSED, ""));
    assert!(outcome.stderr.contains(&file) && outcome.stderr.contains("models:"), "{outcome:?}");
    let dir = tempfile::tempdir().unwrap();
    let outcome = run(args("config check"), &environment(dir.path()));
    assert_eq!(outcome.code, failure::USAGE);
    assert!(outcome.stderr.ends_with("hint: name a file: pagedctl config check FILE\n"), "{outcome:?}");
}

#[test]
fn completions_know_every_subcommand() {
    for shell in ["bash", "zsh", "fish"] {
        let outcome = alone(&format!("completions {shell}"));
        assert_eq!(outcome.code, failure::OK);
        for word in ["tenant", "suspend", "revoke", "completions", "kv-floor"] {
            assert!(outcome.stdout.contains(word), "{shell}: {word}");
        }
    }
}

#[test]
fn times_ages_and_sizes_are_shown_as_people_read_them() {
    let times = [
        (-1, "1969-12-31 23:59:59 UTC"),
        (1_709_164_799, "2024-02-28 23:59:59 UTC"),
        (1_709_164_800, "2024-02-29 00:00:00 UTC"),
        (1_709_251_200, "2024-03-01 00:00:00 UTC"),
        (4_107_542_400, "2100-03-01 00:00:00 UTC"),
    ];
    for (unix, text) in times {
        assert_eq!(show::time(unix), text, "{unix}");
    }
    assert_eq!([0, 59, 60, 3_600, 90_061].map(show::uptime), ["0s", "59s", "1m 0s", "1h 0m", "1d 1h"]);
    assert_eq!([0, 999, 1_000, 59_999, 60_000].map(show::age), ["0ms", "999ms", "1.0s", "59.9s", "1m 0s"]);
    assert_eq!([0, 1_023, 1_024, 1_610_612_736].map(show::bytes), ["0B", "1023B", "1.0KiB", "1.5GiB"]);
}
