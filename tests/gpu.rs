//! Models on GPUs, as far as they can be tested where there is none: what is refused, what fails, and what goes on beside it.

mod tiny;

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use pagedd_tests::daemon::{DRAIN, Daemon, Site, binary};
use pagedd_tests::process::kill_descendant;
use pagedd_tests::wait;
use serde_json::{Value, json};

/// A GPU that no host has, another for each test, and that tests of another checkout beside these seldom choose.
fn ordinal(test: u32) -> u32 {
    40 + 4 * (std::os::unix::process::parent_id() % 6) + test
}

/// A configuration with the generated model on the processors and once more on the GPU `ordinal`.
fn yaml(folder: &Path, ordinal: u32) -> String {
    let cpu = tiny::yaml(folder);
    let path = folder.join("tiny.gguf");
    format!(
        "{cpu}  far:\n    path: {}\n    device: cuda:{ordinal}\n    kv_memory: 4096 tokens\n",
        path.display()
    )
}

/// Whether an error is about the device: no driver, no such GPU, or a program without support for them.
fn is_of_gpus(error: &str) -> bool {
    error.contains("GPU") || error.contains("NVIDIA driver")
}

/// A started daemon whose second model has failed.
#[track_caller]
fn failed(daemon: &Daemon) -> Value {
    let found = wait::within(Duration::from_mins(1), || {
        let far = status(daemon)?["models"][1].clone();
        (far["state"]["is"] == "failed").then_some(far)
    });
    found.unwrap_or_else(|| panic!("the model does not fail:\n{}", daemon.site().log_text()))
}

/// What a daemon says of itself, where it answers.
fn status(daemon: &Daemon) -> Option<Value> {
    let answer = daemon.ctl(&["status"]);
    serde_json::from_str(&answer.text).ok().filter(|_| answer.code == Some(0))
}

#[test]
fn a_model_on_a_gpu_that_is_not_there_says_so_and_the_other_model_serves() {
    let folder = tempfile::tempdir().expect("a folder");
    let ordinal = ordinal(0);
    let config = format!("{}    kv_dtype: fp8\n", yaml(folder.path(), ordinal));
    let daemon = Site::new(&config).spawn();
    let far = failed(&daemon);
    let error = far["state"]["error"].as_str().unwrap_or_default();
    assert!(is_of_gpus(error) && !error.contains('\n'), "{far}");
    assert_eq!((&far["device"], &far["kv_dtype"]), (&json!(format!("cuda:{ordinal}")), &json!("fp8")));
    let log = daemon.site().log_text();
    assert!(log.contains("model cannot be loaded") && log.contains(error), "{log}");
    assert!(!log.contains("worker did not start"), "it was tried again:\n{log}");

    let acme = daemon.add_tenant_of("tiny", "acme", "0%", "100%");
    let body = json!({"model": "tiny", "prompt": [100, 101, 102], "max_tokens": 4, "ignore_eos": true});
    let answer = acme.http.post("/v1/completions", &body).ok();
    assert_eq!(answer["usage"]["completion_tokens"], 4, "{answer}");

    let refusal = daemon.ctl(&["checkpoint", "save", "one", "--kv"]);
    refusal.refused(&["model `far` is on cuda:", "without --kv"]);
    assert!(!daemon.site().state().join("checkpoints").join("one").exists());
    daemon.stop();
}

#[test]
fn bug_45_a_gpu_is_one_daemons_until_that_ends_however_it_ends() {
    let folder = tempfile::tempdir().expect("a folder");
    let ordinal = ordinal(1);
    let config = yaml(folder.path(), ordinal);
    let daemon = Site::new(&config).spawn();
    failed(&daemon);
    let refused = |site: &Site, pid: u64| {
        let ended = site.run_to_end();
        let (gpu, file, pid) =
            (format!("GPU cuda:{ordinal}"), format!("pagedd-cuda-{ordinal}.lock"), format!("(pid {pid})"));
        ended.refused(&[&gpu, &file, &pid, "give the model another device"]);
        assert_eq!(ended.code, Some(69), "{}", ended.text);
    };
    let second = Site::new(&config);
    let pid = daemon.status()["pid"].as_u64().expect("pid");
    refused(&second, pid);

    // The next daemon of the same place has it at once, whatever children of the dead one are left.
    kill_descendant(daemon.root(), pid as u32);
    wait::until("the next daemon answers", Duration::from_mins(1), || {
        status(&daemon).is_some_and(|status| status["pid"] != pid)
    });
    failed(&daemon);
    let next = daemon.status()["pid"].as_u64().expect("pid");
    assert_ne!(next, pid);
    refused(&second, next);
    daemon.stop();
    let second = second.spawn();
    failed(&second);
    second.stop();
}

#[test]
fn what_a_gpu_does_not_compute_with_is_refused_at_the_start() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = yaml(folder.path(), ordinal(2));
    let line = Site::new(&config).with_arguments(&["--dtype", "f32"]).run_to_end();
    assert_eq!(line.refused(&["--dtype f32: model `far` is on cuda:"]).code, Some(78));
    for (option, words) in [
        ("dtype: f32", "models.far.dtype: f32 is for the CPU"),
        ("kv_dtype: f16", "models.far.kv_dtype: f16 is for the CPU"),
        ("threads: 2", "models.far.threads: their number is for the CPU"),
        (
            "path: synthetic:llama",
            "no shape of a generated model, or one and :q4_1: `llama` is none of llama-2-7b",
        ),
    ] {
        let text = if option.starts_with("path") {
            format!("{DRAIN}models:\n  far:\n    {option}\n")
        } else {
            format!("{config}    {option}\n")
        };
        assert_eq!(Site::new(&text).run_to_end().refused(&[words]).code, Some(78), "{option}");
    }
}

#[test]
fn what_pagedctl_plans_is_what_the_daemon_then_has() {
    let folder = tempfile::tempdir().expect("a folder");
    let site = Site::new(&yaml(folder.path(), ordinal(3)));
    let mut command = Command::new(binary("pagedctl"));
    let output = command.args(["--json", "plan"]).arg(site.config()).output().expect("run pagedctl");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), said.as_str()), (Some(0), ""));
    let plan: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let daemon = site.spawn();
    failed(&daemon);
    daemon.add_tenant_of("tiny", "acme", "0%", "100%");
    let (planned, model) = (&plan["models"][0], daemon.model());
    assert_eq!(planned["weight_bytes"], model["weight_bytes"], "{planned}\n{model}");
    assert_eq!(planned["kv"]["blocks"], model["blocks_total"]);
    assert_eq!(planned["kv"]["bytes"], model["kv_bytes"]);
    assert_eq!(planned["parameters"], model["parameters"]);
    assert!(plan["devices"][0]["free_bytes"].as_u64() > planned["needed_bytes"].as_u64(), "{plan}");
    // Without the GPU the sum is there all the same, and why nothing is known of it.
    let far = &plan["models"][1];
    assert_eq!(
        far["kv"],
        json!({"blocks": 256, "tokens": 4096, "bytes": 256 * far["block_bytes"].as_u64().unwrap_or_default()})
    );
    assert!(far["free_unknown"].as_str().is_some_and(is_of_gpus), "{far}");
    daemon.stop();
}
