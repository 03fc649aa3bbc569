//! Bounded reads at an offset. No read passes the length that the file had when it was opened.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::error::{Fault, ModelError};

/// A regular file and its length at opening.
#[derive(Debug)]
pub(crate) struct SourceFile {
    pub path: PathBuf,
    pub len: u64,
    file: File,
}

impl SourceFile {
    pub(crate) fn open(path: &Path) -> Result<Self, ModelError> {
        let io = |source| ModelError::Io { path: path.to_owned(), source };
        // Looked at before opening: opening a pipe would wait for its writer.
        if !std::fs::metadata(path).map_err(io)?.is_file() {
            return Err(Fault::unsupported("model", "not a regular file").at(path));
        }
        let file = File::open(path).map_err(io)?;
        let len = file.metadata().map_err(io)?.len();
        Ok(Self { path: path.to_owned(), len, file })
    }

    /// Fills `dst` from `offset`. `item` names what is read, for the error.
    pub(crate) fn read_at(&self, offset: u64, dst: &mut [u8], item: &str) -> Result<(), Fault> {
        if offset.checked_add(dst.len() as u64).is_none_or(|end| end > self.len) {
            return Err(Fault::malformed(
                item,
                format_args!("goes past the end of the file ({} bytes)", self.len),
            ));
        }
        self.file.read_exact_at(dst, offset).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => {
                Fault::malformed(item, "the file became shorter while it was read")
            }
            _ => Fault::Io(e),
        })
    }

    /// The bytes `[offset, offset + len)`, allocated only where the file has them.
    pub(crate) fn bytes_at(&self, offset: u64, len: u64, item: &str) -> Result<Vec<u8>, Fault> {
        if offset.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(Fault::malformed(
                item,
                format_args!("goes past the end of the file ({} bytes)", self.len),
            ));
        }
        let mut bytes = vec![0; len as usize];
        self.read_at(offset, &mut bytes, item)?;
        Ok(bytes)
    }
}

/// The whole text of a small file; `None` where there is none of that name.
pub(crate) fn read_small(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, ModelError> {
    let io = |source| ModelError::Io { path: path.to_owned(), source };
    let metadata = match std::fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(io(e)),
    };
    if !metadata.is_file() {
        return Err(Fault::unsupported("file", "not a regular file").at(path));
    }
    if metadata.len() > limit {
        let problem = format!("{} bytes, at most {limit} are read", metadata.len());
        return Err(Fault::unsupported("file", problem).at(path));
    }
    let mut bytes = Vec::new();
    File::open(path).and_then(|f| f.take(limit + 1).read_to_end(&mut bytes)).map_err(io)?;
    Ok(Some(bytes))
}
