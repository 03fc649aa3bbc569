//! Rules about source text.
//!
//! **Owns** the lists of words and places. **Never** looks into comments or literals where a rule is about code.

use super::tokens::{std_modules, tokens};
use super::{File, Finding};

/// Longest source file, in lines.
pub const MAX_LINES: usize = 800;

/// Words that bring a clock, a lock, a thread, a task, I/O or chance.
const IMPURE_WORDS: [&str; 16] = [
    "Instant",
    "SystemTime",
    "UNIX_EPOCH",
    "Mutex",
    "RwLock",
    "Condvar",
    "Once",
    "OnceLock",
    "LazyLock",
    "thread_local",
    "tokio",
    "async",
    "await",
    "getrandom",
    "rand",
    "mpsc",
];

/// Modules of the standard library that do.
const IMPURE_MODULES: [&str; 9] = ["time", "thread", "fs", "net", "io", "env", "process", "sync", "os"];

/// Folders whose crates read no clock, lock nothing and touch no I/O (I1).
const PURE: [&str; 2] = ["daemon/kv/src/", "daemon/sched/src/"];

/// Where `unsafe` may stand. The last is a test: SQLite takes a file system, here one that records, by pointer only.
const UNSAFE: [&str; 4] =
    ["kernels/", "daemon/worker/src/arena", "daemon/host/", "daemon/journal/tests/power/"];

/// Folders whose code may name serde (I7).
const SERDE: [&str; 8] = [
    "daemon/wire/",
    "daemon/journal/",
    "daemon/control/",
    "daemon/config/",
    "daemon/gateway/",
    "daemon/model/",
    "ctl/",
    "tests/",
];

/// Whether a file is code of the project, and no test beside it.
fn is_product(file: &File) -> bool {
    file.extension() == "rs" && !file.path.ends_with("/tests.rs") && !file.path.contains("/tests/")
}

fn is_rust(file: &File) -> bool {
    file.extension() == "rs"
}

/// I1: kv and sched never read a clock, lock, spawn, await or touch I/O.
pub fn impure(files: &[File]) -> Vec<Finding> {
    let mut found = Vec::new();
    for file in files.iter().filter(|f| is_product(f) && PURE.iter().any(|p| f.path.starts_with(p))) {
        let tokens = tokens(&file.text);
        for token in
            tokens.iter().filter(|t| IMPURE_WORDS.contains(&t.text.as_str()) || t.text.starts_with("Atomic"))
        {
            found.push(Finding::new(&file.path, token.line, format!("names `{}` (I1)", token.text)));
        }
        for module in std_modules(&tokens).iter().filter(|t| IMPURE_MODULES.contains(&t.text.as_str())) {
            found.push(Finding::new(&file.path, module.line, format!("names `std::{}` (I1)", module.text)));
        }
    }
    found
}

/// I7: serde only where bytes are made and read.
pub fn serde(files: &[File]) -> Vec<Finding> {
    let mut found = Vec::new();
    for file in files.iter().filter(|f| is_rust(f) && !SERDE.iter().any(|p| f.path.starts_with(p))) {
        for token in tokens(&file.text)
            .iter()
            .filter(|t| ["serde", "Serialize", "Deserialize"].contains(&t.text.as_str()))
        {
            found.push(Finding::new(&file.path, token.line, format!("names `{}` (I7)", token.text)));
        }
    }
    found
}

/// `unsafe`, or leave for it, outside the places that may have it.
pub fn unsafe_code(files: &[File]) -> Vec<Finding> {
    let mut found = Vec::new();
    for file in files.iter().filter(|f| is_rust(f) && !UNSAFE.iter().any(|p| f.path.starts_with(p))) {
        let tokens = tokens(&file.text);
        for (i, token) in tokens.iter().enumerate() {
            let leave = token.text == "unsafe_code"
                && i >= 2
                && ["allow", "expect", "warn"].contains(&tokens[i - 2].text.as_str());
            // The name of a lint group in another attribute is no leave.
            if token.text == "unsafe" || leave {
                found.push(Finding::new(
                    &file.path,
                    token.line,
                    format!("`{}` outside {}", token.text, UNSAFE.join(", ")),
                ));
            }
        }
    }
    found
}

/// Files that are too long to be read in one go.
pub fn too_long(files: &[File]) -> Vec<Finding> {
    files
        .iter()
        .filter(|f| ["rs", "sh", "py", "cu", "cuh", "h"].contains(&f.extension()))
        .map(|f| (f, f.text.lines().count()))
        .filter(|(_, lines)| *lines > MAX_LINES)
        .map(|(f, lines)| Finding::new(&f.path, lines, format!("{lines} lines, {MAX_LINES} at most")))
        .collect()
}

/// What is left over from writing: notes to oneself, holes, tests that do not run.
pub fn left_over(files: &[File]) -> Vec<Finding> {
    // Put together, so that this list does not find itself.
    let marks = [
        concat!("TO", "DO"),
        concat!("FIX", "ME"),
        concat!("XX", "X:"),
        concat!("HA", "CK"),
        concat!("to", "do!("),
        concat!("unimple", "mented!("),
        concat!("db", "g!("),
        concat!("#[ig", "nore"),
        concat!("(to be ", "written)"),
    ];
    find_text(
        files,
        |f| ["rs", "sh", "py", "md", "toml", "yaml", "yml"].contains(&f.extension()),
        &marks,
        "is left over",
    )
}

/// Addresses of package registries, and paths of one machine.
pub fn foreign(files: &[File]) -> Vec<Finding> {
    let hosts = [
        concat!("crates", ".io"),
        concat!("pypi", ".org"),
        concat!("python", "hosted.org"),
        concat!("npm", "js.org"),
        concat!("debian", ".org"),
    ];
    let place = |f: &File| f.path != "Cargo.lock" && f.path != "LICENSE" && f.extension() != "json";
    let mut found = find_text(files, place, &hosts, "names a registry's host");
    let paths = [concat!("/ro", "ot/"), concat!("/wo", "rk/"), concat!("/ho", "me/")];
    for file in files.iter().filter(|f| place(f)) {
        for (i, line) in file.text.lines().enumerate() {
            for path in paths {
                for (at, _) in line.match_indices(path) {
                    // `target/work/` or `~/work/` is no absolute path.
                    let before = line[..at].chars().next_back();
                    if before.is_none_or(|c| !(c.is_alphanumeric() || "._~-}$*/".contains(c))) {
                        found.push(Finding::new(
                            &file.path,
                            i + 1,
                            format!("`{path}` is a path of one machine"),
                        ));
                    }
                }
            }
        }
    }
    found
}

fn find_text(files: &[File], place: impl Fn(&File) -> bool, marks: &[&str], what: &str) -> Vec<Finding> {
    let mut found = Vec::new();
    for file in files.iter().filter(|f| place(f)) {
        for (i, line) in file.text.lines().enumerate() {
            for mark in marks.iter().filter(|m| line.contains(**m)) {
                found.push(Finding::new(&file.path, i + 1, format!("`{mark}` {what}")));
            }
        }
    }
    found
}

/// Every crate opens with what it owns and what it never does.
pub fn openings(files: &[File]) -> Vec<Finding> {
    let there = |path: &str| files.iter().any(|f| f.path == path);
    // A binary beside a library only starts it.
    let is_root = |f: &File| match f.path.rsplit_once("/src/") {
        Some((folder, "lib.rs")) => there(&format!("{folder}/Cargo.toml")),
        Some((folder, "main.rs")) => {
            there(&format!("{folder}/Cargo.toml")) && !there(&format!("{folder}/src/lib.rs"))
        }
        _ => false,
    };
    let mut found = Vec::new();
    for file in files.iter().filter(|f| is_root(f)) {
        let docs: Vec<&str> = file.text.lines().take_while(|l| l.starts_with("//!")).collect();
        let docs = docs.join(" ").to_lowercase();
        for word in ["own", "never"] {
            if !docs.contains(word) {
                found.push(Finding::new(
                    &file.path,
                    1,
                    format!("the opening `//!` has no word of what the crate `{word}`s"),
                ));
            }
        }
    }
    found
}

/// A nested clippy.toml replaces the root's: each repeats its bans, and kv and sched have one that bans clocks and threads.
pub fn clippy_files(files: &[File]) -> Vec<Finding> {
    let paths = |text: &str| -> Vec<String> {
        let quoted = text.split("path = \"").skip(1);
        quoted.filter_map(|rest| rest.split('"').next().map(str::to_owned)).collect()
    };
    let mut found = Vec::new();
    let Some(root) = files.iter().find(|f| f.path == "clippy.toml") else {
        return vec![Finding::new("clippy.toml", 0, "is missing")];
    };
    for file in files.iter().filter(|f| f.path.ends_with("/clippy.toml")) {
        let own = paths(&file.text);
        for ban in paths(&root.text).iter().filter(|b| !own.contains(b)) {
            found.push(Finding::new(&file.path, 0, format!("does not repeat the root's ban of {ban}")));
        }
    }
    for folder in ["daemon/kv", "daemon/sched"] {
        let path = format!("{folder}/clippy.toml");
        let bans = files.iter().find(|f| f.path == path).map(|f| paths(&f.text)).unwrap_or_default();
        for ban in ["std::time::Instant", "std::time::SystemTime", "std::thread"] {
            if !bans.iter().any(|b| b.starts_with(ban)) {
                found.push(Finding::new(&path, 0, format!("does not ban {ban}")));
            }
        }
    }
    found
}

/// Names of all functions in Rust files, as they are written.
pub fn functions(files: &[File]) -> Vec<String> {
    let mut found = Vec::new();
    for file in files.iter().filter(|f| is_rust(f)) {
        let tokens = tokens(&file.text);
        found.extend(
            tokens.windows(2).filter(|w| w[0].text == "fn" && w[1].is_word()).map(|w| w[1].text.clone()),
        );
    }
    found
}
