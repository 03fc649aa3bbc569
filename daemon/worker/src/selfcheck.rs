//! `pagedd-worker selfcheck`: every GPU kernel against its CPU twin, on the GPU that is there.
//!
//! **Owns** the table and the exit code. **Never** touches a model or the daemon.

use std::process::ExitCode;

/// Exit code where a kernel gave a wrong result, or the device failed.
#[cfg(feature = "cuda")]
const WRONG: u8 = 1;
/// Exit code where no GPU can be used: nothing was checked.
const NO_GPU: u8 = 3;

/// What is checked and shown.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Options {
    /// Which of the driver's GPUs
    #[arg(long, default_value_t = 0)]
    gpu: usize,
    /// Only the smallest shapes, for compute-sanitizer
    #[arg(long)]
    minimal: bool,
    /// Print only what failed
    #[arg(long)]
    failed: bool,
}

/// Checks a GPU and prints a table.
#[cfg(feature = "cuda")]
pub fn run(options: Options) -> ExitCode {
    use pagedd_kernels::cuda::Device;
    use pagedd_kernels::cuda::selfcheck::{self, Extent};

    let device = match Device::open(options.gpu) {
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
    let extent = if options.minimal { Extent::Minimal } else { Extent::Full };
    let rows = match selfcheck::run(&device, extent) {
        Ok(rows) => rows,
        Err(error) => return fail(&error, WRONG),
    };
    for row in rows.iter().filter(|row| !options.failed || !row.passed()) {
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
pub fn run(_: Options) -> ExitCode {
    eprintln!(
        "pagedd-worker selfcheck: this program was built without GPU support; build it with `make build-gpu`"
    );
    ExitCode::from(NO_GPU)
}
