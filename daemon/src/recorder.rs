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
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use fail::fail_point;
use pagedd_core::{RequestId, TenantId};
use pagedd_engine::{Command, EngineHandle, InboxFull, Placed, StepRecord};
use pagedd_journal::{
    Admission, DbError, Durability, Entry, Finish, Idempotency, JournalDb, JournalWriter, Kept, LedgerId,
    Now, Record, Step,
};
use pagedd_sched::AdmitError;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tracing::{error, info, warn};

use crate::convert;
use crate::fit::Misfit;
use crate::hub::{ConnectionId, Limits, Message, Ticket};
use crate::retention::Retentions;
use crate::usage::{self, Billing};

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
/// A daemon has ended so often before anything came of a request: it is not tried once more. The first two may be others' fault; then it is
/// tried alone.
const MOST_REPLAYS: u32 = 4;

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
    /// These requests are about to be admitted again.
    Replaying {
        /// Which.
        requests: Vec<RequestId>,
        /// Gets those that are still live, once it is on disk that they are admitted again.
        counted: oneshot::Sender<Vec<RequestId>>,
        /// Dropped once something came of all of them.
        proof: Arc<oneshot::Sender<()>>,
    },
    /// The engine has this one.
    Replayed(RequestId, Placed),
    /// The engine keeps this one, and does not run it.
    Held(RequestId),
    /// The tenant was removed: nothing of it is kept.
    Forget(TenantId),
    /// How long a tenant's requests are kept after their end; `None` is as long as others'.
    Retain(TenantId, Option<Duration>),
    /// How long requests are kept of tenants that have no time of their own, and those whose clients may come back.
    Limits(Limits),
    /// What requests used that have ended, as far as control.db is not known to have it: synced when it is answered, unless nothing is
    /// ever synced. The answer may say why
    /// it cannot be had.
    Bills(oneshot::Sender<Result<Billing, String>>),
    /// control.db has this journal's bills up to this one.
    Billed(LedgerId, i64),
    /// All that is committed is to be copied to this new file, at one moment; the answer says why it was not.
    Save(PathBuf, oneshot::Sender<Result<(), String>>),
    /// Nothing more comes; the answer comes once everything is on disk.
    Sync(oneshot::Sender<()>),
}

/// A claimed `Idempotency-Key`.
///
/// Having one tells you: as long as you keep it nobody else gets the key. With its last copy the claim is gone, unless a request was
/// admitted under it.
#[derive(Clone, Debug)]
pub struct Hold {
    _alive: Arc<()>,
}

/// What an `Idempotency-Key` says.
#[derive(Debug)]
pub enum Claim {
    /// Nobody had it: submit.
    New(Hold),
    /// This request was made with it, and with the same body.
    Made(RequestId),
    /// A request was made with it, and with another body.
    Conflict,
    /// A request with it is being admitted at this moment.
    Busy,
    /// The journal cannot be read.
    Unknown,
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
    /// Told when requests have ended: there are bills.
    pub billed: Arc<Notify>,
}

/// What a start finds in a journal.
pub struct Found {
    /// Live requests, in the order of their admission.
    pub live: Vec<Kept>,
    /// How many were set aside: they go no further.
    pub set_aside: u64,
}

/// The live requests of a journal. One with which daemons end again and again is set aside: it fails. So is one that is damaged: it goes
/// when its time is over. Those of tenants that are not known are left where they are. What cannot be written is done by the next start.
///
/// # Errors
/// The journal cannot be read.
pub fn live(db: &mut JournalDb, tenants: &[TenantId]) -> Result<Found, DbError> {
    let (mut live, mut aside, mut damaged) = (Vec::new(), Vec::new(), Vec::new());
    db.replay_live(|kept| match kept {
        Ok(kept) if !tenants.contains(&kept.admission.tenant) => {}
        Ok(kept) if kept.replays >= MOST_REPLAYS => aside.push(kept.admission.request),
        Ok(kept) => live.push(kept),
        Err(damage) if !tenants.contains(&damage.tenant) => {}
        Err(damage) => damaged.push(damage),
    })?;
    let set_aside = (aside.len() + damaged.len()) as u64;
    for request in aside {
        error!(%request, "daemons end with this request again and again; it is set aside");
        if let Err(error) = db.set_aside(request, unix()) {
            warn!(%request, %error, "its client is not told before it can be written");
        }
    }
    for damage in damaged {
        let request = damage.request;
        error!(%request, tenant = %damage.tenant, error = %damage.error, "an accepted request is damaged; it is set aside");
        if let Err(error) = db.give_up(request, unix()) {
            warn!(%request, %error, "it stays until the next start");
        }
    }
    Ok(Found { live, set_aside })
}

/// Starts the thread. It ends with the last sender.
///
/// # Errors
/// The system refuses a thread.
pub fn start(
    writer: JournalWriter,
    retention: Retentions,
    hub: mpsc::Sender<Message>,
) -> io::Result<Recorder> {
    let (inbox, told) = mpsc::channel(INBOX);
    let (lookups, asked) = mpsc::channel(LOOKUPS);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build()?;
    let (sender, durability) = watch::channel(writer.durability());
    let grace = retention.grace();
    let billed = Arc::new(Notify::new());
    // An earlier daemon may have left some.
    billed.notify_one();
    let work = Work {
        billed: billed.clone(),
        billed_through: None,
        writer,
        hub,
        durability: sender,
        retention,
        expire_at: Some(Instant::now()),
        holds_cache: true,
        // What an earlier daemon left is kept for those who come back now.
        expire_from: Instant::now() + grace,
        claims: HashMap::new(),
        lost_keys: HashMap::new(),
        unproven: HashMap::new(),
        proven: Vec::new(),
    };
    thread::Builder::new()
        .name("journal".to_owned())
        .spawn(move || runtime.block_on(work.run(told, asked)))?;
    Ok(Recorder { inbox, lookups, durability, billed })
}

/// Admits requests of an earlier daemon again. Those with which a daemon ended before their next token come before all others, and alone
/// where it was more than one: where that ends this daemon too, the journal knows at which.
pub async fn readmit(restored: Vec<Kept>, engine: EngineHandle<Box<Ticket>>, recorder: mpsc::Sender<Told>) {
    let count = restored.len();
    let (suspects, others): (Vec<Kept>, Vec<Kept>) = restored.into_iter().partition(|kept| kept.replays > 0);
    let (again, mut once): (Vec<Kept>, Vec<Kept>) = suspects.into_iter().partition(|kept| kept.replays > 1);
    for suspect in again {
        let request = suspect.admission.request;
        info!(%request, "daemons ended with this request; it is tried alone");
        let Some(proven) = hand_over(vec![suspect], &engine, &recorder).await else { return };
        drop(proven.await);
    }
    // Where a queue was under way all of it is under suspicion, and must not wait for one another for long. Of a group with which a daemon
    // ends each is tried alone by the next.
    let mut group = 1;
    while !once.is_empty() {
        let later = once.split_off(group.min(once.len()));
        info!(requests = once.len(), "a daemon ended with these; they are tried before others");
        let Some(proven) = hand_over(once, &engine, &recorder).await else { return };
        drop(proven.await);
        (once, group) = (later, group * 2);
    }
    if hand_over(others, &engine, &recorder).await.is_some() && count > 0 {
        info!(requests = count, "requests of an earlier daemon go on");
    }
}

/// Gives requests to their engine, counted. What is returned resolves once something came of each of them, or they wait for something
/// else than a step; `None` where the recorder or the engine is gone, and with it the daemon.
async fn hand_over(
    restored: Vec<Kept>,
    engine: &EngineHandle<Box<Ticket>>,
    recorder: &mpsc::Sender<Told>,
) -> Option<oneshot::Receiver<()>> {
    let (proof, proven) = oneshot::channel();
    if restored.is_empty() {
        return Some(proven);
    }
    let counted =
        count(restored.iter().map(|kept| kept.admission.request).collect(), proof, recorder).await?;
    let mut taken = Vec::with_capacity(counted.len());
    for kept in restored.into_iter().filter(|kept| counted.contains(&kept.admission.request)) {
        readmit_point(&kept);
        let (placed, answer) = oneshot::channel();
        let reply = Box::new(move |place| _ = placed.send(place));
        put(engine, Command::Restore { restored: Box::new(convert::restored(&kept)), reply }).await;
        taken.push((kept.admission.request, answer));
    }
    for (request, placed) in taken {
        let placed = placed.await.ok()?;
        recorder.send(Told::Replayed(request, placed)).await.ok()?;
    }
    Some(proven)
}

/// Has requests counted as about to be admitted again: those that are still live. `proof` goes once something came of all of them.
async fn count(
    requests: Vec<RequestId>,
    proof: oneshot::Sender<()>,
    recorder: &mpsc::Sender<Told>,
) -> Option<BTreeSet<RequestId>> {
    let (counted, answer) = oneshot::channel();
    recorder.send(Told::Replaying { requests, counted, proof: Arc::new(proof) }).await.ok()?;
    Some(answer.await.ok()?.into_iter().collect())
}

/// Puts a command into an engine's inbox once there is room.
async fn put(engine: &EngineHandle<Box<Ticket>>, mut command: Command<Box<Ticket>>) {
    while let Err((InboxFull, back)) = engine.send(command) {
        command = back;
        tokio::time::sleep(INBOX_RETRY).await;
    }
}

/// Gives an engine requests that are too large for it, to be kept, unless their tenant was removed meanwhile: they go on
/// with a daemon whose model has room for them.
pub async fn hold(
    misfits: Vec<(Kept, Misfit)>,
    engine: &EngineHandle<Box<Ticket>>,
    recorder: &mpsc::Sender<Told>,
) {
    if misfits.is_empty() {
        return;
    }
    let requests = misfits.iter().map(|(kept, _)| kept.admission.request).collect();
    // Nobody waits for a proof: none of them runs.
    let Some(counted) = count(requests, oneshot::channel().0, recorder).await else { return };
    for (kept, misfit) in misfits {
        let request = kept.admission.request;
        if !counted.contains(&request) {
            continue;
        }
        warn!(
            %request,
            reason = %misfit,
            "an accepted request waits: it goes on at a start at which there is room for it again"
        );
        put(engine, Command::Hold(Box::new(convert::restored(&kept)))).await;
        drop(recorder.send(Told::Held(request)).await);
    }
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

/// Whose `Idempotency-Key`, and its digest.
type Key = (TenantId, [u8; 32]);

struct Work {
    writer: JournalWriter,
    hub: mpsc::Sender<Message>,
    durability: watch::Sender<Durability>,
    retention: Retentions,
    /// When something may be kept no longer.
    expire_at: Option<Instant>,
    /// Something was done since memory was last given back.
    holds_cache: bool,
    /// Only what the hub names is deleted before.
    expire_from: Instant,
    /// Idempotency keys whose requests are being admitted, with digests of their bodies, as long as somebody holds them.
    claims: HashMap<Key, ([u8; 32], Weak<()>)>,
    /// Those of requests that were admitted and could not be written.
    lost_keys: HashMap<Key, (RequestId, [u8; 32])>,
    /// Told when requests have ended.
    billed: Arc<Notify>,
    /// Up to which of whose bills control.db is known to have them.
    billed_through: Option<(LedgerId, i64)>,
    /// Requests that were admitted again and of which nothing came yet; who waits for that has the other end.
    unproven: HashMap<RequestId, Arc<oneshot::Sender<()>>>,
    /// Those of which something is about to be committed.
    proven: Vec<(RequestId, Arc<oneshot::Sender<()>>)>,
}

impl Work {
    async fn run(mut self, mut inbox: mpsc::Receiver<Told>, mut lookups: mpsc::Receiver<Lookup>) {
        let mut batch = Vec::new();
        loop {
            self.tidy().await;
            let wake = self.wakes_at();
            let sleep = tokio::time::sleep_until(wake.unwrap_or_else(Instant::now).into());
            // Tokens first, but one lookup after each batch: a tenant that looks up much holds up nobody, and waits not for ever.
            tokio::select! {
                biased;
                received = inbox.recv_many(&mut batch, BATCH) => {
                    if received == 0 {
                        break;
                    }
                    self.take(batch.drain(..)).await;
                    self.holds_cache = true;
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
                    let Ticket {
                        connection,
                        tenant,
                        model,
                        number,
                        idempotency,
                        grant,
                        model_digest,
                        saved,
                        ..
                    } = *ticket;
                    let admission = Admission { request, tenant, idempotency, model_digest, saved };
                    let (admission, spending) = (Arc::new(admission), grant.accepted());
                    records.push(Record::Admission(admission.clone()));
                    messages.push(Message::Admitted { admission, model, connection, number, spending });
                }
                Told::Step(step) => {
                    let saved = convert::step(&step);
                    self.commit_point(&saved);
                    self.prove(&saved);
                    if !saved.entries.is_empty() || !saved.started.is_empty() {
                        records.push(Record::Step(saved));
                    }
                    if step.finished.iter().any(|finished| finished.ended.is_some()) {
                        let at = Instant::now() + self.expire_every();
                        self.expire_at.get_or_insert(at);
                        self.billed.notify_one();
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
            self.clear_proven();
        }
        for message in messages.drain(..) {
            // The hub ends only with the daemon.
            drop(self.hub.send(message).await);
        }
    }

    /// Each life of a request has to bring it on: only what is committed of it shows that.
    fn prove(&mut self, step: &Step) {
        if self.unproven.is_empty() {
            return;
        }
        for (request, _) in &step.entries {
            self.proven.extend(self.unproven.remove(request).map(|proof| (*request, proof)));
        }
    }

    /// What does not run is not to blame for what happens meanwhile: it waits for a share, or is too large for its model.
    fn acquit(&mut self, request: RequestId) {
        self.proven.extend(self.unproven.remove(&request).map(|proof| (request, proof)));
        self.clear_proven();
    }

    /// Something of these is committed: whatever ends the daemon from here on, it is not to do with their return.
    fn clear_proven(&mut self) {
        if self.proven.is_empty() {
            return;
        }
        let requests: Vec<RequestId> = self.proven.iter().map(|(request, _)| *request).collect();
        if let Err(error) = self.writer.db().clear_replays(&requests) {
            warn!(requests = requests.len(), %error, "it is not on disk that requests of an earlier daemon go on");
        }
        self.proven.clear();
    }

    /// In test builds the fail point `commit` ends the daemon before anything more is committed of a request that has 40 entries and
    /// whose prompt begins with the token that it returns.
    fn commit_point(&mut self, step: &Step) {
        fail_point!("commit", |token: Option<String>| {
            let token = token.and_then(|token| token.parse().ok());
            for (request, _) in &step.entries {
                if let Ok(Some(kept)) = self.writer.db().request(*request)
                    && kept.entries.len() >= 40
                    && kept.admission.saved.prompt.first().copied() == token
                {
                    std::process::abort();
                }
            }
        });
        // Without fail points it has no use.
        let _ = (&self.writer, step);
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
            // An answer that nobody waits for is dropped, and a claim with it.
            Told::Claim { tenant, idempotency, answer } => {
                let claim = self.claim(tenant, idempotency);
                fail_point!("before-claim-is-told");
                drop(answer.send(claim));
            }
            Told::Replaying { requests, counted, proof } => {
                let live = self.writer.db().count_replay(&requests).unwrap_or_else(|error| {
                    warn!(%error, "it is not on disk that requests of an earlier daemon are admitted again");
                    requests
                });
                self.unproven.extend(live.iter().map(|request| (*request, proof.clone())));
                fail_point!("before-readmission");
                _ = counted.send(live);
            }
            Told::Replayed(request, placed) => {
                if placed == Placed::Waits {
                    self.acquit(request);
                }
                fail_point!("after-readmission");
                drop(self.hub.send(Message::Readmitted(request)).await);
            }
            Told::Held(request) => {
                self.acquit(request);
                drop(self.hub.send(Message::Held(request)).await);
            }
            Told::Forget(tenant) => {
                if let Err(error) = self.writer.db().delete_tenant(tenant, unix()) {
                    warn!(%tenant, %error, "requests of a removed tenant stay until the next start");
                }
                self.billed.notify_one();
                self.claims.retain(|(of, _), _| *of != tenant);
                self.lost_keys.retain(|(of, _), _| *of != tenant);
                self.retention.set(tenant, None);
                drop(self.hub.send(Message::Forget(tenant)).await);
            }
            Told::Retain(tenant, own) => {
                self.retention.set(tenant, own);
                let soon = Instant::now() + self.expire_every();
                self.expire_at = self.expire_at.map(|at| at.min(soon));
                drop(self.hub.send(Message::Retain(tenant, own)).await);
            }
            Told::Limits(limits) => {
                self.retention.configure(limits.retention, limits.reattach_grace);
                let soon = Instant::now() + self.expire_every();
                self.expire_at = self.expire_at.map(|at| at.min(soon));
                drop(self.hub.send(Message::Limits(limits)).await);
            }
            Told::Bills(answer) => {
                // Who asked may have given up.
                drop(answer.send(self.bills().map_err(|error| error.to_string())));
            }
            Told::Billed(journal, through) => {
                self.billed_through = Some((journal, through));
                let before = unix().saturating_sub(usage::KEPT_S);
                let is_own = self.writer.db().ledger().is_ok_and(|own| own == journal);
                if is_own && let Err(error) = self.writer.db().forget_bills(through, before) {
                    warn!(%error, "bills that control.db has stay in the journal for now");
                }
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
                // An end in good order is nobody's fault.
                let unproven: Vec<RequestId> = self.unproven.drain().map(|(request, _)| request).collect();
                if let Err(error) = self.writer.db().clear_replays(&unproven) {
                    warn!(%error, "requests that wait may be tried one by one at the next start");
                }
                self.sync();
                _ = answer.send(());
            }
        }
    }

    /// What control.db is not known to have.
    fn bills(&mut self) -> Result<Billing, DbError> {
        let db = self.writer.db();
        // What is added there is to have happened here, whatever ends the host.
        db.sync()?;
        let journal = db.ledger()?;
        let after = self.billed_through.filter(|(of, _)| *of == journal).map_or(0, |(_, through)| through);
        Ok(Billing { journal, bills: db.bills(after, usage::AT_ONCE)? })
    }

    fn claim(&mut self, tenant: TenantId, Idempotency { key, body }: Idempotency) -> Claim {
        let compare = |made: (RequestId, [u8; 32])| {
            if made.1 == body { Claim::Made(made.0) } else { Claim::Conflict }
        };
        self.claims.retain(|_, (_, hold)| hold.strong_count() > 0);
        if let Some((claimed, _)) = self.claims.get(&(tenant, key)) {
            return if *claimed == body { Claim::Busy } else { Claim::Conflict };
        }
        if let Some(made) = self.lost_keys.get(&(tenant, key)) {
            return compare(*made);
        }
        match self.writer.db().by_idempotency_key(tenant, &key) {
            Ok(Some(made)) if !self.cancelled(made.0) => compare(made),
            Ok(_) => {
                let hold = Arc::new(());
                self.claims.insert((tenant, key), (body, Arc::downgrade(&hold)));
                Claim::New(Hold { _alive: hold })
            }
            Err(error) => {
                warn!(%tenant, %error, "an idempotency key cannot be looked up");
                Claim::Unknown
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
        fail_point!("before-lookup-is-told");
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
            let (answer, spent) = oneshot::channel();
            drop(self.hub.send(Message::Spent(answer)).await);
            self.writer.delete_ended(&spent.await.unwrap_or_default(), now());
            let due = Instant::now() >= self.expire_from;
            let expire = || self.writer.expire(&self.retention.of_journal(), now());
            let expired = due.then(expire).unwrap_or_default();
            let keeps = self.writer.db().keeps_ended().unwrap_or(true);
            let wait = if expired.more { Duration::ZERO } else { self.expire_every() };
            self.expire_at = keeps.then(|| Instant::now() + wait);
        }
        // Nothing is kept, and nothing is to be done any more.
        if self.holds_cache && self.wakes_at().is_none() {
            self.holds_cache = false;
            if let Err(error) = self.writer.db().release_memory() {
                warn!(%error, "the journal keeps its cache");
            }
            pagedd_host::memory::give_back();
        }
    }

    /// When there is something to be done although nothing comes, if ever.
    fn wakes_at(&self) -> Option<Instant> {
        self.writer.wakes_at().into_iter().chain(self.expire_at).min()
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
        (self.retention.shortest() / 10).clamp(least, most)
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

/// The time, for the journal.
pub fn now() -> Now {
    Now { instant: Instant::now(), unix: unix() }
}

/// Seconds since 1970.
pub fn unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests;
