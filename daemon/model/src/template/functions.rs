//! What chat templates may call beyond Jinja itself.

use std::fmt;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Kwargs;
use minijinja::{Environment, Error, ErrorKind, State, Value};
use serde::Serialize;
use serde_json::Value as Json;
use serde_json::ser::{CompactFormatter, Formatter, PrettyFormatter, Serializer};

/// The variable that holds the time. A template cannot set it: it starts with a character names do not have.
pub(super) const NOW: &str = "@now";

/// The message of a template's `raise_exception`.
#[derive(Debug)]
pub(super) struct Refusal(pub String);

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refusal {}

/// An environment as chat templates expect it: Python's methods, and blocks that leave no line of their own.
pub(super) fn environment() -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_filter("tojson", to_json);
    Ok(environment)
}

/// Some templates mark the assistant's text with `{% generation %}`, which changes no output.
pub(super) fn without_generation_blocks(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at + 2);
        out.push_str(before);
        let sign = if tag.starts_with(['-', '+']) { &tag[..1] } else { "" };
        let body = &tag[sign.len()..];
        let name = body.trim_start();
        let spaces = &body[..body.len() - name.len()];
        let word = |w: &str| {
            name.strip_prefix(w).filter(|r| !r.starts_with(|c: char| c.is_alphanumeric() || c == '_'))
        };
        let replaced = match (word("generation"), word("endgeneration")) {
            (Some(after), _) => Some(("if true", after)),
            (_, Some(after)) => Some(("endif", after)),
            (None, None) => None,
        };
        match replaced {
            Some((instead, after)) => {
                out.extend([sign, spaces, instead]);
                rest = after;
            }
            None => rest = tag,
        }
    }
    out.push_str(rest);
    out
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Refusal(message)))
}

/// As Python's `json.dumps(value, ensure_ascii=False)`.
#[allow(clippy::needless_pass_by_value)] // the interpreter passes options so
fn to_json(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    for option in ["ensure_ascii", "sort_keys"] {
        if options.get::<Option<bool>>(option)? == Some(true) {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                format!("tojson does not know {option}=true"),
            ));
        }
    }
    options.assert_all_used()?;
    let json = serde_json::to_value(value)
        .map_err(|e| Error::new(ErrorKind::BadSerialization, "no JSON for this value").with_source(e))?;
    match indent {
        None => written(&json, Spaced),
        Some(width) => written(&json, PrettyFormatter::with_indent(" ".repeat(width.min(16)).as_bytes())),
    }
}

fn written(json: &Json, formatter: impl Formatter) -> Result<String, Error> {
    let mut out = Vec::new();
    json.serialize(&mut Serializer::with_formatter(&mut out, formatter))
        .map_err(|e| Error::new(ErrorKind::BadSerialization, "no JSON for this value").with_source(e))?;
    String::from_utf8(out).map_err(|e| Error::new(ErrorKind::BadSerialization, "no UTF-8").with_source(e))
}

/// Python's separators: `", "` and `": "`.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { w.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        w: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first { Ok(()) } else { w.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, w: &mut W) -> std::io::Result<()> {
        CompactFormatter.begin_object_value(w)?;
        w.write_all(b" ")
    }
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
/// From the day of 1970-01-01 on.
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// The time of the request in UTC, by the codes of C's `strftime` that templates use.
fn strftime_now(state: &State, format: &str) -> Result<String, Error> {
    let now = state.lookup(NOW).and_then(|now| i64::try_from(now).ok());
    let now = now.ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "the time is not known here"))?;
    let (days, seconds) = (now.div_euclid(86_400), now.rem_euclid(86_400));
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[days.rem_euclid(7) as usize]);
    let two = |number: i64| format!("{number:02}");
    let mut out = String::new();
    let mut codes = format.chars();
    while let Some(c) = codes.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let value = match codes.next() {
            Some('Y') => format!("{year:04}"),
            Some('y') => two(year.rem_euclid(100)),
            Some('m') => two(month),
            Some('d') => two(day),
            Some('B') => month_name.to_owned(),
            Some('b') => month_name[..3].to_owned(),
            Some('A') => day_name.to_owned(),
            Some('a') => day_name[..3].to_owned(),
            Some('H') => two(hour),
            Some('I') => two((hour + 11) % 12 + 1),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('M') => two(minute),
            Some('S') => two(second),
            Some('Z') => "UTC".to_owned(),
            Some('%') => "%".to_owned(),
            other => {
                let code = other.map_or_else(String::new, String::from);
                let problem = format!("strftime_now does not know %{code}");
                return Err(Error::new(ErrorKind::InvalidOperation, problem));
            }
        };
        out.push_str(&value);
    }
    Ok(out)
}

/// Year, month and day of a day counted from 1970-01-01, in the Gregorian calendar.
fn civil(days: i64) -> (i64, i64, i64) {
    // Counted from 0000-03-01, so that the leap day is a year's last.
    let days = days.saturating_add(719_468);
    let (era, of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}
