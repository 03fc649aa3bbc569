//! The walls between tenants: a cgroup for each tenant's gateway and each model's workers, where the host lets the daemon make them.
//!
//! **Owns** the delegated part of the cgroup tree, and what is said where a limit is not enforced. **Never** starts without walls where the
//! configuration requires them, never starts a process outside of them then, and never takes a limit for enforced that is not.

mod tenant;
mod workers;

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pagedd_config::{Cgroups, limit_text, load_limits, save_limits, set_limit};
use pagedd_control::{
    ControlError, ErrorCode, LimitTexts, PressureInfo, StallInfo, UsageInfo, WallInfo, Walls as Shown,
};
use pagedd_core::{CgroupLimits, LimitName};
use pagedd_host::hierarchy::{
    Cgroup, CgroupError, Controller, Hierarchy, Left, NoHierarchy, Pressure, Usage,
};
use tracing::{info, warn};

use tenant::Fit;
pub use tenant::TenantWall;
pub use workers::{WorkerCgroup, WorkerLeaf};

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
    /// Whether nothing may be outside of them.
    required: bool,
    shown: Shown,
    /// Processes that have to stay in the daemon's cgroup, as they are said.
    outside: Mutex<BTreeSet<String>>,
    /// Those of an earlier daemon.
    left: Mutex<Left>,
}

/// Why there are no walls where the configuration requires them.
#[derive(thiserror::Error, Debug)]
pub enum NoWalls {
    /// The host, the way it is started, or the configuration must be another.
    #[error("cgroups: required, but {0}; or set `cgroups: auto`")]
    Never(String),
    /// Another start may have them.
    #[error("cgroups: required, but {0}; or set `cgroups: auto`")]
    Now(String),
}

impl From<NoHierarchy> for NoWalls {
    fn from(error: NoHierarchy) -> Self {
        match error {
            NoHierarchy::NoV2 | NoHierarchy::Hybrid { .. } | NoHierarchy::NotDelegated { .. } => {
                Self::Never(error.to_string())
            }
            NoHierarchy::NotAlone { .. } | NoHierarchy::Cgroup(_) => Self::Now(error.to_string()),
        }
    }
}

impl Walls {
    /// Takes the part of the cgroup tree that this process was given, as far as the configuration wants that. This process moves. What is
    /// there of an earlier daemon is known from here on: nothing is started before.
    ///
    /// # Errors
    /// There is none that would do, and the configuration requires it.
    pub fn build(wanted: Cgroups) -> Result<Self, NoWalls> {
        let reduced = |reason: String| Self { shown: Shown::Reduced { reason }, ..Self::none() };
        if wanted == Cgroups::Off {
            info!(
                "walls: reduced, since the configuration says `cgroups: off`; tenants' limits are not enforced"
            );
            return Ok(reduced("`cgroups: off` in the configuration".to_owned()));
        }
        let taken = Hierarchy::take().and_then(|hierarchy| {
            let templates = hierarchy.templates()?;
            Ok((hierarchy, templates))
        });
        let (hierarchy, templates) = match taken {
            Ok(taken) => taken,
            Err(error) if wanted == Cgroups::Required => return Err(error.into()),
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
            return Err(NoWalls::Never(format!(
                "{} gets no controller {}",
                hierarchy.root().display(),
                names(&needed)
            )));
        }
        let shown = if missing.is_empty() {
            info!(cgroup = %hierarchy.root().display(), "walls: full");
            Shown::Full
        } else {
            let reason = format!("this host gives no controller {}", names(&missing));
            warn!(cgroup = %hierarchy.root().display(), reason, "walls: REDUCED: limits of these are NOT enforced");
            Shown::Reduced { reason }
        };
        let left = Mutex::new(hierarchy.left());
        let (hierarchy, templates, required) =
            (Some(hierarchy), Some(templates), wanted == Cgroups::Required);
        Ok(Self { hierarchy, templates, required, shown, left, ..Self::none() })
    }

    /// No cgroups, and nobody to ask for them.
    pub fn none() -> Self {
        let reason = "no cgroups were asked for".to_owned();
        Self {
            hierarchy: None,
            templates: None,
            required: false,
            shown: Shown::Reduced { reason },
            outside: Mutex::default(),
            left: Mutex::default(),
        }
    }

    /// Why a daemon that requires cgroups would not start here, where that is known.
    pub fn missing(&self) -> Option<&str> {
        let lacks = |hierarchy: &Hierarchy| hierarchy.missing().iter().any(|c| NEEDED.contains(c));
        match &self.shown {
            Shown::Reduced { reason } if self.hierarchy.as_ref().is_none_or(lacks) => Some(reason),
            Shown::Reduced { .. } | Shown::Full => None,
        }
    }

    /// As `pagedctl` shows it, with these tenants.
    pub fn shown<'a>(&self, tenants: impl Iterator<Item = (&'a str, &'a TenantWall)>) -> Shown {
        let outside = held(&self.outside);
        let mut reasons: Vec<String> = match &self.shown {
            Shown::Full => Vec::new(),
            Shown::Reduced { reason } => vec![reason.clone()],
        };
        reasons.extend(outside.iter().cloned());
        // What the whole host lacks is said once, not for each of them.
        if reasons.is_empty() {
            let fallen: Vec<_> = tenants.filter(|(_, wall)| !wall.stands()).map(|(name, _)| name).collect();
            if let [first, ..] = fallen.as_slice() {
                let who = match fallen.len() - 1 {
                    0 => format!("tenant {first}"),
                    more => format!("tenant {first} and {more} more"),
                };
                reasons.push(format!(
                    "not all limits of {who} are enforced, see `pagedctl tenant show {first}`"
                ));
            }
        }
        if reasons.is_empty() { Shown::Full } else { Shown::Reduced { reason: reasons.join("; ") } }
    }

    /// Where a template process belongs.
    ///
    /// # Errors
    /// It has no place, and the configuration requires one.
    pub fn template(&self) -> io::Result<Option<OwnedFd>> {
        let Some(templates) = &self.templates else { return Ok(None) };
        match templates.fd() {
            Ok(fd) => Ok(Some(fd)),
            Err(error) if self.required => Err(error),
            Err(error) => {
                self.stays_outside("a template process", &error);
                Ok(None)
            }
        }
    }

    /// Where a model's workers belong, one after the other.
    ///
    /// # Errors
    /// They have no place, and the configuration requires one.
    pub fn workers(&self, model: &str) -> Result<Option<Arc<WorkerCgroup>>, CgroupError> {
        let Some(hierarchy) = self.hierarchy.clone() else { return Ok(None) };
        match WorkerCgroup::new(hierarchy, model) {
            Ok(cgroup) => Ok(Some(Arc::new(cgroup))),
            Err(error) if self.required => Err(error),
            Err(error) => {
                self.stays_outside(&format!("the workers of model {model}"), &error);
                Ok(None)
            }
        }
    }

    fn stays_outside(&self, who: &str, error: &dyn std::error::Error) {
        let reason = format!("no cgroup for {who}: {error}");
        if held(&self.outside).insert(reason.clone()) {
            warn!(reason, "walls: REDUCED: these stay in the daemon's cgroup");
        }
    }

    /// A tenant's wall with these limits.
    ///
    /// # Errors
    /// A limit cannot be as it is. The cgroup is gone again if nobody is in it.
    pub async fn tenant(
        self: &Arc<Self>,
        name: &str,
        limits: CgroupLimits,
    ) -> Result<TenantWall, ControlError> {
        let name = name.to_owned();
        self.aside(move |walls| {
            let Some(hierarchy) = &walls.hierarchy else { return Ok(walls.without(&name, limits)) };
            let cgroup = hierarchy.tenant(&name).map_err(|error| refusal(&error))?;
            let before = CgroupLimits::default();
            match cgroup.check(&before, &limits).and_then(|()| tenant::put(&cgroup, &before, &limits)) {
                Ok(fit) => Ok(TenantWall::new(&name, Some(cgroup), limits, fit)),
                Err(error) => {
                    if cgroup.wait_empty(Duration::ZERO).is_ok_and(|empty| empty) {
                        drop(cgroup.remove(Duration::ZERO));
                    }
                    Err(refusal(&error))
                }
            }
        })
        .await
    }

    /// A tenant's wall with the limits that control.db has, as well as it can be had.
    ///
    /// # Errors
    /// It can have no cgroup, and the configuration requires one.
    pub async fn restored(
        self: &Arc<Self>,
        name: &str,
        saved: Option<&str>,
    ) -> Result<TenantWall, ControlError> {
        let (name, saved) = (name.to_owned(), saved.map(str::to_owned));
        self.aside(move |walls| walls.restore(&name, saved.as_deref())).await
    }

    fn restore(&self, name: &str, saved: Option<&str>) -> Result<TenantWall, ControlError> {
        let read = load_limits(saved)
            .map_err(|error| Fit::not(format!("limits in control.db cannot be read: {error}")));
        let Some(hierarchy) = &self.hierarchy else {
            return Ok(match read {
                Ok(limits) => self.without(name, limits),
                Err(fit) => TenantWall::new(name, None, CgroupLimits::default(), fit),
            });
        };
        let cgroup = match hierarchy.tenant(name) {
            Ok(cgroup) => cgroup,
            Err(error) if self.required => {
                return Err(ControlError::new(
                    ErrorCode::Internal,
                    format!("it has no cgroup, and the configuration says `cgroups: required`: {error}"),
                ));
            }
            Err(error) => {
                let fit = Fit::not(format!("it has no cgroup: {error}"));
                return Ok(TenantWall::new(name, None, read.unwrap_or_default(), fit));
            }
        };
        Ok(match read {
            Ok(limits) => {
                let fit = Fit::of(&cgroup.limit(&limits));
                TenantWall::new(name, Some(cgroup), limits, fit)
            }
            Err(fit) => TenantWall::new(name, Some(cgroup), CgroupLimits::default(), fit),
        })
    }

    fn without(&self, name: &str, limits: CgroupLimits) -> TenantWall {
        let fit = match &self.shown {
            Shown::Reduced { reason } if !limits.is_empty() => {
                Fit::not(format!("walls are reduced: {reason}"))
            }
            Shown::Reduced { .. } | Shown::Full => Fit::default(),
        };
        TenantWall::new(name, None, limits, fit)
    }

    /// Removes what an earlier daemon left of a tenant that this one does not serve.
    pub async fn forget(self: &Arc<Self>, name: &str) {
        let tenant = name.to_owned();
        let removed = self.aside(move |walls| {
            let Some(hierarchy) = &walls.hierarchy else { return Ok(()) };
            hierarchy.remove_tenant(&tenant).map_err(|error| refusal(&error))
        });
        if let Err(error) = removed.await {
            warn!(tenant = name, error = error.message, "its cgroup stays");
        }
    }

    /// Off the thread that delivers tokens: the kernel may take memory back before it answers.
    async fn aside<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self) -> Result<T, ControlError> + Send + 'static,
    ) -> Result<T, ControlError> {
        let walls = self.clone();
        let done = tokio::task::spawn_blocking(move || work(&walls)).await;
        done.map_err(|error| ControlError::new(ErrorCode::Internal, error.to_string()))?
    }

    /// Has what earlier daemons left ended and removed, all but cgroups that this one uses; on a thread of its own.
    pub fn sweep(&self) {
        let Some(hierarchy) = self.hierarchy.clone() else { return };
        let left = std::mem::take(&mut *held(&self.left));
        let sweeping = std::thread::Builder::new()
            .name("cgroup-sweep".to_owned())
            .spawn(move || hierarchy.sweep(&left, FAREWELL));
        if let Err(error) = sweeping {
            warn!(%error, "old cgroups stay");
        }
    }

    /// Ends whoever is left in the cgroups of tenants and workers, and removes them: the daemon's own end.
    pub fn clear(&self) {
        if let Some(hierarchy) = &self.hierarchy {
            hierarchy.clear();
        }
    }
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing under these locks panics.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
