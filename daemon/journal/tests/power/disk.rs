//! A disk in memory that remembers every write, and can lose power.
//!
//! **Owns** a VFS of SQLite, as a crate's safe traits, which all databases of this process use. **Never** orders unsynced
//! writes: what survives a cut beside what was synced is chosen sector by sector.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use rsqlite_vfs::{
    AccessMode, DeviceCharacteristics, LockLevel, OpenOptions, OpenRequest, OpenedFile, OsCallback,
    SQLiteIoMethods, SQLiteVfs, SyncOptions, VfsError, VfsErrorCode, VfsFile, VfsResult, VfsStore,
    register_vfs,
};

/// What is written as a whole or not at all.
const SECTOR: usize = 512;

/// Files by name.
pub type Files = BTreeMap<String, Vec<u8>>;

/// What was done to a file.
#[derive(Clone, Debug)]
pub struct Op {
    pub file: String,
    pub what: What,
}

#[derive(Clone, Debug)]
pub enum What {
    Write { offset: usize, data: Vec<u8> },
    Truncate(usize),
    Sync,
    Delete,
}

/// What of the unsynced writes a cut leaves.
#[derive(Clone, Copy, Debug)]
pub enum Cut {
    /// All in order, and of the last one some sectors.
    TornLast,
    /// Of each one some sectors.
    Scrambled,
}

#[derive(Default)]
struct State {
    files: Files,
    /// The directories whose files are recorded, and what was done to them.
    recorded: BTreeMap<String, Vec<Op>>,
    /// Directories on a disk of so many bytes.
    room: BTreeMap<String, usize>,
    /// Directories on a disk that does not sync.
    broken: BTreeSet<String>,
}

/// The disk of this process.
#[derive(Clone, Default)]
pub struct Disk(Arc<Mutex<State>>);

impl Disk {
    /// The one disk there is; every database that is opened from here on is on it.
    pub fn get() -> &'static Self {
        static DISK: OnceLock<Disk> = OnceLock::new();
        DISK.get_or_init(|| {
            let disk = Self::default();
            // SAFETY: `Io` and `Vfs` leave constructor, method table and file layout to the crate's own, and name the same store,
            // whose data (`Disk`) is one lock that any thread may take. `get_or_init` makes this the only registration of the
            // name, and it is never undone.
            let registered = unsafe { register_vfs::<Io, Vfs>("power", disk.clone(), true) };
            registered.expect("a new name").into_raw();
            disk
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no test panics while it holds the lock")
    }

    /// Records what is done to the files of a directory from here on.
    pub fn record(&self, directory: &str) {
        self.state().recorded.insert(directory.to_owned(), Vec::new());
    }

    /// What was done so far.
    pub fn recorded(&self, directory: &str) -> Vec<Op> {
        self.state().recorded[directory].clone()
    }

    pub fn operations(&self, directory: &str) -> usize {
        self.state().recorded[directory].len()
    }

    /// Leaves a directory so many bytes for its files, `None` as many as it likes.
    pub fn limit(&self, directory: &str, room: Option<usize>) {
        let mut state = self.state();
        match room {
            Some(room) => drop(state.room.insert(directory.to_owned(), room)),
            None => drop(state.room.remove(directory)),
        }
    }

    /// Bytes of a directory's files.
    pub fn size(&self, directory: &str) -> usize {
        size(&self.state().files, directory)
    }

    /// Syncs of a directory's files fail, or do so no more.
    pub fn break_syncs(&self, directory: &str, broken: bool) {
        let mut state = self.state();
        if broken {
            state.broken.insert(directory.to_owned());
        } else {
            state.broken.remove(directory);
        }
    }

    /// A directory's files.
    pub fn files(&self, directory: &str) -> Files {
        let state = self.state();
        let files = state.files.iter().filter(|(path, _)| directory_of(path) == directory);
        files.map(|(path, data)| (path[directory.len() + 1..].to_owned(), data.clone())).collect()
    }

    /// Makes a directory's files these.
    pub fn set(&self, directory: &str, files: Files) {
        let mut state = self.state();
        state.files.retain(|path, _| directory_of(path) != directory);
        state.files.extend(files.into_iter().map(|(file, data)| (format!("{directory}/{file}"), data)));
    }

    fn act(&self, path: &str, what: What) -> VfsResult<()> {
        let mut state = self.state();
        let directory = directory_of(path);
        if let (What::Write { offset, data }, Some(room)) = (&what, state.room.get(directory)) {
            let there = state.files.get(path).map_or(0, Vec::len);
            let more = (offset + data.len()).saturating_sub(there);
            if size(&state.files, directory) + more > *room {
                return Err(VfsError::new(VfsErrorCode::Full, "no space left".into()));
            }
        }
        if matches!(what, What::Sync) && state.broken.contains(directory) {
            return Err(VfsError::new(VfsErrorCode::IoSync, "the disk does not answer".into()));
        }
        apply(&mut state.files, path, &what, |_| true);
        let file = path[directory.len() + 1..].to_owned();
        if let Some(recorded) = state.recorded.get_mut(directory) {
            recorded.push(Op { file, what });
        }
        Ok(())
    }
}

fn size(files: &Files, directory: &str) -> usize {
    files.iter().filter(|(path, _)| directory_of(path) == directory).map(|(_, data)| data.len()).sum()
}

fn directory_of(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(directory, _)| directory)
}

/// Does to a file what was done, as far as `keep` says so of a sector.
fn apply(files: &mut Files, file: &str, what: &What, mut keep: impl FnMut(usize) -> bool) {
    match what {
        What::Write { offset, data } => {
            let mut at = *offset;
            let end = offset + data.len();
            while at < end {
                let to = ((at / SECTOR + 1) * SECTOR).min(end);
                if keep(at / SECTOR) {
                    let content = files.entry(file.to_owned()).or_default();
                    if content.len() < to {
                        content.resize(to, 0);
                    }
                    content[at..to].copy_from_slice(&data[at - offset..to - offset]);
                }
                at = to;
            }
        }
        What::Truncate(size) => {
            if keep(0) {
                files.entry(file.to_owned()).or_default().resize(*size, 0);
            }
        }
        What::Sync => {}
        What::Delete => {
            if keep(0) {
                files.remove(file);
            }
        }
    }
}

/// What is on the disk after a cut that came when `done` was done.
pub fn after_cut(done: &[Op], cut: Cut, chance: &mut Chance) -> Files {
    // The last sync of each file, and of the directory, in which deletions are.
    let mut synced: BTreeMap<&str, usize> = BTreeMap::new();
    let mut named: BTreeSet<&str> = BTreeSet::new();
    let mut directory_synced = 0;
    for (i, op) in done.iter().enumerate() {
        match op.what {
            What::Sync => {
                synced.insert(&op.file, i);
                // As SQLite's own for Linux: the first sync of a log that it made syncs the directory, too.
                let is_log = op.file.ends_with("-wal") || op.file.ends_with("-journal");
                if is_log && named.insert(&op.file) {
                    directory_synced = i;
                }
            }
            What::Delete => drop(named.remove(op.file.as_str())),
            What::Write { .. } | What::Truncate(_) => {}
        }
    }
    let mut files = Files::new();
    for (i, op) in done.iter().enumerate() {
        let safe = match op.what {
            What::Delete => i < directory_synced,
            What::Write { .. } | What::Truncate(_) | What::Sync => {
                synced.get(op.file.as_str()).is_some_and(|sync| i < *sync)
            }
        };
        let whole = safe || matches!(cut, Cut::TornLast) && i + 1 < done.len();
        apply(&mut files, &op.file, &op.what, |_| whole || chance.half());
    }
    files
}

/// The same chances in each run.
pub struct Chance(pub u64);

impl Chance {
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }

    pub fn half(&mut self) -> bool {
        self.below(2) == 0
    }
}

struct Os;

impl OsCallback for Os {
    fn sleep(&self, _: Duration) {}

    fn random(&self, buffer: &mut [u8]) -> usize {
        buffer.fill(0x5A);
        buffer.len()
    }

    fn epoch_timestamp_in_ms(&self) -> VfsResult<i64> {
        Ok(1_790_000_000_000)
    }
}

/// An open file.
struct Handle {
    disk: Disk,
    path: String,
}

impl VfsFile for Handle {
    // As SQLite's own for Linux says of any file system.
    fn device_characteristics(&self) -> DeviceCharacteristics {
        DeviceCharacteristics::POWERSAFE_OVERWRITE
    }

    fn read(&mut self, buffer: &mut [u8], offset: u64) -> VfsResult<usize> {
        let state = self.disk.state();
        let content = state.files.get(&self.path).map_or(&[][..], Vec::as_slice);
        let rest = content.get(offset as usize..).unwrap_or_default();
        let length = rest.len().min(buffer.len());
        buffer[..length].copy_from_slice(&rest[..length]);
        Ok(length)
    }

    fn write(&mut self, data: &[u8], offset: u64) -> VfsResult<()> {
        self.disk.act(&self.path, What::Write { offset: offset as usize, data: data.to_vec() })
    }

    fn truncate(&mut self, size: u64) -> VfsResult<()> {
        self.disk.act(&self.path, What::Truncate(size as usize))
    }

    fn sync(&mut self, _: SyncOptions) -> VfsResult<()> {
        self.disk.act(&self.path, What::Sync)
    }

    fn size(&self) -> VfsResult<u64> {
        Ok(self.disk.state().files.get(&self.path).map_or(0, |content| content.len() as u64))
    }

    fn lock(&mut self, _: LockLevel) -> VfsResult<()> {
        Ok(())
    }

    fn unlock(&mut self, _: LockLevel) -> VfsResult<()> {
        Ok(())
    }

    fn check_reserved_lock(&self) -> VfsResult<bool> {
        Ok(false)
    }
}

struct Store;

impl VfsStore for Store {
    type File = Handle;
    type AppData = Disk;

    fn open_file(disk: &Disk, request: OpenRequest<'_>) -> VfsResult<OpenedFile<Handle>> {
        let name = request.filename.map(|name| name.path().to_owned());
        // What has no name is SQLite's own scratch.
        let path = name.unwrap_or_else(|| "/scratch".to_owned());
        let mut state = disk.state();
        if !state.files.contains_key(&path) {
            if !request.options.create() {
                return Err(VfsError::new(VfsErrorCode::CantOpen, "there is no such file".into()));
            }
            state.files.insert(path.clone(), Vec::new());
        }
        drop(state);
        Ok(OpenedFile { file: Handle { disk: disk.clone(), path }, access: request.options.access() })
    }

    fn close_file(_: &Disk, _: Option<&str>, _: Handle, _: OpenOptions) -> VfsResult<()> {
        Ok(())
    }

    fn access(disk: &Disk, name: &str, _: AccessMode) -> VfsResult<bool> {
        Ok(disk.state().files.contains_key(name))
    }

    fn full_pathname(_: &Disk, name: &str) -> VfsResult<String> {
        Ok(name.to_owned())
    }

    fn delete_file(disk: &Disk, name: &str, _: bool) -> VfsResult<()> {
        disk.act(name, What::Delete)
    }
}

struct Io;

impl SQLiteIoMethods for Io {
    type Store = Store;
}

struct Vfs;

impl SQLiteVfs<Io> for Vfs {
    type Os = Os;

    fn os(_: &Disk) -> &Os {
        &Os
    }
}
