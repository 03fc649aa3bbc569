use crate::cli::run;
use crate::failure;
use crate::tests::{alone, args, configuration, environment};
use std::fs;
use std::process::Command;
use tempfile::TempDir;

/// A program beside the configuration that answers as `script` says. What it was asked is in `asked`.
fn worker(dir: &TempDir, script: &str) {
    let [written, path, asked] = ["script", "pagedd-worker", "asked"].map(|name| dir.path().join(name));
    fs::write(&written, format!("#!/bin/sh\necho \"$@\" >> {}\n{script}\n", asked.display())).unwrap();
    // Another process makes the file that is run: nobody runs one that a thread's child between fork and exec has open for writing.
    let copied = Command::new("install").arg("-m755").args([written, path]).status().unwrap();
    assert!(copied.success());
}

const PLANNED: &str = r#"{"architecture":"llama","weight_bytes":16060522496,"overhead_bytes":3221225472,"token_bytes":131072,"block_bytes":2097152,"block_size":16,"free_bytes":150323855360,"free_unknown":null,"kv":{"blocks":5120,"tokens":81920,"bytes":10737418240},"problem":null}"#;

#[test]
fn plan_sums_up_models_one_after_the_other_and_what_their_devices_have_left() {
    let dir = configuration(
        "models:\n  a: { path: \"synthetic:llama-3-8b\", device: cuda:0, kv_memory: 10GiB, max_model_len: 4096 }\n  \
         b: { path: m.gguf, kv_memory: 12.5%, dtype: f32 }\n  c: { path: m.gguf, device: cuda:0, kv_memory: 500 tokens, max_num_batched_tokens: 2048, deterministic: true }\n",
    );
    worker(&dir, &format!("echo '{PLANNED}'"));
    let outcome = run(args("plan"), &environment(dir.path()));
    assert_eq!((outcome.code, outcome.stderr.as_str()), (failure::OK, ""));
    let expected = "\
MODEL  DEVICE  WEIGHTS  KV A TOKEN  KV A BLOCK  BLOCKS  TOKENS       KV  SCRATCH      SUM
a      cuda:0  14.9GiB    128.0KiB      2.0MiB    5120   81920  10.0GiB   3.0GiB  27.9GiB
b      cpu     14.9GiB    128.0KiB      2.0MiB    5120   81920  10.0GiB   3.0GiB  27.9GiB
c      cuda:0  14.9GiB    128.0KiB      2.0MiB    5120   81920  10.0GiB   3.0GiB  27.9GiB

DEVICE      FREE   NEEDED      LEFT
cuda:0  140.0GiB  55.9GiB   84.0GiB
cpu     140.0GiB  27.9GiB  112.0GiB
";
    assert_eq!(outcome.stdout, expected);
    let path = dir.path().join("m.gguf").display().to_string();
    let asked = fs::read_to_string(dir.path().join("asked")).unwrap();
    let expected = format!(
        "plan --model synthetic:llama-3-8b --device cuda:0 --dtype auto --kv-dtype bf16 --kv-memory 10737418240B --block-size 16 --max-num-seqs 64 --max-num-batched-tokens 512 --taken 0 --max-model-len 4096\n\
         plan --model {path} --device cpu --dtype f32 --kv-dtype f32 --kv-memory 12.5% --block-size 16 --max-num-seqs 64 --max-num-batched-tokens 512 --taken 0\n\
         plan --model {path} --device cuda:0 --dtype auto --kv-dtype bf16 --kv-memory 500tokens --block-size 16 --max-num-seqs 64 --max-num-batched-tokens 2048 --taken 30019166208 --deterministic\n"
    );
    assert_eq!(asked, expected);

    let outcome = run(args("plan --json"), &environment(dir.path()));
    let value: serde_json::Value = serde_json::from_str(&outcome.stdout).unwrap();
    let model = &value["models"][2];
    assert_eq!(
        (&model["name"], &model["device"], &model["kv"]["blocks"]),
        (&"c".into(), &"cuda:0".into(), &5120.into())
    );
    assert_eq!(model["needed_bytes"], 30_019_166_208_u64);
    assert_eq!(value["devices"][0]["needed_bytes"], 60_038_332_416_u64);
    assert_eq!(value["devices"][1]["free_bytes"], 150_323_855_360_u64);
}

#[test]
fn plan_names_what_does_not_fit_or_cannot_be_read_and_exits_with_1() {
    let dir = configuration("models:\n  a: { path: m.gguf }\n  b: { path: m.gguf, device: cuda:1 }\n");
    let none = PLANNED.replace(r#"{"blocks":5120,"tokens":81920,"bytes":10737418240}"#, "null").replace(
        r#""free_bytes":150323855360,"free_unknown":null"#,
        r#""free_bytes":null,"free_unknown":"no NVIDIA driver""#,
    );
    worker(
        &dir,
        &format!("case \"$*\" in *cuda*) echo '{none}';; *) echo 'm.gguf: damaged' >&2; exit 1;; esac"),
    );
    let outcome = run(args("plan"), &environment(dir.path()));
    assert_eq!(outcome.code, failure::REFUSED);
    assert_eq!(outcome.stderr, "error: not every model can be served: model a: m.gguf: damaged\n");
    let expected = "\
MODEL  DEVICE  WEIGHTS  KV A TOKEN  KV A BLOCK  BLOCKS  TOKENS  KV  SCRATCH  SUM
a      cpu           -           -           -       -       -   -        -    -
b      cuda:1  14.9GiB    128.0KiB      2.0MiB       -       -   -   3.0GiB    -

DEVICE  FREE   NEEDED  LEFT
cpu        -       0B     -
cuda:1     -  17.9GiB     -
note: what is free on cuda:1 is not known: no NVIDIA driver
";
    assert_eq!(outcome.stdout, expected);
}

#[test]
fn plan_says_to_ask_for_less_memory_only_where_memory_is_the_problem() {
    let hint = "hint: lower kv_memory, take a smaller model, or give it another device\n";
    let full = PLANNED.replace(r#""problem":null"#, r#""problem":"weights take too much""#);
    for (kv_memory, script, hinted) in [
        ("10GiB", format!("echo '{full}'"), true),
        ("auto", format!("echo '{full}'"), true),
        ("1B", format!("echo '{full}'"), false),
        ("10GiB", "echo 'm.gguf: not a model' >&2; exit 1".to_owned(), false),
    ] {
        let dir = configuration(&format!("models: {{ a: {{ path: m.gguf, kv_memory: {kv_memory} }} }}"));
        worker(&dir, &script);
        let outcome = run(args("plan"), &environment(dir.path()));
        assert_eq!((outcome.code, outcome.stderr.ends_with(hint)), (failure::REFUSED, hinted), "{outcome:?}");
        assert_eq!(outcome.stderr.contains("hint: "), hinted, "{outcome:?}");
    }
}

#[test]
fn plan_without_a_worker_a_model_or_a_file_says_so() {
    let dir = configuration("models: { a: { path: m.gguf } }");
    let outcome = run(args("plan"), &environment(dir.path()));
    assert_eq!(outcome.code, failure::INTERNAL);
    assert!(
        outcome.stderr.starts_with(&format!("error: cannot run {}/pagedd-worker: ", dir.path().display())),
        "{outcome:?}"
    );
    assert!(
        outcome
            .stderr
            .ends_with("hint: pagedd-worker is installed with pagedctl: beside it, or in ../lib/pagedd\n"),
        "{outcome:?}"
    );
    let dir = configuration("");
    let outcome = run(args("plan"), &environment(dir.path()));
    assert_eq!(outcome.code, failure::REFUSED);
    assert!(outcome.stderr.contains("no model is configured"), "{outcome:?}");
    let outcome = alone("plan");
    assert_eq!(outcome.code, failure::USAGE);
    assert!(outcome.stderr.ends_with("hint: name a file: pagedctl plan FILE\n"), "{outcome:?}");
}
