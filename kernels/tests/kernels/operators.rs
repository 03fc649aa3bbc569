//! Norm, rotary embedding and element-wise functions.

use pagedd_core::BlockId;
use pagedd_kernels::{
    Heads, Isa, KvElement, KvLayout, KvRow, Pairing, RopeAngles, SlotMapping, Turn, add, add_bias, rms_norm,
    rope, rope_into_kv, silu_mul, write_kv,
};

use crate::support::{bits, floats, isas, near, pool};

#[test]
fn rms_norm_is_that_of_the_twin_and_a_rows_bits_are_its_own() {
    for n in [1, 5, 16, 64, 576, 1000] {
        let (rows, x, weight) = (40, floats(31, 40 * n), floats(32, n));
        let mut out = vec![0.0; rows * n];
        rms_norm(&pool(3), &x, &weight, 1e-5, &mut out).unwrap();
        for (x, out) in x.chunks(n).zip(out.chunks(n)) {
            let mean = x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / n as f64;
            let scale = 1.0 / (mean + 1e-5).sqrt();
            let want: Vec<f64> =
                x.iter().zip(&weight).map(|(x, w)| f64::from(*x) * scale * f64::from(*w)).collect();
            let largest = want.iter().fold(0.0_f64, |a, x| a.max(x.abs()));
            // Sums of up to 63 squares per lane, a root, a division and two products.
            near(&format!("width {n}"), out, &want, largest, 2e-6);
            let mut alone = vec![0.0; n];
            rms_norm(&pool(1), x, &weight, 1e-5, &mut alone).unwrap();
            assert_eq!(bits(&alone), bits(out));
        }
    }
    assert!(rms_norm(&pool(1), &[0.0; 7], &[1.0; 3], 1e-5, &mut [0.0; 7]).is_err());
    assert!(rms_norm(&pool(1), &[0.0; 6], &[1.0; 3], 1e-5, &mut [0.0; 5]).is_err());
    assert!(rms_norm(&pool(1), &[0.0; 6], &[], 1e-5, &mut [0.0; 6]).is_err());
}

#[test]
fn rope_turns_pairs_by_position_times_frequency() {
    let (heads, head_dim) = (3, 20);
    let frequencies: Vec<f32> = (0..8).map(|i| 10_000_f32.powf(-(i as f32) / 8.0)).collect();
    let positions: Vec<u32> = (0..200).map(|i| i * 37).collect();
    let x = floats(33, positions.len() * heads * head_dim);
    let mut angles = RopeAngles::new();
    angles.set(&pool(3), &positions, &frequencies, 1.25);
    for pairing in [Pairing::Interleaved, Pairing::Halves] {
        let mut got = x.clone();
        rope(&pool(3), &mut got, head_dim, &angles, pairing).unwrap();
        let mut want: Vec<f64> = x.iter().map(|x| f64::from(*x)).collect();
        for (row, want) in want.chunks_mut(heads * head_dim).enumerate() {
            for head in want.chunks_mut(head_dim) {
                for i in 0..8 {
                    let (a, b) = match pairing {
                        Pairing::Interleaved => (2 * i, 2 * i + 1),
                        Pairing::Halves => (i, i + 8),
                    };
                    let (sin, cos) = f64::from(positions[row] as f32 * frequencies[i]).sin_cos();
                    let turned =
                        ((head[a] * cos - head[b] * sin) * 1.25, (head[a] * sin + head[b] * cos) * 1.25);
                    (head[a], head[b]) = turned;
                }
            }
        }
        near(&format!("{pairing:?}"), &got, &want, 12.0, 1e-6);
    }
}

#[test]
fn rope_of_a_row_has_the_same_bits_alone() {
    let mut angles = RopeAngles::new();
    let frequencies = [1.0, 0.1];
    let x = floats(34, 3000 * 8);
    let positions: Vec<u32> = (0..3000).collect();
    angles.set(&pool(3), &positions, &frequencies, 1.0);
    let mut all = x.clone();
    rope(&pool(3), &mut all, 4, &angles, Pairing::Halves).unwrap();
    for row in [0, 1, 1023, 1024, 2999] {
        let mut alone = x[row * 8..row * 8 + 8].to_vec();
        angles.set(&pool(1), &positions[row..=row], &frequencies, 1.0);
        rope(&pool(1), &mut alone, 4, &angles, Pairing::Halves).unwrap();
        assert_eq!(bits(&alone), bits(&all[row * 8..row * 8 + 8]), "row {row}");
    }
}

#[test]
fn rope_refuses_shapes_that_do_not_fit() {
    let mut angles = RopeAngles::new();
    let pool = pool(1);
    angles.set(&pool, &[0, 1], &[1.0, 0.5], 1.0);
    for (len, head_dim) in [(8, 3), (9, 4), (12, 4), (8, 0)] {
        let mut x = vec![1.0; len];
        assert!(rope(&pool, &mut x, head_dim, &angles, Pairing::Halves).is_err(), "{len} by {head_dim}");
        assert!(x.iter().all(|&x| x == 1.0));
    }
    assert!(rope(&pool, &mut [1.0; 8], 4, &angles, Pairing::Halves).is_ok());
    angles.set(&pool, &[], &[1.0], 1.0);
    assert!(rope(&pool, &mut [1.0; 8], 4, &angles, Pairing::Halves).is_err());
    assert!(rope(&pool, &mut [], 4, &angles, Pairing::Halves).is_ok());
}

#[test]
fn silu_mul_is_that_of_the_twin_on_every_set_with_the_same_bits() {
    let (gate, up) = (floats(35, 20_000), floats(36, 20_000));
    let want: Vec<f64> = gate
        .iter()
        .zip(&up)
        .map(|(g, u)| f64::from(*g) / (1.0 + (-f64::from(*g)).exp()) * f64::from(*u))
        .collect();
    let mut first: Option<Vec<u32>> = None;
    for isa in isas() {
        for threads in [1, 3] {
            let mut got = gate.clone();
            silu_mul(&pool(threads), isa, &mut got, &up).unwrap();
            for (got, want) in got.iter().zip(&want) {
                near("silu", &[*got], &[*want], want.abs().max(1e-6), 1e-6);
            }
            assert_eq!(*first.get_or_insert(bits(&got)), bits(&got), "{isa}, {threads} threads");
        }
    }
    let mut edge = [f32::NEG_INFINITY, -1000.0, 1000.0, f32::NAN];
    silu_mul(&pool(1), Isa::detect(), &mut edge, &[1.0; 4]).unwrap();
    assert!(edge[0].is_nan() && edge[1] == 0.0 && edge[2] == 1000.0 && edge[3].is_nan(), "{edge:?}");
    assert!(silu_mul(&pool(1), Isa::detect(), &mut [0.0; 4], &[1.0; 3]).is_err());
}

#[test]
fn sums_are_added_where_they_belong() {
    let mut x = vec![1.0; 20_000];
    add(&pool(3), &mut x, &floats(37, 20_000)).unwrap();
    assert!(x.iter().zip(floats(37, 20_000)).all(|(x, y)| *x == 1.0 + y));
    assert!(add(&pool(1), &mut [0.0; 4], &[1.0; 5]).is_err());

    let mut x = vec![1.0; 12];
    add_bias(&mut x, 4, &[1.0, 2.0, 3.0]).unwrap();
    assert_eq!(x, [2.0, 3.0, 4.0, 1.0].repeat(3));
    assert!(add_bias(&mut [0.0; 10], 4, &[1.0]).is_err());
    assert!(add_bias(&mut [0.0; 8], 0, &[]).is_err());
    assert!(add_bias(&mut [0.0; 8], 4, &[0.0; 5]).is_err());
}

#[test]
fn rope_into_kv_has_the_bits_of_bias_rope_and_write_kv() {
    let (kv_heads, heads, d) = (2, 6, 24);
    let frequencies: Vec<f32> = (0..10).map(|i| 10_000_f32.powf(-(i as f32) / 10.0)).collect();
    let bias = [floats(51, heads * d), floats(52, kv_heads * d), floats(53, kv_heads * d)];
    let table: Vec<BlockId> = (0..8).rev().map(BlockId).collect();
    for (element, tokens) in [(KvElement::F16, 1), (KvElement::F16, 50), (KvElement::F32, 3)] {
        let layout = KvLayout::new(2, kv_heads, d, 16, element).unwrap();
        let rows = [
            KvRow { first_position: 5, tokens, table: &table[..4] },
            KvRow { first_position: 0, tokens: tokens.min(3), table: &table[4..] },
        ];
        let mapping = SlotMapping::new(&layout, 8, &rows).unwrap();
        let n = mapping.tokens();
        let positions: Vec<u32> =
            rows.iter().flat_map(|row| row.first_position..row.first_position + row.tokens).collect();
        let mut angles = RopeAngles::new();
        angles.set(&pool(1), &positions, &frequencies, 1.0);
        let (q, k, v) =
            (floats(54, n * heads * d), floats(55, n * kv_heads * d), floats(56, n * kv_heads * d));
        for (pairing, biased) in [(Pairing::Interleaved, false), (Pairing::Halves, true)] {
            let mut want = (q.clone(), k.clone(), v.clone(), vec![1; layout.arena_bytes(8).unwrap()]);
            if biased {
                add_bias(&mut want.0, heads * d, &bias[0]).unwrap();
                add_bias(&mut want.1, kv_heads * d, &bias[1]).unwrap();
                add_bias(&mut want.2, kv_heads * d, &bias[2]).unwrap();
            }
            rope(&pool(1), &mut want.0, d, &angles, pairing).unwrap();
            rope(&pool(1), &mut want.1, d, &angles, pairing).unwrap();
            write_kv(&mapping, 1, &want.1, &want.2, &mut want.3).unwrap();
            for (isa, threads) in isas().into_iter().flat_map(|isa| [(isa, 1), (isa, 3)]) {
                let (mut q, mut arena) = (q.clone(), vec![1; want.3.len()]);
                let bias = biased.then(|| bias.each_ref().map(Vec::as_slice));
                let given = Heads { q: &mut q, k: &k, v: &v, bias };
                let by = Turn { angles: &angles, pairing };
                rope_into_kv(&pool(threads), isa, given, by, &mapping, 1, &mut arena).unwrap();
                assert_eq!(bits(&q), bits(&want.0), "{isa}, {threads} threads");
                assert!(arena == want.3, "{isa}, {threads} threads");
            }
        }
    }
}

#[test]
fn rope_into_kv_refuses_shapes_that_do_not_fit_and_writes_nothing() {
    let layout = KvLayout::new(1, 1, 8, 16, KvElement::F32).unwrap();
    let table = [BlockId(0)];
    let mapping =
        SlotMapping::new(&layout, 1, &[KvRow { first_position: 0, tokens: 2, table: &table }]).unwrap();
    let mut angles = RopeAngles::new();
    let given = |q: usize, kv: [usize; 2], rows: &[u32], layer, angles: &mut RopeAngles| {
        angles.set(&pool(1), rows, &[1.0, 0.5], 1.0);
        let (mut q, kv) = (vec![1.0; q], kv.map(|len| vec![1.0; len]));
        let mut arena = vec![0; layout.arena_bytes(1).unwrap()];
        let heads = Heads { q: &mut q, k: &kv[0], v: &kv[1], bias: None };
        let by = Turn { angles, pairing: Pairing::Halves };
        let result = rope_into_kv(&pool(1), Isa::detect(), heads, by, &mapping, layer, &mut arena);
        assert_eq!(result.is_ok(), arena.iter().any(|&byte| byte != 0));
        result.is_ok()
    };
    assert!(given(32, [16, 16], &[0, 1], 0, &mut angles));
    for (q, kv, rows, layer) in [
        (32, [16, 16], &[0, 1][..], 1),
        (32, [15, 16], &[0, 1], 0),
        (32, [16, 17], &[0, 1], 0),
        (33, [16, 16], &[0, 1], 0),
        (24, [16, 16], &[0, 1], 0),
        (0, [16, 16], &[0, 1], 0),
        (32, [16, 16], &[0], 0),
    ] {
        assert!(!given(q, kv, rows, layer, &mut angles), "{q} {kv:?} {rows:?} {layer}");
    }
}
