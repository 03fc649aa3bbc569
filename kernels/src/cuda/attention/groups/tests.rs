use super::*;

const CUT: Cut = Cut {
    kv_heads: 8,
    group: 4,
    block_size: 16,
    tile_rows: 128,
    tiles_at_once: 132,
    units_at_once: 264,
    least_for_tiles: 200,
    units: 4096,
    tiles: 256,
    members: 4096,
};

/// What fills a slot of a row: slot, head of the group, first token, tokens, row whose table is read.
type Read = (u32, usize, u32, u32, usize);

/// Tables of rows, and which blocks of them may be shared.
struct Rows(Vec<Vec<u32>>);

impl Rows {
    /// Each row by the number of the prompt that it begins with, the blocks of it, and blocks of its own.
    fn new(rows: &[(u32, usize, usize)]) -> Self {
        let row = |(index, &(prompt, shared, own)): (usize, &(u32, usize, usize))| {
            let first = (0..shared as u32).map(move |block| 1_000_000 + prompt * 10_000 + block);
            first.chain((0..own as u32).map(move |block| index as u32 * 1000 + block)).collect()
        };
        Self(rows.iter().enumerate().map(row).collect())
    }

    fn shareable(&self) -> Vec<Shareable<'_>> {
        let of = |(index, table): (usize, &'_ Vec<u32>)| (index as u32 * 100_000, table.len());
        let rows = self.0.iter().enumerate().map(|row| (of(row), row.1));
        rows.map(|((table, _), blocks)| Shareable { blocks, table }).collect()
    }

    fn groups(&self, cut: &Cut) -> Groups {
        let mut groups = Groups::default();
        groups.set(&self.shareable(), cut);
        self.check(&groups, cut);
        groups
    }

    /// Every slot of a row is filled once for each of its heads, and what fills them reads the row's own blocks, each token once, from the first on.
    fn check(&self, groups: &Groups, cut: &Cut) {
        let mut read: Vec<Vec<Read>> = vec![Vec::new(); self.0.len()];
        let units = groups.units.iter().map(|&[table, token, tokens, rows, past, member, slot, splits]| {
            assert_eq!((past, splits), (0, 0));
            let (row, rows) = (rows & 0xffff, rows >> 16);
            assert!(rows as usize <= UNIT_ROWS);
            (table, token, tokens, row, rows, member, slot)
        });
        let tiles = groups.tiles.iter().map(|&[table, token, tokens, member, row, left, slot, reserved]| {
            assert_eq!(reserved, 0);
            (table, token, tokens, row, left.min(cut.tile_rows as u32), member, slot)
        });
        for (table, token, tokens, first, rows, member, slot) in units.chain(tiles) {
            assert!(tokens > 0 && (token as usize).is_multiple_of(cut.block_size), "{token} {tokens}");
            for packed in first..first + rows {
                let row = groups.members[(member + packed / cut.group as u32) as usize] as usize;
                read[row].push((slot, packed as usize % cut.group, token, tokens, table as usize / 100_000));
            }
        }
        let mut slots = 0;
        for (row, mut read) in read.into_iter().enumerate() {
            let [tokens, of_row] = groups.parts[row];
            slots += of_row as usize;
            read.sort_unstable();
            assert_eq!(read.len(), of_row as usize * cut.group, "row {row}: {read:?}");
            let mut next = 0;
            for (index, &(slot, head, token, count, from)) in read.iter().enumerate() {
                assert_eq!((slot as usize, head), (index / cut.group, index % cut.group), "row {row}");
                assert_eq!(token, next, "row {row}");
                let blocks =
                    token as usize / cut.block_size..((token + count) as usize).div_ceil(cut.block_size);
                assert_eq!(self.0[row][blocks.clone()], self.0[from][blocks], "row {row}");
                next += if head + 1 == cut.group { count } else { 0 };
            }
            assert_eq!(next, tokens, "row {row}");
        }
        assert_eq!(groups.slots, slots);
        assert!(groups.units.len() <= cut.units && groups.tiles.len() <= cut.tiles);
    }
}

#[test]
fn rows_that_share_no_blocks_are_in_no_group() {
    let rows: Vec<_> = (0..256).map(|row| (row, 32, 10)).collect();
    let groups = Rows::new(&rows).groups(&CUT);
    assert!(groups.is_empty(), "{groups:?}");
    assert_eq!((groups.slots, groups.members.len(), groups.parts.len()), (0, 0, 256));
    assert!(Rows::new(&[]).groups(&CUT).is_empty());
    assert!(Rows::new(&[(0, 0, 0), (0, 0, 0), (0, 0, 3)]).groups(&CUT).is_empty(), "without a whole block");
}

#[test]
fn four_answers_to_one_prompt_read_it_with_one_tile_of_rows() {
    let rows: Vec<_> = (0..32).map(|row| (row / 4, 40, 3)).collect();
    let groups = Rows::new(&rows).groups(&CUT);
    // 640 tokens in pieces of 256, each of 16 packed rows.
    assert_eq!((groups.units.len(), groups.tiles.len()), (8 * 3, 0));
    assert_eq!(groups.parts, [[640, 3]; 32]);
    assert_eq!(groups.units[1][..4], [0, 256, 256, 16 << 16]);
    assert_eq!(groups.units[2][..4], [0, 512, 128, 16 << 16]);
}

#[test]
fn groups_lie_in_groups() {
    // All have 32 blocks in common; two and two go on together, one alone.
    let mut rows = Rows::new(&[(0, 32, 0); 5]);
    for (row, next) in [(0, 7), (1, 8), (2, 7), (3, 8), (4, 9)] {
        rows.0[row].extend((0..10).map(|block| next * 100 + block));
        rows.0[row].push(row as u32);
    }
    let groups = rows.groups(&CUT);
    assert_eq!(groups.parts, [[672, 3], [672, 3], [672, 3], [672, 3], [512, 2]]);
    assert_eq!(groups.members[..5], [0, 1, 2, 3, 4]);
}

#[test]
fn what_is_too_short_is_left_to_the_rows_or_to_the_groups_inside() {
    // 48 tokens, and 64 tokens of two: too little.
    assert!(Rows::new(&[(0, 3, 9); 9]).groups(&CUT).is_empty());
    assert!(Rows::new(&[(0, 4, 9), (0, 4, 9)]).groups(&CUT).is_empty());
    assert!(!Rows::new(&[(0, 4, 9), (0, 4, 9), (0, 4, 9)]).groups(&CUT).is_empty());
    // One that has only two blocks of them does not hold back the others.
    let groups = Rows::new(&[(0, 64, 1), (0, 2, 30), (0, 64, 1), (0, 64, 1)]).groups(&CUT);
    assert_eq!(groups.parts, [[1024, 4], [0, 0], [1024, 4], [1024, 4]]);
}

#[test]
fn large_groups_are_cut_so_that_the_gpu_is_full_at_the_end() {
    let pieces = |count: u32, each: u32, tokens: usize| {
        let rows: Vec<_> = (0..count * each).map(|row| (row / each, tokens / 16, 6)).collect();
        let groups = Rows::new(&rows).groups(&CUT);
        assert!(groups.units.is_empty());
        groups.parts[0][1]
    };
    // As measured on an H200: one piece where it has 128 blocks of the kernel, more where it would have 64 or 8.
    assert_eq!(pieces(1, 512, 2048), 1);
    assert_eq!(pieces(1, 256, 2048), 2);
    assert_eq!(pieces(16, 16, 512), 1);
    assert_eq!(pieces(8, 32, 512), 2);
    assert_eq!(pieces(1, 32, 8192), 16);
}

#[test]
fn a_large_group_that_shares_too_little_for_the_gpu_is_read_by_decode() {
    let groups = Rows::new(&[(0, 128, 6); 32]).groups(&CUT);
    // 2,048 tokens in pieces of 512, for 128 packed rows.
    assert_eq!((groups.units.len(), groups.tiles.len()), (4 * 8, 0));
}

#[test]
fn a_group_that_there_is_no_room_for_is_left_to_those_inside_and_to_the_rows() {
    let rows = Rows::new(&(0..64).map(|row| (row / 4, 40, 3)).collect::<Vec<_>>());
    // Two units each.
    for room in [0, 1, 3, 7, 31] {
        let groups = rows.groups(&Cut { units: room, ..CUT });
        assert_eq!(groups.units.len(), room / 2 * 2, "room for {room}");
        let groups = rows.groups(&Cut { members: room, ..CUT });
        assert_eq!(groups.members.len(), room / 4 * 4, "room for {room}");
    }
    let all = Rows::new(&[(0, 128, 6); 512]);
    assert!(all.groups(&Cut { tiles: 15, units: 500, ..CUT }).is_empty());
    assert_eq!(all.groups(&Cut { tiles: 16, ..CUT }).tiles.len(), 16);
    assert_eq!(all.groups(&Cut { tiles: 15, ..CUT }).units.len(), 128 * 4, "read by decode");
}

#[test]
fn of_any_tables_each_token_is_read_once_for_each_row() {
    let mut state = 1_u64;
    let mut below = |n: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % n
    };
    for case in 0..300 {
        let cut = Cut {
            group: 1 + below(16) as usize,
            block_size: 16 << below(3),
            tile_rows: 64 << below(2),
            units: if below(3) == 0 { below(40) as usize } else { 4096 },
            members: if below(3) == 0 { below(60) as usize } else { 4096 },
            ..CUT
        };
        // Each row goes on from some way into one before it, or begins anew.
        let mut rows = Rows(Vec::new());
        for row in 0..=below(40) as usize {
            let mut table = Vec::new();
            if row > 0 && below(5) > 0 {
                let from = &rows.0[below(row as u64) as usize];
                table.extend_from_slice(&from[..below(from.len() as u64 + 1) as usize]);
            }
            table.extend((0..below(30)).map(|block| 1 + row as u32 * 100 + block as u32));
            rows.0.push(table);
        }
        let groups = rows.groups(&cut);
        assert!(case > 290 || groups.found.len() < 200);
    }
}
