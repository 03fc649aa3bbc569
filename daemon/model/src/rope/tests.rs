use super::*;

fn rope(base: f32, scaling: RopeScaling) -> Rope {
    Rope { base, pairing: RopePairing::Halves, scaling }
}

/// Within the rounding of single precision.
fn assert_near(got: f32, wanted: f64, what: &str) {
    assert!((f64::from(got) / wanted - 1.0).abs() < 1e-6, "{what}: {got} instead of {wanted}");
}

#[test]
fn plain_frequencies_are_a_geometric_series_from_one() {
    let RopeFrequencies { inverse, attention_factor } = rope(10_000.0, RopeScaling::None).frequencies(64);
    assert_eq!(
        (inverse.len(), inverse[0].to_bits(), attention_factor.to_bits()),
        (32, 1.0_f32.to_bits(), 1.0_f32.to_bits())
    );
    for (i, &f) in inverse.iter().enumerate() {
        assert_near(f, 1.0 / 10_000_f64.powf(2.0 * i as f64 / 64.0), &format!("pair {i}"));
    }
}

#[test]
fn linear_scaling_and_factors_divide() {
    let plain = rope(10_000.0, RopeScaling::None).frequencies(16).inverse;
    let linear = rope(10_000.0, RopeScaling::Linear { factor: 4.0 }).frequencies(16).inverse;
    let divisors: Vec<f32> = (1..=8).map(|n| n as f32).collect();
    let factors = rope(10_000.0, RopeScaling::Factors(divisors.clone())).frequencies(16).inverse;
    for i in 0..8 {
        assert_near(linear[i], f64::from(plain[i]) / 4.0, &format!("linear {i}"));
        assert_near(factors[i], f64::from(plain[i]) / f64::from(divisors[i]), &format!("factors {i}"));
    }
}

/// Values of an independent evaluation of the published formula, for Llama 3.2 1B.
#[test]
fn llama3_bands_follow_the_published_formula() {
    let scaling = RopeScaling::Llama3 {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 8192,
    };
    let got = rope(500_000.0, scaling).frequencies(64);
    for (i, wanted) in [
        (0, 1.0),
        (1, 0.663_601_237_696_088_5),
        (8, 0.037_606_030_930_863_93),
        (14, 0.003_211_445_994_752_591),
        (15, 0.001_290_547_928_209_264),
        (16, 0.000_429_556_796_559_368_15),
        (17, 9.708_287_802_627_67e-5),
        (18, 1.946_163_818_483_112_5e-5),
        (31, 9.418_306_725_434_91e-8),
    ] {
        assert_near(got.inverse[i], wanted, &format!("pair {i}"));
    }
}

/// Values of an independent evaluation of the paper's formula, for Qwen2.5 with a factor of 4: the ramp runs from dimension
/// 23 to 40.
#[test]
fn yarn_ramps_between_kept_and_scaled_frequencies() {
    let scaling = RopeScaling::Yarn {
        factor: 4.0,
        original_context: 32_768,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: yarn_attention_factor(4.0),
        truncate: true,
    };
    let got = rope(1e6, scaling).frequencies(128);
    for (i, wanted) in [
        (0, 1.0),
        (20, 0.013_335_214_321_633_24),
        (23, 0.006_978_305_848_598_663),
        (24, 0.005_375_321_490_790_102),
        (30, 0.001_064_360_981_247_002),
        (39, 6.490_394_320_837_029e-5),
        (40, 4.445_698_525_097_307e-5),
        (63, 3.102_344_401_879_299e-7),
    ] {
        assert_near(got.inverse[i], wanted, &format!("pair {i}"));
    }
    assert_near(got.attention_factor, 1.138_629_436_111_989, "attention factor");
}

#[test]
fn a_yarn_factor_of_one_changes_nothing() {
    assert_eq!(yarn_attention_factor(1.0).to_bits(), 1.0_f32.to_bits());
}
