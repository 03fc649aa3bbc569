//! Rules that the compiler does not check, as functions over data: each returns what it found, so that a planted fault can
//! prove that it is found.
//!
//! **Owns** the rules. **Never** changes a file.

pub mod edges;
pub mod markdown;
pub mod package;
pub mod source;
pub mod tokens;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// What a rule found, where.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Finding {
    /// File, or crate.
    pub place: String,
    /// Line, from 1; 0 for the whole.
    pub line: usize,
    /// What is wrong.
    pub what: String,
}

impl Finding {
    /// A finding at a line of a file.
    pub fn new(place: impl Into<String>, line: usize, what: impl Into<String>) -> Self {
        Self { place: place.into(), line, what: what.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.place, self.line, self.what)
    }
}

/// Panics with one line per finding.
#[track_caller]
pub fn assert_clean(findings: &[Finding]) {
    let lines: Vec<String> = findings.iter().map(|f| format!("  {f}\n")).collect();
    assert!(findings.is_empty(), "{} finding(s):\n{}", findings.len(), lines.concat());
}

/// A text file of the repository.
#[derive(Clone, Debug)]
pub struct File {
    /// Path from the repository's root, with `/`.
    pub path: String,
    /// Its text.
    pub text: String,
}

impl File {
    /// A file as data, for tests of the rules.
    pub fn new(path: &str, text: &str) -> Self {
        Self { path: path.to_owned(), text: text.to_owned() }
    }

    /// Its extension.
    pub fn extension(&self) -> &str {
        Path::new(&self.path).extension().and_then(|e| e.to_str()).unwrap_or("")
    }
}

/// The repository's root.
pub fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().unwrap_or(here).to_path_buf()
}

/// Every text file of the repository; what is built or fetched is left out.
pub fn files() -> Vec<File> {
    let root = root();
    let mut found = Vec::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        for entry in entries.map(|e| e.unwrap_or_else(|e| panic!("{}: {e}", folder.display()))) {
            let path = entry.path();
            let name = entry.file_name();
            let at_root = folder == root;
            if path.is_dir() {
                let generated = [
                    ".git",
                    ".gl",
                    ".cache",
                    "target",
                    "build",
                    "shared",
                    "proptest-regressions",
                    "__pycache__",
                ];
                if !(generated.iter().any(|g| name == *g)
                    && (at_root || name == "proptest-regressions" || name == "__pycache__"))
                {
                    folders.push(path);
                }
            } else if let Ok(text) = fs::read_to_string(&path) {
                let relative = path.strip_prefix(&root).unwrap_or(&path).to_string_lossy().into_owned();
                found.push(File { path: relative, text });
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}
