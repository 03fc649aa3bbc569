//! With feature `cuda`: compiles `cuda/*.cu` to fatbins, which the library embeds. Without it there is nothing to do.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{self, Child, Command, ExitCode};
use std::time::SystemTime;

/// Machine code for Ampere, Ada and Hopper, and code that a driver compiles for what comes after.
const TARGETS: [&str; 4] = [
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_89,code=sm_89",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-gencode=arch=compute_80,code=compute_80",
];
/// What else decides what comes out.
const FLAGS: [&str; 6] = [
    "-O3",
    "-std=c++17",
    "--fatbin",
    "-lineinfo",
    "-Werror=all-warnings",
    // An eighth of the default's size; every driver that is new enough takes it.
    "--compress-mode=size",
];
/// Further flags that nvcc takes from its environment.
const FLAG_VARIABLES: [&str; 2] = ["NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"];
/// Compilers that run side by side.
const PARALLEL: usize = 2;
/// Fatbins by what they are made of: a program, its tests and its documentation are built apart, each with the same kernels.
const CACHE: &str = "../.cache/fatbins";
/// Fatbins that are kept of each kernel.
const KEPT: usize = 4;

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
    for variable in ["NVCC"].iter().chain(&FLAG_VARIABLES) {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("cargo gave no OUT_DIR")?);
    let nvcc = nvcc()?;
    let headers = hash_headers(&nvcc)?;
    let mut waiting = Vec::new();
    for source in sources(Path::new("cuda"))? {
        let kernel = Kernel::of(&source, &headers, &out)?;
        if fs::copy(&kernel.cached, &kernel.fatbin).is_err() {
            waiting.push(kernel);
        }
    }
    let mut waiting = waiting.into_iter();
    let mut running: Vec<(Kernel, Child)> = Vec::new();
    loop {
        while running.len() < PARALLEL
            && let Some(kernel) = waiting.next()
        {
            let child = start(&nvcc, &kernel)?;
            running.push((kernel, child));
        }
        if running.is_empty() {
            return Ok(());
        }
        let (kernel, mut child) = running.remove(0);
        let source = kernel.source.display();
        let status = child.wait().map_err(|e| format!("{source}: {e}"))?;
        if !status.success() {
            for (_, mut other) in running {
                // Its own errors are on the screen as well.
                let _ = other.wait();
            }
            return Err(format!("nvcc did not compile {source}: {status}"));
        }
        // What was changed meanwhile may have been read before or after; and where it cannot be kept, it is compiled again.
        if Kernel::of(&kernel.source, &hash_headers(&nvcc)?, &out)?.cached == kernel.cached {
            let _ = kernel.keep();
        }
    }
}

/// A source, and where its fatbin goes and is kept.
struct Kernel {
    source: PathBuf,
    fatbin: PathBuf,
    cached: PathBuf,
}

impl Kernel {
    fn of(source: &Path, headers: &DefaultHasher, out: &Path) -> Result<Self, String> {
        let mut hasher = headers.clone();
        read(source)?.hash(&mut hasher);
        let name = source.file_stem().unwrap_or_default().to_string_lossy();
        Ok(Self {
            source: source.to_owned(),
            fatbin: out.join(format!("{name}.fatbin")),
            cached: Path::new(CACHE).join(format!("{name}-{:016x}.fatbin", hasher.finish())),
        })
    }

    /// Keeps the fatbin for other builds, and no more than [`KEPT`] of this kernel.
    fn keep(&self) -> io::Result<()> {
        fs::create_dir_all(CACHE)?;
        // Nobody sees a part of it, also not after a power cut.
        let part = self.cached.with_extension(process::id().to_string());
        fs::copy(&self.fatbin, &part)?;
        fs::File::open(&part)?.sync_all()?;
        fs::rename(&part, &self.cached)?;
        let of_kernel = |path: &Path| {
            let name = path.file_stem()?.to_str()?;
            let (name, _) = name.rsplit_once('-')?;
            Some(self.source.file_stem()? == name)
        };
        let mut kept: Vec<(SystemTime, PathBuf)> = Vec::new();
        for entry in fs::read_dir(CACHE)? {
            let entry = entry?;
            if of_kernel(&entry.path()) == Some(true) {
                kept.push((entry.metadata()?.modified()?, entry.path()));
            }
        }
        kept.sort();
        for (_, oldest) in kept.iter().rev().skip(KEPT) {
            fs::remove_file(oldest)?;
        }
        Ok(())
    }
}

/// A hash of the compiler, its flags and all headers, to which that of a source is added.
fn hash_headers(nvcc: &Path) -> Result<DefaultHasher, String> {
    let version = Command::new(nvcc).arg("--version").output();
    let version = version.map_err(|e| format!("{}: {e}", nvcc.display()))?;
    let mut hasher = DefaultHasher::new();
    (FLAGS, FLAG_VARIABLES.map(env::var_os), TARGETS, version.stdout).hash(&mut hasher);
    let mut folders = vec![PathBuf::from("cuda")];
    while let Some(folder) = folders.pop() {
        for header in files(&folder, &["cuh", "h"])? {
            (read(&header)?, header).hash(&mut hasher);
        }
        folders.extend(entries(&folder)?.into_iter().filter(|path| path.is_dir()));
    }
    Ok(hasher)
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|e| format!("{}: {e}", path.display()))
}

/// The kernels: `*.cu` of a folder.
fn sources(folder: &Path) -> Result<Vec<PathBuf>, String> {
    files(folder, &["cu"])
}

/// Files of a folder with one of these extensions, in order.
fn files(folder: &Path, extensions: &[&str]) -> Result<Vec<PathBuf>, String> {
    let mut found = entries(folder)?;
    found.retain(|path| {
        path.extension().and_then(OsStr::to_str).is_some_and(|found| extensions.contains(&found))
    });
    Ok(found)
}

/// What a folder has, in order.
fn entries(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let paths = fs::read_dir(folder)
        .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>());
    let mut paths = paths.map_err(|e| format!("{}: {e}", folder.display()))?;
    paths.sort();
    Ok(paths)
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

fn start(nvcc: &Path, kernel: &Kernel) -> Result<Child, String> {
    Command::new(nvcc)
        .args(FLAGS)
        .args(TARGETS)
        .arg("-o")
        .args([&kernel.fatbin, &kernel.source])
        .spawn()
        .map_err(|e| format!("{}: {e}", nvcc.display()))
}
