//! `pagedd`, the daemon: one host, many tenants.
//!
//! **Owns** listening ports, the admin socket, control.db, journal.db, arenas' fds and every child process. **Never** computes, opens a
//! model file, or sees a tenant's text.
//!
//! This file is the table of contents:
//!
//! | module | what it is |
//! |---|---|
//! | [`start`], [`cli`] | from the command line to a running daemon |
//! | [`bench`](mod@bench) | the engine by itself, measured |
//! | [`drain`] | the end of admission, and of the daemon |
//! | [`supervision`], [`watchdog`] | what the service manager is told: how the daemon stands, and that it goes on |
//! | [`reconfigure`] | the configuration, read again |
//! | [`daemon`] | the task that owns tenants and control.db, and carries out admin commands |
//! | [`admin`] | the admin socket |
//! | [`tenants`], [`ports`] | one tenant: port, share, keys, gateway; kept ports by what they are bound to |
//! | [`gateway`] | a tenant's gateway process: forked, spoken to, replaced |
//! | [`template`] | a model's template process, which forks gateways |
//! | [`databases`], [`recorder`] | both databases, opened together; the journal's thread: durable, then visible |
//! | [`hub`] | delivery: request logs, attachments, cursors |
//! | [`quota`], [`usage`] | who may ask for how much; what was used |
//! | [`retention`] | how long what has ended is kept |
//! | [`model`], [`fit`] | one model: its engine's thread; what of an earlier daemon can go on with it |
//! | [`worker`] | a model's worker process: started, spoken to, fenced, replaced |
//! | [`arenas`] | what workers leave behind: arenas, the ledger of the KV arena, the last writer |
//! | [`blocks`] | KV blocks in files |
//! | [`checkpoint`], [`reload`] | checkpoints by hand, and a start from one |
//! | [`metrics`], [`status`] | what operators see |
//! | [`respite`] | how long a daemon waits that follows others which died early |
//! | [`convert`], [`settings`], [`backoff`], [`child`], `points` | small parts |

mod admin;
mod arenas;
mod backoff;
mod bench;
mod blocks;
mod checkpoint;
mod child;
mod cli;
mod convert;
mod daemon;
mod databases;
mod drain;
mod fit;
mod gateway;
mod hub;
mod metrics;
mod model;
#[cfg(feature = "failpoints")]
mod points;
mod ports;
mod quota;
mod reconfigure;
mod recorder;
mod reload;
mod respite;
mod retention;
mod sandbox;
mod settings;
mod start;
mod status;
mod supervision;
mod template;
mod tenants;
mod usage;
mod walls;
mod watchdog;
mod worker;

use std::process::ExitCode;

fn main() -> ExitCode {
    start::main()
}
