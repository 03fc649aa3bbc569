use crate::line::read_line;
use crate::*;
use pagedd_core::LimitName;
use proptest::prelude::*;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

fn name() -> TenantName {
    TenantName { name: "acme".to_owned() }
}

fn tenant() -> TenantInfo {
    TenantInfo {
        id: 3,
        name: "acme".to_owned(),
        state: TenantState::Ready,
        port: 8101,
        url: "http://127.0.0.1:8101".to_owned(),
        model: "smollm2".to_owned(),
        auth: true,
        keys: 1,
        share: ShareInfo {
            floor: "20%".to_owned(),
            ceiling: "50%".to_owned(),
            floor_blocks: Some(200),
            ceiling_blocks: None,
            held_blocks: 7,
            cached_blocks: 9,
        },
        prompt_lookup: true,
        retention: "10m".to_owned(),
        quotas: QuotaInfo::default(),
        running: 1,
        waiting: 2,
        gateway: GatewayInfo { state: GatewayState::Running, pid: Some(42), restarts: 0 },
        created_unix: 1_790_000_000,
    }
}

fn key() -> KeyCreated {
    KeyCreated {
        id: 5,
        tenant: "acme".to_owned(),
        label: None,
        key: Secret::new("pgd_secret".to_owned()),
        prefix: "pgd_secr".to_owned(),
    }
}

const TENANT: &str = r#"{"id":3,"name":"acme","state":{"is":"ready"},"port":8101,"url":"http://127.0.0.1:8101","model":"smollm2","auth":true,"keys":1,"share":{"floor":"20%","ceiling":"50%","floor_blocks":200,"ceiling_blocks":null,"held_blocks":7,"cached_blocks":9},"prompt_lookup":true,"retention":"10m","quotas":{"requests_per_minute":{"limit":null,"used":0,"refused":0},"tokens_per_minute":{"limit":null,"used":0,"refused":0},"max_concurrent":{"limit":null,"used":0,"refused":0},"max_queued_requests":{"limit":null,"used":0,"refused":0},"max_queued_tokens":{"limit":null,"used":0,"refused":0}},"running":1,"waiting":2,"gateway":{"state":{"is":"running"},"pid":42,"restarts":0},"created_unix":1790000000}"#;

const WALL: &str = r#"{"limits":{},"not_enforced":[],"usage":null,"device_bytes":0}"#;

fn commands() -> Vec<(Command, &'static str)> {
    let changes = TenantChanges {
        port: Some(9000),
        auth: Some(false),
        prompt_lookup: Some(true),
        retention: Some("0s".to_owned()),
        quotas: QuotaChanges { max_concurrent: Some(QuotaLimit::None), ..QuotaChanges::default() },
        limits: LimitTexts { cpu_max: Some("50%".to_owned()), ..LimitTexts::default() }.into(),
        ..TenantChanges::default()
    };
    let spec = TenantSpec {
        name: "acme".to_owned(),
        port: None,
        model: Some("smollm2".to_owned()),
        kv_floor: Some("20%".to_owned()),
        kv_ceiling: None,
        no_auth: false,
        prompt_lookup: None,
        retention: None,
        quotas: QuotaChanges { tokens_per_minute: Some(QuotaLimit::At(5)), ..QuotaChanges::default() },
        limits: Box::default(),
    };
    let label = Some("laptop".to_owned());
    vec![
        (
            Command::TenantAdd(spec),
            r#""command":"tenant_add","name":"acme","port":null,"model":"smollm2","kv_floor":"20%","kv_ceiling":null,"no_auth":false,"prompt_lookup":null,"retention":null,"quotas":{"tokens_per_minute":{"at":5}},"limits":{}"#,
        ),
        (
            Command::TenantSet(TenantSet { name: "acme".to_owned(), changes, force: false }),
            r#""command":"tenant_set","name":"acme","changes":{"port":9000,"kv_floor":null,"kv_ceiling":null,"auth":false,"prompt_lookup":true,"retention":"0s","quotas":{"max_concurrent":"none"},"limits":{"cpu_max":"50%"}},"force":false"#,
        ),
        (
            Command::TenantRemove(TenantRemove { name: "acme".to_owned(), force: true }),
            r#""command":"tenant_remove","name":"acme","force":true"#,
        ),
        (Command::TenantList, r#""command":"tenant_list""#),
        (Command::TenantShow(name()), r#""command":"tenant_show","name":"acme""#),
        (Command::TenantSuspend(name()), r#""command":"tenant_suspend","name":"acme""#),
        (Command::TenantResume(name()), r#""command":"tenant_resume","name":"acme""#),
        (
            Command::KeyCreate(KeyCreate { tenant: "acme".to_owned(), label }),
            r#""command":"key_create","tenant":"acme","label":"laptop""#,
        ),
        (Command::KeyList(KeyList { tenant: "acme".to_owned() }), r#""command":"key_list","tenant":"acme""#),
        (
            Command::KeyRevoke(KeyRevoke { tenant: "acme".to_owned(), id: 7 }),
            r#""command":"key_revoke","tenant":"acme","id":7"#,
        ),
        (Command::Drain(Drain { timeout_ms: Some(1_500) }), r#""command":"drain","timeout_ms":1500"#),
        (Command::Undrain, r#""command":"undrain""#),
        (Command::Status, r#""command":"status""#),
        (Command::Reload, r#""command":"reload""#),
        (Command::Metrics, r#""command":"metrics""#),
        (
            Command::Usage(UsageAsk { tenant: None, since_unix: 7, by: UsageBy::Day }),
            r#""command":"usage","tenant":null,"since_unix":7,"by":"day""#,
        ),
        (
            Command::Checkpoint(CheckpointCommand::Save(CheckpointSave { name: "one".to_owned(), kv: true })),
            r#""command":"checkpoint","action":"save","name":"one","kv":true"#,
        ),
    ]
}

fn draining() -> DrainInfo {
    let state = DrainState::Draining { since_unix: 5, deadline_unix: None };
    DrainInfo { state, requests: 3, running: 1, waiting: 2, streams: 1, too_large: 4 }
}

fn status() -> StatusInfo {
    StatusInfo {
        version: "0.1.0".to_owned(),
        pid: 1,
        uptime_s: 60,
        state_dir: "/s".to_owned(),
        config: None,
        reload: None,
        walls: Walls::Reduced { reason: "no cgroup v2".to_owned() },
        sandbox: SandboxState::Reduced { missing: vec![SandboxPart::OwnUser, SandboxPart::LandlockTcp] },
        durable: Durable::Yes,
        supervisor: Supervisor::Keeper,
        drain: DrainInfo { state: DrainState::Admitting, ..draining() },
        models: vec![ModelStatus {
            name: "m".to_owned(),
            path: "/m.gguf".to_owned(),
            state: ModelState::Loading { permille: 500 },
            architecture: Some("llama".to_owned()),
            parameters: None,
            device: "cpu".to_owned(),
            dtype: None,
            kv_dtype: None,
            kernels: None,
            threads: Some(2),
            weight_bytes: None,
            kv_bytes: None,
            scratch_bytes: None,
            pinned_bytes: None,
            memory_bytes: None,
            block_size: 16,
            max_model_len: None,
            blocks_total: Some(1_000),
            blocks_free: 984,
            blocks_cached: 9,
            blocks_held: 7,
            running: 1,
            waiting: 2,
            steps: 0,
            last_step_age_ms: None,
            worker_pid: None,
            restarts: 0,
            weights_reused: None,
        }],
        tenants: vec![],
    }
}

fn replies() -> Vec<(Reply, String)> {
    let revoked = KeyInfo {
        id: 5,
        label: Some("laptop".to_owned()),
        prefix: "pgd_secr".to_owned(),
        created_unix: 1,
        revoked_unix: Some(2),
    };
    let shown = r#""id":5,"label":"laptop","prefix":"pgd_secr","created_unix":1,"revoked_unix":2"#;
    let created = r#""id":5,"tenant":"acme","label":null,"key":"pgd_secret","prefix":"pgd_secr""#;
    vec![
        (
            Reply::TenantAdded(TenantAdded { tenant: tenant(), key: Some(key()), notes: Vec::new() }),
            format!(r#"{{"reply":"tenant_added","tenant":{TENANT},"key":{{{created}}}}}"#),
        ),
        (
            Reply::Tenant(TenantShown { tenant: tenant(), wall: Box::default(), notes: Vec::new() }),
            format!(r#"{{"reply":"tenant","tenant":{TENANT},"wall":{WALL}}}"#),
        ),
        (
            Reply::Tenants(TenantListed { tenants: vec![tenant()] }),
            format!(r#"{{"reply":"tenants","tenants":[{TENANT}]}}"#),
        ),
        (
            Reply::TenantRemoved(Removed { id: 3, name: "acme".to_owned(), cancelled: 4 }),
            r#"{"reply":"tenant_removed","id":3,"name":"acme","cancelled":4}"#.to_owned(),
        ),
        (Reply::KeyCreated(key()), format!(r#"{{"reply":"key_created",{created}}}"#)),
        (
            Reply::Keys(KeyListed { tenant: "acme".to_owned(), keys: vec![revoked.clone()] }),
            format!(r#"{{"reply":"keys","tenant":"acme","keys":[{{{shown}}}]}}"#),
        ),
        (Reply::KeyRevoked(revoked), format!(r#"{{"reply":"key_revoked",{shown}}}"#)),
        (
            Reply::Drain(draining()),
            r#"{"reply":"drain","state":{"is":"draining","since_unix":5,"deadline_unix":null},"requests":3,"running":1,"waiting":2,"streams":1,"too_large":4}"#.to_owned(),
        ),
        (
            Reply::Reloaded(ReloadInfo {
                at_unix: 9,
                outcome: ReloadOutcome::Applied { now: vec!["retention".to_owned()], later: vec![] },
            }),
            r#"{"reply":"reloaded","at_unix":9,"outcome":{"is":"applied","now":["retention"],"later":[]}}"#.to_owned(),
        ),
        (
            Reply::Status(status()),
            concat!(
                r#"{"reply":"status","version":"0.1.0","pid":1,"uptime_s":60,"state_dir":"/s","config":null,"#,
                r#""reload":null,"walls":{"is":"reduced","reason":"no cgroup v2"},"#,
                r#""sandbox":{"is":"reduced","missing":["own_user","landlock_tcp"]},"#,
                r#""durable":{"is":"yes"},"supervisor":"keeper","#,
                r#""drain":{"state":{"is":"admitting"},"requests":3,"running":1,"waiting":2,"streams":1,"too_large":4},"#,
                r#""models":[{"name":"m","path":"/m.gguf","state":{"is":"loading","permille":500},"#,
                r#""architecture":"llama","parameters":null,"device":"cpu","dtype":null,"kv_dtype":null,"#,
                r#""kernels":null,"threads":2,"weight_bytes":null,"kv_bytes":null,"scratch_bytes":null,"pinned_bytes":null,"memory_bytes":null,"block_size":16,"#,
                r#""max_model_len":null,"blocks_total":1000,"blocks_free":984,"blocks_cached":9,"blocks_held":7,"#,
                r#""running":1,"waiting":2,"steps":0,"last_step_age_ms":null,"worker_pid":null,"restarts":0,"#,
                r#""weights_reused":null}],"tenants":[]}"#
            )
            .to_owned(),
        ),
        (
            Reply::Metrics(MetricsText { text: "a 1\n".to_owned() }),
            r#"{"reply":"metrics","text":"a 1\n"}"#.to_owned(),
        ),
    ]
}

#[test]
fn every_command_has_its_recorded_form_and_reads_back() {
    let commands = commands();
    assert_eq!(commands.iter().map(|(command, _)| command.name()).collect::<Vec<_>>(), Command::NAMES);
    for (command, fields) in commands {
        let line = encode(&Request { protocol: PROTOCOL, command: command.clone() }).unwrap();
        assert_eq!(String::from_utf8(line.clone()).unwrap(), format!("{{\"protocol\":1,{fields}}}\n"));
        assert!(fields.contains(&format!("\"command\":\"{}\"", command.name())), "{fields}");
        assert_eq!(decode_request(&line), Ok(command));
    }
}

#[test]
fn every_reply_has_its_recorded_form_and_reads_back() {
    for (reply, json) in replies() {
        let line = encode(&Response::Ok(reply.clone())).unwrap();
        assert_eq!(String::from_utf8(line.clone()).unwrap(), format!("{{\"ok\":{json}}}\n"));
        assert_eq!(serde_json::from_slice::<Response>(&line).unwrap(), Response::from(Ok(reply)));
    }
}

#[test]
fn every_state_has_its_recorded_form() {
    fn json(value: &impl serde::Serialize) -> String {
        serde_json::to_string(value).unwrap()
    }
    let error = "x".to_owned();
    assert_eq!(json(&TenantState::Starting), r#"{"is":"starting"}"#);
    assert_eq!(json(&TenantState::Suspended), r#"{"is":"suspended"}"#);
    assert_eq!(json(&TenantState::Draining), r#"{"is":"draining"}"#);
    assert_eq!(
        json(&DrainState::Stopping { since_unix: 5, deadline_unix: 35 }),
        r#"{"is":"stopping","since_unix":5,"deadline_unix":35}"#
    );
    assert_eq!(json(&TenantState::Failed { error: error.clone() }), r#"{"is":"failed","error":"x"}"#);
    assert_eq!(json(&GatewayState::Starting), r#"{"is":"starting"}"#);
    assert_eq!(json(&GatewayState::Restarting { attempt: 2 }), r#"{"is":"restarting","attempt":2}"#);
    assert_eq!(json(&GatewayState::Failed { error: error.clone() }), r#"{"is":"failed","error":"x"}"#);
    assert_eq!(json(&ModelState::Ready), r#"{"is":"ready"}"#);
    assert_eq!(json(&ModelState::Restarting { attempt: 2 }), r#"{"is":"restarting","attempt":2}"#);
    assert_eq!(json(&ModelState::Failed { error }), r#"{"is":"failed","error":"x"}"#);
    assert_eq!(json(&Walls::Full), r#"{"is":"full"}"#);
    for supervisor in [Supervisor::Systemd, Supervisor::Keeper, Supervisor::None] {
        assert_eq!(json(&supervisor), format!("\"{}\"", supervisor.as_str()));
    }
}

#[test]
fn every_error_code_is_its_own_word_and_a_refusal_has_its_recorded_form() {
    let words: std::collections::BTreeSet<_> = ErrorCode::ALL.iter().map(|code| code.as_str()).collect();
    assert_eq!(words.len(), ErrorCode::ALL.len());
    for code in ErrorCode::ALL {
        assert_eq!(serde_json::to_string(code).unwrap(), format!("\"{code}\""));
    }
    let error = ControlError::new(ErrorCode::UnknownTenant, "no tenant `a`").remedy("list them");
    let json = r#"{"err":{"code":"unknown_tenant","message":"no tenant `a`","remedy":"list them"}}"#;
    assert_eq!(serde_json::to_string(&Response::from(Err(error))).unwrap(), json);
    let plain = r#"{"err":{"code":"internal","message":"m"}}"#;
    let response = Response::Err(ControlError::new(ErrorCode::Internal, "m"));
    assert_eq!(serde_json::to_string(&response).unwrap(), plain);
    assert_eq!(serde_json::from_str::<Response>(plain).unwrap(), response);
}

#[test]
fn a_refusal_is_one_line_whatever_a_name_holds() {
    let error = ControlError::new(ErrorCode::InvalidName, "a\nb\u{1b}[2J").remedy("c\r\nd");
    assert_eq!(error.message, "a b [2J");
    assert_eq!(error.remedy.as_deref(), Some("c  d"));
}

#[test]
fn another_version_is_told_both_versions_even_with_an_unknown_command() {
    let error = decode_request(br#"{"protocol":9,"command":"dance"}"#).unwrap_err();
    assert_eq!(error.code, ErrorCode::UnsupportedProtocol);
    assert_eq!(error.message, "the client speaks version 9 of the admin protocol, the daemon 1");
}

#[test]
fn what_is_no_request_is_refused_by_one_line() {
    let cases: [&[u8]; 9] = [
        b"",
        b"\n",
        b"GET / HTTP/1.1",
        b"{}",
        br#"{"protocol":1}"#,
        br#"{"protocol":1,"command":"dance"}"#,
        br#"{"protocol":1,"command":"tenant_show"}"#,
        br#"{"protocol":1,"command":"tenant_show","name":3}"#,
        b"{\"protocol\":1,\"command\":\"\xff\"}",
    ];
    for line in cases {
        let error = decode_request(line).unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidRequest, "{line:?}");
        assert!(!error.message.contains('\n'), "{}", error.message);
    }
}

#[test]
fn a_line_is_read_up_to_its_limit() {
    let read = |text: &[u8], limit| {
        let mut reader = BufReader::with_capacity(3, text);
        read_line(&mut reader, limit)
    };
    assert_eq!(read(b"", 4).unwrap(), None);
    assert_eq!(read(b"abc\nd", 4).unwrap().unwrap(), b"abc");
    assert!(matches!(read(b"abcd\n", 4), Err(LineError::TooLong { limit: 4 })));
    assert!(matches!(read(b"ab", 4), Err(LineError::Cut)));
}

#[test]
fn a_new_key_is_not_in_debug_output() {
    let text = format!("{:?}", Reply::KeyCreated(key()));
    assert!(text.contains("Secret(…)") && !text.contains("pgd_secret"), "{text}");
    assert_eq!(key().key.reveal(), "pgd_secret");
}

#[test]
fn nothing_is_left_once_no_request_is_live_and_none_is_read() {
    let left = |requests, streams| DrainInfo { requests, streams, ..draining() }.is_empty();
    assert!(left(0, 0) && !left(1, 0) && !left(0, 1));
}

#[test]
fn limits_and_use_may_be_missing_on_the_wire() {
    let request = r#"{"protocol":1,"command":"tenant_set","name":"acme","changes":{"port":9000}}"#;
    let Command::TenantSet(TenantSet { changes, force, .. }) = decode_request(request.as_bytes()).unwrap()
    else {
        panic!("{request}");
    };
    assert_eq!((changes.port, *changes.limits, force), (Some(9000), LimitTexts::default(), false));
    let shown: Reply = serde_json::from_str(&format!(r#"{{"reply":"tenant","tenant":{TENANT}}}"#)).unwrap();
    assert_eq!(
        shown,
        Reply::Tenant(TenantShown { tenant: tenant(), wall: Box::default(), notes: Vec::new() })
    );
}

#[test]
fn texts_of_limits_are_found_under_their_names() {
    let mut texts = LimitTexts::default();
    for name in LimitName::ALL {
        assert_eq!(texts.get(name), None);
        texts.set(name, Some(name.to_string()));
    }
    assert!(texts.given().eq(LimitName::ALL.into_iter().map(|name| (name, name.file()))), "{texts:?}");
}

#[test]
fn changes_that_change_nothing_are_known_as_such() {
    assert!(TenantChanges::default().is_empty());
    assert!(!TenantChanges { auth: Some(true), ..TenantChanges::default() }.is_empty());
}

/// A daemon of one connection that answers each line by the next of `answers`, then goes away.
fn serve(path: &Path, answers: Vec<Vec<u8>>) -> std::thread::JoinHandle<Vec<String>> {
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
        let mut seen = Vec::new();
        for answer in answers {
            seen.push(lines.next().unwrap().unwrap());
            stream.write_all(&answer).unwrap();
        }
        seen
    })
}

#[test]
fn a_client_asks_and_is_answered_over_one_connection() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("admin.sock");
    let reply = Reply::Tenant(TenantShown { tenant: tenant(), wall: Box::default(), notes: Vec::new() });
    let refusal = ControlError::new(ErrorCode::UnknownTenant, "no tenant `acme`").remedy("list them");
    let answers =
        vec![encode(&Response::Ok(reply.clone())).unwrap(), encode(&Response::Err(refusal.clone())).unwrap()];
    let daemon = serve(&path, answers);
    let mut client = Client::connect(&path).unwrap();
    assert_eq!(client.call(Command::TenantShow(name())).unwrap(), reply);
    let error = client.call(Command::TenantSuspend(name())).unwrap_err();
    assert_eq!((error.to_string(), error.remedy()), (refusal.message.clone(), refusal.remedy.clone()));
    assert!(matches!(error, ClientError::Refused(error) if error == refusal));
    assert_eq!(
        daemon.join().unwrap(),
        [
            r#"{"protocol":1,"command":"tenant_show","name":"acme"}"#,
            r#"{"protocol":1,"command":"tenant_suspend","name":"acme"}"#
        ]
    );
}

#[test]
fn a_daemon_that_is_not_there_is_named_by_its_socket() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("admin.sock");
    let left_behind = dir.path().join("left-behind.sock");
    drop(UnixListener::bind(&left_behind).unwrap());
    for path in [missing, left_behind] {
        let error = Client::connect(&path).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("pagedd is not running: no admin socket at {}", path.display())
        );
        assert!(
            error.remedy().unwrap().starts_with("start it: as a service with `systemctl start pagedd`, else with `pagedd --config FILE`; or name "),
            "{error}"
        );
    }
    let long = dir.path().join("x".repeat(200));
    assert!(matches!(Client::connect(&long), Err(ClientError::PathTooLong { .. })));
}

#[test]
fn a_daemon_that_goes_away_or_talks_nonsense_is_told_apart() {
    let dir = tempfile::tempdir().unwrap();
    let mut number = 0;
    let mut ask = |answer: &[u8]| {
        number += 1;
        let path = dir.path().join(format!("{number}.sock"));
        let daemon = serve(&path, vec![answer.to_vec()]);
        let error = Client::connect(&path).unwrap().call(Command::Status).unwrap_err();
        daemon.join().unwrap();
        error
    };
    assert!(matches!(ask(b""), ClientError::Closed { .. }));
    assert!(matches!(ask(b"{\"ok\":{\"reply\":"), ClientError::Closed { .. }));
    assert!(matches!(ask(b"HTTP/1.1 400 Bad Request\r\n"), ClientError::Garbled { .. }));
    assert!(matches!(ask(b"{\"ok\":{\"reply\":\"dance\"}}\n"), ClientError::Garbled { .. }));
}

#[test]
fn a_daemon_that_does_not_answer_is_given_up() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("admin.sock");
    // Nobody accepts: the kernel takes the connection, and no answer comes.
    let _listener = UnixListener::bind(&path).unwrap();
    let mut client = Client::connect(&path).unwrap();
    client.set_timeout(Duration::from_millis(20)).unwrap();
    let error = client.call(Command::Status).unwrap_err();
    assert!(matches!(error, ClientError::TimedOut { .. }), "{error}");
}

#[test]
fn a_socket_that_this_user_may_not_use_is_said_to_be_one() {
    let error = ClientError::PermissionDenied { path: "/run/pagedd/admin.sock".into() };
    assert_eq!(error.to_string(), "permission denied on the admin socket /run/pagedd/admin.sock");
    assert!(error.remedy().unwrap().contains("as a member of the group of"), "{error}");
    // A regular file in the socket's place is refused as a connection.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("file");
    std::fs::write(&path, "").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o000)).unwrap();
    let error = Client::connect(&path).unwrap_err();
    assert!(
        matches!(error, ClientError::NotRunning { .. } | ClientError::PermissionDenied { .. }),
        "{error}"
    );
}

proptest! {
    #[test]
    fn no_bytes_make_the_daemons_reader_panic(line in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = decode_request(&line);
    }

    #[test]
    fn any_text_in_a_message_stays_inside_its_line(text in "\\PC{0,40}|[\n\r\t\u{0}-\u{1f}]{0,9}") {
        let command = Command::TenantShow(TenantName { name: text });
        let line = encode(&Request { protocol: PROTOCOL, command: command.clone() }).unwrap();
        prop_assert_eq!(line.iter().position(|byte| *byte == b'\n'), Some(line.len() - 1));
        prop_assert_eq!(decode_request(&line), Ok(command));
    }
}

#[test]
fn every_word_about_checkpoints_has_its_recorded_form() {
    let at = || CheckpointAt { which: "/c/one".to_owned() };
    let commands = [
        (CheckpointCommand::List, r#""action":"list""#, false),
        (CheckpointCommand::Inspect(at()), r#""action":"inspect","which":"/c/one""#, false),
        (CheckpointCommand::Verify(at()), r#""action":"verify","which":"/c/one""#, false),
        (CheckpointCommand::Restore(at()), r#""action":"restore","which":"/c/one""#, true),
    ];
    for (command, fields, changes) in commands {
        let command = Command::Checkpoint(command);
        let line = encode(&Request { protocol: PROTOCOL, command: command.clone() }).unwrap();
        let text = format!("{{\"protocol\":1,\"command\":\"checkpoint\",{fields}}}\n");
        assert_eq!(String::from_utf8(line.clone()).unwrap(), text);
        assert_eq!(command.changes(), changes);
        assert_eq!(decode_request(&line), Ok(command));
    }
    let info = CheckpointInfo {
        name: "one".to_owned(),
        path: "/c/one".to_owned(),
        created_unix: 1,
        pagedd: "0.1.0".to_owned(),
        bytes: 2,
        models: Vec::new(),
    };
    let text = r#""name":"one","path":"/c/one","created_unix":1,"pagedd":"0.1.0","bytes":2,"models":[]"#;
    let damaged = CheckpointState::Damaged { error: "x".to_owned() };
    let listing = |state| CheckpointListing { name: "one".to_owned(), state };
    let checkpoints = vec![listing(CheckpointState::Complete(info.clone())), listing(damaged)];
    let shown = CheckpointShown {
        checkpoint: info.clone(),
        files: vec![CheckpointFile { name: "f".to_owned(), bytes: 2 }],
        tenants: Vec::new(),
        damaged_requests: 0,
    };
    let restoring = CheckpointRestoring { checkpoint: info.clone(), state_dir: "/s".to_owned() };
    let replies = [
        (Reply::CheckpointSaved(info.clone()), format!(r#"{{"reply":"checkpoint_saved",{text}}}"#)),
        (Reply::CheckpointWhole(info), format!(r#"{{"reply":"checkpoint_whole",{text}}}"#)),
        (
            Reply::Checkpoints(CheckpointListed { checkpoints }),
            format!(
                r#"{{"reply":"checkpoints","checkpoints":[{{"name":"one","state":{{"is":"complete",{text}}}}},{{"name":"one","state":{{"is":"damaged","error":"x"}}}}]}}"#
            ),
        ),
        (
            Reply::Checkpoint(shown),
            format!(
                r#"{{"reply":"checkpoint","checkpoint":{{{text}}},"files":[{{"name":"f","bytes":2}}],"tenants":[],"damaged_requests":0}}"#
            ),
        ),
        (
            Reply::CheckpointRestoring(restoring),
            format!(r#"{{"reply":"checkpoint_restoring","checkpoint":{{{text}}},"state_dir":"/s"}}"#),
        ),
    ];
    for (reply, json) in replies {
        assert_eq!(serde_json::to_string(&reply).unwrap(), json);
        assert_eq!(serde_json::from_str::<Reply>(&json).unwrap(), reply);
    }
}
