//! The journal's thread: what engines did becomes durable, then visible.
//!
//! **Owns** journal.db, and with it the order of things: engines tell it what they did, it commits, and only then the hub hears of it
//! (I5). **Never** waits for a reader. Where the disk does not take a record, it is counted and goes on to the hub (`durable: no`); once
//! the disk takes writes again, the hub's logs are written as a snapshot.
//!
//! ```text
//! engines ─▶ inbox ─▶ one transaction per batch ─▶ hub
//! hub ─▶ lookups of requests that it does not have ─▶ hub
//! ```

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use fail::fail_point;
use pagedd_core::{RequestId, TenantId};
use pagedd_engine::{Command, EngineHandle, InboxFull, StepRecord};
use pagedd_journal::{
    Admission, Durability, Entry, Finish, Idempotency, JournalDb, JournalWriter, Kept, Now, Record,
    Retention, Step,
};
use pagedd_sched::AdmitError;
use tokio::sync::{mpsc, oneshot, watch};
use tracing::{error, info, warn};

use crate::convert;
use crate::hub::{ConnectionId, Message, Ticket};

/// What may wait for the recorder. An engine that finds it full waits: its tokens would not be visible anyway.
const INBOX: usize = 1024;
/// Lookups that may wait: the hub has one open per gateway.
const LOOKUPS: usize = 1024;
/// Most of the inbox that becomes one transaction.
const BATCH: usize = 256;
/// Between two looks at what is kept no longer: a tenth of the retention, but within these.
const EXPIRE_EVERY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));
/// Idempotency keys that are remembered while the disk takes no records. Beyond, a repeated one is a request of its own.
const MOST_LOST_KEYS: usize = 1 << 16;
/// Between two tries to put a request into an engine's full inbox.
const INBOX_RETRY: Duration = Duration::from_millis(10);
/// Being admitted again has ended the daemon so often: it is not tried once more.
const MOST_REPLAYS: u32 = 2;

/// What the recorder is told.
pub enum Told {
    /// An engine took a request.
    Admitted(RequestId, Box<Ticket>),
    /// An engine did not take it.
    Refused(Box<Ticket>, AdmitError),
    /// A step's tokens and finishes.
    Step(StepRecord),
    /// A request is about to be submitted under an `Idempotency-Key`.
    Claim {
        /// Whose.
        tenant: TenantId,
        /// The key, and what it came with.
        idempotency: Idempotency,
        /// What is to be done.
        answer: oneshot::Sender<Claim>,
    },
    /// A claimed request is not submitted after all.
    Unclaim(TenantId, Idempotency),
    /// This request is about to be admitted again; the answer comes once that is on disk.
    Replaying(RequestId, oneshot::Sender<()>),
    /// It was, and all is well.
    Replayed(RequestId),
    /// The tenant was removed: nothing of it is kept.
    Forget(TenantId),
    /// All that is committed is to be copied to this new file, at one moment; the answer says why it was not.
    Save(PathBuf, oneshot::Sender<Result<(), String>>),
    /// Nothing more comes; the answer comes once everything is on disk.
    Sync(oneshot::Sender<()>),
}

/// What an `Idempotency-Key` says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Claim {
    /// Nobody had it: submit.
    New,
    /// This request was made with it, and with the same body.
    Made(RequestId),
    /// A request was made with it, and with another body.
    Conflict,
    /// A request with it is being admitted at this moment.
    Busy,
}

/// A request that the hub does not have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lookup {
    /// Who asks.
    pub connection: ConnectionId,
    /// Of which tenant.
    pub tenant: TenantId,
    /// For which.
    pub request: RequestId,
    /// First entry wanted.
    pub from: u64,
}

/// The ways into the recorder, and what it says of itself.
pub struct Recorder {
    /// For engines, gateways and admin commands.
    pub inbox: mpsc::Sender<Told>,
    /// For the hub.
    pub lookups: mpsc::Sender<Lookup>,
    /// Whether what was accepted survives the daemon.
    pub durability: watch::Receiver<Durability>,
}

/// The live requests of a journal, in the order of their admission. One that ended the daemon while it was being admitted again, twice, is
/// set aside: it fails. Those of tenants that are gone are deleted, and one that is damaged is left out.
///
/// # Errors
/// The journal cannot be read or written.
pub fn live(db: &mut JournalDb, tenants: &[TenantId]) -> Result<Vec<Kept>, pagedd_journal::DbError> {
    let (mut live, mut aside, mut gone) = (Vec::new(), Vec::new(), BTreeSet::new());
    db.replay_live(|kept| match kept {
        Ok(kept) if !tenants.contains(&kept.admission.tenant) => drop(gone.insert(kept.admission.tenant)),
        Ok(kept) if kept.replays >= MOST_REPLAYS => aside.push(kept.admission.request),
        Ok(kept) => live.push(kept),
        Err(damage) => {
            error!(request = %damage.request, tenant = %damage.tenant, error = %damage.error, "an accepted request is damaged");
        }
    })?;
    // The daemon ended between the removal of a tenant and that of its requests.
    for tenant in gone {
        db.delete_tenant(tenant)?;
    }
    for request in aside {
        error!(%request, "the daemon died twice while it admitted this request again; it is set aside");
        if let Err(error) = db.set_aside(request, unix()) {
            warn!(%request, %error, "its client is not told before it can be written");
        }
    }
    Ok(live)
}

/// Starts the thread. It ends with the last sender.
///
/// # Errors
/// The system refuses a thread.
pub fn start(db: JournalDb, retention: Retention, hub: mpsc::Sender<Message>) -> io::Result<Recorder> {
    let (inbox, told) = mpsc::channel(INBOX);
    let (lookups, asked) = mpsc::channel(LOOKUPS);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    let writer = JournalWriter::new(db);
    let (sender, durability) = watch::channel(writer.durability());
    let work = Work {
        writer,
        hub,
        durability: sender,
        retention,
        // What an earlier daemon left is looked at first.
        expire_at: Some(Instant::now()),
        claims: HashMap::new(),
        lost_keys: HashMap::new(),
    };
    thread::Builder::new()
        .name("journal".to_owned())
        .spawn(move || runtime.block_on(work.run(told, asked)))?;
    Ok(Recorder { inbox, lookups, durability })
}

/// Admits requests of an earlier daemon again, one after the other: where that ends this daemon too, the journal knows at which.
pub async fn readmit(restored: Vec<Kept>, engine: EngineHandle<Box<Ticket>>, recorder: mpsc::Sender<Told>) {
    let count = restored.len();
    for kept in restored {
        let request = kept.admission.request;
        let (counted, answer) = oneshot::channel();
        drop(recorder.send(Told::Replaying(request, counted)).await);
        // Where the recorder is gone, so is the daemon.
        if answer.await.is_err() {
            return;
        }
        readmit_point(&kept);
        let (taken, answer) = oneshot::channel();
        let reply = Box::new(move |()| _ = taken.send(()));
        let mut command = Command::Restore { restored: Box::new(convert::restored(&kept)), reply };
        while let Err((InboxFull, back)) = engine.send(command) {
            command = back;
            tokio::time::sleep(INBOX_RETRY).await;
        }
        if answer.await.is_err() {
            return;
        }
        // A daemon that goes on has admitted it.
        drop(recorder.send(Told::Replayed(request)).await);
    }
    info!(requests = count, "requests of an earlier daemon go on");
}

/// In test builds the fail point `readmit` ends the daemon at the request whose prompt begins with the token that it returns.
fn readmit_point(kept: &Kept) {
    fail_point!("readmit", |token: Option<String>| {
        if token.and_then(|token| token.parse().ok()) == kept.admission.saved.prompt.first().copied() {
            std::process::abort();
        }
    });
    // Without fail points it has no use.
    let _ = kept;
}

struct Work {
    writer: JournalWriter,
    hub: mpsc::Sender<Message>,
    durability: watch::Sender<Durability>,
    retention: Retention,
    /// When something may be kept no longer.
    expire_at: Option<Instant>,
    /// Idempotency keys whose requests are being admitted, with digests of their bodies.
    claims: HashMap<(TenantId, [u8; 32]), [u8; 32]>,
    /// Those of requests that were admitted and could not be written.
    lost_keys: HashMap<(TenantId, [u8; 32]), (RequestId, [u8; 32])>,
}

impl Work {
    async fn run(mut self, mut inbox: mpsc::Receiver<Told>, mut lookups: mpsc::Receiver<Lookup>) {
        let mut batch = Vec::new();
        loop {
            self.tidy().await;
            let wake = self.writer.wakes_at().into_iter().chain(self.expire_at).min();
            let sleep = tokio::time::sleep_until(wake.unwrap_or_else(Instant::now).into());
            // Tokens first, but one lookup after each batch: a tenant that looks up much holds up nobody, and waits not for ever.
            tokio::select! {
                biased;
                received = inbox.recv_many(&mut batch, BATCH) => {
                    if received == 0 {
                        break;
                    }
                    self.take(batch.drain(..)).await;
                    if let Ok(lookup) = lookups.try_recv() {
                        self.find(lookup).await;
                    }
                }
                Some(lookup) = lookups.recv() => self.find(lookup).await,
                () = sleep, if wake.is_some() => {}
            }
        }
        self.sync();
    }

    /// Makes durable what is to be, then passes on what was told, in order.
    async fn take(&mut self, batch: impl Iterator<Item = Told>) {
        let (mut records, mut messages) = (Vec::new(), Vec::new());
        for told in batch {
            match told {
                Told::Admitted(request, ticket) => {
                    let Ticket { connection, tenant, model, number, idempotency, saved, .. } = *ticket;
                    let admission = Admission { request, tenant, idempotency, saved };
                    records.push(Record::Admission(Box::new(admission.clone())));
                    messages.push(Message::Admitted {
                        admission: Box::new(admission),
                        model,
                        connection,
                        number,
                    });
                }
                Told::Step(step) => {
                    let entries = convert::entries(&step);
                    if !entries.is_empty() {
                        records.push(Record::Step(Step { entries }));
                    }
                    if step.finished.iter().any(|finished| finished.ended.is_some()) {
                        let at = Instant::now() + self.expire_every();
                        self.expire_at.get_or_insert(at);
                    }
                    messages.push(Message::Step(step));
                }
                Told::Refused(ticket, error) => {
                    if let Some(idempotency) = ticket.idempotency {
                        self.claims.remove(&(ticket.tenant, idempotency.key));
                    }
                    messages.push(Message::Refused(ticket, error));
                }
                told => {
                    self.flush(&mut records, &mut messages).await;
                    self.obey(told).await;
                }
            }
        }
        self.flush(&mut records, &mut messages).await;
    }

    async fn flush(&mut self, records: &mut Vec<Record>, messages: &mut Vec<Message>) {
        if !records.is_empty() {
            fail_point!("before-append");
            let durability = self.writer.append(records, now());
            for record in records.drain(..) {
                if let Record::Admission(admission) = record {
                    self.settle_claim(&admission, &durability);
                }
            }
            self.tell(durability);
            fail_point!("after-append");
        }
        for message in messages.drain(..) {
            // The hub ends only with the daemon.
            drop(self.hub.send(message).await);
        }
    }

    /// A claimed key belongs to a request from now on.
    fn settle_claim(&mut self, admission: &Admission, durability: &Durability) {
        let Some(Idempotency { key, body }) = admission.idempotency else { return };
        self.claims.remove(&(admission.tenant, key));
        if *durability != Durability::Durable && self.lost_keys.len() < MOST_LOST_KEYS {
            self.lost_keys.insert((admission.tenant, key), (admission.request, body));
        }
    }

    async fn obey(&mut self, told: Told) {
        match told {
            Told::Admitted(..) | Told::Refused(..) | Told::Step(_) => unreachable!("see `take`"),
            // Nobody waits for an answer whose receiver is gone.
            Told::Claim { tenant, idempotency, answer } => {
                let claim = self.claim(tenant, idempotency);
                if answer.send(claim).is_err() && claim == Claim::New {
                    self.claims.remove(&(tenant, idempotency.key));
                }
            }
            Told::Unclaim(tenant, idempotency) => drop(self.claims.remove(&(tenant, idempotency.key))),
            Told::Replaying(request, answer) => {
                if let Err(error) = self.writer.db().count_replay(&[request]) {
                    warn!(%request, %error, "it is not on disk that this request is being admitted again");
                }
                _ = answer.send(());
            }
            Told::Replayed(request) => {
                if let Err(error) = self.writer.db().clear_replays(&[request]) {
                    warn!(%request, %error, "it is not on disk that this request was admitted again");
                }
                drop(self.hub.send(Message::Readmitted(request)).await);
            }
            Told::Forget(tenant) => {
                if let Err(error) = self.writer.db().delete_tenant(tenant) {
                    warn!(%tenant, %error, "requests of a removed tenant stay until their time is over");
                }
                self.claims.retain(|(of, _), _| *of != tenant);
                self.lost_keys.retain(|(of, _), _| *of != tenant);
                drop(self.hub.send(Message::Forget(tenant)).await);
            }
            Told::Save(file, answer) => {
                let saved = match self.writer.durability() {
                    Durability::Durable => self.writer.db().save(&file).map_err(|error| error.to_string()),
                    Durability::Lost { reason, .. } => {
                        Err(format!("the journal cannot be written: {reason}"))
                    }
                };
                _ = answer.send(saved);
            }
            Told::Sync(answer) => {
                if self.writer.durability() != Durability::Durable {
                    self.snapshot().await;
                }
                self.sync();
                _ = answer.send(());
            }
        }
    }

    fn claim(&mut self, tenant: TenantId, Idempotency { key, body }: Idempotency) -> Claim {
        let compare = |made: (RequestId, [u8; 32])| {
            if made.1 == body { Claim::Made(made.0) } else { Claim::Conflict }
        };
        if let Some(claimed) = self.claims.get(&(tenant, key)) {
            return if *claimed == body { Claim::Busy } else { Claim::Conflict };
        }
        if let Some(made) = self.lost_keys.get(&(tenant, key)) {
            return compare(*made);
        }
        match self.writer.db().by_idempotency_key(tenant, &key) {
            Ok(Some(made)) if !self.cancelled(made.0) => compare(made),
            Ok(_) => {
                self.claims.insert((tenant, key), body);
                Claim::New
            }
            Err(error) => {
                warn!(%tenant, %error, "an idempotency key cannot be looked up");
                Claim::Busy
            }
        }
    }

    /// Whether a request was cancelled: its client left, and what it asks now is not answered by that.
    fn cancelled(&mut self, request: RequestId) -> bool {
        let log = self.writer.db().log(request, 0).ok().flatten().unwrap_or_default();
        log.iter().any(|entry| matches!(entry, Entry::Finish { reason: Finish::Cancelled, .. }))
    }

    async fn find(&mut self, lookup: Lookup) {
        let Lookup { request, tenant, .. } = lookup;
        let db = self.writer.db();
        // What another tenant made is not read: nobody learns from the time it takes that it is there.
        let found = db.tenant_of(request).and_then(|owner| match owner {
            Some(owner) if owner == tenant => db.request(request),
            Some(_) | None => Ok(None),
        });
        let found = found.unwrap_or_else(|error| {
            warn!(%request, %error, "a request cannot be read from the journal");
            None
        });
        drop(self.hub.send(Message::Found(lookup, found.map(Box::new))).await);
    }

    /// What is to be done between batches.
    async fn tidy(&mut self) {
        let durability = self.writer.tick(now());
        self.tell(durability);
        if self.writer.needs_snapshot(now()) {
            self.snapshot().await;
        }
        if self.expire_at.is_some_and(|at| at <= Instant::now()) {
            let expired = self.writer.expire(&self.retention, now());
            let keeps = self.writer.db().keeps_ended().unwrap_or(true);
            let wait = if expired.more { Duration::ZERO } else { self.expire_every() };
            self.expire_at = keeps.then(|| Instant::now() + wait);
        }
    }

    /// Has the hub's logs written.
    async fn snapshot(&mut self) {
        fail_point!("before-snapshot");
        let (answer, snapshot) = oneshot::channel();
        drop(self.hub.send(Message::Snapshot(answer)).await);
        if let Ok(snapshot) = snapshot.await {
            fail_point!("before-snapshot-is-written");
            let durability = self.writer.restore_snapshot(&snapshot, now());
            if durability == Durability::Durable {
                let requests = snapshot.requests.len();
                info!(requests, "the journal can be written again; a snapshot is on disk");
                self.lost_keys.clear();
            }
            self.tell(durability);
            // Some of them have ended.
            self.expire_at.get_or_insert_with(Instant::now);
        }
    }

    fn expire_every(&self) -> Duration {
        let (least, most) = EXPIRE_EVERY;
        Duration::from_secs(self.retention.seconds / 10).clamp(least, most)
    }

    fn sync(&mut self) {
        if let Err(error) = self.writer.db().sync() {
            warn!(%error, "the journal's last second is not on disk");
        }
    }

    fn tell(&self, durability: Durability) {
        self.durability.send_if_modified(|told| {
            let changed = *told != durability;
            *told = durability;
            changed
        });
    }
}

fn now() -> Now {
    Now { instant: Instant::now(), unix: unix() }
}

/// Seconds since 1970.
pub fn unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}
