//! A tenant's gateway: forked, spoken to, replaced. The port is the daemon's and outlives it.
//!
//! **Owns** the connection, and with it the gateway's identity: every frame that arrives here is the tenant's (I4).
//! **Never** sees text: prompts come as tokens, answers leave as tokens.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fail::fail_point;
use pagedd_core::{RequestId, SamplingParams, TenantId};
use pagedd_engine::{Command, InboxFull, Submission};
use pagedd_host::Pidfd;
use pagedd_host::hierarchy::Cgroup;
use pagedd_host::identity::Lent;
use pagedd_journal::{Admission, Idempotency, SavedRequest};
use pagedd_wire::gateway::{
    Answer, Closed, KeyEntry, Parting, Query, Rates, Refusal, Request, ToDaemon, ToGateway, Welcome,
};
use pagedd_wire::worker::ModelInfo;
use pagedd_wire::{FrameBuffer, FrameError, PROTOCOL, encode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{mpsc, oneshot, watch};
use tracing::{error, info, warn};

use crate::backoff::Backoff;
use crate::convert;
use crate::fit::model_digest;
use crate::hub::{ConnectionId, Message, Ticket};
use crate::metrics::Exporter;
use crate::model::Model;
use crate::quota::TenantAccount;
use crate::recorder::{Claim, Hold, Told, unix};
use crate::template::{Fork, ForkError, Forked};
use crate::worker::ModelState;

/// Frames that may wait for a gateway: more than it can have questions open.
const OUTBOX: usize = 8192;
/// Bytes read from a gateway at once; every tenant has so many set aside.
const READ: usize = 16 << 10;
/// How long a gateway may take to end once its connection is closed.
const DEATH: Duration = Duration::from_secs(2);
/// How long a request waits for one that came with the same `Idempotency-Key` and is being admitted.
const CLAIM_WAIT: Duration = Duration::from_secs(10);
/// Requests of one gateway that wait so. Each has its prompt with it.
const CLAIM_WAITERS: usize = 1024;
/// Between two tries of such a request.
const CLAIM_PAUSE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(250));
/// Restarts within a minute that come at once: a gateway that its limits ended is back before its clients give up.
const FREE_RESTARTS: usize = 5;
/// Most choices of one request.
const MAX_N: u32 = 16;
/// Most stop tokens of one request: each token that is drawn is looked up among them.
const MAX_STOP_IDS: usize = 256;
/// Most bytes of a request's context: stop strings are all that is long in it.
const MAX_CONTEXT: usize = 64 << 10;

static CONNECTIONS: AtomicU64 = AtomicU64::new(1);

/// What a gateway is told of its tenant, beside what the model tells.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TenantFacts {
    /// Accepted keys; `None` needs no key.
    pub keys: Option<Vec<KeyEntry>>,
    /// Suspended by an operator.
    pub suspended: bool,
    /// Whether the daemon admits, stays, or goes down.
    pub going: Going,
    /// Why the gateway goes, once it does.
    pub parting: Parting,
    /// Why the tenant cannot be served, for example floors that no longer fit.
    pub misfit: Option<String>,
    /// Requests of an earlier daemon enter before new ones.
    pub readmitting: bool,
    /// Limits.
    pub limits: GatewayLimits,
}

/// Whether a gateway goes, and the daemon with it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Going {
    /// It stays.
    Not,
    /// Nothing is admitted.
    Draining,
    /// Open streams end.
    Down,
}

/// How a gateway stands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum GatewayState {
    /// Waits for its fork.
    Starting,
    /// Serves.
    Running {
        /// For status only.
        pid: u32,
    },
    /// Died, and waits for its next start.
    Restarting,
    /// Runs, and only says why it cannot serve: the model has no usable tokenizer or chat template.
    Failed(String),
}

/// Limits that every gateway gets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GatewayLimits {
    /// Largest request body, in bytes.
    pub max_body: u64,
    /// Most open connections.
    pub max_connections: u32,
    /// How long a request's head may take, in milliseconds.
    pub header_timeout_ms: u32,
    /// How long a connection may stay without a request, in milliseconds.
    pub idle_timeout_ms: u32,
}

/// What a gateway's task is made of.
pub struct GatewayTask {
    /// Whose.
    pub tenant: TenantId,
    /// Its name.
    pub name: String,
    /// The user it runs as, where the daemon may choose.
    pub user: Option<Arc<Lent>>,
    /// The cgroup it runs in, where it has one.
    pub cgroup: Option<Arc<Cgroup>>,
    /// The tenant's port.
    pub listener: Arc<OwnedFd>,
    /// What it serves.
    pub model: Arc<Model>,
    /// What it is told; the task ends when the sender goes.
    pub facts: watch::Receiver<TenantFacts>,
    /// How it stands, and how many starts it has had.
    pub state: watch::Sender<(GatewayState, u32)>,
    /// Delivery.
    pub hub: mpsc::Sender<Message>,
    /// The journal's thread.
    pub recorder: mpsc::Sender<Told>,
    /// Answers metrics queries.
    pub exporter: Exporter,
    /// What the tenant has used of its quotas.
    pub account: TenantAccount,
    /// Why the gateway that runs has neither tokenizer nor chat template.
    pub broken: Option<String>,
}

/// A gateway that was forked.
struct Started {
    socket: UnixStream,
    pidfd: Pidfd,
    broken: Option<String>,
}

/// A gateway's question for a request to be made.
struct Asked {
    /// The gateway's number for it.
    ticket: u64,
    request: Request,
    since: Instant,
}

/// How a connection came to its end.
enum Ended {
    /// The gateway closed it, or broke the protocol.
    Gateway(String),
    /// The tenant was removed, or the daemon goes down; whether the gateway has let the time pass that it had for its end.
    Us { late: bool },
}

impl From<pagedd_config::Gateway> for GatewayLimits {
    fn from(config: pagedd_config::Gateway) -> Self {
        Self {
            max_body: config.max_body.0,
            max_connections: config.max_connections,
            header_timeout_ms: config.header_timeout.as_millis() as u32,
            idle_timeout_ms: config.idle_timeout.as_millis() as u32,
        }
    }
}

impl GatewayTask {
    /// Keeps a gateway running until the tenant goes or the daemon does.
    pub async fn run(mut self) {
        let mut backoff = Backoff::new(1 + FREE_RESTARTS, Duration::from_secs(10));
        let mut facts = self.facts.clone();
        loop {
            let started = tokio::select! {
                // A fork that is given up here closes the gateway's socket, upon which the gateway ends.
                _ = facts.wait_for(|facts| facts.going == Going::Down) => return,
                started = async {
                    tokio::time::sleep(backoff.next(Instant::now())).await;
                    self.start().await
                } => started,
            };
            let (ended, pidfd) = match started {
                Ok(Started { socket, pidfd, broken }) => {
                    self.broken = broken;
                    (self.talk(socket).await, pidfd)
                }
                Err(ForkError(error)) => {
                    warn!(tenant = self.name, error, "gateway did not start");
                    self.state.send_modify(|(state, starts)| {
                        (*state, *starts) = (GatewayState::Restarting, *starts + 1);
                    });
                    continue;
                }
            };
            let patience = if matches!(ended, Ended::Us { late: true }) { Duration::ZERO } else { DEATH };
            fence(&self.name, pidfd, patience).await;
            fail_point!("gateway-fenced");
            match ended {
                Ended::Us { .. } => return,
                Ended::Gateway(reason) => {
                    warn!(tenant = self.name, reason, "gateway lost");
                    self.state.send_modify(|(state, _)| *state = GatewayState::Restarting);
                }
            }
        }
    }

    /// Has a gateway forked.
    async fn start(&self) -> Result<Started, ForkError> {
        let failed = |e: io::Error| ForkError(e.to_string());
        let (ours, theirs) = StdUnixStream::pair().map_err(failed)?;
        ours.set_nonblocking(true).map_err(failed)?;
        let fork = Fork {
            tenant: self.name.clone(),
            user: self.user.clone(),
            listener: self.listener.clone(),
            socket: theirs,
            cgroup: self.cgroup.as_ref().map(|cgroup| cgroup.fd()).transpose().map_err(failed)?,
        };
        fail_point!("gateway-fork", |_| Err(ForkError("fail point gateway-fork".to_owned())));
        let forked = self.model.template.fork(fork).await?;
        fail_point!("gateway-forked", |_| Err(ForkError("fail point gateway-forked".to_owned())));
        let Forked { pid, pidfd, broken } = forked;
        info!(tenant = self.name, pid, "gateway runs");
        let runs = match &broken {
            None => GatewayState::Running { pid },
            Some(error) => GatewayState::Failed(error.clone()),
        };
        self.state.send_modify(|(state, starts)| (*state, *starts) = (runs, *starts + 1));
        Ok(Started { socket: UnixStream::from_std(ours).map_err(failed)?, pidfd: Pidfd::from(pidfd), broken })
    }

    /// Speaks to a gateway until one side ends.
    async fn talk(&mut self, socket: UnixStream) -> Ended {
        let connection = ConnectionId(CONNECTIONS.fetch_add(1, Ordering::Relaxed));
        let (reader, writer) = socket.into_split();
        let (outbox, frames) = mpsc::channel(OUTBOX);
        let writing = tokio::spawn(write(writer, frames));
        let (held, mut cut) = oneshot::channel();
        let up = Message::Up { tenant: self.tenant, connection, outbox: outbox.clone(), held };
        if self.hub.send(up).await.is_err() {
            return Ended::Us { late: false };
        }
        let ended = tokio::select! {
            ended = self.serve(connection, reader, &outbox) => ended,
            _ = &mut cut => Ended::Gateway("it does not read its answers".to_owned()),
        };
        fail_point!("gateway-down");
        drop(self.hub.send(Message::Down(connection)).await);
        drop(outbox);
        // What is in the outbox (a last `Shutdown`, say) is written as long as the gateway reads.
        if tokio::time::timeout(DEATH, writing).await.is_err() {
            warn!(tenant = self.name, "gateway does not read its last frames");
        }
        ended
    }

    async fn serve(
        &mut self,
        connection: ConnectionId,
        mut reader: OwnedReadHalf,
        outbox: &mpsc::Sender<ToGateway>,
    ) -> Ended {
        let mut model_state = self.model.state.clone();
        let mut live = self.model.live.subscribe();
        let mut model_lives = true;
        let (waiting, mut waited) = mpsc::channel(CLAIM_WAITERS);
        let mut buffer = FrameBuffer::new();
        let mut scratch = vec![0; READ];
        let mut greeted = false;
        let mut told = None;
        loop {
            let facts = self.facts.borrow_and_update().clone();
            let welcome = self.welcome(&facts, &model_state.borrow_and_update());
            if told.as_ref() != Some(&welcome) {
                if outbox.send(ToGateway::Welcome(Box::new(welcome.clone()))).await.is_err() {
                    return Ended::Gateway("it does not read".to_owned());
                }
                told = Some(welcome);
            }
            if facts.going == Going::Down {
                drop(outbox.send(ToGateway::Parting(facts.parting)).await);
                drop(outbox.send(ToGateway::Shutdown).await);
                // Its end of file follows once its streams have ended.
                let late = tokio::time::timeout(DEATH, drain(&mut reader, &mut scratch)).await.is_err();
                if late {
                    warn!(tenant = self.name, "gateway does not end; it is killed");
                }
                return Ended::Us { late };
            }
            tokio::select! {
                changed = self.facts.changed() => {
                    if changed.is_err() {
                        drop(outbox.send(ToGateway::Shutdown).await);
                        return Ended::Us { late: false };
                    }
                }
                changed = model_state.changed(), if model_lives => {
                    // An engine that ended has left its last state: the port goes on to say why.
                    model_lives = changed.is_ok();
                }
                // Its sender lives as long as the model.
                Ok(()) = live.changed() => {}
                Some(asked) = waited.recv() => {
                    if let Err(e) = self.ask(connection, asked, &waiting, outbox).await {
                        return Ended::Gateway(e);
                    }
                }
                read = reader.read(&mut scratch) => match read {
                    Ok(0) => return Ended::Gateway("it closed its connection".to_owned()),
                    Err(e) => return Ended::Gateway(e.to_string()),
                    Ok(n) => {
                        buffer.push(&scratch[..n]);
                        if let Err(e) = self.frames(connection, &mut buffer, &mut greeted, &waiting, outbox).await {
                            return Ended::Gateway(e);
                        }
                    }
                },
            }
        }
    }

    /// Obeys every whole frame that has come.
    async fn frames(
        &self,
        connection: ConnectionId,
        buffer: &mut FrameBuffer,
        greeted: &mut bool,
        waiting: &mpsc::Sender<Asked>,
        outbox: &mpsc::Sender<ToGateway>,
    ) -> Result<(), String> {
        while let Some(frame) = buffer.next_frame().map_err(|e: FrameError| e.to_string())? {
            let message = match frame {
                ToDaemon::Hello { protocol: PROTOCOL } if !*greeted => {
                    *greeted = true;
                    continue;
                }
                ToDaemon::Hello { protocol } => return Err(format!("a hello of protocol {protocol}")),
                _ if !*greeted => return Err("a frame before its hello".to_owned()),
                ToDaemon::Submit { ticket, request } => {
                    let asked = Asked { ticket, request: *request, since: Instant::now() };
                    self.ask(connection, asked, waiting, outbox).await?;
                    continue;
                }
                ToDaemon::Query { ticket, query } => {
                    let answer = match query {
                        Query::Health => self.health(),
                        Query::Metrics => {
                            Answer::Metrics(self.exporter.tenant(self.tenant, &self.name, &self.model).await)
                        }
                    };
                    let answer = ToGateway::Answer { ticket, answer };
                    outbox.try_send(answer).map_err(|_| "it does not read its answers".to_owned())?;
                    continue;
                }
                ToDaemon::Attach { request, from } => Message::Attach(connection, RequestId(request), from),
                ToDaemon::Detach { request, done } => Message::Detach(connection, RequestId(request), done),
                ToDaemon::Cancel { request } => Message::Cancel(connection, RequestId(request)),
                ToDaemon::Stop { request, choice } => Message::Stop(connection, RequestId(request), choice),
            };
            self.hub.send(message).await.map_err(|_| "the daemon goes down".to_owned())?;
        }
        Ok(())
    }

    /// Submits a request, and answers where that is not the hub's to do, or for later.
    async fn ask(
        &self,
        connection: ConnectionId,
        asked: Asked,
        waiting: &mpsc::Sender<Asked>,
        outbox: &mpsc::Sender<ToGateway>,
    ) -> Result<(), String> {
        let ticket = asked.ticket;
        let answer = match self.submit(connection, asked, waiting).await {
            Ok(None) => return Ok(()),
            Ok(Some(made)) => {
                let rates = Rates::default();
                ToGateway::Accepted { ticket, request: made.0, repeated: true, rates }
            }
            Err(refusal) => ToGateway::Refused { ticket, refusal },
        };
        outbox.try_send(answer).map_err(|_| "it does not read its answers".to_owned())
    }

    /// Checks a request and puts it into its engine's inbox, unless it was made before under its `Idempotency-Key`: then gives its id. Where
    /// one is being admitted under its key, it comes back through `waiting`.
    async fn submit(
        &self,
        connection: ConnectionId,
        Asked { ticket, request, since }: Asked,
        waiting: &mpsc::Sender<Asked>,
    ) -> Result<Option<RequestId>, Refusal> {
        // Of a daemon that drains, what was made before can be asked for again.
        let may_be_known = request.idempotency.is_some();
        let closed = self.closed(&self.facts.borrow(), &self.model.state.borrow());
        if let Some(closed) = closed.filter(|closed| *closed != Closed::Draining || !may_be_known) {
            return Err(Refusal::Closed(closed));
        }
        if let Some(model) = self.model.state.borrow().model() {
            check(&request, &model.info)?;
        }
        check_key(request.key, self.facts.borrow().keys.as_deref())?;
        let idempotency = request.idempotency.map(|made| Idempotency { key: made.key, body: made.body });
        let mut held = None;
        if let Some(idempotency) = idempotency {
            let (answer, claim) = oneshot::channel();
            let told = Told::Claim { tenant: self.tenant, idempotency, answer };
            drop(self.recorder.send(told).await);
            match claim.await {
                Ok(Claim::New(hold)) => held = Some(hold),
                Ok(Claim::Made(request)) => return Ok(Some(request)),
                Ok(Claim::Conflict) => return Err(Refusal::IdempotencyConflict),
                Ok(Claim::Unknown) => return Err(Refusal::IdempotencyUnknown { retry_after: 1 }),
                Ok(Claim::Busy) => {
                    return come_back(Asked { ticket, request, since }, waiting).map(|()| None);
                }
                Err(_) => return Err(Refusal::Closed(Closed::Draining)),
            }
        }
        fail_point!("before-submit");
        let closed = self.closed(&self.facts.borrow(), &self.model.state.borrow());
        let put = match closed.filter(|_| self.facts.borrow().going > Going::Not) {
            Some(closed) => Err(Refusal::Closed(closed)),
            None => self.put(connection, ticket, request, idempotency.zip(held)).map(|()| None),
        };
        fail_point!("after-submit");
        put
    }

    /// To be tried again soon.
    fn busy(&self) -> Refusal {
        let waiting =
            self.model.stats.borrow().scheduler.tenant(self.tenant).map_or(0, |tenant| tenant.waiting);
        Refusal::QueueFull { waiting, retry_after: convert::retry_after(self.account.queue_wait()) }
    }

    /// Puts a checked request into its engine's inbox.
    fn put(
        &self,
        connection: ConnectionId,
        ticket: u64,
        request: Request,
        claimed: Option<(Idempotency, Hold)>,
    ) -> Result<(), Refusal> {
        let Request { prompt, sampling, n, max_tokens, stop_ids, on_leave, key, idempotency: _, context } =
            request;
        let id = random_id().map_err(|e| {
            error!(error = %e, "no randomness for a request id");
            Refusal::Closed(Closed::Failed)
        })?;
        let saved = SavedRequest {
            model: self.model.name.clone(),
            key,
            created_unix: unix(),
            on_leave: convert::on_leave(on_leave),
            prompt,
            sampling: SamplingParams::from(sampling).into(),
            n,
            max_tokens,
            stop_ids,
            context,
        };
        let (idempotency, hold) = claimed.unzip();
        let ready = self.model.state.borrow();
        let model_digest = ready.model().map(|ready| model_digest(&self.model.config, &ready.info));
        let longest = ready.model().map_or(u32::MAX, |ready| ready.info.max_model_len);
        drop(ready);
        let cost = convert::cost(&saved, longest, 0);
        let grant = self.account.admit(cost).map_err(|over| convert::excess(over, self.account.rates()))?;
        let admission = Admission { request: id, tenant: self.tenant, idempotency, model_digest, saved };
        let submission = Submission {
            request: convert::new_request(&admission),
            ticket: Box::new(Ticket {
                connection,
                tenant: self.tenant,
                model: self.model.id,
                number: ticket,
                block_size: self.model.config.block_size.0,
                idempotency: admission.idempotency,
                _hold: hold,
                grant,
                model_digest: admission.model_digest,
                saved: admission.saved,
            }),
        };
        self.model.engine.send(Command::Submit(Box::new(submission))).map_err(|(InboxFull, _)| self.busy())
    }

    fn health(&self) -> Answer {
        let closed = self.closed(&self.facts.borrow(), &self.model.state.borrow());
        let reason = closed.map(|closed| match closed {
            Closed::Suspended => "the tenant is suspended".to_owned(),
            Closed::Draining => "the daemon is being drained".to_owned(),
            Closed::Moved { port } => format!("the tenant has moved to port {port}"),
            Closed::Loading => "the model is loading".to_owned(),
            // Whoever can reach the port reads it: paths and sizes are the operator's.
            Closed::Failed => "the model could not be loaded; the operator's log says why".to_owned(),
            Closed::Misfit => {
                "the tenant cannot be served as it is set up; the operator's log says why".to_owned()
            }
        });
        let reason = reason.or_else(|| match &*self.model.state.borrow() {
            ModelState::Restarting { attempt, .. } => {
                Some(format!("the worker is being replaced (attempt {attempt})"))
            }
            ModelState::Loading { .. } | ModelState::Ready(_) | ModelState::Failed { .. } => None,
        });
        let stats = self.model.stats.borrow();
        let last_step_ms = self.model.last_step_age(&stats).map(|age| age.as_millis() as u64);
        let tenant = stats.scheduler.tenant(self.tenant);
        let (running, waiting) = tenant.map_or((0, 0), |t| (t.running, t.waiting));
        Answer::Health { ready: reason.is_none(), reason, last_step_ms, running, waiting }
    }

    /// Why nothing is admitted.
    fn closed(&self, facts: &TenantFacts, state: &ModelState) -> Option<Closed> {
        closed(facts, state).or_else(|| self.broken.is_some().then_some(Closed::Failed))
    }

    fn welcome(&self, facts: &TenantFacts, state: &ModelState) -> Welcome {
        let info = state.model().map(|model| &model.info);
        Welcome {
            tenant: self.name.clone(),
            model: self.model.name.clone(),
            since: self.model.since,
            max_model_len: info.map_or(0, |info| info.max_model_len),
            vocab_size: info.map_or(0, |info| info.vocab_size),
            default_max_tokens: self.model.live.borrow().default_max_tokens,
            max_n: MAX_N,
            max_body: facts.limits.max_body,
            max_connections: facts.limits.max_connections,
            header_timeout_ms: facts.limits.header_timeout_ms,
            idle_timeout_ms: facts.limits.idle_timeout_ms,
            keys: facts.keys.clone(),
            closed: self.closed(facts, state),
        }
    }
}

/// Why nothing is admitted. A worker that is being replaced is no reason: requests wait for it.
fn closed(facts: &TenantFacts, state: &ModelState) -> Option<Closed> {
    if let (Going::Down, Parting::Moved { port }) = (facts.going, facts.parting) {
        return Some(Closed::Moved { port });
    }
    if facts.going > Going::Not {
        return Some(Closed::Draining);
    }
    if facts.suspended {
        return Some(Closed::Suspended);
    }
    if facts.misfit.is_some() {
        return Some(Closed::Misfit);
    }
    if facts.readmitting && matches!(state, ModelState::Ready(_)) {
        return Some(Closed::Loading);
    }
    match state {
        ModelState::Loading { .. } | ModelState::Restarting { last: None, .. } => Some(Closed::Loading),
        ModelState::Failed { .. } => Some(Closed::Failed),
        ModelState::Ready(_) | ModelState::Restarting { last: Some(_), .. } => None,
    }
}

/// What a gateway has checked already, checked again: it has read a stranger's bytes, and the engine must not pay for that.
fn check(request: &Request, info: &ModelInfo) -> Result<(), Refusal> {
    let (vocab, limit) = (info.vocab_size, info.max_model_len);
    let invalid = |param: &str, message: String| Err(Refusal::Invalid { param: param.to_owned(), message });
    if request.prompt.is_empty() {
        return invalid("prompt", "the prompt has no tokens".to_owned());
    }
    if request.prompt.len() >= limit as usize {
        let (prompt, max_tokens) = (request.prompt.len() as u32, request.max_tokens);
        return Err(Refusal::ContextLength { prompt, max_tokens, limit });
    }
    if let Some(token) = request.prompt.iter().find(|token| **token >= vocab) {
        return invalid("prompt", format!("token {token} is not in the vocabulary of {vocab}"));
    }
    if request.n == 0 || request.n > MAX_N {
        return invalid("n", format!("n is {}, it must be from 1 to {MAX_N}", request.n));
    }
    if request.max_tokens == 0 {
        return invalid("max_tokens", "max_tokens is 0, it must be at least 1".to_owned());
    }
    if request.stop_ids.len() > MAX_STOP_IDS {
        return invalid(
            "stop",
            format!("{} stop tokens, at most {MAX_STOP_IDS} are taken", request.stop_ids.len()),
        );
    }
    if request.context.len() > MAX_CONTEXT {
        return invalid(
            "stop",
            format!("a context of {} bytes, at most {MAX_CONTEXT} are taken", request.context.len()),
        );
    }
    let sampling = request.sampling;
    if !(0.0..=2.0).contains(&sampling.temperature) {
        return invalid(
            "temperature",
            format!("temperature is {}, it must be from 0 to 2", sampling.temperature),
        );
    }
    if !(sampling.top_p > 0.0 && sampling.top_p <= 1.0) {
        return invalid("top_p", format!("top_p is {}, it must be above 0 and at most 1", sampling.top_p));
    }
    if sampling.top_k == Some(0) {
        return invalid("top_k", "top_k is 0, it must be at least 1".to_owned());
    }
    if !SamplingParams::from(sampling).penalties.is_valid() {
        return invalid("repetition_penalty", "a penalty is outside of its range".to_owned());
    }
    Ok(())
}

/// Whether a request's key is one of the tenant's: keys are numbered over all tenants.
fn check_key(key: Option<u32>, keys: Option<&[KeyEntry]>) -> Result<(), Refusal> {
    match key {
        Some(key) if !keys.unwrap_or_default().iter().any(|known| known.id == key) => Err(Refusal::Invalid {
            param: "key".to_owned(),
            message: "the API key is not this tenant's".to_owned(),
        }),
        _ => Ok(()),
    }
}

/// Has a request asked again soon, unless it has waited for too long, or too many wait.
fn come_back(asked: Asked, waiting: &mpsc::Sender<Asked>) -> Result<(), Refusal> {
    let waited = asked.since.elapsed();
    let place = waiting.clone().try_reserve_owned().ok().filter(|_| waited < CLAIM_WAIT);
    let Some(place) = place else { return Err(Refusal::IdempotencyBusy { retry_after: 1 }) };
    let (least, most) = CLAIM_PAUSE;
    tokio::spawn(async move {
        tokio::time::sleep((waited / 4).clamp(least, most)).await;
        place.send(asked);
    });
    Ok(())
}

fn random_id() -> Result<RequestId, getrandom::Error> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)?;
    Ok(RequestId(bytes))
}

/// Writes frames until the outbox is dropped and empty, or the gateway stops reading.
async fn write(mut writer: OwnedWriteHalf, mut frames: mpsc::Receiver<ToGateway>) {
    while let Some(frame) = frames.recv().await {
        let bytes = match encode(&frame) {
            Ok(bytes) => bytes,
            Err(error) => {
                error!(%error, "a frame to a gateway cannot be encoded");
                return;
            }
        };
        if writer.write_all(&bytes).await.is_err() {
            return;
        }
    }
}

/// Reads and forgets until end of file.
async fn drain(reader: &mut OwnedReadHalf, scratch: &mut [u8]) {
    while reader.read(scratch).await.is_ok_and(|n| n > 0) {}
}

/// Waits for a gateway's end, and brings it about where it does not come: two gateways of one tenant never run at once.
async fn fence(name: &str, pidfd: Pidfd, patience: Duration) {
    let gone = tokio::task::spawn_blocking(move || {
        if pidfd.wait_gone(patience)? {
            return Ok(true);
        }
        pidfd.kill()?;
        pidfd.wait_gone(DEATH)
    });
    match gone.await {
        Ok(Ok(true)) => {}
        Ok(Ok(false)) => error!(tenant = name, "a killed gateway does not end"),
        Ok(Err(error)) => error!(tenant = name, %error, "the end of a gateway cannot be watched"),
        Err(error) => error!(tenant = name, %error, "the end of a gateway cannot be watched"),
    }
}
