use pagedd_core::BlockId;

use super::*;

fn layout() -> DeviceKvLayout {
    DeviceKvLayout::blocks_outermost(3, 2, 64, 16, DeviceKvElement::Half).unwrap()
}

fn lay_out(rows: &[KvRow<'_>], tokens: usize) -> Result<HostBatch, CudaError> {
    let mut batch = HostBatch::default();
    batch.lay_out(&layout(), 10, rows, tokens)?;
    Ok(batch)
}

#[test]
fn a_batch_lists_positions_rows_and_tables_and_pads_the_rest_with_no_row() {
    let (first, second) = ([BlockId(7), BlockId(2)], [BlockId(9)]);
    let rows = [
        KvRow { first_position: 15, tokens: 2, table: &first },
        KvRow { first_position: 4, tokens: 1, table: &second },
    ];
    let batch = lay_out(&rows, 5).unwrap();
    assert_eq!(batch.positions, [15, 16, 4, 0, 0]);
    assert_eq!(batch.token_rows, [0, 0, 1, NO_ROW, NO_ROW]);
    assert_eq!(batch.row_tables, [0, 2]);
    assert_eq!(batch.tables, [7, 2, 9]);
}

#[test]
fn rows_know_their_tokens_and_contexts_and_padding_has_none() {
    let (first, second) = ([BlockId(7), BlockId(2)], [BlockId(9)]);
    let rows = [
        KvRow { first_position: 15, tokens: 2, table: &first },
        KvRow { first_position: 4, tokens: 1, table: &second },
    ];
    let mut batch = lay_out(&rows, 5).unwrap();
    batch.pad_rows(3);
    assert_eq!(batch.rows, [0, 2, 0, /* starts */ 0, 2, 3, 3, /* contexts */ 17, 5, 0]);
    assert_eq!(batch.row(1), BatchRow { table: 2, first_token: 2, tokens: 1, context: 5 });
    assert_eq!(batch.row(2), BatchRow { table: 0, first_token: 3, tokens: 0, context: 0 });
    assert_eq!([0, 1, 2].map(|row| batch.table(row)), [&[7, 2][..], &[9], &[]]);
    // Refused rows leave it as it was.
    let bad = [KvRow { first_position: 0, tokens: 17, table: &second }];
    batch.lay_out(&layout(), 10, &bad, 20).unwrap_err();
    assert_eq!(batch.row(0), BatchRow { table: 0, first_token: 0, tokens: 2, context: 17 });
}

#[test]
fn rows_that_leave_their_table_or_the_arena_are_refused_with_numbers() {
    let table = [BlockId(3), BlockId(10)];
    let row = |first_position, tokens, table| KvRow { first_position, tokens, table };
    let refused = |row, tokens| lay_out(&[row], tokens).unwrap_err();
    assert_eq!(refused(row(0, 0, &table[..1]), 8), KvError::Empty { row: 0 }.into());
    assert_eq!(refused(row(10, 7, &table[..1]), 8), KvError::Table { row: 0, end: 17, covered: 16 }.into());
    assert_eq!(
        refused(row(0, 1, &table), 8),
        KvError::Block { row: 0, block: BlockId(10), capacity: 10 }.into()
    );
    assert!(matches!(refused(row(0, 9, &table[..1]), 8), CudaError::Shape(_)));
    assert!(matches!(refused(row(u32::MAX, 2, &table[..1]), 8), CudaError::Kv(KvError::Table { .. })));
}

#[test]
fn both_stride_sets_reach_the_same_elements_and_no_further_than_their_arena() {
    let (layers, heads, d, size, blocks) = (3, 2, 64, 16, 5_u32);
    for element in [DeviceKvElement::Half, DeviceKvElement::E4m3] {
        let layouts = [
            DeviceKvLayout::blocks_outermost(layers, heads, d, size, element).unwrap(),
            DeviceKvLayout::layers_outermost(layers, heads, d, size, element, blocks).unwrap(),
        ];
        for layout in layouts {
            layout.check().unwrap();
            let bytes = layout.arena_bytes(blocks).unwrap();
            assert_eq!(bytes, 2 * layers * heads * size * blocks as usize * element.row_bytes(d));
            let last = layout.offset(blocks - 1, layers - 1, 1, heads - 1, size - 1);
            let scales = 2 * heads * size * element.scale_bytes();
            assert_eq!(last + d * element.bytes() + scales, bytes, "{layout:?}");
            assert_eq!(layout.scales() + scales, layout.layer_stride.min(layout.block_stride));
            let mut starts: Vec<usize> = (0..blocks)
                .flat_map(|block| (0..layers).map(move |layer| layout.offset(block, layer, 0, 0, 0)))
                .collect();
            starts.sort_unstable();
            starts.dedup();
            assert_eq!(starts.len(), layers * blocks as usize);
        }
    }
}

#[test]
fn every_sixteen_tokens_of_a_head_begin_where_copies_of_sixteen_bytes_and_rows_do() {
    for (heads, d, size) in [(1, 64, 16), (3, 80, 16), (2, 96, 32), (8, 128, 16), (1, 256, 512)] {
        let layout = DeviceKvLayout::blocks_outermost(3, heads, d, size, DeviceKvElement::E4m3).unwrap();
        assert!(layout.scales().is_multiple_of(64) && layout.layer_stride.is_multiple_of(64), "{layout:?}");
        for token in (0..size).step_by(16) {
            assert!(layout.offset(2, 1, 1, heads - 1, token).is_multiple_of(16), "{layout:?}");
        }
    }
}

#[test]
fn layouts_that_kernels_do_not_work_with_are_refused() {
    for (head_dim, block_size) in [(72, 16), (0, 16), (528, 16), (64, 24), (64, 0)] {
        let layout =
            DeviceKvLayout::blocks_outermost(1, 1, head_dim, block_size, DeviceKvElement::Half).unwrap();
        assert!(layout.check().is_err(), "{layout:?}");
    }
    let tight = DeviceKvLayout { block_stride: 2048, ..layout() };
    assert!(tight.check().is_err());
}
