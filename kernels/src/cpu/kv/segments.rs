//! Which rows of a batch read which positions together.
//!
//! **Owns** the division of all that a batch's queries see into segments. **Never** reads KV.
//!
//! Rows whose tables begin with the same blocks (a system prompt, several choices of one request) read those once, with the queries of
//! all of them (cascade inference, Ye et al., 2024; Hydragen, Juravsky et al., 2024), and then each its own.

use std::cmp::Reverse;
use std::ops::Range;

use super::MappedRow;

/// Shared segments end at multiples of so many positions: attention takes no fewer at once.
pub(crate) const SHARED_UNIT: usize = 32;
/// Fewest positions that are a segment of their own: setting the softmax state aside costs about as much as reading them twice.
const LEAST_SHARED: usize = 64;
/// Deepest nesting of shared segments. Each level is one hand-over between the threads, in every layer.
const MOST_SHARED_LEVELS: usize = 4;

/// Who reads a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Sharing {
    /// Queries of several rows, each of which sees all of it and goes on in another segment.
    Shared,
    /// The queries of one row, each of which sees it up to itself and is done.
    Own,
}

/// Positions `[from, to)`, read by the queries `[first_query, first_query + queries)` of [`Segments::tokens`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Segment {
    pub(crate) sharing: Sharing,
    /// A row of the queries; its table has the blocks.
    pub(crate) row: MappedRow,
    pub(crate) first_query: usize,
    pub(crate) queries: usize,
    /// Multiple of [`SHARED_UNIT`].
    pub(crate) from: usize,
    pub(crate) to: usize,
}

/// Segments that together are all positions that each query sees, once.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(crate) struct Segments {
    /// Index in the batch of each query. Queries of shared segments come first.
    pub(crate) tokens: Vec<usize>,
    /// So many queries are in shared segments.
    pub(crate) sharing: usize,
    /// A query's earlier positions are in an earlier level. Within a level, segments with much work come first.
    pub(crate) levels: Vec<Vec<Segment>>,
}

impl Segments {
    /// Segments of `rows`, the entries of whose tables are those of `table` from [`MappedRow::table`] on.
    pub(crate) fn new(rows: &[MappedRow], table: &[u32], block_size: usize) -> Self {
        // A row shares what lies before its first token.
        let blocks = |row: &MappedRow| &table[row.table..][..row.first_position / block_size];
        let mut rows = rows.to_vec();
        rows.sort_by(|a, b| blocks(a).cmp(blocks(b)));
        let common = rows
            .windows(2)
            .map(|pair| blocks(&pair[0]).iter().zip(blocks(&pair[1])).take_while(|(a, b)| a == b).count())
            .map(|blocks| blocks * block_size / SHARED_UNIT * SHARED_UNIT)
            .collect();
        let sorted = Sorted { first_query: vec![0; rows.len()], rows, common };
        sorted.segments()
    }
}

/// Rows in the order of their tables: those with common first blocks are neighbours.
struct Sorted {
    rows: Vec<MappedRow>,
    /// Positions that a row has in common with the next, whole units.
    common: Vec<usize>,
    first_query: Vec<usize>,
}

impl Sorted {
    fn segments(mut self) -> Segments {
        let mut segments = Segments::default();
        let (sharing, alone): (Vec<_>, Vec<_>) =
            self.runs(0..self.rows.len(), 0).into_iter().partition(|run| run.len() > 1);
        for (runs, sharing) in [(sharing, true), (alone, false)] {
            for index in runs.into_iter().flatten() {
                let row = &self.rows[index];
                self.first_query[index] = segments.tokens.len();
                segments.tokens.extend(row.first_token..row.first_token + row.tokens);
            }
            if sharing {
                segments.sharing = segments.tokens.len();
            }
        }
        self.divide(0..self.rows.len(), 0, 0, &mut segments.levels);
        for level in &mut segments.levels {
            level.sort_by_key(|segment| Reverse(segment.queries * (segment.to - segment.from)));
        }
        segments
    }

    /// What `rows`, which have all before `from` in common, read from there on.
    fn divide(&self, rows: Range<usize>, from: usize, level: usize, levels: &mut Vec<Vec<Segment>>) {
        if levels.len() == level && !rows.is_empty() {
            levels.push(Vec::new());
        }
        let runs = if level < MOST_SHARED_LEVELS {
            self.runs(rows, from)
        } else {
            rows.map(|row| row..row + 1).collect()
        };
        for run in runs {
            let (row, first_query) = (self.rows[run.start], self.first_query[run.start]);
            let inner = run.start..run.end - 1;
            if let Some(&to) = self.common[inner].iter().min() {
                let queries = self.rows[run.clone()].iter().map(|row| row.tokens).sum();
                let sharing = Sharing::Shared;
                levels[level].push(Segment { sharing, row, first_query, queries, from, to });
                self.divide(run, to, level + 1, levels);
            } else {
                let (queries, to) = (row.tokens, row.first_position + row.tokens);
                levels[level].push(Segment { sharing: Sharing::Own, row, first_query, queries, from, to });
            }
        }
    }

    /// Cuts `rows` where neighbours have too little in common beyond `from`.
    fn runs(&self, rows: Range<usize>, from: usize) -> Vec<Range<usize>> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        for row in rows {
            match runs.last_mut() {
                Some(run) if self.common[row - 1] >= from + LEAST_SHARED => run.end = row + 1,
                _ => runs.push(row..row + 1),
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests;
