//! What a gateway that was taken over would try, asked for by a test, from inside its confinement.
//!
//! **Owns** the way there, in test builds alone. **Never** part of a release.

use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::{Request, Response};
use pagedd_host::attack::{Attempt, Targets, run};
use serde::{Deserialize, Serialize};

use crate::body::Body;

/// Where it is asked for.
pub(crate) const PATH: &str = "/attacks";

/// As a test names them.
#[derive(Deserialize)]
struct WireTargets {
    files: Vec<String>,
    sockets: Vec<String>,
    names: Vec<String>,
    ports: Vec<u16>,
    processes: Vec<(u32, u64)>,
}

#[derive(Serialize)]
struct WireAttempt {
    what: String,
    errno: Option<i32>,
    refused: bool,
}

/// Tries everything at what the body names, and tells what came of it.
pub(crate) async fn answer(request: Request<Incoming>) -> Response<Body> {
    let body =
        request.into_body().collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    let said = match serde_json::from_slice(&body) {
        Ok(WireTargets { files, sockets, names, ports, processes }) => {
            let targets = Targets { files, sockets, names, ports, processes };
            let tried = tokio::task::spawn_blocking(move || run(&targets)).await.unwrap_or_default();
            let shown = |attempt: Attempt| WireAttempt {
                refused: attempt.refused(),
                what: attempt.what,
                errno: attempt.errno,
            };
            serde_json::to_vec(&tried.into_iter().map(shown).collect::<Vec<_>>()).unwrap_or_default()
        }
        Err(error) => error.to_string().into_bytes(),
    };
    Response::new(Body::whole(Bytes::from(said)))
}
