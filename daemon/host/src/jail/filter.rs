//! The list of system calls that a gateway needs: to serve connections that it is given, to compute, to end.
//!
//! **Owns** the list and the conditions on arguments. **Never** allows what opens, makes, connects, signals, traces or runs anything: a call that
//! is not listed fails with `EPERM`, and one of another architecture ends the process.

use std::collections::BTreeMap;

use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

/// How `pthread_create` clones: a thread of this process. musl adds the flag of a detached one.
const THREAD: libc::c_int = libc::CLONE_VM
    | libc::CLONE_FS
    | libc::CLONE_FILES
    | libc::CLONE_SIGHAND
    | libc::CLONE_THREAD
    | libc::CLONE_SYSVSEM
    | libc::CLONE_SETTLS
    | libc::CLONE_PARENT_SETTID
    | libc::CLONE_CHILD_CLEARTID;

/// Allowed with any arguments.
const ANY: &[libc::c_long] = &[
    // Connections that were accepted, the daemon's socket, the log.
    libc::SYS_read,
    libc::SYS_readv,
    libc::SYS_write,
    libc::SYS_writev,
    libc::SYS_recvfrom,
    libc::SYS_accept4,
    libc::SYS_close,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    // Waiting.
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_eventfd2,
    libc::SYS_futex,
    libc::SYS_sched_yield,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_restart_syscall,
    // Clocks, where the kernel's page for them does not do, and randomness.
    libc::SYS_clock_gettime,
    libc::SYS_gettimeofday,
    libc::SYS_getrandom,
    // Memory.
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    // Threads, and the process's own signals. None can be sent: `abort` ends the process all the same, by an instruction that faults.
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_getpid,
    libc::SYS_gettid,
    libc::SYS_sched_getaffinity,
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    // The other filter says that there is none: its flags lie in memory, which no filter sees.
    libc::SYS_clone3,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// A condition on one argument: its place, and what its lower half is compared with. The kernel reads no more of any of these.
type Argument = (u8, SeccompCmpOp, u64);

/// Of `sendto`: an address of no bytes is none.
const LENGTH_OF_ADDRESS: u8 = 5;

/// Allowed where all conditions of a line hold.
fn conditional() -> Vec<(libc::c_long, Vec<Argument>)> {
    use SeccompCmpOp::{Eq, MaskedEq};
    let number = |value: libc::c_int| value as u64;
    let no_code = MaskedEq(number(libc::PROT_EXEC));
    let mut lines = vec![
        // Memory of its own, never a file's, and never code.
        (
            libc::SYS_mmap,
            vec![
                (2, no_code.clone(), 0),
                (3, MaskedEq(number(libc::MAP_ANONYMOUS)), number(libc::MAP_ANONYMOUS)),
            ],
        ),
        (libc::SYS_mprotect, vec![(2, no_code, 0)]),
        // To nobody but the peer: with an address, a listening socket that was shut down could be made to connect.
        (libc::SYS_sendto, vec![(3, Eq, number(libc::MSG_NOSIGNAL)), (LENGTH_OF_ADDRESS, Eq, 0)]),
        (libc::SYS_sendto, vec![(3, Eq, 0), (LENGTH_OF_ADDRESS, Eq, 0)]),
        // Of a listening socket this does nothing; anything else would end the port, which is the daemon's.
        (libc::SYS_shutdown, vec![(1, Eq, number(libc::SHUT_WR))]),
        (libc::SYS_setsockopt, vec![(1, Eq, number(libc::IPPROTO_TCP)), (2, Eq, number(libc::TCP_NODELAY))]),
        (libc::SYS_getsockopt, vec![(1, Eq, number(libc::SOL_SOCKET)), (2, Eq, number(libc::SO_ERROR))]),
        // Two ends of its own, by which the runtime wakes itself; there is no way to send an fd through them, nor to connect them elsewhere.
        (libc::SYS_socketpair, vec![(0, Eq, number(libc::AF_UNIX))]),
        (libc::SYS_ioctl, vec![(1, Eq, libc::FIONBIO)]),
        // Its own limits.
        (libc::SYS_prlimit64, vec![(0, Eq, 0)]),
        (libc::SYS_prctl, vec![(0, Eq, number(libc::PR_SET_NAME))]),
    ];
    // Not among them: who gets a signal when an fd is ready, and flags of what it shares with the daemon.
    for command in [libc::F_DUPFD_CLOEXEC, libc::F_GETFD, libc::F_SETFD, libc::F_GETFL] {
        lines.push((libc::SYS_fcntl, vec![(1, Eq, number(command))]));
    }
    for flags in [THREAD, THREAD | libc::CLONE_DETACHED] {
        lines.push((libc::SYS_clone, vec![(0, Eq, number(flags))]));
    }
    lines
}

fn rule(arguments: Vec<Argument>) -> Result<SeccompRule, BackendError> {
    let condition =
        |(index, operator, value)| SeccompCondition::new(index, SeccompCmpArgLen::Dword, operator, value);
    SeccompRule::new(arguments.into_iter().map(condition).collect::<Result<_, _>>()?)
}

/// The filter that says that calls do not exist, and the one that allows by list, to be applied in this order.
pub(super) fn programs() -> Result<(BpfProgram, BpfProgram), BackendError> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    // The C library then clones by the older call, and takes the affinity of another thread as unknown.
    let absent = BTreeMap::from([
        (libc::SYS_clone3, Vec::new()),
        (libc::SYS_sched_getaffinity, vec![rule(vec![(0, SeccompCmpOp::Ne, 0)])?]),
    ]);
    let none = SeccompAction::Errno(libc::ENOSYS.unsigned_abs());
    let absent = SeccompFilter::new(absent, SeccompAction::Allow, none, arch)?;

    let mut allowed: BTreeMap<i64, Vec<SeccompRule>> =
        ANY.iter().map(|number| (*number, Vec::new())).collect();
    for (number, arguments) in conditional() {
        allowed.entry(number).or_default().push(rule(arguments)?);
    }
    let refuse = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    let allowed = SeccompFilter::new(allowed, refuse, SeccompAction::Allow, arch)?;
    Ok((absent.try_into()?, allowed.try_into()?))
}

/// Whether a filter could be installed here.
#[allow(unsafe_code)]
pub(super) fn kernel_has_filters() -> bool {
    let action = libc::SECCOMP_RET_ERRNO;
    // SAFETY: the call reads the four bytes of `action`, which outlives it, and changes nothing.
    let available = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0, std::ptr::from_ref(&action))
    };
    available == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_compiles_and_is_short_enough_for_the_kernel() {
        let (absent, allowed) = programs().unwrap();
        // BPF_MAXINSNS of the kernel.
        assert!(allowed.len() < 4096, "{}", allowed.len());
        assert!(absent.len() < 32, "{}", absent.len());
    }

    #[test]
    fn no_call_is_allowed_both_with_any_arguments_and_with_some() {
        for (number, _) in conditional() {
            assert!(!ANY.contains(&number), "system call {number}");
        }
    }

    #[test]
    fn what_opens_connects_signals_traces_or_runs_is_not_listed() {
        let listed: Vec<_> =
            ANY.iter().copied().chain(conditional().into_iter().map(|(number, _)| number)).collect();
        for number in [
            libc::SYS_openat,
            libc::SYS_openat2,
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_socket,
            libc::SYS_connect,
            libc::SYS_bind,
            libc::SYS_sendmsg,
            libc::SYS_recvmsg,
            libc::SYS_kill,
            libc::SYS_tgkill,
            libc::SYS_tkill,
            libc::SYS_rt_sigqueueinfo,
            libc::SYS_ptrace,
            libc::SYS_process_vm_readv,
            libc::SYS_process_vm_writev,
            libc::SYS_pidfd_open,
            libc::SYS_pidfd_getfd,
            libc::SYS_pidfd_send_signal,
            libc::SYS_mount,
            libc::SYS_bpf,
            libc::SYS_perf_event_open,
            libc::SYS_io_uring_setup,
            libc::SYS_userfaultfd,
            libc::SYS_keyctl,
            libc::SYS_unshare,
            libc::SYS_setns,
            libc::SYS_seccomp,
        ] {
            assert!(!listed.contains(&number), "system call {number}");
        }
    }
}
