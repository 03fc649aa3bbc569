//! Checkpoints by hand: saved while everything goes on, looked at, and ordered to be taken up.
//!
//! **Owns** that one thing is done at a time, and the order of it: control.db, with it held still journal.db at a batch's boundary, then KV blocks.
//! **Never** puts one in place: the next daemon does, at its start ([`crate::reload`]), since only then no database is open.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pagedd_config::Device;
use pagedd_control::{
    CheckpointAt, CheckpointCommand, CheckpointFile, CheckpointInfo, CheckpointListed, CheckpointListing,
    CheckpointModel, CheckpointRestoring, CheckpointSave, CheckpointShown, CheckpointState, CheckpointTenant,
    ControlError, ErrorCode, Reply,
};
use pagedd_core::TenantId;
use pagedd_journal::checkpoint::{
    self, Checkpoint, CheckpointError, Draft, ModelIdentity, Problem, SavedModel, SavedTenant, hex,
};
use pagedd_wire::worker::{KV_LAYOUT, ModelInfo};
use tokio::sync::{Mutex, Notify, mpsc, oneshot};
use tracing::info;

use crate::blocks::SavedBlocks;
use crate::daemon::Db;
use crate::model::Model;
use crate::ports;
use crate::recorder::{Told, unix};
use crate::reload;

/// Carries out what is asked about checkpoints, beside the daemon's task: reading one takes a while.
pub struct Checkpoints {
    /// Of the daemon.
    pub state_dir: PathBuf,
    /// Of every port.
    pub address: IpAddr,
    /// Every configured model.
    pub models: Vec<Arc<Model>>,
    /// Tenants and keys.
    pub db: Db,
    /// The journal.
    pub recorder: mpsc::Sender<Told>,
    /// Held while a command is carried out: threads that wait for the disk are few.
    pub one: Mutex<()>,
    /// Told where the daemon is to end and start anew.
    pub restart: Arc<Notify>,
}

impl Checkpoints {
    /// Answers a command.
    pub async fn obey(
        self: Arc<Self>,
        command: CheckpointCommand,
        answer: oneshot::Sender<pagedd_control::Response>,
    ) {
        let (changes, restores) = (command.changes(), matches!(command, CheckpointCommand::Restore(_)));
        let result = self.answer(command).await;
        if changes {
            let error = result.as_ref().err().map(|e| e.code.as_str());
            info!(command = "checkpoint", error, "admin");
        }
        let ordered = restores && result.is_ok();
        // A client that hung up does not want its answer.
        drop(answer.send(result.into()));
        if ordered {
            self.restart.notify_one();
        }
    }

    async fn answer(&self, command: CheckpointCommand) -> Result<Reply, ControlError> {
        let _one = self.one.lock().await;
        let state_dir = self.state_dir.clone();
        match command {
            CheckpointCommand::Save(save) => self.save(save).await,
            CheckpointCommand::List => blocking(move || listed(&state_dir).map(Reply::Checkpoints)).await,
            CheckpointCommand::Inspect(at) => {
                blocking(move || shown(&located(&state_dir, &at)?).map(Reply::Checkpoint)).await
            }
            CheckpointCommand::Verify(at) => {
                blocking(move || Ok(Reply::CheckpointWhole(info_of(&whole(&located(&state_dir, &at)?)?))))
                    .await
            }
            CheckpointCommand::Restore(at) => self.restore(at).await,
        }
    }

    async fn save(&self, save: CheckpointSave) -> Result<Reply, ControlError> {
        let CheckpointSave { name, kv } = save;
        if let Some(model) = self.models.iter().find(|model| kv && model.config.device != Device::Cpu) {
            let message = format!(
                "model `{}` is on {}: KV blocks in a GPU's memory cannot be saved",
                model.name, model.config.device
            );
            let remedy = "save without --kv: they are computed again where they are needed";
            return Err(ControlError::new(ErrorCode::Unsupported, message).remedy(remedy));
        }
        let identities = self.identities()?;
        let state_dir = self.state_dir.clone();
        let draft = blocking(move || Draft::begin(&state_dir, &name).map_err(|e| refused(&e))).await?;
        let (control, journal) = (draft.file("control.db"), draft.file("journal.db"));
        let recorder = self.recorder.clone();
        // No tenant comes or goes before the journal is copied, too.
        let saved = self.db.with(move |db| {
            db.save(&control)?;
            let tenants: BTreeSet<TenantId> = db.tenants()?.into_iter().map(|tenant| tenant.id).collect();
            let (answer, saved) = oneshot::channel();
            drop(recorder.blocking_send(Told::Save(journal, answer)));
            let saved =
                saved.blocking_recv().unwrap_or_else(|_| Err("the journal's thread has ended".to_owned()));
            Ok(saved.map(|()| tenants))
        });
        let tenants = saved.await?.map_err(|error| ControlError::new(ErrorCode::Internal, error))?;
        let models: Vec<_> = self.models.iter().cloned().zip(identities).collect();
        blocking(move || {
            let models = models
                .into_iter()
                .map(|(model, identity)| copy_blocks(&draft, &model, identity, &tenants, kv));
            let models = models.collect::<Result<Vec<_>, _>>()?;
            let checkpoint =
                draft.finish(env!("CARGO_PKG_VERSION"), unix(), models).map_err(|e| refused(&e))?;
            Ok(Reply::CheckpointSaved(info_of(&checkpoint)))
        })
        .await
    }

    async fn restore(&self, at: CheckpointAt) -> Result<Reply, ControlError> {
        let here = self.identities()?;
        let (state_dir, address) = (self.state_dir.clone(), self.address);
        let tenants = self.db.with(|db| db.tenants()).await?.into_iter();
        let served = |model: &str| self.models.iter().any(|served| served.name == model);
        let held = tenants.filter(|tenant| served(&tenant.model)).map(|tenant| tenant.port).collect();
        blocking(move || {
            let checkpoint = whole(&located(&state_dir, &at)?)?;
            fits(&checkpoint, &here).map_err(|e| ControlError::new(ErrorCode::CheckpointMismatch, e))?;
            ports_are_free(&checkpoint, &here, address, &held)
                .map_err(|e| ControlError::new(ErrorCode::PortInUse, e))?;
            reload::order(&state_dir, checkpoint.path())
                .map_err(|e| refused(&CheckpointError::Io { path: state_dir.clone(), source: e }))?;
            Ok(Reply::CheckpointRestoring(CheckpointRestoring {
                checkpoint: info_of(&checkpoint),
                state_dir: state_dir.display().to_string(),
            }))
        })
        .await
    }

    /// What the models are, as their workers said.
    fn identities(&self) -> Result<Vec<ModelIdentity>, ControlError> {
        let identity = |model: &Arc<Model>| {
            let known = model.state.borrow().model().map(|ready| identity(model, &ready.info));
            known.ok_or_else(|| {
                let message = format!("model `{}` is not ready: what it is of is not known yet", model.name);
                ControlError::new(ErrorCode::Busy, message).remedy("`pagedctl status` shows how it stands")
            })
        };
        self.models.iter().map(identity).collect()
    }
}

/// What a model is, from its configuration and its worker.
pub fn identity(model: &Model, info: &ModelInfo) -> ModelIdentity {
    ModelIdentity {
        name: model.name.clone(),
        architecture: info.architecture.clone(),
        parameters: info.parameters,
        dtype: model.config.dtype.to_string(),
        kv_dtype: model.config.kv_dtype.to_string(),
        block_size: info.block_size,
        block_bytes: info.block_bytes,
        kv_layout: KV_LAYOUT,
        kernels: info.kernels.clone(),
        digest: hex(&info.digest),
    }
}

/// A checkpoint of which everything was read and nothing is wrong.
///
/// # Errors
/// One line that names each file and what is wrong with it.
pub fn whole(path: &Path) -> Result<Checkpoint, ControlError> {
    let checkpoint = Checkpoint::open(path).map_err(|error| refused(&error))?;
    let mut problems: Vec<String> = checkpoint.problems().iter().map(Problem::to_string).collect();
    if problems.is_empty() {
        let secret = checkpoint.installation_secret().map_err(|error| refused(&error.into()))?;
        let models = checkpoint.manifest().models.iter();
        problems.extend(models.filter_map(|model| SavedBlocks::open(&checkpoint, model, secret).err()));
    }
    if problems.is_empty() {
        return Ok(checkpoint);
    }
    let message = format!("checkpoint {}: {}", path.display(), problems.join("; "));
    Err(ControlError::new(ErrorCode::CheckpointDamaged, message))
}

/// Whether a checkpoint is of the models that are served here.
///
/// # Errors
/// One line with the first difference.
pub fn fits(checkpoint: &Checkpoint, here: &[ModelIdentity]) -> Result<(), String> {
    let compared = checkpoint.manifest().compare(here);
    compared.map_err(|difference| format!("checkpoint {}: {difference}", checkpoint.path().display()))
}

/// Whether every tenant of a checkpoint that would be served here would have its port: one of `held`, or one that can be bound.
///
/// # Errors
/// One line with the first that would not.
pub fn ports_are_free(
    checkpoint: &Checkpoint,
    here: &[ModelIdentity],
    address: IpAddr,
    held: &BTreeSet<u16>,
) -> Result<(), String> {
    let refused =
        |error: &dyn std::fmt::Display| format!("checkpoint {}: {error}", checkpoint.path().display());
    let mut wanted = checkpoint.ports().map_err(|error| refused(&error))?;
    wanted.retain(|saved| here.iter().any(|model| model.name == saved.model));
    ports::check(address, held, wanted).map_err(|error| refused(&error))
}

/// Writes a model's committed blocks into a draft.
fn copy_blocks(
    draft: &Draft,
    model: &Model,
    identity: ModelIdentity,
    tenants: &BTreeSet<TenantId>,
    kv: bool,
) -> Result<SavedModel, ControlError> {
    let Some(shelf) = model.shelf.get() else {
        let message = format!("model `{}` has no ledger of its KV blocks", model.name);
        return Err(ControlError::new(ErrorCode::Busy, message));
    };
    let mut saved = SavedModel { identity, blocks: 0, kv };
    let mut ledger = draft.create(&saved.ledger_file()).map_err(|e| refused(&e))?;
    let mut bytes = kv.then(|| draft.create(&saved.kv_file())).transpose().map_err(|e| refused(&e))?;
    saved.blocks = shelf
        .copy_out(tenants, &mut ledger, bytes.as_mut())
        .map_err(|source| refused(&CheckpointError::Io { path: draft.file(&saved.ledger_file()), source }))?;
    Ok(saved)
}

/// Where a checkpoint lies: a name in the state directory, or a path.
fn located(state_dir: &Path, at: &CheckpointAt) -> Result<PathBuf, ControlError> {
    if at.which.starts_with('/') {
        return Ok(PathBuf::from(&at.which));
    }
    checkpoint::named(state_dir, &at.which).map_err(|error| refused(&error))
}

fn listed(state_dir: &Path) -> Result<CheckpointListed, ControlError> {
    let found = checkpoint::list(state_dir)
        .map_err(|source| refused(&CheckpointError::Io { path: state_dir.to_path_buf(), source }))?;
    let listing = |(name, opened): (String, Result<Checkpoint, CheckpointError>)| {
        let damaged = |error: String| CheckpointState::Damaged { error };
        let state = match opened {
            Ok(checkpoint) => match checkpoint.glance().first() {
                None => CheckpointState::Complete(info_of(&checkpoint)),
                Some(problem) => damaged(problem.to_string()),
            },
            Err(error) => damaged(error.to_string()),
        };
        CheckpointListing { name, state }
    };
    Ok(CheckpointListed { checkpoints: found.into_iter().map(listing).collect() })
}

fn shown(path: &Path) -> Result<CheckpointShown, ControlError> {
    let checkpoint = Checkpoint::open(path).map_err(|error| refused(&error))?;
    let contents = checkpoint.contents().map_err(|error| {
        ControlError::new(ErrorCode::CheckpointDamaged, format!("checkpoint {}: {error}", path.display()))
    })?;
    let file = |file: &checkpoint::SavedFile| CheckpointFile { name: file.name.clone(), bytes: file.bytes };
    Ok(CheckpointShown {
        checkpoint: info_of(&checkpoint),
        files: checkpoint.manifest().files.iter().map(file).collect(),
        tenants: contents.tenants.into_iter().map(tenant).collect(),
        damaged_requests: contents.damaged_requests,
    })
}

fn tenant(saved: SavedTenant) -> CheckpointTenant {
    let SavedTenant { id, name, model, keys, live, prompt_tokens, output_tokens, ended } = saved;
    CheckpointTenant { id, name, model, keys, live, prompt_tokens, output_tokens, ended }
}

fn info_of(checkpoint: &Checkpoint) -> CheckpointInfo {
    let model = |model: &SavedModel| {
        let SavedModel { identity, blocks, kv } = model.clone();
        CheckpointModel {
            name: identity.name,
            architecture: identity.architecture,
            dtype: identity.dtype,
            kv_dtype: identity.kv_dtype,
            kernels: identity.kernels,
            digest: identity.digest,
            block_size: identity.block_size,
            block_bytes: identity.block_bytes,
            blocks,
            kv,
        }
    };
    let manifest = checkpoint.manifest();
    CheckpointInfo {
        name: checkpoint.name(),
        path: checkpoint.path().display().to_string(),
        created_unix: manifest.created_unix as i64,
        pagedd: manifest.pagedd.clone(),
        bytes: checkpoint.bytes(),
        models: manifest.models.iter().map(model).collect(),
    }
}

/// As `pagedctl` shows it.
fn refused(error: &CheckpointError) -> ControlError {
    let code = match error {
        CheckpointError::Name { .. } => ErrorCode::InvalidName,
        CheckpointError::Exists { .. } => ErrorCode::DuplicateName,
        CheckpointError::Missing { .. } => ErrorCode::UnknownCheckpoint,
        CheckpointError::Foreign { .. }
        | CheckpointError::Version { .. }
        | CheckpointError::Damaged { .. } => ErrorCode::CheckpointDamaged,
        CheckpointError::Io { source, .. } if source.kind() == std::io::ErrorKind::StorageFull => {
            ErrorCode::DiskFull
        }
        CheckpointError::Io { .. } => ErrorCode::Internal,
        CheckpointError::Db(error) => return crate::daemon::db_error(error),
    };
    let refusal = ControlError::new(code, error.to_string());
    match error {
        CheckpointError::Missing { .. } => refusal.remedy("`pagedctl checkpoint list` names them"),
        CheckpointError::Exists { .. } => refusal.remedy("choose another name, or remove that directory"),
        _ => refusal,
    }
}

/// Does what waits for the disk off the runtime's thread.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ControlError> + Send + 'static,
) -> Result<T, ControlError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|e| ControlError::new(ErrorCode::Internal, format!("checkpoint: {e}")))?
}
