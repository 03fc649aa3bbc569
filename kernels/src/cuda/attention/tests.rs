use super::kernels::choose;
use super::prefill::list;
use super::*;
use crate::cuda::batch::BatchRow;

#[test]
fn heads_that_no_kernel_is_for_are_refused() {
    let layout = |head_dim, block_size| {
        DeviceKvLayout::blocks_outermost(2, 4, head_dim, block_size, DeviceKvElement::E4m3).unwrap()
    };
    for head_dim in [64, 80, 96, 128, 256] {
        for (heads, group) in [(4, 1), (12, 3), (64, 16)] {
            let expected = PlanShape { kv_heads: 4, group, head_dim, element: DeviceKvElement::E4m3 };
            assert_eq!(PlanShape::of(&layout(head_dim, 16), heads), Ok(expected));
        }
    }
    for (head_dim, block_size, heads) in
        [(112, 16, 4), (512, 16, 4), (64, 8, 4), (64, 1024, 4), (64, 16, 0), (64, 16, 6), (64, 16, 68)]
    {
        assert!(
            PlanShape::of(&layout(head_dim, block_size), heads).is_err(),
            "{head_dim} {block_size} {heads}"
        );
    }
}

#[test]
fn units_of_decode_are_counted_by_packed_rows_and_splits() {
    assert_eq!(DecodeLimits::units_of(1, 4, 1), 1);
    assert_eq!(DecodeLimits::units_of(1, 4, 256), 1);
    assert_eq!(DecodeLimits::units_of(1, 16, 257), 2);
    assert_eq!(DecodeLimits::units_of(5, 7, 1024), 3 * 4);
    assert_eq!(DecodeLimits::units_of(0, 4, 0), 0);
}

#[test]
fn prompts_are_cut_into_tiles_that_see_most_first() {
    let rows = [
        BatchRow { table: 3, first_token: 0, tokens: 40, context: 40 },
        BatchRow { table: 9, first_token: 40, tokens: 2, context: 1000 },
    ];
    let mut units = Vec::new();
    list(&mut units, &rows, 3, 64);
    assert_eq!(units, [[9, 0, 6, 998, 40, 0, 0, 0], [3, 64, 56, 0, 0, 0, 0, 0], [3, 0, 120, 0, 0, 0, 0, 0]]);
    list(&mut units, &rows[..0], 3, 64);
    assert!(units.is_empty());
}

#[test]
fn larger_tiles_are_chosen_where_they_fill_the_gpu() {
    let choice = |packed: usize| choose(&[192, 128, 64], 132, |tile| packed.div_ceil(tile as usize));
    assert_eq!(choice(192 * 264), 0);
    assert_eq!(choice(192 * 263), 1);
    assert_eq!(choice(128 * 64), 1);
    assert_eq!(choice(128 * 63), 2);
    assert_eq!(choice(1), 2);
    assert_eq!(choose(&[128], 132, |_| 1), 0);
}
