//! Aligned columns.

use std::fmt::Write;

/// Where a column's cells stand.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Align {
    /// Words.
    Left,
    /// Numbers.
    Right,
}

/// Rows under headings, each column as wide as its widest cell.
#[derive(Debug)]
pub struct Table<const N: usize> {
    columns: [(&'static str, Align); N],
    rows: Vec<[String; N]>,
}

impl<const N: usize> Table<N> {
    /// An empty table.
    pub const fn new(columns: [(&'static str, Align); N]) -> Self {
        Self { columns, rows: Vec::new() }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: [String; N]) {
        self.rows.push(cells.map(|cell| clean(&cell)));
    }

    /// The text, without spaces at the ends of lines.
    pub fn render(&self) -> String {
        let headings = self.columns.map(|(heading, _)| heading.to_owned());
        let lines = || std::iter::once(&headings).chain(&self.rows);
        let widths: [usize; N] =
            std::array::from_fn(|i| lines().map(|line| line[i].chars().count()).max().unwrap_or(0));
        let mut text = String::new();
        for line in lines() {
            let cells =
                line.iter().zip(self.columns).zip(widths).map(|((cell, (_, align)), width)| match align {
                    Align::Left => format!("{cell:<width$}"),
                    Align::Right => format!("{cell:>width$}"),
                });
            text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
            text.push('\n');
        }
        text
    }
}

/// Names with their values, one a line.
pub fn fields(rows: &[(&str, String)]) -> String {
    let width = rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for (name, value) in rows {
        // Writing to a String does not fail.
        let _ = writeln!(text, "{name:<width$}  {}", clean(value));
    }
    text
}

/// Control characters as a replacement, so that a text from elsewhere cannot drive the terminal.
fn clean(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}
