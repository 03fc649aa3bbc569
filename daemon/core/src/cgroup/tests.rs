use super::*;

fn list(text: &str) -> CpuList {
    text.parse().unwrap_or_else(|e| panic!("{text:?}: {e}"))
}

#[test]
fn a_list_of_cpus_is_written_in_the_shortest_form() {
    for (given, written) in [
        ("", ""),
        ("3", "3"),
        ("0-3,8", "0-3,8"),
        ("8,0-3", "0-3,8"),
        ("1,0,2-2", "0-2"),
        (" 0 - 1 , 4\n", "0-1,4"),
    ] {
        assert_eq!(list(given).to_string(), written, "{given:?}");
    }
    assert_eq!((list("0-3,8").count(), list("").count()), (5, 0));
}

#[test]
fn what_is_no_list_of_cpus_is_refused() {
    for text in ["a", "-1", "3-1", "0-", "1,,2", "+1", "65536", "0-99999999999", "1;2", "0x1"] {
        assert_eq!(text.parse::<CpuList>(), Err(NoCpuList), "{text:?}");
    }
}

#[test]
fn lists_meet_and_part() {
    let (asked, there) = (list("0-3,6-9"), list("1-2,4,7-20"));
    assert_eq!((asked.and(&there), there.and(&asked)), (list("1-2,7-9"), list("1-2,7-9")));
    assert_eq!(asked.without(&there), list("0,3,6"));
    assert_eq!(there.without(&list("")), there);
    assert!(list("0-3").without(&list("0-3")).is_empty() && list("0-3").and(&list("4")).is_empty());
}

#[test]
fn cpu_time_is_a_quota_of_a_tenth_of_a_second() {
    for (hundredths, quota_us) in [(100, 1_000), (5_000, 50_000), (25_000, 250_000), (3_333, 33_330)] {
        assert_eq!(
            CpuTime::from_hundredths(hundredths).map(CpuTime::quota_us),
            Some(quota_us),
            "{hundredths}"
        );
    }
    assert_eq!((CpuTime::from_hundredths(99), CpuTime::from_hundredths(100_000_001)), (None, None));
}

#[test]
fn weights_are_from_one_to_ten_thousand() {
    let given = [0, 1, 100, 10_000, 10_001].map(Weight::new);
    assert_eq!(given.map(|weight| weight.map(Weight::get)), [None, Some(1), Some(100), Some(10_000), None]);
}

#[test]
fn names_are_those_of_files_and_say_what_is_limited() {
    for name in LimitName::ALL {
        assert_eq!(LimitName::from_file(name.file()), Some(name));
    }
    assert_eq!(LimitName::from_file("memory.min"), None);
    let limits = CgroupLimits {
        memory_max: Limit::At(Bytes(1)),
        cpu_weight: Some(Weight::DEFAULT),
        ..CgroupLimits::default()
    };
    assert_eq!(limits.names().collect::<Vec<_>>(), [LimitName::CpuWeight, LimitName::MemoryMax]);
    assert!(CgroupLimits::default().is_empty() && !limits.is_empty());
}
