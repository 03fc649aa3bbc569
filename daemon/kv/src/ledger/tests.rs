use proptest::prelude::*;

use super::*;

const EXPECTED: LedgerHeader = LedgerHeader {
    block_size: Tokens(16),
    blocks: Blocks(8),
    block_bytes: 4096,
    model: [3; 16],
    key_id: [4; 16],
    weight_epoch: 5,
};

fn empty() -> Ledger<Vec<u8>> {
    Ledger::format(vec![0xaa; EXPECTED.ledger_bytes()], &EXPECTED, 1).unwrap()
}

fn record(seed: u8) -> LedgerRecord {
    let owner = if seed.is_multiple_of(2) {
        DomainOwner::Tenant(TenantId(u32::from(seed) << 20))
    } else {
        DomainOwner::Group(7)
    };
    LedgerRecord { owner, key: BlockKey([seed; 16]), dtype: seed, tokens: Tokens(16) }
}

fn reopened(ledger: Ledger<Vec<u8>>) -> Ledger<Vec<u8>> {
    Ledger::open(ledger.into_memory(), &EXPECTED).unwrap()
}

fn found(ledger: &Ledger<Vec<u8>>) -> Vec<(BlockId, LedgerRecord)> {
    ledger.records().collect()
}

#[test]
fn the_checksum_is_that_of_everyone() {
    assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
}

#[test]
fn what_was_committed_and_not_cleared_is_found_by_the_next_process() {
    let mut ledger = empty();
    assert_eq!(found(&ledger), []);
    for block in [0, 3, 7] {
        ledger.write(&LedgerChange::Commit(BlockId(block), record(block as u8)));
    }
    ledger.write(&LedgerChange::Clear(BlockId(3)));
    // A block that the arena does not have.
    ledger.commit(BlockId(8), &record(8));
    ledger.clear(BlockId(8));
    let ledger = reopened(ledger);
    assert_eq!(ledger.generation(), 1);
    assert_eq!(found(&ledger), [(BlockId(0), record(0)), (BlockId(7), record(7))]);
}

#[test]
fn a_record_that_is_not_whole_is_none() {
    let mut ledger = empty();
    ledger.commit(BlockId(2), &record(2));
    let memory = ledger.into_memory();
    let start = HEADER + 2 * RECORD;
    for at in start..start + RECORD {
        for bit in 0..8 {
            let mut torn = memory.clone();
            torn[at] ^= 1 << bit;
            assert_eq!(found(&Ledger::open(torn, &EXPECTED).unwrap()), [], "bit {bit} of {}", at - start);
        }
    }
}

#[test]
fn a_record_cut_off_while_it_replaced_another_is_none_or_the_old_one() {
    let mut before = empty();
    before.commit(BlockId(2), &record(2));
    let mut after = empty();
    after.commit(BlockId(2), &record(9));
    let (before, after) = (before.into_memory(), after.into_memory());
    let start = HEADER + 2 * RECORD;
    // In whatever order the stores arrive.
    for cut in 1..RECORD {
        for (head, tail) in [(&before, &after), (&after, &before)] {
            let mut torn = head.clone();
            torn[start + cut..start + RECORD].copy_from_slice(&tail[start + cut..start + RECORD]);
            let found = found(&Ledger::open(torn, &EXPECTED).unwrap());
            let whole = [[(BlockId(2), record(2))], [(BlockId(2), record(9))]];
            assert!(found.is_empty() || whole.iter().any(|whole| found == whole), "cut at {cut}: {found:?}");
        }
    }
}

#[test]
fn a_record_of_another_generation_or_copied_from_another_block_is_none() {
    let mut ledger = empty();
    ledger.commit(BlockId(2), &record(2));
    let mut memory = ledger.into_memory();
    let old: Vec<u8> = memory[HEADER + 2 * RECORD..HEADER + 3 * RECORD].to_vec();
    memory[HEADER + 3 * RECORD..HEADER + 4 * RECORD].copy_from_slice(&old);
    let ledger = Ledger::open(memory, &EXPECTED).unwrap();
    assert_eq!(found(&ledger), [(BlockId(2), record(2))], "the copy names its block");
    let mut memory = Ledger::format(ledger.into_memory(), &EXPECTED, 2).unwrap().into_memory();
    memory[HEADER + 2 * RECORD..HEADER + 3 * RECORD].copy_from_slice(&old);
    assert_eq!(found(&Ledger::open(memory, &EXPECTED).unwrap()), []);
}

#[test]
fn a_foreign_header_is_refused_and_the_difference_named() {
    let foreign = [
        ("block size", LedgerHeader { block_size: Tokens(32), ..EXPECTED }),
        ("number of blocks", LedgerHeader { blocks: Blocks(7), ..EXPECTED }),
        ("size of a block", LedgerHeader { block_bytes: 1 << 40, ..EXPECTED }),
        ("model", LedgerHeader { model: [0; 16], ..EXPECTED }),
        ("key", LedgerHeader { key_id: [9; 16], ..EXPECTED }),
        ("weight epoch", LedgerHeader { weight_epoch: 6, ..EXPECTED }),
    ];
    for (name, header) in foreign {
        let (error, memory) = Ledger::open(empty().into_memory(), &header).unwrap_err();
        assert!(matches!(error, LedgerError::Mismatch { field, .. } if field == name), "{error}");
        assert_eq!(memory, empty().into_memory(), "nothing has changed");
    }
    let mut memory = empty().into_memory();
    memory[8] = 2;
    let crc = crc32(&memory[..HEADER_CRC]);
    memory[HEADER_CRC..HEADER_CRC + 4].copy_from_slice(&crc.to_le_bytes());
    let (error, _) = Ledger::open(memory, &EXPECTED).unwrap_err();
    assert_eq!(error, LedgerError::Mismatch { field: "version", found: 2, expected: 1 });
    assert_eq!(error.to_string(), "the ledger's version is 2, not 1");
}

#[test]
fn memory_that_is_too_small_or_holds_no_header_is_no_ledger() {
    let needed = EXPECTED.ledger_bytes();
    let small = LedgerError::Size { bytes: needed - 1, needed };
    assert_eq!(Ledger::open(vec![0; needed - 1], &EXPECTED).unwrap_err().0, small);
    assert_eq!(Ledger::format(vec![0; needed - 1], &EXPECTED, 1).unwrap_err().0, small);
    assert_eq!(Ledger::open(vec![0; needed], &EXPECTED).unwrap_err().0, LedgerError::None);
    for at in 0..HEADER_CRC + 4 {
        let mut memory = empty().into_memory();
        memory[at] ^= 1;
        assert_eq!(Ledger::open(memory, &EXPECTED).unwrap_err().0, LedgerError::None, "byte {at}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn random_changes_leave_what_a_map_would_hold(changes in prop::collection::vec((0..8_u32, any::<Option<u8>>()), 0..60)) {
        let (mut ledger, mut model) = (empty(), std::collections::BTreeMap::new());
        for (block, seed) in changes {
            let block = BlockId(block);
            if let Some(seed) = seed {
                ledger.commit(block, &record(seed));
                model.insert(block, record(seed));
            } else {
                ledger.clear(block);
                model.remove(&block);
            }
        }
        prop_assert_eq!(found(&reopened(ledger)), model.into_iter().collect::<Vec<_>>());
    }

    #[test]
    fn whatever_the_memory_holds_it_is_read_without_a_panic(mut bytes in prop::collection::vec(any::<u8>(), 600..700)) {
        let ledger = Ledger::open(bytes.clone(), &EXPECTED);
        prop_assert!(ledger.is_err());
        bytes[..HEADER].copy_from_slice(&EXPECTED.encode(1));
        prop_assert_eq!(found(&Ledger::open(bytes, &EXPECTED).unwrap()), []);
    }
}

#[test]
fn a_block_that_was_filled_again_with_the_same_tokens_has_a_record_of_other_bytes() {
    let mut ledger = empty();
    let at = EXPECTED.record_at(BlockId(2)).unwrap();
    assert_eq!(EXPECTED.record_at(BlockId(8)), None);
    let mut seen = Vec::new();
    for _ in 0..3 {
        ledger.commit(BlockId(2), &record(2));
        assert_eq!(ledger.record(BlockId(2)), Some(record(2)));
        seen.push(ledger.memory()[at.clone()].to_vec());
        ledger.clear(BlockId(2));
        seen.push(ledger.memory()[at.clone()].to_vec());
    }
    for (i, bytes) in seen.iter().enumerate() {
        assert!(!seen[..i].contains(bytes), "state {i} was there before");
    }
}
