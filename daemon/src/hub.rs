//! Delivery: the logs of requests, and who reads them.
//!
//! **Owns** the logs of requests in memory (every live one, and the last that ended) and every gateway's attachments. **Never** blocks
//! an engine on a reader: what a gateway's outbox does not take now is sent from the attachment's cursor once it does.
//!
//! One task, one inbox. Records come from the recorder, once they are durable, in commit order; an entry is in its log before any
//! gateway is sent it, and a gateway gets entries only through an attachment's cursor. A log that is not in memory is looked up in the
//! journal, one for each gateway at a time.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fail::fail_point;
use pagedd_core::{FinishReason, ModelId, RequestId, TenantId};
use pagedd_engine::{Command, EngineHandle, StepRecord};
use pagedd_journal::{
    Admission, Durability, Idempotency, Kept, OnLeave, SavedRequest, Snapshot, SnapshotRequest,
};
use pagedd_sched::AdmitError;
use pagedd_wire::gateway::{Closed, Delivery, Entry, Refusal, ToGateway};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::MissedTickBehavior;
use tracing::{debug, warn};

use crate::convert;
use crate::quota::{Accounts, Grant, Spending};
use crate::recorder::{Hold, Lookup, Recorder, Told, unix};
use crate::retention::Retentions;

mod keeping;
mod unserved;

pub use keeping::Load;

/// Messages that may wait for the hub. The recorder waits where it is full, and engines behind it: tokens would not be visible anyway.
pub const INBOX: usize = 1024;
/// Entries in one frame to a gateway, over all requests.
const FRAME_ENTRIES: usize = 16 << 10;
/// How often full outboxes are tried again.
const RETRY: Duration = Duration::from_millis(10);
/// How often time limits are looked at.
const HOUSEKEEPING: Duration = Duration::from_millis(500);
/// Memory that logs of finished requests may take; beyond it the oldest of the tenant that has most go before their time.
const FINISHED_BYTES: usize = 8 << 20;
/// The same while the journal cannot be written, prompts included.
const UNWRITTEN_BYTES: usize = 256 << 20;
/// How long a finished log stays at least.
const LEAST_KEPT: Duration = Duration::from_millis(250);
/// Model of a request whose own is not configured.
const NO_MODEL: ModelId = ModelId(u16::MAX);

/// A gateway connection. Each start of a gateway has another one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ConnectionId(pub u64);

/// Travels with a submission through the engine and comes back with its answer.
pub struct Ticket {
    /// Who asked, and waits for the answer.
    pub connection: ConnectionId,
    /// Whose.
    pub tenant: TenantId,
    /// The model that was asked.
    pub model: ModelId,
    /// The gateway's number for its question.
    pub number: u64,
    /// Tokens in a block of its model.
    pub block_size: u32,
    /// Under what it will be asked for again.
    pub idempotency: Option<Idempotency>,
    /// Until then nobody else gets the key.
    pub _hold: Option<Hold>,
    /// That it is within its tenant's quotas.
    pub grant: Grant,
    /// Digest of its model's file.
    pub model_digest: Option<[u8; 16]>,
    /// The whole request, for the journal.
    pub saved: SavedRequest,
}

/// What the hub is told.
pub enum Message {
    /// The engine took a request, and that is durable.
    Admitted {
        /// Which, and what was asked.
        admission: Arc<Admission>,
        /// The model that was asked.
        model: ModelId,
        /// Who asked, and waits for the answer.
        connection: ConnectionId,
        /// The gateway's number for its question.
        number: u64,
        /// What it takes of its tenant's quotas.
        spending: Spending,
    },
    /// The engine did not take it.
    Refused(Box<Ticket>, AdmitError),
    /// A step's tokens and finishes.
    Step(StepRecord),
    /// A gateway connected; frames to it go into `outbox`.
    Up {
        /// Whose.
        tenant: TenantId,
        /// Its connection.
        connection: ConnectionId,
        /// Its outbox.
        outbox: mpsc::Sender<ToGateway>,
        /// Dropped once the hub has given the connection up, which then is to end.
        held: oneshot::Sender<()>,
    },
    /// A gateway is gone.
    Down(ConnectionId),
    /// A gateway wants a request's entries from a cursor on.
    Attach(ConnectionId, RequestId, u64),
    /// A gateway wants no more of it; whether nobody is expected to come back for it, should it have ended.
    Detach(ConnectionId, RequestId, bool),
    /// The client left.
    Cancel(ConnectionId, RequestId),
    /// A choice's text is complete.
    Stop(ConnectionId, RequestId, u32),
    /// The tenant was removed: its logs go.
    Forget(TenantId),
    /// An engine has a request of an earlier daemon.
    Readmitted(RequestId),
    /// An engine keeps a request of an earlier daemon, which is too large for it.
    Held(RequestId),
    /// No engine will ever have those of this model.
    ModelFailed(ModelId),
    /// How many requests of a tenant have not ended.
    Live(TenantId, oneshot::Sender<u32>),
    /// What the journal has of a request that was looked up.
    Found(Lookup, Option<Box<Kept>>),
    /// All that is live, and what ended while nothing could be written.
    Snapshot(oneshot::Sender<Snapshot>),
    /// How long a tenant's requests are kept after their end; `None` is as long as others'.
    Retain(TenantId, Option<Duration>),
    /// How long logs and orphans live from now on.
    Limits(Limits),
    /// Requests that are kept no longer, before the journal's time for them is over, since this was asked last.
    Spent(oneshot::Sender<Vec<RequestId>>),
    /// What is under way.
    Load(oneshot::Sender<Load>),
    /// The daemon ends: whoever reads no more may come back to the next one. Nothing is cancelled for it from here on.
    Hold,
    /// What was counted so far.
    Counters(oneshot::Sender<BTreeMap<TenantId, Counters>>),
}

/// What was counted of one tenant since the daemon started.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Requests admitted.
    pub admitted: u64,
    /// Requests not admitted by the engine.
    pub refused: u64,
    /// Choices that ended, in the order of [`FinishReason::ALL`].
    pub finished: [u64; FinishReason::ALL.len()],
    /// Prompt tokens of ended requests.
    pub prompt_tokens: u64,
    /// Of those, found in the prefix cache.
    pub cached_tokens: u64,
    /// Tokens generated.
    pub output_tokens: u64,
}

/// One request's log.
struct Log {
    /// Whose, and what was asked. The prompt goes once the request has ended and is in the journal.
    admission: Admission,
    /// As it was when the prompt was there.
    prompt_tokens: u32,
    /// Of those, found in the prefix cache; `None` where it has not started.
    cached_tokens: Option<u32>,
    model: ModelId,
    /// Among all logs of this daemon, in the order of admission.
    number: u64,
    entries: Vec<Entry>,
    reader: Reader,
    /// It is to be cancelled, and the engine could not be told yet.
    cancel_waits: bool,
    /// The engine was told to cancel it.
    cancelled: bool,
    /// It has ended, and nobody is expected to come back for it.
    settled: bool,
    place: Place,
    /// When it ended, in seconds since 1970.
    ended: Option<u64>,
    /// What it takes of its tenant's quotas, until it ends.
    spending: Option<Spending>,
}

/// Where a log's request is, as long as it has not ended.
enum Place {
    /// It is of an earlier daemon, and its engine does not have it yet: choices that are to be stopped once it does.
    Awaited(Vec<u32>),
    /// With its engine.
    Taken,
    /// With its engine, which never runs it.
    Held,
}

/// Who reads a log.
#[derive(Clone, Copy)]
enum Reader {
    /// A gateway, which was sent `[0, sent)`.
    Attached { connection: ConnectionId, sent: usize },
    /// Nobody, since then.
    None { since: Instant },
}

impl Log {
    fn new(number: u64, model: ModelId, admission: Admission) -> Self {
        Self {
            prompt_tokens: admission.saved.prompt.len() as u32,
            cached_tokens: None,
            admission,
            model,
            number,
            entries: Vec::new(),
            reader: Reader::None { since: Instant::now() },
            cancel_waits: false,
            cancelled: false,
            settled: false,
            place: Place::Taken,
            ended: None,
            spending: None,
        }
    }

    fn bytes(&self) -> usize {
        let SavedRequest { prompt, context, .. } = &self.admission.saved;
        let prompt = prompt.capacity() * size_of::<u32>();
        size_of::<Self>() + prompt + context.capacity() + self.entries.capacity() * size_of::<Entry>()
    }
}

/// Logs of one tenant's finished requests, oldest first, with what they weigh.
#[derive(Default)]
struct FinishedLogs {
    order: VecDeque<(Instant, RequestId, usize)>,
    bytes: usize,
}

struct Connection {
    tenant: TenantId,
    outbox: mpsc::Sender<ToGateway>,
    /// Attached requests with entries that were not sent.
    dirty: BTreeSet<RequestId>,
    /// Requests to look up in the journal, with the first entries wanted. No more than an outbox has places.
    unknown: VecDeque<(RequestId, u64)>,
    /// One is being looked up.
    looking: bool,
    _held: oneshot::Sender<()>,
}

impl Connection {
    /// It waits for something that is tried again.
    fn lags(&self) -> bool {
        !self.dirty.is_empty() || (!self.unknown.is_empty() && !self.looking)
    }
}

/// How long logs and orphans live.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// A finished request can be attached for this long.
    pub retention: Duration,
    /// A running request that nobody reads is cancelled after this long.
    pub reattach_grace: Duration,
}

/// The delivery task's state.
pub struct Hub {
    limits: Limits,
    engines: Vec<EngineHandle<Box<Ticket>>>,
    lookups: mpsc::Sender<Lookup>,
    recorder: mpsc::Sender<Told>,
    durability: watch::Receiver<Durability>,
    /// Models that no engine runs, and since when that is known.
    unserved: BTreeMap<ModelId, Instant>,
    logs: HashMap<RequestId, Log>,
    /// Logs so far.
    number: u64,
    connections: HashMap<ConnectionId, Connection>,
    counters: BTreeMap<TenantId, Counters>,
    accounts: Accounts,
    finished: BTreeMap<TenantId, FinishedLogs>,
    finished_bytes: usize,
    retentions: Retentions,
    /// What the journal is to delete before its time.
    spent: Vec<RequestId>,
}

impl Hub {
    /// A hub for these engines, indexed by [`ModelId`].
    ///
    /// Lookups go to the journal and come back as [`Message::Found`].
    pub fn new(
        limits: Limits,
        engines: Vec<EngineHandle<Box<Ticket>>>,
        recorder: &Recorder,
        accounts: Accounts,
    ) -> Self {
        Self {
            limits,
            engines,
            lookups: recorder.lookups.clone(),
            recorder: recorder.inbox.clone(),
            durability: recorder.durability.clone(),
            unserved: BTreeMap::new(),
            logs: HashMap::new(),
            number: 0,
            connections: HashMap::new(),
            counters: BTreeMap::new(),
            accounts,
            finished: BTreeMap::new(),
            finished_bytes: 0,
            retentions: Retentions::new(limits.retention, limits.reattach_grace),
            spent: Vec::new(),
        }
    }

    /// Takes over a live request of an earlier daemon. Nobody reads it yet, and its engine does not have it before
    /// [`Message::Readmitted`]; a model that is not configured has none.
    pub fn restore(&mut self, model: Option<ModelId>, kept: Kept) {
        let request = kept.admission.request;
        let model = model.unwrap_or_else(|| {
            self.model_failed(NO_MODEL);
            NO_MODEL
        });
        let mut log = Log::new(self.number, model, kept.admission);
        log.cached_tokens = kept.cached_tokens;
        log.entries = kept.entries.into_iter().map(convert::entry).collect();
        log.place = Place::Awaited(Vec::new());
        let tokens = log.entries.iter().filter(|entry| matches!(entry, Entry::Token { .. })).count() as u64;
        let account = self.accounts.of(log.admission.tenant);
        let cost = convert::cost(&log.admission.saved, u32::MAX, tokens);
        log.spending = Some(account.resume(cost, log.cached_tokens.is_some()));
        self.number += 1;
        self.logs.insert(request, log);
    }

    /// Runs until every sender is gone.
    pub async fn run(mut self, mut inbox: mpsc::Receiver<Message>) {
        let mut housekeeping = tokio::time::interval(HOUSEKEEPING);
        housekeeping.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut batch = Vec::new();
        loop {
            // An idle daemon does not wake up: time changes nothing where there is no log and no reader lags.
            let lagging = self.connections.values().any(Connection::lags);
            tokio::select! {
                received = inbox.recv_many(&mut batch, 64) => {
                    if received == 0 {
                        return;
                    }
                    for message in batch.drain(..) {
                        self.handle(message);
                    }
                    self.flush();
                }
                () = tokio::time::sleep(RETRY), if lagging => self.flush(),
                _ = housekeeping.tick(), if !self.logs.is_empty() => {
                    self.expire(Instant::now());
                    if self.logs.is_empty() {
                        self.logs.shrink_to_fit();
                        pagedd_host::memory::give_back();
                    }
                }
            }
        }
    }

    fn handle(&mut self, message: Message) {
        match message {
            Message::Admitted { admission, model, connection, number, spending } => {
                // The recorder has let go of it.
                self.admitted(Arc::unwrap_or_clone(admission), model, (connection, number), spending);
            }
            Message::Refused(ticket, error) => self.refused(&ticket, error),
            Message::Step(record) => self.record(record),
            Message::Up { tenant, connection, outbox, held } => {
                let (dirty, unknown) = (BTreeSet::new(), VecDeque::new());
                let up = Connection { tenant, outbox, dirty, unknown, looking: false, _held: held };
                self.connections.insert(connection, up);
            }
            Message::Down(connection) => self.down(connection),
            Message::Attach(connection, request, from) => self.attach(connection, request, from),
            Message::Detach(connection, request, done) => {
                if let Some(log) = self.read_by(connection, request) {
                    log.settled |= done && log.ended.is_some();
                    log.reader = Reader::None { since: Instant::now() };
                }
                if let Some(connection) = self.connections.get_mut(&connection) {
                    connection.dirty.remove(&request);
                }
            }
            Message::Cancel(connection, request) => {
                self.command(connection, request, Command::Cancel(request));
            }
            Message::Stop(connection, request, choice) => {
                let reason = FinishReason::Stop;
                self.command(connection, request, Command::FinishChoice { request, choice, reason });
            }
            Message::Forget(tenant) => {
                self.logs.retain(|_, log| log.admission.tenant != tenant);
                self.finished_bytes -= self.finished.remove(&tenant).map_or(0, |logs| logs.bytes);
                self.counters.remove(&tenant);
                self.accounts.forget(tenant);
                self.retentions.set(tenant, None);
            }
            Message::Retain(tenant, own) => self.retentions.set(tenant, own),
            Message::Limits(limits) => self.configure(limits),
            Message::Hold => self.hold(),
            // Who asked for these is there, or the daemon ends.
            Message::Spent(answer) => drop(answer.send(std::mem::take(&mut self.spent))),
            Message::Load(answer) => drop(answer.send(self.load())),
            Message::Readmitted(request) => self.placed(request, Place::Taken),
            Message::Held(request) => self.placed(request, Place::Held),
            Message::ModelFailed(model) => self.model_failed(model),
            // An operator who went away does not want the answer.
            Message::Live(tenant, answer) => {
                let live = |log: &&Log| log.admission.tenant == tenant && log.ended.is_none();
                _ = answer.send(self.logs.values().filter(live).count() as u32);
            }
            Message::Found(lookup, kept) => self.found(lookup, kept),
            // The recorder waits for it.
            Message::Snapshot(answer) => drop(answer.send(self.snapshot())),
            // A scraper that went away does not want its answer.
            Message::Counters(answer) => drop(answer.send(self.counters.clone())),
        }
    }

    /// The log of a request, if this connection's tenant made it.
    fn read_by(&mut self, connection: ConnectionId, request: RequestId) -> Option<&mut Log> {
        let tenant = self.connections.get(&connection)?.tenant;
        self.logs.get_mut(&request).filter(|log| log.admission.tenant == tenant)
    }

    fn admitted(
        &mut self,
        admission: Admission,
        model: ModelId,
        (connection, ticket): (ConnectionId, u64),
        spending: Spending,
    ) {
        self.counters.entry(admission.tenant).or_default().admitted += 1;
        let request = admission.request;
        let rates = convert::rates(spending.rates());
        let log = Log { spending: Some(spending), ..Log::new(self.number, model, admission) };
        self.logs.insert(request, log);
        self.number += 1;
        fail_point!("before-accepted");
        self.send(connection, ToGateway::Accepted { ticket, request: request.0, repeated: false, rates });
    }

    /// Its engine has a request: now comes what was asked of it before.
    fn placed(&mut self, request: RequestId, place: Place) {
        fail_point!("readmitted");
        let Some(log) = self.logs.get_mut(&request) else { return };
        let model = log.model;
        if let Place::Held = place {
            // It takes nothing while it waits for other settings: its tenant's quotas are free for what can run.
            log.spending = None;
        }
        let stops = match std::mem::replace(&mut log.place, place) {
            Place::Awaited(stops) => stops,
            Place::Taken | Place::Held => Vec::new(),
        };
        if log.cancel_waits {
            self.tell_engine(model, request, Command::Cancel(request));
        }
        for choice in stops {
            let command = Command::FinishChoice { request, choice, reason: FinishReason::Stop };
            self.tell_engine(model, request, command);
        }
    }

    fn refused(&mut self, ticket: &Ticket, error: AdmitError) {
        self.counters.entry(ticket.tenant).or_default().refused += 1;
        let refusal = match error {
            AdmitError::ContextLength { prompt, max_model_len } => {
                Refusal::ContextLength { prompt: prompt.0, max_tokens: 1, limit: max_model_len.0 }
            }
            AdmitError::NeverFits { needed, allowed } => {
                Refusal::NeverFits { needed: needed.0, allowed: allowed.0, block_size: ticket.block_size }
            }
            AdmitError::QueueFull { waiting } => {
                let wait_us = self.accounts.of(ticket.tenant).queue_wait();
                Refusal::QueueFull { waiting, retry_after: convert::retry_after(wait_us) }
            }
            // The model's pool has a size, and the tenant's share is on its way into it.
            AdmitError::UnknownTenant(_) => Refusal::Closed(Closed::Loading),
            AdmitError::Nothing { field } => {
                Refusal::Invalid { param: field.to_owned(), message: format!("{field} must be at least 1") }
            }
            AdmitError::Duplicate(request) => {
                // 128 random bits came twice.
                Refusal::Invalid { param: "request".to_owned(), message: format!("request {request} exists") }
            }
        };
        self.send(ticket.connection, ToGateway::Refused { ticket: ticket.number, refusal });
    }

    fn record(&mut self, record: StepRecord) {
        for started in record.started {
            if let Some(log) = self.logs.get_mut(&started.request) {
                log.cached_tokens = Some(started.cached_tokens.0);
                log.spending.as_mut().map(Spending::start);
            }
        }
        for token in record.tokens {
            let Some(log) = self.logs.get_mut(&token.request) else { continue };
            if let Some(spending) = &mut log.spending {
                spending.spend(1);
            }
            log.entries.push(Entry::Token { choice: token.choice, token: token.token.0 });
            self.counters.entry(token.tenant).or_default().output_tokens += 1;
            self.mark(token.request);
        }
        for finished in record.finished {
            let Some(log) = self.logs.get_mut(&finished.request) else { continue };
            let counters = self.counters.entry(finished.tenant).or_default();
            if let Some(i) = FinishReason::ALL.iter().position(|reason| *reason == finished.reason) {
                counters.finished[i] += 1;
            }
            log.entries.push(Entry::Finish { choice: finished.choice, reason: finished.reason.into() });
            if let Some(ended) = finished.ended {
                counters.prompt_tokens += u64::from(ended.prompt_tokens.0);
                counters.cached_tokens += u64::from(ended.cached_tokens.0);
                log.entries.push(Entry::End { cached_tokens: ended.cached_tokens.0 });
                log.entries.shrink_to_fit();
                log.ended = Some(unix());
                log.spending = None;
                if *self.durability.borrow() == Durability::Durable {
                    log.admission.saved.prompt = Vec::new();
                }
                let (bytes, now) = (log.bytes(), Instant::now());
                self.keep_finished(finished.tenant, finished.request, now, bytes);
            }
            self.mark(finished.request);
        }
    }

    /// Keeps a finished request's log for others to read, for as long as there is time and room.
    fn keep_finished(&mut self, tenant: TenantId, request: RequestId, since: Instant, bytes: usize) {
        let logs = self.finished.entry(tenant).or_default();
        logs.order.push_back((since, request, bytes));
        logs.bytes += bytes;
        self.finished_bytes += bytes;
    }

    /// The request has entries for its reader.
    fn mark(&mut self, request: RequestId) {
        if let Some(Log { reader: Reader::Attached { connection, .. }, .. }) = self.logs.get(&request)
            && let Some(connection) = self.connections.get_mut(connection)
        {
            connection.dirty.insert(request);
        }
    }

    fn attach(&mut self, connection: ConnectionId, request: RequestId, from: u64) {
        // A stranger's request that is in memory takes as long as one that is nowhere.
        let Some(log) = self.read_by(connection, request) else {
            if let Some(asking) = self.connections.get_mut(&connection) {
                if asking.unknown.len() < asking.outbox.max_capacity() {
                    asking.unknown.push_back((request, from));
                    look_up(&self.lookups, connection, asking);
                } else {
                    warn!(tenant = %asking.tenant, "a gateway has more questions open than it may; it is cut off");
                    self.down(connection);
                }
            }
            return;
        };
        log.reader = Reader::Attached { connection, sent: from as usize };
        let SavedRequest { key, context, created_unix, n, .. } = &log.admission.saved;
        let attached = ToGateway::Attached {
            request: request.0,
            key: *key,
            context: context.clone(),
            prompt_tokens: log.prompt_tokens,
            created: *created_unix,
            n: *n,
            entries: log.entries.len() as u64,
            held: matches!(log.place, Place::Held),
        };
        fail_point!("before-attached");
        self.send(connection, attached);
        self.mark(request);
    }

    /// The journal's answer. What another tenant made is not there.
    fn found(&mut self, Lookup { connection, request, from, .. }: Lookup, kept: Option<Box<Kept>>) {
        let Some(asking) = self.connections.get_mut(&connection) else { return };
        asking.looking = false;
        let tenant = asking.tenant;
        // Every live request is in memory: one that the journal has as live ended while nothing could be written.
        if let Some(Kept { admission, entries, finished_unix: Some(finished_unix), .. }) =
            kept.map(|kept| *kept)
            && admission.tenant == tenant
            && !self.logs.contains_key(&request)
        {
            let mut log = Log::new(self.number, NO_MODEL, admission);
            self.number += 1;
            log.admission.saved.prompt = Vec::new();
            log.entries = entries.into_iter().map(convert::entry).collect();
            log.ended = Some(finished_unix);
            let bytes = log.bytes();
            self.logs.insert(request, log);
            let age = Duration::from_secs(unix().saturating_sub(finished_unix));
            let since = Instant::now().checked_sub(age).unwrap_or_else(Instant::now);
            self.keep_finished(tenant, request, since, bytes);
        }
        if self.read_by(connection, request).is_some() {
            self.attach(connection, request, from);
        } else {
            self.send(connection, ToGateway::NotFound { request: request.0 });
        }
        if let Some(asking) = self.connections.get_mut(&connection) {
            look_up(&self.lookups, connection, asking);
        }
    }

    /// What the journal lacks after a time in which nothing could be written: all that is live, and what has its prompt still.
    fn snapshot(&self) -> Snapshot {
        fail_point!("snapshot-is-taken");
        let mut logs: Vec<&Log> =
            self.logs.values().filter(|log| !log.admission.saved.prompt.is_empty()).collect();
        logs.sort_by_key(|log| log.number);
        let requests = logs.into_iter().map(|log| SnapshotRequest {
            admission: log.admission.clone(),
            entries: log.entries.iter().map(convert::saved_entry).collect(),
            cached_tokens: log.cached_tokens,
            finished_unix: log.ended,
        });
        Snapshot { requests: requests.collect() }
    }

    fn down(&mut self, connection: ConnectionId) {
        self.connections.remove(&connection);
        let now = Instant::now();
        for log in self.logs.values_mut() {
            if matches!(log.reader, Reader::Attached { connection: reader, .. } if reader == connection) {
                log.reader = Reader::None { since: now };
            }
        }
    }

    /// Passes a gateway's wish on to the engine of its own request.
    fn command(&mut self, connection: ConnectionId, request: RequestId, command: Command<Box<Ticket>>) {
        let Some(log) = self.read_by(connection, request) else { return };
        if log.ended.is_some() {
            return;
        }
        let model = log.model;
        fail_point!("before-cancel");
        self.tell_engine(model, request, command);
    }

    fn tell_engine(&mut self, model: ModelId, request: RequestId, command: Command<Box<Ticket>>) {
        let cancels = matches!(command, Command::Cancel(_));
        if let Some(Log { place: Place::Awaited(stops), cancel_waits, .. }) = self.logs.get_mut(&request) {
            match command {
                Command::FinishChoice { choice, .. } => stops.push(choice),
                _ => *cancel_waits |= cancels,
            }
            return;
        }
        let Some(engine) = self.engines.get(usize::from(model.0)) else { return };
        let waits = engine.send(command).is_err();
        if waits {
            debug!(%request, "the engine's inbox is full");
        }
        // The next tick tries a cancel again. A choice whose text is complete may go on: its readers leave the rest out.
        if let Some(log) = self.logs.get_mut(&request).filter(|_| cancels) {
            (log.cancel_waits, log.cancelled) = (waits, !waits);
        }
    }

    /// A frame that answers a question. [`flush`](Self::flush) leaves room for one per question a gateway may have open; a
    /// gateway that leaves no room has stopped reading, and is cut off.
    fn send(&mut self, connection: ConnectionId, frame: ToGateway) {
        let Some(Connection { outbox, tenant, .. }) = self.connections.get(&connection) else { return };
        if outbox.try_send(frame).is_err() {
            warn!(%tenant, "a gateway does not read its answers; it is cut off");
            self.down(connection);
        }
    }

    /// Sends every reader what it lacks, as far as outboxes take it. Half of each is left to answers.
    fn flush(&mut self) {
        for (id, connection) in &mut self.connections {
            look_up(&self.lookups, *id, connection);
            while !connection.dirty.is_empty()
                && connection.outbox.capacity() > connection.outbox.max_capacity() / 2
            {
                let Ok(permit) = connection.outbox.try_reserve() else { break };
                let mut room = FRAME_ENTRIES;
                let mut deliveries = Vec::new();
                while room > 0
                    && let Some(request) = connection.dirty.pop_first()
                {
                    let Some(log) = self.logs.get_mut(&request) else { continue };
                    let Reader::Attached { connection: reader, sent } = &mut log.reader else { continue };
                    if reader != id {
                        continue;
                    }
                    let from = (*sent).min(log.entries.len());
                    let to = log.entries.len().min(from + room);
                    if from == to {
                        continue;
                    }
                    room -= to - from;
                    *sent = to;
                    if to < log.entries.len() {
                        connection.dirty.insert(request);
                    }
                    let entries = log.entries[from..to].to_vec();
                    deliveries.push(Delivery { request: request.0, from: from as u64, entries });
                }
                if deliveries.is_empty() {
                    break;
                }
                fail_point!("before-delivery");
                permit.send(ToGateway::Entries(deliveries));
            }
        }
    }

    /// Whether a log's reader has not been sent all of it.
    fn is_read(&self, request: RequestId) -> bool {
        self.logs.get(&request).is_some_and(|log| match log.reader {
            Reader::Attached { sent, .. } => sent < log.entries.len(),
            Reader::None { .. } => false,
        })
    }

    /// The log that finished first of a tenant's, and when.
    fn oldest(&self, tenant: TenantId) -> Option<(Instant, RequestId)> {
        let &(ended, request, _) = self.finished.get(&tenant)?.order.front()?;
        Some((ended, request))
    }

    /// Drops logs past their retention, and cancels what nobody reads any more.
    fn expire(&mut self, now: Instant) {
        let most_bytes = match *self.durability.borrow() {
            Durability::Durable => FINISHED_BYTES,
            // The journal has no other copy.
            Durability::Lost { .. } => UNWRITTEN_BYTES,
        };
        let tenants: Vec<TenantId> = self.finished.keys().copied().collect();
        for tenant in tenants {
            self.expire_finished(tenant, now);
        }
        while self.finished_bytes > most_bytes
            && let Some((&most, _)) = self.finished.iter().max_by_key(|(_, logs)| logs.bytes)
            && self.oldest(most).is_some_and(|(_, request)| !self.is_read(request))
        {
            self.drop_finished(most, 0);
        }
        let grace = self.limits.reattach_grace;
        let orphans: Vec<(ModelId, RequestId)> = self
            .logs
            .iter()
            .filter(|(_, log)| log.ended.is_none() && !log.cancelled)
            .filter(|(_, log)| {
                let unread =
                    matches!(log.reader, Reader::None { since } if now.duration_since(since) >= grace);
                log.cancel_waits || (unread && log.admission.saved.on_leave == OnLeave::Cancel)
            })
            .map(|(request, log)| (log.model, *request))
            .collect();
        for (model, request) in orphans {
            self.tell_engine(model, request, Command::Cancel(request));
        }
        self.end_unserved(now);
    }
}

/// Has the next unknown request of a gateway looked up, unless one is: a tenant that asks for many waits for itself.
fn look_up(lookups: &mpsc::Sender<Lookup>, connection: ConnectionId, asking: &mut Connection) {
    if let Some(&(request, from)) = asking.unknown.front()
        && !asking.looking
        && lookups.try_send(Lookup { connection, tenant: asking.tenant, request, from }).is_ok()
    {
        asking.looking = true;
        asking.unknown.pop_front();
    }
}

#[cfg(test)]
mod tests;
