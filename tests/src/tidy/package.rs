//! Rules about the Debian package, as far as they can be read off the manifest: what it takes is there, and nothing is forgotten.
//!
//! **Owns** what belongs into a package. **Never** builds one: `make deb` does, and checks what came out.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;

use super::Finding;

/// Where the package is described.
const MANIFEST: &str = "daemon/Cargo.toml";

/// A file of the package: where it comes from, from the manifest's folder or cargo's, and where it goes.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Asset {
    /// As written.
    pub source: String,
    /// A path, or a folder that ends in `/`.
    pub target: String,
}

impl Asset {
    /// A line of the manifest.
    pub fn new(source: &str, target: &str) -> Self {
        Self { source: source.to_owned(), target: target.to_owned() }
    }

    /// Its path once installed, without the first `/`.
    fn installed(&self) -> String {
        let name = Path::new(&self.source).file_name().unwrap_or_default().to_string_lossy();
        if self.target.ends_with('/') { format!("{}{name}", self.target) } else { self.target.clone() }
    }
}

/// What the manifest lists, of `cargo metadata`.
pub fn assets(metadata: &Value) -> BTreeSet<Asset> {
    let packages = metadata["packages"].as_array().into_iter().flatten();
    packages
        .filter_map(|package| package["metadata"]["deb"]["assets"].as_array())
        .flatten()
        .filter_map(|asset| Some(Asset::new(asset[0].as_str()?, asset[1].as_str()?)))
        .collect()
}

/// Names of the workspace's programs, of `cargo metadata`.
pub fn programs(metadata: &Value, members: &BTreeSet<String>) -> BTreeSet<String> {
    let packages = metadata["packages"].as_array().into_iter().flatten();
    packages
        .filter(|package| package["name"].as_str().is_some_and(|name| members.contains(name)))
        .flat_map(|package| package["targets"].as_array().into_iter().flatten())
        .filter(|target| {
            target["kind"].as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind == "bin"))
        })
        .filter_map(|target| target["name"].as_str().map(str::to_owned))
        .collect()
}

/// Programs and units that the package lacks, files that it names and that are not there, and programs that units start and nobody installs.
///
/// `units` are the files of systemd/, by name and text; `exists` tells whether a path of the repository is there.
pub fn check(
    assets: &BTreeSet<Asset>,
    programs: &BTreeSet<String>,
    units: &[(String, String)],
    exists: impl Fn(&str) -> bool,
) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut say = |what: String| found.push(Finding::new(MANIFEST, 0, what));
    let sources: BTreeSet<&str> = assets.iter().map(|asset| asset.source.as_str()).collect();
    for program in
        programs.iter().filter(|program| !sources.contains(format!("target/release/{program}").as_str()))
    {
        say(format!("the package lacks the program {program}"));
    }
    for (unit, _) in units.iter().filter(|(unit, _)| !sources.contains(format!("../systemd/{unit}").as_str()))
    {
        say(format!("the package lacks systemd/{unit}"));
    }
    for source in sources.iter().filter_map(|source| source.strip_prefix("../")).filter(|path| !exists(path))
    {
        say(format!("the package takes {source}, which is not there"));
    }
    let installed: BTreeSet<String> = assets.iter().map(Asset::installed).collect();
    for (unit, text) in units {
        let started =
            text.lines().filter(|line| line.starts_with("Exec")).filter_map(|line| line.split('=').nth(1));
        for program in started.filter_map(|command| command.split_whitespace().next()) {
            let path = program.trim_start_matches(['-', '@', ':', '+', '!', '|', '/']);
            if path.contains("/paged") && !installed.contains(path) {
                say(format!("systemd/{unit} starts /{path}, which the package does not install"));
            }
        }
    }
    found
}
