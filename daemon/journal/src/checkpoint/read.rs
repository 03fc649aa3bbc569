//! A checkpoint that was written.
//!
//! **Owns** what is said about it. **Never** changes it: databases are opened for reading only.

use super::{CHECKPOINTS, CONTROL, CheckpointError, JOURNAL, MANIFEST, Manifest, SavedFile, hex, is_plain};
use crate::schema::{self, CONTROL_DB, JOURNAL_DB};
use crate::{DbError, Entry, JournalDb};
use rusqlite::{Connection, Row};
use sha2::{Digest as _, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Linux's `O_NONBLOCK`: the open of a pipe waits for nobody.
const O_NONBLOCK: i32 = 0o4000;
/// No manifest is longer.
const MAX_MANIFEST: u64 = 1 << 20;

/// A checkpoint whose manifest is whole and of this version. It does not tell you that its other files are.
#[derive(Clone, PartialEq, Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
}

/// What is wrong with a file of a checkpoint.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Problem {
    /// Its name in the checkpoint's directory.
    pub file: String,
    /// What is wrong.
    pub what: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.file, self.what)
    }
}

/// What is in a checkpoint.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Contents {
    /// Its tenants, by name.
    pub tenants: Vec<SavedTenant>,
    /// Requests that cannot be read any more.
    pub damaged_requests: u32,
}

/// A tenant of a checkpoint.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SavedTenant {
    /// Its number.
    pub id: u32,
    /// Its name.
    pub name: String,
    /// The model it uses.
    pub model: String,
    /// Keys that open its port.
    pub keys: u32,
    /// Requests that go on.
    pub live: u32,
    /// Prompt tokens of those.
    pub prompt_tokens: u64,
    /// Tokens that those had emitted.
    pub output_tokens: u64,
    /// Requests that had ended and were kept.
    pub ended: u32,
}

/// A port of a checkpoint.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SavedPort {
    /// Name of its tenant.
    pub tenant: String,
    /// The model that the tenant uses.
    pub model: String,
    /// The port.
    pub port: u16,
}

impl Checkpoint {
    pub(super) const fn of(path: PathBuf, manifest: Manifest) -> Self {
        Self { path, manifest }
    }

    /// Reads the manifest of the checkpoint in a directory.
    ///
    /// # Errors
    /// There is none, it is of something else or of a newer version, or its manifest is damaged.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let foreign = |problem: String| CheckpointError::Foreign { path: path.to_path_buf(), problem };
        match fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(CheckpointError::Missing { path: path.to_path_buf() });
            }
            Err(error) => return Err(CheckpointError::io(path)(error)),
            Ok(metadata) if !metadata.is_dir() => return Err(foreign("it is no directory".to_owned())),
            Ok(_) => {}
        }
        let file = path.join(MANIFEST);
        let mut text = Vec::new();
        let read = open_regular(&file).and_then(|file| file.take(MAX_MANIFEST).read_to_end(&mut text));
        match read {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(foreign(format!("it has no {MANIFEST}")));
            }
            Err(error) => return Err(CheckpointError::io(&file)(error)),
            Ok(_) => {}
        }
        let manifest = Manifest::decode(path, &text)?;
        let names = manifest.files.iter().map(|file| &file.name);
        if let Some(name) = names.into_iter().find(|name| !is_plain(name)) {
            return Err(foreign(format!("it names a file {name:?}")));
        }
        // Whatever is done with it then reads files, and not what one could wait for.
        for SavedFile { name, .. } in &manifest.files {
            if fs::metadata(path.join(name)).is_ok_and(|found| !found.is_file()) {
                let problem = Problem { file: name.clone(), what: NOT_REGULAR.to_owned() };
                return Err(CheckpointError::Damaged { path: path.to_path_buf(), problem });
            }
        }
        Ok(Self { path: path.to_path_buf(), manifest })
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The name of its directory.
    pub fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// What it is of.
    pub const fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// A file of it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Bytes of all its files but the manifest.
    pub fn bytes(&self) -> u64 {
        self.manifest.files.iter().map(|file| file.bytes).sum()
    }

    /// What can be said of its files without reading them: one that is missing, or of another size, or too many.
    pub fn glance(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let problem = |file: &str, what: String| Problem { file: file.to_owned(), what };
        for file in &self.manifest.files {
            match fs::metadata(self.file(&file.name)) {
                Ok(found) if found.len() == file.bytes => {}
                Ok(found) => problems.push(problem(
                    &file.name,
                    format!("it has {} bytes, {} were written", found.len(), file.bytes),
                )),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    problems.push(problem(&file.name, "it is missing".to_owned()));
                }
                Err(error) => problems.push(problem(&file.name, error.to_string())),
            }
        }
        let named: BTreeSet<&str> = self.manifest.files.iter().map(|file| file.name.as_str()).collect();
        let ledgers = self.manifest.models.iter().map(super::SavedModel::ledger_file);
        let kv = self.manifest.models.iter().filter(|model| model.kv).map(super::SavedModel::kv_file);
        for name in [CONTROL.to_owned(), JOURNAL.to_owned()].into_iter().chain(ledgers).chain(kv) {
            if !named.contains(name.as_str()) {
                problems.push(problem(&name, "the manifest does not name it".to_owned()));
            }
        }
        // A log beside a database would be taken for a part of it.
        let entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
        let strangers = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        for name in strangers.filter(|name| name != MANIFEST && !named.contains(name.as_str())) {
            problems.push(problem(&name, "it was not there when the checkpoint was written".to_owned()));
        }
        problems
    }

    /// Reads everything, and says what is wrong with which file: sizes, digests, the databases' own checks.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = self.glance();
        for file in &self.manifest.files {
            if problems.iter().any(|problem| problem.file == file.name) {
                continue;
            }
            let read = open_regular(&self.file(&file.name)).and_then(|mut f| sum(&mut f, |_| Ok(())));
            let what = match read {
                Ok((_, sha256)) if sha256 == file.sha256 => continue,
                Ok(_) => "its SHA-256 is wrong".to_owned(),
                Err(error) => error.to_string(),
            };
            problems.push(Problem { file: file.name.clone(), what });
        }
        for (name, kind) in [(CONTROL, CONTROL_DB), (JOURNAL, JOURNAL_DB)] {
            if problems.iter().all(|problem| problem.file != name)
                && let Err(error) = schema::open_saved(&self.file(name), kind)
            {
                problems.push(Problem { file: name.to_owned(), what: short(&error) });
            }
        }
        problems
    }

    /// A database of it, and its path.
    fn database(&self, name: &str, kind: schema::Kind) -> Result<(Connection, PathBuf), DbError> {
        let path = self.file(name);
        // SQLite says of a file that is not there that it cannot be opened, as of one that may not be.
        match fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(DbError::Missing { path }),
            Ok(_) | Err(_) => Ok((schema::open_saved(&path, kind)?, path)),
        }
    }

    /// The secret of the installation that it was made in.
    ///
    /// # Errors
    /// control.db is damaged.
    pub fn installation_secret(&self) -> Result<[u8; 32], DbError> {
        let (db, path) = self.database(CONTROL, CONTROL_DB)?;
        let query = "SELECT value FROM meta WHERE key = 'installation_secret'";
        db.query_row(query, [], |row| row.get(0)).map_err(|error| DbError::sql(&path, error))
    }

    /// The ports of its tenants.
    ///
    /// # Errors
    /// control.db is damaged.
    pub fn ports(&self) -> Result<Vec<SavedPort>, DbError> {
        let (db, path) = self.database(CONTROL, CONTROL_DB)?;
        let query = "SELECT name, model, port FROM tenants ORDER BY name";
        let port =
            |row: &Row<'_>| Ok(SavedPort { tenant: row.get(0)?, model: row.get(1)?, port: row.get(2)? });
        crate::journal::rows(&db, &path, query, [], port)
    }

    /// What is in its databases.
    ///
    /// # Errors
    /// One is damaged.
    pub fn contents(&self) -> Result<Contents, DbError> {
        let (db, path) = self.database(CONTROL, CONTROL_DB)?;
        let (journal, journal_path) = self.database(JOURNAL, JOURNAL_DB)?;
        let query = "SELECT id, name, model,
                         (SELECT count(*) FROM keys WHERE tenant = tenants.id AND revoked_unix IS NULL)
                     FROM tenants";
        let mut tenants: BTreeMap<u32, SavedTenant> = crate::journal::rows(&db, &path, query, [], tenant)?
            .into_iter()
            .map(|tenant| (tenant.id, tenant))
            .collect();
        let mut damaged_requests = 0;
        JournalDb::over_saved(journal, journal_path).replay(|found| match found {
            Ok(kept) => {
                let Some(tenant) = tenants.get_mut(&kept.admission.tenant.0) else { return };
                if kept.finished_unix.is_some() {
                    tenant.ended += 1;
                } else {
                    let tokens = kept.entries.iter().filter(|entry| matches!(entry, Entry::Token { .. }));
                    tenant.live += 1;
                    tenant.prompt_tokens += kept.admission.saved.prompt.len() as u64;
                    tenant.output_tokens += tokens.count() as u64;
                }
            }
            Err(_) => damaged_requests += 1,
        })?;
        let mut tenants: Vec<SavedTenant> = tenants.into_values().collect();
        tenants.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Contents { tenants, damaged_requests })
    }
}

/// Every checkpoint in a state directory, by name, those too that cannot be used.
///
/// # Errors
/// The folder is there and cannot be read.
pub fn list(state_dir: &Path) -> io::Result<Vec<(String, Result<Checkpoint, CheckpointError>)>> {
    let entries = match fs::read_dir(state_dir.join(CHECKPOINTS)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if is_plain(&name) {
            found.push((name, Checkpoint::open(&entry.path())));
        }
    }
    found.sort_by(|(a, _), (b, _)| a.cmp(b));
    Ok(found)
}

/// What is wrong with what is no file.
const NOT_REGULAR: &str = "it is no regular file";

/// Opens a file for reading; a pipe or a device is none.
pub(super) fn open_regular(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(O_NONBLOCK).open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, NOT_REGULAR))
}

/// Reads to the end; each part goes to `take`. Bytes, and their SHA-256.
pub(super) fn sum(
    from: &mut impl Read,
    mut take: impl FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<(u64, String)> {
    let (mut hasher, mut bytes) = (Sha256::new(), 0);
    let mut buffer = vec![0; 1 << 18];
    loop {
        let read = match from.read(&mut buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            read => read?,
        };
        if read == 0 {
            return Ok((bytes, hex(&hasher.finalize())));
        }
        bytes += read as u64;
        hasher.update(&buffer[..read]);
        take(&buffer[..read])?;
    }
}

/// What is wrong with a database, where the file is named beside it.
fn short(error: &DbError) -> String {
    match error {
        DbError::Corrupt { detail, .. } => format!("it is damaged ({detail})"),
        DbError::Foreign { .. } => "it is not pagedd's".to_owned(),
        DbError::NewerSchema { found, known, .. } => format!("schema version {known} here, {found} there"),
        other => other.to_string(),
    }
}

fn tenant(row: &Row<'_>) -> rusqlite::Result<SavedTenant> {
    Ok(SavedTenant {
        id: row.get(0)?,
        name: row.get(1)?,
        model: row.get(2)?,
        keys: row.get(3)?,
        live: 0,
        prompt_tokens: 0,
        output_tokens: 0,
        ended: 0,
    })
}
