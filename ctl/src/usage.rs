//! `pagedctl usage`.

use crate::context::Context;
use crate::failure::Failure;
use crate::show::{UNKNOWN, time};
use crate::table::{Align::Left, Align::Right, Table};
use crate::tenant::name;
use clap::ValueEnum;
use pagedd_config::Span;
use pagedd_control::{Command, Reply, UsageAsk, UsageBy, UsageReport, UsageRow};
use std::time::{SystemTime, UNIX_EPOCH};

/// Seconds of a day.
const DAY: u64 = 86_400;

/// What is shown.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Only this tenant, also if it was removed
    tenant: Option<String>,
    /// From when on: a time before now (24h, 7d, 90m) or a day in UTC (2026-01-31); whole hours are shown [default: everything]
    #[arg(long, value_name = "SPAN|DATE")]
    since: Option<String>,
    /// One row for each of these, beside each tenant
    #[arg(long)]
    by: Option<By>,
}

/// What a row is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum By {
    Day,
    Hour,
    Key,
    Model,
}

/// What tenants have used.
pub fn run(args: &Args, context: &Context) -> Result<String, Failure> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let by = match args.by {
        None => UsageBy::Tenant,
        Some(By::Day) => UsageBy::Day,
        Some(By::Hour) => UsageBy::Hour,
        Some(By::Key) => UsageBy::Key,
        Some(By::Model) => UsageBy::Model,
    };
    let ask = UsageAsk {
        tenant: args.tenant.as_deref().map(name).transpose()?,
        since_unix: args.since.as_deref().map_or(Ok(0), |text| since(text, now))?,
        by,
    };
    context.ask(Command::Usage(ask), |reply| match reply {
        Reply::Usage(report) => Some(render(report)),
        _ => None,
    })
}

/// A moment as it is typed, in seconds since 1970.
pub fn since(text: &str, now: u64) -> Result<u64, Failure> {
    if let Some(day) = date(text) {
        return Ok(day);
    }
    // Spans of a configuration are short ones; bills are asked by the day.
    let span = match text.strip_suffix('d').map(str::parse::<u64>) {
        Some(Ok(days)) => days.checked_mul(DAY),
        Some(Err(_)) | None => text.parse::<Span>().ok().map(|span| span.0.as_secs()),
    };
    let shown: String = text.chars().filter(|c| !c.is_control()).take(40).collect();
    span.map(|span| now.saturating_sub(span)).ok_or_else(|| Failure::Usage {
        message: format!("--since: `{shown}` is neither a time before now nor a day"),
        hint: Some("write for example 90m, 24h, 7d or 2026-01-31".to_owned()),
    })
}

/// The beginning of a day in UTC, where the text is one.
fn date(text: &str) -> Option<u64> {
    let mut parts = text.splitn(3, '-');
    let mut number = |digits: usize| {
        let part = parts.next()?;
        let all = part.len() == digits && part.bytes().all(|byte| byte.is_ascii_digit());
        if all { part.parse::<i64>().ok() } else { None }
    };
    let (year, month, day) = (number(4)?, number(2)?, number(2)?);
    if !(1970..=9999).contains(&year) || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    // Years are counted from March, so that a leap day is a year's last: 400 of them have 146,097 days.
    let (year_from_march, month_from_march) =
        if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let (era, year_of_era) = (year_from_march / 400, year_from_march % 400);
    let day_of_year = (153 * month_from_march + 2) / 5 + day - 1;
    let days =
        era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468;
    let unix = u64::try_from(days).ok()? * DAY;
    // What is no day of its month is another day's beginning.
    time(unix as i64).starts_with(text).then_some(unix)
}

fn render(report: &UsageReport) -> String {
    let note = report.behind.as_ref().map_or_else(String::new, |why| {
        format!("note: what ended of late may be missing, and is added later: {why}\n")
    });
    if report.rows.is_empty() {
        return format!("nothing was used\n{note}");
    }
    let what = match report.by {
        UsageBy::Tenant => None,
        UsageBy::Day => Some("DAY"),
        UsageBy::Hour => Some("HOUR"),
        UsageBy::Key => Some("KEY"),
        UsageBy::Model => Some("MODEL"),
    };
    let heading = what.unwrap_or("");
    let numbers = |row: &UsageRow| {
        [row.requests, row.aborted, row.failed, row.prompt_tokens, row.cached_tokens, row.output_tokens]
            .map(|number| number.to_string())
    };
    let mut sums = [0; 6];
    let mut table = Table::new([
        ("TENANT", Left),
        (heading, Left),
        ("REQUESTS", Right),
        ("ABORTED", Right),
        ("FAILED", Right),
        ("PROMPT TOKENS", Right),
        ("CACHED", Right),
        ("OUTPUT TOKENS", Right),
    ]);
    for row in &report.rows {
        let [requests, aborted, failed, prompt, cached, output] = numbers(row);
        table.row([tenant(row), part(report.by, row), requests, aborted, failed, prompt, cached, output]);
        let added =
            [row.requests, row.aborted, row.failed, row.prompt_tokens, row.cached_tokens, row.output_tokens];
        sums.iter_mut().zip(added).for_each(|(sum, add)| *sum += add);
    }
    if report.rows.len() > 1 {
        let [requests, aborted, failed, prompt, cached, output] = sums.map(|sum: u64| sum.to_string());
        table.row(["total".to_owned(), String::new(), requests, aborted, failed, prompt, cached, output]);
    }
    format!("{}{note}", table.render())
}

fn tenant(row: &UsageRow) -> String {
    let name = row.tenant.clone().unwrap_or_else(|| format!("#{}", row.id));
    // Two tenants may have had one name, one after the other.
    if row.removed { format!("{name} (removed, #{})", row.id) } else { name }
}

fn part(by: UsageBy, row: &UsageRow) -> String {
    let from = || row.from_unix.map_or_else(|| UNKNOWN.to_owned(), |unix| time(unix as i64));
    match by {
        UsageBy::Tenant => String::new(),
        UsageBy::Day => from().chars().take(10).collect(),
        UsageBy::Hour => from().chars().take(16).collect(),
        UsageBy::Key => row.key.map_or_else(|| UNKNOWN.to_owned(), |key| key.to_string()),
        UsageBy::Model => row.model.clone().unwrap_or_else(|| UNKNOWN.to_owned()),
    }
}

#[cfg(test)]
mod tests;
