//! What each physical block of an arena holds, in memory that outlives the process.
//!
//! **Owns** the layout of that memory: a header that says what the arena is of, and one record of fixed size for each block.
//! **Never** maps or opens it, and never reads an arena.
//!
//! A block's record is cleared before anybody writes the block, and committed once the block is full and computed. A process may
//! end between any two stores: a record that was written in part has no right checksum, and is none. So a record that is found
//! tells the truth about its block, as long as whoever wrote the arena is gone.
//!
//! Integers are little endian.
//!
//! ```text
//! header  0 magic[8]  8 version  12 block size  16 blocks  20 -  24 block bytes (8)  32 model[16]  48 key id[16]
//!         64 weight epoch (8)  72 generation (8)  80 CRC-32 of [0, 80)                                   padded to 128
//! record  0 state (0: none)  4 CRC-32 of [8, 48)  8 generation (8)  16 key[16]  32 kind of owner (1)  33 dtype (1)
//!         34 commits, modulo 2^16 (2)  36 owner  40 tokens filled  44 block
//! ```

use pagedd_core::{BlockId, Blocks, TenantId, Tokens};

use crate::prefix::{BlockKey, DomainOwner};

const MAGIC: [u8; 8] = *b"pageddKV";
const VERSION: u32 = 1;
const HEADER: usize = 128;
const RECORD: usize = 48;
/// State of a committed record.
const COMMITTED: [u8; 4] = *b"full";
/// Of the header.
const GENERATION: std::ops::Range<usize> = 72..80;
const HEADER_CRC: usize = 80;

/// What an arena is of. A ledger with another header says nothing about it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LedgerHeader {
    /// Tokens in a block.
    pub block_size: Tokens,
    /// Blocks in the arena.
    pub blocks: Blocks,
    /// Bytes of a block, all layers.
    pub block_bytes: u64,
    /// Digest of the model's file, dtypes and layout.
    pub model: [u8; 16],
    /// Names the secret of the prefix keys, without telling it.
    pub key_id: [u8; 16],
    /// Counts changes of the weights under one model.
    pub weight_epoch: u64,
}

/// A ledger that does not speak of the arena expected. It can be formatted anew, and then it is empty.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LedgerError {
    /// Fewer bytes than the blocks need.
    #[error("a ledger of these blocks has {needed} bytes, the memory has {bytes}")]
    Size {
        /// Of the memory.
        bytes: usize,
        /// For all blocks.
        needed: usize,
    },
    /// No header, or one that was written in part.
    #[error("the memory holds no ledger")]
    None,
    /// The header is of something else.
    #[error("the ledger's {field} is {found:x}, not {expected:x}")]
    Mismatch {
        /// Which part of the header.
        field: &'static str,
        /// In the memory.
        found: u128,
        /// As it must be.
        expected: u128,
    },
}

/// What a full block holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LedgerRecord {
    /// Whose share it counts against.
    pub owner: DomainOwner,
    /// Names its tokens and all before them.
    pub key: BlockKey,
    /// As in [`crate::Domain`].
    pub dtype: u8,
    /// Positions that are computed.
    pub tokens: Tokens,
}

/// A change of one record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LedgerChange {
    /// From now on the block may be written: nothing is known of it.
    Clear(BlockId),
    /// The block is full, and does not change any more.
    Commit(BlockId, LedgerRecord),
}

/// A formatted ledger in some memory, written by one process at a time.
#[derive(Debug)]
pub struct Ledger<M> {
    memory: M,
    blocks: u32,
    generation: u64,
}

impl LedgerHeader {
    /// Bytes of a ledger of so many blocks.
    #[must_use]
    pub fn ledger_bytes(&self) -> usize {
        HEADER + self.blocks.0 as usize * RECORD
    }

    /// Where a block's record lies. Each commit changes its bytes and each clear too: who finds the same sound record before and after
    /// reading a block has read what the record names.
    #[must_use]
    pub fn record_at(&self, block: BlockId) -> Option<std::ops::Range<usize>> {
        place(block, self.blocks.0)
    }

    fn encode(&self, generation: u64) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.block_size.0.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.blocks.0.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.block_bytes.to_le_bytes());
        bytes[32..48].copy_from_slice(&self.model);
        bytes[48..64].copy_from_slice(&self.key_id);
        bytes[64..72].copy_from_slice(&self.weight_epoch.to_le_bytes());
        bytes[GENERATION].copy_from_slice(&generation.to_le_bytes());
        let crc = crc32(&bytes[..HEADER_CRC]);
        bytes[HEADER_CRC..HEADER_CRC + 4].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Compares the header in `bytes` with this one.
    fn check(&self, bytes: &[u8]) -> Result<(), LedgerError> {
        let needed = self.ledger_bytes();
        if bytes.len() < needed {
            return Err(LedgerError::Size { bytes: bytes.len(), needed });
        }
        let crc = u128::from(crc32(&bytes[..HEADER_CRC]));
        if bytes[..8] != MAGIC || number(&bytes[HEADER_CRC..HEADER_CRC + 4]) != crc {
            return Err(LedgerError::None);
        }
        let expected = self.encode(0);
        let fields = [
            ("version", 8..12),
            ("block size", 12..16),
            ("number of blocks", 16..20),
            ("size of a block", 24..32),
            ("model", 32..48),
            ("key", 48..64),
            ("weight epoch", 64..72),
        ];
        for (field, at) in fields {
            let (found, expected) = (number(&bytes[at.clone()]), number(&expected[at]));
            if found != expected {
                return Err(LedgerError::Mismatch { field, found, expected });
            }
        }
        Ok(())
    }
}

impl<M: AsRef<[u8]> + AsMut<[u8]>> Ledger<M> {
    /// Makes an empty ledger. `generation` differs from that of any ledger that was in this memory before, so that none of its
    /// records is taken for one of this.
    ///
    /// # Errors
    /// `Size`, and the memory, in which nothing has changed.
    pub fn format(mut memory: M, header: &LedgerHeader, generation: u64) -> Result<Self, (LedgerError, M)> {
        let needed = header.ledger_bytes();
        let bytes = memory.as_mut();
        if bytes.len() < needed {
            return Err((LedgerError::Size { bytes: bytes.len(), needed }, memory));
        }
        bytes[..needed].fill(0);
        bytes[..HEADER].copy_from_slice(&header.encode(generation));
        Ok(Self { memory, blocks: header.blocks.0, generation })
    }

    /// Takes a ledger that an earlier process left, if it is of what is expected.
    ///
    /// # Errors
    /// Why it is not, and the memory, in which nothing has changed.
    pub fn open(memory: M, expected: &LedgerHeader) -> Result<Self, (LedgerError, M)> {
        let bytes = memory.as_ref();
        if let Err(error) = expected.check(bytes) {
            return Err((error, memory));
        }
        let generation = number(&bytes[GENERATION]) as u64;
        Ok(Self { memory, blocks: expected.blocks.0, generation })
    }

    /// Which one it is.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Makes a change. A block beyond the arena has no record.
    pub fn write(&mut self, change: &LedgerChange) {
        match change {
            LedgerChange::Clear(block) => self.clear(*block),
            LedgerChange::Commit(block, record) => self.commit(*block, record),
        }
    }

    /// Nothing is known of this block any more. To be done before anybody writes it.
    pub fn clear(&mut self, block: BlockId) {
        if let Some(bytes) = self.record_mut(block) {
            bytes[..4].fill(0);
        }
    }

    /// This block is full and computed.
    pub fn commit(&mut self, block: BlockId, record: &LedgerRecord) {
        let generation = self.generation;
        let Some(bytes) = self.record_mut(block) else { return };
        bytes[..4].fill(0);
        let commits = (number(&bytes[34..36]) as u16).wrapping_add(1);
        let (kind, owner) = match record.owner {
            DomainOwner::Tenant(TenantId(id)) => (0, id),
            DomainOwner::Group(id) => (1, id),
        };
        bytes[8..16].copy_from_slice(&generation.to_le_bytes());
        bytes[16..32].copy_from_slice(&record.key.0);
        bytes[32..34].copy_from_slice(&[kind, record.dtype]);
        bytes[34..36].copy_from_slice(&commits.to_le_bytes());
        bytes[36..40].copy_from_slice(&owner.to_le_bytes());
        bytes[40..44].copy_from_slice(&record.tokens.0.to_le_bytes());
        bytes[44..48].copy_from_slice(&block.0.to_le_bytes());
        let crc = crc32(&bytes[8..]);
        bytes[4..8].copy_from_slice(&crc.to_le_bytes());
        bytes[..4].copy_from_slice(&COMMITTED);
    }

    /// The committed records. One that is torn, of another generation or of another block is none.
    pub fn records(&self) -> impl Iterator<Item = (BlockId, LedgerRecord)> {
        (0..self.blocks).map(BlockId).filter_map(|block| Some((block, self.record(block)?)))
    }

    /// What is committed of one block.
    #[must_use]
    pub fn record(&self, block: BlockId) -> Option<LedgerRecord> {
        let at = place(block, self.blocks)?;
        let bytes: &[u8; RECORD] = self.memory.as_ref()[at].try_into().ok()?;
        let sound = bytes[..4] == COMMITTED
            && number(&bytes[4..8]) == u128::from(crc32(&bytes[8..]))
            && number(&bytes[8..16]) == u128::from(self.generation)
            && number(&bytes[44..48]) == u128::from(block.0);
        let id = number(&bytes[36..40]) as u32;
        let owner = match bytes[32] {
            0 => DomainOwner::Tenant(TenantId(id)),
            1 => DomainOwner::Group(id),
            _ => return None,
        };
        let mut key = [0; 16];
        key.copy_from_slice(&bytes[16..32]);
        let tokens = Tokens(number(&bytes[40..44]) as u32);
        sound.then_some(LedgerRecord { owner, key: BlockKey(key), dtype: bytes[33], tokens })
    }

    /// The memory.
    pub const fn memory(&self) -> &M {
        &self.memory
    }

    /// The memory, as it is.
    pub fn into_memory(self) -> M {
        self.memory
    }

    fn record_mut(&mut self, block: BlockId) -> Option<&mut [u8; RECORD]> {
        let at = place(block, self.blocks)?;
        (&mut self.memory.as_mut()[at]).try_into().ok()
    }
}

/// Bytes of a block's record.
fn place(block: BlockId, blocks: u32) -> Option<std::ops::Range<usize>> {
    let start = HEADER + block.0 as usize * RECORD;
    (block.0 < blocks).then_some(start..start + RECORD)
}

/// Up to 16 bytes, the first the least.
fn number(bytes: &[u8]) -> u128 {
    bytes.iter().rev().fold(0, |number, byte| number << 8 | u128::from(*byte))
}

/// CRC-32 of IEEE 802.3, by bytes.
fn crc32(bytes: &[u8]) -> u32 {
    static TABLE: [u32; 256] = table();
    let byte = |crc: u32, byte: &u8| crc >> 8 ^ TABLE[((crc ^ u32::from(*byte)) & 255) as usize];
    !bytes.iter().fold(!0, byte)
}

const fn table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut i = 0;
    while i < 256 {
        let (mut crc, mut bit) = (i as u32, 0);
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
            bit += 1;
        }
        table[i] = crc;
        i += 1;
    }
    table
}

#[cfg(test)]
mod tests;
