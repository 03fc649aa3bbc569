//! The file types against vectors made by the `gguf` package (`scripts/make-quant-vectors.py`).

use pagedd_core::TensorType;
use pagedd_kernels::{ShapeError, dequantize};

use crate::support::bits;

const VECTORS: &[u8] = include_bytes!("../fixtures/quant.bin");

#[test]
fn every_type_dequantises_to_the_bits_of_the_reference() {
    let mut rest = VECTORS;
    let mut seen = Vec::new();
    while !rest.is_empty() {
        let (name, after) = rest.split_at(8);
        let name = std::str::from_utf8(name).unwrap().trim_end_matches('\0');
        let ty = TensorType::ALL.into_iter().find(|ty| ty.to_string() == name).unwrap();
        let number = |at: usize| u32::from_le_bytes(after[at..at + 4].try_into().unwrap()) as usize;
        let (size, elements) = (number(0), number(4));
        let (data, after) = after[8..].split_at(size);
        let (want, after) = after.split_at(4 * elements);
        let want: Vec<f32> = want.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        let mut got = vec![f32::NAN; elements];
        dequantize(ty, data, &mut got).unwrap();
        for (index, (got, want)) in got.iter().zip(&want).enumerate() {
            assert!(got == want, "{ty}[{index}]: {got:e} for {want:e}");
        }
        seen.push(ty);
        rest = after;
    }
    assert_eq!(seen, TensorType::ALL);
}

#[test]
fn a_row_is_dequantised_the_same_in_pieces() {
    for ty in TensorType::ALL {
        let data = crate::support::blocks(ty, 3, 1024);
        let mut whole = vec![0.0; 1024];
        dequantize(ty, &data, &mut whole).unwrap();
        let mut pieces = vec![0.0; 1024];
        let bytes = ty.row_bytes(256).unwrap();
        for (data, piece) in data.chunks(bytes).zip(pieces.chunks_mut(256)) {
            dequantize(ty, data, piece).unwrap();
        }
        assert_eq!(bits(&whole), bits(&pieces), "{ty}");
    }
}

#[test]
fn lengths_that_do_not_fit_are_refused() {
    for ty in TensorType::ALL {
        let data = crate::support::blocks(ty, 3, 256);
        let mut out = vec![7.0; 256];
        let short = dequantize(ty, &data[1..], &mut out);
        assert!(matches!(short, Err(ShapeError::Length { .. })), "{ty}: {short:?}");
        if ty.block_elements() > 1 {
            let odd = dequantize(ty, &data, &mut out[..255]);
            assert!(matches!(odd, Err(ShapeError::Dimension { found: 255, .. })), "{ty}: {odd:?}");
        }
        assert!(out.iter().all(|&x| x == 7.0), "{ty}: nothing was written");
    }
}
