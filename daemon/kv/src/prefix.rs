//! The index of committed full blocks.
//!
//! **Owns** which block holds which tokens behind which prefix. **Never** counts leases, and never crosses a domain: a key is a
//! keyed hash that starts from the domain, so that equal tokens of two accounts have unrelated keys.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt;

use pagedd_core::{BlockId, TenantId, TokenId};

/// Names a full block by everything its contents depend on: domain, all tokens before it, and its own tokens.
///
/// 128 bits of a keyed BLAKE3 (O'Connor et al., 2020): without the key nobody can make two prefixes that collide.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockKey(pub [u8; 16]);

/// The order of the bytes, in one comparison.
impl Ord for BlockKey {
    fn cmp(&self, other: &Self) -> Ordering {
        u128::from_be_bytes(self.0).cmp(&u128::from_be_bytes(other.0))
    }
}

impl PartialOrd for BlockKey {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Debug for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BlockKey(")?;
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        f.write_str(")")
    }
}

/// Who may find a block again.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum DomainOwner {
    /// One tenant.
    Tenant(TenantId),
    /// Tenants that the operator put into one group.
    Group(u32),
}

/// What keys start from: blocks of two domains are never taken for one another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Domain {
    /// Who.
    pub owner: DomainOwner,
    /// Digest or epoch of the weights.
    pub weights: [u8; 16],
    /// Adapter on top of the weights; 0 is none.
    pub adapter: u32,
    /// How keys and values are kept; 0 where `weights` covers it.
    pub dtype: u8,
}

/// Computes keys. Holds the secret.
#[derive(Clone)]
pub struct PrefixHasher {
    key: [u8; 32],
}

impl PrefixHasher {
    /// A hasher with this secret, drawn by the caller at random and kept as long as the blocks are.
    #[must_use]
    pub fn new(key: [u8; 32]) -> Self {
        Self { key }
    }

    /// The key that a domain's first block follows.
    #[must_use]
    pub fn root(&self, domain: &Domain) -> BlockKey {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(b"pagedd prefix domain 1");
        let (kind, number) = match domain.owner {
            DomainOwner::Tenant(TenantId(id)) => (0_u8, id),
            DomainOwner::Group(id) => (1, id),
        };
        hasher.update(&[kind, domain.dtype]);
        hasher.update(&number.to_le_bytes());
        hasher.update(&domain.adapter.to_le_bytes());
        hasher.update(&domain.weights);
        truncated(&hasher)
    }

    /// Names the secret for a [`crate::LedgerHeader`] of the arena named `arena`, without telling it: of another secret, or of
    /// another arena, the name is another.
    #[must_use]
    pub fn key_id(&self, arena: [u8; 16]) -> [u8; 16] {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(b"pagedd ledger 1");
        hasher.update(&arena);
        truncated(&hasher).0
    }

    /// The key of the block with these tokens behind `parent`.
    #[must_use]
    pub fn block(&self, parent: BlockKey, tokens: &[TokenId]) -> BlockKey {
        let mut hasher = blake3::Hasher::new_keyed(&self.key);
        hasher.update(&parent.0);
        let mut bytes = [0_u8; 256];
        for part in tokens.chunks(64) {
            for (slot, token) in bytes.chunks_exact_mut(4).zip(part) {
                slot.copy_from_slice(&token.0.to_le_bytes());
            }
            hasher.update(&bytes[..part.len() * 4]);
        }
        truncated(&hasher)
    }
}

impl fmt::Debug for PrefixHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PrefixHasher(..)")
    }
}

fn truncated(hasher: &blake3::Hasher) -> BlockKey {
    let mut key = [0; 16];
    hasher.finalize_xof().fill(&mut key);
    BlockKey(key)
}

#[derive(Debug)]
struct Entry {
    block: BlockId,
    /// Compared on every hit; `None` where only the key is known, as after a recovery from a ledger without tokens.
    tokens: Option<Box<[TokenId]>>,
}

/// Committed full blocks by key.
#[derive(Debug, Default)]
pub(crate) struct PrefixCache {
    entries: BTreeMap<BlockKey, Entry>,
}

impl PrefixCache {
    /// The block under this key, unless its tokens are known and differ.
    pub fn find(&self, key: BlockKey, tokens: &[TokenId]) -> Option<BlockId> {
        let entry = self.entries.get(&key)?;
        entry.tokens.as_deref().is_none_or(|known| known == tokens).then_some(entry.block)
    }

    /// Enters a block; `false` where the key is there already, and nothing has changed.
    pub fn insert(&mut self, key: BlockKey, block: BlockId, tokens: Option<&[TokenId]>) -> bool {
        let vacant = !self.entries.contains_key(&key);
        if vacant {
            self.entries.insert(key, Entry { block, tokens: tokens.map(Into::into) });
        }
        vacant
    }

    pub fn remove(&mut self, key: BlockKey) {
        self.entries.remove(&key);
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn block(&self, key: BlockKey) -> Option<BlockId> {
        self.entries.get(&key).map(|entry| entry.block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn domain(tenant: u32) -> Domain {
        Domain { owner: DomainOwner::Tenant(TenantId(tenant)), weights: [7; 16], adapter: 0, dtype: 0 }
    }

    #[test]
    fn every_part_of_the_domain_changes_every_key() {
        let hasher = PrefixHasher::new([1; 32]);
        let base = domain(1);
        let others = [
            domain(2),
            Domain { owner: DomainOwner::Group(1), ..base },
            Domain { weights: [8; 16], ..base },
            Domain { adapter: 1, ..base },
            Domain { dtype: 1, ..base },
        ];
        let tokens: Vec<_> = (0..16).map(TokenId).collect();
        let key = hasher.block(hasher.root(&base), &tokens);
        for other in others {
            assert_ne!(key, hasher.block(hasher.root(&other), &tokens), "{other:?}");
        }
        let secret = PrefixHasher::new([2; 32]);
        assert_ne!(key, secret.block(secret.root(&base), &tokens));
    }

    #[test]
    fn the_name_of_a_secret_is_another_for_each_arena_and_for_each_secret() {
        let [a, b] = [1, 2].map(|byte| PrefixHasher::new([byte; 32]));
        assert_eq!(a.key_id([3; 16]), PrefixHasher::new([1; 32]).key_id([3; 16]));
        assert_ne!(a.key_id([3; 16]), a.key_id([4; 16]));
        assert_ne!(a.key_id([3; 16]), b.key_id([3; 16]));
    }

    #[test]
    fn a_key_depends_on_all_tokens_before_it() {
        let hasher = PrefixHasher::new([1; 32]);
        let root = hasher.root(&domain(1));
        let (a, b): (Vec<_>, Vec<_>) = ((0..300).map(TokenId).collect(), (1..301).map(TokenId).collect());
        assert_ne!(hasher.block(hasher.block(root, &a), &a), hasher.block(hasher.block(root, &b), &a));
        assert_ne!(hasher.block(root, &a), hasher.block(root, &a[..299]));
    }

    #[test]
    fn a_hit_with_other_tokens_is_no_hit() {
        let mut cache = PrefixCache::default();
        let key = BlockKey([3; 16]);
        assert!(cache.insert(key, BlockId(5), Some(&[TokenId(1)])));
        assert!(!cache.insert(key, BlockId(6), Some(&[TokenId(1)])));
        assert_eq!(cache.find(key, &[TokenId(1)]), Some(BlockId(5)));
        assert_eq!(cache.find(key, &[TokenId(2)]), None);
        cache.remove(key);
        assert!(cache.insert(key, BlockId(6), None));
        assert_eq!(cache.find(key, &[TokenId(2)]), Some(BlockId(6)));
    }
}
