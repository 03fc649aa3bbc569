//! The connection to the daemon.
//!
//! **Owns** the socket, open questions, and the logs that are attached. **Never** knows HTTP, and never keeps a request alive
//! that nobody wants: a [`Reader`] that goes away cancels or detaches what it read.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use pagedd_core::RequestId;
use pagedd_wire::gateway::{
    Answer, Delivery, Entry, Parting, Query, Rates, Refusal, ToDaemon, ToGateway, Welcome,
};
use pagedd_wire::{FrameBuffer, FrameError, PROTOCOL, encode};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{oneshot, watch};
use tracing::{debug, error, info};

use crate::log::{Attached, Gap, Log, Mark};
use crate::outbox::{Outbox, OutboxFull};
use crate::point::point;

/// Questions that may be open at once.
const MAX_QUESTIONS: usize = 4096;
/// Bytes read from the socket at once.
const READ: usize = 16 << 10;
/// Entries that a reader is given at once.
const BATCH: usize = 256;

/// Whether this process takes requests.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Phase {
    /// It does, unless the daemon says otherwise.
    Serving,
    /// It ends: open streams say so and close.
    Ending,
}

/// The way to the daemon, shared by all connections.
#[derive(Debug)]
pub struct Link {
    outbox: Outbox,
    tickets: AtomicU64,
    questions: Mutex<HashMap<u64, Question>>,
    logs: Mutex<HashMap<RequestId, OpenLog>>,
    welcome: watch::Sender<Option<Arc<Welcome>>>,
    phase: watch::Sender<Phase>,
    /// Why this process ends, once it does.
    parting: Mutex<Parting>,
}

#[derive(Debug)]
enum Question {
    Submit(oneshot::Sender<Result<Taken, Refusal>>),
    Query(oneshot::Sender<Answer>),
}

/// A request that the daemon took.
#[derive(Debug)]
pub struct Taken {
    /// Its log. It is cancelled with its reader, unless it is a repeated one.
    pub reader: Reader,
    /// It is an earlier request with the same `Idempotency-Key`; the reader only looks on, until the client is known to be the
    /// one that made it.
    pub repeated: bool,
    /// How the tenant's quotas stand, this request included.
    pub rates: Rates,
}

/// A log and its readers.
#[derive(Debug)]
struct OpenLog {
    log: Arc<Log>,
    /// Readers of any role.
    readers: u32,
    /// Readers on whose behalf the request is computed.
    owners: u32,
    cancelled: bool,
    /// Somebody had all of it, or gave up on it.
    done: bool,
}

impl OpenLog {
    /// The daemon has not said that it ended, or that there is none.
    fn is_running(&self) -> bool {
        matches!(self.log.mark(), Mark::Asked | Mark::Open { .. })
    }
}

/// On whose behalf a log is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Role {
    /// Somebody who only looks.
    Observer,
    /// The client. When the last one leaves, the request ends, unless it is resumable.
    Owner { resumable: bool },
}

impl Link {
    /// A link that is not connected yet.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::new(Self {
            outbox: Outbox::default(),
            tickets: AtomicU64::new(1),
            questions: Mutex::default(),
            logs: Mutex::default(),
            welcome: watch::Sender::new(None),
            phase: watch::Sender::new(Phase::Serving),
            parting: Mutex::default(),
        })
    }

    /// Speaks to the daemon until it closes the connection, or says to end; then the phase is [`Phase::Ending`].
    pub async fn run(self: Arc<Self>, socket: UnixStream) {
        let (reader, writer) = socket.into_split();
        if let Err(error) = self.outbox.tell(&ToDaemon::Hello { protocol: PROTOCOL }) {
            error!(%error, "the greeting cannot be encoded");
        }
        let reading = self.read(reader);
        let writing = self.write(writer);
        tokio::select! {
            result = reading => if let Err(error) = result {
                error!(%error, "the daemon sent what is no frame");
            },
            () = writing => {}
        }
        self.phase.send_replace(Phase::Ending);
    }

    async fn write(&self, mut writer: OwnedWriteHalf) {
        loop {
            for frame in self.outbox.take().await {
                if let Err(error) = writer.write_all(&frame).await {
                    info!(%error, "the daemon is gone");
                    return;
                }
            }
        }
    }

    async fn read(self: &Arc<Self>, mut reader: OwnedReadHalf) -> Result<(), FrameError> {
        let mut buffer = FrameBuffer::new();
        let mut scratch = vec![0; READ];
        loop {
            match reader.read(&mut scratch).await {
                Ok(0) => {
                    info!("the daemon closed the connection");
                    return Ok(());
                }
                Ok(read) => buffer.push(&scratch[..read]),
                Err(error) => {
                    info!(%error, "the daemon is gone");
                    return Ok(());
                }
            }
            while let Some(frame) = buffer.next_frame::<ToGateway>()? {
                self.obey(frame);
            }
        }
    }

    fn obey(self: &Arc<Self>, frame: ToGateway) {
        match frame {
            ToGateway::Welcome(welcome) => {
                self.welcome.send_replace(Some(Arc::from(welcome)));
            }
            ToGateway::Accepted { ticket, request, repeated, rates } => {
                point("gateway-accepted");
                self.accepted(ticket, RequestId(request), repeated, rates);
            }
            ToGateway::Refused { ticket, refusal } => {
                if let Some(Question::Submit(answer)) = self.answered(ticket) {
                    // A client that left does not want its answer.
                    drop(answer.send(Err(refusal)));
                }
            }
            ToGateway::Attached { request, key, context, prompt_tokens, created, n, entries, held } => {
                point("gateway-attached");
                if let Some(log) = self.log(RequestId(request)) {
                    let attached = Attached { key, context, prompt_tokens, created, n, entries, held };
                    log.set_attached(attached);
                }
            }
            ToGateway::NotFound { request } => {
                if let Some(log) = self.log(RequestId(request)) {
                    log.set_not_found();
                }
            }
            ToGateway::Entries(deliveries) => {
                point("gateway-entries");
                for Delivery { request, from, entries } in deliveries {
                    let Some(log) = self.log(RequestId(request)) else { continue };
                    if let Err(Gap { from }) = log.append(from, entries) {
                        self.tell(&ToDaemon::Attach { request, from });
                    }
                }
            }
            ToGateway::Answer { ticket, answer } => {
                if let Some(Question::Query(sender)) = self.answered(ticket) {
                    drop(sender.send(answer));
                }
            }
            ToGateway::Parting(parting) => *lock(&self.parting) = parting,
            ToGateway::Shutdown => {
                self.phase.send_replace(Phase::Ending);
            }
        }
    }

    fn accepted(self: &Arc<Self>, ticket: u64, request: RequestId, repeated: bool, rates: Rates) {
        let Some(Question::Submit(answer)) = self.answered(ticket) else {
            // Nobody asked: nobody will read it. One that was there before is somebody else's.
            if !repeated {
                self.tell(&ToDaemon::Cancel { request: request.0 });
            }
            return;
        };
        let mut reader = self.open(request);
        if !repeated {
            // Not resumable yet: a client that leaves before it has seen the id cannot come back.
            reader.own(false);
        }
        if answer.send(Ok(Taken { reader, repeated, rates })).is_err() {
            debug!(%request, "the client left before its request was accepted");
        }
    }

    /// What the daemon last told; `None` before it told anything.
    #[must_use]
    pub fn welcome(&self) -> Option<Arc<Welcome>> {
        self.welcome.borrow().clone()
    }

    /// Returns once the daemon has told something.
    pub async fn welcomed(&self) {
        // The sender lives as long as this value.
        let _ = self.welcome.subscribe().wait_for(Option::is_some).await;
    }

    /// Tells of every change of the phase.
    #[must_use]
    pub fn phases(&self) -> watch::Receiver<Phase> {
        self.phase.subscribe()
    }

    /// Whether requests are taken.
    #[must_use]
    pub fn phase(&self) -> Phase {
        *self.phase.borrow()
    }

    /// Why this process ends, where it does.
    #[must_use]
    pub fn parting(&self) -> Parting {
        *lock(&self.parting)
    }

    /// A number for a question.
    #[must_use]
    pub fn ticket(&self) -> u64 {
        self.tickets.fetch_add(1, Ordering::Relaxed)
    }

    /// Sends an encoded `Submit` with this ticket. The receiver gets the request, or why there is none; it gets
    /// nothing where the connection ends before.
    ///
    /// # Errors
    /// [`OutboxFull`]: nothing was sent.
    pub fn submit(
        &self,
        ticket: u64,
        frame: Vec<u8>,
    ) -> Result<oneshot::Receiver<Result<Taken, Refusal>>, OutboxFull> {
        let (answer, receiver) = oneshot::channel();
        self.ask(ticket, Question::Submit(answer), frame)?;
        point("gateway-submit");
        Ok(receiver)
    }

    /// Asks the daemon.
    ///
    /// # Errors
    /// [`OutboxFull`]: nothing was sent.
    pub fn query(&self, query: Query) -> Result<oneshot::Receiver<Answer>, OutboxFull> {
        let ticket = self.ticket();
        let frame = encode(&ToDaemon::Query { ticket, query }).map_err(|_| OutboxFull)?;
        let (answer, receiver) = oneshot::channel();
        self.ask(ticket, Question::Query(answer), frame)?;
        Ok(receiver)
    }

    fn ask(&self, ticket: u64, question: Question, frame: Vec<u8>) -> Result<(), OutboxFull> {
        let mut questions = lock(&self.questions);
        if questions.len() >= MAX_QUESTIONS {
            // Queries whose asker gave up may never be answered. Submissions are: their request must be cancelled.
            questions.retain(|_, question| match question {
                Question::Submit(_) => true,
                Question::Query(answer) => !answer.is_closed(),
            });
            if questions.len() >= MAX_QUESTIONS {
                return Err(OutboxFull);
            }
        }
        self.outbox.ask(frame)?;
        questions.insert(ticket, question);
        Ok(())
    }

    fn answered(&self, ticket: u64) -> Option<Question> {
        lock(&self.questions).remove(&ticket)
    }

    fn log(&self, request: RequestId) -> Option<Arc<Log>> {
        lock(&self.logs).get(&request).map(|open| Arc::clone(&open.log))
    }

    /// A reader of a request's log from its first entry, as an observer.
    #[must_use]
    pub fn open(self: &Arc<Self>, request: RequestId) -> Reader {
        let mut logs = lock(&self.logs);
        let open = logs.entry(request).or_insert_with(|| {
            self.tell(&ToDaemon::Attach { request: request.0, from: 0 });
            OpenLog { log: Arc::new(Log::new(request)), readers: 0, owners: 0, cancelled: false, done: false }
        });
        open.readers += 1;
        let log = Arc::clone(&open.log);
        drop(logs);
        Reader {
            link: Arc::clone(self),
            marks: log.marks(),
            log,
            role: Role::Observer,
            position: 0,
            broken: false,
        }
    }

    fn own(&self, request: RequestId) {
        if let Some(open) = lock(&self.logs).get_mut(&request) {
            open.owners += 1;
        }
    }

    fn cancel(&self, request: RequestId) {
        if let Some(open) = lock(&self.logs).get_mut(&request)
            && !open.cancelled
            && open.is_running()
        {
            open.cancelled = true;
            point("gateway-cancel");
            self.tell(&ToDaemon::Cancel { request: request.0 });
        }
    }

    /// A reader goes. At the end of this process it goes without a word: the request runs on, and its client may come back.
    fn leave(&self, request: RequestId, role: Role, at_end: bool) {
        let mut logs = lock(&self.logs);
        let Some(open) = logs.get_mut(&request) else { return };
        open.readers -= 1;
        open.done |= at_end;
        let speaks = self.phase() != Phase::Ending;
        if let Role::Owner { resumable } = role {
            open.owners -= 1;
            if open.owners == 0 && !resumable {
                open.done = true;
                if speaks && open.is_running() && !open.cancelled {
                    open.cancelled = true;
                    self.tell(&ToDaemon::Cancel { request: request.0 });
                }
            }
        }
        if open.readers == 0 {
            if speaks && open.log.mark() != Mark::NotFound {
                self.tell(&ToDaemon::Detach { request: request.0, done: open.done || open.cancelled });
            }
            logs.remove(&request);
        }
    }

    fn tell(&self, message: &ToDaemon) {
        if let Err(error) = self.outbox.tell(message) {
            error!(%error, "a message to the daemon cannot be encoded");
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A reader of a request's log.
///
/// Having one tells you: the daemon sends this request's entries, and goes on until this reader and all others are dropped.
/// When the last one that [owns](Self::own) the request is dropped before its end, the request is cancelled.
#[derive(Debug)]
pub struct Reader {
    link: Arc<Link>,
    log: Arc<Log>,
    marks: watch::Receiver<Mark>,
    role: Role,
    position: u64,
    /// Its client does not have all that was read.
    broken: bool,
}

/// There is nothing (more) to read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Gone {
    /// The daemon knows no such request.
    NotFound,
    /// The connection to the daemon ends.
    Ending,
}

impl Reader {
    /// Whose log.
    #[must_use]
    pub fn request(&self) -> RequestId {
        self.log.id()
    }

    /// Entries read so far.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.position
    }

    /// From now on the request is computed on this reader's behalf.
    pub fn own(&mut self, resumable: bool) {
        if self.role == Role::Observer {
            self.link.own(self.log.id());
        }
        self.role = Role::Owner { resumable };
    }

    /// What the daemon said of the request.
    ///
    /// # Errors
    /// [`Gone`].
    pub async fn attached(&mut self) -> Result<Arc<Attached>, Gone> {
        loop {
            if let Some(attached) = self.log.attached() {
                return Ok(attached);
            }
            if *self.marks.borrow_and_update() == Mark::NotFound {
                return Err(Gone::NotFound);
            }
            self.changed().await?;
        }
    }

    /// The next entries, at least one and at most `limit`. Nothing is lost where this is not waited for.
    ///
    /// # Errors
    /// [`Gone`].
    pub async fn next(&mut self, limit: u64) -> Result<Vec<Entry>, Gone> {
        let limit = usize::try_from(limit).unwrap_or(usize::MAX).min(BATCH);
        loop {
            let mark = *self.marks.borrow_and_update();
            let entries = self.log.read(self.position, limit);
            if !entries.is_empty() {
                self.position += entries.len() as u64;
                return Ok(entries);
            }
            match mark {
                Mark::Ended { .. } | Mark::NotFound => return Err(Gone::NotFound),
                Mark::Asked | Mark::Open { .. } => {}
            }
            self.changed().await?;
        }
    }

    /// Waits for the log's end.
    ///
    /// # Errors
    /// [`Gone`].
    pub async fn ended(&mut self) -> Result<(), Gone> {
        loop {
            match *self.marks.borrow_and_update() {
                Mark::Ended { .. } => return Ok(()),
                Mark::NotFound => return Err(Gone::NotFound),
                Mark::Asked | Mark::Open { .. } => {}
            }
            self.changed().await?;
        }
    }

    /// Waits until the log has come further than when its mark was looked at last.
    async fn changed(&mut self) -> Result<(), Gone> {
        let mut phases = self.link.phases();
        tokio::select! {
            // What has come counts, also at the end: who is told to go on later is told from where.
            biased;
            changed = self.marks.changed() => changed.map_err(|_| Gone::Ending),
            _ = phases.wait_for(|phase| *phase == Phase::Ending) => Err(Gone::Ending),
        }
    }

    /// Whether every entry of a log that ended was read.
    #[must_use]
    pub fn is_at_end(&self) -> bool {
        matches!(self.log.mark(), Mark::Ended { entries } if entries == self.position)
    }

    /// The client does not have all that was read.
    pub fn broke_off(&mut self) {
        self.broken = true;
    }

    /// Entries that are known to exist: those here, and those the daemon had when it was asked.
    #[must_use]
    pub fn known(&self) -> u64 {
        let here = match self.log.mark() {
            Mark::Open { entries } | Mark::Ended { entries } => entries,
            Mark::Asked | Mark::NotFound => 0,
        };
        self.log.attached().map_or(here, |attached| attached.entries.max(here))
    }

    /// The request is to end, whoever reads it. Once is enough; of one that has ended it changes nothing.
    pub fn cancel(&self) {
        self.link.cancel(self.log.id());
    }

    /// A choice is complete before the engine knows.
    pub fn stop(&self, choice: u32) {
        if !matches!(self.log.mark(), Mark::Ended { .. }) {
            self.link.tell(&ToDaemon::Stop { request: self.log.id().0, choice });
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.link.leave(self.log.id(), self.role, self.is_at_end() && !self.broken);
    }
}

#[cfg(test)]
mod tests;
