use std::fs;
use std::path::Path;

use tempfile::TempDir;

use super::*;

/// Walls on a plain directory, in which the cgroup of tenant `a` has the kernel's files.
fn made_up(required: bool) -> (TempDir, Arc<Walls>) {
    let root = tempfile::tempdir().expect("a directory");
    let hierarchy = Hierarchy::made_up(root.path()).expect("a tree");
    let tenant = root.path().join("tenants/a");
    fs::create_dir(&tenant).expect("a tenant's");
    for name in LimitName::ALL {
        fs::write(tenant.join(name.file()), "").expect("a file");
    }
    fs::write(tenant.join("cpu.max"), "max 100000\n").expect("a file");
    fs::write(root.path().join("tenants/cpuset.cpus.effective"), "0-1\n").expect("a file");
    let templates = Some(hierarchy.templates().expect("made"));
    let hierarchy = Some(hierarchy);
    let walls = Walls { hierarchy, templates, required, shown: Shown::Full, ..Walls::none() };
    (root, Arc::new(walls))
}

fn read(root: &TempDir, file: &str) -> String {
    fs::read_to_string(root.path().join("tenants/a").join(file)).expect("a file")
}

/// The kernel takes nothing for it any more, or again.
fn refuses(root: &TempDir, file: &str, refuses: bool) {
    let path = root.path().join("tenants/a").join(file);
    if refuses {
        fs::remove_file(&path).expect("there");
        fs::create_dir(&path).expect("a directory takes no text");
    } else {
        fs::remove_dir(&path).expect("there");
        fs::write(&path, "").expect("a file");
    }
}

async fn not_enforced(wall: &TenantWall) -> Vec<String> {
    wall.info(0).await.not_enforced
}

fn limits(texts: &[(LimitName, &str)]) -> CgroupLimits {
    let mut given = LimitTexts::default();
    for (name, text) in texts {
        given.set(*name, Some((*text).to_owned()));
    }
    changed(&CgroupLimits::default(), &given).expect("limits")
}

#[test]
fn switched_off_is_said_and_is_no_failure() {
    let walls = Walls::build(Cgroups::Off).map_err(|error| panic!("{error}")).ok();
    let shown = walls.map(|walls| walls.shown([].into_iter()));
    assert_eq!(shown, Some(Shown::Reduced { reason: "`cgroups: off` in the configuration".to_owned() }));
}

#[tokio::test]
async fn without_cgroups_limits_are_kept_and_said_not_to_be_enforced() {
    let walls = Arc::new(Walls::none());
    let mut wall = walls.tenant("acme", CgroupLimits::default()).await.expect("no limits");
    assert_eq!(wall.info(7).await, WallInfo { device_bytes: 7, ..WallInfo::default() });
    let asked = limits(&[(LimitName::CpuMax, "50%"), (LimitName::PidsMax, "9")]);
    wall.change(&walls, asked.clone(), false).await.expect("kept");
    let info = wall.info(0).await;
    let said = ["walls are reduced: no cgroups were asked for"];
    assert_eq!(
        (info.limits.cpu_max.as_deref(), info.not_enforced),
        (Some("50%"), said.map(str::to_owned).to_vec())
    );
    assert!(!wall.stands() && info.usage.is_none());
    // The next daemon finds the same.
    let again = walls.restored("acme", saved(wall.limits()).as_deref()).await.expect("as well as it can be");
    assert_eq!((again.limits(), not_enforced(&again).await.len()), (&asked, 1));
    wall.change(&walls, CgroupLimits::default(), false).await.expect("taken away");
    assert_eq!(wall.info(0).await, WallInfo::default());
    assert_eq!(saved(wall.limits()), None);
}

#[tokio::test]
async fn limits_that_cannot_be_read_are_said_to_be_none_and_a_tenant_is_served_all_the_same() {
    let walls = Arc::new(Walls::none());
    let wall = walls.restored("acme", Some("cpu.max 50%\nmemory.low 1GiB\n")).await.expect("served");
    let info = wall.info(0).await;
    assert_eq!(info.not_enforced, ["limits in control.db cannot be read: `memory.low` is no limit"]);
    assert_eq!(info.limits, LimitTexts::default());
}

#[tokio::test]
async fn every_limit_that_can_be_is_in_force_after_a_restart_the_others_are_said_and_tried_again_when_set() {
    let (root, walls) = made_up(true);
    refuses(&root, "pids.max", true);
    let asked = limits(&[(LimitName::MemoryMax, "64MiB"), (LimitName::PidsMax, "9"), (LimitName::Cpus, "4")]);
    let mut wall = walls.restored("a", saved(&asked).as_deref()).await.expect("it has a cgroup");
    let said = not_enforced(&wall).await;
    let [cpus, pids] = said.as_slice() else { panic!("{said:?}") };
    assert_eq!(cpus, "cpuset.cpus: none of the CPUs 4 can be used: there are 0-1");
    assert!(pids.starts_with("pids.max 9: "), "{pids}");
    assert_eq!(read(&root, "memory.max"), (64 << 20).to_string());
    let shown = walls.shown([("a", &wall)].into_iter());
    let reason = "not all limits of tenant a are enforced, see `pagedctl tenant show a`".to_owned();
    assert_eq!(shown, Shown::Reduced { reason });

    // What was lacking before does not stand in the way of others, and is asked of the host again.
    let more = CgroupLimits { cpu_weight: limits(&[(LimitName::CpuWeight, "7")]).cpu_weight, ..asked };
    wall.change(&walls, more.clone(), false).await.expect("not what was asked");
    assert_eq!((read(&root, "cpu.weight").as_str(), not_enforced(&wall).await), ("7", said));
    refuses(&root, "pids.max", false);
    fs::write(root.path().join("tenants/cpuset.cpus.effective"), "0-4\n").expect("a file");
    wall.change(&walls, more, false).await.expect("the same");
    assert_eq!((read(&root, "pids.max").as_str(), read(&root, "cpuset.cpus").as_str()), ("9", "4"));
    assert!(wall.stands(), "{:?}", not_enforced(&wall).await);
    assert_eq!(walls.shown([("a", &wall)].into_iter()), Shown::Full);
}

#[tokio::test]
async fn limits_that_are_refused_leave_those_before_and_what_cannot_be_put_back_is_said() {
    let (root, walls) = made_up(false);
    let before = limits(&[(LimitName::MemoryMax, "64MiB"), (LimitName::PidsMax, "9")]);
    let mut wall = walls.tenant("a", before.clone()).await.expect("limits");
    refuses(&root, "pids.max", true);
    let after = limits(&[(LimitName::MemoryMax, "32MiB"), (LimitName::PidsMax, "8")]);
    let refused = wall.change(&walls, after, false).await.expect_err("refused");
    assert!(refused.message.starts_with("pids.max 8: "), "{}", refused.message);
    assert_eq!((wall.limits(), read(&root, "memory.max")), (&before, (64 << 20).to_string()));
    let said = not_enforced(&wall).await;
    assert!(matches!(said.as_slice(), [one] if one.starts_with("pids.max 9: ")), "{said:?}");
    let none = wall.change(&walls, limits(&[(LimitName::Cpus, "7")]), true).await.expect_err("refused");
    assert_eq!(none.message, "none of the CPUs 7 can be used: there are 0-1");
    assert_eq!(read(&root, "memory.max"), (64 << 20).to_string(), "nothing was tried");
    assert!(walls.tenant("a", limits(&[(LimitName::PidsMax, "8")])).await.is_err(), "a new tenant's");
}

#[tokio::test]
async fn nobody_is_outside_where_cgroups_are_required_and_else_it_is_said() {
    let outside = |root: &Path| {
        for group in ["tenants", "workers"] {
            fs::remove_dir_all(root.join(group)).expect("there");
            fs::write(root.join(group), "no directory").expect("a file");
        }
    };
    let (root, walls) = made_up(true);
    outside(root.path());
    let error = walls.restored("a", None).await.map(|_| ()).expect_err("not served");
    assert!(error.message.starts_with("it has no cgroup, and the configuration says `cgroups: required`: "));
    assert!(walls.workers("m").is_err());

    let (root, walls) = made_up(false);
    outside(root.path());
    let wall = walls.restored("a", None).await.expect("served");
    assert!(!wall.stands() && wall.cgroup().is_none());
    let said = not_enforced(&wall).await;
    assert!(matches!(said.as_slice(), [one] if one.starts_with("it has no cgroup: ")), "{said:?}");
    for _ in 0..2 {
        assert!(walls.workers("m").expect("they start").is_none());
    }
    let Shown::Reduced { reason } = walls.shown([].into_iter()) else { panic!("full") };
    assert!(reason.starts_with("no cgroup for the workers of model m: "), "{reason}");
    assert_eq!(reason.matches("no cgroup").count(), 1, "{reason}");
}

#[test]
fn a_restart_mends_what_may_pass_and_nothing_else() {
    use pagedd_host::hierarchy::NotDelegated;
    let path = Path::new("/x").to_owned();
    let source = io::ErrorKind::OutOfMemory.into();
    let not_alone = NoHierarchy::NotAlone { dir: path.clone(), pids: Vec::new() };
    for passes in [NoHierarchy::Cgroup(CgroupError::Io { path: path.clone(), source }), not_alone] {
        let error = NoWalls::from(passes);
        assert!(matches!(error, NoWalls::Now(_)), "{error}");
    }
    let why = NotDelegated::Systemd;
    let hybrid = NoHierarchy::Hybrid { controllers: Vec::new() };
    for stays in [NoHierarchy::NoV2, hybrid, NoHierarchy::NotDelegated { dir: path, why }] {
        let error = NoWalls::from(stays);
        assert!(matches!(error, NoWalls::Never(_)), "{error}");
    }
}

#[test]
fn a_text_that_is_no_limit_is_refused_by_its_name_and_others_stay() {
    let before = limits(&[(LimitName::CpuMax, "50%"), (LimitName::MemoryMax, "64MiB")]);
    let bad = LimitTexts {
        cpu_max: Some("1000".to_owned()),
        pids_max: Some("x".to_owned()),
        ..LimitTexts::default()
    };
    let error = changed(&before, &bad).expect_err("no number");
    assert_eq!(error.code, ErrorCode::InvalidLimit);
    assert!(error.message.starts_with("pids.max: `x` is no number of processes"), "{}", error.message);
    let one = LimitTexts { cpu_max: Some("max".to_owned()), ..LimitTexts::default() };
    let after = changed(&before, &one).expect("limits");
    assert_eq!(after, limits(&[(LimitName::MemoryMax, "64MiB")]));
}

#[test]
fn a_refusal_says_what_helps() {
    use pagedd_host::hierarchy::BelowUse;
    let below = BelowUse { name: LimitName::MemoryMax, limit: 5, used: 9 };
    let refused = refusal(&CgroupError::BelowUse(below));
    assert_eq!(
        (refused.code, refused.message.as_str()),
        (ErrorCode::BelowUse, "memory.max 5 is below present use, 9")
    );
    assert!(refused.remedy.is_some_and(|remedy| remedy.contains("--force")));
}
