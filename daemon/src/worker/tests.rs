use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use pagedd_wire::PROTOCOL;
use pagedd_wire::worker::{Dtype, KvDtype, KvMemory};

use super::*;
use crate::watchdog::Watchdog;

#[test]
fn one_slow_step_does_not_let_the_next_hang_for_hours() {
    let seconds = |slowest| deadline(Duration::ZERO, Duration::from_secs(slowest)).as_secs();
    assert_eq!([0, 1, 5, 29, 299].map(seconds), [30, 30, 50, 290, 300]);
}

#[test]
fn a_step_has_ten_times_what_was_predicted_for_it_also_where_that_is_long() {
    let seconds = |predicted| deadline(Duration::from_secs(predicted), Duration::from_secs(4)).as_secs();
    assert_eq!([0, 1, 4, 9, 60].map(seconds), [40, 40, 40, 90, 600]);
}

#[test]
fn starts_that_fail_are_apart_so_that_what_is_away_for_seconds_may_come_back() {
    let pauses: Vec<_> = (0..TRIES).map(|failed| pause_after(failed).as_millis()).collect();
    assert_eq!(pauses, [0, 200, 400, 800, 1600, 3200]);
    assert_eq!([7, 40, u32::MAX].map(pause_after), [PAUSE.1; 3]);
}

/// Takes the first bytes of what it is told, notes whether the process before it is still there, and goes no further.
const DEAF: &str = "#!/bin/sh
before=$(cat pid 2>/dev/null)
echo $$ > pid
head -c 4 <&3 > told
if [ -z \"$before\" ]; then echo first; elif kill -0 $before 2>/dev/null; then echo there; else echo gone; fi >> log
exec 3<&-
exec sleep 600
";

/// One whose program is [`DEAF`].
fn deaf(dir: &Path) -> (WorkerProcess, watch::Receiver<ModelState>) {
    let program = dir.join("worker");
    fs::write(&program, DEAF.replacen('\n', &format!("\ncd {}\n", dir.display()), 1)).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let hello = Hello {
        protocol: PROTOCOL,
        path: "m.gguf".to_owned(),
        device: Device::Cuda { ordinal: 0 },
        dtype: Dtype::Auto,
        kv_dtype: KvDtype::Bf16,
        block_size: 16,
        kv_memory: KvMemory::Auto,
        max_model_len: None,
        max_num_seqs: 1,
        max_num_batched_tokens: 16,
        threads: None,
        deterministic: false,
        measure: false,
        weights_fd: false,
        kv_fd: false,
        weights_bytes: 0,
        kv_bytes: 0,
        known_cost: None,
        algorithms: Vec::new(),
    };
    let env = vec![("PATH".into(), "/usr/bin:/bin".into())];
    let spec = WorkerSpec { model: "m".to_owned(), program, hello, env, cell: None };
    let (state, states) = watch::channel(ModelState::Loading { permille: 0 });
    let pulse = Watchdog::unwatched().pulse("test");
    (WorkerProcess::new(spec, Arc::new(FdStore::without_manager()), state, pulse), states)
}

#[test]
fn a_worker_is_told_nothing_before_the_one_before_it_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let (mut worker, states) = deaf(dir.path());
    worker.start().unwrap_err();
    let log = fs::read_to_string(dir.path().join("log")).unwrap();
    let expected = ["first"].into_iter().chain(std::iter::repeat_n("gone", TRIES as usize - 1));
    assert_eq!(log.lines().collect::<Vec<_>>(), expected.collect::<Vec<_>>());
    assert!(matches!(*states.borrow(), ModelState::Failed { .. }));
}

#[test]
fn a_model_has_not_failed_whose_worker_does_not_come_up_since_the_daemon_ends() {
    let dir = tempfile::tempdir().unwrap();
    let (mut worker, states) = deaf(dir.path());
    worker.reins().end();
    worker.start().unwrap_err();
    assert!(matches!(*states.borrow(), ModelState::Loading { .. }));
    assert_eq!(worker.ends_as(), None);
}
