use std::os::fd::AsFd;

use pagedd_core::TenantId;
use pagedd_journal::checkpoint::{Draft, ModelIdentity};
use pagedd_journal::{ControlDb, Fsync, JournalDb};
use pagedd_kv::{BlockKey, DomainOwner, LedgerRecord};
use tempfile::TempDir;

use super::*;

const SECRET: [u8; 32] = [7; 32];
const BLOCK: usize = 64;

fn header(blocks: u32, arena: u8) -> LedgerHeader {
    let key_id = PrefixHasher::new(SECRET).key_id([arena; 16]);
    LedgerHeader {
        block_size: Tokens(16),
        blocks: Blocks(blocks),
        block_bytes: BLOCK as u64,
        model: [5; 16],
        key_id,
        weight_epoch: 0,
    }
}

/// An arena of so many blocks whose bytes are their numbers, its empty ledger, and the shelf of both.
fn arena(blocks: u32, number: u8) -> (SharedMemory, Ledger<SharedMemory>, Shelf) {
    let header = header(blocks, number);
    let mut arena = SharedMemory::create("kv", ARENA_HEADER + blocks as usize * BLOCK).unwrap();
    for (block, bytes) in arena.as_mut()[ARENA_HEADER..].chunks_mut(BLOCK).enumerate() {
        bytes.fill(number * 100 + block as u8);
    }
    let memory = SharedMemory::create("ledger", header.ledger_bytes()).unwrap();
    let ledger = Ledger::format(memory, &header, 1).unwrap();
    let shelf = Shelf::new(Some(arena.as_fd()), ledger.memory().as_fd(), header, SECRET).unwrap();
    (arena, ledger, shelf)
}

fn record(key: u8) -> LedgerRecord {
    LedgerRecord {
        owner: DomainOwner::Tenant(TenantId(u32::from(key))),
        key: BlockKey([key; 16]),
        dtype: 0,
        tokens: Tokens(16),
    }
}

/// Tenants that the checkpoint has.
fn tenants() -> BTreeSet<TenantId> {
    (0..100).map(TenantId).collect()
}

/// A checkpoint with what `shelf` has.
fn saved(shelf: &Shelf, kv: bool) -> (TempDir, Checkpoint, SavedModel) {
    let dir = tempfile::tempdir().unwrap();
    let draft = Draft::begin(dir.path(), "one").unwrap();
    ControlDb::open(dir.path()).unwrap().save(&draft.file("control.db")).unwrap();
    JournalDb::open(dir.path(), Fsync::Never).unwrap().save(&draft.file("journal.db")).unwrap();
    let identity = ModelIdentity {
        name: "m".to_owned(),
        architecture: "llama".to_owned(),
        parameters: 1,
        dtype: "auto".to_owned(),
        kv_dtype: "f16".to_owned(),
        block_size: 16,
        block_bytes: BLOCK as u64,
        kv_layout: 1,
        kernels: "portable".to_owned(),
        digest: hex(&[5; 16]),
    };
    let mut ledger = draft.create("ledger-m").unwrap();
    let mut bytes = kv.then(|| draft.create("kv-m").unwrap());
    let blocks = shelf.copy_out(&tenants(), &mut ledger, bytes.as_mut()).unwrap();
    let model = SavedModel { identity, blocks, kv };
    let checkpoint = draft.finish("0", 1, vec![model.clone()]).unwrap();
    (dir, checkpoint, model)
}

#[test]
fn committed_blocks_come_back_in_another_arena_with_their_bytes_and_records() {
    let (_arena, mut ledger, shelf) = arena(6, 1);
    for block in [1, 3, 4] {
        ledger.commit(BlockId(block), &record(block as u8));
    }
    ledger.clear(BlockId(3));
    let (_dir, checkpoint, model) = saved(&shelf, true);
    assert_eq!(model.blocks, 2);
    let blocks = SavedBlocks::open(&checkpoint, &model, SECRET).unwrap().unwrap();
    let (other, mut other_ledger, other_shelf) = arena(3, 2);
    assert_eq!(other_shelf.fill(&blocks, &mut other_ledger).unwrap(), 2);
    let found: Vec<_> = other_ledger.records().collect();
    assert_eq!(found, [(BlockId(0), record(1)), (BlockId(1), record(4))]);
    let bytes: Vec<u8> = other.as_ref()[ARENA_HEADER..].chunks(BLOCK).map(|block| block[BLOCK - 1]).collect();
    assert_eq!(bytes, [101, 104, 202]);
}

#[test]
fn blocks_of_a_tenant_that_the_checkpoint_does_not_have_are_left_out() {
    let (_arena, mut ledger, shelf) = arena(6, 1);
    (0..3).for_each(|block| ledger.commit(BlockId(block), &record(120 + block as u8)));
    ledger.commit(BlockId(3), &record(7));
    let (_dir, _, model) = saved(&shelf, true);
    assert_eq!(model.blocks, 1);
}

#[test]
fn a_smaller_arena_takes_what_it_has_room_for() {
    let (_arena, mut ledger, shelf) = arena(6, 1);
    (0..6).for_each(|block| ledger.commit(BlockId(block), &record(block as u8)));
    let (_dir, checkpoint, model) = saved(&shelf, true);
    let blocks = SavedBlocks::open(&checkpoint, &model, SECRET).unwrap().unwrap();
    let (_other, mut other_ledger, other_shelf) = arena(2, 2);
    assert_eq!(other_shelf.fill(&blocks, &mut other_ledger).unwrap(), 2);
    assert_eq!(other_ledger.records().count(), 2);
}

#[test]
fn without_their_bytes_the_records_are_saved_and_no_block_is_taken_over() {
    let (_arena, mut ledger, shelf) = arena(6, 1);
    ledger.commit(BlockId(2), &record(2));
    let (_dir, checkpoint, model) = saved(&shelf, false);
    assert_eq!(model.blocks, 1);
    assert!(SavedBlocks::open(&checkpoint, &model, SECRET).unwrap().is_none());
}

#[test]
fn blocks_that_only_a_device_reads_are_saved_as_records_and_never_put_in_place() {
    let (_arena, mut ledger, shelf) = arena(6, 1);
    ledger.commit(BlockId(2), &record(2));
    let (_dir, checkpoint, model) = saved(&shelf, true);
    let blocks = SavedBlocks::open(&checkpoint, &model, SECRET).unwrap().unwrap();

    let (_memory, mut ledger, host) = arena(6, 2);
    let device = Shelf::new(None, ledger.memory().as_fd(), header(6, 2), SECRET).unwrap();
    drop(host);
    let error = device.fill(&blocks, &mut ledger).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::Unsupported);
    assert_eq!(ledger.records().count(), 0);
    ledger.commit(BlockId(3), &record(3));
    assert_eq!(saved(&device, false).2.blocks, 1);
    let mut files = [0; 2].map(|_| tempfile::tempfile().unwrap());
    let [records, bytes] = &mut files;
    let error = device.copy_out(&tenants(), records, Some(bytes)).unwrap_err();
    assert_eq!(error.to_string(), "KV blocks in a GPU's memory are neither read nor written");
}

#[test]
fn a_block_that_was_cleared_or_filled_again_since_its_record_was_read_is_seen_to_have_changed() {
    let (_arena, mut ledger, shelf) = arena(6, 1);
    (0..3).for_each(|block| ledger.commit(BlockId(block), &record(9)));
    let before = ledger.memory().as_ref().to_vec();
    ledger.clear(BlockId(1));
    ledger.clear(BlockId(2));
    // With the very same tokens.
    ledger.commit(BlockId(2), &record(9));
    let unchanged = [0, 1, 2].map(|block| shelf.is_unchanged(BlockId(block), &before).unwrap());
    assert_eq!(unchanged, [true, false, false]);
}

#[test]
fn a_ledger_with_a_damaged_record_or_of_another_secret_is_refused_by_name() {
    let (_arena, mut ledger, shelf) = arena(6, 1);
    ledger.commit(BlockId(2), &record(2));
    let (_dir, checkpoint, model) = saved(&shelf, true);
    let refused = |secret| SavedBlocks::open(&checkpoint, &model, secret).unwrap_err();
    assert!(refused([8; 32]).starts_with("ledger-m: the ledger's key is "));
    let path = checkpoint.file("ledger-m");
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(path, bytes).unwrap();
    assert_eq!(refused(SECRET), "ledger-m: 1 of its 1 records are damaged");
}
