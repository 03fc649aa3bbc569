//! A row's bits depend on its own inputs only.

use pagedd_core::{Penalties, SamplingParams};
use pagedd_model::Architecture;
use pagedd_model::testing::TinyModel;
use pagedd_wire::worker::{Dtype, Hello, Sampled};
use pagedd_worker::ModelRunner;

use crate::driver::{Driver, Seq, alone, bits};
use crate::models::{hello, load, load_real, tiny, tokens};

/// What is asked of a model in every way.
pub struct Case<'a> {
    pub name: &'a str,
    /// Loads the model with so many threads.
    pub load: &'a dyn Fn(u32) -> ModelRunner,
    pub prompt: Vec<u32>,
    pub want: usize,
    pub chunks: &'a [usize],
    pub sampling: SamplingParams,
}

const REQUEST: u64 = 1000;

impl Case<'_> {
    fn request(&self) -> Seq {
        let sampling = SamplingParams { logprobs: Some(5), ..self.sampling };
        Seq { sampling, ..Seq::new(REQUEST, &self.prompt, self.want) }
    }

    fn same(&self, way: &str, expected: &[Sampled], drawn: &[Sampled]) {
        assert_eq!(bits(expected), bits(drawn), "{}: {way}", self.name);
    }

    pub fn check(&self) {
        let mut one = (self.load)(1);
        let mut two = (self.load)(2);
        let expected = alone(&mut one, self.request());
        assert_eq!(expected.len(), self.want);
        self.same("two threads", &expected, &alone(&mut two, self.request()));

        for &chunk in self.chunks {
            let mut driver = Driver::new(&two);
            driver.chunk = chunk;
            driver.seqs.push(self.request());
            driver.finish(&mut two);
            self.same(&format!("chunks of {chunk}"), &expected, &driver.drawn[&REQUEST]);
        }
        for runner in [&mut one, &mut two] {
            self.among_others(&expected, runner);
        }
        self.after_a_cached_prefix(&expected, &mut two);
        self.after_preemption(&expected, &mut two);
    }

    fn among_others(&self, expected: &[Sampled], runner: &mut ModelRunner) {
        let vocab = runner.info().vocab_size;
        let mut driver = Driver::new(runner);
        (driver.chunk, driver.budget) = (24, 100);
        for other in 0..31 {
            let length = 1 + (other as usize * 37) % 90;
            let mut seq = Seq::new(other, &tokens(other, length, vocab), 3 + other as usize % 9);
            if other % 3 == 0 {
                seq.sampling = SamplingParams { temperature: 0.9, seed: other, ..SamplingParams::GREEDY };
            }
            driver.seqs.push(seq);
        }
        driver.seqs.insert(11, self.request());
        driver.finish(runner);
        self.same("among 31 others", expected, &driver.drawn[&REQUEST]);
    }

    /// Another sequence with the same beginning has computed all full blocks but the last.
    fn after_a_cached_prefix(&self, expected: &[Sampled], runner: &mut ModelRunner) {
        let mut driver = Driver::new(runner);
        driver.chunk = 40;
        let shared = (self.prompt.len() - 1) / driver.block_size;
        assert!(shared > 0);
        let mut first = self.prompt[..shared * driver.block_size].to_vec();
        first.push(1);
        driver.seqs.push(Seq::new(1, &first, 2));
        driver.finish(runner);
        let table = driver.seq(1).table[..shared].to_vec();
        let computed = shared * driver.block_size;
        driver.seqs.push(self.request().with_prefix(&table, computed));
        driver.finish(runner);
        self.same("prefix in KV", expected, &driver.drawn[&REQUEST]);
    }

    /// It begins again with all its tokens, into other blocks.
    fn after_preemption(&self, expected: &[Sampled], runner: &mut ModelRunner) {
        let mut driver = Driver::new(runner);
        driver.seqs.push(self.request());
        let mut plans = 0;
        while let Some(plan) = driver.plan() {
            let output = runner.run(&plan).unwrap();
            driver.apply(&plan, &output);
            plans += 1;
            if plans == self.want / 2 {
                driver.seqs[0].preempt();
            }
        }
        self.same("after preemption", expected, &driver.drawn[&REQUEST]);
    }
}

const DRAWN: SamplingParams = SamplingParams {
    temperature: 0.8,
    top_p: 0.95,
    top_k: Some(40),
    seed: 77,
    logprobs: None,
    penalties: Penalties { presence: 0.4, frequency: 0.3, repetition: 1.2 },
};

#[test]
fn the_real_model_gives_the_same_bits_alone_in_company_chunked_cached_and_preempted() {
    let load = |threads| load_real(Dtype::Auto, |hello| hello.threads = Some(threads));
    let prompt = tokens(5, 71, 49_152);
    let sampling = SamplingParams::GREEDY;
    Case { name: "SmolLM2", load: &load, prompt, want: 8, chunks: &[9, 32], sampling }.check();
}

#[test]
fn tiny_models_of_every_kind_give_the_same_bits_in_every_way() {
    for (name, model, dtype) in [
        ("F32", TinyModel::default(), Dtype::Auto),
        ("F16", TinyModel::of_type(pagedd_core::TensorType::F16), Dtype::Auto),
        ("Q4_1", TinyModel::of_type(pagedd_core::TensorType::Q4_1), Dtype::Auto),
        ("Q6_K", TinyModel::of_type(pagedd_core::TensorType::Q6_K), Dtype::Auto),
        ("Q8_0 as f32", TinyModel::of_type(pagedd_core::TensorType::Q8_0), Dtype::F32),
        (
            "qwen2 Q5_1",
            TinyModel {
                architecture: Architecture::Qwen2,
                tied_embeddings: false,
                ..TinyModel::of_type(pagedd_core::TensorType::Q5_1)
            },
            Dtype::Auto,
        ),
    ] {
        let (_dir, path) = tiny(&model);
        for sampling in [SamplingParams::GREEDY, DRAWN] {
            for block_size in [16, 64] {
                let load =
                    |threads| load(&Hello { threads: Some(threads), block_size, ..hello(&path, dtype) });
                let prompt = tokens(9, 150, 272);
                Case { name, load: &load, prompt, want: 24, chunks: &[1, 7, 16, 33, 149], sampling }.check();
            }
        }
    }
}

#[test]
fn a_long_context_gives_the_same_bits_wherever_it_was_cut() {
    let model = TinyModel { context: 2048, ..TinyModel::of_type(pagedd_core::TensorType::Q4_1) };
    let (_dir, path) = tiny(&model);
    let load = |threads| {
        load(&Hello { threads: Some(threads), max_num_batched_tokens: 2048, ..hello(&path, Dtype::Auto) })
    };
    let (prompt, chunks) = (tokens(2, 1500, 272), &[100, 511, 1024]);
    Case { name: "long", load: &load, prompt, want: 40, chunks, sampling: SamplingParams::GREEDY }.check();
}

#[test]
fn a_request_gives_the_same_bits_whatever_the_size_of_a_block() {
    let (_dir, path) = tiny(&TinyModel::of_type(pagedd_core::TensorType::Q4_0));
    let mut results = [16, 32, 128, 512].map(|block_size| {
        let mut runner = load(&Hello { block_size, ..hello(&path, Dtype::Auto) });
        bits(&alone(&mut runner, Seq::new(1, &tokens(3, 200, 272), 100)))
    });
    let (first, rest) = results.split_first_mut().unwrap();
    for other in rest {
        assert_eq!(first, other);
    }
}
