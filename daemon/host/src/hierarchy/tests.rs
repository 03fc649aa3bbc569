use std::collections::BTreeMap;

use pagedd_core::{BlockDevice, Bytes, CgroupLimits, CpuList, CpuTime, IoLimit, Limit, LimitName, Weight};

use super::*;
use crate::cgroup::tests::{FakeRoot, V2_MOUNT};

const SERVICE: &str = "sys/fs/cgroup/system.slice/pagedd.service";

/// A host whose daemon was started in a delegated cgroup that has these controllers.
pub(super) fn service(controllers: &str) -> FakeRoot {
    let root = FakeRoot::new("0::/system.slice/pagedd.service\n", V2_MOUNT);
    for dir in ["sys/fs/cgroup", "sys/fs/cgroup/system.slice", SERVICE] {
        root.file(&format!("{dir}/cgroup.controllers"), controllers);
        root.file(&format!("{dir}/cgroup.subtree_control"), "");
        root.file(&format!("{dir}/cgroup.procs"), "");
    }
    root.file("run/systemd/system/x", "");
    root
}

pub(super) fn host(root: &FakeRoot) -> Host<'_> {
    Host { root: root.path(), euid: 0, parent: None, is_cgroup2: |_| true, is_marked: |_| true }
}

fn read(root: &FakeRoot, path: &str) -> String {
    fs::read_to_string(root.path().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Every file with its text, but for what is below `but`.
fn all(dir: &Path, but: &Path, into: &mut BTreeMap<PathBuf, String>) {
    for entry in fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.is_dir() && entry != but {
            all(&entry, but, into);
        } else if entry.is_file() {
            into.insert(entry.clone(), fs::read_to_string(&entry).unwrap());
        } else if entry.is_dir() {
            into.insert(entry, String::new());
        }
    }
}

#[test]
fn nothing_above_the_delegated_directory_is_written() {
    let root = service("cpuset cpu io memory pids rdma");
    let everything = |root: &FakeRoot| {
        let mut found = BTreeMap::new();
        all(root.path(), &root.path().join(SERVICE), &mut found);
        found
    };
    let before = everything(&root);
    let hierarchy = Hierarchy::take_on(&host(&root)).unwrap();
    hierarchy.tenant("acme").unwrap();
    let workers = hierarchy.workers("m", 0).unwrap();
    hierarchy.worker(&workers, 1).unwrap();
    hierarchy.templates().unwrap();
    assert_eq!(everything(&root), before);
    assert_eq!(read(&root, &format!("{SERVICE}/daemon/cgroup.procs")), "0", "the daemon is in its leaf");
    for dir in ["tenants/acme", "workers/m-0", "templates"] {
        assert!(hierarchy.root().join(dir).is_dir(), "{dir}");
    }
}

#[test]
fn only_controllers_that_are_listed_are_enabled() {
    let root = service("cpu memory hugetlb misc");
    let hierarchy = Hierarchy::take_on(&host(&root)).unwrap();
    assert_eq!(hierarchy.missing(), [Controller::Cpuset, Controller::Io, Controller::Pids]);
    // One write each: the last is what a plain file shows.
    for dir in ["", "/workers", "/tenants"] {
        assert_eq!(read(&root, &format!("{SERVICE}{dir}/cgroup.subtree_control")), "+memory", "{dir}");
    }
    assert!(!root.path().join(SERVICE).join("templates/cgroup.subtree_control").exists());
}

#[test]
fn workers_and_daemon_weigh_ten_thousand() {
    let root = service("cpu memory");
    for group in ["daemon", "workers", "tenants"] {
        root.file(&format!("{SERVICE}/{group}/cpu.weight"), "100\n");
    }
    Hierarchy::take_on(&host(&root)).unwrap();
    let weights = ["daemon", "workers", "tenants"].map(|g| read(&root, &format!("{SERVICE}/{g}/cpu.weight")));
    assert_eq!(weights, ["10000", "10000", "100\n"]);
}

#[test]
fn a_daemon_that_the_keeper_starts_again_takes_what_the_last_one_divided() {
    let root = service("cpu memory");
    Hierarchy::take_on(&host(&root)).unwrap();
    root.file("proc/self/cgroup", "0::/system.slice/pagedd.service/daemon\n");
    let again = Hierarchy::take_on(&host(&root)).unwrap();
    assert_eq!(again.root(), root.path().join(SERVICE));
    // Others may call a cgroup so, too.
    let other = service("cpu memory");
    other.file("proc/self/cgroup", "0::/system.slice/daemon\n");
    for file in ["cgroup.controllers", "cgroup.subtree_control", "cgroup.procs"] {
        other.file(&format!("sys/fs/cgroup/system.slice/daemon/{file}"), "");
    }
    let own = Hierarchy::take_on(&host(&other)).unwrap();
    assert_eq!(own.root(), other.path().join("sys/fs/cgroup/system.slice/daemon"));
}

#[test]
fn bug_40_a_hybrid_or_v1_host_is_named_and_nothing_is_written() {
    let v1 = "31 22 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n\
              32 22 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";
    let named = "33 22 0:29 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n";
    for (mounts, said) in [
        (
            format!("{V2_MOUNT}{v1}"),
            Some("a hybrid host: cgroup v1 has the controllers cpu, memory; boot it with"),
        ),
        (v1.to_owned(), Some("this host has no cgroup v2; boot it with systemd.unified_cgroup_hierarchy=1")),
        (String::new(), Some("this host has no cgroup v2")),
        (format!("{V2_MOUNT}{named}"), None),
    ] {
        let root = service("cpu memory");
        root.file("proc/self/mountinfo", &mounts);
        let taken = Hierarchy::take_on(&host(&root)).map_err(|e| e.to_string());
        match said {
            Some(said) => {
                let error = taken.unwrap_err();
                assert!(error.starts_with(said), "{mounts}: {error}");
                assert!(!root.path().join(SERVICE).join("daemon").exists(), "{mounts}");
            }
            None => assert!(taken.is_ok(), "{mounts}: {taken:?}"),
        }
    }
    let root = service("cpu memory");
    let tmpfs = Host { is_cgroup2: |_| false, ..host(&root) };
    assert!(
        matches!(Hierarchy::take_on(&tmpfs), Err(NoHierarchy::NoV2)),
        "another file system under the name"
    );
}

#[test]
fn what_systemd_did_not_delegate_is_left_alone() {
    let why = |host: &Host<'_>| match Hierarchy::take_on(host) {
        Err(NoHierarchy::NotDelegated { why, .. }) => why,
        other => panic!("{other:?}"),
    };
    let root = service("cpu memory");
    let unmarked = Host { is_marked: |_| false, ..host(&root) };
    assert_eq!(why(&unmarked), NotDelegated::Systemd, "root, by hand");
    let owner = rustix::process::geteuid().as_raw();
    for user in [4_000_000, owner] {
        let host = Host { euid: user, is_marked: |_| false, ..host(&root) };
        assert_eq!(why(&host), NotDelegated::Systemd, "user {user}, whoever owns it");
    }
    assert!(!root.path().join(SERVICE).join("daemon").exists());

    // Without systemd nobody else manages a cgroup; but the root of all is never one process's.
    let root = service("cpu memory");
    fs::remove_dir_all(root.path().join("run/systemd")).unwrap();
    let unmarked = Host { is_marked: |_| false, ..host(&root) };
    assert_eq!(why(&Host { euid: 4_000_000, is_marked: |_| false, ..host(&root) }), NotDelegated::Foreign);
    assert_eq!(why(&unmarked), NotDelegated::Root);
    root.file(&format!("{SERVICE}/cgroup.type"), "domain\n");
    assert!(Hierarchy::take_on(&unmarked).is_ok());
}

#[test]
fn other_processes_in_the_cgroup_are_named() {
    let root = service("cpu memory");
    root.file(&format!("{SERVICE}/cgroup.procs"), "4711\n4712\n");
    root.file("proc/4711/comm", "bash\n");
    let error = Hierarchy::take_on(&host(&root)).unwrap_err().to_string();
    assert!(error.ends_with("pagedd.service has other processes in it: 4711 (bash), 4712 ()"), "{error}");
    assert_eq!(read(&root, &format!("{SERVICE}/cgroup.subtree_control")), "", "no half of the controllers");
}

/// A tenant's cgroup with the kernel's files as they are at first.
fn tenant(root: &FakeRoot) -> Cgroup {
    let files = [
        ("cpu.max", "max 100000\n"),
        ("cpu.weight", "100\n"),
        ("cpuset.cpus", "\n"),
        ("memory.max", "max\n"),
        ("memory.high", "max\n"),
        ("pids.max", "max\n"),
        ("io.max", ""),
        ("io.weight", "default 100\n"),
    ];
    for (file, text) in files {
        root.file(&format!("{SERVICE}/tenants/a/{file}"), text);
    }
    root.file(&format!("{SERVICE}/tenants/cpuset.cpus.effective"), "0-1,4\n");
    Hierarchy::take_on(&host(root)).unwrap().tenant("a").unwrap()
}

fn files(root: &FakeRoot) -> [String; 8] {
    LimitName::ALL.map(|name| read(root, &format!("{SERVICE}/tenants/a/{name}")))
}

fn not_in_force(applied: &Applied) -> Vec<String> {
    let unenforced = applied.unenforced.iter().map(ToString::to_string);
    let left_out = (!applied.left_out.is_empty()).then(|| format!("left out: {}", applied.left_out));
    let failed = applied.failed.iter().map(|(name, error)| format!("{name}: {error}"));
    unenforced.chain(left_out).chain(failed).collect()
}

fn some_limits() -> CgroupLimits {
    CgroupLimits {
        cpu_max: Limit::At(CpuTime::from_hundredths(5_000).unwrap()),
        cpu_weight: Weight::new(7),
        cpus: Some("0-1".parse().unwrap()),
        memory_max: Limit::At(Bytes(256 << 20)),
        memory_high: Limit::At(Bytes(128 << 20)),
        pids_max: Limit::At(40),
        io_max: vec![IoLimit {
            device: BlockDevice::Number { major: 8, minor: 16 },
            read_bytes: Limit::At(Bytes(1 << 20)),
            write_bytes: Limit::Max,
            reads: Limit::At(100),
            writes: Limit::Max,
        }],
        io_weight: Weight::new(9),
    }
}

#[test]
fn limits_are_written_as_the_kernel_reads_them_and_taken_away_again() {
    let root = service("cpuset cpu io memory pids");
    let cgroup = tenant(&root);
    root.file(&format!("{SERVICE}/tenants/a/memory.swap.max"), "max\n");
    let swap = || read(&root, &format!("{SERVICE}/tenants/a/memory.swap.max"));
    assert_eq!(not_in_force(&cgroup.limit(&some_limits())), [""; 0]);
    assert_eq!(swap(), "0", "what is over memory.max is not to fill the host's swap");
    let io = "8:16 rbps=1048576 wbps=max riops=100 wiops=max";
    assert_eq!(
        files(&root),
        ["50000 100000", "7", "0-1", "268435456", "134217728", "40", io, "default 9"].map(str::to_owned)
    );
    assert_eq!(not_in_force(&cgroup.limit(&CgroupLimits::default())), [""; 0]);
    assert_eq!(swap(), "max");
    let io = "8:16 rbps=max wbps=max riops=max wiops=max";
    assert_eq!(
        files(&root),
        ["max 100000", "100", "\n", "max", "max", "max", io, "default 100"].map(str::to_owned)
    );
}

#[test]
fn limits_that_the_host_cannot_enforce_are_named() {
    let root = service("cpu memory");
    let cgroup = tenant(&root);
    for file in ["cpuset.cpus", "io.max", "io.weight", "pids.max"] {
        fs::remove_file(root.path().join(SERVICE).join("tenants/a").join(file)).unwrap();
    }
    let applied = cgroup.limit(&some_limits());
    let names: Vec<_> = applied.unenforced.iter().map(|Unenforced(name)| *name).collect();
    assert_eq!(names, [LimitName::Cpus, LimitName::PidsMax, LimitName::IoMax, LimitName::IoWeight]);
    let said = applied.unenforced[0].to_string();
    assert_eq!(said, "cpuset.cpus: this host's cpuset controller is missing, or has no such file");
    assert_eq!(not_in_force(&cgroup.limit(&CgroupLimits::default())), [""; 0]);
}

#[test]
fn bug_39_cpus_that_are_not_there_are_left_out_and_none_at_all_is_an_error() {
    let root = service("cpuset cpu io memory pids");
    let cgroup = tenant(&root);
    let ask = |cpus: &str| CgroupLimits { cpus: Some(cpus.parse().unwrap()), ..CgroupLimits::default() };
    let applied = cgroup.limit(&ask("0-3"));
    assert_eq!((files(&root)[2].as_str(), applied.left_out), ("0-1", "2-3".parse::<CpuList>().unwrap()));
    let check = |before: &CgroupLimits, after: &CgroupLimits| {
        cgroup.check(before, after).map_err(|error| error.to_string())
    };
    let said = "none of the CPUs 2-3,5 can be used: there are 0-1,4";
    assert_eq!(check(&ask("0-3"), &ask("2-3,5")), Err(said.to_owned()));
    assert_eq!(check(&ask("2-3,5"), &ask("2-3,5")), Ok(()), "what was there before is not what is asked");
}

#[test]
fn cpu_time_of_more_cpus_than_there_are_is_said_to_hold_nothing_up() {
    let root = service("cpuset cpu io memory pids");
    let cgroup = tenant(&root);
    let more = |hundredths| {
        let cpu_max = Limit::At(CpuTime::from_hundredths(hundredths).unwrap());
        cgroup.limit(&CgroupLimits { cpu_max, ..CgroupLimits::default() }).cpus_below_max
    };
    assert_eq!([more(30_000), more(30_001), more(500_000)], [None, Some(3), Some(3)], "of 0-1,4");
}

#[test]
fn a_limit_that_the_host_refuses_keeps_no_other_from_being_in_force() {
    let root = service("cpuset cpu io memory pids");
    let cgroup = tenant(&root);
    // A directory takes no text.
    for file in ["cpu.weight", "pids.max"] {
        let path = root.path().join(SERVICE).join("tenants/a").join(file);
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
    }
    let mut limits = CgroupLimits { cpus: Some("2-3".parse().unwrap()), ..some_limits() };
    let bad = IoLimit { device: BlockDevice::Path("/dev/null".to_owned()), ..limits.io_max[0].clone() };
    limits.io_max.insert(0, bad);
    let said = not_in_force(&cgroup.limit(&limits));
    let names: Vec<_> = said.iter().filter_map(|line| line.split(':').next()).collect();
    assert_eq!(names, ["cpu.weight", "cpuset.cpus", "pids.max", "io.max"], "{said:?}");
    for (file, text) in [
        ("cpu.max", "50000 100000"),
        ("cpuset.cpus", "\n"),
        ("memory.max", "268435456"),
        ("memory.high", "134217728"),
        ("io.max", "8:16 rbps=1048576 wbps=max riops=100 wiops=max"),
        ("io.weight", "default 9"),
    ] {
        assert_eq!(read(&root, &format!("{SERVICE}/tenants/a/{file}")), text, "{file}");
    }
}

#[test]
fn a_limit_below_use_is_refused_with_the_numbers() {
    let root = service("cpu memory pids");
    let cgroup = tenant(&root);
    for (file, text) in [
        ("memory.current", "110000000\n"),
        ("memory.stat", "anon 9\ninactive_file 6000000\nactive_file 4000000\n"),
        ("pids.current", "6\n"),
    ] {
        root.file(&format!("{SERVICE}/tenants/a/{file}"), text);
    }
    let none = CgroupLimits::default();
    let memory = |bytes| CgroupLimits { memory_max: Limit::At(Bytes(bytes)), ..CgroupLimits::default() };
    let refused = |before: &CgroupLimits, after: &CgroupLimits| {
        cgroup.check_use(before, after).map_err(|e| e.to_string())
    };
    assert_eq!(
        refused(&none, &memory(99_999_999)),
        Err("memory.max 99999999 is below present use, 100000000".to_owned())
    );
    assert_eq!(refused(&none, &memory(100_000_000)), Ok(()), "pages of files make room by themselves");
    assert_eq!(refused(&memory(5), &memory(5)), Ok(()), "a limit that was there before is not what is asked");
    assert!(refused(&memory(5), &memory(4)).is_err());
    let pids = CgroupLimits { pids_max: Limit::At(5), ..CgroupLimits::default() };
    assert_eq!(refused(&none, &pids), Err("pids.max 5 is below present use, 6".to_owned()));
    let high = CgroupLimits { memory_high: Limit::At(Bytes(1 << 20)), ..CgroupLimits::default() };
    assert!(refused(&none, &high).unwrap_err().starts_with("memory.high"), "it would stall for ever");
}

#[test]
fn what_is_used_is_read_and_what_is_not_there_is_not_known() {
    let root = service("cpu memory pids");
    let cgroup = tenant(&root);
    assert_eq!(cgroup.usage(), Usage::default());
    for (file, text) in [
        ("memory.current", "1000\n"),
        ("memory.peak", "2000\n"),
        ("memory.events", "low 0\nhigh 3\nmax 7\noom 2\noom_kill 1\noom_group_kill 0\n"),
        ("cpu.stat", "usage_usec 50\nuser_usec 20\nnr_throttled 4\nthrottled_usec 60\n"),
        ("pids.current", "3\n"),
        ("pids.events", "max 5\n"),
        (
            "memory.pressure",
            "some avg10=1.50 avg60=0.00 avg300=0.00 total=77\nfull avg10=0.25 avg60=0.00 avg300=0.00 total=7\n",
        ),
        ("cpu.pressure", "some avg10=0.00 avg60=0.00 avg300=0.00 total=12\n"),
        ("io.pressure", "garbage"),
    ] {
        root.file(&format!("{SERVICE}/tenants/a/{file}"), text);
    }
    let usage = cgroup.usage();
    assert_eq!((usage.memory, usage.memory_peak), (Some(Bytes(1000)), Some(Bytes(2000))));
    assert_eq!((usage.oom_kills, usage.cpu_us, usage.throttled_us), (Some(1), Some(50), Some(60)));
    assert_eq!((usage.pids, usage.pids_refused), (Some(3), Some(5)));
    let (some, full) = (Stall { total_us: 77, avg10: 1.5 }, Stall { total_us: 7, avg10: 0.25 });
    assert_eq!(usage.memory_pressure, Some(Pressure { some, full: Some(full) }));
    let some = Stall { total_us: 12, avg10: 0.0 };
    assert_eq!(usage.cpu_pressure, Some(Pressure { some, full: None }));
    assert_eq!(usage.io_pressure, None);
}

#[test]
fn a_cgroup_with_processes_is_not_taken_for_empty() {
    let root = service("cpu memory");
    let cgroup = tenant(&root);
    root.file(&format!("{SERVICE}/tenants/a/cgroup.events"), "populated 1\nfrozen 0\n");
    assert!(!cgroup.wait_empty(Duration::ZERO).unwrap());
    root.file(&format!("{SERVICE}/tenants/a/cgroup.events"), "populated 0\nfrozen 0\n");
    assert!(cgroup.wait_empty(Duration::ZERO).unwrap());
    fs::remove_dir_all(cgroup.path()).unwrap();
    assert!(cgroup.wait_empty(Duration::ZERO).unwrap(), "one that is gone is empty");
    cgroup.remove(Duration::ZERO).unwrap();
}

#[test]
fn what_the_kernel_still_takes_apart_is_removed_a_moment_later_and_other_errors_are_final() {
    let root = service("cpu memory");
    let cgroup = tenant(&root);
    let patience = Duration::from_mins(1);
    let mut tries = 0;
    let removed = cgroup.unless_busy(patience, || {
        tries += 1;
        if tries < 3 { Err(io::ErrorKind::ResourceBusy.into()) } else { Ok(()) }
    });
    assert_eq!((removed.map_err(|e| e.to_string()), tries), (Ok(()), 3));
    let busy = || Err(io::ErrorKind::ResourceBusy.into());
    assert!(cgroup.unless_busy(Duration::ZERO, busy).is_err());
    assert!(cgroup.unless_busy(patience, || Err(io::ErrorKind::PermissionDenied.into())).is_err());
}

#[test]
fn an_error_names_its_file_once() {
    let root = service("cpu memory");
    fs::remove_file(root.path().join(SERVICE).join("cgroup.controllers")).unwrap();
    let error = Hierarchy::take_on(&host(&root)).unwrap_err();
    assert!(matches!(error, NoHierarchy::Cgroup(_)), "{error:?}");
    let error = error.to_string();
    assert!(error.contains("/cgroup.controllers: No such file"), "{error}");
    assert_eq!(error.matches("cgroup.controllers").count(), 1, "{error}");
}

#[test]
fn a_tenants_cgroup_that_an_earlier_daemon_left_goes_with_the_tenant() {
    let root = service("cpu memory");
    let hierarchy = Hierarchy::take_on(&host(&root)).unwrap();
    hierarchy.remove_tenant("a").unwrap();
    let dir = hierarchy.root().join("tenants/a");
    fs::create_dir(&dir).unwrap();
    let error = hierarchy.remove_tenant("a").unwrap_err().to_string();
    assert!(error.contains("tenants/a/cgroup.events"), "no proof that nobody is in it: {error}");
    assert!(dir.exists());
}
