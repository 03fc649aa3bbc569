//! control.db and journal.db, opened together.
//!
//! **Owns** that the journal's requests are those of control.db's tenants and keys, and of no others that have their numbers. **Never**
//! deletes what neither control.db nor the operator has said to be gone.

use std::path::Path;

use pagedd_core::TenantId;
use pagedd_journal::{Bound, ControlDb, DbError, Fsync, JournalWriter, Strangers};
use tracing::{info, warn};

use crate::recorder::{now, unix};

/// Opens both. Each start finds out what has become of the one since the other was last used.
///
/// # Errors
/// One cannot be used, or they are of two installations.
pub fn open(state_dir: &Path, fsync: Fsync) -> Result<(ControlDb, JournalWriter), DbError> {
    let mut control = ControlDb::open(state_dir)?;
    let mut journal = JournalWriter::open(state_dir, fsync, now())?;
    let given = control.numbers()?;
    let bound = journal.bind(control.installation(), given)?;
    if !journal.is_present() {
        return Ok((control, journal));
    }
    if bound == Some(Bound::Made) && given.tenant > 0 {
        warn!(
            journal = %journal.db().path().display(),
            "control.db had tenants, and there was no journal.db or an empty one: what was accepted earlier and not ended is lost, and \
             nothing that was kept can be had"
        );
    }
    let kept = journal.db().numbers()?;
    if control.raise(kept)? {
        info!(
            tenant = kept.tenant,
            key = kept.key,
            "journal.db knows later numbers than control.db; they are not given again"
        );
    }
    // An older journal was put back: what it bills from now on is not what was added before.
    let ledger = journal.db().ledger()?;
    if let Err(error) = journal.db().raise_bills(control.billed(ledger)?) {
        warn!(%error, "journal.db cannot be written: the next bill brings its numbers up to date");
    }
    forget_removed(&mut control, &mut journal)?;
    let known: Vec<TenantId> = control.tenants()?.into_iter().map(|tenant| tenant.id).collect();
    match journal.db().know_tenants(&known, unix()) {
        Ok(Strangers { tenants: 0, .. }) => {}
        Ok(Strangers { tenants, live, ended }) => warn!(
            tenants,
            live,
            ended,
            "journal.db has requests of tenants that control.db does not know: nobody can read them, and they are kept for their \
             retention; was an older control.db put back?"
        ),
        Err(error) => warn!(%error, "it is not on disk since when some tenants are not known"),
    }
    Ok((control, journal))
}

/// Deletes what is left of tenants that were removed: a daemon may have ended before it did, or its disk took no writes.
fn forget_removed(control: &mut ControlDb, journal: &mut JournalWriter) -> Result<(), DbError> {
    let mut gone = control.removed()?;
    gone.retain(|tenant| {
        let deleted = journal.db().delete_tenant(*tenant, unix());
        deleted
            .inspect_err(
                |error| warn!(%tenant, %error, "requests of a removed tenant stay until the next start"),
            )
            .is_ok()
    });
    if !gone.is_empty()
        && let Err(error) = control.forget_removed(&gone)
    {
        warn!(%error, "removed tenants are looked for again at the next start");
    }
    Ok(())
}
