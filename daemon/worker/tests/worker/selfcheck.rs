//! `pagedd-worker selfcheck`, mostly where there is nothing to check.

use std::path::Path;
use std::process::Command;

#[test]
fn selfcheck_passes_or_says_in_one_line_and_with_its_own_exit_code_that_there_is_no_gpu() {
    let output =
        Command::new(env!("CARGO_BIN_EXE_pagedd-worker")).args(["selfcheck", "--minimal"]).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    if cfg!(feature = "cuda") && Path::new("/dev/nvidia0").exists() {
        assert_eq!(output.status.code(), Some(0), "{said}{}", String::from_utf8_lossy(&output.stdout));
    } else {
        assert_eq!(output.status.code(), Some(3), "{said}");
        assert!(said.starts_with("pagedd-worker selfcheck: ") && said.lines().count() == 1, "{said}");
        assert!(output.stdout.is_empty());
    }
}
