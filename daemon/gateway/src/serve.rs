//! A tenant's gateway from its first connection to its last.
//!
//! **Owns** the accept loop and the end of the process. **Never** closes the port: it is the daemon's, and what nobody accepts
//! waits in its queue for the next gateway.

use std::io;
use std::net::TcpListener as StdListener;
use std::os::unix::net::UnixStream as StdSocket;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use tokio::net::{TcpListener, UnixStream};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

use crate::admit::Bodies;
use crate::app::{App, Settings, Standing};
use crate::connection;
use crate::link::{Link, Phase};
use crate::metrics::Metrics;
use crate::text::Text;

/// Threads that parse, render and tokenise: a long prompt must not hold up the short ones.
const WORKERS: usize = 2;
/// How long an idle one of them stays.
const WORKER_IDLE: Duration = Duration::from_secs(10);
/// Pause after a connection could not be accepted, for example for want of fds.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// How long connections wait in the backlog for the daemon's first word, so that the first client after a fork is not turned
/// away by a gateway that knows nothing yet.
const FIRST_WORD: Duration = Duration::from_secs(1);
/// Connections before the daemon has said how many there may be.
const FIRST_CONNECTIONS: u32 = 64;

/// What a gateway is made of.
#[derive(Debug)]
pub struct Gateway {
    /// The tenant's name.
    pub tenant: String,
    /// The tenant's port.
    pub listener: StdListener,
    /// The connection to the daemon.
    pub socket: StdSocket,
    /// Tokenizer and chat template.
    pub text: Arc<Text>,
    /// Times and counts.
    pub settings: Settings,
}

impl Gateway {
    /// Serves until the daemon ends it, on this thread and a few more.
    ///
    /// # Errors
    /// The sockets cannot be used.
    pub fn run(self) -> io::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .max_blocking_threads(WORKERS)
            .thread_keep_alive(WORKER_IDLE)
            .thread_name("tokenize")
            .build()?;
        let served = runtime.block_on(self.serve());
        // A tokenisation that nobody waits for any more does not hold the process.
        runtime.shutdown_background();
        served
    }

    /// Serves until the daemon ends it.
    ///
    /// # Errors
    /// The sockets cannot be used.
    pub async fn serve(self) -> io::Result<()> {
        let Self { tenant, listener, socket, text, settings } = self;
        listener.set_nonblocking(true)?;
        socket.set_nonblocking(true)?;
        let listener = TcpListener::from_std(listener)?;
        let socket = UnixStream::from_std(socket)?;
        let link = Link::new();
        let metrics = Arc::new(Metrics::new(&tenant));
        let bodies = Arc::new(Bodies::default());
        let app = Arc::new(App { link: Arc::clone(&link), text, metrics, bodies, settings });
        let mut phases = link.phases();
        let mut connections = JoinSet::new();
        let mut linked = tokio::spawn(Arc::clone(&link).run(socket));
        tokio::select! {
            _ = phases.wait_for(|phase| *phase == Phase::Ending) => {}
            () = accept(&app, &listener, &mut connections) => {}
            // A fault in it: nobody would be heard any more, and the port be held for ever.
            Err(fault) = &mut linked => return Err(io::Error::other(fault)),
        }
        drop(listener);
        let open = connections.len();
        let closing = async { while connections.join_next().await.is_some() {} };
        if timeout(settings.ending, closing).await.is_err() {
            warn!(tenant, "connections that do not read their last event are cut");
        }
        info!(tenant, connections = open, "gateway ends");
        linked.abort();
        Ok(())
    }
}

/// Accepts for ever.
async fn accept(app: &Arc<App>, listener: &TcpListener, connections: &mut JoinSet<()>) {
    let count = Arc::new(AtomicU32::new(0));
    if timeout(FIRST_WORD, app.link.welcomed()).await.is_err() {
        warn!("the daemon says nothing");
    }
    loop {
        let stream = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    warn!(%error, "a connection could not be accepted");
                    sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            },
            Some(_) = connections.join_next() => continue,
        };
        let most = app.link.welcome().map_or(FIRST_CONNECTIONS, |welcome| welcome.max_connections);
        let open = count.load(Ordering::Relaxed);
        if open >= most.saturating_add(app.settings.spare_connections) {
            continue;
        }
        let standing = if open < most { Standing::Within } else { Standing::Beyond };
        let counted = Open::new(app, &count);
        let app = Arc::clone(app);
        connections.spawn(async move {
            let _counted = counted;
            connection::serve(app, stream, standing).await;
        });
    }
}

/// One connection that is open.
struct Open {
    count: Arc<AtomicU32>,
    metrics: Arc<Metrics>,
}

impl Open {
    fn new(app: &Arc<App>, count: &Arc<AtomicU32>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        app.metrics.connected();
        Self { count: Arc::clone(count), metrics: Arc::clone(&app.metrics) }
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
        self.metrics.disconnected();
    }
}
