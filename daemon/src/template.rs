//! The template process of a model: loads tokenizer and chat template once, and forks every gateway.
//!
//! **Owns** the process and the channel to it, on a thread of its own, since the channel blocks. **Never** sees a tenant's text.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use pagedd_host::identity::Lent;
use pagedd_host::{Capabilities, Pidfd, Sandbox, Spawn};
use pagedd_wire::template::{FromTemplate, ToTemplate};
use pagedd_wire::{Channel, ChannelError, PROTOCOL};
use tokio::sync::oneshot;
use tracing::{info, warn};

use crate::backoff::Backoff;
use crate::child::{OwnChild, Reins};
use crate::walls::Walls;
use crate::worker::{CHILD_SOCKET, Environment};

/// Longest time from start to `Ready`: a tokenizer of 128k entries takes about a second.
const LOAD: Duration = Duration::from_mins(1);
/// Longest time of a fork.
const FORK: Duration = Duration::from_secs(10);
/// Between two tries to start a process.
const RETRY: Duration = Duration::from_secs(1);
/// Forks that may wait.
const QUEUE: usize = 256;

/// What to start.
pub struct TemplateSpec {
    /// Name of the model.
    pub model: String,
    /// Path of `pagedd-gateway`.
    pub program: PathBuf,
    /// Path of the model.
    pub path: String,
    /// The child's environment.
    pub env: Environment,
    /// Its cgroup.
    pub walls: Arc<Walls>,
}

/// A gateway to be.
pub struct Fork {
    /// The tenant's name.
    pub tenant: String,
    /// Its user, where the daemon may choose.
    pub user: Option<Arc<Lent>>,
    /// Its listening socket.
    pub listener: Arc<OwnedFd>,
    /// Its end of the daemon's socket pair.
    pub socket: UnixStream,
    /// Its cgroup's directory, where it has one.
    pub cgroup: Option<OwnedFd>,
}

/// A gateway that was forked. Not our child: the pidfd is the only way to know of its end.
#[derive(Debug)]
pub struct Forked {
    /// For logs and status only.
    pub pid: u32,
    /// Readable once it has ended.
    pub pidfd: OwnedFd,
    /// Why it has neither tokenizer nor chat template, where the model's cannot be loaded: it answers, and serves nothing.
    pub broken: Option<String>,
}

/// There is no gateway; trying again may help.
#[derive(thiserror::Error, Debug)]
#[error("{0}")]
pub struct ForkError(pub String);

/// What the thread is told.
enum Order {
    /// A gateway is wanted.
    Fork(Fork, oneshot::Sender<Result<Forked, ForkError>>),
    /// The process has ended.
    Gone,
}

/// The way to a model's template process.
pub struct TemplateHandle {
    orders: SyncSender<Order>,
    /// Of the process.
    pub reins: Arc<Reins>,
}

impl TemplateHandle {
    /// Starts the thread; the process starts at once too.
    pub fn start(spec: TemplateSpec) -> std::io::Result<Self> {
        let (orders, queue) = sync_channel(QUEUE);
        let reins = Arc::<Reins>::default();
        let template = Template::new(spec, reins.clone(), orders.clone());
        thread::Builder::new()
            .name(format!("template-{}", template.spec.model))
            .spawn(move || template.run(&queue))?;
        Ok(Self { orders, reins })
    }

    /// Forks a gateway.
    pub async fn fork(&self, fork: Fork) -> Result<Forked, ForkError> {
        let (answer, answered) = oneshot::channel();
        self.orders.try_send(Order::Fork(fork, answer)).map_err(|e| {
            ForkError(match e {
                TrySendError::Full(_) => "too many gateways wait for their fork".to_owned(),
                TrySendError::Disconnected(_) => "the template's thread ended".to_owned(),
            })
        })?;
        answered.await.unwrap_or_else(|_| Err(ForkError("the template's thread ended".to_owned())))
    }
}

impl Drop for TemplateHandle {
    fn drop(&mut self) {
        self.reins.end();
        // The thread looks, and finds that it is over; a full queue makes it look, too.
        drop(self.orders.try_send(Order::Gone));
    }
}

struct Template {
    spec: TemplateSpec,
    running: Option<(OwnChild, Channel)>,
    reins: Arc<Reins>,
    /// The way to itself, for who waits for the process's end.
    orders: SyncSender<Order>,
    /// Why the process that runs forks gateways that serve nothing.
    broken: Option<String>,
    backoff: Backoff,
    tickets: u64,
}

impl Template {
    fn new(spec: TemplateSpec, reins: Arc<Reins>, orders: SyncSender<Order>) -> Self {
        Self {
            spec,
            running: None,
            reins,
            orders,
            broken: None,
            backoff: Backoff::new(5, Duration::from_secs(10)),
            tickets: 0,
        }
    }

    fn run(mut self, orders: &Receiver<Order>) {
        let mut ready = self.ensure();
        loop {
            if self.reins.ended() {
                return;
            }
            if let Err(error) = &ready {
                warn!(model = self.spec.model, %error, "no template process");
            }
            // A process that runs is watched: nobody wakes up for it before it ends.
            let order = match ready {
                Ok(()) => orders.recv().map_err(RecvTimeoutError::from),
                Err(_) => orders.recv_timeout(RETRY),
            };
            match order {
                Ok(Order::Fork(fork, answer)) => {
                    ready = self.ensure();
                    let forked = match &ready {
                        Ok(()) => self.fork(&fork),
                        Err(ForkError(error)) => Err(ForkError(error.clone())),
                    };
                    // A tenant that went away in the meantime drops the socket, and the gateway exits on its end of file.
                    drop(answer.send(forked));
                }
                // Kept warm, so that a gateway's death costs a fork and not a load.
                Ok(Order::Gone) | Err(RecvTimeoutError::Timeout) => ready = self.ensure(),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// A template process that runs and is loaded.
    fn ensure(&mut self) -> Result<(), ForkError> {
        if let Some((child, _)) = &self.running {
            if !child.has_exited() {
                return Ok(());
            }
            if self.reins.ended() {
                return Err(ForkError("the daemon ends".to_owned()));
            }
            warn!(model = self.spec.model, pid = child.pid(), "template process died");
            self.running = None;
        }
        thread::sleep(self.backoff.next(Instant::now()));
        fail::fail_point!("template-spawn", |_| Err(ForkError("fail point template-spawn".to_owned())));
        let failed = |what: &str, e: &dyn std::fmt::Display| ForkError(format!("{what}: {e}"));
        let (ours, theirs) = UnixStream::pair().map_err(|e| failed("socket pair", &e))?;
        let child = OwnChild::from(
            pagedd_host::spawn(Spawn {
                program: self.spec.program.clone(),
                args: Vec::new(),
                env: self.spec.env.clone(),
                fds: vec![(OwnedFd::from(theirs), CHILD_SOCKET)],
                cgroup: self.spec.walls.template().map_err(|e| failed("template's cgroup", &e))?,
                identity: None,
                sandbox: Sandbox { no_new_privs: true, capabilities: Capabilities::Users },
            })
            .map_err(|e| failed("template process", &e))?,
        );
        self.reins.hold(&child).map_err(|e| failed("template process", &e))?;
        self.watch(&child).map_err(|e| failed("template process", &e))?;
        let mut channel = Channel::new(ours).map_err(|e| failed("template's socket", &e))?;
        let started = Instant::now();
        channel
            .send(&ToTemplate::Load { protocol: PROTOCOL, path: self.spec.path.clone() }, &[])
            .map_err(|e| failed("template process", &e))?;
        match channel.recv_timeout(LOAD).map_err(|e| failed("template process", &e))? {
            FromTemplate::Ready { vocab_size } => {
                let ms = started.elapsed().as_millis() as u64;
                info!(
                    model = self.spec.model,
                    pid = child.pid(),
                    vocab_size,
                    ms,
                    "tokenizer and chat template loaded"
                );
                self.broken = None;
                self.running = Some((child, channel));
                Ok(())
            }
            FromTemplate::Failed { error } => {
                warn!(model = self.spec.model, error, "tokenizer or chat template cannot be loaded");
                self.broken = Some(error);
                self.running = Some((child, channel));
                Ok(())
            }
            FromTemplate::Forked { .. } | FromTemplate::ForkFailed { .. } => {
                Err(ForkError("the template answered a load with a fork".to_owned()))
            }
        }
    }

    /// Has this thread told when the process ends.
    fn watch(&self, child: &OwnChild) -> std::io::Result<()> {
        let pidfd = Pidfd::from(child.as_fd().try_clone_to_owned()?);
        let orders = self.orders.clone();
        let watch = move || match pidfd.wait_gone(Duration::MAX) {
            // Where the queue is full it looks at the process before it obeys what is in there.
            Ok(_) => drop(orders.try_send(Order::Gone)),
            Err(error) => warn!(%error, "the end of a template process cannot be watched"),
        };
        thread::Builder::new().name("template-end".to_owned()).spawn(watch).map(drop)
    }

    fn fork(&mut self, fork: &Fork) -> Result<Forked, ForkError> {
        let Some((_, channel)) = &mut self.running else {
            return Err(ForkError("no template process".to_owned()));
        };
        self.tickets += 1;
        let message = ToTemplate::Fork {
            ticket: self.tickets,
            tenant: fork.tenant.clone(),
            identity: fork.user.as_ref().map(|user| (user.identity().uid, user.identity().gid)),
            cgroup: fork.cgroup.is_some(),
        };
        let result = Self::exchange(channel, &message, fork, self.tickets);
        if result.is_err() {
            self.running = None;
        }
        let forked = result.map_err(|e| ForkError(format!("template process: {e}")))??;
        Ok(Forked { broken: self.broken.clone(), ..forked })
    }

    fn exchange(
        channel: &mut Channel,
        message: &ToTemplate,
        fork: &Fork,
        expected: u64,
    ) -> Result<Result<Forked, ForkError>, ChannelError> {
        let fds = [fork.listener.as_fd(), fork.socket.as_fd()];
        let fds: Vec<_> = fds.into_iter().chain(fork.cgroup.as_ref().map(AsFd::as_fd)).collect();
        channel.send(message, &fds)?;
        loop {
            match channel.recv_timeout(FORK)? {
                FromTemplate::Forked { ticket, pid } => {
                    let pidfd = channel.take_fd()?;
                    if ticket == expected {
                        return Ok(Ok(Forked { pid, pidfd, broken: None }));
                    }
                }
                FromTemplate::ForkFailed { ticket, error } if ticket == expected => {
                    return Ok(Err(ForkError(error)));
                }
                FromTemplate::ForkFailed { .. } | FromTemplate::Ready { .. } => {}
                FromTemplate::Failed { error } => return Ok(Err(ForkError(error))),
            }
        }
    }
}
