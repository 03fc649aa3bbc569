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
        arena.enlarge(1, 1).expect("there is no whole large page to ask for");
        assert_eq!(arena.data().len(), 10_000);
        arena.data_mut()[9_999] = 42;
        let arena = arena.complete().unwrap();
        let (fd, id) = (dup(&arena), arena.id());
        drop(arena);
        assert_eq!(claimed_bytes(fd.as_fd()).unwrap(), 10_000);
        let mut again = Arena::reuse(fd, &header).unwrap();
        assert_eq!((again.data()[9_999], again.id()), (42, id));
        assert_eq!(again.data_mut().is_empty(), header.kind == Kind::Weights);
    }
}

#[test]
fn no_two_arenas_have_one_name() {
    let [one, other] = [KV, KV].map(|header| Arena::create(header).unwrap().id());
    assert_ne!(one, other);
}

#[test]
fn complete_weights_cannot_be_mapped_writable_again() {
    let arena = Arena::create(WEIGHTS).unwrap().complete().unwrap();
    let error = Mapping::new(&arena.fd, arena.mapping.len, true).unwrap_err();
    assert_eq!(error, rustix::io::Errno::PERM);
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

/// Bytes of a mapping that lie in large pages, by the system's account of it.
fn large_bytes(mapping: &Mapping) -> usize {
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let begins = format!("{:x}-", mapping.base.as_ptr().addr());
    let (_, own) = smaps.split_once(&format!("\n{begins}")).expect("the mapping is listed");
    let line = own.lines().find_map(|line| line.strip_prefix("ShmemPmdMapped:")).expect("a count");
    line.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() * 1024
}

#[test]
fn large_pages_change_no_byte_and_a_later_mapping_has_them_too() {
    let header = Header { data_bytes: (EXTENT + 3 * LARGE_PAGE - HEADER_BYTES + 500) as u64, ..WEIGHTS };
    let mut arena = Arena::create(header).unwrap();
    let granted = arena.enlarge(2, 1).is_ok();
    assert!(arena.data().iter().all(|&byte| byte == 0));
    let bytes = |at: usize| (at % 251) as u8;
    arena.data_mut().iter_mut().enumerate().for_each(|(at, byte)| *byte = bytes(at));
    let arena = arena.complete().unwrap();
    let fd = dup(&arena);
    drop(arena);
    let arena = Arena::reuse(fd, &header).unwrap();
    // The first of them has the header in it, which was read to get here.
    assert!(arena.data().iter().enumerate().all(|(at, &byte)| byte == bytes(at)));
    let large = large_bytes(&arena.mapping);
    // The kernel refuses some while memory is short: the others stay.
    assert_eq!(granted, large == EXTENT + 3 * LARGE_PAGE, "{large} bytes");
}

#[test]
fn large_pages_take_no_more_memory_than_the_arena_has_bytes() {
    let header = Header { data_bytes: LARGE_PAGE as u64, ..WEIGHTS };
    let arena = Arena::create(header).unwrap();
    // Refused or not.
    let _ = arena.enlarge(1, 1);
    let taken = rustix::fs::fstat(&arena.fd).unwrap().st_blocks * 512;
    assert!(taken as usize <= LARGE_PAGE + HEADER_BYTES, "{taken} bytes");
}

#[test]
fn large_pages_come_from_every_node_in_turn() {
    for nodes in 1..=16 {
        for large in 0..100 {
            let page = small_page(large, nodes);
            assert_eq!(page * SMALL_PAGE / LARGE_PAGE, large, "{nodes} nodes");
            assert_eq!(page % nodes, large % nodes, "{nodes} nodes, large page {large}");
        }
    }
}

#[test]
fn an_arena_is_spread_over_the_nodes_that_are_there_or_left_as_it_was() {
    let mut arena = Arena::create(KV).unwrap();
    for one in [&[][..], &[0]] {
        arena.spread(one).expect("nothing is asked for");
    }
    arena.spread(&[1000, 1001]).expect_err("there are no such nodes");
    // Of these only the first need be there; a container may forbid all of it.
    let granted = arena.spread(&[0, 1]).is_ok();
    let begins = format!("{:x} ", arena.mapping.base.as_ptr().addr());
    let maps = std::fs::read_to_string("/proc/self/numa_maps").unwrap_or_default();
    if let Some(line) = maps.lines().find(|line| line.starts_with(&begins)) {
        assert_eq!(line.contains("interleave"), granted, "{line}");
    }
    arena.data_mut().fill(3);
    assert!(arena.data().iter().all(|&byte| byte == 3));
}
