//! The wall of one tenant.
//!
//! **Owns** its cgroup, and what is said of limits that are not in force. **Never** takes a limit for enforced that is not.

use std::sync::Arc;

use pagedd_config::limit_text;
use pagedd_control::{ControlError, ErrorCode, WallInfo};
use pagedd_core::{CgroupLimits, LimitName};
use pagedd_host::hierarchy::{Applied, Cgroup, CgroupError};
use tracing::warn;

use super::{DEATH, Walls, refusal, texts, usage};

/// How far limits are in force.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Fit {
    not_enforced: Vec<String>,
}

impl Fit {
    /// For one reason, not all of them.
    pub(super) fn not(reason: String) -> Self {
        Self { not_enforced: vec![reason] }
    }

    pub(super) fn of(applied: &Applied) -> Self {
        let mut not_enforced: Vec<_> = applied.unenforced.iter().map(ToString::to_string).collect();
        if !applied.left_out.is_empty() {
            let line = format!(
                "{}: CPUs {} are offline, or not pagedd's, and left out",
                LimitName::Cpus,
                applied.left_out
            );
            not_enforced.push(line);
        }
        if let Some(cpus) = applied.cpus_below_max {
            let line = format!(
                "{}: more than the CPUs that there are, {cpus}, so that it holds nothing up; without `%` a number is one of CPUs",
                LimitName::CpuMax
            );
            not_enforced.push(line);
        }
        not_enforced.extend(applied.failed.iter().map(|(name, error)| match error {
            CgroupError::Limit { .. } => error.to_string(),
            _ => format!("{name}: {error}"),
        }));
        Self { not_enforced }
    }
}

/// A tenant's wall. A copy stands for the same cgroup, which only one of them removes.
#[derive(Clone)]
pub struct TenantWall {
    name: String,
    cgroup: Option<Arc<Cgroup>>,
    limits: CgroupLimits,
    fit: Fit,
}

impl TenantWall {
    pub(super) fn new(name: &str, cgroup: Option<Cgroup>, limits: CgroupLimits, fit: Fit) -> Self {
        let wall = Self { name: name.to_owned(), cgroup: cgroup.map(Arc::new), limits, fit };
        wall.say();
        wall
    }

    /// The one place where the log hears of it.
    fn say(&self) {
        for reason in &self.fit.not_enforced {
            warn!(tenant = self.name, reason, "a limit is not enforced as it was given");
        }
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

    /// Why limits that it was given are not enforced as they were.
    pub fn unmet(&self) -> impl Iterator<Item = &str> {
        let given = self.limits != CgroupLimits::default();
        self.fit.not_enforced.iter().filter(move |_| given).map(String::as_str)
    }

    /// Other limits, in force when it returns. With `force` they may be below what is in use. What could not be put into force before is tried
    /// again, and refused only where it is asked for anew.
    ///
    /// # Errors
    /// Everything is as it was, as far as that can be put back; what cannot is said with the limits.
    pub async fn change(
        &mut self,
        walls: &Walls,
        limits: CgroupLimits,
        force: bool,
    ) -> Result<(), ControlError> {
        if limits == self.limits && self.stands() {
            return Ok(());
        }
        let Some(cgroup) = self.cgroup.clone() else {
            let reason = self.fit.not_enforced.first().cloned().filter(|_| walls.hierarchy.is_some());
            let changed = walls.without(&self.name, limits);
            self.limits = changed.limits;
            self.fit = reason.map_or(changed.fit, Fit::not);
            return Ok(());
        };
        let (before, after) = (self.limits.clone(), limits.clone());
        // The kernel may take memory back before it answers.
        let changed = tokio::task::spawn_blocking(move || change(&cgroup, &before, &after, force));
        match changed.await.map_err(|e| ControlError::new(ErrorCode::Internal, e.to_string()))? {
            Ok(fit) => {
                self.limits = limits;
                self.fit = fit;
                self.say();
                Ok(())
            }
            Err(Refused { error, now }) => {
                if let Some(now) = now.filter(|now| *now != self.fit) {
                    self.fit = now;
                    self.say();
                }
                Err(refusal(&error))
            }
        }
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
    pub async fn info(&self, device_bytes: u64) -> WallInfo {
        let cgroup = self.cgroup.clone();
        // A dozen small files: not on the thread that delivers tokens.
        let read = move || cgroup.map(|cgroup| usage(&cgroup.usage()));
        WallInfo {
            limits: texts(&self.limits),
            not_enforced: self.fit.not_enforced.clone(),
            usage: tokio::task::spawn_blocking(read).await.unwrap_or_default(),
            device_bytes,
        }
    }
}

/// Limits that are not as they were to be.
#[derive(Debug)]
struct Refused {
    error: CgroupError,
    /// How far those before are in force again, where others were tried.
    now: Option<Fit>,
}

fn change(cgroup: &Cgroup, before: &CgroupLimits, after: &CgroupLimits, force: bool) -> Result<Fit, Refused> {
    let refused = |error| Refused { error, now: None };
    cgroup.check(before, after).map_err(refused)?;
    if !force {
        cgroup.check_use(before, after).map_err(refused)?;
    }
    put(cgroup, before, after).map_err(|error| {
        let now = Some(Fit::of(&cgroup.limit(before)));
        Refused { error, now }
    })
}

/// Puts every limit into force that can be.
///
/// # Errors
/// The first that cannot, of those that are other than before: one that was not in force already is not what is asked.
pub(super) fn put(cgroup: &Cgroup, before: &CgroupLimits, after: &CgroupLimits) -> Result<Fit, CgroupError> {
    let mut applied = cgroup.limit(after);
    let asked = |name| limit_text(before, name) != limit_text(after, name);
    match applied.failed.iter().position(|(name, _)| asked(*name)) {
        None => Ok(Fit::of(&applied)),
        Some(first) => Err(applied.failed.swap_remove(first).1),
    }
}
