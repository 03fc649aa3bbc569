//! Fail points of test builds: which of them are on in this process.
//!
//! **Owns** the number of this start. **Never** stands in a release: see `fail`.

use std::env;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};

use fail::FailScenario;

/// Beside those of `FAILPOINTS`, which are on in every daemon, this names a file whose line `n` says which are on in the `n`th that starts.
const BY_START: &str = "FAILPOINTS_BY_START";

/// Turns them on, until the value goes.
pub fn set_up() -> FailScenario<'static> {
    let scenario = FailScenario::setup();
    for (name, actions) in of_this_start().unwrap_or_default() {
        if let Err(error) = fail::cfg(name, &actions) {
            tracing::error!(error, "a fail point stays off");
        }
    }
    scenario
}

fn of_this_start() -> io::Result<Vec<(String, String)>> {
    let Ok(path) = env::var(BY_START) else { return Ok(Vec::new()) };
    let mut starts = OpenOptions::new().create(true).append(true).open(format!("{path}.starts"))?;
    starts.write_all(b"+")?;
    let earlier = starts.metadata()?.len() as usize - 1;
    let text = fs::read_to_string(path)?;
    let points = text.lines().nth(earlier).unwrap_or_default().split(';');
    Ok(points.filter_map(|point| point.split_once('=')).map(|(n, a)| (n.to_owned(), a.to_owned())).collect())
}
