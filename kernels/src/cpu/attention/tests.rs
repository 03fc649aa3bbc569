//! How much KV a batch reads. What it computes is tested from outside.

use pagedd_core::BlockId;

use super::*;
use crate::{KvElement, KvRow};

/// Bytes of KV that the tiles of a batch of `rows` rows of 1,040 positions read, one token each.
fn bytes_read(rows: usize, shared_blocks: u32, threads: usize) -> usize {
    let layout = KvLayout::new(1, 3, 64, 16, KvElement::F16).unwrap();
    let blocks = 1040 / 16;
    let tables: Vec<Vec<BlockId>> = (0..rows as u32)
        .map(|row| {
            (0..blocks).map(|b| BlockId(if b < shared_blocks { b } else { row * blocks + b })).collect()
        })
        .collect();
    let rows: Vec<_> = tables.iter().map(|table| KvRow { first_position: 1039, tokens: 1, table }).collect();
    let mapping = SlotMapping::new(&layout, rows.len() as u32 * blocks, &rows).unwrap();
    let job = Job {
        shape: AttentionShape { heads: 9, scale: 1.0 },
        mapping: &mapping,
        layer: 0,
        group: 3,
        layout,
        q: &[],
        arena: &[],
        out: Disjoint::new(&mut []),
    };
    let levels = mapping.segments().levels.iter();
    let positions: usize =
        levels.flat_map(|level| job.tiles(level, threads)).map(|tile| tile.positions().len()).sum();
    positions * 2 * layout.head_dim() * layout.element().bytes()
}

#[test]
fn blocks_that_rows_share_are_read_once() {
    let position = 2 * 3 * 64 * 2;
    for threads in [1, 2] {
        assert_eq!(bytes_read(32, 0, threads), 32 * 1040 * position, "nothing shared, {threads} threads");
        let shared = 62 * 16;
        let own = 1040 - shared;
        assert_eq!(bytes_read(32, 62, threads), (shared + 32 * own) * position, "{threads} threads");
    }
}
