//! Why a database did not do what was asked.

use pagedd_core::{RequestId, TenantId};
use rusqlite::ErrorCode;
use std::io;
use std::path::{Path, PathBuf};

/// Why saved bytes are not what was saved.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SavedError {
    /// They changed since they were written, or there are none.
    #[error("its checksum is wrong")]
    Checksum,
    /// A newer pagedd wrote them.
    #[error("it is encoded in version {found}, this pagedd knows up to {known}")]
    Version {
        /// What they say.
        found: u8,
        /// What this version knows.
        known: u8,
    },
    /// They are whole, and yet make no sense.
    #[error("it does not decode: {0}")]
    Decode(postcard::Error),
    /// Entries of the log are missing.
    #[error("its log goes on at entry {found}, {expected} was to come")]
    Hole {
        /// The next entry.
        expected: u64,
        /// What came.
        found: u64,
    },
    /// A record that may have held entries of its log was damaged.
    #[error("a record of steps was damaged that may have held its tokens")]
    Step,
}

/// Why a database did not do what was asked. Nothing has changed: every operation is one transaction.
#[derive(Debug, thiserror::Error)]
pub enum DbError {
    /// Another tenant has the name.
    #[error("there is a tenant `{name}` already")]
    DuplicateName {
        /// The name.
        name: String,
    },
    /// Another tenant has the port.
    #[error("port {port} belongs to another tenant")]
    DuplicatePort {
        /// The port.
        port: u16,
    },
    /// No tenant has the number.
    #[error("there is no {tenant}")]
    UnknownTenant {
        /// The number.
        tenant: TenantId,
    },
    /// The tenant has no key of the number.
    #[error("{tenant} has no key {key}")]
    UnknownKey {
        /// Whose key.
        tenant: TenantId,
        /// The key's number.
        key: u32,
    },
    /// Room must be made.
    #[error("no space left on the file system of {}", path.display())]
    DiskFull {
        /// The database.
        path: PathBuf,
    },
    /// Another process holds the database.
    #[error("{} is locked by another process", path.display())]
    Locked {
        /// The database.
        path: PathBuf,
    },
    /// The file is damaged: restore it from a backup.
    #[error("{} is damaged ({detail}); restore it from a backup, or move it away to begin anew", path.display())]
    Corrupt {
        /// The database.
        path: PathBuf,
        /// What SQLite says, in one line.
        detail: String,
    },
    /// The file is a database of something else.
    #[error("{} is not pagedd's; move it away", path.display())]
    Foreign {
        /// The database.
        path: PathBuf,
    },
    /// Something that is no file stands in the place of the database.
    #[error("{} is {is}, and no file; move it away", path.display())]
    NoFile {
        /// The database.
        path: PathBuf,
        /// What it is, in words.
        is: &'static str,
    },
    /// The journal's numbers of tenants and keys are those of another control.db.
    #[error(
        "{} and {} are of two installations; put the control.db back that belongs to this journal.db, or move journal.db away to begin \
         with an empty one", control.display(), journal.display()
    )]
    OtherInstallation {
        /// The database of tenants and keys.
        control: PathBuf,
        /// The database of requests.
        journal: PathBuf,
    },
    /// The journal came late, and knows numbers that may have been given again by now.
    #[error("{} has requests of tenants or keys that control.db did not know at the start; start pagedd again", path.display())]
    Ahead {
        /// The database.
        path: PathBuf,
    },
    /// A newer pagedd wrote the file.
    #[error(
        "{} has schema version {found}, this pagedd knows up to {known}; install the newer pagedd again, or restore a backup",
        path.display()
    )]
    NewerSchema {
        /// The database.
        path: PathBuf,
        /// What the file has.
        found: u32,
        /// What this version knows.
        known: u32,
    },
    /// The file or its directory cannot be written.
    #[error(
        "{} cannot be written; check the owner and mode of the state directory, and the file's attributes (lsattr)",
        path.display()
    )]
    ReadOnly {
        /// The database.
        path: PathBuf,
    },
    /// The file is not there.
    #[error("{} is missing", path.display())]
    Missing {
        /// The database.
        path: PathBuf,
    },
    /// The file system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// What is kept of one request is damaged: delete it. Other requests are not touched by that.
    #[error("{}: request {request} is damaged: {source}", path.display())]
    Damaged {
        /// The database.
        path: PathBuf,
        /// Which.
        request: RequestId,
        /// In what way.
        source: SavedError,
    },
    /// A value could not be encoded.
    #[error("{}: not encoded: {source}", path.display())]
    Encode {
        /// The database.
        path: PathBuf,
        /// Why.
        source: postcard::Error,
    },
    /// The kernel gave no random bytes.
    #[error("no random bytes from the kernel: {0}")]
    Random(getrandom::Error),
    /// SQLite refused for a reason that has no reaction of its own.
    #[error("{}: {source}", path.display())]
    Sql {
        /// The database.
        path: PathBuf,
        /// Why.
        source: rusqlite::Error,
    },
}

impl DbError {
    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Self::DiskFull { path: path.to_path_buf() }
            }
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
                Self::ReadOnly { path: path.to_path_buf() }
            }
            _ => Self::Io { path: path.to_path_buf(), source },
        }
    }

    pub(crate) fn sql(path: &Path, source: rusqlite::Error) -> Self {
        let path = path.to_path_buf();
        let Some(error) = source.sqlite_error() else {
            return Self::Sql { path, source };
        };
        // The shared-memory file beside the database is the first to meet a full disk, under a code of its own.
        if error.extended_code == rusqlite::ffi::SQLITE_IOERR_SHMSIZE {
            return Self::DiskFull { path };
        }
        match error.code {
            ErrorCode::DiskFull => Self::DiskFull { path },
            ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked => Self::Locked { path },
            ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase => {
                Self::Corrupt { path, detail: source.to_string().replace('\n', " ") }
            }
            ErrorCode::ReadOnly | ErrorCode::CannotOpen | ErrorCode::PermissionDenied => {
                Self::ReadOnly { path }
            }
            _ => Self::Sql { path, source },
        }
    }
}
