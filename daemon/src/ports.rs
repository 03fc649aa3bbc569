//! The tenants' ports at a start: kept from an earlier daemon, or bound now.
//!
//! **Owns** which kept socket is whose. What counts is the port that a socket is bound to, whichever tenant it was kept for: after a checkpoint
//! was put in place, a port may be another tenant's. **Never** closes a socket that some tenant wants.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use pagedd_core::TenantId;
use pagedd_host::fdstore::FdStore;
use pagedd_host::net::{BindError, bind_tcp};
use pagedd_journal::TenantRow;
use pagedd_journal::checkpoint::SavedPort;
use tracing::{info, warn};

/// What names of stored ports begin with.
const LISTENER: &str = "port-";
/// The manager closes a port that is not wanted a moment after it was told, and a gateway of a dead daemon ends a moment after it.
const CLOSING: Duration = Duration::from_secs(2);
/// Between two tries to bind a port.
const PAUSE: Duration = Duration::from_millis(5);

/// A tenant whose port cannot be had.
#[derive(thiserror::Error, Debug)]
#[error("tenant `{tenant}`: {source}")]
pub struct NoPort {
    tenant: String,
    source: BindError,
}

/// The port of each tenant: a kept socket that is bound to it, or one that is bound now. Kept sockets that nobody wants are closed before any
/// is bound.
///
/// # Errors
/// The first port that cannot be bound.
pub fn listeners(
    store: &FdStore,
    address: IpAddr,
    tenants: &[TenantRow],
) -> Result<BTreeMap<TenantId, OwnedFd>, NoPort> {
    let names = names(store);
    let mut kept = BTreeMap::new();
    for name in &names {
        let Some(listener) = store.take(name).map(TcpListener::from) else { continue };
        if let Ok(address) = listener.local_addr() {
            kept.entry(address).or_insert((name, listener));
        }
    }
    let mut listeners = BTreeMap::new();
    for tenant in tenants {
        let Some((name, listener)) = kept.remove(&SocketAddr::new(address, tenant.port)) else { continue };
        let listener = OwnedFd::from(listener);
        if *name != listener_name(tenant.id) {
            info!(tenant = tenant.name, port = tenant.port, "a port that was kept for another tenant");
            keep(store, tenant.id, &listener);
        }
        listeners.insert(tenant.id, listener);
    }
    drop(kept);
    let wanted: BTreeSet<String> = listeners.keys().copied().map(listener_name).collect();
    for name in names.iter().filter(|name| !wanted.contains(*name)) {
        match store.remove(name) {
            Ok(()) => info!(name, "a port of an earlier daemon is not needed any more"),
            Err(error) => warn!(name, %error, "the fd store keeps a port that is gone"),
        }
    }
    for tenant in tenants.iter().filter(|tenant| !wanted.contains(&listener_name(tenant.id))) {
        let listener =
            bind(address, tenant.port).map_err(|source| NoPort { tenant: tenant.name.clone(), source })?;
        keep(store, tenant.id, &listener);
        listeners.insert(tenant.id, listener);
    }
    Ok(listeners)
}

/// Waits where the port is in use by what is about to end.
fn bind(address: IpAddr, port: u16) -> Result<OwnedFd, BindError> {
    let until = Instant::now() + CLOSING;
    loop {
        match bind_tcp(address, port) {
            Err(BindError::PortInUse { .. }) if Instant::now() < until => thread::sleep(PAUSE),
            bound => return bound.map(OwnedFd::from),
        }
    }
}

/// Ports of kept sockets that nobody has taken yet.
pub fn kept(store: &FdStore, address: IpAddr) -> BTreeSet<u16> {
    let bound = |name: String| TcpListener::from(store.peek(&name)?).local_addr().ok();
    let addresses = names(store).into_iter().filter_map(bound);
    addresses.filter(|kept| kept.ip() == address).map(|kept| kept.port()).collect()
}

/// Whether the tenants of a checkpoint would have their ports: each is one of `held`, or can be bound.
///
/// # Errors
/// The first that would not.
pub fn check(address: IpAddr, held: &BTreeSet<u16>, wanted: Vec<SavedPort>) -> Result<(), NoPort> {
    for SavedPort { tenant, port, .. } in wanted.into_iter().filter(|saved| !held.contains(&saved.port)) {
        bind(address, port).map_err(|source| NoPort { tenant, source })?;
    }
    Ok(())
}

/// Has a port kept over a restart of the daemon.
pub fn keep(store: &FdStore, tenant: TenantId, listener: &OwnedFd) {
    if let Err(error) = store.store(&listener_name(tenant), listener.as_fd()) {
        warn!(%tenant, %error, "the port will not outlive the daemon");
    }
}

/// Lets the store forget a tenant's port.
pub fn forget(store: &FdStore, tenant: TenantId) {
    if let Err(error) = store.remove(&listener_name(tenant)) {
        warn!(%tenant, %error, "the fd store keeps a port that is gone");
    }
}

fn names(store: &FdStore) -> Vec<String> {
    store.names().into_iter().filter(|name| name.starts_with(LISTENER)).collect()
}

fn listener_name(tenant: TenantId) -> String {
    format!("{LISTENER}{}", tenant.0)
}
