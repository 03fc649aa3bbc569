use super::*;
use crate::failure;
use crate::tests::{alone, done, tenant};
use pagedd_control::{QuotaChanges, QuotaInfo, QuotaLimit, QuotaUse, TenantAdded, TenantSet, TenantShown};

const NOW: u64 = 1_790_000_000;

fn row(name: &str, requests: u64) -> UsageRow {
    UsageRow {
        id: 3,
        tenant: Some(name.to_owned()),
        removed: false,
        from_unix: Some(1_789_948_800),
        key: None,
        model: None,
        requests,
        aborted: 1,
        failed: 0,
        prompt_tokens: 100,
        cached_tokens: 20,
        output_tokens: 5,
    }
}

fn report(by: UsageBy, rows: Vec<UsageRow>) -> Reply {
    Reply::Usage(UsageReport { since_unix: 0, by, behind: None, rows })
}

#[test]
fn usage_is_a_table_with_a_total() {
    let gone = UsageRow { removed: true, ..row("zebra", 10) };
    let (command, text) = done("usage --by day", report(UsageBy::Day, vec![row("acme", 2), gone]));
    assert_eq!(command, Command::Usage(UsageAsk { tenant: None, since_unix: 0, by: UsageBy::Day }));
    assert_eq!(
        text,
        "\
TENANT               DAY         REQUESTS  ABORTED  FAILED  PROMPT TOKENS  CACHED  OUTPUT TOKENS
acme                 2026-09-21         2        1       0            100      20              5
zebra (removed, #3)  2026-09-21        10        1       0            100      20              5
total                                  12        2       0            200      40             10
"
    );
    let (command, text) = done("usage acme --since 2026-01-31 --by key", report(UsageBy::Key, vec![]));
    let asked = UsageAsk { tenant: Some("acme".to_owned()), since_unix: 1_769_817_600, by: UsageBy::Key };
    assert_eq!((command, text.as_str()), (Command::Usage(asked), "nothing was used\n"));
    let behind = Some("no space left".to_owned());
    let late = UsageReport { since_unix: 0, by: UsageBy::Tenant, behind, rows: vec![row("acme", 2)] };
    let (_, text) = done("usage", Reply::Usage(late));
    assert!(
        text.contains("note: what ended of late may be missing, and is added later: no space left\n"),
        "{text}"
    );
}

#[test]
fn since_is_a_time_before_now_or_a_day() {
    let read = |text: &str| since(text, NOW).ok();
    assert_eq!(read("24h"), Some(NOW - DAY));
    assert_eq!(read("90m"), Some(NOW - 5400));
    assert_eq!(read("400d"), Some(NOW - 400 * DAY));
    assert_eq!(read("99999999d"), Some(0), "before all");
    assert_eq!(read("1970-01-01"), Some(0));
    assert_eq!(read("2000-02-29"), Some(951_782_400));
    assert_eq!(read("2026-09-21"), Some(1_789_948_800));
    for wrong in ["yesterday", "", "24", "2026-13-01", "2026-02-30", "2026-1-1", "-5h", "2026-01-01-01"] {
        assert_eq!(read(wrong), None, "{wrong}");
    }
    let outcome = alone("usage --since tomorrow");
    assert_eq!(outcome.code, failure::USAGE);
    assert!(outcome.stderr.starts_with("error: --since: `tomorrow` is neither"), "{outcome:?}");
}

#[test]
fn quotas_are_set_taken_away_and_shown() {
    let quotas = QuotaInfo {
        tokens_per_minute: QuotaUse { limit: Some(20_000), used: 1234, refused: 3 },
        max_concurrent: QuotaUse { limit: Some(4), used: 1, refused: 0 },
        max_queued_requests: QuotaUse { limit: None, used: 7, refused: 0 },
        ..QuotaInfo::default()
    };
    let mut info = tenant("acme", 8101);
    info.quotas = quotas;
    let notes = vec!["nobody has a key".to_owned()];
    let line = "tenant set acme --tokens-per-minute 20_000 --max-concurrent 4 --requests-per-minute none --max-queued-tokens default";
    let (command, text) = done(
        line,
        Reply::Tenant(TenantShown { tenant: info.clone(), wall: Box::default(), notes: notes.clone() }),
    );
    let Command::TenantSet(TenantSet { changes, .. }) = command else { panic!("{command:?}") };
    let expected = QuotaChanges {
        tokens_per_minute: Some(QuotaLimit::At(20_000)),
        max_concurrent: Some(QuotaLimit::At(4)),
        requests_per_minute: Some(QuotaLimit::None),
        max_queued_tokens: Some(QuotaLimit::None),
        max_queued_requests: None,
    };
    assert_eq!(changes.quotas, expected);
    assert!(text.contains("tokens/min  1234 of 20000, 3 refused\nconcurrent  1 of 4\ngateway"), "{text}");
    assert!(text.ends_with("\nnote: nobody has a key\n"), "{text}");
    let added = TenantAdded { tenant: info, key: None, notes };
    let (_, text) = done("tenant add acme --max-queued-requests 5", Reply::TenantAdded(added));
    assert!(text.contains("use it\nnote: nobody has a key\n\nTry it:"), "{text}");
    let outcome = alone("tenant set acme --max-concurrent 0");
    assert_eq!(outcome.code, failure::USAGE);
    assert!(
        outcome.stderr.contains("--max-concurrent: with 0 no request would ever be taken\nhint: "),
        "{outcome:?}"
    );
}
