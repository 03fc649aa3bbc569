//! Which rows of a step begin alike.
//!
//! **Owns** the search for blocks that tables have in common, and how their work is cut. **Never** touches the device.
//!
//! Rows whose tables name the same blocks from the first one on form a [`Group`]: what it covers is read once, with the queries of all its
//! members as the rows of one tile. Groups lie in groups, as the nodes of a tree whose leaves are rows: a system prompt that all have in
//! common, and below it the prompts that several continue. Tables are compared entry by entry, so that the cost is that of reading once
//! what they share.

use super::{SPLIT, UNIT_ROWS};

/// A row whose blocks may be shared: of one query.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shareable<'a> {
    /// Blocks that another row may read too: full ones, before that of the row's own query.
    pub(super) blocks: &'a [u32],
    /// Where its table begins.
    pub(super) table: u32,
}

/// How work is cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Cut {
    pub(super) kv_heads: usize,
    /// Query heads of a KV head.
    pub(super) group: usize,
    /// Tokens of a block.
    pub(super) block_size: usize,
    /// Packed rows of a tile of the kernel for large groups.
    pub(super) tile_rows: usize,
    /// Blocks of that kernel that run at a time, and of decode.
    pub(super) tiles_at_once: usize,
    pub(super) units_at_once: usize,
    /// That kernel is taken if it has so many tokens for each of its blocks that run at a time.
    pub(super) least_for_tiles: usize,
    /// Room for units, for tiles, and for members of all groups.
    pub(super) units: usize,
    pub(super) tiles: usize,
    pub(super) members: usize,
}

/// Rows that share the blocks `[first_block, end_block)` of their tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Group {
    first_block: usize,
    end_block: usize,
    /// In [`Groups::members`].
    first_member: usize,
    members: usize,
}

/// The groups of a step as the kernels take them, kept for their memory.
#[derive(Default, Debug)]
pub(super) struct Groups {
    /// Of each row: tokens that groups read, and slots of their partial results.
    pub(super) parts: Vec<[u32; 2]>,
    /// `DecodeUnit`s.
    pub(super) units: Vec<[u32; 8]>,
    /// The rows of each group, one group after the other.
    pub(super) members: Vec<u32>,
    /// `SharedTile`s.
    pub(super) tiles: Vec<[u32; 8]>,
    /// Slots of all rows' groups.
    pub(super) slots: usize,
    /// Groups that others lie in come first.
    found: Vec<Group>,
    /// Rows in the order of the search, and what they are ordered by.
    order: Vec<u32>,
    keys: Vec<u64>,
    /// Where the search goes on.
    open: Vec<Open>,
}

/// Rows `[first, end)` of the order, which have their first `depth` blocks in common, of which groups read the first `covered`.
#[derive(Clone, Copy, Debug)]
struct Open {
    first: usize,
    end: usize,
    depth: usize,
    covered: usize,
    level: usize,
}

/// Tokens below which a group is not worth its partial results, and tokens that are not to be read again.
const LEAST_TOKENS: usize = 64;
const LEAST_SAVED: usize = 128;
/// Groups that lie in one another.
const LEVELS: usize = 8;
/// Packed rows from which on the kernel for large groups is faster, if it has enough to do.
const LARGE_ROWS: usize = 64;
/// What a block of that kernel takes beside its tokens, in tokens.
const TILE_OVERHEAD: usize = 192;

impl Groups {
    /// Finds the groups of `rows` and cuts their work. What there is no room for is read by each row for itself.
    pub(super) fn set(&mut self, rows: &[Shareable<'_>], cut: &Cut) {
        self.find(rows, cut);
        self.lay_out(rows, cut);
    }

    /// Whether no rows share anything worth it.
    pub(super) fn is_empty(&self) -> bool {
        self.units.is_empty() && self.tiles.is_empty()
    }

    fn find(&mut self, rows: &[Shareable<'_>], cut: &Cut) {
        let Self { members, found, order, keys, open, .. } = self;
        members.clear();
        found.clear();
        order.clear();
        order.extend(0..rows.len() as u32);
        open.clear();
        open.push(Open { first: 0, end: rows.len(), depth: 0, covered: 0, level: 0 });
        while let Some(Open { first, end, depth, covered, level }) = open.pop() {
            // Rows with the same next block stand side by side, in their own order; those without one drop out.
            keys.clear();
            keys.extend(order[first..end].iter().filter_map(|&row| {
                let &block = rows[row as usize].blocks.get(depth)?;
                Some(u64::from(block) << 32 | u64::from(row))
            }));
            keys.sort_unstable();
            let mut at = first;
            for same in keys.chunk_by(|a, b| a >> 32 == b >> 32).filter(|same| same.len() > 1) {
                let run = at..at + same.len();
                at = run.end;
                for (to, &key) in order[run.clone()].iter_mut().zip(same) {
                    *to = key as u32;
                }
                let end_block = common(rows, &order[run.clone()], depth + 1);
                let tokens = (end_block - covered) * cut.block_size;
                let saved = tokens * (run.len() - 1);
                let mut read = covered;
                if tokens >= LEAST_TOKENS && saved >= LEAST_SAVED && members.len() + run.len() <= cut.members
                {
                    found.push(Group {
                        first_block: covered,
                        end_block,
                        first_member: members.len(),
                        members: run.len(),
                    });
                    members.extend_from_slice(&order[run.clone()]);
                    read = end_block;
                }
                if level + 1 < LEVELS {
                    let (first, end) = (run.start, run.end);
                    open.push(Open { first, end, depth: end_block, covered: read, level: level + 1 });
                }
            }
        }
    }

    fn lay_out(&mut self, rows: &[Shareable<'_>], cut: &Cut) {
        let Self { parts, units, members, tiles, slots, found, .. } = self;
        parts.clear();
        parts.resize(rows.len(), [0, 0]);
        units.clear();
        tiles.clear();
        *slots = 0;
        let tile_tokens = tile_tokens(found, cut);
        let unit_tokens = unit_tokens(found, cut);
        for &Group { first_block, end_block, first_member, members: count } in &*found {
            let of_group = &members[first_member..first_member + count];
            let (Some(&some), packed) = (of_group.first(), count * cut.group) else { continue };
            let [covered, slot] = parts[some as usize];
            // A group that lies in one that had no room covers what that one does not.
            let first = covered as usize;
            let tokens = end_block * cut.block_size - first;
            debug_assert!(first <= first_block * cut.block_size, "groups cover what lies before them");
            let large = packed >= LARGE_ROWS && tile_tokens.is_some();
            let (each, rows_each, list, room) = match tile_tokens {
                Some(each) if large => (each, cut.tile_rows, &mut *tiles, cut.tiles),
                Some(_) | None => (unit_tokens, UNIT_ROWS, &mut *units, cut.units),
            };
            let pieces = tokens.div_ceil(each);
            if list.len() + pieces * packed.div_ceil(rows_each) > room {
                continue;
            }
            let table = rows[some as usize].table;
            for piece in 0..pieces {
                let token = first + piece * each;
                let tokens = each.min(first + tokens - token) as u32;
                for row in (0..packed).step_by(rows_each) {
                    let (token, slot, first_member) =
                        (token as u32, slot + piece as u32, first_member as u32);
                    let (row, left) = (row as u32, (packed - row) as u32);
                    list.push(if large {
                        [table, token, tokens, first_member, row, left, slot, /* reserved */ 0]
                    } else {
                        let rows = row | left.min(UNIT_ROWS as u32) << 16;
                        [
                            table,
                            token,
                            tokens,
                            rows,
                            /* past */ 0,
                            first_member,
                            slot,
                            /* a group's */ 0,
                        ]
                    });
                }
            }
            for &member in of_group {
                parts[member as usize] = [(first + tokens) as u32, slot + pieces as u32];
            }
            *slots += pieces * count;
        }
    }
}

/// Blocks that all of `members` have in common, which have the first `known`.
fn common(rows: &[Shareable<'_>], members: &[u32], known: usize) -> usize {
    let Some((&some, others)) = members.split_first() else { return known };
    let mut same = rows[some as usize].blocks;
    for &other in others {
        let blocks = rows[other as usize].blocks;
        let most = same.len().min(blocks.len());
        same = &same[..known + equal(&same[known..most], &blocks[known..most])];
    }
    same.len()
}

/// Entries, from the first on, that are the same in both, which are as long as one another.
fn equal(a: &[u32], b: &[u32]) -> usize {
    /// Entries that are compared at once.
    const RUN: usize = 32;
    let whole = a.chunks_exact(RUN).zip(b.chunks_exact(RUN)).take_while(|(a, b)| a == b).count() * RUN;
    whole + a[whole..].iter().zip(&b[whole..]).take_while(|(a, b)| a == b).count()
}

/// Tokens of a tile, so that the last blocks of the kernel end together; `None` where that kernel has too little to do.
fn tile_tokens(groups: &[Group], cut: &Cut) -> Option<usize> {
    let columns: Vec<(usize, usize)> = groups
        .iter()
        .map(|group| ((group.end_block - group.first_block) * cut.block_size, group.members * cut.group))
        .filter(|&(_, packed)| packed >= LARGE_ROWS)
        .map(|(tokens, packed)| (tokens, packed.div_ceil(cut.tile_rows)))
        .collect();
    let count =
        |each: usize| -> usize { columns.iter().map(|&(tokens, tiles)| tokens.div_ceil(each) * tiles).sum() };
    let at_once = cut.tiles_at_once.max(1);
    let all: usize = columns.iter().map(|&(tokens, tiles)| tokens * tiles * cut.kv_heads).sum();
    if all / at_once < cut.least_for_tiles {
        return None;
    }
    let longest = columns.iter().map(|&(tokens, _)| tokens).max()?;
    let least = cut.block_size.max(128);
    let candidates = std::iter::successors(Some(least), |each| Some(each * 2))
        .take_while(|&each| each < 2 * longest.max(least))
        .map(|each| (each, count(each)));
    let cost = |(each, tiles): (usize, usize)| {
        let waves = (tiles * cut.kv_heads).div_ceil(at_once);
        waves * (each.min(longest) + TILE_OVERHEAD)
    };
    candidates.filter(|&(_, tiles)| tiles <= cut.tiles).min_by_key(|&piece| cost(piece)).map(|(each, _)| each)
}

/// Tokens of a unit: those of a split, or twice as many where that is work for half of the GPU.
fn unit_tokens(groups: &[Group], cut: &Cut) -> usize {
    let units = |group: &Group| {
        let tokens = (group.end_block - group.first_block) * cut.block_size;
        tokens.div_ceil(2 * SPLIT) * (group.members * cut.group).div_ceil(UNIT_ROWS)
    };
    let twice = groups.iter().map(units).sum::<usize>() * cut.kv_heads;
    if 2 * twice >= cut.units_at_once { 2 * SPLIT } else { SPLIT }
}

#[cfg(test)]
mod tests;
