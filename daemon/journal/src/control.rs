//! control.db: tenants, keys and the installation's secret.

use crate::schema::{self, CONTROL_DB};
use crate::{DbError, Digest, Installation, NewKey, Numbers};
use pagedd_core::{Quota, Quotas, TenantId};
use rusqlite::{Connection, OptionalExtension, Row, Transaction, TransactionBehavior, named_params, params};
use std::path::{Path, PathBuf};

/// The open database. One value owns one connection; every change is one transaction, on disk when the call returns.
#[derive(Debug)]
pub struct ControlDb {
    db: Connection,
    path: PathBuf,
    secret: [u8; 32],
}

/// A tenant as it is stored.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TenantRow {
    /// Its number, never used again after it.
    pub id: TenantId,
    /// Its name.
    pub name: String,
    /// Its TCP port.
    pub port: u16,
    /// The model it uses, by name.
    pub model: String,
    /// Floor as it was given.
    pub kv_floor: String,
    /// Ceiling as it was given.
    pub kv_ceiling: String,
    /// Whether a key is needed.
    pub auth: bool,
    /// Whether new requests are refused.
    pub suspended: bool,
    /// Whether its sequences guess what they say next; `None` is as its model's configuration says.
    pub prompt_lookup: Option<bool>,
    /// How long its requests are kept after they ended, in milliseconds; `None` is as the configuration says.
    pub retention_ms: Option<u64>,
    /// What it may ask for.
    pub quotas: Quotas,
    /// Limits of its processes, as text; `None` where nothing is limited.
    pub limits: Option<String>,
    /// When it was made, in seconds since 1970.
    pub created_unix: i64,
}

/// A tenant to be stored.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NewTenant {
    /// Its name.
    pub name: String,
    /// Its TCP port.
    pub port: u16,
    /// The model it uses, by name.
    pub model: String,
    /// Floor as it was given.
    pub kv_floor: String,
    /// Ceiling as it was given.
    pub kv_ceiling: String,
    /// Whether a key is needed.
    pub auth: bool,
    /// Whether its sequences guess what they say next; `None` is as its model's configuration says.
    pub prompt_lookup: Option<bool>,
    /// How long its requests are kept after they ended, in milliseconds; `None` is as the configuration says.
    pub retention_ms: Option<u64>,
    /// What it may ask for.
    pub quotas: Quotas,
    /// Limits of its processes, as text; `None` where nothing is limited.
    pub limits: Option<String>,
}

/// Changes to a tenant; `None` leaves a column as it is.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TenantUpdate {
    /// Another port.
    pub port: Option<u16>,
    /// Another floor.
    pub kv_floor: Option<String>,
    /// Another ceiling.
    pub kv_ceiling: Option<String>,
    /// Whether a key is needed.
    pub auth: Option<bool>,
    /// Whether new requests are refused.
    pub suspended: Option<bool>,
    /// Whether its sequences guess what they say next.
    pub prompt_lookup: Option<bool>,
    /// How long its requests are kept after they ended, in milliseconds; `Some(None)` is as the configuration says.
    pub retention_ms: Option<Option<u64>>,
    /// What it may ask for from now on, all of it.
    pub quotas: Option<Quotas>,
    /// Limits of its processes, as text; `Some(None)` takes all of them away.
    pub limits: Option<Option<String>>,
}

/// A key as it is stored.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KeyRow {
    /// Its number, never used again after it.
    pub id: u32,
    /// Whose it is.
    pub tenant: TenantId,
    /// What the operator calls it.
    pub label: Option<String>,
    /// Its first characters.
    pub prefix: String,
    /// Its digest.
    pub digest: Digest,
    /// When it was made, in seconds since 1970.
    pub created_unix: i64,
    /// When it was revoked, in seconds since 1970; `None` while it opens its tenant's port.
    pub revoked_unix: Option<i64>,
}

const TENANT: &str = "id, name, port, model, kv_floor, kv_ceiling, auth, suspended, prompt_lookup, retention_ms, created_unix, \
                      requests_per_minute, tokens_per_minute, max_concurrent, max_queued_requests, max_queued_tokens, limits";
const KEY: &str = "id, tenant, label, prefix, sha256, created_unix, revoked_unix";

impl ControlDb {
    /// Opens `control.db` in `state_dir`, which must be there; makes, checks and migrates it as needed.
    ///
    /// # Errors
    /// Each names the file. The caller holds the state directory's lock, so [`DbError::Locked`] is a stranger's doing.
    pub fn open(state_dir: &Path) -> Result<Self, DbError> {
        let path = state_dir.join("control.db");
        let db = schema::open(&path, CONTROL_DB)?;
        Self::over(db, path)
    }

    pub(crate) fn over(db: Connection, path: PathBuf) -> Result<Self, DbError> {
        let secret = db
            .query_row("SELECT value FROM meta WHERE key = 'installation_secret'", [], |row| row.get(0))
            .optional()
            .map_err(|error| DbError::sql(&path, error))?
            .ok_or_else(|| DbError::Corrupt {
                path: path.clone(),
                detail: "no installation secret".to_owned(),
            })?;
        Ok(Self { db, path, secret })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes all of it to a new file, on disk when it returns.
    ///
    /// # Errors
    /// Each names the new file, which may be there in part.
    pub fn save(&self, to: &Path) -> Result<(), DbError> {
        schema::save(&self.db, to)
    }

    /// 32 random bytes, drawn when the database was made: keys what must differ between installations, such as the hash of
    /// the prefix cache.
    pub const fn installation_secret(&self) -> &[u8; 32] {
        &self.secret
    }

    /// Whose the numbers of tenants and keys are. It follows from the secret, so that every backup of the database says the same.
    pub fn installation(&self) -> Installation {
        let mut id = [0; 16];
        let hash = blake3::keyed_hash(&self.secret, b"pagedd installation");
        id.copy_from_slice(&hash.as_bytes()[..16]);
        Installation(id)
    }

    /// The highest numbers that were ever given.
    pub fn numbers(&self) -> Result<Numbers, DbError> {
        let highest = |table: &str| {
            let given =
                self.rows("SELECT seq FROM sqlite_sequence WHERE name = ?1", [table], |row| row.get(0))?;
            Ok(given.into_iter().max().unwrap_or(0))
        };
        Ok(Numbers { tenant: highest("tenants")?, key: highest("keys")? })
    }

    /// Gives none of these numbers, nor any below, from here on. Says whether that changes anything.
    pub fn raise(&mut self, numbers: Numbers) -> Result<bool, DbError> {
        let given = self.numbers()?;
        if given.tenant >= numbers.tenant && given.key >= numbers.key {
            return Ok(false);
        }
        self.change(|change| {
            for (table, highest) in
                [("tenants", numbers.tenant.max(given.tenant)), ("keys", numbers.key.max(given.key))]
            {
                change.run("DELETE FROM sqlite_sequence WHERE name = ?1", [table])?;
                change.run(
                    "INSERT INTO sqlite_sequence (name, seq) VALUES (?1, ?2)",
                    params![table, highest],
                )?;
            }
            Ok(true)
        })
    }

    /// Tenants that were [removed](Self::remove_tenant), and not [forgotten](Self::forget_removed) yet.
    pub fn removed(&self) -> Result<Vec<TenantId>, DbError> {
        self.rows("SELECT tenant FROM removed ORDER BY tenant", [], |row| row.get(0).map(TenantId))
    }

    /// The journal has nothing of these removed tenants any more.
    pub fn forget_removed(&mut self, tenants: &[TenantId]) -> Result<(), DbError> {
        self.change(|change| {
            tenants
                .iter()
                .try_for_each(|tenant| change.run("DELETE FROM removed WHERE tenant = ?1", [tenant.0]))
        })
    }

    /// Every tenant, by name.
    pub fn tenants(&self) -> Result<Vec<TenantRow>, DbError> {
        self.rows(&format!("SELECT {TENANT} FROM tenants ORDER BY name"), [], tenant)
    }

    /// The tenant of this name.
    pub fn tenant_by_name(&self, name: &str) -> Result<Option<TenantRow>, DbError> {
        let mut rows = self.rows(&format!("SELECT {TENANT} FROM tenants WHERE name = ?1"), [name], tenant)?;
        Ok(rows.pop())
    }

    /// Stores a tenant and, where one is given, its first key: both or neither.
    ///
    /// # Errors
    /// [`DbError::DuplicateName`], [`DbError::DuplicatePort`].
    pub fn add_tenant(
        &mut self,
        new: &NewTenant,
        first_key: Option<&NewKey>,
        now_unix: i64,
    ) -> Result<(TenantRow, Option<KeyRow>), DbError> {
        self.change(|change| {
            change.refuse_name(&new.name)?;
            change.refuse_port(new.port, None)?;
            let row = change.one(
                &format!(
                    "INSERT INTO tenants
                         (name, port, model, kv_floor, kv_ceiling, auth, suspended, prompt_lookup, retention_ms, limits,
                          created_unix)
                     VALUES (:name, :port, :model, :floor, :ceiling, :auth, 0, :lookup, :retention, :limits, :now)
                     RETURNING {TENANT}"
                ),
                named_params! {
                    ":name": new.name,
                    ":port": new.port,
                    ":model": new.model,
                    ":floor": new.kv_floor,
                    ":ceiling": new.kv_ceiling,
                    ":auth": new.auth,
                    ":lookup": new.prompt_lookup,
                    ":retention": new.retention_ms.map(stored),
                    ":limits": new.limits,
                    ":now": now_unix,
                },
                tenant,
            )?;
            let row = change.set_quotas(row, new.quotas)?;
            let key = first_key.map(|key| change.insert_key(row.id, None, key, now_unix)).transpose()?;
            Ok((row, key))
        })
    }

    /// Changes a tenant and returns it as it is then.
    ///
    /// # Errors
    /// [`DbError::UnknownTenant`], [`DbError::DuplicatePort`].
    pub fn update_tenant(&mut self, id: TenantId, update: &TenantUpdate) -> Result<TenantRow, DbError> {
        self.change(|change| {
            if let Some(port) = update.port {
                change.refuse_port(port, Some(id))?;
            }
            let row = change
                .maybe(
                    &format!(
                        "UPDATE tenants SET port = coalesce(:port, port), kv_floor = coalesce(:floor, kv_floor),
                             kv_ceiling = coalesce(:ceiling, kv_ceiling), auth = coalesce(:auth, auth),
                             suspended = coalesce(:suspended, suspended),
                             prompt_lookup = coalesce(:lookup, prompt_lookup),
                             retention_ms = CASE WHEN :retains THEN :retention ELSE retention_ms END,
                             limits = CASE WHEN :limited THEN :limits ELSE limits END
                         WHERE id = :id RETURNING {TENANT}"
                    ),
                    named_params! {
                        ":id": id.0,
                        ":port": update.port,
                        ":floor": update.kv_floor,
                        ":ceiling": update.kv_ceiling,
                        ":auth": update.auth,
                        ":suspended": update.suspended,
                        ":lookup": update.prompt_lookup,
                        ":retains": update.retention_ms.is_some(),
                        ":retention": update.retention_ms.flatten().map(stored),
                        ":limited": update.limits.is_some(),
                        ":limits": update.limits.as_ref().and_then(Option::as_ref),
                    },
                    tenant,
                )?
                .ok_or(DbError::UnknownTenant { tenant: id })?;
            match update.quotas {
                Some(quotas) => change.set_quotas(row, quotas),
                None => Ok(row),
            }
        })
    }

    /// Removes a tenant and its keys, and returns what it was. Its number is among the [removed](Self::removed) ones: whoever ends before
    /// the journal has deleted its requests can tell them from those of a tenant that this database never knew.
    ///
    /// # Errors
    /// [`DbError::UnknownTenant`].
    pub fn remove_tenant(&mut self, id: TenantId) -> Result<TenantRow, DbError> {
        self.change(|change| {
            let row = change
                .maybe(&format!("DELETE FROM tenants WHERE id = ?1 RETURNING {TENANT}"), [id.0], tenant)?
                .ok_or(DbError::UnknownTenant { tenant: id })?;
            change.run("INSERT OR IGNORE INTO removed (tenant) VALUES (?1)", [id.0])?;
            Ok(row)
        })
    }

    /// Stores a key.
    ///
    /// # Errors
    /// [`DbError::UnknownTenant`].
    pub fn add_key(
        &mut self,
        id: TenantId,
        label: Option<&str>,
        key: &NewKey,
        now_unix: i64,
    ) -> Result<KeyRow, DbError> {
        self.change(|change| {
            change.require_tenant(id)?;
            change.insert_key(id, label, key, now_unix)
        })
    }

    /// Every key of a tenant, oldest first, revoked ones too.
    pub fn keys(&self, id: TenantId) -> Result<Vec<KeyRow>, DbError> {
        self.rows(&format!("SELECT {KEY} FROM keys WHERE tenant = ?1 ORDER BY id"), [id.0], key)
    }

    /// The keys that open a tenant's port, oldest first.
    pub fn live_keys(&self, id: TenantId) -> Result<Vec<KeyRow>, DbError> {
        let query = format!("SELECT {KEY} FROM keys WHERE tenant = ?1 AND revoked_unix IS NULL ORDER BY id");
        self.rows(&query, [id.0], key)
    }

    /// Revokes a key and returns it as it is then. One that was revoked before keeps its time.
    ///
    /// # Errors
    /// [`DbError::UnknownKey`], also where the key is another tenant's.
    pub fn revoke_key(&mut self, id: TenantId, number: u32, now_unix: i64) -> Result<KeyRow, DbError> {
        self.change(|change| {
            change
                .maybe(
                    &format!(
                        "UPDATE keys SET revoked_unix = coalesce(revoked_unix, ?3)
                         WHERE id = ?2 AND tenant = ?1 RETURNING {KEY}"
                    ),
                    params![id.0, number, now_unix],
                    key,
                )?
                .ok_or(DbError::UnknownKey { tenant: id, key: number })
        })
    }

    pub(crate) fn rows<T>(
        &self,
        query: &str,
        parameters: impl rusqlite::Params,
        read: fn(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Vec<T>, DbError> {
        let mut statement = self.db.prepare_cached(query).map_err(|error| DbError::sql(&self.path, error))?;
        let rows = statement.query_map(parameters, read).and_then(Iterator::collect);
        rows.map_err(|error| DbError::sql(&self.path, error))
    }

    /// One transaction: dropped without a commit where `act` fails.
    pub(crate) fn change<T>(
        &mut self,
        act: impl FnOnce(&Change<'_>) -> Result<T, DbError>,
    ) -> Result<T, DbError> {
        let Self { db, path, .. } = self;
        let sql = |error| DbError::sql(path, error);
        let transaction = db.transaction_with_behavior(TransactionBehavior::Immediate).map_err(sql)?;
        let change = Change { transaction, path };
        let done = act(&change)?;
        change.transaction.commit().map_err(sql)?;
        Ok(done)
    }

    #[cfg(test)]
    pub(crate) fn raw(&self) -> &Connection {
        &self.db
    }
}

/// A transaction under way.
pub(crate) struct Change<'a> {
    transaction: Transaction<'a>,
    path: &'a Path,
}

impl Change<'_> {
    pub(crate) fn run(&self, statement: &str, parameters: impl rusqlite::Params) -> Result<(), DbError> {
        let done = self.transaction.execute(statement, parameters);
        done.map(|_| ()).map_err(|error| DbError::sql(self.path, error))
    }

    fn one<T>(
        &self,
        statement: &str,
        parameters: impl rusqlite::Params,
        read: fn(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<T, DbError> {
        self.transaction
            .query_row(statement, parameters, read)
            .map_err(|error| DbError::sql(self.path, error))
    }

    pub(crate) fn maybe<T>(
        &self,
        statement: &str,
        parameters: impl rusqlite::Params,
        read: fn(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Option<T>, DbError> {
        let row = self.transaction.query_row(statement, parameters, read).optional();
        row.map_err(|error| DbError::sql(self.path, error))
    }

    fn refuse_name(&self, name: &str) -> Result<(), DbError> {
        match self.maybe("SELECT id FROM tenants WHERE name = ?1", [name], |row| row.get::<_, u32>(0))? {
            None => Ok(()),
            Some(_) => Err(DbError::DuplicateName { name: name.to_owned() }),
        }
    }

    fn refuse_port(&self, port: u16, owner: Option<TenantId>) -> Result<(), DbError> {
        match self.maybe("SELECT id FROM tenants WHERE port = ?1", [port], |row| row.get(0).map(TenantId))? {
            Some(other) if Some(other) != owner => Err(DbError::DuplicatePort { port }),
            None | Some(_) => Ok(()),
        }
    }

    fn require_tenant(&self, id: TenantId) -> Result<(), DbError> {
        match self.maybe("SELECT id FROM tenants WHERE id = ?1", [id.0], |row| row.get::<_, u32>(0))? {
            Some(_) => Ok(()),
            None => Err(DbError::UnknownTenant { tenant: id }),
        }
    }

    /// Sets all quotas of a tenant, and returns it as it is then.
    fn set_quotas(&self, row: TenantRow, quotas: Quotas) -> Result<TenantRow, DbError> {
        for quota in Quota::ALL {
            let limit = quotas.get(quota).map(stored);
            self.run(&format!("UPDATE tenants SET {quota} = ?2 WHERE id = ?1"), params![row.id.0, limit])?;
        }
        Ok(TenantRow { quotas, ..row })
    }

    fn insert_key(
        &self,
        tenant: TenantId,
        label: Option<&str>,
        new: &NewKey,
        now_unix: i64,
    ) -> Result<KeyRow, DbError> {
        self.one(
            &format!(
                "INSERT INTO keys (tenant, label, prefix, sha256, created_unix)
                 VALUES (?1, ?2, ?3, ?4, ?5) RETURNING {KEY}"
            ),
            params![tenant.0, label, new.prefix(), new.digest().0, now_unix],
            key,
        )
    }
}

/// SQLite's numbers have a sign.
fn stored(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn tenant(row: &Row<'_>) -> rusqlite::Result<TenantRow> {
    let mut quotas = Quotas::default();
    for quota in Quota::ALL {
        quotas.set(quota, row.get::<_, Option<i64>>(quota.as_str())?.map(i64::unsigned_abs));
    }
    Ok(TenantRow {
        quotas,
        id: TenantId(row.get("id")?),
        name: row.get("name")?,
        port: row.get("port")?,
        model: row.get("model")?,
        kv_floor: row.get("kv_floor")?,
        kv_ceiling: row.get("kv_ceiling")?,
        auth: row.get("auth")?,
        suspended: row.get("suspended")?,
        prompt_lookup: row.get("prompt_lookup")?,
        retention_ms: row.get::<_, Option<i64>>("retention_ms")?.map(i64::unsigned_abs),
        limits: row.get("limits")?,
        created_unix: row.get("created_unix")?,
    })
}

fn key(row: &Row<'_>) -> rusqlite::Result<KeyRow> {
    Ok(KeyRow {
        id: row.get("id")?,
        tenant: TenantId(row.get("tenant")?),
        label: row.get("label")?,
        prefix: row.get("prefix")?,
        digest: Digest(row.get("sha256")?),
        created_unix: row.get("created_unix")?,
        revoked_unix: row.get("revoked_unix")?,
    })
}
