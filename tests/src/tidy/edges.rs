//! Which crate may depend on which: the workspace's edges, and what each process must never link.
//!
//! **Owns** the table. **Never** allows an edge that ARCHITECTURE.md does not name.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use serde_json::Value;

use super::{Finding, root};

/// Every crate and the crates of the workspace that it depends on. The tests' own crate stands outside.
pub const EDGES: [(&str, &[&str]); 16] = [
    ("pagedd-core", &[]),
    ("pagedd-kv", &["pagedd-core"]),
    ("pagedd-sched", &["pagedd-core", "pagedd-kv"]),
    ("pagedd-engine", &["pagedd-core", "pagedd-kv", "pagedd-sched"]),
    ("pagedd-wire", &["pagedd-core"]),
    ("pagedd-model", &["pagedd-core"]),
    ("pagedd-kernels", &["pagedd-core"]),
    ("pagedd-worker", &["pagedd-core", "pagedd-wire", "pagedd-model", "pagedd-kernels", "pagedd-log"]),
    ("pagedd-gateway", &["pagedd-core", "pagedd-wire", "pagedd-model", "pagedd-host", "pagedd-log"]),
    ("pagedd-journal", &["pagedd-core"]),
    ("pagedd-host", &["pagedd-core"]),
    ("pagedd-log", &[]),
    ("pagedd-config", &["pagedd-core"]),
    ("pagedd-control", &["pagedd-core"]),
    ("pagedctl", &["pagedd-control", "pagedd-config"]),
    (
        "pagedd",
        &[
            "pagedd-core",
            "pagedd-kv",
            "pagedd-sched",
            "pagedd-engine",
            "pagedd-wire",
            "pagedd-journal",
            "pagedd-host",
            "pagedd-log",
            "pagedd-config",
            "pagedd-control",
        ],
    ),
];

/// What a crate must not reach, directly or through others.
const NEVER: [(&str, &[&str]); 8] = [
    ("pagedd-core", &["serde", "tokio"]),
    ("pagedd-kv", &["serde", "tokio", "getrandom", "rustix", "nix"]),
    ("pagedd-sched", &["serde", "tokio", "getrandom", "rustix", "nix"]),
    ("pagedd-engine", &["serde", "tokio", "rusqlite"]),
    ("pagedd-worker", &["hyper", "axum", "tokio", "rusqlite"]),
    ("pagedd-gateway", &["rusqlite", "cudarc", "pagedd-kernels"]),
    ("pagedd", &["cudarc", "tokenizers", "minijinja", "axum", "pagedd-model", "pagedd-kernels"]),
    ("pagedctl", &["tokio", "hyper", "rusqlite"]),
];

/// Crates that may depend on serde itself (I7); the formats beside it are free where they carry types of those crates.
pub const SERDE: [&str; 8] = [
    "pagedd-wire",
    "pagedd-journal",
    "pagedd-control",
    "pagedd-config",
    "pagedd-gateway",
    "pagedd-model",
    "pagedctl",
    "pagedd-tests",
];

/// What a package depends on when it is built: normal and build dependencies, without those of its tests.
pub type Graph = BTreeMap<String, BTreeSet<String>>;

/// Runs `cargo metadata`.
pub fn metadata() -> Value {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--offline", "--locked", "--filter-platform"])
        .arg(format!("{}-unknown-linux-gnu", std::env::consts::ARCH))
        .current_dir(root())
        .output()
        .unwrap_or_else(|e| panic!("cargo metadata: {e}"));
    assert!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("cargo metadata: {e}"))
}

/// Packages by name, each with the names of what it depends on. Two versions of a package are one here.
pub fn graph(metadata: &Value) -> Graph {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let names: BTreeMap<String, String> =
        list(&metadata["packages"]).iter().map(|p| (text(&p["id"]), text(&p["name"]))).collect();
    let name = |id: &Value| names.get(&text(id)).cloned().unwrap_or_default();
    let mut graph = Graph::new();
    for node in list(&metadata["resolve"]["nodes"]) {
        let edges = graph.entry(name(&node["id"])).or_default();
        for dependency in list(&node["deps"]) {
            if list(&dependency["dep_kinds"]).iter().any(|k| k["kind"].as_str() != Some("dev")) {
                edges.insert(name(&dependency["pkg"]));
            }
        }
    }
    graph
}

/// Members of the workspace.
pub fn members(metadata: &Value) -> BTreeSet<String> {
    let ids = metadata["workspace_members"].as_array().cloned().unwrap_or_default();
    let packages = metadata["packages"].as_array().cloned().unwrap_or_default();
    packages
        .iter()
        .filter(|p| ids.contains(&p["id"]))
        .filter_map(|p| p["name"].as_str().map(str::to_owned))
        .collect()
}

/// Edges inside the workspace that differ from [`EDGES`], and what a process links against `NEVER` and `SERDE`.
pub fn check(graph: &Graph, members: &BTreeSet<String>) -> Vec<Finding> {
    let mut found = Vec::new();
    for member in members.iter().filter(|m| *m != "pagedd-tests") {
        let Some((_, allowed)) = EDGES.iter().find(|(name, _)| name == member) else {
            found.push(Finding::new(member, 0, "a crate that the table of edges does not name"));
            continue;
        };
        let allowed: BTreeSet<&str> = allowed.iter().copied().collect();
        let direct = graph.get(member).cloned().unwrap_or_default();
        let inside: BTreeSet<&str> =
            direct.iter().map(String::as_str).filter(|d| members.contains(*d)).collect();
        for edge in inside.difference(&allowed) {
            found.push(Finding::new(member, 0, format!("depends on {edge}, against the table of edges")));
        }
        for edge in allowed.difference(&inside) {
            found.push(Finding::new(
                member,
                0,
                format!("does not depend on {edge}, as the table of edges says"),
            ));
        }
        if direct.contains("serde") && !SERDE.contains(&member.as_str()) {
            found.push(Finding::new(member, 0, "depends on serde (I7)"));
        }
    }
    for (name, never) in NEVER {
        let reached = reach(graph, name);
        for banned in never.iter().filter(|b| reached.contains(**b)) {
            found.push(Finding::new(name, 0, format!("links {banned}")));
        }
    }
    for (name, _) in EDGES.iter().filter(|(name, _)| !members.contains(*name)) {
        found.push(Finding::new(*name, 0, "is no member of the workspace"));
    }
    found
}

fn reach(graph: &Graph, from: &str) -> BTreeSet<String> {
    let mut reached = BTreeSet::new();
    let mut open = vec![from.to_owned()];
    while let Some(package) = open.pop() {
        for next in graph.get(&package).into_iter().flatten() {
            if reached.insert(next.clone()) {
                open.push(next.clone());
            }
        }
    }
    reached
}
