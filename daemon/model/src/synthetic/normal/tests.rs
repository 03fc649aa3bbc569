use super::*;

use half::bf16 as Half;

const SEED: u64 = 0x1234_5678_9abc_def0;

fn filled(seed: u64, deviation: f32, first: u64, count: usize) -> Vec<u16> {
    let mut bytes = vec![0; 2 * count];
    fill(seed, deviation, first, &mut bytes);
    bytes.as_chunks().0.iter().map(|&b| u16::from_le_bytes(b)).collect()
}

#[test]
fn philox_gives_its_published_words_in_every_lane() {
    // The known answers of Random123. The upper words of the counter are 0 here, but for its third.
    let words = philox(0, 0, 0);
    assert_eq!(words.map(|word| word[0]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
    for half in 0..2 {
        let all = philox(SEED, (7 << 32) - 3, half);
        for lane in 0..LANES {
            let alone = philox(SEED, (7 << 32) - 3 + lane as u64, half);
            assert_eq!(all.map(|word| word[lane]), alone.map(|word| word[0]), "lane {lane}");
        }
    }
}

#[test]
fn elements_are_what_box_and_muller_say_in_double_precision() {
    let (count, deviation) = (1 << 16, 0.02);
    let got = filled(SEED, deviation, 0, count);
    let mut rounded_otherwise = 0;
    for (i, &got) in got.iter().enumerate() {
        let (pack, half, lane) = (i / PACK, i % PACK / 4, i % 4);
        let words = philox(SEED, pack as u64, half as u32).map(|word| word[0]);
        let unit = |word: u32| f64::from(word >> 8) / f64::from(1 << 24);
        let (first, second) = (unit(words[lane / 2 * 2]), unit(words[lane / 2 * 2 + 1]));
        let radius = f64::from(deviation) * (-2.0 * (first + 0.5 / f64::from(1 << 24)).ln()).sqrt();
        let angle = 2.0 * std::f64::consts::PI * second;
        let want = radius * if lane % 2 == 0 { angle.cos() } else { angle.sin() };
        let error = (f64::from(Half::from_bits(got)) - want).abs();
        assert!(error <= want.abs() / 256.0 + 1e-6 * radius, "element {i}: off by {error} of {want}");
        rounded_otherwise += usize::from(Half::from_f64(want).to_bits() != got);
    }
    // Single precision moves few numbers over the border between two roundings.
    assert!(rounded_otherwise < count / 1000, "{rounded_otherwise} of {count}");
}

#[test]
fn logarithms_sines_and_cosines_are_good_to_single_precision() {
    for step in 0..(1 << 14) {
        let x = uniform(step << 18 | 0x155);
        let (got, want) = (f64::from(ln(x)), f64::from(x).ln());
        assert!((got - want).abs() <= 2e-7 * want.abs() + 1e-9, "ln {x}: {got}, {want}");
        let turn = step << 10 | 0x155;
        let angle = 2.0 * std::f64::consts::PI * f64::from(turn) / f64::from(1 << 24);
        let (cos, sin) = cos_sin(turn);
        let error = (f64::from(cos) - angle.cos()).abs().max((f64::from(sin) - angle.sin()).abs());
        assert!(error < 1.5e-7, "turn {turn}: {error}");
    }
    // The ends of the range, where the reduction could go wrong.
    assert_eq!(ln(1.0).to_bits(), 0.0_f32.to_bits());
    assert!((f64::from(ln(uniform(0))) + 25.0 * std::f64::consts::LN_2).abs() < 2e-6);
    assert_eq!(uniform(u32::MAX).to_bits(), 1.0_f32.to_bits());
    assert_eq!(cos_sin(0), (1.0, 0.0));
    let (cos, sin) = cos_sin((1 << 24) - 1);
    assert!(cos > 0.999 && sin < 0.0, "{cos} {sin}");
}

#[test]
fn rounding_to_bf16_is_to_nearest_and_to_even() {
    for bits in (0..=u16::MAX).step_by(7).map(|upper| u32::from(upper) << 16) {
        for lower in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
            let x = f32::from_bits(bits | lower);
            if x.is_finite() && Half::from_f32(x).is_finite() {
                assert_eq!(bf16(x), Half::from_f32(x).to_bits(), "{x}");
            }
        }
    }
}

#[test]
fn any_stretch_is_the_same_as_in_the_whole() {
    let whole = filled(SEED, 0.02, 0, 1000);
    for (first, count) in [(0, 1), (7, 2), (127, 2), (128, 128), (3, 997), (999, 1), (500, 0)] {
        assert_eq!(filled(SEED, 0.02, first as u64, count), whole[first..first + count], "{first} {count}");
    }
    // Beyond 2^32 packs the counter has a second word.
    let far = (1_u64 << 35) - 4;
    let across = filled(SEED, 0.02, far, 8);
    assert_eq!(filled(SEED, 0.02, far + 4, 4), across[4..]);
    assert_ne!(across[4..], whole[..4], "the counter must not wrap");
    assert_ne!(filled(SEED + 1, 0.02, 0, 8), whole[..8]);
}

#[test]
fn numbers_are_normal_with_the_deviation_asked_for() {
    let values: Vec<f64> =
        filled(99, 0.02, 0, 1 << 20).into_iter().map(|bits| f64::from(Half::from_bits(bits))).collect();
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let moment = |power| values.iter().map(|v| (v / 0.02).powi(power)).sum::<f64>() / count;
    // Five standard errors.
    assert!(mean.abs() < 5.0 * 0.02 / count.sqrt(), "mean {mean}");
    assert!((moment(2) - 1.0).abs() < 5.0 * (2.0 / count).sqrt(), "variance {}", moment(2));
    assert!((moment(4) - 3.0).abs() < 5.0 * (96.0 / count).sqrt(), "fourth moment {}", moment(4));
    let inside = values.iter().filter(|v| v.abs() < 0.02).count() as f64 / count;
    assert!((inside - 0.6827).abs() < 0.003, "{inside} within one deviation");
    let neighbours: f64 = values.windows(2).map(|pair| pair[0] * pair[1] / 4e-4).sum::<f64>() / count;
    assert!(neighbours.abs() < 5.0 / count.sqrt(), "neighbours correlate by {neighbours}");
}
