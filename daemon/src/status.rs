//! A model as `pagedctl` shows it.

use std::sync::Arc;

use pagedd_control::{ModelState as Shown, ModelStatus};

use crate::model::Model;
use crate::worker::ModelState;

/// Models as they are now.
pub async fn models(models: &[Arc<Model>]) -> Vec<ModelStatus> {
    let memory = worker_memory(models).await;
    models.iter().zip(memory).map(|(one, memory)| model(one, memory)).collect()
}

/// Memory that the cgroup of each model's workers is charged with. It is read in files: not on the thread that delivers tokens.
pub async fn worker_memory(models: &[Arc<Model>]) -> Vec<Option<u64>> {
    let cgroups: Vec<_> = models.iter().map(|model| model.cell.clone()).collect();
    let read = move || cgroups.iter().map(|cgroup| cgroup.as_ref()?.memory()).collect();
    tokio::task::spawn_blocking(read).await.unwrap_or_else(|_| vec![None; models.len()])
}

fn model(model: &Model, memory_bytes: Option<u64>) -> ModelStatus {
    let state = model.state.borrow().clone();
    let stats = model.stats.borrow();
    let ready = state.model().cloned();
    let info = ready.as_ref().map(|ready| &ready.info);
    let running = matches!(state, ModelState::Ready(_));
    ModelStatus {
        name: model.name.clone(),
        path: model.path.display().to_string(),
        state: match state {
            ModelState::Loading { permille } => Shown::Loading { permille: permille as u16 },
            ModelState::Ready(_) => Shown::Ready,
            ModelState::Restarting { attempt, .. } => Shown::Restarting { attempt },
            ModelState::Failed { error } => Shown::Failed { error },
        },
        architecture: info.map(|info| info.architecture.clone()),
        parameters: info.map(|info| info.parameters),
        device: model.config.device.to_string(),
        dtype: Some(model.config.dtype.to_string()),
        kv_dtype: Some(model.config.kv_dtype.to_string()),
        kernels: info.map(|info| info.kernels.clone()),
        threads: info.map(|info| info.threads),
        weight_bytes: info.map(|info| info.weight_bytes),
        kv_bytes: info.map(|info| info.block_bytes * u64::from(info.blocks)),
        scratch_bytes: info.map(|info| info.scratch_bytes),
        pinned_bytes: info.map(|info| info.pinned_bytes),
        memory_bytes,
        block_size: model.config.block_size.0,
        max_model_len: info.map(|info| info.max_model_len),
        blocks_total: info.map(|info| info.blocks),
        blocks_free: stats.scheduler.pool.free.0,
        blocks_cached: stats.scheduler.pool.cached.0,
        blocks_held: stats.scheduler.pool.held.0,
        running: stats.scheduler.running(),
        waiting: stats.scheduler.waiting(),
        steps: stats.steps,
        last_step_age_ms: model.last_step_age(&stats).map(|age| age.as_millis() as u64),
        worker_pid: ready.as_ref().filter(|_| running).map(|ready| ready.pid),
        restarts: ready.as_ref().map_or(0, |ready| ready.restarts),
        weights_reused: ready.as_ref().map(|ready| ready.info.weights_reused),
    }
}
