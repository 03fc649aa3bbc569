//! What a process may still do once it serves strangers: system calls by a list, and no file, network or process of others.
//!
//! **Owns** the list of system calls and the Landlock rules, and which of these the kernel has. **Never** lets a process go on without the list:
//! what a kernel lacks of Landlock is told, what it has is in force or the process does not exist.
//!
//! The list is compiled once, before any fork: the process that enters makes system calls on memory that is there. Both hold for the process and
//! all that it could start, for ever.

mod filter;
mod rules;

use seccompiler::BpfProgram;

use crate::confine::{Failed, Step};

pub use rules::{Landlock, Part, landlock};

/// Why there is no jail.
#[derive(thiserror::Error, Debug)]
pub enum JailError {
    /// The list cannot be compiled, which tests see to, or not for this machine's processor.
    #[error("the list of system calls cannot be compiled: {0}")]
    Compile(seccompiler::BackendError),
    /// The kernel has no filters of system calls. Nothing replaces them.
    #[error(
        "this kernel has no filter of system calls (CONFIG_SECCOMP_FILTER), or one around this process forbids it"
    )]
    NoFilters,
}

/// The way into the jail.
///
/// Having one tells you that the kernel has filters of system calls. It does not tell you that anything is in force: that is a process's word that
/// has entered.
#[derive(Debug)]
pub struct Jail {
    /// Says of some calls that there are none, so that libraries do without.
    absent: BpfProgram,
    /// Forbids all calls but those of the list.
    allowed: BpfProgram,
    landlock: Landlock,
}

impl Jail {
    /// Compiles the list, and finds out what the kernel has.
    ///
    /// # Errors
    /// [`JailError`].
    pub fn new() -> Result<Self, JailError> {
        if !filter::kernel_has_filters() {
            return Err(JailError::NoFilters);
        }
        let (absent, allowed) = filter::programs().map_err(JailError::Compile)?;
        Ok(Self { absent, allowed, landlock: landlock() })
    }

    /// Locks the calling process in, which has one thread.
    pub(crate) fn enter(&self) -> Result<(), Failed> {
        rules::restrict(self.landlock)?;
        // The one that is asked last decides which error number a call gets that both refuse, and after it no filter can be added.
        for program in [&self.absent, &self.allowed] {
            seccompiler::apply_filter(program).map_err(|error| Failed {
                step: Step::Filter,
                errno: match error {
                    seccompiler::Error::Prctl(e) | seccompiler::Error::Seccomp(e) => {
                        e.raw_os_error().unwrap_or(libc::EIO)
                    }
                    seccompiler::Error::Backend(_)
                    | seccompiler::Error::EmptyFilter
                    | seccompiler::Error::ThreadSync(_) => libc::EINVAL,
                },
            })?;
        }
        Ok(())
    }
}
