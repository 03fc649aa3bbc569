//! Values as people read them.

use pagedd_control::{
    DrainInfo, DrainState, GatewayInfo, GatewayState, ModelState, QuotaInfo, QuotaUse, ShareInfo, StallInfo,
    TenantShown, TenantState, UsageInfo, WallInfo,
};

/// What is not known.
pub const UNKNOWN: &str = "-";

/// A value, or [`UNKNOWN`].
pub fn or_unknown(value: Option<impl ToString>) -> String {
    value.map_or_else(|| UNKNOWN.to_owned(), |value| value.to_string())
}

/// A switch.
pub fn on_or_off(on: bool) -> String {
    if on { "on" } else { "off" }.to_owned()
}

/// A tenant's state.
pub fn tenant_state(state: &TenantState) -> String {
    match state {
        TenantState::Starting => "starting".to_owned(),
        TenantState::Ready => "ready".to_owned(),
        TenantState::Suspended => "suspended".to_owned(),
        TenantState::Draining => "draining".to_owned(),
        TenantState::Failed { error } => format!("failed: {error}"),
    }
}

/// A gateway's state.
pub fn gateway(gateway: &GatewayInfo) -> String {
    let state = match &gateway.state {
        GatewayState::Starting => "starting".to_owned(),
        GatewayState::Running => "running".to_owned(),
        GatewayState::Restarting { attempt } => format!("restarting (attempt {attempt})"),
        GatewayState::Failed { error } => format!("failed: {error}"),
    };
    let pid = gateway.pid.map(|pid| format!(", pid {pid}")).unwrap_or_default();
    format!("{state}{pid}, {} restarts", gateway.restarts)
}

/// A model's state.
pub fn model_state(state: &ModelState) -> String {
    match state {
        ModelState::Loading { permille } => format!("loading {}%", permille / 10),
        ModelState::Ready => "ready".to_owned(),
        ModelState::Restarting { attempt } => format!("restarting (attempt {attempt})"),
        ModelState::Failed { error } => format!("failed: {error}"),
    }
}

/// An amount as it was given, with its blocks where they are known.
fn amount(given: &str, blocks: Option<u32>) -> String {
    blocks.map_or_else(|| given.to_owned(), |blocks| format!("{given} ({blocks} blocks)"))
}

/// A floor.
pub fn floor(share: &ShareInfo) -> String {
    amount(&share.floor, share.floor_blocks)
}

/// A ceiling.
pub fn ceiling(share: &ShareInfo) -> String {
    amount(&share.ceiling, share.ceiling_blocks)
}

/// Everything about a tenant, one field a line.
pub fn tenant(TenantShown { tenant: info, wall, notes: _ }: &TenantShown) -> String {
    let mut rows = vec![
        ("tenant", info.name.clone()),
        ("id", info.id.to_string()),
        ("state", tenant_state(&info.state)),
        ("url", info.url.clone()),
        ("port", info.port.to_string()),
        ("model", info.model.clone()),
        ("kv floor", floor(&info.share)),
        ("kv ceiling", ceiling(&info.share)),
        ("kv held", format!("{} blocks", info.share.held_blocks)),
        ("kv cached", format!("{} blocks", info.share.cached_blocks)),
        ("running", info.running.to_string()),
        ("waiting", info.waiting.to_string()),
        ("keys", if info.auth { info.keys.to_string() } else { format!("{} (none needed)", info.keys) }),
        ("lookup", on_or_off(info.prompt_lookup)),
        ("retention", info.retention.clone()),
    ];
    rows.extend(quotas(&info.quotas));
    rows.push(("gateway", gateway(&info.gateway)));
    rows.push(("created", time(info.created_unix)));
    rows.push(("device", format!("{} of KV blocks", bytes(wall.device_bytes))));
    rows.extend(limits(wall));
    rows.extend(wall.usage.iter().flat_map(usage));
    crate::table::fields(&rows)
}

/// Quotas that are set, each with how much of it is taken.
pub fn quotas(info: &QuotaInfo) -> Vec<(&'static str, String)> {
    let all = [
        ("requests/min", info.requests_per_minute),
        ("tokens/min", info.tokens_per_minute),
        ("concurrent", info.max_concurrent),
        ("queued", info.max_queued_requests),
        ("queued tokens", info.max_queued_tokens),
    ];
    let line = |QuotaUse { used, refused, .. }: QuotaUse, limit| {
        let refused = if refused == 0 { String::new() } else { format!(", {refused} refused") };
        format!("{used} of {limit}{refused}")
    };
    all.into_iter().filter_map(|(name, quota)| Some((name, line(quota, quota.limit?)))).collect()
}

/// What the daemon adds to an answer, one a line.
pub fn notes(notes: &[String]) -> String {
    let lines: Vec<String> = notes.iter().map(|note| format!("note: {note}\n")).collect();
    lines.concat()
}

/// Limits, and which of them are none.
fn limits(wall: &WallInfo) -> Vec<(&'static str, String)> {
    let given: Vec<_> = wall.limits.given().map(|(name, text)| (name.file(), text.to_owned())).collect();
    let mut rows = if given.is_empty() { vec![("limits", "none".to_owned())] } else { given };
    rows.extend(wall.not_enforced.iter().map(|line| ("NOT ENFORCED", line.clone())));
    rows
}

/// What a cgroup counts, as far as it does.
fn usage(usage: &UsageInfo) -> Vec<(&'static str, String)> {
    let seconds = |us: u64| format!("{}.{:03}s", us / 1_000_000, us / 1_000 % 1_000);
    let peak = usage.memory_peak_bytes.map(|peak| format!(" (peak {})", bytes(peak))).unwrap_or_default();
    let kills = usage.oom_kills.map(|kills| format!(", {kills} killed for want of it")).unwrap_or_default();
    let held_up = usage.throttled_us.map(|us| format!(", held up for {}", seconds(us))).unwrap_or_default();
    let refused = usage.pids_refused.map(|refused| format!(", {refused} refused")).unwrap_or_default();
    let stall = |stall: StallInfo| {
        let StallInfo { some_avg10, full_avg10, some_us, full_us } = stall;
        let (some, full) = (seconds(some_us), seconds(full_us));
        format!("some {some_avg10:.1}% of 10s ({some} in all), all {full_avg10:.1}% ({full})")
    };
    let rows = [
        ("memory", usage.memory_bytes.map(|now| format!("{}{peak}{kills}", bytes(now)))),
        ("cpu", usage.cpu_us.map(|us| format!("{}{held_up}", seconds(us)))),
        ("pids", usage.pids.map(|pids| format!("{pids}{refused}"))),
        ("waits cpu", usage.pressure.cpu.map(stall)),
        ("waits memory", usage.pressure.memory.map(stall)),
        ("waits io", usage.pressure.io.map(stall)),
    ];
    rows.into_iter().filter_map(|(name, text)| Some((name, text?))).collect()
}

/// What is under way.
pub fn left(info: &DrainInfo) -> String {
    let DrainInfo { requests, running, waiting, streams, .. } = info;
    format!(
        "{requests} requests left, {running} sequences running, {waiting} waiting, {streams} streams open"
    )
}

/// Whether the daemon admits requests; what it has left where it does not.
pub fn admission(info: &DrainInfo) -> String {
    let (what, deadline) = match info.state {
        DrainState::Admitting => return "open".to_owned(),
        DrainState::Draining { deadline_unix, .. } => ("draining", deadline_unix),
        DrainState::Stopping { deadline_unix, .. } => ("stopping", Some(deadline_unix)),
    };
    let until = deadline.map_or_else(String::new, |unix| {
        format!("; until {}", time(i64::try_from(unix).unwrap_or(i64::MAX)))
    });
    format!("{what}: {}{until}", left(info))
}

/// Seconds since 1970 as UTC.
pub fn time(unix: i64) -> String {
    let (days, second) = (unix.div_euclid(86_400), unix.rem_euclid(86_400));
    // Years are counted from March, so that a leap day is a year's last: 400 of them have 146,097 days.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (hour, minute, second) = (second / 3_600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

/// Seconds as days, hours, minutes and seconds, the two largest of them.
pub fn uptime(seconds: u64) -> String {
    let parts =
        [(seconds / 86_400, "d"), (seconds / 3_600 % 24, "h"), (seconds / 60 % 60, "m"), (seconds % 60, "s")];
    let first = parts.iter().position(|(n, _)| *n > 0).unwrap_or(3);
    let shown: Vec<String> = parts[first..].iter().take(2).map(|(n, unit)| format!("{n}{unit}")).collect();
    shown.join(" ")
}

/// Milliseconds, rounded as people would.
pub fn age(ms: u64) -> String {
    match ms {
        0..1_000 => format!("{ms}ms"),
        1_000..60_000 => format!("{}.{}s", ms / 1_000, ms / 100 % 10),
        _ => uptime(ms / 1_000),
    }
}

/// Bytes, rounded down to a tenth of the largest binary unit.
pub fn bytes(bytes: u64) -> String {
    let units = [("GiB", 1u64 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    let Some((name, unit)) = units.into_iter().find(|(_, unit)| bytes >= *unit) else {
        return format!("{bytes}B");
    };
    format!("{}.{}{name}", bytes / unit, bytes % unit * 10 / unit)
}
