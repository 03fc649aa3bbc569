use super::*;
use crate::cpu::dequant::dequantize;

/// Blocks with random numbers and sane scales.
fn rows(ty: TensorType, inputs: usize) -> Vec<Vec<u8>> {
    let mut state = 0x9e37_79b9_u32;
    let mut byte = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    let scale = |i: usize| f16::from_f32(0.01 + i as f32 * 1e-4).to_le_bytes();
    let row = |_| {
        let mut row: Vec<u8> = (0..ty.row_bytes(inputs).unwrap()).map(|_| byte()).collect();
        for (i, block) in row.chunks_mut(ty.block_bytes()).enumerate() {
            block[..2].copy_from_slice(&scale(i));
            if ty != TensorType::Q4_0 {
                block[2..4].copy_from_slice(&scale(i + 3));
            }
        }
        row
    };
    (0..FOUR_BIT_TILE).map(row).collect()
}

/// A weight by the words of the order's description.
fn read(tile: &[u8], output: usize, input: usize) -> f32 {
    let unit = &tile[input / FOUR_BIT_UNIT * BYTES_OF_UNIT..][..BYTES_OF_UNIT];
    let (side, within) = (input % FOUR_BIT_UNIT / GROUP, input % GROUP);
    let (fragment, in_fragment) = (within / 16, within % 16);
    let (t, high, second) = (in_fragment % 8 / 2, in_fragment / 8, in_fragment % 2);
    let lane = output % 8 * 4 + t;
    let at = lane * 16 + (output / 8 * 2 + side) * 4;
    let word = u32::from_le_bytes(unit[at..at + 4].try_into().unwrap());
    let number = (word >> ((fragment * 2 + high) * 4 + second * 16)) & 15;
    let at = SCALES + output % 8 * 16 + (output / 8 * 2 + side) * 4;
    let half = |at: usize| f16::from_le_bytes([unit[at], unit[at + 1]]).to_f32();
    half(at) * number as f32 + half(at + 2)
}

#[test]
fn a_tile_holds_the_weights_of_its_rows() {
    for ty in [TensorType::Q4_0, TensorType::Q4_1, TensorType::Q4_K] {
        let inputs = 512;
        let rows = rows(ty, inputs);
        let mut tile = vec![0xff; four_bit_bytes(FOUR_BIT_TILE, inputs).unwrap()];
        let views = std::array::from_fn(|i| (ty, rows[i].as_slice()));
        pack_four_bit_tile(&views, inputs, &mut tile).unwrap();
        for (output, row) in rows.iter().enumerate() {
            let mut want = vec![0.0; inputs];
            dequantize(ty, row, &mut want).unwrap();
            for (input, &want) in want.iter().enumerate() {
                let got = read(&tile, output, input);
                // Scale and minimum of Q4_K are products, rounded to half precision.
                let allowed = if ty == TensorType::Q4_K { want.abs() * 2e-3 + 0.02 } else { 1e-5 };
                assert!((got - want).abs() <= allowed, "{ty} {output} {input}: {got}, not {want}");
            }
        }
    }
}

#[test]
fn rows_of_another_type_or_length_and_scales_out_of_range_are_refused() {
    let inputs = 512;
    let good = rows(TensorType::Q4_0, inputs);
    let mut tile = vec![0; four_bit_bytes(FOUR_BIT_TILE, inputs).unwrap()];
    let mut views: [_; FOUR_BIT_TILE] = std::array::from_fn(|i| (TensorType::Q4_0, good[i].as_slice()));
    pack_four_bit_tile(&views, inputs, &mut tile).unwrap();
    views[3].1 = &good[3][1..];
    assert!(pack_four_bit_tile(&views, inputs, &mut tile).is_err());
    views[3] = (TensorType::Q8_0, &good[3]);
    assert!(pack_four_bit_tile(&views, inputs, &mut tile).is_err());
    let mut wild = good[3].clone();
    wild[..2].copy_from_slice(&f16::from_f32(30_000.0).to_le_bytes());
    views[3] = (TensorType::Q4_0, &wild);
    let error = pack_four_bit_tile(&views, inputs, &mut tile).unwrap_err();
    assert!(error.to_string().contains("half precision"), "{error}");
}

#[test]
fn matrices_in_parts_of_tiles_or_units_have_no_size() {
    assert_eq!(four_bit_bytes(16, 64), Some(640));
    assert_eq!(four_bit_bytes(4096, 11_008), Some(256 * 172 * 640));
    assert_eq!(four_bit_bytes(24, 64), None);
    assert_eq!(four_bit_bytes(16, 96), None);
}
