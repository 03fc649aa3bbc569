//! KV blocks in files: out of the arena of a running model, and into a fresh one.
//!
//! **Owns** the form of a checkpoint's `ledger-<model>` and `kv-<model>`: record `i` of the one names block `i` of the other. **Never** maps
//! an arena, and never stops an engine: both are read and written through their fds. What lies in a GPU's memory is neither: of it there are
//! records alone.
//!
//! A block that is copied while an engine runs is valid because its record is the same before and after: the record is cleared before
//! anybody may write the block, and each commit counts.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use pagedd_core::{BlockId, Blocks, TenantId, Tokens};
use pagedd_host::shared::SharedMemory;
use pagedd_journal::checkpoint::{Checkpoint, SavedModel, hex};
use pagedd_kv::{DomainOwner, Ledger, LedgerHeader, LedgerRecord, PrefixHasher};
use pagedd_wire::worker::ARENA_HEADER;

/// What a KV arena begins with.
pub enum Seed {
    /// What an earlier daemon left, where it left something.
    Kept,
    /// Nothing of that, but what a checkpoint has.
    Fresh(Option<SavedBlocks>),
}

/// A model's KV arena and its ledger, as others than its engine may look at them.
#[derive(Debug)]
pub struct Shelf {
    /// `None` where only a device reads it.
    arena: Option<File>,
    ledger: File,
    header: LedgerHeader,
    /// Names the secret in a checkpoint.
    saved_key: [u8; 16],
}

/// The blocks of a checkpoint, whose records are sound. It does not tell you that their bytes are: the checkpoint's digests do.
#[derive(Debug)]
pub struct SavedBlocks {
    ledger: Ledger<Vec<u8>>,
    kv: File,
}

impl Shelf {
    /// Looks at `arena` through its ledger, whose header is `header`; at the ledger alone where only a device reads the arena.
    ///
    /// # Errors
    /// From the system.
    pub fn new(
        arena: Option<BorrowedFd<'_>>,
        ledger: BorrowedFd<'_>,
        header: LedgerHeader,
        cache_key: [u8; 32],
    ) -> io::Result<Self> {
        let copy = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().map(File::from);
        let saved_key = saved_key(cache_key);
        Ok(Self { arena: arena.map(copy).transpose()?, ledger: copy(ledger)?, header, saved_key })
    }

    /// The arena.
    ///
    /// # Errors
    /// Only a device reads it.
    fn arena(&self) -> io::Result<&File> {
        let unread = || {
            io::Error::new(
                io::ErrorKind::Unsupported,
                "KV blocks in a GPU's memory are neither read nor written",
            )
        };
        self.arena.as_ref().ok_or_else(unread)
    }

    /// Copies the records of all committed blocks, and with `kv` the blocks' bytes: how many. One that changes meanwhile is left out.
    ///
    /// # Errors
    /// A file cannot be read or written, or with `kv` only a device reads the arena.
    pub fn copy_out(
        &self,
        tenants: &BTreeSet<TenantId>,
        to: &mut File,
        mut kv: Option<&mut File>,
    ) -> io::Result<u32> {
        let mut bytes = vec![0; self.header.ledger_bytes()];
        self.ledger.read_exact_at(&mut bytes, 0)?;
        let found = Ledger::open(bytes, &self.header).map_err(|(error, _)| io::Error::other(error))?;
        let mut records = Vec::new();
        let mut block_bytes = vec![0; self.header.block_bytes as usize];
        // The number of one that came later would be another's, where the checkpoint is taken up.
        let known = |record: &LedgerRecord| matches!(record.owner, DomainOwner::Tenant(tenant) if tenants.contains(&tenant));
        for (block, record) in found.records().filter(|(_, record)| known(record)) {
            if let Some(kv) = &mut kv {
                self.arena()?.read_exact_at(&mut block_bytes, place(block, self.header.block_bytes))?;
                if !self.is_unchanged(block, found.memory())? {
                    continue;
                }
                kv.write_all(&block_bytes)?;
            }
            records.push(record);
        }
        let blocks = Blocks(records.len() as u32);
        let header = LedgerHeader { blocks, key_id: self.saved_key, ..self.header };
        let mut saved = Ledger::format(vec![0; header.ledger_bytes()], &header, 1)
            .map_err(|(error, _)| io::Error::other(error))?;
        for (block, record) in (0..).map(BlockId).zip(&records) {
            saved.commit(block, record);
        }
        to.write_all(saved.memory())?;
        Ok(blocks.0)
    }

    /// Whether the record of a block is what it was.
    fn is_unchanged(&self, block: BlockId, before: &[u8]) -> io::Result<bool> {
        let Some(at) = self.header.record_at(block) else { return Ok(false) };
        let mut now = vec![0; at.len()];
        self.ledger.read_exact_at(&mut now, at.start as u64)?;
        Ok(now == before[at])
    }

    /// Puts a checkpoint's blocks into the arena, as far as it has room, and says so in its ledger: how many. To be called before the first
    /// plan.
    ///
    /// # Errors
    /// A file cannot be read or written, or only a device reads the arena; what the ledger says is there.
    pub fn fill(&self, saved: &SavedBlocks, ledger: &mut Ledger<SharedMemory>) -> io::Result<u32> {
        let (arena, block_bytes) = (self.arena()?, self.header.block_bytes);
        let mut bytes = vec![0; block_bytes as usize];
        let mut filled = 0;
        for (block, record) in saved.ledger.records().take(self.header.blocks.0 as usize) {
            saved.kv.read_exact_at(&mut bytes, u64::from(block.0) * block_bytes)?;
            arena.write_all_at(&bytes, place(block, block_bytes))?;
            ledger.commit(block, &record);
            filled += 1;
        }
        Ok(filled)
    }
}

impl SavedBlocks {
    /// The blocks of a model in a checkpoint; `None` where their bytes were not saved.
    ///
    /// # Errors
    /// One line that names the file: it cannot be read, or is not what it was.
    pub fn open(
        checkpoint: &Checkpoint,
        model: &SavedModel,
        cache_key: [u8; 32],
    ) -> Result<Option<Self>, String> {
        let ledger = open_ledger(&checkpoint.file(&model.ledger_file()), model, cache_key)
            .map_err(|what| format!("{}: {what}", model.ledger_file()))?;
        if !model.kv {
            return Ok(None);
        }
        let name = model.kv_file();
        let opened = File::open(checkpoint.file(&name)).and_then(|kv| Ok((kv.metadata()?.len(), kv)));
        let (found, kv) = opened.map_err(|error| format!("{name}: {error}"))?;
        let expected = u64::from(model.blocks).saturating_mul(model.identity.block_bytes);
        if found == expected {
            Ok(Some(Self { ledger, kv }))
        } else {
            Err(format!("{name}: it has {found} bytes, {} blocks have {expected}", model.blocks))
        }
    }
}

/// The records that a checkpoint has, all of them sound.
fn open_ledger(path: &Path, model: &SavedModel, cache_key: [u8; 32]) -> Result<Ledger<Vec<u8>>, String> {
    let identity = &model.identity;
    let mut digest = [0; 16];
    let digits = identity.digest.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).unwrap_or(""));
    for (byte, digits) in digest.iter_mut().zip(digits) {
        *byte = u8::from_str_radix(digits, 16).map_err(|_| "its model's digest is none".to_owned())?;
    }
    if hex(&digest) != identity.digest {
        return Err("its model's digest is none".to_owned());
    }
    let expected = LedgerHeader {
        block_size: Tokens(identity.block_size),
        blocks: Blocks(model.blocks),
        block_bytes: identity.block_bytes,
        model: digest,
        key_id: saved_key(cache_key),
        weight_epoch: 0,
    };
    let mut bytes = Vec::new();
    let limit = expected.ledger_bytes() as u64;
    File::open(path).and_then(|file| file.take(limit).read_to_end(&mut bytes)).map_err(|e| e.to_string())?;
    let ledger = Ledger::open(bytes, &expected).map_err(|(error, _)| error.to_string())?;
    let sound = ledger.records().count();
    if sound == model.blocks as usize {
        Ok(ledger)
    } else {
        Err(format!("{} of its {} records are damaged", model.blocks as usize - sound, model.blocks))
    }
}

/// Where a block lies in an arena's file.
fn place(block: BlockId, block_bytes: u64) -> u64 {
    ARENA_HEADER as u64 + u64::from(block.0) * block_bytes
}

/// Names the secret of an installation in a checkpoint, which is of no arena.
fn saved_key(cache_key: [u8; 32]) -> [u8; 16] {
    PrefixHasher::new(cache_key).key_id([0; 16])
}

#[cfg(test)]
mod tests;
