//! How many threads are worth having: one per CPU that this process may really use.
//!
//! More threads than the CPU quota allows run into throttling, and every barrier then waits for a thread that is not let run.

use std::fs;
use std::path::Path;

use pagedd_core::CpuList;

use crate::cgroup::{Own, Tree, own};

/// The number of whole CPUs this process may use, at least 1: the smaller of its affinity and of the CPU quota of every
/// cgroup above it.
pub fn allowed() -> usize {
    allowed_under(Path::new("/"))
}

/// As [`allowed`], for a host whose files lie under `root`.
pub fn allowed_under(root: &Path) -> usize {
    let affinity = affinity(root).unwrap_or_else(|| {
        // Without /proc; asks the kernel for this thread's affinity.
        std::thread::available_parallelism().map_or(1, usize::from)
    });
    let v2 = own(root, Tree::V2).and_then(|own| smallest(&own, quota_v2));
    let v1 = own(root, Tree::V1("cpu")).and_then(|own| smallest(&own, quota_v1));
    [v2, v1].into_iter().flatten().fold(affinity, usize::min).max(1)
}

fn smallest(own: &Own, quota: impl Fn(&Path) -> Option<usize>) -> Option<usize> {
    own.upwards().filter_map(quota).min()
}

/// Whole CPUs of `cpu.max`; `None` where there is no limit.
fn quota_v2(dir: &Path) -> Option<usize> {
    let text = fs::read_to_string(dir.join("cpu.max")).ok()?;
    let mut words = text.split_ascii_whitespace();
    let quota: u64 = words.next()?.parse().ok()?;
    let period: u64 = words.next()?.parse().ok()?;
    whole(quota, period)
}

/// Whole CPUs of `cpu.cfs_quota_us`; `None` where it is -1.
fn quota_v1(dir: &Path) -> Option<usize> {
    let number = |file| fs::read_to_string(dir.join(file)).ok()?.trim().parse::<u64>().ok();
    whole(number("cpu.cfs_quota_us")?, number("cpu.cfs_period_us")?)
}

fn whole(quota: u64, period: u64) -> Option<usize> {
    quota.checked_div(period).and_then(|cpus| usize::try_from(cpus).ok())
}

/// CPUs that the process may run on and that are online.
fn affinity(root: &Path) -> Option<usize> {
    let status = fs::read_to_string(root.join("proc/self/status")).ok()?;
    let allowed: CpuList =
        status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?.parse().ok()?;
    // A cpuset may name CPUs that are switched off.
    let online: Option<CpuList> = fs::read_to_string(root.join("sys/devices/system/cpu/online"))
        .ok()
        .and_then(|list| list.parse().ok());
    let usable = online.map_or_else(|| allowed.clone(), |online| allowed.and(&online));
    Some(usable.count()).filter(|count| *count > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cgroup::tests::{FakeRoot, V2_MOUNT};

    fn sixteen(cgroup: &str, mounts: &str) -> FakeRoot {
        let root = FakeRoot::new(cgroup, mounts);
        root.file("proc/self/status", "Name:\tx\nCpus_allowed:\tffff\nCpus_allowed_list:\t0-15\n");
        root.file("sys/devices/system/cpu/online", "0-15\n");
        root
    }

    #[test]
    fn bug_38_a_quota_of_200_percent_on_16_cpus_is_2_threads() {
        let root = sixteen("0::/system.slice/pagedd.service/daemon\n", V2_MOUNT);
        root.file("sys/fs/cgroup/system.slice/pagedd.service/daemon/cpu.max", "max 100000\n");
        root.file("sys/fs/cgroup/system.slice/pagedd.service/cpu.max", "200000 100000\n");
        assert_eq!(allowed_under(root.path()), 2);
    }

    #[test]
    fn the_smallest_quota_of_all_ancestors_counts_rounded_down() {
        let root = sixteen("0::/a/b/c\n", V2_MOUNT);
        root.file("sys/fs/cgroup/a/cpu.max", "395000 100000\n");
        root.file("sys/fs/cgroup/a/b/cpu.max", "800000 100000\n");
        assert_eq!(allowed_under(root.path()), 3);
    }

    #[test]
    fn less_than_one_cpu_is_one_thread() {
        let root = sixteen("0::/a\n", V2_MOUNT);
        root.file("sys/fs/cgroup/a/cpu.max", "5000 100000\n");
        assert_eq!(allowed_under(root.path()), 1);
    }

    #[test]
    fn a_v1_quota_counts_and_minus_one_is_none() {
        let root = sixteen("3:cpu,cpuacct:/a/b\n", "3 2 0:1 / /cg/cpu rw - cgroup cgroup rw,cpu,cpuacct\n");
        root.file("cg/cpu/a/b/cpu.cfs_quota_us", "-1\n");
        root.file("cg/cpu/a/b/cpu.cfs_period_us", "100000\n");
        assert_eq!(allowed_under(root.path()), 16);
        root.file("cg/cpu/a/cpu.cfs_quota_us", "150000\n");
        root.file("cg/cpu/a/cpu.cfs_period_us", "50000\n");
        assert_eq!(allowed_under(root.path()), 3);
    }

    #[test]
    fn affinity_counts_only_cpus_that_are_online() {
        let root = sixteen("0::/\n", V2_MOUNT);
        root.file("proc/self/status", "Cpus_allowed_list:\t0-2,5,8-11\n");
        root.file("sys/devices/system/cpu/online", "0-1,4-9\n");
        assert_eq!(allowed_under(root.path()), 5);
    }

    #[test]
    fn unreadable_quotas_are_no_limit() {
        for text in ["", "max", "x y", "100000", "100000 0", "-5 100000"] {
            let root = sixteen("0::/\n", V2_MOUNT);
            root.file("sys/fs/cgroup/cpu.max", text);
            assert_eq!(allowed_under(root.path()), 16, "{text:?}");
        }
    }

    #[test]
    fn this_host_allows_at_least_one() {
        let here = allowed();
        assert!(here >= 1 && here <= std::thread::available_parallelism().unwrap().get(), "{here}");
    }
}
