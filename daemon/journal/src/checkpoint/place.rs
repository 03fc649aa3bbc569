//! A checkpoint's databases in the place of those of the state directory.
//!
//! **Owns** that it is done whole or not at all, also where the host dies meanwhile: they are copied beside, and from the moment that the
//! copy has its name, every start goes on with it. **Never** deletes what was there: it is kept aside.
//!
//! The caller holds the state directory's lock, and no database in it is open.

use super::draft::{SAVING, private_dir, private_file, remove_dir, sync_dir};
use super::read::{open_regular, sum};
use super::{CHECKPOINTS, CONTROL, Checkpoint, CheckpointError, JOURNAL, Problem};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Has all that is to be put in place, and where what is there goes.
const RESTORING: &str = ".restoring";
/// Becomes [`RESTORING`] once it is whole.
const PARTIAL: &str = ".restoring.partial";
/// Names the directory that what was there goes into.
const ASIDE: &str = "aside";
/// What SQLite has beside a database's file.
const SIDES: [&str; 4] = ["", "-wal", "-shm", "-journal"];

impl Checkpoint {
    /// Puts this checkpoint's databases in place; those that were there go into a directory `before-<now>`, which is returned.
    ///
    /// # Errors
    /// A file is damaged, or the file system refused before anything was touched; or it refused later, and the next start goes on.
    pub fn put_in_place(&self, state_dir: &Path, now_unix: u64) -> Result<PathBuf, CheckpointError> {
        let partial = state_dir.join(PARTIAL);
        remove_dir(&partial).and_then(|()| private_dir(&partial)).map_err(CheckpointError::io(&partial))?;
        for name in [CONTROL, JOURNAL] {
            self.copy(name, &partial.join(name))?;
        }
        let names = (0..).map(|n| match n {
            0 => format!("before-{now_unix}"),
            n => format!("before-{now_unix}-{n}"),
        });
        let aside = names.into_iter().find(|name| state_dir.join(name).symlink_metadata().is_err());
        let aside = aside.unwrap_or_default();
        let path = partial.join(ASIDE);
        private_file(&path)
            .and_then(|mut file| {
                file.write_all(aside.as_bytes())?;
                file.sync_all()
            })
            .map_err(CheckpointError::io(&path))?;
        let restoring = state_dir.join(RESTORING);
        sync_dir(&partial)
            .and_then(|()| fs::rename(&partial, &restoring))
            .and_then(|()| sync_dir(state_dir))
            .map_err(CheckpointError::io(&restoring))?;
        finish_restore(state_dir)?;
        Ok(state_dir.join(aside))
    }

    /// Copies a file, if it is still what was written.
    fn copy(&self, name: &str, to: &Path) -> Result<(), CheckpointError> {
        let from = self.file(name);
        let mut source = open_regular(&from).map_err(CheckpointError::io(&from))?;
        let mut target = private_file(to).map_err(CheckpointError::io(to))?;
        let (_, found) =
            sum(&mut source, |bytes| target.write_all(bytes)).map_err(CheckpointError::io(to))?;
        target.sync_all().map_err(CheckpointError::io(to))?;
        if self.manifest().files.iter().any(|file| file.name == name && file.sha256 == found) {
            return Ok(());
        }
        let problem = Problem { file: name.to_owned(), what: "its SHA-256 is wrong".to_owned() };
        Err(CheckpointError::Damaged { path: self.path().to_path_buf(), problem })
    }
}

/// Goes on where putting a checkpoint in place was cut off: to be called at every start, before a database is opened and anything is saved.
/// The directory that has what was there before, if there was anything to do. Parts of what was cut off earlier go: there are prompts in them.
///
/// # Errors
/// From the file system; the next call goes on.
pub fn finish_restore(state_dir: &Path) -> Result<Option<PathBuf>, CheckpointError> {
    for part in [state_dir.join(PARTIAL), state_dir.join(CHECKPOINTS).join(SAVING)] {
        remove_dir(&part).map_err(CheckpointError::io(&part))?;
    }
    let restoring = state_dir.join(RESTORING);
    let name = match fs::read_to_string(restoring.join(ASIDE)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        name => name.map_err(CheckpointError::io(&restoring))?,
    };
    let aside = state_dir.join(name);
    swap(state_dir, &restoring, &aside).map_err(CheckpointError::io(&restoring))?;
    Ok(Some(aside))
}

fn swap(state_dir: &Path, restoring: &Path, aside: &Path) -> io::Result<()> {
    private_dir(aside)?;
    for name in [CONTROL, JOURNAL] {
        let new = restoring.join(name);
        // Where it is gone, this one was put in place before.
        if !new.try_exists()? {
            continue;
        }
        for side in SIDES {
            let file = format!("{name}{side}");
            match fs::rename(state_dir.join(&file), aside.join(&file)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                Ok(()) | Err(_) => {}
            }
        }
        // The old log must not be found beside the new file, whatever the disk keeps of this.
        sync_dir(aside)?;
        sync_dir(state_dir)?;
        fs::rename(new, state_dir.join(name))?;
    }
    sync_dir(state_dir)?;
    remove_dir(restoring)?;
    sync_dir(state_dir)
}
