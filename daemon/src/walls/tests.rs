use super::*;

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
    let shown = walls.map(|walls| walls.shown());
    assert_eq!(shown, Some(Shown::Reduced { reason: "`cgroups: off` in the configuration".to_owned() }));
}

#[tokio::test]
async fn without_cgroups_limits_are_kept_and_said_not_to_be_enforced() {
    let walls = Walls::none();
    let mut wall = walls.tenant("acme", CgroupLimits::default()).expect("no limits");
    assert_eq!(wall.info(7), WallInfo { device_bytes: 7, ..WallInfo::default() });
    let asked = limits(&[(LimitName::CpuMax, "50%"), (LimitName::PidsMax, "9")]);
    wall.change(&walls, asked.clone(), false).await.expect("kept");
    let info = wall.info(0);
    let said = ["walls are reduced: no cgroups were asked for"];
    assert_eq!(
        (info.limits.cpu_max.as_deref(), info.not_enforced),
        (Some("50%"), said.map(str::to_owned).to_vec())
    );
    assert!(!wall.stands() && info.usage.is_none());
    // The next daemon finds the same.
    let again = walls.restored("acme", saved(wall.limits()).as_deref());
    assert_eq!((again.limits(), again.info(0).not_enforced.len()), (&asked, 1));
    wall.change(&walls, CgroupLimits::default(), false).await.expect("taken away");
    assert_eq!(wall.info(0), WallInfo::default());
    assert_eq!(saved(wall.limits()), None);
}

#[test]
fn limits_that_cannot_be_read_are_said_to_be_none_and_a_tenant_is_served_all_the_same() {
    let wall = Walls::none().restored("acme", Some("cpu.max 50%\nmemory.low 1GiB\n"));
    let info = wall.info(0);
    assert_eq!(info.not_enforced, ["limits in control.db cannot be read: `memory.low` is no limit"]);
    assert_eq!(info.limits, LimitTexts::default());
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
