//! Packed weights hold what the file held.

use pagedd_core::TensorType;
use pagedd_kernels::{Matrix, MatrixLayout, PANEL_ROWS, PackedType, ShapeError, dequantize, pack};

use crate::support::{bits, blocks};

const ROWS: usize = 37;
const COLUMNS: usize = 512;

fn packed(layout: &MatrixLayout, ty: TensorType, data: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0xA5; layout.bytes()];
    pack(layout, ty, data, 0, &mut bytes).unwrap();
    bytes
}

#[test]
fn rows_come_back_as_the_file_has_them() {
    for ty in TensorType::ALL {
        for f32_throughout in [false, true] {
            let to = PackedType::for_source(ty, f32_throughout);
            let layout = MatrixLayout::new(to, ROWS, COLUMNS).unwrap();
            let data = blocks(ty, 11, ROWS * COLUMNS);
            let bytes = packed(&layout, ty, &data);
            let matrix = Matrix::new(layout, &bytes).unwrap();
            let mut want = vec![0.0; ROWS * COLUMNS];
            dequantize(ty, &data, &mut want).unwrap();
            // Scales of the K types are products that are rounded to half precision: 11 bits of scale, times codes up to 63.
            let rounded = !f32_throughout && ty.block_elements() == 256;
            let mut got = vec![0.0; COLUMNS];
            for (row, want) in want.chunks(COLUMNS).enumerate() {
                matrix.row(row, &mut got).unwrap();
                for (column, (got, want)) in got.iter().zip(want).enumerate() {
                    let most = want.abs().max(1.0) * if rounded { 2e-3 } else { 0.0 };
                    assert!(
                        (got - want).abs() <= most,
                        "{ty} as {to:?} [{row}][{column}]: {got:e} for {want:e}"
                    );
                }
            }
        }
    }
}

#[test]
fn ranges_of_panels_pack_to_the_same_bytes_as_the_whole() {
    for ty in TensorType::ALL {
        let layout = MatrixLayout::new(PackedType::for_source(ty, false), ROWS, COLUMNS).unwrap();
        let data = blocks(ty, 12, ROWS * COLUMNS);
        let whole = packed(&layout, ty, &data);
        let mut parts = vec![0x5A; layout.bytes()];
        let row_bytes = ty.row_bytes(COLUMNS).unwrap();
        for first in (0..ROWS).step_by(PANEL_ROWS) {
            let last = ROWS.min(first + PANEL_ROWS);
            let at = first / PANEL_ROWS * layout.panel_bytes();
            let panel = &mut parts[at..at + layout.panel_bytes()];
            pack(&layout, ty, &data[first * row_bytes..last * row_bytes], first, panel).unwrap();
        }
        assert_eq!(whole, parts, "{ty}");
    }
}

#[test]
fn panels_are_cache_lines() {
    for ty in PackedType::ALL {
        for columns in [32, 96, 576, 1536] {
            let layout = MatrixLayout::new(ty, 17, columns).unwrap();
            assert_eq!((layout.panels(), layout.panel_bytes() % 64), (2, 0), "{ty:?} {columns}");
            assert_eq!(layout.bytes(), 2 * layout.panel_bytes());
        }
    }
}

#[test]
fn shapes_and_types_that_do_not_fit_are_refused() {
    let dimension = |result: Result<MatrixLayout, ShapeError>| {
        assert!(matches!(result, Err(ShapeError::Dimension { .. })), "{result:?}");
    };
    dimension(MatrixLayout::new(PackedType::Q4G32, 0, 32));
    dimension(MatrixLayout::new(PackedType::Q4G32, 1, 0));
    dimension(MatrixLayout::new(PackedType::Q8G16, 1, 48));
    let overflow = MatrixLayout::new(PackedType::F32, usize::MAX / 64, 1024);
    assert!(matches!(overflow, Err(ShapeError::Overflow { .. })), "{overflow:?}");
    let overflow = MatrixLayout::new(PackedType::F32, usize::MAX, 1);
    assert!(matches!(overflow, Err(ShapeError::Overflow { .. })), "{overflow:?}");

    let layout = MatrixLayout::new(PackedType::Q4G32, ROWS, COLUMNS).unwrap();
    assert!(matches!(Matrix::new(layout, &[0; 64]), Err(ShapeError::Length { found: 64, .. })));
    let data = blocks(TensorType::Q4_1, 1, ROWS * COLUMNS);
    let row_bytes = TensorType::Q4_1.row_bytes(COLUMNS).unwrap();
    let mut dst = vec![9; layout.bytes()];
    let mut refused = |ty, data: &[u8], first, length: usize| {
        let result = pack(&layout, ty, data, first, &mut dst[..length]);
        assert!(result.is_err(), "{ty} from row {first}, {length} bytes");
        assert!(dst.iter().all(|&byte| byte == 9), "nothing was written");
    };
    let (panel, all) = (layout.panel_bytes(), layout.bytes());
    refused(TensorType::Q8_0, &data, 0, all);
    refused(TensorType::Q4_1, &data[1..], 0, all);
    refused(TensorType::Q4_1, &data, 0, all - 1);
    refused(TensorType::Q4_1, &data, 16, all);
    refused(TensorType::Q4_1, &data[..16 * row_bytes], 8, panel);
    refused(TensorType::Q4_1, &data[..8 * row_bytes], 0, panel);
    refused(TensorType::Q4_1, &data[..16 * row_bytes], usize::MAX - 15, panel);

    let bytes = packed(&layout, TensorType::Q4_1, &data);
    let matrix = Matrix::new(layout, &bytes).unwrap();
    assert!(matrix.row(ROWS, &mut [0.0; COLUMNS]).is_err());
    assert!(matrix.row(0, &mut [0.0; COLUMNS - 1]).is_err());
}

#[test]
fn any_bytes_are_a_matrix_whose_rows_can_be_read() {
    for ty in PackedType::ALL {
        let layout = MatrixLayout::new(ty, 20, 64).unwrap();
        let bytes = crate::support::bytes(5, layout.bytes());
        let matrix = Matrix::new(layout, &bytes).unwrap();
        let (mut once, mut again) = (vec![0.0; 64], vec![1.0; 64]);
        for row in 0..20 {
            matrix.row(row, &mut once).unwrap();
            matrix.row(row, &mut again).unwrap();
            assert_eq!(bits(&once), bits(&again), "{ty:?}");
        }
    }
}
