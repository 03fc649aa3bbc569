//! A model that is in no file is served like one that is.

use std::path::Path;

use pagedd_core::SamplingParams;
use pagedd_wire::worker::{Dtype, Sampled};

use crate::driver::{Seq, alone};
use crate::models::{hello, load, tokens};

const VOCAB: u32 = 49_152;

fn drawn(prompt_seed: u64) -> Vec<Sampled> {
    let mut runner = load(&hello(Path::new("synthetic:smollm2-135m"), Dtype::Auto));
    assert_eq!(runner.info().vocab_size, VOCAB);
    let sampling = SamplingParams { logprobs: Some(5), ..SamplingParams::GREEDY };
    alone(&mut runner, Seq { sampling, ..Seq::new(1, &tokens(prompt_seed, 40, VOCAB), 8) })
}

#[test]
fn a_synthetic_model_draws_from_finite_logits_and_the_same_each_time() {
    let first = drawn(3);
    assert_eq!(first.len(), 8);
    for sampled in &first {
        assert!(sampled.token < VOCAB && sampled.logprob.is_some_and(f32::is_finite), "{sampled:?}");
        // Neither one token for certain, nor all alike: weights reach the logits at a sensible magnitude.
        let (best, fifth) = (sampled.top[0].1, sampled.top[4].1);
        assert!(best < -0.1 && best > fifth, "{sampled:?}");
    }
    assert_eq!(drawn(3), first);
    assert_ne!(drawn(4), first);
}
