//! What gateways can be held by on this host, with this daemon's rights.
//!
//! **Owns** the look, and what is said of it. **Never** confines anything: the template process does, and starts no gateway without all that
//! is found here.

use std::io;

use pagedd_control::{SandboxPart, SandboxState};
use pagedd_host::jail::{Jail, JailError, Part, landlock};
use pagedd_host::lacks_for_users;
use tracing::warn;

/// Why no gateway could be started.
#[derive(thiserror::Error, Debug)]
pub enum SandboxError {
    /// The kernel lacks what nothing replaces.
    #[error("no gateway can be confined: {0}")]
    Jail(#[from] JailError),
    /// The kernel does not say what this process may do.
    #[error("the daemon's capabilities cannot be read: {0}")]
    Capabilities(#[from] io::Error),
}

/// What was found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Sandbox {
    missing: Vec<SandboxPart>,
}

/// Looks, and says loudly what is missing.
///
/// # Errors
/// No gateway may be started here.
pub fn find() -> Result<Sandbox, SandboxError> {
    // The template makes its own; that one can be made is what counts.
    Jail::new()?;
    let mut missing = Vec::new();
    let lacking = lacks_for_users()?;
    if !lacking.is_empty() {
        let lacking = lacking.join(", ");
        warn!(lacking, "gateways run as the daemon's own user: it may not start processes of others");
        missing.push(SandboxPart::OwnUser);
    }
    let kernel = landlock();
    let absent = Part::ALL.iter().filter(|part| !kernel.has(**part)).map(|part| match part {
        Part::Files => SandboxPart::LandlockFiles,
        Part::Tcp => SandboxPart::LandlockTcp,
        Part::Scopes => SandboxPart::LandlockScopes,
    });
    let before = missing.len();
    missing.extend(absent);
    if missing.len() > before {
        let parts: Vec<&str> = missing[before..].iter().map(|part| part.as_str()).collect();
        warn!(missing = parts.join(", "), "this kernel has less than gateways could be held by");
    }
    Ok(Sandbox { missing })
}

impl Sandbox {
    /// Whether every gateway gets a user of its own.
    pub fn gives_users(&self) -> bool {
        !self.missing.contains(&SandboxPart::OwnUser)
    }

    /// For status.
    pub fn state(&self) -> SandboxState {
        match self.missing.as_slice() {
            [] => SandboxState::Full,
            missing => SandboxState::Reduced { missing: missing.to_vec() },
        }
    }
}
