//! What needs no device.

use super::shape::widest;
use super::*;
use crate::Pairing;
use crate::four_bit::{Form, LayerForms};

fn shape(tied: bool, bias: bool) -> DecoderShape {
    DecoderShape {
        layers: 2,
        hidden: 64,
        ffn: 96,
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        vocabulary: 320,
        tied,
        bias,
        epsilon: 1e-5,
        frequencies: vec![1.0; 32],
        magnitude: 1.0,
        pairing: Pairing::Halves,
    }
}

#[test]
fn places_hold_every_element_once_and_lie_side_by_side() {
    for (tied, bias) in [(false, false), (true, false), (false, true)] {
        let shape = shape(tied, bias);
        let places = DecoderPlaces::new(&shape, &DecoderForms::halves(shape.layers)).unwrap();
        let mut all = vec![(places.embedding, 2), (places.output_norm, 4)];
        if !tied {
            all.push((places.output.place(), 2));
        }
        for layer in &places.layers {
            all.extend([layer.qkv, layer.attn_output, layer.gate_up, layer.ffn_down].map(|m| (m.place(), 2)));
            all.extend([(layer.attn_norm, 4), (layer.ffn_norm, 4)]);
            all.extend(layer.bias.map(|bias| (bias, 4)));
        }
        all.sort_by_key(|(place, _)| place.at);
        let mut end = 0;
        for (place, size) in all {
            assert_eq!(place.at, end);
            end = (place.at + place.len * size).next_multiple_of(256);
        }
        assert_eq!(end, places.bytes);
        assert_eq!(places.output.place() == places.embedding, tied);
    }
}

#[test]
fn a_matrix_of_four_bits_takes_tiles_and_a_tied_one_lies_beside_the_embedding() {
    let shape = DecoderShape { ffn: 128, ..shape(true, false) };
    let four = LayerForms { gate_up: Form::FourBit, ..DecoderForms::halves(1).layers[0] };
    let mixed = DecoderForms { layers: vec![DecoderForms::halves(1).layers[0], four], output: Form::FourBit };
    let places = DecoderPlaces::new(&shape, &mixed).unwrap();
    assert_eq!(places.layers[0].gate_up.place().len, 256 * 64);
    assert_eq!(places.layers[1].gate_up.place().len, 256 / 16 * 640);
    assert_eq!(places.output.place(), Place { at: places.output_norm.at + 256, len: 320 / 16 * 640 });
    assert_ne!(places.output.at, places.embedding.at);
    assert_eq!(widest(&shape, &mixed), 320 * 64, "the output is the largest of four bits");
    assert_eq!(widest(&shape, &DecoderForms::halves(2)), 0);
    let odd = DecoderShape { ffn: 96, ..shape.clone() };
    let down = LayerForms { ffn_down: Form::FourBit, ..four };
    let forms = DecoderForms { layers: vec![down; 2], output: Form::Half };
    let error = DecoderPlaces::new(&odd, &forms).unwrap_err().to_string();
    assert!(error.contains("down is 96, but must be inputs in units of 64"), "{error}");
    assert!(
        DecoderPlaces::new(&shape, &DecoderForms::halves(1)).is_err(),
        "forms of another number of layers"
    );
}

#[test]
fn a_shape_that_kernels_do_not_work_with_is_refused_by_name() {
    let error =
        DecoderPlaces::new(&DecoderShape { vocabulary: 321, ..shape(true, false) }, &DecoderForms::halves(2))
            .unwrap_err();
    assert!(error.to_string().contains("vocabulary"), "{error}");
}

#[test]
fn buckets_hold_their_rows_and_waste_little() {
    for rows in 1..=2048 {
        let size = bucket(rows);
        assert!(size >= rows && bucket(size) == size, "{rows} {size}");
        assert!(size - rows <= rows.div_ceil(4), "{rows} {size}");
    }
}

#[test]
fn room_for_partial_results_is_what_the_longest_rows_need_up_to_a_limit_unless_it_is_to_be_exact() {
    let limits = DecoderLimits {
        rows: 4,
        tokens: 64,
        wanted: 4,
        draws: 4,
        ranks: 20,
        adjustments: 16,
        context: 1000,
        blocks: 8,
        exact: false,
    };
    let shape = shape(true, false);
    assert_eq!(cut(&shape, &limits), DecodeCut::Even { slots: 4 * 4 });
    let many = DecoderLimits { rows: 4096, context: 1 << 20, ..limits };
    let DecodeCut::Even { slots } = cut(&shape, &many) else { panic!("cut evenly") };
    assert!(slots >= 4096 && slots * unit_bytes(&shape) <= SHARED_BYTES, "{slots}");
    let exact = DecoderLimits { exact: true, ..many };
    assert_eq!(cut(&shape, &exact), DecodeCut::Fixed { units: 4096 * 4096 });
    assert_eq!(cut_bytes(&shape, &exact), 4096 * 4096 * unit_bytes(&shape));
}

#[test]
fn an_exact_decoder_is_made_for_as_many_rows_and_positions_as_its_partial_results_have_room_for() {
    for shape in
        [shape(true, false), DecoderShape { heads: 32, kv_heads: 8, head_dim: 128, ..shape(true, false) }]
    {
        for context in [100, 8192, 131_072] {
            let rows = exact_rows(&shape, context);
            assert!(partial_bytes(&shape, rows, context) <= EXACT_BYTES);
            assert!(partial_bytes(&shape, rows + 1, context) > EXACT_BYTES);
            let longest = exact_context(&shape, rows);
            assert!(longest >= context, "{longest} {context}");
            assert!(partial_bytes(&shape, rows, longest) <= EXACT_BYTES);
            assert!(partial_bytes(&shape, rows, longest + 1) > EXACT_BYTES);
        }
    }
    let llama = DecoderShape { heads: 32, kv_heads: 8, head_dim: 128, ..shape(true, false) };
    assert_eq!(exact_rows(&llama, 131_072), 1008, "131,072 positions are 512 splits of 16,640 bytes");
}
