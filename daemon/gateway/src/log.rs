//! A request's log, as far as it has come from the daemon.
//!
//! **Owns** the entries, shared by all readers of a request. **Never** holds more than one request can produce, and never makes
//! the connection to the daemon wait for a slow client.

use std::sync::{Arc, Mutex, PoisonError};

use pagedd_core::RequestId;
use pagedd_wire::gateway::Entry;
use tokio::sync::watch;

/// What the daemon said of an attached request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Attached {
    /// The key that made it.
    pub key: Option<u32>,
    /// The encoded [`Context`](crate::render::Context).
    pub context: Vec<u8>,
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Unix seconds of its admission.
    pub created: u64,
    /// Choices.
    pub n: u32,
    /// Entries that the log had then.
    pub entries: u64,
    /// It does not run: its model had no room for it then.
    pub held: bool,
}

/// How far a log has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mark {
    /// The daemon was asked, and has not answered.
    Asked,
    /// `[0, entries)` is here, and more may come.
    Open {
        /// How many.
        entries: u64,
    },
    /// All `[0, entries)` are here.
    Ended {
        /// How many.
        entries: u64,
    },
    /// The daemon knows no such request of this tenant.
    NotFound,
}

/// An entry is missing: the daemon must be asked again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gap {
    /// First entry that is missing.
    pub from: u64,
}

/// One request's log.
#[derive(Debug)]
pub struct Log {
    id: RequestId,
    inner: Mutex<Inner>,
    mark: watch::Sender<Mark>,
}

#[derive(Debug, Default)]
struct Inner {
    attached: Option<Arc<Attached>>,
    entries: Vec<Entry>,
    /// The answer to an `Attach` is still to come; entries before it belong to an earlier one.
    asked: bool,
    ended: bool,
}

impl Log {
    /// A log that the daemon is being asked for.
    #[must_use]
    pub fn new(id: RequestId) -> Self {
        let inner = Mutex::new(Inner { asked: true, ..Inner::default() });
        Self { id, inner, mark: watch::Sender::new(Mark::Asked) }
    }

    /// Whose.
    #[must_use]
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// Tells of every change of the mark.
    #[must_use]
    pub fn marks(&self) -> watch::Receiver<Mark> {
        self.mark.subscribe()
    }

    /// How far it has come.
    #[must_use]
    pub fn mark(&self) -> Mark {
        *self.mark.borrow()
    }

    /// What the daemon said of the request.
    #[must_use]
    pub fn attached(&self) -> Option<Arc<Attached>> {
        self.lock().attached.clone()
    }

    /// At most `limit` entries from `from` on.
    #[must_use]
    pub fn read(&self, from: u64, limit: usize) -> Vec<Entry> {
        let inner = self.lock();
        let rest = usize::try_from(from).ok().and_then(|from| inner.entries.get(from..)).unwrap_or_default();
        rest[..rest.len().min(limit)].to_vec()
    }

    /// The daemon answered.
    pub fn set_attached(&self, attached: Attached) {
        let mut inner = self.lock();
        inner.asked = false;
        inner.attached.get_or_insert_with(|| Arc::new(attached));
        self.publish(&inner);
    }

    /// The daemon knows no such request.
    pub fn set_not_found(&self) {
        self.mark.send_replace(Mark::NotFound);
    }

    /// Adds `[from, from + entries.len())`, as far as it is new.
    ///
    /// # Errors
    /// [`Gap`]: nothing was added, and the log counts as asked for again.
    pub fn append(&self, from: u64, entries: Vec<Entry>) -> Result<(), Gap> {
        let mut inner = self.lock();
        if inner.ended || inner.asked {
            return Ok(());
        }
        let have = inner.entries.len() as u64;
        let Some(known) = have.checked_sub(from) else {
            inner.asked = true;
            return Err(Gap { from: have });
        };
        let known = usize::try_from(known).unwrap_or(usize::MAX);
        inner.entries.extend(entries.into_iter().skip(known));
        inner.ended = matches!(inner.entries.last(), Some(Entry::End { .. }));
        self.publish(&inner);
        Ok(())
    }

    fn publish(&self, inner: &Inner) {
        let entries = inner.entries.len() as u64;
        let mark = if inner.ended { Mark::Ended { entries } } else { Mark::Open { entries } };
        self.mark.send_replace(mark);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(token: u32) -> Entry {
        Entry::Token { choice: 0, token }
    }

    fn attached(entries: u64) -> Attached {
        Attached { key: None, context: Vec::new(), prompt_tokens: 1, created: 0, n: 1, entries, held: false }
    }

    #[test]
    fn entries_that_came_before_are_left_out_and_a_gap_is_told() {
        let log = Log::new(RequestId([0; 16]));
        log.append(5, vec![token(9)]).unwrap();
        assert_eq!(log.mark(), Mark::Asked);
        log.set_attached(attached(0));
        log.append(0, vec![token(0), token(1)]).unwrap();
        log.append(1, vec![token(1), token(2)]).unwrap();
        assert_eq!(log.read(0, 9), [token(0), token(1), token(2)]);
        assert_eq!(log.append(4, vec![token(4)]), Err(Gap { from: 3 }));
        log.append(4, vec![token(4)]).unwrap();
        assert_eq!(log.mark(), Mark::Open { entries: 3 });
        log.set_attached(attached(5));
        log.append(3, vec![token(3), Entry::End { cached_tokens: 0 }]).unwrap();
        assert_eq!(log.mark(), Mark::Ended { entries: 5 });
        assert_eq!(log.read(3, 1), [token(3)]);
        assert!(log.read(5, 1).is_empty() && log.read(u64::MAX, 1).is_empty());
    }
}
