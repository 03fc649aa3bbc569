use super::*;

/// Rows of (first position, tokens, blocks) with blocks of 16 tokens.
fn segments(rows: &[(usize, usize, Vec<u32>)]) -> (Vec<MappedRow>, Segments) {
    let (mut mapped, mut table, mut first_token) = (Vec::new(), Vec::new(), 0);
    for (first_position, tokens, blocks) in rows {
        let (first_position, tokens) = (*first_position, *tokens);
        mapped.push(MappedRow { first_position, tokens, first_token, table: table.len() });
        table.extend(blocks);
        first_token += tokens;
    }
    let segments = Segments::new(&mapped, &table, 16);
    (mapped, segments)
}

/// What each batch token reads: (rows that read together, from, to), level by level.
fn reads(rows: &[MappedRow], segments: &Segments) -> Vec<Vec<(usize, usize, usize)>> {
    let mut reads = vec![Vec::new(); segments.tokens.len()];
    for segment in segments.levels.iter().flatten() {
        let tokens = &segments.tokens[segment.first_query..][..segment.queries];
        let row_of = |token: usize| rows.iter().rposition(|row| row.first_token <= token).unwrap();
        let mut together: Vec<usize> = tokens.iter().map(|&token| row_of(token)).collect();
        together.dedup();
        assert_eq!(segment.sharing == Sharing::Shared, together.len() > 1, "{segment:?}");
        for &token in tokens {
            reads[token].push((together.len(), segment.from, segment.to));
        }
    }
    reads
}

fn blocks(parts: &[Range<u32>]) -> Vec<u32> {
    parts.iter().cloned().flatten().collect()
}

#[test]
fn rows_read_their_common_blocks_together_and_then_their_own() {
    let rows = [
        (130, 2, blocks(&[0..8, 100..101])),
        (200, 1, blocks(&[0..8, 200..206])),
        (40, 3, (300..303).collect()),
    ];
    let (mapped, segments) = segments(&rows);
    let reads = reads(&mapped, &segments);
    assert_eq!(reads[0], [(2, 0, 128), (1, 128, 132)]);
    assert_eq!(reads[1], reads[0]);
    assert_eq!(reads[2], [(2, 0, 128), (1, 128, 201)]);
    assert_eq!(reads[3], [(1, 0, 43)]);
    assert_eq!(segments.sharing, 3);
}

#[test]
fn a_prefix_within_a_prefix_is_read_by_those_who_have_it() {
    let rows = [
        (200, 1, (0..13).collect()),
        (300, 1, blocks(&[0..4, 50..60, 90..96])),
        (300, 1, blocks(&[0..4, 50..60, 70..76])),
    ];
    let (mapped, segments) = segments(&rows);
    let reads = reads(&mapped, &segments);
    assert_eq!(reads[0], [(3, 0, 64), (1, 64, 201)]);
    assert_eq!(reads[1], [(3, 0, 64), (2, 64, 224), (1, 224, 301)]);
    assert_eq!(reads[2], reads[1]);
}

#[test]
fn too_little_in_common_and_blocks_that_are_still_written_are_not_shared() {
    let short = [(100, 1, blocks(&[0..3, 10..14])), (100, 1, blocks(&[0..3, 20..24]))];
    let written = [(64, 36, (0..7).collect()), (0, 100, (0..7).collect())];
    for rows in [short, written] {
        let (mapped, segments) = segments(&rows);
        assert!(reads(&mapped, &segments).iter().all(|reads| reads.len() == 1), "{segments:?}");
        assert_eq!(segments.sharing, 0);
    }
    assert_eq!(segments(&[]).1, Segments::default());
}

#[test]
fn levels_are_bounded_and_cover_every_position_once() {
    // Each row leaves the common path 64 positions after the one before it.
    let rows: Vec<_> = (0..20_u32)
        .map(|row| {
            (20 * 64 + row as usize, 1, blocks(&[0..4 * row, 1000 * (row + 1)..1000 * (row + 1) + 90]))
        })
        .collect();
    let (mapped, segments) = segments(&rows);
    assert_eq!(segments.levels.len(), MOST_SHARED_LEVELS + 1);
    for (row, reads) in reads(&mapped, &segments).iter().enumerate() {
        let mut at = 0;
        for &(_, from, to) in reads {
            assert_eq!(from, at, "row {row}: {reads:?}");
            at = to;
        }
        assert_eq!(at, 20 * 64 + row + 1, "row {row}: {reads:?}");
    }
}
