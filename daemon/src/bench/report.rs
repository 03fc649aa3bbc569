//! Rows for people and for programs.
//!
//! **Owns** the two forms of one list of fields. **Never** computes what is in them.

use std::fmt::Write as _;

/// What a field holds.
#[derive(Clone, PartialEq, Debug)]
pub enum Value {
    /// A word.
    Text(String),
    /// A whole number.
    Count(u64),
    /// A number, and how many digits behind the point people see of it.
    Real(f64, usize),
    /// It could not be measured.
    Absent,
}

impl From<u64> for Value {
    fn from(value: u64) -> Self {
        Self::Count(value)
    }
}

impl From<u32> for Value {
    fn from(value: u32) -> Self {
        Self::Count(value.into())
    }
}

impl From<&str> for Value {
    fn from(value: &str) -> Self {
        Self::Text(value.to_owned())
    }
}

impl From<String> for Value {
    fn from(value: String) -> Self {
        Self::Text(value)
    }
}

impl Value {
    /// A number that may be missing.
    pub fn real(value: Option<f64>, digits: usize) -> Self {
        value.filter(|value| value.is_finite()).map_or(Self::Absent, |value| Self::Real(value, digits))
    }

    fn shown(&self) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Count(count) => count.to_string(),
            Self::Real(value, digits) => format!("{value:.digits$}"),
            Self::Absent => "-".to_owned(),
        }
    }

    fn json(&self) -> String {
        match self {
            Self::Text(text) => json_string(text),
            Self::Count(count) => count.to_string(),
            Self::Real(value, _) => value.to_string(),
            Self::Absent => "null".to_owned(),
        }
    }
}

/// One figure.
#[derive(Clone, PartialEq, Debug)]
pub struct Field {
    /// In JSON.
    pub name: &'static str,
    /// In the table; without one it is not in it.
    pub heading: Option<&'static str>,
    /// The figure.
    pub value: Value,
}

/// A field of table and JSON.
pub fn shown(name: &'static str, heading: &'static str, value: impl Into<Value>) -> Field {
    Field { name, heading: Some(heading), value: value.into() }
}

/// A field of JSON alone.
pub fn kept(name: &'static str, value: impl Into<Value>) -> Field {
    Field { name, heading: None, value: value.into() }
}

/// A line of the table.
pub type Row = Vec<Field>;

/// Columns are no narrower than this.
const NARROWEST: usize = 6;

/// The line above all rows that are like `row`.
pub fn headings(row: &Row) -> String {
    line(row, |heading, _| heading.to_owned())
}

/// A row's line.
pub fn figures(row: &Row) -> String {
    line(row, |_, value| value.shown())
}

fn line(row: &Row, text: impl Fn(&str, &Value) -> String) -> String {
    let mut line = String::new();
    for field in row {
        let Some(heading) = field.heading else { continue };
        let width = heading.chars().count().max(NARROWEST);
        let _ = write!(line, "{:>width$}  ", text(heading, &field.value));
    }
    line.trim_end().to_owned()
}

/// Everything, a row a line.
pub fn json(case: &str, model: &Row, rows: &[Row]) -> String {
    let rows: Vec<String> = rows.iter().map(|row| format!("  {}", object(row))).collect();
    format!(
        "{{\"bench\": {}, \"version\": {}, \"model\": {},\n \"rows\": [\n{}\n]}}\n",
        json_string(case),
        json_string(env!("CARGO_PKG_VERSION")),
        object(model),
        rows.join(",\n")
    )
}

fn object(row: &Row) -> String {
    let fields: Vec<String> =
        row.iter().map(|field| format!("{}: {}", json_string(field.name), field.value.json())).collect();
    format!("{{{}}}", fields.join(", "))
}

fn json_string(text: &str) -> String {
    let escaped = text.chars().map(|c| match c {
        '"' | '\\' => format!("\\{c}"),
        c if c.is_control() => format!("\\u{:04x}", u32::from(c)),
        c => c.to_string(),
    });
    format!("\"{}\"", escaped.collect::<String>())
}
