use super::*;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

fn said(name: LimitName, text: &str) -> String {
    let mut limits = CgroupLimits::default();
    match set_limit(&mut limits, name, text) {
        Ok(()) => limit_text(&limits, name).unwrap_or_else(|| "-".to_owned()),
        Err(error) => {
            assert_eq!(limits, CgroupLimits::default(), "{name} {text:?}");
            error.to_string()
        }
    }
}

#[test]
fn limits_are_read_as_they_are_meant() {
    use LimitName::{CpuMax, CpuWeight, Cpus, IoMax, IoWeight, MemoryHigh, MemoryMax, PidsMax};
    for (name, text, read) in [
        (CpuMax, "50%", "50%"),
        (CpuMax, "2.5", "250%"),
        (CpuMax, "33.33%", "33.33%"),
        (CpuMax, "0.01", "1%"),
        (CpuMax, "max", "-"),
        (CpuMax, " default ", "-"),
        (CpuWeight, "10000", "10000"),
        (CpuWeight, "default", "-"),
        (Cpus, "4,0-3", "0-4"),
        (MemoryMax, "256M", "`256M` needs a unit: B, KiB, MiB, GiB, TiB, KB, MB, GB or TB, or max"),
        (MemoryMax, "256MiB", "256MiB"),
        (MemoryMax, "1KiB", "1KiB is less than 4MiB, without which no gateway runs"),
        (MemoryHigh, "0.5GiB", "512MiB"),
        (PidsMax, "64", "64"),
        (IoWeight, "1", "1"),
        (
            IoMax,
            "/dev/sda rbps=10MiB wiops=100;8:16 wbps=max riops=7",
            "/dev/sda rbps=10MiB wiops=100; 8:16 riops=7",
        ),
        (IoMax, "max", "-"),
    ] {
        assert_eq!(said(name, text), read, "{name} {text:?}");
    }
}

#[test]
fn what_is_no_limit_is_refused_and_said_to_be_none() {
    for name in LimitName::ALL {
        for text in [
            "",
            "x",
            "-1",
            "0",
            "+5",
            "1e3",
            "50 %%",
            "99999999999999999999",
            "\u{661}",
            "8:0",
            "8:0 max",
            "1;1",
        ] {
            let said = said(name, text);
            let taken = matches!((name, text), (LimitName::Cpus, "0"));
            assert_eq!(
                said.contains(" is ") || said.contains(": ") || said.contains("needs"),
                !taken,
                "{name} {text:?}: {said}"
            );
        }
    }
    let io = |text: &str| said(LimitName::IoMax, text);
    for (text, why) in [
        ("sda rbps=1MiB", "it names no device"),
        ("8:0 rbps", "a part is no KEY=VALUE"),
        ("8:0 rps=1", "a key is none of rbps, wbps, riops and wiops"),
        ("8:0 rbps=5", "a rate is no size, such as 10MiB"),
        ("8:0 riops=0", "a rate of operations is no number"),
        ("8:0 rbps=max", "a device is named and nothing is limited"),
        ("8:0 riops=1; 8:0 wiops=1", "a device is named twice"),
        ("8:0 riops=1;", "it names no device"),
    ] {
        assert!(io(text).contains(why), "{text:?}: {}", io(text));
    }
}

#[test]
fn what_was_saved_by_another_version_is_named() {
    let error = |text: &str| load_limits(Some(text)).unwrap_err().to_string();
    assert_eq!(error("cpu.max 50%\nmemory.low 1GiB\n"), "`memory.low` is no limit");
    assert!(
        error("pids.max\n").starts_with("pids.max: `` is no number of processes"),
        "{}",
        error("pids.max\n")
    );
    assert_eq!(load_limits(None), Ok(CgroupLimits::default()));
}

fn bytes() -> impl Strategy<Value = Bytes> {
    prop_oneof![(4u64 << 20..1 << 62).prop_map(Bytes), (4u64..1 << 30).prop_map(|mib| Bytes(mib << 20))]
}

fn limit<T: std::fmt::Debug + 'static>(
    at: impl Strategy<Value = T> + 'static,
) -> impl Strategy<Value = Limit<T>> {
    option::of(at).prop_map(most)
}

fn io_limit(place: u32) -> impl Strategy<Value = IoLimit> {
    let device = prop_oneof![
        Just(BlockDevice::Number { major: place, minor: 0 }),
        Just(BlockDevice::Path(format!("/dev/disk/by-id/x-{place}")))
    ];
    let (rate, count) = (limit(bytes()), limit(1..u64::MAX));
    (device, bytes(), rate, limit(1..u64::MAX), count).prop_map(
        |(device, read, write_bytes, reads, writes)| IoLimit {
            device,
            read_bytes: Limit::At(read),
            write_bytes,
            reads,
            writes,
        },
    )
}

fn limits() -> impl Strategy<Value = CgroupLimits> {
    let cpus = vec((0u32..CpuList::NUMBERS, 0u32..64), 1..6).prop_map(|ranges| {
        let range = |(from, more): (u32, u32)| format!("{from}-{}", (from + more).min(CpuList::NUMBERS - 1));
        ranges.into_iter().map(range).collect::<Vec<_>>().join(",").parse::<CpuList>().unwrap()
    });
    let weight = || option::of((1u16..=10_000).prop_map(|weight| Weight::new(weight).unwrap()));
    let time = (100u32..=100_000_000).prop_map(|time| CpuTime::from_hundredths(time).unwrap());
    let io = prop_oneof![Just(Vec::new()), (io_limit(1), io_limit(2)).prop_map(|(a, b)| vec![a, b])];
    let of_cpu = (limit(time), weight(), option::of(cpus));
    let of_memory = (limit(bytes()), limit(bytes()), limit(LEAST_PIDS..=4 << 20));
    (of_cpu, of_memory, io, weight()).prop_map(|(cpu, memory, io_max, io_weight)| {
        let ((cpu_max, cpu_weight, cpus), (memory_max, memory_high, pids_max)) = (cpu, memory);
        CgroupLimits { cpu_max, cpu_weight, cpus, memory_max, memory_high, pids_max, io_max, io_weight }
    })
}

proptest! {
    #[test]
    fn what_is_shown_and_saved_is_read_back(limits in limits()) {
        let mut read = CgroupLimits::default();
        for name in LimitName::ALL {
            let text = limit_text(&limits, name);
            prop_assert_eq!(text.is_some(), limits.has(name));
            prop_assert_eq!(set_limit(&mut read, name, text.as_deref().unwrap_or("max")), Ok(()), "{:?}", text);
        }
        prop_assert_eq!(&read, &limits);
        prop_assert_eq!(load_limits(save_limits(&limits).as_deref()), Ok(limits));
    }

    #[test]
    fn no_text_makes_it_panic(text in ".{0,60}") {
        for name in LimitName::ALL {
            let _ = set_limit(&mut CgroupLimits::default(), name, &text);
        }
        let _ = load_limits(Some(&text));
    }
}
