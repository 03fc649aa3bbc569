use std::fs::File;
use std::time::Duration;

use super::inbox::{Told, parse};
use super::{Backoff, Patience};

#[test]
fn the_first_restart_is_immediate_and_later_ones_wait_longer_up_to_a_bound() {
    let patience = Patience {
        good_run: Duration::from_secs(20),
        first_delay: Duration::from_millis(100),
        longest_delay: Duration::from_millis(700),
        longest_after_ready: Duration::from_millis(300),
        watchdog: Duration::ZERO,
        stop: Duration::ZERO,
    };
    let mut backoff = Backoff::new(patience);
    let mut delays = |ready| -> Vec<_> {
        backoff.next(Duration::from_secs(20), ready);
        (0..5).map(|_| backoff.next(Duration::ZERO, ready).as_millis()).collect()
    };
    assert_eq!(delays(false), [100, 200, 400, 700, 700]);
    assert_eq!(delays(true), [100, 200, 300, 300, 300], "what was ready is followed sooner");
    assert_eq!(
        backoff.next(Duration::from_secs(20), false),
        Duration::ZERO,
        "a good run is forgiven its end"
    );
    assert_eq!(backoff.next(Duration::from_secs(19), false).as_millis(), 100);
    assert_eq!(Backoff::new(patience).next(Duration::ZERO, false), Duration::ZERO);
}

#[test]
fn a_message_may_say_several_things() {
    let told = parse("READY=1\nWATCHDOG=1\nSTATUS=two models\nEXTEND_TIMEOUT_USEC=5\nX=y\n", Vec::new());
    assert!(
        matches!(&told[..], [Told::Ready, Told::Alive, Told::Status(line), Told::ExtendTimeout(by)]
            if line == "two models" && by.as_micros() == 5),
        "{told:?}"
    );
}

#[test]
fn malformed_lines_say_nothing() {
    for message in [
        "",
        "\n\n",
        "=",
        "READY",
        "READY=0",
        "READY=11",
        "READY=1x",
        "WATCHDOG=0",
        "WATCHDOG=trigger",
        "FDSTORE=1",
        "FDSTORE=1\nFDNAME=",
        "FDSTORE=1\nFDNAME=a:b",
        "FDSTORE=2\nFDNAME=a",
        "FDSTOREREMOVE=1",
        "FDNAME=a",
        "EXTEND_TIMEOUT_USEC=-1",
        "EXTEND_TIMEOUT_USEC=99999999999",
        "ready=1",
        " READY=1",
    ] {
        let told = parse(message, vec![File::open("/dev/null").unwrap().into()]);
        assert!(told.is_empty(), "{message:?} gave {told:?}");
    }
}

#[test]
fn storing_and_removing_name_an_fd() {
    let fd = File::open("/dev/null").unwrap().into();
    let told = parse("FDSTORE=1\nFDNAME=arena\nFDPOLL=0\n", vec![fd]);
    assert!(
        matches!(&told[..], [Told::Store { name, fds }] if name == "arena" && fds.len() == 1),
        "{told:?}"
    );
    let told = parse("FDSTOREREMOVE=1\nFDNAME=arena", Vec::new());
    assert!(matches!(&told[..], [Told::Remove { name }] if name == "arena"), "{told:?}");
}
