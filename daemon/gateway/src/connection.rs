//! One TCP connection of a client.
//!
//! **Owns** its time limits. **Never** lets a client that sends its head byte by byte keep the connection.
//!
//! Two timers: hyper's own, which runs from the end of one request to the end of the next head, is set to the idle limit; the
//! one here starts with a head's first byte.

use std::convert::Infallible;
use std::io;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use hyper::Request;
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::{Notify, watch};
use tokio::time::{Duration, Instant, sleep_until, timeout};
use tracing::debug;

use crate::app::{App, Standing};
use crate::body::Body;
use crate::link::Phase;

/// Bytes of a head, and of what is read or written at once.
const BUFFER: usize = 64 << 10;

/// Longest head of a connection that came before the daemon named a limit.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest pause of one. Longer than the usual 60 s of load balancers, which would otherwise meet a reset.
const IDLE_TIMEOUT: Duration = Duration::from_secs(90);
/// Both, of a connection that is one too many.
const BEYOND_TIMEOUT: Duration = Duration::from_secs(1);

/// How long a client that has just connected may take to begin its first request, once the gateway ends: it has been let in and must not be met
/// by a reset.
const FIRST_REQUEST: Duration = Duration::from_millis(500);

/// Serves one connection to its end.
pub async fn serve(app: Arc<App>, stream: TcpStream, standing: Standing) {
    // Tokens are small and must not wait for one another.
    if let Err(error) = stream.set_nodelay(true) {
        debug!(%error, "small packets may be delayed");
    }
    // Finds peers that vanished without a word; what they asked for would be computed to its end.
    if let Err(error) = rustix::net::sockopt::set_socket_keepalive(&stream, true) {
        debug!(%error, "a peer that vanishes is not noticed");
    }
    let (header_timeout, idle_timeout) = match (standing, app.link.welcome()) {
        (Standing::Within, Some(welcome)) => (
            Duration::from_millis(welcome.header_timeout_ms.into()),
            Duration::from_millis(welcome.idle_timeout_ms.into()),
        ),
        (Standing::Within, None) => (HEADER_TIMEOUT, IDLE_TIMEOUT),
        (Standing::Beyond, _) => (BEYOND_TIMEOUT, BEYOND_TIMEOUT),
    };
    let head = Arc::new(HeadTimer::new());
    let mut phases = app.link.phases();
    let service = service_fn(|request: Request<Incoming>| {
        let busy = Busy::new(&head);
        let app = Arc::clone(&app);
        async move {
            let response = app.handle(request, standing).await;
            Ok::<_, Infallible>(response.map(|body| Counted { body, _busy: busy }))
        }
    });
    let io = TokioIo::new(Timed { stream, head: Arc::clone(&head) });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(idle_timeout)
        .max_buf_size(BUFFER)
        .keep_alive(standing == Standing::Within)
        .serve_connection(io, service);
    let mut connection = pin!(connection);
    let mut late = pin!(head.late(header_timeout));
    let mut ends = pin!(async {
        // Its sender lives as long as this process.
        let _ = phases.wait_for(|phase| *phase == Phase::Ending).await;
        let _ = timeout(FIRST_REQUEST, head.begun()).await;
    });
    let mut ending = false;
    loop {
        tokio::select! {
            result = connection.as_mut() => {
                if let Err(error) = result {
                    debug!(%error, "connection ended");
                }
                return;
            }
            () = late.as_mut() => {
                debug!("a head did not arrive in time");
                return;
            }
            () = ends.as_mut(), if !ending => {
                ending = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}

/// When the head that is being read began.
#[derive(Debug)]
struct HeadTimer {
    state: Mutex<HeadState>,
    changed: Notify,
    /// The first byte of the first head has come.
    begun: watch::Sender<bool>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum HeadState {
    /// No request is being served or read.
    Idle,
    /// Its first byte came then.
    Reading(Instant),
    /// It is complete, and its request is being answered.
    Busy,
}

impl HeadTimer {
    /// The first head is due from the start.
    fn new() -> Self {
        let state = Mutex::new(HeadState::Reading(Instant::now()));
        Self { state, changed: Notify::new(), begun: watch::Sender::new(false) }
    }

    /// Returns once the client has begun its first request.
    async fn begun(&self) {
        // The sender is here.
        let _ = self.begun.subscribe().wait_for(|begun| *begun).await;
    }

    fn set(&self, next: impl FnOnce(HeadState) -> HeadState) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        *state = next(*state);
        drop(state);
        self.changed.notify_one();
    }

    /// Ends once a head has taken longer than `limit`.
    async fn late(&self, limit: Duration) {
        loop {
            let state = *self.state.lock().unwrap_or_else(PoisonError::into_inner);
            match state {
                HeadState::Idle | HeadState::Busy => self.changed.notified().await,
                HeadState::Reading(since) => {
                    sleep_until(since + limit).await;
                    if *self.state.lock().unwrap_or_else(PoisonError::into_inner) == state {
                        return;
                    }
                }
            }
        }
    }
}

/// A request is being answered.
struct Busy(Arc<HeadTimer>);

impl Busy {
    fn new(head: &Arc<HeadTimer>) -> Self {
        head.set(|_| HeadState::Busy);
        Self(Arc::clone(head))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.set(|_| HeadState::Idle);
    }
}

/// An answer's body; its request counts as being answered until it is sent.
struct Counted {
    body: Body,
    _busy: Busy,
}

impl HttpBody for Counted {
    type Data = <Body as HttpBody>::Data;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Infallible>>> {
        Pin::new(&mut self.get_mut().body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A stream that tells when a head's first byte comes.
struct Timed {
    stream: TcpStream,
    head: Arc<HeadTimer>,
}

impl AsyncRead for Timed {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buf.filled().len();
        let read = Pin::new(&mut this.stream).poll_read(cx, buf);
        if buf.filled().len() > before {
            this.head.begun.send_if_modified(|begun| !std::mem::replace(begun, true));
            this.head.set(|state| match state {
                HeadState::Idle => HeadState::Reading(Instant::now()),
                HeadState::Reading(_) | HeadState::Busy => state,
            });
        }
        read
    }
}

impl AsyncWrite for Timed {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(cx, bufs)
    }
}
