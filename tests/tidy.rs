//! The repository is tidy: edges between crates, invariants that can be read off the sources, documents that hold.
//!
//! Each rule is run on the repository and on a planted fault.

use std::collections::BTreeSet;

use pagedd_tests::tidy::edges::{self, Graph};
use pagedd_tests::tidy::package::{self, Asset};
use pagedd_tests::tidy::source;
use pagedd_tests::tidy::{File, Finding, assert_clean, files, markdown, root};

/// What a rule says about one planted file.
fn planted(rule: impl Fn(&[File]) -> Vec<Finding>, path: &str, text: &str) -> Vec<String> {
    rule(&[File::new(path, text)]).into_iter().map(|f| f.to_string()).collect()
}

#[test]
fn crates_depend_on_each_other_as_the_architecture_says() {
    let metadata = edges::metadata();
    assert_clean(&edges::check(&edges::graph(&metadata), &edges::members(&metadata)));
}

fn designed() -> (Graph, BTreeSet<String>) {
    let graph: Graph = edges::EDGES
        .iter()
        .map(|(name, to)| ((*name).to_owned(), to.iter().map(|t| (*t).to_owned()).collect()))
        .collect();
    let members = graph.keys().cloned().collect();
    (graph, members)
}

#[test]
fn a_planted_edge_is_found() {
    let (mut graph, members) = designed();
    assert_clean(&edges::check(&graph, &members));
    graph.entry("pagedd-kv".into()).or_default().insert("pagedd-wire".into());
    let found = edges::check(&graph, &members);
    assert!(found.iter().any(|f| f.to_string().contains("pagedd-kv:0: depends on pagedd-wire")), "{found:?}");
}

#[test]
fn a_missing_edge_and_an_unknown_crate_are_found() {
    let (mut graph, mut members) = designed();
    graph.entry("pagedd-sched".into()).or_default().remove("pagedd-kv");
    members.insert("pagedd-extra".into());
    let found = edges::check(&graph, &members);
    assert!(
        found.iter().any(|f| f.to_string().contains("pagedd-sched:0: does not depend on pagedd-kv")),
        "{found:?}"
    );
    assert!(found.iter().any(|f| f.place == "pagedd-extra"), "{found:?}");
}

#[test]
fn a_library_that_a_process_must_not_link_is_found_through_others() {
    let (mut graph, members) = designed();
    graph.entry("pagedd-wire".into()).or_default().insert("middle".into());
    graph.entry("middle".into()).or_default().insert("hyper".into());
    let found = edges::check(&graph, &members);
    assert!(found.contains(&Finding::new("pagedd-worker", 0, "links hyper")), "{found:?}");
}

#[test]
fn serde_stands_only_in_crates_that_make_and_read_bytes() {
    assert_clean(&source::serde(&files()));
    assert!(
        !planted(source::serde, "daemon/sched/src/plan.rs", "#[derive(serde::Serialize)] struct A;")
            .is_empty()
    );
    let (mut graph, members) = designed();
    graph.entry("pagedd-sched".into()).or_default().insert("serde".into());
    assert!(edges::check(&graph, &members).contains(&Finding::new(
        "pagedd-sched",
        0,
        "depends on serde (I7)"
    )));
}

#[test]
fn kv_and_sched_never_read_a_clock_lock_spawn_await_or_touch_io() {
    assert_clean(&source::impure(&files()));
}

#[test]
fn a_planted_clock_lock_or_thread_is_found_in_every_spelling() {
    for text in [
        "use std::time::Instant;",
        "use std::{collections::HashMap, time};",
        "use std::{\n    fs::{self, File},\n};",
        "fn f() { let t = ::std::thread::spawn(|| {}); }",
        "fn f() -> u64 { std::process::id() as u64 }",
        "static N: AtomicU64 = AtomicU64::new(0);",
        "use core::time::Duration;",
        "async fn f() {}",
        "struct S { m: Mutex<u8> }",
        "fn f<'a>(x: &'a str) -> char { let c = '\"'; std::env::var(x); c }",
    ] {
        assert!(!planted(source::impure, "daemon/kv/src/pool.rs", text).is_empty(), "not found: {text}");
        assert!(
            planted(source::impure, "daemon/engine/src/engine.rs", text).is_empty(),
            "found elsewhere: {text}"
        );
    }
    for text in [
        "// never `std::time::Instant`, a Mutex or async\nfn f() {}",
        "/// A thread, a clock.\nconst S: &str = \"std::time::Instant\";",
        "const R: &str = r#\"use std::fs; \" async\"#; /* Mutex /* RwLock */ tokio */",
        "use std::collections::BTreeMap; use std::{fmt, mem::take};",
        "fn time(now_us: u64) -> u64 { now_us }",
    ] {
        let found = planted(source::impure, "daemon/sched/src/queue.rs", text);
        assert!(found.is_empty(), "{text}: {found:?}");
    }
}

#[test]
fn unsafe_code_stands_only_in_kernels_arena_and_host() {
    assert_clean(&source::unsafe_code(&files()));
    for text in ["fn f() { unsafe { g() } }", "#![allow(unsafe_code)]", "#[expect(unsafe_code)]\nmod a;"] {
        assert!(!planted(source::unsafe_code, "daemon/gateway/src/sse.rs", text).is_empty(), "{text}");
        assert!(planted(source::unsafe_code, "kernels/src/avx2.rs", text).is_empty(), "{text}");
    }
    assert!(
        planted(source::unsafe_code, "daemon/src/main.rs", "#![forbid(unsafe_code)]\n// unsafe").is_empty()
    );
}

#[test]
fn no_file_is_longer_than_800_lines() {
    assert_clean(&source::too_long(&files()));
    assert!(!planted(source::too_long, "ctl/src/main.rs", &"\n".repeat(801)).is_empty());
    assert!(planted(source::too_long, "ctl/src/main.rs", &"\n".repeat(800)).is_empty());
}

#[test]
fn nothing_is_left_over_from_writing() {
    assert_clean(&source::left_over(&files()));
    for text in [
        concat!("// TO", "DO: later"),
        concat!("    to", "do!()"),
        concat!("#[ig", "nore]"),
        concat!("db", "g!(x)"),
    ] {
        assert!(!planted(source::left_over, "daemon/src/main.rs", text).is_empty(), "{text}");
    }
}

#[test]
fn no_file_names_a_registry_or_a_path_of_one_machine() {
    assert_clean(&source::foreign(&files()));
    for text in [
        concat!("https://static.crates", ".io/x"),
        concat!("cd /wo", "rk/main"),
        concat!("\"/ho", "me/ann/m.gguf\""),
    ] {
        assert!(!planted(source::foreign, "README.md", text).is_empty(), "{text}");
    }
    for text in ["target/work/x", "~/work/pagedd", "$HOME/work/x", "the /rooted path"] {
        assert!(planted(source::foreign, "README.md", text).is_empty(), "{text}");
    }
}

#[test]
fn every_crate_opens_with_what_it_owns_and_never_does() {
    assert_clean(&source::openings(&files()));
    let bare =
        [File::new("daemon/kv/Cargo.toml", ""), File::new("daemon/kv/src/lib.rs", "//! Blocks.\nmod pool;")];
    assert_eq!(source::openings(&bare).len(), 2);
}

#[test]
fn nested_clippy_files_repeat_the_root_and_ban_clocks_where_they_must() {
    assert_clean(&source::clippy_files(&files()));
    let root = File::new("clippy.toml", "disallowed-methods = [{ path = \"std::env::set_var\" }]");
    let nested = File::new("daemon/kv/clippy.toml", "disallowed-types = [{ path = \"std::time::Instant\" }]");
    let found: Vec<String> = source::clippy_files(&[root, nested]).iter().map(ToString::to_string).collect();
    assert!(
        found.iter().any(|f| f.contains("does not repeat the root's ban of std::env::set_var")),
        "{found:?}"
    );
    assert!(
        found.iter().any(|f| f.contains("daemon/kv/clippy.toml:0: does not ban std::thread")),
        "{found:?}"
    );
}

#[test]
fn links_in_documents_resolve() {
    let root = root();
    assert_clean(&markdown::links(&files(), |path| root.join(path).exists()));
    let page = File::new(
        "docs/a.md",
        "# One thing\n[a](../b.md) [b](#one-thing) [c](#two) `[d](x)`\n```\n[e](y)\n```\n",
    );
    let found = markdown::links(&[page], |path| path == "docs/a.md");
    let lines: Vec<&str> = found.iter().map(|f| f.what.as_str()).collect();
    assert_eq!(lines, ["links to ../b.md, which is not there", "links to #two, which has no such heading"]);
}

#[test]
fn every_row_of_the_specification_names_a_command() {
    let files = files();
    let functions = source::functions(&files);
    let page = files.iter().find(|f| f.path == "SPECIFICATION.md").expect("SPECIFICATION.md");
    assert_clean(&markdown::specification(page, &functions));
    let text = "| what | bar | command |\n|---|---|---|\n| a | 1 | by hand |\n| b | 2 | `cargo test no_such_test_at_all` |\n| c | 3 | `make demo` |\n";
    let found = markdown::specification(&File::new("SPECIFICATION.md", text), &functions);
    assert_eq!(found.iter().map(|f| f.line).collect::<Vec<_>>(), [3, 4], "{found:?}");
}

#[test]
fn the_package_has_every_program_and_unit_and_takes_only_what_is_there() {
    let metadata = edges::metadata();
    let programs = package::programs(&metadata, &edges::members(&metadata));
    assert!(programs.len() >= 4, "{programs:?}");
    let units: Vec<(String, String)> = files()
        .into_iter()
        .filter_map(|file| Some((file.path.strip_prefix("systemd/")?.to_owned(), file.text)))
        .collect();
    let assets = package::assets(&metadata);
    assert_clean(&package::check(&assets, &programs, &units, |path| root().join(path).exists()));

    let planted = [
        Asset::new("target/release/pagedd", "usr/bin/"),
        Asset::new("../systemd/pagedd.service", "usr/lib/systemd/system/"),
        Asset::new("../LICENCE", "usr/share/doc/pagedd/copyright"),
    ];
    let units = [
        (
            "pagedd.service".to_owned(),
            "ExecStart=/usr/bin/pagedd\nExecReload=-/usr/sbin/pagedctl reload".to_owned(),
        ),
        ("pagedd.socket".to_owned(), String::new()),
    ];
    let programs = ["pagedd".to_owned(), "pagedctl".to_owned()].into();
    let found = package::check(&planted.into(), &programs, &units, |path| path.starts_with("systemd/"));
    let found: Vec<&str> = found.iter().map(|finding| finding.what.as_str()).collect();
    let wanted = [
        "the package lacks the program pagedctl",
        "the package lacks systemd/pagedd.socket",
        "the package takes LICENCE, which is not there",
        "systemd/pagedd.service starts /usr/sbin/pagedctl, which the package does not install",
    ];
    assert_eq!(found, wanted);
}

/// Faults that servers of this kind had, by the numbers that tests carry; SPECIFICATION.md says what each is.
const FAULTS: [u32; 18] = [1, 3, 4, 15, 16, 17, 18, 31, 32, 34, 35, 36, 37, 41, 42, 43, 44, 45];

#[test]
fn every_known_fault_that_must_not_come_has_a_test_of_its_number() {
    let functions = source::functions(&files());
    let missing: Vec<u32> = FAULTS
        .into_iter()
        .filter(|n| !functions.iter().any(|f| f.starts_with(&format!("bug_{n}_"))))
        .collect();
    assert!(missing.is_empty(), "no test named bug_<number>_… for {missing:?}");
}
