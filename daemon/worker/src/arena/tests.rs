use super::*;

const WEIGHTS: Header = Header { kind: Kind::Weights, data_bytes: 10_000, identity: [7; 32] };
const KV: Header = Header { kind: Kind::Kv, ..WEIGHTS };

fn dup(arena: &Arena) -> OwnedFd {
    arena.as_fd().try_clone_to_owned().unwrap()
}

#[test]
fn what_was_written_is_found_again_through_the_fd() {
    for header in [WEIGHTS, KV] {
        let mut arena = Arena::create(header).unwrap();
        assert_eq!(arena.data().len(), 10_000);
        arena.data_mut()[9_999] = 42;
        let arena = arena.complete().unwrap();
        let fd = dup(&arena);
        drop(arena);
        assert_eq!(claimed_bytes(fd.as_fd()).unwrap(), 10_000);
        let mut again = Arena::reuse(fd, &header).unwrap();
        assert_eq!(again.data()[9_999], 42);
        assert_eq!(again.data_mut().is_empty(), header.kind == Kind::Weights);
    }
}

#[test]
fn complete_weights_cannot_be_mapped_writable_again() {
    let arena = Arena::create(WEIGHTS).unwrap().complete().unwrap();
    assert_eq!(map(&arena.fd, arena.len, true).unwrap_err(), rustix::io::Errno::PERM);
}

#[test]
fn an_arena_whose_maker_died_before_it_was_complete_is_refused() {
    let fd = dup(&Arena::create(KV).unwrap());
    assert!(matches!(Arena::reuse(fd, &KV), Err(Stale::Incomplete)));
}

#[test]
fn another_identity_kind_or_size_is_refused_and_said() {
    let arena = Arena::create(KV).unwrap().complete().unwrap();
    let other = Header { identity: [8; 32], ..KV };
    assert!(matches!(Arena::reuse(dup(&arena), &other), Err(Stale::OtherContent)));
    assert!(matches!(Arena::reuse(dup(&arena), &WEIGHTS), Err(Stale::Foreign)));
    let larger = Header { data_bytes: 10_001, ..KV };
    let stale = Arena::reuse(dup(&arena), &larger).unwrap_err();
    assert_eq!(stale.to_string(), "it has 14096 bytes, 14097 expected");
}

#[test]
fn a_file_a_pipe_and_an_unsealed_memfd_are_refused() {
    let null = std::fs::File::open("/dev/null").unwrap();
    assert!(matches!(Arena::reuse(null.into(), &KV), Err(Stale::NotSealed)));
    let (pipe, _other) = io::pipe().unwrap();
    let pipe = OwnedFd::from(pipe);
    assert!(claimed_bytes(pipe.as_fd()).is_err());
    assert!(matches!(Arena::reuse(pipe, &KV), Err(Stale::NotSealed)));
    let unsealed = rustix::fs::memfd_create("x", MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&unsealed, 14_096).unwrap();
    write_at(&unsealed, &KV.encode(), 0).unwrap();
    write_at(&unsealed, &COMPLETE.to_le_bytes(), COMPLETE_AT).unwrap();
    assert!(matches!(Arena::reuse(unsealed, &KV), Err(Stale::NotSealed)));
}

#[test]
fn a_sealed_memfd_without_an_arena_in_it_is_refused() {
    let empty = rustix::fs::memfd_create("x", MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::fcntl_add_seals(&empty, SIZE_SEALS).unwrap();
    assert!(matches!(claimed_bytes(empty.as_fd()), Err(Stale::Foreign)));
    assert!(matches!(Arena::reuse(empty, &KV), Err(Stale::Foreign)));
}

#[test]
fn a_size_beyond_the_address_space_is_an_error() {
    let error = Arena::create(Header { data_bytes: u64::MAX, ..KV }).unwrap_err();
    assert!(error.to_string().starts_with("KV arena of 18446744073709551615 bytes: "), "{error}");
}

#[test]
fn an_untouched_arena_takes_no_memory() {
    let arena = Arena::create(Header { data_bytes: 1 << 30, ..KV }).unwrap().complete().unwrap();
    let blocks = rustix::fs::fstat(&arena.fd).unwrap().st_blocks;
    assert!(blocks * 512 < 1 << 20, "{blocks} blocks of 512 bytes");
}
