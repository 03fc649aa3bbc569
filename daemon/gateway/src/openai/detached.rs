//! What a client is told whose answer breaks off while its request goes on: where to read the rest.
//!
//! **Owns** the words and their JSON, in the last event of a stream and beside the error object of an answer that did not come. It is no
//! error: nothing of the request is lost.

use pagedd_core::RequestId;
use pagedd_wire::gateway::Parting;
use serde::Serialize;

/// The way to the rest.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Detached {
    /// Of the request, as in the header `pagedd-request-id`.
    id: String,
    /// Of the last event that was sent; 0 before the first. For the header `Last-Event-ID`.
    last_event_id: u64,
    /// Where the events after it are.
    path: String,
    /// The same for people.
    message: String,
}

impl Detached {
    /// Of a stream whose last event was `last`; `None` where the request has ended with its tenant.
    #[must_use]
    pub fn stream(request: RequestId, last: u64, parting: Parting) -> Option<Self> {
        let path = format!("/v1/requests/{request}/stream");
        let how = format!("go on with GET {path} and the header Last-Event-ID: {last}");
        Self::new(request, last, path, parting, &how)
    }

    /// Of an answer that was to come whole; `None` as for a stream.
    #[must_use]
    pub fn whole(request: RequestId, parting: Parting) -> Option<Self> {
        let path = format!("/v1/requests/{request}/stream");
        Self::new(request, 0, path, parting, &format!("ask again with GET /v1/requests/{request}"))
    }

    fn new(
        request: RequestId,
        last_event_id: u64,
        path: String,
        parting: Parting,
        how: &str,
    ) -> Option<Self> {
        let message = match parting {
            Parting::Restarting => format!("the server is restarting; the request goes on: {how}"),
            Parting::Moved { port } => {
                format!("this tenant has moved to port {port}; the request goes on: {how} on that port")
            }
            Parting::Restored => {
                format!(
                    "the server goes back to a checkpoint; the request goes on if it was running then: {how}"
                )
            }
            Parting::Removed => return None,
        };
        Some(Self { id: request.to_string(), last_event_id, path, message })
    }

    /// In one line.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }
}
