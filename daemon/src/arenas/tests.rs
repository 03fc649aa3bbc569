use std::fs::File;

use pagedd_core::{BlockId, TenantId};
use pagedd_host::{Child, Sandbox, Spawn};
use pagedd_kv::{BlockKey, DomainOwner, LedgerRecord};
use pagedd_wire::worker::StepCost as Measured;

use super::*;
use crate::child::OwnChild;

const KEY: [u8; 32] = [7; 32];
const RECORD: LedgerRecord = LedgerRecord {
    owner: DomainOwner::Tenant(TenantId(3)),
    key: BlockKey([9; 16]),
    dtype: 0,
    tokens: Tokens(16),
};

fn info() -> ModelInfo {
    ModelInfo {
        architecture: "llama".to_owned(),
        parameters: 1,
        vocab_size: 2,
        max_model_len: 64,
        block_size: 16,
        blocks: 100,
        block_bytes: 4096,
        weight_bytes: 1,
        scratch_bytes: 0,
        pinned_bytes: 0,
        digest: [5; 16],
        file_digest: [6; 16],
        kv_id: [4; 16],
        weights_reused: false,
        kv_reused: true,
        threads: 1,
        kernels: "generic".to_owned(),
        load_us: 0,
        cost: Measured::from(StepCost::UNKNOWN),
        algorithms: Vec::new(),
    }
}

fn arena() -> OwnedFd {
    SharedMemory::create("kv", 4096).unwrap().as_fd().try_clone_to_owned().unwrap()
}

fn copy(fd: &impl AsFd) -> OwnedFd {
    fd.as_fd().try_clone_to_owned().unwrap()
}

/// What the next daemon finds.
fn left(kv: Option<OwnedFd>, ledger: Option<OwnedFd>, writer: Option<OwnedFd>) -> Arenas {
    let store = Arc::new(FdStore::without_manager());
    let kv = kv.map(|fd| Kept { fd, bytes: 4096 });
    Arenas {
        store,
        model: "m".to_owned(),
        device: Device::Cpu,
        weights: None,
        kv,
        ledger,
        writer,
        cost: None,
        algorithms: Vec::new(),
    }
}

/// A ledger of `kv` with one record, as a daemon leaves it.
fn written(kv: &OwnedFd) -> SharedMemory {
    let mut ledger = left(Some(copy(kv)), None, None).ledger(&info(), KEY).unwrap();
    assert_eq!(ledger.records().count(), 0);
    ledger.commit(BlockId(42), &RECORD);
    ledger.into_memory()
}

fn sleeper() -> OwnChild {
    let spawn = Spawn {
        program: "/bin/sleep".into(),
        args: vec!["600".into()],
        env: Vec::new(),
        fds: Vec::new(),
        cgroup: None,
        identity: None,
        sandbox: Sandbox { no_new_privs: true, ..Sandbox::default() },
    };
    OwnChild::from(pagedd_host::spawn(spawn).expect("a program of every host"))
}

#[test]
fn the_next_daemon_finds_what_the_ledger_of_the_same_arena_says() {
    let kv = arena();
    let memory = written(&kv);
    let ledger = left(Some(kv), Some(copy(&memory)), None).ledger(&info(), KEY).unwrap();
    assert_eq!(ledger.records().collect::<Vec<_>>(), [(BlockId(42), RECORD)]);
}

#[test]
fn a_ledger_of_another_arena_key_model_or_geometry_says_nothing_and_stays_as_it_is() {
    let kv = arena();
    let memory = written(&kv);
    let found = |kv: &OwnedFd, info: &ModelInfo, key| {
        let ledger = left(Some(copy(kv)), Some(copy(&memory)), None).ledger(info, key).unwrap();
        ledger.records().count()
    };
    assert_eq!(found(&kv, &ModelInfo { kv_id: [3; 16], ..info() }, KEY), 0, "arena");
    assert_eq!(found(&kv, &info(), [8; 32]), 0, "key");
    assert_eq!(found(&kv, &ModelInfo { digest: [6; 16], ..info() }, KEY), 0, "model");
    assert_eq!(found(&kv, &ModelInfo { blocks: 99, ..info() }, KEY), 0, "blocks");
    assert_eq!(found(&kv, &ModelInfo { block_size: 32, ..info() }, KEY), 0, "size of blocks");
    assert_eq!(found(&kv, &info(), KEY), 1, "none of them wrote it");
}

#[test]
fn a_ledger_that_is_torn_or_none_at_all_is_replaced_by_an_empty_one() {
    let kv = arena();
    let mut memory = written(&kv);
    memory.as_mut()[64] ^= 1;
    let none = File::open("/dev/null").unwrap();
    let small = SharedMemory::create("small", 64).unwrap();
    for fd in [copy(&memory), copy(&none), copy(&small)] {
        let mut ledger = left(Some(copy(&kv)), Some(fd), None).ledger(&info(), KEY).unwrap();
        assert_eq!(ledger.records().count(), 0);
        ledger.commit(BlockId(42), &RECORD);
        assert_eq!(ledger.record(BlockId(42)), Some(RECORD));
    }
}

#[test]
fn an_arena_is_found_by_its_kind_its_device_and_its_model_and_brings_its_size() {
    let (cpu, gpu) = (Device::Cpu, Device::Cuda { ordinal: 1 });
    for (device, bytes) in [(cpu, 0), (cpu, u64::MAX), (gpu, 7)] {
        for model in ["m", "7-m", "cpu-7-m"] {
            assert_eq!(arena_size(&arena_name(KV, device, bytes, model), KV, device, model), Some(bytes));
        }
    }
    let others = [
        "kv-cpu-7-7-m",
        "kv-cpu-7-n",
        "kv-cpu-m",
        "kv-m",
        "kv-cpu-+7-m",
        "kv-cpu-07-m",
        "kv-cpu--7-m",
        "kv-cpu-18446744073709551616-m",
        "kv-cuda1-7-m",
        "weights-cpu-7-m",
        "kvcpu-7-m",
        "",
    ];
    assert!(others.iter().all(|name| arena_size(name, KV, cpu, "m").is_none()));
    assert_eq!(arena_size("kv-cuda10-7-m", KV, gpu, "m"), None);
}

#[test]
fn an_arena_in_a_gpus_memory_is_paired_with_its_ledger_and_never_looked_at() {
    // Whatever is asked of this fd but a copy of it, fails.
    let nothing = || OwnedFd::from(io::pipe().unwrap().0);
    let mut first = left(Some(nothing()), None, None);
    first.device = Device::Cuda { ordinal: 0 };
    let mut ledger = first.ledger(&info(), KEY).unwrap();
    ledger.commit(BlockId(42), &RECORD);
    let shelf = first.shelf(&ledger, &info(), KEY).unwrap();
    let mut records = tempfile::tempfile().unwrap();
    let tenants = [TenantId(3)].into();
    assert_eq!(shelf.copy_out(&tenants, &mut records, None).unwrap(), 1);
    let memory = ledger.into_memory();
    let again = left(Some(nothing()), Some(copy(&memory)), None).ledger(&info(), KEY).unwrap();
    assert_eq!(again.records().count(), 1);
}

#[test]
fn a_worker_that_lives_on_is_ended_before_its_arena_is_used_again() {
    let worker = sleeper();
    let child: &Child = &worker;
    let (kv, ledger) = (arena(), File::open("/dev/null").unwrap());
    let mut arenas = left(Some(kv), Some(ledger.into()), Some(copy(child)));
    assert!(!worker.has_exited());
    arenas.settle();
    assert!(worker.has_exited());
    assert!(arenas.kv().is_some() && arenas.ledger.is_some());
}

#[test]
fn without_a_proof_that_its_last_writer_is_gone_an_arena_is_not_used_and_neither_is_its_ledger() {
    let no_process = || OwnedFd::from(File::open("/dev/null").unwrap());
    for writer in [None, Some(no_process())] {
        let mut arenas = left(Some(arena()), Some(no_process()), writer);
        arenas.settle();
        assert!(arenas.kv().is_none() && arenas.ledger.is_none());
    }
}

fn known() -> KnownCost {
    KnownCost {
        digest: [5; 16],
        threads: 3,
        max_model_len: 64,
        max_num_seqs: 8,
        max_num_batched_tokens: 128,
        cost: Measured { body_us: [1.5; StepCost::SIZES.len()], ..Measured::from(StepCost::UNKNOWN) },
    }
}

#[test]
fn what_steps_took_is_read_back_and_what_is_none_of_it_is_nothing() {
    let read = |fd| -> Option<KnownCost> { frame(fd)?.next_frame().ok()? };
    let bytes = encode(&known()).unwrap();
    let memory = |bytes: &[u8]| {
        let mut memory = SharedMemory::create("cost", bytes.len()).unwrap();
        memory.as_mut().copy_from_slice(bytes);
        memory
    };
    assert_eq!(read(copy(&memory(&bytes))), Some(known()));
    assert_eq!(read(arena()), None, "zeros");
    assert_eq!(read(File::open("/proc/self/exe").unwrap().into()), None);
    assert_eq!(read(copy(&memory(&bytes[..9]))), None);
}

#[test]
fn algorithms_are_kept_until_others_come() {
    let mut arenas = left(None, None, None);
    for (told, kept) in [(&b""[..], &b""[..]), (b"some", b"some"), (b"", b"some"), (b"others", b"others")] {
        arenas.keep_algorithms(told);
        assert_eq!(arenas.algorithms(), kept);
    }
}

#[test]
fn only_what_was_measured_is_kept() {
    let mut arenas = left(None, None, None);
    arenas.keep_cost(KnownCost { cost: Measured::from(StepCost::UNKNOWN), ..known() });
    assert_eq!(arenas.known_cost(), None);
    arenas.keep_cost(known());
    assert_eq!(arenas.known_cost(), Some(known()));
}
