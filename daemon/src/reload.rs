//! A start from a checkpoint.
//!
//! **Owns** what must be true before the present databases give way: the checkpoint is whole, the workers, which are up already, say that they
//! serve the very same models, and its tenants can have their ports. **Never** goes on with requests itself: with the databases in place, the start is that of any daemon
//! whose predecessor died.
//!
//! ```text
//! order or flag → read all of it → workers load → compare → ledgers of an earlier daemon go → databases in place → any start
//!                 └──────────── refused: nothing is touched ─────────────┘
//! ```

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pagedd_config::Config;
use pagedd_core::{ModelId, said};
use pagedd_host::notify;
use pagedd_journal::checkpoint::{Checkpoint, SavedModel, finish_restore};
use tokio::sync::watch;
use tracing::{error, info, warn};

use crate::arenas::ledger_name;
use crate::blocks::{SavedBlocks, Seed};
use crate::checkpoint::{fits, identity, ports_are_free, whole};
use crate::model::{self, Started, Surroundings};
use crate::ports;
use crate::recorder::unix;
use crate::worker::ModelState;

/// Between two looks at models that load.
const LOOK: Duration = Duration::from_secs(10);
/// A checkpoint is read at so many bytes a second at least.
const SLOWEST_READ: u64 = 16 << 20;
/// The command line's flag.
const FLAG: &str = "--reload-checkpoint";
/// Has the path of the checkpoint that the next start is to take up.
const ORDER: &str = "restore";
/// Has what the flag named when it was last obeyed.
const OBEYED: &str = "restored";

/// Which checkpoint is to be taken up.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Wanted {
    /// By the command line. Where it is refused, nothing starts.
    Flag(PathBuf),
    /// By `pagedctl checkpoint restore`. Where it is refused after all, the present state goes on.
    Order(PathBuf),
}

/// What a start from a checkpoint has come to.
#[derive(Default)]
pub struct Reloaded {
    /// The models, where they were started; all of them or none.
    pub models: Vec<Started>,
    /// The checkpoint whose databases are in place.
    pub checkpoint: Option<Checkpoint>,
}

impl Reloaded {
    /// What the KV arena of a model begins with.
    pub fn seed(&self, model: &str, cache_key: [u8; 32]) -> Seed {
        let Some(checkpoint) = &self.checkpoint else { return Seed::Kept };
        let saved = checkpoint.manifest().models.iter().find(|saved| saved.identity.name == model);
        let open = |saved: &SavedModel| match SavedBlocks::open(checkpoint, saved, cache_key) {
            Ok(blocks) => blocks,
            Err(error) => {
                warn!(model, error, "the checkpoint's blocks are not used; they are computed again");
                None
            }
        };
        Seed::Fresh(saved.and_then(open))
    }
}

/// Has the next start take up a checkpoint.
///
/// # Errors
/// From the file system; the next start knows nothing of it.
pub fn order(state_dir: &Path, checkpoint: &Path) -> io::Result<()> {
    write(state_dir, ORDER, checkpoint.as_os_str().as_bytes())
}

/// What this start is to take up: what the flag names, or what was ordered. Whoever starts the daemon may pass the flag each time: it is
/// obeyed once for each checkpoint.
///
/// # Errors
/// From the file system.
pub fn wanted(state_dir: &Path, flag: Option<&Path>) -> io::Result<Option<Wanted>> {
    if let Some(path) = flag {
        if read(state_dir, OBEYED)?.is_some_and(|obeyed| is_same(Path::new(&obeyed), path)) {
            warn!(path = %path.display(), "{FLAG} was obeyed at an earlier start; `pagedctl checkpoint restore` does it again");
        } else {
            return Ok(Some(Wanted::Flag(path.to_path_buf())));
        }
    }
    Ok(read(state_dir, ORDER)?.map(|path| Wanted::Order(path.into())))
}

/// Whether two paths name one directory, whether it is there or not.
fn is_same(one: &Path, other: &Path) -> bool {
    let found = |path: &Path| fs::canonicalize(path).ok();
    one == other || found(one).is_some_and(|one| Some(one) == found(other))
}

/// Takes up a checkpoint: returns with its databases in place, and with models whose workers are up. No database is open.
///
/// # Errors
/// One line: it is refused or cannot be put in place, and the command line asked for it.
pub async fn reload(config: &Config, around: &Surroundings, wanted: &Wanted) -> Result<Reloaded, String> {
    let (Wanted::Flag(path) | Wanted::Order(path)) = wanted;
    let mut reloaded = Reloaded::default();
    let taken = take_up(config, around, path, &mut reloaded).await;
    match (taken, wanted) {
        (Ok(aside), _) => {
            warn!(checkpoint = %path.display(), before = %aside.display(), "a checkpoint is in place; what was there before is kept");
            if let Wanted::Flag(path) = wanted {
                write(&config.state_dir, OBEYED, path.as_os_str().as_bytes()).map_err(|e| e.to_string())?;
            }
        }
        (Err(error), Wanted::Flag(_)) => return Err(error),
        // Half of it in place is no state to go on with.
        (Err(error), Wanted::Order(_)) => match finish_restore(&config.state_dir) {
            Ok(None) => error!(error, "the checkpoint is not taken up; what is there goes on"),
            Ok(Some(_)) | Err(_) => return Err(error),
        },
    }
    // One that was refused would be refused again, and any other order is older.
    match fs::remove_file(config.state_dir.join(ORDER)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.to_string()),
        Ok(()) | Err(_) => Ok(reloaded),
    }
}

async fn take_up(
    config: &Config,
    around: &Surroundings,
    path: &Path,
    reloaded: &mut Reloaded,
) -> Result<PathBuf, String> {
    start_takes(Duration::from_secs(60 + bytes_below(path) / SLOWEST_READ));
    let checkpoint = whole(path).map_err(|error| error.message)?;
    reloaded.models = start_models(config, around).map_err(|error| said(error.as_ref()))?;
    let mut here = Vec::new();
    for Started { model, .. } in &reloaded.models {
        let mut state = model.state.clone();
        let state = loaded(&mut state).await.map_err(|_| "an engine's thread has ended".to_owned())?;
        match &*state {
            ModelState::Ready(ready) => here.push(identity(model, &ready.info)),
            ModelState::Failed { error } => {
                return Err(format!("checkpoint {}: model {}: {error}", path.display(), model.name));
            }
            ModelState::Loading { .. } | ModelState::Restarting { .. } => {}
        }
    }
    fits(&checkpoint, &here)?;
    ports_are_free(&checkpoint, &here, config.listen, &ports::kept(&around.store, config.listen))?;
    forget_ledgers(config, around);
    let aside = checkpoint.put_in_place(&config.state_dir, unix()).map_err(|error| error.to_string())?;
    reloaded.checkpoint = Some(checkpoint);
    Ok(aside)
}

/// Waits until it is known whether a model serves. Its load has bounds of its own; for as long the service manager is told that the start goes on.
async fn loaded(
    state: &mut watch::Receiver<ModelState>,
) -> Result<watch::Ref<'_, ModelState>, watch::error::RecvError> {
    let known = |state: &ModelState| matches!(state, ModelState::Ready(_) | ModelState::Failed { .. });
    while tokio::time::timeout(LOOK, state.wait_for(known)).await.is_err() {
        start_takes(2 * LOOK);
    }
    state.wait_for(known).await
}

/// Has the service manager wait longer for the start.
fn start_takes(longer: Duration) {
    if let Err(error) = notify::extend_timeout(longer) {
        warn!(%error, "the service manager does not know how long the start takes");
    }
}

/// Bytes of the files below a directory, as far as they can be seen.
fn bytes_below(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let sizes = entries.map(|entry| match entry.metadata() {
        Ok(found) if found.is_dir() => bytes_below(&entry.path()),
        Ok(found) => found.len(),
        Err(_) => 0,
    });
    sizes.sum()
}

/// Starts every model; each waits for what the databases say.
///
/// # Errors
/// The system refused a process or a thread.
pub fn start_models(config: &Config, around: &Surroundings) -> anyhow::Result<Vec<Started>> {
    let start = |(i, settings): (usize, &pagedd_config::Model)| {
        let started = model::start(ModelId(i as u16), settings, around);
        started.map_err(|e| anyhow::Error::new(e).context(format!("model `{}`", settings.name.as_str())))
    };
    config.models.iter().enumerate().map(start).collect()
}

/// What earlier daemons said of KV blocks names tenants by numbers, which may be others' in the checkpoint. From here on nobody finds it,
/// whenever this daemon ends.
fn forget_ledgers(config: &Config, around: &Surroundings) {
    let configured = config.models.iter().map(|model| ledger_name(model.name.as_str()));
    let left = around.store.names().into_iter().filter(|name| name.starts_with(&ledger_name("")));
    for name in configured.chain(left) {
        match around.store.remove(&name) {
            Ok(()) => info!(name, "what is in the KV arena is not used"),
            Err(error) => warn!(name, %error, "an fd of an earlier daemon stays open"),
        }
    }
}

/// The command line without the flag, and the flag: it is for the first daemon alone, not for those that follow a dead one.
pub fn split(args: impl IntoIterator<Item = OsString>) -> (Vec<OsString>, Vec<OsString>) {
    let (mut all, mut first) = (Vec::new(), Vec::new());
    let mut args = args.into_iter();
    while let Some(arg) = args.next() {
        if arg == FLAG {
            first.push(arg);
            first.extend(args.next());
        } else if arg.as_bytes().strip_prefix(FLAG.as_bytes()).is_some_and(|rest| rest.starts_with(b"=")) {
            first.push(arg);
        } else {
            all.push(arg);
        }
    }
    (all, first)
}

/// A small file of the state directory, on disk when it returns, whole or as it was.
fn write(state_dir: &Path, name: &str, text: &[u8]) -> io::Result<()> {
    let (path, partial) = (state_dir.join(name), state_dir.join(format!("{name}.partial")));
    let written = || {
        let mut file =
            fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&partial)?;
        file.write_all(text)?;
        file.sync_all()?;
        fs::rename(&partial, path)
    };
    written().inspect_err(|_| {
        // On a full disk it is there, and empty.
        drop(fs::remove_file(&partial));
    })?;
    File::open(state_dir)?.sync_all()
}

fn read(state_dir: &Path, name: &str) -> io::Result<Option<OsString>> {
    match fs::read(state_dir.join(name)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        text => text.map(|text| Some(OsString::from_vec(text))),
    }
}

#[cfg(test)]
mod tests;
