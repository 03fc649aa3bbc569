use std::panic::{AssertUnwindSafe, catch_unwind};

use proptest::prelude::*;

use super::*;
use crate::prefix::{Domain, DomainOwner, PrefixHasher};
use crate::table::{BlockTable, CopyOnWrite};

const SIZE: usize = 4;

fn share(floor: u32, ceiling: u32) -> Share {
    Share { floor: Blocks(floor), ceiling: Blocks(ceiling) }
}

fn anywhere() -> Place {
    Place::Run(Blocks(1))
}

fn tokens(seed: u32) -> Vec<TokenId> {
    (0..SIZE as u32).map(|i| TokenId(seed * 100 + i)).collect()
}

fn key(seed: u32) -> BlockKey {
    let hasher = PrefixHasher::new([1; 32]);
    let owner = DomainOwner::Tenant(pagedd_core::TenantId(1));
    hasher.block(hasher.root(&Domain { owner, weights: [0; 16], adapter: 0, dtype: 0 }), &tokens(seed))
}

#[test]
fn a_floor_above_its_ceiling_and_floors_above_the_pool_are_refused() {
    let mut pool = BlockPool::new(Blocks(10));
    let a = pool.open(share(6, 10)).unwrap();
    assert_eq!(pool.open(share(5, 10)), Err(ShareError::FloorsExceedPool { sum: 11, capacity: Blocks(10) }));
    assert_eq!(
        pool.open(share(5, 4)),
        Err(ShareError::FloorAboveCeiling { floor: Blocks(5), ceiling: Blocks(4) })
    );
    let b = pool.open(share(4, 4)).unwrap();
    assert!(pool.set_share(a, share(7, 10)).is_err());
    pool.set_share(b, share(0, 4)).unwrap();
    pool.set_share(a, share(7, 10)).unwrap();
    assert_eq!(pool.accounts().count(), 2);
}

#[test]
fn an_account_never_exceeds_its_ceiling_and_cached_blocks_count() {
    let mut pool = BlockPool::new(Blocks(10));
    let a = pool.open(share(0, 2)).unwrap();
    let first = pool.allocate(a, anywhere()).unwrap();
    pool.commit(&first, key(1), &tokens(1));
    let second = pool.allocate(a, anywhere()).unwrap();
    pool.release(first);
    let refused = pool.allocate(a, anywhere());
    assert_eq!(refused.unwrap_err(), AllocError::OverCeiling { used: Blocks(2), ceiling: Blocks(2) });
    assert!(pool.evict(a).is_some());
    let third = pool.allocate(a, anywhere()).unwrap();
    pool.release(third);
    pool.release(second);
    pool.check().unwrap();
}

#[test]
fn a_committed_block_is_found_again_by_its_own_account_only() {
    let mut pool = BlockPool::new(Blocks(4));
    let (a, b) = (pool.open(share(0, 4)).unwrap(), pool.open(share(0, 4)).unwrap());
    let lease = pool.allocate(a, anywhere()).unwrap();
    let block = lease.block();
    assert!(pool.commit(&lease, key(1), &tokens(1)));
    assert!(!pool.commit(&lease, key(1), &tokens(1)), "once is enough");
    pool.release(lease);
    assert!(pool.acquire(b, key(1), &tokens(1)).is_none(), "another account");
    assert!(pool.acquire(a, key(1), &tokens(2)).is_none(), "other tokens");
    assert_eq!(pool.cached_prefix(a, &[key(1)], &tokens(1)).unreferenced, 1);
    let again = pool.acquire(a, key(1), &tokens(1)).unwrap();
    assert_eq!((again.block(), pool.count(block)), (block, 1));
    assert!(pool.evict(a).is_none(), "a held block is not evicted");
    pool.release(again);
    pool.check().unwrap();
}

#[test]
fn of_a_released_chain_the_head_is_evicted_last() {
    let mut pool = BlockPool::new(Blocks(4));
    let a = pool.open(share(0, 4)).unwrap();
    let mut table = BlockTable::new();
    for i in 0..4 {
        let lease = pool.allocate(a, table.next_place(Blocks(4))).unwrap();
        pool.commit(&lease, key(i), &tokens(i));
        table.push(lease);
    }
    let blocks = table.blocks_from(0);
    assert_eq!(blocks, (0..4).map(BlockId).collect::<Vec<_>>(), "one run");
    table.release(&mut pool);
    let evicted: Vec<_> = std::iter::from_fn(|| pool.evict(a)).collect();
    assert_eq!(evicted, blocks.into_iter().rev().collect::<Vec<_>>());
    pool.check().unwrap();
}

#[test]
fn a_closed_account_frees_its_blocks_as_they_return_and_is_then_forgotten() {
    let mut pool = BlockPool::new(Blocks(4));
    let a = pool.open(share(2, 4)).unwrap();
    let (kept, cached) = (pool.allocate(a, anywhere()).unwrap(), pool.allocate(a, anywhere()).unwrap());
    pool.commit(&kept, key(1), &tokens(1));
    pool.commit(&cached, key(2), &tokens(2));
    pool.release(cached);
    pool.close(a);
    assert_eq!(pool.free(), Blocks(3));
    assert!(pool.allocate(a, anywhere()).is_err());
    pool.check().unwrap();
    pool.release(kept);
    assert_eq!((pool.free(), pool.usage(a)), (Blocks(4), None));
    pool.check().unwrap();
    assert_eq!(pool.open(share(4, 4)).unwrap().index(), 0, "its place is used again");
}

#[test]
fn a_fork_reads_its_parents_tail_and_copies_it_before_writing() {
    let mut pool = BlockPool::new(Blocks(8));
    let a = pool.open(share(0, 8)).unwrap();
    let mut parent = BlockTable::new();
    parent.push(pool.allocate(a, anywhere()).unwrap());
    parent.push(pool.allocate(a, anywhere()).unwrap());
    let mut child = parent.fork(&mut pool);
    assert!(!parent.needs_copy(1, &pool), "the parent goes on appending in place");
    assert!(child.needs_copy(1, &pool));
    let written = child.make_writable(1, &mut pool, |pool| pool.allocate(a, anywhere())).unwrap();
    let CopyOnWrite::Copied { from, to } = written else { panic!("{written:?}") };
    assert_eq!(from.block(), parent.blocks_from(1)[0]);
    assert_eq!(child.blocks_from(1), [to]);
    assert_eq!(pool.usage(a).unwrap().held, Blocks(3), "a shared block is held once");
    child.undo_copy(1, from, &mut pool);
    assert_eq!(child.blocks_from(0), parent.blocks_from(0));
    parent.release(&mut pool);
    let alone = child.make_writable(1, &mut pool, |_| Err(AllocError::Exhausted)).unwrap();
    assert!(matches!(alone, CopyOnWrite::InPlace), "the last reader needs no copy");
    child.release(&mut pool);
    assert_eq!(pool.free(), Blocks(8));
    pool.check().unwrap();
}

#[test]
fn chosen_blocks_can_be_shared_in_any_order() {
    let mut pool = BlockPool::new(Blocks(8));
    let a = pool.open(share(0, 8)).unwrap();
    let mut table = BlockTable::new();
    (0..4).for_each(|_| table.push(pool.allocate(a, anywhere()).unwrap()));
    let all = table.blocks_from(0);
    let prefix = table.share_prefix(2, &mut pool);
    let chosen = table.share_blocks(&[3, 0, 9], &mut pool);
    assert_eq!(prefix.blocks_from(0), all[..2]);
    assert_eq!(chosen.blocks_from(0), [all[3], all[0]]);
    let leases = [&table, &prefix, &chosen].map(BlockTable::leases);
    pool.check_leases(leases.into_iter().flatten()).unwrap();
    for table in [table, prefix, chosen] {
        table.release(&mut pool);
    }
    assert_eq!(pool.free(), Blocks(8));
}

/// In debug builds, where a double release is an assertion that a caller may catch: the state must be sound after it too.
#[test]
fn bug_4_a_block_released_twice_is_quarantined_and_never_given_out() {
    let mut pool = BlockPool::new(Blocks(2));
    let a = pool.open(share(0, 2)).unwrap();
    let lease = pool.allocate(a, anywhere()).unwrap();
    let forged = BlockLease::new(lease.block(), a);
    let block = lease.block();
    pool.release(lease);
    let second = catch_unwind(AssertUnwindSafe(|| pool.release(forged)));
    assert_eq!(second.is_err(), cfg!(debug_assertions), "debug builds assert");
    assert_eq!((pool.quarantined(), pool.free()), (1, Blocks(1)));
    pool.check().unwrap();
    let other = pool.allocate(a, anywhere()).unwrap();
    assert_ne!(other.block(), block);
    assert!(pool.allocate(a, anywhere()).is_err());
    pool.release(other);
}

#[test]
fn bug_4_forks_released_in_any_order_never_count_below_zero() {
    let orders = [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 3, 0, 2]];
    for order in orders {
        let mut pool = BlockPool::new(Blocks(8));
        let a = pool.open(share(0, 8)).unwrap();
        let mut parent = BlockTable::new();
        (0..3).for_each(|_| parent.push(pool.allocate(a, anywhere()).unwrap()));
        let children = [(); 3].map(|()| parent.fork(&mut pool));
        let mut tables: Vec<_> = children.into_iter().chain([parent]).map(Some).collect();
        for i in order {
            tables[i].take().unwrap().release(&mut pool);
            pool.check().unwrap();
        }
        assert_eq!((pool.free(), pool.quarantined()), (Blocks(8), 0), "order {order:?}");
    }
}

#[test]
fn a_dropped_lease_is_found_by_check_and_its_block_stays_out_of_use() {
    let mut pool = BlockPool::new(Blocks(1));
    let a = pool.open(share(0, 1)).unwrap();
    let lease = pool.allocate(a, anywhere()).unwrap();
    drop(lease);
    assert_eq!(pool.free(), Blocks(0));
    let found = pool.check_leases(std::iter::empty());
    assert_eq!(found, Err(Violation::Count { block: BlockId(0), count: 1, leases: 0 }));
}

#[test]
fn check_finds_a_corrupted_count() {
    let mut pool = BlockPool::new(Blocks(2));
    let a = pool.open(share(0, 2)).unwrap();
    pool.check().unwrap();
    pool.account_mut(a).unwrap().held = 1;
    assert!(matches!(pool.check(), Err(Violation::Account { .. })));
    pool.account_mut(a).unwrap().held = 0;
    pool.slots[1] = Slot::Held { account: a, count: 1, key: None };
    assert!(matches!(pool.check(), Err(Violation::Orders { .. })));
}

/// One step of the random machine; numbers are taken modulo what there is.
#[derive(Clone, Debug)]
enum Act {
    Grow(usize),
    Fork(usize),
    Share(usize, usize),
    Write(usize),
    Commit(usize, u32),
    Adopt(u32),
    Free(usize),
    Truncate(usize, usize),
    Evict,
}

fn act() -> impl Strategy<Value = Act> {
    let n = 0..64_usize;
    prop_oneof![
        6 => n.clone().prop_map(Act::Grow),
        2 => n.clone().prop_map(Act::Fork),
        1 => (n.clone(), n.clone()).prop_map(|(a, b)| Act::Share(a, b)),
        3 => n.clone().prop_map(Act::Write),
        3 => (n.clone(), 0..6_u32).prop_map(|(a, b)| Act::Commit(a, b)),
        2 => (0..6_u32).prop_map(Act::Adopt),
        2 => n.clone().prop_map(Act::Free),
        1 => (n.clone(), n).prop_map(|(a, b)| Act::Truncate(a, b)),
        1 => Just(Act::Evict),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn whatever_tables_do_the_sums_hold_and_every_block_comes_back(
        capacity in 1..20_u32,
        ceiling in 1..24_u32,
        acts in prop::collection::vec(act(), 1..120),
    ) {
        let mut pool = BlockPool::new(Blocks(capacity));
        let accounts = [pool.open(share(0, ceiling)).unwrap(), pool.open(share(capacity / 2, capacity)).unwrap()];
        let mut tables: Vec<(AccountId, BlockTable)> = Vec::new();
        for act in acts {
            let count = tables.len();
            match act {
                Act::Grow(i) => {
                    if i % 3 == 0 || count == 0 {
                        tables.push((accounts[i % 2], BlockTable::new()));
                    }
                    let count = tables.len();
                    let (account, table) = &mut tables[i % count];
                    let (before, free) = (pool.usage(*account).unwrap(), pool.free());
                    match pool.allocate(*account, table.next_place(Blocks(i as u32))) {
                        Ok(lease) => {
                            prop_assert_eq!(pool.free() + Blocks(1), free);
                            table.push(lease);
                        }
                        Err(AllocError::Exhausted) => prop_assert_eq!(free, Blocks(0)),
                        Err(AllocError::OverCeiling { .. }) => prop_assert!(before.used() >= before.share.ceiling),
                    }
                }
                Act::Fork(i) if count > 0 => {
                    let (account, table) = &tables[i % count];
                    tables.push((*account, table.fork(&mut pool)));
                }
                Act::Share(i, n) if count > 0 => {
                    let (account, table) = &tables[i % count];
                    let indices: Vec<_> = (0..n % 5).map(|j| (j * 7) % (table.len() + 1)).collect();
                    tables.push((*account, table.share_blocks(&indices, &mut pool)));
                }
                Act::Write(i) if count > 0 => {
                    let (account, table) = &mut tables[i % count];
                    if let Some(last) = table.len().checked_sub(1) {
                        let account = *account;
                        match table.make_writable(last, &mut pool, |pool| pool.allocate(account, anywhere())) {
                            Ok(CopyOnWrite::Copied { from, to }) => {
                                prop_assert_ne!(from.block(), to);
                                prop_assert_eq!(pool.count(to), 1);
                                pool.release(from);
                            }
                            Ok(CopyOnWrite::InPlace) | Err(_) => {}
                        }
                    }
                }
                Act::Commit(i, seed) if count > 0 => {
                    if let Some(lease) = tables[i % count].1.leases().last() {
                        pool.commit(lease, key(seed), &tokens(seed));
                    }
                }
                Act::Adopt(seed) => {
                    for account in accounts {
                        let found = pool.cached_prefix(account, &[key(seed)], &tokens(seed)).blocks;
                        let lease = pool.acquire(account, key(seed), &tokens(seed));
                        prop_assert_eq!(found == 1, lease.is_some());
                        if let Some(lease) = lease {
                            let mut table = BlockTable::new();
                            table.push_shared(lease);
                            tables.push((account, table));
                        }
                    }
                }
                Act::Free(i) if count > 0 => tables.swap_remove(i % count).1.release(&mut pool),
                Act::Truncate(i, n) if count > 0 => tables[i % count].1.truncate(n % 8, &mut pool),
                Act::Evict => {
                    for account in accounts {
                        let cached = pool.usage(account).unwrap().cached;
                        prop_assert_eq!(pool.evict(account).is_some(), cached > Blocks::ZERO);
                    }
                }
                Act::Fork(_) | Act::Share(..) | Act::Write(_) | Act::Commit(..) | Act::Free(_) | Act::Truncate(..) => {}
            }
            prop_assert_eq!(pool.check(), Ok(()));
            prop_assert_eq!(pool.check_leases(tables.iter().flat_map(|(_, t)| t.leases())), Ok(()));
        }
        for (_, table) in tables {
            table.release(&mut pool);
        }
        let cached: Blocks = pool.accounts().map(|(_, usage)| usage.cached).sum();
        prop_assert_eq!(pool.free() + cached, Blocks(capacity));
        prop_assert_eq!(pool.check(), Ok(()));
    }
}

#[test]
fn a_block_with_known_contents_is_adopted_once_and_found_by_its_own_account_only() {
    let mut pool = BlockPool::new(Blocks(8));
    let (a, b) = (pool.open(share(0, 3)).unwrap(), pool.open(share(0, 8)).unwrap());
    assert!(pool.adopt(a, BlockId(5), key(1)));
    assert!(!pool.adopt(a, BlockId(5), key(2)), "the block is not free");
    assert!(!pool.adopt(b, BlockId(6), key(1)), "the contents are there");
    assert!(!pool.adopt(b, BlockId(8), key(2)), "there is no such block");
    assert!(pool.adopt(a, BlockId(0), key(2)) && pool.adopt(a, BlockId(7), key(3)));
    assert!(!pool.adopt(a, BlockId(1), key(4)), "the account has all it may have");
    pool.check().unwrap();
    assert_eq!((pool.free(), pool.usage(a).unwrap().cached), (Blocks(5), Blocks(3)));
    assert!(pool.acquire(b, key(1), &tokens(1)).is_none());
    let lease = pool.acquire(a, key(1), &tokens(1)).unwrap();
    assert_eq!(lease.block(), BlockId(5));
    pool.release(lease);
    let evicted: Vec<_> = std::iter::from_fn(|| pool.evict(a)).collect();
    assert_eq!(evicted, [BlockId(0), BlockId(7), BlockId(5)]);
    pool.close(a);
    assert!(!pool.adopt(a, BlockId(1), key(1)), "the account is closed");
    pool.check().unwrap();
}

#[test]
fn a_block_is_cleared_when_it_is_given_out_and_when_it_leaves_the_index() {
    let (cleared, block) = (BlockChange::Cleared, BlockId(0));
    let mut pool = BlockPool::new(Blocks(1));
    let account = pool.open(share(0, 1)).unwrap();
    let committed = BlockChange::Committed { block, account, key: key(1) };
    let lease = pool.allocate(account, anywhere()).unwrap();
    assert_eq!(pool.take_changes(), [], "nobody asked");
    pool.watch();
    assert!(pool.commit(&lease, key(1), &tokens(1)));
    assert!(!pool.commit(&lease, key(1), &tokens(1)));
    pool.uncommit(&lease);
    assert_eq!(pool.take_changes(), [committed, cleared(block)]);
    assert!(pool.commit(&lease, key(1), &tokens(1)));
    pool.release(lease);
    let lease = pool.acquire(account, key(1), &tokens(1)).unwrap();
    assert_eq!(pool.take_changes(), [committed], "it is as it was");
    pool.release(lease);
    pool.evict(account).unwrap();
    let lease = pool.allocate(account, anywhere()).unwrap();
    assert_eq!(pool.take_changes(), [cleared(block), cleared(block)]);
    assert!(pool.commit(&lease, key(1), &tokens(1)));
    pool.close(account);
    pool.release(lease);
    assert_eq!(pool.take_changes(), [committed, cleared(block)], "nothing of a closed account stays");
}
