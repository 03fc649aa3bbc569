//! `pagedctl key`, one file per subcommand.

pub mod create;
pub mod list;
pub mod revoke;
