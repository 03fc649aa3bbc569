//! Landlock: the kernel's own refusal of files, TCP and processes outside, whatever a process's user is.
//!
//! **Owns** what is refused, and which parts of it this kernel knows. **Never** allows anything back: there is no rule.

use ::landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetCreated,
    RulesetStatus, Scope,
};

use crate::confine::{Failed, Step};

/// What Landlock can refuse.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Part {
    /// Opening, making, running or removing any file.
    Files,
    /// Binding and connecting TCP sockets.
    Tcp,
    /// Signals to processes outside, and abstract unix sockets of theirs.
    Scopes,
}

impl Part {
    /// In the order in which kernels learned them.
    pub const ALL: [Self; 3] = [Self::Files, Self::Tcp, Self::Scopes];

    /// The first version of the kernel's interface with it.
    fn since(self) -> u32 {
        match self {
            Self::Files => 1,
            Self::Tcp => 4,
            Self::Scopes => 6,
        }
    }
}

/// The kernel's Landlock, by the version of its interface; 0 where it has none, or it is not switched on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Landlock {
    version: u32,
}

impl Landlock {
    /// Whether it refuses this.
    #[must_use]
    pub fn has(self, part: Part) -> bool {
        self.version >= part.since()
    }
}

/// What this kernel has.
#[allow(unsafe_code)]
#[must_use]
pub fn landlock() -> Landlock {
    /// `LANDLOCK_CREATE_RULESET_VERSION` of the kernel's headers.
    const ASK_VERSION: u32 = 1;
    // SAFETY: with this flag the call takes no memory, makes nothing and returns a number.
    let version = unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0usize, ASK_VERSION)
    };
    Landlock { version: u32::try_from(version).unwrap_or(0) }
}

/// Puts every part in force that `kernel` has, on the calling process, which has one thread.
pub(super) fn restrict(kernel: Landlock) -> Result<(), Failed> {
    let failed = Failed { step: Step::Landlock, errno: libc::EINVAL };
    let enforced = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(ABI::V6))
        .and_then(|rules| rules.handle_access(AccessNet::from_all(ABI::V6)))
        .and_then(|rules| rules.scope(Scope::from_all(ABI::V6)))
        .and_then(Ruleset::create)
        .and_then(RulesetCreated::restrict_self)
        .map_err(|_| Failed { errno: nix::errno::Errno::last_raw(), ..failed })?;
    let all = Part::ALL.iter().all(|part| kernel.has(*part));
    match enforced.ruleset {
        RulesetStatus::FullyEnforced => Ok(()),
        RulesetStatus::PartiallyEnforced if !all => Ok(()),
        RulesetStatus::NotEnforced if !kernel.has(Part::Files) => Ok(()),
        RulesetStatus::PartiallyEnforced | RulesetStatus::NotEnforced => Err(failed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_learn_parts_in_order() {
        for (version, parts) in [(0, 0), (1, 1), (3, 1), (4, 2), (5, 2), (6, 3), (99, 3)] {
            let kernel = Landlock { version };
            assert_eq!(Part::ALL.iter().filter(|part| kernel.has(**part)).count(), parts, "{version}");
        }
    }
}
