use crate::raw::{RawConfig, RawGateway, RawLog, RawModel};
use crate::*;
use pagedd_core::{Blocks, Bytes, Tokens};
use proptest::prelude::*;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

const SHIPPED: &str = include_str!("../../../etc/pagedd.yaml");

fn parse(text: &str) -> Result<Config, ConfigError> {
    Config::parse(Some(Path::new("/etc/p.yaml")), text, &Overrides::default())
}

/// A directory with a model file `m.gguf` in it.
fn with_model() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("m.gguf"), "GGUF").unwrap();
    dir
}

#[test]
fn an_empty_file_is_the_defaults_without_a_model() {
    for text in ["", "\n", "# nothing\n", "---\n", "models:\n", "models: {}\n", "log:\ngateway:\nmodels: ~\n"]
    {
        let config = parse(text).unwrap_or_else(|error| panic!("{text:?}: {error}"));
        assert_eq!(config, parse("").unwrap(), "{text:?}");
        assert_eq!(config.models, [], "{text:?}");
    }
    let config = parse("").unwrap();
    assert_eq!(config.state_dir, Path::new("/var/lib/pagedd"));
    assert_eq!(config.admin_socket, Path::new("/var/lib/pagedd/admin.sock"));
    assert_eq!(config.listen.to_string(), "127.0.0.1");
    assert_eq!((config.log.level, config.log.format), (LogLevel::Info, LogFormat::Text));
    assert_eq!(config.gateway.max_body, Bytes(4 << 20));
    assert_eq!(config.gateway.idle_timeout, Duration::from_secs(90));
    assert_eq!((config.tenant_uids.first, config.tenant_uids.last), (61_000, 61_999));
    assert_eq!((config.retention, config.reattach_grace), (Duration::from_mins(10), Duration::from_mins(1)));
    assert_eq!(config.drain_timeout, Duration::from_secs(30));
    assert_eq!((config.fsync, config.cgroups), (Fsync::Interval, Cgroups::Auto));
    assert_eq!(
        config.require_models().unwrap_err().to_string(),
        "/etc/p.yaml: no model is configured; add one: `models: { smollm2: { path: /path/to/model.gguf } }`"
    );
}

#[test]
fn a_model_with_a_path_only_has_the_documented_defaults() {
    let dir = with_model();
    let file = dir.path().join("p.yaml");
    fs::write(&file, "models:\n  m:\n    path: m.gguf\n").unwrap();
    let config = Config::load(&file).unwrap();
    let model = &config.require_models().unwrap()[0];
    assert_eq!(config.model("m"), Some(model));
    assert_eq!(model.path, dir.path().join("m.gguf"), "relative to the file's directory");
    assert_eq!((model.device, model.dtype, model.kv_dtype), (Device::Cpu, ComputeDtype::Auto, KvDtype::F16));
    assert_eq!((model.kv_memory, model.block_size), (KvMemory::Auto, Tokens(16)));
    assert_eq!((model.max_num_seqs, model.max_num_batched_tokens), (64, Tokens(512)));
    assert_eq!(model.itl_target, Some(Duration::from_millis(100)));
    assert_eq!((model.max_model_len, model.threads, model.default_max_tokens), (None, None, None));
    assert_eq!((model.max_queued_requests, model.prefix_cache, model.policy), (1_000, true, Policy::Fcfs));
    assert_eq!((model.prompt_lookup, model.deterministic), (true, false));
}

#[test]
fn where_no_number_of_sequences_is_given_a_step_has_a_token_for_each() {
    let seqs = |options: &str| {
        let text = format!("models: {{ m: {{ path: /proc/self/exe{options} }} }}");
        parse(&text).unwrap().models[0].max_num_seqs
    };
    assert_eq!(seqs(", max_num_batched_tokens: 16"), 16);
    assert_eq!(seqs(", max_num_batched_tokens: 65536"), 64);
    assert_eq!(seqs(", max_num_seqs: 512"), 512);
}

#[test]
fn no_configuration_at_all_is_told_with_the_file_that_is_looked_for_and_the_option() {
    let error = Config::load_with(None, &Overrides::default()).unwrap().require_models().unwrap_err();
    assert_eq!(
        error.to_string(),
        "there is no configuration: write /etc/pagedd/pagedd.yaml, or name a file with --config"
    );
}

#[test]
fn every_setting_is_read_and_models_keep_the_files_order() {
    let dir = with_model();
    let path = dir.path().join("m.gguf");
    let text = format!(
        "state_dir: /s\nadmin_socket: /run/a.sock\nlisten: \"::1\"\nlog: {{ level: debug, format: json }}\n\
         gateway: {{ max_body: 1MB, max_connections: 8, header_timeout: 500ms, idle_timeout: 1m }}\n\
         tenant_uids: 70000 - 70001\ncgroups: required\nfsync: every\nretention: 0s\nreattach_grace: 2h\ndrain_timeout: 1.5m\nmodels:\n\
         \x20 z: {{ path: {0}, dtype: f32, itl_target: 1.5s }}\n\
         \x20 a: {{ path: {0}, device: cpu, dtype: f32, kv_dtype: f16, kv_memory: 100000 tokens, block_size: 512, max_num_seqs: 1,\n\
         \x20      max_num_batched_tokens: 2048, itl_target: none, max_model_len: 4096, threads: 2, max_queued_requests: 5, prefix_cache: false,\n\
         \x20      deterministic: true, prompt_lookup: false,\n\
         \x20      policy: fcfs, default_max_tokens: \"256\" }}\n",
        path.display()
    );
    let config = parse(&text).unwrap();
    assert_eq!(config.models.iter().map(|model| model.name.as_str()).collect::<Vec<_>>(), ["z", "a"]);
    assert_eq!(config.models[0].kv_dtype, KvDtype::F32, "auto follows dtype f32");
    assert_eq!(config.models[0].itl_target, Some(Duration::from_millis(1500)));
    let model = &config.models[1];
    assert_eq!(model.itl_target, None);
    assert_eq!(model.kv_dtype, KvDtype::F16, "what is said goes before");
    assert_eq!(model.kv_memory, KvMemory::Given(Amount::Tokens(Tokens(100_000))));
    assert_eq!((model.block_size, model.max_num_seqs), (Tokens(512), 1));
    assert_eq!((model.max_num_batched_tokens, model.max_model_len), (Tokens(2_048), Some(Tokens(4_096))));
    assert_eq!((model.threads.map(u32::from), model.max_queued_requests), (Some(2), 5));
    assert_eq!((model.prefix_cache, model.prompt_lookup, model.deterministic), (false, false, true));
    assert_eq!(model.default_max_tokens, Some(Tokens(256)));
    assert_eq!(config.admin_socket, Path::new("/run/a.sock"));
    assert_eq!(config.gateway.max_body, Bytes(1_000_000));
    assert_eq!(config.gateway.header_timeout, Duration::from_millis(500));
    assert_eq!((config.fsync, config.retention), (Fsync::Every, Duration::ZERO));
    assert_eq!(config.cgroups, Cgroups::Required);
    assert_eq!(config.drain_timeout, Duration::from_secs(90));
    assert_eq!((config.tenant_uids.first, config.tenant_uids.last), (70_000, 70_001));
}

#[test]
fn a_model_on_a_gpu_keeps_bf16_and_one_that_is_generated_needs_no_file() {
    for (written, ordinal) in [("cuda:0", 0), ("\"cuda:63\"", 63)] {
        let text = format!(
            "models:\n  m:\n    path: synthetic:llama-3-8b\n    device: {written}\n    threads: auto\n    deterministic: true\n"
        );
        let config = parse(&text).unwrap_or_else(|error| panic!("{error}"));
        let model = &config.models[0];
        assert_eq!(model.path, Path::new("synthetic:llama-3-8b"), "no file, so not relative to anything");
        assert_eq!(model.device, Device::Cuda { ordinal });
        assert_eq!(model.device.to_string(), format!("cuda:{ordinal}"));
        assert_eq!((model.dtype, model.kv_dtype), (ComputeDtype::Auto, KvDtype::Bf16));
        assert!(model.deterministic);
    }
    assert!(SHAPES.iter().all(|shape| {
        ["", FOUR_BITS]
            .iter()
            .all(|form| parse(&format!("models: {{ m: {{ path: '{SYNTHETIC}{shape}{form}' }} }}")).is_ok())
    }));
}

#[test]
fn the_command_lines_state_directory_goes_before_the_files() {
    let overrides = Overrides { state_dir: Some(PathBuf::from("/tmp/s")) };
    let config = Config::parse(None, "state_dir: /elsewhere", &overrides).unwrap();
    assert_eq!(config.state_dir, Path::new("/tmp/s"));
    assert_eq!(config.admin_socket, Path::new("/tmp/s/admin.sock"));
    let overrides = Overrides { state_dir: Some(PathBuf::from(format!("/{}", "d".repeat(120)))) };
    let error = Config::load_with(None, &overrides).unwrap_err().to_string();
    assert!(error.starts_with("--state-dir: the admin socket's path has 132 bytes"), "{error}");
}

/// Each case: what is written, and the one line that it is refused by. `/dev/null`'s directory is a path that is there.
const REFUSALS: &[(&str, &str)] = &[
    // Keys
    ("sate_dir: /s\n", "1:1: unknown key `sate_dir`; did you mean `state_dir`?"),
    (
        "models:\n  m:\n    path: /x\n    blok_size: 16\n",
        "4:5: models.m: unknown key `blok_size`; did you mean `block_size`?",
    ),
    ("log: { colour: blue }\n", "1:8: log: unknown key `colour`; known are level, format"),
    ("listen: ::1\nretention: 1m\nlisten: ::1\n", "3:1: key `listen` stands twice"),
    ("models:\n  m: { path: /x }\n  m: { path: /x }\n", "3:3: models: key `m` stands twice"),
    ("models:\n  m:\n    path: /x\n    threads: 1\n    path: /y\n", "5:5: models.m: key `path` stands twice"),
    // YAML itself
    ("log: {\n", "2:1: did not find expected node content, while parsing a flow node"),
    ("listen: b: c\n", "1:10: mapping values are not allowed in this context"),
    (
        "\tlisten: ::1\n",
        "1:1: found character that cannot start any token, while scanning for the next token",
    ),
    ("- a\n", "1:1: invalid type: sequence, expected keys with values"),
    ("hello\n", "1:1: invalid type: string \"hello\", expected keys with values"),
    ("models: [a]\n", "1:9: models: invalid type: sequence, expected model names, each with its settings"),
    ("listen: [a]\n", "1:9: listen: invalid type: sequence, expected a single value"),
    // Values
    (
        "listen: localhost\n",
        "1:9: listen: `localhost` is no IP address; write for example 127.0.0.1, 0.0.0.0 or \"::\"; ports are the tenants'",
    ),
    (
        "listen: 127.0.0.1:8000\n",
        "1:9: listen: `127.0.0.1:8000` is no IP address; write for example 127.0.0.1, 0.0.0.0 or \"::\"; ports are the tenants'",
    ),
    (
        "log: { level: inof }\n",
        "1:15: log.level: `inof` is none of error, warn, info, debug, trace; did you mean `info`?",
    ),
    ("log: { format: xml }\n", "1:16: log.format: `xml` is none of text, json"),
    ("state_dir: ''\n", "1:12: state_dir: the path is empty"),
    (
        "gateway:\n  max_body: 4\n",
        "2:13: gateway.max_body: `4` needs a unit: B, KiB, MiB, GiB, TiB, KB, MB, GB or TB",
    ),
    ("gateway:\n  max_body: 12B\n", "2:13: gateway.max_body: 12B is not from 1KiB to 1GiB"),
    (
        "gateway:\n  max_connections: 0\n",
        "2:20: gateway.max_connections: `0` is no whole number from 1 to 65536",
    ),
    ("gateway:\n  header_timeout: 30\n", "2:19: gateway.header_timeout: `30` needs a unit: ms, s, m, h or d"),
    ("gateway:\n  idle_timeout: 2h\n", "2:17: gateway.idle_timeout: 2h is not from 100ms to 1h"),
    ("retention: soon\n", "1:12: retention: `soon` is no duration; write for example 30s, 10m or 500ms"),
    ("retention: 31d\n", "1:12: retention: 31d is not from 0s to 30d"),
    ("drain_timeout: 2h\n", "1:16: drain_timeout: 2h is not from 0s to 1h"),
    (
        "cgroups: require\n",
        "1:10: cgroups: `require` is none of auto, required, off; did you mean `required`?",
    ),
    (
        "tenant_uids: 0-10\n",
        "1:14: tenant_uids: `0-10` is no range of user ids; write for example 61000-61999 (0 is root's)",
    ),
    (
        "tenant_uids: 20-10\n",
        "1:14: tenant_uids: `20-10` is no range of user ids; write for example 61000-61999 (0 is root's)",
    ),
    (
        "models:\n  a/b: { path: /x }\n",
        "2:3: models: model name `a/b` has '/'; allowed are a-z, A-Z, 0-9, -, _ and .",
    ),
    (
        "models: { m: { block_size: 17 } }\n",
        "1:28: models.m.block_size: `17` is none of 16, 32, 64, 128, 256, 512",
    ),
    (
        "models: { m: { device: gpu } }\n",
        "1:24: models.m.device: `gpu` is neither cpu nor a GPU by its number, cuda:0 to cuda:63",
    ),
    (
        "models: { m: { device: cuda:64 } }\n",
        "1:24: models.m.device: `cuda:64` is neither cpu nor a GPU by its number, cuda:0 to cuda:63",
    ),
    (
        "models: { m: { policy: lifo } }\n",
        "1:24: models.m.policy: `lifo` is not known; the only value is `fcfs`",
    ),
    (
        "models: { m: { kv_dtype: bf8 } }\n",
        "1:26: models.m.kv_dtype: `bf8` is none of f16, f32, bf16, fp8; did you mean `bf16`?, or `auto`",
    ),
    ("models: { m: { deterministic: 1 } }\n", "1:31: models.m.deterministic: `1` is neither true nor false"),
    (
        "models: { m: { kv_memory: 120% } }\n",
        "1:27: models.m.kv_memory: `120%` is not between 0% and 100% with at most two decimals, or `auto`",
    ),
    (
        "models: { m: { kv_memory: 4096 } }\n",
        "1:27: models.m.kv_memory: `4096` needs a unit: %, tokens, B, KiB, MiB, GiB, TiB, KB, MB, GB or TB, or `auto`",
    ),
    (
        "models: { m: { path: /etc, prefix_cache: yes } }\n",
        "1:42: models.m.prefix_cache: `yes` is neither true nor false",
    ),
    (
        "models: { m: { prompt_lookup: on } }\n",
        "1:31: models.m.prompt_lookup: `on` is neither true nor false",
    ),
    (
        "models: { m: { threads: -1 } }\n",
        "1:25: models.m.threads: `-1` is no whole number from 1 to 1024, or `auto`",
    ),
    (
        "models: { m: { max_num_batched_tokens: 0 } }\n",
        "1:40: models.m.max_num_batched_tokens: `0` is no whole number from 1 to 65536",
    ),
    (
        "models: { m: { max_num_batched_tokens: 65537 } }\n",
        "1:40: models.m.max_num_batched_tokens: `65537` is no whole number from 1 to 65536",
    ),
    (
        "models: { m: { path: /proc/self/exe, max_num_batched_tokens: 16, max_num_seqs: 17 } }\n",
        "1:80: models.m.max_num_seqs: 17 is above max_num_batched_tokens, 16: each sequence of a step needs a token of it",
    ),
    (
        "models: { m: { path: /proc/self/exe, max_num_seqs: 513 } }\n",
        "1:52: models.m.max_num_seqs: 513 is above max_num_batched_tokens, 512: each sequence of a step needs a token of it",
    ),
    (
        "models: { m: { itl_target: soon } }\n",
        "1:28: models.m.itl_target: `soon` is no duration; write for example 30s, 10m or 500ms, or `none`",
    ),
    (
        "models: { m: { path: /proc/self/exe, itl_target: 0ms } }\n",
        "1:50: models.m.itl_target: 0s is not from 1ms to 1h",
    ),
    (
        "models: { m: { max_model_len: 1e9 } }\n",
        "1:31: models.m.max_model_len: `1e9` is no whole number from 1 to 16777216, or `auto`",
    ),
    // What more than one key decides, or the file system
    (
        "models:\n  m: { path: synthetic:llama-2-7b, device: cuda:0, dtype: f32 }\n",
        "2:59: models.m.dtype: f32 is for the CPU; cuda:0 multiplies bf16 weights: leave it at auto",
    ),
    (
        "models:\n  m: { path: synthetic:llama-2-7b, device: cuda:3, kv_dtype: f16 }\n",
        "2:62: models.m.kv_dtype: f16 is for the CPU; on cuda:3 KV blocks are bf16 (auto) or fp8",
    ),
    (
        "models:\n  m: { path: synthetic:llama-2-7b, device: cuda:0, threads: 8 }\n",
        "2:61: models.m.threads: their number is for the CPU; cuda:0 computes itself: leave it at auto",
    ),
    (
        "models:\n  m: { path: synthetic:llama-2-7b, kv_dtype: bf16 }\n",
        "2:46: models.m.kv_dtype: bf16 is what a GPU keeps; on the CPU KV blocks are f16 or f32",
    ),
    (
        "models:\n  m: { path: synthetic:llama-2-7b, device: cpu, kv_dtype: fp8 }\n",
        "2:59: models.m.kv_dtype: fp8 is what a GPU keeps; on the CPU KV blocks are f16 or f32",
    ),
    (
        "models:\n  m: { path: synthetic:llama-3-8 }\n",
        "2:14: models.m.path: no shape of a generated model, or one and :q4_1: `llama-3-8` is none of llama-2-7b, llama-2-13b, llama-3-8b, qwen2.5-7b, smollm2-135m; did you mean `llama-3-8b`?",
    ),
    (
        "models:\n  m:\n    dtype: f32\n",
        "2:3: models.m.path: is missing: name a GGUF file or a Hugging Face directory",
    ),
    ("models:\n  m:\n", "2:3: models.m.path: is missing: name a GGUF file or a Hugging Face directory"),
    (
        "models:\n  n: { path: /dev/../nowhere/m.gguf }\n",
        "2:14: models.n.path: there is no file or directory /dev/../nowhere/m.gguf; correct the path, or put the model there",
    ),
    (
        "models:\n  m:\n    path: /dev\n",
        "3:11: models.m.path: directory /dev has no config.json; name a Hugging Face model directory or a GGUF file",
    ),
    (
        "models:\n  m:\n    path: /dev/null\n",
        "3:11: models.m.path: /dev/null is neither a file nor a directory",
    ),
];

#[test]
fn each_mistake_is_one_line_with_its_place_its_key_and_the_remedy() {
    let wrong: Vec<String> = REFUSALS
        .iter()
        .filter_map(|(text, expected)| {
            let found = parse(text).map_or_else(|error| error.to_string(), |_| "accepted".to_owned());
            (found != format!("/etc/p.yaml:{expected}"))
                .then(|| format!("{text:?}\n  found    {found}\n  expected {expected}"))
        })
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_kv_memory_of_nothing_is_refused_at_its_place() {
    let dir = with_model();
    for (amount, said) in [("0%", "0% leaves"), ("0B", "0 leaves"), ("0 tokens", "0 leaves")] {
        let text =
            format!("models: {{ m: {{ kv_memory: {amount}, path: {}/m.gguf }} }}", dir.path().display());
        let error = parse(&text).unwrap_err().to_string();
        assert!(error.starts_with(&format!("/etc/p.yaml:1:27: models.m.kv_memory: {said}")), "{error}");
    }
}

#[test]
fn a_socket_path_that_no_address_holds_is_refused_at_the_key_that_makes_it() {
    let long = "d".repeat(120);
    let error = parse(&format!("listen: ::1\nstate_dir: /{long}\n")).unwrap_err().to_string();
    assert!(
        error.starts_with("/etc/p.yaml:2:12: state_dir: the admin socket's path has 132 bytes"),
        "{error}"
    );
    let error = parse(&format!("admin_socket: /{long}\nstate_dir: /{long}\n")).unwrap_err().to_string();
    assert!(
        error.starts_with("/etc/p.yaml:1:15: admin_socket: the admin socket's path has 121 bytes"),
        "{error}"
    );
    assert!(parse(&format!("admin_socket: /a\nstate_dir: /{long}\n")).is_ok());
}

#[test]
fn what_is_no_text_or_not_there_is_refused_by_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("p.yaml");
    let shown = file.display().to_string();
    let error = Config::load(&file).unwrap_err().to_string();
    assert!(error.starts_with(&format!("{shown}: cannot read the configuration: No such file")), "{error}");
    fs::write(&file, b"listen: ::1\nlog: \xff\n").unwrap();
    assert_eq!(Config::load(&file).unwrap_err().to_string(), format!("{shown}:2:6: not UTF-8"));
    fs::write(&file, vec![b'#'; (1 << 20) + 1]).unwrap();
    let error = Config::load(&file).unwrap_err().to_string();
    assert_eq!(error, format!("{shown}: a configuration of more than 1048576 bytes is refused"));
}

#[test]
fn a_column_counts_characters_and_an_anchor_does_not_move_it() {
    let error = parse("log: { \"é\": 1 }\n").unwrap_err().to_string();
    assert!(error.starts_with("/etc/p.yaml:1:8: log: unknown key `é`"), "{error}");
    let error = parse("log: { level: &x inof }\n").unwrap_err().to_string();
    assert!(error.starts_with("/etc/p.yaml:1:15: log.level: `inof`"), "{error}");
}

#[test]
fn deep_nesting_and_multiplying_aliases_are_refused() {
    let deep = "[".repeat(5_000);
    let levels = ('b'..='i')
        .zip('a'..)
        .map(|(name, last)| format!("  {name}: &{name} [{}]", vec![format!("*{last}"); 10].join(", ")));
    let bomb = format!(
        "models:\n  a: &a [x, x, x, x, x, x, x, x, x, x]\n{}\n",
        levels.collect::<Vec<_>>().join("\n")
    );
    for text in [deep.clone(), format!("models: {deep}"), format!("models: {}", "{a: ".repeat(5_000)), bomb] {
        let error = parse(&text).unwrap_err().to_string();
        assert!(!error.contains('\n') && error.len() < 300, "{error}");
    }
}

/// Every line of the shipped file that is a setting, its mark of a comment taken away.
fn uncommented() -> String {
    SHIPPED.lines().map(|line| {
        let trimmed = line.trim_start();
        let setting = trimmed.strip_prefix('#').filter(|rest| !rest.starts_with([' ', '#']) && !rest.is_empty());
        setting.map_or_else(|| line.to_owned(), |rest| format!("{}{rest}", &line[..line.len() - trimmed.len()]))
    } + "\n").collect()
}

#[test]
fn the_shipped_file_holds_as_it_is_and_with_every_setting_uncommented_gives_the_defaults() {
    assert_eq!(parse(SHIPPED).unwrap(), parse("").unwrap());
    let dir = with_model();
    let path = dir.path().join("m.gguf").display().to_string();
    let text = uncommented().replace("/var/lib/pagedd/models/smollm2-135m-instruct.gguf", &path);
    let documented = parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    let default = parse(&format!("models: {{ smollm2: {{ path: {path} }} }}")).unwrap();
    assert_eq!(documented, default);
}

#[test]
fn the_shipped_file_documents_every_key_and_no_other() {
    fn keys(value: &serde_yaml::Value, at: &[&str]) -> Vec<String> {
        let value = at.iter().fold(value, |value, key| &value[*key]);
        value.as_mapping().unwrap().keys().map(|key| key.as_str().unwrap().to_owned()).collect()
    }
    let value: serde_yaml::Value = serde_yaml::from_str(&uncommented()).unwrap();
    assert_eq!(keys(&value, &[]), RawConfig::KEYS);
    assert_eq!(keys(&value, &["log"]), RawLog::KEYS);
    assert_eq!(keys(&value, &["gateway"]), RawGateway::KEYS);
    assert_eq!(keys(&value, &["models", "smollm2"]), RawModel::KEYS);
}

#[test]
fn names_of_tenants_are_checked_and_refused_by_one_short_line() {
    for name in ["a", "acme", "a-1", &"a".repeat(63)] {
        assert_eq!(name.parse::<TenantName>().unwrap().as_str(), name);
    }
    let cases = [
        ("", "tenant name `` has 0 characters; it may have 1 to 63"),
        ("a/b", "tenant name `a/b` has '/'; allowed are a-z, 0-9 and -"),
        ("../x", "tenant name `../x` has '.'; allowed are a-z, 0-9 and -"),
        ("Acme", "tenant name `Acme` has 'A'; allowed are a-z, 0-9 and -"),
        ("1a", "tenant name `1a` must begin with a letter from a to z"),
        ("-a", "tenant name `-a` must begin with a letter from a to z"),
        ("a\nb", "tenant name `a\u{fffd}b` has '\\n'; allowed are a-z, 0-9 and -"),
        ("é", "tenant name `é` has 'é'; allowed are a-z, 0-9 and -"),
    ];
    for (name, expected) in cases {
        assert_eq!(name.parse::<TenantName>().unwrap_err().to_string(), expected, "{name:?}");
    }
    let error = "x".repeat(300).parse::<TenantName>().unwrap_err().to_string();
    assert_eq!(error, format!("tenant name `{}…` has 300 characters; it may have 1 to 63", "x".repeat(40)));
    assert!("Qwen2.5-0.5B_x".parse::<ModelName>().is_ok() && "a b".parse::<ModelName>().is_err());
}

#[test]
fn amounts_become_blocks_rounded_to_the_safe_side() {
    let blocks =
        |text: &str| text.parse::<Amount>().unwrap().in_blocks(Blocks(101), Bytes(1_000), Tokens(16)).0;
    assert_eq!(blocks("20%"), 20);
    assert_eq!(blocks("100%"), 101);
    assert_eq!(blocks("0.99%"), 0);
    assert_eq!(blocks("1999B"), 1);
    assert_eq!(blocks("17 tokens"), 2);
    assert_eq!(blocks("0 tokens"), 0);
    assert_eq!(blocks("1TiB"), 1_099_511_627);
    assert_eq!(
        Amount::Bytes(Bytes(5)).in_blocks(Blocks(1), Bytes(0), Tokens(0)),
        Blocks(0),
        "no division by zero"
    );
    assert_eq!(Amount::Tokens(Tokens(3)).in_bytes(Bytes(9), Bytes(7)), Bytes(21));
    assert_eq!("33.33%".parse::<Amount>().unwrap().in_bytes(Bytes(10_000), Bytes(7)), Bytes(3_333));
}

#[test]
fn texts_of_amounts_sizes_and_durations_read_as_they_are_meant() {
    let same: [(&str, &str); 12] = [
        ("20 %", "20%"),
        ("12.50%", "12.5%"),
        ("0.05%", "0.05%"),
        ("2 GiB", "2GiB"),
        ("2gb", "2GB"),
        ("1.5GiB", "1536MiB"),
        ("1024KiB", "1MiB"),
        ("0.5KiB", "512B"),
        ("0GiB", "0B"),
        ("4096tokens", "4096 tokens"),
        ("1 token", "1 token"),
        (" 7 tokens ", "7 tokens"),
    ];
    for (text, shown) in same {
        assert_eq!(text.parse::<Amount>().unwrap().to_string(), shown, "{text:?}");
    }
    for text in [
        "",
        "%",
        "-1%",
        "100.01%",
        "1.234%",
        "1..2%",
        "1.%",
        ".5%",
        "5 apples",
        "1.5 tokens",
        "4294967296 tokens",
        "8EiB",
        "9000000TiB",
        "0.1B",
        "99999999999999999999GiB",
        "2GiB extra",
        "20%%",
        "١٠%",
    ] {
        let error = text.parse::<Amount>().unwrap_err().to_string();
        assert!(error.contains(&format!("`{text}`")) && !error.contains('\n'), "{text:?}: {error}");
    }
    for (text, shown) in
        [("10m", "10m"), ("90s", "90s"), ("60s", "1m"), ("1.5h", "90m"), ("0ms", "0s"), ("250 ms", "250ms")]
    {
        assert_eq!(text.parse::<Span>().unwrap().to_string(), shown, "{text:?}");
    }
    for text in ["", "m", "10", "10M", "-1s", "0.5ms", "36500d", "1h30m"] {
        assert!(text.parse::<Span>().is_err(), "{text:?}");
    }
}

#[test]
fn the_nearest_word_is_near() {
    assert_eq!(nearest("tenent", ["tenant", "key"]), Some("tenant"));
    assert_eq!(nearest("LISTEN", ["listen"]), Some("listen"));
    assert_eq!(nearest("completely-different", ["listen", "log"]), None);
    assert_eq!(nearest(&"x".repeat(100_000), ["listen"]), None);
}

proptest! {
    #[test]
    fn an_amount_reads_back_what_it_printed(kind in 0..3, number: u64) {
        let amount = match kind {
            0 => Amount::Percent(Percent::from_hundredths((number % 10_001) as u32).unwrap()),
            1 => Amount::Bytes(Bytes(number >> 1)),
            _ => Amount::Tokens(Tokens(number as u32)),
        };
        prop_assert_eq!(amount.to_string().parse::<Amount>(), Ok(amount));
    }

    #[test]
    fn a_round_size_reads_back_what_it_printed(count in 0u64..4_000, unit in 0..4u32) {
        for base in [1_000u64, 1_024] {
            let size = Size(Bytes(count * base.pow(unit)));
            prop_assert_eq!(size.to_string().parse::<Size>(), Ok(size));
        }
    }

    #[test]
    fn a_duration_reads_back_what_it_printed(ms in 0u64..3_000_000_000_000) {
        let span = Span(Duration::from_millis(ms));
        prop_assert_eq!(span.to_string().parse::<Span>(), Ok(span));
    }

    #[test]
    fn floors_of_at_most_all_never_add_up_to_more_than_the_pool(pool: u32, parts in prop::collection::vec(0u32..5_000, 1..8)) {
        let total: u32 = parts.iter().sum();
        let shares = parts.iter().map(|part| Percent::from_hundredths(part * 10_000 / total.max(1)).unwrap());
        let blocks: u64 = shares.map(|share| share.of(u64::from(pool))).sum();
        prop_assert!(blocks <= u64::from(pool), "{blocks} of {pool}");
    }

    #[test]
    fn no_text_panics_and_every_refusal_is_one_line(text in "[a-z:{}\\[\\]&*!|>%@`'\"\\\\#\\- \\n\\t0-9é\u{1}]{0,80}") {
        if let Err(error) = parse(&text) {
            prop_assert!(!error.to_string().contains('\n'), "{}", error);
        }
    }

    #[test]
    fn no_name_panics(text in "\\PC{0,300}") {
        let _ = (text.parse::<TenantName>(), text.parse::<ModelName>(), text.parse::<Amount>(), text.parse::<Span>());
    }
}

#[test]
fn programs_are_found_beside_the_daemon_or_where_packages_put_them_and_all_in_one_folder() {
    const BOTH: [&str; 2] = ["pagedd-worker", "pagedd-gateway"];
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name);
    let put = |name: &str| {
        fs::create_dir_all(path(name).parent().unwrap()).unwrap();
        fs::write(path(name), "").unwrap();
    };
    let found = || program_folder(&path("usr/bin/pagedd"), &BOTH);
    let everywhere = [path("usr/bin"), path("usr/lib/pagedd"), path("usr/libexec/pagedd")];
    assert_eq!(found(), Err(everywhere.to_vec()));
    put("usr/libexec/pagedd/pagedd-worker");
    put("usr/libexec/pagedd/pagedd-gateway");
    assert_eq!(found(), Ok(path("usr/libexec/pagedd")));
    put("usr/lib/pagedd/pagedd-worker");
    assert_eq!(found(), Ok(path("usr/libexec/pagedd")), "half of another installation is none");
    put("usr/lib/pagedd/pagedd-gateway");
    assert_eq!(found(), Ok(path("usr/lib/pagedd")));
    put("usr/bin/pagedd-worker");
    put("usr/bin/pagedd-gateway");
    assert_eq!(found(), Ok(path("usr/bin")));
    assert_eq!(program_folder(Path::new("/"), &BOTH), Err(vec![]));
}
