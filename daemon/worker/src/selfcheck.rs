//! `pagedd-worker selfcheck`: every GPU kernel against its CPU twin, on the GPU that is there.
//!
//! **Owns** the table and the exit code. **Never** touches a model or the daemon.

use std::process::ExitCode;

/// Exit code where a kernel gave a wrong result.
#[cfg(feature = "cuda")]
const WRONG: u8 = 1;
/// Exit code where no GPU can be used: nothing was checked.
const NO_GPU: u8 = 3;

/// Checks GPU `ordinal` and prints a table; with `only_failed`, of what failed.
#[cfg(feature = "cuda")]
pub fn run(ordinal: usize, only_failed: bool) -> ExitCode {
    use pagedd_kernels::cuda::{Device, selfcheck};

    let checked = Device::open(ordinal).and_then(|device| {
        let info = device.info();
        println!(
            "{} (compute capability {}.{}, driver for CUDA {}.{})",
            info.name,
            info.capability.0,
            info.capability.1,
            info.driver / 1000,
            info.driver % 1000 / 10
        );
        selfcheck::run(&device)
    });
    let rows = match checked {
        Ok(rows) => rows,
        Err(error) => {
            eprintln!("pagedd-worker selfcheck: {error}");
            return ExitCode::from(NO_GPU);
        }
    };
    for row in rows.iter().filter(|row| !only_failed || !row.passed()) {
        println!("{row}");
    }
    let failed = rows.iter().filter(|row| !row.passed()).count();
    println!("{} checks, {failed} failed", rows.len());
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::from(WRONG) }
}

/// Says that there is nothing to check.
#[cfg(not(feature = "cuda"))]
pub fn run(_ordinal: usize, _only_failed: bool) -> ExitCode {
    eprintln!("pagedd-worker selfcheck: this program was built without GPU support (feature cuda)");
    ExitCode::from(NO_GPU)
}
