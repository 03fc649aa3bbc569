//! `pagedd-worker selfcheck`: every GPU kernel against its CPU twin, on the GPU that is there.
//!
//! **Owns** the table and the exit code. **Never** touches a model or the daemon.

use std::process::ExitCode;

/// Exit code where a kernel gave a wrong result, or the device failed.
#[cfg(feature = "cuda")]
const WRONG: u8 = 1;
/// Exit code where no GPU can be used: nothing was checked.
const NO_GPU: u8 = 3;

/// Checks GPU `ordinal` and prints a table; with `only_failed`, of what failed.
#[cfg(feature = "cuda")]
pub fn run(ordinal: usize, only_failed: bool) -> ExitCode {
    use pagedd_kernels::cuda::{Device, selfcheck};

    let device = match Device::open(ordinal) {
        Ok(device) => device,
        Err(error) => return fail(&error, NO_GPU),
    };
    let info = device.info();
    let (capability, driver) = (info.capability, info.driver);
    println!(
        "{} (compute capability {}.{}, driver for CUDA {}.{})",
        info.name,
        capability.0,
        capability.1,
        driver / 1000,
        driver % 1000 / 10
    );
    let rows = match selfcheck::run(&device) {
        Ok(rows) => rows,
        Err(error) => return fail(&error, WRONG),
    };
    for row in rows.iter().filter(|row| !only_failed || !row.passed()) {
        println!("{row}");
    }
    let failed = rows.iter().filter(|row| !row.passed()).count();
    println!("{} checks, {failed} failed", rows.len());
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::from(WRONG) }
}

#[cfg(feature = "cuda")]
fn fail(error: &pagedd_kernels::cuda::CudaError, code: u8) -> ExitCode {
    eprintln!("pagedd-worker selfcheck: {error}");
    ExitCode::from(code)
}

/// Says that there is nothing to check.
#[cfg(not(feature = "cuda"))]
pub fn run(_ordinal: usize, _only_failed: bool) -> ExitCode {
    eprintln!("pagedd-worker selfcheck: this program was built without GPU support (feature cuda)");
    ExitCode::from(NO_GPU)
}
