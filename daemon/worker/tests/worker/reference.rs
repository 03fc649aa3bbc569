//! The real model against reference outputs.

use std::sync::OnceLock;

use pagedd_core::{SamplingParams, TokenId};
use pagedd_model::ModelSource;
use pagedd_wire::worker::{Dtype, Sampled};
use pagedd_worker::ModelRunner;
use serde_json::Value;

use crate::driver::{Driver, Seq};
use crate::models::{load_real, real, repository};

/// SmolLM2's end of a turn.
const EOS: u32 = 2;
/// Where two tokens are this close, float32 engines may differ.
const NEAR_TIE: f64 = 0.005;

/// Continued as they are, beside the prompts of the reference file.
const FURTHER_PROMPTS: [&str; 36] = [
    "The three primary colours are",
    "In the year 1969, two astronauts",
    "A recipe for pancakes: mix flour, eggs and",
    "Once upon a time in a small village by the sea, there lived",
    "The derivative of x squared is",
    "def fibonacci(n):\n    ",
    "SELECT name, age FROM people WHERE",
    "Dear Sir or Madam,\n\nI am writing to",
    "The quick brown fox jumps over the lazy dog. The dog",
    "Water boils at 100 degrees Celsius because",
    "Le petit chat est assis sur",
    "Der schnellste Weg nach Hause ist",
    "1, 1, 2, 3, 5, 8, 13,",
    "# Shopping list\n\n- apples\n- bread\n-",
    "{\"name\": \"Alice\", \"age\": 30, \"city\":",
    "The mitochondria is the powerhouse of the cell. It",
    "To be, or not to be, that is",
    "How do I sort a list in Python? You can",
    "The president gave a speech on Monday in which he",
    "<html>\n<head>\n<title>",
    "Photosynthesis is the process by which plants",
    "My favourite season is autumn, because",
    "The stock market fell sharply yesterday after",
    "Scientists have discovered a new species of",
    "Chapter 1\n\nIt was a dark and stormy night;",
    "for i in range(10):\n    print(",
    "The Roman Empire fell for many reasons, among them",
    "Q: What is the capital of Japan?\nA:",
    "int main(void) {\n    printf(\"",
    "The patient was admitted with a high fever and",
    "If a train travels 60 miles in 2 hours, its average speed is",
    "Breaking news: a large earthquake has struck",
    "The main difference between cats and dogs is that",
    "Music has always been an important part of",
    "To install the package, run the following command:",
    "\u{5317}\u{4eac}\u{662f}\u{4e2d}\u{56fd}\u{7684}",
];

struct Reference {
    id: String,
    prompt: Vec<u32>,
    out: Vec<u32>,
    margins: Vec<f64>,
    first_top: Vec<(u32, f64)>,
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn reference() -> Vec<Reference> {
    let path = repository().join("tests/fixtures/reference/greedy.json");
    let file: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let prompts = file["prompts"].as_array().unwrap().iter();
    prompts
        .map(|prompt| {
            let hf = &prompt["hf_fp32"];
            let margins = hf["margins_logit_top1_top2"].as_array().unwrap();
            let top = hf["first_top5"].as_array().unwrap();
            Reference {
                id: prompt["id"].as_str().unwrap().to_owned(),
                prompt: ids(&prompt["prompt_ids"]),
                out: ids(&hf["out_ids"]),
                margins: margins.iter().map(|m| m.as_f64().unwrap()).collect(),
                first_top: top
                    .iter()
                    .map(|t| (t["id"].as_u64().unwrap() as u32, t["logprob"].as_f64().unwrap()))
                    .collect(),
            }
        })
        .collect()
}

/// Every prompt, those of the reference first.
pub fn prompts() -> Vec<(String, Vec<u32>)> {
    let tokenizer = ModelSource::open(&real()).unwrap().tokenizer().unwrap();
    let ours = reference().into_iter().map(|r| (r.id, r.prompt));
    let further = FURTHER_PROMPTS.iter().map(|text| {
        let ids = tokenizer.encode(text).into_iter().map(|TokenId(id)| id).collect();
        ((*text).to_owned(), ids)
    });
    ours.chain(further).collect()
}

/// What the f32 path draws for every prompt. Computed once.
fn f32_path() -> &'static [Vec<Sampled>] {
    static DRAWN: OnceLock<Vec<Vec<Sampled>>> = OnceLock::new();
    DRAWN.get_or_init(|| {
        let mut runner = load_real(Dtype::F32, |_| {});
        let mut driver = Driver::new(&runner);
        let prompts = prompts();
        let of_reference = reference().len();
        for (id, (_, prompt)) in prompts.iter().enumerate() {
            let want = if id < of_reference { 48 } else { 64 };
            driver.seqs.push(Seq { stop: Some(EOS), ..Seq::new(id as u64, prompt, want) });
        }
        driver.finish(&mut runner);
        (0..prompts.len() as u64).map(|id| driver.drawn.remove(&id).unwrap()).collect()
    })
}

#[test]
fn the_f32_path_draws_the_reference_tokens() {
    for (reference, drawn) in reference().iter().zip(f32_path()) {
        let id = &reference.id;
        let drawn_ids: Vec<u32> = drawn.iter().map(|s| s.token).collect();
        let same = drawn_ids.iter().zip(&reference.out).take_while(|(a, b)| a == b).count();
        if same < reference.out.len() || drawn_ids.len() != reference.out.len() {
            let margin = reference.margins.get(same).copied().unwrap_or(f64::INFINITY);
            assert!(
                margin < NEAR_TIE,
                "{id}: token {same} differs at a margin of {margin}\nours {drawn_ids:?}\nreference {:?}",
                reference.out
            );
            println!("{id}: leaves the reference at token {same}, where its margin is {margin}");
        }
        let mut worst = 0.0_f64;
        for (token, logprob) in &reference.first_top {
            let ours = drawn[0].top.iter().find(|(t, _)| t == token);
            let ours = ours.unwrap_or_else(|| panic!("{id}: {token} is not in {:?}", drawn[0].top)).1;
            worst = worst.max((f64::from(ours) - logprob).abs());
        }
        println!("{id}: {same} tokens equal, first top-5 logprobs within {worst:.6}");
        assert!(worst < 1e-3, "{id}: a logprob is {worst} away\n{:?}", drawn[0].top);
    }
}

/// How far a path is from the f32 path, fed its tokens.
pub struct Distance {
    pub steps: usize,
    /// Share of steps whose best token is the same.
    pub agreement: f64,
    /// Mean difference of the f32 path's five best log-probabilities.
    pub pooled: f64,
    /// The same of the prompt where it is largest.
    pub worst: (f64, String),
}

/// Measures `runner`, which reports `ranks` log-probabilities. Prompts of all lengths run beside one another.
pub fn distance(runner: &mut ModelRunner, ranks: u8) -> Distance {
    let mut driver = Driver::new(runner);
    let prompts = prompts();
    for (id, ((_, prompt), drawn)) in prompts.iter().zip(f32_path()).enumerate() {
        let mut seq = Seq::new(id as u64, prompt, drawn.len());
        seq.forced = drawn.iter().map(|s| s.token).collect();
        seq.sampling = SamplingParams { logprobs: Some(ranks), ..SamplingParams::GREEDY };
        driver.seqs.push(seq);
    }
    driver.finish(runner);

    let (mut steps, mut agreed, mut sum, mut worst) = (0, 0, 0.0, (0.0, String::new()));
    for (id, (name, _)) in prompts.iter().enumerate() {
        let (want, got) = (&f32_path()[id], &driver.drawn[&(id as u64)]);
        assert_eq!(want.len(), got.len());
        let mut of_prompt = 0.0;
        for (want, got) in want.iter().zip(got) {
            agreed += usize::from(want.token == got.token);
            for (token, logprob) in &want.top {
                // What is not among the best that are reported is at least as far down as the last of them.
                let ours = got.top.iter().find(|(t, _)| t == token).unwrap_or(got.top.last().unwrap()).1;
                of_prompt += f64::from((ours - logprob).abs()) / want.top.len() as f64;
            }
        }
        steps += want.len();
        sum += of_prompt;
        let mean = of_prompt / want.len() as f64;
        if mean > worst.0 {
            worst = (mean, name.clone());
        }
    }
    let (agreement, pooled) = (f64::from(agreed as u32) / steps as f64, sum / steps as f64);
    println!(
        "{} kernels, {steps} steps: argmax agreement {:.2} %, mean |Δ top-5 logprob| {pooled:.4}, worst prompt {:.4} ({:?})",
        runner.info().kernels,
        100.0 * agreement,
        worst.0,
        worst.1
    );
    Distance { steps, agreement, pooled, worst }
}

#[test]
fn the_int8_path_stays_close_to_the_f32_path() {
    // As many as can be, to find the other path's best five in.
    let Distance { steps, agreement, pooled, worst } = distance(&mut load_real(Dtype::Auto, |_| {}), 255);
    assert!(steps >= 2000, "{steps} steps");
    assert!(agreement >= 0.975, "argmax agreement {agreement}");
    assert!(pooled <= 0.085, "mean |Δ top-5 logprob| {pooled}");
    assert!(worst.0 <= 0.13, "mean |Δ top-5 logprob| of {:?} {}", worst.1, worst.0);
}
