//! A checkpoint that is being written.
//!
//! **Owns** the order: every file synced, then the manifest, then the name. **Never** leaves anything under a checkpoint's name that is not
//! whole.

use super::read::sum;
use super::{
    CHECKPOINTS, Checkpoint, CheckpointError, FORMAT, MANIFEST, Manifest, SavedFile, SavedModel, named,
};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// What is being written has this name, which no checkpoint can have. One at a time.
pub(super) const SAVING: &str = ".saving";

/// A checkpoint that is being written. Dropped before it is [finished](Draft::finish), it leaves nothing.
#[derive(Debug)]
pub struct Draft {
    dir: PathBuf,
    target: PathBuf,
    finished: bool,
}

impl Draft {
    /// Begins the checkpoint of this name. What an earlier, cut off one has left goes; the caller sees to it that none is under way.
    ///
    /// # Errors
    /// The name is no name or taken, or the file system refused.
    pub fn begin(state_dir: &Path, name: &str) -> Result<Self, CheckpointError> {
        let target = named(state_dir, name)?;
        let checkpoints = state_dir.join(CHECKPOINTS);
        let dir = checkpoints.join(SAVING);
        private_dir(&checkpoints).map_err(CheckpointError::io(&checkpoints))?;
        if target.symlink_metadata().is_ok() {
            return Err(CheckpointError::Exists { name: name.to_owned() });
        }
        remove_dir(&dir).and_then(|()| private_dir(&dir)).map_err(CheckpointError::io(&dir))?;
        Ok(Self { dir, target, finished: false })
    }

    /// Where a file of it is to be written.
    #[must_use]
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Makes a file of it, for its owner only.
    ///
    /// # Errors
    /// From the file system.
    pub fn create(&self, name: &str) -> Result<File, CheckpointError> {
        let path = self.file(name);
        private_file(&path).map_err(CheckpointError::io(&path))
    }

    /// Syncs everything and gives it its name.
    ///
    /// # Errors
    /// From the file system; nothing is left.
    pub fn finish(
        mut self,
        pagedd: &str,
        created_unix: u64,
        models: Vec<SavedModel>,
    ) -> Result<Checkpoint, CheckpointError> {
        let files = self.files()?;
        let manifest = Manifest { format: FORMAT, pagedd: pagedd.to_owned(), created_unix, models, files };
        let path = self.file(MANIFEST);
        let mut file = self.create(MANIFEST)?;
        let text = manifest.encode().map_err(|error| CheckpointError::io(&path)(error.into()))?;
        file.write_all(&text).and_then(|()| file.sync_all()).map_err(CheckpointError::io(&path))?;
        sync_dir(&self.dir).map_err(CheckpointError::io(&self.dir))?;
        let Self { dir, target, .. } = &self;
        // A directory that came meanwhile and is not empty refuses.
        fs::rename(dir, target).map_err(CheckpointError::io(target))?;
        self.finished = true;
        if let Some(parent) = self.target.parent() {
            sync_dir(parent).map_err(CheckpointError::io(parent))?;
        }
        Ok(Checkpoint::of(self.target.clone(), manifest))
    }

    /// Every file that is there, on disk.
    fn files(&self) -> Result<Vec<SavedFile>, CheckpointError> {
        let io = CheckpointError::io;
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.dir).map_err(io(&self.dir))? {
            let entry = entry.map_err(io(&self.dir))?;
            let path = entry.path();
            let (bytes, sha256) = File::open(&path)
                .and_then(|mut file| {
                    file.sync_all()?;
                    sum(&mut file, |_| Ok(()))
                })
                .map_err(io(&path))?;
            files.push(SavedFile { name: entry.file_name().to_string_lossy().into_owned(), bytes, sha256 });
        }
        files.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(files)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.finished
            && let Err(error) = remove_dir(&self.dir)
        {
            tracing::warn!(path = %self.dir.display(), %error, "a checkpoint that was not finished stays");
        }
    }
}

/// Makes a directory for its owner only, where it is not there.
pub(super) fn private_dir(path: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o700).recursive(true).create(path)
}

/// Makes a file for its owner only.
pub(super) fn private_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

/// Removes a directory with all that is in it, if it is there.
pub(super) fn remove_dir(path: &Path) -> io::Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Names in a directory are on disk when this returns.
pub(super) fn sync_dir(path: &Path) -> io::Result<()> {
    File::open(path).and_then(|dir| dir.sync_all())
}
