//! Where the programs of one installation lie.

use std::path::{Path, PathBuf};

/// Folders, best first, in which `pagedd-worker` and `pagedd-gateway` may be that belong to the program `own`: beside it, as a build leaves them, and
/// `lib/pagedd` and `libexec/pagedd` beside its folder, as packages have them.
#[must_use]
pub fn program_folders(own: &Path) -> Vec<PathBuf> {
    let Some(folder) = own.parent() else { return Vec::new() };
    let prefix = folder.parent().unwrap_or(folder);
    vec![folder.to_owned(), prefix.join("lib/pagedd"), prefix.join("libexec/pagedd")]
}

/// The first of [`program_folders`] that has every one of `programs`: those of one installation belong together.
///
/// # Errors
/// None has; where was looked.
pub fn program_folder(own: &Path, programs: &[&str]) -> Result<PathBuf, Vec<PathBuf>> {
    let folders = program_folders(own);
    let whole = |folder: &&PathBuf| programs.iter().all(|program| folder.join(program).is_file());
    match folders.iter().find(whole) {
        Some(folder) => Ok(folder.clone()),
        None => Err(folders),
    }
}
