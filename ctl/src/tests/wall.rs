//! Limits of a tenant, from the command line to the daemon and back.

use super::*;

#[test]
fn a_tenants_limits_and_what_it_uses_are_shown_and_what_is_not_enforced_is_said_loudly() {
    let limits =
        LimitTexts { cpu_max: Some("50%".to_owned()), cpus: Some("0-3".to_owned()), ..LimitTexts::default() };
    let stall = StallInfo { some_avg10: 12.25, full_avg10: 0.0, some_us: 1_500_000, full_us: 2_000 };
    let usage = UsageInfo {
        memory_bytes: Some(9 << 20),
        memory_peak_bytes: Some(12 << 20),
        oom_kills: Some(1),
        cpu_us: Some(2_345_678),
        throttled_us: Some(1_000),
        pids: Some(4),
        pids_refused: Some(0),
        pressure: PressureInfo { memory: Some(stall), ..PressureInfo::default() },
    };
    let not_enforced = vec!["cpuset.cpus: this host's cpuset controller is missing".to_owned()];
    let wall = WallInfo { limits, not_enforced, usage: Some(usage), device_bytes: 5 << 20 }.into();
    let reply = Reply::Tenant(TenantShown { tenant: tenant("acme", 8101), wall, notes: Vec::new() });
    let (_, text) = done("tenant show acme", reply);
    let from = text.find("device").expect("it is there");
    assert_eq!(
        &text[from..],
        "\
device        5.0MiB of KV blocks
cpu.max       50%
cpuset.cpus   0-3
NOT ENFORCED  cpuset.cpus: this host's cpuset controller is missing
memory        9.0MiB (peak 12.0MiB), 1 killed for want of it
cpu           2.345s, held up for 0.001s
pids          4, 0 refused
waits memory  some 12.2% of 10s (1.500s in all), all 0.0% (0.002s)
"
    );
}

#[test]
fn limits_are_sent_as_they_are_given_and_checked_first() {
    let mut given = args("tenant set acme --cpu-max 50% --cpuset 0-1 --pids-max max --force");
    given.extend(["--io-max", "8:0 rbps=1MiB", "--io-max", "8:16 wiops=5"].map(OsString::from));
    let (command, outcome) = asked_with(given, Response::Ok(shown()));
    assert_eq!(outcome.code, failure::OK, "{}", outcome.stderr);
    let limits = LimitTexts {
        cpu_max: Some("50%".to_owned()),
        cpus: Some("0-1".to_owned()),
        pids_max: Some("max".to_owned()),
        io_max: Some("8:0 rbps=1MiB; 8:16 wiops=5".to_owned()),
        ..LimitTexts::default()
    };
    let changes = TenantChanges { limits: limits.into(), ..TenantChanges::default() };
    assert_eq!(command, Command::TenantSet(TenantSet { name: "acme".to_owned(), changes, force: true }));
    for (line, said) in [
        ("tenant set acme --cpu-max 0", "error: --cpu-max: `0` is no CPU time; write for example 50%"),
        ("tenant add acme --memory-max 1KiB", "error: --memory-max: 1KiB is less than 4MiB"),
        ("tenant set acme --cpuset x", "error: --cpuset: `x` is no list of CPUs; write for example 0-3,8"),
        ("tenant set acme --io-weight 0", "error: --io-weight: `0` is no weight"),
        ("tenant set acme --force", "error: nothing to change about `acme`"),
    ] {
        let outcome = alone(line);
        assert_eq!(outcome.code, failure::USAGE, "{line}");
        assert!(outcome.stderr.starts_with(said), "{line}: {}", outcome.stderr);
    }
}
