//! The walls between tenants: a cgroup for each tenant's gateway and each model's workers, where the host lets the daemon make them.
//!
//! **Owns** the delegated part of the cgroup tree, and what is said where a limit is not enforced. **Never** starts without walls where the
//! configuration requires them, and never takes a limit for enforced that is not.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use pagedd_config::{Cgroups, limit_text, load_limits, save_limits, set_limit};
use pagedd_control::{
    ControlError, ErrorCode, LimitTexts, PressureInfo, StallInfo, UsageInfo, WallInfo, Walls as Shown,
};
use pagedd_core::{CgroupLimits, LimitName};
use pagedd_host::hierarchy::{Applied, Cgroup, CgroupError, Controller, Hierarchy, Pressure, Usage};
use tracing::{error, info, warn};

/// How long killed processes may take to be gone.
const DEATH: Duration = Duration::from_secs(10);
/// How long gateways and workers of a dead daemon may take to end by themselves.
const FAREWELL: Duration = Duration::from_secs(10);
/// Without one of these a tenant can starve the others.
const NEEDED: [Controller; 3] = [Controller::Cpu, Controller::Memory, Controller::Pids];

/// What stands between tenants.
pub struct Walls {
    hierarchy: Option<Hierarchy>,
    templates: Option<Cgroup>,
    shown: Shown,
}

impl Walls {
    /// Takes the part of the cgroup tree that this process was given, as far as the configuration wants that. This process moves.
    ///
    /// # Errors
    /// There is none that would do, and the configuration requires it.
    pub fn build(wanted: Cgroups) -> Result<Self, String> {
        let reduced = |reason: String| Self { shown: Shown::Reduced { reason }, ..Self::none() };
        if wanted == Cgroups::Off {
            info!(
                "walls: reduced, since the configuration says `cgroups: off`; tenants' limits are not enforced"
            );
            return Ok(reduced("`cgroups: off` in the configuration".to_owned()));
        }
        let taken = Hierarchy::take().and_then(|hierarchy| {
            let templates = hierarchy.templates();
            templates.map(|templates| (hierarchy, templates)).map_err(Into::into)
        });
        let (hierarchy, templates) = match taken {
            Ok(taken) => taken,
            Err(error) if wanted == Cgroups::Required => {
                return Err(format!("cgroups: required, but {error}; or set `cgroups: auto`"));
            }
            Err(error) => {
                let reason = error.to_string();
                warn!(
                    reason,
                    "walls: REDUCED: tenants' limits of CPU, memory, processes and I/O are NOT enforced"
                );
                return Ok(reduced(reason));
            }
        };
        let missing = hierarchy.missing();
        let names = |some: &[Controller]| some.iter().map(|c| c.name()).collect::<Vec<_>>().join(", ");
        let needed: Vec<_> = missing.iter().copied().filter(|c| NEEDED.contains(c)).collect();
        if wanted == Cgroups::Required && !needed.is_empty() {
            return Err(format!(
                "cgroups: required, but {} gets no controller {}; or set `cgroups: auto`",
                hierarchy.root().display(),
                names(&needed)
            ));
        }
        let shown = if missing.is_empty() {
            info!(cgroup = %hierarchy.root().display(), "walls: full");
            Shown::Full
        } else {
            let reason = format!("this host gives no controller {}", names(&missing));
            warn!(cgroup = %hierarchy.root().display(), reason, "walls: REDUCED: limits of these are NOT enforced");
            Shown::Reduced { reason }
        };
        Ok(Self { hierarchy: Some(hierarchy), templates: Some(templates), shown })
    }

    /// No cgroups, and nobody to ask for them.
    pub fn none() -> Self {
        let reason = "no cgroups were asked for".to_owned();
        Self { hierarchy: None, templates: None, shown: Shown::Reduced { reason } }
    }

    /// As `pagedctl` shows it.
    pub fn shown(&self) -> Shown {
        self.shown.clone()
    }

    /// Where a template process belongs.
    pub fn template(&self) -> Option<OwnedFd> {
        let fd = self.templates.as_ref()?.fd();
        fd.inspect_err(|error| warn!(%error, "a template process stays in the daemon's cgroup")).ok()
    }

    /// Where a model's workers belong, one after the other.
    pub fn workers(&self, model: &str) -> Option<Arc<WorkerCell>> {
        let hierarchy = self.hierarchy.clone()?;
        match hierarchy.workers(model, 0) {
            Ok(all) => Some(Arc::new(WorkerCell { hierarchy, all, starts: AtomicU32::new(0) })),
            Err(error) => {
                warn!(model, %error, "its workers stay in the daemon's cgroup");
                None
            }
        }
    }

    /// A tenant's wall with these limits.
    ///
    /// # Errors
    /// A limit cannot be as it is. The cgroup is gone again if nobody is in it.
    pub fn tenant(&self, name: &str, limits: CgroupLimits) -> Result<TenantWall, ControlError> {
        let Some(hierarchy) = &self.hierarchy else { return Ok(self.without(name, limits)) };
        let cgroup = hierarchy.tenant(name).map_err(|error| refusal(&error))?;
        match cgroup.limit(&limits) {
            Ok(applied) => Ok(TenantWall::new(name, Some(cgroup), limits, Fit::of(&applied))),
            Err(error) => {
                if cgroup.wait_empty(Duration::ZERO).is_ok_and(|empty| empty) {
                    drop(cgroup.remove(Duration::ZERO));
                }
                Err(refusal(&error))
            }
        }
    }

    /// A tenant's wall with the limits that control.db has, as well as it can be had.
    pub fn restored(&self, name: &str, saved: Option<&str>) -> TenantWall {
        let limits = match load_limits(saved) {
            Ok(limits) => limits,
            Err(error) => {
                error!(tenant = name, %error, "its limits cannot be read, and are not enforced");
                let line = format!("limits in control.db cannot be read: {error}");
                let fit = Fit { not_enforced: vec![line] };
                let cgroup = self.hierarchy.as_ref().and_then(|hierarchy| hierarchy.tenant(name).ok());
                return TenantWall::new(name, cgroup, CgroupLimits::default(), fit);
            }
        };
        let Some(hierarchy) = &self.hierarchy else { return self.without(name, limits) };
        let cgroup = match hierarchy.tenant(name) {
            Ok(cgroup) => cgroup,
            Err(error) => {
                error!(tenant = name, %error, "it has no cgroup: its limits are not enforced");
                let fit = Fit { not_enforced: vec![format!("it has no cgroup: {error}")] };
                return TenantWall::new(name, None, limits, fit);
            }
        };
        let fit = match cgroup.limit(&limits) {
            Ok(applied) => Fit::of(&applied),
            Err(error) => {
                error!(tenant = name, %error, "not all of its limits are enforced");
                Fit { not_enforced: vec![error.to_string()] }
            }
        };
        TenantWall::new(name, Some(cgroup), limits, fit)
    }

    fn without(&self, name: &str, limits: CgroupLimits) -> TenantWall {
        let fit = match &self.shown {
            Shown::Reduced { reason } if !limits.is_empty() => {
                Fit { not_enforced: vec![format!("walls are reduced: {reason}")] }
            }
            Shown::Reduced { .. } | Shown::Full => Fit::default(),
        };
        TenantWall::new(name, None, limits, fit)
    }

    /// Has what earlier daemons left ended and removed, all but what is of these tenants and models; on a thread of its own.
    pub fn sweep<'a>(&self, tenants: impl Iterator<Item = &'a str>, models: impl Iterator<Item = &'a str>) {
        let Some(hierarchy) = self.hierarchy.clone() else { return };
        let tenants = tenants.map(|name| Path::new("tenants").join(name));
        let models = models.map(|name| Path::new("workers").join(format!("{name}-0")));
        let known: BTreeSet<PathBuf> = tenants.chain(models).collect();
        let sweeping = std::thread::Builder::new()
            .name("cgroup-sweep".to_owned())
            .spawn(move || hierarchy.sweep(|path| known.contains(path), FAREWELL));
        if let Err(error) = sweeping {
            warn!(%error, "old cgroups stay");
        }
    }

    /// Ends whoever is left in the cgroups of tenants and workers, and removes them: the daemon's own end.
    pub fn clear(&self) {
        if let Some(hierarchy) = &self.hierarchy {
            hierarchy.sweep(|_| false, Duration::ZERO);
        }
    }
}

/// Where a model's workers belong.
pub struct WorkerCell {
    hierarchy: Hierarchy,
    all: Cgroup,
    starts: AtomicU32,
}

impl WorkerCell {
    /// A leaf for the next worker.
    pub fn next(&self) -> Result<WorkerLeaf, CgroupError> {
        let start = self.starts.fetch_add(1, Ordering::Relaxed) + 1;
        self.hierarchy.worker(&self.all, start).map(WorkerLeaf)
    }

    /// Proves that no worker of an earlier daemon is left.
    pub fn settle(&self) -> Result<(), CgroupError> {
        self.all.clear(DEATH)
    }

    /// Memory that all of them are charged with.
    pub fn memory(&self) -> Option<u64> {
        self.all.usage().memory.map(|bytes| bytes.0)
    }
}

/// The cgroup of one worker process, which goes with it.
#[derive(Debug)]
pub struct WorkerLeaf(Cgroup);

impl WorkerLeaf {
    /// For the process that is to be in it.
    pub fn fd(&self) -> io::Result<OwnedFd> {
        self.0.fd()
    }

    /// Kills whatever is in it and proves it gone.
    pub fn end(&self) -> Result<(), CgroupError> {
        self.0.end(DEATH)
    }
}

impl Drop for WorkerLeaf {
    fn drop(&mut self) {
        if let Err(error) = self.0.remove(Duration::from_secs(1)) {
            warn!(%error, "a worker's cgroup stays");
        }
    }
}

/// How far limits are in force.
#[derive(Clone, Default, Debug)]
struct Fit {
    not_enforced: Vec<String>,
}

impl Fit {
    fn of(applied: &Applied) -> Self {
        let mut not_enforced: Vec<_> = applied.unenforced.iter().map(ToString::to_string).collect();
        if !applied.left_out.is_empty() {
            let line = format!(
                "{}: CPUs {} are offline, or not pagedd's, and left out",
                LimitName::Cpus,
                applied.left_out
            );
            not_enforced.push(line);
        }
        Self { not_enforced }
    }
}

/// A tenant's wall.
pub struct TenantWall {
    name: String,
    cgroup: Option<Arc<Cgroup>>,
    limits: CgroupLimits,
    fit: Fit,
}

impl TenantWall {
    fn new(name: &str, cgroup: Option<Cgroup>, limits: CgroupLimits, fit: Fit) -> Self {
        for reason in &fit.not_enforced {
            warn!(tenant = name, reason, "a limit is not enforced as it was given");
        }
        Self { name: name.to_owned(), cgroup: cgroup.map(Arc::new), limits, fit }
    }

    /// Its limits, as they were given.
    pub fn limits(&self) -> &CgroupLimits {
        &self.limits
    }

    /// Where its gateway belongs.
    pub fn cgroup(&self) -> Option<Arc<Cgroup>> {
        self.cgroup.clone()
    }

    /// Whether each of its limits is enforced as it was given; without a cgroup no tenant has a wall.
    pub fn stands(&self) -> bool {
        self.cgroup.is_some() && self.fit.not_enforced.is_empty()
    }

    /// Other limits, in force when it returns. With `force` they may be below what is in use.
    ///
    /// # Errors
    /// Everything is as it was.
    pub async fn change(
        &mut self,
        walls: &Walls,
        limits: CgroupLimits,
        force: bool,
    ) -> Result<(), ControlError> {
        if limits == self.limits {
            return Ok(());
        }
        let Some(cgroup) = self.cgroup.clone() else {
            let reason = self.fit.not_enforced.first().cloned().filter(|_| walls.hierarchy.is_some());
            let changed = walls.without(&self.name, limits);
            self.limits = changed.limits;
            self.fit = reason.map_or(changed.fit, |reason| Fit { not_enforced: vec![reason] });
            return Ok(());
        };
        let (before, after) = (self.limits.clone(), limits.clone());
        // The kernel may take memory back before it answers.
        let changed = tokio::task::spawn_blocking(move || {
            if !force {
                cgroup.check_use(&before, &after)?;
            }
            cgroup.limit(&after).inspect_err(|_| {
                if let Err(error) = cgroup.limit(&before) {
                    error!(%error, "limits as they were cannot be put back");
                }
            })
        });
        let changed = changed.await.map_err(|e| ControlError::new(ErrorCode::Internal, e.to_string()))?;
        let applied = changed.map_err(|error| refusal(&error))?;
        self.fit = Fit::of(&applied);
        for reason in &self.fit.not_enforced {
            warn!(tenant = self.name, reason, "a limit is not enforced as it was given");
        }
        self.limits = limits;
        Ok(())
    }

    /// Ends whoever is in it, and removes it.
    pub async fn remove(self) {
        let Self { name, cgroup, .. } = self;
        let Some(cgroup) = cgroup else { return };
        let removed = tokio::task::spawn_blocking(move || cgroup.remove(DEATH)).await;
        match removed {
            Ok(Ok(())) => {}
            Ok(Err(error)) => warn!(tenant = name, %error, "its cgroup stays"),
            Err(error) => warn!(tenant = name, %error, "its cgroup stays"),
        }
    }

    /// As `pagedctl` shows it.
    pub fn info(&self, device_bytes: u64) -> WallInfo {
        WallInfo {
            limits: texts(&self.limits),
            not_enforced: self.fit.not_enforced.clone(),
            usage: self.cgroup.as_ref().map(|cgroup| usage(&cgroup.usage())),
            device_bytes,
        }
    }
}

/// What is said of the limits of a tenant that is not served.
pub fn unserved(saved: Option<&str>) -> WallInfo {
    WallInfo {
        limits: load_limits(saved).map(|limits| texts(&limits)).unwrap_or_default(),
        ..WallInfo::default()
    }
}

/// `before` with what is said in `texts`.
///
/// # Errors
/// The first text that is no limit.
pub fn changed(before: &CgroupLimits, texts: &LimitTexts) -> Result<CgroupLimits, ControlError> {
    let mut limits = before.clone();
    for (name, text) in texts.given() {
        set_limit(&mut limits, name, text)
            .map_err(|error| ControlError::new(ErrorCode::InvalidLimit, format!("{name}: {error}")))?;
    }
    Ok(limits)
}

/// For control.db.
pub fn saved(limits: &CgroupLimits) -> Option<String> {
    save_limits(limits)
}

fn texts(limits: &CgroupLimits) -> LimitTexts {
    let mut texts = LimitTexts::default();
    for name in LimitName::ALL {
        texts.set(name, limit_text(limits, name));
    }
    texts
}

fn usage(usage: &Usage) -> UsageInfo {
    let stall = |pressure: Option<Pressure>| {
        pressure.map(|Pressure { some, full }| StallInfo {
            some_avg10: some.avg10,
            full_avg10: full.map_or(0.0, |full| full.avg10),
            some_us: some.total_us,
            full_us: full.map_or(0, |full| full.total_us),
        })
    };
    UsageInfo {
        memory_bytes: usage.memory.map(|bytes| bytes.0),
        memory_peak_bytes: usage.memory_peak.map(|bytes| bytes.0),
        oom_kills: usage.oom_kills,
        cpu_us: usage.cpu_us,
        throttled_us: usage.throttled_us,
        pids: usage.pids,
        pids_refused: usage.pids_refused,
        pressure: PressureInfo {
            cpu: stall(usage.cpu_pressure),
            memory: stall(usage.memory_pressure),
            io: stall(usage.io_pressure),
        },
    }
}

fn refusal(error: &CgroupError) -> ControlError {
    let (code, remedy) = match error {
        CgroupError::BelowUse(_) => (
            ErrorCode::BelowUse,
            Some("raise it, or use --force: then the kernel takes back what it can, and may end the gateway"),
        ),
        CgroupError::NoCpu { .. } => (ErrorCode::InvalidLimit, Some("name some that are online")),
        CgroupError::NoDevice { .. } => (ErrorCode::InvalidLimit, Some("`lsblk` lists block devices")),
        CgroupError::Limit { .. } => (ErrorCode::InvalidLimit, None),
        CgroupError::Alive { .. } | CgroupError::Io { .. } => (ErrorCode::Internal, None),
    };
    let refusal = ControlError::new(code, error.to_string());
    match remedy {
        Some(remedy) => refusal.remedy(remedy),
        None => refusal,
    }
}

#[cfg(test)]
mod tests;
