//! What survives the daemon: SQLite files in the state directory.
//!
//! **Owns** their schemas, migrations and integrity. **Never** holds a rule about tenants beyond what a constraint can say
//! (a name and a port are one tenant's), and never a key: only its digest.
//!
//! [`ControlDb`] is control.db: tenants, keys and the installation's secret, small and fully synchronous.

mod control;
mod error;
mod key;
mod schema;

pub use control::{ControlDb, KeyRow, NewTenant, TenantRow, TenantUpdate};
pub use error::DbError;
pub use key::{Digest, NewKey, PREFIX_LENGTH};

#[cfg(test)]
mod tests;
