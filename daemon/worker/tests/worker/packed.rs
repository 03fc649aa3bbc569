//! Checkpoints in four bits (AWQ, GPTQ) compute what their numbers say.

use std::path::Path;

use pagedd_model::Architecture;
use pagedd_model::testing::{
    PackedAs, PackedFormat, TinyModel, write_packed_directory, write_unpacked_directory,
};
use pagedd_wire::worker::{Dtype, Hello, KvDtype};
use tempfile::TempDir;

use crate::driver::{Seq, alone};
use crate::models::{hello, load, tokens};
use crate::types::{distance, logprobs};

/// The model packed, and with the weights that its numbers stand for in single precision.
fn pair(model: &TinyModel, packed: &PackedAs) -> [TempDir; 2] {
    let directories = [TempDir::new().unwrap(), TempDir::new().unwrap()];
    write_packed_directory(directories[0].path(), 11, model, packed).unwrap();
    write_unpacked_directory(directories[1].path(), 11, model, packed).unwrap();
    directories
}

fn exact(path: &Path) -> Hello {
    Hello { kv_dtype: KvDtype::F32, ..hello(path, Dtype::F32) }
}

fn greedy(hello: &Hello) -> Vec<u32> {
    let drawn = alone(&mut load(hello), Seq::new(1, &tokens(3, 40, 272), 64));
    drawn.iter().map(|sampled| sampled.token).collect()
}

fn models() -> impl Iterator<Item = (TinyModel, PackedAs)> {
    let formats = [PackedFormat::Awq, PackedFormat::Gptq, PackedFormat::GptqV2];
    formats.into_iter().flat_map(|format| {
        [(Architecture::Llama, Some(32)), (Architecture::Qwen2, Some(128)), (Architecture::Llama, None)].map(
            |(architecture, group)| {
                let tied_embeddings = architecture == Architecture::Qwen2;
                let wide = TinyModel { hidden: 128, feed_forward: 256, head_dim: 32, ..TinyModel::default() };
                let packed = PackedAs { lm_head: group.is_none(), ..PackedAs::usual(format, group) };
                (TinyModel { architecture, tied_embeddings, ..wide }, packed)
            },
        )
    })
}

#[test]
fn symmetric_checkpoints_give_the_very_logits_of_their_weights() {
    for (model, packed) in models() {
        let packed = PackedAs { symmetric: true, ..packed };
        let [quantised, plain] = pair(&model, &packed);
        let [quantised, plain] = [&quantised, &plain].map(|directory| logprobs(&exact(directory.path())));
        let distance = distance(&quantised, &plain);
        assert!(distance == 0.0, "{packed:?}: {distance}");
    }
}

#[test]
fn checkpoints_with_zeros_give_the_texts_of_their_weights() {
    for (model, packed) in models() {
        let [quantised, plain] = pair(&model, &packed);
        let [of_quantised, of_plain] =
            [&quantised, &plain].map(|directory| logprobs(&exact(directory.path())));
        // Minima are rounded to half floats: by less than a 136th of a step between codes, of which a weight has five or so.
        let rounding = distance(&of_quantised, &of_plain);
        let auto = distance(&logprobs(&hello(quantised.path(), Dtype::Auto)), &of_quantised);
        let spread = distance(&of_plain[..6], &of_plain[6..]);
        println!(
            "{packed:?}: mean |Δlogprob| {rounding:.6} of rounding, {auto:.5} of int8, steps differ by {spread:.3}"
        );
        assert!(rounding < 0.002, "{packed:?}: {rounding}");
        assert!(auto < 0.05, "{packed:?}: {auto}");
        assert!(spread > 10.0 * auto, "{packed:?}: steps differ by {spread} only");
        let [quantised, plain] = [&quantised, &plain].map(|directory| greedy(&exact(directory.path())));
        assert_eq!(quantised, plain, "{packed:?}");
    }
}
