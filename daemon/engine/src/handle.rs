//! The way into an engine: a bounded inbox.

use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use pagedd_core::{FinishReason, RequestId, TenantId};
use pagedd_sched::{NewRequest, Restored, ShareError, ShareSpec, Tuning};

/// Called once, on the engine thread, with the answer. It may not block.
pub type Reply<T> = Box<dyn FnOnce(T) + Send>;

/// A request on its way in, with what the journal wants to have beside it.
pub struct Submission<T> {
    /// What to run.
    pub request: NewRequest,
    /// Returned through [`crate::Journal::admitted`] or [`crate::Journal::refused`].
    pub ticket: T,
}

/// Where a restored request is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Placed {
    /// In the scheduler, or it has ended.
    Taken,
    /// With the engine, until its tenant has a share.
    Waits,
}

/// What an engine can be told.
pub enum Command<T> {
    /// Admit a request.
    Submit(Box<Submission<T>>),
    /// Go on with a request that an earlier engine had admitted: those are sent before any is submitted, the oldest first unless one
    /// is under suspicion. Where its tenant has no share yet it waits for it. The journal is told only what ends.
    Restore {
        /// What was admitted, and what it has emitted.
        restored: Box<Restored>,
        /// Told where it is now.
        reply: Reply<Placed>,
    },
    /// Keep a request that an earlier engine had admitted and that is too large for this one: it can be cancelled, and its choices finished;
    /// what is left of it where the engine is stopped stays in the journal. Where no worker can be had it ends as all others do.
    Hold(Box<Restored>),
    /// Its client left, or an operator ended it.
    Cancel(RequestId),
    /// End one choice, because its text is complete.
    FinishChoice {
        /// Which request.
        request: RequestId,
        /// Which choice.
        choice: u32,
        /// Why.
        reason: FinishReason,
    },
    /// Add a tenant or change its terms: all of them, or none where the share is refused.
    SetTenant {
        /// Which.
        tenant: TenantId,
        /// Floor and ceiling.
        share: ShareSpec,
        /// Whether its sequences guess what they say next; `None` is as the engine was made.
        prompt_lookup: Option<bool>,
        /// Told when it is in force, or why it is not.
        reply: Reply<Result<(), ShareError>>,
    },
    /// Cancel all that a tenant has and forget it.
    RemoveTenant {
        /// Which.
        tenant: TenantId,
        /// Told when its blocks are back or on their way.
        reply: Reply<()>,
    },
    /// Change what may change while the engine runs, from its next step on.
    Tune(Tuning),
    /// Finish the turn and end the thread. Requests that are left stay in the journal.
    Stop,
}

/// The inbox is full: the engine is far behind, or its worker is being replaced. The command was not taken.
#[derive(thiserror::Error, Clone, Copy, PartialEq, Eq, Debug)]
#[error("the engine's inbox is full")]
pub struct InboxFull;

/// The cloneable way in. It outlives the engine: then everything is [`InboxFull`].
pub struct EngineHandle<T> {
    sender: SyncSender<Command<T>>,
}

impl<T> Clone for EngineHandle<T> {
    fn clone(&self) -> Self {
        Self { sender: self.sender.clone() }
    }
}

impl<T> EngineHandle<T> {
    /// Puts a command into the inbox, without waiting.
    ///
    /// # Errors
    /// [`InboxFull`]; the command comes back.
    pub fn send(&self, command: Command<T>) -> Result<(), (InboxFull, Command<T>)> {
        self.sender.try_send(command).map_err(|e| match e {
            TrySendError::Full(command) | TrySendError::Disconnected(command) => (InboxFull, command),
        })
    }
}

/// The engine's end.
pub struct Inbox<T> {
    pub(crate) receiver: Receiver<Command<T>>,
}

impl<T> Inbox<T> {
    /// The commands that wait, without waiting for more.
    pub fn try_iter(&self) -> impl Iterator<Item = Command<T>> + '_ {
        self.receiver.try_iter()
    }
}

/// An inbox for `bound` commands.
#[must_use]
pub fn inbox<T>(bound: usize) -> (EngineHandle<T>, Inbox<T>) {
    let (sender, receiver) = sync_channel(bound);
    (EngineHandle { sender }, Inbox { receiver })
}
