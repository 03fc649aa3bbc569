//! Rules about documents.
//!
//! **Owns** what a link and a row of a specification are. **Never** asks the network.

use std::path::{Component, Path, PathBuf};

use super::{File, Finding};

/// Links to files that are not there, and to headings that their file does not have.
///
/// `exists` tells whether a path of the repository, a file or a folder, is there.
pub fn links(files: &[File], exists: impl Fn(&str) -> bool) -> Vec<Finding> {
    let mut found = Vec::new();
    for file in files.iter().filter(|f| f.extension() == "md") {
        for (line, target) in
            prose(&file.text).flat_map(|(n, l)| targets(&l).into_iter().map(move |t| (n, t)))
        {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (path, anchor) =
                target.split_once('#').map_or((target.as_str(), None), |(p, a)| (p, Some(a)));
            let full = if path.is_empty() { file.path.clone() } else { resolve(&file.path, path) };
            if !exists(&full) {
                found.push(Finding::new(&file.path, line, format!("links to {target}, which is not there")));
            } else if let (Some(anchor), Some(other)) = (anchor, files.iter().find(|f| f.path == full))
                && !headings(&other.text).contains(&anchor.to_owned())
            {
                found.push(Finding::new(
                    &file.path,
                    line,
                    format!("links to {target}, which has no such heading"),
                ));
            }
        }
    }
    found
}

/// Lines outside of fenced code, with their numbers from 1.
fn prose(text: &str) -> impl Iterator<Item = (usize, String)> {
    let mut fenced = false;
    let lines: Vec<(usize, String)> = text
        .lines()
        .enumerate()
        .filter_map(|(i, line)| {
            let fence = line.trim_start().starts_with("```");
            fenced ^= fence;
            (!fenced && !fence).then(|| (i + 1, line.to_owned()))
        })
        .collect();
    lines.into_iter()
}

/// Targets of `[text](target)` outside of code spans.
fn targets(line: &str) -> Vec<String> {
    let plain: String = line.split('`').step_by(2).collect::<Vec<_>>().join("code");
    plain
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next())
        .map(|target| target.split_whitespace().next().unwrap_or("").to_owned())
        .collect()
}

fn resolve(from: &str, target: &str) -> String {
    let mut path = Path::new(from).parent().unwrap_or(Path::new("")).to_path_buf();
    for part in Path::new(target).components() {
        match part {
            Component::ParentDir => {
                path.pop();
            }
            Component::Normal(name) => path.push(name),
            Component::RootDir => path = PathBuf::new(),
            Component::CurDir | Component::Prefix(_) => {}
        }
    }
    path.to_string_lossy().into_owned()
}

/// Headings as anchors: lower case, blanks as `-`, other marks left out.
fn headings(text: &str) -> Vec<String> {
    prose(text)
        .filter(|(_, line)| line.starts_with('#'))
        .map(|(_, line)| {
            let title = line.trim_start_matches('#').trim().to_lowercase();
            title
                .chars()
                .filter(|c| c.is_alphanumeric() || " -_".contains(*c))
                .collect::<String>()
                .replace(' ', "-")
        })
        .collect()
}

/// Rows of the specification that name no command, and named tests that no file has.
///
/// Each table has a last column of commands: `make …`, `cargo …` or a script, in code marks. A test named by a command, as
/// its last word with an underscore, exists.
pub fn specification(file: &File, functions: &[String]) -> Vec<Finding> {
    let mut found = Vec::new();
    let rows: Vec<(usize, String)> = prose(&file.text).filter(|(_, l)| l.starts_with('|')).collect();
    for (i, (line, row)) in rows.iter().enumerate() {
        let cells: Vec<&str> = row.trim().trim_matches('|').split('|').map(str::trim).collect();
        let is_rule =
            |cells: &[&str]| cells.iter().all(|c| !c.is_empty() && c.chars().all(|c| "-: ".contains(c)));
        let is_head = rows.get(i + 1).is_some_and(|(n, next)| {
            *n == line + 1
                && is_rule(&next.trim().trim_matches('|').split('|').map(str::trim).collect::<Vec<_>>())
        });
        if is_head || is_rule(&cells) {
            continue;
        }
        let commands: Vec<&str> = cells.last().unwrap_or(&"").split('`').skip(1).step_by(2).collect();
        let runs =
            |c: &&&str| ["make ", "cargo ", "scripts/", "bash "].iter().any(|start| c.starts_with(start));
        if commands.is_empty() || commands.iter().filter(runs).count() != commands.len() {
            found.push(Finding::new(&file.path, *line, "the row's last cell names no command"));
        }
        for test in commands.iter().flat_map(|c| c.split_whitespace().skip(2)).filter(|w| is_test_name(w)) {
            if !functions.iter().any(|f| f.contains(test)) {
                found.push(Finding::new(&file.path, *line, format!("no test is named like {test}")));
            }
        }
    }
    if rows.is_empty() {
        found.push(Finding::new(&file.path, 0, "has no table"));
    }
    found
}

fn is_test_name(word: &str) -> bool {
    word.matches('_').count() >= 2
        && word.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}
