//! Every element type and family loads and computes what its numbers say.

use pagedd_core::{MOST_STEP_TOKENS, SamplingParams, TensorType};
use pagedd_model::testing::{TinyModel, write_directory, write_gguf};
use pagedd_model::{Architecture, RopeScaling};
use pagedd_wire::worker::{Dtype, Hello, KvDtype, KvMemory, Sampled};
use pagedd_worker::load::LoadError;
use pagedd_worker::{Fds, ModelRunner};

use crate::driver::{Seq, alone};
use crate::models::{hello, load, real, tiny, tokens};

/// Log-probabilities of a vocabulary of 272, as good as all of them, for a few fixed steps.
pub fn logprobs(hello: &Hello) -> Vec<Vec<f32>> {
    let mut runner = load(hello);
    let sampling = SamplingParams { logprobs: Some(255), ..SamplingParams::GREEDY };
    let forced = tokens(4, 12, 272);
    let seq = Seq { sampling, forced, ..Seq::new(1, &tokens(3, 40, 272), 12) };
    alone(&mut runner, seq).iter().map(by_token).collect()
}

fn by_token(sampled: &Sampled) -> Vec<f32> {
    let mut all = vec![f32::NAN; 272];
    for &(token, logprob) in &sampled.top {
        all[token as usize] = logprob;
    }
    all
}

/// Mean distance over the tokens that both report.
pub fn distance(a: &[Vec<f32>], b: &[Vec<f32>]) -> f64 {
    let pairs = a.iter().flatten().zip(b.iter().flatten()).map(|(a, b)| f64::from((a - b).abs()));
    let (sum, count) = pairs.filter(|d| !d.is_nan()).fold((0.0, 0), |(s, n), d| (s + d, n + 1));
    assert!(count > a.len() as u32 * 230, "{count} log-probabilities to compare");
    sum / f64::from(count)
}

#[test]
fn every_element_type_stays_close_to_its_own_values_in_float32() {
    for ty in TensorType::ALL {
        for architecture in [Architecture::Llama, Architecture::Qwen2] {
            let tied_embeddings = architecture == Architecture::Llama;
            let (_dir, path) = tiny(&TinyModel { architecture, tied_embeddings, ..TinyModel::of_type(ty) });
            let auto = logprobs(&hello(&path, Dtype::Auto));
            let exact = logprobs(&hello(&path, Dtype::F32));
            let distance = distance(&auto, &exact);
            println!("{ty} {architecture}: mean |Δlogprob| {distance:.5}");
            // Float weights differ by f16 KV and rounding; quantised ones by 8-bit activations.
            let bound = if ty.block_elements() == 1 { 0.005 } else { 0.05 };
            assert!(distance < bound, "{ty} {architecture}: {distance}");
            // Two models are further apart than that by far: the comparison can fail.
            let spread = self::distance(&exact[..6], &exact[6..]);
            assert!(spread > 10.0 * distance, "{ty} {architecture}: steps differ by {spread} only");
        }
    }
}

#[test]
fn a_directory_and_a_gguf_file_of_the_same_weights_give_the_same_logits() {
    for architecture in [Architecture::Llama, Architecture::Qwen2] {
        for ty in [TensorType::F32, TensorType::F16, TensorType::BF16] {
            for scaling in [RopeScaling::None, RopeScaling::Linear { factor: 4.0 }] {
                let model = TinyModel { architecture, ty, scaling, ..TinyModel::default() };
                let dir = tempfile::tempdir().unwrap();
                let gguf = dir.path().join("tiny.gguf");
                write_gguf(&gguf, 3, &model).unwrap();
                let directory = dir.path().join("tiny");
                write_directory(&directory, 3, &model, 2).unwrap();
                let f32_kv = |path| Hello { kv_dtype: KvDtype::F32, ..hello(path, Dtype::F32) };
                // Llama's GGUF pairs (2i, 2i+1), its directory (i, i + d/2): the same sums in another order. Vectors of the
                // directory are of the matrices' type.
                let distance = distance(&logprobs(&f32_kv(&gguf)), &logprobs(&f32_kv(&directory)));
                let bound = match ty {
                    TensorType::F32 => 2e-6,
                    TensorType::F16 => 2e-3,
                    _ => 2e-2,
                };
                assert!(distance < bound, "{architecture} {ty}: {distance}");
            }
        }
    }
}

#[test]
fn scalings_of_rope_change_what_is_computed() {
    let plain = {
        let (_dir, path) = tiny(&TinyModel::default());
        logprobs(&hello(&path, Dtype::F32))
    };
    for scaling in [RopeScaling::Linear { factor: 4.0 }, RopeScaling::Factors(vec![8.0; 8])] {
        let (_dir, path) = tiny(&TinyModel { scaling: scaling.clone(), ..TinyModel::default() });
        assert!(distance(&plain, &logprobs(&hello(&path, Dtype::F32))) > 1e-3, "{scaling:?}");
    }
}

fn refused(hello: &Hello) -> (String, bool) {
    let error = ModelRunner::load(hello, Fds::default(), &mut |_| true).unwrap_err();
    (error.to_string(), error.retry())
}

#[test]
fn keys_and_values_as_only_a_gpu_keeps_them_are_refused_on_the_cpu() {
    let (_dir, path) = tiny(&TinyModel::default());
    for kv_dtype in [KvDtype::Bf16, KvDtype::Fp8] {
        let found = refused(&Hello { kv_dtype, ..hello(&path, Dtype::Auto) });
        assert_eq!(found, ("kv_dtype: bf16 or fp8: the CPU keeps f16 or f32".to_owned(), false));
    }
}

#[test]
fn settings_that_cannot_be_met_are_refused_with_the_numbers() {
    let (_dir, path) = tiny(&TinyModel::default());
    let base = hello(&path, Dtype::Auto);
    for (change, text, retry) in [
        (
            Hello { block_size: 24, ..base.clone() },
            "block_size: 24: it must be a power of two in [16, 512]",
            false,
        ),
        (Hello { max_num_seqs: 0, ..base.clone() }, "max_num_seqs: 0: it must lie in [1, 4096]", false),
        (
            Hello { max_num_batched_tokens: 0, ..base.clone() },
            "max_num_batched_tokens: 0: it must lie in [1, 65536]",
            false,
        ),
        (Hello { max_model_len: Some(0), ..base.clone() }, "max_model_len: 0: it must be positive", false),
        (
            Hello { kv_memory: KvMemory::Bytes(100), ..base.clone() },
            "kv_memory of 100 bytes holds no block of 4096 bytes (16 tokens): give it at least that",
            false,
        ),
    ] {
        assert_eq!(refused(&change), (text.to_owned(), retry));
    }
    let (text, retry) = refused(&Hello { kv_memory: KvMemory::Bytes(1 << 60), ..base });
    assert!(text.starts_with("kv_memory of 1152921504606846976 bytes is more than the "), "{text}");
    assert!(retry);
}

#[test]
fn a_step_is_as_large_as_a_configuration_may_ask_for_and_no_larger() {
    let (_dir, path) = tiny(&TinyModel::default());
    let base = hello(&path, Dtype::Auto);
    load(&Hello { max_num_batched_tokens: MOST_STEP_TOKENS, ..base.clone() });
    let above = MOST_STEP_TOKENS + 1;
    let (text, _) = refused(&Hello { max_num_batched_tokens: above, ..base });
    assert_eq!(text, format!("max_num_batched_tokens: {above}: it must lie in [1, {MOST_STEP_TOKENS}]"));
}

#[test]
fn loading_stops_when_nobody_wants_it_any_more() {
    let error = ModelRunner::load(&hello(&real(), Dtype::Auto), Fds::default(), &mut |done| done < 300);
    assert!(matches!(error, Err(LoadError::GivenUp)));
}

#[test]
fn progress_runs_from_nothing_to_all() {
    let mut seen = Vec::new();
    let mut progress = |permille| {
        seen.push(permille);
        true
    };
    ModelRunner::load(&hello(&real(), Dtype::Auto), Fds::default(), &mut progress).unwrap();
    assert!(seen.is_sorted());
    assert_eq!((seen[0], *seen.last().unwrap()), (0, 1000));
    assert!(seen.len() > 50, "{} reports", seen.len());
}

#[test]
fn the_length_of_a_sequence_is_bounded_by_model_and_setting() {
    let (_dir, path) = tiny(&TinyModel::default());
    let length =
        |max_model_len| load(&Hello { max_model_len, ..hello(&path, Dtype::Auto) }).info().max_model_len;
    assert_eq!([None, Some(100), Some(100_000)].map(length), [512, 100, 512]);
}
