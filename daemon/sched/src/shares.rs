//! Tenants and their bounds.
//!
//! **Owns** when a share that was set comes into force. **Never** takes a block: the next step does.
//!
//! A request was admitted because it fits the bounds of then. If bounds could shrink under it, it might never run again.
//! Hence: a lower floor and a higher ceiling are in force at once; a higher floor or a lower ceiling is in force for
//! *admission* at once, and for blocks as soon as every admitted request fits it. So a change waits for admitted requests
//! that contradict it, at most for their run, and at every moment every admitted request can be served.

use std::collections::BTreeMap;

use pagedd_core::{Blocks, FinishReason, TenantId};
use pagedd_kv::{Domain, DomainOwner, Share, ShareError};

use crate::adopt::DTYPE;
use crate::config::ShareSpec;
use crate::request::Finished;
use crate::scheduler::Scheduler;
use crate::tenant::Tenant;

impl Scheduler {
    /// Sets a tenant's bounds; a new tenant enters with them.
    ///
    /// # Errors
    /// Nothing has changed.
    pub fn set_share(&mut self, tenant: TenantId, spec: ShareSpec) -> Result<(), ShareError> {
        if spec.floor > spec.ceiling {
            return Err(ShareError::FloorAboveCeiling { floor: spec.floor, ceiling: spec.ceiling });
        }
        let others = self.tenants.iter().filter(|(id, _)| **id != tenant);
        let sum = others.map(|(_, t)| u64::from(t.target.floor.0)).sum::<u64>() + u64::from(spec.floor.0);
        let capacity = self.config.capacity;
        if sum > u64::from(capacity.0) {
            return Err(ShareError::FloorsExceedPool { sum, capacity });
        }
        if let Some(known) = self.tenants.get_mut(&tenant) {
            known.target = spec;
        } else {
            let account = self.pool.open(Share { floor: Blocks::ZERO, ceiling: spec.ceiling })?;
            let root = self.hasher.root(&Domain {
                owner: DomainOwner::Tenant(tenant),
                weights: self.config.weight_digest,
                adapter: 0,
                dtype: DTYPE,
            });
            self.tenants.insert(tenant, Tenant::new(account, spec, root));
        }
        self.put_shares_in_force();
        Ok(())
    }

    /// Sets whether a tenant's sequences guess what they say next, from their next step on; `None` is as the engine says.
    /// Nothing where the tenant is not known.
    pub fn set_prompt_lookup(&mut self, tenant: TenantId, on: Option<bool>) {
        if let Some(tenant) = self.tenants.get_mut(&tenant) {
            tenant.prompt_lookup = on;
        }
    }

    /// Cancels everything that a tenant has, and forgets it. Blocks that a plan in flight may read return when it is applied.
    #[must_use = "these ends are reported nowhere else"]
    pub fn remove_tenant(&mut self, tenant: TenantId) -> Vec<Finished> {
        let requests: Vec<_> =
            self.requests.iter().filter(|(_, r)| r.tenant == tenant).map(|(id, _)| *id).collect();
        let finished: Vec<_> = requests
            .into_iter()
            .flat_map(|request| self.finish_request(request, FinishReason::Cancelled))
            .collect();
        if let Some(gone) = self.tenants.remove(&tenant) {
            self.pool.close(gone.account);
            self.put_shares_in_force();
        }
        finished
    }

    /// Most blocks that a tenant's request may need, by the bounds as last set.
    pub(crate) fn allowed(&self, tenant: TenantId) -> Blocks {
        let floors = self.tenants.iter().map(|(id, t)| (*id, t.target.floor));
        let ceiling = self.tenants.get(&tenant).map_or(Blocks::ZERO, |t| t.target.ceiling);
        allowed(self.config.capacity, tenant, ceiling, floors)
    }

    /// Moves the accounts' bounds towards those that were set, as far as every admitted request still fits.
    pub(crate) fn put_shares_in_force(&mut self) {
        let mut largest: BTreeMap<TenantId, Blocks> = BTreeMap::new();
        for request in self.requests.values() {
            let entry = largest.entry(request.tenant).or_default();
            *entry = request.needed.max(*entry);
        }
        let mut shares: BTreeMap<TenantId, Share> = BTreeMap::new();
        for (id, tenant) in &self.tenants {
            let Some(now) = self.pool.usage(tenant.account).map(|usage| usage.share) else { continue };
            let floor = now.floor.min(tenant.target.floor);
            shares.insert(*id, Share { floor, ceiling: now.ceiling.max(tenant.target.ceiling) });
        }
        for (id, tenant) in &self.tenants {
            for raise_floor in [true, false] {
                let now = shares[id];
                let wanted = if raise_floor {
                    Share { floor: tenant.target.floor, ..now }
                } else {
                    Share { ceiling: tenant.target.ceiling, ..now }
                };
                let before = shares.insert(*id, wanted);
                let fits = largest.iter().all(|(owner, needed)| {
                    let floors = shares.iter().map(|(id, share)| (*id, share.floor));
                    let ceiling = shares.get(owner).map_or(Blocks::ZERO, |share| share.ceiling);
                    *needed <= allowed(self.config.capacity, *owner, ceiling, floors)
                });
                if let (false, Some(before)) = (fits, before) {
                    shares.insert(*id, before);
                }
            }
        }
        // Lower floors first: at no moment do the floors exceed the pool.
        let mut order: Vec<_> = shares.into_iter().collect();
        order.sort_by_key(|(_, share)| share.floor);
        for raise in [false, true] {
            for (id, share) in &order {
                let Some(tenant) = self.tenants.get(id) else { continue };
                let now = self.pool.usage(tenant.account).map_or(Blocks::ZERO, |usage| usage.share.floor);
                if (share.floor > now) == raise {
                    let set = self.pool.set_share(tenant.account, *share);
                    debug_assert_eq!(set, Ok(()), "bounds in force are never tighter than those set");
                }
            }
        }
        self.misfits = self
            .requests
            .iter()
            .filter(|(_, r)| r.needed > self.allowed(r.tenant))
            .map(|(id, _)| *id)
            .collect();
    }
}

/// The smaller of the ceiling and what the floors of others leave.
fn allowed(
    capacity: Blocks,
    tenant: TenantId,
    ceiling: Blocks,
    floors: impl Iterator<Item = (TenantId, Blocks)>,
) -> Blocks {
    let others: Blocks = floors.filter(|(id, _)| *id != tenant).map(|(_, floor)| floor).sum();
    ceiling.min(capacity.saturating_sub(others))
}
