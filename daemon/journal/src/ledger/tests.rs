use super::*;
use crate::{NewKey, NewTenant};
use pagedd_core::Quotas;
use std::sync::Arc;
use tempfile::TempDir;

const JOURNAL: LedgerId = LedgerId([1; 16]);
/// An hour's beginning that is a day's, too.
const DAY: u64 = 1_789_948_800;

fn open(dir: &TempDir) -> ControlDb {
    ControlDb::open(dir.path()).unwrap()
}

fn tenant(db: &mut ControlDb, name: &str, port: u16) -> TenantId {
    let new = NewTenant {
        name: name.to_owned(),
        port,
        model: "m".to_owned(),
        kv_floor: "0%".to_owned(),
        kv_ceiling: "100%".to_owned(),
        auth: true,
        prompt_lookup: None,
        retention_ms: None,
        quotas: Quotas::default(),
        limits: None,
    };
    db.add_tenant(&new, Some(&NewKey::draw().unwrap()), 0).unwrap().0.id
}

fn bill(number: i64, at_unix: u64, tenant: TenantId, key: Option<u32>, output: u64) -> Bill {
    let payer = Payer { tenant, key, model: Arc::from("m") };
    let usage = Usage { requests: 1, output_tokens: output, prompt_tokens: 10, ..Usage::default() };
    Bill { number, at_unix, payer, usage }
}

fn outputs(db: &ControlDb, tenant: Option<&str>, since_unix: u64, by: UsageBy) -> Vec<(String, u64)> {
    let query = UsageQuery { tenant: tenant.map(str::to_owned), since_unix, by };
    let shown = |row: UsageRow| {
        let what = row
            .from_unix
            .map(|from| (from - DAY) / 3600)
            .map(|hour| hour.to_string())
            .or(row.key.map(|key| format!("key {key:?}")))
            .or(row.model);
        let name = row.name.unwrap_or_else(|| format!("#{}", row.tenant.0));
        let gone = if row.removed { "-" } else { "" };
        (
            format!("{gone}{name}{}", what.map_or_else(String::new, |what| format!(" {what}"))),
            row.usage.output_tokens,
        )
    };
    db.usage(&query).unwrap().into_iter().map(shown).collect()
}

fn expected(rows: &[(&str, u64)]) -> Vec<(String, u64)> {
    rows.iter().map(|(what, output)| ((*what).to_owned(), *output)).collect()
}

#[test]
fn bills_are_added_once_however_often_they_are_brought() {
    let dir = tempfile::tempdir().unwrap();
    let mut db = open(&dir);
    let acme = tenant(&mut db, "acme", 8101);
    let bills: Vec<Bill> = (1..=3).map(|n| bill(n, DAY, acme, None, 1 << n)).collect();
    assert_eq!(db.billed(JOURNAL).unwrap(), 0);
    assert_eq!(db.charge(JOURNAL, &bills[..2]).unwrap(), 2);
    assert_eq!(db.charge(JOURNAL, &bills[..2]).unwrap(), 2);
    drop(db);
    let mut db = open(&dir);
    assert_eq!(db.charge(JOURNAL, &bills).unwrap(), 3);
    assert_eq!(db.charge(JOURNAL, &bills).unwrap(), 3);
    assert_eq!(db.billed(JOURNAL).unwrap(), 3);
    assert_eq!(outputs(&db, None, 0, UsageBy::Tenant), expected(&[("acme", 14)]));
    // Another journal's numbers are its own.
    assert_eq!(db.charge(LedgerId([2; 16]), &bills[..1]).unwrap(), 1);
    assert_eq!(outputs(&db, None, 0, UsageBy::Tenant), expected(&[("acme", 16)]));
}

#[test]
fn usage_is_told_by_tenant_day_hour_key_and_model() {
    let dir = tempfile::tempdir().unwrap();
    let mut db = open(&dir);
    let (zebra, acme) = (tenant(&mut db, "zebra", 8101), tenant(&mut db, "acme", 8102));
    let bills = [
        bill(1, DAY - 1, zebra, Some(4), 1),
        bill(2, DAY, zebra, Some(4), 2),
        bill(3, DAY + 3599, zebra, Some(5), 4),
        bill(4, DAY + 3600, zebra, None, 8),
        bill(5, DAY + 25 * 3600, acme, Some(6), 16),
    ];
    db.charge(JOURNAL, &bills).unwrap();
    assert_eq!(outputs(&db, None, 0, UsageBy::Tenant), expected(&[("acme", 16), ("zebra", 15)]));
    assert_eq!(outputs(&db, Some("zebra"), DAY, UsageBy::Hour), expected(&[("zebra 0", 6), ("zebra 1", 8)]));
    assert_eq!(outputs(&db, Some("acme"), 0, UsageBy::Day), expected(&[("acme 24", 16)]));
    assert_eq!(outputs(&db, Some("zebra"), DAY + 100, UsageBy::Day), expected(&[("zebra 0", 14)]));
    let keys = [("zebra key None", 8), ("zebra key Some(4)", 3), ("zebra key Some(5)", 4)];
    assert_eq!(outputs(&db, Some("zebra"), 0, UsageBy::Key), expected(&keys));
    assert_eq!(outputs(&db, None, DAY + 86_400, UsageBy::Model), expected(&[("acme m", 16)]));
    assert_eq!(outputs(&db, Some("nobody"), 0, UsageBy::Tenant), []);
}

#[test]
fn a_removed_tenants_usage_stays_under_its_name_and_is_not_the_next_ones() {
    let dir = tempfile::tempdir().unwrap();
    let mut db = open(&dir);
    let first = tenant(&mut db, "acme", 8101);
    db.charge(JOURNAL, &[bill(1, DAY, first, None, 1)]).unwrap();
    db.remove_tenant(first).unwrap();
    // What it had running is billed after it is gone.
    db.charge(JOURNAL, &[bill(2, DAY, first, None, 2), bill(3, DAY, TenantId(99), None, 8)]).unwrap();
    let second = tenant(&mut db, "acme", 8101);
    db.charge(JOURNAL, &[bill(4, DAY, second, None, 4)]).unwrap();
    let all = [("-#99", 8), ("-acme", 3), ("acme", 4)];
    assert_eq!(outputs(&db, None, 0, UsageBy::Tenant), expected(&all));
    assert_eq!(outputs(&db, Some("acme"), 0, UsageBy::Tenant), expected(&all[1..]));
    assert!(db.was_known("acme").unwrap() && !db.was_known("nobody").unwrap());
}

#[test]
fn quotas_are_kept_changed_and_taken_away() {
    use pagedd_core::Quota;
    let dir = tempfile::tempdir().unwrap();
    let mut db = open(&dir);
    let acme = tenant(&mut db, "acme", 8101);
    let mut quotas = Quotas::default();
    quotas.set(Quota::TokensPerMinute, Some(1 << 40));
    quotas.set(Quota::MaxQueuedTokens, Some(1));
    let update = crate::TenantUpdate { quotas: Some(quotas), ..crate::TenantUpdate::default() };
    assert_eq!(db.update_tenant(acme, &update).unwrap().quotas, quotas);
    drop(db);
    let mut db = open(&dir);
    assert_eq!(db.tenants().unwrap()[0].quotas, quotas);
    let update = crate::TenantUpdate { port: Some(8105), ..crate::TenantUpdate::default() };
    assert_eq!(db.update_tenant(acme, &update).unwrap().quotas, quotas, "what is not named stays");
    let none = crate::TenantUpdate { quotas: Some(Quotas::default()), ..crate::TenantUpdate::default() };
    db.update_tenant(acme, &none).unwrap();
    assert_eq!(db.tenants().unwrap()[0].quotas, Quotas::default());
}
