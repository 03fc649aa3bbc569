//! Quotas: who may ask for how much, and when again.
//!
//! **Owns** every tenant's account, and the clock for all of them. **Never** trusts a gateway: it is asked where a request enters the engine.
//!
//! Accounts outlive gateways and moves to other ports. What a tenant used within the last minute before a daemon's end is in the journal:
//! the next one begins with it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use pagedd_core::{Quota, Quotas, TenantId};

mod account;
mod pace;
mod window;

use account::{Account, Charge};
pub use account::{Cost, Excess, Rate, Rates};
pub use window::MINUTE_US;

/// Where a daemon's time begins, so that what came before it has a time, too.
const ORIGIN_US: u64 = 2 * MINUTE_US;

/// All accounts.
#[derive(Clone)]
pub struct Accounts {
    tenants: Arc<Mutex<HashMap<TenantId, TenantAccount>>>,
    start: Instant,
}

/// One tenant's account. Copies are of the same one.
#[derive(Clone, Debug)]
pub struct TenantAccount {
    account: Arc<Mutex<Account>>,
    start: Instant,
}

/// A request that may be put into its engine's inbox.
///
/// Having one tells you: it is within its tenant's quotas, and counted. Dropped, it counts for nothing.
#[must_use = "dropped, the request counts for nothing"]
#[derive(Debug)]
pub struct Grant {
    tenant: TenantAccount,
    charge: Option<Charge>,
}

/// A request that was admitted. It counts until this is dropped.
#[must_use = "dropped, the request has ended"]
#[derive(Debug)]
pub struct Spending {
    tenant: TenantAccount,
    charge: Option<Charge>,
}

impl Default for Accounts {
    fn default() -> Self {
        Self { tenants: Arc::default(), start: Instant::now() }
    }
}

impl Accounts {
    /// A tenant's account, made where there is none.
    pub fn of(&self, tenant: TenantId) -> TenantAccount {
        let new = || TenantAccount { account: Arc::default(), start: self.start };
        lock(&self.tenants).entry(tenant).or_insert_with(new).clone()
    }

    /// The tenant is gone.
    pub fn forget(&self, tenant: TenantId) {
        lock(&self.tenants).remove(&tenant);
    }
}

impl TenantAccount {
    fn now_us(&self) -> u64 {
        ORIGIN_US + self.start.elapsed().as_micros() as u64
    }

    fn with<T>(&self, act: impl FnOnce(&mut Account, u64) -> T) -> T {
        let now = self.now_us();
        act(&mut lock(&self.account), now)
    }

    /// Other limits hold from now on.
    pub fn set(&self, limits: Quotas) {
        self.with(|account, _| account.set(limits));
    }

    /// Lets a request in, or says why not.
    pub fn admit(&self, cost: Cost) -> Result<Grant, Excess> {
        let charge = self.with(|account, now| account.admit(now, cost))?;
        Ok(Grant { tenant: self.clone(), charge: Some(charge) })
    }

    /// Counts a live request of an earlier daemon, with what it may still come to.
    pub fn resume(&self, cost: Cost, started: bool) -> Spending {
        let charge = self.with(|account, now| account.resume(now, cost, started));
        Spending { tenant: self.clone(), charge: Some(charge) }
    }

    /// Counts what was used some seconds ago, the oldest first.
    pub fn recall(&self, seconds_ago: u64, requests: u64, tokens: u64) {
        self.with(|account, now| {
            account.recall(now.saturating_sub(seconds_ago * 1_000_000), requests, tokens);
        });
    }

    /// How quotas by the minute stand.
    pub fn rates(&self) -> Rates {
        self.with(Account::rates)
    }

    /// Time until one of those that wait will have started, in microseconds.
    pub fn queue_wait(&self) -> u64 {
        self.with(|account, now| account.queue_wait(now))
    }

    /// A quota, how much of it is taken, and how many requests were refused for it.
    pub fn standing(&self, quota: Quota) -> (Option<u64>, u64, u64) {
        self.with(|account, now| account.standing(now, quota))
    }
}

impl Grant {
    /// The engine has it.
    pub fn accepted(mut self) -> Spending {
        Spending { tenant: self.tenant.clone(), charge: self.charge.take() }
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        if let Some(charge) = self.charge.take() {
            self.tenant.with(|account, _| account.refund(charge));
        }
    }
}

impl Spending {
    /// It has started.
    pub fn start(&mut self) {
        if let Some(charge) = &mut self.charge {
            self.tenant.with(|account, now| account.start(now, charge));
        }
    }

    /// It has generated so many tokens more.
    pub fn spend(&mut self, tokens: u64) {
        if let Some(charge) = &mut self.charge {
            self.tenant.with(|account, now| account.spend(now, charge, tokens));
        }
    }

    /// How its tenant's quotas by the minute stand.
    pub fn rates(&self) -> Rates {
        self.tenant.rates()
    }
}

impl Drop for Spending {
    fn drop(&mut self) {
        if let Some(charge) = self.charge.take() {
            self.tenant.with(|account, now| account.end(now, charge));
        }
    }
}

/// Nothing under these locks panics.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
