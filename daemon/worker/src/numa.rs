//! Which memory nodes the compute threads run beside.
//!
//! **Owns** reading the system's lists of nodes and CPUs. **Never** places memory: [`Arena::spread`](crate::arena::Arena::spread) does.

use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;

/// The memory nodes, in ascending order, of the CPUs that this process may run on. None where the system does not say.
pub fn nodes() -> Vec<u32> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    nodes_under(Path::new("/sys/devices/system/node"), &status)
}

/// As [`nodes`], for the lists in `dir` and a process of that `status`.
fn nodes_under(dir: &Path, status: &str) -> Vec<u32> {
    let Some(allowed) =
        status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).and_then(ranges)
    else {
        return Vec::new();
    };
    let node = |entry: fs::DirEntry| {
        let node = entry.file_name().to_str()?.strip_prefix("node")?.parse::<u32>().ok()?;
        let cpus = ranges(&fs::read_to_string(entry.path().join("cpulist")).ok()?)?;
        let meet = |a: &RangeInclusive<u32>, b: &RangeInclusive<u32>| {
            a.start().max(b.start()) <= a.end().min(b.end())
        };
        cpus.iter().any(|cpus| allowed.iter().any(|allowed| meet(cpus, allowed))).then_some(node)
    };
    let mut nodes: Vec<u32> =
        fs::read_dir(dir).into_iter().flatten().filter_map(|entry| node(entry.ok()?)).collect();
    nodes.sort_unstable();
    nodes
}

/// `0-3,8,10-11`; `None` for anything else. A node without CPUs has an empty list.
fn ranges(list: &str) -> Option<Vec<RangeInclusive<u32>>> {
    let parts = list.trim().split(',').filter(|part| !part.is_empty());
    parts
        .map(|part| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            Some(first.parse().ok()?..=last.parse().ok()?)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nodes of a host with `lists` of CPUs, for a process that may run on `allowed`.
    fn nodes_of(lists: &[&str], allowed: &str) -> Vec<u32> {
        let dir = tempfile::tempdir().unwrap();
        for (node, list) in lists.iter().enumerate() {
            let node = dir.path().join(format!("node{node}"));
            fs::create_dir(&node).unwrap();
            fs::write(node.join("cpulist"), format!("{list}\n")).unwrap();
        }
        // What else lies there.
        fs::create_dir(dir.path().join("power")).unwrap();
        fs::create_dir(dir.path().join("nodes")).unwrap();
        fs::write(dir.path().join("online"), "0-1\n").unwrap();
        nodes_under(dir.path(), &format!("Name:\tx\nCpus_allowed:\tff\nCpus_allowed_list:\t{allowed}\n"))
    }

    #[test]
    fn the_nodes_of_the_allowed_cpus_are_named_and_no_others() {
        let two = ["0-3,8-11", "4-7,12-15"];
        assert_eq!(nodes_of(&two, "0-15"), [0, 1]);
        assert_eq!(nodes_of(&two, "3-4"), [0, 1]);
        assert_eq!(nodes_of(&two, "0,2,8-11"), [0]);
        assert_eq!(nodes_of(&two, "5"), [1]);
        assert_eq!(nodes_of(&["0-15"], "0-15"), [0]);
    }

    #[test]
    fn nodes_come_in_the_order_of_their_numbers() {
        let lists: Vec<String> = (0..12).map(|cpu: u32| cpu.to_string()).collect();
        let lists: Vec<&str> = lists.iter().map(String::as_str).collect();
        assert_eq!(nodes_of(&lists, "0-11"), (0..12).collect::<Vec<_>>());
    }

    #[test]
    fn a_node_without_cpus_or_with_an_unreadable_list_does_not_count() {
        assert_eq!(nodes_of(&["0-1", "", "2-x", "7"], "0-15"), [0, 3]);
    }

    #[test]
    fn a_system_that_does_not_say_has_no_nodes() {
        assert_eq!(nodes_of(&["0-1", "2-3"], "what"), [] as [u32; 0]);
        assert_eq!(nodes_under(Path::new("/nowhere"), "Cpus_allowed_list:\t0-3\n"), [] as [u32; 0]);
        assert_eq!(nodes_under(Path::new("/sys/devices/system/node"), ""), [] as [u32; 0]);
    }
}
