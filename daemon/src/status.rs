//! A model as `pagedctl` shows it.

use pagedd_control::{ModelState as Shown, ModelStatus};

use crate::model::Model;
use crate::worker::ModelState;

/// A model as it is now.
pub fn model(model: &Model) -> ModelStatus {
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
        memory_bytes: model.cell.as_ref().and_then(|cell| cell.memory()),
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
