//! Which control.db a journal belongs to.
//!
//! **Owns** that requests are never read under numbers that meant somebody else when they were taken. **Never** deletes what it cannot place:
//! it may be that of a control.db that is put back.
//!
//! Requests name tenants and keys by number. What a number means is in control.db alone, which may be lost, or put back from a backup
//! that is older than the journal.

use crate::journal::{Commit, rows};
use crate::saved::unseal;
use crate::{DbError, JournalDb};
use pagedd_core::{RequestId, TenantId};
use rusqlite::params;

/// Names an installation: a control.db, its backups and checkpoints.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Installation(pub [u8; 16]);

/// The highest numbers of tenants and keys that are known of; 0 where there are none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Numbers {
    /// Of tenants.
    pub tenant: u32,
    /// Of keys.
    pub key: u32,
}

/// What [`JournalDb::bind`] found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Bound {
    /// The journal was bound to this installation before.
    Already,
    /// An older pagedd wrote it; it is taken for this installation's.
    Adopted,
    /// It was made by this start.
    Made,
}

/// What a journal has of tenants that control.db does not know.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Strangers {
    /// Such tenants.
    pub tenants: u32,
    /// Their requests that have not ended.
    pub live: u32,
    /// Those that have.
    pub ended: u32,
}

impl JournalDb {
    /// Binds the journal to an installation, which has `given` numbers up to these; on disk when it returns.
    ///
    /// # Errors
    /// [`DbError::OtherInstallation`]: it is bound to another one, or names tenants where none was ever given a number. Otherwise as for [`append`](Self::append); nothing has changed.
    pub fn bind(&mut self, installation: Installation, given: Numbers) -> Result<Bound, DbError> {
        let found: Vec<[u8; 16]> =
            rows(&self.db, &self.path, "SELECT id FROM installation", [], |row| row.get(0))?;
        let known = self.numbers()?;
        let foreign = match found.first() {
            Some(id) => *id != installation.0,
            None => given.tenant == 0 && known.tenant > 0,
        };
        if foreign {
            let (control, journal) = (self.path.with_file_name("control.db"), self.path.clone());
            return Err(DbError::OtherInstallation { control, journal });
        }
        if !found.is_empty() && known.tenant >= given.tenant && known.key >= given.key {
            return Ok(Bound::Already);
        }
        self.transact(Commit::Synced, |change| {
            if found.is_empty() {
                let insert = "INSERT INTO installation (id, tenant, key) VALUES (?1, 0, 0)";
                change.execute(insert, [installation.0])?;
            }
            let raise = "UPDATE installation SET tenant = max(tenant, ?1), key = max(key, ?2)";
            change.execute(raise, params![given.tenant, given.key])
        })?;
        self.committed(Commit::Synced);
        Ok(if found.is_empty() { self.unbound } else { Bound::Already })
    }

    /// The highest numbers that the journal knows of: those that requests name, those that deleted ones named, and those that
    /// [`bind`](Self::bind) was told.
    ///
    /// # Errors
    /// Where the file cannot be read.
    pub fn numbers(&self) -> Result<Numbers, DbError> {
        let query = "SELECT coalesce(max(tenant), 0), coalesce(max(key), 0)
                     FROM (SELECT tenant, key FROM requests UNION ALL SELECT tenant, key FROM installation)";
        let read = |row: &rusqlite::Row<'_>| Ok(Numbers { tenant: row.get(0)?, key: row.get(1)? });
        let mut numbers = rows(&self.db, &self.path, query, [], read)?.pop().unwrap_or_default();
        // One that cannot be read is shown to nobody, whatever its key.
        let old = "SELECT body FROM requests JOIN bodies ON bodies.request = seq WHERE key IS NULL";
        let key = |row: &rusqlite::Row<'_>| {
            let saved = unseal::<crate::SavedRequest>(row.get_ref(0)?.as_blob()?);
            Ok(saved.ok().and_then(|saved| saved.key).unwrap_or(0))
        };
        let highest = rows(&self.db, &self.path, old, [], key)?.into_iter().max();
        numbers.key = numbers.key.max(highest.unwrap_or(0));
        Ok(numbers)
    }

    /// Tells the journal which tenants control.db knows. Of others, what has not ended is kept from the first call that does not name them
    /// for as long as what has.
    ///
    /// # Errors
    /// As for [`append`](Self::append): they are kept then as long as this value is.
    pub fn know_tenants(&mut self, known: &[TenantId], now_unix: u64) -> Result<Strangers, DbError> {
        let query = "SELECT tenant, count(*) - count(finished_unix), count(finished_unix) FROM requests GROUP BY tenant";
        let read = |row: &rusqlite::Row<'_>| Ok((TenantId(row.get(0)?), row.get(1)?, row.get(2)?));
        let mut found: Vec<(TenantId, u32, u32)> = rows(&self.db, &self.path, query, [], read)?;
        found.retain(|(tenant, ..)| !known.contains(tenant));
        self.strangers = found.iter().map(|(tenant, ..)| *tenant).collect();
        let before = rows(&self.db, &self.path, "SELECT tenant FROM strangers ORDER BY tenant", [], |row| {
            row.get(0).map(TenantId)
        })?;
        if !before.iter().eq(&self.strangers) {
            let at = self.usual();
            self.transact(at, |change| {
                for tenant in before.iter().filter(|tenant| !self.strangers.contains(tenant)) {
                    change.execute("DELETE FROM strangers WHERE tenant = ?1", [tenant.0])?;
                }
                for tenant in &self.strangers {
                    let insert = "INSERT OR IGNORE INTO strangers (tenant, since_unix) VALUES (?1, ?2)";
                    change.execute(insert, params![tenant.0, now_unix as i64])?;
                }
                Ok(())
            })?;
            self.committed(at);
        }
        Ok(found.iter().fold(Strangers::default(), |sum, (_, live, ended)| Strangers {
            tenants: sum.tenants + 1,
            live: sum.live + live,
            ended: sum.ended + ended,
        }))
    }

    /// Live requests of tenants that control.db has not known since `over_at` or before.
    pub(crate) fn live_of_strangers(
        &self,
        over_at: u64,
        most: usize,
    ) -> Result<Vec<(TenantId, i64, RequestId)>, DbError> {
        let query = "SELECT tenant, seq, id FROM requests JOIN strangers USING (tenant)
                     WHERE tenant = ?1 AND finished_unix IS NULL AND since_unix <= ?2 ORDER BY seq LIMIT ?3";
        let mut found = Vec::new();
        // The table may still have one that is known by now.
        for tenant in &self.strangers {
            let most = most - found.len();
            found.extend(rows(
                &self.db,
                &self.path,
                query,
                params![tenant.0, over_at as i64, most as i64],
                |row| Ok((TenantId(row.get(0)?), row.get(1)?, RequestId(row.get(2)?))),
            )?);
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests;
