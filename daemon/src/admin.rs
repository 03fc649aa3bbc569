//! The admin socket: who may speak, and one line in, one line out.
//!
//! **Owns** the listening unix socket. **Never** changes anything itself: commands go to the [`crate::daemon`] task, one after
//! the other.

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener as StdListener;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pagedd_control::{Command, ControlError, ErrorCode, MAX_REQUEST_LINE, Response, decode_request, encode};
use pagedd_host::fdstore::FdStore;
use pagedd_host::net::is_answered;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tracing::{info, warn};

use crate::daemon::Event;

/// Open admin connections. Where there are more, the one whose client has been waited for the longest is closed.
const CONNECTIONS: usize = 64;
/// A connection whose client says nothing, or reads nothing, for this long is closed.
const IDLE: Duration = Duration::from_mins(5);
/// How long a dead daemon's child may take to execute its program.
const EXEC: Duration = Duration::from_secs(1);
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(5);

/// A command and where its answer goes.
pub struct Order {
    /// What to do.
    pub command: Command,
    /// Dropped unanswered only if the daemon ends.
    pub answer: oneshot::Sender<Response>,
}

/// What the service manager calls the socket that it listens on in the daemon's place.
const SOCKET: &str = "admin";

/// The listening socket.
pub struct AdminSocket {
    listener: UnixListener,
    path: PathBuf,
    /// Whether its file goes with it: one of the service manager's stays.
    ours: bool,
}

impl AdminSocket {
    /// The socket that the service manager listens on, or else one that is bound to `path`.
    ///
    /// # Errors
    /// What the manager passed is no such socket; or as [`bind`](Self::bind).
    pub fn open(store: &FdStore, path: &Path) -> io::Result<Self> {
        let Some(passed) = store.take_socket(SOCKET) else { return Self::bind(path) };
        let listener = StdListener::from(passed);
        let address = listener.local_addr()?;
        let Some(bound) = address.as_pathname().map(Path::to_owned) else {
            return Err(io::Error::other(
                "the service manager's socket `admin` has no path: give its unit a ListenStream= with one",
            ));
        };
        if bound != path {
            info!(socket = %bound.display(), admin_socket = %path.display(), "the service manager's admin socket goes before the configured one");
        }
        listener.set_nonblocking(true)?;
        Ok(Self { listener: UnixListener::from_std(listener)?, path: bound, ours: false })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Binds the socket, replacing one that an earlier daemon left and on which nobody answers.
    ///
    /// # Errors
    /// Another daemon answers on it, something else has its path, or the file system refuses.
    pub fn bind(path: &Path) -> io::Result<Self> {
        clear(path)?;
        let listener = UnixListener::bind(path)?;
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o660))?;
        Ok(Self { listener, path: path.to_owned(), ours: true })
    }

    /// Serves until `events`, which takes the orders, is closed.
    pub async fn run(self, events: mpsc::Sender<Event>) {
        let places = Arc::new(Semaphore::new(CONNECTIONS));
        let waiting = Arc::new(Waiting::default());
        let ours = self.ours;
        loop {
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                () = events.closed() => return,
            };
            match accepted {
                Ok((stream, _)) => {
                    let place = tokio::select! {
                        place = waiting.place(&places) => place,
                        () = events.closed() => return,
                    };
                    let (events, waiting) = (events.clone(), Arc::clone(&waiting));
                    tokio::spawn(async move {
                        // Who may connect to the manager's is said by its unit.
                        let refusal = if ours { allowed(&stream).err() } else { None };
                        if let Err(error) = serve(stream, refusal, &events, &waiting).await {
                            info!(%error, "admin connection");
                        }
                        drop(place);
                    });
                }
                Err(error) => {
                    warn!(%error, "admin socket");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }
}

/// Connections that wait for their clients, the one that has waited the longest first.
#[derive(Default)]
struct Waiting {
    turns: Mutex<Turns>,
    /// That another waits.
    entered: Notify,
}

#[derive(Default)]
struct Turns {
    next: u64,
    all: BTreeMap<u64, Arc<Notify>>,
}

impl Waiting {
    /// What a client has to do with, for [`IDLE`] at most.
    ///
    /// # Errors
    /// It failed or took too long, or another client needs the place.
    async fn client<T>(&self, does: impl Future<Output = io::Result<T>>) -> io::Result<T> {
        let leave = Arc::new(Notify::new());
        let turn = self.enter(&leave);
        let done = tokio::select! {
            done = tokio::time::timeout(IDLE, does) => done,
            () = leave.notified() => Ok(Err(io::ErrorKind::TimedOut.into())),
        };
        let late = |why| Err(io::Error::new(io::ErrorKind::TimedOut, why));
        // Whoever took the turn away counts on the place.
        if self.turns().all.remove(&turn).is_none() {
            return late(
                "closed for another: all places were taken, and this client had been waited for the longest",
            );
        }
        done.unwrap_or_else(|_| late("closed: its client was waited for in vain"))
    }

    fn turns(&self) -> MutexGuard<'_, Turns> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self, leave: &Arc<Notify>) -> u64 {
        let mut turns = self.turns();
        let turn = turns.next;
        turns.next += 1;
        turns.all.insert(turn, Arc::clone(leave));
        drop(turns);
        self.entered.notify_one();
        turn
    }

    /// Has the connection end that has waited the longest; false where none waits.
    fn end_longest(&self) -> bool {
        let longest = self.turns().all.pop_first();
        longest.is_some_and(|(_, leave)| {
            leave.notify_one();
            true
        })
    }

    /// A place, somebody's who waits where there is no other; `None` never comes as long as there are places at all.
    async fn place(&self, places: &Arc<Semaphore>) -> Option<OwnedSemaphorePermit> {
        let mut place = pin!(Arc::clone(places).acquire_owned());
        let mut asked = places.available_permits() > 0;
        loop {
            asked = asked || self.end_longest();
            tokio::select! {
                place = &mut place => return place.ok(),
                () = self.entered.notified(), if !asked => {}
            }
        }
    }
}

/// Removes the socket that an earlier daemon left. A child of it between fork and exec has it open for that moment.
fn clear(path: &Path) -> io::Result<()> {
    let until = Instant::now() + EXEC;
    loop {
        let found = match std::fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            found => found?,
        };
        if !found.file_type().is_socket() {
            let message = "there is a file that is no socket: remove it, or set another `admin_socket`";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, message));
        }
        if is_gone(path)? {
            return Ok(());
        }
        if Instant::now() >= until {
            let message = "another pagedd answers on it: stop it, or set another `admin_socket`";
            return Err(io::Error::new(io::ErrorKind::AddrInUse, message));
        }
        std::thread::sleep(PAUSE);
    }
}

/// Removes a socket on which nobody answers; false where somebody does.
fn is_gone(path: &Path) -> io::Result<bool> {
    let gone = match is_answered(path) {
        Ok(true) => return Ok(false),
        Ok(false) => std::fs::remove_file(path),
        Err(error) => Err(error),
    };
    match gone {
        // Whoever left it has removed it meanwhile.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        gone => gone.map(|()| true),
    }
}

impl Drop for AdminSocket {
    fn drop(&mut self) {
        if self.ours
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            warn!(%error, path = %self.path.display(), "admin socket's file stays");
        }
    }
}

async fn serve(
    stream: UnixStream,
    refusal: Option<ControlError>,
    events: &mpsc::Sender<Event>,
    waiting: &Waiting,
) -> io::Result<()> {
    let (reader, mut writer) = stream.into_split();
    let mut reader = BufReader::new(reader);
    let mut line = Vec::new();
    loop {
        line.clear();
        let mut limited = (&mut reader).take(MAX_REQUEST_LINE as u64);
        if waiting.client(limited.read_until(b'\n', &mut line)).await? == 0 {
            return Ok(());
        }
        let whole = line.last() == Some(&b'\n');
        let response = if let Some(refusal) = &refusal {
            Response::Err(refusal.clone())
        } else if whole {
            answer(&line, events).await
        } else {
            let message = format!("a request of more than {MAX_REQUEST_LINE} bytes, or cut off");
            Response::Err(ControlError::new(ErrorCode::InvalidRequest, message))
        };
        let response = encode(&response)?;
        waiting.client(writer.write_all(&response)).await?;
        if !whole {
            return Ok(());
        }
    }
}

async fn answer(line: &[u8], events: &mpsc::Sender<Event>) -> Response {
    let command = match decode_request(line) {
        Ok(command) => command,
        Err(error) => return Response::Err(error),
    };
    let ending = || Response::Err(ControlError::new(ErrorCode::Busy, "the daemon is going down"));
    let (answer, answered) = oneshot::channel();
    if events.send(Event::Order(Order { command, answer })).await.is_err() {
        return ending();
    }
    answered.await.unwrap_or_else(|_| ending())
}

/// Root and the daemon's own user may give orders on a socket that the daemon made. Its file mode lets in its group as well, which may be
/// anybody's; the peer's credentials decide.
fn allowed(stream: &UnixStream) -> Result<(), ControlError> {
    let not_allowed = |message: String| {
        ControlError::new(ErrorCode::NotAllowed, message)
            .remedy("run pagedctl as root or as the daemon's own user")
    };
    let peer = pagedd_host::peer::credentials(stream)
        .map_err(|e| not_allowed(format!("the peer's credentials cannot be read: {e}")))?;
    if peer.uid == 0 || peer.uid == pagedd_host::peer::own_uid() {
        Ok(())
    } else {
        Err(not_allowed(format!("user {} may not manage this daemon", peer.uid)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_a_socket_that_nobody_answers_is_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("admin.sock");
        let refused = || AdminSocket::bind(&path).err().map(|error| error.to_string()).unwrap_or_default();
        let first = AdminSocket::bind(&path).expect("nobody has it");
        assert!(refused().starts_with("another pagedd answers on it"), "{}", refused());
        assert!(is_answered(&path).expect("the first has it still"));
        drop(first);
        drop(std::os::unix::net::UnixListener::bind(&path).expect("left behind"));
        drop(AdminSocket::bind(&path).expect("nobody answers"));
        std::fs::write(&path, "text").expect("a file");
        assert!(refused().starts_with("there is a file that is no socket"), "{}", refused());
    }

    #[tokio::test]
    async fn silent_and_deaf_clients_keep_nobody_out() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("admin.sock");
        let (events, mut orders) = mpsc::channel(1);
        let socket = AdminSocket::bind(&path).expect("nobody has it");
        tokio::spawn(socket.run(events));
        let mut silent = Vec::new();
        for index in 0..3 * CONNECTIONS {
            let mut stream = UnixStream::connect(&path).await.expect("it is let in");
            if index % 2 == 1 {
                // A part of a line.
                stream.write_all(b"{").await.expect("it is read");
            }
            silent.push(stream);
        }
        let asked = || async {
            let mut stream = UnixStream::connect(&path).await.expect("it is let in");
            stream.write_all(b"no command\n").await.expect("it is read");
            let mut answer = String::new();
            BufReader::new(&mut stream).read_line(&mut answer).await.expect("it is answered");
            answer
        };
        let answer = tokio::time::timeout(Duration::from_secs(30), asked()).await.expect("at once");
        assert!(answer.contains("invalid_request"), "{answer}");
        let mut byte = [0];
        assert_eq!(silent[0].read(&mut byte).await.expect("closed"), 0, "the first has waited the longest");
        let last = silent.last_mut().expect("some");
        let still_open = tokio::time::timeout(Duration::from_millis(100), last.read(&mut byte)).await;
        assert!(still_open.is_err(), "the last keeps its place");

        for _ in 0..CONNECTIONS {
            let mut deaf = UnixStream::connect(&path).await.expect("it is let in");
            // More answers than a socket holds.
            tokio::spawn(async move { deaf.write_all(&b"no command\n".repeat(1 << 14)).await });
        }
        let answer = tokio::time::timeout(Duration::from_secs(30), asked()).await.expect("at once");
        assert!(answer.contains("invalid_request"), "{answer}");
        assert!(orders.try_recv().is_err(), "nothing was ordered");
    }
}
