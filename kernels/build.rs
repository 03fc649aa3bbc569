//! With feature `cuda`: compiles `cuda/*.cu` to fatbins, which the library embeds. Without it there is nothing to do.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode};

/// Machine code for Ampere, Ada and Hopper, and code that a driver compiles for what comes after.
const TARGETS: [&str; 4] = [
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_89,code=sm_89",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-gencode=arch=compute_80,code=compute_80",
];
/// Compilers that run side by side.
const PARALLEL: usize = 2;

fn main() -> ExitCode {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return ExitCode::SUCCESS;
    }
    match compile_all() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("cargo::error={error}");
            ExitCode::FAILURE
        }
    }
}

fn compile_all() -> Result<(), String> {
    println!("cargo::rerun-if-changed=cuda");
    println!("cargo::rerun-if-env-changed=NVCC");
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo gave no OUT_DIR")?);
    let nvcc = nvcc()?;
    let mut waiting = sources(Path::new("cuda"))?.into_iter();
    let mut running: Vec<(PathBuf, Child)> = Vec::new();
    loop {
        while running.len() < PARALLEL
            && let Some(source) = waiting.next()
        {
            running.push((source.clone(), start(&nvcc, &source, &out)?));
        }
        if running.is_empty() {
            return Ok(());
        }
        let (source, mut child) = running.remove(0);
        let status = child.wait().map_err(|e| format!("{}: {e}", source.display()))?;
        if !status.success() {
            for (_, mut other) in running {
                // Its own errors are on the screen as well.
                let _ = other.wait();
            }
            return Err(format!("nvcc did not compile {}: {status}", source.display()));
        }
    }
}

/// The kernels: `*.cu` of a folder.
fn sources(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let failed = |e| format!("{}: {e}", folder.display());
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension() == Some(OsStr::new("cu")) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

/// The compiler: `$NVCC`, what `make cuda-toolchain` fetched, or the one on the path.
fn nvcc() -> Result<PathBuf, String> {
    if let Some(named) = env::var_os("NVCC") {
        return Ok(named.into());
    }
    let manifest =
        PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").ok_or("cargo gave no CARGO_MANIFEST_DIR")?);
    let fetched = manifest.join("../.cache/cuda/nvidia/cu13/bin/nvcc");
    println!("cargo::rerun-if-changed={}", fetched.display());
    if fetched.exists() {
        return Ok(fetched);
    }
    let on_path = env::var_os("PATH").and_then(|path| {
        env::split_paths(&path).map(|folder| folder.join("nvcc")).find(|nvcc| nvcc.exists())
    });
    on_path.ok_or_else(|| {
        "feature cuda needs nvcc 13.0: run `make cuda-toolchain` (no root, no GPU), or put a CUDA toolkit's nvcc on the path"
            .to_owned()
    })
}

fn start(nvcc: &Path, source: &Path, out: &Path) -> Result<Child, String> {
    let name = source.file_stem().unwrap_or_default();
    let fatbin = out.join(name).with_extension("fatbin");
    Command::new(nvcc)
        .args(["-O3", "-std=c++17", "--fatbin", "-lineinfo", "-Werror=all-warnings"])
        // An eighth of the default's size; every driver that is new enough takes it.
        .arg("--compress-mode=size")
        .args(TARGETS)
        .arg("-o")
        .arg(fatbin)
        .arg(source)
        .spawn()
        .map_err(|e| format!("{}: {e}", nvcc.display()))
}
