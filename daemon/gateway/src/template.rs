//! The template process of a model: loads the text part once, and forks a gateway per tenant.
//!
//! **Owns** the forks and their reaping. **Never** starts a thread, and never reads a byte from a tenant: a gateway has its
//! cgroup, user and sandbox before it does.

use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use pagedd_host::jail::{Jail, JailError};
use pagedd_host::{Capabilities, Child, Confinement, Forked, Identity, Sandbox, fork_confined};
use pagedd_wire::template::{FromTemplate, ToTemplate};
use pagedd_wire::{Channel, ChannelError, PROTOCOL};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::{error, info, warn};

use crate::app::Settings;
#[cfg(feature = "failpoints")]
use crate::point::Marks;
use crate::point::point;
use crate::serve::Gateway;
use crate::text::Text;

/// Why a template process ends before the daemon closes its connection.
#[derive(thiserror::Error, Debug)]
pub enum TemplateError {
    /// The daemon is not one of this version, or is broken.
    #[error("the daemon: {0}")]
    Channel(#[from] ChannelError),
    /// The first frame is no `Load` of this protocol.
    #[error("the daemon speaks another protocol: this program speaks version {PROTOCOL}")]
    Protocol,
    /// No gateway may run without.
    #[error(transparent)]
    Jail(#[from] JailError),
    /// The host.
    #[error("{what}: {source}")]
    Io {
        /// What failed.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
}

/// What this process is after [`run`] returned.
#[derive(Debug)]
pub enum Outcome {
    /// The template, whose daemon closed the connection.
    Template,
    /// A gateway that has ended.
    Gateway,
}

/// Runs the template process, and in its forks the gateways, to their ends.
///
/// # Errors
/// [`TemplateError`]; the gateways that were forked live on.
pub fn run(socket: UnixStream) -> Result<Outcome, TemplateError> {
    let mut channel =
        Channel::new(socket).map_err(|source| TemplateError::Io { what: "the daemon's socket", source })?;
    let jail = Jail::new()?;
    let text = load(&mut channel)?;
    let mut children: Vec<Child> = Vec::new();
    loop {
        let message = match channel.recv_timeout(Duration::ZERO) {
            Ok(message) => message,
            Err(ChannelError::TimedOut(_)) => {
                if !wait(&channel, &mut children)? {
                    continue;
                }
                match channel.recv() {
                    Ok(message) => message,
                    Err(ChannelError::Closed) => return Ok(Outcome::Template),
                    Err(error) => return Err(error.into()),
                }
            }
            Err(ChannelError::Closed) => return Ok(Outcome::Template),
            Err(error) => return Err(error.into()),
        };
        let ToTemplate::Fork { ticket, tenant, identity, cgroup } = message else {
            return Err(TemplateError::Protocol);
        };
        let listener = TcpListener::from(channel.take_fd()?);
        let socket = UnixStream::from(channel.take_fd()?);
        let cgroup = if cgroup { Some(channel.take_fd()?) } else { None };
        point("template-fork");
        match fork(&tenant, identity, cgroup.as_ref(), &listener, &socket, &jail) {
            Ok(Forked::Parent(child)) => {
                let pid = child.pid();
                point("template-forked");
                channel.send(&FromTemplate::Forked { ticket, pid }, &[child.as_fd()])?;
                children.push(child);
            }
            Ok(Forked::Child) => {
                drop(channel);
                drop(children);
                drop(cgroup);
                point("gateway-begins");
                become_gateway(&tenant, listener, socket, text);
                return Ok(Outcome::Gateway);
            }
            Err(error) => channel.send(&FromTemplate::ForkFailed { ticket, error }, &[])?,
        }
    }
}

/// Loads, and tells the daemon. Where that fails gateways are forked all the same: a port that says why is better than one that
/// nobody answers on.
fn load(channel: &mut Channel) -> Result<Arc<Text>, TemplateError> {
    let path = match channel.recv()? {
        ToTemplate::Load { protocol: PROTOCOL, path } => path,
        ToTemplate::Load { .. } | ToTemplate::Fork { .. } => return Err(TemplateError::Protocol),
    };
    let (text, outcome) = match Text::open(Path::new(&path)) {
        Ok(text) => {
            let vocab_size = text.vocab_size();
            (text, FromTemplate::Ready { vocab_size })
        }
        Err(error) => (Text::none(), FromTemplate::Failed { error: error.to_string().replace('\n', " ") }),
    };
    channel.send(&outcome, &[])?;
    let text = Arc::new(text);
    // Never taken apart: every page of it is shared with all gateways, and each that freed it at its end would first copy it.
    std::mem::forget(Arc::clone(&text));
    Ok(text)
}

/// Waits until the daemon says something, or a child ends, which is then reaped. True where the daemon does.
fn wait(channel: &Channel, children: &mut Vec<Child>) -> Result<bool, TemplateError> {
    let broken = |source| TemplateError::Io { what: "waiting for the daemon", source };
    let said = {
        let mut fds = vec![PollFd::new(channel, PollFlags::IN)];
        fds.extend(children.iter().map(|child| PollFd::new(child, PollFlags::IN)));
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(broken(error.into())),
        }
        !fds[0].revents().is_empty()
    };
    children.retain(|child| match child.wait(Duration::ZERO) {
        Ok(None) => true,
        Ok(Some(status)) => {
            info!(pid = child.pid(), %status, "a gateway ended");
            false
        }
        Err(error) => {
            warn!(pid = child.pid(), %error, "a gateway cannot be reaped");
            false
        }
    });
    #[cfg(feature = "failpoints")]
    Marks::new().settle();
    Ok(said)
}

fn fork(
    tenant: &str,
    identity: Option<(u32, u32)>,
    cgroup: Option<&OwnedFd>,
    listener: &TcpListener,
    socket: &UnixStream,
    jail: &Jail,
) -> Result<Forked, String> {
    let confinement = Confinement {
        name: &format!("gw:{tenant}"),
        cgroup: cgroup.map(AsFd::as_fd),
        identity: identity.map(|(uid, gid)| Identity { uid, gid }),
        sandbox: Sandbox { no_new_privs: true, capabilities: Capabilities::None },
        jail: Some(jail),
    };
    #[cfg_attr(not(feature = "failpoints"), expect(unused_mut, reason = "test builds keep more"))]
    let mut keep = vec![listener.as_fd(), socket.as_fd()];
    #[cfg(feature = "failpoints")]
    keep.extend(Marks::new().fds());
    fork_confined(&confinement, &keep).map_err(|e| e.to_string().replace('\n', " "))
}

/// Serves the tenant to the end of this process.
///
/// On a thread of its own: the seeds of hash maps are drawn per thread, and those of this one are the same in every fork.
fn become_gateway(tenant: &str, listener: TcpListener, socket: UnixStream, text: Arc<Text>) {
    // A connection takes one fd, and the usual limit is what a tenant's most connections are.
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        warn!(tenant, %error, "the limit of open files stays as it is");
    }
    let gateway =
        Gateway { tenant: tenant.to_owned(), listener, socket, text, settings: Settings::default() };
    let serving = thread::Builder::new().name("serve".to_owned()).spawn(move || gateway.run());
    match serving.map(thread::JoinHandle::join) {
        Ok(Ok(Ok(()))) => {}
        Ok(Ok(Err(error))) | Err(error) => error!(tenant, %error, "gateway cannot serve"),
        Ok(Err(_)) => error!(tenant, "gateway panicked"),
    }
}
